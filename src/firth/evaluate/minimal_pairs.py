"""Which of two sentences does a model hold likelier, the good one or the bad one (BLiMP)?"""

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
    """The share of pairs whose good sentence is likelier, over all and in each group; a tie is wrong.

    The likelihood of a sentence is the sum over its tokens, not their mean, and both sentences stand in the same
    frame. `settings` are those of `make_scorer`.
    """
    scorer = make_scorer(checkpoint, **settings)
    found = list(scorer.score_texts([text for example in examples for text in example.texts]))
    scores = [(good.logp, bad.logp) for good, bad in zip(found[::2], found[1::2], strict=True)]
    groups = [example.references[0] if example.references else DEFAULT_GROUP for example in examples]
    hits = minimal_pair_correct(scores)
    unknown = sum(one.unknown_tokens for one in found)
    facts = {"method": scorer.method, "unknown": unknown, "by_group": accuracy_by_group(hits, groups)}
    predictions = [
        Prediction("good" if hit else "bad", {"good": good, "bad": bad})
        for hit, (good, bad) in zip(hits, scores, strict=True)
    ]
    ties = sum(good == bad for good, bad in scores)
    said = (
        [f"{format_count(ties, 'pair is', 'pairs are')} equally likely to the model, and counted as wrong."]
        if ties
        else []
    )
    return Evaluation(
        compute_metrics("minimal-pairs", scores, groups),
        predictions,
        facts,
        [*said, *unknown_token_messages(unknown), *scorer.notices],
    )
