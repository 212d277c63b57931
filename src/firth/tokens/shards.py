"""Token shards, opened for reading.

A part ("train" or "held_out") is a folder of flat files, all memory-mapped, so processes share its pages:

    tokens.bin                              uint16, or uint32 for more than 65,536 ids; no special tokens
    offsets.npy                             (documents + 1,) int64: document d is tokens offsets[d] up to offsets[d + 1]
    words.bin, sentences.bin, salient.bin   one bit per token: starts a word, ends a sentence, is salient
    splits.npy                              tokens of the first side, for documents with two sides

`manifest.json` in the folder above has counts, checksums and the fingerprint of the tokenizer.

Damaged shards would train a bad model without an error: a file of zeros is a text that is easy to predict. So the first
opening reads all files and verifies checksums, offsets and token ids. The result is stored beside them, with the size
and the times of every file: while these stay the same, opening costs a few calls of `stat`. Copied or changed files are
verified again, and so are shards in a folder that cannot be written, once per process.

A memory-mapped file that another program cuts must not be read behind its new end: the system would end the process
(SIGBUS). `Shards.check_not_cut` compares the sizes before each batch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.core.files import (
    MANIFEST_FILE,
    VERIFIED_FILE,
    atomic_folder,
    find_corruption,
    find_file_defect,
    format_bytes,
    read_json,
    read_manifest,
    read_object,
    remove_path,
    write_json,
    write_npy,
)
from firth.tokens.permutation import permute_indices
from firth.tokens.shard_writer import SHARD_PARTS
from firth.tokens.tokenizer import Tokenizer, load_tokenizer

# tokenizers that split at word boundaries
WORD_AWARE_KINDS = ("wordpiece", "bpe", "byte-bpe", "unigram", "char", "elmo-characters", "word")
MAX_MEAN_WORD_TOKENS = 20  # tokens per word on average: more means that the tokenizer does not see word boundaries
MIN_VERIFIED_AGE_NS = 10**8  # a file that changed later may change again without a new time: file systems round it
MIN_ANNOUNCED_BYTES = 10**9  # of shards whose verification takes some seconds
VERIFY_BLOCK = 2**24  # offsets or tokens that are checked at once
SENTENCE_BLOCK_TOKENS = 2**24  # tokens whose sentence ends are unpacked at once
TOKEN_BIT_FILES = {"word_start": "words", "sentence_end": "sentences", "salient": "salient"}  # bit -> name of its file


class Shards:
    """One part of a shards folder, memory-mapped: tokens stay on disk until they are read."""

    stores_arrays = True  # arrays that are computed from it are stored beside it

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.offsets: np.ndarray = np.load(self.folder / "offsets.npy", mmap_mode="r")
        size = (self.folder / "tokens.bin").stat().st_size
        dtype = np.uint16 if size == 2 * self.num_tokens else np.uint32
        self._tokens: np.ndarray = np.memmap(
            self.folder / "tokens.bin", dtype=dtype, mode="r", shape=(self.num_tokens,)
        )
        files = {bit: self.folder / f"{name}.bin" for bit, name in TOKEN_BIT_FILES.items()}
        self._packed_bits: dict[str, np.ndarray] = {
            bit: np.memmap(f, dtype=np.uint8, mode="r") for bit, f in files.items() if f.is_file()
        }
        self._mapped_files: dict[Path, os.stat_result] = {}
        self.watch_files(
            [self.folder / "offsets.npy", self.folder / "tokens.bin", *filter(Path.is_file, files.values())]
        )

    @property
    def tokens(self) -> np.ndarray:
        """Ids of all tokens, (num_tokens,)."""
        self.check_not_cut()
        return self._tokens

    def watch_files(self, files: Iterable[Path]) -> None:
        """Let `check_not_cut` watch memory-mapped files."""
        self._mapped_files |= {file: file.stat() for file in files}

    def check_not_cut(self) -> None:
        """Raise a UserError if a mapped file has become shorter. A file that was replaced or removed stays mapped."""
        for file, before in self._mapped_files.items():
            try:
                now = file.stat()
            except OSError:
                continue
            if now.st_size < before.st_size and (now.st_ino, now.st_dev) == (before.st_ino, before.st_dev):
                raise UserError(
                    f"{file} was cut from {before.st_size:,} to {now.st_size:,} bytes while it was read. Stop the "
                    "program that writes to it, restore the file or prepare the text again, and resume with --resume."
                )

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def num_words(self) -> int:
        return self._count_bit("word_start")

    @cached_property
    def first_side_lengths(self) -> np.ndarray | None:
        """Tokens of the first side of each document, (D,), -1 for one side only; None if all have one side."""
        file = self.folder / "splits.npy"
        return np.load(file, mmap_mode="r") if file.is_file() else None

    def has_bit(self, bit: str) -> bool:
        """Whether the shards have this bit."""
        return bit in self._packed_bits

    def gather_bits(self, bit: str, token_indices: np.ndarray) -> np.ndarray:
        """Return a bit of the tokens at these indices; arbitrary outside of [0, num_tokens)."""
        byte = np.take(self._packed_bits[bit], token_indices >> 3, mode="clip")
        return (byte >> (7 - (token_indices & 7)).astype(np.uint8) & 1).astype(bool)

    def word_starts(self, start: int, stop: int) -> np.ndarray:
        """Return which of the tokens [start, stop) start a word."""
        return unpack_bits(self._packed_bits["word_start"], start, stop)

    def sentence_ends(self, start: int, stop: int) -> np.ndarray:
        """Return which of the tokens [start, stop) end a sentence."""
        return unpack_bits(self._packed_bits["sentence_end"], start, stop)

    def sentence_bounds(self) -> np.ndarray:
        """Return the token indices at which sentences begin and end; the end of a document ends a sentence too."""
        starts = range(0, self.num_tokens, SENTENCE_BLOCK_TOKENS)
        blocks = [self.sentence_ends(start, min(start + SENTENCE_BLOCK_TOKENS, self.num_tokens)) for start in starts]
        ends = [start + 1 + np.flatnonzero(block) for start, block in zip(starts, blocks, strict=True)]
        return np.union1d(np.concatenate(ends), self.offsets)

    def sample_documents(self, max_tokens: int) -> np.ndarray:
        """Return documents in the order of the text: all of them, or a random sample of about `max_tokens` tokens.

        The first documents of a text would be those of its first file.
        """
        if self.num_tokens <= max_tokens:
            return np.arange(self.num_documents)
        order_D = permute_indices(np.arange(self.num_documents), self.num_documents, 0)
        total_D = np.cumsum(np.diff(self.offsets)[order_D])
        return np.sort(order_D[: max(int(np.searchsorted(total_D, max_tokens, side="right")), 1)])

    def document_tokens(self, document: int) -> np.ndarray:
        """Return the tokens of a document."""
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    def require_bits(self, token_bits: Collection[str]) -> None:
        """Raise an error if a bit is missing or meaningless in these shards."""
        assert TOKEN_BIT_FILES.keys() >= set(token_bits), token_bits
        if "salient" in token_bits and not self.has_bit("salient"):
            raise UserError(
                f"{self.folder.parent} has no salient bits. "
                "Prepare the text again with `firth prepare --salient default`."
            )
        if "word_start" in token_bits:
            self._require_words()

    def _require_words(self) -> None:
        """Raise an error if the tokenizer sees no word boundaries: words are documents, lines or single tokens."""
        problem = ""
        if self.num_words == self.num_documents < self.num_tokens:
            problem = "every document is one word"
        elif self.num_tokens > MAX_MEAN_WORD_TOKENS * self.num_words:
            problem = f"a word has {self.num_tokens / self.num_words:.0f} tokens on average"
        elif self.num_words == self.num_tokens and self._manifest_facts.get("tokenizer_kind") not in WORD_AWARE_KINDS:
            problem = "every token is one word"
        if problem:
            raise UserError(
                f"Whole words need a tokenizer that knows where words begin; in {self.folder.parent} {problem}. "
                "Take a wordpiece, byte-bpe or unigram tokenizer, or for a language written without spaces give each "
                "document's words in a `words` column (.jsonl)."
            )
        if self.num_words == self.num_tokens:
            say(f"In {self.folder.parent} every token is a word, so whole-word masking is token masking.")

    @property
    def _manifest_facts(self) -> dict[str, Any]:
        return read_json(self.folder.parent / MANIFEST_FILE).get("metadata", {})

    def _count_bit(self, bit: str) -> int:
        """Number of tokens with a bit, from the manifest; counted for shards without one."""
        count = self._manifest_facts.get(self.folder.name, {}).get(TOKEN_BIT_FILES[bit])
        return int(np.bitwise_count(self._packed_bits[bit]).sum()) if count is None else count

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tokens and document offsets of this part."""
        files = read_json(self.folder.parent / MANIFEST_FILE)["files"]
        sums = [files[f"{self.folder.name}/{name}"]["sha256"] for name in ("tokens.bin", "offsets.npy")]
        return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]


