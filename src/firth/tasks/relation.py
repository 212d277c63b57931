"""Relation extraction between two spans of a text, and word sense in two contexts.

Entity markers (Soares et al. 2019, "Matching the Blanks", section 3.2) show the model which spans are meant: the text
reads `@ head @ ... # tail #`. The classifier's input is the hidden states of the two opening markers, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from firth.models import Head, ModelConfig, head_for_task
from firth.tasks.classify import ClassificationTask
from firth.tasks.head_task import EncodedExample
from firth.tasks.template import EncodedSequence, token_at_char
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.sentence_pairs import tokens_to_truncate

ENTITY_MARKERS = ("@", "#")  # around head and tail: punctuation that is in every vocabulary
SpanBounds = tuple[int, int]


class RelationTask(ClassificationTask):
    """Classify the relation between head and tail.

    An encoder predicts from the concatenated hidden states of the two opening markers. Other models predict from the
    last position, which attends to both spans.
    """

    name = "relation"
    metric = "f1"

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        max_length: int,
        labels: Sequence[str],
        is_training: bool = True,
    ) -> None:
        super().__init__(tokenizer, config, max_length, labels, is_training)
        self.positions_per_label = 2 if config.architecture == "encoder" else 1

    def head_config(self, config: ModelConfig) -> Head:
        return head_for_task(config, self.name if self.positions_per_label == 2 else "classify", self.labels)

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        marked = [insert_entity_markers(e.texts[0], e.spans) for e in examples]
        encodings = self.tokenizer.encode_with_offsets([text for text, _ in marked])
        items = []
        for e, (_, spans), encoding in zip(examples, marked, encodings, strict=True):
            token_spans = [
                (token_at_char(encoding.offsets, first), token_at_char(encoding.offsets, end - 1) + 1)
                for first, end in spans
            ]
            ids, starts = self.truncate_around_spans(encoding.ids, token_spans)
            items.append(
                EncodedExample(
                    (self.with_target_positions(self.template.build_inputs(ids), starts),), self.encode_label(e)
                )
            )
        return items

    def with_target_positions(self, sequence: EncodedSequence, starts: Sequence[int]) -> EncodedSequence:
        if self.positions_per_label == 1:
            return sequence
        return sequence._replace(target_positions=tuple(self.template.text_start + start for start in starts))

    def truncate_around_spans(self, ids: list[int], token_spans: Sequence[SpanBounds]) -> tuple[list[int], list[int]]:
        """Return the ids that fit, with the beginning of both spans, and where the spans start in them.

        Tokens are dropped from both ends of the text, as evenly as possible, then from the middle between the spans.
        """
        limit, starts = self.template.max_text_tokens(1), [start for start, _ in token_spans]
        if len(ids) <= limit:
            return ids, starts
        self.template.num_truncated += 1
        first, end = min(starts), max(end for _, end in token_spans)
        if end - first <= limit:
            begin = min(max(0, first - (limit - (end - first)) // 2), len(ids) - limit)
            return ids[begin : begin + limit], [start - begin for start in starts]
        back = min(max(starts), end - limit // 2)  # first token behind the gap
        tail = ids[back : back + limit // 2]
        kept_ids = ids[first : first + limit - len(tail)] + tail
        return kept_ids, [start - first if start == first else start - back + limit - len(tail) for start in starts]


class WordInContextTask(RelationTask):
    """Classify whether a word has the same sense in two texts.

    An encoder predicts from the concatenated hidden states of the word's first token in each text. Other models read
    marked words, `@ word @`, and predict from the last position.
    """

    name = "word-in-context"
    metric = "accuracy"

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        marked = [self.mark_word(text, span) for e in examples for text, span in zip(e.texts, e.spans, strict=True)]
        encodings = iter(self.tokenizer.encode_with_offsets([text for text, _ in marked]))
        begins = iter([begin for _, begin in marked])
        items = []
        for e in examples:
            pair = [next(encodings), next(encodings)]
            word_positions = [token_at_char(encoding.offsets, next(begins)) for encoding in pair]
            sequence = self.encode_pair([encoding.ids for encoding in pair], word_positions)
            items.append(EncodedExample((sequence,), self.encode_label(e)))
        return items

    def mark_word(self, text: str, span: SpanBounds) -> tuple[str, int]:
        """Return the text that the model reads, and the character at which its word begins."""
        if self.positions_per_label == 2:
            return text, span[0]
        text, spans = insert_entity_markers(text, [span])
        return text, spans[0][0]

    def encode_pair(self, texts: Sequence[list[int]], word_positions: Sequence[int]) -> EncodedSequence:
        """Encode both texts, truncated around their words."""
        lost = tokens_to_truncate(np.array([[len(ids) for ids in texts]]), self.template.max_text_tokens(2))[0].tolist()
        self.template.num_truncated += any(lost)
        kept_ids, starts = [], []
        for ids, position, num_lost in zip(texts, word_positions, lost, strict=True):
            begin = max(0, min(num_lost, position - (len(ids) - num_lost) // 2))
            kept_ids.append(ids[begin : len(ids) - num_lost + begin])
            starts.append(position - begin)
        starts[1] += len(kept_ids[0]) + len(self.template.sequence_template.separator_ids)
        return self.with_target_positions(self.template.build_inputs(*kept_ids), starts)


def insert_entity_markers(text: str, spans: Sequence[SpanBounds]) -> tuple[str, list[SpanBounds]]:
    """Return the text with markers around each span, and the spans with their markers in it.

    >>> insert_entity_markers("Ann met Bo.", [(8, 10), (0, 3)])
    ('# Ann # met @ Bo @.', [(12, 18), (0, 7)])
    """
    edges = [
        (start, 1, -end, f"{sign} ", i)
        for i, ((start, end), sign) in enumerate(zip(spans, ENTITY_MARKERS, strict=False))
    ]
    edges += [
        (end, 0, -start, f" {sign}", i)
        for i, ((start, end), sign) in enumerate(zip(spans, ENTITY_MARKERS, strict=False))
    ]
    parts, length, done = [], 0, 0
    begins, ends = [0] * len(spans), [0] * len(spans)
    for offset, opens, _, sign, i in sorted(edges):
        parts += [text[done:offset], sign]
        length += offset - done
        if opens:
            begins[i] = length
        length += len(sign)
        if not opens:
            ends[i] = length
        done = offset
    return "".join([*parts, text[done:]]), list(zip(begins, ends, strict=True))
