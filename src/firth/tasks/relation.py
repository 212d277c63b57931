"""How two marked stretches of a text are related, and whether a word means the same in two texts."""

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

ENTITY_MARKERS = ("@", "#")  # punctuation that every tokenizer knows, around the head and around the tail
SpanBounds = tuple[int, int]


class RelationTask(ClassificationTask):
    """`@ head @` and `# tail #` in the text.

    An encoder answers from the states of the two first marks, side by side (Soares et al. 2019, section 3.2). What
    reads forward only answers from the end, where it has read both.
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
            places = [
                (token_at_char(encoding.offsets, first), token_at_char(encoding.offsets, end - 1) + 1)
                for first, end in spans
            ]
            ids, starts = self.truncate_around_spans(encoding.ids, places)
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
        """What fits of a text, both stretches included, and where they begin in it.

        First both ends of the text go, as evenly as possible, then the middle between the stretches.
        """
        room, starts = self.template.max_text_tokens(1), [start for start, _ in token_spans]
        if len(ids) <= room:
            return ids, starts
        self.template.num_truncated += 1
        first, end = min(starts), max(end for _, end in token_spans)
        if end - first <= room:
            begin = min(max(0, first - (room - (end - first)) // 2), len(ids) - room)
            return ids[begin : begin + room], [start - begin for start in starts]
        back = min(max(starts), end - room // 2)  # what follows the gap
        tail = ids[back : back + room // 2]
        kept = ids[first : first + room - len(tail)] + tail
        return kept, [start - first if start == first else start - back + room - len(tail) for start in starts]


class WordInContextTask(RelationTask):
    """Whether a word means the same in two texts: from the states of its first tokens, side by side.

    What reads forward only has the words marked, `@ word @`, and answers from the end.
    """

    name = "word-in-context"
    metric = "accuracy"

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        read = [self.mark_word(text, span) for e in examples for text, span in zip(e.texts, e.spans, strict=True)]
        encodings = iter(self.tokenizer.encode_with_offsets([text for text, _ in read]))
        begins = iter([begin for _, begin in read])
        items = []
        for e in examples:
            found = [next(encodings), next(encodings)]
            places = [token_at_char(encoding.offsets, next(begins)) for encoding in found]
            items.append(
                EncodedExample((self.encode_pair([encoding.ids for encoding in found], places),), self.encode_label(e))
            )
        return items

    def mark_word(self, text: str, span: SpanBounds) -> tuple[str, int]:
        """A text as it is read, and where its word begins."""
        if self.positions_per_label == 2:
            return text, span[0]
        text, spans = insert_entity_markers(text, [span])
        return text, spans[0][0]

    def encode_pair(self, texts: Sequence[list[int]], word_positions: Sequence[int]) -> EncodedSequence:
        """Both texts, cut where they must be so that the words stay."""
        lost = tokens_to_truncate(np.array([[len(ids) for ids in texts]]), self.template.max_text_tokens(2))[0].tolist()
        self.template.num_truncated += any(lost)
        kept, starts = [], []
        for ids, place, less in zip(texts, word_positions, lost, strict=True):
            begin = max(0, min(less, place - (len(ids) - less) // 2))
            kept.append(ids[begin : len(ids) - less + begin])
            starts.append(place - begin)
        sheet = self.template.build_inputs(*kept)
        starts[1] += len(kept[0]) + len(self.template.sequence_template.separator_ids)
        return self.with_target_positions(sheet, starts)


def insert_entity_markers(text: str, spans: Sequence[SpanBounds]) -> tuple[str, list[SpanBounds]]:
    """The text with marks around each stretch, and where the marked stretches are then.

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
    for place, opens, _, sign, i in sorted(edges):
        parts += [text[done:place], sign]
        length += place - done
        if opens:
            begins[i] = length
        length += len(sign)
        if not opens:
            ends[i] = length
        done = place
    return "".join([*parts, text[done:]]), list(zip(begins, ends, strict=True))
