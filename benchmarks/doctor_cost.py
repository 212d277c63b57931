"""How much a run slows down while the doctor examines it.

A small GPT-2 trains on all cores. `firth doctor` examines it again and again, in an idle process like that of `firth
serve --runs`. Windows in which it computes alternate with windows in which it is stopped, and with windows of an
endless loop at idle priority, in random order, so that other work on the machine meets all alike. Two kinds of windows
have neither: their difference is the error of the measurement. The speed of the run is read from its log.

    python benchmarks/doctor_cost.py                       # 30 rounds of four windows: seven minutes
    python benchmarks/doctor_cost.py --rounds 3            # a trial
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve_load import cpu_seconds
from serve_viewers import RUN, bootstrap_interval, measure_speed, start_run, wait_for_steps

from firth.core.console import say
from firth.serve.idle_process import lower_priority, start_idle_process

SETTLING_S = 0.3  # after a process was stopped or resumed


class Examiner:
    """Examines a run again and again, and can be stopped in between."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_open = folder, True
        self.may_run, self.seconds = threading.Event(), list[float]()  # CPU seconds of those that ended
        self.process = self.start()
        self.thread = threading.Thread(target=self.restart, daemon=True)
        self.thread.start()

    def start(self) -> subprocess.Popen[str]:
        return start_idle_process(["firth", "doctor", "--json", "--", str(self.folder)])

    def restart(self) -> None:
        while self.is_open:
            before = os.times()
            self.process.communicate()
            after = os.times()
            used = after.children_user + after.children_system - before.children_user - before.children_system
            self.seconds.append(used)
            self.may_run.wait()
            self.process = self.start()

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def resume(self) -> None:
        self.may_run.set()
        self.signal(signal.SIGCONT)

    def stop(self) -> None:
        self.may_run.clear()
        self.signal(signal.SIGSTOP)

    def close(self) -> None:
        self.is_open = False
        self.signal(signal.SIGKILL)

    @property
    def cpu_seconds(self) -> float:
        with suppress(OSError):
            return sum(self.seconds) + cpu_seconds(self.process.pid)
        return sum(self.seconds)


class Loop:
    """An endless loop at idle priority: the cost of any idle process, whatever it computes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        lower_priority(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


def measure_rounds(
    run: int, log: Path, idle: Mapping[str, Examiner | Loop], rounds: int, window_s: float
) -> dict[str, list[tuple[float, float]]]:
    """Return of each kind of window the steps per second and the cores of the run; kinds have a random order."""
    rng, kinds = random.Random(0), ["neither", "neither again", *idle]
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for number in range(1, rounds + 1):
        for kind in rng.sample(kinds, len(kinds)):
            for name, process in idle.items():
                (process.resume if name == kind else process.stop)()
            time.sleep(SETTLING_S)
            before, began = cpu_seconds(run), time.monotonic()
            speed = measure_speed(log, window_s)
            found[kind].append((speed, (cpu_seconds(run) - before) / (time.monotonic() - began)))
        say(f"round {number} of {rounds}: " + ", ".join(f"{kind} {found[kind][-1][0]:.2f} steps/s" for kind in kinds))
    return found


def describe(found: Mapping[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return medians, and how much slower the run is than in the first window of the same round."""
    facts = dict[str, Any]()
    for kind, windows in found.items():
        slower = [100 * (1 - own[0] / other[0]) for own, other in zip(windows, found["neither"], strict=True)]
        facts[kind] = {
            "steps_per_second": statistics.median(speed for speed, _ in windows),
            "cores_of_the_run": statistics.median(cores for _, cores in windows),
            "slower_percent": statistics.median(slower),
            "interval": bootstrap_interval(slower),
        }
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of four windows each")
    parser.add_argument("--window-s", type=float, default=3.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        log = home / "runs" / RUN / "log.jsonl"
        run = start_run(home, 1)
        idle: dict[str, Any] = {}
        try:
            wait_for_steps(log, run)
            idle = {"doctor": Examiner(home / "runs" / RUN), "loop": Loop()}
            facts = describe(measure_rounds(run.pid, log, idle, options.rounds, options.window_s))
            facts["doctor"]["cpu_seconds"] = idle["doctor"].cpu_seconds
        finally:
            for process in idle.values():
                process.close()
            run.kill()
            run.wait(10)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
