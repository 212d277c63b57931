"""What a layout is: how one family of `transformers` names its tensors and its settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from firth.errors import UserError, nearest
from firth.models.config import Answering, Classes, Embedding, LayerNorm, ModelConfig, Score, TaskHead

Settings = dict[str, Any]  # the contents of a config.json
Tensors = dict[str, Tensor]
OWN_HEAD = "firth_head"  # in config.json: a head that the name of the architecture does not tell
OWN_EXTRAS = "firth_extras"  # in config.json: what a model has beside what its family knows


class Rule(NamedTuple):
    """`ours` is the tensors `theirs`, joined along the first axis; `turned` where they keep (in, out).

    Without `sizes` they are equally long. `row` is for a vector that they keep as a matrix of one row, `heads` for a
    matrix whose second axis they keep as two (XLNet), `woven` for one in which each of so many heads has its query, key
    and value side by side (DeBERTa).
    """

    ours: str
    theirs: tuple[str, ...]
    turned: bool = False
    sizes: tuple[int, ...] = ()
    row: bool = False
    heads: int = 0
    woven: int = 0

    def join(self, pieces: list[Tensor]) -> Tensor:
        """Their tensors as ours."""
        if self.heads:
            pieces = [piece.flatten(1) for piece in pieces]
        if self.woven:
            pieces = [piece.unflatten(0, (self.woven, 3, -1)).transpose(0, 1).flatten(0, 2) for piece in pieces]
        ours = [piece.flatten() if self.row else piece.t() if self.turned else piece for piece in pieces]
        return ours[0] if len(ours) == 1 else torch.cat(ours)

    def split(self, ours: Tensor) -> list[Tensor]:
        """Ours as their tensors."""
        pieces = list(ours.split(self.sizes) if self.sizes else ours.chunk(len(self.theirs)))
        pieces = [p[None] if self.row else p.t() if self.turned else p for p in pieces]
        if self.woven:
            pieces = [p.unflatten(0, (3, self.woven, -1)).transpose(0, 1).flatten(0, 2) for p in pieces]
        if self.heads:
            pieces = [p.unflatten(1, (self.heads, -1)) for p in pieces]
        return [p.contiguous() for p in pieces]


def linear(ours: str, *theirs: str, bias: bool = True, turned: bool = False) -> Iterator[Rule]:
    """A weight, and its bias where there is one; norms have the same two names."""
    yield Rule(f"{ours}.weight", tuple(f"{t}.weight" for t in theirs), turned)
    if bias:
        yield Rule(f"{ours}.bias", tuple(f"{t}.bias" for t in theirs))


def qkv(config: ModelConfig, ours: str, *theirs: str, bias: bool = True) -> Iterator[Rule]:
    """Query, key and value, which are one product here and three there."""
    width = config.kv_heads * config.head_size
    for rule in linear(ours, *theirs, bias=bias):
        yield rule._replace(sizes=(config.num_heads * config.head_size, width, width))


class Answers(NamedTuple):
    """One architecture with a head for a task: its name, what the head is like (names aside), where its layers are.

    `settings` are the fields of the head that config.json has too, with their names there.
    """

    architecture: str
    head: TaskHead
    out: str
    pooler: str = ""
    norm: str = ""
    settings: dict[str, str] = {}  # noqa: RUF012, never changed
    prefix: str = ""  # of the body's tensors, where it is not the layout's

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        head = config.head
        assert isinstance(head, Answering)
        if head.pooled and self.pooler:
            yield from linear("head.pooler", self.pooler, bias=config.bias or not head.normed)
        if head.normed and self.norm:
            yield from linear("head.norm", self.norm, bias=isinstance(config.norm, LayerNorm) and config.norm.bias)
        yield from linear("head.out", self.out, bias=head.pooled or head.bias)


@dataclass(frozen=True)
class Layout:
    """How one family of `transformers` names things."""

    model_type: str
    body_rules: Callable[[ModelConfig], Iterator[Rule]]  # of the body, and of a head that answers in words
    read: Callable[[Settings], ModelConfig]
    write: Callable[[ModelConfig], Settings]
    lm: str  # the architecture with a language model's head
    reader: str | None = None  # that of an encoder alone, where there is one beside a decoder
    answers: tuple[Answers, ...] = ()  # those with a head for a task
    pooler: str = "head.pooler"  # the dense layer with tanh over the first state, where the body has one of its own
    pair: str | None = None  # the architecture that has a pair head too
    verdict: str | None = None  # the one that says which tokens were replaced
    prefix: str = ""  # of the body's tensors; missing in checkpoints of the bare body
    fixed: Settings = field(default_factory=dict)  # settings that `transformers` can change and we not
    twins: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # tensors that a file may hold under other names too
    unused: tuple[str, ...] = ()  # patterns of what a file may hold and this model not need
    after_pad: bool = False  # places are counted from the id after that of the padding token
    settle: Callable[[ModelConfig, Callable[..., Tensors]], ModelConfig] | None = None  # what only the tensors tell

    @property
    def body(self) -> str:
        """The architecture without a head."""
        return self.reader or re.sub(
            r"(ForMaskedLM|ForCausalLM|ForConditionalGeneration|(With)?LMHeadModel)$", "Model", self.lm
        )

    def answers_of(self, head: object) -> Answers | None:
        """The architecture with a head of this kind; a score is written as classes are."""
        kind = Classes if isinstance(head, Score) else type(head)
        return next((answers for answers in self.answers if type(answers.head) is kind), None)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        """All rules, those of a task's head too."""
        yield from self.body_rules(config)
        if isinstance(config.head, Embedding):
            if config.head.dense:
                yield from linear("head.pooler", self.pooler)
        elif (found := self.answers_of(config.head)) is not None:
            yield from found.rules(config)


# --- settings that are read alike -----------------------------------------------------------------------------------

ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
}
THEIR_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu-tanh": "gelu_new", "silu": "silu"}


def activation(name: str) -> Any:
    """Our name of an activation; `Any`, because each `MLP` takes only some words."""
    if name not in ACTIVATIONS:
        raise UserError(f"config.json: the activation {name!r} is not known here. {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def their_activation(config: ModelConfig) -> str:
    return THEIR_ACTIVATIONS[config.mlp.activation]


def is_a(hf: Settings, kind: str) -> bool:
    """Whether one of the architectures ends in this, such as ForSequenceClassification."""
    return any(name.endswith(kind) for name in hf.get("architectures") or [])


def class_names(hf: Settings) -> tuple[str, ...]:
    names = hf.get("id2label") or {str(i): f"LABEL_{i}" for i in range(2)}
    return tuple(names[k] for k in sorted(names, key=int))
