"""Task heads: hidden states -> classes, numbers, choices, tags, spans and vectors, each with its loss.

Rows are packed: a row holds several texts, separated by `document_ids`, and each text has slots among the target
positions. A loss is a sum over targets, so the losses of micro-batches add up to that of the batch.

B rows, T positions, K target positions, N all target positions, D model width, C classes or tags, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.core.errors import UserError, did_you_mean
from firth.models.block import make_norm
from firth.models.config import (
    BAG_OF_WORDS_FAMILY,
    AuxiliaryLM,
    AWDLSTMConfig,
    ClassificationHead,
    EmbeddingHead,
    Head,
    LMHead,
    ModelConfig,
    MultipleChoiceHead,
    PooledHeadBase,
    RegressionHead,
    SpanHead,
    TaskHead,
    TaskHeadBase,
    TokenClassificationHead,
)
from firth.models.heads import LABEL_IGNORE_INDEX, LMHeadModule, gather_positions
from firth.models.hf.registry import FAMILY_LAYOUTS
from firth.models.kernels.activation import ACTIVATIONS
from firth.models.kernels.dropout import Dropout
from firth.models.recurrent.crf import CRF, tag_chain_masks

POOLER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = ACTIVATIONS | {"tanh": torch.tanh}


class TaskHeadModule(nn.Module):
    """What all heads of tasks can do.

    - `forward` answers at the asked places of packed rows.
    - `loss` is the sum over the answers of a batch.
    - `logits_and_loss` is what a call with the Hugging Face names returns: the answers, and their mean loss.
    """

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        raise NotImplementedError

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        raise NotImplementedError

    def resolve_dependent_logits(
        self, outputs: Tensor, target_positions: Tensor | None, document_ids: Tensor | None
    ) -> Tensor:
        """What is to be taken for the answers, where they depend on each other."""
        return outputs

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError


class DenseHeadModule(TaskHeadModule):
    """Dropout, pooler (optional), dropout, output layer."""

    def __init__(self, config: ModelConfig, spec: TaskHeadBase, num_outputs: int, num_marked: int = 1) -> None:
        super().__init__()
        rate = config.dropout if spec.dropout is None else spec.dropout
        width = num_marked * config.head_input_dim * (3 if getattr(spec, "pool", "") == "concat" else 1)
        between = spec.pooler_dim or config.dim
        self.input_dropout = Dropout(rate if spec.dropout_before_pooler else 0.0)
        bias = config.bias if spec.has_norm else True
        self.pooler = nn.Linear(width, between, bias=bias) if spec.has_pooler else None
        self.activation = POOLER_ACTIVATIONS[spec.activation]
        self.norm = make_norm(config, between) if spec.has_norm else None
        self.drop = Dropout(rate)
        self.out = nn.Linear(between if spec.has_pooler else width, num_outputs, bias=spec.has_pooler or spec.bias)

    def project(self, x: Tensor) -> Tensor:
        if self.pooler is not None:
            x = self.activation(self.pooler(self.input_dropout(x)))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(self.drop(x))


class ClassificationHeadModule(DenseHeadModule):
    """(B, K, C): scores over the classes, from the states of one place or of several side by side, or added."""

    class_weights: Tensor | None

    def __init__(self, config: ModelConfig, spec: ClassificationHead) -> None:
        super().__init__(config, spec, len(spec.names), spec.num_marked)
        self.spec = spec
        weights = None if spec.class_weights is None else torch.tensor(spec.class_weights)
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        x_BKD = pool_hidden_states(x_BTD, target_positions, document_ids, self.spec.pool, self.spec.num_orders)
        if self.spec.num_marked > 1:
            x_BKD = x_BKD.unflatten(1, (-1, self.spec.num_marked)).flatten(2)
        return self.project(x_BKD)

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        return self.cross_entropy(outputs, batch.task_labels, "sum")

    def cross_entropy(self, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        weights = (
            None if self.class_weights is None else self.class_weights.float()
        )  # which a twin in bfloat16 has rounded
        return F.cross_entropy(
            logits.flatten(0, -2).float(),
            target.flatten(),
            weights,
            ignore_index=LABEL_IGNORE_INDEX,
            reduction=reduction,
        )

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.spec.num_marked > 1 or self.spec.num_orders > 1:
            raise UserError("This head reads several places of a text: give them in a batch, as Model.logits takes it.")
        logits_BC = self(x_BTD, positions_B[:, None], document_ids)[:, 0]
        return logits_BC, None if labels is None else self.cross_entropy(logits_BC, labels, "mean")


class RegressionHeadModule(DenseHeadModule):
    """(B, K): one number for each text."""

    def __init__(self, config: ModelConfig, spec: RegressionHead) -> None:
        super().__init__(config, spec, 1)
        self.spec = spec

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        return self.project(
            pool_hidden_states(x_BTD, target_positions, document_ids, self.spec.pool, self.spec.num_orders)
        )[..., 0]

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        used = ~batch.task_labels.isnan()
        apart = outputs.float() - batch.task_labels.nan_to_num()
        return torch.where(used, apart.square(), 0.0).sum()

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        score_B1 = self(x_BTD, positions_B[:, None], document_ids)
        return score_B1, None if labels is None else F.mse_loss(score_B1.flatten().float(), labels.flatten().float())


class MultipleChoiceHeadModule(DenseHeadModule):
    """(B, K): one number for each text of a group."""

    def __init__(self, config: ModelConfig, spec: MultipleChoiceHead) -> None:
        super().__init__(config, spec, 1)
        self.spec = spec

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        return self.project(pool_hidden_states(x_BTD, target_positions, document_ids, self.spec.pool))[..., 0]

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        used_N, score_N = batch.group_ids.flatten() >= 0, outputs.flatten().float()
        surprise_N = grouped_logsumexp(score_N, batch.group_ids.flatten(), used_N) - score_N
        return torch.where(used_N & (batch.task_labels.flatten() == 1), surprise_N, 0.0).sum()

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The place is (B, choices): the texts of a group come one after the other."""
        if positions_B.ndim < 2:
            raise UserError("Choices are between texts: input_ids must be (rows, choices, tokens).")
        logits = self(x_BTD, positions_B.flatten()[:, None], document_ids).view(positions_B.shape)
        return logits, None if labels is None else F.cross_entropy(logits.float(), labels)


