"""What the tests of one family against `transformers` share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models import Model
from firth.models.hf.convert import to_hf_tensors

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def stir(model: Any, seed: int = 0, by: float = 0.1) -> Any:
    """Move every weight, so that no bias of 0 and no norm of 1 hides a mistake."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * by)
    return model.eval()


def mixture(logits: Tensor) -> Tensor:
    """One number of some logits, to take gradients of."""
    return (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).mean()


def gradients_in_their_names(model: Model) -> dict[str, Tensor]:
    """Our gradients through the converter; 0 where there is none."""
    mirror = copy.deepcopy(model)
    for p, q in zip(mirror.parameters(), model.parameters(), strict=True):
        p.data = torch.zeros_like(q) if q.grad is None else q.grad
    return to_hf_tensors(mirror)


def same_gradients(ours: Model, theirs: Any) -> None:
    """After a backward pass of both."""
    found = gradients_in_their_names(ours)
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert wanted
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")
    for name in found.keys() - wanted.keys():
        assert not found[name].any(), f"{name} has a gradient here, and none there"
