"""Model presets: a family is a function that returns a ModelConfig, a size is one line of `PRESETS`.

Each function sets what its paper publishes and takes `**changes` for any other field. A family that derives from
another one calls that family's function, so the code shows the differences alone: RoBERTa is BERT with one segment and
a position offset.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from firth.core.errors import UserError, did_you_mean, list_names, quote
from firth.models.config import (
    BAG_OF_WORDS_FAMILY,
    BottleneckConfig,
    ConvolutionConfig,
    Disentangled,
    FanInInit,
    GeneratorConfig,
    LayerNormConfig,
    LearnedPosition,
    LMHead,
    MLPConfig,
    ModelConfig,
    NoNormConfig,
    NoPosition,
    NormalInit,
    QueryStream,
    RMSNormConfig,
    RopeScaling,
    Rotary,
    SlidingWindow,
    T5Bias,
    TransformerXL,
)
from firth.models.recurrent.presets import RECURRENT_FAMILY_DESCRIPTIONS, RECURRENT_PRESETS

HEAD_DIM = 64  # width of a head, as in BERT, GPT-2 and ModernBERT
SHAPE_WINDOW = 512  # tokens: rows of up to 257 are read whole, as causal rows need
MLP_RATIO = 2.625  # of a gated MLP: 8 layers of 512 with 1,344 were measured (docs/results.md)


def bert(num_layers: int, dim: int, num_heads: int, vocab_size: int = 30522, **changes: Any) -> ModelConfig:
    """Devlin et al. 2019: post-norm, learned positions, two segments."""
    fields: dict[str, Any] = dict(
        family="bert",
        architecture="encoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLPConfig(4 * dim, "gelu"),
        position=LearnedPosition(512),
        norm=LayerNormConfig(1e-12),
        head=LMHead(transform=True, bias=True),
        embed_norm=True,
        num_segments=2,
    )
    return ModelConfig(**fields | changes)


def gpt(num_layers: int, dim: int, num_heads: int, vocab_size: int = 40478, **changes: Any) -> ModelConfig:
    """Radford et al. 2018: post-norm, causal, learned positions."""
    fields: dict[str, Any] = dict(
        family="gpt",
        architecture="decoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLPConfig(4 * dim, "gelu-tanh"),
        position=LearnedPosition(512),
        norm=LayerNormConfig(1e-5),
        head=LMHead(),
    )
    return ModelConfig(**fields | changes)


def gpt2(num_layers: int, dim: int, num_heads: int, vocab_size: int = 50257, **changes: Any) -> ModelConfig:
    """Radford et al. 2019: GPT with pre-norm, and residual projections initialised by depth (section 2.3)."""
    fields: dict[str, Any] = dict(
        family="gpt2", position=LearnedPosition(1024), init=NormalInit(scale_residual=True), norm_first=True
    )
    return gpt(num_layers, dim, num_heads, vocab_size, **fields | changes)


def gpt3(num_layers: int, dim: int, num_heads: int, vocab_size: int = 50257, **changes: Any) -> ModelConfig:
    """Brown et al. 2020: GPT-2 with 2,048 positions. All layers are dense; the paper has sparse ones too.

    Where the heads of table 2.1 do not divide the width (XL, 13B), the head size is 128.
    """
    return gpt2(num_layers, dim, num_heads, vocab_size, **dict(family="gpt3", position=LearnedPosition(2048)) | changes)


def t5(num_layers: int, dim: int, num_heads: int, mlp_dim: int, vocab_size: int = 32128, **changes: Any) -> ModelConfig:
    """Raffel et al. 2020: encoder-decoder, relative position buckets, RMSNorm, no biases, tied and scaled head."""
    fields: dict[str, Any] = dict(
        family="t5",
        architecture="encoder-decoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLPConfig(mlp_dim, "relu", dropout=None),
        position=T5Bias(),
        norm=RMSNormConfig(),
        head=LMHead(scale_hidden_states=True),
        init=FanInInit(),
        norm_first=True,
        bias=False,
    )
    return ModelConfig(**fields | changes)


def t5_v1_1(
    num_layers: int, dim: int, num_heads: int, mlp_dim: int, vocab_size: int = 32128, **changes: Any
) -> ModelConfig:
    """T5 1.1: gated GELU, an untied head, pretrained without dropout."""
    fields: dict[str, Any] = dict(
        mlp=MLPConfig(mlp_dim, "gelu-tanh", gated=True, dropout=None),
        head=LMHead(tied=False),
        dropout=0.0,
        attention_dropout=0.0,
    )
    return t5(num_layers, dim, num_heads, mlp_dim, vocab_size, **fields | changes)


def firth_t5(
    num_layers: int, dim: int, num_heads: int, mlp_dim: int, vocab_size: int = 32128, **changes: Any
) -> ModelConfig:
    """T5 1.1 with the parts of ModernBERT: RoPE, small initial weights, a norm after the embeddings, a tied head.

    It reaches in 1,500 steps a loss that T5 1.1 does not reach in 5,831 (docs/results.md). No class of `transformers`
    has these parts: its T5Gemma also normalises the output of every sublayer, and has no norm after the embeddings.
    """
    fields: dict[str, Any] = dict(
        family="firth-t5", position=Rotary(), init=NormalInit(), embed_norm=True, head=LMHead()
    )
    return t5_v1_1(num_layers, dim, num_heads, mlp_dim, vocab_size, **fields | changes)


def t5gemma(
    num_layers: int, dim: int, num_heads: int, mlp_dim: int, vocab_size: int = 32128, **changes: Any
) -> ModelConfig:
    """Zhang et al. 2025: an encoder-decoder of Gemma 2's blocks, with norms before and after each sublayer, and RoPE.

    Without the published models' soft caps on scores and logits, and without their sliding windows.
    """
    fields: dict[str, Any] = dict(
        family="t5gemma",
        position=Rotary(length=8192),
        init=NormalInit(),
        norm_outputs=True,
        scale_embedding=True,
        head=LMHead(),
        mlp=MLPConfig(mlp_dim, "gelu-tanh", gated=True),
    )
    return t5_v1_1(num_layers, dim, num_heads, mlp_dim, vocab_size, **fields | changes)


def roberta(num_layers: int, dim: int, num_heads: int, vocab_size: int = 50265, **changes: Any) -> ModelConfig:
    """Liu et al. 2019: BERT with byte-level BPE and one segment; positions count from 2."""
    fields: dict[str, Any] = dict(
        family="roberta", position=LearnedPosition(514, offset=2), norm=LayerNormConfig(1e-5), num_segments=1
    )
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def xlm_roberta(num_layers: int, dim: int, num_heads: int, vocab_size: int = 250002, **changes: Any) -> ModelConfig:
    """Conneau et al. 2020: RoBERTa over 100 languages and one large vocabulary."""
    return roberta(num_layers, dim, num_heads, vocab_size, **dict(family="xlm-roberta") | changes)


def afriberta(num_layers: int, dim: int, num_heads: int, vocab_size: int = 70006, **changes: Any) -> ModelConfig:
    """Ogueji et al. 2021: a small XLM-R for eleven African languages, pretrained on little text."""
    return xlm_roberta(num_layers, dim, num_heads, vocab_size, **dict(family="afriberta") | changes)


def spanbert(num_layers: int, dim: int, num_heads: int, vocab_size: int = 28996, **changes: Any) -> ModelConfig:
    """Joshi et al. 2020: BERT with span masking and the span boundary objective."""
    return bert(num_layers, dim, num_heads, vocab_size, **dict(family="spanbert") | changes)


def unilm(num_layers: int, dim: int, num_heads: int, vocab_size: int = 28996, **changes: Any) -> ModelConfig:
    """Dong et al. 2019: BERT with bidirectional, causal and seq2seq attention masks."""
    return bert(num_layers, dim, num_heads, vocab_size, **dict(family="unilm") | changes)


def labse(num_layers: int, dim: int, num_heads: int, vocab_size: int = 501153, **changes: Any) -> ModelConfig:
    """Feng et al. 2022: BERT over 109 languages, for sentence embeddings."""
    return bert(num_layers, dim, num_heads, vocab_size, **dict(family="labse") | changes)


def distilbert(num_layers: int, dim: int, num_heads: int, vocab_size: int = 30522, **changes: Any) -> ModelConfig:
    """Sanh et al. 2019: half of BERT's layers, no segments."""
    fields: dict[str, Any] = dict(family="distilbert", num_segments=0)
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def ib_bert(
    num_layers: int,
    dim: int,
    num_heads: int,
    block_dim: int,
    embed_dim: int = 128,
    vocab_size: int = 30522,
    **changes: Any,
) -> ModelConfig:
    """Sun et al. 2020: MobileBERT's teacher, a BERT of wide blocks between narrow states; trigram embeddings."""
    fields: dict[str, Any] = dict(
        family="ib-bert",
        mlp=MLPConfig(4 * block_dim, "gelu"),
        bottleneck=BottleneckConfig(block_dim, num_mlps=1, attention_input="wide"),
        embed_dim=embed_dim,
        embed_trigrams=True,
        head=LMHead(transform=True, bias=True, extends_embeddings=True),
    )
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def mobilebert(
    num_layers: int,
    dim: int,
    num_heads: int,
    block_dim: int,
    embed_dim: int = 128,
    vocab_size: int = 30522,
    **changes: Any,
) -> ModelConfig:
    """Sun et al. 2020: narrow blocks with four MLPs each, no norms, ReLU, no dropout of hidden states."""
    fields: dict[str, Any] = dict(
        family="mobilebert",
        mlp=MLPConfig(4 * block_dim, "relu"),
        norm=NoNormConfig(),
        bottleneck=BottleneckConfig(block_dim),
        dropout=0.0,
    )
    return ib_bert(num_layers, dim, num_heads, block_dim, embed_dim, vocab_size, **fields | changes)


