"""The one loop, for pretraining and for fine-tuning."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from firth.console import Line, duration, say
from firth.errors import UserError
from firth.models import Model, Stack
from firth.models.heads import Vocabulary
from firth.objectives import Batch
from firth.plain import to_plain
from firth.tokens.rows import mix
from firth.train.average import Average
from firth.train.checkpoint import (
    State,
    forget_best,
    last_checkpoint,
    learned,
    load_average,
    load_best,
    load_carry,
    load_checkpoint,
    save_best,
    save_checkpoint,
)
from firth.train.device import Machine
from firth.train.halved import Halved
from firth.train.log import Log, last_loss
from firth.train.optim import make_optimizer, rate, unfreeze
from firth.train.recipe import Training
from firth.train.unfreeze import Pace

RECOMPILATIONS = 64  # packed rows come in few shapes, and each is worth a program of its own

Carry = dict[str, torch.Tensor]  # what rows leave for those that go on from them, by name: a row each


class Interrupted(Exception):  # noqa: N818, no error
    """Ctrl-C: the work is saved, and the message says how to go on."""


@dataclass
class Run:
    """What the loop needs: a model, the micro-batches of any step, and a way to judge."""

    training: Training
    machine: Machine
    model: Model
    batches: Callable[[int], Sequence[Batch]]  # step -> micro-batches, a pure function
    evaluate: Callable[[Model], dict[str, float]] | None = None
    folder: Path | None = None  # None: nothing is written (a trial)
    name: str = "training"
    hooks: list[tuple[int, Callable[[int, Model], None]]] = field(default_factory=list)  # (every_n_steps, function)
    losses: Callable[[Any], dict[str, torch.Tensor]] | None = None  # the model's own unless said (distillation)
    pace: Pace = field(default_factory=Pace)  # which parts learn, from when on, and how fast
    judge: Callable[[Mapping[str, float]], float] | None = None  # scores -> the higher the better; keeps the best
    patience: int = 0  # stop after so many evaluations that were no better than the best; 0: never


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
    training, model = run.training, run.model.to(run.machine.device)
    recipe = to_plain(training)
    optimizer = make_optimizer(model, training, run.pace)
    state, saved, carry = State(), None, Carry()
    average = Average(learned(model), training.ema_decay) if training.ema_decay else None
    if resume and run.folder and (found := last_checkpoint(run.folder)):
        state, saved = load_checkpoint(found, model, optimizer), found.name
        carry = load_carry(found, run.machine.device)
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
            loss = told.loss()
            if not math.isfinite(loss):
                raise UserError(
                    f"The loss is {loss} at step {told.step}. Lower --learning-rate or lengthen --warmup-steps"
                    + (f"; {saved} is whole." if saved else ".")
                )
            if told.logged:
                log.write(step=told.step, loss=loss, learning_rate=told.rate, tokens=told.tokens)
                line.show(_progress(run, told, loss, began, saved))

    def save() -> None:
        nonlocal saved
        tell()
        if run.folder:
            keep, mean = training.save_total_limit, average.mean if average else None
            saved = save_checkpoint(run.folder, model, optimizer, state, recipe, keep, carry, mean).name
            forget_best(run.folder, but=state.best_step)

    with Log(run.folder / "log.jsonl", state.step) if run.folder else _NoLog() as log, stop_asked() as stop:
        for step, micro in prefetch(run.batches, state.step, end_of(run, state)):
            # one training step
            lr = rate(step, training)
            unfreeze(optimizer, model, training, run.pace, step)
            total = train_step(run, losses_of, optimizer, micro, step, lr, carry)
            state.step, state.tokens = step + 1, state.tokens + sum(b.num_tokens for b in micro)
            if average:
                average.update(step)

            # now and then: log, evaluate, save
            last = state.step == training.max_steps
            logs = state.step % training.logging_steps == 0 or last
            saves = state.step % training.save_steps == 0 or last or stop.is_set()
            if logs or saves:
                untold.append(Told(state.step, state.tokens, lr, reading(total), logs))
            tell(but=1 if reads_late(run.machine) else 0)
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
                raise Interrupted(f"stopped at step {state.step} of {training.max_steps}")
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
    loss: Callable[[], float]
    logged: bool


def reads_late(machine: Machine) -> bool:
    """Whether losses are read a step later. A device that computes by itself then never waits for the next step."""
    return machine.device.type == "cuda"


def reading(total: torch.Tensor) -> Callable[[], float]:
    """A way to read a number of a device later on, for which only what is before it must have been computed."""
    if not total.is_cuda:
        return total.item
    here, done = torch.empty((), dtype=total.dtype, pin_memory=True), torch.cuda.Event()
    here.copy_(total, non_blocking=True)
    done.record()

    def read() -> float:
        done.synchronize()
        return here.item()

    return read


def prepared(run: Run) -> Callable[[Any], dict[str, torch.Tensor]]:
    """What a step computes the losses with: compiled, and with blocks that are computed twice, where that is asked."""
    for module in run.model.modules():
        if isinstance(module, Stack):
            module.checkpointing = run.training.gradient_checkpointing
        if isinstance(module, Vocabulary):
            module.fused, module.padded = run.training.fused_loss, run.training.pad_vocabulary

    def program(losses: Callable[[Any], dict[str, torch.Tensor]]) -> Callable[[Any], dict[str, torch.Tensor]]:
        if not run.machine.compile:
            return losses
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
        return torch.compile(losses, dynamic=False, mode="reduce-overhead" if run.machine.graphs else None)

    if run.training.weights == "bf16":
        assert run.losses is None, "a recipe refuses it"
        return Halved(run.model, program)
    return program(run.losses or run.model.losses)


def train_step(
    run: Run,
    losses_of: Callable[[Any], dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    micro: Sequence[Batch],
    step: int,
    lr: float,
    carry: Carry | None = None,
) -> torch.Tensor:
    """Forward and backward over the micro-batches, one update.

    Each part of the loss is a mean over all that the step asks of it: answers, pairs of texts, tokens. `carry` is what
    the last step has left for this one, and becomes what this one leaves for the next.
    """
    counts = add_counts(micro)
    total = torch.zeros((), device=run.machine.device)
    left: list[Carry] = []
    run.model.train()
    halved = losses_of if isinstance(losses_of, Halved) else None
    if halved:
        halved.begin()
    for i, batch in enumerate(micro):
        torch.manual_seed(dropout_seed(run.training.seed, step, i))
        if run.machine.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with run.machine.precision(), reading_on(run.model, batch, carry or {}, sum(map(num_rows, micro[:i])), left):
            loss = sum_of_means(losses_of(batch.to(run.machine.device)), counts)
        loss.backward()
        if halved:
            halved.hand_over()
        total += loss.detach()
    if carry is not None:
        carry.clear()
        carry.update(joined(left))
    if run.training.max_grad_norm:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.training.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def num_rows(batch: Batch) -> int:
    return len(batch.tokens)


@contextmanager
def reading_on(model: Model, batch: Batch, carry: Carry, first: int, left: list[Carry]) -> Iterator[None]:
    """Read rows that go on from step to step: with their part of `carry`, which begins at row `first`.

    What they leave is added to `left`. Rows that are `fresh` begin with nothing; those of a step are so together.
    """
    if batch.fresh is None:
        yield
        return
    assert batch.fresh.all() or not batch.fresh.any(), "all begin anew, or none"
    rows = slice(first, first + num_rows(batch))
    model.take_up({} if batch.fresh.all() else {name: value[rows] for name, value in carry.items()})
    yield
    left.append(model.hand_on())


def joined(parts: Sequence[Carry]) -> Carry:
    """What the micro-batches of a step have left, as of all its rows."""
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else {})}


def add_counts(batches: Iterable[Batch]) -> Counter[str]:
    """What each part of the loss is a mean over, in all of the batches together."""
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch.counts)
    return counts


def sum_of_means(parts: Mapping[str, Any], counts: Mapping[str, int]) -> Any:
    """The parts of a loss, numbers or tensors, each divided by its own count, added up."""
    return sum(part / max(counts[name], 1) for name, part in parts.items())


def dropout_seed(seed: int, step: int, micro: int) -> int:
    """Dropout depends on where it falls, not on what was drawn before."""
    return int(mix(seed, step, micro)) >> 1


def prefetch(batches: Callable[[int], Sequence[Batch]], start: int, end: int) -> Iterator[tuple[int, Sequence[Batch]]]:
    """The steps with their batches; the next ones are made while the last are computed."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        following = pool.submit(batches, start) if start < end else None
        for step in range(start, end):
            assert following is not None
            micro = following.result()
            following = pool.submit(batches, step + 1) if step + 1 < end else None
            yield step, micro


@contextmanager
def stop_asked() -> Iterator[threading.Event]:
    """Ctrl-C asks the loop to stop after the step; a second one stops at once."""
    stop = threading.Event()

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        say("stopping after this step (Ctrl-C again: at once, without saving)")
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class _NoLog:
    """A trial leaves no trace."""

    def write(self, **facts: Any) -> None: ...

    def __enter__(self) -> _NoLog:
        return self

    def __exit__(self, *error: object) -> None: ...


def _progress(run: Run, told: Told, loss: float, began: tuple[float, int, int], saved: str | None) -> str:
    seconds = max(time.monotonic() - began[0], 1e-9)
    per_step = seconds / max(told.step - began[1], 1)
    speed = (told.tokens - began[2]) / seconds
    left = duration(per_step * (run.training.max_steps - told.step))
    at = f"{run.name}: step {told.step:,}/{run.training.max_steps:,}"
    return f"{at}  loss {loss:.3f}  rate {told.rate:.1e}  {speed:,.0f} tokens/s  {left} left" + (
        f"  saved {saved}" if saved else ""
    )
