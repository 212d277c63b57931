"""SuperGLUE's own .jsonl files, cast into the kinds of examples that other files have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firth.errors import UserError
from firth.text.examples import ENTITIES
from firth.text.glue import first_file
from firth.text.records import extension, json_records
from firth.text.squad import nearest_place
from firth.text.suite import SuiteTask, folder_of, simple

Record = dict[str, Any]
PLACEHOLDER = "@placeholder"
ASKED = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
MARKUP = re.compile(r"<b>Sent \d+: </b>|<br>")


@dataclass(frozen=True)
class SuperGlueTask:
    """A task of SuperGLUE: its kind, columns that tell its files, how a line is cast, its official metrics."""

    name: str
    task: str
    known_by: tuple[str, ...]
    cast: Callable[[Record], Iterator[Record]]
    metrics: tuple[str, ...] = ("accuracy",)


def answer(record: Record, role: str, value: Any) -> Record:
    """The answer under a role's name, where the file has answers."""
    return {role: value} if value is not None else {}


def boolq(record: Record) -> Iterator[Record]:
    """A pair: the passage and the question, "true" or "false"."""
    texts = {"text_a": record["passage"], "text_b": record["question"]}
    yield {"id": record["idx"], **texts, **answer(record, "label", record.get("label"))}


def entailment(record: Record) -> Iterator[Record]:
    """CB and RTE, a pair: the premise and the hypothesis."""
    texts = {"text_a": record["premise"], "text_b": record["hypothesis"]}
    yield {"id": record["idx"], **texts, **answer(record, "label", record.get("label"))}


def copa(record: Record) -> Iterator[Record]:
    """A choice of two: the premise followed by what is asked, its cause or its effect."""
    context = f"{record['premise']} {ASKED[record['question']]}"
    choices = [record["choice1"], record["choice2"]]
    yield {"id": record["idx"], "context": context, "choices": choices, **answer(record, "gold", record.get("label"))}


def multirc(record: Record) -> Iterator[Record]:
    """A pair for each answer of each question: the paragraph and the question, the answer; "1" if it is right.

    The id is PARAGRAPH-QUESTION-ANSWER: a question is answered when each of its answers is told right from wrong.
    """
    passage = record["passage"]
    paragraph = " ".join(MARKUP.sub(" ", passage["text"]).split())
    for question in passage["questions"]:
        for one in question["answers"]:
            yield {
                "id": f"{record['idx']}-{question['idx']}-{one['idx']}",
                "text_a": f"{paragraph} {question['question']}",
                "text_b": one["text"],
                **answer(record, "label", one.get("label")),
            }


def record_(record: Record) -> Iterator[Record]:
    """ReCoRD, a choice over the entities of the passage: each choice is the query with one in its gap.

    The spans of an example are the entity in each choice; its references are all entities that are right, and its
    target is the first choice that has one (see `choice` for when there is none).
    """
    passage, marked = record["passage"]["text"], record["passage"]["entities"]
    # The end of an entity is its last character. Of those that are spelled alike one is enough.
    entities = list(dict.fromkeys(passage[entity["start"] : entity["end"] + 1] for entity in marked))
    for query in record["qas"]:
        before, _, after = query["query"].partition(PLACEHOLDER)
        right = list(dict.fromkeys(one["text"] for one in query.get("answers") or []))
        gold = next((i for i, entity in enumerate(entities) if entity in right), None)
        yield {
            "id": query["idx"],
            "context": re.sub(r"\s*@highlight\s*", " ", passage).strip(),
            "choices": [before + entity + after for entity in entities],
            ENTITIES: {"spans": [(len(before), len(before) + len(entity)) for entity in entities], "right": right},
            **answer(record, "gold", gold),
        }


def wic(record: Record) -> Iterator[Record]:
    """A word in two texts, with its characters in each: "true" if it means the same."""
    yield {
        "id": record["idx"],
        "word": record["word"],
        "text_a": record["sentence1"],
        "text_b": record["sentence2"],
        "span_a": [int(record["start1"]), int(record["end1"])],
        "span_b": [int(record["start2"]), int(record["end2"])],
        **answer(record, "label", record.get("label")),
    }


def wsc(record: Record) -> Iterator[Record]:
    """A relation: the text with two marked stretches, a noun and a pronoun; "true" if they are the same thing."""
    text, marked = record["text"], record["target"]
    yield {
        "id": record["idx"],
        "text": text,
        "head": marked_words(text, marked["span1_index"], marked["span1_text"]),
        "tail": marked_words(text, marked["span2_index"], marked["span2_text"]),
        **answer(record, "label", record.get("label")),
    }


def marked_words(text: str, index: int, words: str) -> list[int]:
    """The characters of some words: their occurrence nearest to word `index`, or, spelled otherwise, what stands there.

    >>> marked_words("Mark told Pete lies about Mark.", 5, "mark"), marked_words("He saw her.", 2, "she")
    ([26, 30], [7, 11])
    """
    places = [word.span() for word in re.finditer(r"\S+", text)][index:]
    start = nearest_place(text.lower(), words.lower(), places[0][0])
    if start is not None:
        return [start, start + len(words)]
    return [places[0][0], places[: len(words.split())][-1][1]]


SUPERGLUE = {
    "boolq": SuperGlueTask("boolq", "pair", ("passage", "question"), boolq),
    "cb": SuperGlueTask("cb", "pair", ("premise", "hypothesis"), entailment, ("accuracy", "macro_f1")),
    "copa": SuperGlueTask("copa", "choice", ("premise", "choice1", "choice2", "question"), copa),
    "multirc": SuperGlueTask("multirc", "pair", ("passage",), multirc, ("f1", "exact_match")),
    "record": SuperGlueTask("record", "choice", ("passage", "qas"), record_, ("f1", "exact_match")),
    "rte": SuperGlueTask("rte", "pair", ("premise", "hypothesis"), entailment),
    "wic": SuperGlueTask("wic", "word-in-context", ("sentence1", "sentence2", "start1", "end1"), wic),
    "wsc": SuperGlueTask("wsc", "relation", ("text", "target"), wsc),
}


def superglue_task(path: str | Path, encoding: str = "utf-8") -> SuperGlueTask | None:
    """The task of SuperGLUE that a file belongs to, by its folder and its first line; None for any other file."""
    path = Path(path)
    task = SUPERGLUE.get(simple(path.parent.name))
    if task is None or extension(path) != ".jsonl" or not path.is_file():
        return None
    _, first = next(json_records(path, encoding), (0, {}))
    return task if {"idx", *task.known_by} <= set(first) else None


def superglue_records(task: SuperGlueTask, path: Path, encoding: str) -> Iterator[tuple[int, Record]]:
    """The lines of a file, cast; one line may become many records."""
    for number, record in json_records(path, encoding):
        try:
            yield from ((number, made) for made in task.cast(record))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
            raise UserError(f"{path}:{number}: not as in SuperGLUE's {task.name} (see {e}).") from None


def superglue_suite(folder: str | Path) -> dict[str, SuiteTask]:
    """The tasks of SuperGLUE that a folder has, by name: each in a folder of its own, as in the official download."""
    suite = {}
    for name, place in folder_of(folder, "SuperGLUE", SUPERGLUE).items():
        train, dev, test = (first_file(place, (f"{part}.jsonl",)) for part in ("train", "val", "test"))
        task = SUPERGLUE[name]
        parts = [{part: file} if file is not None else {} for part, file in (("dev", dev), ("test", test))]
        suite[name] = SuiteTask(name, task.task, train, parts[0], parts[1], task.metrics)
    return suite
