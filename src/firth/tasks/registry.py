"""Build the `Task` for a task name and a model's architecture.

An encoder gets a task head. A decoder gets a head or, with answer=text, generates the answer as text (T5, section
2.4). By default T5 generates too, and BART where it was not published with a head (section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import read_object
from firth.models import ModelConfig
from firth.models.task_heads import TASK_HEAD_TYPES
from firth.tasks.choice import ChoiceTask
from firth.tasks.classify import ClassificationTask, PairClassificationTask
from firth.tasks.embed import EmbeddingTask
from firth.tasks.extract import ExtractTask, infer_example_schema, longest_target_tokens
from firth.tasks.head_task import HeadTask
from firth.tasks.lm import LanguageModelingTask, collect_roles
from firth.tasks.preference import (
    DEFAULT_BETA,
    DEFAULT_BETAS,
    DEFAULT_LOSS,
    PreferenceConfig,
    PreferenceTask,
    choose_preference_loss,
)
from firth.tasks.recipe import FINETUNE_TASKS, PREFERENCE_FIELDS, check_label_smoothing
from firth.tasks.regress import RegressionTask
from firth.tasks.relation import RelationTask, WordInContextTask
from firth.tasks.reward import DEFAULT_ROLES, RewardTask
from firth.tasks.span_qa import DEFAULT_NO_ANSWER_THRESHOLD, SpanQATask
from firth.tasks.tag import TaggingTask
from firth.tasks.task import Task
from firth.tasks.text_labels import TASK_PROMPTS, make_verbalized_task, round_regression_labels
from firth.tasks.text_to_text import AnswerConfig, TextToTextTask, fit_target_length, make_answer_config
from firth.text import Example
from firth.text.examples import TASK_SYNONYMS
from firth.tokens import Tokenizer

BART_HEAD_TASKS = ("classify", "pair", "regress", "relation", "word-in-context", "span-qa", "tag")
ANSWER_MODES = ("auto", "head", "text")
LABEL_TASKS: dict[str, type[ClassificationTask]] = {
    "classify": ClassificationTask,
    "pair": PairClassificationTask,
    "relation": RelationTask,
    "word-in-context": WordInContextTask,
}


def make_task(
    name: str,
    examples_or_metadata: Sequence[Example] | Mapping[str, Any],
    tokenizer: Tokenizer,
    config: ModelConfig,
    recipe: Any = None,
) -> Task:
    """Build a task from its training examples, or rebuild it from the metadata in task.json.

    With examples, `recipe` supplies the fields of `AnswerConfig` and `answer` ("head" or "text"). Metadata already
    holds them.
    """
    if name not in FINETUNE_TASKS:
        raise UserError(f"Unknown task {quote(name)}. {did_you_mean(name, FINETUNE_TASKS, TASK_SYNONYMS)}")
    learns = not isinstance(examples_or_metadata, Mapping)
    facts = (
        infer_task_metadata(name, examples_or_metadata, config, recipe)
        if not isinstance(examples_or_metadata, Mapping)
        else examples_or_metadata
    )
    writing = make_answer_config(facts, config)
    length = writing.max_seq_length
    if name == "text-to-text":
        if not isinstance(examples_or_metadata, Mapping) and not facts["max_target_length"]:
            writing = fit_target_length(writing, tokenizer, examples_or_metadata, config)
        return TextToTextTask(tokenizer, config, writing, learns)
    if name == "extract":
        if not isinstance(examples_or_metadata, Mapping):  # an object that is cut is of no use
            longest = longest_target_tokens(tokenizer, examples_or_metadata)
            writing = replace(writing, max_target_length=max(writing.max_target_length, longest))
        return ExtractTask(facts.get("json_schema") or {}, tokenizer, config, writing, learns)
    if name == "lm":
        return LanguageModelingTask(tokenizer, config, writing, facts.get("roles", ()))
    if name == "preference":
        return PreferenceTask(tokenizer, config, writing, facts.get("roles", ()), make_preference_config(facts))
    if name == "reward":
        return RewardTask(
            tokenizer, config, writing, facts.get("roles", () if facts.get("is_inferred") else DEFAULT_ROLES)
        )
    if name == "embed":
        return EmbeddingTask(tokenizer, config, length)
    labels = tuple(facts.get("labels", ()))
    if resolve_answer_mode(name, config, facts.get("answer", "auto")) == "text":
        return make_verbalized_task(name, labels, tokenizer, config, writing, learns)
    task = make_head_task(name, facts, tokenizer, config, length, learns)
    task.head_name = facts.get("head")
    return task


def make_head_task(
    name: str, facts: Mapping[str, Any], tokenizer: Tokenizer, config: ModelConfig, length: int, learns: bool
) -> HeadTask:
    """Build a task whose predictions are computed by a head."""
    labels = tuple(facts.get("labels", ()))
    if name in LABEL_TASKS:
        return LABEL_TASKS[name](tokenizer, config, length, labels, learns)
    if name == "tag":
        return TaggingTask(tokenizer, config, length, labels, learns)
    if name == "regress":
        return RegressionTask(tokenizer, config, length, facts.get("texts", 1), learns)
    if name == "choice":
        return ChoiceTask(tokenizer, config, length, is_training=learns)
    unanswerable, threshold = facts.get("unanswerable", False), facts.get("threshold", DEFAULT_NO_ANSWER_THRESHOLD)
    return SpanQATask(tokenizer, config, length, unanswerable, threshold, learns)


def make_preference_config(facts: Mapping[str, Any]) -> PreferenceConfig:
    """Return the loss of preference tuning, with the default beta of its paper."""
    loss, beta = facts.get("preference_loss") or DEFAULT_LOSS, facts.get("beta")
    label_smoothing = facts.get("label_smoothing", 0.0)
    check_label_smoothing(label_smoothing, loss)
    return PreferenceConfig(
        loss,
        DEFAULT_BETAS.get(loss, DEFAULT_BETA) if beta is None else beta,
        label_smoothing,
        facts.get("simpo_gamma", 1.0),
        facts.get("orpo_sft", "answer") == "all",
    )


def make_task_without_examples(name: str, tokenizer: Tokenizer, config: ModelConfig, recipe: Any = None) -> Task:
    """Build a task before its examples are read, to refuse early a task that the model does not support."""
    fields = ("answer", *AnswerConfig.__dataclass_fields__, *PREFERENCE_FIELDS)
    known = {field: getattr(recipe, field) for field in fields} if recipe else {}
    return make_task(name, known, tokenizer, config)


def infer_task_metadata(name: str, examples: Sequence[Example], config: ModelConfig, recipe: Any) -> dict[str, Any]:
    """Return the metadata of a task (task.json), inferred from its training examples and the recipe."""
    answer = getattr(recipe, "answer", "auto")
    facts: dict[str, Any] = {"answer": answer}
    facts |= {name: getattr(recipe, name) for name in AnswerConfig.__dataclass_fields__}
    if name in LABEL_TASKS:
        facts["labels"] = sorted({e.target for e in examples})
    if name == "tag":
        facts["labels"] = sorted({tag for e in examples for tag in e.target})
    if name == "regress":
        facts["texts"] = max(len(e.texts) for e in examples)
        if resolve_answer_mode(name, config, answer) == "text":
            facts["labels"] = round_regression_labels([float(e.target) for e in examples])
    if name in ("lm", "preference", "reward"):
        facts["roles"] = collect_roles(examples)
    if name == "preference":
        facts |= {field: getattr(recipe, field) for field in PREFERENCE_FIELDS}
        facts["preference_loss"] = facts["preference_loss"] or choose_preference_loss(examples)
    if name == "extract":
        given = getattr(recipe, "json_schema", "")
        facts["json_schema"] = read_object(Path(given)) if given else infer_example_schema(examples)
    if name == "span-qa":
        facts["unanswerable"] = any(len(e.target) == 0 for e in examples)
    return facts


def generates_by_default(name: str, config: ModelConfig) -> bool:
    """Whether an encoder-decoder generates the answers of a task where no one says how."""
    has_head = name in BART_HEAD_TASKS if config.adds_bos else config.reads_encoder_with(TASK_HEAD_TYPES[name])
    return config.architecture == "encoder-decoder" and not has_head


def resolve_answer_mode(name: str, config: ModelConfig, answer_mode: str) -> str:
    """Return "head" or "text". Raise if the model does not support the task in this way.

    auto: T5 generates its answers, as published; BART has heads for `BART_HEAD_TASKS`, T5Gemma for all tasks.
    """
    if answer_mode not in ANSWER_MODES:
        known = f"{', '.join(ANSWER_MODES[:-1])} or {ANSWER_MODES[-1]}"
        raise UserError(f"answer is {quote(answer_mode)}, and must be {known}.")
    if config.architecture == "encoder" and answer_mode == "text":
        raise UserError("An encoder generates no text. Take answer=head, or a decoder.")
    if answer_mode == "auto":
        answer_mode = "text" if name in TASK_PROMPTS and generates_by_default(name, config) else "head"
    if answer_mode == "head":
        return "head"
    if name not in TASK_PROMPTS:
        raise UserError(
            f"The task {name} labels every word, so its answer cannot be generated as text: take answer=head."
        )
    return "text"
