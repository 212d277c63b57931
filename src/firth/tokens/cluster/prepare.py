"""`prepare` by tasks: the stages, what is done between them, and the merge.

    read (T tasks) -> exact (R ranges) -> near (R ranges) -> tokenize (T tasks) -> merge

Tasks write to the work folder `.NAME.tasks` beside the output, which all machines see. Between stages this process
combines what must be known everywhere: one bit for each document. The merge appends the tokens of all tasks in their
order with the `ShardWriter` of one process, so the files, the journal and the checksums are the same.

After a crash of any machine, this one included, `--resume` finds the committed tasks and runs the others.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from firth.core.console import format_count, progress, say, warn
from firth.core.errors import UserError, did_you_mean, quote, reason, shorten
from firth.core.files import MANIFEST_FILE, open_in_place
from firth.text import Corpus, SalientSpanFinder, salient_finder_name
from firth.text.corpus import (
    READABLE_EXTENSIONS,
    READABLE_EXTENSIONS_TEXT,
    STDIN_PATH,
    CorpusFile,
    find_corpus_files,
)
from firth.text.hub import HUB_PREFIX
from firth.text.python_docs import PYDOCS_NAME
from firth.text.records import data_extension
from firth.tokens.cluster import plan
from firth.tokens.cluster.bucket_dedup import drop_similar
from firth.tokens.cluster.engine import Engine
from firth.tokens.cluster.plan import InputFile, Slice, plan_tasks
from firth.tokens.cluster.store import (
    ENTRY_SUFFIX,
    LoadedFile,
    Store,
    commit,
    is_url,
    open_filesystem,
    open_store,
    read_array,
    read_entry,
    storage_errors,
    upload_folder,
    write_folder,
)
from firth.tokens.cluster.tasks import (
    DROPPED,
    EXACT_DUPLICATES,
    READ_INDEX,
    TOKENIZER,
    ReadIndex,
    Spec,
    file_version,
    first_documents,
    read_tokenized,
    task_name,
    write_bits,
)
from firth.tokens.dedup import DEDUP_MODES
from firth.tokens.encode import DocumentEncoder
from firth.tokens.prepare import finish_shards, is_importable
from firth.tokens.shard_writer import SHARD_PARTS, different_settings_error, open_shard_writer
from firth.tokens.tokenizer import Tokenizer

PLAN = "plan"
INPUT_BYTES_PER_RANGE = 2**31  # bytes of input per hash range: bounds the memory of a range to about 1 GB
PAIRS_PER_DECISION = 2**22  # similar pairs that are decided at once
DOCUMENT_TIMEOUT_S = 60.0
MAX_SHOWN_SKIPPED = 10  # skipped documents that are printed


@dataclass
class Job:
    """The text, the work folder and the engine of one command."""

    files: list[InputFile]
    reading: dict[str, Any]
    store: Store
    engine: Engine
    document_timeout: float
    tasks: list[list[Slice]]

    @property
    def num_ranges(self) -> int:
        return max(1, math.ceil(sum(file.size for file in self.files) / INPUT_BYTES_PER_RANGE))

    def run_stage(
        self, kind: str, label: str, specs: Sequence[Spec], sizes: Sequence[int] = (), inputs: str = ""
    ) -> list[dict[str, Any]]:
        """Run the tasks of one stage, and return their entries in order. `inputs` is a hash of what they start from."""
        entries: list[dict[str, Any]] = [{}] * len(specs)
        common = {
            "kind": kind,
            "store": self.store.url,
            "plan": PLAN + ENTRY_SUFFIX,
            "inputs": inputs,
            "document_timeout": self.document_timeout,
        }
        numbered = [{**common, "task": task, **spec} for task, spec in enumerate(specs)]
        with progress(label, "bytes" if sizes else "ranges", sum(sizes) or len(specs)) as p:
            for done, (task, entry) in enumerate(self.engine.run(numbered), 1):
                entries[task] = entry
                note = f"{done:,}/{len(specs):,} tasks" if sizes else ""
                p.advance(sizes[task] if sizes else 1, note)
        return entries

    def text_specs(self) -> list[dict[str, Any]]:
        """Return what each task that reads text needs to know."""
        return [
            {
                "reading": self.reading,
                "slices": [
                    (f.path, f.size, f.version, f.is_user_named, part.start, part.stop)
                    for part in task
                    for f in [self.files[part.file]]
                ],
            }
            for task in self.tasks
        ]

    @property
    def task_sizes(self) -> list[int]:
        return [sum(part.stop - part.start for part in task) for task in self.tasks]


def prepare_by_tasks(
    texts: Sequence[str | Path],
    tokenizer: Tokenizer,
    output_dir: str | Path,
    engine: Engine,
    held_out_share: float,
    dedup: str = "exact",
    salient: SalientSpanFinder | None = None,
    resume: bool = False,
    document_timeout: float = DOCUMENT_TIMEOUT_S,
    sentence_language: str = "en",
    **reading: Any,
) -> dict[str, Any]:
    """Write the shards of files and folders, and return the metadata of their manifest.

    As `firth.tokens.prepare`, with the same bytes, by tasks that `engine` runs. Paths may be URLs of object storage.
    `sentence_language` is whose sentence rules apply; `language` among `reading` selects documents.
    """
    if dedup not in DEDUP_MODES:
        raise UserError(f"--dedup {shorten(dedup)} is unknown. {did_you_mean(dedup, DEDUP_MODES)}")
    if not is_importable(salient):
        raise UserError("Workers cannot import the function that finds salient spans: put it into a module.")
    header = {
        "tokenizer": tokenizer.fingerprint,
        "held_out_share": held_out_share,
        "dedup": dedup,
        "language": sentence_language,
        "salient": None if salient is None else salient_finder_name(salient),
    }
    with open_job(texts, output_dir, engine, header, resume, document_timeout, **reading) as job:
        encoder = DocumentEncoder(tokenizer, held_out_share, sentence_language, salient)
        with TemporaryDirectory(prefix="firth-tokenizer-") as folder:
            tokenizer.save(Path(folder) / "t")
            names = write_folder(job.store, TOKENIZER, Path(folder) / "t")
        entries = read_stage(job, dedup)
        corpus = summarize_reading(job, entries)
        corpus.check_has_documents()
        is_dropped = find_dropped(job, entries, dedup)
        options = {**header, "tokenizer_files": names}
        tokenized = tokenize_stage(job, entries, is_dropped, options)
        skipped = [skipped for entry in [*entries, *tokenized] for skipped in entry["skipped"]]
        report_skipped(skipped)
        path = staging_folder(output_dir)
        facts = merge(job, path, tokenized, entries, encoder, header, is_dropped, skipped, resume)
        if is_url(output_dir):
            say(f"copying the shards to {output_dir}; {path} stays on this machine")
            upload_folder(path, str(output_dir), last=MANIFEST_FILE)
        job.store.clear()
        say(corpus.describe())
        return facts


# --- the work folder ------------------------------------------------------------------------------------------------


def work_url(output_dir: str | Path) -> str:
    """Return the work folder of an output.

    >>> work_url("/data/shards"), work_url("s3://bucket/shards/")
    ('/data/.shards.tasks', 's3://bucket/.shards.tasks')
    """
    if is_url(output_dir):
        parent, _, name = str(output_dir).rstrip("/").rpartition("/")
        return f"{parent}/.{name}.tasks"
    path = Path(output_dir).absolute()
    return str(path.with_name(f".{path.name}.tasks"))


def staging_folder(output_dir: str | Path) -> Path:
    """Return where the shards are written: the output, or a folder of this machine before they are copied to a URL."""
    if not is_url(output_dir):
        return Path(output_dir)
    mark = blake2b(str(output_dir).encode(), digest_size=6).hexdigest()
    return Path(f"{Path(str(output_dir)).name}-{mark}")


@contextmanager
def open_job(
    texts: Sequence[str | Path],
    output_dir: str | Path,
    engine: Engine,
    header: Mapping[str, Any],
    resume: bool,
    document_timeout: float,
    **reading: Any,
) -> Iterator[Job]:
    """Plan the tasks; with `resume` the plan must be the one of the work folder. Say how to resume after an error."""
    files = find_input_files(texts)
    corpus = Corpus([], **reading)  # checks the options
    tasks = plan_tasks(files, corpus.documents, corpus.encoding, plan.TASK_BYTES)
    with lock_output(staging_folder(output_dir)), storage_errors(output_dir):
        job = Job(files, reading, open_store(work_url(output_dir)), engine, document_timeout, tasks)
        record_plan(job, output_dir, header, resume)
        size = sum(file.size for file in files)
        say(f"{format_count(len(files), 'file')}, {size / 1e6:,.1f} MB, in {format_count(len(tasks), 'task')}")
        try:
            yield job
        except BaseException:
            say(f"{output_dir}: finished tasks are saved; --resume continues from there.")
            raise


def record_plan(job: Job, output_dir: str | Path, header: Mapping[str, Any], resume: bool) -> None:
    """Write the plan, or compare it with that of the work folder."""
    current = {
        **header,
        "reading": job.reading,
        "files": job.files,
        "tasks": job.tasks,
        "ranges": job.num_ranges,
    }
    current = json.loads(json.dumps(current))
    if not resume or not job.store.has(PLAN + ENTRY_SUFFIX):
        job.store.clear()
        job.store.write(PLAN + ENTRY_SUFFIX, json.dumps(current).encode())
        return
    saved = read_entry(job.store, PLAN)
    if saved.get("files") != current["files"]:
        raise UserError("Cannot resume: the files of the text have changed. Start anew with --overwrite.")
    if saved != current:
        raise different_settings_error(Path(str(output_dir)), saved, current)


@contextmanager
def lock_output(path: Path) -> Iterator[None]:
    """Keep a second process of this machine from preparing the same output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f".{path.name}.lock")
    while True:
        with open_in_place(file) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{path} is being prepared by another process.") from None
            if os.fstat(lock.fileno()).st_nlink == 0:
                continue  # the process before has removed it since: another one may hold a new file of this name
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return


