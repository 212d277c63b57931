"""Special tokens of each architecture, and truncation."""

from __future__ import annotations

import pytest
from tasks.small import parts

from firth.core.errors import UserError
from firth.tasks.template import DELIMITER_TOKEN, EXTRACT_TOKEN, TaskTemplate, token_at_char

A, B = [300, 301], [302, 303, 304]


def task_template(family: str, marked: bool = False) -> tuple[TaskTemplate, dict[str, int]]:
    config, tokenizer = parts(family)
    if marked:
        tokenizer = tokenizer.with_special_tokens((DELIMITER_TOKEN, EXTRACT_TOKEN))
    ids = {name: tokenizer.backend.token_to_id(name) for name in (DELIMITER_TOKEN, EXTRACT_TOKEN)}
    roles = {role: getattr(tokenizer.vocab, role) for role in ("cls", "sep", "bos", "eos")}
    return TaskTemplate(tokenizer, config, 16), ids | roles


def test_bert_has_token_types() -> None:
    template, ids = task_template("bert")
    sequence = template.build_inputs(A, B)
    assert sequence.ids == [ids["cls"], *A, ids["sep"], *B, ids["sep"]]
    assert sequence.token_type_ids == [0] * 4 + [1] * 4
    assert sequence.target_positions == (0,)
    assert template.build_inputs(A).ids == [ids["cls"], *A, ids["sep"]]
    assert template.sequence_template.has_token_types


def test_roberta_and_bart_have_two_separators_and_no_token_types() -> None:
    for family, target in (("roberta", 0), ("bart", 8)):
        template, ids = task_template(family)
        sequence = template.build_inputs(A, B)
        assert sequence.ids == [ids["cls"], *A, ids["sep"], ids["sep"], *B, ids["sep"]]
        assert sequence.target_positions == (target,)
        assert not template.sequence_template.has_token_types


def test_xlnet_has_its_class_token_at_the_end() -> None:
    template, ids = task_template("xlnet")
    sequence = template.build_inputs(A, B)
    assert sequence.ids == [*A, ids["sep"], *B, ids["sep"], ids["cls"]]
    assert sequence.token_type_ids == [0] * 3 + [1] * 4 + [2]
    assert sequence.target_positions == (7,)


def test_a_decoder_has_a_delimiter_and_an_extract_token() -> None:
    template, ids = task_template("gpt2", marked=True)
    sequence = template.build_inputs(A, B)
    assert sequence.ids == [ids["bos"], *A, ids[DELIMITER_TOKEN], *B, ids[EXTRACT_TOKEN]]
    assert sequence.target_positions == (7,)
    plain, ids = task_template("gpt2")  # a published classifier that was made without them
    assert plain.build_inputs(A).ids == [ids["bos"], *A, ids["eos"]]


def test_the_longer_text_is_truncated_first() -> None:
    template, _ = task_template("bert")  # 13 tokens for two texts
    assert template.max_text_tokens(2) == 13
    a, b = template.truncate_pair(list(range(20)), list(range(100, 104)))
    assert (a, b) == (list(range(9)), list(range(100, 104)))
    a, b = template.truncate_pair(list(range(20)), list(range(100, 120)))
    assert (len(a), len(b)) == (7, 6)
    assert template.num_truncated == 2
    template.truncate_pair([1] * 6, [2] * 7)
    assert template.num_truncated == 2
    template.truncate_and_build([5] * 15)
    assert template.truncation_notices() == [
        "3 texts were longer than 16 tokens, and cut. Fine-tune with --max-seq-length for longer ones."
    ]
    assert template.truncate_and_build([5] * 15).num_tokens == 16


def test_too_short_max_length_raises() -> None:
    config, tokenizer = parts("roberta")
    with pytest.raises(UserError, match="too short for the texts"):
        TaskTemplate(tokenizer, config, 5).build_inputs([1] * TaskTemplate(tokenizer, config, 5).max_text_tokens(2))


def test_token_at() -> None:
    offsets = [(0, 3), (3, 5), (6, 9)]
    assert [token_at_char(offsets, c) for c in (0, 2, 3, 5, 6, 8, 40)] == [0, 0, 1, 2, 2, 2, 2]
