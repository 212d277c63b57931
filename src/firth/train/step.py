"""One training step: forward and backward over micro-batches, clipping, one optimizer update.

The gradient of a step must not depend on how its rows are split. A mean of micro-batch means would depend on it: a
micro-batch with few targets would weigh as much as one with many. So each loss is a *sum*, and a micro-batch divides it
by the count of the whole step, over all micro-batches and processes (`all_reduce_counts`). Any split then adds up to
the same gradient (with other dropout masks), which makes three things safe:

- gradient accumulation: `gradient_accumulation_steps` micro-batches per update;
- data parallelism: each process computes its rows, and gradients are summed once per step;
- out of memory: micro-batches are halved and the step is computed again (`halve_micro_batches`).

Dropout is seeded from (seed, step, micro-batch), never from earlier draws, so that a resumed run repeats it exactly.
`train/step_runner.py` executes a micro-batch: compiled, as a CUDA graph, or on a bf16 copy of the weights.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch

from firth.core.console import say, warn
from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.models import Model, Stack
from firth.models.attention import Attention
from firth.models.block import MLP
from firth.models.bottleneck import BottleneckAttention
from firth.models.fp8.convert import convert_to_fp8
from firth.models.fp8.weight_cache import cache_fp8_weights
from firth.models.heads import LMHeadModule
from firth.models.kernels.tiling import mark_compile_constants
from firth.models.regional_compile import compile_regions, reset_compiled_regions
from firth.objectives import Batch
from firth.train.adamw import AdamW
from firth.train.bf16_replica import BF16Replica
from firth.train.compute import ComputeConfig
from firth.train.cuda_graphs import CudaGraphStep
from firth.train.distributed import DistContext
from firth.train.dtensor import to_full_tensor, to_local
from firth.train.guard import Guard
from firth.train.live_doctor import LiveDoctor
from firth.train.log import TextProgress
from firth.train.recipe import FreezeSchedule, TrainingConfig
from firth.train.replan import Replan
from firth.train.samples import SampleFn
from firth.train.step_runner import LossFn, StepRunner
from firth.train.weight_decay import cautious_decay, schedule_weight_decay, weight_decay_factor_at

RECOMPILE_LIMIT = 64  # batch shapes that torch.compile may specialise on
RECOMPUTE_MIN_PARAMETERS = 500_000_000  # model size from which activations are recomputed by default

_compiled_with_recompute = False  # recompute setting of the code that was compiled last

RecurrentStateDict = dict[str, torch.Tensor]  # state per row of the batch, by name


@dataclass
class TrainingRun:
    """Everything the training loop needs: a model, the micro-batches of any step, an evaluation."""

    training: TrainingConfig
    compute: ComputeConfig
    model: Model
    batch_fn: Callable[[int], Sequence[Batch]]  # step -> micro-batches, a pure function
    evaluate: Callable[[Model], dict[str, float]] | None = None
    folder: Path | None = None  # None writes nothing (a trial run)
    name: str = "training"
    hooks: list[tuple[int, Callable[[int, Model], None]]] = field(default_factory=list)  # (every_n_steps, function)
    loss_fn: LossFn | None = None  # default: model.losses; distillation has its own
    before_step: Callable[[int], None] | None = None  # called with the step, for a loss that changes with it
    layer_rate: Callable[[int, int], float] | None = None  # (step, depth) -> factor of the learning rate of a layer
    freeze_schedule: FreezeSchedule = field(default_factory=FreezeSchedule)  # which parameters are trained, from when
    # Metrics -> a score to maximise; the best checkpoint is kept.
    score_fn: Callable[[Mapping[str, float]], float] | None = None
    best_margin: float = 0.0  # by which an earlier evaluation must be better than the last one
    halvings: int = 0  # how often micro-batches were halved after running out of memory
    patience: int = 0  # early stopping: evaluations without improvement; 0 turns it off
    save_last: bool = True  # save a checkpoint after the last step, so that a longer run can resume
    # Entered while gradients are computed: weights do not change then, so that a signal may end the process.
    computing: Callable[[], AbstractContextManager[None]] = nullcontext
    deferred_init: Callable[[], None] | None = None  # initialises the weights; the first step is compiled meanwhile
    text_progress: Callable[[int], TextProgress] | None = None  # number of steps -> text that they read
    mask_rate: Callable[[int], float | None] | None = None  # step -> mask rate, where it changes
    runner: StepRunner | None = None  # of an earlier run with this model, to share its compiled step
    doctor: LiveDoctor | None = None  # judges the log while it is written
    samples: SampleFn | None = None  # completes held-out sentences at each checkpoint
    on_checkpoint: Callable[[Path], None] | None = None  # called with each new checkpoint, in the main process
    replan: Replan | None = None  # plans the steps of a run with `minutes` again, while it runs


def build_step_runner(run: TrainingRun) -> StepRunner:
    """Configure the model's kernels, precision and checkpointing, and choose how micro-batches are executed."""
    apply_flags(run.model, run.training)
    for module in run.model.modules():
        if isinstance(module, Stack):
            module.activation_checkpointing = run.training.gradient_checkpointing
    if run.training.fp8:
        convert_to_fp8(run.model, run.compute.device)

    def compile_loss_fn(losses: LossFn) -> LossFn:
        if not run.compute.compile:
            return losses
        mark_compile_constants()
        reset_compiled_if_changed(should_recompute(run.model, run.training))
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        if run.compute.compile_regions:  # `compute_gradients` compiles them
            return losses
        return torch.compile(losses, dynamic=False, mode="reduce-overhead" if run.compute.cuda_graphs else None)

    if run.training.engine.weights == "bf16":
        assert run.loss_fn is None, "the recipe check refuses bf16 weights with another loss"
        return BF16Replica(run.model, compile_loss_fn, run.compute)
    losses = compile_loss_fn(run.loss_fn or partial(run.model.losses, with_metrics=True))
    captures = run.compute.cuda_graphs and (run.compute.compile_regions or not run.compute.compile)
    return (CudaGraphStep if captures else StepRunner)(run.model, losses, run.compute)


