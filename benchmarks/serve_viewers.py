"""Watch a live run with many viewers: what it costs the server, and how much it slows the run.

A small GPT-2 trains in a process of its own, on all cores. `firth serve --runs` watches it, and viewers do what the
page does: they ask for the log and for the doctor's notes once, then wait for events. Each pair of windows, a watched
and an unwatched one, has a random order; the speed of the run is read from its log. Viewers share the machine with the
run and the server, which real ones do not: their own computing time is told apart.

    python benchmarks/serve_viewers.py                                  # 20 pairs of windows: 13 minutes
    python benchmarks/serve_viewers.py --pairs 2 --window-s 5           # a trial
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from serve_load import cpu_seconds, quantile, start_server

from firth.core.console import say
from firth.core.files import write_text
from firth.train.log import parse_log

RUN = "live"
MAX_STEPS = 10_000_000  # the run ends with the benchmark
WARMUP_STEPS = 20
TICK_S = 3.0  # of the server: a window begins when it has noticed that viewers came or went
BOOTSTRAPS = 2000


def write_corpus(file: Path, num_documents: int = 3000) -> None:
    """Write made-up text; its words follow Zipf's law."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghilmnoprstuv", k=rng.randint(2, 8))) for _ in range(2000)]
    weights = [1 / (i + 1) for i in range(len(words))]
    write_text(file, "\n\n".join(" ".join(rng.choices(words, weights, k=100)) + "." for _ in range(num_documents)))


