"""Data-parallel training with torch.distributed: process groups, collectives, and DDP's gradient all-reduce.

Every rank reads its own rows of a step, computes their gradients, and the gradients are summed over all ranks. The loss
of a rank is divided by the number of targets of the whole step, so that the sum equals the gradient of one process.

- `--parallel ddp`: each rank has the whole model. Gradients are summed after the last backward pass, in buckets of
  32 MB (a few large all-reduces use the bandwidth better than many small ones).
- `--parallel fsdp` and `hsdp`: each rank has a shard of the weights, gradients and optimizer state (`fsdp.py`).

A `DistContext` of one process makes every collective the identity, so that one training loop serves all. Collectives of
numbers and JSON run on the CPU (gloo), those of tensors on the GPU (NCCL). No pickle is sent.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from firth.core.errors import UserError
from firth.models import Model
from firth.train.launch_env import LaunchEnv, read_launch_env
from firth.train.recipe import TrainingConfig

if TYPE_CHECKING:
    from firth.train.compute import ComputeConfig

BroadcastT = TypeVar("BroadcastT")
BUCKET_ELEMENTS = 2**23  # elements per all-reduce: 32 MB of float32
# other ranks wait while rank 0 writes shards; a dead peer closes its socket and is noticed at once
GLOO_TIMEOUT = timedelta(days=7)
# each has a process group of its own: collectives of one group must not interleave
BACKGROUND_THREADS = ("batches", "files")
PEER_LOST_MESSAGES = ("closed by peer", "reset by peer")  # parts of gloo's messages


class DistContext:
    """The processes of a run. This base class is one process: every collective returns its input."""

    rank, world_size, strategy = 0, 1, "none"
    shard_size = 1  # processes that hold a model together

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the model only, so that saving and reading it needs all of them."""
        return False

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def __str__(self) -> str:
        return "one process" if self.world_size == 1 else f"{self.world_size} processes ({self.strategy})"

    # --- collectives of numbers and objects

    def all_reduce_sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Sum numbers by name over all ranks. Names and their order must be equal on all ranks."""
        return dict(numbers)

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum over all ranks."""
        return number

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.all_reduce_max(int(flag)))

    def broadcast(self, value: BroadcastT) -> BroadcastT:
        """Return the value of rank 0, which must be JSON."""
        return value

    def run_on_main(self, work: Callable[[], BroadcastT]) -> BroadcastT:
        """Run `work` on rank 0 and return its result on all ranks, which wait for it."""
        return self.broadcast(work() if self.is_main_process else None)  # type: ignore[return-value]

    def main_process_first(self, work: Callable[[], BroadcastT]) -> BroadcastT:
        """Run `work` on rank 0, then on all others, which can reuse its files."""
        if not self.is_main_process:
            self.barrier()
        result = work()
        if self.is_main_process:
            self.barrier()
        return result

    def barrier(self) -> None:
        """Wait until all ranks call it."""

    def for_thread(self, thread: str) -> DistContext:
        """Return the context of a background thread (`BACKGROUND_THREADS`), with a process group of its own."""
        return self

    def enter_on_main(self, context: AbstractContextManager[BroadcastT]) -> AbstractContextManager[BroadcastT | None]:
        """Return the context manager on rank 0, and a null context on the others."""
        return context if self.is_main_process else nullcontext()

    # --- the model and its gradients

    def broadcast_weights(self, model: Model) -> None:
        """Copy the weights of rank 0 to all ranks."""

    def prepare_model(self, model: Model, training: TrainingConfig, compute: ComputeConfig) -> None:
        """Move the model to its device and shard it, where the strategy does."""
        model.to(compute.device)

    def reshard(self, model: Model) -> None:
        """Free gathered weights after an evaluation (FSDP)."""

    def gather_model(self, model: Model) -> Model | None:
        """Return the whole model on rank 0, None on the others."""
        return model if self.is_main_process else None

    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors on rank 0; the others may get none. A collective: every rank must call it."""
        return dict(tensors)

    def any_out_of_memory(self, failed: bool) -> bool:
        """Whether any rank ran out of memory, so that all retry the step."""
        return failed

    def all_reduce_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Sum device tensors over all ranks, in place."""

    def all_reduce_gradients(self, model: Model) -> None:
        """Sum the gradients over all ranks, unless backward has done so (FSDP)."""

    # --- rows

    def local_rows(self, rows: int) -> slice:
        """Return the rows of a step that this rank reads: a contiguous span, equally long on all ranks."""
        assert rows % self.world_size == 0, "check_even_split rejects it"
        part = rows // self.world_size
        return slice(self.rank * part, (self.rank + 1) * part)

    def gather_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Concatenate the local rows of tensors over all ranks."""
        return dict(tensors)

    def select_local_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the local rows of tensors that hold all rows of the step."""
        return {name: value[self.local_rows(len(value))] for name, value in tensors.items()}

    # --- elastic restarts by torchrun

    def is_restart(self, folder: str) -> bool:
        """Whether torchrun restarted a run that had started in this folder."""
        return False

    def mark_started(self, folder: str) -> None:
        """Record that the run in this folder has started."""


