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
from pathlib import Path
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
    load_guard,
    load_model_weights,
    load_optimizer,
    save_best,
    to_keep,
)
from firth.train.device import Machine
from firth.train.diagnose import diagnose
from firth.train.guard import Found, Guard
from firth.train.log import Log, NoLog, last_loss
from firth.train.optim import make_optimizer, rate, unfreeze
from firth.train.parallel import ALONE, World
from firth.train.step import Carry, Run, add_counts, prepared, rehearse, train_step
from firth.train.writer import Writer

SETTLING = 3  # steps that say nothing of a run's speed


class Interrupted(Exception):  # noqa: N818, no error
    """Ctrl-C or a SIGTERM: the work is saved, and the message says how to go on. `code` is the exit code for it."""

    code = 128 + signal.SIGINT


class Diverged(UserError):  # noqa: N818, named for what is wrong
    """A run that broke on its loss after so many steps; the message says on what, and how to go on."""

    def __init__(self, message: str, steps: int) -> None:
        super().__init__(message)
        self.steps = steps


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
    training, model, world = run.training, run.model, run.machine.world
    found = last_whole(run) if resume else None
    if found is not None:
        load_model_weights(found, model)
    else:
        world.same_weights(model)
    writer, guard = make_writer(run), Guard(training, run.machine)
    world.place(model, training, run.machine)
    optimizer = make_optimizer(model, training, run.pace)
    state, carry = State(), Carry()
    average = Average(learned(model), training.ema_decay) if training.ema_decay else None
    if found is not None:
        state, writer.saved = load_optimizer(found, model, optimizer), found.name
        carry, run.halvings = world.my_rows(load_carry(found, run.machine.device)), state.halvings
        guard.load(load_guard(found, run.machine.device))
        if average:
            average.load(load_average(found))
        say(f"going on from {found}")
    losses_of = prepared(run)
    line, loss, scores, speed = Line(), math.nan, {}, Speed(state.step, state.tokens)
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
                line.show(_progress(run, told, loss, speed, writer.saved))
            speed.settle(told.step, told.tokens)
            if state.bad_steps:
                warn(f"step {told.step} is skipped: {found.reason}")
            if state.bad_steps >= training.max_bad_steps:
                writer.wait()
                why = diagnose(run, losses_of, told.step, state.bad_steps, found, carry, writer.saved)
                raise Diverged(world.share(why), told.step)

    def save() -> None:
        tell()
        state.halvings = run.halvings
        if run.folder and world.share(log.is_written()):  # a checkpoint never knows more than the log
            rows, mean = world.all_rows(carry), average.mean if average else {}
            writer.save(to_keep(model, optimizer, rows, mean, guard.state()), state, first=log.sync)

    with make_log(run, state.step) as log, stop_asked(world.size == 1) as stop, writer:
        for step, micro, counts, data in prefetch(run.batches, state.step, end_of(run, state), state.data, world):
            # one training step
            lr = rate(step, training)
            unfreeze(optimizer, model, training, run.pace, step)
            if run.awaited is not None:
                rehearse(run, losses_of, optimizer, micro, step)
                run.awaited()
                run.awaited = None
                if average:
                    average.load(learned(model))
            train_step(run, losses_of, optimizer, micro, step, lr, carry, guard, counts)
            state.step, state.tokens, state.data = step + 1, state.tokens + counts["tokens"], data
            if average:
                average.update(step, guard.skipped)

            # now and then: log, evaluate, save
            last = state.step == training.max_steps
            logs = state.step % training.logging_steps == 0 or last
            saves = state.step % training.save_steps == 0
            untold.append(Told(state.step, state.tokens, lr, data, reading(guard.found), logs))
            tell(but=1 if reads_late(run.machine) else 0)
            writer.look()
            if run.evaluate and (state.step % training.eval_steps == 0 or last):
                tell()
                with average.in_place() if average else nullcontext():
                    scores = world.share(run.evaluate(model))
                    compare(run, state, scores, model)
                log.write(step=state.step, **scores)
                last = last or state.step == end_of(run, state)
                model.train()
            for every, hook in run.hooks:
                if state.step % every == 0:
                    hook(state.step, model)
            asked = world.highest(stop.number)  # all stop after the same step; a signal may come just now, for the next
            going_back = state.best_step not in (0, state.step)  # to earlier weights, which are scored again
            if asked or (run.keeps_last or going_back if last else saves):
                save()
            if asked:
                stop.number = asked
                line.close()
                writer.wait()
                lost = "" if writer.saved == f"checkpoint-{state.step}" else f", {writer.saved or 'nothing'} is saved"
                raise Interrupted(world.share(f"stopped at step {state.step} of {training.max_steps}{lost}"))
            if last:  # patience may have run out
                tell()
                break
    line.close()
    if average:
        average.put()
    seconds, ended = time.monotonic() - speed.begin.moment, speed.begin.step == end_of(run, state)
    per_second, _ = speed.until(state.step, state.tokens)
    earlier = state.best_step not in (0, state.step)
    if earlier:
        assert run.folder is not None
        if load_best(run.folder, model, state.best_step):
            say(f"the weights of step {state.best_step:,} are taken, where the evaluation was best")
        else:
            state.best_step = state.step
    if ended and run.folder:  # resumed after the last step: only its numbers are needed
        loss = last_loss(run.folder / "log.jsonl")
    if run.evaluate and (earlier or ended):
        scores = world.share(run.evaluate(model))
    return Outcome(state.step, state.tokens, loss, scores, per_second, seconds, state.best_step or state.step)


