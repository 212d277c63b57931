"""Turn what a user asks about into inputs of a task: a text, several texts, a record, or the lines of a file."""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from firth.core.console import format_count, warn
from firth.core.errors import UserError
from firth.core.parse import parse_json
from firth.text import Example, RowNotes
from firth.text.examples import TASK_FORMATS, parse_reward_row
from firth.text.labelled import open_labelled_file, replace_surrogates_in_records, replace_surrogates_in_value
from firth.text.labelled_row import LabelledRow
from firth.text.open_text import check_encoding, read_lines
from firth.text.records import data_extension

WORD_PATTERN = re.compile(r"\w+(?:['’\-.]\w+)*|[^\w\s]")  # words and single punctuation marks
LABEL_ROLES = ("label", "score", "gold", "tags", "answers", "is_impossible", "target", "references", "response")
# Columns of the texts, in the order of `Example.texts`. The tasks that are not listed need a record: words are marked.
TEXT_ROLES = {
    "classify": ("text",),
    "pair": ("text_a", "text_b"),
    "regress": ("text_a", "text_b"),
    "choice": ("context", "choices"),
    "tag": ("text",),
    "span-qa": ("question", "context"),
    "text-to-text": ("source",),
    "extract": ("text",),
    "lm": ("prompt",),
    "reward": ("prompt", "completion"),
    "embed": ("text", "text_b"),
}
PLAIN_TEXT_EXTENSIONS = (".txt", "")

LineFormat = Literal["auto", "text", "jsonl"]  # of the lines of a .txt file or of stdin
PredictInput = str | Sequence[str] | Mapping[str, Any]


class TaskInput(NamedTuple):
    """An example without a target, and its columns for the output. Tagging adds the offsets of the words in `text`."""

    example: Example
    columns: dict[str, Any]
    text: str = ""
    word_offsets: Sequence[tuple[int, int]] = ()


