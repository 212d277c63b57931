"""The training loop, shared by pretraining and fine-tuning.

`fit` reads top to bottom: load a checkpoint, build the optimizer, then for every step

1. take the next batch, which a thread has prepared during the previous step (`prefetch_batches`);
2. compute the learning rate and run `train_step` (forward, backward, clip, guard, optimizer update);
3. log the loss, and every few steps evaluate, call hooks and save a checkpoint.

Three properties hold throughout:

- Between evaluations the host never waits for the GPU's current step. The guard decides on the device whether to skip
  an update. The loss is copied asynchronously and read one step later (`read_async`), while the GPU computes the next.
- A checkpoint is never ahead of the log. `save` writes all pending log lines first, so a resumed run can cut the log
  back to the checkpoint's step and append to it.
- All processes take the same decisions. Scores, stop signals and messages are broadcast or reduced before their use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from firth.core.console import StatusLine, format_passes, format_time_left, say, warn
from firth.core.errors import Interrupted, UserError
from firth.core.serialization import to_dict
from firth.models import Model
from firth.objectives import Batch
from firth.train.checkpoint import (
    TrainState,
    collect_payload,
    last_checkpoint,
    list_checkpoints,
    load_average,
    load_best,
    load_guard_state,
    load_model_weights,
    load_optimizer,
    load_recurrent_state,
    prune_checkpoints,
    save_best,
    trainable_state,
)
from firth.train.diagnose import diagnose_divergence
from firth.train.distributed import SINGLE_PROCESS, DistContext
from firth.train.dtensor import find_shard_group, to_local
from firth.train.guard import Guard
from firth.train.log import NullLog, RunLog, read_last_losses, read_log
from firth.train.optim import add_unfrozen_groups, learning_rate_at, make_optimizer
from firth.train.prefetch import prefetch_batches
from firth.train.recipe import describe_tracked_run
from firth.train.samples import SAMPLES_FILE, CheckpointSamples, NoSamples
from firth.train.speed import SpeedMeter
from firth.train.step import RecurrentStateDict, TrainingRun, build_step_runner, compile_ahead, train_step
from firth.train.step_record import StepRecord, defers_loss_reads, read_async
from firth.train.stop_signals import PEER_GRACE_SECONDS, STOP_GRACE_SECONDS, StopRequest, handle_stop_signals
from firth.train.timings import TIMINGS_FILE, StepTimings
from firth.train.weight_average import make_weight_average
from firth.train.writer import CheckpointWriter

WEIGHT_RMS_STEPS = 10  # steps between two measurements of the weights under Muon


class Diverged(UserError):  # noqa: N818, named for what is wrong
    """Too many consecutive steps were skipped. The message names the cause and the fix; `steps` is the last step."""

    def __init__(self, message: str, steps: int) -> None:
        super().__init__(message)
        self.steps = steps


@dataclass
class FitResult:
    steps: int
    tokens: int
    loss: float
    metrics: dict[str, float]  # losses and accuracies that the loss consists of, at the last step; often empty
    scores: dict[str, float]
    tokens_per_second: float
    seconds: float
    best_step: int  # step whose weights the model has now


def fit(run: TrainingRun, resume: bool = False) -> FitResult:
    """Train to the last step and return the results. `resume` starts from the last intact checkpoint.

    With `score_fn` the model ends with the weights of its best evaluation, with `ema_decay` or `tail_average` with
    averaged ones.
    """
    loop = TrainingLoop(run, find_resume_checkpoint(run) if resume else None)
    with loop.open_files():
        for step, micro_batches, counts, data_hash in loop.prefetch():
            loop.train(step, micro_batches, counts, data_hash)

            # every few steps: log, evaluate, save
            loop.record(step, counts)
            loop.log_pending(keep=1 if defers_loss_reads(run.compute) else 0)
            loop.timings.end_step(loop.state.step, counts["tokens"])
            loop.writer.poll()
            if run.evaluate and (loop.state.step % run.training.eval_steps == 0 or loop.is_last):
                loop.evaluate(run.evaluate)
            for every, hook in run.hooks:
                if loop.state.step % every == 0:
                    hook(loop.state.step, run.model)
            loop.save_or_stop()
            if loop.is_last:  # early stopping may end the run before `max_steps`
                loop.log_pending()
                break
    return loop.finish()


class TrainingLoop:
    """A run between two steps: all that a checkpoint saves, and the files that are open."""

    log: RunLog | NullLog
    stop: StopRequest
    timings: StepTimings
    samples: CheckpointSamples | NoSamples

    def __init__(self, run: TrainingRun, checkpoint: Path | None) -> None:
        """Load the checkpoint, or begin anew."""
        self.run, model, self.dist_context = run, run.model, run.compute.dist_context
        if checkpoint is not None:
            load_model_weights(checkpoint, model)
        else:
            self.dist_context.broadcast_weights(model)
        self.writer, self.guard = make_checkpoint_writer(run), Guard(run.training, run.compute)
        self.writer.on_saved = run.on_checkpoint if self.dist_context.is_main_process else None
        self.dist_context.prepare_model(model, run.training, run.compute)
        self.optimizer = make_optimizer(model, run.training, run.freeze_schedule)
        self.state, self.recurrent_state = TrainState(), RecurrentStateDict()
        self.average = make_weight_average(trainable_state(model), run.training)
        if checkpoint is not None:
            self.load_checkpoint(checkpoint)
        self.runner = run.runner or build_step_runner(run)
        self.line, self.speed = StatusLine(), SpeedMeter(self.state.step, self.state.tokens)
        self.loss, self.metrics, self.scores = math.nan, dict[str, float](), dict[str, float]()
        self.pending: list[StepRecord] = []  # steps whose loss is not read yet
        self.is_last = False  # whether this step ends the run

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Load what a checkpoint has beside the weights."""
        run, dist_context = self.run, self.dist_context
        self.state = load_optimizer(checkpoint, run.model, self.optimizer)
        self.forget_lost_best(checkpoint.parent)
        self.writer.last_saved = checkpoint.name
        self.recurrent_state = dist_context.select_local_rows(load_recurrent_state(checkpoint, run.compute.device))
        run.halvings = self.state.halvings
        self.guard.load_state_dict(load_guard_state(checkpoint, run.compute.device))
        if self.average and self.state.num_averaged:
            self.average.load_state(load_average(checkpoint), self.state.num_averaged)
        say(f"resuming from {checkpoint}")
        if dist_context.is_main_process and run.folder and checkpoint == list_checkpoints(run.folder)[0]:
            prune_checkpoints(run.folder, self.state, run.training.save_total_limit)  # a kill came before it

    def forget_lost_best(self, folder: Path) -> None:
        """Compare the evaluations from here on, where the best weights are gone or nothing compares any more.

        They are gone where a run ended with its last weights, and goes on now.
        """
        state = self.state
        if state.best_step and (
            self.run.score_fn is None or not self.dist_context.run_on_main((folder / f"best-{state.best_step}").is_dir)
        ):
            state.best_step, state.best_score, state.evals_since_best = 0, -math.inf, 0

    @contextmanager
    def open_files(self) -> Iterator[None]:
        """Open the files of a run, and let signals stop it, inside a `with` block."""
        run, step, dist_context = self.run, self.state.step, self.dist_context
        grace = STOP_GRACE_SECONDS + (0.0 if dist_context.is_main_process else PEER_GRACE_SECONDS)
        with (
            make_log(run, step) as self.log,
            handle_stop_signals(dist_context.world_size == 1, self.save_before_exit, grace) as self.stop,
            make_timings(run, step) as self.timings,
            make_samples(run, step) as self.samples,
            self.writer,
        ):
            run.computing = self.stop.computing
            if run.doctor is not None:
                run.doctor.timings = self.timings.totals
                if step and run.folder:
                    run.doctor.lines = [*read_log(run.folder / "log.jsonl")]
                if run.doctor.file is not None:  # of steps that a resumed run repeats, perhaps
                    run.doctor.file.unlink(missing_ok=True)
            yield
        self.line.close()

    def prefetch(self) -> Iterator[tuple[int, Sequence[Batch], dict[str, int], int]]:
        """Yield the batches of each step that is left."""
        return prefetch_batches(
            self.run.batch_fn,
            self.state.step,
            lambda: final_step(self.run, self.state),
            self.state.data_hash,
            self.dist_context,
            partial(self.timings.waiting, self.stop.computing),
        )

    def train(self, step: int, micro_batches: Sequence[Batch], counts: dict[str, int], data_hash: int) -> None:
        """Take one training step."""
        run, state, optimizer = self.run, self.state, self.optimizer
        add_unfrozen_groups(optimizer, run.model, run.training, run.freeze_schedule, step)
        if run.deferred_init is not None:
            compile_ahead(run, self.runner, optimizer, micro_batches, step)
            run.deferred_init()
            run.deferred_init = None
            if self.average:
                self.average.load_state(trainable_state(run.model))
        lr = learning_rate_at(step, run.training)
        train_step(run, self.runner, optimizer, micro_batches, step, lr, self.recurrent_state, self.guard, counts)
        state.step, state.tokens, state.data_hash = step + 1, state.tokens + counts["tokens"], data_hash
        self.is_last = state.step == run.training.max_steps
        if self.average:
            self.average.update(step, run.training, self.guard.last_skipped)

    def record(self, step: int, counts: Mapping[str, int]) -> None:
        """Note what the log needs of a step; the copy of its loss to the host is started."""
        run, state = self.run, self.state
        weights = measure_weights(self.optimizer) if state.step % WEIGHT_RMS_STEPS == 0 or self.is_last else {}
        names = self.runner.metric_names
        values = [self.guard.last_outcome, *([self.runner.metrics] if names else []), *weights.values()]
        self.pending.append(
            StepRecord(
                state.step,
                state.tokens,
                counts["targets"],
                learning_rate_at(step, run.training),
                state.data_hash,
                read_async(torch.cat(values) if len(values) > 1 else values[0]),
                names,
                list(weights),
                is_logged=state.step % run.training.logging_steps == 0 or self.is_last,
                text_progress=run.text_progress(state.step) if run.text_progress else None,
                mask_rate=run.mask_rate(step) if run.mask_rate else None,
            )
        )

    def log_pending(self, keep: int = 0) -> None:
        """Log the pending steps except the newest `keep`, whose losses the device may still be computing."""
        run, state = self.run, self.state
        while len(self.pending) > keep:
            record = self.pending.pop(0)
            outcome, metrics, weights = record.read()
            if not outcome.was_skipped:
                self.loss, self.metrics = outcome.loss, metrics
            state.bad_steps = state.bad_steps + 1 if outcome.was_skipped and not outcome.is_fp16_overflow else 0
            if record.is_logged or outcome.was_skipped:
                entry = record.log_entry(outcome, metrics, weights)
                self.log.write(**entry)
                self.line.show(progress_line(run, record, self.loss, self.metrics, self.speed, self.writer.last_saved))
                if run.doctor is not None:
                    run.doctor.observe(entry)
            self.speed.end_warmup(record.step, record.tokens)
            if state.bad_steps:
                warn(f"step {record.step} is skipped: {outcome.skip_reason}")
            if state.bad_steps >= run.training.max_bad_steps:
                self.writer.wait()
                last_saved = self.writer.last_saved
                message = diagnose_divergence(
                    run, self.runner, record.step, state.bad_steps, outcome, self.recurrent_state, last_saved
                )
                raise Diverged(self.dist_context.broadcast(message), record.step)

    def evaluate(self, evaluate: Callable[[Model], dict[str, float]]) -> None:
        """Evaluate the model, or its averaged weights; early stopping may make this step the last."""
        run, state = self.run, self.state
        self.log_pending()
        with self.average.average_parameters() if self.average else nullcontext():
            with self.stop.computing(is_evaluating=True):
                scores = evaluate(run.model)
            self.scores = self.dist_context.broadcast(scores)
            update_best(run, state, self.scores, run.model)
        self.log.write(step=state.step, **self.scores)
        if run.doctor is not None:
            run.doctor.observe({"step": state.step, **self.scores})
        self.is_last = self.is_last or state.step == final_step(run, state)
        run.model.train()

    def save_or_stop(self) -> None:
        """Save a checkpoint where it is time, stop where a signal asks for it, and plan a run with `minutes` again."""
        run, state, training, dist_context = self.run, self.state, self.run.training, self.dist_context
        # One process may have received a signal that the others have not: the maximum stops all after this step.
        signal_number = dist_context.all_reduce_max(self.stop.signal_number)
        new_max_steps = None if self.is_last or signal_number else propose_steps(run, state.step)
        saves_last, saves = run.save_last or self.best_is_earlier, state.step % training.save_steps == 0
        if signal_number or new_max_steps or (saves_last if self.is_last else saves):
            self.save()
            if not signal_number:
                with self.stop.computing():
                    self.samples.write(state.step, run.model)
        if signal_number:
            self.stop.signal_number = signal_number
            self.line.close()
            self.writer.wait()
            saved = self.writer.last_saved
            note = "" if saved == f"checkpoint-{state.step}" else f", last checkpoint: {saved or 'none'}"
            raise Interrupted(dist_context.broadcast(f"stopped at step {state.step} of {training.max_steps}{note}"))
        if new_max_steps and run.replan is not None:
            self.writer.wait()  # the checkpoint comes before the plan: a resumed run repeats no step with another plan
            run.training = run.replan.adopt(state.step, training, new_max_steps)
            self.writer.recipe = to_dict(run.training)
            if run.doctor is not None:
                run.doctor.training = run.training

    @property
    def best_is_earlier(self) -> bool:
        """Whether an earlier evaluation was better than that of this step."""
        return self.state.best_step not in (0, self.state.step)

    def save(self, own: DistContext | None = None) -> None:
        """Save a checkpoint. With `own=SINGLE_PROCESS` no other process takes part."""
        own, state, average = own or self.dist_context, self.state, self.average
        self.log_pending()
        state.halvings, state.num_averaged = self.run.halvings, average.count if average else 0
        if self.run.folder and own.broadcast(self.log.flush()):  # a checkpoint is never ahead of the log
            rows = own.gather_rows(self.recurrent_state)
            averages = average.averages if average and average.count else {}
            payload = collect_payload(self.run.model, self.optimizer, rows, averages, self.guard.state_dict())
            self.writer.save(payload, state, before_write=self.log.fsync)

    def save_before_exit(self, is_evaluating: bool) -> bool:
        """Save during a long step, from another thread, while weights and optimizer do not change; whether to exit now.

        A checkpoint before an unfinished evaluation would lose it, so none is written then. Other processes cannot take
        part: they compute, or wait in a collective. Rank 0 saves alone with DDP, unless the ranks carry state of their
        rows. Where a save needs all ranks, the run stops after the step, if there are steps to save.
        """
        step, dist_context = self.state.step, self.dist_context
        saves_alone = dist_context.world_size == 1 or not (dist_context.is_sharded or self.recurrent_state)
        if step and not saves_alone:
            return False
        self.line.close()
        if step and not is_evaluating and dist_context.is_main_process:
            with torch.no_grad():
                self.save(SINGLE_PROCESS)
        if saves_alone:
            self.writer.wait()
        say(
            f"stopped during step {step + 1} of {self.run.training.max_steps}, last checkpoint: "
            f"{self.writer.last_saved or 'none'}; resume with the same command and --resume."
        )
        return True

    def finish(self) -> FitResult:
        """Give the model its averaged or best weights, and return the results."""
        run, state, model = self.run, self.state, self.run.model
        if self.average:
            self.average.apply()
        seconds, was_finished = (
            time.monotonic() - self.speed.start.timestamp,
            self.speed.start.step == final_step(run, state),
        )
        tokens_per_second, _ = self.speed.measure(state.step, state.tokens)
        needs_scores = self.best_is_earlier or was_finished
        if self.best_is_earlier:
            assert run.folder is not None
            if load_best(run.folder, model, state.best_step):
                say(f"loaded the weights of step {state.best_step:,}, which had the best evaluation")
            else:
                state.best_step = state.step
        if was_finished and run.folder:  # resumed after the last step: no step ran, so the loss comes from the log
            self.loss, self.metrics = read_last_losses(run.folder / "log.jsonl")
        if run.evaluate and needs_scores:
            self.scores = self.dist_context.broadcast(run.evaluate(model))
        best_step = state.best_step or state.step
        return FitResult(
            state.step, state.tokens, self.loss, self.metrics, self.scores, tokens_per_second, seconds, best_step
        )


