"""Pretraining: a recipe and shards -> a run folder with a model.

`run_pretraining` reads top to bottom: resolve the recipe (new or resumed), verify the shards, choose the hardware,
build datasets and model, resolve the schedule (timing a few steps for `--minutes`), train with `fit`, write `final/`.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from firth.core.console import format_count, format_duration, say, warn
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, read_object, write_results
from firth.core.serialization import from_dict, to_dict
from firth.models import (
    Model,
    TransferLoss,
    check_distillation_pair,
    check_transfer_pair,
    distillation_losses,
    grow_vocabulary,
    init_from_teacher,
    load_generation_tokens,
    load_model,
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
from firth.objectives import MLM, Batch
from firth.objectives.registry import describe_objective
from firth.tokens import MixedDataset, MixedShards, RowDataset, ShardSet, Tokenizer, reused_length
from firth.tokens.mixing import SourceShare
from firth.tokens.permutation import permute_indices
from firth.train.batch_size import resolve_batch_size
from firth.train.checkpoint import explain_disk_errors, last_checkpoint
from firth.train.clock import RunClock
from firth.train.compute import (
    ComputeConfig,
    choose_compute,
    choose_threads,
    limit_threads,
    preload_compiler,
    set_threads,
    thread_choices,
)
from firth.train.dataloader import (
    make_batch,
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
from firth.train.hub import make_uploader
from firth.train.launch import choose_parallel, init_distributed
from firth.train.live_doctor import FINDINGS_FILE, LiveDoctor
from firth.train.log import token_loss_name
from firth.train.log_rules import References
from firth.train.loop import FitResult, fit
from firth.train.optim import make_optimizer
from firth.train.ramp import check_even_split, mean_batch_rows, ramp_stages, stage_shares
from firth.train.recipe import FreezeSchedule, Recipe, TrainingConfig, load_recipe, save_recipe
from firth.train.replan import Replan, affordable_steps, limit_evaluations
from firth.train.resources import check_resources, estimate_resources
from firth.train.resume import is_run_finished, merge_recipe, rewind_run, verify_same_shards
from firth.train.samples import SampleFn
from firth.train.step import (
    RecurrentStateDict,
    TrainingRun,
    apply_flags,
    build_step_runner,
    dropout_seed,
    is_out_of_memory,
    num_rows,
    split_micro_batches,
    train_step,
    with_recurrent_state,
)
from firth.train.step_runner import LossFn, metric_means, sum_of_means

ScheduledRecipeT = TypeVar("ScheduledRecipeT", bound=TrainingConfig)
ThreadResultT = TypeVar("ThreadResultT")


class Companions(NamedTuple):
    """What packages that build on this one bring to a run."""

    make_sampler: Callable[[Recipe, ShardSet | MixedShards], SampleFn | None] | None = None  # samples its checkpoints
    recommend_rate: Callable[[Recipe], float | None] | None = None  # the learning rate that the doctor expects


NO_COMPANIONS = Companions()
EVAL_ROWS_SEED = zlib.crc32(b"held-out rows")
GOLDEN_RATIO = 0.6180339887  # multiples of it, modulo 1, cover a run evenly from the first few on
EVALS_PER_PRETRAINING = 10  # evaluations per run without --eval-steps
SLOW_STEP_SECONDS = 0.5
MIN_USEFUL_STEPS = 200  # steps: after 108 the quickstart gained 2 points, after 283 it gained 16 (docs/results.md)


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
    tokenizer, objective = shards.tokenizer, recipe.objective
    check_tokenizer_fit(recipe, tokenizer)
    if is_new or not recipe.per_device_train_batch_size:
        recipe = broadcast_recipe(dist_context, lambda: resolve_batch_size(recipe, shards, dist_context))
    check_even_split(recipe, dist_context.world_size)

    def resolve_data() -> Recipe:
        resolved_recipe = verify_same_shards(recipe, shards, allow_change)
        if rewind is not None:
            resolved_recipe = rewind_run(folder, resolved_recipe, rewind)
        if not is_new:
            save_recipe(resolved_recipe, recipe_path)
        return resolved_recipe

    recipe = broadcast_recipe(dist_context, resolve_data)
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
        evaluate = None
        if (held_out := dist_context.main_process_first(lambda: make_held_out_dataset(recipe, shards))) is not None:
            evaluate = make_evaluation(recipe, held_out, tokenizer, compute)
        teacher = load_teacher(recipe, compute)
        model = build_pretrain_model(recipe, tokenizer, teacher)
    losses, vectors = make_distillation_loss_fn(teacher, model, recipe), None
    if recipe.warm_start == "ppmi" and dist_context.is_main_process and not (resume and last_checkpoint(folder)):
        assert isinstance(shards, ShardSet), "Recipe.check refuses a warm start with a mix"
        say("counting which tokens occur together, to initialize the embeddings (PPMI)")
        if compute.compile and dist_context is SINGLE_PROCESS:
            vectors = start_in_thread(partial(ppmi_embeddings, model.config, shards.train, recipe.seed))
        else:
            warm_start_embeddings(model, shards.train, recipe.seed)
    replan = None
    if is_new:
        threads = thread_choices(recipe, compute) if recipe.minutes else []
        eval_seconds = 0.0

        def measure() -> tuple[float, float]:
            nonlocal eval_seconds
            if step_seconds:  # a forward pass is a third of a step
                eval_seconds = step_seconds * recipe.eval_rows / (3 * recipe.global_batch_size)
                return step_seconds, eval_seconds

            def time_stage(stage_recipe: Recipe, progress: float, with_eval: bool) -> tuple[float, float]:
                trial_model, source = model.clone(), ramp_datasets.get(stage_recipe.max_seq_length, rows)
                batches = make_pretrain_batch_fn(
                    stage_recipe, source, tokenizer, dist_context=dist_context, progress=progress
                )
                eval_fn = evaluate if with_eval else None
                return time_steps(
                    stage_recipe,
                    compute,
                    trial_model,
                    batches,
                    eval_fn,
                    make_distillation_loss_fn(teacher, trial_model, stage_recipe),
                    wait_ready=vectors,
                    threads=threads if with_eval else [],
                )

            shares_by_stage = stage_shares(recipe)
            timings = [
                (share * phase_share, time_stage(single_stage_recipe(recipe, stage), progress, i == j == 0))
                for i, (stage, share) in enumerate(shares_by_stage)
                for j, (phase_share, progress) in enumerate(objective.phases)
            ]
            eval_seconds = timings[0][1][1]
            return sum(share * seconds for share, (seconds, _) in timings), eval_seconds

        requested, step_rows = recipe, mean_batch_rows(recipe)
        resolved = resolve_schedule(
            recipe, rows.num_rows, measure, start_time, step_rows=step_rows, min_useful_steps=MIN_USEFUL_STEPS
        )
        if threads:
            resolved = replace(resolved, threads=torch.get_num_threads())  # sums of a resumed run have the same order
        recipe = broadcast_recipe(dist_context, lambda: resolved)
        if dist_context.is_main_process:
            save_recipe(recipe, recipe_path)
        if can_replan(recipe):
            record = partial(save_recipe, path=recipe_path) if dist_context.is_main_process else discard_recipe
            replan = Replan(requested, start_time + 60 * recipe.minutes, eval_seconds, record)
            evaluate = replan.time_evaluations(evaluate) if evaluate is not None else None
    batches = make_pretrain_batch_fn(recipe, rows, tokenizer, ramp_datasets, dist_context)
    say(
        f"{type(objective).__name__} on {shards.num_tokens:,} tokens in "
        f"{format_count(rows.num_rows, 'row')} of {rows.row_length} ({100 * rows.fill_ratio:.1f}% filled): "
        f"{format_count(recipe.max_steps, 'step')} of {format_count(recipe.global_batch_size, 'row')}, "
        f"{recipe.max_steps * mean_batch_rows(recipe) / rows.num_rows:.1f} epochs, on {compute}"
    )
    for stage in ramp_stages(recipe)[:-1]:
        say(f"ramp: from step {stage.first_step:,} on {format_count(stage.step_rows, 'row')} of {stage.seq_length}")
    shares = (
        rows.share_table(round(recipe.max_steps * mean_batch_rows(recipe))) if isinstance(rows, MixedDataset) else []
    )
    for share in shares:
        say(f"  {share}")
    say(f"{recipe.model.family}, {recipe.model.architecture}: {model.num_parameters:,} parameters")
    if hf_model_type(model.config) == FIRTH_MODEL_TYPE and is_new:
        say(
            "no class of transformers has this model: checkpoints open with firth.load, or with AutoModel after "
            "`import firth.hf`"
        )
    freeze_schedule = FreezeSchedule(recipe.layer_decay, groups_by_layer=isinstance(losses, TransferLoss))
    text_progress = make_text_progress_fn(recipe, rows, ramp_datasets)
    run = TrainingRun(
        recipe,
        compute,
        model,
        batches,
        evaluate,
        folder,
        "pretraining",
        loss_fn=losses,
        freeze_schedule=freeze_schedule,
        text_progress=text_progress,
        mask_rate=lambda step: recipe.objective.mask_rate_at(run_progress(recipe, step)),
        doctor=LiveDoctor(
            recipe,
            live_references(recipe, shards),
            str(folder),
            recommended_rate=companions.recommend_rate(recipe) if companions.recommend_rate is not None else None,
            file=folder / FINDINGS_FILE if dist_context.is_main_process else None,
        ),
        replan=replan,
    )
    if companions.make_sampler is not None and dist_context.is_main_process:
        run.samples = companions.make_sampler(recipe, shards)
    uploader = make_uploader(recipe, dist_context.is_main_process)
    run.on_checkpoint = uploader.push if uploader is not None else None
    if isinstance(losses, TransferLoss):
        run.before_step, run.layer_rate = follow_transfer(losses, recipe)
    if vectors is not None:
        # Only the closure refers to the vectors, so that they are freed after use.
        run.deferred_init, vectors = partial(set_deferred_embeddings, model, vectors), None
    with explain_disk_errors(folder):
        outcome = fit(run, resume)
        if run.doctor is not None:
            run.doctor.judge(is_finished=True)
        write_final_model(model, folder, dist_context)
    results = {
        "output_dir": str(folder),
        "steps": outcome.steps,
        **collect_losses(outcome, shards.unigram_entropy),
        **({"mix": describe_sources(shares, shards, outcome.scores)} if isinstance(shards, MixedShards) else {}),
        "tokens": outcome.tokens,
        **text_progress(outcome.steps)._asdict(),
        "tokens_per_second": outcome.tokens_per_second,
        "parameters": model.num_parameters,
        "seconds": time.monotonic() - start_time,
    }
    if dist_context.is_main_process:
        with explain_disk_errors(folder):
            write_results(folder / "results.json", results)
    results = dist_context.broadcast(results)
    if uploader is not None:  # last: no other process waits for a network
        uploader.close()
    return results


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


def write_final_model(model: Model, folder: Path, dist_context: DistContext = SINGLE_PROCESS) -> None:
    """Write `final/` unless it is there and intact. Raise UserError if weights contain NaN or Inf."""
    if dist_context.run_on_main(lambda: find_corruption(folder / "final") is not None):
        complete = dist_context.gather_model(model)
        if complete is not None:
            if bad_layers := nonfinite_layers(complete):
                raise UserError(
                    f"Weights contain NaN or Inf ({bad_layers}): final/ is not written. Lower --learning-rate or raise "
                    "--warmup-steps; --resume --rewind 0 restarts before the first bad step."
                )
            with translate_disk_errors(folder / "final"), atomic_folder(folder / "final") as temporary:
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


def load_teacher(recipe: Recipe, compute: ComputeConfig) -> Model | None:
    """Load the frozen teacher onto the device; None without one."""
    if not recipe.teacher:
        return None
    if not isinstance(recipe.objective, MLM) or recipe.objective.extras:
        raise UserError(
            "Distillation needs the objective mlm or whole-word: teacher and model predict the same masked tokens."
        )
    teacher = load_model(recipe.teacher).to(compute.device).requires_grad_(False)
    apply_flags(teacher, recipe)
    return teacher


def make_distillation_loss_fn(teacher: Model | None, model: Model, recipe: Recipe) -> LossFn | None:
    """Return the distillation loss function; None without a teacher."""
    if teacher is None:
        return None
    student, master = check_distillation_pair(model, teacher, recipe.distillation)
    if teacher.tokenizer and model.tokenizer and teacher.tokenizer.fingerprint != model.tokenizer.fingerprint:
        raise UserError(f"{recipe.teacher} has another tokenizer than the data: prepare the text with the teacher's.")
    if recipe.knowledge_transfer.strategy == "none":
        return partial(distillation_losses, student, master, spec=recipe.distillation, with_metrics=True)
    check_transfer_pair(student, master)
    return TransferLoss(student, master, recipe.distillation, recipe.knowledge_transfer)


def follow_transfer(loss_fn: TransferLoss, recipe: Recipe) -> tuple[Callable[[int], None], Callable[[int, int], float]]:
    """Return the functions that set the stage of knowledge transfer and the rates of the layers, by the step alone."""
    spec, num_layers = recipe.knowledge_transfer, recipe.model.num_layers
    if spec.strategy == "auxiliary":
        say(f"knowledge transfer of {format_count(num_layers, 'layer')} beside distillation")
    else:
        steps = format_count(math.ceil(spec.share * recipe.max_steps), "step")
        order = "one after the other" if spec.strategy == "progressive" else "at once"
        say(f"knowledge transfer of {format_count(num_layers, 'layer')} {order} for {steps}, then distillation")
    return (
        lambda step: loss_fn.set_progress(step / recipe.max_steps),
        lambda step, depth: spec.rate_factor(step / recipe.max_steps, num_layers, depth - 1),
    )


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


def choose_eval_rows(recipe: Recipe, dataset: RowDataset) -> np.ndarray:
    """Return the indices of the held-out rows that every evaluation reads: at most `eval_rows`, sampled at random.

    Held-out rows lie in the order of the text, full rows of long documents first: the first of them would all come from
    the first file. The sample is the same for every seed, so that their losses can be compared. The rows of a stream
    continue each other, and its streams begin all over the text: there the first rows are read.
    """
    count = min(dataset.num_rows, recipe.eval_rows)
    if recipe.order == "stream":
        return np.arange(count)
    return np.sort(permute_indices(np.arange(count), dataset.num_rows, EVAL_ROWS_SEED))


def make_held_out_loss_fn(
    recipe: Recipe, dataset: RowDataset, tokenizer: Tokenizer, compute: ComputeConfig
) -> Callable[[Model], dict[str, float]]:
    """Return the function model -> mean loss on held-out documents, with the same rows and the same noise every time.

    Processes share the batches, except with `order=stream`, where each batch continues the previous one and every
    process reads all. Losses are summed in batch order, so the result equals that of one process.
    """
    recipe = replace(recipe, teacher="")  # the masks of every other model, so that losses can be compared
    size, eval_rows = recipe.per_device_train_batch_size, choose_eval_rows(recipe, dataset)
    dist_context = compute.dist_context if recipe.order == "packed" else SINGLE_PROCESS
    starts = range(0, len(eval_rows), size)
    halvings = 0

    def batch_losses(model: Model, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the summed losses of a batch; out of memory halves it, unless its rows must stay together."""
        nonlocal halvings
        while True:
            try:
                pieces = split_micro_batches([batch], halvings)
                parts = [model.losses(rows.to(compute.device), with_metrics=True) for rows in pieces]
                return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}
            except RuntimeError as e:
                if not is_out_of_memory(e):
                    raise
            must_not_split = (
                batch.reset_state is not None or batch.group_ids is not None or compute.dist_context.is_sharded
            )
            if must_not_split or num_rows(batch) <= 2**halvings:
                less = "lower --per-device-train-batch-size, or shorten --max-seq-length"
                raise UserError(f"Out of memory in an evaluation: {less}.")
            halvings += 1
            warn(f"out of memory: evaluations use batches of {-(-size // 2**halvings)} rows from here on")
            if compute.device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.no_grad()
    def evaluate(model: Model) -> dict[str, float]:
        model.eval()
        losses: dict[str, float] = {}
        counts: Counter[str] = Counter()
        left: list[RecurrentStateDict] = []
        for first_index in range(0, len(starts), dist_context.world_size):
            # A process without a batch of its own repeats the last: collectives inside the model need all processes.
            index = min(first_index + dist_context.rank, len(starts) - 1)
            first = starts[index]
            batch = make_batch(recipe, dataset, eval_rows[first : first + size], tokenizer.vocab, progress=1.0)
            torch.manual_seed(dropout_seed(recipe.seed, first, 0))  # for models that sample tokens (ELECTRA)
            with compute.autocast(), with_recurrent_state(model, batch, left.pop() if left else {}, 0, left):
                parts = batch_losses(model, batch)
            for name in parts:
                losses |= {
                    f"{name}/{i}": 0.0
                    for i in range(first_index, min(first_index + dist_context.world_size, len(starts)))
                }
            if index == first_index + dist_context.rank:
                losses |= {f"{name}/{index}": part.item() for name, part in parts.items()}
                counts.update(batch.loss_counts)
            else:
                counts.update(dict.fromkeys(batch.loss_counts, 0))
        compute.dist_context.reshard(model)
        totals: dict[str, float] = defaultdict(float)
        for key, value in dist_context.all_reduce_sum(losses).items():
            totals[key.rpartition("/")[0]] += value
        divisors = {name: max(int(n), 1) for name, n in dist_context.all_reduce_sum(counts).items()}
        metrics = {f"eval_{name}": value for name, value in metric_means(totals, divisors).items()}
        return {"eval_loss": sum_of_means(totals, divisors), **metrics}

    return evaluate


