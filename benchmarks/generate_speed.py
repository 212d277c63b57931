"""How fast Firth writes beside `transformers`: the same model, prompts, tokens and machine, in the same run.

    python benchmarks/generate_speed.py [--workload NAME ...] [--turns N] [--tokens N] [--threads N] [--json]

Both sides have the same weights, read the same prompts of equal length and write the likeliest tokens, always as many;
they take turns, so that whatever else the machine does slows both, and the ratio is the median over the turns. On a GPU
weights are in bfloat16 and `transformers` has its static cache, which compiles the step; on a CPU float32 and its
dynamic cache, which is the faster one there. What both need once (compiling, recording) is in turns that are not
counted. In float32 the tokens of both must be the same, or nothing is measured.

B rows, T tokens of a prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import transformers

from firth import __version__
from firth.core.console import format_count, progress, say, show_table
from firth.generate import generate_ids
from firth.models import Model, ModelConfig, get_preset, make_model, to_hf_config
from firth.models.hf.convert import to_hf_tensors
from firth.models.presets import gpt2, llama
from firth.tokens import Vocabulary

OURS, THEIRS = "firth", "transformers"
Writer = Callable[[np.ndarray], list[list[int]]]


@dataclass(frozen=True)
class Workload:
    """A model, how many prompts it reads at once, and how long they are."""

    model: ModelConfig
    rows: int
    length: int = 32


ON_CPU: dict[str, Workload] = {
    "gpt2-4x256, 1 row": Workload(gpt2(4, 256, 4), rows=1),
    "gpt2-4x256, 64 rows": Workload(gpt2(4, 256, 4), rows=64),
}
ON_GPU: dict[str, Workload] = {
    "gpt2, 1 row": Workload(get_preset("gpt2"), rows=1, length=128),
    "gpt2, 64 rows": Workload(get_preset("gpt2"), rows=64, length=128),
    "llama-12x768, 1 row": Workload(llama(12, 768, 12, 2048, num_kv_heads=4), rows=1, length=128),
    "llama-12x768, 64 rows": Workload(llama(12, 768, 12, 2048, num_kv_heads=4), rows=64, length=128),
}
WORKLOADS = ON_CPU | ON_GPU


@dataclass(frozen=True)
class Speed:
    """One side's line. `ratio` is to `transformers`, the median over the turns, with the middle half of them."""

    workload: str
    side: str
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True)
class Endless:
    """A tokenizer that is only a vocabulary, with an end token that no model can write."""

    vocab: Vocabulary


def endless(size: int) -> Any:
    return Endless(Vocabulary(size, 0, None, None, size, None, None, None, (), special_ids=(0,)))


def random_prompts(workload: Workload, turn: int) -> np.ndarray:
    """(B, T)"""
    return np.random.default_rng(turn).integers(1, workload.model.vocab_size, size=(workload.rows, workload.length))


# The two sides


def make_sides(workload: Workload, device: torch.device) -> tuple[Model, Any]:
    """The model, and the same in `transformers`; float32."""
    torch.manual_seed(0)
    model = make_model(workload.model).eval()
    facts = to_hf_config(workload.model, None)
    config = transformers.AutoConfig.for_model(**facts)
    theirs = getattr(transformers, facts["architectures"][0])._from_config(config, attn_implementation="sdpa")
    theirs.load_state_dict(to_hf_tensors(model), strict=False)
    model.tokenizer = endless(workload.model.vocab_size)
    return model.to(device), theirs.eval().to(device)


def our_writer(model: Model, tokens: int) -> Writer:
    return lambda prompts: generate_ids(model, prompts.tolist(), tokens)


def their_writer(theirs: Any, tokens: int, device: torch.device) -> Writer:
    settings = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    if device.type == "cuda":
        settings["cache_implementation"] = "static"
    theirs.generation_config.eos_token_id = None

    def write(prompts: np.ndarray) -> list[list[int]]:
        given = torch.from_numpy(prompts).to(device)
        out = theirs.generate(given, attention_mask=torch.ones_like(given), **settings)
        return out[:, given.shape[1] :].tolist()

    return write


# Measuring


def measure(name: str, workload: Workload, device: torch.device, turns: int, tokens: int, warmup: int) -> list[Speed]:
    """Both sides in turns. That they agree is looked at first: speed means nothing otherwise."""
    model, theirs = make_sides(workload, device)
    prompts = random_prompts(workload, 0)
    if our_writer(model, 8)(prompts) != their_writer(theirs, 8, device)(prompts):
        raise SystemExit(f"{name}: the two sides write different tokens.")
    if device.type == "cuda":
        model, theirs = model.bfloat16(), theirs.bfloat16()
    sides = {OURS: our_writer(model, tokens), THEIRS: their_writer(theirs, tokens, device)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with progress(name, "turns", warmup + turns) as shown:
        for turn in range(warmup + turns):
            for side, write in sides.items():
                start = time.perf_counter()
                written = write(random_prompts(workload, turn))
                seconds[side].append(time.perf_counter() - start)
                assert all(len(ids) == tokens for ids in written)
            shown.advance()
    kept = {side: taken[warmup:] for side, taken in seconds.items()}
    return [speed(name, side, workload.rows * tokens, taken, kept[THEIRS]) for side, taken in kept.items()]


def speed(name: str, side: str, tokens: int, taken: Sequence[float], theirs: Sequence[float]) -> Speed:
    ratios = [b / a for a, b in zip(taken, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Speed(name, side, tokens / statistics.median(taken), middle, low, high)


def line(s: Speed) -> tuple[str, ...]:
    between = f"{s.ratio_low:.2f} to {s.ratio_high:.2f}"
    return s.workload, s.side, f"{s.tokens_per_second:,.0f}", f"{s.ratio:.2f}", between


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="may be given more than once")
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each side")
    parser.add_argument("--tokens", type=int, help="written in each row (64 on a CPU, 256 on a GPU)")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(words)
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    names, tokens = options.workload or list(ON_GPU if on_gpu else ON_CPU), options.tokens or (256 if on_gpu else 64)
    versions = f"firth {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    machine = torch.cuda.get_device_name() if on_gpu else format_count(torch.get_num_threads(), "CPU thread")
    say(f"{versions}, Python {sys.version.split()[0]}; {machine}, {os.cpu_count()} CPUs")
    say(f"both sides: {tokens} tokens a row, the likeliest each time; transformers with sdpa")

    speeds = [s for n in names for s in measure(n, WORKLOADS[n], device, options.turns, tokens, 2 if on_gpu else 1)]
    show_table("Writing speed", ("workload", "side", "tokens/s", "ratio", "middle half"), map(line, speeds))
    if options.json:
        facts = {"versions": versions, "machine": machine, "threads": torch.get_num_threads(), "tokens": tokens}
        print(json.dumps(facts | {"turns": options.turns, "speeds": [asdict(s) for s in speeds]}))


if __name__ == "__main__":
    main()
