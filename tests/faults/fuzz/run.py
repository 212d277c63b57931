"""Attack the commands with damaged inputs, and print a table of what happened.

OMP_NUM_THREADS=1 python tests/faults/fuzz/run.py --cases 60000 --seed 1
OMP_NUM_THREADS=1 python tests/faults/fuzz/run.py --groups shards --cases 1000 --broken broken.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
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
    Table,
    build_commands_once,
    run_group,
    temporary_folder,
)

# A share of the cases by the time that a case takes.
WEIGHTS = {"run folders": 0.25, "shards": 0.5, "fine-tuned checkpoints": 0.5}


def attack(
    name: str, make: MakeCase, options: argparse.Namespace, start: int, num_cases: int, work: Path, table: Table
) -> None:
    for outcome in run_group(make, f"{options.seed} {name}", num_cases, work / "cases", options.first + start):
        table.add(name, outcome)
        if outcome.kind == "broken" and options.broken:
            with open(options.broken, "a") as f:
                f.write(json.dumps([name, *outcome]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1700, help="Try this many inputs, over all groups.")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS), metavar="NAME")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--first", type=int, default=0, help="Begin with this index in each group.")
    parser.add_argument("--minutes", type=float, default=1e9, help="Stop after this time.")
    parser.add_argument("--broken", type=Path, help="Append broken inputs to this file.")
    parser.add_argument("--table", type=Path, help="Write the table to this file after each round.")
    options = parser.parse_args()
    work, table, began = temporary_folder(), Table(), time.monotonic()
    total = sum(WEIGHTS.get(name, 1.0) for name in options.groups)
    try:
        fixtures = Fixtures(work / "fixtures")
        fixtures.build()
        build_commands_once()
        goals = {name: round(options.cases * WEIGHTS.get(name, 1.0) / total) for name in options.groups}
        makers = {name: GROUPS[name](fixtures) for name in options.groups}
        for start in range(0, max(goals.values()), CASES_PER_PROCESS):  # all groups by turns, until the time is over
            for name, goal in goals.items():
                if time.monotonic() - began > 60 * options.minutes:
                    break
                num_cases = min(CASES_PER_PROCESS, goal - start)
                attack(name, makers[name], options, start, num_cases, work, table)
            if options.table:
                options.table.write_text(f"{table}\n")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(table)
    for name, outcome in table.broken[:200]:
        print(f"\n{name} {outcome.index}: {outcome.reason}\n  firth {outcome.arguments[:300]}")
    sys.exit(bool(table.broken))


if __name__ == "__main__":
    main()
