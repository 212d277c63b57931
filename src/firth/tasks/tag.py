"""A tag for each word of a sentence: names, parts of speech, chunks, roles of a predicate.

W words of a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import format_count
from firth.metrics import entity_f1, entity_precision, entity_recall
from firth.metrics.tagging import are_span_tags
from firth.models import Head, ModelConfig, head_for_task
from firth.objectives import IGNORE_INDEX, Batch
from firth.tasks.head_task import Array, EncodedExample, HeadTask, PackedBatch, gather_answer_logits, softmax
from firth.tasks.task import Prediction
from firth.tasks.template import EncodedSequence
from firth.text import Example
from firth.tokens import Tokenizer

PREDICATE_MARKER = " @"  # stands around a predicate where the model has no segments to show it


@dataclass(frozen=True)
class TokenizedWord:
    """The pieces of a word, which of them is asked, and the segment they are in."""

    token_ids: list[int]
    target_index: int
    token_type_id: int = 0


class WordWindow(NamedTuple):
    """The words `start` up to `end` are read, and `target_start` up to `target_end` of them asked."""

    start: int
    end: int
    target_start: int
    target_end: int


class TaggingTask(HeadTask):
    """The tag of a word is told from its first piece; in a decoder, which has not read the rest then, from its last.

    A sentence that is longer than a row is read in windows that overlap; each word is asked once.
    """

    name = "tag"

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        max_length: int,
        labels: Sequence[str],
        is_training: bool = True,
    ) -> None:
        super().__init__(tokenizer, config, max_length, labels, is_training)
        self.metric = "entity_f1" if are_span_tags([self.labels]) else "accuracy"
        self.marker_ids = tokenizer.encode(PREDICATE_MARKER)
        self.num_windowed_sentences = self.num_truncated_words = self.num_empty_words = self.num_unseen_tags = 0

    def head_config(self, config: ModelConfig) -> Head:
        return head_for_task(config, "tag", self.labels)

    @property
    def notices(self) -> list[str]:
        kinds = (
            (
                self.num_windowed_sentences,
                "sentence",
                f"longer than {self.template.max_length} tokens, and read in windows that overlap",
            ),
            (self.num_truncated_words, "word", "longer than half a row, and cut"),
            (self.num_empty_words, "word", "without a token, and read as unknown"),
            (self.num_unseen_tags, "word", "of a tag that the training file lacks, and counted as wrong"),
        )
        return [f"{format_count(n, f'{noun} was', f'{noun}s were')} {what}." for n, noun, what in kinds if n]

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        encodings = self.tokenizer.encode_with_offsets([" ".join(e.texts) for e in examples])
        items = []
        for e, encoding in zip(examples, encodings, strict=True):
            pieces = tokens_by_word(e.texts, encoding.ids, encoding.offsets)
            words = self.mark_predicate([self.truncate_word(ids) for ids in pieces], e.spans)
            items.append(EncodedExample(self.build_sequences(words), self.encode_labels(e)))
        return items

    def encode_labels(self, example: Example) -> tuple[int, ...]:
        if example.target is None:
            return (IGNORE_INDEX,) * len(example.texts)
        answer = tuple(self.label_to_id.get(tag, IGNORE_INDEX) for tag in example.target)
        self.num_unseen_tags += answer.count(IGNORE_INDEX)
        return answer

    def truncate_word(self, token_ids: list[int]) -> TokenizedWord:
        limit = max(1, self.template.max_text_tokens(1) // 2 - 2 * len(self.marker_ids))
        self.num_truncated_words += len(token_ids) > limit
        self.num_empty_words += not token_ids
        kept = token_ids[:limit] or [self.template.unk_id]
        return TokenizedWord(kept, len(kept) - 1 if self.architecture == "decoder" else 0)

    def mark_predicate(self, words: list[TokenizedWord], spans: Sequence[tuple[int, int]]) -> list[TokenizedWord]:
        """The predicate in the second segment, or with marks around it."""
        for first, end in spans:
            for i in range(first, end):
                word = words[i]
                before = self.marker_ids if i == first and not self.template.sequence_template.has_token_types else []
                after = self.marker_ids if i == end - 1 and not self.template.sequence_template.has_token_types else []
                words[i] = TokenizedWord([*before, *word.token_ids, *after], word.target_index + len(before), 1)
        return words

    def build_sequences(self, words: Sequence[TokenizedWord]) -> tuple[EncodedSequence, ...]:
        found = split_word_windows([len(word.token_ids) for word in words], self.template.max_text_tokens(1))
        self.num_windowed_sentences += len(found) > 1
        return tuple(
            self.build_sequence(words[w.start : w.end], w.target_start - w.start, w.target_end - w.start) for w in found
        )

    def build_sequence(self, words: Sequence[TokenizedWord], target_start: int, target_end: int) -> EncodedSequence:
        framed = self.template.build_inputs([piece for word in words for piece in word.token_ids])
        begins = list(accumulate((len(word.token_ids) for word in words), initial=self.template.text_start))
        segment = framed.token_type_ids
        for begin, word in zip(begins, words, strict=False):
            segment[begin : begin + len(word.token_ids)] = [word.token_type_id] * len(word.token_ids)
        asked = [begin + word.target_index for begin, word in zip(begins, words, strict=False)]
        return EncodedSequence(framed.ids, segment, tuple(asked[target_start:target_end]))

    def collate(self, items: Sequence[EncodedExample]) -> Batch:
        laid = self.pack_items(items)
        target_BK = self.scatter_labels(laid, [tag for item in items for tag in item.label], IGNORE_INDEX)
        return laid.batch._replace(task_labels=target_BK, labels=None)

    def decode_logits(self, items: Sequence[EncodedExample], logits: Array, packed: PackedBatch) -> list[Prediction]:
        probability_AC = softmax(gather_answer_logits(logits, packed))
        ends = np.cumsum([len(item.label) for item in items])
        return [self.tags_from_probabilities(p_WC) for p_WC in np.split(probability_AC, ends[:-1])]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Where a predicate is marked, its own tag is given away and not counted (CoNLL-2005)."""
        scores = super().score(examples, predictions)
        if self.metric == "entity_f1" and (without := excluded_entity_types(examples)):
            tags, true = [p.prediction for p in predictions], [e.target for e in examples]
            kinds = {"entity_f1": entity_f1, "entity_precision": entity_precision, "entity_recall": entity_recall}
            scores |= {name: kind(tags, true, without) for name, kind in kinds.items()}
        return scores

    def tags_from_probabilities(self, probability_WC: Array) -> Prediction:
        tags = tuple(self.labels[i] for i in probability_WC.argmax(-1)) if len(probability_WC) else ()
        extra: dict[str, Any] = {"probabilities": probability_WC.max(-1).tolist() if tags else []}
        return Prediction(tags, extra=extra)


