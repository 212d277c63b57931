"""A recipe and shards to a run folder with a model in it."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import torch

from firth.console import count, duration, say, warn
from firth.errors import UserError
from firth.files import MANIFEST, damage, read_json, whole_folder, write_results
from firth.models import (
    Model,
    check_pair,
    distilled,
    inherit,
    load_model,
    load_weights,
    make_model,
    read_tensors,
    take_endings,
    warm_start,
    write_model,
)
from firth.objectives import MLM, NAMED, Batch, Draw, Objective
from firth.plain import KIND, from_plain, to_plain
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
from firth.train.checkpoint import disk_errors, last_checkpoint, last_writes, list_checkpoints, remove_folder
from firth.train.clock import Clock
from firth.train.deterministic import deterministic
from firth.train.device import Machine, choose_machine
from firth.train.diagnose import spoilt_layers
from firth.train.folder import shared_folder
from firth.train.log import Log, read_log
from firth.train.loop import fit
from firth.train.optim import make_optimizer
from firth.train.parallel import ALONE, World, join
from firth.train.ramp import Stage, check_share, first_row, mean_batch, share_of, stage_at, stage_shares, stages
from firth.train.recipe import Recipe, Training, differences, load_recipe, save_recipe
from firth.train.step import Carry, Losses, Run, dropout_seed, prepared, reading_on, sum_of_means, train_step
from firth.train.unfreeze import Pace

R = TypeVar("R", bound=Training)
EVALUATIONS = 10  # per run, when --eval-steps does not say
# Fields that a run may leave open, and then fixes, or notes of itself.
SETTLED = ("max_steps", "warmup_steps", "eval_steps", "shards_checksum", "train_checksum", "dev_checksum", "skips")
FIXED = ("model", "optim", "ema_decay", "order", "memory", "tokenizer")  # what a checkpoint's tensors depend on
WAYS = ("parallel", "cpu_offload")  # how a step is computed, not what: any of them can go on with any checkpoint
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "processes")  # whose product a run keeps
# Fields that name files and folders.
PLACES = ("output_dir", "data", "checkpoint", "teacher", "train", "dev", "baseline")


def pretrain(
    recipe: Recipe,
    resume: bool = False,
    overwrite: bool = False,
    began: float | None = None,
    allow_change: bool = False,
    rewind: int | None = None,
) -> dict[str, Any]:
    """Run a recipe. `began` is when the clock of `minutes` started (time.monotonic).

    A resumed run keeps its recipe unless `allow_change`; with `rewind` it goes back (see `go_back`).
    """
    recipe.check()
    folder, world = Path(recipe.output_dir), join(recipe)
    if world.goes_on(recipe.output_dir):
        resume, overwrite, rewind = True, False, None
    inputs = [recipe.data, *recipe.sources.values(), recipe.checkpoint, recipe.teacher]
    with shared_folder(world, folder, resume, overwrite, inputs):
        clock = Clock(folder, resume, began)
        with world.only_first(clock):
            return pretrain_in(folder, recipe, resume, clock.began, allow_change, rewind)


def pretrain_in(
    folder: Path,
    recipe: Recipe,
    resume: bool = False,
    began: float | None = None,
    allow_change: bool = False,
    rewind: int | None = None,
) -> dict[str, Any]:
    """The same, in a folder that is held already."""
    with deterministic(recipe.deterministic):
        return run_in(folder, recipe, resume, began, allow_change, rewind)


def run_in(
    folder: Path, recipe: Recipe, resume: bool, began: float | None, allow_change: bool, rewind: int | None
) -> dict[str, Any]:
    """The run itself, from its data to its results."""
    began = time.monotonic() if began is None else began
    world, stored = join(recipe), folder / "recipe.yaml"
    begins = not (resume and world.once(stored.is_file))
    recipe = replace(recipe, processes=world.size)
    if not begins:
        recipe = agreed(world, lambda: same_recipe(load_recipe(stored, Recipe), recipe, allow_change))
        if world.once(lambda: is_finished(folder, recipe)):
            say(f"{folder} is finished already.")
            return dict(read_json(folder / "results.json"))
    check_share(recipe, world.size)
    shards = open_data(recipe)
    tokenizer, objective = shards.tokenizer, recipe.objective
    check_fit(recipe, tokenizer)

    def on_these_shards() -> Recipe:
        found = same_shards(recipe, shards, allow_change)
        if rewind is not None:
            found = go_back(folder, found, rewind)
        if not begins:
            save_recipe(found, stored)
        return found

    recipe = agreed(world, on_these_shards)
    machine = choose_machine(recipe, world)

    rows = world.in_turn(lambda: row_source(recipe, shards, held_out=False))
    shorter = world.in_turn(lambda: shorter_rows(recipe, shards))
    evaluate = None
    if (aside := world.in_turn(lambda: held_out_rows(recipe, shards))) is not None:
        evaluate = held_out_loss(recipe, aside, tokenizer, machine)
    teacher = load_teacher(recipe, machine)
    model = first_model(recipe, tokenizer, teacher)
    losses = learn_from(teacher, model, recipe)
    if recipe.warm_start == "ppmi" and world.first and not (resume and last_checkpoint(folder)):
        assert isinstance(shards, Prepared), "a recipe with a mix has no warm start"
        say("counting which tokens keep company, for the first embeddings")
        warm_start(model, shards.train, recipe.seed)
    if begins:

        def try_out() -> tuple[float, float]:
            def one(plain: Recipe, judged: bool) -> tuple[float, float]:
                twin, source = first_model(plain, tokenizer, teacher), shorter.get(plain.max_seq_length, rows)
                batches, judge = batch_function(plain, source, tokenizer, world=world), evaluate if judged else None
                return trial(plain, machine, twin, batches, judge, learn_from(teacher, twin, plain))

            planned = stage_shares(recipe)
            found = [(share, one(alone(recipe, stage), i == 0)) for i, (stage, share) in enumerate(planned)]
            return sum(share * seconds for share, (seconds, _) in found), found[0][1][1]

        settled = settle(recipe, rows.num_rows, try_out, began, step_rows=mean_batch(recipe))
        recipe = agreed(world, lambda: settled)
        if world.first:
            save_recipe(recipe, stored)
    batches = batch_function(recipe, rows, tokenizer, shorter, world)
    say(
        f"{type(objective).__name__} on {shards.num_tokens:,} tokens in {count(rows.num_rows, 'row')} of {rows.length} "
        f"({100 * rows.tokens_used:.1f}% filled): {count(recipe.max_steps, 'step')} of "
        f"{count(recipe.global_batch, 'row')}, {recipe.max_steps * mean_batch(recipe) / rows.num_rows:.1f} times "
        f"through the text, on {machine}"
    )
    for stage in stages(recipe)[:-1]:
        say(f"from step {stage.first:,} on {count(stage.step_rows, 'row')} of {stage.length}, then more")
    shares = rows.table(round(recipe.max_steps * mean_batch(recipe))) if isinstance(rows, MixedSource) else []
    for share in shares:
        say(f"  {share}")
    say(f"{recipe.model.family}, {recipe.model.shape}: {model.num_parameters:,} parameters")
    pace = Pace(recipe.layer_decay)
    run = Run(recipe, machine, model, batches, evaluate, folder, "pretraining", losses=losses, pace=pace)
    with last_writes(folder):
        outcome = fit(run, resume)
        finish(model, folder, world)
    results = {
        "output_dir": str(folder),
        "steps": outcome.steps,
        "loss": outcome.loss,
        "eval_loss": outcome.scores.get("eval_loss"),
        "unigram_entropy": shards.unigram_entropy,
        **({"mix": [share._asdict() for share in shares]} if shares else {}),
        "tokens": outcome.tokens,
        "tokens_per_second": outcome.tokens_per_second,
        "parameters": model.num_parameters,
        "seconds": time.monotonic() - began,
    }
    if world.first:
        with last_writes(folder):
            write_results(folder / "results.json", results)
    return world.share(results)


def agreed(world: World, make: Callable[[], Recipe]) -> Recipe:
    """The recipe that the first process makes, for all."""
    if world.size == 1:
        return make()
    return from_plain(world.once(lambda: to_plain(make())), Recipe, "recipe")


def finish(model: Model, folder: Path, world: World = ALONE) -> None:
    """Write `final/`, once."""
    if world.once(lambda: damage(folder / "final") is not None):
        complete = world.whole(model)
        if complete is not None:
            if spoilt := spoilt_layers(complete):
                raise UserError(
                    f"Weights have become no numbers ({spoilt}), and final/ is not written. Lower --learning-rate or "
                    "lengthen --warmup-steps; --resume --rewind 0 goes back to before the trouble."
                )
            with disk_errors(folder / "final"), whole_folder(folder / "final") as temporary:
                write_model(complete, temporary)


def first_model(recipe: Recipe, tokenizer: Tokenizer, teacher: Model | None = None) -> Model:
    """The model of step 0: fresh weights that depend on the seed alone, or those of a checkpoint or a teacher."""
    torch.manual_seed(recipe.seed)
    model = make_model(recipe.model)
    if recipe.checkpoint:
        load_weights(model, read_tensors(Path(recipe.checkpoint)), recipe.checkpoint)
        take_endings(model, Path(recipe.checkpoint))
    elif teacher is not None:
        inherit(model, teacher)
    model.tokenizer, model.objective = tokenizer, note(recipe.objective)
    if recipe.memory:
        model.remember(recipe.memory)
    return model


def note(objective: Objective) -> dict[str, Any]:
    """An objective as a checkpoint remembers it; one that was changed has no name."""
    name = next((name for name, known in NAMED.items() if known == objective), None)
    return {"name": name, KIND: type(objective).__name__, **to_plain(objective)}


def load_teacher(recipe: Recipe, machine: Machine) -> Model | None:
    """The model to learn from, on the device; None without one."""
    if not recipe.teacher:
        return None
    if not isinstance(recipe.objective, MLM) or recipe.objective.extras:
        raise UserError("Distillation is with mlm or whole-word: teacher and model answer the same blanks.")
    return load_model(recipe.teacher).to(machine.device).requires_grad_(False)


def learn_from(teacher: Model | None, model: Model, recipe: Recipe) -> Losses | None:
    """The losses of distillation; None without a teacher."""
    if teacher is None:
        return None
    student, master = check_pair(model, teacher, recipe.distillation)
    if teacher.tokenizer and model.tokenizer and teacher.tokenizer.fingerprint != model.tokenizer.fingerprint:
        raise UserError(f"{recipe.teacher} has another tokenizer than the data: prepare the text with the teacher's.")
    return partial(distilled, student, master, spec=recipe.distillation)


def check_fit(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Whether the shards' tokenizer is the run's, and one that the model has room for."""
    if recipe.tokenizer and recipe.tokenizer != tokenizer.fingerprint:
        raise UserError(
            f"{recipe.data or 'The mix'} was made with another tokenizer ({tokenizer.fingerprint}) than the run's "
            f"({recipe.tokenizer}): prepare the text again with `firth prepare --tokenizer`."
        )
    if recipe.model.vocab_size < tokenizer.vocab.size:
        raise UserError(
            f"The tokenizer has {tokenizer.vocab.size:,} tokens, and the model only {recipe.model.vocab_size:,}: "
            "they do not belong together."
        )
    recipe.objective.check(tokenizer.vocab, recipe.objective.source_length(recipe.max_seq_length))


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


