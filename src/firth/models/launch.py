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

AT_ONCE = 4  # kernels; their compilers leave Python to others for half of their time
_begun: set[Any] = set()  # kernels for what they are given
_coming: list[Future[None]] = []
_pool: ThreadPoolExecutor | None = None


def operation(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """A function with kernels as an operation that torch's compiler does not look into: it would trace the kernels for
    every layer, which takes it longer than all the rest. The function also says what it would give.
    """

    def make(function: Callable[..., Any]) -> CustomOpDef:
        found = custom_op(name, mutates_args=())(function)
        found.register_fake(function)
        return found

    return make


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **made_for: Any) -> None:
    """Start a kernel where its first tensor is; or begin to compile it, where that only says what it would be."""
    first = given[0]
    if isinstance(first, FakeTensor):
        begin(kernel, first.device, given, made_for)
        return
    while _coming:  # or all that are not ready would be compiled twice
        _coming.pop().exception()  # which is met again, if there is one, where the kernel is needed
    with torch.cuda.device_of(first):
        kernel[grid](*given, **made_for)


def begin(kernel: Any, device: torch.device, given: tuple[Any, ...], made_for: dict[str, Any]) -> None:
    """Let a thread compile a kernel for such things, if none has done so."""
    global _pool
    kinds = tuple(x.dtype if isinstance(x, Tensor) else x for x in given)
    if not torch.cuda.is_available() or any(isinstance(x, torch.SymInt) for x in (*kinds, *made_for.values())):
        return
    key = (kernel, device, kinds, tuple(made_for.items()))
    if key in _begun:
        return
    _begun.add(key)
    _pool = _pool or ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kernels")

    def compile_it() -> None:
        with torch.cuda.device(device):
            found = kernel.warmup(*kinds, grid=(1,), **made_for)
            _ = found.run  # which is made when it is asked for: a module in C that starts the kernel

    _coming.append(_pool.submit(compile_it))
