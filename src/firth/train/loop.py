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

from firth.core.console import StatusLine, format_duration, say, warn
from firth.core.errors import UserError
from firth.core.serialization import to_dict
from firth.models import Model
from firth.objectives import Batch
from firth.train.checkpoint import (
    TrainState,
    collect_payload,
    last_checkpoint,
    load_best,
    load_ema,
    load_guard_state,
    load_model_weights,
    load_optimizer,
    load_recurrent_state,
    save_best,
    trainable_state,
)
from firth.train.compute import ComputeConfig
from firth.train.diagnose import diagnose_divergence
from firth.train.distributed import SINGLE_PROCESS, DistContext
from firth.train.ema import WeightEMA
from firth.train.guard import Guard, StepOutcome
from firth.train.log import NullLog, RunLog, read_last_loss
from firth.train.optim import add_unfrozen_groups, learning_rate_at, make_optimizer
from firth.train.step import RecurrentStateDict, TrainingRun, build_step_runner, compile_ahead, sum_counts, train_step
from firth.train.writer import CheckpointWriter

SPEED_WARMUP_STEPS = 3  # steps that say nothing of a run's speed


class Interrupted(Exception):  # noqa: N818, no error
    """Ctrl-C or a SIGTERM: the work is saved, and the message says how to go on. `code` is the exit code for it."""

    code = 128 + signal.SIGINT


class Diverged(UserError):  # noqa: N818, named for what is wrong
    """A run that broke on its loss after so many steps; the message says on what, and how to go on."""

    def __init__(self, message: str, steps: int) -> None:
        super().__init__(message)
        self.steps = steps


@dataclass
class FitResult:
    steps: int
    tokens: int
    loss: float
    scores: dict[str, float]
    tokens_per_second: float
    seconds: float
    best_step: int  # whose weights the model has now