def held_out_loss(
    recipe: Recipe, rows: Source, tokenizer: Tokenizer, machine: Machine
) -> Callable[[Model], dict[str, float]]:
    """The mean loss on held-out documents, with the same noise every time.

    Processes take turns with the batches, unless each batch goes on from the one before: then each reads all. The sums
    are added up in the order of the batches, as in one process.
    """
    size, last = recipe.per_device_train_batch_size, min(rows.num_rows, recipe.eval_rows)
    world = machine.world if recipe.order == "packed" else ALONE
    starts = range(0, last, size)

    @torch.no_grad()
    def evaluate(model: Model) -> dict[str, float]:
        model.eval()
        found: dict[str, float] = {}
        counts: Counter[str] = Counter()
        left: list[Carry] = []
        for turn in range(0, len(starts), world.size):
            place = min(turn + world.rank, len(starts) - 1)  # who has nothing left to do reads along
            first = starts[place]
            batch = make_batch(recipe, rows, np.arange(first, min(first + size, last)), tokenizer.vocab)
            torch.manual_seed(dropout_seed(recipe.seed, first, 0))  # for models that draw tokens themselves
            with machine.precision(), reading_on(model, batch, left.pop() if left else {}, 0, left):
                parts = model.losses(batch.to(machine.device))
            for name in parts:
                found |= {f"{name}/{i}": 0.0 for i in range(turn, min(turn + world.size, len(starts)))}
            if place == turn + world.rank:
                found |= {f"{name}/{place}": part.item() for name, part in parts.items()}
                counts.update(batch.counts)
            else:
                counts.update(dict.fromkeys(batch.counts, 0))
        machine.world.rest(model)
        totals: dict[str, float] = defaultdict(float)
        for key, value in world.sums(found).items():
            totals[key.split("/")[0]] += value
        return {"eval_loss": sum_of_means(totals, {name: int(n) for name, n in world.sums(counts).items()})}

    return evaluate


