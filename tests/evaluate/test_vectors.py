"""Word vectors are read from every common format, and a damaged file is named by line."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.evaluate.vectors import (
    WordVectors,
    evaluate_analogies,
    evaluate_word_similarity,
    load_word_vectors,
    read_vectors,
)
from firth.text import Example

KINGS: dict[str, list[Any]] = {
    "king": [1, 1, 0],
    "queen": [1, 0, 1],
    "man": [0, 1, 0],
    "woman": [0, 0, 1],
    "apple": [-1, 0.1, 0],
}
VECTORS = WordVectors(list(KINGS), np.array(list(KINGS.values())))


def lines_of(vectors: dict[str, list[Any]]) -> str:
    return "".join(f"{word} {' '.join(map(str, row))}\n" for word, row in vectors.items())


def test_text_formats(tmp_path: Path) -> None:
    glove, word2vec = tmp_path / "glove.txt", tmp_path / "vectors.vec.gz"
    glove.write_text(lines_of(KINGS | {". . .": [1, 2, 3]}))
    word2vec.write_bytes(gzip.compress(("5 3\n" + lines_of(KINGS)).encode()))
    first, second = read_vectors(glove), read_vectors(word2vec)
    assert first.words == [*KINGS, ". . ."]
    assert second.words == list(KINGS)
    assert second.normalized_ND == pytest.approx(VECTORS.normalized_ND)
    assert read_vectors(word2vec, limit=2).words == ["king", "queen"]


def binary(vectors: dict[str, list[Any]], header: str) -> bytes:
    rows = (word.encode() + b" " + np.array(row, "<f4").tobytes() + b"\n" for word, row in vectors.items())
    return header.encode() + b"".join(rows)


def test_binary_format(tmp_path: Path) -> None:
    path = tmp_path / "vectors.bin"
    path.write_bytes(binary(KINGS, "5 3\n"))
    assert read_vectors(path).words == list(KINGS)
    assert read_vectors(path).normalized_ND == pytest.approx(VECTORS.normalized_ND)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("2 3\na 1 2 3\nb 1 2\n", ":3: 2 numbers after the word, expected 3"),
        ("a 1 2 3\nb 1 x 3\n", ":2: 'x' is not a number"),
        ("a 1 2\nb 1 nan\n", ":2: a number of this vector is not finite"),
        ("3 2\na 1 2\nb 1 2\n", "the first line says 3 words, and there are 2"),
        ("1 2\na 1 2\nb 1 2\n", ":3: more words than the 1"),
        ("a\n", ":1: no numbers"),
        ("2 0\n", ":1: the header says vectors of 0 numbers"),
        ("", "no word vectors"),
        ("2 2\na 1 2 3\nb 1 2 3\n", ":2: 3 numbers after the word, expected 2"),
        ("a 1 2\nb 1 2 3\n", ":2: 3 numbers after the word, expected 2"),
        ("2 2.0\na 1 2\nb 1 2\n", ":1: '2 2.0' is neither a header.*line 2 has 2 numbers"),
        ("-3 2\na 1 2\nb 1 2\n", ":1: '-3 2' is neither a header"),
    ],
)
def test_a_damaged_text_file_is_named_by_line(content: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=problem):
        read_vectors(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"king 1 1 0\n", ":1: not word2vec's binary format"),
        (binary(KINGS, "5 3\n")[:-9], "word 5 of 5: the file ends inside its vector"),
        (binary(KINGS, "6 3\n"), "word 6 of 6: the file ends"),
        (binary(KINGS, "4 3\n"), "data follow the last of the 4 words"),
        (binary(KINGS, "4007 100000000000\n"), ":1: the header says vectors of 100,000,000,000 numbers"),
        (b"1 1\n\xff\xfe " + np.ones(1, "<f4").tobytes(), "not UTF-8"),
    ],
)
def test_a_damaged_binary_file_is_named_by_word(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        read_vectors(path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("v.bin.gz", b"no gzip at all", "not a complete .gz file"),
        ("v.bin.gz", gzip.compress(b"5 3\nking " + b"x" * 10_000)[:40], "is truncated"),
        ("v.bin.xz", lzma.compress(b"5 3\nking " + bytes(range(256)) * 40)[:60], "is truncated"),
    ],
    ids=["no gzip", "cut gzip", "cut xz"],
)
def test_a_damaged_compressed_file(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=problem):
        read_vectors(tmp_path / name)


def test_a_vector_that_no_compressed_file_has(tmp_path: Path) -> None:
    path = tmp_path / "vectors.bin.gz"
    path.write_bytes(gzip.compress(binary(KINGS, "5 100000000000\n")))
    with pytest.raises(UserError, match=":1: the header says vectors of 100,000,000,000 numbers"):
        read_vectors(path)


def test_words_with_spaces_after_a_header(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("2 2\n. . . 1 2\nnew york 3 4\n")
    assert read_vectors(path).words == [". . .", "new york"]
    path.write_text("7 2.0\na 1\n")  # GloVe's, of one number, without a header
    assert read_vectors(path).words == ["7", "a"]


def test_similar_words_and_unknown_ones() -> None:
    pairs = [("king", "queen", 9.0), ("king", "apple", 0.0), ("man", "woman", 5.0), ("king", "zebra", 3.0)]
    outcome = evaluate_word_similarity(VECTORS, [Example(i, (a, b), s) for i, (a, b, s) in enumerate(pairs)])
    assert outcome.metrics == pytest.approx({"spearman": 1.0, "known": 0.75})
    assert outcome.details["unknown"] == 1
    assert outcome.predictions[0].prediction == pytest.approx(0.5)
    assert outcome.predictions[3].prediction is None
    assert outcome.notices == ["1 of 4 pairs have an unknown word and are skipped."]


def test_analogies() -> None:
    questions = [
        Example(1, ("man", "king", "woman"), "queen", references=("royal",)),
        Example(2, ("Man", "King", "Woman"), "Queen", references=("royal",)),  # no word has capitals
        Example(3, ("man", "king", "woman"), "apple", references=("odd",)),
        Example(4, ("man", "king", "zebra"), "queen", references=("odd",)),
    ]
    outcome = evaluate_analogies(VECTORS, questions)
    assert [p.prediction for p in outcome.predictions] == ["queen", "queen", "queen", None]
    assert outcome.metrics["accuracy"] == pytest.approx(2 / 3)
    assert outcome.details["by_group"] == {"royal": 1.0, "odd": 0.0}
    assert outcome.details["unknown"] == 1


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_token_vectors_are_those_of_whole_words(family: str, untrained: Any) -> None:
    model = untrained(family)
    vectors = load_word_vectors(model)
    assert vectors.find("hedgehogs") is None
    index = vectors.find("the")
    (token,) = model.tokenizer.encode(" the")
    row = model.embed.tokens.weight[token].detach().numpy()
    assert vectors.normalized_ND[index] == pytest.approx(row / np.linalg.norm(row), abs=1e-5)