def fit(run: TrainingRun, resume: bool = False) -> FitResult:
    """Train to the last step; from the last whole checkpoint when `resume`."""
    training, model, world = run.training, run.model, run.compute.dist_context
    found = find_resume_checkpoint(run) if resume else None
    if found is not None:
        load_model_weights(found, model)
    else:
        world.broadcast_weights(model)
    writer, guard = make_checkpoint_writer(run), Guard(training, run.compute)
    world.prepare_model(model, training, run.compute)
    optimizer = make_optimizer(model, training, run.freeze_schedule)
    state, carry = TrainState(), RecurrentStateDict()
    average = WeightEMA(trainable_state(model), training.ema_decay) if training.ema_decay else None
    if found is not None:
        state, writer.last_saved = load_optimizer(found, model, optimizer), found.name
        carry, run.halvings = world.select_local_rows(load_recurrent_state(found, run.compute.device)), state.halvings
        guard.load_state_dict(load_guard_state(found, run.compute.device))
        if average:
            average.load_state(load_ema(found))
        say(f"going on from {found}")
    runner = build_step_runner(run)
    line, loss, scores, speed = StatusLine(), math.nan, {}, SpeedMeter(state.step, state.tokens)
    untold: list[StepRecord] = []

    def tell(but: int = 0) -> None:
        """Log the losses of the steps so far, but for so many of the last, which may not be computed yet."""
        nonlocal loss
        while len(untold) > but:
            told = untold.pop(0)
            found = StepOutcome(*told.read_outcome())
            loss = loss if found.was_skipped else found.loss
            state.bad_steps = state.bad_steps + 1 if found.was_skipped and not found.is_fp16_overflow else 0
            if told.is_logged or found.was_skipped:
                log.write(**told.log_entry(found))
                line.show(_progress_line(run, told, loss, speed, writer.last_saved))
            speed.end_warmup(told.step, told.tokens)
            if state.bad_steps:
                warn(f"step {told.step} is skipped: {found.skip_reason}")
            if state.bad_steps >= training.max_bad_steps:
                writer.wait()
                why = diagnose_divergence(run, runner, told.step, state.bad_steps, found, carry, writer.last_saved)
                raise Diverged(world.broadcast(why), told.step)

    def save() -> None:
        tell()
        state.halvings = run.halvings
        if run.folder and world.broadcast(log.flush()):  # a checkpoint never knows more than the log
            rows, mean = world.gather_rows(carry), average.averages if average else {}
            writer.save(
                collect_payload(model, optimizer, rows, mean, guard.state_dict()), state, before_write=log.fsync
            )

    with make_log(run, state.step) as log, handle_stop_signals(world.world_size == 1) as stop, writer:
        for step, micro, counts, data in prefetch_batches(
            run.batch_fn, state.step, final_step(run, state), state.data_hash, world
        ):
            # one training step
            lr = learning_rate_at(step, training)
            add_unfrozen_groups(optimizer, model, training, run.freeze_schedule, step)
            if run.deferred_init is not None:
                compile_ahead(run, runner, optimizer, micro, step)
                run.deferred_init()
                run.deferred_init = None
                if average:
                    average.load_state(trainable_state(model))
            train_step(run, runner, optimizer, micro, step, lr, carry, guard, counts)
            state.step, state.tokens, state.data_hash = step + 1, state.tokens + counts["tokens"], data
            if average:
                average.update(step, guard.last_skipped)

            # now and then: log, evaluate, save
            last = state.step == training.max_steps
            logs = state.step % training.logging_steps == 0 or last
            saves = state.step % training.save_steps == 0
            untold.append(StepRecord(state.step, state.tokens, lr, data, read_async(guard.last_outcome), logs))
            tell(but=1 if defers_loss_reads(run.compute) else 0)
            writer.poll()
            if run.evaluate and (state.step % training.eval_steps == 0 or last):
                tell()
                with average.average_parameters() if average else nullcontext():
                    scores = world.broadcast(run.evaluate(model))
                    update_best(run, state, scores, model)
                log.write(step=state.step, **scores)
                last = last or state.step == final_step(run, state)
                model.train()
            for every, hook in run.hooks:
                if state.step % every == 0:
                    hook(state.step, model)
            asked = world.all_reduce_max(
                stop.signal_number
            )  # all stop after the same step; a signal may come just now, for the next
            going_back = state.best_step not in (0, state.step)  # to earlier weights, which are scored again
            if asked or (run.save_last or going_back if last else saves):
                save()
            if asked:
                stop.signal_number = asked
                line.close()
                writer.wait()
                lost = (
                    ""
                    if writer.last_saved == f"checkpoint-{state.step}"
                    else f", {writer.last_saved or 'nothing'} is saved"
                )
                raise Interrupted(world.broadcast(f"stopped at step {state.step} of {training.max_steps}{lost}"))
            if last:  # patience may have run out
                tell()
                break
    line.close()
    if average:
        average.apply()
    seconds, ended = time.monotonic() - speed.start.timestamp, speed.start.step == final_step(run, state)
    per_second, _ = speed.measure(state.step, state.tokens)
    earlier = state.best_step not in (0, state.step)
    if earlier:
        assert run.folder is not None
        if load_best(run.folder, model, state.best_step):
            say(f"the weights of step {state.best_step:,} are taken, where the evaluation was best")
        else:
            state.best_step = state.step
    if ended and run.folder:  # resumed after the last step: only its numbers are needed
        loss = read_last_loss(run.folder / "log.jsonl")
    if run.evaluate and (earlier or ended):
        scores = world.broadcast(run.evaluate(model))
    return FitResult(state.step, state.tokens, loss, scores, per_second, seconds, state.best_step or state.step)


def find_resume_checkpoint(run: TrainingRun) -> Path | None:
    """The checkpoint that a run goes on from; the first process looks for it."""
    folder = run.folder
    if folder is None:
        return None
    name = run.compute.dist_context.run_on_main(lambda: getattr(last_checkpoint(folder), "name", None))
    return None if name is None else folder / name