class TokenClassificationHeadModule(DenseHeadModule):
    """(B, K, C): logits over the tags at each target position."""

    def __init__(self, config: ModelConfig, spec: TokenClassificationHead) -> None:
        super().__init__(config, spec, len(spec.names))
        self.crf = CRF(len(spec.names)) if spec.crf else None

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        return self.project(x_BTD if target_positions is None else gather_positions(x_BTD, target_positions))

    def resolve_dependent_logits(
        self, outputs: Tensor, target_positions: Tensor | None, document_ids: Tensor | None
    ) -> Tensor:
        """With a chain: the score of the best one through each tag, so that the highest are the best chain."""
        if self.crf is None:
            return outputs
        assert target_positions is not None
        return self.crf.max_marginals(outputs.float(), tag_chain_masks(target_positions, document_ids)[0])

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        if self.crf is not None:
            return self.crf.loss(
                outputs.float(), batch.task_labels, *tag_chain_masks(batch.target_positions, document_ids)
            )
        logits_NC = outputs.flatten(0, 1).float()
        return F.cross_entropy(logits_NC, batch.task_labels.flatten(), ignore_index=LABEL_IGNORE_INDEX, reduction="sum")

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits_BTC = self(x_BTD, None, document_ids)
        if self.crf is not None:
            raise UserError(
                "A chain of tags is told for words: give their places in a batch, as Model.logits takes it."
            )
        if labels is None:
            return logits_BTC, None
        return logits_BTC, F.cross_entropy(
            logits_BTC.flatten(0, 1).float(), labels.flatten(), ignore_index=LABEL_IGNORE_INDEX
        )


