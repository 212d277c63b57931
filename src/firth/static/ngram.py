"""N-gram language model with interpolated, modified Kneser-Ney smoothing (Kneser & Ney 1995; Chen & Goodman 1999).

The probability of a token w after a context h of n - 1 tokens interpolates all orders:

    p(w | h) = max(count(hw) - D, 0) / count(h) + backoff(h) p(w | h without its first token)

The discount D moves probability from seen to unseen n-grams; backoff(h) is the mass that it frees. Modified Kneser-Ney
has three discounts per order, for counts 1, 2 and 3 or more, estimated from the counts of counts (1999, equation 26).

The highest order uses plain counts. A lower order uses continuation counts: the number of distinct tokens before the
n-gram. "Francisco" is frequent but follows only "San", so it should be unlikely after an unseen context.

Each order is one sorted array of keys: index of the (n-1)-gram in the order below, times V, plus the last token. A
lookup is a binary search per order.

T positions of a text, G distinct n-grams of one order, V vocabulary size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from firth.core.errors import UserError, reason
from firth.core.files import read_json, read_object, write_json
from firth.models.hf.config_io import NGRAM_MODEL_TYPE
from firth.tokens import Tokenizer, Vocabulary, load_tokenizer

NGRAM_WEIGHTS_FILE = "model.safetensors"
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)  # D1, D2, D3+ where the counts of counts do not determine them


@dataclass(frozen=True)
class NgramLevel:
    """The n-grams of one order, sorted by key."""

    key: np.ndarray  # (G,) int64
    discounted_prob: np.ndarray  # (G,) float32: (count - discount) / count of the context
    backoff_weight: np.ndarray  # (G,) float32: of this n-gram as a context, the weight of the order below

    def find(self, key_T: np.ndarray) -> np.ndarray:
        """(T,) index of each key, -1 for an n-gram that never occurred."""
        index_T = np.minimum(np.searchsorted(self.key, key_T), len(self.key) - 1)
        return np.where(self.key[index_T] == key_T, index_T, -1) if len(self.key) else np.full(len(key_T), -1)


@dataclass(frozen=True)
class NgramModel:
    """All orders of a model; the recursion ends at `uniform_prob`."""

    levels: tuple[NgramLevel, ...]
    vocab_size: int
    uniform_prob: np.ndarray  # (V,) order 0: equal for all predictable tokens, 0 for the others
    backoff_weight: float  # weight of `uniform_prob` in the unigram distribution
    tokenizer: Tokenizer | None = None

    @property
    def order(self) -> int:
        return len(self.levels)

    def log_probs(self, ids_T: np.ndarray) -> np.ndarray:
        """(T - 1,) log-probabilities, in nats, of all tokens after the first, which is the template's start token."""
        ids_T = np.asarray(ids_T, np.int64)
        p = self.backoff_weight * self.uniform_prob[ids_T[1:]]
        context = np.zeros(len(ids_T) - 1, np.int64)  # index of the context of length n; -1: unseen
        for n, level in enumerate(self.levels):
            known = context >= 0
            if n:
                p = np.where(known, self.levels[n - 1].backoff_weight[context] * p, p)
            entry = np.where(known, level.find(context * self.vocab_size + ids_T[1:]), -1)
            p = p + np.where(entry >= 0, level.discounted_prob[entry], 0)
            before = np.concatenate([[-1 if n else 0], context[:-1]])
            context = np.where(before >= 0, level.find(before * self.vocab_size + ids_T[:-1]), -1)
        return np.log(p)

    def find_context(self, ids: list[int]) -> int:
        """Index of the n-gram of these tokens, -1 where it never occurred."""
        index = 0
        for level, token in zip(self.levels, ids, strict=False):
            index = int(level.find(np.array([index * self.vocab_size + token]))[0])
            if index < 0:
                break
        return index

    def next_token_probs(self, ids: list[int]) -> np.ndarray:
        """(V,) probability of each token after these."""
        p_V = self.backoff_weight * self.uniform_prob
        for n, level in enumerate(self.levels[: len(ids) + 1]):
            context = self.find_context(ids[len(ids) - n :])
            if context < 0:
                break
            if n:
                p_V *= self.levels[n - 1].backoff_weight[context]
            first, last = np.searchsorted(level.key, [context * self.vocab_size, (context + 1) * self.vocab_size])
            p_V[level.key[first:last] % self.vocab_size] += level.discounted_prob[first:last]
        return p_V

    def save(self, folder: Path) -> None:
        """Write the files of a checkpoint into an existing folder."""
        facts = {
            "model_type": NGRAM_MODEL_TYPE,
            "order": self.order,
            "vocab_size": self.vocab_size,
            "back": self.backoff_weight,
        }
        write_json(folder / "config.json", facts)
        tensors = {"floor": self.uniform_prob}
        for n, level in enumerate(self.levels, 1):
            tensors |= {f"{n}.key": level.key, f"{n}.share": level.discounted_prob, f"{n}.back": level.backoff_weight}
        save_file(tensors, folder / NGRAM_WEIGHTS_FILE)
        if self.tokenizer is not None:
            self.tokenizer.save(folder)


