"""The dataloader: shards -> rows -> the batches of a step.

The micro-batches of step `s` are a pure function of (shards, recipe, s). Row `i` of the shuffled stream is found by a
seeded permutation with O(1) access, and the noise of a row comes from a counter-based generator keyed by (seed, row,
step). There is no iterator state: resume needs only the step, and processes read disjoint rows of the same stream.
After a rewind, `Recipe.skips` shifts the stream past the skipped batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np

from firth.core.console import say
from firth.core.errors import UserError
from firth.models import make_sequence_template
from firth.objectives import Batch, CounterRNG
from firth.tokens import (
    MixedDataset,
    MixedShards,
    PackedDataset,
    RowDataset,
    SegmentPairDataset,
    SegmentStreamDataset,
    SentencePairDataset,
    ShardSet,
    StreamDataset,
    Tokenizer,
    Vocabulary,
    open_shards,
)
from firth.train.distributed import SINGLE_PROCESS, DistContext
from firth.train.log import TextProgress
from firth.train.ramp import Stage, first_row_of_step, micro_batches_per_process, ramp_stages, stage_at
from firth.train.recipe import Recipe

HELD_OUT_SEED = 0  # of the rows, masks and pairs of every evaluation, so that losses of all runs can be compared
HELD_OUT_STREAMS = 8  # with order=stream


def open_recipe_shards(recipe: Recipe) -> ShardSet | MixedShards:
    """Open the shards of a recipe: one folder, or several to mix."""
    if not recipe.sources:
        return open_shards(Path(recipe.data))
    return MixedShards({name: open_shards(Path(folder)) for name, folder in recipe.sources.items()})


def make_mixed_dataset(recipe: Recipe, shards: MixedShards, held_out: bool) -> RowDataset:
    """Mix the rows of several shards; held-out rows come only from shards that have some."""
    parts = {name: part for name, part in shards.sources.items() if not held_out or part.held_out is not None}
    seeds = {name: (recipe.seed + crc32(name.encode())) % 2**63 for name in parts}
    sources = {
        name: make_row_dataset(replace(recipe, seed=seeds[name]), part, held_out) for name, part in parts.items()
    }
    return MixedDataset(sources, recipe.mixing.restrict_to(parts) if held_out else recipe.mixing, recipe.seed)


def make_row_dataset(recipe: Recipe, shards: ShardSet | MixedShards, held_out: bool) -> RowDataset:
    """Build the row dataset of an objective: packed documents, a stream or pairs of texts, with special tokens."""
    if isinstance(shards, MixedShards):
        return make_mixed_dataset(recipe, shards, held_out)
    vocab, objective = shards.tokenizer.vocab, recipe.objective
    length = objective.source_length(recipe.max_seq_length)
    part = shards.held_out if held_out else shards.train
    assert part is not None
    has_segments = objective.row_layout == "segments"
    template = make_sequence_template(recipe.model, vocab) if has_segments else objective.build_template(vocab)
    rows = (part, length, template, vocab.pad, recipe.seed)
    if recipe.order == "stream":
        num_streams = HELD_OUT_STREAMS if held_out else recipe.global_batch_size
        if has_segments:
            return SegmentStreamDataset(*rows, num_streams, shuffle=not held_out, allow_short=held_out)
        return StreamDataset(
            *rows, num_streams, shuffle=not held_out, allow_short=held_out, token_bits=objective.token_flags
        )
    if objective.row_layout in ("packed", "segments"):
        max_documents, kind = objective.max_documents(length), SegmentPairDataset if has_segments else PackedDataset
        num_packings = 1 if held_out else recipe.num_packings
        return kind(*rows, max_documents, not held_out, held_out, objective.token_flags, recipe.split, num_packings)
    return SentencePairDataset(
        *rows, objective.row_layout, shuffle=not held_out, allow_short=held_out, token_bits=objective.token_flags
    )


def make_held_out_dataset(recipe: Recipe, shards: ShardSet | MixedShards) -> RowDataset | None:
    """Build the dataset of held-out documents; print the reason and return None if they give no rows."""
    if shards.held_out is None:
        return None
    try:
        return make_row_dataset(replace(recipe, seed=HELD_OUT_SEED), shards, held_out=True)
    except UserError as e:  # a few documents may contain no sentence pairs
        say(f"no evaluation on held-out documents: {e}")
        return None


def make_ramp_datasets(recipe: Recipe, shards: ShardSet | MixedShards) -> dict[int, RowDataset]:
    """Build the datasets of shorter rows that a length ramp reads first, by row length."""
    lengths = {stage.seq_length for stage in ramp_stages(recipe)} - {recipe.max_seq_length}
    for length in lengths:
        recipe.objective.check(shards.tokenizer.vocab, recipe.objective.source_length(length))
    return {n: make_row_dataset(replace(recipe, max_seq_length=n), shards, held_out=False) for n in sorted(lengths)}


def single_stage_recipe(recipe: Recipe, stage: Stage) -> Recipe:
    """Return a recipe that runs one stage of the ramp from its first step to its last."""
    return replace(
        recipe,
        max_seq_length=stage.seq_length,
        per_device_train_batch_size=stage.micro_batch_rows,
        gradient_accumulation_steps=stage.num_micro_batches,
        processes=1,
        batch_ramp=0.0,
        length_ramp=0.0,
    )


def make_pretrain_batch_fn(
    recipe: Recipe,
    dataset: RowDataset,
    tokenizer: Tokenizer,
    ramp_datasets: Mapping[int, RowDataset] | None = None,
    dist_context: DistContext = SINGLE_PROCESS,
    progress: float | None = None,
) -> Callable[[int], list[Batch]]:
    """Return the function step -> micro-batches of this process. `ramp_datasets` hold shorter rows, by length.

    `progress` makes all batches as after this share of the run; None: that of their step.
    All processes together read the rows that a single process would read. A rewind skips as many rows as the skipped
    steps can have read; it does not change the ramp.
    """
    stages, by_length = ramp_stages(recipe), {**(ramp_datasets or {}), recipe.max_seq_length: dataset}

    def batches(step: int) -> list[Batch]:
        stage, num_skipped = stage_at(stages, step), sum(count for first, count in recipe.skips if step >= first)
        first = first_row_of_step(stage, step) + num_skipped * max(
            s.step_rows for s in stages if s.seq_length == stage.seq_length
        )
        index = np.arange(first, first + stage.step_rows)[dist_context.local_rows(stage.step_rows)]
        micro_batches = np.split(index, micro_batches_per_process(stage, dist_context.world_size))
        source = by_length[stage.seq_length]
        share = run_progress(recipe, step) if progress is None else progress
        return [make_batch(recipe, source, rows, tokenizer.vocab, step + num_skipped, share) for rows in micro_batches]

    return batches


def run_progress(recipe: Recipe, step: int) -> float:
    """Return the share of the run's steps before this one; 0 where their number is not yet known."""
    return min(step / recipe.max_steps, 1.0) if recipe.max_steps else 0.0


