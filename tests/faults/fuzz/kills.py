"""Kill commands at any moment and inside of writes, resume them, and compare the results bit for bit.

A forked child runs the command. It dies in one of two ways:

- *moment*: SIGKILL after a random amount of CPU time;
- *write*: in a write. Before the n-th file is opened for writing, renamed or removed; before the n-th fsync; or when a
  file reaches a random size, where the kernel ends the process (SIGXFSZ) and leaves the file half written.

A command with processes of its own, as those of Ray, is killed after a random time. They die with it, or, in one of two
kills, live on and write while the command resumes.

It is resumed and killed again until it ends by itself. *Lost* is a checkpoint, tokenizer or shard folder that was whole
before a kill and is damaged or gone after it, a changed input, a file left beside the output, or a last result that
differs from that of an unbroken run. `prepare` by tasks must also write the bytes of `prepare` without tasks.

    OMP_NUM_THREADS=1 python tests/faults/fuzz/kills.py --kills 1000 --processes 16 --output-dir kills
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3] / "src")]
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

from faults.fuzz.fixtures import SIZES, Fixtures
from faults.fuzz.harness import (
    build_commands_once,
    cpu_seconds,
    fork,
    run_command,
    run_processes,
    run_silently,
    snapshot,
    temporary_folder,
    wait,
)

from firth.core.files import MANIFEST_FILE, find_corruption
from firth.tokens.cluster import plan
from firth.tokens.cluster.engine import SerialEngine

WRITE_SHARE = 0.4  # of the kills, those inside of writes
MAX_KILLS_PER_RUN = 8
TASK_BYTES = 20_000  # of text, for each task of `prepare --engine ray`
WRITE_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree")
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Times and paths differ between two runs; reports and cards quote them.
VOLATILE_FILES = (
    *("report.html", "search.html", "README.md", ".lock", ".clock", MANIFEST_FILE, "source.json"),
    *("timings.jsonl", "samples.jsonl", "findings.json"),  # depend on the time that steps take
    *(".verified.json", "..verified.json.tmp"),  # a note that shards were verified; the next note replaces the second
)
VOLATILE_FIELDS = (
    "seconds",
    "output_dir",
    "predictions",
    "examples_per_second",
    "tokens_per_second",
    "words_per_second",
    "shapes",  # that this process computed
    *("ms_per_example", "ms_per_example_in_batches"),
    "content_sha256",  # of seconds too
)
RESULT_FILES = ("results.json", "finetuning.json", "state.json", "adapt.json", "search.json", "learning_rate.json")


PREPARE_VOLATILE_FILES = (".verified.json", "..verified.json.tmp")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def no_setup() -> None:
    pass


class Job(NamedTuple):
    """A command that `--resume` continues."""

    name: str
    arguments: Sequence[object]
    setup: Callable[[], None] = no_setup  # called in the child, before the command
    same_as: Sequence[object] = ()  # another command, which must write the same bytes
    volatile_files: Sequence[str] = VOLATILE_FILES
    has_processes: bool = False  # beside the one that is killed


def make_jobs(fixtures: Fixtures) -> list[Job]:
    text, rows, chats = fixtures.text, fixtures.rows("classify"), fixtures.rows("lm")
    steps = ["--max-steps=12", "--save-steps=2", "--eval-steps=6", "--per-device-train-batch-size=2"]
    tuned = ["--max-steps=8", "--save-steps=2", "--eval-steps=4", "--max-seq-length=32", "--no-bf16", "--seeds=2"]
    files = ["--task=classify", "--train", rows, "--dev", rows]
    chat = ["--task=lm", "--train", chats, "--dev", chats, "--lora-rank=2"]
    vectors = ["workers=1", "vector_size=8", "epochs=3", "min_count=1", "save_steps=2"]
    pretrain = ["pretrain", "--data", text, "--vocab-size=300"]
    adapted = ["--data", fixtures.long_text, "--held-out=0.02", "--new-tokens=5", "--max-seq-length=32", "--no-bf16"]
    searched = ["--train", fixtures.many_rows, "--dev", rows, "--task=classify", "--search=4", "--seeds=1"]
    searched += ["--max-steps=60", "--save-steps=20", "--max-seq-length=32", "--no-bf16"]
    pairs, singles, tags = (fixtures.rows(name) for name in ("preference", "kto", "tag"))
    heads = [f"--train=a={rows}", f"--dev=a={rows}", f"--train=b={tags}", f"--dev=b={tags}"]
    taught = ["--teacher", fixtures.classify / "final", "--augment=1", "--learning-rate=1e-3"]
    prepare = ["prepare", fixtures.long_text, "--tokenizer", fixtures.shards / "tokenizer"]
    near, by_tasks = ["--dedup=near"], ["--engine=ray", "--document-timeout=0"]
    gpt2 = fixtures.gpt2 / "final"
    return [
        Job("bert", [*pretrain, "bert-tiny", *SIZES, *steps]),
        Job("gpt2", [*pretrain, "gpt2-tiny", *SIZES, *steps]),
        Job("t5", [*pretrain, "t5-tiny", *SIZES, *steps]),
        Job("word2vec", ["pretrain", "word2vec", "--data", text, *vectors]),
        Job("finetune", ["finetune", fixtures.bert / "final", *files, *tuned]),
        Job("LoRA", ["finetune", gpt2, *chat, *tuned]),
        Job("preference", ["finetune", gpt2, "--task=preference", "--train", pairs, "--dev", pairs, *tuned]),
        Job("KTO", ["finetune", gpt2, "--task=preference", "--train", singles, "--dev", singles, *tuned]),
        Job("reward", ["finetune", gpt2, "--task=reward", "--train", pairs, "--dev", pairs, *tuned]),
        Job("heads", ["finetune", fixtures.bert / "final", *heads, *tuned]),
        Job("adapt", ["adapt", fixtures.bert / "final", *adapted, *steps]),
        Job("search", ["finetune", fixtures.bert / "final", *searched]),
        Job("distil", ["finetune", fixtures.bert / "final", *files, *tuned, *taught]),
        Job("prepare", [*prepare, "--workers=1"], volatile_files=PREPARE_VOLATILE_FILES),
        Job(
            "prepare by tasks",
            [*prepare, *near, *by_tasks],
            use_serial_engine,
            [*prepare, *near, "--workers=1"],
            PREPARE_VOLATILE_FILES,
        ),
        *(
            [
                Job(
                    "prepare on Ray",
                    [*prepare, *near, *by_tasks, "--workers=2"],
                    same_as=[*prepare, *near, "--workers=1"],
                    volatile_files=PREPARE_VOLATILE_FILES,
                    has_processes=True,
                )
            ]
            if importlib.util.find_spec("ray")
            else []
        ),
    ]


# --- in the child


def use_serial_engine() -> None:
    """Run the tasks of `--engine ray` in this process, where each of their writes can be the last one."""
    module: Any = importlib.import_module("firth.commands.engine")
    module.open_ray_engine = lambda *_: nullcontext(SerialEngine())


def run_quietly(job: Job, folder: Path, before: Callable[[], None] = lambda: None) -> None:
    def run() -> None:
        before()
        job.setup()
        code = run_command([str(a) for a in [*job.arguments, "--output-dir", folder, "--resume"]])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if code:
            raise SystemExit(code)

    run_silently(run, f"{folder}.output")


def is_write(event: str, arguments: tuple[Any, ...], folder: str) -> bool:
    if event == "open":
        path, _, flags = arguments
        return str(path).startswith(folder) and bool((flags or 0) & WRITE_FLAGS)
    return event in WRITE_EVENTS and folder in str(arguments[0])


def kill_at_write(folder: Path, number: int) -> None:
    """End this process before its n-th write."""
    left, parent = [number], str(folder.parent)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if is_write(event, arguments, parent):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def kill_at_fsync(number: int) -> None:
    left, real = [number], os.fsync

    def fsync(fd: int) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        real(fd)

    os.fsync = fsync


def kill_at_size(size: int) -> None:
    """End this process when a file reaches a size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def aim_at_a_write(
    rng: random.Random, folder: Path, counts: Counter[str], has_processes: bool = False
) -> Callable[[], None]:
    # The processes of Ray inherit the limit of a size, and none of them could start.
    kind = rng.choice(["open", "fsync"] if has_processes else ["open", "fsync", "size"])
    if kind == "open":
        number = rng.randint(1, counts["open"])
        return lambda: kill_at_write(folder, number)
    if kind == "fsync":
        number = rng.randint(1, counts["fsync"])
        return lambda: kill_at_fsync(number)
    size = rng.choice([rng.randrange(2000), rng.randrange(counts["size"])])
    return lambda: kill_at_size(size)


