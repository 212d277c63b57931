"""How texts are framed in each architecture, and what happens to those that are too long."""

from __future__ import annotations

import pytest
from tasks.small import parts

from firth.core.errors import UserError
from firth.tasks.template import DELIMITER_TOKEN, EXTRACT_TOKEN, TaskTemplate, token_at_char

A, B = [300, 301], [302, 303, 304]


def frame(family: str, marked: bool = False) -> tuple[TaskTemplate, dict[str, int]]:
    config, tokenizer = parts(family)
    if marked:
        tokenizer = tokenizer.with_special_tokens((DELIMITER_TOKEN, EXTRACT_TOKEN))
    ids = {name: tokenizer.backend.token_to_id(name) for name in (DELIMITER_TOKEN, EXTRACT_TOKEN)}
    roles = {role: getattr(tokenizer.vocab, role) for role in ("cls", "sep", "bos", "eos")}
    return TaskTemplate(tokenizer, config, 16), ids | roles


def test_bert_has_segments() -> None:
    form, ids = frame("bert")
    sheet = form.build_inputs(A, B)
    assert sheet.ids == [ids["cls"], *A, ids["sep"], *B, ids["sep"]]
    assert sheet.token_type_ids == [0] * 4 + [1] * 4
    assert sheet.target_positions == (0,)
    assert form.build_inputs(A).ids == [ids["cls"], *A, ids["sep"]]
    assert form.sequence_template.has_token_types


def test_roberta_and_bart_have_two_separators_and_no_segments() -> None:
    for family, asked in (("roberta", 0), ("bart", 8)):
        form, ids = frame(family)
        sheet = form.build_inputs(A, B)
        assert sheet.ids == [ids["cls"], *A, ids["sep"], ids["sep"], *B, ids["sep"]]
        assert sheet.target_positions == (asked,)
        assert not form.sequence_template.has_token_types


def test_xlnet_has_its_class_token_at_the_end() -> None:
    form, ids = frame("xlnet")
    sheet = form.build_inputs(A, B)
    assert sheet.ids == [*A, ids["sep"], *B, ids["sep"], ids["cls"]]
    assert sheet.token_type_ids == [0] * 3 + [1] * 4 + [2]
    assert sheet.target_positions == (7,)


def test_a_decoder_has_a_delimiter_and_an_extract_token() -> None:
    form, ids = frame("gpt2", marked=True)
    sheet = form.build_inputs(A, B)
    assert sheet.ids == [ids["bos"], *A, ids[DELIMITER_TOKEN], *B, ids[EXTRACT_TOKEN]]
    assert sheet.target_positions == (7,)
    plain, ids = frame("gpt2")  # a published classifier that was made without them
    assert plain.build_inputs(A).ids == [ids["bos"], *A, ids["eos"]]


def test_of_two_texts_the_longer_one_is_cut_first() -> None:
    form, _ = frame("bert")  # 13 tokens for two texts
    assert form.max_text_tokens(2) == 13
    a, b = form.truncate_pair(list(range(20)), list(range(100, 104)))
    assert (a, b) == (list(range(9)), list(range(100, 104)))
    a, b = form.truncate_pair(list(range(20)), list(range(100, 120)))
    assert (len(a), len(b)) == (7, 6)
    assert form.num_truncated == 2
    form.truncate_pair([1] * 6, [2] * 7)
    assert form.num_truncated == 2
    form.truncate_and_build([5] * 15)
    assert form.truncation_notices() == ["3 texts were longer than 16 tokens, and cut."]
    assert form.truncate_and_build([5] * 15).num_tokens == 16


def test_no_room() -> None:
    config, tokenizer = parts("roberta")
    with pytest.raises(UserError, match="no room"):
        TaskTemplate(tokenizer, config, 5).build_inputs([1] * TaskTemplate(tokenizer, config, 5).max_text_tokens(2))


def test_token_at() -> None:
    offsets = [(0, 3), (3, 5), (6, 9)]
    assert [token_at_char(offsets, c) for c in (0, 2, 3, 5, 6, 8, 40)] == [0, 0, 1, 2, 2, 2, 2]
