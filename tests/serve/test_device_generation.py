"""Generation in slots, as on a GPU: the texts of generation token by token, and jobs that join a running batch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from firth.generate.device_decode import supports_device_decode
from firth.serve import served_model
from firth.serve.batching import MAX_JOIN_WAIT_S, BatchWorker, Job, Operation, Result, RunningBatch
from firth.serve.device_generation import MAX_IDLE_DECODES

LONG = "the cat sat on the mat and the dog sat on the river"
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"prompt": "the cat", "max_new_tokens": 20, "temperature": 1.0, "seed": 3}),
    ("/generate", {"prompt": [LONG, "the"], "max_new_tokens": 20, "temperature": 1.0, "seed": 4}),
    ("/generate", {"prompt": "the", "max_new_tokens": 18, "temperature": 0.8, "top_k": 9, "num_return_sequences": 3}),
    ("/generate", {"prompt": "the dog", "max_new_tokens": 12, "stop": ["e"]}),
    ("/v1/completions", {"prompt": "the river", "max_tokens": 9, "logprobs": 1, "temperature": 0}),
]


@pytest.fixture
def in_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate as on a GPU."""

    def can_decode(model: Any, config: Any) -> bool:
        return bool(config.num_beams == 1 and config.constraint is None and supports_device_decode(model))

    monkeypatch.setattr(served_model, "can_decode_on_device", can_decode)


