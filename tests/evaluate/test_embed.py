"""Vectors of texts and of words in context equal the hidden states of transformers at the same positions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from firth.core.errors import UserError
from firth.evaluate.context import Occurrence, encode_texts_once
from firth.evaluate.embed import embed_texts, embed_words_in_texts, evaluate_text_similarity, evaluate_word_in_context
from firth.models import make_model
from firth.models.presets import bag_of_words
from firth.text import Example

TEXTS = ["The cat slept.", "A dog saw the old mill near the river.", "Anna"]


def their_states(folder: Any, ids: list[int]) -> list[np.ndarray]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return [state[0].numpy() for state in states]


@pytest.mark.parametrize("layer", [-1, 1, 0])
def test_pools_equal_the_states_of_transformers(layer: int, untrained: Any, saved: Any) -> None:
    model = untrained("bert")
    vocab = model.tokenizer.vocab
    found = {pool: embed_texts(model, TEXTS, pool, layer, batch_tokens=30) for pool in ("first", "mean", "last")}
    for i, text in enumerate(TEXTS):
        state_TD = their_states(saved("bert"), [vocab.cls, *model.tokenizer.encode(text), vocab.sep])[layer]
        assert found["first"][i] == pytest.approx(state_TD[0], abs=1e-4)
        assert found["last"][i] == pytest.approx(state_TD[-1], abs=1e-4)
        assert found["mean"][i] == pytest.approx(state_TD.mean(0), abs=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "t5", "bart"])
def test_every_shape_has_vectors(family: str, untrained: Any) -> None:
    found = embed_texts(untrained(family), TEXTS, normalise=True)
    assert found.shape == (3, 32)
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(3), abs=1e-5)


def test_lone_surrogates_are_replaced(untrained: Any) -> None:
    """The `tokenizers` library takes no text with one; JSON escapes can produce them."""
    found = embed_texts(untrained("bert"), ["a \ud800 cat", "a \ufffd cat"])
    assert (found[0] == found[1]).all()


def test_a_text_without_known_words_is_said(untrained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(bag_of_words(300, 8))
    model.tokenizer = untrained("bert").tokenizer
    with torch.no_grad():
        model.embed.tokens.weight.fill_(1.0)
        model.embed.tokens.weight[[*model.tokenizer.vocab.special_ids, *model.tokenizer.encode("Anna")]] = 0.0
    found = embed_texts(model, ["The cat", "Anna", "slept"])
    assert not found[1].any()
    assert found[[0, 2]].all()
    assert "1 text has no known word" in " ".join(capsys.readouterr().err.split())


def test_a_word_is_the_mean_of_its_tokens(untrained: Any, saved: Any) -> None:
    model, text = untrained("bert"), "The hedgehogs slept."
    vocab = model.tokenizer.vocab
    (encoding,) = model.tokenizer.encode_with_offsets([text])
    inside = [i for i, (begin, _) in enumerate(encoding.offsets) if 4 <= begin < 13]
    assert len(inside) > 1
    states = their_states(saved("bert"), [vocab.cls, *encoding.ids, vocab.sep])
    wanted = states[-1][[i + 1 for i in inside]].mean(0)
    assert embed_words_in_texts(model, [text], [(4, 13)])[0] == pytest.approx(wanted, abs=1e-4)
    averaged = np.mean(states, 0)[[i + 1 for i in inside]].mean(0)
    assert embed_words_in_texts(model, [text], [(4, 13)], layer="mean")[0] == pytest.approx(averaged, abs=1e-4)


def test_a_word_late_in_a_long_text_is_found(untrained: Any) -> None:
    text = "The cat slept by the river. " * 8 + "Anna saw the crow"
    begin = text.index("crow")
    assert np.isfinite(embed_words_in_texts(untrained("bert"), [text], [(begin, begin + 4)])).all()


def test_a_model_that_reads_backward_has_read_what_follows_a_word(
    untrained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = untrained("gpt2")
    monkeypatch.setattr(model, "tokenizer", model.tokenizer.to_reversed())
    texts = ["The cat saw the dog", "A child fed the dog", "The cat saw the dog slept"]
    spans = [(text.index(" dog"), text.index(" dog") + 4) for text in texts]
    first, second, third = embed_words_in_texts(model, texts, spans)
    assert second == pytest.approx(first, abs=1e-5)  # nothing follows it
    assert np.abs(third - first).max() > 0.01
    once = encode_texts_once(model, [Occurrence(texts[0], *spans[0])], {texts[0]: [0]}, -1)
    assert once[0] == pytest.approx(first, abs=1e-5)


def senses(label: str, text_a: str, text_b: str, word: str) -> Example:
    spans = tuple((text.index(word), text.index(word) + len(word)) for text in (text_a, text_b))
    return Example(label + text_a, (text_a, text_b), label, spans)


def test_senses_by_a_threshold_from_train(untrained: Any) -> None:
    train = [
        senses("true", "The cat slept.", "The cat slept.", "cat"),
        senses("false", "The cat slept.", "Before the rain, Anna saw a cat", "cat"),
    ]
    outcome = evaluate_word_in_context(untrained("bert"), train, train)
    assert outcome.metrics["accuracy"] == 1.0
    assert [p.prediction for p in outcome.predictions] == ["true", "false"]
    assert (outcome.predictions[0].scores or {})["cosine"] == pytest.approx(1)
    assert (outcome.predictions[1].scores or {})["cosine"] < outcome.details["threshold"] < 1
    given = evaluate_word_in_context(untrained("bert"), train, threshold=-2)
    assert [p.prediction for p in given.predictions] == ["true", "true"]
    with pytest.raises(UserError, match="No threshold for the cosine"):
        evaluate_word_in_context(untrained("bert"), train)


def test_pairs_of_texts(untrained: Any) -> None:
    pairs = [("The cat slept.", "The cat slept."), ("Anna saw it.", "Anna saw it.")]
    found = evaluate_text_similarity(untrained("bert"), [Example(i, pair) for i, pair in enumerate(pairs)])
    assert found.metrics["precision_at_1"] == 1.0
    scored = [Example(1, pairs[0], 5.0), Example(2, (pairs[0][0], pairs[1][0]), 1.0)]
    assert evaluate_text_similarity(untrained("bert"), scored).metrics["spearman"] == pytest.approx(1.0)


def test_mistakes_are_named(untrained: Any) -> None:
    with pytest.raises(UserError, match="layer is 9"):
        embed_texts(untrained("bert"), TEXTS, layer=9)
    with pytest.raises(UserError, match="Did you mean 'mean'"):
        embed_texts(untrained("bert"), TEXTS, "meen")  # type: ignore[arg-type]


def test_a_checkpoint_without_a_tokenizer_is_named(saved: Any, tmp_path: Path) -> None:
    shutil.copytree(saved("bert"), tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).unlink()
    with pytest.raises(UserError, match="bare has no tokenizer: copy the model"):
        embed_texts(tmp_path / "bare", ["a"])
