"""Loops of Unigram training, compiled by numba: lattices of words, and strings that repeat.

A node of the lattice is a position in the text, an edge an occurrence of a piece. `degree_N` says how many edges leave
each node; `piece_E` has their pieces, sorted by node and then by length. An edge leads as many nodes ahead as its piece
has characters. A path from the first node of a word to its end is a segmentation.

The loops add in one order, in one thread: the sums are the same in every run.

Shapes: N characters (and nodes), W words, E edges, P pieces, G strings of one length, S their occurrences.
"""

from __future__ import annotations

import numpy as np
from numba import njit


def compiled(loop):
    """Compile a function when it is first called; keep the machine code on disk, where a folder for it is writable."""
    try:
        return njit(nogil=True, cache=True)(loop)
    except RuntimeError:  # numba found no such folder
        return njit(nogil=True)(loop)


# --- lattices -----------------------------------------------------------------------------------------------------


@compiled
def sum_expected_counts(degree_N, piece_E, length_P, p_P, count_N, end_W):
    """Return the expected count of each piece (P,) over all segmentations, by forward-backward.

    alpha[i] sums the probabilities of all paths from the word's first node to node i, beta[i] those from i to its end.
    Beta begins with count over likelihood instead of 1, so alpha times p times beta is an expected count.
    """
    expected_P = np.zeros(len(p_P))
    longest = longest_word(end_W)
    alpha, beta = np.zeros(longest + 1), np.zeros(longest + 1)
    begin = edge = 0
    for end in end_W:
        n = end - begin
        alpha[: n + 1] = 0.0
        alpha[0] = 1.0
        for i in range(n):
            for _ in range(degree_N[begin + i]):
                alpha[i + length_P[piece_E[edge]]] += alpha[i] * p_P[piece_E[edge]]
                edge += 1
        beta[n] = count_N[end] / alpha[n]
        after = edge
        for i in range(n - 1, -1, -1):
            first = after - degree_N[begin + i]
            beta[i] = 0.0
            for e in range(first, after):
                flow = p_P[piece_E[e]] * beta[i + length_P[piece_E[e]]]
                expected_P[piece_E[e]] += alpha[i] * flow
                beta[i] += flow
            after = first
        begin = end + 1
    return expected_P


@compiled
def count_best_pieces(degree_N, piece_E, length_P, score_P, count_N, end_W):
    """Return how often each piece is on the best path of a word (P,)."""
    count_P = np.zeros(len(score_P))
    longest = longest_word(end_W)
    best, via = np.zeros(longest + 1), np.zeros(longest + 1, np.int32)
    begin = edge = 0
    for end in end_W:
        i = end - begin
        edge = find_best_path(degree_N, piece_E, length_P, score_P, begin, edge, i, -1, best, via)
        while i > 0:
            count_P[via[i]] += count_N[end]
            i -= length_P[via[i]]
        begin = end + 1
    return count_P


@compiled
def sum_pruning_losses(degree_N, piece_E, first_edge_P, offset_P, length_P, score_P, count_P):
    """Return the log-likelihood (P,) that the words lose if a piece is replaced by the best path of other pieces.

    A piece that is counted n times adds n to the count of each of its m substitutes, and n (m - 1) to the total.
    """
    loss_P = np.zeros(len(score_P))
    total = count_P.sum()
    longest = length_P.max() if len(length_P) else 0
    best, via = np.zeros(longest + 1), np.zeros(longest + 1, np.int32)
    for piece in range(len(score_P)):
        i, count = length_P[piece], count_P[piece]
        if i == 1 or count == 0:
            continue
        begin, edge = offset_P[piece], first_edge_P[piece]
        find_best_path(degree_N, piece_E, length_P, score_P, begin, edge, i, piece, best, via)
        num, log_p = 0, 0.0
        while i > 0:
            log_p += np.log(count_P[via[i]] + count)
            num += 1
            i -= length_P[via[i]]
        log_p -= num * np.log(total + count * (num - 1))
        loss_P[piece] = count * (np.log(count / total) - log_p)
    return loss_P


