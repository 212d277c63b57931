"""A recipe and shards to a run folder with a model in it."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from firth.console import count, duration, say, warn
from firth.errors import UserError
from firth.files import damage, read_json, whole_folder, write_results
from firth.models import (
    Model,
    begin_with,
    check_pair,
    distilled,
    first_vectors,
    inherit,
    load_model,
    load_weights,
    make_model,
    read_tensors,
    take_endings,
    warm_start,
    write_model,
)
from firth.objectives import MLM, NAMED, Batch, Objective
from firth.plain import KIND, from_plain, to_plain
from firth.tokens import (
    MixedSource,
    Prepared,
    Source,
    Tokenizer,
)
from firth.train.checkpoint import disk_errors, last_checkpoint, last_writes
from firth.train.clock import Clock
from firth.train.deterministic import deterministic
from firth.train.device import Machine, choose_machine, loading_compiler
from firth.train.diagnose import spoilt_layers
from firth.train.feed import alone, batch_function, held_out_rows, make_batch, open_data, row_source, shorter_rows
from firth.train.folder import shared_folder
from firth.train.going_on import go_back, is_finished, same_recipe, same_shards
from firth.train.loop import fit
from firth.train.optim import make_optimizer
from firth.train.parallel import ALONE, World, join
from firth.train.ramp import check_share, mean_batch, stage_shares, stages
from firth.train.recipe import Recipe, Training, load_recipe, save_recipe
from firth.train.step import (
    Carry,
    Losses,
    Run,
    dropout_seed,
    halve,
    num_rows,
    out_of_memory,
    prepared,
    reading_on,
    sum_of_means,
    switch,
    train_step,
)
from firth.train.unfreeze import Pace

R = TypeVar("R", bound=Training)
T = TypeVar("T")
EVALUATIONS = 10  # per run, when --eval-steps does not say


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

    with loading_compiler(machine):
        rows = world.in_turn(lambda: row_source(recipe, shards, held_out=False))
        shorter = world.in_turn(lambda: shorter_rows(recipe, shards))
        evaluate = None
        if (aside := world.in_turn(lambda: held_out_rows(recipe, shards))) is not None:
            evaluate = held_out_loss(recipe, aside, tokenizer, machine)
        teacher = load_teacher(recipe, machine)
        model = first_model(recipe, tokenizer, teacher)
    losses, vectors = learn_from(teacher, model, recipe), None
    if recipe.warm_start == "ppmi" and world.first and not (resume and last_checkpoint(folder)):
        assert isinstance(shards, Prepared), "a recipe with a mix has no warm start"
        say("counting which tokens keep company, for the first embeddings")
        if machine.compile and world is ALONE:
            vectors = begun(partial(first_vectors, model.config, shards.train, recipe.seed))
        else:
            warm_start(model, shards.train, recipe.seed)
    if begins:

        def try_out() -> tuple[float, float]:
            def one(plain: Recipe, judged: bool) -> tuple[float, float]:
                twin, source = model.twin(), shorter.get(plain.max_seq_length, rows)
                batches, judge = batch_function(plain, source, tokenizer, world=world), evaluate if judged else None
                return trial(plain, machine, twin, batches, judge, learn_from(teacher, twin, plain), ready=vectors)

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
    if vectors is not None:
        run.awaited, vectors = partial(begin_late, model, vectors), None  # which has them alone, and lets them go
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


def begun(make: Callable[[], T]) -> Callable[[], T]:
    """Let another thread make something; where it is asked for, it is waited for."""
    pool = ThreadPoolExecutor(1)
    found = pool.submit(make)
    pool.shutdown(wait=False)
    return found.result


def begin_late(model: Model, vectors: Callable[[], np.ndarray]) -> None:
    begin_with(model, vectors())


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
    teacher = load_model(recipe.teacher).to(machine.device).requires_grad_(False)
    switch(teacher, recipe)
    return teacher


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
    halvings = 0

    def summed(model: Model, batch: Batch) -> dict[str, torch.Tensor]:
        """The losses of a batch, in smaller ones where memory is short, unless all go on from the one before."""
        nonlocal halvings
        while True:
            try:
                parts = [model.losses(some.to(machine.device)) for some in halve([batch], halvings)]
                return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}
            except RuntimeError as e:
                if not out_of_memory(e):
                    raise
            whole = batch.fresh is not None or batch.group is not None or machine.world.kind == "fsdp"
            if whole or num_rows(batch) <= 2**halvings:
                less = "lower --per-device-train-batch-size, or shorten --max-seq-length"
                raise UserError(f"Out of memory in an evaluation: {less}.")
            halvings += 1
            warn(f"out of memory: evaluations take {-(-size // 2**halvings)} rows at once from here on")
            if machine.device.type == "cuda":
                torch.cuda.empty_cache()

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
                parts = summed(model, batch)
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
    ready: Callable[[], object] | None = None,
) -> tuple[float, float]:
    """Seconds that a step and an evaluation take, on a model that is thrown away; once other work is `ready`."""
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
    if ready is not None:
        ready()
    one = timed(range(3, 6)) / 3
    count = max(3, min(200, int(seconds / one)))
    step_seconds = timed(range(6, 6 + count)) / count
    start = time.monotonic()
    if evaluate is not None:
        evaluate(model)
    return step_seconds, time.monotonic() - start
