"""The diagnosis of a diverged run: the step, the layers with NaN or Inf, and the batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from firth.core.console import format_count
from firth.models import Model
from firth.objectives import Batch
from firth.train.guard import StepOutcome
from firth.train.step import RecurrentStateDict, TrainingRun, compute_gradients
from firth.train.step_runner import StepRunner

BATCH_PREVIEW_CHARS = 300  # characters of the batch in the message
MAX_NAMED_LAYERS = 4  # layers listed in the message


def diagnose_divergence(
    run: TrainingRun,
    runner: StepRunner,
    step: int,
    num_skipped: int,
    outcome: StepOutcome,
    recurrent_state: RecurrentStateDict,
    last_saved: str | None,
) -> str:
    """Return the message for a run that stops after `num_skipped` bad steps, the last being `step` (from 1).

    The first bad step is computed again to find its bad gradients: skipped steps have not changed the weights.
    """
    first = step - num_skipped + 1
    micro_batches = run.batch_fn(first - 1)
    run.model.zero_grad(set_to_none=True)
    compute_gradients(run, runner, micro_batches, first - 1, dict(recurrent_state))
    bad_gradients = format_layers(
        name for name, p in run.model.named_parameters() if p.grad is not None and has_nonfinite(p.grad)
    )
    bad_weights = nonfinite_layers(run.model)
    run.model.zero_grad(set_to_none=True)
    skipped = format_count(num_skipped, "step was", "steps in a row were")
    sentences = [
        f"{skipped} skipped, from step {first} on: {outcome.skip_reason} at step {step}.",
        f"The gradient of step {first} contains NaN or Inf in {bad_gradients}."
        if bad_gradients
        else f"Step {first} has finite gradients.",
        *([f"Weights contain NaN or Inf: {bad_weights}."] if bad_weights else []),
        f"Its batch begins: {preview_first_row(run.model, micro_batches[0])!r}.",
        f"{last_saved} is intact: --resume --rewind 0 restarts before step {first} and skips this batch."
        if last_saved
        else "There is no checkpoint yet.",
        f"{'If that does not help, lower' if last_saved else 'Lower'} --learning-rate or lengthen --warmup-steps.",
    ]
    return " ".join(sentences)


def nonfinite_layers(model: Model) -> str:
    """Names of the layers whose weights contain NaN or Inf; empty if there are none."""
    return format_layers(name for name, p in model.named_parameters() if has_nonfinite(p))


def has_nonfinite(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


def format_layers(names: Iterable[str]) -> str:
    """List the layers of some parameters, named up to the block's number, such as `blocks.3`."""
    layers: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        depth = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
        layers[".".join(parts[: depth + 1])] = None
    more = f" and {len(layers) - MAX_NAMED_LAYERS} more" if len(layers) > MAX_NAMED_LAYERS else ""
    return ", ".join(list(layers)[:MAX_NAMED_LAYERS]) + more


def preview_first_row(model: Model, batch: Batch) -> str:
    """Decode the first row of the batch, on one line."""
    ids = batch.input_ids[0] if batch.document_ids is None else batch.input_ids[0][batch.document_ids[0] >= 0]
    if model.tokenizer is None:
        return " ".join(map(str, ids.tolist()))[:BATCH_PREVIEW_CHARS]
    return " ".join(model.tokenizer.decode(ids.tolist(), skip_special_tokens=False).split())[:BATCH_PREVIEW_CHARS]
