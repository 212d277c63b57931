"""Statistics of a corpus in one pass and bounded memory: sizes, words, duplicates, suspicious characters, samples."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import progress
from firth.text import Document, text_fingerprint
from firth.text.bounded_counts import BoundedCounts
from firth.text.corpus import corpus_bytes_read
from firth.text.minhash import MinHashIndex
from firth.text.normalize import INVISIBLE_REGEX, NORMALIZERS
from firth.text.scripts import detect_script, get_document_words

MAX_DISTINCT_WORDS = 1_000_000  # distinct words with a count of their own
MAX_DISTINCT_DOCUMENTS = 500_000  # distinct documents, likewise
MAX_DISTINCT_LINES = 300_000  # distinct lines, likewise
MAX_NEAR_DOCUMENTS = 200_000  # distinct documents, the first, that are searched for near duplicates
NEAR_DEDUP_BYTES = 2**27  # bytes of the near-duplicate index
SAMPLE_CHARS = 2_000_000  # characters of the sample on which tokenizers are compared
SAMPLE_DOCUMENT_CHARS = 100_000  # characters of one document in the sample
BATCH_CHARS = 1 << 20  # characters of documents that are counted together
LONG_WORD_CHARS = 40  # characters: a longer word is listed
EXCERPT_CHARS = 100  # characters of an excerpt of a word or a line
MAX_LISTED_DOCUMENTS = 10  # entries of a list
MAX_LISTED_SPELLINGS = 3  # words of which the spellings are shown
TYPE_TOKEN_WINDOW_WORDS = 1000  # words per window of the standardised type/token ratio
MIN_BOILERPLATE_DOCUMENTS = 5  # documents: a line in as many is boilerplate
MIN_LETTER_SHARE = 0.5  # share of letters below which a document is hardly text
LENGTH_QUANTILES = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
NUM_CODE_POINTS = 0x110000
# Normal forms that join spellings of a word which look the same, and what differs in them.
SPELLING_FORMS = {
    "nfc": "letters and accents composed or apart",
    "apostrophes": "typewriter and typographic apostrophes",
    "hyphens": "hyphens of several kinds",
    "lookalikes": "letters of another script that look the same",
}


class SuspiciousPattern(NamedTuple):
    """A pattern that clean text does not have, and its usual cause."""

    name: str
    pattern: re.Pattern[str]
    meaning: str


# Each pattern begins with rare characters, so that the search skips clean text quickly.
# UTF-8 that was read as Latin-1 or Windows-1252: the first byte of a character of two to four, then the others.
MOJIBAKE_CONTINUATION = "[\u0080-\u00bf€ƒˆ†‡•…‰‹›™ŒœŠšŽž˜]"
SUSPICIOUS_PATTERNS = [
    SuspiciousPattern(
        "control characters",
        re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]"),
        "bytes that are not text: binary data, or a wrong encoding",
    ),
    SuspiciousPattern(
        "replacement characters", re.compile("\ufffd"), "text that was decoded wrongly before, and is lost"
    ),
    SuspiciousPattern(
        "mojibake",
        re.compile(
            "[ÂÃÐÑâàáãïð](?:(?<=[ÂÃÐÑ])[\u0080-\u00bf]|"
            f"(?<=[ÃÐÑ]){MOJIBAKE_CONTINUATION}|(?<=[âàáã]){MOJIBAKE_CONTINUATION}[{MOJIBAKE_CONTINUATION[1:-1]}“”]|(?<=ï)»¿|(?<=ð)Ÿ{MOJIBAKE_CONTINUATION})"
        ),
        "UTF-8 that was read as Latin-1 (é became Ã©): read the original again with the right --encoding",
    ),
    SuspiciousPattern(
        "invisible characters",
        re.compile(INVISIBLE_REGEX),
        "soft hyphens, zero-width spaces, marks of direction: they split words invisibly (--normalize invisible)",
    ),
    SuspiciousPattern(
        "private characters", re.compile("[\ue000-\uf8ff]"), "mean something in one font only, as in PDFs"
    ),
    SuspiciousPattern(
        "HTML",
        re.compile(
            r"[&<](?:(?<=&)(?:amp|lt|gt|quot|nbsp|#\d+);|"
            r"(?<=<)/?(?:p|br|div|span|a|li|td|tr|table|b|i|em|img|script)\b[^<>]*>)"
        ),
        "tags and entities of web pages: take the text out of them first",
    ),
    SuspiciousPattern(
        "web addresses", re.compile(r"(?:https?://|www\.)[^\s<>\"]+"), "long, rare strings that teach little"
    ),
    SuspiciousPattern(
        "e-mail addresses",
        re.compile(r"@(?<=[\w.+-]@)[\w-]{1,63}(?:\.[\w-]{2,63}){1,4}"),
        "personal data: a model can learn them by heart",
    ),
    SuspiciousPattern(
        "words cut at a line end", re.compile(r"-\n(?<=[^\W\d_]-\n)[^\W\d_]"), "as in scanned pages: join them first"
    ),
    SuspiciousPattern(
        "very long words",
        re.compile(rf"\b\w{{{LONG_WORD_CHARS + 1},}}"),
        f"over {LONG_WORD_CHARS} letters: keys, codes",
    ),
]


class ListedDocument(NamedTuple):
    """A document in a list of the longest or the emptiest."""

    words: int
    characters: int
    source: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()


class SampledDocument(NamedTuple):
    """A document of the sample: its beginning, and the number of characters of all of it."""

    document: Document
    characters: int


class LengthHistogram:
    """Histogram of lengths in bounded memory: lengths of 1000 and more keep three digits.

    >>> lengths = LengthHistogram()
    >>> lengths.add([1, 2, 3, 12345])
    >>> lengths.quantile(0.5), lengths.largest, lengths.mean
    (2, 12345, 3087.75)
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.count = self.total = self.largest = 0

    def add(self, lengths: Sequence[int]) -> None:
        self.counts.update(map(truncate_to_three_digits, lengths))
        self.count += len(lengths)
        self.total += sum(lengths)
        self.largest = max(self.largest, *lengths, 0)

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    def quantile(self, share: float) -> int:
        """Return the smallest length that this share of the items does not exceed."""
        left = share * self.count
        for length in sorted(self.counts):
            left -= self.counts[length]
            if left <= 0:
                return length
        return 0

    def to_dict(self) -> dict[str, float]:
        return {
            "mean": self.mean,
            **{n: self.quantile(q) for n, q in LENGTH_QUANTILES.items()},
            "largest": self.largest,
        }


