"""Several processes as one: who they are, what they agree on, how they add up a step.

A `DistContext` of one process has nothing to agree on, and so the one loop is written for all of them. No pickle is sent:
numbers travel as tensors, anything else as JSON.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from firth.core.console import set_quiet
from firth.core.errors import UserError
from firth.models import Model
from firth.train.recipe import TrainingConfig

if TYPE_CHECKING:
    from firth.train.compute import ComputeConfig

BroadcastT = TypeVar("BroadcastT")
BUCKET_ELEMENTS = 2**23  # numbers that travel together: 32 MB of float32
GLOO_TIMEOUT = timedelta(days=7)  # the others wait while the first one makes shards; who has died is noticed at once
BACKGROUND_THREADS = ("batches", "files")  # beside the training: each speaks to the others for itself
PEER_LOST_MESSAGES = ("closed by peer", "reset by peer")  # what gloo says of it


class DistContext:
    """All processes of a run. Here there is one, with which all agree."""

    rank, world_size, strategy = 0, 1, "none"

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.rank == 0

    def __str__(self) -> str:
        return "one process" if self.world_size == 1 else f"{self.world_size} processes ({self.strategy})"

    # --- what they agree on

    def all_reduce_sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Numbers by name, added up over all. Names and their order are the same everywhere."""
        return dict(numbers)

    def all_reduce_max(self, number: int) -> int:
        """The highest of all."""
        return number

    def any_process(self, flag: bool) -> bool:
        """Whether it is so for one of them at least."""
        return bool(self.all_reduce_max(int(flag)))

    def broadcast(self, value: BroadcastT) -> BroadcastT:
        """What the first one has; anything that JSON can say."""
        return value

    def run_on_main(self, work: Callable[[], BroadcastT]) -> BroadcastT:
        """Let the first one do something, and all know what came of it; the others wait."""
        return self.broadcast(work() if self.is_main_process else None)  # type: ignore[return-value]

    def main_process_first(self, work: Callable[[], BroadcastT]) -> BroadcastT:
        """Do something everywhere, the first one first: the others find what it has left."""
        if not self.is_main_process:
            self.barrier()
        found = work()
        if self.is_main_process:
            self.barrier()
        return found

    def barrier(self) -> None:
        """Until all are here."""

    def for_thread(self, thread: str) -> DistContext:
        """The same processes, for a thread beside the training (`BACKGROUND_THREADS`)."""
        return self

    def enter_on_main(self, context: AbstractContextManager[BroadcastT]) -> AbstractContextManager[BroadcastT | None]:
        """A context that the first one alone is in."""
        return context if self.is_main_process else nullcontext()

    # --- the model and its gradients

    def broadcast_weights(self, model: Model) -> None:
        """Begin with the weights of the first one."""

    def prepare_model(self, model: Model, training: TrainingConfig, compute: ComputeConfig) -> None:
        """Put a model where it is computed."""
        model.to(compute.device)

    def reshard(self, model: Model) -> None:
        """After a model has only been read with: give back what it took for that."""

    def gather_model(self, model: Model) -> Model | None:
        """The model with all of its weights, for the first one."""
        return model if self.is_main_process else None

    def any_out_of_memory(self, failed: bool) -> bool:
        """Whether memory was short in one of them, so that all try again."""
        return failed

    def all_reduce_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors on the device over all, in place."""

    def all_reduce_gradients(self, model: Model) -> None:
        """Add up the gradients over all, where that is not done yet."""

    # --- rows

    def local_rows(self, rows: int) -> slice:
        """Which of the rows of a step are read here: a stretch of them, as long as everyone's."""
        assert rows % self.world_size == 0, "check_share refuses it"
        part = rows // self.world_size
        return slice(self.rank * part, (self.rank + 1) * part)

    def gather_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors with a row for each that is read here, as of all rows of the step."""
        return dict(tensors)

    def select_local_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same the other way."""
        return {name: value[self.local_rows(len(value))] for name, value in tensors.items()}

    # --- a start that torchrun makes again

    def is_restart(self, folder: str) -> bool:
        """Whether this start is one more of a run that had begun in this folder."""
        return False

    def mark_started(self, folder: str) -> None:
        """Note that it has."""


SINGLE_PROCESS = DistContext()