def find_resume_checkpoint(run: TrainingRun) -> Path | None:
    """Return the checkpoint to resume from, or None. The main process decides for all."""
    folder = run.folder
    if folder is None:
        return None
    name = run.compute.dist_context.run_on_main(lambda: getattr(last_checkpoint(folder), "name", None))
    return None if name is None else folder / name


def make_checkpoint_writer(run: TrainingRun) -> CheckpointWriter:
    """Make the writer: with FSDP every process writes its shard, otherwise the main process writes everything."""
    training, dist_context = run.training, run.compute.dist_context
    args = to_dict(training), training.save_total_limit, run.model, training.async_save
    if dist_context.is_sharded:
        from firth.train.fsdp import ShardedCheckpointWriter  # imported here: it takes a second to load

        return ShardedCheckpointWriter(dist_context, run.folder, *args)
    return CheckpointWriter(run.folder if dist_context.is_main_process else None, *args)


def make_log(run: TrainingRun, step: int) -> RunLog | NullLog:
    if run.folder is None or not run.compute.dist_context.is_main_process:
        return NullLog()
    return RunLog(run.folder / "log.jsonl", step, describe_tracked_run(run.training, run.folder))


def make_timings(run: TrainingRun, step: int) -> StepTimings:
    """Make the timings of a run; they are written by the main process alone, and where the doctor reads them."""
    has_file = run.doctor is not None and run.doctor.reads_timings and run.compute.dist_context.is_main_process
    return StepTimings(run.folder / TIMINGS_FILE if has_file and run.folder else None, step, run.compute)


