"""How fast objectives make batches on one core, beside the collators of `transformers` in the same run.

    python benchmarks/objective_speed.py [--objective NAME ...] [--length N ...] [--text PATH ...] [--json]

Ours turns rows into a batch; a collator turns examples into a batch. It is fed in both ways that it takes, with what
saves it work: dictionaries of lists, which say what tokens are special and where words lie, and bare arrays. Because
making one array of many is part of its time, a line shows the noise of its MLM alone, on an array that is ready. All
sides take turns on the same tokens, with one thread; the ratio is our speed to theirs, the median over the turns.

Without `--text` rows are of random tokens, three in four of which start a word; with it, of that text.
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
PACKED = [name for name, objective in OBJECTIVES.items() if objective.row_layout in ("packed", "segments")]
BITS = ("word_start", "sentence_end", "salient")
VOCAB_SIZE = 30522
DOCUMENTS = 2  # in a row of random tokens
BATCHES = 4  # different ones, in turn
MOST_TEXT = 3000  # documents of a text

Step = Callable[[int], object]
RowMaker = Callable[[Objective, int, int, int], Rows]


@dataclass(frozen=True)
class Speed:
    """One side's line. `ratio` is ours to this side, with the middle half of the turns."""

    objective: str
    side: str
    rows: int
    length: int
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float


# What is read


def vocabulary(size: int = VOCAB_SIZE) -> Vocabulary:
    """Special ids first, sentinels last, the rest is text."""
    sentinels = tuple(range(size - 1, size - 101, -1))
    return Vocabulary(size, 0, 1, 2, 3, 4, 5, 6, sentinels, special_ids=(*range(7), *reversed(sentinels)))


def random_rows(objective: Objective, vocab: Vocabulary, rows: int, length: int, seed: int) -> Rows:
    """Full rows of random text, where it may be of two documents of equal length in their frames, with all bits."""
    L, frame, rng = objective.source_length(length), objective.build_template(vocab), np.random.default_rng(seed)
    documents = min(DOCUMENTS, objective.max_documents(L) or DOCUMENTS)
    doc_L = np.arange(L, dtype=np.int32) * documents // L
    begins_L, ends_L = np.diff(doc_L, prepend=-1) > 0, np.diff(doc_L, append=documents) > 0
    tokens_BL, real_L = (
        vocab.non_special_ids[rng.integers(len(vocab.non_special_ids), size=(rows, L))],
        np.ones(L, bool),
    )
    for edge_L, special in ((begins_L, frame.prefix_ids), (ends_L, frame.suffix_ids)):
        if special:
            tokens_BL[:, edge_L], real_L[edge_L] = special[0], False
    position_L = np.arange(L, dtype=np.int32) - np.flatnonzero(begins_L)[doc_L]
    doc_BL, position_BL, real_BL = (np.tile(a, (rows, 1)) for a in (doc_L, position_L, real_L))
    first_BL = real_BL & (np.diff(real_BL, axis=1, prepend=False) | begins_L)
    last_BL = real_BL & (np.diff(real_BL, axis=1, append=False) | ends_L)
    starts_BL, ends_BL, salient_BL = (real_BL & (rng.random((rows, L)) < share) for share in (0.75, 0.05, 0.05))
    index = np.arange(seed * rows, (seed + 1) * rows)
    return Rows(
        tokens_BL, doc_BL, position_BL, real_BL, index, row_index=index, epoch=0 * index,
        word_start=starts_BL | first_BL, sentence_end=ends_BL | last_BL, salient=salient_BL,
    )  # fmt: skip


def numbers(text: str) -> list[tuple[int, int]]:
    """Where the words with a digit or a capital letter lie: salient enough for a measurement."""
    spans, at = [], 0
    for word in text.split(" "):
        if any(c.isdigit() or c.isupper() for c in word):
            spans.append((at, at + len(word)))
        at += len(word) + 1
    return spans


