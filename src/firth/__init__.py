"""Firth: from a person's own text to a language model. The verbs are functions: `firth.pretrain(...)`."""

from __future__ import annotations

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
