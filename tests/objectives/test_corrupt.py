"""What is read and what is asked, by hand, and the laws of BERT's noise."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy import stats

from firth.objectives import IGNORED, Draw, choose, corrupt
from firth.tokens import Rows, Vocabulary

PAD, END, MASK = 0, 1, 2
S0, S1, S2 = 99, 98, 97  # sentinels count down from the end of the vocabulary, as in T5
VOCAB = Vocabulary(
    size=100, pad=PAD, unk=3, bos=None, eos=END, cls=None, sep=None, mask=MASK,
    sentinels=(S0, S1, S2), special=(PAD, END, MASK, 3, S2, S1, S0),
)  # fmt: skip


# --- hide ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed(Draw):
    """A draw whose numbers were written down before."""

    fate: list[list[float]] = field(default_factory=list)
    other: list[list[int]] = field(default_factory=list)

    def uniform(self, purpose: str, width: int) -> np.ndarray:
        return np.array(getattr(self, purpose), np.float32)

    def integers(self, purpose: str, width: int, below: int) -> np.ndarray:
        assert below == 93, "100 tokens, seven of them special"
        return np.array(getattr(self, purpose))


def test_hide_by_hand() -> None:
    tokens = np.array([[10, 11, 12, 13, 14], [20, 21, 22, 23, PAD]])
    asked = np.array([[0, 2, 4], [1, 3, 0]])
    used = np.array([[True, True, True], [True, True, False]])
    # The ordinary ids are 4, 5, 6 ...: ordinary[k] = 4 + k.
    draw = Fixed(0, np.arange(2), fate=[[0.79, 0.81, 0.95], [0.89, 0.91, 0.1]], other=[[5, 6, 7], [0, 8, 9]])
    read, labels = corrupt.hide(tokens, asked, used, draw, VOCAB, mask=0.8, random=0.1)
    assert read.tolist() == [[MASK, 11, 10, 13, 14], [20, 4, 22, 23, PAD]]
    assert labels.tolist() == [[10, 12, 14], [21, 23, IGNORED]]
    assert tokens.tolist() == [[10, 11, 12, 13, 14], [20, 21, 22, 23, PAD]], "the rows themselves stay as they are"


def hidden(mask: float, random: float) -> tuple[np.ndarray, ...]:
    """150,000 asked tokens of rows that also have padding and unused slots."""
    vocab = Vocabulary(5000, PAD, 3, None, END, None, None, MASK, (), (PAD, END, MASK, 3, 4999))
    rng = np.random.default_rng(0)
    real = np.arange(100) < rng.integers(50, 101, size=12_000)[:, None]
    tokens = np.where(real, rng.choice(vocab.ordinary, size=real.shape), PAD)
    draw = Draw(3, np.arange(len(tokens)))
    asked, used = choose.tokens(real, 0.18, draw)
    read, labels = corrupt.hide(tokens, asked, used, draw, vocab, mask, random)
    return tokens, asked, used, read, labels


def test_eighty_ten_ten() -> None:
    _, asked, used, read, labels = hidden(mask=0.8, random=0.1)
    truth, seen = labels[used], np.take_along_axis(read, asked, 1)[used]
    assert len(truth) > 150_000
    assert not used.all()
    masked, kept = seen == MASK, seen == truth
    assert masked.mean() == pytest.approx(0.8, abs=0.005)
    assert kept.mean() == pytest.approx(0.1, abs=0.005)
    assert (~masked & ~kept).mean() == pytest.approx(0.1, abs=0.005)

    replaced = seen[~masked & ~kept]
    ordinary = np.arange(4, 4999)
    assert np.isin(replaced, ordinary).all()
    assert stats.chisquare(np.bincount((replaced - 4) * 50 // len(ordinary), minlength=50)).pvalue > 1e-3


def test_answers_are_right_and_nothing_else_changes() -> None:
    tokens, asked, used, read, labels = hidden(mask=0.8, random=0.1)
    assert (labels == np.where(used, np.take_along_axis(tokens, asked, 1), IGNORED)).all()
    touched = np.zeros(tokens.shape, bool)
    rows = np.broadcast_to(np.arange(len(tokens))[:, None], asked.shape)
    touched[rows[used], asked[used]] = True
    assert (read[~touched] == tokens[~touched]).all()
    assert (read[touched] != tokens[touched]).mean() > 0.85


@pytest.mark.parametrize(("mask", "random"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_one_fate_for_all(mask: float, random: float) -> None:
    _, asked, used, read, labels = hidden(mask, random)
    seen = np.take_along_axis(read, asked, 1)[used]
    assert (seen == MASK).all() == (mask == 1)
    assert (seen == labels[used]).all() == (mask + random == 0)
    assert ((seen != MASK) & (seen != labels[used])).mean() == pytest.approx(random, abs=0.001)


# --- sentinels ----------------------------------------------------------------------------------------------------


def make_rows(*rows: str, width: int) -> tuple[Rows, np.ndarray]:
    """Rows from pictures such as "10* 11 | 20 21*": documents with their noise starred; each gets its end token."""
    shape = (len(rows), width)
    tokens, doc, position = np.full(shape, PAD), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    real, noise = np.zeros(shape, bool), np.zeros(shape, bool)
    for b, row in enumerate(rows):
        at = 0
        for d, words in enumerate(part.split() for part in row.split("|")):
            n = len(words)
            tokens[b, at : at + n + 1] = [*(int(w.strip("*")) for w in words), END]
            doc[b, at : at + n + 1], position[b, at : at + n + 1] = d, np.arange(n + 1)
            real[b, at : at + n], noise[b, at : at + n] = True, [w.endswith("*") for w in words]
            at += n + 1
    return Rows(tokens, doc, position, real, np.arange(len(rows))), noise


def test_the_published_example() -> None:
    rows, noise = make_rows("10* 11* 12 13 14* 15", width=7)
    batch = corrupt.sentinels(rows, noise, 6, 6, VOCAB)
    assert batch.tokens.tolist() == [[S0, 12, 13, S1, 15, END]]
    assert batch.labels.tolist() == [[S0, 10, 11, S1, 14, END]]
    assert batch.decoder_tokens.tolist() == [[PAD, S0, 10, 11, S1, 14]]
    assert batch.doc.tolist() == batch.decoder_doc.tolist() == [[0] * 6]
    assert batch.position.tolist() == batch.decoder_position.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert batch.asked is None


def test_several_documents_and_padding() -> None:
    rows, noise = make_rows("10 11* 12 13* 14* | 20 21 22* | 30", "40 41*", width=14)
    batch = corrupt.sentinels(rows, noise, 13, 11, VOCAB)
    p, x = PAD, IGNORED
    assert batch.tokens.tolist() == [
        [10, S0, 12, S1, END, 20, 21, S0, END, 30, END, p, p],
        [40, S0, END, p, p, p, p, p, p, p, p, p, p],
    ]
    assert batch.doc.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, -1, -1], [0, 0, 0] + [-1] * 10]
    assert batch.position.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 0, 0], [0, 1, 2] + [0] * 10]
    assert batch.labels.tolist() == [
        [S0, 11, S1, 13, 14, END, S0, 22, END, END, x],
        [S0, 41, END] + [x] * 8,
    ]
    # Each document begins with padding. What follows a row's last answer is not asked: it may hold anything.
    assert batch.decoder_tokens[0, :10].tolist() == [p, S0, 11, S1, 13, 14, p, S0, 22, p]
    assert batch.decoder_tokens[1, :3].tolist() == [p, S0, 41]
    assert np.isin(batch.decoder_tokens[batch.labels == IGNORED], [PAD, END]).all()
    assert batch.decoder_doc.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2], [0] * 11]
    assert batch.decoder_position.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1], list(range(11))]


def test_noise_on_both_sides_of_an_edge_is_two_spans() -> None:
    place, real = np.array([[0, 1, 0, 1]]), np.ones((1, 4), bool)
    rows = Rows(np.array([[10, 11, 20, 21]]), np.array([[0, 0, 1, 1]]), place, real, np.arange(1))
    batch = corrupt.sentinels(rows, np.array([[False, True, True, False]]), 4, 6, VOCAB)
    assert batch.tokens.tolist() == [[10, S0, S0, 21]]
    assert batch.labels.tolist() == [[S0, 11, END, S0, 20, END]]


def test_all_sentinels_can_be_used() -> None:
    rows, noise = make_rows("10 11* 12 13* 14 15*", width=7)
    batch = corrupt.sentinels(rows, noise, 7, 7, VOCAB)
    assert batch.tokens.tolist() == [[10, S0, 12, S1, 14, S2, END]]
    assert batch.labels.tolist() == [[S0, 11, S1, 13, S2, 15, END]]


def test_a_document_without_noise_answers_with_its_end() -> None:
    rows, noise = make_rows("10 11", width=3)
    batch = corrupt.sentinels(rows, noise, 3, 2, VOCAB)
    assert batch.tokens.tolist() == [[10, 11, END]]
    assert batch.labels.tolist() == [[END, IGNORED]]
    assert batch.decoder_doc.tolist() == [[0, 0]]


def test_rows_stay_as_they_are() -> None:
    rows, noise = make_rows("10* 11* 12 13 14* 15", width=7)
    corrupt.sentinels(rows, noise, 6, 6, VOCAB)
    assert rows.tokens.tolist() == [[10, 11, 12, 13, 14, 15, END]]


@pytest.mark.parametrize(("encoder", "decoder"), [(5, 6), (6, 5)])
def test_a_side_that_is_too_short_is_our_mistake(encoder: int, decoder: int) -> None:
    rows, noise = make_rows("10* 11* 12 13 14* 15", width=7)
    with pytest.raises(AssertionError):
        corrupt.sentinels(rows, noise, encoder, decoder, VOCAB)
