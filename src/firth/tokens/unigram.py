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

MAX_PIECE_CHARS = 16  # characters; this and the next three are those of SentencePiece
MAX_SEED_PIECES = 1_000_000
SHRINKING_FACTOR = 0.75  # the share of the pieces that one round keeps
MIN_EXPECTED_COUNT = 0.5  # a piece that is expected less often than this is dropped
MAX_LATTICE_WORD_CHARS = 32  # a longer word is learned from in parts
NATS_PER_CHAR = (
    5.0  # about what a character costs; taken off on every path alike, so that products of numbers stay in range
)
PRUNE_BLOCK_PIECES = 1 << 16


class LatticeEdges(NamedTuple):
    """Edges in such an order that those of one `step` are neighbours, and among them those that meet in one node."""

    starts: np.ndarray
    ends: np.ndarray
    pieces: np.ndarray

    def take(self, which: np.ndarray) -> LatticeEdges:
        return LatticeEdges(*(array[which] for array in self))


class WordLattice(NamedTuple):
    """Counted words as arrays: characters (0 behind each word), how often, and the place of each in its word."""

    text: str
    chars: np.ndarray
    counts: np.ndarray
    positions: np.ndarray


class PieceTable(NamedTuple):
    """Where each piece can be read in the text, how long it is, and the logarithm of its probability."""

    text_offsets: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray

    def take(self, which: np.ndarray) -> PieceTable:
        return PieceTable(*(array[which] for array in self))


class UnigramState(NamedTuple):
    """Pieces and their edges, once ordered by where they end and once by where they start."""

    pieces: PieceTable
    by_end: LatticeEdges
    by_start: LatticeEdges

    def keep_pieces(self, keep_P: np.ndarray) -> UnigramState:
        number_P = np.cumsum(keep_P, dtype=np.int32) - 1
        edges = []
        for old in (self.by_end, self.by_start):
            kept = old.take(keep_P[old.pieces])
            edges.append(kept._replace(pieces=number_P[kept.pieces]))
        return UnigramState(self.pieces.take(keep_P), *edges)


def train_unigram_pieces(
    counts: Mapping[str, int],
    alphabet: Collection[str],
    num_pieces: int,
    report: Callable[[str], None] = lambda _: None,
) -> list[tuple[str, float]]:
    """The `num_pieces` pieces that read the words best, or fewer where the words have no more, with their scores.

    All characters of the alphabet are among them. `report` hears how many pieces are left after each round.
    """
    assert num_pieces >= len(set(alphabet)), "the characters must fit"
    words = build_word_lattice(counts, alphabet)
    state = find_seed_pieces(words)
    absent = sorted(set(alphabet) - set(map(chr, np.unique(words.chars))))
    room = num_pieces - len(absent)
    enough = room * 11 // 10
    while True:
        for _ in range(2):
            state = run_m_step(state, run_e_step(state, words))
        report(f"{len(state.pieces.text_offsets):,} pieces")
        if len(state.pieces.text_offsets) <= enough:
            break
        state = prune_pieces(state, words, max(enough, int(SHRINKING_FACTOR * len(state.pieces.text_offsets))))
    state = prune_pieces(state, words, room)
    pieces = run_m_step(state, run_e_step(state, words), drop_rare=False).pieces
    found = [(words.text[i : i + n], s) for i, n, s in zip(*(array.tolist() for array in pieces), strict=True)]
    lowest = min((score for _, score in found), default=0.0)
    return sorted([*found, *((char, lowest) for char in absent)], key=lambda pair: (-pair[1], pair[0]))


def build_word_lattice(counts: Mapping[str, int], alphabet: Collection[str]) -> WordLattice:
    """Words in a fixed order, long ones in parts. What is not in the alphabet ends a word."""
    parts = [
        (word[i : i + MAX_LATTICE_WORD_CHARS], counts[word])
        for word in sorted(counts)
        for i in range(0, len(word), MAX_LATTICE_WORD_CHARS)
    ]
    text = "".join(f"{part}\0" for part, _ in parts)
    char_N = np.frombuffer(text.encode("utf-32-le"), np.uint32).copy()
    char_N[~np.isin(char_N, np.array([ord(c) for c in alphabet], np.uint32))] = 0
    node_N = np.arange(len(char_N), dtype=np.int32)
    ends = np.flatnonzero(char_N == 0)
    begin_N = np.repeat(np.append(0, ends[:-1] + 1), np.diff(ends, prepend=-1)) if len(ends) else node_N
    count_N = np.repeat([count for _, count in parts], [len(part) + 1 for part, _ in parts])
    return WordLattice(text, char_N, count_N.astype(np.float64), (node_N - begin_N).astype(np.int32))


# --- the pieces to start from -------------------------------------------------------------------------------------


