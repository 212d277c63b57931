"""How fast AWD-LSTM and ELMo learn beside plain models of torch's own LSTMs, of the same sizes, in the same run.

    python benchmarks/recurrent_speed.py [--model NAME ...] [--rows N] [--length N] [--steps N] [--json]

A step is forward, loss, backward, clipping and AdamW (on a GPU in bfloat16 autocast). The plain side of AWD-LSTM is an
embedding, an `nn.LSTM` for each layer and a tied projection, without any of its dropouts; that of ELMo reads vectors of
words in place of characters, and its LSTMs, with projections, have no bounds. The sides take turns; the ratio is the
median over the turns. `elmo-base, no bounds` is ours without clipping, which cuDNN can run.
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

VOCABULARY = 30_000
SIDES = {"ulmfit-base": "ulmfit-base", "elmo-base": "elmo-base", "elmo-base, no bounds": "elmo-base"}


class PlainDecoder(nn.Module):
    """AWD-LSTM without what makes it AWD."""

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
    """ELMo's two language models over vectors of words."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.recurrent
        assert isinstance(spec, ELMoConfig)
        P, H = spec.proj_size, spec.hidden_size
        self.tokens, self.out = nn.Embedding(config.vocab_size, P), nn.Linear(P, config.vocab_size)
        self.ways = nn.ModuleList(nn.LSTM(P, H, config.num_layers, proj_size=P, batch_first=True) for _ in range(2))

    def forward(self, batch: Batch) -> Tensor:
        x = self.tokens(batch.input_ids)
        there, back = self.ways[0](x)[0], self.ways[1](x.flip(1))[0].flip(1)
        logits = self.out(torch.stack([there, back], 1))
        return F.cross_entropy(logits.flatten(0, 2).float(), batch.labels.flatten())


def ours(name: str, config: ModelConfig) -> nn.Module:
    if name.endswith("no bounds"):
        assert isinstance(config.recurrent, ELMoConfig)
        config = replace(config, recurrent=replace(config.recurrent, clip=0.0))
    return make_model(config)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    if not isinstance(model, Model):
        return model(batch)
    return sum((part / batch.loss_counts[name] for name, part in model.losses(batch).items()), torch.zeros(()))


def some_batch(config: ModelConfig, rows: int, length: int, device: torch.device) -> Batch:
    tokens = torch.randint(5, config.vocab_size, (rows, length), device=device)
    if not isinstance(config.recurrent, ELMoConfig):
        return Batch(tokens, labels=tokens.roll(-1, 1))
    both = torch.stack([tokens.roll(-1, 1), tokens.roll(1, 1)], 1)
    spelled = torch.randint(0, 256, (rows, length, 50), device=device)
    return Batch(tokens, attention_rank=both, labels=both, char_ids=spelled)


def stepper(model: nn.Module, batch: Batch, device: torch.device) -> Callable[[], None]:
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            loss = loss_of(model, batch)
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


def measure(name: str, config: ModelConfig, rows: int, length: int, steps: int, turns: int = 5) -> dict[str, Any]:
    """Tokens a second of both sides, and their ratio."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = some_batch(config, rows, length, device)
    plain = PlainBiLM(config) if isinstance(config.recurrent, ELMoConfig) else PlainDecoder(config)
    sides = [stepper(model, batch, device) for model in (ours(name, config), plain)]
    for step in sides:
        timed(step, 2, device)
    seconds = [[timed(step, steps, device) for step in sides] for _ in range(turns)]
    ours_s, plain_s = (statistics.median(turn[i] for turn in seconds) for i in (0, 1))
    ratio = statistics.median(b / a for a, b in seconds)
    speed = rows * length
    return {"model": name, "firth": speed / ours_s, "plain torch": speed / plain_s, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(SIDES))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=70)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = []
    for name in args.model or SIDES:
        config = replace(get_preset(SIDES[name]), vocab_size=VOCABULARY)
        found.append(measure(name, config, args.rows, args.length, args.steps))
    if args.json:
        print(json.dumps(found))
        return
    rows = [[f["model"], f"{f['firth']:,.0f}", f"{f['plain torch']:,.0f}", f"{f['ratio']:.2f}"] for f in found]
    show_table("tokens a second in training", ["model", "firth", "plain torch", "ratio"], rows)


if __name__ == "__main__":
    main()
