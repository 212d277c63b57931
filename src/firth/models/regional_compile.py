"""Parts of a model that are compiled one by one: a block once for all that are alike, in place of the step as a whole.

A program of the whole step is traced layer by layer, and what a compiler does grows with the layers: half a minute or
more for twelve. Those of the parts are ready in a fraction of that, and a little slower (docs/results.md): what goes
from block to block is written and read once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])

_regions_enabled = False  # whether parts are programs of their own now, in all threads: some compute backward
_compiled_regions: dict[Any, Any] = {}  # of those that were called so, by their methods


@contextmanager
def compile_regions() -> Iterator[None]:
    """Let the parts of models be programs of their own in here."""
    global _regions_enabled
    before, _regions_enabled = _regions_enabled, True
    try:
        yield
    finally:
        _regions_enabled = before


def reset_compiled_regions() -> None:
    """Let all be compiled again, as what is compiled does not know what it was told to keep."""
    _compiled_regions.clear()
    torch._dynamo.reset()


def compilable_region(method: Method) -> Method:
    """A method that is such a part. Objects that are alike share its program: what they are is looked at, not who."""

    @functools.wraps(method)
    def call(*args: Any, **more: Any) -> Any:
        if not _regions_enabled or torch.compiler.is_compiling():
            return method(*args, **more)
        if method not in _compiled_regions:  # only now, as few commands need the compiler
            _compiled_regions[method] = torch.compile(method, dynamic=False)
        return _compiled_regions[method](*args, **more)

    return cast(Method, call)
