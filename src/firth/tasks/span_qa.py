"""The answer to a question, cut out of a context.

T tokens of a sheet, S tokens of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import format_count
from firth.metrics import best_no_answer_threshold, squad_per_question
from firth.models import Head, ModelConfig, head_for_task
from firth.objectives import Batch
from firth.tasks.head_task import Array, EncodedExample, HeadTask, PackedBatch, softmax
from firth.tasks.task import Prediction
from firth.tasks.template import EncodedSequence, token_at_char
from firth.text import Example
from firth.tokens import Tokenizer

STRIDE_TOKENS = 128  # these five as in BERT's published procedure for SQuAD
MAX_QUESTION_TOKENS = 64
MAX_ANSWER_TOKENS = 30
NUM_BEST_SPANS = 20
DEFAULT_NO_ANSWER_THRESHOLD = (
    0.5  # above this probability there is no answer, unless another threshold was chosen on held-out examples
)


class ContextWindow(NamedTuple):
    """A stretch of the context on a sheet: from token `context_start` of the context, at place `sequence_start` of the sheet."""

    context_start: int
    num_tokens: int
    sequence_start: int


@dataclass(frozen=True)
class EncodedQuestion(EncodedExample):
    """A question with each stretch of its context. `extract_answer` is (start, end) in tokens of the context, both included.

    It is () where there is no answer, and None where nobody knows.
    """

    windows: tuple[ContextWindow, ...] = ()
    offsets: Array | None = None  # (S, 2): the characters of each token of the context
    context: str = ""


class SpanQATask(HeadTask):
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
        max_length: int,
        allows_no_answer: bool,
        threshold: float = DEFAULT_NO_ANSWER_THRESHOLD,
        is_training: bool = True,
    ) -> None:
        super().__init__(tokenizer, config, max_length, is_training=is_training)
        self.allows_no_answer, self.threshold = allows_no_answer, threshold
        self.num_truncated_questions = self.num_answers_not_found = self.num_windowed_contexts = 0

    def head_config(self, config: ModelConfig) -> Head:
        return head_for_task(config, "span-qa")

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"unanswerable": self.allows_no_answer, "threshold": self.threshold}

    @property
    def notices(self) -> list[str]:
        kinds = (
            (self.num_truncated_questions, "question", "too long, and cut"),
            (
                self.num_windowed_contexts,
                "context",
                f"longer than {self.template.max_length} tokens, and read in stretches",
            ),
            (self.num_answers_not_found, "answer", "not found in the context"),
        )
        return [f"{format_count(n, f'{noun} was', f'{noun}s were')} {what}." for n, noun, what in kinds if n]

    # --- examples to sheets

    def encode(self, examples: Sequence[Example]) -> list[EncodedQuestion]:
        questions = self.tokenizer.encode_batch([e.texts[0] for e in examples])
        contexts = self.tokenizer.encode_with_offsets([e.texts[1] for e in examples])
        return [self.encode_question(*some) for some in zip(examples, questions, contexts, strict=True)]

    def encode_question(self, example: Example, question_ids: list[int], encoding: Any) -> EncodedQuestion:
        room = self.template.max_text_tokens(2)
        longest = min(MAX_QUESTION_TOKENS, room // 2)
        self.num_truncated_questions += len(question_ids) > longest
        question_ids = question_ids[:longest]
        begins = self.template.text_start + len(question_ids) + len(self.template.sequence_template.separator_ids)
        parts = tuple(
            ContextWindow(first, size, begins)
            for first, size in split_context_windows(len(encoding.ids), room - len(question_ids))
        )
        self.num_windowed_contexts += len(parts) > 1
        sheets = tuple(
            self.template.build_inputs(question_ids, encoding.ids[p.context_start : p.context_start + p.num_tokens])
            for p in parts
        )
        offsets_S2 = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return EncodedQuestion(sheets, self.locate_answer(example, offsets_S2), parts, offsets_S2, example.texts[1])

    def locate_answer(self, example: Example, offsets_S2: Array) -> tuple[int, ...] | None:
        """The first and the last token of the (first) answer."""
        if example.target is None or len(example.target) == 0:
            return None if example.target is None else ()
        text, start = example.target[0]
        start = find_answer_start(example.texts[1], text, start)
        if start is None or not len(offsets_S2) or not text:
            self.num_answers_not_found += (
                example.target[0].start >= 0
            )  # where it is known beforehand, the reader has said so
            return None
        first = token_at_char(offsets_S2, start)
        last = int(np.searchsorted(offsets_S2[:, 0], start + len(text))) - 1
        return first, max(first, last)

    def collate(self, items: Sequence[EncodedQuestion]) -> Batch:
        laid = self.pack_items(items)
        target = [
            span_labels(s, p, item.label) for item in items for s, p in zip(item.sequences, item.windows, strict=True)
        ]
        target_BT2 = laid.packing.scatter(np.concatenate(target), -1.0, np.float32)
        return laid.batch._replace(target_positions=None, labels=None, task_labels=target_BT2)

    # --- logits to answers

    def decode_logits(self, items: Sequence[EncodedQuestion], logits: Array, packed: PackedBatch) -> list[Prediction]:
        packing = packed.packing
        flat = logits.reshape(-1, 2)
        first_N = packing.row_index * packing.width + packing.start
        sheets = iter([flat[first : first + size] for first, size in zip(first_N, packing.lengths, strict=True)])
        return [self.extract_answer(item, [next(sheets) for _ in item.sequences]) for item in items]

    def extract_answer(self, item: EncodedQuestion, logits: Sequence[Array]) -> Prediction:
        """The best stretches of the context over all sheets, and how likely it is that there is none."""
        nothing = min(
            float(x_T2[sheet.target_positions[0]].sum()) for x_T2, sheet in zip(logits, item.sequences, strict=True)
        )  # the sheet that is the least sure that it holds no answer
        best = max_context_window(item.windows)
        found: list[tuple[float, int, int]] = []
        for i, (part, x_T2) in enumerate(zip(item.windows, logits, strict=True)):
            x_S2 = x_T2[part.sequence_start : part.sequence_start + part.num_tokens]
            usable_S = best[part.context_start : part.context_start + part.num_tokens] == i
            found += [
                (score, s + part.context_start, e + part.context_start)
                for score, s, e in best_answer_spans(x_S2, usable_S)
            ]
        candidates = self.candidate_texts(item, sorted(found, key=lambda f: (-f[0], f[1], f[2])))
        return self.make_prediction(candidates, nothing)

    def candidate_texts(
        self, item: EncodedQuestion, scored_spans: Sequence[tuple[float, int, int]]
    ) -> list[dict[str, Any]]:
        """The best stretches as texts of the context, each once."""
        assert item.offsets is not None
        seen: dict[str, dict[str, Any]] = {}
        for score, first, last in scored_spans:
            start, end = trim_whitespace(item.context, int(item.offsets[first, 0]), int(item.offsets[last, 1]))
            text = item.context[start:end]
            if text and text not in seen:
                seen[text] = {"text": text, "start": start, "score": score}
            if len(seen) == NUM_BEST_SPANS:
                break
        return list(seen.values())

    def make_prediction(self, candidates: list[dict[str, Any]], null_score: float) -> Prediction:
        """The best answer, or none; all candidates with their probabilities."""
        if self.allows_no_answer or not candidates:
            candidates = sorted(
                [*candidates, {"text": "", "start": -1, "score": null_score}], key=lambda c: -c["score"]
            )
        probability = softmax(np.array([c["score"] for c in candidates])).tolist()
        best = [
            {"text": c["text"], "start": c["start"], "probability": p}
            for c, p in zip(candidates, probability, strict=True)
        ]
        top = max((c["score"] for c in candidates if c["text"]), default=-np.inf)
        extra = {"nbest": best, "no_answer": float(1 / (1 + np.exp(np.clip(top - null_score, -500, 500))))}
        return self.apply_threshold(Prediction("", extra=extra))

    def apply_threshold(self, prediction: Prediction) -> Prediction:
        """The same prediction, answered by the threshold."""
        assert prediction.extra is not None
        answer = next((best["text"] for best in prediction.extra["nbest"] if best["text"]), "")
        nothing = self.allows_no_answer and prediction.extra["no_answer"] > self.threshold
        return prediction._replace(prediction="" if nothing else answer)

    def calibrate(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        """Choose the threshold that gives the best F1 on these examples, as the script of SQuAD 2.0 does."""
        if not self.allows_no_answer or any(e.target is None for e in examples):
            return list(predictions)
        self.threshold = 1.0
        answered = [self.apply_threshold(p).prediction for p in predictions]
        references = [e.target for e in examples]
        no_answer = [p.extra["no_answer"] for p in predictions if p.extra is not None]
        _, f1 = squad_per_question(answered, references, version=2)
        _, self.threshold = best_no_answer_threshold(f1, answered, references, no_answer)
        return [self.apply_threshold(p) for p in predictions]


def split_context_windows(num_tokens: int, window_tokens: int) -> list[tuple[int, int]]:
    """Where the stretches of a context begin, and how long they are.

    >>> split_context_windows(5, 8), split_context_windows(20, 8)
    ([(0, 5)], [(0, 8), (4, 8), (8, 8), (12, 8)])
    """
    step = min(STRIDE_TOKENS, max(1, window_tokens // 2))
    count = 1 + max(0, -(-(num_tokens - window_tokens) // step))
    return [(i * step, min(window_tokens, num_tokens - i * step)) for i in range(count)]


def max_context_window(windows: Sequence[ContextWindow]) -> Array:
    """(S,) for each token of a context the part that shows most of what is on both sides of it."""
    size = max(part.context_start + part.num_tokens for part in windows)
    place = np.arange(size)
    around = np.full((len(windows), size), -1.0)
    for i, part in enumerate(windows):
        left, right = place - part.context_start, part.context_start + part.num_tokens - 1 - place
        around[i] = np.minimum(left, right) + 0.01 * part.num_tokens
        around[i, (left < 0) | (right < 0)] = -1
    return around.argmax(0)


def best_answer_spans(x_S2: Array, usable_S: Array) -> list[tuple[float, int, int]]:
    """The best (score, start, end) among the best starts and ends, where an answer may be."""
    start_S = np.where(usable_S, x_S2[:, 0], -np.inf)
    starts, ends = (
        np.argsort(-start_S, kind="stable")[:NUM_BEST_SPANS],
        np.argsort(-x_S2[:, 1], kind="stable")[:NUM_BEST_SPANS],
    )
    s, e = np.meshgrid(starts, ends, indexing="ij")
    fits = (e >= s) & (e - s < MAX_ANSWER_TOKENS) & usable_S[s]
    total = (x_S2[s, 0] + x_S2[e, 1])[fits]
    return list(zip(total.tolist(), s[fits].tolist(), e[fits].tolist(), strict=True))


def span_labels(sequence: EncodedSequence, window: ContextWindow, answer: tuple[int, ...] | None) -> Array:
    """(T, 2): 1 where the answer starts and ends, 0 where it might, -1 elsewhere. None of it in this part: [CLS]."""
    target_T2 = np.full((sequence.num_tokens, 2), -1.0)
    target_T2[window.sequence_start : window.sequence_start + window.num_tokens] = target_T2[
        sequence.target_positions[0]
    ] = 0
    if answer is not None:
        inside = (
            len(answer) == 2
            and window.context_start <= answer[0]
            and answer[1] < window.context_start + window.num_tokens
        )
        places = (
            [place - window.context_start + window.sequence_start for place in answer]
            if inside
            else [sequence.target_positions[0]] * 2
        )
        target_T2[places, [0, 1]] = 1
    return target_T2


def find_answer_start(context: str, text: str, start: int) -> int | None:
    """Where the answer really stands: where it is said to be, or else the nearest place."""
    if context[start : start + len(text)] == text:
        return start
    after, before = context.find(text, max(start, 0)), context.rfind(text, 0, max(start, 0) + len(text))
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start)) if places else None


def trim_whitespace(context: str, start: int, end: int) -> tuple[int, int]:
    """The same stretch without white space at its ends."""
    text = context[start:end]
    left = len(text) - len(text.lstrip())
    return start + left, start + max(left, len(text.rstrip()))
