"""ONNX graphs of a model: its inputs, outputs and dynamic axes.

An ONNX file is a graph of operators with fixed names for its inputs and outputs. Every model has one of three layouts:

    model.onnx           encoders and all task heads: whole texts in, hidden states and logits out
    model.onnx           decoders: new tokens and the KV cache in, logits and the longer cache out
    encoder_model.onnx   encoder-decoders: the source in, hidden states and the keys and values of cross-attention out
    decoder_model.onnx   encoder-decoders: new tokens and both caches in, logits and the longer cache out

A decoder is one graph for both phases of generation: the prompt enters with an empty cache (axis `past` is 0), each
further step has one token. Keys and values are `past_key_values.0.key`, `past_key_values.0.value`, ... as inputs and
`present.0.key`, ... as outputs, (B, G, S, d) each: the names that Optimum and transformers.js use.

Shapes: B rows, T positions, P cached positions, S positions in all, U positions of the decoder, G heads of keys and
values, d head size, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.models import EmbeddingHead, Encoder, LMHead, Model, ModelConfig, MultipleChoiceHead, SpanHead, Stack
from firth.models.attention import AttentionSpec, KeyValues
from firth.models.config import (
    ALiBi,
    ClassificationHead,
    LearnedPosition,
    MultiTaskHead,
    NoPosition,
    RegressionHead,
    Rotary,
    SinusoidalPosition,
    T5Bias,
    TaskHead,
    TokenClassificationHead,
)
from firth.models.kv_cache import KVCache, project_cross_kv
from firth.models.model import EncoderDecoder
from firth.models.position.rope import make_rope
from firth.models.template import CLS_LAST_FAMILY

MODEL_FILE, ENCODER_FILE, DECODER_FILE = "model.onnx", "encoder_model.onnx", "decoder_model.onnx"
CACHED_POSITIONS = (NoPosition, LearnedPosition, SinusoidalPosition, Rotary, T5Bias, ALiBi)
EXAMPLE_TOKENS = 8  # length of the texts with which a graph is traced
Axes = dict[int, str]  # the names of dynamic axes


@dataclass(frozen=True)
class Graph:
    """One file: a module, example inputs in order, the dynamic axes of each, and the names of the outputs."""

    file: str
    module: nn.Module
    inputs: dict[str, Tensor]
    axes: dict[str, Axes]
    outputs: tuple[str, ...]


def make_graphs(model: Model) -> list[Graph]:
    """Return the graphs of a model; a UserError names the setting that no graph describes."""
    check_onnx_support(model.config)
    if isinstance(model, EncoderDecoder) and isinstance(model.config.head, LMHead):
        return [make_source_graph(model), make_target_graph(model)]
    if is_cached_decoder(model.config):
        assert isinstance(model, Encoder)
        return [make_decoder_graph(model)]
    return [make_text_graph(model)]


def is_cached_decoder(config: ModelConfig) -> bool:
    return config.architecture == "decoder" and isinstance(config.head, LMHead)


def check_onnx_support(config: ModelConfig) -> None:
    """Refuse models whose computation depends on more than a padded text, or whose keys and values cannot be cached."""
    head, generates = config.head, config.architecture != "encoder" and isinstance(config.head, LMHead)
    several = isinstance(head, ClassificationHead | RegressionHead) and (
        head.num_orders > 1 or getattr(head, "num_marked", 1) > 1
    )
    refused = {
        "model.recurrent: LSTMs over packed texts have no ONNX graph": config.recurrent is not None,
        "model.extras.features: the head of a frozen backbone has no ONNX graph": (
            config.get_extra("features") is not None
        ),
        "model.head.crf: the tags of a CRF are searched, not computed": (
            isinstance(head, TokenClassificationHead) and head.crf
        ),
        "model.head reads several positions of a text (num_marked, num_orders)": several,
        "model.head has several tasks: choose one with --task NAME": isinstance(head, MultiTaskHead),
        "model.num_bigram_buckets: a token's embedding depends on the one before it, which a KV cache lacks": (
            generates and config.num_bigram_buckets > 0
        ),
        f"model.position {type(config.position).__name__} has no KV cache": (
            generates and not isinstance(config.position, CACHED_POSITIONS)
        ),
        f"model.prompt_form {config.prompt_form}: a prompt that attends to all of itself is not causal": (
            generates and config.architecture == "decoder" and config.has_bidirectional_prompt
        ),
    }
    if wrong := next((why for why, is_refused in refused.items() if is_refused), None):
        raise UserError(f"This model cannot be exported as ONNX. {wrong}.")


# --- encoders and task heads ----------------------------------------------------------------------------------------


class TextGraph(nn.Module):
    """Whole texts, padded: hidden states and logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        named = {"input_ids": input_ids, "attention_mask": attention_mask}
        named |= {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        head = self.model.config.head
        if isinstance(head, MultipleChoiceHead):  # one text per row, and one logit for each
            return (self.model(**{name: value[None] for name, value in named.items()}).logits[0],)
        outputs = self.model(**named, output_hidden_states=not isinstance(head, TaskHead) or is_embedder(head))
        if isinstance(head, SpanHead):
            return outputs.start_logits, outputs.end_logits
        if is_embedder(head):
            return outputs.logits, outputs.hidden_states[-1]
        if isinstance(head, TaskHead):
            return (outputs.logits,)
        logits = outputs.logits
        if isinstance(self.model, Encoder) and self.model.generator is not None:  # ELECTRA: is the token replaced?
            logits = self.model.generator.discriminator_head(outputs.hidden_states[-1])
        return logits, outputs.hidden_states[-1]


def is_embedder(head: object) -> bool:
    return isinstance(head, EmbeddingHead)


def text_input_names(config: ModelConfig) -> tuple[str, ...]:
    has_types = config.architecture != "encoder-decoder" and (
        config.num_segments > 1 or getattr(config.position, "relative_segments", False)
    )
    has_types = has_types or config.family == CLS_LAST_FAMILY
    return ("input_ids", "attention_mask", *(("token_type_ids",) if has_types else ()))


def text_output_names(config: ModelConfig) -> tuple[str, ...]:
    if isinstance(config.head, SpanHead):
        return ("start_logits", "end_logits")
    if is_embedder(config.head):
        return ("sentence_embedding", "last_hidden_state")
    return ("logits",) if isinstance(config.head, TaskHead) else ("logits", "last_hidden_state")


def make_text_graph(model: Model) -> Graph:
    names = text_input_names(model.config)
    inputs = dict(zip(names, example_text(model.config, 2, example_length(model.config)), strict=False))
    return Graph(
        MODEL_FILE,
        TextGraph(model),
        inputs,
        {name: {0: "batch", 1: "sequence"} for name in names},
        text_output_names(model.config),
    )


def example_length(config: ModelConfig) -> int:
    """Return a length at which all branches of a model are taken: longer than a sliding window reaches."""
    length = EXAMPLE_TOKENS if config.window is None else config.window.size // 2 + EXAMPLE_TOKENS
    return min(length, config.max_length or length)


def example_text(config: ModelConfig, num_rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random ids, an attention mask with the last row padded, and segments: (B, T) each."""
    generator = torch.Generator().manual_seed(length)
    low = min(5, config.vocab_size - 1)  # special tokens come first
    input_ids = torch.randint(low, config.vocab_size, (num_rows, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    if num_rows > 1:
        attention_mask[-1, length - length // 2 :] = 0
    token_type_ids = torch.zeros_like(input_ids)
    token_type_ids[:, length // 2 :] = 1
    return input_ids, attention_mask, token_type_ids


# --- decoders with a KV cache ---------------------------------------------------------------------------------------


def new_token_specs(
    stack: Stack, x_BTD: Tensor, num_cached: int, mask_BS: Tensor | None, position_ids_BT: Tensor
) -> tuple[AttentionSpec, AttentionSpec]:
    """Return what T new tokens attend to after P cached ones: the specs of global and of sliding-window layers.

    A token always sees itself, so that a position of padding has a softmax too.
    """
    config, T = stack.config, x_BTD.shape[1]
    key_S = torch.arange(num_cached + T, device=x_BTD.device)
    query_T1 = torch.arange(num_cached, num_cached + T, device=x_BTD.device)[:, None]
    visible = (key_S <= query_T1)[None]
    if mask_BS is not None:
        visible = visible & (mask_BS.bool()[:, None, :] | (key_S == query_T1)[None])
    S = num_cached + T
    bias = None if stack.score is None else stack.score(S, S)[:, :, num_cached:]

    def make_spec(visible_BTS: Tensor, is_local: bool) -> AttentionSpec:
        mask = visible_BTS[:, None]
        masked = None if bias is None else bias.masked_fill(~mask, float("-inf"))
        rope = make_rope(config, position_ids_BT, x_BTD, is_local)
        return AttentionSpec(mask=mask, masked_bias=masked, rope=rope)

    global_spec = make_spec(visible, is_local=False)
    if config.window is None:
        return global_spec, global_spec
    near = (query_T1 - key_S <= config.window.size // 2)[None]
    return global_spec, make_spec(visible & near, is_local=True)


def run_with_cache(
    stack: Stack, x_BTD: Tensor, specs: tuple[AttentionSpec, AttentionSpec], past: tuple[Tensor, ...], cross: Any = None
) -> tuple[Tensor, list[Tensor]]:
    """Return the hidden states of new tokens, and all keys and values: key, value of each layer in turn."""
    cache, present = KVCache(stack, size=0), list[Tensor]()
    if cross is not None:
        cache.cross_kv, cache.cross_spec = cross

    def append_to(layer: int) -> Any:
        def append(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            k, v = torch.cat([past[2 * layer], k], 2), torch.cat([past[2 * layer + 1], v], 2)
            present.extend((k, v))
            return k, v

        return append

    x_BTD = cache.run_blocks(x_BTD, specs, [append_to(i) for i in range(stack.num_layers)])
    return x_BTD, present


class DecoderGraph(nn.Module):
    """New tokens and the KV cache of the text so far: logits, and the cache with the new tokens."""

    def __init__(self, model: Encoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        model = self.model
        x_BTD = model.embed(input_ids, position_ids)
        specs = new_token_specs(model.stack, x_BTD, past[0].shape[2], attention_mask, position_ids)
        x_BTD, present = run_with_cache(model.stack, x_BTD, specs, past)
        return model.head(x_BTD, model.embed.tokens.weight), *present


def cache_names(prefix: str, num_layers: int, side: str = "") -> list[str]:
    """Return `past_key_values.0.key`, `past_key_values.0.value`, ...; `side` is "encoder." or "decoder."."""
    return [f"{prefix}.{i}.{side}{part}" for i in range(num_layers) for part in ("key", "value")]


def make_decoder_graph(model: Encoder) -> Graph:
    config, length, cached = model.config, example_length(model.config), 3
    length = min(length, (config.max_length or length + cached) - cached)
    input_ids, _, _ = example_text(config, 1, length)
    input_ids = input_ids.repeat(2, 1)
    names = cache_names("past_key_values", config.num_layers)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones((2, cached + length), dtype=torch.long),
        "position_ids": torch.arange(cached, cached + length).repeat(2, 1),
        **{name: torch.randn(2, config.kv_heads, cached, config.head_size) for name in names},
    }
    axes: dict[str, Axes] = {
        "input_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "past_and_sequence"},
        "position_ids": {0: "batch", 1: "sequence"},
        **{name: {0: "batch", 2: "past"} for name in names},
    }
    outputs = ("logits", *cache_names("present", config.num_layers))
    return Graph(MODEL_FILE, DecoderGraph(model), inputs, axes, outputs)


# --- encoder-decoders -----------------------------------------------------------------------------------------------


class SourceGraph(nn.Module):
    """The encoder: hidden states, and the keys and values that the decoder's cross-attention reads."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        model = self.model
        x_BTD = model.encoder(model.embed(input_ids), attention_mask.long() - 1)
        pairs = (project_cross_kv(block, x_BTD) for block in model.decoder.layers)
        heads = [model.decoder.layers[0].cross.split_heads(part) for pair in pairs for part in pair]
        return x_BTD, *heads


class TargetGraph(nn.Module):
    """The decoder: new tokens, its own KV cache, and the keys and values of the source."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, encoder_attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        model, half = self.model, len(past) // 2
        own, source = past[:half], past[half:]
        num_cached, U = own[0].shape[2], input_ids.shape[1]
        position_ids = torch.arange(num_cached, num_cached + U, device=input_ids.device)[None]
        x_BUD = model.embed(input_ids, position_ids, position_embedding=model.decoder_embed)
        specs = new_token_specs(model.decoder, x_BUD, num_cached, None, position_ids)
        merged = [part.transpose(1, 2).flatten(2) for part in source]
        cross_kv = [KeyValues(k, v) for k, v in zip(merged[::2], merged[1::2], strict=True)]
        cross_spec = AttentionSpec(mask=encoder_attention_mask.bool()[:, None, None])
        x_BUD, present = run_with_cache(model.decoder, x_BUD, specs, own, (cross_kv, cross_spec))
        return model.head(x_BUD, model.embed.tokens.weight), *present


def make_source_graph(model: EncoderDecoder) -> Graph:
    config = model.config
    input_ids, attention_mask, _ = example_text(config, 2, example_length(config))
    return Graph(
        ENCODER_FILE,
        SourceGraph(model),
        {"input_ids": input_ids, "attention_mask": attention_mask},
        {name: {0: "batch", 1: "source"} for name in ("input_ids", "attention_mask")},
        ("last_hidden_state", *cache_names("present", config.decoder_layers, "encoder.")),
    )


def make_target_graph(model: EncoderDecoder) -> Graph:
    config, length, cached, source = model.config, 5, 3, EXAMPLE_TOKENS
    own = cache_names("past_key_values", config.decoder_layers, "decoder.")
    other = cache_names("past_key_values", config.decoder_layers, "encoder.")
    shape = (config.kv_heads, config.head_size)
    mask = torch.ones((2, source), dtype=torch.long)
    mask[1, source // 2 :] = 0
    inputs = {
        "input_ids": example_text(config, 1, length)[0].repeat(2, 1),
        "encoder_attention_mask": mask,
        **{name: torch.randn(2, shape[0], cached, shape[1]) for name in own},
        **{name: torch.randn(2, shape[0], source, shape[1]) for name in other},
    }
    axes: dict[str, Axes] = {
        "input_ids": {0: "batch", 1: "sequence"},
        "encoder_attention_mask": {0: "batch", 1: "source"},
        **{name: {0: "batch", 2: "past"} for name in own},
        **{name: {0: "batch", 2: "source"} for name in other},
    }
    outputs = ("logits", *cache_names("present", config.decoder_layers, "decoder."))
    return Graph(DECODER_FILE, TargetGraph(model), inputs, axes, outputs)


def empty_cache(graph: Graph) -> Iterator[tuple[str, Tensor]]:
    """Yield the inputs of an empty cache for one row."""
    for name, value in graph.inputs.items():
        if "past" in graph.axes[name].values():
            yield name, value[:1, :, :0]
