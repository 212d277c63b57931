"""A model in parts, one for each process (FSDP2): its layers are gathered when their turn comes, and given back."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from firth.errors import UserError
from firth.files import damage, whole_folder, write_json
from firth.models import Model, Stack, make_model
from firth.models.weights import WEIGHTS, own_state, to_hf, write_settings
from firth.train.checkpoint import CARRY, GUARD, Kept, State, disk_errors, remove_folder, tidy, write_state
from firth.train.device import Machine
from firth.train.parallel import Processes, World
from firth.train.parts import whole
from firth.train.recipe import Training
from firth.train.writer import Writer

EVERYONES = (CARRY, GUARD)  # files that are the same in all processes, and which the first one writes


class Sharded(Processes):
    """Several, each with a part of every weight, of its gradient and of what the optimizer knows of it."""

    kind = "fsdp"

    def place(self, model: Model, training: Training, machine: Machine) -> None:
        """Blocks are gathered one by one, in 16 bits where the machine computes so; all else with the whole model."""
        half = torch.bfloat16 if machine.bf16 else torch.float16 if machine.fp16 else None
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        blocks = exact if half is None else MixedPrecisionPolicy(half, torch.float32, torch.float32)
        offload = CPUOffloadPolicy(machine.device.type == "cuda") if training.cpu_offload else OffloadPolicy()
        how: dict[str, Any] = {"mesh": init_device_mesh(machine.device.type, (self.size,)), "offload_policy": offload}
        for block in blocks_of(model):
            fully_shard(block, mp_policy=blocks, **how)
            register_fsdp_forward_method(block, "keys_of")
        fully_shard(model, mp_policy=exact, **how)
        register_fsdp_forward_method(model, "losses")
        for part in model.modules():
            if isinstance(part, FSDPModule):  # sums, as a loss here is divided by what all processes are asked
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def rest(self, model: Model) -> None:
        """What a pass without a way back has gathered would be taken for the weights of the next one."""
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def whole(self, model: Model) -> Model | None:
        tensors = {name: self.kept_by(0, value) for name, value in own_state(model).items()}
        if not self.first:
            return None
        complete = make_model(model.config)
        for name in ("tokenizer", "objective", "forced", "ends"):
            setattr(complete, name, getattr(model, name))
        for name, value in own_state(complete).items():
            found = tensors[name]
            assert found is not None
            value.copy_(found)
        return complete

    def one_failed(self, failed: bool) -> bool:
        """Who waits for the part of another cannot be told to try again."""
        if failed:
            raise UserError(
                "Out of memory, and with --parallel fsdp micro-batches are not halved by themselves. Halve "
                "--per-device-train-batch-size and double --gradient-accumulation-steps (with --resume --allow-change "
                "a run goes on so), pass --gradient-checkpointing or --cpu-offload, or take more processes."
            )
        return False

    def add_gradients(self, model: Model) -> None:
        """They are, by now."""

    def kept_by(self, rank: int, tensor: Tensor) -> Tensor | None:
        """All of a tensor in the host's memory of one process; every process must ask."""
        found = whole(tensor)
        return found.detach().to("cpu", copy=True).contiguous() if self.rank == rank else None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [block for stack in model.modules() if isinstance(stack, Stack) for block in stack.blocks]


# --- checkpoints that all write -------------------------------------------------------------------------------------