def last_whole(run: Run) -> Path | None:
    """The checkpoint that a run goes on from; the first process looks for it."""
    folder = run.folder
    if folder is None:
        return None
    name = run.machine.world.once(lambda: getattr(last_checkpoint(folder), "name", None))
    return None if name is None else folder / name


def make_writer(run: Run) -> Writer:
    """Who writes the checkpoints: the first process; all of them where each has a part of the model."""
    training, world = run.training, run.machine.world
    how = to_plain(training), training.save_total_limit, run.model, training.async_save
    if world.kind == "fsdp":
        from firth.train.shard import PartsWriter  # which takes a second to load

        return PartsWriter(world, run.folder, *how)
    return Writer(run.folder if world.first else None, *how)


def make_log(run: Run, step: int) -> Log | NoLog:
    return Log(run.folder / "log.jsonl", step) if run.folder and run.machine.world.first else NoLog()


def end_of(run: Run, state: State) -> int:
    """The step after which the run is over: its last one, or this one where patience has run out."""
    return state.step if run.patience and state.waited >= run.patience else run.training.max_steps


def compare(run: Run, state: State, scores: Mapping[str, float], model: Model) -> None:
    """Note whether an evaluation is the best so far, and keep its weights then; of equal ones the first is.

    One whose weights could not be kept is none: the next better one takes its place.
    """
    if run.judge is None:
        return
    assert run.folder is not None, "a trial is not judged"
    value = run.judge(scores)
    if state.best_step and not value > state.best:  # what is no number is never better
        state.waited += 1
        return
    state.waited = 0
    folder, world = run.folder, run.machine.world
    if state.step < run.training.max_steps and not world.once(lambda: keep_best(folder, model, state)):
        return
    state.best, state.best_step = -math.inf if math.isnan(value) else value, state.step