def is_ngram(folder: str | Path) -> bool:
    """Whether a checkpoint folder holds an n-gram model."""
    config = Path(folder) / "config.json"
    facts: Any = read_json(config) if config.is_file() else None
    return isinstance(facts, dict) and facts.get("model_type") == NGRAM_MODEL_TYPE


@dataclass(frozen=True)
class NgramConfigFile:
    """The keys of an n-gram model's config.json."""

    allow_unknown_keys = True

    order: int
    vocab_size: int
    back: float


def load_ngram(folder: str | Path) -> NgramModel:
    folder = Path(folder)
    facts, file = read_object(folder / "config.json", NgramConfigFile), folder / NGRAM_WEIGHTS_FILE
    tokenizer = load_tokenizer(folder)
    if facts["vocab_size"] != tokenizer.vocab.size:
        raise UserError(
            f"{folder / 'config.json'}: vocab_size is {facts['vocab_size']:,}, and the tokenizer has "
            f"{tokenizer.vocab.size:,} tokens: they do not belong together."
        )
    try:
        tensors = load_file(file)
        levels = tuple(
            NgramLevel(tensors[f"{n}.key"], tensors[f"{n}.share"], tensors[f"{n}.back"])
            for n in range(1, facts["order"] + 1)
        )
        return NgramModel(levels, facts["vocab_size"], tensors["floor"], facts["back"], tokenizer)
    except (SafetensorError, OSError, KeyError) as e:
        raise UserError(f"{file} does not hold the n-grams of config.json ({reason(e)}). Count them again.") from None


def boundary_tokens(vocab: Vocabulary) -> tuple[int, int]:
    """Return the tokens before and after each document."""
    end = vocab.sep if vocab.eos is None else vocab.eos
    first = next((i for i in (vocab.bos, vocab.cls, end) if i is not None), None)
    if end is None or first is None:
        raise UserError("The tokenizer has no token for the end of a text, which an n-gram model needs.")
    return first, end


def predictable_tokens(vocab: Vocabulary) -> np.ndarray:
    """Return the tokens that the model can predict: text tokens, the unknown token, the end token."""
    extra = [i for i in (vocab.unk, boundary_tokens(vocab)[1]) if i is not None]
    return np.union1d(vocab.non_special_ids, extra)


# --- counting -------------------------------------------------------------------------------------------------------


