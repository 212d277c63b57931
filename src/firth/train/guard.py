"""The guard: skip steps with a NaN, an infinity or a loss spike, decided on the device.

A single bad batch can ruin a run: a NaN gradient destroys every weight, and an outlier can push the loss up for
thousands of steps (PaLM, Chowdhery et al. 2022, section 5.1). The guard therefore judges each step after its backward
pass and before its update, by two scalars: the loss and the gradient norm before clipping.

- NaN or Inf in either: the step is always skipped.
- Spike: with `spike_factor` > 0 a step is skipped when either scalar exceeds `spike_factor` times its median over the
  last `MEDIAN_WINDOW_STEPS` steps. The median is robust: skipped steps do not enter it, and a slow rise moves it along.

Reading a scalar on the host (`if loss.isnan()`) would stall the GPU at every step. Here the verdict stays a tensor of
0 or 1: torch's fused optimizers skip the update where their `found_inf` is 1. The host reads it one step later.
`max_bad_steps` skipped steps in a row end the run (`loop.py`, `diagnose.py`).

fp16 also needs dynamic loss scaling (Micikevicius et al. 2018, section 3.2): the loss is multiplied by a scale so that
small gradients do not underflow. An overflow halves the scale and skips the step; `SCALE_GROWTH_STEPS` steps without
one double it. The first steps overflow until the scale fits, which does not count as a bad step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from firth.train.compute import ComputeConfig
from firth.train.recipe import TrainingConfig

MEDIAN_WINDOW_STEPS = 128  # steps in the running median of loss and gradient norm
MIN_HISTORY_STEPS = 16  # accepted steps before a step can be a spike
INIT_LOSS_SCALE = 2.0**16  # initial loss scale of fp16, as in torch.amp.GradScaler
SCALE_GROWTH_STEPS = 2000  # steps without an overflow before the loss scale doubles


class StepOutcome(NamedTuple):
    """The scalars of one step, as read on the host."""

    loss: float
    grad_norm: float  # before clipping
    was_skipped: float  # 1.0: the weights were not updated
    loss_scale: float  # 1.0 except with fp16

    @property
    def skip_reason(self) -> str | None:
        """The cause, or None if the step was not skipped."""
        if not self.was_skipped:
            return None
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if not math.isfinite(self.grad_norm):
            return f"the gradient is {self.grad_norm}"
        return f"a spike: the loss is {self.loss:.4g}, the gradient {self.grad_norm:.4g}"

    @property
    def is_fp16_overflow(self) -> bool:
        """Whether only the fp16 loss scale was too large: a finite loss with an infinite gradient."""
        return (
            bool(self.was_skipped)
            and self.loss_scale > 1
            and math.isfinite(self.loss)
            and not math.isfinite(self.grad_norm)
        )


class Guard:
    """Decides for each step whether to skip it. All state lives on the device."""

    def __init__(self, training: TrainingConfig, compute: ComputeConfig) -> None:
        device = compute.device
        self.spike_factor = training.spike_factor
        # Ring buffers of losses and gradient norms; NaN where a step was skipped or has not run.
        self.history = torch.full((2, MEDIAN_WINDOW_STEPS), math.nan, device=device)
        self.loss_scale = torch.tensor(INIT_LOSS_SCALE, device=device) if compute.fp16 else None
        self.finite_steps = torch.zeros((), device=device)
        self.last_outcome = torch.zeros(len(StepOutcome._fields), device=device)  # the last step's StepOutcome

    @torch.no_grad()
    def should_skip(self, loss: Tensor, grad_norm: Tensor, step: int) -> Tensor:
        """Return 1.0 if this step must not update the weights, else 0.0, as a scalar tensor on the device."""
        scalars = torch.stack([loss.float(), grad_norm.float()])
        skip = ~scalars.isfinite().all()
        if self.spike_factor:
            has_history = self.history[0].isfinite().sum() >= MIN_HISTORY_STEPS
            skip = skip | (has_history & (scalars > self.spike_factor * nan_row_medians(self.history)).any())
            self.history[:, step % MEDIAN_WINDOW_STEPS] = torch.where(skip, math.nan, scalars)
        scale = torch.ones_like(scalars[0]) if self.loss_scale is None else self.loss_scale
        self.last_outcome = torch.stack([*scalars, skip.float(), scale])
        if self.loss_scale is not None:
            self.update_loss_scale(~grad_norm.isfinite())
        return skip.float()

    @property
    def last_skipped(self) -> Tensor:
        """1.0 if the last step was skipped, else 0.0, as a tensor on the device: reading it does not synchronize."""
        return self.last_outcome[2]

    def update_loss_scale(self, overflow: Tensor) -> None:
        """Halve the loss scale after an overflow; double it after `SCALE_GROWTH_STEPS` steps without one."""
        assert self.loss_scale is not None
        self.finite_steps = torch.where(overflow, 0.0, self.finite_steps + 1)
        grown_scale = torch.where(self.finite_steps >= SCALE_GROWTH_STEPS, 2 * self.loss_scale, self.loss_scale)
        self.loss_scale = torch.where(overflow, self.loss_scale / 2, grown_scale)
        self.finite_steps = torch.where(self.finite_steps >= SCALE_GROWTH_STEPS, 0.0, self.finite_steps)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that an exact resume needs; empty without spike detection and fp16."""
        state = {"history": self.history} if self.spike_factor else {}
        if self.loss_scale is not None:
            state |= {"loss_scale": self.loss_scale, "finite_steps": self.finite_steps}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint."""
        for name in self.state_dict():
            if name in state:
                setattr(self, name, state[name])


def nan_row_medians(rows_RN: Tensor) -> Tensor:
    """(R, N) -> (R,): lower median of each row without its NaNs. `torch.nanmedian` would synchronize with the GPU."""
    num_R1 = (~rows_RN.isnan()).sum(1, keepdim=True)
    middle_R1 = (num_R1 - 1).clamp(min=0) // 2
    return rows_RN.sort(1).values.gather(1, middle_R1)[:, 0]  # NaN sorts last
