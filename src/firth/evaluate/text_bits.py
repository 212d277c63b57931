"""Bits per byte of a text: one figure for every tokenizer, and one for each architecture.

The loss of a model is a mean over tokens. Another tokenizer has other tokens, so neither losses nor perplexities of two
vocabularies can be compared. Bytes are the same for both: the negative log2 probability of a text, divided by its
bytes, is the number of bits that a code by this model needs for each of them.

- A decoder predicts every token from those before it. The sum of all logs is exactly the code length of the text.
- An encoder, or a model that restores spans, predicts hidden words. The words are chosen in the *text*: in each passage
  of at most 512 bytes, whole words are hidden in random order until 15% of its bytes are reached. The choice depends on
  the passage alone, so every tokenizer has the same words to restore from the same text. All tokens of a word are
  hidden at once, as in training; the logs of all of them are added, and divided by the bytes of the words. This is the
  masked loss per byte. An encoder sees one mask for each token, so the number of tokens of a word is given; T5 also
  predicts where a word ends. Figures of two architectures are not comparable, those before and after training are.

Unknown tokens (<unk>) are easy to predict and say nothing of the word. A code would have to spell it: each of its bytes
costs 8 bits more. Otherwise a vocabulary with many unknown words would have the best figure.

Texts are scored one by one, so that the difference of two measurements has an interval (`compare_text_bits`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from firth.core.console import progress
from firth.core.errors import UserError
from firth.evaluate.likelihood import CausalScorer, DecoderSpanScorer, Scorer, make_scorer
from firth.evaluate.logprobs import LogprobQuery, compute_logprobs
from firth.metrics import bits_per_byte, perplexity
from firth.models import Model
from firth.text import Document, text_fingerprint
from firth.text.scripts import find_word_spans
from firth.tokens.fertility import word_token_ranges

HIDDEN_BYTES_SHARE = 0.15  # share of the bytes of a passage that is hidden, as in BERT's masks
MAX_PASSAGE_BYTES = 512  # bytes; a tokenizer has at most one token for each
SPELLING_NATS = 8 * math.log(2)  # nats for each byte of an unknown token
MIN_INTERVAL_TEXTS = 5  # texts from which on a difference has an interval


@dataclass(frozen=True)
class TextBits:
    """Code lengths of texts under a model."""

    method: str  # "left-to-right" or "hidden words"
    nats: tuple[float, ...]  # of each text
    bytes: tuple[int, ...]  # of each text: those that were scored
    tokens: int  # scored tokens of all texts
    unknown_bytes: int  # bytes of unknown tokens, which are spelled

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(sum(self.nats), sum(self.bytes))

    def to_dict(self) -> dict[str, Any]:
        return {
            "bits_per_byte": self.bits_per_byte,
            "byte_perplexity": perplexity(sum(self.nats), sum(self.bytes)),  # infinite beyond 1,024 bits
            "method": self.method,
            "texts": len(self.nats),
            "scored_bytes": sum(self.bytes),
            "scored_tokens": self.tokens,
            "unknown_bytes": self.unknown_bytes,
        }


class BitsChange(NamedTuple):
    """A difference in bits per byte, and the half width of its 95% interval; None for too few texts."""

    change: float
    interval: float | None


class HiddenWords(NamedTuple):
    """A passage of a text, and [start, end) of the words in it that are hidden."""

    text: str
    spans: tuple[tuple[int, int], ...]


def measure_text_bits(model: Model, texts: Sequence[str]) -> TextBits:
    """Return the bits per byte of each text: by a decoder of the whole text, by other models of hidden words."""
    scorer = make_scorer(model)
    if not isinstance(scorer, CausalScorer):
        return measure_hidden_words(scorer, texts)
    found, unknown = list(scorer.score_texts(texts)), [unknown_bytes(scorer, text) for text in texts]
    if not sum(one.tokens for one in found):
        raise UserError("There is nothing to score: no text has a token.")
    nats = tuple(-one.logp + SPELLING_NATS * n for one, n in zip(found, unknown, strict=True))
    return TextBits(scorer.method, nats, tuple(one.bytes for one in found), sum(x.tokens for x in found), sum(unknown))


def compare_text_bits(before: TextBits, after: TextBits) -> BitsChange:
    """Return by how much the bits per byte of the same texts have changed.

    The interval is that of a ratio of two sums over texts (the delta method): it says how far the figure would move
    with other texts of the same kind. It knows nothing of other seeds.
    """
    change = after.bits_per_byte - before.bits_per_byte
    if len(before.nats) != len(after.nats) or len(before.nats) < MIN_INTERVAL_TEXTS:
        return BitsChange(change, None)
    residuals = np.zeros(len(before.nats))
    for side, sign in ((after, 1), (before, -1)):
        nats, sizes = np.array(side.nats), np.array(side.bytes, dtype=np.float64)
        residuals += sign * (nats - nats.sum() / sizes.sum() * sizes) / sizes.sum()
    n = len(residuals)
    return BitsChange(change, 1.96 * math.sqrt(float((residuals**2).sum()) * n / (n - 1)) / math.log(2))


# --- hidden words ---------------------------------------------------------------------------------------------------


def measure_hidden_words(scorer: Scorer, texts: Sequence[str]) -> TextBits:
    """Hide words of each text, and add up the logs of their tokens."""
    max_bytes = min(MAX_PASSAGE_BYTES, scorer.max_text_tokens - 1)  # a tokenizer may put a space before the text
    if isinstance(scorer, DecoderSpanScorer):  # its row has the hidden words and their sentinels after the text
        max_bytes = max_bytes * 2 // 3
    nats, sizes, unknown = np.zeros(len(texts)), np.zeros(len(texts), dtype=np.int64), 0
    num_tokens = 0

    def queries() -> Iterator[LogprobQuery]:
        nonlocal unknown
        for number, text in enumerate(texts):
            passages = [passage for passage in hide_words(text, max_bytes) if passage.spans]
            encodings = scorer.tokenizer.encode_with_offsets([passage.text for passage in passages])
            for passage, encoding in zip(passages, encodings, strict=True):
                spans = find_hidden_tokens(encoding, passage.spans, scorer.max_text_tokens)
                if not spans:
                    continue
                for first, last in spans:
                    sizes[number] += covered_bytes(passage.text, encoding, first, last)
                    spelled = count_unknown_bytes(scorer, passage.text, encoding, first, last)
                    nats[number] += SPELLING_NATS * spelled
                    unknown += spelled
                ids = list(encoding.ids)
                if scorer.tokenizer.is_reversed:
                    ids, spans = ids[::-1], [(len(ids) - last, len(ids) - first) for first, last in reversed(spans)]
                yield scorer.hidden_words_query(ids, spans)._replace(text_index=number)

    with progress("scoring", "texts", len(texts)) as shown:
        scored = compute_logprobs(scorer.model, queries(), scorer.batch_tokens)
        for number, answers in groupby(scored, lambda pair: pair[0].text_index):
            for query, answer in answers:
                nats[number] -= float(answer.logprobs.sum())
                num_tokens += len(query.labels)
            shown.advance(number + 1 - shown.done)
    if not sizes.sum():
        raise UserError("There is nothing to score: no text has a word to hide.")
    return TextBits("hidden words", tuple(nats.tolist()), tuple(sizes.tolist()), num_tokens, unknown)


def hide_words(text: str, max_bytes: int = MAX_PASSAGE_BYTES) -> Iterator[HiddenWords]:
    """Cut a text into passages of whole words, and choose the words of each that are hidden.

    >>> [(p.text, [p.text[a:b] for a, b in p.spans]) for p in hide_words("The cat sat down. A dog ran.", 18)]
    [('The cat sat down. ', ['down']), ('A dog ran.', ['A'])]
    """
    for passage in cut_passages(text, max_bytes):
        words = find_word_spans(Document(passage, ""))
        seed = int.from_bytes(text_fingerprint(passage)[:8], "big")
        left = HIDDEN_BYTES_SHARE * len(passage.encode())
        chosen: list[tuple[int, int]] = []
        for i in np.random.default_rng(seed).permutation(len(words)).tolist():
            size = len(passage[slice(*words[i])].encode())
            if size <= left or not chosen:
                chosen.append(words[i])
                left -= size
        yield HiddenWords(passage, tuple(sorted(chosen)))


def cut_passages(text: str, max_bytes: int) -> Iterator[str]:
    """Yield passages of whole words with the spaces after them; a word that is longer than a passage is left out.

    >>> list(cut_passages("one two three", 8))
    ['one two ', 'three']
    """
    passage, size = "", 0
    for match in re.finditer(r"\s*\S+\s*", text):
        word = match[0]
        num_bytes = len(word.encode("utf-8", "surrogatepass"))
        if num_bytes > max_bytes:
            continue
        if size + num_bytes > max_bytes:
            yield passage
            passage, size = "", 0
        passage, size = passage + word, size + num_bytes
    if passage:
        yield passage


def find_hidden_tokens(encoding: Encoding, spans: Sequence[tuple[int, int]], max_tokens: int) -> list[tuple[int, int]]:
    """Return [first, last) of the tokens that overlap each word; words in a common token are one span."""
    if not spans or not encoding.offsets:
        return []
    first_W, last_W = word_token_ranges(np.array(spans), np.array(encoding.offsets))
    found: list[tuple[int, int]] = []
    for first, last in zip(first_W.tolist(), last_W.tolist(), strict=True):
        if found and first < found[-1][1]:
            first = found.pop()[0]
        if first < last <= max_tokens:
            found.append((first, last))
    return found


def covered_bytes(text: str, encoding: Encoding, first: int, last: int) -> int:
    """Bytes of the text of some tokens, without spaces around it."""
    return len(text[encoding.offsets[first][0] : encoding.offsets[last - 1][1]].strip().encode())


def unknown_bytes(scorer: Scorer, text: str) -> int:
    """Bytes of the unknown tokens of a text."""
    if scorer.vocab.unk is None:
        return 0
    (encoding,) = scorer.tokenizer.encode_with_offsets([text])
    return count_unknown_bytes(scorer, text, encoding, 0, len(encoding.ids))


def count_unknown_bytes(scorer: Scorer, text: str, encoding: Encoding, first: int, last: int) -> int:
    """Bytes of those tokens [first, last) that no token of the output vocabulary stands for."""
    unk, size = scorer.vocab.unk, scorer.vocab.size
    if unk is None:
        return 0
    unknown = (i for i in range(first, last) if encoding.ids[i] == unk or encoding.ids[i] >= size)
    return sum(covered_bytes(text, encoding, i, i + 1) for i in unknown)
