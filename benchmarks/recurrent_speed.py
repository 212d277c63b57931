"""Compare the training speed of AWD-LSTM and ELMo with plain models of torch's own LSTMs of the same sizes.

    python benchmarks/recurrent_speed.py [--model NAME ...] [--batch-size N] [--length N] [--steps N] [--json]

A step is forward, loss, backward, gradient clipping and AdamW (on a GPU under bfloat16 autocast). The plain AWD-LSTM is
an embedding, an `nn.LSTM` per layer and a tied projection, without dropout. The plain ELMo reads word embeddings in
place of characters, and its LSTMs with projections do not clip their states. The sides alternate; the ratio is the
median over the repeats. `elmo-base, no clipping` is our model without state clipping, which cuDNN can run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.core.console import show_table
from firth.models import Model, ModelConfig, get_preset, make_model
from firth.models.config import AWDLSTMConfig, ELMoConfig
from firth.objectives import Batch

VOCAB_SIZE = 30_000
PRESET_BY_MODEL = {"ulmfit-base": "ulmfit-base", "elmo-base": "elmo-base", "elmo-base, no clipping": "elmo-base"}


class PlainDecoder(nn.Module):
    """AWD-LSTM without weight drop and the other dropouts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.recurrent
        assert isinstance(spec, AWDLSTMConfig)
        widths = [config.dim, *[spec.hidden_size] * (config.num_layers - 1), config.dim]
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in pairwise(widths))

    def forward(self, batch: Batch) -> Tensor:
        x = self.tokens(batch.input_ids)
        for lstm in self.layers:
            x, _ = lstm(x)
        return F.cross_entropy((x @ self.tokens.weight.T).flatten(0, 1).float(), batch.labels.flatten())


class PlainBiLM(nn.Module):
    """ELMo's two language models over word embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.recurrent
        assert isinstance(spec, ELMoConfig)
        P, H = spec.proj_size, spec.hidden_size
        self.tokens, self.out = nn.Embedding(config.vocab_size, P), nn.Linear(P, config.vocab_size)
        self.directions = nn.ModuleList(
            nn.LSTM(P, H, config.num_layers, proj_size=P, batch_first=True) for _ in range(2)
        )

    def forward(self, batch: Batch) -> Tensor:
        x = self.tokens(batch.input_ids)
        forward, backward = self.directions[0](x)[0], self.directions[1](x.flip(1))[0].flip(1)
        logits = self.out(torch.stack([forward, backward], 1))
        return F.cross_entropy(logits.flatten(0, 2).float(), batch.labels.flatten())


def make_our_model(name: str, config: ModelConfig) -> nn.Module:
    if name.endswith("no clipping"):
        assert isinstance(config.recurrent, ELMoConfig)
        config = replace(config, recurrent=replace(config.recurrent, clip=0.0))
    return make_model(config)


def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    if not isinstance(model, Model):
        return model(batch)
    return sum((part / batch.loss_counts[name] for name, part in model.losses(batch).items()), torch.zeros(()))


def random_batch(config: ModelConfig, batch_size: int, length: int, device: torch.device) -> Batch:
    tokens = torch.randint(5, config.vocab_size, (batch_size, length), device=device)
    if not isinstance(config.recurrent, ELMoConfig):
        return Batch(tokens, labels=tokens.roll(-1, 1))
    both = torch.stack([tokens.roll(-1, 1), tokens.roll(1, 1)], 1)
    char_ids = torch.randint(0, 256, (batch_size, length, 50), device=device)
    return Batch(tokens, attention_rank=both, labels=both, char_ids=char_ids)


def make_step(model: nn.Module, batch: Batch, device: torch.device) -> Callable[[], None]:
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            loss = compute_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], None], steps: int, device: torch.device) -> float:
    start = time.monotonic()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.monotonic() - start) / steps


def measure(
    name: str, config: ModelConfig, batch_size: int, length: int, steps: int, repeats: int = 5
) -> dict[str, Any]:
    """Return the tokens per second of both sides, and the ratio."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = random_batch(config, batch_size, length, device)
    plain = PlainBiLM(config) if isinstance(config.recurrent, ELMoConfig) else PlainDecoder(config)
    sides = [make_step(model, batch, device) for model in (make_our_model(name, config), plain)]
    for step in sides:
        timed(step, 2, device)
    seconds = [[timed(step, steps, device) for step in sides] for _ in range(repeats)]
    our_seconds, plain_seconds = (statistics.median(repeat[i] for repeat in seconds) for i in (0, 1))
    ratio = statistics.median(b / a for a, b in seconds)
    tokens = batch_size * length
    return {"model": name, "firth": tokens / our_seconds, "plain torch": tokens / plain_seconds, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", choices=list(PRESET_BY_MODEL), help="a model; repeat the option for several (all)"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="rows per batch (64)")
    parser.add_argument("--length", type=int, default=70, help="tokens per row (70)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each of 5 repeats (10)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    results = []
    for name in args.model or PRESET_BY_MODEL:
        config = replace(get_preset(PRESET_BY_MODEL[name]), vocab_size=VOCAB_SIZE)
        results.append(measure(name, config, args.batch_size, args.length, args.steps))
    if args.json:
        print(json.dumps(results))
        return
    rows = [[f["model"], f"{f['firth']:,.0f}", f"{f['plain torch']:,.0f}", f"{f['ratio']:.2f}"] for f in results]
    show_table("Training, tokens per second", ["model", "firth", "plain torch", "ratio"], rows)


if __name__ == "__main__":
    main()
