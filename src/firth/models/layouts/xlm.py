"""XLM."""

from __future__ import annotations

from collections.abc import Iterator

from firth.errors import UserError
from firth.models.config import MLP, Classes, LayerNorm, Learned, LMHead, ModelConfig, Normal, Sinusoid, Span, Tags
from firth.models.layouts.layout import Answers, Layout, Rule, Settings, linear, qkv

ANSWERS = (
    Answers(
        "XLMForSequenceClassification",
        Classes((), bias=True, dropout=0.1),
        "sequence_summary.summary",
        settings={"dropout": "summary_first_dropout"},
    ),
    Answers("XLMForTokenClassification", Tags(()), "classifier"),
    Answers("XLMForQuestionAnsweringSimple", Span(dropout=0.0), "qa_outputs"),
)


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("transformer.embeddings.weight",))
    places = "embed.waves" if isinstance(config.position, Sinusoid) else "embed.places.weight"
    yield Rule(places, ("transformer.position_embeddings.weight",))
    if config.num_languages:
        yield Rule("embed.languages.weight", ("transformer.lang_embeddings.weight",))
    yield from linear("embed.norm", "transformer.layer_norm_emb")
    for i in range(config.num_layers):
        ours, at = f"stack.blocks.{i}", f"transformer.attentions.{i}"
        yield from qkv(config, f"{ours}.attention.qkv", f"{at}.q_lin", f"{at}.k_lin", f"{at}.v_lin")
        yield from linear(f"{ours}.attention.out", f"{at}.out_lin")
        yield from linear(f"{ours}.attention_norm", f"transformer.layer_norm1.{i}")
        yield from linear(f"{ours}.mlp.up", f"transformer.ffns.{i}.lin1")
        yield from linear(f"{ours}.mlp.down", f"transformer.ffns.{i}.lin2")
        yield from linear(f"{ours}.mlp_norm", f"transformer.layer_norm2.{i}")
    if isinstance(config.head, LMHead):
        yield Rule("head.bias", ("pred_layer.proj.bias",))


def read(hf: Settings) -> ModelConfig:
    """Languages have vectors only where there are several."""
    dim, length = hf.get("emb_dim", 2048), hf.get("max_position_embeddings", 512)
    languages = hf.get("n_langs", 1) if hf.get("use_lang_emb", True) else 1
    std, embed_std = hf.get("init_std", 0.02), hf.get("embed_init_std", 2048**-0.5)
    return ModelConfig(
        family="xlm",
        shape="encoder",
        vocab_size=hf.get("vocab_size") or hf.get("n_words", 30145),  # its old name
        dim=dim,
        num_layers=hf.get("n_layers", 12),
        num_heads=hf.get("n_heads", 16),
        mlp=MLP(4 * dim, "gelu" if hf.get("gelu_activation", True) else "relu"),
        position=Sinusoid(length) if hf.get("sinusoidal_embeddings") else Learned(length),
        norm=LayerNorm(hf.get("layer_norm_eps", 1e-12)),
        head=LMHead(bias=True),
        init=Normal(std, embed_std=None if embed_std == std else embed_std),
        embed_norm=True,
        num_languages=languages if languages > 1 else 0,
        dropout=hf.get("dropout", 0.1),
        attention_dropout=hf.get("attention_dropout", 0.1),
    )


def write(c: ModelConfig) -> Settings:
    if c.mlp.activation not in ("gelu", "relu"):
        raise UserError(f"transformers has no XLM with the activation {c.mlp.activation}.")
    return {
        "vocab_size": c.vocab_size,
        "emb_dim": c.dim,
        "n_layers": c.num_layers,
        "n_heads": c.num_heads,
        "gelu_activation": c.mlp.activation == "gelu",
        "sinusoidal_embeddings": isinstance(c.position, Sinusoid),
        "max_position_embeddings": c.max_length,
        "layer_norm_eps": c.norm.eps,
        "init_std": getattr(c.init, "std", None),
        "embed_init_std": getattr(c.init, "embed_std", None) or getattr(c.init, "std", None),
        "n_langs": max(c.num_languages, 1),
        "use_lang_emb": c.num_languages > 0,
        "dropout": c.dropout,
        "attention_dropout": c.attention_dropout,
    }


XLM = Layout(
    "xlm",
    rules,
    read,
    write,
    lm="XLMWithLMHeadModel",
    answers=ANSWERS,
    prefix="transformer.",
    fixed={
        "causal": False,
        "is_encoder": True,
        "asm": False,
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": None,
        "summary_proj_to_labels": True,
        "tie_word_embeddings": True,
    },
    twins={"transformer.embeddings.weight": ("pred_layer.proj.weight",)},
    unused=("transformer.position_ids",),
)
