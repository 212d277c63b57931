"""A layout: how one family of `transformers` names its tensors, settings and architectures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from firth.models.config import (
    ClassificationHead,
    EmbeddingHead,
    LayerNormConfig,
    ModelConfig,
    RegressionHead,
    TaskHead,
    TaskHeadBase,
)
from firth.models.hf.settings import HFConfigDict, SettingsTable

if TYPE_CHECKING:
    from torch import Tensor

Tensors: TypeAlias = "dict[str, Tensor]"
HEAD_KEY = "firth_head"  # in config.json: a task head that no architecture of the family has
EXTRAS_KEY = "firth_extras"  # in config.json: extras that the family does not have


class TensorRule(NamedTuple):
    """One tensor of ours: the tensors `hf_names`, concatenated along the first axis, in both directions.

    - `transposed`: they store (in, out), as GPT-2's Conv1D does.
    - `split_sizes`: rows of each of their tensors; without it all have the same number.
    - `as_row`: they store a vector as a matrix of one row.
    - `split_heads`: they store the second axis as (heads, head size), as XLNet does.
    - `interleaved_heads`: they store query, key and value of each head side by side, as DeBERTa does.
    - `offset`: their values are ours minus this: Gemma's norms multiply by 1 + weight.
    - `is_copied`: each of `hf_names` is a copy of the whole tensor, as T5Gemma's two embeddings.
    """

    firth_name: str
    hf_names: tuple[str, ...]
    transposed: bool = False
    split_sizes: tuple[int, ...] = ()
    as_row: bool = False
    split_heads: int = 0
    interleaved_heads: int = 0
    offset: float = 0.0
    is_copied: bool = False

    def to_firth(self, hf_tensors: list[Tensor]) -> Tensor:
        """Return our tensor from theirs."""
        if self.offset:
            hf_tensors = [piece + self.offset for piece in hf_tensors]
        if self.is_copied:
            return hf_tensors[0]
        if self.split_heads:
            hf_tensors = [piece.flatten(1) for piece in hf_tensors]
        if self.interleaved_heads:
            hf_tensors = [
                piece.unflatten(0, (self.interleaved_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                for piece in hf_tensors
            ]
        pieces = [piece.flatten() if self.as_row else piece.t() if self.transposed else piece for piece in hf_tensors]
        if len(pieces) == 1:
            return pieces[0]
        import torch

        return torch.cat(pieces)

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        """Return their tensors from ours."""
        if self.is_copied:
            return [tensor.clone() for _ in self.hf_names]
        if self.offset:
            tensor = tensor - self.offset
        pieces = list(tensor.split(self.split_sizes) if self.split_sizes else tensor.chunk(len(self.hf_names)))
        pieces = [p[None] if self.as_row else p.t() if self.transposed else p for p in pieces]
        if self.interleaved_heads:
            pieces = [p.unflatten(0, (3, self.interleaved_heads, -1)).transpose(0, 1).flatten(0, 2) for p in pieces]
        if self.split_heads:
            pieces = [p.unflatten(1, (self.split_heads, -1)) for p in pieces]
        return [p.contiguous() for p in pieces]


def linear_rules(firth_name: str, *hf_names: str, bias: bool = True, transposed: bool = False) -> Iterator[TensorRule]:
    """Rules of a weight and its bias; norms have the same two names."""
    yield TensorRule(f"{firth_name}.weight", tuple(f"{t}.weight" for t in hf_names), transposed)
    if bias:
        yield TensorRule(f"{firth_name}.bias", tuple(f"{t}.bias" for t in hf_names))


def qkv_rules(config: ModelConfig, firth_name: str, *hf_names: str, bias: bool = True) -> Iterator[TensorRule]:
    """Rules of query, key and value, which are one fused matrix here and three there."""
    width = config.kv_heads * config.head_size
    for rule in linear_rules(firth_name, *hf_names, bias=bias):
        yield rule._replace(split_sizes=(config.num_heads * config.head_size, width, width))


class TaskArchitecture(NamedTuple):
    """One architecture with a task head: its name, the head (without label names) and the names of its layers.

    `settings` maps fields of the head to their keys in config.json.
    """

    architecture: str
    head: TaskHead
    out: str
    pooler: str = ""
    norm: str = ""
    settings: dict[str, str] = {}  # noqa: RUF012, never changed
    prefix: str = ""  # of the backbone's tensors, where it differs from the layout's

    def rules(self, config: ModelConfig) -> Iterator[TensorRule]:
        head = config.head
        assert isinstance(head, TaskHeadBase)
        if head.has_pooler and self.pooler:
            yield from linear_rules("head.pooler", self.pooler, bias=config.bias or not head.has_norm)
        if head.has_norm and self.norm:
            yield from linear_rules(
                "head.norm", self.norm, bias=isinstance(config.norm, LayerNormConfig) and config.norm.bias
            )
        yield from linear_rules("head.out", self.out, bias=head.has_pooler or head.bias)


@dataclass(frozen=True)
class HFLayout:
    """The names of one family of `transformers`."""

    model_type: str
    backbone_rules: Callable[[ModelConfig], Iterator[TensorRule]]  # of the backbone and the LM head
    settings: SettingsTable
    lm_architecture: str  # the architecture with a language model's head
    encoder_architecture: str | None = None  # the encoder alone, of an encoder-decoder
    task_architectures: tuple[TaskArchitecture, ...] = ()  # architectures with a task head
    pooler: str = "head.pooler"  # the backbone's own pooler, where it has one
    pair_architecture: str | None = None  # with a sentence-pair head beside the LM head
    discriminator_architecture: str | None = None  # ELECTRA's discriminator
    prefix: str = ""  # of the backbone's tensors; missing in checkpoints without a head
    fixed_settings: HFConfigDict = field(default_factory=dict)  # settings that Firth supports with one value
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # other names of a (tied) tensor in files
    unused_patterns: tuple[str, ...] = ()  # tensors of a file that the model does not need
    positions_follow_pad: bool = False  # positions count from the padding id + 1
    # corrects the config by the file's tensors, where config.json is not enough
    refine_config: Callable[[ModelConfig, Callable[..., Tensors]], ModelConfig] | None = None

    @property
    def base_architecture(self) -> str:
        """Name of the architecture without a head."""
        return self.encoder_architecture or re.sub(
            r"(ForMaskedLM|ForCausalLM|ForConditionalGeneration|(With)?LMHeadModel)$", "Model", self.lm_architecture
        )

    def find_task_architecture(self, head: object) -> TaskArchitecture | None:
        """Return the architecture with a head of this type; regression is written as classification."""
        kind = ClassificationHead if isinstance(head, RegressionHead) else type(head)
        return next((answers for answers in self.task_architectures if type(answers.head) is kind), None)

    def rules(self, config: ModelConfig) -> Iterator[TensorRule]:
        """Yield all rules, those of the task head included."""
        yield from self.backbone_rules(config)
        if isinstance(config.head, EmbeddingHead):
            if config.head.has_pooler:
                yield from linear_rules("head.pooler", self.pooler)
        elif (task_architecture := self.find_task_architecture(config.head)) is not None:
            yield from task_architecture.rules(config)


def has_architecture(hf_config: HFConfigDict, suffix: str) -> bool:
    """Whether an architecture of the file ends in `suffix`, such as ForSequenceClassification."""
    return any(name.endswith(suffix) for name in hf_config.get("architectures") or [])


def label_names(hf_config: HFConfigDict) -> tuple[str, ...]:
    names = hf_config.get("id2label") or {str(i): f"LABEL_{i}" for i in range(2)}
    return tuple(names[k] for k in sorted(names, key=int))
