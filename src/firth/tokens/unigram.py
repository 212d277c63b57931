"""Train the pieces of a Unigram tokenizer (Kudo 2018, "Subword Regularization", section 3.2) on counted words.

The model: a word is a sequence of pieces, each drawn independently with its probability. Training goes from many pieces
to few:

1. Seeds: all characters, and all strings that repeat (`find_seed_pieces`).
2. EM, twice: the E step computes the expected count of each piece over all segmentations of all words, by the
   forward-backward algorithm (`run_e_step`); the M step makes probabilities of the counts (`run_m_step`).
3. Prune: for each piece, compute how much likelihood the text loses if the piece is replaced by its best alternative
   segmentation; drop the quarter that loses least (`prune_pieces`). Back to 2 until the vocabulary has its size.

Layout: all words lie end to end in one array, each with a 0 behind it. A node is a position between characters, an edge
an occurrence of a piece: it leads from the node before its first character to the node after its last. Segmentations of
a word are the paths through its edges. Edges are found once. Forward and backward sums advance one position in all
words at a time, so the work is a few dozen numpy calls per step, and the sums are the same in every run.

Shapes: N characters (and nodes), E edges, P pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

MAX_PIECE_CHARS = 16  # characters; this and the next three are SentencePiece's
MAX_SEED_PIECES = 1_000_000  # pieces to start from, at most
SHRINKING_FACTOR = 0.75  # share of the pieces that one round keeps
MIN_EXPECTED_COUNT = 0.5  # expected count below which the M step drops a piece
MAX_LATTICE_WORD_CHARS = 32  # characters: a longer word is cut
NATS_PER_CHAR = 5.0  # nats: about the cost of a character; scales all paths of a word alike, against underflow
PRUNE_BLOCK_PIECES = 1 << 16  # pieces whose alternatives are searched at once


class LatticeEdges(NamedTuple):
    """Edges, sorted so that those of one step are adjacent, and within a step those of one node."""

    starts: np.ndarray
    ends: np.ndarray
    pieces: np.ndarray

    def take(self, which: np.ndarray) -> LatticeEdges:
        return LatticeEdges(*(array[which] for array in self))


class WordLattice(NamedTuple):
    """Counted words as arrays (N,): characters (0 behind each word), count and position in the word."""

    text: str
    chars: np.ndarray
    counts: np.ndarray
    positions: np.ndarray


class PieceTable(NamedTuple):
    """Pieces as arrays (P,): where each occurs in the text, its length, its log-probability."""

    text_offsets: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray

    def take(self, which: np.ndarray) -> PieceTable:
        return PieceTable(*(array[which] for array in self))


class UnigramState(NamedTuple):
    """Pieces and their edges, sorted by end and by start."""

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
    """Return `num_pieces` pieces with their log-probabilities; fewer if the words have no more.

    All characters of the alphabet are among them. `report` is called with the number of pieces after each round.
    """
    assert num_pieces >= len(set(alphabet)), "the characters must fit"
    words = build_word_lattice(counts, alphabet)
    state = find_seed_pieces(words)
    absent = sorted(set(alphabet) - set(map(chr, np.unique(words.chars))))
    num_trained = num_pieces - len(absent)
    last_round = num_trained * 11 // 10  # pieces: the last pruning goes from here to the end
    while True:
        for _ in range(2):
            state = run_m_step(state, run_e_step(state, words))
        report(f"{len(state.pieces.text_offsets):,} pieces")
        if len(state.pieces.text_offsets) <= last_round:
            break
        state = prune_pieces(state, words, max(last_round, int(SHRINKING_FACTOR * len(state.pieces.text_offsets))))
    state = prune_pieces(state, words, num_trained)
    pieces = run_m_step(state, run_e_step(state, words), drop_rare=False).pieces
    scored = [(words.text[i : i + n], s) for i, n, s in zip(*(array.tolist() for array in pieces), strict=True)]
    lowest = min((score for _, score in scored), default=0.0)
    return sorted([*scored, *((char, lowest) for char in absent)], key=lambda pair: (-pair[1], pair[0]))


def build_word_lattice(counts: Mapping[str, int], alphabet: Collection[str]) -> WordLattice:
    """Lay out words in sorted order, long ones in parts. A character outside of the alphabet ends a word."""
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


# --- seeds --------------------------------------------------------------------------------------------------------


def find_seed_pieces(lattice: WordLattice) -> UnigramState:
    """Return all characters and the strings that repeat, but not always inside the same longer string.

    At most `MAX_SEED_PIECES`: those with the largest count times length.
    """
    seeds: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    occurrences, num = [], 0
    for length, (at, id_, first, count, is_seed) in enumerate(iter_repeated_strings(lattice), start=1):
        number = np.full(len(first), -1)
        number[is_seed] = np.arange(is_seed.sum()) + num
        num += is_seed.sum()
        used = is_seed[id_]
        seeds.append((at[first[is_seed]], np.full(is_seed.sum(), length), count[is_seed]))
        start = at[used].astype(np.int32)
        occurrences.append((start, start + np.int32(length), number[id_[used]].astype(np.int32)))
    pieces = PieceTable(*map(np.concatenate, zip(*seeds, strict=True)))
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
    """The strings of one length: occurrences with their ids; first occurrence, count and maximality by id."""

    text_offsets: np.ndarray
    string_ids: np.ndarray
    first_occurrences: np.ndarray
    counts: np.ndarray
    is_maximal: np.ndarray


def iter_repeated_strings(lattice: WordLattice) -> Iterator[RepeatedStrings]:
    """Yield the repeated strings of each length; `is_maximal` if no string one longer around it is as frequent."""
    letters, char_N = np.unique(lattice.chars, return_inverse=True)
    at = np.flatnonzero(lattice.chars)
    now = count_strings(at, char_N[at], lattice.counts)
    for length in range(1, MAX_PIECE_CHARS + 1):
        longer = at = now.text_offsets
        if length < MAX_PIECE_CHARS:
            continues = lattice.chars[at + length] > 0
            longer = at[continues]
            keys = now.string_ids[continues].astype(np.int64) * len(letters) + char_N[longer + length]
            following = count_strings(longer, keys, lattice.counts, min_count=2)
            id_N = np.full(len(char_N), -1, dtype=np.int32)
            id_N[at] = now.string_ids
            max_counts = np.zeros(len(now.first_occurrences))
            for shift in (0, 1):
                np.maximum.at(
                    max_counts, id_N[following.text_offsets[following.first_occurrences] + shift], following.counts
                )
            yield now._replace(is_maximal=now.counts > max_counts if length > 1 else now.is_maximal)
            now = following
        else:
            yield now


def count_strings(
    text_offsets: np.ndarray, keys: np.ndarray, count_N: np.ndarray, min_count: int = 0
) -> RepeatedStrings:
    """Number the strings with these keys; drop those of fewer than `min_count`."""
    _, first, id_ = np.unique(keys, return_index=True, return_inverse=True)
    count = np.bincount(id_, weights=count_N[text_offsets], minlength=len(first))
    often = count >= min_count
    kept = often[id_]
    number = np.cumsum(often, dtype=np.int32) - 1
    moved = np.cumsum(kept) - 1
    return RepeatedStrings(
        text_offsets[kept], number[id_[kept]], moved[first[often]], count[often], np.ones(int(often.sum()), dtype=bool)
    )


# --- EM and pruning -----------------------------------------------------------------------------------------------


def lattice_steps(edges: LatticeEdges, node_E: np.ndarray, position_N: np.ndarray) -> list[tuple[slice, np.ndarray]]:
    """Return the edges of each step, and where in the step each node's edges begin."""
    bounds = np.searchsorted(position_N[node_E], np.arange(MAX_LATTICE_WORD_CHARS + 2))
    steps = []
    for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if a < b:
            steps.append((slice(a, b), np.flatnonzero(np.diff(node_E[a:b], prepend=-1))))
    return steps


