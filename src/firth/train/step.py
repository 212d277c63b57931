"""One step: micro-batches forward and backward, one update, and what the step was a mean over."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from firth.core.console import say, warn
from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.models import Model, Stack
from firth.models.attention import Attention
from firth.models.block import MLP
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
from firth.train.recipe import TrainingConfig
from firth.train.step_runner import LossFn, StepRunner
from firth.train.unfreeze import FreezeSchedule

RECOMPILE_LIMIT = 64  # packed rows come in few shapes, and each is worth a program of its own
RECOMPUTE_MIN_PARAMETERS = 500_000_000  # parameters: memory is short before time is

_compiled_with_recompute = False  # whether what was compiled last is

RecurrentStateDict = dict[str, torch.Tensor]  # what rows leave for those that go on from them, by name: a row each


@dataclass
class TrainingRun:
    """What the loop needs: a model, the micro-batches of any step, and a way to judge."""

    training: TrainingConfig
    compute: ComputeConfig
    model: Model
    batch_fn: Callable[[int], Sequence[Batch]]  # step -> micro-batches, a pure function
    evaluate: Callable[[Model], dict[str, float]] | None = None
    folder: Path | None = None  # None: nothing is written (a trial)
    name: str = "training"
    hooks: list[tuple[int, Callable[[int, Model], None]]] = field(default_factory=list)  # (every_n_steps, function)
    loss_fn: LossFn | None = None  # the model's own unless said (distillation)
    freeze_schedule: FreezeSchedule = field(
        default_factory=FreezeSchedule
    )  # which parts learn, from when on, and how fast
    score_fn: Callable[[Mapping[str, float]], float] | None = None  # scores -> the higher the better; keeps the best
    halvings: int = 0  # how often micro-batches were halved, as memory was short
    patience: int = 0  # stop after so many evaluations that were no better than the best; 0: never
    save_last: bool = True  # a checkpoint of the last step, from which a longer run could go on
    deferred_init: Callable[[], None] | None = None  # gives the model its first weights; steps are compiled meanwhile


def build_step_runner(run: TrainingRun) -> StepRunner:
    """Configure the model's kernels, precision and checkpointing, and choose how micro-batches are executed."""
    apply_flags(run.model, run.training)
    for module in run.model.modules():
        if isinstance(module, Stack):
            module.activation_checkpointing = run.training.gradient_checkpointing
    if run.training.fp8:
        convert_to_fp8(run.model, run.compute.device)

    def program(losses: LossFn) -> LossFn:
        if not run.compute.compile:
            return losses
        mark_compile_constants()
        reset_compiled_if_changed(should_recompute(run.model, run.training))
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        if run.compute.compile_regions:  # see `compute_gradients`
            return losses
        return torch.compile(losses, dynamic=False, mode="reduce-overhead" if run.compute.cuda_graphs else None)

    if run.training.engine.weights == "bf16":
        assert run.loss_fn is None, "a recipe refuses it"
        return BF16Replica(run.model, program, run.compute)
    losses = program(run.loss_fn or run.model.losses)
    captures = run.compute.cuda_graphs and (run.compute.compile_regions or not run.compute.compile)
    return (CudaGraphStep if captures else StepRunner)(run.model, losses, run.compute)


