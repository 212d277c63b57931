"""Masked next-token prediction: one model that is trained as a masked and as a causal language model (GPT-BERT).

Charpentier & Samuel 2024 ("GPT or BERT: why not both?", section 2). MLM predicts a masked token at its own position,
CLM the next token at every position. Both become one task when MLM, too, predicts at the position *before*:

    masked row   [CLS] the [MASK] sat  on    the  mat [SEP]     attention to all tokens
    labels       .     cat .      .    .     .    .   .

    causal row   [CLS] the cat    sat  on    the  mat [SEP]     attention to earlier tokens
    labels       the   cat sat    on   the   mat  [SEP] .

So each row is drawn to be masked or causal, and weights and head are the same for both. Masked rows teach the use of
both sides, causal rows give a label at every position. The model fills blanks, scores texts in both ways and writes.

The loss is the mean over all labels of a step. A causal row has 1 / rate times as many as a masked one: with a rate of
15% and half of the rows masked, 13% of the labels are those of masked rows; with 7/8 of the rows, half. The published
program gives each kind of row a GPU of its own and averages over GPUs, so that its share of rows (15/16 masked, for 10M
words) is also the share in the loss; its mask rate falls from 30% to 15%.

`MLMAndCLM` keeps the two tasks apart instead: a masked token is predicted at its own position. The input tells them
apart, since a [MASK] is in masked rows only. The result is still a masked language model, which fills blanks in any
program that knows its architecture, and that scores and writes texts from left to right.

Shapes: B rows, L positions, K target slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from firth.core.errors import UserError
from firth.objectives.base import (
    ObjectiveBase,
    build_pair_template,
    build_text_template,
    causal_labels,
    check_share,
    require_special_token,
)
from firth.objectives.batch import IGNORE_INDEX, Batch
from firth.objectives.counter_rng import CounterRNG
from firth.objectives.masked import MLM
from firth.objectives.noise_mask import is_document_start
from firth.tokens import Rows, SequenceTemplate, Vocabulary

DEFAULT_MLM = MLM()


@dataclass(frozen=True)
class MaskedNextToken(ObjectiveBase):
    """Mask a share of the rows and predict the masked tokens, from the position before each; the others are causal.

    - masked_share: share of the rows that are masked
    - mlm: mask rate, 80/10/10 and masking scheme of these rows
    - architecture: that of the model, which the recipe sets. An encoder's rows are [CLS] text [SEP], a decoder's begin
      and end with the document
    """

    masked_share: float = 0.5
    mlm: MLM = DEFAULT_MLM
    architecture: Literal["encoder", "decoder"] = "encoder"
    architectures = ("encoder", "decoder")
    label_shift: ClassVar[int] = 1  # positions from a label to its masked token

    def __post_init__(self) -> None:
        check_share("objective.masked_share", self.masked_share)
        if self.mlm.extras or self.mlm.pair != "none" or self.mlm.visibility != "all":
            raise UserError(
                "objective.mlm of masked next-token prediction has targets 'tokens', pair 'none' and visibility 'all'."
            )

    @property
    def follows_progress(self) -> bool:  # type: ignore[override]
        return self.mlm.follows_progress

    @property
    def has_both_kinds(self) -> bool:
        """Whether some rows are masked and some causal."""
        return 0 < self.masked_share < 1

    @property
    def token_flags(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.mlm.token_flags

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        name = "masked next-token prediction"
        require_special_token(vocab.mask, "mask token", name)
        return (build_pair_template if self.architecture == "encoder" else build_text_template)(vocab, name)

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        self.mlm.check_spans(source_length)

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        own = {
            name: rate for name, rate in self.mlm.expected_rates(rows).items() if name in ("masked", "random", "kept")
        }
        return {"masked_rows": self.masked_share, "masked_row_targets": self.mlm.rate, **own}

    def mask_rate_at(self, progress: float) -> float | None:
        return self.mlm.mask_rate_at(progress)

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        if self.label_shift:  # the first token of a document has no position before it, unless that is a special token
            rows = rows._replace(maskable=rows.maskable & ~is_document_start(rows.document_ids))
        is_masked_B1 = rng.uniform("masked rows", 1) < self.masked_share
        return self.merge_rows(rows, self.mlm(rows, rng, vocab), is_masked_B1)

    def merge_rows(self, rows: Rows, masked: Batch, is_masked_B1: np.ndarray) -> Batch:
        """Return the batch with rows of `masked`, which is that of MLM, and with causal rows."""
        B, L = rows.input_ids.shape
        row_N, slot_N = np.nonzero(masked.labels != IGNORE_INDEX)
        masked_labels_BL = np.full((B, L), IGNORE_INDEX, masked.labels.dtype)
        masked_labels_BL[row_N, masked.target_positions[row_N, slot_N] - self.label_shift] = masked.labels[
            row_N, slot_N
        ]
        return Batch(
            np.where(is_masked_B1, masked.input_ids, rows.input_ids),
            document_ids=rows.document_ids,
            position_ids=rows.position_ids,
            attention_rank=np.where(is_masked_B1, 0, np.arange(L)),
            labels=np.where(is_masked_B1, masked_labels_BL, causal_labels(rows.input_ids, rows.document_ids)),
        )


@dataclass(frozen=True)
class MLMAndCLM(MaskedNextToken):
    """Mask a share of the rows and predict the masked tokens at their own positions; the others are causal.

    Settings: those of `MaskedNextToken`.
    """

    architectures = ("encoder",)  # type: ignore[assignment]
    label_shift: ClassVar[int] = 0


@dataclass(frozen=True)
class RTDMLMAndCLM(MLMAndCLM):
    """Masked and causal rows, and rows whose masks a small generator fills: the model detects which tokens are new.

    Replaced token detection (ELECTRA, `models/electra.py`) has a label at every token, so a model learns from it in few
    passes what classification and tagging need. It predicts no token, though; masked and causal rows do.

    - detected_share: share of the rows with masks whose masks are filled
    - masked_share, mlm, architecture: those of `MaskedNextToken`
    """

    masked_share: float = 0.6
    detected_share: float = 0.75
    extras = ("detector",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("objective.detected_share", self.detected_share)

    @property
    def without_detection(self) -> MLMAndCLM:
        """The same masked and causal rows, none with replaced tokens; with half of the rows masked, if some are."""
        share = MLMAndCLM().masked_share if self.has_both_kinds else self.masked_share
        return MLMAndCLM(share, self.mlm, self.architecture)

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        return {**super().expected_rates(rows), "detected_rows": self.masked_share * self.detected_share}

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        masked = self.mlm(rows, rng, vocab)
        is_masked_B1 = rng.uniform("masked rows", 1) < self.masked_share
        is_detected_B1 = is_masked_B1 & (rng.uniform("detected rows", 1) < self.detected_share)
        batch = self.merge_rows(rows, masked, is_masked_B1)
        return batch._replace(
            labels=np.where(is_detected_B1, IGNORE_INDEX, batch.labels),
            generator_positions=masked.target_positions,
            generator_labels=np.where(is_detected_B1, masked.labels, IGNORE_INDEX),
        )
