"""Exact match and token F1 of extracted answers, as in the official SQuAD 1.1 and 2.0 scripts, but from 0 to 1.

A prediction is a text, empty for "unanswerable". A reference is the list of right answers (strings, or objects with a
`text`), empty for an unanswerable question. The scripts differ in details, so `version` selects one. Default: 2 if some
question is unanswerable, otherwise 1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firth.core.errors import UserError
from firth.metrics.classification import check_same_length

SquadAnswers = Sequence[Any]
ARTICLE_PATTERN = re.compile(r"\b(a|an|the)\b")
DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_squad(text: str) -> str:
    """Lowercase, remove punctuation and articles, and collapse whitespace.

    >>> normalise_squad("The U.S. of  A, an idea")
    'us of idea'
    """
    return " ".join(ARTICLE_PATTERN.sub(" ", text.lower().translate(DELETE_PUNCTUATION)).split())


def normalise_answer(text: str) -> str:
    """Normalize as SQuAD does; a text of nothing but punctuation and articles stays, so that no empty text equals it.

    >>> normalise_answer("The U.S."), normalise_answer("???"), normalise_answer("")
    ('us', '???', '')
    """
    return normalise_squad(text) or text.strip()


def squad_exact_match(
    predictions: Sequence[str], references: Sequence[SquadAnswers], version: int | None = None
) -> float:
    """Return the share of predictions that equal a right answer after normalization."""
    return float(squad_per_question(predictions, references, version)[0].mean())


def squad_f1(predictions: Sequence[str], references: Sequence[SquadAnswers], version: int | None = None) -> float:
    """Return the mean over questions of the best word F1 between the prediction and a right answer."""
    return float(squad_per_question(predictions, references, version)[1].mean())


def squad_per_question(
    predictions: Sequence[str], references: Sequence[SquadAnswers], version: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two (N,) arrays: exact match and F1 of each question."""
    check_same_length(predictions, references)
    version = version or (1 if all(references) else 2)
    assert version in (1, 2), "there are two versions of SQuAD"
    exact, f1 = np.zeros(len(predictions)), np.zeros(len(predictions))
    for i, (prediction, answers) in enumerate(zip(predictions, references, strict=True)):
        predicted = normalise_squad(prediction)
        texts = _normalized_answers(answers, version, i)
        exact[i] = predicted in texts
        f1[i] = max(_token_f1(predicted.split(), text.split(), version) for text in texts)
    return exact, f1


def squad_scores(
    predictions: Sequence[str],
    references: Sequence[SquadAnswers],
    no_answer_probability: Sequence[float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """Return the output of the official SQuAD 2.0 script (evaluate-v2.0.py) under its names, but from 0 to 1.

    `exact` and `f1` are means over all questions, `HasAns_*` over the answerable and `NoAns_*` over the unanswerable
    ones. A question whose `no_answer_probability` is above `threshold` counts as predicted unanswerable. With these
    probabilities, the result includes `best_squad_scores`.
    """
    exact, f1 = squad_per_question(predictions, references, version=2)
    answerable = np.array([bool(answers) for answers in references])
    scores = {"f1": f1, "exact": exact}
    if no_answer_probability is not None:
        check_same_length(no_answer_probability, references)
        abstains = np.asarray(no_answer_probability) > threshold
        scores = {name: np.where(abstains, ~answerable, values) for name, values in scores.items()}
    results = {name: float(values.mean()) for name, values in scores.items()}
    for name, mask in {"HasAns": answerable, "NoAns": ~answerable}.items():
        if mask.any():
            results |= {f"{name}_{metric}": float(values[mask].mean()) for metric, values in scores.items()}
    if no_answer_probability is not None:
        results |= best_squad_scores(predictions, references, no_answer_probability)
    return results


def best_squad_scores(
    answers: Sequence[str], references: Sequence[SquadAnswers], no_answer_probability: Sequence[float]
) -> dict[str, float]:
    """Return the best scores over all thresholds, `best_exact` and `best_f1`, and these thresholds (`*_thresh`).

    The thresholds are chosen on the scored questions themselves, so these scores are upper bounds.
    """
    exact, f1 = squad_per_question(answers, references, version=2)
    results: dict[str, float] = {}
    for name, scores in {"f1": f1, "exact": exact}.items():
        best, threshold = best_no_answer_threshold(scores, answers, references, no_answer_probability)
        results |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return results


def best_no_answer_threshold(
    scores_per_question: Sequence[float] | NDArray[np.float64],
    predictions: Sequence[str],
    references: Sequence[SquadAnswers],
    no_answer_probability: Sequence[float],
) -> tuple[float, float]:
    """Return the best mean score over thresholds on `no_answer_probability`, and the threshold, as SQuAD 2.0 does.

    `scores_per_question` are the scores without a threshold. The search starts with all questions unanswered
    (threshold 0) and answers them one by one, in ascending order of the probability.
    """
    check_same_length(predictions, no_answer_probability)
    current = best = float(sum(not answers for answers in references))
    threshold = 0.0
    for i in np.argsort(np.asarray(no_answer_probability), kind="stable"):
        current += scores_per_question[i] if references[i] else -bool(predictions[i])
        if current > best:
            best, threshold = current, float(no_answer_probability[i])
    return best / len(predictions), threshold


def _normalized_answers(answers: SquadAnswers, version: int, question_index: int) -> list[str]:
    """Return the normalized right answers; version 2 drops empty ones and uses "" for an unanswerable question."""
    texts = [normalise_squad(answer if isinstance(answer, str) else answer.text) for answer in answers]
    if version == 2:
        return [text for text in texts if text] or [""]
    if not texts:
        raise UserError(
            f"Question {question_index} (counted from 0) has no answer, which SQuAD 1.1 does not allow. Use version 2."
        )
    return texts


def _token_f1(predicted_words: list[str], answer_words: list[str], version: int) -> float:
    """Return F1 of two bags of words; two empty ones are equal in version 2 only."""
    if not predicted_words and not answer_words:
        return float(version == 2)
    return 2 * (Counter(predicted_words) & Counter(answer_words)).total() / (len(predicted_words) + len(answer_words))
