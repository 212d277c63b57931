"""Compare text to shards and shards to rows with `tokenizers` and `datasets`: the same text, disk to disk.

    python benchmarks/text_speed.py TEXT [--kind wordpiece] [--workers 2] [--repeats 3] [--memory-text 1GB]

Each side runs in a process of its own, so that its CPU time and memory can be measured, and the sides alternate. Time
is from the start of reading to the end of writing, without starting Python and importing libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from firth import __version__
from firth.cli.values import parse_bytes
from firth.core.console import say, show_table
from firth.text import Corpus
from firth.tokens import PackedDataset, SequenceTemplate, load_tokenizer, open_shards, prepare, train_tokenizer

SIDES = ("firth prepare", "encode_batch", "datasets.map")
BLOCK_TOKENS = 512
VOCAB_SIZE = 8000
TOKENIZER_DOCUMENTS = 6000  # documents that the tokenizer is trained on


# The sides: each runs in a process of its own and prints its result


def firth_prepare(text: str, tokenizer: str, folder: str, workers: int) -> dict[str, Any]:
    corpus = Corpus([text])
    facts = prepare(
        corpus, load_tokenizer(tokenizer), folder, 0.0, dedup="none", total_bytes=corpus.total_bytes, workers=workers
    )
    return {"tokens": facts["tokens"]}


def encode_batch(text: str, tokenizer: str, folder: str, workers: int) -> dict[str, Any]:
    """Call `tokenizers` directly, with the same number of threads: read, encode, write the ids."""
    backend = load_tokenizer(tokenizer).backend
    tokens = 0
    with open(folder, "wb") as file:
        for batch in batched((document.text for document in Corpus([text])), 1000):
            for encoding in backend.encode_batch(batch, add_special_tokens=False):
                ids = np.array(encoding.ids, np.uint16)
                file.write(ids.tobytes())
                tokens += len(ids)
    return {"tokens": tokens}


def datasets_map(text: str, tokenizer: str, folder: str, workers: int) -> dict[str, Any]:
    """Tokenize, concatenate and split into blocks by `map(batched=True)`, as run_mlm.py of transformers does."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    lines = datasets.Dataset.from_generator(
        lambda: ({"text": document.text} for document in Corpus([text])), cache_dir=f"{folder}.cache"
    )

    def tokenise(examples: dict[str, list[Any]]) -> Any:
        return theirs(examples["text"], return_special_tokens_mask=True, truncation=False, verbose=False)

    def group(examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        joined = {name: [x for row in rows for x in row] for name, rows in examples.items()}
        num_whole = len(joined["input_ids"]) // BLOCK_TOKENS * BLOCK_TOKENS
        return {
            name: [row[i : i + BLOCK_TOKENS] for i in range(0, num_whole, BLOCK_TOKENS)] for name, row in joined.items()
        }

    ids = lines.map(tokenise, batched=True, num_proc=workers, remove_columns=["text"])
    blocks = ids.map(group, batched=True, num_proc=workers)
    blocks.save_to_disk(folder)
    return {"tokens": len(blocks) * BLOCK_TOKENS}


def batched(items: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(islice(items, size)):
        yield batch


FUNCTIONS = dict(zip(SIDES, (firth_prepare, encode_batch, datasets_map), strict=True))


def run_side(side: str, *arguments: str) -> None:
    """Run one side in this process and print its result."""
    import resource

    text, tokenizer, folder, workers = arguments
    if side == "datasets.map":
        import datasets  # noqa: F401
        import transformers  # noqa: F401
    start = time.perf_counter()
    result = FUNCTIONS[side](text, tokenizer, folder, int(workers))
    seconds = time.perf_counter() - start
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    cpu = sum(sum(resource.getrusage(w)[:2]) for w in processes)
    print(json.dumps({**result, "seconds": seconds, "cpu": cpu}))


# Measuring


def run_process(command: Sequence[str], workers: int) -> tuple[dict[str, Any], int]:
    """Run a process; return its result and the peak memory of it and its children together."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(workers), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, process_tree_memory(process.pid))
        time.sleep(0.1)
    output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {process.returncode}")
    return json.loads(output.splitlines()[-1]), peak


def process_tree_memory(pid: int) -> int:
    """Return the resident bytes of a process and its descendants (Linux); 0 for one that has ended."""
    proc, total = Path(f"/proc/{pid}"), 0
    with suppress(OSError):
        total = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in (proc / "task").iterdir():
            total += sum(process_tree_memory(int(child)) for child in (thread / "children").read_text().split())
    return total


def compare(text: Path, tokenizer: Path, folder: Path, workers: int, repeats: int) -> list[dict[str, Any]]:
    """Alternate between the sides; ratios are between adjacent runs."""
    results_by_side: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for repeat in range(repeats):
        for side in SIDES:
            output = folder / f"out-{repeat}"
            command = [sys.executable, __file__, "--side", side, str(text), str(tokenizer), str(output), str(workers)]
            result, peak = run_process(command, workers)
            results_by_side[side].append({**result, "memory": peak})
            say(f"{side}: {result['tokens']:,} tokens in {result['seconds']:.1f}s")
            for left in folder.glob(f"out-{repeat}*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    ours = results_by_side[SIDES[0]]
    rows = []
    for side, results in results_by_side.items():
        ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours, results, strict=True)]
        rows.append(
            {
                "side": side,
                "tokens_per_second": max(r["tokens"] / r["seconds"] for r in results),
                "cpu_seconds": min(r["cpu"] for r in results),
                "memory": max(r["memory"] for r in results),
                "speedup": statistics.median(ratios),
                "ratios": ratios,
            }
        )
    return rows


def bounded_memory(text: Path, tokenizer: Path, folder: Path, size: int, limit: int) -> dict[str, Any]:
    """Measure the memory of `firth prepare --max-memory` on a long text: many copies, each changed to avoid dedup."""
    rng, long = random.Random(0), folder / "long.txt"
    paragraphs = text.read_text(encoding="utf-8").split("\n\n")
    with open(long, "w", encoding="utf-8") as file:
        while file.tell() < size:
            for paragraph in paragraphs:
                file.write(f"{rng.getrandbits(64):x} {paragraph}\n\n")
    command = [sys.executable, "-m", "firth", "prepare", str(long), "--tokenizer", str(tokenizer), "--json"]
    command += ["--output-dir", str(folder / "long"), "--max-memory", str(limit)]
    start = time.perf_counter()
    result, peak = run_process(command, os.cpu_count() or 1)
    seconds, bytes_ = time.perf_counter() - start, long.stat().st_size
    shutil.rmtree(folder / "long")
    long.unlink()
    return {"text_bytes": bytes_, "limit": limit, "peak": peak, "tokens": result["tokens"], "seconds": seconds}


def measure_rows(shards: Path) -> list[dict[str, Any]]:
    """Measure the padding of packed rows, and how fast they are made on one core."""
    prepared = open_shards(shards)
    vocab, results = prepared.tokenizer.vocab, []
    template = (
        SequenceTemplate((vocab.cls,), (vocab.sep,))
        if vocab.cls is not None and vocab.sep is not None
        else SequenceTemplate()
    )
    for length in (128, 512):
        for split in ("token", "sentence"):
            source = PackedDataset(prepared.train, length, template, vocab.pad, seed=0, split_at=split)
            size, best = 64 * 512 // length, float("inf")
            for repeat in range(20):
                start = time.process_time()
                source.get_rows(np.arange(size) + repeat * size)
                best = min(best, time.process_time() - start)
            tokens = int(source.packing.piece_length.sum())
            results.append(
                {
                    "length": length,
                    "split": split,
                    "used": tokens / prepared.train.num_tokens,
                    "padding": 1 - source.fill_ratio,
                    "tokens_per_second": size * length / best,
                }
            )
    return results


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--side"]:
        run_side(*argv[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file, plain or compressed")
    parser.add_argument("--kind", default="wordpiece", help="kind of the tokenizer (wordpiece)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes or threads of each side (all cores)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (3)")
    parser.add_argument(
        "--memory-text", default="5.12GB", help="size of the text for the memory test; 0 skips it (5.12GB)"
    )
    parser.add_argument("--max-memory", default="512MB", help="memory limit of the memory test (512MB)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(argv)
    say(f"firth {__version__}, Python {sys.version.split()[0]}; {options.workers} of {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, tokenizer = folder / "text.txt", folder / "tokenizer"
        with open(text, "w", encoding="utf-8") as file:
            file.writelines(document.text + "\n\n" for document in Corpus([options.text]))
        sample = islice((document.text for document in Corpus([text])), TOKENIZER_DOCUMENTS)
        train_tokenizer(sample, options.kind, VOCAB_SIZE).save(tokenizer)
        sides = compare(text, tokenizer, folder, options.workers, options.repeats)
        firth_prepare(str(text), str(tokenizer), str(folder / "shards"), options.workers)
        rows = measure_rows(folder / "shards")
        size = parse_bytes(options.memory_text, "--memory-text")
        limit = parse_bytes(options.max_memory, "--max-memory")
        long = bounded_memory(text, tokenizer, folder, size, limit) if size and limit else None
    report(options, sides, rows, long)


def report(options: Any, sides: list[dict[str, Any]], rows: list[dict[str, Any]], long: dict[str, Any] | None) -> None:
    show_table(
        f"{options.text} to tokens on disk, {options.kind}, {options.workers} cores",
        ["side", "ktokens/s", "CPU seconds", "peak MB", "speedup of firth"],
        [
            (
                s["side"],
                f"{s['tokens_per_second'] / 1e3:,.0f}",
                f"{s['cpu_seconds']:.1f}",
                f"{s['memory'] / 1e6:,.0f}",
                f"{s['speedup']:.2f} ({min(s['ratios']):.2f} to {max(s['ratios']):.2f})",
            )
            for s in sides
        ],
    )
    show_table(
        "Shards to rows, one core",
        ["length", "split at", "tokens used", "padding", "Mtokens/s"],
        [
            (
                r["length"],
                r["split"],
                f"{100 * r['used']:.2f}%",
                f"{100 * r['padding']:.2f}%",
                f"{r['tokens_per_second'] / 1e6:.1f}",
            )
            for r in rows
        ],
    )
    if long:
        say(
            f"--max-memory {long['limit'] / 1e6:,.0f}MB on {long['text_bytes'] / 1e6:,.0f}MB of text: "
            f"{long['peak'] / 1e6:,.0f}MB peak, in {long['seconds']:,.0f}s"
        )
    if options.json:
        print(json.dumps({"sides": sides, "rows": rows, "memory": long}))


if __name__ == "__main__":
    main()
