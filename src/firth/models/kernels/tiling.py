"""How large the tiles of our kernels are, and whether a GPU has room for them."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton as triton  # which those who call our kernels ask for
except ImportError:  # a machine without a GPU needs none
    triton = None

TILE_TOKENS = 64  # places of a tile; those who ask, and what is read, are taken in so many or half as many
MAX_TILE_VECTORS, TILE_RESERVED_BYTES = (
    512,
    34 * 2**10,
)  # vectors of a head, and bytes beside them, that the largest variant has room for


def has_fused_attention(q_BHTd: Tensor) -> bool:
    """Whether there is such a kernel for these numbers, and room for its tiles."""
    d = q_BHTd.shape[-1]
    if triton is None or q_BHTd.device.type != "cuda" or not 16 <= d <= 128:
        return False
    room = MAX_TILE_VECTORS * padded_head_size(d) * q_BHTd.element_size() + TILE_RESERVED_BYTES
    return room <= shared_memory_bytes(q_BHTd.device.index or 0)


def padded_head_size(d: int) -> int:
    """Numbers per head as the kernel has them: a power of two."""
    return max(16, 1 << (d - 1).bit_length())


def shared_memory_bytes(device: int) -> int:
    """Bytes that the tiles of a program may take on a GPU, which keeps some for itself."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024


def num_multiprocessors(device: torch.device) -> int:
    """How many a GPU has, each of which runs some programs at once."""
    return torch.cuda.get_device_properties(device.index or 0).multi_processor_count if device.type == "cuda" else 1


def mark_compile_constants() -> None:
    """Let a program take what a GPU has for a constant. (A decorator would load the compiler with every command.)"""
    torch.compiler.assume_constant_result(shared_memory_bytes)
