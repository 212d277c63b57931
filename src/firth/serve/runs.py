"""Training runs of a folder, watched while they write: what has been logged, how fast, and how long it will take.

A run is a folder with a log.jsonl. The log grows by whole lines, so a reader keeps the number of bytes that it has read
and parses what is new; however many people watch, a line is parsed once. A resumed run replaces the log, which has
another inode then: it is read again from its start, under a new version. Nothing is written to the folder of a run, and
nothing is asked of its process.

Watching must not slow a run that needs all cores. So a run that is neither trained nor new is looked at only when
folders are listed, and listing them takes at most `LIST_SHARE` of the time, however many they are.

`log.jsonl` has no times, since a resumed run repeats it exactly. While somebody watches a run, its speed is measured
from the growth of its log. Else it comes from `timings.jsonl`, which has a line for about ten seconds of training, and
the share of a GPU's memory. The process that holds the lock of the run folder trains; Linux tells its memory. Where no
locks are told, a run whose log grew a moment ago trains.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import open_regular, read_json, read_yaml
from firth.train.folder import LOCK_FILE
from firth.train.log import is_log_line, token_loss_name
from firth.train.samples import SAMPLES_FILE, read_samples
from firth.train.timings import TIMINGS_FILE, is_timings_line

LOG_FILE, RECIPE_FILE, RESULTS_FILE = "log.jsonl", "recipe.yaml", "results.json"
COLUMNS = ("step", "loss", "eval_loss", "learning_rate", "tokens", "grad_norm")
MAX_DEPTH, MAX_RUNS = 3, 300  # folders below the given one
MAX_ROWS = 100_000  # lines that are kept; of a longer log every second one is dropped, as often as needed
MAX_READ_BYTES = 16_000_000  # of a log at once
MAX_SENT_ROWS = 5_000
SCAN_SECONDS = 2.0  # running runs are looked at this often
LIST_SHARE = 0.002  # of the time, at most, that is spent on listing folders
FRESH_SECONDS = 60.0  # a run whose log changed since then is looked at like a running one
SPEED_SECONDS = 60.0  # the speed is measured over this time
SKIPPED_FOLDERS = ("final", "data", "tokenizer")
RECENT_TIMINGS = 6  # lines of timings.jsonl: about a minute
LOCK_LINE = re.compile(r"(?:FLOCK|POSIX|OFDLCK)\s+\S+\s+\S+\s+(\d+)\s+([0-9a-f]+):([0-9a-f]+):(\d+)\s")
SEED_FOLDER = re.compile(r"seed-\d+")  # of a fine-tuning, whose folder has the recipe and the lock of all seeds


class RunSummary(NamedTuple):
    """Where a run stands."""

    name: str
    kind: str
    state: str  # running, finished or stopped
    step: int
    max_steps: int | None
    loss: float | None
    eval_loss: float | None
    tokens: int | None
    tokens_per_second: float | None
    seconds_left: float | None
    memory_bytes: int | None
    device_memory_share: float | None  # of a GPU
    changed_at: float  # Unix time of the last line of the log


class LogPart(NamedTuple):
    """New rows of a log; `next_row` is what to ask for next, `version` changes when the log begins anew."""

    version: int
    next_row: int
    rows: list[list[float | None]]


class WatchedRun:
    """One run: its log so far, and how fast it grows."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.is_seed = bool(SEED_FOLDER.fullmatch(folder.name)) and not (folder / RECIPE_FILE).is_file()
        self.home = folder.parent if self.is_seed else folder  # has the recipe and the lock
        self.summary: RunSummary | None = None
        self.is_home_training = False  # this run, or another seed beside it
        self.lock = threading.Lock()
        self.version, self.rows = 0, list[list[float | None]]()
        self.inode, self.offset, self.num_lines, self.every = -1, 0, 0, 1
        self.log_stamp = (-1, -1)  # inode and bytes when the log was read last
        self.seen: deque[tuple[float, int, int]] = deque()  # time, step, tokens
        self.timings = TimingsTail(folder / TIMINGS_FILE)
        self.recipe: dict[str, Any] = {}
        self.recipe_stamp = -1
        self.known_references, self.references_stamp = dict[str, float](), (-1, -1)
        self.known_samples, self.samples_stamp = list[dict[str, Any]](), (-1, -1)

    def update(self) -> None:
        """Read what is new; a call of `stat` where nothing is."""
        with self.lock:
            self.read_new_lines()
            self.timings.read_new_lines()
            self.read_recipe()

    def read_new_lines(self) -> None:
        file = self.folder / LOG_FILE
        try:
            known = file.stat()
            if (known.st_ino, known.st_size) == self.log_stamp:
                return
            with open_regular(file) as opened:
                facts = os.fstat(opened.fileno())
                if facts.st_ino != self.inode or facts.st_size < self.offset:
                    self.version, self.rows, self.inode = self.version + 1, [], facts.st_ino
                    self.offset = self.num_lines = 0
                    self.every = 1
                    self.seen.clear()
                self.log_stamp = (facts.st_ino, facts.st_size)
                while facts.st_size > self.offset:
                    opened.seek(self.offset)
                    whole, end, _ = opened.read(MAX_READ_BYTES).rpartition(b"\n")
                    if not end:
                        break  # the last line is not complete
                    self.offset += len(whole) + 1
                    for line in whole.split(b"\n"):
                        self.add_line(line)
        except (OSError, UserError):
            return
        if self.rows:
            step, tokens = self.rows[-1][0], next((row[4] for row in reversed(self.rows) if row[4] is not None), 0)
            if not self.seen or self.seen[-1][1] != step:
                self.seen.append((time.monotonic(), int(step or 0), int(tokens or 0)))
            while len(self.seen) > 2 and self.seen[0][0] < time.monotonic() - SPEED_SECONDS:
                self.seen.popleft()

    def add_line(self, text: bytes) -> None:
        try:
            line = json.loads(text.decode(), parse_constant=lambda _: None)  # NaN is no JSON
        except (ValueError, RecursionError):
            return
        if not is_log_line(line):
            return
        self.num_lines += 1
        train, held_out = line.get(token_loss_name(line, "")), line.get(token_loss_name(line))
        if held_out is None and self.num_lines % self.every:
            return
        rest = [line.get(name) for name in COLUMNS[3:]]
        self.rows.append([line["step"], train, held_out, *rest])
        if len(self.rows) > MAX_ROWS:
            self.rows = [row for i, row in enumerate(self.rows) if i % 2 == 0 or row[2] is not None]
            self.version, self.every = self.version + 1, 2 * self.every

    def read_recipe(self) -> None:
        """Read recipe.yaml again if it changed: a run with --minutes plans its steps anew."""
        try:
            stamp = (self.home / RECIPE_FILE).stat().st_mtime_ns
            if stamp != self.recipe_stamp:
                found = read_yaml(self.home / RECIPE_FILE)
                self.recipe, self.recipe_stamp = found if isinstance(found, dict) else {}, stamp
        except (OSError, UserError):
            return

    def references(self, compute: Callable[[WatchedRun], dict[str, float]]) -> dict[str, float]:
        """Return losses to compare with, computed once for each plan of the run."""
        if self.references_stamp != (self.version, self.recipe_stamp) and len(self.rows) > 1:
            self.known_references, self.references_stamp = compute(self), (self.version, self.recipe_stamp)
        return self.known_references

    def own_samples(self) -> list[dict[str, Any]]:
        """Return what the run wrote at its checkpoints (`train/samples.py`), read again when its file has grown."""
        file = self.folder / SAMPLES_FILE
        try:
            facts = file.lstat()
        except OSError:
            return []
        stamp = (facts.st_ino, facts.st_size)
        with self.lock:
            if stamp != self.samples_stamp and stat.S_ISREG(facts.st_mode) and facts.st_size <= MAX_READ_BYTES:
                self.known_samples, self.samples_stamp = read_samples(self.folder), stamp
            return self.known_samples

    def log_after(self, version: int, first: int, max_rows: int | None = None) -> LogPart:
        """Return the rows from `first` on; all of them where the log has another version. Of more than `max_rows`,
        and those with a held-out loss, every n-th is returned."""
        max_rows = max_rows or MAX_SENT_ROWS
        with self.lock:
            first = first if version == self.version and first <= len(self.rows) else 0
            rows, end = self.rows[first:], len(self.rows)
        if len(rows) > max_rows:
            size = -(-len(rows) // max_rows)
            rows = [row for i, row in enumerate(rows) if i % size == 0 or row[2] is not None or i == len(rows) - 1]
        return LogPart(self.version, end, rows)

    def summarize(self, locks: Locks) -> RunSummary:
        with self.lock:
            last = self.rows[-1] if self.rows else [0, None, None, None, None, None]
            values = [next((row[i] for row in reversed(self.rows) if row[i] is not None), None) for i in (1, 2, 4)]
            seen, timings = list(self.seen), self.timings
            speed, steps_per_second = timings.measure()
            last_speed, last_steps_per_second = timings.measure(RECENT_TIMINGS)
        loss, held_out, tokens = values
        process, changed_at = locks.holder(self.home / LOCK_FILE), modified_at(self.folder / LOG_FILE)
        has_results = (self.folder / RESULTS_FILE).is_file()
        is_training = bool(process)
        if not locks.are_told:
            is_training = not has_results and time.time() - changed_at < FRESH_SECONDS
        self.is_home_training = is_training
        if has_results and self.is_seed:  # the process trains another seed
            process, is_training = 0, False
        state = "running" if is_training else "finished" if has_results else "stopped"
        step, max_steps = int(last[0] or 0), self.recipe.get("max_steps")
        max_steps = max_steps if isinstance(max_steps, int) and max_steps > 0 else None
        left = None
        if is_training:
            speed, steps_per_second = last_speed, last_steps_per_second
            if len(seen) > 1 and seen[-1][0] > seen[0][0]:
                seconds = seen[-1][0] - seen[0][0]
                speed = (seen[-1][2] - seen[0][2]) / seconds
                steps_per_second = (seen[-1][1] - seen[0][1]) / seconds
            left = (max_steps - step) / steps_per_second if max_steps and steps_per_second else None
        return RunSummary(
            *(self.name, describe_recipe(self.recipe), state, step, max_steps, loss, held_out),
            *(None if tokens is None else int(tokens), speed, left, memory_of(process)),
            *(timings.device_memory_share, changed_at),
        )


class TimingsTail:
    """The timings of a run as they grow: sums over all lines, and the last lines."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.recent: deque[tuple[float, float, float]] = deque(maxlen=RECENT_TIMINGS)  # steps, tokens, seconds
        self.device_type = ""  # that trains: "cuda" or "cpu"; "" before the first line
        self.device_memory_share: float | None = None
        self.begin_anew(-1)

    def begin_anew(self, inode: int) -> None:
        self.inode, self.offset = inode, 0
        self.sums = (0.0, 0.0, 0.0)
        self.recent.clear()

    def read_new_lines(self) -> None:
        try:
            facts = self.file.lstat()
            if not stat.S_ISREG(facts.st_mode) or (facts.st_ino, facts.st_size) == (self.inode, self.offset):
                return
            if facts.st_ino != self.inode or facts.st_size < self.offset:  # a resumed run writes its file anew
                self.begin_anew(facts.st_ino)
            with open_regular(self.file) as opened:
                opened.seek(self.offset)
                whole, end, _ = opened.read(MAX_READ_BYTES).rpartition(b"\n")
        except (OSError, UserError):
            return
        if end:
            self.offset += len(whole) + 1
            for line in whole.split(b"\n"):
                self.add_line(line)

    def add_line(self, text: bytes) -> None:
        try:
            line = json.loads(text.decode(), parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            return
        if not is_timings_line(line):
            return
        steps, tokens, seconds = (float(line[name]) for name in ("steps", "tokens", "seconds"))
        self.sums = (self.sums[0] + steps, self.sums[1] + tokens, self.sums[2] + seconds)
        self.recent.append((steps, tokens, seconds))
        self.device_type = line.get("device", self.device_type)
        self.device_memory_share = line.get("memory_share", self.device_memory_share)

    @property
    def seconds(self) -> float:
        """Seconds that the run has trained, as far as its timings say."""
        return self.sums[2]

    def measure(self, num_lines: int = 0) -> tuple[float | None, float | None]:
        """Return tokens and steps per second, over all lines or the last ones; None where nothing is known."""
        parts = list(self.recent)[-num_lines:] if num_lines else [self.sums]
        steps, tokens, seconds = (sum(part[i] for part in parts) for i in range(3))
        return (tokens / seconds, steps / seconds) if seconds > 0 else (None, None)


class RunsFolder:
    """The runs below a folder. Names come from this list: a name of a request is never made into a path."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"--runs {folder}: there is no such folder.")
        self.lock = threading.Lock()
        self.runs: dict[str, WatchedRun] = {}
        self.scanned, self.next_listing = -SCAN_SECONDS, 0.0

    def scan(self) -> dict[str, WatchedRun]:
        """Return the runs by name, and read what is new, at most every few seconds."""
        with self.lock:
            now = time.monotonic()
            if now - self.scanned >= SCAN_SECONDS:
                self.scanned = now
                if is_listing := now >= self.next_listing:
                    found = dict(find_runs(self.folder))
                    self.runs = {
                        name: self.runs.get(name) or WatchedRun(name, folder) for name, folder in found.items()
                    }
                looked_at = [run for run in self.runs.values() if is_listing or is_active(run.summary)]
                locks = read_locks() if looked_at else Locks(None)
                for run in looked_at:
                    try:
                        run.update()
                        run.summary = run.summarize(locks)
                    except Exception:  # files of a damaged run: the other runs are shown
                        run.summary = None
                if is_listing:
                    self.next_listing = now + (time.monotonic() - now) / LIST_SHARE
            return self.runs

    def list_summaries(self) -> list[RunSummary]:
        """Return where all runs stand, those that train first, then the run that changed last."""
        found = [run.summary for run in self.scan().values() if run.summary is not None]
        return sorted(found, key=lambda run: (run.state != "running", -run.changed_at))

    def find(self, name: str) -> WatchedRun:
        runs = self.scan()
        if name not in runs:
            raise UserError(f"There is no run {quote(name)}. {did_you_mean(name, runs)}")
        return runs[name]


def is_active(run: RunSummary | None) -> bool:
    """Whether a run trains, or did so a moment ago."""
    return run is None or run.state == "running" or time.time() - run.changed_at < FRESH_SECONDS


def find_runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and folder of each run; links are not followed."""
    level, found = [(folder, "")], 0
    for depth in range(MAX_DEPTH + 1):
        below = []
        for path, name in level:
            try:
                entries = sorted(os.scandir(path), key=lambda entry: entry.name)
            except OSError:
                continue
            if any(entry.name == LOG_FILE and entry.is_file(follow_symlinks=False) for entry in entries):
                found += 1
                if found > MAX_RUNS:
                    return
                yield name or path.resolve().name, path
            if depth < MAX_DEPTH:
                below += [
                    (path / entry.name, f"{name}/{entry.name}" if name else entry.name)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and is_searched(entry.name)
                ]
        level = below


def is_searched(name: str) -> bool:
    return not name.startswith((".", "checkpoint-")) and name not in SKIPPED_FOLDERS


def describe_recipe(recipe: Mapping[str, Any]) -> str:
    """Name a run in a few words: the family and the objective, or the task."""
    model, objective = recipe.get("model"), recipe.get("objective")
    if isinstance(model, dict) and isinstance(objective, dict):
        return f"{model.get('family', 'model')}, {objective.get('kind', 'pretraining')}"
    return f"fine-tuning: {recipe['task']}" if recipe.get("task") else "run"


class Locks:
    """Which process holds a file's lock, from /proc/locks.

    An inode is a number of one device alone. The kernel names the device of the file system, which is not always the
    one that `stat` names (overlays, Btrfs): there the files that the process has open decide.
    """

    def __init__(self, lines: Sequence[str] | None) -> None:
        self.are_told = lines is not None  # elsewhere than on Linux nobody knows
        self.holders: dict[int, list[tuple[int, int]]] = {}  # by inode: device and process
        for line in lines or ():  # 1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF
            found = LOCK_LINE.search(line)
            if found is not None:
                process, major, minor, inode = found.groups()
                device = os.makedev(int(major, 16), int(minor, 16))
                self.holders.setdefault(int(inode), []).append((device, int(process)))

    def holder(self, file: Path) -> int:
        """Return the process that holds the lock of a file; 0 for none."""
        try:
            facts = file.stat()
        except OSError:
            return 0
        held = self.holders.get(facts.st_ino, [])
        same = (process for device, process in held if device == facts.st_dev)
        return next(same, 0) or next((process for _, process in held if has_open(process, facts)), 0)


def read_locks() -> Locks:
    try:
        return Locks(Path("/proc/locks").read_text().splitlines())
    except OSError:
        return Locks(None)


def has_open(process: int, facts: os.stat_result) -> bool:
    """Whether a process has this file open, as far as one may look."""
    try:
        opened = os.scandir(f"/proc/{process}/fd")
    except OSError:
        return False
    with opened:
        for entry in opened:
            try:
                own = Path(entry.path).stat()
            except OSError:
                continue
            if (own.st_dev, own.st_ino) == (facts.st_dev, facts.st_ino):
                return True
    return False


def memory_of(process: int) -> int | None:
    """Return the resident memory of a process; None where it is not known."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def modified_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return time.time()


# --- references ---------------------------------------------------------------------------------------------------


def run_references(run: WatchedRun) -> dict[str, float]:
    """Return losses to compare a pretraining run with, by name: the unigram entropy and the planner's forecast.

    The doctor adds the loss of a bigram model, which takes seconds (`run_notes.py`).
    """
    from firth.lab.expected_loss import expect_run_loss
    from firth.train import Recipe, load_recipe
    from firth.train.distributed import SINGLE_PROCESS, select_device

    manifest_file = Path(str(run.recipe.get("data", ""))) / "manifest.json"
    if "objective" not in run.recipe or not manifest_file.is_file():
        return {}
    try:
        recipe, facts = load_recipe(run.home / RECIPE_FILE, Recipe), read_json(manifest_file)["metadata"]
        entropy, text_tokens = float(facts["unigram_entropy"]), int(facts["train"]["tokens"])
    except (UserError, OSError, KeyError, TypeError, ValueError):
        return {}
    if recipe.model.architecture == "encoder-decoder":
        return {}  # its labels hold sentinels: word frequencies are no baseline
    references = {"unigrams": entropy}
    tokens_per_step = next((row[4] / row[0] for row in reversed(run.rows) if row[4] and row[0]), 0.0)
    device_type = run.timings.device_type or select_device(SINGLE_PROCESS, recipe).type
    forecast = expect_run_loss(recipe, tokens_per_step * recipe.max_steps, text_tokens, entropy, device_type)
    if forecast is not None:
        references["forecast"] = forecast
    return references
