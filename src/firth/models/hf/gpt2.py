"""GPT-2; also the layout of GPT-3."""

from __future__ import annotations

from collections.abc import Iterator

from firth.models import presets
from firth.models.config import ClassificationHead, ModelConfig, SpanHead, TokenClassificationHead
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, linear_rules
from firth.models.hf.settings import ACTIVATION, HFConfigDict, Setting, SettingsTable, set_field, sizes


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


GPT2_DEFAULT = presets.gpt2(12, 768, 12)
GPT_SHARED_SETTINGS = (
    *sizes("n_embd", "n_layer", "n_head"),
    Setting("position.length", "n_positions"),
    Setting("norm.eps", "layer_norm_epsilon"),
    Setting("init.std", "initializer_range"),
    Setting("dropout", "resid_pdrop"),
    Setting("attention_dropout", "attn_pdrop"),
)


def write_embedding_dropout(config: ModelConfig) -> HFConfigDict:
    return {"embd_pdrop": config.dropout}


GPT2_SETTINGS = SettingsTable(
    GPT2_DEFAULT,
    (
        *GPT_SHARED_SETTINGS,
        Setting("mlp.dim", "n_inner", default=None),
        Setting("mlp.activation", "activation_function", ACTIVATION),
    ),
    lambda hf_config, config: set_field(config, "mlp.dim", config.mlp.dim or 4 * config.dim),
    write_embedding_dropout,
)
GPT2_LAYOUT = HFLayout(
    "gpt2",
    gpt2_rules,
    GPT2_SETTINGS,
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
