"""Commands on text before a training: `check`, `tokenizer`, `prepare`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firth.commands.engine import count_text_bytes, prepare_on_ray, sample_on_ray, upload_output, uses_ray
from firth.commands.results import CheckResult, ShardsResult, TokenizerResult
from firth.commands.shards import (
    check_held_out_share,
    check_shard_options,
    check_shard_salient,
    check_shard_source,
    check_shard_tokenizer,
    summarize_shards,
    write_shards,
)
from firth.core.console import say
from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import atomic_folder, check_output_folder, write_json
from firth.core.html import resolve_page_path
from firth.lab.check import COMPARED_TOKENIZER_KINDS as COMPARED
from firth.lab.check import check_corpus, read_leak_examples
from firth.lab.check_page import save_check_page as save_check
from firth.lab.check_text import print_check
from firth.recipes import default_vocab_size
from firth.text import HELD_OUT_FRACTION, Corpus, SalientSpanFinder, load_salient_finder
from firth.tokens import (
    TOKENIZER_KINDS,
    Tokenizer,
    is_shards_folder,
    load_tokenizer,
    retrain_tokenizer,
    train_tokenizer,
)
from firth.tokens.checkup import SAMPLE_CHARS
from firth.tokens.cluster.prepare import staging_folder
from firth.tokens.extend import MAX_NEW_TOKENS, default_min_count, require_extensible
from firth.tokens.extend_corpus import extend_by_corpus
from firth.tokens.shards import find_shard_damage


def check(
    texts: Sequence[str | Path] | str | Path,
    tokenizer: str | Path | None = None,
    output_dir: str | Path = ".",
    kinds: Sequence[str] = COMPARED,
    vocab_sizes: Sequence[int] = (),
    sample: int = SAMPLE_CHARS,
    lowercase: bool = False,
    overwrite: bool = False,
    printed: bool = False,
    labelled: str | Path | None = None,
    task: str | None = None,
    labelled_columns: Mapping[str, str] | None = None,
    **reading: Any,
) -> CheckResult:
    """Check a text and how tokenizers split it; recommend vocabulary, row length and model size.

    `texts` are files, folders or patterns; `reading` are arguments of Corpus. `tokenizer` is the folder of a tokenizer
    or checkpoint to judge. It is compared with tokenizers of all `kinds` and `vocab_sizes`, trained on `sample`
    characters, which they lowercase with `lowercase`; with no kinds, `()`, the text alone is checked. `labelled` is a
    file whose examples are searched in the text; its `task` is told by its columns unless given, and
    `labelled_columns` renames them. Writes check.html to `output_dir`, and to the terminal if `printed`; `overwrite`
    replaces a check.html of other origin.
    """
    page = resolve_page_path(Path(output_dir), "check", overwrite)
    for kind in kinds:
        if kind not in TOKENIZER_KINDS:
            raise UserError(f"--kinds: unknown kind of tokenizer {quote(kind)}. {did_you_mean(kind, TOKENIZER_KINDS)}")
    if small := [size for size in vocab_sizes if size < 1]:
        raise UserError(f"--vocab-sizes: {small[0]} is not a size. Write whole numbers, as 4096,8192.")
    if sample < 1000:
        raise UserError(f"--sample is {sample}, and must be at least 1,000 characters.")
    judged = load_tokenizer(Path(tokenizer)) if tokenizer is not None else None
    if labelled is None and (task is not None or labelled_columns):
        raise UserError("--task and --labelled-columns need --labelled FILE.")
    encoding = reading.get("encoding") or "utf-8"
    examples = read_leak_examples(str(labelled), task, labelled_columns, encoding) if labelled is not None else None
    corpus = Corpus(texts, **reading)
    found = check_corpus(corpus, judged, str(tokenizer or ""), kinds, vocab_sizes, sample, lowercase, examples)
    save_check(found, page)
    if printed:
        print_check(found)
    result = CheckResult({**found.to_dict(), "page": str(page)})
    result.found = found
    return result


def tokenizer(
    texts: Sequence[str | Path],
    output_dir: str | Path,
    kind: str = "wordpiece",
    vocab_size: int = 0,
    lowercase: bool = False,
    overwrite: bool = False,
    like: str | Path | None = None,
    pattern: str = "gpt2",
    byte_fallback: bool = False,
    max_memory: int | None = None,
    seed: int = 0,
    reverse: bool = False,
    dry_run: bool = False,
    extend: str | Path | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    min_count: int | None = None,
    engine: str = "local",
    address: str | None = None,
    document_timeout: float | None = None,
    resume: bool = False,
    **reading: Any,
) -> TokenizerResult:
    """Train a tokenizer on `texts`; with `dry_run` only say what would be read and written.

    It is written to `output_dir`, where `overwrite` replaces an earlier one. `vocab_size` 0 is chosen by the size of
    the text. `max_memory` bytes train on a sample of a larger text, drawn with `seed`.

    `extend` is the folder of a tokenizer or checkpoint to which the words of the text are added instead: at most
    `max_new_tokens` that occur `min_count` times (default: 10, fewer in less than 1 MB); old tokens keep their ids.

    `like` is the folder of a tokenizer or checkpoint, whose kind, normalization and special tokens the new one gets;
    otherwise `kind`, `lowercase`, `pattern` and `byte_fallback` define it. `reverse` reverses every text, for models
    that read from its end. `engine="ray"` draws the sample by tasks on the cluster at `address` (default: one on this
    machine), and skips a document that takes `document_timeout` seconds; with `resume` the tasks that an interrupted
    command finished are kept, and `output_dir` may be on object storage ("s3://..."). `reading` are arguments of
    Corpus: `documents`, `columns`, `normalize` and so on.
    """
    on_ray = uses_ray(engine, address, document_timeout, [*texts, output_dir])
    if resume and not on_ray:
        raise UserError("--resume needs --engine ray: on one machine a tokenizer is trained anew.")
    folder = staging_folder(output_dir) if on_ray else Path(output_dir)
    if on_ray and (extend is not None or dry_run):
        raise UserError("--engine ray trains a new tokenizer: leave out --extend and --dry-run.")
    check_output_folder(folder, "--output-dir", overwrite, "tokenizer")
    source = like if extend is None else extend
    template = None if source is None else load_tokenizer(source)
    corpus = Corpus([] if on_ray else texts, **reading)
    if extend is not None and template is not None:
        require_extensible(template)
        if max_new_tokens < 1:
            raise UserError(f"--max-new-tokens is {max_new_tokens}, and must be at least 1.")
        return TokenizerResult(
            _extend_tokenizer(template, corpus, folder, max_new_tokens, min_count, max_memory, seed, dry_run)
        )
    size = vocab_size or default_vocab_size(count_text_bytes(texts) if on_ray else corpus.text_bytes)
    if dry_run:
        from firth.lab.dry_run import describe_text

        kind = kind if template is None else template.kind
        facts = {"kind": kind, "vocab_size": size, "writes": str(folder)}
        return TokenizerResult({"dry_run": True, **describe_text(corpus), **facts})
    found: Iterable[str] = corpus.texts()
    if on_ray:
        model_kind = kind if template is None else template
        cluster: dict[str, Any] = {"address": address, "document_timeout": document_timeout, "resume": resume}
        found = sample_on_ray(texts, output_dir, model_kind, max_memory, seed, **cluster, **reading)
        max_memory = None  # the sample fits
    if template is not None:
        new = retrain_tokenizer(template, found, size, max_memory, seed)
    else:
        normalize = corpus.cleaner.normalize
        new = train_tokenizer(found, kind, size, lowercase, max_memory, seed, pattern, byte_fallback, normalize)
    new = new.to_reversed() if reverse else new
    if not on_ray:
        say(corpus.describe())
    with atomic_folder(folder, "tokenizer") as temporary:
        new.save(temporary)
    return TokenizerResult({"output_dir": str(folder), **upload_output(folder, output_dir), **_tokenizer_facts(new)})


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab.size, "fingerprint": tokenizer.fingerprint}


def _extend_tokenizer(
    tokenizer: Tokenizer,
    corpus: Corpus,
    folder: Path,
    max_new: int,
    min_count: int | None,
    max_memory: int | None,
    seed: int,
    dry_run: bool,
) -> dict[str, Any]:
    """Write a tokenizer that is extended by the words of a corpus, and `extension.json` with what it saves."""
    if dry_run:
        from firth.lab.dry_run import describe_text

        size = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab.size, "max_new_tokens": max_new}
        return {"dry_run": True, **describe_text(corpus), **size, "writes": str(folder)}
    min_count = min_count or default_min_count(corpus.total_bytes)
    extension = extend_by_corpus(tokenizer, corpus, max_new, min_count, max_memory, seed)
    say(corpus.describe())
    result = {"extended": tokenizer.fingerprint, **extension.to_dict()}
    with atomic_folder(folder, "tokenizer") as temporary:
        extension.tokenizer.save(temporary)
        write_json(temporary / "extension.json", result)
    return {"output_dir": str(folder), **_tokenizer_facts(extension.tokenizer), **result}


def prepare(
    texts: Sequence[str | Path],
    tokenizer: str | Path,
    output_dir: str | Path,
    held_out: float = HELD_OUT_FRACTION,
    resume: bool = False,
    overwrite: bool = False,
    salient: str | SalientSpanFinder | None = None,
    workers: int = 0,
    max_memory: int | None = None,
    dedup: str = "exact",
    dry_run: bool = False,
    engine: str = "local",
    address: str | None = None,
    document_timeout: float | None = None,
    **reading: Any,
) -> ShardsResult:
    """Tokenize text into shards; with `dry_run` only say what would be read and written.

    `tokenizer` is the folder of a tokenizer or checkpoint. The shards are written to `output_dir`: `resume` continues
    where an interrupted call stopped, `overwrite` replaces them. `held_out` is the share of the documents that no
    training reads.
    `salient` marks names, numbers and dates ("default"), or the spans that a function finds. `workers` processes (0:
    one per core) share `max_memory` bytes; the shards do not depend on either. `dedup` drops duplicate documents:
    "none", "exact" or "near". `engine="ray"` does the same by tasks on the cluster at `address` (default: one on this
    machine), and skips a document that takes `document_timeout` seconds (default 60; 0: no limit). Its texts and its
    output may be on object storage ("s3://..."). `reading` are arguments of Corpus.
    """
    on_ray = uses_ray(engine, address, document_timeout, [*texts, output_dir], max_memory, dry_run)
    check_held_out_share(held_out)
    find = load_salient_finder(salient) if isinstance(salient, str) else salient
    loaded = load_tokenizer(Path(tokenizer))
    if on_ray:
        cluster: dict[str, Any] = {"address": address, "workers": workers, "document_timeout": document_timeout}
        options: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "dedup": dedup, **cluster, **reading}
        return ShardsResult(prepare_on_ray(texts, loaded, output_dir, held_out, find, **options))
    folder, corpus = Path(output_dir), Corpus(texts, **reading)
    if dry_run:
        from firth.lab.dry_run import describe_shards

        check_output_folder(folder, "--output-dir", overwrite, "shards", resume)
        return ShardsResult({"dry_run": True, **describe_shards(corpus, folder)})
    if resume and is_shards_folder(folder) and find_shard_damage(folder) is None:
        check_shard_tokenizer(folder, tokenizer)
        check_shard_salient(folder, find)
        check_shard_options(folder, {"held_out_share": held_out, "dedup": dedup})
        check_shard_source(folder, corpus)
        return ShardsResult(summarize_shards(folder))
    check_output_folder(folder, "--output-dir", overwrite, "shards", resume)
    options = {"workers": workers, "max_memory": max_memory, "dedup": dedup, "resume": resume}
    return ShardsResult(write_shards(corpus, loaded, folder, held_out, find, **options))
