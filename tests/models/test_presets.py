"""Presets by name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from firth.core.errors import UserError
from firth.models import PRESETS, ModelConfig, count_parameters, get_preset, make_model, with_extras
from firth.models.backbone import Stack
from firth.models.config import ELMoConfig, NoNormConfig
from firth.models.presets import bert, gpt2, t5, t5_v1_1
from firth.objectives.batch import Batch


def test_by_name() -> None:
    assert get_preset("bert-tiny") == bert(2, 128, 2)
    with pytest.raises(UserError, match=r"Unknown model 'bert-tinny'. Did you mean 'bert-tiny'"):
        get_preset("bert-tinny")


def test_published_sizes() -> None:
    """BERT base without pooler and pair head, GPT-2's 124M, T5 base's 223M; T5 1.1 has a second vocabulary matrix."""
    sizes = {name: count_parameters(PRESETS[name]) for name in ("bert-base", "gpt2", "t5-base", "t5.1.1-base")}
    assert sizes == {"bert-base": 109_514_298, "gpt2": 124_439_808, "t5-base": 222_903_552, "t5.1.1-base": 247_577_856}


def test_parameter_count_equals_the_built_model() -> None:
    for config in (bert(1, 16, 2, 30), gpt2(1, 16, 2, 30), t5(1, 16, 2, 32, 30), t5_v1_1(1, 16, 2, 32, 30)):
        assert count_parameters(config) == make_model(config).num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name: str) -> None:
    assert PRESETS[name].problems() == []


NEEDS = {"spanbert": ("boundary",), "albert": ("pair",), "electra": ("generator",), "xlnet": ("query",)}
TINY = [name for name in PRESETS if name.endswith("-tiny")]


def some_batch(config: ModelConfig) -> Batch:
    """Two rows of eight tokens for the model and its extras."""
    g = torch.Generator().manual_seed(0)
    tokens, positions = torch.randint(5, 40, (2, 8), generator=g), torch.tensor([[2, 3, 0], [4, 5, 6]])
    labels = tokens.gather(1, positions)
    if config.architecture == "encoder-decoder":
        return Batch(tokens, decoder_input_ids=tokens[:, :5], labels=tokens[:, 1:6])
    if config.architecture == "decoder":
        return Batch(tokens[:, :-1], labels=tokens[:, 1:])
    if isinstance(config.recurrent, ELMoConfig):
        spelled, both = torch.randint(0, 256, (2, 8, 50), generator=g), torch.stack([tokens, tokens], 1)
        return Batch(tokens, attention_rank=both, labels=both, char_ids=spelled)
    labels[0, 2] = -100
    around = torch.tensor([[[1, 4, 0], [1, 4, 1], [0, 0, 0]], [[3, 7, 0], [3, 7, 1], [3, 7, 2]]])
    ranks = torch.zeros_like(tokens).scatter(1, positions, torch.tensor([[1, 2, 0], [3, 1, 2]]))
    return Batch(
        tokens,
        attention_rank=ranks if config.get_extra("query") else None,
        token_type_ids=torch.tensor([[0] * 4 + [1] * 4] * 2),
        target_positions=positions,
        labels=labels,
        span_boundaries=around if config.get_extra("boundary") else None,
        pair_labels=torch.tensor([0, 1]) if config.get_extra("pair") else None,
    )


@pytest.mark.parametrize("name", TINY)
def test_every_family_overfits_a_batch(name: str) -> None:
    """Every parameter changes, and a few steps lower the loss on the batch."""
    config = with_extras(replace(PRESETS[name], vocab_size=40), NEEDS.get(PRESETS[name].family, ()))
    torch.manual_seed(0)
    model, batch = make_model(config).train(), some_batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []
    for _ in range(4):
        torch.manual_seed(0)  # the same dropout, and the same draws of a generator
        loss = sum(part / batch.loss_counts[key] for key, part in model.losses(batch).items())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert math.isfinite(losses[-1])
    assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []


def test_every_family_has_a_tiny_preset_as_wide_as_berts() -> None:
    families = {config.family for config in PRESETS.values()}
    assert families - {PRESETS[name].family for name in TINY} <= {"deberta-v2"}
    for name in TINY:
        assert PRESETS[name].num_layers <= 3
        assert PRESETS[name].dim == 128
        assert PRESETS[name].family == name.removesuffix("-tiny")


@pytest.mark.parametrize(
    "name", [name for name in TINY if PRESETS[name].recurrent is None and PRESETS[name].num_layers]
)
def test_bf16_residual_stream_is_close_to_float32(name: str) -> None:
    """Both under autocast: losses within 1%, gradients within 5%."""
    config = replace(PRESETS[name], vocab_size=40, dropout=0.0, attention_dropout=0.0, layer_drop=0.0)
    config = with_extras(config, NEEDS.get(config.family, ()))
    torch.manual_seed(0)
    model, batch, found, kinds = make_model(config), some_batch(config), [], set[torch.dtype]()
    stacks = [m for m in model.modules() if isinstance(m, Stack)]
    for block in (block for stack in stacks for block in stack.blocks):
        block.register_forward_hook(lambda block, given, x: kinds.add(x.dtype))
    for residual in (torch.float32, torch.bfloat16):
        for stack in stacks:
            stack.residual_dtype = residual
        kinds.clear()
        model.zero_grad()
        torch.manual_seed(1)  # what a generator draws
        with torch.autocast("cpu", torch.bfloat16):
            losses = model.losses(batch)
        loss = torch.stack([part / batch.loss_counts[key] for key, part in losses.items()]).sum()
        loss.backward()
        assert kinds == {residual}
        found.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    (wide, wide_grad), (narrow, narrow_grad) = found
    assert abs(narrow - wide) < 0.01 * wide
    limit = 0.15 if isinstance(config.norm, NoNormConfig) else 0.05
    assert 0 < (narrow_grad - wide_grad).norm() < limit * wide_grad.norm()
