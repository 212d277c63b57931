"""word2vec: word vectors from predicting a word and its neighbours (Mikolov et al. 2013a, 2013b).

Every word has two vectors, an input x and an output y. A window of random size, 1 to `window`, surrounds each word of
the text. Skip-gram predicts the middle word from each context word's x; CBOW predicts it from the mean of all x.

The softmax over N words costs N dot products per prediction. Negative sampling (2013b, section 2.2) makes it 1 + K
logistic regressions: tell the true word from K noise words, drawn in proportion to count^0.75:

    loss = -log sigmoid(x . y_true) - sum over noise words of log sigmoid(-x . y_noise)

Hierarchical softmax (2013a, section 3; 2013b, section 2.1) is an exact distribution at the cost of log N dot products.
The words are the leaves of a Huffman tree by their counts. y belongs to an inner node, and a prediction is a walk from
the root: at each node go left with probability sigmoid(x . y), else right. Frequent words have short paths:

    loss = -sum over the nodes of the word's path of log sigmoid(+-x . y_node)

Two more parts of the method: frequent words are dropped at random before windows are cut (subsampling, section 2.3),
and pairs such as "new york" can become one word (phrases, section 4). The learning rate falls linearly.

Workers update the shared arrays without locks (Hogwild, Niu et al. 2011). Updates are sparse, so collisions are rare;
one worker gives bit-equal runs. Noise words are drawn once per window: the expected gradient stays the same, and the
output vectors stay in the CPU cache.

W words of a chunk of text, N of the vocabulary, D dimensions of a vector, K noise words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# Sigmoid and softplus by linear interpolation in a table: error below 3e-6, constant outside [-8, 8].
TABLE_MAX, TABLE_POINTS = np.float32(8.0), 1024
_table_x = np.linspace(-TABLE_MAX, TABLE_MAX, TABLE_POINTS + 1)
SIGMOID_TABLE = (1 / (1 + np.exp(-_table_x))).astype(np.float32)
SOFTPLUS_TABLE = np.log1p(np.exp(_table_x)).astype(np.float32)
TABLE_STEPS_PER_UNIT = np.float32(TABLE_POINTS / (2 * TABLE_MAX))
ZERO, ONE = np.float32(0), np.float32(1)


class AliasTable(NamedTuple):
    """A distribution that is sampled in O(1): draw a slot, then take its own word or its alias (Walker 1977)."""

    accept_prob: np.ndarray  # (N,) probability of the slot's own word
    alias: np.ndarray  # (N,) the slot's other word


class HuffmanTree(NamedTuple):
    """The path of every word from the root of a binary tree. The path of word n is `start[n]` to `start[n + 1]`.

    Inner nodes are numbered from 0, the root last. P: the lengths of all paths.
    """

    start: np.ndarray  # (N + 1,)
    node: np.ndarray  # (P,) inner nodes, root first
    code: np.ndarray  # (P,) +1: the path goes left there, -1: right

    def mean_path_length(self, counts_N: np.ndarray) -> float:
        """Return the mean number of nodes that predict a word of the text."""
        return float(np.average(np.diff(self.start), weights=counts_N))


NO_TREE = HuffmanTree(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))


def build_huffman_tree(counts_N: np.ndarray) -> HuffmanTree:
    """Return the Huffman tree of the words by their counts; words with count 0 are not in it."""
    order = np.argsort(counts_N, kind="stable")
    order = order[counts_N[order] > 0]
    parent, is_right = _huffman_parents(counts_N[order].astype(np.int64))
    length_N = np.zeros(len(counts_N), np.int64)
    length_N[order] = _path_lengths(parent)[: len(order)]
    start = np.concatenate([[0], np.cumsum(length_N)])
    node, code = np.empty(start[-1], np.int32), np.empty(start[-1], np.float32)
    _write_paths(parent, is_right, order, start, node, code)
    return HuffmanTree(start, node, code)


@njit(cache=True)
def _huffman_parents(counts_M):
    """Return parent and side (right or left) of each leaf and inner node, for ascending counts of M leaves.

    Inner nodes M, M + 1, ... are made in ascending order of their counts, so the two smallest nodes are each at the
    front of one of two queues (van Leeuwen 1976). The root is the last node, its own parent.
    """
    num = len(counts_M)
    count = np.concatenate((counts_M, np.zeros(max(num - 1, 0), np.int64)))
    parent, is_right = np.zeros(len(count), np.int64), np.zeros(len(count), np.bool_)
    leaf, inner = 0, num
    for new in range(num, len(count)):
        for side in range(2):
            if leaf < num and (inner >= new or count[leaf] <= count[inner]):
                child, leaf = leaf, leaf + 1
            else:
                child, inner = inner, inner + 1
            parent[child], is_right[child] = new, side == 1
            count[new] += count[child]
    if len(count):
        parent[-1] = len(count) - 1
    return parent, is_right


@njit(cache=True)
def _path_lengths(parent):
    length = np.zeros(len(parent), np.int64)
    for child in range(len(parent) - 2, -1, -1):  # parents come after their children
        length[child] = length[parent[child]] + 1
    return length


@njit(cache=True)
def _write_paths(parent, is_right, words_M, start, node, code):
    """Write inner nodes and codes of each word's path, root first."""
    for leaf in range(len(words_M)):
        child = leaf
        for p in range(start[words_M[leaf] + 1] - 1, start[words_M[leaf]] - 1, -1):
            node[p], code[p] = parent[child] - len(words_M), -1 if is_right[child] else 1
            child = parent[child]


