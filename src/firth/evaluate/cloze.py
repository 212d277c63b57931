"""Does a model know the word that is missing, or which ending is right, without having been trained to answer?"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from firth.console import count
from firth.errors import UserError
from firth.evaluate.asking import Answer, Query
from firth.evaluate.likelihood import LeftToRight, Parts, Scorer, about_unknown, make_scorer
from firth.evaluate.outcome import Outcome
from firth.metrics import accuracy
from firth.models import Model
from firth.tasks import Prediction
from firth.text import Example

BLANK = re.compile(r"\[MASK\]|<mask>|___+")


def cloze(checkpoint: Model | str | Path, examples: Sequence[Example], **settings: Any) -> Outcome:
    """How often the model, left to itself, would write just the answer; and the answer's mean log-probability.

    The answer stands where the context has a blank (___ or [MASK]), or else at its end, after a space. A decoder
    continues what comes before it (LAMBADA). An encoder gets as many masks as the answer has tokens. An
    encoder-decoder gets one hole, and must end its span where the answer ends. An answer that the tokenizer cannot
    spell is wrong, and has no log-probability; `known` is the share of the others. `settings`: those of `make_scorer`.
    """
    scorer = make_scorer(checkpoint, **settings)
    parts = [answer_in(scorer, example) for example in examples]
    hits, logp, predictions = [], [], []  # log-probabilities only of answers that can be spelled
    for ((query, answer),) in scorer.stretches(parts, together=True):
        hits.append(scorer.guessed(query, answer))
        spelled = scorer.spelled(query)
        logp += [scorer.answer_logp(answer)] if spelled else []
        predictions.append(Prediction(written(scorer, query, answer), {"logp": logp[-1]} if spelled else None))
    mean_logp, unknown = float(np.mean(logp)) if logp else math.nan, len(hits) - len(logp)
    metrics = {"accuracy": float(np.mean(hits)), "answer_logp": mean_logp, "known": len(logp) / len(hits)}
    said = [f"{unknown:,} of {len(hits):,} answers have a word that the tokenizer does not know, and count as wrong."]
    facts = {"method": scorer.method, "unknown": unknown}
    return Outcome(metrics, predictions, facts, [*said * bool(unknown), *unseen(scorer, parts), *scorer.said])


def answer_in(scorer: Scorer, example: Example) -> Parts:
    """The context with its answer, cut around the answer. A space before it belongs to it, as tokenizers have it."""
    if example.target is None:
        raise UserError(f"Example {example.id} has no answer, and a cloze asks how likely that is.")
    before, after = example.texts[0], ""
    if blanks := list(BLANK.finditer(before)):
        if len(blanks) > 1:
            raise UserError(f"Example {example.id} has {len(blanks)} blanks, and one answer. Write one blank.")
        before, after = before[: blanks[0].start()], before[blanks[0].end() :]
    elif before and not before[-1].isspace():
        before += " "
    return scorer.split(
        before + example.target + after, len(before.rstrip()), len(before + example.target), f"Example {example.id}"
    )


def written(scorer: Scorer, query: Query, answer: Answer) -> str:
    """What the model would write, up to the first token at which it leaves the answer; an encoder fills all masks."""
    best, labels = answer.best.tolist(), query.labels
    if query.written is None and not isinstance(scorer, LeftToRight):
        return scorer.tokenizer.decode(best).strip()
    wrong = next((i for i, token in enumerate(best) if token != labels[i]), len(best) - 1)
    return scorer.tokenizer.decode(best[: wrong + 1]).strip()


def unseen(scorer: Scorer, parts: Sequence[Parts]) -> list[str]:
    """A decoder does not see what comes after a blank."""
    num = sum(bool(part.after) for part in parts) if scorer.exact else 0
    some = count(num, "text goes on after its blank", "texts go on after their blank")
    return [f"{some}, which this model does not see."] if num else []


def choice(
    checkpoint: Model | str | Path, examples: Sequence[Example], delimiter: str = " ", **settings: Any
) -> Outcome:
    """How often the right one of several endings is the likeliest after the context, for a model as it is.

    `accuracy` compares sums of log-probabilities, `accuracy_norm` divides them by the ending's bytes, so that a long
    ending is no worse for being long. Where several are the likeliest none is chosen, and that is wrong. The
    `delimiter` stands between context and ending ("\\nAnswer: " suits questions). `settings`: those of `make_scorer`.
    """
    scorer = make_scorer(checkpoint, **settings)
    parts = [
        ending(scorer, example.texts[0] + delimiter, text, example.id)
        for example in examples
        for text in example.texts[1:]
    ]
    found = list(scorer.stretches(parts, together=False))
    sums = iter([sum(float(answer.logp.sum()) for _, answer in answers) for answers in found])
    unknown = sum(scorer.unknown(query.labels) for answers in found for query, _ in answers)
    predictions = []
    for example in examples:
        choices = example.texts[1:]
        logp = np.array([next(sums) for _ in choices])
        per_byte = logp / [len(text.encode()) for text in choices]
        scores = {str(i): value for i, value in enumerate(logp.tolist())}
        predictions.append(Prediction(likeliest(logp), scores, {"normalised": likeliest(per_byte)}))
    facts = {"method": scorer.method, "unknown": unknown}
    ties = sum(prediction.prediction is None for prediction in predictions)
    some = count(ties, "example has several likeliest choices", "examples have several likeliest choices")
    said = [*([f"{some}, and count as wrong."] if ties else []), *about_unknown(unknown), *scorer.said]
    return Outcome(choice_metrics(examples, predictions), predictions, facts, said)


def likeliest(logp: np.ndarray) -> int | None:
    """The place of the highest; None where several are.

    >>> likeliest(np.array([-2.0, -1.0, -3.0])), likeliest(np.array([-1.0, -1.0, -3.0]))
    (1, None)
    """
    best = np.flatnonzero(logp == logp.max())
    return int(best[0]) if len(best) == 1 else None


def ending(scorer: Scorer, before: str, text: str, name: str | int) -> Parts:
    return scorer.split(before + text, len(before.rstrip()), len(before + text), f"Example {name}")


def choice_metrics(examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
    """Both accuracies; none where a file has no answers."""
    right = [example.target for example in examples]
    if any(target is None for target in right):
        return {}
    normalised = [(prediction.extra or {})["normalised"] for prediction in predictions]
    plain = accuracy([prediction.prediction for prediction in predictions], right)
    return {"accuracy": plain, "accuracy_norm": accuracy(normalised, right)}
