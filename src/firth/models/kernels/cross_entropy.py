"""Projection and cross-entropy in pieces: the scores of a whole batch are never held.

Scores, their softmax and the gradients are made piece by piece while the scores are at hand, so the backward pass has
nothing to compute again. Products are in the precision of the step, what is added up over pieces is in float32.

N rows, V tokens of the vocabulary, P of them with padding, E width of the token vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.models.kernels.launch import launch
from firth.models.kernels.tiling import triton

if triton is not None:
    import triton.language as tl

LABEL_IGNORE_INDEX = -100
MAX_CHUNK_LOGITS = 2**29  # scores in a piece on a GPU: a gigabyte of bfloat16
MIN_FUSED_LOGITS = 2**26  # scores from which on this pays by itself
MATMUL_SIZE_MULTIPLE = 128  # tokens and rows come in multiples of this, which suits matrix products


def should_fuse_loss(x_NE: Tensor, weight_VE: Tensor) -> bool:
    """Whether there are so many scores that our own kernel, and pieces of them, are worth it."""
    return x_NE.is_cuda and len(x_NE) * len(weight_VE) > MIN_FUSED_LOGITS


def vocab_padding(V: int) -> int:
    """How many tokens there are to the next round number."""
    return -V % MATMUL_SIZE_MULTIPLE


def fused_cross_entropy(
    x_NE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, labels_N: Tensor, pad_vocab: bool
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")`, in the precision of the step."""
    device = x_NE.device.type
    half = torch.is_autocast_enabled(device)
    x_NE = x_NE.to(torch.get_autocast_dtype(device)) if half else x_NE
    return linear_cross_entropy_op(
        x_NE, weight_VE, bias_V, labels_N, vocab_padding(len(weight_VE)) if pad_vocab else 0
    )[0]


