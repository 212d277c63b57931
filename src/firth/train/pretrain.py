"""Pretraining: a recipe and shards -> a run folder with a model.

`run_pretraining` reads top to bottom: resolve the recipe (new or resumed), verify the shards, choose the hardware,
build datasets and model, resolve the schedule (timing a few steps for `--minutes`), train with `fit`, write `final/`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from firth.core.console import format_count, format_duration, say, warn
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, read_manifest, read_object, write_results
from firth.core.memory import return_freed_memory
from firth.core.serialization import from_dict, to_dict
from firth.models import (
    Model,
    TransferLoss,
    grow_vocabulary,
    init_from_teacher,
    load_generation_tokens,
    make_model,
    make_model_from_tensors,
    ppmi_embeddings,
    read_config,
    read_tensors,
    set_token_embeddings,
    warm_start_embeddings,
    write_model,
)
from firth.models.hf.config_io import FIRTH_MODEL_TYPE, hf_model_type
from firth.models.hf.tensors import translate_disk_errors
from firth.objectives.registry import describe_objective, name_objective
from firth.tokens import MixedDataset, MixedShards, RowDataset, ShardSet, Tokenizer, reused_length
from firth.tokens.mixing import SourceShare
from firth.train.batch_size import resolve_batch_size
from firth.train.checkpoint import explain_disk_errors, last_checkpoint, remove_best
from firth.train.clock import RunClock
from firth.train.compute import (
    ComputeConfig,
    choose_compute,
    limit_threads,
    preload_compiler,
    set_threads,
    thread_choices,
)
from firth.train.dataloader import (
    make_held_out_dataset,
    make_pretrain_batch_fn,
    make_ramp_datasets,
    make_row_dataset,
    make_text_progress_fn,
    open_recipe_shards,
    run_progress,
    single_stage_recipe,
)
from firth.train.deterministic import deterministic_mode
from firth.train.diagnose import nonfinite_layers
from firth.train.distributed import SINGLE_PROCESS, DistContext
from firth.train.folder import shared_run_folder
from firth.train.held_out import make_evaluation
from firth.train.hub import make_uploader
from firth.train.launch import choose_parallel, init_distributed
from firth.train.live_doctor import FINDINGS_FILE, LiveDoctor
from firth.train.log import token_loss_name
from firth.train.log_rules import References
from firth.train.loop import FitResult, fit
from firth.train.ramp import check_even_split, mean_batch_rows, ramp_stages, stage_shares
from firth.train.recipe import FreezeSchedule, Recipe, load_recipe, save_recipe
from firth.train.replan import Replan, seconds_to_train
from firth.train.resources import check_resources, estimate_resources
from firth.train.resume import is_run_finished, merge_recipe, rewind_run, verify_same_shards
from firth.train.samples import SampleFn
from firth.train.schedule import resolve_schedule, time_steps
from firth.train.step import (
    TrainingRun,
)
from firth.train.step_runner import LossFn
from firth.train.teacher import follow_transfer, load_teacher, make_distillation_loss_fn

ThreadResultT = TypeVar("ThreadResultT")


class Companions(NamedTuple):
    """What packages that build on this one bring to a run."""

    make_sampler: Callable[[Recipe, ShardSet | MixedShards], SampleFn | None] | None = None  # samples its checkpoints
    recommend_rate: Callable[[Recipe], float | None] | None = None  # the learning rate that the doctor expects


NO_COMPANIONS = Companions()
BEST_MARGIN_NATS = 0.01  # by which an earlier evaluation must be better for its weights to be kept
MIN_USEFUL_STEPS = 200  # steps: after 108 the quickstart gained 2 points, after 283 it gained 16 (docs/history.md)


def pretrain(
    recipe: Recipe,
    resume: bool = False,
    overwrite: bool = False,
    start_time: float | None = None,
    allow_change: bool = False,
    rewind: int | None = None,
    step_seconds: float = 0.0,
    companions: Companions = NO_COMPANIONS,
) -> dict[str, Any]:
    """Run a recipe and return its results. `start_time` starts the clock of `minutes` (time.monotonic).

    A resumed run keeps its recipe unless `allow_change`. `rewind` goes back that many steps (see `rewind_run`).
    `step_seconds` is the duration of a step, where the caller has timed it; else a run of `minutes` times some steps.
    `companions` are what later packages bring to a run (`evaluate.companions`).
    """
    recipe.check()
    folder, dist_context = Path(recipe.output_dir), init_distributed(recipe)
    if dist_context.is_restart(recipe.output_dir):
        resume, overwrite, rewind = True, False, None
    inputs = [recipe.data, *recipe.sources.values(), recipe.checkpoint, recipe.teacher]
    with shared_run_folder(dist_context, folder, resume, overwrite, inputs):
        clock = RunClock(folder, resume, start_time)
        with dist_context.enter_on_main(clock):
            return pretrain_in_folder(
                folder, recipe, resume, clock.start_time, allow_change, rewind, step_seconds, companions
            )


def pretrain_in_folder(
    folder: Path,
    recipe: Recipe,
    resume: bool = False,
    start_time: float | None = None,
    allow_change: bool = False,
    rewind: int | None = None,
    step_seconds: float = 0.0,
    companions: Companions = NO_COMPANIONS,
) -> dict[str, Any]:
    """Pretrain in a folder that the caller has locked."""
    with deterministic_mode(recipe.deterministic), limit_threads():
        return run_pretraining(folder, recipe, resume, start_time, allow_change, rewind, step_seconds, companions)


@dataclass(frozen=True)
class PretrainJob:
    """What the stages of a run share: the recipe, its text as rows, and the model."""

    recipe: Recipe
    folder: Path
    shards: ShardSet | MixedShards
    compute: ComputeConfig
    rows: RowDataset
    ramp_datasets: dict[int, RowDataset]  # shorter rows, by length
    evaluate: Callable[[Model], dict[str, float]] | None
    teacher: Model | None
    model: Model
    loss_fn: LossFn | None  # of a run with a teacher

    @property
    def dist_context(self) -> DistContext:
        return self.compute.dist_context


def run_pretraining(
    folder: Path,
    recipe: Recipe,
    resume: bool,
    start_time: float | None,
    allow_change: bool,
    rewind: int | None,
    step_seconds: float,
    companions: Companions,
) -> dict[str, Any]:
    """Run all stages, from data to results."""
    start_time = time.monotonic() if start_time is None else start_time
    recipe = choose_parallel(recipe)
    dist_context, recipe_path = init_distributed(recipe), folder / "recipe.yaml"
    is_new = not (resume and dist_context.run_on_main(recipe_path.is_file))
    recipe = replace(recipe, processes=dist_context.world_size)
    if not is_new:
        recipe = broadcast_recipe(
            dist_context, lambda: merge_recipe(load_recipe(recipe_path, Recipe), recipe, allow_change)
        )
        if dist_context.run_on_main(lambda: is_run_finished(folder, recipe)):
            say(f"{folder} is already finished.")
            return read_object(folder / "results.json")
    shards = open_recipe_shards(recipe)
    check_tokenizer_fit(recipe, shards.tokenizer)
    if is_new or not recipe.per_device_train_batch_size:
        recipe = broadcast_recipe(dist_context, lambda: resolve_batch_size(recipe, shards, dist_context))
    check_even_split(recipe, dist_context.world_size)
    recipe = broadcast_recipe(dist_context, lambda: record_data(recipe, shards, folder, is_new, allow_change, rewind))
    job = make_job(recipe, folder, shards, dist_context, is_new)
    vectors = warm_start(job, resume)
    return_freed_memory()
    job, replan = plan_steps(job, start_time, step_seconds, vectors) if is_new else (job, None)
    describe_job(job, is_new)
    run = make_pretraining_run(job, companions)
    run.replan = replan
    uploader = make_uploader(job.recipe, dist_context.is_main_process)
    run.on_checkpoint = uploader.push if uploader is not None else None
    if vectors is not None:
        # Only the closure refers to the vectors, so that they are freed after use.
        run.deferred_init, vectors = partial(set_deferred_embeddings, job.model, vectors), None
    return_freed_memory()
    with explain_disk_errors(folder):
        outcome = fit(run, resume)
        if run.doctor is not None:
            run.doctor.judge(is_finished=True)
        write_final_model(job.model, folder, dist_context, outcome.best_step)
    results = collect_results(job, outcome) | {"seconds": time.monotonic() - start_time}
    if dist_context.is_main_process:
        with explain_disk_errors(folder):
            write_results(folder / "results.json", results)
            # those that `final/` has stay, for a longer run
            remove_best(folder, outcome.best_step if outcome.best_step < outcome.steps else 0)
    results = dist_context.broadcast(results)
    if uploader is not None:  # last: no other process waits for a network
        uploader.close()
    return results


def record_data(
    recipe: Recipe, shards: ShardSet | MixedShards, folder: Path, is_new: bool, allow_change: bool, rewind: int | None
) -> Recipe:
    """Return the recipe with the checksum of its shards, after a rewind; save that of a resumed run."""
    recipe = verify_same_shards(recipe, shards, allow_change)
    if rewind is not None:
        recipe = rewind_run(folder, recipe, rewind)
    if not is_new:
        save_recipe(recipe, folder / "recipe.yaml")
    return recipe


def make_job(
    recipe: Recipe, folder: Path, shards: ShardSet | MixedShards, dist_context: DistContext, is_new: bool
) -> PretrainJob:
    """Choose the hardware, and build datasets and model; refuse a new run that does not fit this machine."""
    compute = choose_compute(recipe, dist_context)
    if is_new:
        check_resources(
            estimate_resources(recipe.model, recipe),
            folder,
            compute.device,
            dist_context.shard_size,
            None if recipe.checkpoint else shards.num_tokens,
        )
    set_threads(recipe.threads)
    with preload_compiler(compute):
        rows = dist_context.main_process_first(lambda: make_row_dataset(recipe, shards, held_out=False))
        ramp_datasets = dist_context.main_process_first(lambda: make_ramp_datasets(recipe, shards))
        held_out = dist_context.main_process_first(lambda: make_held_out_dataset(recipe, shards))
        evaluate = None if held_out is None else make_evaluation(recipe, held_out, shards.tokenizer, compute)
        teacher = load_teacher(recipe, compute)
        model = build_pretrain_model(recipe, shards.tokenizer, teacher)
    loss_fn = make_distillation_loss_fn(teacher, model, recipe)
    return PretrainJob(recipe, folder, shards, compute, rows, ramp_datasets, evaluate, teacher, model, loss_fn)


def warm_start(job: PretrainJob, resume: bool) -> Callable[[], np.ndarray] | None:
    """Initialize the embeddings from the counts of the text, unless a checkpoint has them.

    Where the compiler works meanwhile a thread counts: return the function that waits for its vectors, else None.
    """
    recipe, shards, dist_context = job.recipe, job.shards, job.dist_context
    if recipe.warm_start != "ppmi" or not dist_context.is_main_process or (resume and last_checkpoint(job.folder)):
        return None
    assert isinstance(shards, ShardSet), "Recipe.check refuses a warm start with a mix"
    say("counting which tokens occur together, to initialize the embeddings (PPMI)")
    if job.compute.compile and dist_context is SINGLE_PROCESS:
        return start_in_thread(partial(ppmi_embeddings, job.model.config, shards.train, recipe.seed))
    warm_start_embeddings(job.model, shards.train, recipe.seed)
    return None


def plan_steps(
    job: PretrainJob, start_time: float, step_seconds: float, wait_ready: Callable[[], object] | None
) -> tuple[PretrainJob, Replan | None]:
    """Resolve the schedule of a new run and save its recipe; return the job with both, and what plans again later."""
    recipe, is_main_process, path = job.recipe, job.dist_context.is_main_process, job.folder / "recipe.yaml"
    if recipe.minutes:
        start_time = leave_time_to_train(recipe.minutes, start_time)
    threads = thread_choices(recipe, job.compute) if recipe.minutes else []
    measure = cache(lambda: measure_speed(job, step_seconds, threads, wait_ready))
    resolved = resolve_schedule(
        recipe,
        job.rows.num_rows,
        measure,
        start_time,
        step_rows=mean_batch_rows(recipe),
        min_useful_steps=MIN_USEFUL_STEPS,
    )
    if threads:
        resolved = replace(resolved, threads=torch.get_num_threads())  # sums of a resumed run have the same order
    planned = broadcast_recipe(job.dist_context, lambda: resolved)
    if is_main_process:
        save_recipe(planned, path)
    if not can_replan(planned):
        return replace(job, recipe=planned), None
    record = partial(save_recipe, path=path) if is_main_process else discard_recipe
    _, eval_seconds = measure()
    replan = Replan(recipe, start_time + 60 * recipe.minutes, eval_seconds, record)
    evaluate = replan.time_evaluations(job.evaluate) if job.evaluate is not None else None
    return replace(job, recipe=planned, evaluate=evaluate), replan


def leave_time_to_train(minutes: float, start_time: float) -> float:
    """Return the start of the clock of `minutes`: a later one where preparing has taken more than half of them."""
    now = time.monotonic()
    elapsed = now - start_time
    late = elapsed + seconds_to_train(minutes, elapsed) - 60 * minutes
    if late <= 0:
        return start_time
    warn(
        f"preparing took {format_duration(elapsed)} of the {format_duration(60 * minutes)}: half of them are left for "
        f"training, so that the run ends {format_duration(late)} late. `firth prepare` prepares a text once"
    )
    return start_time + late


def measure_speed(
    job: PretrainJob, step_seconds: float, threads: Sequence[int], wait_ready: Callable[[], object] | None
) -> tuple[float, float]:
    """Return the seconds of a step, the mean over the stages of the run, and of an evaluation."""
    recipe = job.recipe
    if step_seconds:  # a forward pass is a third of a step
        return step_seconds, step_seconds * recipe.eval_rows / (3 * recipe.global_batch_size)

    def time_stage(stage_recipe: Recipe, progress: float, is_first: bool) -> tuple[float, float]:
        trial_model = job.model.clone()
        source = job.ramp_datasets.get(stage_recipe.max_seq_length, job.rows)
        batches = make_pretrain_batch_fn(
            stage_recipe, source, job.shards.tokenizer, dist_context=job.dist_context, progress=progress
        )
        return time_steps(
            stage_recipe,
            job.compute,
            trial_model,
            batches,
            job.evaluate if is_first else None,
            make_distillation_loss_fn(job.teacher, trial_model, stage_recipe),
            wait_ready=wait_ready,
            threads=threads if is_first else [],
        )

    timings = [
        (share * phase_share, time_stage(single_stage_recipe(recipe, stage), progress, i == j == 0))
        for i, (stage, share) in enumerate(stage_shares(recipe))
        for j, (phase_share, progress) in enumerate(recipe.objective.phases)
    ]
    _, (_, eval_seconds) = timings[0]
    return sum(share * seconds for share, (seconds, _) in timings), eval_seconds


def describe_job(job: PretrainJob, is_new: bool) -> None:
    """Say what the run reads, in how many steps, and what it trains."""
    recipe, rows = job.recipe, job.rows
    say(
        f"{name_objective(recipe.objective)} on {job.shards.num_tokens:,} tokens in "
        f"{format_count(rows.num_rows, 'row')} of {rows.row_length} ({100 * rows.fill_ratio:.1f}% filled): "
        f"{format_count(recipe.max_steps, 'step')} of {format_count(recipe.global_batch_size, 'row')}, "
        f"{recipe.max_steps * mean_batch_rows(recipe) / rows.num_rows:.1f} epochs, on {job.compute}"
    )
    for stage in ramp_stages(recipe)[:-1]:
        say(f"ramp: from step {stage.first_step:,} on {format_count(stage.step_rows, 'row')} of {stage.seq_length}")
    for share in source_shares(job):
        say(f"  {share}")
    say(f"{recipe.model.family}, {recipe.model.architecture}: {job.model.num_parameters:,} parameters")
    if is_new and hf_model_type(job.model.config) == FIRTH_MODEL_TYPE:
        say(
            "no class of transformers has this model: checkpoints open with firth.load, or with AutoModel after "
            "`import firth.hf`"
        )


def source_shares(job: PretrainJob) -> list[SourceShare]:
    """Return the part of each source of a mix in the run; empty without a mix."""
    if not isinstance(job.rows, MixedDataset):
        return []
    return job.rows.share_table(round(job.recipe.max_steps * mean_batch_rows(job.recipe)))


def make_pretraining_run(job: PretrainJob, companions: Companions) -> TrainingRun:
    """Return the run for the training loop."""
    recipe, is_main_process, loss_fn = job.recipe, job.dist_context.is_main_process, job.loss_fn
    run = TrainingRun(
        recipe,
        job.compute,
        job.model,
        make_pretrain_batch_fn(recipe, job.rows, job.shards.tokenizer, job.ramp_datasets, job.dist_context),
        job.evaluate,
        job.folder,
        "pretraining",
        loss_fn=loss_fn,
        freeze_schedule=FreezeSchedule(recipe.layer_decay, groups_by_layer=isinstance(loss_fn, TransferLoss)),
        text_progress=make_text_progress_fn(recipe, job.rows, job.ramp_datasets),
        mask_rate=lambda step: recipe.objective.mask_rate_at(run_progress(recipe, step)),
        doctor=LiveDoctor(
            recipe,
            live_references(recipe, job.shards),
            str(job.folder),
            recommended_rate=companions.recommend_rate(recipe) if companions.recommend_rate is not None else None,
            file=job.folder / FINDINGS_FILE if is_main_process else None,
        ),
    )
    if recipe.keeps_best and job.evaluate is not None:
        run.score_fn, run.best_margin = lambda scores: -scores[token_loss_name(scores)], BEST_MARGIN_NATS
    if companions.make_sampler is not None and is_main_process:
        run.samples = companions.make_sampler(recipe, job.shards)
    if isinstance(loss_fn, TransferLoss):
        run.before_step, run.layer_rate = follow_transfer(loss_fn, recipe)
    return run


def collect_results(job: PretrainJob, outcome: FitResult) -> dict[str, Any]:
    """Return the content of results.json, without the seconds."""
    shards, progress = job.shards, make_text_progress_fn(job.recipe, job.rows, job.ramp_datasets)
    mix = describe_sources(source_shares(job), shards, outcome.scores) if isinstance(shards, MixedShards) else None
    return {
        "output_dir": str(job.folder),
        "steps": outcome.steps,
        **({"best_step": outcome.best_step} if outcome.best_step != outcome.steps else {}),
        **collect_losses(outcome, shards.unigram_entropy),
        **({} if mix is None else {"mix": mix}),
        "tokens": outcome.tokens,
        **progress(outcome.steps)._asdict(),
        "tokens_per_second": outcome.tokens_per_second,
        "parameters": job.model.num_parameters,
    }


def live_references(recipe: Recipe, shards: ShardSet | MixedShards) -> References:
    """Return what the loss of a run is compared with while it trains; labels of encoder-decoders hold sentinels too."""
    is_comparable = recipe.model.architecture != "encoder-decoder"
    return References(math.log(recipe.model.vocab_size), shards.unigram_entropy if is_comparable else None)


def can_replan(recipe: Recipe) -> bool:
    """Whether the steps may change during the run: ramps, mask rates and phases follow shares of them."""
    has_ramp = recipe.batch_ramp or recipe.length_ramp or recipe.objective.follows_progress
    has_stages = has_ramp or recipe.knowledge_transfer.strategy != "none"
    return bool(recipe.minutes) and not has_stages


def discard_recipe(recipe: Recipe) -> None:
    """Record nothing: only the main process writes."""


def collect_losses(outcome: FitResult, unigram_entropy: float | None) -> dict[str, float | None]:
    """Return the losses and accuracies of the last step and of the last evaluation.

    The unigram entropy follows the loss over tokens: no sum with the loss over pairs, say, can be compared with it.
    """
    scores = {name: value for name, value in outcome.scores.items() if "/" not in name}  # others: of one source
    values: dict[str, float | None] = {"loss": outcome.loss, "eval_loss": None, **outcome.metrics, **scores}
    token_loss = token_loss_name(values, prefix="eval_" if scores else "")
    found: dict[str, float | None] = {}
    for name, value in values.items():
        found |= {name: value, "unigram_entropy": unigram_entropy} if name == token_loss else {name: value}
    return found


def describe_sources(
    shares: Sequence[SourceShare], shards: MixedShards, scores: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the sources of a mix with their held-out losses, and the unigram entropy of each."""
    found = []
    for share in shares:
        own = {name.rpartition("/")[0]: x for name, x in scores.items() if name.rpartition("/")[2] == share.source}
        entropy = {"unigram_entropy": shards.sources[share.source].unigram_entropy}
        found.append({**share._asdict(), **own, **entropy})
    return found


