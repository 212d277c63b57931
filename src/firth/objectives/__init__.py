"""Rows to what is read and what is asked."""

from firth.objectives.batch import IGNORED, Batch
from firth.objectives.draw import Draw
from firth.objectives.objectives import CLM, DEFAULT, MLM, Objective, SpanCorruption

__all__ = ["CLM", "DEFAULT", "IGNORED", "MLM", "Batch", "Draw", "Objective", "SpanCorruption"]
