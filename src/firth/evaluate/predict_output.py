"""Write predictions while they are made: JSON lines or a table, or one readable line per input."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from firth.core.errors import UserError, shorten
from firth.core.files import atomic_file, check_writable
from firth.evaluate.predict_input import TaskInput
from firth.text.records import data_extension

TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
MAX_SHOWN_CHARS = 80  # of an input on the terminal
SHOWN_VECTOR_NUMBERS = 4
CUT_MARK = " [cut]"  # behind an answer that reached its maximum length


def check_output_file(path: Path, overwrite: bool, data: str | None = None) -> None:
    """Refuse another format than .jsonl, .csv and .tsv, a file that exists, and the file `data` that is read."""
    if data_extension(path) != path.suffix.lower() or path.suffix.lower() not in (".jsonl", *TABLE_DELIMITERS):
        raise UserError(f"--output {path}: predictions are written to .jsonl, .csv or .tsv.")
    check_writable(path.parent)
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists already. Name another --output, or pass --overwrite.")
    if data is not None and path.exists() and Path(data).exists() and path.samefile(data):
        raise UserError(f"--output {path} is the file that --data reads. Name another --output.")


def write_predictions(path: Path, predictions: Iterable[tuple[TaskInput, dict[str, Any]]]) -> int:
    """Write a record per input: its columns, then the prediction's. The file appears when it is whole."""
    delimiter, count = TABLE_DELIMITERS.get(path.suffix.lower()), 0
    records = (merge_columns(task_input.columns, prediction) for task_input, prediction in predictions)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        if delimiter is not None:
            return write_table(file, records, delimiter)
        for count, record in enumerate(records, 1):  # noqa: B007, the count is returned
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    return count


def write_table(file: IO[bytes], records: Iterable[Mapping[str, Any]], delimiter: str) -> int:
    """Write records as a table with the columns of all of them, in the order in which they first occur.

    The header stands before the first row and is known after the last one, so that the rows wait in a temporary file.
    """
    columns: dict[str, None] = {}
    with TemporaryFile("w+", encoding="utf-8") as waiting:
        for record in records:
            columns |= dict.fromkeys(record)
            waiting.write(json.dumps([format_cell(record.get(column)) for column in columns]) + "\n")
        waiting.seek(0)
        count = 0
        for count, line in enumerate(waiting, 1):
            if count == 1:
                file.write(format_row(list(columns), delimiter))
            cells = json.loads(line)
            file.write(format_row([*cells, *[""] * (len(columns) - len(cells))], delimiter))
    return count


def merge_columns(inputs: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, Any]:
    """Return one record; a prediction's column that the input has too is renamed, as `text` to `predicted_text`."""
    return {**inputs, **{f"predicted_{key}" if key in inputs else key: value for key, value in prediction.items()}}


def format_row(cells: list[str], delimiter: str) -> bytes:
    line = io.StringIO()
    csv.writer(line, delimiter=delimiter, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()


def format_cell(value: Any) -> str:
    """Return a value as a cell: lists, objects and truth values as JSON, and no value as an empty cell.

    >>> format_cell(None), format_cell(False), format_cell([1]), format_cell("a")
    ('', 'false', '[1]', 'a')
    """
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else str(value)


def format_prediction(task_input: TaskInput, record: Mapping[str, Any]) -> str:
    """Return one readable line: the prediction, then the beginning of the input."""
    if "spans" in record:
        return mark_spans(task_input.text, record["spans"])
    if "tags" in record:
        return " ".join(f"{word}/{tag}" for word, tag in zip(record["words"], record["tags"], strict=True))
    if "vector" in record:
        shown = ", ".join(f"{x:.3f}" for x in record["vector"][:SHOWN_VECTOR_NUMBERS])
        return (
            f"[{shown}, ...] ({len(record['vector'])} numbers)  {shorten(task_input.example.texts[0], MAX_SHOWN_CHARS)}"
        )
    if "similarity" in record:
        return f"{record['similarity']:.3f}  {shorten(' | '.join(task_input.example.texts), MAX_SHOWN_CHARS)}"
    if "reward" in record:
        texts = [*task_input.example.texts[1::2], *task_input.example.references]
        return f"{record['reward']:.3f}  {shorten(' | '.join(texts), MAX_SHOWN_CHARS)}"
    if "preferred" in record:
        rewards = f"{record['preferred']}  {record['reward_chosen']:.3f}  {record['reward_rejected']:.3f}"
        return f"{rewards}  {shorten(' | '.join(task_input.example.texts[1::2]), MAX_SHOWN_CHARS)}"
    if "score" in record:
        return f"{record['score']:.3f}  {shorten(' | '.join(task_input.example.texts), MAX_SHOWN_CHARS)}"
    probability = f"{100 * record['probability']:5.1f}%" if "probability" in record else ""
    if "answer" in record:
        return f"{record['answer'] or 'no answer'}  {probability.strip()}".rstrip()
    if "choice" in record:
        return f"{record['choice']}: {record['text']}  {probability.strip()}"
    if "label" in record:
        return f"{record['label']}  {probability}  {shorten(' | '.join(task_input.example.texts), MAX_SHOWN_CHARS)}"
    return f"{record['text']}{'' if record.get('complete', True) else CUT_MARK}"


def mark_spans(text: str, spans: Iterable[Mapping[str, Any]]) -> str:
    """Return a text with its entities in brackets, as in "[PER Juma 98%] lives here".

    >>> mark_spans("Juma lives", [{"type": "PER", "start": 0, "end": 4, "probability": 0.98}])
    '[PER Juma 98%] lives'
    """
    parts, end = [], 0
    for span in spans:
        share = f" {100 * span['probability']:.0f}%" if "probability" in span else ""
        parts += [text[end : span["start"]], f"[{span['type']} {text[span['start'] : span['end']]}{share}]"]
        end = span["end"]
    return "".join([*parts, text[end:]])
