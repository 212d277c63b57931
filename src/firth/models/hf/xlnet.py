"""XLNet, without and with its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.models import presets
from firth.models.config import (
    ClassificationHead,
    LMHead,
    ModelConfig,
    MultipleChoiceHead,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, linear_rules
from firth.models.hf.settings import ACTIVATION, Setting, SettingsTable, sizes

XLNET_POOLER_FIELDS: Any = dict(has_pooler=True, pool="last", dropout=0.1)
XLNET_SUMMARY_NAME = "sequence_summary.summary"
XLNET_LOGITS_NAME = "logits_proj"
XLNET_DROPOUT_KEYS = {"dropout": "summary_last_dropout"}
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
    """Yield the rules of attention; XLNet stores all its matrices as (D, H, d), the output projection too."""
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


XLNET_DEFAULT = presets.xlnet(24, 1024, 16)
XLNET_SETTINGS = SettingsTable(
    XLNET_DEFAULT,
    (
        *sizes("d_model", "n_layer", "n_head"),
        Setting("mlp.dim", "d_inner"),
        Setting("mlp.activation", "ff_activation", ACTIVATION),
        Setting("norm.eps", "layer_norm_eps"),
        Setting("init.std", "initializer_range"),
        Setting("attention_dropout", "dropout"),
        Setting("dropout", "dropout"),
    ),
    write_rest=lambda config: {"mem_len": None},
)
XLNET_LAYOUT = HFLayout(
    "xlnet",
    xlnet_rules,
    XLNET_SETTINGS,
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
