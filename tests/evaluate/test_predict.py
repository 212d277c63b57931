"""Predict with a fine-tuned model: every task, every form of input, long texts, files, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import firth
from firth.cli.main import app
from firth.core.errors import UserError
from firth.core.files import write_json
from firth.evaluate.long_inputs import begins_word, encode_in_windows, split_at_words
from firth.evaluate.predict import Predictor
from firth.evaluate.predict_input import TaskInput
from firth.evaluate.predict_output import format_prediction, mark_spans, write_predictions
from firth.generate import GeneratedSequence
from firth.models import Model, load_model, make_model
from firth.tasks import TASK_FILE, make_task
from firth.tasks.head_task import HeadTask
from firth.tasks.prompts import encode_messages
from firth.tasks.recipe import read_task_file
from firth.text import Example
from firth.train import ComputeConfig

LENGTH = 24  # positions of the encoder
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
Ask = Callable[..., Path]
TASK_FACTS: dict[str, dict[str, Any]] = {
    "classify": {"labels": ["animal", "place"]},
    "pair": {"labels": ["no", "yes"]},
    "regress": {"texts": 1},
    "relation": {"labels": ["none", "owns"]},
    "word-in-context": {"labels": ["false", "true"]},
    "tag": {"labels": ["B-PER", "I-PER", "O"]},
    "span-qa": {"unanswerable": True, "threshold": 0.999},
    "choice": {},
    "text-to-text": {"max_target_length": 4},
    "lm": {},
    "embed": {},
}


@pytest.fixture(scope="module")
def tuned(untrained: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """`tuned("tag", labels=[...])`: a checkpoint as fine-tuning leaves it, with a random head."""

    def make(task: str, family: str = "bert", **facts: Any) -> Path:
        base = untrained(family)
        assert base.tokenizer is not None
        made = make_task(task, {"answer": "auto", **TASK_FACTS[task], **facts}, base.tokenizer, base.config)
        torch.manual_seed(1)
        model = make_model(replace(made.configure_model(base.config), vocab_size=made.tokenizer.vocab.size))
        model.tokenizer = made.tokenizer
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)
        folder = tmp_path_factory.mktemp("tuned") / "final"
        model.save(folder)
        write_json(folder / TASK_FILE, made.metadata())
        return folder

    return make


@pytest.fixture(scope="module")
def topics(tuned: Ask) -> Path:
    return tuned("classify")


RELATED = {"text": "Anna saw the cat", "head": [0, 4], "tail": [13, 16]}
SENSES = {"word": "cat", "text_a": "We saw the cat", "text_b": "The cat slept"}
INPUTS: list[tuple[str, str, Any, set[str]]] = [
    ("classify", "bert", "We saw the cat", {"label", "probability", "probabilities"}),
    ("classify", "gpt2", {"text": "We saw the cat", "label": "animal"}, {"label", "probability", "probabilities"}),
    ("classify", "t5", "We saw the cat", {"label", "probability", "probabilities"}),
    ("pair", "bert", ["We saw", "the cat"], {"label", "probability", "probabilities"}),
    ("regress", "bert", "We saw the cat", {"score"}),
    ("relation", "bert", {**RELATED, "label": "owns"}, {"label", "probability", "probabilities"}),
    ("relation", "gpt2", RELATED, {"label", "probability", "probabilities"}),
    ("word-in-context", "bert", {**SENSES, "label": True}, {"label", "probability", "probabilities"}),
    ("word-in-context", "gpt2", SENSES, {"label", "probability", "probabilities"}),
    ("tag", "bert", "Anna's cat saw the river.", {"spans"}),
    ("tag", "bert", {"tokens": ["Anna", "saw", "it"]}, {"spans"}),
    ("span-qa", "bert", ["Who saw it?", "Anna saw the cat."], {"answer", "start", "end", "probability"}),
    ("choice", "bert", ["We saw", "the cat", "a river"], {"choice", "text", "probability", "probabilities"}),
    ("text-to-text", "t5", "We saw the cat", {"text", "complete"}),
    ("lm", "gpt2", "We saw", {"text", "complete"}),
    ("embed", "bert", "We saw the cat", {"vector"}),
    ("embed", "bert", ["We saw the cat", "a river"], {"similarity"}),
]


@pytest.mark.parametrize(("task", "family", "asked", "fields"), INPUTS)
def test_every_task(tuned: Ask, task: str, family: str, asked: Any, fields: set[str]) -> None:
    folder = tuned(task, family)
    (record,) = firth.predict(folder, [asked])
    assert set(record) == fields
    json.dumps(record)
    if isinstance(asked, str | Mapping):
        assert firth.predict(folder, asked) == record


def test_equal_to_evaluation_in_any_order_and_batch(topics: Path, sentences: list[str], tmp_path: Path) -> None:
    texts = [text[:40] for text in sentences for _ in range(2)]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    firth.evaluate(topics, task="classify", data=str(data), output_dir=tmp_path / "out")
    expected = [json.loads(line) for line in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    for batch_size in (1, 5):
        records = Predictor(topics, batch_size=batch_size).predict(texts)
        assert [r["label"] for r in records] == [e["prediction"] for e in expected]
        for record, line in zip(records, expected, strict=True):
            assert record["probabilities"] == pytest.approx(line["scores"], abs=1e-5)


MARKED = {
    "relation": [
        {"text": "Anna saw the cat", "head": [0, 4], "tail": [13, 16], "label": "owns"},
        {"text": "Anna saw the cat", "head": [13, 16], "tail": [0, 4], "label": "none"},
        {"tokens": ["The", "cat", "saw", "Anna"], "head": [3, 4], "tail": [1, 2], "label": "none"},
    ],
    "word-in-context": [
        {"word": "cat", "text_a": "We saw the cat", "text_b": "The cat slept", "label": "true"},
        {"word": "saw", "text_a": "We saw the cat", "text_b": "Anna saw the river", "label": "true"},
        {"text_a": "We saw the cat", "text_b": "a river", "span_a": [11, 14], "span_b": [2, 7], "label": "false"},
    ],
}


@pytest.mark.parametrize("task", MARKED)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_marked_words(tuned: Ask, tmp_path: Path, task: str, family: str) -> None:
    """The same as `firth evaluate`, which spans are marked decides, and a text without marks is refused."""
    folder, data = tuned(task, family), tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in MARKED[task]), encoding="utf-8")
    firth.evaluate(folder, task=task, data=str(data), output_dir=tmp_path / "out")
    expected = [json.loads(line) for line in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    predictor = Predictor(folder, batch_size=2)
    records = predictor.predict(MARKED[task])
    assert [r["label"] for r in records] == [e["prediction"] for e in expected]
    for record, line in zip(records, expected, strict=True):
        assert record["probabilities"] == pytest.approx(line["scores"], abs=1e-5)
        assert (
            record["probability"] == record["probabilities"][record["label"]] == max(record["probabilities"].values())
        )
    assert records[0]["probabilities"] != records[1]["probabilities"]
    with pytest.raises(UserError, match=f"Input 1: the task {task} needs marked words. Give records with .*text"):
        predictor.predict(["Anna saw the cat"])


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_equal_to_the_pipeline_of_transformers(tuned: Ask, sentences: list[str], task: str) -> None:
    """The same folder without task.json: labels and probabilities of `transformers`, words and spans for tags."""
    from transformers import pipeline

    folder = tuned("classify" if task == "text-classification" else "tag")
    (folder / TASK_FILE).unlink()
    texts = [" ".join(text.replace(".", "").replace(",", "").split()[:6]) for text in sentences]
    records = firth.predict(folder, texts)
    if task == "text-classification":
        theirs = pipeline(task, model=str(folder), device="cpu", top_k=None)(texts)
        for record, scores in zip(records, theirs, strict=True):
            assert record["probabilities"] == pytest.approx({s["label"]: s["score"] for s in scores}, abs=1e-5)
        return
    tagger = pipeline(task, model=str(folder), device="cpu", aggregation_strategy="first", ignore_labels=["O"])
    for text, record, groups in zip(texts, records, tagger(texts), strict=True):
        assert [(s["type"], s["start"], s["end"]) for s in record["spans"]] == [
            (g["entity_group"], g["start"], g["end"]) for g in groups
        ]
        assert all(text[s["start"] : s["end"]] == s["text"] for s in record["spans"])


LONG_TASKS = [("classify", "bert"), ("classify", "gpt2"), ("regress", "bert"), ("pair", "bert"), ("choice", "bert")]


@pytest.mark.parametrize(("task", "family"), LONG_TASKS)
def test_a_long_text_is_read_in_windows(tuned: Ask, sentences: list[str], task: str, family: str) -> None:
    """The mean over windows that begin at words and cover the longest text, each with the whole other texts."""
    predictor = Predictor(tuned(task, family))
    assert isinstance(predictor.task, HeadTask)
    long, tokenizer = " ".join(sentences), predictor.task.tokenizer
    texts = {"pair": ["the cat", long], "choice": [long, "the cat", "a river"]}.get(task, [long])
    cut = texts.index(long)
    others = max((len(ids) for ids in tokenizer.encode_batch([text for text in texts if text != long])), default=0)
    size = predictor.task.template.max_text_tokens(min(2, len(texts))) - others
    offsets = tokenizer.encode_with_offsets([long])[0].offsets
    spans = split_at_words(long, offsets, size)
    assert len(spans) > 2
    parts = [long[offsets[start][0] : offsets[end - 1][1]] for start, end in spans]
    assert all(begins_word(long, offsets[start][0]) for start, _ in spans)
    assert (parts[0], parts[-1]) == (long[: len(parts[0])], long[-len(parts[-1]) :])
    assert all(b[0] < a[1] for a, b in pairwise(spans))
    each = predictor.predict([[*texts[:cut], part, *texts[cut + 1 :]] for part in parts])
    assert not predictor.notices
    (record,) = predictor.predict([texts])
    assert predictor.notices == ["1 input was longer than a row: read in overlapping windows, and averaged over them."]
    fields = {"regress": ["score"]}.get(task, ["probabilities"])
    for name in fields:
        values = [
            r[name] if isinstance(r[name], list | float) else [r[name][key] for key in record[name]] for r in each
        ]
        found = record[name] if isinstance(record[name], list | float) else list(record[name].values())
        assert found == pytest.approx(np.mean(values, axis=0), abs=1e-5)


def test_long_texts_are_tokenized_once_and_together(topics: Path, sentences: list[str]) -> None:
    task, calls = Predictor(topics).task, list[list[str]]()
    assert isinstance(task, HeadTask)
    long = " ".join(sentences)
    examples = [Example(i, (text,)) for i, text in enumerate(["We saw it", long, "the cat", long[1:]])]

    class Counting:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tokenizer, name)

        def encode_batch(self, texts: list[str]) -> Any:
            calls.append(texts)
            return self.tokenizer.encode_batch(texts)

        def encode_with_offsets(self, texts: list[str]) -> Any:
            calls.append(texts)
            return self.tokenizer.encode_with_offsets(texts)

    plain = task.encode(examples[::2])
    task.tokenizer = Counting(task.tokenizer)  # type: ignore[assignment]
    windows = encode_in_windows(task, examples)
    assert calls == [["We saw it", "the cat"], [long, long[1:]]]
    assert [len(own) > 1 for own in windows] == [False, True, False, True]
    assert [own[0] for own in windows[::2]] == plain


def test_a_pair_of_long_texts_is_cut_and_counted_once(tuned: Ask, sentences: list[str]) -> None:
    """The shorter text has half of the row."""
    predictor = Predictor(tuned("pair"))
    long = " ".join(sentences)
    predictor.predict([[long, long[:-40]]])
    assert predictor.notices[0].startswith("1 input was longer than a row")
    assert predictor.notices[1].startswith("1 text was")


def test_the_vector_of_a_long_text_is_the_mean_over_its_windows(tuned: Ask, sentences: list[str]) -> None:
    predictor = Predictor(tuned("embed"))
    long, tokenizer = " ".join(sentences), predictor.task.tokenizer
    offsets = tokenizer.encode_with_offsets([long])[0].offsets
    spans = split_at_words(long, offsets, LENGTH - 2, overlaps=False)
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    parts = [long[offsets[start][0] : offsets[end - 1][1]] for start, end in spans]
    vectors = [r["vector"] for r in predictor.predict(parts)]
    mean = np.average(vectors, axis=0, weights=[end - start for start, end in spans])
    short, record = predictor.predict(["We saw", long])
    assert record["vector"] == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
    assert short["vector"] == pytest.approx(predictor.predict(["We saw"])[0]["vector"], abs=1e-5)
    assert predictor.notices[0].startswith("1 input was longer than a row")


def test_a_text_that_is_cut_is_counted(tuned: Ask, sentences: list[str]) -> None:
    """Labels that are written as text have no windows."""
    predictor = Predictor(tuned("classify", "t5", answer="text", max_seq_length=12))
    predictor.predict([" ".join(sentences), "the cat"])
    assert predictor.notices[0].startswith("1 text was longer than 12 tokens, and cut.")


DIALOGUE = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "We saw it"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "a river"},
]
GOLD = {"role": "assistant", "content": "Anna"}


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of all prompts; every second answer is ended by the model, the others are cut."""
    seen: list[list[int]] = []

    def generate(model: Model, ids: Any, config: Any, **options: Any) -> list[GeneratedSequence]:
        seen.extend(ids)
        return [GeneratedSequence([9] * config.max_new_tokens, n % 2 == 0, [], 0.0) for n in range(len(ids))]

    monkeypatch.setattr("firth.evaluate.predict.generate_sequences", generate)
    monkeypatch.setattr("firth.tasks.text_to_text.generate_sequences", generate)
    return seen


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_dialogue_is_read_as_a_whole(tuned: Ask, prompts: list[list[int]], family: str) -> None:
    """System message and all turns by the template of the training; the reference of a labelled row is left out."""
    predictor = Predictor(tuned("lm", family, roles=["system", "user", "assistant"]))
    context = [(message["role"], message["content"]) for message in DIALOGUE]
    expected = encode_messages(predictor.model, context)
    predictor.predict([{"messages": [*DIALOGUE, GOLD]}])
    predictor.predict([{"messages": DIALOGUE}])
    assert prompts == [expected, expected]
    text = predictor.task.tokenizer.decode(expected, skip_special_tokens=False)
    assert (text.count("<|user|>"), text.count("<|system|>"), text.count("the cat")) == (2, 1, 1)
    prompts.clear()
    predictor.predict(["a river", {"prompt": "a river", "response": "Anna"}, {"text": "a river"}])
    assert prompts == [encode_messages(predictor.model, [("user", "a river")])] * 3
    with pytest.raises(UserError, match="the role 'tool' did not occur"):
        predictor.predict([{"messages": [{"role": "tool", "content": "x"}]}])


