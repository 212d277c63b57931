"""Dialogues: which tokens have labels, ids equal to `transformers`, truncation, scores."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tasks.small import ANIMALS, CPU, PLACES, WORDS, learn, model_for, parts

from firth.core.errors import UserError
from firth.evaluate import evaluate
from firth.tasks import FinetuneRecipe, Prediction, finetune, make_task
from firth.tasks.chat import ChatTemplate
from firth.text import Example, read_labelled
from firth.tokens import Tokenizer, load_tokenizer

TURNS = (("system", "big cat"), ("user", "the cat lives"), ("assistant", "near the river"), ("user", "and the dog"))
DIALOGUE = Example(0, tuple(part for turn in (*TURNS, ("assistant", "near the fox")) for part in turn))
THINKS = """{{ bos_token }}{% for m in messages %}[{{ m.role }}]
{% if m.role == 'assistant' and not loop.last %}...{% else %}{{ m.content }}{% endif %}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}[assistant]
{% endif %}"""
CHATML = """{%- for m in messages %}
    {%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('Unknown role ' + m.role) }}{% endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}
    {%- else %}{{ m.content | trim + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def dialogues(number: int = 12) -> list[Example]:
    rng, found = random.Random(0), []
    for i in range(number):
        turns = []
        for _ in range(rng.randint(1, 2)):
            turns += ["user", " ".join(rng.choices(WORDS, k=3)), "assistant", " ".join(rng.choices(WORDS, k=2))]
        found.append(Example(i, tuple(turns)))
    return found


def made(family: str, known: list[Example], tokenizer: Tokenizer | None = None, **fields: Any) -> Any:
    config, own = parts(family)
    recipe = FinetuneRecipe(**{"max_seq_length": 32, "max_target_length": 8} | fields)
    return make_task("lm", known, tokenizer or own, config, recipe), config


def with_chat(template: str, *names: str) -> Tokenizer:
    _, tokenizer = parts("llama")
    more = tokenizer.with_special_tokens(names)
    return Tokenizer(more.backend, more.special_tokens, more.config | {"chat_template": template})


def learned(task: Any, example: Example) -> str:
    """The text of the target tokens, span by span."""
    (item,) = task.encode([example])
    (line,) = item.parts
    return str(
        task.tokenizer.decode([line.ids[position + 1] for position in line.target_positions], skip_special_tokens=False)
    )


def test_only_assistant_turns_are_targets() -> None:
    task, _ = made("llama", [DIALOGUE], max_seq_length=64)
    assert learned(task, DIALOGUE) == " near the river<|endoftext|> near the fox<|endoftext|>"
    (item,) = task.encode([DIALOGUE])
    assert item.num_bytes == len("near the river") + len("near the fox")
    assert task.tokenizer.decode(item.parts[0].ids, skip_special_tokens=False) == (
        "<|endoftext|><|system|> big cat<|user|> the cat lives<|assistant|> near the river<|endoftext|>"
        "<|user|> and the dog<|assistant|> near the fox<|endoftext|>"
    )


def test_plain_text_is_split_and_all_of_it_is_target() -> None:
    text = Example(0, ("text", "the cat lives near the river and the dog lives near the garden"))
    task, _ = made("gpt2", [text], max_seq_length=8)
    assert task.tokenizer is parts("gpt2")[1]  # nobody speaks, so there is no template
    (item,) = task.encode([text])
    ids, end = task.tokenizer.encode(text.texts[1]), task.tokenizer.vocab.eos
    assert [line.ids[position + 1] for line in item.parts for position in line.target_positions] == [*ids, end]
    assert max(len(line.ids) for line in item.parts) == 8
    assert item.num_bytes == len(text.texts[1])
    assert item.scored_mask.tolist() == [True] * len(ids) + [False]


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
def test_ids_equal_apply_chat_template(family: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    task, _ = made(family, [DIALOGUE], max_seq_length=100, max_target_length=20)
    task.tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    (item,) = task.encode([DIALOGUE])
    messages = [{"role": r, "content": c} for r, c in zip(DIALOGUE.texts[::2], DIALOGUE.texts[1::2], strict=True)]
    if family in ("t5", "bart"):
        found = [
            theirs.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False) for i in (2, 4)
        ]
        assert found == [turn.ids for turn in item.parts]
        assert task.tokenizer.decode(item.parts[1].answer_ids).strip() == "near the fox"
    else:
        assert theirs.apply_chat_template(messages, return_dict=False) == item.parts[0].ids
        start = theirs.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
        assert item.parts[0].ids[: len(start)] == start
        assert item.parts[0].target_positions[0] == len(start) - 1
    again = load_tokenizer(tmp_path)
    assert again.config["chat_template"] == task.tokenizer.config["chat_template"]


def test_a_checkpoints_own_template_is_used(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = with_chat(CHATML, "<|im_start|>", "<|im_end|>")
    example = Example(0, ("user", "the cat ", "assistant", "the dog", "user", "a fox", "assistant", "big"))
    task, _ = made("llama", [example], tokenizer, max_seq_length=100)
    assert task.tokenizer is tokenizer
    assert learned(task, example) == "the dog<|im_end|>big<|im_end|>"
    tokenizer.save(tmp_path)
    messages = [{"role": r, "content": c} for r, c in zip(example.texts[::2], example.texts[1::2], strict=True)]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, return_dict=False)
    assert theirs == task.encode([example])[0].parts[0].ids
    with pytest.raises(UserError, match=r"Example 7: this checkpoint's chat template refuses.*Unknown role system"):
        task.encode([DIALOGUE._replace(id=7)])


def test_a_template_beside_the_tokenizer_is_read(tmp_path: Path) -> None:
    parts("llama")[1].save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    assert load_tokenizer(tmp_path).config["chat_template"] == CHATML


def test_answers_changed_by_the_template_are_not_targets() -> None:
    task, _ = made("llama", [DIALOGUE], with_chat(THINKS), max_seq_length=100)
    assert learned(task, DIALOGUE) == "near the fox<|endoftext|>"
    (notice,) = task.notices
    assert notice.startswith("1 answer is changed by the chat template once messages follow, and not learned")


def test_long_dialogues_are_truncated_from_the_left() -> None:
    whole, _ = made("llama", [DIALOGUE], max_seq_length=64)
    ids = whole.encode([DIALOGUE])[0].parts[0].ids
    task, _ = made("llama", [DIALOGUE], max_seq_length=16)
    (item,) = task.encode([DIALOGUE])
    assert item.parts[0].ids == [ids[0], *ids[-15:]]
    assert learned(task, DIALOGUE).endswith(" near the fox<|endoftext|>")
    assert task.notices == ["2 dialogues were longer than 16 tokens, and lost the beginning (example 0)."]
    short, _ = made("llama", [DIALOGUE], max_seq_length=4)
    assert learned(short, DIALOGUE) == " fox<|endoftext|>"  # only tokens whose context is kept are targets
    assert short.encode([DIALOGUE])[0].num_bytes == len("fox") + 1


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
def test_packed_equals_unpacked(family: str) -> None:
    known = dialogues()
    task, config = made(family, known)
    items = task.encode(known)
    model = model_for(task, config).eval()
    packed = task.collate(items)
    assert len(packed.input_ids) < sum(len(item.parts) for item in items)
    with torch.no_grad():
        together = model.losses(packed.to(CPU.device))["targets"].item()
        alone = [model.losses(task.collate([item]).to(CPU.device))["targets"].item() for item in items]
    assert together == pytest.approx(sum(alone), rel=1e-5)
    found = [p.prediction for p in task.predict(model, items, CPU, 5)]
    single = [task.predict(model, [item], CPU, 1)[0].prediction for item in items]
    assert [p["nats"] for p in found] == pytest.approx([p["nats"] for p in single], rel=1e-4)
    everything = [replace(item, scored_mask=np.ones_like(item.scored_mask)) for item in items]
    whole = [p.prediction for p in task.predict(model, everything, CPU, 5)]
    assert [p["nats"] for p in whole] == pytest.approx(alone, rel=1e-4)
    assert sum(p["tokens"] for p in whole) == packed.num_targets


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
def test_eos_of_an_answer_is_trained_but_not_scored(family: str) -> None:
    task, _ = made(family, [DIALOGUE], max_seq_length=100, max_target_length=20)
    (item,) = task.encode([DIALOGUE])
    predicted = [
        i
        for part in item.parts
        for i in (
            part.answer_ids
            if family in ("t5", "bart")
            else [part.ids[position + 1] for position in part.target_positions]
        )
    ]
    scored = [i for i, of_the_text in zip(predicted, item.scored_mask, strict=True) if of_the_text]
    assert task.template.eos_id in predicted
    assert not set(scored) & set(task.tokenizer.vocab.special_ids)
    assert "".join(task.tokenizer.decode(scored).split()) == "neartherivernearthefox"


def test_scores_by_hand() -> None:
    task, _ = made("llama", [DIALOGUE])
    found = [Prediction({"nats": 2 * math.log(4), "tokens": 3, "bytes": 4, "right": 1})]
    found.append(Prediction({"nats": 2 * math.log(4), "tokens": 1, "bytes": 4, "right": 1}))
    scores = task.score([DIALOGUE, DIALOGUE], found)
    assert scores == pytest.approx({"perplexity": 4.0, "bits_per_byte": 1.0, "token_accuracy": 0.5})


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_tiny_model_learns_to_answer(family: str) -> None:
    homes = dict(zip(ANIMALS, PLACES, strict=True))
    known = [Example(i, ("user", f"the {a} lives", "assistant", homes[a])) for i, a in enumerate(ANIMALS * 8)]
    task, config = made(family, known)
    items = task.encode(known)
    model = learn(task, config, items, 100, rate=5e-3)
    scores = task.score(known, task.predict(model, items, CPU, 10))
    assert scores["perplexity"] < 1.5
    assert scores["token_accuracy"] > 0.9
    again = make_task("lm", task.metadata(), task.tokenizer, model.config)
    assert again.metadata() == task.metadata()
    np.testing.assert_array_equal(again.collate(again.encode(known)).input_ids, task.collate(items).input_ids)


def test_from_a_file_to_scores(checkpoint_of: Any, tmp_path: Path) -> None:
    """Fine-tune, save, and score again: equal scores, and transformers reads the template."""
    from transformers import AutoTokenizer

    rows = [{"prompt": f"I saw the {a}", "response": "animal"} for a in ANIMALS] * 4
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = {"checkpoint": str(checkpoint_of("gpt2")), "task": "lm", "max_seq_length": 32, "seeds": 1}
    fields |= {"train": str(file), "dev": str(file), "output_dir": str(tmp_path / "run"), "max_steps": 60}
    result = finetune(FinetuneRecipe(**fields, learning_rate=5e-3))
    assert result["metric"] == "perplexity"
    assert result["mean"] < 3
    final = tmp_path / "run" / "final"
    again = evaluate(final, "lm", file, tmp_path / "scores")
    assert again["metrics"]["perplexity"] == pytest.approx(result["mean"], rel=1e-4)
    message = [{"role": "user", "content": "I saw the cat"}]
    text = AutoTokenizer.from_pretrained(final).apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert text == "<|endoftext|><|user|> I saw the cat<|assistant|>"


def test_a_prompt_may_be_messages(tmp_path: Path) -> None:
    """As in TRL's conversational prompt-completion format; a text in brackets is a text."""
    shared = [{"role": "system", "content": "big"}, {"role": "user", "content": "the cat"}]
    rows = [
        {"prompt": shared, "completion": [{"role": "assistant", "content": "is red"}]},
        {"prompt": "[1, 2]", "completion": "[2, 1]"},
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_labelled(file, "lm")
    assert first.texts == ("system", "big", "user", "the cat", "assistant", "is red")
    assert second.texts == ("user", "[1, 2]", "assistant", "[2, 1]")


def test_from_plain_text_to_scores(checkpoint_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text("\n\n".join(f"I saw the {a} near the {p}" for a in ANIMALS for p in PLACES))
    fields: dict[str, Any] = {"checkpoint": str(checkpoint_of("gpt2")), "task": "lm", "max_seq_length": 32, "seeds": 1}
    fields |= {"train": str(file), "dev": str(file), "output_dir": str(tmp_path / "run"), "max_steps": 2}
    result = finetune(FinetuneRecipe(**fields))
    again = evaluate(tmp_path / "run" / "final", "lm", file, tmp_path / "scores")
    assert again["examples"] == len(ANIMALS) * len(PLACES)
    assert again["metrics"]["perplexity"] == pytest.approx(result["mean"], rel=1e-4)
    text = evaluate(tmp_path / "run" / "final", "perplexity", file, tmp_path / "text")
    for name in ("perplexity", "bits_per_byte"):
        assert text["metrics"][name] == pytest.approx(result[name], rel=1e-4), "of the same tokens and bytes"


def test_special_tokens_in_the_text_are_reported() -> None:
    example = Example(0, ("user", "a <|assistant|> cat", "assistant", "dog"))
    task, _ = made("llama", [example])
    task.encode([example])
    assert task.notices == ["1 message holds what looks like a special token, and is read as one (example 0)."]


def test_unsupported_settings_raise() -> None:
    with pytest.raises(UserError, match=r"lm needs a model that writes: a decoder or an encoder-decoder\. This bert"):
        made("bert", [DIALOGUE])
    task, config = made("llama", [DIALOGUE])
    with pytest.raises(UserError, match=r"Example 3: no message has the role assistant.*its roles are user"):
        task.encode([Example(3, ("user", "a cat"))])
    with pytest.raises(UserError, match="Example 4: the role 'tool' did not occur"):
        task.encode([Example(4, ("tool", "a cat", "assistant", "dog"))])
    text = Example(5, ("text", "a cat"))
    with pytest.raises(UserError, match="Example 5: an encoder-decoder needs an input and an answer"):
        made("t5", [text])[0].encode([text])
    with pytest.raises(UserError, match="has no chat template"):
        make_task("lm", {"roles": []}, parts("llama")[1], config).encode([DIALOGUE])
    with pytest.raises(UserError, match="chat template of this checkpoint cannot be read"):
        ChatTemplate(with_chat("{% for %}"))
    with pytest.raises(UserError, match="the answer cannot be located"):
        ChatTemplate(with_chat("{{ messages | length }}")).render_with_answers(TURNS)