def start_run(home: Path, log_every: int) -> subprocess.Popen[bytes]:
    write_corpus(home / "text.txt")
    command = [sys.executable, "-m", "firth", "pretrain", "gpt2-tiny", "--data", str(home / "text.txt")]
    options = {"max-steps": MAX_STEPS, "logging-steps": log_every, "save-steps": MAX_STEPS, "eval-steps": MAX_STEPS}
    command += ["--output-dir", str(home / "runs" / RUN), "--vocab-size", "1000", "--max-seq-length", "64"]
    command += ["--per-device-train-batch-size", "8", "--gradient-accumulation-steps", "1"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@dataclass(frozen=True)
class Progress:
    """The last line of a log, and when it was written."""

    step: int
    seconds: float


def read_progress(log: Path) -> Progress:
    """Read the end of a log; its time of change is that of its last line."""
    while True:
        before = log.stat()
        with log.open("rb") as file:
            file.seek(max(before.st_size - 4096, 0))
            text = file.read()
        if log.stat().st_mtime_ns == before.st_mtime_ns:
            line = json.loads(text[: text.rindex(b"\n")].rpartition(b"\n")[2])
            return Progress(line["step"], before.st_mtime_ns / 1e9)


def wait_for_steps(log: Path, process: subprocess.Popen[bytes]) -> None:
    while not (log.is_file() and len(parse_log(log)[0]) and read_progress(log).step >= WARMUP_STEPS):
        if process.poll() is not None:
            raise SystemExit("the run has ended: see firth pretrain gpt2-tiny")
        time.sleep(1)


def measure_speed(log: Path, seconds: float) -> float:
    """Return steps per second over a window."""
    first = read_progress(log)
    time.sleep(seconds)
    last = read_progress(log)
    return (last.step - first.step) / (last.seconds - first.seconds)


@dataclass
class Viewers:
    """Open streams, read by one thread."""

    host: str
    port: int
    num_events: int = 0
    num_broken: int = 0
    delays: list[float] = field(default_factory=list)  # seconds from the making of an event to its arrival
    sockets: list[socket.socket] = field(default_factory=list)
    is_open: bool = False

    def open(self, count: int) -> None:
        self.is_open, self.selector = True, selectors.DefaultSelector()
        for _ in range(count):
            for path in (f"/runs/log?name={RUN}", f"/runs/notes?name={RUN}"):
                with urlopen(f"http://{self.host}:{self.port}{path}") as answer:
                    answer.read()
            viewer = socket.create_connection((self.host, self.port))
            viewer.sendall(b"GET /runs/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            viewer.setblocking(False)
            self.sockets.append(viewer)
            self.selector.register(viewer, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self) -> None:
        while self.is_open:
            for key, _ in self.selector.select(0.5):
                assert isinstance(key.fileobj, socket.socket)
                text = key.fileobj.recv(1 << 20)
                if not text:
                    self.num_broken += 1
                    self.selector.unregister(key.fileobj)
                elif (start := text.find(b'data: {"now":')) >= 0:
                    self.num_events += 1
                    made = float(text[start + 13 : text.index(b",", start)])
                    self.delays.append(time.time() - made)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.thread.join()
            for viewer in self.sockets:
                viewer.close()
            self.sockets.clear()


def bootstrap_interval(values: list[float]) -> tuple[float, float]:
    """Return the 95% interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    return medians[int(0.025 * BOOTSTRAPS)], medians[int(0.975 * BOOTSTRAPS)]


def own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_doctor(address: str, log: Path, limit_s: float) -> dict[str, Any]:
    """Let the doctor examine the run, which takes as long as the run leaves time; return the speed meanwhile."""
    before = measure_speed(log, 10)
    first, began = read_progress(log), time.monotonic()
    while True:
        with urlopen(f"{address}/runs/notes?name={RUN}") as answer:
            notes = json.load(answer)
        if notes["number"] or time.monotonic() - began > limit_s:
            break
        time.sleep(1)
    last = read_progress(log)
    meanwhile = (last.step - first.step) / max(last.seconds - first.seconds, 1e-9)
    after = measure_speed(log, 10)
    return {
        "doctor_s": time.monotonic() - began - 10,
        "doctor_state": notes["state"],
        "doctor_slowdown_percent": 100 * (1 - meanwhile / statistics.mean((before, after))),
    }


def compare_windows(
    run: int, server: int, viewers: Viewers, count: int, log: Path, pairs: int, window_s: float
) -> tuple[list[float], dict[str, Any]]:
    """Return the slowdown of each pair of windows in percent, and what the watched windows cost."""
    slowdowns, cpu, own, speeds = list[float](), {True: 0.0, False: 0.0}, 0.0, list[float]()
    run_cpu, rng = {True: 0.0, False: 0.0}, random.Random(0)
    for pair in range(pairs):
        speed: dict[bool, float] = {}
        for is_watched in rng.sample((True, False), 2):
            if is_watched:
                viewers.open(count)
            time.sleep(TICK_S + 1)
            cpu_before, own_before, run_before = cpu_seconds(server), own_cpu_seconds(), cpu_seconds(run)
            speed[is_watched] = measure_speed(log, window_s)
            cpu[is_watched] += cpu_seconds(server) - cpu_before
            run_cpu[is_watched] += cpu_seconds(run) - run_before
            own += (own_cpu_seconds() - own_before) * is_watched
            viewers.close()
        slowdowns.append(100 * (1 - speed[True] / speed[False]))
        speeds.append(speed[False])
        say(f"pair {pair + 1} of {pairs}: {speed[False]:.2f} steps/s, {slowdowns[-1]:+.2f}% slower when watched")
    total_s = pairs * window_s
    return slowdowns, {
        "steps_per_second": statistics.median(speeds),
        "server_cpu_percent_of_one_core": 100 * cpu[True] / total_s,
        "server_cpu_percent_unwatched": 100 * cpu[False] / total_s,
        "viewers_cpu_percent_of_one_core": 100 * own / total_s,
        "cores_of_the_run_watched": run_cpu[True] / total_s,
        "cores_of_the_run_unwatched": run_cpu[False] / total_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of a watched and an unwatched window")
    parser.add_argument("--window-s", type=float, default=15.0)
    parser.add_argument("--logging-steps", type=int, default=1)
    parser.add_argument("--doctor-s", type=float, default=120.0, help="wait at most so long for the doctor at first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "runs").mkdir()
        log = home / "runs" / RUN / "log.jsonl"
        run = start_run(home, options.logging_steps)
        server, address = start_server(["--runs", str(home / "runs")])
        host, port = address.removeprefix("http://").split(":")
        viewers = Viewers(host, int(port))
        try:
            say("waiting for the first steps of the run")
            wait_for_steps(log, run)
            say("the doctor examines the run")
            result = measure_doctor(address, log, options.doctor_s)
            slowdowns, costs = compare_windows(
                run.pid, server.pid, viewers, options.viewers, log, options.pairs, options.window_s
            )
            status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
            memory_mb = int(status.partition("VmRSS:")[2].split()[0]) / 1024
            server.send_signal(signal.SIGTERM)
            exit_code = server.wait(10)
        finally:
            viewers.close()
            for process in (run, server):
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
    low, high = bootstrap_interval(slowdowns)
    result |= costs | {
        "viewers": options.viewers,
        "pairs": options.pairs,
        "slowdown_percent_median": statistics.median(slowdowns),
        "slowdown_percent_interval": [low, high],
        "slowdown_percent_quartiles": [quantile(slowdowns, 0.25), quantile(slowdowns, 0.75)],
        "events": viewers.num_events,
        "broken_streams": viewers.num_broken,
        "event_delay_ms_p50": 1000 * quantile(viewers.delays, 0.5),
        "event_delay_ms_p99": 1000 * quantile(viewers.delays, 0.99),
        "server_memory_mb": memory_mb,
        "exit_code": exit_code,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
