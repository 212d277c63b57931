"""`finetune --against`: two arms with equal settings in folders of their own, and the test of their difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import firth
from firth.core import console
from firth.core.errors import UserError
from firth.core.files import replace_nonfinite

Checkpoints = Callable[[str], Path]
Toy = dict[str, Path]


def run(checkpoint: Path, toy: Toy, folder: Path, against: str, **options: Any) -> dict[str, Any]:
    small = {"max_steps": 1, "seeds": 3, "max_seq_length": 32, "learning_rate": 3e-3, "shots": 8}
    return firth.finetune(
        checkpoint, "classify", toy["train"], toy["dev"], folder, against=against, **small | options
    )  # fmt: skip


def test_both_arms_and_their_difference(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    found = run(checkpoint_of("bert"), toy, folder, "scratch")
    arms = [yaml.safe_load((folder / name / "recipe.yaml").read_text()) for name in ("finetuned", "scratch")]
    assert {k for k in arms[0] if arms[0][k] != arms[1][k]} == {"output_dir", "baseline", "from_scratch"}
    assert json.loads((folder / "results.json").read_text()) == replace_nonfinite(found)
    comparison, other = found["comparison"], found["against"]
    assert comparison["difference"] == pytest.approx(found["mean"] - other["mean"])
    assert (comparison["over"], comparison["num_seeds"]) == ("seeds and examples", [3, 3])
    assert comparison["paired_seeds"]  # with --shots, seed i of both arms has the same examples
    assert (len(other["seeds"]), other["from_scratch"]) == (3, True)
    page = Path(found["report"]).read_text(encoding="utf-8")
    said = " ".join(capsys.readouterr().err.split())
    for sentence in ("over 3 pairs of seeds and", "chance"):
        assert sentence in page
        assert sentence in said
    assert "Arm 2 of 2" in said
    model = folder / "finetuned" / "seed-2" / "final" / "model.safetensors"
    before = model.stat().st_mtime_ns, found["comparison"]
    (folder / "results.json").unlink()
    again = run(checkpoint_of("bert"), toy, folder, "scratch", resume=True)
    assert (model.stat().st_mtime_ns, again["comparison"]) == before
    with pytest.raises(UserError, match="exists already"):
        run(checkpoint_of("bert"), toy, folder, "scratch")


def test_another_checkpoint_as_the_other_arm(
    checkpoint_of: Checkpoints,
    toy: Toy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An arm against itself has no difference; two seeds are not judged. The time left covers arms and seeds."""
    series: list[int] = []
    monkeypatch.setattr("firth.train.loop.format_time_left", lambda s: str(series.append(len(console._open_series))))
    same = run(checkpoint_of("bert"), toy, tmp_path / "run", str(checkpoint_of("bert")), seeds=2)
    assert (same["comparison"]["difference"], same["comparison"]["over"]) == (0.0, "examples")
    assert same["against"]["output_dir"] == str(tmp_path / "run" / "against")
    assert series == [2] * 4
    assert "2 and 2 seeds are too few" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("options", [{"from_scratch": True}, {"rewind": 0}, {"baseline": "other"}])
def test_what_against_excludes(options: dict[str, Any], checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=next(iter(options)).replace("_", "-")):
        run(checkpoint_of("bert"), toy, tmp_path / "run", "scratch", **options)
    with pytest.raises(UserError, match="is not a checkpoint folder"):
        run(checkpoint_of("bert"), toy, tmp_path / "run", str(tmp_path / "none"))
    assert not (tmp_path / "run").exists()
