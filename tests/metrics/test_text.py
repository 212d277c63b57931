"""Text metrics, by hand and against sacrebleu and rouge-score."""

from __future__ import annotations

import math

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from firth.errors import UserError
from firth.metrics import METRICS, bits_per_byte, bleu, chrf, exact_match, perplexity, rouge_l, score

PREDICTED = ["the cat sat on the mat", "a dog barked at night, loudly", "it rains"]
TRUE = ["the cat sat on a mat", "the dog barked loudly at night", "it is raining"]
OTHER = ["a cat was sitting on the mat", "a dog barked at night, loudly", "it rains today"]


def test_exact_match_by_hand() -> None:
    assert exact_match(["a b", " c ", "d"], ["a b", "c", "D"]) == pytest.approx(2 / 3)
    assert exact_match(["x", "y"], [["a", "x"], ["a", "b"]]) == 0.5


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


def test_rouge_l_by_hand() -> None:
    # Longest common subsequence "the cat on mat": 4 of 5 words predicted, 4 of 6 wanted -> F = 8/11.
    assert rouge_l(["the cat lay on mat"], ["the cat sat on the mat"]) == pytest.approx(100 * 8 / 11)
    # The mean of both, and the best reference of each.
    assert rouge_l(["a b", "c d"], ["a b", "c e"]) == pytest.approx(75)
    assert rouge_l(["a b", "c d"], [["x y", "a b"], ["c e", "x y"]]) == pytest.approx(75)


def test_rouge_l_as_rouge_score() -> None:
    scorer = RougeScorer(["rougeL"])
    scores = [scorer.score(t, p)["rougeL"].fmeasure for p, t in zip(PREDICTED, TRUE, strict=True)]
    assert rouge_l(PREDICTED, TRUE) == pytest.approx(100 * sum(scores) / 3)


def test_perplexity_and_bits_by_hand() -> None:
    # A fair choice among 8, four times over.
    nats = 4 * math.log(8)
    assert perplexity(nats, 4) == pytest.approx(8)
    # 12 bits in all; on 6 bytes that is 2 for each.
    assert bits_per_byte(nats, 6) == pytest.approx(2)
    assert perplexity(0.0, 3) == 1.0
    assert perplexity(1e6, 1) == math.inf


@pytest.mark.parametrize("metric", [exact_match, bleu, chrf, rouge_l])
def test_mistakes_are_named(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="1 predictions for 2 references"):
        metric(["a"], ["a", "b"])
    with pytest.raises(UserError, match="no predictions"):
        metric([], [])
    with pytest.raises(UserError, match="Example 1 "):
        metric(["a", "b"], ["a", []])


def test_score_gives_every_metric_of_the_task() -> None:
    assert score("classify", ["a", "b"], ["a", "a"]) == {
        "accuracy": 0.5,
        "macro_f1": pytest.approx(1 / 3),
        "mcc": 0.0,
    }
    scores = score("text-to-text", TRUE, TRUE)
    assert scores == {"chrf": 100, "bleu": pytest.approx(100), "rouge_l": 100, "exact_match": 1}
    assert [next(iter(METRICS[task])) for task in METRICS] == ["accuracy", "chrf"]


def test_score_names_the_nearest_task() -> None:
    with pytest.raises(UserError, match="Did you mean 'classify'"):
        score("clasify", ["a"], ["a"])