@pytest.mark.parametrize(("task", "family"), [("lm", "llama"), ("text-to-text", "t5")])
def test_answers_that_were_cut_are_marked(tuned: Ask, prompts: list[list[int]], task: str, family: str) -> None:
    folder = tuned(task, family)
    predictor = Predictor(folder)
    assert predictor.generation_config is not None
    assert predictor.generation_config.max_new_tokens == (256 if task == "lm" else 4)
    predictor = Predictor(folder, max_new_tokens=3)
    records = predictor.predict(["We saw", "We saw the"])
    assert [record["complete"] for record in records] == [True, False]
    assert len(predictor.task.tokenizer.encode(records[1]["text"])) <= 4 < 256
    assert predictor.notices == ["1 answer was cut at 3 new tokens, or at the model's last position: --max-new-tokens."]
    task_input = predictor.reader.read("We saw", 1)
    assert format_prediction(task_input, records[1]) == records[1]["text"] + " [cut]"


@pytest.mark.parametrize(("task", "casts"), [("classify", True), ("tag", True), ("lm", True), ("embed", False)])
def test_bf16_casts_the_weights_once(
    tuned: Ask, monkeypatch: pytest.MonkeyPatch, task: str, casts: bool, topics: Path
) -> None:
    """Where bf16 is chosen, as on a GPU, weights are cast instead of by autocast. A caller's model keeps them."""
    monkeypatch.setattr("firth.evaluate.predict.choose_compute", lambda training: replace(CPU, bf16=True))
    folder = tuned(task, "gpt2" if task == "lm" else "bert")
    predictor = Predictor(folder)
    assert {p.dtype for p in predictor.model.parameters()} == {torch.bfloat16 if casts else torch.float32}
    assert predictor.compute.bf16 != casts
    predictor.predict(["We saw the cat"])
    held = load_model(topics)
    predictor = Predictor(held, metadata=read_task_file(topics))
    assert {p.dtype for p in held.parameters()} == {torch.float32}
    assert predictor.compute.bf16


