"""A real server on a free port: OpenAI's own client, signals, and what `firth serve` prints."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serve.test_batching import ENDLESS

from firth.cli.main import app
from firth.core.errors import UserError
from firth.serve.server import GRACE_S, listen

KEY = "a-key-of-the-test"


@contextmanager
def running(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`firth serve` as a process, and its address."""
    command = [sys.executable, "-m", "firth", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"Serving on (\S+)", said)):
            said += (line := process.stderr.readline())
            assert line, said
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def test_openais_client_and_a_stop_while_a_text_is_streamed(folders: dict[str, Path], tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    arguments = [folders["gpt2"], folders["t5"], f"words={folders['bert']}", "--api-key-file", keys]
    with running(*arguments) as (process, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        assert [model.id for model in client.models.list()] == ["gpt2", "t5", "words"]
        settings: dict[str, Any] = {"model": "gpt2", "temperature": 0, "max_tokens": 6}
        whole = client.completions.create(prompt="the cat", **settings)
        assert whole.usage.completion_tokens <= 6
        parts = client.completions.create(prompt="the cat", stream=True, **settings)
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        messages = [{"role": "user", "content": "the cat"}]
        answer = client.chat.completions.create(messages=messages, extra_body={"repetition_penalty": 1.5}, **settings)
        assert answer.choices[0].message.role == "assistant"
        stream = client.chat.completions.create(messages=messages, stream=True, **settings)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
        vectors = client.embeddings.create(model="words", input=["the cat", "a river"])
        assert [len(item.embedding) for item in vectors.data] == [32, 32]
        with pytest.raises(openai.NotFoundError, match="There is no model"):
            client.completions.create(model="gpt5", prompt="a")
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.completions.create(model="gpt2", prompt="cat " * 80)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="another-key").models.list()

        endless = client.completions.create(
            model="t5", prompt="the cat", max_tokens=2000, extra_body={"min_new_tokens": 2000}, stream=True
        )
        next(endless)
        process.send_signal(signal.SIGTERM)
        start_s = time.monotonic()
        next(endless)
        with pytest.raises(openai.InternalServerError, match="The server is stopping"):
            client.models.list()
        with pytest.raises(openai.APIError, match="The server is stopping"):
            list(endless)  # goes on for a few seconds
        assert time.monotonic() - start_s < GRACE_S + 2
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == "stopped"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_killed_client_leaves_an_idle_server_that_ctrl_c_ends(folders: dict[str, Path]) -> None:
    with running(folders["t5"]) as (process, address):
        body = json.dumps({**ENDLESS, "stream": True, "temperature": 1.0}).encode()
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + body)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        time.sleep(1)
        before_s = cpu_seconds(process.pid)
        time.sleep(1)
        assert cpu_seconds(process.pid) - before_s < 0.2, "nothing is computed any more"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_runs_are_served_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        app(["serve", "--runs", str(tmp_path / "nothing"), "--port", "0"], standalone_mode=False)


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UserError, match=r"Cannot listen on 127.0.0.1:\d+ \(Address already in use\). Set another"):
            listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match="not an address"):
        listen("no such host", 0)


def test_without_fastapi_the_command_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(UserError, match=r"pip install 'firth\[web\]'"):
        app(["serve", "nothing"], standalone_mode=False)


@pytest.mark.slow
def test_no_request_that_the_schema_describes_fails(folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    with running(*(f"{name}={folder}" for name, folder in folders.items())) as (_, address):
        command = [Path(sys.executable).with_name("schemathesis"), "run", f"{address}/openapi.json", "-n", "40"]
        # A request may fit the schema and still ask for what the model cannot do.
        options = ["--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing"]
        command = [*command, *options, "--suppress-health-check", "all"]
        found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)  # keeps its cache there
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
