"""How a text, or two, stand in a row as each architecture reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from firth.console import too_long
from firth.errors import UserError
from firth.models import ModelConfig, framing, head_for
from firth.models.config import TransformerXL
from firth.models.model import surroundings
from firth.tokens import Tokenizer
from firth.tokens.pairs import surplus

DELIMITER, EXTRACT = "<delimiter>", "<extract>"  # between two texts of a decoder, and at their end (GPT, section 3.3)
Ids = list[int]


class Sheet(NamedTuple):
    """One text, or two, framed: the tokens, the segment of each, and the places that are asked."""

    ids: Ids
    segment: list[int]
    asked: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ids)


class Form:
    """The frame of a model around its texts, which are cut to a length; counts what was cut.

    - encoder: [CLS] a [SEP] b [SEP], the answer from [CLS]; XLNet has a [SEP] b [SEP] [CLS].
    - decoder: start a <delimiter> b <extract>, the answer from the end (Radford et al. 2018, section 3.3). A published
      checkpoint without these two tokens has its end token instead.
    - encoder-decoder: <s> a </s></s> b </s>, on both sides, the answer from the end (BART, section 3.1).
    """

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, length: int) -> None:
        self.tokenizer, self.cut = tokenizer, 0
        self.length = min(length, config.max_length or length)
        frame, vocab = framing(config, tokenizer.vocab), tokenizer.vocab
        self.before, self.between, self.after = surroundings(config, vocab)
        self.start = frame.start
        self.last = config.shape != "encoder" or getattr(head_for(config, "classify"), "pool", "") == "last"
        if config.shape == "decoder":
            found = [tokenizer.backend.token_to_id(name) for name in (DELIMITER, EXTRACT)]
            self.between, self.after = (((frame.end if i is None else i),) for i in found)
        same_or_not = isinstance(config.position, TransformerXL) and config.position.segments
        self.segments = config.num_segments > 1 or same_or_not
        self.own_segment = same_or_not and self.last  # XLNet's [CLS] is of neither text
        self.unknown = next(i for i in (vocab.unk, vocab.mask, vocab.sep, vocab.eos, vocab.pad) if i is not None)

    def room(self, texts: int) -> int:
        """How many tokens so many texts have together."""
        room = self.length - len(self.before) - len(self.after) - len(self.between) * (texts - 1)
        if room < texts:
            raise UserError(f"A row of {self.length} tokens has no room for the texts. Choose a longer max_seq_length.")
        return room

    @property
    def begins(self) -> int:
        """Where the first text begins."""
        return len(self.before)

    def frame(self, a: Ids, b: Ids | None = None) -> Sheet:
        """Texts that fit, framed; the place that tells about the whole is asked."""
        first = [*self.before, *a, *(self.after if b is None else self.between)]
        second = [] if b is None else [*b, *self.after]
        ids = first + second
        segment = [0] * len(first) + [1] * len(second)
        if self.own_segment:
            segment[-1] = 2
        return Sheet(ids, segment, (len(ids) - 1 if self.last else 0,))

    def read(self, texts: Sequence[tuple[str, ...]]) -> list[Sheet]:
        """One text each, or two each; of two the longer one is cut first."""
        flat = iter(self.tokenizer.encode_batch([t for some in texts for t in some]))
        return [self.fit(*(next(flat) for _ in some)) for some in texts]

    def fit(self, a: Ids, b: Ids | None = None) -> Sheet:
        if b is None:
            self.cut += len(a) > self.room(1)
            return self.frame(a[: self.room(1)])
        a, b = self.fit_two(a, b)
        return self.frame(a, b)

    def fit_two(self, a: Ids, b: Ids) -> tuple[Ids, Ids]:
        """Two texts cut at their ends, the longer one first, so that both fit."""
        room = self.room(2)
        if len(a) + len(b) <= room:
            return a, b
        self.cut += 1
        lost_a, lost_b = surplus(np.array([[len(a), len(b)]]), room)[0]
        return a[: len(a) - lost_a], b[: len(b) - lost_b]

    def say_cut(self) -> list[str]:
        return too_long(self.cut, "text", self.length)


def token_at(offsets: Sequence[tuple[int, int]] | np.ndarray, character: int) -> int:
    """The first token that reaches beyond a character: the one that holds it, or else the next one.

    >>> token_at([(0, 3), (4, 6), (6, 9)], 4), token_at([(0, 3), (4, 6), (6, 9)], 3)
    (1, 1)
    """
    beyond = np.asarray(offsets).reshape(-1, 2)[:, 1] > character
    return int(beyond.argmax()) if beyond.any() else max(0, len(beyond) - 1)
