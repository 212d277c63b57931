"""Static word vectors: one vector per token, whatever stands around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import scipy.sparse as sp
import torch

from firth.models.config import FanInInit, ModelConfig, NormalInit, UniformInit
from firth.models.model import Model
from firth.tokens import Shards

PPMI_WINDOW_TOKENS = 8
MAX_COUNTED_TOKENS = 2**24  # tokens that are counted: of longer texts stretches, evenly apart
SAMPLE_CHUNK_TOKENS = 2**14
COUNT_THREADS = 4  # threads that count: each needs some 25 bytes for every token
CONTEXT_EXPONENT = (
    0.75  # context counts are raised to this, so that rare ones weigh less (Levy et al. 2015, section 3.2)
)

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")


def cooccurrence_matrix(shards: Shards, vocab_size: int, window: int) -> sp.csr_matrix:
    """How often two tokens stand at most `window` apart in a document; one at distance k counts 1/k."""
    tokens, doc = sample_tokens_for_counts(shards)
    shape = (vocab_size, vocab_size)

    def apart(k: int) -> sp.csr_matrix:
        together = doc[:-k] == doc[k:]
        pair, count = np.unique((tokens[:-k] * vocab_size + tokens[k:])[together], return_counts=True)
        return sp.csr_matrix((count.astype(np.float32) / k, np.divmod(pair, vocab_size)), shape=shape)

    total = sum(map_in_threads(apart, range(1, window + 1), COUNT_THREADS), sp.csr_matrix(shape, dtype=np.float32))
    return total + total.T


def map_in_threads(
    function: Callable[[InputT], OutputT], items: Iterable[InputT], max_threads: int
) -> Iterator[OutputT]:
    """What a function makes of each, in their order; several at once, as numpy and scipy let others work meanwhile."""
    with ThreadPoolExecutor(min(max_threads, torch.get_num_threads())) as pool:
        yield from pool.map(function, items)


def sample_tokens_for_counts(shards: Shards) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and which document, or which part of one, each is of."""
    doc = np.repeat(np.arange(shards.num_documents, dtype=np.int32), np.diff(shards.offsets))
    apart = -(-len(doc) // MAX_COUNTED_TOKENS) * SAMPLE_CHUNK_TOKENS
    if len(doc) <= MAX_COUNTED_TOKENS:
        return np.asarray(shards.tokens).astype(np.int64), doc
    starts = range(0, len(doc), apart)
    tokens = np.concatenate([shards.tokens[i : i + SAMPLE_CHUNK_TOKENS] for i in starts]).astype(np.int64)
    part = np.concatenate(
        [2 * doc[i : i + SAMPLE_CHUNK_TOKENS].astype(np.int64) + number % 2 for number, i in enumerate(starts)]
    )
    return tokens, part


def ppmi_matrix(counts: sp.csr_matrix) -> sp.csr_matrix:
    """Positive pointwise mutual information: by how much two tokens meet more often than chance, in nats."""
    word = np.asarray(counts.sum(1)).ravel()
    context = word**CONTEXT_EXPONENT / max(np.sum(word**CONTEXT_EXPONENT), 1e-30)
    pairs = counts.tocoo()
    value = np.log(pairs.data / (word[pairs.row] * context[pairs.col]))
    positive = value > 0
    place = (pairs.row[positive], pairs.col[positive])
    return sp.csr_matrix((value[positive].astype(np.float32), place), shape=counts.shape)


def ppmi_vectors(
    shards: Shards, vocab_size: int, dim: int, window: int = PPMI_WINDOW_TOKENS, seed: int = 0
) -> np.ndarray:
    """Vectors (vocab_size, dim) by a truncated SVD of the PPMI matrix, which word2vec factorises without making it
    (Levy & Goldberg 2014). Turned at random so that all directions carry alike, centred, of unit spread. Tokens that
    keep no company, as marks that no text has (masks, T5's sentinels), are random, so that no two are the same.
    """
    matrix = ppmi_matrix(cooccurrence_matrix(shards, vocab_size, window))
    across = matrix.T.tocsr()
    draw = np.random.default_rng(seed)
    basis = draw.standard_normal((vocab_size, dim + 16)).astype(np.float32)
    for _ in range(2):  # subspace iteration (Halko et al. 2011, algorithm 4.4)
        basis = orthonormal_basis(parallel_matmul(matrix, parallel_matmul(across, basis)))
    inner = parallel_matmul(across, basis).T
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


def parallel_matmul(matrix: sp.csr_matrix, dense: np.ndarray) -> np.ndarray:
    """Of a sparse matrix and a wide one, whose columns are shared out to threads."""
    parts = np.array_split(dense, torch.get_num_threads(), axis=1)
    return np.hstack(list(map_in_threads(matrix.__matmul__, parts, len(parts))))


def orthonormal_basis(x: np.ndarray) -> np.ndarray:
    """A basis of what the columns span; numpy's own would be in double precision."""
    return torch.linalg.qr(torch.from_numpy(x))[0].numpy()


def warm_start_embeddings(model: Model, shards: Shards, seed: int = 0) -> None:
    """Begin with embeddings that know which tokens keep company, instead of random ones."""
    set_token_embeddings(model, ppmi_embeddings(model.config, shards, seed))


def ppmi_embeddings(config: ModelConfig, shards: Shards, seed: int) -> np.ndarray:
    """Such embeddings, as far apart as suits a model."""
    width = config.embed_width
    return embedding_std(config.init, width) * ppmi_vectors(shards, config.vocab_size, width, seed=seed)


@torch.no_grad()
def set_token_embeddings(model: Model, vectors: np.ndarray) -> None:
    if vectors.any() and np.isfinite(vectors).all():  # or no two tokens stand together
        model.embed.tokens.weight.copy_(torch.from_numpy(vectors))


def embedding_std(init: FanInInit | NormalInit | UniformInit, width: int) -> float:
    """Of the first embeddings: T5's own, or wider than random ones are.

    Five times up to a width of 128, by experiment; then less, so that the first scores of words do not grow with it.
    """
    if isinstance(init, FanInInit):
        return 1.0
    at_random = init.std if isinstance(init, NormalInit) else init.bound / 3**0.5
    return max(1.0, min(5.0, 5 * (128 / width) ** 0.5)) * at_random