def count_writes(job: Job, folder: Path, report: Path) -> None:
    """Run the job to its end; write how often it opened, renamed and synced files."""
    counts: Counter[str] = Counter()
    real, parent = os.fsync, str(folder.parent)

    def fsync(fd: int) -> None:
        counts["fsync"] += 1
        real(fd)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        counts["open"] += is_write(event, arguments, parent)

    def watch() -> None:
        os.fsync = fsync
        sys.addaudithook(count)

    clock = time.monotonic if job.has_processes else time.process_time
    began = clock()
    run_quietly(job, folder, watch)
    counts["milliseconds"] = round(1000 * (clock() - began))
    counts["size"] = max(p.stat().st_size for p in folder.rglob("*"))
    report.write_text(json.dumps(counts))


# --- in the parent


def kill_after(pid: int, seconds: float, by_wall: bool = False) -> int:
    """SIGKILL a process when it has used this much CPU time, or wall time; returns what `wait` does."""
    began = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -bool(status)
        if (time.monotonic() - began if by_wall else cpu_seconds(pid)) >= seconds:
            os.kill(pid, signal.SIGKILL)
            return wait(pid)
        time.sleep(0.005)


def adopt_orphans() -> None:
    """Let processes whose parent is killed become children of this one."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def list_children(pid: int) -> list[int]:
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in found for child in children]


def end_orphans(known: Sequence[int]) -> None:
    """SIGKILL the adopted processes, those that they leave behind too, and wait for them."""
    while orphans := [pid for pid in list_children(os.getpid()) if pid not in known]:
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait(pid)


def whole_folders(folder: Path) -> dict[str, str | None]:
    """The folders with a manifest, which are complete, and what is wrong with them."""
    found = [
        p.parent
        for p in folder.rglob(MANIFEST_FILE)
        if not p.parent.name.startswith((".", "rows-"))  # rows are a cache
    ]
    if (folder / MANIFEST_FILE).exists():
        found.append(folder)
    visible = [p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    return {p.relative_to(folder).as_posix(): find_corruption(p) for p in visible}


def newest_step(folders: Sequence[str]) -> int:
    return max(
        [int(name.rpartition("-")[2]) for name in folders if "/" not in name and "checkpoint-" in name], default=0
    )


def find_loss(before: dict[str, str | None], after: dict[str, str | None]) -> str:
    """What a kill damaged or removed; older checkpoints make room for newer ones."""
    if damaged := [f"{name}: {fault}" for name, fault in after.items() if fault]:
        return damaged[0]
    gone = [name for name in before if name not in after and "checkpoint-" not in name and "best-" not in name]
    if gone:
        return f"{gone[0]} is gone"
    is_finished = any(name.endswith("final") for name in after)
    return "" if is_finished or newest_step(list(after)) >= newest_step(list(before)) else "the last checkpoint is gone"


def results(folder: Path, volatile_files: Sequence[str] = VOLATILE_FILES) -> dict[str, Any]:
    """The content of each file of a run but for times and paths."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in volatile_files):
        name = path.relative_to(folder).as_posix()
        if path.name in RESULT_FILES:
            found[name] = drop_volatile_fields(json.loads(path.read_text()))
        else:
            found[name] = path.read_bytes()
    return found


