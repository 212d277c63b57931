"""Distillation for a task: the loss of a student that imitates the predictions of a fine-tuned teacher.

A label says which class is right. The teacher's probabilities also say how near the other classes are, and they exist
for texts without a label (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2). The loss is

    (1 - alpha) * hard + alpha * soft

`hard` is the head's own loss, a mean over the labelled targets. `soft` is a mean over all targets that the teacher has
predicted, by the type of the head:

| head | soft loss |
| --- | --- |
| classes, tags | t^2 * KL(softmax(teacher / t), softmax(student / t)) |
| choice | the same, over the choices of a question |
| span | the same, over the positions of a text, the mean of start and end |
| regression | (teacher - student)^2, in units of the targets' variance |

t is the temperature: above 1 it shows more of the small probabilities. The gradient of the KL divergence shrinks with
1 / t^2, hence the factor (as in `distill.py`, for pretraining).

The teacher's logits come with the batch (`Batch.soft_labels`), as numbers: no gradient reaches the teacher.

B rows, T positions, K target positions, C classes, N targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.models.task_heads import (
    ClassificationHeadModule,
    MultipleChoiceHeadModule,
    RegressionHeadModule,
    SpanHeadModule,
    TaskHeadModule,
    TokenClassificationHeadModule,
    grouped_logsumexp,
    span_group_ids,
)


@dataclass(frozen=True)
class TaskDistillation:
    """The share of the soft loss, and its temperature."""

    alpha: float = 0.5
    temperature: float = 2.0

    def losses(
        self, head: TaskHeadModule, outputs: Tensor, batch: Any, document_ids: Tensor | None
    ) -> dict[str, Tensor]:
        """Return both parts as sums, each under the name of the count that divides it."""
        hard = head.loss(outputs, batch, document_ids)
        if isinstance(head, RegressionHeadModule):
            soft = head.squared_error(outputs, batch.soft_labels)
        else:
            soft = SOFT_LOSSES[type(head)](outputs.float(), batch, document_ids, self.temperature)
        metrics = {"hard_loss/targets": hard, "soft_loss/soft_targets": soft}
        return {"targets": (1 - self.alpha) * hard, "soft_targets": self.alpha * soft} | {
            name: value.detach().clone() for name, value in metrics.items()
        }


def class_soft_loss(outputs: Tensor, batch: Any, document_ids: Tensor | None, temperature: float) -> Tensor:
    """Sum the divergence over the slots (B, K, C) that the teacher has predicted."""
    used_BK = ~batch.soft_labels[..., 0].isnan()
    target_BKC = (batch.soft_labels.nan_to_num() / temperature).log_softmax(-1)
    log_probs_BKC = (outputs / temperature).log_softmax(-1)
    kl_BK = F.kl_div(log_probs_BKC, target_BKC, reduction="none", log_target=True).sum(-1)
    return temperature**2 * torch.where(used_BK, kl_BK, 0.0).sum()


def choice_soft_loss(outputs: Tensor, batch: Any, document_ids: Tensor | None, temperature: float) -> Tensor:
    return grouped_kl(outputs, batch.soft_labels, batch.group_ids, temperature)


def span_soft_loss(outputs: Tensor, batch: Any, document_ids: Tensor | None, temperature: float) -> Tensor:
    """Return the mean of start and end; each is a softmax over the positions of a text."""
    group_BT2 = span_group_ids(outputs, document_ids)
    return grouped_kl(outputs, batch.soft_labels, group_BT2, temperature) / 2


def grouped_kl(outputs: Tensor, teacher: Tensor, group_ids: Tensor, temperature: float) -> Tensor:
    """Sum t^2 * KL over the groups; NaN in the teacher's logits leaves an entry out."""
    group_N = group_ids.flatten()
    used_N = ~teacher.flatten().isnan() & (group_N >= 0)
    log_probs = []
    for logits in (teacher.nan_to_num(), outputs):
        score_N = logits.flatten() / temperature
        log_probs.append(score_N - grouped_logsumexp(score_N, group_N, used_N))
    target_N, log_prob_N = log_probs
    kl_N = target_N.exp() * (target_N - log_prob_N)
    return temperature**2 * torch.where(used_N, kl_N, 0.0).sum()


SOFT_LOSSES: dict[type[TaskHeadModule], Callable[[Tensor, Any, Tensor | None, float], Tensor]] = {
    ClassificationHeadModule: class_soft_loss,
    TokenClassificationHeadModule: class_soft_loss,
    MultipleChoiceHeadModule: choice_soft_loss,
    SpanHeadModule: span_soft_loss,
}
