from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from firth.core.errors import Interrupted, UserError
from firth.models import load_model
from firth.static import learners, train
from firth.static import vocabulary as texts
from firth.static.learners import Word2VecCudaTrainer, Word2VecTrainer
from firth.static.ngram import load_ngram
from firth.static.recipe import GloVeRecipe, NgramRecipe, Word2VecRecipe
from firth.static.train import run_static_recipe
from firth.static.vocabulary import build_word_vocabulary, join_phrases
from firth.static.word2vec_triton import WindowBatch
from firth.text import Corpus
from firth.tokens import Shards, open_shards, prepare, train_tokenizer
from firth.train import read_log

Vectors = Word2VecRecipe | GloVeRecipe


def small_stretches(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (texts, learners):
        monkeypatch.setattr(module, "WORD_CHUNK_TOKENS", size)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    small_stretches(monkeypatch, 500)
    monkeypatch.setattr(learners, "CHUNKS_PER_STEP", 4)
    monkeypatch.setattr(learners, "RECORDS_PER_CHUNK", 100)


@pytest.fixture(scope="module")
def data(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_of(Corpus([corpus_file]), tmp_path_factory.mktemp("words"))


def made_of(corpus: Corpus, folder: Path) -> Path:
    tokenizer = train_tokenizer((d.text for d in corpus), "word", 10_000, lowercase=True)
    prepare(corpus, tokenizer, folder / "shards")
    return folder / "shards"


def run(recipe: train.StaticRecipe, data: Path, folder: Path, resume: bool = False) -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    return run_static_recipe(folder, replace(recipe, output_dir=str(folder), data=str(data)), resume)


def weights(folder: Path) -> np.ndarray:
    return load_model(folder / "final").embed.tokens.weight.detach().numpy()


SMALL = {"vector_size": 8, "epochs": 3, "min_count": 2, "workers": 1, "save_steps": 2}
LEARNERS = [
    Word2VecRecipe(**SMALL),
    Word2VecRecipe(**SMALL, sg=0),
    Word2VecRecipe(**SMALL, negative=0),
    Word2VecRecipe(**SMALL, hs=1),
    Word2VecRecipe(**SMALL, phrases=1, threshold=0.3),
    GloVeRecipe(**SMALL),
]


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Kill the run after a step: everything unsaved is lost."""
    for kind in (Word2VecTrainer, train.GloVeTrainer):
        whole: Callable[..., tuple[float, int]] = kind.step

        def step(self, number, pool, whole=whole):  # type: ignore[no-untyped-def]
            if number == steps:
                raise Interrupted("killed")
            return whole(self, number, pool)

        monkeypatch.setattr(kind, "step", step)


@pytest.mark.parametrize("recipe", LEARNERS, ids=["skip-gram", "cbow", "softmax", "hs", "phrases", "glove"])
def test_a_resumed_run_is_bit_exact(recipe: Vectors, data: Path, tmp_path: Path) -> None:
    whole = run(recipe, data, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Interrupted):
            run(recipe, data, tmp_path / "cut")
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = run(recipe, data, tmp_path / "cut", resume=True)
    assert resumed["loss"] == whole["loss"]
    assert resumed["eval_loss"] == whole["eval_loss"]
    np.testing.assert_array_equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert read_log(tmp_path / "cut" / "log.jsonl") == read_log(tmp_path / "whole" / "log.jsonl")


@pytest.mark.parametrize("sg", [0, 1])
def test_hierarchical_softmax_starts_at_the_mean_code_length(sg: int, data: Path) -> None:
    """Output vectors start at 0, so each of the binary decisions on a word's path costs ln 2."""
    shards = open_shards(data)
    lexicon = build_word_vocabulary(shards.train, shards.tokenizer, 1)
    learner = Word2VecTrainer(shards.train, lexicon, Word2VecRecipe(epochs=1, sample=0.0, window=1, sg=sg, hs=1))
    parts = [
        learner.train_words(*learner.read_subsampled(chunk)[:2], 0.0, chunk) for chunk in range(learner.num_chunks)
    ]
    total, guesses = learners.sum_losses(parts)
    assert total / guesses == pytest.approx(learner.untrained_loss, rel=0.02)  # words at document ends predict less
    assert learner.untrained_loss < np.log(len(lexicon.counts)) * 1.1
    first, last = learner.step(0, ThreadPoolExecutor(1)), learner.held_out_loss(shards.train)
    assert last is not None
    assert last < first[0] / first[1]


@pytest.mark.parametrize(("eta", "diverges"), [(0.05, False), (50.0, True)])
def test_a_rate_that_is_too_high_is_reported_once(
    eta: float, diverges: bool, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(GloVeRecipe(**SMALL, eta=eta), data, tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the run diverges. Lower eta, which is 50.") == diverges
    assert np.isfinite(weights(tmp_path)).all()


def test_with_several_workers_no_text_is_read_twice(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    whole = Word2VecTrainer.train_chunk

    def turn(self: Word2VecTrainer, number: int) -> tuple[float, int]:
        read.append(number)
        return whole(self, number)

    monkeypatch.setattr(Word2VecTrainer, "train_chunk", turn)
    recipe = Word2VecRecipe(**{**SMALL, "workers": 3, "save_steps": 1})
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Interrupted):
            run(recipe, data, tmp_path)
    run(recipe, data, tmp_path, resume=True)
    assert sorted(read) == list(range(len(read)))


def test_every_word_is_read_once_in_an_epoch(data: Path) -> None:
    shards = open_shards(data)
    lexicon = build_word_vocabulary(shards.train, shards.tokenizer, 1)
    learner = Word2VecTrainer(shards.train, lexicon, Word2VecRecipe(epochs=2, sample=0.0))
    for epoch in (0, 1):
        turns = range(epoch * learner.num_chunks, (epoch + 1) * learner.num_chunks)
        words = np.concatenate([learner.read_subsampled(turn)[0] for turn in turns])
        np.testing.assert_array_equal(np.bincount(words, minlength=len(lexicon.counts)), lexicon.counts)


def test_chunks_have_document_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_stretches(monkeypatch, 4)
    np.array([0, 1, 2, 3, 4, 5], np.uint32).tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "offsets.npy", np.array([0, 2, 3, 6]))
    shards, word = Shards(tmp_path), np.array([10, 11, -1, 13, 14, 15], np.int32)
    found = [tuple(a.tolist() for a in texts.read_chunk(shards, word, number)) for number in (0, 1)]
    assert found == [([10, 11, -1, 13], [1, 1, 2, 3]), ([14, 15], [3, 3])]


def test_the_vocabulary_is_sorted_by_count_without_rare_words(data: Path) -> None:
    shards = open_shards(data)
    lexicon = build_word_vocabulary(shards.train, shards.tokenizer, 20)
    special = len(lexicon.tokenizer.vocab.special_ids)
    assert (lexicon.counts[:special] == 0).all()
    assert (np.diff(lexicon.counts[special:]) <= 0).all()
    assert lexicon.counts[special:].min() >= 20
    the, old = lexicon.tokenizer.encode("the"), shards.tokenizer.encode("the")
    assert lexicon.word_ids[old].tolist() == the
    assert lexicon.tokenizer.vocab.size == len(lexicon.counts)


def test_words_of_the_same_kind_become_similar(data: Path, tmp_path: Path) -> None:
    """In text made of patterns, animals share their contexts."""
    result = run(
        Word2VecRecipe(vector_size=16, epochs=40, min_count=1, workers=1, sample=0.0, alpha=0.05), data, tmp_path
    )
    model = load_model(tmp_path / "final")
    assert model.tokenizer is not None
    unit = weights(tmp_path) / np.linalg.norm(weights(tmp_path), axis=1, keepdims=True).clip(1e-9)
    cat, dog, quiet = (unit[model.tokenizer.encode(word)[0]] for word in ("cat", "heron", "quiet"))
    assert cat @ dog > cat @ quiet
    losses = [line["loss"] for line in read_log(tmp_path / "log.jsonl")]
    assert losses[-1] < losses[0]
    assert result["eval_loss"] == pytest.approx(losses[-1], rel=0.3)


def test_phrases_become_words(data: Path, tmp_path: Path) -> None:
    run(Word2VecRecipe(**SMALL, phrases=1, threshold=0.3), data, tmp_path)
    tokenizer = load_model(tmp_path / "final").tokenizer
    assert tokenizer is not None
    words = set(tokenizer.backend.get_vocab())
    assert {"railway_station", "old_mill"} <= words
    assert len(tokenizer.encode("railway_station")) == 1
    joined = Shards(tmp_path / "phrases-1")
    shards = open_shards(data).train
    assert joined.num_documents == shards.num_documents
    assert joined.num_tokens < shards.num_tokens


def texts_of(shards: Shards, names: list[str]) -> list[list[str]]:
    words = [names[i] for i in shards.tokens]
    return [words[begin:end] for begin, end in pairwise(shards.offsets)]


@pytest.mark.parametrize(("min_count", "threshold"), [(1, 3.0), (5, 1.0), (5, 5.0), (40, 2.0)])
def test_phrases_equal_gensim(
    min_count: int, threshold: float, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phrases = pytest.importorskip("gensim.models.phrases").Phrases
    small_stretches(monkeypatch, 10**6)  # no pair is cut in two
    shards = open_shards(data)
    lexicon = build_word_vocabulary(shards.train, shards.tokenizer, min_count)
    recipe = Word2VecRecipe(min_count=min_count, threshold=threshold)
    joined, new = join_phrases(shards.train, lexicon, recipe, tmp_path / "phrases")
    names = [str(shards.tokenizer.backend.id_to_token(i)) for i in range(shards.tokenizer.vocab.size)]
    texts = texts_of(shards.train, names)
    theirs = phrases(texts, min_count=min_count, threshold=threshold)
    known = new.tokenizer.backend.get_vocab()
    assert any("_" in word for word in known)
    ours = texts_of(joined, [str(new.tokenizer.backend.id_to_token(max(i, 0))) for i in new.word_ids])
    special = new.tokenizer.backend.id_to_token(0)
    for text, found in zip(texts, ours, strict=True):
        assert [word for word in theirs[text] if word in known] == [word for word in found if word != special]


@pytest.mark.parametrize("sg", [0, 1])
def test_parallel_windows_lower_the_loss(data: Path, sg: int) -> None:
    """The GPU trainer, on the CPU: its loss falls, and it reads the same text."""
    shards = open_shards(data)
    lexicon = build_word_vocabulary(shards.train, shards.tokenizer, 1)
    recipe = Word2VecRecipe(vector_size=16, epochs=2 if sg else 8, sample=0.0, sg=sg, alpha=0.05)
    learner = Word2VecCudaTrainer(shards.train, lexicon, recipe, device="cpu")
    losses = []
    with ThreadPoolExecutor(1) as pool:
        for number in range(learner.num_steps):
            total, guesses = learner.step(number, pool)
            losses.append(total / guesses)
    assert losses[-1] < 0.9 * losses[0]
    assert np.abs(learner.state_arrays()["outputs"]).max() > 0
    words, docs, _ = zip(*map(learner.read_subsampled, range(learners.CHUNKS_PER_STEP)), strict=True)
    words_W, doc_W = learner.read_step(0)
    np.testing.assert_array_equal(words_W, np.concatenate(words))
    together = np.concatenate([np.diff(doc, append=-1) == 0 for doc in docs])  # no window crosses a chunk
    np.testing.assert_array_equal(np.diff(doc_W, append=-1) == 0, together)


def test_the_gpu_trainer_subsamples_frequent_words(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = open_shards(data)
    lexicon = build_word_vocabulary(shards.train, shards.tokenizer, 2)
    learner = Word2VecCudaTrainer(
        shards.train, lexicon, Word2VecRecipe(vector_size=4, epochs=400, sample=1e-2), device="cpu"
    )
    seen_N = np.zeros(len(lexicon.counts), np.int64)

    def only_counted(text: WindowBatch, *_: object) -> tuple[int, int]:
        nonlocal seen_N
        seen_N += np.bincount(text.word_ids.numpy(), minlength=len(seen_N))
        return 0, 1

    monkeypatch.setattr(learners, "train_windows", only_counted)
    with ThreadPoolExecutor(2) as pool:
        for number in range(learner.num_steps):
            learner.step(number, pool)
    times_N = 400 * lexicon.counts
    assert learner.keep_prob_N[lexicon.counts > 0].min() < 0.5
    assert (np.abs(seen_N - times_N * learner.keep_prob_N) <= 5 * np.sqrt(times_N) + 1e-9).all()


def test_train_an_ngram_model(data: Path, tmp_path: Path) -> None:
    result = run(NgramRecipe(order=3), data, tmp_path)
    assert result["loss"] < result["eval_loss"] < result["unigram_entropy"]  # type: ignore[operator]
    model = load_ngram(tmp_path / "final")
    assert model.order == 3
    assert model.tokenizer is not None
    best = int(model.next_token_probs(model.tokenizer.encode("the old")).argmax())
    assert model.tokenizer.decode([best]) == "mill"


def test_documents_shorter_than_the_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("one\n\ntwo\n\nthree")
    data = made_of(Corpus([tmp_path / "t.txt"]), tmp_path)
    assert len(run(NgramRecipe(order=5), data, tmp_path / "run")["ngrams"]) == 3  # type: ignore[arg-type]
    assert "no document is long enough for order 5: the model has order 3." in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "recipe", "message"),
    [
        (
            "a b c d e f g",
            Word2VecRecipe(min_count=5),
            "min_count=5 leaves 0 words of 7: the most frequent occurs 1 time",
        ),
        ("one\n\ntwo\n\none\n\nthree", Word2VecRecipe(min_count=1), "Every document has one word"),
        ("one\n\ntwo\n\none\n\nthree", GloVeRecipe(min_count=1), "Every document has one word"),
    ],
)
def test_text_without_pairs_raises(text: str, recipe: Vectors, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(text)
    corpus = Corpus([tmp_path / "t.txt"])
    prepare(corpus, train_tokenizer((d.text for d in corpus), "word", 1000), tmp_path / "shards", 0.0)
    with pytest.raises(UserError, match=message):
        run(recipe, tmp_path / "shards", tmp_path / "run")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Word2VecRecipe(sg=2), "sg is 2"),
        (Word2VecRecipe(window=0), "window is 0"),
        (Word2VecRecipe(alpha=float("nan")), "alpha is nan"),
        (GloVeRecipe(vector_size=0), "vector_size is 0"),
        (NgramRecipe(order=9), "order is 9"),
        (Word2VecRecipe(device="cuda", negative=0), "device=cuda is for learning with noise words"),
    ],
)
def test_invalid_numbers_raise(recipe: train.StaticRecipe, message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.check()


def test_a_resumed_run_keeps_its_recipe(data: Path, tmp_path: Path) -> None:
    run(Word2VecRecipe(**SMALL), data, tmp_path)
    with pytest.raises(UserError, match="window: 5 -> 3"):
        run(Word2VecRecipe(**SMALL, window=3), data, tmp_path, resume=True)
    assert run(Word2VecRecipe(**{**SMALL, "workers": 0}), data, tmp_path, resume=True)["steps"] > 0  # type: ignore[operator]


@pytest.mark.parametrize(("recipe", "steps"), [(LEARNERS[0], 2), (LEARNERS[-1], 1)], ids=["skip-gram", "glove"])
def test_a_text_that_has_changed_is_not_resumed(
    recipe: Vectors, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("\n".join(f"{i % 7} {i % 11}x {i % 13}y" for i in range(2000)))
    data = made_of(Corpus(text), tmp_path)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, steps)
        run(recipe, data, tmp_path / "run")
    text.write_text("\n".join(f"{i % 7} {i % 11}x" for i in range(2000)))
    prepare(Corpus(text), open_shards(data).tokenizer, data)
    with pytest.raises(UserError, match=r"Cannot resume: the text has changed since .*run/c"):
        run(recipe, data, tmp_path / "run", resume=True)


@pytest.mark.parametrize("recipe", [Word2VecRecipe(**SMALL), GloVeRecipe(**SMALL)], ids=["word2vec", "glove"])
def test_minutes_determine_the_steps_and_the_schedule(
    recipe: Vectors, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "MAX_TIMING_SECONDS", 0.01)
    timed = replace(recipe, minutes=600.0, max_steps=5)  # 600 minutes are enough for 5 steps anywhere
    whole = run(timed, data, tmp_path / "timed")
    log = read_log(tmp_path / "timed" / "log.jsonl")
    assert (whole["steps"], [line["step"] for line in log]) == (5, [1, 2, 3, 4, 5])
    assert whole == run(replace(recipe, max_steps=5), data, tmp_path / "counted") | {
        key: whole[key] for key in ("output_dir", "seconds", "tokens_per_second")
    }
    if isinstance(recipe, Word2VecRecipe):
        falls = (recipe.alpha - recipe.min_alpha) / 5
        assert [line["learning_rate"] for line in log] == pytest.approx([recipe.alpha - k * falls for k in range(5)])
    short = run(replace(recipe, minutes=1e-6), data, tmp_path / "short")
    assert short["steps"] == 1
    assert "max_steps: 1\n" in (tmp_path / "short" / "recipe.yaml").read_text()
    assert run(replace(recipe, minutes=1e-6), data, tmp_path / "short", resume=True) == short
    with pytest.raises(UserError, match="max_steps: 5 -> 6"):
        run(replace(recipe, max_steps=6), data, tmp_path / "counted", resume=True)


def test_a_run_killed_while_timing_steps_times_them_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "MAX_TIMING_SECONDS", 0.01)
    recipe = Word2VecRecipe(**SMALL, minutes=600.0, max_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Interrupted):
            run(recipe, data, tmp_path)
    assert not (tmp_path / "log.jsonl").exists()
    with pytest.raises(UserError, match="window: 5 -> 6"):
        run(replace(recipe, window=6), data, tmp_path, resume=True)
    assert run(recipe, data, tmp_path, resume=True)["steps"] == 3


def test_a_full_disk_skips_a_checkpoint_but_not_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(LEARNERS[0], data, tmp_path / "straight")
    plain = train.save_vectors

    def refused(learner: train.WordVectorTrainer, folder: Path, step: int) -> None:
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(learner, folder, step)

    monkeypatch.setattr(train, "save_vectors", refused)
    run(LEARNERS[0], data, tmp_path / "run")
    assert "a checkpoint could not be written (No space left on device)" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoint-4").exists()
    assert np.array_equal(weights(tmp_path / "run"), weights(tmp_path / "straight"))


def test_a_small_text_is_read_more_often_by_default(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = open_shards(data).train.num_tokens
    monkeypatch.setattr("firth.static.recipe.MIN_WORD2VEC_TOKENS", 7 * tokens)
    recipe = Word2VecRecipe(**{**SMALL, "epochs": 0})
    assert run(recipe, data, tmp_path / "run")["tokens"] == 7 * tokens
    assert "epochs: 7\n" in (tmp_path / "run" / "recipe.yaml").read_text()
    run(recipe, data, tmp_path / "run", resume=True)
    assert run(replace(recipe, epochs=2), data, tmp_path / "two")["tokens"] == 2 * tokens
    with pytest.raises(UserError, match="epochs is 0"):
        GloVeRecipe(epochs=0).check()
