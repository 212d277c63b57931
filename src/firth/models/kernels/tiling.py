"""Tile sizes of the fused attention kernel, and whether they fit into a GPU's shared memory."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton as triton  # other modules import it from here
except ImportError:  # absent on machines without a GPU
    triton = None

TILE_TOKENS = 64  # queries and keys per tile; some backward kernels use half as many of one of them
MAX_TILE_VECTORS = 512  # vectors of one head that the largest kernel variant holds in shared memory
TILE_RESERVED_BYTES = 34 * 2**10  # bytes of shared memory that it needs beside them


def has_fused_attention(q_BHTd: Tensor) -> bool:
    """Whether the kernel supports this device and head size, and its tiles fit into shared memory."""
    d = q_BHTd.shape[-1]
    if triton is None or q_BHTd.device.type != "cuda" or not 16 <= d <= 128:
        return False
    needed = MAX_TILE_VECTORS * padded_head_size(d) * q_BHTd.element_size() + TILE_RESERVED_BYTES
    return needed <= shared_memory_bytes(q_BHTd.device.index or 0)


def padded_head_size(d: int) -> int:
    """Return the next power of two, at least 16: Triton's tensors have such sizes."""
    return max(16, 1 << (d - 1).bit_length())


def shared_memory_bytes(device: int) -> int:
    """Return the bytes of shared memory per program; CUDA reserves 1 KiB of it."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024


def num_multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs)."""
    return torch.cuda.get_device_properties(device.index or 0).multi_processor_count if device.type == "cuda" else 1


def mark_compile_constants() -> None:
    """Let compiled code treat device properties as constants. (A decorator would import the compiler at once.)"""
    torch.compiler.assume_constant_result(shared_memory_bytes)
