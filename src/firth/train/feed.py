"""What a run reads at each step: rows of the shards, and the batches that its objective makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np

from firth.console import say
from firth.errors import UserError
from firth.objectives import Batch, Draw
from firth.tokens import (
    MixedShards,
    MixedSource,
    PairSource,
    Prepared,
    RowSource,
    Source,
    StreamSource,
    Tokenizer,
    Vocabulary,
    open_shards,
)
from firth.train.parallel import ALONE, World
from firth.train.ramp import Stage, first_row, share_of, stage_at, stages
from firth.train.recipe import Recipe


def open_data(recipe: Recipe) -> Prepared | MixedShards:
    """The shards that a recipe names: one folder, or several that are mixed."""
    if not recipe.sources:
        return open_shards(Path(recipe.data))
    return MixedShards({name: open_shards(Path(folder)) for name, folder in recipe.sources.items()})


def mixed_source(recipe: Recipe, shards: MixedShards, held_out: bool) -> Source:
    """The rows of several shards; of those held out, of the shards that have some."""
    parts = {name: part for name, part in shards.parts.items() if not held_out or part.held_out is not None}
    seeds = {name: (recipe.seed + crc32(name.encode())) % 2**63 for name in parts}
    sources = {name: row_source(replace(recipe, seed=seeds[name]), part, held_out) for name, part in parts.items()}
    return MixedSource(sources, recipe.mixing.only(parts) if held_out else recipe.mixing, recipe.seed)


def row_source(recipe: Recipe, shards: Prepared | MixedShards, held_out: bool) -> Source:
    """The rows that an objective reads: packed documents or pairs, their length, and what stands around each text."""
    if isinstance(shards, MixedShards):
        return mixed_source(recipe, shards, held_out)
    vocab, objective = shards.tokenizer.vocab, recipe.objective
    length = objective.source_length(recipe.max_seq_length)
    part = shards.held_out if held_out else shards.train
    assert part is not None
    rows = (part, length, objective.frame(vocab), vocab.pad, recipe.seed)
    if recipe.order == "stream":
        lanes = recipe.per_device_train_batch_size if held_out else recipe.global_batch
        return StreamSource(*rows, lanes, shuffle=not held_out, allow_short=held_out, bits=objective.bits)
    if objective.layout == "packed":
        most = objective.max_documents(length)
        return RowSource(*rows, most, not held_out, held_out, objective.bits, recipe.split)
    return PairSource(*rows, objective.layout, shuffle=not held_out, allow_short=held_out, bits=objective.bits)


def held_out_rows(recipe: Recipe, shards: Prepared | MixedShards) -> Source | None:
    """The rows of the held-out documents; None where there are no such rows, which is said."""
    if shards.held_out is None:
        return None
    try:
        return row_source(recipe, shards, held_out=True)
    except UserError as e:  # a few documents may well hold no pairs of sentences
        say(f"no evaluation on held-out documents: {e}")
        return None


def shorter_rows(recipe: Recipe, shards: Prepared | MixedShards) -> dict[int, Source]:
    """The rows that a run begins with where they grow, by their length."""
    lengths = {stage.length for stage in stages(recipe)} - {recipe.max_seq_length}
    for length in lengths:
        recipe.objective.check(shards.tokenizer.vocab, recipe.objective.source_length(length))
    return {n: row_source(replace(recipe, max_seq_length=n), shards, held_out=False) for n in sorted(lengths)}


def alone(recipe: Recipe, stage: Stage) -> Recipe:
    """A run that is as one stage of this one from its first step to its last."""
    return replace(
        recipe,
        max_seq_length=stage.length,
        per_device_train_batch_size=stage.rows,
        gradient_accumulation_steps=stage.micro,
        processes=1,
        batch_ramp=0.0,
        length_ramp=0.0,
    )


def batch_function(
    recipe: Recipe,
    rows: Source,
    tokenizer: Tokenizer,
    shorter: Mapping[int, Source] | None = None,
    world: World = ALONE,
) -> Callable[[int], list[Batch]]:
    """The micro-batches of a step, as a pure function of the step. `shorter` are rows of earlier stages, by length.

    Each process of a `world` reads its part of the rows, which are those of one process. After a rewind as many
    rows are passed over as the steps between can have read; how many there are in a step, and how long, is as planned.
    """
    found, by_length = stages(recipe), {**(shorter or {}), recipe.max_seq_length: rows}

    def batches(step: int) -> list[Batch]:
        stage, passed = stage_at(found, step), sum(count for first, count in recipe.skips if step >= first)
        first = first_row(stage, step) + passed * max(s.step_rows for s in found if s.length == stage.length)
        index = np.arange(first, first + stage.step_rows)[world.mine(stage.step_rows)]
        micro, source = np.split(index, share_of(stage, world.size)), by_length[stage.length]
        return [make_batch(recipe, source, some, tokenizer.vocab, step + passed) for some in micro]

    return batches


def make_batch(recipe: Recipe, source: Source, index: np.ndarray, vocab: Vocabulary, step: int | None = None) -> Batch:
    """What the objective makes of some rows of the stream."""
    rows = source.rows(index)
    return recipe.objective(rows, draw(recipe, index, step), vocab)._replace(fresh=rows.fresh)


def draw(recipe: Recipe, index: np.ndarray, step: int | None = None) -> Draw:
    """The random numbers of rows, by their places in the stream; of one step, or as if all steps had full batches."""
    return Draw(recipe.seed, index, index // recipe.global_batch if step is None else np.full_like(index, step))
