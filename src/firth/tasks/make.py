"""The one place that picks the way to do a task by the architecture of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firth.errors import UserError, nearest
from firth.models import ModelConfig
from firth.tasks.choice import Choose
from firth.tasks.classify import Classify, Pair
from firth.tasks.embed import Embed
from firth.tasks.lm import Dialogue, roles_of
from firth.tasks.regress import Regress
from firth.tasks.relation import Relation, WordInContext
from firth.tasks.span_qa import NO_ANSWER, SpanQA
from firth.tasks.tag import Tag
from firth.tasks.task import Task
from firth.tasks.text_to_text import TextToText, Writing, writing_of
from firth.tasks.words import SOURCES, by_words, rounded
from firth.text import Example
from firth.tokens import Tokenizer

TASK_FILE = "task.json"
OF_LABELS: dict[str, type[Classify]] = {
    "classify": Classify,
    "pair": Pair,
    "relation": Relation,
    "word-in-context": WordInContext,
}
TASKS = (*OF_LABELS, "regress", "choice", "tag", "span-qa", "text-to-text", "lm", "embed")
BART_HEADS = ("classify", "pair", "regress", "relation", "word-in-context", "span-qa")


def make_task(
    name: str,
    known: Sequence[Example] | Mapping[str, Any],
    tokenizer: Tokenizer,
    config: ModelConfig,
    recipe: Any = None,
) -> Task:
    """A task from the examples that it is to be learned from, or again from its facts in task.json.

    The recipe says how texts are read and written (`Writing`) and, as `answer`, whether by a "head" or by "words".
    Facts say that themselves.
    """
    if name not in TASKS:
        raise UserError(f"Unknown task {name!r}. {nearest(name, TASKS)}")
    learns = not isinstance(known, Mapping)
    facts = facts_of(name, known, config, recipe) if not isinstance(known, Mapping) else known
    writing = writing_of(facts, config)
    length = writing.max_seq_length
    if name == "text-to-text":
        return TextToText(tokenizer, config, writing, learns)
    if name == "lm":
        return Dialogue(tokenizer, config, writing, facts.get("roles", ()))
    if name == "embed":
        return Embed(tokenizer, config, length)
    labels = tuple(facts.get("labels", ()))
    if way(name, config, facts.get("answer", "head")) == "words":
        return by_words(name, labels, tokenizer, config, writing, learns)
    if name in OF_LABELS:
        return OF_LABELS[name](tokenizer, config, length, labels, learns)
    if name == "tag":
        return Tag(tokenizer, config, length, labels, learns)
    if name == "regress":
        return Regress(tokenizer, config, length, facts.get("texts", 1), learns)
    if name == "choice":
        return Choose(tokenizer, config, length, learns=learns)
    unanswerable, threshold = facts.get("unanswerable", False), facts.get("threshold", NO_ANSWER)
    return SpanQA(tokenizer, config, length, unanswerable, threshold, learns)


def without_examples(name: str, tokenizer: Tokenizer, config: ModelConfig, recipe: Any = None) -> Task:
    """A task before its examples are read: what a model cannot do, whatever they are, is refused here already."""
    known = {field: getattr(recipe, field) for field in ("answer", *Writing.__dataclass_fields__)} if recipe else {}
    return make_task(name, known, tokenizer, config)


def facts_of(name: str, examples: Sequence[Example], config: ModelConfig, recipe: Any) -> dict[str, Any]:
    """What the examples to learn from say about a task."""
    answer = getattr(recipe, "answer", "head")
    facts: dict[str, Any] = {"answer": answer}
    facts |= {name: getattr(recipe, name) for name in Writing.__dataclass_fields__}
    if name in OF_LABELS:
        facts["labels"] = sorted({e.target for e in examples})
    if name == "tag":
        facts["labels"] = sorted({tag for e in examples for tag in e.target})
    if name == "regress":
        facts["texts"] = max(len(e.texts) for e in examples)
        if way(name, config, answer) == "words":
            facts["labels"] = rounded([float(e.target) for e in examples])
    if name == "lm":
        facts["roles"] = roles_of(examples)
    if name == "span-qa":
        facts["unanswerable"] = any(len(e.target) == 0 for e in examples)
    return facts


def way(name: str, config: ModelConfig, answer: str) -> str:
    """Whether a model does a task by a head or by words; what it cannot do is refused."""
    if answer not in ("head", "words"):
        raise UserError(f"answer is {answer!r}, and must be head or words.")
    if config.shape == "encoder" and answer == "words":
        raise UserError("An encoder does not write, so it cannot answer in words. Take answer=head, or a decoder.")
    has_head = config.shape != "encoder-decoder" or name == "tag" or (config.framed and name in BART_HEADS)
    if answer == "head" and has_head:
        return "head"
    if name not in SOURCES:
        raise UserError(f"The task {name} asks about every word, and is not answered in words: take answer=head.")
    return "words"
