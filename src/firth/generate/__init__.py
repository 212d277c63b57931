"""A model to text."""

from firth.generate.decoding import Decoding
from firth.generate.fill import Blank, Guess, fill
from firth.generate.texts import generate, generate_results, stream
from firth.generate.write import Written, generate_ids, write

__all__ = [
    "Blank",
    "Decoding",
    "Guess",
    "Written",
    "fill",
    "generate",
    "generate_ids",
    "generate_results",
    "stream",
    "write",
]
