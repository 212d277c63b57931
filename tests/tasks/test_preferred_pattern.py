"""Preferences change what a model writes: a tiny GPT learns two answers, then to prefer one; so does best-of-n."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks.conftest import write_jsonl
from tasks.small import ANIMALS, parts

import firth
from firth.cli.main import app
from firth.core.errors import UserError
from firth.evaluate.report import write_run_report
from firth.models import make_model
from firth.tasks import FinetuneRecipe, finetune
from firth.text import read_labelled

GOOD, BAD = "is red", "is blue"
SAMPLES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """chat/final answers with either text; preferred/final is tuned on pairs; reward/final scores the pairs.

    No pair is about the last animal.
    """
    folder = tmp_path_factory.mktemp("pattern")
    config, tokenizer = parts("gpt2")
    torch.manual_seed(0)
    model = make_model(config)
    model.tokenizer = tokenizer
    model.save(folder / "gpt2")
    rows = [{"prompt": f"the {a}", "completion": text} for a in ANIMALS for text in (GOOD, BAD)]
    chats = write_jsonl(folder / "chats.jsonl", rows * 4)
    pairs = write_jsonl(
        folder / "pairs.jsonl", [{"prompt": f"the {a}", "chosen": GOOD, "rejected": BAD} for a in ANIMALS[:-1]] * 4
    )
    shared: dict[str, Any] = {"max_seq_length": 32, "seeds": 1, "device": "cpu", "per_device_train_batch_size": 16}
    for name, start, task, file, steps, rate in [
        ("chat", "gpt2", "lm", chats, 100, 1e-2),
        ("preferred", "chat/final", "preference", pairs, 40, 1e-3),
        ("reward", "chat/final", "reward", pairs, 24, 1e-3),
    ]:
        fields = {"checkpoint": str(folder / start), "task": task, "train": str(file), "dev": str(file)}
        fields |= {"output_dir": str(folder / name), "max_steps": steps, "learning_rate": rate}
        finetune(FinetuneRecipe(**shared, **fields))  # type: ignore[arg-type]
    return folder


def share_of_good(texts: list[str]) -> float:
    return sum(text.strip() == GOOD for text in texts) / len(texts)


SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 8}


@pytest.mark.parametrize("animal", [ANIMALS[0], ANIMALS[-1]])
def test_the_preferred_answer_is_written(folder: Path, animal: str) -> None:
    settings = SAMPLING | {"num_return_sequences": SAMPLES}
    before, after = (
        share_of_good(firth.generate(folder / name / "final", f"the {animal}", **settings))  # type: ignore[arg-type]
        for name in ("chat", "preferred")
    )
    assert 0.2 < before < 0.8, "both answers were learned"
    assert after > 0.85


def test_best_of_n_writes_it_too_and_repeats_itself(folder: Path) -> None:
    prompts, reward = [f"the {animal}" for animal in ANIMALS], folder / "reward" / "final"
    settings = SAMPLING | {"best_of": 8, "reward": reward}
    found = [firth.generate(folder / "chat" / "final", prompts, seed=seed, **settings) for seed in (0, 0, 1)]
    assert share_of_good([*found[0], *found[2]]) > 0.9
    assert found[0] == found[1]


def test_the_command(folder: Path, capsys: Any) -> None:
    arguments = ["generate", str(folder / "chat" / "final"), "the cat", "the dog", "--max-new-tokens", "12"]
    best = ["--best-of", "4", "--reward", str(folder / "reward" / "final")]
    app([*arguments, *best, "--json"], standalone_mode=False)
    results = json.loads(capsys.readouterr().out)["results"]
    assert [r["prompt"] for r in results] == [0] * 4 + [1] * 4
    for own in (results[:4], results[4:]):
        rewards = [r["reward"] for r in own]
        assert rewards == sorted(rewards, reverse=True)
        assert [r["best"] for r in own] == [True, False, False, False]
    app([*arguments, *best], standalone_mode=False)
    assert capsys.readouterr().out.strip() == "\n\n".join(r["text"] for r in results if r["best"]).strip()


@pytest.mark.parametrize(("name", "task"), [("preferred", "preference"), ("reward", "reward")])
def test_the_report_shows_margins_and_accuracies(folder: Path, name: str, task: str) -> None:
    results = json.loads((folder / name / "results.json").read_text())
    page = write_run_report(folder / name, results, read_labelled(folder / "pairs.jsonl", task)).read_text()
    for text in ("Margins", "on the right side of 0", "Share of the pairs of each batch", GOOD, "margin"):
        assert text in page
    log = [json.loads(line) for line in (folder / name / "seed-0" / "log.jsonl").read_text().splitlines()]
    assert {"accuracy", "margin", "reward_chosen", "reward_rejected"} <= set(log[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 1, "reward": "reward/final"}, "--best-of is 1"),
        ({"best_of": 4}, "add --reward CHECKPOINT"),
        ({"reward": "reward/final"}, "add --best-of N"),
        ({"best_of": 4, "reward": "chat/final"}, "was fine-tuned for lm, and is no reward model"),
        ({"best_of": 4, "reward": "gpt2"}, "has no head for a reward"),
        ({"best_of": 4, "reward": "nowhere"}, "is not a checkpoint"),
        ({"best_of": 4, "reward": "reward/final", "num_beams": 2}, "leave out --num-beams"),
    ],
)
def test_mistakes_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    options = {name: str(folder / value) if name == "reward" else value for name, value in options.items()}
    with pytest.raises(UserError, match=message):
        firth.generate(folder / "chat" / "final", "the cat", **options)