def find_input_files(texts: Sequence[str | Path]) -> list[InputFile]:
    """Return the files that `Corpus` would read, in its order; URLs may name objects or prefixes."""
    found: list[InputFile] = []
    for path in texts:
        if path in (STDIN_PATH, PYDOCS_NAME) or str(path).startswith(HUB_PREFIX):
            raise UserError(f"{path}: --engine ray reads files, folders and object storage. Leave out --engine.")
        if is_url(path):
            found += find_objects(str(path))
        else:
            sources = find_corpus_files(Path(path).absolute())
            found += [InputFile(str(s.path), *file_version(str(s.path)), s.is_user_named) for s in sources]
    return found


def find_objects(url: str) -> list[InputFile]:
    """Return the readable objects at a URL or under it, sorted by name."""
    filesystem, path = open_filesystem(url)
    scheme = url.partition("://")[0]
    try:
        names = [path] if filesystem.isfile(path) else sorted(filesystem.find(path))
    except Exception as e:  # each store has errors of its own
        raise UserError(f"{url}: cannot be read ({reason(e)}).") from None
    readable = [name for name in names if data_extension(Path(name)) in READABLE_EXTENSIONS]
    if not readable:
        raise UserError(f"{url}: nothing to read. Put {READABLE_EXTENSIONS_TEXT} files there.")
    if len(readable) < len(names):
        warn(f"{url}: {len(names) - len(readable):,} left out that are not {READABLE_EXTENSIONS_TEXT}.")
    urls = [f"{scheme}://{name}" for name in readable]
    with storage_errors(url):
        return [InputFile(found, *file_version(found), names == [path]) for found in urls]