class DDPContext(DistContext):
    """Several, each with the whole model; the gradients of a step are added up after its backward passes.

    Nothing is sent during them, so that a process that has no memory left can still say so.
    """

    strategy = "ddp"

    def __init__(self, launch_env: LaunchEnv, store: Store, groups: Mapping[str, Any]) -> None:
        self.launch_env, self.store, self.groups, self.group = launch_env, store, groups, groups["main"]
        self.rank, self.world_size = launch_env.rank, launch_env.world_size

    def all_reduce_sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        found = torch.tensor(list(numbers.values()), dtype=torch.float64)  # exact for whole numbers up to 2 ** 53
        dist.all_reduce(found, group=self.group)
        return {k: type(old)(new) for (k, old), new in zip(numbers.items(), found.tolist(), strict=True)}

    def all_reduce_max(self, number: int) -> int:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)

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
        """A parcel is packed while the one before it is under way."""
        sent: list[tuple[list[Tensor], Tensor, Any]] = []
        for some in bucket_tensors(tensors):
            flat = torch.cat([t.flatten() for t in some])
            sent.append((some, flat, dist.all_reduce(flat, async_op=True)))
            if len(sent) > 1:
                unpack_bucket(*sent.pop(0))
        for parcel in sent:
            unpack_bucket(*parcel)

    @torch.no_grad()
    def all_reduce_gradients(self, model: Model) -> None:
        """A weight that no process has used has no gradient, as in one process."""
        learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        used = self.all_reduce_sum({name: int(p.grad is not None) for name, p in learning})
        found = [p for name, p in learning if used[name]]
        for p in found:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.all_reduce_tensors([p.grad for p in found if p.grad is not None])

    def gather_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, value in tensors.items():
            parts = [torch.empty_like(value) for _ in range(self.world_size)]
            dist.all_gather(parts, value.contiguous())
            found[name] = torch.cat(parts)
        return found

    def is_restart(self, folder: str) -> bool:
        """By a note that outlives the processes; where it cannot, by torchrun's count of the starts.

        The first one looks, which is also who writes it: another may look too late.
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
    """Put a parcel that has come back where its tensors were."""
    work.wait()
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def bucket_tensors(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one kind in their order, so many together that they are worth sending."""
    some: list[Tensor] = []
    for tensor in tensors:
        full = some and sum(t.numel() for t in some) + tensor.numel() > BUCKET_ELEMENTS
        if full or (some and some[0].dtype != tensor.dtype):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some


# --- how processes come together ------------------------------------------------------------------------------------


class LaunchEnv(NamedTuple):
    """What the environment says of this process, in the words of torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restart_count: int
    has_agent_store: bool  # someone outlives the processes, and keeps what they note

    @property
    def store(self) -> TCPStore:
        """What all processes can note things in."""
        where = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        serves = not self.has_agent_store and self.rank == 0
        try:
            return TCPStore(*where, self.world_size, serves, timedelta(minutes=5), wait_for_workers=False)
        except dist.DistError as e:
            reason = str(e).splitlines()[0]
            raise UserError(
                f"The processes cannot meet at {where[0]}:{where[1]} ({reason}). Start them again."
            ) from None


def read_launch_env() -> LaunchEnv | None:
    """None where nobody has started several processes."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if "RANK" not in found or "WORLD_SIZE" not in found:
        return None
    if wrong := [f"{name}={value}" for name, value in found.items() if not value.isdecimal()]:
        raise UserError(f"{wrong[0]} in the environment is no number. torchrun sets it; leave it to torchrun.")
    rank, size = int(found["RANK"]), int(found["WORLD_SIZE"])
    local = int(found.get("LOCAL_RANK", rank)), int(found.get("LOCAL_WORLD_SIZE", size))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchEnv(rank, size, *local, int(found.get("TORCHELASTIC_RESTART_COUNT", 0)), agent)


_connected: tuple[LaunchEnv, Store, dict[str, Any]] | None = None  # processes come together once


def require_single_process(advice: str) -> None:
    """Refuse to do one and the same thing in several processes."""
    launch = read_launch_env()
    if launch is not None and launch.world_size > 1:
        raise UserError(f"{launch.world_size} processes were started, and this run is for one. {advice}")


def silence_other_ranks() -> None:
    """Let the first process alone speak."""
    launch = read_launch_env()
    if launch is not None and launch.rank > 0:
        set_quiet()


def check_device(training: TrainingConfig) -> None:
    """Refuse a device that is not there."""
    there = torch.cuda.is_available()
    if training.device == "cuda" and not there:
        raise UserError(
            f"--device cuda: torch finds no GPU here{visible_devices_hint()}. Leave it out to compute on the CPU."
        )
    if training.device == "cpu" and training.parallel != "none" and there:
        raise UserError("--device cpu is for one process where there are GPUs; CUDA_VISIBLE_DEVICES= hides them.")


def visible_devices_hint() -> str:
    """Which GPUs were chosen, in brackets, if any were."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return "" if chosen in ("", "-1") else f" (CUDA_VISIBLE_DEVICES is {chosen})"


def select_device(dist_context: DistContext, training: TrainingConfig) -> torch.device:
    """The GPU of this process, where there are GPUs."""
    if training.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return (
        torch.device("cuda", dist_context.launch_env.local_rank)
        if isinstance(dist_context, DDPContext)
        else torch.device("cuda")
    )


def init_groups(launch_env: LaunchEnv) -> tuple[LaunchEnv, Store, dict[str, Any]]:
    """Connect the processes: NCCL between GPUs, gloo for all else."""
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


# --- when one of them fails -----------------------------------------------------------------------------------------


def is_peer_lost(e: BaseException) -> bool:
    """Whether an error only says that another process is gone."""
    return isinstance(e, dist.DistError) or (
        isinstance(e, RuntimeError) and any(word in str(e) for word in PEER_LOST_MESSAGES)
    )


def should_report_error(e: BaseException) -> bool:
    """Whether this process is the one to tell of an error that others may come to as well: the first that does.

    That another process is gone is told only where that one could not say why. A mistake that torchrun's next start
    would repeat is told once.
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
    except (RuntimeError, UserError):  # who kept the notes is gone
        return launch.rank == 0 and not is_peer_lost(e)
