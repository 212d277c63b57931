"""Llama 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from firth.core.errors import UserError, quote
from firth.models import presets
from firth.models.config import (
    AuxiliaryLM,
    ClassificationHead,
    LMHead,
    ModelConfig,
    RopeScaling,
    Rotary,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, linear_rules, qkv_rules
from firth.models.hf.settings import ACTIVATION, HIDDEN_SIZES, Converter, HFConfigDict, Setting, SettingsTable


def llama_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("model.embed_tokens.weight",))
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"model.layers.{i}"
        at = f"{theirs}.self_attn"
        yield from qkv_rules(
            config, f"{ours}.attention.qkv", f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", bias=config.bias
        )
        yield from linear_rules(f"{ours}.attention.out", f"{at}.o_proj", bias=config.bias)
        yield from linear_rules(f"{ours}.attention_norm", f"{theirs}.input_layernorm", bias=False)
        yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj", bias=config.bias)
        yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", bias=config.bias)
        yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", bias=False)
    yield from linear_rules("stack.final_norm", "model.norm", bias=False)
    beside = config.get_extra("auxiliary")
    if isinstance(config.head, LMHead) and not config.head.tied:
        yield TensorRule("head.weight", ("lm_head.weight",))
    elif isinstance(beside, AuxiliaryLM) and not beside.head.tied:
        yield TensorRule("extras.auxiliary.weight", ("lm_head.weight",))


def read_rope(hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
    """Return the model with RoPE as `transformers` 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) has it."""
    rope = {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"config.json: rope_type {quote(kind)} is not supported; default and llama3 are.")
    theta, scaling = rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0, None
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        scaling = RopeScaling(rope["factor"], low, high, rope["original_max_position_embeddings"])
    position: Any = config.position
    return replace(config, position=replace(position, theta=float(theta), scaling=scaling))


def write_rope(config: ModelConfig) -> HFConfigDict:
    if not isinstance(config.position, Rotary):
        raise UserError(f"transformers has no llama with {type(config.position).__name__}: set Rotary as position.")
    rope: HFConfigDict = {"rope_type": "default", "rope_theta": config.position.theta}
    if (scaling := config.position.scaling) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    return {"rope_parameters": rope, "tie_word_embeddings": getattr(config.head, "tied", False)}


LLAMA_DEFAULT = presets.llama(32, 4096, 32, 11008)
NULL_IS_DEFAULT = Converter(from_hf=lambda value: value or None)
LLAMA_SETTINGS = SettingsTable(
    LLAMA_DEFAULT,
    (
        *HIDDEN_SIZES,
        Setting("kv_heads", "num_key_value_heads", NULL_IS_DEFAULT, default=None),
        Setting("head_size", "head_dim", NULL_IS_DEFAULT, default=None),
        Setting("mlp.dim", "intermediate_size"),
        Setting("mlp.activation", "hidden_act", ACTIVATION),
        Setting("position.length", "max_position_embeddings"),
        Setting("norm.eps", "rms_norm_eps"),
        Setting("init.std", "initializer_range"),
        Setting("head.tied", "tie_word_embeddings"),
        Setting("bias", "attention_bias", equal_keys=("mlp_bias",)),
        Setting("attention_dropout", "attention_dropout"),
    ),
    read_rope,
    write_rope,
)
LLAMA_LAYOUT = HFLayout(
    "llama",
    llama_rules,
    LLAMA_SETTINGS,
    lm_architecture="LlamaForCausalLM",
    task_architectures=(
        TaskArchitecture("LlamaForSequenceClassification", ClassificationHead((), pool="last", dropout=0.0), "score"),
        TaskArchitecture(
            "LlamaForTokenClassification",
            TokenClassificationHead((), dropout=0.1),
            "score",
            settings={"dropout": "classifier_dropout"},
        ),
        TaskArchitecture("LlamaForQuestionAnswering", SpanHead(dropout=0.0), "qa_outputs", prefix="transformer."),
    ),
    prefix="model.",
    fixed_settings={"pretraining_tp": 1},
    # a head that is tied needs no tensor
    unused_patterns=("model.layers.*.self_attn.rotary_emb.inv_freq", "lm_head.weight"),
)
