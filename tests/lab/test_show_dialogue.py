"""`firth show --task`: the labels of dialogues and pairs, equal to those of fine-tuning, in text, page and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tasks.small import parts

import firth
from firth.cli.main import app
from firth.core.errors import UserError
from firth.models import make_model
from firth.tasks import FinetuneRecipe, make_task
from firth.text import read_labelled

TALK = [("system", "big"), ("user", "the <cat>"), ("assistant", "near the river"), ("user", "a"), ("assistant", "fox")]
CHATS = [{"messages": [{"role": role, "content": text} for role, text in TALK]}, {"prompt": "a dog", "response": "is"}]
PAIRS = [{"prompt": "the cat", "chosen": "is red", "rejected": "is not blue"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show")
    for family in ("llama", "t5", "bert"):
        config, tokenizer = parts(family)
        model = make_model(config)
        model.tokenizer = tokenizer
        model.save(folder / family)
    for name, rows in (("chats", CHATS), ("pairs", PAIRS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_labels_are_those_of_fine_tuning(folder: Path, tmp_path: Path) -> None:
    shown = firth.show(folder / "llama", folder / "chats.jsonl", task="lm", output_dir=tmp_path, max_seq_length=64)
    config, tokenizer = parts("llama")
    examples = read_labelled(folder / "chats.jsonl", "lm")
    task: Any = make_task("lm", examples, tokenizer, config, FinetuneRecipe(task="lm", max_seq_length=64))
    items = task.encode(examples)
    labels = 0
    for row, item in zip(shown["rows"], items, strict=True):
        (sequence,), (part,) = row["sequences"], item.parts
        assert sequence["ids"] == list(part.ids)
        positions = [i - 1 for i, label in enumerate(sequence["labels"]) if label is not None]
        assert positions == list(part.target_positions)
        assert all(label in (None, i) for i, label in zip(sequence["ids"], sequence["labels"], strict=True))
        labels += len(positions)
    assert shown["counts"] == {"examples": 2, "tokens": sum(i.num_tokens for i in items), "labels": labels}


def test_the_terminal_and_the_page(folder: Path, tmp_path: Path, capsys: Any) -> None:
    command = ["show", str(folder / "llama"), "--task", "lm", "--data", str(folder / "chats.jsonl"), "--rows", "1"]
    app([*command, "--output-dir", str(tmp_path)], standalone_mode=False)
    out = capsys.readouterr().out
    learned = "6 labels of 19 tokens: near the river <|endoftext|> | fox <|endoftext|>"
    assert learned in " ".join(out.split()), "a terminal without colours shows the spans too"
    assert "row 1" in out
    assert "row 2" not in out
    page = (tmp_path / "show.html").read_text()
    config, tokenizer = parts("llama")
    task: Any = make_task(
        "lm", (examples := read_labelled(folder / "chats.jsonl", "lm")), tokenizer, config, FinetuneRecipe()
    )
    (item, _) = task.encode(examples)
    assert page.count('class="chip label predicted"') == len(item.scored_mask)
    assert "<cat>" not in page, "text is escaped"
    assert "Expected and measured" not in page


@pytest.mark.parametrize(
    ("family", "task", "names"),
    [
        ("t5", "lm", ["encoder input", "decoder labels", "encoder input", "decoder labels"]),
        ("llama", "preference", ["chosen", "rejected"]),
        ("llama", "reward", ["chosen", "rejected"]),
        ("bert", "reward", ["chosen", "rejected"]),
    ],
)
def test_other_models_and_pairs(family: str, task: str, names: list[str], folder: Path, tmp_path: Path) -> None:
    file = folder / ("chats.jsonl" if task == "lm" else "pairs.jsonl")
    shown = firth.show(folder / family, file, task=task, output_dir=tmp_path, printed=True, max_seq_length=32)
    sequences = shown["rows"][0]["sequences"]
    assert [s["name"] for s in sequences] == names
    key = "rewards" if task == "reward" else "labels"
    found = [[label for label in s[key] if label is not None] for s in sequences]
    if task == "reward":  # one position: [CLS] of an encoder, the last token of a decoder that is not padding
        assert [len(own) for own in found] == [1, 1]
        assert [s[key].index(own[0]) == 0 for s, own in zip(sequences, found, strict=True)] == [family == "bert"] * 2
    if task == "preference":
        tokenizer = parts(family)[1]
        assert [tokenizer.decode(own).strip() for own in found] == ["is red", "is not blue"]


def test_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    for model, options, message in [
        ("llama", {"task": "tag"}, r"shows the tasks lm, preference, reward"),
        ("llama", {"task": "lm", "objective": "clm"}, r"--objective is for the rows of pretraining"),
        ("nothing", {"task": "lm"}, r"is not a checkpoint folder"),
        ("bert", {"task": "lm"}, r"lm needs a model that writes"),
    ]:
        with pytest.raises(UserError, match=message):
            firth.show(folder / model, folder / "chats.jsonl", output_dir=tmp_path, **options)
