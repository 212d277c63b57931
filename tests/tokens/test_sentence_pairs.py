"""Sentence pairs: next, random, swapped, and the two sides of a document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.tokens import sentence_pairs as module
from firth.tokens import shards as shards_module
from firth.tokens.dataset import Rows
from firth.tokens.sentence_pairs import SentencePairDataset, chunk_sentences, count_coin_heads, tokens_to_truncate
from firth.tokens.shards import Shards
from firth.tokens.template import SequenceTemplate

Make = Callable[..., Shards]
FIRST = 100  # the first token of shards made by hand; the others follow
PAD, CLS, SEP = 0, 1, 2
BERT = SequenceTemplate((CLS,), (SEP,), separator_ids=(SEP,))
XLM = SequenceTemplate((SEP,), (SEP,), separator_ids=(SEP, SEP))
MANY = 20_000


def texts(rows: Rows, which: int) -> list[np.ndarray]:
    """The token indices of the first or second text of each row."""
    chosen = rows.maskable & (rows.token_type_ids == which)
    return [row[keep] - FIRST for row, keep in zip(rows.input_ids, chosen, strict=True)]


def documents_of(shards: Shards, token_indices: list[np.ndarray]) -> np.ndarray:
    """The document in which each text lies; each must lie in one, without gaps."""
    assert all(np.array_equal(np.diff(text), np.ones(len(text) - 1)) for text in token_indices)
    first, last = (np.searchsorted(shards.offsets, [t[k] for t in token_indices], side="right") - 1 for k in (0, -1))
    assert np.array_equal(first, last)
    return first


@pytest.fixture
def running(make_shards: Make) -> Shards:
    """Forty documents of one to thirty sentences."""
    random = np.random.default_rng(0)
    return make_shards([random.integers(1, 25, size=random.integers(1, 31)).tolist() for _ in range(40)])


# --- chunks -------------------------------------------------------------------------------------------------------


def test_chunks_by_hand(make_shards: Make) -> None:
    shards = make_shards([[3, 2, 4, 1, 1], [9], [2, 9, 1, 1]])
    chunks = chunk_sentences(shards, 6)
    assert chunks.sentence_bounds.tolist() == [0, 3, 5, 9, 10, 11, 20, 22, 31, 32, 33]
    assert chunks.document_first_sentence.tolist() == [0, 5, 6, 10]
    # 3 + 2 + 4 reach 6, then 1 + 1 are the rest of the document; 9 alone; 2 + 9, then 1 + 1.
    assert chunks.chunk_first_sentence.tolist() == [0, 3, 5, 6, 8, 10]
    assert chunks.splittable_chunks.tolist() == [0, 1, 3, 4]


def slow_chunks(documents: list[list[int]], max_text_tokens: int) -> list[int]:
    """The number of sentences in each chunk, one sentence at a time."""
    sizes = []
    for sentences in documents:
        length = count = 0
        for i, sentence in enumerate(sentences):
            length, count = length + sentence, count + 1
            if length >= max_text_tokens or i == len(sentences) - 1:
                sizes.append(count)
                length = count = 0
    return sizes


@pytest.mark.parametrize("max_text_tokens", [2, 17, 64])
def test_chunks_equal_those_of_one_sentence_at_a_time(make_shards: Make, max_text_tokens: int) -> None:
    random = np.random.default_rng(max_text_tokens)
    documents = [random.integers(1, 20, size=random.integers(1, 40)).tolist() for _ in range(50)]
    assert np.diff(
        chunk_sentences(make_shards(documents), max_text_tokens).chunk_first_sentence
    ).tolist() == slow_chunks(documents, max_text_tokens)


def test_a_document_ends_a_sentence_and_blocks_leave_no_trace(
    make_shards: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make_shards([[3, 2], [4]])
    assert shards.sentence_bounds().tolist() == [0, 3, 5, 9]
    shards._packed_bits["sentence_end"] = np.packbits([0, 0, 1, 0, 0, 0, 0, 0, 0])  # type: ignore[assignment]
    assert shards.sentence_bounds().tolist() == [0, 3, 5, 9]
    monkeypatch.setattr(shards_module, "SENTENCE_BLOCK_TOKENS", 2)
    assert shards.sentence_bounds().tolist() == [0, 3, 5, 9]


def test_chunks_are_cached_beside_the_shards(running: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = SentencePairDataset(running, 64, BERT, PAD, 0, "next").get_rows(np.arange(50))
    assert [p.name[:10] for p in running.folder.iterdir() if p.is_dir()] == ["chunks-61-"]
    monkeypatch.setattr(module, "chunk_sentences", None)
    again = SentencePairDataset(running, 64, BERT, PAD, 0, "next").get_rows(np.arange(50))
    assert np.array_equal(fresh.input_ids, again.input_ids)


# --- truncation ---------------------------------------------------------------------------------------------------


def slow_surplus(a: int, b: int, max_text_tokens: int) -> list[int]:
    lost = [0, 0]
    while a + b > max_text_tokens:
        if a > b:
            a, lost[0] = a - 1, lost[0] + 1
        else:
            b, lost[1] = b - 1, lost[1] + 1
    return lost


def test_the_longer_text_loses_one_token_at_a_time() -> None:
    lengths = np.array([[a, b] for a in range(1, 15) for b in range(1, 15)])
    for max_text_tokens in (2, 5, 8, 13):
        assert tokens_to_truncate(lengths, max_text_tokens).tolist() == [
            slow_surplus(a, b, max_text_tokens) for a, b in lengths.tolist()
        ]
        assert (lengths - tokens_to_truncate(lengths, max_text_tokens) >= 1).all()


def test_heads_follow_the_law_of_coins() -> None:
    tosses = np.repeat([0, 1, 3, 64, 65, 1000], MANY)
    keys = np.arange(len(tosses), dtype=np.uint64)
    found = count_coin_heads(keys, tosses).reshape(6, MANY)
    assert (found[0] == 0).all()
    assert np.bincount(found[2]) / MANY == pytest.approx([1 / 8, 3 / 8, 3 / 8, 1 / 8], abs=0.015)
    for n, counts in zip([1, 3, 64, 65, 1000], found[1:], strict=True):
        assert counts.min() >= 0
        assert counts.max() <= n
        assert counts.mean() == pytest.approx(n / 2, rel=0.03)
        assert counts.var() == pytest.approx(n / 4, rel=0.05)
    alone = count_coin_heads(keys[-3:], tosses[-3:])
    assert alone.tolist() == found[-1, -3:].tolist(), "a key's coin does not depend on the others"


# --- rows by hand -------------------------------------------------------------------------------------------------


def test_next_by_hand(make_shards: Make) -> None:
    shards = make_shards([[2, 3], [4]], words=[0, 3, 4, 6], salient=[1, 5])
    source = SentencePairDataset(
        shards,
        9,
        BERT,
        PAD,
        0,
        "next",
        shuffle=False,
        allow_short=True,
        token_bits=("word_start", "sentence_end", "salient"),
    )
    assert source.num_rows == 1, "the second document is one sentence"
    rows = source.get_rows(np.arange(40))
    assert rows.pair_labels is not None
    true, false = int(np.argmin(rows.pair_labels)), int(np.argmax(rows.pair_labels))
    assert rows.input_ids[true].tolist() == [CLS, 100, 101, SEP, 102, 103, 104, SEP, PAD]
    assert rows.input_ids[false].tolist() == [CLS, 100, 101, SEP, 105, 106, 107, 108, SEP]
    assert rows.document_ids[true].tolist() == [0] * 8 + [-1]
    assert rows.position_ids[true].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert rows.token_type_ids is not None
    assert rows.token_type_ids[true].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0]
    assert rows.token_type_ids[false].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert np.array_equal(rows.maskable, rows.input_ids >= FIRST)
    assert rows.word_start is not None
    assert rows.word_start[true].tolist() == [False, True, False, False, True, True, True, False, False]
    assert rows.sentence_end is not None
    assert rows.sentence_end[false].tolist() == [False, False, True, False, False, False, False, True, False]
    assert rows.salient is not None
    assert rows.salient[true].tolist() == [False, False, True, False, False, False, False, False, False]
    assert rows.salient[false].tolist() == [False, False, True, False, True, False, False, False, False]
    assert (rows.stream_index.tolist(), rows.row_index, rows.epoch) == (
        list(range(40)),
        pytest.approx(0),
        pytest.approx(range(40)),
    )
    dtypes = [
        rows.input_ids.dtype,
        rows.document_ids.dtype,
        rows.position_ids.dtype,
        rows.token_type_ids.dtype,
        rows.pair_labels.dtype,
    ]
    assert dtypes == [np.int64, np.int32, np.int32, np.int32, np.int64]
    assert source.fill_ratio == pytest.approx(8 / 9)


def test_order_by_hand(make_shards: Make) -> None:
    source = SentencePairDataset(make_shards([[2, 3]]), 9, BERT, PAD, 0, "order", allow_short=True)
    rows = source.get_rows(np.arange(40))
    assert rows.pair_labels is not None
    true, false = int(np.argmin(rows.pair_labels)), int(np.argmax(rows.pair_labels))
    assert rows.input_ids[true].tolist() == [CLS, 100, 101, SEP, 102, 103, 104, SEP, PAD]
    assert rows.input_ids[false].tolist() == [CLS, 102, 103, 104, SEP, 100, 101, SEP, PAD]


def test_sides_by_hand(make_shards: Make) -> None:
    shards = make_shards([[5], [3], [7]], splits=[2, -1, 6])
    source = SentencePairDataset(shards, 10, XLM, PAD, 0, "sides", shuffle=False, token_bits=("sentence_end",))
    rows = source.get_rows(np.arange(2))
    assert rows.input_ids.tolist() == [
        [SEP, 100, 101, SEP, SEP, 102, 103, 104, SEP, PAD],
        [SEP, 108, 109, 110, 111, 112, SEP, SEP, 114, SEP],  # 113 is cut from the back of the longer side
    ]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]]
    assert rows.token_type_ids is not None
    assert rows.token_type_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 1, 0], [0] * 8 + [1] * 2]
    assert rows.pair_labels is None
    assert rows.sentence_end is not None
    assert np.flatnonzero(rows.sentence_end[1]).tolist() == [5, 8], "where a text is cut its sentence ends"
    assert source.fill_ratio == pytest.approx((9 + 10) / 20)


# --- laws ---------------------------------------------------------------------------------------------------------


def test_half_of_the_pairs_are_random_and_never_from_the_same_document(running: Shards) -> None:
    source = SentencePairDataset(running, 64, BERT, PAD, 3, "next")
    rows = source.get_rows(np.arange(MANY))
    assert rows.pair_labels is not None
    assert rows.pair_labels.mean() == pytest.approx(0.5, abs=0.01)
    first, second = (documents_of(running, texts(rows, which)) for which in (0, 1))
    assert (first[rows.pair_labels == 1] != second[rows.pair_labels == 1]).all()
    assert (first[rows.pair_labels == 0] == second[rows.pair_labels == 0]).all()


def test_true_pairs_follow_each_other(running: Shards) -> None:
    source = SentencePairDataset(running, 64, BERT, PAD, 3, "next")
    rows = source.get_rows(np.arange(MANY))
    bounds = running.sentence_bounds()
    true = np.flatnonzero(rows.pair_labels == 0)
    a_texts, b_texts = texts(rows, 0), texts(rows, 1)
    whole = 0
    for i in true[:2000]:
        a, b = a_texts[i], b_texts[i]
        cuts = bounds[(bounds > a[-1]) & (bounds <= b[0])]
        assert len(cuts) > 0, "a sentence ends between the two"
        if len(a) + len(b) < 61:  # then nothing was cut
            assert b[0] == a[-1] + 1
            assert np.isin([a[0], b[0], b[-1] + 1], bounds).all()
            whole += 1
    assert whole > 100


def test_no_row_is_longer_than_it_may_be(running: Shards) -> None:
    for kind in ("next", "order"):
        for length in (5, 16, 64):
            rows = SentencePairDataset(running, length, BERT, PAD, 3, kind).get_rows(np.arange(2000))
            assert rows.input_ids.shape == (2000, length)
            for which in (0, 1):
                assert min(map(len, texts(rows, which))) >= 1
            filled = (rows.document_ids >= 0).sum(1)
            assert np.array_equal(rows.input_ids[np.arange(2000), filled - 1], np.full(2000, SEP))
            assert ((rows.input_ids == CLS).sum(1) == 1).all()
            assert ((rows.input_ids == SEP).sum(1) == 2).all()


def test_random_text_begins_with_every_sentence_of_other_documents_equally_often(make_shards: Make) -> None:
    shards = make_shards([[2, 2], [1, 3, 2], [4]])  # sentences at 0, 2 | 4, 5, 8 | 10
    rows = SentencePairDataset(shards, 32, BERT, PAD, 0, "next", allow_short=True).get_rows(np.arange(3 * MANY))
    found = {0: np.zeros(14), 1: np.zeros(14)}
    assert rows.pair_labels is not None
    for a, b, label in zip(texts(rows, 0), texts(rows, 1), rows.pair_labels, strict=True):
        if label:
            found[int(a[0] >= 4)][b[0]] += 1
    for counts, starts in ((found[0], [4, 5, 8, 10]), (found[1], [0, 2, 10])):
        assert np.flatnonzero(counts).tolist() == starts
        assert counts[starts] / counts.sum() == pytest.approx(1 / len(starts), abs=0.02)


def test_random_text_has_whole_sentences_up_to_the_limit(make_shards: Make) -> None:
    shards = make_shards([[2, 1], [3] * 20])
    rows = SentencePairDataset(shards, 13, BERT, PAD, 0, "next").get_rows(np.arange(2000))
    long = [b for a, b in zip(texts(rows, 0), texts(rows, 1), strict=True) if a[0] == 0 and 3 <= b[0] < 52]
    assert len(long) > 100
    # Beside 2 tokens 8 are free: three sentences have 9, of which one token is cut at either end.
    assert {(len(b), int(b[0] % 3)) for b in long} == {(8, 0), (8, 1)}


def test_cuts_fall_on_every_inner_sentence_end(make_shards: Make) -> None:
    shards = make_shards([[1, 2, 3, 4], [5]])
    rows = SentencePairDataset(shards, 32, BERT, PAD, 0, "order", allow_short=True).get_rows(np.arange(MANY))
    starts = np.array([max(a[0], b[0]) for a, b in zip(texts(rows, 0), texts(rows, 1), strict=True)])
    assert np.bincount(starts)[[1, 3, 6]] / MANY == pytest.approx(1 / 3, abs=0.015)


def test_fronts_and_backs_are_cut_equally(make_shards: Make) -> None:
    shards = make_shards([[30, 30], [30, 30]])
    rows = SentencePairDataset(shards, 43, BERT, PAD, 0, "order").get_rows(np.arange(MANY))
    fronts = np.zeros(2)
    for which in (0, 1):
        for text in texts(rows, which):
            assert len(text) == 20
            fronts[which] += text[0] % 30
    assert fronts / MANY == pytest.approx(5, rel=0.02), "half of the ten tokens that each text loses"


def test_swapped_pairs_are_the_true_ones_swapped(running: Shards) -> None:
    rows = SentencePairDataset(running, 64, BERT, PAD, 3, "order").get_rows(np.arange(MANY))
    assert rows.pair_labels is not None
    assert rows.pair_labels.mean() == pytest.approx(0.5, abs=0.01)
    first, second = texts(rows, 0), texts(rows, 1)
    assert np.array_equal(documents_of(running, first), documents_of(running, second))
    later = np.array([b[0] > a[-1] for a, b in zip(first, second, strict=True)])
    assert np.array_equal(later, rows.pair_labels == 0)


def test_an_epoch_has_every_chunk_once(running: Shards) -> None:
    source = SentencePairDataset(running, 64, BERT, PAD, 3, "order")
    rows = source.get_rows(source.num_rows + np.arange(source.num_rows))
    assert rows.row_index is not None
    assert np.array_equal(np.sort(rows.row_index), np.arange(source.num_rows))
    assert rows.epoch is not None
    assert (rows.epoch == 1).all()
    first = source.get_rows(np.arange(source.num_rows))
    assert not np.array_equal(first.row_index, rows.row_index)


@pytest.mark.parametrize("kind", ["next", "order", "sides"])
def test_rows_are_the_same_whoever_asks(make_shards: Make, kind: str) -> None:
    random = np.random.default_rng(1)
    documents = [random.integers(1, 25, size=random.integers(2, 20)).tolist() for _ in range(30)]
    shards = make_shards(documents, splits=[sentences[0] for sentences in documents])
    everything: Any = {"token_bits": ("word_start", "sentence_end")}
    together = SentencePairDataset(shards, 48, BERT, PAD, 5, kind, **everything).get_rows(np.arange(160))
    for processes in (1, 2, 8):
        for rank in range(processes):
            mine = np.arange(160)[rank::processes]
            rows = SentencePairDataset(shards, 48, BERT, PAD, 5, kind, **everything).get_rows(mine)
            for name, array in rows._asdict().items():
                expected = getattr(together, name)
                assert array is None if expected is None else np.array_equal(array, expected[mine]), name
    other = SentencePairDataset(shards, 48, BERT, PAD, 6, kind).get_rows(np.arange(160))
    assert not np.array_equal(other.input_ids, together.input_ids)


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["next", "order"])
def test_single_sentences_make_no_pairs(make_shards: Make, kind: str) -> None:
    with pytest.raises(UserError, match=r"has 2 documents, none with two sentences.*several sentences, or .*mlm"):
        SentencePairDataset(make_shards([[9], [8]]), 8, BERT, PAD, 0, kind)
    with pytest.raises(UserError, match=r"The held-out part of the text has 2 documents"):
        SentencePairDataset(make_shards([[9], [8]], part="held_out"), 8, BERT, PAD, 0, kind)
    with pytest.raises(UserError, match="no two sentences that fit into 5 tokens"):
        SentencePairDataset(make_shards([[9, 8], [8]]), 8, BERT, PAD, 0, kind)


def test_next_needs_two_documents(make_shards: Make) -> None:
    shards = make_shards([[4, 4, 4]])
    with pytest.raises(UserError, match="a single document"):
        SentencePairDataset(shards, 8, BERT, PAD, 0, "next")
    assert SentencePairDataset(shards, 8, BERT, PAD, 0, "order").num_rows == 1


def test_text_without_a_pair_is_reported(make_shards: Make, capsys: pytest.CaptureFixture[str]) -> None:
    SentencePairDataset(make_shards([[5, 5], [10], [3, 2]]), 13, BERT, PAD, 0, "next")
    assert "1 chunk is a single sentence (of 3)" in capsys.readouterr().err
    SentencePairDataset(make_shards([[5, 5], [10], [3, 2]]), 13, BERT, PAD, 0, "next")
    assert "40.0% of the text begins no pair" in capsys.readouterr().err
    SentencePairDataset(make_shards([[5, 5], [3, 2]]), 13, BERT, PAD, 0, "next")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("splits", [None, [-1, -1]])
def test_sides_need_two_sided_documents(make_shards: Make, splits: list[int] | None) -> None:
    with pytest.raises(UserError, match=r"2 documents, none with two sides.*text_a and text_b"):
        SentencePairDataset(make_shards([[4, 4], [8]], splits=splits), 8, BERT, PAD, 0, "sides")


def test_rows_too_short_for_two_texts(make_shards: Make) -> None:
    shards = make_shards([[4, 4], [8]])
    with pytest.raises(UserError, match="no room for two texts"):
        SentencePairDataset(shards, 4, BERT, PAD, 0, "next")
    assert SentencePairDataset(shards, 10, BERT, PAD, 0, "next").num_rows == 1
    with pytest.raises(UserError, match="has 16 tokens, less than one row of 64"):
        SentencePairDataset(shards, 64, BERT, PAD, 0, "next")
