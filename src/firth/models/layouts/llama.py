"""Llama 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator

from firth.errors import UserError
from firth.models.config import (
    MLP,
    Auxiliary,
    Classes,
    LMHead,
    ModelConfig,
    Normal,
    RMSNorm,
    Rotary,
    Span,
    Stretch,
    Tags,
)
from firth.models.layouts.layout import (
    Answers,
    Layout,
    Rule,
    Settings,
    activation,
    linear,
    qkv,
    their_activation,
)


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("model.embed_tokens.weight",))
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"model.layers.{i}"
        at = f"{theirs}.self_attn"
        yield from qkv(
            config, f"{ours}.attention.qkv", f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", bias=config.bias
        )
        yield from linear(f"{ours}.attention.out", f"{at}.o_proj", bias=config.bias)
        yield from linear(f"{ours}.attention_norm", f"{theirs}.input_layernorm", bias=False)
        yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj", bias=config.bias)
        yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", bias=config.bias)
        yield from linear(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", bias=False)
    yield from linear("stack.final_norm", "model.norm", bias=False)
    beside = config.extra("auxiliary")
    if isinstance(config.head, LMHead) and not config.head.tied:
        yield Rule("head.weight", ("lm_head.weight",))
    elif isinstance(beside, Auxiliary) and not beside.head.tied:
        yield Rule("extras.auxiliary.weight", ("lm_head.weight",))


def read(hf: Settings) -> ModelConfig:
    dim, heads = hf.get("hidden_size", 4096), hf.get("num_attention_heads", 32)
    head_dim, kv_heads = hf.get("head_dim") or dim // heads, hf.get("num_key_value_heads") or heads
    if hf.get("attention_bias", False) != hf.get("mlp_bias", False):
        raise UserError("config.json: attention_bias and mlp_bias differ; Firth knows llama with both or with none.")
    return ModelConfig(
        family="llama",
        shape="decoder",
        vocab_size=hf.get("vocab_size", 32000),
        dim=dim,
        num_layers=hf.get("num_hidden_layers", 32),
        num_heads=heads,
        mlp=MLP(hf.get("intermediate_size", 11008), activation(hf.get("hidden_act", "silu")), gated=True),
        position=read_rotary(hf),
        norm=RMSNorm(hf.get("rms_norm_eps", 1e-6)),
        head=LMHead(tied=hf.get("tie_word_embeddings", False)),
        init=Normal(hf.get("initializer_range", 0.02)),
        norm_first=True,
        bias=hf.get("attention_bias", False),
        head_dim=None if head_dim * heads == dim else head_dim,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        dropout=0.0,
        attention_dropout=hf.get("attention_dropout", 0.0),
    )


def read_rotary(hf: Settings) -> Rotary:
    """Places as `transformers` 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) describes them."""
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"config.json: rotary places of the type {kind!r} are not known here; default and llama3 are.")
    stretch = None
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        stretch = Stretch(rope["factor"], low, high, rope["original_max_position_embeddings"])
    base = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
    return Rotary(float(base), hf.get("max_position_embeddings", 2048), stretch)


def write(c: ModelConfig) -> Settings:
    assert isinstance(c.position, Rotary)
    rope: Settings = {"rope_type": "default", "rope_theta": c.position.base}
    if c.position.stretch is not None:
        s = c.position.stretch
        rope |= {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low, "high_freq_factor": s.high}
        rope["original_max_position_embeddings"] = s.length
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_size,
        "intermediate_size": c.mlp.dim,
        "hidden_act": their_activation(c),
        "max_position_embeddings": c.position.length,
        "rope_parameters": rope,
        "rms_norm_eps": c.norm.eps,
        "initializer_range": getattr(c.init, "std", None),
        "tie_word_embeddings": getattr(c.head, "tied", False),
        "attention_bias": c.bias,
        "mlp_bias": c.bias,
        "attention_dropout": c.attention_dropout,
    }


LLAMA = Layout(
    "llama",
    rules,
    read,
    write,
    lm="LlamaForCausalLM",
    answers=(
        Answers("LlamaForSequenceClassification", Classes((), pool="last", dropout=0.0), "score"),
        Answers(
            "LlamaForTokenClassification", Tags((), dropout=0.1), "score", settings={"dropout": "classifier_dropout"}
        ),
        Answers("LlamaForQuestionAnswering", Span(dropout=0.0), "qa_outputs", prefix="transformer."),
    ),
    prefix="model.",
    fixed={"pretraining_tp": 1},
    unused=("model.layers.*.self_attn.rotary_emb.inv_freq", "lm_head.weight"),  # a head that is tied needs no tensor
)
