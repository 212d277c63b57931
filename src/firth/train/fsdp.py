"""Fully sharded data parallelism (FSDP2): each rank stores 1/world_size of weights, gradients and optimizer state.

Every parameter is a DTensor, sharded by rows. Before a block runs, its weights are all-gathered; afterwards they are
freed. In the backward pass they are gathered again, and each gradient is reduce-scattered: summed over ranks, each rank
keeping its shard (ZeRO stage 3: Rajbhandari et al. 2020). Memory falls with the number of ranks; a step communicates
1.5 times as much as DDP, overlapped with the computation of neighbouring blocks.

Hybrid sharding (HSDP) cuts the ranks into groups, as a rule the GPUs of one machine. Each group holds the whole model,
sharded over its ranks. Weights are gathered inside of a group, over its fast links; only the gradient shards are then
all-reduced between groups. Memory falls with the size of a group alone.

A unit is gathered at once. Each block is one, unless its weights are read outside of its own forward pass or more than
once in a step (ALBERT's layers): those join the unit of embeddings and head, which stays gathered for the whole step.

Checkpoints contain whole tensors, one file per rank, so that any number of processes can resume from them.
"""

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
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, write_json
from firth.models import Model, Stack, make_model
from firth.models.hf.checkpoint import write_config_files
from firth.models.hf.convert import to_hf_tensors, unique_state_dict
from firth.models.hf.tensors import WEIGHTS_FILE, translate_disk_errors
from firth.models.init import skip_init
from firth.train.checkpoint import (
    GUARD_FILE,
    RECURRENT_STATE_FILE,
    CheckpointPayload,
    TrainState,
    prune_checkpoints,
    remove_folder,
    write_train_state,
)
from firth.train.compute import ComputeConfig
from firth.train.distributed import DDPContext, DistContext
from firth.train.dtensor import to_full_tensor
from firth.train.launch_env import LaunchEnv
from firth.train.recipe import TrainingConfig
from firth.train.writer import CheckpointWriter

REPLICATED_FILES = (RECURRENT_STATE_FILE, GUARD_FILE)  # equal on all ranks; rank 0 writes them


