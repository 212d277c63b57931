"""samples.jsonl: what the model of a run makes of a few held-out sentences, at each checkpoint.

A run keeps its last checkpoints alone, so nobody can ask the first ones later. So the run itself lets each checkpoint
continue a few sentences, or fill their blanks, with a fixed seed. Three rules keep that harmless:

- It takes at most a hundredth of the time so far (`TIME_SHARE`). A text is cut at its deadline, and a checkpoint that
  comes too soon after the last one has no samples.
- Training does not notice: no gradients, no dropout, and the random numbers of torch are restored afterwards.
- The file is not `log.jsonl`, which a resumed run repeats byte by byte: where a text is cut depends on the time. A
  resumed run removes the samples of the steps that it repeats.

`evaluate/checkpoint_samples.py` chooses the sentences and completes them; the loop calls it with a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from firth.core.console import quiet, warn
from firth.models import Model
from firth.train.compute import ComputeConfig
from firth.train.log import RunLog, read_log

SAMPLES_FILE = "samples.jsonl"
TIME_SHARE = 0.01  # of a run, at most, that samples take
MIN_SECONDS = 0.05  # for the first samples, whose cost is not known
MAX_READ_CHECKPOINTS = 200  # of a file that is read

# Model and deadline (time.monotonic) -> what it makes of each sentence.
SampleFn = Callable[[Model, float], list[dict[str, Any]]]


class CheckpointSamples:
    """Writes a line for each checkpoint that there is time for: `step`, `seconds` and `samples`."""

    def __init__(self, path: Path, step: int, sample: SampleFn, compute: ComputeConfig) -> None:
        self.sample: SampleFn | None = sample
        self.compute, self.log = compute, RunLog(path, step)
        self.start, self.spent, self.last = time.monotonic(), 0.0, 0.0  # seconds

    def write(self, step: int, model: Model) -> None:
        """Complete the sentences if there is time; a failure is said once, and training continues."""
        began = time.monotonic()
        left = TIME_SHARE * (began - self.start) - self.spent
        if self.sample is None or (self.last and left < self.last):
            return
        devices = [self.compute.device] if self.compute.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.no_grad(), self.compute.autocast(), quiet():
                found = self.sample(model, began + max(left, MIN_SECONDS))
        except Exception as e:  # samples must not end a training
            warn(f"checkpoints cannot be sampled ({type(e).__name__}: {e}). Training continues without samples.")
            self.sample = None
            return
        self.last = time.monotonic() - began
        self.spent += self.last
        self.log.write(step=step, seconds=round(self.last, 4), samples=found)

    def __enter__(self) -> CheckpointSamples:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.log.flush()  # lines that a full disk has not taken are given up: no run fails for its samples
        self.log.file.close()


class NoSamples:
    """Samples of a run that has none: trial runs, `samples=0`, and all processes but the main one."""

    def write(self, step: int, model: Model) -> None: ...

    def __enter__(self) -> NoSamples:
        return self

    def __exit__(self, *error: object) -> None: ...


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Return the samples of a run by checkpoint: the first and the last, and evenly spaced ones of very many."""
    file = folder / SAMPLES_FILE
    lines = [line for line in read_log(file) if is_sample_line(line)] if file.is_file() else []
    if len(lines) <= MAX_READ_CHECKPOINTS:
        return lines
    last = len(lines) - 1
    return [lines[round(i * last / (MAX_READ_CHECKPOINTS - 1))] for i in range(MAX_READ_CHECKPOINTS)]


def is_sample_line(line: dict[str, Any]) -> bool:
    """Whether a line of the file holds samples: sentences with a continuation, or with guesses for their blank."""
    samples = line.get("samples")
    return isinstance(samples, list) and all(isinstance(sample, dict) and is_sample(sample) for sample in samples)


def is_sample(sample: dict[str, Any]) -> bool:
    texts = [sample.get(name, "") for name in ("before", "answer", "after", "text")]
    guesses = sample.get("guesses", [])
    return all(isinstance(text, str) for text in texts) and isinstance(guesses, list) and all(map(is_guess, guesses))


def is_guess(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], float | int)
    )
