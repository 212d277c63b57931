"""Read labelled files of every supported format, plain or compressed, as examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from firth.core.console import format_count, say
from firth.core.errors import UserError, did_you_mean, list_names, quote
from firth.core.parse import parse_json
from firth.text import python_docs
from firth.text.corpus import Corpus
from firth.text.documents import Example as Example
from firth.text.examples import TASK_FORMATS, TASK_SYNONYMS
from firth.text.filters import replace_lone_surrogates
from firth.text.formats.conll import read_conll_records
from firth.text.formats.glue import detect_glue_task, read_glue_records
from firth.text.formats.squad import flatten_squad_articles
from firth.text.formats.superglue import detect_superglue_task, read_superglue_records
from firth.text.labelled_row import LabelledRow, RowNotes
from firth.text.open_text import COMPRESSED_EXTENSIONS_TEXT, check_encoding, read_lines
from firth.text.records import RECORD_READERS as TABLES
from firth.text.records import (
    MissingColumnError,
    NumberedRecords,
    data_extension,
    is_numeric_string,
    read_jsonl_records,
    read_record_lines,
    resolve_columns,
)

CONLL_EXTENSIONS = (".txt", ".conll", ".conllu", ".bio", ".iob")
EXTRA_EXTENSIONS_BY_TASK = {"tag": CONLL_EXTENSIONS, "lm": (".txt",)}  # that a task accepts beside tables


def read_labelled(
    path: str | Path,
    task: str,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    encoding: str = "utf-8",
    require_labels: bool = True,
    notes: RowNotes | None = None,
) -> list[Example]:
    """Return the examples of a file, in its order (`Example` lists the fields of each task).

    The columns are the roles of `TASK_FORMATS`, or as renamed by `columns={"text": "sentence"}`. Files of GLUE and
    SuperGLUE are recognized by their folder. With `require_labels=False` labels may be missing, as in a test set.
    The paths "pydocs" and "pydocs:test" are the built-in data. `split` is "train" or "dev": rows that cannot be trained
    on, such as answers outside of the context, are dropped from "train" and kept in "dev". `notes` collects changed and
    dropped rows.
    """
    if task not in TASK_FORMATS:
        raise UserError(f"unknown task {quote(task)}. {did_you_mean(task, TASK_FORMATS, TASK_SYNONYMS)}")
    if path == python_docs.PYDOCS_NAME:
        return python_docs.make_pydocs_examples(task, split)
    if path == python_docs.PYDOCS_TEST_NAME:
        return python_docs.make_pydocs_examples(task, "test")
    notes = RowNotes(str(path)) if notes is None else notes
    named, records = open_labelled_file(
        Path(path), task, dict(columns or {}), check_encoding(encoding), require_labels, notes
    )
    make = TASK_FORMATS[task].parse_row
    item = " item " if data_extension(Path(path)) == ".json" else ""  # a JSON list has no line numbers
    rows = (
        LabelledRow(record, named, f"{path}:{item}{number}", number, require_labels, notes, split)
        for number, record in replace_surrogates_in_records(records, notes)
    )
    try:
        examples = [example for row in rows if (example := make(row)) is not None]
    except MissingColumnError as e:
        other = None if columns else infer_task_from_columns(e.available_columns)
        raise UserError(f"{e} Or is it a file for --task {other}?" if other not in (None, task) else str(e)) from None
    notes.check_labels(len(examples))
    notes.print_summary()
    if not examples:
        raise UserError(f"{path}: no examples in this file.")
    return examples


# The first entry whose columns are all present gives the task. Labels are not listed, since a test set lacks them.
TASK_COLUMN_SIGNATURES: list[tuple[str, tuple[str, ...]]] = [
    ("span-qa", ("question", "context")),
    ("choice", ("context", "choices")),
    ("choice", ("context", "choice1")),
    ("cloze", ("context", "answer")),
    ("text-to-text", ("source",)),
    ("preference", ("chosen", "rejected")),
    ("preference", ("prompt", "completion", "label")),
    ("lm", ("messages",)),
    ("lm", ("prompt", "response")),
    ("lm", ("prompt", "completion")),
    ("minimal-pairs", ("good", "bad")),
    ("minimal-pairs", ("sentence_good", "sentence_bad")),
    ("tag", ("tokens",)),
    ("pair", ("text_a", "text_b")),
    ("regress", ("text_a",)),
    ("classify", ("text",)),
]


def infer_task_from_columns(columns: Iterable[str]) -> str | None:
    """Return the task that these columns belong to, or None."""
    available = set(columns)
    return next((task for task, names in TASK_COLUMN_SIGNATURES if available >= set(names)), None)


def infer_task(path: str | Path, columns: Mapping[str, str] | None = None, encoding: str = "utf-8") -> str:
    """Return the task of a labelled file, by its folder, its extension or its columns."""
    if path == python_docs.PYDOCS_NAME:
        return "classify"
    path = Path(path)
    if known := detect_glue_task(path, encoding) or detect_superglue_task(path, encoding):
        return known.task
    if data_extension(path) in CONLL_EXTENSIONS:
        return "tag"
    _, record = next(iter(read_file_records(path, "", check_encoding(encoding))), (0, {}))
    if task := infer_task_from_columns(record.keys() | (columns or {}).keys()):
        return task
    raise UserError(
        f"{path}: its columns ({list_names(record) or 'none'}) match no task. Name it with --task, and "
        "rename columns with --labelled-columns text=sentence."
    )


def open_labelled_file(
    path: Path, task: str, columns: dict[str, str], encoding: str, require_labels: bool, notes: RowNotes
) -> tuple[Mapping[str, str], NumberedRecords]:
    """Return the column of each role and the records of a GLUE, SuperGLUE, CoNLL or other file."""
    roles = ("id", *TASK_FORMATS[task].roles)
    glue, superglue = detect_glue_task(path, encoding), detect_superglue_task(path, encoding)
    if glue is not None:
        fits = set(glue.columns) <= set(roles)
        if not fits and not columns:
            raise wrong_task_error(path, "GLUE", glue.name, glue.task, task)
        named = resolve_columns({**(glue.columns if fits else {}), **columns}, roles)
        return named, read_glue_records(glue, path, encoding, notes)
    if superglue is not None and not columns:
        if task != superglue.task and (task, superglue.task) != ("pair", "word-in-context"):
            raise wrong_task_error(path, "SuperGLUE", superglue.name, superglue.task, task)
        return resolve_columns(None, roles), read_superglue_records(superglue, path, encoding)
    named = resolve_columns(columns, roles)
    if task == "tag" and data_extension(path) in CONLL_EXTENSIONS:
        return named, read_conll_records(path, encoding, named, require_labels)
    return named, read_file_records(path, task, encoding)


def wrong_task_error(path: Path, suite: str, name: str, expected_task: str, given_task: str) -> UserError:
    return UserError(
        f"{path}: {suite}'s {name} is a {quote(expected_task)} task, not {quote(given_task)}. "
        f"Pass --task {expected_task}."
    )


def replace_surrogates_in_records(records: Iterable[tuple[int, dict[str, Any]]], notes: RowNotes) -> NumberedRecords:
    """Replace lone surrogates, which tokenizers reject, and note the rows."""
    for number, record in records:
        repaired = replace_surrogates_in_value(record)
        if repaired != record:
            notes.add("example", "with lone surrogates replaced by U+FFFD", f"line {number:,}")
        yield number, repaired


def replace_surrogates_in_value(value: Any) -> Any:
    """Replace lone surrogates in every string of a nested value, keys included."""
    if isinstance(value, str):
        return value if value.isascii() else replace_lone_surrogates(value)
    if isinstance(value, list):
        return [replace_surrogates_in_value(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates_in_value(key): replace_surrogates_in_value(item) for key, item in value.items()}
    return value


def read_file_records(path: Path, task: str, encoding: str) -> NumberedRecords:
    """Return the rows of a file as records with their line numbers."""
    kind = data_extension(path)
    if kind == ".txt" and task == "analogy":
        return read_analogy_records(path, encoding)
    if task == "word-similarity" and (kind == ".txt" or (kind == ".tsv" and has_no_header(path, encoding))):
        return read_word_similarity_records(path, encoding)
    if kind == ".txt" and task == "lm":
        return read_text_documents(path, encoding)
    if kind not in LABELLED_READERS:
        kinds = ", ".join([*LABELLED_READERS, *EXTRA_EXTENSIONS_BY_TASK.get(task, ())])
        if path.is_dir():
            raise UserError(f"{path} is a folder. Name one file: {kinds}, plain or as {COMPRESSED_EXTENSIONS_TEXT}.")
        raise UserError(
            f"{path}: labelled files are {kinds}, plain or as {COMPRESSED_EXTENSIONS_TEXT}; "
            f"{quote(kind or 'this')} is not."
        )
    return LABELLED_READERS[kind](path, encoding)


def read_text_documents(path: Path, encoding: str) -> NumberedRecords:
    """Yield the documents of a .txt file, split on blank lines, then print how it was split."""
    corpus = Corpus(path, "blank-line", encoding=encoding)
    for document in corpus:
        yield int(document.source.rpartition(":")[2]), {"text": document.text}
    say(corpus.describe())


def read_analogy_records(path: Path, encoding: str) -> NumberedRecords:
    """Yield analogies in the format of Google's questions-words.txt: four words on a line, under `: section`."""
    section = ""
    for number, line in enumerate(read_record_lines(path, encoding), 1):
        words = line.split()
        if line.startswith(":"):
            section = line[1:].strip()
        elif len(words) == 4:
            yield number, {**({"section": section} if section else {}), **dict(zip("abcd", words, strict=True))}
        elif words:
            raise UserError(f"{path}:{number}: {format_count(len(words), 'word')}, but an analogy has 4.")


