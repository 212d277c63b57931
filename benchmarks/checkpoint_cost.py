"""Seconds that a checkpoint costs a run: written beside the training, and with the training waiting for it.

    python benchmarks/checkpoint_cost.py bert-base --rows 256 --length 128 --steps 400 --every 100

The same steps are timed in turns: without checkpoints, with waiting, and beside. What a checkpoint costs is what the
steps from one to the next take longer than without any. The first one, which makes room in the host's memory, and the
last one, which every run waits for, are told apart. Steps before the first one, which compile, are left out.
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

from firth.models import get_preset, make_model
from firth.objectives import Batch
from firth.train import ComputeConfig, TrainingConfig, TrainingRun, choose_compute, fit

WAYS = ("none", "waiting", "beside")


class Took(NamedTuple):
    """Seconds of a run: the steps after its first checkpoint, those after each other one, and its end."""

    first: float
    other: float
    end: float


def timed(
    training: TrainingConfig, machine: ComputeConfig, name: str, rows: int, every: int, saves: bool, beside: bool
) -> Took:
    torch.manual_seed(0)
    model, rng, times = make_model(get_preset(name)), np.random.default_rng(0), []
    tokens = rng.integers(10, model.config.vocab_size, (rows, training.max_seq_length))
    asked = np.tile(np.arange(0, training.max_seq_length, 7), (rows, 1))
    batch = Batch(tokens, target_positions=asked, labels=np.take_along_axis(tokens, asked, 1))
    if model.config.architecture != "encoder":
        batch = Batch(tokens, labels=np.roll(tokens, -1, 1))
    training = replace(training, async_save=beside, save_steps=every if saves else 10**9)

    def note(step: int = 0, model: object = None) -> None:  # before a checkpoint of this step
        if machine.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic())

    with TemporaryDirectory(dir=".") as folder:
        place = Path(folder) if saves else None
        fit(TrainingRun(training, machine, model, lambda step: [batch], folder=place, hooks=[(every, note)]))
        note()
    first, *others, end = np.diff(times)
    return Took(first, statistics.median(others), end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    given = parser.parse_args()
    if given.steps % given.every or given.steps < 3 * given.every:
        parser.error(f"--steps {given.steps} must be three times --every {given.every}, or a higher multiple")
    training = TrainingConfig(max_steps=given.steps, max_seq_length=given.length, warmup_steps=0, eval_steps=10**9)
    machine = choose_compute(training)
    found: dict[str, list[Took]] = {name: [] for name in given.ways}
    for _ in range(given.turns):
        for name in given.ways:
            saves = name != "none", name == "beside"
            found[name].append(timed(training, machine, given.model, given.rows, given.every, *saves))
    took = {name: Took(*map(statistics.median, zip(*turns, strict=True))) for name, turns in found.items()}
    facts: dict[str, object] = {"model": given.model, "machine": str(machine), "every": given.every}
    facts["seconds"] = {name: t._asdict() for name, t in took.items()}
    if none := took.pop("none", None):
        facts["seconds_per_checkpoint"] = {name: t.other - none.other for name, t in took.items()}
        facts["seconds_of_the_first"] = {name: t.first - none.first for name, t in took.items()}
        facts["share_of_training"] = {name: t.other / none.other - 1 for name, t in took.items()}
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
