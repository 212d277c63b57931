"""Fine-tuning in several processes: the steps, scores and files of one process with the same global batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tasks.test_finetune import recipe
from train import processes

from firth.core.errors import UserError
from firth.tasks import FinetuneRecipe, finetune
from firth.tasks.finetune_job import make_finetune_batch_fn
from firth.tasks.processes import join_processes, micro_batch_size, share_default_batch
from firth.train import load_recipe, read_log, save_recipe
from firth.train.distributed import DistContext

Checkpoints = Callable[[str], Path]
Toy = dict[str, Path]
CLOSE = 1e-5
COMMON: dict[str, Any] = {"seeds": 2, "max_steps": 12, "eval_steps": 6, "save_steps": 5, "learning_rate": 1e-3}
# Two rates are tried, for 20 of 200 steps each.
RATES: dict[str, Any] = {"rate_candidates": (1e-3, 3e-3), "max_steps": 200, "seeds": 1, "eval_steps": 200}


class Finetuned:
    """Runs of one and of two processes."""

    def __init__(self, folder: Path, checkpoint: Path, toy: Toy) -> None:
        self.folder, self.checkpoint, self.toy = folder, checkpoint, toy
        self.said: list[str] = []

    def recipe(self, name: str, processes: int = 1, **fields: Any) -> FinetuneRecipe:
        """Eight examples a step, in two micro-batches of four."""
        sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2 // processes}
        return recipe(self.checkpoint, self.toy, self.folder / name, **COMMON | sizes | fields)

    def job(self, name: str, how: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        file = self.folder / f"{name}.yaml"
        save_recipe(self.recipe(name, 2, **fields), file)
        return {"finetune": str(file), **(how or {})}

    def close(self, one: str, other: str) -> None:
        """Assert that two runs read the same examples and differ by rounding only."""
        for seed in sorted(p.name for p in (self.folder / one).glob("seed-*")):
            a, b = (self.folder / name / seed for name in (one, other))
            for mine, theirs in zip(read_log(a / "log.jsonl"), read_log(b / "log.jsonl"), strict=True):
                assert mine.keys() == theirs.keys()
                assert mine.get("data") == theirs.get("data")
                for key in mine.keys() - {"data"}:
                    assert theirs[key] == pytest.approx(mine[key], abs=CLOSE, rel=CLOSE), key
            weights = load_file(b / "final" / "model.safetensors")
            for name, value in load_file(a / "final" / "model.safetensors").items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=CLOSE)
            results = [json.loads((run / "results.json").read_text()) for run in (a, b)]
            assert results[0]["scores"] == pytest.approx(results[1]["scores"])
        lines = [
            [json.loads(line)["prediction"] for line in (self.folder / name / "predictions.jsonl").open()]
            for name in (one, other)
        ]
        assert lines[0] == lines[1]


@pytest.fixture(scope="module")
def two(toy: Toy, checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Finetuned:
    """The results of two processes, in one launch."""
    runs = Finetuned(tmp_path_factory.mktemp("two"), checkpoint_of("bert"), toy)
    signal = {"harm": {"kind": "signal", "rank": 1, "step": 7}}
    files = [f"--{name}={toy[name]}" for name in ("train", "dev")]
    words = ["finetune", str(runs.checkpoint), "--task=classify", *files, f"--output-dir={runs.folder / 'command'}"]
    words += ["--seeds=1", "--max-steps=2", "--learning-rate=1e-3", "--no-compile", "--no-bf16"]
    runs.said = processes.run(2, [runs.job("two"), runs.job("stopped", signal), {"words": words}], runs.folder)
    return runs


def test_two_processes_fine_tune_like_one(two: Finetuned) -> None:
    finetune(two.recipe("one"))
    two.close("one", "two")
    names = [{str(p.relative_to(two.folder / name)) for p in (two.folder / name).rglob("*")} for name in ("one", "two")]
    assert names[0] == names[1]
    recorded = load_recipe(two.folder / "two" / "recipe.yaml", FinetuneRecipe)
    assert (recorded.parallel, recorded.processes, recorded.global_batch_size) == ("ddp", 2, 8)


def test_one_process_resumes_a_run_of_two(two: Finetuned) -> None:
    for rank in (0, 1):
        assert (two.folder / f"stopped-{rank}.txt").read_text().startswith("143: stopped at step 8 of 12")
    finetune(two.recipe("stopped", 2), resume=True)
    two.close("two", "stopped")


def test_the_command_shares_its_default_batch_and_rank_0_prints(two: Finetuned) -> None:
    assert (two.folder / "command" / "report.html").is_file()
    assert load_recipe(two.folder / "command" / "recipe.yaml", FinetuneRecipe).global_batch_size == 16
    first, other = two.said
    assert "global batch: 16 examples, 8 in each of 2 processes" in first
    assert "--parallel ddp: each of 2 processes has the whole model" in first
    assert other == ""


@pytest.mark.slow
def test_rates_are_tried_in_all_processes(two: Finetuned) -> None:
    rows = [json.loads(line) for line in two.toy["train"].read_text().splitlines()]
    many = [{**row, "text": f"{row['text']} {end}"} for row in rows for end in ("now", "then", "too")]  # 320 are needed
    train = two.folder / "many.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in many))
    processes.run(2, [two.job("rates", train=str(train), **RATES)], two.folder)
    finetune(two.recipe("rates alone", train=str(train), **RATES))
    trials = [json.loads((two.folder / name / "learning_rate.json").read_text()) for name in ("rates", "rates alone")]
    assert trials[0]["chosen"] == trials[1]["chosen"]
    assert trials[0]["batch_losses"][0] == pytest.approx(trials[1]["batch_losses"][0], rel=1e-4)


class Pretended(DistContext):
    """A rank of a process group that does not exist."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.world_size = rank, size


