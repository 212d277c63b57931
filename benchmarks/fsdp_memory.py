"""Measure on one GPU what a rank of n needs with DDP, FSDP and HSDP, and how FSDP overlaps its copies with computation.

    python benchmarks/fsdp_memory.py bert-base gpt2-medium llama-3.2-1b --processes 1 8 64 --optim muon adamw
    python benchmarks/fsdp_memory.py llama-3.2-1b --overlap --batch-size 8 --length 1024

Memory: torch's `fake` process group stands for n ranks, of which this process is rank 0. Collectives allocate what real
ones do and move nothing, so that the values are meaningless and the memory is that of a rank: weights, gradients,
optimizer state, gathered units, activations. `held` is what stays between steps, `peak` the most in a step. `counted`
is the formula of docs/scaling.md for weights, gradients and optimizer state; gradients are freed between steps.

Overlap: one rank with NCCL. FSDP runs the same copies, gathers and reductions as with n ranks, on streams of their own;
the bytes stay on the device. From a profiler trace the time of these streams is split into the part beside kernels of
the compute stream, and the exposed rest. It shows order and prefetching, not the speed of a network.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from firth.models import Model, get_preset, make_model
from firth.objectives import Batch
from firth.train import ComputeConfig, TrainingConfig, TrainingRun, choose_compute
from firth.train.distributed import DDPContext
from firth.train.fsdp import FSDPContext
from firth.train.launch_env import LaunchEnv
from firth.train.optim import make_optimizer
from firth.train.resources import estimate_resources
from firth.train.step import build_step_runner, train_step

GPUS_PER_MACHINE = 8  # HSDP shards over these
WARMUP_STEPS = 3  # the first allocates the optimizer state, and compiles
TRACED_STEPS = 2
OVERLAP_COLUMNS = ("model", "optim", "step ms", "compute ms", "other streams ms", "overlapped ms", "share %")
Interval = tuple[float, float]  # start and end, in microseconds


class MemoryRow(NamedTuple):
    model: str
    parameters: int
    optim: str
    way: str
    processes: int
    counted_gb: float
    held_gb: float
    peak_gb: float


class Overlap(NamedTuple):
    """Microseconds of a traced step."""

    step: float
    compute: float  # kernels of the compute stream
    communication: float  # kernels and copies of all other streams
    overlapped: float  # of them beside the compute stream

    @property
    def share(self) -> float:
        return self.overlapped / self.communication if self.communication else 1.0


class Step:
    """A model with its optimizer, prepared for a way of parallelism, that can take steps."""

    def __init__(self, model: Model, training: TrainingConfig, context: DDPContext, rows: int) -> None:
        self.compute: ComputeConfig = replace(choose_compute(training, context), cuda_graphs=False)
        model, config = deepcopy(model), model.config
        context.prepare_model(model, training, self.compute)
        self.run = TrainingRun(training, self.compute, model, lambda step: [])
        self.runner, self.optimizer = build_step_runner(self.run), make_optimizer(model, training)
        ids = np.random.default_rng(0).integers(10, config.vocab_size, (rows, training.max_seq_length))
        targets = np.tile(np.arange(0, training.max_seq_length, 7), (rows, 1))
        if config.architecture == "encoder":
            self.batch = Batch(ids, target_positions=targets, labels=np.take_along_axis(ids, targets, 1))
        else:
            self.batch = Batch(ids, labels=np.roll(ids, -1, 1))

    def take(self, step: int) -> None:
        train_step(self.run, self.runner, self.optimizer, [self.batch], step, 1e-4)


def make_context(way: str, size: int) -> DDPContext:
    """Return the context of rank 0 of `size` in the process group that is initialized."""
    launch = LaunchEnv(0, size, 0, min(size, GPUS_PER_MACHINE), 0, False)
    store: Any = None
    groups = {"main": None}
    if way == "ddp":
        return DDPContext(launch, store, groups)
    return FSDPContext(launch, store, groups, shard_size=min(size, GPUS_PER_MACHINE) if way == "hsdp" else 0)


def init_fake_group(size: int) -> None:
    """Stand for `size` ranks without a network: this is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)