def make_evaluation(
    recipe: Recipe, dataset: RowDataset, tokenizer: Tokenizer, compute: ComputeConfig
) -> Callable[[Model], dict[str, float]]:
    """Return the function model -> held-out losses; of a mix also those of each source, as `eval_loss/SOURCE`.

    The sources share `eval_rows` once more, so that an evaluation of a mix takes about twice as long.
    """
    mixed = make_held_out_loss_fn(recipe, dataset, tokenizer, compute)
    if not isinstance(dataset, MixedDataset):
        return mixed
    source_recipe = replace(recipe, eval_rows=-(-recipe.eval_rows // len(dataset.datasets)))
    by_source = {
        name: make_held_out_loss_fn(source_recipe, source, tokenizer, compute)
        for name, source in zip(dataset.source_names, dataset.datasets, strict=True)
    }

    def evaluate(model: Model) -> dict[str, float]:
        found = mixed(model)
        for source, loss_fn in by_source.items():
            found |= {f"{name}/{source}": value for name, value in loss_fn(model).items()}
        return found

    return evaluate


def resolve_schedule(
    recipe: ScheduledRecipeT,
    num_rows: int,
    measure: Callable[[], tuple[float, float]],
    start_time: float,
    num_evals: int = EVALS_PER_PRETRAINING,
    min_steps: int = 1,
    step_rows: float | None = None,
    min_evals: int = 1,
    min_useful_steps: int = 0,
) -> ScheduledRecipeT:
    """Resolve the unset fields: number of steps (from minutes or epochs), warm-up, evaluation interval.

    `measure` returns the seconds of a step and of an evaluation. `step_rows` is the mean number of rows per step.
    """
    steps, step_rows = recipe.max_steps, step_rows or recipe.global_batch_size
    if recipe.minutes:
        step_seconds, evaluation_seconds = measure()
        left = 60 * recipe.minutes - (time.monotonic() - start_time)
        num_evals = max(min_evals, limit_evaluations(num_evals, left, evaluation_seconds))
        steps = affordable_steps(left, step_seconds, evaluation_seconds, num_evals, recipe.eval_steps)
        if steps < 1:
            warn(f"{format_duration(60 * recipe.minutes)} is too short for one step: running one step.")
            steps = 1
        if recipe.max_steps:
            steps = min(steps, recipe.max_steps)
        say(
            f"{step_seconds:.3f}s a step: {format_count(steps, 'step takes', 'steps take')} "
            f"{format_duration(steps * step_seconds)}"
        )
        if steps < min(min_useful_steps, recipe.max_steps or min_useful_steps):
            warn(describe_short_plan(steps, steps * step_rows / num_rows, step_seconds, min_useful_steps))
    elif not steps:
        steps = math.ceil(recipe.num_train_epochs * num_rows / step_rows)
        if steps < min_steps:
            reason = f"num_train_epochs={recipe.num_train_epochs:g} makes {format_count(steps, 'step')}"
            say(f"{reason}, which is few: {min_steps:,} are taken instead")
            steps = min_steps
    if recipe.warmup_steps >= steps:
        warn(
            f"warmup_steps is {recipe.warmup_steps:,} of {format_count(steps, 'step')}: "
            "the learning rate does not reach its peak."
        )
    return replace(
        recipe,
        max_steps=steps,
        warmup_steps=steps // 10 if recipe.warmup_steps < 0 else recipe.warmup_steps,
        eval_steps=recipe.eval_steps or max(1, math.ceil(steps / num_evals)),
    )


def describe_short_plan(steps: int, epochs: float, step_seconds: float, min_useful_steps: int) -> str:
    """Say that a plan is too short to learn from, and how many minutes would do."""
    read = f"{100 * epochs:.0f}% of the text" if epochs < 1 else f"the text {epochs:.1f} times"
    minutes = math.ceil((min_useful_steps - steps) * step_seconds / 60)
    return (
        f"{format_count(steps, 'step reads', 'steps read')} {read}: expect little. With "
        f"{format_count(minutes, 'more minute', 'more minutes')} (--minutes) the run makes {min_useful_steps} steps."
    )


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


def time_steps(
    training: TrainingConfig,
    compute: ComputeConfig,
    model: Model,
    batch_fn: Callable[[int], Sequence[Batch]],
    evaluate: Callable[[Model], dict[str, float]] | None,
    loss_fn: LossFn | None = None,
    seconds: float = 4.0,
    freeze_schedule: FreezeSchedule | None = None,
    wait_ready: Callable[[], object] | None = None,
    threads: Sequence[int] = (),
) -> tuple[float, float]:
    """Return the seconds of a step and of an evaluation, measured on a disposable model.

    `wait_ready` blocks until background work has ended, which would distort the timing. Of several numbers of CPU
    `threads` the fastest is set.
    """
    dist_context = compute.dist_context
    dist_context.prepare_model(model, training, compute)
    run = TrainingRun(training, compute, model, batch_fn, loss_fn=loss_fn)
    if isinstance(loss_fn, TransferLoss):  # its stages differ in cost
        run.before_step = lambda step: loss_fn.set_progress(step * GOLDEN_RATIO % 1)
    runner = build_step_runner(run)
    optimizer, recurrent_state = make_optimizer(model, training, freeze_schedule), RecurrentStateDict()

    def timed(steps: Sequence[int]) -> float:
        start = time.monotonic()
        for step in steps:
            total = train_step(run, runner, optimizer, batch_fn(step), step, 0.0, recurrent_state)
        total.item()
        return dist_context.broadcast(time.monotonic() - start)

    # Slow steps are timed briefly: the run plans again, and timing must not take its minutes.
    is_slow = timed(range(1)) > SLOW_STEP_SECONDS and compute.device.type == "cpu" and not compute.compile
    if not is_slow:
        timed(range(1, 3))
    if wait_ready is not None:
        wait_ready()
    trials = range(3, 4) if is_slow else range(3, 6)
    choose_threads(threads, lambda: timed(trials[:2]) / len(trials[:2]), turns=1 if is_slow else 2)
    one = timed(trials) / len(trials)
    count = max(1 if is_slow else 3, min(200, int(seconds / one)))
    step_seconds = timed(range(6, 6 + count)) / count
    start = time.monotonic()
    if evaluate is not None:
        evaluate(model)
    return step_seconds, time.monotonic() - start
