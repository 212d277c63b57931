"""Several processes as one: who they are, what they agree on, how they add up a step.

A `World` of one process has nothing to agree on, and so the one loop is written for all of them. No pickle is sent:
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

from firth.console import count, hush
from firth.errors import UserError
from firth.models import Model
from firth.train.deterministic import IN_ORDER, WORKSPACE
from firth.train.recipe import Training

if TYPE_CHECKING:
    from firth.train.device import Machine

T = TypeVar("T")
PARCEL = 2**23  # numbers that travel together: 32 MB of float32
PATIENCE = timedelta(days=7)  # the others wait while the first one makes shards; who has died is noticed at once
THREADS = ("batches", "files")  # beside the training: each speaks to the others for itself
LOST = ("closed by peer", "reset by peer")  # what gloo says of it


class World:
    """All processes of a run. Here there is one, with which all agree."""

    rank, size, kind = 0, 1, "none"

    @property
    def first(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.rank == 0

    def __str__(self) -> str:
        return "one process" if self.size == 1 else f"{self.size} processes ({self.kind})"

    # --- what they agree on

    def sums(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Numbers by name, added up over all. Names and their order are the same everywhere."""
        return dict(numbers)

    def highest(self, number: int) -> int:
        """The highest of all."""
        return number

    def any(self, flag: bool) -> bool:
        """Whether it is so for one of them at least."""
        return bool(self.highest(int(flag)))

    def share(self, value: T) -> T:
        """What the first one has; anything that JSON can say."""
        return value

    def once(self, work: Callable[[], T]) -> T:
        """Let the first one do something, and all know what came of it; the others wait."""
        return self.share(work() if self.first else None)  # type: ignore[return-value]

    def in_turn(self, work: Callable[[], T]) -> T:
        """Do something everywhere, the first one first: the others find what it has left."""
        if not self.first:
            self.wait()
        found = work()
        if self.first:
            self.wait()
        return found

    def wait(self) -> None:
        """Until all are here."""

    def aside(self, thread: str) -> World:
        """The same processes, for a thread beside the training (`THREADS`)."""
        return self

    def only_first(self, context: AbstractContextManager[T]) -> AbstractContextManager[T | None]:
        """A context that the first one alone is in."""
        return context if self.first else nullcontext()

    # --- the model and its gradients

    def same_weights(self, model: Model) -> None:
        """Begin with the weights of the first one."""

    def place(self, model: Model, training: Training, machine: Machine) -> None:
        """Put a model where it is computed."""
        model.to(machine.device)

    def rest(self, model: Model) -> None:
        """After a model has only been read with: give back what it took for that."""

    def whole(self, model: Model) -> Model | None:
        """The model with all of its weights, for the first one."""
        return model if self.first else None

    def one_failed(self, failed: bool) -> bool:
        """Whether memory was short in one of them, so that all try again."""
        return failed

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors on the device over all, in place."""

    def add_gradients(self, model: Model) -> None:
        """Add up the gradients over all, where that is not done yet."""

    # --- rows

    def mine(self, rows: int) -> slice:
        """Which of the rows of a step are read here: a stretch of them, as long as everyone's."""
        assert rows % self.size == 0, "check_share refuses it"
        part = rows // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def all_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors with a row for each that is read here, as of all rows of the step."""
        return dict(tensors)

    def my_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same the other way."""
        return {name: value[self.mine(len(value))] for name, value in tensors.items()}

    # --- a start that torchrun makes again

    def goes_on(self, folder: str) -> bool:
        """Whether this start is one more of a run that had begun in this folder."""
        return False

    def begins(self, folder: str) -> None:
        """Note that it has."""


ALONE = World()


class Processes(World):
    """Several, each with the whole model; the gradients of a step are added up after its backward passes.

    Nothing is sent during them, so that a process that has no memory left can still say so.
    """

    kind = "ddp"

    def __init__(self, launch: Launch, store: Store, groups: Mapping[str, Any]) -> None:
        self.launch, self.store, self.groups, self.group = launch, store, groups, groups["main"]
        self.rank, self.size = launch.rank, launch.size

    def sums(self, numbers: Mapping[str, float]) -> dict[str, float]:
        found = torch.tensor(list(numbers.values()), dtype=torch.float64)  # exact for whole numbers up to 2 ** 53
        dist.all_reduce(found, group=self.group)
        return {k: type(old)(new) for (k, old), new in zip(numbers.items(), found.tolist(), strict=True)}

    def highest(self, number: int) -> int:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)

    def share(self, value: T) -> T:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor(len(data))
        dist.broadcast(length, 0, group=self.group)
        data = data if self.first else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.group)
        return value if self.first else json.loads(bytes(data.tolist()))

    def wait(self) -> None:
        self.highest(0)

    def aside(self, thread: str) -> World:
        other = copy.copy(self)
        other.group = self.groups[thread]
        return other

    def same_weights(self, model: Model) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0, group=None if tensor.is_cuda else self.group)

    def one_failed(self, failed: bool) -> bool:
        return self.any(failed)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """A parcel is packed while the one before it is under way."""
        sent: list[tuple[list[Tensor], Tensor, Any]] = []
        for some in parcels(tensors):
            flat = torch.cat([t.flatten() for t in some])
            sent.append((some, flat, dist.all_reduce(flat, async_op=True)))
            if len(sent) > 1:
                unpack(*sent.pop(0))
        for parcel in sent:
            unpack(*parcel)

    @torch.no_grad()
    def add_gradients(self, model: Model) -> None:
        """A weight that no process has used has no gradient, as in one process."""
        learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        used = self.sums({name: int(p.grad is not None) for name, p in learning})
        found = [p for name, p in learning if used[name]]
        for p in found:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.add([p.grad for p in found if p.grad is not None])

    def all_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, value in tensors.items():
            parts = [torch.empty_like(value) for _ in range(self.size)]
            dist.all_gather(parts, value.contiguous())
            found[name] = torch.cat(parts)
        return found

    def goes_on(self, folder: str) -> bool:
        """By a note that outlives the processes; where it cannot, by torchrun's count of the starts.

        The first one looks, which is also who writes it: another may look too late.
        """
        if not self.launch.has_agent:
            return self.launch.restarts > 0
        return self.once(lambda: bool(self.store.check([begun(folder)])))

    def begins(self, folder: str) -> None:
        if self.first:
            self.store.set(begun(folder), "yes")


def begun(folder: str) -> str:
    return f"firth/begun/{os.path.abspath(folder)}"  # noqa: PTH100, a name and no file


def unpack(tensors: list[Tensor], flat: Tensor, work: Any) -> None:
    """Put a parcel that has come back where its tensors were."""
    work.wait()
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def parcels(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one kind in their order, so many together that they are worth sending."""
    some: list[Tensor] = []
    for tensor in tensors:
        full = some and sum(t.numel() for t in some) + tensor.numel() > PARCEL
        if full or (some and some[0].dtype != tensor.dtype):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some


