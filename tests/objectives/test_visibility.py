"""Attention masks from the rank of every objective, against masks by hand or by definition."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from scipy import stats

from firth.objectives import (
    CLM,
    IGNORE_INDEX,
    MLM,
    OBJECTIVES,
    Batch,
    BiLM,
    CounterRNG,
    DecoderDenoising,
    EncoderDecoderLM,
    Objective,
    PermutationLM,
    PrefixLM,
    visibility,
)
from firth.tokens import Rows

UNLIKELY = 1e-3
END, CLS, SEP = 1, 3, 4
DOC = np.array([[0, 0, 0, 0, 1, 1, 1, -1], [0, 0, 1, 1, 1, 2, 2, 2]], np.int32)
PLACE = np.array([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 0, 1, 2]])


# --- the small functions ------------------------------------------------------------------------------------------


def test_rank_by_hand() -> None:
    order = np.array([[0, 1, 2, 3]])
    assert visibility.attention_rank(order, 1).tolist() == [[0, 1, 2, 3]], "causal"
    assert visibility.attention_rank(order, 3).tolist() == [[0, 0, 0, 1]], "a prefix of three"
    assert visibility.attention_rank(order, 4).tolist() == [[0, 0, 0, 0]], "full attention"
    assert visibility.attention_rank(np.array([[2, 0, 3, 1]]), 2).tolist() == [[1, 0, 2, 0]], "an order, two of it free"


def test_document_lengths_by_hand() -> None:
    assert visibility.document_lengths(DOC).tolist() == [[4, 4, 4, 4, 3, 3, 3, 1], [2, 2, 3, 3, 3, 3, 3, 3]]
    of = np.array([[0, 1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 1, 1, 1]], bool)
    assert visibility.document_lengths(DOC, of).tolist() == [[2, 2, 2, 2, 1, 1, 1, 0], [2, 2, 0, 0, 0, 3, 3, 3]]


def test_one_draw_for_each_document() -> None:
    u = np.arange(16).reshape(2, 8) / 16
    expected = [[0, 0, 0, 0, 4, 4, 4], [8, 8, 10, 10, 10, 13, 13, 13]]
    found = (visibility.broadcast_document_start(u, DOC) * 16).tolist()
    assert [found[0][:7], found[1]] == expected


def test_random_prefix_by_hand(picture: Callable[..., Rows], written: Callable[..., CounterRNG]) -> None:
    rows = picture("E 10 11 12 E | E 20 E | E 30 31 E")
    # 1 + floor(u * (length - 1)): of five 1 + 2, of three 1, of four 1 + 2.
    draw = written(rows, prefix=[[0.5, 0, 0, 0, 0, 0.3, 0, 0, 0.99]])
    assert visibility.sample_prefix_lengths(rows.document_ids, draw).tolist() == [[3] * 5 + [1] * 3 + [3] * 4]


def test_prefixes_of_all_lengths_are_equally_likely() -> None:
    doc = np.repeat(np.repeat([[0, 1]], 6, 1), 30_000, 0)
    prefix = visibility.sample_prefix_lengths(doc, CounterRNG(1, np.arange(30_000)))
    for position in (0, 6):
        counts = np.bincount(prefix[:, position], minlength=7)
        assert counts[0] == counts[6] == 0, "some context, and some targets"
        assert stats.chisquare(counts[1:6]).pvalue > UNLIKELY
    table = np.bincount(6 * prefix[:, 0] + prefix[:, 6], minlength=36).reshape(6, 6)[1:, 1:]
    assert stats.chi2_contingency(table).pvalue > UNLIKELY, "documents of a row are independent"


def test_random_order_by_hand(picture: Callable[..., Rows], written: Callable[..., CounterRNG]) -> None:
    rows = picture("C 10 11 12 13 S")
    target = np.array([[0, 1, 0, 1, 1, 0]], bool)
    draw = written(rows, order=[[0.0, 0.7, 0.0, 0.2, 0.9, 0.0]])
    assert visibility.sample_permutation_ranks(target, draw).tolist() == [[0, 2, 0, 1, 3, 0]]


def test_every_order_is_equally_likely() -> None:
    target = np.tile([True, False, True, True, True], (48_000, 1))
    rank = visibility.sample_permutation_ranks(target, CounterRNG(2, np.arange(48_000)))
    assert (rank[:, 1] == 0).all()
    orders = {order: i for i, order in enumerate(permutations(range(1, 5)))}
    found = [orders[tuple(row)] for row in rank[:, [0, 2, 3, 4]].tolist()]
    assert stats.chisquare(np.bincount(found, minlength=24)).pvalue > UNLIKELY


def test_the_matrix_by_hand() -> None:
    doc, rank = np.array([0, 0, 0, 1, 1, -1]), np.array([0, 1, 2, 0, 1, 0])
    assert visibility.visibility_matrix(doc, rank).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert visibility.visibility_matrix(doc, rank, strict=True).astype(int).tolist() == [
        [0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert visibility.visibility_matrix(None, np.array([0, 0, 1])).astype(int).tolist() == [
        [1, 1, 0],
        [1, 1, 0],
        [1, 1, 1],
    ]


# --- every objective ----------------------------------------------------------------------------------------------

Sees = Callable[[int, int], bool]


def by_definition(doc: np.ndarray, sees: Sees) -> list[list[int]]:
    """A mask, position by position; documents do not attend to each other."""
    n = len(doc)
    return [[int(doc[i] == doc[j] and sees(i, j)) for j in range(n)] for i in range(n)]


def causal(doc: np.ndarray) -> list[list[int]]:
    return by_definition(doc, lambda i, j: j <= i)


def prefixed(doc: np.ndarray, free: np.ndarray) -> list[list[int]]:
    """Context is visible to the whole document; other positions to later ones and to themselves."""
    return by_definition(doc, lambda i, j: bool(free[j]) or (not free[i] and j <= i))


def seen(batch: Batch, b: int, causal: bool = False) -> list[list[int]]:
    """The rank of a row, or its default: full attention for an encoder, causal for a decoder."""
    default = np.arange(batch.input_ids.shape[1]) if causal else np.zeros(batch.input_ids.shape[1])
    rank = default if batch.attention_rank is None else batch.attention_rank[b]
    return visibility.visibility_matrix(batch.document_ids[b], rank).astype(int).tolist()


Maker = Callable[..., Rows]
Applier = Callable[..., Batch]


def text(batch: Batch, b: int) -> np.ndarray:
    """The row without its padding, whose attention does not matter."""
    return np.flatnonzero(batch.document_ids[b] >= 0)


def same_sight(batch: Batch, b: int, expected: list[list[int]], causal: bool = False) -> bool:
    read = text(batch, b)
    found = np.array(seen(batch, b, causal))
    return bool((found[np.ix_(read, read)] == np.array(expected)[np.ix_(read, read)]).all())


def made(objective: Objective, rows_for: Maker, apply: Applier, length: int = 48) -> Batch:
    return apply(objective, rows_for(objective, 12, length, documents=3, missing=3))


@pytest.mark.parametrize("name", ["mlm", "whole-word", "span", "salient", "static", "rtd", "span-corruption", "bart"])
def test_an_encoder_attends_to_all_of_its_document(name: str, rows_for: Maker, apply: Applier) -> None:
    batch = made(OBJECTIVES[name], rows_for, apply)
    for b in range(12):
        assert same_sight(batch, b, by_definition(batch.document_ids[b], lambda i, j: True))


def test_mlm_forward_and_backward(rows_for: Maker, apply: Applier) -> None:
    forward, backward = (made(MLM(visibility=way), rows_for, apply) for way in ("forward", "backward"))
    for b in range(12):
        assert same_sight(forward, b, causal(forward.document_ids[b]))
        assert same_sight(backward, b, by_definition(backward.document_ids[b], lambda i, j: j >= i))


def test_mlm_prefix(rows_for: Maker, apply: Applier) -> None:
    batch = made(MLM(visibility="prefix"), rows_for, apply)
    for b in range(12):
        for d in range(batch.document_ids[b].max() + 1):
            second = batch.token_type_ids[b][batch.document_ids[b] == d]
            assert not second[0], "a prefix of at least one"
            assert second[-1], "and something after it"
            assert (np.diff(second) >= 0).all()
        assert same_sight(batch, b, prefixed(batch.document_ids[b], batch.token_type_ids[b] == 0))


def test_clm(rows_for: Maker, apply: Applier) -> None:
    batch = made(CLM(), rows_for, apply)
    for b in range(12):
        assert same_sight(batch, b, causal(batch.document_ids[b]), causal=True)


def test_clm_across_documents(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(CLM(), 12, 48, documents=3, missing=3)
    batch = apply(CLM(across_documents=True), rows)
    for b in range(12):
        read = np.flatnonzero(rows.document_ids[b] >= 0)
        expected = [[int(j <= i) for j in read] for i in read]
        assert np.array(seen(batch, b, causal=True))[np.ix_(read, read)].tolist() == expected


def test_prefix_lm(rows_for: Maker, apply: Applier) -> None:
    batch = made(PrefixLM(), rows_for, apply)
    for b in range(12):
        free = np.ones(48, bool)
        for d in range(batch.document_ids[b].max() + 1):
            positions = np.flatnonzero(batch.document_ids[b] == d)
            predicted = positions[batch.labels[b][positions] != IGNORE_INDEX]
            assert predicted.tolist() == list(range(predicted[0], positions[-1])), (
                "from the last position of the prefix on"
            )
            free[predicted + 1] = False
        assert same_sight(batch, b, prefixed(batch.document_ids[b], free))


@pytest.mark.parametrize("prefix", [False, True])
def test_one_stack(prefix: bool, rows_for: Maker, apply: Applier) -> None:
    batch = made(DecoderDenoising(prefix=prefix), rows_for, apply)
    for b in range(12):
        free = np.zeros(batch.input_ids.shape[1], bool)
        for d in range(batch.document_ids[b].max() + 1):
            positions = np.flatnonzero(batch.document_ids[b] == d)
            text_end = np.flatnonzero(batch.input_ids[b][positions] == END)[0]
            free[positions[: text_end + 1]] = True
        expected = prefixed(batch.document_ids[b], free) if prefix else causal(batch.document_ids[b])
        assert same_sight(batch, b, expected, causal=True)


def test_permutation_lm(rows_for: Maker, apply: Applier) -> None:
    batch = made(PermutationLM(), rows_for, apply)
    for b in range(12):
        targets = batch.target_positions[b][batch.labels[b] != IGNORE_INDEX].tolist()
        special = np.isin(batch.input_ids[b], [CLS, SEP]) & (batch.document_ids[b] >= 0)
        ordered = [*targets, *np.flatnonzero(special).tolist()]
        order = {
            position: turn
            for turn, position in enumerate(sorted(ordered, key=lambda position: batch.attention_rank[b, position]))
        }
        assert sorted(batch.attention_rank[b, ordered]) == list(range(1, len(ordered) + 1)), (
            "each has a turn of its own"
        )

        def content(i: int, j: int, order: dict[int, int] = order) -> bool:
            """Context attends to context; a target also to earlier targets and itself."""
            return j not in order or (i in order and order[j] <= order[i])

        def query(i: int, j: int, order: dict[int, int] = order) -> bool:
            """The query stream: the same without the target itself."""
            return j not in order or (i in order and order[j] < order[i])

        assert same_sight(batch, b, by_definition(batch.document_ids[b], content))
        query_mask = visibility.visibility_matrix(batch.document_ids[b], batch.attention_rank[b], strict=True).astype(
            int
        )[targets]
        assert query_mask.tolist() == np.array(by_definition(batch.document_ids[b], query))[targets].tolist()


def test_bilm_reads_each_way_once(rows_for: Maker, apply: Applier) -> None:
    batch = made(BiLM(), rows_for, apply)
    for b in range(12):
        both = [
            visibility.visibility_matrix(batch.document_ids[b], rank).astype(int).tolist()
            for rank in batch.attention_rank[b]
        ]
        assert both[0] == causal(batch.document_ids[b])
        assert both[1] == by_definition(batch.document_ids[b], lambda i, j: j >= i)
        for position in text(batch, b):  # no position attends to its own label
            for way, step in ((0, 1), (1, -1)):
                if batch.labels[b, way, position] != IGNORE_INDEX:
                    assert batch.labels[b, way, position] == batch.input_ids[b, position + step]
                    assert not both[way][position][position + step]


@pytest.mark.parametrize("name", ["span-corruption", "salient-spans", "bart", "encoder-decoder-lm", "denoisers"])
def test_a_decoder_reads_its_own_document(name: str, rows_for: Maker, apply: Applier) -> None:
    """Text ids of a document are one number modulo the number of documents, so that each token says where it is of."""
    objective = OBJECTIVES[name]
    rows = rows_for(objective, 12, 48, documents=3, missing=3)
    tokens = np.where(rows.maskable, rows.input_ids // 3 * 3 - 3 + rows.document_ids, rows.input_ids)
    rows = rows._replace(input_ids=np.where(rows.maskable & (tokens < 7), 21 + rows.document_ids, tokens))
    batch = apply(objective, rows)
    for b in range(12):
        for side, doc in (
            (batch.input_ids[b], batch.document_ids[b]),
            (batch.labels[b], batch.decoder_document_ids[b]),
        ):
            is_text = (side >= 7) & (side < 900)
            assert (side[is_text] % 3 == doc[is_text]).all()
        cross = batch.decoder_document_ids[b][:, None] == batch.document_ids[b][None, :]
        assert cross.any(1).all(), "every query has a key"


def test_unilm_mixes_four_visibilities(rows_for: Maker, apply: Applier) -> None:
    unilm = OBJECTIVES["unilm"]
    rows = rows_for(unilm, 64, 32, documents=2)
    batch = apply(unilm, rows)
    parts = unilm.sample_parts(CounterRNG(1, rows.stream_index, rows.stream_index // 2))  # type: ignore[union-attr]
    for b in range(64):
        expected = [
            by_definition(batch.document_ids[b], lambda i, j: True),
            prefixed(batch.document_ids[b], batch.token_type_ids[b] == 0),
            causal(batch.document_ids[b]),
            by_definition(batch.document_ids[b], lambda i, j: j >= i),
        ][parts[b]]
        assert same_sight(batch, b, expected)


def test_encoder_decoder_lm_divides_a_document_in_two(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(EncoderDecoderLM(), 12, 48, documents=3, missing=3)
    batch = apply(EncoderDecoderLM(), rows)
    for b in range(12):
        for d in range(rows.document_ids[b].max() + 1):
            *read, end = batch.input_ids[b][batch.document_ids[b] == d].tolist()
            answer = batch.labels[b][(batch.decoder_document_ids[b] == d) & (batch.labels[b] != IGNORE_INDEX)].tolist()
            assert end == END
            assert read
            assert answer
            assert read + answer == rows.input_ids[b][rows.document_ids[b] == d].tolist()
