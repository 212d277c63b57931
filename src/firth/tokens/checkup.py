"""What is in a text: one pass over any number of documents, in bounded memory."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from typing import Any, NamedTuple

import numpy as np

from firth.console import progress
from firth.text import Document, fingerprint
from firth.text.bounded import BoundedCounts
from firth.text.corpus import position_of
from firth.text.near import NearDuplicates
from firth.text.scripts import script_of, words_of

MAX_WORDS, MAX_DOCUMENTS, MAX_LINES = 1_000_000, 500_000, 300_000  # different ones that are kept
NEAR_DOCUMENTS = 200_000  # different ones, the first, among which near duplicates are looked for
NEAR_MEMORY = 2**27  # bytes
SAMPLE = 2_000_000  # characters that tokenizers are compared on
SAMPLE_DOCUMENT = 100_000  # characters of a document that go to the sample
BATCH = 1 << 20  # characters
LONG_WORD = 40
KEPT = 100  # characters of a word, or of a line, that are kept
SHOWN = 10  # of a list
WINDOW = 1000  # words over which the standardised type/token ratio is taken
COMMON_LINE = 5  # documents from which on a line is taken for boilerplate
LETTERS = 0.5  # a document with a smaller share of letters is hardly text
QUANTILES = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
CODE_POINTS = 0x110000


class Suspicion(NamedTuple):
    """A pattern that clean text has not, and what it usually comes from."""

    name: str
    pattern: re.Pattern[str]
    meaning: str


# All begin with what is rare, so that clean text is passed over quickly.
# UTF-8 that was read as Latin-1 or Windows-1252: the first byte of a character of two to four, then the others.
REST = "[\u0080-\u00bf€ƒˆ†‡•…‰‹›™ŒœŠšŽž˜]"
SUSPICIONS = [
    Suspicion(
        "control characters",
        re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]"),
        "bytes that are no text: binary data, or a wrong encoding",
    ),
    Suspicion("replacement characters", re.compile("\ufffd"), "something was decoded wrongly before, and is lost"),
    Suspicion(
        "mojibake",
        re.compile(
            "[ÂÃÐÑâàáãïð](?:(?<=[ÂÃÐÑ])[\u0080-\u00bf]|"
            f"(?<=[ÃÐÑ]){REST}|(?<=[âàáã]){REST}[{REST[1:-1]}“”]|(?<=ï)»¿|(?<=ð)Ÿ{REST})"
        ),
        "UTF-8 that was read as Latin-1 (é became Ã©): read the original again with the right --encoding",
    ),
    Suspicion(
        "invisible characters",
        re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff]"),
        "soft hyphens, zero-width spaces, marks of direction: they split words in ways that nobody sees",
    ),
    Suspicion("private characters", re.compile("[\ue000-\uf8ff]"), "mean something in one font only, as in PDFs"),
    Suspicion(
        "HTML",
        re.compile(
            r"[&<](?:(?<=&)(?:amp|lt|gt|quot|nbsp|#\d+);|"
            r"(?<=<)/?(?:p|br|div|span|a|li|td|tr|table|b|i|em|img|script)\b[^<>]*>)"
        ),
        "tags and entities of web pages: take the text out of them first",
    ),
    Suspicion("web addresses", re.compile(r"(?:https?://|www\.)[^\s<>\"]+"), "long, rare strings that teach little"),
    Suspicion(
        "e-mail addresses",
        re.compile(r"@(?<=[\w.+-]@)[\w-]{1,63}(?:\.[\w-]{2,63}){1,4}"),
        "personal data: a model can learn them by heart",
    ),
    Suspicion(
        "words cut at a line end", re.compile(r"-\n(?<=[^\W\d_]-\n)[^\W\d_]"), "as in scanned pages: join them first"
    ),
    Suspicion("very long words", re.compile(rf"\b\w{{{LONG_WORD + 1},}}"), f"over {LONG_WORD} letters: keys, codes"),
]


class Seen(NamedTuple):
    """A document in a list of the longest or the emptiest."""

    words: int
    characters: int
    source: str
    text: str

    def plain(self) -> dict[str, Any]:
        return self._asdict()


class Sampled(NamedTuple):
    """A document of the sample: its beginning, and how many characters all of it has."""

    document: Document
    characters: int


class Lengths:
    """How long things are, in bounded memory: lengths over a thousand are kept to three digits.

    >>> lengths = Lengths()
    >>> lengths.add([1, 2, 3, 12345])
    >>> lengths.quantile(0.5), lengths.largest, lengths.mean
    (2, 12345, 3087.75)
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.number = self.sum = self.largest = 0

    def add(self, lengths: Sequence[int]) -> None:
        self.counts.update(map(three_digits, lengths))
        self.number += len(lengths)
        self.sum += sum(lengths)
        self.largest = max(self.largest, *lengths, 0)

    @property
    def mean(self) -> float:
        return self.sum / max(self.number, 1)

    def quantile(self, share: float) -> int:
        """The smallest length that this share of all things does not exceed."""
        left = share * self.number
        for length in sorted(self.counts):
            left -= self.counts[length]
            if left <= 0:
                return length
        return 0

    def plain(self) -> dict[str, float]:
        return {"mean": self.mean, **{n: self.quantile(q) for n, q in QUANTILES.items()}, "largest": self.largest}


