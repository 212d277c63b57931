"""Scores that come from sums over the examples, so that thousands of samples of them take no time.

N examples, K numbers of each, whose sums over a sample give its score. Each score is the same that `score` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from firth.metrics.classification import Row, check_paired, hits, mcc_of
from firth.metrics.squad import normalise_squad, squad_each
from firth.metrics.tagging import totals
from firth.metrics.text import bits_per_byte, exact_match, perplexity, right_texts, rouge

CONFUSED = ("mcc", "macro_f1")
MOST_CLASSES = 10  # whose confusions are counted example by example
Numbers = NDArray[np.float64]


class Sums(NamedTuple):
    """The numbers of each example, and the score that their sums come to."""

    each: Numbers  # (N, K)
    score: Callable[[Numbers], float]

    def of(self, times_N: Numbers) -> float:
        """The score of a sample in which each example is so many times."""
        return self.score(times_N @ self.each)


def mean_of(several: Sequence[Sums]) -> Sums:
    """The mean of several scores, as of several seeds."""
    ends = np.cumsum([some.each.shape[1] for some in several])[:-1]

    def score(sums: Numbers) -> float:
        parts = zip(several, np.split(sums, ends), strict=True)
        return float(np.mean([some.score(part) for some, part in parts]))

    return Sums(np.hstack([some.each for some in several]), score)


def has_sums(task: str, metric: str, references: Sequence[Any]) -> bool:
    """Whether a metric of a task is a matter of sums, and of few enough of them."""
    few = metric not in CONFUSED or len(set(references)) <= MOST_CLASSES
    return (task, metric) in SUMS and few


def sums(task: str, metric: str, predictions: Sequence[Any], references: Sequence[Any]) -> Sums:
    """A metric of a task, from what `score` takes."""
    check_paired(predictions, references)
    return SUMS[task, metric](predictions, references)


def entity_sums(
    metric: str, predictions: Sequence[Any], references: Sequence[Any], without: Collection[str] = ()
) -> Sums:
    """Of stretches: `metric` is a field of `Row`, and `without` leaves out types."""
    each = [totals([p], [r], without) for p, r in zip(predictions, references, strict=True)]
    return Sums(_rows(each), lambda counts: float(getattr(_row(counts), metric)))


def _mean(each: Iterable[float]) -> Sums:
    """A score that is the mean of a number of each example."""
    return Sums(_rows([(float(x), 1.0) for x in each]), lambda sums: float(sums[0] / sums[1]))


def _hits(predictions: Sequence[Any], references: Sequence[Any]) -> Sums:
    return _mean(hits(predictions, references))


def _f1(predictions: Sequence[str], references: Sequence[str]) -> Sums:
    """Of the label that is last in sorted order; a sample that has one label alone has none."""
    positive = max(references)
    each = [
        (p == r == positive, p == positive, r == positive, 1.0) for p, r in zip(predictions, references, strict=True)
    ]
    return Sums(_rows(each), lambda counts: _row(counts).f1 if 0 < counts[2] < counts[3] else math.nan)


def _confused(score: Callable[[Numbers], float], predictions: Sequence[str], references: Sequence[str]) -> Sums:
    """A score of which class is taken for which."""
    place = {name: i for i, name in enumerate(sorted({*predictions, *references}))}
    each = np.zeros((len(references), len(place), len(place)))
    each[range(len(references)), [place[r] for r in references], [place[p] for p in predictions]] = 1
    return Sums(each.reshape(len(references), -1), lambda counts: score(counts.reshape(len(place), -1)))


def _macro_f1(count_CC: Numbers) -> float:
    """Over the classes that occur."""
    right_C, both_C = np.diag(count_CC), count_CC.sum(0) + count_CC.sum(1)
    return float(np.mean(2 * right_C[both_C > 0] / both_C[both_C > 0]))


def _relation_f1(predictions: Sequence[str], references: Sequence[str]) -> Sums:
    none = "no_relation"
    each = [(p == r != none, p != none, r != none) for p, r in zip(predictions, references, strict=True)]
    return Sums(_rows(each), lambda counts: _row(counts).f1)


def _tag_hits(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Sums:
    pairs = zip(predictions, references, strict=True)
    each = [(sum(p == r for p, r in zip(tags, true, strict=True)), len(true)) for tags, true in pairs]
    return Sums(_rows(each), lambda counts: float(counts[0] / counts[1]) if counts[1] else math.nan)


def _answers(place: int, predictions: Sequence[str], references: Sequence[Sequence[Any]]) -> Sums:
    return _mean(squad_each(predictions, references)[place])


def _sacrebleu(name: str, predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> Sums:
    """BLEU or chrF, from the counts that sacrebleu itself keeps of each text for tests such as this one."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    metric: Any = {"bleu": BLEU, "chrf": CHRF}[name]()
    pairs = zip(predictions, right_texts(predictions, references), strict=True)
    each = [metric._extract_corpus_statistics([text], [[right] for right in several])[0] for text, several in pairs]
    return Sums(_rows(each), lambda counts: float(metric._compute_score_from_stats(counts.astype(int).tolist()).score))


def _each_text(
    score: Callable[[Sequence[str], Sequence[Any]], float], predictions: Sequence[str], references: Sequence[Any]
) -> Sums:
    """A mean over texts, from the score of each alone."""
    return _mean([score([p], [r]) for p, r in zip(predictions, references, strict=True)])


def _rouge(name: str, predictions: Sequence[str], references: Sequence[Any]) -> Sums:
    return _each_text(lambda p, r: rouge(p, r)[name], predictions, references)


def _likelihoods(
    score: Callable[[float, int], float], place: int, nats: Sequence[float], references: Sequence[tuple[int, int]]
) -> Sums:
    each = [(x, reference[place]) for x, reference in zip(nats, references, strict=True)]
    return Sums(_rows(each), lambda sums: score(float(sums[0]), int(sums[1])))


def _rows(each: Sequence[Sequence[float]]) -> Numbers:
    return np.array(each, dtype=np.float64)


def _row(counts: Numbers) -> Row:
    """From how many are right, guessed and true."""
    right, guessed, true = counts[:3].astype(int).tolist()
    return Row.of(right, guessed, true)


OF_LABELS = ("classify", "pair", "word-in-context")
SUMS: Mapping[tuple[str, str], Callable[[Any, Any], Sums]] = {
    **{(task, "accuracy"): _hits for task in (*OF_LABELS, "relation", "choice")},
    **{(task, "f1"): _f1 for task in OF_LABELS},
    **{(task, "mcc"): partial(_confused, mcc_of) for task in OF_LABELS},
    **{(task, "macro_f1"): partial(_confused, _macro_f1) for task in (*OF_LABELS, "relation")},
    ("relation", "f1"): _relation_f1,
    **{("tag", f"entity_{metric}"): partial(entity_sums, metric) for metric in ("f1", "precision", "recall")},
    ("tag", "accuracy"): _tag_hits,
    ("span-qa", "exact_match"): partial(_answers, 0),
    ("span-qa", "f1"): partial(_answers, 1),
    **{("text-to-text", name): partial(_sacrebleu, name) for name in ("chrf", "bleu")},
    **{("text-to-text", name): partial(_rouge, name) for name in ("rouge_1", "rouge_2", "rouge_l")},
    ("text-to-text", "exact_match"): partial(_each_text, exact_match),
    ("text-to-text", "answer_match"): partial(_each_text, partial(exact_match, normalise=normalise_squad)),
    ("lm", "perplexity"): partial(_likelihoods, perplexity, 0),
    ("lm", "bits_per_byte"): partial(_likelihoods, bits_per_byte, 1),
}
