"""Measure the dataloader alone: rows, noise and the hash of the batch, without a training step.

    firth prepare TEXT... --tokenizer TOKENIZER --output-dir shards
    python benchmarks/loader_speed.py shards [--steps N] [--gpu NAME=TOKENS_PER_SECOND ...]

The batches come from the prefetch thread of the training loop. Tokens of encoder and decoder are counted, as in the
log of a run. A GPU never waits for data if the dataloader makes more tokens per second than the GPU trains on:
`--gpu bert-base-128=767375` prints that ratio.
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
from firth.train.prefetch import prefetch_batches

REPEATS = 5


def measure(shards: ShardSet, name: str, steps: int) -> list[float]:
    """Return the tokens per second of each repeat, after a warm-up that is not counted."""
    workload = WORKLOADS[name]
    recipe = pretraining_recipe(workload.model, warm_start="none", objective=workload.objective)
    recipe = replace(
        recipe, per_device_train_batch_size=workload.rows, max_seq_length=workload.length,
        gradient_accumulation_steps=1, batch_ramp=0.0, length_ramp=0.0,
    )  # fmt: skip
    batches = make_pretrain_batch_fn(recipe, make_row_dataset(recipe, shards, held_out=False), shards.tokenizer)
    results = []
    for first_step in range(0, (REPEATS + 1) * steps, steps):
        tokens, start = 0, time.perf_counter()
        for _, micro_batches, _, _ in prefetch_batches(batches, first_step, partial(int, first_step + steps)):
            tokens += sum(batch.num_tokens for batch in micro_batches)
        results.append(tokens / (time.perf_counter() - start))
    return results[1:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="folder that `firth prepare` wrote")
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, help="a workload; repeat the option for several (all)"
    )
    parser.add_argument("--steps", type=int, default=20, help=f"steps of each of {REPEATS} repeats (20)")
    parser.add_argument(
        "--gpu", action="append", default=[], metavar="NAME=TOKENS_PER_SECOND", help="training speed of a GPU"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args(argv)
    try:
        gpu_speed = {name: float(speed) for name, _, speed in (text.partition("=") for text in args.gpu)}
    except ValueError:
        parser.error("--gpu needs NAME=TOKENS_PER_SECOND, as bert-base-128=767375")
    if unknown := [name for name in gpu_speed if name not in WORKLOADS]:
        parser.error(f"--gpu {unknown[0]}: unknown workload; choose one of {', '.join(WORKLOADS)}")
    shards = open_shards(args.shards)
    say(f"numpy {np.__version__}; one thread; a vocabulary of {shards.tokenizer.vocab.size:,} tokens")
    results = {}
    for name in args.workload or WORKLOADS:
        try:
            results[name] = measure(shards, name, args.steps)
        except UserError as e:  # not every objective supports this tokenizer
            say(f"{name}: skipped. {e}")
        else:
            say(f"{name}: {statistics.median(results[name]):,.0f} tokens/s")
    table = []
    for name, speeds in results.items():
        workload, median_speed = WORKLOADS[name], statistics.median(speeds)
        ratio = f"{median_speed / gpu_speed[name]:.1f}" if name in gpu_speed else ""
        span = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        table.append((name, f"{workload.rows}x{workload.length}", f"{median_speed:,.0f}", span, ratio))
    columns = ("workload", "rows", "tokens/s", "range", "ratio to the GPU")
    show_table("Dataloader alone", columns, table)
    if args.json:
        print(json.dumps({"steps": args.steps, "tokens_per_second": results, "gpu": gpu_speed}))


if __name__ == "__main__":
    main()
