"""Layer-wise knowledge transfer by hand, its stages, and which weights it trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import Encoder, KnowledgeTransfer, TransferLoss, check_transfer_pair, init_from_teacher, make_model
from firth.models.distill_config import MOBILEBERT_DISTILLATION
from firth.models.presets import ib_bert, mobilebert
from firth.objectives import Batch

TEACHER = ib_bert(2, 16, 2, 24, 8, 30, dropout=0.0, attention_dropout=0.0)
STUDENT = mobilebert(2, 16, 2, 8, 8, 30, attention_dropout=0.0)


def pair() -> tuple[Encoder, Encoder]:
    torch.manual_seed(0)
    models = make_model(STUDENT), make_model(TEACHER).eval()
    with torch.no_grad():
        for p in (p for model in models for p in model.parameters()):
            p.add_(torch.randn_like(p) * 0.1)
    assert all(isinstance(model, Encoder) for model in models)
    return models  # type: ignore[return-value]


def batch() -> Batch:
    return Batch(
        torch.randint(5, 30, (2, 7)),
        document_ids=torch.tensor([[0] * 7, [0] * 5 + [-1] * 2]),
        target_positions=torch.tensor([[1, 4, 0], [2, 0, 0]]),
        labels=torch.tensor([[5, 6, -100], [7, -100, -100]]),
    )


def losses(student: Encoder, teacher: Encoder, given: Batch, progress: float, **fields: object) -> dict[str, Tensor]:
    loss = TransferLoss(student, teacher, MOBILEBERT_DISTILLATION, KnowledgeTransfer(**fields))  # type: ignore[arg-type]
    loss.set_progress(progress)
    return loss(given)


def test_the_loss_of_a_layer_by_hand() -> None:
    """Equations 1 and 2 of the paper, with the differences of means and variances, token by token."""
    student, teacher = pair()
    given, expected = batch(), 0.0
    fields = dict(strategy="progressive", feature_map=3.0, mean=5.0, variance=7.0, attention=2.0)
    for row, length in ((0, 7), (1, 5)):
        ids = given.input_ids[row : row + 1, :length]
        s, t = (m(ids, output_hidden_states=True, output_attentions=True) for m in (student.eval(), teacher))
        for i in range(length):
            x, y = s.hidden_states[2][0, i].double(), t.hidden_states[2][0, i].double()
            a, b = (v - v.mean() for v in (x, y))
            sizes = [(v.square().mean() + 1e-5).sqrt() for v in (a, b)]
            expected += 3 * (a / sizes[0] - b / sizes[1]).square().mean() + 5 * (x.mean() - y.mean()) ** 2
            expected += 7 * (a.square().mean() - b.square().mean()).abs()
            for head in range(2):
                mine, theirs = (out.attentions[1][0, head, i] for out in (s, t))
                expected += (theirs * (theirs / mine).log()).sum()  # weight 2, mean over 2 heads
    found = losses(student, teacher, given, 0.31, **fields)
    assert set(found) == {
        "tokens",
        *(f"{name}_loss/tokens" for name in ("feature_map", "mean", "variance", "attention")),
    }
    assert_close(found["tokens"].double(), expected, rtol=1e-5, atol=0)


def test_stages() -> None:
    """Layer after layer, then distillation; or all at once; or both together."""
    spec = KnowledgeTransfer("progressive", share=0.5)
    assert [list(spec.layers_at(p, 2)) for p in (0, 0.24, 0.25, 0.49, 0.5, 0.99)] == [[0], [0], [1], [1], [], []]
    assert [spec.distills_at(p) for p in (0, 0.49, 0.5)] == [False, False, True]
    assert [spec.rate_factor(p, 2, 0) for p in (0, 0.25, 0.5)] == [1, 0.1, 1]
    joint, beside = replace(spec, strategy="joint"), replace(spec, strategy="auxiliary")
    assert [list(joint.layers_at(p, 2)) for p in (0, 0.5)] == [[0, 1], []]
    assert [list(beside.layers_at(p, 2)) for p in (0, 0.5)] == [[0, 1], [0, 1]]
    assert (joint.distills_at(0), beside.distills_at(0)) == (False, True)


@pytest.mark.parametrize(("progress", "trained"), [(0.0, {"0"}), (0.2, {"0", "1"})])
def test_a_stage_trains_its_layer_and_those_below(progress: float, trained: set[str]) -> None:
    """Embeddings, head and the layers above have no gradient, so no optimizer moves them."""
    student, teacher = pair()
    found = losses(student, teacher, batch(), progress, strategy="progressive")
    found["tokens"].backward()
    moved = {n for n, p in student.named_parameters() if p.grad is not None}
    assert moved == {n for n, _ in student.named_parameters() if n.startswith("stack.") and n.split(".")[2] in trained}
    assert all(p.grad is None for p in teacher.parameters())


def test_distillation_follows_and_may_run_beside() -> None:
    student, teacher = pair()
    after = losses(student, teacher, batch(), 0.5, strategy="progressive")
    assert set(after) == {"targets", "tokens", "mlm_loss/targets", "soft_loss/targets"}
    assert after["tokens"] == 0  # no cosine loss
    beside = losses(student, teacher, batch(), 0.0, strategy="auxiliary")
    assert beside["tokens"] > 0
    assert beside["targets"] > 0
    same = losses(teacher, teacher, batch(), 0.0, strategy="joint")
    assert same["tokens"].item() == pytest.approx(0, abs=1e-5)


def test_embeddings_and_head_come_from_the_teacher() -> None:
    student, teacher = pair()
    before = {n: p.clone() for n, p in student.state_dict().items()}
    init_from_teacher(student, teacher)
    theirs = teacher.state_dict()
    for name, p in student.state_dict().items():
        is_copied = name.startswith(("embed.", "head.")) and not name.startswith("embed.norm")
        assert_close(p, theirs[name] if is_copied else before[name], atol=0, rtol=0)


def test_layers_that_cannot_be_compared() -> None:
    student, _ = pair()
    for change in ({"num_layers": 3}, {"dim": 32}, {"num_heads": 4}):
        with pytest.raises(UserError, match=f"model.{next(iter(change))} is"):
            check_transfer_pair(student, make_model(replace(TEACHER, **change)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="share"):
        KnowledgeTransfer(share=0.0)
