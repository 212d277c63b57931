"""A killed run against an uninterrupted one: the comparison, and the whole command once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from firth import api
from firth.core.errors import UserError
from firth.lab.prove_resume import compare_runs, last_logged_step, unfinished_checkpoints

SMALL = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64}
SIZES = {"max_seq_length": 32, "per_device_train_batch_size": 4, "vocab_size": 400}
ALL = ("same_log", "same_data", "same_weights", "same_optimizer")


@pytest.fixture(scope="module")
def run(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prove") / "straight"
    api.pretrain("bert-tiny", corpus_file, folder, overrides=SMALL, max_steps=4, **SIZES)
    return folder


def lose_a_line(folder: Path) -> None:
    log = folder / "log.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))


def read_other_text(folder: Path) -> None:
    log = folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[0]["data"] = "00000000"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def move_a_weight(folder: Path) -> None:
    file = folder / "final" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lose_the_optimizer(folder: Path) -> None:
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


@pytest.mark.parametrize(
    ("change", "different"),
    [
        (lambda folder: None, ()),
        (lose_a_line, ("same_log", "same_data")),
        (read_other_text, ("same_log", "same_data")),
        (move_a_weight, ("same_weights",)),
        (lose_the_optimizer, ("same_optimizer",)),
    ],
)
def test_what_is_compared(
    change: Callable[[Path], None], different: tuple[str, ...], run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "killed")
    change(tmp_path / "killed")
    assert compare_runs(run, tmp_path / "killed") == {name: name not in different for name in ALL}


def test_where_a_run_is(run: Path, tmp_path: Path) -> None:
    assert last_logged_step(run) == 4
    assert last_logged_step(tmp_path) == 0
    assert unfinished_checkpoints(run) == set()
    (tmp_path / ".checkpoint-3.tmp").mkdir()
    before = unfinished_checkpoints(tmp_path)
    assert len(before) == 1
    (tmp_path / ".checkpoint-3.tmp").rename(tmp_path / ".checkpoint-3.old")
    (tmp_path / ".checkpoint-3.tmp").mkdir()
    assert unfinished_checkpoints(tmp_path) - before, "another folder under the same name"


def test_bad_numbers_are_refused(corpus_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--kills is 0"):
        api.prove_resume("bert-tiny", corpus_file, tmp_path / "run", kills=0)
    with pytest.raises(UserError, match="--max-steps"):
        api.prove_resume("bert-tiny", corpus_file, tmp_path / "run", kills=3, max_steps=4, vocab_size=400)
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "straight.yaml").touch()
    with pytest.raises(UserError, match=r"exists already, with a proof .* --overwrite makes it again"):
        api.prove_resume("bert-tiny", corpus_file, tmp_path / "proof")


@pytest.mark.slow
def test_a_killed_run_equals_the_uninterrupted_one(corpus_file: Path, tmp_path: Path) -> None:
    result = api.prove_resume(
        "bert-tiny", corpus_file, tmp_path / "run", kills=2, max_steps=600, overrides=SMALL, **SIZES
    )
    assert result["kills"] == 2
    assert result["equal"] is True
    assert all(result[name] for name in ALL)
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == result
    with pytest.raises(UserError, match="exists already"):
        api.prove_resume("bert-tiny", corpus_file, tmp_path / "run", kills=2)
