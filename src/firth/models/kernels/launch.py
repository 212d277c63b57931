"""How our kernels are started; and compiled, while a step that will need them is still being traced.

A kernel takes a second or so to compile, one after the other when they are first met. But torch's compiler asks long
before that what our operations would give, of tensors that only say what they would be (`FakeTensor`): from then on
kernels are compiled by other threads, beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import custom_op

MAX_COMPILE_THREADS = 4  # kernels; their compilers leave Python to others for half of their time
_compile_keys: set[Any] = set()  # kernels for what they are given
_pending_compiles: list[Future[None]] = []
_compile_pool: ThreadPoolExecutor | None = None


def kernel_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """A function with kernels as an operation that torch's compiler does not look into: it would trace the kernels for
    every layer, which takes it longer than all the rest. The function also says what it would give.
    """

    def make(function: Callable[..., Any]) -> CustomOpDef:
        found = custom_op(name, mutates_args=())(function)
        found.register_fake(function)
        return found

    return make


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a kernel where its first tensor is; or begin to compile it, where that only says what it would be."""
    first = args[0]
    if isinstance(first, FakeTensor):
        compile_in_background(kernel, first.device, args, options)
        return
    while _pending_compiles:  # or all that are not ready would be compiled twice
        _pending_compiles.pop().exception()  # which is met again, if there is one, where the kernel is needed
    with torch.cuda.device_of(first):
        kernel[grid](*args, **options)


def compile_in_background(kernel: Any, device: torch.device, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Let a thread compile a kernel for such things, if none has done so."""
    global _compile_pool
    kinds = tuple(x.dtype if isinstance(x, Tensor) else x for x in args)
    if not torch.cuda.is_available() or any(isinstance(x, torch.SymInt) for x in (*kinds, *options.values())):
        return
    key = (kernel, device, kinds, tuple(options.items()))
    if key in _compile_keys:
        return
    _compile_keys.add(key)
    _compile_pool = _compile_pool or ThreadPoolExecutor(MAX_COMPILE_THREADS, thread_name_prefix="kernels")

    def compile_it() -> None:
        with torch.cuda.device(device):
            found = kernel.warmup(*kinds, grid=(1,), **options)
            _ = found.run  # which is made when it is asked for: a module in C that starts the kernel

    _pending_compiles.append(_compile_pool.submit(compile_it))
