"""DTensor helpers: the same call works on plain tensors and on tensors that FSDP2 shards.

A DTensor is sharded by rows (`Shard(0)`): rank r holds chunk r of `tensor.chunk(world_size)`, which may be empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # not isinstance: importing DTensor takes a second


def to_local(tensor: Any) -> Tensor:
    """Return this rank's shard, which shares memory with the tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def to_full_tensor(tensor: Any) -> Tensor:
    """Return the whole tensor. A collective: every rank must call it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


@torch.no_grad()
def copy_into(tensor: Any, value: Tensor) -> None:
    """Copy `value`, whole or sharded alike, into `tensor`; a shard takes its own rows of a whole `value`."""
    if is_dtensor(tensor) and not is_dtensor(value):
        mesh = tensor.device_mesh
        chunks = value.chunk(mesh.size())
        value = chunks[mesh.get_rank()] if mesh.get_rank() < len(chunks) else value[:0]
    to_local(tensor).copy_(to_local(value))


def distribute_like(tensor: Any, value: Tensor) -> Tensor:
    """Return a whole `value` on the device of `tensor`, and sharded like it where the shapes are equal."""
    if not is_dtensor(tensor) or value.shape != tensor.shape:
        return value.to(tensor.device)
    sharded = torch.empty_like(tensor)
    copy_into(sharded, value)
    return sharded
