"""What LoRA has learned, as `peft` reads it: small, and put on top of the model that it began with."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from firth.console import say
from firth.errors import UserError
from firth.files import write_json
from firth.models.config import LMHead
from firth.models.layouts import FAMILIES, Rule
from firth.models.lora import Adapted, LoRA
from firth.models.model import Model
from firth.models.weights import OWN, family_of, own_state, read_config

PREFIX = "base_model.model."


def write_adapter(model: Model, spec: LoRA, base: str, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, into a folder that is there.

    `base` is the checkpoint that it belongs on. A head that was learned with it goes along, and all that has a row for
    each token where there are more of them than in the base: it needs `resize_token_embeddings` then, which is said.
    """
    rules = {rule.ours: rule for rule in named_rules(model)}
    modules = {name: m for name, m in model.named_modules() if isinstance(m, Adapted)}
    tensors: dict[str, Tensor] = {}
    for name, module in modules.items():
        tensors |= pieces(module, rules[f"{name}.weight"])
    head = {} if isinstance(model.config.head, LMHead) else head_tensors(model, list(rules.values()))
    named = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    if model.config.vocab_size > read_config(base).vocab_size:
        state, size = own_state(model), model.config.vocab_size
        grown = [
            name for name in ("embed.tokens.weight", "head.weight", "head.bias") if name in state and name in rules
        ]
        tensors |= {PREFIX + rules[name].theirs[0]: state[name] for name in grown}
        say(
            f"adapter/ has new tokens: call resize_token_embeddings({size}) on its base first. Their vectors stay as "
            "they began, near the mean of all: LoRA learns layers."
        )
    save_file({k: v.detach().contiguous() for k, v in (tensors | head).items()}, folder / "adapter_model.safetensors")
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
            "fan_in_fan_out": any(rules[f"{name}.weight"].turned for name in modules),
            "target_modules": "|".join(sorted({any_layer(name) for name in named})),
            "modules_to_save": sorted({k.removeprefix(PREFIX).rpartition(".")[0] for k in head}) or None,
        },
    )


def named_rules(model: Model) -> list[Rule]:
    """How `transformers` names the tensors of a model, where `peft` can put LoRA beside them."""
    vocab = model.tokenizer.vocab if model.tokenizer is not None else None
    if family_of(model.config, vocab) == OWN:
        raise UserError(f"transformers has no name for this {model.config.family}, so peft cannot open its adapter.")
    rules = list(FAMILIES[model.config.family].rules(model.config))
    if any(rule.heads for rule in rules):
        raise UserError(f"{model.config.family} has queries and keys that are no layers, and peft adapts layers only.")
    return rules


def pieces(module: Adapted, rule: Rule) -> dict[str, Tensor]:
    """The two matrices for each of the layers that are one of ours."""
    rows = Rule(rule.ours, rule.theirs, sizes=rule.sizes, woven=rule.woven).split(module.lora_b.detach())
    found: dict[str, Tensor] = {}
    for name, a_RI, b_SR in zip(rule.theirs, module.lora_a.detach(), rows, strict=True):
        layer = PREFIX + name.removesuffix(".weight")
        found |= {f"{layer}.lora_A.weight": a_RI, f"{layer}.lora_B.weight": b_SR}
    return found


def head_tensors(model: Model, rules: list[Rule]) -> dict[str, Tensor]:
    state, found = own_state(model), dict[str, Tensor]()
    for rule in rules:
        if rule.ours.startswith("head."):
            named = zip(rule.theirs, rule.split(state[rule.ours]), strict=True)
            found |= {PREFIX + name: value for name, value in named}
    return found


def any_layer(name: str) -> str:
    r"""A pattern for a layer's name with whatever number.

    >>> any_layer("h.11.attn.c_attn")
    'h\\.\\d+\\.attn\\.c_attn'
    """
    return r"\.".join(r"\d+" if part.isdecimal() else re.escape(part) for part in name.split("."))
