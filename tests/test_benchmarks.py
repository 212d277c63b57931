"""The benchmarks at a toy size: both sides learn the same thing and take a step; both make a batch of the same rows."""

from __future__ import annotations

import importlib.util
import json
import lzma
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firth.models.config import LearnedPosition
from firth.models.presets import bert, get_preset, gpt2, llama, t5, t5_v1_1
from firth.objectives import CLM, MLM, OBJECTIVES, SpanCorruption
from firth.tokens import train_tokenizer
from firth.tokens.extend import extend_tokenizer, propose_tokens
from firth.train import ComputeConfig

pytest.importorskip("transformers")
FOLDER = Path(__file__).parents[1] / "benchmarks"
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)


def script(name: str) -> Any:
    """A script as a module, which finds those beside it."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench() -> Any:
    return script("train_speed")


def toy(bench: Any, name: str) -> Any:
    return {
        "bert": bench.Workload(bert(1, 16, 2, 200), MLM(), rows=2, length=32),
        "gpt2": bench.Workload(gpt2(1, 16, 2, 200), CLM(), rows=2, length=32),
        "t5": bench.Workload(t5(1, 16, 2, 32, 200), SpanCorruption(), rows=2, length=96),
        "t5.1.1": bench.Workload(t5_v1_1(1, 16, 2, 32, 200), SpanCorruption(), rows=2, length=96),
        "llama": bench.Workload(llama(1, 16, 4, 32, 200, num_kv_heads=2), CLM(), rows=2, length=32),
        "bart": bench.Workload(replace(bench.get_preset("bart-tiny"), vocab_size=200), bench.OBJECTIVES["bart"], 2, 32),
    }[name]


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "t5.1.1", "llama", "bart"])
def test_one_step_of_each_side(bench: Any, name: str) -> None:
    speeds = bench.measure(name, toy(bench, name), CPU, steps=1, steps_per_turn=1, warmup=0)
    assert [s.side for s in speeds] == [bench.OURS, bench.THEIRS, bench.PACKED]
    assert all(s.tokens_per_second > 0 for s in speeds)
    assert speeds[1].ratio == 1


def test_one_step_moves_both_sides_alike(bench: Any) -> None:
    """Without dropout the step of the real loop and the one written for `transformers` lead to the same weights."""
    workload = toy(bench, "bert")
    model = bench.make_model(replace(workload.model, dropout=0.0, attention_dropout=0.0))
    theirs = bench.their_model(model)
    for step in (bench.our_step(CPU, model), bench.their_step(CPU, theirs, None)):
        step(bench.make_batch(workload, step=1))
    after = theirs.state_dict()
    for name, mine in bench.to_hf_tensors(model).items():
        torch.testing.assert_close(mine, after[name], atol=1e-6, rtol=0)


def test_packed_rows_hold_four_documents_in_their_frames(bench: Any) -> None:
    workload = toy(bench, "bert")
    vocab = bench.vocabulary(200)
    rows = bench.random_rows(workload, vocab, step=3, documents=4)
    assert rows.document_ids[0].tolist() == [d for d in range(4) for _ in range(8)]
    assert rows.position_ids[1].tolist() == list(range(8)) * 4
    assert np.flatnonzero(rows.input_ids[0] == vocab.cls).tolist() == [0, 8, 16, 24]
    assert np.flatnonzero(rows.input_ids[0] == vocab.sep).tolist() == [7, 15, 23, 31]
    assert rows.maskable.sum() == 2 * 24


def test_labels_as_a_collator_gives_them(bench: Any) -> None:
    batch = bench.Batch(
        input_ids=np.array([[7, 8, 9], [7, 8, 9]]),
        target_positions=np.array([[0, 2], [1, 0]]),
        labels=np.array([[5, 6], [4, -100]]),
    )
    assert bench.their_inputs(batch)["labels"].tolist() == [[5, -100, 6], [-100, 4, -100]]
    assert "attention_mask" not in bench.their_inputs(batch)
    assert bench.their_inputs(batch, mask=True)["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_main_prints_a_table_and_json(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.WORKLOADS, "toy", toy(bench, "gpt2"))
    monkeypatch.setattr(bench, "choose_compute", lambda settings: CPU)
    bench.main(["--workload", "toy", "--steps", "1", "--json", "--their-mask"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["steps"] == 1
    assert {s["workload"] for s in facts["speeds"]} == {"toy"}


def test_each_change_by_itself(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(bench.WORKLOADS, "toy", toy(bench, "gpt2"))
    seen = []
    monkeypatch.setattr(bench, "choose_compute", lambda settings: seen.append(settings) or CPU)
    bench.main(["--workload", "toy", "--steps", "1", "--each", "--without", "padding", "optim=muon,max_grad_norm=0"])
    assert "toy, without padding: " in capsys.readouterr().err
    tried = [(s.engine.pad_vocabulary, s.optim, s.max_grad_norm) for s in seen[1:]]
    assert tried == [(None, "adamw", 1.0), (False, "adamw", 1.0), (None, "muon", 0.0)]


def test_documents_are_padded_there_and_packed_here(bench: Any) -> None:
    """Documents of 3 to 90 tokens, in rows of 32 with two special tokens each: nothing is lost on either side."""
    lengths = (3, 90, 10, 8, 20, 5, 30, 12)
    workload = replace(toy(bench, "bert"), rows=3, lengths=lengths)
    packed = bench.packed_pieces(lengths, 32, 2)
    assert sorted(n for row in packed for n in row) == [3, 5, 8, 10, 12, 20, 30, 30, 30, 30]
    assert all(sum(n + 2 for n in row) <= 32 for row in packed)
    assert sorted(bench.single_pieces(lengths, 32, 2)) == sorted([n] for row in packed for n in row)
    theirs, ours = (bench.document_batch(workload, 0, packed=p) for p in (False, True))
    assert (theirs.document_ids.max(), ours.document_ids.max()) == (0, max(map(len, packed[:3])) - 1)
    mask = bench.their_inputs(theirs)["attention_mask"]
    assert mask.sum() == theirs.num_tokens == sum(n + 2 for (n,) in bench.single_pieces(lengths, 32, 2)[:3])
    assert ours.num_tokens == sum(n + 2 for row in packed[:3] for n in row)
    speeds = bench.measure("documents", workload, CPU, steps=2, steps_per_turn=1, warmup=0)
    assert [s.side for s in speeds] == [bench.OURS, bench.THEIRS]
    assert speeds[1].ratio == 1


def test_ablations_change_our_side_alone(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(bench.WORKLOADS, "documents", toy(bench, "bert"))
    (tmp_path / "lengths.txt").write_text("7\n12\n25\n")
    asked = []
    monkeypatch.setattr(bench, "choose_compute", lambda settings: asked.append(settings) or CPU)
    words = ["--workload", "documents", "--lengths", str(tmp_path / "lengths.txt"), "--steps", "1", "--alone", "--json"]
    bench.main([*words, "--without", "padding", "--without", "fused_loss", "engine.weights=bf16"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [s["side"] for s in facts["speeds"]] == [bench.OURS]
    assert facts["without"] == ["padding", "fused_loss"]
    assert (asked[1].engine.pad_vocabulary, asked[1].engine.fused_loss, asked[1].engine.weights) == (
        False,
        False,
        "bf16",
    )
    assert asked[0] == bench.DEFAULT_SETTINGS


def test_plainer_ways_compute_the_same(bench: Any) -> None:
    """Three matmuls in place of one, for self-attention and for cross-attention."""
    for name in ("bert", "gpt2", "t5"):
        workload = toy(bench, name)
        model, batch = bench.make_model(workload.model).eval(), bench.make_batch(workload, 0).to(CPU.device)
        usual = model.loss(batch)
        with bench.disable_optimizations(["qkv", "pinned"]):
            assert model.loss(batch).item() == pytest.approx(usual.item(), rel=1e-5)
        assert bench.Attention.project_rows is not bench.separate_qkv_projections
    speeds = bench.measure(
        "toy", toy(bench, "bert"), CPU, 2, 1, 0, alone=True, packed=False, without=["prefetch", "qkv"]
    )
    assert [s.side for s in speeds] == [bench.OURS]


@pytest.mark.parametrize(
    ("without", "wanted"),
    [([], ["step", "step", "read"]), (["ahead"], ["step", "read", "step", "read", "read"])],
)
def test_a_step_that_is_waited_for(
    bench: Any, without: list[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loss is read before the next step begins; else only that of a turn's last step."""
    happened: list[str] = []

    class Loss:
        def item(self) -> None:
            happened.append("read")

    monkeypatch.setattr(bench, "our_step", lambda *_: lambda batch: happened.append("step") or Loss())
    bench.measure("toy", toy(bench, "bert"), CPU, 2, 2, 0, alone=True, packed=False, without=without)
    assert happened == wanted


