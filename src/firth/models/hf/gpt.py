"""GPT, the first one."""

from __future__ import annotations

from collections.abc import Iterator

from firth.core.errors import UserError
from firth.models import presets
from firth.models.config import ClassificationHead, ModelConfig
from firth.models.hf.gpt2 import GPT_SHARED_SETTINGS, gpt2_block_rules, write_embedding_dropout
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule
from firth.models.hf.settings import ACTIVATION_TO_HF, Converter, Setting, SettingsTable, activation_from_hf, set_field


def gpt_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("transformer.tokens_embed.weight",))
    yield TensorRule("embed.position_embeddings.weight", ("transformer.positions_embed.weight",))
    yield from gpt2_block_rules(config)


def gpt_activation_from_hf(name: str) -> str:
    """Return our name of an activation; the first GPT calls the tanh approximation of GELU "gelu"."""
    return "gelu-tanh" if name == "gelu" else str(activation_from_hf(name))


def gpt_activation_to_hf(name: str) -> str:
    if name == "gelu":
        raise UserError("transformers has no GPT with the exact GELU: set model.mlp.activation to gelu-tanh.")
    return "gelu" if name == "gelu-tanh" else ACTIVATION_TO_HF[name]


GPT_SETTINGS = SettingsTable(
    presets.gpt(12, 768, 12),
    (
        *GPT_SHARED_SETTINGS,
        Setting("mlp.activation", "afn", Converter(gpt_activation_from_hf, gpt_activation_to_hf)),
    ),
    lambda hf_config, config: set_field(config, "mlp.dim", 4 * config.dim),
    write_embedding_dropout,
)
GPT_LAYOUT = HFLayout(
    "openai-gpt",
    gpt_rules,
    GPT_SETTINGS,
    lm_architecture="OpenAIGPTLMHeadModel",
    task_architectures=(
        TaskArchitecture("OpenAIGPTForSequenceClassification", ClassificationHead((), pool="last"), "score"),
    ),
    prefix="transformer.",
    fixed_settings={"tie_word_embeddings": True},
    aliases={"transformer.tokens_embed.weight": ("lm_head.weight",)},
    unused_patterns=("transformer.h.*.attn.bias", "transformer.position_ids"),
)
