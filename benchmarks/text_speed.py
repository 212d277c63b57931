"""Text to shards and shards to rows, side by side with `tokenizers` and `datasets` on the same text, disk to disk.

    python benchmarks/text_speed.py TEXT... [--kind wordpiece] [--workers 2] [--turns 3] [--memory-text 1GB]

Each side runs in a process of its own, so that its CPU time and memory are its own too, and the sides take turns. The
time is from the start of reading to the end of writing; starting Python and loading the libraries are not counted.
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
from firth.cli.options import parse_bytes
from firth.core.console import say, show_table
from firth.text import Corpus
from firth.tokens import PackedDataset, SequenceTemplate, load_tokenizer, open_shards, prepare, train_tokenizer

SIDES = ("firth prepare", "encode_batch", "datasets.map")
LENGTH = 512
VOCABULARY = 8000
LEARNED_FROM = 6000  # documents


# The sides: each is called in a process of its own, and prints its result


def firth_prepare(text: str, tokenizer: str, folder: str, workers: int) -> dict[str, Any]:
    corpus = Corpus([text])
    facts = prepare(
        corpus, load_tokenizer(tokenizer), folder, 0.0, dedup="none", total_bytes=corpus.total_bytes, workers=workers
    )
    return {"tokens": facts["tokens"]}


def encode_batch(text: str, tokenizer: str, folder: str, workers: int) -> dict[str, Any]:
    """The library alone, on as many threads: read, encode, write the ids."""
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
    """As run_mlm.py of transformers does it: tokenise, join and cut into blocks; both by `map(batched=True)`."""
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
        whole = len(joined["input_ids"]) // LENGTH * LENGTH
        return {name: [row[i : i + LENGTH] for i in range(0, whole, LENGTH)] for name, row in joined.items()}

    ids = lines.map(tokenise, batched=True, num_proc=workers, remove_columns=["text"])
    blocks = ids.map(group, batched=True, num_proc=workers)
    blocks.save_to_disk(folder)
    return {"tokens": len(blocks) * LENGTH}


def batched(items: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(islice(items, size)):
        yield batch


FUNCTIONS = dict(zip(SIDES, (firth_prepare, encode_batch, datasets_map), strict=True))


def one_side(side: str, *arguments: str) -> None:
    """What a process of its own does."""
    import resource

    text, tokenizer, folder, workers = arguments
    if side == "datasets.map":
        import datasets  # noqa: F401
        import transformers  # noqa: F401
    start = time.perf_counter()
    result = FUNCTIONS[side](text, tokenizer, folder, int(workers))
    seconds = time.perf_counter() - start
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    cpu = sum(sum(resource.getrusage(w)[:2]) for w in who)
    print(json.dumps({**result, "seconds": seconds, "cpu": cpu}))


# Measuring


def run(words: Sequence[str], workers: int) -> tuple[dict[str, Any], int]:
    """The result of a process, and the most memory that it and its children had together."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(workers), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(0.1)
    output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return json.loads(output.splitlines()[-1]), peak


def memory_of(pid: int) -> int:
    """Bytes of a process and all below it that are in memory, as Linux tells; 0 for one that has ended."""
    place, total = Path(f"/proc/{pid}"), 0
    with suppress(OSError):
        total = int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in (place / "task").iterdir():
            total += sum(memory_of(int(child)) for child in (thread / "children").read_text().split())
    return total


