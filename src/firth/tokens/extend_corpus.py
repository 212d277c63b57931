"""Extend a tokenizer by a corpus, and measure what it brings on documents that were not counted.

Every tokenizer fits the text that its tokens were chosen on. So a tenth of the documents is not counted, and measured
before and after. A corpus of few documents is measured as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from firth.core.errors import UserError
from firth.text import Document, is_held_out, text_fingerprint
from firth.tokens.checkup import DocumentSample
from firth.tokens.extend import MAX_NEW_TOKENS, MIN_TOKEN_COUNT, NewToken, extend_tokenizer, propose_tokens
from firth.tokens.fertility import BATCH_DOCUMENTS, SplitCounter
from firth.tokens.tokenizer import Tokenizer
from firth.tokens.train import show_heartbeat

MEASURED_SHARE = 0.1  # share of the documents that are measured and not counted
MEASURED_CHARS = 1_000_000  # characters of the documents that are measured


@dataclass(frozen=True)
class Fragmentation:
    """How a tokenizer splits a text."""

    words: int
    tokens: int
    bytes: int
    tokens_per_word: float
    split_words_share: float
    tokens_per_mb: float
    unknown_per_mb: float  # unknown tokens


@dataclass(frozen=True)
class Extension:
    """An extended tokenizer, its new tokens, and the fragmentation of a text before and after."""

    tokenizer: Tokenizer
    new_tokens: list[NewToken]
    counted_bytes: int  # of the text on which the tokens were chosen
    measured_documents: int
    measured_apart: bool  # False: the measured documents were counted too
    before: Fragmentation
    after: Fragmentation

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements and the new tokens, those that save most first."""
        ordered = sorted(self.new_tokens, key=lambda new: (-new.saved_tokens, -new.count, new.token))
        per_mb = 1e6 / self.counted_bytes
        return {
            "num_new_tokens": len(self.new_tokens),
            "counted_bytes": self.counted_bytes,
            "measured_documents": self.measured_documents,
            "measured_apart": self.measured_apart,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "new_tokens": [{**asdict(new), "saved_tokens_per_mb": new.saved_tokens * per_mb} for new in ordered],
        }


def extend_by_corpus(
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    max_new: int = MAX_NEW_TOKENS,
    min_count: int = MIN_TOKEN_COUNT,
    max_memory: int | None = None,
    seed: int = 0,
) -> Extension:
    """Extend a tokenizer by the words of documents; raise a UserError if no token is worth adding."""
    split = CorpusSplit()
    with show_heartbeat("searching new tokens") as heartbeat:
        texts = heartbeat.track_reading(split.counted_texts(documents))
        new_tokens = propose_tokens(tokenizer, texts, max_new, min_count, max_memory, seed)
    if not new_tokens:
        raise UserError(
            f"No token is worth adding: every word that occurs {min_count} times in this text is a token already. "
            "Keep the tokenizer, or take more text or a smaller --min-count."
        )
    extended = extend_tokenizer(tokenizer, new_tokens)
    measured = split.measured_documents
    before, after = (measure_fragmentation(t, measured) for t in (tokenizer, extended))
    return Extension(
        extended, new_tokens, split.counted_bytes, len(measured), bool(split.held_out.documents), before, after
    )


class CorpusSplit:
    """Splits documents into those that are counted and a bounded sample of those that are measured."""

    def __init__(self) -> None:
        self.held_out, self.counted = DocumentSample(MEASURED_CHARS), DocumentSample(MEASURED_CHARS)
        self.counted_bytes = 0

    def counted_texts(self, documents: Iterable[Document]) -> Iterator[str]:
        """Yield the texts to count: of the first document always, and of 9 in 10 others."""
        for number, document in enumerate(documents):
            text = "\n".join(document.texts)
            is_measured = number > 0 and is_held_out(text, MEASURED_SHARE)
            (self.held_out if is_measured else self.counted).add(text_fingerprint(text), document)
            if not is_measured:
                self.counted_bytes += sum(len(part.encode("utf-8", "surrogatepass")) for part in document.texts)
                yield from document.texts

    @property
    def measured_documents(self) -> list[Document]:
        """The held-out documents, or counted ones if there are none."""
        sample = self.held_out.documents or self.counted.documents
        return [sampled.document for sampled in sample.values()]


def measure_fragmentation(tokenizer: Tokenizer, documents: Sequence[Document]) -> Fragmentation:
    split = SplitCounter(tokenizer)
    for start in range(0, len(documents), BATCH_DOCUMENTS):
        split.add_documents(documents[start : start + BATCH_DOCUMENTS])
    words, tokens, per_mb = split.word_counts.total(), split.num_tokens, 1e6 / max(split.num_bytes, 1)
    return Fragmentation(
        words=words,
        tokens=tokens,
        bytes=split.num_bytes,
        tokens_per_word=split.piece_counts.total() / max(words, 1),
        split_words_share=split.num_split / max(words, 1),
        tokens_per_mb=tokens * per_mb,
        unknown_per_mb=split.unknown_texts.total() * per_mb,
    )
