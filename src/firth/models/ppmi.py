"""PPMI token embeddings: start pretraining from co-occurrence statistics instead of random embeddings.

1. Count how often two tokens occur within a window of each other (`cooccurrence_matrix`).
2. Turn the counts into positive pointwise mutual information, log(p(a, b) / (p(a) p(b))) where positive.
3. Factorise that sparse matrix by a randomized SVD. Word2vec factorises the same matrix implicitly (Levy & Goldberg
   2014), so the rows are word vectors of the same kind, without training.
"""

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
MAX_COUNTED_TOKENS = 2**24  # longer corpora are sampled in evenly spaced chunks
SAMPLE_CHUNK_TOKENS = 2**14
COUNT_THREADS = 4  # each thread needs about 10 bytes per token
PAIRS_AT_ONCE = 2**20  # whose information is computed at once: its temporaries are small
CONTEXT_EXPONENT = 0.75  # context counts to this power: lowers the PMI of rare contexts (Levy et al. 2015, section 3.2)

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")


def cooccurrence_matrix(shards: Shards, vocab_size: int, window: int) -> sp.csr_matrix:
    """Return (V, V): how often two tokens occur at most `window` apart in a document; distance k counts 1/k."""
    tokens, doc = sample_tokens_for_counts(shards)
    shape = (vocab_size, vocab_size)
    tokens = tokens.astype(np.uint32 if vocab_size**2 <= 2**32 else np.int64)  # of a pair, too

    def counts_at_distance(k: int) -> sp.csr_matrix:
        pair = tokens[:-k] * tokens.dtype.type(vocab_size)
        pair += tokens[k:]
        pair, count = count_sorted(pair[doc[:-k] == doc[k:]])
        row_starts = np.searchsorted(pair, np.arange(vocab_size, dtype=pair.dtype) * pair.dtype.type(vocab_size))
        column = (pair % pair.dtype.type(vocab_size)).astype(np.int32)
        return sp.csr_matrix((count.astype(np.float32) / k, column, np.append(row_starts, len(pair))), shape=shape)

    total = sum(
        map_in_threads(counts_at_distance, range(1, window + 1), COUNT_THREADS), sp.csr_matrix(shape, dtype=np.float32)
    )
    return total + total.T