def make_checkpoint_writer(run: TrainingRun) -> CheckpointWriter:
    """Who writes the checkpoints: the first process; all of them where each has a part of the model."""
    training, world = run.training, run.compute.dist_context
    how = to_dict(training), training.save_total_limit, run.model, training.async_save
    if world.strategy == "fsdp":
        from firth.train.fsdp import ShardedCheckpointWriter  # which takes a second to load

        return ShardedCheckpointWriter(world, run.folder, *how)
    return CheckpointWriter(run.folder if world.is_main_process else None, *how)


def make_log(run: TrainingRun, step: int) -> RunLog | NullLog:
    return (
        RunLog(run.folder / "log.jsonl", step) if run.folder and run.compute.dist_context.is_main_process else NullLog()
    )


def final_step(run: TrainingRun, state: TrainState) -> int:
    """The step after which the run is over: its last one, or this one where patience has run out."""
    return state.step if run.patience and state.evals_since_best >= run.patience else run.training.max_steps


def update_best(run: TrainingRun, state: TrainState, scores: Mapping[str, float], model: Model) -> None:
    """Note whether an evaluation is the best so far, and keep its weights then; of equal ones the first is.

    One whose weights could not be kept is none: the next better one takes its place.
    """
    if run.score_fn is None:
        return
    assert run.folder is not None, "a trial is not judged"
    value = run.score_fn(scores)
    if state.best_step and not value > state.best_score:  # what is no number is never better
        state.evals_since_best += 1
        return
    state.evals_since_best = 0
    folder, world = run.folder, run.compute.dist_context
    if state.step < run.training.max_steps and not world.run_on_main(lambda: try_save_best(folder, model, state)):
        return
    state.best_score, state.best_step = -math.inf if math.isnan(value) else value, state.step


def try_save_best(folder: Path, model: Model, state: TrainState) -> bool:
    """Whether the weights of this step could be kept; where a disk does not take them, the best before them stays."""
    try:
        save_best(folder, model, state.step)
    except OSError as e:
        stays = f"those of step {state.best_step} stay the best" if state.best_step else "there are none yet"
        warn(f"the best weights so far could not be kept ({e.strerror or e}): {stays}, and the run goes on.")
        return False
    return True


class StepRecord(NamedTuple):
    """What there is to say about a step, once its loss is known."""

    step: int
    tokens: int
    learning_rate: float
    data_hash: int
    read_outcome: Callable[[], list[float]]
    is_logged: bool

    def log_entry(self, outcome: StepOutcome) -> dict[str, Any]:
        """A line of the log. `data_hash` is a hash of all batches so far: equal ones mean that equal text was read."""
        numbers = {
            "loss": outcome.loss,
            "learning_rate": self.learning_rate,
            "tokens": self.tokens,
            "grad_norm": outcome.grad_norm,
        }
        facts = {name: value for name, value in numbers.items() if math.isfinite(value)}
        why = {"skipped": outcome.skip_reason} if outcome.was_skipped else {}
        return {"step": self.step, **facts, "data": f"{self.data_hash:08x}", **why}


def defers_loss_reads(compute: ComputeConfig) -> bool:
    """Whether losses are read a step later. A device that computes by itself then never waits for the next step."""
    return compute.device.type == "cuda"


def read_async(numbers: torch.Tensor) -> Callable[[], Any]:
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


