"""SuperGLUE's own .jsonl files, cast into the kinds of examples that other files have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.text.examples import RECORD_ENTITIES_COLUMN
from firth.text.formats.glue import find_first_file
from firth.text.formats.squad import find_nearest_occurrence
from firth.text.records import data_extension, read_jsonl_records
from firth.text.suite import SuiteTask, find_task_folders, normalize_task_name

JsonRecord = dict[str, Any]
RECORD_PLACEHOLDER = "@placeholder"
COPA_QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
MULTIRC_MARKUP = re.compile(r"<b>Sent \d+: </b>|<br>")


@dataclass(frozen=True)
class SuperGlueTask:
    """A task of SuperGLUE: its kind, columns that tell its files, how a line is cast, its official metrics."""

    name: str
    task: str
    signature_columns: tuple[str, ...]
    convert: Callable[[JsonRecord], Iterator[JsonRecord]]
    metrics: tuple[str, ...] = ("accuracy",)


def optional_label(record: JsonRecord, role: str, value: Any) -> JsonRecord:
    """The answer under a role's name, where the file has answers."""
    return {role: value} if value is not None else {}


def convert_boolq(record: JsonRecord) -> Iterator[JsonRecord]:
    """A pair: the passage and the question, "true" or "false"."""
    texts = {"text_a": record["passage"], "text_b": record["question"]}
    yield {"id": record["idx"], **texts, **optional_label(record, "label", record.get("label"))}


def convert_entailment(record: JsonRecord) -> Iterator[JsonRecord]:
    """CB and RTE, a pair: the premise and the hypothesis."""
    texts = {"text_a": record["premise"], "text_b": record["hypothesis"]}
    yield {"id": record["idx"], **texts, **optional_label(record, "label", record.get("label"))}


def convert_copa(record: JsonRecord) -> Iterator[JsonRecord]:
    """A choice of two: the premise followed by what is asked, its cause or its effect."""
    context = f"{record['premise']} {COPA_QUESTIONS[record['question']]}"
    choices = [record["choice1"], record["choice2"]]
    yield {
        "id": record["idx"],
        "context": context,
        "choices": choices,
        **optional_label(record, "gold", record.get("label")),
    }


def convert_multirc(record: JsonRecord) -> Iterator[JsonRecord]:
    """A pair for each answer of each question: the paragraph and the question, the answer; "1" if it is right.

    The id is PARAGRAPH-QUESTION-ANSWER: a question is answered when each of its answers is told right from wrong.
    """
    passage = record["passage"]
    paragraph = " ".join(MULTIRC_MARKUP.sub(" ", passage["text"]).split())
    for question in passage["questions"]:
        for one in question["answers"]:
            yield {
                "id": f"{record['idx']}-{question['idx']}-{one['idx']}",
                "text_a": f"{paragraph} {question['question']}",
                "text_b": one["text"],
                **optional_label(record, "label", one.get("label")),
            }


def convert_record(record: JsonRecord) -> Iterator[JsonRecord]:
    """ReCoRD, a choice over the entities of the passage: each choice is the query with one in its gap.

    The spans of an example are the entity in each choice; its references are all entities that are right, and its
    target is the first choice that has one (see `choice` for when there is none).
    """
    passage, marked = record["passage"]["text"], record["passage"]["entities"]
    # The end of an entity is its last character. Of those that are spelled alike one is enough.
    entities = list(dict.fromkeys(passage[entity["start"] : entity["end"] + 1] for entity in marked))
    for query in record["qas"]:
        before, _, after = query["query"].partition(RECORD_PLACEHOLDER)
        right = list(dict.fromkeys(one["text"] for one in query.get("answers") or []))
        gold = next((i for i, entity in enumerate(entities) if entity in right), None)
        yield {
            "id": query["idx"],
            "context": re.sub(r"\s*@highlight\s*", " ", passage).strip(),
            "choices": [before + entity + after for entity in entities],
            RECORD_ENTITIES_COLUMN: {
                "spans": [(len(before), len(before) + len(entity)) for entity in entities],
                "right": right,
            },
            **optional_label(record, "gold", gold),
        }