def drop_volatile_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: drop_volatile_fields(part) for key, part in value.items() if key not in VOLATILE_FIELDS}
    return [drop_volatile_fields(part) for part in value] if isinstance(value, list) else value


def describe_difference(name: str, found: Any, expected: Any) -> str:
    """Name a file that differs, and the fields of a JSON file that do."""
    if not isinstance(found, dict) or not isinstance(expected, dict):
        return name + ("" if found and expected else " (only before)" if expected else " (only after)")
    fields = [
        f"{k}: {found.get(k)!r} for {expected.get(k)!r}" for k in {*found, *expected} if found.get(k) != expected.get(k)
    ]
    return f"{name} ({'; '.join(sorted(fields))[:300]})"


def list_differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return sorted(
        describe_difference(name, found.get(name), expected.get(name))
        for name in {*found, *expected}
        if found.get(name) != expected.get(name)
    )


def use_small_chunks() -> None:
    """Let `prepare` note its progress after every 5 documents: texts of this size would be one chunk, and one task."""
    importlib.import_module("firth.tokens.prepare").CHUNK_DOCUMENTS = 5  # type: ignore[attr-defined]
    plan.TASK_BYTES = TASK_BYTES
    importlib.import_module("firth.tokens.cluster.prepare").INPUT_BYTES_PER_RANGE = 2 * TASK_BYTES  # type: ignore[attr-defined]


