"""Every kind of model in several processes: losses and recurrent states equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from train import processes
from train.test_distributed import Runs

from firth.models import ModelConfig, get_preset, with_vocabulary
from firth.models.config import AWDLSTMConfig
from firth.tokens import ShardSet
from firth.train.recipe import EngineConfig

Make = Callable[[str], ShardSet]
pytestmark = pytest.mark.slow

# Name of the preset, shards, ways, and what else its recipe says.
CASES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "gpt2": ("gpt2-tiny", "gpt2", ("ddp", "fsdp"), {}),
    "llama": ("llama-tiny", "gpt2", ("ddp", "fsdp"), {}),
    "t5": ("t5-tiny", "t5", ("ddp", "fsdp"), {}),
    "bart": ("bart-tiny", "bert", ("ddp", "fsdp"), {}),
    "modernbert": ("modernbert-tiny", "bert", ("ddp", "fsdp"), {}),
    "spanbert": ("spanbert-tiny", "bert", ("ddp", "fsdp"), {}),
    "electra": ("electra-tiny", "bert", ("ddp", "fsdp"), {}),
    "deberta": ("deberta-tiny", "bert", ("ddp", "fsdp"), {}),
    "xlnet": ("xlnet-tiny", "bert", ("ddp", "fsdp"), {}),
    "albert": ("albert-tiny", "bert", ("ddp", "fsdp"), {}),
    "memory": ("xlnet-tiny", "bert", ("ddp",), {"order": "stream", "memory": 16}),
    "ulmfit": ("ulmfit-tiny", "gpt2", ("ddp",), {}),
    "bf16 weights": ("bert-tiny", "bert", ("ddp",), {"engine": EngineConfig(weights="bf16")}),
    "longer rows": ("bert-tiny", "bert", ("ddp", "fsdp"), {"length_ramp": 0.5, "length_doublings": 1}),
}


def without_dropout(config: ModelConfig) -> ModelConfig:
    changes: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
    if isinstance(config.recurrent, AWDLSTMConfig):
        drops = [name for name in vars(config.recurrent) if "drop" in name]
        changes["recurrent"] = replace(config.recurrent, **dict.fromkeys(drops, 0.0))
    return replace(config, **changes)


@pytest.fixture(scope="module")
def done(shards_of: Make, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All families in one launch of two processes, each stopped and resumed once."""
    folder, jobs = tmp_path_factory.mktemp("families"), []
    for case, (name, data, ways, more) in CASES.items():
        runs = Runs(folder, shards_of(data))
        model = without_dropout(with_vocabulary(get_preset(name), runs.shards.tokenizer.vocab))
        common = {"model": model, "max_steps": 4, "learning_rate": 1e-3, **more}
        runs.alone(f"{case} alone", per_device_train_batch_size=4, gradient_accumulation_steps=2, **common)
        for way in ways:
            how = {"parallel": way, "per_device_train_batch_size": 4, **common}
            jobs.append(runs.job(f"{case} {way}", {"harm": {"kind": "stop", "step": 3}}, **how))
            jobs.append(runs.job(f"{case} {way}", {"resume": True}, **how))
    processes.run(2, jobs, folder)
    return Runs(folder, shards_of("bert"))


@pytest.mark.parametrize(("case", "way"), [(case, way) for case, (_, _, ways, _) in CASES.items() for way in ways])
def test_two_processes_train_like_one(case: str, way: str, done: Runs) -> None:
    done.assert_close(f"{case} alone", f"{case} {way}", but="key.bias")
