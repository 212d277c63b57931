"""A word in several texts: static vectors cannot tell its senses apart, and what reads its context may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import firth
from firth.cli.main import app
from firth.core.errors import UserError
from firth.evaluate import WordVectors, evaluate
from firth.evaluate.context import (
    MAX_CANDIDATE_WORDS,
    Occurrence,
    collect_words,
    compare_contexts,
    find_occurrences,
    mean_cosine,
    nearest_occurrences,
)
from firth.evaluate.embed import embed_words_in_texts, evaluate_word_in_context
from firth.models import Model
from firth.models.recurrent.presets import ulmfit
from firth.text import Example, read_labelled

CAVE, BALL = "The cat slept near the old mill.", "Anna saw the cat."


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Five words with two numbers each."""
    path = tmp_path / "vectors.txt"
    path.write_text("cat 1 0\ndog 1 0.1\nmill 0 1\nslept 0 1\ncats 1 1\n")
    return path


def test_every_occurrence_of_a_word_is_found() -> None:
    found = find_occurrences("bat", ["The bat hit the Bat.", "Two bats flew."])
    assert [(at.word, at.begin) for at in found] == [("bat", 4), ("Bat", 16), ("bats", 4)]
    assert [at.word for at in find_occurrences("go", ["They went home."])] == ["went"]
    with pytest.raises(UserError, match=r"'bat' is not in text 2, 'A combat\.'\. Did you mean 'combat'"):
        find_occurrences("bat", ["The bat.", "A combat."])
    with pytest.raises(UserError, match="word to compare is empty"):
        find_occurrences(" ", ["The bat."])


def test_words_stand_in_their_sentences() -> None:
    found = collect_words(["Mr. Grey came in 1905. He left.", "", "A dog."], max_words=6)
    assert [(at.word, at.text.strip()) for at in found] == [
        *((word, "Mr. Grey came in 1905.") for word in ("Mr", "Grey", "came", "in")),
        *((word, "He left.") for word in ("He", "left")),
    ]
    (long,) = {at.text for at in collect_words(["word " * 70])[:60]}
    assert len(long.split()) == 60


def test_vectors_are_those_of_the_places(untrained: Any, file: Path) -> None:
    bert, gpt = untrained("bert"), untrained("gpt2")
    spans = [(text.index("cat"), text.index("cat") + 3) for text in (CAVE, BALL)]
    result = compare_contexts("cat", [CAVE, BALL], [file, bert, gpt], layer=1, among=[CAVE + " A dog saw it."], top=2)
    static, both_sides, before = result["checkpoints"]
    assert [one["kind"] for one in result["checkpoints"]] == ["static", "in context", "in context, of what came before"]
    assert static["similarity"] == [[1.0, 1.0], [1.0, 1.0]]
    assert static["any_two_words"] == pytest.approx(mean_cosine(_unit([[1, 0], [0, 1], [0, 1], [1, 0.1]])))
    assert [near["word"] for near in static["neighbours"][0]] == ["dog", "slept"]
    assert static["neighbours"][0] == static["neighbours"][1]
    for model, one in ((bert, both_sides), (gpt, before)):
        a, b = _unit(embed_words_in_texts(model, [CAVE, BALL], spans, 1))
        assert one["similarity"][0][1] == pytest.approx(float(a @ b), abs=1e-5)
        assert one["similarity"][0][1] < 0.999
        assert all(len(some) == 2 for some in one["neighbours"])
    assert result["occurrences"] == [{"text": 0, "begin": 4, "end": 7}, {"text": 1, "begin": 13, "end": 16}]


def test_one_reading_of_a_sentence_gives_each_word_as_alone(untrained: Any) -> None:
    for model in (untrained("bert"), untrained("t5")):
        occurrences = collect_words([BALL])
        together = firth.evaluate.context.occurrence_vectors(model, occurrences, -1)
        alone = embed_words_in_texts(model, [at.text for at in occurrences], [(at.begin, at.end) for at in occurrences])
        np.testing.assert_allclose(together, alone, atol=1e-4)


def test_a_layer_may_be_wider_than_the_model(tokenizers: Any) -> None:
    """Those of an AWD-LSTM but the last are."""
    model = firth.models.make_model(ulmfit(2, 16, 24, tokenizers["byte-bpe"].vocab.size))
    model.tokenizer = tokenizers["byte-bpe"]
    for layer, width in ((1, 24), (2, 16)):
        occurrences = [*collect_words([BALL]), *find_occurrences("cat", [CAVE])]
        assert firth.evaluate.context.occurrence_vectors(model, occurrences, layer).shape == (5, width)
    assert compare_contexts("cat", [CAVE, BALL], [model], layer=1)["checkpoints"][0]["similarity"][0][1] < 1


def test_nearest_words_are_others_and_each_once() -> None:
    occurrences = [Occurrence(word, 0, len(word)) for word in ("bat", "owl", "Owl", "ball", "went")]
    x_ND = _unit([[1, 0], [1, 0.5], [1, 0.1], [0, 1], [1, 0]])
    found = nearest_occurrences(np.array([1.0, 0.0], np.float32), occurrences, x_ND, "bat", top=5)
    assert [near.occurrence.word for near in found] == ["went", "Owl", "ball"]
    assert [near.occurrence.word for near in nearest_occurrences(x_ND[3], occurrences, x_ND, "go", top=1)] == ["ball"]


