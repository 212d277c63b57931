"""Llama 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator

from firth.core.errors import UserError
from firth.models.config import (
    AuxiliaryLM,
    ClassificationHead,
    LMHead,
    MLPConfig,
    ModelConfig,
    NormalInit,
    RMSNormConfig,
    RopeScaling,
    Rotary,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf.layout import (
    HFConfigDict,
    HFLayout,
    TaskArchitecture,
    TensorRule,
    activation_from_hf,
    activation_to_hf,
    linear_rules,
    qkv_rules,
)


def llama_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("model.embed_tokens.weight",))
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"model.layers.{i}"
        at = f"{theirs}.self_attn"
        yield from qkv_rules(
            config, f"{ours}.attention.qkv", f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", bias=config.bias
        )
        yield from linear_rules(f"{ours}.attention.out", f"{at}.o_proj", bias=config.bias)
        yield from linear_rules(f"{ours}.attention_norm", f"{theirs}.input_layernorm", bias=False)
        yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj", bias=config.bias)
        yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", bias=config.bias)
        yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", bias=False)
    yield from linear_rules("stack.final_norm", "model.norm", bias=False)
    beside = config.get_extra("auxiliary")
    if isinstance(config.head, LMHead) and not config.head.tied:
        yield TensorRule("head.weight", ("lm_head.weight",))
    elif isinstance(beside, AuxiliaryLM) and not beside.head.tied:
        yield TensorRule("extras.auxiliary.weight", ("lm_head.weight",))


def read_llama_config(hf_config: HFConfigDict) -> ModelConfig:
    dim, heads = hf_config.get("hidden_size", 4096), hf_config.get("num_attention_heads", 32)
    head_dim, kv_heads = hf_config.get("head_dim") or dim // heads, hf_config.get("num_key_value_heads") or heads
    if hf_config.get("attention_bias", False) != hf_config.get("mlp_bias", False):
        raise UserError("config.json: attention_bias and mlp_bias differ; Firth knows llama with both or with none.")
    return ModelConfig(
        family="llama",
        architecture="decoder",
        vocab_size=hf_config.get("vocab_size", 32000),
        dim=dim,
        num_layers=hf_config.get("num_hidden_layers", 32),
        num_heads=heads,
        mlp=MLPConfig(
            hf_config.get("intermediate_size", 11008),
            activation_from_hf(hf_config.get("hidden_act", "silu")),
            gated=True,
        ),
        position=read_llama_rope(hf_config),
        norm=RMSNormConfig(hf_config.get("rms_norm_eps", 1e-6)),
        head=LMHead(tied=hf_config.get("tie_word_embeddings", False)),
        init=NormalInit(hf_config.get("initializer_range", 0.02)),
        norm_first=True,
        bias=hf_config.get("attention_bias", False),
        head_dim=None if head_dim * heads == dim else head_dim,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        dropout=0.0,
        attention_dropout=hf_config.get("attention_dropout", 0.0),
    )


def read_llama_rope(hf_config: HFConfigDict) -> Rotary:
    """Places as `transformers` 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) describes them."""
    rope = {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"config.json: rotary places of the type {kind!r} are not known here; default and llama3 are.")
    stretch = None
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        stretch = RopeScaling(rope["factor"], low, high, rope["original_max_position_embeddings"])
    base = rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0
    return Rotary(float(base), hf_config.get("max_position_embeddings", 2048), stretch)


def write_llama_config(config: ModelConfig) -> HFConfigDict:
    assert isinstance(config.position, Rotary)
    rope: HFConfigDict = {"rope_type": "default", "rope_theta": config.position.theta}
    if config.position.scaling is not None:
        s = config.position.scaling
        rope |= {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
        }
        rope["original_max_position_embeddings"] = s.original_length
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp.dim,
        "hidden_act": activation_to_hf(config),
        "max_position_embeddings": config.position.length,
        "rope_parameters": rope,
        "rms_norm_eps": config.norm.eps,
        "initializer_range": getattr(config.init, "std", None),
        "tie_word_embeddings": getattr(config.head, "tied", False),
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.attention_dropout,
    }


LLAMA_LAYOUT = HFLayout(
    "llama",
    llama_rules,
    read_llama_config,
    write_llama_config,
    lm_architecture="LlamaForCausalLM",
    task_architectures=(
        TaskArchitecture("LlamaForSequenceClassification", ClassificationHead((), pool="last", dropout=0.0), "score"),
        TaskArchitecture(
            "LlamaForTokenClassification",
            TokenClassificationHead((), dropout=0.1),
            "score",
            settings={"dropout": "classifier_dropout"},
        ),
        TaskArchitecture("LlamaForQuestionAnswering", SpanHead(dropout=0.0), "qa_outputs", prefix="transformer."),
    ),
    prefix="model.",
    fixed_settings={"pretraining_tp": 1},
    unused_patterns=(
        "model.layers.*.self_attn.rotary_emb.inv_freq",
        "lm_head.weight",
    ),  # a head that is tied needs no tensor
)
