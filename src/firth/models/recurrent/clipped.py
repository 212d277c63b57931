"""ELMo's LSTM: projected (LSTMP), with cell states and projections clipped at every step.

cuDNN has no clipped cell, so the recurrence is a loop over positions. Each step is one batched matmul for the gates of
all LSTMs, one pointwise cell kernel (Triton on a GPU), and one batched matmul for the projection:

    gates = x W_ih^T + h W_hh^T + b;  c = clip(f * c + i * g);  h = clip((o * tanh(c)) W_hr^T)

The input matmul covers all positions before the loop. The backward pass runs the loop in reverse; the weight gradients
follow at the end, as one matmul over all positions. A clipped value passes no gradient.

W LSTMs side by side, N texts, L positions, D input width, H units, G = 4 H gates, P projection width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # not installed without a GPU
    triton = None

BLOCK_UNITS = 512  # units in a tile


def clipped_lstm(
    x_WNLD: Tensor, h_WNP: Tensor, c_WNH: Tensor, weights: list[Tensor], clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all projections (W, N, L, P) and the last state (h, c) of W LSTMs, clipped to +-clip at every step.

    `weights` are those of torch's LSTM with `proj_size`, each stacked over the W LSTMs.
    """
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    W, N, L, _ = x_WNLD.shape
    from_x = torch.baddbmm((b_ih + b_hh)[:, None], x_WNLD.flatten(1, 2), w_ih.mT).view(W, N, L, -1)
    h_WNP, w_hh, w_hr = (a.to(from_x.dtype) for a in (h_WNP, w_hh, w_hr))
    c_WNH = c_WNH.to(torch.promote_types(from_x.dtype, torch.float32))
    y_WLNP, h_WNP, c_WNH = ClippedLSTMFunction.apply(from_x.transpose(1, 2), h_WNP, c_WNH, w_hh, w_hr, clip)
    return y_WLNP.transpose(1, 2), h_WNP, c_WNH


class ClippedLSTMFunction(torch.autograd.Function):
    """The loop over positions, forward and backward; weight gradients are one matmul over all positions."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        from_x_WLNG, h_WNP, c_WNH, w_hh_WGP, w_hr_WPH, clip = inputs
        gates, cells, projections = [], [c_WNH.contiguous()], [h_WNP]
        with torch.autocast(h_WNP.device.type, enabled=False):
            for from_one_WNG in from_x_WLNG.unbind(1):
                gates.append(torch.baddbmm(from_one_WNG, projections[-1], w_hh_WGP.mT))
                cell, hidden_WNH = lstm_cell_forward(gates[-1], cells[-1], clip)
                cells.append(cell)
                projections.append(torch.bmm(hidden_WNH, w_hr_WPH.mT).clamp_(-clip, clip))
        ctx.clip = clip
        ctx.save_for_backward(w_hh_WGP, w_hr_WPH, *gates, *cells, *projections)
        return torch.stack(projections[1:], 1), projections[-1].clone(), cells[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_WLNP, dh_WNP, dc_WNH = grads
        w_hh_WGP, w_hr_WPH, *rest = ctx.saved_tensors
        L = dy_WLNP.shape[1]
        gates, cells, projections = rest[:L], rest[L : 2 * L + 1], rest[2 * L + 1 :]
        dprojected_WLNP = torch.empty_like(dy_WLNP)
        W, N, H = cells[0].shape
        dgates_WLNG, hidden_WLNH = (gates[0].new_empty(W, L, N, size) for size in (4 * H, H))
        dc_WNH = dc_WNH.contiguous()
        for i in reversed(range(L)):
            inside = projections[i + 1].abs() < ctx.clip
            dprojected = torch.mul(dh_WNP + dy_WLNP[:, i], inside, out=dprojected_WLNP[:, i])
            dhidden_WNH = torch.bmm(dprojected, w_hr_WPH)
            state = gates[i], cells[i + 1], cells[i]
            dc_WNH = lstm_cell_backward(*state, dhidden_WNH, dc_WNH, dgates_WLNG[:, i], hidden_WLNH[:, i], ctx.clip)
            dh_WNP = torch.bmm(dgates_WLNG[:, i], w_hh_WGP)
        previous_WLNP = torch.stack(projections[:-1], 1)
        dw_hh = torch.bmm(dgates_WLNG.flatten(1, 2).mT, previous_WLNP.flatten(1, 2))
        dw_hr = torch.bmm(dprojected_WLNP.flatten(1, 2).mT, hidden_WLNH.flatten(1, 2))
        return dgates_WLNG, dh_WNP, dc_WNH, dw_hh, dw_hr, None


def lstm_cell_forward(gates_WNG: Tensor, c_WNH: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the next cell states and the hidden states; gate pre-activations are overwritten by their activations."""
    if triton is not None and gates_WNG.is_cuda:
        return fused_lstm_cell_forward(gates_WNG, c_WNH, clip)
    input_gate, forget_gate, candidate, output_gate = gates_WNG.chunk(4, -1)
    for gate in (input_gate, forget_gate, output_gate):
        gate.sigmoid_()
    candidate.tanh_()
    c_WNH = (forget_gate * c_WNH + input_gate * candidate).clamp_(-clip, clip)
    return c_WNH, (output_gate * c_WNH.tanh()).to(gates_WNG.dtype)


