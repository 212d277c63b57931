"""LoRA: low-rank updates of frozen weight matrices (Hu et al. 2021).

A weight W (out, in) stays frozen. Beside it two narrow matrices are trained, A (rank, in) and B (out, rank):

    y = x W^T + (alpha / rank) * (x A^T) B^T        (section 4.1)

A starts random and B at zero, so training starts from the pretrained model. A layer of 768 x 768 has 590k weights and,
at rank 8, 12k trained ones: gradients and optimizer state shrink accordingly. After training W + (alpha / rank) B A is
one matrix again (`merged_weight`), so inference costs nothing extra. Checkpoints are written merged; `hf/adapter.py`
also writes A and B alone, as `peft` reads them.

LoRA learns layers, and no embeddings. A task may add tokens, such as the roles of a chat template, whose rows begin
near the mean of all others: `LoRAEmbedding` trains these rows and leaves the rest frozen, as `trainable_token_indices`
of `peft` does.

We fuse query, key and value into one matrix; `peft` adapts each of them. So `LoRALinear` has one A per fused part.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.models.config import LoRAConfig, ModelConfig
from firth.models.hf.registry import FAMILY_LAYOUTS
from firth.models.kernels.dropout import fast_dropout

BACKBONE_PREFIXES = ("stack.", "encoder.", "decoder.")
BOTTLENECK_LINEARS = ("attention.query", "attention.key", "attention.value")
ATTENTION_LINEARS = ("attention.qkv", "attention.out", "cross.qkv", "cross.out", *BOTTLENECK_LINEARS)
LORA_TARGETS = {"attention": ATTENTION_LINEARS, "all": (*ATTENTION_LINEARS, ".up", ".down")}  # of every MLP


class LoRALinear(nn.Linear):
    """A frozen linear layer plus a trained low-rank update.

    `split_sizes` are the output rows of the matrices that are fused into this one. I inputs, R rank, S rows of a part.
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
        """Return the update of the output features `start` to `end`."""
        x, y, first = fast_dropout(x, self.dropout if self.training else 0.0), [], 0
        for a_RI, size in zip(self.lora_a, self.split_sizes, strict=True):
            rows = slice(max(start, first), first + size if end is None else min(end, first + size))
            if rows.start < rows.stop:
                y.append(F.linear(F.linear(x, a_RI), self.lora_b[rows]))
            first += size
        return self.scale * (y[0] if len(y) == 1 else torch.cat(y, -1))

    def merged_weight(self) -> Tensor:
        """Return W + (alpha / rank) B A."""
        parts = zip(self.lora_a, self.lora_b.split(self.split_sizes), strict=True)
        return self.weight + self.scale * torch.cat([b_SR @ a_RI for a_RI, b_SR in parts])


class LoRAEmbedding(nn.Embedding):
    """A frozen embedding with trained rows for the tokens from `start` on. V tokens, N new ones, D width.

    `weight` has both, so that an output projection that is tied to it learns the new rows too.
    """

    def __init__(self, embedding: nn.Embedding, start: int, stop: int) -> None:
        nn.Module.__init__(self)
        assert 0 <= start < stop <= embedding.num_embeddings
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.start, self.stop = start, stop
        self.frozen_weight = nn.Parameter(embedding.weight.detach(), requires_grad=False)
        self.lora_rows = nn.Parameter(embedding.weight.detach()[start:stop].clone())
        self.train(embedding.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return (V, D) all rows."""
        return torch.cat([self.frozen_weight[: self.start], self.lora_rows, self.frozen_weight[self.stop :]])

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look the tokens up in both parts, without a copy of all rows."""
        is_new = (input_ids >= self.start) & (input_ids < self.stop)
        new_rows = F.embedding((input_ids - self.start).clamp(0, len(self.lora_rows) - 1), self.lora_rows)
        return torch.where(is_new[..., None], new_rows, F.embedding(input_ids, self.frozen_weight))


def check_lora_support(config: ModelConfig) -> None:
    """Raise a UserError for a model without attention and MLP matrices."""
    if config.recurrent is not None or not config.num_layers:
        kind = "LSTMs" if config.recurrent is not None else "word vectors"
        raise UserError(
            f"LoRA adapts the matrices of attention and MLP, and {kind} have none. Leave lora_rank out; "
            "freeze=backbone trains the head alone."
        )


def add_lora(model: nn.Module, config: ModelConfig, spec: LoRAConfig) -> None:
    """Replace the targeted linear layers in the blocks of a model by LoRALinear."""
    for name, module in list(model.named_modules()):
        if (
            isinstance(module, nn.Linear)
            and name.startswith(BACKBONE_PREFIXES)
            and name.endswith(LORA_TARGETS[spec.targets])
        ):
            parent, _, leaf = name.rpartition(".")
            sizes = lora_split_sizes(config, f"{name}.weight", module.out_features)
            setattr(model.get_submodule(parent), leaf, LoRALinear(module, sizes, spec))


def train_new_tokens(model: Any, start: int, stop: int) -> None:
    """Let LoRA train the embeddings of the tokens from `start` to `stop`, which the task has added."""
    if start < stop:
        model.embed.tokens = LoRAEmbedding(model.embed.tokens, start, stop)


def lora_split_sizes(config: ModelConfig, name: str, rows: int) -> tuple[int, ...]:
    """Return the rows of each matrix that `transformers` keeps separate and we fuse into the tensor `name`."""
    layout = FAMILY_LAYOUTS.get(config.family)
    rule = (
        next((rule for rule in layout.rules(config) if rule.firth_name == name), None) if layout is not None else None
    )
    if rule is None:
        return (rows,)
    return rule.split_sizes or (rows // len(rule.hf_names),) * len(rule.hf_names)


def has_lora(model: nn.Module) -> bool:
    return any(isinstance(module, LoRALinear | LoRAEmbedding) for module in model.modules())


def is_lora_parameter(name: str) -> bool:
    """Whether a parameter of this name belongs to LoRA."""
    return name.endswith((".lora_a", ".lora_b", ".lora_rows"))


@torch.no_grad()
def merge_lora(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model with LoRA merged into the weights."""
    merged = {f"{name}.weight": m.merged_weight() for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    for name, module in model.named_modules():
        if isinstance(module, LoRAEmbedding):
            merged[f"{name}.weight"] = module.weight
            state = {key: value for key, value in state.items() if key != f"{name}.frozen_weight"}
    return {name: value for name, value in (state | merged).items() if not is_lora_parameter(name)}
