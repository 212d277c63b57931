"""Intermediate training: what is kept, what is new, and the record of the chain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks.conftest import write_jsonl
from tasks.test_multihead import stop_after

import firth
from firth.core.errors import UserError
from firth.models import load_model

RUN: dict[str, Any] = {"max_steps": 1, "seeds": 1, "device": "cpu", "learning_rate": 0.0, "max_seq_length": 32}


def test_a_chain_keeps_the_layers_and_is_recorded(
    toy: dict[str, Path], checkpoint_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = checkpoint_of("bert")
    rows = [json.loads(line) for line in toy["train"].read_text().splitlines()]
    words = write_jsonl(tmp_path / "words.jsonl", [{"text": r["text"], "label": r["word"]} for r in rows])
    first = firth.finetune(base, "classify", words, words, tmp_path / "first", **RUN | {"learning_rate": 1e-2})
    assert [(link["task"], link["head"]) for link in first["chain"]] == [("classify", "new")]
    capsys.readouterr()
    # a learning rate of 0: the weights of the second run are those that it starts with
    files = (toy["train"], toy["dev"])
    second = firth.finetune(base, "classify", *files, tmp_path / "second", from_=tmp_path / "first", **RUN)
    said = " ".join(capsys.readouterr().err.split())
    assert f"the embeddings and all 1 layers are those of {tmp_path}/first/final" in said
    assert "a new head for classify, over 2 classes" in said
    start, end, plain = (
        load_model(path).state_dict() for path in (tmp_path / "first/final", tmp_path / "second/final", base)
    )
    shared = [name for name in end if not name.startswith("head.")]
    assert all(torch.equal(start[name], end[name]) for name in shared)
    assert any(not torch.equal(plain[name], end[name]) for name in shared), "not those of the base"
    assert end["head.out.weight"].shape[0] == 2
    links = second["chain"]
    assert [link["checkpoint"] for link in links] == [str(base), str(tmp_path / "first/final")]
    assert links[1]["score"] == second["mean"]
    stored = json.loads((tmp_path / "second/final/task.json").read_text())["chain"]
    assert [link["train"] for link in stored] == [str(words), str(toy["train"])]
    card = (tmp_path / "second/final/README.md").read_text()
    assert "| chain |" in card
    assert "words.jsonl" in card
    assert "chain" in Path(second["report"]).read_text(encoding="utf-8")
    # the same labels: the head is kept too
    third = firth.finetune(base, "classify", *files, tmp_path / "third", from_=tmp_path / "second/final", **RUN)
    assert [link["head"] for link in third["chain"]] == ["new", "new", "kept"]
    kept = load_model(tmp_path / "third/final").state_dict()
    assert torch.equal(kept["head.out.weight"], end["head.out.weight"])


def test_a_head_of_another_task_is_not_kept_for_its_labels(
    toy: dict[str, Path], checkpoint_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels such as 0 and 1 say nothing about the task."""
    rows = [json.loads(line) for line in toy["dev"].read_text().splitlines()]
    pairs = write_jsonl(
        tmp_path / "pairs.jsonl", [{"text_a": r["text"], "text_b": r["word"], "label": r["label"]} for r in rows]
    )
    firth.finetune(checkpoint_of("bert"), "classify", toy["train"], toy["dev"], tmp_path / "first", **RUN)
    capsys.readouterr()
    second = firth.finetune(tmp_path / "first/final", "pair", pairs, pairs, tmp_path / "second", **RUN)
    assert "a new head for pair, over 2 classes" in capsys.readouterr().err
    assert [link["head"] for link in second["chain"]] == ["new", "new"]
    start, end = (load_model(tmp_path / name / "final").state_dict() for name in ("first", "second"))
    assert not torch.equal(start["head.out.weight"], end["head.out.weight"])


def test_a_chain_resumes_exactly(
    toy: dict[str, Path], checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run stops after a checkpoint: it continues from that, and keeps the record of the chain."""
    base, files = checkpoint_of("bert"), (toy["train"], toy["dev"])
    run = RUN | {"learning_rate": 1e-3, "max_steps": 6, "save_steps": 2}
    firth.finetune(base, "classify", toy["dev"], toy["train"], tmp_path / "first", **RUN | {"learning_rate": 1e-2})
    whole, cut = (tmp_path / name for name in ("whole", "cut"))
    first = firth.finetune(base, "classify", *files, whole, from_=tmp_path / "first", **run)
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        firth.finetune(base, "classify", *files, cut, from_=tmp_path / "first", **run)
    monkeypatch.undo()
    assert (cut / "seed-0" / "checkpoint-2").is_dir()
    second = firth.finetune(base, "classify", *files, cut, from_=tmp_path / "first", resume=True, **run)
    assert second["chain"] == first["chain"]
    for name in ("final/model.safetensors", "predictions.jsonl", "seed-0/log.jsonl"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes(), name


def test_from_must_be_the_checkpoint_fine_tuned(
    toy: dict[str, Path], checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    files = (toy["train"], toy["dev"], tmp_path / "run")
    with pytest.raises(UserError, match=r"--from .* was not fine-tuned"):
        firth.finetune(checkpoint_of("bert"), "classify", *files, from_=checkpoint_of("bert"), **RUN)
    firth.finetune(checkpoint_of("gpt2"), "classify", toy["train"], toy["dev"], tmp_path / "gpt2", **RUN)
    with pytest.raises(UserError, match="family is gpt2 there and bert here"):
        firth.finetune(checkpoint_of("bert"), "classify", *files, from_=tmp_path / "gpt2", **RUN)
    assert not (tmp_path / "run").exists()
