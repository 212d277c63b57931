"""Read GLUE's files, which are recognized by the name of their folder and their first line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firth.text.labelled_row import RowNotes
from firth.text.open_text import DECOMPRESSORS
from firth.text.records import data_extension, read_record_lines
from firth.text.suite import SuiteTask, find_task_folders, normalize_task_name

COLA_COLUMNS = ("source", "label", "mark", "sentence")
SENTENCE_PAIR_COLUMNS = {"text_a": "sentence1", "text_b": "sentence2"}
BINARY_LABELS = ("0", "1")
ENTAILMENT_LABELS = ("entailment", "not_entailment")


@dataclass(frozen=True)
class GlueTask:
    """A GLUE task: its task kind, columns by role, labels (empty for a score) and official metrics."""

    name: str
    task: str
    columns: Mapping[str, str]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    default_header: tuple[str, ...] = field(default=())  # columns of a file without a header line

    @property
    def label_column(self) -> str:
        return self.columns["score" if self.task == "regress" else "label"]

    @property
    def text_columns(self) -> tuple[str, ...]:
        return tuple(column for column in self.columns.values() if column != self.label_column)


SINGLE_SENTENCE_COLUMNS = {"text": "sentence", "label": "label"}
GLUE_TASKS = {
    "cola": GlueTask("cola", "classify", SINGLE_SENTENCE_COLUMNS, BINARY_LABELS, ("mcc",)),
    "sst-2": GlueTask("sst-2", "classify", SINGLE_SENTENCE_COLUMNS, BINARY_LABELS),
    "mrpc": GlueTask(
        "mrpc",
        "pair",
        {"text_a": "#1 String", "text_b": "#2 String", "label": "Quality"},
        BINARY_LABELS,
        ("accuracy", "f1"),
    ),
    "sts-b": GlueTask("sts-b", "regress", {**SENTENCE_PAIR_COLUMNS, "score": "score"}, (), ("pearson", "spearman")),
    "qqp": GlueTask(
        "qqp",
        "pair",
        {"text_a": "question1", "text_b": "question2", "label": "is_duplicate"},
        BINARY_LABELS,
        ("accuracy", "f1"),
    ),
    "mnli": GlueTask(
        "mnli", "pair", {**SENTENCE_PAIR_COLUMNS, "label": "gold_label"}, ("contradiction", "entailment", "neutral")
    ),
    "qnli": GlueTask("qnli", "pair", {"text_a": "question", "text_b": "sentence", "label": "label"}, ENTAILMENT_LABELS),
    "rte": GlueTask("rte", "pair", {**SENTENCE_PAIR_COLUMNS, "label": "label"}, ENTAILMENT_LABELS),
    "wnli": GlueTask("wnli", "pair", {**SENTENCE_PAIR_COLUMNS, "label": "label"}, BINARY_LABELS),
}
# split -> name of the set -> possible file names, the official one first
GLUE_SPLIT_FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {"train": ("train.tsv", "msr_paraphrase_train.txt")},
    "dev": {
        "dev": ("dev.tsv", "msr_paraphrase_test.txt"),
        "matched": ("dev_matched.tsv",),
        "mismatched": ("dev_mismatched.tsv",),
    },
    "test": {"test": ("test.tsv",), "matched": ("test_matched.tsv",), "mismatched": ("test_mismatched.tsv",)},
}


def detect_glue_task(path: str | Path, encoding: str = "utf-8") -> GlueTask | None:
    """Return the GLUE task of a file, by its folder and its first line; None for any other file.

    CoLA's training and dev files have no header. They are recognized by four cells, the second of which is 0 or 1.
    """
    path = Path(path)
    if data_extension(path) not in (".tsv", ".txt") or not path.is_file():
        return None
    name = "mrpc" if path.name.startswith("msr_paraphrase") else path.parent.name
    task = {normalize_task_name(name): task for name, task in GLUE_TASKS.items()}.get(normalize_task_name(name))
    if task is None:
        return None
    first = split_tsv_cells(next(read_record_lines(path, encoding), ""))
    if set(task.text_columns) <= set(first):
        return task
    if task.name == "cola" and len(first) == len(COLA_COLUMNS) and first[1] in BINARY_LABELS:
        return GlueTask(task.name, task.task, task.columns, task.labels, task.metrics, COLA_COLUMNS)
    return None


def read_glue_records(
    task: GlueTask, path: Path, encoding: str, notes: RowNotes
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a GLUE file with their line numbers. Quotation marks are ordinary characters.

    Rows that the official readers drop too are left out and noted: rows with too few columns, without a text, or with
    an unknown label (such as `-`, where MNLI's annotators did not agree). A column `index` becomes the id.
    """
    header = list(task.default_header)
    for number, line in enumerate(read_record_lines(path, encoding), 1):
        cells = split_tsv_cells(line)
        if not header:
            header = cells
            continue
        record: dict[str, Any] = dict(zip(header, cells, strict=False))
        if fault := find_glue_row_fault(task, record, header):
            notes.add("line", f"left out {fault}", f"line {number:,}")
            continue
        if "id" not in record and record.get("index", "").isdecimal():
            record["id"] = int(record["index"])
        yield number, record


def find_glue_row_fault(task: GlueTask, record: Mapping[str, str], header: list[str]) -> str:
    """Return why the official readers drop a row, or an empty string."""
    if any(column not in record for column in (*task.text_columns, task.label_column) if column in header):
        return "with too few columns"
    if not all(record[column].strip() for column in task.text_columns):
        return "without a text"
    if task.labels and task.label_column in header and record[task.label_column] not in task.labels:
        return f"whose {task.label_column} is none of {', '.join(task.labels)}"
    return ""


def split_tsv_cells(line: str) -> list[str]:
    line = line.rstrip("\n")
    return line.split("\t") if line else []


def find_glue_suite(folder: str | Path) -> dict[str, SuiteTask]:
    """Return the GLUE tasks in a folder by name, one subfolder each, as in the official download.

    MNLI has two dev sets, "matched" and "mismatched"; every other task has one, "dev". MRPC may be GLUE's or
    Microsoft's version; the labelled test set of the latter is the dev set.
    """
    folders = find_task_folders(folder, "GLUE", GLUE_TASKS)
    return {name: make_glue_suite_task(GLUE_TASKS[name], path) for name, path in folders.items()}


def make_glue_suite_task(task: GlueTask, folder: Path) -> SuiteTask:
    train, dev, test = (
        {name: file for name, files in sets.items() if (file := find_first_file(folder, files)) is not None}
        for sets in GLUE_SPLIT_FILES.values()
    )
    return SuiteTask(task.name, task.task, train.get("train"), dev, test, task.metrics, dict(task.columns))


def find_first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of these files that exists, plain or compressed."""
    paths = (folder / (name + extension) for name in names for extension in ("", *DECOMPRESSORS))
    return next((path for path in paths if path.is_file()), None)
