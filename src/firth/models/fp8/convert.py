"""Switch a model's blocks to FP8 training, in place: parameters, their names and checkpoints stay as they are."""

from __future__ import annotations

import torch
from torch import nn

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.models.attention import Attention
from firth.models.backbone import Stack
from firth.models.block import MLP, Block
from firth.models.bottleneck import BottleneckBlock
from firth.models.fp8.block import Float8Attention, Float8Block, Float8MLP, Float8Stack
from firth.models.fp8.linear import FP8_ALIGNMENT, Float8Linear

MIN_FP8_CAPABILITY = (8, 9)  # CUDA compute capability of the first GPUs with FP8 matmuls (Ada, Hopper)
FP8_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    Stack: Float8Stack,
    Block: Float8Block,
    Attention: Float8Attention,
    MLP: Float8MLP,
}


def convert_to_fp8(model: nn.Module, device: torch.device) -> None:
    """Let the linear layers of all blocks train in FP8. Layers of unaligned widths, and LoRA's, stay as they are."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_FP8_CAPABILITY:
        raise UserError(f"{torch.cuda.get_device_name(device)} has no FP8 matmuls: leave fp8 out.")
    if any(isinstance(module, BottleneckBlock) for module in model.modules()):
        raise UserError("fp8 does not support the bottlenecks of MobileBERT: leave fp8 out.")
    if device.type == "cpu":
        say("fp8 on a CPU is emulated and slow: use it for tests only.")
    modules = [m for stack in model.modules() if isinstance(stack, Stack) for m in (stack, *stack.blocks.modules())]
    linears = [m for m in modules if isinstance(m, nn.Linear) and type(m) in (nn.Linear, Float8Linear)]
    unaligned = [m for m in linears if m.in_features % FP8_ALIGNMENT or m.out_features % FP8_ALIGNMENT]
    if len(unaligned) == len(linears):
        raise UserError(
            f"fp8 needs layers whose widths are multiples of {FP8_ALIGNMENT}, and this model has none: leave fp8 out."
        )
    for module in modules:
        module.__class__ = FP8_CLASSES.get(type(module), type(module))
    for layer in linears:
        if layer not in unaligned:
            layer.__class__ = Float8Linear
    if unaligned:
        layers = format_count(len(unaligned), "layer stays", "layers stay")
        say(f"{layers} out of FP8: the width is not a multiple of {FP8_ALIGNMENT}.")
