"""Every objective as a named composition: choose, corrupt, ask.

An objective is a small frozen type. It says which models can do it (`architectures`), which rows it reads (`row_layout`, `token_flags`,
`source_length`, `max_documents`, and `build_template`: what stands around each document), what the model needs for it
(`extras`), and turns rows into a batch of fixed shape.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from firth.core.errors import UserError
from firth.objectives import corruption, noise_mask, visibility
from firth.objectives.batch import IGNORE_INDEX, Batch
from firth.objectives.counter_rng import CounterRNG
from firth.objectives.noise_mask import SalientSpanMasking, SpanMasking, TokenMasking, WholeWordMasking
from firth.tokens import Rows, SequenceTemplate, Vocabulary

RowLayout = Literal["packed", "next", "order", "sides"]
MaskingScheme = TokenMasking | WholeWordMasking | SpanMasking | SalientSpanMasking
TOKEN_MASKING = TokenMasking()


class ObjectiveBase:
    """What most objectives have in common: rows of packed documents as long as the model's, and nothing special."""

    architectures: tuple[str, ...] = ("encoder",)
    row_layout: RowLayout = "packed"
    token_flags: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    adds_bos: bool = False  # texts stand between two marks, and an encoder-decoder's decoder begins with the second

    def source_length(self, length: int) -> int:
        """How long the rows are that it reads, for a model that reads `length` tokens."""
        return length

    def max_documents(self, source_length: int) -> int | None:
        """How many documents may share a row; None for any number."""
        return None

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        """Refuse a tokenizer, or rows of a length, that it cannot work with."""
        self.build_template(vocab)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        raise NotImplementedError

    def expected_rates(self) -> dict[str, float]:
        """The shares that a person can hold it to."""
        return {}


# --- what several of them need -------------------------------------------------------------------------------------


def causal_labels(tokens_BL: np.ndarray, doc_BL: np.ndarray) -> np.ndarray:
    """For each place the next token of its document."""
    labels = np.full_like(tokens_BL, IGNORE_INDEX)
    same = (doc_BL[:, 1:] == doc_BL[:, :-1]) & (doc_BL[:, 1:] >= 0)
    labels[:, :-1] = np.where(same, tokens_BL[:, 1:], IGNORE_INDEX)
    return labels


def build_text_template(vocab: Vocabulary, objective: str) -> SequenceTemplate:
    end = require_special_token(vocab.eos, "an end-of-text token", objective)
    return SequenceTemplate((end if vocab.bos is None else vocab.bos,), (end,), document_edges_only=True)


def build_pair_template(vocab: Vocabulary, objective: str) -> SequenceTemplate:
    sep = require_special_token(vocab.sep, "[SEP]", objective)
    return SequenceTemplate((require_special_token(vocab.cls, "[CLS]", objective),), (sep,), separator_ids=(sep,))


def build_sentinel_template(vocab: Vocabulary) -> SequenceTemplate:
    if not vocab.sentinel_ids:
        raise UserError("Span corruption needs sentinel tokens (<extra_id_0> ...): take a unigram tokenizer.")
    return SequenceTemplate((), (require_special_token(vocab.eos, "an end token", "span corruption"),))


def require_special_token(token_id: int | None, token_name: str, objective: str) -> int:
    if token_id is None:
        raise UserError(
            f"The tokenizer has no {token_name.removeprefix('a ').removeprefix('an ')}, which {objective} needs. "
            "Take another one: those of `firth tokenizer --kind byte-bpe` have it."
        )
    return token_id


