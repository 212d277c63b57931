"""Every objective: answers by hand, exact shapes, the published figures, and nothing lost on the way."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firth.errors import UserError
from firth.objectives import CLM, DEFAULT, IGNORED, MLM, Batch, Draw, Objective, SpanCorruption
from firth.tokens import Frame, Rows, RowSource, Shards, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
TEXT = 500  # ids from here on are text, 40,000 of them
SENTINELS = tuple(range(TEXT - 1, 99, -1))
SENTINEL = np.zeros(TEXT + 40_000, bool)
SENTINEL[list(SENTINELS)] = True


def vocabulary(**roles: Any) -> Vocabulary:
    special = (PAD, END, UNK, CLS, SEP, MASK, BOS, *sorted(SENTINELS))
    known: dict[str, Any] = dict(pad=PAD, unk=UNK, bos=None, eos=END, cls=CLS, sep=SEP, mask=MASK, sentinels=SENTINELS)
    return Vocabulary(size=len(SENTINEL), special=special, **(known | roles))


VOCAB = vocabulary()


def make_rows(layout: list[list[int]], width: int, frame: Frame) -> Rows:
    """Rows of documents with so many tokens of text; each token of a batch is another one."""
    shape = (len(layout), width)
    tokens, doc, position = np.full(shape, PAD), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    real, word = np.zeros(shape, bool), TEXT
    before = len(frame.before)
    for b, lengths in enumerate(layout):
        at = 0
        for d, n in enumerate(lengths):
            end = at + n + frame.size
            tokens[b, at:end] = [*frame.before, *range(word, word + n), *frame.after]
            doc[b, at:end], position[b, at:end] = d, np.arange(end - at)
            real[b, at + before : at + before + n] = True
            at, word = end, word + n
        assert at <= width
    assert word <= VOCAB.size
    return Rows(tokens, doc, position, real, np.arange(len(layout)))


def divide(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """A total cut into parts of at least 1, at random."""
    edges = np.sort(rng.choice(np.arange(1, total), parts - 1, replace=False)).tolist()
    return [b - a for a, b in pairwise([0, *edges, total])]


def apply(objective: Objective, rows: Rows, seed: int = 1, vocab: Vocabulary = VOCAB) -> Batch:
    return objective(rows, Draw(seed, rows.index), vocab)


# --- CLM ----------------------------------------------------------------------------------------------------------


def test_clm_by_hand() -> None:
    # Two documents share the first row. The second row's document was cut, so it has no end.
    rows = Rows(
        tokens=np.array([[END, 10, 11, END, END, 20, END, PAD, PAD], [30, 31, 32, 33, 34, 35, 36, 37, 38]]),
        doc=np.array([[0, 0, 0, 0, 1, 1, 1, -1, -1], [0] * 9], np.int32),
        position=np.array([[0, 1, 2, 3, 0, 1, 2, 0, 0], list(range(9))], np.int32),
        real=np.array([[0, 1, 1, 0, 0, 1, 0, 0, 0], [1] * 9], bool),
        index=np.arange(2),
    )
    batch = apply(CLM(), rows)
    x = IGNORED
    assert batch.labels.tolist() == [[10, 11, END, x, 20, END, x, x, x], [31, 32, 33, 34, 35, 36, 37, 38, x]]
    assert batch.tokens is rows.tokens
    assert batch.doc is rows.doc
    assert batch.position is rows.position
    assert batch.asked is None
    assert batch.num_answers == 5 + 8
    assert batch.num_tokens == 7 + 9


def test_clm_begins_and_ends_a_document_with_what_the_tokenizer_has() -> None:
    assert CLM().frame(vocabulary(bos=None)) == Frame((END,), (END,), edges_only=True)
    assert CLM().frame(vocabulary(bos=BOS)) == Frame((BOS,), (END,), edges_only=True)


# --- MLM ----------------------------------------------------------------------------------------------------------

BERT = Frame((CLS,), (SEP,))


def test_mlm_asks_its_share_of_the_text_and_gives_the_right_answers() -> None:
    assert MLM().frame(VOCAB) == BERT
    rows = make_rows([[126], [62, 62], [40, 20, 1], [3]], 128, BERT)
    batch = apply(MLM(), rows)
    assert batch.asked.shape == batch.labels.shape == (4, 19)
    used = batch.labels != IGNORED
    # 15% of 126, 124, 61 and 3 tokens of text, rounded, and at least one.
    assert used.sum(1).tolist() == [19, 19, 9, 1]
    assert (np.take_along_axis(rows.tokens, batch.asked, 1)[used] == batch.labels[used]).all()
    assert np.take_along_axis(rows.real, batch.asked, 1)[used].all()
    changed = batch.tokens != rows.tokens
    assert rows.real[changed].all()
    assert 0 < changed.sum() <= used.sum()
    assert batch.doc is rows.doc
    assert batch.position is rows.position


def test_mlm_with_other_shares() -> None:
    rows = make_rows([[126]] * 200, 128, BERT)
    batch = apply(MLM(rate=0.3, mask=1.0, random=0.0), rows)
    assert ((batch.tokens == MASK).sum(1) == 38).all()  # 30% of 126 is 37.8
    assert ((batch.tokens != rows.tokens).sum(1) == 38).all()


# --- span corruption: the figures ---------------------------------------------------------------------------------

T5 = Frame((), (END,))


def test_the_published_lengths() -> None:
    # 568 tokens of text and the end: 85 are noise in 28 spans, 483 + 28 + 1 are read, 85 + 28 + 1 are written.
    objective = SpanCorruption()
    assert objective.frame(VOCAB) == T5
    assert objective.source_length(512) == 569
    assert objective.lengths(569) == (512, 114)
    batch = apply(objective, make_rows([[568]] * 3, 569, T5))
    assert batch.tokens.shape == (3, 512)
    assert batch.labels.shape == batch.decoder_tokens.shape == (3, 114)
    assert SENTINEL[batch.tokens].sum(1).tolist() == [28] * 3


def test_counts_by_hand() -> None:
    noise, spans = SpanCorruption().counts(np.array([-1, 0, 1, 2, 10, 100, 568]))
    assert noise.tolist() == [0, 0, 0, 1, 2, 15, 85]  # 1.5 is rounded up
    assert spans.tolist() == [0, 0, 0, 1, 1, 5, 28]
    # Some text must remain, and each span has text before it.
    noise, spans = SpanCorruption(rate=0.9, mean_span=3).counts(np.array([2, 4, 100]))
    assert noise.tolist() == [1, 3, 90]
    assert spans.tolist() == [1, 1, 10]


def test_further_documents_cost_noise_and_spans_where_the_answer_is_full() -> None:
    filled, docs = np.array([569, 569, 569, 569, 560, 2]), np.array([1, 2, 3, 28, 2, 1])
    noise, spans = SpanCorruption().shares(filled, docs, 114)
    assert noise.tolist() == [85, 84, 84, 71, 84, 0]
    assert spans.tolist() == [28, 27, 27, 14, 28, 0]


@pytest.mark.parametrize(("rate", "mean_span"), [(0.15, 3.0), (0.15, 1.0), (0.5, 3.0), (0.5, 32.0), (0.9, 2.0)])
def test_a_source_row_is_as_long_as_the_encoder_allows(rate: float, mean_span: float) -> None:
    objective = SpanCorruption(rate, mean_span)
    for length in (3, 16, 128, 513):
        source = objective.source_length(length)
        assert objective.lengths(source)[0] <= length < objective.lengths(source + 1)[0]
        assert source >= length


def test_a_row_takes_many_documents_by_default_and_always_one() -> None:
    assert SpanCorruption().max_documents(569) == 28
    assert SpanCorruption().max_documents(2) == 1
    assert SpanCorruption(0.15, 100.0).max_documents(100) == 1


# --- span corruption: laws ----------------------------------------------------------------------------------------


def rebuild(batch: Batch, b: int) -> list[list[int]]:
    """The documents of a row, put together from what is read and what is answered."""
    documents = []
    for d in range(batch.doc[b].max() + 1):
        read = batch.tokens[b][batch.doc[b] == d].tolist()
        answer = batch.labels[b][(batch.decoder_doc[b] == d) & (batch.labels[b] != IGNORED)].tolist()
        assert answer[-1] == END
        spans: dict[int, list[int]] = {}
        for token in answer[:-1]:
            if SENTINEL[token]:
                span = spans[token] = []
            else:
                span.append(token)
        assert list(spans) == [t for t in read if SENTINEL[t]] == list(SENTINELS[: len(spans)])
        assert all(spans.values()), "no span is empty"
        documents.append([t for token in read for t in spans.get(token, [token])])
    return documents


def check(objective: SpanCorruption, layout: list[list[int]], width: int, seed: int = 1) -> Batch:
    """What must hold for every batch."""
    rows = make_rows(layout, width, T5)
    batch = apply(objective, rows, seed)
    encoder, decoder = objective.lengths(width)
    assert batch.tokens.shape == batch.doc.shape == batch.position.shape == (len(layout), encoder)
    assert batch.labels.shape == batch.decoder_tokens.shape == (len(layout), decoder)
    assert batch.decoder_doc.shape == batch.decoder_position.shape == (len(layout), decoder)
    for b, lengths in enumerate(layout):
        source = [rows.tokens[b][rows.doc[b] == d].tolist() for d in range(len(lengths))]
        assert rebuild(batch, b) == source

        asked = batch.labels[b] != IGNORED
        for tokens, doc, position in (
            (batch.tokens[b][batch.doc[b] >= 0], batch.doc[b][batch.doc[b] >= 0], batch.position[b]),
            (batch.labels[b][asked], batch.decoder_doc[b][asked], batch.decoder_position[b]),
        ):
            sizes = np.bincount(doc, minlength=len(lengths))
            assert (np.diff(doc) >= 0).all(), "documents stay in order"
            assert position[: len(doc)].tolist() == [p for n in sizes for p in range(n)]
            assert (tokens[np.cumsum(sizes) - 1] == END).all()
        used = int((batch.doc[b] >= 0).sum())
        assert (batch.doc[b][:used] >= 0).all(), "padding comes last"
        assert (batch.tokens[b][used:] == PAD).all()
        assert (batch.position[b][used:] == 0).all()

        # The decoder reads its own answer one place later, and each document begins anew.
        assert asked[: asked.sum()].all(), "padding comes last"
        for d in range(len(lengths)):
            mine = asked & (batch.decoder_doc[b] == d)
            assert batch.decoder_tokens[b][mine].tolist() == [PAD, *batch.labels[b][mine][:-1].tolist()]
        assert np.isin(batch.decoder_doc[b], batch.doc[b][:used]).all(), "whatever the decoder reads sees some text"
    return batch


def full_rows(count: int, width: int, most: int, seed: int = 0) -> list[list[int]]:
    """Rows without padding, of 1, 2, 3 ... `most` documents."""
    rng = np.random.default_rng(seed)
    return [[1 + n for n in divide(width - 2 * docs, docs, rng)] for docs in (i % most + 1 for i in range(count))]


def test_one_document_to_a_row() -> None:
    # 250 rows, 142,000 tokens of text.
    objective = SpanCorruption()
    for first in range(0, 250, 50):
        batch = check(objective, [[568]] * 50, 569, seed=first)
        assert (batch.doc == 0).all()
        assert batch.num_answers == 50 * 114
        assert (SENTINEL[batch.tokens].sum(1) == 28).all()
        written = (batch.labels >= TEXT).sum(1)
        assert (written == 85).all()  # 15% of 568, in spans of 85 / 28 = 3.04 tokens
        assert (batch.tokens[:, 0] >= TEXT).all(), "text comes first"
        assert SENTINEL[batch.tokens[:, -2]].all(), "noise comes last"


@pytest.mark.parametrize(("rate", "mean_span"), [(0.15, 3.0), (0.15, 8.0), (0.3, 3.0)])
@pytest.mark.parametrize("length", [128, 512])
def test_full_rows_have_no_padding_however_many_documents_they_hold(rate: float, mean_span: float, length: int) -> None:
    objective = SpanCorruption(rate, mean_span)
    width = objective.source_length(length)
    most = objective.max_documents(width)
    batch = check(objective, full_rows(56, width, most), width)
    assert batch.tokens.shape[1] == length
    assert (batch.doc >= 0).all()
    docs = batch.doc.max(1) + 1
    unused = (batch.labels == IGNORED).sum(1)
    assert (unused == (docs - 1) % 2).all()
    # Two further documents cost one token of noise and one span.
    noise, spans = objective.counts(np.asarray(width - 1))
    assert ((batch.labels >= TEXT).sum(1) == noise - docs // 2).all()
    assert (SENTINEL[batch.labels].sum(1) == spans - docs // 2).all()


def test_text_comes_first_and_noise_last_in_each_document() -> None:
    batch = check(SpanCorruption(), full_rows(70, 142, 7), 142)
    for tokens, doc in zip(batch.tokens, batch.doc, strict=True):
        for d in range(doc.max() + 1):
            *read, end = tokens[doc == d]
            assert end == END
            assert read[0] >= TEXT
            assert SENTINEL[read[-1]] or not SENTINEL[read].any()


def test_the_share_of_noise_over_packed_rows() -> None:
    # Rows of 1 to 4 documents: 0, 1, 1 and 2 tokens and spans less than the 85 and 28 of a row of one document.
    noise = spans = text = 0
    for seed in range(6):
        layout = full_rows(40, 569, 4, seed)
        batch = check(SpanCorruption(), layout, 569, seed)
        text += sum(map(sum, layout))
        noise += int((batch.labels >= TEXT).sum())
        spans += int(SENTINEL[batch.tokens].sum())
    assert text > 130_000
    assert noise == 60 * (85 + 84 + 84 + 83)
    assert spans == 60 * (28 + 27 + 27 + 26)
    assert noise / text == pytest.approx(0.15, abs=0.003)
    assert noise / spans == pytest.approx(3.0, abs=0.15)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_nothing_overflows_and_nothing_is_lost(data: st.DataObject) -> None:
    rate = data.draw(st.one_of(st.sampled_from([0.15, 0.5]), st.floats(0.01, 0.95)), "rate")
    mean_span = data.draw(st.one_of(st.sampled_from([1.0, 3.0, 32.0]), st.floats(1, 40)), "mean_span")
    objective = SpanCorruption(rate, mean_span)
    width = objective.source_length(data.draw(st.integers(3, 160), "length"))
    most = min(objective.max_documents(width), width // 2)
    layout = []
    for _ in range(data.draw(st.integers(1, 4), "rows")):
        docs = data.draw(st.one_of(st.just(most), st.integers(1, most)), "docs")
        filled = data.draw(st.one_of(st.just(width), st.integers(2 * docs, width)), "filled")
        weights = data.draw(st.lists(st.sampled_from([0, 0, 1, 1, 9]), min_size=docs, max_size=docs), "weights")
        spare = filled - 2 * docs  # beyond one token of text and the end
        lengths = [1 + spare * w // max(sum(weights), 1) for w in weights]
        lengths[-1] += spare - (sum(lengths) - docs)
        layout.append(lengths)
    check(objective, layout, width, seed=data.draw(st.integers(0, 2**32), "seed"))


def test_rows_with_hardly_any_text() -> None:
    # One token cannot be hidden and still have text before it: only the end is asked.
    batch = check(SpanCorruption(), [[1], [1, 1, 1], [2], [1, 2, 1]], 142)
    assert batch.num_answers == 1 + 3 + 3 + 5


# --- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [CLM(), MLM(), SpanCorruption()])
def test_a_row_is_the_same_in_every_batch(objective: Objective) -> None:
    frame = objective.frame(VOCAB)
    width = objective.source_length(64)
    rows = make_rows([[60], [20, 20, 9], [1], [30, 7], [5, 50], [12, 12, 12]], width, frame)
    together = apply(objective, rows)
    backwards = apply(objective, Rows(*(field[::-1] for field in rows)))
    for i in range(6):
        alone = apply(objective, Rows(*(field[i : i + 1] for field in rows)))
        for field, one, back in zip(together, alone, backwards, strict=True):
            if field is not None:
                assert (field[i] == one[0]).all()
                assert (field[i] == back[-1 - i]).all()


@pytest.mark.parametrize("objective", [MLM(), SpanCorruption()])
def test_another_seed_and_another_place_in_the_stream_are_other_noise(objective: Objective) -> None:
    rows = make_rows([[60]], objective.source_length(64), objective.frame(VOCAB))
    first = apply(objective, rows)
    assert (apply(objective, rows).tokens == first.tokens).all()
    assert (apply(objective, rows, seed=2).tokens != first.tokens).any()
    assert (apply(objective, rows._replace(index=np.array([1]))).tokens != first.tokens).any()


class FakeShards(Shards):
    """Documents of given lengths; every token is another one."""

    def __init__(self, folder: Path, lengths: list[int]) -> None:
        self.folder = folder
        self.offsets = np.cumsum([0, *lengths])
        self.tokens = np.arange(TEXT, TEXT + self.num_tokens).astype(np.uint16)  # type: ignore[assignment]

    fingerprint = "fake"  # type: ignore[assignment]


@pytest.mark.parametrize("longest", [4, 30, 600])
@pytest.mark.parametrize("objective", [CLM(), MLM(), SpanCorruption(), SpanCorruption(0.5, 3.0)])
def test_real_rows_have_every_token_once(tmp_path: Path, objective: Objective, longest: int) -> None:
    lengths = np.random.default_rng(0).integers(1, longest + 1, size=6000 // longest + 20).tolist()
    width = objective.source_length(64)
    most = objective.max_documents(width)
    source = RowSource(
        FakeShards(tmp_path, lengths), width, objective.frame(VOCAB), PAD, seed=1, max_documents=most, allow_short=True
    )
    rows = source.rows(np.arange(source.num_rows))
    batch = apply(objective, rows)
    if isinstance(objective, SpanCorruption):
        found = np.concatenate([batch.tokens.ravel(), batch.labels.ravel()])
    elif isinstance(objective, MLM):
        found = batch.tokens.copy()
        row, slot = np.nonzero(batch.labels != IGNORED)
        found[row, batch.asked[row, slot]] = batch.labels[row, slot]
    else:
        found = batch.tokens
    assert np.sort(found[found >= TEXT]).tolist() == list(range(TEXT, TEXT + sum(lengths)))


def test_each_shape_has_an_objective_that_knows_it() -> None:
    assert set(DEFAULT) == {"encoder", "decoder", "encoder-decoder"}
    assert all(shape in objective.shapes for shape, objective in DEFAULT.items())


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 15.0, float("nan")])
@pytest.mark.parametrize("objective", [MLM, SpanCorruption])
def test_a_rate_is_a_share(objective: type[MLM] | type[SpanCorruption], rate: float) -> None:
    with pytest.raises(UserError, match=r"objective\.rate is .*must lie between 0 and 1"):
        objective(rate=rate)


@pytest.mark.parametrize("shares", [(-0.1, 0.1), (0.8, -0.1), (0.8, 0.3), (float("nan"), 0.1)])
def test_the_fates_are_shares_of_one_whole(shares: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"objective\.mask and objective\.random"):
        MLM(mask=shares[0], random=shares[1])
    MLM(mask=0.9, random=0.1)


@pytest.mark.parametrize("mean_span", [0.9, 0.0, -3.0, float("nan")])
def test_a_span_has_at_least_one_token(mean_span: float) -> None:
    with pytest.raises(UserError, match=r"objective\.mean_span"):
        SpanCorruption(mean_span=mean_span)


@pytest.mark.parametrize(
    ("objective", "missing", "named"),
    [
        (CLM(), "eos", "end-of-text"),
        (MLM(), "mask", "mask token"),
        (MLM(), "cls", "CLS"),
        (MLM(), "sep", "SEP"),
        (SpanCorruption(), "eos", "end token"),
    ],
)
def test_a_tokenizer_without_the_token(objective: Objective, missing: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        objective.frame(vocabulary(**{missing: None}))


def test_a_tokenizer_without_sentinels() -> None:
    with pytest.raises(UserError, match="sentinel"):
        SpanCorruption().frame(vocabulary(sentinels=()))


def test_more_spans_than_sentinels() -> None:
    rows = make_rows([[100]], 101, T5)  # five spans
    apply(SpanCorruption(), rows, vocab=vocabulary(sentinels=SENTINELS[:5]))
    with pytest.raises(UserError, match="5 spans, and the tokenizer has 4 sentinels"):
        apply(SpanCorruption(), rows, vocab=vocabulary(sentinels=SENTINELS[:4]))
    with pytest.raises(UserError, match="5 spans"):  # at once, not when the first long document comes
        apply(SpanCorruption(), make_rows([[10]], 101, T5), vocab=vocabulary(sentinels=SENTINELS[:4]))
