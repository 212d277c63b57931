"""Vectors of texts, and of words where they stand in a text.

N texts, B rows, T places, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from firth.core.console import format_count, progress, say, truncation_messages
from firth.core.errors import UserError, did_you_mean
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.likelihood import open_model, resolve_max_length
from firth.evaluate.logprobs import EVAL_BATCH_TOKENS, get_pad_token_id
from firth.generate.decode_state import eval_mode, pad_right, require_tokenizer
from firth.metrics import best_threshold, compute_metrics
from firth.models import Encoder, EncoderDecoder, Model, make_sequence_template
from firth.models.config import EmbeddingHead
from firth.objectives import Batch
from firth.tasks import Prediction
from firth.text import Example
from firth.tokens import SequenceTemplate

Pooling = Literal["auto", "first", "mean", "last"]
POOLING_MODES = ("auto", "first", "mean", "last")
LayerChoice = (
    int | Literal["mean", "head"]
)  # a layer, the mean of all, what the head of a tuned model makes of the last
SENSE_LABELS = {"true": True, "t": True, "1": True, "yes": True, "false": False, "f": False, "0": False, "no": False}


class StaticVectors(Protocol):
    """Word vectors that do not depend on the text."""

    @property
    def vectors_ND(self) -> np.ndarray: ...  # noqa: N802, the shape is part of the name

    def find(self, word: str) -> int | None: ...


class EmbedInput(NamedTuple):
    """A text in its frame, and the places [first, last) that are wanted of it."""

    input_ids: list[int]
    start: int
    end: int
    token_type_ids: list[int] | None = None


def apply_template(template: SequenceTemplate, ids: Sequence[int]) -> tuple[list[int], list[int] | None]:
    """Return a text with its special tokens, and its token types where they are not all 0 (XLNet)."""
    input_ids, token_type_ids = template.apply(ids)
    return input_ids, None if template.last_token_type is None else token_type_ids


def embed_texts(
    checkpoint: Model | str | Path,
    texts: Sequence[str],
    pool: Pooling = "auto",
    layer: int = -1,
    normalise: bool = False,
    max_seq_length: int = 0,
    batch_tokens: int = EVAL_BATCH_TOKENS,
) -> np.ndarray:
    """A vector for each text, (N, D) float32: the state of the first or the last token, or the mean of all.

    The frame counts as text, as in sentence encoders. "auto" is what the model was tuned to answer with (`firth
    finetune --task embed`), and else the mean. `layer` 0 is the embedding, -1 the last; `normalise` makes every vector
    1 long. An encoder-decoder gives the states of its encoder.
    """
    if pool not in POOLING_MODES:
        raise UserError(f"pool {pool!r} is not known. {did_you_mean(pool, POOLING_MODES)}")
    model = open_model(checkpoint)
    head, tuned = model.config.head, pool == "auto" and layer == -1 and isinstance(model.config.head, EmbeddingHead)
    if pool == "auto":
        pool = head.pool if isinstance(head, EmbeddingHead) else "mean"
    tokenizer, length = require_tokenizer(model), resolve_max_length(model, max_seq_length)
    template = make_sequence_template(model.config, tokenizer.vocab)
    room = length - template.num_special_tokens()
    tokenised = tokenizer.encode_batch(list(texts))
    readings = []
    for ids in tokenised:
        read, token_type_ids = apply_template(template, ids[:room])
        first = {"first": 0, "last": len(read) - 1, "mean": 0}[pool]
        readings.append(EmbedInput(read, first, len(read) if pool == "mean" else first + 1, token_type_ids))
    for said in truncation_messages(sum(len(ids) > room for ids in tokenised), "text", length):
        say(said)
    vectors_ND = mean_hidden_states(model, readings, "head" if tuned else layer, batch_tokens)
    if empty := int((~vectors_ND.any(1)).sum()):
        some = format_count(empty, "text has", "texts have")
        say(f"{some} no word that the model knows, and a vector of zeros, which is like nothing else.")
    return normalize_rows(vectors_ND) if normalise else vectors_ND


def normalize_rows(vectors_ND: np.ndarray) -> np.ndarray:
    """The same directions, 1 long; a vector of zeros stays one."""
    return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)


def embed_words_in_texts(
    checkpoint: Model | StaticVectors | str | Path,
    texts: Sequence[str],
    spans: Sequence[tuple[int, int]],
    layer: LayerChoice = -1,
    batch_tokens: int = EVAL_BATCH_TOKENS,
) -> np.ndarray:
    """The state of one stretch of characters in each text, (N, D): the mean over its tokens.

    Of word vectors it is the word's own, wherever it stands; zeros where it has none.
    """
    if not isinstance(checkpoint, Model | str | Path):
        return static_word_vectors(
            checkpoint, [text[begin:end] for text, (begin, end) in zip(texts, spans, strict=True)]
        )
    model = open_model(checkpoint)
    tokenizer = require_tokenizer(model)
    template = make_sequence_template(model.config, tokenizer.vocab)
    room = resolve_max_length(model, 0) - template.num_special_tokens()
    readings = []
    for text, (begin, end), encoding in zip(texts, spans, tokenizer.encode_with_offsets(texts), strict=True):
        inside = [i for i, (b, e) in enumerate(encoding.offsets) if b < end and e > begin]
        if not inside:
            raise UserError(f"{text[begin:end]!r} in {text[:40]!r} ...: the tokenizer makes no token of this.")
        start = max(0, min(inside[0] - room // 2, len(encoding.ids) - room))  # a long text is cut around the word
        shift = len(template.prefix_ids) - start
        read, token_type_ids = apply_template(template, encoding.ids[start : start + room])
        last = min(inside[-1] + 1 + shift, len(read) - len(template.suffix_ids))
        readings.append(EmbedInput(read, inside[0] + shift, last, token_type_ids))
    return mean_hidden_states(model, readings, layer, batch_tokens)


def static_word_vectors(vectors: StaticVectors, words: Sequence[str]) -> np.ndarray:
    """(N, D): the vectors of words, zeros for those that are not known."""
    found = [vectors.find(word) for word in words]
    x_ND = vectors.vectors_ND[[place or 0 for place in found]]
    x_ND[[place is None for place in found]] = 0
    return x_ND


@torch.no_grad()
def mean_hidden_states(model: Model, inputs: Sequence[EmbedInput], layer: LayerChoice, batch_tokens: int) -> np.ndarray:
    """The mean state over the places that are wanted of each reading, (N, D)."""
    check_layer(model, layer)
    found_N: list[np.ndarray] = [np.zeros(0, np.float32)] * len(inputs)
    with eval_mode(model), progress("embedding", "texts", len(inputs)) as shown:
        for places in batch_texts_by_length(inputs, batch_tokens):
            chosen = [inputs[i] for i in places]
            tokens, doc = pad_right([reading.input_ids for reading in chosen], get_pad_token_id(model))
            asked = np.array([[reading.start] for reading in chosen])
            segments = [reading.token_type_ids for reading in chosen if reading.token_type_ids is not None]
            segment = pad_right(segments, 0)[0] if segments else None
            batch = Batch(tokens, document_ids=doc, target_positions=asked, token_type_ids=segment).to(
                model.embed.tokens.weight.device
            )
            if layer == "head":
                x_BD = model.logits(batch)[:, 0]
            else:
                last_B1 = torch.tensor([[reading.end] for reading in chosen], device=batch.input_ids.device)
                x_BD = mean_over_span(layer_hidden_states(model, batch, layer), batch.target_positions, last_B1)
            for i, x_D in zip(places, x_BD.float().cpu().numpy(), strict=True):
                found_N[i] = x_D
            shown.advance(len(places))
    return np.stack(found_N)


def mean_over_span(x_BTD: Tensor, start_B1: Tensor, end_B1: Tensor) -> Tensor:
    """(B, D): the mean over the places [first, last) of each row."""
    place_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    wanted_BT = ((place_T >= start_B1) & (place_T < end_B1)).float()
    return torch.einsum("btd,bt->bd", x_BTD.float(), wanted_BT) / wanted_BT.sum(1, keepdim=True)


def batch_texts_by_length(inputs: Sequence[EmbedInput], batch_tokens: int) -> Iterator[list[int]]:
    """Places in `inputs` by falling length, as many at once as make `batch_tokens` with their padding."""
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
    """(B, T, D): what one layer holds, or the mean of all."""
    states: list[Tensor] = []
    if isinstance(model, EncoderDecoder):
        model.encoder(model.embed(batch.input_ids), batch.document_ids, all_hidden_states=states)
    else:
        assert isinstance(model, Encoder)
        x_BTD = model.embed.widen(
            model.embed_backbone_inputs(batch.input_ids, batch.position_ids, batch.token_type_ids)
        )
        model.stack(x_BTD, batch.document_ids, all_hidden_states=states, token_type_ids=batch.token_type_ids)
    return states[layer] if isinstance(layer, int) else torch.stack(states).mean(0)


def evaluate_word_in_context(
    checkpoint: Model | StaticVectors | str | Path,
    examples: Sequence[Example],
    train: Sequence[Example] | None = None,
    threshold: float | None = None,
    layer: LayerChoice = -1,
    batch_tokens: int = EVAL_BATCH_TOKENS,
) -> Evaluation:
    """Is a word used in the same sense in two texts? By the cosine of its two states, which must reach a threshold.

    The threshold is the one that tells best in `train`, unless it is given. Word vectors that do not depend on the text
    can only tell by the form of the word: the same form has cosine 1. A word without a vector has cosine 0.
    """
    model = open_model(checkpoint) if isinstance(checkpoint, Model | str | Path) else checkpoint
    if threshold is None:
        if train is None:
            raise UserError(
                "Which cosine means the same sense? Name a train file to learn that from, or the threshold."
            )
        cosines = sense_cosines(model, train, layer, batch_tokens)
        threshold = best_threshold(cosines, [is_same_sense(example) for example in train])
    cosines = sense_cosines(model, examples, layer, batch_tokens)
    labels = {is_same_sense(e): e.target for e in [*(train or ()), *examples] if e.target is not None}
    said = [labels.get(bool(c >= threshold), str(bool(c >= threshold)).lower()) for c in cosines]
    predictions = [Prediction(label, {"cosine": float(c)}) for label, c in zip(said, cosines, strict=True)]
    true = [example.target for example in examples]
    metrics = compute_metrics("word-in-context", said, true) if None not in true else {}
    unknown = int((cosines == 0).sum())
    told = [f"{unknown:,} of {len(examples):,} examples have a word without a vector: their cosine is taken as 0."]
    return Evaluation(metrics, predictions, {"threshold": float(threshold), "layer": layer}, told if unknown else [])


def sense_cosines(
    model: Model | StaticVectors, examples: Sequence[Example], layer: LayerChoice, batch_tokens: int
) -> np.ndarray:
    """(N,) of each example's two words, rounded: that of equal vectors is 1, and not one of the numbers beside it."""
    texts = [text for example in examples for text in example.texts]
    spans = [span for example in examples for span in example.spans]
    assert len(spans) == len(texts), "the reader marks the word in both texts"
    x_ND = normalize_rows(embed_words_in_texts(model, texts, spans, layer, batch_tokens))
    return np.round((x_ND[::2] * x_ND[1::2]).sum(1), 6)


def is_same_sense(example: Example) -> bool:
    """What a label says."""
    found = SENSE_LABELS.get(str(example.target).lower())
    if found is None:
        raise UserError(f"Example {example.id}: the label {example.target!r} is neither true nor false (1 nor 0).")
    return found


def evaluate_text_similarity(
    checkpoint: Model | str | Path, examples: Sequence[Example], **settings: object
) -> Evaluation:
    """Pairs of texts by the cosine of their vectors: against scores, or each text's own partner among all others."""
    texts = [text for example in examples for text in example.texts]
    x_ND = embed_texts(checkpoint, texts, normalise=True, **settings)  # type: ignore[arg-type]
    cosines = (x_ND[::2] * x_ND[1::2]).sum(1).tolist()
    true = [example.target for example in examples]
    pairs = list(zip(x_ND[::2], x_ND[1::2], strict=True))
    metrics = compute_metrics("embed", pairs if None in true else cosines, true)
    return Evaluation(metrics, [Prediction(cosine) for cosine in cosines])
