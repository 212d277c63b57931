"""Seconds that a checkpoint costs a run: written beside the training, and with the training waiting for it.

    python benchmarks/checkpoint_cost.py bert-base --rows 32 --length 128 --steps 200 --every 50

The same steps are timed three times over, in turns: without checkpoints, with waiting, and beside. What a checkpoint
costs is what a run takes longer, divided by its checkpoints; the last one, which every run waits for, is counted too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from firth.models import make_model, preset
from firth.objectives import Batch
from firth.train import Machine, Run, Training, choose_machine, fit

WAYS = {"none": None, "waiting": False, "beside": True}


def seconds(training: Training, machine: Machine, name: str, rows: int, every: int | None, beside: bool) -> float:
    """How long a run takes, its first steps (which compile) left out."""
    torch.manual_seed(0)
    model, rng, began = make_model(preset(name)), np.random.default_rng(0), [0.0]
    tokens = rng.integers(10, model.config.vocab_size, (rows, training.max_seq_length))
    asked = np.tile(np.arange(0, training.max_seq_length, 7), (rows, 1))
    batch = Batch(tokens, asked=asked, labels=np.take_along_axis(tokens, asked, 1))
    if model.config.shape != "encoder":
        batch = Batch(tokens, labels=np.roll(tokens, -1, 1))
    training = replace(training, async_save=beside, save_steps=every or 10**9)

    def begin(step: int, model: object) -> None:
        if step == WARM:
            if machine.device.type == "cuda":
                torch.cuda.synchronize()
            began[0] = time.monotonic()

    with TemporaryDirectory(dir=".") as folder:
        place = Path(folder) if every else None
        fit(Run(training, machine, model, lambda step: [batch], folder=place, hooks=[(1, begin)]))
        if machine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - began[0]


WARM = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    training = Training(max_steps=given.steps + WARM, max_seq_length=given.length, warmup_steps=0, eval_steps=10**9)
    machine = choose_machine(training)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(given.turns):
        for name, beside in WAYS.items():
            every = None if beside is None else given.every
            found[name].append(seconds(training, machine, given.model, given.rows, every, bool(beside)))
    took = {name: statistics.median(times) for name, times in found.items()}
    saved = (given.steps + WARM) // given.every + bool((given.steps + WARM) % given.every)
    costs = {name: (took[name] - took["none"]) / saved for name in ("waiting", "beside")}
    print(
        json.dumps(
            {
                "model": given.model,
                "machine": str(machine),
                "seconds": took,
                "checkpoints": saved,
                "seconds_per_checkpoint": costs,
                "share_of_training": {name: cost * saved / took["none"] for name, cost in costs.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