def noise_distribution(counts_N: np.ndarray, exponent: float) -> np.ndarray:
    """(N,) noise probabilities, count^exponent normalised (Mikolov et al. 2013b, section 2.2); 0 for unseen words."""
    share_N = np.where(counts_N > 0, np.maximum(counts_N, 1).astype(np.float64) ** exponent, 0.0)
    return share_N / share_N.sum()


def build_alias_table(counts_N: np.ndarray, exponent: float = 0.75) -> AliasTable:
    """Return the alias table of the noise distribution."""
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
    """(N,) probability of keeping an occurrence of each word, by word2vec's code; `sample` 0 keeps all."""
    threshold = sample * counts_N.sum()
    if not sample:
        return (counts_N > 0).astype(np.float32)
    counts = np.maximum(counts_N, 1)
    return np.where(counts_N > 0, np.minimum((np.sqrt(counts / threshold) + 1) * threshold / counts, 1), 0).astype(
        np.float32
    )


def init_word_vectors(num_words: int, dim: int, seed: int) -> np.ndarray:
    """(N, D) input vectors, uniform in [-1/D, 1/D]; output vectors start at 0."""
    draw = np.random.default_rng(seed)
    return (draw.random((num_words, dim), dtype=np.float32) * 2 - 1) / np.float32(dim)


# --- training on the CPU, lock-free ---------------------------------------------------------------------------------


@njit(inline="always")
def _splitmix64(state):
    """Return 64 random bits (splitmix64, Steele, Lea, Flood 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    x = state[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(inline="always")
def _sample_alias(state, accept_prob, alias):
    """Sample a word from an AliasTable: the upper bits choose the slot, the lower ones word or alias."""
    x = _splitmix64(state)
    slot = ((x >> np.uint64(32)) * np.uint64(len(accept_prob))) >> np.uint64(32)
    return (
        np.int64(slot) if np.float32(x & np.uint64(0xFFFFFF)) / np.float32(2**24) < accept_prob[slot] else alias[slot]
    )


@njit(inline="always")
def _interpolate(table, x):
    y = (min(max(x, -TABLE_MAX), TABLE_MAX) + TABLE_MAX) * TABLE_STEPS_PER_UNIT
    k = min(int(y), TABLE_POINTS - 1)
    return table[k] + (y - np.float32(k)) * (table[k + 1] - table[k])


@njit(inline="always", fastmath=True)
def _negative_sampling_step(x_D, error_D, outputs_ND, chosen_K, num, gradient_K, learning_rate):
    """One prediction with negative sampling: the first chosen word is the target, the others are noise.

    Updates the output vectors in place, writes the update of x to `error_D`, and returns the loss.
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
    """One prediction by the softmax over the whole vocabulary; arguments as in `_negative_sampling_step`."""
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


@njit(inline="always", fastmath=True)
def _hierarchical_softmax_step(x_D, error_D, outputs_ND, node_P, code_P, learning_rate):
    """One prediction by the path of a word (Huffman tree); arguments as in `_negative_sampling_step`."""
    loss = ZERO
    error_D[:] = ZERO
    for p in range(len(node_P)):
        node, code, score = node_P[p], code_P[p], ZERO
        for d in range(len(x_D)):
            score += x_D[d] * outputs_ND[node, d]
        loss += _interpolate(SOFTPLUS_TABLE, -code * score)
        g = learning_rate * code * _interpolate(SIGMOID_TABLE, -code * score)
        for d in range(len(x_D)):
            output = outputs_ND[node, d]
            error_D[d] += g * output
            outputs_ND[node, d] = output + g * x_D[d]
    return loss


