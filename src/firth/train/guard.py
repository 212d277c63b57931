"""Steps that would do harm: found and skipped on the device, which never waits for the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from firth.train.compute import ComputeConfig
from firth.train.recipe import TrainingConfig

MEDIAN_WINDOW_STEPS = 128  # steps whose median is what is usual
MIN_HISTORY_STEPS = 16  # steps that must have been seen before anything is unusual
INIT_LOSS_SCALE = 2.0**16  # of a loss in float16
SCALE_GROWTH_STEPS = 2000  # steps without an overflow after which the scale is doubled again


class StepOutcome(NamedTuple):
    """What a step came to, once it can be read."""

    loss: float
    grad_norm: float  # of the gradient, before it is cut
    was_skipped: float  # 1 where nothing was changed
    loss_scale: float  # of the loss; 1 but for float16

    @property
    def skip_reason(self) -> str | None:
        """Why it was skipped."""
        if not self.was_skipped:
            return None
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if not math.isfinite(self.grad_norm):
            return f"the gradient is {self.grad_norm}"
        return f"a spike: the loss is {self.loss:.4g}, the gradient {self.grad_norm:.4g}"

    @property
    def is_fp16_overflow(self) -> bool:
        """Whether it was skipped only because the scale of float16 had not been found yet."""
        return (
            bool(self.was_skipped)
            and self.loss_scale > 1
            and math.isfinite(self.loss)
            and not math.isfinite(self.grad_norm)
        )


class Guard:
    """Judges each step by its loss and the length of its gradient; what it knows of earlier ones is on the device."""

    def __init__(self, training: TrainingConfig, compute: ComputeConfig) -> None:
        device = compute.device
        self.spike_factor = training.spike_factor
        self.history = torch.full(
            (2, MEDIAN_WINDOW_STEPS), math.nan, device=device
        )  # losses and norms of steps that were not skipped
        self.loss_scale = torch.tensor(INIT_LOSS_SCALE, device=device) if compute.fp16 else None
        self.finite_steps = torch.zeros((), device=device)
        self.last_outcome = torch.zeros(len(StepOutcome._fields), device=device)  # of the last step

    @torch.no_grad()
    def should_skip(self, loss: Tensor, grad_norm: Tensor, step: int) -> Tensor:
        """1 where this step is to change nothing, else 0: a number on the device."""
        both = torch.stack([loss.float(), grad_norm.float()])
        bad = ~both.isfinite().all()
        if self.spike_factor:
            known = self.history[0].isfinite().sum() >= MIN_HISTORY_STEPS
            bad = bad | (known & (both > self.spike_factor * nan_row_medians(self.history)).any())
            self.history[:, step % MEDIAN_WINDOW_STEPS] = torch.where(bad, math.nan, both)
        scale = torch.ones_like(both[0]) if self.loss_scale is None else self.loss_scale
        self.last_outcome = torch.stack([*both, bad.float(), scale])
        if self.loss_scale is not None:
            self.update_loss_scale(~grad_norm.isfinite())
        return bad.float()

    @property
    def last_skipped(self) -> Tensor:
        """1 where the last step has changed nothing, else 0: on the device, which need not be waited for."""
        return self.last_outcome[2]

    def update_loss_scale(self, overflow: Tensor) -> None:
        """Half the scale after an overflow, twice the scale after a long calm."""
        assert self.loss_scale is not None
        self.finite_steps = torch.where(overflow, 0.0, self.finite_steps + 1)
        grown = torch.where(self.finite_steps >= SCALE_GROWTH_STEPS, 2 * self.loss_scale, self.loss_scale)
        self.loss_scale = torch.where(overflow, self.loss_scale / 2, grown)
        self.finite_steps = torch.where(self.finite_steps >= SCALE_GROWTH_STEPS, 0.0, self.finite_steps)

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run must know; nothing where nothing is remembered."""
        kept = {"history": self.history} if self.spike_factor else {}
        return (
            kept
            if self.loss_scale is None
            else {**kept, "loss_scale": self.loss_scale, "finite_steps": self.finite_steps}
        )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what was kept."""
        for name in self.state_dict():
            if name in state:
                setattr(self, name, state[name])


def nan_row_medians(rows_RN: Tensor) -> Tensor:
    """(R,): the median of each row, what is no number left out. `nanmedian` waits for a GPU to count these."""
    num_R1 = (~rows_RN.isnan()).sum(1, keepdim=True)
    middle_R1 = (num_R1 - 1).clamp(min=0) // 2
    return rows_RN.sort(1).values.gather(1, middle_R1)[:, 0]  # what is no number comes last
