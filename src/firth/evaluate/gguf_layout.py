"""The architectures of llama.cpp that a model of ours can be: which settings they fix, their metadata and tensors.

llama.cpp has one graph per architecture, written in C++, with little choice in it. So a model fits if all of its
settings are those of the graph (`REQUIRED`); any other setting is refused by its name. Where a setting only moves a
weight it is folded into the weights: a scaled head becomes an untied head, RoPE that pairs halves of a head is
rewritten to pair neighbours, shared layers are written once per layer.

H heads, G heads of keys and values, d head size, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firth.core.errors import UserError, shorten
from firth.evaluate.onnx_graph import check_onnx_support
from firth.models import EmbeddingHead, LMHead, Model, ModelConfig, Stack, make_sequence_template
from firth.models.block import Block
from firth.models.config import (
    FanInInit,
    LayerNormConfig,
    LearnedPosition,
    NormalInit,
    RMSNormConfig,
    Rotary,
    T5Bias,
    UniformInit,
)
from firth.models.position.rope import rope_frequencies

Tensors = Iterator[tuple[str, Tensor]]
T5_MAX_DISTANCE, T5_CONTEXT = 128, 512  # llama.cpp's distance of the last bucket; the length of T5's pretraining rows
POOLING_TYPES = {"mean": 1, "first": 2, "last": 3}
SCALED_INITS = (NormalInit, UniformInit)  # scores divided by sqrt(d); FanInInit is T5, without
EVERYWHERE: dict[str, Any] = {
    "attention_gate": False,
    "value_residual": False,
    "unet_skips": False,
    "norm_outputs": False,
    "convolution": None,
    "bottleneck": None,
    "embed_dim": None,
    "embed_trigrams": False,
    "scale_embedding": False,
    "num_languages": 0,
    "num_bigram_buckets": 0,
    "recurrent": None,
    "attention_bias": "all",
}
ACTIVATIONS = ("gelu-tanh", "gelu")  # llama.cpp computes both by the tanh approximation


class Architecture(NamedTuple):
    """One graph of llama.cpp: its name, the settings it fixes, its metadata and its tensors."""

    name: str
    required: dict[str, Any]  # a value, a tuple of values, or a type
    metadata: Callable[[ModelConfig], dict[str, Any]]
    tensors: Callable[[Model], Tensors]


def find_architecture(config: ModelConfig) -> Architecture:
    """Return the architecture of a model. A UserError names the setting that llama.cpp does not have."""
    found = ARCHITECTURES.get((config.architecture, type(config.position)))
    if config.recurrent is not None:
        raise UserError(no_graph(config, "recurrent", type(config.recurrent).__name__, "LSTM"))
    if found is None:
        raise UserError(
            no_graph(config, "position", type(config.position).__name__, f"{config.architecture} of its own")
        )
    for name, wanted in (EVERYWHERE | found.required).items():
        value = reduce(getattr, name.split("."), config)
        is_type = isinstance(wanted, type) or (isinstance(wanted, tuple) and isinstance(wanted[0], type))
        fits = (
            isinstance(value, wanted) if is_type else value in wanted if isinstance(wanted, tuple) else value == wanted
        )
        if not fits:
            shown = type(value).__name__ if is_type else value
            raise UserError(no_graph(config, name, shown, found.name))
    check_head(config, found.name)
    return found


def no_graph(config: ModelConfig, name: str, value: Any, architecture: str) -> str:
    """Return what llama.cpp does not have, and whether --format onnx has it."""
    refused = f"llama.cpp has no {architecture} with model.{name}={shorten(value)}."
    try:
        check_onnx_support(config)
    except UserError:
        return f"{refused} ONNX has no graph for this model either."
    return f"{refused} Export with --format onnx."


def check_head(config: ModelConfig, name: str) -> None:
    """Refuse heads that the graphs do not have: task heads, and language-model heads with a transform or a bias."""
    head = config.head
    if config.get_extra("generator") is not None:
        raise UserError(no_graph(config, "extras", "GeneratorConfig", name))
    if isinstance(head, EmbeddingHead):
        if head.has_pooler:
            raise UserError(no_graph(config, "head.has_pooler", True, name))
        if config.architecture == "decoder":
            raise UserError(no_graph(config, "head", "EmbeddingHead", name))
        return
    if not isinstance(head, LMHead):
        raise UserError(no_graph(config, "head", type(head).__name__, name))
    if config.architecture != "encoder":
        for field in ("transform", "bias", "extends_embeddings"):
            if getattr(head, field):
                raise UserError(no_graph(config, f"head.{field}", True, name))
        if config.architecture == "decoder" and config.has_bidirectional_prompt:
            raise UserError(no_graph(config, "prompt_form", config.prompt_form, name))


# --- parts ----------------------------------------------------------------------------------------------------------


def linear(name: str, module: nn.Module) -> Tensors:
    """Yield the weight and, where there is one, the bias of a layer or a norm."""
    for part in ("weight", "bias"):
        value = getattr(module, part, None)
        if value is not None:
            yield f"{name}.{part}", value


def separate_qkv(name: str, attention: Any, rotate: Callable[[Tensor, int], Tensor] | None = None) -> Tensors:
    """Yield query, key and value as three layers; `rotate` reorders the rows of queries and keys."""
    heads = (attention.num_heads, attention.kv_heads, 0)
    for part, value in (("weight", attention.qkv.weight), ("bias", attention.qkv_bias)):
        if value is None:
            continue
        for letter, rows, num_heads in zip("qkv", value.split(attention.qkv_sizes), heads, strict=True):
            rows = rotate(rows, num_heads) if rotate is not None and num_heads else rows
            yield f"{name}_{letter}.{part}", rows


def pair_neighbours(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head from (all first, all second features of the pairs) to pair after pair."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def gate_and_up(name: str, up: nn.Module, is_gated: bool) -> Tensors:
    """Yield ffn_gate and ffn_up, which are one layer here."""
    weight = up.weight
    assert isinstance(weight, Tensor)
    gate, up_weight = weight.chunk(2) if is_gated else (None, weight)
    if gate is not None:
        yield f"{name}.ffn_gate.weight", gate
    yield f"{name}.ffn_up.weight", up_weight


def output_head(model: Model) -> Tensors:
    """Yield the head where it is not the embedding: untied, or with T5's scale of the hidden states."""
    head: Any = model.head
    if head.weight is not None or head.scale != 1.0:
        yield "output.weight", head.projection_weight(model.embed.tokens.weight) * head.scale