def apply_flags(model: Model, training: TrainingConfig) -> None:
    """Set the recipe's engine switches on the modules of a model."""
    recompute = should_recompute(model, training)
    for module in model.modules():
        if isinstance(module, Attention | BottleneckAttention):
            module.allow_fused = training.engine.fused_attention
        if isinstance(module, MLP):
            module.recompute = recompute
        if isinstance(module, Stack):
            module.residual_dtype = torch.bfloat16 if training.engine.residual == "bf16" else torch.float32
            module.last_layer_targets_only = training.engine.last_layer == "targets"
        if isinstance(module, LMHeadModule):
            module.use_fused_loss, module.pad_vocab = training.engine.fused_loss, training.engine.pad_vocabulary


def train_step(
    run: TrainingRun,
    runner: StepRunner,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    step: int,
    learning_rate: float,
    recurrent_state: RecurrentStateDict | None = None,
    guard: Guard | None = None,
    counts: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Run forward and backward over the micro-batches, then one update; return the loss (`runner.metrics`: the rest).

    `counts` are the targets of the step over all processes. `recurrent_state` holds the state that the last step left
    and receives the state for the next one. A step that `guard` rejects changes neither weights nor optimizer.
    """
    loss_scale = guard.loss_scale if guard else None
    keep_in_replica = isinstance(optimizer, AdamW) and run.compute.dist_context.world_size == 1
    with run.computing():
        total, states = compute_gradients(
            run, runner, micro_batches, step, recurrent_state or {}, loss_scale, counts, keep_in_replica
        )
    norm = clip_gradients(run, runner, optimizer)
    skip = guard.should_skip(total, norm, step) if guard else None  # a tensor, 1.0 or 0.0: the host does not wait
    if recurrent_state is not None:
        update_recurrent_state(recurrent_state, concat_states(states), skip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("scale", 1.0)
        if run.layer_rate is not None:
            group["lr"] *= run.layer_rate(step, group["depth"])
    schedule_weight_decay(optimizer, weight_decay_factor_at(step, run.training, learning_rate))
    if skip is not None:
        skip = skip.to(next(run.model.parameters()).device)  # with CPU offload the parameters are on the host
    updates_replica = isinstance(optimizer, AdamW) and bool(optimizer.replicas)  # it writes the bf16 weights too
    optimizer.found_inf = skip  # type: ignore[attr-defined]  # torch's name: fused optimizers skip the update
    is_cautious = run.training.cautious_weight_decay
    try:
        with cautious_decay(optimizer) if is_cautious else nullcontext():
            optimizer.step()
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        raise UserError(
            "Out of memory for the optimizer state. --optim adafactor needs little, --parallel fsdp --cpu-offload "
            "keeps it in host memory, and a smaller model has less."
        ) from e
    runner.end_step(updates_replica and not is_cautious)
    optimizer.zero_grad(set_to_none=runner.frees_gradients)
    return total


def compile_ahead(
    run: TrainingRun, runner: StepRunner, optimizer: torch.optim.Optimizer, micro_batches: Sequence[Batch], step: int
) -> None:
    """Compile the step by running it once and dropping the gradients.

    Garbage collection is off meanwhile: the compiler creates many objects and leaves little to collect.
    """
    say("compiling the step; the next run takes it from the cache")
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        with run.computing():
            compute_gradients(run, runner, micro_batches[:1], step, RecurrentStateDict())
    finally:
        if gc_was_enabled:
            gc.enable()
    optimizer.zero_grad(set_to_none=runner.frees_gradients)


def compute_gradients(
    run: TrainingRun,
    runner: StepRunner,
    micro_batches: Sequence[Batch],
    step: int,
    recurrent_state: RecurrentStateDict,
    loss_scale: torch.Tensor | None = None,
    counts: Mapping[str, int] | None = None,
    keep_in_replica: bool = False,
) -> tuple[torch.Tensor, list[RecurrentStateDict]]:
    """Compute the loss and gradients of a step; return the loss and the recurrent state of each micro-batch.

    After an out-of-memory error the step is computed again in smaller micro-batches. `keep_in_replica` lets gradients
    stay in a bf16 replica if the optimizer can read them there.
    """
    dist, result = run.compute.dist_context, None
    if run.before_step is not None:
        run.before_step(step)
    counts = counts or all_reduce_counts(micro_batches, dist)
    if not run.model.training:  # train() visits every module, which takes a while
        run.model.train()
    runner.begin_step()
    while result is None:
        try:
            # around backward too: activation checkpointing runs a block's compiled code again
            with (
                compile_regions() if run.compute.compile_regions else nullcontext(),
                recompute_in_backward(run),
                cache_fp8_weights(runner.compute_model) if run.training.fp8 else nullcontext(),
            ):
                result = run_micro_batches(
                    run,
                    runner,
                    split_micro_batches(micro_batches, run.halvings),
                    counts,
                    step,
                    recurrent_state,
                    loss_scale,
                    keep_in_replica,
                )
        except RuntimeError as e:
            if type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
                reason = " ".join(str(e).split("\n")[:2])
                raise UserError(f"The step cannot be compiled here: {reason}. Pass --no-compile.") from e
            if not is_out_of_memory(e):
                raise
        # outside of `except`: the exception holds references to the tensors of the failed attempt
        if dist.any_out_of_memory(result is None):
            result = None
            if not runner.release_memory():
                halve_micro_batches(run, micro_batches)
            free_gradients(run, runner)
    dist.all_reduce_gradients(run.model)
    dist.all_reduce_tensors([result[0], *([runner.metrics] if runner.metric_names else [])])
    return result


def should_recompute(model: Model, training: TrainingConfig) -> bool:
    recompute = training.engine.recompute
    return model.num_parameters >= RECOMPUTE_MIN_PARAMETERS if recompute is None else recompute


def reset_compiled_if_changed(recompute: bool) -> None:
    """Drop code that an earlier run of this process compiled with another recompute setting."""
    global _compiled_with_recompute
    if recompute != _compiled_with_recompute:
        reset_compiled_regions()
    _compiled_with_recompute = recompute


@contextmanager
def recompute_in_backward(run: TrainingRun) -> Iterator[None]:
    """Let code compiled inside recompute activations; by default torch stores every matmul input."""
    if not (run.compute.compile and should_recompute(run.model, run.training)):
        yield
        return
    from torch._functorch import config  # imported late: few commands need the compiler

    with config.patch(ban_recompute_materialized_backward=False):
        yield


def run_micro_batches(
    run: TrainingRun,
    runner: StepRunner,
    micro_batches: Sequence[Batch],
    counts: Mapping[str, int],
    step: int,
    recurrent_state: RecurrentStateDict,
    loss_scale: torch.Tensor | None,
    keep_in_replica: bool,
) -> tuple[torch.Tensor, list[RecurrentStateDict]]:
    """Sum loss and gradients over the micro-batches; scale an fp16 loss for backward and unscale its gradients."""
    total = torch.zeros((), device=run.compute.device)
    runner.reset_metrics()
    states: list[RecurrentStateDict] = []
    for i, batch in enumerate(micro_batches):
        torch.manual_seed(dropout_seed(run.training.seed, step, run.compute.dist_context.rank * len(micro_batches) + i))
        first_row = sum(map(num_rows, micro_batches[:i]))
        state = with_recurrent_state(run.model, batch, recurrent_state, first_row, states)
        total += runner.forward_backward(batch, counts, loss_scale, state)
        runner.end_micro_batch(i, len(micro_batches), keep_in_replica)
    if loss_scale is not None:
        gradients = [to_local(p.grad) for p in run.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, (1 / loss_scale).to(gradients[0].device))  # on the host with CPU offload
    return total, states


def clip_gradients(run: TrainingRun, runner: StepRunner, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Clip the gradient norm and return it; the fused AdamW clips gradients that it reads from a replica."""
    replica_gradients, max_norm = runner.pending_gradients(), run.training.max_grad_norm
    if replica_gradients and isinstance(optimizer, AdamW):
        gradients = [copy.grad for copy in replica_gradients.values() if copy.grad is not None]
        norms = torch._foreach_norm(gradients, 2, torch.float32)
        norm = torch.stack(norms).norm()
        optimizer.use_replica_gradients(
            replica_gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        )
        return norm
    if max_norm:
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters() if p.grad is not None])
    return to_full_tensor(norm).to(run.compute.device)


