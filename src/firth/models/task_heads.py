"""The heads of tasks: from hidden states to classes, numbers, choices, tags, spans and vectors, each with its loss.

Rows are packed: each holds several texts, told apart by `doc`, and each text has its slots among the asked places. A
loss is a sum over answers, so that the losses of the parts of a batch add up to that of the whole.

B rows, T places, K asked places, D model width, C classes, N slots or places in all rows, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.errors import UserError, nearest
from firth.models.activation import ACTIVATIONS
from firth.models.block import make_norm
from firth.models.config import (
    AWDLSTM,
    BAG,
    Answering,
    Auxiliary,
    Choices,
    Classes,
    Embedding,
    Head,
    LMHead,
    ModelConfig,
    Pooled,
    Score,
    Span,
    Tags,
    TaskHead,
)
from firth.models.dropout import Dropout
from firth.models.heads import IGNORED, Vocabulary, pick
from firth.models.layouts import FAMILIES
from firth.models.recurrent.crf import CRF, links

POOLERS: dict[str, Callable[[Tensor], Tensor]] = ACTIVATIONS | {"tanh": torch.tanh}


class Answers(nn.Module):
    """What all heads of tasks can do.

    - `forward` answers at the asked places of packed rows.
    - `loss` is the sum over the answers of a batch.
    - `call` is what a call with the Hugging Face names returns: the answers, and their mean loss.
    """

    def forward(self, x_BTD: Tensor, asked: Tensor | None, doc: Tensor | None) -> Tensor:
        raise NotImplementedError

    def loss(self, answers: Tensor, batch: Any, doc: Tensor | None) -> Tensor:
        raise NotImplementedError

    def settled(self, answers: Tensor, asked: Tensor | None, doc: Tensor | None) -> Tensor:
        """What is to be taken for the answers, where they depend on each other."""
        return answers

    def call(
        self, x_BTD: Tensor, place_B: Tensor, doc: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError


class Layers(Answers):
    """Dropout, BERT's dense layer where there is one, dropout, the last layer."""

    def __init__(self, config: ModelConfig, spec: Answering, num_answers: int, marks: int = 1) -> None:
        super().__init__()
        rate = config.dropout if spec.dropout is None else spec.dropout
        width = marks * config.answer_width * (3 if getattr(spec, "pool", "") == "concat" else 1)
        between = spec.width or config.dim
        self.drop_state = Dropout(rate if spec.drop_state else 0.0)
        bias = config.bias if spec.normed else True
        self.pooler = nn.Linear(width, between, bias=bias) if spec.pooled else None
        self.activation = POOLERS[spec.activation]
        self.norm = make_norm(config, between) if spec.normed else None
        self.drop = Dropout(rate)
        self.out = nn.Linear(between if spec.pooled else width, num_answers, bias=spec.pooled or spec.bias)

    def answer(self, x: Tensor) -> Tensor:
        if self.pooler is not None:
            x = self.activation(self.pooler(self.drop_state(x)))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(self.drop(x))


