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
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from firth.core.console import StatusLine, format_passes, format_time_left, say, warn
from firth.core.errors import Interrupted, UserError
from firth.core.serialization import to_dict
from firth.models import Model
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
from firth.train.stop_signals import PEER_GRACE_SECONDS, STOP_GRACE_SECONDS, handle_stop_signals
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
    training, model, dist_context = run.training, run.model, run.compute.dist_context
    checkpoint = find_resume_checkpoint(run) if resume else None
    if checkpoint is not None:
        load_model_weights(checkpoint, model)
    else:
        dist_context.broadcast_weights(model)
    writer, guard = make_checkpoint_writer(run), Guard(training, run.compute)
    writer.on_saved = run.on_checkpoint if dist_context.is_main_process else None
    dist_context.prepare_model(model, training, run.compute)
    optimizer = make_optimizer(model, training, run.freeze_schedule)
    state, recurrent_state = TrainState(), RecurrentStateDict()
    average = make_weight_average(trainable_state(model), training) if training.averages_weights else None
    if checkpoint is not None:
        state, writer.last_saved = load_optimizer(checkpoint, model, optimizer), checkpoint.name
        recurrent_state = dist_context.select_local_rows(load_recurrent_state(checkpoint, run.compute.device))
        run.halvings = state.halvings
        guard.load_state_dict(load_guard_state(checkpoint, run.compute.device))
        if average and state.num_averaged:
            average.load_state(load_average(checkpoint), state.num_averaged)
        say(f"resuming from {checkpoint}")
        if dist_context.is_main_process and run.folder and checkpoint == list_checkpoints(run.folder)[0]:
            prune_checkpoints(run.folder, state, training.save_total_limit)  # a kill came before it
    runner = run.runner or build_step_runner(run)
    line, scores, speed = StatusLine(), {}, SpeedMeter(state.step, state.tokens)
    loss, metrics = math.nan, dict[str, float]()
    pending: list[StepRecord] = []

    def log_pending(keep: int = 0) -> None:
        """Log the pending steps except the newest `keep`, whose losses the device may still be computing."""
        nonlocal loss, metrics
        while len(pending) > keep:
            record = pending.pop(0)
            outcome, new_metrics, weights = record.read()
            if not outcome.was_skipped:
                loss, metrics = outcome.loss, new_metrics
            state.bad_steps = state.bad_steps + 1 if outcome.was_skipped and not outcome.is_fp16_overflow else 0
            if record.is_logged or outcome.was_skipped:
                entry = record.log_entry(outcome, new_metrics, weights)
                log.write(**entry)
                line.show(progress_line(run, record, loss, metrics, speed, writer.last_saved))
                if run.doctor is not None:
                    run.doctor.observe(entry)
            speed.end_warmup(record.step, record.tokens)
            if state.bad_steps:
                warn(f"step {record.step} is skipped: {outcome.skip_reason}")
            if state.bad_steps >= training.max_bad_steps:
                writer.wait()
                message = diagnose_divergence(
                    run, runner, record.step, state.bad_steps, outcome, recurrent_state, writer.last_saved
                )
                raise Diverged(dist_context.broadcast(message), record.step)

    def save(own: DistContext = dist_context) -> None:
        """Save a checkpoint. With `own=SINGLE_PROCESS` no other process takes part."""
        log_pending()
        state.halvings, state.num_averaged = run.halvings, average.count if average else 0
        if run.folder and own.broadcast(log.flush()):  # a checkpoint is never ahead of the log
            rows = own.gather_rows(recurrent_state)
            averages = average.averages if average and average.count else {}
            writer.save(
                collect_payload(model, optimizer, rows, averages, guard.state_dict()), state, before_write=log.fsync
            )

    def save_before_exit(is_evaluating: bool) -> bool:
        """Save during a long step, from another thread, while weights and optimizer do not change; whether to exit now.

        A checkpoint before an unfinished evaluation would lose it, so none is written then. Other processes cannot take
        part: they compute, or wait in a collective. Rank 0 saves alone with DDP, unless the ranks carry state of their
        rows. Where a save needs all ranks, the run stops after the step, if there are steps to save.
        """
        saves_alone = dist_context.world_size == 1 or not (dist_context.is_sharded or recurrent_state)
        if state.step and not saves_alone:
            return False
        line.close()
        if state.step and not is_evaluating and dist_context.is_main_process:
            with torch.no_grad():
                save(SINGLE_PROCESS)
        if saves_alone:
            writer.wait()
        say(
            f"stopped during step {state.step + 1} of {training.max_steps}, last checkpoint: "
            f"{writer.last_saved or 'none'}; resume with the same command and --resume."
        )
        return True

    grace = STOP_GRACE_SECONDS + (0.0 if dist_context.is_main_process else PEER_GRACE_SECONDS)
    with (
        make_log(run, state.step) as log,
        handle_stop_signals(dist_context.world_size == 1, save_before_exit, grace) as stop,
        make_timings(run, state.step) as timings,
        make_samples(run, state.step) as samples,
        writer,
    ):
        run.computing = stop.computing
        if run.doctor is not None:
            run.doctor.timings = timings.totals
            if state.step and run.folder:
                run.doctor.lines = [*read_log(run.folder / "log.jsonl")]
            if run.doctor.file is not None:  # of steps that a resumed run repeats, perhaps
                run.doctor.file.unlink(missing_ok=True)
        for step, micro_batches, counts, data in prefetch_batches(
            run.batch_fn,
            state.step,
            lambda: final_step(run, state),
            state.data_hash,
            dist_context,
            partial(timings.waiting, stop.computing),
        ):
            # one training step
            lr = learning_rate_at(step, training)
            add_unfrozen_groups(optimizer, model, training, run.freeze_schedule, step)
            if run.deferred_init is not None:
                compile_ahead(run, runner, optimizer, micro_batches, step)
                run.deferred_init()
                run.deferred_init = None
                if average:
                    average.load_state(trainable_state(model))
            train_step(run, runner, optimizer, micro_batches, step, lr, recurrent_state, guard, counts)
            state.step, state.tokens, state.data_hash = step + 1, state.tokens + counts["tokens"], data
            if average:
                average.update(step, training, guard.last_skipped)

            # every few steps: log, evaluate, save
            last = state.step == training.max_steps
            logs = state.step % training.logging_steps == 0 or last
            saves = state.step % training.save_steps == 0
            weights = measure_weights(optimizer) if state.step % WEIGHT_RMS_STEPS == 0 or last else {}
            values = [guard.last_outcome, *([runner.metrics] if runner.metric_names else []), *weights.values()]
            text = run.text_progress(state.step) if run.text_progress else None
            mask_rate = run.mask_rate(step) if run.mask_rate else None
            record = StepRecord(
                state.step,
                state.tokens,
                counts["targets"],
                lr,
                data,
                read_async(torch.cat(values) if len(values) > 1 else values[0]),
                runner.metric_names,
                list(weights),
                logs,
                text,
                mask_rate,
            )
            pending.append(record)
            log_pending(keep=1 if defers_loss_reads(run.compute) else 0)
            timings.end_step(state.step, counts["tokens"])
            writer.poll()
            if run.evaluate and (state.step % training.eval_steps == 0 or last):
                log_pending()
                with average.average_parameters() if average else nullcontext():
                    with stop.computing(is_evaluating=True):
                        scores = run.evaluate(model)
                    scores = dist_context.broadcast(scores)
                    update_best(run, state, scores, model)
                log.write(step=state.step, **scores)
                if run.doctor is not None:
                    run.doctor.observe({"step": state.step, **scores})
                last = last or state.step == final_step(run, state)
                model.train()
            for every, hook in run.hooks:
                if state.step % every == 0:
                    hook(state.step, model)
            # One process may have received a signal that the others have not: the maximum stops all after this step.
            signal_number = dist_context.all_reduce_max(stop.signal_number)
            best_is_earlier = state.best_step not in (0, state.step)
            new_max_steps = None if last or signal_number else propose_steps(run, state.step)
            if signal_number or new_max_steps or (run.save_last or best_is_earlier if last else saves):
                save()
                if not signal_number:
                    with stop.computing():
                        samples.write(state.step, model)
            if signal_number:
                stop.signal_number = signal_number
                line.close()
                writer.wait()
                saved = writer.last_saved
                note = "" if saved == f"checkpoint-{state.step}" else f", last checkpoint: {saved or 'none'}"
                raise Interrupted(dist_context.broadcast(f"stopped at step {state.step} of {training.max_steps}{note}"))
            if new_max_steps and run.replan is not None:
                writer.wait()  # the checkpoint comes before the plan: a resumed run repeats no step with another plan
                run.training = training = run.replan.adopt(state.step, training, new_max_steps)
                writer.recipe = to_dict(training)
                if run.doctor is not None:
                    run.doctor.training = training
            if last:  # early stopping may end the run before `max_steps`
                log_pending()
                break
    line.close()
    if average:
        average.apply()
    seconds, was_finished = time.monotonic() - speed.start.timestamp, speed.start.step == final_step(run, state)
    tokens_per_second, _ = speed.measure(state.step, state.tokens)
    best_is_earlier = state.best_step not in (0, state.step)
    if best_is_earlier:
        assert run.folder is not None
        if load_best(run.folder, model, state.best_step):
            say(f"loaded the weights of step {state.best_step:,}, which had the best evaluation")
        else:
            state.best_step = state.step
    if was_finished and run.folder:  # resumed after the last step: no step ran, so the loss comes from the log
        loss, metrics = read_last_losses(run.folder / "log.jsonl")
    if run.evaluate and (best_is_earlier or was_finished):
        scores = dist_context.broadcast(run.evaluate(model))
    best_step = state.best_step or state.step
    return FitResult(state.step, state.tokens, loss, metrics, scores, tokens_per_second, seconds, best_step)


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

    An evaluation whose weights cannot be written does not count as the best.
    """
    if run.score_fn is None:
        return
    assert run.folder is not None, "a run with score_fn needs a folder for its best weights"
    value = run.score_fn(scores)
    if state.best_step and not value > state.best_score:  # NaN is never better
        state.evals_since_best += 1
        return
    state.evals_since_best = 0
    folder, dist_context = run.folder, run.compute.dist_context
    if state.step < run.training.max_steps and not dist_context.run_on_main(
        lambda: try_save_best(folder, model, state)
    ):
        return
    state.best_score, state.best_step = -math.inf if math.isnan(value) else value, state.step


def try_save_best(folder: Path, model: Model, state: TrainState) -> bool:
    """Save the best weights and return True; on a disk error warn and return False, and the previous best stays."""
    try:
        save_best(folder, model, state.step)
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
