"""T5, 1.0 and 1.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from firth.models.config import (
    FanInInit,
    LMHead,
    MLPConfig,
    ModelConfig,
    RMSNormConfig,
    T5Bias,
    TokenClassificationHead,
)
from firth.models.hf.layout import (
    HFConfigDict,
    HFLayout,
    TaskArchitecture,
    TensorRule,
    Tensors,
    activation_from_hf,
    activation_to_hf,
    linear_rules,
    qkv_rules,
)


def t5_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("shared.weight",))
    sides = ("encoder", config.num_layers, 1), ("decoder", config.decoder_layers, 2)
    for side, layers, last in sides if config.has_decoder else sides[:1]:
        yield TensorRule(
            f"{side}.score.table.weight", (f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)
        )
        for i in range(layers):
            ours, theirs = f"{side}.blocks.{i}", f"{side}.block.{i}.layer"
            parts = [("attention", 0, "SelfAttention")] + ([("cross", 1, "EncDecAttention")] if last == 2 else [])
            for name, place, kind in parts:
                at = f"{theirs}.{place}.{kind}"
                yield from qkv_rules(config, f"{ours}.{name}.qkv", f"{at}.q", f"{at}.k", f"{at}.v", bias=False)
                yield from linear_rules(f"{ours}.{name}.out", f"{at}.o", bias=False)
                yield from linear_rules(f"{ours}.{name}_norm", f"{theirs}.{place}.layer_norm", bias=False)
            dense = f"{theirs}.{last}.DenseReluDense"
            ups = (f"{dense}.wi_0", f"{dense}.wi_1") if config.mlp.gated else (f"{dense}.wi",)
            yield from linear_rules(f"{ours}.mlp.up", *ups, bias=False)
            yield from linear_rules(f"{ours}.mlp.down", f"{dense}.wo", bias=False)
            yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.{last}.layer_norm", bias=False)
        yield from linear_rules(f"{side}.final_norm", f"{side}.final_layer_norm", bias=False)
    if isinstance(config.head, LMHead) and not config.head.tied:
        yield TensorRule("head.weight", ("lm_head.weight",))


def read_t5_config(hf_config: HFConfigDict) -> ModelConfig:
    gate, _, kind = hf_config.get("feed_forward_proj", "relu").rpartition("-")
    dim, heads = hf_config.get("d_model", 512), hf_config.get("num_heads", 8)
    head_dim, layers = hf_config.get("d_kv", 64), hf_config.get("num_layers", 6)
    decoder_layers = hf_config.get("num_decoder_layers") or layers
    tied = hf_config.get("tie_word_embeddings") is not False
    return ModelConfig(
        family="t5",
        architecture="encoder-decoder",
        vocab_size=hf_config.get("vocab_size", 32128),
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        mlp=MLPConfig(
            hf_config.get("d_ff", 2048),
            "gelu-tanh" if gate and kind == "gelu" else activation_from_hf(kind),
            gated=gate == "gated",
            dropout=None,
        ),
        position=T5Bias(
            hf_config.get("relative_attention_num_buckets", 32), hf_config.get("relative_attention_max_distance", 128)
        ),
        norm=RMSNormConfig(hf_config.get("layer_norm_epsilon", 1e-6)),
        head=LMHead(tied=tied, scale_hidden_states=hf_config.get("scale_decoder_outputs", tied)),
        init=FanInInit(),
        norm_first=True,
        bias=False,
        head_dim=None if head_dim * heads == dim else head_dim,
        num_decoder_layers=None if decoder_layers == layers else decoder_layers,
        dropout=hf_config.get("dropout_rate", 0.1),
        attention_dropout=hf_config.get("dropout_rate", 0.1),
    )


def write_t5_config(config: ModelConfig) -> HFConfigDict:
    plain, words = activation_to_hf(config), dict[str, bool]()
    if isinstance(config.head, LMHead):
        words = {"tie_word_embeddings": config.head.tied, "scale_decoder_outputs": config.head.scale_hidden_states}
    gated = "gated-gelu" if config.mlp.activation == "gelu-tanh" else f"gated-{plain}"
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.dim,
        "d_kv": config.head_size,
        "d_ff": config.mlp.dim,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_heads": config.num_heads,
        "feed_forward_proj": gated if config.mlp.gated else plain,
        "relative_attention_num_buckets": getattr(config.position, "num_buckets", None),
        "relative_attention_max_distance": getattr(config.position, "max_distance", None),
        "layer_norm_epsilon": config.norm.eps,
        "dropout_rate": config.dropout,
        **words,
        "is_encoder_decoder": True,
    }


def detect_t5_tied_head(config: ModelConfig, read_tensors: Callable[..., Tensors]) -> ModelConfig:
    """With a head of its own where the file has one: `transformers` 5 calls every head of T5 tied."""
    found = read_tensors("lm_head.weight", "shared.weight")
    if len(found) < 2 or not isinstance(config.head, LMHead):
        return config
    return replace(config, head=replace(config.head, tied=torch.equal(*found.values())))


T5_LAYOUT = HFLayout(
    "t5",
    t5_rules,
    read_t5_config,
    write_t5_config,
    lm_architecture="T5ForConditionalGeneration",
    encoder_architecture="T5EncoderModel",
    task_architectures=(
        TaskArchitecture(
            "T5ForTokenClassification",
            TokenClassificationHead((), dropout=0.0),
            "classifier",
            settings={"dropout": "classifier_dropout"},
            prefix="transformer.",
        ),
    ),
    aliases={"shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")},
    unused_patterns=("lm_head.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    refine_config=detect_t5_tied_head,
)