def run_e_step(state: UnigramState, lattice: WordLattice) -> np.ndarray:
    """Return the expected count of each piece (P,) over all segmentations, by forward-backward."""
    pieces, ahead, back = state
    p_P = np.exp(pieces.scores + NATS_PER_CHAR * pieces.lengths)
    alpha_N = np.ones(len(lattice.chars))
    for part, heads in lattice_steps(ahead, ahead.ends, lattice.positions):
        flow = alpha_N[ahead.starts[part]] * p_P[ahead.pieces[part]]
        alpha_N[ahead.ends[part][heads]] = np.add.reduceat(flow, heads)
    ends = np.flatnonzero(lattice.chars == 0)
    beta_N = np.ones(len(lattice.chars))
    # count over likelihood: the backward pass then yields expected counts
    beta_N[ends] = lattice.counts[ends] / alpha_N[ends]
    expected_P = np.zeros(len(p_P))
    for part, heads in reversed(lattice_steps(back, back.starts, lattice.positions)):
        start, piece = back.starts[part], back.pieces[part]
        flow = p_P[piece] * beta_N[back.ends[part]]
        beta_N[start[heads]] = np.add.reduceat(flow, heads)
        expected_P += np.bincount(piece, weights=alpha_N[start] * flow, minlength=len(p_P))
    return expected_P


