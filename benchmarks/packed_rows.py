"""Measure how many positions of a fine-tuning batch hold text: padded to the longest, packed, packed in few shapes.

python benchmarks/packed_rows.py --tokenizer DIR classify sst2.train.jsonl 128 span-qa squad.train.jsonl 384
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from firth.core.console import show_table
from firth.models.config import LearnedPosition
from firth.models.presets import bert
from firth.tasks import FinetuneRecipe, make_task
from firth.tasks.finetune_job import make_finetune_batch_fn, sample_shape_buckets
from firth.tasks.shape_buckets import batch_shape
from firth.text import read_labelled
from firth.tokens import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TextShare:
    """Share of positions that hold text, and number of different batch shapes, by way of batching."""

    task: str
    file: str
    length: int
    tokens: float  # mean per example
    padded: float
    packed: float
    packed_shapes: int
    bucketed: float
    bucketed_shapes: int


def measure(tokenizer: Tokenizer, task: str, file: str, length: int, batch_size: int, max_examples: int) -> TextShare:
    """Measure the second epoch of a run, in the shape buckets that were chosen in the first."""
    examples = read_labelled(file, task)[:max_examples]
    recipe = FinetuneRecipe(task=task, max_seq_length=length, per_device_train_batch_size=batch_size)
    task_object = make_task(
        task, examples, tokenizer, bert(1, 32, 2, tokenizer.vocab.size, position=LearnedPosition(512)), recipe
    )
    items: Sequence[Any] = task_object.encode(examples)
    shapes, batch_fn = (
        sample_shape_buckets(recipe, task_object, items),
        make_finetune_batch_fn(recipe, task_object, items),
    )
    steps = len(items) // batch_size
    epoch = [batch for step in range(steps, 2 * steps) for batch in batch_fn(step)]
    tokens, bucketed = (
        sum(batch.num_tokens for batch in epoch),
        [shapes.bucket_for(batch_shape(batch)) for batch in epoch],
    )
    lengths = [sequence.num_tokens for item in items for sequence in item.sequences]
    groups = np.array_split(np.random.default_rng(0).permutation(lengths), max(1, len(lengths) // batch_size))
    return TextShare(
        task,
        file,
        length,
        tokens / (steps * batch_size),
        sum(lengths) / sum(len(group) * int(group.max()) for group in groups),
        tokens / sum(batch.input_ids.size for batch in epoch),
        len({batch_shape(batch) for batch in epoch}),
        tokens / sum(size.rows * size.width for size in bucketed),
        len(set(bucketed)),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a WordPiece tokenizer")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per batch (32)")
    parser.add_argument("--examples", type=int, default=8000, help="read at most N examples of each file (8000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument(
        "specs", nargs="+", metavar="TASK FILE LENGTH", help="a task, its training file and the row length"
    )
    args = parser.parse_args(argv)
    tokenizer, specs = load_tokenizer(args.tokenizer), args.specs
    shares = [
        measure(tokenizer, task, file, int(length), args.batch_size, args.examples)
        for task, file, length in zip(specs[::3], specs[1::3], specs[2::3], strict=True)
    ]
    rows = [
        (
            f"{share.task} {share.file}, rows of {share.length}",
            f"{share.tokens:.0f}",
            f"{share.padded:.0%}",
            f"{share.packed:.0%} ({share.packed_shapes})",
            f"{share.bucketed:.0%} ({share.bucketed_shapes})",
        )
        for share in shares
    ]
    show_table("Positions that hold text (shapes)", ("", "tokens", "padded", "packed", "bucketed"), rows)
    if args.json:
        print(json.dumps({"shares": [asdict(share) for share in shares]}))


if __name__ == "__main__":
    sys.exit(main())
