"""How many places of a fine-tuning batch hold text: padded to its longest text, packed, and packed in few shapes.

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
from firth.tasks.finetune import make_finetune_batch_fn, sample_shape_buckets
from firth.tasks.shape_buckets import batch_shape
from firth.text import read_labelled
from firth.tokens import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Share:
    """Shares of places that hold text, and how many shapes the batches have."""

    task: str
    file: str
    length: int
    tokens: float  # of an example
    padded: float
    packed: float
    packed_shapes: int
    few: float
    few_shapes: int


def measure(tokenizer: Tokenizer, task: str, file: str, length: int, batch: int, most: int) -> Share:
    """The second epoch of a run, in the shapes that were found in the first."""
    examples = read_labelled(file, task)[:most]
    recipe = FinetuneRecipe(task=task, max_seq_length=length, per_device_train_batch_size=batch)
    work = make_task(
        task, examples, tokenizer, bert(1, 32, 2, tokenizer.vocab.size, position=LearnedPosition(512)), recipe
    )
    items: Sequence[Any] = work.encode(examples)
    shapes, batches = sample_shape_buckets(recipe, work, items), make_finetune_batch_fn(recipe, work, items)
    steps = len(items) // batch
    made = [one for step in range(steps, 2 * steps) for one in batches(step)]
    tokens, few = sum(one.num_tokens for one in made), [shapes.bucket_for(batch_shape(one)) for one in made]
    sheets = [sheet.num_tokens for item in items for sheet in item.sequences]
    groups = np.array_split(np.random.default_rng(0).permutation(sheets), max(1, len(sheets) // batch))
    return Share(
        task,
        file,
        length,
        tokens / (steps * batch),
        sum(sheets) / sum(len(group) * int(group.max()) for group in groups),
        tokens / sum(one.input_ids.size for one in made),
        len({batch_shape(one) for one in made}),
        tokens / sum(size.rows * size.width for size in few),
        len(set(few)),
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="folder of a WordPiece tokenizer")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--examples", type=int, default=8000, help="take the first so many of each file")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("work", nargs="+", metavar="TASK FILE LENGTH")
    options = parser.parse_args(words)
    tokenizer, work = load_tokenizer(options.tokenizer), options.work
    found = [
        measure(tokenizer, task, file, int(length), options.batch, options.examples)
        for task, file, length in zip(work[::3], work[1::3], work[2::3], strict=True)
    ]
    rows = [
        (
            f"{one.task} {one.file}, rows of {one.length}",
            f"{one.tokens:.0f}",
            f"{one.padded:.0%}",
            f"{one.packed:.0%} ({one.packed_shapes})",
            f"{one.few:.0%} ({one.few_shapes})",
        )
        for one in found
    ]
    show_table("Places that hold text (shapes)", ("", "tokens", "padded", "packed", "few shapes"), rows)
    if options.json:
        print(json.dumps({"shares": [asdict(one) for one in found]}))


if __name__ == "__main__":
    sys.exit(main())
