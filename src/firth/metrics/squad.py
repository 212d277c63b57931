"""Answers cut from a text, as the official scripts of SQuAD 1.1 and 2.0 score them, but from 0 to 1.

A prediction is a text, empty for "there is no answer". A reference is the list of right answers (texts, or things
with a `text`), empty where there is none. Both scripts differ in small ways: `version` says which one is meant;
without it, it is 2 if some question has no answer, else 1.
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
PUNCTUATION_TO_SPACE = str.maketrans(dict.fromkeys(string.punctuation + "‘’´", " "))


def normalise_squad(text: str) -> str:
    """Small letters; no punctuation, no articles, one space between words.

    >>> normalise_squad("The U.S. of  A, an idea")
    'us of idea'
    """
    return _strip_articles(text.lower().translate(DELETE_PUNCTUATION))


def normalise_trivia(text: str) -> str:
    """As TriviaQA does it: like SQuAD, but punctuation becomes a space, so that "Spider-Man" is two words.

    >>> normalise_trivia("The Spider-Man")
    'spider man'
    """
    return _strip_articles(text.lower().translate(PUNCTUATION_TO_SPACE))


def _strip_articles(text: str) -> str:
    return " ".join(ARTICLE_PATTERN.sub(" ", text).split())


def squad_exact_match(
    predictions: Sequence[str], references: Sequence[SquadAnswers], version: int | None = None
) -> float:
    """The share of predictions that equal a right answer, once both are normalised."""
    return float(squad_per_question(predictions, references, version)[0].mean())


def squad_f1(predictions: Sequence[str], references: Sequence[SquadAnswers], version: int | None = None) -> float:
    """The mean F1 of the words of a prediction and of the right answer that is nearest to it."""
    return float(squad_per_question(predictions, references, version)[1].mean())


def squad_per_question(
    predictions: Sequence[str], references: Sequence[SquadAnswers], version: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact match and F1 of every question."""
    check_same_length(predictions, references)
    version = version or (1 if all(references) else 2)
    assert version in (1, 2), "there are two versions of SQuAD"
    exact, f1 = np.zeros(len(predictions)), np.zeros(len(predictions))
    for i, (prediction, answers) in enumerate(zip(predictions, references, strict=True)):
        predicted = normalise_squad(prediction)
        right = _normalized_answers(answers, version, i)
        exact[i] = predicted in right
        f1[i] = max(_token_f1(predicted.split(), text.split(), version) for text in right)
    return exact, f1


def squad_scores(
    predictions: Sequence[str],
    references: Sequence[SquadAnswers],
    no_answer_probability: Sequence[float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """What the script of SQuAD 2.0 prints: the scores of all questions, of those with an answer, of those without.

    `no_answer_probability` says how much each question seems to have no answer: above `threshold` it counts as answered by "no
    answer". With it come the best scores that a threshold can give on these questions, and that threshold.
    """
    exact, f1 = squad_per_question(predictions, references, version=2)
    has = np.array([bool(answers) for answers in references])
    scores = {"exact_match": exact, "f1": f1}
    if no_answer_probability is not None:
        check_same_length(no_answer_probability, references)
        none = np.asarray(no_answer_probability) > threshold
        scores = {name: np.where(none, ~has, values) for name, values in scores.items()}
    found = {name: float(values.mean()) for name, values in scores.items()}
    for name, of in {"has_answer": has, "no_answer": ~has}.items():
        if of.any():
            found |= {f"{name}_{metric}": float(values[of].mean()) for metric, values in scores.items()}
    if no_answer_probability is not None:
        for name, each in {"exact_match": exact, "f1": f1}.items():
            best, at = best_no_answer_threshold(each, predictions, references, no_answer_probability)
            found |= {f"best_{name}": best, f"best_{name}_threshold": at}
    return found


def best_no_answer_threshold(
    scores_per_question: Sequence[float] | NDArray[np.float64],
    predictions: Sequence[str],
    references: Sequence[SquadAnswers],
    no_answer_probability: Sequence[float],
) -> tuple[float, float]:
    """The best mean score that a threshold on `no_answer_probability` can give, and the threshold, found as SQuAD 2.0 does.

    `scores_per_question` are the scores of the questions as predicted. At first no question is answered (threshold 0, as for
    probabilities); then they are answered one by one, the surest first.
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
    """The right answers, normalised; version 2 forgets those of which nothing is left, and "" is no answer."""
    texts = [normalise_squad(answer if isinstance(answer, str) else answer.text) for answer in answers]
    if version == 2:
        return [text for text in texts if text] or [""]
    if not texts:
        raise UserError(
            f"Question {question_index} (counted from 0) has no answer, which SQuAD 1.1 does not know. Use version 2."
        )
    return texts


def _token_f1(predicted_words: list[str], answer_words: list[str], version: int) -> float:
    """F1 of two bags of words; two empty ones agree in version 2 only."""
    if not predicted_words and not answer_words:
        return float(version == 2)
    return 2 * (Counter(predicted_words) & Counter(answer_words)).total() / (len(predicted_words) + len(answer_words))
