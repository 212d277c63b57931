"""Vocabulary projection and cross-entropy in chunks: the logits of a whole batch never exist.

For 50,000 tokens the logits are by far the largest tensor of a step, and the usual loss holds them several times:
logits, float32 copy, softmax, gradient. Here the rows are processed in chunks, and each chunk is finished at once:

    logits = x W^T              one matmul, in the precision of the step
    loss, dlogits               softmax(logits) - one_hot(label), written over the logits
    dx = dlogits W              for these rows
    dW += dlogits^T x           accumulated in float32 over the chunks

The loss is a sum, so its gradient is known up to the factor dloss: the forward pass computes dx and dW too, and the
backward pass multiplies them by dloss. No matmul is done twice, and only two tensors are saved (compare Liger Kernel,
Hsu et al. 2024).

The softmax kernel reads each row once. It exponentiates relative to the first block's maximum, stores the unnormalized
exponentials and returns 1 / sum per row, which scales dx and the rows of x in the dW matmul. Where a later block is so
much larger that this would overflow, it rescales the blocks before. Float16 has too little range for that, and
takes two passes.

Vocabularies are padded to a multiple of 128 (P >= V), for which matmuls on a GPU are fast; padded logits do not count.

Shapes: N rows, V tokens of the vocabulary, P with padding, E width of the token embeddings.
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
MAX_CHUNK_LOGITS = 2**29  # logits of a chunk: 1 GiB in bf16
MIN_FUSED_LOGITS = 2**26  # logits of a batch from which on this is faster than torch's loss
MATMUL_SIZE_MULTIPLE = 128  # tokens and rows; matmuls on a GPU are fast for multiples of this


def should_fuse_loss(x_NE: Tensor, weight_VE: Tensor) -> bool:
    """Whether a batch has enough logits for the fused loss to be faster."""
    return x_NE.is_cuda and len(x_NE) * len(weight_VE) > MIN_FUSED_LOGITS


def vocab_padding(V: int) -> int:
    """Return P - V."""
    return -V % MATMUL_SIZE_MULTIPLE


def fused_cross_entropy(
    x_NE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, labels_N: Tensor, pad_vocab: bool
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")`, in the precision of the step."""
    device = x_NE.device.type
    if torch.is_autocast_enabled(device):
        x_NE = x_NE.to(torch.get_autocast_dtype(device))
    return linear_cross_entropy_op(
        x_NE, weight_VE, bias_V, labels_N, vocab_padding(len(weight_VE)) if pad_vocab else 0
    )[0]


