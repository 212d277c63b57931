"""Damaged inputs of every kind are accepted or refused: no traceback, no loss, no hanging, no gigabytes.

CI tries a few inputs of each group; `pytest -m slow -rP tests/faults/fuzz` tries FUZZ_CASES of each (default: 3,500).
`python tests/faults/fuzz/run.py` prints the table of all groups.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.fuzz.fixtures import Fixtures
from faults.fuzz.groups import GROUPS
from faults.fuzz.harness import Case, Table, list_inputs, run_group, temporary_folder
from faults.fuzz.kills import Kills, make_jobs, use_small_chunks
from faults.fuzz.mutators import RAW, dump_json, mutate_bytes, mutate_value

CI_CASES = 12  # of each group
SLOW_CASES = int(os.environ.get("FUZZ_CASES", "3500"))
SLOW_KILLS = int(os.environ.get("FUZZ_KILLS", "150"))  # of each command
JOBS = (
    *("bert", "gpt2", "t5", "word2vec", "finetune", "LoRA", "preference", "KTO", "reward", "heads"),
    *("adapt", "search", "distil"),
    *("prepare", "prepare by tasks", "prepare on Ray"),
)
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads CPU time and memory from /proc")


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    folder = temporary_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def fixtures(work: Path) -> Fixtures:
    made = Fixtures(work / "fixtures")
    made.build()
    return made


def attack(group: str, fixtures: Fixtures, work: Path, seed: str, num_cases: int) -> Table:
    table = Table()
    for outcome in run_group(
        GROUPS[group](fixtures), f"{seed} {group}", num_cases, work / "cases", inputs=list_inputs(fixtures.folder)
    ):
        table.add(group, outcome)
    return table


def told(table: Table) -> str:
    return "\n\n".join(f"{o.index}: {o.reason}\nfirth {o.arguments}\n{o.output}" for _, o in table.broken[:5])


@pytest.mark.parametrize("group", GROUPS)
def test_a_few_damaged_inputs(group: str, fixtures: Fixtures, work: Path) -> None:
    table = attack(group, fixtures, work, "ci", CI_CASES)
    assert table.counts[group].total() == CI_CASES
    assert not table.broken, told(table)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_many_damaged_inputs(group: str, fixtures: Fixtures, work: Path) -> None:
    table = attack(group, fixtures, work, "0", SLOW_CASES)
    print(table)
    assert not table.broken, told(table)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_many_kills(name: str, fixtures: Fixtures, work: Path) -> None:
    use_small_chunks()
    if name == "prepare on Ray":
        pytest.importorskip("ray")
    job = next(job for job in make_jobs(fixtures) if job.name == name)
    kills = Kills(job, work, fixtures)
    kills.run(SLOW_KILLS // 10 if job.has_processes else SLOW_KILLS)  # Ray takes long to start
    print(kills.counts)
    assert not kills.faults, kills.faults[0]


# --- the harness itself: each kind of broken input is counted as one


def harm(arguments: list[str]) -> int:
    """A command that does what its first argument says."""
    kind = arguments[0]
    print("error: refused")
    if kind == "loss":
        Path("mine.txt").unlink(missing_ok=True)
    if kind == "traceback":
        raise KeyError("a")
    if kind == "memory":
        _ = bytearray(b"1") * 150_000_000
    while kind == "time":
        pass
    if kind == "kill":
        os.kill(os.getpid(), 9)
    return {"code": 3, "refused": 2}.get(kind, 0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("accepted", ("accepted", "")),
        ("refused", ("refused", "")),
        ("code", ("broken", "exit code 3")),
        ("traceback", ("broken", "traceback")),
        ("time", ("broken", "time")),
        ("memory", ("broken", "memory")),
        ("kill", ("broken", "the process ended (9)")),
        ("loss", ("broken", "loss")),
    ],
)
def test_the_harness_tells(kind: str, expected: tuple[str, str], work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(rng: random.Random, folder: Path) -> Case:
        (folder / "mine.txt").write_text("mine")
        return Case([kind])

    monkeypatch.setattr("faults.fuzz.harness.run_command", harm)
    monkeypatch.setattr("faults.fuzz.harness.MAX_SECONDS", 0.2)
    monkeypatch.setattr("faults.fuzz.harness.MAX_MEMORY_BYTES", 10**8)
    (only,) = run_group(make, "0", 1, work / "own")
    assert (only.kind, only.reason.split(":")[0]) == expected


@pytest.mark.parametrize(("fault", "reason"), [("error", "no input was made"), ("kill", "the process ended (9)")])
def test_a_fault_of_the_attack_costs_no_counts(
    fault: str, reason: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process ends before it has opened the file for the output, and where the input is tried again."""

    def make(rng: random.Random, folder: Path) -> Case:
        if folder.name == "case-1":
            assert fault == "kill", "a fault of a mutator"
            os.kill(os.getpid(), 9)
        return Case(["accepted"])

    monkeypatch.setattr("faults.fuzz.harness.run_command", harm)
    outcomes = list(run_group(make, "0", 3, work / fault))
    assert [(o.index, o.kind, o.reason) for o in outcomes] == [
        (0, "accepted", ""),
        (1, "broken", reason),
        (2, "accepted", ""),
    ]
    assert ("a fault of a mutator" in outcomes[1].output) == (fault == "error")


def test_mutators_depend_on_the_seed_alone() -> None:
    data = json.dumps({"a": [1, {"b": "c"}], "d": 2.5}).encode()
    for i in range(50):
        first, second, other = (random.Random(seed) for seed in (i, i, i + 1000))
        assert mutate_bytes(first, data) == mutate_bytes(second, data)
        values = [repr(mutate_value(rng, json.loads(data))) for rng in (first, second, other)]
        assert values[0] == values[1]


def test_raw_values_are_written_without_quotes() -> None:
    assert dump_json({"a": RAW + "1e400", "b": [RAW + '"', 1]}) == b'{"a": 1e400, "b": [", 1]}'
