"""Fine-tuning with CUDA graphs equals fine-tuning without."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks.conftest import write_jsonl

from firth.models import Model, load_model, make_model
from firth.tasks import FinetuneRecipe, finetune
from firth.tasks.rate_trial import load_trial
from firth.train import read_log
from firth.train.cuda_graphs import CudaGraphStep
from firth.train.recipe import EngineConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
Checkpoints = Callable[[str], Path]
Toy = dict[str, Path]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CudaGraphStep]:
    """Every CUDA-graph step that is created."""
    found: list[CudaGraphStep] = []
    first = CudaGraphStep.__init__

    def note(self: CudaGraphStep, *given: Any) -> None:
        first(self, *given)
        found.append(self)

    monkeypatch.setattr(CudaGraphStep, "__init__", note)
    return found


def losses(checkpoint: Path, toy: Toy, folder: Path, **fields: Any) -> list[float]:
    small: dict[str, Any] = dict(
        checkpoint=str(checkpoint),
        train=str(toy["train"]),
        dev=str(toy["dev"]),
        output_dir=str(folder),
        max_steps=24,
        max_seq_length=32,
        seeds=1,
        learning_rate=3e-3,
        bf16=False,
    )
    finetune(FinetuneRecipe(**small | fields))
    return [row["loss"] for row in read_log(folder / "seed-0" / "log.jsonl") if "loss" in row]


def with_dropout(checkpoint: Path, folder: Path) -> Path:
    plain = load_model(checkpoint)
    model = make_model(replace(plain.config, dropout=0.2, attention_dropout=0.2))
    model.load_state_dict(plain.state_dict())
    model.tokenizer = plain.tokenizer
    model.save(folder)
    return folder


def pools() -> set[tuple[int, int]]:
    """Bytes of the default memory pool and of graph pools."""
    gc.collect()
    torch.cuda.empty_cache()
    return {tuple(some["segment_pool_id"]) for some in torch.cuda.memory_snapshot()}


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "roberta", "bart", "xlnet", "llama"])
def test_a_replayed_run_is_equal(
    family: str, checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, made: list[CudaGraphStep]
) -> None:
    """Batches of several shapes, with dropout; padded alike, since dropout depends on the shape."""
    checkpoint = with_dropout(checkpoint_of(family), tmp_path / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphStep, "capture", lambda *_: None)
        one = losses(checkpoint, toy, tmp_path / "one")
    other = losses(checkpoint, toy, tmp_path / "other")
    assert not made[0].graphs
    assert made[1].is_enabled
    assert made[1].graphs
    assert other == pytest.approx(one, rel=2e-3)
    assert len(set(other)) == len(other)


@pytest.mark.parametrize(
    "fields",
    [
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
        {"ema_decay": 0.9, "eval_steps": 7},
        {"lora_rank": 2},
        {"freeze": "backbone"},
        {"optim": "muon"},
        {"pool": "mean", "class_weights": "balanced"},
        {"unfreeze_every": 8, "engine": EngineConfig(cuda_graphs=True)},
        {"fp16": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_training_option_is_equal(
    fields: dict[str, Any], checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, made: list[CudaGraphStep]
) -> None:
    one = losses(checkpoint_of("bert"), toy, tmp_path / "one", **fields | {"engine": EngineConfig(cuda_graphs=False)})
    other = losses(checkpoint_of("bert"), toy, tmp_path / "other", **fields)
    assert made[0].is_enabled
    assert made[0].graphs
    assert other == pytest.approx(one, rel=1e-2 if "fp16" in fields else 2e-3)


def test_other_tasks_are_equal(checkpoint_of: Checkpoints, tmp_path: Path, made: list[CudaGraphStep]) -> None:
    words = [["Anna", "saw", "the", "cat"], ["the", "dog", "saw", "You"]] * 8
    rows = [{"tokens": some, "tags": ["B-PER" if word[0].isupper() else "O" for word in some]} for some in words]
    pairs = [{"text_a": " ".join(a), "text_b": " ".join(b), "label": float(a == b)} for a in words for b in words[:3]]
    spans = [
        {
            "id": str(i),
            "question": "who saw",
            "context": " ".join(some),
            "answers": {"text": ["saw"], "answer_start": [5]},
        }
        for i, some in enumerate(words)
        if some[0] == "Anna"
    ]
    for task, found in (("tag", rows), ("regress", pairs), ("span-qa", spans)):
        file = write_jsonl(tmp_path / f"{task}.jsonl", found)
        toy = {"train": file, "dev": file}
        one = losses(
            checkpoint_of("bert"), toy, tmp_path / task / "one", task=task, engine=EngineConfig(cuda_graphs=False)
        )
        other = losses(checkpoint_of("bert"), toy, tmp_path / task / "other", task=task)
        assert other == pytest.approx(one, rel=2e-3, abs=1e-6), task
    assert all(some.is_enabled and some.graphs for some in made)
    assert len(made) == 3


def test_a_failed_capture_continues_without_graphs(
    checkpoint_of: Checkpoints,
    toy: Toy,
    tmp_path: Path,
    made: list[CudaGraphStep],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With dropout, whose random state, memory pool and stream are restored."""
    checkpoint, plain = with_dropout(checkpoint_of("bert"), tmp_path / "checkpoint"), Model.losses
    stream = torch.cuda.current_stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphStep, "capture", lambda *_: None)
        one = losses(checkpoint, toy, tmp_path / "one")
    before = pools()

    def waiting(self: Model, batch: Any, with_metrics: bool = False) -> dict[str, torch.Tensor]:
        assert int(batch.input_ids.sum().item()) > 0  # the host waits for the device
        return plain(self, batch, with_metrics)

    monkeypatch.setattr(Model, "losses", waiting)
    other = losses(checkpoint, toy, tmp_path / "other")
    assert made[0].is_enabled
    assert not made[1].is_enabled
    assert capsys.readouterr().err.count("CUDA graphs disabled from here on") == 1
    assert other == pytest.approx(one, rel=2e-3)
    assert torch.cuda.current_stream() == stream
    assert pools() <= before


