"""Task heads: hidden states -> classes, scores, choices, tags, spans and embeddings, each with its loss.

Rows are packed: a row holds several texts, which `document_ids` separate. `target_positions` (B, K) names the positions
whose states the head reads, such as [CLS] of each text. So a head computes K outputs per row, not one.

| head | outputs | loss |
| --- | --- | --- |
| ClassificationHead | (B, K, C) logits | cross-entropy |
| RegressionHead | (B, K) scores | squared error, in units of the targets' variance |
| MultipleChoiceHead | (B, K) scores | cross-entropy over the texts of a group |
| TokenClassificationHead | (B, K, C) logits | cross-entropy, or a CRF's negative log-likelihood |
| SpanHead | (B, T, 2) logits | cross-entropy over the positions of a text, for start and end |
| EmbeddingHead | (B, K, D) unit vectors | in-batch softmax over pairs (InfoNCE) |
| MultiTaskHead | those of the head that the batch names | its own |

A loss is a sum over targets. The caller divides by the number of targets in the global batch, so the result does not
depend on the micro-batch size.

B rows, T positions, K target positions per row, N targets in all rows, D model width, C classes or tags, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.core.errors import UserError, did_you_mean, quote
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
    MultiTaskHead,
    PooledHeadBase,
    RegressionHead,
    SpanHead,
    TaskHead,
    TaskHeadBase,
    TokenClassificationHead,
    convert_head_type,
    head_key,
    inherit_dropout,
)
from firth.models.heads import LABEL_IGNORE_INDEX, LMHeadModule, gather_positions
from firth.models.hf.registry import FAMILY_LAYOUTS
from firth.models.kernels.activation import ACTIVATIONS
from firth.models.kernels.dropout import Dropout
from firth.models.recurrent.crf import CRF, tag_chain_masks

POOLER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = ACTIVATIONS | {"tanh": torch.tanh}


class TaskHeadModule(nn.Module):
    """Interface of all task heads.

    - `forward` returns the outputs at the target positions of packed rows.
    - `loss` returns the loss summed over the targets of a batch.
    - `logits_and_loss` serves a call with the Hugging Face input names: one text per row, and the mean loss.
    """

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        raise NotImplementedError

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        raise NotImplementedError

    def resolve_dependent_logits(
        self, outputs: Tensor, target_positions: Tensor | None, document_ids: Tensor | None
    ) -> Tensor:
        """Return logits whose argmax is the joint prediction; a CRF's tags depend on each other."""
        return outputs

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError


class DenseHeadModule(TaskHeadModule):
    """Dropout, pooler with activation and norm (each optional), dropout, output layer.

    `num_marked` states per text are concatenated before the pooler.
    """

    def __init__(self, config: ModelConfig, spec: TaskHeadBase, num_outputs: int, num_marked: int = 1) -> None:
        super().__init__()
        p = config.dropout if spec.dropout is None else spec.dropout
        input_dim = num_marked * config.head_input_dim * (3 if getattr(spec, "pool", "") == "concat" else 1)
        pooler_dim = spec.pooler_dim or config.dim
        self.input_dropout = Dropout(p if spec.dropout_before_pooler else 0.0)
        bias = config.bias if spec.has_norm else True
        self.pooler = nn.Linear(input_dim, pooler_dim, bias=bias) if spec.has_pooler else None
        self.activation = POOLER_ACTIVATIONS[spec.activation]
        self.norm = make_norm(config, pooler_dim) if spec.has_norm else None
        self.drop = Dropout(p)
        out_dim = pooler_dim if spec.has_pooler else input_dim
        self.out = nn.Linear(out_dim, num_outputs, bias=spec.has_pooler or spec.bias)

    def project(self, x: Tensor) -> Tensor:
        return self.out(self.compute_features(x))

    def compute_features(self, x: Tensor) -> Tensor:
        """Return the input of the output layer."""
        if self.pooler is not None:
            x = self.activation(self.pooler(self.input_dropout(x)))
        if self.norm is not None:
            x = self.norm(x)
        return self.drop(x)


