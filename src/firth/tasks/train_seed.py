"""Train the seeds of a fine-tuning one after the other, and write model, predictions and results of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from firth.core.console import quiet, run_series, warn
from firth.core.files import read_object, write_results
from firth.models import Model, read_config
from firth.tasks.chain import extend_chain
from firth.tasks.finetune_job import FinetuneJob, make_finetune_batch_fn
from firth.tasks.finetune_loss import make_loss_fn
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.results import DIVERGED_KEY, PREDICTIONS_FILE, deciding_metric, orient_score, write_predictions
from firth.tasks.seed_model import build_seed_model, keeps_head, save_seed_model
from firth.tasks.seed_results import SeedResults, check_seed_resumable, has_seed_diverged, is_seed_finished
from firth.tasks.shape_buckets import ShapeCountingBatches
from firth.tasks.task import Prediction
from firth.train import Diverged, FitResult, TrainingRun, fit
from firth.train.checkpoint import explain_disk_errors, remove_best
from firth.train.hub import make_uploader
from firth.train.live_doctor import LiveDoctor
from firth.train.log_rules import FINETUNING_RULES, References


def train_seeds(job: FinetuneJob, resume: bool) -> list[dict[str, Any]]:
    """Train all seeds and return their results; the time left on the status line is that of all unfinished seeds."""
    folders = [job.folder / f"seed-{seed}" for seed in range(job.recipe.seeds)]
    unfinished = [folder for folder in folders if not (resume and (folder / "results.json").is_file())]
    runs, uploader = [], make_uploader(job.recipe, job.compute.dist_context.is_main_process)
    on_checkpoint = uploader.push if uploader is not None else None
    with run_series([1.0] * len(unfinished)) as series:
        for seed, folder in enumerate(folders):
            runs.append(train_seed(job, seed, resume, on_checkpoint))
            if folder in unfinished:
                series.end_run()
    if uploader is not None:
        uploader.close()
    return runs


def train_seed(
    job: FinetuneJob, seed: int, resume: bool, on_checkpoint: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Train one seed and return its results. A finished or diverged seed is not trained again on resume."""
    seed_folder, dist_context = job.folder / f"seed-{seed}", job.compute.dist_context
    if resume and (results := dist_context.run_on_main(lambda: read_ended_seed(seed_folder))) is not None:
        return results
    if dist_context.is_main_process:
        seed_folder.mkdir(exist_ok=True)
    recipe = replace(job.recipe, seed=job.recipe.seed + seed)
    with quiet() if seed else nullcontext():  # notices about missing weights appear once
        model = build_seed_model(job, seed)
    if resume and job.recipe_changed:
        check_seed_resumable(seed_folder, model)
    predictions: list[Prediction] = []  # of the last evaluation
    batches, run = make_seed_run(job, recipe, seed, model, predictions, on_checkpoint)
    with explain_disk_errors(seed_folder):
        began = time.monotonic()
        try:
            outcome = fit(run, resume)
            if run.doctor is not None:
                run.doctor.judge(is_finished=True)
        except Diverged as e:
            if recipe.seeds == 1:
                raise
            warn(f"{seed_folder.name} diverged and has no score; the other seeds continue. {e}")
            results = {DIVERGED_KEY: str(e), "steps": e.steps, "seconds": time.monotonic() - began}
            if dist_context.is_main_process:
                write_results(seed_folder / "results.json", results)
            return results
        shapes = {"train": len(batches.seen_shapes), "evaluate": getattr(job.task, "num_shapes", None)}
        results = summarize_seed(outcome, recipe) | {"compiled": job.compute.compile, "shapes": shapes}
        if dist_context.is_main_process:
            write_predictions(seed_folder / PREDICTIONS_FILE, job.data.dev, predictions)
            metric = deciding_metric(recipe, job.task)
            is_kept = keeps_head(recipe, read_config(recipe.checkpoint), model.config.head)
            chain = extend_chain(recipe, is_kept, metric, outcome.scores[metric])
            save_seed_model(recipe, job.task, model, seed_folder, chain)
            write_results(seed_folder / "results.json", results)
            remove_best(seed_folder)
    return results


def make_seed_run(
    job: FinetuneJob,
    recipe: FinetuneRecipe,
    seed: int,
    model: Model,
    predictions: list[Prediction],
    on_checkpoint: Callable[[Path], None] | None,
) -> tuple[ShapeCountingBatches, TrainingRun]:
    """Return the batches of a seed and its run, whose evaluations replace `predictions`."""
    seed_folder, dist_context = job.folder / f"seed-{seed}", job.compute.dist_context
    items = [job.train_items[i] for i in job.train_indices[seed]]

    def evaluate(model: Model) -> dict[str, float]:
        if not dist_context.is_main_process:  # rank 0 predicts, and broadcasts the scores
            return {}
        predictions[:] = job.predict_dev(model)
        return job.task.score(job.data.dev, predictions)

    skips = recipe.skips.get(seed_folder.name, ())
    batches = ShapeCountingBatches(
        make_finetune_batch_fn(recipe, job.task, items, skips, dist_context=dist_context), job.shape_buckets
    )
    loss_fn, before_step = make_loss_fn(replace(job, recipe=recipe), model, items, skips)
    return batches, TrainingRun(
        recipe,
        job.compute,
        model,
        batches,
        evaluate,
        seed_folder,
        f"seed {seed + 1} of {recipe.seeds}",
        loss_fn=loss_fn,
        before_step=before_step,
        freeze_schedule=recipe.freeze_schedule(len(items)),
        score_fn=partial(orient_score, deciding_metric(recipe, job.task)) if recipe.load_best else None,
        patience=recipe.early_stopping,
        on_checkpoint=on_checkpoint,
        save_last=False,  # final/ follows at once, and a finished seed never resumes
        doctor=LiveDoctor(recipe, References(), str(job.folder), FINETUNING_RULES, job.reported),
    )


def read_ended_seed(seed_folder: Path) -> dict[str, Any] | None:
    """Return the results of a finished or diverged seed; None for one that is still to be trained."""
    if has_seed_diverged(seed_folder):
        return read_object(seed_folder / "results.json")
    if not is_seed_finished(seed_folder):
        return None
    results = read_object(seed_folder / "results.json", SeedResults)
    scores = {name: math.nan if score is None else score for name, score in results["scores"].items()}
    speed = results["examples_per_second"]
    return results | {"scores": scores, "examples_per_second": math.nan if speed is None else speed}


def summarize_seed(outcome: FitResult, recipe: FinetuneRecipe) -> dict[str, Any]:
    per_token = outcome.steps * recipe.global_batch_size / max(outcome.tokens, 1)
    return {
        "scores": outcome.scores,
        "steps": outcome.steps,
        "best_step": outcome.best_step,
        "loss": outcome.loss,
        "seconds": outcome.seconds,
        "examples_per_second": outcome.tokens_per_second * per_token,
    }
