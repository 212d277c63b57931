"""Sizes in config.json and in recipes are compared with the weights and the memory before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import firth
from firth.core import memory
from firth.core.errors import UserError
from firth.models import ModelConfig, get_preset, load_model, make_model
from firth.models.config import (
    FeatureEncoderConfig,
    LMHead,
    MaskDecoder,
    SinusoidalPosition,
    SpanBoundaryHead,
    TokenClassificationHead,
)
from firth.models.presets import bert
from firth.models.task_heads import with_classification_head
from firth.tokens import train_tokenizer
from firth.train.recipe import TrainingConfig
from firth.train.resources import estimate_resources

TINY = bert(2, 32, 2, 200)
HUGE_SETTINGS = {
    "hidden_size": 10**9,
    "num_hidden_layers": 10**9,
    "vocab_size": 2 * 10**7,
    "intermediate_size": 10**9,
    "max_position_embeddings": 10**12,
    "type_vocab_size": 10**12,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = make_model(TINY)
    model.tokenizer = train_tokenizer(["the cat sat on the mat"] * 9, "wordpiece", 60)
    model.save(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("name", HUGE_SETTINGS)
def test_a_config_larger_than_its_weights_is_refused(name: str, checkpoint: Path) -> None:
    load_model(checkpoint)
    edit_config(checkpoint, **{name: HUGE_SETTINGS[name]})
    with pytest.raises(UserError, match=r"config.json: .*(parameters, and the weights have only|can be at most)"):
        load_model(checkpoint)


COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "generate": lambda model, text: firth.generate(model, "the"),
    "fill": lambda model, text: firth.fill(model, "the ___ sat"),
    "embed": lambda model, text: firth.embed(model, "the"),
    "export": lambda model, text: firth.export(model, output_dir=model.parent / "out"),
    "evaluate": lambda model, text: firth.evaluate(model, "perplexity", text),
    "show": lambda model, text: firth.show(model, data=text, output_dir=model.parent),
    "pretrain": lambda model, text: firth.pretrain(model, text, model.parent / "run"),
    "finetune": lambda model, text: firth.finetune(model, "classify", "pydocs", "pydocs", model.parent / "run"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_it(name: str, checkpoint: Path, corpus_file: Path) -> None:
    edit_config(checkpoint, hidden_size=2 * 10**9)
    with pytest.raises(UserError, match=r"model/config.json: the model of this config has .* parameters"):
        COMMANDS[name](checkpoint, corpus_file)


HUGE_MODELS: dict[str, ModelConfig] = {
    "vocabulary": replace(TINY, vocab_size=10**12),
    "width": replace(TINY, dim=2 * 10**15),
    "classes": with_classification_head(TINY, ("a", "b")),
    "tags": replace(TINY, head=TokenClassificationHead(tuple(map(str, range(50_000))), crf=True)),
    "head": replace(TINY, head=LMHead(tied=False, transform=True, dim=10**12)),
    "boundary": replace(TINY, extras=(SpanBoundaryHead(10**12),)),
    "decoder": replace(TINY, extras=(MaskDecoder(1, 10**12),)),
    "sinusoids": replace(TINY, position=SinusoidalPosition(10**12)),
    "highways": replace(get_preset("elmo-tiny"), num_layers=10**9),
}
HUGE_MODELS["classes"] = replace(
    HUGE_MODELS["classes"],
    head=replace(HUGE_MODELS["classes"].head, pooler_dim=10**12),  # type: ignore[type-var]
)
HUGE_MODELS["features"] = replace(
    with_classification_head(TINY, ("a", "b")), extras=(FeatureEncoderConfig(bilstm_hidden_size=10**9),)
)


@pytest.mark.parametrize("name", HUGE_MODELS)
def test_a_model_larger_than_the_memory_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * 10**9)
    with pytest.raises(UserError, match=r"A model of [\d,]+ parameters takes .* has 2.0 GB free|can be at most"):
        make_model(HUGE_MODELS[name])
    make_model(TINY)


def test_an_estimate_needs_no_memory_and_no_overflow() -> None:
    with pytest.raises(UserError, match="more than any machine has"):
        estimate_resources(HUGE_MODELS["width"], TrainingConfig())
    with pytest.raises(UserError, match=r"A step of .* rows of .* tokens takes .* Lower --per-device-train-batch-size"):
        estimate_resources(TINY, replace(TrainingConfig(), per_device_train_batch_size=10**12))
    with torch.device("meta"):
        assert make_model(replace(TINY, vocab_size=10**12)).num_parameters > 10**12


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.free_memory() > 0
    (tmp_path / "max").write_text("1000\n")
    monkeypatch.setattr(memory, "CGROUP_LIMIT_FILES", (tmp_path / "max", tmp_path / "none"))
    assert memory.free_memory() == 1000
    (tmp_path / "max").write_text("max\n")
    assert memory.free_memory() > 1000
