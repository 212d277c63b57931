"""How well a tokenizer fits a text: fertility (pieces per word), unknown tokens, lost characters, unused vocabulary.

Fertility near 1 and few unused tokens together mean a vocabulary that suits the text. Tokenizers are trained on one
part of a sample and measured on the rest, because every tokenizer fits the text that it was trained on.
"""

# Shapes: N tokens of a text, W words of it, V tokens of the vocabulary.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from firth.core.console import progress
from firth.core.errors import UserError
from firth.text import Document, is_held_out
from firth.text.scripts import find_word_spans
from firth.tokens.checkup import SampledDocument
from firth.tokens.tokenizer import Tokenizer
from firth.tokens.train import train_tokenizer

MEASURED_SAMPLE_SHARE = 0.2  # share of the sample that no tokenizer is trained on
ROW_LENGTHS_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # row lengths that are reported
TEMPLATE_TOKENS = 2  # special tokens of a row
MAX_LISTED_SPLITS = 20  # entries of a list
MAX_ADDED_WORDS = 1000  # words by which a vocabulary might be extended
SPACE_PREFIX_CHARS = "Ġ▁"  # characters for a space at the beginning of a token
BATCH_DOCUMENTS = 256  # documents that are tokenized together
COMMON_VOCAB_SHARE = 0.95  # share of the vocabulary that should be frequent (Gowda and May 2020)


@dataclass(frozen=True)
class TokenizerFit:
    """Statistics of a tokenizer on a text."""

    name: str
    kind: str
    vocab_size: int
    given: bool  # not trained on this text
    words: int  # of the measured text
    tokens: int
    characters: int
    bytes: int
    pieces_per_word: float
    words_split: float
    bytes_per_token: float
    characters_per_token: float
    unknown: float  # share of the tokens
    unknown_texts: list[tuple[str, int]]
    lost: float  # share of the visible characters that decoding does not restore
    lost_characters: list[tuple[str, int]]
    exact: float  # share of the documents that decoding restores exactly
    unused: float  # share of the vocabulary, in the whole sample
    times_seen: float  # minimum count in the whole text of the most frequent 95% of the used pieces
    saved: float  # share of the tokens, if the thousand most expensive words had a token each
    document_tokens: dict[str, float]
    rows: dict[int, float]  # share of the documents that fit in a row of this length
    worst: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class SampleSplit(NamedTuple):
    """A sample, and its parts for training and for measuring tokenizers."""

    train: list[Document]
    measured: list[Document]
    all_documents: list[SampledDocument]
    is_disjoint: bool  # False: both parts are the whole sample


def split_sample(sample: Iterable[SampledDocument]) -> SampleSplit:
    """Split off a fifth of the documents for measuring; use all for both if one part would be empty."""
    documents = list(sample)
    measured = [d.document for d in documents if is_held_out(d.document.text, MEASURED_SAMPLE_SHARE)]
    train = [d.document for d in documents if not is_held_out(d.document.text, MEASURED_SAMPLE_SHARE)]
    if measured and train:
        return SampleSplit(train, measured, documents, is_disjoint=True)
    everything = [d.document for d in documents]
    return SampleSplit(everything, everything, documents, is_disjoint=False)


def train_candidate_tokenizers(
    sample_split: SampleSplit, kinds: Sequence[str], sizes: Sequence[int], lowercase: bool = False
) -> Iterator[Tokenizer | str]:
    """Yield a tokenizer of every kind and size, or a message if the text is too small for it."""
    for kind in kinds:
        largest = 0
        for size in sorted(sizes):
            try:
                trained = train_tokenizer((d.text for d in sample_split.train), kind, size, lowercase)
            except UserError as e:
                yield f"{kind} with {size:,} tokens: {e}"
                continue
            if trained.vocab.size > largest:
                largest = trained.vocab.size
                yield trained


