"""GPT, the first one."""

from __future__ import annotations

from collections.abc import Iterator

from firth.errors import UserError
from firth.models.config import MLP, Classes, LayerNorm, Learned, LMHead, ModelConfig, Normal
from firth.models.layouts import gpt2
from firth.models.layouts.layout import Answers, Layout, Rule, Settings, activation, their_activation

ACTIVATIONS = {"gelu": "gelu_new"}  # what it calls GELU is the approximation by tanh


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("transformer.tokens_embed.weight",))
    yield Rule("embed.places.weight", ("transformer.positions_embed.weight",))
    yield from gpt2.block_rules(config)


def read(hf: Settings) -> ModelConfig:
    dim, name = hf.get("n_embd", 768), str(hf.get("afn", "gelu"))
    return ModelConfig(
        family="gpt",
        shape="decoder",
        vocab_size=hf.get("vocab_size", 40478),
        dim=dim,
        num_layers=hf.get("n_layer", 12),
        num_heads=hf.get("n_head", 12),
        mlp=MLP(4 * dim, activation(ACTIVATIONS.get(name, name))),
        position=Learned(hf.get("n_positions", 512)),
        norm=LayerNorm(hf.get("layer_norm_epsilon", 1e-5)),
        head=LMHead(),
        init=Normal(hf.get("initializer_range", 0.02)),
        dropout=hf.get("resid_pdrop", 0.1),
        attention_dropout=hf.get("attn_pdrop", 0.1),
    )


def write(c: ModelConfig) -> Settings:
    if c.mlp.activation == "gelu":
        raise UserError("transformers has no GPT with an exact GELU.")
    theirs = {new: old for old, new in ACTIVATIONS.items()}
    return {
        "vocab_size": c.vocab_size,
        "n_embd": c.dim,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "afn": theirs.get(their_activation(c), their_activation(c)),
        "n_positions": getattr(c.position, "length", None),
        "layer_norm_epsilon": c.norm.eps,
        "initializer_range": getattr(c.init, "std", None),
        "embd_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
        "attn_pdrop": c.attention_dropout,
    }


GPT = Layout(
    "openai-gpt",
    rules,
    read,
    write,
    lm="OpenAIGPTLMHeadModel",
    answers=(Answers("OpenAIGPTForSequenceClassification", Classes((), pool="last"), "score"),),
    prefix="transformer.",
    fixed={"tie_word_embeddings": True},
    twins={"transformer.tokens_embed.weight": ("lm_head.weight",)},
    unused=("transformer.h.*.attn.bias", "transformer.position_ids"),
)
