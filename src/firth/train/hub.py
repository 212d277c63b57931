"""Upload models to the Hugging Face Hub: final models to main, checkpoints as branches such as step-1000.

Only files that a manifest of ours lists are uploaded, without the optimizer's state, and the model card. The token
comes from HF_TOKEN or from `hf auth login`, never from an argument. HF_ENDPOINT names another server.

A push replaces the model of a branch: the commit also deletes what an earlier push wrote and this one does not. A new
branch is a copy of main, and `transformers` prefers a `model.safetensors` of main to the parts of a sharded checkpoint.
Files that people added themselves stay, and so does a model card that was edited on the Hub.

While a run trains, `CheckpointUploader` uploads in a thread. A checkpoint may be removed meanwhile
(`save_total_limit`), so the thread reads hard links to its files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from queue import Full, Queue
from typing import Any, NamedTuple, TypeVar

from firth.core.console import format_count, say, warn
from firth.core.errors import MAX_REASON_CHARS, UserError, quote, shorten
from firth.core.files import (
    MANIFEST_FILE,
    MODEL_CARD_FILE,
    check_manifest,
    find_file_defect,
    read_manifest,
    remove_path,
    write_json,
)
from firth.core.parse import parse_json
from firth.text.open_text import import_optional
from firth.train.recipe import TrainingConfig

ResultT = TypeVar("ResultT")
MAIN_BRANCH = "main"
REPO_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]{1,96}")
PUSHED_KINDS = ("model", "onnx", "gguf")  # of folders, by their manifest
PRIVATE_FOLDER = "training/"  # of a checkpoint: state of the optimizer, which only --resume reads
RETRY_SECONDS = (2.0, 10.0)  # before the second and the third attempt
MAX_WAITING = 2  # checkpoints that wait for their upload; their files stay on the disk
CARD_KEY = "card_sha256"  # in a manifest on the Hub: the model card as it was pushed
# Files that change which model is loaded. They go even if no manifest lists them.
SHADOWING_FILE = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json|task\.json"
)
STALLED_SECONDS = 120.0  # without a byte from the Hub: a request has failed
MIN_CLOSE_SECONDS = 300.0  # how long the end of a run waits for its uploads, and 1 s more for each MB of them
MIN_UPLOAD_BYTES_PER_S = 1e6
REFUSED_STATUS = (400, 401, 403, 404, 409, 413, 422)  # answers that another attempt does not change


class HubRefusalError(UserError):
    """The Hub refuses a request: another attempt would not help."""


class PushedModel(NamedTuple):
    repo: str
    revision: str
    url: str
    files: int
    bytes: int


def import_hub() -> Any:
    """Import huggingface_hub, with the parts that it does not import itself."""
    for part in ("constants", "errors", "utils"):
        import_optional(f"huggingface_hub.{part}", "The Hugging Face Hub")
    hub = import_optional("huggingface_hub", "The Hugging Face Hub")
    hub.utils.get_session().timeout = STALLED_SECONDS  # without it a Hub that does not answer holds a run for ever
    return hub


def check_repo_name(repo: str) -> None:
    if not REPO_NAME.fullmatch(repo) or ".." in repo or "--" in repo:
        raise UserError(f"{quote(repo)} is not the name of a repository. Write owner/name.")


def open_repo(repo: str, public: bool) -> str:
    """Create a repository unless it exists; return its full name. Raises a UserError without network or token.

    A repository that exists keeps its visibility.
    """
    check_repo_name(repo)
    hub = import_hub()
    if hub.get_token() is None:
        raise UserError(
            "There is no token for the Hugging Face Hub: set HF_TOKEN to one that may write, or run `hf auth login`."
        )
    created = call_hub(lambda: hub.HfApi().create_repo(repo, private=not public, exist_ok=True))
    return str(created.repo_id)


def list_uploads(folder: Path) -> dict[str, Path]:
    """Return the files of a model that may be uploaded, by their names; a UserError for any folder that is not ours."""
    if not (folder / MANIFEST_FILE).is_file():
        raise UserError(
            f"{folder} is not a model folder that Firth wrote: it has no {MANIFEST_FILE}. Push RUN/final, or a folder "
            "of `firth export`."
        )
    manifest = read_manifest(folder)
    if manifest.get("kind") not in PUSHED_KINDS:
        raise UserError(
            f"{folder} is of kind {shorten(manifest.get('kind'))}: only models are pushed, such as RUN/final, and "
            "exports for Hugging Face, ONNX and GGUF."
        )
    files = {name: fact for name, fact in manifest["files"].items() if name != MODEL_CARD_FILE}  # people edit a card
    if defect := next((defect for name in files if (defect := find_file_defect(folder, name, files[name]))), None):
        raise UserError(f"{folder}: {defect}. It was changed or damaged since it was written, and is not pushed.")
    return {name: folder / name for name in files if not name.startswith(PRIVATE_FOLDER)}


class Branch(NamedTuple):
    """A branch of a repository: its files, and what is known of the last push."""

    files: frozenset[str]
    manifest: dict[str, Any]  # empty without one of ours
    has_own_card: bool  # a person wrote or edited README.md on the Hub

    def find_stale(self, new: Collection[str]) -> list[str]:
        """Return the files to delete when the files `new` are pushed."""
        pushed = self.manifest.get("files", {})
        old = (name for name in self.files if name in pushed or SHADOWING_FILE.fullmatch(name))
        return sorted(name for name in old if name not in new and name != MODEL_CARD_FILE)


def read_branch(repo: str, revision: str) -> Branch:
    hub = import_hub()
    files = frozenset(hub.HfApi().list_repo_files(repo, revision=revision))

    def read(name: str) -> bytes:
        if name not in files:
            return b""
        url = hub.hf_hub_url(repo, name, revision=revision)
        response = hub.utils.get_session().get(url, headers=hub.utils.build_hf_headers())
        hub.utils.hf_raise_for_status(response)
        return bytes(response.content)

    name = f"{repo}/{MANIFEST_FILE}"
    try:
        manifest = check_manifest(parse_json(read(MANIFEST_FILE).decode("utf-8", "replace"), name), name)
    except UserError:  # not one of ours
        manifest = {}
    has_card = MODEL_CARD_FILE in files
    is_ours = has_card and sha256(read(MODEL_CARD_FILE)).hexdigest() == manifest.get(CARD_KEY)
    return Branch(files, manifest, has_card and not is_ours)


def push_folder(
    folder: Path, repo: str, revision: str, card: str | None, message: str, new_card: bool = False
) -> PushedModel:
    """Make a branch this model folder, in one commit: all of its files appear together, or none.

    A card that was edited on the Hub stays, unless `new_card`.
    """
    hub = import_hub()
    uploads = {name: str(path) for name, path in list_uploads(folder).items()}
    manifest = read_manifest(folder)
    listed = {name: manifest["files"][name] for name in uploads}
    api = hub.HfApi()
    if revision != MAIN_BRANCH:
        call_hub(lambda: api.create_branch(repo, branch=revision, exist_ok=True))

    def commit() -> tuple[int, Any]:
        branch = read_branch(repo, revision)
        if revision == MAIN_BRANCH and branch.manifest.get("kind", manifest["kind"]) != manifest["kind"]:
            raise HubRefusalError(
                f"{repo} holds a folder of kind {branch.manifest['kind']}, and {folder} is of kind {manifest['kind']}. "
                f"Push it to another repository, such as {repo}-{manifest['kind']}, or to a branch with --revision."
            )
        contents: dict[str, str | bytes] = dict(uploads)
        new_manifest = manifest | {"files": listed}
        if card is not None and (new_card or not branch.has_own_card):
            contents[MODEL_CARD_FILE] = card.encode()
            new_manifest[CARD_KEY] = sha256(card.encode()).hexdigest()
        elif CARD_KEY in branch.manifest:
            new_manifest[CARD_KEY] = branch.manifest[CARD_KEY]
        if card is not None and MODEL_CARD_FILE not in contents:
            say(f"{repo}: {MODEL_CARD_FILE} was written or edited on the Hub and stays. --new-card replaces it.")
        contents[MANIFEST_FILE] = json.dumps(new_manifest).encode()
        stale = branch.find_stale(contents)
        if foreign := [name for name in stale if name not in branch.manifest.get("files", {})]:
            say(f"{repo}: deleting {', '.join(foreign)}, which would be loaded in place of this model.")
        operations = [hub.CommitOperationAdd(name, content) for name, content in contents.items()]
        operations += [hub.CommitOperationDelete(name, is_folder=False) for name in stale]
        return len(contents), api.create_commit(repo, operations, commit_message=message, revision=revision)

    num_files, _ = call_hub(commit)
    tree = "" if revision == MAIN_BRANCH else f"/tree/{revision}"
    size = sum(fact["bytes"] for fact in listed.values())
    return PushedModel(repo, revision, f"{hub.constants.ENDPOINT}/{repo}{tree}", num_files, size)


def call_hub(request: Callable[[], ResultT]) -> ResultT:
    """Call the Hub; after a failure that may pass, such as one of the network, try again. Errors are UserErrors."""
    for seconds in RETRY_SECONDS:
        try:
            return try_hub(request)
        except HubRefusalError:
            raise
        except UserError as e:
            say(f"{e} The next attempt is in {seconds:g} seconds.")
            time.sleep(seconds)
    return try_hub(request)


def try_hub(request: Callable[[], ResultT]) -> ResultT:
    try:
        return request()
    except UserError:
        raise
    except Exception as e:
        hub = import_hub()
        endpoint, causes = hub.constants.ENDPOINT, [e]
        while causes[-1].__cause__ is not None and isinstance(causes[-1].__cause__, Exception):
            causes.append(causes[-1].__cause__)
        statuses = [getattr(getattr(cause, "response", None), "status_code", None) for cause in causes]
        status = next((number for number in statuses if number is not None), None)
        reason = shorten((str(e).strip().splitlines() or [""])[0] or type(e).__name__, MAX_REASON_CHARS)
        if isinstance(e, hub.errors.OfflineModeIsEnabled):
            raise HubRefusalError("HF_HUB_OFFLINE is set, so that the Hub is not used. Unset it to push.") from None
        if status in (401, 403):
            raise HubRefusalError(
                f"{endpoint} refuses the token ({status}): it must be allowed to write to this repository. Set "
                "HF_TOKEN, or run `hf auth login`."
            ) from None
        if status in REFUSED_STATUS or isinstance(e, ValueError):
            raise HubRefusalError(f"{endpoint} refuses the upload ({reason}).") from None
        if status is None:
            raise UserError(
                f"{endpoint} cannot be reached ({type(e).__name__}: {reason}). Check the network."
            ) from None
        raise UserError(f"{endpoint} failed ({reason}).") from None


def check_push_target(repo: str, public: bool, is_resumed: bool) -> None:
    """Open the repository before a run starts, so that a wrong name or token costs no training.

    For a resumed run a Hub that cannot be reached is a warning: its training must go on.
    """
    flag = f"--push-to-hub {shorten(repo)}"
    try:
        open_repo(repo, public)
    except UserError as e:
        if not is_resumed:
            raise UserError(f"{flag}: {e} Without this option the run needs no network.") from None
        warn(f"{flag}: {e} The run continues.")


class CheckpointUploader:
    """Uploads the checkpoints of a run as branches, in a thread. A failure costs one branch and one line."""

    def __init__(self, repo: str, public: bool) -> None:
        self.repo, self.public = repo, public
        self.waiting: Queue[tuple[Path, str] | None] = Queue(MAX_WAITING)
        self.unfinished: dict[str, tuple[Path, Path]] = {}  # branch -> checkpoint, hard links to its files
        hub = import_hub()
        hub.utils.disable_progress_bars()
        hub.utils.logging.set_verbosity_error()
        self.thread = threading.Thread(target=self.upload_all, name="hub", daemon=True)
        self.thread.start()

    def push(self, checkpoint: Path) -> None:
        """Have a checkpoint uploaded. It may be removed at once: the upload reads hard links to its files."""
        branch = branch_name(checkpoint)
        links = checkpoint.with_name(f".{checkpoint.name}.push.tmp")
        try:
            if self.waiting.full():
                raise Full
            link_model_files(checkpoint, links)
            self.unfinished[branch] = checkpoint, links
            self.waiting.put_nowait((links, branch))
        except Full:
            warn(
                f"{branch} is not pushed: {MAX_WAITING} checkpoints wait for their upload already. Raise --save-steps."
            )
        except (OSError, UserError) as e:
            warn(f"{branch} is not pushed ({e}). Training continues.")

    def upload_all(self) -> None:
        while (item := self.waiting.get()) is not None:
            links, branch = item
            try:
                repo = open_repo(self.repo, self.public)
                push_folder(links, repo, branch, None, f"Checkpoint {branch}")
                say(f"pushed {branch} to {repo}")
            except Exception as e:  # whatever a library raises, the training goes on
                warn(f"{branch} could not be pushed: {e} Training continues.")
            finally:
                remove_path(links)
                del self.unfinished[branch]

    def close(self) -> None:
        """Wait for the uploads of a run that has ended, as long as a slow network needs, not for ever."""
        remaining = [links for _, links in list(self.unfinished.values())]
        if remaining:
            say(f"waiting for the upload of {format_count(len(remaining), 'checkpoint')}")
        size = sum(file.stat().st_size for links in remaining for file in links.rglob("*") if file.is_file())
        deadline = time.monotonic() + MIN_CLOSE_SECONDS + size / MIN_UPLOAD_BYTES_PER_S
        with suppress(Full):  # the thread is a daemon: without its end mark it ends with the process
            self.waiting.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self.thread.join(max(0.0, deadline - time.monotonic()))
        for branch, (checkpoint, links) in list(self.unfinished.items()):
            # --save-total-limit may have removed the checkpoint; the links stay.
            folder = checkpoint if checkpoint.is_dir() else links
            command = f"firth push {shlex.quote(str(folder))} {shlex.quote(self.repo)} --revision {branch}"
            warn(f"{branch} is not pushed: the Hub is too slow or hangs. Push it later: {command}")


def make_uploader(recipe: TrainingConfig, is_main_process: bool = True) -> CheckpointUploader | None:
    """Return the uploader of a run with --push-to-hub, in the main process."""
    return CheckpointUploader(recipe.push_to_hub, recipe.public) if recipe.push_to_hub and is_main_process else None


def branch_name(checkpoint: Path) -> str:
    """Return the branch of a checkpoint.

    >>> branch_name(Path("run/checkpoint-1000")), branch_name(Path("topics/seed-2/checkpoint-500"))
    ('step-1000', 'seed-2-step-500')
    """
    step = checkpoint.name.replace("checkpoint-", "step-")
    return f"{checkpoint.parent.name}-{step}" if checkpoint.parent.name.startswith("seed-") else step


def link_model_files(checkpoint: Path, folder: Path) -> None:
    """Make a folder of hard links to the files of a checkpoint that are uploaded, with a manifest of its own."""
    remove_path(folder)
    folder.mkdir()
    manifest = read_manifest(checkpoint)
    files = {name: fact for name, fact in manifest["files"].items() if not name.startswith(PRIVATE_FOLDER)}
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(checkpoint / name, folder / name)
    write_json(folder / MANIFEST_FILE, manifest | {"files": files})
