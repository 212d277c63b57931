"""Read labelled files of every format, plain or compressed, into examples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from firth.console import count, say
from firth.errors import UserError, nearest
from firth.text import pydocs
from firth.text.clean import repair
from firth.text.conll import conll_records
from firth.text.corpus import Corpus
from firth.text.examples import TASKS
from firth.text.glue import glue_records, glue_task
from firth.text.kinds import Example as Example
from firth.text.lines import PACKINGS, known_encoding, lines
from firth.text.records import READERS as TABLES
from firth.text.records import NoColumn, Records, extension, is_number, json_records, rename
from firth.text.row import Notes, Row
from firth.text.squad import squad_records
from firth.text.superglue import superglue_records, superglue_task

COLUMN_FILES = (".txt", ".conll", ".bio", ".iob")
MORE_FILES = {"tag": COLUMN_FILES, "lm": (".txt",)}  # that a task takes beside tables


def read_labelled(
    path: str | Path,
    task: str,
    columns: Mapping[str, str] | None = None,
    part: str = "train",
    encoding: str = "utf-8",
    answers: bool = True,
    notes: Notes | None = None,
) -> list[Example]:
    """The examples of a file, in its order (see `Example` for what each task has).

    The columns are those of `TASKS`, unless `columns={"text": "sentence"}` names others. The files of GLUE and
    SuperGLUE are known by their folder, and need no names. Without `answers` a file may lack them, as a test set
    does. The path "pydocs" is the built-in data; there `part` chooses between "train" and "dev". Elsewhere it says what
    a file is for: what is scored on ("dev") keeps answers, and rows, that nothing could be learned from.
    What happened to rows is said, and kept in `notes`.
    """
    if task not in TASKS:
        raise UserError(f"task {task!r} is not known. {nearest(task, TASKS)}")
    if path == pydocs.NAME:
        return pydocs.examples(task, part)
    notes = Notes(str(path)) if notes is None else notes
    named, records = open_file(Path(path), task, dict(columns or {}), known_encoding(encoding), answers, notes)
    make = TASKS[task].example
    item = " item " if extension(Path(path)) == ".json" else ""  # such a file is not counted in lines
    rows = (
        Row(record, named, f"{path}:{item}{number}", number, answers, notes, part)
        for number, record in whole_characters(records, notes)
    )
    try:
        examples = [example for row in rows if (example := make(row)) is not None]
    except NoColumn as e:
        other = None if columns else known_by(e.there)
        raise UserError(f"{e} Or is it a file for --task {other}?" if other not in (None, task) else str(e)) from None
    notes.tell()
    if not examples:
        raise UserError(f"{path}: no examples in this file.")
    return examples


# By which columns a task is known, the first that has all of one tuple; for what is not asked, as a label, any will do.
KNOWN_BY: list[tuple[str, tuple[str, ...]]] = [
    ("span-qa", ("question", "context")),
    ("choice", ("context", "choices")),
    ("choice", ("context", "choice1")),
    ("cloze", ("context", "answer")),
    ("text-to-text", ("source",)),
    ("lm", ("messages",)),
    ("lm", ("prompt", "response")),
    ("minimal-pairs", ("good", "bad")),
    ("minimal-pairs", ("sentence_good", "sentence_bad")),
    ("tag", ("tokens",)),
    ("pair", ("text_a", "text_b")),
    ("regress", ("text_a",)),
    ("classify", ("text",)),
]


def known_by(columns: Iterable[str]) -> str | None:
    """The task whose columns these are, if they are some task's."""
    there = set(columns)
    return next((task for task, names in KNOWN_BY if there >= set(names)), None)


def task_of(path: str | Path, columns: Mapping[str, str] | None = None, encoding: str = "utf-8") -> str:
    """The kind of task whose texts a labelled file has, by its name or its columns."""
    if path == pydocs.NAME:
        return "classify"
    path = Path(path)
    if known := glue_task(path, encoding) or superglue_task(path, encoding):
        return known.task
    if extension(path) in COLUMN_FILES:
        return "tag"
    _, record = next(iter(file_records(path, "", known_encoding(encoding))), (0, {}))
    if task := known_by(record.keys() | (columns or {}).keys()):
        return task
    raise UserError(
        f"{path}: its columns ({', '.join(map(str, record)) or 'none'}) are those of no task. Name it with --task, "
        "and columns of other names with --labelled-columns, as text=sentence."
    )


def open_file(
    path: Path, task: str, columns: dict[str, str], encoding: str, answers: bool, notes: Notes
) -> tuple[Mapping[str, str], Records]:
    """The column of each role, and the records of a file: a known benchmark's, columns of words, or any other."""
    roles = ("id", *TASKS[task].roles)
    glue, superglue = glue_task(path, encoding), superglue_task(path, encoding)
    if glue is not None:
        fits = set(glue.columns) <= set(roles)
        if not fits and not columns:
            raise other_task(path, "GLUE", glue.name, glue.task, task)
        named = rename({**(glue.columns if fits else {}), **columns}, roles)
        return named, glue_records(glue, path, encoding, notes)
    if superglue is not None and not columns:
        if task != superglue.task and (task, superglue.task) != ("pair", "word-in-context"):
            raise other_task(path, "SuperGLUE", superglue.name, superglue.task, task)
        return rename(None, roles), superglue_records(superglue, path, encoding)
    named = rename(columns, roles)
    if task == "tag" and extension(path) in COLUMN_FILES:
        return named, conll_records(path, encoding, named, answers)
    return named, file_records(path, task, encoding)


