"""Language modelling: predict tokens in some order, each from the tokens before it in that order.

CLM (GPT)           left to right. p(x) = prod_t p(x_t | x_<t): every token is a target, so one forward pass trains on
                    all T positions; nothing is corrupted.
SequenceAutoencoder one LSTM reads each text to its end and writes it again from the state that it has then (Dai & Le
                    2015): the state must hold the whole text.
PrefixLM (T5)       a random prefix of each document attends to all of itself; the rest is predicted left to right.
                    Positions of the prefix give no loss.
BiLM (ELMo)         two language models, left to right and right to left; each token is a target of both.
PermutationLM       XLNet: left to right in a random permutation of the tokens. A target attends to the tokens that are
                    not predicted and to the targets before it in the permutation. Rows are pairs of segments.

No token is replaced. The order alone decides what each position may attend to, as one integer per token
(`visibility.py`): i attends to j where `attention_rank[j] <= attention_rank[i]`.

Shapes: B rows, L positions, K target slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from firth.core.errors import UserError
from firth.objectives import corruption, noise_mask, visibility
from firth.objectives.base import (
    ObjectiveBase,
    build_end_template,
    build_pair_template,
    build_text_template,
    causal_labels,
    check_rate,
)
from firth.objectives.batch import IGNORE_INDEX, Batch
from firth.objectives.counter_rng import CounterRNG
from firth.tokens import Rows, SequenceTemplate, Vocabulary, reused_length
from firth.tokens.template import CLS_TOKEN_TYPE


@dataclass(frozen=True)
class CLM(ObjectiveBase):
    """Predict each token from the tokens before it in its document (GPT, Radford et al. 2018, section 3.1).

    `across_documents` reads a packed row as one text, as GPT-2 does: attention and targets cross document boundaries.
    """

    across_documents: bool = False
    architectures = ("decoder",)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_text_template(vocab, "CLM")

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        doc, position = rows.document_ids, rows.position_ids
        if self.across_documents:
            doc = np.minimum(doc, 0)
            position = np.where(doc < 0, 0, np.arange(doc.shape[1], dtype=position.dtype))
        return Batch(rows.input_ids, document_ids=doc, position_ids=position, labels=causal_labels(rows.input_ids, doc))


@dataclass(frozen=True)
class SequenceAutoencoder(ObjectiveBase):
    """Read a text, then write it from the last state alone (Dai & Le 2015, section 2 and figure 1).

    Encoder and decoder have the same weights, so they are one LSTM that reads the text twice in a row:

        input    w x y z </s> w x y z
        labels   . . . .  w   x y z </s>

    The state after </s> is all that the second half knows of the text; a language model sees only what came before.
    A row has half as many tokens of text as the model reads, and a longer document is cut into such pieces.
    """

    architectures = ("decoder",)

    def source_length(self, length: int) -> int:
        return length // 2

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_end_template(vocab, "the sequence autoencoder")

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        B, L = rows.input_ids.shape
        row_N, source_N = np.nonzero(rows.document_ids >= 0)
        doc_N, offset_N = rows.document_ids[row_N, source_N], rows.position_ids[row_N, source_N]
        text_N = np.cumsum(offset_N == 0) - 1
        size_N = np.bincount(text_N)[text_N]  # tokens of a text, with </s>
        first_N = 2 * (source_N - offset_N) - doc_N + offset_N  # a text before this one has 2 * size - 1 positions
        second_N = first_N + size_N

        shape = (B, 2 * L)
        tokens, doc, position = np.full(shape, vocab.pad), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        again = offset_N < size_N - 1  # the second </s> is only predicted
        for at, used, shift in ((first_N, slice(None), 0), (second_N, again, size_N[again])):
            cells = row_N[used], at[used]
            tokens[cells] = rows.input_ids[row_N, source_N][used]
            doc[cells], position[cells] = doc_N[used], offset_N[used] + shift
        targets, labels = np.zeros((B, L), np.int64), np.full((B, L), IGNORE_INDEX)
        targets[row_N, source_N], labels[row_N, source_N] = second_N - 1, rows.input_ids[row_N, source_N]
        return Batch(tokens, document_ids=doc, position_ids=position, target_positions=targets, labels=labels)


@dataclass(frozen=True)
class PrefixLM(ObjectiveBase):
    """Predict the rest of each document from a random prefix that attends to all of itself (T5, section 3.2.1).

    The prefix length is uniform over all lengths that leave at least one token to predict.
    """

    architectures = ("decoder",)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_text_template(vocab, "the prefix LM")

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        rank = visibility.attention_rank(rows.position_ids, visibility.sample_prefix_lengths(rows.document_ids, rng))
        labels = causal_labels(rows.input_ids, rows.document_ids)
        labels[:, :-1][rank[:, 1:] == 0] = IGNORE_INDEX
        return Batch(
            rows.input_ids,
            document_ids=rows.document_ids,
            position_ids=rows.position_ids,
            attention_rank=rank,
            labels=labels,
        )


@dataclass(frozen=True)
class BiLM(ObjectiveBase):
    """Predict each token from the tokens before it, and again from the tokens after it (ELMo, section 3.1).

    `attention_rank` and `labels` are (B, 2, L): the forward and the backward language model.
    """

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_pair_template(vocab, "biLM")

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        B, L = rows.input_ids.shape
        rank = np.stack([np.arange(L), np.arange(L)[::-1]])
        backward = causal_labels(rows.input_ids[:, ::-1], rows.document_ids[:, ::-1])[:, ::-1]
        labels = np.stack([causal_labels(rows.input_ids, rows.document_ids), backward], 1)
        return Batch(
            rows.input_ids,
            document_ids=rows.document_ids,
            position_ids=rows.position_ids,
            attention_rank=np.tile(rank, (B, 1, 1)),
            labels=labels,
        )


@dataclass(frozen=True)
class PermutationLM(ObjectiveBase):
    """Predict short spans of each row in random order, from the rest and from the targets before (XLNet, section 2).

    Predicting all tokens of a permutation converges slowly, so XLNet predicts the last 1/K of it (section 2.3, K = 6):
    `share` of the tokens, in spans of 1 to `max_span_length`. The input is not corrupted. A target must not attend to
    itself, so the model computes a second, query stream at target positions, with strict `<` in place of `<=`.

    A row is A [SEP] B [SEP] [CLS] (section 2.5; `tokens/segment_pairs.py`). As in the published program, [SEP] and
    [CLS] are never targets, but have their turn in the permutation: a target attends to those that come before it.

    The first half of a stream's row enters the memory of the next row, which reads the second half again. So the first
    half attends to nothing of the second, or the memory would hold the next targets; the second attends to all of it.
    """

    share: float = 1 / 6
    max_span_length: int = 5
    extras = ("query",)
    row_layout = "segments"

    def __post_init__(self) -> None:
        check_rate("objective.share", self.share)
        if self.max_span_length < 1:
            raise UserError(f"objective.max_span_length is {self.max_span_length}, and must be at least 1.")

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        """Return XLNet's template. Rows for a model of another family have that of the model, such as [CLS] first."""
        template = build_pair_template(vocab, "the permutation LM")
        cls, (sep,) = template.prefix_ids, template.suffix_ids
        return replace(
            template, prefix_ids=(), suffix_ids=(sep, *cls), has_token_types=True, last_token_type=CLS_TOKEN_TYPE
        )

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        window = self.max_span_length / self.share
        if window > source_length:
            raise UserError(
                f"Spans of up to {self.max_span_length} tokens, one per {window:.0f} tokens, do not fit into rows of "
                f"{source_length}. Lower objective.max_span_length or raise --max-seq-length."
            )

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        return {"targets": self.share, "mean_span": (1 + self.max_span_length) / 2}

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        mask = noise_mask.sample_windowed_spans(rows.maskable, self.share, self.max_span_length, rng)
        is_special = ~rows.maskable & (rows.document_ids >= 0)
        num_slots = noise_mask.num_window_slots(self.share, self.max_span_length, mask.shape[1])
        targets = corruption.select_targets(mask, num_slots)
        truth = np.take_along_axis(rows.input_ids, targets.positions, 1)
        rank = visibility.sample_permutation_ranks(mask | is_special, rng)
        if rows.reset_state is not None:
            L = rank.shape[1]
            rank[:, reused_length(L) :] += L  # above every rank of the first half
        return Batch(
            rows.input_ids,
            document_ids=rows.document_ids,
            position_ids=rows.position_ids,
            attention_rank=rank,
            token_type_ids=rows.token_type_ids,
            target_positions=targets.positions,
            labels=np.where(targets.is_used, truth, IGNORE_INDEX),
        )