SINGLE_PROCESS = DistContext()


class DDPContext(DistContext):
    """Data parallelism with a whole model per rank; gradients are summed after a step's backward passes.

    No collective runs during a backward pass, so that a rank that runs out of memory can still tell the others.
    """

    strategy = "ddp"

    def __init__(self, launch_env: LaunchEnv, store: Store, groups: Mapping[str, Any]) -> None:
        self.launch_env, self.store, self.groups, self.group = launch_env, store, groups, groups["main"]
        self.rank, self.world_size = launch_env.rank, launch_env.world_size

    def all_reduce_sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        values = torch.tensor(list(numbers.values()), dtype=torch.float64)  # exact for whole numbers up to 2 ** 53
        dist.all_reduce(values, group=self.group)
        return {k: type(old)(new) for (k, old), new in zip(numbers.items(), values.tolist(), strict=True)}

    def all_reduce_max(self, number: int) -> int:
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return int(value)

    def broadcast(self, value: BroadcastT) -> BroadcastT:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor(len(data))
        dist.broadcast(length, 0, group=self.group)
        data = data if self.is_main_process else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.group)
        return value if self.is_main_process else json.loads(bytes(data.tolist()))

    def barrier(self) -> None:
        self.all_reduce_max(0)

    def for_thread(self, thread: str) -> DistContext:
        other = copy.copy(self)
        other.group = self.groups[thread]
        return other

    def broadcast_weights(self, model: Model) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0, group=None if tensor.is_cuda else self.group)

    def any_out_of_memory(self, failed: bool) -> bool:
        return self.any_process(failed)

    def all_reduce_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Flatten one bucket while the one before it is being reduced."""
        in_flight: list[tuple[list[Tensor], Tensor, Any]] = []
        for bucket in bucket_tensors(tensors):
            flat = torch.cat([t.flatten() for t in bucket])
            in_flight.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
            if len(in_flight) > 1:
                unpack_bucket(*in_flight.pop(0))
        for pending in in_flight:
            unpack_bucket(*pending)

    @torch.no_grad()
    def all_reduce_gradients(self, model: Model) -> None:
        """A parameter that no rank has used keeps no gradient, as in one process."""
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        used = self.all_reduce_sum({name: int(p.grad is not None) for name, p in trainable})
        used_parameters = [p for name, p in trainable if used[name]]
        for p in used_parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.all_reduce_tensors([p.grad for p in used_parameters if p.grad is not None])

    def gather_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered = {}
        for name, value in tensors.items():
            parts = [torch.empty_like(value) for _ in range(self.world_size)]
            dist.all_gather(parts, value.contiguous())
            gathered[name] = torch.cat(parts)
        return gathered

    def is_restart(self, folder: str) -> bool:
        """Read the key that `mark_started` wrote to torchrun's store, else torchrun's restart count.

        Rank 0 both reads and writes the key: another rank could read it after rank 0's write of this start.
        """
        if not self.launch_env.has_agent_store:
            return self.launch_env.restart_count > 0
        return self.run_on_main(lambda: bool(self.store.check([started_key(folder)])))

    def mark_started(self, folder: str) -> None:
        if self.is_main_process:
            self.store.set(started_key(folder), "yes")


def started_key(folder: str) -> str:
    return f"firth/begun/{os.path.abspath(folder)}"  # noqa: PTH100, a name and no file


def unpack_bucket(tensors: list[Tensor], flat: Tensor, work: Any) -> None:
    """Wait for an all-reduce and copy the bucket back into its tensors."""
    work.wait()
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def bucket_tensors(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype, in order, into buckets of at most `BUCKET_ELEMENTS`."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_ELEMENTS
        if full or (bucket and bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


# --- initialisation -------------------------------------------------------------------------------------------------


_connected: tuple[LaunchEnv, Store, dict[str, Any]] | None = None  # the process group is initialised once per process


def check_device(training: TrainingConfig) -> None:
    """Raise where the requested device is missing."""
    there = torch.cuda.is_available()
    if training.device == "cuda" and not there:
        raise UserError(
            f"--device cuda: torch finds no GPU here{visible_devices_hint()}. Leave it out to compute on the CPU."
        )
    launch = read_launch_env()
    is_parallel = (
        launch is not None and launch.world_size > 1 if training.parallel == "auto" else training.parallel != "none"
    )
    if training.device == "cpu" and is_parallel and there:
        raise UserError("--device cpu is for one process where there are GPUs; CUDA_VISIBLE_DEVICES= hides them.")


def visible_devices_hint() -> str:
    """Return the value of CUDA_VISIBLE_DEVICES, in brackets, if it is set."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return "" if chosen in ("", "-1") else f" (CUDA_VISIBLE_DEVICES is {chosen})"


