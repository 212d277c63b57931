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
a word are the paths through its edges. Edges are found once, and those of dropped pieces are removed. The loops over
them are compiled (`unigram_kernels.py`).

Shapes: N characters (and nodes), W words, E edges, P pieces; G strings of one length, S their occurrences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from firth.tokens import unigram_kernels as kernels

MAX_PIECE_CHARS = 16  # characters; this and the next three are SentencePiece's
MAX_SEED_PIECES = 1_000_000  # pieces to start from, at most
SHRINKING_FACTOR = 0.75  # share of the pieces that one round keeps
MIN_EXPECTED_COUNT = 0.5  # expected count below which the M step drops a piece
MAX_LATTICE_WORD_CHARS = 32  # characters: a longer word is cut
NATS_PER_CHAR = 5.0  # nats: about the cost of a character; scales all paths of a word alike, against underflow


class WordLattice(NamedTuple):
    """Counted words, a 0 behind each: their text; letters and counts of words (N,); where words end (W,).

    Letters are numbers into `alphabet`, from 1. A character outside of the alphabet is 0 too, and ends a word.
    """

    text: str
    alphabet: list[str]
    letters: np.ndarray
    counts: np.ndarray
    ends: np.ndarray


class PieceTable(NamedTuple):
    """Pieces as arrays (P,): where each occurs in the text, its length, its log-probability."""

    text_offsets: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray

    def take(self, which: np.ndarray) -> PieceTable:
        return PieceTable(*(array[which] for array in self))


class LatticeEdges(NamedTuple):
    """How many edges leave each node (N,), and the pieces of the edges (E,), sorted by node and then by length."""

    degrees: np.ndarray
    pieces: np.ndarray


class UnigramState(NamedTuple):
    """Pieces and their edges."""

    pieces: PieceTable
    edges: LatticeEdges

    def keep_pieces(self, keep_P: np.ndarray) -> UnigramState:
        if keep_P.all():
            return self
        edges = LatticeEdges(*kernels.renumber_edges(*self.edges, number_kept(keep_P)))
        return UnigramState(self.pieces.take(keep_P), edges)


def number_kept(keep: np.ndarray) -> np.ndarray:
    """Number what is kept from 0; the others get -1.

    >>> number_kept(np.array([True, False, True])).tolist()
    [0, -1, 1]
    """
    return np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)