# --- stages ---------------------------------------------------------------------------------------------------------


def read_stage(job: Job, dedup: str) -> list[dict[str, Any]]:
    """Read the text once, and write for the ranges where the arrays of all tasks are."""
    specs = [{**spec, "dedup": dedup, "num_ranges": job.num_ranges} for spec in job.text_specs()]
    entries = job.run_stage("read", "reading", specs, job.task_sizes)
    commit(job.store, READ_INDEX, ReadIndex.make_arrays(entries))
    return entries


def summarize_reading(job: Job, entries: Sequence[Mapping[str, Any]]) -> Corpus:
    """Return a corpus with the counts of all tasks, which describes them."""
    corpus = Corpus([], **job.reading)
    corpus.paths = [file.path for file in job.files]
    corpus.files = [CorpusFile(Path(file.path), file.is_user_named, file.path) for file in job.files]
    for entry in entries:
        corpus.counts.update(entry["counts"])
        corpus.cleaner.dropped_by_reason.update(entry["dropped_by_reason"])
        corpus.cleaner.change_counts.update(entry["change_counts"])
    corpus.counts += Counter()
    return corpus


def find_dropped(job: Job, entries: Sequence[Mapping[str, Any]], dedup: str) -> np.ndarray:
    """Return which documents are duplicates, (D,)."""
    firsts = first_documents([entry["documents"] for entry in entries])
    is_dropped = np.zeros(int(firsts[-1]), bool)
    specs: list[dict[str, Any]] = [{"num_documents": len(is_dropped)}] * job.num_ranges
    inputs = blake2b("".join(entry["sha256"] for entry in entries).encode()).hexdigest()
    if dedup != "none":
        exact = job.run_stage("exact", "finding duplicates", specs, inputs=inputs)
        for task, entry in enumerate(exact):
            is_dropped[read_array(job.store, task_name("exact", task), entry, "documents")] = True
    if dedup == "near":
        bits = write_bits(job.store, EXACT_DUPLICATES, is_dropped)
        specs = [{**spec, "bits": bits} for spec in specs]
        near = job.run_stage("near", "comparing near duplicates", specs, inputs=inputs)
        drop_similar(iter_pairs(job.store, near, len(job.tasks)), is_dropped)
    return is_dropped


