"""GloVe: vectors whose products are the logarithms of how often words meet (Pennington et al. 2014).

N words, D numbers of a vector, R records (pairs of words that meet, each pair once).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numba import njit

# Keys are multiplied by an odd number before they are sorted: then sorted pairs are in an order as good as random.
KEY_MULTIPLIER = 0x9E3779B97F4A7C15
KEY_INVERSE = pow(KEY_MULTIPLIER, -1, 2**64)
RECORD_DTYPE = np.dtype([("key", "<u8"), ("value", "<f4")])
DEFAULT_ETA, DEFAULT_X_MAX, DEFAULT_WEIGHTING_EXPONENT = 0.05, 100.0, 0.75  # section 4.2 and equation 9


# --- counting in bounded memory -------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def emit_cooccurrences(words_W, doc_W, window, num_words, key, value):
    """Every two words at most `window` apart in a document: their key (the smaller word first), 1/distance."""
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
    """Every two words that follow each other, in their order."""
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
    """Sorted records, one for each key, with the sum of its values."""
    if not len(key):
        return np.empty(0, RECORD_DTYPE)
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    found = np.empty(len(first), RECORD_DTYPE)
    found["key"], found["value"] = key[first], np.add.reduceat(value[order].astype(np.float64), first)
    return found


def count_records(chunks: Iterable[tuple[np.ndarray, np.ndarray]], folder: Path, name: str, max_records: int) -> Path:
    """Sum records that come in pieces (keys, values), in memory for about `max_records` of them; the file of the sums.

    Whenever the room is full they are sorted, summed and spilled; at the end the spills are merged, a range of keys at
    a time.
    """
    spills: list[Path] = []
    held: list[tuple[np.ndarray, np.ndarray]] = []

    def spill() -> None:
        if held:
            spills.append(folder / f"{name}-{len(spills)}.spill")
            sum_by_key(np.concatenate([k for k, _ in held]), np.concatenate([v for _, v in held])).tofile(spills[-1])
            held.clear()

    size = 0
    for key, value in chunks:
        held.append((key, value))
        size += len(key)
        if size >= max_records:
            spill()
            size = 0
    spill()
    place = folder / f"{name}.bin"
    with open(place, "wb") as file:
        for merged in merge_sorted_runs([open_records(path) for path in spills], max_records):
            merged.tofile(file)
    for path in spills:
        path.unlink()
    return place


def merge_sorted_runs(runs: list[np.ndarray], max_records: int) -> Iterator[np.ndarray]:
    """Sorted runs of records as one, in pieces of about `max_records`: equal keys are summed."""
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
    """The records of a file, which stay on disk until they are asked for."""
    return np.memmap(path, RECORD_DTYPE, mode="r") if path.stat().st_size else np.empty(0, RECORD_DTYPE)


def decode_keys(key: np.ndarray, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """The two words of each key."""
    with np.errstate(over="ignore"):
        plain = key * np.uint64(KEY_INVERSE)
    first, second = np.divmod(plain, np.uint64(num_words))
    return first.astype(np.int64), second.astype(np.int64)


# --- learning -------------------------------------------------------------------------------------------------------


def init_glove_state(num_words: int, dim: int, seed: int) -> dict[str, np.ndarray]:
    """Vectors and biases of words and of contexts, small and random, and AdaGrad's sums of squares, 1."""
    draw = np.random.default_rng(seed)
    shapes = {"words": (num_words, dim), "contexts": (num_words, dim), "word_bias": (num_words,)}
    shapes["context_bias"] = (num_words,)
    state = {name: (draw.random(shape, dtype=np.float32) - 0.5) / np.float32(dim) for name, shape in shapes.items()}
    return state | {f"{name}/squares": np.ones(shape, np.float32) for name, shape in shapes.items()}


@njit(nogil=True, fastmath=True, cache=True)
def train_glove(first_R, second_R, value_R, w, c, b, bc, w2, c2, b2, bc2, learning_rate, x_max, exponent):
    """AdaGrad on the records, one after the other and both ways round; the sum of the losses and their number.

    The loss of a record is f(x) (w . c + b + bc - log x)^2 / 2, with f(x) = min((x / x_max)^exponent, 1).
    """
    total, num = 0.0, 0
    for r in range(len(first_R)):
        same = first_R[r] == second_R[r]
        x = value_R[r] * np.float32(2 if same else 1)  # a word that meets itself does so from both sides
        weight = np.float32(min((x / x_max) ** exponent, 1.0))
        logarithm = np.float32(np.log(x))
        for way in range(1 if same else 2):
            i, j = (first_R[r], second_R[r]) if way == 0 else (second_R[r], first_R[r])
            inner = b[i] + bc[j] - logarithm
            for d in range(w.shape[1]):
                inner += w[i, d] * c[j, d]
            g = weight * inner
            total += 0.5 * g * inner
            num += 1
            for d in range(w.shape[1]):
                to_w, to_c = g * c[j, d], g * w[i, d]
                w[i, d] -= learning_rate * to_w / np.sqrt(w2[i, d])
                c[j, d] -= learning_rate * to_c / np.sqrt(c2[j, d])
                w2[i, d] += to_w * to_w
                c2[j, d] += to_c * to_c
            b[i] -= learning_rate * g / np.sqrt(b2[i])
            bc[j] -= learning_rate * g / np.sqrt(bc2[j])
            b2[i] += g * g
            bc2[j] += g * g
    return total, num
