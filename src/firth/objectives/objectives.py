"""Every objective as a named composition: choose, corrupt, ask.

An objective is a small frozen type. It says how long the rows are that it reads (`source_length`), what stands
around each document (`frame`), and turns rows into a batch of fixed shape.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from firth.errors import UserError
from firth.objectives import choose, corrupt
from firth.objectives.batch import IGNORED, Batch
from firth.objectives.draw import Draw
from firth.tokens import Frame, Rows, Vocabulary


@dataclass(frozen=True)
class CLM:
    """Each token is asked of those before it in its document."""

    shapes = ("decoder",)

    def frame(self, vocab: Vocabulary) -> Frame:
        end = need(vocab.eos, "an end-of-text token", "CLM")
        return Frame((end if vocab.bos is None else vocab.bos,), (end,), edges_only=True)

    def source_length(self, length: int) -> int:
        return length

    def max_documents(self, length: int) -> int | None:
        return None

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        labels = np.full_like(rows.tokens, IGNORED)
        same = (rows.doc[:, 1:] == rows.doc[:, :-1]) & (rows.doc[:, 1:] >= 0)
        labels[:, :-1] = np.where(same, rows.tokens[:, 1:], IGNORED)
        return Batch(rows.tokens, doc=rows.doc, position=rows.position, labels=labels)


@dataclass(frozen=True)
class MLM:
    """A share of the tokens is asked; of these most are masked, some are random, some are kept (BERT, section 3.1)."""

    rate: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    shapes = ("encoder",)

    def __post_init__(self) -> None:
        check_share("objective.rate", self.rate)
        if not (self.mask >= 0 and self.random >= 0 and self.mask + self.random <= 1):
            raise UserError("objective.mask and objective.random must not be negative, and add up to at most 1.")

    def frame(self, vocab: Vocabulary) -> Frame:
        need(vocab.mask, "a mask token", "MLM")
        return Frame((need(vocab.cls, "[CLS]", "MLM"),), (need(vocab.sep, "[SEP]", "MLM"),))

    def source_length(self, length: int) -> int:
        return length

    def max_documents(self, length: int) -> int | None:
        return None

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        asked, used = choose.tokens(rows.real, self.rate, draw)
        tokens, labels = corrupt.hide(rows.tokens, asked, used, draw, vocab, self.mask, self.random)
        return Batch(tokens, doc=rows.doc, position=rows.position, asked=asked, labels=labels)


@dataclass(frozen=True)
class SpanCorruption:
    """Spans become sentinels, and the decoder writes them out (T5, section 3.1.4).

    A full row of `source_length` tokens fills both `lengths`, the encoder's and the decoder's, exactly.
    Where several documents share a row, each further one ends with its own end token in the answer; every two of them
    cost one token of noise and one span, so that both sides keep their lengths.
    """

    rate: float = 0.15
    mean_span: float = 3.0
    shapes = ("encoder-decoder",)

    def __post_init__(self) -> None:
        check_share("objective.rate", self.rate)
        if not self.mean_span >= 1:
            raise UserError(f"objective.mean_span is {self.mean_span}, and must be at least 1.")

    def frame(self, vocab: Vocabulary) -> Frame:
        if not vocab.sentinels:
            raise UserError("Span corruption needs sentinel tokens (<extra_id_0> ...): take a unigram tokenizer.")
        return Frame((), (need(vocab.eos, "an end token", "span corruption"),))

    def counts(self, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Noise tokens and spans for so many tokens of text; text remains, and each span has some before it."""
        noise = np.clip(np.floor(self.rate * text + 0.5), 1, text - 1).astype(np.int64)
        spans = np.clip(np.floor(noise / self.mean_span + 0.5), 1, text - noise).astype(np.int64)
        return np.where(text > 1, noise, 0), np.where(text > 1, spans, 0)

    def lengths(self, source: int) -> tuple[int, int]:
        """Encoder and decoder lengths for a row of one document: text, less noise, plus sentinels, plus the end."""
        noise, spans = (int(x) for x in self.counts(np.asarray(source - 1)))
        return source - noise + spans, noise + spans + 1

    def source_length(self, length: int) -> int:
        """The longest row whose encoder side is not longer than `length`."""
        return bisect_right(range(2**31), length, key=lambda source: self.lengths(source)[0]) - 1

    def max_documents(self, length: int) -> int | None:
        """So many that the encoder's side has room for what is not noise, however the text is divided among them.

        The worst case is documents of one length of which only some get a span: each of these can lose all tokens but
        one, and adds its sentinel.
        """
        T, U = self.lengths(length)
        filled = np.arange(T, length + 1)
        for docs in range(int(self.counts(np.asarray(length - 1))[1]), 1, -1):
            spans = np.minimum(self.shares(filled, np.asarray(docs), U)[1], docs)
            if ((filled - docs) * spans // docs - 2 * spans >= filled - T).all():
                return docs
        return 1

    def shares(self, filled: np.ndarray, docs: np.ndarray, U: int) -> tuple[np.ndarray, np.ndarray]:
        """Noise tokens and spans of a row in which `docs` documents fill so many places, ends included."""
        noise, spans = self.counts(filled - 1)
        over = np.maximum(noise + spans + docs - U, 0)
        less = np.minimum((over + 1) // 2, np.maximum(spans - 1, 0))
        return noise - less, spans - less

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        length = rows.tokens.shape[1]
        if (most := int(self.counts(np.asarray(length - 1))[1])) > len(vocab.sentinels):
            raise UserError(
                f"Rows of this length have {most} spans, and the tokenizer has {len(vocab.sentinels)} sentinels. "
                "Shorten --max-seq-length, lower objective.rate or raise objective.mean_span."
            )
        T, U = self.lengths(length)
        noise_B, spans_B = self.shares((rows.doc >= 0).sum(1), rows.doc.max(1) + 1, U)
        noise = choose.spans(rows.doc, rows.real, noise_B, spans_B, draw)
        return corrupt.sentinels(rows, noise, T, U, vocab)


Objective = CLM | MLM | SpanCorruption
DEFAULT: dict[str, type[Objective]] = {"encoder": MLM, "decoder": CLM, "encoder-decoder": SpanCorruption}


def need(token: int | None, what: str, objective: str) -> int:
    if token is None:
        raise UserError(f"The tokenizer has no {what.removeprefix('a ').removeprefix('an ')}, which {objective} needs.")
    return token


def check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UserError(f"{name} is {value}, and must lie between 0 and 1.")
