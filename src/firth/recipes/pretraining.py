"""Default recipes: what to start from for a model of this family and size."""

from __future__ import annotations

from typing import Any

from firth.models import ModelConfig
from firth.objectives import DEFAULT
from firth.train import Recipe

TOKENIZERS = {"encoder": "wordpiece", "decoder": "byte-bpe", "encoder-decoder": "unigram"}


def pretraining(model: ModelConfig, **fields: Any) -> Recipe:
    """A recipe for this model; `fields` are set on top."""
    return Recipe(**{"model": model, "objective": DEFAULT[model.shape](), "learning_rate": rate(model), **fields})


def rate(model: ModelConfig) -> float:
    """Wider models want lower rates: 1e-3 at 128, 2.5e-4 at 768 for one stack, more where the norm comes first."""
    highest = {"encoder": 1e-3, "decoder": 2e-3, "encoder-decoder": 3e-3}[model.shape]
    return float(f"{highest * (128 / max(model.dim, 128)) ** 0.75:.1e}")


def vocabulary_size(text_bytes: int) -> int:
    """How many tokens a text of this size can teach: 4,096 for a book, 32,768 for a gigabyte."""
    for size, below in ((4096, 4e6), (8192, 64e6), (16384, 512e6)):
        if text_bytes < below:
            return size
    return 32768