class SpanHeadModule(DenseHeadModule):
    """(B, T, 2): start and end logits of each position."""

    def __init__(self, config: ModelConfig, spec: SpanHead) -> None:
        super().__init__(config, spec, 2)

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        return self.project(x_BTD)

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        """The mean of what start and end cost, each a softmax over the places of its text where it may be."""
        target_BT2, (B, T, _) = batch.task_labels, outputs.shape
        doc_BT = target_BT2.new_zeros((B, T), dtype=torch.long) if document_ids is None else document_ids
        may_BT2 = (target_BT2 >= 0) & (doc_BT[..., None] >= 0)
        text_BT = doc_BT + T * torch.arange(B, device=doc_BT.device)[:, None]
        group_BT2 = 2 * text_BT[..., None] + torch.arange(2, device=doc_BT.device)
        score_N = outputs.flatten().float()
        surprise_N = grouped_logsumexp(score_N, group_BT2.flatten(), may_BT2.flatten()) - score_N
        return torch.where((may_BT2 & (target_BT2 == 1)).flatten(), surprise_N, 0.0).sum() / 2

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`labels` (B, 2) are where the answers start and end; those outside of the row are not learned."""
        logits_BT2 = self(x_BTD, None, document_ids)
        if labels is None:
            return logits_BT2, None
        T = x_BTD.shape[1]
        start, end = (
            F.cross_entropy(logits_BT2[..., i].float(), labels[:, i].clamp(0, T), ignore_index=T) for i in (0, 1)
        )
        return logits_BT2, (start + end) / 2


class EmbeddingHeadModule(TaskHeadModule):
    """(B, K, D): one L2-normalised vector per text."""

    def __init__(self, config: ModelConfig, spec: EmbeddingHead) -> None:
        super().__init__()
        self.spec = spec
        self.pooler = nn.Linear(config.dim, config.dim) if spec.has_pooler else None

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        x_BKD = pool_hidden_states(x_BTD, target_positions, document_ids, self.spec.pool)
        if self.pooler is not None:
            x_BKD = torch.tanh(self.pooler(x_BKD))
        return F.normalize(x_BKD.float(), dim=-1)

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        """Each text is to find its other half among those of all pairs, from both sides."""
        first_PD, second_PD, used_P = gather_pairs(outputs.flatten(0, 1), batch.group_ids.flatten(), batch.task_labels)
        near_PP = first_PD @ second_PD.T - self.spec.margin * torch.eye(len(used_P), device=outputs.device)
        near_PP = self.spec.scale * near_PP
        there, back = (m.masked_fill(~used_P, -1e9).log_softmax(-1).diagonal() for m in (near_PP, near_PP.T))
        return -torch.where(used_P, there + back, 0.0).sum()

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if labels is not None:
            raise UserError("Vectors have no labels: pairs are learned from a batch that groups them.")
        return self(x_BTD, positions_B[:, None], document_ids)[:, 0], None


class AuxiliaryLMHeadModule(LMHeadModule):
    """The words that a decoder goes on to write beside the answers of its task."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.get_extra("auxiliary")
        assert isinstance(spec, AuxiliaryLM)
        super().__init__(config, spec.head)
        self.loss_weight = spec.weight


# --- texts of packed rows -------------------------------------------------------------------------------------------


def pool_hidden_states(
    x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None, pool: str, num_orders: int = 1
) -> Tensor:
    """Return (B, K, D): states at the target positions or means of their documents; several orders are added."""
    assert target_positions is not None, "a task says which places it asks at"
    x_BKD = (
        mean_pool_documents(x_BTD, target_positions, document_ids)
        if pool == "mean"
        else gather_positions(x_BTD, target_positions)
    )
    if pool == "concat":
        x_BKD = torch.cat(
            [
                x_BKD,
                max_pool_documents(x_BTD, target_positions, document_ids),
                mean_pool_documents(x_BTD, target_positions, document_ids),
            ],
            -1,
        )
    return x_BKD if num_orders == 1 else x_BKD.unflatten(1, (-1, num_orders)).sum(2)


def mean_pool_documents(x_BTD: Tensor, target_positions_BK: Tensor, document_ids_BT: Tensor | None) -> Tensor:
    """Return (B, K, D): the mean over the document of each target position."""
    if document_ids_BT is None:
        return x_BTD.mean(1, keepdim=True).expand(-1, target_positions_BK.shape[1], -1)
    same_BKT = (document_ids_BT[:, None, :] == gather_positions(document_ids_BT, target_positions_BK)[:, :, None]).to(
        x_BTD.dtype
    )
    return (same_BKT @ x_BTD) / same_BKT.sum(-1, keepdim=True)


