"""Predictions and references to numbers: arrays and lists in, numbers out; knows no model."""

from __future__ import annotations

from firth.metrics.classification import accuracy, confusion, macro_f1, mcc, summarise
from firth.metrics.text import METRICS, bits_per_byte, bleu, chrf, exact_match, perplexity, rouge_l, score

__all__ = [
    "METRICS",
    "accuracy",
    "bits_per_byte",
    "bleu",
    "chrf",
    "confusion",
    "exact_match",
    "macro_f1",
    "mcc",
    "perplexity",
    "rouge_l",
    "score",
    "summarise",
]
