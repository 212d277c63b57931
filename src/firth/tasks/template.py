"""Encode the texts of a task: tokenize, truncate to the row length, add the model's special tokens.

`SequenceTemplate` (`tokens/template.py`) says which special tokens stand where. This file adds what a task needs
besides: a length limit, which text loses tokens first, and the position whose hidden state the head reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from firth.core.console import truncation_messages
from firth.core.errors import UserError
from firth.models import ModelConfig, head_for_task, make_sequence_template
from firth.tokens import Tokenizer
from firth.tokens.sentence_pairs import tokens_to_truncate

# Between two texts of a decoder, and at their end (GPT, Radford et al. 2018, section 3.3).
DELIMITER_TOKEN, EXTRACT_TOKEN = "<delimiter>", "<extract>"
LONGER_TEXTS = "Fine-tune with --max-seq-length for longer ones."  # the remedy for a text that is cut


class EncodedSequence(NamedTuple):
    """One text or two with special tokens, and the positions that the head reads."""

    ids: list[int]
    token_type_ids: list[int]
    target_positions: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class TaskTemplate:
    """A model's `sequence_template` with a limit of `max_length` tokens; counts the texts that it truncates.

    - encoder: [CLS] a [SEP] b [SEP], read at [CLS]; XLNet: a [SEP] b [SEP] [CLS].
    - decoder: start a <delimiter> b <extract>, read at the end (Radford et al. 2018, section 3.3). A published
      checkpoint without these two tokens has its end token instead.
    - encoder-decoder: <s> a </s></s> b </s> on both sides, read at the end (BART, section 3.1).
    """

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, max_length: int) -> None:
        self.tokenizer, self.num_truncated = tokenizer, 0
        self.max_length = min(max_length, config.max_length or max_length)
        self.is_longest = self.max_length == config.max_length
        vocab, self.sequence_template = tokenizer.vocab, make_sequence_template(config, tokenizer.vocab)
        if config.architecture == "decoder":
            ids = [tokenizer.backend.token_to_id(token) for token in (DELIMITER_TOKEN, EXTRACT_TOKEN)]
            delimiter, extract = (self.sequence_template.eos_id if i is None else i for i in ids)
            self.sequence_template = replace(self.sequence_template, separator_ids=(delimiter,), suffix_ids=(extract,))
        self.reads_last_token = (
            config.architecture != "encoder" or getattr(head_for_task(config, "classify"), "pool", "") == "last"
        )
        self.unk_id = next(i for i in (vocab.unk, vocab.mask, vocab.sep, vocab.eos, vocab.pad) if i is not None)

    def max_text_tokens(self, num_texts: int) -> int:
        """Number of tokens that one text, or two together, may have."""
        max_text_tokens = self.max_length - self.sequence_template.num_special_tokens(num_texts)
        if max_text_tokens < num_texts:
            raise UserError(
                f"A row of {self.max_length} tokens is too short for the texts. Choose a longer max_seq_length."
            )
        return max_text_tokens

    @property
    def text_start(self) -> int:
        """Position of the first token of the first text."""
        return len(self.sequence_template.prefix_ids)

    def build_inputs(self, a: list[int], b: list[int] | None = None) -> EncodedSequence:
        """Add the special tokens to texts that fit; the head reads [CLS] or the last token."""
        ids, token_type_ids = self.sequence_template.apply(a, b)
        return EncodedSequence(ids, token_type_ids, (len(ids) - 1 if self.reads_last_token else 0,))

    def truncate_and_build(self, a: list[int], b: list[int] | None = None) -> EncodedSequence:
        """Encode one text or two; of two the longer one is truncated first."""
        if b is None:
            self.num_truncated += len(a) > self.max_text_tokens(1)
            return self.build_inputs(a[: self.max_text_tokens(1)])
        return self.build_inputs(*self.truncate_pair(a, b))

    def truncate_pair(self, a: list[int], b: list[int]) -> tuple[list[int], list[int]]:
        """Truncate two texts at their ends, the longer one first, so that both fit."""
        max_text_tokens = self.max_text_tokens(2)
        if len(a) + len(b) <= max_text_tokens:
            return a, b
        self.num_truncated += 1
        lost_a, lost_b = tokens_to_truncate(np.array([[len(a), len(b)]]), max_text_tokens)[0]
        return a[: len(a) - lost_a], b[: len(b) - lost_b]

    def truncation_notices(self) -> list[str]:
        notices = truncation_messages(self.num_truncated, "text", self.max_length)
        return notices if self.is_longest else [f"{notice} {LONGER_TEXTS}" for notice in notices]


def token_at_char(offsets: Sequence[tuple[int, int]] | np.ndarray, char_index: int) -> int:
    """Index of the token that holds a character, or else of the next token; the last token if there is none.

    >>> token_at_char([(0, 3), (4, 6), (6, 9)], 4), token_at_char([(0, 3), (4, 6), (6, 9)], 3)
    (1, 1)
    """
    ends_after = np.asarray(offsets).reshape(-1, 2)[:, 1] > char_index
    return int(ends_after.argmax()) if ends_after.any() else max(0, len(ends_after) - 1)
