"""Mixing: several shards as one stream of rows, each source with its own share.

Drawing the source of each row at random gives the right shares only on average, and the draw has to be replayed to
resume. Here rows come in windows. In each window every source has exactly its number of slots; a seeded permutation
(`permutation.py`) scatters the slots over the window. Row g therefore finds its source, and its index in the stream of
that source, from (seed, g) alone: which window, which slot, and how many slots of that source came before.
"""

# Shapes: S sources, B rows of a batch, T positions of a row.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from firth.core.errors import UserError, did_you_mean, quote
from firth.core.hashing import hash_uint64
from firth.tokens.dataset import RowDataset, Rows
from firth.tokens.permutation import permute_indices
from firth.tokens.shards import Shards, ShardSet
from firth.tokens.tokenizer import Tokenizer

MIX_WINDOW_ROWS = 1000  # rows of a window, in which every source has exactly its share


@dataclass(frozen=True)
class MixConfig:
    """How much of each source is read. Set at most one field. Default: every row of every source once per epoch.

    - `shares`: share of the rows of each source, {"a": 0.7, "b": 0.3}; any positive weights.
    - `temperature`: weight a source by its tokens to this power, so that small sources are read more often: 0.7 in
      multilingual BERT, 0.3 in XLM-R (Conneau et al. 2020, section 3.1). 1: by size; 0: equal.
    - `epochs`: how often each source is read in one epoch of the mix.
    """

    shares: dict[str, float] = field(default_factory=dict)
    temperature: float | None = None
    epochs: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise an error for contradictory or invalid fields, before any shards are opened."""
        given = [name for name in ("shares", "temperature", "epochs") if getattr(self, name) not in (None, {})]
        if len(given) > 1:
            raise UserError(f"mix.{given[0]} and mix.{given[1]} are both given. Choose one.")
        if self.temperature is not None and not 0 <= self.temperature <= 1:
            raise UserError(f"mix.temperature is {self.temperature:g}, and must be from 0 (equal) to 1 (by size).")
        for name in ("shares", "epochs"):
            for source, value in getattr(self, name).items():
                if not 0 < value < np.inf:
                    raise UserError(
                        f"mix.{name}: {source}={value:g} must be more than 0. To exclude a source, do not name it."
                    )

    def restrict_to(self, source_names: Collection[str]) -> MixConfig:
        """Return the mix for some of the sources."""
        shares, epochs = ({k: v for k, v in given.items() if k in source_names} for given in (self.shares, self.epochs))
        return replace(self, shares=shares, epochs=epochs)

    def row_weights(self, num_tokens: Mapping[str, int], num_rows: Mapping[str, int]) -> dict[str, float]:
        """Return the share of the rows of each source."""
        named = self.shares or self.epochs
        for name in named:
            if name not in num_tokens:
                raise UserError(f"The mix names {quote(name)}, which is not a source. {did_you_mean(name, num_tokens)}")
        if missing := [name for name in num_tokens if named and name not in named]:
            field_name = "shares" if self.shares else "epochs"
            raise UserError(f"mix.{field_name} has no value for the source {quote(missing[0])}. Add one.")
        if self.shares:
            weight = dict(self.shares)
        elif self.temperature is not None:
            weight = {name: size**self.temperature for name, size in num_tokens.items()}
        else:
            weight = {name: num_rows[name] * self.epochs.get(name, 1.0) for name in num_rows}
        total = sum(weight.values())
        return {name: weight[name] / total for name in num_tokens}


def rows_per_window(weights: Sequence[float], window_rows: int = MIX_WINDOW_ROWS) -> np.ndarray:
    """Number of rows of each source in a window: the shares, rounded to add up to the window, at least one each.

    >>> rows_per_window([0.7, 0.3]).tolist(), rows_per_window([1 / 3, 1 / 3, 1 / 3]).tolist()
    ([700, 300], [334, 333, 333])
    >>> rows_per_window([1.0, 1e-6]).tolist()
    [999, 1]
    """
    if len(weights) > window_rows:
        raise UserError(f"The mix has {len(weights):,} sources, but a window has {window_rows:,} rows. Merge some.")
    exact_S = np.asarray(weights) * window_rows
    count_S = np.maximum(np.floor(exact_S), 1).astype(np.int64)
    while (left := window_rows - int(count_S.sum())) > 0:
        count_S[np.argmax(exact_S - count_S)] += 1
    for _ in range(-left):  # sources that were rounded up to one row took them from the others
        count_S[np.argmax(np.where(count_S > 1, count_S - exact_S, -np.inf))] -= 1
    return count_S


def locate_slots(
    window_B: np.ndarray, slot_B: np.ndarray, rows_per_window_S: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each slot of a window (B,), and its index in the stream of that source (B,)."""
    bounds_S = np.concatenate([[0], np.cumsum(rows_per_window_S)])
    source_B = np.searchsorted(bounds_S, slot_B, side="right") - 1
    return source_B, window_B * rows_per_window_S[source_B] + slot_B - bounds_S[source_B]


class SourceShare(NamedTuple):
    """A source's part in a mix, as a line of the table."""

    source: str
    tokens: int
    rows: int
    share: float  # of the rows of the mix
    epochs: float  # how often the run reads it

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.tokens:,} tokens, {100 * self.share:.1f}% of the rows, read {self.epochs:.2f} times"
        )


