"""A step in bfloat16 throughout, for weights that are kept in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from firth.models import Model

LossFn = Callable[[Any], dict[str, torch.Tensor]]


class BF16Replica:
    """The losses of a model, computed by a twin whose weights are its own, rounded to bfloat16.

    The model keeps the exact weights, which the optimizer moves, and gets the twin's gradients, added up in float32;
    unless the optimizer takes them as they are, and moves the twin's weights too.
    """

    def __init__(self, model: Model, compile_fn: Callable[[LossFn], LossFn]) -> None:
        self.model = model
        self.replica = model.clone().bfloat16()
        self.loss_fn = compile_fn(self.replica.losses)
        self.parameter_pairs = list(
            zip(model.parameters(), self.replica.parameters(), strict=True)
        )  # found once: they stay
        self.synced_versions: list[
            tuple[int, int]
        ] = []  # the weights that the twin has, where the optimizer gave them to it too

    def __call__(self, batch: Any) -> dict[str, torch.Tensor]:
        with torch.autocast(self.parameter_pairs[0][0].device.type, enabled=False):
            return self.loss_fn(batch)

    def sync_weights(self) -> None:
        """Take over the weights before a step, where it has others, and what of them learns."""
        for exact, mine in self.parameter_pairs:
            mine.requires_grad_(exact.requires_grad)
        if self.weight_versions() != self.synced_versions:
            with torch.no_grad():
                torch._foreach_copy_(
                    [mine for _, mine in self.parameter_pairs], [exact for exact, _ in self.parameter_pairs]
                )
        if self.replica.training != self.model.training:
            self.replica.train(self.model.training)

    def weight_versions(self) -> list[tuple[int, int]]:
        """Where the exact weights are, and how often others have changed them. (Optimizers in one kernel go uncounted,
        and so does whoever writes to their `.data`.)
        """
        return [(exact.data_ptr(), exact._version) for exact, _ in self.parameter_pairs]

    def mark_updated(self, replica_updated: bool) -> None:
        """An optimizer has moved the exact weights, or both theirs and the twin's."""
        self.synced_versions = self.weight_versions() if replica_updated else []

    def pending_gradients(self) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
        """The exact weights whose gradients the twin still has, and its own."""
        return {exact: mine for exact, mine in self.parameter_pairs if mine.grad is not None}

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Add the gradients of a micro-batch to those of the model."""
        first, more = list[tuple[torch.Tensor, torch.Tensor]](), list[tuple[torch.Tensor, torch.Tensor]]()
        for exact, mine in self.parameter_pairs:
            if mine.grad is None:
                continue
            if exact.grad is None:
                exact.grad = torch.empty_like(exact)
                first.append((exact.grad, mine.grad))
            else:
                more.append((exact.grad, mine.grad))
            mine.grad = None
        for add_up, some in ((torch._foreach_copy_, first), (torch._foreach_add_, more)):
            if some:
                add_up([to for to, _ in some], [found for _, found in some])
