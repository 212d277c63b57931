"""LoRA adapters in the format of `peft`: the low-rank matrices and the trained head, without the base model."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from firth.core.console import say
from firth.core.errors import UserError
from firth.core.files import write_json
from firth.models.config import LMHead, LoRAConfig
from firth.models.hf.config_io import FIRTH_MODEL_TYPE, hf_model_type, read_config
from firth.models.hf.convert import unique_state_dict
from firth.models.hf.layout import TensorRule
from firth.models.hf.registry import FAMILY_LAYOUTS
from firth.models.hf.tensors import translate_disk_errors
from firth.models.lora import LoRAEmbedding, LoRALinear, merge_lora
from firth.models.model import Model

PEFT_PREFIX = "base_model.model."


def write_adapter(model: Model, spec: LoRAConfig, base: str, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors into an existing folder.

    `base` is the checkpoint that the adapter extends. A trained task head is written too. Where the task has added
    tokens, the embeddings are written too, and a message names the `resize_token_embeddings` call that the base needs.
    """
    rules = {rule.firth_name: rule for rule in adapter_rules(model)}
    modules = {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    tensors: dict[str, Tensor] = {}
    for name, module in modules.items():
        tensors |= lora_tensors(module, rules[f"{name}.weight"])
    head = {} if isinstance(model.config.head, LMHead) else adapter_head_tensors(model, list(rules.values()))
    named = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in tensors}
    size, has_grown = model.config.vocab_size, model.config.vocab_size > read_config(base).vocab_size
    if has_grown or any(isinstance(module, LoRAEmbedding) for module in model.modules()):
        state = merge_lora(model, unique_state_dict(model))
        grown = [
            name for name in ("embed.tokens.weight", "head.weight", "head.bias") if name in state and name in rules
        ]
        for name in grown:
            hf_tensors = zip(rules[name].hf_names, rules[name].to_hf(state[name]), strict=True)
            tensors |= {PEFT_PREFIX + hf_name: value for hf_name, value in hf_tensors}
    if has_grown:
        say(f"adapter/ has new tokens: call resize_token_embeddings({size}) on its base first.")
    file = folder / "adapter_model.safetensors"
    with translate_disk_errors(file):
        save_file({k: v.detach().contiguous() for k, v in (tensors | head).items()}, file)
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": str(Path(base).absolute()),
            "inference_mode": True,
            "r": spec.rank,
            "lora_alpha": spec.alpha,
            "lora_dropout": spec.dropout,
            "bias": "none",
            "fan_in_fan_out": any(rules[f"{name}.weight"].transposed for name in modules),
            "target_modules": "|".join(sorted({layer_name_pattern(name) for name in named})),
            "modules_to_save": sorted({k.removeprefix(PEFT_PREFIX).rpartition(".")[0] for k in head}) or None,
        },
    )


def adapter_rules(model: Model) -> list[TensorRule]:
    """Return the tensor rules of a model; raise a UserError where `peft` cannot adapt it."""
    vocab = model.tokenizer.vocab if model.tokenizer is not None else None
    if hf_model_type(model.config, vocab) == FIRTH_MODEL_TYPE:
        raise UserError(f"transformers has no name for this {model.config.family}, so peft cannot open its adapter.")
    rules = list(FAMILY_LAYOUTS[model.config.family].rules(model.config))
    if any(rule.split_heads for rule in rules):
        raise UserError(f"{model.config.family} has queries and keys that are no layers, and peft adapts layers only.")
    return rules


def lora_tensors(module: LoRALinear, rule: TensorRule) -> dict[str, Tensor]:
    """Return A and B for each layer of `transformers` that one fused layer of ours holds."""
    rows = TensorRule(
        rule.firth_name, rule.hf_names, split_sizes=rule.split_sizes, interleaved_heads=rule.interleaved_heads
    ).to_hf(module.lora_b.detach())
    tensors: dict[str, Tensor] = {}
    for name, a_RI, b_SR in zip(rule.hf_names, module.lora_a.detach(), rows, strict=True):
        layer = PEFT_PREFIX + name.removesuffix(".weight")
        tensors |= {f"{layer}.lora_A.weight": a_RI, f"{layer}.lora_B.weight": b_SR}
    return tensors


def adapter_head_tensors(model: Model, rules: list[TensorRule]) -> dict[str, Tensor]:
    state, head_tensors = unique_state_dict(model), dict[str, Tensor]()
    for rule in rules:
        if rule.firth_name.startswith("head."):
            hf_tensors = zip(rule.hf_names, rule.to_hf(state[rule.firth_name]), strict=True)
            head_tensors |= {PEFT_PREFIX + name: value for name, value in hf_tensors}
    return head_tensors


def layer_name_pattern(name: str) -> str:
    r"""Return a regular expression for a layer's name with any layer number.

    >>> layer_name_pattern("h.11.attn.c_attn")
    'h\\.\\d+\\.attn\\.c_attn'
    """
    return r"\.".join(r"\d+" if part.isdecimal() else re.escape(part) for part in name.split("."))