class MixedDataset(RowDataset):
    """Rows of several sources; in each window every source has exactly its share, in random order.

    A window is one epoch of the mix, so that every source is read as often as `MixConfig.epochs` says. With `shares`
    or `temperature` it is `MIX_WINDOW_ROWS` rows. Each source goes through its own epochs in its own order.
    """

    def __init__(
        self, datasets: Mapping[str, RowDataset], mix_config: MixConfig, seed: int, shuffle: bool = True
    ) -> None:
        first = next(iter(datasets.values()))
        self.source_names, self.datasets = list(datasets), list(datasets.values())
        self.row_length = first.row_length
        self.template = first.template
        self.pad_id = first.pad_id
        self.token_bits = first.token_bits
        self.seed, self.shuffle = seed, shuffle
        tokens = {name: source.shards.num_tokens for name, source in datasets.items()}
        rows = {name: source.num_rows for name, source in datasets.items()}
        self.num_rows = round(sum(rows[name] * mix_config.epochs.get(name, 1.0) for name in rows))
        self.is_weighted = bool(mix_config.shares) or mix_config.temperature is not None
        self.window_rows = MIX_WINDOW_ROWS if self.is_weighted else max(self.num_rows, len(rows))
        self.rows_per_window_S = rows_per_window(list(mix_config.row_weights(tokens, rows).values()), self.window_rows)
        self.slot_bounds_S = np.concatenate([[0], np.cumsum(self.rows_per_window_S)])
        self.first_row_S = np.cumsum([0, *rows.values()])
        filled_S = np.array([source.fill_ratio for source in self.datasets])
        self.fill_ratio = float((filled_S * self.rows_per_window_S).sum() / self.window_rows)

    @property
    def words_per_row(self) -> float:
        """Mean number of words of a row: that of each source, by its share of the rows."""
        shares = (self.rows_per_window_S / self.window_rows).tolist()
        return float(sum(n * source.words_per_row for n, source in zip(shares, self.datasets, strict=True)))

    def get_rows(self, indices: np.ndarray) -> Rows:
        """Return the rows at these indices of the stream."""
        index_B = np.asarray(indices, dtype=np.int64)
        source_B, source_index_B = self.locate_rows(index_B)
        parts = {s: self.datasets[s].get_rows(source_index_B[source_B == s]) for s in np.unique(source_B).tolist()}
        merged = {
            name: merge_source_arrays(source_B, {s: getattr(p, name) for s, p in parts.items()})
            for name in Rows._fields
        }
        assert merged["row_index"] is not None
        row_index = merged["row_index"] + self.first_row_S[source_B]
        return Rows(**{**merged, "stream_index": index_B, "row_index": row_index})

    def locate_rows(self, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each row (B,), and the index of the row in the stream of that source (B,)."""
        window_B, offset_B = np.divmod(index_B, self.window_rows)
        if self.is_weighted:
            slot_B = np.empty_like(offset_B)
            for window in np.unique(window_B).tolist():
                rows = window_B == window
                slot_B[rows] = self._sequential_slots(window)[offset_B[rows]]
        else:
            slot_B = permute_indices(offset_B, self.window_rows, hash_uint64(self.seed, window_B))
        return locate_slots(window_B, slot_B, self.rows_per_window_S)

    def _sequential_slots(self, window_index: int) -> np.ndarray:
        """Return the slot of each row of a window: sources in random order, each source's slots in ascending order.

        So a source that has fewer rows than slots is read to its end before a row repeats.
        """
        slot_W = permute_indices(np.arange(self.window_rows), self.window_rows, hash_uint64(self.seed, window_index))
        by_source = np.argsort(np.searchsorted(self.slot_bounds_S, slot_W, side="right"), kind="stable")
        slot_W[by_source] = np.arange(self.window_rows)
        return slot_W

    def share_table(self, num_rows: int) -> list[SourceShare]:
        """Return the part of each source in a run of `num_rows` rows."""
        return [
            SourceShare(name, source.shards.num_tokens, source.num_rows, share, share * num_rows / source.num_rows)
            for name, source, share in zip(
                self.source_names, self.datasets, (self.rows_per_window_S / self.window_rows).tolist(), strict=True
            )
        ]


def merge_source_arrays(source_B: np.ndarray, arrays_by_source: Mapping[int, np.ndarray | None]) -> np.ndarray | None:
    """Merge an array of each source's rows into one array (B, ...); None if no source has it."""
    known = [part for part in arrays_by_source.values() if part is not None]
    if not known:
        return None
    out = np.empty((len(source_B), *known[0].shape[1:]), dtype=known[0].dtype)
    for s, part in arrays_by_source.items():
        assert part is not None, "all sources have the same fields"
        out[source_B == s] = part
    return out


@dataclass(frozen=True)
class MixedShards:
    """Several shards of one tokenizer, under the source names of a mix."""

    sources: dict[str, ShardSet]

    def __post_init__(self) -> None:
        (name, first), *others = self.sources.items()
        for other, shards in others:
            if shards.tokenizer.fingerprint != first.tokenizer.fingerprint:
                raise UserError(
                    f"{shards.folder} ({other}) was made with another tokenizer than {first.folder} ({name}). "
                    f"Prepare its text again with `firth prepare --tokenizer {first.folder / 'tokenizer'}`."
                )

    @property
    def tokenizer(self) -> Tokenizer:
        return next(iter(self.sources.values())).tokenizer

    @property
    def num_documents(self) -> int:
        return sum(shards.num_documents for shards in self.sources.values())

    @property
    def num_tokens(self) -> int:
        return sum(shards.num_tokens for shards in self.sources.values())

    @property
    def held_out(self) -> list[Shards] | None:
        """The held-out parts; None if no source has one."""
        return [shards.held_out for shards in self.sources.values() if shards.held_out is not None] or None

    @property
    def unigram_entropy(self) -> None:
        """Not defined for a mix."""
        return None