def loss_chunk_rows(N: int, P: int) -> int:
    """Return the rows of a chunk: chunks are of about equal size, at most MAX_CHUNK_LOGITS."""
    num_chunks = max(1, -(-N * P // MAX_CHUNK_LOGITS))
    rows = max(1, -(-N // num_chunks))
    return rows if num_chunks == 1 else -(-rows // MATMUL_SIZE_MULTIPLE) * MATMUL_SIZE_MULTIPLE


@torch.library.custom_op("firth::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, num_padding: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss, dx, dweight and dbias (empty without a bias)."""
    with torch.autocast(x.device.type, enabled=False):
        V, P = len(weight), len(weight) + num_padding
        weight_PE = pad_vocab_rows(weight, num_padding, x.dtype)
        bias_P = None if bias is None else F.pad(bias.to(x.dtype), (0, num_padding))
        loss, dx = x.new_zeros((), dtype=torch.float32), torch.empty_like(x)
        dweight_PE = dbias_P1 = None
        rows = loss_chunk_rows(len(x), P)
        for start in range(0, len(x), rows):
            chunk_NE = x[start : start + rows]
            logits_NP = F.linear(chunk_NE, weight_PE, bias_P)
            chunk_loss, scale_N1 = logits_to_grad(logits_NP, labels[start : start + rows], V)
            loss += chunk_loss
            torch.mm(logits_NP, weight_PE, out=dx[start : start + rows]).mul_(scale_N1)
            dweight_PE = accumulate_matmul(dweight_PE, logits_NP.t(), (chunk_NE * scale_N1).to(x.dtype))
            if bias is not None:
                dbias_P1 = accumulate_matmul(dbias_P1, logits_NP.t(), scale_N1.to(x.dtype))
        dweight = torch.zeros_like(weight) if dweight_PE is None else dweight_PE[:V].to(weight.dtype)
        if bias is None:
            return loss, dx, dweight, x.new_empty(0, dtype=torch.float32)
        return loss, dx, dweight, torch.zeros_like(bias) if dbias_P1 is None else dbias_P1[:V, 0].to(bias.dtype)


def pad_vocab_rows(weight_VE: Tensor, num_padding: int, dtype: torch.dtype) -> Tensor:
    """Return the weight in `dtype`, with `num_padding` rows of zeros."""
    if not num_padding:
        return weight_VE.to(dtype)
    V, E = weight_VE.shape
    weight_PE = weight_VE.new_empty(V + num_padding, E, dtype=dtype)
    weight_PE[:V], weight_PE[V:] = weight_VE, 0
    return weight_PE


def accumulate_matmul(accumulator: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return `accumulator + a @ b` in float32; 16-bit matmuls on a GPU accumulate in their epilogue."""
    is_16_bit = a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)
    if accumulator is None:
        return torch.mm(a, b, out_dtype=torch.float32) if is_16_bit else (a @ b).float()
    if is_16_bit:
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
    """Write the gradient over the logits, up to a factor per row; return the summed loss and these factors (N, 1)."""
    if triton is None or not logits_NP.is_cuda:
        return logits_to_grad_eager(logits_NP, labels_N, V)
    return logits_to_grad_triton(logits_NP, labels_N, V)


def logits_to_grad_triton(logits_NP: Tensor, labels_N: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """`logits_to_grad` by a kernel: one pass, or two in float16."""
    N, P = logits_NP.shape
    losses_N, scale_N1 = (logits_NP.new_ones(shape, dtype=torch.float32) for shape in ((N,), (N, 1)))
    kernel = two_pass_cross_entropy_kernel if logits_NP.dtype == torch.float16 else one_pass_cross_entropy_kernel
    launch(
        kernel,
        (N,),
        logits_NP,
        labels_N,
        losses_N,
        scale_N1,
        V,
        P,
        logits_NP.stride(0),
        BLOCK=LOGITS_BLOCK,
        num_warps=4,
    )
    return losses_N.sum(), scale_N1


def logits_to_grad_eager(logits_NP: Tensor, labels_N: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """`logits_to_grad` in torch ops."""
    logprobs_NV = logits_NP[:, :V].float().log_softmax(1)
    loss = F.nll_loss(logprobs_NV, labels_N, ignore_index=LABEL_IGNORE_INDEX, reduction="sum")
    grad_NV = logprobs_NV.exp_()
    grad_NV.scatter_add_(1, labels_N.clamp(min=0)[:, None], grad_NV.new_full((len(labels_N), 1), -1.0))
    logits_NP[:, :V] = grad_NV * (labels_N != LABEL_IGNORE_INDEX)[:, None]
    logits_NP[:, V:] = 0
    return loss, torch.ones_like(logits_NP[:, :1], dtype=torch.float32)


if triton is not None:
    LOGITS_BLOCK = 2048  # logits of a row that are loaded together
    LN_2 = tl.constexpr(math.log(2))  # GPUs have an instruction for powers of 2
    MAX_LOG2_ABOVE_BASE = tl.constexpr(80.0)  # log2 of the largest exponential that is stored without rescaling

    @triton.jit
    def one_pass_cross_entropy_kernel(logits, labels, losses, grad_scales, V, P, stride, BLOCK: tl.constexpr):
        """One row: its loss, and over its logits the gradient times `total`, which is known only at the end.

        `base` is the maximum of the first block. A later block that exceeds it by too much becomes the new base, and
        the blocks before it are rescaled.
        """
        n = tl.program_id(0).to(tl.int64)
        row, label = logits + n * stride, tl.load(labels + n)
        has_label, column = label >= 0, tl.arange(0, BLOCK)
        at_label = row + tl.where(has_label, label, 0)
        label_logit = tl.load(at_label).to(tl.float32) / LN_2
        tl.debug_barrier()  # all threads have read before any writes
        base = float("-inf")
        total = 0.0
        for first in range(0, P, BLOCK):
            v = first + column
            # a mask at V would split vectorized loads
            x = tl.load(row + v, mask=v < P, other=0.0).to(tl.float32) / LN_2
            x = tl.where(v < V, x, float("-inf"))
            highest = tl.max(x, 0)
            if highest > base + MAX_LOG2_ABOVE_BASE:
                rescale = tl.exp2(base - highest)
                for before in range(0, first, BLOCK):
                    w = row + before + column  # full blocks, no mask
                    tl.store(w, (tl.load(w).to(tl.float32) * rescale).to(logits.dtype.element_ty))
                total *= rescale
                base = highest
            p = tl.exp2(x - base)
            total += tl.sum(p, 0)
            tl.store(row + v, p.to(logits.dtype.element_ty), mask=v < P)
        tl.store(losses + n, tl.where(has_label, (base + tl.log2(total) - label_logit) * LN_2, 0.0))
        tl.store(grad_scales + n, tl.where(has_label, 1.0 / total, 0.0))
        tl.debug_barrier()
        tl.store(at_label, (tl.exp2(label_logit - base) - total).to(logits.dtype.element_ty), mask=has_label)

    @triton.jit
    def two_pass_cross_entropy_kernel(logits, labels, losses, grad_scales, V, P, stride, BLOCK: tl.constexpr):
        """One row: its loss by an online softmax, then over its logits their gradient (`grad_scales` stay 1)."""
        n = tl.program_id(0).to(tl.int64)
        row, label = logits + n * stride, tl.load(labels + n)
        has_label, column = label >= 0, tl.arange(0, BLOCK)
        label_logit = tl.load(row + tl.where(has_label, label, 0)).to(tl.float32)
        highest = float("-inf")
        total = 0.0
        for first in range(0, P, BLOCK):
            v = first + column
            # a mask at V would split vectorized loads
            x = tl.load(row + v, mask=v < P, other=0.0).to(tl.float32) / LN_2
            x = tl.where(v < V, x, float("-inf"))
            above = tl.maximum(highest, tl.max(x, 0))
            total = total * tl.exp2(highest - above) + tl.sum(tl.exp2(x - above), 0)
            highest = above
        log_sum = highest + tl.log2(total)
        tl.store(losses + n, tl.where(has_label, log_sum * LN_2 - label_logit, 0.0))
        tl.debug_barrier()  # all threads have read before any writes
        for first in range(0, P, BLOCK):
            v = first + column
            x = tl.load(row + v, mask=v < P, other=0.0).to(tl.float32) / LN_2
            grad = tl.exp2(x - log_sum) - tl.where(v == label, 1.0, 0.0)
            grad = tl.where(has_label & (v < V), grad, 0.0)
            tl.store(row + v, grad.to(logits.dtype.element_ty), mask=v < P)
