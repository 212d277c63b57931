"""Families are functions, sizes are lines."""

from __future__ import annotations

from typing import Any

from firth.errors import UserError, nearest
from firth.models.config import MLP, Buckets, FanIn, LayerNorm, Learned, LMHead, ModelConfig, Normal, RMSNorm


def bert(num_layers: int, dim: int, num_heads: int, vocab_size: int = 30522, **changes: Any) -> ModelConfig:
    """Devlin et al. 2019: post-norm, learned places, two segments."""
    fields: dict[str, Any] = dict(
        family="bert",
        shape="encoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLP(4 * dim, "gelu"),
        position=Learned(512),
        norm=LayerNorm(1e-12),
        head=LMHead(transform=True, bias=True),
        embed_norm=True,
        num_segments=2,
    )
    return ModelConfig(**fields | changes)


def gpt2(num_layers: int, dim: int, num_heads: int, vocab_size: int = 50257, **changes: Any) -> ModelConfig:
    """Radford et al. 2019: pre-norm, causal, residual weights scaled by depth."""
    fields: dict[str, Any] = dict(
        family="gpt2",
        shape="decoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLP(4 * dim, "gelu-tanh"),
        position=Learned(1024),
        norm=LayerNorm(1e-5),
        head=LMHead(),
        init=Normal(scale_residual=True),
        norm_first=True,
    )
    return ModelConfig(**fields | changes)


def t5(num_layers: int, dim: int, num_heads: int, mlp_dim: int, vocab_size: int = 32128, **changes: Any) -> ModelConfig:
    """Raffel et al. 2020: encoder-decoder, relative buckets, RMS norm, no biases, tied and scaled head."""
    fields: dict[str, Any] = dict(
        family="t5",
        shape="encoder-decoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLP(mlp_dim, "relu"),
        position=Buckets(),
        norm=RMSNorm(),
        head=LMHead(scaled=True),
        init=FanIn(),
        norm_first=True,
        bias=False,
    )
    return ModelConfig(**fields | changes)


def t5_v1_1(
    num_layers: int, dim: int, num_heads: int, mlp_dim: int, vocab_size: int = 32128, **changes: Any
) -> ModelConfig:
    """T5 1.1: gated GELU, a head of its own, pretrained without dropout."""
    fields: dict[str, Any] = dict(
        mlp=MLP(mlp_dim, "gelu-tanh", gated=True),
        head=LMHead(tied=False),
        dropout=0.0,
        attention_dropout=0.0,
    )
    return t5(num_layers, dim, num_heads, mlp_dim, vocab_size, **fields | changes)


def roberta(num_layers: int, dim: int, num_heads: int, vocab_size: int = 50265, **changes: Any) -> ModelConfig:
    """Liu et al. 2019: BERT without segments, over bytes."""
    fields: dict[str, Any] = dict(family="roberta", norm=LayerNorm(1e-5), num_segments=1)
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def spanbert(num_layers: int, dim: int, num_heads: int, vocab_size: int = 28996, **changes: Any) -> ModelConfig:
    """Joshi et al. 2020: BERT that answers spans, also from their boundaries."""
    return bert(num_layers, dim, num_heads, vocab_size, **dict(family="spanbert") | changes)


def unilm(num_layers: int, dim: int, num_heads: int, vocab_size: int = 28996, **changes: Any) -> ModelConfig:
    """Dong et al. 2019: BERT that reads in several orders."""
    return bert(num_layers, dim, num_heads, vocab_size, **dict(family="unilm") | changes)


def albert(
    num_layers: int, dim: int, num_heads: int, embed_dim: int = 128, vocab_size: int = 30000, **changes: Any
) -> ModelConfig:
    """Lan et al. 2020: one block for all layers, narrow token vectors, no dropout (section 4.8)."""
    fields: dict[str, Any] = dict(
        family="albert",
        mlp=MLP(4 * dim, "gelu-tanh"),
        embed_dim=embed_dim,
        num_shared=num_layers,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def electra(
    num_layers: int, dim: int, num_heads: int, embed_dim: int = 128, vocab_size: int = 30522, **changes: Any
) -> ModelConfig:
    """Clark et al. 2020: the body of BERT over narrow token vectors; the generator is one of its extras."""
    return bert(num_layers, dim, num_heads, vocab_size, **dict(family="electra", embed_dim=embed_dim) | changes)


def xlnet(num_layers: int, dim: int, num_heads: int, vocab_size: int = 32000, **changes: Any) -> ModelConfig:
    """Yang et al. 2019: the blocks of BERT, for two streams; here with learned places and no memory."""
    fields: dict[str, Any] = dict(family="xlnet", head=LMHead(bias=True), embed_norm=False)
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def bart(num_layers: int, dim: int, num_heads: int, vocab_size: int = 50265, **changes: Any) -> ModelConfig:
    """Lewis et al. 2020: encoder-decoder, post-norm, learned places; here both sides share them."""
    fields: dict[str, Any] = dict(
        family="bart",
        shape="encoder-decoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLP(4 * dim, "gelu"),
        position=Learned(1024),
        norm=LayerNorm(1e-5),
        head=LMHead(),
        embed_norm=True,
        framed=True,
    )
    return ModelConfig(**fields | changes)


PRESETS: dict[str, ModelConfig] = {
    "bert-tiny": bert(2, 128, 2),
    "bert-mini": bert(4, 256, 4),
    "bert-small": bert(4, 512, 8),
    "bert-medium": bert(8, 512, 8),
    "bert-base": bert(12, 768, 12),
    "roberta-tiny": roberta(2, 128, 2),
    "spanbert-tiny": spanbert(2, 128, 2),
    "albert-tiny": albert(2, 128, 2, embed_dim=64),
    "electra-tiny": electra(2, 128, 2, embed_dim=64),
    "xlnet-tiny": xlnet(2, 128, 2),
    "unilm-tiny": unilm(2, 128, 2),
    "gpt2-tiny": gpt2(2, 128, 2),
    "gpt2-mini": gpt2(4, 256, 4),
    "gpt2-small": gpt2(6, 512, 8),
    "gpt2": gpt2(12, 768, 12),
    "t5-tiny": t5(2, 128, 2, 512),
    "t5-mini": t5(4, 256, 4, 1024),
    "t5-small": t5(6, 512, 8, 2048),
    "t5-base": t5(12, 768, 12, 3072),
    "t5.1.1-small": t5_v1_1(8, 512, 6, 1024, head_dim=64),
    "t5.1.1-base": t5_v1_1(12, 768, 12, 2048),
    "bart-tiny": bart(2, 128, 2),
}


def preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        raise UserError(f"Unknown model {name!r}. {nearest(name, PRESETS)}")
    return PRESETS[name]
