"""Documents to token shards on disk: in parallel, in bounded memory, resumable.

Documents flow through four stages, a chunk at a time:

1. `DocumentReader` reads the source, drops exact duplicates by a fingerprint, and hashes all texts in order. On resume
   the hash proves that the source has not changed.
2. Workers tokenize chunks (`workers.py`, `encode.py`). With `dedup="near"` they first compute MinHash signatures, and
   the parent decides in the order of the source which documents are new.
3. `ShardWriter` appends the arrays to flat files and then a line to a journal (`shard_writer.py`).
4. `finish_shards` writes the manifest and renames the folder.

A run that is killed at any moment resumes after the last chunk of the journal and writes the same bytes. The number of
workers and the memory limit change no byte either.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import format_count, progress, say, warn
from firth.core.errors import UserError, did_you_mean, shorten
from firth.core.files import atomic_folder
from firth.core.memory import process_memory_bytes
from firth.text import (
    HELD_OUT_FRACTION,
    Document,
    SalientSpanFinder,
    load_salient_finder,
    salient_finder_name,
    text_fingerprint,
)
from firth.text.corpus import corpus_bytes_read
from firth.tokens.dedup import (
    DEDUP_MODES,
    DuplicateFilter,
    max_near_texts,
    near_dedup_memory_bytes,
    open_duplicate_filter,
)
from firth.tokens.encode import DocumentEncoder, join_document_sides
from firth.tokens.shard_writer import READ_BLOCK_BYTES, ShardPartWriter, ShardWriter, open_shard_writer, read_blocks
from firth.tokens.tokenizer import Tokenizer
from firth.tokens.word_cache import MAX_WORD_CACHE_BYTES
from firth.tokens.workers import EncodeChunksFn, encode_in_process, worker_pool

NEAR_TEXTS_KEY = "near_texts"  # in the journal: number of texts that the near-duplicate index holds
CHUNK_DOCUMENTS = 1000  # documents per chunk, at most
CHUNK_CHARACTERS = 500_000  # characters per chunk; bounds the memory of its encodings
MIN_PARALLEL_BYTES = 2_000_000  # bytes of text: less is tokenized before workers have started

# Memory, in bytes, measured with the published tokenizers.
WORKER_BYTES = 64 * 2**20  # of a worker without its word cache
BYTES_PER_CHUNK_CHARACTER = 150  # text, encodings and results of all chunks in flight
MAX_HELD_OUT_FACTOR = 3.0  # times the wanted share; more is held out of a text of few documents by chance alone
MAX_BYTES_PER_TOKEN = 100  # of a whole text: tokenizers give 1 to 10, words up to 30
MIN_CHUNK_CHARACTERS = 50_000  # characters: a smaller chunk is an error


def prepare(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: str | Path,
    held_out_share: float = HELD_OUT_FRACTION,
    dedup: str = "exact",
    total_bytes: float | None = None,
    language: str = "en",
    salient: SalientSpanFinder | None = None,
    workers: int = 1,
    max_memory: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Write the shards of a stream of documents, and return the metadata of their manifest.

    - Tokens are text without special tokens.
    - `dedup`: "exact" drops repeated texts, "near" also near duplicates, "none" nothing.
    - `total_bytes`: size of the source, for the progress line.
    - `language`: whose sentence rules apply.
    - `salient`: a function that finds salient spans, as (start, end) in characters. None: no salient bits.
    - `workers`: number of processes; 1: this process alone, 0: one per core.
    - `max_memory`: limit in bytes for all processes together; None: no limit. It changes the shards only where the
      near-duplicate index cannot hold all texts.
    - `resume`: continue in `.NAME.part`, the folder of unfinished shards. The size of the near-duplicate index stays
      the one of the first run.
    """
    if dedup not in DEDUP_MODES:
        raise UserError(f"--dedup {shorten(dedup)} is unknown. {did_you_mean(dedup, DEDUP_MODES)}")
    path, encoder = Path(folder), DocumentEncoder(tokenizer, held_out_share, language, salient)
    resources = plan_resources(workers, max_memory, total_bytes, encoder)
    header = {
        "tokenizer": tokenizer.fingerprint,
        "held_out_share": held_out_share,
        "dedup": dedup,
        "language": language,
        "salient": None if salient is None else salient_finder_name(salient),
    }
    planned = header | ({NEAR_TEXTS_KEY: max_near_texts(resources.dedup_memory_bytes)} if dedup == "near" else {})
    with open_shard_writer(path, planned, salient is not None, resume, fixed_keys=[NEAR_TEXTS_KEY]) as writer:
        near_texts = writer.header.get(NEAR_TEXTS_KEY, 0)
        if near_texts != planned.get(NEAR_TEXTS_KEY, 0):
            say(f"--dedup near continues as it began: it compares each text with the last {near_texts:,}.")
            resources = plan_resources(workers, max_memory, total_bytes, encoder, near_dedup_memory_bytes(near_texts))
        tokenizer.save(writer.folder / "tokenizer")
        with open_duplicate_filter(path, dedup, resources.dedup_memory_bytes, near_texts) as duplicate_filter:
            reader = DocumentReader(documents, duplicate_filter)
            with report_if_interrupted(path, writer):
                write_missing_chunks(writer, reader, encoder, resources, total_bytes)
        near = duplicate_filter.near_dedup
        evicted = {NEAR_TEXTS_KEY: near.max_texts} if near is not None and near.num_evicted else {}
        num_duplicates = reader.num_exact_duplicates + reader.num_near_duplicates
        return finish_shards(path, writer, encoder, header, num_duplicates, reader.source_facts(), evicted)