def keep_best(folder: Path, model: Model, state: State) -> bool:
    """Whether the weights of this step could be kept; where a disk does not take them, the best before them stays."""
    try:
        save_best(folder, model, state.step)
    except OSError as e:
        stays = f"those of step {state.best_step} stay the best" if state.best_step else "there are none yet"
        warn(f"the best weights so far could not be kept ({e.strerror or e}): {stays}, and the run goes on.")
        return False
    return True


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
    batches: Callable[[int], Sequence[Batch]], start: int, end: int, data: int = 0, world: World = ALONE
) -> Iterator[tuple[int, Sequence[Batch], dict[str, int], int]]:
    """The steps with their batches, what all processes together are asked in them, and a hash of all so far.

    The next ones are made while the last are computed.
    """
    others = world.aside("batches")

    def made(step: int, before: int) -> tuple[Sequence[Batch], dict[str, int], int]:
        try:
            micro = batches(step)
        except MemoryError:
            raise UserError(
                "Memory is too short to make a batch: lower --per-device-train-batch-size or --max-seq-length."
            ) from None
        counts = others.sums({**add_counts(micro), "rows": sum(map(hash_rows, micro))})
        return micro, {name: int(n) for name, n in counts.items()}, chained(int(counts["rows"]), before)

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        following = pool.submit(made, start, data) if start < end else None
        for step in range(start, end):
            assert following is not None
            micro, counts, data = following.result()
            following = pool.submit(made, step + 1, data) if step + 1 < end else None
            yield step, micro, counts, data


def chained(rows: int, before: int) -> int:
    """A hash of what the rows of a step hash to, chained to that of the steps before."""
    return crc32((rows % 2**32).to_bytes(4, "little"), before)


def hash_rows(batch: Batch) -> int:
    """The hashes of the rows of a batch, added up: so any process can add those of its own."""
    found = [0] * len(batch.tokens)
    for array in batch:
        if array is not None:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            size = len(data) // len(found)
            found = [crc32(data[i * size : (i + 1) * size], before) for i, before in enumerate(found)]
    return sum(found)


class Stop(threading.Event):
    """Whether it is asked to stop, and by which signal; 0 until then."""

    number = 0


@contextmanager
def stop_asked(says: bool = True) -> Iterator[Stop]:
    """Ctrl-C or a SIGTERM asks the loop to stop after the step, which is said; a second Ctrl-C stops at once.

    An `Interrupted` that comes of it gets the exit code that belongs to the signal.
    """
    stop = Stop()

    def ask(number: int, frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.is_set():
            stop.number = number
            again = " (Ctrl-C again: at once, without saving)" if number == signal.SIGINT else ""
            if says:
                say(f"stopping after this step{again}")
            stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except Interrupted as e:
        e.code = 128 + (stop.number or signal.SIGINT)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Mark(NamedTuple):
    moment: float
    step: int
    tokens: int


class Speed:
    """How fast a run is since it began or went on, but for the first steps, in which it compiles what it needs."""

    def __init__(self, step: int, tokens: int) -> None:
        self.begin = self.mark = Mark(time.monotonic(), step, tokens)

    def settle(self, step: int, tokens: int) -> None:
        """Count from here on where this was the last of the first steps."""
        if step == self.begin.step + SETTLING:
            self.mark = Mark(time.monotonic(), step, tokens)

    @property
    def settled(self) -> bool:
        return self.mark is not self.begin

    def until(self, step: int, tokens: int) -> tuple[float, float]:
        """Tokens a second, and seconds a step; a run of the first steps alone is counted whole."""
        since = self.mark if step > self.mark.step else self.begin
        seconds = max(time.monotonic() - since.moment, 1e-9)
        return (tokens - since.tokens) / seconds, seconds / max(step - since.step, 1)


def _progress(run: Run, told: Told, loss: float, speed: Speed, saved: str | None) -> str:
    per_second, a_step = speed.until(told.step, told.tokens)
    fast = f"{per_second:,.0f} tokens/s  {duration(a_step * (run.training.max_steps - told.step))} left"
    if run.machine.compile and not speed.settled:
        fast = "compiling"
    at = f"{run.name}: step {told.step:,}/{run.training.max_steps:,}"
    return f"{at}  loss {loss:.3f}  rate {told.rate:.1e}  {fast}" + (f"  saved {saved}" if saved else "")
