"""`--engine`: prepare text or train a tokenizer in this process and its workers, or by tasks on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from firth.commands.shards import check_shard_options, check_shard_salient, summarize_shards
from firth.core.console import say
from firth.core.errors import UserError, did_you_mean, shorten
from firth.core.files import MANIFEST_FILE, check_output_folder
from firth.text import Corpus, SalientSpanFinder
from firth.tokens import Tokenizer, is_shards_folder
from firth.tokens.builders import SplitOptions, build_untrained
from firth.tokens.cluster.prepare import DOCUMENT_TIMEOUT_S, find_input_files, prepare_by_tasks, staging_folder
from firth.tokens.cluster.ray_engine import open_ray_engine
from firth.tokens.cluster.sample import sample_by_tasks
from firth.tokens.cluster.store import is_url, upload_folder
from firth.tokens.shards import find_shard_damage, remember_verified
from firth.tokens.train import max_sample_bytes

ENGINES = ("local", "ray")
SAMPLE_MEMORY_BYTES = 8 * 10**9  # bytes of memory to train a tokenizer, if --max-memory is not given


def uses_ray(
    engine: str,
    address: str | None,
    document_timeout: float | None,
    paths: Sequence[str | Path],
    max_memory: int | None = None,
    dry_run: bool = False,
) -> bool:
    """Check the options of an engine, and return whether it is Ray."""
    if engine not in ENGINES:
        raise UserError(f"--engine {shorten(engine)} is unknown. {did_you_mean(engine, ENGINES)}")
    if document_timeout is not None and document_timeout < 0:
        raise UserError(f"--document-timeout is {document_timeout:g}, and must be at least 0.")
    if engine == "ray":
        if max_memory is not None or dry_run:
            option = "--dry-run" if dry_run else "--max-memory"
            raise UserError(f"{option} is for one machine: leave it out with --engine ray.")
        return True
    given = {"--address": address, "--document-timeout": document_timeout}
    if unread := next((name for name, value in given.items() if value is not None), None):
        raise UserError(f"{unread} needs --engine ray.")
    if remote := next((path for path in paths if is_url(path)), None):
        raise UserError(f"{remote}: object storage needs --engine ray.")
    return False


def prepare_on_ray(
    texts: Sequence[str | Path],
    tokenizer: Tokenizer,
    output_dir: str | Path,
    held_out: float,
    salient: SalientSpanFinder | None,
    address: str | None,
    document_timeout: float | None,
    workers: int,
    overwrite: bool,
    resume: bool,
    dedup: str,
    **reading: Any,
) -> dict[str, Any]:
    """Prepare shards by tasks on a cluster; return their summary."""
    folder = staging_folder(output_dir)
    if resume and is_shards_folder(folder) and find_shard_damage(folder) is None and not is_url(output_dir):
        check_shard_salient(folder, salient)
        fixed = {"held_out_share": held_out, "dedup": dedup, "tokenizer": tokenizer.fingerprint}
        check_shard_options(folder, fixed)
        say(f"{folder} is complete. Leave out --engine to compare the text with it.")
        return summarize_shards(folder)
    check_output_folder(folder, "--output-dir", overwrite, "shards", resume)
    options: dict[str, Any] = {"held_out_share": held_out, "dedup": dedup, "salient": salient, "resume": resume}
    with open_ray_engine(address, workers) as engine:
        prepare_by_tasks(
            texts, tokenizer, output_dir, engine, document_timeout=time_limit(document_timeout), **options, **reading
        )
    remember_verified(folder)
    return {**summarize_shards(folder), **({"copied_to": str(output_dir)} if is_url(output_dir) else {})}


def upload_output(folder: Path, output_dir: str | Path) -> dict[str, str]:
    """Copy a folder of this machine to the output if that is on object storage; return what the result says of it."""
    if not is_url(output_dir):
        return {}
    say(f"copying {folder} to {output_dir}; {folder} stays on this machine")
    upload_folder(folder, str(output_dir), last=MANIFEST_FILE)
    return {"copied_to": str(output_dir)}


def sample_on_ray(
    texts: Sequence[str | Path],
    output_dir: str | Path,
    kind: str | Tokenizer,
    max_memory: int | None,
    seed: int,
    address: str | None,
    document_timeout: float | None,
    resume: bool,
    **reading: Any,
) -> list[str]:
    """Draw the sample for a tokenizer of a kind, or like another one, by tasks on a cluster."""
    like = build_untrained(kind, SplitOptions()) if isinstance(kind, str) else kind.backend
    max_bytes = max_sample_bytes(like, max_memory or SAMPLE_MEMORY_BYTES)
    with open_ray_engine(address) as engine:
        return sample_by_tasks(
            texts, output_dir, engine, max_bytes, seed, resume, time_limit(document_timeout), **reading
        )


def count_text_bytes(texts: Sequence[str | Path]) -> int:
    """Return the size of the text, as stored where it is on object storage."""
    files = [path for path in texts if not is_url(path)]
    return (Corpus(files).text_bytes if files else 0) + sum(
        file.size for path in texts if is_url(path) for file in find_input_files([path])
    )


def time_limit(document_timeout: float | None) -> float:
    return DOCUMENT_TIMEOUT_S if document_timeout is None else document_timeout