def rembert(
    num_layers: int,
    dim: int,
    num_heads: int,
    embed_dim: int = 256,
    output_embed_dim: int = 1664,
    vocab_size: int = 250300,
    **changes: Any,
) -> ModelConfig:
    """Chung et al. 2021: small input embeddings, large untied output embeddings, no dropout."""
    fields: dict[str, Any] = dict(
        family="rembert",
        embed_dim=embed_dim,
        head=LMHead(tied=False, transform=True, bias=True, dim=output_embed_dim),
        dropout=0.0,
        attention_dropout=0.0,
    )
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def xlm(num_layers: int, dim: int, num_heads: int, vocab_size: int = 95000, **changes: Any) -> ModelConfig:
    """Conneau & Lample 2019: BERT blocks, language embeddings, an LM head without transform."""
    fields: dict[str, Any] = dict(
        family="xlm", num_segments=0, head=LMHead(bias=True), init=NormalInit(embed_std=dim**-0.5)
    )
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def albert(
    num_layers: int, dim: int, num_heads: int, embed_dim: int = 128, vocab_size: int = 30000, **changes: Any
) -> ModelConfig:
    """Lan et al. 2020: parameters shared by all layers, factorised embeddings, no dropout (section 4.8)."""
    fields: dict[str, Any] = dict(
        family="albert",
        mlp=MLPConfig(4 * dim, "gelu-tanh"),
        embed_dim=embed_dim,
        num_shared=num_layers,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def electra(
    num_layers: int, dim: int, num_heads: int, embed_dim: int | None = 128, vocab_size: int = 30522, **changes: Any
) -> ModelConfig:
    """Clark et al. 2020: BERT with factorised embeddings in the small size; the generator is an extra."""
    return bert(num_layers, dim, num_heads, vocab_size, **dict(family="electra", embed_dim=embed_dim) | changes)


def xlnet(num_layers: int, dim: int, num_heads: int, vocab_size: int = 32000, **changes: Any) -> ModelConfig:
    """Yang et al. 2019: post-norm, Transformer-XL attention, relative segment encodings, two streams."""
    fields: dict[str, Any] = dict(
        family="xlnet",
        mlp=MLPConfig(4 * dim, "gelu", dropout=None),
        position=TransformerXL(relative_segments=True),
        head=LMHead(bias=True),
        embed_norm=False,
        attention_bias="none",
        num_segments=0,
        extras=(QueryStream(),),
    )
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def deberta(num_layers: int, dim: int, num_heads: int, vocab_size: int = 50265, **changes: Any) -> ModelConfig:
    """He et al. 2021: BERT with disentangled attention, no segments."""
    fields: dict[str, Any] = dict(
        family="deberta",
        position=Disentangled(),
        norm=LayerNormConfig(1e-7),
        attention_bias="no-key",
        num_segments=0,
    )
    return bert(num_layers, dim, num_heads, vocab_size, **fields | changes)


def deberta_v2(num_layers: int, dim: int, num_heads: int, vocab_size: int = 128100, **changes: Any) -> ModelConfig:
    """Version 2: bucketed distances, projections shared with content, a convolution beside the first block."""
    fields: dict[str, Any] = dict(
        family="deberta-v2",
        position=Disentangled(num_buckets=256, share_projections=True, norm_embeddings=True),
        attention_bias="all",
        convolution=ConvolutionConfig(3),
    )
    return deberta(num_layers, dim, num_heads, vocab_size, **fields | changes)


def deberta_v3(num_layers: int, dim: int, num_heads: int, vocab_size: int = 128100, **changes: Any) -> ModelConfig:
    """He et al. 2023: version 2 without the convolution, pretrained by replaced token detection."""
    fields: dict[str, Any] = dict(family="deberta-v3", convolution=None)
    return deberta_v2(num_layers, dim, num_heads, vocab_size, **fields | changes)


def bart(num_layers: int, dim: int, num_heads: int, vocab_size: int = 50265, **changes: Any) -> ModelConfig:
    """Lewis et al. 2020: encoder-decoder, post-norm, learned positions that count from 2."""
    fields: dict[str, Any] = dict(
        family="bart",
        architecture="encoder-decoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLPConfig(4 * dim, "gelu"),
        position=LearnedPosition(1026, offset=2),
        norm=LayerNormConfig(1e-5),
        head=LMHead(),
        embed_norm=True,
        adds_bos=True,
    )
    return ModelConfig(**fields | changes)


def llama(
    num_layers: int, dim: int, num_heads: int, mlp_dim: int, vocab_size: int = 32000, **changes: Any
) -> ModelConfig:
    """Touvron et al. 2023: pre-norm with RMSNorm, RoPE, SwiGLU, no biases, no dropout."""
    fields: dict[str, Any] = dict(
        family="llama",
        architecture="decoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLPConfig(mlp_dim, "silu", gated=True),
        position=Rotary(),
        norm=RMSNormConfig(1e-6),
        head=LMHead(tied=False),
        norm_first=True,
        bias=False,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return ModelConfig(**fields | changes)


def llama2(num_layers: int, dim: int, num_heads: int, mlp_dim: int, **changes: Any) -> ModelConfig:
    """Touvron et al. 2023b: 4,096 positions; grouped-query attention in the largest size."""
    fields: dict[str, Any] = dict(position=Rotary(length=4096), norm=RMSNormConfig(1e-5))
    return llama(num_layers, dim, num_heads, mlp_dim, **fields | changes)


def llama3(
    num_layers: int, dim: int, num_heads: int, mlp_dim: int, rope_scaling_factor: float | None = None, **changes: Any
) -> ModelConfig:
    """Grattafiori et al. 2024: 8 key-value heads, 128,256 tokens; scaled RoPE from 3.1 on."""
    rotary = (
        Rotary(500000.0, 8192)
        if rope_scaling_factor is None
        else Rotary(500000.0, 131072, RopeScaling(rope_scaling_factor))
    )
    fields: dict[str, Any] = dict(position=rotary, norm=RMSNormConfig(1e-5), num_kv_heads=8)
    return llama(num_layers, dim, num_heads, mlp_dim, 128256, **fields | changes)


def modernbert(
    num_layers: int, dim: int, num_heads: int, mlp_dim: int, vocab_size: int = 50368, **changes: Any
) -> ModelConfig:
    """Warner et al. 2024: pre-norm, RoPE, sliding windows in two of three layers, GeGLU, no biases."""
    fields: dict[str, Any] = dict(
        family="modernbert",
        architecture="encoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        mlp=MLPConfig(mlp_dim, "gelu", gated=True),
        position=Rotary(160000.0, 8192, local_theta=10000.0),
        norm=LayerNormConfig(1e-5, bias=False),
        head=LMHead(transform=True, bias=True),
        init=NormalInit(scale_residual=True, cutoff_factor=2.0),
        norm_first=True,
        embed_norm=True,
        skip_first_norm=True,
        bias=False,
        window=SlidingWindow(128, 3),
        dropout=0.0,
        attention_dropout=0.0,
    )
    return ModelConfig(**fields | changes)


def firth_encoder(
    num_layers: int, dim: int, num_heads: int, mlp_dim: int, vocab_size: int = 50368, **changes: Any
) -> ModelConfig:
    """ModernBERT with gated attention, value residuals and U-Net skips, and windows that read rows of 257 tokens whole.

    No class of `transformers` has these parts, so a checkpoint has the `model_type` firth.
    """
    fields: dict[str, Any] = dict(
        family="firth-encoder",
        window=SlidingWindow(SHAPE_WINDOW, 3),
        attention_gate=True,
        value_residual=True,
        unet_skips=True,
    )
    return modernbert(num_layers, dim, num_heads, mlp_dim, vocab_size, **fields | changes)


def bag_of_words(vocab_size: int, dim: int, tied: bool = False, num_bigram_buckets: int = 0) -> ModelConfig:
    """No layers: a word is its embedding (word2vec, GloVe), a text the mean of its words (fastText)."""
    return ModelConfig(
        family=BAG_OF_WORDS_FAMILY,
        architecture="encoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=0,
        num_heads=1,
        mlp=MLPConfig(1),
        position=NoPosition(),
        norm=LayerNormConfig(),
        head=LMHead(tied=tied),
        dropout=0.0,
        attention_dropout=0.0,
        num_bigram_buckets=num_bigram_buckets,
    )


PRESETS: dict[str, ModelConfig] = {
    "bert-tiny": bert(2, 128, 2),
    "bert-mini": bert(4, 256, 4),
    "bert-small": bert(4, 512, 8),
    "bert-medium": bert(8, 512, 8),
    "bert-base": bert(12, 768, 12),
    "bert-base-cased": bert(12, 768, 12, 28996),
    "bert-base-multilingual": bert(12, 768, 12, 119547),
    "bert-large": bert(24, 1024, 16),
    "bert-large-cased": bert(24, 1024, 16, 28996),
    "roberta-tiny": roberta(2, 128, 2),
    "roberta-mini": roberta(4, 256, 4),
    "roberta-small": roberta(4, 512, 8),
    "roberta-base": roberta(12, 768, 12),
    "roberta-large": roberta(24, 1024, 16),
    "xlm-roberta-tiny": xlm_roberta(2, 128, 2),
    "xlm-roberta-mini": xlm_roberta(4, 256, 4),
    "xlm-roberta-base": xlm_roberta(12, 768, 12),
    "xlm-roberta-large": xlm_roberta(24, 1024, 16),
    "afriberta-tiny": afriberta(2, 128, 2),
    "afriberta-small": afriberta(4, 768, 6),
    "afriberta-base": afriberta(8, 768, 6),
    "afriberta-large": afriberta(10, 768, 6),
    "spanbert-tiny": spanbert(2, 128, 2),
    "spanbert-mini": spanbert(4, 256, 4),
    "spanbert-base": spanbert(12, 768, 12),
    "spanbert-large": spanbert(24, 1024, 16),
    "albert-tiny": albert(2, 128, 2, embed_dim=64),
    "albert-mini": albert(4, 256, 4),
    "albert-base": albert(12, 768, 12),
    "albert-large": albert(24, 1024, 16),
    "albert-xlarge": albert(24, 2048, 16),
    "albert-xxlarge": albert(12, 4096, 64),
    "distilbert-tiny": distilbert(2, 128, 2),
    "distilbert-mini": distilbert(2, 256, 4),
    "distilbert-base": distilbert(6, 768, 12),
    "ib-bert-tiny": ib_bert(3, 128, 4, 256, embed_dim=64),
    "ib-bert-large": ib_bert(24, 512, 4, 1024),
    "mobilebert-tiny": mobilebert(3, 128, 4, 32, embed_dim=64),
    "mobilebert": mobilebert(24, 512, 4, 128),
    "mobilebert-15m": mobilebert(24, 512, 4, 128, bottleneck=BottleneckConfig(128, 2, "narrow")),
    "electra-tiny": electra(2, 128, 2, embed_dim=64),
    "electra-mini": electra(4, 256, 4),
    "electra-small": electra(12, 256, 4),
    "electra-base": electra(12, 768, 12, embed_dim=None, extras=(GeneratorConfig(width_ratio=1 / 3),)),
    "electra-large": electra(24, 1024, 16, embed_dim=None),
    "xlnet-tiny": xlnet(2, 128, 2),
    "xlnet-base": xlnet(12, 768, 12),
    "xlnet-large": xlnet(24, 1024, 16),
    "deberta-tiny": deberta(2, 128, 2),
    "deberta-base": deberta(12, 768, 12),
    "deberta-large": deberta(24, 1024, 16),
    "deberta-v2-xlarge": deberta_v2(24, 1536, 24),
    "deberta-v2-xxlarge": deberta_v2(48, 1536, 24),
    "deberta-v3-tiny": deberta_v3(2, 128, 2),
    "deberta-v3-xsmall": deberta_v3(12, 384, 6),
    "deberta-v3-small": deberta_v3(6, 768, 12),
    "deberta-v3-base": deberta_v3(12, 768, 12),
    "deberta-v3-large": deberta_v3(24, 1024, 16),
    "unilm-tiny": unilm(2, 128, 2),
    "unilm-mini": unilm(4, 256, 4),
    "unilm-base": unilm(12, 768, 12),
    "unilm-large": unilm(24, 1024, 16),
    "labse-tiny": labse(2, 128, 2),
    "labse": labse(12, 768, 12),
    "rembert-tiny": rembert(2, 128, 2, 64, 192),
    "rembert": rembert(32, 1152, 18),
    "xlm-tiny": xlm(2, 128, 2, num_languages=2),
    "xlm-15": xlm(12, 1024, 8, num_languages=15),
    "xlm-17": xlm(16, 1280, 16, 200000),
    "xlm-100": xlm(16, 1280, 16, 200000),
    "gpt-tiny": gpt(2, 128, 2),
    "gpt-mini": gpt(4, 256, 4),
    "gpt": gpt(12, 768, 12),
    "modernbert-tiny": modernbert(3, 128, 2, 192),
    "modernbert-mini": modernbert(6, 256, 4, 384),
    "modernbert-base": modernbert(22, 768, 12, 1152),
    "modernbert-large": modernbert(28, 1024, 16, 2624),
    "llama-tiny": llama(2, 128, 2, 352),
    "llama-mini": llama(4, 256, 4, 704),
    "llama-small": llama(6, 512, 8, 1408),
    "llama-7b": llama(32, 4096, 32, 11008),
    "llama-13b": llama(40, 5120, 40, 13824),
    "llama-33b": llama(60, 6656, 52, 17920),
    "llama-65b": llama(80, 8192, 64, 22016),
    "llama-2-7b": llama2(32, 4096, 32, 11008),
    "llama-2-13b": llama2(40, 5120, 40, 13824),
    "llama-2-70b": llama2(80, 8192, 64, 28672, num_kv_heads=8),
    "llama-3-8b": llama3(32, 4096, 32, 14336),
    "llama-3-70b": llama3(80, 8192, 64, 28672),
    "llama-3.1-8b": llama3(32, 4096, 32, 14336, 8.0),
    "llama-3.1-70b": llama3(80, 8192, 64, 28672, 8.0),
    "llama-3.1-405b": llama3(126, 16384, 128, 53248, 8.0),
    "llama-3.2-1b": llama3(16, 2048, 32, 8192, 32.0, head=LMHead()),
    "llama-3.2-3b": llama3(28, 3072, 24, 8192, 32.0, head=LMHead()),
    "gpt2-tiny": gpt2(2, 128, 2),
    "gpt2-mini": gpt2(4, 256, 4),
    "gpt2-small": gpt2(6, 512, 8),
    "gpt2": gpt2(12, 768, 12),
    "gpt2-medium": gpt2(24, 1024, 16),
    "gpt2-large": gpt2(36, 1280, 20),
    "gpt2-xl": gpt2(48, 1600, 25),
    "gpt3-tiny": gpt3(2, 128, 2),
    "gpt3-small": gpt3(12, 768, 12),
    "gpt3-medium": gpt3(24, 1024, 16),
    "gpt3-large": gpt3(24, 1536, 16),
    "gpt3-xl": gpt3(24, 2048, 16),
    "gpt3-2.7b": gpt3(32, 2560, 32),
    "gpt3-6.7b": gpt3(32, 4096, 32),
    "gpt3-13b": gpt3(40, 5120, 40),
    "gpt3-175b": gpt3(96, 12288, 96),
    "t5-tiny": t5(2, 128, 2, 512),
    "t5-mini": t5(4, 256, 4, 1024),
    "t5-small": t5(6, 512, 8, 2048),
    "t5-base": t5(12, 768, 12, 3072),
    "t5-large": t5(24, 1024, 16, 4096),
    "t5-3b": t5(24, 1024, 32, 16384, head_dim=128),
    "t5-11b": t5(24, 1024, 128, 65536, head_dim=128),
    "t5.1.1-small": t5_v1_1(8, 512, 6, 1024, head_dim=64),
    "t5.1.1-base": t5_v1_1(12, 768, 12, 2048),
    "t5.1.1-large": t5_v1_1(24, 1024, 16, 2816),
    "t5.1.1-xl": t5_v1_1(24, 2048, 32, 5120),
    "t5.1.1-xxl": t5_v1_1(24, 4096, 64, 10240),
    "t5gemma-tiny": t5gemma(2, 128, 2, 352),
    "t5gemma-small": t5gemma(8, 512, 8, 1344),
    "t5gemma-base": t5gemma(12, 768, 12, 2048),
    "firth-encoder-tiny": firth_encoder(3, 128, 2, 320),
    "firth-encoder-mini": firth_encoder(4, 256, 4, 640),
    "firth-encoder-small": firth_encoder(8, 512, 8, 1344),
    "firth-encoder-base": firth_encoder(12, 768, 12, 2048),
    "firth-t5-tiny": firth_t5(2, 128, 2, 352),
    "firth-t5-small": firth_t5(8, 512, 8, 1344),
    "firth-t5-base": firth_t5(12, 768, 12, 2048),
    "bart-tiny": bart(2, 128, 2),
    "bart-mini": bart(4, 256, 4),
    "bart-base": bart(6, 768, 12),
    "bart-large": bart(12, 1024, 16),
    **RECURRENT_PRESETS,
}


FAMILY_DESCRIPTIONS: dict[str, str] = {
    "bert": "text, pair and token classification; the best start",
    "roberta": "as bert, with byte-level BPE: no unknown words",
    "xlm-roberta": "classification in 100 languages, or in one of them",
    "afriberta": "classification in languages with little text",
    "spanbert": "spans: answers, names, coreference",
    "unilm": "classification and generation with one stack",
    "labse": "sentence embeddings across languages",
    "albert": "classification with few parameters",
    "distilbert": "fast classification",
    "mobilebert": "classification on small devices; learns layer by layer from ib-bert",
    "ib-bert": "the teacher of mobilebert",
    "electra": "classification after short pretraining: every token gives a loss",
    "deberta": "the most accurate classification for its size",
    "deberta-v2": "the most accurate classification, very large",
    "deberta-v3": "as deberta, pretrained by replaced token detection",
    "xlnet": "classification of long texts",
    "rembert": "classification in 100 languages; untied embeddings",
    "xlm": "two or more languages, parallel text",
    "modernbert": "fast classification of long texts: a current encoder",
    "gpt": "text generation; the first GPT",
    "gpt2": "text generation; the best start",
    "gpt3": "text generation, in the 8 published sizes",
    "llama": "text generation: a current decoder",
    "t5": "text to text: translate, summarise, answer",
    "t5gemma": "text to text: a current encoder-decoder",
    "firth-encoder": "classification and filling in, on little text: modernbert with gates and skips, which plain "
    "transformers does not open",
    "firth-t5": "text to text, on little text: a current encoder-decoder, which plain transformers does not open",
    "bart": "text to text: summarise, correct, restore",
    **RECURRENT_FAMILY_DESCRIPTIONS,
}


PRESET_ALIASES = {"ulmfit": "ulmfit-base", "elmo": "elmo-base"}  # a bare family name means the published size

# The family of each architecture for a model whose size is chosen, not published (`shaped_model`).
ARCHITECTURE_FAMILIES: dict[str, Callable[..., ModelConfig]] = {
    "encoder": modernbert,
    "decoder": llama,
    "encoder-decoder": t5gemma,
}
# Layers and width of the models to choose from; each has three to four times the parameters of the one before.
SHAPE_LADDER = (
    (2, 64),
    (3, 128),
    (4, 256),
    (6, 384),
    (8, 512),
    (12, 768),
    (16, 1024),
    (24, 1536),
    (24, 2048),
)
# The families that no paper fixes, and whose shapes have names: encoder-8x512, firth-encoder-8x512.
SHAPED_FAMILIES: dict[str, Callable[..., ModelConfig]] = {**ARCHITECTURE_FAMILIES, "firth-encoder": firth_encoder}
SHAPE_PATTERN = re.compile(rf"({'|'.join(SHAPED_FAMILIES)})-([1-9]\d*)x([1-9]\d*)")


def shaped_model(name: str, num_layers: int, dim: int) -> ModelConfig:
    """Return a model of this depth and width: heads of 64, and an MLP of 2.625 widths in multiples of 64.

    >>> config = shaped_model("encoder", 8, 512)
    >>> config.family, config.num_heads, config.mlp.dim
    ('modernbert', 8, 1344)
    """
    if dim % HEAD_DIM:
        raise UserError(f"{name}-{num_layers}x{dim}: the width must be a multiple of {HEAD_DIM}.")
    mlp_dim = HEAD_DIM * round(MLP_RATIO * dim / HEAD_DIM)
    config = SHAPED_FAMILIES[name](num_layers, dim, dim // HEAD_DIM, mlp_dim)
    if config.window is not None:
        config = replace(config, window=replace(config.window, size=SHAPE_WINDOW))
    return config


def shape_architecture(name: str) -> str:
    """Return the architecture of a model that no paper fixes, by its name; "" for any other name.

    >>> [shape_architecture(name) for name in ("encoder", "encoder-8x512", "firth-encoder-8x512", "firth-encoder-tiny")]
    ['encoder', 'encoder', 'encoder', 'encoder']
    >>> shape_architecture("bert-tiny")
    ''
    """
    if name in ARCHITECTURE_FAMILIES:
        return name
    if SHAPE_PATTERN.fullmatch(name) or (name in PRESETS and PRESETS[name].family in SHAPED_FAMILIES):
        return get_preset(name).architecture
    return ""


def is_preset(name: str) -> bool:
    return name in PRESETS or name in PRESET_ALIASES or SHAPE_PATTERN.fullmatch(name) is not None


def get_preset(name: str) -> ModelConfig:
    """Return the config of a preset, or of a shape: encoder-8x512 has 8 layers of width 512."""
    name = PRESET_ALIASES.get(name, name)
    if shape := SHAPE_PATTERN.fullmatch(name):
        return shaped_model(shape[1], int(shape[2]), int(shape[3]))
    if name not in PRESETS:
        raise UserError(f"Unknown model {quote(name)}. {suggest_preset(name)} `firth models` lists them all.")
    return PRESETS[name]


def suggest_preset(name: str) -> str:
    """Return a sentence on what an unknown name may mean: a family without a size, a published checkpoint, a typo.

    >>> suggest_preset("spanbert"), suggest_preset("bert-tinny")
    ('Name a size: spanbert-tiny, spanbert-mini, spanbert-base, spanbert-large.', "Did you mean 'bert-tiny'?")
    """
    if sizes := [preset for preset in PRESETS if preset.rpartition("-")[0] == name]:
        return f"Name a size: {list_names(sizes)}."
    published = name.rpartition("/")[2]
    if same := max((preset for preset in PRESETS if published.startswith(f"{preset}-")), key=len, default=""):
        return f"Did you mean {quote(same)}, with new weights? {download_hint(name)}"
    return did_you_mean(name, [*ARCHITECTURE_FAMILIES, *PRESETS])


def download_hint(name: str) -> str:
    return f"`hf download {name} --local-dir {name.rpartition('/')[2]}` fetches published weights."


def checkpoint_hint(path: str | Path) -> str:
    """Return where the checkpoint comes from that a path should name: a run, or a published one, if it may be its name.

    >>> checkpoint_hint("bert-tiny"), checkpoint_hint("a/b")[:31]
    ('It is a preset: `firth pretrain bert-tiny` makes a checkpoint, RUN/final.', '`hf download a/b --local-dir b`')
    """
    name = Path(path)
    if is_preset(str(path)):
        return f"It is a preset: `firth pretrain {path}` makes a checkpoint, RUN/final."
    may_be_published = not name.is_absolute() and len(name.parts) <= 2 and not name.exists()
    if may_be_published and (len(name.parts) == 1 or not name.parent.exists()):
        return f"{download_hint(str(path)).removesuffix('.')}, `firth pretrain` makes new ones: RUN/final."
    return "`firth pretrain` makes one: RUN/final."