def select_device(dist_context: DistContext, training: TrainingConfig) -> torch.device:
    """Return this rank's GPU, or the CPU."""
    if training.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return (
        torch.device("cuda", dist_context.launch_env.local_rank)
        if isinstance(dist_context, DDPContext)
        else torch.device("cuda")
    )


def init_groups(launch_env: LaunchEnv) -> tuple[LaunchEnv, Store, dict[str, Any]]:
    """Initialise the process groups: NCCL for GPU tensors, gloo for the rest."""
    global _connected
    if _connected is None:
        store = launch_env.store
        device = torch.device("cuda", launch_env.local_rank) if torch.cuda.is_available() else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device else "gloo",
            store=PrefixStore(f"firth/start-{launch_env.restart_count}", store),
            rank=launch_env.rank,
            world_size=launch_env.world_size,
            device_id=device,
        )
        groups = {name: dist.new_group(backend="gloo", timeout=GLOO_TIMEOUT) for name in ("main", *BACKGROUND_THREADS)}
        _connected = launch_env, store, groups
        atexit.register(dist.destroy_process_group)
    return _connected


# --- failures -------------------------------------------------------------------------------------------------------


def is_peer_lost(e: BaseException) -> bool:
    """Whether an error only reports that another process has died."""
    return isinstance(e, dist.DistError) or (
        isinstance(e, RuntimeError) and any(word in str(e) for word in PEER_LOST_MESSAGES)
    )


def should_report_error(e: BaseException) -> bool:
    """Whether this rank prints an error that others may meet too: the first one does.

    A lost peer is reported only if no rank has reported a failure. An error that repeats after torchrun's restart is
    printed once.
    """
    launch = read_launch_env()
    if launch is None or launch.world_size == 1:
        return True
    if _connected is None and not launch.has_agent_store:
        return launch.rank == 0
    try:
        store = launch.store if _connected is None else _connected[1]
        alone = store.add(f"firth/failed/{launch.restart_count}", 1) == 1
        return alone if is_peer_lost(e) else store.add(f"firth/said/{e}", 1) == 1
    except (RuntimeError, UserError):  # the store is gone
        return launch.rank == 0 and not is_peer_lost(e)
