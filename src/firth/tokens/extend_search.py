"""Search the tokens that save the most tokens on counted words; `extend.py` is the way in.

Both searches are greedy, with lazy recounting: a heap holds what each candidate saved when it was last counted. The
best one is counted again, since tokens that were taken in between have shortened its words. If it is still the best, it
is taken, else it goes back into the heap with its new count.

- `search_prefixes` (WordPiece, Unigram): a candidate is any beginning of a word. The words that begin with it lie
  together in sorted order, so counting is a sum over a slice of arrays.
- `search_merges` (BPE): a candidate joins the first two tokens of a word, or looks up a whole word.
"""

# Shapes: W words in sorted order; N entries of all words, one for each of the L = 0 ... length characters of a prefix.

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

MIN_WORD_START_SHARE = 0.5  # share of a merge's occurrences that must begin a word
LENGTH_WEIGHT = 1e-7  # nats per character: of two Unigram paths that score alike, the longer new piece wins
NEVER = -np.inf  # strength of a prefix that the tokenizer does not take


class FoundToken(NamedTuple):
    """A token, and for BPE the two tokens that it joins."""

    token: str
    merge: tuple[str, str] | None = None


# --- WordPiece and Unigram: beginnings of words ---------------------------------------------------------------------


@dataclass
class PrefixTable:
    """What each beginning of each word would cost as a token."""

    words: list[str]  # sorted
    counts: np.ndarray  # (W,)
    offsets: np.ndarray  # (W,) entry of the empty prefix
    rest_costs: np.ndarray  # (N,) tokens after the prefix
    strengths: np.ndarray  # (N,) of two prefixes that are tokens, the tokenizer takes the stronger one
    costs: np.ndarray  # (W,) tokens of the word now
    first_strengths: np.ndarray  # (W,) strength of its first token now

    def savings(self, length: int, rows: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that a prefix of `length` saves in each word, and which words would use it."""
        entry = self.offsets[rows] + length
        uses = self.strengths[entry] > self.first_strengths[rows]
        return np.where(uses, self.counts[rows] * (self.costs[rows] - 1 - self.rest_costs[entry]), 0), uses

    def take(self, length: int, rows: slice) -> None:
        """Make a prefix the first token of all words that would use it."""
        _, uses = self.savings(length, rows)
        changed = np.flatnonzero(uses) + rows.start
        entry = self.offsets[changed] + length
        self.costs[changed] = 1 + self.rest_costs[entry]
        self.first_strengths[changed] = self.strengths[entry]


def search_prefixes(
    table: PrefixTable, is_candidate: Callable[[str], bool], max_new: int, min_count: int
) -> list[FoundToken]:
    """Return the word beginnings that save most, in the order in which they are taken."""
    heap = [(-saved, word[:length], rows) for saved, word, length, rows in prefix_candidates(table, min_count)]
    heapq.heapify(heap)
    found: list[FoundToken] = []
    while heap and len(found) < max_new:
        negative, token, (start, stop) = heapq.heappop(heap)
        rows = slice(start, stop)
        saved_W, uses_W = table.savings(len(token), rows)
        saved = int(saved_W.sum())
        if saved <= 0 or table.counts[rows][uses_W].sum() < min_count:
            continue
        if saved < -negative:
            heapq.heappush(heap, (-saved, token, (start, stop)))
        elif is_candidate(token):
            table.take(len(token), rows)
            found.append(FoundToken(token))
    return found


def prefix_candidates(table: PrefixTable, min_count: int) -> list[tuple[int, str, int, tuple[int, int]]]:
    """Return saved tokens, a word, length and rows of every beginning of words that is frequent and saves tokens."""
    length_W = np.array([len(word) for word in table.words])
    shared_W = np.array([0, *(shared_prefix_length(a, b) for a, b in pairwise(table.words))])
    candidates = []
    for length in range(2, int(length_W.max(initial=0)) + 1):
        row_n = np.flatnonzero(length_W >= length)
        head_m = np.flatnonzero(shared_W[row_n] < length)  # a word whose neighbour begins in another way
        saved_n, uses_n = table.savings(length, row_n)
        saved_m = np.add.reduceat(saved_n, head_m)
        count_m = np.add.reduceat(np.where(uses_n, table.counts[row_n], 0), head_m)
        end_m = np.append(row_n[head_m[1:] - 1], row_n[-1]) + 1
        for m in np.flatnonzero((saved_m > 0) & (count_m >= min_count)).tolist():
            start = int(row_n[head_m[m]])
            candidates.append((int(saved_m[m]), table.words[start], length, (start, int(end_m[m]))))
    return candidates


def shared_prefix_length(a: str, b: str) -> int:
    """
    >>> shared_prefix_length("kitabu", "kitanda")
    4
    """
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def wordpiece_prefix_table(
    words: Mapping[str, int], vocab: Mapping[str, int], continuing_prefix: str, max_word_chars: int
) -> PrefixTable:
    """Return the costs under WordPiece, which takes the longest token at each position.

    An unknown word costs as many tokens as it has characters: as a whole it is lost.
    """
    max_piece = max(map(len, vocab))
    unknown = 10**6  # more tokens than any word has
    tail_costs: dict[str, int] = {"": 0}

    def cost_tail(tail: str) -> int:
        """Return the number of tokens of the end of a word."""
        todo = [tail]
        while todo:
            top = todo[-1]
            end = next((e for e in range(min(len(top), max_piece), 0, -1) if continuing_prefix + top[:e] in vocab), 0)
            if top in tail_costs:
                todo.pop()
            elif not end:
                tail_costs[top] = unknown
            elif top[end:] in tail_costs:
                tail_costs[top] = min(1 + tail_costs[top[end:]], unknown)
            else:
                todo.append(top[end:])
        return tail_costs[tail]

    def costs(word: str) -> tuple[list[int], list[float], int, float]:
        n = len(word)
        rest = [cost_tail(word[i:]) if i else unknown for i in range(n + 1)]
        rest = [cost if cost < unknown else n - 1 for cost in rest]
        first = next((e for e in range(min(n, max_piece), 0, -1) if word[:e] in vocab), 0)
        is_long = n > max_word_chars  # always unknown
        return rest, [NEVER if is_long or i == 0 else float(i) for i in range(n + 1)], 1 + rest[first], float(first)

    return build_prefix_table(words, costs)


def unigram_prefix_table(
    words: Mapping[str, int], scores: Mapping[str, float], unknown_score: float, floor: float
) -> PrefixTable:
    """Return the costs under Unigram, which takes the path with the highest sum of scores.

    The score of a new piece is that of its own best path, but not below `floor`.
    """
    max_piece = max(map(len, scores))
    heads: dict[str, float] = {"": 0.0}
    tails: dict[str, tuple[float, int]] = {"": (0.0, 0)}

    def piece_score(piece: str) -> float:
        return scores.get(piece, unknown_score if len(piece) == 1 else NEVER)

    def costs(word: str) -> tuple[list[int], list[float], int, float]:
        n = len(word)
        for end in range(1, n + 1):
            if word[:end] not in heads:
                starts = range(max(0, end - max_piece), end)
                heads[word[:end]] = max(heads[word[:i]] + piece_score(word[i:end]) for i in starts)
        for i in range(n - 1, -1, -1):
            if word[i:] not in tails:
                paths = ((piece_score(word[i:e]), tails[word[e:]]) for e in range(i + 1, min(n, i + max_piece) + 1))
                tails[word[i:]] = max((score + tail[0], 1 + tail[1]) for score, tail in paths)
        strength = [max(heads[word[:i]], floor) + tails[word[i:]][0] + LENGTH_WEIGHT * i for i in range(n + 1)]
        best, cost = tails[word]
        return [tails[word[i:]][1] for i in range(n + 1)], [NEVER, *strength[1:]], cost, best

    return build_prefix_table(words, costs)


def build_prefix_table(
    words: Mapping[str, int], costs: Callable[[str], tuple[list[int], list[float], int, float]]
) -> PrefixTable:
    """Return the table from a function that returns, for one word, the costs and strengths of its prefixes."""
    ordered = sorted(words)
    rows = [costs(word) for word in ordered]
    sizes = np.array([len(rest) for rest, *_ in rows], dtype=np.int64)
    return PrefixTable(
        words=ordered,
        counts=np.array([words[word] for word in ordered], dtype=np.int64),
        offsets=np.cumsum(sizes) - sizes,
        rest_costs=np.array([cost for rest, *_ in rows for cost in rest], dtype=np.int64),
        strengths=np.array([s for _, strengths, *_ in rows for s in strengths], dtype=np.float64),
        costs=np.array([cost for *_, cost, _ in rows], dtype=np.int64),
        first_strengths=np.array([strength for *_, strength in rows], dtype=np.float64),
    )


# --- BPE: merges and whole words ------------------------------------------------------------------------------------


class BpeWords(NamedTuple):
    """Counted words and their tokens. None is a token that cannot be joined, as an unknown one."""

    counts: Mapping[str, int]
    pieces: dict[str, list[str | None]]  # changed by the search
    continuing_prefix: str  # of a token inside of a word, dropped when it is joined to the one before; usually ""
    can_look_up: bool  # whether a whole word can be a token without a merge


@dataclass
class MergeSearch:
    """The state of `search_merges`: the candidates, and the words in which each pair of tokens occurs."""

    words: BpeWords
    is_candidate: Callable[[str], bool]
    min_count: int
    words_by_pair: dict[tuple[str | None, str | None], set[str]] = field(default_factory=lambda: defaultdict(set))
    heap: list[tuple[int, str, tuple[()] | tuple[str, str]]] = field(default_factory=list)  # (): look up the word
    taken: set[str] = field(default_factory=set)

    def push_all(self) -> None:
        """Make the first pair of each word a candidate, and each frequent word that can be looked up."""
        for word in self.words.counts:
            self.add_pairs(word)
        if self.words.can_look_up:
            for word, n in self.words.counts.items():
                if n >= self.min_count:
                    self.push(word, ())
        self.push_first_pairs(list(self.words.counts))

    def add_pairs(self, word: str) -> None:
        for pair in pairwise(self.words.pieces[word]):
            self.words_by_pair[pair].add(word)

    def push_first_pairs(self, changed: Sequence[str]) -> None:
        pieces = self.words.pieces
        pairs = dict.fromkeys(tuple(pieces[word][:2]) for word in changed if len(pieces[word]) > 1)
        for a, b in pairs:
            if a is not None and b is not None:
                self.push(a + b.removeprefix(self.words.continuing_prefix), (a, b))

    def push(self, token: str, pair: tuple[()] | tuple[str, str]) -> None:
        if (saved := self.saved_by(token, pair)) > 0 and self.is_candidate(token) and token not in self.taken:
            heapq.heappush(self.heap, (-saved, token, pair))

    def saved_by(self, token: str, pair: tuple[()] | tuple[str, str]) -> int:
        """Return the tokens that a candidate saves now; 0 if it is too rare or mostly inside of words."""
        if not pair:
            return self.words.counts[token] * (len(self.words.pieces[token]) - 1)
        total, starts = self.count_merge(pair)
        return total if total >= self.min_count and starts >= MIN_WORD_START_SHARE * total else 0

    def count_merge(self, pair: tuple[str, str]) -> tuple[int, int]:
        """Return the number of occurrences of a pair, and of those that begin a word."""
        total = starts = 0
        for word in self.words_by_pair[pair]:
            pieces, n = self.words.pieces[word], self.words.counts[word]
            total += n * count_pairs(pieces, pair)
            starts += n * (tuple(pieces[:2]) == pair)
        return total, starts

    def take(self, token: str, pair: tuple[()] | tuple[str, str]) -> None:
        """Write a candidate as one token in all words that have it; their new first pairs become candidates."""
        self.taken.add(token)
        pieces = self.words.pieces
        if not pair:
            pieces[token] = [token]
            return
        changed = [word for word in sorted(self.words_by_pair.pop(pair)) if count_pairs(pieces[word], pair)]
        for word in changed:
            pieces[word] = merge_pairs(pieces[word], pair, token)
            self.add_pairs(word)
        self.push_first_pairs(changed)


def search_merges(
    words: BpeWords, is_candidate: Callable[[str], bool], max_new: int, min_count: int
) -> list[FoundToken]:
    """Return the merges of word starts, and the whole words, that save most, in the order in which they are taken.

    A merge joins its pair wherever the two tokens meet, so all occurrences are counted. At least
    `MIN_WORD_START_SHARE` of them must begin a word: a merge inside of words would change many that are not new.
    """
    search = MergeSearch(words, is_candidate, min_count)
    search.push_all()
    found: list[FoundToken] = []
    while search.heap and len(found) < max_new:
        negative, token, pair = heapq.heappop(search.heap)
        saved = search.saved_by(token, pair)
        if saved <= 0 or token in search.taken:
            continue
        if saved < -negative:
            heapq.heappush(search.heap, (-saved, token, pair))
        else:
            search.take(token, pair)
            found.append(FoundToken(token, pair or None))
    return found


def count_pairs(pieces: Sequence[str | None], pair: tuple[str, str]) -> int:
    """Return how often BPE merges a pair, from left to right.

    >>> count_pairs(["a", "a", "a", "b"], ("a", "a")), count_pairs(["a", "b", "a", "b"], ("a", "b"))
    (1, 2)
    """
    count = i = 0
    while i + 1 < len(pieces):
        if pieces[i] == pair[0] and pieces[i + 1] == pair[1]:
            count, i = count + 1, i + 1
        i += 1
    return count


def merge_pairs(pieces: Sequence[str | None], pair: tuple[str, str], token: str) -> list[str | None]:
    """
    >>> merge_pairs(["a", "b", "c", "a", "b"], ("a", "b"), "ab")
    ['ab', 'c', 'ab']
    """
    merged: list[str | None] = []
    i = 0
    while i < len(pieces):
        is_pair = i + 1 < len(pieces) and pieces[i] == pair[0] and pieces[i + 1] == pair[1]
        merged.append(token if is_pair else pieces[i])
        i += 2 if is_pair else 1
    return merged