def three_digits(n: int) -> int:
    """
    >>> three_digits(987), three_digits(12345)
    (987, 12300)
    """
    if n < 1000:
        return n
    step = 10 ** (len(str(n)) - 3)
    return n // step * step


@dataclass
class Finding:
    """How often a suspicious thing was found, in how many documents, and the first place of each kind."""

    count: int = 0
    documents: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)

    def add(self, count: int, text: str, source: str) -> None:
        self.count += count
        self.documents += 1
        if len(self.examples) < 3:
            self.examples.append({"text": text, "source": source})


class Sample:
    """Different documents of at most `budget` characters together: those with the smallest fingerprints.

    So it is everything while everything fits, and then as fair a choice as a lottery, the same in every run.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.characters = budget, 0
        self.documents: dict[bytes, Sampled] = {}
        self.largest: list[tuple[int, bytes]] = []  # a heap, the largest fingerprint first
        self.bound = -(1 << 128)  # a larger fingerprint was dropped already

    def add(self, mark: bytes, document: Document) -> None:
        place = -int.from_bytes(mark, "big")
        if mark in self.documents or place < self.bound:
            return
        self.documents[mark] = Sampled(beginning(document), sum(map(len, document.sides)))
        self.characters += len(self.documents[mark].document.text)
        heappush(self.largest, (place, mark))
        while self.characters > self.budget and len(self.documents) > 1:
            self.bound, last = heappop(self.largest)
            self.characters -= len(self.documents.pop(last).document.text)


def beginning(document: Document) -> Document:
    """A document as one text, cut if it is long."""
    text = "\n".join(document.sides)[:SAMPLE_DOCUMENT]
    starts = document.word_starts
    return Document(text, document.source, starts and tuple(s for s in starts if s < len(text)))


class Checkup:
    """Reads documents and counts. `facts` is what was found; `sample` is for the comparison of tokenizers."""

    def __init__(self, sample: int = SAMPLE) -> None:
        self.words: BoundedCounts[str] = BoundedCounts(MAX_WORDS)
        self.documents: BoundedCounts[bytes] = BoundedCounts(MAX_DOCUMENTS)
        self.lines: BoundedCounts[str] = BoundedCounts(MAX_LINES)
        self.code_points = np.zeros(CODE_POINTS, dtype=np.int64)
        self.document_words, self.line_characters = Lengths(), Lengths()
        self.characters = self.bytes = self.blank_lines = self.paragraphs = 0
        self.longest: list[Seen] = []
        self.emptiest: list[Seen] = []
        self.long_words: dict[str, str] = {}
        self.findings = {suspicion.name: Finding() for suspicion in SUSPICIONS}
        self.findings |= {"not normalised": Finding(), "hardly text": Finding()}
        self.windows, self.window_types = 0, 0  # how many windows of words were full, and their types together
        self.window: deque[str] = deque()
        self.growth: list[tuple[int, int]] = []
        self.near, self.near_documents = NearDuplicates(max_memory=NEAR_MEMORY), 0
        self.near_examples: list[dict[str, str]] = []
        self.sample = Sample(sample)

    def read(self, batch: Sequence[Document]) -> None:
        """Count a group of documents; what concerns characters alone is done for all of them at once."""
        texts = ["\n".join(document.sides) for document in batch]
        together = "".join(texts)
        self.characters += len(together)
        self.bytes += len(together.encode("utf-8", "surrogatepass"))
        points = np.frombuffer(together.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        found = np.bincount(points)
        self.code_points[: len(found)] += found
        for document, text in zip(batch, texts, strict=True):
            self._read_words(document, text)
            self._read_lines(text)
        self._suspect(batch, texts)

    def _read_words(self, document: Document, text: str) -> None:
        words = words_of(document)
        self.document_words.add([len(words)])
        seen = Seen(len(words), len(text), document.source, short(text))
        self.longest = nlargest(SHOWN, [*self.longest, seen], key=lambda s: (s.characters, s.words))
        self.emptiest = nlargest(SHOWN, [*self.emptiest, seen], key=lambda s: (-s.words, -s.characters))
        for word in words:
            if len(word) > LONG_WORD:
                self.long_words.setdefault(short(word), document.source)
        if len(self.long_words) > SHOWN:
            kept = sorted(self.long_words, key=len, reverse=True)[:SHOWN]
            self.long_words = {word: self.long_words[word] for word in kept}
        words = [word if len(word) <= KEPT else short(word) for word in words]
        self.words.add(words)
        self._standard_ratio(words)
        if not self.growth or self.words.total >= 1.15 * self.growth[-1][0]:
            self._grow()
        mark = fingerprint(text)
        self.documents.add([mark])
        self.sample.add(mark, document)
        if self.documents.counts[mark] == 1 and self.near_documents < NEAR_DOCUMENTS:
            self.near_documents += 1
            if self.near.seen(text):
                self.near_examples.append({"text": short(text), "source": document.source})
                del self.near_examples[SHOWN:]

    def _grow(self) -> None:
        if self.words.total and (not self.growth or self.growth[-1][0] < self.words.total):
            self.growth.append((self.words.total, self.words.distinct()))

    def _standard_ratio(self, words: list[str]) -> None:
        self.window.extend(words)
        while len(self.window) >= WINDOW:
            self.windows += 1
            self.window_types += len({self.window.popleft() for _ in range(WINDOW)})

    def _read_lines(self, text: str) -> None:
        lines = text.split("\n")
        self.line_characters.add([len(line) for line in lines])
        filled = [line.strip() for line in lines]
        self.blank_lines += filled.count("")
        self.paragraphs += sum(bool(line) and not before for before, line in zip(["", *filled], filled, strict=False))
        if len(lines) > 1:  # a line that is a document is a duplicate, not boilerplate
            self.lines.add({line for line in filled if 10 <= len(line) <= KEPT})

    def _suspect(self, batch: Sequence[Document], texts: Sequence[str]) -> None:
        """Look for suspicious things in all texts at once, and only where one is found in each of them."""
        together = "\n\n".join(texts)
        there = [suspicion for suspicion in SUSPICIONS if suspicion.pattern.search(together)]
        normal = unicodedata.is_normalized("NFC", together)
        for document, text in zip(batch, texts, strict=True):
            for name, pattern, _ in there:
                if matches := [match.span() for match in pattern.finditer(text)]:
                    self.findings[name].add(len(matches), around(text, *matches[0]), document.source)
            if not normal and not unicodedata.is_normalized("NFC", text):
                self.findings["not normalised"].add(1, short(text), document.source)
            if sum(map(str.isalpha, text[:KEPT])) < LETTERS * len(text[:KEPT]) and mostly_other(text):
                self.findings["hardly text"].add(1, short(text), document.source)

    # What was found

    def facts(self) -> dict[str, Any]:
        """Every number, under names that scripts can rely on."""
        self._grow()
        counts, weights = self.words.spectrum()
        types, documents = self.words.distinct(), self.documents
        duplicates, times = repeats(documents), self.document_words.number
        return {
            "documents": times,
            "words": self.words.total,
            "characters": self.characters,
            "bytes": self.bytes,
            "lines": self.line_characters.number,
            "blank_lines": self.blank_lines,
            "paragraphs": self.paragraphs,
            "document_words": self.document_words.plain(),
            "line_characters": self.line_characters.plain(),
            "scripts": self.scripts(),
            "different_characters": int((self.code_points > 0).sum()),
            "types": types,
            "once": int(weights[counts == 1].sum()),
            "type_token_ratio": types / max(self.words.total, 1),
            "type_token_ratio_1000": self.window_types / (WINDOW * self.windows) if self.windows else None,
            "entropy": entropy(counts, weights),
            "character_entropy": entropy(self.code_points[self.code_points > 0]),
            "frequent": [{"word": w, "count": n} for w, n in self.words.most_common(30)],
            "zipf": zipf(counts, weights),
            "heaps": heaps(self.growth),
            "duplicates": duplicates,
            "duplicate_share": duplicates / max(times, 1),
            "near_duplicates": {
                "documents": self.near.duplicates,
                "share": self.near.duplicates / max(self.near_documents, 1),
                "of": self.near_documents,
                "examples": self.near_examples,
            },
            "longest": [seen.plain() for seen in self.longest],
            "emptiest": [seen.plain() for seen in self.emptiest],
            "suspicious": self.suspicious(),
            "long_words": [{"word": word, "source": source} for word, source in self.long_words.items()],
            "repeated_lines": self.repeated_lines(),
            "words_are_exact": self.words.is_exact,
            "duplicates_are_exact": documents.is_exact,
        }

    def scripts(self) -> dict[str, float]:
        """Of the letters, the share of each script."""
        found: Counter[str] = Counter()
        for point in np.flatnonzero(self.code_points):
            if script := script_of(chr(point)):
                found[script] += int(self.code_points[point])
        return {script: n / found.total() for script, n in found.most_common()}

    def suspicious(self) -> list[dict[str, Any]]:
        """Those of the suspicious things that are there."""
        meanings = {s.name: s.meaning for s in SUSPICIONS} | {
            "not normalised": "letters and accents apart (not NFC): the same word in two spellings",
            "hardly text": f"documents in which fewer than {LETTERS:.0%} of the characters are letters",
        }
        return [
            {"name": name, "meaning": meanings[name], **vars(finding)}
            for name, finding in self.findings.items()
            if finding.count
        ]

    def repeated_lines(self) -> list[dict[str, Any]]:
        least = max(COMMON_LINE, self.document_words.number // 1000)
        return [{"line": line, "documents": n} for line, n in self.lines.most_common(SHOWN) if n >= least]


def checkup(
    documents: Iterable[Document],
    total_bytes: int | None = None,
    sample: int = SAMPLE,
    look: Callable[[Document], None] | None = None,
) -> Checkup:
    """Read all documents, with a progress line; `look` sees each of them as well."""
    found = Checkup(sample)
    for batch in batches(documents, total_bytes):
        found.read(batch)
        if look is not None:
            for document in batch:
                look(document)
    return found


def batches(documents: Iterable[Document], total_bytes: int | None) -> Iterator[list[Document]]:
    """Documents in groups of about a million characters, with a progress line."""
    known = total_bytes is not None and position_of(documents) is not None
    with progress("reading", "bytes" if known else "documents", total_bytes if known else None) as p:
        batch: list[Document] = []
        characters = 0
        for document in documents:
            batch.append(document)
            characters += sum(map(len, document.sides))
            if characters >= BATCH:
                yield batch
                p.advance((position_of(documents) or 0) - p.done if known else len(batch))
                batch, characters = [], 0
        if batch:
            yield batch


def short(text: str) -> str:
    """The beginning of a text on one line.

    >>> short("one\\n  two"), len(short("x" * 1000))
    ('one two', 100)
    """
    line = " ".join(text[: 2 * KEPT].split())
    return line if len(line) <= KEPT and len(text) <= 2 * KEPT else line[: KEPT - 1] + "…"


def around(text: str, start: int, end: int) -> str:
    """A place in a text with its neighbourhood."""
    return short(text[max(start - 20, 0) : min(end, start + 60) + 20])


def mostly_other(text: str) -> bool:
    """Whether letters and their marks are the smaller part of what is not space."""
    visible = "".join(text.split())
    letters = sum(unicodedata.category(c)[0] in "LM" for c in visible)
    return letters < LETTERS * len(visible)


def repeats(counts: BoundedCounts[bytes]) -> int:
    """How many came that had been there before."""
    numbers, weights = counts.spectrum()
    return int(((numbers - 1) * weights).sum())


def entropy(counts: np.ndarray, weights: np.ndarray | None = None) -> float:
    """In bits: how much one of these things, drawn as often as it was counted, tells.

    >>> entropy(np.array([2, 1, 1]))
    1.5
    """
    weights = np.ones_like(counts) if weights is None else weights
    total = (counts * weights).sum()
    if not total:
        return 0.0
    share = counts / total
    return max(float(-(weights * share * np.log2(share)).sum()), 0.0)


def zipf(counts: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    """How fast counts fall with rank: count ~ rank ** -exponent, fitted where the law is known to hold.

    The most frequent ten words are left out, and those seen fewer than five times, which stand in steps. Points are
    spread evenly over the logarithm of the rank, so that the many rare words do not decide alone.
    """
    if not len(counts):
        return {"exponent": None, "points": [], "from_rank": 0, "to_rank": 0}
    last = np.cumsum(weights)
    ranks = np.unique(np.geomspace(1, last[-1], 120).astype(np.int64))
    heights = counts[np.searchsorted(last, ranks)]
    used = (ranks >= 10) & (heights >= 5)
    line = fit(ranks[used], heights[used])
    return {
        "exponent": -line[0] if line else None,
        "factor": line[1] if line else None,
        "from_rank": int(ranks[used].min()) if line else 0,
        "to_rank": int(ranks[used].max()) if line else 0,
        "points": [[int(r), int(h)] for r, h in zip(ranks, heights, strict=True)],
    }


def heaps(growth: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """How the number of different words grows with the text: types ~ factor * words ** exponent."""
    points = np.array([(n, types) for n, types in growth if n >= 1000], dtype=np.int64).reshape(-1, 2)
    line = fit(points[:, 0], points[:, 1])
    return {
        "exponent": line[0] if line else None,
        "factor": line[1] if line else None,
        "points": [[n, types] for n, types in growth],
    }


def fit(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """A power law through some points: exponent and factor. None where there are too few."""
    if len(x) < 5:
        return None
    slope, height = np.polyfit(np.log(x), np.log(y), 1)
    return float(slope), math.exp(float(height))
