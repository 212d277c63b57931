"""One step: micro-batches forward and backward, one update, and what the step was a mean over."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firth.console import say, warn
from firth.errors import UserError
from firth.models import Model, Stack
from firth.models.attention import Attention
from firth.models.block import MLP
from firth.models.eight_weights import weights_held
from firth.models.heads import Vocabulary
from firth.models.programs import compiled_parts, forget_programs
from firth.models.tiles import before_compiling
from firth.objectives import Batch
from firth.tokens.rows import mix
from firth.train.adamw import AdamW, can_take
from firth.train.capture import Captured
from firth.train.device import Machine
from firth.train.eight import use_eight_bits
from firth.train.guard import Guard
from firth.train.halved import Halved
from firth.train.parallel import World
from firth.train.parts import local, whole
from firth.train.recipe import Training
from firth.train.unfreeze import Pace

RECOMPILATIONS = 64  # packed rows come in few shapes, and each is worth a program of its own
LEAN_FROM = 500_000_000  # parameters: memory is short before time is

_lean = False  # whether what was compiled last is

Carry = dict[str, torch.Tensor]  # what rows leave for those that go on from them, by name: a row each
Losses = Callable[[Any], dict[str, torch.Tensor]]


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
    halvings: int = 0  # how often micro-batches were halved, as memory was short
    patience: int = 0  # stop after so many evaluations that were no better than the best; 0: never
    keeps_last: bool = True  # a checkpoint of the last step, from which a longer run could go on
    awaited: Callable[[], None] | None = None  # gives the model its first weights; steps are compiled meanwhile


def prepared(run: Run) -> Losses:
    """What a step computes the losses with: compiled, and with blocks that are computed twice, where that is asked."""
    switch(run.model, run.training)
    for module in run.model.modules():
        if isinstance(module, Stack):
            module.checkpointing = run.training.gradient_checkpointing
    if run.training.fp8:
        use_eight_bits(run.model, run.machine.device)

    def program(losses: Losses) -> Losses:
        if not run.machine.compile:
            return losses
        before_compiling()
        keep_as_asked(is_lean(run.model, run.training))
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
        if run.machine.parts:  # see `gradients`
            return losses
        return torch.compile(losses, dynamic=False, mode="reduce-overhead" if run.machine.graphs else None)

    if run.training.weights == "bf16":
        assert run.losses is None, "a recipe refuses it"
        return Halved(run.model, program)
    losses = program(run.losses or run.model.losses)
    captures = run.machine.graphs and (run.machine.parts or not run.machine.compile)
    return Captured(run.model, losses, run.machine) if captures else losses


def switch(model: Model, training: Training) -> None:
    """Let a model compute by the kernels that a recipe asks for."""
    lean = is_lean(model, training)
    for module in model.modules():
        if isinstance(module, Attention):
            module.own = training.fused_attention
        if isinstance(module, MLP):
            module.lean = lean
        if isinstance(module, Stack):
            module.residual = torch.bfloat16 if training.residual == "bf16" else torch.float32
            module.narrows = training.last_layer == "asked"
        if isinstance(module, Vocabulary):
            module.fused, module.padded = training.fused_loss, training.pad_vocabulary


def train_step(
    run: Run,
    losses_of: Losses,
    optimizer: torch.optim.Optimizer,
    micro: Sequence[Batch],
    step: int,
    lr: float,
    carry: Carry | None = None,
    guard: Guard | None = None,
    counts: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Forward and backward over the micro-batches, one update.

    Each part of the loss is a mean over all that the step asks of it: answers, pairs of texts, tokens; these `counts`
    are of all processes. `carry` is what the last step has left for this one, and becomes what this one leaves for the
    next. A step that `guard` finds bad changes nothing.
    """
    scale, alone = guard.scale if guard else None, isinstance(optimizer, AdamW) and run.machine.world.size == 1
    total, left = gradients(run, losses_of, micro, step, carry or {}, scale, counts, alone)
    norm = cut_gradients(run, losses_of, optimizer)
    bad = guard.judge(total, norm, step) if guard else None
    if carry is not None:
        hand_over(carry, joined(left), bad)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    if bad is not None:
        bad = bad.to(next(run.model.parameters()).device)  # which may be the host's
    both = isinstance(optimizer, AdamW) and bool(optimizer.twins)
    optimizer.found_inf = bad  # type: ignore[attr-defined]  # torch's own name: a fused step then leaves all as it is
    try:
        optimizer.step()
    except RuntimeError as e:
        if not out_of_memory(e):
            raise
        raise UserError(
            "Out of memory for what the optimizer remembers of each weight: --optim adafactor remembers little, "
            "--parallel fsdp --cpu-offload keeps it in the host's memory, and a smaller model has fewer weights."
        ) from e
    if isinstance(losses_of, Halved):
        losses_of.moved(both)
    forget(losses_of, optimizer)
    return total


