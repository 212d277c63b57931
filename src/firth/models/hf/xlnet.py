"""XLNet, without and with its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.models.config import (
    ClassificationHead,
    LayerNormConfig,
    LMHead,
    MLPConfig,
    ModelConfig,
    MultipleChoiceHead,
    NormalInit,
    QueryStream,
    SpanHead,
    TokenClassificationHead,
    TransformerXL,
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

XLNET_POOLER_FIELDS: Any = dict(has_pooler=True, pool="last", dropout=0.1)
XLNET_SUMMARY_NAME, XLNET_LOGITS_NAME, XLNET_DROPOUT_KEYS = (
    "sequence_summary.summary",
    "logits_proj",
    {"dropout": "summary_last_dropout"},
)
XLNET_TASK_ARCHITECTURES = (
    TaskArchitecture(
        "XLNetForSequenceClassification",
        ClassificationHead((), **XLNET_POOLER_FIELDS),
        XLNET_LOGITS_NAME,
        XLNET_SUMMARY_NAME,
        settings=XLNET_DROPOUT_KEYS,
    ),
    TaskArchitecture(
        "XLNetForMultipleChoice",
        MultipleChoiceHead(**XLNET_POOLER_FIELDS),
        XLNET_LOGITS_NAME,
        XLNET_SUMMARY_NAME,
        settings=XLNET_DROPOUT_KEYS,
    ),
    TaskArchitecture("XLNetForTokenClassification", TokenClassificationHead((), dropout=0.0), "classifier"),
    TaskArchitecture("XLNetForQuestionAnsweringSimple", SpanHead(dropout=0.0), "qa_outputs"),
)


def xlnet_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("transformer.word_embedding.weight",))
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"transformer.layer.{i}"
        yield from xlnet_attention_rules(f"{ours}.attention", f"{theirs}.rel_attn", config.num_heads)
        yield from linear_rules(f"{ours}.attention_norm", f"{theirs}.rel_attn.layer_norm")
        yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.ff.layer_1")
        yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.ff.layer_2")
        yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.ff.layer_norm")
    if config.get_extra("query") is not None:
        yield TensorRule("extras.query.vector", ("transformer.mask_emb",))
    if isinstance(config.head, LMHead):
        yield TensorRule("head.bias", ("lm_loss.bias",))


def xlnet_attention_rules(firth_prefix: str, hf_prefix: str, num_heads: int) -> Iterator[TensorRule]:
    """Their matrices are (D, H, d), from the width of the model to heads, the one back from heads too."""
    yield TensorRule(
        f"{firth_prefix}.qkv.weight",
        (f"{hf_prefix}.q", f"{hf_prefix}.k", f"{hf_prefix}.v"),
        transposed=True,
        split_heads=num_heads,
    )
    yield TensorRule(f"{firth_prefix}.out.weight", (f"{hf_prefix}.o",), split_heads=num_heads)
    yield TensorRule(
        f"{firth_prefix}.score.distance.weight", (f"{hf_prefix}.r",), transposed=True, split_heads=num_heads
    )
    yield TensorRule(f"{firth_prefix}.score.key_bias", (f"{hf_prefix}.r_w_bias",))
    yield TensorRule(f"{firth_prefix}.score.distance_bias", (f"{hf_prefix}.r_r_bias",))
    yield TensorRule(f"{firth_prefix}.score.segment_bias", (f"{hf_prefix}.r_s_bias",))
    yield TensorRule(f"{firth_prefix}.score.segments", (f"{hf_prefix}.seg_embed",))


def read_xlnet_config(hf_config: HFConfigDict) -> ModelConfig:
    return ModelConfig(
        family="xlnet",
        architecture="encoder",
        vocab_size=hf_config.get("vocab_size", 32000),
        dim=hf_config.get("d_model", 1024),
        num_layers=hf_config.get("n_layer", 24),
        num_heads=hf_config.get("n_head", 16),
        mlp=MLPConfig(
            hf_config.get("d_inner", 4096), activation_from_hf(hf_config.get("ff_activation", "gelu")), dropout=None
        ),
        position=TransformerXL(relative_segments=True),
        norm=LayerNormConfig(hf_config.get("layer_norm_eps", 1e-12)),
        head=LMHead(bias=True),
        init=NormalInit(hf_config.get("initializer_range", 0.02)),
        attention_bias="none",
        dropout=hf_config.get("dropout", 0.1),
        attention_dropout=hf_config.get("dropout", 0.1),
        extras=(QueryStream(),),
    )


def write_xlnet_config(config: ModelConfig) -> HFConfigDict:
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "d_inner": config.mlp.dim,
        "ff_activation": activation_to_hf(config),
        "layer_norm_eps": config.norm.eps,
        "initializer_range": getattr(config.init, "std", None),
        "dropout": config.dropout,
        "mem_len": None,
    }


XLNET_LAYOUT = HFLayout(
    "xlnet",
    xlnet_rules,
    read_xlnet_config,
    write_xlnet_config,
    lm_architecture="XLNetLMHeadModel",
    task_architectures=XLNET_TASK_ARCHITECTURES,
    prefix="transformer.",
    fixed_settings={
        "attn_type": "bi",
        "bi_data": False,
        "clamp_len": -1,
        "same_length": False,
        "untie_r": True,
        "summary_type": "last",
        "summary_use_proj": True,
        "summary_activation": "tanh",
        "tie_word_embeddings": True,
    },
    aliases={"transformer.word_embedding.weight": ("lm_loss.weight",)},
    unused_patterns=("transformer.mask_emb", "lm_loss.bias"),
)
