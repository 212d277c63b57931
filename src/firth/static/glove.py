"""GloVe: word vectors from the logarithms of co-occurrence counts (Pennington et al. 2014).

First count: X[i, j] is the sum of 1 / distance over all co-occurrences of words i and j within `window` words. Then
factorise log X by weighted least squares (equation 8):

    loss = sum over X[i, j] > 0 of f(X[i, j]) (w_i . c_j + b_i + bc_j - log X[i, j])^2 / 2
    f(x) = min((x / x_max)^0.75, 1)                 (equation 9: rare counts are noisy)

AdaGrad updates one record after the other, with the steps of the published program (`train_glove`). A word's final
vector is w + c (section 4.2). An epoch's cost grows with the number of distinct pairs, not of tokens.

X is symmetric and does not fit into memory for a large text. A record holds each pair once, its smaller word first.
Records are sorted, summed and spilled to disk whenever a buffer is full, then the sorted runs are merged.

N words, D dimensions of a vector, R records, W words of a chunk of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numba import njit

from firth.core.files import create_file

# A key is multiplied by an odd number modulo 2^64, which is invertible: sorted records are then in a shuffled order.
KEY_MULTIPLIER = 0x9E3779B97F4A7C15
KEY_INVERSE = pow(KEY_MULTIPLIER, -1, 2**64)
RECORD_DTYPE = np.dtype([("key", "<u8"), ("value", "<f4")])
MAX_GRADIENT = 100.0  # limit of each element of a gradient
DEFAULT_ETA, DEFAULT_X_MAX, DEFAULT_WEIGHTING_EXPONENT = 0.05, 100.0, 0.75  # section 4.2


# --- counting in bounded memory -------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def emit_cooccurrences(words_W, doc_W, window, num_words, key, value):
    """Write key and 1/distance of every two words at most `window` apart in a document; return their number."""
    n = 0
    for i in range(len(words_W)):
        for k in range(1, min(window, i) + 1):
            if doc_W[i - k] != doc_W[i]:
                break
            a, b = words_W[i], words_W[i - k]
            low, high = min(a, b), max(a, b)
            key[n] = (np.uint64(low) * np.uint64(num_words) + np.uint64(high)) * np.uint64(KEY_MULTIPLIER)
            value[n] = np.float32(1.0 / k)
            n += 1
    return n


@njit(nogil=True, cache=True)
def emit_bigrams(words_W, doc_W, num_words, key, value):
    """Write the key of every two adjacent words of a document, in their order, with value 1; return their number."""
    n = 0
    for i in range(1, len(words_W)):
        if doc_W[i - 1] == doc_W[i] and words_W[i - 1] >= 0 and words_W[i] >= 0:
            key[n] = (np.uint64(words_W[i - 1]) * np.uint64(num_words) + np.uint64(words_W[i])) * np.uint64(
                KEY_MULTIPLIER
            )
            value[n] = np.float32(1)
            n += 1
    return n


def sum_by_key(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return sorted records, one per key, with the sum of its values."""
    if not len(key):
        return np.empty(0, RECORD_DTYPE)
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    records = np.empty(len(first), RECORD_DTYPE)
    records["key"], records["value"] = key[first], np.add.reduceat(value[order].astype(np.float64), first)
    return records


def count_records(chunks: Iterable[tuple[np.ndarray, np.ndarray]], folder: Path, name: str, max_records: int) -> Path:
    """Sum chunks of (keys, values) by key with at most about `max_records` in memory; return the file of the sums.

    A full buffer is sorted, summed and spilled. At the end the spills are merged, one range of keys at a time.
    """
    spills: list[Path] = []
    held: list[tuple[np.ndarray, np.ndarray]] = []

    def spill() -> None:
        if held:
            spills.append(folder / f"{name}-{len(spills)}.spill")
            records = sum_by_key(np.concatenate([k for k, _ in held]), np.concatenate([v for _, v in held]))
            with create_file(spills[-1]) as file:
                file.write(records.data)
            held.clear()

    size = 0
    for key, value in chunks:
        held.append((key, value))
        size += len(key)
        if size >= max_records:
            spill()
            size = 0
    spill()
    result = folder / f"{name}.bin"
    with create_file(result) as file:
        for merged in merge_sorted_runs([open_records(path) for path in spills], max_records):
            file.write(merged.data)
    for path in spills:
        path.unlink()
    return result