def rehearse(run: Run, losses_of: Losses, optimizer: torch.optim.Optimizer, micro: Sequence[Batch], step: int) -> None:
    """Have a step compiled, by gradients that are thrown away. (The compiler leaves little to collect, and is done
    sooner if nobody looks for it.)
    """
    say("compiling a step meanwhile, which takes less long the next time")
    collects = gc.isenabled()
    gc.disable()
    try:
        gradients(run, losses_of, micro[:1], step, Carry())
    finally:
        if collects:
            gc.enable()
    forget(losses_of, optimizer)


def forget(losses_of: Losses, optimizer: torch.optim.Optimizer) -> None:
    """Let the next gradients be the first."""
    optimizer.zero_grad(set_to_none=not isinstance(losses_of, Captured))  # whose gradients stay where they are


def gradients(
    run: Run,
    losses_of: Losses,
    micro: Sequence[Batch],
    step: int,
    carry: Carry,
    scale: torch.Tensor | None = None,
    counts: Mapping[str, int] | None = None,
    stay: bool = False,
) -> tuple[torch.Tensor, list[Carry]]:
    """The loss of a step, its gradients, and what its rows leave; in smaller micro-batches where memory is short.

    Gradients of a twin may `stay` with it, if they are of one micro-batch and an optimizer can take them from there.
    """
    world, found = run.machine.world, None
    counts = counts or all_counts(micro, world)
    if not run.model.training:  # all of its modules are asked otherwise, which takes a while
        run.model.train()
    if isinstance(losses_of, Halved):
        losses_of.begin()
    computes = losses_of.twin if isinstance(losses_of, Halved) else run.model
    while found is None:
        try:
            # backward too: a block that is computed again is the same program then
            with (
                compiled_parts() if run.machine.parts else nullcontext(),
                kept_for_backward(run),
                weights_held(computes) if run.training.fp8 else nullcontext(),
            ):
                found = backward(run, losses_of, halve(micro, run.halvings), counts, step, carry, scale, stay)
        except RuntimeError as e:
            if type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
                reason = " ".join(str(e).split("\n")[:2])
                raise UserError(f"The step cannot be compiled here: {reason}. Pass --no-compile.") from e
            if not out_of_memory(e):
                raise
        if world.one_failed(found is None):  # only now is nothing of the failed attempt held any more
            found = None
            if isinstance(losses_of, Captured) and losses_of.graphs:  # which hold as much as a batch
                losses_of.stop("memory is short")
                forget_gradients(run, run.model)
            else:
                halve_again(run, losses_of, micro)
    world.add_gradients(run.model)
    world.add([found[0]])
    return found


def is_lean(model: Model, training: Training) -> bool:
    return model.num_parameters >= LEAN_FROM if training.lean is None else training.lean


def keep_as_asked(lean: bool) -> None:
    """Programs of an earlier run in this process that keep more or less than is asked now are not taken."""
    global _lean
    if lean != _lean:
        forget_programs()
    _lean = lean


@contextmanager
def kept_for_backward(run: Run) -> Iterator[None]:
    """What programs that are made in here keep; torch keeps all that is read by a product, unless it is told not to."""
    if not (run.machine.compile and is_lean(run.model, run.training)):
        yield
        return
    from torch._functorch import config  # only now, as few commands need the compiler

    with config.patch(ban_recompute_materialized_backward=False):
        yield


def backward(
    run: Run,
    losses_of: Losses,
    micro: Sequence[Batch],
    counts: Mapping[str, int],
    step: int,
    carry: Carry,
    scale: torch.Tensor | None,
    stay: bool,
) -> tuple[torch.Tensor, list[Carry]]:
    """Add up loss and gradients of the micro-batches. A loss in float16 is scaled up on the way, and back again."""
    total = torch.zeros((), device=run.machine.device)
    left: list[Carry] = []
    halved = losses_of if isinstance(losses_of, Halved) else None
    for i, batch in enumerate(micro):
        torch.manual_seed(dropout_seed(run.training.seed, step, run.machine.world.rank * len(micro) + i))
        if isinstance(losses_of, Captured):
            total += losses_of.add_gradients(batch, counts, scale)
            continue
        if run.machine.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with run.machine.precision(), reading_on(run.model, batch, carry, sum(map(num_rows, micro[:i])), left):
            loss = sum_of_means(losses_of(batch.to(run.machine.device)), counts)
        (loss if scale is None else loss * scale).backward()
        if halved and not (stay and len(micro) == 1 and can_take(halved.held())):
            halved.hand_over()
        elif run.machine.graphs and i == 0 and len(micro) > 1:
            keep_gradients(run.model)
        total += loss.detach()
    if scale is not None:
        found = [local(p.grad) for p in run.model.parameters() if p.grad is not None]
        torch._foreach_mul_(found, (1 / scale).to(found[0].device))  # the host's, where weights are kept there
    return total, left


