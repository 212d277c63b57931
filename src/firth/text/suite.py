"""Evaluation suites: several tasks with their files and metrics, from a YAML file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import read_yaml
from firth.core.serialization import from_dict
from firth.text.examples import TASK_FORMATS

PLAIN_TEXT_TASKS = ("perplexity", "pseudo-likelihood")  # they need plain text instead of labelled examples


@dataclass(frozen=True)
class SuiteTask:
    """A task of a suite. `dev` and `test` may be several files, by name ("dev", or "matched" and "mismatched").

    The task's score is the mean of `metrics`; empty uses the default metrics of the task. `columns` is passed to
    `read_labelled`; `settings` apply to evaluation without fine-tuning (`ZeroShotSettings`).
    """

    name: str
    task: str
    train: Path | None = None
    dev: Mapping[str, Path] = field(default_factory=dict)
    test: Mapping[str, Path] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ZeroShotSettings:
    """Settings of evaluation without fine-tuning; each task uses some of them."""

    method: str | None = None
    max_seq_length: int | None = None
    stride: int | None = None
    delimiter: str | None = None
    train: str | None = None  # file on which the threshold is tuned
    threshold: float | None = None
    layer: int | None = None
    pool: str | None = None
    limit: int | None = None


@dataclass(frozen=True)
class SuiteEntry:
    """A task as written in a suite file."""

    name: str
    task: str
    train: str = ""
    dev: dict[str, str] = field(default_factory=dict)
    test: dict[str, str] = field(default_factory=dict)
    metric: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)
    settings: ZeroShotSettings = field(default_factory=ZeroShotSettings)


def read_suite(path: str | Path) -> dict[str, SuiteTask]:
    """Read the tasks of a suite file, by name. Paths are relative to the suite file.

    tasks:
      - name: reviews
        task: classify
        train: reviews/train.jsonl
        dev: reviews/dev.jsonl            # or several: {easy: reviews/easy.jsonl, hard: reviews/hard.jsonl}
        columns: {text: body, label: stars}
        metric: macro_f1                  # or several: [accuracy, macro_f1]
      - name: senses
        task: word-in-context
        dev: wic/dev.jsonl
        settings: {threshold: 0.6}        # without fine-tuning; {train: wic/train.jsonl} tunes it
    """
    path = Path(path)
    content = read_suite_yaml(path)
    if unknown := set(content) - {"tasks"}:
        raise UserError(f"{path}: unknown key {quote(min(unknown))}. A suite file has `tasks`.")
    entries = content.get("tasks")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: no tasks. Write `tasks:` and, for each, its name, task and dev file.")
    suite: dict[str, SuiteTask] = {}
    for i, entry in enumerate(entries, 1):
        task = parse_suite_entry(entry, path, i)
        if task.name in suite:
            raise UserError(f"{path}: two tasks are called {quote(task.name)}. Give one another name.")
        suite[task.name] = task
    return suite


def parse_suite_entry(entry: Any, path: Path, number: int) -> SuiteTask:
    named = entry.get("name") if isinstance(entry, dict) else None
    where = f"{path}: task {named or number}"
    read = from_dict(expand_suite_entry(entry), SuiteEntry, where)
    if read.task not in (*TASK_FORMATS, *PLAIN_TEXT_TASKS):
        raise UserError(
            f"{where}: unknown task {quote(read.task)}. {did_you_mean(read.task, (*TASK_FORMATS, *PLAIN_TEXT_TASKS))}"
        )
    if not read.dev and not read.train:
        raise UserError(f"{where}: neither train nor dev file is named.")
    for name in (read.name, *read.dev):
        if name in ("", ".", "..") or set("/\\\0") & set(name):
            raise UserError(f"{where}: {quote(name)} becomes a folder name: it must not be a dot or contain slashes.")

    def resolve(name: str) -> Path:
        file = path.parent / name
        if not file.is_file() and not (read.task in PLAIN_TEXT_TASKS and file.is_dir()):
            raise UserError(f"{where}: {file}: no such file.")
        return file

    dev, test = ({name: resolve(file) for name, file in files.items()} for files in (read.dev, read.test))
    train = resolve(read.train) if read.train else None
    settings = {name: value for name, value in asdict(read.settings).items() if value is not None}
    if "train" in settings:
        settings["train"] = str(resolve(settings["train"]))
    return SuiteTask(read.name, read.task, train, dev, test, read.metric, read.columns, settings)


def expand_suite_entry(entry: Any) -> Any:
    """Expand a single file or metric to a group of one."""
    if not isinstance(entry, dict):
        return entry
    files = {part: {part: entry[part]} for part in ("dev", "test") if isinstance(entry.get(part), str)}
    metric = {"metric": [entry["metric"]]} if isinstance(entry.get("metric"), str) else {}
    return {**entry, **files, **metric}


def read_suite_yaml(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: no tasks. Write `tasks:` and, for each, its name, task and dev file.")
    return content


def normalize_task_name(name: str) -> str:
    """Return a name without case and punctuation, which vary.

    >>> normalize_task_name("SST-2"), normalize_task_name("sst2")
    ('sst2', 'sst2')
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_task_folders(folder: str | Path, suite: str, names: Iterable[str]) -> dict[str, Path]:
    """Return the folders of a suite's tasks in the suite's order; case and punctuation of folder names may vary."""
    folder, names = Path(folder), list(names)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    by_name = {normalize_task_name(path.name): path for path in sorted(folder.iterdir()) if path.is_dir()}
    folders = {name: by_name[normalize_task_name(name)] for name in names if normalize_task_name(name) in by_name}
    if not folders:
        raise UserError(f"{folder}: none of {suite}'s tasks is here. It should have folders {', '.join(names)}.")
    return folders
