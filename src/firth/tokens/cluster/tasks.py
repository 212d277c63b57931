"""The tasks: functions of a spec (JSON), which read from a store, commit arrays to it, and return their entry.

| task | reads | commits |
| --- | --- | --- |
| `read` | its slices of the text | hashes, signatures and bands of the documents, by range |
| `exact` | the hashes of one range, of all `read` tasks | the documents to drop |
| `near` | the bands of one range, of all `read` tasks | the similar pairs |
| `tokenize` | its slices again, and which documents to drop | the tokens |
| `passages` | its slices, to draw a sample for a tokenizer | a keyed hash and the size of each passage |
| `sample` | its slices again, and which passages were drawn | the text of these passages |

The text is read twice, since no document can be dropped before all were read. The other way, storing the documents that
may stay, would write the text once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from firth.core.errors import UserError
from firth.core.files import create_file
from firth.text import Corpus, Document, load_salient_finder, text_fingerprint
from firth.text.corpus import CorpusFile
from firth.text.filters import TextCleaner
from firth.text.minhash import NUM_BANDS, NUM_PERMUTATIONS
from firth.tokens.cluster.bucket_dedup import (
    band_hashes,
    find_candidate_pairs,
    find_repeated,
    group_by_range,
    select_similar,
)
from firth.tokens.cluster.plan import ReadRangeFn, boundary_pattern, find_slice
from firth.tokens.cluster.store import (
    Readable,
    Store,
    commit,
    find_commit,
    is_url,
    open_filesystem,
    open_store,
    read_array,
    read_commit,
    read_folder,
)
from firth.tokens.dedup import minhash_signatures
from firth.tokens.encode import DocumentEncoder, TokenizedDocuments, join_document_sides
from firth.tokens.prepare import CHUNK_CHARACTERS, CHUNK_DOCUMENTS, source_hash_input
from firth.tokens.shard_writer import SHARD_PARTS
from firth.tokens.tokenizer import load_tokenizer
from firth.tokens.train import passage_key, split_long_words, split_passages

PREVIEW_CHARS = 60  # characters of a text that name it
COPY_BYTES = 2**24  # bytes per read of a slice
BIT_NAMES = ("words", "sentences", "salient")  # arrays of a tokenized document that are stored as bits
MAX_ROW_GAP = 256  # rows between two signatures (32 KB) that are read at once
READ_INDEX = "read-index"  # where the arrays of all `read` tasks are
# Prefixes of files with one bit for each document or passage (`write_bits`).
EXACT_DUPLICATES, DROPPED, DRAWN = "exact-duplicates", "dropped", "drawn"
TOKENIZER = "tokenizer"  # prefix of the files of the tokenizer

Spec = Mapping[str, Any]


class Watch:
    """Told which document a task works on, so that whoever watches it knows which one hangs or kills it.

    `texts` numbers the texts of a task as they are normalized, `documents` the documents that its corpus yields. Those
    in `skipped` are left out.
    """

    is_careful = False  # whether each document is reported before it is processed

    def __init__(self, skipped: Iterable[Sequence[Any]] = ()) -> None:
        self.skipped = {(kind, number) for kind, number in skipped}

    def begin(self, kind: str, number: int, what: str) -> None:
        """Report what is processed next."""

    def start(self) -> None:
        """Report that documents are processed from now on."""

    def finish(self) -> None:
        """Report that all documents were processed; what follows may take any time."""


def task_name(kind: str, number: int) -> str:
    """
    >>> task_name("read", 12)
    'read-000012'
    """
    return f"{kind}-{number:06}"


def run_task(spec: Spec, watch: Watch | None = None) -> dict[str, Any]:
    """Run a task, unless it is committed; return its entry.

    `inputs` is a hash of what earlier stages found: a task that was committed for other findings runs again.
    """
    store = open_store(spec["store"])
    if not store.has(spec["plan"]):
        raise UserError(
            f"A machine of the cluster does not see {spec['store']}. Name an --output-dir on a file system that all "
            "machines share, or on object storage (s3://, gs://)."
        )
    name = task_name(spec["kind"], spec["task"])
    entry = find_commit(store, name)
    if entry is not None and entry.get("inputs") == spec["inputs"]:
        return entry
    output = TASKS[spec["kind"]](spec, store, watch or Watch())
    return commit(store, name, output.arrays, inputs=spec["inputs"], **output.facts)


class TaskOutput(NamedTuple):
    """What a task commits."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