def finish_shards(
    path: Path,
    writer: ShardWriter,
    encoder: DocumentEncoder,
    header: dict[str, Any],
    num_duplicates: int,
    source: dict[str, Any],
    more_facts: dict[str, Any],
) -> dict[str, Any]:
    """Check both parts, write headers and manifest, and rename the folder."""
    check_parts(writer, encoder)
    train, held_out = writer.part_writers
    facts: dict[str, Any] = {}
    with atomic_folder(path, "shards", writer.folder, metadata=facts):
        for part in writer.part_writers:
            part.finish()
            part.close()
        facts |= header
        facts |= {
            "tokenizer_kind": encoder.tokenizer.kind,
            "vocab_size": encoder.tokenizer.vocab.size,
            "documents": train.num_documents + held_out.num_documents,
            "tokens": train.num_tokens + held_out.num_tokens,
            "duplicates": num_duplicates,
            "text_bytes": train.text_bytes + held_out.text_bytes,
            "unigram_entropy": entropy_nats(count_token_ids(train, encoder)),
            "train": train.manifest_facts(),
            "held_out": held_out.manifest_facts(),
            "source": source,
            **more_facts,
        }
    return facts


def check_parts(writer: ShardWriter, encoder: DocumentEncoder) -> None:
    """Raise if there is nothing to train on; warn if nothing is held out, or far more than was asked for."""
    train, held_out = writer.part_writers
    if not train.num_documents:
        raise no_training_documents_error(held_out.num_documents)
    check_bytes_per_token(train, encoder.tokenizer)
    if encoder.held_out_share and not held_out.num_documents:
        warn(
            f"Nothing is held out: the text has {format_count(train.num_documents, 'document')}, and each is held "
            f"out with a probability of {encoder.held_out_share:.0%}. There will be no held-out loss. Separate "
            "documents by blank lines (--documents blank-line), or give more of them."
        )
    found = held_out.num_tokens / max(held_out.num_tokens + train.num_tokens, 1)
    if found > MAX_HELD_OUT_FACTOR * encoder.held_out_share:
        warn(
            f"{found:.0%} of the tokens are held out, and {encoder.held_out_share:.0%} of the documents were to be: "
            "there are few of them. Separate documents by blank lines (--documents blank-line), give more of them, or "
            "lower --held-out."
        )


