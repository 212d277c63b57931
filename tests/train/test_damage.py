"""Damaged files of a run cost what they hold, and never the run: it resumes from a whole checkpoint, bit for bit."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from firth.core.errors import UserError
from firth.core.files import read_json
from firth.tokens import ShardSet
from firth.train import Recipe, TrainingRun, pretrain
from firth.train.checkpoint import remove_best
from firth.train.log import RunLog, read_log
from firth.train.resume import read_intermediate, write_intermediate

pretraining = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
Recipes = Callable[..., Recipe]


@pytest.mark.parametrize(
    "damage",
    [
        b'\xff{"step": 2}',
        b'{"step": null}',
        b'{"step": "2"}',
        b'{"step": true}',
        b'{"step": 2, "loss": "x"}',
        b'{"step": 2, "tokens": []}',
        b"[2]",
        b"2",
        b"[" * 99_999,
        b'{"step": ' + b"9" * 5000 + b"}",
    ],
)
def test_damaged_lines_of_a_log_are_removed(damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path, 0) as log:
        for step in (1, 2, 3):
            log.write(step=step, loss=1 / step, data="a", tokens=5)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole[0] + damage + b"\n" + b"".join(whole[1:]) + b'{"step": 4, "lo')
    assert [line["step"] for line in read_log(path)] == [1, 2, 3]
    with RunLog(path, 2):
        pass
    assert path.read_bytes() == b"".join(whole[:2])
    assert "log.jsonl: 1 damaged line is removed" in capsys.readouterr().err
    with RunLog(path, 2):
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_log_that_never_ends_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    for read in (read_log, lambda path: RunLog(path, 0)):
        with pytest.raises(UserError, match=r"log\.jsonl: not a file"):
            read(path)


def test_intermediate_results_are_read_as_they_were_written_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass(frozen=True)
    class Trials:
        losses: tuple[float, ...]

    file = tmp_path / "trials.json"
    assert read_intermediate(file, Trials) is None
    write_intermediate(file, asdict(Trials((0.5, 1 / 3))))
    assert read_intermediate(file, Trials) == Trials((0.5, 1 / 3))
    assert capsys.readouterr().err == ""
    whole = file.read_text()
    damaged = {
        "a digit": whole.replace("0.5", "0.4"),
        "cut": whole[:-9],
        "another file": '{"losses": [0.5]}',
        "no object": "[]",
        "another form": None,
    }
    for name, text in damaged.items():
        file.write_text(text) if text is not None else write_intermediate(file, {"losses": ["x"]})
        assert read_intermediate(file, Trials) is None, name
        assert "trials.json" in capsys.readouterr().err, name


def test_a_run_resumes_beside_damaged_files(recipe_of: Recipes, capsys: pytest.CaptureFixture[str]) -> None:
    """Manifest, log and results are damaged; the run goes back one checkpoint and ends with the same weights."""
    recipe = recipe_of("gpt2", max_steps=4, save_steps=2, save_total_limit=0)
    results, run = pretrain(recipe), Path(recipe.output_dir)
    weights, log = (run / "final" / "model.safetensors").read_bytes(), (run / "log.jsonl").read_bytes().splitlines()
    shutil.rmtree(run / "final")
    (run / "checkpoint-4" / "manifest.json").write_text('{"files": ["model.safetensors"]}')
    (run / "log.jsonl").write_bytes(b"\n".join([log[0], b'\xff{"step": null}', *log[1:], b""]))
    (run / "results.json").write_text('{"steps": null}')
    again = pretrain(recipe, resume=True)
    said = capsys.readouterr().err
    assert "checkpoint-4 is damaged (manifest.json cannot be read): trying the checkpoint before it" in said
    assert "log.jsonl: 1 damaged line is removed" in said
    assert (run / "final" / "model.safetensors").read_bytes() == weights
    assert (run / "log.jsonl").read_bytes().splitlines() == log
    assert again["loss"] == results["loss"]
    (run / "results.json").write_bytes(b"\xff")  # of a finished run
    (run / "final" / "manifest.json").write_text("[]")
    assert pretrain(recipe, resume=True)["loss"] == results["loss"]
    assert "cannot be read: the folder is now final.damaged-1, and is written again" in capsys.readouterr().err
    assert (run / "final" / "model.safetensors").read_bytes() == weights
    (run / "results.json").write_bytes(b"\xff")
    assert pretrain(recipe, resume=True)["loss"] == results["loss"]
    assert "The results are computed again" in capsys.readouterr().err
    assert read_json(run / "results.json")["steps"] == 4


def test_shards_that_are_cut_during_training_end_it_with_a_message(
    recipe_of: Recipes, shards_of: Callable[[str], ShardSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "shards"
    shutil.copytree(shards_of("bert").folder, data)
    tokens = data / "train" / "tokens.bin"

    def cut(step: int, model: Any) -> None:
        if step == 2:
            os.truncate(tokens, 0)

    monkeypatch.setattr(
        pretraining, "TrainingRun", lambda *given, **named: TrainingRun(*given, **named, hooks=[(1, cut)])
    )
    with pytest.raises(UserError, match=r"tokens\.bin was cut from .* to 0 bytes while it was read"):
        pretrain(recipe_of("bert", data=str(data), max_steps=20))


def test_folders_of_a_user_beside_the_best_weights(tmp_path: Path) -> None:
    for name in ("best-2", "best-model"):
        (tmp_path / name).mkdir()
    remove_best(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["best-model"]
