# ruff: noqa: PTH101, PTH114, PTH115, PTH118 (names of files are bytes here: they need not be UTF-8)
"""Run commands on mutated inputs in forked processes, and count what happens to each input.

*accepted*: exit code 0. *refused*: exit code 2 and an error message, or 1 and a note for a text that is cut before its
schema is satisfied, or for an ill run of `doctor`. *broken*: everything else, that is a traceback, another exit code,
more than 20 s, more than 2 GB of additional memory, or a user's file that changed or is gone.

A child process runs many inputs one after the other in one interpreter, because forking a process that has loaded torch
takes longer than most inputs. A broken input runs again in a process of its own, and the second outcome counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from firth.core.files import VERIFIED_FILE

MAX_SECONDS = 20  # of CPU time
MAX_WALL_SECONDS = 300  # of a process that waits for a busy machine
MAX_MEMORY_BYTES = 2 * 10**9  # beyond what the process had before
ADDRESS_SPACE_BYTES = 4 * 10**9  # beyond what the process had before: allocating more raises an error
CASES_PER_PROCESS = 100
OUTCOMES = ("accepted", "refused", "broken")


class Case(NamedTuple):
    """A command line, and what it may do besides writing new files."""

    arguments: Sequence[str | bytes | Path]
    owned: tuple[Path, ...] = ()  # paths that the command may change, such as the run that it resumes
    replaced: tuple[Path, ...] = ()  # paths that it may change if it succeeds
    codes: tuple[int, ...] = (0, 2)
    max_file_bytes: int | None = None  # a full disk
    prepare: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class Outcome(NamedTuple):
    index: int
    kind: str
    reason: str = ""
    arguments: str = ""
    output: str = ""  # the end of it


MakeCase = Callable[[random.Random, Path], Case]


# --- one case, in a child process


def run_command(arguments: Sequence[str | bytes | Path]) -> int:
    """`firth ARGUMENTS` in this process; returns the exit code."""
    from firth.cli import main as cli

    before, sys.argv = sys.argv, ["firth", *map(os.fsdecode, arguments)]
    try:
        cli.main()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    finally:
        sys.argv = before
    return 0


def build_commands_once() -> None:
    """Let Typer build its commands, and --dry-run measure this machine, once and not for every command line."""
    import typer

    from firth.cli import main as cli
    from firth.lab import dry_run

    dry_run.measure_flops = lambda device: 1e10  # type: ignore[assignment]

    if isinstance(cli.app, typer.Typer):
        command = typer.main.get_command(cli.app)
        cli.app = lambda arguments, **options: command(args=arguments, **options)  # type: ignore[assignment]


def snapshot(folder: Path, owned: Sequence[Path]) -> dict[str, str]:
    """The content of each file of a folder, and the kind of everything else in it.

    What the command owns is left out, but for files named mine*: they are a person's, in a folder of ours.
    """
    found = {}
    for root, folders, files in os.walk(os.fsencode(folder)):
        for name in files + folders:
            path = os.path.join(root, name)
            is_owned = any(Path(os.fsdecode(path)).is_relative_to(own) for own in owned)
            if (is_owned and not name.startswith(b"mine")) or name == os.fsencode(VERIFIED_FILE):
                continue
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                with open(path, "rb") as f:
                    found[os.fsdecode(path)] = hashlib.file_digest(f, "sha256").hexdigest()
            else:
                found[os.fsdecode(path)] = os.fsdecode(os.readlink(path)) if stat.S_ISLNK(mode) else str(mode)
    return found


def list_inputs(folder: Path) -> list[str]:
    """The files of a folder but for caches, which commands may replace."""
    paths = [os.path.join(root, name) for root, _, files in os.walk(folder) for name in files]
    return [path for path in paths if not path.endswith(VERIFIED_FILE) and "rows-" not in path]


def stat_files(paths: Sequence[str]) -> dict[str, tuple[int, int, int] | None]:
    """Inode, size and time of files: faster than their content. None for a file that is gone."""
    found: dict[str, tuple[int, int, int] | None] = dict.fromkeys(paths)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            info = os.lstat(path)
            found[path] = (info.st_ino, info.st_size, info.st_mtime_ns)
    return found


def memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def find_fault(code: int, case: Case, output: str, lost: list[str], used_bytes: int) -> str:
    """Why a case is broken, or an empty text."""
    if lost:
        return f"loss: {', '.join(lost[:3])}"
    if used_bytes > MAX_MEMORY_BYTES:
        return f"memory: {used_bytes / 1e9:.1f} GB"
    if "Traceback (most recent call last)" in output:
        return f"traceback: {output.strip().splitlines()[-1][:200]}"
    if code not in case.codes:
        return f"exit code {code}"
    is_told = code == 1 and ("was satisfied" in output or case.arguments[0] == "doctor")
    return "no error message" if code and "error:" not in output and not is_told else ""


@contextlib.contextmanager
def limits(case: Case) -> Iterator[None]:
    files, space = (resource.getrlimit(kind) for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes("VmSize") + ADDRESS_SPACE_BYTES, space[1]))
    if case.max_file_bytes is not None:
        sys.dont_write_bytecode = True  # Python does not notice that a .pyc file is cut, and keeps it
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.max_file_bytes, files[1]))
    try:
        with case.prepare():
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, files)
        resource.setrlimit(resource.RLIMIT_AS, space)


def open_output(case: Case, path: Path) -> tuple[int, Callable[[], bytes]]:
    """A file for everything that is printed, and how to read it. On a full disk a pipe: it has no size limit."""
    if case.max_file_bytes is None:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), path.read_bytes
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 2**20)

    def read() -> bytes:
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError), open(reader, "rb", buffering=0) as f:
            return f.read(2**20) or b""
        return b""

    return writer, read


def run_case(case: Case, folder: Path, output_file: Path) -> tuple[str, str, str]:
    """Outcome, reason and output of a command that runs in `folder`."""
    before = snapshot(folder, case.owned)
    writer, read_output = open_output(case, output_file)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    reader, writer = os.pipe()
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    os.chdir(folder)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    used, error = memory_bytes("VmRSS"), ""
    try:
        with limits(case):
            code = run_command(case.arguments)
    except BaseException as e:
        code, error = 1, "".join(traceback.format_exception(e))[-6000:]
    sys.stdout.flush()
    sys.stderr.flush()
    used = memory_bytes("VmHWM") - used
    output = read_output()[-6000:].decode(errors="replace") + error
    after = snapshot(folder, case.owned)
    replaced = set(map(str, case.replaced)) if code == 0 else set()
    lost = [name for name, content in before.items() if after.get(name) != content and name not in replaced]
    fault = find_fault(code, case, output, lost, used)
    return ("broken" if fault else "refused" if code else "accepted"), fault, output


def run_cases(make: MakeCase, seed: str, indices: Sequence[int], work: Path, inputs: Sequence[str], pipe: int) -> None:
    """Run cases in this process; write one JSON line to the pipe when a case begins and one when it has ended.

    Commands may read the files `inputs`, and must not change them.
    """
    import torch

    torch.set_num_threads(1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    build_commands_once()
    gc.freeze()
    for index in indices:
        os.write(pipe, json.dumps([index]).encode() + b"\n")
        folder = work / f"case-{index}"
        remove(folder)
        folder.mkdir(parents=True)
        try:
            case = make(random.Random(f"{seed} {index}"), folder)
        except Exception:  # a fault of the attack: told with the others, so that no count is lost
            told = (index, "broken", "no input was made", "", traceback.format_exc())
            os.write(pipe, json.dumps(told).encode() + b"\n")
            continue
        before = stat_files(inputs)
        kind, reason, output = run_case(case, folder, work / "output")
        after = stat_files(inputs)
        if changed := [name for name, info in before.items() if after[name] != info]:
            kind, reason = "broken", f"loss: {', '.join(changed[:3])}"
        words = " ".join(map(os.fsdecode, case.arguments)).encode(errors="replace").decode()
        details = (words[:1000], output[-2000:]) if kind == "broken" else ()
        os.write(pipe, json.dumps([index, kind, reason, *details]).encode() + b"\n")
        os.chdir(work)
        remove(folder)


def remove(folder: Path) -> None:
    for root, folders, _ in os.walk(os.fsencode(folder)):
        for name in [root, *(os.path.join(root, f) for f in folders)]:
            if not os.path.islink(name):
                os.chmod(name, 0o700)
    shutil.rmtree(os.fsencode(folder), ignore_errors=True)


# --- many cases, in the parent


def temporary_folder() -> Path:
    """In memory where it has room: the commands sync every file that they write."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 4 * 10**9
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if has_room else None))
    folder.chmod(0o755)
    return folder


