"""Training runs on a split of train: they choose the learning rate (`try_rates.py`) or settings (`try_settings.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from firth.core.console import quiet, warn
from firth.models import Model
from firth.objectives import Batch
from firth.tasks.finetune_job import FinetuneJob, make_finetune_batch_fn, sample_shape_buckets
from firth.tasks.finetune_loss import make_loss_fn
from firth.tasks.multitask import split_into_batches
from firth.tasks.rate_trial import held_out_batch_size, split_for_trial
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.seed_model import build_seed_model
from firth.tasks.shape_buckets import ShapeCountingBatches
from firth.tasks.task import Prediction
from firth.train import ComputeConfig, Diverged, TrainingRun, fit
from firth.train.step import build_step_runner
from firth.train.step_runner import LossFn, StepRunner, sum_of_means


class TrialRuns:
    """Training runs on one part of train, measured on the rest: for the choice of the rate, and for a search.

    They share the loaded model, whose weights are restored before each run, and for equal batch sizes the compiled step
    or the CUDA graphs. So a run depends on its recipe alone, never on those before it. Dev is never read.
    """

    def __init__(self, job: FinetuneJob) -> None:
        self.job, recipe = job, job.recipe
        indices = job.train_indices[0]
        self.train, self.held_out = split_for_trial(job.num_labelled, recipe.seed)
        # what a teacher labels follows the labelled examples; a copy of a held-out example would give it away
        sources, extra = {indices[i] for i in self.held_out}, job.data.extra
        is_seen = [extra[i - len(job.data.train)].source in sources for i in indices[job.num_labelled :]]
        self.train += [job.num_labelled + i for i, seen in enumerate(is_seen) if not seen]
        items = [job.train_items[i] for i in indices]
        self.train_items, self.held_out_items = ([items[i] for i in side] for side in (self.train, self.held_out))
        self.held_out_examples = [job.data.train[indices[i]] for i in self.held_out]
        size = held_out_batch_size(len(self.held_out), recipe.per_device_train_batch_size)
        self.held_out_batches = [job.task.collate(some) for some in split_into_batches(self.held_out_items, size)]
        with quiet():
            self.model = build_seed_model(job, 0)
        self.model.to(job.compute.device)
        self.initial = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.batch_size = 0
        self.runner: StepRunner | None = None

    def set_batch_size(self, recipe: FinetuneRecipe) -> None:
        """Prepare the batches and the loss of this batch size; those of the last one are freed."""
        if recipe.per_device_train_batch_size == self.batch_size:
            return
        job, self.batch_size, self.runner = self.job, recipe.per_device_train_batch_size, None
        shapes = job.shape_buckets
        if shapes is not None and self.batch_size != job.recipe.per_device_train_batch_size:
            shapes = sample_shape_buckets(recipe, job.task, [job.train_items[i] for i in job.train_indices[0]])
        self.batches = ShapeCountingBatches(
            make_finetune_batch_fn(recipe, job.task, self.train_items, dist_context=job.compute.dist_context), shapes
        )
        self.loss_fn, self.before_step = make_loss_fn(replace(job, recipe=recipe), self.model, self.train_items)

    def run(self, recipe: FinetuneRecipe, name: str, predict: bool = False) -> tuple[list[float], list[Prediction]]:
        """Train to the last step; return the losses of the held-out batches, and predictions where they are needed.

        Both are empty where the loss diverged.
        """
        job, losses, predictions = self.job, list[float](), list[Prediction]()
        self.set_batch_size(recipe)
        self.model.load_state_dict(self.initial)

        def evaluate(model: Model) -> dict[str, float]:
            if not job.compute.dist_context.is_main_process:
                return {}
            losses[:] = measure_batch_losses(model, self.held_out_batches, job.compute, self.loss_fn)
            if predict:
                size = 2 * job.recipe.per_device_train_batch_size
                predictions[:] = job.task.predict(model, self.held_out_items, job.compute, size)
            return {}

        run = TrainingRun(
            replace(recipe, eval_steps=recipe.max_steps),
            job.compute,
            self.model,
            self.batches,
            evaluate,
            None,
            name,
            loss_fn=self.loss_fn,
            before_step=self.before_step,
            freeze_schedule=recipe.freeze_schedule(len(self.train_items)),
            runner=self.runner,
        )
        self.runner = run.runner = run.runner or build_step_runner(run)
        try:
            fit(run)
        except Diverged as e:
            warn(f"{name} diverged in its trial. {e}")
            return [], []
        return job.compute.dist_context.broadcast(losses), predictions


@torch.no_grad()
def measure_batch_losses(
    model: Model, batches: Sequence[Batch], compute: ComputeConfig, loss_fn: LossFn | None = None
) -> list[float]:
    """Return the mean loss of each batch, without dropout."""
    model.eval()
    losses = []
    for batch in batches:
        with compute.autocast():
            losses.append(sum_of_means((loss_fn or model.losses)(batch.to(compute.device)), batch.loss_counts))
    return torch.stack(losses).tolist()
