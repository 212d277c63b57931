"""Documents to token shards on disk: by many processes, in bounded memory, and resumed where it was stopped."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.console import progress, say
from firth.errors import UserError, nearest
from firth.files import whole_folder
from firth.text import HELD_OUT, Document, Salient, fingerprint, load_salient, salient_name
from firth.text.near import NearDuplicates
from firth.text.seen import Seen
from firth.tokens.growing import BLOCK, Growing, GrowingPart, blocks, growing
from firth.tokens.tokenise import Way, both
from firth.tokens.tokenizer import Tokenizer
from firth.tokens.workers import Result, crew

DEDUP = ("none", "exact", "near")
CHUNK_DOCUMENTS = 1000
CHUNK_CHARACTERS = 500_000  # bounds the memory that the encodings of a chunk take
SMALL = 2_000_000  # bytes of text: less is done before other processes have started

# What things take in memory, in bytes, as measured with the published tokenizers.
WORKER = 64 * 2**20
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
    same text, "near" also nearly the same, "none" nothing. `total_bytes` is the size of the source, for the progress
    line; `language` chooses the sentence rules. `salient` finds the spans of a text that are marked as salient, as
    (start, end) in characters; without it none are.

    `workers` is the number of processes, 1 being this one alone and 0 as many as there are cores. `max_memory`
    bounds the bytes that all of them take together. Neither changes a byte of the shards, but for near duplicates of
    texts that memory has no room for. Until they are whole they grow in `.NAME.part`, from which `resume` goes on.
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
    with growing(path, header, salient is not None, resume) as shards:
        tokenizer.save(shards.folder / "tokenizer")
        with new_only(path, dedup, scale.memory) as is_new:
            reader = Reader(documents, is_new)
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
            "duplicates": reader.duplicates,
            "text_bytes": train.text_bytes + aside.text_bytes,
            "unigram_entropy": entropy(count_tokens(train, way)),
            "train": train.facts(),
            "held_out": aside.facts(),
        }
    return facts


def fill(shards: Growing, reader: Reader, way: Way, scale: Scale, total_bytes: float | None) -> None:
    """Tokenise what is not in the shards yet, chunk by chunk."""
    done = reader.skip(shards.line) if shards.line else 0
    left = max(total_bytes - done, 1) if total_bytes else None
    with (
        many(way, shards.folder / "tokenizer", scale.workers) as tokenise,
        progress("tokenising", "bytes" if left else "documents", left) as p,
    ):
        for chunk, results in tokenise(reader.chunks(scale.characters)):
            shards.add(results, **chunk.facts())
            p.done += chunk.bytes if left else chunk.size
            p.advance(0, note=f"{p.rate / 1e6:.2f} MB/s" if left else "")
            if p.total and p.done > p.total:  # a compressed source holds more than its size
                p.total = None


@contextmanager
def said_if_stopped(path: Path, shards: Growing) -> Iterator[None]:
    """Say where --resume will go on, when anything stops the work."""
    try:
        yield
    except BaseException:
        if shards.line:
            say(f"{path}: {shards.line['documents']:,} documents are done and kept; --resume goes on from there.")
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
    size: int  # how many they are
    bytes: int  # of their text
    read: int  # documents of the source up to here
    duplicates: int  # of them, those that are left out
    digest: str  # stands for all texts up to here

    def facts(self) -> dict[str, Any]:
        return {"documents": self.read, "duplicates": self.duplicates, "digest": self.digest}


class Reader:
    """Goes through a source once: documents that are new, and how far it is."""

    def __init__(self, documents: Iterable[Document], is_new: Callable[[str, bytes], bool]) -> None:
        self.documents = iter(documents)
        self.is_new = is_new
        self.read = self.duplicates = 0
        self.digest = blake2b(digest_size=16)

    def __iter__(self) -> Iterator[Document]:
        """The documents that were not there before."""
        for document in self.documents:
            text = both(document)
            mark = fingerprint(text)
            self.read += 1
            self.digest.update(mark)
            if self.is_new(text, mark):
                yield document
            else:
                self.duplicates += 1

    def skip(self, line: dict[str, Any]) -> int:
        """Go where a line of the journal says, and return the bytes of text up to there."""
        size, new = 0, iter(self)
        with progress("finding the place", "documents", line["documents"]) as p:
            while self.read < line["documents"] and (document := next(new, None)) is not None:
                size += len(both(document).encode())
                p.advance(self.read - p.done)
        if (self.read, self.digest.hexdigest()) != (line["documents"], line["digest"]):
            raise UserError(
                "The text is not the one that was begun with: its first documents differ. Start anew with --overwrite."
            )
        return size

    def chunks(self, characters: int) -> Iterator[Chunk]:
        """Documents in groups of bounded size."""
        batch: list[Document] = []
        length = 0
        for document in self:
            batch.append(document)
            length += len(document.text) + len(document.second or "")
            if len(batch) == CHUNK_DOCUMENTS or length >= characters:
                yield self._chunk(batch)
                batch, length = [], 0
        if batch:
            yield self._chunk(batch)

    def _chunk(self, batch: list[Document]) -> Chunk:
        size = sum(len(side.encode()) for document in batch for side in document.sides)
        return Chunk(batch, len(batch), size, self.read, self.duplicates, self.digest.hexdigest())


# --- duplicates ---------------------------------------------------------------------------------------------------


@contextmanager
def new_only(path: Path, dedup: str, max_memory: int) -> Iterator[Callable[[str, bytes], bool]]:
    """A function that tells, of a text and its fingerprint, whether it is the first of its kind."""
    if dedup == "none":
        yield lambda text, mark: True
        return
    share = max_memory if dedup == "exact" else max_memory // 4
    with closing(Seen(path.with_name(f".{path.name}.seen"), share)) as seen:
        if dedup == "exact":
            yield lambda text, mark: seen.is_new(mark)
            return
        near = NearDuplicates(max_memory=max_memory - share)
        yield lambda text, mark: seen.is_new(mark) and not near.seen(text)
        if near.forgotten:
            say(f"--dedup near compared each text with the last {near.most:,} only: --max-memory has no room for more.")


# --- processes ----------------------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """How much is done at a time."""

    workers: int
    characters: int  # of a chunk
    memory: int  # bytes for what tells duplicates


def choose_scale(workers: int, max_memory: int | None, total_bytes: float | None, way: Way) -> Scale:
    """As many processes as were asked for, unless memory, or a small text, speaks for fewer."""
    if workers < 0:
        raise UserError(f"--workers is {workers}, and must be at least 1 (or 0, for as many as there are cores).")
    wanted = workers or cores()
    if total_bytes is not None and total_bytes < SMALL:
        wanted = 1
    if wanted > 1 and not has_name(way.salient):
        say("The function that finds salient spans cannot be named to other processes: this one works alone.")
        wanted = 1
    if max_memory is None:
        return Scale(wanted, CHUNK_CHARACTERS, 2**28)
    give_memory_back()
    free = max_memory - max_memory // 16 - own_memory()
    if wanted > 1 and free // wanted < WORKER + LEAST_CHARACTERS * CHARACTER:
        fewer = max(1, free // (WORKER + LEAST_CHARACTERS * CHARACTER))
        say(f"--max-memory has room for {fewer} of {wanted} workers.")
        wanted = fewer
    characters = (free // wanted - (WORKER if wanted > 1 else 0)) // CHARACTER
    if characters < LEAST_CHARACTERS:
        needed = max_memory + (LEAST_CHARACTERS - characters) * CHARACTER * 16 // 15
        raise UserError(f"--max-memory is too little: {needed / 1e6:,.0f}MB are needed at least.")
    return Scale(wanted, min(characters, CHUNK_CHARACTERS), max_memory // 16)


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
def many(
    way: Way, tokenizer_folder: Path, workers: int
) -> Iterator[Callable[[Iterable[Chunk]], Iterator[tuple[Chunk, Result]]]]:
    """A function that tokenises chunks in order, in this process or by a crew."""
    if workers > 1:
        with crew(way, tokenizer_folder, workers) as tokenise:
            yield tokenise
    else:
        yield lambda chunks: ((chunk._replace(documents=[]), way(chunk.documents)) for chunk in chunks)
