"""The metrics of each task by name.

Metrics are from 0 to 1; correlations and `mcc` are from -1 to 1; BLEU, chrF and ROUGE are from 0 to 100, as usual.
`perplexity` and `bits_per_byte` are better when lower. NaN means undefined.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from firth.core.errors import UserError, did_you_mean, quote
from firth.core.html import format_cell
from firth.metrics.classification import accuracy, check_same_length, f1, macro_f1, mcc, micro_f1
from firth.metrics.correlation import pearson, spearman, word_similarity_correlation
from firth.metrics.fields import field_scores
from firth.metrics.pairs import accuracy_by_group, analogy_correct, minimal_pair_correct, retrieval_scores
from firth.metrics.squad import normalise_answer, squad_per_question, squad_scores
from firth.metrics.tagging import are_span_tags, entity_f1, entity_precision, entity_recall, tag_accuracy
from firth.metrics.text import bits_per_byte, bleu, chrf, exact_match, perplexity, rouge

MetricScores = dict[str, float]
# Metrics from 0 to 1 that are shares; not correlations, nor BLEU, chrF and ROUGE, which are from 0 to 100.
SHARE_METRIC_PATTERN = re.compile(
    r"(?:^|[._])(?:accuracy|f1|precision|recall|exact|match|mrr|known|average|valid)(?:[._]|$)"
)


def compute_metrics(task: str, predictions: Sequence[Any], references: Sequence[Any]) -> MetricScores:
    """Return the metrics of a task by name, the main one first. The functions of `TASK_METRIC_FNS` document inputs."""
    if task not in TASK_METRIC_FNS:
        raise UserError(f"Unknown task {quote(task)}. {did_you_mean(task, TASK_METRIC_FNS)}")
    return TASK_METRIC_FNS[task](predictions, references)


def is_share_metric(name: str) -> bool:
    return bool(SHARE_METRIC_PATTERN.search(name)) and not name.endswith("_thresh")


def format_metric(name: str, value: float | None) -> str:
    """Format a score for people: a share as a percentage, any other with four digits.

    >>> format_metric("entity_f1", 0.81234), format_metric("spearman", 0.81234), format_metric("f1", None)
    ('81.2%', '0.8123', '–')
    """
    if value is None or not is_share_metric(name) or not math.isfinite(value):
        return format_cell(value)
    return f"{100 * value:.1f}%"


def format_difference(name: str, difference: float) -> str:
    """Format the difference of two scores: of shares in percentage points.

    >>> format_difference("accuracy", 0.0425), format_difference("mcc", -0.0425)
    ('+4.2 points', '-0.0425')
    """
    return f"{100 * difference:+.1f} points" if is_share_metric(name) else f"{difference:+.4g}"


def _classification_metrics(predictions: Sequence[str], references: Sequence[str]) -> MetricScores:
    """Labels. Two classes also have F1 of the last one in sorted order: "1" of "0" and "1"."""
    scores = {
        "accuracy": accuracy(predictions, references),
        "macro_f1": macro_f1(predictions, references),
        "mcc": mcc(predictions, references),
    }
    if (positive := positive_label(references)) is not None:
        scores["f1"] = f1(predictions, references, positive_label=positive)
    return scores


def positive_label(references: Sequence[Any]) -> str | None:
    """Return the class that F1 is of, the last of two labels in sorted order; None for other data.

    >>> positive_label(["ham", "spam", "ham"]), positive_label(["a", "b", "c"]), positive_label([0.5, 1.0])
    ('spam', None, None)
    """
    labels = set(references)
    return max(labels) if len(labels) == 2 and all(isinstance(label, str) for label in labels) else None


def _relation_metrics(predictions: Sequence[str], references: Sequence[str]) -> MetricScores:
    """Labels; F1 excludes "no_relation", as in TACRED."""
    return {
        "f1": micro_f1(predictions, references, exclude={"no_relation"}),
        "accuracy": accuracy(predictions, references),
        "macro_f1": macro_f1(predictions, references),
    }


def _regression_metrics(predictions: Sequence[float], references: Sequence[float]) -> MetricScores:
    """Numbers. The mean absolute error is in their unit."""
    check_same_length(predictions, references)
    error = np.asarray(predictions, float) - np.asarray(references, float)
    return {
        "pearson": pearson(predictions, references),
        "spearman": spearman(predictions, references),
        "mean_absolute_error": float(np.abs(error).mean()),
    }


def _choice_metrics(predictions: Sequence[int], references: Sequence[int]) -> MetricScores:
    """Indices of the choices."""
    return {"accuracy": accuracy(predictions, references)}


def _tagging_metrics(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> MetricScores:
    """The tags of each sentence. Tags that mark no spans, such as parts of speech, have accuracy only."""
    word_metrics = {"accuracy": tag_accuracy(predictions, references)}
    if not are_span_tags(references):
        return word_metrics
    return {
        "entity_f1": entity_f1(predictions, references),
        "entity_precision": entity_precision(predictions, references),
        "entity_recall": entity_recall(predictions, references),
    } | word_metrics


def _qa_metrics(predictions: Sequence[str], references: Sequence[Sequence[Any]]) -> MetricScores:
    """An answer, "" for unanswerable; the right answers, empty for an unanswerable question.

    The names are those of the official scripts: SQuAD 1.1 has `f1` and `exact_match`. If a question is unanswerable,
    the scores are those of SQuAD 2.0 (`squad_scores`).
    """
    if not all(references):
        return squad_scores(predictions, references)
    exact, f1_each = squad_per_question(predictions, references, version=1)
    return {"f1": float(f1_each.mean()), "exact_match": float(exact.mean())}


def _text_metrics(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> MetricScores:
    """A text; one or several right texts. `answer_match` is exact match after SQuAD's normalization."""
    return {
        "chrf": chrf(predictions, references),
        "bleu": bleu(predictions, references),
        **rouge(predictions, references),
        "exact_match": exact_match(predictions, references),
        "answer_match": exact_match(predictions, references, normalise_answer),
    }


