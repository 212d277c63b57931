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

from firth.console import count, progress, say, too_long
from firth.errors import UserError, nearest
from firth.evaluate.asking import BATCH_TOKENS, padding
from firth.evaluate.likelihood import open_model, reading_length
from firth.evaluate.outcome import Outcome
from firth.generate.reading import evaluating, pad_right, tokenizer_of
from firth.metrics import best_threshold, score
from firth.models import Encoder, EncoderDecoder, Model
from firth.models.config import Embedding
from firth.models.model import CLASS_LAST, surroundings
from firth.objectives import Batch
from firth.tasks import Prediction
from firth.text import Example

Pool = Literal["auto", "first", "mean", "last"]
POOLS = ("auto", "first", "mean", "last")
Layer = int | Literal["mean", "head"]  # a layer, the mean of all, what the head of a tuned model makes of the last
SAME = {"true": True, "t": True, "1": True, "yes": True, "false": False, "f": False, "0": False, "no": False}


class Static(Protocol):
    """Word vectors that do not depend on the text."""

    @property
    def vectors_ND(self) -> np.ndarray: ...  # noqa: N802, the shape is part of the name

    def find(self, word: str) -> int | None: ...


class Reading(NamedTuple):
    """A text in its frame, and the places [first, last) that are wanted of it."""

    ids: list[int]
    first: int
    last: int
    segment: list[int] | None = None


