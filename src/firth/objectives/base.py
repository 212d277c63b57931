"""The interface of an objective, and the checks and templates that several objectives share.

An objective is a small frozen dataclass, called as `objective(rows, rng, vocab) -> Batch`. Each call is a composition
of three pure functions over whole arrays:

1. noise mask (`noise_mask.py`): which tokens the model has to predict;
2. corruption (`corruption.py`): what the model reads in their place;
3. labels: which positions are predicted, and the right tokens.

The same `rows` and the same `rng` always give the same batch. Noise never depends on token ids: it is a function of the
row's layout (documents, words, sentences) and of the random numbers alone. `trace_sources` builds on that.

Shapes: B rows, L positions of the source row, T of the corrupted row, K target slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from firth.core.errors import UserError
from firth.objectives.batch import IGNORE_INDEX, Batch
from firth.objectives.counter_rng import CounterRNG
from firth.tokens import Rows, SequenceTemplate, Vocabulary

RowLayout = Literal["packed", "segments", "next", "order", "sides"]


class ObjectiveBase:
    """Defaults that most objectives share: packed documents, rows as long as the model's input, no extra heads."""

    architectures: tuple[str, ...] = ("encoder",)  # models that can be trained with it
    # Packed documents, each one text or cut into two segments (XLNet); or one pair of texts: next sentence, sentence
    # order, translation.
    row_layout: RowLayout = "packed"
    token_flags: tuple[str, ...] = ()  # optional fields of Rows that it needs, such as "word_start"
    extras: tuple[str, ...] = ()  # parts that the model needs beside its LM head, such as "generator"
    follows_progress: bool = False  # batches depend on the share of the run's steps that is done
    # Kinds of steps that differ in cost, in order: the share of the steps, and a `progress` at which they are made.
    phases: tuple[tuple[float, float], ...] = ((1.0, 0.0),)
    adds_bos: bool = False  # texts start with BOS and end with EOS, and the decoder starts with EOS (BART)

    def source_length(self, length: int) -> int:
        """Return the length of the rows to read, for a model with inputs of `length` tokens."""
        return length

    def max_documents(self, source_length: int) -> int | None:
        """Return the maximum number of documents per row; None: no limit."""
        return None

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        """Raise UserError for a tokenizer or a row length that does not fit."""
        self.build_template(vocab)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        """Return the special tokens around each document."""
        raise NotImplementedError

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        """Return the noise rates that these rows should show, by name (`firth show` compares them).

        Without `rows`, the rates of very long rows: short ones hold whole tokens and whole spans.
        """
        return {}

    def mask_rate_at(self, progress: float) -> float | None:
        """Return the mask rate after this share of the run; None where it stays the same, or where there is none."""
        return None


def trace_sources(
    objective: Callable[[Rows, CounterRNG, Vocabulary], Batch], rows: Rows, rng: CounterRNG, vocab: Vocabulary
) -> Batch:
    """Return the batch that `objective` makes of `rows`, with source indices in place of token ids.

    The source index of a token is its position in `rows`; -1 for an inserted token: a mask, a random token, a sentinel,
    an end token, padding. `input_ids`, `labels` and `decoder_input_ids` hold source indices; every other field is as in
    the real batch. Noise does not depend on token ids, so corrupting `arange(L)` with the same `rng` moves the indices
    exactly as it moves the tokens, and training pays nothing for it.
    """
    return objective(index_rows(rows), rng, index_vocabulary(vocab))


def index_rows(rows: Rows) -> Rows:
    """Return the rows with each token replaced by its position."""
    return rows._replace(input_ids=np.tile(np.arange(rows.input_ids.shape[1]), (len(rows.input_ids), 1)))


def index_vocabulary(vocab: Vocabulary) -> Vocabulary:
    """Return a vocabulary whose special tokens and random replacements all have the id -1."""
    roles = {role: None if getattr(vocab, role) is None else -1 for role in ("unk", "bos", "eos", "cls", "sep", "mask")}
    sentinel_ids = (-1,) * len(vocab.sentinel_ids)
    index_vocab = replace(vocab, pad=-1, sentinel_ids=sentinel_ids, **roles)  # type: ignore[arg-type]
    index_vocab.__dict__["non_special_ids"] = np.array([-1])  # the cached property: candidates for a random token
    return index_vocab


# --- labels and templates -----------------------------------------------------------------------------------------


def causal_labels(tokens_BL: np.ndarray, doc_BL: np.ndarray) -> np.ndarray:
    """Return for each position the next token of its document (B, L); -100 at the last one and in padding."""
    labels = np.full_like(tokens_BL, IGNORE_INDEX)
    same = (doc_BL[:, 1:] == doc_BL[:, :-1]) & (doc_BL[:, 1:] >= 0)
    labels[:, :-1] = np.where(same, tokens_BL[:, 1:], IGNORE_INDEX)
    return labels


def build_text_template(vocab: Vocabulary, objective: str) -> SequenceTemplate:
    """Return BOS text EOS, only at the real edges of a document; EOS stands for BOS where the tokenizer has none."""
    end = require_special_token(vocab.eos, "end-of-text token", objective)
    return SequenceTemplate((end if vocab.bos is None else vocab.bos,), (end,), document_edges_only=True)


def build_pair_template(vocab: Vocabulary, objective: str) -> SequenceTemplate:
    """Return [CLS] text [SEP], or [CLS] text [SEP] text [SEP] for a pair."""
    sep = require_special_token(vocab.sep, "[SEP]", objective)
    return SequenceTemplate((require_special_token(vocab.cls, "[CLS]", objective),), (sep,), separator_ids=(sep,))


def build_end_template(vocab: Vocabulary, objective: str) -> SequenceTemplate:
    """Return text EOS."""
    return SequenceTemplate((), (require_special_token(vocab.eos, "end token", objective),))


def require_special_token(token_id: int | None, token_name: str, objective: str) -> int:
    if token_id is None:
        raise UserError(
            f"The tokenizer has no {token_name}, which {objective} needs. "
            "Use another one: `firth tokenizer --kind byte-bpe` makes one that has it."
        )
    return token_id


# --- checks -------------------------------------------------------------------------------------------------------


def check_rate(field_name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UserError(f"{field_name} is {value}, and must lie between 0 and 1.")


def check_share(field_name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{field_name} is {value}, and must lie between 0 and 1.")


def check_mean_span_fits(num_noise_tokens: float, mean_span: float, remedy: str) -> None:
    """Raise UserError where a row has fewer noise tokens than one span has on average."""
    if mean_span > num_noise_tokens:
        raise UserError(
            f"Rows of this length have {num_noise_tokens:.0f} tokens of noise, fewer than one span of {mean_span:.3g}. "
            f"{remedy}, or raise --max-seq-length."
        )


def check_enough_sentinels(num_spans: int, vocab: Vocabulary, remedy: str) -> None:
    """Raise UserError where a row may have more spans than the tokenizer has sentinels."""
    if num_spans > len(vocab.sentinel_ids):
        raise UserError(
            f"Rows of this length have up to {num_spans} spans, and the tokenizer has {len(vocab.sentinel_ids)} "
            f"sentinels. {remedy}, or lower --max-seq-length."
        )