def blocks(stack: Any) -> Iterator[tuple[int, Any]]:
    """Yield the blocks in order of execution; a shared one occurs for each of its layers."""
    assert isinstance(stack, Stack)
    for i, block in enumerate(stack.layers):
        assert isinstance(block, Block)
        yield i, block


def common_metadata(config: ModelConfig, context_length: int) -> dict[str, Any]:
    return {
        "context_length": context_length,
        "embedding_length": config.dim,
        "block_count": config.num_layers,
        "feed_forward_length": config.mlp.dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "vocab_size": config.vocab_size,
    }


def pooling(config: ModelConfig) -> dict[str, Any]:
    """Return how an encoder's states become one vector: as fine-tuned, else by their mean."""
    pool = config.head.pool if isinstance(config.head, EmbeddingHead) else "mean"
    return {"pooling_type": POOLING_TYPES[pool], "attention.causal": False}


# --- llama ----------------------------------------------------------------------------------------------------------


def llama_metadata(config: ModelConfig) -> dict[str, Any]:
    assert isinstance(config.position, Rotary)
    return common_metadata(config, config.position.length) | {
        "attention.layer_norm_rms_epsilon": config.norm.eps,
        "rope.dimension_count": config.head_size,
        "rope.freq_base": float(config.position.theta),
    }


def llama_tensors(model: Any) -> Tensors:
    config = model.config
    yield from linear("token_embd", model.embed.tokens)
    spec = config.position
    if spec.scaling is not None:  # llama.cpp divides the frequencies by these factors
        plain, scaled = (
            rope_frequencies(spec.theta, config.head_size, s, torch.device("cpu")) for s in (None, spec.scaling)
        )
        yield "rope_freqs.weight", plain / scaled
    for i, block in blocks(model.stack):
        yield from linear(f"blk.{i}.attn_norm", block.attention_norm)
        yield from separate_qkv(f"blk.{i}.attn", block.attention, pair_neighbours)
        yield from linear(f"blk.{i}.attn_output", block.attention.out)
        yield from linear(f"blk.{i}.ffn_norm", block.mlp_norm)
        yield from gate_and_up(f"blk.{i}", block.mlp.up, is_gated=True)
        yield from linear(f"blk.{i}.ffn_down", block.mlp.down)
    yield from linear("output_norm", model.stack.final_norm)
    yield from output_head(model)


