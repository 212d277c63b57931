"""Firth: from a person's own text to a language model. The verbs are functions: `firth.pretrain(...)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "evaluate",
    "export",
    "fill",
    "finetune",
    "generate",
    "load",
    "models",
    "prepare",
    "pretrain",
    "quickstart",
    "tokenizer",
]


def __getattr__(name: str) -> Any:
    """Load the verbs when the first one is used: `import firth` alone stays quick."""
    if name in __all__:
        from firth import verbs

        return getattr(verbs, name)
    raise AttributeError(f"module 'firth' has no attribute {name!r}")


class _Package(ModuleType):
    """Some verbs are called like a folder of the package: `firth.evaluate` is the verb, also once both are loaded."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