def unpack_bits(packed: np.ndarray, start: int, stop: int) -> np.ndarray:
    first = start // 8
    bits = np.unpackbits(packed[first : -(-stop // 8)])
    return bits[start - 8 * first : stop - 8 * first].astype(bool)


@dataclass(frozen=True)
class ShardSet:
    """A shards folder: its parts, its tokenizer, and the metadata that `prepare` returned."""

    folder: Path
    train: Shards
    held_out: Shards | None  # None when no document was held out
    tokenizer: Tokenizer
    manifest: dict[str, Any]

    @property
    def num_documents(self) -> int:
        """Of the training part."""
        return self.train.num_documents

    @property
    def num_tokens(self) -> int:
        """Of the training part."""
        return self.train.num_tokens

    @property
    def unigram_entropy(self) -> float:
        return float(self.manifest["unigram_entropy"])


@dataclass(frozen=True)
class PartFacts:
    """The counts of a part that are read again."""

    allow_unknown_keys = True

    documents: int
    words: int | None = None
    sentences: int | None = None


@dataclass(frozen=True)
class ShardsFacts:
    """The facts of `prepare` that are read again."""

    allow_unknown_keys = True

    train: PartFacts
    held_out: PartFacts
    unigram_entropy: float
    tokenizer_kind: str


@dataclass(frozen=True)
class ShardsManifest:
    """The manifest.json of a shards folder; `read_manifest` checks its list of files."""

    allow_unknown_keys = True

    metadata: ShardsFacts


def is_shards_folder(folder: str | Path) -> bool:
    """Whether `prepare` wrote this folder."""
    manifest = Path(folder) / MANIFEST_FILE
    facts = read_json(manifest) if manifest.is_file() else None
    return isinstance(facts, dict) and facts.get("kind") == "shards"


def open_shards(folder: str | Path) -> ShardSet:
    """Open a folder that `prepare` wrote; raise a UserError if a file is damaged."""
    folder = Path(folder)
    if not is_shards_folder(folder):
        if not folder.exists():
            raise UserError(f"{folder}: no such folder.")
        raise UserError(
            f"{folder} is not a shards folder: it has no {MANIFEST_FILE} of one. Make one with `firth prepare`."
        )
    if problem := find_shard_damage(folder):
        raise UserError(
            f"{folder} is damaged: {problem}. Restore it from a copy, or repeat the command that made it with "
            "--resume: it prepares the text again."
        )
    facts = read_object(folder / MANIFEST_FILE, ShardsManifest)["metadata"]
    return ShardSet(
        folder=folder,
        train=Shards(folder / "train"),
        held_out=Shards(folder / "held_out") if facts["held_out"]["documents"] else None,
        tokenizer=load_tokenizer(folder / "tokenizer"),
        manifest=facts,
    )


# --- verification ---------------------------------------------------------------------------------------------------

verified_in_process: dict[Path, dict[str, list[int]]] = {}  # for folders that cannot be written


def find_shard_damage(folder: Path) -> str | None:
    """Return the first defect of a shards folder, or None; files that have not changed since are not read again."""
    try:
        manifest = read_manifest(folder)
        names = [MANIFEST_FILE, *manifest["files"]]
        if missing := next((name for name in names if not (folder / name).is_file()), None):
            return f"{missing} is missing"
        state = file_states(folder, names)
        if state == verified_in_process.get(folder.absolute()) or state == read_verified(folder):
            return None
        problem = find_content_damage(folder, manifest)
    except (UserError, OSError) as e:
        return str(e).rstrip(".")
    if problem is None and time.time_ns() - max(map(max, (s[1:] for s in state.values()))) > MIN_VERIFIED_AGE_NS:
        remember_verified(folder, state)
    return problem


def find_content_damage(folder: Path, manifest: dict[str, Any]) -> str | None:
    """Read all files: compare checksums, then check that offsets increase and that token ids are in the vocabulary."""
    files, facts = manifest["files"], manifest.get("metadata")
    counts = [facts.get(part) if isinstance(facts, dict) else None for part in SHARD_PARTS]
    if not all(isinstance(count, dict) and type(count.get("documents")) is int for count in counts):
        return f"{MANIFEST_FILE} has no counts of documents"
    total = sum(fact["bytes"] for fact in files.values())
    if total > MIN_ANNOUNCED_BYTES:
        say(f"verifying {folder} ({format_bytes(total)}): once, until a file changes")
    needed = [f"{part}/{name}" for part in SHARD_PARTS for name in ("tokens.bin", "offsets.npy")]
    if unlisted := next((name for name in needed if name not in files), None):
        return f"{MANIFEST_FILE} does not list {unlisted}"
    if problem := next((problem for name in files if (problem := find_file_defect(folder, name, files[name]))), None):
        return problem
    vocab_size = load_tokenizer(folder / "tokenizer").vocab.size
    return next((problem for part in SHARD_PARTS if (problem := find_part_damage(folder, part, vocab_size))), None)


def find_part_damage(folder: Path, part: str, vocab_size: int) -> str | None:
    try:
        offsets: np.ndarray = np.load(folder / part / "offsets.npy", mmap_mode="r")
    except ValueError as e:
        return f"{part}/offsets.npy cannot be read ({e})"
    if offsets.ndim != 1 or offsets.dtype != np.int64 or not len(offsets) or offsets[0]:
        return f"{part}/offsets.npy is not an array of int64 that begins with 0"
    for start in range(0, len(offsets), VERIFY_BLOCK):
        if (np.diff(offsets[start : start + VERIFY_BLOCK + 1]) < 0).any():
            return f"{part}/offsets.npy has offsets that decrease"
    size, num_tokens = (folder / part / "tokens.bin").stat().st_size, int(offsets[-1])
    if size not in (2 * num_tokens, 4 * num_tokens):
        return f"{part}/tokens.bin has {format_count(size, 'byte')}, and offsets.npy counts {num_tokens:,} tokens"
    if not size:
        return None
    tokens = np.memmap(folder / part / "tokens.bin", np.uint16 if size == 2 * num_tokens else np.uint32, mode="r")
    largest = max(int(tokens[start : start + VERIFY_BLOCK].max()) for start in range(0, num_tokens, VERIFY_BLOCK))
    return None if largest < vocab_size else f"{part}/tokens.bin has the id {largest:,}, not one of {vocab_size:,}"


def file_states(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Return size, mtime and ctime of each file. A copy may keep the mtime, never the ctime."""
    stats = {name: (folder / name).stat() for name in names}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats.items()}


def read_verified(folder: Path) -> Any:
    """Return the sizes and times that the last verification stored; None without them."""
    try:
        return read_json(folder / VERIFIED_FILE)
    except (UserError, OSError):
        return None


def remember_verified(folder: Path, state: dict[str, list[int]] | None = None) -> None:
    """Store that the files of shards are whole, by default as they are now."""
    state = state or file_states(folder, [MANIFEST_FILE, *read_manifest(folder)["files"]])
    verified_in_process[folder.absolute()] = state
    with suppress(OSError):  # shards may lie in a folder that only others can write
        write_json(folder / VERIFIED_FILE, state)


# --- arrays computed from shards, stored beside them ---------------------------------------------------------------

ArraysT = TypeVar("ArraysT", bound=NamedTuple)


def load_or_compute_arrays(
    shards: Shards, name: str, array_type: type[ArraysT], compute: Callable[[], ArraysT]
) -> ArraysT:
    """Memory-map the arrays in the folder `name` beside a part of shards; compute and store them if it is not whole."""
    if not shards.stores_arrays:
        return compute()
    folder = shards.folder / name
    if (stored := load_arrays(shards, folder, array_type)) is not None:
        return stored
    arrays = compute()
    try:
        save_arrays(arrays, folder)
    except OSError as e:
        say(f"{shards.folder} cannot be written ({e.strerror}): the next run computes its rows again.")
    return arrays


def load_arrays(shards: Shards, folder: Path, array_type: type[ArraysT]) -> ArraysT | None:
    """Memory-map the arrays in a folder; None if it is not whole, or if another process replaces it meanwhile."""
    files = array_files(folder, array_type)
    try:
        if not are_whole(files):
            return None
        arrays = array_type(*(np.load(file, mmap_mode="r") for file in files))
        shards.watch_files(files)
    except OSError:
        return None
    return arrays


def array_files(folder: Path, array_type: type[NamedTuple]) -> list[Path]:
    return [folder / f"{field}.npy" for field in array_type._fields]


def are_whole(files: Sequence[Path]) -> bool:
    return find_corruption(files[0].parent) is None and all(map(Path.is_file, files))


def save_arrays(arrays: NamedTuple, folder: Path) -> None:
    """Write arrays. Several processes may do so at once: each writes its own folder, and the first rename wins.

    Other processes read a folder that is whole, so only a damaged one is removed.
    """
    own_folder = folder.with_name(f"{folder.name}.{os.getpid()}")
    with atomic_folder(own_folder, "rows") as temporary:
        for name, array in arrays._asdict().items():
            write_npy(temporary / f"{name}.npy", array)
    try:
        rename_to_absent(own_folder, folder, array_files(folder, type(arrays)))
    except OSError:
        shutil.rmtree(own_folder, ignore_errors=True)
        if not folder.is_dir():
            raise
    remove_leftovers(folder)


def rename_to_absent(own_folder: Path, folder: Path, files: Sequence[Path]) -> None:
    """Rename a folder of arrays, in place of a damaged one, never of a whole one."""
    try:
        own_folder.rename(folder)
    except OSError:
        if are_whole(files):
            raise
        damaged = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
        own_folder.rename(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the folders that processes left which were killed while they wrote these arrays."""
    for path in folder.parent.glob(f"*{folder.name}.*"):
        process = re.fullmatch(rf"\.?{re.escape(folder.name)}\.(\d+)(\.tmp)?", path.name)
        if process and not is_running(int(process[1])):
            remove_path(path)


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except OSError as e:
        return e.errno == errno.EPERM  # another user's process
    return True
