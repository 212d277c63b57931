"""A model and data to metrics."""

from firth.evaluate.evaluate import evaluate
from firth.evaluate.export import largest_difference

__all__ = ["evaluate", "largest_difference"]
