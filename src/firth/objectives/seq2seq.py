"""Denoising for encoder-decoders: the encoder reads corrupted text, the decoder writes what is missing, or everything.

Span corruption (T5, Raffel et al. 2020, section 3.1.4). 15% of the tokens are noise, in spans of 3 tokens on average.
Each span becomes one *sentinel* token in the input; the target lists each sentinel with its span:

    text      Thank you for inviting me to your party last week </s>
    input     Thank you <0> me to your party <1> week </s>
    target    <0> for inviting <1> last </s>

Both sequences are shorter than the text: for 512 input tokens the source row has 569 tokens, and the target 114. The
decoder predicts only the noise, so a step costs less than one that writes the whole text (section 3.3.2); long spans
make the target shorter still. `SpanCorruptionAndMLM` also masks tokens of the input, which the encoder predicts itself.
The same corruption trains a decoder alone (`DecoderDenoising`): input and target in one
row, with loss on the target.

BART (Lewis et al. 2020, section 2.2). The decoder writes the *whole* text, whatever the noise, so noise may change the
length and the order of the text. Any of five can be combined, applied in this order:

    permute   the sentences of a document, in random order
    rotate    the document starts at a random token; what was before it comes last
    delete    single tokens; the model also has to find out where they are missing
    infill    spans with Poisson(3) lengths, each replaced by one [MASK]; a span of length 0 inserts a [MASK], so the
              model has to predict how many tokens a mask stands for, also none
    mask      single tokens become [MASK] (BERT's masking)

The released models use infilling of 30% of the tokens and permuted sentences (section 5.1), the defaults here. BART
costs more per step than T5: encoder and decoder both read about as many tokens as the text has.

Shapes: B rows, L positions of the source row, T of the encoder, U of the decoder.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from firth.core.errors import UserError
from firth.objectives import corruption, noise_mask, visibility
from firth.objectives.base import (
    ObjectiveBase,
    build_end_template,
    build_pair_template,
    check_enough_sentinels,
    check_mean_span_fits,
    check_rate,
    check_share,
    require_special_token,
)
from firth.objectives.batch import IGNORE_INDEX, Batch
from firth.objectives.corruption import NoisyText
from firth.objectives.counter_rng import CounterRNG
from firth.objectives.noise_mask import SalientSpanMasking
from firth.tokens import Rows, SequenceTemplate, Vocabulary

BART_NOISES = ("permute", "rotate", "delete", "infill", "mask")  # in the order of application


def build_sentinel_template(vocab: Vocabulary) -> SequenceTemplate:
    if not vocab.sentinel_ids:
        raise UserError(
            "Span corruption needs sentinel tokens (<extra_id_0> ...), and the tokenizer has none. "
            "Use one of `firth tokenizer --kind unigram`."
        )
    return build_end_template(vocab, "span corruption")


@dataclass(frozen=True)
class EncoderDecoderLM(ObjectiveBase):
    """The encoder reads a random prefix of each document, the decoder predicts the rest (T5, section 3.2.3)."""

    architectures = ("encoder-decoder",)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_end_template(vocab, "the encoder-decoder LM")

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        return corruption.split_prefix_batch(rows, visibility.sample_prefix_lengths(rows.document_ids, rng), vocab)


@dataclass(frozen=True)
class SpanCorruption(ObjectiveBase):
    """Replace spans by sentinels; the decoder writes the spans (T5, section 3.1.4).

    A row of one document and `source_length` tokens fills the encoder and the decoder exactly
    (`encoder_decoder_lengths`), so no position is padding. Each further document of a row adds an end token to the
    target; for two of them the row gives up one noise token and one span, and both sides keep their lengths.
    """

    rate: float = 0.15
    mean_span: float = 3.0
    architectures = ("encoder-decoder",)

    def __post_init__(self) -> None:
        check_rate("objective.rate", self.rate)
        if not self.mean_span >= 1:
            raise UserError(f"objective.mean_span is {self.mean_span}, and must be at least 1.")

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_sentinel_template(vocab)

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        noise, spans = (int(x) for x in self.noise_counts(np.asarray(source_length - 1)))
        check_mean_span_fits(noise, self.mean_span, "Lower objective.mean_span, raise objective.rate")
        check_enough_sentinels(spans, vocab, "Lower objective.rate, raise objective.mean_span")

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        """Return the rates of the noise counts that `rows` round to: 11 tokens in 4 spans, not 10.5 in 3.5."""
        if rows is None:
            return {"targets": self.rate, "mean_span": self.mean_span}
        num_noise, num_spans = (int(count_B.sum()) for count_B in self.count_row_noise(rows))
        return {"targets": num_noise / max(rows.maskable.sum(), 1), "mean_span": num_noise / max(num_spans, 1)}

    def noise_counts(self, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of noise tokens and of spans for a text of `num_tokens`.

        At least one token stays text, and each span has a token of text before it.
        """
        noise = np.clip(np.floor(self.rate * num_tokens + 0.5), 1, num_tokens - 1).astype(np.int64)
        spans = np.clip(np.floor(noise / self.mean_span + 0.5), 1, num_tokens - noise).astype(np.int64)
        return np.where(num_tokens > 1, noise, 0), np.where(num_tokens > 1, spans, 0)

    def encoder_decoder_lengths(self, source_length: int) -> tuple[int, int]:
        """Return T and U for a row of one document: text - noise + sentinels, and noise + sentinels + end token."""
        noise, spans = (int(x) for x in self.noise_counts(np.asarray(source_length - 1)))
        return source_length - noise + spans, noise + spans + 1

    def source_length(self, length: int) -> int:
        """Return the length of the longest row whose encoder side is not longer than `length`."""
        return bisect_right(range(2**31), length, key=lambda source: self.encoder_decoder_lengths(source)[0]) - 1

    def max_documents(self, source_length: int) -> int | None:
        """Return the largest number of documents with which any row still fits into the encoder.

        The worst case is documents of equal length of which only some get a span: each of these can lose all tokens but
        one, and adds its sentinel.
        """
        T, U = self.encoder_decoder_lengths(source_length)
        filled = np.arange(T, source_length + 1)
        for docs in range(int(self.noise_counts(np.asarray(source_length - 1))[1]), 1, -1):
            spans = np.minimum(self.row_noise_counts(filled, np.asarray(docs), U)[1], docs)
            if ((filled - docs) * spans // docs - 2 * spans >= filled - T).all():
                return docs
        return 1

    def row_noise_counts(
        self, num_filled: np.ndarray, num_documents: np.ndarray, decoder_length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the noise tokens and spans of rows with `num_filled` tokens, end tokens included, that fit into U."""
        noise, spans = self.noise_counts(num_filled - 1)
        over = np.maximum(noise + spans + num_documents - decoder_length, 0)
        less = np.minimum((over + 1) // 2, np.maximum(spans - 1, 0))
        return noise - less, spans - less

    def count_row_noise(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of noise tokens and of spans of each row (B,)."""
        U = self.encoder_decoder_lengths(rows.input_ids.shape[1])[1]
        return self.row_noise_counts((rows.document_ids >= 0).sum(1), rows.document_ids.max(1) + 1, U)

    def build_noise_mask(self, rows: Rows, rng: CounterRNG) -> np.ndarray:
        """Return which tokens are noise (B, L)."""
        noise_B, spans_B = self.count_row_noise(rows)
        return noise_mask.t5_noise_mask(rows.document_ids, rows.maskable, noise_B, spans_B, rng)

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        T, U = self.encoder_decoder_lengths(rows.input_ids.shape[1])
        return corruption.sentinel_batch(rows, self.build_noise_mask(rows, rng), T, U, vocab)


@dataclass(frozen=True)
class SpanCorruptionAndMLM(SpanCorruption):
    """Span corruption, and masked language modelling by the encoder in the same rows.

        text      Thank you for inviting me to your party last week </s>
        input     Thank you <0> me <mask> your party <1> week </s>      the encoder predicts: to
        target    <0> for inviting <1> last </s>

    In span corruption the decoder sees the words before a gap, and can guess much without the encoder: an encoder of
    8 layers, trained so for 1,500 steps, cannot yet compare two sentences, where a masked language model of the same
    parts can (docs/history.md, which part of T5 holds it back). Here the encoder has a task of its own, as BERT has it,
    at the cost of the LM head for the masked tokens.

    - mask_rate: share of the tokens outside the spans that are masked
    - detected_share: share of the rows whose masks a small generator fills. There the encoder does not predict them; it
      classifies each token as original or replaced (ELECTRA, `models/electra.py`)

    The published tokenizers of T5 have no mask token; the last sentinel stands for it there, as rows never have so many
    spans. The loss is the mean over the labels of both sides.
    """

    mask_rate: float = 0.15
    detected_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rate("objective.mask_rate", self.mask_rate)
        check_share("objective.detected_share", self.detected_share)

    @property
    def extras(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("detector",) if self.detected_share else ()

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        sentinel_ids = vocab.sentinel_ids if vocab.mask is not None else vocab.sentinel_ids[:-1]
        super().check(replace(vocab, sentinel_ids=sentinel_ids), source_length)

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        encoder_targets = (1 - self.rate) * self.mask_rate * (1 - self.detected_share)
        return super().expected_rates(rows) | {"encoder_targets": encoder_targets}

    @property
    def span_corruption(self) -> SpanCorruption:
        """The decoder's part alone."""
        return SpanCorruption(self.rate, self.mean_span)

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        L = rows.input_ids.shape[1]
        noise_BL = self.build_noise_mask(rows, rng)
        batch = corruption.sentinel_batch(rows, noise_BL, *self.encoder_decoder_lengths(L), vocab)
        mask_BL = noise_mask.mask_lowest_keys(rng.uniform("masked", L), rows.maskable & ~noise_BL, self.mask_rate)
        K = noise_mask.num_target_slots(self.mask_rate, L)
        mask_id = vocab.sentinel_ids[-1] if vocab.mask is None else vocab.mask
        batch = corruption.mask_encoder_tokens(batch, rows, noise_BL, mask_BL, K, mask_id)
        if not self.detected_share:
            return batch
        is_detected_B1 = rng.uniform("detected rows", 1) < self.detected_share
        return batch._replace(
            encoder_labels=np.where(is_detected_B1, IGNORE_INDEX, batch.encoder_labels),
            generator_positions=batch.encoder_target_positions,
            generator_labels=np.where(is_detected_B1, batch.encoder_labels, IGNORE_INDEX),
        )


@dataclass(frozen=True)
class DecoderDenoising(SpanCorruption):
    """Span corruption for a decoder: the corrupted text, then the target, in one row (T5, section 3.2.4).

    Only the target has a loss. The text is read causally or, with `prefix`, attends to all of itself.
    """

    prefix: bool = False
    architectures = ("decoder",)

    def source_length(self, length: int) -> int:
        """Return the length of the longest row whose text and target together have at most `length` tokens."""
        return bisect_right(range(2**31), length, key=lambda source: sum(self.encoder_decoder_lengths(source))) - 1

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        T, U = self.encoder_decoder_lengths(rows.input_ids.shape[1])
        return corruption.decoder_denoising_batch(rows, self.build_noise_mask(rows, rng), T + U, U, vocab, self.prefix)


@dataclass(frozen=True)
class SalientSpanCorruption(ObjectiveBase):
    """Replace names, numbers and dates by sentinels; the decoder writes them (Roberts et al. 2020, section 3)."""

    rate: float = 0.15
    architectures = ("encoder-decoder",)
    token_flags = ("word_start", "salient")
    max_row_documents = 4  # each document of a row needs an end token in the target, which has a fixed length

    def __post_init__(self) -> None:
        check_rate("objective.rate", self.rate)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_sentinel_template(vocab)

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        check_enough_sentinels(noise_mask.num_target_slots(self.rate, source_length), vocab, "Lower objective.rate")

    def max_documents(self, source_length: int) -> int | None:
        return self.max_row_documents

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        return {"targets": self.rate}

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        length = rows.input_ids.shape[1]
        # The worst case is spans of one token: each adds a sentinel and itself to the target.
        U = 2 * noise_mask.num_target_slots(self.rate, length) + self.max_row_documents
        return corruption.sentinel_batch(rows, SalientSpanMasking()(rows, self.rate, rng), length, U, vocab)


class BARTStages(NamedTuple):
    """The text after each noise of BART, in the order of application; equal to the one before where a noise is off."""

    original: NoisyText
    permuted: NoisyText
    rotated: NoisyText
    deleted: NoisyText
    infilled: NoisyText
    masked: NoisyText


@dataclass(frozen=True)
class BARTDenoising(ObjectiveBase):
    """Corrupt the encoder's text; the decoder writes the whole original (Lewis et al. 2020, section 2.2).

    - permute: share of the documents whose sentences are permuted
    - rotate: share of the documents that start at a random token
    - delete, mask: share of the tokens that are deleted, or become [MASK]
    - infill: share of the tokens in spans that become one [MASK] each
    - mean_span: mean of the Poisson distribution of span lengths; length 0 inserts a [MASK]
    """

    permute: float = 1.0
    rotate: float = 0.0
    delete: float = 0.0
    mask: float = 0.0
    infill: float = 0.3
    mean_span: float = 3.0
    architectures = ("encoder-decoder",)
    adds_bos = True

    def __post_init__(self) -> None:
        for name in BART_NOISES:
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"objective.{name} is {getattr(self, name)}, and must lie between 0 and 1.")
        if max(self.delete, self.mask, self.infill) == 1:
            raise UserError("objective.delete, objective.mask and objective.infill must leave some text: less than 1.")
        if not 0 < self.mean_span <= 100:
            raise UserError(f"objective.mean_span is {self.mean_span}, and must lie between 0 and 100.")
        if not any(getattr(self, name) for name in BART_NOISES):
            raise UserError("objective: without any noise the decoder would only copy. Set one, such as infill=0.3.")

    @property
    def token_flags(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("sentence_end",) if self.permute else ()

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        require_special_token(vocab.mask, "mask token", "BART")
        return build_pair_template(vocab, "BART")

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        if self.infill:
            check_mean_span_fits(
                self.infill * source_length, self.mean_span, "Lower objective.mean_span, raise objective.infill"
            )

    def expected_rates(self, rows: Rows | None = None) -> dict[str, float]:
        rates = {"permuted": self.permute, "rotated": self.rotate, "deleted": self.delete, "masked": self.mask}
        rates = {name: rate for name, rate in rates.items() if rate}
        return rates | ({"infilled": self.infill, "mean_span": self.mean_span} if self.infill else {})

    def corrupt(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> BARTStages:
        """Return the encoder's text after each noise; `masked` is what the encoder reads."""
        L = rows.input_ids.shape[1]
        original = permuted = NoisyText(rows.input_ids, rows.document_ids, rows.maskable)
        if self.permute:
            assert rows.sentence_end is not None
            permuted = corruption.permute_sentences(original, rows.sentence_end, self.permute, rng)
        rotated = corruption.rotate_documents(permuted, self.rotate, rng) if self.rotate else permuted
        deleted = rotated
        if self.delete:
            noise_BL = noise_mask.mask_lowest_keys(rng.uniform("deleted", L), rotated.maskable, self.delete)
            deleted = corruption.delete_tokens(rotated, noise_BL, vocab.pad)
        infilled = deleted
        if self.infill:
            length_probs = noise_mask.poisson_length_probs(self.mean_span)
            infilled = corruption.infill_spans(deleted, length_probs, self.infill, rng, vocab)
        masked = infilled
        if self.mask:
            noise_BL = noise_mask.mask_lowest_keys(rng.uniform("masked", L), infilled.maskable, self.mask)
            masked = corruption.mask_tokens(infilled, noise_BL, vocab)
        return BARTStages(original, permuted, rotated, deleted, infilled, masked)

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        text = self.corrupt(rows, rng, vocab).masked
        labels = np.where(rows.document_ids >= 0, rows.input_ids, IGNORE_INDEX)
        start_token = require_special_token(vocab.sep, "[SEP]", "BART")
        return corruption.encoder_decoder_batch(
            text.input_ids, text.document_ids, labels, rows.document_ids, start_token, vocab.pad
        )
