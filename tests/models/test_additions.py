"""Attention gates, value residuals and U-Net skips: neutral at the start, and their equations step by step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from firth.models import Model, count_parameters, load_model, make_model
from firth.models.config import ModelConfig, NoPosition
from firth.models.fused_decode import can_fuse_decode
from firth.models.kv_cache import KVCache
from firth.models.presets import bert, llama, modernbert, t5
from firth.objectives import Batch
from firth.train.muon import hidden_matrices

ALL: dict[str, Any] = {"attention_gate": True, "value_residual": True, "unet_skips": True}
IDS = np.random.default_rng(0).integers(5, 60, (2, 12))
CPU = torch.device("cpu")


def disturbed(config: ModelConfig) -> Model:
    """A model with random weights everywhere, also where they start at 0 or 1."""
    torch.manual_seed(0)
    model = make_model(replace(config, dropout=0.0, attention_dropout=0.0)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("make", [modernbert, llama, t5])
def test_an_addition_starts_as_the_plain_model(make: Any, name: str) -> None:
    plain = disturbed(make(4, 32, 2, 64, 64))
    model = make_model(replace(plain.config, **{name: True})).eval()
    added = set(model.state_dict()) - set(plain.state_dict())
    model.load_state_dict({**model.state_dict(), **plain.state_dict()})
    batch = Batch(IDS, decoder_input_ids=IDS if make is t5 else None).to(CPU)
    assert added
    assert torch.equal(model.logits(batch), plain.logits(batch))
    assert count_parameters(model.config) == model.num_parameters


@torch.no_grad()
def test_the_equations() -> None:
    """Four pre-norm blocks, written out; only the norms, the MLP and softmax are torch's."""
    model = disturbed(replace(llama(4, 32, 2, 64, 64), position=NoPosition(), **ALL))
    w, heads, T = model.state_dict(), 2, IDS.shape[1]
    x: Tensor = F.embedding(torch.from_numpy(IDS), w["embed.tokens.weight"])
    hidden = torch.ones(T, T).triu(1).bool()
    outputs, first_values = [], torch.zeros(0)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (32,), w[name], model.config.norm.eps)  # type: ignore[union-attr]

    for i in range(4):
        at = f"stack.blocks.{i}"
        if i == 3:
            x = x + w["stack.skip_weights"][0] * outputs[0]
        h = norm(x, f"{at}.attention_norm.weight")
        q, k, v = (h @ w[f"{at}.attention.qkv.weight"].T).split(32, -1)
        if i == 0:
            first_values = v
        else:
            a, b = w[f"{at}.attention.value_mix"]
            v = a * v + b * first_values
        parts = []
        for head in range(heads):
            qh, kh, vh = (t[..., 16 * head : 16 * (head + 1)] for t in (q, k, v))
            scores = (qh @ kh.transpose(1, 2) / 4.0).masked_fill(hidden, -torch.inf)
            gate = 2 / (1 + torch.exp(-(h @ w[f"{at}.attention.gate"][head])))
            parts.append(gate[..., None] * (scores.softmax(-1) @ vh))
        x = x + torch.cat(parts, -1) @ w[f"{at}.attention.out.weight"].T
        x = x + model.stack.blocks[i].mlp(norm(x, f"{at}.mlp_norm.weight"))  # type: ignore[union-attr,operator]
        outputs.append(x)
    found = model.hidden_states(Batch(IDS).to(CPU))
    torch.testing.assert_close(found, norm(x, "stack.final_norm.weight"), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("make", [modernbert, llama])
def test_the_cache_gives_the_same_states(make: Any) -> None:
    model = disturbed(replace(make(5, 32, 2, 64, 64), **ALL))
    rank = torch.arange(12).expand(2, 12)
    wanted = model.hidden_states(Batch(torch.from_numpy(IDS), attention_rank=rank))
    cache = KVCache(model.stack, 12)  # type: ignore[arg-type]
    x = model.embed(torch.from_numpy(IDS))
    found = [cache.prefill(x[:, :7], [7, 7], attention_rank=rank[:, :7])]
    for i in range(7, 12):
        found.append(cache.decode_step(x[:, i : i + 1]))
        cache.advance()
    torch.testing.assert_close(torch.cat(found, 1), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_the_fused_decoding_of_a_gpu_leaves_them_to_the_blocks(name: str) -> None:
    plain = llama(4, 32, 2, 64, 64)
    assert can_fuse_decode(make_model(plain).stack)  # type: ignore[arg-type]
    assert not can_fuse_decode(make_model(replace(plain, **{name: True})).stack)  # type: ignore[arg-type]


@torch.no_grad()
def test_the_last_layer_at_target_positions_alone() -> None:
    model = disturbed(replace(modernbert(4, 32, 2, 64, 64), **ALL))
    batch = Batch(IDS, target_positions=np.array([[1, 5, 9], [0, 2, 11]])).to(CPU)
    wanted = model.logits(batch)
    model.stack.last_layer_targets_only = True  # type: ignore[union-attr]
    assert model.stack.can_compute_targets_only(batch.target_positions, 12)  # type: ignore[union-attr,operator]
    torch.testing.assert_close(model.logits(batch), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("additions", [{}, ALL], ids=["plain", "all"])
def test_the_stack_is_one_graph(additions: dict[str, Any]) -> None:
    """Traced without a break: a compiled step needs that. Masks are those of rows that are masked or causal."""
    model = disturbed(replace(modernbert(4, 32, 2, 64, 64), **additions))
    rank = np.where(np.arange(2)[:, None] == 0, 0, np.arange(12))
    batch = Batch(IDS, document_ids=np.zeros_like(IDS), attention_rank=rank).to(CPU)
    traced = torch.compile(model.hidden_states, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(traced(batch), model.hidden_states(batch))


def test_a_checkpoint_needs_our_own_model_type(tmp_path: Path) -> None:
    model = disturbed(replace(llama(4, 32, 2, 64, 64), **ALL))
    model.save(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert again.config == model.config
    assert torch.equal(again.logits(Batch(IDS).to(CPU)), model.logits(Batch(IDS).to(CPU)))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "firth"
    gates = [p for name, p in model.named_parameters() if name.endswith("gate")]
    assert len(gates) == 4
    assert not any(p is gate for p in hidden_matrices(model) for gate in gates), "AdamW, not Muon"


@pytest.mark.parametrize("name", ALL)
def test_what_is_refused(name: str) -> None:
    for config in (bert(2, 32, 2, 64), replace(llama(2, 32, 2, 64, 64), num_shared=2)):
        assert f"model.{name} is for pre-norm" in replace(config, **{name: True}).problems()[0]
