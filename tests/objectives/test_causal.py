"""CLM, SequenceAutoencoder, PrefixLM, BiLM and PermutationLM: inputs, labels and attention ranks by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from firth.core.errors import UserError
from firth.objectives import CLM, IGNORE_INDEX, OBJECTIVES, Batch, BiLM, CounterRNG, PermutationLM, PrefixLM
from firth.objectives.visibility import visibility_matrix
from firth.tokens import Rows, SequenceTemplate, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
S0, S1 = 999, 998
x = IGNORE_INDEX
CPU = torch.device("cpu")

Picture = Callable[..., Rows]
Writer = Callable[..., CounterRNG]
Maker = Callable[..., Rows]
Applier = Callable[..., Batch]
Words_ = Callable[..., Vocabulary]


def test_an_autoencoder_writes_each_text_after_it_has_read_it(
    picture: Picture, written: Writer, vocab: Vocabulary
) -> None:
    """Dai & Le 2015, figure 1."""
    rows = picture("10 11 E | 20 E", "30 E", width=6)
    batch = OBJECTIVES["autoencoder"](rows, written(rows), vocab)
    assert batch.input_ids.tolist() == [
        [10, 11, END, 10, 11, 20, END, 20, PAD, PAD, PAD, PAD],
        [30, END, 30, *[PAD] * 9],
    ]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, -1, -1, -1, -1], [0, 0, 0, *[-1] * 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 0, 0], [0, 1, 2, *[0] * 9]]
    assert batch.target_positions.tolist() == [[2, 3, 4, 6, 7, 0], [1, 2, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[10, 11, END, 20, END, x], [30, END, x, x, x, x]]
    assert OBJECTIVES["autoencoder"].source_length(13) == 6


def test_clm_by_hand(picture: Picture, apply: Applier) -> None:
    # Two documents share the first row. The second row's document was cut, so it has no end.
    rows = picture("E 10 11 E | E 20 E", "30 31 32 33 34 35 36 37 38", width=9)
    batch = apply(CLM(), rows)
    assert batch.labels.tolist() == [[10, 11, END, x, 20, END, x, x, x], [31, 32, 33, 34, 35, 36, 37, 38, x]]
    assert batch.input_ids is rows.input_ids
    assert batch.document_ids is rows.document_ids
    assert batch.position_ids is rows.position_ids
    assert batch.target_positions is None
    assert batch.attention_rank is None
    assert batch.num_targets == 5 + 8
    assert batch.num_tokens == 7 + 9


def test_clm_across_documents(picture: Picture, apply: Applier) -> None:
    rows = picture("E 10 11 E | E 20 E", width=9)
    batch = apply(CLM(across_documents=True), rows)
    assert batch.labels.tolist() == [[10, 11, END, END, 20, END, x, x, x]]
    assert batch.document_ids.tolist() == [[0] * 7 + [-1] * 2]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 0]]
    assert batch.input_ids is rows.input_ids


def test_clm_begins_and_ends_a_document_with_what_the_tokenizer_has(vocabulary: Words_) -> None:
    assert CLM().build_template(vocabulary(bos=None)) == SequenceTemplate((END,), (END,), document_edges_only=True)
    assert CLM().build_template(vocabulary(bos=BOS)) == SequenceTemplate((BOS,), (END,), document_edges_only=True)


def test_prefix_lm_by_hand(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("E 10 11 12 E | E 20 E", width=9)
    # The first prefix is three long, E 10 11; the second one, E.
    batch = PrefixLM()(rows, written(rows, prefix=[[0.5, 0, 0, 0, 0, 0.1]]), vocab)
    assert batch.labels.tolist() == [[x, x, 12, END, x, 20, END, x, x]]
    assert batch.attention_rank[0, :8].tolist() == [0, 0, 0, 1, 2, 0, 1, 2]
    assert batch.input_ids is rows.input_ids


def test_bilm_by_hand(picture: Picture, apply: Applier) -> None:
    rows = picture("C 10 11 S | C 20 S", width=7)
    batch = apply(BiLM(), rows)
    assert batch.labels.tolist() == [
        [
            [10, 11, SEP, x, 20, SEP, x],
            [x, CLS, 10, 11, x, CLS, 20],
        ]
    ]
    assert batch.attention_rank.tolist() == [[[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0]]]
    assert batch.input_ids.shape == (1, 7)
    assert batch.num_targets == 10


def test_bilm_has_no_labels_in_padding(picture: Picture, apply: Applier) -> None:
    batch = apply(BiLM(), picture("C 10 S", width=5))
    assert batch.labels.tolist() == [[[10, SEP, x, x, x], [x, CLS, 10, x, x]]]


def test_permutation_lm_by_hand(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("10 11 12 13 14 15 16 17 S C")
    # A quarter: of the first four tokens the second, of the next four the first; the last is predicted first. [SEP] has
    # its turn between them, [CLS] comes last.
    draw = written(
        rows, span_lengths=[[0, 0]], span_places=[[0.3, 0.0]], order=[[0, 0.9, 0, 0, 0.2, 0, 0, 0, 0.5, 0.95]]
    )
    batch = PermutationLM(share=0.25, max_span_length=1)(rows, draw, vocab)
    assert batch.input_ids is rows.input_ids, "everything is read as it is"
    assert batch.target_positions.tolist() == [[1, 4, 0, 0, 0, 0, 0, 0]]  # room for eight
    assert batch.labels.tolist() == [[11, 14, x, x, x, x, x, x]]
    assert batch.attention_rank.tolist() == [[0, 3, 0, 0, 1, 0, 0, 0, 2, 4]]


def test_the_memory_of_a_stream_never_holds_the_next_targets(picture: Picture, vocab: Vocabulary) -> None:
    """XLNet's `data_utils.py`: the reused half attends to nothing after it; the other half attends to all of it."""
    row = picture(" ".join(str(10 + i) for i in range(13)) + " S C E")
    rows = row._replace(reset_state=np.array([True]))
    packed, batch = (
        PermutationLM(share=0.5, max_span_length=2)(r, CounterRNG(0, np.arange(1)), vocab) for r in (row, rows)
    )
    assert (batch.target_positions == packed.target_positions).all()
    for strict in (False, True):  # content stream, query stream
        attends, same = (visibility_matrix(None, b.attention_rank[0], strict) for b in (batch, packed))
        assert not attends[:8, 8:].any()
        assert attends[8:, :8].all()
        assert (attends[:8, :8] == same[:8, :8]).all(), "a permutation of each half"
        assert strict or (attends[8:, 8:] == same[8:, 8:]).all()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(UserError, match=r"objective\.share is .*must lie between 0 and 1"):
        PermutationLM(share=share)
