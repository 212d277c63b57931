"""DeBERTa, versions 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from firth.models.config import Convolution, Disentangled, ModelConfig
from firth.models.layouts import deberta
from firth.models.layouts.layout import Layout, Rule, Settings, linear, qkv


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert isinstance(config.position, Disentangled)
    yield from deberta.outer_rules(config)
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}.attention", f"deberta.encoder.layer.{i}.attention.self"
        yield from qkv(config, f"{ours}.qkv", *(f"{theirs}.{part}_proj" for part in ("query", "key", "value")))
        if not config.position.shared:
            yield from linear(f"{ours}.score.ask", f"{theirs}.pos_query_proj")
            yield from linear(f"{ours}.score.read", f"{theirs}.pos_key_proj")
    if config.position.normed:
        yield from linear("stack.shared.norm", "deberta.encoder.LayerNorm")
    if config.convolution is not None:
        yield from linear("stack.convolution.conv", "deberta.encoder.conv.conv")
        yield from linear("stack.convolution.norm", "deberta.encoder.conv.LayerNorm")


def read(hf: Settings) -> ModelConfig:
    position = replace(
        deberta.read_position(hf),
        buckets=max(hf.get("position_buckets", -1), 0),
        shared=hf.get("share_att_key", False),
        normed="layer_norm" in hf.get("norm_rel_ebd", "none"),
    )
    size = hf.get("conv_kernel_size", 0)
    defaults: dict[str, Any] = dict(
        vocab_size=128100, hidden_size=1536, num_hidden_layers=24, num_attention_heads=24, intermediate_size=6144
    )
    return deberta.read(
        defaults | hf,
        family="deberta-v2",
        position=position,
        attention_bias="all",
        convolution=Convolution(size, hf.get("conv_act", "tanh")) if size > 0 else None,
    )


def write(c: ModelConfig) -> Settings:
    settings, position = deberta.write(c), c.position
    assert isinstance(position, Disentangled)
    settings |= {
        "position_buckets": position.buckets or -1,
        "share_att_key": position.shared,
        "norm_rel_ebd": "layer_norm" if position.normed else "none",
    }
    if c.convolution is None:
        return settings
    return settings | {"conv_kernel_size": c.convolution.size, "conv_act": c.convolution.activation}


DEBERTA_V2 = Layout(
    "deberta-v2",
    rules,
    read,
    write,
    lm="DebertaV2ForMaskedLM",
    answers=deberta.answers("DebertaV2"),
    prefix="deberta.",
    fixed=deberta.FIXED | {"conv_groups": 1},
    twins=deberta.TWINS,
    unused=deberta.UNUSED,
)