class ClassAnswers(Layers):
    """(B, K, C): scores over the classes, from the states of one place or of several side by side, or added."""

    weights: Tensor | None

    def __init__(self, config: ModelConfig, spec: Classes) -> None:
        super().__init__(config, spec, len(spec.names), spec.marks)
        self.spec = spec
        weights = None if spec.weights is None else torch.tensor(spec.weights)
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, x_BTD: Tensor, asked: Tensor | None, doc: Tensor | None) -> Tensor:
        x_BKD = summary(x_BTD, asked, doc, self.spec.pool, self.spec.orders)
        if self.spec.marks > 1:
            x_BKD = x_BKD.unflatten(1, (-1, self.spec.marks)).flatten(2)
        return self.answer(x_BKD)

    def loss(self, answers: Tensor, batch: Any, doc: Tensor | None) -> Tensor:
        return self.cross_entropy(answers, batch.target, "sum")

    def cross_entropy(self, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        weights = None if self.weights is None else self.weights.float()  # which a twin in bfloat16 has rounded
        return F.cross_entropy(
            logits.flatten(0, -2).float(), target.flatten(), weights, ignore_index=IGNORED, reduction=reduction
        )

    def call(
        self, x_BTD: Tensor, place_B: Tensor, doc: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.spec.marks > 1 or self.spec.orders > 1:
            raise UserError("This head reads several places of a text: give them in a batch, as Model.logits takes it.")
        logits_BC = self(x_BTD, place_B[:, None], doc)[:, 0]
        return logits_BC, None if labels is None else self.cross_entropy(logits_BC, labels, "mean")


class ScoreAnswers(Layers):
    """(B, K): one number for each text."""

    def __init__(self, config: ModelConfig, spec: Score) -> None:
        super().__init__(config, spec, 1)
        self.spec = spec

    def forward(self, x_BTD: Tensor, asked: Tensor | None, doc: Tensor | None) -> Tensor:
        return self.answer(summary(x_BTD, asked, doc, self.spec.pool, self.spec.orders))[..., 0]

    def loss(self, answers: Tensor, batch: Any, doc: Tensor | None) -> Tensor:
        used = ~batch.target.isnan()
        apart = answers.float() - batch.target.nan_to_num()
        return torch.where(used, apart.square(), 0.0).sum()

    def call(
        self, x_BTD: Tensor, place_B: Tensor, doc: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        score_B1 = self(x_BTD, place_B[:, None], doc)
        return score_B1, None if labels is None else F.mse_loss(score_B1.flatten().float(), labels.flatten().float())


class ChoiceAnswers(Layers):
    """(B, K): one number for each text of a group."""

    def __init__(self, config: ModelConfig, spec: Choices) -> None:
        super().__init__(config, spec, 1)
        self.spec = spec

    def forward(self, x_BTD: Tensor, asked: Tensor | None, doc: Tensor | None) -> Tensor:
        return self.answer(summary(x_BTD, asked, doc, self.spec.pool))[..., 0]

    def loss(self, answers: Tensor, batch: Any, doc: Tensor | None) -> Tensor:
        used_N, score_N = batch.group.flatten() >= 0, answers.flatten().float()
        surprise_N = log_sum_exp(score_N, batch.group.flatten(), used_N) - score_N
        return torch.where(used_N & (batch.target.flatten() == 1), surprise_N, 0.0).sum()

    def call(
        self, x_BTD: Tensor, place_B: Tensor, doc: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The place is (B, choices): the texts of a group come one after the other."""
        if place_B.ndim < 2:
            raise UserError("Choices are between texts: input_ids must be (rows, choices, tokens).")
        logits = self(x_BTD, place_B.flatten()[:, None], doc).view(place_B.shape)
        return logits, None if labels is None else F.cross_entropy(logits.float(), labels)


class TagAnswers(Layers):
    """(B, K, C): scores over the tags at each asked place."""

    def __init__(self, config: ModelConfig, spec: Tags) -> None:
        super().__init__(config, spec, len(spec.names))
        self.crf = CRF(len(spec.names)) if spec.crf else None

    def forward(self, x_BTD: Tensor, asked: Tensor | None, doc: Tensor | None) -> Tensor:
        return self.answer(x_BTD if asked is None else pick(x_BTD, asked))

    def settled(self, answers: Tensor, asked: Tensor | None, doc: Tensor | None) -> Tensor:
        """With a chain: the score of the best one through each tag, so that the highest are the best chain."""
        if self.crf is None:
            return answers
        assert asked is not None
        return self.crf.best(answers.float(), links(asked, doc)[0])

    def loss(self, answers: Tensor, batch: Any, doc: Tensor | None) -> Tensor:
        if self.crf is not None:
            return self.crf.loss(answers.float(), batch.target, *links(batch.asked, doc))
        logits_NC = answers.flatten(0, 1).float()
        return F.cross_entropy(logits_NC, batch.target.flatten(), ignore_index=IGNORED, reduction="sum")

    def call(
        self, x_BTD: Tensor, place_B: Tensor, doc: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits_BTC = self(x_BTD, None, doc)
        if self.crf is not None:
            raise UserError(
                "A chain of tags is told for words: give their places in a batch, as Model.logits takes it."
            )
        if labels is None:
            return logits_BTC, None
        return logits_BTC, F.cross_entropy(logits_BTC.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


class SpanAnswers(Layers):
    """(B, T, 2): whether the answer starts at a place, whether it ends there."""

    def __init__(self, config: ModelConfig, spec: Span) -> None:
        super().__init__(config, spec, 2)

    def forward(self, x_BTD: Tensor, asked: Tensor | None, doc: Tensor | None) -> Tensor:
        return self.answer(x_BTD)

    def loss(self, answers: Tensor, batch: Any, doc: Tensor | None) -> Tensor:
        """The mean of what start and end cost, each a softmax over the places of its text where it may be."""
        target_BT2, (B, T, _) = batch.target, answers.shape
        doc_BT = target_BT2.new_zeros((B, T), dtype=torch.long) if doc is None else doc
        may_BT2 = (target_BT2 >= 0) & (doc_BT[..., None] >= 0)
        text_BT = doc_BT + T * torch.arange(B, device=doc_BT.device)[:, None]
        group_BT2 = 2 * text_BT[..., None] + torch.arange(2, device=doc_BT.device)
        score_N = answers.flatten().float()
        surprise_N = log_sum_exp(score_N, group_BT2.flatten(), may_BT2.flatten()) - score_N
        return torch.where((may_BT2 & (target_BT2 == 1)).flatten(), surprise_N, 0.0).sum() / 2

    def call(
        self, x_BTD: Tensor, place_B: Tensor, doc: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`labels` (B, 2) are where the answers start and end; those outside of the row are not learned."""
        logits_BT2 = self(x_BTD, None, doc)
        if labels is None:
            return logits_BT2, None
        T = x_BTD.shape[1]
        start, end = (
            F.cross_entropy(logits_BT2[..., i].float(), labels[:, i].clamp(0, T), ignore_index=T) for i in (0, 1)
        )
        return logits_BT2, (start + end) / 2


class Vectors(Answers):
    """(B, K, D): a vector of length 1 for each text."""

    def __init__(self, config: ModelConfig, spec: Embedding) -> None:
        super().__init__()
        self.spec = spec
        self.pooler = nn.Linear(config.dim, config.dim) if spec.dense else None

    def forward(self, x_BTD: Tensor, asked: Tensor | None, doc: Tensor | None) -> Tensor:
        x_BKD = summary(x_BTD, asked, doc, self.spec.pool)
        if self.pooler is not None:
            x_BKD = torch.tanh(self.pooler(x_BKD))
        return F.normalize(x_BKD.float(), dim=-1)

    def loss(self, answers: Tensor, batch: Any, doc: Tensor | None) -> Tensor:
        """Each text is to find its other half among those of all pairs, from both sides."""
        first_PD, second_PD, used_P = pairs(answers.flatten(0, 1), batch.group.flatten(), batch.target)
        near_PP = first_PD @ second_PD.T - self.spec.margin * torch.eye(len(used_P), device=answers.device)
        near_PP = self.spec.scale * near_PP
        there, back = (m.masked_fill(~used_P, -1e9).log_softmax(-1).diagonal() for m in (near_PP, near_PP.T))
        return -torch.where(used_P, there + back, 0.0).sum()

    def call(
        self, x_BTD: Tensor, place_B: Tensor, doc: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if labels is not None:
            raise UserError("Vectors have no labels: pairs are learned from a batch that groups them.")
        return self(x_BTD, place_B[:, None], doc)[:, 0], None


class Writer(Vocabulary):
    """The words that a decoder goes on to write beside the answers of its task."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.extra("auxiliary")
        assert isinstance(spec, Auxiliary)
        super().__init__(config, spec.head)
        self.share = spec.weight


# --- texts of packed rows -------------------------------------------------------------------------------------------


def summary(x_BTD: Tensor, asked: Tensor | None, doc: Tensor | None, pool: str, orders: int = 1) -> Tensor:
    """(B, K, D): the states at the asked places, or the mean of the texts there; those of several orders are added."""
    assert asked is not None, "a task says which places it asks at"
    x_BKD = mean_of_texts(x_BTD, asked, doc) if pool == "mean" else pick(x_BTD, asked)
    if pool == "concat":
        x_BKD = torch.cat([x_BKD, largest_of_texts(x_BTD, asked, doc), mean_of_texts(x_BTD, asked, doc)], -1)
    return x_BKD if orders == 1 else x_BKD.unflatten(1, (-1, orders)).sum(2)


def mean_of_texts(x_BTD: Tensor, asked_BK: Tensor, doc_BT: Tensor | None) -> Tensor:
    """(B, K, D): the mean over the document in which each asked place stands."""
    if doc_BT is None:
        return x_BTD.mean(1, keepdim=True).expand(-1, asked_BK.shape[1], -1)
    same_BKT = (doc_BT[:, None, :] == pick(doc_BT, asked_BK)[:, :, None]).to(x_BTD.dtype)
    return (same_BKT @ x_BTD) / same_BKT.sum(-1, keepdim=True)


def largest_of_texts(x_BTD: Tensor, asked_BK: Tensor, doc_BT: Tensor | None) -> Tensor:
    """(B, K, D): the largest of each number over the document in which each asked place stands."""
    if doc_BT is None:
        return x_BTD.amax(1, keepdim=True).expand(-1, asked_BK.shape[1], -1)
    doc_BT = doc_BT.clamp(min=-1) + 1  # padding is a document too
    of_doc = x_BTD.new_full((len(x_BTD), x_BTD.shape[1] + 1, x_BTD.shape[2]), -torch.inf)
    of_doc = of_doc.scatter_reduce(1, doc_BT[..., None].expand_as(x_BTD), x_BTD, "amax")
    return pick(of_doc, doc_BT.gather(1, asked_BK))


def log_sum_exp(score_N: Tensor, group_N: Tensor, used_N: Tensor) -> Tensor:
    """(N,): for each score the log of the summed exponentials of its group; the unused are a group of their own.

    Groups are numbers below N.
    """
    spare = len(score_N)
    group_N = torch.where(used_N, group_N, spare)
    empty = score_N.new_full((spare + 1,), -torch.inf)
    top_N = empty.scatter_reduce(0, group_N, score_N.detach(), "amax")[group_N]
    total = torch.zeros_like(empty).scatter_add(0, group_N, (score_N - top_N).exp())
    return top_N + total[group_N].log()


def pairs(x_ND: Tensor, group_N: Tensor, side: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(P, D) twice, the first and the second of each pair, and (P,) which pairs there are. Pairs are numbers below N/2.

    Where no side is given (0 the first, 1 the second), the first of a pair is the one that comes first in the rows.
    """
    num, place_N = len(x_ND) // 2, torch.arange(len(x_ND), device=x_ND.device)
    group_N = torch.where(group_N >= 0, group_N, num)
    if side is None:
        first = place_N.new_full((num + 1,), len(x_ND)).scatter_reduce(0, group_N, place_N, "amin")
        second_N = place_N != first[group_N]
    else:
        second_N = side.flatten() == 1
    slot_N = torch.where(group_N == num, 2 * num, 2 * group_N + second_N)
    both_PD = x_ND.new_zeros((2 * num + 1, x_ND.shape[1])).index_copy(0, slot_N, x_ND)[:-1].unflatten(0, (num, 2))
    count_P = place_N.new_zeros(num + 1).scatter_add(0, group_N, torch.ones_like(place_N))[:-1]
    return both_PD[:, 0], both_PD[:, 1], count_P == 2


# --- which head ------------------------------------------------------------------------------------------------------

TASK_HEADS: dict[type, Callable[..., Answers]] = {
    Classes: ClassAnswers,
    Score: ScoreAnswers,
    Choices: ChoiceAnswers,
    Tags: TagAnswers,
    Span: SpanAnswers,
    Embedding: Vectors,
}
TASKS: dict[str, type[TaskHead]] = {
    "classify": Classes,
    "pair": Classes,
    "relation": Classes,
    "word-in-context": Classes,
    "regress": Score,
    "choice": Choices,
    "tag": Tags,
    "span-qa": Span,
    "embed": Embedding,
}
WORDS = ("text-to-text", "lm")
MARKED = ("relation", "word-in-context")  # tasks that read the states of two marked places
OF_ENCODERS = ("tag", "embed")  # tasks that T5 does with its encoder alone
BY_THE_MEAN = ("modernbert",)  # whose published settings read an answer from the mean of a text, not from [CLS]


def head_for(config: ModelConfig, task: str, names: tuple[str, ...] = (), **changes: Any) -> Head:
    """The head that a family has for a task, as published; `changes` are fields to set otherwise.

    A task that this architecture cannot do by a head is an error that says what would work.
    """
    if task in WORDS:
        if not isinstance(config.head, LMHead):
            raise UserError(f"This {config.family} has no words left to answer {task} with: take a language model.")
        return config.head
    if task not in TASKS:
        raise UserError(f"There is no head for a task {task!r}. {nearest(task, [*TASKS, *WORDS])}")
    alone = config.recurrent is None and task in OF_ENCODERS  # the encoder can answer by itself
    if config.shape == "encoder-decoder" and not config.framed and not alone:
        other = "write the answers as text, with the task text-to-text"
        how = f"take a transformer for the task {task}" if task in OF_ENCODERS else other
        raise UserError(f"{config.family}, an encoder-decoder, answers in words, not by a head for {task}: {how}.")
    head = own_dropout(_published(config, TASKS[task]), config)
    if isinstance(head, Classes) and task in MARKED:  # no family has such a head: one layer over both states
        head = Classes((), marks=2, bias=True, pool=head.pool, dropout=head.dropout)
    elif isinstance(head, Pooled) and config.family in BY_THE_MEAN:
        head = replace(head, pool="mean")
    if isinstance(head, Classes | Tags):
        head = replace(head, names=names)
    return replace(head, **changes)


def _published(config: ModelConfig, kind: type[TaskHead]) -> TaskHead:
    """The head of this kind that the family has, without names; that for classes says how a text becomes one state."""
    pool: Literal["first", "last"] = "first" if config.shape == "encoder" else "last"
    if kind is Embedding:
        dense = config.family == "labse"
        return Embedding("last" if config.shape == "decoder" else "first" if dense else "mean", dense)
    layout = FAMILIES.get(config.family)
    found = {type(answers.head): answers.head for answers in layout.answers} if layout is not None else {}
    if kind in found:
        return found[kind]
    if kind is Tags or kind is Span:
        return Tags(()) if kind is Tags else Span()
    usual = Classes((), pooled=pool == "first", pool=pool)
    if config.family == BAG:
        usual = Classes((), bias=True, pool="mean")
    elif isinstance(config.recurrent, AWDLSTM):  # with a norm over the layer in place of one over the batch
        usual = Classes((), pooled=True, pool="concat", activation="relu", normed=True, width=50, dropout=0.1)
    elif config.recurrent is not None:
        usual = Classes((), bias=True, pool="concat")
    template = found.get(Classes, usual)
    assert isinstance(template, Classes)
    return template if kind is Classes else like(kind, template)


def like(kind: type[Any], head: Pooled) -> Any:
    """Another kind of head that goes the same way from states to answers."""
    return kind(**{f.name: getattr(head, f.name) for f in fields(Pooled)})


def own_dropout(head: TaskHead, config: ModelConfig) -> TaskHead:
    """A rate that is the model's own is not said twice."""
    same = isinstance(head, Answering) and head.dropout == config.dropout
    return replace(head, dropout=None) if same else head  # type: ignore[arg-type]


def with_classes(config: ModelConfig, names: tuple[str, ...]) -> ModelConfig:
    """The same model with a head over these classes."""
    return replace(config, head=head_for(config, "classify", names), extras=())
