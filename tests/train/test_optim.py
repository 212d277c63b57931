"""Learning-rate schedules by hand, weight decay groups, freezing, and layer-wise rates."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import Model, RegressionHead, head_for_task, make_model
from firth.models.lora import LoRAConfig, add_lora
from firth.models.presets import bert, gpt2, t5, t5_v1_1, xlnet
from firth.models.task_heads import with_classification_head
from firth.objectives import Batch
from firth.train import ComputeConfig, TrainingConfig, TrainingRun, fit
from firth.train.optim import add_unfrozen_groups, learning_rate_at, make_optimizer
from firth.train.unfreeze import FreezeSchedule, ever_trainable, parameter_depths, trainable_parameters


def rates(**fields: Any) -> list[float]:
    training = TrainingConfig(**{"learning_rate": 1.0, "max_steps": 10} | fields)
    return [learning_rate_at(step, training) for step in range(training.max_steps)]


def test_linear() -> None:
    # four steps up in fifths, then six steps down in sixths
    expected = [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert rates(warmup_steps=4) == pytest.approx(expected)


def test_cosine() -> None:
    found = rates(warmup_steps=0, lr_scheduler_type="cosine")
    assert found[0] == 1
    assert found[5] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert found[9] > 0


def test_constant_and_a_warm_up_of_the_whole_run() -> None:
    assert rates(warmup_steps=2, lr_scheduler_type="constant") == pytest.approx([1 / 3, 2 / 3] + [1] * 8)
    assert rates(warmup_steps=19) == pytest.approx([(i + 1) / 20 for i in range(10)])


@pytest.mark.parametrize("steps", [10, 200, 1000])
def test_slanted_triangular_equals_the_papers_equation(steps: int) -> None:
    """Howard and Ruder 2018, equation 3; the warm-up is a tenth of the run."""

    def paper(t: int, cut_frac: float = 0.1, ratio: int = 32, highest: float = 0.01) -> float:
        cut = math.floor(steps * cut_frac)
        p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / cut_frac - 1))
        return highest * (1 + p * (ratio - 1)) / ratio

    fields = dict(max_steps=steps, warmup_steps=steps // 10, learning_rate=0.01, lr_scheduler_type="slanted-triangle")
    assert rates(**fields) == pytest.approx([paper(t) for t in range(steps)])


def test_slanted_triangular_of_a_short_run_stays_above_a_32nd() -> None:
    for steps in (1, 9, 19):
        found = rates(max_steps=steps, warmup_steps=steps // 10, lr_scheduler_type="slanted-triangle")
        assert all(1 / 32 <= r <= 1 for r in found)


def test_inverse_sqrt() -> None:
    # up in fourths, then 2/sqrt(4), 2/sqrt(5) ... of 2 = sqrt(3 + 1)
    found = rates(warmup_steps=3, lr_scheduler_type="inverse-sqrt")
    assert found == pytest.approx([1 / 4, 2 / 4, 3 / 4] + [2 / math.sqrt(i) for i in range(4, 11)])


def test_wsd_falls_in_the_last_tenth() -> None:
    found = rates(max_steps=30, warmup_steps=1, lr_scheduler_type="wsd")
    assert found == pytest.approx([1 / 2] + [1] * 27 + [2 / 3, 1 / 3])
    assert rates(max_steps=3, warmup_steps=0, lr_scheduler_type="wsd") == [1, 1, 1]
    found = rates(warmup_steps=0, lr_scheduler_type="wsd", wsd_decay=0.3)
    assert found == pytest.approx([1] * 8 + [2 / 3, 1 / 3])
    assert rates(warmup_steps=0, lr_scheduler_type="wsd", wsd_decay=1.0) == pytest.approx(rates(warmup_steps=0))


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "linear": nn.Linear(3, 2), "norm": nn.LayerNorm(3)})
    optimizer = make_optimizer(
        model, TrainingConfig(weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-7)
    )
    decayed, others = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 3), (2, 3)]
    assert others["weight_decay"] == 0.0
    assert [tuple(p.shape) for p in others["params"]] == [(2,), (3,), (3,)]
    assert (decayed["betas"], decayed["eps"]) == ((0.8, 0.9), 1e-7)
    assert isinstance(optimizer, torch.optim.AdamW)


def test_biases_with_a_row_for_each_head_are_not_decayed() -> None:
    model = make_model(xlnet(1, 16, 2, 20))
    decays = {
        p: group["weight_decay"]
        for group in make_optimizer(model, TrainingConfig()).param_groups
        for p in group["params"]
    }
    biases = {name: decays[p] for name, p in model.named_parameters() if name.endswith("bias") and p.ndim == 2}
    assert set(biases.values()) == {0.0}, biases
    assert decays[model.embed.tokens.weight] > 0


# --- layers


def classifier() -> Model:
    return make_model(with_classification_head(bert(3, 16, 2, 20, dropout=0.0, attention_dropout=0.0), ("a", "b")))


def learning(optimizer: torch.optim.Optimizer, model: nn.Module) -> set[str]:
    names = {p: name for name, p in model.named_parameters()}
    return {names[p] for group in optimizer.param_groups for p in group["params"]}


def scales(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, float]:
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: group["scale"] for group in optimizer.param_groups for p in group["params"]}


def test_layer_depths() -> None:
    found = parameter_depths(classifier())
    assert found["embed.tokens.weight"] == found["embed.norm.weight"] == 0
    assert [found[f"stack.blocks.{i}.mlp.up.weight"] for i in range(3)] == [1, 2, 3]
    assert found["head.out.weight"] == found["head.pooler.weight"] == 4
    found = parameter_depths(make_model(gpt2(2, 16, 2, 20)))
    assert found["stack.final_norm.weight"] == found["stack.blocks.1.mlp.up.weight"] == 2


def test_tied_embeddings_belong_to_the_head() -> None:
    """As fastai splits a language model for discriminative rates."""
    model = make_model(gpt2(2, 16, 2, 20))
    assert parameter_depths(model)["embed.tokens.weight"] == 3
    assert parameter_depths(model)["embed.position_embeddings.weight"] == 0
    assert "embed.tokens.weight" not in ever_trainable(model, FreezeSchedule(freeze="embeddings"))
    assert parameter_depths(make_model(t5_v1_1(2, 16, 2, 32, 20)))["embed.tokens.weight"] == 0


def test_decoder_layers_are_above_encoder_layers() -> None:
    found = parameter_depths(make_model(t5(2, 16, 2, 32, 20)))
    assert [found[f"{side}.blocks.{i}.mlp.up.weight"] for side in ("encoder", "decoder") for i in (0, 1)] == [
        1,
        2,
        3,
        4,
    ]
    assert found["encoder.final_norm.weight"] == 2
    assert found["decoder.final_norm.weight"] == 4
    assert found["encoder.score.table.weight"] == 0, "what all layers share"


def test_layer_wise_rate_decay() -> None:
    """ULMFiT's 2.6: each layer has the rate of the one above, divided by 2.6."""
    model = classifier()
    found = scales(make_optimizer(model, TrainingConfig(), FreezeSchedule(layer_decay=1 / 2.6)), model)
    assert len(found) == len(list(model.parameters()))
    assert found["head.out.bias"] == 1
    assert found["stack.blocks.2.mlp.up.weight"] == pytest.approx(1 / 2.6)
    assert found["stack.blocks.0.attention.qkv.bias"] == pytest.approx(2.6**-3)
    assert found["embed.tokens.weight"] == pytest.approx(2.6**-4)


