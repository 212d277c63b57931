"""Products in 8 bits against the same products in floating point, and runs that learn by them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from firth.errors import UserError
from firth.models import make_model
from firth.models.config import MLP
from firth.models.presets import bert, gpt2
from firth.train import Recipe, Training, pretrain, read_log
from firth.train.eight import EXACT, WIDE, Linear8, Product8, in_eight_bits, use_eight_bits

CPU = torch.device("cpu")


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    eight, scale = in_eight_bits(x, dtype)
    return eight.float() * scale


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.float() - y).norm() / y.norm())


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e4])
def test_products_are_those_of_the_rounded_numbers(size: float) -> None:
    torch.manual_seed(0)
    x, w, dy = torch.randn(32, 48) * size, torch.randn(64, 48) * 0.02, torch.randn(32, 64) * 1e-4
    x.requires_grad_()
    w.requires_grad_()
    y = Product8.apply(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), dy.to(y.dtype))
    x8, w8, dy8 = rounded(x.detach(), EXACT), rounded(w.detach(), EXACT), rounded(dy.bfloat16(), WIDE)
    for mine, exact, whole in ((y, x8 @ w8.T, x @ w.T), (dx, dy8 @ w8, dy @ w), (dw, dy8.T @ x8, dy.T @ x)):
        assert far(mine.detach(), exact) < 5e-3  # bfloat16
        assert far(mine.detach(), whole.detach()) < 0.08  # 8 bits
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_numbers_of_0_stay_0() -> None:
    eight, scale = in_eight_bits(torch.zeros(16, 16), EXACT)
    assert not (eight.float() * scale).any()


def test_only_learning_is_in_eight_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """All layers of the blocks but those of an odd width; a model that is only asked is exact."""
    torch.manual_seed(0)
    model = make_model(bert(2, 32, 2, 100, mlp=MLP(72, "gelu"), dropout=0.0, attention_dropout=0.0)).eval()
    twin = copy.deepcopy(model)
    use_eight_bits(model, CPU)
    kinds = {name: type(layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert {name.rpartition(".")[2] for name, kind in kinds.items() if kind is Linear8} == {"qkv", "out"}
    assert "4 layers are not a multiple of 16 wide" in " ".join(capsys.readouterr().err.split())
    tokens = torch.randint(5, 100, (4, 16))
    assert_close(model(tokens).logits, twin(tokens).logits, rtol=0, atol=0)
    found = model.train()(tokens).logits
    assert 0 < far(found.detach(), twin.train()(tokens).logits.detach()) < 0.2
    odd = torch.randint(5, 100, (1, 15))  # places that are no multiple either
    assert_close(model(odd).logits, twin(odd).logits, rtol=0, atol=0)


def test_a_run_learns_by_it(recipe_of: Callable[..., Recipe]) -> None:
    fields = {"max_steps": 30, "save_steps": 100, "learning_rate": 5e-3, "optim": "muon"}
    recipe = recipe_of("gpt2", fp8=True, **fields)
    pretrain(recipe)
    losses = [line["loss"] for line in read_log(Path(recipe.output_dir) / "log.jsonl") if "loss" in line]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5


def test_what_it_does_not_go_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ({"fp16": True}, {"parallel": "fsdp"}):
        with pytest.raises(UserError, match="fp8"):
            Training(fp8=True, max_steps=1, **other).check()  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no layers whose widths are multiples of 16"):
        use_eight_bits(make_model(gpt2(1, 24, 2, vocab_size=50)), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    with pytest.raises(UserError, match="an older GPU has no products in 8 bits"):
        use_eight_bits(make_model(gpt2(1, 32, 2, vocab_size=50)), torch.device("cuda"))
