"""Documents to token shards on disk: by many processes, in bounded memory, and resumed where it was stopped."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import format_count, progress, say
from firth.core.errors import UserError, did_you_mean
from firth.core.files import atomic_folder
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

NEAR_TEXTS_KEY = "near_texts"  # in the journal: among how many texts near duplicates are looked for
CHUNK_DOCUMENTS = 1000
CHUNK_CHARACTERS = 500_000  # bounds the memory that the encodings of a chunk take
MIN_PARALLEL_BYTES = 2_000_000  # bytes of text: less is done before other processes have started

# What things take in memory, in bytes, as measured with the published tokenizers.
WORKER_BYTES = 64 * 2**20  # beside the words that it remembers
BYTES_PER_CHUNK_CHARACTER = 150  # of a chunk: its text, encodings and results, on their way included
MIN_CHUNK_CHARACTERS = 50_000


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
    """Write the shards of a stream of documents, and return what the manifest says of them.

    Tokens are plain text: no special tokens. `dedup` drops and counts documents that were there before: "exact" the
    same text, "near" also nearly the same, "none" nothing. `total_bytes` is the size of the source, for the
    progress line; a corpus tells how much of it has been read. `language` chooses the sentence rules. `salient` finds
    the spans of a text that are marked as salient, as (start, end) in characters; without it none are.

    `num_workers` is the number of processes, 1 being this one alone and 0 as many as there are cores. `max_memory_bytes`
    bounds the bytes that all of them take together. Neither changes a byte of the shards, but for near duplicates of
    texts that memory has no room for. Until they are whole they grow in `.NAME.part`, from which `resume` goes on; how
    many texts memory has room for stays as it was begun with.
    """
    if dedup not in DEDUP_MODES:
        raise UserError(f"--dedup {dedup}: no such way. {did_you_mean(dedup, DEDUP_MODES)}")
    path, way = Path(folder), DocumentEncoder(tokenizer, held_out_share, language, salient)
    scale = plan_resources(workers, max_memory, total_bytes, way)
    header = {
        "tokenizer": tokenizer.fingerprint,
        "held_out_share": held_out_share,
        "dedup": dedup,
        "language": language,
        "salient": None if salient is None else salient_finder_name(salient),
    }
    begin = header | ({NEAR_TEXTS_KEY: max_near_texts(scale.dedup_memory_bytes)} if dedup == "near" else {})
    with open_shard_writer(path, begin, salient is not None, resume, fixed_keys=[NEAR_TEXTS_KEY]) as shards:
        near_texts = shards.header.get(NEAR_TEXTS_KEY, 0)
        if near_texts != begin.get(NEAR_TEXTS_KEY, 0):
            say(f"--dedup near goes on as it was begun: each text is compared with the last {near_texts:,}.")
            scale = plan_resources(workers, max_memory, total_bytes, way, near_dedup_memory_bytes(near_texts))
        tokenizer.save(shards.folder / "tokenizer")
        with open_duplicate_filter(path, dedup, scale.dedup_memory_bytes, near_texts) as told:
            reader = DocumentReader(documents, told)
            with report_if_interrupted(path, shards):
                write_missing_chunks(shards, reader, way, scale, total_bytes)
        train, aside = shards.part_writers
        if not train.num_documents:
            raise no_training_documents_error(aside.num_documents)
        return finish_shards(path, shards, way, header, reader)


def finish_shards(
    path: Path, writer: ShardWriter, encoder: DocumentEncoder, header: dict[str, Any], reader: DocumentReader
) -> dict[str, Any]:
    """Write what is known only now, and give the folder its name."""
    train, aside = writer.part_writers
    facts: dict[str, Any] = {}
    near = reader.duplicate_filter.near_dedup
    with atomic_folder(path, partial_folder=writer.folder, kind="shards", metadata=facts):
        for part in writer.part_writers:
            part.finish()
            part.close()
        facts |= header
        facts |= {
            "tokenizer_kind": encoder.tokenizer.kind,
            "vocab_size": encoder.tokenizer.vocab.size,
            "documents": train.num_documents + aside.num_documents,
            "tokens": train.num_tokens + aside.num_tokens,
            "duplicates": reader.num_exact_duplicates + reader.num_near_duplicates,
            "text_bytes": train.text_bytes + aside.text_bytes,
            "unigram_entropy": entropy_nats(count_token_ids(train, encoder)),
            "train": train.manifest_facts(),
            "held_out": aside.manifest_facts(),
            "source": reader.source_facts(),
        }
        if near is not None and near.num_evicted:
            facts[NEAR_TEXTS_KEY] = near.max_texts
    return facts


def write_missing_chunks(
    writer: ShardWriter,
    reader: DocumentReader,
    encoder: DocumentEncoder,
    resources: ResourcePlan,
    total_bytes: float | None,
) -> None:
    """Tokenise what is not in the shards yet, chunk by chunk."""
    with open_chunk_encoder(
        replace(encoder, cache_bytes=resources.word_cache_bytes), writer.folder / "tokenizer", resources.num_workers
    ) as tokenise:
        if writer.last_entry:
            reader.skip_to_entry(writer.last_entry, tokenise, resources.chunk_characters)
        decide = reader.duplicate_filter.select_new if reader.duplicate_filter.near_dedup else None
        with chunk_progress("tokenising", reader, total_bytes) as advance:
            for chunk, result in tokenise(reader.iter_chunks(resources.chunk_characters), decide):
                reader.num_near_duplicates += result.num_dropped
                writer.append_chunk(result.parts, **chunk.journal_facts(reader.num_near_duplicates))
                advance(chunk)


@contextmanager
def chunk_progress(
    label: str, reader: DocumentReader, total_bytes: float | None
) -> Iterator[Callable[[DocumentChunk], None]]:
    """A progress line that a chunk advances: by the share of the source that was read, where that can be told."""
    reached = corpus_bytes_read(reader.documents)
    known = bool(total_bytes) and reached is not None
    before = (
        reached if known and reader.num_read else reader.num_read
    )  # an earlier pass may have left a position at the end
    with progress(label, "bytes" if known else "documents", total_bytes if known else None, before or 0) as p:
        text_bytes = 0

        def advance(chunk: DocumentChunk) -> None:
            nonlocal text_bytes
            text_bytes += chunk.text_bytes
            seconds = max(time.monotonic() - p.start_s, 1e-6)
            here = chunk.source_position_bytes if known else chunk.num_read
            p.advance((here or 0) - p.done, note=f"{text_bytes / 1e6 / seconds:.2f} MB/s")

        yield advance


@contextmanager
def report_if_interrupted(path: Path, writer: ShardWriter) -> Iterator[None]:
    """Say where --resume will go on, when anything stops the work."""
    try:
        yield
    except BaseException:
        if writer.last_entry:
            done = format_count(writer.last_entry["documents"], "document is", "documents are")
            say(f"{path}: {done} done and kept; --resume goes on from there.")
        raise


def count_token_ids(part_writer: ShardPartWriter, encoder: DocumentEncoder) -> np.ndarray:
    """How often each token is in a part."""
    assert READ_BLOCK_BYTES % 4 == 0, "a block ends with a token"
    counts_V = np.zeros(encoder.tokenizer.vocab.size, dtype=np.int64)
    for block in read_blocks(part_writer.folder / "tokens.bin"):
        counts_V += np.bincount(np.frombuffer(block, encoder.token_dtype), minlength=len(counts_V))
    return counts_V


def entropy_nats(counts: np.ndarray) -> float:
    """Of a distribution given as counts, in nats: the loss of a model that knows only how frequent each token is."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def no_training_documents_error(num_held_out: int) -> UserError:
    if num_held_out:
        return UserError(
            f"All documents ({num_held_out:,}) fell into the held-out part and none is left for training. "
            "Give more documents, or hold out none."
        )
    return UserError("There is no text: the source has no documents, or only empty ones.")