def make_text_progress_fn(
    recipe: Recipe, dataset: RowDataset, ramp_datasets: Mapping[int, RowDataset] | None = None
) -> Callable[[int], TextProgress]:
    """Return the function number of steps -> words and passes that they have read.

    Both follow from the rows of the steps: no state, so a resumed run has the same figures. Batches that a rewind
    skipped are not counted.
    """
    stages, by_length = ramp_stages(recipe), {**(ramp_datasets or {}), recipe.max_seq_length: dataset}

    def progress(steps: int) -> TextProgress:
        ends = [stage.first_step for stage in stages[1:]] + [steps]
        rows = [
            (by_length[stage.seq_length], max(min(end, steps) - stage.first_step, 0) * stage.step_rows)
            for stage, end in zip(stages, ends, strict=True)
        ]
        words = sum(source.words_of(count) for source, count in rows)
        return TextProgress(round(words), round(sum(source.passes_of(count) for source, count in rows), 4))

    return progress


def make_batch(
    recipe: Recipe,
    dataset: RowDataset,
    row_indices: np.ndarray,
    vocab: Vocabulary,
    step: int | None = None,
    progress: float = 0.0,
) -> Batch:
    """Read rows of the stream and apply the objective to them, as after this share of the run."""
    rows = dataset.get_rows(row_indices)
    rng = make_batch_rng(recipe, row_indices, step, progress)
    return recipe.objective(rows, rng, vocab)._replace(reset_state=rows.reset_state)


def make_batch_rng(
    recipe: Recipe, row_indices: np.ndarray, step: int | None = None, progress: float = 0.0
) -> CounterRNG:
    """Make the random generator of rows, keyed by row index and step. Default step: that of full batches."""
    return CounterRNG(
        recipe.noise_seed,
        row_indices,
        row_indices // recipe.global_batch_size if step is None else np.full_like(row_indices, step),
        progress,
    )
