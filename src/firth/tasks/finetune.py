"""Fine-tune a checkpoint on labelled examples, once per seed.

The order of a run: check the recipe, read and encode the examples, resolve the schedule, train each seed, summarize.
Scores of one fine-tuning vary with head initialization and data order (Dodge et al. 2020, "Fine-Tuning Pretrained
Language Models"). So a run trains `recipe.seeds` models and reports mean and deviation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from firth.core.console import say
from firth.core.files import write_results
from firth.core.memory import check_memory
from firth.models import ModelConfig, read_config
from firth.models.hf.tensors import find_weight_files
from firth.models.lora import check_lora_support
from firth.models.parameters import FLOAT_BYTES
from firth.models.task_heads import GENERATIVE_TASKS
from firth.tasks.chat import template_uses_date
from firth.tasks.distill import check_distillation, compare_models, make_extra_examples
from firth.tasks.finetune_data import (
    FinetuneData,
    check_example_checksums,
    read_finetune_data,
    used_indices,
    write_data_notes,
)
from firth.tasks.finetune_job import encode_finetune_data, resolve_compile_options, with_recipe
from firth.tasks.finetune_loss import with_reference_logps
from firth.tasks.finetune_notices import describe_job
from firth.tasks.finetune_schedule import resolve_seed_schedule
from firth.tasks.head_task import HeadTask
from firth.tasks.multitask import MultiTask, split_by_task
from firth.tasks.processes import join_processes, share_recipe
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.registry import make_task, make_task_without_examples
from firth.tasks.results import check_baseline, check_metric, summarize_seeds
from firth.tasks.seed_model import balance_class_weights
from firth.tasks.seed_results import clear_diverged_seeds, report_finished_seeds, rewind_seed
from firth.tasks.task import Task
from firth.tasks.text_labels import TASK_PROMPTS
from firth.tasks.train_seed import train_seeds
from firth.tasks.try_rates import choose_learning_rate
from firth.tasks.try_settings import check_search, search_settings
from firth.text import Example
from firth.tokens import Tokenizer, load_tokenizer
from firth.train import choose_compute, load_recipe, save_recipe
from firth.train.checkpoint import explain_disk_errors
from firth.train.clock import RunClock
from firth.train.compute import limit_threads, set_threads
from firth.train.deterministic import deterministic_mode
from firth.train.distributed import select_device
from firth.train.folder import shared_run_folder
from firth.train.recipe import recipe_differences
from firth.train.resources import ResourceEstimate, check_resources, estimate_resources
from firth.train.resume import merge_recipe

# Fields that a resumed run cannot change: tensors of the checkpoint, labels or the best score depend on them.
FIXED_FINETUNE_FIELDS = (
    *(
        "task",
        "tasks",
        "answer",
        "from_scratch",
        "optim",
        "ema_decay",
        "tail_average",
        "layers",
        "pool",
        "head_dim",
        "bilstm",
        "word_dim",
        "crf",
    ),
    *("lora_rank", "lora_targets", "lm_loss_weight", "metric", "search", "search_fields"),
)


def finetune(
    recipe: FinetuneRecipe,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: bool = False,
    rewind: int | None = None,
) -> dict[str, Any]:
    """Train `recipe.seeds` models, return mean and deviation of their scores, and keep the best model.

    A resumed run keeps its recipe and its examples unless `allow_change`. `rewind` restarts the unfinished seed from a
    checkpoint at least that many steps before the harmful steps, and skips the examples in between.
    """
    with deterministic_mode(recipe.deterministic), limit_threads(recipe.threads):
        return run_seeds(recipe, resume or rewind is not None, overwrite, allow_change, rewind)


def run_seeds(
    recipe: FinetuneRecipe, resume: bool, overwrite: bool, allow_change: bool, rewind: int | None
) -> dict[str, Any]:
    """Run all seeds, from reading the examples to the results."""
    began = time.monotonic()
    recipe, dist_context = join_processes(recipe)
    if dist_context.is_restart(recipe.output_dir):
        resume, overwrite, rewind = True, False, None
    check_task(recipe)
    config = read_config(recipe.checkpoint)
    stored = Path(recipe.output_dir) / "recipe.yaml"
    earlier, requested = load_recipe(stored, FinetuneRecipe) if resume and stored.is_file() else None, recipe
    if earlier is not None:
        recipe = keep_choices(earlier, recipe)
    data = read_finetune_data(recipe)
    tokenizer = load_tokenizer(recipe.checkpoint)
    if template_uses_date(tokenizer) and not recipe.day:
        recipe = replace(recipe, day=(earlier.day if earlier else "") or date.today().isoformat())
        recipe = share_recipe(dist_context, recipe)
    task = make_run_task(recipe, data.train, tokenizer, config)
    check_run(recipe, data, task, config)
    if earlier is None:
        check_resources(estimate_finetuning(recipe, task, config), stored.parent, select_device(dist_context, recipe))

    inputs = [recipe.checkpoint, *recipe.label_files, recipe.baseline, recipe.teacher, recipe.unlabeled]
    folder = stored.parent
    clock = RunClock(folder, resume, began)
    with shared_run_folder(dist_context, folder, resume, overwrite, inputs), dist_context.enter_on_main(clock):
        compute = choose_compute(resolve_compile_options(requested, task, config, len(data.train)), dist_context)
        if recipe.teacher:
            used = used_indices(recipe, data.train)
            extra = make_extra_examples(recipe, data.train, used, data.unlabeled, compute, folder)
            data = replace(data, extra=tuple(extra))
        job = with_reference_logps(encode_finetune_data(recipe, task, data, compute, folder))
        if earlier is not None:
            recipe, changed = continue_recipe(earlier, recipe, data, allow_change)
            if dist_context.is_main_process:
                recipe = prepare_seed_folders(folder, recipe, changed, rewind)
        else:
            changed = False
            recipe = check_example_checksums(resolve_seed_schedule(recipe, job, clock.start_time), data, allow_change)
        recipe = share_recipe(dist_context, recipe)
        set_threads(recipe.threads)
        if dist_context.is_main_process:
            save_recipe(recipe, stored)
            write_data_notes(folder, data.notes)
        job = replace(job, recipe=recipe, recipe_changed=changed)
        for sentence in describe_job(job, config):
            say(sentence)
        if recipe.rate_candidates or recipe.search_fields:
            recipe = search_settings(job) if recipe.search_fields else choose_learning_rate(job)
            if dist_context.is_main_process:
                save_recipe(recipe, stored)
            job = with_recipe(job, recipe)
        runs = train_seeds(job, resume)
        with explain_disk_errors(folder):
            results = dist_context.run_on_main(
                lambda: summarize_seeds(recipe, task, data.train, data.dev, runs, folder)
            )
            if recipe.teacher and isinstance(task, HeadTask):
                results["distillation"] = compare_models(recipe, task, data.dev, results, compute, folder)
                write_results(folder / "results.json", results)
            return results


def check_run(recipe: FinetuneRecipe, data: FinetuneData, task: Task, config: ModelConfig) -> None:
    """Raise the errors of settings that do not fit the examples or the checkpoint, before anything is written."""
    check_distillation(recipe, task)  # again, with the labels
    check_metric(recipe, data.dev, task)
    check_baseline(recipe, data.dev)
    if recipe.search_fields:
        check_search(recipe, len(data.train))
    if recipe.class_weights == "balanced":
        balance_class_weights(task.configure_model(config), [e.target for e in data.train])
    if not recipe.from_scratch:
        find_weight_files(Path(recipe.checkpoint))


def continue_recipe(
    earlier: FinetuneRecipe, recipe: FinetuneRecipe, data: FinetuneData, allow_change: bool
) -> tuple[FinetuneRecipe, bool]:
    """Return the recipe of a resumed run, and whether it differs from the earlier one in more than its place."""
    recipe = merge_recipe(earlier, recipe, allow_change, FIXED_FINETUNE_FIELDS)
    recipe = check_example_checksums(recipe, data, allow_change)
    same_place = replace(earlier, output_dir=recipe.output_dir, parallel=recipe.parallel)
    return recipe, bool(recipe_differences(same_place, recipe))


def prepare_seed_folders(folder: Path, recipe: FinetuneRecipe, changed: bool, rewind: int | None) -> FinetuneRecipe:
    """Say which seeds are finished, let diverged ones start again if the recipe changed, and rewind one if asked."""
    report_finished_seeds(folder, recipe, changed)
    if changed:
        clear_diverged_seeds(folder.glob("seed-*"))
    return recipe if rewind is None else rewind_seed(folder, recipe, rewind)


def keep_choices(earlier: FinetuneRecipe, recipe: FinetuneRecipe) -> FinetuneRecipe:
    """Return the recipe of a resumed run with the rate, or the setting, that was chosen or is being chosen."""
    kept: list[str] = ["rate_candidates", "learning_rate"] if recipe.rate_candidates else []
    if recipe.search_fields and recipe.search == earlier.search:  # steps and warm-up are always those of the run
        searched = {"learning_rate", "per_device_train_batch_size", "layer_decay"}.intersection(recipe.search_fields)
        kept = ["search_fields", *searched]
    return replace(recipe, **{name: getattr(earlier, name) for name in kept})


def estimate_finetuning(recipe: FinetuneRecipe, task: Task, config: ModelConfig) -> ResourceEstimate:
    """Estimate what a seed needs. With LoRA or frozen weights, those that are not trained count alone."""
    frozen = recipe.lora_rank or recipe.freeze != "none"
    model_config = recipe.apply_head_options(task.configure_model(config))
    check_memory(
        FLOAT_BYTES * 2 * recipe.lora_rank * config.dim * config.num_layers,
        f"LoRA of rank {recipe.lora_rank:,}",
        "Lower --lora-rank: 8 is usual.",
    )
    return estimate_resources(model_config, recipe, trainable_share=0.0 if frozen else 1.0)


def check_task(recipe: FinetuneRecipe) -> None:
    """Raise if the checkpoint does not support the task. Runs before the examples are read."""
    config = read_config(recipe.checkpoint)
    if recipe.lora_rank:
        check_lora_support(config)
    recipe.check()
    tokenizer = load_tokenizer(recipe.checkpoint)
    tasks = {
        name: make_task_without_examples(part.task, tokenizer, config, part)
        for name, part in recipes_of_tasks(recipe, config).items()
    }
    task = MultiTask(tasks) if recipe.tasks else tasks[""]
    recipe.apply_head_options(task.configure_model(config))
    check_distillation(recipe, task)


def recipes_of_tasks(recipe: FinetuneRecipe, config: ModelConfig) -> dict[str, FinetuneRecipe]:
    """Return the recipe of each task by its name.

    Several tasks of an encoder-decoder are all answered as text if one of them has no other answer.
    """
    parts = recipe.task_recipes()
    if config.architecture != "encoder-decoder" or all(part.task not in GENERATIVE_TASKS for part in parts.values()):
        return parts
    return {
        name: replace(part, answer="text") if part.answer == "auto" and part.task in TASK_PROMPTS else part
        for name, part in parts.items()
    }


def make_run_task(recipe: FinetuneRecipe, train: Sequence[Example], tokenizer: Tokenizer, config: ModelConfig) -> Task:
    """Return the task of a run, or its several tasks as one."""
    if not recipe.tasks:
        return make_task(recipe.task, train, tokenizer, config, recipe)
    own = split_by_task(train)
    parts = recipes_of_tasks(recipe, config)
    return MultiTask({name: make_task(p.task, own[name], tokenizer, config, p) for name, p in parts.items()})


def plan_finetuning(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """Return the recipe with the steps and the CPU threads that its minutes allow here, without training anything."""
    start_time, config, data = time.monotonic(), read_config(recipe.checkpoint), read_finetune_data(recipe)
    task = make_run_task(recipe, data.train, load_tokenizer(recipe.checkpoint), config)
    compute = choose_compute(resolve_compile_options(recipe, task, config, len(data.train)))
    with limit_threads():
        job = encode_finetune_data(recipe, task, data, compute, Path(recipe.output_dir))
        return resolve_seed_schedule(recipe, job, start_time)