def find_seed_pieces(lattice: WordLattice) -> UnigramState:
    """All characters, and the strings that stand in the text twice or more and not always inside the same longer one.

    Those of the most characters in all are taken, MAX_SEEDS at most.
    """
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    occurrences, num = [], 0
    for length, (at, id_, first, count, alone) in enumerate(iter_repeated_strings(lattice), start=1):
        number = np.full(len(first), -1)
        number[alone] = np.arange(alone.sum()) + num
        num += alone.sum()
        used = alone[id_]
        found.append((at[first[alone]], np.full(alone.sum(), length), count[alone]))
        start = at[used].astype(np.int32)
        occurrences.append((start, start + np.int32(length), number[id_[used]].astype(np.int32)))
    pieces = PieceTable(*map(np.concatenate, zip(*found, strict=True)))
    edges = LatticeEdges(*map(np.concatenate, zip(*occurrences, strict=True)))
    by_end = edges.take(np.lexsort((edges.ends, lattice.positions[edges.ends])))
    by_start = edges.take(np.lexsort((edges.starts, lattice.positions[edges.starts])))
    worth_P = pieces.scores * pieces.lengths
    worth_P[pieces.lengths == 1] += worth_P.max(initial=0)  # characters stay
    best = np.argsort(-worth_P, kind="stable")[: max(MAX_SEED_PIECES, int((pieces.lengths == 1).sum()))]
    keep_P = np.zeros(len(worth_P), dtype=bool)
    keep_P[best] = True
    worth_P = pieces.scores * pieces.lengths
    scored = pieces._replace(scores=np.log(worth_P / worth_P[keep_P].sum()))
    return UnigramState(scored, by_end, by_start).keep_pieces(keep_P)


class RepeatedStrings(NamedTuple):
    """The strings of one length: where they stand, which is where, and for each: a place, the count, is it a seed."""

    text_offsets: np.ndarray
    string_ids: np.ndarray
    first_occurrences: np.ndarray
    counts: np.ndarray
    is_maximal: np.ndarray


def iter_repeated_strings(lattice: WordLattice) -> Iterator[RepeatedStrings]:
    """For each length the strings that occur twice; `is_maximal` where no string one longer occurs as often around it."""
    letters, char_N = np.unique(lattice.chars, return_inverse=True)
    at = np.flatnonzero(lattice.chars)
    now = count_strings(at, char_N[at], lattice.counts)
    for length in range(1, MAX_PIECE_CHARS + 1):
        longer = at = now.text_offsets
        if length < MAX_PIECE_CHARS:
            goes_on = lattice.chars[at + length] > 0
            longer = at[goes_on]
            keys = now.string_ids[goes_on].astype(np.int64) * len(letters) + char_N[longer + length]
            following = count_strings(longer, keys, lattice.counts, min_count=2)
            id_N = np.full(len(char_N), -1, dtype=np.int32)
            id_N[at] = now.string_ids
            most = np.zeros(len(now.first_occurrences))
            for shift in (0, 1):
                np.maximum.at(most, id_N[following.text_offsets[following.first_occurrences] + shift], following.counts)
            alone = now.counts > most if length > 1 else now.is_maximal
            yield now._replace(is_maximal=alone)
            now = following
        else:
            yield now


def count_strings(
    text_offsets: np.ndarray, keys: np.ndarray, count_N: np.ndarray, min_count: int = 0
) -> RepeatedStrings:
    """Number the strings with these keys, and leave out those that are too rare."""
    _, first, id_ = np.unique(keys, return_index=True, return_inverse=True)
    count = np.bincount(id_, weights=count_N[text_offsets], minlength=len(first))
    often = count >= min_count
    kept = often[id_]
    number = np.cumsum(often, dtype=np.int32) - 1
    moved = np.cumsum(kept) - 1
    return RepeatedStrings(
        text_offsets[kept], number[id_[kept]], moved[first[often]], count[often], np.ones(int(often.sum()), dtype=bool)
    )


# --- rounds -------------------------------------------------------------------------------------------------------


def lattice_steps(edges: LatticeEdges, node_E: np.ndarray, position_N: np.ndarray) -> list[tuple[slice, np.ndarray]]:
    """The edges step by step, and where in each step the edges of the next node begin."""
    place_E = position_N[node_E]
    bounds = np.searchsorted(place_E, np.arange(MAX_LATTICE_WORD_CHARS + 2))
    found = []
    for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if a < b:
            found.append((slice(a, b), np.flatnonzero(np.diff(node_E[a:b], prepend=-1))))
    return found


def run_e_step(state: UnigramState, lattice: WordLattice) -> np.ndarray:
    """(P,): how often each piece is expected in the words, over all ways of reading them."""
    pieces, ahead, back = state
    p_P = np.exp(pieces.scores + NATS_PER_CHAR * pieces.lengths)
    alpha_N = np.ones(len(lattice.chars))
    for part, heads in lattice_steps(ahead, ahead.ends, lattice.positions):
        flow = alpha_N[ahead.starts[part]] * p_P[ahead.pieces[part]]
        alpha_N[ahead.ends[part][heads]] = np.add.reduceat(flow, heads)
    ends = np.flatnonzero(lattice.chars == 0)
    beta_N = np.ones(len(lattice.chars))
    beta_N[ends] = lattice.counts[ends] / alpha_N[ends]  # so that the way back carries the count over the sum
    expected_P = np.zeros(len(p_P))
    for part, heads in reversed(lattice_steps(back, back.starts, lattice.positions)):
        start, piece = back.starts[part], back.pieces[part]
        flow = p_P[piece] * beta_N[back.ends[part]]
        beta_N[start[heads]] = np.add.reduceat(flow, heads)
        expected_P += np.bincount(piece, weights=alpha_N[start] * flow, minlength=len(p_P))
    return expected_P


