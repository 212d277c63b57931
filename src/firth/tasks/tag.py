"""Token classification: one tag per word (named entities, parts of speech, chunks, semantic roles).

Words are split into subword tokens, but tags belong to words. The label of a word is predicted from its first token
(Devlin et al. 2018, section 5.3); in a decoder from its last, the only one that has attended to the whole word. The
other tokens have no label. A sentence that exceeds the row is split into overlapping windows, and each word is
predicted once, in the window with more context around it.

W words of a sentence, C tags, A labels of a batch.
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
from firth.models import Head, Model, ModelConfig, head_for_task
from firth.models.config import TokenClassificationHead
from firth.objectives import IGNORE_INDEX, Batch
from firth.tasks.head_task import Array, EncodedExample, HeadTask, PackedBatch, gather_answer_logits, softmax
from firth.tasks.task import Prediction
from firth.tasks.template import EncodedSequence
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import ComputeConfig

PREDICATE_MARKER = " @"  # surrounds the predicate in models without token types


@dataclass(frozen=True)
class TokenizedWord:
    """Tokens of a word, the index of the one that predicts its tag, and their token type."""

    token_ids: list[int]
    target_index: int
    token_type_id: int = 0


class WordWindow(NamedTuple):
    """Words [start, end) are the input; words [target_start, target_end) are predicted."""

    start: int
    end: int
    target_start: int
    target_end: int


class TaggingTask(HeadTask):
    """Tag words. Span tags (B-PER, I-PER, O) are scored by entity F1, other tags by accuracy."""

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
                f"longer than {self.template.max_length} tokens, and split into overlapping windows",
            ),
            (self.num_truncated_words, "word", "longer than half a row, and truncated"),
            (self.num_empty_words, "word", "without a token, and replaced by the unknown token"),
            (self.num_unseen_tags, "word", "tagged with a label that the training file lacks, and counted as wrong"),
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
        truncated = token_ids[:limit] or [self.template.unk_id]
        return TokenizedWord(truncated, len(truncated) - 1 if self.architecture == "decoder" else 0)

    def mark_predicate(self, words: list[TokenizedWord], spans: Sequence[tuple[int, int]]) -> list[TokenizedWord]:
        """Mark the predicate by token type 1, or by marker tokens around it."""
        for first, end in spans:
            for i in range(first, end):
                word = words[i]
                before = self.marker_ids if i == first and not self.template.sequence_template.has_token_types else []
                after = self.marker_ids if i == end - 1 and not self.template.sequence_template.has_token_types else []
                words[i] = TokenizedWord([*before, *word.token_ids, *after], word.target_index + len(before), 1)
        return words

    def build_sequences(self, words: Sequence[TokenizedWord]) -> tuple[EncodedSequence, ...]:
        windows = split_word_windows([len(word.token_ids) for word in words], self.template.max_text_tokens(1))
        self.num_windowed_sentences += len(windows) > 1
        return tuple(
            self.build_sequence(words[w.start : w.end], w.target_start - w.start, w.target_end - w.start)
            for w in windows
        )

    def build_sequence(self, words: Sequence[TokenizedWord], target_start: int, target_end: int) -> EncodedSequence:
        inputs = self.template.build_inputs([piece for word in words for piece in word.token_ids])
        begins = list(accumulate((len(word.token_ids) for word in words), initial=self.template.text_start))
        token_type_ids = inputs.token_type_ids
        for begin, word in zip(begins, words, strict=False):
            token_type_ids[begin : begin + len(word.token_ids)] = [word.token_type_id] * len(word.token_ids)
        target_positions = [begin + word.target_index for begin, word in zip(begins, words, strict=False)]
        return EncodedSequence(inputs.ids, token_type_ids, tuple(target_positions[target_start:target_end]))

    def add_labels(self, packed: PackedBatch, items: Sequence[EncodedExample]) -> Batch:
        label_BK = self.scatter_labels(packed, [tag for item in items for tag in item.label], IGNORE_INDEX)
        soft_BKC = self.scatter_soft_labels(packed, items)
        return packed.batch._replace(task_labels=label_BK, soft_labels=soft_BKC, labels=None)

    def num_labels(self, item: EncodedExample) -> int:
        return len(item.label)

    def decode_logits(self, items: Sequence[EncodedExample], logits: Array, packed: PackedBatch) -> list[Prediction]:
        probability_AC = softmax(gather_answer_logits(logits, packed))
        ends = np.cumsum([len(item.label) for item in items])
        return [self.tags_from_probabilities(p_WC) for p_WC in np.split(probability_AC, ends[:-1])]

    def predict(self, model: Model, items: Sequence[Any], compute: ComputeConfig, batch_size: int) -> list[Prediction]:
        """Predict tags with their probabilities. A CRF's have none: its logits are the scores of whole sequences."""
        predictions = super().predict(model, items, compute, batch_size)
        has_crf = isinstance(model.config.head, TokenClassificationHead) and model.config.head.crf
        return [p._replace(extra=None) for p in predictions] if has_crf else predictions

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Score the tags; a marked predicate's own tag is known and not counted (CoNLL-2005)."""
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
    """Return the entity type of marked predicates, which is not scored."""
    return ("V",) if any(e.spans for e in examples) else ()


def tokens_by_word(words: Sequence[str], ids: list[int], offsets: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group the tokens of the space-joined words by word; a space belongs to the word after it."""
    begins = np.array([*accumulate((len(word) + 1 for word in words), initial=0)][:-1]) - 1
    word_of = np.searchsorted(begins, [end - 1 for _, end in offsets], side="right") - 1
    pieces: list[list[int]] = [[] for _ in words]
    for token, word in zip(ids, word_of, strict=True):
        pieces[word].append(token)
    return pieces


def split_word_windows(word_lengths: Sequence[int], max_tokens: int) -> list[WordWindow]:
    """Split words into windows of at most `max_tokens` that overlap by a quarter; predictions switch mid-overlap.

    >>> split_word_windows([1] * 6, 8)
    [WordWindow(start=0, end=6, target_start=0, target_end=6)]
    >>> split_word_windows([1] * 12, 8)  # doctest: +NORMALIZE_WHITESPACE
    [WordWindow(start=0, end=8, target_start=0, target_end=7),
     WordWindow(start=6, end=12, target_start=7, target_end=12)]
    """
    upto = np.array([0, *accumulate(word_lengths)])
    windows: list[WordWindow] = []
    start = target_start = end = 0
    while True:
        end = int(np.searchsorted(upto, upto[start] + max_tokens, side="right")) - 1
        if end >= len(word_lengths):
            return [*windows, WordWindow(start, len(word_lengths), target_start, len(word_lengths))]
        next_start = max(start + 1, int(np.searchsorted(upto, upto[end] - max_tokens // 4)))
        target_end = (next_start + end) // 2
        windows.append(WordWindow(start, end, target_start, target_end))
        start, target_start = next_start, target_end
