"""Starting weights: the spread of every tensor beside that of `transformers`, and what was published where they differ.

Not compared: the zero row of a padding token in `transformers` (one vector of 500 moves no spread). Both leave aside
what matters little in the authors' code: GPT-2's places at 0.01, BERT's cut at two deviations, and XLM's matrices,
which start as PyTorch makes them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from firth.core.errors import UserError
from firth.models import ModelConfig, make_model
from firth.models.config import (
    DiscriminatorHead,
    FanInInit,
    GeneratorConfig,
    NormalInit,
    SentencePairHead,
    SinusoidalPosition,
)
from firth.models.hf.config_io import from_hf_config, hf_model_type, to_hf_config
from firth.models.hf.convert import to_hf_tensors
from firth.models.init import skip_init
from firth.models.presets import (
    albert,
    bart,
    bert,
    deberta,
    deberta_v2,
    distilbert,
    electra,
    gpt,
    gpt2,
    llama,
    mobilebert,
    modernbert,
    rembert,
    roberta,
    t5,
    t5_v1_1,
    xlm,
    xlnet,
)
from firth.models.task_heads import with_classification_head

V = 500
CONFIGS: dict[str, ModelConfig] = {
    "bert": bert(2, 128, 2, V),
    "bert-pair": bert(2, 128, 2, V, extras=(SentencePairHead(),)),
    "roberta": roberta(2, 128, 2, V),
    "albert": albert(2, 128, 2, 64, V),
    "electra": electra(2, 128, 2, 64, V, head=DiscriminatorHead()),
    "electra-generator": electra(2, 128, 2, 64, V),
    "distilbert": distilbert(2, 128, 2, V),
    "rembert": rembert(2, 128, 2, 64, 192, V),
    "mobilebert": mobilebert(2, 128, 4, 64, 32, V),
    "xlm": xlm(2, 128, 2, V, num_languages=40),
    "xlm-sinusoid": xlm(2, 128, 2, V, position=SinusoidalPosition(64)),
    "deberta": deberta(2, 128, 2, V),
    "deberta-v2": deberta_v2(2, 128, 2, V),
    "xlnet": xlnet(2, 128, 2, V),
    "modernbert": modernbert(2, 128, 2, 192, V),
    "gpt": gpt(2, 128, 2, V),
    "gpt2": gpt2(2, 128, 2, V),
    "llama": llama(2, 128, 4, 352, V, num_kv_heads=2),
    "bart": bart(2, 128, 2, V),
    "t5": t5(2, 128, 4, 512, V, head_dim=24),
    "t5.1.1": t5_v1_1(2, 128, 4, 320, V),
}
CLASSED = ("bert", "roberta", "albert", "electra", "distilbert", "rembert", "xlm", "deberta", "deberta-v2", "xlnet")
CONFIGS |= {
    f"{name}-classes": with_classification_head(CONFIGS[name], ("good", "bad")) for name in (*CLASSED, "gpt", "gpt2")
}

# Where `transformers` is not as published, and we are: the tensor, and the spread that was published.
PUBLISHED = {
    # Its authors' code counts the head's dense layer among those that do not write to the residual stream.
    ("modernbert", "head.dense.weight"): 0.02 * 0.8796,  # the spread that is left of N(0, 1) between -2 and 2
    # Mesh TensorFlow and t5x make the untied head a dense layer like any other.
    ("t5.1.1", "lm_head.weight"): 128**-0.5,
}


def fresh(config: ModelConfig) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return to_hf_tensors(make_model(config))


def theirs(config: ModelConfig) -> dict[str, Tensor]:
    torch.manual_seed(1)
    settings = to_hf_config(config, None)
    kind: Any = getattr(transformers, settings["architectures"][0])
    return kind(transformers.AutoConfig.for_model(**settings)).state_dict()


def spread(x: Tensor) -> float:
    return float(x.double().std())


def noise(x: Tensor) -> float:
    """Largest relative difference of two sample deviations by chance: 5 standard deviations."""
    return float(5 * x.numel() ** -0.5)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_initialized_like_transformers(name: str) -> None:
    config = CONFIGS[name]
    mine, other = fresh(config), theirs(config)
    compared = 0
    for key, x in mine.items():
        y = other[key]
        assert x.shape == y.shape, key
        if len(y.unique()) == 1:  # a bias of 0, a norm of 1
            assert torch.equal(x, y), key
            continue
        wanted = PUBLISHED.get((name, key), spread(y))
        assert spread(x) == pytest.approx(wanted, rel=max(0.1, noise(x))), key
        wide = max(wanted, spread(y))
        assert float(x.double().mean() - y.double().mean()) == pytest.approx(0, abs=noise(x) * 1.5 * wide), key
        compared += x.numel() > 2500  # where 10% is more than chance
    assert compared >= 10 if config.num_shared == 1 else compared >= 6


@pytest.mark.parametrize(("name", "key"), PUBLISHED)
def test_listed_exceptions_are_needed(name: str, key: str) -> None:
    assert PUBLISHED[name, key] != pytest.approx(spread(theirs(CONFIGS[name])[key]), rel=0.2)


def test_xlm_initialization() -> None:
    """All embeddings are N(0, 1/dim), whatever the width; matrices keep their own deviation."""
    for dim in (64, 256):
        state = fresh(xlm(1, dim, 2, V, num_languages=100))
        for kind in ("embeddings", "position_embeddings", "lang_embeddings"):
            assert spread(state[f"transformer.{kind}.weight"]) == pytest.approx(dim**-0.5, rel=0.05)
        assert spread(state["transformer.ffns.0.lin1.weight"]) == pytest.approx(0.02, rel=0.05)


def test_modernbert_initialization() -> None:
    """Values are truncated at two deviations; layers that write to the residual stream shrink with depth."""
    small = 0
    for key, x in fresh(modernbert(8, 128, 2, 192, V)).items():
        if x.ndim > 1:
            residual = key.endswith("Wo.weight")
            small += residual
            limit = 0.04 / 4 if residual else 0.04
            assert 0.97 * limit < float(x.abs().max()) <= limit, key
            assert spread(x) == pytest.approx(0.8796 * limit / 2, rel=0.05), key
    assert small == 16


def test_t5_queries_with_grouped_keys() -> None:
    """Only the queries are scaled down, also with fewer key heads."""
    torch.manual_seed(0)
    model = make_model(llama(1, 128, 4, 352, V, num_kv_heads=1, init=FanInInit()))
    q, k, v = model.state_dict()["stack.blocks.0.attention.qkv.weight"].split((128, 32, 32))
    assert spread(q) == pytest.approx((128 * 32) ** -0.5, rel=0.1)
    assert spread(k) == pytest.approx(128**-0.5, rel=0.1)
    assert spread(v) == pytest.approx(128**-0.5, rel=0.1)


def test_the_embedding_delta_starts_at_0() -> None:
    config = replace(CONFIGS["modernbert"], extras=(GeneratorConfig(disentangle_embeddings=True),))
    state = make_model(config).state_dict()
    assert not state["extras.generator.delta.weight"].any()


@pytest.mark.parametrize(
    ("name", "init"),
    [
        ("xlm", NormalInit(0.01, embed_std=0.3)),
        ("xlm", NormalInit(0.01)),
        ("modernbert", NormalInit(0.01, scale_residual=True, cutoff_factor=3.0)),
    ],
)
def test_a_family_keeps_its_initialization(name: str, init: NormalInit) -> None:
    config = replace(CONFIGS[name], init=init)
    assert hf_model_type(config) == name
    settings = to_hf_config(config, None)
    assert from_hf_config(settings) == config
    transformers.AutoConfig.for_model(**settings)  # takes these values


def test_a_modernbert_without_truncation_has_model_type_firth() -> None:
    assert hf_model_type(replace(CONFIGS["modernbert"], init=NormalInit(scale_residual=True))) == "firth"


@pytest.mark.parametrize(
    "init", [NormalInit(0.0), NormalInit(math.nan), NormalInit(embed_std=-1.0), NormalInit(cutoff_factor=0.0)]
)
def test_invalid_initializations_raise(init: NormalInit) -> None:
    fields = "std|embed_std|cutoff_factor"
    with pytest.raises(UserError, match=rf"model\.init\.({fields}) is (-?[01]\.0|nan), and must be more than 0"):
        make_model(bert(1, 16, 2, V, init=init))


def test_weights_are_drawn_again_after_skip_init() -> None:
    config = bert(1, 16, 2, V)
    torch.manual_seed(3)
    wanted = make_model(config).state_dict()
    torch.manual_seed(3)
    with skip_init():
        make_model(config)
        torch.nn.init.trunc_normal_(torch.nn.Linear(2, 2).weight)
    found = make_model(config).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(ZeroDivisionError), skip_init():
        _ = 1 / 0
    assert make_model(config).embed.tokens.weight.std() > 0.01
