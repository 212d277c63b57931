"""Count keys in bounded memory: exactly while they fit, then with a uniform sample of the keys.

The sample is chosen by a hash of the key, as in distinct sampling (Gibbons 2001): whether a key is in it does not
depend on when or how often it occurs. So the sample estimates the number of distinct keys and their frequencies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Generic, TypeVar
from zlib import crc32

import numpy as np

CountKeyT = TypeVar("CountKeyT", str, bytes)


class BoundedCounts(Generic[CountKeyT]):
    """Counts of at most `max_keys` keys.

    When more keys arrive, rare keys are evicted, except for a sample: keys whose CRC-32 ends in `sample_level` zero
    bits, first 1/2 of all keys, then 1/4, and so on. A sampled key is never evicted: its count is exact, and it
    represents `2**sample_level` keys. Frequent keys stay as well, with an undercount of at most `max_undercount`.

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
        """Keep the `max_keys // 4` most frequent keys and the sample; halve the sample until all fit in 3/4."""
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
        """Number of distinct keys: exact, or estimated from the sample."""
        if self.is_exact:
            return len(self.counts)
        return sum(map(self._is_sampled, self.counts)) << self.sample_level

    def frequency_spectrum(self) -> tuple[np.ndarray, np.ndarray]:
        """Return descending counts, and the number of keys that each count represents.

        A key with a count far above `max_undercount` represents itself alone: its relative error is below 10%.
        """
        reliable = 1 + 10 * self.max_undercount
        weighted = [(n, 1) for n in self.counts.values() if n >= reliable]
        if not self.is_exact:
            weighted += [
                (n, 1 << self.sample_level) for key, n in self.counts.items() if n < reliable and self._is_sampled(key)
            ]
        ordered = np.array(sorted(weighted, reverse=True), dtype=np.int64).reshape(-1, 2)
        return ordered[:, 0], ordered[:, 1]

    def most_common(self, n: int) -> list[tuple[CountKeyT, int]]:
        """Return the `n` most frequent keys; ties are in alphabetical order."""
        if not self.counts:
            return []
        counts = np.fromiter(self.counts.values(), np.int64, len(self.counts))
        min_count = np.partition(counts, -n)[-n] if len(counts) > n else 0
        return sorted(((k, c) for k, c in self.counts.items() if c >= min_count), key=lambda kc: (-kc[1], kc[0]))[:n]