class Kills:
    """Kills of one job."""

    def __init__(self, job: Job, work: Path, fixtures: Fixtures) -> None:
        self.job, self.work, self.fixtures = job, work / job.name, fixtures
        shutil.rmtree(self.work, ignore_errors=True)
        straight = self.folder = self.work / "run"  # of both: state.json quotes the path
        self.work.mkdir(parents=True)
        assert wait(fork(count_writes, job, straight, self.work / "counts")) == 0, Path(
            f"{straight}.output"
        ).read_text()
        self.writes = Counter(json.loads((self.work / "counts").read_text()))
        self.expected = results(straight, job.volatile_files)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.known_children: list[int] = []
        if job.has_processes:
            self.known_children = list_children(os.getpid())
            adopt_orphans()
        if job.same_as:
            alone = self.work / "alone"
            assert wait(fork(run_quietly, Job(job.name, job.same_as), alone)) == 0
            if different := list_differences(self.expected, results(alone, job.volatile_files)):
                self.faults.append(f"{job.name}: unlike {job.same_as}: {different[:5]}")

    def run_once(self, rng: random.Random, folder: Path) -> bool:
        """Run the job until it is killed, or to its end; returns whether it was killed."""
        in_write, before, has_processes = rng.random() < WRITE_SHARE, whole_folders(folder), self.job.has_processes
        if in_write:
            aimed = aim_at_a_write(rng, folder, self.writes, has_processes)
            ended = wait(fork(run_quietly, self.job, folder, aimed))
        else:
            moment = rng.uniform(0, self.writes["milliseconds"] / 1000)
            ended = kill_after(fork(run_quietly, self.job, folder), moment, has_processes)
        if has_processes and rng.random() < 0.5:
            end_orphans(self.known_children)
        if ended == -1:
            self.faults.append(f"{self.job.name}: " + Path(f"{folder}.output").read_text()[-1000:])
        if ended > 0:
            self.counts["write" if in_write else "moment"] += 1
            if loss := find_loss(before, whole_folders(folder)):
                self.faults.append(f"{self.job.name}: {loss}")
        return ended > 0

    def run_chain(self, rng: random.Random, max_kills: int) -> None:
        """Kill a new run several times, let it end, and compare it with the unbroken one."""
        folder = self.folder
        for path in self.work.iterdir():  # the journal of an unfinished `prepare` lies beside its folder
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        inputs = snapshot(self.fixtures.folder, ())
        for _ in range(max_kills):
            if not self.run_once(rng, folder):
                break
        if wait(fork(run_quietly, self.job, folder)) != 0:
            self.faults.append(f"{self.job.name}: " + Path(f"{folder}.output").read_text()[-1000:])
        if self.job.has_processes:
            end_orphans(self.known_children)
        left = sorted(p.name for p in self.work.iterdir() if p.name not in (folder.name, f"{folder.name}.output"))
        if left:
            self.faults.append(f"{self.job.name}: left behind: {left[:5]}")
        different = list_differences(results(folder, self.job.volatile_files), self.expected)
        changed = [n for n, content in snapshot(self.fixtures.folder, ()).items() if inputs.get(n) != content]
        self.counts["compared"] += 1
        self.counts["equal"] += not different
        if different or changed:
            self.faults.append(f"{self.job.name}: different: {different[:5]}, inputs: {changed[:3]}")

    def run(self, num_kills: int, seed: str = "0") -> None:
        """Kill until the count has reached `num_kills`."""
        while (left := num_kills - self.killed) > 0:
            rng = random.Random(f"{seed} {self.job.name} {self.counts['compared']}")
            self.run_chain(rng, min(left, MAX_KILLS_PER_RUN))

    @property
    def killed(self) -> int:
        return self.counts["moment"] + self.counts["write"]