def write_missing_chunks(
    writer: ShardWriter,
    reader: DocumentReader,
    encoder: DocumentEncoder,
    resources: ResourcePlan,
    total_bytes: float | None,
) -> None:
    """Tokenize the documents that are not in the shards yet, chunk by chunk."""
    with open_chunk_encoder(
        replace(encoder, cache_bytes=resources.word_cache_bytes), writer.folder / "tokenizer", resources.num_workers
    ) as encode_chunks:
        if writer.last_entry:
            reader.skip_to_entry(writer.last_entry, encode_chunks, resources.chunk_characters)
        select = reader.duplicate_filter.select_new if reader.duplicate_filter.near_dedup else None
        with chunk_progress("tokenizing", reader, total_bytes) as advance:
            for chunk, result in encode_chunks(reader.iter_chunks(resources.chunk_characters), select):
                reader.num_near_duplicates += result.num_dropped
                writer.append_chunk(result.parts, **chunk.journal_facts(reader.num_near_duplicates))
                advance(chunk)


@contextmanager
def chunk_progress(
    label: str, reader: DocumentReader, total_bytes: float | None
) -> Iterator[Callable[[DocumentChunk], None]]:
    """Show progress in bytes of the source if they are known, else in documents; yield a function that advances it."""
    position = corpus_bytes_read(reader.documents)
    in_bytes = bool(total_bytes) and position is not None
    # Before the first document the position may be that of an earlier pass over the source.
    done = position if in_bytes and reader.num_read else reader.num_read
    with progress(label, "bytes" if in_bytes else "documents", total_bytes if in_bytes else None, done or 0) as p:
        text_bytes = 0

        def advance(chunk: DocumentChunk) -> None:
            nonlocal text_bytes
            text_bytes += chunk.text_bytes
            seconds = max(time.monotonic() - p.start_s, 1e-6)
            reached = chunk.source_position_bytes if in_bytes else chunk.num_read
            p.advance((reached or 0) - p.done, note=f"{text_bytes / 1e6 / seconds:.2f} MB/s")

        yield advance


@contextmanager
def report_if_interrupted(path: Path, writer: ShardWriter) -> Iterator[None]:
    """Say how to resume when an error or Ctrl-C stops the work."""
    try:
        yield
    except BaseException:
        if writer.last_entry:
            done = format_count(writer.last_entry["documents"], "document is", "documents are")
            say(f"{path}: {done} done and saved; --resume continues from there.")
        raise


def count_token_ids(part_writer: ShardPartWriter, encoder: DocumentEncoder) -> np.ndarray:
    """Number of occurrences of each token id in a part, (V,)."""
    assert READ_BLOCK_BYTES % 4 == 0, "a block ends with a token"
    counts_V = np.zeros(encoder.tokenizer.vocab.size, dtype=np.int64)
    for block in read_blocks(part_writer.folder / "tokens.bin"):
        counts_V += np.bincount(np.frombuffer(block, encoder.token_dtype), minlength=len(counts_V))
    return counts_V


def entropy_nats(counts: np.ndarray) -> float:
    """Entropy in nats of a distribution given as counts: the loss of a model that knows only token frequencies."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def check_bytes_per_token(train: ShardPartWriter, tokenizer: Tokenizer) -> None:
    """Raise if the text became almost no tokens: a vocabulary of words and pieces cannot split it without spaces."""
    bytes_per_token = train.text_bytes / max(train.num_tokens, 1)
    if bytes_per_token > MAX_BYTES_PER_TOKEN:
        raise UserError(
            f"{train.text_bytes:,} bytes of text gave only {format_count(train.num_tokens, 'token')}: there are hardly "
            f"any spaces, and a {tokenizer.kind} tokenizer makes each long run of letters one unknown token. Train "
            "another kind with `firth tokenizer TEXT --kind byte-bpe --output-dir tok`, and start again with "
            "--tokenizer tok --overwrite."
        )


def no_training_documents_error(num_held_out: int) -> UserError:
    if num_held_out:
        return UserError(
            f"All documents ({num_held_out:,}) fell into the held-out part and none is left for training. Separate "
            "documents by blank lines (--documents blank-line), give more of them, or hold out none with --held-out 0."
        )
    return UserError("There is no text: the source has no documents, or only empty ones.")


# --- reading ------------------------------------------------------------------------------------------------------


class DocumentChunk(NamedTuple):
    """Documents that are tokenized together, and the state of the source after them."""

    documents: list[Document]
    text_bytes: int
    num_read: int  # documents read so far
    num_exact_duplicates: int  # exact duplicates among them
    source_digest: str  # hash of all texts so far
    source_position_bytes: int | None  # bytes of the source read so far; None if unknown

    def journal_facts(self, num_near_duplicates: int) -> dict[str, Any]:
        """Return the journal's entry for this chunk."""
        return {
            "documents": self.num_read,
            "duplicates": self.num_exact_duplicates + num_near_duplicates,
            "digest": self.source_digest,
        }


