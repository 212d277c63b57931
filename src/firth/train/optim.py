"""Parameter groups, AdamW, and the rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from firth.train.recipe import Training


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW that decays matrices and embeddings, and leaves biases and norms alone."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )


def rate(step: int, training: Training) -> float:
    """The learning rate of step 0, 1, 2 ...: up during the warm-up, then down, to reach 0 after the last step."""
    warmup, last = training.warmup_steps, training.max_steps
    if step < warmup:
        return training.learning_rate * (step + 1) / (warmup + 1)
    done = min((step - warmup) / max(last - warmup, 1), 1.0)
    falling = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "constant": 1.0}
    return training.learning_rate * falling[training.lr_scheduler_type]