HEAD = (
    "| command | kills at a random moment | kills inside of a write | runs compared | bit-equal | faults |\n"
    + "| --- " * 6
    + "|"
)
COLUMNS = ("moment", "write", "compared", "equal")


def format_table(results: Sequence[dict[str, Any]]) -> str:
    """The sum of the results of several processes, and what went wrong."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in dict.fromkeys(result["job"] for result in results)}
    for result in results:
        counts[result["job"]].update({**result["counts"], "faults": len(result["faults"])})
    counts["together"] = sum(counts.values(), Counter())
    rows = [f"| {name} | {' | '.join(f'{c[k]:,}' for k in (*COLUMNS, 'faults'))} |" for name, c in counts.items()]
    return "\n".join([HEAD, *rows, *(fault for result in results for fault in result["faults"]), ""])


def run_jobs(options: argparse.Namespace, fixtures: Fixtures, process: int, seed: str, work: Path) -> None:
    """Kill jobs by turns, until the count is reached or the time is over; note the result after each turn.

    Of at least as many processes as there are jobs, each takes one: it needs an unbroken run of each of its jobs.
    """
    work.mkdir()
    chosen = [job for job in make_jobs(fixtures) if job.name in (options.jobs or [job.name])]
    if options.processes >= len(chosen):
        chosen = [chosen[process % len(chosen)]]
    jobs = [Kills(job, work, fixtures) for job in chosen]
    goal = -(-options.kills // options.processes // len(jobs))
    for count in range(MAX_KILLS_PER_RUN, goal + MAX_KILLS_PER_RUN, MAX_KILLS_PER_RUN):
        for kills in jobs:
            if time.monotonic() < options.deadline:
                kills.run(min(count, goal), seed)
        results = [{"job": kills.job.name, "counts": kills.counts, "faults": kills.faults} for kills in jobs]
        (work / "results.json").write_text(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=70, help="Kill this often, over all commands and processes.")
    parser.add_argument("--jobs", nargs="+", help="Take these commands. Default: all.")
    parser.add_argument("--seed", default="0", help="Process I of several takes the seed SEED.I.")
    parser.add_argument("--minutes", type=float, default=1e9, help="Stop after this time.")
    parser.add_argument("--processes", type=int, default=1, help="Share the kills among this many processes.")
    parser.add_argument("--output-dir", type=Path, help="Write the table to this folder.")
    options = parser.parse_args()
    work, began, n = temporary_folder(), time.monotonic(), options.processes
    options.deadline = began + 60 * options.minutes
    build_commands_once()
    use_small_chunks()
    try:
        fixtures = Fixtures(work / "fixtures")
        fixtures.build()
        seeds = [options.seed] if n == 1 else [f"{options.seed}.{i}" for i in range(n)]
        failed = run_processes(run_jobs, [(options, fixtures, i, seed, work / seed) for i, seed in enumerate(seeds)])
        results = [r for path in sorted(work.glob("*/results.json")) for r in json.loads(path.read_text())]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    words = f"{format_table(results)}\n{time.monotonic() - began:.0f} s, {n} processes"
    print(words)
    if options.output_dir:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        (options.output_dir / "kills.md").write_text(f"{words}\n")
    sys.exit(bool(failed) or any(result["faults"] for result in results))


if __name__ == "__main__":
    main()
