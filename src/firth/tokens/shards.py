"""Documents to token shards on disk, memory-mapped, with the edges of documents, words and sentences."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencex
from tokenizers import Encoding

from firth.console import progress, say
from firth.errors import UserError
from firth.files import MANIFEST, damage, read_json, whole_folder
from firth.text import HELD_OUT, Document, Salient, Unique, held_out, salient_name
from firth.tokens.tokenizer import Tokenizer, load_tokenizer

BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 2_000_000  # bounds the memory that the encodings of a batch take
SENTENCE_WINDOW = 20_000  # characters; the time that sentencex 1.0 takes is quadratic in the length of a paragraph
KNOW_WORDS = ("wordpiece", "byte-bpe", "unigram", "word")  # kinds of tokenizers that split text at the edges of words
LONG_WORD = 20  # tokens: words are never so long on average, unless the tokenizer does not see where they begin
BITS = {"word_start": "words", "sentence_end": "sentences", "salient": "salient"}  # what is marked, and in which file
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
    salient: Salient | None = None,
) -> dict[str, Any]:
    """Write the shards of a stream of documents, whole or not at all, and return what the manifest says of them.

    Tokens are plain text: no special tokens. `duplicates` is "exact" (a text seen before is dropped and counted) or
    "keep". `total_bytes` is the size of the source, for the progress line; `language` chooses the sentence rules.
    `salient` finds the spans of a text that are marked as salient, as (start, end) in characters; without it none are.
    """
    if duplicates not in ("exact", "keep"):
        raise UserError(f"duplicates is 'exact' or 'keep', not {duplicates!r}.")
    facts: dict[str, Any] = {}
    with whole_folder(Path(folder), kind="shards", facts=facts) as temporary:
        train, aside = (Part(temporary / name, tokenizer, language, salient) for name in ("train", "held_out"))
        unique = Unique()
        with closing(train), closing(aside):
            for batch in batches(documents, total_bytes):
                batch = [d for d in batch if duplicates == "keep" or unique.is_new(both(d))]
                is_aside = [held_out(both(d), held_out_share) for d in batch]
                train.write([d for d, out in zip(batch, is_aside, strict=True) if not out])
                aside.write([d for d, out in zip(batch, is_aside, strict=True) if out])
        if not train.num_documents:
            raise nothing_to_train_on(aside.num_documents)
        tokenizer.save(temporary / "tokenizer")
        facts |= {
            "tokenizer": tokenizer.fingerprint,
            "tokenizer_kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab.size,
            "held_out_share": held_out_share,
            "language": language,
            "salient": None if salient is None else salient_name(salient),
            "documents": train.num_documents + aside.num_documents,
            "tokens": train.num_tokens + aside.num_tokens,
            "duplicates": unique.duplicates,
            "text_bytes": train.text_bytes + aside.text_bytes,
            "unigram_entropy": entropy(train.counts_V),
            "train": train.facts(),
            "held_out": aside.facts(),
        }
    return facts


def both(document: Document) -> str:
    """What stands for a document when it is held out or compared with others."""
    return "\0".join(document.sides)


def batches(documents: Iterable[Document], total_bytes: float | None) -> Iterator[list[Document]]:
    """Documents in groups of bounded size, with a progress line: in bytes when the end is known, else in documents."""
    with progress("tokenising", "bytes" if total_bytes else "documents", total_bytes) as p:
        batch: list[Document] = []
        characters = 0
        for document in documents:
            batch.append(document)
            characters += len(both(document))
            if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                yield batch
                p.advance(sum(len(both(d).encode()) for d in batch) if total_bytes else len(batch))
                if p.total and p.done > p.total:  # a compressed source holds more than its size
                    p.total = None
                batch, characters = [], 0
        if batch:
            yield batch


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


class Side(NamedTuple):
    """One text of a document, and its tokens."""

    document: Document
    text: str
    encoding: Encoding


class Part:
    """The files of one part (train or held out) while they grow."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, language: str, salient: Salient | None) -> None:
        folder.mkdir()
        self.folder = folder
        self.tokenizer = tokenizer
        self.language = language
        self.find_salient = salient
        self.dtype = np.uint16 if tokenizer.vocab.size <= 2**16 else np.uint32
        self.tokens = open(folder / "tokens.bin", "wb")  # noqa: SIM115, closed by close()
        self.words = Bits(folder / "words.bin")
        self.sentences = Bits(folder / "sentences.bin")
        self.salient = None if salient is None else Bits(folder / "salient.bin")
        self.lengths, self.splits = array("q"), array("q")
        self.num_tokens = 0
        self.text_bytes = 0
        self.counts_V = np.zeros(tokenizer.vocab.size, dtype=np.int64)

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    def write(self, documents: Sequence[Document]) -> None:
        """Append documents; those that give no tokens, or none for one of their sides, are skipped."""
        encodings = iter(self.tokenizer.encodings([text for document in documents for text in document.sides]))
        tokenised = [[Side(d, text, next(encodings)) for text in d.sides] for d in documents]
        kept = [sides for sides in tokenised if all(len(side.encoding) for side in sides)]
        self.lengths.extend(sum(len(side.encoding) for side in sides) for sides in kept)
        self.splits.extend(len(sides[0].encoding) if len(sides) == 2 else -1 for sides in kept)
        self._append(list(chain.from_iterable(kept)))

    def _append(self, sides: Sequence[Side]) -> None:
        encodings = [side.encoding for side in sides]
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), self.dtype, sum(map(len, encodings)))
        self.tokens.write(ids.tobytes())
        self.words.write(word_starts(sides, self.tokenizer))
        self.sentences.write(sentence_ends(sides, self.language))
        if self.salient is not None and self.find_salient is not None:
            self.salient.write(in_spans(sides, self.find_salient))
        self.num_tokens += len(ids)
        self.text_bytes += sum(len(side.text.encode()) for side in sides)
        self.counts_V += np.bincount(ids, minlength=len(self.counts_V))

    def close(self) -> None:
        for file in (self.tokens, self.words, self.sentences, self.salient):
            if file is not None:
                file.close()
        np.save(self.folder / "offsets.npy", np.cumsum([0, *self.lengths], dtype=np.int64))
        splits = np.array(self.splits, dtype=np.int64)
        if (splits >= 0).any():
            np.save(self.folder / "splits.npy", splits)

    def facts(self) -> dict[str, int]:
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "text_bytes": self.text_bytes,
            "words": self.words.count,
            "sentences": self.sentences.count,
            **({} if self.salient is None else {"salient": self.salient.count}),
        }


