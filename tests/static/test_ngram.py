from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.static.ngram import NgramModel, check_ngram_order, count_ngrams, estimate_discounts

S, E, A, B, C = range(5)  # before a document, after it, three words
V = 5
POSSIBLE = np.array([E, A, B, C])
TEXT = [[A, B, A, B, C], [A, B, B], [C, A, B, A, C, A]]


def counted(documents: list[list[int]], order: int, discount: float = 0.0) -> NgramModel:
    ids = [token for document in documents for token in (S, *document, E)]
    starts = [position == 0 for document in documents for position in range(len(document) + 2)]
    return count_ngrams(np.array(ids), np.array(starts), V, POSSIBLE, order, discount)


def by_definition(documents: list[list[int]], order: int, d: float, context: tuple[int, ...], word: int) -> float:
    """Interpolated Kneser-Ney by its definition, over all n-grams."""
    framed = [(S, *document, E) for document in documents]

    def grams(n: int) -> list[tuple[int, ...]]:
        return [doc[i : i + n] for doc in framed for i in range(len(doc) - n + 1) if i + n > 1]

    def count(gram: tuple[int, ...]) -> int:
        if len(gram) == order or gram[0] == S:
            return grams(len(gram)).count(gram)
        return len({g[0] for g in grams(len(gram) + 1) if g[1:] == gram})

    lower = by_definition(documents, order, d, context[1:], word) if context else 1 / len(POSSIBLE)
    counts = {w: count((*context, w)) for w in POSSIBLE.tolist()}
    total = sum(counts.values())
    if not total:
        return lower
    return max(counts[word] - d, 0) / total + d * sum(c > 0 for c in counts.values()) / total * lower


def test_a_bigram_model_by_hand() -> None:
    """After A come B, B, C in "A B A B C"... here: <s> A B A E. Discount 0.5.

    Different words before A: <s>, B (2); B: A (1); E: A (1); in all 4, so p(A) = 1.5/4 + 1.5/4 * 1/4.
    After A: B once, E once; p(B | A) = 0.5/2 + 1/2 * p(B), p(B) = 0.5/4 + 1.5/4 * 1/4.
    """
    model = counted([[A, B, A]], 2, 0.5)
    uniform = 1.5 / 4 / 4
    p = {A: 1.5 / 4 + uniform, B: 0.5 / 4 + uniform, E: 0.5 / 4 + uniform, C: uniform}
    for word in POSSIBLE.tolist():
        seen = 0.5 / 2 if word in (B, E) else 0
        assert model.next_token_probs([A])[word] == pytest.approx(seen + 0.5 * p[word], rel=1e-6)
        assert model.next_token_probs([C])[word] == pytest.approx(p[word], rel=1e-6)  # C never occurred


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equals_the_definition_of_kneser_ney(order: int) -> None:
    model = counted(TEXT, order, 0.4)
    for context in ((S,), (A,), (S, A), (A, B), (S, A, B), (B, A, B), (C, C), (C, A, B)):
        for word in POSSIBLE.tolist():
            used = context[len(context) - min(order - 1, len(context)) :]
            right = by_definition(TEXT, order, 0.4, used, word)
            assert model.next_token_probs(list(used))[word] == pytest.approx(right, rel=1e-5), (context, word)


@pytest.mark.parametrize("discount", [0.0, 0.7])
@pytest.mark.parametrize("order", [1, 3, 5])
def test_probabilities_sum_to_1_and_both_methods_agree(order: int, discount: float) -> None:
    draw = np.random.default_rng(0)
    model = counted([draw.integers(A, V, 30).tolist() for _ in range(20)], order, discount)
    ids = [S, *draw.integers(A, V, 12).tolist(), E]
    probs = [model.next_token_probs(ids[max(0, i - order + 1) : i]) for i in range(1, len(ids))]
    np.testing.assert_allclose([p.sum() for p in probs], 1, rtol=1e-5)
    alone = [np.log(p[token]) for p, token in zip(probs, ids[1:], strict=True)]
    np.testing.assert_allclose(model.log_probs(np.array(ids)), alone, rtol=1e-5)


def test_the_order_is_limited_by_the_document_length() -> None:
    short, model = counted([[A], [B], [C]], 3, 0.5), counted([[A], [B], [C]], 5, 0.5)
    assert model.order == 3
    np.testing.assert_array_equal(
        model.log_probs(np.array([S, B, A, C, E])), short.log_probs(np.array([S, B, A, C, E]))
    )


def test_the_three_discounts_by_hand() -> None:
    """8 once, 4 twice, 2 three times, 1 four times: Y = 8/16; 1 - 2Y 4/8, 2 - 3Y 2/4, 3 - 4Y 1/2."""
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4] + [9] * 3)
    assert estimate_discounts(counts) == (0.5, 1.25, 2.0)
    assert estimate_discounts(np.array([1, 2])) == (0.5, 1.0, 1.5)  # too few to tell
    assert estimate_discounts(counts, 0.75) == (0.75, 0.75, 0.75)


def test_discount_and_weight_equal_nltk() -> None:
    """nltk ends with continuation counts, we interpolate with the uniform distribution; higher orders are equal."""
    smoothing = pytest.importorskip("nltk.lm.smoothing")
    lm = pytest.importorskip("nltk.lm")
    text = [[str(token) for token in (S, *document, E)] for document in TEXT]
    theirs = lm.KneserNeyInterpolated(2, discount=0.3)
    theirs.fit([[*[(w,) for w in doc], *pairwise(doc)] for doc in text], vocabulary_text=[w for d in text for w in d])
    assert isinstance(theirs.estimator, smoothing.KneserNey)
    ours = counted(TEXT, 2, 0.3)
    pairs = Counter(pair for doc in text for pair in pairwise(doc))
    for a, b in pairs:
        alpha, gamma = theirs.estimator.alpha_gamma(b, (a,))
        index = ours.find_context([int(a), int(b)])
        assert ours.levels[1].discounted_prob[index] == pytest.approx(alpha, rel=1e-5)
        assert ours.levels[0].backoff_weight[ours.find_context([int(a)])] == pytest.approx(gamma, rel=1e-5)


def test_invalid_orders_raise() -> None:
    for order, discount in ((0, 0.0), (6, 0.0), (3, 1.0), (3, -0.1)):
        with pytest.raises(UserError, match="must be"):
            check_ngram_order(order, discount)
