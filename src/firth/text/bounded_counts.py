"""Counts of whatever comes, in bounded memory: exact while there is room, then a fair sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Generic, TypeVar
from zlib import crc32

import numpy as np

CountKeyT = TypeVar("CountKeyT", str, bytes)


class BoundedCounts(Generic[CountKeyT]):
    """How often each key came, for at most `max_keys` keys.

    When there are more, rare keys are forgotten, except for a sample: those whose checksum ends in `sample_level` zero bits,
    a half of all keys, then a quarter and so on. A key of the sample was never forgotten, so its count is exact and
    it stands for `2**level` keys. Frequent keys stay as well; a count of theirs is short by at most `max_undercount`.

    >>> counts = BoundedCounts(max_keys=100)
    >>> counts.add(["a", "b", "a"])
    >>> counts.total, counts.num_distinct(), counts.most_common(1), counts.is_exact
    (3, 2, [('a', 2)], True)
    """

    def __init__(self, max_keys: int) -> None:
        assert max_keys >= 8
        self.max_keys = max_keys
        self.counts: Counter[CountKeyT] = Counter()
        self.total = 0
        self.sample_level = 0
        self.max_undercount = 0

    @property
    def is_exact(self) -> bool:
        return self.sample_level == 0

    def add(self, keys: Collection[CountKeyT]) -> None:
        self.counts.update(keys)
        self.total += len(keys)
        if len(self.counts) > self.max_keys:
            self._evict_rare_keys()

    def _evict_rare_keys(self) -> None:
        """Keep the sample, made smaller if it takes too much room, and the most frequent quarter of what has room."""
        ranked = sorted(self.counts.values(), reverse=True)
        frequent = ranked[self.max_keys // 4] + 1
        self.max_undercount += frequent - 1
        while True:
            self.counts = Counter({k: n for k, n in self.counts.items() if n >= frequent or self._is_sampled(k)})
            if len(self.counts) <= self.max_keys * 3 // 4:
                break
            self.sample_level += 1

    def _is_sampled(self, key: CountKeyT) -> bool:
        data = key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")
        return crc32(data) % (1 << self.sample_level) == 0

    def num_distinct(self) -> int:
        """How many different keys came: exact, or estimated from the sample."""
        if self.is_exact:
            return len(self.counts)
        return sum(map(self._is_sampled, self.counts)) << self.sample_level

    def frequency_spectrum(self) -> tuple[np.ndarray, np.ndarray]:
        """Falling counts, and for how many keys each of them stands.

        A key stands for itself alone when it is so frequent that what was missed of it is little.
        """
        sure = 1 + 10 * self.max_undercount
        found = [(n, 1) for n in self.counts.values() if n >= sure]
        if not self.is_exact:
            found += [
                (n, 1 << self.sample_level) for key, n in self.counts.items() if n < sure and self._is_sampled(key)
            ]
        ordered = np.array(sorted(found, reverse=True), dtype=np.int64).reshape(-1, 2)
        return ordered[:, 0], ordered[:, 1]

    def most_common(self, n: int) -> list[tuple[CountKeyT, int]]:
        """The most frequent keys; of equal ones the first in order of the alphabet."""
        if not self.counts:
            return []
        ranked = np.fromiter(self.counts.values(), np.int64, len(self.counts))
        least = np.partition(ranked, -n)[-n] if len(ranked) > n else 0
        return sorted(((k, c) for k, c in self.counts.items() if c >= least), key=lambda kc: (-kc[1], kc[0]))[:n]
