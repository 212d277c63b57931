"""Text metrics, by hand and against sacrebleu and rouge-score."""

from __future__ import annotations

import math

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from firth.core.errors import UserError
from firth.metrics import bits_per_byte, normalise_squad, perplexity
from firth.metrics.text import bleu, chrf, exact_match, rouge

PREDICTED = ["the cat sat on the mat", "a dog barked at night, loudly", "it rains"]
TRUE = ["the cat sat on a mat", "the dog barked loudly at night", "it is raining"]
OTHER = ["a cat was sitting on the mat", "a dog barked at night, loudly", "it rains today"]


def rouge_l(predictions: list[str], references: list[str] | list[list[str]]) -> float:
    return rouge(predictions, references)["rouge_l"]


def test_exact_match_by_hand() -> None:
    assert exact_match(["a b", " c ", "d"], ["a b", "c", "D"]) == pytest.approx(2 / 3)
    assert exact_match(["x", "y"], [["a", "x"], ["a", "b"]]) == 0.5


def test_exact_match_as_squad_normalises() -> None:
    predictions, references = ["Spider-Man", "an Apple."], [["the Spider Man"], ["orange", "apple"]]
    assert exact_match(predictions, references) == 0
    assert exact_match(predictions, references, normalise_squad) == 0.5  # "spiderman" is not "spider man"


def test_all_right_and_all_wrong() -> None:
    for metric in (bleu, chrf, rouge_l):
        assert metric(TRUE, TRUE) == pytest.approx(100)
        assert metric(["zzzz"] * 3, TRUE) < 5


def test_bleu_by_hand() -> None:
    # 6 words, one wrong at the fifth place: 5/6, 3/5, 2/4, 1/3 of the n-grams are right; no brevity penalty.
    expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert bleu(["the cat sat on the mat"], ["the cat sat on a mat"]) == pytest.approx(expected)


def test_bleu_and_chrf_are_of_the_whole_corpus() -> None:
    assert bleu(PREDICTED, TRUE) == sacrebleu.corpus_bleu(PREDICTED, [TRUE]).score
    assert chrf(PREDICTED, TRUE) == sacrebleu.corpus_chrf(PREDICTED, [TRUE]).score
    mean = sum(sacrebleu.sentence_bleu(p, [t]).score for p, t in zip(PREDICTED, TRUE, strict=True)) / 3
    assert bleu(PREDICTED, TRUE) != pytest.approx(mean)


def test_several_references() -> None:
    both = [list(pair) for pair in zip(TRUE, OTHER, strict=True)]
    assert bleu(PREDICTED, both) == sacrebleu.corpus_bleu(PREDICTED, [TRUE, OTHER]).score
    assert chrf(PREDICTED, both) == sacrebleu.corpus_chrf(PREDICTED, [TRUE, OTHER]).score
    assert bleu(PREDICTED, both) > bleu(PREDICTED, TRUE)
    # Each example may have its own number of them.
    assert bleu(PREDICTED, [[TRUE[0], OTHER[0]], OTHER[1], [TRUE[2]]]) == pytest.approx(
        sacrebleu.corpus_bleu(PREDICTED, [[TRUE[0], OTHER[1], TRUE[2]], [OTHER[0], None, None]]).score  # type: ignore[list-item]
    )


def test_rouge_by_hand() -> None:
    # Longest common subsequence "the cat on mat": 4 of 5 words predicted, 4 of 6 wanted -> F = 8/11. So for single
    # words. Of word pairs "the cat" alone is shared: 1 of 4, 1 of 5 -> F = 2/9.
    scores = rouge(["the cat lay on mat"], ["the cat sat on the mat"])
    assert scores == pytest.approx(
        {"rouge_1": 800 / 11, "rouge_2": 200 / 9, "rouge_l": 800 / 11, "rouge_lsum": 800 / 11}
    )
    # The order of words matters to the longest subsequence only.
    assert rouge(["b a"], ["a b"]) == pytest.approx({"rouge_1": 100, "rouge_2": 0, "rouge_l": 50, "rouge_lsum": 50})
    # Two sentences in another order: as one sequence one of them is shared, as sentences both are.
    lines = rouge(["two cats sleep\nan owl calls"], ["an owl called\ntwo cats slept"])
    assert lines == pytest.approx({"rouge_1": 500 / 6, "rouge_2": 60, "rouge_l": 50, "rouge_lsum": 500 / 6})
    # The stem of runs, running and run is run; short words have none.
    assert rouge(["running dogs"], ["runs dog"])["rouge_2"] == 100
    # The mean of both, and the best reference of each.
    assert rouge_l(["a b", "c d"], ["a b", "c e"]) == pytest.approx(75)
    assert rouge_l(["a b", "c d"], [["x y", "a b"], ["c e", "x y"]]) == pytest.approx(75)


TEXTS = st.lists(st.sampled_from(["the", "cats", "sleeping", "Mat.\n", "it's", "on-line", "42", "é"]), max_size=7).map(
    " ".join
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=4))
def test_any_texts_as_sacrebleu_and_rouge_score(triples: list[tuple[str, str, str]]) -> None:
    predicted, first, second = map(list, zip(*triples, strict=True))
    both = [list(pair) for pair in zip(first, second, strict=True)]
    assert bleu(predicted, both) == sacrebleu.corpus_bleu(predicted, [first, second]).score
    assert chrf(predicted, both) == sacrebleu.corpus_chrf(predicted, [first, second]).score
    names = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL", "rouge_lsum": "rougeLsum"}
    scorer = RougeScorer([*names.values()], use_stemmer=True)
    each = [scorer.score_multi(texts, p) for p, texts in zip(predicted, both, strict=True)]
    for ours, theirs in names.items():
        expected = 100 * sum(one[theirs].fmeasure for one in each) / len(each)
        assert rouge(predicted, both)[ours] == pytest.approx(expected, abs=1e-9)


def test_perplexity_and_bits_by_hand() -> None:
    # A fair choice among 8, four times over.
    nats = 4 * math.log(8)
    assert perplexity(nats, 4) == pytest.approx(8)
    # 12 bits in all; on 6 bytes that is 2 for each.
    assert bits_per_byte(nats, 6) == pytest.approx(2)
    assert perplexity(0.0, 3) == 1.0
    assert perplexity(1e6, 1) == math.inf


@pytest.mark.parametrize("metric", [exact_match, bleu, chrf, rouge])
def test_mistakes_are_named(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="1 predictions for 2 references"):
        metric(["a"], ["a", "b"])
    with pytest.raises(UserError, match="No predictions"):
        metric([], [])
    with pytest.raises(UserError, match="Example 1 "):
        metric(["a", "b"], ["a", []])
