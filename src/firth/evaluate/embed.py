"""Embeddings of texts, and of words in their context.

A text's embedding pools the hidden states of one layer: the first token ([CLS]), the last one, or the mean over all
tokens (Reimers & Gurevych 2019, section 3). The embedding of a word in context is the mean over its tokens; comparing
the two of a word in two texts tells its senses apart (word-in-context, Pilehvar & Camacho-Collados 2019).

N texts, B rows, T positions, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor

from firth.core.console import format_count, progress, say, truncation_messages
from firth.core.errors import UserError, did_you_mean, quote, shorten
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.likelihood import open_model, resolve_max_length
from firth.evaluate.logprobs import EVAL_BATCH_TOKENS, get_pad_token_id
from firth.generate.decode_state import eval_mode, pad_right, require_tokenizer
from firth.metrics import best_threshold, compute_metrics
from firth.models import Encoder, EncoderDecoder, Model, make_sequence_template
from firth.models.config import EmbeddingHead
from firth.objectives import Batch
from firth.tasks import Prediction
from firth.tasks.embed import all_have_scores, compare_pairs, score_pairs
from firth.text import Example
from firth.text.filters import replace_lone_surrogates
from firth.tokens import SequenceTemplate, Tokenizer

Pooling = Literal["auto", "first", "mean", "last"]
POOLING_MODES = ("auto", "first", "mean", "last")
LayerChoice = int | Literal["mean", "head"]  # a layer, the mean over all layers, or the output of the embedding head
SENSE_LABELS = {"true": True, "t": True, "1": True, "yes": True, "false": False, "f": False, "0": False, "no": False}


class StaticVectors(Protocol):
    """Word vectors that do not depend on the context."""

    @property
    def vectors_ND(self) -> np.ndarray: ...  # noqa: N802, the shape is part of the name

    def find(self, word: str) -> int | None: ...


class EmbedInput(NamedTuple):
    """A text with its special tokens, and the positions [start, end) that are pooled."""

    input_ids: list[int]
    start: int
    end: int
    token_type_ids: list[int] | None = None


def apply_template(template: SequenceTemplate, ids: Sequence[int]) -> tuple[list[int], list[int] | None]:
    """Return a text with its special tokens, and its token types where they are not all 0 (XLNet)."""
    input_ids, token_type_ids = template.apply(ids)
    return input_ids, None if template.last_token_type is None else token_type_ids


def read_encoding(tokenizer: Tokenizer, encoding: Encoding) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids and the character offsets of a text in the order in which the model reads them."""
    step = -1 if tokenizer.is_reversed else 1
    return encoding.ids[::step], encoding.offsets[::step]


def embed_texts(
    checkpoint: Model | str | Path,
    texts: Sequence[str],
    pool: Pooling = "auto",
    layer: int = -1,
    normalise: bool = False,
    max_seq_length: int = 0,
    batch_tokens: int = EVAL_BATCH_TOKENS,
) -> np.ndarray:
    """Embed texts as (N, D) float32 by the hidden state of the first or last token, or by the mean over all.

    The mean includes the special tokens, as in sentence encoders. "auto" pools as the model was fine-tuned (`firth
    finetune --task embed`), else by the mean. `layer` 0 is the embedding, -1 the last; `normalise` scales every vector
    to length 1. An encoder-decoder gives the states of its encoder. `max_seq_length` 0 truncates texts as in
    fine-tuning, or else to the model's maximum.
    """
    if pool not in POOLING_MODES:
        raise UserError(f"Unknown pool {quote(pool)}. {did_you_mean(pool, POOLING_MODES)}")
    model = open_model(checkpoint)
    head, tuned = model.config.head, pool == "auto" and layer == -1 and isinstance(model.config.head, EmbeddingHead)
    if pool == "auto":
        pool = head.pool if isinstance(head, EmbeddingHead) else "mean"
    trained_length = head.max_length if isinstance(head, EmbeddingHead) else 0
    tokenizer, length = require_tokenizer(model), resolve_max_length(model, max_seq_length or trained_length)
    template = make_sequence_template(model.config, tokenizer.vocab)
    max_tokens = length - template.num_special_tokens()
    tokenised = tokenizer.encode_batch(list(map(replace_lone_surrogates, texts)))
    inputs = []
    for ids in tokenised:
        input_ids, token_type_ids = apply_template(template, ids[:max_tokens])
        first = {"first": 0, "last": len(input_ids) - 1, "mean": 0}[pool]
        end = len(input_ids) if pool == "mean" else first + 1
        inputs.append(EmbedInput(input_ids, first, end, token_type_ids))
    for message in truncation_messages(sum(len(ids) > max_tokens for ids in tokenised), "text", length):
        say(message)
    vectors_ND = mean_hidden_states(model, inputs, "head" if tuned else layer, batch_tokens)
    if empty := int((~vectors_ND.any(1)).sum()):
        say(f"{format_count(empty, 'text has', 'texts have')} no known word, and a vector of zeros with cosine 0.")
    return normalize_rows(vectors_ND) if normalise else vectors_ND


