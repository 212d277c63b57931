"""Suites: several tasks with their files and metrics, from a file that a person writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from firth.core.errors import UserError, did_you_mean
from firth.core.serialization import from_dict
from firth.text.examples import TASK_FORMATS

PLAIN_TEXT_TASKS = ("perplexity", "pseudo-likelihood")  # are asked of plain text, not of labelled examples


@dataclass(frozen=True)
class SuiteTask:
    """A task of a suite. `dev` and `test` may be several files, by name ("dev", or "matched" and "mismatched").

    `metrics` are the official ones, the mean of which is the task's score; none means the task kind's own. `columns`
    rename for `read_labelled`, `settings` are what a checkpoint is told that answers as it is (`ZeroShotSettings`).
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
    """What an evaluation without fine-tuning may be told; each task takes some of these."""

    method: str | None = None
    max_seq_length: int | None = None
    stride: int | None = None
    delimiter: str | None = None
    train: str | None = None  # from which a threshold is found
    threshold: float | None = None
    layer: int | None = None
    pool: str | None = None
    limit: int | None = None


@dataclass(frozen=True)
class SuiteEntry:
    """A task as a suite file spells it."""

    name: str
    task: str
    train: str = ""
    dev: dict[str, str] = field(default_factory=dict)
    test: dict[str, str] = field(default_factory=dict)
    metric: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)
    settings: ZeroShotSettings = field(default_factory=ZeroShotSettings)


def read_suite(path: str | Path) -> dict[str, SuiteTask]:
    """The tasks of a suite file, by name. Its files are looked for beside it.

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
        settings: {threshold: 0.6}        # of a checkpoint as it is; or {train: wic/train.jsonl}, to find it
    """
    path = Path(path)
    content = read_suite_yaml(path)
    if unknown := set(content) - {"tasks"}:
        raise UserError(f"{path}: unknown key {min(unknown)!r}. A suite file has `tasks`.")
    entries = content.get("tasks")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: no tasks. Write `tasks:` and, for each, its name, task and dev file.")
    suite: dict[str, SuiteTask] = {}
    for i, entry in enumerate(entries, 1):
        task = parse_suite_entry(entry, path, i)
        if task.name in suite:
            raise UserError(f"{path}: two tasks are called {task.name!r}. Give one another name.")
        suite[task.name] = task
    return suite


def parse_suite_entry(entry: Any, path: Path, number: int) -> SuiteTask:
    named = entry.get("name") if isinstance(entry, dict) else None
    where = f"{path}: task {named or number}"
    read = from_dict(expand_suite_entry(entry), SuiteEntry, where)
    if read.task not in (*TASK_FORMATS, *PLAIN_TEXT_TASKS):
        raise UserError(
            f"{where}: task {read.task!r} is not known. {did_you_mean(read.task, (*TASK_FORMATS, *PLAIN_TEXT_TASKS))}"
        )
    if not read.dev and not read.train:
        raise UserError(f"{where}: neither train nor dev file is named.")
    for name in (read.name, *read.dev):
        if name in ("", ".", "..") or set("/\\\0") & set(name):
            raise UserError(f"{where}: {name!r} becomes the name of a folder: leave slashes and dots alone out of it.")

    def place(name: str) -> Path:
        file = path.parent / name
        if not file.is_file() and not (read.task in PLAIN_TEXT_TASKS and file.is_dir()):
            raise UserError(f"{where}: {file}: no such file.")
        return file

    dev, test = ({name: place(file) for name, file in files.items()} for files in (read.dev, read.test))
    train = place(read.train) if read.train else None
    settings = {name: value for name, value in asdict(read.settings).items() if value is not None}
    if "train" in settings:
        settings["train"] = str(place(settings["train"]))
    return SuiteTask(read.name, read.task, train, dev, test, read.metric, read.columns, settings)


def expand_suite_entry(entry: Any) -> Any:
    """One file or one metric is short for a group of one."""
    if not isinstance(entry, dict):
        return entry
    files = {part: {part: entry[part]} for part in ("dev", "test") if isinstance(entry.get(part), str)}
    metric = {"metric": [entry["metric"]]} if isinstance(entry.get("metric"), str) else {}
    return {**entry, **files, **metric}


def read_suite_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: no tasks. Write `tasks:` and, for each, its name, task and dev file.")
    return content


def normalize_task_name(name: str) -> str:
    """A name without what people spell differently.

    >>> normalize_task_name("SST-2"), normalize_task_name("sst2")
    ('sst2', 'sst2')
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_task_folders(folder: str | Path, suite: str, names: Iterable[str]) -> dict[str, Path]:
    """The folders of a suite's tasks, however they are spelled, in the suite's own order."""
    folder, names = Path(folder), list(names)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    there = {normalize_task_name(place.name): place for place in sorted(folder.iterdir()) if place.is_dir()}
    found = {name: there[normalize_task_name(name)] for name in names if normalize_task_name(name) in there}
    if not found:
        raise UserError(f"{folder}: none of {suite}'s tasks is here. It should have folders {', '.join(names)}.")
    return found