def _unit(rows: Any) -> np.ndarray:
    x = np.asarray(rows, np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_the_verb(saved: Any, file: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The dog slept. Anna saw the mill.")
    words = ["embed", str(saved("bert")), CAVE, BALL, "--compare", "cat", "--with", str(file), "--among", str(text)]
    done = CliRunner().invoke(app, [*words, "--top", "2"], catch_exceptions=False)
    assert done.exit_code == 0
    assert all(part in done.output for part in ("Cosines of cat", "any two words", "1 and 2", "Nearest by bert", "dog"))
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert [one["checkpoint"] for one in facts["checkpoints"]] == [str(saved("bert")), str(file)]
    assert facts["checkpoints"][1]["similarity"][0][1] == 1
    assert firth.compare("cat", [CAVE, BALL], saved("gpt2"))["checkpoints"][0]["neighbours"] == []


def test_a_long_text_is_said_to_be_read_in_part(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def looked_at(text: str) -> tuple[list[str], str]:
        (one,) = compare_contexts("cat", [CAVE, BALL], [file], among=[text])["checkpoints"]
        return [near["word"] for near in one["neighbours"][0]], capsys.readouterr().err

    assert looked_at("The dog slept near the mill. " * 10) == (["dog", "slept", "mill"], "")
    words, said = looked_at("dog " * MAX_CANDIDATE_WORDS + "mill")
    assert words == ["dog"]
    assert f"searching the first {MAX_CANDIDATE_WORDS:,} words of that text" in said


def ask(*words: object) -> None:
    CliRunner().invoke(app, ["embed", *map(str, words)], catch_exceptions=False)


def test_mistakes(saved: Any, file: Path, tmp_path: Path, untrained: Any) -> None:
    bert = saved("bert")
    with pytest.raises(UserError, match="occurs only once"):
        ask(bert, CAVE, "--compare", "cat")
    with pytest.raises(UserError, match="'dog' is not in text 2"):
        ask(bert, "A dog.", BALL, "--compare", "dog")
    with pytest.raises(UserError, match=r"vectors\.txt: 'saw' has no vector"):
        ask(bert, BALL, BALL, "--compare", "saw", "--with", file)
    with pytest.raises(UserError, match="layer is 7"):
        ask(bert, CAVE, BALL, "--compare", "cat", "--layer", 7)
    with pytest.raises(UserError, match="no such checkpoint"):
        ask(bert, CAVE, BALL, "--compare", "cat", "--with", tmp_path / "nothing")
    with pytest.raises(UserError, match="prints its own tables"):
        ask(bert, CAVE, BALL, "--compare", "cat", "--similar")
    with pytest.raises(UserError, match="are for --compare WORD"):
        ask(bert, CAVE, BALL, "--with", file)


# Senses by static vectors


SENSES = [
    ("the cat slept", "a cat saw it", "true"),
    ("the cat slept", "two cats saw it", "false"),
    ("a mill slept", "the mill saw it", "true"),
    ("a mill slept", "the mill saw a dog", "false"),
]


@pytest.fixture
def senses(tmp_path: Path) -> Path:
    path = tmp_path / "wic.jsonl"
    rows = [{"word": "mill" if "mill" in a else "cat", "text_a": a, "text_b": b, "label": s} for a, b, s in SENSES]
    rows.append({"word": "zebra", "text_a": "a zebra", "text_b": "zebra", "label": "false"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_static_vectors_know_the_form_and_nothing_else(file: Path, senses: Path, tmp_path: Path) -> None:
    """Equal forms have cosine 1 to the last digit, whatever the label says; unknown words 0."""
    result = evaluate(file, "word-in-context", senses, tmp_path / "out", train=str(senses))
    rows = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    assert [row["scores"]["cosine"] for row in rows] == pytest.approx([1, 0.707107, 1, 1, 0], abs=1e-6)
    assert [row["prediction"] for row in rows] == ["true", "false", "true", "true", "false"]
    assert result["metrics"]["accuracy"] == 0.8


def test_the_same_vector_has_the_same_cosine_whatever_rounding_does() -> None:
    draw = np.random.default_rng(0)
    words = [f"w{i}" for i in range(200)]
    vectors = WordVectors(words, draw.normal(size=(200, 100)))
    pairs = [Example(w, (w, w), str(i % 2 == 0).lower(), ((0, len(w)),) * 2) for i, w in enumerate(words)]
    assert {(p.scores or {})["cosine"] for p in evaluate_word_in_context(vectors, pairs, pairs).predictions} == {1.0}


def test_a_model_of_words_is_asked_in_the_same_way(senses: Path, corpus_file: Path, tmp_path: Path) -> None:
    settings = {"vector_size": 8, "min_count": 1, "workers": 1, "epochs": 1}
    firth.pretrain("word2vec", corpus_file, tmp_path / "run", lowercase=True, overrides=settings)
    examples = read_labelled(senses, "word-in-context", None, "dev")
    outcome = evaluate_word_in_context(tmp_path / "run" / "final", examples, examples)
    assert [(p.scores or {})["cosine"] for p in outcome.predictions] == [1, 0, 1, 1, 0]
    assert "2 of 5 examples have a word without a vector" in outcome.notices[0]
    model = firth.load(tmp_path / "run" / "final")
    assert isinstance(model, Model)
    assert compare_contexts("cat", [CAVE, BALL], [model])["checkpoints"][0]["similarity"][0][1] == 1