class ClassificationHeadModule(DenseHeadModule):
    """(B, K, C): logits over the classes.

    A text's state is that of one position, the concatenation of `num_marked` positions (two marked words), or the sum
    over `num_orders` copies of the text (GPT scores a sentence pair in both orders).
    """

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
        # A bf16 replica of the model casts its buffers too.
        weights = None if self.class_weights is None else self.class_weights.float()
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
            raise UserError("This head reads several positions of a text: pass them as a batch to Model.logits.")
        logits_BC = self(x_BTD, positions_B[:, None], document_ids)[:, 0]
        return logits_BC, None if labels is None else self.cross_entropy(logits_BC, labels, "mean")


class RegressionHeadModule(DenseHeadModule):
    """(B, K): one real-valued score per text. A NaN label marks an unused slot.

    Scores from 0 to 1 and prices in thousands are learned alike: the loss is in units of the targets' standard
    deviation, the output layer begins with their mean and in their units (`standardize`), and the optimizer takes steps
    in these units (`output_units`). So a file has plain weights, which give the score in the units of the targets.
    """

    def __init__(self, config: ModelConfig, spec: RegressionHead) -> None:
        super().__init__(config, spec, 1)
        self.spec = spec

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        return self.project(
            pool_hidden_states(x_BTD, target_positions, document_ids, self.spec.pool, self.spec.num_orders)
        )[..., 0]

    def project(self, x: Tensor) -> Tensor:
        """Return the scores in float32: far from 0, bfloat16 has too few digits for their differences."""
        x, bias = self.compute_features(x), self.out.bias
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.out.weight.to(dtype), None if bias is None else bias.to(dtype))

    @torch.no_grad()
    def standardize(self, target_mean: float) -> None:
        """Let a new output layer begin in the units of the targets: around their mean, where it has a bias."""
        self.out.weight.mul_(self.spec.target_std)
        if self.out.bias is not None:
            self.out.bias.fill_(target_mean)

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        return self.squared_error(outputs, batch.task_labels)

    def squared_error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        error = (outputs.float() - targets.nan_to_num()) / self.spec.target_std
        return torch.where(targets.isnan(), 0.0, error.square()).sum()

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        score_B1 = self(x_BTD, positions_B[:, None], document_ids)
        return score_B1, None if labels is None else F.mse_loss(score_B1.flatten().float(), labels.flatten().float())


def output_units(model: nn.Module) -> dict[str, float]:
    """Return the unit of the parameters of each regression head's output layer, by name."""
    heads = {name: part for name, part in model.named_modules() if isinstance(part, RegressionHeadModule)}
    return {
        f"{name}.out.{own}": head.spec.target_std
        for name, head in heads.items()
        for own, _ in head.out.named_parameters()
    }


