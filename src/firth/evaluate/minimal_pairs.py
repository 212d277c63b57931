"""Minimal pairs: is the grammatical sentence more likely than the ungrammatical one?

BLiMP (Warstadt et al. 2020, section 3) scores a model by the share of pairs in which the good sentence has the higher
log-likelihood. Chance is 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from firth.core.console import format_count
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.likelihood import make_scorer, unknown_token_messages
from firth.metrics import accuracy_by_group, compute_metrics, minimal_pair_correct
from firth.models import Model
from firth.tasks import Prediction
from firth.text import Example

DEFAULT_GROUP = "all"


def evaluate_minimal_pairs(checkpoint: Model | str | Path, examples: Sequence[Example], **settings: Any) -> Evaluation:
    """Share of pairs whose good sentence is more likely, overall and by group; a tie is wrong.

    A sentence's log-likelihood is the sum over its tokens, not their mean; both sentences get the same special tokens.
    `settings` are those of `make_scorer`.
    """
    scorer = make_scorer(checkpoint, **settings)
    likelihoods = list(scorer.score_texts([text for example in examples for text in example.texts]))
    scores = [(good.logp, bad.logp) for good, bad in zip(likelihoods[::2], likelihoods[1::2], strict=True)]
    groups = [example.references[0] if example.references else DEFAULT_GROUP for example in examples]
    hits = minimal_pair_correct(scores)
    unknown = sum(one.unknown_tokens for one in likelihoods)
    facts = {"method": scorer.method, "unknown": unknown, "by_group": accuracy_by_group(hits, groups)}
    predictions = [
        Prediction("good" if hit else "bad", {"good": good, "bad": bad})
        for hit, (good, bad) in zip(hits, scores, strict=True)
    ]
    ties = sum(good == bad for good, bad in scores)
    tied = f"{format_count(ties, 'pair is', 'pairs are')} equally likely to the model, and counted as wrong."
    return Evaluation(
        compute_metrics("minimal-pairs", scores, groups),
        predictions,
        facts,
        [*[tied] * bool(ties), *unknown_token_messages(unknown), *scorer.notices],
    )