def start_in_thread(make: Callable[[], ThreadResultT]) -> Callable[[], ThreadResultT]:
    """Run `make` in a thread; the returned function waits for its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(make)
    pool.shutdown(wait=False)
    return future.result


def set_deferred_embeddings(model: Model, get_vectors: Callable[[], np.ndarray]) -> None:
    set_token_embeddings(model, get_vectors())


def broadcast_recipe(dist_context: DistContext, make: Callable[[], Recipe]) -> Recipe:
    """Make the recipe in the main process and broadcast it."""
    if dist_context.world_size == 1:
        return make()
    return from_dict(dist_context.run_on_main(lambda: to_dict(make())), Recipe, "recipe")


def write_final_model(
    model: Model, folder: Path, dist_context: DistContext = SINGLE_PROCESS, step: int | None = None
) -> None:
    """Write `final/` unless it is there, intact and of this step. Raise UserError if weights contain NaN or Inf."""
    final = folder / "final"
    if dist_context.run_on_main(lambda: find_corruption(final) is not None or read_manifest(final).get("step") != step):
        complete = dist_context.gather_model(model)
        if complete is not None:
            if bad_layers := nonfinite_layers(complete):
                raise UserError(
                    f"Weights contain NaN or Inf ({bad_layers}): final/ is not written. Lower --learning-rate or raise "
                    "--warmup-steps; --resume --rewind 0 restarts before the first bad step."
                )
            with translate_disk_errors(final), atomic_folder(final, step=step) as temporary:
                write_model(complete, temporary)


def build_pretrain_model(recipe: Recipe, tokenizer: Tokenizer, teacher: Model | None = None) -> Model:
    """Build the model of step 0: initialized from the seed, a checkpoint or a teacher."""
    torch.manual_seed(recipe.seed)
    if recipe.checkpoint:  # a tokenizer with added words is larger than the checkpoint's
        num_tokens = min(recipe.model.vocab_size, read_config(recipe.checkpoint).vocab_size)
        config = replace(recipe.model, vocab_size=num_tokens)
        model = make_model_from_tensors(config, read_tensors(Path(recipe.checkpoint)), recipe.checkpoint)
        load_generation_tokens(model, Path(recipe.checkpoint))
        grow_vocabulary(model, recipe.model.vocab_size, noise_ratio=0.0)
    else:
        model = make_model(recipe.model)
        if teacher is not None:
            init_from_teacher(model, teacher)
    model.tokenizer, model.objective = tokenizer, describe_objective(recipe.objective)
    if recipe.memory:
        has_segments = recipe.objective.row_layout == "segments"
        model.enable_memory(recipe.memory, reused_length(recipe.max_seq_length) if has_segments else None)
    return model


def check_tokenizer_fit(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Check that the shards' tokenizer is the run's and fits the model's vocabulary."""
    if recipe.tokenizer and recipe.tokenizer != tokenizer.fingerprint:
        raise UserError(
            f"{recipe.data or 'The mix'} was made with another tokenizer ({tokenizer.fingerprint}) than the run's "
            f"({recipe.tokenizer}): prepare the text again with `firth prepare --tokenizer`."
        )
    if recipe.model.vocab_size < tokenizer.vocab.size:
        raise UserError(
            f"The tokenizer has {tokenizer.vocab.size:,} tokens, and the model only {recipe.model.vocab_size:,}. "
            "Use the tokenizer that the model was made with."
        )
    recipe.objective.check(tokenizer.vocab, recipe.objective.source_length(recipe.max_seq_length))


def time_pretraining(recipe: Recipe) -> tuple[float, int]:
    """Return the seconds of a step of one process, and the fastest number of CPU threads, without training anything."""
    shards, compute = open_recipe_shards(recipe), choose_compute(recipe)
    with limit_threads():
        rows = make_row_dataset(recipe, shards, held_out=False)
        batches = make_pretrain_batch_fn(recipe, rows, shards.tokenizer)
        threads = thread_choices(recipe, compute)
        model = build_pretrain_model(recipe, shards.tokenizer)
        step_seconds, _ = time_steps(recipe, compute, model, batches, None, seconds=0.0, threads=threads)
        return step_seconds, torch.get_num_threads() if threads else recipe.threads
