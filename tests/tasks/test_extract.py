"""The task extract: read objects, infer their schema, learn to write them, score fields, predict by the schema."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tasks.small import parts

from firth import api
from firth.core.errors import UserError
from firth.metrics import compute_metrics
from firth.metrics.additive import make_additive_score
from firth.models import make_model, write_model
from firth.models.config import LearnedPosition
from firth.models.presets import gpt2, t5_v1_1
from firth.tasks import FinetuneRecipe, make_task
from firth.tasks.extract import infer_schema, order_fields
from firth.text import Example
from firth.text.labelled import read_labelled
from firth.tokens import train_tokenizer

NAMES, CITIES = ("Ada", "Bob", "Cleo", "Dan"), ("Rome", "Oslo", "Bern")


def make_records(number: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    records = []
    for _ in range(number):
        name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randint(1, 9)
        records.append({"text": f"{name}, {age}, lives in {city}.", "target": {"name": name, "age": age, "city": city}})
    return records


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("extract")
    return write_jsonl(folder / "train.jsonl", make_records(96, 0)), write_jsonl(
        folder / "dev.jsonl", make_records(8, 1)
    )


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.slow), "t5"])
def test_learns_to_write_objects(data: tuple[Path, Path], tmp_path: Path, family: str) -> None:
    train, dev = data
    texts = [f"{r['text']} {json.dumps(r['target'])}" for r in make_records(96, 0)]
    torch.manual_seed(0)
    tokenizer = train_tokenizer(texts, "byte-bpe" if family == "gpt2" else "unigram", 300)
    size = tokenizer.vocab.size
    config = gpt2(1, 32, 2, size, position=LearnedPosition(96)) if family == "gpt2" else t5_v1_1(1, 32, 2, 48, size)
    model = make_model(config)
    model.tokenizer = tokenizer
    (tmp_path / "start").mkdir()
    write_model(model, tmp_path / "start")
    steps = dict(max_steps=12, seeds=1, per_device_train_batch_size=16, learning_rate=3e-3, max_seq_length=64)
    result = api.finetune(
        tmp_path / "start", task="extract", train=str(train), dev=str(dev), output_dir=str(tmp_path / "run"), **steps
    )
    scores = json.loads((tmp_path / "run" / "results.json").read_text())
    assert result
    assert "field_f1" in json.dumps(scores)
    facts = json.loads((tmp_path / "run/final/task.json").read_text())
    schema = facts["json_schema"]
    assert (facts["task"], schema["required"]) == ("extract", ["name", "age", "city"])
    assert set(schema["properties"]["city"]["enum"]) == set(CITIES)
    for record in api.predict(tmp_path / "run/final", ["Ada, 3, lives in Oslo.", "Bob, 4, lives in Rome."]):
        assert record["complete"]
        jsonschema.validate(record["value"], schema)
        assert json.loads(record["text"]) == record["value"]
    text = api.generate(tmp_path / "run/final", "Ada, 3, lives in Oslo.")
    jsonschema.validate(json.loads(text), schema)
    found = api.evaluate(tmp_path / "run/final", data=str(dev), output_dir=tmp_path / "eval")
    assert found["metrics"]["valid"] > 0.5  # all but those that were cut


def test_columns_as_fields_and_bad_targets(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("text,name,city\nAda lives in Rome.,Ada,Rome\nBob sleeps.,Bob,\n", encoding="utf-8")
    examples = read_labelled(table, "extract")
    assert [json.loads(e.target) for e in examples] == [{"name": "Ada", "city": "Rome"}, {"name": "Bob"}]
    table.write_text('text,target\nAda lives.,"{""name"": ""Ada""}"\n', encoding="utf-8")
    assert json.loads(read_labelled(table, "extract")[0].target) == {"name": "Ada"}
    bad = write_jsonl(tmp_path / "b.jsonl", [{"text": "x", "target": [1]}])
    with pytest.raises(UserError, match=r"b\.jsonl:1: column 'target' holds \[1\], which is not a JSON object"):
        read_labelled(bad, "extract")
    bad = write_jsonl(tmp_path / "c.jsonl", [{"text": "x", "target": '{"a":'}])
    with pytest.raises(UserError, match=r"c\.jsonl:1.*not JSON"):
        read_labelled(bad, "extract")


def test_inferred_schema_allows_its_objects_and_like_ones() -> None:
    objects = [
        {"a": 1, "b": {"c": [1.5, 2]}, "d": None, "e": "x"},
        {"a": 2, "b": {"c": []}, "d": "long text"},
    ]
    schema = infer_schema(objects)
    for value in objects:
        jsonschema.validate(value, schema)
    jsonschema.validate({"a": 77, "b": {"c": [9]}, "d": "another"}, schema)
    assert schema["required"] == ["a", "b", "d"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"a": "1", "b": {"c": []}, "d": None}, schema)
    assert infer_schema(["red", "blue"] * 10) == {"enum": ["red", "blue"]}
    ordered = order_fields({"e": "x", "d": 1, "b": {}, "a": 2}, schema)
    assert list(ordered) == ["a", "b", "d", "e"]


def test_an_object_without_fields_is_learned(tmp_path: Path) -> None:
    """Constrained decoding has to write {} then, which a model that learned to write nothing never saw."""
    rows = [{"text": "a cat", "target": {"animal": "cat"}}, {"text": "the river", "target": {}}]
    examples = read_labelled(write_jsonl(tmp_path / "train.jsonl", rows), "extract")
    assert [e.target for e in examples] == ['{"animal": "cat"}', "{}"]
    config, tokenizer = parts("gpt2")
    task = make_task("extract", examples, tokenizer, config, FinetuneRecipe(task="extract", max_target_length=8))
    written = [tokenizer.decode(item.answer_ids) for item in task.encode(examples)]
    assert written == ['{"animal": "cat"}', "{}"]


def test_objects_longer_than_the_decoder_raise() -> None:
    """They are not cut to `max_target_length`, so that lowering it is no remedy by itself."""
    config, tokenizer = parts("gpt2")
    examples = [Example(0, ("a cat",), json.dumps(dict.fromkeys("abcdefgh", "the river")))]
    with pytest.raises(UserError, match=r"no room is left for a text.*extract fewer fields"):
        make_task("extract", examples, tokenizer, config, FinetuneRecipe(task="extract", max_target_length=4))


def test_field_scores_by_hand() -> None:
    predictions = ['{"a": 1, "b": ["x", "y"]}', '{"a":', '{"a": 2, "c": 5}']
    references = ['{"a": 1.0, "b": ["y", "z"]}', '{"a": 2}', '{"a": 2}']
    # right: a, b=y of the first, a of the third; 5 predicted, 5 true
    scores = compute_metrics("extract", predictions, references)
    assert scores["field_precision"] == pytest.approx(3 / 5)
    assert scores["field_recall"] == pytest.approx(3 / 5)
    assert scores["field_f1"] == pytest.approx(3 / 5)
    assert scores["exact_match"] == 0
    assert scores["valid"] == pytest.approx(2 / 3)
    assert scores["match.a"] == pytest.approx(2 / 3)
    assert scores["match.b"] == pytest.approx(1 / 3)
    for name in ("field_f1", "field_precision", "field_recall"):
        additive = make_additive_score("extract", name, predictions, references)
        assert additive.score_sample(torch.ones(3, dtype=torch.float64).numpy()) == pytest.approx(scores[name])


def test_a_field_matches_as_the_objects_do() -> None:
    """The order of a list does not count, and true is not 1, in `match.NAME` as in `exact_match`."""
    scores = compute_metrics("extract", ['{"a": true, "b": ["y", "x"]}'], ['{"a": 1, "b": ["x", "y"]}'])
    assert (scores["field_f1"], scores["match.a"], scores["match.b"]) == (pytest.approx(2 / 3), 0, 1)


def test_given_schema_that_is_wrong(data: tuple[Path, Path], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"properties": {"age": {"format": "year"}}}')
    tokenizer = train_tokenizer([r["text"] for r in make_records(9, 0)], "byte-bpe", 300)
    model = make_model(gpt2(1, 16, 2, tokenizer.vocab.size, position=LearnedPosition(96)))
    model.tokenizer = tokenizer
    (tmp_path / "start").mkdir()
    write_model(model, tmp_path / "start")
    with pytest.raises(UserError, match="#/properties/age/format: Unknown format: year"):
        api.finetune(
            tmp_path / "start",
            task="extract",
            train=str(data[0]),
            dev=str(data[1]),
            output_dir=str(tmp_path / "run"),
            json_schema=str(schema),
            seeds=1,
            max_steps=1,
        )