class Bits:
    """A file of bits, eight to a byte, the first one highest."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")  # noqa: SIM115, closed by close()
        self.rest = np.zeros(0, dtype=bool)
        self.count = 0  # of the bits that are set

    def write(self, bits: np.ndarray) -> None:
        self.count += int(bits.sum())
        bits = np.concatenate([self.rest, bits])
        whole = len(bits) // 8 * 8
        self.file.write(np.packbits(bits[:whole]).tobytes())
        self.rest = bits[whole:]

    def close(self) -> None:
        self.file.write(np.packbits(self.rest).tobytes())
        self.file.close()


def word_starts(sides: Sequence[Side], tokenizer: Tokenizer) -> np.ndarray:
    """For each token of some texts, one text after the other: does it start a word?

    The tokenizer says so, unless the user has named the words.
    """
    starts = tokenizer.word_starts(*(side.encoding for side in sides))
    first = 0
    for side in sides:
        size = len(side.encoding)
        if side.document.word_starts is not None:
            starts[first : first + size] = False
            starts[first + first_tokens(side.document.word_starts, side)] = True
            starts[first] = True
        first += size
    return starts


def first_tokens(characters: Sequence[int], side: Side) -> np.ndarray:
    """The first token of each word of a text, given the characters at which words begin.

    It holds that character or a part of it, or it is the space before it, as a word's own first token often is.
    """
    begin_N, end_N = np.array(side.encoding.offsets).T
    end_N = np.maximum.accumulate(end_N)  # a normaliser may have moved an accent
    word = np.array(characters, dtype=np.int64)
    space = word - np.array([side.text[i - 1 : i] == " " for i in characters], dtype=np.int64)
    plain, wider = (np.searchsorted(end_N, places, side="right") for places in (word, space))
    last = len(end_N) - 1  # beyond which a word lies that the tokenizer drops
    wider = np.minimum(wider, last)
    return np.where(begin_N[wider] == space, wider, np.minimum(plain, last))


def sentence_ends(sides: Sequence[Side], language: str) -> np.ndarray:
    """For each token of some texts, one text after the other: is it the last of a sentence?

    That is the last token which begins before the end of the sentence; the last sentence ends with its text. All
    texts are done at once by placing their characters on one line.
    """
    if not sides:
        return np.zeros(0, dtype=bool)
    starts, _ = offsets_on_a_line(sides)
    ends: list[int] = []
    place = 0
    for side in sides:
        ends += [place + edge for edge in sentence_edges(side.text, language)[:-1]]
        place += len(side.text)
        ends.append(place)
    starts_N = np.maximum.accumulate(starts)  # a normaliser may have moved an accent
    last = np.searchsorted(starts_N, ends, side="left") - 1
    is_end = np.zeros(len(starts_N), dtype=bool)
    is_end[last[last >= 0]] = True
    return is_end


def in_spans(sides: Sequence[Side], find: Salient) -> np.ndarray:
    """For each token of some texts, one text after the other: does it share a character with a span that is found?"""
    if not sides:
        return np.zeros(0, dtype=bool)
    starts_N, ends_N = offsets_on_a_line(sides)
    change = np.zeros(sum(len(side.text) for side in sides) + 1, dtype=np.int64)
    place = 0
    for side in sides:
        spans = place + checked_spans(find(side.text), side)
        np.add.at(change, spans[:, 0], 1)
        np.add.at(change, spans[:, 1], -1)
        place += len(side.text)
    before = np.concatenate([[0], np.cumsum(np.cumsum(change) > 0)])  # how many salient characters come before one
    return before[ends_N] > before[starts_N]


def checked_spans(spans: Sequence[tuple[int, int]], side: Side) -> np.ndarray:
    """Spans as an array (n, 2); what a user's function gives may be anything."""
    try:
        found = np.array([[index(start), index(end)] for start, end in spans], dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise UserError(
            f"{side.document.source}: salient spans must be a list of (start, end), not {repr(spans)[:60]}."
        ) from None
    wrong = (found[:, 0] < 0) | (found[:, 0] >= found[:, 1]) | (found[:, 1] > len(side.text))
    if wrong.any():
        start, end = found[wrong][0].tolist()
        raise UserError(
            f"{side.document.source}: the salient span ({start}, {end}) is empty or outside of its text, which has "
            f"{len(side.text):,} characters."
        )
    return found


def offsets_on_a_line(sides: Sequence[Side]) -> tuple[np.ndarray, np.ndarray]:
    """Where each token begins and ends, in characters, when the texts lie end to end."""
    place = np.cumsum([0] + [len(side.text) for side in sides[:-1]])
    flat = chain.from_iterable(chain.from_iterable(side.encoding.offsets) for side in sides)
    sizes = [len(side.encoding) for side in sides]
    starts_N, ends_N = np.fromiter(flat, np.int64, 2 * sum(sizes)).reshape(-1, 2).T + np.repeat(place, sizes)
    return starts_N, ends_N


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
