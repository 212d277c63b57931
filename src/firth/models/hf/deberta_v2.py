"""DeBERTa, versions 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from firth.models.config import ConvolutionConfig, Disentangled, ModelConfig
from firth.models.hf import deberta
from firth.models.hf.layout import HFConfigDict, HFLayout, TensorRule, linear_rules, qkv_rules


def deberta_v2_rules(config: ModelConfig) -> Iterator[TensorRule]:
    assert isinstance(config.position, Disentangled)
    yield from deberta.deberta_shared_rules(config)
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}.attention", f"deberta.encoder.layer.{i}.attention.self"
        yield from qkv_rules(config, f"{ours}.qkv", *(f"{theirs}.{part}_proj" for part in ("query", "key", "value")))
        if not config.position.share_projections:
            yield from linear_rules(f"{ours}.score.pos_query", f"{theirs}.pos_query_proj")
            yield from linear_rules(f"{ours}.score.pos_key", f"{theirs}.pos_key_proj")
    if config.position.norm_embeddings:
        yield from linear_rules("stack.shared.norm", "deberta.encoder.LayerNorm")
    if config.convolution is not None:
        yield from linear_rules("stack.convolution.conv", "deberta.encoder.conv.conv")
        yield from linear_rules("stack.convolution.norm", "deberta.encoder.conv.LayerNorm")


def read_deberta_v2_config(hf_config: HFConfigDict) -> ModelConfig:
    position = replace(
        deberta.read_deberta_position(hf_config),
        num_buckets=max(hf_config.get("position_buckets", -1), 0),
        share_projections=hf_config.get("share_att_key", False),
        norm_embeddings="layer_norm" in hf_config.get("norm_rel_ebd", "none"),
    )
    size = hf_config.get("conv_kernel_size", 0)
    defaults: dict[str, Any] = dict(
        vocab_size=128100, hidden_size=1536, num_hidden_layers=24, num_attention_heads=24, intermediate_size=6144
    )
    return deberta.read_deberta_config(
        defaults | hf_config,
        family="deberta-v2",
        position=position,
        attention_bias="all",
        convolution=ConvolutionConfig(size, hf_config.get("conv_act", "tanh")) if size > 0 else None,
    )


def write_deberta_v2_config(config: ModelConfig) -> HFConfigDict:
    settings, position = deberta.write_deberta_config(config), config.position
    assert isinstance(position, Disentangled)
    settings |= {
        "position_buckets": position.num_buckets or -1,
        "share_att_key": position.share_projections,
        "norm_rel_ebd": "layer_norm" if position.norm_embeddings else "none",
    }
    if config.convolution is None:
        return settings
    return settings | {"conv_kernel_size": config.convolution.kernel_size, "conv_act": config.convolution.activation}


DEBERTA_V2_LAYOUT = HFLayout(
    "deberta-v2",
    deberta_v2_rules,
    read_deberta_v2_config,
    write_deberta_v2_config,
    lm_architecture="DebertaV2ForMaskedLM",
    task_architectures=deberta.deberta_task_architectures("DebertaV2"),
    prefix="deberta.",
    fixed_settings=deberta.DEBERTA_FIXED_SETTINGS | {"conv_groups": 1},
    aliases=deberta.DEBERTA_ALIASES,
    unused_patterns=deberta.DEBERTA_UNUSED_PATTERNS,
)
