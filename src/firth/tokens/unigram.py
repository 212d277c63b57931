"""Learn the pieces of a Unigram tokenizer (Kudo, 2018) from counted words.

All words lie one after the other in one array, each with a 0 behind it. A node is a place between characters, an
edge an occurrence of a piece: it leads from the node before its first character to the node behind its last. The ways
of reading a word are the paths through its edges. Edges are found once; then whole arrays are added up, node after
node of all words together, and the sums are the same in every run.

Shapes: N characters (and nodes), E edges, P pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

MAX_PIECE = 16  # characters; this and the next three are those of SentencePiece
MAX_SEEDS = 1_000_000
SHRINK = 0.75  # the share of the pieces that one round keeps
LEAST = 0.5  # a piece that is expected less often than this is dropped
MAX_WORD = 32  # a longer word is learned from in parts
NATS = 5.0  # about what a character costs; taken off on every path alike, so that products of numbers stay in range
BLOCK = 1 << 16


class Edges(NamedTuple):
    """Edges in such an order that those of one `step` are neighbours, and among them those that meet in one node."""

    starts: np.ndarray
    ends: np.ndarray
    pieces: np.ndarray

    def take(self, which: np.ndarray) -> Edges:
        return Edges(*(array[which] for array in self))


class Words(NamedTuple):
    """Counted words as arrays: characters (0 behind each word), how often, and the place of each in its word."""

    text: str
    chars: np.ndarray
    counts: np.ndarray
    places: np.ndarray


class Pieces(NamedTuple):
    """Where each piece can be read in the text, how long it is, and the logarithm of its probability."""

    at: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray

    def take(self, which: np.ndarray) -> Pieces:
        return Pieces(*(array[which] for array in self))


class State(NamedTuple):
    """Pieces and their edges, once ordered by where they end and once by where they start."""

    pieces: Pieces
    by_end: Edges
    by_start: Edges

    def keep(self, keep_P: np.ndarray) -> State:
        number_P = np.cumsum(keep_P, dtype=np.int32) - 1
        edges = []
        for old in (self.by_end, self.by_start):
            kept = old.take(keep_P[old.pieces])
            edges.append(kept._replace(pieces=number_P[kept.pieces]))
        return State(self.pieces.take(keep_P), *edges)


def learn_pieces(
    counts: Mapping[str, int], alphabet: Collection[str], num_pieces: int, tell: Callable[[str], None] = lambda _: None
) -> list[tuple[str, float]]:
    """The `num_pieces` pieces that read the words best, or fewer where the words have no more, with their scores.

    All characters of the alphabet are among them. `tell` hears how many pieces are left after each round.
    """
    assert num_pieces >= len(set(alphabet)), "the characters must fit"
    words = lay_out(counts, alphabet)
    state = seeds(words)
    absent = sorted(set(alphabet) - set(map(chr, np.unique(words.chars))))
    room = num_pieces - len(absent)
    enough = room * 11 // 10
    while True:
        for _ in range(2):
            state = maximise(state, expect(state, words))
        tell(f"{len(state.pieces.at):,} pieces")
        if len(state.pieces.at) <= enough:
            break
        state = prune(state, words, max(enough, int(SHRINK * len(state.pieces.at))))
    state = prune(state, words, room)
    pieces = maximise(state, expect(state, words), drop=False).pieces
    found = [(words.text[i : i + n], s) for i, n, s in zip(*(array.tolist() for array in pieces), strict=True)]
    lowest = min((score for _, score in found), default=0.0)
    return sorted([*found, *((char, lowest) for char in absent)], key=lambda pair: (-pair[1], pair[0]))


def lay_out(counts: Mapping[str, int], alphabet: Collection[str]) -> Words:
    """Words in a fixed order, long ones in parts. What is not in the alphabet ends a word."""
    parts = [(word[i : i + MAX_WORD], counts[word]) for word in sorted(counts) for i in range(0, len(word), MAX_WORD)]
    text = "".join(f"{part}\0" for part, _ in parts)
    char_N = np.frombuffer(text.encode("utf-32-le"), np.uint32).copy()
    char_N[~np.isin(char_N, np.array([ord(c) for c in alphabet], np.uint32))] = 0
    node_N = np.arange(len(char_N), dtype=np.int32)
    ends = np.flatnonzero(char_N == 0)
    begin_N = np.repeat(np.append(0, ends[:-1] + 1), np.diff(ends, prepend=-1)) if len(ends) else node_N
    count_N = np.repeat([count for _, count in parts], [len(part) + 1 for part, _ in parts])
    return Words(text, char_N, count_N.astype(np.float64), (node_N - begin_N).astype(np.int32))


# --- the pieces to start from -------------------------------------------------------------------------------------


def seeds(words: Words) -> State:
    """All characters, and the strings that stand in the text twice or more and not always inside the same longer one.

    Those of the most characters in all are taken, MAX_SEEDS at most.
    """
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    occurrences, num = [], 0
    for length, (at, id_, first, count, alone) in enumerate(repeats(words), start=1):
        number = np.full(len(first), -1)
        number[alone] = np.arange(alone.sum()) + num
        num += alone.sum()
        used = alone[id_]
        found.append((at[first[alone]], np.full(alone.sum(), length), count[alone]))
        start = at[used].astype(np.int32)
        occurrences.append((start, start + np.int32(length), number[id_[used]].astype(np.int32)))
    pieces = Pieces(*map(np.concatenate, zip(*found, strict=True)))
    edges = Edges(*map(np.concatenate, zip(*occurrences, strict=True)))
    by_end = edges.take(np.lexsort((edges.ends, words.places[edges.ends])))
    by_start = edges.take(np.lexsort((edges.starts, words.places[edges.starts])))
    worth_P = pieces.scores * pieces.lengths
    worth_P[pieces.lengths == 1] += worth_P.max(initial=0)  # characters stay
    best = np.argsort(-worth_P, kind="stable")[: max(MAX_SEEDS, int((pieces.lengths == 1).sum()))]
    keep_P = np.zeros(len(worth_P), dtype=bool)
    keep_P[best] = True
    worth_P = pieces.scores * pieces.lengths
    scored = pieces._replace(scores=np.log(worth_P / worth_P[keep_P].sum()))
    return State(scored, by_end, by_start).keep(keep_P)


class Repeats(NamedTuple):
    """The strings of one length: where they stand, which is where, and for each: a place, the count, is it a seed."""

    at: np.ndarray
    id_: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    alone: np.ndarray


def repeats(words: Words) -> Iterator[Repeats]:
    """For each length the strings that occur twice; `alone` where no string one longer occurs as often around it."""
    letters, char_N = np.unique(words.chars, return_inverse=True)
    at = np.flatnonzero(words.chars)
    now = count_strings(at, char_N[at], words.counts)
    for length in range(1, MAX_PIECE + 1):
        longer = at = now.at
        if length < MAX_PIECE:
            goes_on = words.chars[at + length] > 0
            longer = at[goes_on]
            keys = now.id_[goes_on].astype(np.int64) * len(letters) + char_N[longer + length]
            following = count_strings(longer, keys, words.counts, least=2)
            id_N = np.full(len(char_N), -1, dtype=np.int32)
            id_N[at] = now.id_
            most = np.zeros(len(now.first))
            for shift in (0, 1):
                np.maximum.at(most, id_N[following.at[following.first] + shift], following.counts)
            alone = now.counts > most if length > 1 else now.alone
            yield now._replace(alone=alone)
            now = following
        else:
            yield now


def count_strings(at: np.ndarray, key: np.ndarray, count_N: np.ndarray, least: int = 0) -> Repeats:
    """Number the strings with these keys, and leave out those that are too rare."""
    _, first, id_ = np.unique(key, return_index=True, return_inverse=True)
    count = np.bincount(id_, weights=count_N[at], minlength=len(first))
    often = count >= least
    kept = often[id_]
    number = np.cumsum(often, dtype=np.int32) - 1
    moved = np.cumsum(kept) - 1
    return Repeats(
        at[kept], number[id_[kept]], moved[first[often]], count[often], np.ones(int(often.sum()), dtype=bool)
    )


# --- rounds -------------------------------------------------------------------------------------------------------


def steps(edges: Edges, node_E: np.ndarray, place_N: np.ndarray) -> list[tuple[slice, np.ndarray]]:
    """The edges step by step, and where in each step the edges of the next node begin."""
    place_E = place_N[node_E]
    bounds = np.searchsorted(place_E, np.arange(MAX_WORD + 2))
    found = []
    for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if a < b:
            found.append((slice(a, b), np.flatnonzero(np.diff(node_E[a:b], prepend=-1))))
    return found


def expect(state: State, words: Words) -> np.ndarray:
    """(P,): how often each piece is expected in the words, over all ways of reading them."""
    pieces, ahead, back = state
    p_P = np.exp(pieces.scores + NATS * pieces.lengths)
    alpha_N = np.ones(len(words.chars))
    for part, heads in steps(ahead, ahead.ends, words.places):
        flow = alpha_N[ahead.starts[part]] * p_P[ahead.pieces[part]]
        alpha_N[ahead.ends[part][heads]] = np.add.reduceat(flow, heads)
    ends = np.flatnonzero(words.chars == 0)
    beta_N = np.ones(len(words.chars))
    beta_N[ends] = words.counts[ends] / alpha_N[ends]  # so that the way back carries the count over the sum
    expected_P = np.zeros(len(p_P))
    for part, heads in reversed(steps(back, back.starts, words.places)):
        start, piece = back.starts[part], back.pieces[part]
        flow = p_P[piece] * beta_N[back.ends[part]]
        beta_N[start[heads]] = np.add.reduceat(flow, heads)
        expected_P += np.bincount(piece, weights=alpha_N[start] * flow, minlength=len(p_P))
    return expected_P


def maximise(state: State, expected_P: np.ndarray, drop: bool = True) -> State:
    """Scores from the expected counts; digamma in place of the logarithm favours few pieces (Liang and Klein, 2007)."""
    from scipy.special import digamma  # slow to import, and needed by no one who only tokenises

    if drop:
        keep_P = (expected_P >= LEAST) | (state.pieces.lengths == 1)
        state, expected_P = state.keep(keep_P), expected_P[keep_P]
    expected_P = np.maximum(expected_P, LEAST)
    score_P = digamma(expected_P) - digamma(expected_P.sum())
    return state._replace(pieces=state.pieces._replace(scores=score_P))


def prune(state: State, words: Words, size: int) -> State:
    """Keep the characters and, of the others, those whose loss would cost the text most."""
    pieces = state.pieces
    if len(pieces.at) <= size:
        return state
    used = best_paths(state.by_end, pieces.scores, np.flatnonzero(words.chars == 0), words.places)
    freq_P = np.bincount(used.pieces, weights=words.counts[used.starts], minlength=len(pieces.at))
    loss_P = loss(state, words, freq_P)
    loss_P[pieces.lengths == 1] = np.inf
    keep_P = np.zeros(len(loss_P), dtype=bool)
    keep_P[np.argsort(-loss_P, kind="stable")[: max(size, int((pieces.lengths == 1).sum()))]] = True
    return state.keep(keep_P)


def best_paths(edges: Edges, score_P: np.ndarray, ends: np.ndarray, place_N: np.ndarray) -> Edges:
    """The edges of the best path to each end; of equally good ones, those that come first."""
    best_N, via_N = np.zeros(len(place_N)), np.full(len(place_N), -1)
    for part, heads in steps(edges, edges.ends, place_N):
        value = best_N[edges.starts[part]] + score_P[edges.pieces[part]]
        top = np.maximum.reduceat(value, heads)
        group = np.repeat(np.arange(len(heads)), np.diff(heads, append=len(value)))
        winners = np.flatnonzero(value == top[group])
        winners = winners[np.diff(group[winners], prepend=-1) > 0]
        node = edges.ends[part][heads]
        best_N[node], via_N[node] = top, part.start + winners
    found, node = [], ends
    while len(node := node[via_N[node] >= 0]):
        found.append(via_N[node])
        node = edges.starts[via_N[node]]
    return edges.take(np.concatenate([np.zeros(0, dtype=np.int64), *found]))


def loss(state: State, words: Words, freq_P: np.ndarray) -> np.ndarray:
    """(P,): what the text would cost more, in nats, if a piece were read as the next best pieces in its place."""
    pieces, total = state.pieces, freq_P.sum()
    edges = state.by_start.take(np.argsort(state.by_start.starts, kind="stable"))
    first_N = np.searchsorted(edges.starts, np.arange(len(words.chars) + 1))
    loss_P = np.zeros(len(freq_P))
    asked = np.flatnonzero((pieces.lengths > 1) & (freq_P > 0))
    for block in (asked[i : i + BLOCK] for i in range(0, len(asked), BLOCK)):
        owner, piece = next_best(pieces, edges, first_N, block)
        num = np.bincount(owner, minlength=len(block))
        freq = freq_P[block]
        log_alt = np.bincount(owner, weights=np.log(freq_P[piece] + freq[owner]), minlength=len(block))
        log_alt -= num * np.log(total + freq * (num - 1))
        loss_P[block] = freq * (np.log(freq / total) - log_alt)
    return loss_P


def next_best(pieces: Pieces, edges: Edges, first_N: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best way to read each piece of a block without itself: which of the block, and a piece that it is read as."""
    length = pieces.lengths[block]
    offset = np.cumsum(length + 1) - (length + 1)
    owner_n, place_n = ranges(np.zeros_like(length), length + 1)
    inside = place_n < length[owner_n]
    start_n = (pieces.at[block][owner_n] + place_n)[inside]
    from_n, edge = ranges(first_N[start_n], first_N[start_n + 1])
    owner, start = owner_n[inside][from_n], start_n[from_n]
    shift = offset[owner] - pieces.at[block][owner]
    end = edges.ends[edge]
    fits = (end + shift <= offset[owner] + length[owner]) & (edges.pieces[edge] != block[owner])
    small = Edges((start + shift)[fits], (end + shift)[fits], edges.pieces[edge][fits])
    small = small.take(np.lexsort((small.ends, place_n[small.ends])))
    path = best_paths(small, pieces.scores, offset + length, place_n)
    return owner_n[path.starts], path.pieces


def ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of many ranges, and which range each is from."""
    size = stop - start
    which = np.repeat(np.arange(len(size)), size)
    return which, np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size) + start[which]
