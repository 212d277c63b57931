"""Read SuperGLUE's .jsonl files and convert their records to the columns of Firth's tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firth.core.errors import UserError, shorten
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
    """A SuperGLUE task: its task kind, the columns that identify its files, its converter and official metrics."""

    name: str
    task: str
    signature_columns: tuple[str, ...]
    convert: Callable[[JsonRecord], Iterator[JsonRecord]]
    metrics: tuple[str, ...] = ("accuracy",)


def optional_label(record: JsonRecord, role: str, value: Any) -> JsonRecord:
    """Return {role: value}, or an empty dictionary if the file has no label."""
    return {role: value} if value is not None else {}


def convert_boolq(record: JsonRecord) -> Iterator[JsonRecord]:
    """Convert to a pair: passage and question, with the label "true" or "false"."""
    texts = {"text_a": record["passage"], "text_b": record["question"]}
    yield {"id": record["idx"], **texts, **optional_label(record, "label", record.get("label"))}


def convert_entailment(record: JsonRecord) -> Iterator[JsonRecord]:
    """Convert CB and RTE to a pair: premise and hypothesis."""
    texts = {"text_a": record["premise"], "text_b": record["hypothesis"]}
    yield {"id": record["idx"], **texts, **optional_label(record, "label", record.get("label"))}


def convert_copa(record: JsonRecord) -> Iterator[JsonRecord]:
    """Convert to a choice of two: the premise followed by a question for its cause or effect."""
    context = f"{record['premise']} {COPA_QUESTIONS[record['question']]}"
    choices = [record["choice1"], record["choice2"]]
    yield {
        "id": record["idx"],
        "context": context,
        "choices": choices,
        **optional_label(record, "gold", record.get("label")),
    }


def convert_multirc(record: JsonRecord) -> Iterator[JsonRecord]:
    """Convert each answer to a pair: paragraph with question, and answer; the label of a right answer is "1".

    The id is PARAGRAPH-QUESTION-ANSWER, by which exact match groups the answers of a question.
    """
    passage = record["passage"]
    paragraph = " ".join(MULTIRC_MARKUP.sub(" ", passage["text"]).split())
    for question in passage["questions"]:
        for answer in question["answers"]:
            yield {
                "id": f"{record['idx']}-{question['idx']}-{answer['idx']}",
                "text_a": f"{paragraph} {question['question']}",
                "text_b": answer["text"],
                **optional_label(record, "label", answer.get("label")),
            }


def convert_record(record: JsonRecord) -> Iterator[JsonRecord]:
    """Convert ReCoRD to a choice over the entities of the passage: the query with each entity in its gap.

    The example's spans are the entity in each choice. Its references are all right entities; its target is the first
    choice with one of them (`parse_choice_row` handles a query without any).
    """
    passage, marked = record["passage"]["text"], record["passage"]["entities"]
    # `end` is inclusive. Entities with the same spelling become one choice.
    entities = list(dict.fromkeys(passage[entity["start"] : entity["end"] + 1] for entity in marked))
    for query in record["qas"]:
        before, _, after = query["query"].partition(RECORD_PLACEHOLDER)
        right = list(dict.fromkeys(answer["text"] for answer in query.get("answers") or []))
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
    """Convert to word-in-context: a word and its span in two texts; the label of the same meaning is "true"."""
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
    """Convert to a relation: spans of a noun and a pronoun; the label of coreference is "true"."""
    text, marked = record["text"], record["target"]
    yield {
        "id": record["idx"],
        "text": text,
        "head": find_marked_span(text, marked["span1_index"], marked["span1_text"]),
        "tail": find_marked_span(text, marked["span2_index"], marked["span2_text"]),
        **optional_label(record, "label", record.get("label")),
    }


def find_marked_span(text: str, word_index: int, words: str) -> list[int]:
    """Return the character span of `words` nearest to word `word_index`, or of the words at `word_index` itself.

    >>> find_marked_span("Mark told Pete lies about Mark.", 5, "mark"), find_marked_span("He saw her.", 2, "she")
    ([26, 30], [7, 11])
    """
    spans = [word.span() for word in re.finditer(r"\S+", text)][word_index:]
    start = find_nearest_occurrence(text.lower(), words.lower(), spans[0][0])
    if start is not None:
        return [start, start + len(words)]
    return [spans[0][0], spans[: len(words.split())][-1][1]]


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
    """Return the SuperGLUE task of a file, by its folder and its first line; None for any other file."""
    path = Path(path)
    task = SUPERGLUE_TASKS.get(normalize_task_name(path.parent.name))
    if task is None or data_extension(path) != ".jsonl" or not path.is_file():
        return None
    _, first = next(read_jsonl_records(path, encoding), (0, {}))
    return task if {"idx", *task.signature_columns} <= set(first) else None


def read_superglue_records(task: SuperGlueTask, path: Path, encoding: str) -> Iterator[tuple[int, JsonRecord]]:
    """Yield the converted records of a file; one line may give several."""
    for number, record in read_jsonl_records(path, encoding, bound_size=True):
        try:
            yield from ((number, made) for made in task.convert(record))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError) as e:
            raise UserError(f"{path}:{number}: not in the format of SuperGLUE's {task.name} ({shorten(e)}).") from None


def find_superglue_suite(folder: str | Path) -> dict[str, SuiteTask]:
    """Return the SuperGLUE tasks in a folder by name, one subfolder each, as in the official download."""
    suite = {}
    for name, task_folder in find_task_folders(folder, "SuperGLUE", SUPERGLUE_TASKS).items():
        train, dev, test = (find_first_file(task_folder, (f"{split}.jsonl",)) for split in ("train", "val", "test"))
        task = SUPERGLUE_TASKS[name]
        sets = [{split: file} if file is not None else {} for split, file in (("dev", dev), ("test", test))]
        suite[name] = SuiteTask(name, task.task, train, sets[0], sets[1], task.metrics)
    return suite
