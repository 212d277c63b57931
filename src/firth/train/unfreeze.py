"""Which parts of a model learn, from when on, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from firth.models import Stack
from firth.models.heads import LMHeadModule
from firth.models.lora import has_lora, is_lora_parameter

HEAD_PREFIXES = ("head.", "extras.")
TOKEN_EMBEDDING_NAME = "embed.tokens.weight"


@dataclass(frozen=True)
class FreezeSchedule:
    """What is slower than the head, or comes later, or not at all. As it stands, all learn alike."""

    layer_decay: float = 1.0  # each layer learns so many times as fast as the one above it
    freeze: Literal["none", "embeddings", "backbone"] = "none"
    unfreeze_every: int = 0  # steps until one more layer learns, from the head down; 0: all from the start


def parameter_depths(model: nn.Module) -> dict[str, int]:
    """How far up each parameter is: 0 for embeddings and what all blocks share, then each block, then the head.

    The blocks of a decoder come after those of the encoder that it reads. Vectors of tokens that are the matrix of the
    head too are as far up as that: what a language model says changes first.
    """
    head = getattr(model, "head", None)
    tied = TOKEN_EMBEDDING_NAME if isinstance(head, LMHeadModule) and head.weight is None else ""
    below, last, top = {}, {}, 0  # of each stack: how many blocks are below it, and its last one
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
    """The parameters that learn at a step, with their depths."""
    free = ever_trainable(model, freeze_schedule)
    found = {name: depth for name, depth in parameter_depths(model).items() if name in free}
    if not freeze_schedule.unfreeze_every:
        return found
    layers = sorted(set(found.values()), reverse=True)[: 1 + step // freeze_schedule.unfreeze_every]
    return {name: depth for name, depth in found.items() if depth in layers}


def ever_trainable(model: nn.Module, freeze_schedule: FreezeSchedule) -> set[str]:
    """The parameters that learn at some time.

    Beside LoRA that is the head of a task; a head that answers in words belongs to the body then.
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
