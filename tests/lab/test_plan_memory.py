"""The memory of a whole run on a CPU: its parts, and that freed memory goes back to the system."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from firth.core.memory import peak_memory_bytes, process_memory_bytes, reset_peak_memory, return_freed_memory
from firth.lab.plan_memory import ProcessMemory, counting_bytes, examining_bytes, tokenizing_bytes
from firth.models.ppmi import MAX_COUNTED_TOKENS


def test_the_largest_part_decides() -> None:
    memory = ProcessMemory(libraries=390e6, tokenizing=20e6, counting=200e6, training=150e6, examining=100e6)
    assert memory.peak == 590e6
    assert memory._replace(training=900e6).peak == 1290e6


def test_parts_grow_more_slowly_than_the_text() -> None:
    for part in (tokenizing_bytes, counting_bytes):
        assert 1 < part(20e6) / part(10e6) < 2
    assert counting_bytes(1e12) == counting_bytes(MAX_COUNTED_TOKENS)
    assert examining_bytes(1e12, 1000) == examining_bytes(2e6, 2000) - 8000
    assert tokenizing_bytes(10e6, "wordpiece") > tokenizing_bytes(10e6, "byte-bpe") == tokenizing_bytes(10e6)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_peak_is_counted_from_its_reset() -> None:
    np.ones(2**24, np.float32).sum()
    assert reset_peak_memory()
    before = process_memory_bytes()
    ones = np.ones(2**23, np.float32)
    assert 2**25 <= peak_memory_bytes() - before < 2**25 + 8e6
    assert process_memory_bytes() - before > 0.9 * ones.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_blocks_between_live_ones_go_back_to_the_system() -> None:
    """100 KB are below the size that the allocator takes from the system one by one."""
    blocks = [np.ones(25_000, np.float32) for _ in range(2000)]
    full, live = process_memory_bytes(), blocks[::20]
    del blocks
    return_freed_memory()
    assert full - process_memory_bytes() > 150e6
    assert len(live) == 100