def measure_memory(name: str, model: Model, training: TrainingConfig, size: int, rows: int) -> MemoryRow:
    """Take steps as rank 0 of `size` and return the memory of this rank."""
    init_fake_group(size)
    try:
        context = make_context(training.parallel, size)
        step = Step(model, training, context, rows)
        device = step.compute.device
        for i in range(2):
            reset_peak(device)
            step.take(i)
        held, peak = allocated(device)
    finally:
        step = context = None  # type: ignore[assignment]
        dist.destroy_process_group()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    estimate = estimate_resources(model.config, training)
    shards = 1 if training.parallel == "ddp" else min(size, GPUS_PER_MACHINE) if training.parallel == "hsdp" else size
    counted = estimate.memory_bytes / shards
    return MemoryRow(
        name, estimate.parameters, training.optim, training.parallel, size, counted / 1e9, held / 1e9, peak / 1e9
    )


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allocated(device: torch.device) -> tuple[int, int]:
    """Return the bytes that are allocated now, and the most since the reset; 0 on a CPU, which does not count them."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


# --- overlap ----------------------------------------------------------------------------------------------------------


def measure_overlap(model: Model, training: TrainingConfig, rows: int, trace: Path) -> Overlap:
    """Trace steps of one rank with NCCL."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        step = Step(model, training, make_context("fsdp", 1), rows)
        for i in range(WARMUP_STEPS):
            step.take(i)
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profiler:
            for i in range(TRACED_STEPS):
                step.take(WARMUP_STEPS + i)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(trace))
    finally:
        dist.destroy_process_group()
    return read_overlap(json.loads(trace.read_text())["traceEvents"], TRACED_STEPS)


def read_overlap(events: Iterable[dict[str, Any]], steps: int) -> Overlap:
    """Split the device time of a Chrome trace: the busiest stream computes, all others communicate."""
    by_stream: dict[int, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            by_stream[event["args"]["stream"]].append((event["ts"], event["ts"] + event["dur"]))
    unions = {stream: union(intervals) for stream, intervals in by_stream.items()}
    computing = max(unions, key=lambda stream: length(unions[stream]))
    compute = unions.pop(computing)
    others = union([interval for intervals in unions.values() for interval in intervals])
    everything = union([*compute, *others])
    span = everything[-1][1] - everything[0][0]
    beside = length(compute) + length(others) - length(everything)
    return Overlap(*(x / steps for x in (span, length(compute), length(others), beside)))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that touch.

    >>> union([(0, 2), (5, 6), (1, 3)])
    [(0, 3), (5, 6)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def format_cell(x: Any) -> str:
    return f"{x:.2f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="presets")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ways", nargs="+", default=["ddp", "fsdp", "hsdp"], choices=["ddp", "fsdp", "hsdp"])
    parser.add_argument("--optim", nargs="+", default=["muon"], choices=["adamw", "muon", "adafactor", "lamb"])
    parser.add_argument("--batch-size", type=int, default=8, help="rows per process")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--overlap", action="store_true", help="trace one rank instead of measuring memory")
    parser.add_argument("--trace", type=Path, help="keep the trace of --overlap here")
    args = parser.parse_args()
    training = TrainingConfig(
        max_seq_length=args.length,
        per_device_train_batch_size=args.batch_size,
        compile=args.compile,
        gradient_checkpointing=args.gradient_checkpointing,
    )
    names = OVERLAP_COLUMNS if args.overlap else MemoryRow._fields
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for name in args.models:
        torch.manual_seed(0)
        model = make_model(get_preset(name))
        for optim in args.optim:
            setting = replace(training, optim=optim)
            for row in (
                measure_overlaps(name, model, setting, args) if args.overlap else measure(name, model, setting, args)
            ):
                print(f"| {' | '.join(map(format_cell, row))} |", flush=True)


def measure(name: str, model: Model, training: TrainingConfig, args: argparse.Namespace) -> Iterator[MemoryRow]:
    for way in args.ways:
        for size in args.processes:
            if way != "fsdp" and size == 1:
                continue
            try:
                yield measure_memory(name, model, replace(training, parallel=way), size, args.batch_size)
            except torch.OutOfMemoryError:
                print(f"{name} {training.optim} {way} {size}: out of memory", flush=True)


def measure_overlaps(
    name: str, model: Model, training: TrainingConfig, args: argparse.Namespace
) -> Iterator[tuple[Any, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        trace = args.trace or Path(folder) / "trace.json"
        found = measure_overlap(model, replace(training, parallel="fsdp"), args.batch_size, trace)
    yield (name, training.optim, *(x / 1000 for x in found), 100 * found.share)


if __name__ == "__main__":
    main()