# --- reading ------------------------------------------------------------------------------------------------------


class DocumentChunk(NamedTuple):
    """Some documents, and how far the source was read with them."""

    documents: list[Document]
    text_bytes: int  # of their text
    num_read: int  # documents of the source up to here
    num_exact_duplicates: int  # of them, those that are left out because the same text was there before
    source_digest: str  # stands for all texts up to here
    source_position_bytes: int | None  # bytes of the source up to here, where that can be told

    def journal_facts(self, num_near_duplicates: int) -> dict[str, Any]:
        """What the journal says when it is in the shards; `num_near_duplicates` documents up to here are left out as well."""
        return {
            "documents": self.num_read,
            "duplicates": self.num_exact_duplicates + num_near_duplicates,
            "digest": self.source_digest,
        }


class DocumentReader:
    """Goes through a source once: documents that are new, and how far it is."""

    def __init__(self, documents: Iterable[Document], duplicate_filter: DuplicateFilter) -> None:
        self.documents, self.duplicate_filter = documents, duplicate_filter
        self.stream = iter(documents)
        self.num_read = self.num_exact_duplicates = self.num_near_duplicates = (
            0  # documents; of these the same, and nearly the same, as one before
        )
        self.source_hash = blake2b(digest_size=16)

    def skip_to_entry(
        self, journal_entry: dict[str, Any], encode_chunks: EncodeChunksFn, chunk_characters: int
    ) -> None:
        """Go where a line of the journal says, and remember the documents up to there."""
        chunks = self.iter_chunks(chunk_characters, journal_entry["documents"])
        with progress("finding the place", "documents", journal_entry["documents"]) as p:
            if self.duplicate_filter.near_dedup:
                for chunk, _ in encode_chunks(chunks, self.duplicate_filter.record_only):
                    p.advance(chunk.num_read - p.done)
                self.num_near_duplicates = self.duplicate_filter.near_dedup.num_duplicates
            else:
                for chunk in chunks:
                    p.advance(chunk.num_read - p.done)
        if self.source_facts() != {"documents": journal_entry["documents"], "digest": journal_entry["digest"]}:
            raise UserError(
                "The text is not the one that was begun with: its first documents differ. Start anew with --overwrite."
            )

    def iter_chunks(self, chunk_characters: int, stop_after_documents: int | None = None) -> Iterator[DocumentChunk]:
        """Documents that are new in groups of bounded size, until so many have been read."""
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
        mark = text_fingerprint(join_document_sides(document))
        self.num_read += 1
        self.source_hash.update(mark)
        if document.word_starts is not None:
            self.source_hash.update(repr(document.word_starts).encode())
        new = self.duplicate_filter.is_new(mark)
        self.num_exact_duplicates += not new
        return new

    def _make_chunk(self, batch: list[Document]) -> DocumentChunk:
        size = sum(len(side.encode()) for document in batch for side in document.texts)
        return DocumentChunk(
            batch,
            size,
            self.num_read,
            self.num_exact_duplicates,
            self.source_hash.hexdigest(),
            corpus_bytes_read(self.documents),
        )

    def source_facts(self) -> dict[str, Any]:
        """Stands for all documents that were read, in their order."""
        return {"documents": self.num_read, "digest": self.source_hash.hexdigest()}


