"""Token shards, opened for reading: memory-mapped, with the edges of documents, words and sentences."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from firth.console import count, say
from firth.errors import UserError
from firth.files import MANIFEST, damage, read_json
from firth.tokens.tokenizer import Tokenizer, load_tokenizer

KNOW_WORDS = (
    "wordpiece",
    "bpe",
    "byte-bpe",
    "unigram",
    "char",
    "word",
)  # kinds of tokenizers that split text at the edges of words
LONG_WORD = 20  # tokens: words are never so long on average, unless the tokenizer does not see where they begin
BLOCK = 2**24  # tokens whose sentence ends are read at once
BITS = {"word_start": "words", "sentence_end": "sentences", "salient": "salient"}  # what is marked, and in which file


class Shards:
    """One part of a shards folder, opened for reading: tokens stay on disk until they are asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.offsets: np.ndarray = np.load(self.folder / "offsets.npy", mmap_mode="r")
        size = (self.folder / "tokens.bin").stat().st_size
        dtype = np.uint16 if size == 2 * self.num_tokens else np.uint32
        self.tokens = np.memmap(self.folder / "tokens.bin", dtype=dtype, mode="r", shape=(self.num_tokens,))
        files = {bit: self.folder / f"{name}.bin" for bit, name in BITS.items()}
        self._bits = {bit: np.memmap(f, dtype=np.uint8, mode="r") for bit, f in files.items() if f.is_file()}

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def num_words(self) -> int:
        return self._count("word_start")

    @cached_property
    def num_sentences(self) -> int:
        return self._count("sentence_end")

    @cached_property
    def splits(self) -> np.ndarray | None:
        """(D,) how many tokens the first side of each document has, -1 for one side only; None if all are such."""
        file = self.folder / "splits.npy"
        return np.load(file, mmap_mode="r") if file.is_file() else None

    def has(self, bit: str) -> bool:
        """Whether the tokens are marked with this bit."""
        return bit in self._bits

    def bits(self, bit: str, places: np.ndarray) -> np.ndarray:
        """A bit of the tokens at these places; beyond the first and the last token nothing is promised."""
        byte = np.take(self._bits[bit], places >> 3, mode="clip")
        return (byte >> (7 - (places & 7)).astype(np.uint8) & 1).astype(bool)

    def word_starts(self, start: int, stop: int) -> np.ndarray:
        """For the tokens from `start` to `stop`: does it start a word?"""
        return read_bits(self._bits["word_start"], start, stop)

    def sentence_ends(self, start: int, stop: int) -> np.ndarray:
        """For the tokens from `start` to `stop`: is it the last of a sentence?"""
        return read_bits(self._bits["sentence_end"], start, stop)

    def sentence_bounds(self) -> np.ndarray:
        """Where sentences begin and end, in tokens; the end of a document ends a sentence too."""
        starts = range(0, self.num_tokens, BLOCK)
        blocks = [self.sentence_ends(start, min(start + BLOCK, self.num_tokens)) for start in starts]
        ends = [start + 1 + np.flatnonzero(block) for start, block in zip(starts, blocks, strict=True)]
        return np.union1d(np.concatenate(ends), self.offsets)

    def demand(self, bits: Collection[str]) -> None:
        """Refuse bits that say nothing here."""
        assert BITS.keys() >= set(bits), bits
        if "salient" in bits and not self.has("salient"):
            raise UserError(
                f"{self.folder.parent} does not say which tokens are salient. "
                "Prepare the text again with `firth prepare --salient default`."
            )
        if "word_start" in bits:
            self._demand_words()

    def _demand_words(self) -> None:
        """Refuse words that are whole documents, lines or single tokens because the tokenizer does not know better."""
        wrong = ""
        if self.num_words == self.num_documents < self.num_tokens:
            wrong = "every document is one word"
        elif self.num_tokens > LONG_WORD * self.num_words:
            wrong = f"a word has {self.num_tokens / self.num_words:.0f} tokens on average"
        elif self.num_words == self.num_tokens and self._facts.get("tokenizer_kind") not in KNOW_WORDS:
            wrong = "every token is one word"
        if wrong:
            raise UserError(
                f"Whole words need a tokenizer that knows where words begin; in {self.folder.parent} {wrong}. "
                "Take a wordpiece, byte-bpe or unigram tokenizer, or for a language written without spaces give each "
                "document's words in a `words` column (.jsonl)."
            )
        if self.num_words == self.num_tokens:
            say(f"In {self.folder.parent} every token is a word, so whole words are no more than single tokens.")

    @property
    def _facts(self) -> dict[str, Any]:
        return read_json(self.folder.parent / MANIFEST).get("facts", {})

    def _count(self, bit: str) -> int:
        """How many tokens have a bit: as the manifest says, or counted where it was written before it said so."""
        known = self._facts.get(self.folder.name, {}).get(BITS[bit])
        return int(np.bitwise_count(self._bits[bit]).sum()) if known is None else known

    @cached_property
    def fingerprint(self) -> str:
        """Stands for the documents of this part as they are tokenised here."""
        files = read_json(self.folder.parent / MANIFEST)["files"]
        sums = [files[f"{self.folder.name}/{name}"]["sha256"] for name in ("tokens.bin", "offsets.npy")]
        return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]


def read_bits(packed: np.ndarray, start: int, stop: int) -> np.ndarray:
    first = start // 8
    bits = np.unpackbits(packed[first : -(-stop // 8)])
    return bits[start - 8 * first : stop - 8 * first].astype(bool)


@dataclass(frozen=True)
class Prepared:
    """A shards folder: its parts, its tokenizer, and the facts that `prepare` returned."""

    folder: Path
    train: Shards
    held_out: Shards | None  # None when no document was held out
    tokenizer: Tokenizer
    manifest: dict[str, Any]

    @property
    def num_documents(self) -> int:
        """Those to train on."""
        return self.train.num_documents

    @property
    def num_tokens(self) -> int:
        """Those to train on."""
        return self.train.num_tokens

    @property
    def unigram_entropy(self) -> float:
        return float(self.manifest["unigram_entropy"])

    def verify(self) -> None:
        """Read everything and compare it with the checksums."""
        wrong = damage(self.folder)
        if wrong:
            raise UserError(f"{self.folder} is damaged: {wrong}. Prepare it again.")


def is_shards(folder: str | Path) -> bool:
    """Whether `prepare` wrote this folder."""
    manifest = Path(folder) / MANIFEST
    facts = read_json(manifest) if manifest.is_file() else None
    return isinstance(facts, dict) and facts.get("kind") == "shards"


def open_shards(folder: str | Path) -> Prepared:
    """Open a folder that `prepare` wrote. Sizes are checked at once, contents by `verify`."""
    folder = Path(folder)
    if not is_shards(folder):
        raise UserError(f"{folder} is no shards folder: no {MANIFEST} says so. Make one with `firth prepare`.")
    manifest = read_json(folder / MANIFEST)
    check_sizes(folder, manifest["files"])
    facts = manifest["facts"]
    return Prepared(
        folder=folder,
        train=Shards(folder / "train"),
        held_out=Shards(folder / "held_out") if facts["held_out"]["documents"] else None,
        tokenizer=load_tokenizer(folder / "tokenizer"),
        manifest=facts,
    )


def check_sizes(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, fact in files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != fact["bytes"]:
            state = "is missing" if size is None else f"has {count(size, 'byte')}, not {fact['bytes']:,}"
            raise UserError(f"{folder} is damaged: {name} {state}. Prepare it again.")
