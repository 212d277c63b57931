"""Linear maps that learn by products in 8 bits, each row with a scale of its own, for GPUs that have instructions.

What is multiplied by weights is in 8 bits, forward and backward; the gradients of weights are products in bfloat16, as
they add up over all places. Two maps with an activation between them are one function, so that what lies between is
written in 8 bits by the kernel that makes it; and so is a map with the norm of a sum after it.

N places, I numbers that are read, O that are written, F between two maps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from firth.models.activation import rounded
from firth.models.eight_norm import Ended, Ending, come_back, ended
from firth.models.eight_rows import EIGHT, HALF, activated_rows, activated_rows_backward, rows
from firth.models.eight_weights import Holds8
from firth.models.gated import KINDS

STEP = 16  # what the instructions take is a multiple of this, both ways


class Linear8(Holds8):
    """The same layer, which learns in 8 bits; when it is only asked, it is exact."""

    def forward(self, x: Tensor, end: Ending | None = None) -> Any:
        """With an `end`, what that gives."""
        return self.part(x, self.bias, end=end)

    def part(
        self, x: Tensor, bias_O: Tensor | None, start: int = 0, stop: int | None = None, end: Ending | None = None
    ) -> Any:
        """What its rows from `start` to `stop` make of `x`, with a bias for each."""
        w_OI = self.weight[start:stop]
        if not self.learns(x) or len(w_OI) % STEP:
            assert end is None, "an end is for a map that learns"
            return F.linear(x, w_OI, bias_O)
        if bias_O is not None and len(w_OI) < len(self.weight):  # torch 2.11's compiler takes a view for all of a bias
            bias_O = bias_O[torch.arange(len(bias_O), device=bias_O.device)]
        return given(Product8.apply(flat(x), w_OI, bias_O, *self.weights(start, stop), *(end or ())), x, end)

    def learns(self, x: Tensor) -> bool:
        return self.training and x.numel() > 0 and x.shape[:-1].numel() % STEP == 0


def more_places(rows: int, places: int) -> int:
    """How many more of each row it takes for all of them to suit the instructions."""
    return -places % (STEP // math.gcd(rows, STEP))


def two_maps(
    up: nn.Module, down: nn.Module, x: Tensor, activation: str, gated: bool, end: Ending | None = None
) -> Any | None:
    """`down` of an activation of `up`, if both learn in 8 bits; with an `end`, what that gives."""
    if not (isinstance(up, Linear8) and isinstance(down, Linear8) and up.learns(x) and activation in KINDS):
        return None
    if gated and up.bias is not None:
        return None
    maps = up.weight, up.bias, *up.weights(), down.weight, down.bias, *down.weights()
    return given(TwoMaps8.apply(flat(x), *maps, KINDS.index(activation), gated, *(end or ())), x, end)


def given(found: Any, x: Tensor, end: Ending | None) -> Any:
    """In the shape of `x`; and, where nothing ends it, in the precision of a linear map of that."""
    if end is None:
        return like_linear(found, x)
    return tuple(y.view(*x.shape[:-1], -1) for y in found)


def like_linear(y: Tensor, x: Tensor) -> Tensor:
    """In the shape and precision that a linear map of `x` has."""
    half = torch.is_autocast_enabled(x.device.type)
    return rounded(y.view(*x.shape[:-1], -1), HALF if half else x.dtype)


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class Product8(torch.autograd.Function):
    """A linear map, with or without an end, and the gradients of what it is made of.

    Weights are rounded by rows. The scales of these are multiplied into what comes back before that is rounded, so that
    it meets the same weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        w_OI: Tensor,
        bias_O: Tensor | None,
        w8_OI: Tensor,
        of_w_O: Tensor,
        w8_IO: Tensor,
        *end: Any,
    ) -> Any:
        x = rounded(x_NI, HALF)
        ctx.dtypes = x_NI.dtype, w_OI.dtype, None if bias_O is None else bias_O.dtype
        y = product(*rows(x)[:2], w8_OI, of_w_O, bias_O)
        return keep(ctx, y, end, x, of_w_O, w8_IO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *asked: Tensor) -> tuple[Tensor | None, ...]:
        (x, of_w_O, w8_IO, *kept), (x_dtype, dtype, bias_dtype) = ctx.saved_tensors, ctx.dtypes
        dy_NO, dy8, of_dy, sums_O, of_end = come(ctx, asked, kept, of_w_O, bias_dtype is not None)
        dw_OI = rounded(dy_NO.t() @ x, dtype) if ctx.needs_input_grad[1] else None
        of_map = rounded(back(dy8, of_dy, w8_IO), x_dtype), dw_OI, sums_as(bias_dtype, sums_O), None, None, None
        return *of_map, *of_end