# --- how processes come together ------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """What the environment says of this process, in the words of torchrun."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int
    has_agent: bool  # someone outlives the processes, and keeps what they note

    @property
    def store(self) -> TCPStore:
        """What all processes can note things in."""
        where = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        serves = not self.has_agent and self.rank == 0
        try:
            return TCPStore(*where, self.size, serves, timedelta(minutes=5), wait_for_workers=False)
        except dist.DistError as e:
            reason = str(e).splitlines()[0]
            raise UserError(
                f"The processes cannot meet at {where[0]}:{where[1]} ({reason}). Start them again."
            ) from None


def launched() -> Launch | None:
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
    return Launch(rank, size, *local, int(found.get("TORCHELASTIC_RESTART_COUNT", 0)), agent)


_met: tuple[Launch, Store, dict[str, Any]] | None = None  # processes come together once


def join(training: Training) -> World:
    """All processes that train together. What cannot be is refused before they are connected."""
    launch, kind = launched(), training.parallel
    check_device(training)
    if kind == "none":
        refuse_several("Pass --parallel ddp (each has the whole model) or --parallel fsdp (each has a part of it).")
        return ALONE
    if launch is None:
        raise UserError(
            f"--parallel {kind} is for several processes, which torchrun starts, one for each GPU: "
            f"torchrun --nproc-per-node 2 -m firth pretrain ... --parallel {kind}"
        )
    if torch.cuda.is_available() and launch.local_size > torch.cuda.device_count():
        raise UserError(
            f"{launch.local_size} processes were started on this machine, and it has "
            f"{count(torch.cuda.device_count(), 'GPU')}: torchrun --nproc-per-node {torch.cuda.device_count()}"
        )
    quiet_but_one()
    if training.deterministic:  # which must be known before CUDA starts
        os.environ.setdefault(WORKSPACE, IN_ORDER[0])
    found = meet(launch)
    if kind == "ddp":
        return Processes(*found)
    from firth.train.shard import Sharded  # which takes a second to load

    return Sharded(*found)


