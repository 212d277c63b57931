"""A saved tokenizer adds the task's special tokens: `transformers` reads the ids that the task was trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
from tasks.small import FAMILIES, parts

from firth.tasks import FinetuneRecipe, make_task
from firth.text import Example

transformers = pytest.importorskip("transformers")
TWO = ("the big cat", "a red river is near")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "t5"])
def test_one_text_and_two_texts(family: str, tmp_path: Path) -> None:
    config, tokenizer = parts(family)
    examples = [Example(0, TWO, "x"), Example(1, TWO[::-1], "y")]
    task = make_task("pair", examples, tokenizer, config, FinetuneRecipe())
    saved = task.templated_tokenizer()
    saved.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    (sequence,) = task.encode(examples)[0].sequences
    found = theirs(*TWO)
    assert found["input_ids"] == sequence.ids
    if task.template.sequence_template.has_token_types:
        assert found["token_type_ids"] == sequence.token_type_ids
    one = make_task(
        "classify", [Example(0, TWO[:1], "x"), Example(1, TWO[1:], "y")], tokenizer, config, FinetuneRecipe()
    )
    assert theirs(TWO[0])["input_ids"] == one.encode([Example(0, TWO[:1], "x")])[0].sequences[0].ids
    assert saved.encode(TWO[0]) == task.tokenizer.encode(TWO[0])  # Firth adds the special tokens itself
    offsets = [e.offsets for e in saved.encode_with_offsets(list(TWO))]
    assert offsets == [e.offsets for e in task.tokenizer.encode_with_offsets(list(TWO))]


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2", "llama"])
def test_a_text_to_text_source(family: str, tmp_path: Path) -> None:
    config, tokenizer = parts(family)
    examples = [Example(0, TWO[:1], TWO[1])]
    task = make_task(
        "text-to-text", examples, tokenizer, config, FinetuneRecipe(max_target_length=8, max_seq_length=16)
    )
    task.templated_tokenizer().save(tmp_path)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path)(TWO[0])
    assert found["input_ids"] == task.encode(examples)[0].ids


def test_a_tokenizer_with_this_template_is_unchanged() -> None:
    config, tokenizer = parts("bert")
    examples = [Example(0, TWO, "x"), Example(1, TWO, "y")]
    assert make_task("pair", examples, tokenizer, config, FinetuneRecipe()).templated_tokenizer() is tokenizer
