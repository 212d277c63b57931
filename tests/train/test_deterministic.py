"""Deterministic mode: which flags it sets and restores, which kernels it excludes, and that runs repeat bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._inductor.config as inductor

from firth import api
from firth.core.errors import UserError
from firth.lab.prove_resume import compare_runs, last_logged_step
from firth.models import attention
from firth.models.attention import AttentionSpec, relative_attention
from firth.models.kernels.attention import has_nondeterministic_grads
from firth.models.position.relative_attention import RelativeScores
from firth.train import Recipe, load_recipe, pretrain
from firth.train.deterministic import CUBLAS_WORKSPACE_ENV, DETERMINISTIC_WORKSPACES, deterministic_mode

Recipes = Callable[..., Recipe]


class Switches(NamedTuple):
    """Global flags that a run may have changed for the next one."""

    algorithms: bool
    warns: bool
    cudnn: bool
    benchmark: bool
    attention: bool
    compiled: bool
    workspace: str | None


def switches() -> Switches:
    return Switches(
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.cudnn_sdp_enabled(),
        inductor.deterministic,
        os.environ.get(CUBLAS_WORKSPACE_ENV),
    )


ON = Switches(True, False, True, False, False, True, DETERMINISTIC_WORKSPACES[0])


def test_flags_are_set_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS_WORKSPACE_ENV, raising=False)
    before = switches()
    assert before != ON
    with deterministic_mode(True):
        assert switches() == ON
    assert switches() == before
    with pytest.raises(ZeroDivisionError), deterministic_mode(True):
        raise ZeroDivisionError
    assert switches() == before
    with deterministic_mode(False):
        assert switches() == before


def test_user_settings_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE_ENV, ":0:0")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = switches()
        with deterministic_mode(True):
            assert switches() == ON
        assert switches() == before
        with monkeypatch.context() as patch:
            patch.setenv(CUBLAS_WORKSPACE_ENV, DETERMINISTIC_WORKSPACES[1])
            with deterministic_mode(True):
                assert os.environ[CUBLAS_WORKSPACE_ENV] == DETERMINISTIC_WORKSPACES[1], (
                    "the other right setting is right too"
                )
    finally:
        torch.use_deterministic_algorithms(False)


def test_raises_after_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS_WORKSPACE_ENV, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = switches()
    with pytest.raises(UserError, match="before CUDA starts"), deterministic_mode(True):
        pass
    assert switches() == before
    monkeypatch.setenv(CUBLAS_WORKSPACE_ENV, DETERMINISTIC_WORKSPACES[0])
    with deterministic_mode(True):
        assert switches() == ON


def test_nondeterministic_operations_raise() -> None:
    with pytest.raises(UserError, match="put_ has no fixed order"), deterministic_mode(True):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    with pytest.raises(RuntimeError, match="something else"), deterministic_mode(True):
        raise RuntimeError("something else")


def test_flags_do_not_leak_into_the_next_run(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the run that sets it has it; on a CPU, where all kernels are deterministic, it changes nothing."""
    monkeypatch.delenv(CUBLAS_WORKSPACE_ENV, raising=False)
    during: list[Switches] = []
    plain = torch.optim.AdamW.step

    def step(self: Any, *given: Any) -> Any:
        during.append(switches())
        return plain(self, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    before = switches()
    for name, wanted in (("with", True), ("without", False)):
        pretrain(recipe_of("t5", dropout=0.1, output_dir=str(tmp_path / name), deterministic=wanted, optim="adamw"))
        assert set(during) == ({ON} if wanted else {before})
        during.clear()
    assert load_recipe(tmp_path / "with" / "recipe.yaml", Recipe).deterministic
    assert all(compare_runs(tmp_path / "with", tmp_path / "without").values())


# --- kernels that are left out


def scores(by_query: bool, by_key: bool, at_positions: bool) -> RelativeScores:
    H, T, S, d = 2, 4, 6, 16
    q, k, vectors = torch.randn(1, H, T, d), torch.randn(1, H, S, d), torch.randn(H, T + S - 1, d)
    positions = torch.tensor([[0, 2, 3, 3]]) if at_positions else None
    return RelativeScores(q, T - 1, (q, vectors) if by_query else None, (k, vectors) if by_key else None, positions)


@pytest.mark.parametrize(
    ("by_query", "by_key", "at_positions", "left_out"),
    [
        (True, True, False, False),
        (True, False, True, False),
        (False, True, True, True),
        (True, True, True, True),
    ],
)
def test_attention_kernel_with_atomic_adds_is_excluded(
    by_query: bool, by_key: bool, at_positions: bool, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without deterministic mode it is used; with it, eager operations take over."""
    taken: list[str] = []

    def fused(found: RelativeScores, k: Any, v: Any, *rest: Any) -> torch.Tensor:
        taken.append("fused")
        return torch.zeros_like(found.query)

    monkeypatch.setattr(attention, "has_fused_attention", lambda q: True)
    monkeypatch.setattr(attention, "fused_relative_attention", fused)
    found = scores(by_query, by_key, at_positions)
    k = v = torch.randn(1, 2, 6, 16)
    assert has_nondeterministic_grads(found) is left_out
    relative_attention(found, k, v, AttentionSpec(), 0.0, 1.0)
    assert taken == ["fused"]
    with deterministic_mode(True):
        relative_attention(found, k, v, AttentionSpec(), 0.0, 1.0)
    assert taken == ["fused"] * (1 if left_out else 2)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("compiled", ["--compile", "--no-compile"])
@pytest.mark.parametrize("model", ["bert-tiny", "gpt2-tiny", "t5-tiny", "deberta-tiny"])
def test_a_killed_gpu_run_resumes_bit_exactly(model: str, compiled: str, corpus_file: Path, tmp_path: Path) -> None:
    """With the default settings of a GPU: log, data, weights and optimizer are equal bit for bit."""
    sizes = ["--vocab-size=400", "--max-seq-length=96", "--per-device-train-batch-size=16", "--max-steps=60"]

    def start(folder: Path) -> subprocess.Popen[str]:
        words = ["pretrain", model, "--data", corpus_file, "--output-dir", folder, *sizes]
        words += ["--deterministic", compiled, "--save-steps=10", "--eval-steps=25", "--resume"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "firth", *map(str, words)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finish(folder: Path) -> None:
        process = start(folder)
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
        assert said.count("deterministic: every sum has one order") == 1

    finish(tmp_path / "straight")
    for step in (15, 37):
        process = start(tmp_path / "killed")
        end = time.monotonic() + 600
        while last_logged_step(tmp_path / "killed") < step:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < end
            time.sleep(0.001)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    finish(tmp_path / "killed")
    found = compare_runs(tmp_path / "straight", tmp_path / "killed")
    assert all(found.values()), found


def test_prove_resume_sets_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe_of: Recipes) -> None:
    """`prove-resume` writes it into the recipes of the runs that it kills."""
    given: list[Recipe] = []

    def note(recipe: Recipe, folder: Path, kills: int) -> dict[str, Any]:
        given.append(recipe)
        return {"equal": True}

    monkeypatch.setattr("firth.lab.prove_resume.run_resume_proof", note)
    data = Path(recipe_of("bert").data)
    api.prove_resume("bert-tiny", data, tmp_path / "proof", kills=1, deterministic=True)
    assert given[0].deterministic
