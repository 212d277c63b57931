"""BART."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from firth.models import presets
from firth.models.config import ClassificationHead, LMHead, ModelConfig, SpanHead
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, Tensors, linear_rules, qkv_rules
from firth.models.hf.settings import ACTIVATION, Converter, HFConfigDict, Setting, SettingsTable

BART_TASK_ARCHITECTURES = (
    TaskArchitecture(
        "BartForSequenceClassification",
        ClassificationHead((), pool="last", has_pooler=True, dropout=0.0, dropout_before_pooler=True),
        "classification_head.out_proj",
        "classification_head.dense",
        settings={"dropout": "classifier_dropout"},
    ),
    TaskArchitecture("BartForQuestionAnswering", SpanHead(dropout=0.0), "qa_outputs"),
)
BART_POSITION_OFFSET = 2  # the first rows are never used
BART_BIAS_KEY = "final_logits_bias"  # the tensor, 0 in most files; where it is not, also our key in config.json


def bart_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("model.shared.weight",))
    for side, embed, layers in (
        ("encoder", "embed", config.num_layers),
        ("decoder", "decoder_embed", config.decoder_layers),
    ):
        yield TensorRule(f"{embed}.position_embeddings.weight", (f"model.{side}.embed_positions.weight",))
        yield from linear_rules(f"{embed}.norm", f"model.{side}.layernorm_embedding")
        for i in range(layers):
            ours, theirs = f"{side}.blocks.{i}", f"model.{side}.layers.{i}"
            parts = {"attention": "self_attn"} | ({"cross": "encoder_attn"} if side == "decoder" else {})
            for name, at in parts.items():
                yield from qkv_rules(config, f"{ours}.{name}.qkv", *(f"{theirs}.{at}.{x}_proj" for x in "qkv"))
                yield from linear_rules(f"{ours}.{name}.out", f"{theirs}.{at}.out_proj")
                yield from linear_rules(f"{ours}.{name}_norm", f"{theirs}.{at}_layer_norm")
            yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.fc1")
            yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.fc2")
            yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.final_layer_norm")
    if isinstance(config.head, LMHead) and config.head.bias:
        yield TensorRule("head.bias", (BART_BIAS_KEY,), as_row=True)


BART_DEFAULT = presets.bart(12, 1024, 16, attention_dropout=0.0)
BART_LENGTH = Converter(lambda length: length + BART_POSITION_OFFSET, lambda length: length - BART_POSITION_OFFSET)


def write_bart_rest(config: ModelConfig) -> HFConfigDict:
    bias = isinstance(config.head, LMHead) and config.head.bias
    rest = {"activation_dropout": config.mlp_dropout, "is_encoder_decoder": True}
    return rest | ({BART_BIAS_KEY: True} if bias else {})


BART_SETTINGS = SettingsTable(
    BART_DEFAULT,
    (
        Setting("vocab_size", "vocab_size"),
        Setting("dim", "d_model"),
        Setting("num_layers", "encoder_layers"),
        Setting("decoder_layers", "decoder_layers", default=12),
        Setting("num_heads", "encoder_attention_heads", equal_keys=("decoder_attention_heads",)),
        Setting("mlp.dim", "encoder_ffn_dim", equal_keys=("decoder_ffn_dim",)),
        Setting("mlp.activation", "activation_function", ACTIVATION),
        Setting("position.length", "max_position_embeddings", BART_LENGTH),
        Setting("init.std", "init_std"),
        Setting("scale_embedding", "scale_embedding", Converter(from_hf=bool)),
        Setting("dropout", "dropout"),
        Setting("attention_dropout", "attention_dropout"),
    ),
    lambda hf_config, config: replace(
        config,
        mlp=replace(config.mlp, dropout=hf_config.get("activation_dropout", 0.0)),
        head=LMHead(bias=hf_config.get(BART_BIAS_KEY, False)),
    ),
    write_bart_rest,
)


def detect_bart_bias(config: ModelConfig, read_tensors: Callable[..., Tensors]) -> ModelConfig:
    """Return the config with an LM head bias where the file has a nonzero one."""
    bias = read_tensors(BART_BIAS_KEY).get(BART_BIAS_KEY)
    if bias is None or not bias.any() or not isinstance(config.head, LMHead):
        return config
    return replace(config, head=replace(config.head, bias=True))


BART_LAYOUT = HFLayout(
    "bart",
    bart_rules,
    BART_SETTINGS,
    lm_architecture="BartForConditionalGeneration",
    task_architectures=BART_TASK_ARCHITECTURES,
    prefix="model.",
    fixed_settings={"tie_word_embeddings": True},
    aliases={
        "model.shared.weight": (
            "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight",
            "lm_head.weight",
        )
    },
    unused_patterns=(BART_BIAS_KEY,),
    refine_config=detect_bart_bias,
)
