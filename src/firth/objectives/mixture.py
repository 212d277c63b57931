"""Mixtures: several objectives in one run.

Each row (or each step) is drawn for one of the parts by weight; UniLM and UL2 are such mixtures. All parts read the
same rows of tokens, and their batches are merged into one of a fixed shape: as wide as the widest part, with padding
and label -100 elsewhere. A field that one part leaves None and another needs is filled with its default.

Shapes: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from firth.core.errors import UserError
from firth.objectives.base import RowLayout
from firth.objectives.batch import IGNORE_INDEX, Batch
from firth.objectives.causal import CLM, BiLM, PermutationLM, PrefixLM, SequenceAutoencoder
from firth.objectives.clm_then_mlm import CLMThenMLM
from firth.objectives.counter_rng import CounterRNG
from firth.objectives.masked import MLM
from firth.objectives.masked_next_token import MaskedNextToken, MLMAndCLM, RTDMLMAndCLM
from firth.objectives.seq2seq import (
    BARTDenoising,
    DecoderDenoising,
    EncoderDecoderLM,
    SalientSpanCorruption,
    SpanCorruption,
    SpanCorruptionAndMLM,
)
from firth.tokens import Rows, SequenceTemplate, Vocabulary

SingleObjective = (
    CLM
    | PrefixLM
    | SequenceAutoencoder
    | BiLM
    | EncoderDecoderLM
    | PermutationLM
    | MLM
    | MaskedNextToken
    | MLMAndCLM
    | RTDMLMAndCLM
    | CLMThenMLM
    | SpanCorruption
    | SpanCorruptionAndMLM
    | DecoderDenoising
    | SalientSpanCorruption
    | BARTDenoising
)


@dataclass(frozen=True)
class WeightedObjective:
    objective: SingleObjective
    weight: float = 1.0


@dataclass(frozen=True)
class Mixture:
    """Draw an objective by weight for each row, or with `sample_per="batch"` for each step.

    All parts read the same rows, so they must have the same template (special tokens around a document).
    """

    parts: tuple[WeightedObjective, ...]
    sample_per: Literal["row", "batch"] = "row"

    def __post_init__(self) -> None:
        if not self.parts or not all(0 < part.weight < float("inf") for part in self.parts):
            raise UserError("objective.parts: a mixture needs objectives, each with a weight of more than 0.")
        if not self.architectures:
            raise UserError("objective.parts: no architecture can be trained with all of these objectives.")
        if len({part.objective.row_layout for part in self.parts}) > 1:
            raise UserError("objective.parts: texts and pairs of texts cannot be mixed in one run.")
        if len(self.parts) > 1 and any(len(part.objective.phases) > 1 for part in self.parts):
            raise UserError("objective.parts: CLMThenMLM is an objective of its own, and no part of a mixture.")
        kinds = {(part.objective.extras, isinstance(part.objective, BiLM)) for part in self.parts}
        if len(kinds) > 1:
            raise UserError("objective.parts: objectives that need different heads of the model cannot be mixed.")

    @property
    def architectures(self) -> tuple[str, ...]:
        first, *others = (part.objective.architectures for part in self.parts)
        return tuple(name for name in first if all(name in other for other in others))

    @property
    def follows_progress(self) -> bool:
        return any(part.objective.follows_progress for part in self.parts)

    @property
    def phases(self) -> tuple[tuple[float, float], ...]:
        return self.parts[0].objective.phases

    @property
    def row_layout(self) -> RowLayout:
        return self.parts[0].objective.row_layout

    @property
    def token_flags(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(flag for part in self.parts for flag in part.objective.token_flags))

    @property
    def extras(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(extra for part in self.parts for extra in part.objective.extras))

    @property
    def adds_bos(self) -> bool:
        return self.parts[0].objective.adds_bos

    def source_length(self, length: int) -> int:
        return min(part.objective.source_length(length) for part in self.parts)

    def max_documents(self, source_length: int) -> int | None:
        limits = [part.objective.max_documents(source_length) for part in self.parts]
        return min((limit for limit in limits if limit is not None), default=None)

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        for part in self.parts:
            part.objective.check(vocab, source_length)
        self.build_template(vocab)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        templates = {part.objective.build_template(vocab) for part in self.parts}
        if len(templates) > 1:
            raise UserError("objective.parts: objectives with different special tokens around a text cannot be mixed.")
        return templates.pop()

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        total = sum(part.weight for part in self.parts)
        return {f"part {i + 1}": part.weight / total for i, part in enumerate(self.parts)}

    def mask_rate_at(self, progress: float) -> float | None:
        rates = (part.objective.mask_rate_at(progress) for part in self.parts)
        return next((rate for rate in rates if rate is not None), None)

    def sample_parts(self, rng: CounterRNG) -> np.ndarray:
        """Return the part that each row belongs to (B,)."""
        if self.sample_per == "batch":
            rng = replace(rng, index=rng.index if rng.step is None else rng.step)
        upto = np.cumsum([part.weight for part in self.parts])
        return np.searchsorted(upto[:-1] / upto[-1], rng.uniform("part", 1)[:, 0], side="right")

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        part_B = self.sample_parts(rng)
        rows_by_part = [np.flatnonzero(part_B == i) for i in range(len(self.parts))]
        batches = []
        for part, index in zip(self.parts, rows_by_part, strict=True):
            index = index if len(index) else np.zeros(1, np.int64)  # a part without rows still gives its shapes
            subset = Rows(*(None if x is None else x[index] for x in rows))  # type: ignore[arg-type]
            step = None if rng.step is None else rng.step[index]
            batches.append(part.objective(subset, replace(rng, index=rng.index[index], step=step), vocab))
        return merge_batches(batches, rows_by_part, vocab.pad, is_causal="decoder" in self.architectures)


Objective = SingleObjective | Mixture


def merge_batches(batches: list[Batch], row_indices: list[np.ndarray], pad_token_id: int, is_causal: bool) -> Batch:
    """Merge batches with different fields and widths; rows `row_indices[i]` of the result come from `batches[i]`.

    A batch whose `row_indices` are empty only contributes its shapes.
    """
    batches = [fill_default_fields(batch, batches, is_causal) for batch in batches]
    B = sum(map(len, row_indices))
    fill = {
        "input_ids": pad_token_id,
        "decoder_input_ids": pad_token_id,
        "document_ids": -1,
        "labels": IGNORE_INDEX,
        "encoder_labels": IGNORE_INDEX,
        "generator_labels": IGNORE_INDEX,
    }
    fields = {}
    for name in Batch._fields:
        arrays = [getattr(batch, name) for batch in batches]
        if arrays[0] is None:
            continue
        shape = np.max([a.shape[1:] for a in arrays], axis=0)
        merged = np.full((B, *shape), fill.get(name, 0), arrays[0].dtype)
        for array, index in zip(arrays, row_indices, strict=True):
            if len(index):
                merged[np.ix_(index, *map(np.arange, array.shape[1:]))] = array
                if name == "decoder_document_ids":  # padding must attend to something: the row's last document
                    merged[index, array.shape[1] :] = array[:, -1:]
        fields[name] = merged
    return Batch(**fields)


def fill_default_fields(batch: Batch, others: list[Batch], is_causal: bool) -> Batch:
    """Return the batch with the default of each field that it leaves None and one of `others` has."""
    position_BT = np.broadcast_to(np.arange(batch.input_ids.shape[1]), batch.input_ids.shape)
    target_shape = batch.labels.shape if batch.labels is not None else batch.input_ids.shape
    defaults = {
        "attention_rank": position_BT if is_causal else np.zeros_like(batch.input_ids),
        "token_type_ids": np.zeros(batch.input_ids.shape, np.int32),
        "target_positions": np.broadcast_to(np.arange(target_shape[-1]), target_shape),
        "encoder_target_positions": np.zeros((len(batch.input_ids), 1), np.int64),
        "encoder_labels": np.full((len(batch.input_ids), 1), IGNORE_INDEX, batch.input_ids.dtype),
    }
    used = {name for name in Batch._fields if any(getattr(other, name) is not None for other in others)}
    return batch._replace(**{name: defaults[name] for name in used if getattr(batch, name) is None})