def apply_flags(model: Model, training: TrainingConfig) -> None:
    """Let a model compute by the kernels that a recipe asks for."""
    lean = should_recompute(model, training)
    for module in model.modules():
        if isinstance(module, Attention):
            module.allow_fused = training.engine.fused_attention
        if isinstance(module, MLP):
            module.recompute = lean
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
    """Forward and backward over the micro-batches, one update.

    Each part of the loss is a mean over all that the step asks of it: answers, pairs of texts, tokens; these `counts`
    are of all processes. `recurrent_state` is what the last step has left for this one, and becomes what this one leaves for the
    next. A step that `guard` finds bad changes nothing.
    """
    scale, alone = (
        guard.loss_scale if guard else None,
        isinstance(optimizer, AdamW) and run.compute.dist_context.world_size == 1,
    )
    total, left = compute_gradients(run, runner, micro_batches, step, recurrent_state or {}, scale, counts, alone)
    norm = clip_gradients(run, runner, optimizer)
    bad = guard.should_skip(total, norm, step) if guard else None
    if recurrent_state is not None:
        update_recurrent_state(recurrent_state, concat_states(left), bad)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("scale", 1.0)
    if bad is not None:
        bad = bad.to(next(run.model.parameters()).device)  # which may be the host's
    both = isinstance(optimizer, AdamW) and bool(optimizer.replicas)
    optimizer.found_inf = bad  # type: ignore[attr-defined]  # torch's own name: a fused step then leaves all as it is
    try:
        optimizer.step()
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        raise UserError(
            "Out of memory for what the optimizer remembers of each weight: --optim adafactor remembers little, "
            "--parallel fsdp --cpu-offload keeps it in the host's memory, and a smaller model has fewer weights."
        ) from e
    runner.end_step(both)
    optimizer.zero_grad(set_to_none=runner.frees_gradients)
    return total


def compile_ahead(
    run: TrainingRun, runner: StepRunner, optimizer: torch.optim.Optimizer, micro_batches: Sequence[Batch], step: int
) -> None:
    """Have a step compiled, by gradients that are thrown away. (The compiler leaves little to collect, and is done
    sooner if nobody looks for it.)
    """
    say("compiling a step meanwhile, which takes less long the next time")
    collects = gc.isenabled()
    gc.disable()
    try:
        compute_gradients(run, runner, micro_batches[:1], step, RecurrentStateDict())
    finally:
        if collects:
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
    """The loss of a step, its gradients, and what its rows leave; in smaller micro-batches where memory is short.

    Gradients of a twin may `keep_in_replica` with it, if they are of one micro-batch and an optimizer can take them from there.
    """
    world, found = run.compute.dist_context, None
    counts = counts or all_reduce_counts(micro_batches, world)
    if not run.model.training:  # all of its modules are asked otherwise, which takes a while
        run.model.train()
    runner.begin_step()
    while found is None:
        try:
            # backward too: a block that is computed again is the same program then
            with (
                compile_regions() if run.compute.compile_regions else nullcontext(),
                recompute_in_backward(run),
                cache_fp8_weights(runner.compute_model) if run.training.fp8 else nullcontext(),
            ):
                found = run_micro_batches(
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
        if world.any_out_of_memory(found is None):  # only now is nothing of the failed attempt held any more
            found = None
            if not runner.release_memory():
                halve_micro_batches(run, micro_batches)
            free_gradients(run, runner)
    world.all_reduce_gradients(run.model)
    world.all_reduce_tensors([found[0]])
    return found


def should_recompute(model: Model, training: TrainingConfig) -> bool:
    recompute = training.engine.recompute
    return model.num_parameters >= RECOMPUTE_MIN_PARAMETERS if recompute is None else recompute


def reset_compiled_if_changed(recompute: bool) -> None:
    """Programs of an earlier run in this process that keep more or less than is asked now are not taken."""
    global _compiled_with_recompute
    if recompute != _compiled_with_recompute:
        reset_compiled_regions()
    _compiled_with_recompute = recompute


@contextmanager
def recompute_in_backward(run: TrainingRun) -> Iterator[None]:
    """What programs that are made in here keep; torch keeps all that is read by a product, unless it is told not to."""
    if not (run.compute.compile and should_recompute(run.model, run.training)):
        yield
        return
    from torch._functorch import config  # only now, as few commands need the compiler

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
    """Add up loss and gradients of the micro-batches. A loss in float16 is scaled up on the way, and back again."""
    total = torch.zeros((), device=run.compute.device)
    left: list[RecurrentStateDict] = []
    for i, batch in enumerate(micro_batches):
        torch.manual_seed(dropout_seed(run.training.seed, step, run.compute.dist_context.rank * len(micro_batches) + i))
        first_row = sum(map(num_rows, micro_batches[:i]))
        state = with_recurrent_state(run.model, batch, recurrent_state, first_row, left)
        total += runner.forward_backward(batch, counts, loss_scale, state)
        runner.end_micro_batch(i, len(micro_batches), keep_in_replica)
    if loss_scale is not None:
        found = [to_local(p.grad) for p in run.model.parameters() if p.grad is not None]
        torch._foreach_mul_(found, (1 / loss_scale).to(found[0].device))  # the host's, where weights are kept there
    return total, left


def clip_gradients(run: TrainingRun, runner: StepRunner, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The length of the gradient, which is cut where it is too long; by the optimizer, where it takes a twin's."""
    held, most = runner.pending_gradients(), run.training.max_grad_norm
    if held and isinstance(optimizer, AdamW):
        found = [twin.grad for twin in held.values() if twin.grad is not None]
        norms = torch._foreach_norm(found, 2, torch.float32)
        norm = torch.stack(norms).norm()
        optimizer.use_replica_gradients(held, (most / (norm + 1e-6)).clamp(max=1.0) if most else torch.ones_like(norm))
        return norm
    if most:
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), most)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters() if p.grad is not None])
    return to_full_tensor(norm).to(run.compute.device)


