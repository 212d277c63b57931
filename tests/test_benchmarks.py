"""The benchmarks at a toy size: both sides learn the same thing and take a step; both make a batch of the same rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firth.models.presets import bert, gpt2, t5, t5_v1_1
from firth.objectives import CLM, MLM, SpanCorruption
from firth.train import Machine

pytest.importorskip("transformers")
FOLDER = Path(__file__).parents[1] / "benchmarks"
CPU = Machine(torch.device("cpu"), bf16=False, compile=False)


def script(name: str) -> Any:
    """A script as a module."""
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
    }[name]


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "t5.1.1"])
def test_one_step_of_each_side(bench: Any, name: str) -> None:
    speeds = bench.measure(name, toy(bench, name), CPU, steps=1, turn=1, warmup=0)
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
    for name, mine in bench.to_hf(model).items():
        torch.testing.assert_close(mine, after[name], atol=1e-6, rtol=0)


def test_packed_rows_hold_four_documents_in_their_frames(bench: Any) -> None:
    workload = toy(bench, "bert")
    vocab = bench.vocabulary(200)
    rows = bench.random_rows(workload, vocab, step=3, documents=4)
    assert rows.doc[0].tolist() == [d for d in range(4) for _ in range(8)]
    assert rows.position[1].tolist() == list(range(8)) * 4
    assert np.flatnonzero(rows.tokens[0] == vocab.cls).tolist() == [0, 8, 16, 24]
    assert np.flatnonzero(rows.tokens[0] == vocab.sep).tolist() == [7, 15, 23, 31]
    assert rows.real.sum() == 2 * 24


def test_labels_as_a_collator_gives_them(bench: Any) -> None:
    batch = bench.Batch(
        tokens=np.array([[7, 8, 9], [7, 8, 9]]), asked=np.array([[0, 2], [1, 0]]), labels=np.array([[5, 6], [4, -100]])
    )
    assert bench.their_inputs(batch)["labels"].tolist() == [[5, -100, 6], [-100, 4, -100]]


def test_main_prints_a_table_and_json(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.WORKLOADS, "toy", toy(bench, "gpt2"))
    monkeypatch.setattr(bench, "choose_machine", lambda settings: CPU)
    bench.main(["--workload", "toy", "--steps", "1", "--json"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["steps"] == 1
    assert {s["workload"] for s in facts["speeds"]} == {"toy"}


# The speed of objectives


@pytest.fixture(scope="module")
def speed() -> Any:
    return script("objective_speed")


SIDES = {
    "clm": ["np, lists", "np, arrays", "pt, lists", "pt, arrays"],
    "mlm": ["np, lists", "np, arrays", "pt, lists", "pt, arrays", "noise alone"],
    "whole-word": ["np, lists", "pt, lists"],
    "permutation-lm": ["np, lists", "np, arrays", "pt, lists", "pt, arrays"],
}


def test_every_objective_that_reads_packed_documents_is_measured(speed: Any) -> None:
    vocab = speed.vocabulary(500)
    tokenizer = speed.their_tokenizer(vocab)

    def make(objective: Any, rows: int, length: int, seed: int) -> Any:
        return speed.random_rows(objective, vocab, rows, length, seed)

    for name in speed.PACKED:
        found = speed.measure(name, make, vocab, tokenizer, rows=2, length=64, turns=1, calls=1)
        assert [s.side for s in found] == ["firth", *SIDES.get(name, [])]
        assert all(s.tokens_per_second > 0 for s in found)
        assert found[0].ratio == 1


def test_random_rows_have_documents_in_their_frames_and_all_bits(speed: Any) -> None:
    vocab = speed.vocabulary(500)
    rows = speed.random_rows(speed.NAMED["mlm"], vocab, 2, 16, seed=3)
    assert rows.doc[0].tolist() == [0] * 8 + [1] * 8
    assert rows.real[0].tolist() == [False, *[True] * 6, False] * 2
    assert rows.tokens[1, [0, 7, 8, 15]].tolist() == [vocab.cls, vocab.sep] * 2
    assert rows.word_start[:, [1, 9]].all()
    assert rows.sentence_end[:, [6, 14]].all()
    for bit in (rows.word_start, rows.sentence_end, rows.salient):
        assert not bit[~rows.real].any()
    assert rows.index.tolist() == [6, 7]


def test_a_collator_gets_the_same_rows_and_words(speed: Any) -> None:
    vocab = speed.vocabulary(500)
    rows = speed.random_rows(speed.NAMED["whole-word"], vocab, 8, 64, seed=0)
    examples = speed.their_examples(rows, words=True)
    assert [example["input_ids"] for example in examples] == rows.tokens.tolist()
    collator = speed.transformers.DataCollatorForLanguageModeling(
        speed.their_tokenizer(vocab), whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0, seed=0,
        return_tensors="np",
    )  # fmt: skip
    asked = collator(examples)["labels"] != -100
    word = np.cumsum(rows.word_start, 1) + 100 * np.arange(8)[:, None]
    sizes, hidden = (np.bincount(word[mask], minlength=900) for mask in (rows.real, asked))
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
        "--rows",
        "2",
        "--turns",
        "1",
        "--json",
    ]
    speed.main([*words, "--text", str(corpus_file)] if text else words)
    printed = capsys.readouterr().out
    facts = json.loads(printed.splitlines()[-1])
    assert "Mtokens/s" in printed
    assert facts["turns"] == 1
    assert [s["objective"] for s in facts["speeds"]] == ["mlm"] * 6 + ["denoisers"]
    assert {s["length"] for s in facts["speeds"]} == {64}