class Counting:
    """A task whose batches are lists of examples."""

    def collate(self, items: Any) -> Any:
        return list(items)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_processes_share_each_batch(size: int, toy: Toy, tmp_path: Path) -> None:
    settings = recipe(tmp_path, toy, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    task: Any = Counting()
    parts = [
        make_finetune_batch_fn(settings, task, range(20), dist_context=Pretended(rank, size))(3) for rank in range(size)
    ]
    whole = make_finetune_batch_fn(settings, task, range(20))(3)
    assert [i for part in parts for batch in part for i in batch] == [i for batch in whole for i in batch]
    assert {len(part) for part in parts} == {max(4 // size, 1)}


def test_an_uneven_share_of_a_batch_raises(toy: Toy, tmp_path: Path) -> None:
    settings = recipe(tmp_path, toy, tmp_path, per_device_train_batch_size=12)
    assert [micro_batch_size(settings, n) for n in (1, 2, 3, 12)] == [12, 6, 4, 1]
    with pytest.raises(UserError, match=r"5 processes cannot share 12 examples .* 1, 2, 3, 4, 6, 12\."):
        micro_batch_size(settings, 5)
    with pytest.raises(UserError, match="embed contrasts the 12 texts of a micro-batch"):
        micro_batch_size(recipe(tmp_path, toy, tmp_path, task="embed", per_device_train_batch_size=12), 2)


def test_a_default_batch_is_that_of_one_process(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = recipe(tmp_path, toy, tmp_path)
    assert share_default_batch(settings) == settings
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert share_default_batch(settings).per_device_train_batch_size == 4
    assert "global batch: 16 examples, 4 in each of 4 processes" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="16 examples cannot be shared by 3 processes"):
        share_default_batch(settings)


def test_fsdp_is_for_pretraining(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fine-tune with --parallel ddp"):
        join_processes(recipe(tmp_path, toy, tmp_path, parallel="fsdp"))
