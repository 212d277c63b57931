"""Compare an extended tokenizer with the old one on any text: tokens per megabyte, and the share of words that change.

    python benchmarks/extended_tokenizer.py OLD NEW TEXT... [--columns text=source]

On text of the old domain few words should change: those that contain a new token. Any other change is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from tokenizers import Encoding

from firth.text import Corpus
from firth.tokens import Tokenizer, load_tokenizer
from firth.tokens.extend import old_piece_ids


class Comparison(NamedTuple):
    """The tokens of both tokenizers on a text, and its words that change."""

    num_bytes: int
    num_words: int
    old_tokens: int
    new_tokens: int
    changed_words: int


def compare(old: Tokenizer, new: Tokenizer, texts: Iterable[str]) -> Comparison:
    new_ids, totals = old_piece_ids(old, new).keys(), [0] * len(Comparison._fields)
    for text in texts:
        before, after = (words_of(t.encode_with_offsets([text])[0]) for t in (old, new))
        changed = [b for a, b in zip(before, after, strict=True) if a != b]
        assert all(new_ids & set(word) for word in changed), f"a word without a new token has changed: {text[:60]!r}"
        sizes = len(text.encode()), len(before), sum(map(len, before)), sum(map(len, after)), len(changed)
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
    return Comparison(*totals)


def words_of(encoding: Encoding) -> list[list[int]]:
    """Return the ids of each word."""
    pairs = zip(encoding.word_ids, encoding.ids, strict=True)
    return [[i for _, i in group] for _, group in groupby(pairs, key=lambda pair: pair[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--columns", default="", help="the column of the text, as text=source")
    args = parser.parse_args()
    columns = dict([args.columns.split("=")]) if args.columns else None
    found = compare(load_tokenizer(args.old), load_tokenizer(args.new), Corpus(args.texts, columns=columns).texts())
    mb, changed = found.num_bytes / 1e6, found.changed_words / found.num_words
    print(
        f"{mb:.2f} MB, tokens per MB {found.old_tokens / mb:,.0f} -> {found.new_tokens / mb:,.0f} "
        f"({found.new_tokens / found.old_tokens - 1:+.1%}), words that change {changed:.2%}"
    )


if __name__ == "__main__":
    main()
