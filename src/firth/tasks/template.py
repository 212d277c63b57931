"""How a text, or two, stand in a row as each architecture reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from firth.core.console import truncation_messages
from firth.core.errors import UserError
from firth.models import ModelConfig, head_for_task, make_text_template
from firth.models.config import TransformerXL
from firth.models.model import make_pair_template
from firth.tokens import Tokenizer
from firth.tokens.sentence_pairs import tokens_to_truncate

DELIMITER_TOKEN, EXTRACT_TOKEN = (
    "<delimiter>",
    "<extract>",
)  # between two texts of a decoder, and at their end (GPT, section 3.3)
TokenIdList = list[int]


class EncodedSequence(NamedTuple):
    """One text, or two, framed: the tokens, the segment of each, and the places that are asked."""

    ids: TokenIdList
    token_type_ids: list[int]
    target_positions: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class TaskTemplate:
    """The frame of a model around its texts, which are cut to a length; counts what was cut.

    - encoder: [CLS] a [SEP] b [SEP], the answer from [CLS]; XLNet has a [SEP] b [SEP] [CLS].
    - decoder: start a <delimiter> b <extract>, the answer from the end (Radford et al. 2018, section 3.3). A published
      checkpoint without these two tokens has its end token instead.
    - encoder-decoder: <s> a </s></s> b </s>, on both sides, the answer from the end (BART, section 3.1).
    """

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, max_length: int) -> None:
        self.tokenizer, self.num_truncated = tokenizer, 0
        self.max_length = min(max_length, config.max_length or max_length)
        frame, vocab = make_text_template(config, tokenizer.vocab), tokenizer.vocab
        self.prefix_ids, self.separator_ids, self.suffix_ids = make_pair_template(config, vocab)
        self.decoder_start_id = frame.decoder_start_id
        self.answers_at_end = (
            config.architecture != "encoder" or getattr(head_for_task(config, "classify"), "pool", "") == "last"
        )
        if config.architecture == "decoder":
            found = [tokenizer.backend.token_to_id(name) for name in (DELIMITER_TOKEN, EXTRACT_TOKEN)]
            self.separator_ids, self.suffix_ids = (((frame.eos_id if i is None else i),) for i in found)
        same_or_not = isinstance(config.position, TransformerXL) and config.position.relative_segments
        self.has_token_types = config.num_segments > 1 or same_or_not
        self.has_cls_token_type = same_or_not and self.answers_at_end  # XLNet's [CLS] is of neither text
        self.unk_id = next(i for i in (vocab.unk, vocab.mask, vocab.sep, vocab.eos, vocab.pad) if i is not None)

    def max_text_tokens(self, num_texts: int) -> int:
        """How many tokens so many texts have together."""
        room = self.max_length - len(self.prefix_ids) - len(self.suffix_ids) - len(self.separator_ids) * (num_texts - 1)
        if room < num_texts:
            raise UserError(
                f"A row of {self.max_length} tokens has no room for the texts. Choose a longer max_seq_length."
            )
        return room

    @property
    def text_start(self) -> int:
        """Where the first text begins."""
        return len(self.prefix_ids)

    def build_inputs(self, a: TokenIdList, b: TokenIdList | None = None) -> EncodedSequence:
        """Texts that fit, framed; the place that tells about the whole is asked."""
        first = [*self.prefix_ids, *a, *(self.suffix_ids if b is None else self.separator_ids)]
        second = [] if b is None else [*b, *self.suffix_ids]
        ids = first + second
        segment = [0] * len(first) + [1] * len(second)
        if self.has_cls_token_type:
            segment[-1] = 2
        return EncodedSequence(ids, segment, (len(ids) - 1 if self.answers_at_end else 0,))

    def encode_texts(self, texts: Sequence[tuple[str, ...]]) -> list[EncodedSequence]:
        """One text each, or two each; of two the longer one is cut first."""
        flat = iter(self.tokenizer.encode_batch([t for some in texts for t in some]))
        return [self.truncate_and_build(*(next(flat) for _ in some)) for some in texts]

    def truncate_and_build(self, a: TokenIdList, b: TokenIdList | None = None) -> EncodedSequence:
        if b is None:
            self.num_truncated += len(a) > self.max_text_tokens(1)
            return self.build_inputs(a[: self.max_text_tokens(1)])
        a, b = self.truncate_pair(a, b)
        return self.build_inputs(a, b)

    def truncate_pair(self, a: TokenIdList, b: TokenIdList) -> tuple[TokenIdList, TokenIdList]:
        """Two texts cut at their ends, the longer one first, so that both fit."""
        room = self.max_text_tokens(2)
        if len(a) + len(b) <= room:
            return a, b
        self.num_truncated += 1
        lost_a, lost_b = tokens_to_truncate(np.array([[len(a), len(b)]]), room)[0]
        return a[: len(a) - lost_a], b[: len(b) - lost_b]

    def truncation_notices(self) -> list[str]:
        return truncation_messages(self.num_truncated, "text", self.max_length)


def token_at_char(offsets: Sequence[tuple[int, int]] | np.ndarray, char_index: int) -> int:
    """The first token that reaches beyond a character: the one that holds it, or else the next one.

    >>> token_at([(0, 3), (4, 6), (6, 9)], 4), token_at([(0, 3), (4, 6), (6, 9)], 3)
    (1, 1)
    """
    beyond = np.asarray(offsets).reshape(-1, 2)[:, 1] > char_index
    return int(beyond.argmax()) if beyond.any() else max(0, len(beyond) - 1)