def _likelihood_metrics(predictions: Sequence[float], references: Sequence[tuple[int, int]]) -> MetricScores:
    """The sum of -ln p of each text; its numbers of scored tokens and of bytes."""
    nats, tokens, num_bytes = _sum_likelihoods(predictions, references)
    return {"perplexity": perplexity(nats, tokens), "bits_per_byte": bits_per_byte(nats, num_bytes)}


def _pseudo_likelihood_metrics(predictions: Sequence[float], references: Sequence[tuple[int, int]]) -> MetricScores:
    """As `_likelihood_metrics`. Bidirectional context gives no valid code length, so there are no bits per byte."""
    nats, tokens, _ = _sum_likelihoods(predictions, references)
    return {"pseudo_perplexity": perplexity(nats, tokens)}


def _sum_likelihoods(predictions: Sequence[float], references: Sequence[tuple[int, int]]) -> tuple[float, int, int]:
    check_same_length(predictions, references)
    return math.fsum(predictions), sum(tokens for tokens, _ in references), sum(size for _, size in references)


def _embedding_metrics(predictions: Sequence[Any], references: Sequence[float | None]) -> MetricScores:
    """Predicted and true similarity of each pair; or, if the truth is None, a pair of vectors for retrieval."""
    check_same_length(predictions, references)
    scores = [score for score in references if score is not None]
    if len(scores) == len(references):
        return {"spearman": spearman(predictions, scores), "pearson": pearson(predictions, scores)}
    vectors_a, vectors_b = zip(*predictions, strict=True)
    return retrieval_scores(np.stack(vectors_a), np.stack(vectors_b))


def _minimal_pair_metrics(predictions: Sequence[tuple[float, float]], references: Sequence[str]) -> MetricScores:
    """The scores of the good and the bad sentence; the group of the pair."""
    hits = minimal_pair_correct(predictions)
    groups = accuracy_by_group(hits, references)
    return {"accuracy": float(hits.mean()), "group_accuracy": statistics.fmean(groups.values())}


def _cloze_metrics(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> MetricScores:
    """The word that fills the gap."""
    return {"accuracy": exact_match(predictions, references)}


def _word_similarity_metrics(predictions: Sequence[float | None], references: Sequence[float]) -> MetricScores:
    """The similarity of two words, None if one is unknown; the human score."""
    correlation, known = word_similarity_correlation(predictions, references)
    return {"spearman": correlation, "known": known}


def _analogy_metrics(predictions: Sequence[str | None], references: Sequence[tuple[str, str]]) -> MetricScores:
    """The fourth word, None if a word is unknown; the right word and its section. Accuracy ignores None."""
    check_same_length(predictions, references)
    words, sections = zip(*references, strict=True)
    hits = analogy_correct(predictions, words)
    known = [hit for hit in hits if hit is not None]
    by_section = accuracy_by_group(hits, sections)
    return {
        "accuracy": statistics.fmean(known) if known else math.nan,
        "section_accuracy": statistics.fmean(by_section.values()) if by_section else math.nan,
        "known": len(known) / len(hits),
    }


TASK_METRIC_FNS: Mapping[str, Callable[[Any, Any], MetricScores]] = {
    "classify": _classification_metrics,
    "pair": _classification_metrics,
    "word-in-context": _classification_metrics,
    "relation": _relation_metrics,
    "regress": _regression_metrics,
    "choice": _choice_metrics,
    "tag": _tagging_metrics,
    "span-qa": _qa_metrics,
    "text-to-text": _text_metrics,
    "extract": field_scores,
    "lm": _likelihood_metrics,
    "perplexity": _likelihood_metrics,
    "pseudo-likelihood": _pseudo_likelihood_metrics,
    "embed": _embedding_metrics,
    "minimal-pairs": _minimal_pair_metrics,
    "cloze": _cloze_metrics,
    "word-similarity": _word_similarity_metrics,
    "analogy": _analogy_metrics,
}
