"""Measure how fast objectives make batches on one core, beside the collators of `transformers` in one process.

    python benchmarks/objective_speed.py [--objective NAME ...] [--length N ...] [--text PATH ...] [--json]

An objective turns rows into a batch; a collator turns examples into a batch. Collators are measured with both inputs
that they take: dictionaries of lists (with the special-tokens mask and word offsets that they would compute otherwise),
and bare arrays. Stacking the examples is part of their time, so one line shows the masking of MLM alone, on a tensor.
All sides alternate on the same tokens, with one thread; the ratio is our speed to theirs, the median over the repeats.

Without `--text` the rows are random tokens, three in four of which start a word.
B rows, L tokens before the noise.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from firth import __version__
from firth.core.console import progress, say, show_table
from firth.objectives import OBJECTIVES, CounterRNG, Objective
from firth.text import Corpus
from firth.tokens import PackedDataset, Rows, Vocabulary, open_shards, prepare, train_tokenizer

OURS = "firth"
PACKED_OBJECTIVES = [name for name, objective in OBJECTIVES.items() if objective.row_layout in ("packed", "segments")]
TOKEN_BITS = ("word_start", "sentence_end", "salient")
VOCAB_SIZE = 30522
DOCUMENTS_PER_ROW = 2
NUM_BATCHES = 4  # different batches; calls cycle through them
MAX_TEXT_DOCUMENTS = 3000  # documents read from --text

Step = Callable[[int], object]
RowMaker = Callable[[Objective, int, int, int], Rows]


@dataclass(frozen=True)
class Speed:
    """Speed of one side. `ratio` is our speed to this side's: the median over the repeats, with both quartiles."""

    objective: str
    side: str
    rows: int
    length: int
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float


# Rows


def vocabulary(size: int = VOCAB_SIZE) -> Vocabulary:
    """Return a vocabulary with special ids first and sentinels last."""
    sentinels = tuple(range(size - 1, size - 101, -1))
    return Vocabulary(size, 0, 1, 2, 3, 4, 5, 6, sentinels, special_ids=(*range(7), *reversed(sentinels)))


def random_rows(objective: Objective, vocab: Vocabulary, rows: int, length: int, seed: int) -> Rows:
    """Return full rows of random text with all token bits: two documents of equal length, or one if limited."""
    L, template, rng = objective.source_length(length), objective.build_template(vocab), np.random.default_rng(seed)
    documents = min(DOCUMENTS_PER_ROW, objective.max_documents(L) or DOCUMENTS_PER_ROW)
    doc_L = np.arange(L, dtype=np.int32) * documents // L
    starts_L, ends_L = np.diff(doc_L, prepend=-1) > 0, np.diff(doc_L, append=documents) > 0
    tokens_BL, maskable_L = (
        vocab.non_special_ids[rng.integers(len(vocab.non_special_ids), size=(rows, L))],
        np.ones(L, bool),
    )
    for boundary_L, special in ((starts_L, template.prefix_ids), (ends_L, template.suffix_ids)):
        if special:
            tokens_BL[:, boundary_L], maskable_L[boundary_L] = special[0], False
    position_L = np.arange(L, dtype=np.int32) - np.flatnonzero(starts_L)[doc_L]
    doc_BL, position_BL, maskable_BL = (np.tile(a, (rows, 1)) for a in (doc_L, position_L, maskable_L))
    first_BL = maskable_BL & (np.diff(maskable_BL, axis=1, prepend=False) | starts_L)
    last_BL = maskable_BL & (np.diff(maskable_BL, axis=1, append=False) | ends_L)
    starts_BL, ends_BL, salient_BL = (maskable_BL & (rng.random((rows, L)) < share) for share in (0.75, 0.05, 0.05))
    index = np.arange(seed * rows, (seed + 1) * rows)
    return Rows(
        tokens_BL, doc_BL, position_BL, maskable_BL, index, row_index=index, epoch=0 * index,
        word_start=starts_BL | first_BL, sentence_end=ends_BL | last_BL, salient=salient_BL,
    )  # fmt: skip


