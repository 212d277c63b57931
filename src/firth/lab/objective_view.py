"""A text as each objective sees it: what the model reads, what it has to predict, and what it may attend to.

The rows are those of training: the text becomes shards in memory, the objective's own dataset makes rows of them, and
the objective makes a batch. Two kinds of objectives need more than one text: next-sentence prediction takes its false
pairs from other documents, which a blank line separates; translation language modelling reads the two sides of a pair,
which `|||` separates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.errors import UserError, did_you_mean, quote
from firth.core.serialization import to_dict
from firth.lab.show import format_objective, measure_rates, preview_row
from firth.lab.show_row import RowView, trace_batch
from firth.models.config import ModelConfig
from firth.models.presets import PRESETS
from firth.objectives import OBJECTIVES, CLMThenMLM, CounterRNG, MaskedNextToken, Mixture, Objective
from firth.recipes import pretraining_recipe
from firth.text import Document
from firth.text.salient_spans import find_salient_spans
from firth.tokens import ShardSet, Tokenizer
from firth.tokens.memory_shards import MemoryShards
from firth.train import Recipe
from firth.train.dataloader import make_row_dataset

SIDE_MARK = "|||"
MIN_ROW_TOKENS, MAX_ROW_TOKENS = 64, 512  # a short text gets padding, a long one is cut
ROOM_TOKENS = 8  # for special tokens
RATE_FIELDS = ("rate", "share", "infill")  # the share of the text that an objective hides, by the names it has
EXAMPLE_MODELS = {"encoder": "bert-tiny", "decoder": "gpt2-tiny", "encoder-decoder": "t5-tiny"}
SEGMENTS_MODEL = "xlnet-base"  # its template has two segments


class ObjectiveView(NamedTuple):
    """One objective on one text; `problem` says why a tokenizer or a text does not fit, and `row` is None then."""

    name: str
    description: str
    architectures: tuple[str, ...]
    rate: float | None  # None: it hides no share of the text
    row: RowView | None
    rates: dict[str, float]
    problem: str = ""


@dataclass(frozen=True)
class TextRows:
    """A text as shards, and the tokenizer that made them."""

    shards: ShardSet
    num_tokens: int


def split_typed_documents(text: str) -> list[Document]:
    """Split a text at blank lines; `a ||| b` is a pair.

    >>> [document.texts for document in split_typed_documents("One. Two.\\n\\nDrei ||| Three")]
    [('One. Two.',), ('Drei', 'Three')]
    """
    found = []
    for part in text.split("\n\n"):
        first, mark, second = part.strip().partition(SIDE_MARK)
        if first.strip():
            pair = second.strip() if mark and second.strip() else None
            found.append(Document(first.strip() if mark else part.strip(), "the text", text_pair=pair))
    return found


def make_text_rows(text: str, tokenizer: Tokenizer, language: str = "en") -> TextRows:
    """Turn a text into shards in memory."""
    documents = split_typed_documents(text)
    if not documents:
        raise UserError("The text is empty.")
    part = MemoryShards(documents, tokenizer, language, find_salient_spans)
    if not part.num_tokens:
        raise UserError("The text has no token.")
    shards = ShardSet(Path("memory"), part, part, tokenizer, {})
    return TextRows(shards, part.num_tokens)


def objective_rate(objective: Any) -> float | None:
    """Return the share of the text that an objective hides; None where there is no such setting."""
    if isinstance(objective, Mixture):
        return next((rate for part in objective.parts if (rate := objective_rate(part.objective)) is not None), None)
    if isinstance(objective, MaskedNextToken | CLMThenMLM):
        return objective.mlm.rate
    return next((getattr(objective, name) for name in rate_fields(objective)), None)


def rate_fields(objective: Any) -> list[str]:
    return [f.name for f in fields(objective) if f.name in RATE_FIELDS][:1]


def with_rate(objective: Any, rate: float) -> Any:
    """Return the objective with another share of hidden text, a mixture with that share in all its parts."""
    if isinstance(objective, Mixture):
        parts = tuple(replace(part, objective=with_rate(part.objective, rate)) for part in objective.parts)
        return replace(objective, parts=parts)
    if isinstance(objective, MaskedNextToken | CLMThenMLM):
        return replace(objective, mlm=replace(objective.mlm, rate=rate))
    return replace(objective, **dict.fromkeys(rate_fields(objective), rate))


def view_objective(
    rows: TextRows, name: str, config: ModelConfig, rate: float | None = None, draw: int = 0
) -> ObjectiveView:
    """Return what an objective makes of a text; `draw` numbers the random choices, as the epoch does in training."""
    if name not in OBJECTIVES:
        raise UserError(f"Unknown objective {quote(name)}. {did_you_mean(name, OBJECTIVES)}")
    objective = OBJECTIVES[name]
    try:
        if objective.row_layout == "sides" and rows.shards.train.first_side_lengths is None:
            raise UserError(f"This objective reads a text and its translation: write them as A {SIDE_MARK} B.")
        changed = objective if rate is None or objective_rate(objective) is None else with_rate(objective, rate)
        recipe = make_view_recipe(changed, config, rows)
        row, rates = make_view(recipe, rows, draw)
    except UserError as e:
        return ObjectiveView(
            name, describe_settings(objective), objective.architectures, objective_rate(objective), None, {}, str(e)
        )
    return ObjectiveView(
        name, describe_settings(recipe.objective), objective.architectures, objective_rate(recipe.objective), row, rates
    )


def describe_settings(objective: Objective) -> str:
    return format_objective(to_dict(objective))


def view_objectives(
    rows: TextRows, config: ModelConfig, names: Sequence[str] = (), rate: float | None = None, draw: int = 0
) -> list[ObjectiveView]:
    """Return the views of several objectives, by default of all."""
    return [view_objective(rows, name, config, rate, draw) for name in names or OBJECTIVES]


def make_view_recipe(objective: Objective, config: ModelConfig, rows: TextRows) -> Recipe:
    """Return a recipe of this objective, for the given model where it can be trained so, else for an example."""
    if objective.row_layout == "segments":
        config = config if config.family == "xlnet" else example_config(SEGMENTS_MODEL)
    elif config.architecture not in objective.architectures or config.recurrent is not None:
        config = example_config(EXAMPLE_MODELS[objective.architectures[0]])
    length = MIN_ROW_TOKENS
    while objective.source_length(length) < min(rows.num_tokens + ROOM_TOKENS, MAX_ROW_TOKENS):
        length += 1
    recipe = pretraining_recipe(config, objective=objective, max_seq_length=length, order="packed")
    recipe.objective.check(rows.shards.tokenizer.vocab, recipe.objective.source_length(length))
    return recipe


@lru_cache
def example_config(name: str) -> ModelConfig:
    return PRESETS[name]


def make_view(recipe: Recipe, rows: TextRows, draw: int) -> tuple[RowView, dict[str, float]]:
    """Return the first row and its rates. The held-out dataset keeps the order of the text, and accepts a short one."""
    tokenizer, objective = rows.shards.tokenizer, recipe.objective
    dataset = make_row_dataset(recipe, rows.shards, held_out=True)
    source = dataset.get_rows(np.array([draw * dataset.num_rows]))
    rng = CounterRNG(recipe.noise_seed, source.stream_index, np.zeros(1, np.int64))
    batch = objective(source, rng, tokenizer.vocab)
    trace = trace_batch(objective, source, rng, tokenizer.vocab)
    part_B = objective.sample_parts(rng) if isinstance(objective, Mixture) else None
    view = preview_row(recipe, tokenizer, source, batch, trace, 0, part_B)
    return view, measure_rates(source, batch, trace, tokenizer.vocab)