def prefetch_batches(
    batch_fn: Callable[[int], Sequence[Batch]],
    start: int,
    end: int,
    data_hash: int = 0,
    dist_context: DistContext = SINGLE_PROCESS,
) -> Iterator[tuple[int, Sequence[Batch], dict[str, int], int]]:
    """The steps with their batches, what all processes together are asked in them, and a hash of all so far.

    The next ones are made while the last are computed.
    """
    others = dist_context.for_thread("batches")

    def made(step: int, before: int) -> tuple[Sequence[Batch], dict[str, int], int]:
        try:
            micro = batch_fn(step)
        except MemoryError:
            raise UserError(
                "Memory is too short to make a batch: lower --per-device-train-batch-size or --max-seq-length."
            ) from None
        counts = others.all_reduce_sum({**sum_counts(micro), "rows": sum(map(hash_rows, micro))})
        return micro, {name: int(n) for name, n in counts.items()}, chain_hash(int(counts["rows"]), before)

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        following = pool.submit(made, start, data_hash) if start < end else None
        for step in range(start, end):
            assert following is not None
            micro, counts, data_hash = following.result()
            following = pool.submit(made, step + 1, data_hash) if step + 1 < end else None
            yield step, micro, counts, data_hash


def chain_hash(rows_hash: int, previous_hash: int) -> int:
    """A hash of what the rows of a step hash to, chained to that of the steps before."""
    return crc32((rows_hash % 2**32).to_bytes(4, "little"), previous_hash)


def hash_rows(batch: Batch) -> int:
    """The hashes of the rows of a batch, added up: so any process can add those of its own."""
    found = [0] * len(batch.input_ids)
    for array in batch:
        if array is not None:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            size = len(data) // len(found)
            found = [crc32(data[i * size : (i + 1) * size], before) for i, before in enumerate(found)]
    return sum(found)


class StopRequest(threading.Event):
    """Whether it is asked to stop, and by which signal; 0 until then."""

    signal_number = 0


@contextmanager
def handle_stop_signals(announce: bool = True) -> Iterator[StopRequest]:
    """Ctrl-C or a SIGTERM asks the loop to stop after the step, which is said; a second Ctrl-C stops at once.

    An `Interrupted` that comes of it gets the exit code that belongs to the signal.
    """
    stop = StopRequest()

    def ask(number: int, frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.is_set():
            stop.signal_number = number
            again = " (Ctrl-C again: at once, without saving)" if number == signal.SIGINT else ""
            if announce:
                say(f"stopping after this step{again}")
            stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except Interrupted as e:
        e.code = 128 + (stop.signal_number or signal.SIGINT)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SpeedMark(NamedTuple):
    timestamp: float
    step: int
    tokens: int


class SpeedMeter:
    """How fast a run is since it began or went on, but for the first steps, in which it compiles what it needs."""

    def __init__(self, step: int, tokens: int) -> None:
        self.start = self.baseline = SpeedMark(time.monotonic(), step, tokens)

    def end_warmup(self, step: int, tokens: int) -> None:
        """Count from here on where this was the last of the first steps."""
        if step == self.start.step + SPEED_WARMUP_STEPS:
            self.baseline = SpeedMark(time.monotonic(), step, tokens)

    @property
    def is_warmed_up(self) -> bool:
        return self.baseline is not self.start

    def measure(self, step: int, tokens: int) -> tuple[float, float]:
        """Tokens a second, and seconds a step; a run of the first steps alone is counted whole."""
        since = self.baseline if step > self.baseline.step else self.start
        seconds = max(time.monotonic() - since.timestamp, 1e-9)
        return (tokens - since.tokens) / seconds, seconds / max(step - since.step, 1)


def _progress_line(run: TrainingRun, record: StepRecord, loss: float, speed: SpeedMeter, last_saved: str | None) -> str:
    per_second, a_step = speed.measure(record.step, record.tokens)
    fast = f"{per_second:,.0f} tokens/s  {format_duration(a_step * (run.training.max_steps - record.step))} left"
    if run.compute.compile and not speed.is_warmed_up:
        fast = "compiling"
    at = f"{run.name}: step {record.step:,}/{run.training.max_steps:,}"
    return f"{at}  loss {loss:.3f}  rate {record.learning_rate:.1e}  {fast}" + (
        f"  saved {last_saved}" if last_saved else ""
    )