def find_salient_spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of words with a digit or a capital letter: a cheap stand-in for salient spans."""
    spans, offset = [], 0
    for word in text.split(" "):
        if any(c.isdigit() or c.isupper() for c in word):
            spans.append((offset, offset + len(word)))
        offset += len(word) + 1
    return spans


def rows_of_text(paths: Sequence[str], folder: Path) -> tuple[Vocabulary, RowMaker]:
    """Train a WordPiece tokenizer on the text, tokenize it, and return a function that makes packed rows."""
    documents = list(islice(Corpus(paths), MAX_TEXT_DOCUMENTS))
    tokenizer = train_tokenizer((document.text for document in documents), "wordpiece", 8000)
    prepare(documents, tokenizer, folder / "shards", salient=find_salient_spans)
    train, own = open_shards(folder / "shards").train, tokenizer.vocab
    # All objectives read the same text: EOS and sentinels, which WordPiece lacks, get ids after its own.
    sentinels = tuple(range(own.size + 100, own.size, -1))
    special = (*own.special_ids, own.size, *reversed(sentinels))
    vocab = replace(own, size=own.size + 101, eos=own.size, sentinel_ids=sentinels, special_ids=tuple(sorted(special)))

    def make(objective: Objective, rows: int, length: int, seed: int) -> Rows:
        L = objective.source_length(length)
        max_documents, template = objective.max_documents(L), objective.build_template(vocab)
        source = PackedDataset(
            train, L, template, vocab.pad, 0, max_documents_per_row=max_documents, token_bits=TOKEN_BITS
        )
        return source.get_rows(np.arange(seed * rows, (seed + 1) * rows))

    return vocab, make


# The two sides


def our_step(objective: Objective, batches: Sequence[Rows], vocab: Vocabulary) -> Step:
    def step(call: int) -> object:
        rows = batches[call % len(batches)]
        index = rows.stream_index + call * len(rows.stream_index)
        return objective(rows, CounterRNG(0, index, index // len(index)), vocab)

    return step


def their_tokenizer(vocab: Vocabulary) -> Any:
    """Return a tokenizer with the same special ids, which is all that a collator needs."""
    roles = {name: getattr(vocab, name) for name in ("pad", "unk", "eos", "cls", "sep", "mask")}
    names = {i: f"[{name}]" for name, i in roles.items()}
    token_ids = {names.get(i, f"w{i}"): i for i in range(vocab.size)}
    backend = Backend(WordLevel(token_ids, unk_token="[unk]"))
    special = {f"{name}_token": f"[{name}]" for name in roles}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def their_steps(name: str, batches: Sequence[Rows], tokenizer: Any) -> dict[str, Step]:
    """Return the collators for this objective, by tensor type and input type; most objectives have none."""
    mlm_collator = transformers.DataCollatorForLanguageModeling
    collators: dict[str, Callable[..., Any]] = {
        "clm": partial(mlm_collator, tokenizer, mlm=False),
        "mlm": partial(mlm_collator, tokenizer),
        "whole-word": partial(
            mlm_collator, tokenizer, whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0
        ),
        "permutation-lm": partial(transformers.DataCollatorForPermutationLanguageModeling, tokenizer),
    }
    if name not in collators:
        return {}
    steps: dict[str, Step] = {}
    for kind in ("np", "pt"):
        collator = collators[name](return_tensors=kind)
        steps[f"{kind}, lists"] = collate(collator, [their_examples(rows, name == "whole-word") for rows in batches])
        if name != "whole-word":  # it needs word offsets
            steps[f"{kind}, arrays"] = collate(collator, [their_arrays(rows, kind) for rows in batches])
    if name == "mlm":
        steps["masking alone"] = masking_alone(collators[name](return_tensors="pt"), batches)
    return steps


def collate(collator: Any, examples: Sequence[list[Any]]) -> Step:
    """Return a call of the collator on copies, since it may change its input."""
    return lambda call: collator([copy.copy(example) for example in examples[call % len(examples)]])


def masking_alone(collator: Any, batches: Sequence[Rows]) -> Step:
    """Return the masking of a batch that is a tensor already."""
    tokens = [torch.from_numpy(rows.input_ids) for rows in batches]
    special = [torch.from_numpy(~rows.maskable) for rows in batches]

    def step(call: int) -> object:
        i = call % len(batches)
        return collator.torch_mask_tokens(tokens[i].clone(), special_tokens_mask=special[i])

    return step


def their_arrays(rows: Rows, kind: str) -> list[Any]:
    """Return the rows as bare arrays or tensors."""
    return list(rows.input_ids.copy() if kind == "np" else torch.from_numpy(rows.input_ids.copy()))


def their_examples(rows: Rows, with_offsets: bool) -> list[dict[str, Any]]:
    """Return the rows as dictionaries of lists."""
    fields = {
        "input_ids": rows.input_ids,
        "attention_mask": (rows.document_ids >= 0).astype(np.int64),
        "special_tokens_mask": (~rows.maskable).astype(np.int64),
    }
    if with_offsets:
        fields["offset_mapping"] = offset_mapping(rows)
    lists = {name: array.tolist() for name, array in fields.items()}
    return [{name: values[b] for name, values in lists.items()} for b in range(len(rows.input_ids))]


def offset_mapping(rows: Rows) -> np.ndarray:
    """Return character offsets for tokens of one letter each, with a space before every word."""
    assert rows.word_start is not None
    start = np.cumsum(np.where(rows.word_start, 2, 1) * rows.maskable, 1)
    return np.stack([np.where(rows.maskable, start, 0), np.where(rows.maskable, start + 1, 0)], 2)


# Measuring


def timed(step: Step, repeat: int, calls: int) -> float:
    """Return the mean seconds per call."""
    start = time.perf_counter()
    for i in range(calls):
        step(repeat * calls + i)
    return (time.perf_counter() - start) / calls


def measure(
    name: str, make: RowMaker, vocab: Vocabulary, tokenizer: Any, rows: int, length: int, repeats: int, calls: int
) -> list[Speed]:
    """Alternate between the sides; the first repeat is a warm-up and not counted."""
    objective = OBJECTIVES[name]
    batches = [make(objective, rows, length, seed) for seed in range(NUM_BATCHES)]
    sides = {OURS: our_step(objective, batches, vocab), **their_steps(name, batches, tokenizer)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        for side, step in sides.items():
            seconds[side].append(timed(step, repeat, calls if side in (OURS, "masking alone") else 1))
    counted = {side: times[1:] for side, times in seconds.items()}
    tokens = batches[0].input_ids.size
    return [summarize(name, side, rows, length, tokens, times, counted[OURS]) for side, times in counted.items()]


def summarize(
    name: str, side: str, rows: int, length: int, tokens: int, times: Sequence[float], ours: Sequence[float]
) -> Speed:
    ratios = [b / a for a, b in zip(ours, times, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Speed(name, side, rows, length, tokens / statistics.median(times), median, low, high)


def table_rows(speeds: Sequence[Speed]) -> list[tuple[str, ...]]:
    """Return the table rows; our own row has no ratio."""
    table: list[tuple[str, ...]] = []
    for s in speeds:
        mtokens = f"{s.tokens_per_second / 1e6:.2f}"
        if s.side == OURS:
            table.append((s.objective, str(s.length), s.side, mtokens, "", ""))
        else:
            table.append(("", "", s.side, mtokens, f"{s.ratio:.1f}", f"{s.ratio_low:.1f} to {s.ratio_high:.1f}"))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--objective",
        action="append",
        choices=PACKED_OBJECTIVES,
        help="an objective; repeat the option for several (all)",
    )
    parser.add_argument(
        "--length", action="append", type=int, help="row length in tokens; repeat the option for several (128, 512)"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="rows per batch (64)")
    parser.add_argument("--repeats", type=int, default=15, help="timed repeats of each side (15)")
    parser.add_argument("--calls", type=int, default=8, help="our batches per repeat (8)")
    parser.add_argument(
        "--text", action="append", metavar="PATH", help="read this text; pydocs is built in (random tokens)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    versions = f"firth {__version__}, transformers {transformers.__version__}, numpy {np.__version__}"
    say(f"{versions}, torch {torch.__version__}, Python {sys.version.split()[0]}; one thread of {os.cpu_count()} CPUs")

    with tempfile.TemporaryDirectory() as folder:
        if args.text:
            vocab, make = rows_of_text(args.text, Path(folder))
        else:
            vocab = vocabulary()

            def make(objective: Objective, rows: int, length: int, seed: int) -> Rows:
                return random_rows(objective, vocab, rows, length, seed)

        tokenizer = their_tokenizer(vocab)
        names, lengths = args.objective or PACKED_OBJECTIVES, args.length or [128, 512]
        speeds: list[Speed] = []
        with progress("objectives", "measurements", len(names) * len(lengths)) as bar:
            for name in names:
                for length in lengths:
                    speeds += measure(name, make, vocab, tokenizer, args.batch_size, length, args.repeats, args.calls)
                    bar.advance()
    columns = ("objective", "length", "side", "Mtokens/s", "ratio", "quartiles")
    show_table(
        f"Objectives beside collators of transformers: {args.batch_size} rows, one core", columns, table_rows(speeds)
    )
    if args.json:
        facts = {"versions": versions, "text": args.text or "random", "repeats": args.repeats}
        print(json.dumps(facts | {"speeds": [asdict(s) for s in speeds]}))


if __name__ == "__main__":
    main()
