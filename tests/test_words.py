"""word2vec, GloVe and n-grams by the commands: the same text, folders and results as for all other models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from firth import api
from firth.cli.main import app
from firth.core.errors import UserError
from firth.evaluate import load_word_vectors, read_vectors

WORDS = {"vector_size": 16, "epochs": 20, "min_count": 2, "workers": 1, "sample": 0.0, "bigrams": 50}


@pytest.fixture(scope="module")
def run(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "words"
    api.pretrain("word2vec", corpus_file, folder, lowercase=True, overrides=WORDS)
    return folder


@pytest.fixture(scope="module")
def ngrams(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "ngrams"
    api.pretrain("ngram", corpus_file, folder, vocab_size=400, overrides={"order": 4})
    return folder


def said(*arguments: object) -> Any:
    """What a command prints with --json."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout.splitlines()[-1])


def test_a_run_has_the_files_of_every_run(run: Path) -> None:
    files = {"recipe.yaml", "source.json", "log.jsonl", "results.json", "report.html", "final", "data", "tokenizer"}
    assert files <= {p.name for p in run.iterdir()}
    results = json.loads((run / "results.json").read_text())
    assert {"output_dir", "steps", "loss", "eval_loss", "tokens_per_second", "words", "similar"} <= results.keys()
    assert "vector_size: 16" in (run / "recipe.yaml").read_text()


def test_a_finished_run_is_not_done_again(run: Path, corpus_file: Path) -> None:
    before = json.loads((run / "results.json").read_text())
    again = api.pretrain("word2vec", corpus_file, run, lowercase=True, overrides=WORDS, resume=True)
    assert {name: again[name] for name in before} == before
    with pytest.raises(UserError, match="exists already"):
        api.pretrain("word2vec", corpus_file, run, lowercase=True, overrides=WORDS)


def test_similar_words_and_analogies(run: Path) -> None:
    found = said("embed", run / "final", "--similar", "cat", "--top", 3)
    assert found["words"] == ["cat"]
    assert [*found["similar"][0]] == ["word", "similarity"]
    assert len(found["similar"]) == 3
    assert len(said("embed", run / "final", "--analogy", "cat", "dog", "horse")["similar"]) == 10
    assert said("embed", run / "final", "the cat", "the dog")["width"] == 16
    with pytest.raises(UserError, match="three words"):
        said("embed", run / "final", "--analogy", "cat", "dog")


def test_exported_vectors_score_as_the_checkpoint_does(run: Path, tmp_path: Path) -> None:
    files = said("export", run / "final", "--format", "word2vec", "--output-dir", tmp_path / "out")["files"]
    checkpoint = load_word_vectors(run / "final")
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("word1\tword2\tscore\ncat\tdog\t9\ncat\triver\t3\nfox\tgarden\t1\ncat\tzebra\t5\n")
    scores = []
    for place in (run / "final", *files):
        result = api.evaluate(place, "word-similarity", pairs, tmp_path / "scores", overwrite=True)
        assert result["unknown"] == 1
        scores.append(result["metrics"])
    assert scores[0] == scores[1] == scores[2]
    for file in files:
        assert (read_vectors(file).vectors_ND == checkpoint.vectors_ND).all()


def test_questions_with_unknown_words_are_counted(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "analogies.tsv"
    file.write_text("a\tb\tc\td\ncat\tdog\thorse\tfox\ncat\tdog\tking\tqueen\n")
    result = api.evaluate(run / "final", "analogy", file, tmp_path / "scores")
    assert (result["examples"], result["unknown"]) == (2, 1)


def test_the_mean_of_words_and_pairs_of_words_learn_a_task(run: Path, tmp_path: Path) -> None:
    texts = [("the cat slept by the river", "cat"), ("the dog slept by the river", "dog")] * 8
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in texts))
    result = api.finetune(run / "final", "classify", file, file, tmp_path / "tuned", seeds=1, max_steps=60)
    assert result["accuracy"] == 1.0
    assert api.evaluate(tmp_path / "tuned" / "final", data=file)["metrics"]["accuracy"] == 1.0


def test_an_ngram_model_writes_and_is_scored(ngrams: Path, corpus_file: Path, tmp_path: Path) -> None:
    text = api.generate(ngrams / "final", "Nobody knew", max_new_tokens=8)
    assert isinstance(text, str)
    assert text.startswith("Nobody knew why the")
    drawn = said("generate", ngrams / "final", "The", "--temperature", 1, "--num-return-sequences", 4)["results"]
    assert len({one["text"] for one in drawn}) > 1
    scores = api.evaluate(ngrams / "final", "perplexity", corpus_file, tmp_path / "scores")["metrics"]
    assert 1 < scores["perplexity"] < 20
    assert 0 < scores["bits_per_byte"] < 2
    assert api.generate(ngrams / "final", "Nobody knew", max_new_tokens=8, stop=[" the"]) == "Nobody knew why"
    with pytest.raises(UserError, match="do not support beam search"):
        api.generate(ngrams / "final", "The", num_beams=2)


@pytest.mark.parametrize(
    "ask",
    [
        lambda final, file, out: api.embed(final, ["the cat"]),
        lambda final, file, out: api.similar(final, "cat"),
        lambda final, file, out: api.export(final, out),
        lambda final, file, out: api.export(final, out, format="word2vec"),
        lambda final, file, out: api.finetune(final, "classify", file, file, out),
    ],
    ids=["embed", "similar", "export", "export vectors", "finetune"],
)
def test_what_an_ngram_model_cannot_do(ask: Callable[[Path, Path, Path], object], ngrams: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"text": "the cat", "label": "cat"}\n{"text": "the dog", "label": "dog"}\n')
    with pytest.raises(UserError, match=r"only counts.*`firth evaluate --task perplexity`.*`firth generate`"):
        ask(ngrams / "final", file, tmp_path / "out")


def test_glove_by_the_same_command(corpus_file: Path, tmp_path: Path) -> None:
    found = said(
        *("pretrain", "glove", "--data", corpus_file, "--output-dir", tmp_path / "run", "--lowercase"),
        *("vector_size=8", "epochs=2", "min_count=1", "workers=1"),
    )
    assert found["loss"] > 0
    assert len(api.similar(tmp_path / "run" / "final", "cat", top=2)) == 2


def test_a_run_may_have_the_name_of_its_model(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"overrides": {"vector_size": 4, "epochs": 1, "min_count": 1, "workers": 1}}
    first = api.pretrain("glove", corpus_file, "glove", **options)
    assert api.pretrain("glove", corpus_file, "glove", resume=True, **options) == first


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("word2vec", {"overrides": {"vector_sise": 5}}, "Unknown key 'vector_sise'. Did you mean 'vector_size'"),
        ("word2vec", {"objective": "mlm"}, "word2vec takes no --objective"),
        ("word2vec", {"overrides": {"min_count": 100_000}}, "min_count=100000 leaves 0 words"),
        ("ngram", {"overrides": {"order": 7}}, "order is 7"),
        ("glove", {"max_seq_length": 64}, "Unknown key 'max_seq_length'"),
        ("glove", {"overrides": {"x_max": 0.0}}, "x_max is 0, and must be more than 0"),
        ("glove", {"overrides": {"eta": 0.0}}, "eta is 0, and must be more than 0"),
        ("ngram", {"minutes": 3.0}, "minutes: an n-gram model reads its text once"),
        ("word2vec", {"minutes": -1.0}, "minutes is -1.0"),
    ],
)
def test_mistakes(model: str, options: dict[str, Any], message: str, corpus_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        api.pretrain(model, corpus_file, tmp_path / "run", **options)
