"""Token shards, opened for reading.

A part ("train" or "held_out") is a folder of flat files, all memory-mapped, so opening it costs nothing and processes
share its pages:

    tokens.bin                              uint16, or uint32 for more than 65,536 ids; no special tokens
    offsets.npy                             (documents + 1,) int64: document d is tokens offsets[d] up to offsets[d + 1]
    words.bin, sentences.bin, salient.bin   one bit per token: starts a word, ends a sentence, is salient
    splits.npy                              tokens of the first side, for documents with two sides

`manifest.json` in the folder above has counts, checksums and the fingerprint of the tokenizer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.core.files import MANIFEST_FILE, atomic_folder, find_corruption, read_json, write_npy
from firth.tokens.tokenizer import Tokenizer, load_tokenizer

# tokenizers that split at word boundaries
WORD_AWARE_KINDS = ("wordpiece", "bpe", "byte-bpe", "unigram", "char", "elmo-characters", "word")
MAX_MEAN_WORD_TOKENS = 20  # tokens per word on average: more means that the tokenizer does not see word boundaries
SENTENCE_BLOCK_TOKENS = 2**24  # tokens whose sentence ends are unpacked at once
TOKEN_BIT_FILES = {"word_start": "words", "sentence_end": "sentences", "salient": "salient"}  # bit -> name of its file


class Shards:
    """One part of a shards folder, memory-mapped: tokens stay on disk until they are read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.offsets: np.ndarray = np.load(self.folder / "offsets.npy", mmap_mode="r")
        size = (self.folder / "tokens.bin").stat().st_size
        dtype = np.uint16 if size == 2 * self.num_tokens else np.uint32
        self.tokens = np.memmap(self.folder / "tokens.bin", dtype=dtype, mode="r", shape=(self.num_tokens,))
        files = {bit: self.folder / f"{name}.bin" for bit, name in TOKEN_BIT_FILES.items()}
        self._packed_bits = {bit: np.memmap(f, dtype=np.uint8, mode="r") for bit, f in files.items() if f.is_file()}

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
    def num_sentences(self) -> int:
        return self._count_bit("sentence_end")

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

    def verify(self) -> None:
        """Read all files and compare them with the checksums."""
        problem = find_corruption(self.folder)
        if problem:
            raise UserError(f"{self.folder} is damaged: {problem}. Prepare it again.")


def is_shards_folder(folder: str | Path) -> bool:
    """Whether `prepare` wrote this folder."""
    manifest = Path(folder) / MANIFEST_FILE
    facts = read_json(manifest) if manifest.is_file() else None
    return isinstance(facts, dict) and facts.get("kind") == "shards"


def open_shards(folder: str | Path) -> ShardSet:
    """Open a folder that `prepare` wrote. Checks file sizes; `verify` checks contents."""
    folder = Path(folder)
    if not is_shards_folder(folder):
        raise UserError(
            f"{folder} is not a shards folder: it has no {MANIFEST_FILE} of one. Make one with `firth prepare`."
        )
    manifest = read_json(folder / MANIFEST_FILE)
    check_file_sizes(folder, manifest["files"])
    facts = manifest["metadata"]
    return ShardSet(
        folder=folder,
        train=Shards(folder / "train"),
        held_out=Shards(folder / "held_out") if facts["held_out"]["documents"] else None,
        tokenizer=load_tokenizer(folder / "tokenizer"),
        manifest=facts,
    )


def check_file_sizes(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, fact in files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != fact["bytes"]:
            state = "is missing" if size is None else f"has {format_count(size, 'byte')}, not {fact['bytes']:,}"
            raise UserError(f"{folder} is damaged: {name} {state}. Prepare it again.")


# --- arrays computed from shards, stored beside them ---------------------------------------------------------------

ArraysT = TypeVar("ArraysT", bound=NamedTuple)


def load_or_compute_arrays(
    shards: Shards, name: str, array_type: type[ArraysT], compute: Callable[[], ArraysT]
) -> ArraysT:
    """Memory-map the arrays in the folder `name` beside a part of shards; compute and store them if it is not whole."""
    folder = shards.folder / name
    if find_corruption(folder) is None:
        return array_type(*(np.load(folder / f"{field}.npy", mmap_mode="r") for field in array_type._fields))
    arrays = compute()
    try:
        shutil.rmtree(folder, ignore_errors=True)
        save_arrays(arrays, folder)
    except OSError as e:
        say(f"{shards.folder} cannot be written ({e.strerror}): the next run computes its rows again.")
    return arrays


def save_arrays(arrays: NamedTuple, folder: Path) -> None:
    """Write arrays. Several processes may do so at once: each writes its own folder, and the first rename wins."""
    own_folder = folder.with_name(f"{folder.name}.{os.getpid()}")
    with atomic_folder(own_folder) as temporary:
        for name, array in arrays._asdict().items():
            write_npy(temporary / f"{name}.npy", array)
    try:
        own_folder.rename(folder)
    except OSError:
        shutil.rmtree(own_folder)
        if not folder.is_dir():
            raise