class MultipleChoiceHeadModule(DenseHeadModule):
    """(B, K): one score per text; a softmax over the texts of a group (one question's choices) gives probabilities."""

    def __init__(self, config: ModelConfig, spec: MultipleChoiceHead) -> None:
        super().__init__(config, spec, 1)
        self.spec = spec

    def forward(self, x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        return self.project(pool_hidden_states(x_BTD, target_positions, document_ids, self.spec.pool))[..., 0]

    def loss(self, outputs: Tensor, batch: Any, document_ids: Tensor | None) -> Tensor:
        used_N, score_N = batch.group_ids.flatten() >= 0, outputs.flatten().float()
        nll_N = grouped_logsumexp(score_N, batch.group_ids.flatten(), used_N) - score_N
        return torch.where(used_N & (batch.task_labels.flatten() == 1), nll_N, 0.0).sum()

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits of the shape of `positions_B`, (B, choices); `x_BTD` has B * choices rows."""
        if positions_B.ndim < 2:
            raise UserError("Multiple choice needs input_ids of shape (rows, choices, tokens).")
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
        """Return the CRF's max-marginals: the score of the best tag sequence through each tag (Viterbi both ways)."""
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
            raise UserError("A CRF decodes the tags of words: pass the words' positions as a batch to Model.logits.")
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
        """Return the mean of start and end loss, each a softmax over the allowed positions of its text.

        Labels (B, T, 2): 1 at the answer's start or end, 0 at other allowed positions, -1 elsewhere.
        """
        labels_BT2, group_BT2 = batch.task_labels, span_group_ids(outputs, document_ids)
        allowed_BT2 = (labels_BT2 >= 0) & (group_BT2 >= 0)
        score_N = outputs.flatten().float()
        nll_N = grouped_logsumexp(score_N, group_BT2.flatten(), allowed_BT2.flatten()) - score_N
        return torch.where((allowed_BT2 & (labels_BT2 == 1)).flatten(), nll_N, 0.0).sum() / 2

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (B, T, 2) and the mean loss; `labels` (B, 2) are start and end, ignored outside of the row."""
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
        """Return InfoNCE in both directions: each text of a pair must rank its partner first among all pairs.

        The other pairs of the micro-batch are the negatives. `margin` is subtracted from the similarity of true pairs
        (additive margin softmax, Feng et al. 2022, section 2.1); `scale` is the inverse temperature.
        """
        first_PD, second_PD, used_P = gather_pairs(outputs.flatten(0, 1), batch.group_ids.flatten(), batch.task_labels)
        cosine_PP = first_PD @ second_PD.T - self.spec.margin * torch.eye(len(used_P), device=outputs.device)
        logits_PP = self.spec.scale * cosine_PP
        forward, backward = (m.masked_fill(~used_P, -1e9).log_softmax(-1).diagonal() for m in (logits_PP, logits_PP.T))
        return -torch.where(used_P, forward + backward, 0.0).sum()

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if labels is not None:
            raise UserError("An embedding head takes no labels: train it on pairs, in a batch with group_ids.")
        return self(x_BTD, positions_B[:, None], document_ids)[:, 0], None


class MultiTaskHeadModule(TaskHeadModule):
    """One head per task. A batch has examples of one task, and names its head (`Batch.head`)."""

    def __init__(self, config: ModelConfig, spec: MultiTaskHead) -> None:
        super().__init__()
        self.names = [own.name for own in spec.heads]
        self.heads = nn.ModuleDict({head_key(own.name): make_task_head(config, own.head) for own in spec.heads})

    def __getitem__(self, name: str) -> TaskHeadModule:
        return cast(TaskHeadModule, self.heads[head_key(name)])

    def logits_and_loss(
        self, x_BTD: Tensor, positions_B: Tensor, document_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        raise UserError(
            f"This model has several heads ({', '.join(self.names)}): `firth export --task NAME` writes one with one."
        )


def select_task_head(head: TaskHeadModule, batch: Any) -> TaskHeadModule:
    """Return the head that a batch names; the only one of a model for one task."""
    if not isinstance(head, MultiTaskHeadModule):
        return head
    return head[batch.head]


class AuxiliaryLMHeadModule(LMHeadModule):
    """LM head for the auxiliary language-modelling loss of fine-tuning (GPT, Radford et al. 2018, section 3.2)."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.get_extra("auxiliary")
        assert isinstance(spec, AuxiliaryLM)
        super().__init__(config, spec.head)
        self.loss_weight = spec.weight


# --- pooling and softmax over the texts of packed rows ----------------------------------------------------------------


def pool_hidden_states(
    x_BTD: Tensor, target_positions: Tensor | None, document_ids: Tensor | None, pool: str, num_orders: int = 1
) -> Tensor:
    """Return one state per target, (B, K / num_orders, D), or 3 D for `concat`.

    `pool`: "first" and "last" read the target position, "mean" averages its document, "concat" is [position, max, mean]
    (ULMFiT, section 3.3). States of `num_orders` copies of a text are summed.
    """
    assert target_positions is not None, "a task's batch has target_positions"
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
    document_ids_BT = document_ids_BT.clamp(min=-1) + 1  # padding becomes document 0
    max_per_doc = x_BTD.new_full((len(x_BTD), x_BTD.shape[1] + 1, x_BTD.shape[2]), -torch.inf)
    max_per_doc = max_per_doc.scatter_reduce(1, document_ids_BT[..., None].expand_as(x_BTD), x_BTD, "amax")
    return gather_positions(max_per_doc, document_ids_BT.gather(1, target_positions_BK))


def span_group_ids(outputs_BT2: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return (B, T, 2): the softmax that a start or end logit belongs to, one of two for each text; -1 for padding."""
    B, T, _ = outputs_BT2.shape
    device = outputs_BT2.device
    doc_BT = torch.zeros((B, T), dtype=torch.long, device=device) if document_ids is None else document_ids
    text_BT = doc_BT + T * torch.arange(B, device=device)[:, None]
    group_BT2 = 2 * text_BT[..., None] + torch.arange(2, device=device)
    return torch.where(doc_BT[..., None] >= 0, group_BT2, -1)


def grouped_logsumexp(score_N: Tensor, group_ids_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return (N,): the logsumexp over each score's group. Group ids are below N; masked scores share an extra group.

    A softmax over groups of any size without a loop: the maximum per group keeps the exponentials finite.
    """
    masked_group = len(score_N)
    group_ids_N = torch.where(mask_N, group_ids_N, masked_group)
    empty = score_N.new_full((masked_group + 1,), -torch.inf)
    top_N = empty.scatter_reduce(0, group_ids_N, score_N.detach(), "amax")[group_ids_N]
    total = torch.zeros_like(empty).scatter_add(0, group_ids_N, (score_N - top_N).exp())
    return top_N + total[group_ids_N].log()


def gather_pairs(x_ND: Tensor, group_ids_N: Tensor, side: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and second vectors of each pair, (P, D) each, and (P,) whether the pair is complete.

    P is N / 2; group ids are below P, negative for unused slots. `side` is 0 for first and 1 for second texts. Without
    it, the text that comes first in the batch is the first of its pair.
    """
    num, index_N = len(x_ND) // 2, torch.arange(len(x_ND), device=x_ND.device)
    group_ids_N = torch.where(group_ids_N >= 0, group_ids_N, num)
    if side is None:
        first = index_N.new_full((num + 1,), len(x_ND)).scatter_reduce(0, group_ids_N, index_N, "amin")
        is_second_N = index_N != first[group_ids_N]
    else:
        is_second_N = side.flatten() == 1
    slot_N = torch.where(group_ids_N == num, 2 * num, 2 * group_ids_N + is_second_N)
    both_PD = x_ND.new_zeros((2 * num + 1, x_ND.shape[1])).index_copy(0, slot_N, x_ND)[:-1].unflatten(0, (num, 2))
    count_P = index_N.new_zeros(num + 1).scatter_add(0, group_ids_N, torch.ones_like(index_N))[:-1]
    return both_PD[:, 0], both_PD[:, 1], count_P == 2


# --- the head of a family for a task ----------------------------------------------------------------------------------

TASK_HEAD_MODULES: dict[type, Callable[..., TaskHeadModule]] = {
    ClassificationHead: ClassificationHeadModule,
    RegressionHead: RegressionHeadModule,
    MultipleChoiceHead: MultipleChoiceHeadModule,
    TokenClassificationHead: TokenClassificationHeadModule,
    SpanHead: SpanHeadModule,
    EmbeddingHead: EmbeddingHeadModule,
    MultiTaskHead: MultiTaskHeadModule,
}


def make_task_head(config: ModelConfig, spec: TaskHead) -> TaskHeadModule:
    return TASK_HEAD_MODULES[type(spec)](config, spec)


TASK_HEAD_TYPES: dict[str, type[TaskHead]] = {
    "classify": ClassificationHead,
    "pair": ClassificationHead,
    "relation": ClassificationHead,
    "word-in-context": ClassificationHead,
    "regress": RegressionHead,
    "reward": RegressionHead,
    "choice": MultipleChoiceHead,
    "tag": TokenClassificationHead,
    "span-qa": SpanHead,
    "embed": EmbeddingHead,
}
GENERATIVE_TASKS = ("text-to-text", "extract", "lm", "preference")
MARKED_WORD_TASKS = ("relation", "word-in-context")  # tasks that read the states of two marked words
ENCODER_ONLY_TASKS = ("tag", "embed")  # tasks for which T5 uses only its encoder
MEAN_POOLED_FAMILIES = ("modernbert", "t5gemma")  # families that pool by the mean, not by [CLS] or the last token


def head_for_task(config: ModelConfig, task: str, names: tuple[str, ...] = (), **changes: Any) -> Head:
    """Return the published head of this model's family for a task; `changes` overrides its fields.

    Raise a UserError, with an alternative, for a task that this architecture has no head for.
    """
    if task in GENERATIVE_TASKS:
        if not isinstance(config.head, LMHead):
            raise UserError(
                f"This {config.family} has no LM head, which the task {task} needs: use a pretrained language model."
            )
        return config.head
    if task not in TASK_HEAD_TYPES:
        raise UserError(
            f"There is no head for a task {quote(task)}. {did_you_mean(task, [*TASK_HEAD_TYPES, *GENERATIVE_TASKS])}"
        )
    if config.architecture == "encoder-decoder" and config.recurrent is not None:
        other = "write the answers as text, with the task text-to-text"
        fix = f"take a transformer for the task {task}" if task in ENCODER_ONLY_TASKS else other
        raise UserError(
            f"{config.family}, an encoder-decoder, generates its answers and has no head for {task}: {fix}."
        )
    head = inherit_dropout(_published_head(config, TASK_HEAD_TYPES[task]), config)
    if isinstance(head, ClassificationHead) and task in MARKED_WORD_TASKS:
        # No family publishes such a head: use one linear layer over both states.
        head = ClassificationHead((), num_marked=2, bias=True, pool=head.pool, dropout=head.dropout)
    elif isinstance(head, PooledHeadBase) and config.family in MEAN_POOLED_FAMILIES:
        head = replace(head, pool="mean")
    if isinstance(head, ClassificationHead | TokenClassificationHead):
        head = replace(head, names=names)
    return replace(head, **changes)


def _published_head(config: ModelConfig, head_type: type[TaskHead]) -> TaskHead:
    """Return the family's head of this type, without label names; pooled heads follow the classification head."""
    pool: Literal["first", "last"] = "first" if config.architecture == "encoder" else "last"
    if head_type is EmbeddingHead:
        has_pooler = config.family == "labse"
        return EmbeddingHead(
            "last" if config.architecture == "decoder" else "first" if has_pooler else "mean", has_pooler
        )
    layout = FAMILY_LAYOUTS.get(config.family)
    published = {type(task.head): task.head for task in layout.task_architectures} if layout is not None else {}
    if head_type in published:
        return published[head_type]
    if head_type is TokenClassificationHead or head_type is SpanHead:
        return TokenClassificationHead(()) if head_type is TokenClassificationHead else SpanHead()
    default = ClassificationHead((), has_pooler=pool == "first", pool=pool)
    if config.family == BAG_OF_WORDS_FAMILY:
        default = ClassificationHead((), bias=True, pool="mean")
    elif isinstance(config.recurrent, AWDLSTMConfig):  # ULMFiT's head, with layer norm instead of batch norm
        default = ClassificationHead(
            (), has_pooler=True, pool="concat", activation="relu", has_norm=True, pooler_dim=50, dropout=0.1
        )
    elif config.recurrent is not None:
        default = ClassificationHead((), bias=True, pool="concat")
    head = published.get(ClassificationHead, default)
    assert isinstance(head, ClassificationHead)
    return head if head_type is ClassificationHead else convert_head_type(head_type, head)


def with_classification_head(config: ModelConfig, names: tuple[str, ...]) -> ModelConfig:
    """Return the config with a classification head over these classes, without extras."""
    return replace(config, head=head_for_task(config, "classify", names), extras=())
