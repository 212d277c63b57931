"""The memory that tensors take on a CPU while something is computed.

A GPU's allocator knows its peak; a CPU's does not say. `LiveMemory` sees every operation of torch (a *dispatch mode*)
and the storage of each result. A storage counts from its first result until Python and autograd have dropped it.
Buffers that an operation allocates and frees inside are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveMemory(TorchDispatchMode):
    """Adds up the bytes of tensors that are made inside the `with` block; `peak_bytes` is the most at one time.

    Storages of `existing` tensors do not count, nor do views of them.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # live storages by their address
        self.current_bytes = self.peak_bytes = 0
        for tensor in existing:
            self.sizes[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, result)
        return result

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.current_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)
            weakref.finalize(storage, self.drop, storage._cdata)
        return tensor

    def drop(self, address: int) -> None:
        self.current_bytes -= self.sizes.pop(address)
