"""What is refused, by which status, and that no answer tells how the server works inside."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serve.test_batching import ENDLESS, call

from firth.core.errors import UserError
from firth.serve import gate as gate_module
from firth.serve.gate import read_api_keys
from firth.serve.served_model import name_checkpoints


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    assert "/tmp" not in answer.text
    return error


WRONG: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    ("/v1/completions", {"prompt": "a"}, 400, "required", "model"),
    ("/v1/completions", {"model": "gpt3", "prompt": "a"}, 404, "There is no model 'gpt3'", "model"),
    ("/v1/completions", {"model": "../gpt2", "prompt": "a"}, 404, "There is no model", "model"),
    ("/v1/completions", {"model": "bert", "prompt": "a"}, 400, "encoder", None),
    ("/v1/completions", {"model": "gpt2", "prompt": "a", "max_tokens": 0}, 400, "greater than", "max_tokens"),
    ("/v1/completions", {"model": "gpt2", "prompt": "a", "max_tokens": "5"}, 400, "valid integer", "max_tokens"),
    ("/v1/completions", {"model": "gpt2", "prompt": "a", "max_tokens": 64}, 400, "maximum context length", "prompt"),
    ("/v1/completions", {"model": "gpt2", "prompt": "cat " * 80}, 400, "maximum context length is 64", "prompt"),
    ("/v1/completions", {"model": "gpt2", "prompt": [10**6]}, 400, "Token ids", "prompt"),
    ("/v1/completions", {"model": "gpt2", "prompt": []}, 400, "no prompt", "prompt"),
    ("/v1/completions", {"model": "gpt2", "prompt": "a", "n": 3, "temperature": 0}, 400, "several texts", None),
    ("/v1/completions", {"model": "t5", "prompt": "a", "max_tokens": 9000}, 400, "at most 2,048", "max_tokens"),
    ("/v1/completions", {"model": "t5", "prompt": "a " * 9000}, 400, "at most 8,192", None),
    ("/v1/completions", {"model": "t5", "prompt": ["a"] * 33}, 400, "at most 32", None),
    ("/v1/completions", {"model": "gpt2", "prompt": "a", "logit_bias": {}}, 400, "not permitted", "logit_bias"),
    ("/v1/completions", {"model": "gpt2", "prompt": "a", "presence_penalty": 1}, 400, "0", "presence_penalty"),
    ("/v1/chat/completions", {"model": "gpt2", "messages": []}, 400, "at least 1", "messages"),
    (
        "/v1/chat/completions",
        {"model": "gpt2", "messages": [{"role": "king", "content": "a"}]},
        400,
        "'user'",
        "messages.0.role",
    ),
    ("/generate", {"model": "gpt2", "prompt": "a", "json_schema": "/etc/passwd"}, 400, "valid dict", "json_schema"),
    ("/generate", {"model": "gpt2", "prompt": "a", "json_schema": {"x-guidance": 1}}, 400, "x-guidance", "json_schema"),
    ("/generate", {"model": "gpt2", "prompt": "a", "json_schema": {"type": "cat"}}, 400, "type", None),
    ("/generate", {"model": "gpt2", "prompt": "a", "regex": "("}, 400, "regex", None),
    ("/generate", {"model": "gpt2", "prompt": "a", "grammar": "/etc/passwd"}, 400, "not permitted", "grammar"),
    ("/v1/embeddings", {"model": "bert", "input": "cat " * 80}, 400, "maximum context length", "input"),
    ("/generate", {"prompt": "a"}, 400, "Several models", "model"),
    ("/generate", {"model": "gpt2", "prompt": "a", "top_p": 0.5}, 400, "temperature", None),
    ("/fill", {"model": "gpt2", "text": "___"}, 400, "decoder cannot fill", None),
    ("/fill", {"model": "bert", "text": "none"}, 400, "no blank", None),
    ("/classify", {"model": "bert", "inputs": ["a"]}, 400, "knows no task", "task"),
    ("/classify", {"inputs": [["a", "b"]]}, 400, "reads 1", None),
    ("/classify", {"inputs": ["a"], "task": "colours"}, 400, "no such task", "task"),
    ("/attention", {"model": "bert", "text": "a", "layers": [7]}, 400, "no layer 7", None),
    ("/attention", {"model": "bert", "text": "a", "target": "b"}, 400, "encoder-decoders", None),
]


@pytest.mark.parametrize(("route", "body", "status", "said", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_request_is_told_what_is_wrong(
    client: Any, route: str, body: dict[str, Any], status: int, said: str, param: str | None
) -> None:
    error = error_of(client.post(route, json=body), status)
    assert said in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"model": "\xff"}', "application/json", 400),
        (b"[]", "application/json", 400),
        (b"1" * 5000, "application/json", 400),
        (b'{"model": "gpt2", "prompt": "a", "temperature": NaN}', "application/json", 400),
        (b'{"model": "gpt2", "prompt": "a \\ud800 b"}', "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"a=b", "application/x-www-form-urlencoded", 415),
        (b" " * 1_000_001, "application/json", 413),
        (b"", "application/json", 400),
    ],
    ids=["cut", "deep", "bytes", "list", "digits", "nan", "surrogate", "plain", "form", "large", "empty"],
)
def test_a_body_that_is_no_request(client: Any, content: bytes, kind: str, status: int) -> None:
    error_of(client.post("/v1/completions", content=content, headers={"content-type": kind}), status)


def test_other_paths_and_methods(client: Any) -> None:
    error_of(client.get("/v1/completions"), 405)
    error_of(client.get("/../etc/passwd"), 404)
    error_of(client.get("/v1/models/..%2f..%2fetc"), 404)
    answer = client.options("/v1/models", headers={"Origin": "http://evil.org", "Access-Control-Request-Method": "GET"})
    assert "access-control-allow-origin" not in answer.headers
    error_of(client.get("/v1/models", headers={"host": "evil.org"}), 400)


def test_a_body_without_end_is_cut_off(client: Any) -> None:
    def endless() -> Any:
        for _ in range(20):
            yield b" " * 100_000

    error_of(client.post("/fill", content=endless(), headers={"content-type": "application/json"}), 413)


def test_a_body_that_does_not_arrive(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "BODY_TIMEOUT_S", 0.1)
    sent: list[Any] = []

    async def wait() -> Any:
        await asyncio.sleep(10)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/fill", "headers": [(b"host", b"localhost")]}
    asyncio.run(client.gate(scope, wait, send))
    assert sent[0]["status"] == 408


def test_a_full_queue_is_429(connect: Any) -> None:
    with connect("t5", max_queue=1, batch_wait_ms=1000.0) as (client, _), ThreadPoolExecutor(3) as threads:
        bodies = [{"prompt": "a fox", "max_new_tokens": 2}] * 3
        answers = list(threads.map(lambda body: client.post("/generate", json=body), bodies))
    assert sorted(answer.status_code for answer in answers) == [200, 429, 429]
    full = max(answers, key=lambda answer: answer.status_code)
    assert error_of(full, 429)["type"] == "rate_limit_error"
    assert full.headers["retry-after"] == "1"


def test_an_answer_that_takes_too_long_is_504(connect: Any) -> None:
    with connect("t5", timeout_s=0.3) as (client, server):
        start_s = time.monotonic()
        error = error_of(client.post("/generate", json=ENDLESS), 504)
        assert error["type"] == "timeout_error"
        while server.models["t5"].worker.running:
            time.sleep(0.01)
        assert time.monotonic() - start_s < 2


def test_a_stream_that_takes_too_long_ends_with_an_error(connect: Any) -> None:
    with connect("t5", timeout_s=2.0) as (client, _):
        text = client.post("/generate", json={**ENDLESS, "stream": True, "temperature": 1.0}).text
    assert '"timeout_error"' in text.split("\n\n")[-3]


@pytest.mark.parametrize(
    "extreme", [{"temperature": 1e-320}, {"repetition_penalty": 0.01}, {"repetition_penalty": 100}]
)
def test_extreme_settings_give_a_text(client: Any, extreme: dict[str, float]) -> None:
    for model in ("gpt2", "t5"):
        body = {"model": model, "prompt": "a cat", "top_p": 0.5, **extreme}
        assert client.post("/v1/completions", json=body).status_code == 200
    error_of(client.post("/v1/completions", json={**body, "repetition_penalty": 5e-324}), 400)


def test_a_tiny_temperature_is_greedy(client: Any) -> None:
    def texts(**settings: Any) -> list[str]:
        answer = client.post("/generate", json={"model": "gpt2", "prompt": "a cat", "max_new_tokens": 4, **settings})
        assert answer.status_code == 200, answer.text
        return [result["text"] for result in answer.json()["results"]]

    for settings in ({}, {"regex": "[a-z]{2,9}"}):
        greedy = texts(**settings)
        for temperature in (1e-320, 1e-38, 1e-10):
            assert texts(temperature=temperature, num_return_sequences=2, top_k=3, **settings) == 2 * greedy


def test_an_unexpected_failure_tells_nothing(connect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with connect("bert") as (client, server):
        model = server.models["bert"]
        model.operations["fill"] = model.operations["fill"]._replace(run=lambda jobs: iter(1 / 0 for _ in "a"))
        error = error_of(client.post("/fill", json={"text": "___"}), 500)
        server.find = lambda *a: 1 / 0  # type: ignore[assignment, method-assign]
        error_of(client.post("/fill", json={"text": "___"}), 500)
    assert "division" not in str(error)
    assert capsys.readouterr().err.count("ZeroDivisionError") >= 1, "the server's own log has it"


def test_every_address_of_this_machine_alone_refuses_other_hosts(connect: Any) -> None:
    with connect("bert", host="127.0.0.2") as (client, _):
        error_of(client.get("/health", headers={"host": "evil.org:8000"}), 400)
        assert client.get("/health", headers={"host": "127.0.0.2:8000"}).status_code == 200


def test_a_key_is_needed_where_there_is_one(connect: Any) -> None:
    with connect("bert", key="secret-key-1") as (client, _):
        for header in ({}, {"authorization": "Bearer secret-key-2"}, {"authorization": "Basic secret-key-1"}):
            answer = client.get("/v1/models", headers=header)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        error_of(client.get("/openapi.json"), 401)
        assert client.get("/v1/models", headers={"authorization": "Bearer secret-key-1"}).status_code == 200
        assert client.get("/health").status_code == 200


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key\n\nsecond-key\n")
    assert len(read_api_keys(str(file))) == 2
    for content, said in [("\n", "no key"), ("short", "8 or more"), ("ünïcödé-key", "ASCII")]:
        file.write_text(content)
        with pytest.raises(UserError, match=said):
            read_api_keys(str(file))
    with pytest.raises(UserError, match="no such file"):
        read_api_keys(str(tmp_path / "none"))


def test_a_server_that_stops_answers_503(connect: Any) -> None:
    with connect("t5") as (client, server), ThreadPoolExecutor(1) as threads:
        running = threads.submit(client.post, "/generate", json=ENDLESS)
        while not server.models["t5"].worker.running:
            time.sleep(0.01)
        client.gate.is_stopping = True
        answer = client.get("/v1/models")
        assert error_of(answer, 503)["code"] == "stopping"
        assert "retry-after" in answer.headers
        server.stop()
        error_of(running.result(), 503)


def test_names_of_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Two models have the name a"):
        name_checkpoints(["a/final", "b/../a/checkpoint-3"])
    with pytest.raises(UserError, match=r"as NAME=runs/b\.$"):
        name_checkpoints(["x=runs/a", "x=runs/b"])


def test_what_cannot_be_served(connect: Any, tmp_path: Path) -> None:
    from firth.serve.config import ServeConfig
    from firth.serve.served_model import ServedModel

    with pytest.raises(UserError, match="no such folder"):
        ServedModel("a", tmp_path / "none", ServeConfig())


def test_a_request_that_left_before_it_was_read(connect: Any) -> None:
    with connect("bert") as (client, _):

        async def leave() -> None:
            gone = asyncio.Event()
            gone.set()
            await call(client.gate, "/fill", {"text": "___"}, gone)

        asyncio.run(leave())
        assert client.gate.num_requests == 0
