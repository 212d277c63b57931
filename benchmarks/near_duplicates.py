"""Near duplicates that are planted in made-up text: is each one found, and nothing else, and how fast?

Knows nothing of Firth: `measure` takes any function that says whether a text is nearly one that came before.
`python benchmarks/near_duplicates.py` measures Firth beside datasketch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NGRAM = 5
THRESHOLD = 0.8


class Planted(NamedTuple):
    """Texts in order, and for each how like its original it is: the Jaccard index, or 0 for a text that is new."""

    texts: list[str]
    likeness: np.ndarray


def plant(num_originals: int = 5000, words: int = 200, seed: int = 0, clear: bool = True) -> Planted:
    """Originals, each followed somewhere by a copy in which some words were changed.

    With `clear`, half of the copies are plainly duplicates (0.85 and more) and half plainly not (0.7 and less); without
    it they lie anywhere, also at the threshold itself, where no estimate can decide.
    """
    random = np.random.default_rng(seed)
    vocabulary = np.array(["".join(map(chr, random.integers(97, 123, n))) for n in random.integers(2, 11, 20_000)])
    texts: list[str] = []
    likeness: list[float] = []
    originals = [vocabulary[zipf(random, size)] for size in random.integers(words // 4, 2 * words, num_originals)]
    texts += [" ".join(original) for original in originals]
    likeness += [0.0] * num_originals
    while len(texts) < 2 * num_originals:
        original = originals[len(texts) - num_originals]
        copy = original.copy()
        changes = int(random.beta(0.5, 0.5) * len(copy) * 0.2)
        copy[random.integers(0, len(copy), changes)] = vocabulary[zipf(random, changes)]
        index = jaccard(original.tolist(), copy.tolist())
        if not clear or index >= 0.85 or index <= 0.7:
            texts.append(" ".join(copy))
            likeness.append(index)
    order = np.concatenate([np.arange(num_originals), num_originals + random.permutation(num_originals)])
    return Planted([texts[i] for i in order], np.array(likeness)[order])


def zipf(random: np.random.Generator, n: int) -> np.ndarray:
    """Words as frequent as words are."""
    return np.minimum(random.zipf(1.3, n), 20_000) - 1


def jaccard(a: list[str], b: list[str]) -> float:
    """Shared runs of words over all runs of words."""
    one, other = ({tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)} for words in (a, b))
    return len(one & other) / len(one | other)


def measure(seen: Callable[[str], bool], planted: Planted) -> dict[str, float]:
    """How right and how fast a function is that says of each text in turn whether one like it came before."""
    start = time.perf_counter()
    found = np.array([seen(text) for text in planted.texts])
    seconds = time.perf_counter() - start
    truth = planted.likeness >= THRESHOLD
    return {
        "precision": float((found & truth).sum() / max(found.sum(), 1)),
        "recall": float((found & truth).sum() / max(truth.sum(), 1)),
        "texts_per_second": len(found) / seconds,
        "megabytes_per_second": sum(map(len, planted.texts)) / seconds / 1e6,
    }


def datasketch_seen() -> Callable[[str], bool]:
    """The same question asked of datasketch: MinHash, banded lookup, and a check of what that finds."""
    from datasketch import MinHash, MinHashLSH

    index, kept = MinHashLSH(threshold=THRESHOLD, num_perm=128, weights=(0.1, 0.9)), {}

    def seen(text: str) -> bool:
        words = text.lower().split()
        runs = {" ".join(words[i : i + NGRAM]).encode() for i in range(len(words) - NGRAM + 1)}
        mine = MinHash(num_perm=128)
        mine.update_batch(runs)
        if any(kept[key].jaccard(mine) >= THRESHOLD for key in index.query(mine)):
            return True
        kept[len(kept)] = mine
        index.insert(len(kept) - 1, mine)
        return False

    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--originals", type=int, default=5000)
    parser.add_argument("--words", type=int, default=200)
    args = parser.parse_args()
    from firth.text.minhash import MinHashIndex

    for clear in (True, False):
        planted = plant(args.originals, args.words, clear=clear)
        print(
            f"{len(planted.texts):,} texts, " + ("copies plainly like or unlike" if clear else "copies of any likeness")
        )
        for name, seen in {"firth": MinHashIndex().check_and_add, "datasketch": datasketch_seen()}.items():
            print(f"  {name:11}", "  ".join(f"{key} {value:,.4g}" for key, value in measure(seen, planted).items()))


if __name__ == "__main__":
    main()
