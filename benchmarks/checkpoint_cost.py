"""Measure how long a checkpoint delays training: written in the background, or with training waiting for it.

    python benchmarks/checkpoint_cost.py bert-base --batch-size 256 --length 128 --steps 400 --save-steps 100

The same steps run in three modes, which alternate: no checkpoints, `sync` (training waits for the write) and `async`
(a background thread writes). The cost of a checkpoint is the difference in time between two checkpoints. The first
checkpoint, which allocates pinned host memory, and the end of the run, which waits for the last write, are reported
separately. Steps before the first checkpoint include compilation and are left out.
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

MODES = ("none", "sync", "async")


class IntervalSeconds(NamedTuple):
    """Seconds from the first checkpoint to the second, between later ones (median), and after the last."""

    first: float
    other: float
    end: float


def measure(
    training: TrainingConfig,
    compute: ComputeConfig,
    name: str,
    batch_size: int,
    save_steps: int,
    writes: bool,
    in_background: bool,
) -> IntervalSeconds:
    torch.manual_seed(0)
    model, rng, times = make_model(get_preset(name)), np.random.default_rng(0), []
    input_ids = rng.integers(10, model.config.vocab_size, (batch_size, training.max_seq_length))
    target_positions = np.tile(np.arange(0, training.max_seq_length, 7), (batch_size, 1))
    batch = Batch(
        input_ids, target_positions=target_positions, labels=np.take_along_axis(input_ids, target_positions, 1)
    )
    if model.config.architecture != "encoder":
        batch = Batch(input_ids, labels=np.roll(input_ids, -1, 1))
    training = replace(training, async_save=in_background, save_steps=save_steps if writes else 10**9)

    def record_time(step: int = 0, model: object = None) -> None:  # hooks run before the checkpoint of their step
        if compute.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic())

    with TemporaryDirectory(dir=".") as folder:
        output = Path(folder) if writes else None
        fit(
            TrainingRun(
                training, compute, model, lambda step: [batch], folder=output, hooks=[(save_steps, record_time)]
            )
        )
        record_time()
    first, *others, end = np.diff(times)
    return IntervalSeconds(first, statistics.median(others), end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a preset")
    parser.add_argument("--batch-size", type=int, default=32, help="rows per step (32)")
    parser.add_argument("--length", type=int, default=128, help="tokens per row (128)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (200)")
    parser.add_argument("--save-steps", type=int, default=50, help="steps between two checkpoints (50)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode; medians are reported (3)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="modes to compare (all)")
    args = parser.parse_args()
    if args.steps % args.save_steps or args.steps < 3 * args.save_steps:
        parser.error(f"--steps {args.steps} must be a multiple of --save-steps {args.save_steps}, three times or more")
    training = TrainingConfig(max_steps=args.steps, max_seq_length=args.length, warmup_steps=0, eval_steps=10**9)
    compute = choose_compute(training)
    measured: dict[str, list[IntervalSeconds]] = {name: [] for name in args.modes}
    for _ in range(args.repeats):
        for name in args.modes:
            writes = name != "none", name == "async"
            measured[name].append(measure(training, compute, args.model, args.batch_size, args.save_steps, *writes))
    medians = {
        name: IntervalSeconds(*map(statistics.median, zip(*repeats, strict=True))) for name, repeats in measured.items()
    }
    result: dict[str, object] = {"model": args.model, "machine": str(compute), "save_steps": args.save_steps}
    result["seconds"] = {name: t._asdict() for name, t in medians.items()}
    if none := medians.pop("none", None):
        result["seconds_per_checkpoint"] = {name: t.other - none.other for name, t in medians.items()}
        result["seconds_of_first_checkpoint"] = {name: t.first - none.first for name, t in medians.items()}
        result["share_of_training_time"] = {name: t.other / none.other - 1 for name, t in medians.items()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
