"""Information extraction: the model reads a text and writes a JSON object, constrained by a schema.

The schema is inferred from the training objects, or given. It guarantees valid JSON with known fields and types; the
model has to find the values. The score counts fields (`metrics/fields.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from firth.core.console import progress
from firth.generate import generate_ids
from firth.generate.grammar import read_grammar
from firth.generate.loop import model_constraint
from firth.metrics import compute_metrics
from firth.metrics.fields import parse_object
from firth.models import Model, ModelConfig
from firth.tasks.task import Prediction, batch_indices_by_length
from firth.tasks.text_to_text import (
    NUM_ANSWER_SPECIAL_TOKENS,
    AnswerConfig,
    Seq2SeqExample,
    TextToTextTask,
    count_longest_answer,
    decoding_model,
)
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import ComputeConfig

SPARE_FACTOR = 4  # texts and lists may be this many times as long as the longest of training
MIN_TEXT_CHARS, MIN_LIST_ITEMS = 64, 8  # that an inferred schema allows
MAX_ENUM_VALUES = 16
MIN_ENUM_REPEATS = 10  # a field is a choice if each of its values occurs this often on average
SPARE_TARGET_TOKENS = 1.25  # generated objects may be longer than the longest of training by this factor


class ExtractTask(TextToTextTask):
    """Write a JSON object by a schema."""

    name = "extract"
    metric = "field_f1"
    long_answer_remedy = "Lower max_target_length, or extract fewer fields: objects of train are not cut."

    def __init__(
        self,
        schema: Mapping[str, Any],
        tokenizer: Tokenizer,
        config: ModelConfig,
        answer_config: AnswerConfig,
        is_training: bool = True,
    ) -> None:
        super().__init__(tokenizer, config, answer_config, is_training)
        self.schema = dict(schema)
        self.generation_config = replace(self.generation_config, json_schema=self.schema)
        read_grammar(self.generation_config)  # refuses a wrong schema before the training

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"json_schema": self.schema}

    def encode(self, examples: Sequence[Example]) -> list[Seq2SeqExample]:
        return super().encode([e._replace(target=target_text(e.target, self.schema)) for e in examples])

    def predict(
        self, model: Model, items: Sequence[Seq2SeqExample], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        """Return JSON text; `complete` in `extra` is false for a text that was cut."""
        predictions: list[Prediction | None] = [None] * len(items)
        constraint = model_constraint(model, self.generation_config)
        assert constraint is not None
        with decoding_model(model, compute) as decoder, progress("extracting", "objects", len(items)) as shown:
            for indices in batch_indices_by_length(items, batch_size, lambda item: len(item.ids)):
                prompts = [items[i].ids for i in indices]
                written = generate_ids(decoder, prompts, generation_config=self.generation_config)
                for i, ids in zip(indices, written, strict=True):
                    complete = constraint.facts(ids)["complete"]
                    predictions[i] = Prediction(constraint.text(ids), extra={"complete": complete})
                shown.advance(len(indices))
        return [p for p in predictions if p is not None]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return compute_metrics(self.name, [p.prediction for p in predictions], [e.target for e in examples])


def longest_target_tokens(tokenizer: Tokenizer, examples: Sequence[Example]) -> int:
    """Return how many tokens an object may take: those of the longest in training, and some more."""
    return int(SPARE_TARGET_TOKENS * count_longest_answer(tokenizer, examples)) + NUM_ANSWER_SPECIAL_TOKENS


def infer_schema(objects: Sequence[Any]) -> dict[str, Any]:
    """Return a JSON schema that allows these values, and others like them.

    Fields that all objects have are required; no other fields are allowed. A text with few values that repeat is a
    choice of them. Texts and lists may be four times as long as those that were seen.

    >>> infer_schema([{"a": 1}, {"a": None, "b": [2.5]}])["properties"]["a"]
    {'type': ['integer', 'null']}
    """
    kinds = dict.fromkeys(map(json_type, objects))
    if "integer" in kinds and "number" in kinds:
        kinds.pop("integer")
    schema: dict[str, Any] = {"type": next(iter(kinds)) if len(kinds) == 1 else list(kinds)}
    texts = [value for value in objects if isinstance(value, str)]
    lists = [value for value in objects if isinstance(value, list)]
    mappings = [value for value in objects if isinstance(value, dict)]
    if texts:
        values = list(dict.fromkeys(texts))
        if len(kinds) == 1 and len(values) <= MAX_ENUM_VALUES and len(texts) >= MIN_ENUM_REPEATS * len(values):
            return {"enum": values}
        schema["maxLength"] = max(MIN_TEXT_CHARS, SPARE_FACTOR * max(map(len, texts)))
    if lists:
        items = [item for value in lists for item in value]
        schema["maxItems"] = max(MIN_LIST_ITEMS, SPARE_FACTOR * max(map(len, lists)))
        schema["items"] = infer_schema(items) if items else {}
    if mappings:
        names = dict.fromkeys(name for value in mappings for name in value)
        schema["properties"] = {n: infer_schema([value[n] for value in mappings if n in value]) for n in names}
        schema["required"] = [name for name in names if all(name in value for value in mappings)]
        schema["additionalProperties"] = False
    return schema


def json_type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def infer_example_schema(examples: Sequence[Example]) -> dict[str, Any]:
    """Return the schema of the targets of examples, which are JSON text."""
    return infer_schema([parse_object(e.target) or {} for e in examples])


def order_fields(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value whose fields have the order of the schema, in which constrained decoding writes them."""
    if isinstance(value, list):
        return [order_fields(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    known: Mapping[str, Any] = schema.get("properties", {})
    names = [*(name for name in known if name in value), *(name for name in value if name not in known)]
    return {name: order_fields(value[name], known.get(name, {})) for name in names}


def target_text(target: str | None, schema: Mapping[str, Any]) -> str:
    """Return the target of an example as it is learned: JSON with its fields in the order of the schema."""
    return "" if target is None else json.dumps(order_fields(parse_object(target), schema), ensure_ascii=False)