def normalize_rows(vectors_ND: np.ndarray) -> np.ndarray:
    """Scale rows to length 1; zeros stay zeros."""
    return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)


def embed_words_in_texts(
    checkpoint: Model | StaticVectors | str | Path,
    texts: Sequence[str],
    spans: Sequence[tuple[int, int]],
    layer: LayerChoice = -1,
    batch_tokens: int = EVAL_BATCH_TOKENS,
) -> np.ndarray:
    """Hidden state of one span of characters in each text, (N, D): the mean over its tokens.

    Word vectors give the same vector in every context, and zeros for an unknown word.
    """
    if not isinstance(checkpoint, Model | str | Path):
        return static_word_vectors(
            checkpoint, [text[begin:end] for text, (begin, end) in zip(texts, spans, strict=True)]
        )
    model = open_model(checkpoint)
    tokenizer = require_tokenizer(model)
    template = make_sequence_template(model.config, tokenizer.vocab)
    max_tokens = resolve_max_length(model, 0) - template.num_special_tokens()
    inputs = []
    for text, (begin, end), encoding in zip(texts, spans, tokenizer.encode_with_offsets(texts), strict=True):
        ids, offsets = read_encoding(tokenizer, encoding)
        inside = [i for i, (b, e) in enumerate(offsets) if b < end and e > begin]
        if not inside:
            raise UserError(f"{quote(text[begin:end])} in {text[:40]!r} ... has no token.")
        # A long text is truncated around the word.
        start = max(0, min(inside[0] - max_tokens // 2, len(ids) - max_tokens))
        shift = len(template.prefix_ids) - start
        input_ids, token_type_ids = apply_template(template, ids[start : start + max_tokens])
        last = min(inside[-1] + 1 + shift, len(input_ids) - len(template.suffix_ids))
        inputs.append(EmbedInput(input_ids, inside[0] + shift, last, token_type_ids))
    return mean_hidden_states(model, inputs, layer, batch_tokens)


def static_word_vectors(vectors: StaticVectors, words: Sequence[str]) -> np.ndarray:
    """(N, D): vectors of words, zeros for unknown ones."""
    indices = [vectors.find(word) for word in words]
    x_ND = vectors.vectors_ND[[i or 0 for i in indices]]
    x_ND[[i is None for i in indices]] = 0
    return x_ND


@torch.no_grad()
def mean_hidden_states(model: Model, inputs: Sequence[EmbedInput], layer: LayerChoice, batch_tokens: int) -> np.ndarray:
    """Mean hidden state over the positions [start, end) of each input, (N, D)."""
    check_layer(model, layer)
    vectors_N: list[np.ndarray] = [np.zeros(0, np.float32)] * len(inputs)
    with eval_mode(model), progress("embedding", "texts", len(inputs)) as shown:
        for indices in batch_texts_by_length(inputs, batch_tokens):
            rows = [inputs[i] for i in indices]
            input_ids, document_ids = pad_right([row.input_ids for row in rows], get_pad_token_id(model))
            types = [row.token_type_ids for row in rows if row.token_type_ids is not None]
            batch = Batch(
                input_ids,
                document_ids=document_ids,
                target_positions=np.array([[row.start] for row in rows]),
                token_type_ids=pad_right(types, 0)[0] if types else None,
            ).to(model.embed.tokens.weight.device)
            if layer == "head":
                x_BD = model.logits(batch)[:, 0]
            else:
                end_B1 = torch.tensor([[row.end] for row in rows], device=batch.input_ids.device)
                x_BD = mean_over_span(layer_hidden_states(model, batch, layer), batch.target_positions, end_B1)
            for i, x_D in zip(indices, x_BD.float().cpu().numpy(), strict=True):
                vectors_N[i] = x_D
            shown.advance(len(indices))
    return np.stack(vectors_N)


def mean_over_span(x_BTD: Tensor, start_B1: Tensor, end_B1: Tensor) -> Tensor:
    """(B, D): the mean over the positions [start, end) of each row."""
    position_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    mask_BT = ((position_T >= start_B1) & (position_T < end_B1)).float()
    return torch.einsum("btd,bt->bd", x_BTD.float(), mask_BT) / mask_BT.sum(1, keepdim=True)


def batch_texts_by_length(inputs: Sequence[EmbedInput], batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices of inputs by decreasing length, at most `batch_tokens` with padding in each batch."""
    order = sorted(range(len(inputs)), key=lambda i: -len(inputs[i].input_ids))
    while order:
        rows = max(1, batch_tokens // len(inputs[order[0]].input_ids))
        yield order[:rows]
        order = order[rows:]


def check_layer(model: Model, layer: LayerChoice) -> None:
    num = model.config.num_layers + 1
    if isinstance(layer, int) and not -num <= layer < num:
        raise UserError(f"layer is {layer}, and must be from 0 (the embedding) to {num - 1} (or -1, the last).")


def layer_hidden_states(model: Model, batch: Batch, layer: LayerChoice) -> Tensor:
    """(B, T, D): hidden states of one layer, or their mean over all layers."""
    states = all_layer_hidden_states(model, batch)
    return states[layer] if isinstance(layer, int) else torch.stack(states).mean(0)


def all_layer_hidden_states(model: Model, batch: Batch) -> list[Tensor]:
    """Return the hidden states (B, T, D) of each layer; 0 is the embedding. Of an encoder-decoder, the encoder's."""
    states: list[Tensor] = []
    if isinstance(model, EncoderDecoder):
        model.encoder(model.embed(batch.input_ids), batch.document_ids, all_hidden_states=states)
    else:
        assert isinstance(model, Encoder)
        x_BTD = model.embed.widen(
            model.embed_backbone_inputs(batch.input_ids, batch.position_ids, batch.token_type_ids, batch.document_ids)
        )
        # A prefix LM reads the text as its prompt: it attends to all of itself.
        is_prompt = model.is_causal and model.config.has_bidirectional_prompt
        rank_BT = torch.zeros_like(batch.input_ids) if is_prompt else None
        model.stack(x_BTD, batch.document_ids, rank_BT, all_hidden_states=states, token_type_ids=batch.token_type_ids)
    return states


def evaluate_word_in_context(
    checkpoint: Model | StaticVectors | str | Path,
    examples: Sequence[Example],
    train: Sequence[Example] | None = None,
    threshold: float | None = None,
    layer: LayerChoice = -1,
    batch_tokens: int = EVAL_BATCH_TOKENS,
) -> Evaluation:
    """Predict whether a word has the same sense in two texts: the cosine of its two vectors must reach a threshold.

    The threshold is given, or the one with the best accuracy on `train`. Static word vectors give cosine 1 to the same
    form of a word. A word without a vector has cosine 0.
    """
    model = open_model(checkpoint) if isinstance(checkpoint, Model | str | Path) else checkpoint
    if threshold is None:
        if train is None:
            raise UserError("No threshold for the cosine: give --threshold, or --train, a file to choose it on.")
        cosines = sense_cosines(model, train, layer, batch_tokens)
        threshold = best_threshold(cosines, [is_same_sense(example) for example in train])
    cosines = sense_cosines(model, examples, layer, batch_tokens)
    labels = {is_same_sense(e): e.target for e in [*(train or ()), *examples] if e.target is not None}
    predicted = [labels.get(bool(c >= threshold), str(bool(c >= threshold)).lower()) for c in cosines]
    predictions = [Prediction(label, {"cosine": float(c)}) for label, c in zip(predicted, cosines, strict=True)]
    targets = [example.target for example in examples]
    metrics = compute_metrics("word-in-context", predicted, targets) if None not in targets else {}
    unknown = int((cosines == 0).sum())
    notice = f"{unknown:,} of {len(examples):,} examples have a word without a vector: their cosine is 0."
    details = {"threshold": float(threshold), "layer": layer}
    return Evaluation(metrics, predictions, details, [notice] if unknown else [])


def sense_cosines(
    model: Model | StaticVectors, examples: Sequence[Example], layer: LayerChoice, batch_tokens: int
) -> np.ndarray:
    """(N,) cosine of each example's two words, rounded so that equal vectors have exactly 1."""
    texts = [text for example in examples for text in example.texts]
    spans = [span for example in examples for span in example.spans]
    assert len(spans) == len(texts), "the reader marks the word in both texts"
    x_ND = normalize_rows(embed_words_in_texts(model, texts, spans, layer, batch_tokens))
    return np.round((x_ND[::2] * x_ND[1::2]).sum(1), 6)


def is_same_sense(example: Example) -> bool:
    """The label of an example as a bool."""
    label = SENSE_LABELS.get(str(example.target).lower())
    if label is None:
        raise UserError(
            f"Example {shorten(example.id)}: the label {quote(example.target)} is not true or false (1 or 0)."
        )
    return label


def evaluate_text_similarity(
    checkpoint: Model | str | Path, examples: Sequence[Example], **settings: object
) -> Evaluation:
    """Score text pairs by cosine: correlation with given scores, or retrieval of each text's partner among all.

    The vectors are those of `embed_texts`, also for a checkpoint that was fine-tuned for `embed`.
    """
    texts = [text for example in examples for text in example.texts]
    x_ND = embed_texts(checkpoint, texts, normalise=True, **settings)  # type: ignore[arg-type]
    predictions = compare_pairs(x_ND[::2], x_ND[1::2], all_have_scores(examples), [e.texts for e in examples])
    return Evaluation(score_pairs(examples, predictions), predictions)
