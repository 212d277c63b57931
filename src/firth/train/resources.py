"""Memory, disk and time of a run, estimated before the model is built.

A weight that is trained in float32 takes 4 bytes, its gradient 4 and AdamW's two moments 8. So a model of 1 billion
parameters needs 16 GB before the first activation (Rajbhandari et al. 2020, "ZeRO", section 3.1). The model is built on
torch's meta device, which has shapes and no memory. Activations depend on the batch and on kernels and are not counted:
a run that is refused here cannot fit; one that is not refused may still run out of memory.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch

from firth.core.console import format_duration, warn
from firth.core.errors import UserError
from firth.core.files import check_disk_space, format_bytes
from firth.core.memory import check_memory, free_memory
from firth.models import Model, ModelConfig, flops_per_token, make_model
from firth.models.parameters import FLOAT_BYTES
from firth.train.muon import hidden_matrices
from firth.train.recipe import TrainingConfig

TOKEN_ID_BYTES = 8  # the ids of a batch are int64
MAX_PARAMETERS_PER_TOKEN = 100  # more is warned about; compute-optimal models have 1/20 (Hoffmann et al. 2022)
MIN_WARNED_PARAMETERS = 10_000_000  # smaller models train in minutes anyway
GPU_TRAINING_SHARE = 0.45  # of a 16-bit matmul's speed: 0.43 to 0.64 in docs/results.md (8 layers of 512, bert-base)
MAX_STEP_SECONDS = 60  # a longer step is warned about


class ResourceEstimate(NamedTuple):
    """What a run needs, in bytes, parameters and floating-point operations."""

    parameters: int
    memory_bytes: int  # weights, gradients and optimizer state
    checkpoint_bytes: int  # weights, optimizer state and averaged weights
    step_flops: float  # forward and backward of one optimizer step
    copies_checkpoints: bool  # into host memory, to write them in the background

    def needed_memory(self, device: torch.device) -> int:
        """Bytes on this device; on a CPU the copy of a checkpoint lies in the same memory."""
        return self.memory_bytes + self.checkpoint_bytes * (self.copies_checkpoints and device.type == "cpu")

    def step_seconds(self, flops_per_second: float) -> float:
        return self.step_flops / flops_per_second


def estimate_resources(config: ModelConfig, training: TrainingConfig, trainable_share: float = 1.0) -> ResourceEstimate:
    """Estimate a run with this model; `trainable_share` of its weights are trained (LoRA: few)."""
    tokens = training.global_batch_size * training.max_seq_length
    check_memory(
        TOKEN_ID_BYTES * tokens,
        f"A step of {training.global_batch_size:,} rows of {training.max_seq_length:,} tokens",
        "Lower --per-device-train-batch-size or --max-seq-length.",
    )
    with torch.device("meta"):
        model = make_model(config)
    weights = sum(p.numel() for p in model.parameters())
    trained = round(weights * trainable_share)
    state = round(optimizer_numbers(model, training.optim) * trainable_share)
    average = trained if training.averages_weights else 0
    return ResourceEstimate(
        weights,
        FLOAT_BYTES * (weights + trained + state + average),
        FLOAT_BYTES * (weights + state + average),
        3 * flops_per_token(config, training.max_seq_length) * tokens,
        training.async_save,
    )


def optimizer_numbers(model: Model, optim: str) -> int:
    """Return how many numbers the optimizer keeps: two moments, for Muon's matrices one, for Adafactor next to none."""
    parameters = list(model.parameters())
    if optim == "adafactor":
        return sum(sum(p.shape) for p in parameters)
    matrices = sum(p.numel() for p in hidden_matrices(model)) if optim == "muon" else 0
    return 2 * sum(p.numel() for p in parameters) - matrices


def available_memory(device: torch.device) -> int:
    """Return the free memory of the host, or the memory of the GPU, in bytes; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return free_memory()


def measure_flops(device: torch.device, seconds: float = 0.05) -> float:
    """Return the floating-point operations per second that training reaches on this device, about.

    Measured with a matrix product: in float32 on a CPU; in 16 bits on a GPU, where training reaches a part of it.
    """
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.float16) if on_gpu else (512, torch.float32)
    a = torch.ones(size, size, device=device, dtype=dtype)
    (a @ a).sum().item()
    start, count = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        (a @ a).sum().item()
        count += 1
    speed = 2 * size**3 * count / (time.monotonic() - start)
    return speed * GPU_TRAINING_SHARE if on_gpu else speed


def estimate_tokens_per_second(config: ModelConfig, length: int, device: torch.device) -> float:
    """Return the tokens that training would read per second, about, without building the model."""
    return measure_flops(device) / (3 * flops_per_token(config, length))


def check_resources(
    estimate: ResourceEstimate,
    folder: Path,
    device: torch.device,
    num_processes: int = 1,
    num_tokens: int | None = None,
) -> None:
    """Raise UserError for a run that cannot fit into memory or on the disk; warn about one that makes no sense."""
    free, needed = available_memory(device), estimate.needed_memory(device)
    if free and needed / num_processes > free:
        copy = f", and --no-async-save saves {format_bytes(needed - estimate.memory_bytes)}"
        where = "the GPU has" if device.type == "cuda" else "this machine has"
        raise UserError(
            f"{estimate.parameters:,} parameters take {format_bytes(needed)} for weights, gradients, optimizer state "
            f"and the copy of a checkpoint, and {where} {format_bytes(free)} free. Choose a smaller model "
            "(`firth models`); --optim adafactor halves it, --lora-rank 8 fine-tunes with less"
            f"{copy * (needed > estimate.memory_bytes)}."
        )
    check_disk_space(folder, estimate.checkpoint_bytes, "one checkpoint")
    large = estimate.parameters >= MIN_WARNED_PARAMETERS
    if num_tokens and large and estimate.parameters > MAX_PARAMETERS_PER_TOKEN * num_tokens:
        warn(
            f"{estimate.parameters:,} parameters for a text of {num_tokens:,} tokens: the model will memorize it. "
            f"20 tokens per parameter are usual (Hoffmann et al. 2022): `firth models` lists smaller ones."
        )
    if large and device.type == "cpu":
        seconds = estimate.step_seconds(measure_flops(device))
        if seconds > MAX_STEP_SECONDS:
            warn(
                f"a step takes about {format_duration(seconds)} here, and {format_bytes(needed)} of "
                "memory plus activations. Lower --per-device-train-batch-size, or choose a smaller model."
            )
