"""Metrics as functions of sums over examples, for fast bootstrap resampling.

The bootstrap computes a metric on thousands of resampled test sets. Many metrics depend only on sums of per-example
statistics: accuracy on (correct, 1), F1 on (correct, predicted, true), BLEU on n-gram counts. Then the statistics are
computed once, and each resample costs one product of its counts (N,) with the statistics (N, K). The result equals
that of `compute_metrics`.

N examples, K statistics of each, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from firth.metrics.classification import ClassMetrics, check_same_length, correct_mask, mcc_from_confusion
from firth.metrics.fields import FieldCounts, count_fields
from firth.metrics.squad import normalise_answer, squad_per_question
from firth.metrics.tagging import count_entities
from firth.metrics.text import as_reference_lists, bits_per_byte, exact_match, perplexity, rouge

CONFUSION_METRICS = ("mcc", "macro_f1")
MAX_CONFUSION_CLASSES = 10  # classes; the (N, C * C) statistics grow with the square
FloatArray = NDArray[np.float64]


class AdditiveScore(NamedTuple):
    """Per-example statistics, and the function from their sums to the score."""

    per_example: FloatArray  # (N, K)
    score_fn: Callable[[FloatArray], float]

    def score_sample(self, count_N: FloatArray) -> float:
        """Return the score of a sample that contains example i `count_N[i]` times."""
        return self.score_fn(count_N @ self.per_example)


def is_additive_metric(task: str, metric: str, references: Sequence[Any]) -> bool:
    """Whether a metric depends on sums only, and on few enough of them."""
    fits = metric not in CONFUSION_METRICS or len(set(references)) <= MAX_CONFUSION_CLASSES
    return (task, metric) in ADDITIVE_METRICS and fits


def make_additive_score(task: str, metric: str, predictions: Sequence[Any], references: Sequence[Any]) -> AdditiveScore:
    """Return a metric in additive form, from the arguments of `compute_metrics`."""
    check_same_length(predictions, references)
    return ADDITIVE_METRICS[task, metric](predictions, references)


def additive_entity_score(
    metric: str, predictions: Sequence[Any], references: Sequence[Any], exclude: Collection[str] = ()
) -> AdditiveScore:
    """Return an entity metric: `metric` is a field of `ClassMetrics`, `exclude` lists ignored entity types."""
    each = [count_entities([p], [r], exclude) for p, r in zip(predictions, references, strict=True)]
    return AdditiveScore(
        _to_float_array(each), lambda counts: float(getattr(_class_metrics_from_counts(counts), metric))
    )


def _additive_mean(values: Iterable[float]) -> AdditiveScore:
    """Return the mean of per-example values."""
    return AdditiveScore(_to_float_array([(float(x), 1.0) for x in values]), lambda sums: float(sums[0] / sums[1]))


def _additive_accuracy(predictions: Sequence[Any], references: Sequence[Any]) -> AdditiveScore:
    return _additive_mean(correct_mask(predictions, references))


def _additive_f1(predictions: Sequence[str], references: Sequence[str]) -> AdditiveScore:
    """Return F1 of the last label in sorted order; NaN for a sample with a single label."""
    positive = max(references)
    each = [
        (p == r == positive, p == positive, r == positive, 1.0) for p, r in zip(predictions, references, strict=True)
    ]
    return AdditiveScore(
        _to_float_array(each),
        lambda counts: _class_metrics_from_counts(counts).f1 if 0 < counts[2] < counts[3] else math.nan,
    )


def _additive_from_confusion(
    score_fn: Callable[[FloatArray], float], predictions: Sequence[str], references: Sequence[str]
) -> AdditiveScore:
    """Return a score that is a function of the confusion matrix."""
    index = {name: i for i, name in enumerate(sorted({*predictions, *references}))}
    count_NCC = np.zeros((len(references), len(index), len(index)))
    count_NCC[range(len(references)), [index[r] for r in references], [index[p] for p in predictions]] = 1
    per_example = count_NCC.reshape(len(references), -1)
    return AdditiveScore(per_example, lambda counts: score_fn(counts.reshape(len(index), -1)))


def _macro_f1_from_confusion(count_CC: FloatArray) -> float:
    """Return the mean F1 of the classes that occur."""
    right_C, both_C = np.diag(count_CC), count_CC.sum(0) + count_CC.sum(1)
    return float(np.mean(2 * right_C[both_C > 0] / both_C[both_C > 0]))


def _additive_relation_f1(predictions: Sequence[str], references: Sequence[str]) -> AdditiveScore:
    none = "no_relation"
    each = [(p == r != none, p != none, r != none) for p, r in zip(predictions, references, strict=True)]
    return AdditiveScore(_to_float_array(each), lambda counts: _class_metrics_from_counts(counts).f1)


def _additive_tag_accuracy(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> AdditiveScore:
    pairs = zip(predictions, references, strict=True)
    each = [(sum(p == r for p, r in zip(tags, true, strict=True)), len(true)) for tags, true in pairs]
    return AdditiveScore(_to_float_array(each), lambda counts: float(counts[0] / counts[1]) if counts[1] else math.nan)


def _additive_squad(score_index: int, predictions: Sequence[str], references: Sequence[Sequence[Any]]) -> AdditiveScore:
    return _additive_mean(squad_per_question(predictions, references)[score_index])


def _additive_fields(metric: str, predictions: Sequence[Any], references: Sequence[Any]) -> AdditiveScore:
    """Return a metric of extracted fields: `metric` is a property of `FieldCounts`."""
    each = [count_fields(p, r) for p, r in zip(predictions, references, strict=True)]
    return AdditiveScore(_to_float_array(each), lambda sums: float(getattr(FieldCounts(*sums), metric)))


def _additive_sacrebleu(
    name: str, predictions: Sequence[str], references: Sequence[str | Sequence[str]]
) -> AdditiveScore:
    """Return BLEU or chrF from the per-text counts that sacrebleu uses for its own significance tests."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    metric: Any = {"bleu": BLEU, "chrf": CHRF}[name]()
    pairs = zip(predictions, as_reference_lists(predictions, references), strict=True)
    each = [metric._extract_corpus_statistics([text], [[reference] for reference in texts])[0] for text, texts in pairs]
    return AdditiveScore(
        _to_float_array(each), lambda counts: float(metric._compute_score_from_stats(counts.astype(int).tolist()).score)
    )


