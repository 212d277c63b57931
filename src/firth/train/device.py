"""Where a run computes, and in which precision: what the machine really does well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from threading import Thread

import torch

from firth.console import say, warn
from firth.errors import UserError
from firth.text.pydocs import cache_folder
from firth.train.parallel import ALONE, World, device_of, meant
from firth.train.recipe import Training

SOON = 15  # minutes, up to which a step that is ready sooner is worth more than one that is faster


@dataclass(frozen=True)
class Machine:
    device: torch.device
    bf16: bool
    compile: bool
    graphs: bool = False
    fp16: bool = False
    world: World = ALONE  # who computes beside this process
    parts: bool = False  # each kind of block is a program, not the step as a whole

    def precision(self) -> AbstractContextManager[object]:
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
        how = f", compiled{' in parts' if self.parts else ''}" if self.compile else ""
        several = f"{self.world}, each on " if self.world.size > 1 else ""
        return f"{several}{name}, {precision}{how}"


def choose_machine(training: Training, world: World = ALONE) -> Machine:
    """A GPU where there is one. On a CPU bfloat16 is emulated on many machines and slower by orders of magnitude."""
    device = device_of(world, training)
    if device.type == "cpu" and training.device == "auto" and meant():
        warn(f"torch finds no GPU here{meant()}: the CPU computes.")
    can = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if (training.bf16 or training.weights == "bf16") and device.type == "cuda" and not can:
        raise UserError("This GPU has no bfloat16: leave --bf16 and --weights out.")
    bf16 = can and not training.fp16 if training.bf16 is None else training.bf16
    lacks = device.type == "cuda" and not can and training.bf16 is None
    fp16 = lacks if training.fp16 is None else training.fp16
    if lacks and training.fp16 is None:
        say("this GPU has no bfloat16: float16 is taken, with a loss that is scaled up")
    if (bf16 or training.weights == "bf16") and device.type == "cpu":
        say("bfloat16 on a CPU was asked for: expect it to be slow where the CPU has no such instructions.")
    if training.pad_vocabulary and device.type == "cpu" and not bf16 and training.fused_loss is not False:
        say("pad_vocabulary changes nothing on a CPU, where scores are computed in pieces")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = getattr(training, "model", None)
    gains = device.type == "cuda" and getattr(model, "recurrent", None) is None  # cuDNN's LSTMs are programs already
    compiles = gains or bool(training.compile_parts) if training.compile is None else training.compile
    if compiles:
        keep_compiled()
    # what is in a graph's memory does not outlive the next replay: neither gradients nor what a model remembers
    one = training.gradient_accumulation_steps == 1 and not getattr(training, "memory", 0)
    whole, apart = (no_graphs(training, device, program, world) for program in (compiles, False))
    soon = device.type == "cuda" and 0 < training.minutes <= SOON and not training.cuda_graphs
    soon = soon and not (one and apart and not whole)  # parts would cost it its graphs
    # fsdp gathers the weights of a block before it is computed
    parts = compiles and (world.kind == "fsdp" or (soon if training.compile_parts is None else training.compile_parts))
    why = apart if parts else whole
    if training.cuda_graphs and why:
        say(f"no CUDA graphs: {why}")
    graphs = (one and compiles if training.cuda_graphs is None else training.cuda_graphs) and not why
    return Machine(device, bf16, compiles, graphs, fp16, world, parts)


def no_graphs(training: Training, device: torch.device, program: bool, world: World) -> str:
    """Why the steps, a `program` each or not, cannot be replayed as CUDA graphs; nothing where they can."""
    if device.type != "cuda":
        return "there is no CUDA device"
    if world is not ALONE:
        return "what several processes say to each other is in none"
    if program:
        return ""
    if training.weights == "bf16" or training.gradient_checkpointing:
        return "weights=bf16 and gradient_checkpointing need a step that is compiled as a whole for that"
    model = getattr(training, "model", None)
    in_turn = getattr(training, "memory", 0) or getattr(model, "recurrent", None) is not None
    return "rows that go on from step to step need a step that is compiled as a whole for that" if in_turn else ""


def keep_compiled() -> None:
    """Let torch keep what it compiles between runs, in the user's cache folder unless TORCHINDUCTOR_CACHE_DIR says."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


@contextmanager
def loading_compiler(machine: Machine) -> Iterator[None]:
    """Load torch's compiler, which takes seconds, beside other work, where it will be needed after that."""

    def load() -> None:
        with suppress(Exception):  # whoever compiles meets it again, and says so
            import_module("torch._inductor.compile_fx")

    thread = Thread(target=load, daemon=True)
    if machine.compile:
        thread.start()
    try:
        yield
    finally:
        if machine.compile:
            thread.join()
