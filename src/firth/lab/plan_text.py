"""The facts of a text that a plan needs: tokens, documents, rows, unigram entropy; from shards, or from a sample."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from firth.core.console import quiet, say
from firth.text import Corpus, Document
from firth.tokens import MixedShards, ShardSet, Tokenizer, open_shards, prepare, train_tokenizer
from firth.train.dataloader import make_row_dataset
from firth.train.recipe import Recipe

SAMPLE_CHARS = 4_000_000  # characters of the text that are tokenized for a plan


class TextFacts(NamedTuple):
    """What a plan needs to know of a text."""

    tokens: int  # of the training part
    documents: int
    rows: int  # of the recipe's length
    unigram_entropy: float
    is_estimated: bool = False  # from a sample
    prepare_seconds: float = 0.0  # until it is tokenized


class TextSample(NamedTuple):
    """The shards of the first documents of a text."""

    shards: ShardSet
    scale: float  # the whole text over the sample, by bytes; 1: the sample is all of it
    prepare_seconds: float  # that the whole text will take


def read_text_facts(recipe: Recipe, shards: ShardSet, scale: float = 1.0, prepare_seconds: float = 0.0) -> TextFacts:
    """Return the facts of a text from its shards, or from those of a sample that is `1 / scale` of it."""
    counts = shards.num_tokens, shards.num_documents, count_rows(recipe, shards)
    tokens, documents, rows = (round(scale * count) for count in counts)
    return TextFacts(tokens, documents, rows, shards.unigram_entropy, scale != 1.0, prepare_seconds)


def count_rows(recipe: Recipe, shards: ShardSet | MixedShards) -> int:
    """Return the rows of one pass over shards: documents with their special tokens, and padding where they end."""
    # The batch is chosen later, and `order: stream` needs one: a single stream has as many rows as several.
    recipe = replace(recipe, per_device_train_batch_size=1, gradient_accumulation_steps=1, processes=1)
    return make_row_dataset(recipe, shards, held_out=False).num_rows


def sample_text(
    corpus: Corpus,
    tokenizer: Tokenizer | None,
    new_tokenizer_args: tuple[str, int, bool],
    held_out: float,
    folder: Path,
) -> TextSample:
    """Tokenize the first documents of a text into `folder`, with a tokenizer trained on them unless one is given.

    `new_tokenizer_args` are kind, size and case of a new tokenizer. The seconds of the whole text are those of the
    sample, times its size.
    """
    start, share = time.monotonic(), 1.0

    def read_sample() -> Iterator[Document]:
        nonlocal share
        characters = 0
        for document in corpus:
            yield document
            characters += sum(map(len, document.texts))
            if characters >= SAMPLE_CHARS:
                share = (corpus.bytes_read or corpus.total_bytes) / max(corpus.total_bytes, 1)
                return

    with quiet():
        documents = list(read_sample())
        if tokenizer is None:
            texts = (text for document in documents for text in document.texts)
            tokenizer = train_tokenizer(texts, *new_tokenizer_args, normalize=corpus.cleaner.normalize)
        prepare(documents, tokenizer, folder / "sample", held_out)
    scale = 1 / min(max(share, 1e-9), 1.0)
    seconds = scale * (time.monotonic() - start)
    if scale > 1:
        say(f"tokens are estimated from the first {SAMPLE_CHARS / 1e6:.0f}M characters, {share:.1%} of the text")
    return TextSample(open_shards(folder / "sample"), scale, seconds)
