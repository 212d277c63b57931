"""Launch Triton kernels, and compile them in background threads while torch's compiler still traces the step.

A Triton kernel takes about a second to compile, and by default compiles at its first launch, one after the other.
But torch's compiler calls each custom op long before that with `FakeTensor`s, to learn its output shapes. A fake call
names the kernel, its dtypes and its constants: `launch` starts compiling it in a thread right then.
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

MAX_COMPILE_THREADS = 4  # threads; Triton's compiler releases the GIL for about half of its time
_compile_keys: set[Any] = set()  # kernels with their dtypes and constants, compiled or queued
_pending_compiles: list[Future[None]] = []
_compile_pool: ThreadPoolExecutor | None = None


def kernel_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function that launches kernels as a custom op, which is opaque to torch's compiler.

    Tracing into the kernels of every layer would take longer than the rest of the compilation. The function is also
    its own fake implementation: `launch` launches nothing for fake tensors.
    """

    def make(function: Callable[..., Any]) -> CustomOpDef:
        op = custom_op(name, mutates_args=())(function)
        op.register_fake(function)
        return op

    return make


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first tensor; for a fake tensor, only start compiling it."""
    first = args[0]
    if isinstance(first, FakeTensor):
        compile_in_background(kernel, first.device, args, options)
        return
    while _pending_compiles:  # wait: a kernel that is still compiling would be compiled twice
        _pending_compiles.pop().exception()  # ignored: the launch raises it again
    with torch.cuda.device_of(first):
        kernel[grid](*args, **options)


def compile_in_background(kernel: Any, device: torch.device, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Compile a kernel for these dtypes and constants in a thread, once."""
    global _compile_pool
    signature = tuple(x.dtype if isinstance(x, Tensor) else x for x in args)
    if not torch.cuda.is_available() or any(isinstance(x, torch.SymInt) for x in (*signature, *options.values())):
        return
    key = (kernel, device, signature, tuple(options.items()))
    if key in _compile_keys:
        return
    _compile_keys.add(key)
    _compile_pool = _compile_pool or ThreadPoolExecutor(MAX_COMPILE_THREADS, thread_name_prefix="kernels")

    def compile_it() -> None:
        with torch.cuda.device(device):
            compiled = kernel.warmup(*signature, grid=(1,), **options)
            _ = compiled.run  # builds the C launcher, which Triton does lazily

    _pending_compiles.append(_compile_pool.submit(compile_it))
