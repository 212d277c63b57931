"""Does the text that a model is trained on contain what it will be tested on?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from firth.text.kinds import Document, Example
from firth.text.shingles import runs, word_numbers

NGRAM = 13  # words, as for GPT-3 (Brown et al. 2020, appendix C)
FEWEST = 5  # words: what is shorter is in many texts by chance


class Leak(NamedTuple):
    """A labelled text that stands in a document: which example, how much of it, and in which document first."""

    id: str | int
    text: str
    share: float
    source: str


def leaks(
    documents: Iterable[Document], examples: Sequence[Example], ngram: int = NGRAM, least: float = 0.5
) -> list[Leak]:
    """The texts of labelled examples of which a share of `least` or more stands in the documents, worst first.

    Compared are runs of `ngram` words, whatever their case and punctuation; a text of fewer words is compared whole,
    one of fewer than 5 not at all. Documents are read once, one at a time; memory grows with the examples alone.
    """
    texts = [(example.id, text) for example in examples for text in example.texts]
    words = [word_numbers(text) for _, text in texts]
    hits = {size: Hits(size) for size in sorted({min(len(w), ngram) for w in words}) if size >= FEWEST}
    for number, w in enumerate(words):
        if len(w) >= FEWEST:
            hits[min(len(w), ngram)].expect(number, w)
    for document in documents:
        for text in document.sides:
            words_W = word_numbers(text)
            for hit in hits.values():
                hit.look(words_W, document.source)
    found = (leak for hit in hits.values() for leak in hit.leaks(texts, least))
    return sorted(found, key=lambda leak: (-leak.share, str(leak.id)))


class Hits:
    """Runs of one length that are looked for, and those found so far."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.wanted: dict[int, np.ndarray] = {}  # the runs of each text, by its number
        self.all_R = np.zeros(0, np.uint64)
        self.source_R: list[str | None] = []

    def expect(self, number: int, words_W: np.ndarray) -> None:
        self.wanted[number] = np.unique(runs(words_W, self.size))

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

    def leaks(self, texts: Sequence[tuple[str | int, str]], least: float) -> Iterable[Leak]:
        for number, wanted in self.wanted.items():
            places = np.searchsorted(self.all_R, wanted) if self.source_R else ()
            sources = [source for place in places if (source := self.source_R[place]) is not None]
            share = len(sources) / len(wanted)
            if sources and share >= least:
                yield Leak(*texts[number], share, sources[0])