def refuse_several(advice: str) -> None:
    """Refuse to do one and the same thing in several processes."""
    launch = launched()
    if launch is not None and launch.size > 1:
        raise UserError(f"{launch.size} processes were started, and this run is for one. {advice}")


def quiet_but_one() -> None:
    """Let the first process alone speak."""
    launch = launched()
    if launch is not None and launch.rank > 0:
        hush()


def check_device(training: Training) -> None:
    """Refuse a device that is not there."""
    there = torch.cuda.is_available()
    if training.device == "cuda" and not there:
        raise UserError(f"--device cuda: torch finds no GPU here{meant()}. Leave it out to compute on the CPU.")
    if training.device == "cpu" and training.parallel != "none" and there:
        raise UserError("--device cpu is for one process where there are GPUs; CUDA_VISIBLE_DEVICES= hides them.")


def meant() -> str:
    """Which GPUs were chosen, in brackets, if any were."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return "" if chosen in ("", "-1") else f" (CUDA_VISIBLE_DEVICES is {chosen})"


def device_of(world: World, training: Training) -> torch.device:
    """The GPU of this process, where there are GPUs."""
    if training.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.launch.local_rank) if isinstance(world, Processes) else torch.device("cuda")


def meet(launch: Launch) -> tuple[Launch, Store, dict[str, Any]]:
    """Connect the processes: NCCL between GPUs, gloo for all else."""
    global _met
    if _met is None:
        store = launch.store
        device = torch.device("cuda", launch.local_rank) if torch.cuda.is_available() else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device else "gloo",
            store=PrefixStore(f"firth/start-{launch.restarts}", store),
            rank=launch.rank,
            world_size=launch.size,
            device_id=device,
        )
        groups = {name: dist.new_group(backend="gloo", timeout=PATIENCE) for name in ("main", *THREADS)}
        _met = launch, store, groups
        atexit.register(dist.destroy_process_group)
    return _met


# --- when one of them fails -----------------------------------------------------------------------------------------


def is_lost(e: BaseException) -> bool:
    """Whether an error only says that another process is gone."""
    return isinstance(e, dist.DistError) or (isinstance(e, RuntimeError) and any(word in str(e) for word in LOST))


def may_say(e: BaseException) -> bool:
    """Whether this process is the one to tell of an error that others may come to as well: the first that does.

    That another process is gone is told only where that one could not say why. A mistake that torchrun's next start
    would repeat is told once.
    """
    launch = launched()
    if launch is None or launch.size == 1:
        return True
    if _met is None and not launch.has_agent:
        return launch.rank == 0
    try:
        store = launch.store if _met is None else _met[1]
        alone = store.add(f"firth/failed/{launch.restarts}", 1) == 1
        return alone if is_lost(e) else store.add(f"firth/said/{e}", 1) == 1
    except (RuntimeError, UserError):  # who kept the notes is gone
        return launch.rank == 0 and not is_lost(e)
