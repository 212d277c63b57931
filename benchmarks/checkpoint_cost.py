"""Seconds that a checkpoint costs a run: written beside the training, and with the training waiting for it.

    python benchmarks/checkpoint_cost.py bert-base --rows 256 --length 128 --steps 400 --every 100

The same steps are timed in turns: without checkpoints, with waiting, and beside. What a checkpoint costs is what the
steps take longer, divided by the checkpoints among them. Every run waits for its last one: that is told apart, once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from firth.models import make_model, preset
from firth.objectives import Batch
from firth.train import Machine, Run, Training, choose_machine, fit

WAYS = {"none": False, "waiting": False, "beside": True}


class Took(NamedTuple):
    """Seconds of a run: its steps but the first ones (which compile), and what comes after the last step."""

    steps: float
    end: float


def timed(training: Training, machine: Machine, name: str, rows: int, every: int | None, beside: bool) -> Took:
    torch.manual_seed(0)
    model, rng, times = make_model(preset(name)), np.random.default_rng(0), []
    tokens = rng.integers(10, model.config.vocab_size, (rows, training.max_seq_length))
    asked = np.tile(np.arange(0, training.max_seq_length, 7), (rows, 1))
    batch = Batch(tokens, asked=asked, labels=np.take_along_axis(tokens, asked, 1))
    if model.config.shape != "encoder":
        batch = Batch(tokens, labels=np.roll(tokens, -1, 1))
    training = replace(training, async_save=beside, save_steps=every or 10**9)

    def note() -> None:
        if machine.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic())

    def look(step: int, model: object) -> None:  # before a checkpoint of this step
        if step in (WARM, training.max_steps):
            note()

    with TemporaryDirectory(dir=".") as folder:
        place = Path(folder) if every else None
        fit(Run(training, machine, model, lambda step: [batch], folder=place, hooks=[(1, look)]))
        note()
    return Took(*np.diff(times))


WARM = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    given = parser.parse_args()
    training = Training(max_steps=given.steps, max_seq_length=given.length, warmup_steps=0, eval_steps=10**9)
    machine = choose_machine(training)
    found: dict[str, list[Took]] = {name: [] for name in given.ways}
    for _ in range(given.turns):
        for name in given.ways:
            every = None if name == "none" else given.every
            found[name].append(timed(training, machine, given.model, given.rows, every, bool(WAYS[name])))
    steps, end = ({k: statistics.median(getattr(x, of) for x in v) for k, v in found.items()} for of in Took._fields)
    saved = (given.steps - 1) // given.every  # but the last one
    facts: dict[str, object] = {"model": given.model, "machine": str(machine), "checkpoints": saved}
    facts |= {"seconds": steps, "seconds_at_the_end": end}
    if "none" in steps:
        longer = {name: took - steps["none"] for name, took in steps.items() if name != "none"}
        facts["seconds_per_checkpoint"] = {name: more / saved for name, more in longer.items()}
        facts["share_of_training"] = {name: more / steps["none"] for name, more in longer.items()}
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
