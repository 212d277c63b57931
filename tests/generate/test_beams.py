"""Beam search: the texts and the scores of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
from generate.ends import ending_with

from firth.generate import GenerationConfig, generate_sequences

PROMPTS = [[4, 40, 41, 42], [4], [4, 50, 51, 52, 53, 54, 55, 60], [4, 100]]


def likelier_end(model: Any) -> Any:
    """Make a token that beams generate the EOS token, so that texts end at different positions."""
    (best,) = generate_sequences(model, PROMPTS[:1], GenerationConfig(max_new_tokens=6, min_new_tokens=6, num_beams=3))
    return ending_with(model, best.tokens[2])


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
@pytest.mark.parametrize(
    "settings",
    [
        dict(num_beams=3),
        dict(num_beams=4, length_penalty=0.0, num_return_sequences=4),
        dict(num_beams=3, length_penalty=-1.0, num_return_sequences=2, early_stopping=True),
        dict(num_beams=2, length_penalty=2.0, min_new_tokens=3, repetition_penalty=1.2, no_repeat_ngram_size=2),
    ],
    ids=["plain", "all", "early", "forbidding"],
)
def test_beams_are_theirs(family: str, settings: dict[str, Any], untrained: Any, by_transformers: Any) -> None:
    model = likelier_end(untrained(family, 1))
    for prompts in (
        [[ids] for ids in PROMPTS] if "repetition_penalty" in settings else [PROMPTS]
    ):  # theirs counts padding
        found = generate_sequences(model, prompts, GenerationConfig(max_new_tokens=8, **settings))
        tokens, scores = by_transformers(model, prompts, max_new_tokens=8, **settings)
        assert [text.tokens for text in found] == tokens
        assert [text.score for text in found] == pytest.approx(scores, abs=1e-4, rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_beams_go_on_where_many_ends_are_likeliest(family: str, untrained: Any, by_transformers: Any) -> None:
    """Nine of the ten likeliest first tokens end a text, and still there are five beams to go on with."""
    model, settings = untrained(family), dict(num_beams=5, num_return_sequences=5)
    first = generate_sequences(
        model, PROMPTS[:1], GenerationConfig(1, min_new_tokens=1, num_beams=10, num_return_sequences=10)
    )
    model.eos_token_ids = tuple(text.tokens[0] for text in (first[0], *first[2:]))
    found = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=8, **settings))
    tokens, scores = by_transformers(model, PROMPTS, max_new_tokens=8, **settings)
    assert any(len(text.tokens) > 1 for text in found[:5])
    assert [text.tokens for text in found] == tokens
    assert [text.score for text in found] == pytest.approx(scores, abs=1e-4, rel=1e-5)


def test_some_texts_end_and_some_do_not(untrained: Any) -> None:
    """The test above compares both."""
    model = likelier_end(untrained("gpt2", 1))
    found = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=8, num_beams=4, num_return_sequences=4))
    assert {text.finished for text in found} == {True, False}


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_beams_without_a_memory(family: str, untrained: Any) -> None:
    model, decoding = untrained(family), GenerationConfig(max_new_tokens=8, num_beams=3, num_return_sequences=2)
    kept, again = (generate_sequences(model, PROMPTS, decoding, cache) for cache in (True, False))
    assert [text.tokens for text in kept] == [text.tokens for text in again]
    assert [text.score for text in kept] == pytest.approx([text.score for text in again], abs=1e-5)


def test_the_best_comes_first(untrained: Any) -> None:
    found = generate_sequences(
        untrained("gpt2"), PROMPTS[:1], GenerationConfig(max_new_tokens=5, num_beams=5, num_return_sequences=5)
    )
    scores = [text.score for text in found]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(text.tokens) for text in found}) == 5
    for text in found:
        assert text.score == pytest.approx(sum(text.logprobs) / len(text.logprobs), abs=1e-5)
