"""The last layer at target positions only, against all positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.test_presets import NEEDS
from torch import Tensor

from firth.models import PRESETS, Model, make_model, with_extras
from firth.models.backbone import Stack
from firth.models.bottleneck import BottleneckBlock
from firth.models.fp8.convert import convert_to_fp8
from firth.models.model import Encoder
from firth.models.presets import bag_of_words
from firth.objectives import Batch

NARROW = ("bert", "roberta", "albert", "distilbert", "modernbert", "spanbert", "xlm-roberta", "rembert", "mobilebert")
WIDE = ("deberta", "deberta-v3", "electra", "xlnet", "gpt2", "llama")
B, T, K = 3, 20, 4


def model_of(name: str, **changes: object) -> Encoder:
    config = replace(PRESETS[f"{name}-tiny"], vocab_size=50, **changes)
    torch.manual_seed(0)
    model = make_model(with_extras(config, NEEDS.get(config.family, ())))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)  # norms and biases too
    assert isinstance(model, Encoder)
    return model


def masked(packed: bool) -> Batch:
    torch.manual_seed(1)
    positions = torch.rand(B, T).argsort(1)[:, :K].sort(1).values
    positions[1, 3] = 0  # what is left over
    labels = torch.randint(7, 50, (B, K))
    labels[1, 3] = -100
    cut = torch.arange(T).expand(B, T)
    doc = torch.where(cut < torch.tensor([[5], [12], [20]]), 0, 1)
    doc[0, 18:] = -1
    if packed:
        position_ids = torch.where(doc == 0, cut, cut - (doc == 0).sum(1, keepdim=True)).clamp(min=0)
        return Batch(torch.randint(7, 50, (B, T)), doc, position_ids, target_positions=positions, labels=labels)
    return Batch(torch.randint(7, 50, (B, T)), target_positions=positions, labels=labels)


def narrowed(model: Model, narrows: bool) -> None:
    for module in model.modules():
        if isinstance(module, Stack):
            module.last_layer_targets_only = narrows


def found(model: Encoder, batch: Batch) -> tuple[Tensor, list[Tensor], int]:
    """The loss, all gradients, and the number of positions that the last MLP computed."""
    widths: list[int] = []
    block = model.stack.layers[-1]
    last = block.mlps[-1] if isinstance(block, BottleneckBlock) else block.mlp
    hook = last.register_forward_hook(lambda module, inputs, y: widths.append(inputs[0].shape[1]))
    loss = model.loss(batch)
    hook.remove()
    ps = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, ps, allow_unused=True)
    return loss.detach(), [torch.zeros(()) if g is None else g for g in grads], widths[-1]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_loss_and_gradients_are_equal(name: str, packed: bool) -> None:
    model, batch = model_of(name, dropout=0.0, attention_dropout=0.0).train(), masked(packed)
    narrowed(model, False)
    loss, grads, widths = found(model, batch)
    narrowed(model, True)
    again, others, fewer = found(model, batch)
    assert (widths, fewer) == (T, K)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    for a, b in zip(others, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.logits(batch), model.head(model.hidden_states(batch), model.embed.tokens.weight)[
        torch.arange(B)[:, None], batch.target_positions
    ], rtol=1e-4, atol=1e-4)  # fmt: skip


@pytest.mark.parametrize("name", ["bert", pytest.param("modernbert", marks=pytest.mark.slow)])
def test_one_layer_and_compiled(name: str) -> None:
    torch._dynamo.reset()
    model, batch = model_of(name, num_layers=1, dropout=0.0, attention_dropout=0.0).train(), masked(True)
    wanted = found(model, batch)
    narrowed(model, True)
    loss = torch.compile(model.loss, backend="aot_eager")(batch)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(loss.detach(), wanted[0], rtol=1e-5, atol=0)
    for a, b in zip(grads, wanted[1], strict=True):
        torch.testing.assert_close(torch.zeros(()) if a is None else a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WIDE)
def test_models_that_compute_all_positions(name: str) -> None:
    model = model_of(name)
    narrowed(model, True)
    assert (
        not model.stack.can_compute_targets_only(torch.zeros(1, 1, dtype=torch.long), T) or model.generator is not None
    )


def test_many_targets_or_disabled() -> None:
    stack = model_of("bert").stack
    few, most = torch.zeros(1, T // 2, dtype=torch.long), torch.zeros(1, T // 2 + 1, dtype=torch.long)
    assert not stack.can_compute_targets_only(few, T)
    stack.last_layer_targets_only = True
    assert stack.can_compute_targets_only(few, T)
    assert not stack.can_compute_targets_only(most, T)
    assert not model_of("bert", layer_drop=0.1).stack.can_compute_targets_only(few, T)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_with_fp8_targets_are_padded_to_16(dtype: torch.dtype) -> None:
    """3 rows of 4 targets are not a multiple of 16: FP8 computes 16 per row, of 32 positions."""
    model = model_of("bert", dropout=0.0, attention_dropout=0.0).train()
    targets = torch.tensor([[1, 5, 9, 30], [0, 2, 17, 0], [3, 4, 6, 7]], dtype=dtype)
    batch = Batch(torch.randint(7, 50, (B, 32)), target_positions=targets, labels=torch.randint(7, 50, (B, K)))
    convert_to_fp8(model, torch.device("cpu"))
    exact = found(model.eval(), batch)
    narrowed(model.train(), True)
    loss, grads, widths = found(model, batch)
    assert widths == 16
    assert float(loss) == pytest.approx(float(exact[0]), rel=0.02)
    for a, b in zip(grads, exact[1], strict=True):
        assert (a - b).norm() < 0.15 * b.norm() + 1e-3


def test_a_model_without_layers() -> None:
    model, tokens = make_model(bag_of_words(50, 8)), torch.randint(5, 50, (2, 8))
    narrowed(model, True)
    assert model.logits(Batch(tokens, target_positions=torch.tensor([[1], [2]]))).shape == (2, 1, 50)


def test_other_heads_still_read_all_positions() -> None:
    """The sentence-pair head reads the first position."""
    config = replace(PRESETS["bert-tiny"], vocab_size=50)
    model = make_model(with_extras(config, ("pair",))).eval()
    batch = masked(False)._replace(pair_labels=torch.tensor([0, 1, 1]))
    wanted = model.losses(batch)
    narrowed(model, True)
    again = model.losses(batch)
    assert set(again) == {"targets", "pairs"}
    for name, loss in wanted.items():
        torch.testing.assert_close(again[name], loss)
