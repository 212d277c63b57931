"""Distillation: the loss by hand, and the student's initialization."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import (
    Distillation,
    Model,
    check_distillation_pair,
    distill,
    distillation_losses,
    init_from_teacher,
    make_model,
)
from firth.models.presets import bert, gpt2
from firth.objectives import Batch

TEACHER = bert(12, 16, 2, 30, dropout=0.0, attention_dropout=0.0)
STUDENT = replace(TEACHER, num_layers=6)


def pair() -> tuple[Model, Model]:
    torch.manual_seed(0)
    return make_model(STUDENT), make_model(TEACHER).eval()


def batch() -> Batch:
    return Batch(
        torch.randint(0, 30, (2, 7)),
        document_ids=torch.tensor([[0] * 7, [0] * 5 + [-1] * 2]),
        target_positions=torch.tensor([[1, 4, 0], [2, 0, 0]]),
        labels=torch.tensor([[5, 6, -100], [7, -100, -100]]),
    )


def test_the_loss_by_hand() -> None:
    student, teacher = pair()
    given, spec = batch(), Distillation(temperature=3.0, soft=0.7, hard=0.2, cosine=0.4)
    found = distillation_losses(student, teacher, given, spec)  # type: ignore[arg-type]
    s, t = (m(given.input_ids, given.document_ids + 1, output_hidden_states=True) for m in (student, teacher))
    hard = sum(F.cross_entropy(s.logits[i, j], torch.tensor(k)) for i, j, k in ((0, 1, 5), (0, 4, 6), (1, 2, 7)))
    assert_close(found["targets"], 0.2 * hard)
    is_token = given.document_ids >= 0  # soft targets and states of all tokens, masked or not; none of the padding
    p = (t.logits[is_token] / 3).softmax(-1)
    soft = (p * (p.log() - (s.logits[is_token] / 3).log_softmax(-1))).sum()
    x, y = s.hidden_states[-1][is_token], t.hidden_states[-1][is_token]
    cosine = (1 - (x * y).sum(-1) / x.norm(dim=-1) / y.norm(dim=-1)).sum()
    assert_close(found["tokens"], 0.7 * 9 * soft + 0.4 * cosine)


def test_the_published_weights() -> None:
    """alpha_ce 5, alpha_mlm 2, alpha_cos 1, temperature 2: the published command for DistilBERT."""
    assert Distillation() == Distillation(temperature=2.0, soft=5.0, hard=2.0, cosine=1.0)


def test_chunks_of_positions_have_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = pair()
    given, results = batch(), []
    for max_logits in (distill.MAX_CHUNK_LOGITS, 4 * 30):
        monkeypatch.setattr(distill, "MAX_CHUNK_LOGITS", max_logits)
        student.zero_grad()
        losses = distillation_losses(student, teacher, given, Distillation())  # type: ignore[arg-type]
        sum(losses.values()).backward()  # type: ignore[union-attr]
        results.append((losses, {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}))
    assert_close(*results)


def test_a_part_with_weight_0_is_disabled() -> None:
    student, teacher = pair()
    found = distillation_losses(student, teacher, batch(), Distillation(soft=0.0, cosine=0.0))  # type: ignore[arg-type]
    assert found["tokens"].item() == 0
    assert found["targets"].item() > 0


def test_a_copy_of_the_teacher_has_no_soft_loss() -> None:
    teacher = make_model(TEACHER).eval()
    found = distillation_losses(teacher, teacher, batch(), Distillation(hard=0.0))  # type: ignore[arg-type]
    assert found["targets"].item() == pytest.approx(0, abs=1e-5)
    assert found["tokens"].item() == pytest.approx(0, abs=1e-5)


def test_student_layers_are_every_nth_teacher_layer() -> None:
    student, teacher = pair()
    assert init_from_teacher(student, teacher) == len(student.state_dict())
    theirs = teacher.state_dict()
    for mine, layer in enumerate((0, 2, 4, 7, 9, 11)):
        name = "attention.qkv.weight"
        assert_close(student.state_dict()[f"stack.blocks.{mine}.{name}"], theirs[f"stack.blocks.{layer}.{name}"])
    assert_close(student.state_dict()["embed.tokens.weight"], theirs["embed.tokens.weight"])


def test_soft_targets_at_masked_tokens_alone() -> None:
    """As MobileBERT is distilled: half the true token, half the teacher's distribution."""
    student, teacher = pair()
    given, spec = batch(), Distillation(temperature=1.0, soft=0.5, hard=0.5, cosine=0.0, soft_at="targets")
    s, t = (m(given.input_ids, given.document_ids + 1) for m in (student, teacher))
    expected = 0.0
    for row, position, label in ((0, 1, 5), (0, 4, 6), (1, 2, 7)):
        mine, theirs = s.logits[row, position].log_softmax(-1), t.logits[row, position].log_softmax(-1)
        expected += 0.5 * (theirs.exp() * (theirs - mine)).sum() - 0.5 * mine[label]
    found = distillation_losses(student, teacher, given, spec)  # type: ignore[arg-type]
    assert_close(found["targets"], expected)
    assert found["tokens"] == 0


def test_only_the_student_has_gradients() -> None:
    student, teacher = pair()
    sum(distillation_losses(student, teacher, batch(), Distillation()).values()).backward()  # type: ignore[union-attr, arg-type]
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for n, p in student.named_parameters() if "segments" not in n)


def test_incompatible_teachers_raise() -> None:
    student, teacher = pair()
    with pytest.raises(UserError, match="needs an encoder as student"):
        check_distillation_pair(make_model(gpt2(1, 16, 2, 30)), teacher, Distillation())
    with pytest.raises(UserError, match="vocabulary"):
        check_distillation_pair(student, make_model(replace(TEACHER, vocab_size=31)), Distillation())
    wide = make_model(bert(1, 32, 2, 30))
    with pytest.raises(UserError, match=r"distillation.cosine=0"):
        check_distillation_pair(student, wide, Distillation())
    check_distillation_pair(student, wide, Distillation(cosine=0.0))
    with pytest.raises(UserError, match="temperature"):
        Distillation(temperature=0.0)
