"""Is the plan right? Plan a run, run it, and compare time, peak memory and held-out loss.

    python benchmarks/plan_check.py --data TEXT [--models encoder,decoder,bert-tiny] [--minutes 1,2 | --max-steps 20]
        [--global-batch-tokens N] [--output-dir WORK] [--json]

For each model and budget: `firth plan`, then the pretraining of the planned size with the planned settings, in a
process of its own. The ratios are measured over predicted. Time is that of the process, libraries included. Peak memory
is on a GPU what torch allocated, on a CPU the most resident memory of the process (Linux). A run with minutes keeps its
time whatever was planned, so the number of steps shows whether the speed was predicted; a few steps (`--max-steps`)
show the memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from firth import __version__
from firth.api import plan, pretrain
from firth.core.console import format_duration, quiet, say, show_table
from firth.core.files import format_bytes
from firth.core.memory import peak_memory_bytes
from firth.train import choose_compute
from firth.train.recipe import TrainingConfig

PLANNED = {  # options of `pretrain`, and the figures of the plan that they take
    "global_batch_tokens": "global_batch_tokens",
    "learning_rate": "learning_rate",
    "save_steps": "save_steps",
    "max_seq_length": "row_length",
    "vocab_size": "vocab_size",
}


def compute_run(options: dict[str, Any]) -> dict[str, Any]:
    """Pretrain, and return the results with the seconds and the peak memory of this process."""
    start = time.monotonic()
    results = pretrain(**options)
    return {
        "seconds": time.monotonic() - start,
        "memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_memory_bytes(),
        "loss": results["eval_loss"],
        "steps": results["steps"],
    }


def compute_plan(model: str, data: str, budget: dict[str, Any]) -> dict[str, Any]:
    with quiet():
        return dict(plan(model, data, **budget))


def call_alone(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Call a function in a process of its own: memory that an earlier call left would count as that of libraries."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def check_plan(model: str, budget: dict[str, Any], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Plan and run one model, and return both."""
    if args.global_batch_tokens:
        budget = {**budget, "global_batch_tokens": args.global_batch_tokens}
    planned = call_alone(compute_plan, model, args.data, budget)
    chosen = planned["chosen"]
    options = {name: chosen[key] for name, key in PLANNED.items()}
    name, length = next(iter(budget.items()))
    say(f"{model}, {name} {length:g}: running {chosen['model']}")
    measured = call_alone(
        compute_run,
        {
            "model": chosen["model"],
            "data": args.data,
            "output_dir": folder / f"{model}-{length:g}",
            "overwrite": True,
            **options,
            **budget,
        },
    )
    figures = {"seconds": "seconds", "steps": "steps", "memory_bytes": "memory_bytes", "loss": "expected_loss"}
    predicted = {name: chosen[key] for name, key in figures.items()}
    ratios = {name: measured[name] / predicted[name] for name in figures}
    return {
        "asked": model,
        "model": chosen["model"],
        "budget": budget,
        "predicted": predicted,
        "measured": measured,
        "ratios": ratios,
        "extrapolates": sorted(chosen["extrapolations"]),
    }


def format_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return model, budget, and for each figure: predicted, measured and their ratio."""
    formats = {
        "seconds": format_duration,
        "steps": "{:,}".format,
        "memory_bytes": format_bytes,
        "loss": "{:.2f}".format,
    }
    cells = []
    for name, show in formats.items():
        predicted, measured = row["predicted"][name], row["measured"][name]
        cells.append(f"{show(predicted)} / {show(measured)} ({row['ratios'][name]:.2f})")
    return row["model"], ", ".join(f"{name} {value:g}" for name, value in row["budget"].items()), *cells


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a text, or shards")
    parser.add_argument("--models", default="encoder,decoder,encoder-decoder", help="joined by commas")
    parser.add_argument("--minutes", default="1,2", help="budgets, joined by commas (1,2)")
    parser.add_argument("--max-steps", help="budgets of steps instead, joined by commas")
    parser.add_argument("--global-batch-tokens", type=int, help="instead of the planned one")
    parser.add_argument("--output-dir", type=Path, help="keep the runs here")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args(argv)
    budgets = [{"minutes": float(minutes)} for minutes in args.minutes.split(",")]
    if args.max_steps:
        budgets = [{"max_steps": int(steps)} for steps in args.max_steps.split(",")]
    say(f"firth {__version__}; {choose_compute(TrainingConfig())}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output_dir or Path(temporary)
        rows = []
        for model, budget in product(args.models.split(","), budgets):
            rows.append(check_plan(model, budget, args, folder))
            say("; ".join(format_row(rows[-1])))
    columns = ["model", "budget", "time", "steps", "peak memory", "held-out loss"]
    show_table("Predicted / measured (ratio)", columns, [format_row(row) for row in rows])
    if args.json:
        print(json.dumps({"runs": rows}))


if __name__ == "__main__":
    main()
