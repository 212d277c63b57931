"""A model to text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firth.core.lazy import make_lazy

if TYPE_CHECKING:
    from firth.generate.config import GenerationConfig
    from firth.generate.fill import Blank, Guess, fill, fill_texts
    from firth.generate.loop import GeneratedSequence, generate_ids, generate_sequences
    from firth.generate.text import generate, generate_results, stream_text

__all__ = [
    "Blank",
    "GeneratedSequence",
    "GenerationConfig",
    "Guess",
    "fill",
    "fill_texts",
    "generate",
    "generate_ids",
    "generate_results",
    "generate_sequences",
    "stream_text",
]

make_lazy(__name__)