class DocumentReader:
    """Reads a source once: yields new documents, counts duplicates, hashes all texts."""

    def __init__(self, documents: Iterable[Document], duplicate_filter: DuplicateFilter) -> None:
        self.documents, self.duplicate_filter = documents, duplicate_filter
        self.stream = iter(documents)
        self.num_read = self.num_exact_duplicates = self.num_near_duplicates = 0
        self.source_hash = blake2b(digest_size=16)

    def skip_to_entry(
        self, journal_entry: dict[str, Any], encode_chunks: EncodeChunksFn, chunk_characters: int
    ) -> None:
        """Read up to the end of a journal entry, and add these documents to the duplicate filter."""
        chunks = self.iter_chunks(chunk_characters, journal_entry["documents"])
        with progress("skipping finished documents", "documents", journal_entry["documents"]) as p:
            if self.duplicate_filter.near_dedup:
                for chunk, _ in encode_chunks(chunks, self.duplicate_filter.record_only):
                    p.advance(chunk.num_read - p.done)
                self.num_near_duplicates = self.duplicate_filter.near_dedup.num_duplicates
            else:
                for chunk in chunks:
                    p.advance(chunk.num_read - p.done)
        if self.source_facts() != {"documents": journal_entry["documents"], "digest": journal_entry["digest"]}:
            raise UserError(
                "Cannot resume: the first documents of the text differ from those that were prepared. "
                "Start anew with --overwrite."
            )

    def iter_chunks(self, chunk_characters: int, stop_after_documents: int | None = None) -> Iterator[DocumentChunk]:
        """Yield new documents in chunks of bounded size, until `stop_after_documents` have been read (None: all)."""
        batch: list[Document] = []
        length = 0
        while self.num_read != stop_after_documents and (document := next(self.stream, None)) is not None:
            if not self._is_new(document):
                continue
            batch.append(document)
            length += sum(map(len, document.texts))
            if len(batch) == CHUNK_DOCUMENTS or length >= chunk_characters:
                yield self._make_chunk(batch)
                batch, length = [], 0
        if batch:
            yield self._make_chunk(batch)

    def _is_new(self, document: Document) -> bool:
        fingerprint = text_fingerprint(join_document_sides(document))
        self.num_read += 1
        self.source_hash.update(source_hash_input(document, fingerprint))
        is_new = self.duplicate_filter.is_new(fingerprint)
        self.num_exact_duplicates += not is_new
        return is_new

    def _make_chunk(self, batch: list[Document]) -> DocumentChunk:
        text_bytes = sum(len(side.encode()) for document in batch for side in document.texts)
        return DocumentChunk(
            batch,
            text_bytes,
            self.num_read,
            self.num_exact_duplicates,
            self.source_hash.hexdigest(),
            corpus_bytes_read(self.documents),
        )

    def source_facts(self) -> dict[str, Any]:
        """Return the number and the hash of all documents read, in their order."""
        return {"documents": self.num_read, "digest": self.source_hash.hexdigest()}


def source_hash_input(document: Document, fingerprint: bytes) -> bytes:
    """Return the bytes of a document that the hash of a source is computed from."""
    return fingerprint if document.word_starts is None else fingerprint + repr(document.word_starts).encode()


