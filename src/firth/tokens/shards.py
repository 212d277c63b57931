"""Documents to token shards on disk, memory-mapped, with the edges of documents, words and sentences."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import sentencex
from tokenizers import Encoding

from firth.console import progress
from firth.errors import UserError
from firth.files import MANIFEST, damage, read_json, whole_folder
from firth.text import HELD_OUT, Document, Unique, held_out
from firth.tokens.tokenizer import Tokenizer, load_tokenizer

BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 2_000_000  # bounds the memory that the encodings of a batch take
SENTENCE_WINDOW = 20_000  # characters; the time that sentencex 1.0 takes is quadratic in the length of a paragraph
WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")  # spaces of several bytes: sentencex 1.0 fails on "A\xa0."


# --- writing ------------------------------------------------------------------------------------------------------


def prepare(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: str | Path,
    held_out_share: float = HELD_OUT,
    duplicates: str = "exact",
    total_bytes: float | None = None,
    language: str = "en",
) -> dict[str, Any]:
    """Write the shards of a stream of documents, whole or not at all, and return what the manifest says of them.

    Tokens are plain text: no special tokens. `duplicates` is "exact" (a text seen before is dropped and counted) or
    "keep". `total_bytes` is the size of the source, for the progress line; `language` chooses the sentence rules.
    """
    if duplicates not in ("exact", "keep"):
        raise UserError(f"duplicates is 'exact' or 'keep', not {duplicates!r}.")
    facts: dict[str, Any] = {}
    with whole_folder(Path(folder), kind="shards", facts=facts) as temporary:
        train, aside = Part(temporary / "train", tokenizer), Part(temporary / "held_out", tokenizer)
        unique = Unique()
        with closing(train), closing(aside):
            for texts in batches(documents, total_bytes):
                texts = [text for text in texts if duplicates == "keep" or unique.is_new(text)]
                is_aside = [held_out(text, held_out_share) for text in texts]
                train.write([text for text, out in zip(texts, is_aside, strict=True) if not out], language)
                aside.write([text for text, out in zip(texts, is_aside, strict=True) if out], language)
        if not train.num_documents:
            raise nothing_to_train_on(aside.num_documents)
        tokenizer.save(temporary / "tokenizer")
        facts |= {
            "tokenizer": tokenizer.fingerprint,
            "tokenizer_kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab.size,
            "held_out_share": held_out_share,
            "language": language,
            "documents": train.num_documents + aside.num_documents,
            "tokens": train.num_tokens + aside.num_tokens,
            "duplicates": unique.duplicates,
            "text_bytes": train.text_bytes + aside.text_bytes,
            "unigram_entropy": entropy(train.counts_V),
            "train": train.facts(),
            "held_out": aside.facts(),
        }
    return facts


def batches(documents: Iterable[Document], total_bytes: float | None) -> Iterator[list[str]]:
    """Texts in groups of bounded size, with a progress line: in bytes when the end is known, else in documents."""
    with progress("tokenising", "bytes" if total_bytes else "documents", total_bytes) as p:
        texts: list[str] = []
        characters = 0
        for document in documents:
            texts.append(document.text)
            characters += len(document.text)
            if len(texts) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                yield texts
                p.advance(sum(len(text.encode()) for text in texts) if total_bytes else len(texts))
                if p.total and p.done > p.total:  # a compressed source holds more than its size
                    p.total = None
                texts, characters = [], 0
        if texts:
            yield texts


def nothing_to_train_on(num_held_out: int) -> UserError:
    if num_held_out:
        return UserError(
            f"All documents ({num_held_out:,}) fell into the held-out part and none is left for training. "
            "Give more documents, or hold out none."
        )
    return UserError("There is no text: the source has no documents, or only empty ones.")


def entropy(counts: np.ndarray) -> float:
    """Of a distribution given as counts, in nats: the loss of a model that knows only how frequent each token is."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


