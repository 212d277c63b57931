"""Masked language modelling: hide some tokens, and predict them from both sides.

BERT (Devlin et al. 2019, section 3.1 and appendix A.1). 15% of the tokens of a row are *targets*: their labels
are the original tokens. At a target the encoder reads:

    80%   [MASK]             the model must use the context
    10%   a random token     the model cannot trust any input token, so every position gets a useful representation
    10%   the token itself   fine-tuning has no [MASK]; this keeps the representation close to the real token

Only targets have a label, so an MLM step trains on 15% of the positions where CLM trains on all; in return each target
attends to both sides. A row has a fixed number of target slots, so the vocabulary projection runs on (B, K) positions,
not on (B, L): K = round(rate * L), and more for span masking, whose number of targets varies. An unused slot has label
-100.

`masking` decides which tokens are targets (the schemes are in `noise_mask.py`):

    TokenMasking         single tokens, uniformly (BERT)
    WholeWordMasking     all tokens of a word or none: the rest of a word no longer gives a hidden piece away. Each
                         token still draws its own 80/10/10 (BERT's released code, 2019)
    SpanMasking          spans of whole words, lengths geometric (p = 0.2) and at most 10, 3.8 words on average; one
                         80/10/10 draw for a span (SpanBERT, Joshi et al. 2020, section 3.1)
    NgramMasking         n-grams of whole words, n = 1, 2, 3 with p(n) proportional to 1/n (ALBERT, Lan et al. 2020,
                         section 4.1)
    SalientSpanMasking   names, numbers and dates first (REALM, Guu et al. 2020, section 3.4)

`targets` decides what is predicted:

    tokens     the hidden tokens, at their positions
    boundary   also SpanBERT's span boundary objective (section 3.2): each token x_i of a span (s..e) again, from the
               hidden states of s-1 and e+1 and the embedding of i - s + 1. `Batch.span_boundaries` has
               (s - 1, e + 1, i - s + 1) for each target
    replaced   ELECTRA's replaced token detection (Clark et al. 2020, section 2): a small generator is trained as an MLM
               and fills the masks with samples; the model classifies *every* token as original or replaced. All
               positions train, which is where ELECTRA's sample efficiency comes from (section 3.5). Sampling needs the
               generator's logits, so it happens in `models/electra.py`; the batch is that of MLM

`num_static_masks` sets how often masks are drawn. 0 draws new ones for each epoch ("dynamic masking", RoBERTa, Liu et
al. 2019, section 4.1); 10 makes ten masks per row and cycles through them, as BERT's data was duplicated ten times.

Shapes: B rows, L positions, K target slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from firth.core.errors import UserError
from firth.objectives import corruption, visibility
from firth.objectives.base import (
    ObjectiveBase,
    RowLayout,
    build_pair_template,
    check_mean_span_fits,
    check_rate,
    require_special_token,
)
from firth.objectives.batch import Batch
from firth.objectives.counter_rng import CounterRNG
from firth.objectives.noise_mask import (
    NgramMasking,
    SalientSpanMasking,
    SpanMasking,
    TokenMasking,
    WholeWordMasking,
    WordSpanMasking,
)
from firth.tokens import Rows, SequenceTemplate, Vocabulary

MaskingScheme = TokenMasking | WholeWordMasking | SpanMasking | NgramMasking | SalientSpanMasking
TOKEN_MASKING = TokenMasking()
PAIR_ROW_LAYOUTS: dict[str, RowLayout] = {"none": "packed", "next": "next", "order": "order", "translation": "sides"}


@dataclass(frozen=True)
class MLM(ObjectiveBase):
    """Masked language modelling; the file's docstring explains it.

    - rate: share of the text tokens that are targets, the "mask rate" of the papers
    - rate_end: mask rate at the end of the run, reached on a straight line from `rate`; None: `rate` throughout
    - mask_prob, random_prob: of the targets, the share that becomes [MASK] or a random token; the rest is kept
    - masking: which tokens are targets
    - targets: what is predicted there: "tokens", "boundary" (SpanBERT) or "replaced" (ELECTRA)
    - visibility: "all" (bidirectional), "forward" (left to right: earlier tokens only), "backward" (later tokens
      only), "prefix" (a random prefix is visible to all, then left to right; UniLM)
    - pair: one text ("none"); two that follow each other or not ("next", BERT's NSP); two in order or swapped ("order",
      ALBERT's SOP); a text and its "translation" (XLM's TLM)
    - num_static_masks: number of fixed masks per row; 0 draws new ones each epoch
    """

    rate: float = 0.15
    rate_end: float | None = None
    mask_prob: float = 0.8
    random_prob: float = 0.1
    masking: MaskingScheme = TOKEN_MASKING
    targets: Literal["tokens", "boundary", "replaced"] = "tokens"
    visibility: Literal["all", "forward", "backward", "prefix"] = "all"
    pair: Literal["none", "next", "order", "translation"] = "none"
    num_static_masks: int = 0

    def __post_init__(self) -> None:
        check_rate("objective.rate", self.rate)
        if self.rate_end is not None:
            check_rate("objective.rate_end", self.rate_end)
            if self.num_static_masks:
                raise UserError(
                    "objective.rate_end changes the masks, and objective.num_static_masks repeats them: leave one out."
                )
        if not (self.mask_prob >= 0 and self.random_prob >= 0 and self.mask_prob + self.random_prob <= 1):
            raise UserError(
                "objective.mask_prob and objective.random_prob must not be negative, and add up to at most 1."
            )
        if self.num_static_masks < 0:
            raise UserError(
                f"objective.num_static_masks is {self.num_static_masks}, and must be 0 (new masks each epoch) or more."
            )

    @property
    def follows_progress(self) -> bool:  # type: ignore[override]
        return self.rate_end is not None

    @property
    def row_layout(self) -> RowLayout:  # type: ignore[override]
        return PAIR_ROW_LAYOUTS[self.pair]

    @property
    def token_flags(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.masking.token_flags

    @property
    def extras(self) -> tuple[str, ...]:  # type: ignore[override]
        parts = {"boundary": ("boundary",), "replaced": ("generator",)}.get(self.targets, ())
        return parts + (("pair",) if self.pair in ("next", "order") else ())

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        require_special_token(vocab.mask, "mask token", "MLM")
        return build_pair_template(vocab, "MLM")

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        self.check_spans(source_length)

    def check_spans(self, source_length: int) -> None:
        """Raise UserError where rows are too short for spans of words."""
        if isinstance(self.masking, WordSpanMasking):
            check_mean_span_fits(
                min(self.rate, self.rate if self.rate_end is None else self.rate_end) * source_length,
                self.masking.mean_length,
                "Lower objective.masking.max_span_length, raise objective.rate",
            )

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        kept = round(1 - self.mask_prob - self.random_prob, 9)
        rates = {"targets": self.rate, "masked": self.mask_prob, "random": self.random_prob, "kept": kept}
        if isinstance(self.masking, WordSpanMasking):
            rates["mean_span"] = self.masking.mean_length
        return rates | ({"pairs": 0.5} if self.pair in ("next", "order") else {})

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        if self.num_static_masks:
            assert rows.row_index is not None
            assert rows.epoch is not None
            rng = replace(rng, index=rows.row_index * self.num_static_masks + rows.epoch % self.num_static_masks)
        rate = self.mask_rate_at(rng.progress)
        noise_BL = self.masking(rows, self.rate if rate is None else rate, rng)
        targets = corruption.select_targets(noise_BL, self.num_slots(noise_BL.shape[1]))
        span_ids = boundaries = None
        if self.masking.noise_per_span or self.targets == "boundary":
            span_ids, boundaries = corruption.find_target_spans(noise_BL, targets)
        tokens, labels = corruption.apply_mlm_noise(
            rows.input_ids,
            targets,
            rng,
            vocab,
            self.mask_prob,
            self.random_prob,
            span_ids if self.masking.noise_per_span else None,
        )
        rank, token_types = self.rank_and_token_types(rows, rng)
        return Batch(
            tokens,
            document_ids=rows.document_ids,
            position_ids=rows.position_ids,
            attention_rank=rank,
            token_type_ids=token_types,
            target_positions=targets.positions,
            labels=labels,
            span_boundaries=boundaries if self.targets == "boundary" else None,
            pair_labels=rows.pair_labels,
        )

    def mask_rate_at(self, progress: float) -> float | None:
        return None if self.rate_end is None else self.rate + (self.rate_end - self.rate) * progress

    def num_slots(self, length: int) -> int:
        """Return the number of target slots of a row: all steps have the slots of the higher rate, so one shape."""
        return self.masking.num_slots(max(self.rate, self.rate_end or 0.0), length)

    def rank_and_token_types(self, rows: Rows, rng: CounterRNG) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return `attention_rank` and `token_type_ids` (B, L) for `visibility`.

        UniLM's prefix rows mark the prefix and the rest by their segment (Dong et al. 2019, section 2.1).
        """
        if self.visibility == "all":
            return None, rows.token_type_ids
        if self.visibility == "prefix":
            prefix = visibility.sample_prefix_lengths(rows.document_ids, rng)
            rank = visibility.attention_rank(rows.position_ids, prefix)
            return rank, (rank > 0).astype(np.int32)
        B, L = rows.document_ids.shape
        order = np.arange(L) if self.visibility == "forward" else np.arange(L)[::-1]
        return np.tile(order, (B, 1)), rows.token_type_ids