def max_pool_documents(x_BTD: Tensor, target_positions_BK: Tensor, document_ids_BT: Tensor | None) -> Tensor:
    """Return (B, K, D): the maximum over the document of each target position."""
    if document_ids_BT is None:
        return x_BTD.amax(1, keepdim=True).expand(-1, target_positions_BK.shape[1], -1)
    document_ids_BT = document_ids_BT.clamp(min=-1) + 1  # padding is a document too
    of_doc = x_BTD.new_full((len(x_BTD), x_BTD.shape[1] + 1, x_BTD.shape[2]), -torch.inf)
    of_doc = of_doc.scatter_reduce(1, document_ids_BT[..., None].expand_as(x_BTD), x_BTD, "amax")
    return gather_positions(of_doc, document_ids_BT.gather(1, target_positions_BK))


def grouped_logsumexp(score_N: Tensor, group_ids_N: Tensor, mask_N: Tensor) -> Tensor:
    """(N,): for each score the log of the summed exponentials of its group; the unused are a group of their own.

    Groups are numbers below N.
    """
    spare = len(score_N)
    group_ids_N = torch.where(mask_N, group_ids_N, spare)
    empty = score_N.new_full((spare + 1,), -torch.inf)
    top_N = empty.scatter_reduce(0, group_ids_N, score_N.detach(), "amax")[group_ids_N]
    total = torch.zeros_like(empty).scatter_add(0, group_ids_N, (score_N - top_N).exp())
    return top_N + total[group_ids_N].log()


