"""Find labelled examples that occur in the training text (train-test contamination).

An example's text leaks to the share of its word n-grams that occur in the documents. The n-grams of 13 words are those
of GPT-3's contamination study (Brown et al. 2020, appendix C). The n-grams of the examples are hashed into a sorted
array; each document is scanned once by binary search, so memory grows with the examples, not with the documents.

W words of a text, R distinct n-grams of the examples, S n-grams of a document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from firth.text.documents import Document, Example
from firth.text.shingles import hash_word_ngrams, hash_words

LEAK_NGRAM_WORDS = 13  # words
MIN_LEAK_TEXT_WORDS = 5  # words; shorter texts occur in many documents by chance


class Leak(NamedTuple):
    """A text of an example, the share of its n-grams that was found, and the document that has most of them."""

    example_id: str | int
    text: str
    share: float
    source: str
    example_index: int = 0  # index in the list of examples: ids may repeat


def find_leaks(
    documents: Iterable[Document], examples: Sequence[Example], ngram: int = LEAK_NGRAM_WORDS, min_share: float = 0.5
) -> list[Leak]:
    """Return the texts of examples of whose n-grams a share of at least `min_share` is in the documents, worst first.

    Case and punctuation are ignored. A text shorter than `ngram` words is one n-gram; one under 5 words is skipped.
    """
    search = LeakFinder(examples, ngram)
    for document in documents:
        search.scan(document)
    return search.found_leaks(min_share)


class LeakFinder:
    """Searches a stream of documents for the texts of labelled examples; see `find_leaks`."""

    def __init__(self, examples: Sequence[Example], ngram: int = LEAK_NGRAM_WORDS) -> None:
        self.texts = [(number, e.id, text) for number, e in enumerate(examples) for text in e.texts]
        words = [hash_words(text) for *_, text in self.texts]
        sizes = [min(len(w), ngram) for w in words]
        self.matches_by_ngram = {size: NgramMatches(size) for size in sorted(set(sizes)) if size >= MIN_LEAK_TEXT_WORDS}
        for i, (size, words_W) in enumerate(zip(sizes, words, strict=True)):
            if size >= MIN_LEAK_TEXT_WORDS:
                self.matches_by_ngram[size].add_text(i, words_W)
        self.num_examples = len(examples)
        compared = {self.texts[i][0] for matches in self.matches_by_ngram.values() for i in matches.ngrams_by_text}
        self.num_compared = len(compared)

    def scan(self, document: Document) -> None:
        """Record the n-grams of the examples that occur in a document."""
        for text in document.texts:
            words_W = hash_words(text)
            for matches in self.matches_by_ngram.values():
                matches.scan(words_W, document.source)

    def found_leaks(self, min_share: float = 0.5) -> list[Leak]:
        """Return the leaks found so far, worst first."""
        leaks = []
        for matches in self.matches_by_ngram.values():
            for i, share, source in matches.overlap_shares():
                example_index, example_id, text = self.texts[i]
                if share >= min_share:
                    leaks.append(Leak(example_id, text, share, source, example_index))
        return sorted(leaks, key=lambda leak: (-leak.share, leak.example_index))


class NgramMatches:
    """The n-grams of one length of all examples, and the document in which each was first found."""

    def __init__(self, ngram_words: int) -> None:
        self.ngram_words = ngram_words
        self.ngrams_by_text: dict[int, np.ndarray] = {}  # n-gram hashes by index of the text
        self.ngrams_R = np.zeros(0, np.uint64)
        self.source_R: list[str | None] = []

    def add_text(self, text_index: int, words_W: np.ndarray) -> None:
        self.ngrams_by_text[text_index] = np.unique(hash_word_ngrams(words_W, self.ngram_words))

    def scan(self, words_W: np.ndarray, source: str) -> None:
        """Record which n-grams of the examples occur in a document's text."""
        if not self.source_R:
            self.ngrams_R = np.unique(np.concatenate(list(self.ngrams_by_text.values())))
            self.source_R = [None] * len(self.ngrams_R)
        if len(words_W) < self.ngram_words:
            return
        ngram_S = hash_word_ngrams(words_W, self.ngram_words)
        index_S = np.minimum(np.searchsorted(self.ngrams_R, ngram_S), len(self.ngrams_R) - 1)
        for index in np.unique(index_S[self.ngrams_R[index_S] == ngram_S]):
            self.source_R[index] = self.source_R[index] or source

    def overlap_shares(self) -> Iterable[tuple[int, float, str]]:
        """Yield (index of the text, share of its n-grams found, document with most of them) for texts with a match."""
        for text_index, ngrams in self.ngrams_by_text.items():
            indices = np.searchsorted(self.ngrams_R, ngrams) if self.source_R else ()
            sources = [source for i in indices if (source := self.source_R[i]) is not None]
            if sources:
                yield text_index, len(sources) / len(ngrams), Counter(sources).most_common(1)[0][0]
