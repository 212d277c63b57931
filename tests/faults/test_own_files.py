"""Files that Firth wrote, with wrong content: each reader takes them or names the file in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from firth.commands.data_source import check_same_source
from firth.commands.evaluate import read_finetuned_task
from firth.core.errors import UserError
from firth.evaluate.card import SourceFile, collect_scores, data_section, read_if_present
from firth.models.hf.checkpoint import read_eos_token_ids, read_forced_tokens
from firth.models.hf.tensors import find_weight_files
from firth.models.presets import bert, gpt2
from firth.static.ngram import load_ngram
from firth.tasks import make_task
from firth.tasks.recipe import read_task_file
from firth.tasks.results import load_seed_predictions
from firth.tokens import Tokenizer, load_tokenizer, train_tokenizer
from firth.train.checkpoint import read_train_state
from firth.train.resume import is_run_finished

VALUES = (None, 3, -1, 0.5, True, "x", "", [], [[]], [None], ["a", 1], {}, {"a": []}, 10**30, float("inf"))


class OwnFile(NamedTuple):
    name: str
    content: dict[str, Any]
    read: Callable[[Path], Any]


@cache
def word_tokenizer() -> Tokenizer:
    return train_tokenizer(["a b c"] * 3, "word", 50)


def read_task(folder: Path) -> None:
    tokenizer = word_tokenizer()
    metadata = read_task_file(folder)
    read_finetuned_task(folder)
    make_task(metadata["task"], metadata, tokenizer, bert(1, 32, 2, tokenizer.vocab.size))


def read_generation(folder: Path) -> None:
    read_eos_token_ids(folder, gpt2(1, 32, 2, 100))
    read_forced_tokens(folder)


def read_card_source(folder: Path) -> None:
    data_section({}, read_if_present(folder / "source.json", SourceFile))
    check_same_source(folder / "source.json", {"data": ["a"], "bytes": 1})


TASK = {"task": "classify", "answer": "head", "labels": ["a", "b"], "max_seq_length": 16, "threshold": 0.5, "tasks": {}}
OWN_FILES = [
    OwnFile("task.json", TASK, read_task),
    OwnFile("generation_config.json", {"eos_token_id": [1, 2], "forced_bos_token_id": 1}, read_generation),
    OwnFile("training/state.json", {"step": 3, "best_score": -1.0, "best_step": 2}, read_train_state),
    OwnFile("model.safetensors.index.json", {"weight_map": {"w": "a.safetensors"}}, find_weight_files),
    OwnFile("source.json", {"data": ["a"], "bytes": 1}, read_card_source),
    OwnFile(
        "results.json",
        {"metric": "f1", "scores": [{"f1": 0.5}], "best_seed": 0, "diverged": []},
        lambda folder: list(collect_scores(folder / "final", {})),
    ),
    OwnFile("predictions.jsonl", {"id": 1, "prediction": "a", "reference": "b"}, load_seed_predictions),
    OwnFile("config.json", {"model_type": "firth-ngram", "order": 2, "vocab_size": 9, "back": 0.5}, load_ngram),
]


def damaged(content: dict[str, Any]) -> list[Any]:
    """The content with one key of another type or missing, and things that are no objects at all."""
    changed = [{**content, key: value} for key in content for value in VALUES]
    missing = [{name: value for name, value in content.items() if name != key} for key in content]
    return [*changed, *missing, *VALUES]


@pytest.mark.parametrize("own", OWN_FILES, ids=lambda own: own.name)
def test_a_damaged_file_is_refused_in_one_line(own: OwnFile, tmp_path: Path) -> None:
    file, messages = tmp_path / own.name, list[str]()
    file.parent.mkdir(exist_ok=True)
    for content in damaged(own.content):
        file.write_text(json.dumps(content))
        try:
            own.read(tmp_path)
        except UserError as e:
            messages.append(str(e))
    assert len(messages) >= len(VALUES) - 2, "most of what is no object, at least"
    assert not [message for message in messages if "\n" in message or len(message) > 1200]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=file.name):
        own.read(tmp_path)


def test_a_damaged_tokenizer_config_is_refused_in_one_line(tmp_path: Path) -> None:
    train_tokenizer(["a b c"] * 3, "wordpiece", 50).save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    whole = json.loads(file.read_text())
    messages = list[str]()
    for key in ("pad_token", "mask_token", "do_lower_case", "backward"):
        for value in VALUES:
            file.write_text(json.dumps({**whole, key: value}))
            try:
                load_tokenizer(tmp_path)
            except UserError as e:
                messages.append(str(e))
    assert all(str(file) in message or "special token" in message for message in messages)
    for value in ([], 3, "x", None):
        file.write_text(json.dumps(value))
        with pytest.raises(UserError, match=r"tokenizer_config\.json: must be an object"):
            load_tokenizer(tmp_path)
    file.write_text(json.dumps({**whole, "pad_token": {"content": "[PAD]", "lstrip": False}}))
    assert load_tokenizer(tmp_path).special_tokens["pad"] == "[PAD]", "as transformers writes it"


def test_an_index_names_no_file_outside_its_folder(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="must name files of this folder"):
        find_weight_files(tmp_path)


def test_results_of_a_run_that_are_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on from its last checkpoint, and says why."""
    monkeypatch.setattr("firth.train.resume.find_corruption", lambda folder: None)
    (tmp_path / "results.json").write_text('{"steps": "many"}')
    assert not is_run_finished(tmp_path, None)  # type: ignore[arg-type]
    assert "results.json: steps: 'many' is not a whole number" in capsys.readouterr().err