class InputReader:
    """Read the inputs of one task. An input has at least `min_texts` and at most `max_texts` texts."""

    def __init__(self, task: str, min_texts: int, max_texts: int) -> None:
        self.task, self.min_texts, self.max_texts = task, min_texts, max_texts

    def read(
        self, value: PredictInput, number: int, where: str = "", columns: Mapping[str, str] | None = None
    ) -> TaskInput:
        """Return the input of a text, of several texts, or of a record with the columns of the training file."""
        where = where or f"Input {number}"
        if isinstance(value, Mapping):
            return self.read_record(replace_surrogates_in_value(dict(value)), number, where, columns or {})
        texts = replace_surrogates_in_value([value] if isinstance(value, str) else list(value))
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{where}: an input is a text, a list of texts or a record of columns.")
        self.check_texts(texts, where)
        return self.from_texts(texts, number)

    def check_texts(self, texts: Sequence[str], where: str) -> None:
        """Refuse a number of texts that the task does not read, and empty texts."""
        if self.task not in TEXT_ROLES:
            columns = ", ".join(TASK_FORMATS[self.task].roles)
            raise UserError(f"{where}: the task {self.task} needs marked words. Give records with {columns}.")
        if not self.min_texts <= len(texts) <= self.max_texts:
            fixed = self.min_texts == self.max_texts
            wanted = self.min_texts if fixed else f"{self.min_texts} or more"
            roles = ", ".join(TEXT_ROLES[self.task][: self.max_texts])
            count = format_count(len(texts), "text")
            raise UserError(f"{where}: {count}, and the task {self.task} reads {wanted} ({roles}).")
        if not all(text.strip() for text in texts):
            raise UserError(f"{where}: an empty text.")

    def from_texts(self, texts: Sequence[str], id: str | int) -> TaskInput:
        if self.task == "tag":
            spans = [match.span() for match in WORD_PATTERN.finditer(texts[0])] or [(0, len(texts[0]))]
            words = tuple(texts[0][start:end] for start, end in spans)
            return TaskInput(Example(id, words), {"id": id, "text": texts[0]}, texts[0], spans)
        if self.task == "choice":
            return TaskInput(Example(id, tuple(texts)), {"id": id, "context": texts[0], "choices": list(texts[1:])})
        if self.task == "reward":
            prompt, answer = texts
            own = {"id": id, **dict(zip(TEXT_ROLES["reward"], texts, strict=True))}
            return TaskInput(Example(id, ("user", prompt), references=(answer,)), own)
        roles = ("text",) if self.task == "regress" and len(texts) == 1 else TEXT_ROLES[self.task]
        if self.task == "classify" and len(texts) == 2:  # a pair, for the head of a published checkpoint
            roles = TEXT_ROLES["pair"]
        return TaskInput(Example(id, tuple(texts)), {"id": id, **dict(zip(roles, texts, strict=False))})

    def read_record(self, record: dict[str, Any], number: int, where: str, columns: Mapping[str, str]) -> TaskInput:
        """Return the input of a record; its labels are ignored."""
        id = LabelledRow(record, columns, where, number, False, RowNotes(where)).id
        raw_role = {"lm": "prompt"}.get(self.task, "text")
        raw = record.get(columns.get(raw_role, raw_role))
        if self.task in ("tag", "embed", "lm") and isinstance(raw, str):
            self.check_texts([raw], where)
            return self.from_texts([raw], id)
        if self.task == "reward":  # the answers are the input
            row = LabelledRow(record, columns, where, number, False, RowNotes(where), "dev")
            return TaskInput(parse_reward_row(row), {"id": id, **record})
        labels = {columns.get(role, role) for role in LABEL_ROLES}
        inputs = {column: value for column, value in record.items() if column not in labels}
        row = LabelledRow(inputs, columns, where, number, False, RowNotes(where), "dev")
        example = TASK_FORMATS[self.task].parse_row(row)
        assert example is not None, "rows of dev are not dropped"
        example = example._replace(target=None, references=())
        if self.task != "tag":
            return TaskInput(example, {"id": id, **inputs})
        ends, spans = 0, []
        for word in example.texts:
            spans.append((ends, ends + len(word)))
            ends += len(word) + 1
        return TaskInput(example, {"id": id, **inputs}, " ".join(example.texts), spans)

    def read_arguments(self, texts: Sequence[str]) -> Iterator[TaskInput]:
        """Yield the inputs of a command line: as many texts for each as the task reads, all of them for choices."""
        size = len(texts) if self.task == "choice" else max(1, self.min_texts)
        if len(texts) % size:
            roles = ", ".join(TEXT_ROLES[self.task])
            count = format_count(len(texts), "text")
            raise UserError(f"{count} for the task {self.task}, which reads {size} for each input ({roles}).")
        for number, first in enumerate(range(0, len(texts), size), 1):
            yield self.read(texts[first : first + size], number)

    def read_file(
        self, path: str, columns: Mapping[str, str] | None, encoding: str, line_format: LineFormat = "auto"
    ) -> Iterator[TaskInput]:
        """Yield the inputs of a file while it is read: a table, or an input on each line; "-" is stdin."""
        encoding = check_encoding(encoding)
        if path == "-":
            yield from self.read_lines(read_stdin(encoding), "stdin", columns, line_format)
            return
        file = Path(path)
        if data_extension(file) in PLAIN_TEXT_EXTENSIONS and not file.is_dir():
            yield from self.read_lines(read_lines(file, encoding), path, columns, line_format)
            return
        if line_format != "auto":
            raise UserError(f"--format is for the lines of a .txt file or of stdin: leave it out for {path}.")
        notes = RowNotes(path)
        named, records = open_labelled_file(file, self.task, dict(columns or {}), encoding, False, notes)
        for number, record in replace_surrogates_in_records(records, notes):
            yield self.read_record(record, number, f"{path}:{number}", named)

    def read_lines(
        self,
        lines: Iterable[str],
        name: str,
        columns: Mapping[str, str] | None = None,
        line_format: LineFormat = "auto",
    ) -> Iterator[TaskInput]:
        """Yield an input for each line that is not blank: a record or a text, as `line_format` says.

        With "auto", a line is a record if it is a JSON object with a column that the task reads.
        """
        known, has_warned = self.input_columns(columns or {}), False
        for number, line in enumerate(lines, 1):
            where, text = f"{name}:{number}", line.rstrip("\r\n")
            if not text.strip():
                continue
            value: PredictInput = text
            if line_format == "jsonl":
                value = parse_json(text, name, number)
                if not isinstance(value, dict):
                    raise UserError(f"{where}: not a JSON object, which --format jsonl asks for.")
            elif line_format == "auto" and (record := parse_object(text)) is not None:
                if known & record.keys():
                    value = record
                elif not has_warned:
                    has_warned = True
                    warn(
                        f"{where}: a JSON object without the columns of the task ({', '.join(sorted(known))}) is read "
                        "as a text. Name its columns by --columns, or say --format text or jsonl."
                    )
            yield self.read(value, number, where, columns)

    def input_columns(self, columns: Mapping[str, str]) -> set[str]:
        """Return the columns of the texts of a record, renamed by `columns`; those of labels are left out."""
        roles = {*TASK_FORMATS[self.task].roles, *TEXT_ROLES.get(self.task, ())}
        labels = set() if self.task == "reward" else set(LABEL_ROLES)
        return {columns.get(role, role) for role in roles - labels}


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a line consists of; None if it is a text.

    >>> parse_object('{"text": "a"}'), parse_object("{a} or {b}"), parse_object("[1]")
    ({'text': 'a'}, None, None)
    """
    if not text.lstrip().startswith("{"):
        return None
    try:
        return cast(dict[str, Any], parse_json(text, ""))
    except UserError:
        return None


def read_stdin(encoding: str) -> Iterator[str]:
    """Yield the lines of stdin as they come, decoded by `encoding`."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_utf8 = codecs.lookup(encoding).name == "utf-8"
        sys.stdin.reconfigure(encoding="utf-8-sig" if is_utf8 else encoding, errors="strict", newline="\n")
    number = 0
    try:
        for number, line in enumerate(sys.stdin, 1):  # noqa: B007, the message names it
            yield line
    except UnicodeDecodeError:
        raise UserError(
            f"stdin, line {number + 1:,} or later: not {encoding}. Name its encoding by --encoding."
        ) from None
