"""How fast a run's batches are made, with nobody to learn from them: rows, noise, and the hash of what was read.

    firth prepare TEXT... --tokenizer TOKENIZER --output-dir shards
    python benchmarks/loader_speed.py shards [--steps N] [--gpu NAME=TOKENS_PER_SECOND ...]

These are the batches of the real loop, made by the one thread that makes them there while a step is computed; tokens
are counted as they are there, of encoder and decoder. A GPU never waits where it reads fewer of them than are made:
`--gpu bert-base-128=767375` says how many times as fast as that this is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from train_speed import ON_GPU as WORKLOADS

from firth.core.console import say, show_table
from firth.core.errors import UserError
from firth.recipes import pretraining_recipe
from firth.tokens import ShardSet, open_shards
from firth.train.dataloader import make_pretrain_batch_fn, make_row_dataset
from firth.train.loop import prefetch_batches

TURNS = 5


def measure(shards: ShardSet, name: str, steps: int) -> list[float]:
    """Tokens a second in some turns, after a first one that is not counted."""
    workload = WORKLOADS[name]
    recipe = pretraining_recipe(workload.model, warm_start="none", objective=workload.objective)
    recipe = replace(
        recipe, per_device_train_batch_size=workload.rows, max_seq_length=workload.length,
        gradient_accumulation_steps=1, batch_ramp=0.0, length_ramp=0.0,
    )  # fmt: skip
    batches = make_pretrain_batch_fn(recipe, make_row_dataset(recipe, shards, held_out=False), shards.tokenizer)
    found = []
    for first in range(0, (TURNS + 1) * steps, steps):
        tokens, start = 0, time.perf_counter()
        for _, micro, _, _ in prefetch_batches(batches, first, partial(int, first + steps)):
            tokens += sum(batch.num_tokens for batch in micro)
        found.append(tokens / (time.perf_counter() - start))
    return found[1:]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shards", help="folder of prepared text")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="may be given more than once")
    parser.add_argument("--steps", type=int, default=20, help=f"of each of {TURNS} turns (20)")
    parser.add_argument("--gpu", action="append", default=[], metavar="NAME=TOKENS_PER_SECOND", help="what a GPU reads")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(words)
    try:
        read = {name: float(speed) for name, _, speed in (word.partition("=") for word in options.gpu)}
    except ValueError:
        parser.error("--gpu is NAME=TOKENS_PER_SECOND, as bert-base-128=767375")
    if odd := [name for name in read if name not in WORKLOADS]:
        parser.error(f"--gpu {odd[0]}: one of {', '.join(WORKLOADS)}")
    shards = open_shards(options.shards)
    say(f"numpy {np.__version__}; one thread; a vocabulary of {shards.tokenizer.vocab.size:,} tokens")
    found = {}
    for name in options.workload or WORKLOADS:
        try:
            found[name] = measure(shards, name, options.steps)
        except UserError as e:  # a tokenizer does not suit every objective
            say(f"{name}: left out. {e}")
        else:
            say(f"{name}: {statistics.median(found[name]):,.0f} tokens/s")
    lines = []
    for name, speeds in found.items():
        workload, middle = WORKLOADS[name], statistics.median(speeds)
        times = f"{middle / read[name]:.1f}" if name in read else ""
        span = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        lines.append((name, f"{workload.rows}x{workload.length}", f"{middle:,.0f}", span, times))
    columns = ("workload", "rows", "tokens/s", "of all turns", "times the GPU")
    show_table("The loader alone", columns, lines)
    if options.json:
        print(json.dumps({"steps": options.steps, "tokens_per_second": found, "gpu": read}))


if __name__ == "__main__":
    main()
