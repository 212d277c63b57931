"""The facts of a text that a plan needs: tokens, documents, rows, unigram entropy; from shards, or from a sample."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from firth.core.console import format_count, quiet, say
from firth.core.errors import UserError
from firth.core.files import format_bytes
from firth.lab.plan_memory import tokenizing_bytes
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
    prepare_bytes: float = 0.0  # of memory, for that


class TextSample(NamedTuple):
    """The shards of the first documents of a text."""

    shards: ShardSet
    scale: float  # the whole text over the sample, by bytes or rows; 1: the sample is all of it
    prepare_seconds: float  # that the whole text will take
    prepare_bytes: float  # of memory, likewise


def read_text_facts(
    recipe: Recipe, shards: ShardSet, scale: float = 1.0, prepare_seconds: float = 0.0, prepare_bytes: float = 0.0
) -> TextFacts:
    """Return the facts of a text from its shards, or from those of a sample that is `1 / scale` of it."""
    counts = shards.num_tokens, shards.num_documents, count_rows(recipe, shards)
    tokens, documents, rows = (round(scale * count) for count in counts)
    return TextFacts(tokens, documents, rows, shards.unigram_entropy, scale != 1.0, prepare_seconds, prepare_bytes)


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
    start, documents, characters, share = time.monotonic(), list[Document](), 0, 1.0
    is_new = tokenizer is None
    with quiet():
        for document in corpus:
            documents.append(document)
            characters += sum(map(len, document.texts))
            if characters >= SAMPLE_CHARS:
                share = corpus.share_read or 0.0
                break
        if tokenizer is None:
            texts = (text for document in documents for text in document.texts)
            tokenizer = train_tokenizer(texts, *new_tokenizer_args, normalize=corpus.cleaner.normalize)
        prepare(documents, tokenizer, folder / "sample", held_out)
    seconds = time.monotonic() - start
    sample_bytes, new_kind = sum(document.num_bytes for document in documents), new_tokenizer_args[0] if is_new else ""
    share = share or sample_bytes / measure_text(corpus)
    scale = 1 / min(share, 1.0)
    if scale > 1:
        say(f"tokens are estimated from the first {SAMPLE_CHARS / 1e6:.0f}M characters, {share:.1%} of the text")
    memory = tokenizing_bytes(scale * sample_bytes, new_kind)
    return TextSample(open_shards(folder / "sample"), scale, scale * seconds, memory)


def measure_text(corpus: Corpus) -> int:
    """Return the bytes of a text. Those of a dataset that does not publish its size are counted, up to a limit."""
    if corpus.is_size_known:
        return corpus.text_bytes
    if not corpus.counted.is_all:
        raise unknown_size_error(corpus)
    return corpus.counted.text_bytes


def unknown_size_error(corpus: Corpus) -> UserError:
    """Return the error of a plan that depends on the size of a text which is too long to count."""
    names = ", ".join(dataset.path for dataset in corpus.datasets if not dataset.size_bytes)
    documents = format_count(corpus.counted.documents, "document")
    return UserError(
        f"{names}: size unknown. It is not published, and more follow after the first {documents} "
        f"({format_bytes(corpus.counted.text_bytes)}). A plan depends on it: make shards with `firth prepare`, and "
        "give their folder as --data."
    )