# --- gpt2 -----------------------------------------------------------------------------------------------------------


def gpt2_metadata(config: ModelConfig) -> dict[str, Any]:
    return common_metadata(config, config.max_length or 0) | {"attention.layer_norm_epsilon": config.norm.eps}


def gpt2_tensors(model: Any) -> Tensors:
    yield from linear("token_embd", model.embed.tokens)
    yield "position_embd.weight", model.embed.position_embeddings.weight[model.embed.offset :]
    for i, block in blocks(model.stack):
        yield from linear(f"blk.{i}.attn_norm", block.attention_norm)
        yield from linear(f"blk.{i}.attn_qkv", block.attention.qkv)
        yield from linear(f"blk.{i}.attn_output", block.attention.out)
        yield from linear(f"blk.{i}.ffn_norm", block.mlp_norm)
        yield from linear(f"blk.{i}.ffn_up", block.mlp.up)
        yield from linear(f"blk.{i}.ffn_down", block.mlp.down)
    yield from linear("output_norm", model.stack.final_norm)
    yield from output_head(model)


# --- bert -----------------------------------------------------------------------------------------------------------


def bert_metadata(config: ModelConfig) -> dict[str, Any]:
    return gpt2_metadata(config) | pooling(config)


def bert_tensors(model: Any) -> Tensors:
    yield from linear("token_embd", model.embed.tokens)
    yield "position_embd.weight", model.embed.position_embeddings.weight[model.embed.offset :]
    if model.embed.segments is not None:
        yield from linear("token_types", model.embed.segments)
    yield from linear("token_embd_norm", model.embed.norm)
    for i, block in blocks(model.stack):
        yield from separate_qkv(f"blk.{i}.attn", block.attention)
        yield from linear(f"blk.{i}.attn_output", block.attention.out)
        yield from linear(f"blk.{i}.attn_output_norm", block.attention_norm)
        yield from linear(f"blk.{i}.ffn_up", block.mlp.up)
        yield from linear(f"blk.{i}.ffn_down", block.mlp.down)
        yield from linear(f"blk.{i}.layer_output_norm", block.mlp_norm)


# --- modern-bert ----------------------------------------------------------------------------------------------------


def modernbert_metadata(config: ModelConfig) -> dict[str, Any]:
    assert isinstance(config.position, Rotary)
    entries = common_metadata(config, config.position.length) | pooling(config)
    entries |= {
        "attention.layer_norm_epsilon": config.norm.eps,
        "rope.dimension_count": config.head_size,
        "rope.freq_base": float(config.position.theta),
    }
    if config.window is not None:
        entries |= {
            "attention.sliding_window": config.window.size,
            "attention.sliding_window_pattern": [i % config.window.global_every != 0 for i in range(config.num_layers)],
            "rope.freq_base_swa": float(config.position.local_theta or config.position.theta),
        }
    return entries


def modernbert_tensors(model: Any) -> Tensors:
    yield from linear("token_embd", model.embed.tokens)
    yield from linear("token_embd_norm", model.embed.norm)
    for i, block in blocks(model.stack):
        yield from linear(f"blk.{i}.attn_norm", block.attention_norm)
        yield from linear(f"blk.{i}.attn_qkv", block.attention.qkv)
        yield from linear(f"blk.{i}.attn_output", block.attention.out)
        yield from linear(f"blk.{i}.ffn_norm", block.mlp_norm)
        yield from linear(f"blk.{i}.ffn_up", block.mlp.up)
        yield from linear(f"blk.{i}.ffn_down", block.mlp.down)
    yield from linear("output_norm", model.stack.final_norm)


# --- t5 -------------------------------------------------------------------------------------------------------------


def t5_metadata(config: ModelConfig) -> dict[str, Any]:
    assert isinstance(config.position, T5Bias)
    return common_metadata(config, T5_CONTEXT) | {
        "decoder_block_count": config.decoder_layers,
        "attention.layer_norm_epsilon": config.norm.eps,
        "attention.layer_norm_rms_epsilon": config.norm.eps,
        "attention.relative_buckets_count": config.position.num_buckets,
    }


