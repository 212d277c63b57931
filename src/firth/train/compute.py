"""Device, precision, compilation and CUDA graphs of a run: the recipe's choice, else the best for this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from threading import Thread

import torch

from firth.core.console import format_count, say, warn
from firth.core.errors import UserError
from firth.text.python_docs import cache_folder
from firth.train.distributed import SINGLE_PROCESS, DistContext, select_device, visible_devices_hint
from firth.train.recipe import TrainingConfig

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
MAX_CORES_TO_TRY_ONE = 4  # cores: with more, one thread is tried only beside other work
SHORT_RUN_MINUTES = 15  # minutes: up to here a short compilation saves more than a faster step


@dataclass(frozen=True)
class ComputeConfig:
    device: torch.device
    bf16: bool
    compile: bool
    cuda_graphs: bool = False
    fp16: bool = False
    dist_context: DistContext = SINGLE_PROCESS  # the processes of the run
    compile_regions: bool = False  # compile each kind of block, not the whole step

    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision: matmuls in 16 bits; softmax, norms and losses in float32, as autocast chooses."""
        if not (self.bf16 or self.fp16):
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.bf16 else torch.float16)

    def __str__(self) -> str:
        name = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else format_count(torch.get_num_threads(), "CPU thread")
        )
        precision = "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
        how = f", compiled{' in parts' if self.compile_regions else ''}" if self.compile else ""
        several = f"{self.dist_context}, each on " if self.dist_context.world_size > 1 else ""
        return f"{several}{name}, {precision}{how}"


def choose_compute(training: TrainingConfig, dist_context: DistContext = SINGLE_PROCESS) -> ComputeConfig:
    """Choose how to compute. Default: a GPU if there is one, with bf16; float32 on a CPU, where many emulate bf16."""
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
        say("this GPU has no bfloat16: using float16 with loss scaling")
    if (bf16 or engine.weights == "bf16") and device.type == "cpu":
        say("bfloat16 on a CPU is slow unless the CPU has bfloat16 instructions")
    if engine.pad_vocabulary and device.type == "cpu" and not bf16 and engine.fused_loss is not False:
        say("pad_vocabulary changes nothing on a CPU, where logits are computed in chunks")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = getattr(training, "model", None)
    # cuDNN's LSTMs are fused already
    compiles_by_default = device.type == "cuda" and getattr(model, "recurrent", None) is None
    compiles = compiles_by_default or bool(engine.compile_regions) if training.compile is None else training.compile
    if compiles:
        set_compile_cache_dir()
    # a replay overwrites the graph's memory: accumulated gradients and recurrent memory would be lost
    single_micro_batch = training.gradient_accumulation_steps == 1 and not getattr(training, "memory", 0)
    compiled_blocker, eager_blocker = (
        cuda_graphs_blocker(training, device, program, dist_context) for program in (compiles, False)
    )
    short_run = device.type == "cuda" and 0 < training.minutes <= SHORT_RUN_MINUTES and not engine.cuda_graphs
    if single_micro_batch and eager_blocker and not compiled_blocker:
        short_run = False  # compiled regions would rule out CUDA graphs
    # FSDP hooks gather weights between blocks, so only blocks can be compiled
    compile_in_regions = compiles and (
        dist_context.is_sharded or (short_run if engine.compile_regions is None else engine.compile_regions)
    )
    blocker = eager_blocker if compile_in_regions else compiled_blocker
    if engine.cuda_graphs and blocker:
        say(f"no CUDA graphs: {blocker}")
    graphs = (single_micro_batch and compiles if engine.cuda_graphs is None else engine.cuda_graphs) and not blocker
    return ComputeConfig(device, bf16, compiles, graphs, fp16, dist_context, compile_in_regions)


@contextmanager
def limit_threads(threads: int = 0) -> Iterator[None]:
    """Compute with `threads` CPU threads inside the `with` block (0: as before), and restore the number after it."""
    before = torch.get_num_threads()
    set_threads(threads)
    try:
        yield
    finally:
        set_threads(before)


def set_threads(threads: int) -> None:
    if threads and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def thread_choices(training: TrainingConfig, compute: ComputeConfig) -> list[int]:
    """Return the numbers of CPU threads to compare: all, and as many as other programs leave free.

    OpenMP's threads wait for each other at the end of every operation, in a loop that keeps their core busy. Beside
    other programs one of them always comes late, so that two threads on two busy cores are slower than one. Where other
    programs use half of the cores or more, nothing is compared: a short timing may fall into a moment in which they
    wait, and the run would be several times slower than planned.
    """
    several = compute.device.type == "cpu" and compute.dist_context.world_size == 1 and torch.get_num_threads() > 1
    if not several or training.threads or any(os.environ.get(name) for name in THREAD_VARIABLES):
        return []
    threads, cores = torch.get_num_threads(), process_cores()
    free = len(cores) - busy_cores(cores)
    fitting = min(threads, max(1, round(free)))
    if free <= threads / 2:
        say(
            f"other programs use {len(cores) - free:.1f} of {format_count(len(cores), 'core')}: "
            f"the run uses {format_count(fitting, 'CPU thread')}"
        )
        return [fitting]
    return sorted({threads, fitting, *([1] if threads <= MAX_CORES_TO_TRY_ONE else [])})


