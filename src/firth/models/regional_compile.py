"""Regional compilation: compile a block once for all blocks that are alike, instead of the step as a whole.

Compiling a whole step takes time in proportion to its layers: half a minute or more for twelve. Regions compile in a
fraction of that and run a little slower (docs/results.md), because nothing is fused across blocks: hidden states are
written and read once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])

_regions_enabled = False  # global, not per thread: autograd recomputes checkpointed blocks in other threads
_compiled_regions: dict[Any, Any] = {}  # method -> compiled method


@contextmanager
def compile_regions() -> Iterator[None]:
    """Compile each region on its own inside this context."""
    global _regions_enabled
    before, _regions_enabled = _regions_enabled, True
    try:
        yield
    finally:
        _regions_enabled = before


def is_compiled() -> bool:
    """Whether this code is compiled, or calls regions that are."""
    return _regions_enabled or torch.compiler.is_compiling()


def reset_compiled_regions() -> None:
    """Forget compiled code: it is not keyed by the settings that say which activations are saved."""
    _compiled_regions.clear()
    torch._dynamo.reset()


def compilable_region(method: Method) -> Method:
    """Mark a method as a region. Modules that are alike share its compiled code."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _regions_enabled or torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if method not in _compiled_regions:  # lazily: few commands need the compiler
            _compiled_regions[method] = torch.compile(method, dynamic=False)
        return _compiled_regions[method](*args, **kwargs)

    return cast(Method, call)
