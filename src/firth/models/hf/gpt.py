"""GPT, the first one."""

from __future__ import annotations

from collections.abc import Iterator

from firth.core.errors import UserError
from firth.models.config import (
    ClassificationHead,
    LayerNormConfig,
    LearnedPosition,
    LMHead,
    MLPConfig,
    ModelConfig,
    NormalInit,
)
from firth.models.hf import gpt2
from firth.models.hf.layout import (
    HFConfigDict,
    HFLayout,
    TaskArchitecture,
    TensorRule,
    activation_from_hf,
    activation_to_hf,
)

GPT_ACTIVATIONS = {"gelu": "gelu_new"}  # what it calls GELU is the approximation by tanh


def gpt_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("transformer.tokens_embed.weight",))
    yield TensorRule("embed.position_embeddings.weight", ("transformer.positions_embed.weight",))
    yield from gpt2.gpt2_block_rules(config)


def read_gpt_config(hf_config: HFConfigDict) -> ModelConfig:
    dim, name = hf_config.get("n_embd", 768), str(hf_config.get("afn", "gelu"))
    return ModelConfig(
        family="gpt",
        architecture="decoder",
        vocab_size=hf_config.get("vocab_size", 40478),
        dim=dim,
        num_layers=hf_config.get("n_layer", 12),
        num_heads=hf_config.get("n_head", 12),
        mlp=MLPConfig(4 * dim, activation_from_hf(GPT_ACTIVATIONS.get(name, name))),
        position=LearnedPosition(hf_config.get("n_positions", 512)),
        norm=LayerNormConfig(hf_config.get("layer_norm_epsilon", 1e-5)),
        head=LMHead(),
        init=NormalInit(hf_config.get("initializer_range", 0.02)),
        dropout=hf_config.get("resid_pdrop", 0.1),
        attention_dropout=hf_config.get("attn_pdrop", 0.1),
    )


def write_gpt_config(config: ModelConfig) -> HFConfigDict:
    if config.mlp.activation == "gelu":
        raise UserError("transformers has no GPT with an exact GELU.")
    theirs = {new: old for old, new in GPT_ACTIVATIONS.items()}
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "afn": theirs.get(activation_to_hf(config), activation_to_hf(config)),
        "n_positions": getattr(config.position, "length", None),
        "layer_norm_epsilon": config.norm.eps,
        "initializer_range": getattr(config.init, "std", None),
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


GPT_LAYOUT = HFLayout(
    "openai-gpt",
    gpt_rules,
    read_gpt_config,
    write_gpt_config,
    lm_architecture="OpenAIGPTLMHeadModel",
    task_architectures=(
        TaskArchitecture("OpenAIGPTForSequenceClassification", ClassificationHead((), pool="last"), "score"),
    ),
    prefix="transformer.",
    fixed_settings={"tie_word_embeddings": True},
    aliases={"transformer.tokens_embed.weight": ("lm_head.weight",)},
    unused_patterns=("transformer.h.*.attn.bias", "transformer.position_ids"),
)
