"""Ask a model how likely given tokens are at given places, many readings at a time.

B rows, T places, K asked places, N asked in all, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from firth.generate.reading import evaluating, pad_right
from firth.models import Model
from firth.models.heads import Vocabulary
from firth.objectives import IGNORED, Batch

BATCH_TOKENS = 8192  # places that are computed at once
CHUNK = 2048  # readings that are sorted by length before they are put into batches
PIECE = 2**24  # logits that are made at once: 64 MB of float32
Content = tuple[tuple[int, ...] | None, ...]


class Query(NamedTuple):
    """One reading, and the tokens that are asked. The places are those of what is written, where something is."""

    read: list[int]
    asked: list[int]
    labels: list[int]
    written: list[int] | None = None  # by the decoder that reads the encoder
    rank: list[int] | None = None  # i sees j when rank[j] <= rank[i], for a model that hides tokens by order
    of: int = 0  # which text this belongs to


class Answer(NamedTuple):
    """What the model says about the tokens asked: their log-probabilities, and the tokens it holds likeliest."""

    logp: np.ndarray  # (K,) float64, nats
    best: np.ndarray  # (K,) ids


def ask(model: Model, queries: Iterable[Query], batch_tokens: int = BATCH_TOKENS) -> Iterator[tuple[Query, Answer]]:
    """The queries in their order, each with its answer. Readings of like length are computed together.

    The probabilities are those of the model's own softmax, over every row of its vocabulary, in float32: in bfloat16
    two sentences of a pair would often be equally likely. Queries that are the same are asked once, so that a tie is a
    tie: what is computed beside another row may differ in the last digit.
    """
    stream, before = iter(queries), dict[Content, Answer]()
    with evaluating(model):
        while chunk := list(islice(stream, CHUNK)):
            once = {content(query): query for query in chunk}
            answers = {key: before[key] for key in once if key in before}  # those of a pair may be in two chunks
            new = [(key, query) for key, query in once.items() if key not in answers]
            for places in by_size([query for _, query in new], batch_tokens):
                found = answer(model, [new[i][1] for i in places])
                answers |= {new[i][0]: one for i, one in zip(places, found, strict=True)}
            yield from ((query, answers[content(query)]) for query in chunk)
            before = answers


def content(query: Query) -> Content:
    """All of a query but whose it is, as something that can be looked up."""
    return tuple(None if part is None else tuple(part) for part in query[:-1])


def by_size(queries: Sequence[Query], batch_tokens: int) -> Iterator[list[int]]:
    """Places in `queries` by falling length, as many at once as make `batch_tokens` with their padding."""
    size = [max(len(query.read), len(query.written or ())) for query in queries]
    order = sorted(range(len(queries)), key=lambda i: -size[i])
    while order:
        rows = max(1, batch_tokens // size[order[0]])
        yield order[:rows]
        order = order[rows:]


@torch.no_grad()
def answer(model: Model, queries: Sequence[Query]) -> list[Answer]:
    """One batch."""
    batch = batch_of(queries, padding(model)).to(model.embed.tokens.weight.device)
    used_BK = batch.labels != IGNORED
    logp_N, best_N = spoken(model, model.asked_states(batch)[used_BK], batch.labels[used_BK])
    ends = np.cumsum([len(query.labels) for query in queries])[:-1]
    return [Answer(*pair) for pair in zip(np.split(logp_N, ends), np.split(best_N, ends), strict=True)]


def spoken(model: Model, x_ND: Tensor, labels_N: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability of each label, and the likeliest token, never holding the logits of all at once."""
    assert isinstance(model.head, Vocabulary), "checked before anything is asked"
    rows = max(1, PIECE // model.config.vocab_size)
    logp, best = [], []
    for x, labels in zip(x_ND.split(rows), labels_N.split(rows), strict=True):
        logits = model.head(x, model.embed.tokens.weight).float()
        logp.append(logits.gather(1, labels[:, None])[:, 0].double() - logits.double().logsumexp(1))
        best.append(logits.argmax(1))
    return torch.cat(logp).cpu().numpy(), torch.cat(best).cpu().numpy()


def batch_of(queries: Sequence[Query], pad: int) -> Batch:
    """The queries side by side, padded on the right."""
    tokens, doc = pad_right([query.read for query in queries], pad)
    asked, _ = pad_right([query.asked for query in queries], 0)
    labels, _ = pad_right([query.labels for query in queries], IGNORED)
    batch = Batch(tokens, doc=doc, asked=asked, labels=labels)
    if queries[0].rank is not None:
        batch = batch._replace(rank=pad_right([query.rank or [] for query in queries], 0)[0])
    if queries[0].written is None:
        return batch
    written, _ = pad_right([query.written or [] for query in queries], pad)
    # Padding comes last, and a decoder does not look ahead.
    return batch._replace(decoder_tokens=written, decoder_doc=np.zeros_like(written))


def padding(model: Model) -> int:
    assert model.tokenizer is not None, "checked before anything is asked"
    return model.tokenizer.vocab.pad