@njit(inline="always")
def _write_context(words_W, doc_W, i, size, around):
    """Write the words at most `size` positions from word i, in its document, to `around`; return their number."""
    num = 0
    for j in range(max(0, i - size), min(len(words_W), i + size + 1)):
        if j != i and doc_W[j] == doc_W[i]:
            around[num] = words_W[j]
            num += 1
    return num


@njit(inline="always")
def _draw_noise(state, noise_table, chosen_K):
    """Write noise words behind the target in `chosen_K`; return the number of both. The target is never noise."""
    drawn = 1
    for _ in range(len(chosen_K) - 1):
        other = _sample_alias(state, noise_table.accept_prob, noise_table.alias)
        if other != chosen_K[0]:
            chosen_K[drawn] = other
            drawn += 1
    return drawn


@njit(nogil=True, fastmath=True, cache=True)
def train_word2vec(
    words_W, doc_W, inputs_ND, outputs_ND, window, skip_gram, negative, learning_rate, noise_table, tree, seed
):
    """Train on a chunk of text, in place; return the sum of the losses and the number of predictions.

    Windows end at document boundaries. In CBOW each context word gets the whole gradient of the mean, as in the
    original code. `negative` 0 uses the hierarchical softmax of the tree, or the full softmax if that is `NO_TREE`.
    """
    dim = inputs_ND.shape[1]
    state = np.empty(1, np.uint64)
    state[0] = seed
    x_D, error_D = np.empty(dim, np.float32), np.empty(dim, np.float32)
    around = np.empty(2 * window, np.int64)
    chosen_K, gradient_K = np.empty(negative + 1, np.int64), np.empty(negative + 1, np.float32)
    score_N = np.empty(1 if negative or len(tree.start) else len(outputs_ND), np.float32)
    node_P, code_P = tree.node, tree.code
    total, guesses = 0.0, 0
    for i in range(len(words_W)):
        size = window - np.int64(_splitmix64(state) % np.uint64(window))
        num = _write_context(words_W, doc_W, i, size, around)
        if num == 0:
            continue
        word = np.int64(words_W[i])
        if len(tree.start):
            begin, end = tree.start[word], tree.start[word + 1]
            node_P, code_P = tree.node[begin:end], tree.code[begin:end]
        chosen_K[0] = word
        drawn = _draw_noise(state, noise_table, chosen_K)
        if skip_gram:
            for c in range(num):
                context = around[c]
                for d in range(dim):
                    x_D[d] = inputs_ND[context, d]
                if negative:  # written twice: one inlined function of the three made skip-gram 20 to 35% slower
                    total += _negative_sampling_step(
                        x_D, error_D, outputs_ND, chosen_K, drawn, gradient_K, learning_rate
                    )
                elif len(tree.start):
                    total += _hierarchical_softmax_step(x_D, error_D, outputs_ND, node_P, code_P, learning_rate)
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
            elif len(tree.start):
                total += _hierarchical_softmax_step(x_D, error_D, outputs_ND, node_P, code_P, learning_rate)
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
    """Score word pairs: (n(ab) - min_count) / (n(a) n(b)) * scale (Mikolov et al. 2013b, equation 6).

    `scale` is gensim's: the number of distinct words and pairs. It makes one threshold fit texts of any size.
    """
    return (pair_count - min_count) / (first.astype(np.float64) * second) * scale


@njit(nogil=True, cache=True)
def merge_phrases(words_W, doc_W, keys, phrases, num_words, out_W):
    """Join phrases from left to right into `out_W`; return the number of words and each one's index in `words_W`.

    `keys` are the sorted phrases as first * num_words + second, `phrases` their word ids.
    """
    i = num = 0
    index_W = np.empty(len(words_W), np.int64)
    while i < len(words_W):
        word, step = np.int64(words_W[i]), 1
        if i + 1 < len(words_W) and word >= 0 and words_W[i + 1] >= 0 and doc_W[i] == doc_W[i + 1]:
            key = word * num_words + words_W[i + 1]
            k = np.searchsorted(keys, key)
            if k < len(keys) and keys[k] == key:
                word, step = np.int64(phrases[k]), 2
        out_W[num] = word
        index_W[num] = i
        num, i = num + 1, i + step
    return num, index_W
