"""Packages whose names are imported at first use, so that a command which needs one config does not load torch.

A package lists its names below `if TYPE_CHECKING:`, as type checkers read them, and ends with `make_lazy(__name__)`.
`from firth.models import ModelConfig` then imports `firth.models.config` and no other file. Scientific Python's SPEC 1
describes the technique; it is built on module attributes (PEP 562).
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package that imports a name from its file when the name is read."""

    _files: dict[str, str]  # name -> the module that defines it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._files:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(self._files[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep the function `pretrain` when Python imports the file `pretrain.py` and would set it in its place."""
        if not (isinstance(value, ModuleType) and name in self._files):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._files})


def make_lazy(package: str) -> None:
    """Let a package import the names below its `if TYPE_CHECKING:` at their first use."""
    module: Any = sys.modules[package]
    module.__dict__["_files"] = imported_names(module.__spec__.loader.get_source(package))
    module.__class__ = LazyPackage


def imported_names(source: str) -> dict[str, str]:
    """Return the names that a file imports below `if TYPE_CHECKING:`, and the module of each.

    >>> imported_names("if TYPE_CHECKING:\\n    from firth.train.loop import Diverged, fit")
    {'Diverged': 'firth.train.loop', 'fit': 'firth.train.loop'}
    """
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
