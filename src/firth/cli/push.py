"""The command `push`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from firth.cli import render
from firth.cli.command import option
from firth.cli.options import JsonOptions

PUSH_EXAMPLES = """
firth push run/final me/animals                # private
firth push topics me/topics --public           # the final model of a run
firth push run/checkpoint-1000 me/animals --revision step-1000
firth push gguf me/animals-gguf                # of export --format gguf
"""


@dataclass(kw_only=True)
class PushOptions(JsonOptions):
    folder: str = option(
        ..., "RUN/final, a checkpoint, a folder of export (huggingface, onnx, gguf), or a run.", argument=True
    )
    repo: str = option(..., "The repository, OWNER/NAME. It is made if it is missing.", argument=True)
    revision: str = option("main", "Push to this branch, such as step-1000.", "NAME")
    public: bool = option(False, "Make a new repository public; it is private without.")
    new_card: bool = option(False, "Write the model card anew, with the scores of all evaluations.")


def push(json: bool, **options: Any) -> None:
    """Push a model to the Hugging Face Hub, with its model card.

    Uploads the files of the folder's manifest, without the optimizer's state. The token is that of HF_TOKEN or
    `hf auth login`.
    """
    from firth import api

    render.print_result(api.push(**options), json, "Push")
