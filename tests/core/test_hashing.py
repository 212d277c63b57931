"""The counter-based hash is splitmix64, element by element."""

from __future__ import annotations

import numpy as np

from firth.core.hashing import hash_uint64


def test_hash_uint64() -> None:
    assert hash_uint64(0) == 0xE220A8397B1DCDAF  # the first number of splitmix64 from state 0
    assert len({int(hash_uint64(a, b)) for a in range(-20, 20) for b in range(40)}) == 1600
    assert hash_uint64(3, np.arange(5))[4] == hash_uint64(3, 4)
    assert hash_uint64(-1) == hash_uint64(2**64 - 1)
