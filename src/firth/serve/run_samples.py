"""What each checkpoint of a run makes of a text: the words for its blanks, or its continuation.

A run writes samples of its own with each checkpoint (`train/samples.py`); this is for a text that somebody types. The
checkpoints are loaded and sampled by a process at idle priority (`checkpoint_process.py`), one text at a time: a run
that is watched keeps its cores, its memory and its GPU. A sample is kept: the same question is not computed again, and
what a checkpoint made of a text is still told when the run has removed the checkpoint.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.serve.idle_process import IdleWorker, last_line, start_idle_process
from firth.serve.runs import WatchedRun
from firth.train.checkpoint import list_checkpoints

MAX_CHECKPOINTS = 6  # the last ones
MAX_KEPT = 64  # pairs of a run and a text
MAX_WAITING = 20  # texts that wait for their turn
MAX_SAMPLING_S = 1800.0  # an idle process may wait long for its turn

Sample = dict[str, Any]
Checkpoint = tuple[str, int | None, int]  # name, step, time of its config
Hold = Callable[[Any], None]


def list_sampled_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the last checkpoints of a run, in order; `final` is the last one, without a step.

    A run removes old checkpoints while they are listed: one that is gone is left out.
    """
    named: list[tuple[str, int | None]] = [
        (path.name, int(path.name.removeprefix("checkpoint-"))) for path in reversed(list_checkpoints(folder))
    ]
    found = list[Checkpoint]()
    for name, step in [*named, ("final", None)]:
        try:
            found.append((name, step, (folder / name / "config.json").stat().st_mtime_ns))
        except OSError:
            continue
    return found[-MAX_CHECKPOINTS:]


class KeptSamples:
    """What is known about one text of one run."""

    def __init__(self) -> None:
        self.samples: dict[str, tuple[int, Sample]] = {}  # by checkpoint, with the time of its config
        self.errors: dict[str, Sample] = {}  # of the last attempt
        self.pending: Future[None] | None = None


class SampleStore(IdleWorker):
    """Samples by run and text, and by checkpoint."""

    def __init__(self, sample: Callable[..., Iterator[Sample]] | None = None) -> None:
        super().__init__("firth-sample")
        self.sample = sample or sample_at_idle_priority
        self.kept: OrderedDict[tuple[Path, int, str], KeptSamples] = OrderedDict()

    def request(self, run: WatchedRun, text: str) -> tuple[KeptSamples, Future[None] | None]:
        """Return what is known at once, and the job that samples the other checkpoints; None where all are known."""
        key = (run.folder, run.version, text)  # a log that begins anew is another run
        checkpoints = list_sampled_checkpoints(run.folder)
        with self.lock:
            kept = self.kept.setdefault(key, KeptSamples())
            self.kept.move_to_end(key)
            while len(self.kept) > MAX_KEPT:
                self.kept.popitem(last=False)
            missing = [c for c in checkpoints if c[0] not in kept.samples or kept.samples[c[0]][0] != c[2]]
            if kept.pending is None and missing and not self.is_stopped:
                if sum(other.pending is not None for other in self.kept.values()) >= MAX_WAITING:
                    raise UserError("Too many texts wait to be sampled already. Try again later.")
                kept.errors.clear()
                kept.pending = self.worker.submit(self.update, run.folder, kept, missing, text)
            return kept, kept.pending

    def update(self, folder: Path, kept: KeptSamples, checkpoints: Sequence[Checkpoint], text: str) -> None:
        """Sample checkpoints, in the worker's thread."""
        stamps, problem = {name: stamp for name, _, stamp in checkpoints}, ""
        try:
            for sample in self.sample(folder, [(name, step) for name, step, _ in checkpoints], text, self.hold):
                with self.lock:
                    name = sample["checkpoint"]
                    if sample["error"]:
                        kept.errors[name] = sample
                    else:
                        kept.samples[name] = (stamps[name], sample)
        except UserError as e:
            problem = str(e)
        except Exception as e:
            problem = f"The checkpoints cannot be sampled ({type(e).__name__})."
        with self.lock:
            self.process, kept.pending = None, None
            for name, step, stamp in checkpoints:
                if name not in kept.errors and kept.samples.get(name, (None,))[0] != stamp:
                    error = problem or f"{name} was not sampled."
                    kept.errors[name] = {"checkpoint": name, "step": step, "text": "", "blanks": [], "error": error}

    def describe(self, kept: KeptSamples) -> dict[str, Any]:
        """Return the samples by step, and whether others are still to come."""
        with self.lock:
            found = {name: sample for name, (_, sample) in kept.samples.items()} | kept.errors
            order = sorted(found.values(), key=lambda sample: math.inf if sample["step"] is None else sample["step"])
            return {"state": "sampling" if kept.pending is not None else "sampled", "samples": order}


def sample_at_idle_priority(
    folder: Path, checkpoints: Sequence[tuple[str, int | None]], text: str, hold: Hold
) -> Iterator[Sample]:
    """Yield the sample of each checkpoint as a process of its own computes it."""
    process = start_idle_process(["firth.serve.checkpoint_process"])
    hold(process)
    timer = threading.Timer(MAX_SAMPLING_S, process.kill)
    timer.start()
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with process.stdin as request:
            asked = [(str(folder / name), step) for name, step in checkpoints]
            request.write(json.dumps({"text": text, "checkpoints": asked}))
        for line in process.stdout:
            yield json.loads(line)
        said = process.stderr.read()
        if process.wait() < 0:
            raise UserError("There was no time to sample this checkpoint: the machine is busy.")
        if process.returncode:
            raise UserError(last_line(said) or "The checkpoints cannot be sampled.")
    except BrokenPipeError:
        raise UserError("The process that samples checkpoints has ended.") from None
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