def run_m_step(state: UnigramState, expected_P: np.ndarray, drop_rare: bool = True) -> UnigramState:
    """Scores from the expected counts; digamma in place of the logarithm favours few pieces (Liang and Klein, 2007)."""
    from scipy.special import digamma  # slow to import, and needed by no one who only tokenises

    if drop_rare:
        keep_P = (expected_P >= MIN_EXPECTED_COUNT) | (state.pieces.lengths == 1)
        state, expected_P = state.keep_pieces(keep_P), expected_P[keep_P]
    expected_P = np.maximum(expected_P, MIN_EXPECTED_COUNT)
    score_P = digamma(expected_P) - digamma(expected_P.sum())
    return state._replace(pieces=state.pieces._replace(scores=score_P))


def prune_pieces(state: UnigramState, lattice: WordLattice, num_pieces: int) -> UnigramState:
    """Keep the characters and, of the others, those whose loss would cost the text most."""
    pieces = state.pieces
    if len(pieces.text_offsets) <= num_pieces:
        return state
    used = viterbi_paths(state.by_end, pieces.scores, np.flatnonzero(lattice.chars == 0), lattice.positions)
    freq_P = np.bincount(used.pieces, weights=lattice.counts[used.starts], minlength=len(pieces.text_offsets))
    loss_P = pruning_loss(state, lattice, freq_P)
    loss_P[pieces.lengths == 1] = np.inf
    keep_P = np.zeros(len(loss_P), dtype=bool)
    keep_P[np.argsort(-loss_P, kind="stable")[: max(num_pieces, int((pieces.lengths == 1).sum()))]] = True
    return state.keep_pieces(keep_P)


def viterbi_paths(edges: LatticeEdges, score_P: np.ndarray, ends: np.ndarray, position_N: np.ndarray) -> LatticeEdges:
    """The edges of the best path to each end; of equally good ones, those that come first."""
    best_N, via_N = np.zeros(len(position_N)), np.full(len(position_N), -1)
    for part, heads in lattice_steps(edges, edges.ends, position_N):
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


def pruning_loss(state: UnigramState, lattice: WordLattice, freq_P: np.ndarray) -> np.ndarray:
    """(P,): what the text would cost more, in nats, if a piece were read as the next best pieces in its place."""
    pieces, total = state.pieces, freq_P.sum()
    edges = state.by_start.take(np.argsort(state.by_start.starts, kind="stable"))
    first_N = np.searchsorted(edges.starts, np.arange(len(lattice.chars) + 1))
    loss_P = np.zeros(len(freq_P))
    asked = np.flatnonzero((pieces.lengths > 1) & (freq_P > 0))
    for block in (asked[i : i + PRUNE_BLOCK_PIECES] for i in range(0, len(asked), PRUNE_BLOCK_PIECES)):
        owner, piece = best_alternative_pieces(pieces, edges, first_N, block)
        num = np.bincount(owner, minlength=len(block))
        freq = freq_P[block]
        log_alt = np.bincount(owner, weights=np.log(freq_P[piece] + freq[owner]), minlength=len(block))
        log_alt -= num * np.log(total + freq * (num - 1))
        loss_P[block] = freq * (np.log(freq / total) - log_alt)
    return loss_P


def best_alternative_pieces(
    pieces: PieceTable, edges: LatticeEdges, first_N: np.ndarray, piece_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The best way to read each piece of a block without itself: which of the block, and a piece that it is read as."""
    length = pieces.lengths[piece_ids]
    offset = np.cumsum(length + 1) - (length + 1)
    owner_n, place_n = expand_ranges(np.zeros_like(length), length + 1)
    inside = place_n < length[owner_n]
    start_n = (pieces.text_offsets[piece_ids][owner_n] + place_n)[inside]
    from_n, edge = expand_ranges(first_N[start_n], first_N[start_n + 1])
    owner, start = owner_n[inside][from_n], start_n[from_n]
    shift = offset[owner] - pieces.text_offsets[piece_ids][owner]
    end = edges.ends[edge]
    fits = (end + shift <= offset[owner] + length[owner]) & (edges.pieces[edge] != piece_ids[owner])
    small = LatticeEdges((start + shift)[fits], (end + shift)[fits], edges.pieces[edge][fits])
    small = small.take(np.lexsort((small.ends, place_n[small.ends])))
    path = viterbi_paths(small, pieces.scores, offset + length, place_n)
    return owner_n[path.starts], path.pieces


def expand_ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of many ranges, and which range each is from."""
    size = stop - start
    which = np.repeat(np.arange(len(size)), size)
    return which, np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size) + start[which]
