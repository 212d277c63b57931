"""Time `prepare --engine ray` with 1 and 2 workers, and estimate a large text on many machines.

    python benchmarks/prepare_ray.py TEXT... [--workers 1 2] [--repeats 3] [--task-bytes 1000000] [--dedup near]
    python benchmarks/prepare_ray.py --model [--text-bytes 1e12] [--nodes 64]

Times are without the start of the cluster, and with the guard of each document. All runs must write the same bytes as
one process. `--model` counts bytes, reads and memory from the sizes that the tasks write; it measures nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from firth.core.console import quiet, say, show_table
from firth.text import Corpus
from firth.tokens import prepare, train_tokenizer
from firth.tokens.cluster import plan
from firth.tokens.cluster.prepare import INPUT_BYTES_PER_RANGE, prepare_by_tasks
from firth.tokens.cluster.ray_engine import open_ray_engine

TOKENIZER_DOCUMENTS = 3000  # documents that the tokenizer is trained on
VOCAB_SIZE = 8000


def digest_folder(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def measure(texts: list[str], workers: list[int], repeats: int, dedup: str) -> dict[str, list[float]]:
    """Return the seconds of each side, whose runs alternate."""
    corpus = Corpus(texts)
    sample = (document.text for _, document in zip(range(TOKENIZER_DOCUMENTS), corpus, strict=False))
    tokenizer = train_tokenizer(sample, "byte-bpe", VOCAB_SIZE)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, quiet():

        def run(name: str, write: Any) -> None:
            path = Path(folder, f"{name}-{len(seconds.get(name, []))}")
            start = time.perf_counter()
            write(path)
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            assert digest_folder(path) == digest_folder(Path(folder, "one process-0")), "other bytes"

        for _ in range(repeats):
            run("one process", lambda path: prepare(Corpus(texts), tokenizer, path, 0.05, dedup, workers=1))
            for n in workers:
                with open_ray_engine(workers=n) as engine:
                    run(f"ray, {n} workers", lambda path: prepare_by_tasks(texts, tokenizer, path, engine, 0.05, dedup))
    return seconds


def estimate(
    text_bytes: float,
    nodes: int,
    document_bytes: float = 4000,
    bytes_per_token: float = 4,
    candidate_share: float = 0.2,
    shared_bands: float = 2,
) -> dict[str, float]:
    """Count what `--dedup near` moves and holds, in bytes, by the layout of the tasks.

    `candidate_share` of the documents share `shared_bands` bands with another one: an assumption about the text.
    """
    documents, tokens = text_bytes / document_bytes, text_bytes / bytes_per_token
    ranges = math.ceil(text_bytes / INPUT_BYTES_PER_RANGE)
    read_output = documents * (16 + 12 + 128 + 16 * 12)  # digest, hash and number, signature, 16 bands and numbers
    tokenized = tokens * (2 + 2 / 8) + documents * 24  # ids, two bits; three lengths of each document
    signatures = documents * candidate_share * shared_bands * 128
    range_entries = documents * 16 / ranges
    hashes_read, bits_read = documents * (12 + 16 * 12), ranges * documents / 8
    moved = 2 * text_bytes + read_output + hashes_read + signatures + bits_read + tokenized
    return {
        "documents": documents,
        "tasks": math.ceil(text_bytes / plan.TASK_BYTES),
        "ranges": ranges,
        "text read, twice": 2 * text_bytes,
        "hashes, signatures, bands written": read_output,
        "hashes and bands read": hashes_read,
        "signatures of candidates read": signatures,
        "bits of dropped documents read": bits_read,
        "tokens written": tokenized,
        "tokens merged: read, written, read for checksums": 3 * tokenized,
        "moved by a node, without the merge": moved / nodes,
        "memory of a range": range_entries * 60 + 2 * documents,
        "memory of a text task": 3 * plan.TASK_BYTES + tokenized / (text_bytes / plan.TASK_BYTES),
        "memory of the first machine": documents * (1 + 1 / 8) + 2**22 * 16 * 3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--task-bytes", type=int, default=1_000_000)
    parser.add_argument("--dedup", default="near")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--text-bytes", type=float, default=1e12)
    parser.add_argument("--nodes", type=int, default=64)
    args = parser.parse_args()
    if args.model:
        counts = estimate(args.text_bytes, args.nodes)
        rows = [(name, f"{value:,.0f}" if value < 1e9 else f"{value / 1e9:,.1f} G") for name, value in counts.items()]
        show_table(f"{args.text_bytes / 1e12:g} TB on {args.nodes} nodes", ["", "number or bytes"], rows)
        return
    plan.TASK_BYTES = args.task_bytes
    size = sum(Path(source.path).stat().st_size for source in Corpus(args.texts).files)
    say(f"{size / 1e6:.1f} MB, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    seconds = measure(args.texts, args.workers, args.repeats, args.dedup)
    rows = [
        (name, f"{statistics.median(s):.1f}", f"{min(s):.1f}", f"{size / 1e6 / statistics.median(s):.2f}")
        for name, s in seconds.items()
    ]
    show_table("prepare", ["side", "median s", "min s", "MB/s"], rows)


if __name__ == "__main__":
    main()
