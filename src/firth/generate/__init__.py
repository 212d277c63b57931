"""A model to text."""

from firth.generate.fill import Blank, Guess, fill
from firth.generate.sample import Sampling, generate, generate_ids

__all__ = ["Blank", "Guess", "Sampling", "fill", "generate", "generate_ids"]
