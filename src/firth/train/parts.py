"""Tensors of which each process holds a part: rows of it, the first ones in the first process (DTensor)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_part(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # a DTensor, which takes a second to load where none is needed


def local(tensor: Any) -> Tensor:
    """What of a tensor lies here, in its own memory."""
    return tensor.to_local() if is_part(tensor) else tensor


def whole(tensor: Any) -> Tensor:
    """All of a tensor. Every process must ask."""
    return tensor.full_tensor() if is_part(tensor) else tensor


@torch.no_grad()
def fill(tensor: Any, value: Tensor) -> None:
    """Copy a whole tensor, or one in the same parts, into another, or what lies here of it."""
    if is_part(tensor) and not is_part(value):
        mesh = tensor.device_mesh
        parts = value.chunk(mesh.size())
        value = parts[mesh.get_rank()] if mesh.get_rank() < len(parts) else value[:0]
    local(tensor).copy_(local(value))


def like(tensor: Any, value: Tensor) -> Tensor:
    """A whole tensor as another one is: in its parts where it is of its shape, and on its device."""
    if not is_part(tensor) or value.shape != tensor.shape:
        return value.to(tensor.device)
    found = torch.empty_like(tensor)
    fill(found, value)
    return found
