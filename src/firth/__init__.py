"""Firth: from your own text to a language model. Every command is a function: `firth.pretrain(...)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "check",
    "compare",
    "embed",
    "evaluate",
    "evaluate_suite",
    "export",
    "fill",
    "finetune",
    "generate",
    "load",
    "models",
    "prepare",
    "pretrain",
    "quickstart",
    "show",
    "tokenizer",
]


def __getattr__(name: str) -> Any:
    """Import `firth.api` at its first use, so that `import firth` stays fast."""
    if name in __all__:
        from firth import api

        return getattr(api, name)
    raise AttributeError(f"module 'firth' has no attribute {name!r}")


class _CallableModule(ModuleType):
    """A subpackage with the name of a command: calling it calls the command."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from firth import api

        return getattr(api, self.__name__.rpartition(".")[2])(*args, **options)


class _ApiPackage(ModuleType):
    """Makes `firth.evaluate` both the subpackage and the command, in whichever order they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _ApiPackage