def rows_of_text(paths: Sequence[str], folder: Path) -> tuple[Vocabulary, RowMaker]:
    """Real rows: a WordPiece tokenizer of the text, its shards, and their packed documents."""
    documents = list(islice(Corpus(paths), MOST_TEXT))
    tokenizer = train_tokenizer((document.text for document in documents), "wordpiece", 8000)
    prepare(documents, tokenizer, folder / "shards", salient=numbers)
    train, own = open_shards(folder / "shards").train, tokenizer.vocab
    # One text for all objectives: the ids that WordPiece does not have are put behind its own.
    sentinels = tuple(range(own.size + 100, own.size, -1))
    special = (*own.special_ids, own.size, *reversed(sentinels))
    vocab = replace(own, size=own.size + 101, eos=own.size, sentinel_ids=sentinels, special_ids=tuple(sorted(special)))

    def make(objective: Objective, rows: int, length: int, seed: int) -> Rows:
        L = objective.source_length(length)
        most, frame = objective.max_documents(L), objective.build_template(vocab)
        source = PackedDataset(train, L, frame, vocab.pad, 0, max_documents_per_row=most, token_bits=BITS)
        return source.get_rows(np.arange(seed * rows, (seed + 1) * rows))

    return vocab, make


# The two sides


def our_step(objective: Objective, batches: Sequence[Rows], vocab: Vocabulary) -> Step:
    def step(turn: int) -> object:
        rows = batches[turn % len(batches)]
        index = rows.stream_index + turn * len(rows.stream_index)
        return objective(rows, CounterRNG(0, index, index // len(index)), vocab)

    return step


def their_tokenizer(vocab: Vocabulary) -> Any:
    """A tokenizer with the same special ids; a collator asks it for nothing else."""
    roles = {name: getattr(vocab, name) for name in ("pad", "unk", "eos", "cls", "sep", "mask")}
    names = {i: f"[{name}]" for name, i in roles.items()}
    words = {names.get(i, f"w{i}"): i for i in range(vocab.size)}
    backend = Backend(WordLevel(words, unk_token="[unk]"))
    special = {f"{name}_token": f"[{name}]" for name in roles}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def their_steps(name: str, batches: Sequence[Rows], tokenizer: Any) -> dict[str, Step]:
    """The collators that do the same, by what they return and what they are fed; none for most objectives."""
    masks = transformers.DataCollatorForLanguageModeling
    collators: dict[str, Callable[..., Any]] = {
        "clm": partial(masks, tokenizer, mlm=False),
        "mlm": partial(masks, tokenizer),
        "whole-word": partial(masks, tokenizer, whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0),
        "permutation-lm": partial(transformers.DataCollatorForPermutationLanguageModeling, tokenizer),
    }
    if name not in collators:
        return {}
    steps: dict[str, Step] = {}
    for kind in ("np", "pt"):
        collator = collators[name](return_tensors=kind)
        steps[f"{kind}, lists"] = collate(collator, [their_examples(rows, name == "whole-word") for rows in batches])
        if name != "whole-word":  # which must be told where words lie
            steps[f"{kind}, arrays"] = collate(collator, [their_arrays(rows, kind) for rows in batches])
    if name == "mlm":
        steps["noise alone"] = noise_alone(collators[name](return_tensors="pt"), batches)
    return steps


def collate(collator: Any, examples: Sequence[list[Any]]) -> Step:
    """A collator may change what it is given, so it is given copies."""
    return lambda turn: collator([copy.copy(example) for example in examples[turn % len(examples)]])


def noise_alone(collator: Any, batches: Sequence[Rows]) -> Step:
    """Masking, without what comes before it."""
    tokens = [torch.from_numpy(rows.input_ids) for rows in batches]
    special = [torch.from_numpy(~rows.maskable) for rows in batches]

    def step(turn: int) -> object:
        i = turn % len(batches)
        return collator.torch_mask_tokens(tokens[i].clone(), special_tokens_mask=special[i])

    return step


def their_arrays(rows: Rows, kind: str) -> list[Any]:
    """The same rows as bare arrays or tensors."""
    return list(rows.input_ids.copy() if kind == "np" else torch.from_numpy(rows.input_ids.copy()))


def their_examples(rows: Rows, words: bool) -> list[dict[str, Any]]:
    """The same rows as dictionaries of lists."""
    fields = {
        "input_ids": rows.input_ids,
        "attention_mask": (rows.document_ids >= 0).astype(np.int64),
        "special_tokens_mask": (~rows.maskable).astype(np.int64),
    }
    if words:
        fields["offset_mapping"] = offset_mapping(rows)
    lists = {name: array.tolist() for name, array in fields.items()}
    return [{name: values[b] for name, values in lists.items()} for b in range(len(rows.input_ids))]


def offset_mapping(rows: Rows) -> np.ndarray:
    """Where tokens would lie in a text: each is a letter long, and a space comes before every word."""
    assert rows.word_start is not None
    start = np.cumsum(np.where(rows.word_start, 2, 1) * rows.maskable, 1)
    return np.stack([np.where(rows.maskable, start, 0), np.where(rows.maskable, start + 1, 0)], 2)


# Measuring


def timed(step: Step, turn: int, calls: int) -> float:
    """Seconds for a call."""
    start = time.perf_counter()
    for i in range(calls):
        step(turn * calls + i)
    return (time.perf_counter() - start) / calls


def measure(
    name: str, make: RowMaker, vocab: Vocabulary, tokenizer: Any, rows: int, length: int, turns: int, calls: int
) -> list[Speed]:
    """Let the sides take turns of some calls each; the first turn, which is not counted, warms them up."""
    objective = OBJECTIVES[name]
    batches = [make(objective, rows, length, seed) for seed in range(BATCHES)]
    sides = {OURS: our_step(objective, batches, vocab), **their_steps(name, batches, tokenizer)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(turns + 1):
        for side, step in sides.items():
            seconds[side].append(timed(step, turn, calls if side in (OURS, "noise alone") else 1))
    kept = {side: taken[1:] for side, taken in seconds.items()}
    tokens = batches[0].input_ids.size
    return [speed(name, side, rows, length, tokens, taken, kept[OURS]) for side, taken in kept.items()]


def speed(
    name: str, side: str, rows: int, length: int, tokens: int, taken: Sequence[float], ours: Sequence[float]
) -> Speed:
    ratios = [b / a for a, b in zip(ours, taken, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Speed(name, side, rows, length, tokens / statistics.median(taken), middle, low, high)


def lines(speeds: Sequence[Speed]) -> list[tuple[str, ...]]:
    """The rows of the table; ours has no ratio, because it is to ours."""
    table: list[tuple[str, ...]] = []
    for s in speeds:
        fast = f"{s.tokens_per_second / 1e6:.2f}"
        if s.side == OURS:
            table.append((s.objective, str(s.length), s.side, fast, "", ""))
        else:
            table.append(("", "", s.side, fast, f"{s.ratio:.1f}", f"{s.ratio_low:.1f} to {s.ratio_high:.1f}"))
    return table


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--objective", action="append", choices=PACKED, help="may be given more than once (all)")
    parser.add_argument("--length", action="append", type=int, help="tokens of the model; more than once (128, 512)")
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch (64)")
    parser.add_argument("--turns", type=int, default=15, help="timed turns of each side (15)")
    parser.add_argument("--calls", type=int, default=8, help="batches of ours in a turn (8)")
    parser.add_argument("--text", action="append", metavar="PATH", help="real text; pydocs is the built-in one")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    versions = f"firth {__version__}, transformers {transformers.__version__}, numpy {np.__version__}"
    say(f"{versions}, torch {torch.__version__}, Python {sys.version.split()[0]}; one thread of {os.cpu_count()} CPUs")

    with tempfile.TemporaryDirectory() as folder:
        if options.text:
            vocab, make = rows_of_text(options.text, Path(folder))
        else:
            vocab = vocabulary()

            def make(objective: Objective, rows: int, length: int, seed: int) -> Rows:
                return random_rows(objective, vocab, rows, length, seed)

        tokenizer = their_tokenizer(vocab)
        names, lengths = options.objective or PACKED, options.length or [128, 512]
        speeds: list[Speed] = []
        with progress("objectives", "measurements", len(names) * len(lengths)) as shown:
            for name in names:
                for length in lengths:
                    speeds += measure(name, make, vocab, tokenizer, options.rows, length, options.turns, options.calls)
                    shown.advance()
    columns = ("objective", "length", "side", "Mtokens/s", "ratio", "middle half")
    show_table(f"Objectives beside collators of transformers: {options.rows} rows, one core", columns, lines(speeds))
    if options.json:
        facts = {"versions": versions, "text": options.text or "random", "turns": options.turns}
        print(json.dumps(facts | {"speeds": [asdict(s) for s in speeds]}))


if __name__ == "__main__":
    main()