# --- reading slices -------------------------------------------------------------------------------------------------


class WatchedCleaner(TextCleaner):
    """A `TextCleaner` that reports each text, and empties those to skip: an empty document is left out."""

    watch: Watch
    num_texts = num_skipped = 0

    def normalize_text(self, text: str) -> str:
        self.num_texts += 1
        if ("text", self.num_texts) in self.watch.skipped:
            self.num_skipped += 1
            return ""
        self.watch.begin("text", self.num_texts, text[:PREVIEW_CHARS])  # where it stands in its file is not known here
        return super().normalize_text(text)


@contextmanager
def open_slices(spec: Spec, watch: Watch) -> Iterator[Corpus]:
    """Yield a corpus of the slices of a task. Parts of files and objects are copied to this machine first."""
    reading = dict(spec["reading"])
    with TemporaryDirectory(prefix="firth-slices-") as folder:
        files = [
            source
            for i, (path, size, version, is_user_named, start, stop) in enumerate(spec["slices"])
            if (source := fetch_slice(path, size, version, is_user_named, start, stop, Path(folder) / str(i)))
        ]
        corpus = Corpus([], **reading)
        corpus.files = files
        cleaner = WatchedCleaner(**{f.name: reading[f.name] for f in fields(TextCleaner) if f.name in reading})
        corpus.cleaner, cleaner.watch = cleaner, watch
        watch.start()
        yield corpus


def fetch_slice(
    path: str, size: int, version: str, is_user_named: bool, start: int, stop: int, folder: Path
) -> CorpusFile | None:
    """Return a slice as a file of this machine; None if no document begins in it."""
    is_whole = (start, stop) == (0, size)
    if file_version(path) != (size, version):
        raise UserError(f"{path} has changed since the work began. Start anew with --overwrite.")
    if is_whole and not is_url(path):
        return CorpusFile(Path(path), is_user_named, path)
    read = range_reader(path)
    begin, end = (0, size) if is_whole else find_slice(read, size, start, stop, boundary_pattern(path))
    if begin >= end and not is_whole:
        return None
    folder.mkdir()
    copy = folder / Path(path).name
    with create_file(copy) as file:
        for position in range(begin, end, COPY_BYTES):
            file.write(read(position, min(position + COPY_BYTES, end)))
    # "auto" splits a file on blank lines if the user named it or if it is large, as a file with several slices is.
    return CorpusFile(copy, is_user_named or not is_whole, path if begin == 0 else f"{path} from byte {begin:,}")


def file_version(path: str) -> tuple[int, str]:
    """Return the size of a file or object, and a word that changes with its content."""
    if is_url(path):
        filesystem, name = open_filesystem(path)
        filesystem.invalidate_cache()
        info = filesystem.info(name)
        mark = info.get("ETag") or info.get("etag") or info.get("LastModified") or info.get("mtime") or ""
        return int(info["size"]), str(mark)
    try:
        stat = Path(path).stat()
    except OSError as e:
        raise UserError(
            f"{path}: cannot be read on a machine of the cluster ({e.strerror}). All machines need the text under the "
            "same path, or on object storage (s3://, gs://)."
        ) from None
    return stat.st_size, str(stat.st_mtime_ns)


