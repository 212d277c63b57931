"""Answers in templates like those of Llama, Qwen and Gemma: the labels, beside the mask of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tasks.small import parts
from tasks.test_lm import learned, made, with_chat

from firth.core.errors import UserError
from firth.tasks import FinetuneRecipe, finetune
from firth.tasks.chat import ChatTemplate
from firth.tasks.finetune_job import encode_file
from firth.text import Example, read_labelled
from firth.tokens import load_tokenizer

# [A] and [Z] stand around an answer and its end token: nothing in a stock template, {% generation %} in a marked one.
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set turns = messages %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') }}
{{- '\\n\\n' + system + '<|eot_id|>' }}
{%- for m in turns %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if m['role'] == 'assistant' %}[A]{{- m['content'] | trim + '<|eot_id|>' }}[Z]
    {%- else %}{{- m['content'] | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
QWEN = """{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}[A]{{- m.content + '<|im_end|>' }}[Z]{{- '\\n' }}
    {%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
    {{- '<start_of_turn>' + role + '\\n' }}
    {%- if role == 'model' %}[A]{{- m['content'] | trim + '<end_of_turn>' }}[Z]{{- '\\n' }}
    {%- else %}{{- m['content'] | trim + '<end_of_turn>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
TEMPLATES = {
    "llama": (LLAMA, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "qwen": (QWEN, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "gemma": (GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
}
# Like Qwen 3: the reasoning of all answers but the last is removed, so that a longer dialogue begins otherwise.
THINKING = QWEN.replace("[A]{{- m.content", "[A]{{- (m.content if loop.last else m.content.split('@')[-1])")
TALK = (
    *(("user", "the cat lives"), ("assistant", "near the river"), ("user", "and the dog")),
    *(("assistant", "near the fox"), ("user", "not the horse")),
)


def marked(template: str, marks: bool) -> str:
    begin, end = ("{%- generation %}", "{%- endgeneration %}") if marks else ("", "")
    return template.replace("[A]", begin).replace("[Z]", end)


def dialogue(turns: Any = TALK, id: int = 0) -> Example:
    return Example(id, tuple(part for turn in turns for part in turn))


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_labels_are_the_answers_and_their_ends(name: str, with_system: bool, tmp_path: Path) -> None:
    """By prefixes of a template without marks, by the marks of a marked one, and by `transformers`."""
    from transformers import AutoTokenizer

    template, names, end = TEMPLATES[name]
    talk = ((("system", "big cat"), *TALK) if with_system else TALK)[:-1]
    stock, mark = (with_chat(marked(template, marks), *names) for marks in (False, True))
    task, _ = made("llama", [dialogue(talk)], stock, max_seq_length=200, day="2026-11-18")
    if with_system and name == "gemma":
        with pytest.raises(UserError, match=r"a\.jsonl: Example 3: .*refuses the messages \(System role not supported"):
            encode_file(task, [dialogue(talk, 3)], "a.jsonl")
        return
    expected = f"near the river{end}near the fox{end}"
    assert learned(task, dialogue(talk)) == expected
    by_marks, _ = made("llama", [dialogue(talk)], mark, max_seq_length=200, day="2026-11-18")
    assert learned(by_marks, dialogue(talk)) == expected
    (item,) = task.encode([dialogue(talk)])
    assert item.num_bytes == len("near the rivernear the fox")
    mark.save(tmp_path)
    messages = [{"role": role, "content": text} for role, text in talk]
    if "strftime_now" in template:
        mark.config["chat_template"] = mark.config["chat_template"].replace("strftime_now('%d %b %Y')", "'18 Nov 2026'")
        mark.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert theirs["input_ids"] == item.parts[0].ids
    positions = [i - 1 for i, is_answer in enumerate(theirs["assistant_masks"]) if is_answer]
    assert list(item.parts[0].target_positions) == positions


def test_a_message_after_the_last_answer_is_left_out() -> None:
    task, _ = made("llama", [dialogue()], with_chat(marked(QWEN, False), "<|im_start|>", "<|im_end|>"))
    assert learned(task, dialogue()) == learned(task, dialogue(TALK[:-1]))


def test_a_template_that_is_not_prefix_preserving_is_named() -> None:
    talk = dialogue((*TALK[:1], ("assistant", "the river @ near"), *TALK[2:4]), 7)
    names = ("<|im_start|>", "<|im_end|>")
    task, _ = made("llama", [talk], with_chat(marked(THINKING, False), *names), max_seq_length=200)
    encode_file(task, [talk], "chats.jsonl")
    assert learned(task, talk) == "near the fox<|im_end|>"
    (notice,) = task.notices
    assert notice.startswith("2 answers are changed by the chat template once messages follow, and not learned")
    assert notice.endswith("the template is not prefix-preserving (chats.jsonl: example 7).")
    by_marks, _ = made("llama", [talk], with_chat(marked(THINKING, True), *names), max_seq_length=200)
    assert learned(by_marks, talk) == " near<|im_end|>near the fox<|im_end|>"
    assert not by_marks.notices
    with pytest.raises(UserError, match=r"Example 7: the chat template of this checkpoint is not prefix-preserving"):
        ChatTemplate(with_chat("{{ messages | length }}")).render_with_answers(TALK, 7)


def test_marks_in_a_macro_are_not_trusted() -> None:
    macro = "{% macro say(m) %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    source = macro + "{% for m in messages %}{{ say(m) }}{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    text, spans = ChatTemplate(with_chat(source)).render_with_answers(TALK[:2])
    assert [text[span.start : span.end] for span in spans] == ["near the river"]


def test_a_dialogue_without_a_label_is_refused() -> None:
    """A template that writes no answer after one of these words, and has no end token."""
    silent = "{% for m in messages %}{{ '' if m.content == 'silent' else m.content }}{% endfor %}"
    talks = [dialogue((("user", "a dog"), ("assistant", text)), i) for i, text in enumerate(("small", "silent"))]
    task, _ = made("llama", talks, with_chat(silent), max_seq_length=64)
    with pytest.raises(UserError, match=r"chats\.jsonl: Example 1: no token of this dialogue has a label"):
        encode_file(task, talks, "chats.jsonl")


def test_long_rows_are_named(tmp_path: Path) -> None:
    task, _ = made("llama", [dialogue()], max_seq_length=16)
    encode_file(task, [dialogue(id=i) for i in range(5)], "chats.jsonl")
    assert task.notices == [
        "5 dialogues were longer than 16 tokens, and lost the beginning (chats.jsonl: example 0, 1, 2, ...)."
    ]


def test_long_answers_of_an_encoder_decoder_are_named() -> None:
    talk = dialogue((("user", "a dog"), ("assistant", "small and red and blue and big and near the river")), 4)
    task, _ = made("t5", [talk], max_target_length=8)
    encode_file(task, [talk, dialogue(TALK[:2], 5)], "chats.jsonl")
    (notice,) = task.notices
    assert notice.startswith(
        "1 answer was longer than 8 tokens, and cut: the model learns to stop there (chats.jsonl: ex"
    )
    assert notice.endswith("example 4). Raise --max-target-length.")


def message(role: str, content: str = "a cat") -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([message("user")], "has no message of the assistant: there is nothing to learn. Its roles are user"),
        ([message("user"), message("assistant", " ")], "has an empty message 2, of 'assistant'"),
        ([message("user", ""), message("assistant")], "has an empty message 1, of 'user'"),
        ([message("assistant"), message("user")], "has message 1 of the assistant before any message of the user"),
        ([message("system"), message("assistant")], "has message 2 of the assistant before any"),
        ([message("user"), message("user"), message("assistant")], "has messages 1 and 2 both of the user"),
        ([message("user"), message("assistant"), message("assistant")], "has messages 2 and 3 both of the assistant"),
        ([message("user"), message("system"), message("assistant")], "has message 2 of the system, which can only"),
        ([], "has no messages"),
    ],
)
def test_bad_dialogues_are_named_by_file_and_row(messages: list[Any], problem: str, tmp_path: Path) -> None:
    good = [message("system"), message("user"), message("tool"), message("assistant"), message("user")]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (good, messages)))
    with pytest.raises(UserError) as e:
        read_labelled(file, "lm")
    assert "chats.jsonl:2: column 'messages' " + problem in str(e.value)


def test_lora_and_the_template_are_saved(checkpoint_of: Any, tmp_path: Path) -> None:
    """A checkpoint with its own template keeps it beside the tokenizer; LoRA's weights are merged into final/."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from firth.models import load_model

    model = load_model(checkpoint_of("llama"))
    assert model.tokenizer is not None
    template, names, _ = TEMPLATES["qwen"]
    source = with_chat(marked(template, False), *names)
    model.tokenizer = model.tokenizer.with_special_tokens(names)
    model.tokenizer.config["chat_template"] = source.config["chat_template"]
    from firth.models import grow_vocabulary

    grow_vocabulary(model, model.tokenizer.vocab.size)
    model.save(tmp_path / "base")
    file = tmp_path / "chats.jsonl"
    rows = [{"messages": [message("user", f"I saw the {a}"), message("assistant", "animal")]} for a in ("cat", "dog")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    fields: dict[str, Any] = {"task": "lm", "train": str(file), "dev": str(file), "seeds": 1, "max_steps": 4}
    fields |= {"output_dir": str(tmp_path / "run"), "max_seq_length": 64, "lora_rank": 2, "learning_rate": 1e-2}
    finetune(FinetuneRecipe(checkpoint=str(tmp_path / "base"), **fields))
    final = tmp_path / "run" / "final"
    assert load_tokenizer(final).config["chat_template"] == source.config["chat_template"]
    theirs = AutoTokenizer.from_pretrained(final)
    text = theirs.apply_chat_template(rows[0]["messages"], tokenize=False)
    assert text.endswith("<|im_start|>user\nI saw the cat<|im_end|>\n<|im_start|>assistant\nanimal<|im_end|>\n")
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "base", final))
    changed = [name for name in before if not before[name].equal(after[name])]
    assert changed
    assert all("self_attn" in name for name in changed), "LoRA trains the attention matrices alone"
    assert (tmp_path / "run" / "adapter").is_dir()
    assert parts("llama")[1].config.get("chat_template") is None


# Like Vicuna's: the prompt of an answer ends with a space, which the tokenizer joins with the answer's first word.
SPACED = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- 'the ' }}[A]{{- m.content + eos_token }}[Z]
    {%- else %}{{- m.content + ' ' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'the ' }}{%- endif %}"""


def test_a_token_of_prompt_and_answer_is_learned_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    stock, mark = (with_chat(marked(SPACED, marks)) for marks in (False, True))
    talk = dialogue((("user", "a dog"), ("assistant", "small")), 4)
    eos = stock.special_tokens["eos"]
    mark.save(tmp_path)
    messages = [{"role": role, "content": text} for role, text in (("user", "a dog"), ("assistant", "small"))]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    positions = [i - 1 for i, is_answer in enumerate(theirs["assistant_masks"]) if is_answer]
    for tokenizer in (stock, mark):
        task, _ = made("llama", [talk], tokenizer, max_seq_length=64)
        (item,) = encode_file(task, [talk], "chats.jsonl")
        assert task.notices[0].startswith("1 answer begins inside of a token that the prompt begins (chats.jsonl: exam")
        assert learned(task, talk) == f" small{eos}"
        assert list(item.parts[0].target_positions) == positions
        assert item.parts[0].ids == theirs["input_ids"]


def test_an_end_of_text_behind_the_whole_dialogue_is_no_change_of_an_answer() -> None:
    """Phi 3 writes it where no prompt follows: behind an answer that is rendered as the last one alone."""
    phi = QWEN[: QWEN.rindex("{%- endif %}")] + "{%- else %}{{- eos_token }}{%- endif %}"
    tokenizer = with_chat(marked(phi, False), "<|im_start|>", "<|im_end|>")
    task, _ = made("llama", [dialogue()], tokenizer, max_seq_length=200)
    eos = tokenizer.special_tokens["eos"]
    assert learned(task, dialogue(TALK[:-1])) == f"near the river<|im_end|>near the fox<|im_end|>\n{eos}"
    assert not task.notices


def test_generation_stops_at_the_end_token_of_the_template(checkpoint_of: Any, tmp_path: Path) -> None:
    """Of a base model, whose own end of text is another token."""
    from transformers import AutoModelForCausalLM

    from firth.models import get_eos_token_ids, grow_vocabulary, load_model

    template, names, end = TEMPLATES["qwen"]
    model = load_model(checkpoint_of("llama"))
    assert model.tokenizer is not None
    model.tokenizer = model.tokenizer.with_special_tokens(names)
    model.tokenizer.config["chat_template"] = marked(template, False)
    grow_vocabulary(model, model.tokenizer.vocab.size)
    model.save(tmp_path / "base")
    file = tmp_path / "chats.jsonl"
    rows = [{"messages": [message("user", f"I saw the {a}"), message("assistant", "animal")]} for a in ("cat", "dog")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = {"task": "lm", "train": str(file), "dev": str(file), "seeds": 1, "max_steps": 2}
    finetune(FinetuneRecipe(checkpoint=str(tmp_path / "base"), output_dir=str(tmp_path / "run"), **fields))
    tuned = load_model(tmp_path / "run" / "final")
    assert tuned.tokenizer is not None
    wanted = [tuned.tokenizer.vocab.eos, tuned.tokenizer.backend.token_to_id(end)]
    assert list(get_eos_token_ids(tuned, tuned.tokenizer.vocab)) == wanted
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert theirs.generation_config.eos_token_id == wanted
