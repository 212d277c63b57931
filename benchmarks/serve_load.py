"""Load a server with many clients at once: latencies, statuses, and the memory of the server over time.

A server with a GPT-2 and a classifier of random weights runs in a process of its own. Each client sends one request
after the other for a while: short texts to continue, streamed texts, labels and vectors, in turn. A client that gets
429 waits as long as `Retry-After` says. Some clients close their connection in the middle of an answer.

    python benchmarks/serve_load.py [--clients 200] [--seconds 60] [--layers 2] [--dim 128]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch

from firth.core.console import say, show_table
from firth.core.files import write_json
from firth.models import make_model
from firth.models.config import LearnedPosition
from firth.models.presets import bert, gpt2
from firth.tasks import TASK_FILE, make_task
from firth.tokens import train_tokenizer

TEXT = ["The cat sleeps near the old harbour, and nobody knows why.", "In the morning the river is quiet."] * 50
GOES_EVERY = 20  # one request in so many is broken off by its client
MEMORY_EVERY_S = 2.0
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "gpt2", "prompt": "The cat", "max_tokens": 16, "temperature": 0.8}),
    ("/classify", {"model": "topics", "inputs": ["The river is quiet near the old harbour."]}),
    ("/v1/completions", {"model": "gpt2", "prompt": "In the", "max_tokens": 16, "temperature": 0.8, "stream": True}),
    ("/v1/embeddings", {"model": "topics", "input": ["The cat sleeps.", "The river is quiet."]}),
]


@dataclass
class Log:
    """What all clients saw: seconds of each answer by route, statuses, and memory in MB over time."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    memory_mb: list[float] = field(default_factory=list)
    num_broken_off: int = 0


def save_models(folder: Path, layers: int, dim: int) -> list[str]:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXT, "byte-bpe", 400)
    model = make_model(gpt2(layers, dim, 4, tokenizer.vocab.size, position=LearnedPosition(128)))
    model.tokenizer = tokenizer
    model.save(folder / "gpt2")
    tokenizer = train_tokenizer(TEXT, "wordpiece", 400)
    config = bert(layers, dim, 4, tokenizer.vocab.size, position=LearnedPosition(128))
    task = make_task("classify", {"labels": ["a", "b"]}, tokenizer, config)
    model = make_model(task.configure_model(config))
    model.tokenizer = task.tokenizer
    model.save(folder / "topics")
    write_json(folder / "topics" / TASK_FILE, task.metadata())
    return [str(folder / "gpt2"), str(folder / "topics")]


def start_server(checkpoints: list[str]) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "firth", "serve", *checkpoints, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"Serving on (\S+)", line):
            return process, found[1]
    raise SystemExit("the server did not start")


async def run_client(http: httpx.AsyncClient, number: int, end_s: float, log: Log) -> None:
    turn = number
    while time.monotonic() < end_s:
        route, body = REQUESTS[turn % len(REQUESTS)]
        turn += 1
        start_s = time.monotonic()
        wait_s = 0.0
        try:
            async with http.stream("POST", route, json=body) as answer:
                if (turn + 3 * number) % GOES_EVERY == 0 and answer.status_code == 200:
                    log.num_broken_off += 1
                    continue
                await answer.aread()
                name = f"{route} (stream)" if body.get("stream") else route
                log.statuses[str(answer.status_code)] += 1
                if answer.status_code == 200:
                    log.seconds.setdefault(name, []).append(time.monotonic() - start_s)
                else:
                    wait_s = float(answer.headers.get("retry-after", 1))
        except httpx.HTTPError as e:
            log.statuses[type(e).__name__] += 1
        await asyncio.sleep(wait_s)


async def watch_memory(pid: int, end_s: float, log: Log) -> None:
    while time.monotonic() < end_s:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        log.memory_mb.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024)  # type: ignore[index]
        await asyncio.sleep(MEMORY_EVERY_S)


async def load(address: str, pid: int, clients: int, seconds: float) -> Log:
    log, end_s = Log(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as http:
        tasks = [run_client(http, number, end_s, log) for number in range(clients)]
        await asyncio.gather(watch_memory(pid, end_s, log), *tasks)
    return log


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, address = start_server(save_models(Path(folder), options.layers, options.dim))
        try:
            log = asyncio.run(load(address, process.pid, options.clients, options.seconds))
            cpu_s = cpu_seconds(process.pid)
            process.send_signal(signal.SIGTERM)
            exit_code = process.wait(10)
        finally:
            process.kill()
    rows = [
        (route, len(values), *(f"{1000 * quantile(values, share):,.0f}" for share in (0.5, 0.99)))
        for route, values in sorted(log.seconds.items())
    ]
    show_table(f"{options.clients} clients, {options.seconds:g} s", ["route", "answers", "p50 ms", "p99 ms"], rows)
    every = [value for values in log.seconds.values() for value in values]
    quarter = max(1, len(log.memory_mb) // 4)
    early, late = log.memory_mb[quarter : 2 * quarter] or log.memory_mb, log.memory_mb[-quarter:]
    result = {
        "answers_per_second": len(every) / options.seconds,
        "server_cpu_ms_per_answer": 1000 * cpu_s / len(every),  # with what the server spent on its start
        "p50_s": quantile(every, 0.5),
        "p99_s": quantile(every, 0.99),
        "statuses": dict(log.statuses),
        "broken_off": log.num_broken_off,
        "memory_mb_second_quarter": statistics.mean(early),
        "memory_mb_last_quarter": statistics.mean(late),
        "exit_code": exit_code,
    }
    print(json.dumps(result))
    unexpected = set(log.statuses) - {"200", "429"}
    say(f"unexpected: {sorted(unexpected)}" if unexpected else "no error but 429")


if __name__ == "__main__":
    main()
