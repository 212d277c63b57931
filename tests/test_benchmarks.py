"""The benchmark of training speed at a toy size: both sides learn the same thing, and take a step."""

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
FILE = Path(__file__).parents[1] / "benchmarks" / "train_speed.py"
CPU = Machine(torch.device("cpu"), bf16=False, compile=False)


@pytest.fixture(scope="module")
def bench() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train_speed", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["train_speed"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    for step in (bench.our_step(CPU, model), bench.their_step(CPU, theirs)):
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