def truncate_to_three_digits(n: int) -> int:
    """
    >>> truncate_to_three_digits(987), truncate_to_three_digits(12345)
    (987, 12300)
    """
    if n < 1000:
        return n
    step = 10 ** (len(str(n)) - 3)
    return n // step * step


@dataclass
class Finding:
    """Number of matches of a suspicious pattern, number of documents with one, and the first examples."""

    count: int = 0
    documents: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)

    def add(self, count: int, text: str, source: str) -> None:
        self.count += count
        self.documents += 1
        if len(self.examples) < 3:
            self.examples.append({"text": text, "source": source})


class DocumentSample:
    """Distinct documents of at most `max_characters` together: those with the smallest fingerprints.

    A small corpus is kept whole. Of a large one this is a uniform sample, the same in every run.
    """

    def __init__(self, max_characters: int) -> None:
        self.max_characters, self.characters = max_characters, 0
        self.documents: dict[bytes, SampledDocument] = {}
        self.fingerprint_heap: list[tuple[int, bytes]] = []  # the largest fingerprint, negated, first
        self.cutoff = -(1 << 128)  # negated: larger fingerprints have been dropped

    def add(self, text_fingerprint: bytes, document: Document) -> None:
        key = -int.from_bytes(text_fingerprint, "big")
        if text_fingerprint in self.documents or key < self.cutoff:
            return
        self.documents[text_fingerprint] = SampledDocument(truncate_document(document), sum(map(len, document.texts)))
        self.characters += len(self.documents[text_fingerprint].document.text)
        heappush(self.fingerprint_heap, (key, text_fingerprint))
        while self.characters > self.max_characters and len(self.documents) > 1:
            self.cutoff, last = heappop(self.fingerprint_heap)
            self.characters -= len(self.documents.pop(last).document.text)


