"""How texts are framed in each architecture, and what happens to those that are too long."""

from __future__ import annotations

import pytest
from tasks.small import parts

from firth.errors import UserError
from firth.tasks.form import DELIMITER, EXTRACT, Form, token_at

A, B = [300, 301], [302, 303, 304]


def frame(family: str, marked: bool = False) -> tuple[Form, dict[str, int]]:
    config, tokenizer = parts(family)
    if marked:
        tokenizer = tokenizer.with_tokens((DELIMITER, EXTRACT))
    ids = {name: tokenizer.backend.token_to_id(name) for name in (DELIMITER, EXTRACT)}
    roles = {role: getattr(tokenizer.vocab, role) for role in ("cls", "sep", "bos", "eos")}
    return Form(tokenizer, config, 16), ids | roles


def test_bert_has_segments() -> None:
    form, ids = frame("bert")
    sheet = form.frame(A, B)
    assert sheet.ids == [ids["cls"], *A, ids["sep"], *B, ids["sep"]]
    assert sheet.segment == [0] * 4 + [1] * 4
    assert sheet.asked == (0,)
    assert form.frame(A).ids == [ids["cls"], *A, ids["sep"]]
    assert form.segments


def test_roberta_and_bart_have_two_separators_and_no_segments() -> None:
    for family, asked in (("roberta", 0), ("bart", 8)):
        form, ids = frame(family)
        sheet = form.frame(A, B)
        assert sheet.ids == [ids["cls"], *A, ids["sep"], ids["sep"], *B, ids["sep"]]
        assert sheet.asked == (asked,)
        assert not form.segments


def test_xlnet_has_its_class_token_at_the_end() -> None:
    form, ids = frame("xlnet")
    sheet = form.frame(A, B)
    assert sheet.ids == [*A, ids["sep"], *B, ids["sep"], ids["cls"]]
    assert sheet.segment == [0] * 3 + [1] * 4 + [2]
    assert sheet.asked == (7,)


def test_a_decoder_has_a_delimiter_and_an_extract_token() -> None:
    form, ids = frame("gpt2", marked=True)
    sheet = form.frame(A, B)
    assert sheet.ids == [ids["bos"], *A, ids[DELIMITER], *B, ids[EXTRACT]]
    assert sheet.asked == (7,)
    plain, ids = frame("gpt2")  # a published classifier that was made without them
    assert plain.frame(A).ids == [ids["bos"], *A, ids["eos"]]


def test_of_two_texts_the_longer_one_is_cut_first() -> None:
    form, _ = frame("bert")  # 13 tokens for two texts
    assert form.room(2) == 13
    a, b = form.fit_two(list(range(20)), list(range(100, 104)))
    assert (a, b) == (list(range(9)), list(range(100, 104)))
    a, b = form.fit_two(list(range(20)), list(range(100, 120)))
    assert (len(a), len(b)) == (7, 6)
    assert form.cut == 2
    form.fit_two([1] * 6, [2] * 7)
    assert form.cut == 2
    form.fit([5] * 15)
    assert form.say_cut() == ["3 texts were longer than 16 tokens, and cut."]
    assert form.fit([5] * 15).size == 16


def test_no_room() -> None:
    config, tokenizer = parts("roberta")
    with pytest.raises(UserError, match="no room"):
        Form(tokenizer, config, 5).frame([1] * Form(tokenizer, config, 5).room(2))


def test_token_at() -> None:
    offsets = [(0, 3), (3, 5), (6, 9)]
    assert [token_at(offsets, c) for c in (0, 2, 3, 5, 6, 8, 40)] == [0, 0, 1, 2, 2, 2, 2]
