"""Logits one batch ahead, in rounded shapes: equal to batch by batch; when graphs are captured and replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tasks.small import CPU, WORDS, model_for, parts

from firth.objectives import Batch
from firth.tasks import logits_runner, make_task
from firth.tasks.logits_runner import AheadRunner, LogitsRunner, round_size
from firth.text import Example

TASKS: list[tuple[str, str, dict[str, Any]]] = [
    ("classify", "bert", {"labels": ["a", "b"]}),
    ("classify", "bart", {"labels": ["a", "b"]}),
    ("tag", "bert", {"labels": ["B-X", "I-X", "O"]}),
    ("tag", "gpt2", {"labels": ["B-X", "I-X", "O"]}),
    ("regress", "gpt2", {"texts": 2}),
    ("choice", "llama", {}),
    ("span-qa", "bert", {"unanswerable": False, "threshold": 0.5}),
]


def make(name: str, family: str, facts: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """A task, a model whose weights are not near 0, and items of many lengths."""
    config, tokenizer = parts(family)
    task = make_task(name, {"answer": "head", "max_seq_length": 24, **facts}, tokenizer, config)
    model = model_for(task, config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    texts = [" ".join(WORDS[i % 5 : i % 5 + 1 + i % 6]) for i in range(23)]
    forms: dict[str, Callable[[str], tuple[str, ...]]] = {
        "tag": lambda text: tuple(text.split()),
        "regress": lambda text: (text, text[::-1]),
        "choice": lambda text: (text, *text.split()),
        "span-qa": lambda text: (WORDS[0], text),
    }
    form = forms.get(name, lambda text: (text,))
    items = task.encode([Example(i, form(text)) for i, text in enumerate(texts)])
    return task, model, sorted(items, key=lambda item: item.num_tokens)


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.prediction == (pytest.approx(other.prediction, abs=1e-5) if one.scores is None else other.prediction)
        if one.scores:
            assert one.scores == pytest.approx(other.scores, abs=1e-5)


@pytest.mark.parametrize(("name", "family", "facts"), TASKS)
def test_ahead_and_in_rounded_shapes_is_the_same(name: str, family: str, facts: dict[str, Any]) -> None:
    task, model, items = make(name, family, facts)
    wanted = task.predict(model, items, CPU, 5)
    for batch_tokens in (0, 60):
        task.logits_runner = AheadRunner(model, CPU, batch_tokens)
        found = task.predict(model, items, CPU, 5)
        if name == "tag":
            assert [p.prediction for p in found] == [p.prediction for p in wanted]
        else:
            assert_same(found, wanted)


def test_the_next_batch_is_packed_before_logits_are_read() -> None:
    task, model, items = make(*TASKS[0])
    events: list[str] = []

    class Recording(AheadRunner):
        def launch(self, batch: Batch, pad_id: int) -> Callable[[], np.ndarray]:
            events.append("launch")
            read = super().launch(batch, pad_id)
            return lambda: (events.append("read"), read())[1]

    task.logits_runner = Recording(model, CPU, 0)
    task.predict(model, items[:15], CPU, 5)
    assert events == ["launch", "launch", "read", "launch", "read", "read"]


def test_batches_have_a_number_of_tokens() -> None:
    _, model, items = make(*TASKS[0])
    batches = AheadRunner(model, CPU, 40).split(items, 5)
    assert [item for batch in batches for item in batch] == list(items)
    assert all(len(batch) * batch[-1].num_tokens <= 40 for batch in batches)
    assert all(len(batch) > 1 for batch in batches[:-1])
    assert AheadRunner(model, CPU, 1).split(items[:3], 5) == [items[:1], items[1:2], items[2:3]]
    assert LogitsRunner(model, CPU).split(items[:7], 5) == [items[:5], items[5:7]]
    assert len({round_size(n) for n in range(1, 513)}) < 32
    assert all(n <= round_size(n) <= max(n + 8, 1.25 * n) for n in range(1, 513))


class FakeGraph:
    """`CapturedLogits` without a GPU."""

    made = 0
    fails = False

    def __init__(self, compute_logits: Callable[[Batch], torch.Tensor], batch: Batch, pool: Any, stream: Any) -> None:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.compute_logits = compute_logits
        FakeGraph.made += 1

    def replay(self, batch: Batch) -> torch.Tensor:
        return self.compute_logits(batch.to(torch.device("cpu")))


@pytest.mark.parametrize("fails", [False, True])
def test_the_second_batch_of_a_shape_is_captured(monkeypatch: pytest.MonkeyPatch, capsys: Any, fails: bool) -> None:
    task, model, items = make(*TASKS[0])
    wanted = task.predict(model, items, CPU, 5)
    runner = AheadRunner(model, CPU, 0)
    runner.use_graphs = True
    monkeypatch.setattr(logits_runner, "CapturedLogits", FakeGraph)
    monkeypatch.setattr(logits_runner, "clean_up_failed_capture", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(FakeGraph, "made", 0)
    monkeypatch.setattr(FakeGraph, "fails", fails)
    task.logits_runner = runner
    made = []
    for _ in range(3):
        assert_same(task.predict(model, items, CPU, 5), wanted)
        made.append(FakeGraph.made)
    shapes = len(runner.num_seen)
    if fails:
        assert (made[-1], runner.use_graphs, runner.graphs) == (0, False, {})
        assert "Predictions run without CUDA graphs: operation not permitted" in capsys.readouterr().err
        return
    assert made[1] == made[2] == shapes == len(runner.graphs)
    with torch.no_grad():
        model.embed.tokens.weight.data = model.embed.tokens.weight.data.clone()  # another address
    task.predict(model, items, CPU, 5)
    assert FakeGraph.made == 2 * shapes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("name", "family", "facts"), TASKS)
def test_graphs_of_a_gpu_give_the_same(name: str, family: str, facts: dict[str, Any]) -> None:
    task, model, items = make(name, family, facts)
    wanted = task.predict(model, items, CPU, 5)
    cuda = replace(CPU, device=torch.device("cuda"))
    model.cuda()
    runner = task.logits_runner = AheadRunner(model, cuda, 0)
    for _ in range(3):
        found = task.predict(model, items, cuda, 5)
        if name == "tag":
            assert [p.prediction for p in found] == [p.prediction for p in wanted]
        else:
            for one, other in zip(found, wanted, strict=True):
                assert one.scores == pytest.approx(other.scores, abs=1e-3)
    assert runner.use_graphs
    assert runner.graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_model_that_cannot_be_captured_runs_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    task, model, items = make(*TASKS[0])
    wanted = task.predict(model, items, CPU, 5)
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda batch: logits(batch) + 0 * float(logits(batch).sum().item()))
    cuda = replace(CPU, device=torch.device("cuda"))
    runner = task.logits_runner = AheadRunner(model.cuda(), cuda, 0)
    for _ in range(3):
        for one, other in zip(task.predict(model, items, cuda, 5), wanted, strict=True):
            assert one.scores == pytest.approx(other.scores, abs=1e-3)
    assert not runner.use_graphs