class Frame:
    """What stands around a text of a model, as its tokenizer in `transformers` has it."""

    def __init__(self, model: Model) -> None:
        self.before, _, self.after = surroundings(model.config, tokenizer_of(model).vocab)
        self.size, self.own_segment = len(self.before) + len(self.after), model.config.family == CLASS_LAST

    def around(self, ids: list[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    def segment(self, read: list[int]) -> list[int] | None:
        """XLNet's [CLS] is of no text; others need not be told."""
        return [*[0] * (len(read) - 1), 2] if self.own_segment else None


def embed_texts(
    checkpoint: Model | str | Path,
    texts: Sequence[str],
    pool: Pool = "auto",
    layer: int = -1,
    normalise: bool = False,
    max_seq_length: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> np.ndarray:
    """A vector for each text, (N, D) float32: the state of the first or the last token, or the mean of all.

    The frame counts as text, as in sentence encoders. "auto" is what the model was tuned to answer with (`firth
    finetune --task embed`), and else the mean. `layer` 0 is the embedding, -1 the last; `normalise` makes every vector
    1 long. An encoder-decoder gives the states of its encoder.
    """
    if pool not in POOLS:
        raise UserError(f"pool {pool!r} is not known. {nearest(pool, POOLS)}")
    model = open_model(checkpoint)
    head, tuned = model.config.head, pool == "auto" and layer == -1 and isinstance(model.config.head, Embedding)
    if pool == "auto":
        pool = head.pool if isinstance(head, Embedding) else "mean"
    frame, length = Frame(model), reading_length(model, max_seq_length)
    room = length - frame.size
    tokenised = tokenizer_of(model).encode_batch(list(texts))
    readings = []
    for ids in tokenised:
        read = frame.around(ids[:room])
        first = {"first": 0, "last": len(read) - 1, "mean": 0}[pool]
        readings.append(Reading(read, first, len(read) if pool == "mean" else first + 1, frame.segment(read)))
    for said in too_long(sum(len(ids) > room for ids in tokenised), "text", length):
        say(said)
    vectors_ND = means(model, readings, "head" if tuned else layer, batch_tokens)
    if empty := int((~vectors_ND.any(1)).sum()):
        some = count(empty, "text has", "texts have")
        say(f"{some} no word that the model knows, and a vector of zeros, which is like nothing else.")
    return unit(vectors_ND) if normalise else vectors_ND


def unit(vectors_ND: np.ndarray) -> np.ndarray:
    """The same directions, 1 long; a vector of zeros stays one."""
    return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)


def words_in_texts(
    checkpoint: Model | Static | str | Path,
    texts: Sequence[str],
    spans: Sequence[tuple[int, int]],
    layer: Layer = -1,
    batch_tokens: int = BATCH_TOKENS,
) -> np.ndarray:
    """The state of one stretch of characters in each text, (N, D): the mean over its tokens.

    Of word vectors it is the word's own, wherever it stands; zeros where it has none.
    """
    if not isinstance(checkpoint, Model | str | Path):
        return words_anywhere(checkpoint, [text[begin:end] for text, (begin, end) in zip(texts, spans, strict=True)])
    model = open_model(checkpoint)
    tokenizer = tokenizer_of(model)
    frame, length = Frame(model), reading_length(model, 0)
    readings = []
    for text, (begin, end), encoding in zip(texts, spans, tokenizer.encodings(texts), strict=True):
        inside = [i for i, (b, e) in enumerate(encoding.offsets) if b < end and e > begin]
        if not inside:
            raise UserError(f"{text[begin:end]!r} in {text[:40]!r} ...: the tokenizer makes no token of this.")
        room = length - frame.size
        start = max(0, min(inside[0] - room // 2, len(encoding.ids) - room))  # a long text is cut around the word
        shift = len(frame.before) - start
        read = frame.around(encoding.ids[start : start + room])
        last = min(inside[-1] + 1 + shift, len(read) - len(frame.after))
        readings.append(Reading(read, inside[0] + shift, last, frame.segment(read)))
    return means(model, readings, layer, batch_tokens)


def words_anywhere(vectors: Static, words: Sequence[str]) -> np.ndarray:
    """(N, D): the vectors of words, zeros for those that are not known."""
    found = [vectors.find(word) for word in words]
    x_ND = vectors.vectors_ND[[place or 0 for place in found]]
    x_ND[[place is None for place in found]] = 0
    return x_ND


@torch.no_grad()
def means(model: Model, readings: Sequence[Reading], layer: Layer, batch_tokens: int) -> np.ndarray:
    """The mean state over the places that are wanted of each reading, (N, D)."""
    check_layer(model, layer)
    found_N: list[np.ndarray] = [np.zeros(0, np.float32)] * len(readings)
    with evaluating(model), progress("embedding", "texts", len(readings)) as shown:
        for places in by_length(readings, batch_tokens):
            chosen = [readings[i] for i in places]
            tokens, doc = pad_right([reading.ids for reading in chosen], padding(model))
            asked = np.array([[reading.first] for reading in chosen])
            segments = [reading.segment for reading in chosen if reading.segment is not None]
            segment = pad_right(segments, 0)[0] if segments else None
            batch = Batch(tokens, doc=doc, asked=asked, segment=segment).to(model.embed.tokens.weight.device)
            if layer == "head":
                x_BD = model.logits(batch)[:, 0]
            else:
                last_B1 = torch.tensor([[reading.last] for reading in chosen], device=batch.tokens.device)
                x_BD = mean_between(layer_states(model, batch, layer), batch.asked, last_B1)
            for i, x_D in zip(places, x_BD.float().cpu().numpy(), strict=True):
                found_N[i] = x_D
            shown.advance(len(places))
    return np.stack(found_N)


def mean_between(x_BTD: Tensor, first_B1: Tensor, last_B1: Tensor) -> Tensor:
    """(B, D): the mean over the places [first, last) of each row."""
    place_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    wanted_BT = ((place_T >= first_B1) & (place_T < last_B1)).float()
    return torch.einsum("btd,bt->bd", x_BTD.float(), wanted_BT) / wanted_BT.sum(1, keepdim=True)


def by_length(readings: Sequence[Reading], batch_tokens: int) -> Iterator[list[int]]:
    """Places in `readings` by falling length, as many at once as make `batch_tokens` with their padding."""
    order = sorted(range(len(readings)), key=lambda i: -len(readings[i].ids))
    while order:
        rows = max(1, batch_tokens // len(readings[order[0]].ids))
        yield order[:rows]
        order = order[rows:]


def check_layer(model: Model, layer: Layer) -> None:
    num = model.config.num_layers + 1
    if isinstance(layer, int) and not -num <= layer < num:
        raise UserError(f"layer is {layer}, and must be from 0 (the embedding) to {num - 1} (or -1, the last).")


def layer_states(model: Model, batch: Batch, layer: Layer) -> Tensor:
    """(B, T, D): what one layer holds, or the mean of all."""
    states: list[Tensor] = []
    if isinstance(model, EncoderDecoder):
        model.encoder(model.embed(batch.tokens), batch.doc, states=states)
    else:
        assert isinstance(model, Encoder)
        x_BTD = model.embed.widen(model.body_vectors(batch.tokens, batch.position, batch.segment))
        model.stack(x_BTD, batch.doc, states=states, segment=batch.segment)
    return states[layer] if isinstance(layer, int) else torch.stack(states).mean(0)


def word_in_context(
    checkpoint: Model | Static | str | Path,
    examples: Sequence[Example],
    train: Sequence[Example] | None = None,
    threshold: float | None = None,
    layer: Layer = -1,
    batch_tokens: int = BATCH_TOKENS,
) -> Outcome:
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
        threshold = best_threshold(cosines, [is_same(example) for example in train])
    cosines = sense_cosines(model, examples, layer, batch_tokens)
    labels = {is_same(e): e.target for e in [*(train or ()), *examples] if e.target is not None}
    said = [labels.get(bool(c >= threshold), str(bool(c >= threshold)).lower()) for c in cosines]
    predictions = [Prediction(label, {"cosine": float(c)}) for label, c in zip(said, cosines, strict=True)]
    true = [example.target for example in examples]
    metrics = score("word-in-context", said, true) if None not in true else {}
    unknown = int((cosines == 0).sum())
    told = [f"{unknown:,} of {len(examples):,} examples have a word without a vector: their cosine is taken as 0."]
    return Outcome(metrics, predictions, {"threshold": float(threshold), "layer": layer}, told if unknown else [])


def sense_cosines(model: Model | Static, examples: Sequence[Example], layer: Layer, batch_tokens: int) -> np.ndarray:
    """(N,) of each example's two words, rounded: that of equal vectors is 1, and not one of the numbers beside it."""
    texts = [text for example in examples for text in example.texts]
    spans = [span for example in examples for span in example.spans]
    assert len(spans) == len(texts), "the reader marks the word in both texts"
    x_ND = unit(words_in_texts(model, texts, spans, layer, batch_tokens))
    return np.round((x_ND[::2] * x_ND[1::2]).sum(1), 6)


def is_same(example: Example) -> bool:
    """What a label says."""
    found = SAME.get(str(example.target).lower())
    if found is None:
        raise UserError(f"Example {example.id}: the label {example.target!r} is neither true nor false (1 nor 0).")
    return found


def similar_texts(checkpoint: Model | str | Path, examples: Sequence[Example], **settings: object) -> Outcome:
    """Pairs of texts by the cosine of their vectors: against scores, or each text's own partner among all others."""
    texts = [text for example in examples for text in example.texts]
    x_ND = embed_texts(checkpoint, texts, normalise=True, **settings)  # type: ignore[arg-type]
    cosines = (x_ND[::2] * x_ND[1::2]).sum(1).tolist()
    true = [example.target for example in examples]
    pairs = list(zip(x_ND[::2], x_ND[1::2], strict=True))
    metrics = score("embed", pairs if None in true else cosines, true)
    return Outcome(metrics, [Prediction(cosine) for cosine in cosines])