def count_ngrams(
    ids_T: np.ndarray,
    is_start_T: np.ndarray,
    vocab_size: int,
    predictable: np.ndarray,
    order: int,
    discount: float = 0.0,
) -> NgramModel:
    """Return the model of a text: concatenated documents, each between its start and end token.

    `is_start_T` marks start tokens, which are context and never predicted. An n-gram that begins a document has no
    token before it and keeps its plain count. `discount` replaces the three estimated ones; 0 estimates them. The order
    is lower where no document has that many tokens.
    """
    floor_V = np.zeros(vocab_size)
    floor_V[predictable] = 1 / len(predictable)
    keys: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    index_T = np.zeros(len(ids_T), np.int64)  # index of the n-gram that ends at each token; -1: it would cross a start
    for n in range(1, order + 1):
        shorter_T = index_T if n == 1 else np.where(is_start_T, -1, np.roll(index_T, 1))  # of all but its last token
        at = np.flatnonzero(shorter_T >= 0)
        if not len(at):
            break
        key = shorter_T[at] * vocab_size + ids_T[at]
        key_G, first, inverse, count_G = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        if n == 1:
            count_G = np.bincount(inverse[~is_start_T[at]], minlength=len(key_G))
        else:  # continuation counts of the order below
            tail = np.bincount(index_T[at[first]], minlength=len(keys[-1]))
            counts[-1] = np.where(tail > 0, tail, counts[-1] if n > 2 else 0)
        keys.append(key_G)
        counts.append(count_G)
        index_T = np.full(len(ids_T), -1, np.int64)
        index_T[at] = inverse
    return smooth_counts(list(zip(keys, counts, strict=True)), vocab_size, floor_V, discount)


def smooth_counts(
    counts: list[tuple[np.ndarray, np.ndarray]], vocab_size: int, uniform_prob_V: np.ndarray, discount: float = 0.0
) -> NgramModel:
    """Turn the counts of each order into discounted probabilities and backoff weights; start tokens have count 0."""
    levels: list[NgramLevel] = []
    unigram_backoff = 1.0
    for n, (key_G, count_G) in enumerate(counts):
        size = len(counts[n - 1][0]) if n else 1
        context_G = key_G // vocab_size
        off_G = np.array([0.0, *estimate_discounts(count_G, discount)])[np.minimum(count_G, 3)]
        total = np.bincount(context_G, count_G, size)
        taken = np.bincount(context_G, off_G, size)
        share_G = (count_G - off_G) / np.maximum(total, 1)[context_G]
        back = np.where(total > 0, taken / np.maximum(total, 1), 1.0)
        if n:
            levels[-1] = NgramLevel(levels[-1].key, levels[-1].discounted_prob, back.astype(np.float32))
        else:
            unigram_backoff = float(back[0])
        levels.append(NgramLevel(key_G.astype(np.int64), share_G.astype(np.float32), np.ones(len(key_G), np.float32)))
    return NgramModel(tuple(levels), vocab_size, uniform_prob_V, unigram_backoff)


def estimate_discounts(count_G: np.ndarray, fixed: float = 0.0) -> tuple[float, float, float]:
    """Return D1, D2, D3+ from the number of n-grams with counts 1 to 4 (Chen & Goodman 1999, equation 26)."""
    if fixed:
        return fixed, fixed, fixed
    n1, n2, n3, n4 = (int((count_G == k).sum()) for k in (1, 2, 3, 4))
    if not (n1 and n2 and n3):
        return FALLBACK_DISCOUNTS
    y = n1 / (n1 + 2 * n2)
    discounts = tuple(k - (k + 1) * y * more / less for k, more, less in ((1, n2, n1), (2, n3, n2), (3, n4, n3)))
    sound = all(0 < d < k for k, d in enumerate(discounts, 1))
    return (discounts[0], discounts[1], discounts[2]) if sound else FALLBACK_DISCOUNTS


def check_ngram_order(order: int, discount: float) -> None:
    if not 1 <= order <= 5:
        raise UserError(f"order is {order}, and must be from 1 to 5.")
    if not (math.isfinite(discount) and 0 <= discount < 1):
        raise UserError(f"discount is {discount:g}, and must be in [0, 1); 0 estimates three for each order.")
