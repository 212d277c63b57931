"""The one loop, for pretraining and for fine-tuning."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from firth.console import Line, duration, say, warn
from firth.errors import UserError
from firth.models import Model
from firth.objectives import Batch
from firth.plain import to_plain
from firth.train.average import Average
from firth.train.checkpoint import (
    State,
    last_checkpoint,
    learned,
    load_average,
    load_best,
    load_carry,
    load_checkpoint,
    load_guard,
    save_best,
    to_keep,
)
from firth.train.device import Machine
from firth.train.diagnose import diagnose
from firth.train.guard import Found, Guard
from firth.train.log import Log, NoLog, last_loss
from firth.train.optim import make_optimizer, rate, unfreeze
from firth.train.step import Carry, Run, prepared, train_step
from firth.train.writer import Writer


class Interrupted(Exception):  # noqa: N818, no error
    """Ctrl-C or a SIGTERM: the work is saved, and the message says how to go on. `code` is the exit code for it."""

    code = 128 + signal.SIGINT


@dataclass
class Outcome:
    steps: int
    tokens: int
    loss: float
    scores: dict[str, float]
    tokens_per_second: float
    seconds: float
    best_step: int  # whose weights the model has now


def fit(run: Run, resume: bool = False) -> Outcome:
    """Train to the last step; from the last whole checkpoint when `resume`."""
    training = run.training
    writer = Writer(run.folder, to_plain(training), training.save_total_limit, run.model, training.async_save)
    model, guard = run.model.to(run.machine.device), Guard(training, run.machine)
    optimizer = make_optimizer(model, training, run.pace)
    state, carry = State(), Carry()
    average = Average(learned(model), training.ema_decay) if training.ema_decay else None
    if resume and run.folder and (found := last_checkpoint(run.folder)):
        state, writer.saved = load_checkpoint(found, model, optimizer), found.name
        carry, run.halvings = load_carry(found, run.machine.device), state.halvings
        guard.load(load_guard(found, run.machine.device))
        if average:
            average.load(load_average(found, run.machine.device))
        say(f"going on from {found}")
    losses_of = prepared(run)
    line, loss, scores, began = Line(), math.nan, {}, (time.monotonic(), state.step, state.tokens)
    untold: list[Told] = []

    def tell(but: int = 0) -> None:
        """Log the losses of the steps so far, but for so many of the last, which may not be computed yet."""
        nonlocal loss
        while len(untold) > but:
            told = untold.pop(0)
            found = Found(*told.found())
            loss = loss if found.skipped else found.loss
            state.bad_steps = state.bad_steps + 1 if found.skipped and not found.expected else 0
            if told.logged or found.skipped:
                log.write(**told.line(found))
                line.show(_progress(run, told, loss, began, writer.saved))
            if state.bad_steps:
                warn(f"step {told.step} is skipped: {found.reason}")
            if state.bad_steps >= training.max_bad_steps:
                raise UserError(diagnose(run, losses_of, told.step, state.bad_steps, found, carry, writer.saved))

    def save() -> None:
        tell()
        state.halvings = run.halvings
        if run.folder and log.is_written():  # a checkpoint never knows more than the log
            kept = to_keep(model, optimizer, carry, average.mean if average else {}, guard.state())
            writer.save(kept, state, first=log.sync)

    with Log(run.folder / "log.jsonl", state.step) if run.folder else NoLog() as log, stop_asked() as stop, writer:
        for step, micro, data in prefetch(run.batches, state.step, end_of(run, state), state.data):
            # one training step
            lr = rate(step, training)
            unfreeze(optimizer, model, training, run.pace, step)
            train_step(run, losses_of, optimizer, micro, step, lr, carry, guard)
            state.step, state.tokens, state.data = step + 1, state.tokens + sum(b.num_tokens for b in micro), data
            if average:
                average.update(step)

            # now and then: log, evaluate, save
            last = state.step == training.max_steps
            logs = state.step % training.logging_steps == 0 or last
            saves = state.step % training.save_steps == 0 or last or stop.is_set()
            untold.append(Told(state.step, state.tokens, lr, data, reading(guard.found), logs))
            tell(but=1 if reads_late(run.machine) else 0)
            writer.look()
            if run.evaluate and (state.step % training.eval_steps == 0 or last):
                tell()
                with average.in_place() if average else nullcontext():
                    scores = run.evaluate(model)
                    compare(run, state, scores, model)
                log.write(step=state.step, **scores)
                last = last or state.step == end_of(run, state)
                model.train()
            for every, hook in run.hooks:
                if state.step % every == 0:
                    hook(state.step, model)
            if saves or last or stop.is_set():
                save()
            if stop.is_set():
                line.close()
                writer.wait()
                lost = "" if writer.saved == f"checkpoint-{state.step}" else f", {writer.saved or 'nothing'} is saved"
                raise Interrupted(f"stopped at step {state.step} of {training.max_steps}{lost}")
            if last:  # patience may have run out
                break
    line.close()
    if average:
        average.put()
    seconds = max(time.monotonic() - began[0], 1e-9)
    speed, ended = (state.tokens - began[2]) / seconds, began[1] == end_of(run, state)
    earlier = state.best_step not in (0, state.step)
    if earlier:
        assert run.folder is not None
        load_best(run.folder, model, state.best_step)
        say(f"the weights of step {state.best_step:,} are taken, where the evaluation was best")
    if ended and run.folder:  # resumed after the last step: only its numbers are needed
        loss = last_loss(run.folder / "log.jsonl")
    if run.evaluate and (earlier or ended):
        scores = run.evaluate(model)
    return Outcome(state.step, state.tokens, loss, scores, speed, seconds, state.best_step or state.step)


def end_of(run: Run, state: State) -> int:
    """The step after which the run is over: its last one, or this one where patience has run out."""
    return state.step if run.patience and state.waited >= run.patience else run.training.max_steps


def compare(run: Run, state: State, scores: Mapping[str, float], model: Model) -> None:
    """Note whether an evaluation is the best so far, and keep its weights then; of equal ones the first is."""
    if run.judge is None:
        return
    assert run.folder is not None, "a trial is not judged"
    value = run.judge(scores)
    if state.best_step and not value > state.best:  # what is no number is never better
        state.waited += 1
        return
    state.best, state.best_step, state.waited = -math.inf if math.isnan(value) else value, state.step, 0
    if state.step < run.training.max_steps:
        save_best(run.folder, model, state.step)


class Told(NamedTuple):
    """What there is to say about a step, once its loss is known."""

    step: int
    tokens: int
    rate: float
    data: int
    found: Callable[[], list[float]]
    logged: bool

    def line(self, found: Found) -> dict[str, Any]:
        """A line of the log. `data` is a hash of all batches so far: equal ones mean that equal text was read."""
        numbers = {"loss": found.loss, "learning_rate": self.rate, "tokens": self.tokens, "grad_norm": found.norm}
        facts = {name: value for name, value in numbers.items() if math.isfinite(value)}
        why = {"skipped": found.reason} if found.skipped else {}
        return {"step": self.step, **facts, "data": f"{self.data:08x}", **why}


def reads_late(machine: Machine) -> bool:
    """Whether losses are read a step later. A device that computes by itself then never waits for the next step."""
    return machine.device.type == "cuda"


def reading(numbers: torch.Tensor) -> Callable[[], Any]:
    """A way to read numbers of a device later on, for which only what is before them must have been computed."""
    if not numbers.is_cuda:
        return numbers.tolist
    here, done = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True), torch.cuda.Event()
    here.copy_(numbers, non_blocking=True)
    done.record()

    def read() -> Any:
        done.synchronize()
        return here.tolist()

    return read


def prefetch(
    batches: Callable[[int], Sequence[Batch]], start: int, end: int, data: int = 0
) -> Iterator[tuple[int, Sequence[Batch], int]]:
    """The steps with their batches and a hash of all so far; the next ones are made while the last are computed."""

    def made(step: int, before: int) -> tuple[Sequence[Batch], int]:
        micro = batches(step)
        return micro, hashed(micro, before)

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        following = pool.submit(made, start, data) if start < end else None
        for step in range(start, end):
            assert following is not None
            micro, data = following.result()
            following = pool.submit(made, step + 1, data) if step + 1 < end else None
            yield step, micro, data


def hashed(micro: Sequence[Batch], before: int) -> int:
    """A hash of what a step reads and is asked, chained to another; however its rows are split into micro-batches."""
    for arrays in zip(*micro, strict=True):
        for array in arrays:
            if array is not None:
                before = crc32(np.ascontiguousarray(array).data, before)
    return before


@contextmanager
def stop_asked() -> Iterator[threading.Event]:
    """Ctrl-C or a SIGTERM asks the loop to stop after the step; a second Ctrl-C stops at once.

    An `Interrupted` that comes of it gets the exit code that belongs to the signal.
    """
    stop, asked = threading.Event(), signal.SIGINT

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.is_set():
            asked = signal.Signals(number)
            again = " (Ctrl-C again: at once, without saving)" if number == signal.SIGINT else ""
            say(f"stopping after this step{again}")
            stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except Interrupted as e:
        e.code = 128 + asked
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress(run: Run, told: Told, loss: float, began: tuple[float, int, int], saved: str | None) -> str:
    seconds = max(time.monotonic() - began[0], 1e-9)
    per_step = seconds / max(told.step - began[1], 1)
    speed = (told.tokens - began[2]) / seconds
    left = duration(per_step * (run.training.max_steps - told.step))
    at = f"{run.name}: step {told.step:,}/{run.training.max_steps:,}"
    return f"{at}  loss {loss:.3f}  rate {told.rate:.1e}  {speed:,.0f} tokens/s  {left} left" + (
        f"  saved {saved}" if saved else ""
    )
