"""Format prompts in the way in which a checkpoint was fine-tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firth.generate.decode_state import require_tokenizer
from firth.models import Model, ModelConfig, make_sequence_template
from firth.tasks.chat import ASSISTANT_ROLE, ChatMessages, ChatTemplate
from firth.tasks.lm import is_plain_text
from firth.tasks.registry import make_task, resolve_answer_mode
from firth.tasks.text_labels import TASK_PROMPTS
from firth.tasks.text_to_text import TextToTextTask
from firth.text import Example


def encode_task_prompts(
    model: Model, metadata: Mapping[str, Any], texts: Sequence[str], chat: bool | None = None
) -> list[str | list[int]]:
    """Return the inputs of `firth.generate` for these texts: ids with special tokens, or the texts unchanged.

    `metadata` is the content of task.json. For a task with generated answers, a text gets the task's prefix and
    delimiter. With `chat`, a text is a user's message; this is the default after fine-tuning on dialogues, and works
    with any checkpoint that has a chat template.
    """
    chat = bool(metadata.get("task") == "lm" and metadata.get("roles")) if chat is None else chat
    if chat:
        return [encode_messages(model, [("user", text)], str(metadata.get("day", ""))) for text in texts]
    if answers_in_text(model.config, metadata):
        task = make_task("text-to-text", metadata, require_tokenizer(model), model.config)
        return [item.ids for item in task.encode([Example(i, (text,)) for i, text in enumerate(texts)])]
    return list(texts)


def finetuned_generation_settings(model: Model, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `GenerationConfig` fields with which a checkpoint was scored in fine-tuning; empty for task heads."""
    if not answers_in_text(model.config, metadata):
        return {}
    task = make_task("text-to-text", metadata, require_tokenizer(model), model.config)
    assert isinstance(task, TextToTextTask)
    names = ("max_new_tokens", "num_beams", "length_penalty")
    schema = {"json_schema": metadata["json_schema"]} if metadata.get("task") == "extract" else {}
    return {name: getattr(task.generation_config, name) for name in names} | schema


def answers_in_text(config: ModelConfig, metadata: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was fine-tuned to generate its answers as text."""
    name = metadata.get("task")
    return name in ("text-to-text", "extract") or (
        name in TASK_PROMPTS and resolve_answer_mode(name, config, metadata.get("answer", "auto")) == "text"
    )


def encode_dialogue_prompts(
    model: Model, metadata: Mapping[str, Any], examples: Sequence[Example]
) -> list[str | list[int]]:
    """Return the inputs of `firth.generate` for examples of the task lm, whose next answer is to be generated.

    A dialogue (role, text, role, text ...) is rendered by the chat template without its last message if that is an
    answer of the assistant: in a labelled file it is the reference. A text is a user's message after fine-tuning on
    dialogues, and else the beginning of a text.
    """
    is_dialogue = [len(e.texts) > 1 and not is_plain_text(e) for e in examples]
    texts = [e.texts[-1] for e, is_own in zip(examples, is_dialogue, strict=True) if not is_own]
    prompts = iter(encode_task_prompts(model, metadata, texts))
    day = str(metadata.get("day", ""))
    template = ChatTemplate(require_tokenizer(model), day) if any(is_dialogue) else None
    found: list[str | list[int]] = []
    for example, is_own in zip(examples, is_dialogue, strict=True):
        if template is None or not is_own:
            found.append(next(prompts))
            continue
        messages = list(zip(example.texts[::2], example.texts[1::2], strict=True))
        template.validate_roles((role for role, _ in messages), example.id)
        context = messages[:-1] if messages[-1][0] == ASSISTANT_ROLE else messages
        found.append(encode_messages(model, context, day))
    return found


def encode_messages(model: Model, messages: ChatMessages, day: str = "") -> list[int]:
    """Return the ids of a dialogue in the chat template, up to the beginning of the next answer.

    `day` is the template's date. Default: today.
    """
    tokenizer = require_tokenizer(model)
    text = ChatTemplate(tokenizer, day).render(messages, add_generation_prompt=True)
    ids = tokenizer.encode(text, parse_special=True)
    end = make_sequence_template(model.config, tokenizer.vocab).eos_id
    return [*ids, end] if model.config.architecture == "encoder-decoder" and ids[-1:] != [end] else ids
