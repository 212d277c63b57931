"""Default recipes for fine-tuning."""

from __future__ import annotations

from typing import Any

from firth.models import ModelConfig
from firth.models.config import BAG


def finetuning(model: ModelConfig) -> dict[str, Any]:
    """Fields of a FinetuneRecipe that suit a model of this size: 5e-5 at BERT-base's width, more for narrow ones."""
    rate = 5e-5 * (768 / model.dim) ** 1.5 * (3 if model.shape == "encoder-decoder" else 1)
    rate = 5e-3 if model.family == BAG else rate  # word vectors alone, which nothing above them scales
    return {"learning_rate": float(f"{rate:.1e}")}
