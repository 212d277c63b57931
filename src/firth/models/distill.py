"""A small model learns from a larger one: its answers, its states, its first weights (Sanh et al. 2019).

B rows, T places, K asked places, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.core.errors import UserError
from firth.models.heads import LABEL_IGNORE_INDEX, LMHeadModule, gather_positions
from firth.models.model import Encoder, Model


@dataclass(frozen=True)
class Distillation:
    """How much each part of the loss counts: the teacher's answers (softened), the true ones, the direction of states.

    The numbers are those of DistilBERT's published training.
    """

    temperature: float = 2.0
    soft: float = 5.0
    hard: float = 2.0
    cosine: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0 or min(self.soft, self.hard, self.cosine) < 0:
            raise UserError("distillation: temperature must be more than 0, and no weight negative.")


def check_distillation_pair(student: Model, teacher: Model, spec: Distillation) -> tuple[Encoder, Encoder]:
    """Both, as the encoders that they must be; a teacher that this student cannot learn from is refused."""
    if not isinstance(student, Encoder) or not isinstance(teacher, Encoder) or student.is_causal or teacher.is_causal:
        raise UserError("Distillation is from an encoder to an encoder.")
    if not isinstance(teacher.head, LMHeadModule):
        raise UserError("The teacher has a classifier's head: it must be a language model.")
    if student.config.vocab_size != teacher.config.vocab_size:
        sizes = f"{student.config.vocab_size:,} tokens and the teacher's {teacher.config.vocab_size:,}"
        raise UserError(f"The model's vocabulary has {sizes}: they must be the same.")
    if spec.cosine and student.config.dim != teacher.config.dim:
        raise UserError(
            f"States {student.config.dim} wide cannot point where the teacher's do, {teacher.config.dim} wide. "
            "Set distillation.cosine=0, or model.dim to the teacher's."
        )
    return student, teacher


def distillation_losses(student: Encoder, teacher: Encoder, batch: Any, spec: Distillation) -> dict[str, Tensor]:
    """The parts of the loss, each a sum under the name of what it is a mean over."""
    assert isinstance(student.head, LMHeadModule)
    with torch.no_grad():
        taught_BTD = teacher.hidden_states(batch)
        wanted_BKV = teacher.head(
            gather_positions(taught_BTD, batch.target_positions), teacher.embed.tokens.weight
        ).float()
    x_BTD = student.hidden_states(batch)
    logits_BKV = student.head(gather_positions(x_BTD, batch.target_positions), student.embed.tokens.weight).float()
    hard = F.cross_entropy(
        logits_BKV.flatten(0, 1), batch.labels.flatten(), ignore_index=LABEL_IGNORE_INDEX, reduction="sum"
    )
    t = spec.temperature
    soft_BK = F.kl_div(
        (logits_BKV / t).log_softmax(-1), (wanted_BKV / t).log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    answers = spec.hard * hard + spec.soft * t**2 * (soft_BK * (batch.labels != LABEL_IGNORE_INDEX)).sum()
    if not spec.cosine:
        return {"answers": answers}
    apart_BT = 1 - F.cosine_similarity(x_BTD.float(), taught_BTD.float(), dim=-1)
    if batch.document_ids is not None:
        apart_BT = apart_BT * (batch.document_ids >= 0)
    return {"answers": answers, "tokens": spec.cosine * apart_BT.sum()}


@torch.no_grad()
def init_from_teacher(student: Model, teacher: Model) -> int:
    """Fill the student with the teacher's weights where they fit, its layers evenly from the first to the last.

    Six layers of twelve are the layers 0, 2, 4, 7, 9 and 11, as in DistilBERT. Returns how many tensors were taken.
    """
    own, given = student.state_dict(), teacher.state_dict()
    last, steps = teacher.config.num_layers - 1, max(student.config.num_layers - 1, 1)
    taken = 0
    for name, value in own.items():
        parts = name.split(".")
        if parts[:2] == ["stack", "blocks"]:
            parts[2] = str(round(int(parts[2]) * last / steps))
        source = given.get(".".join(parts))
        if source is not None and source.shape == value.shape:
            value.copy_(source)
            taken += 1
    return taken
