"""Learning by matrix products in 8 bits."""

from __future__ import annotations

import torch
from torch import nn

from firth.console import count, say
from firth.errors import UserError
from firth.models import Model, Stack
from firth.models.eight import STEP, Linear8

LEAST = (8, 9)  # the first GPUs that have them


def use_eight_bits(model: Model, device: torch.device) -> None:
    """Let the layers of all blocks learn by products in 8 bits; what is too odd in size stays as it is."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST:
        raise UserError(f"{torch.cuda.get_device_name(device)} has no products in 8 bits: leave fp8 out.")
    if device.type == "cpu":
        say("fp8 on a CPU was asked for: expect it to be slow, and to be of use for trying it out alone.")
    found = [m for stack in model.modules() if isinstance(stack, Stack) for m in stack.blocks.modules()]
    layers = [m for m in found if isinstance(m, nn.Linear) and type(m) in (nn.Linear, Linear8)]  # LoRA's are others
    odd = [m for m in layers if m.in_features % STEP or m.out_features % STEP]
    if len(odd) == len(layers):
        raise UserError(f"This model has no layers whose widths are multiples of {STEP}, as fp8 needs: leave it out.")
    for layer in layers:
        if layer not in odd:
            layer.__class__ = Linear8
    if odd:
        say(f"{count(len(odd), 'layer is', 'layers are')} not a multiple of {STEP} wide, and not in 8 bits.")
