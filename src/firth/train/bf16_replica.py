"""Train on a bf16 copy of the weights; the optimizer keeps fp32 master weights.

Autocast converts each fp32 weight to bf16 in every forward pass. A replica holds the weights in bf16 once, so a step
reads half the bytes and converts nothing. Adam's small updates would vanish in bf16 (8 bits of mantissa), so the model
keeps fp32 master weights (Micikevicius et al. 2018, "Mixed Precision Training", section 3.1):

1. before a step, copy the master weights to the replica where they changed (`begin_step`);
2. forward and backward run on the replica; its bf16 gradients are added to the model's in fp32 (`end_micro_batch`);
3. the optimizer updates the master weights.

With one micro-batch and the fused AdamW on a GPU, steps 1 to 3 are one kernel: it reads the replica's gradients,
updates the master weights and writes the rounded weights to the replica (`train/adamw.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from firth.models import Model
from firth.train.adamw import can_step_from_replica
from firth.train.compute import ComputeConfig
from firth.train.step_runner import LossFn, StepRunner


class BF16Replica(StepRunner):
    """Run a bf16 copy of the model."""

    def __init__(self, model: Model, compile_fn: Callable[[LossFn], LossFn], compute: ComputeConfig) -> None:
        self.replica = model.clone().bfloat16()
        compiled = compile_fn(partial(self.replica.losses, with_metrics=True))

        def losses(batch: object) -> dict[str, torch.Tensor]:
            with torch.autocast(compute.device.type, enabled=False):
                return compiled(batch)

        super().__init__(model, losses, compute)
        self.parameter_pairs = list(zip(model.parameters(), self.replica.parameters(), strict=True))
        self.synced_versions: list[tuple[int, int]] = []  # master weights that the optimizer also wrote to the replica

    @property
    def compute_model(self) -> Model:
        return self.replica

    def begin_step(self) -> None:
        """Copy master weights that changed, and which parameters are trained."""
        for master, copy in self.parameter_pairs:
            copy.requires_grad_(master.requires_grad)
        if self.weight_versions() != self.synced_versions:
            with torch.no_grad():
                torch._foreach_copy_(
                    [copy for _, copy in self.parameter_pairs], [master for master, _ in self.parameter_pairs]
                )
        if self.replica.training != self.model.training:
            self.replica.train(self.model.training)

    def weight_versions(self) -> list[tuple[int, int]]:
        """Address and version of each master weight. Fused optimizers and writes to `.data` do not change a version."""
        return [(master.data_ptr(), master._version) for master, _ in self.parameter_pairs]

    def end_micro_batch(self, index: int, num_micro_batches: int, keep_in_replica: bool) -> None:
        """Add the replica's gradients to the model's, unless the optimizer can read them from the replica."""
        if not (keep_in_replica and num_micro_batches == 1 and can_step_from_replica(self.pending_gradients())):
            self.accumulate_gradients()

    def pending_gradients(self) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
        return {master: copy for master, copy in self.parameter_pairs if copy.grad is not None}

    def end_step(self, replica_updated: bool) -> None:
        self.synced_versions = self.weight_versions() if replica_updated else []

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Add the gradients of a micro-batch to those of the model, in fp32."""
        first, more = list[tuple[torch.Tensor, torch.Tensor]](), list[tuple[torch.Tensor, torch.Tensor]]()
        for master, copy in self.parameter_pairs:
            if copy.grad is None:
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
                first.append((master.grad, copy.grad))
            else:
                more.append((master.grad, copy.grad))
            copy.grad = None
        for add_all, pairs in ((torch._foreach_copy_, first), (torch._foreach_add_, more)):
            if pairs:
                add_all([to for to, _ in pairs], [grad for _, grad in pairs])