def lstm_cell_backward(
    gates_WNG: Tensor,
    c_WNH: Tensor,
    c_prev_WNH: Tensor,
    dhidden_WNH: Tensor,
    dc_WNH: Tensor,
    dgates_WNG: Tensor,
    hidden_WNH: Tensor,
    clip: float,
) -> Tensor:
    """Return the gradient of the previous cells; write gate gradients and recomputed hidden states to the outputs."""
    if triton is not None and gates_WNG.is_cuda:
        saved = gates_WNG, c_WNH, c_prev_WNH, dhidden_WNH, dc_WNH
        return fused_lstm_cell_backward(saved, dgates_WNG, hidden_WNH, clip)
    input_gate, forget_gate, candidate, output_gate = gates_WNG.chunk(4, -1)
    tanh_c_WNH = c_WNH.tanh()
    hidden_WNH.copy_(output_gate * tanh_c_WNH)
    dc_WNH = (dc_WNH + dhidden_WNH * output_gate * (1 - tanh_c_WNH**2)) * (c_WNH.abs() < clip)
    dinput_gate, dforget_gate, dcandidate, doutput_gate = dgates_WNG.chunk(4, -1)
    dinput_gate.copy_(dc_WNH * candidate * input_gate * (1 - input_gate))
    dforget_gate.copy_(dc_WNH * c_prev_WNH * forget_gate * (1 - forget_gate))
    dcandidate.copy_(dc_WNH * input_gate * (1 - candidate**2))
    doutput_gate.copy_(dhidden_WNH * tanh_c_WNH * output_gate * (1 - output_gate))
    return dc_WNH * forget_gate


def fused_lstm_cell_forward(gates_WNG: Tensor, c_WNH: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    c_new_WNH, hidden_WNH = torch.empty_like(c_WNH), torch.empty_like(c_WNH, dtype=gates_WNG.dtype)
    num, H = c_WNH.numel(), c_WNH.shape[-1]
    clipped_lstm_fwd_kernel[(triton.cdiv(num, BLOCK_UNITS),)](
        gates_WNG, c_WNH, c_new_WNH, hidden_WNH, num, H, clip, BLOCK=BLOCK_UNITS
    )
    return c_new_WNH, hidden_WNH


def fused_lstm_cell_backward(saved: tuple[Tensor, ...], dgates_WNG: Tensor, hidden_WNH: Tensor, clip: float) -> Tensor:
    dc_prev_WNH, (_, N, H) = torch.empty_like(saved[1]), saved[1].shape
    clipped_lstm_bwd_kernel[(triton.cdiv(dc_prev_WNH.numel(), BLOCK_UNITS),)](
        *(*saved, dgates_WNG, hidden_WNH, dc_prev_WNH),
        *(dc_prev_WNH.numel(), N, H, dgates_WNG.stride(0), hidden_WNH.stride(0), clip),
        BLOCK=BLOCK_UNITS,
    )
    return dc_prev_WNH


if triton is not None:

    @triton.jit
    def clipped_lstm_fwd_kernel(gates, c, c_new, hidden, num, H, clip, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask, at = i < num, gates + i // H * 4 * H + i % H
        input_gate = tl.sigmoid(tl.load(at, mask=mask, other=0.0).to(tl.float32))
        forget_gate = tl.sigmoid(tl.load(at + H, mask=mask, other=0.0).to(tl.float32))
        candidate = 2 * tl.sigmoid(2 * tl.load(at + 2 * H, mask=mask, other=0.0).to(tl.float32)) - 1
        output_gate = tl.sigmoid(tl.load(at + 3 * H, mask=mask, other=0.0).to(tl.float32))
        cell = forget_gate * tl.load(c + i, mask=mask, other=0.0) + input_gate * candidate
        cell = tl.minimum(tl.maximum(cell, -clip), clip)
        tl.store(at, input_gate, mask=mask)
        tl.store(at + H, forget_gate, mask=mask)
        tl.store(at + 2 * H, candidate, mask=mask)
        tl.store(at + 3 * H, output_gate, mask=mask)
        tl.store(c_new + i, cell, mask=mask)
        tl.store(hidden + i, output_gate * (2 * tl.sigmoid(2 * cell) - 1), mask=mask)

    @triton.jit
    def clipped_lstm_bwd_kernel(
        gates,
        c,
        c_prev,
        dhidden,
        dc,
        dgates,
        hidden,
        dc_prev,
        num,
        N,
        H,
        dgates_stride,
        hidden_stride,
        clip,
        BLOCK: tl.constexpr,
    ):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask, row, unit = i < num, i // H, i % H
        at, w, n = gates + row * 4 * H + unit, (row // N).to(tl.int64), row % N
        input_gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        forget_gate = tl.load(at + H, mask=mask, other=0.0).to(tl.float32)
        candidate = tl.load(at + 2 * H, mask=mask, other=0.0).to(tl.float32)
        output_gate = tl.load(at + 3 * H, mask=mask, other=0.0).to(tl.float32)
        cell = tl.load(c + i, mask=mask, other=0.0)
        dhidden_value = tl.load(dhidden + i, mask=mask, other=0.0).to(tl.float32)
        tanh_cell = 2 * tl.sigmoid(2 * cell) - 1
        tl.store(hidden + w * hidden_stride + n * H + unit, output_gate * tanh_cell, mask=mask)
        dcell = tl.load(dc + i, mask=mask, other=0.0) + dhidden_value * output_gate * (1 - tanh_cell * tanh_cell)
        dcell = tl.where(tl.abs(cell) < clip, dcell, 0.0)
        to = dgates + w * dgates_stride + n * 4 * H + unit
        tl.store(to, dcell * candidate * input_gate * (1 - input_gate), mask=mask)
        tl.store(to + H, dcell * tl.load(c_prev + i, mask=mask, other=0.0) * forget_gate * (1 - forget_gate), mask=mask)
        tl.store(to + 2 * H, dcell * input_gate * (1 - candidate * candidate), mask=mask)
        tl.store(to + 3 * H, dhidden_value * tanh_cell * output_gate * (1 - output_gate), mask=mask)
        tl.store(dc_prev + i, dcell * forget_gate, mask=mask)