def fork(function: Callable[..., None], *arguments: Any) -> int:
    """Call a function in a forked process that then ends; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)


def run_processes(function: Callable[..., None], arguments: Sequence[Sequence[Any]]) -> int:
    """Call a function once for each list of arguments, each in a process of its own, all at once.

    Returns the number of processes that failed.
    """
    failed = [status for status in map(wait, [fork(function, *given) for given in arguments]) if status]
    if failed:
        print(f"{len(failed)} of {len(arguments)} processes failed", file=sys.stderr)
    return len(failed)


def wait(pid: int) -> int:
    """The signal that ended a process, 0 if it ended by itself and well, -1 if it ended with an error."""
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -bool(status)


def run_silently(function: Callable[[], None], output: str = os.devnull) -> None:
    """Call a function in this (forked) process; everything that it prints goes to a file."""
    files = (os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    for fd, target in enumerate((files[0], files[1], files[1])):
        os.dup2(target, fd)
    sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    try:
        function()
    finally:
        sys.stderr.flush()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_asleep(pid: int) -> bool:
    """Whether a process waits for something other than a processor."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def exceeds_time(pid: int, cpu: float, wall: float) -> bool:
    if cpu > MAX_SECONDS or wall > MAX_WALL_SECONDS:
        return True
    return wall > MAX_SECONDS and all(is_asleep(pid) for _ in range(20) if not time.sleep(0.05))


