"""Entity markers in a text, and their positions among the tokens."""

from __future__ import annotations

import pytest
from tasks.small import parts

from firth.tasks import FinetuneRecipe, make_task
from firth.tasks.relation import insert_entity_markers
from firth.text import Example

TEXT = "the cat lives near the river"
CAT, RIVER = (4, 7), (23, 28)


def made(name: str, family: str, example: Example, length: int = 32):  # type: ignore[no-untyped-def]
    config, tokenizer = parts(family)
    return make_task(name, [example], tokenizer, config, FinetuneRecipe(max_seq_length=length))


def test_entity_markers() -> None:
    text, spans = insert_entity_markers(TEXT, [CAT, RIVER])
    assert text == "the @ cat @ lives near the # river #"
    assert [text[a:b] for a, b in spans] == ["@ cat @", "# river #"]
    text, spans = insert_entity_markers(TEXT, [RIVER, CAT])
    assert text == "the # cat # lives near the @ river @"
    assert [text[a:b] for a, b in spans] == ["@ river @", "# cat #"]
    text, spans = insert_entity_markers("red fox", [(0, 7), (4, 7)])  # one in the other
    assert text == "@ red # fox # @"
    assert [text[a:b] for a, b in spans] == ["@ red # fox # @", "# fox #"]


@pytest.mark.parametrize("family", ["bert", "roberta", "xlnet"])
def test_an_encoder_reads_both_start_markers(family: str) -> None:
    example = Example(0, (TEXT,), "home", (CAT, RIVER))
    task = made("relation", family, example, 60 if family == "xlnet" else 32)
    ((sequence,),) = [item.sequences for item in task.encode([example])]
    signs = [task.tokenizer.decode([sequence.ids[position]]).strip() for position in sequence.target_positions]
    assert signs == ["@", "#"]
    assert sequence.target_positions[0] < sequence.target_positions[1]
    assert task.configure_model(parts(family)[0]).head.num_marked == 2


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_a_decoder_reads_the_last_position(family: str) -> None:
    example = Example(0, (TEXT,), "home", (CAT, RIVER))
    task = made("relation", family, example)
    ((sequence,),) = [item.sequences for item in task.encode([example])]
    assert sequence.target_positions == (sequence.num_tokens - 1,)
    assert "@ cat @" in task.tokenizer.decode(sequence.ids)


@pytest.mark.parametrize(
    ("before", "between", "after"), [(30, 1, 0), (0, 1, 30), (30, 1, 30), (0, 30, 0), (20, 30, 20), (3, 1, 3)]
)
def test_a_long_text_is_truncated_around_its_markers(before: int, between: int, after: int) -> None:
    text = "red " * before + "cat " + "big " * between + "river" + " blue" * after
    start = 4 * before
    tail = start + 4 + 4 * between
    example = Example(0, (text,), "home", ((start, start + 3), (tail, tail + 5)))
    task = made("relation", "bert", example, 24)
    ((sequence,),) = [item.sequences for item in task.encode([example])]
    assert sequence.num_tokens <= 24
    text = task.tokenizer.decode(sequence.ids)
    assert "@ cat @" in text
    assert "# river #" in text
    assert [task.tokenizer.decode([sequence.ids[position]]) for position in sequence.target_positions] == ["@", "#"]
    long = before + between + after > 20
    assert [notice.partition(".")[0] for notice in task.notices] == ["1 text was longer than 24 tokens, and cut"] * long
    assert not long or sequence.num_tokens == 24


def test_word_in_context_reads_the_marked_words() -> None:
    example = Example(0, ("red " * 30 + "cat", "the cat is big"), "yes", ((120, 123), (4, 7)))
    task = made("word-in-context", "bert", example)
    ((sequence,),) = [item.sequences for item in task.encode([example])]
    cat = task.tokenizer.encode("cat")
    assert [sequence.ids[position] for position in sequence.target_positions] == cat * 2
    assert [sequence.token_type_ids[position] for position in sequence.target_positions] == [0, 1]
    assert sequence.num_tokens == 32
    task = made("word-in-context", "gpt2", example)
    ((sequence,),) = [item.sequences for item in task.encode([example])]
    assert task.tokenizer.decode(sequence.ids).count("@ cat @") == 2
