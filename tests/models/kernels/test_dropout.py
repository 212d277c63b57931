"""Dropout: its distribution, seeds and memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.testing import assert_close

from firth.models.kernels.dropout import Dropout, cpu_dropout_mask, factored_dropout_mask, fast_dropout


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_rate_and_mean(rate: float) -> None:
    """A million values: the rate is right to five standard deviations, also within each of the four 16-bit words."""
    n = cpu_dropout_mask(torch.Size([1000, 1000]), rate)
    values = n.unique()
    assert_close(values, torch.tensor([0, 1 / (1 - rate)]), rtol=1e-5, atol=0)
    share = (n.view(-1, 4) == 0).float().mean(0)
    assert (share - rate).abs().max() < 5 * (rate * (1 - rate) / 250_000) ** 0.5


def test_neighbours_are_independent() -> None:
    """Both of two neighbours are dropped in a quarter of all cases, for any of the four words."""
    dropped = cpu_dropout_mask(torch.Size([1_000_000]), 0.5) == 0
    both = (dropped[:-4] & dropped[1:-3]).view(-1, 4).float().mean(0)
    assert (both - 0.25).abs().max() < 5 * (0.25 * 0.75 / 250_000) ** 0.5


def test_the_seed_determines_the_mask() -> None:
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return cpu_dropout_mask(torch.Size([3, 7]), 0.5)  # 21 numbers, no whole number of 64-bit words

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_the_gradient_is_dropped_where_the_value_is() -> None:
    x = torch.ones(4, 50, requires_grad=True)
    y = fast_dropout(x, 0.3)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert 0 < int((y == 0).sum()) < 200


def test_only_in_training_and_not_at_rate_0() -> None:
    x = torch.randn(50, 50)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not torch.equal(Dropout(0.5)(x), x)


# --- in a compiled step


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_are_as_independent_as_random_numbers(rate: float) -> None:
    """The rate of the whole, of rows and columns; correlations of rows, columns and seeds."""
    N = 512
    variance, before = rate * (1 - rate), None
    for seed in range(8):
        torch.manual_seed(seed)
        n = factored_dropout_mask(torch.Size([2, N // 2, N]), rate, torch.device("cpu")).view(N, N)
        assert_close(n.unique(), torch.tensor([0, 1 / (1 - rate)]))
        z = (n > 0).double() - (1 - rate)
        assert z.mean().abs() < 5 * (variance / N**2) ** 0.5
        for way in (z, z.t()):
            assert abs(way.mean(1).var().item() * N / variance - 1) < 0.35
            together = (way @ way.t() / (N * variance))[~torch.eye(N, dtype=torch.bool)]
            assert abs(together.var().item() * N - 1) < 0.05
        if before is not None:
            assert (z * before).mean().abs() < 5 * variance / N
        before = z


def test_masks_are_recomputed_in_backward() -> None:
    """Two layers with dropout save no more for the backward pass than the norms' inputs and vectors."""
    sizes: list[int] = []

    def backward_pass(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.extend(n.meta["val"].numel() for n in graph.graph.nodes if n.op == "placeholder")
        return make_boxed_func(graph.forward)

    def layers(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            y = x @ matrix
            x = F.layer_norm(x + y * factored_dropout_mask(y.shape, 0.1, y.device), (64,))
        return x

    compiler = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=backward_pass,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    x, matrix = torch.randn(32, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    torch.compile(layers, backend=compiler)(x, matrix).sum().backward()
    assert sum(size == 32 * 64 for size in sizes) <= 7  # what each product reads, each norm makes, and the gradient
    torch._dynamo.reset()
