"""The command `push`, and the push at the end of a training."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from firth.core.console import say, warn
from firth.core.errors import UserError
from firth.core.files import MODEL_CARD_FILE, check_link_stays_inside, format_bytes, read_manifest, read_utf8


def push(
    folder: str | Path, repo: str, revision: str = "main", public: bool = False, new_card: bool = False
) -> dict[str, Any]:
    """Push a model folder to a repository of the Hugging Face Hub, with its model card.

    `folder` is RUN/final, a checkpoint, a folder of `export` (Hugging Face, ONNX or GGUF), or a run, whose final model
    is pushed. `repo` is OWNER/NAME. `revision` is a branch, which is made if it is missing. A new repository is private
    unless `public`. The model of an earlier push is replaced, files of other people stay. `new_card` writes the card
    anew, with the scores of all evaluations; otherwise a card that was edited, here or on the Hub, is kept.
    """
    from firth.train.hub import list_uploads, open_repo, push_folder

    path = resolve_model_folder(Path(folder))
    list_uploads(path)  # refuses a folder that is not ours before the network is used
    name = open_repo(repo, public)
    card = read_card(path, name, new_card)
    pushed = push_folder(path, name, revision, card, f"Push {path.name} with Firth", new_card)
    say(f"pushed {pushed.files} files, {format_bytes(pushed.bytes)}, to {pushed.url}")
    return pushed._asdict()


def resolve_model_folder(path: Path) -> Path:
    """The folder of a model; of a run, its final model."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder. Push RUN/final, a checkpoint or a folder of `firth export`.")
    return path / "final" if (path / "recipe.yaml").is_file() and (path / "final").is_dir() else path


def read_card(folder: Path, repo: str, new_card: bool = False) -> str | None:
    """Return the model card for the Hub. A card that a person has edited stays as it is."""
    from firth.evaluate.card import render_model_card
    from firth.evaluate.export_card import UNKNOWN_REPO

    file = folder / MODEL_CARD_FILE
    check_link_stays_inside(file, folder)
    written = read_utf8(file) if file.is_file() and not new_card else None
    if (kind := read_manifest(folder).get("kind")) != "model":
        if new_card:
            raise UserError(f"--new-card is for models. The card of a folder of kind {kind} comes with its export.")
        return None if written is None else written.replace(UNKNOWN_REPO, repo)
    try:
        if written is None or written == render_model_card(folder):
            return render_model_card(folder, repo)
    except UserError:  # word vectors and n-grams have a card of another form
        if new_card:
            raise
    return written


def push_final(final: Path, repo: str, public: bool) -> dict[str, str]:
    """Push the final model of a run. A failure is a warning: the model is on the disk."""
    try:
        return {"hub": push(final, repo, public=public)["url"]}
    except UserError as e:
        command = f"firth push {shlex.quote(str(final))} {shlex.quote(repo)}" + " --public" * public
        warn(f"the model is complete, and is not pushed: {e} Push it later: {command}")
        return {"push_error": str(e)}