def settle(
    recipe: R,
    num_rows: int,
    trial: Callable[[], tuple[float, float]],
    began: float,
    evaluations: int = EVALUATIONS,
    least: int = 1,
    step_rows: float | None = None,
) -> R:
    """Fix what was left open: the number of steps (by minutes or by epochs), warm-up, evaluations.

    `step_rows` is how many rows a step reads on average, where that is not the whole batch.
    """
    steps = recipe.max_steps
    if recipe.minutes:
        step_seconds, evaluation_seconds = trial()
        left = 60 * recipe.minutes - (time.monotonic() - began)
        if recipe.eval_steps:  # and once more at the end
            steps = int((left - evaluation_seconds) / (step_seconds + evaluation_seconds / recipe.eval_steps))
        else:
            steps = int((left - evaluations * evaluation_seconds) / step_seconds)
        if steps < 1:
            warn(f"{recipe.minutes:g} minutes are over before a first step: one is taken.")
            steps = 1
        if recipe.max_steps:
            steps = min(steps, recipe.max_steps)
        say(f"{step_seconds:.3f}s a step: {count(steps, 'step takes', 'steps take')} {duration(steps * step_seconds)}")
    elif not steps:
        steps = math.ceil(recipe.num_train_epochs * num_rows / (step_rows or recipe.global_batch))
        if steps < least:
            found = f"num_train_epochs={recipe.num_train_epochs:g} makes {count(steps, 'step')}"
            say(f"{found}, which is few: {least:,} are taken instead")
            steps = least
    if recipe.warmup_steps >= steps:
        warn(
            f"warmup_steps is {recipe.warmup_steps:,} of {count(steps, 'step')}: the rate does not come to its height."
        )
    return replace(
        recipe,
        max_steps=steps,
        warmup_steps=steps // 10 if recipe.warmup_steps < 0 else recipe.warmup_steps,
        eval_steps=recipe.eval_steps or max(1, math.ceil(steps / evaluations)),
    )


