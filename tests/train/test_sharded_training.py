"""Sharded models train like one process with the same optimizer: Muon, Adafactor and LAMB read whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train import processes
from train.conftest import small_model
from train.test_distributed import HALF, Runs

from firth.models import ModelConfig, get_preset, with_vocabulary
from firth.models.config import LearnedPosition
from firth.models.presets import gpt2, t5
from firth.recipes import pretraining_recipe
from firth.tokens import ShardSet
from firth.train.dtensor import ShardGroup
from firth.train.resume import merge_recipe

Make = Callable[[str], ShardSet]
STEPS = 24
# Shards, optimizer and learning rate of each model. The default optimizer of T5 is Adafactor, that of others is Muon.
CASES: dict[str, tuple[str, str, float]] = {
    "gpt2": ("gpt2", "muon", 1e-3),
    "bert": ("bert", "adamw", 1e-3),
    "t5": ("t5", "adafactor", 1e-2),
    "albert": ("bert", "muon", 1e-3),
    "lamb": ("bert", "lamb", 1e-3),
}
QUICK_CASES = ("gpt2", "t5", "albert")  # the others are slow tests
STOP = {"harm": {"kind": "stop", "step": 14}}


def case_model(case: str, shards: ShardSet) -> ModelConfig:
    if case == "albert":
        model = with_vocabulary(get_preset("albert-tiny"), shards.tokenizer.vocab)
        return replace(model, dropout=0.0, attention_dropout=0.0, num_layers=4)
    return small_model("bert" if case == "lamb" else case, shards.tokenizer.vocab.size)


class Cases:
    """The runs of each case in one folder."""

    def __init__(self, folder: Path, shards_of: Make) -> None:
        self.folder, self.shards_of = folder, shards_of

    def runs(self, case: str) -> Runs:
        return Runs(self.folder, self.shards_of(CASES[case][0]))

    def fields(self, case: str, processes: int = 1, **more: Any) -> dict[str, Any]:
        """Eight rows a step, with two micro-batches in each process; gradients of the first steps are clipped."""
        _, optim, rate = CASES[case]
        common = {"model": case_model(case, self.runs(case).shards), "optim": optim, "learning_rate": rate}
        rows = {"per_device_train_batch_size": 4 // processes, "gradient_accumulation_steps": 2}
        return {
            **common,
            **rows,
            "max_steps": STEPS,
            "save_steps": 12,
            "eval_steps": STEPS,
            "max_grad_norm": 0.5,
            **more,
        }

    def alone(self, case: str) -> str:
        name = f"{case} alone"
        if not (self.folder / name).exists():
            self.runs(case).alone(name, **self.fields(case))
        return name

    def job(self, case: str, way: str, name: str, size: int, how: dict[str, Any] | None = None) -> dict[str, Any]:
        shards = {"shard_size": 2} if way == "hsdp" else {}
        return self.runs(case).job(name, how, **self.fields(case, size, parallel=way, **shards))

    def assert_close(self, case: str, name: str) -> None:
        """The run equals that of one process, and its losses fell."""
        runs = self.runs(case)
        runs.assert_close(self.alone(case), name, but="key.bias")  # whose true gradient is 0, which rounding decides
        losses = [line["loss"] for line in runs.log(name) if "loss" in line]
        assert len(losses) == STEPS
        assert losses[-1] < losses[0] - 0.1
        norms = [line["grad_norm"] for line in runs.log(name) if "grad_norm" in line]
        assert max(norms) > 0.5, "no gradient was clipped"


@pytest.fixture(scope="module")
def two(shards_of: Make, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Some cases in two processes, in one launch."""
    cases = Cases(tmp_path_factory.mktemp("sharded"), shards_of)
    processes.run(2, [cases.job(case, "fsdp", f"{case} fsdp", 2) for case in QUICK_CASES], cases.folder)
    return cases


@pytest.mark.parametrize("case", QUICK_CASES)
def test_two_processes_train_like_one_with_the_same_optimizer(case: str, two: Cases) -> None:
    two.assert_close(case, f"{case} fsdp")


