"""T5Gemma: config.json describes both stacks, each with the settings of a Gemma 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from firth.core.errors import UserError, quote
from firth.models import presets
from firth.models.config import ClassificationHead, LMHead, ModelConfig, TokenClassificationHead
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, Tensors, linear_rules, qkv_rules
from firth.models.hf.llama import NULL_IS_DEFAULT, read_rope, write_rope
from firth.models.hf.settings import ACTIVATION, HIDDEN_SIZES, HFConfigDict, Setting, SettingsTable

EMBEDDINGS = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")


def gemma_norm(firth_name: str, hf_name: str) -> TensorRule:
    return TensorRule(f"{firth_name}.weight", (f"{hf_name}.weight",), offset=1.0)


def t5gemma_rules(config: ModelConfig) -> Iterator[TensorRule]:
    sides = (("encoder", config.num_layers), ("decoder", config.decoder_layers))
    yield TensorRule("embed.tokens.weight", EMBEDDINGS[: 1 + config.has_decoder], is_copied=True)
    for side, layers in sides if config.has_decoder else sides[:1]:
        for i in range(layers):
            ours, theirs = f"{side}.blocks.{i}", f"model.{side}.layers.{i}"
            for name, at in (("attention", "self_attn"), ("cross", "cross_attn"))[: 1 + (side == "decoder")]:
                yield from qkv_rules(
                    config, f"{ours}.{name}.qkv", *(f"{theirs}.{at}.{x}_proj" for x in "qkv"), bias=False
                )
                yield from linear_rules(f"{ours}.{name}.out", f"{theirs}.{at}.o_proj", bias=False)
                yield gemma_norm(f"{ours}.{name}_norm", f"{theirs}.pre_{at}_layernorm")
                yield gemma_norm(f"{ours}.{name}_output_norm", f"{theirs}.post_{at}_layernorm")
            yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj", bias=False)
            yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", bias=False)
            yield gemma_norm(f"{ours}.mlp_norm", f"{theirs}.pre_feedforward_layernorm")
            yield gemma_norm(f"{ours}.mlp_output_norm", f"{theirs}.post_feedforward_layernorm")
        yield gemma_norm(f"{side}.final_norm", f"model.{side}.norm")
    if isinstance(config.head, LMHead) and not config.head.tied:
        yield TensorRule("head.weight", ("lm_head.out_proj.weight",))


@dataclass(frozen=True)
class TwoStackSettings(SettingsTable):
    """Settings of both stacks, which differ in their number of layers alone."""

    def read(self, hf_config: HFConfigDict) -> ModelConfig:
        stacks = [hf_config.get(side) or {} for side in ("encoder", "decoder")]
        encoder, decoder = (super(TwoStackSettings, self).read(stack) for stack in stacks)
        if replace(decoder, num_layers=encoder.num_layers) != encoder:
            raise UserError("config.json: encoder and decoder differ. Firth supports T5Gemma with equal stacks.")
        for stack in stacks:
            check_stack(stack, encoder)
        dropout = {
            "dropout": hf_config.get("dropout_rate", 0.0),
            "attention_dropout": hf_config.get("attention_dropout", 0.0),
        }
        layers = decoder.num_layers if decoder.num_layers != encoder.num_layers else None
        head = LMHead(tied=hf_config.get("tie_word_embeddings", True))
        return replace(encoder, num_decoder_layers=layers, head=head, **dropout)

    def write(self, config: ModelConfig) -> HFConfigDict:
        if config.bias:
            raise UserError("transformers has T5Gemma only without biases.")
        stack = super().write(config) | {
            "query_pre_attn_scalar": config.head_size,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": getattr(config.position, "length", 1),  # needed, though no layer has a window
        }
        sides = {"encoder": config.num_layers, "decoder": config.decoder_layers}
        return {
            **{side: stack | {"num_hidden_layers": n, "layer_types": full_layers(n)} for side, n in sides.items()},
            "vocab_size": config.vocab_size,
            "dropout_rate": config.dropout,
            "attention_dropout": config.attention_dropout,
            "tie_word_embeddings": getattr(config.head, "tied", True),
            "is_encoder_decoder": config.has_decoder,
        }


def full_layers(num_layers: int) -> list[str]:
    return ["full_attention"] * num_layers


def check_stack(stack: HFConfigDict, config: ModelConfig) -> None:
    """Raise a UserError for what the published checkpoints have and our blocks do not: soft caps, windows, scales."""
    supported: dict[str, Any] = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": config.head_size,
        "layer_types": full_layers(stack.get("num_hidden_layers", config.num_layers)),
        "attention_bias": False,
    }
    for key, value in supported.items():
        if stack.get(key, value if key == "attention_bias" else "missing") != value:
            raise UserError(
                f"config.json: {key} is {quote(stack.get(key))}, and Firth knows T5Gemma only with {quote(value)}."
            )


def check_equal_embeddings(config: ModelConfig, read_tensors: Callable[..., Tensors]) -> ModelConfig:
    """Raise a UserError where encoder and decoder embed tokens differently, as `transformers` lets them."""
    tensors = read_tensors(*EMBEDDINGS)
    if len(tensors) == len(EMBEDDINGS) and not tensors[EMBEDDINGS[0]].equal(tensors[EMBEDDINGS[1]]):
        raise UserError(
            "The encoder and the decoder of this T5Gemma have different token embeddings, and Firth knows it only with "
            "equal ones."
        )
    return config


T5GEMMA_DEFAULT = presets.t5gemma(8, 512, 8, 1344)
T5GEMMA_LAYOUT = HFLayout(
    "t5gemma",
    t5gemma_rules,
    TwoStackSettings(
        T5GEMMA_DEFAULT,
        (
            *HIDDEN_SIZES,
            Setting("kv_heads", "num_key_value_heads", NULL_IS_DEFAULT, default=None),
            Setting("head_size", "head_dim", NULL_IS_DEFAULT, default=None),
            Setting("mlp.dim", "intermediate_size"),
            Setting("mlp.activation", "hidden_activation", ACTIVATION),
            Setting("position.length", "max_position_embeddings"),
            Setting("norm.eps", "rms_norm_eps"),
            Setting("init.std", "initializer_range"),
        ),
        read_rope,
        write_rope,
    ),
    lm_architecture="T5GemmaForConditionalGeneration",
    encoder_architecture="T5GemmaEncoderModel",
    prefix="model.",
    task_architectures=(
        TaskArchitecture(
            "T5GemmaForSequenceClassification",
            ClassificationHead((), pool="last", bias=True),
            "score.out_proj",
            settings={"dropout": "classifier_dropout_rate"},
        ),
        TaskArchitecture(
            "T5GemmaForTokenClassification",
            TokenClassificationHead(()),
            "score.out_proj",
            settings={"dropout": "classifier_dropout_rate"},
        ),
    ),
    aliases={EMBEDDINGS[0]: (EMBEDDINGS[1],)},
    unused_patterns=("lm_head.out_proj.weight",),
    refine_config=check_equal_embeddings,
)