class Part:
    """The files of one part (train or held out) while they grow."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        folder.mkdir()
        self.folder = folder
        self.tokenizer = tokenizer
        self.dtype = np.uint16 if tokenizer.vocab.size <= 2**16 else np.uint32
        self.tokens = open(folder / "tokens.bin", "wb")  # noqa: SIM115, closed by close()
        self.words = Bits(folder / "words.bin")
        self.sentences = Bits(folder / "sentences.bin")
        self.lengths = array("q")
        self.num_tokens = 0
        self.text_bytes = 0
        self.counts_V = np.zeros(tokenizer.vocab.size, dtype=np.int64)

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    def write(self, texts: Sequence[str], language: str) -> None:
        """Append documents; those that give no tokens are skipped."""
        encoded = zip(texts, self.tokenizer.encodings(texts), strict=True)
        documents = [(text, encoding) for text, encoding in encoded if len(encoding)]
        encodings = [encoding for _, encoding in documents]
        lengths = [len(encoding) for encoding in encodings]
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), self.dtype, sum(lengths))
        self.tokens.write(ids.tobytes())
        self.words.write(self.tokenizer.word_starts(*encodings))
        self.sentences.write(sentence_ends(documents, language))
        self.lengths.extend(lengths)
        self.num_tokens += len(ids)
        self.text_bytes += sum(len(text.encode()) for text, _ in documents)
        self.counts_V += np.bincount(ids, minlength=len(self.counts_V))

    def close(self) -> None:
        for file in (self.tokens, self.words, self.sentences):
            file.close()
        np.save(self.folder / "offsets.npy", np.cumsum([0, *self.lengths], dtype=np.int64))

    def facts(self) -> dict[str, int]:
        return {"documents": self.num_documents, "tokens": self.num_tokens, "text_bytes": self.text_bytes}


class Bits:
    """A file of bits, eight to a byte, the first one highest."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")  # noqa: SIM115, closed by close()
        self.rest = np.zeros(0, dtype=bool)

    def write(self, bits: np.ndarray) -> None:
        bits = np.concatenate([self.rest, bits])
        whole = len(bits) // 8 * 8
        self.file.write(np.packbits(bits[:whole]).tobytes())
        self.rest = bits[whole:]

    def close(self) -> None:
        self.file.write(np.packbits(self.rest).tobytes())
        self.file.close()


def sentence_ends(documents: Sequence[tuple[str, Encoding]], language: str) -> np.ndarray:
    """For each token of the documents, one document after the other: is it the last of a sentence?

    That is the last token which begins before the end of the sentence. All documents are done at once by placing
    their characters on one line.
    """
    starts: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    place = 0
    for text, encoding in documents:
        starts.append(place + np.array([start for start, _ in encoding.offsets]))
        ends.append(place + np.array(sentence_edges(text, language)))
        place += len(text)
    if not documents:
        return np.zeros(0, dtype=bool)
    starts_N = np.maximum.accumulate(np.concatenate(starts))  # a normaliser may have moved an accent
    last = np.searchsorted(starts_N, np.concatenate(ends), side="left") - 1
    is_end = np.zeros(len(starts_N), dtype=bool)
    is_end[last[last >= 0]] = True
    return is_end


def sentence_edges(text: str, language: str) -> list[int]:
    """The character positions at which sentences end, spaces after them not counted.

    >>> sentence_edges("Mr. Grey came. He left.", "en")
    [14, 23]
    """
    text = WIDE_SPACE.sub(" ", text)
    edges, start = [], 0
    while start < len(text):
        window = text[start : start + SENTENCE_WINDOW]
        sentences = sentencex.segment(language, window)
        if start + len(window) < len(text) and len(sentences) > 1:
            sentences.pop()  # perhaps cut in two by the window: the next one begins with it
        for sentence in sentences:
            if not sentence.isspace():
                edges.append(start + len(sentence.rstrip()))
            start += len(sentence)
    return edges


# --- reading ------------------------------------------------------------------------------------------------------


class Shards:
    """One part of a shards folder, opened for reading: tokens stay on disk until they are asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.offsets: np.ndarray = np.load(self.folder / "offsets.npy", mmap_mode="r")
        size = (self.folder / "tokens.bin").stat().st_size
        dtype = np.uint16 if size == 2 * self.num_tokens else np.uint32
        self.tokens = np.memmap(self.folder / "tokens.bin", dtype=dtype, mode="r", shape=(self.num_tokens,))
        self._words = np.memmap(self.folder / "words.bin", dtype=np.uint8, mode="r")
        self._sentences = np.memmap(self.folder / "sentences.bin", dtype=np.uint8, mode="r")

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def word_starts(self, start: int, stop: int) -> np.ndarray:
        """For the tokens from `start` to `stop`: does it start a word?"""
        return read_bits(self._words, start, stop)

    def sentence_ends(self, start: int, stop: int) -> np.ndarray:
        """For the tokens from `start` to `stop`: is it the last of a sentence?"""
        return read_bits(self._sentences, start, stop)

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
            state = "is missing" if size is None else f"has {size:,} bytes, not {fact['bytes']:,}"
            raise UserError(f"{folder} is damaged: {name} {state}. Prepare it again.")