def test_moved_weights_are_captured_again(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, made: list[CudaGraphStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and gradients are replaced by other tensors after every step."""
    one = losses(checkpoint_of("bert"), toy, tmp_path / "one", engine=EngineConfig(cuda_graphs=False))
    plain, calls = CudaGraphStep.forward_backward, []

    def moved(self: CudaGraphStep, *given: Any) -> torch.Tensor:
        calls.append(len(self.graphs))
        for p in self.model.parameters() if len(calls) == 9 else ():
            p.data, p.grad = p.data.clone(), None
        return plain(self, *given)

    monkeypatch.setattr(CudaGraphStep, "forward_backward", moved)
    other = losses(checkpoint_of("bert"), toy, tmp_path / "other")
    assert calls[8] > 0
    assert made[0].is_enabled
    assert other == pytest.approx(one, rel=2e-3)


def test_out_of_memory_frees_the_graphs_first(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, made: list[CudaGraphStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold as much as a batch: without them the batch may keep its size."""
    one = losses(checkpoint_of("bert"), toy, tmp_path / "one", engine=EngineConfig(cuda_graphs=False))
    plain, calls = CudaGraphStep.forward_backward, []

    def short(self: CudaGraphStep, *given: Any) -> torch.Tensor:
        calls.append(len(self.graphs))
        if len(calls) == 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, *given)

    monkeypatch.setattr(CudaGraphStep, "forward_backward", short)
    other = losses(checkpoint_of("bert"), toy, tmp_path / "other")
    assert calls[8] > 0
    assert len(calls) == 24 + 1
    assert not made[0].is_enabled
    assert not made[0].graphs
    assert other == pytest.approx(one, rel=2e-3)


def test_trials_of_rates_share_cuda_graphs(
    checkpoint_of: Checkpoints,
    toy: Toy,
    tmp_path: Path,
    made: list[CudaGraphStep],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rates need one runner, record each shape once, and have the losses that they have without graphs."""
    monkeypatch.setattr("firth.tasks.rate_trial.MIN_TRIAL_STEPS", 4)
    monkeypatch.setattr("firth.tasks.rate_trial.MIN_HELD_OUT_EXAMPLES", 9)
    captured: list[Any] = []
    capture = CudaGraphStep.capture

    def note(self: CudaGraphStep, shape: Any, inputs: Any) -> None:
        captured.append((id(self), shape))
        capture(self, shape, inputs)

    monkeypatch.setattr(CudaGraphStep, "capture", note)
    fields: dict[str, Any] = {"rate_candidates": (1e-3, 3e-3, 1e-2), "max_steps": 40}
    losses(checkpoint_of("bert"), toy, tmp_path / "graphs", **fields)
    assert len(made) == 2, "one for the trials, one for the seed"
    assert len(captured) == len(set(captured))
    losses(checkpoint_of("bert"), toy, tmp_path / "plain", **fields, engine=EngineConfig(cuda_graphs=False))
    trials = [load_trial(tmp_path / name / "learning_rate.json") for name in ("graphs", "plain")]
    assert trials[0] is not None
    assert trials[1] is not None
    assert trials[0].losses == pytest.approx(trials[1].losses, rel=1e-3)
