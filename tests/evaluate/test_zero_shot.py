"""Minimal pairs, blanks and choices: counted as a person would count them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from firth.core.errors import UserError
from firth.evaluate.cloze import evaluate_choice, evaluate_cloze
from firth.evaluate.examples_page import is_mistake
from firth.evaluate.likelihood import SplitText, make_scorer, text_likelihoods
from firth.evaluate.logprobs import TokenLogprobs
from firth.evaluate.minimal_pairs import evaluate_minimal_pairs
from firth.generate import generate_ids
from firth.text import Example

ALL = ["gpt2", "bert", "t5", "bart"]


@pytest.mark.parametrize("family", ALL)
def test_minimal_pairs_compare_sums(family: str, untrained: Any) -> None:
    model = untrained(family)
    pairs = [("The cat slept.", "The cat slept slept."), ("A dog saw it.", "A fox saw it."), ("It is.", "It is.")]
    examples = [Example(i, pair, references=(group,)) for i, (pair, group) in enumerate(zip(pairs, "aab", strict=True))]
    outcome = evaluate_minimal_pairs(model, examples)
    hits = []
    for (good, bad), prediction in zip(pairs, outcome.predictions, strict=True):
        a, b = (text_likelihoods(model, [text])[0].logp for text in (good, bad))
        assert prediction.scores == pytest.approx({"good": a, "bad": b}, abs=1e-3)
        hits.append(prediction.prediction == "good")
        assert hits[-1] == (good != bad and a > b)
    assert not hits[2]  # a tie is wrong
    assert outcome.metrics["accuracy"] == pytest.approx(np.mean(hits))
    assert outcome.details["by_group"] == {"a": np.mean(hits[:2]), "b": 0.0}
    assert outcome.metrics["group_accuracy"] == pytest.approx((np.mean(hits[:2]) + 0.0) / 2)
    assert "1 pair is equally likely" in outcome.notices[0]


def test_a_decoder_is_right_where_it_would_write_the_answer(untrained: Any) -> None:
    model, scorer = untrained("gpt2"), make_scorer(untrained("gpt2"))
    context = model.tokenizer.encode("The cat slept by the")
    (written,) = generate_ids(model, [[*scorer.template.prefix_ids, *context]], 3)
    wrong = [*written[:-1], written[-1] + 1]
    found = [pair for (pair,) in scorer.score_spans([SplitText(context, ids, []) for ids in (written, wrong)], True)]
    assert [scorer.is_exact_match(query, answer) for query, answer in found] == [True, False]


def test_the_answer_of_a_decoder_is_as_likely_as_the_text_after_its_context(untrained: Any) -> None:
    model, context = untrained("gpt2"), "The cat slept by the"
    outcome = evaluate_cloze(model, [Example(1, (context,), "river"), Example(2, (context + " ",), "railway station")])
    start, one, two = text_likelihoods(model, [context, f"{context} river", f"{context} railway station"])
    logps = [(p.scores or {})["logp"] for p in outcome.predictions]
    assert logps == pytest.approx([one.logp - start.logp, two.logp - start.logp], abs=1e-3)
    assert outcome.metrics["answer_logp"] == pytest.approx(np.mean(logps))


def test_an_encoder_gets_as_many_masks_as_the_answer_has_tokens(untrained: Any) -> None:
    scorer = make_scorer(untrained("bert"))
    vocab, text = scorer.vocab, "The hedgehogs slept."
    parts = scorer.split_at_span(text, 3, 13, "here")
    assert scorer.tokenizer.decode(parts.answer) == "hedgehogs"
    query = scorer.blank_query(parts)
    num = len(parts.answer)
    assert num > 1
    assert query.input_ids == [vocab.cls, *parts.before, *[vocab.mask] * num, *parts.after, vocab.sep]
    assert [query.input_ids[i] for i in query.target_positions] == [vocab.mask] * num
    assert query.labels == parts.answer


def test_a_blank_may_stand_in_the_middle(untrained: Any) -> None:
    example = Example(1, ("The ___ slept by the river.",), "cat")
    assert evaluate_cloze(untrained("bert"), [example]).notices == []
    assert "1 text continues after its blank" in evaluate_cloze(untrained("gpt2"), [example]).notices[0]
    for family in ("t5", "bart"):
        assert evaluate_cloze(untrained(family), [example]).metrics["answer_logp"] < 0
    with pytest.raises(UserError, match="Example 7 has 2 blanks"):
        evaluate_cloze(untrained("bert"), [Example(7, ("___ and ___",), "cat")])


def test_a_span_must_end_where_the_answer_ends(untrained: Any) -> None:
    scorer = make_scorer(untrained("t5"))
    query = scorer.blank_query(scorer.split_at_span("The cat slept", 3, 7, "here"))
    right = np.array(query.labels)
    assert scorer.is_exact_match(query, TokenLogprobs(np.zeros(len(right)), right))
    assert not scorer.is_exact_match(
        query, TokenLogprobs(np.zeros(len(right)), np.array([*right[:-1], scorer.vocab.non_special_ids[0]]))
    )


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_an_answer_that_the_tokenizer_cannot_spell_is_wrong(family: str, untrained: Any) -> None:
    scorer = make_scorer(untrained(family))
    text = "The ☃ slept by the river."
    query = scorer.blank_query(scorer.split_at_span(text, 3, 5, "here"))
    assert scorer.vocab.unk in query.labels
    assert not scorer.is_exact_match(query, TokenLogprobs(np.zeros(len(query.labels)), np.array(query.labels)))
    outcome = evaluate_cloze(
        untrained(family), [Example(1, ("The ___ slept.",), "cat"), Example(2, ("The ___ slept.",), "☃")]
    )
    assert outcome.metrics["known"] == 0.5
    assert outcome.details["unknown"] == 1
    assert outcome.metrics["answer_logp"] == (outcome.predictions[0].scores or {})["logp"]
    assert outcome.notices == ["1 of 2 answers have an unknown token and count as wrong."]


def test_unknown_tokens_of_choices_and_pairs_are_said(untrained: Any) -> None:
    chosen = evaluate_choice(untrained("bert"), [Example(1, ("The cat saw the", "river", "☃"), 0)])
    paired = evaluate_minimal_pairs(untrained("bert"), [Example(1, ("The cat slept.", "The ☃ slept."))])
    for outcome in (chosen, paired):
        assert outcome.details["unknown"] == 1
        assert outcome.notices == ["1 token is unknown to the tokenizer (<unk>), which is easy to predict."]


@pytest.mark.parametrize("family", ALL)
def test_choices_by_likelihood(family: str, untrained: Any) -> None:
    model, context = untrained(family), "The cat slept by"
    choices = ("the river", "a very old railway station", "Anna Ÿÿ")
    outcome = evaluate_choice(model, [Example(1, (context, *choices), 2), Example(2, (context, *choices), 0)])
    scores = np.array(list((outcome.predictions[0].scores or {}).values()))
    assert outcome.predictions[0].prediction == scores.argmax()
    per_character, per_byte = scores / [9, 26, 7], scores / [9, 26, 9]
    assert outcome.predictions[0].extra == {"per_character": per_character.argmax(), "per_byte": per_byte.argmax()}
    assert outcome.metrics["accuracy"] == np.mean([scores.argmax() == 2, scores.argmax() == 0])
    assert outcome.metrics["accuracy_norm"] == np.mean([per_character.argmax() == 2, per_character.argmax() == 0])
    assert outcome.metrics["accuracy_bytes"] == np.mean([per_byte.argmax() == 2, per_byte.argmax() == 0])
    if family == "gpt2":
        whole, start = text_likelihoods(model, [f"{context} {choices[0]}", context])
        assert scores[0] == pytest.approx(whole.logp - start.logp, abs=1e-3)


def test_an_encoder_masks_the_rest_of_a_word_of_a_choice(untrained: Any) -> None:
    """within-word-l2r by torch alone; with "pseudo" the later tokens of the word are seen."""
    model, context, choice = untrained("bert"), "The cat saw", "hedgehogs there"
    tokenizer, vocab = model.tokenizer, model.tokenizer.vocab
    before, words = tokenizer.encode(context), [tokenizer.encode(word) for word in choice.split()]
    assert len(words[0]) > 1
    ids = [token for word in words for token in word]
    ends = [end for end, word in zip(np.cumsum([len(word) for word in words]), words, strict=True) for _ in word]

    def logp(ends: list[int]) -> float:
        total = 0.0
        for i, end in enumerate(ends):
            row = [vocab.cls, *before, *ids[:i], *[vocab.mask] * (end - i), *ids[end:], vocab.sep]
            with torch.no_grad():
                total += float(model(torch.tensor([row])).logits[0, 1 + len(before) + i].log_softmax(0)[ids[i]])
        return total

    example = Example(1, (context, choice, "it"), 0)
    for method, masked in (("within-word-l2r", ends), ("pseudo", [i + 1 for i in range(len(ids))])):
        outcome = evaluate_choice(model, [example], method=method)
        assert (outcome.predictions[0].scores or {})["0"] == pytest.approx(logp(masked), abs=1e-4)


def test_spans_are_not_asked_of_a_model_that_reads_backward(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained("gpt2")
    monkeypatch.setattr(model, "tokenizer", model.tokenizer.to_reversed())
    for evaluate, example in (
        (evaluate_choice, Example(1, ("The cat", "slept", "saw"), 0)),
        (evaluate_cloze, Example(1, ("The cat",), "slept")),
    ):
        with pytest.raises(UserError, match="need a forward model"):
            evaluate(model, [example])


def test_choices_that_are_equally_likely_are_wrong(untrained: Any) -> None:
    texts = ("The cat slept by", "the river", "the river")
    outcome = evaluate_choice(untrained("gpt2"), [Example(1, texts, 0), Example(2, texts, 1)])
    assert outcome.metrics == {"accuracy": 0.0, "accuracy_norm": 0.0, "accuracy_bytes": 0.0}
    assert [prediction.prediction for prediction in outcome.predictions] == [None, None]
    assert outcome.notices == ["2 examples tie between several choices and count as wrong."]
    assert is_mistake("choice", Example(1, texts, 0), outcome.predictions[0])


def test_choices_without_answers_are_only_predicted(untrained: Any) -> None:
    outcome = evaluate_choice(untrained("gpt2"), [Example(1, ("The cat", "slept", "saw"))])
    assert "accuracy" not in outcome.metrics
    assert outcome.predictions[0].prediction in (0, 1)


def test_a_long_context_is_cut_from_the_left(untrained: Any) -> None:
    scorer = make_scorer(untrained("gpt2"))
    text = "The cat slept by the river. " * 5
    parts = scorer.truncate_context(scorer.split_at_span(text + "cat", len(text) - 1, len(text) + 3, "here"))
    ids = scorer.tokenizer.encode(text + "cat")
    assert [*parts.before, *parts.answer] == ids[-scorer.max_text_tokens :]
    assert scorer.notices == ["1 context was longer than 24 tokens, and cut."]


def test_an_answer_without_tokens_is_named(untrained: Any) -> None:
    with pytest.raises(UserError, match="Example 5: '' has 0 tokens"):
        evaluate_cloze(untrained("bert"), [Example(5, ("The cat",), " ")])


@pytest.mark.parametrize(("family", "batch_tokens"), [("gpt2", 64), ("gpt2", 512), ("bert", 64), ("bert", 300)])
def test_a_tie_is_a_tie_wherever_its_sentences_are_computed(
    family: str, batch_tokens: int, untrained: Any, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firth.evaluate.logprobs.CHUNK_QUERIES", 7)  # so that pairs stand in two of them
    words = " ".join(sentences).split()
    texts = [" ".join(words[i : i + 2 + i % 3]) for i in range(40)]
    outcome = evaluate_minimal_pairs(
        untrained(family), [Example(i, (text, text)) for i, text in enumerate(texts)], batch_tokens=batch_tokens
    )
    assert outcome.metrics["accuracy"] == 0
    assert outcome.notices[0].startswith("40 pairs are equally likely")
