"""Dropout inside the MLP."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models.block import MLP
from firth.models.config import ModelConfig
from firth.models.hf.config_io import from_hf_config, hf_model_type, to_hf_config
from firth.models.presets import PRESETS, bart, bert, gpt2, t5, t5_v1_1, xlnet


def opened(config: ModelConfig) -> MLP:
    """An MLP of identity weights that returns its hidden activations for inputs of 1."""
    mlp = MLP(config)
    with torch.no_grad():
        for p in mlp.parameters():
            p.zero_()
        mlp.up.weight[:, 0] = 1.0
        mlp.down.weight.copy_(torch.eye(*mlp.down.weight.shape))
    return mlp


def hidden(mlp: MLP, dim: int) -> Tensor:
    return mlp(torch.nn.functional.one_hot(torch.zeros(1000, dtype=torch.long), dim).float())


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_mlp_dropout_follows_the_activation(gated: bool) -> None:
    """64,000 equal values: in training a quarter is 0 and the rest 4/3 as large; in evaluation nothing changes."""
    config = bert(1, 64, 2, 20)
    mlp = opened(replace(config, mlp=replace(config.mlp, dim=64, activation="relu", gated=gated, dropout=0.25)))
    h = hidden(mlp, 64)
    assert_close(h.unique(), torch.tensor([0, 4 / 3]))
    assert ((h == 0).float().mean() - 0.25).abs() < 5 * (0.25 * 0.75 / h.numel()) ** 0.5
    assert torch.equal(hidden(mlp.eval(), 64), torch.ones(1000, 64))


@pytest.mark.parametrize("make", [lambda **c: t5(1, 32, 2, 64, 20, **c), lambda **c: xlnet(1, 32, 2, 20, **c)])
def test_t5_and_xlnet_have_mlp_dropout(make: object) -> None:
    config: ModelConfig = make()  # type: ignore[operator]
    assert MLP(config).drop.p == config.dropout == 0.1
    still = make(dropout=0.0, attention_dropout=0.0)  # type: ignore[operator]
    assert MLP(still).drop.p == 0
    assert hf_model_type(still) == config.family
    read = from_hf_config(to_hf_config(config, None))
    assert read.mlp_dropout == 0.1
    assert hf_model_type(replace(config, mlp=replace(config.mlp, dropout=0.1))) == config.family
    other = replace(config, mlp=replace(config.mlp, dropout=0.3))  # changes training alone
    assert hf_model_type(other) == config.family
    assert from_hf_config(to_hf_config(other, None)).mlp_dropout == 0.3


@pytest.mark.parametrize("name", [n for n in PRESETS if n.endswith("-tiny") and not n.startswith(("t5", "xlnet"))])
def test_other_families_have_no_mlp_dropout(name: str) -> None:
    assert PRESETS[name].mlp_dropout == 0


def test_t5_1_1_was_pretrained_without_dropout() -> None:
    assert t5_v1_1(1, 32, 2, 64).mlp_dropout == 0
    assert t5_v1_1(1, 32, 2, 64, dropout=0.1).mlp_dropout == 0.1


def test_bart_has_activation_dropout() -> None:
    hf = to_hf_config(bart(1, 32, 2, 20), None)
    assert hf["activation_dropout"] == 0
    read = from_hf_config(hf | {"activation_dropout": 0.3})
    assert read.mlp_dropout == 0.3
    assert to_hf_config(read, None)["activation_dropout"] == 0.3
    assert from_hf_config({k: v for k, v in hf.items() if k != "activation_dropout"}) == from_hf_config(hf)


def test_a_config_without_the_field_is_read() -> None:
    hf = to_hf_config(gpt2(1, 32, 2, 20, norm_first=False), None)
    assert hf["model_type"] == "firth"
    del hf["firth"]["mlp"]["dropout"]
    assert from_hf_config(hf).mlp_dropout == 0


def test_an_invalid_rate_raises() -> None:
    config = bert(1, 32, 2, 20)
    assert replace(config, mlp=replace(config.mlp, dropout=1.0)).problems() == [
        "model.mlp.dropout is 1.0, and must be in [0, 1)"
    ]