def t5_stack(side: str, stack: Any, is_gated: bool) -> Tensors:
    yield f"{side}.blk.0.attn_rel_b.weight", stack.score.table.weight
    for i, block in blocks(stack):
        at = f"{side}.blk.{i}"
        yield from linear(f"{at}.attn_norm", block.attention_norm)
        yield from separate_qkv(f"{at}.attn", block.attention)
        yield from linear(f"{at}.attn_o", block.attention.out)
        if side == "dec":
            yield from linear(f"{at}.cross_attn_norm", block.cross_norm)
            yield from separate_qkv(f"{at}.cross_attn", block.cross)
            yield from linear(f"{at}.cross_attn_o", block.cross.out)
        yield from linear(f"{at}.ffn_norm", block.mlp_norm)
        yield from gate_and_up(at, block.mlp.up, is_gated)
        yield from linear(f"{at}.ffn_down", block.mlp.down)
    yield from linear(f"{side}.output_norm", stack.final_norm)


def t5_tensors(model: Any) -> Tensors:
    yield from linear("token_embd", model.embed.tokens)
    yield from t5_stack("enc", model.encoder, model.config.mlp.gated)
    yield from t5_stack("dec", model.decoder, model.config.mlp.gated)
    yield from output_head(model)


ARCHITECTURES: dict[tuple[str, type], Architecture] = {
    ("decoder", Rotary): Architecture(
        "llama",
        {
            "norm": RMSNormConfig,
            "norm_first": True,
            "embed_norm": False,
            "skip_first_norm": False,
            "mlp.activation": "silu",
            "mlp.gated": True,
            "bias": False,
            "num_segments": 0,
            "window": None,
            "init": SCALED_INITS,
        },
        llama_metadata,
        llama_tensors,
    ),
    ("decoder", LearnedPosition): Architecture(
        "gpt2",
        {
            "norm": LayerNormConfig,
            "norm.bias": True,
            "norm_first": True,
            "embed_norm": False,
            "skip_first_norm": False,
            "mlp.activation": ACTIVATIONS,
            "mlp.gated": False,
            "bias": True,
            "num_segments": 0,
            "window": None,
            "head_dim": None,
            "init": SCALED_INITS,
        },
        gpt2_metadata,
        gpt2_tensors,
    ),
    ("encoder", LearnedPosition): Architecture(
        "bert",
        {
            "norm": LayerNormConfig,
            "norm.bias": True,
            "norm_first": False,
            "embed_norm": True,
            "mlp.activation": ACTIVATIONS,
            "mlp.gated": False,
            "bias": True,
            "window": None,
            "head_dim": None,
            "num_kv_heads": None,
            "init": SCALED_INITS,
        },
        bert_metadata,
        bert_tensors,
    ),
    ("encoder", Rotary): Architecture(
        "modern-bert",
        {
            "norm": LayerNormConfig,
            "norm.bias": False,
            "norm_first": True,
            "embed_norm": True,
            "mlp.activation": ACTIVATIONS,
            "mlp.gated": True,
            "bias": False,
            "num_segments": 0,
            "head_dim": None,
            "num_kv_heads": None,
            "position.scaling": None,
            "init": SCALED_INITS,
        },
        modernbert_metadata,
        modernbert_tensors,
    ),
    ("encoder-decoder", T5Bias): Architecture(
        "t5",
        {
            "norm": RMSNormConfig,
            "norm_first": True,
            "embed_norm": False,
            "skip_first_norm": False,
            "position.max_distance": T5_MAX_DISTANCE,
            "bias": False,
            "num_segments": 0,
            "window": None,
            "num_kv_heads": None,
            "adds_bos": False,
            "head": LMHead,
            "init": FanInInit,
        },
        t5_metadata,
        t5_tensors,
    ),
}


def model_metadata(model: Model, architecture: Architecture) -> dict[str, Any]:
    """Return the architecture's entries, under its name."""
    config, entries = model.config, architecture.metadata(model.config)
    if config.architecture == "encoder-decoder":
        wanted = ACTIVATIONS if config.mlp.gated else ("relu",)
        if config.mlp.activation not in wanted:
            raise UserError(no_graph(config, "mlp.activation", config.mlp.activation, architecture.name))
        assert model.tokenizer is not None
        entries["decoder_start_token_id"] = make_sequence_template(config, model.tokenizer.vocab).decoder_start_id
    return {f"{architecture.name}.{name}": value for name, value in entries.items()}
