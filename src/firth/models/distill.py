"""Knowledge distillation: train a small encoder to imitate a larger one (Sanh et al. 2019, DistilBERT).

The loss of the student has three parts (section 2):

- soft: the KL divergence to the teacher's distribution over the vocabulary, both softened by a temperature t:
  softmax(logits / t). Its gradient shrinks with 1 / t^2, so it is multiplied by t^2 (Hinton et al. 2015, section 2).
  It is a mean over all tokens, masked or not, as in the published training; with `soft_at=targets` over masked ones
  alone, as in that of MobileBERT.
- hard: the usual cross-entropy with the true tokens, a mean over the masked ones.
- cosine: 1 - cos(student state, teacher state), which aligns the directions of the last hidden states; over all tokens.

The student starts with every other layer of the teacher (`init_from_teacher`). The teacher runs without gradients:
a step costs its forward pass in addition.

B rows, T positions, K target positions, N positions of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from firth.core.errors import UserError
from firth.models.distill_config import Distillation
from firth.models.heads import LABEL_IGNORE_INDEX, LMHeadModule, gather_positions
from firth.models.model import Encoder, Model, detach_metrics

MAX_CHUNK_LOGITS = 2**26  # logits of student and teacher that the soft loss holds at once, each


def check_distillation_pair(student: Model, teacher: Model, spec: Distillation) -> tuple[Encoder, Encoder]:
    """Return both as encoders; raise a UserError where this student cannot imitate this teacher."""
    if not isinstance(student, Encoder) or not isinstance(teacher, Encoder) or student.is_causal or teacher.is_causal:
        raise UserError("Distillation needs an encoder as student and an encoder as teacher.")
    if not isinstance(teacher.head, LMHeadModule):
        raise UserError("The teacher has a classifier's head: it must be a language model.")
    if student.config.vocab_size != teacher.config.vocab_size:
        sizes = f"{student.config.vocab_size:,} tokens and the teacher's {teacher.config.vocab_size:,}"
        raise UserError(f"The model's vocabulary has {sizes}: tokenize the text with --tokenizer TEACHER.")
    if spec.cosine and student.config.dim != teacher.config.dim:
        raise UserError(
            f"The cosine loss needs equal widths: student {student.config.dim}, teacher {teacher.config.dim}. "
            "Set distillation.cosine=0, or model.dim to the teacher's."
        )
    return student, teacher


def distillation_losses(
    student: Encoder, teacher: Encoder, batch: Any, spec: Distillation, with_metrics: bool = False
) -> dict[str, Tensor]:
    """Return the parts of the loss as sums, each under the name of the count that divides it (`Model.losses`)."""
    assert isinstance(student.head, LMHeadModule)
    with torch.no_grad():
        teacher_BTD = teacher.hidden_states(batch)
    x_BTD = student.hidden_states(batch)
    logits_BKV = student.head(gather_positions(x_BTD, batch.target_positions), student.embed.tokens.weight).float()
    hard = F.cross_entropy(
        logits_BKV.flatten(0, 1), batch.labels.flatten(), ignore_index=LABEL_IGNORE_INDEX, reduction="sum"
    )
    by_token: dict[str, Tensor] = {}  # losses at every position, (B, T)
    if spec.soft and spec.soft_at == "tokens":
        by_token["soft"] = soft_target_loss(student, teacher, x_BTD, teacher_BTD, spec.temperature)
    if spec.cosine:
        by_token["cosine"] = 1 - F.cosine_similarity(x_BTD.float(), teacher_BTD.float(), dim=-1)
    if batch.document_ids is not None:
        by_token = {name: loss_BT * (batch.document_ids >= 0) for name, loss_BT in by_token.items()}
    sums = {name: loss_BT.sum() for name, loss_BT in by_token.items()}
    zero = torch.zeros((), device=x_BTD.device)
    parts = {"targets": spec.hard * hard, "tokens": sum((getattr(spec, name) * sums[name] for name in sums), zero)}
    metrics = {"mlm_loss/targets": hard, **{f"{name}_loss/tokens": total for name, total in sums.items()}}
    if spec.soft and spec.soft_at == "targets":
        x_BKD, teacher_BKD = (gather_positions(x, batch.target_positions) for x in (x_BTD, teacher_BTD))
        soft_BK = soft_target_loss(student, teacher, x_BKD, teacher_BKD, spec.temperature)
        metrics["soft_loss/targets"] = (soft_BK * (batch.labels != LABEL_IGNORE_INDEX)).sum()
        parts["targets"] = parts["targets"] + spec.soft * metrics["soft_loss/targets"]
    return parts | detach_metrics(metrics) if with_metrics else parts


def soft_target_loss(
    student: Encoder, teacher: Encoder, x_BTD: Tensor, teacher_BTD: Tensor, temperature: float
) -> Tensor:
    """(B, T or K) KL divergence from the teacher's softened distribution at each position, times temperature^2.

    Logits at all positions would fill the memory: they are computed in chunks, and again in the backward pass.
    """

    def divergence(x_ND: Tensor, teacher_ND: Tensor) -> Tensor:
        with torch.no_grad():
            target_NV = (teacher.head(teacher_ND, teacher.embed.tokens.weight).float() / temperature).log_softmax(-1)
        logits_NV = student.head(x_ND, student.embed.tokens.weight).float()
        log_probs_NV = (logits_NV / temperature).log_softmax(-1)
        return F.kl_div(log_probs_NV, target_NV, reduction="none", log_target=True).sum(-1)

    size = max(1, MAX_CHUNK_LOGITS // student.config.vocab_size)
    chunks = list(zip(x_BTD.flatten(0, 1).split(size), teacher_BTD.flatten(0, 1).split(size), strict=True))
    if len(chunks) == 1:
        loss_N = divergence(*chunks[0])
    else:
        loss_N = torch.cat([checkpoint(divergence, *chunk, use_reentrant=False) for chunk in chunks])
    return temperature**2 * loss_N.view(x_BTD.shape[:2])


@torch.no_grad()
def init_from_teacher(student: Model, teacher: Model) -> int:
    """Copy the teacher's weights into the student where shapes match; return the number of tensors copied.

    Layers are spaced evenly from the first to the last: six of twelve are 0, 2, 4, 7, 9 and 11, as in DistilBERT.
    Blocks and norms of another kind keep their own initialization (MobileBERT, Sun et al. 2020, section 3.6).
    """
    same_blocks = student.config.bottleneck == teacher.config.bottleneck
    same_norms = type(student.config.norm) is type(teacher.config.norm)
    student_state, teacher_state = student.state_dict(), teacher.state_dict()
    last, steps = teacher.config.num_layers - 1, max(student.config.num_layers - 1, 1)
    num_copied = 0
    for name, value in student_state.items():
        parts = name.split(".")
        if (parts[0] == "stack" and not same_blocks) or (parts[:2] == ["embed", "norm"] and not same_norms):
            continue
        if parts[:2] == ["stack", "blocks"]:
            parts[2] = str(round(int(parts[2]) * last / steps))
        source = teacher_state.get(".".join(parts))
        if source is not None and source.shape == value.shape:
            value.copy_(source)
            num_copied += 1
    return num_copied