def update_recurrent_state(
    recurrent_state: RecurrentStateDict, new_state: RecurrentStateDict, found_inf: torch.Tensor | None
) -> None:
    """Carry on what a step has left; after a bad one what was there before it, or nothing known.

    Always as a copy: a replayed step writes its own over the last one's.
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


# --- when memory is short ---------------------------------------------------------------------------------------------


def is_out_of_memory(e: RuntimeError) -> bool:
    return isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in str(e)


def split_micro_batches(micro_batches: Sequence[Batch], halvings: int) -> list[Batch]:
    """The same rows in smaller micro-batches, each halved so many times."""
    if not halvings:
        return list(micro_batches)
    found = []
    for batch in micro_batches:
        size = -(-num_rows(batch) // 2**halvings)
        for first in range(0, num_rows(batch), size):
            found.append(Batch(*(None if a is None else a[first : first + size] for a in batch)))
    return found


def halve_micro_batches(run: TrainingRun, micro_batches: Sequence[Batch]) -> None:
    """Take micro-batches of half the size from here on; the step, and so the gradient, stays what it is."""
    rows = max(map(num_rows, split_micro_batches(micro_batches, run.halvings)))
    if rows == 1 or any(batch.group_ids is not None for batch in micro_batches):
        less = "one row at a time" if rows == 1 else "texts that are compared with each other, which stay together"
        raise UserError(
            f"Out of memory, with {less}. Shorten --max-seq-length, pass --gradient-checkpointing, or lower "
            "--per-device-train-batch-size."
        )
    run.halvings += 1
    rows = max(map(num_rows, split_micro_batches(micro_batches, run.halvings)))
    warn(f"out of memory: {rows} rows are computed at once from here on; a step still learns from as many as before.")


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
    """Read rows that go on from step to step: with their part of `recurrent_state`, which begins at row `first_row`.

    What they leave is added to `left`. Rows that are `fresh` begin with nothing; those of a step are so together.
    """
    if batch.reset_state is None:
        yield
        return
    assert batch.reset_state.all() or not batch.reset_state.any(), "all begin anew, or none"
    rows = slice(first_row, first_row + num_rows(batch))
    model.load_state({} if batch.reset_state.all() else {name: value[rows] for name, value in recurrent_state.items()})
    yield
    new_states.append(model.pop_state())


def concat_states(parts: Sequence[RecurrentStateDict]) -> RecurrentStateDict:
    """What the micro-batches of a step have left, as of all its rows."""
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else {})}


def sum_counts(batches: Iterable[Batch]) -> Counter[str]:
    """What each part of the loss is a mean over, in all of the batches together."""
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch.loss_counts)
    return counts


def all_reduce_counts(batches: Iterable[Batch], dist_context: DistContext) -> dict[str, int]:
    """The same over all processes."""
    return {name: int(number) for name, number in dist_context.all_reduce_sum(sum_counts(batches)).items()}


def dropout_seed(seed: int, step: int, micro_batch_index: int) -> int:
    """Dropout depends on where it falls, not on what was drawn before."""
    return int(hash_uint64(seed, step, micro_batch_index)) >> 1
