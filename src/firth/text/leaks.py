"""Does the text that a model is trained on contain what it will be tested on?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from firth.text.kinds import Document, Example
from firth.text.shingles import runs, word_numbers

NGRAM = 13  # words, as for GPT-3 (Brown et al. 2020, appendix C)
FEWEST = 5  # words: what is shorter is in many texts by chance


class Leak(NamedTuple):
    """A labelled text that stands in a document: which example, how much of it, and in which document most of it."""

    id: str | int
    text: str
    share: float
    source: str
    example: int = 0  # its place among the examples, as two may have the same id


def leaks(
    documents: Iterable[Document], examples: Sequence[Example], ngram: int = NGRAM, least: float = 0.5
) -> list[Leak]:
    """The texts of labelled examples of which a share of `least` or more stands in the documents, worst first.

    Compared are runs of `ngram` words, whatever their case and punctuation; a text of fewer words is compared whole,
    one of fewer than 5 not at all. Documents are read once, one at a time; memory grows with the examples alone.
    """
    search = LeakSearch(examples, ngram)
    for document in documents:
        search.look(document)
    return search.leaks(least)


class LeakSearch:
    """Looks for the texts of labelled examples in documents that pass by; see `leaks`."""

    def __init__(self, examples: Sequence[Example], ngram: int = NGRAM) -> None:
        self.texts = [(number, e.id, text) for number, e in enumerate(examples) for text in e.texts]
        words = [word_numbers(text) for *_, text in self.texts]
        sizes = [min(len(w), ngram) for w in words]
        self.hits = {size: Hits(size) for size in sorted(set(sizes)) if size >= FEWEST}
        for place, (size, words_W) in enumerate(zip(sizes, words, strict=True)):
            if size >= FEWEST:
                self.hits[size].expect(place, words_W)
        self.num_examples = len(examples)
        self.num_compared = len({self.texts[place][0] for hit in self.hits.values() for place in hit.wanted})

    def look(self, document: Document) -> None:
        """Note which texts, or parts of them, stand in a document."""
        for text in document.sides:
            words_W = word_numbers(text)
            for hit in self.hits.values():
                hit.look(words_W, document.source)

    def leaks(self, least: float = 0.5) -> list[Leak]:
        """What was found so far, worst first."""
        found = []
        for place, share, source in (one for hit in self.hits.values() for one in hit.shares()):
            number, name, text = self.texts[place]
            if share >= least:
                found.append(Leak(name, text, share, source, number))
        return sorted(found, key=lambda leak: (-leak.share, leak.example))


class Hits:
    """Runs of one length that are looked for, and those found so far."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.wanted: dict[int, np.ndarray] = {}  # the runs of each text, by its place
        self.all_R = np.zeros(0, np.uint64)
        self.source_R: list[str | None] = []

    def expect(self, place: int, words_W: np.ndarray) -> None:
        self.wanted[place] = np.unique(runs(words_W, self.size))

    def look(self, words_W: np.ndarray, source: str) -> None:
        """Note which of the wanted runs are in a text."""
        if not self.source_R:
            self.all_R = np.unique(np.concatenate(list(self.wanted.values())))
            self.source_R = [None] * len(self.all_R)
        if len(words_W) < self.size:
            return
        run_S = runs(words_W, self.size)
        place_S = np.minimum(np.searchsorted(self.all_R, run_S), len(self.all_R) - 1)
        for place in np.unique(place_S[self.all_R[place_S] == run_S]):
            self.source_R[place] = self.source_R[place] or source

    def shares(self) -> Iterable[tuple[int, float, str]]:
        """Of each text of which something was found: how much, and where most of it."""
        for place, wanted in self.wanted.items():
            places = np.searchsorted(self.all_R, wanted) if self.source_R else ()
            sources = [source for p in places if (source := self.source_R[p]) is not None]
            if sources:
                yield place, len(sources) / len(wanted), Counter(sources).most_common(1)[0][0]