def update_recurrent_state(
    recurrent_state: RecurrentStateDict, new_state: RecurrentStateDict, found_inf: torch.Tensor | None
) -> None:
    """Replace the recurrent state by that of this step, or keep the old one after a skipped step.

    Copies always: a replayed CUDA graph overwrites its outputs.
    """
    if found_inf is None:
        new_state = {name: value.clone() for name, value in new_state.items()}
    else:
        for name, value in new_state.items():
            before = recurrent_state.get(name, value)
            before = before if name in recurrent_state and before.shape == value.shape else torch.zeros_like(value)
            new_state[name] = torch.where(found_inf > 0, before, value)
    recurrent_state.clear()
    recurrent_state.update(new_state)


# --- out of memory ----------------------------------------------------------------------------------------------------


def is_out_of_memory(e: RuntimeError) -> bool:
    return isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in str(e)


def split_micro_batches(micro_batches: Sequence[Batch], halvings: int) -> list[Batch]:
    """Split each micro-batch in 2**halvings parts."""
    if not halvings:
        return list(micro_batches)
    parts = []
    for batch in micro_batches:
        size = -(-num_rows(batch) // 2**halvings)
        for first in range(0, num_rows(batch), size):
            parts.append(batch.map_arrays(itemgetter(slice(first, first + size))))
    return parts


def halve_micro_batches(run: TrainingRun, micro_batches: Sequence[Batch]) -> None:
    """Halve the micro-batches from here on; the rows of a step, and without dropout its gradient, stay the same."""
    rows = max(map(num_rows, split_micro_batches(micro_batches, run.halvings)))
    if rows == 1 or any(batch.group_ids is not None for batch in micro_batches):
        why = "one row per micro-batch" if rows == 1 else "texts that are contrasted with each other and stay together"
        raise UserError(
            f"Out of memory with {why}. Shorten --max-seq-length, pass --gradient-checkpointing, or lower "
            "--per-device-train-batch-size."
        )
    run.halvings += 1
    rows = max(map(num_rows, split_micro_batches(micro_batches, run.halvings)))
    warn(f"out of memory: micro-batches have {rows} rows from here on; the global batch stays the same.")


def free_gradients(run: TrainingRun, runner: StepRunner) -> None:
    """Free the memory of a step that ran out of it."""
    runner.zero_gradients()
    if run.compute.device.type == "cuda":
        torch.cuda.empty_cache()


# --- rows and counts --------------------------------------------------------------------------------------------------


def num_rows(batch: Batch) -> int:
    return len(batch.input_ids)


@contextmanager
def with_recurrent_state(
    model: Model,
    batch: Batch,
    recurrent_state: RecurrentStateDict,
    first_row: int,
    new_states: list[RecurrentStateDict],
) -> Iterator[None]:
    """Run a forward pass that continues the rows of the step before.

    Load the state of rows from `first_row` on, and append the new state to `new_states`. With `reset_state` the rows
    start without a state; all rows of a step do, or none.
    """
    if batch.reset_state is None:
        yield
        return
    assert batch.reset_state.all() or not batch.reset_state.any(), "all rows reset, or none"
    rows = slice(first_row, first_row + num_rows(batch))
    model.load_state({} if batch.reset_state.all() else {name: value[rows] for name, value in recurrent_state.items()})
    yield
    new_states.append(model.pop_state())


def concat_states(parts: Sequence[RecurrentStateDict]) -> RecurrentStateDict:
    """Concatenate the states of the micro-batches of a step."""
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else {})}


def sum_counts(batches: Iterable[Batch]) -> Counter[str]:
    """Sum the counts that divide each part of the loss, over batches."""
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch.loss_counts)
    return counts


def all_reduce_counts(batches: Iterable[Batch], dist_context: DistContext) -> dict[str, int]:
    """Sum the loss counts over batches and over all processes."""
    return {name: int(number) for name, number in dist_context.all_reduce_sum(sum_counts(batches)).items()}


def dropout_seed(seed: int, step: int, micro_batch_index: int) -> int:
    """Seed dropout by its position in the run, not by earlier draws."""
    return int(hash_uint64(seed, step, micro_batch_index)) >> 1