class TwoMaps8(torch.autograd.Function):
    """Up, an activation of that, and down again, with or without an end.

    What the activation gives is kept in no precision: the pass that makes its gradient makes it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        up_OI: Tensor,
        up_bias_O: Tensor | None,
        up8_OI: Tensor,
        of_up_O: Tensor,
        up8_IO: Tensor,
        down_IF: Tensor,
        down_bias_I: Tensor | None,
        down8_IF: Tensor,
        of_down_I: Tensor,
        down8_FI: Tensor,
        kind: int,
        gated: bool,
        *end: Any,
    ) -> Any:
        x = rounded(x_NI, HALF)
        between_NO = product(*rows(x)[:2], up8_OI, of_up_O, None)
        h8, of_h = activated_rows(between_NO, up_bias_O, kind, gated)
        biases = (None if bias is None else bias.dtype for bias in (up_bias_O, down_bias_I))
        ctx.rest = x_NI.dtype, up_OI.dtype, *biases, kind, gated
        y = product(h8, of_h, down8_IF, of_down_I, down_bias_I)
        return keep(ctx, y, end, x, between_NO, up_bias_O, of_up_O, up8_IO, of_down_I, down8_FI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *asked: Tensor) -> tuple[Tensor | None, ...]:
        x, between_NO, up_bias_O, of_up_O, up8_IO, of_down_I, down8_FI, *kept = ctx.saved_tensors
        x_dtype, dtype, up_bias_dtype, down_bias_dtype, kind, gated = ctx.rest
        dy_NI, dy8, of_dy, sums_I, of_end = come(ctx, asked, kept, of_down_I, down_bias_dtype is not None)
        dh_NF = back(dy8, of_dy, down8_FI)
        h_NF, error_NO, error8, of_error, sums_CO = activated_rows_backward(
            dh_NF, between_NO, up_bias_O, of_up_O, kind, gated
        )
        d_up = rounded(error_NO.t() @ x, dtype) if ctx.needs_input_grad[1] else None
        d_down = rounded(dy_NI.t() @ h_NF, dtype) if ctx.needs_input_grad[6] else None
        of_up = d_up, sums_as(up_bias_dtype, sums_CO.sum(0)), None, None, None
        of_down = d_down, sums_as(down_bias_dtype, sums_I), None, None, None
        return rounded(back(error8, of_error, up8_IO), x_dtype), *of_up, *of_down, None, None, *of_end


def keep(ctx: Any, y: Tensor, end: tuple[Any, ...], *mine: Tensor | None) -> Any:
    """What a function gives, and keeps for its backward pass."""
    ctx.rate = Ending(*end).rate if end else None
    if not end:
        ctx.save_for_backward(*mine)
        return y
    found, kept = ended(y, Ending(*end))
    ctx.save_for_backward(*mine, *kept)
    return found


def come(
    ctx: Any, asked: tuple[Tensor, ...], kept: Sequence[Tensor], factor: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """What comes back to a map, as it is and in 8 bits with its scales; what it adds up to; the gradients of an end."""
    if ctx.rate is None:
        return asked[0], *rows(asked[0], factor, sums), ()
    return come_back(asked, Ended(*kept), ctx.rate, factor)


def sums_as(dtype: torch.dtype | None, sums: Tensor | None) -> Tensor | None:
    """What a bias of this precision learns from; nothing where there is none."""
    return None if sums is None or dtype is None else rounded(sums, dtype)


def back(dy8_NO: Tensor, of_dy_N: Tensor, w8_IO: Tensor) -> Tensor:
    """What comes back through weights whose scales are in it already."""
    return product(dy8_NO, of_dy_N, w8_IO, of_dy_N.new_ones(len(w8_IO)), None)


def product(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, bias: Tensor | None) -> Tensor:
    """Rows of `a` by rows of `b`, and a bias for each of the latter.

    They are added up fast, with fewer bits than float32 has: far more than numbers in 8 bits have.
    """
    if a.device.type == "cpu":  # it has no such instructions, and is asked for trying out alone
        with torch.autocast("cpu", enabled=False):  # float16 would have no room
            y = (a.float() @ b.float().t()) * of_a[:, None] * of_b
        return (y if bias is None else y + bias).to(HALF)
    assert a.dtype == b.dtype == EIGHT
    half = None if bias is None else rounded(bias, HALF)
    return torch._scaled_mm(
        a, b.t(), scale_a=of_a[:, None], scale_b=of_b[None], bias=half, out_dtype=HALF, use_fast_accum=True
    )
