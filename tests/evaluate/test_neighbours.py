from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from firth import api
from firth.core.errors import UserError
from firth.evaluate import WordVectors, load_word_vectors, read_vectors
from firth.evaluate.neighbours import most_similar, sample_neighbours, write_vectors
from firth.models import load_model

WORDS = ["king", "queen", "man", "woman", "apple"]
VECTORS = np.array([[1, 0, 1], [0, 1, 1], [1, 0, 0.1], [0, 1, 0.1], [-1, -1, 0.3]], np.float32)


@pytest.fixture
def vectors() -> WordVectors:
    return WordVectors(WORDS, VECTORS)


def test_the_nearest_words(vectors: WordVectors) -> None:
    first, second = most_similar(vectors, ["king"], top=2)
    assert (first.word, second.word) == ("man", "queen")
    assert first.similarity == pytest.approx(1.1 / np.sqrt(2 * 1.01))
    assert second.similarity == pytest.approx(0.5)
    assert len(most_similar(vectors, ["king"], top=99)) == 4  # not the word itself


def test_an_analogy(vectors: WordVectors) -> None:
    assert most_similar(vectors, ["woman", "king"], ["man"])[0].word == "queen"


def test_a_word_without_a_vector(vectors: WordVectors) -> None:
    with pytest.raises(UserError, match=r"'kings' has no vector\. Did you mean 'king'"):
        most_similar(vectors, ["kings"])
    with pytest.raises(UserError, match=r"There are: apple, king, man, queen, woman\.$"):
        most_similar(vectors, ["zzz"])
    many = WordVectors([f"w{i:03}" for i in range(400)], np.eye(400, dtype=np.float32))
    with pytest.raises(UserError, match=r"There are: (w\d+, ){9}w009 and 390 more\.$"):
        most_similar(many, ["zzz"])


@pytest.mark.parametrize(("form", "names"), [("word2vec", ["vectors.txt", "vectors.bin"]), ("glove", ["vectors.txt"])])
def test_files_give_the_same_vectors_again(vectors: WordVectors, tmp_path: Path, form: str, names: list[str]) -> None:
    files = write_vectors(vectors, tmp_path / "out", form)
    assert [file.name for file in files] == names
    for file in files:
        found = read_vectors(file)
        assert found.words == WORDS
        np.testing.assert_array_equal(found.vectors_ND, VECTORS)


def test_spacy_reads_our_file(tmp_path: Path) -> None:
    """By the rules of `spacy init vectors` (spacy/training/initialize.py), without spaCy.

    The first line is the number of rows and columns. In each line the last fields are numbers, the rest is the
    word. Text mode ends a line at a carriage return too, and white space at the end of a line goes.
    """
    numbers = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32) * np.float32(1e-6)
    words = WordVectors(["naïve", "東京", "12", "</s>"], numbers)
    write_vectors(words, tmp_path / "out", "word2vec")
    with (tmp_path / "out" / "vectors.txt").open(encoding="utf8") as file:
        rows, columns = (int(size) for size in next(file).split())
        fields = [line.rstrip().rsplit(" ", columns) for line in file]
    assert (rows, columns) == (len(fields), 7) == (4, 7)
    assert [word for word, *_ in fields] == words.words
    np.testing.assert_array_equal(np.array([row for _, *row in fields], "f"), numbers)
    with pytest.raises(UserError, match="contains a space"):
        write_vectors(WordVectors(["a\rb"], numbers[:1]), tmp_path / "more", "word2vec")


def test_gensim_opens_our_files_and_we_open_its(vectors: WordVectors, tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models")
    random = WordVectors(["naïve", "東京", "x"], np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32))
    text, binary = write_vectors(random, tmp_path / "out", "word2vec")
    (glove,) = write_vectors(random, tmp_path / "glove", "glove")
    opened = models.KeyedVectors.load_word2vec_format
    for theirs in (opened(text), opened(binary, binary=True), opened(glove, no_header=True)):
        assert theirs.index_to_key == random.words
        np.testing.assert_array_equal(theirs.vectors, random.vectors_ND)
    theirs.save_word2vec_format(str(tmp_path / "t.txt"))
    theirs.save_word2vec_format(str(tmp_path / "t.bin"), binary=True)
    for name in ("t.txt", "t.bin"):
        ours = read_vectors(tmp_path / name)
        assert ours.words == random.words
        np.testing.assert_array_equal(ours.vectors_ND, random.vectors_ND)
    theirs = opened(write_vectors(vectors, tmp_path / "more", "word2vec")[0])
    assert theirs.most_similar("king", topn=1)[0][0] == most_similar(vectors, ["king"])[0].word


def test_vectors_of_a_file_become_a_checkpoint(tmp_path: Path) -> None:
    """Each word has its vector, the first of two; others are at 0, and what a special token is called is that token."""
    file, labelled = tmp_path / "v.txt", tmp_path / "t.jsonl"
    labelled.write_text('{"text": "good", "label": "a"}\n{"text": "bad", "label": "b"}\n')
    file.write_text("good 1 2\nbad -1 3\n<unk> 7 7\ngood 9 9\n")
    api.export(file, tmp_path / "words", format="firth")
    model = load_model(tmp_path / "words")
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("GOOD bad ugly")
    assert model.embed.tokens.weight[ids].tolist() == [[1, 2], [-1, 3], [7, 7]]
    again = load_word_vectors(tmp_path / "words")
    assert again.words == ["good", "bad"]
    assert load_word_vectors(tmp_path / "words", limit=1).words == ["good"]
    with pytest.raises(UserError, match="Word vectors cannot predict the next or a masked word"):
        api.fill(tmp_path / "words", "a good ___")
    with pytest.raises(UserError, match=r"LoRA adapts .* and word vectors have none"):
        api.finetune(tmp_path / "words", "classify", labelled, labelled, tmp_path / "no", lora_rank=2)
    with pytest.raises(UserError, match="is the checkpoint itself"):
        api.export(tmp_path / "words", tmp_path / "words", overwrite=True, format="word2vec")
    file.write_text("Good 1 2\nbad -1 3\n")
    api.export(file, tmp_path / "cased", format="firth")
    cased = load_model(tmp_path / "cased")
    assert cased.tokenizer is not None
    assert cased.embed.tokens.weight[cased.tokenizer.encode("Good good")].tolist() == [[1, 2], [0, 0]]
    with pytest.raises(UserError, match="`firth export FILE --format firth` makes one of a file of word vectors"):
        api.finetune(file, "classify", labelled, labelled, tmp_path / "run")
    found = api.finetune(tmp_path / "words", "classify", labelled, labelled, tmp_path / "run", max_steps=40, seeds=1)
    assert found["mean"] == 1.0


def test_wrong_formats_and_words(vectors: WordVectors, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown format 'word3vec' \(--format\)\. Did you mean 'word2vec'"):
        api.export(tmp_path / "a", tmp_path / "b", format="word3vec")
    with pytest.raises(UserError, match="'new york' contains a space"):
        write_vectors(WordVectors(["new york"], VECTORS[:1]), tmp_path / "b", "glove")


def test_samples_are_of_words_that_are_known(vectors: WordVectors) -> None:
    assert sample_neighbours(vectors) == {}  # too few to show the neighbours of those in the middle
    many = WordVectors([f"w{chr(97 + i // 26)}{chr(97 + i % 26)}x" for i in range(400)], np.eye(400, dtype=np.float32))
    found = sample_neighbours(many)
    assert 3 < len(found) <= 12
    assert all(len(near) == 8 and word not in near for word, near in found.items())
