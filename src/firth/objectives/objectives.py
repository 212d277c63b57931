"""Every objective as a named composition: choose, corrupt, ask.

An objective is a small frozen type. It says which models can do it (`shapes`), which rows it reads (`layout`, `bits`,
`source_length`, `max_documents`, and `frame`: what stands around each document), what the model needs for it
(`extras`), and turns rows into a batch of fixed shape.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from firth.errors import UserError
from firth.objectives import choose, corrupt, sight
from firth.objectives.batch import IGNORED, Batch
from firth.objectives.choose import Salient, Spans, Tokens, Words
from firth.objectives.draw import Draw
from firth.tokens import Frame, Rows, Vocabulary

Layout = Literal["packed", "next", "order", "sides"]
Chooser = Tokens | Words | Spans | Salient
TOKENS = Tokens()


class Plain:
    """What most objectives have in common: rows of packed documents as long as the model's, and nothing special."""

    shapes: tuple[str, ...] = ("encoder",)
    layout: Layout = "packed"
    bits: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    framed: bool = False  # texts stand between two marks, and an encoder-decoder's decoder begins with the second

    def source_length(self, length: int) -> int:
        """How long the rows are that it reads, for a model that reads `length` tokens."""
        return length

    def max_documents(self, source: int) -> int | None:
        """How many documents may share a row; None for any number."""
        return None

    def check(self, vocab: Vocabulary, source: int) -> None:
        """Refuse a tokenizer, or rows of a length, that it cannot work with."""
        self.frame(vocab)

    def frame(self, vocab: Vocabulary) -> Frame:
        raise NotImplementedError

    def promises(self) -> dict[str, float]:
        """The shares that a person can hold it to."""
        return {}


# --- what several of them need -------------------------------------------------------------------------------------


def following(tokens_BL: np.ndarray, doc_BL: np.ndarray) -> np.ndarray:
    """For each place the next token of its document."""
    labels = np.full_like(tokens_BL, IGNORED)
    same = (doc_BL[:, 1:] == doc_BL[:, :-1]) & (doc_BL[:, 1:] >= 0)
    labels[:, :-1] = np.where(same, tokens_BL[:, 1:], IGNORED)
    return labels


def text_frame(vocab: Vocabulary, objective: str) -> Frame:
    end = need(vocab.eos, "an end-of-text token", objective)
    return Frame((end if vocab.bos is None else vocab.bos,), (end,), edges_only=True)


def pair_frame(vocab: Vocabulary, objective: str) -> Frame:
    sep = need(vocab.sep, "[SEP]", objective)
    return Frame((need(vocab.cls, "[CLS]", objective),), (sep,), between=(sep,))


def sentinel_frame(vocab: Vocabulary) -> Frame:
    if not vocab.sentinels:
        raise UserError("Span corruption needs sentinel tokens (<extra_id_0> ...): take a unigram tokenizer.")
    return Frame((), (need(vocab.eos, "an end token", "span corruption"),))


def need(token: int | None, what: str, objective: str) -> int:
    if token is None:
        raise UserError(
            f"The tokenizer has no {what.removeprefix('a ').removeprefix('an ')}, which {objective} needs. "
            "Take another one: those of `firth tokenizer --kind byte-bpe` have it."
        )
    return token


def check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UserError(f"{name} is {value}, and must lie between 0 and 1.")


def check_room(noise: float, mean_span: float, remedy: str) -> None:
    """Whether the noise of a row is as much as one span has on average."""
    if mean_span > noise:
        raise UserError(
            f"Rows of this length have {noise:.0f} tokens of noise, fewer than one span of {mean_span:.3g}. "
            f"{remedy}, or lengthen --max-seq-length."
        )


def check_sentinels(spans: int, vocab: Vocabulary, remedy: str) -> None:
    """Whether the tokenizer has a sentinel for each span of a row."""
    if spans > len(vocab.sentinels):
        raise UserError(
            f"Rows of this length have up to {spans} spans, and the tokenizer has {len(vocab.sentinels)} sentinels. "
            f"{remedy}, or shorten --max-seq-length."
        )