def test_frozen_parameters_have_no_group_and_no_gradient() -> None:
    model = classifier()
    found = learning(make_optimizer(model, TrainingConfig(), FreezeSchedule(freeze="embeddings")), model)
    assert not any(name.startswith("embed.") for name in found)
    assert "stack.blocks.0.mlp.up.weight" in found
    found = learning(make_optimizer(model, TrainingConfig(), FreezeSchedule(freeze="backbone")), model)
    assert found == {name for name, _ in model.named_parameters() if name.startswith("head.")}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == found
    make_optimizer(model, TrainingConfig())
    assert all(p.requires_grad for p in model.parameters())


def test_freezing_a_backbone_with_a_tied_head_raises() -> None:
    with pytest.raises(UserError, match="Nothing is left to learn"):
        make_optimizer(make_model(gpt2(1, 16, 2, 20)), TrainingConfig(), FreezeSchedule(freeze="backbone"))


def test_gradual_unfreezing_goes_from_the_top_down() -> None:
    model, pace = classifier(), FreezeSchedule(unfreeze_every=10, layer_decay=0.5)
    optimizer = make_optimizer(model, TrainingConfig(), pace)
    joined = []
    for step in (0, 9, 10, 20, 30, 40, 1000):
        add_unfrozen_groups(optimizer, model, TrainingConfig(), pace, step)
        joined.append(sorted({parameter_depths(model)[name] for name in learning(optimizer, model)}))
        assert {n for n, p in model.named_parameters() if p.requires_grad} == learning(optimizer, model)
    assert joined == [[4], [4], [3, 4], [2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert scales(optimizer, model)["embed.tokens.weight"] == 0.5**4
    late = make_optimizer(model, TrainingConfig(), pace)  # after a resume all that was free is free at once
    add_unfrozen_groups(late, model, TrainingConfig(), pace, 25)
    assert sorted({parameter_depths(model)[name] for name in learning(late, model)}) == [2, 3, 4]


def test_a_tied_head_is_unfrozen_first() -> None:
    found = trainable_parameters(make_model(gpt2(2, 16, 2, 20)), FreezeSchedule(unfreeze_every=5), 0)
    assert found == {"embed.tokens.weight": 3}


def test_lora_trains_adapters_and_head_only() -> None:
    model = classifier()
    add_lora(model, model.config, LoRAConfig(rank=2))
    found = learning(make_optimizer(model, TrainingConfig()), model)
    assert "head.out.weight" in found
    assert "stack.blocks.0.attention.qkv.lora_a" in found
    assert "stack.blocks.0.attention.qkv.weight" not in found
    model = make_model(t5(1, 16, 2, 32, 20))
    add_lora(model, model.config, LoRAConfig(rank=2, targets="all"))
    assert all("lora_" in name for name in learning(make_optimizer(model, TrainingConfig()), model))


@pytest.mark.parametrize("mean", [0.0, 0.9])
def test_lora_layers_unfrozen_later_are_in_best_and_ema(mean: float, tmp_path: Path) -> None:
    """Best weights and EMA hold every parameter that is ever trained."""
    torch.manual_seed(0)
    model = make_model(bert(2, 16, 2, 20))
    add_lora(model, model.config, LoRAConfig(rank=2))
    batch = Batch(np.full((2, 8), 9), target_positions=np.array([[1], [2]]), labels=np.array([[7], [8]]))
    judged: list[dict[str, torch.Tensor]] = []
    raw: dict[str, torch.Tensor] = {}

    def weights(model: Model) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def evaluate(model: Model) -> dict[str, float]:
        judged.append(weights(model))
        return {"score": 1.0 if len(judged) == (4 if mean else 1) else 0.5}

    training = TrainingConfig(
        output_dir=str(tmp_path), max_steps=8, eval_steps=2, warmup_steps=0, save_steps=100, learning_rate=1e-2,
        compile=False, bf16=False, ema_decay=mean,
    )  # fmt: skip
    compute = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
    hooks = [(8, lambda step, model: raw.update(weights(model)))]
    judge = lambda scores: scores["score"]  # noqa: E731
    pace = FreezeSchedule(unfreeze_every=3)
    run = TrainingRun(
        training,
        compute,
        model,
        lambda step: [batch],
        evaluate,
        tmp_path,
        hooks=hooks,
        freeze_schedule=pace,
        score_fn=judge,
    )
    best = fit(run).best_step
    assert best == (8 if mean else 2)
    for name, value in weights(model).items():
        assert torch.equal(value, judged[best // 2 - 1][name]), name
        if mean and name.endswith("lora_b"):
            assert not torch.equal(value, raw[name]), name


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (500.0, 100.0), (2.0, 0.01)])
def test_a_regression_learns_alike_in_any_units(mean: float, std: float, optim: str) -> None:
    """Targets `mean + std * z` train the model that targets z train, whose scores are in those units."""
    config = bert(1, 16, 2, 20, dropout=0.0, attention_dropout=0.0)
    z_B1 = torch.tensor([[-1.0], [0.5], [1.5]])
    batch = Batch(torch.tensor([[2, 7, 8], [2, 9, 3], [2, 5, 6]]), target_positions=torch.zeros(3, 1, dtype=torch.long))

    def train(targets_B1: torch.Tensor, head: RegressionHead, center: float) -> torch.Tensor:
        torch.manual_seed(0)
        model = make_model(replace(config, head=head))
        model.head.standardize(center)
        training = TrainingConfig(optim=optim, learning_rate=0.01, weight_decay=0.1)  # type: ignore[arg-type]
        optimizer = make_optimizer(model, training)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * group["scale"]
        for _ in range(10):
            optimizer.zero_grad()
            model.losses(batch._replace(task_labels=targets_B1))["targets"].backward()
            optimizer.step()
        return model.logits(batch).detach()

    head = head_for_task(config, "regress")
    wanted = train(z_B1, head, 0.0)
    found = train(mean + std * z_B1, replace(head, target_std=std), mean)
    assert_close((found - mean) / std, wanted, atol=0.01, rtol=0)
    assert wanted.abs().min() > 0.1, "the scores have left the mean"
