"""T5's buckets and ALiBi's slopes, by hand."""

from __future__ import annotations

import torch

from firth.models.config import T5Bias
from firth.models.position.bias import AlibiBias, T5BiasTable, alibi_slopes, t5_bucket


def test_causal_buckets() -> None:
    """8 buckets up to distance 16: 0 to 3 have one each, then 4-5, 6-7, 8-11, 12 and beyond."""
    distance = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16, 1000])
    expected = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7]
    assert t5_bucket(-distance, num_buckets=8, max_distance=16, is_bidirectional=False).tolist() == expected


def test_causal_buckets_count_later_keys_as_distance_0() -> None:
    assert (
        t5_bucket(torch.tensor([1, 5, 100]), num_buckets=8, max_distance=16, is_bidirectional=False).tolist() == [0] * 3
    )


def test_bidirectional_buckets() -> None:
    """4 of the 8 buckets for each side: 0, 1, 2-5, 6 and beyond; keys after the query add 4."""
    distance = torch.tensor([-100, -6, -5, -2, -1, 0, 1, 2, 5, 6, 100])
    expected = [3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7]
    assert t5_bucket(distance, num_buckets=8, max_distance=16, is_bidirectional=True).tolist() == expected


def test_bias_of_each_head() -> None:
    bias = T5BiasTable(T5Bias(4, 8), num_heads=2, is_bidirectional=False)
    bias.table.weight.data = torch.tensor([[0.0, 100.0], [1.0, 101.0], [2.0, 102.0], [3.0, 103.0]])
    first, second = bias(3, 3)[0]
    assert first.tolist() == [[0, 0, 0], [1, 0, 0], [2, 1, 0]]
    assert (second - first).unique().tolist() == [100]


def test_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert len(alibi_slopes(12)) == 12
    assert alibi_slopes(12)[:8] == alibi_slopes(8)
    assert alibi_slopes(12)[8:] == alibi_slopes(16)[0:8:2]


def test_slopes_by_hand() -> None:
    bias = AlibiBias(2)(3, 3)[0]
    assert bias[0].tolist() == [[-0.0, -0.0625, -0.125], [-0.0625, -0.0, -0.0625], [-0.125, -0.0625, -0.0]]
    assert bias[1, 0, 2].item() == -2 * 2**-8
