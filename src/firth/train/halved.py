"""A step in bfloat16 throughout, for weights that are kept in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from firth.models import Model

Losses = Callable[[Any], dict[str, torch.Tensor]]


class Halved:
    """The losses of a model, computed by a twin whose weights are its own, rounded to bfloat16.

    The model keeps the exact weights, which the optimizer moves, and gets the twin's gradients, added up in float32.
    """

    def __init__(self, model: Model, program: Callable[[Losses], Losses]) -> None:
        self.model = model
        self.twin = copy.deepcopy(model, {id(model.tokenizer): model.tokenizer}).bfloat16()
        self.losses = program(self.twin.losses)

    def __call__(self, batch: Any) -> dict[str, torch.Tensor]:
        with torch.autocast(next(self.model.parameters()).device.type, enabled=False):
            return self.losses(batch)

    def begin(self) -> None:
        """Take over the weights before a step, and what of them learns."""
        pairs = list(zip(self.twin.parameters(), self.model.parameters(), strict=True))
        for mine, exact in pairs:
            mine.requires_grad_(exact.requires_grad)
        with torch.no_grad():
            torch._foreach_copy_([mine for mine, _ in pairs], [exact for _, exact in pairs])
        self.twin.train(self.model.training)

    @torch.no_grad()
    def hand_over(self) -> None:
        """Add the gradients of a micro-batch to those of the model."""
        for mine, exact in zip(self.twin.parameters(), self.model.parameters(), strict=True):
            if mine.grad is None:
                continue
            exact.grad = mine.grad.float() if exact.grad is None else exact.grad.add_(mine.grad)
            mine.grad = None
