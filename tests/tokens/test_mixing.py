"""A mix has exact shares, includes every row of every source, and any row is found in O(1)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.text import Document
from firth.tokens import (
    MixConfig,
    MixedDataset,
    MixedShards,
    PackedDataset,
    SequenceTemplate,
    ShardSet,
    Tokenizer,
    open_shards,
    prepare,
    train_tokenizer,
)
from firth.tokens.mixing import MIX_WINDOW_ROWS, rows_per_window

TEXTS = {"a": 400, "b": 100, "c": 25}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the heron waits at the river"] * 3, "byte-bpe", 280)


@pytest.fixture(scope="module")
def shards(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ShardSet]:
    folder = tmp_path_factory.mktemp("mix")
    for name, size in TEXTS.items():
        documents = [Document(f"{name} heron {i} of {size} waits at the river", "x") for i in range(size)]
        prepare(documents, tokenizer, folder / name, held_out_share=0.1)
    return {name: open_shards(folder / name) for name in TEXTS}


def mixed(shards: dict[str, ShardSet], spec: MixConfig, bits: tuple[str, ...] = ("word_start",)) -> MixedDataset:
    sources = {
        name: PackedDataset(part.train, 32, SequenceTemplate((1,), (2,)), 0, seed=7, token_bits=bits)
        for name, part in shards.items()
    }
    return MixedDataset(sources, spec, seed=3)


@pytest.mark.parametrize(
    ("spec", "shares"),
    [
        (MixConfig(shares={"a": 5, "b": 3, "c": 2}), [0.5, 0.3, 0.2]),
        (MixConfig(temperature=0.0), [0.334, 0.333, 0.333]),
    ],
)
def test_every_window_has_the_shares(shards: dict[str, ShardSet], spec: MixConfig, shares: list[float]) -> None:
    source = mixed(shards, spec)
    for window in (0, 1, 50):
        found, _ = source.locate_rows(np.arange(MIX_WINDOW_ROWS) + window * MIX_WINDOW_ROWS)
        assert (np.bincount(found) / MIX_WINDOW_ROWS).tolist() == pytest.approx(shares)
        assert not np.array_equal(found, np.sort(found))
    assert [share.share for share in source.share_table(1000)] == pytest.approx(shares)


def test_temperature_and_epochs(shards: dict[str, ShardSet]) -> None:
    tokens = {name: part.num_tokens for name, part in shards.items()}
    rows = {"a": 80, "b": 20, "c": 5}
    weights = MixConfig(temperature=0.3).row_weights(tokens, rows)
    assert weights["a"] / weights["c"] == pytest.approx((tokens["a"] / tokens["c"]) ** 0.3)
    assert MixConfig().row_weights(tokens, rows) == pytest.approx({"a": 80 / 105, "b": 20 / 105, "c": 5 / 105})
    assert MixConfig(epochs={"a": 1, "b": 2, "c": 8}).row_weights(tokens, rows) == {"a": 0.5, "b": 0.25, "c": 0.25}
    source = mixed(shards, MixConfig(epochs={"a": 1, "b": 2, "c": 8}))
    assert [round(share.epochs) for share in source.share_table(source.num_rows)] == [1, 2, 8]


def test_each_source_goes_through_its_own_rows_in_order(shards: dict[str, ShardSet]) -> None:
    source = mixed(shards, MixConfig(temperature=0.5))
    which, index = source.locate_rows(np.arange(5 * MIX_WINDOW_ROWS))
    for s in range(3):
        assert sorted(index[which == s].tolist()) == list(range(int((which == s).sum())))


def test_rows_do_not_depend_on_the_other_rows_read(shards: dict[str, ShardSet]) -> None:
    source = mixed(shards, MixConfig(shares={"a": 5, "b": 3, "c": 2}))
    together = source.get_rows(np.arange(2000, 2100))
    again = mixed(shards, MixConfig(shares={"a": 5, "b": 3, "c": 2}))
    for g in (2000, 2017, 2099):
        alone = again.get_rows(np.array([g]))
        for name, field in alone._asdict().items():
            expected = getattr(together, name)
            assert (field is None) == (expected is None), name
            if field is not None:
                assert np.array_equal(field[0], expected[g - 2000]), name
    which, index = source.locate_rows(np.array([2017]))
    own = source.datasets[which[0]].get_rows(index)
    assert np.array_equal(own.input_ids[0], together.input_ids[17])
    assert together.stream_index.tolist() == list(range(2000, 2100))


def test_rows_of_different_sources_have_different_indices(shards: dict[str, ShardSet]) -> None:
    source = mixed(shards, MixConfig())
    rows = source.get_rows(np.arange(20 * MIX_WINDOW_ROWS))
    assert rows.row_index is not None
    texts: dict[int, bytes] = {}
    for number, tokens in zip(rows.row_index.tolist(), rows.input_ids, strict=True):
        assert texts.setdefault(number, tokens.tobytes()) == tokens.tobytes()
    assert sorted(texts) == list(range(sum(s.num_rows for s in source.datasets)))
    assert source.num_rows == len(texts)


def test_every_source_has_at_least_one_row_per_window() -> None:
    assert rows_per_window([0.9999, 0.0001]).tolist() == [999, 1]
    assert rows_per_window([1.0, 1e-6]).tolist() == [999, 1]
    assert rows_per_window([0.5, 0.5, 1e-9, 1e-9, 1e-9]).tolist() == [498, 499, 1, 1, 1]
    with pytest.raises(UserError, match="3 sources, but a window has 2 rows"):
        rows_per_window([0.4, 0.3, 0.3], window_rows=2)
    assert rows_per_window([0.5, 0.4996, 0.0004]).sum() == MIX_WINDOW_ROWS
    assert rows_per_window([1.0]).tolist() == [MIX_WINDOW_ROWS]


def test_mistakes(shards: dict[str, ShardSet], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"names 'd', which is not a source. There are: a, b, c"):
        mixed(shards, MixConfig(shares={"a": 1, "b": 1, "c": 1, "d": 1}))
    with pytest.raises(UserError, match="no value for the source 'c'"):
        mixed(shards, MixConfig(shares={"a": 1, "b": 1}))
    with pytest.raises(UserError, match=r"mix.shares and mix.temperature are both given"):
        MixConfig(shares={"a": 1}, temperature=0.3).check()
    with pytest.raises(UserError, match=r"mix.temperature is 1.5"):
        MixConfig(temperature=1.5).check()
    with pytest.raises(UserError, match=r"a=0 must be more than 0"):
        MixConfig(shares={"a": 0}).check()
    other = train_tokenizer(["an otter swims"] * 3, "byte-bpe", 270)
    prepare([Document("an otter swims", "x")], other, tmp_path / "d", held_out_share=0)
    with pytest.raises(UserError, match=r"d \(d\) was made with another tokenizer than .*a \(a\)"):
        MixedShards({**shards, "d": open_shards(tmp_path / "d")})


@pytest.mark.parametrize("spec", [MixConfig(), MixConfig(epochs={"a": 1, "b": 2, "c": 8})])
def test_an_epoch_of_the_mix_has_every_row_as_often_as_configured(shards: dict[str, ShardSet], spec: MixConfig) -> None:
    source = mixed(shards, spec)
    for epoch in (0, 3):
        rows = source.get_rows(np.arange(source.num_rows) + epoch * source.num_rows)
        assert rows.row_index is not None
        times = np.bincount(rows.row_index)
        epochs = [spec.epochs.get(name, 1) for name in "abc"]
        assert times.tolist() == np.repeat(epochs, [s.num_rows for s in source.datasets]).tolist()


def test_a_small_source_is_read_to_its_end_before_it_is_read_again(shards: dict[str, ShardSet]) -> None:
    source = mixed(shards, MixConfig(shares={"a": 1, "b": 1, "c": 8}))
    which, index = source.locate_rows(np.arange(300))
    for s in range(3):
        assert index[which == s].tolist() == list(range(int((which == s).sum())))