def loss_chunk_rows(N: int, P: int) -> int:
    """Rows of a piece: pieces are equally large, and no larger than they may be."""
    pieces = max(1, -(-N * P // MAX_CHUNK_LOGITS))
    rows = max(1, -(-N // pieces))
    return rows if pieces == 1 else -(-rows // MATMUL_SIZE_MULTIPLE) * MATMUL_SIZE_MULTIPLE


@torch.library.custom_op("firth::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, num_padding: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients for `x`, `weight` and `bias` (empty without one)."""
    with torch.autocast(x.device.type, enabled=False):
        V, P = len(weight), len(weight) + num_padding
        weight_PE = pad_vocab_rows(weight, num_padding, x.dtype)
        bias_P = None if bias is None else F.pad(bias.to(x.dtype), (0, num_padding))
        loss, dx = x.new_zeros((), dtype=torch.float32), torch.empty_like(x)
        dweight_PE = dbias_P1 = None
        rows = loss_chunk_rows(len(x), P)
        for start in range(0, len(x), rows):
            piece_NE = x[start : start + rows]
            scores_NP = F.linear(piece_NE, weight_PE, bias_P)
            dx_NE = dx[start : start + rows]
            more_loss, share_N1 = logits_to_grad(scores_NP, labels[start : start + rows], V)
            loss += more_loss
            torch.mm(scores_NP, weight_PE, out=dx_NE).mul_(share_N1)
            dweight_PE = accumulate_matmul(dweight_PE, scores_NP.t(), (piece_NE * share_N1).to(x.dtype))
            if bias is not None:
                dbias_P1 = accumulate_matmul(dbias_P1, scores_NP.t(), share_N1.to(x.dtype))
        dweight = torch.zeros_like(weight) if dweight_PE is None else dweight_PE[:V].to(weight.dtype)
        if bias is None:
            return loss, dx, dweight, x.new_empty(0, dtype=torch.float32)
        return loss, dx, dweight, torch.zeros_like(bias) if dbias_P1 is None else dbias_P1[:V, 0].to(bias.dtype)


def pad_vocab_rows(weight_VE: Tensor, num_padding: int, dtype: torch.dtype) -> Tensor:
    """With so many rows of zeros more, in another precision."""
    if not num_padding:
        return weight_VE.to(dtype)
    V, E = weight_VE.shape
    weight_PE = weight_VE.new_empty(V + num_padding, E, dtype=dtype)
    weight_PE[:V], weight_PE[V:] = weight_VE, 0
    return weight_PE


def accumulate_matmul(accumulator: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, added to what there is. A GPU adds as it multiplies, where that is in half as many bits."""
    short = a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)
    if accumulator is None:
        return torch.mm(a, b, out_dtype=torch.float32) if short else (a @ b).float()
    if short:
        return torch.addmm(accumulator, a, b, out_dtype=torch.float32, out=accumulator)
    return accumulator.add_(a @ b)


@linear_cross_entropy_op.register_fake
def linear_cross_entropy_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, num_padding: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    P = len(weight) + num_padding
    if triton is not None and x.is_cuda:
        logits_to_grad_triton(x.new_empty(min(len(x), loss_chunk_rows(len(x), P)), P), labels, len(weight))
    dbias = x.new_empty(0, dtype=torch.float32) if bias is None else torch.empty_like(bias)
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), torch.empty_like(weight), dbias


def setup_cross_entropy_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, dx, dweight, dbias = output
    ctx.save_for_backward(dx, dweight, dbias)
    ctx.with_bias = inputs[2] is not None
    ctx.set_materialize_grads(False)


def differentiate_cross_entropy(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = ctx.saved_tensors
    return (dloss * dx).to(dx.dtype), dloss * dweight, dloss * dbias if ctx.with_bias else None, None, None


linear_cross_entropy_op.register_autograd(differentiate_cross_entropy, setup_context=setup_cross_entropy_context)


def logits_to_grad(logits_NP: Tensor, labels_N: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """The summed loss of some scores, and what each row of them has to be multiplied by to be their gradients.

    They are written over; those beyond V are of no tokens.
    """
    if triton is None or not logits_NP.is_cuda:
        return logits_to_grad_eager(logits_NP, labels_N, V)
    return logits_to_grad_triton(logits_NP, labels_N, V)


def logits_to_grad_triton(logits_NP: Tensor, labels_N: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """The same by a kernel; by one that reads everything once, where numbers may be as large as in float32."""
    N, P = logits_NP.shape
    losses_N, share_N1 = (logits_NP.new_ones(shape, dtype=torch.float32) for shape in ((N,), (N, 1)))
    kernel = two_pass_cross_entropy_kernel if logits_NP.dtype == torch.float16 else one_pass_cross_entropy_kernel
    launch(
        kernel,
        (N,),
        logits_NP,
        labels_N,
        losses_N,
        share_N1,
        V,
        P,
        logits_NP.stride(0),
        BLOCK=LOGITS_BLOCK,
        num_warps=4,
    )
    return losses_N.sum(), share_N1


def logits_to_grad_eager(logits_NP: Tensor, labels_N: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """The same in single operations."""
    log_NV = logits_NP[:, :V].float().log_softmax(1)
    loss = F.nll_loss(log_NV, labels_N, ignore_index=LABEL_IGNORE_INDEX, reduction="sum")
    error_NV = log_NV.exp_()
    error_NV.scatter_add_(1, labels_N.clamp(min=0)[:, None], error_NV.new_full((len(labels_N), 1), -1.0))
    logits_NP[:, :V] = error_NV * (labels_N != LABEL_IGNORE_INDEX)[:, None]
    logits_NP[:, V:] = 0
    return loss, torch.ones_like(logits_NP[:, :1], dtype=torch.float32)


if triton is not None:
    LOGITS_BLOCK = 2048  # scores of a row that are read together
    LN_2 = tl.constexpr(math.log(2))  # powers of 2 are what the GPU has
    MAX_LOG2_ABOVE_BASE = tl.constexpr(
        80.0
    )  # a score may be above what others are compared with by so many: 2 to that is a number

    @triton.jit
    def one_pass_cross_entropy_kernel(logits, labels, losses, grad_scales, V, P, stride, BLOCK: tl.constexpr):
        """One row: its loss, and in place of its scores their gradients times a sum that is known only at the end.

        Exponentials are of how far scores are above the highest of those that were read first. Where a later one is
        too far above that, those before it are written anew.
        """
        n = tl.program_id(0).to(tl.int64)
        row, label = logits + n * stride, tl.load(labels + n)
        asked, column = label >= 0, tl.arange(0, BLOCK)
        answer = row + tl.where(asked, label, 0)
        own = tl.load(answer).to(tl.float32) / LN_2
        tl.debug_barrier()  # all have read before any writes
        base = float("-inf")
        total = 0.0
        for first in range(0, P, BLOCK):
            v = first + column
            x = tl.load(row + v, mask=v < P, other=0.0).to(tl.float32) / LN_2  # a mask by V would split wide reads
            x = tl.where(v < V, x, float("-inf"))
            highest = tl.max(x, 0)
            if highest > base + MAX_LOG2_ABOVE_BASE:
                less = tl.exp2(base - highest)
                for before in range(0, first, BLOCK):
                    w = row + before + column  # all of them within the row
                    tl.store(w, (tl.load(w).to(tl.float32) * less).to(logits.dtype.element_ty))
                total *= less
                base = highest
            error = tl.exp2(x - base)
            total += tl.sum(error, 0)
            tl.store(row + v, error.to(logits.dtype.element_ty), mask=v < P)
        tl.store(losses + n, tl.where(asked, (base + tl.log2(total) - own) * LN_2, 0.0))
        tl.store(grad_scales + n, tl.where(asked, 1.0 / total, 0.0))
        tl.debug_barrier()
        tl.store(answer, (tl.exp2(own - base) - total).to(logits.dtype.element_ty), mask=asked)

    @triton.jit
    def two_pass_cross_entropy_kernel(logits, labels, losses, grad_scales, V, P, stride, BLOCK: tl.constexpr):
        """One row: its loss, and in place of its scores their gradients. (`grad_scales` stay 1.)"""
        n = tl.program_id(0).to(tl.int64)
        row, label = logits + n * stride, tl.load(labels + n)
        asked, column = label >= 0, tl.arange(0, BLOCK)
        own = tl.load(row + tl.where(asked, label, 0)).to(tl.float32)
        highest = float("-inf")
        total = 0.0
        for first in range(0, P, BLOCK):
            v = first + column
            x = tl.load(row + v, mask=v < P, other=0.0).to(tl.float32) / LN_2  # a mask by V would split wide reads
            x = tl.where(v < V, x, float("-inf"))
            above = tl.maximum(highest, tl.max(x, 0))
            total = total * tl.exp2(highest - above) + tl.sum(tl.exp2(x - above), 0)
            highest = above
        log_sum = highest + tl.log2(total)
        tl.store(losses + n, tl.where(asked, log_sum * LN_2 - own, 0.0))
        tl.debug_barrier()  # all have read before any writes
        for first in range(0, P, BLOCK):
            v = first + column
            x = tl.load(row + v, mask=v < P, other=0.0).to(tl.float32) / LN_2
            error = tl.exp2(x - log_sum) - tl.where(v == label, 1.0, 0.0)
            error = tl.where(asked & (v < V), error, 0.0)
            tl.store(row + v, error.to(logits.dtype.element_ty), mask=v < P)