# --- language models ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CLM(Plain):
    """Each token is asked of those before it in its document.

    `across` reads a packed row as one text (GPT-2): who comes after a document's edge sees what was before it, and is
    asked of it.
    """

    across: bool = False
    shapes = ("decoder",)

    def frame(self, vocab: Vocabulary) -> Frame:
        return text_frame(vocab, "CLM")

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        doc, position = rows.doc, rows.position
        if self.across:
            doc = np.minimum(doc, 0)
            position = np.where(doc < 0, 0, np.arange(doc.shape[1], dtype=position.dtype))
        return Batch(rows.tokens, doc=doc, position=position, labels=following(rows.tokens, doc))


@dataclass(frozen=True)
class PrefixLM(Plain):
    """A random prefix of each document sees all of itself; what follows is asked in order (T5, section 3.2.1)."""

    shapes = ("decoder",)

    def frame(self, vocab: Vocabulary) -> Frame:
        return text_frame(vocab, "the prefix LM")

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        rank = sight.rank(rows.position, sight.random_prefix(rows.doc, draw))
        labels = following(rows.tokens, rows.doc)
        labels[:, :-1][rank[:, 1:] == 0] = IGNORED
        return Batch(rows.tokens, doc=rows.doc, position=rows.position, rank=rank, labels=labels)


@dataclass(frozen=True)
class BiLM(Plain):
    """Each token is asked of those before it, and again of those after it (ELMo, section 3.1)."""

    def frame(self, vocab: Vocabulary) -> Frame:
        return pair_frame(vocab, "biLM")

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        place = np.arange(rows.doc.shape[1])
        rank = np.broadcast_to(np.stack([place, place[::-1]]), (len(rows.doc), 2, len(place)))
        backward = following(rows.tokens[:, ::-1], rows.doc[:, ::-1])[:, ::-1]
        labels = np.stack([following(rows.tokens, rows.doc), backward], 1)
        return Batch(rows.tokens, doc=rows.doc, position=rows.position, rank=rank.copy(), labels=labels)


@dataclass(frozen=True)
class EncoderDecoderLM(Plain):
    """A random prefix of each document is for the encoder, and the rest is asked of the decoder (T5, section 3.2.3)."""

    shapes = ("encoder-decoder",)

    def frame(self, vocab: Vocabulary) -> Frame:
        return Frame((), (need(vocab.eos, "an end token", "the encoder-decoder LM"),))

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        return corrupt.prefix_and_rest(rows, sight.random_prefix(rows.doc, draw), vocab)


@dataclass(frozen=True)
class PermutationLM(Plain):
    """A share of each document, in short spans, is asked in random order of the rest and of itself (XLNet, section 2).

    Everything is read as it is: what a place may see when it is asked is a matter of the model's second stream.
    """

    share: float = 1 / 6
    longest: int = 5
    extras = ("query",)

    def __post_init__(self) -> None:
        check_share("objective.share", self.share)
        if self.longest < 1:
            raise UserError(f"objective.longest is {self.longest}, and must be at least 1.")

    def frame(self, vocab: Vocabulary) -> Frame:
        return pair_frame(vocab, "the permutation LM")

    def check(self, vocab: Vocabulary, source: int) -> None:
        self.frame(vocab)
        if self.longest / self.share > source:
            raise UserError(
                f"Spans of up to {self.longest} tokens, one in {self.longest / self.share:.0f}, do not fit into rows "
                f"of {source}. Lower objective.longest or lengthen --max-seq-length."
            )

    def promises(self) -> dict[str, float]:
        return {"asked": self.share, "mean_span": (1 + self.longest) / 2}

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        target = choose.windows(rows.real, self.share, self.longest, draw)
        asked = corrupt.ask(target, choose.window_slots(self.share, self.longest, target.shape[1]))
        truth = np.take_along_axis(rows.tokens, asked.place, 1)
        return Batch(
            rows.tokens,
            doc=rows.doc,
            position=rows.position,
            rank=sight.random_order(target, draw),
            asked=asked.place,
            labels=np.where(asked.used, truth, IGNORED),
        )