def compare(text: Path, tokenizer: Path, folder: Path, workers: int, turns: int) -> list[dict[str, Any]]:
    """Let the sides take turns; the ratio is of the turns that stand beside each other."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for turn in range(turns):
        for side in SIDES:
            place = folder / f"out-{turn}"
            words = [sys.executable, __file__, "--side", side, str(text), str(tokenizer), str(place), str(workers)]
            result, peak = run(words, workers)
            found[side].append({**result, "memory": peak})
            say(f"{side}: {result['tokens']:,} tokens in {result['seconds']:.1f}s")
            for left in folder.glob(f"out-{turn}*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    ours = found[SIDES[0]]
    rows = []
    for side, results in found.items():
        ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours, results, strict=True)]
        rows.append(
            {
                "side": side,
                "tokens_per_second": max(r["tokens"] / r["seconds"] for r in results),
                "cpu_seconds": min(r["cpu"] for r in results),
                "memory": max(r["memory"] for r in results),
                "ours_is_faster": statistics.median(ratios),
                "ratios": ratios,
            }
        )
    return rows


def bounded_memory(text: Path, tokenizer: Path, folder: Path, size: int, limit: int) -> dict[str, Any]:
    """The memory of `firth prepare --max-memory` on a long text, made of the short one with changes."""
    rng, long = random.Random(0), folder / "long.txt"
    paragraphs = text.read_text(encoding="utf-8").split("\n\n")
    with open(long, "w", encoding="utf-8") as file:
        while file.tell() < size:
            for paragraph in paragraphs:
                file.write(f"{rng.getrandbits(64):x} {paragraph}\n\n")
    command = [sys.executable, "-m", "firth", "prepare", str(long), "--tokenizer", str(tokenizer), "--json"]
    command += ["--output-dir", str(folder / "long"), "--max-memory", str(limit)]
    start = time.perf_counter()
    result, peak = run(command, os.cpu_count() or 1)
    seconds, bytes_ = time.perf_counter() - start, long.stat().st_size
    shutil.rmtree(folder / "long")
    long.unlink()
    return {"text_bytes": bytes_, "limit": limit, "peak": peak, "tokens": result["tokens"], "seconds": seconds}


def rows_of(shards: Path) -> list[dict[str, Any]]:
    """How full rows are, and how fast they are made on one core."""
    prepared = open_shards(shards)
    vocab, found = prepared.tokenizer.vocab, []
    framed = (
        SequenceTemplate((vocab.cls,), (vocab.sep,))
        if vocab.cls is not None and vocab.sep is not None
        else SequenceTemplate()
    )
    for length in (128, 512):
        for split in ("token", "sentence"):
            source = PackedDataset(prepared.train, length, framed, vocab.pad, seed=0, split_at=split)
            size, best = 64 * 512 // length, float("inf")
            for turn in range(20):
                start = time.process_time()
                source.get_rows(np.arange(size) + turn * size)
                best = min(best, time.process_time() - start)
            tokens = int(source.packing.piece_length.sum())
            found.append(
                {
                    "length": length,
                    "split": split,
                    "used": tokens / prepared.train.num_tokens,
                    "padding": 1 - source.fill_ratio,
                    "tokens_per_second": size * length / best,
                }
            )
    return found


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["--side"]:
        one_side(*words[1:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", help="a text file, plain or compressed")
    parser.add_argument("--kind", default="wordpiece", help="of the tokenizer (wordpiece)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="cores of each side (all)")
    parser.add_argument("--turns", type=int, default=3, help="times that each side runs (3)")
    parser.add_argument("--memory-text", default="5.12GB", help="size of the long text; 0 leaves it out (5.12GB)")
    parser.add_argument("--max-memory", default="512MB", help="what it may take (512MB)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(words)
    say(f"firth {__version__}, Python {sys.version.split()[0]}; {options.workers} of {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, tokenizer = folder / "text.txt", folder / "tokenizer"
        with open(text, "w", encoding="utf-8") as file:
            file.writelines(document.text + "\n\n" for document in Corpus([options.text]))
        learned = islice((document.text for document in Corpus([text])), LEARNED_FROM)
        train_tokenizer(learned, options.kind, VOCABULARY).save(tokenizer)
        sides = compare(text, tokenizer, folder, options.workers, options.turns)
        firth_prepare(str(text), str(tokenizer), str(folder / "shards"), options.workers)
        rows = rows_of(folder / "shards")
        size = parse_bytes(options.memory_text, "--memory-text")
        limit = parse_bytes(options.max_memory, "--max-memory")
        long = bounded_memory(text, tokenizer, folder, size, limit) if size and limit else None
    report(options, sides, rows, long)


def report(options: Any, sides: list[dict[str, Any]], rows: list[dict[str, Any]], long: dict[str, Any] | None) -> None:
    show_table(
        f"{options.text} to tokens on disk, {options.kind}, {options.workers} cores",
        ["side", "ktokens/s", "CPU seconds", "MB at most", "firth is faster by"],
        [
            (
                s["side"],
                f"{s['tokens_per_second'] / 1e3:,.0f}",
                f"{s['cpu_seconds']:.1f}",
                f"{s['memory'] / 1e6:,.0f}",
                f"{s['ours_is_faster']:.2f} ({min(s['ratios']):.2f} to {max(s['ratios']):.2f})",
            )
            for s in sides
        ],
    )
    show_table(
        "Shards to rows, one core",
        ["length", "cut at", "tokens used", "padding", "Mtokens/s"],
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
            f"{long['peak'] / 1e6:,.0f}MB at most, in {long['seconds']:,.0f}s"
        )
    if options.json:
        print(json.dumps({"sides": sides, "rows": rows, "memory": long}))


if __name__ == "__main__":
    main()