def iter_pairs(store: Store, entries: Sequence[Mapping[str, Any]], num_tasks: int) -> Iterator[np.ndarray]:
    """Yield the similar pairs of all ranges in the order of their tasks, those of some tasks at a time."""
    names = [task_name("near", task) for task in range(len(entries))]
    bounds_RT = np.stack([read_array(store, name, entry, "bounds") for name, entry in zip(names, entries, strict=True)])
    num_pairs_T = np.diff(bounds_RT, axis=1).sum(axis=0)
    first = 0
    for task in range(1, num_tasks + 1):
        if task == num_tasks or num_pairs_T[first : task + 1].sum() > PAIRS_PER_DECISION:
            yield np.concatenate(
                [
                    read_array(store, name, entry, "pairs", int(bounds[first]), int(bounds[task]))
                    for name, entry, bounds in zip(names, entries, bounds_RT, strict=True)
                ]
            )
            first = task


def tokenize_stage(
    job: Job, entries: Sequence[Mapping[str, Any]], is_dropped: np.ndarray, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    firsts = first_documents([entry["documents"] for entry in entries])
    bits = write_bits(job.store, DROPPED, is_dropped)
    specs = [
        {
            **spec,
            **options,
            "bits": bits,
            "first_document": int(first),
            "num_documents": entry["documents"],
            "digest": entry["digest"],
            "skip": entry["skip"],
        }
        for spec, entry, first in zip(job.text_specs(), entries, firsts[:-1], strict=True)
    ]
    return job.run_stage("tokenize", "tokenizing", specs, job.task_sizes, inputs=bits)


def merge(
    job: Job,
    path: Path,
    tokenized: Sequence[Mapping[str, Any]],
    entries: Sequence[Mapping[str, Any]],
    encoder: DocumentEncoder,
    header: dict[str, Any],
    is_dropped: np.ndarray,
    skipped: list[dict[str, Any]],
    resume: bool,
) -> dict[str, Any]:
    """Append the tokens of all tasks in their order, and finish the shards."""
    firsts = first_documents([entry["documents"] for entry in entries])
    planned = {**header, "tasks": len(tokenized)}
    with open_shard_writer(path, planned, encoder.find_salient is not None, resume) as writer:
        encoder.tokenizer.save(writer.folder / "tokenizer")
        first = writer.last_entry.get("merged_tasks", 0)
        with progress("merging", "tasks", len(tokenized), first) as p:
            for task in range(first, len(tokenized)):
                name, entry = task_name("tokenize", task), tokenized[task]
                loaded = LoadedFile(job.store, name, entry["sha256"])
                parts = [read_tokenized(loaded, name, entry, part) for part in SHARD_PARTS]
                writer.append_chunk(parts, documents=int(firsts[task + 1]), merged_tasks=task + 1)
                p.advance()
        source_hash = blake2b(digest_size=16)
        for task, entry in enumerate(entries):
            source_hash.update(read_array(job.store, task_name("read", task), entry, "digest").tobytes())
        source = {"documents": int(firsts[-1]), "digest": source_hash.hexdigest()}
        more = {"skipped": skipped} if skipped else {}
        return finish_shards(path, writer, encoder, header, int(is_dropped.sum()), source, more)


def report_skipped(skipped: Sequence[Mapping[str, Any]]) -> None:
    """Say which documents were skipped."""
    for document in skipped[:MAX_SHOWN_SKIPPED]:
        warn(f"skipped {quote(document['document'])}: {document['reason']}")
    if len(skipped) > MAX_SHOWN_SKIPPED:
        warn(f"{len(skipped) - MAX_SHOWN_SKIPPED:,} more skipped documents: see `skipped` in {MANIFEST_FILE}.")