# --- masked tokens ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MLM(Plain):
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
    choose: Chooser = TOKENS
    ask: Literal["tokens", "boundary", "replaced"] = "tokens"
    sees: Literal["all", "forward", "backward", "prefix"] = "all"
    pair: Literal["none", "next", "order", "translation"] = "none"
    copies: int = 0

    def __post_init__(self) -> None:
        check_share("objective.rate", self.rate)
        if not (self.mask >= 0 and self.random >= 0 and self.mask + self.random <= 1):
            raise UserError("objective.mask and objective.random must not be negative, and add up to at most 1.")
        if self.copies < 0:
            raise UserError(f"objective.copies is {self.copies}, and must be 0 (new masks every time) or more.")

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        layouts: dict[str, Layout] = {"none": "packed", "next": "next", "order": "order", "translation": "sides"}
        return layouts[self.pair]

    @property
    def bits(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.choose.bits

    @property
    def extras(self) -> tuple[str, ...]:  # type: ignore[override]
        parts = {"boundary": ("boundary",), "replaced": ("generator",)}.get(self.ask, ())
        return parts + (("pair",) if self.pair in ("next", "order") else ())

    def frame(self, vocab: Vocabulary) -> Frame:
        need(vocab.mask, "a mask token", "MLM")
        return pair_frame(vocab, "MLM")

    def check(self, vocab: Vocabulary, source: int) -> None:
        self.frame(vocab)
        if isinstance(self.choose, Spans):
            check_room(self.rate * source, self.choose.mean, "Lower objective.choose.longest, raise objective.rate")

    def promises(self) -> dict[str, float]:
        kept = round(1 - self.mask - self.random, 9)
        shares = {"asked": self.rate, "masked": self.mask, "random": self.random, "kept": kept}
        if isinstance(self.choose, Spans):
            shares["mean_span"] = self.choose.mean
        return shares | ({"pairs": 0.5} if self.pair in ("next", "order") else {})

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        if self.copies:
            assert rows.row is not None
            assert rows.epoch is not None
            draw = replace(draw, index=rows.row * self.copies + rows.epoch % self.copies)
        chosen = self.choose(rows, self.rate, draw)
        asked = corrupt.ask(chosen, self.choose.slots(self.rate, chosen.shape[1]))
        unit, around = corrupt.runs(chosen, asked) if self.choose.one_fate or self.ask == "boundary" else (None, None)
        fate = unit if self.choose.one_fate else None
        tokens, labels = corrupt.hide(rows.tokens, asked, draw, vocab, self.mask, self.random, fate)
        rank, segment = self.sight(rows, draw)
        return Batch(
            tokens,
            doc=rows.doc,
            position=rows.position,
            rank=rank,
            segment=segment,
            asked=asked.place,
            labels=labels,
            boundary=around if self.ask == "boundary" else None,
            pair=rows.pair,
        )

    def sight(self, rows: Rows, draw: Draw) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Rank and segment."""
        if self.sees == "all":
            return None, rows.segment
        if self.sees == "prefix":
            rank = sight.rank(rows.position, sight.random_prefix(rows.doc, draw))
            return rank, (rank > 0).astype(np.int32)
        place = np.arange(rows.doc.shape[1])
        return np.tile(place if self.sees == "forward" else place[::-1], (len(rows.doc), 1)), rows.segment


# --- text to text -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpanCorruption(Plain):
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
        return sentinel_frame(vocab)

    def check(self, vocab: Vocabulary, source: int) -> None:
        self.frame(vocab)
        noise, spans = (int(x) for x in self.counts(np.asarray(source - 1)))
        check_room(noise, self.mean_span, "Lower objective.mean_span, raise objective.rate")
        check_sentinels(spans, vocab, "Lower objective.rate, raise objective.mean_span")

    def promises(self) -> dict[str, float]:
        return {"asked": self.rate, "mean_span": self.mean_span}

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

    def max_documents(self, source: int) -> int | None:
        """So many that the encoder's side has room for what is not noise, however the text is divided among them.

        The worst case is documents of one length of which only some get a span: each of these can lose all tokens but
        one, and adds its sentinel.
        """
        T, U = self.lengths(source)
        filled = np.arange(T, source + 1)
        for docs in range(int(self.counts(np.asarray(source - 1))[1]), 1, -1):
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

    def noise(self, rows: Rows, draw: Draw) -> np.ndarray:
        """Which tokens are noise (B, L)."""
        U = self.lengths(rows.tokens.shape[1])[1]
        noise_B, spans_B = self.shares((rows.doc >= 0).sum(1), rows.doc.max(1) + 1, U)
        return choose.spans(rows.doc, rows.real, noise_B, spans_B, draw)

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        return corrupt.sentinels(rows, self.noise(rows, draw), *self.lengths(rows.tokens.shape[1]), vocab)


@dataclass(frozen=True)
class OneStack(SpanCorruption):
    """Span corruption for a decoder alone: the corrupted text and then its answers in one row (T5, section 3.2.4).

    Only the answers are asked. The text is read in order, or with `prefix` sees all of itself.
    """

    prefix: bool = False
    shapes = ("decoder",)

    def source_length(self, length: int) -> int:
        """The longest row that has room for text and answers, though each document adds an end to them."""
        return bisect_right(range(2**31), length, key=lambda source: sum(self.lengths(source))) - 1

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        T, U = self.lengths(rows.tokens.shape[1])
        return corrupt.one_stack(rows, self.noise(rows, draw), T + U, U, vocab, self.prefix)


@dataclass(frozen=True)
class SalientSpans(Plain):
    """Names, numbers and dates become sentinels, and the decoder writes them out (Roberts et al. 2020, section 3)."""

    rate: float = 0.15
    shapes = ("encoder-decoder",)
    bits = ("word_start", "salient")
    documents = 4  # at most so many share a row: each has an end of its own in the answer

    def __post_init__(self) -> None:
        check_share("objective.rate", self.rate)

    def frame(self, vocab: Vocabulary) -> Frame:
        return sentinel_frame(vocab)

    def check(self, vocab: Vocabulary, source: int) -> None:
        self.frame(vocab)
        check_sentinels(choose.slots(self.rate, source), vocab, "Lower objective.rate")

    def max_documents(self, source: int) -> int | None:
        return self.documents

    def promises(self) -> dict[str, float]:
        return {"asked": self.rate}

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        length = rows.tokens.shape[1]
        noise = Salient()(rows, self.rate, draw)
        return corrupt.sentinels(rows, noise, length, 2 * choose.slots(self.rate, length) + self.documents, vocab)


@dataclass(frozen=True)
class BART(Plain):
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
    shapes = ("encoder-decoder",)
    framed = True

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
    def bits(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("sentence_end",) if self.permute else ()

    def frame(self, vocab: Vocabulary) -> Frame:
        need(vocab.mask, "a mask token", "BART")
        return pair_frame(vocab, "BART")

    def check(self, vocab: Vocabulary, source: int) -> None:
        self.frame(vocab)
        if self.infill:
            check_room(self.infill * source, self.mean_span, "Lower objective.mean_span, raise objective.infill")

    def promises(self) -> dict[str, float]:
        shares = {"permuted": self.permute, "rotated": self.rotate, "deleted": self.delete, "masked": self.mask}
        shares = {name: share for name, share in shares.items() if share}
        return shares | ({"infilled": self.infill, "mean_span": self.mean_span} if self.infill else {})

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        text = corrupt.Text(rows.tokens, rows.doc, rows.real)
        if self.permute:
            assert rows.sentence_end is not None
            text = corrupt.permute_sentences(text, rows.sentence_end, self.permute, draw)
        if self.rotate:
            text = corrupt.rotate(text, self.rotate, draw)
        if self.delete:
            chosen = choose.lowest(draw.uniform("deleted", text.real.shape[1]), text.real, self.delete)
            text = corrupt.mask_or_delete(text, chosen, True, vocab)
        if self.infill:
            text = corrupt.infill(text, choose.poisson(self.mean_span), self.infill, draw, vocab)
        if self.mask:
            chosen = choose.lowest(draw.uniform("masked", text.real.shape[1]), text.real, self.mask)
            text = corrupt.mask_or_delete(text, chosen, False, vocab)
        labels = np.where(rows.doc >= 0, rows.tokens, IGNORED)
        start_token = need(vocab.sep, "[SEP]", "BART")
        return corrupt.two_sides(text.tokens, text.doc, labels, rows.doc, start_token, vocab.pad)


# --- mixtures -----------------------------------------------------------------------------------------------------

Simple = (
    CLM | PrefixLM | BiLM | EncoderDecoderLM | PermutationLM | MLM | SpanCorruption | OneStack | SalientSpans | BART
)


@dataclass(frozen=True)
class Weighted:
    objective: Simple
    weight: float = 1.0


@dataclass(frozen=True)
class Mixture:
    """Several objectives in one run: each row, or each step, is of one of them, drawn by weight.

    They read the same rows, so their frames must be the same; a batch has room for the widest of them.
    """

    parts: tuple[Weighted, ...]
    per: Literal["row", "batch"] = "row"

    def __post_init__(self) -> None:
        if not self.parts or not all(0 < part.weight < float("inf") for part in self.parts):
            raise UserError("objective.parts: a mixture needs objectives, each with a weight of more than 0.")
        if not self.shapes:
            raise UserError("objective.parts: no one architecture can do all of these objectives.")
        if len({part.objective.layout for part in self.parts}) > 1:
            raise UserError("objective.parts: texts and pairs of texts cannot be mixed in one run.")
        kinds = {(part.objective.extras, isinstance(part.objective, BiLM)) for part in self.parts}
        if len(kinds) > 1:
            raise UserError("objective.parts: one of these asks the model in a way of its own, and cannot be mixed.")

    @property
    def shapes(self) -> tuple[str, ...]:
        return tuple(s for s in self.parts[0].objective.shapes if all(s in p.objective.shapes for p in self.parts))

    @property
    def layout(self) -> Layout:
        return self.parts[0].objective.layout

    @property
    def bits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(bit for part in self.parts for bit in part.objective.bits))

    @property
    def extras(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(extra for part in self.parts for extra in part.objective.extras))

    @property
    def framed(self) -> bool:
        return self.parts[0].objective.framed

    def source_length(self, length: int) -> int:
        return min(part.objective.source_length(length) for part in self.parts)

    def max_documents(self, source: int) -> int | None:
        limits = [part.objective.max_documents(source) for part in self.parts]
        return min((limit for limit in limits if limit is not None), default=None)

    def check(self, vocab: Vocabulary, source: int) -> None:
        for part in self.parts:
            part.objective.check(vocab, source)
        self.frame(vocab)

    def frame(self, vocab: Vocabulary) -> Frame:
        frames = {part.objective.frame(vocab) for part in self.parts}
        if len(frames) > 1:
            raise UserError(
                "objective.parts: these objectives put different tokens around a text; they cannot be mixed."
            )
        return frames.pop()

    def promises(self) -> dict[str, float]:
        total = sum(part.weight for part in self.parts)
        return {f"part {i + 1}": part.weight / total for i, part in enumerate(self.parts)}

    def part_of(self, draw: Draw) -> np.ndarray:
        """Which part each row is of (B,)."""
        if self.per == "batch":
            draw = replace(draw, index=draw.index if draw.step is None else draw.step)
        share = np.cumsum([part.weight for part in self.parts])
        return np.searchsorted(share[:-1] / share[-1], draw.uniform("part", 1)[:, 0], side="right")

    def __call__(self, rows: Rows, draw: Draw, vocab: Vocabulary) -> Batch:
        part_B = self.part_of(draw)
        chosen = [np.flatnonzero(part_B == i) for i in range(len(self.parts))]
        batches = []
        for part, take in zip(self.parts, chosen, strict=True):
            some = take if len(take) else np.zeros(1, np.int64)  # of a part that no row is of, the shapes are needed
            step = None if draw.step is None else draw.step[some]
            subset = Rows(*(None if x is None else x[some] for x in rows))  # type: ignore[arg-type]
            batches.append(part.objective(subset, Draw(draw.seed, draw.index[some], step), vocab))
        return merge(batches, chosen, vocab.pad, causal="decoder" in self.shapes)


def merge(batches: list[Batch], rows: list[np.ndarray], pad: int, causal: bool) -> Batch:
    """One batch of several with different fields and widths: batch i has the rows `rows[i]` of it, perhaps none."""
    batches = [spelled_out(batch, batches, causal) for batch in batches]
    B = sum(map(len, rows))
    empty = {"tokens": pad, "decoder_tokens": pad, "doc": -1, "labels": IGNORED}
    fields = {}
    for name in Batch._fields:
        arrays = [getattr(batch, name) for batch in batches]
        if arrays[0] is None:
            continue
        shape = np.max([a.shape[1:] for a in arrays], axis=0)
        merged = np.full((B, *shape), empty.get(name, 0), arrays[0].dtype)
        for array, take in zip(arrays, rows, strict=True):
            if len(take):
                merged[np.ix_(take, *map(np.arange, array.shape[1:]))] = array
                if name == "decoder_doc":  # padding passes for a part of the row's last document
                    merged[take, array.shape[1] :] = array[:, -1:]
        fields[name] = merged
    return Batch(**fields)


def spelled_out(batch: Batch, others: list[Batch], causal: bool) -> Batch:
    """The same batch with what it leaves to the default written down, where another of `others` has it."""
    fields = {name for name in Batch._fields if any(getattr(other, name) is not None for other in others)}
    place = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)
    asks = batch.labels.shape if batch.labels is not None else batch.tokens.shape
    default = {
        "rank": place if causal else np.zeros_like(batch.tokens),
        "segment": np.zeros(batch.tokens.shape, np.int32),
        "asked": np.broadcast_to(np.arange(asks[-1]), asks),
    }
    missing = {name: default[name] for name in fields if getattr(batch, name) is None}
    return batch._replace(**missing)


Objective = Simple | Mixture


# --- by name ------------------------------------------------------------------------------------------------------

UNILM = Mixture(  # Dong et al. 2019, section 2.3
    (
        Weighted(MLM(), 1 / 3),
        Weighted(MLM(sees="prefix"), 1 / 3),
        Weighted(MLM(sees="forward"), 1 / 6),
        Weighted(MLM(sees="backward"), 1 / 6),
    )
)
DENOISERS = Mixture(  # after Tay et al. 2023 (UL2), table 1: usual, extreme and sequential denoising
    (
        Weighted(SpanCorruption(0.15, 3.0)),
        Weighted(SpanCorruption(0.15, 8.0)),
        Weighted(SpanCorruption(0.5, 3.0)),
        Weighted(SpanCorruption(0.5, 8.0)),
        Weighted(EncoderDecoderLM()),
    )
)
NAMED: dict[str, Objective] = {
    "clm": CLM(),
    "mlm": MLM(),
    "whole-word": MLM(choose=Words()),
    "span": MLM(choose=Spans(), ask="boundary"),
    "salient": MLM(choose=Salient()),
    "static": MLM(copies=10),
    "nsp": MLM(pair="next"),
    "sop": MLM(pair="order"),
    "tlm": MLM(pair="translation"),
    "rtd": MLM(mask=0.85, random=0.0, ask="replaced"),
    "unilm": UNILM,
    "bilm": BiLM(),
    "permutation-lm": PermutationLM(),
    "prefix-lm": PrefixLM(),
    "encoder-decoder-lm": EncoderDecoderLM(),
    "span-corruption": SpanCorruption(),
    "salient-spans": SalientSpans(),
    "lm-denoising": OneStack(),
    "prefix-lm-denoising": OneStack(prefix=True),
    "bart": BART(),
    "denoisers": DENOISERS,
}