def _additive_text_mean(
    score_fn: Callable[[Sequence[str], Sequence[Any]], float], predictions: Sequence[str], references: Sequence[Any]
) -> AdditiveScore:
    """Return the mean over texts of the score of each text."""
    return _additive_mean([score_fn([p], [r]) for p, r in zip(predictions, references, strict=True)])


def _additive_rouge(name: str, predictions: Sequence[str], references: Sequence[Any]) -> AdditiveScore:
    return _additive_text_mean(lambda p, r: rouge(p, r)[name], predictions, references)


def _additive_likelihood(
    score_fn: Callable[[float, int], float],
    count_index: int,
    nats: Sequence[float],
    references: Sequence[tuple[int, int]],
) -> AdditiveScore:
    each = [(x, reference[count_index]) for x, reference in zip(nats, references, strict=True)]
    return AdditiveScore(_to_float_array(each), lambda sums: score_fn(float(sums[0]), int(sums[1])))


def _to_float_array(rows: Sequence[Sequence[float]]) -> FloatArray:
    return np.array(rows, dtype=np.float64)


def _class_metrics_from_counts(counts: FloatArray) -> ClassMetrics:
    """Return the metrics from the counts (correct, predicted, true)."""
    return ClassMetrics.from_counts(*counts[:3].astype(int).tolist())


LABEL_METRIC_TASKS = ("classify", "pair", "word-in-context")
ADDITIVE_METRICS: Mapping[tuple[str, str], Callable[[Any, Any], AdditiveScore]] = {
    **{(task, "accuracy"): _additive_accuracy for task in (*LABEL_METRIC_TASKS, "relation", "choice")},
    **{(task, "f1"): _additive_f1 for task in LABEL_METRIC_TASKS},
    **{(task, "mcc"): partial(_additive_from_confusion, mcc_from_confusion) for task in LABEL_METRIC_TASKS},
    **{
        (task, "macro_f1"): partial(_additive_from_confusion, _macro_f1_from_confusion)
        for task in (*LABEL_METRIC_TASKS, "relation")
    },
    ("relation", "f1"): _additive_relation_f1,
    **{("tag", f"entity_{metric}"): partial(additive_entity_score, metric) for metric in ("f1", "precision", "recall")},
    ("tag", "accuracy"): _additive_tag_accuracy,
    ("span-qa", "exact_match"): partial(_additive_squad, 0),  # SQuAD 1.1
    ("span-qa", "exact"): partial(_additive_squad, 0),  # SQuAD 2.0
    ("span-qa", "f1"): partial(_additive_squad, 1),
    **{("text-to-text", name): partial(_additive_sacrebleu, name) for name in ("chrf", "bleu")},
    **{
        ("text-to-text", name): partial(_additive_rouge, name)
        for name in ("rouge_1", "rouge_2", "rouge_l", "rouge_lsum")
    },
    ("text-to-text", "exact_match"): partial(_additive_text_mean, exact_match),
    ("text-to-text", "answer_match"): partial(_additive_text_mean, partial(exact_match, normalize_fn=normalise_answer)),
    **{("extract", f"field_{name}"): partial(_additive_fields, name) for name in ("f1", "precision", "recall")},
    ("lm", "perplexity"): partial(_additive_likelihood, perplexity, 0),
    ("lm", "bits_per_byte"): partial(_additive_likelihood, bits_per_byte, 1),
}