def measure_fit(
    tokenizer: Tokenizer, sample_split: SampleSplit, text_to_sample_ratio: float, name: str, given: bool = False
) -> TokenizerFit:
    """Measure a tokenizer on a sample; the whole text is `text_to_sample_ratio` times as large."""
    used_V, lengths = count_sample_tokens(tokenizer, sample_split.all_documents, name)
    split = SplitCounter(tokenizer)
    with progress(f"measuring {name}", "documents", len(sample_split.measured)) as p:
        for start in range(0, len(sample_split.measured), BATCH_DOCUMENTS):
            batch = sample_split.measured[start : start + BATCH_DOCUMENTS]
            split.add_documents(batch)
            p.advance(len(batch))
    words, tokens = max(split.word_counts.total(), 1), max(split.num_tokens, 1)
    return TokenizerFit(
        name=name,
        kind=tokenizer.kind,
        vocab_size=tokenizer.vocab.size,
        given=given,
        words=split.word_counts.total(),
        tokens=split.num_tokens,
        characters=split.num_characters,
        bytes=split.num_bytes,
        pieces_per_word=split.piece_counts.total() / words,
        words_split=split.num_split / words,
        bytes_per_token=split.num_bytes / tokens,
        characters_per_token=split.num_characters / tokens,
        unknown=split.unknown_texts.total() / tokens,
        unknown_texts=split.unknown_texts.most_common(MAX_LISTED_SPLITS),
        lost=split.lost_characters.total() / max(split.num_visible_characters, 1),
        lost_characters=split.lost_characters.most_common(MAX_LISTED_SPLITS),
        exact=split.num_exact / max(len(sample_split.measured), 1),
        unused=float((used_V[tokenizer.vocab.non_special_ids] == 0).mean()),
        times_seen=min_frequent_count(tokenizer, used_V) * text_to_sample_ratio,
        saved=sum(sorted(split.extra_tokens().values(), reverse=True)[:MAX_ADDED_WORDS]) / tokens,
        document_tokens={q: float(np.quantile(lengths, s)) for q, s in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))}
        | {"mean": float(lengths.mean()), "largest": float(lengths.max())},
        rows={length: float((lengths + TEMPLATE_TOKENS <= length).mean()) for length in ROW_LENGTHS_TOKENS},
        worst=split.worst_words(),
    )


