"""Where a run computes, and in which precision: what the machine really does well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from threading import Thread

import torch

from firth.core.console import say, warn
from firth.core.errors import UserError
from firth.text.python_docs import cache_folder
from firth.train.distributed import SINGLE_PROCESS, DistContext, select_device, visible_devices_hint
from firth.train.recipe import TrainingConfig

SHORT_RUN_MINUTES = 15  # minutes, up to which a step that is ready sooner is worth more than one that is faster


@dataclass(frozen=True)
class ComputeConfig:
    device: torch.device
    bf16: bool
    compile: bool
    cuda_graphs: bool = False
    fp16: bool = False
    dist_context: DistContext = SINGLE_PROCESS  # who computes beside this process
    compile_regions: bool = False  # each kind of block is a program, not the step as a whole

    def autocast(self) -> AbstractContextManager[object]:
        """Products in 16 bits where that is so; softmax, norms and losses stay in 32 (autocast's own choice)."""
        if not (self.bf16 or self.fp16):
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.bf16 else torch.float16)

    def __str__(self) -> str:
        name = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"{torch.get_num_threads()} CPU threads"
        )
        precision = "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
        how = f", compiled{' in parts' if self.compile_regions else ''}" if self.compile else ""
        several = f"{self.dist_context}, each on " if self.dist_context.world_size > 1 else ""
        return f"{several}{name}, {precision}{how}"


def choose_compute(training: TrainingConfig, dist_context: DistContext = SINGLE_PROCESS) -> ComputeConfig:
    """A GPU where there is one. On a CPU bfloat16 is emulated on many machines and slower by orders of magnitude."""
    device, engine = select_device(dist_context, training), training.engine
    if device.type == "cpu" and training.device == "auto" and visible_devices_hint():
        warn(f"torch finds no GPU here{visible_devices_hint()}: the CPU computes.")
    can = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if (training.bf16 or engine.weights == "bf16") and device.type == "cuda" and not can:
        raise UserError("This GPU has no bfloat16: leave --bf16 and engine.weights out.")
    bf16 = can and not training.fp16 if training.bf16 is None else training.bf16
    lacks = device.type == "cuda" and not can and training.bf16 is None
    fp16 = lacks if training.fp16 is None else training.fp16
    if lacks and training.fp16 is None:
        say("this GPU has no bfloat16: float16 is taken, with a loss that is scaled up")
    if (bf16 or engine.weights == "bf16") and device.type == "cpu":
        say("bfloat16 on a CPU was asked for: expect it to be slow where the CPU has no such instructions.")
    if engine.pad_vocabulary and device.type == "cpu" and not bf16 and engine.fused_loss is not False:
        say("pad_vocabulary changes nothing on a CPU, where scores are computed in pieces")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = getattr(training, "model", None)
    gains = device.type == "cuda" and getattr(model, "recurrent", None) is None  # cuDNN's LSTMs are programs already
    compiles = gains or bool(engine.compile_regions) if training.compile is None else training.compile
    if compiles:
        set_compile_cache_dir()
    # what is in a graph's memory does not outlive the next replay: neither gradients nor what a model remembers
    one = training.gradient_accumulation_steps == 1 and not getattr(training, "memory", 0)
    whole, apart = (cuda_graphs_blocker(training, device, program, dist_context) for program in (compiles, False))
    soon = device.type == "cuda" and 0 < training.minutes <= SHORT_RUN_MINUTES and not engine.cuda_graphs
    soon = soon and not (one and apart and not whole)  # parts would cost it its graphs
    # fsdp gathers the weights of a block before it is computed
    parts = compiles and (
        dist_context.strategy == "fsdp" or (soon if engine.compile_regions is None else engine.compile_regions)
    )
    why = apart if parts else whole
    if engine.cuda_graphs and why:
        say(f"no CUDA graphs: {why}")
    graphs = (one and compiles if engine.cuda_graphs is None else engine.cuda_graphs) and not why
    return ComputeConfig(device, bf16, compiles, graphs, fp16, dist_context, parts)


def cuda_graphs_blocker(
    training: TrainingConfig, device: torch.device, is_compiled: bool, dist_context: DistContext
) -> str:
    """Why the steps, a `is_compiled` each or not, cannot be replayed as CUDA graphs; nothing where they can."""
    if device.type != "cuda":
        return "there is no CUDA device"
    if dist_context is not SINGLE_PROCESS:
        return "what several processes say to each other is in none"
    if is_compiled:
        return ""
    if training.engine.weights == "bf16" or training.gradient_checkpointing:
        return "weights=bf16 and gradient_checkpointing need a step that is compiled as a whole for that"
    model = getattr(training, "model", None)
    in_turn = getattr(training, "memory", 0) or getattr(model, "recurrent", None) is not None
    return "rows that go on from step to step need a step that is compiled as a whole for that" if in_turn else ""


def set_compile_cache_dir() -> None:
    """Let torch keep what it compiles between runs, in the user's cache folder unless TORCHINDUCTOR_CACHE_DIR says."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


@contextmanager
def preload_compiler(compute: ComputeConfig) -> Iterator[None]:
    """Load torch's compiler, which takes seconds, beside other work, where it will be needed after that."""

    def load() -> None:
        with suppress(Exception):  # whoever compiles meets it again, and says so
            import_module("torch._inductor.compile_fx")

    thread = Thread(target=load, daemon=True)
    if compute.compile:
        thread.start()
    try:
        yield
    finally:
        if compute.compile:
            thread.join()
