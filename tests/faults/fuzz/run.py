"""Attack the commands with damaged inputs, and print a table of what happened.

OMP_NUM_THREADS=1 python tests/faults/fuzz/run.py --cases 60000 --seed 1 --processes 16 --output-dir attack
OMP_NUM_THREADS=1 python tests/faults/fuzz/run.py --groups shards --cases 1000

The output folder gets table.md, broken.jsonl (group, seed, index, reason, command line and output of each broken input)
and inputs/, their files. `--groups GROUP --seed SEED --first INDEX --cases 1` runs one of them again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3] / "src")]
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

from faults.fuzz.fixtures import Fixtures  # noqa: E402
from faults.fuzz.groups import GROUPS  # noqa: E402
from faults.fuzz.harness import (  # noqa: E402
    CASES_PER_PROCESS,
    MakeCase,
    Outcome,
    Table,
    build_commands_once,
    fork,
    list_inputs,
    run_group,
    run_processes,
    temporary_folder,
    wait,
)

# A share of the cases by the time that a case takes.
WEIGHTS = {"run folders": 0.25, "shards": 0.5, "fine-tuned checkpoints": 0.5}


class Attack:
    """Inputs of all groups by turns, from one seed."""

    def __init__(self, options: argparse.Namespace, fixtures: Fixtures, seed: str, work: Path, began: float) -> None:
        self.options, self.fixtures, self.seed, self.work, self.began = options, fixtures, seed, work, began
        self.output_dir: Path | None = options.output_dir
        self.inputs = list_inputs(fixtures.folder)
        self.table = Table()

    def run(self, num_cases: int) -> None:
        """Run until every group has its share, or until the time is over; write the table after each turn."""
        options = self.options
        total = sum(WEIGHTS.get(name, 1.0) for name in options.groups)
        goals = {name: round(num_cases * WEIGHTS.get(name, 1.0) / total) for name in options.groups}
        makers = {name: GROUPS[name](self.fixtures) for name in options.groups}
        order = list(goals)
        random.Random(self.seed).shuffle(order)  # when the time is over, processes have not all skipped the same group
        for start in range(0, max(goals.values()), CASES_PER_PROCESS):
            for name in order:
                if time.monotonic() - self.began > 60 * options.minutes:
                    break
                self.run_group(name, makers[name], start, min(CASES_PER_PROCESS, goals[name] - start))
            if self.output_dir and options.processes == 1:
                (self.output_dir / "table.md").write_text(f"{self.table}\n")
            (self.work / f"table-{self.seed}.json").write_text(self.table.to_json())

    def run_group(self, name: str, make: MakeCase, start: int, num_cases: int) -> None:
        folder, seed = self.work / f"cases-{self.seed}", f"{self.seed} {name}"
        for outcome in run_group(make, seed, num_cases, folder, self.options.first + start, self.inputs):
            self.table.add(name, outcome)
            if outcome.kind == "broken" and self.output_dir:
                self.keep(name, make, outcome)

    def keep(self, name: str, make: MakeCase, outcome: Outcome) -> None:
        """Write what is known about a broken input, and the input itself."""
        assert self.output_dir
        with open(self.output_dir / "broken.jsonl", "a") as f:
            f.write(json.dumps([name, self.seed, *outcome]) + "\n")
        folder = self.output_dir / "inputs" / f"{name.replace(' ', '-')}-{self.seed}-{outcome.index}"
        folder.mkdir(parents=True, exist_ok=True)
        wait(fork(make, random.Random(f"{self.seed} {name} {outcome.index}"), folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1700, help="Try this many inputs, over all groups and processes.")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS), metavar="NAME")
    parser.add_argument("--seed", default="0", help="Process I of several takes the seed SEED.I.")
    parser.add_argument("--first", type=int, default=0, help="Begin with this index in each group.")
    parser.add_argument("--minutes", type=float, default=1e9, help="Stop after this time.")
    parser.add_argument("--processes", type=int, default=1, help="Share the inputs among this many processes.")
    parser.add_argument("--output-dir", type=Path, help="Write the table and the broken inputs to this folder.")
    options = parser.parse_args()
    work, table, began = temporary_folder(), Table(), time.monotonic()
    if options.output_dir:
        options.output_dir = options.output_dir.absolute()
        options.output_dir.mkdir(parents=True, exist_ok=True)
    try:
        fixtures = Fixtures(work / "fixtures")
        fixtures.build()
        build_commands_once()
        n = options.processes
        seeds = [options.seed] if n == 1 else [f"{options.seed}.{i}" for i in range(n)]
        attacks = [Attack(options, fixtures, seed, work, began) for seed in seeds]
        failed = run_processes(Attack.run, [(attack, -(-options.cases // n)) for attack in attacks])
        for path in sorted(work.glob("table-*.json")):
            table.add_json(path.read_text())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    words = f"{table}\n\n{time.monotonic() - began:.0f} s, {options.processes} processes"
    if failed:
        words += f", {failed} of which failed: their last inputs are not counted"
    print(words)
    if options.output_dir:
        (options.output_dir / "table.md").write_text(f"{words}\n")
    for name, outcome in table.broken[:200]:
        print(f"\n{name} {outcome.index}: {outcome.reason}\n  firth {outcome.arguments[:300]}")
    sys.exit(bool(table.broken or failed))


if __name__ == "__main__":
    main()
