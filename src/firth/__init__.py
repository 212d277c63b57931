"""Firth: from your own text to a language model. Every command is a function: `firth.pretrain(...)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from firth.core.errors import UserError

if TYPE_CHECKING:
    from firth.api import (
        Predictor,
        adapt,
        attention,
        check,
        compare,
        doctor,
        embed,
        evaluate,
        evaluate_suite,
        export,
        fill,
        finetune,
        generate,
        load,
        load_tokenizer,
        models,
        plan,
        predict,
        prepare,
        pretrain,
        prove_resume,
        push,
        quickstart,
        show,
        similar,
        tokenizer,
    )

__version__ = "0.1.0"
__all__ = [
    "Predictor",
    "UserError",
    "adapt",
    "attention",
    "check",
    "compare",
    "doctor",
    "embed",
    "evaluate",
    "evaluate_suite",
    "export",
    "fill",
    "finetune",
    "generate",
    "load",
    "load_tokenizer",
    "models",
    "plan",
    "predict",
    "prepare",
    "pretrain",
    "prove_resume",
    "push",
    "quickstart",
    "show",
    "similar",
    "tokenizer",
]


def __getattr__(name: str) -> Any:
    """Import `firth.api` at its first use, so that `import firth` stays fast.

    `evaluate`, `generate` and `models` are functions, and packages of the same name. The function has the package's
    attributes, so that `import firth.evaluate.report as report` finds the file.
    """
    if name not in __all__:
        raise AttributeError(f"module 'firth' has no attribute {name!r}")
    from firth import api

    function, package = getattr(api, name), sys.modules.get(f"firth.{name}")
    if package is not None:
        for lazy in package.__all__:
            getattr(package, lazy)
        function.__dict__ = package.__dict__
    return function


class _ApiPackage(ModuleType):
    """Keep a function of the API when Python imports the package of the same name and would set it in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _ApiPackage
