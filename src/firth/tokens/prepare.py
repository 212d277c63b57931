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

from firth.console import count, progress, say
from firth.errors import UserError, nearest
from firth.files import whole_folder
from firth.text import HELD_OUT, Document, Salient, fingerprint, load_salient, salient_name
from firth.text.corpus import position_of
from firth.tokens.duplicates import DEDUP, Duplicates, duplicates, memory_for, near_texts_in
from firth.tokens.growing import BLOCK, Growing, GrowingPart, blocks, growing
from firth.tokens.known import MOST
from firth.tokens.tokenise import Way, both
from firth.tokens.tokenizer import Tokenizer
from firth.tokens.workers import InOrder, alone, crew

NEAR_TEXTS = "near_texts"  # in the journal: among how many texts near duplicates are looked for
CHUNK_DOCUMENTS = 1000
CHUNK_CHARACTERS = 500_000  # bounds the memory that the encodings of a chunk take
SMALL = 2_000_000  # bytes of text: less is done before other processes have started

# What things take in memory, in bytes, as measured with the published tokenizers.
WORKER = 64 * 2**20  # beside the words that it remembers
CHARACTER = 150  # of a chunk: its text, encodings and results, on their way included
LEAST_CHARACTERS = 50_000


def prepare(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: str | Path,
    held_out_share: float = HELD_OUT,
    dedup: str = "exact",
    total_bytes: float | None = None,
    language: str = "en",
    salient: Salient | None = None,
    workers: int = 1,
    max_memory: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Write the shards of a stream of documents, and return what the manifest says of them.

    Tokens are plain text: no special tokens. `dedup` drops and counts documents that were there before: "exact" the
    same text, "near" also nearly the same, "none" nothing. `total_bytes` is the size of the source, for the
    progress line; a corpus tells how much of it has been read. `language` chooses the sentence rules. `salient` finds
    the spans of a text that are marked as salient, as (start, end) in characters; without it none are.

    `workers` is the number of processes, 1 being this one alone and 0 as many as there are cores. `max_memory`
    bounds the bytes that all of them take together. Neither changes a byte of the shards, but for near duplicates of
    texts that memory has no room for. Until they are whole they grow in `.NAME.part`, from which `resume` goes on; how
    many texts memory has room for stays as it was begun with.
    """
    if dedup not in DEDUP:
        raise UserError(f"--dedup {dedup}: no such way. {nearest(dedup, DEDUP)}")
    path, way = Path(folder), Way(tokenizer, held_out_share, language, salient)
    scale = choose_scale(workers, max_memory, total_bytes, way)
    header = {
        "tokenizer": tokenizer.fingerprint,
        "held_out_share": held_out_share,
        "dedup": dedup,
        "language": language,
        "salient": None if salient is None else salient_name(salient),
    }
    begin = header | ({NEAR_TEXTS: near_texts_in(scale.memory)} if dedup == "near" else {})
    with growing(path, begin, salient is not None, resume, settled=[NEAR_TEXTS]) as shards:
        near_texts = shards.header.get(NEAR_TEXTS, 0)
        if near_texts != begin.get(NEAR_TEXTS, 0):
            say(f"--dedup near goes on as it was begun: each text is compared with the last {near_texts:,}.")
            scale = choose_scale(workers, max_memory, total_bytes, way, memory_for(near_texts))
        tokenizer.save(shards.folder / "tokenizer")
        with duplicates(path, dedup, scale.memory, near_texts) as told:
            reader = Reader(documents, told)
            with said_if_stopped(path, shards):
                fill(shards, reader, way, scale, total_bytes)
        train, aside = shards.parts
        if not train.num_documents:
            raise nothing_to_train_on(aside.num_documents)
        return finish(path, shards, way, header, reader)


def finish(path: Path, shards: Growing, way: Way, header: dict[str, Any], reader: Reader) -> dict[str, Any]:
    """Write what is known only now, and give the folder its name."""
    train, aside = shards.parts
    facts: dict[str, Any] = {}
    near = reader.told.near
    with whole_folder(path, begun=shards.folder, kind="shards", facts=facts):
        for part in shards.parts:
            part.finish()
            part.close()
        facts |= header
        facts |= {
            "tokenizer_kind": way.tokenizer.kind,
            "vocab_size": way.tokenizer.vocab.size,
            "documents": train.num_documents + aside.num_documents,
            "tokens": train.num_tokens + aside.num_tokens,
            "duplicates": reader.exact + reader.near,
            "text_bytes": train.text_bytes + aside.text_bytes,
            "unigram_entropy": entropy(count_tokens(train, way)),
            "train": train.facts(),
            "held_out": aside.facts(),
            "source": reader.source(),
        }
        if near is not None and near.forgotten:
            facts[NEAR_TEXTS] = near.most
    return facts


def fill(shards: Growing, reader: Reader, way: Way, scale: Scale, total_bytes: float | None) -> None:
    """Tokenise what is not in the shards yet, chunk by chunk."""
    with many(replace(way, memory=scale.words), shards.folder / "tokenizer", scale.workers) as tokenise:
        if shards.line:
            reader.skip(shards.line, tokenise, scale.characters)
        decide = reader.told.stay if reader.told.near else None
        with how_far("tokenising", reader, total_bytes) as advance:
            for chunk, result in tokenise(reader.chunks(scale.characters), decide):
                reader.near += result.dropped
                shards.add(result.parts, **chunk.facts(reader.near))
                advance(chunk)


@contextmanager
def how_far(what: str, reader: Reader, total_bytes: float | None) -> Iterator[Callable[[Chunk], None]]:
    """A progress line that a chunk advances: by the share of the source that was read, where that can be told."""
    reached = position_of(reader.documents)
    known = bool(total_bytes) and reached is not None
    before = reached if known and reader.read else reader.read  # an earlier pass may have left a position at the end
    with progress(what, "bytes" if known else "documents", total_bytes if known else None, before or 0) as p:
        text_bytes = 0

        def advance(chunk: Chunk) -> None:
            nonlocal text_bytes
            text_bytes += chunk.bytes
            seconds = max(time.monotonic() - p.start, 1e-6)
            here = chunk.position if known else chunk.read
            p.advance((here or 0) - p.done, note=f"{text_bytes / 1e6 / seconds:.2f} MB/s")

        yield advance


@contextmanager
def said_if_stopped(path: Path, shards: Growing) -> Iterator[None]:
    """Say where --resume will go on, when anything stops the work."""
    try:
        yield
    except BaseException:
        if shards.line:
            done = count(shards.line["documents"], "document is", "documents are")
            say(f"{path}: {done} done and kept; --resume goes on from there.")
        raise


def count_tokens(part: GrowingPart, way: Way) -> np.ndarray:
    """How often each token is in a part."""
    assert BLOCK % 4 == 0, "a block ends with a token"
    counts_V = np.zeros(way.tokenizer.vocab.size, dtype=np.int64)
    for block in blocks(part.folder / "tokens.bin"):
        counts_V += np.bincount(np.frombuffer(block, way.dtype), minlength=len(counts_V))
    return counts_V


def entropy(counts: np.ndarray) -> float:
    """Of a distribution given as counts, in nats: the loss of a model that knows only how frequent each token is."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def nothing_to_train_on(num_held_out: int) -> UserError:
    if num_held_out:
        return UserError(
            f"All documents ({num_held_out:,}) fell into the held-out part and none is left for training. "
            "Give more documents, or hold out none."
        )
    return UserError("There is no text: the source has no documents, or only empty ones.")


# --- reading ------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Some documents, and how far the source was read with them."""

    documents: list[Document]
    bytes: int  # of their text
    read: int  # documents of the source up to here
    exact: int  # of them, those that are left out because the same text was there before
    digest: str  # stands for all texts up to here
    position: int | None  # bytes of the source up to here, where that can be told

    def facts(self, near: int) -> dict[str, Any]:
        """What the journal says when it is in the shards; `near` documents up to here are left out as well."""
        return {"documents": self.read, "duplicates": self.exact + near, "digest": self.digest}


class Reader:
    """Goes through a source once: documents that are new, and how far it is."""

    def __init__(self, documents: Iterable[Document], told: Duplicates) -> None:
        self.documents, self.told = documents, told
        self.stream = iter(documents)
        self.read = self.exact = self.near = 0  # documents; of these the same, and nearly the same, as one before
        self.digest = blake2b(digest_size=16)

    def skip(self, line: dict[str, Any], tokenise: InOrder, characters: int) -> None:
        """Go where a line of the journal says, and remember the documents up to there."""
        chunks = self.chunks(characters, line["documents"])
        with progress("finding the place", "documents", line["documents"]) as p:
            if self.told.near:
                for chunk, _ in tokenise(chunks, self.told.pass_over):
                    p.advance(chunk.read - p.done)
                self.near = self.told.near.duplicates
            else:
                for chunk in chunks:
                    p.advance(chunk.read - p.done)
        if self.source() != {"documents": line["documents"], "digest": line["digest"]}:
            raise UserError(
                "The text is not the one that was begun with: its first documents differ. Start anew with --overwrite."
            )

    def chunks(self, characters: int, stop: int | None = None) -> Iterator[Chunk]:
        """Documents that are new in groups of bounded size, until so many have been read."""
        batch: list[Document] = []
        length = 0
        while self.read != stop and (document := next(self.stream, None)) is not None:
            if not self._is_new(document):
                continue
            batch.append(document)
            length += sum(map(len, document.sides))
            if len(batch) == CHUNK_DOCUMENTS or length >= characters:
                yield self._chunk(batch)
                batch, length = [], 0
        if batch:
            yield self._chunk(batch)

    def _is_new(self, document: Document) -> bool:
        mark = fingerprint(both(document))
        self.read += 1
        self.digest.update(mark)
        if document.word_starts is not None:
            self.digest.update(repr(document.word_starts).encode())
        new = self.told.is_new(mark)
        self.exact += not new
        return new

    def _chunk(self, batch: list[Document]) -> Chunk:
        size = sum(len(side.encode()) for document in batch for side in document.sides)
        return Chunk(batch, size, self.read, self.exact, self.digest.hexdigest(), position_of(self.documents))

    def source(self) -> dict[str, Any]:
        """Stands for all documents that were read, in their order."""
        return {"documents": self.read, "digest": self.digest.hexdigest()}


def source_of(documents: Iterable[Document], total_bytes: float | None = None) -> dict[str, Any]:
    """What the manifest of shards says of the text that they are made of: read it all, and make nothing."""
    reader = Reader(documents, Duplicates())
    with how_far("comparing the text", reader, total_bytes) as advance:
        for chunk in reader.chunks(CHUNK_CHARACTERS):
            advance(chunk)
    return reader.source()


# --- processes ----------------------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """How much is done at a time."""

    workers: int
    characters: int  # of a chunk
    memory: int  # bytes for what tells duplicates
    words: int = MOST  # bytes for words that a process remembers


def choose_scale(
    workers: int, max_memory: int | None, total_bytes: float | None, way: Way, least_memory: int = 0
) -> Scale:
    """As many processes as were asked for, unless memory, or a small text, speaks for fewer.

    What tells duplicates has `least_memory` bytes or more.
    """
    if workers < 0:
        raise UserError(f"--workers is {workers}, and must be at least 1 (or 0, for as many as there are cores).")
    wanted = workers or cores()
    if total_bytes is not None and total_bytes < SMALL:
        wanted = 1
    if wanted > 1 and not has_name(way.salient):
        say("The function that finds salient spans cannot be named to other processes: this one works alone.")
        wanted = 1
    if max_memory is None:
        return Scale(wanted, CHUNK_CHARACTERS, max(2**28, least_memory))
    give_memory_back()
    memory = max(max_memory // 16, least_memory)
    free = max_memory - memory - own_memory()
    least = WORKER + LEAST_CHARACTERS * CHARACTER * 4 // 3
    if wanted > 1 and free // wanted < least:
        fewer = max(1, free // least)
        say(f"--max-memory has room for {fewer} of {wanted} workers.")
        wanted = fewer
    each = free // wanted - (WORKER if wanted > 1 else 0)
    words = min(max(each, 0) // 4, MOST)
    characters = (each - words) // CHARACTER
    if characters < LEAST_CHARACTERS:
        needed = max_memory + (LEAST_CHARACTERS - characters) * CHARACTER * 4 // 3 * 16 // 15
        raise UserError(f"--max-memory is too little: {needed / 1e6:,.0f}MB are needed at least.")
    return Scale(wanted, min(characters, CHUNK_CHARACTERS), memory, words)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def give_memory_back() -> None:
    """Let what is freed go back to the system at once: without this, gaps between chunks grow by some KB with each.

    This is glibc's M_MMAP_THRESHOLD. Where the system has another library, nothing is done.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "mallopt"):
        library.mallopt(-3, 2**16)


def own_memory() -> int:
    """The bytes that this process has in memory."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def has_name(find: Salient | None) -> bool:
    """Whether a function can be found again by its name, in another process."""
    try:
        return find is None or load_salient(salient_name(find)) is find
    except UserError:
        return False


@contextmanager
def many(way: Way, tokenizer_folder: Path, workers: int) -> Iterator[InOrder]:
    """A function that tokenises chunks in order, in this process or by a crew."""
    if workers > 1:
        with crew(way, tokenizer_folder, workers) as tokenise:
            yield tokenise
    else:
        yield alone(way)
