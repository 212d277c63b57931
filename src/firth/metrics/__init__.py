"""Metrics: predictions and references in, numbers out; independent of models."""

from __future__ import annotations

from firth.metrics.additive import (
    AdditiveScore,
    additive_entity_score,
    is_additive_metric,
    make_additive_score,
)
from firth.metrics.bootstrap import bootstrap_scores, compare_seeds, failed_runs, mean_and_std
from firth.metrics.classification import ClassMetrics, accuracy, f1, per_class_metrics
from firth.metrics.pairs import accuracy_by_group, analogy_correct, best_threshold, minimal_pair_correct
from firth.metrics.squad import best_squad_scores, normalise_squad, squad_per_question
from firth.metrics.tagging import (
    are_span_tags,
    entity_f1,
    entity_precision,
    entity_recall,
    find_stray_tags,
    per_type_metrics,
)
from firth.metrics.task_metrics import compute_metrics, format_difference, format_metric, is_share_metric
from firth.metrics.text import bits_per_byte, perplexity

__all__ = [
    "AdditiveScore",
    "ClassMetrics",
    "accuracy",
    "accuracy_by_group",
    "additive_entity_score",
    "analogy_correct",
    "are_span_tags",
    "best_squad_scores",
    "best_threshold",
    "bits_per_byte",
    "bootstrap_scores",
    "compare_seeds",
    "compute_metrics",
    "entity_f1",
    "entity_precision",
    "entity_recall",
    "f1",
    "failed_runs",
    "find_stray_tags",
    "format_difference",
    "format_metric",
    "is_additive_metric",
    "is_share_metric",
    "make_additive_score",
    "mean_and_std",
    "minimal_pair_correct",
    "normalise_squad",
    "per_class_metrics",
    "per_type_metrics",
    "perplexity",
    "squad_per_question",
]
