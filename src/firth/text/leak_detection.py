"""Does the text that a model is trained on contain what it will be tested on?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from firth.text.documents import Document, Example
from firth.text.shingles import hash_word_ngrams, hash_words

LEAK_NGRAM_WORDS = 13  # words, as for GPT-3 (Brown et al. 2020, appendix C)
MIN_LEAK_TEXT_WORDS = 5  # words: what is shorter is in many texts by chance


class Leak(NamedTuple):
    """A labelled text that stands in a document: which example, how much of it, and in which document most of it."""

    example_id: str | int
    text: str
    share: float
    source: str
    example_index: int = 0  # its place among the examples, as two may have the same id


def find_leaks(
    documents: Iterable[Document], examples: Sequence[Example], ngram: int = LEAK_NGRAM_WORDS, min_share: float = 0.5
) -> list[Leak]:
    """The texts of labelled examples of which a share of `min_share` or more stands in the documents, worst first.

    Compared are runs of `ngram` words, whatever their case and punctuation; a text of fewer words is compared whole,
    one of fewer than 5 not at all. Documents are read once, one at a time; memory grows with the examples alone.
    """
    search = LeakFinder(examples, ngram)
    for document in documents:
        search.scan(document)
    return search.found_leaks(min_share)


class LeakFinder:
    """Looks for the texts of labelled examples in documents that pass by; see `find_leaks`."""

    def __init__(self, examples: Sequence[Example], ngram: int = LEAK_NGRAM_WORDS) -> None:
        self.texts = [(number, e.id, text) for number, e in enumerate(examples) for text in e.texts]
        words = [hash_words(text) for *_, text in self.texts]
        sizes = [min(len(w), ngram) for w in words]
        self.matches_by_ngram = {size: NgramMatches(size) for size in sorted(set(sizes)) if size >= MIN_LEAK_TEXT_WORDS}
        for place, (size, words_W) in enumerate(zip(sizes, words, strict=True)):
            if size >= MIN_LEAK_TEXT_WORDS:
                self.matches_by_ngram[size].add_text(place, words_W)
        self.num_examples = len(examples)
        self.num_compared = len(
            {self.texts[place][0] for hit in self.matches_by_ngram.values() for place in hit.ngrams_by_text}
        )

    def scan(self, document: Document) -> None:
        """Note which texts, or parts of them, stand in a document."""
        for text in document.texts:
            words_W = hash_words(text)
            for hit in self.matches_by_ngram.values():
                hit.scan(words_W, document.source)

    def found_leaks(self, min_share: float = 0.5) -> list[Leak]:
        """What was found so far, worst first."""
        found = []
        for place, share, source in (one for hit in self.matches_by_ngram.values() for one in hit.overlap_shares()):
            number, name, text = self.texts[place]
            if share >= min_share:
                found.append(Leak(name, text, share, source, number))
        return sorted(found, key=lambda leak: (-leak.share, leak.example_index))


class NgramMatches:
    """Runs of one length that are looked for, and those found so far."""

    def __init__(self, ngram_words: int) -> None:
        self.ngram_words = ngram_words
        self.ngrams_by_text: dict[int, np.ndarray] = {}  # the runs of each text, by its place
        self.ngrams_R = np.zeros(0, np.uint64)
        self.source_R: list[str | None] = []

    def add_text(self, text_index: int, words_W: np.ndarray) -> None:
        self.ngrams_by_text[text_index] = np.unique(hash_word_ngrams(words_W, self.ngram_words))

    def scan(self, words_W: np.ndarray, source: str) -> None:
        """Note which of the wanted runs are in a text."""
        if not self.source_R:
            self.ngrams_R = np.unique(np.concatenate(list(self.ngrams_by_text.values())))
            self.source_R = [None] * len(self.ngrams_R)
        if len(words_W) < self.ngram_words:
            return
        run_S = hash_word_ngrams(words_W, self.ngram_words)
        place_S = np.minimum(np.searchsorted(self.ngrams_R, run_S), len(self.ngrams_R) - 1)
        for place in np.unique(place_S[self.ngrams_R[place_S] == run_S]):
            self.source_R[place] = self.source_R[place] or source

    def overlap_shares(self) -> Iterable[tuple[int, float, str]]:
        """Of each text of which something was found: how much, and where most of it."""
        for place, wanted in self.ngrams_by_text.items():
            places = np.searchsorted(self.ngrams_R, wanted) if self.source_R else ()
            sources = [source for p in places if (source := self.source_R[p]) is not None]
            if sources:
                yield place, len(sources) / len(wanted), Counter(sources).most_common(1)[0][0]