def check_objective_rate(field_name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UserError(f"{field_name} is {value}, and must lie between 0 and 1.")


def check_mean_span_fits(num_noise_tokens: float, mean_span: float, remedy: str) -> None:
    """Whether the noise of a row is as much as one span has on average."""
    if mean_span > num_noise_tokens:
        raise UserError(
            f"Rows of this length have {num_noise_tokens:.0f} tokens of noise, fewer than one span of {mean_span:.3g}. "
            f"{remedy}, or lengthen --max-seq-length."
        )


def check_enough_sentinels(num_spans: int, vocab: Vocabulary, remedy: str) -> None:
    """Whether the tokenizer has a sentinel for each span of a row."""
    if num_spans > len(vocab.sentinel_ids):
        raise UserError(
            f"Rows of this length have up to {num_spans} spans, and the tokenizer has {len(vocab.sentinel_ids)} sentinels. "
            f"{remedy}, or shorten --max-seq-length."
        )


# --- language models ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CLM(ObjectiveBase):
    """Each token is asked of those before it in its document.

    `across_documents` reads a packed row as one text (GPT-2): who comes after a document's edge sees what was before it, and is
    asked of it.
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
class PrefixLM(ObjectiveBase):
    """A random prefix of each document sees all of itself; what follows is asked in order (T5, section 3.2.1)."""

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
    """Each token is asked of those before it, and again of those after it (ELMo, section 3.1)."""

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_pair_template(vocab, "biLM")

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        place = np.arange(rows.document_ids.shape[1])
        rank = np.broadcast_to(np.stack([place, place[::-1]]), (len(rows.document_ids), 2, len(place)))
        backward = causal_labels(rows.input_ids[:, ::-1], rows.document_ids[:, ::-1])[:, ::-1]
        labels = np.stack([causal_labels(rows.input_ids, rows.document_ids), backward], 1)
        return Batch(
            rows.input_ids,
            document_ids=rows.document_ids,
            position_ids=rows.position_ids,
            attention_rank=rank.copy(),
            labels=labels,
        )


@dataclass(frozen=True)
class EncoderDecoderLM(ObjectiveBase):
    """A random prefix of each document is for the encoder, and the rest is asked of the decoder (T5, section 3.2.3)."""

    architectures = ("encoder-decoder",)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return SequenceTemplate((), (require_special_token(vocab.eos, "an end token", "the encoder-decoder LM"),))

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        return corruption.split_prefix_batch(rows, visibility.sample_prefix_lengths(rows.document_ids, rng), vocab)


@dataclass(frozen=True)
class PermutationLM(ObjectiveBase):
    """A share of each document, in short spans, is asked in random order of the rest and of itself (XLNet, section 2).

    Everything is read as it is: what a place may see when it is asked is a matter of the model's second stream.
    """

    share: float = 1 / 6
    max_span_length: int = 5
    extras = ("query",)

    def __post_init__(self) -> None:
        check_objective_rate("objective.share", self.share)
        if self.max_span_length < 1:
            raise UserError(f"objective.max_span_length is {self.max_span_length}, and must be at least 1.")

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_pair_template(vocab, "the permutation LM")

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        if self.max_span_length / self.share > source_length:
            raise UserError(
                f"Spans of up to {self.max_span_length} tokens, one in {self.max_span_length / self.share:.0f}, do not fit into rows "
                f"of {source_length}. Lower objective.max_span_length or lengthen --max-seq-length."
            )

    def expected_rates(self) -> dict[str, float]:
        return {"asked": self.share, "mean_span": (1 + self.max_span_length) / 2}

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        target = noise_mask.sample_windowed_spans(rows.maskable, self.share, self.max_span_length, rng)
        asked = corruption.select_targets(
            target, noise_mask.num_window_slots(self.share, self.max_span_length, target.shape[1])
        )
        truth = np.take_along_axis(rows.input_ids, asked.positions, 1)
        return Batch(
            rows.input_ids,
            document_ids=rows.document_ids,
            position_ids=rows.position_ids,
            attention_rank=visibility.sample_permutation_ranks(target, rng),
            target_positions=asked.positions,
            labels=np.where(asked.is_used, truth, IGNORE_INDEX),
        )


# --- masked tokens ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MLM(ObjectiveBase):
    """A share of the tokens is asked; of these most are masked, some are random, some are kept (BERT, section 3.1).

    - choose: single tokens, whole words, spans (SpanBERT), salient spans first
    - ask: the tokens; 'boundary': again from the two tokens around each span (SpanBERT); 'replaced': of a small
      generator, and of the model which tokens the generator replaced (ELECTRA)
    - sees: all; forward or backward only; a random prefix and then forward (UniLM)
    - pair: one text; two that follow each other or not (NSP), in order or swapped (SOP); a translation (TLM)
    - copies: 0 draws new masks every time (RoBERTa), 10 keeps ten for each row and takes them in turn (BERT)
    """

    rate: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    masking: MaskingScheme = TOKEN_MASKING
    targets: Literal["tokens", "boundary", "replaced"] = "tokens"
    visibility: Literal["all", "forward", "backward", "prefix"] = "all"
    pair: Literal["none", "next", "order", "translation"] = "none"
    num_static_masks: int = 0

    def __post_init__(self) -> None:
        check_objective_rate("objective.rate", self.rate)
        if not (self.mask >= 0 and self.random >= 0 and self.mask + self.random <= 1):
            raise UserError("objective.mask and objective.random must not be negative, and add up to at most 1.")
        if self.num_static_masks < 0:
            raise UserError(
                f"objective.num_static_masks is {self.num_static_masks}, and must be 0 (new masks every time) or more."
            )

    @property
    def row_layout(self) -> RowLayout:  # type: ignore[override]
        layouts: dict[str, RowLayout] = {"none": "packed", "next": "next", "order": "order", "translation": "sides"}
        return layouts[self.pair]

    @property
    def token_flags(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.masking.token_flags

    @property
    def extras(self) -> tuple[str, ...]:  # type: ignore[override]
        parts = {"boundary": ("boundary",), "replaced": ("generator",)}.get(self.targets, ())
        return parts + (("pair",) if self.pair in ("next", "order") else ())

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        require_special_token(vocab.mask, "a mask token", "MLM")
        return build_pair_template(vocab, "MLM")

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        if isinstance(self.masking, SpanMasking):
            check_mean_span_fits(
                self.rate * source_length,
                self.masking.mean_length,
                "Lower objective.masking.max_span_length, raise objective.rate",
            )

    def expected_rates(self) -> dict[str, float]:
        kept = round(1 - self.mask - self.random, 9)
        shares = {"asked": self.rate, "masked": self.mask, "random": self.random, "kept": kept}
        if isinstance(self.masking, SpanMasking):
            shares["mean_span"] = self.masking.mean_length
        return shares | ({"pairs": 0.5} if self.pair in ("next", "order") else {})

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        if self.num_static_masks:
            assert rows.row_index is not None
            assert rows.epoch is not None
            rng = replace(rng, index=rows.row_index * self.num_static_masks + rows.epoch % self.num_static_masks)
        chosen = self.masking(rows, self.rate, rng)
        asked = corruption.select_targets(chosen, self.masking.num_slots(self.rate, chosen.shape[1]))
        unit, around = (
            corruption.find_target_spans(chosen, asked)
            if self.masking.noise_per_span or self.targets == "boundary"
            else (None, None)
        )
        fate = unit if self.masking.noise_per_span else None
        tokens, labels = corruption.apply_mlm_noise(rows.input_ids, asked, rng, vocab, self.mask, self.random, fate)
        rank, segment = self.rank_and_token_types(rows, rng)
        return Batch(
            tokens,
            document_ids=rows.document_ids,
            position_ids=rows.position_ids,
            attention_rank=rank,
            token_type_ids=segment,
            target_positions=asked.positions,
            labels=labels,
            span_boundaries=around if self.targets == "boundary" else None,
            pair_labels=rows.pair_labels,
        )

    def rank_and_token_types(self, rows: Rows, rng: CounterRNG) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Rank and segment."""
        if self.visibility == "all":
            return None, rows.token_type_ids
        if self.visibility == "prefix":
            rank = visibility.attention_rank(
                rows.position_ids, visibility.sample_prefix_lengths(rows.document_ids, rng)
            )
            return rank, (rank > 0).astype(np.int32)
        place = np.arange(rows.document_ids.shape[1])
        return np.tile(
            place if self.visibility == "forward" else place[::-1], (len(rows.document_ids), 1)
        ), rows.token_type_ids


# --- text to text -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpanCorruption(ObjectiveBase):
    """Spans become sentinels, and the decoder writes them out (T5, section 3.1.4).

    A full row of `source_length` tokens fills both `encoder_decoder_lengths`, the encoder's and the decoder's, exactly.
    Where several documents share a row, each further one ends with its own end token in the answer; every two of them
    cost one token of noise and one span, so that both sides keep their lengths.
    """

    rate: float = 0.15
    mean_span: float = 3.0
    architectures = ("encoder-decoder",)

    def __post_init__(self) -> None:
        check_objective_rate("objective.rate", self.rate)
        if not self.mean_span >= 1:
            raise UserError(f"objective.mean_span is {self.mean_span}, and must be at least 1.")

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_sentinel_template(vocab)

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        noise, spans = (int(x) for x in self.noise_counts(np.asarray(source_length - 1)))
        check_mean_span_fits(noise, self.mean_span, "Lower objective.mean_span, raise objective.rate")
        check_enough_sentinels(spans, vocab, "Lower objective.rate, raise objective.mean_span")

    def expected_rates(self) -> dict[str, float]:
        return {"asked": self.rate, "mean_span": self.mean_span}

    def noise_counts(self, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Noise tokens and spans for so many tokens of text; text remains, and each span has some before it."""
        noise = np.clip(np.floor(self.rate * num_tokens + 0.5), 1, num_tokens - 1).astype(np.int64)
        spans = np.clip(np.floor(noise / self.mean_span + 0.5), 1, num_tokens - noise).astype(np.int64)
        return np.where(num_tokens > 1, noise, 0), np.where(num_tokens > 1, spans, 0)

    def encoder_decoder_lengths(self, source_length: int) -> tuple[int, int]:
        """Encoder and decoder lengths for a row of one document: text, less noise, plus sentinels, plus the end."""
        noise, spans = (int(x) for x in self.noise_counts(np.asarray(source_length - 1)))
        return source_length - noise + spans, noise + spans + 1

    def source_length(self, length: int) -> int:
        """The longest row whose encoder side is not longer than `length`."""
        return bisect_right(range(2**31), length, key=lambda source: self.encoder_decoder_lengths(source)[0]) - 1

    def max_documents(self, source_length: int) -> int | None:
        """So many that the encoder's side has room for what is not noise, however the text is divided among them.

        The worst case is documents of one length of which only some get a span: each of these can lose all tokens but
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
        """Noise tokens and spans of a row in which `num_documents` documents fill so many places, ends included."""
        noise, spans = self.noise_counts(num_filled - 1)
        over = np.maximum(noise + spans + num_documents - decoder_length, 0)
        less = np.minimum((over + 1) // 2, np.maximum(spans - 1, 0))
        return noise - less, spans - less

    def build_noise_mask(self, rows: Rows, rng: CounterRNG) -> np.ndarray:
        """Which tokens are noise (B, L)."""
        U = self.encoder_decoder_lengths(rows.input_ids.shape[1])[1]
        noise_B, spans_B = self.row_noise_counts((rows.document_ids >= 0).sum(1), rows.document_ids.max(1) + 1, U)
        return noise_mask.t5_noise_mask(rows.document_ids, rows.maskable, noise_B, spans_B, rng)

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        return corruption.sentinel_batch(
            rows, self.build_noise_mask(rows, rng), *self.encoder_decoder_lengths(rows.input_ids.shape[1]), vocab
        )


@dataclass(frozen=True)
class DecoderDenoising(SpanCorruption):
    """Span corruption for a decoder alone: the corrupted text and then its answers in one row (T5, section 3.2.4).

    Only the answers are asked. The text is read in order, or with `prefix` sees all of itself.
    """

    prefix: bool = False
    architectures = ("decoder",)

    def source_length(self, length: int) -> int:
        """The longest row that has room for text and answers, though each document adds an end to them."""
        return bisect_right(range(2**31), length, key=lambda source: sum(self.encoder_decoder_lengths(source))) - 1

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        T, U = self.encoder_decoder_lengths(rows.input_ids.shape[1])
        return corruption.decoder_denoising_batch(rows, self.build_noise_mask(rows, rng), T + U, U, vocab, self.prefix)


@dataclass(frozen=True)
class SalientSpanCorruption(ObjectiveBase):
    """Names, numbers and dates become sentinels, and the decoder writes them out (Roberts et al. 2020, section 3)."""

    rate: float = 0.15
    architectures = ("encoder-decoder",)
    token_flags = ("word_start", "salient")
    max_row_documents = 4  # at most so many share a row: each has an end of its own in the answer

    def __post_init__(self) -> None:
        check_objective_rate("objective.rate", self.rate)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        return build_sentinel_template(vocab)

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        check_enough_sentinels(noise_mask.num_target_slots(self.rate, source_length), vocab, "Lower objective.rate")

    def max_documents(self, source_length: int) -> int | None:
        return self.max_row_documents

    def expected_rates(self) -> dict[str, float]:
        return {"asked": self.rate}

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        length = rows.input_ids.shape[1]
        noise = SalientSpanMasking()(rows, self.rate, rng)
        return corruption.sentinel_batch(
            rows, noise, length, 2 * noise_mask.num_target_slots(self.rate, length) + self.max_row_documents, vocab
        )


@dataclass(frozen=True)
class BARTDenoising(ObjectiveBase):
    """The decoder writes out the whole text that the encoder reads corrupted (Lewis et al. 2020, section 2.2).

    - permute: the sentences of this share of the documents change places
    - rotate: this share of the documents begins at a random token
    - delete, mask: this share of the tokens goes, or becomes a mask
    - infill: this share of the tokens goes in spans of Poisson length around `mean_span`, none included, each of which
      becomes one mask
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
        for name in ("permute", "rotate", "delete", "mask", "infill"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"objective.{name} is {getattr(self, name)}, and must lie between 0 and 1.")
        if max(self.delete, self.mask, self.infill) == 1:
            raise UserError("objective.delete, objective.mask and objective.infill must leave some text: less than 1.")
        if not 0 < self.mean_span <= 100:
            raise UserError(f"objective.mean_span is {self.mean_span}, and must lie between 0 and 100.")
        if not any((self.permute, self.rotate, self.delete, self.mask, self.infill)):
            raise UserError("objective: without any noise the decoder would only copy. Set one, such as infill=0.3.")

    @property
    def token_flags(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("sentence_end",) if self.permute else ()

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        require_special_token(vocab.mask, "a mask token", "BART")
        return build_pair_template(vocab, "BART")

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        self.build_template(vocab)
        if self.infill:
            check_mean_span_fits(
                self.infill * source_length, self.mean_span, "Lower objective.mean_span, raise objective.infill"
            )

    def expected_rates(self) -> dict[str, float]:
        shares = {"permuted": self.permute, "rotated": self.rotate, "deleted": self.delete, "masked": self.mask}
        shares = {name: share for name, share in shares.items() if share}
        return shares | ({"infilled": self.infill, "mean_span": self.mean_span} if self.infill else {})

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        text = corruption.NoisyText(rows.input_ids, rows.document_ids, rows.maskable)
        if self.permute:
            assert rows.sentence_end is not None
            text = corruption.permute_sentences(text, rows.sentence_end, self.permute, rng)
        if self.rotate:
            text = corruption.rotate_documents(text, self.rotate, rng)
        if self.delete:
            chosen = noise_mask.mask_lowest_keys(
                rng.uniform("deleted", text.maskable.shape[1]), text.maskable, self.delete
            )
            text = corruption.mask_or_delete(text, chosen, True, vocab)
        if self.infill:
            text = corruption.infill_spans(
                text, noise_mask.poisson_length_probs(self.mean_span), self.infill, rng, vocab
            )
        if self.mask:
            chosen = noise_mask.mask_lowest_keys(
                rng.uniform("masked", text.maskable.shape[1]), text.maskable, self.mask
            )
            text = corruption.mask_or_delete(text, chosen, False, vocab)
        labels = np.where(rows.document_ids >= 0, rows.input_ids, IGNORE_INDEX)
        start_token = require_special_token(vocab.sep, "[SEP]", "BART")
        return corruption.encoder_decoder_batch(
            text.input_ids, text.document_ids, labels, rows.document_ids, start_token, vocab.pad
        )


# --- mixtures -----------------------------------------------------------------------------------------------------

SingleObjective = (
    CLM
    | PrefixLM
    | BiLM
    | EncoderDecoderLM
    | PermutationLM
    | MLM
    | SpanCorruption
    | DecoderDenoising
    | SalientSpanCorruption
    | BARTDenoising
)


@dataclass(frozen=True)
class WeightedObjective:
    objective: SingleObjective
    weight: float = 1.0


@dataclass(frozen=True)
class Mixture:
    """Several objectives in one run: each row, or each step, is of one of them, drawn by weight.

    They read the same rows, so their frames must be the same; a batch has room for the widest of them.
    """

    parts: tuple[WeightedObjective, ...]
    sample_per: Literal["row", "batch"] = "row"

    def __post_init__(self) -> None:
        if not self.parts or not all(0 < part.weight < float("inf") for part in self.parts):
            raise UserError("objective.parts: a mixture needs objectives, each with a weight of more than 0.")
        if not self.architectures:
            raise UserError("objective.parts: no one architecture can do all of these objectives.")
        if len({part.objective.row_layout for part in self.parts}) > 1:
            raise UserError("objective.parts: texts and pairs of texts cannot be mixed in one run.")
        kinds = {(part.objective.extras, isinstance(part.objective, BiLM)) for part in self.parts}
        if len(kinds) > 1:
            raise UserError("objective.parts: one of these asks the model in a way of its own, and cannot be mixed.")

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(
            s for s in self.parts[0].objective.architectures if all(s in p.objective.architectures for p in self.parts)
        )

    @property
    def row_layout(self) -> RowLayout:
        return self.parts[0].objective.row_layout

    @property
    def token_flags(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(bit for part in self.parts for bit in part.objective.token_flags))

    @property
    def extras(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(extra for part in self.parts for extra in part.objective.extras))

    @property
    def adds_bos(self) -> bool:
        return self.parts[0].objective.adds_bos

    def source_length(self, length: int) -> int:
        return min(part.objective.source_length(length) for part in self.parts)

    def max_documents(self, source_length: int) -> int | None:
        limits = [part.objective.max_documents(source_length) for part in self.parts]
        return min((limit for limit in limits if limit is not None), default=None)

    def check(self, vocab: Vocabulary, source_length: int) -> None:
        for part in self.parts:
            part.objective.check(vocab, source_length)
        self.build_template(vocab)

    def build_template(self, vocab: Vocabulary) -> SequenceTemplate:
        frames = {part.objective.build_template(vocab) for part in self.parts}
        if len(frames) > 1:
            raise UserError(
                "objective.parts: these objectives put different tokens around a text; they cannot be mixed."
            )
        return frames.pop()

    def expected_rates(self) -> dict[str, float]:
        total = sum(part.weight for part in self.parts)
        return {f"part {i + 1}": part.weight / total for i, part in enumerate(self.parts)}

    def sample_parts(self, rng: CounterRNG) -> np.ndarray:
        """Which part each row is of (B,)."""
        if self.sample_per == "batch":
            rng = replace(rng, index=rng.index if rng.step is None else rng.step)
        share = np.cumsum([part.weight for part in self.parts])
        return np.searchsorted(share[:-1] / share[-1], rng.uniform("part", 1)[:, 0], side="right")

    def __call__(self, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> Batch:
        part_B = self.sample_parts(rng)
        chosen = [np.flatnonzero(part_B == i) for i in range(len(self.parts))]
        batches = []
        for part, take in zip(self.parts, chosen, strict=True):
            some = take if len(take) else np.zeros(1, np.int64)  # of a part that no row is of, the shapes are needed
            step = None if rng.step is None else rng.step[some]
            subset = Rows(*(None if x is None else x[some] for x in rows))  # type: ignore[arg-type]
            batches.append(part.objective(subset, CounterRNG(rng.seed, rng.index[some], step), vocab))
        return merge_batches(batches, chosen, vocab.pad, is_causal="decoder" in self.architectures)


def merge_batches(batches: list[Batch], row_indices: list[np.ndarray], pad_token_id: int, is_causal: bool) -> Batch:
    """One batch of several with different fields and widths: batch i has the rows `rows[i]` of it, perhaps none."""
    batches = [fill_default_fields(batch, batches, is_causal) for batch in batches]
    B = sum(map(len, row_indices))
    empty = {"input_ids": pad_token_id, "decoder_input_ids": pad_token_id, "document_ids": -1, "labels": IGNORE_INDEX}
    fields = {}
    for name in Batch._fields:
        arrays = [getattr(batch, name) for batch in batches]
        if arrays[0] is None:
            continue
        shape = np.max([a.shape[1:] for a in arrays], axis=0)
        merged = np.full((B, *shape), empty.get(name, 0), arrays[0].dtype)
        for array, take in zip(arrays, row_indices, strict=True):
            if len(take):
                merged[np.ix_(take, *map(np.arange, array.shape[1:]))] = array
                if name == "decoder_document_ids":  # padding passes for a part of the row's last document
                    merged[take, array.shape[1] :] = array[:, -1:]
        fields[name] = merged
    return Batch(**fields)


def fill_default_fields(batch: Batch, others: list[Batch], is_causal: bool) -> Batch:
    """The same batch with what it leaves to the default written down, where another of `others` has it."""
    fields = {name for name in Batch._fields if any(getattr(other, name) is not None for other in others)}
    place = np.broadcast_to(np.arange(batch.input_ids.shape[1]), batch.input_ids.shape)
    asks = batch.labels.shape if batch.labels is not None else batch.input_ids.shape
    default = {
        "attention_rank": place if is_causal else np.zeros_like(batch.input_ids),
        "token_type_ids": np.zeros(batch.input_ids.shape, np.int32),
        "target_positions": np.broadcast_to(np.arange(asks[-1]), asks),
    }
    missing = {name: default[name] for name in fields if getattr(batch, name) is None}
    return batch._replace(**missing)


Objective = SingleObjective | Mixture


# --- by name ------------------------------------------------------------------------------------------------------

UNILM = Mixture(  # Dong et al. 2019, section 2.3
    (
        WeightedObjective(MLM(), 1 / 3),
        WeightedObjective(MLM(visibility="prefix"), 1 / 3),
        WeightedObjective(MLM(visibility="forward"), 1 / 6),
        WeightedObjective(MLM(visibility="backward"), 1 / 6),
    )
)
UL2_DENOISERS = Mixture(  # after Tay et al. 2023 (UL2), table 1: usual, extreme and sequential denoising
    (
        WeightedObjective(SpanCorruption(0.15, 3.0)),
        WeightedObjective(SpanCorruption(0.15, 8.0)),
        WeightedObjective(SpanCorruption(0.5, 3.0)),
        WeightedObjective(SpanCorruption(0.5, 8.0)),
        WeightedObjective(EncoderDecoderLM()),
    )
)
OBJECTIVES: dict[str, Objective] = {
    "clm": CLM(),
    "mlm": MLM(),
    "whole-word": MLM(masking=WholeWordMasking()),
    "span": MLM(masking=SpanMasking(), targets="boundary"),
    "salient": MLM(masking=SalientSpanMasking()),
    "static": MLM(num_static_masks=10),
    "nsp": MLM(pair="next"),
    "sop": MLM(pair="order"),
    "tlm": MLM(pair="translation"),
    "rtd": MLM(mask=0.85, random=0.0, targets="replaced"),
    "unilm": UNILM,
    "bilm": BiLM(),
    "permutation-lm": PermutationLM(),
    "prefix-lm": PrefixLM(),
    "encoder-decoder-lm": EncoderDecoderLM(),
    "span-corruption": SpanCorruption(),
    "salient-spans": SalientSpanCorruption(),
    "lm-denoising": DecoderDenoising(),
    "prefix-lm-denoising": DecoderDenoising(prefix=True),
    "bart": BARTDenoising(),
    "denoisers": UL2_DENOISERS,
}