def gather_pairs(x_ND: Tensor, group_ids_N: Tensor, side: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(P, D) twice, the first and the second of each pair, and (P,) which pairs there are. Pairs are numbers below N/2.

    Where no side is given (0 the first, 1 the second), the first of a pair is the one that comes first in the rows.
    """
    num, place_N = len(x_ND) // 2, torch.arange(len(x_ND), device=x_ND.device)
    group_ids_N = torch.where(group_ids_N >= 0, group_ids_N, num)
    if side is None:
        first = place_N.new_full((num + 1,), len(x_ND)).scatter_reduce(0, group_ids_N, place_N, "amin")
        second_N = place_N != first[group_ids_N]
    else:
        second_N = side.flatten() == 1
    slot_N = torch.where(group_ids_N == num, 2 * num, 2 * group_ids_N + second_N)
    both_PD = x_ND.new_zeros((2 * num + 1, x_ND.shape[1])).index_copy(0, slot_N, x_ND)[:-1].unflatten(0, (num, 2))
    count_P = place_N.new_zeros(num + 1).scatter_add(0, group_ids_N, torch.ones_like(place_N))[:-1]
    return both_PD[:, 0], both_PD[:, 1], count_P == 2


# --- which head ------------------------------------------------------------------------------------------------------

TASK_HEAD_MODULES: dict[type, Callable[..., TaskHeadModule]] = {
    ClassificationHead: ClassificationHeadModule,
    RegressionHead: RegressionHeadModule,
    MultipleChoiceHead: MultipleChoiceHeadModule,
    TokenClassificationHead: TokenClassificationHeadModule,
    SpanHead: SpanHeadModule,
    EmbeddingHead: EmbeddingHeadModule,
}
TASK_HEAD_TYPES: dict[str, type[TaskHead]] = {
    "classify": ClassificationHead,
    "pair": ClassificationHead,
    "relation": ClassificationHead,
    "word-in-context": ClassificationHead,
    "regress": RegressionHead,
    "choice": MultipleChoiceHead,
    "tag": TokenClassificationHead,
    "span-qa": SpanHead,
    "embed": EmbeddingHead,
}
GENERATIVE_TASKS = ("text-to-text", "lm")
MARKED_WORD_TASKS = ("relation", "word-in-context")  # tasks that read the states of two marked places
ENCODER_ONLY_TASKS = ("tag", "embed")  # tasks that T5 does with its encoder alone
MEAN_POOLED_FAMILIES = (
    "modernbert",
)  # whose published settings read an answer from the mean of a text, not from [CLS]


def head_for_task(config: ModelConfig, task: str, names: tuple[str, ...] = (), **changes: Any) -> Head:
    """The head that a family has for a task, as published; `changes` are fields to set otherwise.

    A task that this architecture cannot do by a head is an error that says what would work.
    """
    if task in GENERATIVE_TASKS:
        if not isinstance(config.head, LMHead):
            raise UserError(f"This {config.family} has no words left to answer {task} with: take a language model.")
        return config.head
    if task not in TASK_HEAD_TYPES:
        raise UserError(
            f"There is no head for a task {task!r}. {did_you_mean(task, [*TASK_HEAD_TYPES, *GENERATIVE_TASKS])}"
        )
    alone = config.recurrent is None and task in ENCODER_ONLY_TASKS  # the encoder can answer by itself
    if config.architecture == "encoder-decoder" and not config.adds_bos and not alone:
        other = "write the answers as text, with the task text-to-text"
        how = f"take a transformer for the task {task}" if task in ENCODER_ONLY_TASKS else other
        raise UserError(f"{config.family}, an encoder-decoder, answers in words, not by a head for {task}: {how}.")
    head = inherit_dropout(_published_head(config, TASK_HEAD_TYPES[task]), config)
    if (
        isinstance(head, ClassificationHead) and task in MARKED_WORD_TASKS
    ):  # no family has such a head: one layer over both states
        head = ClassificationHead((), num_marked=2, bias=True, pool=head.pool, dropout=head.dropout)
    elif isinstance(head, PooledHeadBase) and config.family in MEAN_POOLED_FAMILIES:
        head = replace(head, pool="mean")
    if isinstance(head, ClassificationHead | TokenClassificationHead):
        head = replace(head, names=names)
    return replace(head, **changes)


def _published_head(config: ModelConfig, head_type: type[TaskHead]) -> TaskHead:
    """The head of this kind that the family has, without names; that for classes says how a text becomes one state."""
    pool: Literal["first", "last"] = "first" if config.architecture == "encoder" else "last"
    if head_type is EmbeddingHead:
        dense = config.family == "labse"
        return EmbeddingHead("last" if config.architecture == "decoder" else "first" if dense else "mean", dense)
    layout = FAMILY_LAYOUTS.get(config.family)
    found = {type(answers.head): answers.head for answers in layout.task_architectures} if layout is not None else {}
    if head_type in found:
        return found[head_type]
    if head_type is TokenClassificationHead or head_type is SpanHead:
        return TokenClassificationHead(()) if head_type is TokenClassificationHead else SpanHead()
    usual = ClassificationHead((), has_pooler=pool == "first", pool=pool)
    if config.family == BAG_OF_WORDS_FAMILY:
        usual = ClassificationHead((), bias=True, pool="mean")
    elif isinstance(config.recurrent, AWDLSTMConfig):  # with a norm over the layer in place of one over the batch
        usual = ClassificationHead(
            (), has_pooler=True, pool="concat", activation="relu", has_norm=True, pooler_dim=50, dropout=0.1
        )
    elif config.recurrent is not None:
        usual = ClassificationHead((), bias=True, pool="concat")
    template = found.get(ClassificationHead, usual)
    assert isinstance(template, ClassificationHead)
    return template if head_type is ClassificationHead else convert_head_type(head_type, template)


def convert_head_type(head_type: type[Any], head: PooledHeadBase) -> Any:
    """Another kind of head that goes the same way from states to answers."""
    return head_type(**{f.name: getattr(head, f.name) for f in fields(PooledHeadBase)})


def inherit_dropout(head: TaskHead, config: ModelConfig) -> TaskHead:
    """A rate that is the model's own is not said twice."""
    same = isinstance(head, TaskHeadBase) and head.dropout == config.dropout
    return replace(head, dropout=None) if same else head  # type: ignore[arg-type]


def with_classification_head(config: ModelConfig, names: tuple[str, ...]) -> ModelConfig:
    """The same model with a head over these classes."""
    return replace(config, head=head_for_task(config, "classify", names), extras=())
