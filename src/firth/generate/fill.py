"""Fill the blanks of a text: one word each from an encoder, a span each from an encoder-decoder."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

import torch

from firth.core.errors import UserError
from firth.generate.decode_state import (
    NextLogitsFn,
    check_has_lm_head,
    drop_padded_vocab,
    eval_mode,
    make_next_logits_fn,
    require_tokenizer,
)
from firth.models import EncoderDecoder, Model, make_sequence_template
from firth.models.config import ELMoConfig
from firth.objectives import Batch

MAX_SPAN_TOKENS = 20  # tokens; T5 has learned spans of three on average


class Guess(NamedTuple):
    text: str
    probability: float


class Blank(NamedTuple):
    """What may stand in one blank, the likeliest first."""

    guesses: tuple[Guess, ...]


def fill(model: Model, text: str, top: int = 5) -> list[Blank]:
    """Guesses for each blank of a text, written [MASK], <mask>, ___ or as the tokenizer's own mask token.

    An encoder gives its `top` likeliest words for each blank, an encoder-decoder writes one span. A word's
    probability is that of the token in its blank, all blanks being open; a span's is that of exactly this span after
    those before it.
    """
    mask = require_tokenizer(model).special_tokens.get("mask")
    parts = re.split("|".join([r"\[MASK\]", "<mask>", "___+", *([re.escape(mask)] if mask else [])]), text)
    if len(parts) == 1:
        raise UserError("The text has no blank. Write one as ___ or [MASK]: 'The ___ is red.'")
    if top < 1:
        raise UserError(f"top is {top}, and must be at least 1.")
    if model.config.architecture == "decoder":
        raise UserError("A decoder does not fill blanks. It can continue a text: firth generate CHECKPOINT 'The'")
    if isinstance(model.config.recurrent, ELMoConfig):
        raise UserError("ELMo reads one way at a time, and has no blank between. Take an encoder such as bert.")
    check_has_lm_head(model.config)
    with eval_mode(model), torch.no_grad():
        if not isinstance(model, EncoderDecoder):
            return fill_masked_words(model, parts, top)
        return fill_by_reconstruction(model, parts) if model.config.adds_bos else fill_sentinel_spans(model, parts)


def fill_masked_words(model: Model, parts: list[str], top: int) -> list[Blank]:
    """An encoder's likeliest words for the blanks between the parts, all asked at once."""
    tokenizer, vocab = require_tokenizer(model), require_tokenizer(model).vocab
    if vocab.mask is None or vocab.cls is None or vocab.sep is None:
        raise UserError("The tokenizer lacks a mask, a [CLS] or a [SEP] token, which filling blanks needs.")
    ids = [vocab.cls, *tokenizer.encode(tokenizer.special_tokens["mask"].join(parts), parse_special=True), vocab.sep]
    model.check_length(len(ids))
    tokens = torch.tensor([ids], device=model.embed.tokens.weight.device)
    p_KV = drop_padded_vocab(
        model, model.logits(Batch(tokens, target_positions=(tokens == vocab.mask).nonzero()[None, :, 1]))[0]
    ).softmax(-1)
    p_KV[:, list(vocab.special_ids)] = 0  # a blank hides a word
    best = p_KV.topk(min(top, vocab.size - len(vocab.special_ids)))
    return [
        Blank(tuple(Guess(tokenizer.decode([i]).strip(" "), p) for p, i in zip(*guesses, strict=True)))
        for guesses in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def fill_sentinel_spans(model: EncoderDecoder, parts: list[str]) -> list[Blank]:
    """An encoder-decoder's spans for the blanks between the parts, each begun with its sentinel."""
    tokenizer, vocab = require_tokenizer(model), require_tokenizer(model).vocab
    if not vocab.sentinel_ids:
        raise UserError(
            "The tokenizer has no sentinels (<extra_id_0> ...), so this model has not learned to fill blanks."
        )
    if len(parts) - 1 > len(vocab.sentinel_ids):
        raise UserError(f"The text has {len(parts) - 1} blanks, and the tokenizer {len(vocab.sentinel_ids)} sentinels.")
    sentinels = vocab.sentinel_ids[: len(parts) - 1]
    marks = [f"<extra_id_{i}>" for i in range(len(sentinels))]
    text = "".join(part + mark for part, mark in zip(parts, [*marks, ""], strict=True))
    ids = [*tokenizer.encode(text, parse_special=True), *([] if vocab.eos is None else [vocab.eos])]
    model.check_length(len(ids))
    ask = make_next_logits_fn(model, [ids])
    blanks: list[Blank] = []
    written: list[int] = []
    for sentinel in sentinels:
        span, probability = decode_span(ask, [*written, sentinel], vocab.special_ids)
        written += [sentinel, *span]
        blanks.append(Blank((Guess(tokenizer.decode(span).strip(" "), probability),)))
    return blanks


def fill_by_reconstruction(model: EncoderDecoder, parts: list[str]) -> list[Blank]:
    """What an encoder-decoder that writes a text out whole (BART) writes between the parts, which it is given.

    A span ends where the model goes on with the first token of what is given next.
    """
    tokenizer, vocab = require_tokenizer(model), require_tokenizer(model).vocab
    if vocab.mask is None:
        raise UserError("The tokenizer lacks a mask token, which filling blanks needs.")
    frame = make_sequence_template(model.config, vocab)
    ids = [
        *frame.prefix_ids,
        *tokenizer.encode(tokenizer.special_tokens["mask"].join(parts), parse_special=True),
        frame.eos_id,
    ]
    model.check_length(len(ids))
    ask = make_next_logits_fn(model, [ids])
    blanks: list[Blank] = []
    written: list[int] = []
    for place, token in enumerate(ids):
        if token != vocab.mask:
            written.append(token)
            continue
        following = next(i for i in ids[place:] if i != vocab.mask)
        span, probability = decode_span(ask, written, {*vocab.special_ids, following})
        written += span
        blanks.append(Blank((Guess(tokenizer.decode(span).strip(" "), probability),)))
    return blanks


def decode_span(
    next_logits_fn: NextLogitsFn, prefix_ids: list[int], stop_ids: Collection[int]
) -> tuple[list[int], float]:
    """The likeliest next tokens up to one that ends them, and the probability that just these are written."""
    span: list[int] = []
    probability = 1.0
    for _ in range(MAX_SPAN_TOKENS):
        p_V = next_logits_fn([0], [[*prefix_ids, *span]])[0].softmax(-1)
        best = int(p_V.argmax())
        if best in stop_ids:
            return span, probability * float(p_V[list(stop_ids)].sum())
        span.append(best)
        probability *= float(p_V[best])
    return span, probability
