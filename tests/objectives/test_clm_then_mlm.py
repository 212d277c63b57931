"""CLM first, then MLM: which batch a step has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.objectives import MLM, Batch, CLMThenMLM, CounterRNG, MaskedNextToken, Mixture, WeightedObjective
from firth.objectives.base import causal_labels
from firth.tokens import Rows, Vocabulary


def equal(a: Batch, b: Batch) -> bool:
    return all((x is None) == (y is None) and (x is None or bool((x == y).all())) for x, y in zip(a, b, strict=True))


def test_the_phase_follows_the_progress(rows_for: Callable[..., Rows], vocab: Vocabulary) -> None:
    mlm = MLM(rate=0.3, rate_end=0.1)
    objective = CLMThenMLM(clm_share=0.25, mlm=mlm)
    rows = rows_for(objective, 8, 64, documents=2)
    rng = CounterRNG(3, rows.stream_index)
    for progress in (0.0, 0.2499):
        batch = objective(rows, replace(rng, progress=progress), vocab)
        assert batch.input_ids is rows.input_ids
        assert (batch.labels == causal_labels(rows.input_ids, rows.document_ids)).all()
        assert (batch.attention_rank == np.arange(64)).all()
        assert objective.mask_rate_at(progress) is None
    for progress, rate in ((0.25, 0.3), (0.625, 0.2), (1.0, 0.1)):
        batch = objective(rows, replace(rng, progress=progress), vocab)
        assert batch.attention_rank is None
        assert objective.mask_rate_at(progress) == pytest.approx(rate)
        assert equal(batch, mlm(rows, replace(rng, progress=(progress - 0.25) / 0.75), vocab))
    assert sum(share for share, _ in objective.phases) == 1


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="clm_share"):
        CLMThenMLM(clm_share=0.0)
    with pytest.raises(UserError, match=r"objective\.mlm"):
        CLMThenMLM(mlm=MLM(pair="next"))
    with pytest.raises(UserError, match="no part of a mixture"):
        Mixture((WeightedObjective(CLMThenMLM()), WeightedObjective(MLM())))
    assert not MaskedNextToken().follows_progress
    assert MaskedNextToken(mlm=MLM(rate_end=0.1)).follows_progress
