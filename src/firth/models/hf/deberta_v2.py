"""DeBERTa, versions 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from firth.models.config import ConvolutionConfig, Disentangled, MLPConfig, ModelConfig
from firth.models.hf.deberta import (
    DEBERTA_ALIASES,
    DEBERTA_FIXED_SETTINGS,
    DEBERTA_SETTINGS,
    DEBERTA_UNUSED_PATTERNS,
    deberta_shared_rules,
    deberta_task_architectures,
    read_deberta_rest,
)
from firth.models.hf.layout import HFLayout, TensorRule, linear_rules, qkv_rules
from firth.models.hf.settings import Converter, HFConfigDict, Setting, SettingsTable


def deberta_v2_rules(config: ModelConfig) -> Iterator[TensorRule]:
    assert isinstance(config.position, Disentangled)
    yield from deberta_shared_rules(config)
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


def read_deberta_v2_rest(hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
    size = hf_config.get("conv_kernel_size", 0)
    convolution = ConvolutionConfig(size, hf_config.get("conv_act", "tanh")) if size > 0 else None
    return replace(read_deberta_rest(hf_config, config), convolution=convolution)


def write_deberta_v2_rest(config: ModelConfig) -> HFConfigDict:
    hf_config = DEBERTA_SETTINGS.write_rest(config)
    if config.convolution is not None:
        hf_config |= {"conv_kernel_size": config.convolution.kernel_size, "conv_act": config.convolution.activation}
    return hf_config


DEBERTA_V2_DEFAULT = replace(
    DEBERTA_SETTINGS.default,
    family="deberta-v2",
    vocab_size=128100,
    dim=1536,
    num_layers=24,
    num_heads=24,
    mlp=MLPConfig(6144),
    attention_bias="all",
)
DEBERTA_V2_SETTINGS = SettingsTable(
    DEBERTA_V2_DEFAULT,
    (
        *DEBERTA_SETTINGS.settings,
        Setting("position.num_buckets", "position_buckets", Converter(lambda n: max(n, 0), lambda n: n or -1)),
        Setting("position.share_projections", "share_att_key"),
        Setting(
            "position.norm_embeddings",
            "norm_rel_ebd",
            Converter(lambda kind: "layer_norm" in kind, lambda norm: "layer_norm" if norm else "none"),
        ),
    ),
    read_deberta_v2_rest,
    write_deberta_v2_rest,
)
DEBERTA_V2_LAYOUT = HFLayout(
    "deberta-v2",
    deberta_v2_rules,
    DEBERTA_V2_SETTINGS,
    lm_architecture="DebertaV2ForMaskedLM",
    task_architectures=deberta_task_architectures("DebertaV2"),
    prefix="deberta.",
    fixed_settings=DEBERTA_FIXED_SETTINGS | {"conv_groups": 1},
    aliases=DEBERTA_ALIASES,
    unused_patterns=DEBERTA_UNUSED_PATTERNS,
)
