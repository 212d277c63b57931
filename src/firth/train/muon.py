"""Muon: momentum whose update is orthogonalised, for the weight matrices of the blocks (Jordan et al. 2024).

The momentum of a weight matrix is close to low rank: a few singular values are large, and plain SGD or Adam moves the
matrix along those directions alone. Muon replaces the update U S V^T by U V^T, so that every singular direction moves
by the same length. Per step and matrix:

1. momentum: M <- mu M + (1 - mu) G; the update is Nesterov's, (1 - mu) G + mu M;
2. Newton-Schulz: divide by the Frobenius norm, which puts all singular values into [0, 1], then iterate
   X <- a X + b (X X^T) X + c (X X^T)^2 X. The odd polynomial acts on the singular values alone and moves each towards
   1. With the paper's coefficients five iterations reach about [0.7, 1.2], which is enough: the slope at 0 matters more
   than the exact limit. No SVD is needed, only matmuls, so the iteration runs in bfloat16 on tensor cores;
3. decoupled weight decay, then W <- W - lr * 0.2 sqrt(max(A, B)) * update. The factor gives the update the RMS of a
   typical AdamW update, so that AdamW's learning rate fits (Liu et al. 2025, section 2.2).

Cost: one momentum buffer instead of AdamW's two moments, and 15 matmuls per matrix and step. Matrices of one shape are
stacked and orthogonalised in one batch. Query, key and value share one parameter but are orthogonalised
separately, since they are separate linear maps. Embeddings, heads, norms and biases use AdamW: an embedding row is
looked up, not multiplied, and a vector has no singular directions.

With FSDP each rank holds some rows of every matrix, and Newton-Schulz needs whole ones. Ranks share the work: n
matrices of one shape at a time, rank r receives all rows of the r-th (all-to-all), orthogonalises it and sends the rows
back. So a rank orthogonalises 1/n of the matrices and holds one of them, not all. Each rank sends and receives 2/n of
the updates, in the dtype of Newton-Schulz, where an all-gather would receive all of them and compute all.

N matrices, A rows, B columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from firth.models import Stack
from firth.models.attention import Attention
from firth.models.block import MLP
from firth.train.dtensor import ShardGroup, find_shard_group, to_local

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of the quintic (Jordan et al. 2024)
NEWTON_SCHULZ_STEPS = 5
MIN_MATRIX_NORM = 1e-7  # smallest divisor in the normalisation: a zero matrix stays zero
MAX_GATHERED_ELEMENTS = 2**24  # elements that a rank gathers at once, with FSDP; at least one matrix
ADAMW_UPDATE_RMS = 0.2  # typical RMS of an AdamW update before the learning rate (Liu et al. 2025, section 2.2)


def hidden_matrices(model: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """Return the weight matrices of all blocks, each with the row counts of the linear maps that it concatenates.

    A qkv projection holds the rows of query, key and value; a gated MLP's up projection holds gate and value.
    """
    row_splits: dict[Tensor, tuple[int, ...]] = {}
    for module in (m for stack in model.modules() if isinstance(stack, Stack) for m in stack.blocks.modules()):
        if isinstance(module, Attention):
            row_splits[module.qkv.weight] = module.qkv_sizes
        elif isinstance(module, MLP) and module.is_gated:
            half = module.up.out_features // 2
            row_splits[module.up.weight] = (half, half)
        elif isinstance(module, nn.Linear):
            row_splits.setdefault(module.weight, (module.out_features,))
    return row_splits


class Muon(torch.optim.AdamW):
    """Muon for the parameter groups with `muon`, AdamW for the others: embeddings, heads, norms, biases.

    `row_splits` gives the row counts of the matrices that a parameter concatenates; each is orthogonalised separately.
    A parameter that it does not list is one matrix. `dtype` is that of Newton-Schulz; default: bfloat16 on a GPU,
    float32 on a CPU.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        row_splits: Mapping[Tensor, tuple[int, ...]],
        momentum: float,
        dtype: torch.dtype | None = None,
        **adamw_options: Any,
    ) -> None:
        self.row_splits, self.momentum, self.dtype = row_splits, momentum, dtype
        super().__init__(list(groups), **adamw_options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameter groups."""
        all_groups = self.param_groups
        self.param_groups = [group for group in all_groups if not group.get("muon")]
        try:
            super().step(closure)
        finally:
            self.param_groups = all_groups
        for group in all_groups:
            if group.get("muon"):
                self.muon_step(group)

    def muon_step(self, group: dict[str, Any]) -> None:
        """Update one group with Muon, orthogonalising matrices of one shape in one batch."""
        ps = [p for p in group["params"] if p.grad is not None]
        if not ps:
            return
        # torch's AdamW reads the same attribute: 1 skips the step. It stays on the device, so nothing synchronises.
        found_inf = getattr(self, "found_inf", None)
        skip = None if found_inf is None else found_inf > 0
        decay = 1 - group["lr"] * group["weight_decay"]
        torch._foreach_mul_([to_local(p) for p in ps], decay if skip is None else torch.where(skip, 1.0, decay))
        shard_group = find_shard_group(ps[0])
        by_shape: dict[torch.Size, list[MatrixShard]] = defaultdict(list)
        for p, update in zip(ps, self.nesterov_momentum(ps, skip), strict=True):
            for matrix in iter_matrices(to_local(p), update, self.row_splits.get(p, (len(p),)), shard_group):
                by_shape[torch.Size((sum(matrix.num_rows), *p.shape[1:]))].append(matrix)
        for shape, matrices in by_shape.items():
            weights = [matrix.weight for matrix in matrices]
            on_gpu = weights[0].is_cuda or shard_group.device_type == "cuda"  # offloaded rows are gathered on the GPU
            dtype = self.dtype or (torch.bfloat16 if on_gpu else torch.float32)
            updates: Sequence[Tensor]
            if shard_group.group is None:
                updates = orthogonalize_updates([m.update for m in matrices], dtype, skip).to(weights[0].dtype).unbind()
            else:
                updates = orthogonalize_shards(matrices, shape, dtype, skip, shard_group)
            rms_scale = ADAMW_UPDATE_RMS * math.sqrt(max(shape))
            torch._foreach_add_(weights, updates, alpha=-group["lr"] * rms_scale)

    def nesterov_momentum(self, params: list[nn.Parameter], skip: Tensor | None) -> Sequence[Tensor]:
        """Update the momentum buffers and return Nesterov's updates; a skipped step leaves the buffers as they are."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        grads = [to_local(p.grad) for p in params if p.grad is not None]
        buffers = [to_local(self.state[p]["momentum_buffer"]) for p in params]
        if skip is None:
            torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
            return torch._foreach_lerp(grads, buffers, self.momentum)
        grads = [torch.where(skip, buffer, grad) for buffer, grad in zip(buffers, grads, strict=True)]
        torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
        torch._foreach_lerp_(grads, buffers, self.momentum)
        return grads


class MatrixShard(NamedTuple):
    """The rows of one matrix that this rank holds: all of them without FSDP."""

    weight: Tensor
    update: Tensor
    num_rows: tuple[int, ...]  # of each rank


def iter_matrices(
    weight: Tensor, update: Tensor, row_sizes: Sequence[int], shard_group: ShardGroup
) -> Iterator[MatrixShard]:
    """Yield the matrices that a parameter concatenates; `weight` and `update` are the rows of this rank."""
    rows_by_rank = shard_group.split_rows(row_sizes)
    own = rows_by_rank[shard_group.rank]
    for weight_rows, update_rows, counts in zip(
        weight.split(own), update.split(own), zip(*rows_by_rank, strict=True), strict=True
    ):
        yield MatrixShard(weight_rows, update_rows, counts)


def orthogonalize_updates(updates: Sequence[Tensor], dtype: torch.dtype, skip: Tensor | None) -> Tensor:
    """Orthogonalise whole matrices of one shape in one batch, (N, A, B); a skipped step has updates of 0."""
    update_NAB = updates[0].new_empty((len(updates), *updates[0].shape), dtype=dtype)
    torch._foreach_copy_(update_NAB.unbind(), list(updates))
    is_tall = update_NAB.shape[1] > update_NAB.shape[2]
    ortho_NAB = orthogonalize(update_NAB.mT).mT.contiguous() if is_tall else orthogonalize(update_NAB)
    return ortho_NAB if skip is None else torch.where(skip.to(ortho_NAB.device), 0.0, ortho_NAB)


def orthogonalize_shards(
    matrices: Sequence[MatrixShard], shape: torch.Size, dtype: torch.dtype, skip: Tensor | None, shard_group: ShardGroup
) -> list[Tensor]:
    """Return this rank's rows of the orthogonalised updates, in rounds of as many matrices as memory allows."""
    per_rank = max(1, min(-(-len(matrices) // shard_group.size), MAX_GATHERED_ELEMENTS // shape.numel()))
    round_size, updates = per_rank * shard_group.size, list[Tensor]()
    for first in range(0, len(matrices), round_size):
        updates += orthogonalize_round(matrices[first : first + round_size], shape[1], dtype, skip, shard_group)
    return updates


def orthogonalize_round(
    matrices: Sequence[MatrixShard], num_columns: int, dtype: torch.dtype, skip: Tensor | None, shard_group: ShardGroup
) -> list[Tensor]:
    """Send the rows of matrix i to rank i modulo n, which orthogonalises it, and send the rows back."""
    rank, size, weight = shard_group.rank, shard_group.size, matrices[0].weight
    by_rank = [matrices[r::size] for r in range(size)]
    own, local_rows = by_rank[rank], [[m.num_rows[rank] for m in assigned] for assigned in by_rank]
    sent_sizes = [num_columns * sum(rows) for rows in local_rows]
    received_sizes = [num_columns * sum(m.num_rows[r] for m in own) for r in range(size)]
    outgoing = [m.update.to(shard_group.device_type, dtype).flatten() for assigned in by_rank for m in assigned]
    received = exchange(torch.cat(outgoing), sent_sizes, received_sizes, shard_group)
    answer = received  # empty for a rank without a matrix
    if own:
        parts = [
            part.view(-1, num_columns).split([m.num_rows[r] for m in own])
            for r, part in enumerate(received.split(received_sizes))
        ]
        ortho_NAB = orthogonalize_updates([torch.cat(rows) for rows in zip(*parts, strict=True)], dtype, skip)
        split = [update.split(m.num_rows) for update, m in zip(ortho_NAB, own, strict=True)]
        answer = torch.cat([rows[r].flatten() for r in range(size) for rows in split])
    returned = exchange(answer, received_sizes, sent_sizes, shard_group).to(weight)
    updates = [returned] * len(matrices)
    for r, part in enumerate(returned.split(sent_sizes)):
        updates[r::size] = part.view(-1, num_columns).split(local_rows[r])
    return updates


def exchange(sent: Tensor, sent_sizes: list[int], received_sizes: list[int], shard_group: ShardGroup) -> Tensor:
    """Send `sent_sizes` elements to each rank and return what they send, in rank order."""
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=shard_group.group)
    return received


def orthogonalize(x_NAB: Tensor) -> Tensor:
    """Return (N, A, B) matrices with the same singular vectors and singular values near 1; A must be at most B.

    The transpose of a tall matrix keeps the Gram matrix at the smaller side.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x_NAB = x_NAB / x_NAB.norm(dim=(1, 2), keepdim=True).clamp(min=MIN_MATRIX_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_NAA = x_NAB @ x_NAB.mT
        poly_NAA = torch.baddbmm(gram_NAA, gram_NAA, gram_NAA, beta=b, alpha=c)
        x_NAB = torch.baddbmm(x_NAB, poly_NAA, x_NAB, beta=a)
    return x_NAB
