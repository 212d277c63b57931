"""The likely cause of a seed that is at or below chance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import firth
from firth.tasks import FinetuneRecipe
from firth.tasks.failure import explain_failed_seed
from firth.text import Example

MIXED = [Example(i, ("a",), "yes" if i % 2 else "no") for i in range(40)]


def explain(tmp_path: Path, losses: Sequence[float | None], examples: list[Example] = MIXED, **fields: Any) -> str:
    lines = [{"step": i + 1, **({} if loss is None else {"loss": loss})} for i, loss in enumerate(losses)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = FinetuneRecipe(
        **{"train": "train.csv", "dev": "dev.csv", "max_steps": 400, "learning_rate": 8e-3} | fields
    )
    sentence, options = explain_failed_seed(recipe, examples, MIXED, tmp_path)
    assert not options or options.split()[0] in ("--metric", "--freeze", "--max-steps", "--learning-rate")
    return sentence


def falling(first: float, last: float, n: int = 40) -> list[float]:
    return [first + (last - first) * i / (n - 1) for i in range(n)]


@pytest.mark.parametrize(
    ("losses", "fields", "words"),
    [
        (
            falling(0.7, 0.9),
            {},
            "the loss went from 0.708 to 0.892: the learning rate of 0.008 is too high. Try",
        ),
        (falling(0.7, 0.9), {}, "--learning-rate 0.002"),
        (falling(17.0, 0.7), {}, "the learning rate of 0.008 is too high"),
        ([*falling(17.0, 0.1), *[0.1] * 10], {}, "so it learned train, and dev does not follow"),
        (falling(0.7, 0.69), {"max_steps": 40}, "in 40 steps: these are too few"),
        (falling(0.7, 0.4), {}, "in 400 steps: these are too few"),
        (falling(0.7, 0.1), {}, "so it learned train, and dev does not follow"),
        (falling(0.7, 0.7), {"from_scratch": True}, "from random weights: the model was not pretrained"),
        (falling(0.7, 0.7), {"freeze": "backbone"}, "with a frozen backbone"),
        (falling(0.7, 0.7), {}, "and never fell"),
        (falling(0.7, 0.7), {}, "or labels do not follow from the texts: their frequencies alone have 0.693"),
        ([0.7, 0.9], {"max_steps": 2}, "2 steps are too few"),
        ([], {}, "too few"),
        ([None] * 3 + falling(0.7, 0.9), {}, "too high"),
        (falling(0.7, 0.25), {"train": "rare", "max_steps": 40}, "in 40 steps: these are too few"),
        (falling(1.0, 0.3), {"task": "tag", "max_steps": 40}, "in 40 steps: these are too few"),
    ],
)
def test_causes(losses: list[float | None], fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    rare = [Example(i, ("a",), "no" if i % 8 else "yes") for i in range(40)]  # an entropy of 0.38
    tagged = [Example(i, ("a", "b"), ("O", "B-PER" if i % 4 == 0 else "O")) for i in range(40)]  # 0.38 too
    train = rare if "train" in fields else tagged if "task" in fields else MIXED
    assert words in explain(tmp_path, losses, examples=train, **fields)


def test_constant_labels_come_first(tmp_path: Path) -> None:
    train = [Example(i, ("a",), "no" if i else "yes") for i in range(40)]
    found = explain(tmp_path, falling(0.7, 0.9), train)
    assert found.startswith("train.csv: 98% of the labels are 'no'")
    assert "--class-weights balanced" in found
    same = [Example(i, ("a",), "no") for i in range(9)]
    cause = explain_failed_seed(FinetuneRecipe(dev="dev.csv"), MIXED, same, tmp_path)
    assert cause.sentence.startswith("dev.csv: every label is 'no', so no score shows what the model has learned.")
    assert not cause.options


def test_a_run_at_chance_says_so_in_the_terminal_the_results_and_the_report(
    checkpoint_of: Callable[[str], Path], toy: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in toy["dev"].read_text().splitlines()]
    dev = tmp_path / "dev.jsonl"
    flipped = [row | {"label": "animal" if row["label"] == "place" else "place"} for row in rows]
    dev.write_text("".join(json.dumps(row) + "\n" for row in flipped))
    words = (checkpoint_of("bert"), "classify", toy["train"], dev, tmp_path / "run")
    found = firth.finetune(*words, max_steps=60, seeds=1, max_seq_length=32, learning_rate=3e-3)
    cause = found["failure_causes"]["0"]
    assert "dev does not follow" in cause
    (note,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert note == f"note: 1 of 1 seed did not beat chance (accuracy 51.7%). Likely cause: {cause}."
    page = Path(found["report"]).read_text(encoding="utf-8")
    assert "is at or below chance" in page
    assert "Health" in page
    assert "seeds do not beat chance" in page  # the doctor's finding