def answers(client: Any, requests: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    with ThreadPoolExecutor(len(requests)) as threads:
        found = list(threads.map(lambda request: client.post(request[0], json=request[1]).json(), requests))
    return [without_ids(answer) for answer in found]


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_texts_of_generation_token_by_token(name: str, connect: Any, request: Any) -> None:
    bodies = [(route, {**body, "model": name, "seed": body.get("seed", 1)}) for route, body in REQUESTS]
    bodies += [(route, {**body, "seed": 7}) for route, body in bodies[:1]]  # the same settings: one batch
    with connect(name) as (client, server):
        assert supports_device_decode(server.models[name].model)
        wanted = answers(client, bodies)
    request.getfixturevalue("in_slots")
    with connect(name) as (client, server):
        for _ in range(2):  # the second time in idle slots
            for found, expected in zip(answers(client, bodies), wanted, strict=True):
                assert floats(found) == pytest.approx(floats(expected), abs=1e-3)
                assert rounded(found) == rounded(expected)
        assert 0 < len(server.models[name].decode_pool.idle) <= MAX_IDLE_DECODES


def floats(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [x for part in (value.values() if isinstance(value, dict) else value) for x in floats(part)]
    return [value] if isinstance(value, float) else []


def rounded(value: Any) -> Any:
    return json.loads(json.dumps(value), parse_float=lambda text: 0.0)


def test_a_stream_is_the_same_text(connect: Any, in_slots: None) -> None:
    body = {"model": "gpt2", "prompt": "the cat", "max_tokens": 20, "temperature": 1.0, "seed": 5}
    with connect("gpt2") as (client, _):
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        lines = client.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = [choice["text"] for piece in pieces for choice in piece["choices"]]
    assert "".join(texts) == whole
    assert len([text for text in texts if text]) > 2


def test_a_job_joins_a_running_batch() -> None:
    """Jobs that arrive later are computed by the batch that runs, as long as it has rows left."""
    begun: list[int] = []

    def run(arriving: list[Job]) -> Iterator[None]:
        begun.append(len(arriving))
        taken = list[Job]()
        while arriving or len(taken) < 3:
            taken += arriving
            arriving.clear()
            time.sleep(0.001)
            yield
        for job in taken:
            job.send(Result(len(taken)))

    async def submit() -> None:
        worker = BatchWorker("none", 8, 0.0, max_queue=8)
        worker.thread.start()
        operation = Operation("join", run, has_steps=True, capacity=lambda rows: 3)
        jobs = [Job(operation, None, i) for i in range(3)]
        worker.submit(jobs[0])
        while not begun:
            await asyncio.sleep(0.001)
        for job in jobs[1:]:
            worker.submit(job)
        found = [await asyncio.wait_for(job.events.get(), 10) for job in jobs]
        assert found == [Result(3)] * 3
        worker.stop()

    asyncio.run(submit())
    assert begun == [1]


def test_a_batch_is_closed_for_a_job_that_waits() -> None:
    """Four batches run and are joined. The oldest takes no more jobs for a fifth setting, or for one with many rows."""

    def run(arriving: list[Job]) -> Iterator[None]:
        while True:
            yield

    operation = Operation("join", run, has_steps=True, capacity=lambda rows: 3)
    worker = BatchWorker("none", 8, 0.0, max_queue=64)
    worker.running = [RunningBatch([Job(operation, name, None)]) for name in "abcd"]
    schema = {"type": "object"}  # settings that have no hash

    def arrive(settings: Any, waited_s: float = 0.0, num_rows: int = 1) -> Job:
        job = Job(operation, settings, None, num_rows)
        job.arrival_s = time.monotonic() - waited_s
        worker.waiting.append(job)
        return job

    def begin() -> list[Job]:
        """What the computing thread does between two steps."""
        if jobs := worker.next_batch():
            joined = worker.find_joinable(jobs[0])
            worker.running.append(RunningBatch(jobs)) if joined is None else joined.join(jobs)
        return jobs

    fifth = arrive(schema)
    joining = arrive("a")
    assert begin() == [joining]  # the fifth has not waited for long
    fifth.arrival_s -= MAX_JOIN_WAIT_S
    late, other = arrive("a"), arrive("b")
    assert begin() == [other]
    assert begin() == []
    assert [batch.is_closed for batch in worker.running] == [True, False, False, False]
    del worker.running[0]  # it has ended
    assert begin() == [fifth]
    large = arrive("b", MAX_JOIN_WAIT_S, num_rows=3)  # two of three rows are taken
    late.arrival_s -= MAX_JOIN_WAIT_S
    assert begin() == []
    assert [batch.is_closed for batch in worker.running] == [True, True, False, False]  # those of b and c
    del worker.running[:2]
    assert [begin(), begin()] == [[late], [large]]


def test_a_job_that_does_not_fit_begins_another_batch(connect: Any, in_slots: None) -> None:
    """Six clients share the slots of few batches, and get the texts of their seeds."""
    bodies = [
        ("/generate", {"prompt": LONG if i % 2 else "the", "max_new_tokens": 20, "temperature": 1.0, "seed": i})
        for i in range(6)
    ]
    with connect("t5", batch_wait_ms=0.0, max_batch_size=4) as (client, server):
        alone = [answers(client, [body])[0] for body in bodies]
        assert list(map(rounded, answers(client, bodies))) == list(map(rounded, alone))
        assert all(decode.num_slots in (1, 4) for decode in server.models["t5"].decode_pool.idle)


def test_a_client_that_leaves_frees_its_slot(connect: Any, in_slots: None) -> None:
    """Both are in slots of one batch, or wait for one; the other client gets its text."""
    body = {"max_new_tokens": 20, "temperature": 1.0}
    with connect("gpt2", max_batch_size=4) as (client, server):
        model = server.models["gpt2"]
        wanted = client.post("/generate", json={**body, "prompt": "the", "seed": 2}).json()

        async def ask() -> None:
            jobs = [model.make_generation_job([text], body, seed=seed) for text, seed in (("the dog", 1), ("the", 2))]
            for job in jobs:
                job.loop = asyncio.get_running_loop()
            steps = model.decode_in_slots(list(jobs))
            next(steps)
            jobs[0].cancel()
            for _ in steps:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            assert jobs[0].events.empty()
            (choice,) = jobs[1].events.get_nowait().value
            assert choice.full == wanted["results"][0]["text"]

        asyncio.run(ask())
        assert all(decode.done_B.all() for decode in model.decode_pool.idle)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_gpu_serves_the_texts_of_a_cpu(name: str, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [(route, {**body, "model": name, "seed": body.get("seed", 1)}) for route, body in REQUESTS]
    with connect(name) as (client, server):
        assert server.models[name].model.embed.tokens.weight.is_cuda
        found = [answers(client, bodies) for _ in range(2)]
        assert server.models[name].decode_pool.idle[0].graph is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with connect(name) as (client, _):
        wanted = answers(client, bodies)
    assert [rounded(answer) for answer in found[0]] == [rounded(answer) for answer in wanted]
    assert [rounded(answer) for answer in found[1]] == [rounded(answer) for answer in wanted]
