"""DTensor helpers: the same call works on plain tensors and on tensors that FSDP2 shards.

A DTensor is sharded by rows (`Shard(0)`): rank r of its shard group holds chunk r of `tensor.chunk(size)`, which may be
empty. With HSDP several shard groups hold the same rows: replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # not isinstance: importing DTensor takes a second


def to_local(tensor: Any) -> Tensor:
    """Return this rank's shard, which shares memory with the tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def to_full_tensor(tensor: Any) -> Tensor:
    """Return the whole tensor. A collective: every rank must call it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that hold the rows of a tensor together; one rank holds a plain tensor."""

    rank: int = 0
    size: int = 1
    group: Any = None  # the process group; None for one rank
    device_type: str = ""  # of the ranks; with CPU offload shards lie on the host

    def row_ranges(self, num_rows: int) -> list[range]:
        """Return the rows of each rank, as `torch.chunk` divides them.

        >>> ShardGroup(size=4).row_ranges(6)
        [range(0, 2), range(2, 4), range(4, 6), range(6, 6)]
        """
        step = -(-num_rows // self.size)
        return [range(min(r * step, num_rows), min((r + 1) * step, num_rows)) for r in range(self.size)]

    def local_rows(self, num_rows: int) -> slice:
        """Return the rows of this rank."""
        rows = self.row_ranges(num_rows)[self.rank]
        return slice(rows.start, rows.stop)

    def split_rows(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return for each rank how many rows it holds of each matrix that a parameter concatenates.

        >>> ShardGroup(size=2).split_rows((4, 4, 4))
        [[4, 2, 0], [0, 2, 4]]
        """
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            [
                max(0, min(start + size, rows.stop) - max(start, rows.start))
                for start, size in zip(starts, sizes, strict=True)
            ]
            for rows in self.row_ranges(sum(sizes))
        ]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def norms(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the norms (N,) of N tensors, of which these are the rows of this rank."""
        norms_N = torch.stack(torch._foreach_norm(list(shards)))
        return norms_N if self.group is None else self.all_reduce(norms_N.square()).sqrt()


def find_shard_group(tensor: Any) -> ShardGroup:
    """Return the ranks that hold the rows of a tensor."""
    if not is_dtensor(tensor):
        return ShardGroup()
    mesh = tensor.device_mesh
    dim = next(i for i, placement in enumerate(tensor.placements) if placement.is_shard())
    return ShardGroup(mesh.get_local_rank(dim), mesh.size(dim), mesh.get_group(dim), mesh.device_type)


@torch.no_grad()
def copy_into(tensor: Any, value: Tensor) -> None:
    """Copy `value`, whole or sharded alike, into `tensor`; a shard takes its own rows of a whole `value`."""
    if is_dtensor(tensor) and not is_dtensor(value):
        value = value[find_shard_group(tensor).local_rows(len(value))]
    to_local(tensor).copy_(to_local(value))


def distribute_like(tensor: Any, value: Tensor) -> Tensor:
    """Return a whole `value` on the device of `tensor`, and sharded like it where the shapes are equal."""
    if not is_dtensor(tensor) or value.shape != tensor.shape:
        return value.to(tensor.device)
    sharded = torch.empty_like(tensor)
    copy_into(sharded, value)
    return sharded