def truncate_document(document: Document) -> Document:
    """Return a document as one text, truncated to `SAMPLE_DOCUMENT_CHARS`."""
    text = "\n".join(document.texts)[:SAMPLE_DOCUMENT_CHARS]
    starts = document.word_starts
    return Document(text, document.source, starts and tuple(s for s in starts if s < len(text)))


class CorpusCheckup:
    """Counts documents; `facts` returns the results. The sample has `sample_characters` characters."""

    def __init__(self, sample_characters: int = SAMPLE_CHARS) -> None:
        self.word_counts: BoundedCounts[str] = BoundedCounts(MAX_DISTINCT_WORDS)
        self.document_counts: BoundedCounts[bytes] = BoundedCounts(MAX_DISTINCT_DOCUMENTS)
        self.line_counts: BoundedCounts[str] = BoundedCounts(MAX_DISTINCT_LINES)
        self.code_point_counts = np.zeros(NUM_CODE_POINTS, dtype=np.int64)
        self.document_words, self.line_characters = LengthHistogram(), LengthHistogram()
        self.num_characters = self.num_bytes = self.num_blank_lines = self.num_paragraphs = 0
        self.longest_documents: list[ListedDocument] = []
        self.emptiest_documents: list[ListedDocument] = []
        self.long_words: dict[str, str] = {}
        self.findings = {suspicion.name: Finding() for suspicion in SUSPICIOUS_PATTERNS}
        self.findings |= {"not normalised": Finding(), "hardly text": Finding()}
        self.num_windows, self.window_types = 0, 0  # full windows, and the sum of their distinct words
        self.window_words: deque[str] = deque()
        self.vocabulary_growth: list[tuple[int, int]] = []
        self.near_dedup, self.num_near_documents = MinHashIndex(max_bytes=NEAR_DEDUP_BYTES), 0
        self.near_examples: list[dict[str, str]] = []
        self.sample = DocumentSample(sample_characters)

    def add_documents(self, batch: Sequence[Document]) -> None:
        """Count documents; characters are counted for all of them at once."""
        texts = ["\n".join(document.texts) for document in batch]
        together = "".join(texts)
        self.num_characters += len(together)
        self.num_bytes += len(together.encode("utf-8", "surrogatepass"))
        points = np.frombuffer(together.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        counts = np.bincount(points)
        self.code_point_counts[: len(counts)] += counts
        for document, text in zip(batch, texts, strict=True):
            self._count_words(document, text)
            self._count_lines(text)
        self._find_suspicious(batch, texts)

    def _count_words(self, document: Document, text: str) -> None:
        words = get_document_words(document)
        self.document_words.add([len(words)])
        listed = ListedDocument(len(words), len(text), document.source, make_excerpt(text))
        self.longest_documents = nlargest(
            MAX_LISTED_DOCUMENTS, [*self.longest_documents, listed], key=lambda s: (s.characters, s.words)
        )
        self.emptiest_documents = nlargest(
            MAX_LISTED_DOCUMENTS, [*self.emptiest_documents, listed], key=lambda s: (-s.words, -s.characters)
        )
        for word in words:
            if len(word) > LONG_WORD_CHARS:
                self.long_words.setdefault(make_excerpt(word), document.source)
        if len(self.long_words) > MAX_LISTED_DOCUMENTS:
            kept = sorted(self.long_words, key=len, reverse=True)[:MAX_LISTED_DOCUMENTS]
            self.long_words = {word: self.long_words[word] for word in kept}
        words = [word if len(word) <= EXCERPT_CHARS else make_excerpt(word) for word in words]
        self.word_counts.add(words)
        self._update_type_token_ratio(words)
        if not self.vocabulary_growth or self.word_counts.total >= 1.15 * self.vocabulary_growth[-1][0]:
            self._record_growth()
        fingerprint = text_fingerprint(text)
        self.document_counts.add([fingerprint])
        self.sample.add(fingerprint, document)
        if self.document_counts.counts[fingerprint] == 1 and self.num_near_documents < MAX_NEAR_DOCUMENTS:
            self.num_near_documents += 1
            if self.near_dedup.check_and_add(text):
                self.near_examples.append({"text": make_excerpt(text), "source": document.source})
                del self.near_examples[MAX_LISTED_DOCUMENTS:]

    def _record_growth(self) -> None:
        if self.word_counts.total and (
            not self.vocabulary_growth or self.vocabulary_growth[-1][0] < self.word_counts.total
        ):
            self.vocabulary_growth.append((self.word_counts.total, self.word_counts.num_distinct()))

    def _update_type_token_ratio(self, words: list[str]) -> None:
        self.window_words.extend(words)
        while len(self.window_words) >= TYPE_TOKEN_WINDOW_WORDS:
            self.num_windows += 1
            self.window_types += len({self.window_words.popleft() for _ in range(TYPE_TOKEN_WINDOW_WORDS)})

    def _count_lines(self, text: str) -> None:
        lines = text.split("\n")
        self.line_characters.add([len(line) for line in lines])
        filled = [line.strip() for line in lines]
        self.num_blank_lines += filled.count("")
        self.num_paragraphs += sum(
            bool(line) and not before for before, line in zip(["", *filled], filled, strict=False)
        )
        if len(lines) > 1:  # a line that is a document is a duplicate, not boilerplate
            self.line_counts.add({line for line in filled if 10 <= len(line) <= EXCERPT_CHARS})

    def _find_suspicious(self, batch: Sequence[Document], texts: Sequence[str]) -> None:
        """Search all texts at once, then each text only for the patterns that were found."""
        together = "\n\n".join(texts)
        present = [suspicion for suspicion in SUSPICIOUS_PATTERNS if suspicion.pattern.search(together)]
        normal = unicodedata.is_normalized("NFC", together)
        for document, text in zip(batch, texts, strict=True):
            for name, pattern, _ in present:
                if matches := [match.span() for match in pattern.finditer(text)]:
                    self.findings[name].add(len(matches), excerpt_around(text, *matches[0]), document.source)
            if not normal and not unicodedata.is_normalized("NFC", text):
                self.findings["not normalised"].add(1, make_excerpt(text), document.source)
            if sum(map(str.isalpha, text[:EXCERPT_CHARS])) < MIN_LETTER_SHARE * len(
                text[:EXCERPT_CHARS]
            ) and is_mostly_non_letters(text):
                self.findings["hardly text"].add(1, make_excerpt(text), document.source)

    # --- results

    def facts(self) -> dict[str, Any]:
        """Return all statistics, under names that scripts rely on."""
        self._record_growth()
        counts, weights = self.word_counts.frequency_spectrum()
        types, documents = self.word_counts.num_distinct(), self.document_counts
        duplicates, num_documents = count_repeats(documents), self.document_words.count
        return {
            "documents": num_documents,
            "words": self.word_counts.total,
            "characters": self.num_characters,
            "bytes": self.num_bytes,
            "lines": self.line_characters.count,
            "blank_lines": self.num_blank_lines,
            "paragraphs": self.num_paragraphs,
            "document_words": self.document_words.to_dict(),
            "line_characters": self.line_characters.to_dict(),
            "scripts": self.scripts(),
            "different_characters": int((self.code_point_counts > 0).sum()),
            "types": types,
            "once": int(weights[counts == 1].sum()),
            "type_token_ratio": types / max(self.word_counts.total, 1),
            "type_token_ratio_1000": self.window_types / (TYPE_TOKEN_WINDOW_WORDS * self.num_windows)
            if self.num_windows
            else None,
            "entropy": entropy_bits(counts, weights),
            "character_entropy": entropy_bits(self.code_point_counts[self.code_point_counts > 0]),
            "frequent": [{"word": w, "count": n} for w, n in self.word_counts.most_common(30)],
            "zipf": fit_zipf(counts, weights),
            "heaps": fit_heaps(self.vocabulary_growth),
            "duplicates": duplicates,
            "duplicate_share": duplicates / max(num_documents, 1),
            "near_duplicates": {
                "documents": self.near_dedup.num_duplicates,
                "share": self.near_dedup.num_duplicates / max(self.num_near_documents, 1),
                "of": self.num_near_documents,
                "examples": self.near_examples,
            },
            "longest": [seen.to_dict() for seen in self.longest_documents],
            "emptiest": [seen.to_dict() for seen in self.emptiest_documents],
            "suspicious": self.suspicious(),
            "long_words": [{"word": word, "source": source} for word, source in self.long_words.items()],
            "repeated_lines": self.repeated_lines(),
            "spellings": find_spelling_variants(self.word_counts.counts),
            "words_are_exact": self.word_counts.is_exact,
            "duplicates_are_exact": documents.is_exact,
        }

    def scripts(self) -> dict[str, float]:
        """Return the share of each script among the letters."""
        letters: Counter[str] = Counter()
        for point in np.flatnonzero(self.code_point_counts):
            if script := detect_script(chr(point)):
                letters[script] += int(self.code_point_counts[point])
        return {script: n / letters.total() for script, n in letters.most_common()}

    def suspicious(self) -> list[dict[str, Any]]:
        """Return the patterns that were found."""
        meanings = {s.name: s.meaning for s in SUSPICIOUS_PATTERNS} | {
            "not normalised": "letters and accents apart (not NFC): the same word in two spellings (--normalize nfc)",
            "hardly text": f"documents in which fewer than {MIN_LETTER_SHARE:.0%} of the characters are letters",
        }
        return [
            {"name": name, "meaning": meanings[name], **vars(finding)}
            for name, finding in self.findings.items()
            if finding.count
        ]

    def repeated_lines(self) -> list[dict[str, Any]]:
        least = max(MIN_BOILERPLATE_DOCUMENTS, self.document_words.count // 1000)
        return [
            {"line": line, "documents": n}
            for line, n in self.line_counts.most_common(MAX_LISTED_DOCUMENTS)
            if n >= least
        ]


def find_spelling_variants(word_counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return per normal form the words that it joins: how many, how often the rarer spelling occurs, and examples.

    A word that mixes two scripts counts also where its right spelling does not occur.

    >>> [(v["form"], v["words"], v["occurrences"]) for v in find_spelling_variants({"ng'ombe": 5, "ng’ombe": 2})]
    [('apostrophes', 1, 2)]
    """
    unusual, found = [word for word in word_counts if not word.isascii()], []
    for form, difference in SPELLING_FORMS.items():
        spellings: dict[str, set[str]] = {}
        for word in unusual:
            if (joined := NORMALIZERS[form](word)) != word:
                spellings.setdefault(joined, {joined}).add(word)
        variants = []
        for joined, group in spellings.items():
            ranked = sorted((w for w in group if w in word_counts), key=lambda w: (-word_counts[w], w))
            if len(ranked) > 1 or form == "lookalikes":
                rare = sum(word_counts[w] for w in (ranked[1:] if len(ranked) > 1 else ranked))
                variants.append((rare, joined, ranked))
        if variants:
            variants.sort(key=lambda variant: (-variant[0], variant[1]))
            found.append(
                {
                    "form": form,
                    "difference": difference,
                    "words": len(variants),
                    "occurrences": sum(rare for rare, *_ in variants),
                    "examples": [
                        {word: word_counts[word] for word in ranked} for *_, ranked in variants[:MAX_LISTED_SPELLINGS]
                    ],
                }
            )
    return found


def check_documents(
    documents: Iterable[Document],
    total_bytes: int | None = None,
    sample_characters: int = SAMPLE_CHARS,
    on_document: Callable[[Document], None] | None = None,
) -> CorpusCheckup:
    """Count all documents, with a progress line; `on_document` is called with each of them."""
    checkup = CorpusCheckup(sample_characters)
    for batch in batch_documents(documents, total_bytes):
        checkup.add_documents(batch)
        if on_document is not None:
            for document in batch:
                on_document(document)
    return checkup


def batch_documents(documents: Iterable[Document], total_bytes: int | None) -> Iterator[list[Document]]:
    """Yield documents in groups of `BATCH_CHARS` characters, with a progress line."""
    in_bytes = total_bytes is not None and corpus_bytes_read(documents) is not None
    with progress("reading", "bytes" if in_bytes else "documents", total_bytes if in_bytes else None) as p:
        batch: list[Document] = []
        characters = 0
        for document in documents:
            batch.append(document)
            characters += sum(map(len, document.texts))
            if characters >= BATCH_CHARS:
                yield batch
                p.advance((corpus_bytes_read(documents) or 0) - p.done if in_bytes else len(batch))
                batch, characters = [], 0
        if batch:
            yield batch


def make_excerpt(text: str) -> str:
    """Return the beginning of a text on one line.

    >>> make_excerpt("one\\n  two"), len(make_excerpt("x" * 1000))
    ('one two', 100)
    """
    line = " ".join(text[: 2 * EXCERPT_CHARS].split())
    return line if len(line) <= EXCERPT_CHARS and len(text) <= 2 * EXCERPT_CHARS else line[: EXCERPT_CHARS - 1] + "…"


def excerpt_around(text: str, start: int, end: int) -> str:
    """Return a span of a text with some context."""
    return make_excerpt(text[max(start - 20, 0) : min(end, start + 60) + 20])


def is_mostly_non_letters(text: str) -> bool:
    """Whether letters and combining marks are less than `MIN_LETTER_SHARE` of the visible characters."""
    visible = "".join(text.split())
    letters = sum(unicodedata.category(c)[0] in "LM" for c in visible)
    return letters < MIN_LETTER_SHARE * len(visible)


def count_repeats(counts: BoundedCounts[bytes]) -> int:
    """Number of items that repeat an earlier one."""
    numbers, weights = counts.frequency_spectrum()
    return int(((numbers - 1) * weights).sum())


def entropy_bits(counts: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Entropy in bits of a distribution given as counts; `weights` items have each count.

    >>> entropy_bits(np.array([2, 1, 1]))
    1.5
    """
    weights = np.ones_like(counts) if weights is None else weights
    total = (counts * weights).sum()
    if not total:
        return 0.0
    share = counts / total
    return max(float(-(weights * share * np.log2(share)).sum()), 0.0)


def fit_zipf(counts: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    """Fit Zipf's law: count ~ rank ** -exponent.

    The ten most frequent words are left out, and words of fewer than five occurrences, whose counts are steps. Points
    are spaced evenly in the logarithm of the rank, so that the many rare words do not dominate.
    """
    if not len(counts):
        return {"exponent": None, "points": [], "from_rank": 0, "to_rank": 0}
    last = np.cumsum(weights)
    ranks = np.unique(np.geomspace(1, last[-1], 120).astype(np.int64))
    heights = counts[np.searchsorted(last, ranks)]
    used = (ranks >= 10) & (heights >= 5)
    line = fit_power_law(ranks[used], heights[used])
    return {
        "exponent": -line[0] if line else None,
        "factor": line[1] if line else None,
        "from_rank": int(ranks[used].min()) if line else 0,
        "to_rank": int(ranks[used].max()) if line else 0,
        "points": [[int(r), int(h)] for r, h in zip(ranks, heights, strict=True)],
    }


def fit_heaps(growth: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Fit Heaps' law, the growth of the vocabulary with the text: types ~ factor * words ** exponent."""
    points = np.array([(n, types) for n, types in growth if n >= 1000], dtype=np.int64).reshape(-1, 2)
    line = fit_power_law(points[:, 0], points[:, 1])
    return {
        "exponent": line[0] if line else None,
        "factor": line[1] if line else None,
        "points": [[n, types] for n, types in growth],
    }


def fit_power_law(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Fit a power law: return exponent and factor; None for fewer than five points."""
    if len(x) < 5:
        return None
    slope, height = np.polyfit(np.log(x), np.log(y), 1)
    return float(slope), math.exp(float(height))
