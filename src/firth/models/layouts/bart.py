"""BART."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from firth.errors import UserError
from firth.models.config import MLP, Classes, LayerNorm, Learned, LMHead, ModelConfig, Normal, Span
from firth.models.layouts.layout import (
    Answers,
    Layout,
    Rule,
    Settings,
    Tensors,
    activation,
    linear,
    qkv,
    their_activation,
)

ANSWERS = (
    Answers(
        "BartForSequenceClassification",
        Classes((), pool="last", pooled=True, dropout=0.0, drop_state=True),
        "classification_head.out_proj",
        "classification_head.dense",
        settings={"dropout": "classifier_dropout"},
    ),
    Answers("BartForQuestionAnswering", Span(dropout=0.0), "qa_outputs"),
)
OFFSET = 2  # the first places are never used
BIAS = "final_logits_bias"  # the tensor, which is nearly always 0, and our word for it in config.json where it is not


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("model.shared.weight",))
    for side, embed, layers in (
        ("encoder", "embed", config.num_layers),
        ("decoder", "decoder_embed", config.decoder_layers),
    ):
        yield Rule(f"{embed}.places.weight", (f"model.{side}.embed_positions.weight",))
        yield from linear(f"{embed}.norm", f"model.{side}.layernorm_embedding")
        for i in range(layers):
            ours, theirs = f"{side}.blocks.{i}", f"model.{side}.layers.{i}"
            parts = {"attention": "self_attn"} | ({"cross": "encoder_attn"} if side == "decoder" else {})
            for name, at in parts.items():
                yield from qkv(config, f"{ours}.{name}.qkv", *(f"{theirs}.{at}.{x}_proj" for x in "qkv"))
                yield from linear(f"{ours}.{name}.out", f"{theirs}.{at}.out_proj")
                yield from linear(f"{ours}.{name}_norm", f"{theirs}.{at}_layer_norm")
            yield from linear(f"{ours}.mlp.up", f"{theirs}.fc1")
            yield from linear(f"{ours}.mlp.down", f"{theirs}.fc2")
            yield from linear(f"{ours}.mlp_norm", f"{theirs}.final_layer_norm")
    if isinstance(config.head, LMHead) and config.head.bias:
        yield Rule("head.bias", (BIAS,), row=True)


def read(hf: Settings) -> ModelConfig:
    layers, decoder_layers = hf.get("encoder_layers", 12), hf.get("decoder_layers", 12)
    return ModelConfig(
        family="bart",
        shape="encoder-decoder",
        vocab_size=hf.get("vocab_size", 50265),
        dim=hf.get("d_model", 1024),
        num_layers=layers,
        num_heads=both(hf, "attention_heads", 16),
        mlp=MLP(
            both(hf, "ffn_dim", 4096),
            activation(hf.get("activation_function", "gelu")),
            dropout=hf.get("activation_dropout", 0.0),
        ),
        position=Learned(hf.get("max_position_embeddings", 1024) + OFFSET, OFFSET),
        norm=LayerNorm(1e-5),
        head=LMHead(bias=hf.get(BIAS, False)),
        init=Normal(hf.get("init_std", 0.02)),
        embed_norm=True,
        embed_scaled=bool(hf.get("scale_embedding")),
        num_decoder_layers=None if decoder_layers == layers else decoder_layers,
        framed=True,
        dropout=hf.get("dropout", 0.1),
        attention_dropout=hf.get("attention_dropout", 0.0),
    )


def both(hf: Settings, what: str, default: int) -> int:
    """A number that encoder and decoder have in common."""
    numbers = {hf.get(f"{side}_{what}", default) for side in ("encoder", "decoder")}
    if len(numbers) > 1:
        raise UserError(f"config.json: encoder_{what} and decoder_{what} differ, and Firth knows BART only with one.")
    return numbers.pop()


def write(c: ModelConfig) -> Settings:
    return {
        "vocab_size": c.vocab_size,
        "d_model": c.dim,
        "encoder_layers": c.num_layers,
        "decoder_layers": c.decoder_layers,
        "encoder_attention_heads": c.num_heads,
        "decoder_attention_heads": c.num_heads,
        "encoder_ffn_dim": c.mlp.dim,
        "decoder_ffn_dim": c.mlp.dim,
        "activation_function": their_activation(c),
        "max_position_embeddings": c.max_length,
        "init_std": getattr(c.init, "std", None),
        "scale_embedding": c.embed_scaled,
        "dropout": c.dropout,
        "attention_dropout": c.attention_dropout,
        "activation_dropout": c.mlp_dropout,
        "is_encoder_decoder": True,
        **({BIAS: True} if isinstance(c.head, LMHead) and c.head.bias else {}),
    }


def settle(config: ModelConfig, tensors: Callable[..., Tensors]) -> ModelConfig:
    """With a bias where the file has one that is not 0."""
    bias = tensors(BIAS).get(BIAS)
    if bias is None or not bias.any() or not isinstance(config.head, LMHead):
        return config
    return replace(config, head=replace(config.head, bias=True))


BART = Layout(
    "bart",
    rules,
    read,
    write,
    lm="BartForConditionalGeneration",
    answers=ANSWERS,
    prefix="model.",
    fixed={"tie_word_embeddings": True},
    twins={
        "model.shared.weight": (
            "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight",
            "lm_head.weight",
        )
    },
    unused=(BIAS,),
    settle=settle,
)