class PartsWriter(Writer):
    """Writes checkpoints in which each process has a file of its own, with some of the tensors, whole.

    So any number of processes can go on from one, and `transformers` opens it. Tensors are gathered while the training
    waits; they are written beside it.
    """

    def __init__(self, world: World, run: Path | None, recipe: dict[str, Any], keep: int, model: Model, beside: bool):
        assert isinstance(world, Sharded)
        super().__init__(None, recipe, keep, model, beside)
        self.world, self.files, self.run, self.beside = world, world.aside("files"), run, beside

    def save(self, kept: Kept, state: State, first: Callable[[], None] = lambda: None) -> None:
        self.wait()
        if self.run is None:
            return
        mine, now = part_of(kept, self.world), replace(state)

        def work() -> Path:
            return self.write(mine, now, first)

        if self.beside:
            self.writing = self.pool.submit(work)
        else:
            self.settle(work)

    def write(self, kept: Kept, state: State, first: Callable[[], None]) -> Path:
        assert self.run is not None
        folder = self.run / f"checkpoint-{state.step}"

        def make_room() -> None:
            first()
            if folder.exists() and damage(folder) is not None:
                remove_folder(folder)

        together(self.files, make_room if self.files.first else None)
        if self.files.once(lambda: not folder.exists()):
            write_parts(folder, kept, state, self.recipe, self.files)
        if self.files.first:
            tidy(self.run, state, self.keep)
        return folder


def part_of(kept: Kept, world: Sharded) -> Kept:
    """What this process writes of a run. Each tensor has one owner, so that all write about as much."""
    state = own_state(kept.model)
    owner = owners(state, world.size)

    def mine(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: world.kept_by(owner[name.rpartition("/")[0] or name], t) for name, t in tensors.items()}
        return {name: value for name, value in found.items() if value is not None}

    others = {file: mine(tensors) for file, tensors in kept.training.items() if file not in EVERYONES}
    same = {file: {k: v.cpu() for k, v in kept.training[file].items()} for file in EVERYONES if file in kept.training}
    return Kept(kept.model, {WEIGHTS: mine(state), **others, **(same if world.first else {})})


def owners(tensors: Mapping[str, Tensor], size: int) -> dict[str, int]:
    """Which process writes each tensor: the largest first, each to whom has least so far."""
    loads, found = [0] * size, {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].numel(), item[0])):
        found[name] = loads.index(min(loads))
        loads[found[name]] += tensor.numel()
    return found


def write_parts(folder: Path, kept: Kept, state: State, recipe: dict[str, Any], world: World) -> None:
    """Each process its files into one folder, which then becomes whole, or is removed where one could not write."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    with ExitStack() as half_finished:

        def begin() -> None:
            half_finished.enter_context(whole_folder(folder, step=state.step))
            (temporary / "training").mkdir()

        def finish() -> None:
            write_settings(kept.model, temporary)
            write_index(temporary)
            write_state(temporary / "training", state, recipe)
            half_finished.close()

        together(world, begin if world.first else None)
        together(world, lambda: write_part(temporary, kept, world))
        together(world, finish if world.first else None)


def together(world: World, work: Callable[[], None] | None) -> None:
    """Let each process do its work on the disk; where one fails, all do."""
    error: OSError | None = None
    try:
        if work is not None:
            work()
    except OSError as e:
        error = e
    if world.any(error is not None):
        raise error or OSError(errno.EIO, "another process could not write its part")


def write_part(folder: Path, kept: Kept, world: World) -> None:
    """The files of this process; none where it has nothing to write in one."""
    for file, tensors in kept.training.items():
        if file == WEIGHTS:
            write_tensors(to_hf(kept.model, tensors), folder / numbered(file, world))
        else:
            write_tensors(tensors, folder / "training" / (file if file in EVERYONES else numbered(file, world)))


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    if tensors:
        with disk_errors(file):
            save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata={"format": "pt"})


def numbered(file: str, world: World) -> str:
    """The name of a part of a file, as `transformers` counts them."""
    stem, suffix = file.rsplit(".", 1)
    return f"{stem}-{world.rank + 1:05d}-of-{world.size:05d}.{suffix}"


def write_index(folder: Path) -> None:
    """Which file each weight is in."""
    places: dict[str, str] = {}
    size = 0
    for file in sorted(folder.glob(WEIGHTS.replace(".", "-*."))):
        with safe_open(file, framework="pt") as f:
            places |= dict.fromkeys(f.keys(), file.name)
        size += file.stat().st_size
    write_json(folder / f"{WEIGHTS}.index.json", {"metadata": {"total_size": size}, "weight_map": places})
