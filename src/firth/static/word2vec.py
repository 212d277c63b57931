"""word2vec: a word's vector is learned by guessing the words around it (Mikolov et al. 2013).

W words of a stretch of text, N of the vocabulary, D numbers of a vector, K noise words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# Sigmoid and softplus by straight lines between the points of a table: exact to 3e-6, and flat beyond the ends.
TABLE_MAX, TABLE_POINTS = np.float32(8.0), 1024
_table_x = np.linspace(-TABLE_MAX, TABLE_MAX, TABLE_POINTS + 1)
SIGMOID_TABLE = (1 / (1 + np.exp(-_table_x))).astype(np.float32)
SOFTPLUS_TABLE = np.log1p(np.exp(_table_x)).astype(np.float32)
TABLE_STEPS_PER_UNIT = np.float32(TABLE_POINTS / (2 * TABLE_MAX))
ZERO, ONE = np.float32(0), np.float32(1)


class AliasTable(NamedTuple):
    """A distribution to draw words from in two looks: a place at random, then its word or its alias (Walker 1977)."""

    accept_prob: np.ndarray  # (N,) the probability that the word of the place itself is meant
    alias: np.ndarray  # (N,) the other one


def noise_distribution(counts_N: np.ndarray, exponent: float) -> np.ndarray:
    """(N,) words by their count to a power (Mikolov et al. 2013b, section 2.2); those that never occur have none."""
    share_N = np.where(counts_N > 0, np.maximum(counts_N, 1).astype(np.float64) ** exponent, 0.0)
    return share_N / share_N.sum()


def build_alias_table(counts_N: np.ndarray, exponent: float = 0.75) -> AliasTable:
    """Where noise words are drawn from."""
    share_N = len(counts_N) * noise_distribution(counts_N, exponent)
    own_N, alias_N = np.ones(len(share_N), np.float32), np.arange(len(share_N), dtype=np.int32)
    poor, rich = list(np.flatnonzero(share_N < 1)), list(np.flatnonzero(share_N >= 1))
    while poor and rich:
        a, b = poor.pop(), rich[-1]
        own_N[a], alias_N[a] = share_N[a], b
        share_N[b] -= 1 - share_N[a]
        if share_N[b] < 1:
            poor.append(rich.pop())
    return AliasTable(own_N, alias_N)


def keep_probabilities(counts_N: np.ndarray, sample: float) -> np.ndarray:
    """(N,) how likely each word of the text is read: frequent ones less (as word2vec's code has it; 0: all are)."""
    threshold = sample * counts_N.sum()
    if not sample:
        return (counts_N > 0).astype(np.float32)
    counts = np.maximum(counts_N, 1)
    return np.where(counts_N > 0, np.minimum((np.sqrt(counts / threshold) + 1) * threshold / counts, 1), 0).astype(
        np.float32
    )


def init_word_vectors(num_words: int, dim: int, seed: int) -> np.ndarray:
    """(N, D) small and random; the vectors that guess begin at 0."""
    draw = np.random.default_rng(seed)
    return (draw.random((num_words, dim), dtype=np.float32) * 2 - 1) / np.float32(dim)


# --- on the CPU: one word after the other, without a lock -----------------------------------------------------------


@njit(inline="always")
def _splitmix64(state):
    """64 bits by splitmix64 (Steele, Lea, Flood 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    x = state[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(inline="always")
def _sample_alias(state, accept_prob, alias):
    """A word from a Noise: the upper bits choose the place, the lower ones what is meant there."""
    x = _splitmix64(state)
    place = ((x >> np.uint64(32)) * np.uint64(len(accept_prob))) >> np.uint64(32)
    return (
        np.int64(place)
        if np.float32(x & np.uint64(0xFFFFFF)) / np.float32(2**24) < accept_prob[place]
        else alias[place]
    )


@njit(inline="always")
def _interpolate(table, x):
    y = (min(max(x, -TABLE_MAX), TABLE_MAX) + TABLE_MAX) * TABLE_STEPS_PER_UNIT
    k = min(int(y), TABLE_POINTS - 1)
    return table[k] + (y - np.float32(k)) * (table[k + 1] - table[k])


@njit(inline="always", fastmath=True)
def _negative_sampling_step(x_D, error_D, outputs_ND, chosen_K, num, gradient_K, learning_rate):
    """One guess: the first of the chosen words is right, the others are noise.

    Changes the outputs; what is to be added to x comes back in `error`.
    """
    loss = ZERO
    for k in range(num):
        word, score = chosen_K[k], ZERO
        for d in range(len(x_D)):
            score += x_D[d] * outputs_ND[word, d]
        loss += _interpolate(SOFTPLUS_TABLE, -score if k == 0 else score)
        gradient_K[k] = learning_rate * ((ONE if k == 0 else ZERO) - _interpolate(SIGMOID_TABLE, score))
    error_D[:] = ZERO
    for k in range(num):
        word, g = chosen_K[k], gradient_K[k]
        for d in range(len(x_D)):
            output = outputs_ND[word, d]
            error_D[d] += g * output
            outputs_ND[word, d] = output + g * x_D[d]
    return loss


@njit(inline="always", fastmath=True)
def _full_softmax_step(x_D, error_D, outputs_ND, word, score_N, learning_rate):
    """One guess by the softmax over the whole vocabulary."""
    highest = np.float32(-np.inf)
    for n in range(len(outputs_ND)):
        score = ZERO
        for d in range(len(x_D)):
            score += x_D[d] * outputs_ND[n, d]
        score_N[n] = score
        highest = max(highest, score)
    total = ZERO
    loss = highest - score_N[word]
    for n in range(len(outputs_ND)):
        score_N[n] = np.exp(score_N[n] - highest)
        total += score_N[n]
    error_D[:] = ZERO
    for n in range(len(outputs_ND)):
        g = learning_rate * ((ONE if n == word else ZERO) - score_N[n] / total)
        for d in range(len(x_D)):
            output = outputs_ND[n, d]
            error_D[d] += g * output
            outputs_ND[n, d] = output + g * x_D[d]
    return loss + np.log(total)


@njit(nogil=True, fastmath=True, cache=True)
def train_word2vec(
    words_W, doc_W, inputs_ND, outputs_ND, window, skip_gram, negative, learning_rate, accept_prob_N, alias_N, seed
):
    """Learn from a stretch of text; the sum of the losses, and how many guesses there were.

    Around each word a window of random size is read, up to its document's edges. Skip-gram: each word in it guesses the
    one in the middle. CBOW: their mean does, and, as in the original code, each gets the whole of its gradient. Noise
    words are drawn once for a window, which leaves the expected gradient as it is and the vectors in the cache; without
    noise (`negative` 0) the guess is among all words.
    """
    dim = inputs_ND.shape[1]
    state = np.empty(1, np.uint64)
    state[0] = seed
    x_D, error_D = np.empty(dim, np.float32), np.empty(dim, np.float32)
    around = np.empty(2 * window, np.int64)
    chosen_K, gradient_K = np.empty(negative + 1, np.int64), np.empty(negative + 1, np.float32)
    score_N = np.empty(1 if negative else len(outputs_ND), np.float32)
    total, guesses = 0.0, 0
    for i in range(len(words_W)):
        size = window - np.int64(_splitmix64(state) % np.uint64(window))
        num = 0
        for j in range(max(0, i - size), min(len(words_W), i + size + 1)):
            if j != i and doc_W[j] == doc_W[i]:
                around[num] = words_W[j]
                num += 1
        if num == 0:
            continue
        word = np.int64(words_W[i])
        chosen_K[0], drawn = word, 1
        for _ in range(negative):
            other = _sample_alias(state, accept_prob_N, alias_N)
            if other != word:
                chosen_K[drawn] = other
                drawn += 1
        if skip_gram:
            for c in range(num):
                context = around[c]
                for d in range(dim):
                    x_D[d] = inputs_ND[context, d]
                if negative:
                    total += _negative_sampling_step(
                        x_D, error_D, outputs_ND, chosen_K, drawn, gradient_K, learning_rate
                    )
                else:
                    total += _full_softmax_step(x_D, error_D, outputs_ND, word, score_N, learning_rate)
                for d in range(dim):
                    inputs_ND[context, d] += error_D[d]
            guesses += num
        else:
            x_D[:] = ZERO
            for c in range(num):
                for d in range(dim):
                    x_D[d] += inputs_ND[around[c], d]
            for d in range(dim):
                x_D[d] /= np.float32(num)
            if negative:
                total += _negative_sampling_step(x_D, error_D, outputs_ND, chosen_K, drawn, gradient_K, learning_rate)
            else:
                total += _full_softmax_step(x_D, error_D, outputs_ND, word, score_N, learning_rate)
            for c in range(num):
                for d in range(dim):
                    inputs_ND[around[c], d] += error_D[d]
            guesses += 1
    return total, guesses


# --- phrases --------------------------------------------------------------------------------------------------------


def phrase_scores(
    pair_count: np.ndarray, first: np.ndarray, second: np.ndarray, min_count: int, scale: float
) -> np.ndarray:
    """How much more often two words follow each other than chance: (n(ab) - floor) / (n(a) n(b)), times a scale.

    The scale is how many different words and pairs of words the text has, rare ones too, as gensim has it, so that a
    threshold suits texts of any size (Mikolov et al. 2013b, equation 6).
    """
    return (pair_count - min_count) / (first.astype(np.float64) * second) * scale


@njit(nogil=True, cache=True)
def merge_phrases(words_W, doc_W, keys, phrases, num_words, out_W):
    """Replace pairs that are phrases, from left to right; how many words are left in `out`, each with its place.

    `keys` are the sorted phrases as first * num_words + second, `phrases` the words that they become.
    """
    i = num = 0
    place_W = np.empty(len(words_W), np.int64)
    while i < len(words_W):
        word, step = np.int64(words_W[i]), 1
        if i + 1 < len(words_W) and word >= 0 and words_W[i + 1] >= 0 and doc_W[i] == doc_W[i + 1]:
            key = word * num_words + words_W[i + 1]
            k = np.searchsorted(keys, key)
            if k < len(keys) and keys[k] == key:
                word, step = np.int64(phrases[k]), 2
        out_W[num] = word
        place_W[num] = i
        num, i = num + 1, i + step
    return num, place_W