def run_batch(
    make: MakeCase, seed: str, indices: Sequence[int], work: Path, inputs: Sequence[str]
) -> Iterator[Outcome]:
    """Yield the outcomes of cases that run in one child process, up to the first that ends or stops it."""
    reader, writer = os.pipe()
    pid = fork(run_cases, make, seed, indices, work, inputs, writer)
    os.close(writer)
    current, began, cpu, buffer, reason = -1, time.monotonic(), 0.0, b"", ""
    try:
        while True:
            if select.select([reader], [], [], 0.5)[0]:
                data = os.read(reader, 2**16)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    fields = json.loads(line)
                    current, began, cpu = fields[0], time.monotonic(), cpu_seconds(pid)
                    if len(fields) > 1:
                        current = -1
                        yield Outcome(*fields)
            elif current >= 0 and exceeds_time(pid, cpu_seconds(pid) - cpu, time.monotonic() - began):
                reason = f"time: {cpu_seconds(pid) - cpu:.0f} s of CPU, {time.monotonic() - began:.0f} s"
                break
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if current >= 0:
        written = work / "output"  # missing where the process ended before its first case wrote anything
        output = written.read_bytes()[-2000:].decode(errors="replace") if written.is_file() else ""
        yield Outcome(current, "broken", reason or f"the process ended ({status})", "", output)


def run_group(
    make: MakeCase, seed: str, num_cases: int, work: Path, first: int = 0, inputs: Sequence[str] = ()
) -> Iterator[Outcome]:
    """Yield the outcome of each case of a group."""
    left = list(range(first, first + num_cases))
    while left:
        batch, done = left[:CASES_PER_PROCESS], 0
        for outcome in run_batch(make, seed, batch, work, inputs):
            done += 1
            if outcome.kind == "broken" and len(batch) > 1:
                outcome = next(run_batch(make, seed, [outcome.index], work / "again", inputs), outcome)
            yield outcome
        assert done, "the child process ended before its first case"
        left = left[done:]


class Table:
    """Counts of outcomes per group, and the broken cases."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.broken: list[tuple[str, Outcome]] = []

    def add(self, group: str, outcome: Outcome) -> None:
        self.counts.setdefault(group, Counter())[outcome.kind] += 1
        if outcome.kind == "broken":
            self.broken.append((group, outcome))

    def to_json(self) -> str:
        return json.dumps([self.counts, self.broken])

    def add_json(self, text: str) -> None:
        """Add the counts and the broken cases of another table."""
        counts, broken = json.loads(text)
        for group, parts in counts.items():
            self.counts.setdefault(group, Counter()).update(parts)
        self.broken += [(group, Outcome(*outcome)) for group, outcome in broken]

    def __str__(self) -> str:
        rows = [(name, counts.total(), *(counts[kind] for kind in OUTCOMES)) for name, counts in self.counts.items()]
        rows.append(("together", *(sum(row[i] for row in rows) for i in range(1, 5))))
        head = "| group | tried | accepted | refused | broken |\n| --- | --- | --- | --- | --- |\n"
        return head + "\n".join(f"| {row[0]} | " + " | ".join(f"{n:,}" for n in row[1:]) + " |" for row in rows)