class FSDPContext(DDPContext):
    """Data parallelism with a shard of every weight, gradient and optimizer state per rank.

    `shard_size` ranks hold a model together; fewer than all ranks is HSDP.
    """

    strategy = "fsdp"

    def __init__(self, launch_env: LaunchEnv, store: Store, groups: Mapping[str, Any], shard_size: int = 0) -> None:
        super().__init__(launch_env, store, groups)
        self.shard_size, self.strategy = shard_size or self.world_size, "hsdp" if shard_size else "fsdp"
        self.mesh: DeviceMesh | None = None  # of HSDP

    def __str__(self) -> str:
        shards = f", {self.world_size // self.shard_size} x {self.shard_size}" if self.strategy == "hsdp" else ""
        return f"{self.world_size} processes ({self.strategy}{shards})"

    @property
    def is_sharded(self) -> bool:
        return True

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of all ranks: one dimension for FSDP, replicate x shard for HSDP."""
        if self.strategy == "fsdp":
            return init_device_mesh(device_type, (self.world_size,))
        if self.mesh is None:  # made once: it has process groups of its own
            shape = self.world_size // self.shard_size, self.shard_size
            self.mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
        return self.mesh

    def prepare_model(self, model: Model, training: TrainingConfig, compute: ComputeConfig) -> None:
        """Shard each block as a unit, gathered in the compute dtype, and all other parameters as one float32 unit."""
        half = torch.bfloat16 if compute.bf16 else torch.float16 if compute.fp16 else None
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        blocks = exact if half is None else MixedPrecisionPolicy(half, torch.float32, torch.float32)
        offload = CPUOffloadPolicy(compute.device.type == "cuda") if training.cpu_offload else OffloadPolicy()
        how: dict[str, Any] = {
            "mesh": self.device_mesh(compute.device.type),
            "offload_policy": offload,
        }
        for block in transformer_blocks(model):
            fully_shard(block, mp_policy=blocks, **how)
            register_fsdp_forward_method(block, "project_kv")
        fully_shard(model, mp_policy=exact, **how)
        register_fsdp_forward_method(model, "losses")
        for part in model.modules():
            if isinstance(part, FSDPModule):  # sum, not mean: the loss is divided by the targets of all ranks
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def reshard(self, model: Model) -> None:
        """Free gathered weights: a forward pass without backward keeps them, and the next one would read them stale."""
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def gather_model(self, model: Model) -> Model | None:
        tensors = self.gather_tensors(unique_state_dict(model))
        if not self.is_main_process:
            return None
        with skip_init():
            complete = make_model(model.config)
        for name in ("tokenizer", "objective", "forced_tokens", "eos_token_ids"):
            setattr(complete, name, getattr(model, name))
        for name, value in unique_state_dict(complete).items():
            value.copy_(tensors[name])
        return complete

    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered = {name: self.gather_to_rank(0, value) for name, value in tensors.items()}
        return {name: value for name, value in gathered.items() if value is not None}

    def any_out_of_memory(self, failed: bool) -> bool:
        """Raise: ranks that wait in a collective cannot be told to retry."""
        if failed:
            raise UserError(
                f"Out of memory, and with --parallel {self.strategy} micro-batches are not halved automatically. Halve "
                "--per-device-train-batch-size and double --gradient-accumulation-steps (with --resume --allow-change "
                "a run can continue so), pass --gradient-checkpointing or --cpu-offload, or take more processes."
            )
        return False

    def all_reduce_gradients(self, model: Model) -> None:
        """Nothing: backward has reduce-scattered them."""

    def gather_to_rank(self, rank: int, tensor: Tensor) -> Tensor | None:
        """Return the whole tensor, on the CPU of one rank. A collective: every rank must call it."""
        full = to_full_tensor(tensor)
        return full.detach().to("cpu", copy=True).contiguous() if self.rank == rank else None


def transformer_blocks(model: Model) -> list[nn.Module]:
    """Return the blocks whose weights are read in their own forward pass alone, and once in a step."""
    config = model.config
    if config.num_shared > 1 or config.share_stacks:
        return []
    skipped = int(config.value_residual)  # all layers read the first one's values
    return [block for stack in model.modules() if isinstance(stack, Stack) for block in stack.blocks[skipped:]]


# --- sharded checkpoints --------------------------------------------------------------------------------------------


class ShardedCheckpointWriter(CheckpointWriter):
    """Writes checkpoints with one file of whole tensors per rank.

    Any number of processes can resume from one, and `transformers` opens it. Gathering the tensors blocks the training;
    a background thread writes them.
    """

    def __init__(
        self,
        dist_context: DistContext,
        run_dir: Path | None,
        recipe: dict[str, Any],
        save_total_limit: int,
        model: Model,
        is_async: bool,
    ):
        assert isinstance(dist_context, FSDPContext)
        super().__init__(None, recipe, save_total_limit, model, is_async)
        self.dist_context = dist_context
        self.writer_context = dist_context.for_thread("files")
        self.run_dir = run_dir
        self.is_async = is_async

    def save(
        self, payload: CheckpointPayload, state: TrainState, before_write: Callable[[], None] = lambda: None
    ) -> None:
        self.wait()
        if self.run_dir is None:
            return
        local, state_copy = local_payload(payload, self.dist_context), replace(state)

        def write_local() -> Path:
            return self.write(local, state_copy, before_write)

        if self.is_async:
            self.pending = self.pool.submit(write_local)
        else:
            self.record_result(write_local)

    def write(self, payload: CheckpointPayload, state: TrainState, before_write: Callable[[], None]) -> Path:
        assert self.run_dir is not None
        folder = self.run_dir / f"checkpoint-{state.step}"

        def make_room() -> None:
            before_write()
            if folder.exists() and find_corruption(folder) is not None:
                remove_folder(folder)

        run_on_all_ranks(self.writer_context, make_room if self.writer_context.is_main_process else None)
        if self.writer_context.run_on_main(lambda: not folder.exists()):
            write_sharded_checkpoint(folder, payload, state, self.recipe, self.writer_context)
        if self.writer_context.is_main_process:
            prune_checkpoints(self.run_dir, state, self.save_total_limit)
        return folder


def local_payload(payload: CheckpointPayload, dist_context: FSDPContext) -> CheckpointPayload:
    """Return the tensors that this rank writes. Each tensor has one owner, so that all write about as much."""
    state = unique_state_dict(payload.model)
    owner = assign_owners(state, dist_context.world_size)

    def owned_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered = {
            name: dist_context.gather_to_rank(owner[name.rpartition("/")[0] or name], t) for name, t in tensors.items()
        }
        return {name: value for name, value in gathered.items() if value is not None}

    sharded = {
        file: owned_tensors(tensors)
        for file, tensors in payload.training_tensors.items()
        if file not in REPLICATED_FILES
    }
    replicated = {
        file: {k: v.cpu() for k, v in payload.training_tensors[file].items()}
        for file in REPLICATED_FILES
        if file in payload.training_tensors
    }
    return CheckpointPayload(
        payload.model,
        {WEIGHTS_FILE: owned_tensors(state), **sharded, **(replicated if dist_context.is_main_process else {})},
    )


def assign_owners(tensors: Mapping[str, Tensor], world_size: int) -> dict[str, int]:
    """Return the rank that writes each tensor: largest first, each to the rank with the least so far."""
    loads, owners = [0] * world_size, {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].numel(), item[0])):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += tensor.numel()
    return owners


def write_sharded_checkpoint(
    folder: Path, payload: CheckpointPayload, state: TrainState, recipe: dict[str, Any], dist_context: DistContext
) -> None:
    """Write every rank's files into one temporary folder, then rename it; a failure on any rank removes it."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    with ExitStack() as half_finished:

        def begin() -> None:
            half_finished.enter_context(atomic_folder(folder, step=state.step))
            (temporary / "training").mkdir()

        def finish() -> None:
            write_config_files(payload.model, temporary)
            write_safetensors_index(temporary)
            write_train_state(temporary / "training", state, recipe)
            half_finished.close()

        run_on_all_ranks(dist_context, begin if dist_context.is_main_process else None)
        run_on_all_ranks(dist_context, lambda: write_rank_files(temporary, payload, dist_context))
        run_on_all_ranks(dist_context, finish if dist_context.is_main_process else None)


