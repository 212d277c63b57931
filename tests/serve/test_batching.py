"""Requests that arrive together are computed together, give what they give alone, and leave when their client does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from firth.core.errors import UserError
from firth.serve.batching import BatchWorker, Job, Operation, Result, compute_together

ENDLESS = {"prompt": "the cat", "max_new_tokens": 2000, "min_new_tokens": 2000}
TEXTS = ["the cat", "a river is not blue", "the big dog lives near the garden", "fox", "a small horse and a fox"]


def watch_batches(model: Any, name: str) -> list[int]:
    """Record how many jobs each batch of an operation has."""
    sizes: list[int] = []
    operation = model.operations[name]

    def run(jobs: Sequence[Job]) -> Iterator[None]:
        sizes.append(len(jobs))
        return operation.run(jobs)

    model.operations[name] = operation._replace(run=run)
    return sizes


REQUESTS: list[tuple[str, str, str, list[dict[str, Any]]]] = [
    (
        "gpt2",
        "generate",
        "/generate",
        [{"prompt": t, "max_new_tokens": 9, "temperature": 1.0, "seed": i} for i, t in enumerate(TEXTS)],
    ),
    ("t5", "generate", "/generate", [{"prompt": t, "max_new_tokens": 9} for t in TEXTS]),
    ("t5", "search", "/generate", [{"prompt": t, "max_new_tokens": 5, "num_beams": 2} for t in TEXTS]),
    ("bert", "fill", "/fill", [{"text": f"{t} ___"} for t in TEXTS]),
    ("bert", "embed", "/v1/embeddings", [{"input": t} for t in TEXTS]),
    ("topics", "predict", "/classify", [{"inputs": [t]} for t in TEXTS]),
    ("names", "predict", "/tag", [{"inputs": [t]} for t in TEXTS]),
]


@pytest.mark.parametrize(("name", "operation", "route", "bodies"), REQUESTS, ids=lambda value: str(value)[:10])
def test_a_batch_gives_the_answers_of_single_requests(
    connect: Any, name: str, operation: str, route: str, bodies: list[dict[str, Any]]
) -> None:
    with connect(name, batch_wait_ms=300.0) as (client, server):
        bodies = [{**body, "model": name} for body in bodies]
        sizes = watch_batches(server.models[name], operation)
        with ThreadPoolExecutor(len(bodies)) as threads:
            together = list(threads.map(lambda body: client.post(route, json=body).json(), bodies))
        assert max(sizes) > 1
        assert sum(sizes) == len(bodies)
        server.models[name].worker.batch_wait_s = 0.0
        alone = [client.post(route, json=body).json() for body in bodies]
    assert [flat(answer) for answer in together] == [pytest.approx(flat(answer), abs=2e-5) for answer in alone]


def flat(value: Any) -> list[Any]:
    """The texts and numbers of an answer in order, floats apart from texts so that they can be compared roughly."""
    if isinstance(value, dict):
        return [item for key in sorted(value) for item in flat(value[key])]
    if isinstance(value, list):
        return [item for part in value for item in flat(part)]
    return [value if isinstance(value, float) else sum(map(ord, str(value)))]


def test_different_settings_are_different_batches(connect: Any) -> None:
    with connect("gpt2", batch_wait_ms=200.0) as (client, server):
        sizes = watch_batches(server.models["gpt2"], "generate")
        bodies = [{"prompt": "the cat", "max_new_tokens": n} for n in (3, 4, 3, 4)]
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda body: client.post("/generate", json=body), bodies))
    assert sizes == [2, 2]


def test_a_wrong_request_fails_alone(connect: Any) -> None:
    with connect("bert", batch_wait_ms=200.0) as (client, server):
        sizes = watch_batches(server.models["bert"], "fill")
        with ThreadPoolExecutor(2) as threads:
            texts = ["the ___ is red", "no blank"]
            good, bad = threads.map(lambda text: client.post("/fill", json={"text": text}), texts)
    assert sizes == [2]
    assert good.status_code == 200
    assert bad.status_code == 400
    assert "has no blank" in bad.json()["error"]["message"]


def test_a_short_answer_does_not_wait_for_a_long_text(connect: Any) -> None:
    with connect("t5") as (client, server), ThreadPoolExecutor(1) as threads:
        long = threads.submit(client.post, "/generate", json={**ENDLESS, "max_new_tokens": 150, "min_new_tokens": 150})
        while not server.models["t5"].worker.running:
            time.sleep(0.01)
        assert client.post("/generate", json={"prompt": "a fox", "max_new_tokens": 2}).status_code == 200
        assert client.post("/v1/embeddings", json={"input": "a fox", "model": "t5"}).status_code == 200
        assert not long.done()
        assert long.result().status_code == 200


# --- clients that leave


async def call(app: Any, path: str, body: dict[str, Any], leave: asyncio.Event) -> list[Any]:
    """Send a request to an ASGI application; the client goes when `leave` is set."""
    sent: list[Any] = []
    parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    scope |= {"query_string": b"", "asgi": {"spec_version": "2.3"}, "http_version": "1.1", "scheme": "http"}
    await app({**scope, "server": ("localhost", 80), "client": ("localhost", 1)}, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(connect: Any, stream: bool) -> None:
    with connect("t5", max_queue=1) as (client, server):
        worker = server.models["t5"].worker

        async def leave_soon() -> None:
            leave = asyncio.Event()
            request = asyncio.ensure_future(call(client.gate, "/generate", {**ENDLESS, "stream": stream}, leave))
            while not worker.running:
                await asyncio.sleep(0.01)
            assert client.gate.num_requests == 1
            leave.set()
            start_s = time.monotonic()
            await asyncio.wait_for(request, 5)
            while worker.running:
                await asyncio.sleep(0.01)
            assert time.monotonic() - start_s < 1.5
            assert client.gate.num_requests == 0

        asyncio.run(leave_soon())


def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    async def fill_queue() -> None:
        worker = BatchWorker("none", 1, 0.0, max_queue=1)
        operation = Operation("echo", lambda jobs: compute_together(jobs, lambda jobs: [job.inputs for job in jobs]))
        gone, stays = Job(operation, None, 1), Job(operation, None, 2)
        worker.submit(gone)
        gone.cancel()
        worker.submit(stays)  # takes the place
        worker.thread.start()
        assert await stays.events.get() == Result(2)
        assert gone.events.empty()
        worker.stop()

    asyncio.run(fill_queue())


def test_a_batch_that_fails_answers_every_job() -> None:
    def fail(jobs: Sequence[Job]) -> list[Any]:
        raise UserError("wrong") if len(jobs) == 1 else ValueError("secret")

    async def submit() -> None:
        worker = BatchWorker("none", 4, 0.01, max_queue=4)
        operation = Operation("fail", lambda jobs: compute_together(jobs, fail))
        jobs = [Job(operation, None, i) for i in range(2)]
        for job in jobs:
            worker.submit(job)
        worker.thread.start()
        errors = [await job.events.get() for job in jobs]
        assert [error.status for error in errors] == [500, 500]  # type: ignore[union-attr]
        assert "secret" not in str(errors)
        alone = Job(operation, None, 3)
        worker.submit(alone)
        assert (await alone.events.get()).status == 400  # type: ignore[union-attr]
        worker.stop()

    asyncio.run(submit())
