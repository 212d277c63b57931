"""Tensors of which each process holds a part: rows of it, the first ones in the first process (DTensor)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # a DTensor, which takes a second to load where none is needed


def to_local(tensor: Any) -> Tensor:
    """What of a tensor lies here, in its own memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def to_full_tensor(tensor: Any) -> Tensor:
    """All of a tensor. Every process must ask."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


@torch.no_grad()
def copy_into(tensor: Any, value: Tensor) -> None:
    """Copy a whole tensor, or one in the same parts, into another, or what lies here of it."""
    if is_dtensor(tensor) and not is_dtensor(value):
        mesh = tensor.device_mesh
        parts = value.chunk(mesh.size())
        value = parts[mesh.get_rank()] if mesh.get_rank() < len(parts) else value[:0]
    to_local(tensor).copy_(to_local(value))


def distribute_like(tensor: Any, value: Tensor) -> Tensor:
    """A whole tensor as another one is: in its parts where it is of its shape, and on its device."""
    if not is_dtensor(tensor) or value.shape != tensor.shape:
        return value.to(tensor.device)
    found = torch.empty_like(tensor)
    copy_into(found, value)
    return found
