"""Which way several processes train where `--parallel` does not say, and how HSDP groups them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from firth.commands.pretrain_plan import with_chosen_batch
from firth.core.errors import UserError
from firth.models import get_preset
from firth.train import Recipe
from firth.train.distributed import DDPContext
from firth.train.launch import choose_parallel, choose_shard_size
from firth.train.launch_env import LaunchEnv
from firth.train.resources import estimate_resources

Make = Callable[..., Recipe]


class Alike(DDPContext):
    """A rank of two that are alike: collectives return what this one has."""

    def __init__(self, size: int = 2) -> None:
        self.launch_env = LaunchEnv(0, size, 0, size, 0, False)
        self.rank, self.world_size = 0, size

    def all_reduce_max(self, number: int) -> int:
        return number


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the memory of the machine, which two processes share."""

    def set_bytes(size: int) -> None:
        monkeypatch.setattr("firth.train.launch.available_memory", lambda device: size)

    monkeypatch.setattr("firth.train.launch.init_distributed", lambda training: Alike())
    monkeypatch.setattr("firth.train.launch.select_device", lambda context, training: torch.device("cpu"))
    return set_bytes


def test_the_size_of_the_model_chooses_between_ddp_and_fsdp(
    recipe_of: Make, memory: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of("bert")
    needed = estimate_resources(recipe.model, recipe).memory_bytes
    for size, way in ((4 * needed + 8, "ddp"), (4 * needed - 8, "fsdp"), (0, "ddp")):
        memory(size)
        assert choose_parallel(recipe).parallel == way
        line = " ".join(capsys.readouterr().err.split())
        assert f"--parallel {way}: weights, gradients and optimizer state take" in line
        assert "each of 2 processes" in line


def test_a_model_that_cannot_be_sharded_gets_ddp_with_the_reason(
    recipe_of: Make, memory: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    memory(1000)
    recipe = recipe_of("gpt2", order="stream")
    lstm: dict[str, Any] = {**vars(recipe), "model": get_preset("ulmfit-tiny")}
    assert choose_parallel(Recipe(**lstm)).parallel == "ddp"
    assert "does not support LSTMs" in capsys.readouterr().err


def test_a_given_way_stays_and_one_process_has_none(recipe_of: Make) -> None:
    for way in ("none", "ddp", "fsdp", "hsdp"):
        assert choose_parallel(recipe_of(parallel=way)).parallel == way
    assert choose_parallel(recipe_of()).parallel == "none"


def test_hsdp_shards_over_the_processes_of_a_machine(recipe_of: Make) -> None:
    two_machines = LaunchEnv(0, 16, 0, 8, 0, False)
    assert choose_shard_size(recipe_of(parallel="hsdp"), two_machines) == 8
    assert choose_shard_size(recipe_of(parallel="hsdp", shard_size=4), two_machines) == 4
    with pytest.raises(UserError, match=r"16 processes cannot be divided into groups of 3\. .* 1, 2, 4, 8, 16"):
        choose_shard_size(recipe_of(parallel="hsdp", shard_size=3), two_machines)


def test_a_batch_that_follows_the_number_of_processes_is_said(
    recipe_of: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(per_device_train_batch_size=0, max_steps=100)
    alone = with_chosen_batch(recipe, 10**6).global_batch_tokens
    assert "one process" not in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert with_chosen_batch(recipe, 10**6).global_batch_tokens != alone
    assert f"--global-batch-tokens {alone} trains in 3 processes as in one" in " ".join(capsys.readouterr().err.split())
