"""What a run broke on: the step, the layers, and the text that was read."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from firth.console import count
from firth.models import Model
from firth.objectives import Batch
from firth.train.guard import Found
from firth.train.step import Carry, Losses, Run, gradients

SHOWN = 300  # characters of a text
MOST = 4  # layers that are named


def diagnose(
    run: Run, losses_of: Losses, step: int, in_a_row: int, found: Found, carry: Carry, saved: str | None
) -> str:
    """Why a run stops after so many bad steps, the last of which is this one; steps are counted from 1.

    The first of them is computed again: the weights have not moved since.
    """
    first = step - in_a_row + 1
    micro = run.batches(first - 1)
    run.model.zero_grad(set_to_none=True)
    gradients(run, losses_of, micro, first - 1, dict(carry))
    wrong = layers(name for name, p in run.model.named_parameters() if p.grad is not None and broken(p.grad))
    spoilt = spoilt_layers(run.model)
    run.model.zero_grad(set_to_none=True)
    some = count(in_a_row, "step was", "steps in a row were")
    sentences = [
        f"{some} skipped, from step {first} on: {found.reason} at step {step}.",
        f"The gradient of step {first} is no number in {wrong}." if wrong else f"Step {first} has finite gradients.",
        *([f"Weights that are no numbers: {spoilt}."] if spoilt else []),
        f"Its batch begins: {shown(run.model, micro[0])!r}.",
        f"{saved} is whole: --resume --rewind 0 goes back to before step {first} and passes over this text."
        if saved
        else "There is no checkpoint yet.",
        f"{'If that does not help, lower' if saved else 'Lower'} --learning-rate or lengthen --warmup-steps.",
    ]
    return " ".join(sentences)


def spoilt_layers(model: Model) -> str:
    """The parts of a model with weights that are no numbers; nothing where all are."""
    return layers(name for name, p in model.named_parameters() if broken(p))


def broken(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


def layers(names: Iterable[str]) -> str:
    """The parts of a model that some parameters belong to, named up to the number of the block."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
        found[".".join(parts[: place + 1])] = None
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    return ", ".join(list(found)[:MOST]) + more


def shown(model: Model, batch: Batch) -> str:
    """The first row as the model reads it, in one line."""
    ids = batch.tokens[0] if batch.doc is None else batch.tokens[0][batch.doc[0] >= 0]
    if model.tokenizer is None:
        return " ".join(map(str, ids.tolist()))[:SHOWN]
    return " ".join(model.tokenizer.decode(ids.tolist(), skip_special=False).split())[:SHOWN]
