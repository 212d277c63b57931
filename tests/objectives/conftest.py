"""Rows that a person can read, rows of random text, and draws that were written down before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from firth.objectives import OBJECTIVES, Batch, CounterRNG, Objective
from firth.tokens import Rows, SequenceTemplate, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
SIGNS = {"C": CLS, "S": SEP, "E": END, "B": BOS}
SENTINELS = tuple(range(999, 899, -1))  # they count down from the end of the vocabulary, as in T5


def vocabulary(**roles: Any) -> Vocabulary:
    """1000 ids: 0 to 6 are special, 900 to 999 are sentinels, 7 to 899 are text."""
    known: dict[str, Any] = dict(
        pad=PAD, unk=UNK, bos=None, eos=END, cls=CLS, sep=SEP, mask=MASK, sentinel_ids=SENTINELS
    )
    return Vocabulary(size=1000, special_ids=(*range(7), *sorted(SENTINELS)), **(known | roles))


@pytest.fixture(scope="session", name="vocabulary")
def _vocabulary() -> Callable[..., Vocabulary]:
    return vocabulary


@pytest.fixture(scope="session")
def vocab() -> Vocabulary:
    return vocabulary()


# --- rows ---------------------------------------------------------------------------------------------------------


def make_rows(rows: Sequence[Sequence[Sequence[str]]], width: int) -> Rows:
    """Rows of documents of words such as "10", "+11", "12.", "13!", "C"."""
    shape = (len(rows), width)
    tokens, doc, position = np.full(shape, PAD), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    maskable, starts, ends, salient = (np.zeros(shape, bool) for _ in range(4))
    for b, documents in enumerate(rows):
        at = 0
        for d, words in enumerate(documents):
            for p, word in enumerate(words):
                tokens[b, at] = SIGNS[word] if word in SIGNS else int(word.strip("+.!"))
                doc[b, at], position[b, at] = d, p
                maskable[b, at], starts[b, at] = word not in SIGNS, word not in SIGNS and word[0] != "+"
                ends[b, at], salient[b, at] = "." in word, "!" in word
                at += 1
    index = np.arange(len(rows))
    return Rows(tokens, doc, position, maskable, index, index, 0 * index, starts, ends, salient)


@pytest.fixture(scope="session")
def picture() -> Callable[..., Rows]:
    """Rows from pictures such as "C 10 +11 12. S | C 20! S".

    + continues a word, a point ends a sentence, ! is salient; C, S, E, B are [CLS], [SEP], the end, the beginning.
    Rows are filled up with padding, to `width` where it is given.
    """

    def draw_rows(*rows: str, width: int | None = None) -> Rows:
        split = [[document.split() for document in row.split("|")] for row in rows]
        return make_rows(split, width or max(sum(map(len, documents)) for documents in split))

    return draw_rows


def divide(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """A total cut into parts of at least 1, at random."""
    edges = np.sort(rng.choice(np.arange(1, total), parts - 1, replace=False)).tolist()
    return [b - a for a, b in pairwise([0, *edges, total])]


def random_rows(layout: Sequence[Sequence[int]], width: int, template: SequenceTemplate, seed: int = 0) -> Rows:
    """Rows of documents with the given numbers of random tokens; three in four start a word."""
    rng = np.random.default_rng(seed)
    shape = (len(layout), width)
    tokens, doc, position = np.full(shape, PAD), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    maskable, starts, ends = (np.zeros(shape, bool) for _ in range(3))
    text, opens, closes = rng.integers(7, 900, shape), rng.random(shape) < 0.75, rng.random(shape) < 0.08
    salient = rng.random(shape) < 0.03
    salient[:, 1:] |= salient[:, :-1]
    for b, lengths in enumerate(layout):
        at = 0
        for d, n in enumerate(lengths):
            first, end = at + len(template.prefix_ids), at + n + template.num_special_tokens()
            inner = slice(first, first + n)
            tokens[b, at:first], tokens[b, inner], tokens[b, first + n : end] = (
                template.prefix_ids, text[b, inner], template.suffix_ids,
            )  # fmt: skip
            doc[b, at:end], position[b, at:end], maskable[b, inner] = d, np.arange(end - at), True
            starts[b, first], ends[b, first + n - 1] = True, True
            at = end
        assert at <= width
    index = np.arange(len(layout))
    return Rows(
        tokens,
        doc,
        position,
        maskable,
        index,
        index,
        0 * index,
        starts | opens & maskable,
        ends | closes & maskable,
        salient & maskable,
    )


@pytest.fixture(scope="session", name="random_rows")
def _random_rows() -> Callable[..., Rows]:
    return random_rows


@pytest.fixture(scope="session")
def rows_for() -> Callable[..., Rows]:
    """Rows that an objective reads for a model of `length` tokens, with 1, 2 ... up to `documents` documents in turn.

    They are full but for `missing` tokens of every second one.
    """

    def make(
        objective: Objective, count: int, length: int, documents: int = 1, seed: int = 0, missing: int = 0
    ) -> Rows:
        rng, width, template = (
            np.random.default_rng(seed),
            objective.source_length(length),
            objective.build_template(vocabulary()),
        )
        most = min(
            documents,
            objective.max_documents(width) or documents,
            (width - missing) // (template.num_special_tokens() + 1),
        )
        layout = []
        for b in range(count):
            docs = 1 + b % most
            layout.append(divide(width - b % 2 * missing - docs * template.num_special_tokens(), docs, rng))
        rows = random_rows(layout, width, template, seed)
        if objective.row_layout == "packed":
            return rows
        second = rows.maskable & (rows.position_ids > width // 2)  # as if a pair had been cut there
        return rows._replace(token_type_ids=second.astype(np.int32), pair_labels=rows.stream_index % 2)

    return make


@pytest.fixture(scope="session")
def slice_rows() -> Callable[[Rows, Any], Rows]:
    return lambda rows, some: Rows(*(None if field is None else field[some] for field in rows))  # type: ignore[arg-type]


# --- draws --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written(CounterRNG):
    """A generator with given numbers; the others are 0.99, or 0."""

    tables: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)

    def uniform(self, purpose: str, width: int) -> np.ndarray:
        return self.table(purpose, width, 0.99).astype(np.float32)

    def uniform_at(self, purpose: str, row_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
        return self.uniform(purpose, position_N.max() + 1)[row_N, position_N]

    def integers(self, purpose: str, width: int, high: int) -> np.ndarray:
        numbers = self.table(purpose, width, 0).astype(np.int64)
        assert (numbers < high).all()
        return numbers

    def table(self, purpose: str, width: int, rest: float) -> np.ndarray:
        numbers = np.full((len(self.index), width), rest)
        for b, row in enumerate(self.tables[purpose]):
            numbers[b, : len(row)] = row[:width]
        return numbers


@pytest.fixture(scope="session")
def written() -> Callable[..., CounterRNG]:
    """`written(rows, tokens=[[0.1, 0.9]])`: the numbers of each purpose, row by row; _ stands for a space."""

    def make(rows: Rows, **tables: Sequence[Sequence[float]]) -> CounterRNG:
        return Written(0, rows.stream_index, tables={name.replace("_", " "): table for name, table in tables.items()})

    return make


@pytest.fixture(scope="session")
def apply() -> Callable[..., Batch]:
    """Apply an objective to rows; two rows are a step."""

    def call(objective: Objective | str, rows: Rows, seed: int = 1) -> Batch:
        objective = OBJECTIVES[objective] if isinstance(objective, str) else objective
        return objective(rows, CounterRNG(seed, rows.stream_index, rows.stream_index // 2), vocabulary())

    return call
