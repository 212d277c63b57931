"""Layer-wise knowledge transfer: each layer of a student imitates the same layer of its teacher (Sun et al. 2020).

MobileBERT and its teacher IB-BERT have equally many layers, equally wide states between layers and equally many
attention heads, so they can be compared layer by layer (section 3.5):

- feature map transfer: the squared difference of the states after layer l. It is split into the difference of the
  normalised states, of their means and of their variances, which trains more stably.
- attention transfer: KL(teacher || student) of the attention weights of layer l, over all heads.
- pretraining distillation: the teacher's distribution over the vocabulary, and the true tokens (`distill.py`). The
  paper adds next-sentence prediction, which is left out here.

The order of these is the strategy (section 3.6):

    progressive   layer 1, then layer 2, ... up to the last; then distillation. Each layer starts on inputs that are
                  right already. The layers below learn on at a tenth of the rate. The paper's best.
    joint         all layers at once; then distillation.
    auxiliary     all layers and distillation as one loss, from the first step to the last.

Embeddings and the LM head come from the teacher (`init_from_teacher`) and wait until distillation.

B rows, T positions, D model width, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.core.errors import UserError
from firth.models.distill import distillation_losses
from firth.models.distill_config import Distillation, KnowledgeTransfer
from firth.models.model import Encoder, detach_metrics


def check_transfer_pair(student: Encoder, teacher: Encoder) -> None:
    """Raise a UserError where the layers of student and teacher cannot be compared."""
    for field in ("num_layers", "dim", "num_heads"):
        mine, theirs = getattr(student.config, field), getattr(teacher.config, field)
        if mine != theirs:
            raise UserError(
                f"Knowledge transfer compares layer by layer, and model.{field} is {mine} for the student and {theirs} "
                "for the teacher. Use a teacher like ib-bert-large, or set knowledge_transfer.strategy=none."
            )


class TransferLoss:
    """The loss of a step: layer by layer, or distillation. `set_progress` chooses which, before the step."""

    def __init__(self, student: Encoder, teacher: Encoder, distillation: Distillation, spec: KnowledgeTransfer) -> None:
        self.student, self.teacher, self.distillation, self.spec = student, teacher, distillation, spec
        self.set_progress(0.0)

    def set_progress(self, progress: float) -> None:
        """Choose the part of the loss by the share of the run that is done, 0 to 1."""
        self.layers = self.spec.layers_at(progress, self.student.config.num_layers)
        self.distills = self.spec.distills_at(progress)

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Return the parts of the loss as sums, each under the name of the count that divides it (`Model.losses`)."""
        parts: dict[str, Tensor] = {}
        if self.distills:
            parts = distillation_losses(self.student, self.teacher, batch, self.distillation, with_metrics=True)
        if self.layers:
            sums = transfer_losses(self.student, self.teacher, batch, self.layers, detaches=not self.distills)
            loss = torch.stack([getattr(self.spec, name) * value for name, value in sums.items()]).sum()
            parts["tokens"] = parts["tokens"] + loss if "tokens" in parts else loss
            parts |= detach_metrics({f"{name}_loss/tokens": value for name, value in sums.items()})
        return parts


def transfer_losses(
    student: Encoder, teacher: Encoder, batch: Any, layers: range, detaches: bool = False
) -> dict[str, Tensor]:
    """Return the losses of these layers, by the names of their weights: summed over tokens, averaged over layers.

    `detaches` keeps the gradient out of the student's embeddings. Layers above the last one are not computed.
    """
    with torch.no_grad():
        their_states, their_attentions = layer_outputs(teacher, batch, layers.stop)
    states, attentions = layer_outputs(student, batch, layers.stop, detaches)
    losses = [
        feature_map_losses(states[i], their_states[i])
        | {"attention": attention_loss(attentions[i], their_attentions[i])}
        for i in layers
    ]
    is_text = 1.0 if batch.document_ids is None else batch.document_ids >= 0
    return {name: (torch.stack([loss[name] for loss in losses]).mean(0) * is_text).sum() for name in losses[0]}


def layer_outputs(
    model: Encoder, batch: Any, num_layers: int, detaches: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states (B, T, D) after each of the first layers, and their attention weights (B, H, T, T)."""
    states: list[Tensor] = []
    attentions: list[Tensor] = []
    x_BTE = model.embed_backbone_inputs(batch.input_ids, batch.position_ids, batch.token_type_ids, batch.document_ids)
    x_BTD = model.embed.widen(x_BTE)
    model.stack(
        x_BTD.detach() if detaches else x_BTD,
        batch.document_ids,
        batch.attention_rank,
        all_hidden_states=states,
        attentions=attentions,
        token_type_ids=batch.token_type_ids,
        stop_layer=None if num_layers == model.config.num_layers else num_layers,
    )
    return states[1:], attentions


def feature_map_losses(x_BTD: Tensor, teacher_BTD: Tensor) -> dict[str, Tensor]:
    """Return (B, T) each: differences of the normalised states, of their means and of their variances."""
    x, y = x_BTD.float(), teacher_BTD.float()
    return {
        "feature_map": (F.layer_norm(x, x.shape[-1:]) - F.layer_norm(y, y.shape[-1:])).square().mean(-1),
        "mean": (x.mean(-1) - y.mean(-1)).square(),
        "variance": (x.var(-1, correction=0) - y.var(-1, correction=0)).abs(),
    }


def attention_loss(weights_BHTT: Tensor, teacher_BHTT: Tensor) -> Tensor:
    """Return (B, T): KL(teacher || student) of the attention weights of each query, averaged over heads."""
    a, b = (w.float().clamp(min=torch.finfo(torch.float32).tiny) for w in (weights_BHTT, teacher_BHTT))
    return (teacher_BHTT.float() * (b.log() - a.log())).sum(-1).mean(1)
