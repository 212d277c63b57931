"""The one loop, for pretraining and for fine-tuning."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firth.console import Line, duration, say
from firth.errors import UserError
from firth.models import Model, Stack
from firth.objectives import Batch
from firth.plain import to_plain
from firth.tokens.rows import mix
from firth.train.checkpoint import State, last_checkpoint, load_checkpoint, save_checkpoint
from firth.train.device import Machine
from firth.train.log import Log, last_loss
from firth.train.optim import make_optimizer, rate
from firth.train.recipe import Training


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


@dataclass
class Outcome:
    steps: int
    tokens: int
    loss: float
    scores: dict[str, float]
    tokens_per_second: float


def fit(run: Run, resume: bool = False) -> Outcome:
    """Train to the last step; from the last whole checkpoint when `resume`."""
    training, model = run.training, run.model.to(run.machine.device)
    recipe = to_plain(training)
    optimizer = make_optimizer(model, training)
    state, saved = State(), None
    if resume and run.folder and (found := last_checkpoint(run.folder)):
        state, saved = load_checkpoint(found, model, optimizer), found.name
        say(f"going on from {found}")
    losses_of = prepared(run)
    line, loss, scores, began = Line(), math.nan, {}, (time.monotonic(), state.step, state.tokens)

    def save() -> None:
        nonlocal saved
        if run.folder:
            saved = save_checkpoint(run.folder, model, optimizer, state, recipe, training.save_total_limit).name

    with Log(run.folder / "log.jsonl", state.step) if run.folder else _NoLog() as log, stop_asked() as stop:
        for step, micro in prefetch(run.batches, state.step, training.max_steps):
            # one training step
            lr = rate(step, training)
            total = train_step(run, losses_of, optimizer, micro, step, lr)
            state.step, state.tokens = step + 1, state.tokens + sum(b.num_tokens for b in micro)

            # now and then: log, evaluate, save
            last = state.step == training.max_steps
            logs = state.step % training.logging_steps == 0 or last
            saves = state.step % training.save_steps == 0 or last or stop.is_set()
            if logs or saves:
                loss = total.item()
                if not math.isfinite(loss):
                    raise UserError(
                        f"The loss is {loss} at step {state.step}. Lower --learning-rate or lengthen --warmup-steps"
                        + (f"; {saved} is whole." if saved else ".")
                    )
            if logs:
                log.write(step=state.step, loss=loss, learning_rate=lr, tokens=state.tokens)
                line.show(_progress(run, state, loss, lr, began, saved))
            if run.evaluate and (state.step % training.eval_steps == 0 or last):
                scores = run.evaluate(model)
                log.write(step=state.step, **scores)
                model.train()
            for every, hook in run.hooks:
                if state.step % every == 0:
                    hook(state.step, model)
            if saves or stop.is_set():
                save()
            if stop.is_set():
                line.close()
                raise Interrupted(f"stopped at step {state.step} of {training.max_steps}")
    line.close()
    seconds = max(time.monotonic() - began[0], 1e-9)
    if began[1] == training.max_steps and run.folder:  # resumed after the last step: only its numbers are needed
        loss = last_loss(run.folder / "log.jsonl")
        scores = run.evaluate(model) if run.evaluate else {}
    return Outcome(state.step, state.tokens, loss, scores, (state.tokens - began[2]) / seconds)


def prepared(run: Run) -> Callable[[Any], dict[str, torch.Tensor]]:
    """What a step computes the losses with: compiled, and with blocks that are computed twice, where that is asked."""
    for module in run.model.modules():
        if isinstance(module, Stack):
            module.checkpointing = run.training.gradient_checkpointing
    losses = run.losses or run.model.losses
    return torch.compile(losses) if run.machine.compile else losses


def train_step(
    run: Run,
    losses_of: Callable[[Any], dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    micro: Sequence[Batch],
    step: int,
    lr: float,
) -> torch.Tensor:
    """Forward and backward over the micro-batches, one update.

    Each part of the loss is a mean over all that the step asks of it: answers, pairs of texts, tokens.
    """
    counts = add_counts(micro)
    total = torch.zeros((), device=run.machine.device)
    run.model.train()
    for i, batch in enumerate(micro):
        torch.manual_seed(dropout_seed(run.training.seed, step, i))
        with run.machine.precision():
            loss = sum_of_means(losses_of(batch.to(run.machine.device)), counts)
        loss.backward()
        total += loss.detach()
    if run.training.max_grad_norm:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.training.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


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


def _progress(run: Run, state: State, loss: float, lr: float, began: tuple[float, int, int], saved: str | None) -> str:
    seconds = max(time.monotonic() - began[0], 1e-9)
    per_step = seconds / max(state.step - began[1], 1)
    speed = (state.tokens - began[2]) / seconds
    left = duration(per_step * (run.training.max_steps - state.step))
    at = f"{run.name}: step {state.step:,}/{run.training.max_steps:,}"
    return f"{at}  loss {loss:.3f}  rate {lr:.1e}  {speed:,.0f} tokens/s  {left} left" + (
        f"  saved {saved}" if saved else ""
    )
