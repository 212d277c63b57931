"""Tensors, in both directions: ours by name <-> those of a family of `transformers`, by the rules of its layout.

Writing applies every `TensorRule` of the layout; tensors of extras keep our names. Reading first brings the names to
those of today's `transformers`: old names of norms (gamma, beta), the prefix of the backbone, aliases of tied tensors.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from firth.models.config import GeneratorConfig, ModelConfig, MultiTaskHead, head_key
from firth.models.hf.config_io import FIRTH_MODEL_TYPE, backbone_layout, hf_model_type
from firth.models.hf.layout import HFLayout
from firth.models.hf.registry import FAMILY_LAYOUTS
from firth.models.lora import merge_lora

if TYPE_CHECKING:
    from firth.models.model import Model

AUXILIARY_HEAD_PREFIX = "extras.auxiliary."
GENERATOR_DELTA_KEY = "extras.generator.delta.weight"  # the backbone's token embeddings minus its generator's


def to_hf_tensors(model: Model, subset: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a model, or `subset` of them, under the names of its config.json's family."""
    state = merge_lora(model, unique_state_dict(model)) if subset is None else dict(subset)
    vocab = model.tokenizer.vocab if model.tokenizer is not None else None
    if hf_model_type(model.config, vocab) == FIRTH_MODEL_TYPE:
        return {k: v.contiguous() for k, v in state.items()}
    result: dict[str, Tensor] = {}
    rules = FAMILY_LAYOUTS[model.config.family].rules(model.config)
    for rule in rules if subset is None else [rule for rule in rules if rule.firth_name in state]:
        result |= dict(zip(rule.hf_names, rule.to_hf(state.pop(rule.firth_name)), strict=True))
    assert all(name.startswith("extras.") for name in state), "a family names all of its tensors"
    layout = FAMILY_LAYOUTS[model.config.family]
    if (task_architecture := layout.find_task_architecture(model.config.head)) is not None and task_architecture.prefix:
        backbone = {name for rule in layout.backbone_rules(model.config) for name in rule.hf_names if name in result}
        result = {k: v for k, v in result.items() if k not in backbone} | _replace_prefix(
            {name: result[name] for name in backbone}, layout.prefix, task_architecture.prefix
        )
    return result | {k: v.contiguous() for k, v in state.items()}


def unique_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model by name; a shared tensor occurs once."""
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: value.detach() for name, value in model.state_dict().items() if name in once}


def from_hf_tensors(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return `tensors` under our names; tensors of the model that a file lacks are left out.

    They have our names already where the model that wrote them was one of our own, whatever this one is.
    """
    if isinstance(config.head, MultiTaskHead):
        return _with_several_heads(tensors, config, config.head)
    layout = backbone_layout(config)
    state = tensors if layout is None or _has_firth_names(tensors) else _rename_tensors(tensors, config, layout)
    if config.get_extra("auxiliary") is not None and _has_firth_names(tensors):
        state = {
            AUXILIARY_HEAD_PREFIX + k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")
        } | state
    generator = config.get_extra("generator")
    if GENERATOR_DELTA_KEY in state and not (
        isinstance(generator, GeneratorConfig) and generator.disentangle_embeddings
    ):
        # the embeddings that the backbone used
        state = state | {"embed.tokens.weight": state["embed.tokens.weight"] + state[GENERATOR_DELTA_KEY]}
    if ("extras.generator.narrow.weight" in tensors) == (generator is not None):
        return state
    # a generator's head has another width than the backbone
    return {k: v for k, v in state.items() if not k.startswith("head.")}


def _with_several_heads(tensors: dict[str, Tensor], config: ModelConfig, several: MultiTaskHead) -> dict[str, Tensor]:
    """Return `tensors` under our names for a model with several heads.

    Each head starts with the pooler of a checkpoint that has one, as the head of a single task does. Its output layer
    is new.
    """
    state: dict[str, Tensor] = {}
    for own in several.heads:
        one = from_hf_tensors(tensors, replace(config, head=own.head))
        prefix = f"head.heads.{head_key(own.name)}."
        state |= {
            prefix + name.removeprefix("head."): value
            for name, value in one.items()
            if name.startswith("head.") and not name.startswith(("head.out.", "head.heads."))
        } | {name: value for name, value in one.items() if not name.startswith("head.") or name.startswith(prefix)}
    return state


def _has_firth_names(tensors: dict[str, Tensor]) -> bool:
    return "embed.tokens.weight" in tensors


def _rename_tensors(tensors: dict[str, Tensor], config: ModelConfig, layout: HFLayout) -> dict[str, Tensor]:
    tensors = _normalize_tensor_names(tensors, config, layout)
    result = {k: v for k, v in tensors.items() if k.startswith("extras.")}
    for rule in layout.rules(config):
        if all(name in tensors for name in rule.hf_names):
            result[rule.firth_name] = rule.to_firth([tensors[name] for name in rule.hf_names])
    return result


def _normalize_tensor_names(tensors: dict[str, Tensor], config: ModelConfig, layout: HFLayout) -> dict[str, Tensor]:
    """Return the tensors as today's `transformers` names them."""
    tensors = {k.replace(".gamma", ".weight").replace(".beta", ".bias"): v for k, v in tensors.items()}
    for prefix in {task_architecture.prefix for task_architecture in layout.task_architectures} - {""}:
        tensors = _replace_prefix(tensors, prefix, layout.prefix)
    if layout.prefix and not any(k.startswith(layout.prefix) for k in tensors):
        unprefixed = _known_tensor_names(config, layout).union(
            k for k in tensors if k.startswith("extras.") or _is_unused(k, layout)
        )
        tensors = {k if k in unprefixed else layout.prefix + k: v for k, v in tensors.items()}
    for name, aliases in layout.aliases.items():
        if aliased := [tensors[alias] for alias in aliases if alias in tensors]:
            tensors.setdefault(name, aliased[0])
    return tensors


def _replace_prefix(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in tensors.items()}


def _known_tensor_names(config: ModelConfig, layout: HFLayout) -> set[str]:
    """Return all names that the tensors of a model may have, aliases included."""
    names = {name for rule in layout.rules(config) for name in rule.hf_names}
    return names.union(layout.aliases, *layout.aliases.values())


def _is_unused(name: str, layout: HFLayout) -> bool:
    return any(fnmatch(name, pattern) for pattern in layout.unused_patterns)


def unexpected_tensors(tensors: dict[str, Tensor], model: Model) -> list[str]:
    """Return the names in a file that are neither in the model nor known to be unused."""
    layout = backbone_layout(model.config)
    if layout is None or _has_firth_names(tensors):
        return sorted(tensors.keys() - model.state_dict().keys())
    full = _normalize_tensor_names(tensors, model.config, layout)
    unknown = full.keys() - _known_tensor_names(model.config, layout) - model.state_dict().keys()
    unexpected = {name for name in unknown if not _is_unused(name, layout)}
    for name, aliases in layout.aliases.items():  # tied in the model, different in the file
        unexpected |= {alias for alias in aliases if alias in full and not torch.equal(full[alias], full[name])}
    return sorted(unexpected)
