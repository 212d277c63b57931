"""Settings of knowledge distillation (`distill.py`) and of layer-wise transfer (`knowledge_transfer.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from firth.core.errors import UserError


@dataclass(frozen=True)
class Distillation:
    """The temperature, and the weight of each part of the loss; 0 disables a part. Defaults: DistilBERT's training."""

    temperature: float = 2.0
    soft: float = 5.0
    hard: float = 2.0
    cosine: float = 1.0
    soft_at: Literal["tokens", "targets"] = "tokens"

    def __post_init__(self) -> None:
        if not self.temperature > 0 or min(self.soft, self.hard, self.cosine) < 0:
            raise UserError("distillation: temperature must be more than 0, and no weight negative.")


MOBILEBERT_DISTILLATION = Distillation(1.0, soft=0.5, hard=0.5, cosine=0.0, soft_at="targets")  # as the authors trained


@dataclass(frozen=True)
class KnowledgeTransfer:
    """Strategy and weights of layer-wise knowledge transfer. Weights and `share` are those of the authors' program.

    `share` is the part of the run that progressive and joint transfer take, before distillation. `lower_rate` is the
    learning rate of the layers below the one that progressive transfer trains, relative to its own; 0 freezes them.
    """

    strategy: Literal["none", "progressive", "joint", "auxiliary"] = "none"
    share: float = 0.32  # 240,000 of 740,000 steps
    feature_map: float = 100.0
    mean: float = 5000.0
    variance: float = 5.0
    attention: float = 1.0
    lower_rate: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or not 0 <= self.lower_rate <= 1:
            raise UserError("knowledge_transfer: share must be between 0 and 1, lower_rate at least 0 and at most 1.")
        if min(self.feature_map, self.mean, self.variance, self.attention) < 0:
            raise UserError("knowledge_transfer: no weight may be negative.")

    def layers_at(self, progress: float, num_layers: int) -> range:
        """Return the layers that are compared at a `progress` of the run from 0 to 1; empty: distillation alone."""
        if self.strategy == "none" or (self.strategy != "auxiliary" and progress >= self.share):
            return range(0)
        if self.strategy != "progressive":
            return range(num_layers)
        layer = min(int(progress / self.share * num_layers), num_layers - 1)
        return range(layer, layer + 1)

    def distills_at(self, progress: float) -> bool:
        """Whether the loss has the part of the vocabulary."""
        return self.strategy in ("none", "auxiliary") or progress >= self.share

    def rate_factor(self, progress: float, num_layers: int, layer: int) -> float:
        """Return the factor of the learning rate of a layer's parameters."""
        layers = self.layers_at(progress, num_layers)
        return self.lower_rate if self.strategy == "progressive" and layers and layer < layers[0] else 1.0