def make_samples(run: TrainingRun, step: int) -> CheckpointSamples | NoSamples:
    """Make the samples of a run: the main process alone takes them, while the others wait for its next step."""
    if run.folder is None or run.samples is None or not run.compute.dist_context.is_main_process:
        return NoSamples()
    return CheckpointSamples(run.folder / SAMPLES_FILE, step, run.samples, run.compute)


def measure_weights(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the root mean square of the matrices that Muon trains, on the device; empty with other optimizers."""
    matrices = [p for group in optimizer.param_groups if group.get("muon") for p in group["params"]]
    if not matrices:
        return {}
    norm = find_shard_group(matrices[0]).norms([to_local(p) for p in matrices]).norm()
    return {"weight_rms": (norm / math.sqrt(sum(p.numel() for p in matrices))).reshape(1)}


def final_step(run: TrainingRun, state: TrainState) -> int:
    """Return the step that ends the run: `max_steps`, or the current step when early stopping's patience is used up."""
    return state.step if run.patience and state.evals_since_best >= run.patience else run.training.max_steps


def propose_steps(run: TrainingRun, step: int) -> int | None:
    """Return the new number of steps where a run with `minutes` is planned again. The main process decides for all."""
    if run.replan is None or not run.replan.is_due(step, run.training.max_steps):
        return None
    return run.compute.dist_context.broadcast(run.replan.propose(step, run.training))


def update_best(run: TrainingRun, state: TrainState, scores: Mapping[str, float], model: Model) -> None:
    """Record the evaluation if it is the best so far, and save its weights. On a tie the earlier one stays the best.

    An evaluation whose weights cannot be written does not count as the best. In its first pass over the text a model
    learns nothing by heart: no weights are saved then.
    """
    if run.score_fn is None or (run.text_progress is not None and run.text_progress(state.step).passes < 1):
        return
    assert run.folder is not None, "a run with score_fn needs a folder for its best weights"
    value = run.score_fn(scores)
    margin = run.best_margin if state.step == run.training.max_steps else 0.0
    if state.best_step and not value > state.best_score - margin:  # NaN is never better
        state.evals_since_best += 1
        return
    state.evals_since_best = 0
    folder, dist_context = run.folder, run.compute.dist_context
    if state.step < run.training.max_steps:
        tensors = dist_context.gather_tensors(trainable_state(model))
        if not dist_context.run_on_main(lambda: try_save_best(folder, tensors, state)):
            return
    state.best_score, state.best_step = -math.inf if math.isnan(value) else value, state.step


def try_save_best(folder: Path, tensors: dict[str, torch.Tensor], state: TrainState) -> bool:
    """Save the best weights and return True; on a disk error warn and return False, and the previous best stays."""
    try:
        save_best(folder, tensors, state.step)
    except OSError as e:
        previous = f"step {state.best_step} stays the best" if state.best_step else "none are saved yet"
        warn(f"the best weights could not be saved ({e.strerror or e}): {previous}. Training continues.")
        return False
    return True


def progress_line(
    run: TrainingRun,
    record: StepRecord,
    loss: float,
    metrics: Mapping[str, float],
    speed: SpeedMeter,
    last_saved: str | None,
) -> str:
    tokens_per_second, step_seconds = speed.measure(record.step, record.tokens)
    time_left = format_time_left(step_seconds * (run.training.max_steps - record.step))
    pace = f"{tokens_per_second:,.0f} tokens/s  {time_left}"
    if run.compute.compile and not speed.is_warmed_up:
        pace = "compiling"
    position = f"{run.name}: step {record.step:,}/{run.training.max_steps:,}"
    if record.text_progress:
        words, passes = record.text_progress
        pace += f"  {words:,} words seen, {format_passes(passes)}"
    parts = ", ".join(f"{name.removesuffix('_loss').replace('_', ' ')} {x:.3f}" for name, x in metrics.items())
    losses = f"loss {loss:.3f}" + (f" ({parts})" if parts else "")
    saved = f"  saved {last_saved}" if last_saved else ""
    finding = f"  doctor: {run.doctor.last_title}" if run.doctor is not None and run.doctor.last_title else ""
    return f"{position}  {losses}{finding}  rate {record.learning_rate:.1e}  {pace}{saved}"