@pytest.fixture(scope="module")
def many(two: Cases) -> Cases:
    """Runs of two and four processes, and runs that were stopped and resume with other numbers of processes.

    `from 2 to 4`: two processes stop, four continue. `from 4 to 1`: four stop, one continues. `from 1 to 4`: back.
    """

    def run(size: int, jobs: list[dict[str, Any]]) -> None:
        processes.run(size, jobs, two.folder, patience=processes.SLOW_PATIENCE)

    jobs = [two.job(case, way, f"{case} {way} by 4", 4) for case in CASES for way in ("fsdp", "hsdp")]
    jobs += [two.job(case, "fsdp", f"{case} from 4 to 1", 4, STOP) for case in CASES]
    run(4, jobs + [two.job(case, "hsdp", f"{case} hsdp from 4 to 2", 4, STOP) for case in CASES])
    jobs = [two.job(case, "fsdp", f"{case} from 2 to 4", 2, STOP) for case in CASES]
    run(2, jobs + [two.job(case, "fsdp", f"{case} fsdp", 2) for case in CASES if case not in QUICK_CASES])
    for case in CASES:
        with processes.harmed(**STOP["harm"]):
            two.runs(case).alone(f"{case} from 1 to 4", **two.fields(case))
    resume = {"resume": True}
    run(4, [two.job(case, "fsdp", f"{case} from {n} to 4", n, resume) for case in CASES for n in (1, 2)])
    run(2, [two.job(case, "fsdp", f"{case} hsdp from 4 to 2", 4, resume) for case in CASES])
    for case in CASES:
        two.runs(case).alone(f"{case} from 4 to 1", resume=True, **two.fields(case, 4))
    return two


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK_CASES])
def test_two_processes_train_like_one_with_other_optimizers(case: str, many: Cases) -> None:
    many.assert_close(case, f"{case} fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "hsdp"])
@pytest.mark.parametrize("case", CASES)
def test_four_processes_train_like_one(case: str, way: str, many: Cases) -> None:
    many.assert_close(case, f"{case} {way} by 4")


@pytest.mark.slow
@pytest.mark.parametrize("change", ["from 4 to 1", "from 1 to 4", "from 2 to 4", "hsdp from 4 to 2"])
@pytest.mark.parametrize("case", CASES)
def test_resume_with_another_number_of_processes(case: str, change: str, many: Cases) -> None:
    many.assert_close(case, f"{case} {change}")


@pytest.mark.slow
def test_blocks_that_are_read_outside_of_their_forward_pass(shards_of: Make, tmp_path: Path) -> None:
    """A value residual reads the first block's values in all layers; shared stacks run each block twice."""
    plain = {"dropout": 0.0, "attention_dropout": 0.0}
    decoder, both = (Runs(tmp_path, shards_of(family)) for family in ("gpt2", "t5"))
    residual = gpt2(3, 32, 2, decoder.shards.tokenizer.vocab.size, value_residual=True, **plain)
    stacks = t5(2, 32, 2, 64, both.shards.tokenizer.vocab.size, share_stacks=True, **plain)
    cases = [("residual", decoder, replace(residual, position=LearnedPosition(32))), ("stacks", both, stacks)]
    common = {"optim": "muon", "learning_rate": 1e-3}
    jobs = [runs.job(name, parallel="fsdp", model=model, **HALF, **common) for name, runs, model in cases]
    processes.run(2, jobs, tmp_path)
    for name, runs, model in cases:
        runs.alone(f"{name} alone", model=model, per_device_train_batch_size=8, **common)
        runs.assert_close(f"{name} alone", name, but="key.bias")


# --- eight processes --------------------------------------------------------------------------------------------------

EIGHT: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "hsdp 2 x 4": {"parallel": "hsdp", "shard_size": 4},
    "hsdp 4 x 2": {"parallel": "hsdp", "shard_size": 2},
}


@pytest.fixture(scope="module")
def eight(shards_of: Make, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """A GPT-2 with Muon in eight processes, each way, and resumed `from 8 to 2` and `from 2 to 8`."""
    cases = Cases(tmp_path_factory.mktemp("eight"), shards_of)

    def job(name: str, rows: int, how: dict[str, Any] | None = None, way: str = "fsdp") -> dict[str, Any]:
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
        return cases.runs("gpt2").job(name, how, **cases.fields("gpt2", **sizes, **EIGHT[way]))

    def run(size: int, jobs: list[dict[str, Any]]) -> None:
        processes.run(size, jobs, cases.folder, patience=processes.SLOW_PATIENCE)

    run(8, [*(job(f"{way} by 8", 1, way=way) for way in EIGHT), job("from 8 to 2", 1, STOP)])
    run(2, [job("from 8 to 2", 1, {"resume": True}), job("from 2 to 8", 4, STOP)])
    run(8, [job("from 2 to 8", 4, {"resume": True})])
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"{way} by 8" for way in EIGHT), "from 8 to 2", "from 2 to 8"])
def test_eight_processes_read_and_train_like_one(name: str, eight: Cases) -> None:
    """`close` compares `data`, the hash of all batches so far, exactly: the order of the rows is the same."""
    eight.assert_close("gpt2", name)
    index = eight.folder / name / "checkpoint-24" / "model.safetensors.index.json"
    assert index.exists() == (name != "ddp by 8"), "a sharded model has one file per process"


# --- the same optimizer, for any number of processes ------------------------------------------------------------------


@pytest.mark.parametrize(("family", "optim"), [("bert", "muon"), ("gpt2", "muon"), ("t5", "adafactor")])
def test_the_default_optimizer_does_not_depend_on_parallel(family: str, optim: str) -> None:
    recipes = [pretraining_recipe(small_model(family, 100), parallel=way) for way in ("none", "ddp", "fsdp", "hsdp")]
    assert {recipe.optim for recipe in recipes} == {optim}
    assert {(recipe.learning_rate, recipe.weight_decay) for recipe in recipes} == {
        (recipes[0].learning_rate, recipes[0].weight_decay)
    }


def test_rows_are_divided_as_torch_chunks_them() -> None:
    for num_rows in (1, 2, 5, 8, 96):
        for size in (1, 2, 3, 4, 8):
            chunks = torch.arange(num_rows).chunk(size)
            ours = [list(rows) for rows in ShardGroup(size=size).row_ranges(num_rows)]
            assert ours == [chunk.tolist() for chunk in chunks] + [[]] * (size - len(chunks))
    assert ShardGroup(size=4).split_rows((3, 3, 2)) == [[2, 0, 0], [1, 1, 0], [0, 2, 0], [0, 0, 2]]


def test_a_run_may_resume_with_another_way(shards_of: Make, tmp_path: Path) -> None:
    runs = Runs(tmp_path, shards_of("bert"))
    saved = replace(runs.recipe("run", **HALF, parallel="hsdp", shard_size=2), processes=4)
    resumed = merge_recipe(saved, replace(saved, parallel="fsdp", shard_size=0))
    assert (resumed.parallel, resumed.shard_size) == ("fsdp", 0)