def run_m_step(state: UnigramState, expected_P: np.ndarray, drop_rare: bool = True) -> UnigramState:
    """Return scores from expected counts; digamma instead of log favours few pieces (Liang and Klein 2007)."""
    from scipy.special import digamma  # slow to import, and only training needs it

    if drop_rare:
        keep_P = (expected_P >= MIN_EXPECTED_COUNT) | (state.pieces.lengths == 1)
        state, expected_P = state.keep_pieces(keep_P), expected_P[keep_P]
    expected_P = np.maximum(expected_P, MIN_EXPECTED_COUNT)
    score_P = digamma(expected_P) - digamma(expected_P.sum())
    return state._replace(pieces=state.pieces._replace(scores=score_P))


def prune_pieces(state: UnigramState, lattice: WordLattice, num_pieces: int) -> UnigramState:
    """Keep all characters and, of the other pieces, those whose removal costs the most likelihood."""
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
    """Return the edges of the best path to each end (Viterbi); ties go to the first edge."""
    best_N, via_N = np.zeros(len(position_N)), np.full(len(position_N), -1)
    for part, heads in lattice_steps(edges, edges.ends, position_N):
        value = best_N[edges.starts[part]] + score_P[edges.pieces[part]]
        top = np.maximum.reduceat(value, heads)
        group = np.repeat(np.arange(len(heads)), np.diff(heads, append=len(value)))
        winners = np.flatnonzero(value == top[group])
        winners = winners[np.diff(group[winners], prepend=-1) > 0]
        node = edges.ends[part][heads]
        best_N[node], via_N[node] = top, part.start + winners
    path, node = [], ends
    while len(node := node[via_N[node] >= 0]):
        path.append(via_N[node])
        node = edges.starts[via_N[node]]
    return edges.take(np.concatenate([np.zeros(0, dtype=np.int64), *path]))


def pruning_loss(state: UnigramState, lattice: WordLattice, freq_P: np.ndarray) -> np.ndarray:
    """Return the loss of log-likelihood (P,) in nats if a piece is replaced by its best alternative pieces."""
    pieces, total = state.pieces, freq_P.sum()
    edges = state.by_start.take(np.argsort(state.by_start.starts, kind="stable"))
    first_N = np.searchsorted(edges.starts, np.arange(len(lattice.chars) + 1))
    loss_P = np.zeros(len(freq_P))
    used = np.flatnonzero((pieces.lengths > 1) & (freq_P > 0))
    for block in (used[i : i + PRUNE_BLOCK_PIECES] for i in range(0, len(used), PRUNE_BLOCK_PIECES)):
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
    """Return the best segmentation of each piece without itself: indices into `piece_ids`, and the pieces of it."""
    length = pieces.lengths[piece_ids]
    offset = np.cumsum(length + 1) - (length + 1)
    owner_n, offset_n = expand_ranges(np.zeros_like(length), length + 1)
    inside = offset_n < length[owner_n]
    start_n = (pieces.text_offsets[piece_ids][owner_n] + offset_n)[inside]
    from_n, edge = expand_ranges(first_N[start_n], first_N[start_n + 1])
    owner, start = owner_n[inside][from_n], start_n[from_n]
    shift = offset[owner] - pieces.text_offsets[piece_ids][owner]
    end = edges.ends[edge]
    fits = (end + shift <= offset[owner] + length[owner]) & (edges.pieces[edge] != piece_ids[owner])
    small = LatticeEdges((start + shift)[fits], (end + shift)[fits], edges.pieces[edge][fits])
    small = small.take(np.lexsort((small.ends, offset_n[small.ends])))
    path = viterbi_paths(small, pieces.scores, offset + length, offset_n)
    return owner_n[path.starts], path.pieces


def expand_ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the range of each number, and all numbers of many ranges."""
    size = stop - start
    which = np.repeat(np.arange(len(size)), size)
    return which, np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size) + start[which]
