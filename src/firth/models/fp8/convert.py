"""Learning by matrix products in 8 bits."""

from __future__ import annotations

import torch
from torch import nn

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.models import Model, Stack
from firth.models.fp8.linear import FP8_ALIGNMENT, Float8Linear

MIN_FP8_CAPABILITY = (8, 9)  # the first GPUs that have them


def convert_to_fp8(model: Model, device: torch.device) -> None:
    """Let the layers of all blocks learn by products in 8 bits; what is too odd in size stays as it is."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_FP8_CAPABILITY:
        raise UserError(f"{torch.cuda.get_device_name(device)} has no products in 8 bits: leave fp8 out.")
    if device.type == "cpu":
        say("fp8 on a CPU was asked for: expect it to be slow, and to be of use for trying it out alone.")
    found = [m for stack in model.modules() if isinstance(stack, Stack) for m in stack.blocks.modules()]
    layers = [
        m for m in found if isinstance(m, nn.Linear) and type(m) in (nn.Linear, Float8Linear)
    ]  # LoRA's are others
    odd = [m for m in layers if m.in_features % FP8_ALIGNMENT or m.out_features % FP8_ALIGNMENT]
    if len(odd) == len(layers):
        raise UserError(
            f"This model has no layers whose widths are multiples of {FP8_ALIGNMENT}, as fp8 needs: leave it out."
        )
    for layer in layers:
        if layer not in odd:
            layer.__class__ = Float8Linear
    if odd:
        say(
            f"{format_count(len(odd), 'layer is', 'layers are')} not a multiple of {FP8_ALIGNMENT} wide, and not in 8 bits."
        )
