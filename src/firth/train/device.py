"""Where a run computes, and in which precision: what the machine really does well."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from firth.console import say
from firth.errors import UserError
from firth.train.recipe import Training


@dataclass(frozen=True)
class Machine:
    device: torch.device
    bf16: bool
    compile: bool

    def precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def __str__(self) -> str:
        name = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"{torch.get_num_threads()} CPU threads"
        )
        return f"{name}, {'bfloat16' if self.bf16 else 'float32'}{', compiled' if self.compile else ''}"


def choose_machine(training: Training) -> Machine:
    """A GPU where there is one. On a CPU bfloat16 is emulated on many machines and slower by orders of magnitude."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    can = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if training.bf16 and device.type == "cuda" and not can:
        raise UserError("This GPU has no bfloat16: leave --bf16 out.")
    bf16 = can if training.bf16 is None else training.bf16
    if bf16 and device.type == "cpu":
        say("bfloat16 on a CPU was asked for: expect it to be slow where the CPU has no such instructions.")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return Machine(device, bf16, device.type == "cuda" if training.compile is None else training.compile)
