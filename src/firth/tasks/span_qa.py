"""Extractive question answering (SQuAD): predict the start and end token of the answer in a context.

The head gives each token a start logit and an end logit; a span's score is start + end (Devlin et al. 2018, sections
4.2 and 4.3). "No answer" is the span of [CLS]. A context that exceeds the row is split into overlapping windows, each
with the whole question. A token may occur in several windows; only the window with the most context around it counts,
as in BERT's published script. The prediction is "no answer" if its score exceeds that of the best span.
`best_threshold` finds another threshold, on examples that should not be those that are scored.

T tokens of a sequence, S tokens of the context, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import format_count
from firth.metrics import best_squad_scores
from firth.models import Head, ModelConfig, head_for_task
from firth.objectives import Batch
from firth.tasks.head_task import Array, EncodedExample, HeadTask, PackedBatch, softmax
from firth.tasks.task import Prediction
from firth.tasks.template import EncodedSequence, token_at_char
from firth.text import Example
from firth.tokens import Tokenizer

# The next four are those of BERT's published script for SQuAD.
STRIDE_TOKENS = 128
MAX_QUESTION_TOKENS = 64
MAX_ANSWER_TOKENS = 30
NUM_BEST_SPANS = 20
# Probability above which the prediction is "no answer". 0.5: the score of "no answer" is that of the best span, a
# difference of 0, the default of BERT's script.
DEFAULT_NO_ANSWER_THRESHOLD = 0.5


class ContextWindow(NamedTuple):
    """A span of the context: starts at context token `context_start`, at position `sequence_start` of its sequence."""

    context_start: int
    num_tokens: int
    sequence_start: int


@dataclass(frozen=True)
class EncodedQuestion(EncodedExample):
    """A question with each window of its context. `label` is (start, end), inclusive, in context tokens.

    It is () if there is no answer, and None if unknown.
    """

    windows: tuple[ContextWindow, ...] = ()
    offsets: Array | None = None  # (S, 2): character offsets of the context tokens
    context: str = ""


class SpanQATask(HeadTask):
    """Predict start and end logits for each token; [CLS] stands for "no answer"."""

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
            (self.num_truncated_questions, "question", "too long, and truncated"),
            (
                self.num_windowed_contexts,
                "context",
                f"longer than {self.template.max_length} tokens, and split into windows",
            ),
            (self.num_answers_not_found, "answer", "not found in the context"),
        )
        return [f"{format_count(n, f'{noun} was', f'{noun}s were')} {what}." for n, noun, what in kinds if n]

    # --- examples to sequences

    def encode(self, examples: Sequence[Example]) -> list[EncodedQuestion]:
        questions = self.tokenizer.encode_batch([e.texts[0] for e in examples])
        contexts = self.tokenizer.encode_with_offsets([e.texts[1] for e in examples])
        return [self.encode_question(*parts) for parts in zip(examples, questions, contexts, strict=True)]

    def encode_question(self, example: Example, question_ids: list[int], encoding: Any) -> EncodedQuestion:
        max_tokens = self.template.max_text_tokens(2)
        limit = min(MAX_QUESTION_TOKENS, max_tokens // 2)
        self.num_truncated_questions += len(question_ids) > limit
        question_ids = question_ids[:limit]
        context_position = (
            self.template.text_start + len(question_ids) + len(self.template.sequence_template.separator_ids)
        )
        windows = tuple(
            ContextWindow(start, size, context_position)
            for start, size in split_context_windows(len(encoding.ids), max_tokens - len(question_ids))
        )
        self.num_windowed_contexts += len(windows) > 1
        sequences = tuple(
            self.template.build_inputs(question_ids, encoding.ids[w.context_start : w.context_start + w.num_tokens])
            for w in windows
        )
        offsets_S2 = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return EncodedQuestion(
            sequences, self.locate_answer(example, offsets_S2), windows, offsets_S2, example.texts[1]
        )

    def locate_answer(self, example: Example, offsets_S2: Array) -> tuple[int, ...] | None:
        """Return the first and last context token of the first answer; () without answer, None if unknown."""
        if example.target is None or len(example.target) == 0:
            return None if example.target is None else ()
        text, start = example.target[0]
        start = find_answer_start(example.texts[1], text, start)
        if start is None or not len(offsets_S2) or not text:
            # A negative start was already reported when the file was read.
            self.num_answers_not_found += example.target[0].start >= 0
            return None
        first = token_at_char(offsets_S2, start)
        last = int(np.searchsorted(offsets_S2[:, 0], start + len(text))) - 1
        return first, max(first, last)

    def add_labels(self, packed: PackedBatch, items: Sequence[EncodedQuestion]) -> Batch:
        labels = [
            span_labels(s, w, item.label) for item in items for s, w in zip(item.sequences, item.windows, strict=True)
        ]
        label_BT2 = packed.packing.scatter(np.concatenate(labels), -1.0, np.float32)
        soft_BT2 = None
        if softs := [item.soft_label for item in items if item.soft_label is not None]:
            soft_BT2 = packed.packing.scatter(np.concatenate(softs), np.nan, np.float32)
            soft_BT2[label_BT2 < 0] = np.nan  # positions that cannot be an answer
        return packed.batch._replace(target_positions=None, labels=None, task_labels=label_BT2, soft_labels=soft_BT2)

    def model_inputs(self, packed: PackedBatch) -> Batch:
        return packed.batch._replace(target_positions=None)

    def num_labels(self, item: EncodedQuestion) -> int:
        return item.num_tokens

    def split_logits(self, items: Sequence[EncodedQuestion], logits: Array, packed: PackedBatch) -> list[Array]:
        """Split the logits of a batch by item, (tokens of all its windows, 2) each."""
        by_sequence = iter(split_by_sequence(logits, packed))
        return [np.concatenate([next(by_sequence) for _ in item.sequences]) for item in items]

    # --- logits to answers

    def decode_logits(self, items: Sequence[EncodedQuestion], logits: Array, packed: PackedBatch) -> list[Prediction]:
        by_sequence = iter(split_by_sequence(logits, packed))
        return [self.extract_answer(item, [next(by_sequence) for _ in item.sequences]) for item in items]

    def extract_answer(self, item: EncodedQuestion, logits: Sequence[Array]) -> Prediction:
        """Return the best spans over all windows, and the probability of no answer."""
        # The minimum over windows: one window with an answer suffices.
        null_score = min(
            float(x_T2[s.target_positions[0]].sum()) for x_T2, s in zip(logits, item.sequences, strict=True)
        )
        window_S = max_context_window(item.windows)
        spans: list[tuple[float, int, int]] = []
        for i, (window, x_T2) in enumerate(zip(item.windows, logits, strict=True)):
            x_S2 = x_T2[window.sequence_start : window.sequence_start + window.num_tokens]
            usable_S = window_S[window.context_start : window.context_start + window.num_tokens] == i
            spans += [
                (score, s + window.context_start, e + window.context_start)
                for score, s, e in best_answer_spans(x_S2, usable_S)
            ]
        candidates = self.candidate_texts(item, sorted(spans, key=lambda span: (-span[0], span[1], span[2])))
        return self.make_prediction(candidates, null_score)

    def candidate_texts(
        self, item: EncodedQuestion, scored_spans: Sequence[tuple[float, int, int]]
    ) -> list[dict[str, Any]]:
        """Return the distinct texts of the best spans, at most NUM_BEST_SPANS."""
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
        """Return the best answer or no answer, with the probabilities of all candidates."""
        if self.allows_no_answer or not candidates:
            candidates = sorted(
                [*candidates, {"text": "", "start": -1, "score": null_score}], key=lambda c: -c["score"]
            )
        probability = softmax(np.array([c["score"] for c in candidates])).tolist()
        best = [
            {"text": c["text"], "start": c["start"], "probability": p}
            for c, p in zip(candidates, probability, strict=True)
        ]
        answers = [(c["score"], c["text"]) for c in candidates if c["text"]]
        score, answer = max(answers, key=lambda scored: scored[0], default=(-np.inf, ""))
        no_answer = float(1 / (1 + np.exp(np.clip(score - null_score, -500, 500))))
        return self.apply_threshold(Prediction("", extra={"nbest": best, "answer": answer, "no_answer": no_answer}))

    def apply_threshold(self, prediction: Prediction) -> Prediction:
        """Return the prediction with the answer that the threshold gives."""
        assert prediction.extra is not None
        no_answer = self.allows_no_answer and prediction.extra["no_answer"] > self.threshold
        return prediction._replace(prediction="" if no_answer else prediction.extra["answer"])

    def best_threshold(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> float:
        """Return the no-answer threshold with the best F1 on these examples, as the official script chooses it."""
        return best_squad_scores(*self.best_answers(examples, predictions))["best_f1_thresh"]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Return the official scores of the predictions; with unanswerable questions also those of the best threshold.

        The latter need the best span and the probability of no answer of each prediction.
        """
        scores = super().score(examples, predictions)
        if all(e.target for e in examples) or any(p.extra is None for p in predictions):
            return scores
        return scores | best_squad_scores(*self.best_answers(examples, predictions))

    def best_answers(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> tuple[list[str], list[Any], list[float]]:
        """Return the best span, the right answers and the probability of no answer of each question."""
        extras = [p.extra for p in predictions if p.extra is not None]
        return [x["answer"] for x in extras], [e.target for e in examples], [x["no_answer"] for x in extras]


def split_by_sequence(logits_BT2: Array, packed: PackedBatch) -> list[Array]:
    """Return the logits (T, 2) of each sequence of packed rows."""
    packing, flat = packed.packing, logits_BT2.reshape(-1, 2)
    start_N = packing.row_index * packing.width + packing.start
    return [flat[start : start + size] for start, size in zip(start_N, packing.lengths, strict=True)]


def split_context_windows(num_tokens: int, window_tokens: int) -> list[tuple[int, int]]:
    """Return start and length of each window of a context.

    >>> split_context_windows(5, 8), split_context_windows(20, 8)
    ([(0, 5)], [(0, 8), (4, 8), (8, 8), (12, 8)])
    """
    step = min(STRIDE_TOKENS, max(1, window_tokens // 2))
    count = 1 + max(0, -(-(num_tokens - window_tokens) // step))
    return [(i * step, min(window_tokens, num_tokens - i * step)) for i in range(count)]


def max_context_window(windows: Sequence[ContextWindow]) -> Array:
    """(S,): index of the window with the most context on both sides of each token."""
    size = max(window.context_start + window.num_tokens for window in windows)
    position_S = np.arange(size)
    around = np.full((len(windows), size), -1.0)
    for i, window in enumerate(windows):
        left = position_S - window.context_start
        right = window.num_tokens - 1 - left
        around[i] = np.minimum(left, right) + 0.01 * window.num_tokens
        around[i, (left < 0) | (right < 0)] = -1
    return around.argmax(0)


def best_answer_spans(x_S2: Array, usable_S: Array) -> list[tuple[float, int, int]]:
    """Return (score, start, end) of all valid spans among the best starts and ends."""
    start_S = np.where(usable_S, x_S2[:, 0], -np.inf)
    starts = np.argsort(-start_S, kind="stable")[:NUM_BEST_SPANS]
    ends = np.argsort(-x_S2[:, 1], kind="stable")[:NUM_BEST_SPANS]
    s, e = np.meshgrid(starts, ends, indexing="ij")
    is_valid = (e >= s) & (e - s < MAX_ANSWER_TOKENS) & usable_S[s]
    total = (x_S2[s, 0] + x_S2[e, 1])[is_valid]
    return list(zip(total.tolist(), s[is_valid].tolist(), e[is_valid].tolist(), strict=True))


def span_labels(sequence: EncodedSequence, window: ContextWindow, answer: tuple[int, ...] | None) -> Array:
    """(T, 2): 1 at the answer's start and end, 0 at other candidates, -1 elsewhere. Outside the window: [CLS]."""
    label_T2 = np.full((sequence.num_tokens, 2), -1.0)
    label_T2[window.sequence_start : window.sequence_start + window.num_tokens] = label_T2[
        sequence.target_positions[0]
    ] = 0
    if answer is not None:
        inside = (
            len(answer) == 2
            and window.context_start <= answer[0]
            and answer[1] < window.context_start + window.num_tokens
        )
        positions = (
            [position - window.context_start + window.sequence_start for position in answer]
            if inside
            else [sequence.target_positions[0]] * 2
        )
        label_T2[positions, [0, 1]] = 1
    return label_T2


def find_answer_start(context: str, text: str, start: int) -> int | None:
    """Return the character offset of the answer: the given one if it matches, else the nearest match."""
    if context[start : start + len(text)] == text:
        return start
    after, before = context.find(text, max(start, 0)), context.rfind(text, 0, max(start, 0) + len(text))
    offsets = [offset for offset in (before, after) if offset >= 0]
    return min(offsets, key=lambda offset: abs(offset - start)) if offsets else None


def trim_whitespace(context: str, start: int, end: int) -> tuple[int, int]:
    """Return the span without white space at its ends."""
    text = context[start:end]
    left = len(text) - len(text.lstrip())
    return start + left, start + max(left, len(text.rstrip()))
