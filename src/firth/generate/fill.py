"""Fill blanks: one word per blank with a masked language model, one span per blank with an encoder-decoder.

An encoder predicts all masked positions in one forward pass, independently of each other. T5 is given a sentinel for
each blank, and generates sentinel and span in turn (Raffel et al. 2019, section 3.1.4). BART reconstructs the whole
text: the known parts are forced, and the spans between them are generated greedily.

B texts, K blanks, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from firth.core.errors import UserError, quote
from firth.core.html import HtmlPage
from firth.core.notebook import ResultList, add_bars
from firth.generate.decode_state import (
    NextLogitsFn,
    check_has_lm_head,
    drop_padded_vocab,
    eval_mode,
    make_next_logits_fn,
    pad_right,
    require_tokenizer,
)
from firth.models import EncoderDecoder, Model, make_sequence_template
from firth.models.config import BAG_OF_WORDS_FAMILY, ELMoConfig, LMHead
from firth.objectives import Batch

MAX_SPAN_TOKENS = 20  # limit of a generated span; T5 is trained on spans of three tokens on average


class Guess(NamedTuple):
    text: str
    probability: float


class Blank(NamedTuple):
    """Candidates for one blank, the likeliest first."""

    guesses: tuple[Guess, ...]


class Blanks(ResultList[Blank]):
    """The blanks of a text with their guesses: a list, in a notebook bars."""

    text: str = ""

    def make_page(self) -> HtmlPage:
        page = HtmlPage(self.text)
        for number, blank in enumerate(self, 1):
            caption = f"blank {number}" if len(self) > 1 else ""
            add_bars(page, [(guess.text, guess.probability) for guess in blank.guesses], caption)
        return page


def fill(model: Model, text: str, top: int = 5) -> Blanks:
    """Return candidates for each blank: [MASK], <mask>, ___ or the tokenizer's own mask token.

    An encoder returns the `top` likeliest words per blank, with probabilities given that all blanks are masked. An
    encoder-decoder, or a decoder that was trained to denoise, generates one span per blank, with its probability given
    the spans before it.
    """
    blanks = Blanks(fill_texts(model, [text], top)[0])
    blanks.text = text
    return blanks


def fill_texts(model: Model, texts: Sequence[str], top: int = 5, compare: bool = False) -> list[list[Blank]]:
    """Return the blanks of each text. An encoder reads all texts in one batch.

    With `compare`, an encoder gives each blank the candidates of the same blank in the other texts too, so that every
    word has its probability in each of them. The texts must have the same number of blanks; others are not compared.
    """
    parts_per_text = [split_at_blanks(model, text) for text in texts]
    if top < 1:
        raise UserError(f"top is {top}; it must be at least 1.")
    if model.config.architecture == "decoder" and not can_fill(model):
        raise UserError("A decoder cannot fill blanks. It can continue a text: firth generate CHECKPOINT 'The'")
    if isinstance(model.config.recurrent, ELMoConfig):
        raise UserError("ELMo has no mask token and cannot fill blanks. Use an encoder such as bert.")
    check_has_lm_head(model.config)
    with eval_mode(model), torch.no_grad():
        if model.config.has_sentinel_prompt:
            return [fill_sentinel_spans(model, parts) for parts in parts_per_text]
        if not isinstance(model, EncoderDecoder):
            return fill_masked_words(model, parts_per_text, top, compare)
        fill_spans = fill_by_reconstruction if model.config.adds_bos else fill_sentinel_spans
        return [fill_spans(model, parts) for parts in parts_per_text]


def can_fill(model: Model) -> bool:
    """Whether a model fills blanks: it has a mask or sentinels, and an LM head that predicts them."""
    config = model.config
    knows_blanks = config.architecture != "decoder" or config.has_sentinel_prompt or config.predicts_next_token
    is_other = isinstance(config.recurrent, ELMoConfig) or config.family == BAG_OF_WORDS_FAMILY
    return isinstance(config.head, LMHead) and knows_blanks and not is_other


def split_at_blanks(model: Model, text: str) -> list[str]:
    """Return the known parts of a text."""
    mask = require_tokenizer(model).special_tokens.get("mask")
    parts = re.split("|".join([r"\[MASK\]", "<mask>", "___+", *([re.escape(mask)] if mask else [])]), text)
    if len(parts) == 1:
        raise UserError("The text has no blank. Write one as ___ or [MASK]: 'The ___ is red.'")
    return parts


def fill_masked_words(
    model: Model, parts_per_text: Sequence[list[str]], top: int, compare: bool = False
) -> list[list[Blank]]:
    """Predict the masked words between the parts of each text in one forward pass.

    Masked next-token prediction has the logits of a masked word at the position before it.
    """
    tokenizer, vocab, config = require_tokenizer(model), require_tokenizer(model).vocab, model.config
    is_decoder = config.architecture == "decoder"
    if vocab.mask is None or ((vocab.cls is None or vocab.sep is None) and not is_decoder):
        raise UserError("The tokenizer lacks a mask, [CLS] or [SEP] token, which filling blanks needs.")
    template = make_sequence_template(model.config, vocab)
    mask_token = tokenizer.special_tokens["mask"]
    rows = [template.apply(tokenizer.encode(mask_token.join(parts), parse_special=True)) for parts in parts_per_text]
    model.check_length(max(len(ids) for ids, _ in rows))
    input_ids, document_ids = pad_right([ids for ids, _ in rows], vocab.pad)
    masked = [[i for i, token in enumerate(ids) if token == vocab.mask] for ids, _ in rows]
    if not all(masked):
        raise UserError(
            f"The tokenizer does not read {quote(mask_token)} as its mask token: tokenizer.json is damaged."
        )
    most = max(map(len, masked))
    batch = Batch(
        input_ids,
        document_ids=document_ids if len(rows) > 1 else None,
        # XLNet always reads segments
        token_type_ids=None if template.last_token_type is None else pad_right([types for _, types in rows], 0)[0],
        attention_rank=np.zeros_like(input_ids) if is_decoder else None,  # attention to all tokens
        target_positions=np.array([[*at, *[at[0]] * (most - len(at))] for at in masked])
        - int(config.predicts_next_token),
    ).to(model.embed.tokens.weight.device)
    p_BKV = drop_padded_vocab(model, model.logits(batch)).float().softmax(-1)
    p_BKV[..., list(vocab.special_ids)] = 0  # a candidate is a word, not a special token
    best_BKN = p_BKV.topk(min(top, vocab.size - len(vocab.special_ids))).indices

    def read_blank(row: int, k: int) -> Blank:
        ids_N = best_BKN[:, k].unique() if compare and len(set(map(len, masked))) == 1 else best_BKN[row, k]
        p_N, order_N = p_BKV[row, k, ids_N].sort(descending=True, stable=True)
        guesses = zip(p_N.tolist(), ids_N[order_N].tolist(), strict=True)
        return Blank(tuple(Guess(tokenizer.decode([i]).strip(" "), p) for p, i in guesses))

    return [[read_blank(row, k) for k in range(len(at))] for row, at in enumerate(masked)]


def fill_sentinel_spans(model: Model, parts: list[str]) -> list[Blank]:
    """Generate a span per blank with T5 or a denoising decoder, each after its sentinel."""
    tokenizer, vocab = require_tokenizer(model), require_tokenizer(model).vocab
    if not vocab.sentinel_ids:
        raise UserError("The tokenizer has no sentinels (<extra_id_0> ...): this model is not trained to fill blanks.")
    if len(parts) - 1 > len(vocab.sentinel_ids):
        raise UserError(f"The text has {len(parts) - 1} blanks, and the tokenizer {len(vocab.sentinel_ids)} sentinels.")
    sentinels = vocab.sentinel_ids[: len(parts) - 1]
    marks = [f"<extra_id_{i}>" for i in range(len(sentinels))]
    text = "".join(part + mark for part, mark in zip(parts, [*marks, ""], strict=True))
    ids = [*tokenizer.encode(text, parse_special=True), *([] if vocab.eos is None else [vocab.eos])]
    model.check_length(len(ids))
    next_logits_fn = make_next_logits_fn(model, [ids])
    blanks: list[Blank] = []
    decoder_ids: list[int] = []
    for sentinel in sentinels:
        span, probability = decode_span(next_logits_fn, [*decoder_ids, sentinel], vocab.special_ids)
        decoder_ids += [sentinel, *span]
        blanks.append(Blank((Guess(tokenizer.decode(span).strip(" "), probability),)))
    return blanks


def fill_by_reconstruction(model: EncoderDecoder, parts: list[str]) -> list[Blank]:
    """Generate a span per blank with a model that reconstructs the whole text (BART); known parts are forced.

    A span ends where the model predicts the first token of the next known part.
    """
    tokenizer, vocab = require_tokenizer(model), require_tokenizer(model).vocab
    if vocab.mask is None:
        raise UserError("The tokenizer lacks a mask token, which filling blanks needs.")
    template = make_sequence_template(model.config, vocab)
    ids = [
        *template.prefix_ids,
        *tokenizer.encode(tokenizer.special_tokens["mask"].join(parts), parse_special=True),
        template.eos_id,
    ]
    model.check_length(len(ids))
    next_logits_fn = make_next_logits_fn(model, [ids])
    blanks: list[Blank] = []
    decoder_ids: list[int] = []
    for position, token in enumerate(ids):
        if token != vocab.mask:
            decoder_ids.append(token)
            continue
        following = next(i for i in ids[position:] if i != vocab.mask)
        span, probability = decode_span(next_logits_fn, decoder_ids, {*vocab.special_ids, following})
        decoder_ids += span
        blanks.append(Blank((Guess(tokenizer.decode(span).strip(" "), probability),)))
    return blanks


def decode_span(
    next_logits_fn: NextLogitsFn, prefix_ids: list[int], stop_ids: Collection[int]
) -> tuple[list[int], float]:
    """Decode greedily up to a stop token; return the span and its probability, the stop included."""
    span: list[int] = []
    probability = 1.0
    for _ in range(MAX_SPAN_TOKENS):
        p_V = next_logits_fn([0], [[*prefix_ids, *span]])[0].float().softmax(-1)
        best = int(p_V.argmax())
        if best in stop_ids:
            return span, probability * float(p_V[list(stop_ids)].sum())
        span.append(best)
        probability *= float(p_V[best])
    return span, probability