def has_no_header(path: Path, encoding: str) -> bool:
    """Whether the first line of a file is a comment or a data row."""
    first = next(read_record_lines(path, encoding), "")
    return first.startswith("#") or is_numeric_string(first.rpartition("\t")[2])


def read_word_similarity_records(path: Path, encoding: str) -> NumberedRecords:
    """Yield rows of two words and a score, with `#` comments, as in gensim's wordsim353.tsv and simlex999.txt."""
    for number, line in enumerate(read_record_lines(path, encoding), 1):
        cells = line.split("\t") if "\t" in line else line.split()
        if line.startswith("#") or not line.strip():
            continue
        if len(cells) != 3:
            raise UserError(f"{path}:{number}: {line.strip()[:60]!r} is not two words and a number.")
        yield number, dict(zip(("word1", "word2", "score"), map(str.strip, cells), strict=True))


def read_json_file_records(path: Path, encoding: str) -> NumberedRecords:
    """Yield the objects of a JSON list, of SQuAD's nested format, or of JSON Lines; numbered from 1."""
    text = "".join(read_lines(path, encoding, bound_size=True))
    try:
        content = parse_json(text, str(path))
    except UserError:
        if is_json_object(text.lstrip().partition("\n")[0]):
            yield from read_jsonl_records(path, encoding, bound_size=True)
            return
        raise
    data = content["data"] if isinstance(content, dict) and "data" in content else content
    if isinstance(data, dict):
        data = [data]
    if not isinstance(data, list):
        raise UserError(f"{path}: neither a list of objects nor SQuAD's format.")
    nested = any(isinstance(item, dict) and "paragraphs" in item for item in data)
    for number, item in enumerate(flatten_squad_articles(data, str(path)) if nested else data, 1):
        if not isinstance(item, dict):
            raise UserError(f"{path}: item {number} is not an object.")
        yield number, item


def is_json_object(line: str) -> bool:
    try:
        return isinstance(parse_json(line, ""), dict)
    except UserError:
        return False


# All examples are held in memory, where documents are read one by one.
LABELLED_READERS: dict[str, Callable[[Path, str], NumberedRecords]] = {
    **{kind: partial(reader, bound_size=True) for kind, reader in TABLES.items()},
    ".json": read_json_file_records,
}
