"""The cross-entropy kernels against eager operations: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models.kernels.test_glu import DEVICE, on_a_gpu
from torch import Tensor
from torch.testing import assert_close

from firth.models.kernels import cross_entropy
from firth.models.kernels.cross_entropy import logits_to_grad_eager, logits_to_grad_triton

N, V = 12, 5003
FAR_APART = {"near": 0.0, "a later one far above": 200.0, "all but one far above": 500.0, "far below": -500.0}


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("far", FAR_APART)
def test_losses_and_gradients(far: str, dtype: torch.dtype) -> None:
    """The padding is 45 wide; logits of tokens 2,100 to 4,200, which a later tile reads, are far from the others."""
    torch.manual_seed(0)
    labels = torch.randint(0, V, (N,), device=DEVICE)
    labels[::7] = -100
    labels[1], labels[2], labels[3] = 0, V - 1, 3000
    scores = 3 * torch.randn(N, V + 45, device=DEVICE)
    scores[:, 2100:4200] += FAR_APART[far]
    scores[4, 4500] += 2 * FAR_APART[far]
    mine = scores.to(dtype)
    other = mine.float().clone()
    wanted = logits_to_grad_eager(other, labels, V)[0]
    loss, share_N1 = logits_to_grad_triton(mine, labels, V)
    assert_close(loss, wanted, rtol=1e-5, atol=0)
    assert_close(mine * share_N1, other, rtol=2e-4 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert mine[:, V:].abs().max() == 0
    assert mine.isfinite().all()


@pytest.mark.parametrize("piece", [4, 12])
def test_unscaled_gradients(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel stores them, before the scaling."""

    def scaled(scores_NP: Tensor, labels_N: Tensor, V: int) -> tuple[Tensor, Tensor]:
        loss, share_N1 = logits_to_grad_eager(scores_NP, labels_N, V)
        sum_N1 = torch.linspace(1, 1e6, len(scores_NP))[:, None]
        scores_NP *= sum_N1
        return loss, share_N1 / sum_N1

    monkeypatch.setattr(cross_entropy, "logits_to_grad", scaled)
    monkeypatch.setattr(cross_entropy, "loss_chunk_rows", lambda N, P: piece)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((N, 8), (40, 8), (40,)))
    labels = torch.arange(N)
    labels[::5] = -100
    found = torch.autograd.grad(cross_entropy.linear_cross_entropy_op(x, weight, bias, labels, 3)[0], (x, weight, bias))
    plain = F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")
    for mine, other in zip(found, torch.autograd.grad(plain, (x, weight, bias)), strict=True):
        assert_close(mine, other)


def test_ignored_labels_have_no_gradient() -> None:
    scores, labels = torch.randn(3, 40), torch.tensor([5, -100, 39])
    _, share_N1 = logits_to_grad_eager(scores, labels, 40)
    assert (scores * share_N1)[1].abs().max() == 0