def convert_wic(record: JsonRecord) -> Iterator[JsonRecord]:
    """A word in two texts, with its characters in each: "true" if it means the same."""
    yield {
        "id": record["idx"],
        "word": record["word"],
        "text_a": record["sentence1"],
        "text_b": record["sentence2"],
        "span_a": [int(record["start1"]), int(record["end1"])],
        "span_b": [int(record["start2"]), int(record["end2"])],
        **optional_label(record, "label", record.get("label")),
    }


def convert_wsc(record: JsonRecord) -> Iterator[JsonRecord]:
    """A relation: the text with two marked stretches, a noun and a pronoun; "true" if they are the same thing."""
    text, marked = record["text"], record["target"]
    yield {
        "id": record["idx"],
        "text": text,
        "head": find_marked_span(text, marked["span1_index"], marked["span1_text"]),
        "tail": find_marked_span(text, marked["span2_index"], marked["span2_text"]),
        **optional_label(record, "label", record.get("label")),
    }


def find_marked_span(text: str, word_index: int, words: str) -> list[int]:
    """The characters of some words: their occurrence nearest to word `word_index`, or, spelled otherwise, what stands there.

    >>> find_marked_span("Mark told Pete lies about Mark.", 5, "mark"), find_marked_span("He saw her.", 2, "she")
    ([26, 30], [7, 11])
    """
    places = [word.span() for word in re.finditer(r"\S+", text)][word_index:]
    start = find_nearest_occurrence(text.lower(), words.lower(), places[0][0])
    if start is not None:
        return [start, start + len(words)]
    return [places[0][0], places[: len(words.split())][-1][1]]


SUPERGLUE_TASKS = {
    "boolq": SuperGlueTask("boolq", "pair", ("passage", "question"), convert_boolq),
    "cb": SuperGlueTask("cb", "pair", ("premise", "hypothesis"), convert_entailment, ("accuracy", "macro_f1")),
    "copa": SuperGlueTask("copa", "choice", ("premise", "choice1", "choice2", "question"), convert_copa),
    "multirc": SuperGlueTask("multirc", "pair", ("passage",), convert_multirc, ("f1", "exact_match")),
    "record": SuperGlueTask("record", "choice", ("passage", "qas"), convert_record, ("f1", "exact_match")),
    "rte": SuperGlueTask("rte", "pair", ("premise", "hypothesis"), convert_entailment),
    "wic": SuperGlueTask("wic", "word-in-context", ("sentence1", "sentence2", "start1", "end1"), convert_wic),
    "wsc": SuperGlueTask("wsc", "relation", ("text", "target"), convert_wsc),
}


def detect_superglue_task(path: str | Path, encoding: str = "utf-8") -> SuperGlueTask | None:
    """The task of SuperGLUE that a file belongs to, by its folder and its first line; None for any other file."""
    path = Path(path)
    task = SUPERGLUE_TASKS.get(normalize_task_name(path.parent.name))
    if task is None or data_extension(path) != ".jsonl" or not path.is_file():
        return None
    _, first = next(read_jsonl_records(path, encoding), (0, {}))
    return task if {"idx", *task.signature_columns} <= set(first) else None


def read_superglue_records(task: SuperGlueTask, path: Path, encoding: str) -> Iterator[tuple[int, JsonRecord]]:
    """The lines of a file, cast; one line may become many records."""
    for number, record in read_jsonl_records(path, encoding):
        try:
            yield from ((number, made) for made in task.convert(record))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
            raise UserError(f"{path}:{number}: not as in SuperGLUE's {task.name} (see {e}).") from None


def find_superglue_suite(folder: str | Path) -> dict[str, SuiteTask]:
    """The tasks of SuperGLUE that a folder has, by name: each in a folder of its own, as in the official download."""
    suite = {}
    for name, place in find_task_folders(folder, "SuperGLUE", SUPERGLUE_TASKS).items():
        train, dev, test = (find_first_file(place, (f"{part}.jsonl",)) for part in ("train", "val", "test"))
        task = SUPERGLUE_TASKS[name]
        parts = [{part: file} if file is not None else {} for part, file in (("dev", dev), ("test", test))]
        suite[name] = SuiteTask(name, task.task, train, parts[0], parts[1], task.metrics)
    return suite