def test_our_input_without_targets_or_packing(bench: Any) -> None:
    """Targets at every position; the same documents, one in each row."""
    workload = toy(bench, "bert")
    usual, everywhere = (bench.our_batch(workload, 2, without) for without in ((), ["targets"]))
    assert everywhere.target_positions.tolist() == [list(range(32))] * len(usual.input_ids)
    assert everywhere.num_targets == usual.num_targets
    model = bench.make_model(workload.model).eval()
    losses = [model.loss(batch.to(CPU.device)).item() for batch in (usual, everywhere)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    documents = replace(workload, rows=3, lengths=(3, 90, 10, 8, 20, 5, 30, 12))
    assert bench.our_batch(documents, 0).document_ids.max() > 0
    assert bench.our_batch(documents, 0, ["packing"]).document_ids.max() == 0
    with pytest.raises(SystemExit, match="documents"):
        bench.our_batch(workload, 0, ["packing"])
    with pytest.raises(SystemExit, match="every position"):
        bench.our_batch(toy(bench, "gpt2"), 0, ["targets"])


# The speed of objectives


@pytest.fixture(scope="module")
def speed() -> Any:
    return script("objective_speed")


SIDES = {
    "clm": ["np, lists", "np, arrays", "pt, lists", "pt, arrays"],
    "mlm": ["np, lists", "np, arrays", "pt, lists", "pt, arrays", "masking alone"],
    "whole-word": ["np, lists", "pt, lists"],
    "permutation-lm": ["np, lists", "np, arrays", "pt, lists", "pt, arrays"],
}


def test_every_objective_that_reads_packed_documents_is_measured(speed: Any) -> None:
    vocab = speed.vocabulary(500)
    tokenizer = speed.their_tokenizer(vocab)

    def make(objective: Any, rows: int, length: int, seed: int) -> Any:
        return speed.random_rows(objective, vocab, rows, length, seed)

    for name in speed.PACKED_OBJECTIVES:
        found = speed.measure(name, make, vocab, tokenizer, rows=2, length=64, repeats=1, calls=1)
        assert [s.side for s in found] == ["firth", *SIDES.get(name, [])]
        assert all(s.tokens_per_second > 0 for s in found)
        assert found[0].ratio == 1


def test_random_rows_have_documents_in_their_frames_and_all_bits(speed: Any) -> None:
    vocab = speed.vocabulary(500)
    rows = speed.random_rows(speed.OBJECTIVES["mlm"], vocab, 2, 16, seed=3)
    assert rows.document_ids[0].tolist() == [0] * 8 + [1] * 8
    assert rows.maskable[0].tolist() == [False, *[True] * 6, False] * 2
    assert rows.input_ids[1, [0, 7, 8, 15]].tolist() == [vocab.cls, vocab.sep] * 2
    assert rows.word_start[:, [1, 9]].all()
    assert rows.sentence_end[:, [6, 14]].all()
    for bit in (rows.word_start, rows.sentence_end, rows.salient):
        assert not bit[~rows.maskable].any()
    assert rows.stream_index.tolist() == [6, 7]


def test_a_collator_gets_the_same_rows_and_words(speed: Any) -> None:
    vocab = speed.vocabulary(500)
    rows = speed.random_rows(speed.OBJECTIVES["whole-word"], vocab, 8, 64, seed=0)
    examples = speed.their_examples(rows, with_offsets=True)
    assert [example["input_ids"] for example in examples] == rows.input_ids.tolist()
    collator = speed.transformers.DataCollatorForLanguageModeling(
        speed.their_tokenizer(vocab), whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0, seed=0,
        return_tensors="np",
    )  # fmt: skip
    asked = collator(examples)["labels"] != -100
    word = np.cumsum(rows.word_start, 1) + 100 * np.arange(8)[:, None]
    sizes, hidden = (np.bincount(word[mask], minlength=900) for mask in (rows.maskable, asked))
    assert asked.any()
    assert ((hidden == 0) | (hidden == sizes)).all()


@pytest.mark.parametrize("text", [False, True])
def test_speed_of_objectives_prints_a_table_and_json(
    speed: Any, text: bool, corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--objective",
        "mlm",
        "--objective",
        "denoisers",
        "--length",
        "64",
        "--batch-size",
        "2",
        "--repeats",
        "1",
        "--json",
    ]
    speed.main([*words, "--text", str(corpus_file)] if text else words)
    printed = capsys.readouterr().out
    facts = json.loads(printed.splitlines()[-1])
    assert "Mtokens/s" in printed
    assert facts["repeats"] == 1
    assert [s["objective"] for s in facts["speeds"]] == ["mlm"] * 6 + ["denoisers"]
    assert {s["length"] for s in facts["speeds"]} == {64}


# The speed of writing


@pytest.fixture(scope="module")
def writing() -> Any:
    return script("generate_speed")


@pytest.mark.parametrize("choice", [[], ["--sample"]])
def test_both_sides_write_the_same_and_are_measured(
    choice: list[str], writing: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(writing.WORKLOADS, "toy", writing.Workload(gpt2(1, 16, 2, 60), batch_size=2, prompt_length=5))
    monkeypatch.setattr(writing.torch.cuda, "is_available", lambda: False)
    writing.main(["--workload", "toy", "--repeats", "1", "--tokens", "9", "--json", *choice])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [s["side"] for s in facts["speeds"]] == [writing.OURS, writing.THEIRS]
    assert all(s["tokens_per_second"] > 0 for s in facts["speeds"])
    assert facts["speeds"][1]["ratio"] == 1


# The time to a loss


@pytest.fixture(scope="module")
def race() -> Any:
    return script("time_to_loss")


def test_the_time_to_a_loss_lies_between_two_points(race: Any) -> None:
    course = race.TrainingCurve("a", seconds=[10.0, 20.0, 30.0], losses=[7.0, 6.0, 5.0])
    assert course.seconds_to_loss(6.5) == 15
    assert course.seconds_to_loss(7.5) == 10
    assert course.seconds_to_loss(5.0) == 30
    assert course.seconds_to_loss(4.9) is None


def test_the_clock_stands_still_while_others_are_asked(race: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(race.time, "perf_counter", lambda: now[0])
    course = race.TrainingCurve("a")

    def evaluate() -> float:
        now[0] += 100
        return 1.0

    clock = race.TrainingClock(course, steps=4, evaluate=evaluate)
    monkeypatch.setattr(clock, "evaluation_interval", lambda done: 2)
    for step, seconds in ((1, 50.0), (2, 1.0), (3, 1.0), (4, 1.0)):  # the first one compiles
        now[0] += seconds
        clock.step(step)
    assert course.seconds == [2, 4]
    assert course.losses == [1, 1]


def test_held_out_losses_are_closer_at_the_beginning(race: Any) -> None:
    course = race.TrainingCurve("a")
    clock = race.TrainingClock(course, steps=1000, evaluate=lambda: 1.0)
    for step in range(1, 1001):
        clock.step(step)
    assert len(course.losses) == 10 + 18, "ten in the first tenth, and eighteen after that"


@pytest.fixture(scope="module")
def prepared_text(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from firth.text import Corpus
    from firth.tokens import prepare, train_tokenizer

    corpus = Corpus([corpus_file])
    folder = tmp_path_factory.mktemp("race") / "shards"
    prepare(corpus, train_tokenizer((d.text for d in corpus), "wordpiece", 300), folder)
    return folder


def test_their_rows_are_the_text_in_frames(race: Any, prepared_text: Path) -> None:
    shards = race.open_shards(prepared_text)
    rows = race.ConcatenatedBlocks(shards, 16).rows
    vocab, first = shards.tokenizer.vocab, shards.train.tokens[: shards.train.offsets[1]].tolist()
    assert rows.ravel()[: len(first) + 3].tolist() == [vocab.cls, *first, vocab.sep, vocab.cls]
    assert rows.shape == ((shards.train.num_tokens + 2 * shards.train.num_documents) // 16, 16)


def test_both_sides_are_asked_the_same(race: Any, prepared_text: Path) -> None:
    """A model of theirs with our weights has our loss: same rows, same masks, padding out of sight."""
    import transformers

    from firth.models.hf.config_io import to_hf_config
    from firth.models.hf.convert import to_hf_tensors

    shards = race.open_shards(prepared_text)
    asked = race.make_held_out_batches(shards, 32, 5)
    assert sum(len(batch.input_ids) for batch in asked) == 5
    torch.manual_seed(0)
    recipe = race.pretraining_recipe(bert(1, 16, 2, shards.tokenizer.vocab.size))
    ours = race.build_pretrain_model(recipe, shards.tokenizer).eval()
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**to_hf_config(ours.config, None))).eval()
    theirs.load_state_dict(to_hf_tensors(ours), strict=False)
    mine = race.held_out_loss(ours.logits, asked, CPU)
    assert race.held_out_loss(race.their_logits_fn(theirs), asked, CPU) == pytest.approx(mine, rel=1e-5)


def test_a_small_race(
    race: Any, prepared_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "choose_compute", lambda settings: CPU)
    lines = ["text,label", *(f"the {a} by the river,{a}" for a in ("cat", "dog") for _ in range(8))]
    (tmp_path / "task.csv").write_text("\n".join(lines) + "\n")
    task = ["--train", str(tmp_path / "task.csv"), "--dev", str(tmp_path / "task.csv"), "--epochs", "1"]
    sizes = ["--batch-size", "4", "--length", "32", "--peer-layers", "1", "--peer-dim", "16", "--peer-heads", "2"]
    quick = [
        "--seconds",
        "0.3",
        "--trial-seconds",
        "0.05",
        "--trial-steps",
        "4",
        "--held-out-rows",
        "4",
        "--loss",
        "100",
    ]
    words = ["--shards", str(prepared_text), "--model", "bert-tiny", *sizes, *quick, *task, "--json"]
    race.main([*words, "model.num_layers=1", "ema_decay=0.9"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [c["side"] for c in facts["curves"]] == [race.OURS, race.THEIRS]
    for course in facts["curves"]:
        assert course["steps"] >= 2
        assert len(course["seconds"]) == len(course["losses"]) >= 1
        assert course["seconds"] == sorted(course["seconds"])
        assert 0 <= course["accuracy"] <= 1
        assert course["time_to_loss"] == course["seconds"][0], "the first is below 100 already"


# The speed of text


def test_both_sides_read_the_same_tokens(corpus_file: Path, tmp_path: Path) -> None:
    text = script("text_speed")
    texts = (document.text for document in text.Corpus([corpus_file]))
    text.train_tokenizer(texts, "wordpiece", 300).save(tmp_path / "t")
    sides = [(str(corpus_file), str(tmp_path / "t"), str(tmp_path / name), 1) for name in ("ours", "theirs")]
    assert text.firth_prepare(*sides[0]) == text.encode_batch(*sides[1])
    assert (tmp_path / "theirs").read_bytes() == (tmp_path / "ours" / "train" / "tokens.bin").read_bytes()
    assert all(row["used"] == 1 and 0 <= row["padding"] < 1 for row in text.measure_rows(tmp_path / "ours"))
    assert text.process_tree_memory(text.os.getpid()) > 10**6


def test_the_speed_of_text_is_printed(
    corpus_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, seconds = script("text_speed"), {"firth prepare": 2.0, "encode_batch": 3.0, "datasets.map": 8.0}

    def fake(command: list[str], workers: int) -> tuple[dict[str, Any], int]:
        return {"tokens": 1000, "seconds": seconds[command[3]], "cpu": 1.0}, 10**6

    monkeypatch.setattr(text, "run_process", fake)
    text.main([str(corpus_file), "--repeats", "2", "--workers", "1", "--memory-text", "0", "--json"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [side["speedup"] for side in facts["sides"]] == [1.0, 1.5, 4.0]
    assert {row["length"] for row in facts["rows"]} == {128, 512}


# The speed of word vectors


def test_both_sides_learn_vectors_of_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gensim")
    bench = script("vectors_speed")
    text, pairs, questions = (tmp_path / name for name in ("text.txt", "pairs.tsv", "questions.txt"))
    text.write_text("\n\n".join(f"The dog saw a cat near rare{letter}" for letter in "bcdefghijk"))
    pairs.write_text("cat\tdog\t9\nsaw\tnear\t2\na\tdog\t1\nthe\tcat\t3\n")
    questions.write_text(": animals\ncat dog dog cat\n")
    shards, tokenizer = bench.prepare_text([str(text)], 10**6, tmp_path)
    lexicon = bench.build_word_vocabulary(shards, tokenizer, 5)
    bench.write_gensim_corpus(shards, lexicon, tmp_path / "words.txt")
    ours, theirs = (
        bench.train_ours(shards, lexicon, 1, 1, 0.0001),
        bench.train_gensim(tmp_path / "words.txt", lexicon, 1, 1),
    )
    assert sorted(theirs.vectors.words) == ["a", "cat", "dog", "near", "saw", "the"]
    assert {word for word in ours.vectors.words if word.isalpha()} == set(theirs.vectors.words)

    words = [str(text), "--repeats", "2", "--epochs", "1", "--workers", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["vectors_speed.py", *words, "--pairs", str(pairs), "--analogies", str(questions)])
    bench.main()
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["ratio"] > 0
    assert facts["vocabulary"] == 6
    assert {"words/s", "words/CPU second", "pairs", "questions ±"} <= facts["sides"]["gensim"].keys()
    assert facts["sides"]["firth"].keys() == facts["sides"]["gensim"].keys()


# The predecessors


@pytest.fixture(scope="module")
def predecessors() -> Any:
    return script("predecessors")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few examples of every task."""
    import lzma

    animals = ("cat", "dog")
    texts = [{"text": f"the {a} slept by river {n} and near the mill", "label": a} for n in range(12) for a in animals]
    tagged = [{"tokens": ["Anna", "saw", f"the {a}"], "tags": ["B-PER", "O", "O"]} for a in animals]
    senses = [
        {"word": a, "text_a": f"the {a} slept", "text_b": f"a {a} {b}", "label": b == "slept"}
        for a in animals
        for b in ("slept", "was lost near the old mill")
    ]
    folder = tmp_path_factory.mktemp("labelled")
    for name, rows in (("classification/sst2", texts), ("tagging/wnut17", tagged), ("pairs/wic", senses)):
        (folder / name).parent.mkdir(exist_ok=True)
        for part in ("train", "dev"):
            with lzma.open(folder / f"{name}.{part}.jsonl.xz", "wt", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows * 4)
    return folder


@pytest.mark.slow
def test_the_predecessors_side_by_side(
    predecessors: Any,
    labelled: Path,
    corpus_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"elmo": "elmo-tiny", "ulmfit": "ulmfit-tiny", "bert": "bert-tiny"}
    rows = dict.fromkeys(names, 2)
    sizes = {"word": 2000, "elmo-characters": 2000, "wordpiece": 300}
    toy = predecessors.Size(0.05, sizes, names, rows, 1, 100, {"more": 2}, target=1.0, pretraining_steps=2)
    monkeypatch.setitem(predecessors.SIZES, "toy", toy)
    words = ["--text", str(corpus_file), "--data", str(labelled), "--output-dir", str(tmp_path / "work")]
    words += ["--sizes", "toy", "--seeds", "1", "--workers", "1", "--json"]
    predecessors.main([*words, "--only", "bag,ulmfit", "--tasks", "sst2", "--labels", "100,all"])
    part = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert part["complete"]
    assert part["cells"].keys() == {f"{side}/sst2/{n}/0" for side in ("bag", "ulmfit") for n in ("100", "all")}
    assert part["labels_needed"].keys() == {"sst2/bag"}
    predecessors.main(
        [*words, "--only", "bag,ulmfit,elmo,bert", "--tasks", "sst2,wnut17", "--labels", "all", "--jobs", "2"]
    )
    printed = capsys.readouterr().out
    facts = json.loads(printed.splitlines()[-1])
    assert part["cells"].items() <= facts["cells"].items(), "what is done is kept"
    assert set(facts["pretraining"]) == {"bag", "ulmfit", "elmo", "bert"}
    assert facts["senses"].keys() == {"ulmfit", "elmo", "bert"}
    assert len(facts["senses"]["elmo"]) == 3
    assert "| BERT, FLOPs of ELMo |" in printed
    elmo, bert = (facts["pretraining"][name] for name in ("elmo", "bert"))
    a_step = bert["flops"] / bert["steps"]
    assert abs(bert["flops"] - elmo["flops"]) <= a_step
    assert {cell["metric"] for key, cell in facts["cells"].items() if "/wnut17/" in key} == {"entity_f1"}


def test_a_budget_that_is_used_up_ends_cleanly(
    predecessors: Any, labelled: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--text", str(corpus_file), "--data", str(labelled), "--output-dir", str(tmp_path / "work")]
    predecessors.main([*words, "--budget", "1e-9", "--json"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["complete"], facts["cells"]) == (False, {})


def test_labels_that_equal_a_hundred_lie_on_a_line_of_logarithms(predecessors: Any) -> None:
    def cells(*means: float) -> dict[Any, Any]:
        found = {("lstm", "t", n): predecessors.Cell(x, 0, 3, 0) for n, x in zip(("100", "all"), means, strict=True)}
        return found | {("ulmfit", "t", "100"): predecessors.Cell(80.0, 0, 3, 0)}

    sizes = {"100": 100, "all": 10_000}
    assert predecessors.labels_needed(cells(70.0, 90.0), "t", "lstm", sizes) == pytest.approx(1000)
    assert predecessors.labels_needed(cells(85.0, 90.0), "t", "lstm", sizes) == 100
    assert predecessors.labels_needed(cells(70.0, 79.0), "t", "lstm", sizes) == float("inf")
    assert predecessors.labels_needed({}, "t", "lstm", sizes) is None


# The time until a run goes on

FAKE = """
import json, os, sys, time
from pathlib import Path
folder, save = Path(sys.argv[1]), int(sys.argv[2])
first = max((int(p.name.split("-")[1]) for p in folder.glob("checkpoint-*")), default=0)
folder.mkdir(exist_ok=True)
(folder / "new").write_text("".join(json.dumps({"step": i + 1, "loss": 1.0}) + chr(10) for i in range(first)))
os.replace(folder / "new", folder / "log.jsonl")
with open(folder / "log.jsonl", "a") as log:
    for step in range(first + 1, first + save + 1):
        log.write(json.dumps({"step": step, "loss": 1.0}) + chr(10))
        log.flush()
(folder / f"checkpoint-{step}").mkdir()
time.sleep(600)
"""


def test_both_starts_are_timed_up_to_their_first_step(
    prepared_text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a process that does what a run does, without its weight: a log, a checkpoint, and on it goes."""
    bench = script("resume_time")
    started: list[list[Any]] = []
    plain = bench.start

    def fake(words: list[Any]) -> Any:
        started.append(words)
        if words[0] == "-c":
            return plain(["-c", "pass"])
        return plain(["-c", FAKE, words[words.index("--output-dir") + 1], 3])

    monkeypatch.setattr(bench, "start", fake)
    bench.main(
        ["bert-tiny", "--data", str(prepared_text), "--repeats", "2", "--save-steps", "3", "--json", "ema_decay=0.9"]
    )
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["model"] == "bert-tiny"
    assert {name: len(times) for name, times in facts["all_seconds"].items()} == {"python": 2, "fresh": 2, "resume": 2}
    assert all(seconds > 0 for seconds in facts["seconds"].values())
    runs = [words for words in started if words[0] == "-m"]
    assert [words[words.index("--output-dir") + 1].name for words in runs] == ["run-0", "run-0", "run-1", "run-1"]
    assert all("--resume" in words and "ema_decay=0.9" in words for words in runs)


@pytest.mark.slow
def test_a_real_run_is_timed(prepared_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = script("resume_time")
    words = [
        "bert-tiny",
        "--data",
        str(prepared_text),
        "--repeats",
        "1",
        "--save-steps",
        "2",
        "--json",
        "max_seq_length=32",
    ]
    bench.main([*words, "model.num_layers=1", "per_device_train_batch_size=4"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["checkpoint_bytes"] > 10**5
    assert facts["seconds"]["resume"] > facts["seconds"]["python"] / 2


RUN = """
import json, pathlib, sys, time
words = sys.argv[1:]
run = pathlib.Path(words[words.index("--output-dir") + 1])
run.mkdir()
(run / "recipe.yaml").write_text(pathlib.Path(words[-1]).read_text())
with open(run / "log.jsonl", "w") as log:
    for step in range(1, 10**6):
        print(json.dumps({"step": step, "tokens": 100 * step}), file=log, flush=True)
        time.sleep(0.005)
"""


def test_a_default_run_beside_the_step_alone(
    bench: Any, prepared_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With processes that write the log of a run, and that answer as the step alone does."""
    from firth.recipes import pretraining_recipe
    from firth.train import save_recipe

    script("train_speed")  # which it imports
    default_run = script("default_run")
    save_recipe(pretraining_recipe(bert(1, 16, 2, 200), per_device_train_batch_size=4), tmp_path / "recipe.yaml")
    plain, started = default_run.start_process, []

    def fake(words: list[Any], folder: Path) -> Any:
        started.append(list(map(str, words)))
        if "--reference" in words:
            answer = f"open({str(words[-1])!r}, 'w'); n = input(); print([1000.0, 3000.0, 2000.0])"
            return plain(["-c", answer], folder)
        return plain(["-c", RUN, *words, tmp_path / "recipe.yaml"], folder)

    monkeypatch.setattr(default_run, "start_process", fake)
    monkeypatch.setattr(default_run, "SETTLE_SECONDS", 0.05)
    words = ["--models", "bert-tiny", "bert-mini", "--shards", str(prepared_text), "--seconds", "0.2"]
    default_run.main([*words, "--same-shape", "--json"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [r["model"] for r in facts["models"]] == ["bert-tiny", "bert-mini"]
    for r in facts["models"]:
        assert 100 < r["tokens_per_second"] <= 20_000
        assert r["train_speed_tokens_per_second"] == 2000
        assert r["ratio"] == r["tokens_per_second"] / 2000
        assert (r["rows"], r["train_speed_rows"]) == (4, 4)
    assert all(words[:3] == ["-m", "firth", "pretrain"] for words in started[:2])
    options = {word for words in started[:2] for word in words if word.startswith("--")}
    assert options == {"--data", "--output-dir", "--max-steps"}, "the run chooses the rest"


def test_a_run_that_has_ended_is_not_waited_for(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script("train_speed")
    default_run = script("default_run")
    monkeypatch.setattr(default_run, "SETTLE_SECONDS", 0.0)
    process = default_run.start_process(["-c", "raise SystemExit('no memory')"], tmp_path / "run")
    process.communicate()
    run = default_run.PausedProcess("toy", process, tmp_path / "run", bool)
    with pytest.raises(SystemExit, match="toy ended before it was timed: no memory"):
        default_run.tokens_per_second(run, 0.1)


def test_the_step_alone_is_timed(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    script("train_speed")
    default_run = script("default_run")
    monkeypatch.setitem(default_run.WORKLOADS, "toy", default_run.Workload(bert(1, 16, 2, 200), MLM(), 2, 32))
    monkeypatch.setattr(default_run, "choose_compute", lambda settings: CPU)
    monkeypatch.setattr(sys, "stdin", io.StringIO("2\n"))
    default_run.main(["--reference", "toy", "--ready", str(tmp_path / "ready")])
    turns = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (tmp_path / "ready").exists()
    assert len(turns) == 2
    assert min(turns) > 0


# --- by length


def test_speed_by_length_prints_a_table_and_a_page(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = script("length_speed")
    monkeypatch.setattr(lengths, "get_preset", lambda name: bert(1, 16, 2, 200, position=LearnedPosition(32)))
    monkeypatch.setattr(lengths, "choose_compute", lambda settings: CPU)
    page = tmp_path / "page.html"
    lengths.main(["--lengths", "32,64", "--tokens", "128", "--steps", "1", "--plot", str(page), "--json"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(s["length"], s["side"]) for s in facts["speeds"]] == [
        (length, side) for length in (32, 64) for side in (bench.OURS, bench.PACKED)
    ]
    assert page.read_text().count('<svg class="chart') == 1, "memory is known on a GPU only"


def test_how_fast_batches_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer that an objective cannot use leaves it out, and the others are measured."""
    from firth.text import Document
    from firth.tokens import prepare, train_tokenizer

    texts = ["the cat sat on the mat and the dog ran to the door " * 20] * 60
    tokenizer = train_tokenizer(texts, "wordpiece", 60)
    prepare([Document(f"{i} {text}", str(i)) for i, text in enumerate(texts)], tokenizer, tmp_path / "shards")
    words = [str(tmp_path / "shards"), "--steps", "1", "--json", "--gpu", "bert-base-128=10"]
    script("loader_speed").main([*words, "--workload", "bert-base-128", "--workload", "gpt2"])
    out = capsys.readouterr()
    found = json.loads(out.out.splitlines()[-1])["tokens_per_second"]
    assert list(found) == ["bert-base-128"]
    assert all(speed > 0 for speed in found["bert-base-128"])
    assert "gpt2: skipped" in out.out + out.err


def test_how_much_of_a_batch_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from firth.tokens import train_tokenizer

    rows = [{"text": " ".join(["good"] * (1 + i % 9)), "label": "ab"[i % 2]} for i in range(90)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer([row["text"] for row in rows], "wordpiece", 60).save(tmp_path)
    words = ["--tokenizer", str(tmp_path), "--batch-size", "8", "--json", "classify", str(file), "16"]
    script("packed_rows").main(words)
    (share,) = json.loads(capsys.readouterr().out.splitlines()[-1])["shares"]
    assert share["padded"] < share["packed"] <= 1
    assert share["bucketed"] <= share["packed"]
    assert share["bucketed_shapes"] <= 4
    assert share["tokens"] == pytest.approx(7, abs=0.5)


@pytest.mark.parametrize("compiled", [False, True])
def test_fine_tuning_side_by_side(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides are compiled, or none is; here by a compiler that does nothing."""
    from firth.models import make_model
    from firth.tokens import train_tokenizer

    asked = []
    monkeypatch.setattr(torch, "compile", lambda model, *_, **__: asked.append(model) or model)
    rows = [{"text": f"a {word} text", "label": label} for word, label in (("good", "yes"), ("bad", "no"))] * 8
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer([row["text"] for row in rows], "wordpiece", 60)
    model = make_model(bert(1, 16, 2, tokenizer.vocab.size, position=LearnedPosition(128)))
    model.tokenizer = tokenizer
    model.save(tmp_path / "bert")
    words = [
        "--checkpoint",
        str(tmp_path / "bert"),
        "--sst2",
        str(file),
        str(file),
        "--steps",
        "2",
        "--batch-size",
        "4",
    ]
    switch = "--compile" if compiled else "--no-compile"
    script("finetune_speed").main([*words, "--seeds", "1", switch, "--json"])
    sides = json.loads(capsys.readouterr().out.splitlines()[-1])["sides"]
    assert [side["side"] for side in sides] == ["firth", "transformers"]
    assert all(side["compiled"] is compiled for side in sides)
    assert all(side["examples_per_second"] > 0 for side in sides)
    assert sides[0]["shapes"] >= 1
    assert bool(asked) is compiled


# --- the table of expected losses


def test_a_sweep_is_fitted_and_written(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With runs that obey a law: it is found again, written for `firth plan`, and finished runs are not run again."""
    from firth.core.files import write_json
    from firth.lab.expected_loss import read_loss_table
    from firth.lab.scaling_law import fit_scaling_law
    from firth.tokens import open_shards

    script("parallel_runs")  # which it imports
    sweep = script("scaling_sweep")
    started: list[str] = []

    def fake_run(cell: Any) -> dict[str, Any]:
        started.append(Path(cell.folder).name)
        unique = open_shards(Path(cell.shards)).num_tokens
        n = 1e5 * int(cell.shape[0]) ** 3
        loss = sweep.PAPER_LAW.loss(n, cell.passes * unique, unique)
        results = {"parameters": n, "passes": cell.passes, "eval_loss": loss, "steps": 1}
        Path(cell.folder).mkdir(parents=True)
        write_json(Path(cell.folder) / "results.json", results)
        return results

    monkeypatch.setattr(sweep, "run_cell", fake_run)
    monkeypatch.setattr(
        sweep, "fit_scaling_law", lambda runs, alpha: fit_scaling_law(runs, num_bootstraps=3, alpha=alpha)
    )
    table = tmp_path / "table.json"
    write_json(table, {"decoder": sweep.published_entry("decoder")})
    words = ["--cpu", "--text", str(corpus_file), "--output-dir", str(tmp_path / "work"), "--vocab-size", "300"]
    words += ["--text-tokens", "12000", "--tokens", "3000,12000", "--shapes", "1x64,2x64,3x64"]
    sweep.main([*words, "--passes", "1,4", "--write", str(table), "--json"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])["laws"]["encoder (cpu)"]
    assert len(facts["runs"]) == len(started) == 12
    assert started[0] == "encoder-3x64-12000-4", "the longest runs start first"
    laws = read_loss_table(json.loads(table.read_text()))
    assert set(laws) == {"decoder", "encoder (cpu)"}, "the laws of a GPU stay"
    assert laws["encoder (cpu)"].fit.mean_error < 0.01
    assert laws["encoder (cpu)"].assumed == ""
    assert "no sweep was run" in laws["decoder"].assumed
    sweep.main([*words, "--passes", "1,4,9"])
    assert len(started) == 18, "finished runs are read"
    varied = [*words, "--passes", "1,4", "--batches", "0.5,2", "--rates", "2", "--decays", "0"]
    capsys.readouterr()
    sweep.main([*varied, "--dry-run"])
    assert len(started) == 18, "a dry run starts nothing"
    told = "".join(capsys.readouterr())
    assert re.search(r"encoder\D+20\D+8\D+8\D", told), "20 runs, 8 of a setting, 8 left"
    sweep.main([*varied, "--json"])
    settings = json.loads(capsys.readouterr().out.splitlines()[-1])["laws"]["encoder (cpu)"]["settings"]
    assert len(started) == 26
    assert len(settings) == 8
    assert {row["factor"] for row in settings if row["setting"] == "batch"} == {0.5, 2}
    assert all(row["shape"] == "2x64" and row["loss"] == row["default_loss"] for row in settings)


def test_a_law_of_another_machine_is_not_replaced(corpus_file: Path, tmp_path: Path) -> None:
    from firth.core.files import write_json

    script("parallel_runs")
    sweep, table = script("scaling_sweep"), tmp_path / "table.json"
    entry = sweep.published_entry("encoder") | {"assumed": "", "machine": "another CPU"}
    write_json(table, {"encoder (cpu)": entry})
    words = ["--cpu", "--text", str(corpus_file), "--output-dir", str(tmp_path / "work"), "--write", str(table)]
    with pytest.raises(SystemExit, match=r"'encoder \(cpu\)' was measured on another CPU"):
        sweep.main([*words, "--dry-run"])
    sweep.main([*words, "--dry-run", "--replace"])
    assert json.loads(table.read_text())["encoder (cpu)"]["machine"] == "another CPU", "a dry run writes nothing"


def test_a_setting_of_the_sweep_changes_that_setting_alone(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("parallel_runs")
    sweep = script("scaling_sweep")
    words = ["--text", str(corpus_file), "--output-dir", str(tmp_path), "--vocab-size", "300", "--cpu"]
    made: list[Any] = []
    monkeypatch.setattr(sweep, "pretrain", lambda recipe, overwrite: made.append(recipe) or {})
    monkeypatch.setattr(sweep, "measure", lambda cells, args: [sweep.run_cell(cell) for cell in cells] and {})
    monkeypatch.setattr(sweep, "fit_architecture", lambda *_: None)
    monkeypatch.setattr(sweep, "print_fit", lambda *_: None)
    words += ["--shapes", "2x64", "--tokens", "12000", "--text-tokens", "12000", "--passes", "2"]
    sweep.main([*words, "--batches", "2", "--rates", "0.5", "--decays", "4"])
    by_folder = {Path(recipe.output_dir).name.rpartition("-")[2]: recipe for recipe in made}
    default = by_folder["2"]
    assert by_folder["batch2"].global_batch_tokens == 2 * default.global_batch_tokens
    assert by_folder["batch2"].learning_rate > default.learning_rate, "the rate follows the batch"
    rate = replace(by_folder["rate0.5"], learning_rate=default.learning_rate, output_dir=default.output_dir)
    decay = replace(by_folder["decay4"], weight_decay=default.weight_decay, output_dir=default.output_dir)
    assert rate == decay == default
    assert by_folder["rate0.5"].learning_rate == default.learning_rate / 2
    assert by_folder["decay4"].weight_decay == 4 * default.weight_decay


@pytest.mark.slow
def test_a_real_sweep(corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("parallel_runs")
    words = ["--cpu", "--text", str(corpus_file), "--output-dir", str(tmp_path / "work"), "--vocab-size", "300"]
    words += ["--text-tokens", "12000", "--tokens", "4000,12000", "--passes", "1,3", "--shapes", "1x64,2x64", "--json"]
    script("scaling_sweep").main(words)
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])["laws"]["encoder (cpu)"]
    assert len(facts["runs"]) == 8
    assert all(2 < loss < 8 for *_, loss in facts["runs"])


# --- ablations


def write_ablation_data(folder: Path) -> Path:
    """Two files of minimal pairs, and a task."""
    pair = {"good": "the heron sees the otter", "bad": "the heron see the otter"}
    files = {
        "minimal_pairs/some.dev": [pair | {"uid": "a", "term": "agreement"}, pair | {"uid": "b", "term": "agreement"}],
        "minimal_pairs/more.dev": [pair | {"uid": "c", "term": "islands"}],
        **{
            f"classification/sst2.{part}": [{"text": f"a {w} text", "label": w} for w in ("good", "bad")] * 8
            for part in ("train", "dev")
        },
    }
    for name, rows in files.items():
        file = folder / f"{name}.jsonl.xz"
        file.parent.mkdir(parents=True, exist_ok=True)
        with lzma.open(file, "wt") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def test_changes_are_judged_by_two_floors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures that a person can check: the baseline's seeds deviate by a point, so two points count."""
    script("parallel_runs")
    ablations, computed = script("ablations"), list[str]()
    pairs = {"baseline": 0.70, "good": 0.725, "same": 0.715, "loses": 0.76}

    def fake(value: Any) -> Any:
        def step(run: Any, name: str = "") -> Any:
            run.folder.mkdir(parents=True, exist_ok=True)
            computed.append(f"{run.folder.name} {name}")
            return value(run)

        return step

    def accuracy(run: Any) -> dict[str, float]:
        mean = pairs[run.change] + 0.01 * run.seed
        return {"a": mean - 0.1, "b": mean, "c": mean + 0.1}

    monkeypatch.setattr(ablations, "make_shards", lambda args, vocab_size: str(tmp_path))
    monkeypatch.setattr(ablations, "pretrain_run", fake(lambda run: {"eval_loss": 3.0}))
    monkeypatch.setattr(ablations, "score_minimal_pairs", fake(accuracy))
    monkeypatch.setattr(
        ablations, "finetune_run", fake(lambda run: 0.8 + 0.01 * run.seed - 0.1 * (run.change == "loses"))
    )
    data = str(write_ablation_data(tmp_path / "data"))
    words = ["--text", "x", "--data", data, "--output-dir", str(tmp_path / "work"), "--tasks", "sst2"]
    words += [word for name in pairs if name != "baseline" for word in ("--change", name, "seed=1")]
    ablations.main([*words, "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["floors"] == {"loss": 0, "pairs": pytest.approx(0.01), "sst2": pytest.approx(0.01)}
    verdicts = {name: row["verdict"] for name, row in result["changes"].items()}
    assert verdicts == {"baseline": "", "good": "within chance", "same": "within chance", "loses": "loses on sst2"}
    assert result["changes"]["good"]["gains"]["pairs"] == pytest.approx(0.015)
    assert len(computed) == 6 * 3
    pairs["good"] = 0.75
    (tmp_path / "work/runs/good-0/ablation.json").write_text('{"pretraining": {"eval_loss": 2.9}}')
    ablations.main([*words, "--dry-run"])
    assert "minimal pairs, sst2" in capsys.readouterr().out.replace("\n", " ")
    ablations.main([*words, "--json"])
    printed = capsys.readouterr()
    row = json.loads(printed.out.splitlines()[-1])["changes"]["good"]
    assert (row["verdict"], row["means"]["loss"]) == ("helps", 2.9)
    assert computed[18:] == ["good-0 ", "good-0 sst2"], "finished steps are not computed again"


def test_ablations_keep_a_time_limit_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pretrainings first; a step that took too long before is not started; the same command computes the rest."""
    script("parallel_runs")
    ablations, computed, shards = script("ablations"), list[str](), list[int]()

    def fake(name: str, outcome: Any) -> Any:
        def step(run: Any, task: str = "") -> Any:
            run.folder.mkdir(parents=True, exist_ok=True)
            computed.append(f"{run.folder.name} {task or name}")
            return outcome

        return step

    monkeypatch.setattr(ablations, "make_shards", lambda args, vocab_size: shards.append(vocab_size) or "shards")
    monkeypatch.setattr(ablations, "pretrain_run", fake("pretraining", {"eval_loss": 3.0}))
    monkeypatch.setattr(ablations, "score_minimal_pairs", fake("pairs", {"a": 0.6, "b": 0.7, "c": 0.8}))
    monkeypatch.setattr(ablations, "finetune_run", fake("", 0.8))
    data, work = str(write_ablation_data(tmp_path / "data")), tmp_path / "work"
    words = ["--text", "x", "--data", data, "--output-dir", str(work), "--tasks", "sst2", "--seeds", "1"]
    words += ["--changes", "vocab8k"]
    ablations.main([*words, "--steps", "pretraining"])
    assert computed == ["baseline-0 pretraining", "vocab8k-0 pretraining"]
    assert shards == [16384, 8192]
    scores = json.loads((work / "runs/baseline-0/ablation.json").read_text())
    (work / "runs/baseline-0/ablation.json").write_text(json.dumps(scores | {"seconds": {"sst2": 600}}))
    ablations.main([*words, "--time-limit", "9"])
    assert computed[2:] == ["baseline-0 pairs", "vocab8k-0 pairs"]
    assert "baseline-0, sst2 would end after the time limit" in capsys.readouterr().err
    ablations.main([*words, "--dry-run"])
    assert "2 steps of the 2 that are left: about 20m00s, 1 at a time" in capsys.readouterr().err
    ablations.main([*words, "--json"])
    assert computed[4:] == ["baseline-0 sst2", "vocab8k-0 sst2"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["changes"]["vocab8k"]["gains"]["pairs"] == 0
    assert json.loads((work / "ablations.json").read_text())["runs"]["vocab8k"][0]["sst2"] == 0.8
    words[words.index(str(work))] = str(tmp_path / "timed")
    ablations.main([*words, "--minutes", "9", "--time-limit", "8.9"])
    assert computed[6:] == [], "a run of nine minutes takes nine minutes"
    ablations.main([*words, "--minutes", "9", "--dry-run"])
    assert "2 steps of the 6 that are left: about 18m00s, 1 at a time" in capsys.readouterr().err


def test_mistakes_of_ablations_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("parallel_runs")
    data = str(write_ablation_data(tmp_path))
    words = ["--text", "x", "--output-dir", str(tmp_path / "work")]
    for more, message in (
        (["--data", data, "--changes", "gate"], "--changes gate is none of mlm"),
        (["--data", data, "--tasks", "cola"], "--tasks cola is none of sst2"),
        (["--data", data, "--steps", "pretrain"], "--steps pretrain is none of pretraining, pairs, sst2"),
        (["--data", data, "--change", "mine"], "at least one KEY=VALUE"),
        (["--data", str(tmp_path / "none")], "has no minimal_pairs"),
    ):
        with pytest.raises(SystemExit):
            script("ablations").main([*words, *more])
        assert message in capsys.readouterr().err


def test_each_change_is_a_recipe() -> None:
    from firth.recipes import pretraining_recipe, shape_recipe_fields
    from firth.train import apply_overrides, parse_overrides

    script("parallel_runs")
    recipe = pretraining_recipe(get_preset("encoder-6x384"), **shape_recipe_fields("encoder-6x384", "cuda"))
    for name, fields in script("ablations").CHANGES.items():
        changes = parse_overrides(list(fields))
        objective, vocab_size = changes.pop("objective", None), changes.pop("vocab_size", None)
        changed = apply_overrides(recipe, changes)
        changed.check()
        assert objective in OBJECTIVES or vocab_size or changed != recipe, name


@pytest.mark.slow
def test_a_real_ablation(corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("parallel_runs")
    data = str(write_ablation_data(tmp_path / "data"))
    words = ["--text", str(corpus_file), "--data", data, "--output-dir", str(tmp_path / "work"), "--passes", "1"]
    words += ["--shape", "encoder-1x64", "--vocab-size", "300", "--tasks", "sst2", "--task-steps", "2", "--seeds", "2"]
    script("ablations").main([*words, "--changes", "gates", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["changes"]["gates"]["verdict"]
    assert 2 < result["changes"]["gates"]["means"]["loss"] < 7
    assert (tmp_path / "work/runs/gates-0/sst2/results.json").is_file()


def test_the_default_beside_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve cells with fixed settings and the default, which chooses its rate; the best cell is named."""
    from firth.models import make_model
    from firth.tokens import train_tokenizer

    rows = [{"text": f"a {word} text", "label": label} for word, label in (("good", "yes"), ("bad", "no"))] * 20
    (tmp_path / "classification").mkdir()
    for part in ("train", "dev"):
        with lzma.open(tmp_path / f"classification/trec.{part}.jsonl.xz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    tokenizer = train_tokenizer([row["text"] for row in rows], "wordpiece", 60)
    model = make_model(bert(1, 16, 2, tokenizer.vocab.size, position=LearnedPosition(128)))
    model.tokenizer = tokenizer
    model.save(tmp_path / "bert")
    monkeypatch.setattr("firth.tasks.rate_trial.MIN_TRIAL_STEPS", 1)
    monkeypatch.setattr("firth.tasks.rate_trial.MIN_HELD_OUT_EXAMPLES", 4)
    script("parallel_runs")
    grid = script("finetune_grid")
    words = [str(tmp_path / "bert"), "--data", str(tmp_path), "--tasks", "trec", "--quick", "--processes", "1"]
    grid.main([*words, "--output", str(tmp_path / "out.json"), "max_steps=10", "max_seq_length=16"])
    (found,) = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert len(found["grid"]) == 12
    assert found["default_rate"] in map(float, found["tried"])
    assert found["best"] == max(mean for _, _, mean, _ in found["grid"])
    assert found["behind"] == pytest.approx(found["best"] - found["default"])


def test_an_extended_tokenizer_beside_the_old_one() -> None:
    """Three words of "kitabu", of six characters each, become one token each; the other words stay."""
    old = train_tokenizer(["a b i k t u the cat"] * 3, "wordpiece", 60)
    new = extend_tokenizer(old, propose_tokens(old, ["kitabu"] * 10, 1))
    pieces = len(old.encode("kitabu"))
    found = script("extended_tokenizer").compare(old, new, ["the kitabu", "kitabu kitabu cat"])
    assert found == (len("the kitabukitabu kitabu cat"), 5, 3 * pieces + 2, 5, 3)


def test_overlap_of_streams_is_read_from_a_trace() -> None:
    """Stream 7 computes from 0 to 10 and from 20 to 30; stream 9 copies from 8 to 14, of which 2 are beside it."""
    fsdp = script("fsdp_memory")
    spans = [(7, 0, 10), (7, 20, 10), (9, 8, 4), (9, 11, 3)]
    events = [{"cat": "kernel", "ts": ts, "dur": dur, "args": {"stream": stream}} for stream, ts, dur in spans]
    events.append({"cat": "cpu_op", "ts": 0, "dur": 99})
    assert fsdp.read_overlap(events, steps=2) == (15, 10, 3, 1)
    assert fsdp.read_overlap(events, steps=1).share == pytest.approx(1 / 3)


@pytest.mark.slow
def test_a_rank_of_many_takes_a_step_without_the_others() -> None:
    """Each way trains as rank 0 of 16 that do not exist; `counted` is a part of the model where it is sharded."""
    fsdp, counted = script("fsdp_memory"), dict[str, float]()
    for way in ("ddp", "fsdp", "hsdp"):
        training = fsdp.TrainingConfig(max_seq_length=32, compile=False, parallel=way, optim="muon")
        counted[way] = fsdp.measure_memory("gpt2", gpt2(1, 16, 2, 200), training, size=16, rows=2).counted_gb
    assert counted["ddp"] == pytest.approx(8 * counted["hsdp"]) == pytest.approx(16 * counted["fsdp"])


# --- all of them


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "parallel_runs"))
def test_each_script_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its imports and its options still exist, and `--help` says what it measures."""
    try:
        module = script(name)
    except ModuleNotFoundError as e:
        if str(e.name).partition(".")[0] in ("firth", *(file.stem for file in FOLDER.glob("*.py"))):
            raise
        pytest.skip(f"{e.name} is not installed")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {name}.py")
    assert str(module.__doc__).strip() in printed
