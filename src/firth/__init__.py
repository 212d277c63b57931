"""Firth: from a person's own text to a language model. The verbs are functions: `firth.pretrain(...)`."""

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
    """Load the verbs when the first one is used: `import firth` alone stays quick."""
    if name in __all__:
        from firth import api

        return getattr(api, name)
    raise AttributeError(f"module 'firth' has no attribute {name!r}")


class _CallableModule(ModuleType):
    """A folder of the package that is called like a verb, and does what the verb does when it is called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from firth import api

        return getattr(api, self.__name__.rpartition(".")[2])(*args, **options)


class _ApiPackage(ModuleType):
    """`firth.evaluate(...)` is the verb and `firth.evaluate` the folder, in whichever order they are loaded."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _ApiPackage