def trial(
    training: Training,
    machine: Machine,
    model: Model,
    batches: Callable[[int], Sequence[Batch]],
    evaluate: Callable[[Model], dict[str, float]] | None,
    losses: Losses | None = None,
    seconds: float = 4.0,
    pace: Pace | None = None,
) -> tuple[float, float]:
    """Seconds that a step and an evaluation take, on a model that is thrown away."""
    world = machine.world
    world.place(model, training, machine)
    run = Run(training, machine, model, batches, losses=losses)
    losses_of = prepared(run)
    optimizer, carry = make_optimizer(model, training, pace), Carry()

    def timed(steps: Sequence[int]) -> float:
        start = time.monotonic()
        for step in steps:
            total = train_step(run, losses_of, optimizer, batches(step), step, 0.0, carry)
        total.item()
        return world.share(time.monotonic() - start)

    timed(range(3))
    one = timed(range(3, 6)) / 3
    count = max(3, min(200, int(seconds / one)))
    step_seconds = timed(range(6, 6 + count)) / count
    start = time.monotonic()
    if evaluate is not None:
        evaluate(model)
    return step_seconds, time.monotonic() - start


def is_finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a run has come to its last step; one that is given more steps goes on."""
    results = folder / "results.json"
    return results.is_file() and damage(folder / "final") is None and read_json(results)["steps"] >= recipe.max_steps


def same_recipe(earlier: R, now: R, allow_change: bool = False, never: Sequence[str] = FIXED) -> R:
    """The recipe that a resumed run goes on with; anything that was changed is said, and refused unless allowed.

    What is left open now is as it was settled then, and a run's folder may have been moved. The fields in `never`
    cannot change within a run.
    """
    asked = now.minutes, now.max_steps or earlier.max_steps
    if allow_change and now.minutes and asked != (earlier.minutes, earlier.max_steps):
        say(f"the run was planned as {count(earlier.max_steps, 'step')}; --max-steps N without --minutes changes that")
    settled = {name: getattr(earlier, name) for name in SETTLED if hasattr(now, name) and left_open(now, name)}
    places = {name: getattr(now, name) for name in PLACES if same_place(earlier, now, name)}
    ways = {name: getattr(now, name) for name in WAYS}
    earlier, now = replace(earlier, **places, **ways), same_batch(earlier, replace(now, **settled), allow_change)
    changed = differences(earlier, now)
    if fixed := [change for change in changed if change.split(":")[0].split(".")[0] in never]:
        raise UserError(
            "A resumed run keeps its recipe, and this one differs: " + "; ".join(fixed) + ". "
            "The checkpoints were made with these: leave them as they were, or start a new run."
        )
    if changed and not allow_change:
        raise UserError(
            "A resumed run keeps its recipe, and this one differs: " + "; ".join(changed) + ". "
            "Leave these options as they were, allow it with --allow-change, or start a new run."
        )
    if changed:
        say("from here on the recipe differs: " + "; ".join(changed))
    return now


def same_batch(earlier: R, now: R, allow_change: bool) -> R:
    """A run keeps its batch however many processes it goes on in: each then computes more of it, or less."""
    then = {name: getattr(earlier, name) for name in BATCH}
    same = all(getattr(now, name) == then[name] for name in BATCH[:2])
    adapted = now.global_batch == earlier.global_batch and not allow_change
    if now.processes == earlier.processes or not (same or adapted):
        return now
    say(
        f"the run began in {count(earlier.processes, 'process', 'processes')} and goes on in {now.processes}: "
        f"a step still learns from {count(earlier.global_batch, 'row')}"
    )
    return replace(now, **then)


def same_shards(recipe: Recipe, shards: Prepared | MixedShards, allow_change: bool) -> Recipe:
    """Note the checksum of the shards when a run begins; when it goes on, read them whole and compare."""
    parts = shards.parts.values() if isinstance(shards, MixedShards) else [shards]
    files = [read_json(part.folder / MANIFEST)["files"] for part in parts]
    found = f"{crc32(json.dumps(files, sort_keys=True).encode()):08x}"
    if recipe.shards_checksum:
        for part in parts:
            part.verify()
    if recipe.shards_checksum not in ("", found):
        if not allow_change:
            raise UserError(
                f"{recipe.data or 'The mix'} is not what it was when this run began: its shards have changed. Put the "
                "old ones back, start a new run, or go on with the new ones by --allow-change."
            )
        say("from here on the run reads other shards than those that it began with")
    return replace(recipe, shards_checksum=found)


def go_back(folder: Path, recipe: Recipe, steps: int) -> Recipe:
    """Go back to the last whole checkpoint at least so many steps before the trouble, and pass over its text.

    All text from the checkpoint to there is left out, which the recipe notes: any later resume leaves it out too.
    """
    start, last = turn_back(folder, steps)
    recipe = replace(recipe, skips=longer_skips(recipe.skips, start, last))
    save_recipe(recipe, folder / "recipe.yaml")
    pass_over(folder, start, last)
    return recipe


def longer_skips(skips: Sequence[tuple[int, int]], start: int, last: int) -> tuple[tuple[int, int], ...]:
    """What is left out (from a step on, so many) after one more way back, from `last` to `start`.

    What an earlier way back has left out between them stays out: the text goes on after all that was read.

    >>> longer_skips([], 4, 10), longer_skips([(4, 6)], 4, 8), longer_skips([(4, 6)], 2, 8)
    (((4, 6),), ((4, 6), (4, 4)), ((2, 12),))
    """
    before = [skip for skip in skips if skip[0] <= start]
    between = sum(count for first, count in skips if first > start)
    return (*before, (start, last - start + between))


def turn_back(folder: Path, steps: int) -> tuple[int, int]:
    """The step of the checkpoint that a run goes back to, and the last of its trouble; newer checkpoints are removed.

    The trouble is the steps that were skipped at the end of the log, or else the last step.
    """
    if steps < 0:
        raise UserError(f"--rewind is {steps}, and must be at least 0.")
    log = folder / "log.jsonl"
    lines = [line for line in read_log(log) if "data" in line] if log.is_file() else []
    if not lines:
        raise UserError(f"{folder} has no steps to rewind: start it without --rewind.")
    last = first = lines[-1]["step"]
    for line in reversed(lines):
        if "skipped" not in line or line["step"] < first - 1:
            break
        first = line["step"]
    found = list_checkpoints(folder)
    early = [p for p in found if int(p.name.split("-")[1]) < first - steps and damage(p) is None]
    if not early:
        raise UserError(
            f"{folder} has no whole checkpoint {count(steps, 'step')} before step {first}. Rewind by less, or start "
            "anew (--save-total-limit keeps more of them)."
        )
    for newer in found[: found.index(early[0])]:
        remove_folder(newer)
    return int(early[0].name.split("-")[1]), last


def pass_over(folder: Path, start: int, last: int) -> None:
    """Cut the log of a run that goes back, and note it there."""
    with Log(folder / "log.jsonl", start) as cut:
        cut.write(step=start, rewound_from=last, passed_over=last - start)
    between = count(last - start, "step")
    say(f"going back from step {last} to step {start}; the text of the {between} between is passed over")


def left_open(recipe: Training, name: str) -> bool:
    """Whether a field that `settle` can fix is left to it."""
    if name == "max_steps":
        return bool(recipe.minutes) or not recipe.max_steps
    return getattr(recipe, name) < 0 if name == "warmup_steps" else not getattr(recipe, name)


def same_place(earlier: Training, now: Training, name: str) -> bool:
    """Whether two recipes name one file or folder, counted from the run's own folder where it lies in there."""
    if not hasattr(now, name):
        return False

    def place(recipe: Training) -> Path:
        path, home = Path(getattr(recipe, name)).absolute(), Path(recipe.output_dir).absolute()
        return path.relative_to(home) if path.is_relative_to(home) else path

    return bool(getattr(now, name)) == bool(getattr(earlier, name)) and place(earlier) == place(now)
