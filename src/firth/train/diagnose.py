"""What a run broke on: the step, the layers, and the text that was read."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from firth.core.console import format_count
from firth.models import Model
from firth.objectives import Batch
from firth.train.guard import StepOutcome
from firth.train.step import RecurrentStateDict, TrainingRun, compute_gradients
from firth.train.step_runner import StepRunner

BATCH_PREVIEW_CHARS = 300  # characters of a text
MAX_NAMED_LAYERS = 4  # layers that are named


def diagnose_divergence(
    run: TrainingRun,
    runner: StepRunner,
    step: int,
    num_skipped: int,
    outcome: StepOutcome,
    recurrent_state: RecurrentStateDict,
    last_saved: str | None,
) -> str:
    """Why a run stops after so many bad steps, the last of which is this one; steps are counted from 1.

    The first of them is computed again: the weights have not moved since.
    """
    first = step - num_skipped + 1
    micro = run.batch_fn(first - 1)
    run.model.zero_grad(set_to_none=True)
    compute_gradients(run, runner, micro, first - 1, dict(recurrent_state))
    wrong = format_layers(
        name for name, p in run.model.named_parameters() if p.grad is not None and has_nonfinite(p.grad)
    )
    spoilt = nonfinite_layers(run.model)
    run.model.zero_grad(set_to_none=True)
    some = format_count(num_skipped, "step was", "steps in a row were")
    sentences = [
        f"{some} skipped, from step {first} on: {outcome.skip_reason} at step {step}.",
        f"The gradient of step {first} is no number in {wrong}." if wrong else f"Step {first} has finite gradients.",
        *([f"Weights that are no numbers: {spoilt}."] if spoilt else []),
        f"Its batch begins: {preview_first_row(run.model, micro[0])!r}.",
        f"{last_saved} is whole: --resume --rewind 0 goes back to before step {first} and passes over this text."
        if last_saved
        else "There is no checkpoint yet.",
        f"{'If that does not help, lower' if last_saved else 'Lower'} --learning-rate or lengthen --warmup-steps.",
    ]
    return " ".join(sentences)


def nonfinite_layers(model: Model) -> str:
    """The parts of a model with weights that are no numbers; nothing where all are."""
    return format_layers(name for name, p in model.named_parameters() if has_nonfinite(p))


def has_nonfinite(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


def format_layers(names: Iterable[str]) -> str:
    """The parts of a model that some parameters belong to, named up to the number of the block."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
        found[".".join(parts[: place + 1])] = None
    more = f" and {len(found) - MAX_NAMED_LAYERS} more" if len(found) > MAX_NAMED_LAYERS else ""
    return ", ".join(list(found)[:MAX_NAMED_LAYERS]) + more


def preview_first_row(model: Model, batch: Batch) -> str:
    """The first row as the model reads it, in one line."""
    ids = batch.input_ids[0] if batch.document_ids is None else batch.input_ids[0][batch.document_ids[0] >= 0]
    if model.tokenizer is None:
        return " ".join(map(str, ids.tolist()))[:BATCH_PREVIEW_CHARS]
    return " ".join(model.tokenizer.decode(ids.tolist(), skip_special_tokens=False).split())[:BATCH_PREVIEW_CHARS]
