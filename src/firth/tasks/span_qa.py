"""The answer to a question, cut out of a context.

T tokens of a sheet, S tokens of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from firth.console import count
from firth.metrics import best_no_answer_threshold, squad_each
from firth.models import Head, ModelConfig, head_for
from firth.objectives import Batch
from firth.tasks.form import Sheet, token_at
from firth.tasks.headed import Array, Headed, Item, Laid, softmax
from firth.tasks.task import Prediction
from firth.text import Example
from firth.tokens import Tokenizer

STRIDE = 128  # these five as in BERT's published procedure for SQuAD
LONGEST_QUESTION = 64
LONGEST_ANSWER = 30
BEST = 20
NO_ANSWER = 0.5  # above this probability there is no answer, unless another threshold was chosen on held-out examples


class Part(NamedTuple):
    """A stretch of the context on a sheet: from token `first` of the context, at place `begins` of the sheet."""

    first: int
    size: int
    begins: int


@dataclass(frozen=True)
class Question(Item):
    """A question with each stretch of its context. `answer` is (start, end) in tokens of the context, both included.

    It is () where there is no answer, and None where nobody knows.
    """

    parts: tuple[Part, ...] = ()
    offsets: Array | None = None  # (S, 2): the characters of each token of the context
    context: str = ""


class SpanQA(Headed):
    """Where the answer starts, and where it ends: two scores for each token. `no answer` is the place of [CLS].

    A long context is read in stretches that overlap. An answer is counted in the stretch that shows most of what is
    around it.
    """

    name = "span-qa"
    metric = "f1"

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        length: int,
        unanswerable: bool,
        threshold: float = NO_ANSWER,
        learns: bool = True,
    ) -> None:
        super().__init__(tokenizer, config, length, learns=learns)
        self.unanswerable, self.threshold = unanswerable, threshold
        self.long_questions = self.not_found = self.strided = 0

    def answers(self, config: ModelConfig) -> Head:
        return head_for(config, "span-qa")

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"unanswerable": self.unanswerable, "threshold": self.threshold}

    @property
    def said(self) -> list[str]:
        kinds = (
            (self.long_questions, "question", "too long, and cut"),
            (self.strided, "context", f"longer than {self.form.length} tokens, and read in stretches"),
            (self.not_found, "answer", "not found in the context"),
        )
        return [f"{count(n, f'{noun} was', f'{noun}s were')} {what}." for n, noun, what in kinds if n]

    # --- examples to sheets

    def encode(self, examples: Sequence[Example]) -> list[Question]:
        questions = self.tokenizer.encode_batch([e.texts[0] for e in examples])
        contexts = self.tokenizer.encodings([e.texts[1] for e in examples])
        return [self.question(*some) for some in zip(examples, questions, contexts, strict=True)]

    def question(self, example: Example, asked: list[int], encoding: Any) -> Question:
        room = self.form.room(2)
        longest = min(LONGEST_QUESTION, room // 2)
        self.long_questions += len(asked) > longest
        asked = asked[:longest]
        begins = self.form.begins + len(asked) + len(self.form.between)
        parts = tuple(Part(first, size, begins) for first, size in stretches(len(encoding.ids), room - len(asked)))
        self.strided += len(parts) > 1
        sheets = tuple(self.form.frame(asked, encoding.ids[p.first : p.first + p.size]) for p in parts)
        offsets_S2 = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return Question(sheets, self.answer_of(example, offsets_S2), parts, offsets_S2, example.texts[1])

    def answer_of(self, example: Example, offsets_S2: Array) -> tuple[int, ...] | None:
        """The first and the last token of the (first) answer."""
        if example.target is None or len(example.target) == 0:
            return None if example.target is None else ()
        text, start = example.target[0]
        start = find(example.texts[1], text, start)
        if start is None or not len(offsets_S2) or not text:
            self.not_found += example.target[0].start >= 0  # where it is known beforehand, the reader has said so
            return None
        first = token_at(offsets_S2, start)
        last = int(np.searchsorted(offsets_S2[:, 0], start + len(text))) - 1
        return first, max(first, last)

    def batch(self, items: Sequence[Question]) -> Batch:
        laid = self.lay(items)
        target = [target_of(s, p, item.answer) for item in items for s, p in zip(item.sheets, item.parts, strict=True)]
        target_BT2 = laid.packing.lay(np.concatenate(target), -1.0, np.float32)
        return laid.batch._replace(asked=None, labels=None, target=target_BT2)

    # --- logits to answers

    def read(self, items: Sequence[Question], logits: Array, laid: Laid) -> list[Prediction]:
        packing = laid.packing
        flat = logits.reshape(-1, 2)
        first_N = packing.row * packing.width + packing.first
        sheets = iter([flat[first : first + size] for first, size in zip(first_N, packing.size, strict=True)])
        return [self.answer(item, [next(sheets) for _ in item.sheets]) for item in items]

    def answer(self, item: Question, logits: Sequence[Array]) -> Prediction:
        """The best stretches of the context over all sheets, and how likely it is that there is none."""
        nothing = min(
            float(x_T2[sheet.asked[0]].sum()) for x_T2, sheet in zip(logits, item.sheets, strict=True)
        )  # the sheet that is the least sure that it holds no answer
        best = fullest(item.parts)
        found: list[tuple[float, int, int]] = []
        for i, (part, x_T2) in enumerate(zip(item.parts, logits, strict=True)):
            x_S2 = x_T2[part.begins : part.begins + part.size]
            usable_S = best[part.first : part.first + part.size] == i
            found += [(score, s + part.first, e + part.first) for score, s, e in spans(x_S2, usable_S)]
        candidates = self.texts(item, sorted(found, key=lambda f: (-f[0], f[1], f[2])))
        return self.decide(candidates, nothing)

    def texts(self, item: Question, found: Sequence[tuple[float, int, int]]) -> list[dict[str, Any]]:
        """The best stretches as texts of the context, each once."""
        assert item.offsets is not None
        seen: dict[str, dict[str, Any]] = {}
        for score, first, last in found:
            start, end = trimmed(item.context, int(item.offsets[first, 0]), int(item.offsets[last, 1]))
            text = item.context[start:end]
            if text and text not in seen:
                seen[text] = {"text": text, "start": start, "score": score}
            if len(seen) == BEST:
                break
        return list(seen.values())

    def decide(self, candidates: list[dict[str, Any]], nothing: float) -> Prediction:
        """The best answer, or none; all candidates with their probabilities."""
        if self.unanswerable or not candidates:
            candidates = sorted([*candidates, {"text": "", "start": -1, "score": nothing}], key=lambda c: -c["score"])
        probability = softmax(np.array([c["score"] for c in candidates])).tolist()
        best = [
            {"text": c["text"], "start": c["start"], "probability": p}
            for c, p in zip(candidates, probability, strict=True)
        ]
        top = max((c["score"] for c in candidates if c["text"]), default=-np.inf)
        extra = {"nbest": best, "no_answer": float(1 / (1 + np.exp(np.clip(top - nothing, -500, 500))))}
        return self.chosen(Prediction("", extra=extra))

    def chosen(self, prediction: Prediction) -> Prediction:
        """The same prediction, answered by the threshold."""
        assert prediction.extra is not None
        answer = next((best["text"] for best in prediction.extra["nbest"] if best["text"]), "")
        nothing = self.unanswerable and prediction.extra["no_answer"] > self.threshold
        return prediction._replace(prediction="" if nothing else answer)

    def settle(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        """Choose the threshold that gives the best F1 on these examples, as the script of SQuAD 2.0 does."""
        if not self.unanswerable or any(e.target is None for e in examples):
            return list(predictions)
        self.threshold = 1.0
        answered = [self.chosen(p).prediction for p in predictions]
        references = [e.target for e in examples]
        no_answer = [p.extra["no_answer"] for p in predictions if p.extra is not None]
        _, f1 = squad_each(answered, references, version=2)
        _, self.threshold = best_no_answer_threshold(f1, answered, references, no_answer)
        return [self.chosen(p) for p in predictions]


def stretches(size: int, room: int) -> list[tuple[int, int]]:
    """Where the stretches of a context begin, and how long they are.

    >>> stretches(5, 8), stretches(20, 8)
    ([(0, 5)], [(0, 8), (4, 8), (8, 8), (12, 8)])
    """
    step = min(STRIDE, max(1, room // 2))
    count = 1 + max(0, -(-(size - room) // step))
    return [(i * step, min(room, size - i * step)) for i in range(count)]


def fullest(parts: Sequence[Part]) -> Array:
    """(S,) for each token of a context the part that shows most of what is on both sides of it."""
    size = max(part.first + part.size for part in parts)
    place = np.arange(size)
    around = np.full((len(parts), size), -1.0)
    for i, part in enumerate(parts):
        left, right = place - part.first, part.first + part.size - 1 - place
        around[i] = np.minimum(left, right) + 0.01 * part.size
        around[i, (left < 0) | (right < 0)] = -1
    return around.argmax(0)


def spans(x_S2: Array, usable_S: Array) -> list[tuple[float, int, int]]:
    """The best (score, start, end) among the best starts and ends, where an answer may be."""
    start_S = np.where(usable_S, x_S2[:, 0], -np.inf)
    starts, ends = np.argsort(-start_S, kind="stable")[:BEST], np.argsort(-x_S2[:, 1], kind="stable")[:BEST]
    s, e = np.meshgrid(starts, ends, indexing="ij")
    fits = (e >= s) & (e - s < LONGEST_ANSWER) & usable_S[s]
    total = (x_S2[s, 0] + x_S2[e, 1])[fits]
    return list(zip(total.tolist(), s[fits].tolist(), e[fits].tolist(), strict=True))


def target_of(sheet: Sheet, part: Part, answer: tuple[int, ...] | None) -> Array:
    """(T, 2): 1 where the answer starts and ends, 0 where it might, -1 elsewhere. None of it in this part: [CLS]."""
    target_T2 = np.full((sheet.size, 2), -1.0)
    target_T2[part.begins : part.begins + part.size] = target_T2[sheet.asked[0]] = 0
    if answer is not None:
        inside = len(answer) == 2 and part.first <= answer[0] and answer[1] < part.first + part.size
        places = [place - part.first + part.begins for place in answer] if inside else [sheet.asked[0]] * 2
        target_T2[places, [0, 1]] = 1
    return target_T2


def find(context: str, text: str, start: int) -> int | None:
    """Where the answer really stands: where it is said to be, or else the nearest place."""
    if context[start : start + len(text)] == text:
        return start
    after, before = context.find(text, max(start, 0)), context.rfind(text, 0, max(start, 0) + len(text))
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start)) if places else None


def trimmed(context: str, start: int, end: int) -> tuple[int, int]:
    """The same stretch without white space at its ends."""
    text = context[start:end]
    left = len(text) - len(text.lstrip())
    return start + left, start + max(left, len(text.rstrip()))
