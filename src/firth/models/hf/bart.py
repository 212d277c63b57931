"""BART."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from firth.core.errors import UserError
from firth.models.config import (
    ClassificationHead,
    LayerNormConfig,
    LearnedPosition,
    LMHead,
    MLPConfig,
    ModelConfig,
    NormalInit,
    SpanHead,
)
from firth.models.hf.layout import (
    HFConfigDict,
    HFLayout,
    TaskArchitecture,
    TensorRule,
    Tensors,
    activation_from_hf,
    activation_to_hf,
    linear_rules,
    qkv_rules,
)

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
BART_POSITION_OFFSET = 2  # the first places are never used
BART_BIAS_KEY = (
    "final_logits_bias"  # the tensor, which is nearly always 0, and our word for it in config.json where it is not
)


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


def read_bart_config(hf_config: HFConfigDict) -> ModelConfig:
    layers, decoder_layers = hf_config.get("encoder_layers", 12), hf_config.get("decoder_layers", 12)
    return ModelConfig(
        family="bart",
        architecture="encoder-decoder",
        vocab_size=hf_config.get("vocab_size", 50265),
        dim=hf_config.get("d_model", 1024),
        num_layers=layers,
        num_heads=read_shared_bart_size(hf_config, "attention_heads", 16),
        mlp=MLPConfig(
            read_shared_bart_size(hf_config, "ffn_dim", 4096),
            activation_from_hf(hf_config.get("activation_function", "gelu")),
            dropout=hf_config.get("activation_dropout", 0.0),
        ),
        position=LearnedPosition(
            hf_config.get("max_position_embeddings", 1024) + BART_POSITION_OFFSET, BART_POSITION_OFFSET
        ),
        norm=LayerNormConfig(1e-5),
        head=LMHead(bias=hf_config.get(BART_BIAS_KEY, False)),
        init=NormalInit(hf_config.get("init_std", 0.02)),
        embed_norm=True,
        scale_embedding=bool(hf_config.get("scale_embedding")),
        num_decoder_layers=None if decoder_layers == layers else decoder_layers,
        adds_bos=True,
        dropout=hf_config.get("dropout", 0.1),
        attention_dropout=hf_config.get("attention_dropout", 0.0),
    )


def read_shared_bart_size(hf_config: HFConfigDict, suffix: str, default: int) -> int:
    """A number that encoder and decoder have in common."""
    numbers = {hf_config.get(f"{side}_{suffix}", default) for side in ("encoder", "decoder")}
    if len(numbers) > 1:
        raise UserError(
            f"config.json: encoder_{suffix} and decoder_{suffix} differ, and Firth knows BART only with one."
        )
    return numbers.pop()


def write_bart_config(config: ModelConfig) -> HFConfigDict:
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.dim,
        "encoder_layers": config.num_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.mlp.dim,
        "decoder_ffn_dim": config.mlp.dim,
        "activation_function": activation_to_hf(config),
        "max_position_embeddings": config.max_length,
        "init_std": getattr(config.init, "std", None),
        "scale_embedding": config.scale_embedding,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.mlp_dropout,
        "is_encoder_decoder": True,
        **({BART_BIAS_KEY: True} if isinstance(config.head, LMHead) and config.head.bias else {}),
    }


def detect_bart_bias(config: ModelConfig, read_tensors: Callable[..., Tensors]) -> ModelConfig:
    """With a bias where the file has one that is not 0."""
    bias = read_tensors(BART_BIAS_KEY).get(BART_BIAS_KEY)
    if bias is None or not bias.any() or not isinstance(config.head, LMHead):
        return config
    return replace(config, head=replace(config.head, bias=True))


BART_LAYOUT = HFLayout(
    "bart",
    bart_rules,
    read_bart_config,
    write_bart_config,
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