def range_reader(path: str) -> ReadRangeFn:
    if is_url(path):
        filesystem, name = open_filesystem(path)
        return lambda start, stop: bytes(filesystem.cat_file(name, start=start, end=stop)) if stop > start else b""

    def read(start: int, stop: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    return read


def reading_facts(corpus: Corpus, spec: Spec) -> dict[str, Any]:
    """Return the counts of a corpus. A file in several slices counts with its first one."""
    counts, cleaner = Counter(corpus.counts), corpus.cleaner
    assert isinstance(cleaner, WatchedCleaner)
    counts["empty"] -= cleaner.num_skipped
    for source in corpus.files:
        if " from byte " in source.display_name:
            counts["lines" if source.path.suffix.lower() == ".jsonl" else "split"] -= 1
    return {
        "counts": {name: n for name, n in counts.items() if n},
        "dropped_by_reason": dict(cleaner.dropped_by_reason),
        "change_counts": dict(cleaner.change_counts),
        "skip": list(spec.get("skip", [])),  # what a later task must skip to see the same documents
        "skipped": list(spec.get("skipped", [])),
    }


# --- read -----------------------------------------------------------------------------------------------------------


def read_documents(spec: Spec, store: Store, watch: Watch) -> TaskOutput:
    """Hash and sign the documents of a task, and sort the hashes by range."""
    digest, hashes, signatures = bytearray(), list[int](), list[np.ndarray]()
    with open_slices(spec, watch) as corpus:
        documents = corpus.iter_documents()
        while batch := list(islice(documents, 1 if watch.is_careful else CHUNK_DOCUMENTS)):
            for document in batch:
                fingerprint = text_fingerprint(join_document_sides(document))
                digest += source_hash_input(document, fingerprint)
                hashes.append(int.from_bytes(fingerprint[:8], "little"))
            if spec["dedup"] == "near":
                signatures.append(minhash_signatures(batch))
        watch.finish()
        facts = reading_facts(corpus, spec)
    arrays: dict[str, np.ndarray] = {"digest": np.frombuffer(bytes(digest), np.uint8)}
    bounds: dict[str, list[int]] = {}
    numbers = np.arange(len(hashes), dtype=np.uint32)
    if spec["dedup"] != "none":
        arrays |= sort_by_range("hashes", np.array(hashes, np.uint64), numbers, spec["num_ranges"], bounds)
    if spec["dedup"] == "near":
        signatures_DP = np.concatenate([np.zeros((0, NUM_PERMUTATIONS), np.uint8), *signatures])
        bands = band_hashes(signatures_DP).ravel()
        arrays |= {"signatures": signatures_DP}
        arrays |= sort_by_range("bands", bands, np.repeat(numbers, NUM_BANDS), spec["num_ranges"], bounds)
    return TaskOutput(arrays, {"documents": len(hashes), "digest": digest_of(digest), "bounds": bounds, **facts})


def digest_of(data: bytes | bytearray) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def sort_by_range(
    name: str, hashes: np.ndarray, documents: np.ndarray, num_ranges: int, bounds: dict[str, list[int]]
) -> dict[str, np.ndarray]:
    """Return hashes and their documents sorted by range; add the bounds of the ranges to `bounds`."""
    order, edges = group_by_range(hashes, num_ranges)
    bounds[name] = edges.tolist()
    return {name: hashes[order], f"{name}_documents": documents[order]}


# --- ranges ---------------------------------------------------------------------------------------------------------


def find_exact_duplicates(spec: Spec, store: Store, watch: Watch) -> TaskOutput:
    """Find the documents of one range that repeat an earlier one."""
    hashes, documents = ReadIndex(store).read_range("hashes", spec["task"])
    return TaskOutput({"documents": find_repeated(hashes, documents)}, {})


def find_similar_pairs(spec: Spec, store: Store, watch: Watch) -> TaskOutput:
    """Find the similar pairs of one range among documents that are no exact duplicates, sorted by the later one."""
    index = ReadIndex(store)
    bands, documents = index.read_range("bands", spec["task"])
    is_dropped = read_bits(store, spec["bits"], 0, spec["num_documents"])
    new = ~is_dropped[documents]
    pairs = find_candidate_pairs(bands[new], documents[new])
    similar = select_similar(pairs, index.read_signatures)
    bounds = np.searchsorted(similar[:, 0], index.firsts)
    return TaskOutput({"pairs": similar, "bounds": bounds}, {})


class ReadIndex:
    """Where the arrays of all `read` tasks are, as arrays: a range reads the few rows of it that it needs.

    >>> entry = {"arrays": {"hashes": ["<u8", [3], 16]}, "documents": 3, "bounds": {"hashes": [0, 1, 3]}}
    >>> {name: array.tolist() for name, array in ReadIndex.make_arrays([entry, entry]).items()}
    {'documents': [3, 3], 'offset.hashes': [16, 16], 'bounds.hashes': [[0, 0], [1, 1], [3, 3]]}
    """

    def __init__(self, store: Store) -> None:
        self.store, self.entry = store, read_commit(store, READ_INDEX)
        self.firsts = first_documents(read_array(store, READ_INDEX, self.entry, "documents").tolist())

    @staticmethod
    def make_arrays(entries: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        arrays, bounds = entries[0]["arrays"], entries[0]["bounds"]
        return {
            "documents": np.array([entry["documents"] for entry in entries]),
            **{f"offset.{name}": np.array([entry["arrays"][name][2] for entry in entries]) for name in arrays},
            **{f"bounds.{name}": np.array([entry["bounds"][name] for entry in entries]).T for name in bounds},
        }

    def read_range(self, name: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes of one range from all tasks, and their documents, numbered over all tasks."""
        hashes, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        starts, stops = read_array(self.store, READ_INDEX, self.entry, f"bounds.{name}", number, number + 2).tolist()
        at, documents_at = (self.offsets(key) for key in (name, f"{name}_documents"))
        for task, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            if start < stop:
                hashes.append(self.read_rows(task, at[task], np.uint64, start, stop))
                numbers = self.read_rows(task, documents_at[task], np.uint32, start, stop)
                documents.append(numbers + self.firsts[task])
        return np.concatenate(hashes), np.concatenate(documents)

    def read_signatures(self, documents: np.ndarray) -> np.ndarray:
        """Return the signatures of sorted documents, (D, P). Rows close to each other are read at once."""
        at, found = self.offsets("signatures"), [np.zeros((0, NUM_PERMUTATIONS), np.uint8)]
        edges = np.searchsorted(documents, self.firsts)
        for task in np.flatnonzero(np.diff(edges)).tolist():
            rows = documents[edges[task] : edges[task + 1]] - self.firsts[task]
            for near in np.split(rows, np.flatnonzero(np.diff(rows) > MAX_ROW_GAP) + 1):
                start, stop = int(near[0]), int(near[-1]) + 1
                data = self.read_rows(task, at[task], np.uint8, start * NUM_PERMUTATIONS, stop * NUM_PERMUTATIONS)
                found.append(data.reshape(-1, NUM_PERMUTATIONS)[near - start])
        return np.concatenate(found)

    def offsets(self, name: str) -> list[int]:
        """Return the byte at which an array begins in the file of each task."""
        return list(read_array(self.store, READ_INDEX, self.entry, f"offset.{name}").tolist())

    def read_rows(self, task: int, offset: int, dtype: type, start: int, stop: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        data = self.store.read(task_name("read", task), offset + start * size, offset + stop * size)
        return np.frombuffer(data, dtype)


def first_documents(num_documents: Sequence[int]) -> np.ndarray:
    """Return the number of the first document of each task, and the number of all documents.

    >>> first_documents([3, 0, 2]).tolist()
    [0, 3, 3, 5]
    """
    return np.cumsum([0, *num_documents])


def write_bits(store: Store, prefix: str, values: np.ndarray) -> str:
    """Store booleans as bits, and return the name: the prefix and a hash of the content.

    A file is never written again with other content. So a task that is still running somewhere, after the command moved
    on or was resumed, reads what its spec meant.
    """
    data = np.packbits(values).tobytes()
    name = f"{prefix}-{blake2b(data, digest_size=16).hexdigest()}"
    store.write(name, data)
    return name


def read_bits(store: Store, name: str, start: int, stop: int) -> np.ndarray:
    """Return the bits [start, stop) of a file of bits."""
    data = np.frombuffer(store.read(name, start // 8, -(-stop // 8)), np.uint8)
    return np.unpackbits(data)[start % 8 :][: stop - start].astype(bool)


# --- tokenize -------------------------------------------------------------------------------------------------------


def tokenize_documents(spec: Spec, store: Store, watch: Watch) -> TaskOutput:
    """Tokenize the documents of a task that stay."""
    is_dropped = read_bits(store, spec["bits"], spec["first_document"], spec["first_document"] + spec["num_documents"])
    digest, parts = bytearray(), list[tuple[TokenizedDocuments, TokenizedDocuments]]()
    with load_encoder(spec, store) as encoder, open_slices(spec, watch) as corpus:
        parts.append(encoder([]))

        def new_documents() -> Iterator[Document]:
            for number, document in enumerate(corpus.iter_documents()):
                digest.extend(source_hash_input(document, text_fingerprint(join_document_sides(document))))
                if number >= len(is_dropped) or is_dropped[number] or ("document", number) in watch.skipped:
                    continue
                watch.begin("document", number, document.source)
                yield document

        chunk_documents = 1 if watch.is_careful else CHUNK_DOCUMENTS
        parts += [encoder(chunk) for chunk in chunk_by_size(new_documents(), chunk_documents, CHUNK_CHARACTERS)]
        watch.finish()
    if digest_of(digest) != spec["digest"]:
        named = ", ".join(dict.fromkeys(path for path, *_ in spec["slices"]))
        raise UserError(f"{named}: has changed since the work began. Start anew with --overwrite.")
    arrays: dict[str, np.ndarray] = {
        f"{part}.{name}": array
        for part, chunks in zip(SHARD_PARTS, zip(*parts, strict=True), strict=True)
        for name, array in join_chunks(chunks).items()
    }
    num_tokens = {part: len(arrays[f"{part}.tokens"]) for part in SHARD_PARTS}
    return TaskOutput(arrays, {"tokens": num_tokens, "skipped": list(spec.get("skipped", []))})


def chunk_by_size(documents: Iterable[Document], max_documents: int, max_characters: int) -> Iterator[list[Document]]:
    """Yield documents in chunks of bounded size."""
    chunk, length = list[Document](), 0
    for document in documents:
        chunk.append(document)
        length += sum(map(len, document.texts))
        if len(chunk) == max_documents or length >= max_characters:
            yield chunk
            chunk, length = [], 0
    if chunk:
        yield chunk


def join_chunks(chunks: Sequence[TokenizedDocuments]) -> dict[str, np.ndarray]:
    """Return the arrays of all chunks as a task stores them: bits are packed."""
    joined = {name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in TokenizedDocuments._fields}
    return joined | {name: np.packbits(joined[name]) for name in BIT_NAMES}


def read_tokenized(store: Readable, name: str, entry: Mapping[str, Any], part: str) -> TokenizedDocuments:
    """Return the tokens that a `tokenize` task has committed: the inverse of `join_chunks`."""
    arrays = {key: read_array(store, name, entry, f"{part}.{key}") for key in TokenizedDocuments._fields}
    num_tokens = entry["tokens"][part]
    bits = {key: np.unpackbits(arrays[key])[:num_tokens].astype(bool) for key in BIT_NAMES}
    return TokenizedDocuments(**(arrays | bits))


@contextmanager
def load_encoder(spec: Spec, store: Store) -> Iterator[DocumentEncoder]:
    salient = load_salient_finder(spec["salient"]) if spec["salient"] else None
    with read_folder(store, TOKENIZER, spec["tokenizer_files"]) as folder:
        yield DocumentEncoder(load_tokenizer(folder), spec["held_out_share"], spec["language"], salient)


# --- a sample for a tokenizer ---------------------------------------------------------------------------------------


def hash_passages(spec: Spec, store: Store, watch: Watch) -> TaskOutput:
    """Compute the key and the size of each passage: a sample has those with the smallest keys."""
    keys, sizes, facts = list[int](), list[int](), dict[str, Any]()
    long_words = Counter[str]()
    with open_slices(spec, watch) as corpus:
        texts = (text for document in corpus.iter_documents() for text in document.texts)
        for passage in split_passages(split_long_words(text, long_words) for text in texts):
            data = passage.encode()
            keys.append(passage_key(data, spec["seed"]))
            sizes.append(len(data))
        watch.finish()
        facts = reading_facts(corpus, spec)
    arrays: dict[str, np.ndarray] = {"keys": np.array(keys, np.uint64), "sizes": np.array(sizes, np.uint32)}
    return TaskOutput(arrays, {"passages": len(keys), "cut_words": long_words["cut"], **facts})


def take_passages(spec: Spec, store: Store, watch: Watch) -> TaskOutput:
    """Return the text of the passages that were drawn."""
    is_drawn = read_bits(store, spec["bits"], spec["first_passage"], spec["first_passage"] + spec["num_passages"])
    taken = list[bytes]()
    with open_slices(spec, watch) as corpus:
        texts = (text for document in corpus.iter_documents() for text in document.texts)
        passages = split_passages(split_long_words(text, Counter()) for text in texts)
        num_seen = 0
        for passage in passages:
            if num_seen < len(is_drawn) and is_drawn[num_seen]:
                taken.append(passage.encode())
            num_seen += 1
        watch.finish()
    if num_seen != len(is_drawn):  # a document that hangs only now: those after it have other numbers
        named = ", ".join(dict.fromkeys(path for path, *_ in spec["slices"]))
        raise UserError(f"{named}: gives other passages than in the first reading. Start anew with --overwrite.")
    sizes = np.array([len(data) for data in taken], np.int64)
    text: np.ndarray = np.frombuffer(b"".join(taken), np.uint8)
    return TaskOutput({"text": text, "sizes": sizes}, {})


TASKS: dict[str, Callable[[Spec, Store, Watch], TaskOutput]] = {
    "read": read_documents,
    "exact": find_exact_duplicates,
    "near": find_similar_pairs,
    "tokenize": tokenize_documents,
    "passages": hash_passages,
    "sample": take_passages,
}
WATCHED_TASKS = ("read", "tokenize", "passages", "sample")  # they process documents
