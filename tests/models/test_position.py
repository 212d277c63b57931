"""Relative distances fall into the right buckets."""

from __future__ import annotations

import torch

from firth.models.config import Buckets
from firth.models.position import BucketScore, bucket


def test_buckets_of_what_came_before() -> None:
    """8 buckets up to 16 away: 0 to 3 have one each, then 4-5, 6-7, 8-11, 12 and beyond."""
    back = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16, 1000])
    wanted = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7]
    assert bucket(-back, num=8, far=16, both_ways=False).tolist() == wanted


def test_what_comes_after_counts_as_here_where_nobody_sees_it() -> None:
    assert bucket(torch.tensor([1, 5, 100]), num=8, far=16, both_ways=False).tolist() == [0, 0, 0]


def test_buckets_both_ways() -> None:
    """Half of the 8 buckets for each side: 0, 1, then 2-5 and 6 and beyond share; after is 4 more."""
    distance = torch.tensor([-100, -6, -5, -2, -1, 0, 1, 2, 5, 6, 100])
    wanted = [3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7]
    assert bucket(distance, num=8, far=16, both_ways=True).tolist() == wanted


def test_score_of_each_head() -> None:
    score = BucketScore(Buckets(4, 8), num_heads=2, both_ways=False)
    score.table.weight.data = torch.tensor([[0.0, 100.0], [1.0, 101.0], [2.0, 102.0], [3.0, 103.0]])
    first, second = score(3)[0]
    assert first.tolist() == [[0, 0, 0], [1, 0, 0], [2, 1, 0]]
    assert (second - first).unique().tolist() == [100]