def train_unigram_pieces(
    counts: Mapping[str, int],
    alphabet: Collection[str],
    num_pieces: int,
    report: Callable[[str], None] = lambda _: None,
    excluded: Collection[str] = (),
) -> list[tuple[str, float]]:
    """Return `num_pieces` pieces with their log-probabilities; fewer if the words have no more.

    All characters of the alphabet are among them, and none of the `excluded` strings. `report` is called with the
    number of pieces after each round.
    """
    assert num_pieces >= len(set(alphabet)), "the characters must fit"
    words = build_word_lattice(counts, alphabet)
    state = exclude_pieces(find_seed_pieces(words), words, {name for name in excluded if len(name) > 1})
    occurs = np.bincount(words.letters, minlength=len(words.alphabet) + 1)[1:]
    absent = [letter for letter, n in zip(words.alphabet, occurs.tolist(), strict=True) if n == 0]
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
    words = sorted(counts)
    laid_out = [word if len(word) <= MAX_LATTICE_WORD_CHARS else "\0".join(cut_word(word)) for word in words]
    text = "".join(f"{word}\0" for word in laid_out)
    alphabet = sorted(set(alphabet) - {"\0"})
    number = np.zeros(sys.maxunicode + 1, np.int32)
    number[[ord(letter) for letter in alphabet]] = np.arange(1, len(alphabet) + 1)
    letter_N = number[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    size_W = np.fromiter(map(len, laid_out), np.int64, len(words)) + 1
    count_N = np.repeat(np.array([counts[word] for word in words], np.float64), size_W)
    return WordLattice(text, alphabet, letter_N, count_N, np.flatnonzero(letter_N == 0))


def cut_word(word: str) -> list[str]:
    return [word[i : i + MAX_LATTICE_WORD_CHARS] for i in range(0, len(word), MAX_LATTICE_WORD_CHARS)]


# --- seeds --------------------------------------------------------------------------------------------------------


def find_seed_pieces(lattice: WordLattice) -> UnigramState:
    """Return all characters and the strings that repeat, but not always inside the same longer string.

    At most `MAX_SEED_PIECES`: those with the largest count times length.
    """
    found, occurrences, num_found = [], [], 0
    for length, strings in enumerate(iter_repeated_strings(lattice), start=1):
        firsts = strings.starts[np.searchsorted(strings.ids, np.flatnonzero(strings.is_maximal))]
        found.append((firsts, np.full(len(firsts), length, np.int8), strings.counts[strings.is_maximal]))
        used_S = strings.is_maximal[strings.ids]
        occurrences.append((strings.starts[used_S], number_kept(strings.is_maximal)[strings.ids[used_S]] + num_found))
        num_found += len(firsts)
    pieces = PieceTable(*map(np.concatenate, zip(*found, strict=True)))
    worth_P, is_char_P = pieces.scores * pieces.lengths, pieces.lengths == 1
    best = np.argsort(-(worth_P + is_char_P * worth_P.max(initial=0)), kind="stable")  # characters stay
    keep_P = np.zeros(len(worth_P), dtype=bool)
    keep_P[best[: max(MAX_SEED_PIECES, int(is_char_P.sum()))]] = True
    scored = pieces._replace(scores=np.log(worth_P / worth_P[keep_P].sum()))
    return UnigramState(scored, collect_edges(occurrences, len(lattice.letters))).keep_pieces(keep_P)


def exclude_pieces(state: UnigramState, lattice: WordLattice, names: Collection[str]) -> UnigramState:
    """Return the pieces without those of these names."""
    pieces, keep_P = state.pieces, np.ones(len(state.pieces.lengths), dtype=bool)
    firsts = [lattice.alphabet.index(name[0]) + 1 for name in names if name[0] in lattice.alphabet]
    for i in np.flatnonzero(np.isin(lattice.letters[pieces.text_offsets], firsts)).tolist():
        start = pieces.text_offsets[i]
        keep_P[i] = lattice.text[start : start + pieces.lengths[i]] not in names
    return state.keep_pieces(keep_P)


def collect_edges(occurrences: list[tuple[np.ndarray, np.ndarray]], num_nodes: int) -> LatticeEdges:
    """Return the edges of pieces given by length, shortest first: where they occur, and which they are."""
    degree_N = np.zeros(num_nodes, np.int8)
    for start_S, _ in occurrences:
        degree_N[start_S] += 1  # once: no two pieces of one length begin at the same node
    next_N = np.cumsum(degree_N, dtype=np.int64) - degree_N
    piece_E = np.empty(degree_N.sum(dtype=np.int64), np.int32)
    for start_S, piece_S in occurrences:
        kernels.add_edges(next_N, piece_E, start_S, piece_S)
    return LatticeEdges(degree_N, piece_E)


class RepeatedStrings(NamedTuple):
    """The strings of one length: starts of their occurrences, sorted by string, and the string of each occurrence (S,);
    count and maximality of each string (G,)."""

    starts: np.ndarray
    ids: np.ndarray
    counts: np.ndarray
    is_maximal: np.ndarray


def iter_repeated_strings(lattice: WordLattice) -> Iterator[RepeatedStrings]:
    """Yield the repeated strings of each length; `is_maximal` if no string one longer around it is as frequent."""
    text = (lattice.letters, len(lattice.alphabet) + 1, lattice.counts)
    starts = np.flatnonzero(lattice.letters).astype(np.int32)
    starts, ids, counts, _ = kernels.extend_strings(starts, np.zeros_like(starts), 0, *text, min_count=0)
    for length in range(1, MAX_PIECE_CHARS):
        *longer, max_G = kernels.extend_strings(starts, ids, length, *text, min_count=2)
        kernels.raise_to_left_extensions(max_G, starts, ids, *longer, len(lattice.letters))
        yield RepeatedStrings(starts, ids, counts, counts > max_G if length > 1 else np.ones(len(counts), dtype=bool))
        starts, ids, counts = longer
    yield RepeatedStrings(starts, ids, counts, np.ones(len(counts), dtype=bool))


# --- EM and pruning -----------------------------------------------------------------------------------------------


def run_e_step(state: UnigramState, lattice: WordLattice) -> np.ndarray:
    """Return the expected count of each piece (P,) over all segmentations, by forward-backward."""
    pieces = state.pieces
    p_P = np.exp(pieces.scores + NATS_PER_CHAR * pieces.lengths)
    return kernels.sum_expected_counts(*state.edges, pieces.lengths, p_P, lattice.counts, lattice.ends)


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
    loss_P = pruning_losses(state, lattice)
    loss_P[pieces.lengths == 1] = np.inf
    keep_P = np.zeros(len(loss_P), dtype=bool)
    keep_P[np.argsort(-loss_P, kind="stable")[: max(num_pieces, int((pieces.lengths == 1).sum()))]] = True
    return state.keep_pieces(keep_P)


def count_best_pieces(state: UnigramState, lattice: WordLattice) -> np.ndarray:
    """Return how often each piece (P,) is in the best segmentations of the words (Viterbi)."""
    return kernels.count_best_pieces(
        *state.edges, state.pieces.lengths, state.pieces.scores, lattice.counts, lattice.ends
    )


def pruning_losses(state: UnigramState, lattice: WordLattice) -> np.ndarray:
    """Return the loss of log-likelihood (P,) in nats if a piece is replaced by its best alternative pieces."""
    past_N = np.cumsum(state.edges.degrees, dtype=np.int64)
    first_edge_P = past_N[state.pieces.text_offsets] - state.edges.degrees[state.pieces.text_offsets]
    return kernels.sum_pruning_losses(*state.edges, first_edge_P, *state.pieces, count_best_pieces(state, lattice))
