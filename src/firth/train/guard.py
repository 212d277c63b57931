"""Steps that would do harm: found and skipped on the device, which never waits for the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from firth.train.device import Machine
from firth.train.recipe import Training

WINDOW = 128  # steps whose median is what is usual
ENOUGH = 16  # steps that must have been seen before anything is unusual
FIRST_SCALE = 2.0**16  # of a loss in float16
CALM = 2000  # steps without an overflow after which the scale is doubled again


class Found(NamedTuple):
    """What a step came to, once it can be read."""

    loss: float
    norm: float  # of the gradient, before it is cut
    skipped: float  # 1 where nothing was changed
    scale: float  # of the loss; 1 but for float16

    @property
    def reason(self) -> str | None:
        """Why it was skipped."""
        if not self.skipped:
            return None
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if not math.isfinite(self.norm):
            return f"the gradient is {self.norm}"
        return f"a spike: the loss is {self.loss:.4g}, the gradient {self.norm:.4g}"

    @property
    def expected(self) -> bool:
        """Whether it was skipped only because the scale of float16 had not been found yet."""
        return bool(self.skipped) and self.scale > 1 and math.isfinite(self.loss) and not math.isfinite(self.norm)


class Guard:
    """Judges each step by its loss and the length of its gradient; what it knows of earlier ones is on the device."""

    def __init__(self, training: Training, machine: Machine) -> None:
        device = machine.device
        self.factor = training.spike_factor
        self.usual = torch.full((2, WINDOW), math.nan, device=device)  # losses and norms of steps that were not skipped
        self.scale = torch.tensor(FIRST_SCALE, device=device) if machine.fp16 else None
        self.calm = torch.zeros((), device=device)
        self.found = torch.zeros(len(Found._fields), device=device)  # of the last step

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor, step: int) -> Tensor:
        """1 where this step is to change nothing, else 0: a number on the device."""
        both = torch.stack([loss.float(), norm.float()])
        bad = ~both.isfinite().all()
        if self.factor:
            known = self.usual[0].isfinite().sum() >= ENOUGH
            bad = bad | (known & (both > self.factor * medians(self.usual)).any())
            self.usual[:, step % WINDOW] = torch.where(bad, math.nan, both)
        scale = torch.ones_like(both[0]) if self.scale is None else self.scale
        self.found = torch.stack([*both, bad.float(), scale])
        if self.scale is not None:
            self.rescale(~norm.isfinite())
        return bad.float()

    @property
    def skipped(self) -> Tensor:
        """1 where the last step has changed nothing, else 0: on the device, which need not be waited for."""
        return self.found[2]

    def rescale(self, overflow: Tensor) -> None:
        """Half the scale after an overflow, twice the scale after a long calm."""
        assert self.scale is not None
        self.calm = torch.where(overflow, 0.0, self.calm + 1)
        grown = torch.where(self.calm >= CALM, 2 * self.scale, self.scale)
        self.scale = torch.where(overflow, self.scale / 2, grown)
        self.calm = torch.where(self.calm >= CALM, 0.0, self.calm)

    def state(self) -> dict[str, Tensor]:
        """What a resumed run must know; nothing where nothing is remembered."""
        kept = {"usual": self.usual} if self.factor else {}
        return kept if self.scale is None else {**kept, "scale": self.scale, "calm": self.calm}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what was kept."""
        for name in self.state():
            if name in state:
                setattr(self, name, state[name])


def medians(rows_RN: Tensor) -> Tensor:
    """(R,): the median of each row, what is no number left out. `nanmedian` waits for a GPU to count these."""
    num_R1 = (~rows_RN.isnan()).sum(1, keepdim=True)
    middle_R1 = (num_R1 - 1).clamp(min=0) // 2
    return rows_RN.sort(1).values.gather(1, middle_R1)[:, 0]  # what is no number comes last