def test_bf16_gives_nearly_the_same_probabilities(
    topics: Path, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = Predictor(topics).predict(sentences)
    monkeypatch.setattr("firth.evaluate.predict.choose_compute", lambda training: replace(CPU, bf16=True))
    for found, wanted in zip(Predictor(topics).predict(sentences), exact, strict=True):
        assert found["probabilities"] == pytest.approx(wanted["probabilities"], abs=0.05)


def test_only_generated_answers_have_a_length(topics: Path) -> None:
    with pytest.raises(UserError, match="max_new_tokens is for generated answers, and the task classify has none"):
        Predictor(topics, max_new_tokens=3)


def test_an_answer_is_marked_in_its_context(tuned: Ask) -> None:
    context = "Anna saw the cat in the garden. " * 6
    record = firth.predict(tuned("span-qa", unanswerable=False), [["Who saw it?", context]])[0]
    assert context[record["start"] : record["end"]] == record["answer"] != ""


def test_files_and_pipes(topics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A text per line, JSON lines, a table: the same predictions, in the order of the file, beside the inputs."""
    texts = ["We saw the cat", "a river, wide", "Anna"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text("id,body\n" + "".join(f'x{i},"{t}"\n' for i, t in enumerate(texts)))
    expected = [record["label"] for record in firth.predict(topics, texts)]
    call("predict", topics, "--data", tmp_path / "a.txt", "--output", tmp_path / "a.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [(row["id"], row["text"], row["label"]) for row in rows] == list(
        zip([1, 3, 5], texts, expected, strict=True)
    )
    call("predict", topics, "--data", tmp_path / "b.csv", "--columns", "text=body", "--output", tmp_path / "b.tsv")
    table = list(csv.DictReader(io.StringIO((tmp_path / "b.tsv").read_text()), delimiter="\t"))
    assert [(row["id"], row["body"], row["label"]) for row in table] == list(
        zip(["x0", "x1", "x2"], texts, expected, strict=True)
    )
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("We saw the cat\n" + json.dumps({"text": texts[1]}) + "\n"))
    call("predict", topics, "--data", "-", "--json")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["label"] for row in printed] == expected[:2]
    call("predict", topics, *texts)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == expected


def test_a_line_that_begins_with_a_brace_is_a_text(topics: Path, tmp_path: Path, capsys: Any) -> None:
    """Only an object with a column of the task is a record; --format decides otherwise."""
    lines = ["{braces} are text", '{"text": "the cat"}', '{"body": "the cat"}', "{1: 2}", "[1]"]
    data = tmp_path / "lines.txt"
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    reader = Predictor(topics).reader

    def texts(line_format: Any = "auto", columns: Mapping[str, str] | None = None) -> list[str]:
        return [i.example.texts[0] for i in reader.read_file(str(data), columns, "utf-8", line_format)]

    assert texts() == [lines[0], "the cat", *lines[2:]]
    assert "lines.txt:3: a JSON object without the columns of the task (text) is read as a text" in "".join(
        capsys.readouterr().err.split("\n")
    )
    assert texts(columns={"text": "body"}) == [*lines[:2], "the cat", *lines[3:]]
    assert texts("text") == lines
    with pytest.raises(UserError, match=r"lines\.txt:1: not JSON"):
        texts("jsonl")
    (tmp_path / "lines.csv").write_text("text\na\n")
    with pytest.raises(UserError, match="--format is for the lines"):
        list(reader.read_file(str(tmp_path / "lines.csv"), None, "utf-8", "jsonl"))


@pytest.mark.parametrize(("encoding", "text"), [("latin-1", "Málaga"), ("utf-16", "Málaga"), ("utf-8", "\ufeffMálaga")])
def test_stdin_has_an_encoding(topics: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, text: str) -> None:
    reader = Predictor(topics).reader
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{text}\nAnna\n".encode(encoding)), "ascii"))
    assert [i.example.texts[0] for i in reader.read_file("-", None, encoding)] == ["Málaga", "Anna"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Anna\nM\xe1laga\n".encode("latin-1")), "ascii"))
    with pytest.raises(UserError, match=r"stdin, line 1 or later: not utf-8\. Name its encoding by --encoding"):
        list(reader.read_file("-", None, "utf-8"))


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_table_has_the_columns_of_all_records(tmp_path: Path, suffix: str) -> None:
    """Columns that occur later have empty cells before; null is an empty cell."""
    records = [
        ({"id": 1, "text": "a"}, {"value": None, "complete": False}),
        ({"id": 2, "text": "b\nc", "source": None}, {"value": {"x": 1}, "complete": True}),
        ({"id": 3}, {"value": {"x": 2}, "note": "d,\te"}),
    ]
    path = tmp_path / f"out{suffix}"
    inputs = [(TaskInput(Example(1, ("a",)), columns), record) for columns, record in records]
    assert write_predictions(path, inputs) == 3
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="," if suffix == ".csv" else "\t"))
    assert rows == [
        ["id", "text", "value", "complete", "source", "note"],
        ["1", "a", "", "false", "", ""],
        ["2", "b\nc", '{"x": 1}', "true", "", ""],
        ["3", "", '{"x": 2}', "", "", "d,\te"],
    ]
    assert write_predictions(tmp_path / f"none{suffix}", []) == 0


def test_answers_come_while_the_input_is_read(topics: Path) -> None:
    """With one input per batch the first answer is there before the second input is read."""
    predictor, read = Predictor(topics, batch_size=1), []

    def inputs() -> Any:
        for number, text in enumerate(("We saw", "the cat"), 1):
            read.append(text)
            yield predictor.reader.read(text, number)

    next(predictor.predict_inputs(inputs(), chunk_batches=1))
    assert read == ["We saw"]


def test_an_output_is_whole_or_absent(topics: Path, tmp_path: Path) -> None:
    """A mistake in the second line leaves the old file as it was."""
    (tmp_path / "in.jsonl").write_text('{"text": "We saw"}\n{"body": "the cat"}\n')
    (tmp_path / "out.jsonl").write_text("old\n")
    predictor = Predictor(topics, batch_size=1)
    inputs = predictor.reader.read_file(str(tmp_path / "in.jsonl"), None, "utf-8")
    with pytest.raises(UserError, match=r"in\.jsonl:2.*text"):
        write_predictions(tmp_path / "out.jsonl", predictor.predict_inputs(inputs, 1))
    assert (tmp_path / "out.jsonl").read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_columns_that_no_encoder_writes_and_no_recursion_reads(topics: Path, tmp_path: Path) -> None:
    data, output = tmp_path / "in.jsonl", tmp_path / "out.csv"
    data.write_text('{"text": "We saw \\ud800", "no\\udc80te": "x\\ud800"}\n')
    call("predict", topics, "--data", data, "--output", output)
    with output.open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["text"], row["no\ufffdte"]) == ("We saw \ufffd", "x\ufffd")
    data.write_text('{"text": "We saw", "note": ' + 400 * "[" + 400 * "]" + "}\n")
    with pytest.raises(UserError, match=r"in\.jsonl:1: not JSON \(lists or objects are nested too deeply\)"):
        call("predict", topics, "--data", data, "--output", output, "--overwrite")


def test_the_inputs_are_not_overwritten(topics: Path, tmp_path: Path) -> None:
    data, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    data.write_text('{"text": "We saw"}\n')
    link.symlink_to(data)
    for output in (data, link):
        with pytest.raises(UserError, match="is the file that --data reads"):
            call("predict", topics, "--data", data, "--output", output, "--overwrite")
    assert data.read_text() == '{"text": "We saw"}\n'


@pytest.mark.parametrize(
    ("task", "asked", "message"),
    [
        ("classify", "  ", "Input 1: an empty text"),
        ("classify", ["a", "b"], r"2 texts, and the task classify reads 1 \(text\)"),
        ("pair", "a", r"1 text, and the task pair reads 2 \(text_a, text_b\)"),
        ("choice", ["a", "b"], "reads 3 or more"),
        ("classify", {"txt": "a"}, "Input 1.*text"),
        ("classify", [1], "an input is a text"),
    ],
)
def test_what_is_refused(tuned: Ask, task: str, asked: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        firth.predict(tuned(task), [asked])


def test_a_wrong_checkpoint_output_or_task(topics: Path, saved: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not fine-tuned for a task: `firth fill` predicts words"):
        Predictor(saved("bert"))
    with pytest.raises(UserError, match="is not fine-tuned for a task: `firth generate` continues"):
        Predictor(saved("gpt2"))
    with pytest.raises(UserError, match="was fine-tuned for classify, not for tag"):
        Predictor(topics, "tag")
    (tmp_path / "old.csv").touch()
    for output, message in (("x.txt", r"to \.jsonl, \.csv or \.tsv"), ("old.csv", "exists already")):
        with pytest.raises(UserError, match=message):
            call("predict", topics, "We saw", "--output", tmp_path / output)
    with pytest.raises(UserError, match="both as arguments and in --data"):
        call("predict", topics, "We saw", "--data", "x.txt")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="no inputs"):
        call("predict", topics, "--data", tmp_path / "empty.txt")


def test_spans_are_marked_in_the_text() -> None:
    spans = [{"type": "PER", "start": 0, "end": 4, "probability": 0.98}, {"type": "LOC", "start": 9, "end": 16}]
    assert mark_spans("Juma, in Nairobi.", spans) == "[PER Juma 98%], in [LOC Nairobi]."


def call(*arguments: object) -> None:
    app([str(argument) for argument in arguments], prog_name="firth", standalone_mode=False)
