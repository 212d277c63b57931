"""On a GPU: compiled regions as CUDA graphs, as in short runs, against eager steps, by family.

Run them with `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.test_presets import NEEDS, TINY, some_batch

from firth.models import PRESETS, make_model, with_extras
from firth.objectives import Batch
from firth.train import ComputeConfig, TrainingConfig, TrainingRun
from firth.train.cuda_graphs import CudaGraphStep
from firth.train.optim import make_optimizer
from firth.train.recipe import EngineConfig
from firth.train.step import build_step_runner, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
FAMILIES = [name for name in TINY if PRESETS[name].recurrent is None and PRESETS[name].num_layers]


@pytest.mark.parametrize("name", FAMILIES)
def test_five_steps_have_equal_losses(name: str) -> None:
    """In float32, to a thousandth; ELECTRA's generator samples the same tokens, too."""
    config = replace(PRESETS[name], vocab_size=40, dropout=0.0, attention_dropout=0.0, layer_drop=0.0)
    config = with_extras(config, NEEDS.get(config.family, ()))
    batch = Batch(*(None if a is None else a.numpy() for a in some_batch(config)))
    plain = ComputeConfig(torch.device("cuda"), bf16=False, compile=False)
    training, found = TrainingConfig(learning_rate=1e-3, engine=EngineConfig(residual="float32")), []
    for compute in (plain, replace(plain, compile=True, compile_regions=True, cuda_graphs=True)):
        torch.manual_seed(1)
        model = make_model(config).to(compute.device)
        run = TrainingRun(training, compute, model, lambda step: [batch])
        runner, optimizer = build_step_runner(run), make_optimizer(model, training)
        found.append([train_step(run, runner, optimizer, [batch], i, 1e-3).item() for i in range(5)])
    assert isinstance(runner, CudaGraphStep)
    assert runner.graphs, "nothing was recorded"
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[1][-1] < found[1][0]
