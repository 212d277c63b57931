"""LoRA: a matrix stays as it is, and a product of two narrow ones is learned beside it (Hu et al., 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.models.config import ModelConfig
from firth.models.hf import FAMILY_LAYOUTS
from firth.models.kernels.dropout import fast_dropout

if TYPE_CHECKING:
    from firth.models.model import Model

BACKBONE_PREFIXES = ("stack.", "encoder.", "decoder.")
ATTENTION_LINEARS = ("attention.qkv", "attention.out", "cross.qkv", "cross.out")
LORA_TARGETS = {"attention": ATTENTION_LINEARS, "all": (*ATTENTION_LINEARS, "mlp.up", "mlp.down")}


@dataclass(frozen=True)
class LoRAConfig:
    rank: int = 8
    alpha: float = 16.0  # what is learned counts alpha / rank times
    dropout: float = 0.0  # on what the narrow matrices read
    targets: Literal["attention", "all"] = "attention"


class LoRALinear(nn.Linear):
    """A Linear with LoRA beside it.

    A fused matrix has `split_sizes` rows of each of the matrices that it is made of, and LoRA for each of them.
    """

    def __init__(self, linear: nn.Linear, split_sizes: tuple[int, ...], spec: LoRAConfig) -> None:
        nn.Module.__init__(self)
        assert sum(split_sizes) == linear.out_features
        self.in_features, self.out_features, self.split_sizes = linear.in_features, linear.out_features, split_sizes
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.dropout = spec.alpha / spec.rank, spec.dropout
        self.lora_a = nn.Parameter(linear.weight.new_empty(len(split_sizes), spec.rank, linear.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, spec.rank))
        bound = 1 / math.sqrt(linear.in_features)
        nn.init.uniform_(self.lora_a, -bound, bound)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_delta(x)

    def lora_delta(self, x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
        """What LoRA adds to the rows from `start` to `end`."""
        x, y, first = fast_dropout(x, self.dropout if self.training else 0.0), [], 0
        for a_RI, size in zip(self.lora_a, self.split_sizes, strict=True):
            rows = slice(max(start, first), first + size if end is None else min(end, first + size))
            if rows.start < rows.stop:
                y.append(F.linear(F.linear(x, a_RI), self.lora_b[rows]))
            first += size
        return self.scale * (y[0] if len(y) == 1 else torch.cat(y, -1))

    def merged_weight(self) -> Tensor:
        """The one matrix that does what the three do."""
        parts = zip(self.lora_a, self.lora_b.split(self.split_sizes), strict=True)
        return self.weight + self.scale * torch.cat([b_SR @ a_RI for a_RI, b_SR in parts])


def check_lora_support(config: ModelConfig) -> None:
    """Refuse a model that has nothing for LoRA to stand beside."""
    if config.recurrent is not None or not config.num_layers:
        kind = "LSTMs" if config.recurrent is not None else "word vectors"
        raise UserError(
            f"LoRA stands beside the matrices of attention and MLP, and {kind} have none: leave lora_rank out. "
            "freeze=body trains the head alone."
        )


def add_lora(model: Model, spec: LoRAConfig) -> None:
    """Put LoRA beside the matrices of a model's blocks."""
    for name, module in list(model.named_modules()):
        if (
            isinstance(module, nn.Linear)
            and name.startswith(BACKBONE_PREFIXES)
            and name.endswith(LORA_TARGETS[spec.targets])
        ):
            parent, _, leaf = name.rpartition(".")
            sizes = lora_split_sizes(model.config, f"{name}.weight", module.out_features)
            setattr(model.get_submodule(parent), leaf, LoRALinear(module, sizes, spec))


def lora_split_sizes(config: ModelConfig, name: str, rows: int) -> tuple[int, ...]:
    """Of how many rows the matrices are that a family of `transformers` keeps apart, and we as one."""
    layout = FAMILY_LAYOUTS.get(config.family)
    rule = (
        next((rule for rule in layout.rules(config) if rule.firth_name == name), None) if layout is not None else None
    )
    if rule is None:
        return (rows,)
    return rule.split_sizes or (rows // len(rule.hf_names),) * len(rule.hf_names)


def has_lora(model: nn.Module) -> bool:
    return any(isinstance(module, LoRALinear) for module in model.modules())


def is_lora_parameter(name: str) -> bool:
    """Whether a parameter of this name is one of LoRA's."""
    return name.endswith((".lora_a", ".lora_b"))


@torch.no_grad()
def merge_lora(model: Model, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model with what LoRA has learned in the matrices themselves."""
    whole = {f"{name}.weight": m.merged_weight() for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    return {name: value for name, value in (state | whole).items() if not is_lora_parameter(name)}
