"""CLM first, then MLM: an encoder that starts as a causal language model.

A causal row has a label at every position, a masked one at 15% of them, so that CLM learns faster per token; MLM uses
both sides. Gisserot-Boukhlef et al. 2025 ("Should we still pretrain encoders with masked language modeling?") train
with CLM first and then with MLM, and report the best encoders of a given budget. Here CLM has the first quarter:

    steps before 25%   [CLS] the cat sat [SEP], causal attention        labels: the next token at every position
    steps after it     [CLS] the [MASK] sat [SEP], attention to all     labels: the masked tokens at their positions

It is one run, with one learning-rate schedule and one optimizer state. The phase is a function of the step alone, so
that a resumed run is the same. Both phases have their own shapes; a step is compiled twice.

Shapes: B rows, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from firth.core.errors import UserError
from firth.objectives.base import ObjectiveBase, causal_labels, check_rate
from firth.objectives.batch import Batch
from firth.objectives.counter_rng import CounterRNG
from firth.objectives.masked import MLM
from firth.tokens import Rows, SequenceTemplate, Vocabulary

DEFAULT_MLM = MLM()


@dataclass(frozen=True)
class CLMThenMLM(ObjectiveBase):
    """Predict the next token, causally, for a share of the steps, then masked tokens; the file's docstring explains it.

    - clm_share: share of the steps with CLM
    - mlm: the objective of the other steps. Its `rate_end` is reached from the first of them on
    """

    clm_share: float = 0.25
    mlm: MLM = DEFAULT_MLM
    follows_progress = True

    def __post_init__(self) -> None:
        check_rate("objective.clm_share", self.clm_share)
        if self.mlm.extras or self.mlm.pair != "none":
            raise UserError("objective.mlm after CLM predicts tokens of single texts: targets 'tokens', pair 'none'.")

    @property
    def phases(self) -> tuple[tuple[float, float], ...]:  # type: ignore[override]
        return ((self.clm_share, 0.0), (1 - self.clm_share, 1.0))

    @property
    def token_flags(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.mlm.token_flags

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return self.mlm.build_template(vocab)

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.mlm.check(vocab, source_length)

    def mask_rate_at(self, progress: float) -> float | None:
        return None if progress < self.clm_share else self.mlm.mask_rate_at(self.mlm_progress(progress))

    def mlm_progress(self, progress: float) -> float:
        """Return the share of MLM's steps before this one."""
        return max(progress - self.clm_share, 0.0) / (1 - self.clm_share)

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        if rng.progress >= self.clm_share:
            return self.mlm(rows, replace(rng, progress=self.mlm_progress(rng.progress)), vocab)
        return Batch(
            rows.input_ids,
            document_ids=rows.document_ids,
            position_ids=rows.position_ids,
            attention_rank=np.tile(np.arange(rows.input_ids.shape[1]), (len(rows.input_ids), 1)),
            labels=causal_labels(rows.input_ids, rows.document_ids),
        )
