"""Compare the training of a Unigram tokenizer with that of `tokenizers`: the same text and words, one core.

    python benchmarks/unigram_training.py TEXT... --held-out TEXT [--vocab-sizes 4096 8192] [--repeats 3]

Each side runs in a process of its own, and the sides alternate. CPU time is from the text in memory to the tokenizer.
Ours also imports numba in that time, and compiles kernels that are not cached yet. Bits per byte are those of the best
segmentations of the held-out text, by the tokenizer's own probabilities.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from tokenizers import models, trainers

from firth.core.console import show_table
from firth.core.memory import peak_memory_bytes
from firth.text import Corpus
from firth.tokens.builders import SplitOptions, build_untrained
from firth.tokens.train import build_word_splitter, read_vocab_layout, train_tokenizer

SIDES = ("firth", "tokenizers")
UNKNOWN_NATS = 20.0  # cost of an unknown character


def run_side(side: str, paths: list[str], held_out: str, vocab_size: int) -> dict[str, Any]:
    """Train a tokenizer in this process and measure it."""
    texts = [document.text for document in Corpus(paths)]
    untrained = build_untrained("unigram", SplitOptions())
    layout = read_vocab_layout(json.loads(untrained.to_str()))
    start = time.process_time()
    if side == "firth":
        backend = train_tokenizer(texts, "unigram", vocab_size).backend
    else:
        backend = build_word_splitter(layout, models.Unigram())
        size = vocab_size - len(layout.first_tokens) - len(layout.last_tokens) + 1
        trainer = trainers.UnigramTrainer(
            vocab_size=size, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
    seconds = time.process_time() - start
    scores = dict(json.loads(backend.to_str())["model"]["vocab"])
    documents = [document.text for document in Corpus([held_out])]
    tokens = [t for text in documents for t in backend.encode(text, add_special_tokens=False).tokens]
    num_bytes = sum(len(text.encode()) for text in documents)
    return {
        "seconds": seconds,
        "memory": peak_memory_bytes(),
        "bytes_per_token": num_bytes / len(tokens),
        "bits_per_byte": sum(-scores.get(t, -UNKNOWN_NATS) for t in tokens) / num_bytes / math.log(2),
    }


def compare(paths: list[str], held_out: str, vocab_size: int, repeats: int) -> list[dict[str, Any]]:
    """Alternate between the sides; return a row for each."""
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side in SIDES:
            command = [sys.executable, __file__, *paths, "--held-out", held_out, "--side", side]
            command += ["--vocab-sizes", str(vocab_size)]
            environment = {**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            results[side].append(json.loads(done.stdout.splitlines()[-1]))
    return [
        {**runs[0], "side": side, "seconds": [run["seconds"] for run in runs], "vocab_size": vocab_size}
        for side, runs in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+")
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options.side, options.text, options.held_out, options.vocab_sizes[0])))
        return
    rows = [
        row for size in options.vocab_sizes for row in compare(options.text, options.held_out, size, options.repeats)
    ]
    show_table(
        f"Unigram tokenizers of {' '.join(options.text)}, {options.repeats} runs on one core",
        ["tokens", "side", "CPU seconds: median, minimum", "memory, MB", "bytes per token", "bits per byte"],
        [
            [
                f"{row['vocab_size']:,}",
                row["side"],
                f"{statistics.median(row['seconds']):.1f}, {min(row['seconds']):.1f}",
                f"{row['memory'] / 1e6:,.0f}",
                f"{row['bytes_per_token']:.4f}",
                f"{row['bits_per_byte']:.4f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