def other_task(path: Path, suite: str, name: str, right: str, task: str) -> UserError:
    return UserError(f"{path}: {name} of {suite} is a task of the kind {right!r}, not {task!r}. Pass --task {right}.")


def whole_characters(records: Iterable[tuple[int, dict[str, Any]]], notes: Notes) -> Records:
    """Replace half characters, which no tokenizer takes, and note where."""
    for number, record in records:
        whole = repaired(record)
        if whole != record:
            notes.add("example", "with half characters (lone surrogates) replaced by U+FFFD", f"line {number:,}")
        yield number, whole


def repaired(value: Any) -> Any:
    """The same value, each text in it repaired."""
    if isinstance(value, str):
        return value if value.isascii() else repair(value)
    if isinstance(value, list):
        return [repaired(item) for item in value]
    return {key: repaired(item) for key, item in value.items()} if isinstance(value, dict) else value


def file_records(path: Path, task: str, encoding: str) -> Records:
    """The rows of a file by column name, each with the number of its first line."""
    kind = extension(path)
    if kind == ".txt" and task == "analogy":
        return analogy_records(path, encoding)
    if task == "word-similarity" and (kind == ".txt" or (kind == ".tsv" and names_no_columns(path, encoding))):
        return similarity_records(path, encoding)
    if kind == ".txt" and task == "lm":
        return text_records(path, encoding)
    if kind not in READERS:
        kinds = ", ".join([*READERS, *MORE_FILES.get(task, ())])
        if path.is_dir():
            raise UserError(f"{path} is a folder, and one file is wanted here: {kinds}, plain or as {PACKINGS}.")
        raise UserError(f"{path}: labelled files are {kinds}, plain or as {PACKINGS}; {kind or 'this'!r} is not.")
    return READERS[kind](path, encoding)


def text_records(path: Path, encoding: str) -> Records:
    """The documents of a plain text, which blank lines end; that is said."""
    corpus = Corpus(path, "blank-line", encoding=encoding)
    for document in corpus:
        yield int(document.source.rpartition(":")[2]), {"text": document.text}
    say(corpus.describe())


def analogy_records(path: Path, encoding: str) -> Records:
    """Four words on a line, under `: section`, as Google's questions-words.txt has them."""
    section = ""
    for number, line in enumerate(lines(path, encoding), 1):
        words = line.split()
        if line.startswith(":"):
            section = line[1:].strip()
        elif len(words) == 4:
            yield number, {**({"section": section} if section else {}), **dict(zip("abcd", words, strict=True))}
        elif words:
            raise UserError(f"{path}:{number}: {count(len(words), 'word')}, but an analogy has 4.")


def names_no_columns(path: Path, encoding: str) -> bool:
    """Whether a file begins with a remark, or at once with a pair of words and a number."""
    first = next(iter(lines(path, encoding)), "")
    return first.startswith("#") or is_number(first.rpartition("\t")[2])


def similarity_records(path: Path, encoding: str) -> Records:
    """Two words and a number on a line, `#` before remarks, as gensim's wordsim353.tsv and simlex999.txt have them."""
    for number, line in enumerate(lines(path, encoding), 1):
        cells = line.split("\t") if "\t" in line else line.split()
        if line.startswith("#") or not line.strip():
            continue
        if len(cells) != 3:
            raise UserError(f"{path}:{number}: {line.strip()[:60]!r} is not two words and a number.")
        yield number, dict(zip(("word1", "word2", "score"), map(str.strip, cells), strict=True))


def json_file(path: Path, encoding: str) -> Records:
    """A list of objects, SQuAD's nested questions, or one object per line all the same; numbered from 1."""
    text = "".join(lines(path, encoding))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as e:
        if is_object(text.lstrip().partition("\n")[0]):
            yield from json_records(path, encoding)
            return
        raise UserError(f"{path}: not JSON ({e}).") from None
    data = content["data"] if isinstance(content, dict) and "data" in content else content
    if isinstance(data, dict):
        data = [data]
    if not isinstance(data, list):
        raise UserError(f"{path}: not a list of objects, nor SQuAD's own form.")
    nested = any(isinstance(item, dict) and "paragraphs" in item for item in data)
    for number, item in enumerate(squad_records(data, str(path)) if nested else data, 1):
        if not isinstance(item, dict):
            raise UserError(f"{path}: item {number} is not an object.")
        yield number, item


def is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


READERS = {**TABLES, ".json": json_file}
