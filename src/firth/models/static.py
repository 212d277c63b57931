"""Static word vectors: one vector per token, whatever stands around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import scipy.sparse as sp
import torch

from firth.models.config import FanIn, ModelConfig, Normal, Uniform
from firth.models.model import Model
from firth.tokens import Shards

WINDOW = 8
MOST = 2**24  # tokens that are counted: of longer texts stretches, evenly apart
STRETCH = 2**14
AT_ONCE = 4  # threads that count: each needs some 25 bytes for every token
NOISE = 0.75  # context counts are raised to this, so that rare ones weigh less (Levy et al. 2015, section 3.2)

In = TypeVar("In")
Out = TypeVar("Out")


def cooccurrence(shards: Shards, vocab_size: int, window: int) -> sp.csr_matrix:
    """How often two tokens stand at most `window` apart in a document; one at distance k counts 1/k."""
    tokens, doc = sample(shards)
    shape = (vocab_size, vocab_size)

    def apart(k: int) -> sp.csr_matrix:
        together = doc[:-k] == doc[k:]
        pair, count = np.unique((tokens[:-k] * vocab_size + tokens[k:])[together], return_counts=True)
        return sp.csr_matrix((count.astype(np.float32) / k, np.divmod(pair, vocab_size)), shape=shape)

    total = sum(in_threads(apart, range(1, window + 1), AT_ONCE), sp.csr_matrix(shape, dtype=np.float32))
    return total + total.T


def in_threads(function: Callable[[In], Out], given: Iterable[In], most: int) -> Iterator[Out]:
    """What a function makes of each, in their order; several at once, as numpy and scipy let others work meanwhile."""
    with ThreadPoolExecutor(min(most, torch.get_num_threads())) as pool:
        yield from pool.map(function, given)


def sample(shards: Shards) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and which document, or which part of one, each is of."""
    doc = np.repeat(np.arange(shards.num_documents, dtype=np.int32), np.diff(shards.offsets))
    apart = -(-len(doc) // MOST) * STRETCH
    if len(doc) <= MOST:
        return np.asarray(shards.tokens).astype(np.int64), doc
    starts = range(0, len(doc), apart)
    tokens = np.concatenate([shards.tokens[i : i + STRETCH] for i in starts]).astype(np.int64)
    part = np.concatenate([2 * doc[i : i + STRETCH].astype(np.int64) + number % 2 for number, i in enumerate(starts)])
    return tokens, part


def ppmi(counts: sp.csr_matrix) -> sp.csr_matrix:
    """Positive pointwise mutual information: by how much two tokens meet more often than chance, in nats."""
    word = np.asarray(counts.sum(1)).ravel()
    context = word**NOISE / max(np.sum(word**NOISE), 1e-30)
    pairs = counts.tocoo()
    value = np.log(pairs.data / (word[pairs.row] * context[pairs.col]))
    positive = value > 0
    place = (pairs.row[positive], pairs.col[positive])
    return sp.csr_matrix((value[positive].astype(np.float32), place), shape=counts.shape)


def ppmi_vectors(shards: Shards, vocab_size: int, dim: int, window: int = WINDOW, seed: int = 0) -> np.ndarray:
    """Vectors (vocab_size, dim) by a truncated SVD of the PPMI matrix, which word2vec factorises without making it
    (Levy & Goldberg 2014). Turned at random so that all directions carry alike, centred, of unit spread. Tokens that
    keep no company, as marks that no text has (masks, T5's sentinels), are random, so that no two are the same.
    """
    matrix = ppmi(cooccurrence(shards, vocab_size, window))
    across = matrix.T.tocsr()
    draw = np.random.default_rng(seed)
    basis = draw.standard_normal((vocab_size, dim + 16)).astype(np.float32)
    for _ in range(2):  # subspace iteration (Halko et al. 2011, algorithm 4.4)
        basis = orthonormal(product(matrix, product(across, basis)))
    inner = product(across, basis).T
    left, squares, _ = np.linalg.svd(inner @ inner.T)
    vectors = (basis @ left[:, :dim]) * squares[:dim] ** 0.25  # half of the singular values' weight
    vectors = np.pad(vectors, ((0, 0), (0, dim - vectors.shape[1])))  # a vocabulary smaller than the model is wide
    turn, _ = np.linalg.qr(draw.standard_normal((dim, dim)))
    met = np.diff(matrix.indptr) > 0
    if not met.any():
        return np.zeros((vocab_size, dim), np.float32)
    vectors = (vectors - vectors[met].mean(0)) @ turn
    vectors /= max(vectors[met].std(), 1e-30)
    vectors[~met] = draw.standard_normal((len(met) - met.sum(), dim))
    return vectors.astype(np.float32)


def product(matrix: sp.csr_matrix, wide: np.ndarray) -> np.ndarray:
    """Of a sparse matrix and a wide one, whose columns are shared out to threads."""
    parts = np.array_split(wide, torch.get_num_threads(), axis=1)
    return np.hstack(list(in_threads(matrix.__matmul__, parts, len(parts))))


def orthonormal(x: np.ndarray) -> np.ndarray:
    """A basis of what the columns span; numpy's own would be in double precision."""
    return torch.linalg.qr(torch.from_numpy(x))[0].numpy()


def warm_start(model: Model, shards: Shards, seed: int = 0) -> None:
    """Begin with embeddings that know which tokens keep company, instead of random ones."""
    begin_with(model, first_vectors(model.config, shards, seed))


def first_vectors(config: ModelConfig, shards: Shards, seed: int) -> np.ndarray:
    """Such embeddings, as far apart as suits a model."""
    width = config.embed_width
    return spread(config.init, width) * ppmi_vectors(shards, config.vocab_size, width, seed=seed)


@torch.no_grad()
def begin_with(model: Model, vectors: np.ndarray) -> None:
    if vectors.any() and np.isfinite(vectors).all():  # or no two tokens stand together
        model.embed.tokens.weight.copy_(torch.from_numpy(vectors))


def spread(init: FanIn | Normal | Uniform, width: int) -> float:
    """Of the first embeddings: T5's own, or wider than random ones are.

    Five times up to a width of 128, by experiment; then less, so that the first scores of words do not grow with it.
    """
    if isinstance(init, FanIn):
        return 1.0
    at_random = init.std if isinstance(init, Normal) else init.width / 3**0.5
    return max(1.0, min(5.0, 5 * (128 / width) ** 0.5)) * at_random