def count_sorted(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct numbers and their counts, like `np.unique`, with less memory: the array is sorted in place.

    >>> count_sorted(np.array([3, 1, 3]))
    (array([1, 3]), array([1, 2]))
    """
    numbers.sort()
    first = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1) != 0)
    return numbers[first], np.diff(first, append=len(numbers))


def map_in_threads(
    function: Callable[[InputT], OutputT], items: Iterable[InputT], max_threads: int
) -> Iterator[OutputT]:
    """Yield `function` of each item, in order, computed by threads: numpy and scipy release the GIL."""
    with ThreadPoolExecutor(min(max_threads, torch.get_num_threads())) as pool:
        yield from pool.map(function, items)


def sample_tokens_for_counts(shards: Shards) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens to count, and for each the id of its document or sampled chunk."""
    doc = np.repeat(np.arange(shards.num_documents, dtype=np.int32), np.diff(shards.offsets))
    chunk_stride = -(-len(doc) // MAX_COUNTED_TOKENS) * SAMPLE_CHUNK_TOKENS
    if len(doc) <= MAX_COUNTED_TOKENS:
        return np.asarray(shards.tokens), doc
    starts = range(0, len(doc), chunk_stride)
    tokens = np.concatenate([shards.tokens[i : i + SAMPLE_CHUNK_TOKENS] for i in starts])
    part = np.concatenate(
        [2 * doc[i : i + SAMPLE_CHUNK_TOKENS].astype(np.int64) + number % 2 for number, i in enumerate(starts)]
    )
    return tokens, part


def ppmi_matrix(counts: sp.csr_matrix) -> sp.csr_matrix:
    """Return positive pointwise mutual information in nats: how much more often than chance two tokens co-occur."""
    word = np.asarray(counts.sum(1)).ravel()
    context = word**CONTEXT_EXPONENT / max(np.sum(word**CONTEXT_EXPONENT), 1e-30)
    row = np.repeat(np.arange(len(word), dtype=np.int32), np.diff(counts.indptr))
    information = np.empty(counts.nnz, np.float32)
    for start in range(0, counts.nnz, PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        chance = word[row[part]] * context[counts.indices[part]]
        information[part] = np.log(counts.data[part] / chance)
    np.maximum(information, 0, out=information)
    matrix = sp.csr_matrix((information, counts.indices.copy(), counts.indptr.copy()), shape=counts.shape)
    matrix.eliminate_zeros()
    return matrix


def ppmi_vectors(
    shards: Shards, vocab_size: int, dim: int, window: int = PPMI_WINDOW_TOKENS, seed: int = 0
) -> np.ndarray:
    """Return vectors (vocab_size, dim) by a truncated SVD of the PPMI matrix.

    They are centred, rotated at random so that all dimensions have equal variance, and scaled to unit std. Tokens
    without co-occurrences, such as [MASK] or T5's sentinels, get random vectors, so that no two are equal.
    """
    matrix = ppmi_matrix(cooccurrence_matrix(shards, vocab_size, window))
    matrix_T = matrix.T.tocsr()
    rng = np.random.default_rng(seed)
    basis = rng.standard_normal((vocab_size, dim + 16)).astype(np.float32)
    for _ in range(2):  # subspace iteration (Halko et al. 2011, algorithm 4.4)
        basis = orthonormal_basis(parallel_matmul(matrix, parallel_matmul(matrix_T, basis)))
    inner = parallel_matmul(matrix_T, basis).T
    left, squares, _ = np.linalg.svd(inner @ inner.T)
    vectors = (basis @ left[:, :dim]) * squares[:dim] ** 0.25  # the square root of the singular values
    vectors = np.pad(vectors, ((0, 0), (0, dim - vectors.shape[1])))  # the vocabulary may be smaller than `dim`
    rotation, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    has_cooccurrence = np.diff(matrix.indptr) > 0
    if not has_cooccurrence.any():
        return np.zeros((vocab_size, dim), np.float32)
    vectors = (vectors - vectors[has_cooccurrence].mean(0)) @ rotation
    vectors /= max(vectors[has_cooccurrence].std(), 1e-30)
    vectors[~has_cooccurrence] = rng.standard_normal((len(has_cooccurrence) - has_cooccurrence.sum(), dim))
    return vectors.astype(np.float32)


def parallel_matmul(matrix: sp.csr_matrix, dense: np.ndarray) -> np.ndarray:
    """Return `matrix @ dense`; threads share the columns of `dense`."""
    parts = np.array_split(dense, torch.get_num_threads(), axis=1)
    return np.hstack(list(map_in_threads(matrix.__matmul__, parts, len(parts))))


def orthonormal_basis(x: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the column space, in float32: numpy's QR would use float64."""
    return torch.linalg.qr(torch.from_numpy(x))[0].numpy()


def warm_start_embeddings(model: Model, shards: Shards, seed: int = 0) -> None:
    """Replace the random token embeddings by PPMI embeddings of this text."""
    set_token_embeddings(model, ppmi_embeddings(model.config, shards, seed))


def ppmi_embeddings(config: ModelConfig, shards: Shards, seed: int) -> np.ndarray:
    """Return PPMI embeddings with the std that suits the model's initialisation."""
    width = config.embed_width
    return embedding_std(config.init, width) * ppmi_vectors(shards, config.vocab_size, width, seed=seed)


@torch.no_grad()
def set_token_embeddings(model: Model, vectors: np.ndarray) -> None:
    if vectors.any() and np.isfinite(vectors).all():  # all zero: no two tokens co-occur
        model.embed.tokens.weight.copy_(torch.from_numpy(vectors))


def embedding_std(init: FanInInit | NormalInit | UniformInit, width: int) -> float:
    """Return the std of PPMI embeddings: 1 for T5, else a multiple of the random initialisation's std.

    The factor is 5 up to a width of 128, found by experiment. It falls with the width, so that initial logits do not
    grow with it.
    """
    if isinstance(init, FanInInit):
        return 1.0
    random_std = init.std if isinstance(init, NormalInit) else init.bound / 3**0.5
    return max(1.0, min(5.0, 5 * (128 / width) ** 0.5)) * random_std