def digest_documents(documents: Iterable[Document], total_bytes: float | None = None) -> dict[str, Any]:
    """Return the manifest's `source` of a text by reading all of it, without writing shards."""
    reader = DocumentReader(documents, DuplicateFilter())
    with chunk_progress("comparing the text", reader, total_bytes) as advance:
        for chunk in reader.iter_chunks(CHUNK_CHARACTERS):
            advance(chunk)
    return reader.source_facts()


# --- processes ----------------------------------------------------------------------------------------------------


class ResourcePlan(NamedTuple):
    """Number of processes and how memory is divided."""

    num_workers: int
    chunk_characters: int
    dedup_memory_bytes: int  # of the duplicate filter
    word_cache_bytes: int = MAX_WORD_CACHE_BYTES  # of each process


def plan_resources(
    num_workers: int,
    max_memory_bytes: int | None,
    total_bytes: float | None,
    encoder: DocumentEncoder,
    min_dedup_memory_bytes: int = 0,
) -> ResourcePlan:
    """Divide memory among processes; use fewer than `num_workers` if memory or text is too small for them.

    The duplicate filter gets `min_dedup_memory_bytes` or more.
    """
    if num_workers < 0:
        raise UserError(f"--workers is {num_workers}, and must be at least 1 (or 0, for as many as there are cores).")
    num_workers = num_workers or count_cpu_cores()
    if total_bytes is not None and total_bytes < MIN_PARALLEL_BYTES:
        num_workers = 1
    if num_workers > 1 and not is_importable(encoder.find_salient):
        say("Workers cannot import the function that finds salient spans: this process works alone.")
        num_workers = 1
    if max_memory_bytes is None:
        return ResourcePlan(num_workers, CHUNK_CHARACTERS, max(2**28, min_dedup_memory_bytes))
    release_freed_memory()
    dedup_bytes = max(max_memory_bytes // 16, min_dedup_memory_bytes)
    free = max_memory_bytes - dedup_bytes - process_memory_bytes()
    min_bytes = WORKER_BYTES + MIN_CHUNK_CHARACTERS * BYTES_PER_CHUNK_CHARACTER * 4 // 3
    if num_workers > 1 and free // num_workers < min_bytes:
        fewer = max(1, free // min_bytes)
        say(f"--max-memory is enough for {fewer} of {num_workers} workers.")
        num_workers = fewer
    each = free // num_workers - (WORKER_BYTES if num_workers > 1 else 0)
    cache_bytes = min(max(each, 0) // 4, MAX_WORD_CACHE_BYTES)
    characters = (each - cache_bytes) // BYTES_PER_CHUNK_CHARACTER
    if characters < MIN_CHUNK_CHARACTERS:
        needed = max_memory_bytes + (MIN_CHUNK_CHARACTERS - characters) * BYTES_PER_CHUNK_CHARACTER * 4 // 3 * 16 // 15
        raise UserError(f"--max-memory is too small: at least {needed / 1e6:,.0f}MB are needed.")
    return ResourcePlan(num_workers, min(characters, CHUNK_CHARACTERS), dedup_bytes, cache_bytes)


def count_cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_freed_memory() -> None:
    """Return freed memory to the system at once: fragmentation would grow by some KB with each chunk.

    Sets glibc's M_MMAP_THRESHOLD; does nothing with another C library.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "mallopt"):
        library.mallopt(-3, 2**16)


def is_importable(find_salient: SalientSpanFinder | None) -> bool:
    """Whether another process can import a function by its name."""
    try:
        return find_salient is None or load_salient_finder(salient_finder_name(find_salient)) is find_salient
    except UserError:
        return False


@contextmanager
def open_chunk_encoder(encoder: DocumentEncoder, tokenizer_folder: Path, num_workers: int) -> Iterator[EncodeChunksFn]:
    """Yield a function that tokenizes chunks in order, with workers or in this process."""
    if num_workers > 1:
        with worker_pool(encoder, tokenizer_folder, num_workers) as encode_chunks:
            yield encode_chunks
    else:
        yield encode_in_process(encoder)
