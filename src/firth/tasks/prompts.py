"""Prompts as a fine-tuned checkpoint has learned to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firth.generate.reading import tokenizer_of
from firth.models import Model, ModelConfig, framing
from firth.tasks.chat import Chat
from firth.tasks.make import make_task, way
from firth.tasks.text_to_text import TextToText
from firth.tasks.words import SOURCES
from firth.text import Example


def prompts_for(
    model: Model, facts: Mapping[str, Any], texts: Sequence[str], chat: bool | None = None
) -> list[str | list[int]]:
    """What `firth.generate` is to be given for these texts: ids in their frame, or the texts as they are.

    `facts` are those of task.json. After a task that is answered in words a text stands behind its prefix and before
    its delimiter. After dialogues it is what a user says (`chat`, which can be asked of any checkpoint with a chat
    template).
    """
    chat = bool(facts.get("task") == "lm" and facts.get("roles")) if chat is None else chat
    if chat:
        return [asked(model, text) for text in texts]
    if writes(model.config, facts):
        task = make_task("text-to-text", facts, tokenizer_of(model), model.config)
        return [item.ids for item in task.encode([Example(i, (text,)) for i, text in enumerate(texts)])]
    return list(texts)


def usual_settings(model: Model, facts: Mapping[str, Any]) -> dict[str, Any]:
    """How a checkpoint was scored when it was tuned to answer in words: fields of a Decoding."""
    if not writes(model.config, facts):
        return {}
    task = make_task("text-to-text", facts, tokenizer_of(model), model.config)
    assert isinstance(task, TextToText)
    return {name: getattr(task.decoding, name) for name in ("max_new_tokens", "num_beams", "length_penalty")}


def writes(config: ModelConfig, facts: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was tuned to answer in words."""
    name = facts.get("task")
    return name == "text-to-text" or (name in SOURCES and way(name, config, facts.get("answer", "head")) == "words")


def asked(model: Model, text: str) -> list[int]:
    """What a user says, up to where the answer begins."""
    tokenizer = tokenizer_of(model)
    ids = tokenizer.encode(Chat(tokenizer).render([("user", text)], prompt=True), specials=True)
    end = framing(model.config, tokenizer.vocab).end
    return [*ids, end] if model.config.shape == "encoder-decoder" and ids[-1:] != [end] else ids