def excluded_entity_types(examples: Sequence[Example]) -> tuple[str, ...]:
    """The type that is not counted: the predicate's own, where one is marked."""
    return ("V",) if any(e.spans for e in examples) else ()


def tokens_by_word(words: Sequence[str], ids: list[int], offsets: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The tokens of each word, when they are those of the words joined by spaces; a space belongs to what follows."""
    begins = np.array([*accumulate((len(word) + 1 for word in words), initial=0)][:-1]) - 1
    word_of = np.searchsorted(begins, [end - 1 for _, end in offsets], side="right") - 1
    pieces: list[list[int]] = [[] for _ in words]
    for token, word in zip(ids, word_of, strict=True):
        pieces[word].append(token)
    return pieces


def split_word_windows(word_lengths: Sequence[int], max_tokens: int) -> list[WordWindow]:
    """Words of these sizes in windows of `max_tokens` that share a quarter of it; the middle of what they share divides them.

    >>> split_word_windows([1] * 6, 8)
    [WordWindow(start=0, end=6, target_start=0, target_end=6)]
    >>> split_word_windows([1] * 12, 8)  # doctest: +NORMALIZE_WHITESPACE
    [WordWindow(start=0, end=8, target_start=0, target_end=7),
     WordWindow(start=6, end=12, target_start=7, target_end=12)]
    """
    upto = np.array([0, *accumulate(word_lengths)])
    found: list[WordWindow] = []
    first = asks = end = 0
    while True:
        end = int(np.searchsorted(upto, upto[first] + max_tokens, side="right")) - 1
        if end >= len(word_lengths):
            return [*found, WordWindow(first, len(word_lengths), asks, len(word_lengths))]
        following = max(first + 1, int(np.searchsorted(upto, upto[end] - max_tokens // 4)))
        stops = (following + end) // 2
        found.append(WordWindow(first, end, asks, stops))
        first, asks = following, stops
