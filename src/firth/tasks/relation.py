"""How two marked stretches of a text are related, and whether a word means the same in two texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from firth.models import Head, ModelConfig, head_for
from firth.tasks.classify import Classify
from firth.tasks.form import Ids, Sheet, token_at
from firth.tasks.headed import Item
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.pairs import surplus

MARKS = ("@", "#")  # punctuation that every tokenizer knows, around the head and around the tail
Span = tuple[int, int]


class Relation(Classify):
    """`@ head @` and `# tail #` in the text.

    An encoder answers from the states of the two first marks, side by side (Soares et al. 2019, section 3.2). What
    reads forward only answers from the end, where it has read both.
    """

    name = "relation"
    metric = "f1"

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig, length: int, labels: Sequence[str], learns: bool = True
    ) -> None:
        super().__init__(tokenizer, config, length, labels, learns)
        self.marks = 2 if config.shape == "encoder" else 1

    def answers(self, config: ModelConfig) -> Head:
        return head_for(config, self.name if self.marks == 2 else "classify", self.labels)

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        marked = [mark(e.texts[0], e.spans) for e in examples]
        encodings = self.tokenizer.encodings([text for text, _ in marked])
        items = []
        for e, (_, spans), encoding in zip(examples, marked, encodings, strict=True):
            places = [
                (token_at(encoding.offsets, first), token_at(encoding.offsets, end - 1) + 1) for first, end in spans
            ]
            ids, starts = self.shorten(encoding.ids, places)
            items.append(Item((self.asking(self.form.frame(ids), starts),), self.answer_of(e)))
        return items

    def asking(self, sheet: Sheet, starts: Sequence[int]) -> Sheet:
        if self.marks == 1:
            return sheet
        return sheet._replace(asked=tuple(self.form.begins + start for start in starts))

    def shorten(self, ids: Ids, places: Sequence[Span]) -> tuple[Ids, list[int]]:
        """What fits of a text, both stretches included, and where they begin in it.

        First both ends of the text go, as evenly as possible, then the middle between the stretches.
        """
        room, starts = self.form.room(1), [start for start, _ in places]
        if len(ids) <= room:
            return ids, starts
        self.form.cut += 1
        first, end = min(starts), max(end for _, end in places)
        if end - first <= room:
            begin = min(max(0, first - (room - (end - first)) // 2), len(ids) - room)
            return ids[begin : begin + room], [start - begin for start in starts]
        back = min(max(starts), end - room // 2)  # what follows the gap
        tail = ids[back : back + room // 2]
        kept = ids[first : first + room - len(tail)] + tail
        return kept, [start - first if start == first else start - back + room - len(tail) for start in starts]


class WordInContext(Relation):
    """Whether a word means the same in two texts: from the states of its first tokens, side by side.

    What reads forward only has the words marked, `@ word @`, and answers from the end.
    """

    name = "word-in-context"
    metric = "accuracy"

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        read = [self.one(text, span) for e in examples for text, span in zip(e.texts, e.spans, strict=True)]
        encodings = iter(self.tokenizer.encodings([text for text, _ in read]))
        begins = iter([begin for _, begin in read])
        items = []
        for e in examples:
            found = [next(encodings), next(encodings)]
            places = [token_at(encoding.offsets, next(begins)) for encoding in found]
            items.append(Item((self.two([encoding.ids for encoding in found], places),), self.answer_of(e)))
        return items

    def one(self, text: str, span: Span) -> tuple[str, int]:
        """A text as it is read, and where its word begins."""
        if self.marks == 2:
            return text, span[0]
        text, spans = mark(text, [span])
        return text, spans[0][0]

    def two(self, texts: Sequence[Ids], places: Sequence[int]) -> Sheet:
        """Both texts, cut where they must be so that the words stay."""
        lost = surplus(np.array([[len(ids) for ids in texts]]), self.form.room(2))[0].tolist()
        self.form.cut += any(lost)
        kept, starts = [], []
        for ids, place, less in zip(texts, places, lost, strict=True):
            begin = max(0, min(less, place - (len(ids) - less) // 2))
            kept.append(ids[begin : len(ids) - less + begin])
            starts.append(place - begin)
        sheet = self.form.frame(*kept)
        starts[1] += len(kept[0]) + len(self.form.between)
        return self.asking(sheet, starts)


def mark(text: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
    """The text with marks around each stretch, and where the marked stretches are then.

    >>> mark("Ann met Bo.", [(8, 10), (0, 3)])
    ('# Ann # met @ Bo @.', [(12, 18), (0, 7)])
    """
    edges = [(start, 1, -end, f"{sign} ", i) for i, ((start, end), sign) in enumerate(zip(spans, MARKS, strict=False))]
    edges += [(end, 0, -start, f" {sign}", i) for i, ((start, end), sign) in enumerate(zip(spans, MARKS, strict=False))]
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
