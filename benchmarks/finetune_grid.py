"""Compare the default of `firth finetune` with the best of a grid of 4 learning rates x 3 numbers of epochs.

For each task of one checkpoint: the default settings, whose rate is chosen by trials on train, and twelve runs with
fixed settings. Many runs work side by side, each in its own process. The best of twelve scores on dev is too good by
chance, the more the fewer the seeds; the table shows the deviation over seeds beside it.

    python benchmarks/finetune_grid.py run/final --data DATA --processes 12
    python benchmarks/finetune_grid.py run/final --data DATA --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from parallel_runs import run_parallel

from firth import __version__
from firth.core.console import format_count, say, show_table
from firth.models import read_config
from firth.recipes import finetuning_defaults, with_rate_candidates
from firth.tasks import FinetuneRecipe, finetune
from firth.train import apply_overrides, choose_compute, parse_overrides

RATE_FACTORS = (0.4, 1.0, 2.5, 6.25)  # of the default rate of the model's width
EPOCHS, QUICK_EPOCHS = (1.0, 3.0, 8.0), (1.0, 3.0, 6.0)
QUICK_SHOTS = 1500  # training examples of each task with --quick
DEFAULT = "default"


class Task(NamedTuple):
    """Files under the data folder."""

    task: str
    file: str
    max_length: int = 128


TASKS = {  # the longest first, so that no process waits for it at the end
    "squad": Task("span-qa", "qa_span/squad2", 384),
    "qnli": Task("pair", "pairs/qnli"),
    "sst2": Task("classify", "classification/sst2"),
    "stsb": Task("regress", "pairs/stsb"),
    "wnut17": Task("tag", "tagging/wnut17"),
    "trec": Task("classify", "classification/trec"),
}


def make_recipes(name: str, folder: Path, args: argparse.Namespace) -> dict[tuple[str, float, float], FinetuneRecipe]:
    """Return the recipe of each cell (task, rate, epochs); rate and epochs are 0 for the default."""
    task, shared = TASKS[name], finetuning_defaults(read_config(args.checkpoint))
    fields, _ = with_rate_candidates(shared, {})
    default = FinetuneRecipe(
        checkpoint=args.checkpoint,
        task=task.task,
        train=str(args.data / f"{task.file}.train.jsonl.xz"),
        dev=str(args.data / f"{task.file}.dev.jsonl.xz"),
        output_dir=str(folder / f"{name}-{DEFAULT}"),
        seeds=args.seeds,
        shots=args.shots,
        max_seq_length=task.max_length,
        save_steps=10**6,
        **fields,
    )
    default = apply_overrides(default, parse_overrides(args.overrides))
    recipes = {(name, 0.0, 0.0): default}
    for epochs in sorted(args.epochs, reverse=True):
        for factor in RATE_FACTORS:
            rate = float(f"{factor * default.learning_rate:.1e}")
            output_dir = str(folder / f"{name}-{rate:g}-{epochs:g}")
            cell = {"learning_rate": rate, "rate_candidates": (), "num_train_epochs": epochs, "output_dir": output_dir}
            recipes[name, rate, epochs] = replace(default, **cell)
    return recipes


def compare_task(name: str, results: Mapping[tuple[str, float, float], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the default beside the best cell of the grid, and beside the best rate at a middle number of epochs."""
    own = {(rate, epochs): r for (task, rate, epochs), r in results.items() if task == name}
    default = own.pop((0.0, 0.0))
    best = max(own, key=lambda cell: own[cell]["mean"])
    epochs = sorted({e for _, e in own})
    middle = {cell: r for cell, r in own.items() if cell[1] == epochs[(len(epochs) - 1) // 2]}
    trial = default["learning_rate_trial"]
    return {
        "task": name,
        "metric": default["metric"],
        DEFAULT: default["mean"],
        "default_std": default["std"],
        "default_rate": default["learning_rate"],
        "tried": None if trial is None or trial["skipped"] else dict(zip(trial["rates"], trial["losses"], strict=True)),
        "best": own[best]["mean"],
        "best_std": own[best]["std"],
        "best_rate": best[0],
        "best_epochs": best[1],
        "best_rate_at_middle_epochs": max(middle, key=lambda cell: middle[cell]["mean"])[0],
        "behind": own[best]["mean"] - default["mean"],
        "grid": [[rate, epochs, r["mean"], r["std"]] for (rate, epochs), r in sorted(own.items())],
    }


def format_row(found: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        found["task"],
        found["metric"],
        f"{100 * found[DEFAULT]:.1f} ± {100 * found['default_std']:.1f}",
        f"{found['default_rate']:g}",
        f"{100 * found['best']:.1f} ± {100 * found['best_std']:.1f}",
        f"{found['best_rate']:g} x {found['best_epochs']:g}",
        f"{found['best_rate_at_middle_epochs']:g}",
        f"{100 * found['behind']:+.1f}",
    )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a pretrained checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe fields of all runs")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with classification/, pairs/, tagging/, qa_span/"
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="names with commas (all six)")
    parser.add_argument("--seeds", type=int, default=3, help="of each cell (3; 1 with --quick)")
    parser.add_argument("--epochs", help="numbers of epochs with commas (1,3,8; 1,3,6 with --quick)")
    parser.add_argument("--shots", type=int, default=0, help="training examples of a task; 0: all")
    parser.add_argument("--processes", type=int, default=12, help="fine-tunings side by side (12)")
    parser.add_argument("--quick", action="store_true", help=f"one seed, {QUICK_SHOTS:,} examples, fewer epochs")
    parser.add_argument("--output", type=Path, help="write all scores as JSON")
    args = parser.parse_intermixed_args(arguments)
    if args.quick:
        args.seeds, args.shots = 1, args.shots or QUICK_SHOTS
    epochs = [float(n) for n in (args.epochs or "").split(",") if n]
    args.epochs = epochs or (QUICK_EPOCHS if args.quick else EPOCHS)
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args, start = parse_options(arguments), time.monotonic()
    names = [name for name in TASKS if name in args.tasks.split(",")]
    say(f"firth {__version__}; {choose_compute(FinetuneRecipe())}")
    results: dict[tuple[str, float, float], Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        recipes = {cell: r for name in names for cell, r in make_recipes(name, Path(folder), args).items()}
        log = Path(folder) / "log.txt"
        for cell, result in run_parallel(finetune, recipes.items(), args.processes, log):
            results[cell] = result
            name, rate, epochs = cell
            settings = f"{rate:g} x {epochs:g}" if rate else f"{DEFAULT}, {result['learning_rate']:g}"
            done = f"{len(results)} of {len(recipes)}, {time.monotonic() - start:.0f} s"
            say(f"{name}, {settings}: {100 * result['mean']:.1f} ({done})")
    found = [compare_task(name, results) for name in names]
    title = f"Default and best of {len(RATE_FACTORS)} x {len(args.epochs)}, {format_count(args.seeds, 'seed')}"
    columns = ("task", "metric", "default", "its rate", "best", "rate x epochs", "best rate, middle epochs", "behind")
    show_table(title, columns, [format_row(f) for f in found])
    say(f"{len(recipes)} runs, {time.monotonic() - start:.0f} s in all")
    if args.output:
        args.output.write_text(json.dumps({"tasks": found, "seconds": time.monotonic() - start}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