def count_sample_tokens(
    tokenizer: Tokenizer, sample: Sequence[SampledDocument], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the count of each id (V,), and the tokens of each document, extrapolated if it was truncated."""
    used_V = np.zeros(tokenizer.vocab.size, dtype=np.int64)
    lengths: list[float] = []
    with progress(f"reading with {name}", "documents", len(sample)) as p:
        for start in range(0, len(sample), BATCH_DOCUMENTS):
            batch = sample[start : start + BATCH_DOCUMENTS]
            for ids, sampled in zip(tokenizer.encode_batch([d.document.text for d in batch]), batch, strict=True):
                used_V += np.bincount(ids, minlength=len(used_V))
                lengths.append(len(ids) * sampled.characters / max(len(sampled.document.text), 1))
            p.advance(len(batch))
    return used_V, np.array(lengths)


def min_frequent_count(tokenizer: Tokenizer, count_V: np.ndarray) -> float:
    """Return the count of the rarest used piece, without the rarest 5%.

    Single characters and bytes do not count: they are in the vocabulary to spell everything, however rare.
    """
    ordinary = set(tokenizer.vocab.non_special_ids.tolist())
    tokens = tokenizer.backend.get_vocab().items()
    learned = [
        i for token, i in tokens if i in ordinary and len(token.removeprefix("##").lstrip(SPACE_PREFIX_CHARS)) > 1
    ]
    used = count_V[learned][count_V[learned] > 0]
    return float(np.quantile(used, 1 - COMMON_VOCAB_SHARE, method="lower")) if len(used) else 0.0


class SplitCounter:
    """Counts how a tokenizer splits words, and which characters it loses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.word_counts: Counter[str] = Counter()
        self.piece_counts: Counter[str] = Counter()
        self.split_spellings: dict[str, str] = {}
        self.unknown_texts: Counter[str] = Counter()
        self.lost_characters: Counter[str] = Counter()
        self.num_tokens = self.num_characters = self.num_bytes = self.num_visible_characters = self.num_split = (
            self.num_exact
        ) = 0

    def add_documents(self, batch: Sequence[Document]) -> None:
        encodings = self.tokenizer.encode_with_offsets([d.text for d in batch])
        for document, encoding in zip(batch, encodings, strict=True):
            text, spans_N2 = document.text, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            self.num_tokens += len(spans_N2)
            self.num_characters += len(text)
            self.num_bytes += len(text.encode())
            self._count_words(document, spans_N2)
            self._count_unknown(text, encoding)
            self._check_round_trip(text, encoding.ids)

    def _count_words(self, document: Document, spans_N2: np.ndarray) -> None:
        spans_W = find_word_spans(document)
        if not spans_W:
            return
        first_W, last_W = word_token_ranges(np.array(spans_W), spans_N2)
        for (start, end), first, last in zip(spans_W, first_W.tolist(), last_W.tolist(), strict=True):
            word = document.text[start:end]
            pieces = max(last - first, 1)
            self.word_counts[word] += 1
            self.piece_counts[word] += pieces
            if pieces > 1:
                self.num_split += 1
                if word not in self.split_spellings:
                    inside = np.clip(spans_N2[first:last], start, end) - start
                    self.split_spellings[word] = "·".join(piece_strings(word, inside))

    def _count_unknown(self, text: str, encoding: Encoding) -> None:
        unk = self.tokenizer.vocab.unk
        if unk is not None and unk in encoding.ids:
            self.unknown_texts.update(
                text[start:end] for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True) if i == unk
            )

    def _check_round_trip(self, text: str, ids: Sequence[int]) -> None:
        """Count characters that decoding does not restore; spaces do not count."""
        decoded = self.tokenizer.decode(ids)
        self.num_visible_characters += len("".join(text.split()))
        if decoded == text:
            self.num_exact += 1
        else:
            missing = Counter("".join(text.split()))
            missing.subtract("".join(decoded.split()))
            self.lost_characters.update(+missing)

    def extra_tokens(self) -> dict[str, int]:
        """Return the tokens that each word would save as a single token."""
        return {word: self.piece_counts[word] - n for word, n in self.word_counts.items()}

    def worst_words(self) -> list[dict[str, Any]]:
        """Return the words whose splits cost the most tokens: words of three pieces or more, else of two.

        Words that occur once are left out.
        """
        costs = self.extra_tokens()
        for min_pieces in (3, 2):
            if words := [
                word for word, n in self.word_counts.items() if n > 1 and self.piece_counts[word] >= min_pieces * n
            ]:
                words.sort(key=lambda word: (-costs[word], word))
                return [
                    {
                        "word": word,
                        "count": self.word_counts[word],
                        "pieces": self.piece_counts[word] / self.word_counts[word],
                        "split": self.split_spellings[word],
                    }
                    for word in words[:MAX_LISTED_SPLITS]
                ]
        return []


def word_token_ranges(spans_W2: np.ndarray, spans_N2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each word the first token that overlaps it, and the one after the last, (W,) each.

    >>> words, tokens = np.array([[0, 3], [4, 9]]), np.array([[0, 3], [3, 6], [6, 9], [9, 10]])
    >>> [array.tolist() for array in word_token_ranges(words, tokens)]
    [[0, 1], [1, 3]]
    """
    starts_N, ends_N = np.maximum.accumulate(spans_N2[:, 0]), np.maximum.accumulate(spans_N2[:, 1])
    first_W = np.searchsorted(ends_N, spans_W2[:, 0], "right")
    return first_W, np.maximum(np.searchsorted(starts_N, spans_W2[:, 1], "left"), first_W)


def piece_strings(word: str, spans: np.ndarray) -> list[str]:
    """Return the pieces of a word; further bytes of a split character are shown as a dot.

    >>> piece_strings("aéb", np.array([[0, 1], [1, 2], [1, 2], [2, 3]]))
    ['a', 'é', '.', 'b']
    """
    pieces, reached = [], 0
    for start, end in spans.tolist():
        pieces.append(word[start:end] if end > reached else ".")
        reached = max(reached, end)
    return pieces
