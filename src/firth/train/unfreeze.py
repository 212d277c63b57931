"""Freezing, gradual unfreezing and layer-wise learning-rate decay for fine-tuning (Howard & Ruder 2018, section 3).

Lower layers hold general features and need smaller changes than upper ones. Every parameter has a depth: embeddings 0,
then the blocks, then the head. Layer-wise decay scales the learning rate by `layer_decay` per layer below the head.
Gradual unfreezing trains the head first and adds one layer every `unfreeze_every` steps.
"""

from __future__ import annotations

from torch import nn

from firth.models import Stack
from firth.models.heads import LMHeadModule
from firth.models.lora import has_lora, is_lora_parameter
from firth.train.recipe import FreezeSchedule

HEAD_PREFIXES = ("head.", "extras.")
TOKEN_EMBEDDING_NAME = "embed.tokens.weight"


def parameter_depths(model: nn.Module) -> dict[str, int]:
    """Return the depth of each parameter: 0 for embeddings and shared parameters, then each block, then the head.

    Decoder blocks come after encoder blocks. Token embeddings tied to the LM head have the depth of the head.
    """
    head = getattr(model, "head", None)
    tied = TOKEN_EMBEDDING_NAME if isinstance(head, LMHeadModule) and head.weight is None else ""
    below, last, top = {}, {}, 0  # per stack: number of blocks below it, depth of its last block
    for name, part in model.named_children():
        if isinstance(part, Stack):
            below[name], last[name] = top, top + len(part.blocks)
            top = last[name]

    def depth(name: str) -> int:
        first, second, *rest = [*name.split("."), ""]
        if f"{first}." in HEAD_PREFIXES or name == tied:
            return top + 1
        if first in below and second == "blocks":
            return below[first] + int(rest[0]) + 1
        if first in below and second == "final_norm":
            return last[first]
        return 0

    return {name: depth(name) for name, _ in model.named_parameters()}


def trainable_parameters(model: nn.Module, freeze_schedule: FreezeSchedule, step: int) -> dict[str, int]:
    """Return the parameters that are trained at a step, with their depths."""
    names = ever_trainable(model, freeze_schedule)
    depths = {name: depth for name, depth in parameter_depths(model).items() if name in names}
    if not freeze_schedule.unfreeze_every:
        return depths
    layers = sorted(set(depths.values()), reverse=True)[: 1 + step // freeze_schedule.unfreeze_every]
    return {name: depth for name, depth in depths.items() if depth in layers}


def ever_trainable(model: nn.Module, freeze_schedule: FreezeSchedule) -> set[str]:
    """Return the parameters that are trained at any step.

    With LoRA these are the adapters and a task head; an LM head stays frozen.
    """
    depth_of = parameter_depths(model)
    head = {name for name in depth_of if name.startswith(HEAD_PREFIXES)}
    if has_lora(model):
        return {name for name in depth_of if is_lora_parameter(name)} | (
            set() if isinstance(model.head, LMHeadModule) else head
        )
    if freeze_schedule.freeze == "backbone":
        return head
    return {
        name
        for name, depth in depth_of.items()
        if freeze_schedule.freeze == "none" or (depth > 0 and name != TOKEN_EMBEDDING_NAME)
    }
