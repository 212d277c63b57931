"""Plant near-duplicates in random text; measure precision, recall and speed of finding them, beside datasketch.

    python benchmarks/near_duplicates.py [--originals 5000] [--words 200]

`measure` takes any function that tells whether a text is a near-duplicate of an earlier one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NGRAM = 5
THRESHOLD = 0.8


class PlantedCorpus(NamedTuple):
    """Texts in order, and the Jaccard index of each with its original; 0 for an original."""

    texts: list[str]
    jaccard_indices: np.ndarray


def plant_duplicates(
    num_originals: int = 5000, words: int = 200, seed: int = 0, unambiguous: bool = True
) -> PlantedCorpus:
    """Return originals, and for each a later copy in which some words are replaced.

    `unambiguous` keeps copies with a Jaccard index of at least 0.85 or at most 0.7. Otherwise some copies lie at the
    threshold, where MinHash, an estimate, must err.
    """
    random = np.random.default_rng(seed)
    vocabulary = np.array(["".join(map(chr, random.integers(97, 123, n))) for n in random.integers(2, 11, 20_000)])
    texts: list[str] = []
    jaccard_indices: list[float] = []
    originals = [vocabulary[zipf(random, size)] for size in random.integers(words // 4, 2 * words, num_originals)]
    texts += [" ".join(original) for original in originals]
    jaccard_indices += [0.0] * num_originals
    while len(texts) < 2 * num_originals:
        original = originals[len(texts) - num_originals]
        copy = original.copy()
        changes = int(random.beta(0.5, 0.5) * len(copy) * 0.2)
        copy[random.integers(0, len(copy), changes)] = vocabulary[zipf(random, changes)]
        jaccard_index = jaccard(original.tolist(), copy.tolist())
        if not unambiguous or jaccard_index >= 0.85 or jaccard_index <= 0.7:
            texts.append(" ".join(copy))
            jaccard_indices.append(jaccard_index)
    order = np.concatenate([np.arange(num_originals), num_originals + random.permutation(num_originals)])
    return PlantedCorpus([texts[i] for i in order], np.array(jaccard_indices)[order])


def zipf(random: np.random.Generator, n: int) -> np.ndarray:
    """Return word indices with a Zipf distribution."""
    return np.minimum(random.zipf(1.3, n), 20_000) - 1


def jaccard(a: list[str], b: list[str]) -> float:
    """Return the Jaccard index of the word n-grams of two texts."""
    first, second = ({tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)} for words in (a, b))
    return len(first & second) / len(first | second)


def measure(is_duplicate_fn: Callable[[str], bool], planted: PlantedCorpus) -> dict[str, float]:
    """Return precision, recall and speed of a function that is called with each text in order."""
    start = time.perf_counter()
    predicted = np.array([is_duplicate_fn(text) for text in planted.texts])
    seconds = time.perf_counter() - start
    is_duplicate = planted.jaccard_indices >= THRESHOLD
    return {
        "precision": float((predicted & is_duplicate).sum() / max(predicted.sum(), 1)),
        "recall": float((predicted & is_duplicate).sum() / max(is_duplicate.sum(), 1)),
        "texts_per_second": len(predicted) / seconds,
        "megabytes_per_second": sum(map(len, planted.texts)) / seconds / 1e6,
    }


def make_datasketch_fn() -> Callable[[str], bool]:
    """Return datasketch's search: MinHash, LSH lookup, and a check of the candidates."""
    from datasketch import MinHash, MinHashLSH

    lsh_index, signatures = MinHashLSH(threshold=THRESHOLD, num_perm=128, weights=(0.1, 0.9)), {}

    def is_duplicate_fn(text: str) -> bool:
        words = text.lower().split()
        ngrams = {" ".join(words[i : i + NGRAM]).encode() for i in range(len(words) - NGRAM + 1)}
        signature = MinHash(num_perm=128)
        signature.update_batch(ngrams)
        if any(signatures[key].jaccard(signature) >= THRESHOLD for key in lsh_index.query(signature)):
            return True
        signatures[len(signatures)] = signature
        lsh_index.insert(len(signatures) - 1, signature)
        return False

    return is_duplicate_fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--originals", type=int, default=5000, help="number of originals; each gets a copy (5000)")
    parser.add_argument("--words", type=int, default=200, help="mean number of words of a text (200)")
    args = parser.parse_args()
    from firth.text.minhash import MinHashIndex

    for unambiguous in (True, False):
        planted = plant_duplicates(args.originals, args.words, unambiguous=unambiguous)
        print(
            f"{len(planted.texts):,} texts, "
            + ("copies away from the threshold" if unambiguous else "copies of any similarity")
        )
        for name, is_duplicate_fn in {
            "firth": MinHashIndex().check_and_add,
            "datasketch": make_datasketch_fn(),
        }.items():
            print(
                f"  {name:11}",
                "  ".join(f"{key} {value:,.4g}" for key, value in measure(is_duplicate_fn, planted).items()),
            )


if __name__ == "__main__":
    main()