def merge_sorted_runs(runs: list[np.ndarray], max_records: int) -> Iterator[np.ndarray]:
    """Merge sorted runs and sum equal keys; yields chunks of about `max_records`."""
    if not runs:
        return
    parts = max(1, -(-sum(map(len, runs)) // max_records))
    longest = max(runs, key=len)
    edges = longest["key"][np.arange(1, parts) * len(longest) // parts]
    cuts = [np.concatenate([[0], np.searchsorted(run["key"], edges), [len(run)]]) for run in runs]
    for part in range(parts):
        pieces = [run[cut[part] : cut[part + 1]] for run, cut in zip(runs, cuts, strict=True)]
        yield sum_by_key(*(np.concatenate([piece[field] for piece in pieces]) for field in ("key", "value")))


def open_records(path: Path) -> np.ndarray:
    """Memory-map the records of a file."""
    return np.memmap(path, RECORD_DTYPE, mode="r") if path.stat().st_size else np.empty(0, RECORD_DTYPE)


def decode_keys(key: np.ndarray, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two word ids of each key."""
    with np.errstate(over="ignore"):
        pair_key = key * np.uint64(KEY_INVERSE)
    first, second = np.divmod(pair_key, np.uint64(num_words))
    return first.astype(np.int64), second.astype(np.int64)


# --- training -------------------------------------------------------------------------------------------------------


def init_glove_state(num_words: int, dim: int, seed: int) -> dict[str, np.ndarray]:
    """Return random vectors and biases of words and contexts, and AdaGrad's sums of squares, which start at 1."""
    draw = np.random.default_rng(seed)
    shapes = {"words": (num_words, dim), "contexts": (num_words, dim), "word_bias": (num_words,)}
    shapes["context_bias"] = (num_words,)
    state = {name: (draw.random(shape, dtype=np.float32) - 0.5) / np.float32(dim) for name, shape in shapes.items()}
    return state | {f"{name}/squares": np.ones(shape, np.float32) for name, shape in shapes.items()}


def untrained_loss(value_R: np.ndarray, x_max: float, exponent: float) -> float:
    """Return the mean loss of vectors and biases that are 0."""
    x_R = value_R.astype(np.float64)
    return float(np.mean(0.5 * np.minimum((x_R / x_max) ** exponent, 1.0) * np.log(x_R) ** 2))


@njit(inline="always", fastmath=True)
def _adagrad_step(w_D, c_D, w2_D, c2_D, g, eta, limit):
    """Update a word and a context vector by the error's gradient, each element clipped to the limit (0: none)."""
    for d in range(len(w_D)):
        to_w, to_c = g * c_D[d], g * w_D[d]
        if limit:
            to_w, to_c = min(max(to_w, -limit), limit), min(max(to_c, -limit), limit)
        to_w, to_c = eta * to_w, eta * to_c
        w_D[d] -= to_w / np.sqrt(w2_D[d])
        c_D[d] -= to_c / np.sqrt(c2_D[d])
        w2_D[d] += to_w * to_w
        c2_D[d] += to_c * to_c


@njit(nogil=True, fastmath=True, cache=True)
def train_glove(first_R, second_R, value_R, w, c, b, bc, w2, c2, b2, bc2, eta, x_max, exponent):
    """Train on records in place by AdaGrad, each in both directions; return the sum of the losses and their number.

    The steps are those of the published program, which differ from plain AdaGrad in three ways:

    - The sums of squares of the vectors hold (eta g)^2, and not g^2: at eta 0.05 the rate decays 400 times later.
    - The biases take steps of rate 1: they soon hold the logarithms of the words' frequencies, and leave the vectors
      the rest.
    - Each element of a gradient is clipped. Only a run that diverges reaches the limit.
    """
    total, num = 0.0, 0
    limit = np.float32(MAX_GRADIENT)
    for r in range(len(first_R)):
        same = first_R[r] == second_R[r]
        x = value_R[r] * np.float32(2 if same else 1)  # X[i, i] counts both directions
        weight = np.float32(min((x / x_max) ** exponent, 1.0))
        logarithm = np.float32(np.log(x))
        for direction in range(1 if same else 2):
            i, j = (first_R[r], second_R[r]) if direction == 0 else (second_R[r], first_R[r])
            error, squares = b[i] + bc[j] - logarithm, np.float32(0)
            for d in range(w.shape[1]):
                error += w[i, d] * c[j, d]
                squares += w[i, d] * w[i, d] + c[j, d] * c[j, d]
            g = weight * error
            total += 0.5 * g * error
            num += 1
            if g * g * squares <= limit * limit:  # no element is longer than its vector
                _adagrad_step(w[i], c[j], w2[i], c2[j], g, eta, np.float32(0))
            else:
                _adagrad_step(w[i], c[j], w2[i], c2[j], g, eta, limit)
            g = min(max(g, -limit), limit)
            b[i] -= g / np.sqrt(b2[i])
            bc[j] -= g / np.sqrt(bc2[j])
            b2[i] += g * g
            bc2[j] += g * g
    return total, num
