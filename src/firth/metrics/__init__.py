"""Predictions and references to numbers: arrays and lists in, numbers out; knows no model."""

from __future__ import annotations

from firth.metrics.bootstrap import Comparison, failed, paired_bootstrap, summarise
from firth.metrics.by_task import SCORERS, score
from firth.metrics.classification import (
    Row,
    accuracy,
    by_class,
    confusion,
    f1,
    hits,
    macro_f1,
    majority,
    mcc,
    micro_f1,
    weighted_f1,
)
from firth.metrics.correlation import pearson, spearman, word_similarity
from firth.metrics.pairs import analogy_hits, best_threshold, by_group, pair_hits, retrieval, threshold_accuracy
from firth.metrics.squad import (
    best_no_answer_threshold,
    normalise_squad,
    normalise_trivia,
    squad_each,
    squad_exact_match,
    squad_f1,
    squad_scores,
)
from firth.metrics.sums import Sums, entity_sums, has_sums, mean_of, sums
from firth.metrics.tagging import (
    Chunk,
    are_chunks,
    by_type,
    chunks,
    entity_f1,
    entity_precision,
    entity_recall,
    strays,
    tag_accuracy,
)
from firth.metrics.text import bits_per_byte, bleu, chrf, exact_match, perplexity, rouge

__all__ = [
    "SCORERS",
    "Chunk",
    "Comparison",
    "Row",
    "Sums",
    "accuracy",
    "analogy_hits",
    "are_chunks",
    "best_no_answer_threshold",
    "best_threshold",
    "bits_per_byte",
    "bleu",
    "by_class",
    "by_group",
    "by_type",
    "chrf",
    "chunks",
    "confusion",
    "entity_f1",
    "entity_precision",
    "entity_recall",
    "entity_sums",
    "exact_match",
    "f1",
    "failed",
    "has_sums",
    "hits",
    "macro_f1",
    "majority",
    "mcc",
    "mean_of",
    "micro_f1",
    "normalise_squad",
    "normalise_trivia",
    "pair_hits",
    "paired_bootstrap",
    "pearson",
    "perplexity",
    "retrieval",
    "rouge",
    "score",
    "spearman",
    "squad_each",
    "squad_exact_match",
    "squad_f1",
    "squad_scores",
    "strays",
    "summarise",
    "sums",
    "tag_accuracy",
    "threshold_accuracy",
    "weighted_f1",
    "word_similarity",
]
