"""Words as the ids of their characters."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from firth.tokens.characters import BOS_CHAR, encode_word_chars, sentence_boundary_chars


def test_a_word_between_its_marks() -> None:
    found = encode_word_chars(["ab", "é", ""])
    assert found.char_ids.shape == (3, 50)
    assert found.char_ids[0].tolist() == [258, 97, 98, 259] + [260] * 46
    assert found.char_ids[1].tolist() == [258, 0xC3, 0xA9, 259] + [260] * 46
    assert found.char_ids[2].tolist() == [258, 259] + [260] * 48
    assert found.num_truncated == 0


def test_long_words_are_cut_and_counted() -> None:
    found = encode_word_chars(["a" * 48, "b" * 49])
    assert found.num_truncated == 1
    assert found.char_ids[0].tolist() == [258] + [97] * 48 + [259]
    assert found.char_ids[1].tolist() == [258] + [98] * 48 + [259]


def test_the_edges_of_a_sentence_look_like_words() -> None:
    assert sentence_boundary_chars(BOS_CHAR).tolist() == [258, 256, 259] + [260] * 47


def test_no_words() -> None:
    assert encode_word_chars([]).char_ids.shape == (0, 50)


@given(st.lists(st.text(max_size=60)))
def test_the_same_as_one_word_at_a_time(words: list[str]) -> None:
    want = np.full((len(words), 50), 260)
    for row, word in zip(want, words, strict=True):
        spelled = list(word.encode())[:48]
        row[: len(spelled) + 2] = [258, *spelled, 259]
    assert (encode_word_chars(words).char_ids == want).all()
