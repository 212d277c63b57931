"""Memory and disk of a run, estimated before it is built."""

from __future__ import annotations

import os
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from firth.core.errors import UserError
from firth.core.files import atomic_folder, write_json
from firth.models import get_preset, make_model
from firth.train import resources
from firth.train.checkpoint import TrainState, collect_payload, save_checkpoint
from firth.train.optim import make_optimizer
from firth.train.recipe import TrainingConfig
from firth.train.resources import check_resources, estimate_resources

CPU = torch.device("cpu")
TINY = replace(get_preset("bert-tiny"), vocab_size=500)


@pytest.mark.parametrize("optim", ["adamw", "muon", "lamb", "adafactor"])
def test_a_checkpoint_is_as_large_as_estimated(optim: str, tmp_path: Path) -> None:
    training, model = replace(TrainingConfig(), optim=optim), make_model(TINY)
    optimizer = make_optimizer(model, training)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    payload = collect_payload(model, optimizer, {}, {}, {})
    folder = save_checkpoint(tmp_path, payload, TrainState(step=1), {}, 0)
    found = sum(p.stat().st_size for p in folder.rglob("*.safetensors"))
    assert found == pytest.approx(estimate_resources(TINY, training).checkpoint_bytes, rel=0.03)
    assert {p.stat().st_mode & 0o777 for p in folder.rglob("*") if p.is_file()} == {0o666 & ~current_umask()}


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_follow_the_umask(mask: int, tmp_path: Path) -> None:
    """safetensors creates its files with 0600, others must be able to read a shared model."""
    before = os.umask(mask)
    try:
        with atomic_folder(tmp_path / "model") as temporary:
            (temporary / "training").mkdir()
            save_file({"a": torch.ones(2)}, temporary / "training" / "model.safetensors")
            write_json(temporary / "config.json", {})
    finally:
        os.umask(before)
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "model").rglob("*") if p.is_file()}
    assert modes == {0o666 & ~mask}


def test_a_model_that_fits_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = estimate_resources(TINY, TrainingConfig())
    assert estimate.memory_bytes == 16 * estimate.parameters
    assert estimate.needed_memory(CPU) == 28 * estimate.parameters  # and a copy of weights and optimizer
    assert estimate._replace(copies_checkpoints=False).needed_memory(CPU) == 16 * estimate.parameters
    check_resources(estimate, tmp_path / "run", CPU)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9, 1_000_000))
    with pytest.raises(UserError, match=r"one checkpoint takes [\d.]+ MB, and the disk has 1.0 MB free"):
        check_resources(estimate, tmp_path / "run", CPU)
    monkeypatch.setattr(resources, "available_memory", lambda device: 2_000_000)
    with pytest.raises(UserError, match=r"parameters take [\d.]+ MB for weights, gradients, .* has 2.0 MB free"):
        check_resources(estimate, tmp_path / "run", CPU)
    assert not (tmp_path / "run").exists()


def test_a_model_too_large_for_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One billion parameters are estimated without allocating them."""
    config = replace(get_preset("gpt2-xl"), vocab_size=8000)
    estimate = estimate_resources(config, TrainingConfig())
    assert estimate.parameters > 1.4e9
    monkeypatch.setattr(resources, "available_memory", lambda device: 10**12)
    monkeypatch.setattr(resources, "check_disk_space", lambda *args: None)
    monkeypatch.setattr(resources, "measure_flops", lambda device: 1e10)
    check_resources(estimate, tmp_path, CPU, num_tokens=120_000)
    said = " ".join(capsys.readouterr().err.split())
    assert "parameters for a text of 120,000 tokens" in said
    assert "a step takes about" in said
    check_resources(estimate_resources(TINY, TrainingConfig()), tmp_path, CPU, num_tokens=1000)
    assert capsys.readouterr().err == ""