def process_cores() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def busy_cores(cores: set[int], seconds: float = 0.3) -> float:
    """Return how many of these cores other programs keep busy; this process sleeps meanwhile.

    Time of programs with a low priority (`nice`) does not count: they give way. Where the system has no /proc/stat, the
    load of the last minute stands for it.
    """
    before = read_core_ticks(cores)
    if not before:
        return min(load_average(), len(cores))
    time.sleep(seconds)
    after = read_core_ticks(cores)
    shares = []
    for core, ticks in before.items():
        busy, total = (now - then for now, then in zip(after.get(core, ticks), ticks, strict=True))
        shares.append(busy / total if total > 0 else 0.0)
    return sum(shares)


def read_core_ticks(cores: set[int]) -> dict[int, tuple[int, int]]:
    """Return the ticks of each core since the start of the system: busy ones and all; empty where it does not say."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    ticks = {}
    for core, *values in (line[3:].split() for line in lines if line.startswith("cpu") and line[3].isdigit()):
        if int(core) in cores:
            user, nice, system, idle, iowait, *others = map(int, values[:8])  # the columns after it are counted in user
            busy = user + system + sum(others)
            ticks[int(core)] = (busy, busy + nice + idle + iowait)
    return ticks


def load_average() -> float:
    """Return how many processes wanted a core in the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def choose_threads(choices: Sequence[int], time_step: Callable[[], float], turns: int = 2) -> None:
    """Set the number of threads with the shortest step. Each is timed in `turns`: other programs come and go.

    On an idle machine the best turn counts, since the others met a disturbance. Beside other programs the mean counts:
    there the best turn is a moment in which they slept.
    """
    if not choices:
        return
    timings: dict[int, list[float]] = {threads: [] for threads in choices}
    for threads in (*choices,) * turns:
        torch.set_num_threads(threads)
        timings[threads].append(time_step())
    summarize = fmean if load_average() > choices[-1] else min  # this run's own threads are not more than the cores
    seconds = {threads: summarize(times) for threads, times in timings.items()}
    best = min(seconds, key=lambda threads: seconds[threads])
    torch.set_num_threads(best)
    if best < choices[-1]:
        say(
            f"{format_count(best, 'CPU thread takes', 'CPU threads take')} {seconds[best]:.3f}s a step, "
            f"{choices[-1]} take {seconds[choices[-1]]:.3f}s beside other programs (load {load_average():.1f}): "
            f"the run uses {best}"
        )


def cuda_graphs_blocker(
    training: TrainingConfig, device: torch.device, is_compiled: bool, dist_context: DistContext
) -> str:
    """Return why a step, compiled as a whole or not, cannot be captured as a CUDA graph; empty where it can."""
    if device.type != "cuda":
        return "there is no CUDA device"
    if dist_context is not SINGLE_PROCESS:
        return "collectives cannot be captured"
    if getattr(getattr(training, "knowledge_transfer", None), "strategy", "none") in ("progressive", "joint"):
        return "knowledge transfer has another loss in every stage"
    if is_compiled:
        return ""
    if training.engine.weights == "bf16" or training.gradient_checkpointing:
        return "weights=bf16 and gradient_checkpointing need a step that is compiled as a whole"
    model = getattr(training, "model", None)
    in_turn = getattr(training, "memory", 0) or getattr(model, "recurrent", None) is not None
    return "state that is carried between steps needs a step that is compiled as a whole" if in_turn else ""


def set_compile_cache_dir() -> None:
    """Cache compiled kernels between runs in the user's cache folder; TORCHINDUCTOR_CACHE_DIR overrides it."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


@contextmanager
def preload_compiler(compute: ComputeConfig) -> Iterator[None]:
    """Import torch's compiler in a thread, which takes seconds, while the `with` block runs."""

    def load() -> None:
        with suppress(Exception):  # the compilation will raise it again
            import_module("torch._inductor.compile_fx")

    thread = Thread(target=load, daemon=True)
    if compute.compile:
        thread.start()
    try:
        yield
    finally:
        if compute.compile:
            thread.join()
