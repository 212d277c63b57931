"""Checks of shards before they are used or resumed, and how text becomes shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.text import Corpus, SalientSpanFinder, salient_finder_name
from firth.tokens import Tokenizer, load_tokenizer, open_shards
from firth.tokens import prepare as prepare_shards
from firth.tokens.prepare import digest_documents
from firth.tokens.shards import remember_verified


def check_shard_tokenizer(shards: Path, tokenizer_path: str | Path | None) -> None:
    if tokenizer_path is None:
        return
    if load_tokenizer(Path(tokenizer_path)).fingerprint != open_shards(shards).tokenizer.fingerprint:
        raise UserError(
            f"{shards} was made with another tokenizer than that of {tokenizer_path}: "
            f"prepare the text again with `firth prepare --tokenizer {tokenizer_path}`."
        )


def check_shard_salient(shards: Path, find_salient: SalientSpanFinder | None) -> None:
    """Refuse to resume shards that mark other salient spans."""
    saved = open_shards(shards).manifest.get("salient")
    given = salient_finder_name(find_salient) if find_salient else None
    if saved != given:
        raise UserError(
            f"{shards} was made with --salient {saved or 'left out'}, not {given or 'left out'}: name another "
            "--output-dir, or pass --overwrite instead of --resume."
        )


def check_shard_options(shards: Path, expected: Mapping[str, Any]) -> None:
    """Refuse to resume shards that were made with other options."""
    saved = open_shards(shards).manifest
    if other := [name for name, value in expected.items() if name in saved and saved[name] != value]:
        raise UserError(
            f"{shards} was made with {other[0]} {saved[other[0]]}, not {expected[other[0]]}: name another "
            "--output-dir, or pass --overwrite instead of --resume."
        )


def check_shard_source(shards: Path, corpus: Corpus) -> None:
    """Hash the text again, and refuse to resume shards of another text."""
    saved = open_shards(shards).manifest.get("source")
    if saved is None:
        say(f"{shards} is complete. Its manifest has no hash of the text, so changes cannot be detected.")
        return
    now = digest_documents(corpus, corpus.total_bytes)
    if now != saved:
        before, after = (format_count(source["documents"], "document") for source in (saved, now))
        change = f"{before} then, {after} now" if before != after else f"{before} then and now, but not the same"
        raise UserError(
            f"{shards} is complete, but the text has changed since it was made: {change}. Pass --overwrite instead of "
            "--resume, or name another --output-dir."
        )
    say(f"{shards} is complete, and the text has not changed.")


def check_held_out_share(held_out: float) -> None:
    if not 0 <= held_out < 1:
        raise UserError(f"--held-out is {held_out:g}, and must be at least 0 and less than 1.")


def write_shards(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    held_out: float,
    salient: SalientSpanFinder | None = None,
    resume: bool = True,
    workers: int = 0,
    **options: Any,
) -> dict[str, Any]:
    options |= {"total_bytes": corpus.total_bytes, "salient": salient, "resume": resume, "workers": workers}
    prepare_shards(corpus, tokenizer, folder, held_out, **options)
    remember_verified(folder)  # their checksums were just computed
    summary = summarize_shards(folder)
    dropped = summary["duplicates"]
    say(corpus.describe() + (f"; {format_count(dropped, 'duplicate')} dropped" if dropped else ""))
    return summary


def summarize_shards(folder: Path) -> dict[str, Any]:
    manifest = open_shards(folder).manifest
    names = ["documents", "tokens", "duplicates", "train", "held_out", "unigram_entropy"]
    names += ["skipped"] if "skipped" in manifest else []  # documents that hung or killed their process
    return {"output_dir": str(folder), **{name: manifest[name] for name in names}}