def keep_gradients(model: Model) -> None:
    """Take gradients out of a graph's memory, which the next replay writes over, before others are added to them."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone()


def cut_gradients(run: Run, losses_of: Losses, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The length of the gradient, which is cut where it is too long; by the optimizer, where it takes a twin's."""
    held, most = losses_of.held() if isinstance(losses_of, Halved) else {}, run.training.max_grad_norm
    if held and isinstance(optimizer, AdamW):
        found = [twin.grad for twin in held.values() if twin.grad is not None]
        norms = torch._foreach_norm(found, 2, torch.float32)
        norm = torch.stack(norms).norm()
        optimizer.take(held, (most / (norm + 1e-6)).clamp(max=1.0) if most else torch.ones_like(norm))
        return norm
    if most:
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), most)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters() if p.grad is not None])
    return whole(norm).to(run.machine.device)


def hand_over(carry: Carry, left: Carry, bad: torch.Tensor | None) -> None:
    """Carry on what a step has left; after a bad one what was there before it, or nothing known.

    Always as a copy: a replayed step writes its own over the last one's.
    """
    if bad is None:
        left = {name: value.clone() for name, value in left.items()}
    else:
        for name, value in left.items():
            before = carry.get(name, value)
            before = before if name in carry and before.shape == value.shape else torch.zeros_like(value)
            left[name] = torch.where(bad > 0, before, value)
    carry.clear()
    carry.update(left)


# --- when memory is short ---------------------------------------------------------------------------------------------


def out_of_memory(e: RuntimeError) -> bool:
    return isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in str(e)


def halve(micro: Sequence[Batch], halvings: int) -> list[Batch]:
    """The same rows in smaller micro-batches, each halved so many times."""
    if not halvings:
        return list(micro)
    found = []
    for batch in micro:
        size = -(-num_rows(batch) // 2**halvings)
        for first in range(0, num_rows(batch), size):
            found.append(Batch(*(None if a is None else a[first : first + size] for a in batch)))
    return found


def halve_again(run: Run, losses_of: Losses, micro: Sequence[Batch]) -> None:
    """Take micro-batches of half the size from here on; the step, and so the gradient, stays what it is."""
    rows = max(map(num_rows, halve(micro, run.halvings)))
    if rows == 1 or any(batch.group is not None for batch in micro):
        less = "one row at a time" if rows == 1 else "texts that are compared with each other, which stay together"
        raise UserError(
            f"Out of memory, with {less}. Shorten --max-seq-length, pass --gradient-checkpointing, or lower "
            "--per-device-train-batch-size."
        )
    run.halvings += 1
    rows = max(map(num_rows, halve(micro, run.halvings)))
    warn(f"out of memory: {rows} rows are computed at once from here on; a step still learns from as many as before.")
    forget_gradients(run, *((run.model, losses_of.twin) if isinstance(losses_of, Halved) else (run.model,)))


def forget_gradients(run: Run, *models: Model) -> None:
    """Give back the memory of a step that did not come to its end."""
    for model in models:
        model.zero_grad(set_to_none=True)
    if run.machine.device.type == "cuda":
        torch.cuda.empty_cache()


# --- rows and counts --------------------------------------------------------------------------------------------------


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


def all_counts(batches: Iterable[Batch], world: World) -> dict[str, int]:
    """The same over all processes."""
    return {name: int(number) for name, number in world.sums(add_counts(batches)).items()}


def sum_of_means(parts: Mapping[str, Any], counts: Mapping[str, int]) -> Any:
    """The parts of a loss, numbers or tensors, each divided by its own count, added up."""
    return sum(part / max(counts[name], 1) for name, part in parts.items())


def dropout_seed(seed: int, step: int, micro: int) -> int:
    """Dropout depends on where it falls, not on what was drawn before."""
    return int(mix(seed, step, micro)) >> 1
