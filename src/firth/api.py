"""Every command as a Python function.

    import firth
    firth.pretrain("bert-base", data="books/", output_dir="run")
    model = firth.load("run/final")

Each function takes the options of its command as keyword arguments and returns the object that --json prints. A user's
mistake raises `UserError` before anything is written. The functions are in `firth.commands`; the command line
(`firth.cli`) only parses and prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firth.commands.adapt import adapt
from firth.commands.doctor import doctor
from firth.commands.evaluate import evaluate, evaluate_suite, predict
from firth.commands.export import export
from firth.commands.finetune import finetune
from firth.commands.generate import fill, generate
from firth.commands.models import models
from firth.commands.pretrain import plan, pretrain, prove_resume, show
from firth.commands.push import push
from firth.commands.serve import serve
from firth.commands.text import check, prepare, tokenizer
from firth.commands.vectors import attention, compare, embed, similar

if TYPE_CHECKING:
    from firth.evaluate.predict import Predictor as Predictor
    from firth.lab.quickstart import quickstart as quickstart
    from firth.models import load_model as load
    from firth.tokens import load_tokenizer as load_tokenizer

__all__ = [
    "Predictor",
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
    "serve",
    "show",
    "similar",
    "tokenizer",
]


def __getattr__(name: str) -> Any:
    """Import `load`, `load_tokenizer`, `quickstart` and `Predictor` at their first use."""
    if name == "load":
        from firth.models import load_model

        return load_model
    if name == "load_tokenizer":
        from firth.tokens import load_tokenizer

        return load_tokenizer
    if name == "quickstart":
        from firth.lab.quickstart import quickstart

        return quickstart
    if name == "Predictor":
        from firth.evaluate.predict import Predictor

        return Predictor
    raise AttributeError(f"module 'firth.api' has no attribute {name!r}")
