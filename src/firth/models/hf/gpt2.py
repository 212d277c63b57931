"""GPT-2, and what GPT-3 is written as."""

from __future__ import annotations

from collections.abc import Iterator

from firth.models.config import (
    ClassificationHead,
    LayerNormConfig,
    LearnedPosition,
    LMHead,
    MLPConfig,
    ModelConfig,
    NormalInit,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf.layout import (
    HFConfigDict,
    HFLayout,
    TaskArchitecture,
    TensorRule,
    activation_from_hf,
    activation_to_hf,
    linear_rules,
)


def gpt2_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("transformer.wte.weight",))
    yield TensorRule("embed.position_embeddings.weight", ("transformer.wpe.weight",))
    yield from gpt2_block_rules(config)
    yield from linear_rules("stack.final_norm", "transformer.ln_f")


def gpt2_block_rules(config: ModelConfig) -> Iterator[TensorRule]:
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"transformer.h.{i}"
        yield from linear_rules(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from linear_rules(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", transposed=True)
        yield from linear_rules(f"{ours}.attention.out", f"{theirs}.attn.c_proj", transposed=True)
        yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", transposed=True)
        yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", transposed=True)


def read_gpt2_config(hf_config: HFConfigDict) -> ModelConfig:
    dim = hf_config.get("n_embd", 768)
    return ModelConfig(
        family="gpt2",
        architecture="decoder",
        vocab_size=hf_config.get("vocab_size", 50257),
        dim=dim,
        num_layers=hf_config.get("n_layer", 12),
        num_heads=hf_config.get("n_head", 12),
        mlp=MLPConfig(
            hf_config.get("n_inner") or 4 * dim, activation_from_hf(hf_config.get("activation_function", "gelu_new"))
        ),
        position=LearnedPosition(hf_config.get("n_positions", 1024)),
        norm=LayerNormConfig(hf_config.get("layer_norm_epsilon", 1e-5)),
        head=LMHead(),
        init=NormalInit(hf_config.get("initializer_range", 0.02), scale_residual=True),
        norm_first=True,
        dropout=hf_config.get("resid_pdrop", 0.1),
        attention_dropout=hf_config.get("attn_pdrop", 0.1),
    )


def write_gpt2_config(config: ModelConfig) -> HFConfigDict:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp.dim,
        "activation_function": activation_to_hf(config),
        "n_positions": getattr(config.position, "length", None),
        "layer_norm_epsilon": config.norm.eps,
        "initializer_range": getattr(config.init, "std", None),
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


GPT2_LAYOUT = HFLayout(
    "gpt2",
    gpt2_rules,
    read_gpt2_config,
    write_gpt2_config,
    lm_architecture="GPT2LMHeadModel",
    task_architectures=(
        TaskArchitecture("GPT2ForSequenceClassification", ClassificationHead((), pool="last", dropout=0.0), "score"),
        TaskArchitecture(
            "GPT2ForTokenClassification",
            TokenClassificationHead((), dropout=0.1),
            "classifier",
            settings={"dropout": "classifier_dropout"},
        ),
        TaskArchitecture("GPT2ForQuestionAnswering", SpanHead(dropout=0.0), "qa_outputs"),
    ),
    prefix="transformer.",
    fixed_settings={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True},
    aliases={"transformer.wte.weight": ("lm_head.weight",)},
    unused_patterns=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)