@compiled
def find_best_path(degree_N, piece_E, length_P, score_P, begin, edge, n, without, best, via):
    """Write the score of the best path to each of n + 1 nodes, and its last piece (Viterbi); ties go to the shorter.

    `edge` is the first edge of the first node; return the edge after the last one.
    """
    best[: n + 1] = -np.inf
    best[0] = 0.0
    for i in range(n):
        for _ in range(degree_N[begin + i]):
            piece = piece_E[edge]
            edge += 1
            j = i + length_P[piece]
            if j <= n and piece != without and best[i] + score_P[piece] >= best[j]:
                best[j] = best[i] + score_P[piece]
                via[j] = piece
    return edge


@compiled
def longest_word(end_W):
    longest, begin = 0, 0
    for end in end_W:
        longest = max(longest, end - begin)
        begin = end + 1
    return longest


@compiled
def renumber_edges(degree_N, piece_E, number_P):
    """Give the pieces new numbers; edges of a piece with number -1 go away."""
    new_degree_N, new_piece_E = np.empty_like(degree_N), np.empty_like(piece_E)
    edge = num = 0
    for i in range(len(degree_N)):
        before = num
        for _ in range(degree_N[i]):
            number = number_P[piece_E[edge]]
            new_piece_E[num] = number  # if it is -1, the next one overwrites it: faster than a branch
            num += number >= 0
            edge += 1
        new_degree_N[i] = num - before
    return new_degree_N, new_piece_E[:num]


@compiled
def add_edges(next_N, piece_E, start_S, piece_S):
    """Write the edges of pieces of one length; `next_N` says where a node's next edge goes."""
    for s in range(len(start_S)):
        piece_E[next_N[start_S[s]]] = piece_S[s]
        next_N[start_S[s]] += 1


# --- strings that repeat ------------------------------------------------------------------------------------------


@compiled
def extend_strings(start_S, string_S, length, letter_N, num_letters, count_N, min_count):
    """Sort the occurrences of strings of one length by their next character: the strings that are one longer.

    This is a step of a radix sort, most significant character first. `start_S` is sorted by string. Return starts and
    strings of the longer ones, sorted in the same way, their counts, and by string the largest count of a longer one.
    Strings of a count below `min_count` are left out.
    """
    new_start_S, new_string_S = np.empty_like(start_S), np.empty_like(string_S)
    count_G = np.empty(len(start_S))
    max_G = np.zeros(string_S[-1] + 1 if len(string_S) else 0)
    tally, weight = np.zeros(num_letters, np.int64), np.zeros(num_letters)
    found, place = np.empty(num_letters, np.int64), np.empty(num_letters, np.int64)
    num = num_strings = a = 0
    while a < len(start_S):
        b = a
        num_found = 0
        while b < len(start_S) and string_S[b] == string_S[a]:
            letter = letter_N[start_S[b] + length]
            if letter > 0:
                if tally[letter] == 0:
                    found[num_found] = letter
                    num_found += 1
                tally[letter] += 1
                weight[letter] += count_N[start_S[b]]
            b += 1
        if num_found > 1:
            found[:num_found].sort()
        for letter in found[:num_found]:
            place[letter] = -1
            if weight[letter] >= min_count:
                place[letter] = num
                max_G[string_S[a]] = max(max_G[string_S[a]], weight[letter])
                new_string_S[num : num + tally[letter]] = num_strings
                count_G[num_strings] = weight[letter]
                num_strings += 1
                num += tally[letter]
        for s in range(a, b):
            letter = letter_N[start_S[s] + length]
            if letter > 0 and place[letter] >= 0:
                new_start_S[place[letter]] = start_S[s]
                place[letter] += 1
        for letter in found[:num_found]:
            tally[letter], weight[letter] = 0, 0.0
        a = b
    return new_start_S[:num].copy(), new_string_S[:num].copy(), count_G[:num_strings].copy(), max_G


@compiled
def raise_to_left_extensions(max_G, start_S, string_S, longer_start_S, longer_string_S, longer_count_G, num_nodes):
    """Raise the largest count of a longer string to those that begin one character before the string."""
    string_N = np.full(num_nodes, -1, np.int32)
    for s in range(len(start_S)):
        string_N[start_S[s]] = string_S[s]
    last = -1
    for s in range(len(longer_start_S)):
        if longer_string_S[s] != last:
            last = longer_string_S[s]
            inner = string_N[longer_start_S[s] + 1]
            max_G[inner] = max(max_G[inner], longer_count_G[last])