def digest_documents(documents: Iterable[Document], total_bytes: float | None = None) -> dict[str, Any]:
    """What the manifest of shards says of the text that they are made of: read it all, and make nothing."""
    reader = DocumentReader(documents, DuplicateFilter())
    with chunk_progress("comparing the text", reader, total_bytes) as advance:
        for chunk in reader.iter_chunks(CHUNK_CHARACTERS):
            advance(chunk)
    return reader.source_facts()


# --- processes ----------------------------------------------------------------------------------------------------


class ResourcePlan(NamedTuple):
    """How much is done at a time."""

    num_workers: int
    chunk_characters: int  # of a chunk
    dedup_memory_bytes: int  # bytes for what tells duplicates
    word_cache_bytes: int = MAX_WORD_CACHE_BYTES  # bytes for words that a process remembers


def plan_resources(
    num_workers: int,
    max_memory_bytes: int | None,
    total_bytes: float | None,
    encoder: DocumentEncoder,
    min_dedup_memory_bytes: int = 0,
) -> ResourcePlan:
    """As many processes as were asked for, unless memory, or a small text, speaks for fewer.

    What tells duplicates has `min_dedup_memory_bytes` bytes or more.
    """
    if num_workers < 0:
        raise UserError(f"--workers is {num_workers}, and must be at least 1 (or 0, for as many as there are cores).")
    wanted = num_workers or count_cpu_cores()
    if total_bytes is not None and total_bytes < MIN_PARALLEL_BYTES:
        wanted = 1
    if wanted > 1 and not is_importable(encoder.find_salient):
        say("The function that finds salient spans cannot be named to other processes: this one works alone.")
        wanted = 1
    if max_memory_bytes is None:
        return ResourcePlan(wanted, CHUNK_CHARACTERS, max(2**28, min_dedup_memory_bytes))
    release_freed_memory()
    memory = max(max_memory_bytes // 16, min_dedup_memory_bytes)
    free = max_memory_bytes - memory - process_memory_bytes()
    least = WORKER_BYTES + MIN_CHUNK_CHARACTERS * BYTES_PER_CHUNK_CHARACTER * 4 // 3
    if wanted > 1 and free // wanted < least:
        fewer = max(1, free // least)
        say(f"--max-memory has room for {fewer} of {wanted} workers.")
        wanted = fewer
    each = free // wanted - (WORKER_BYTES if wanted > 1 else 0)
    words = min(max(each, 0) // 4, MAX_WORD_CACHE_BYTES)
    characters = (each - words) // BYTES_PER_CHUNK_CHARACTER
    if characters < MIN_CHUNK_CHARACTERS:
        needed = max_memory_bytes + (MIN_CHUNK_CHARACTERS - characters) * BYTES_PER_CHUNK_CHARACTER * 4 // 3 * 16 // 15
        raise UserError(f"--max-memory is too little: {needed / 1e6:,.0f}MB are needed at least.")
    return ResourcePlan(wanted, min(characters, CHUNK_CHARACTERS), memory, words)


def count_cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_freed_memory() -> None:
    """Let what is freed go back to the system at once: without this, gaps between chunks grow by some KB with each.

    This is glibc's M_MMAP_THRESHOLD. Where the system has another library, nothing is done.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "mallopt"):
        library.mallopt(-3, 2**16)


def process_memory_bytes() -> int:
    """The bytes that this process has in memory."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def is_importable(find_salient: SalientSpanFinder | None) -> bool:
    """Whether a function can be found again by its name, in another process."""
    try:
        return find_salient is None or load_salient_finder(salient_finder_name(find_salient)) is find_salient
    except UserError:
        return False


@contextmanager
def open_chunk_encoder(encoder: DocumentEncoder, tokenizer_folder: Path, num_workers: int) -> Iterator[EncodeChunksFn]:
    """A function that tokenises chunks in order, in this process or by a crew."""
    if num_workers > 1:
        with worker_pool(encoder, tokenizer_folder, num_workers) as tokenise:
            yield tokenise
    else:
        yield encode_in_process(encoder)