def run_on_all_ranks(dist_context: DistContext, work: Callable[[], None] | None) -> None:
    """Run disk work on each rank; if one rank fails, all raise."""
    error: OSError | None = None
    try:
        if work is not None:
            work()
    except OSError as e:
        error = e
    if dist_context.any_process(error is not None):
        raise error or OSError(errno.EIO, "another process could not write its part")


def write_rank_files(folder: Path, payload: CheckpointPayload, dist_context: DistContext) -> None:
    """Write the files of this rank, without empty ones."""
    for file, tensors in payload.training_tensors.items():
        if file == WEIGHTS_FILE:
            write_tensors(to_hf_tensors(payload.model, tensors), folder / shard_file_name(file, dist_context))
        else:
            write_tensors(
                tensors,
                folder / "training" / (file if file in REPLICATED_FILES else shard_file_name(file, dist_context)),
            )


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    if tensors:
        with translate_disk_errors(file):
            save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata={"format": "pt"})


def shard_file_name(file: str, dist_context: DistContext) -> str:
    """Return the name of this rank's file, in the naming of `transformers`."""
    stem, suffix = file.rsplit(".", 1)
    return f"{stem}-{dist_context.rank + 1:05d}-of-{dist_context.world_size:05d}.{suffix}"


def write_safetensors_index(folder: Path) -> None:
    """Write the index that maps each weight to its file."""
    weight_map: dict[str, str] = {}
    size = 0
    for file in sorted(folder.glob(WEIGHTS_FILE.replace(".", "-*."))):
        with safe_open(file, framework="pt") as f:
            weight_map |= dict.fromkeys(f.keys(), file.name)
        size += file.stat().st_size
    write_json(folder / f"{WEIGHTS_FILE}.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})
