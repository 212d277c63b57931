"""Matrix products in 8 bits, each tensor with a scale of its own, for GPUs that have instructions for them.

N places, I numbers that are read, O that are written.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from firth.console import count, say
from firth.errors import UserError
from firth.models import Model, Stack

EXACT, WIDE = torch.float8_e4m3fn, torch.float8_e5m2  # for weights and states; for gradients, which differ more in size
STEP = 16  # what the instructions take is a multiple of this, both ways
LEAST = (8, 9)  # the first GPUs that have them


def use_eight_bits(model: Model, device: torch.device) -> None:
    """Let the layers of all blocks learn by products in 8 bits; what is too odd in size stays as it is."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST:
        raise UserError(f"{torch.cuda.get_device_name(device)} has no products in 8 bits: leave fp8 out.")
    if device.type == "cpu":
        say("fp8 on a CPU was asked for: expect it to be slow, and to be of use for trying it out alone.")
    found = [m for stack in model.modules() if isinstance(stack, Stack) for m in stack.blocks.modules()]
    layers = [m for m in found if type(m) is nn.Linear]
    odd = [m for m in layers if m.in_features % STEP or m.out_features % STEP]
    if len(odd) == len(layers):
        raise UserError(f"This model has no layers whose widths are multiples of {STEP}, as fp8 needs: leave it out.")
    for layer in layers:
        if layer not in odd:
            layer.__class__ = Linear8
    if odd:
        say(f"{count(len(odd), 'layer is', 'layers are')} not a multiple of {STEP} wide, and not in 8 bits.")


class Linear8(nn.Linear):
    """The same layer, which learns in 8 bits; when it is only asked, it is exact."""

    def forward(self, x: Tensor) -> Tensor:
        places = x.numel() // self.in_features
        if not self.training or places % STEP:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = Product8.apply(x.reshape(places, -1), self.weight).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Product8(torch.autograd.Function):
    """x W', and the gradients of both."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        x_NI, w_OI = given
        (x8, of_x), (w8, of_w) = in_eight_bits(x_NI, EXACT), in_eight_bits(w_OI, EXACT)
        ctx.save_for_backward(x8, of_x, w8, of_w)
        ctx.dtypes = x_NI.dtype, w_OI.dtype
        return product(x8, w8.t(), of_x, of_w, torch.bfloat16, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *asked: Tensor) -> tuple[Tensor, Tensor]:
        x8, of_x, w8, of_w = ctx.saved_tensors
        dy8, of_dy = in_eight_bits(asked[0], WIDE)
        dx_NI = product(dy8, by_columns(w8), of_dy, of_w, torch.bfloat16)
        dw_OI = product(dy8.t().contiguous(), by_columns(x8), of_dy, of_x, torch.bfloat16)
        return dx_NI.to(ctx.dtypes[0]), dw_OI.to(ctx.dtypes[1])


def in_eight_bits(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor whose largest number is the largest of 8 bits, and what to multiply it with again."""
    most = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=1e-12) / most
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


def product(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Rows of `a` by columns of `b`, which lie in memory in just this order."""
    return torch._scaled_mm(a, b, scale_a=of_a, scale_b=of_b, out_dtype=dtype, use_fast_accum=fast)


def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()
