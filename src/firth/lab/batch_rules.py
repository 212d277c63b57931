"""The doctor's rules on batches: what the objective of a run, or its task, makes of the first rows.

Labels are the only thing that a model learns from, and a wrong mask is silent: the loss falls, to another minimum. So
the first rows of a run are made again, by the code of training, and their labels are counted.

B rows, T positions, K target slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from firth.objectives import IGNORE_INDEX, Batch
from firth.train.findings import Evidence, Rule
from firth.train.log_rules import rate_option, repeat_command
from firth.train.recipe import TrainingConfig

MIN_LABEL_SHARE = 0.02  # labels per token, below which there is almost nothing to learn
UNLABELLED_SHARE = 0.6  # of the rows without a label; spans leave some short rows whole
MAX_MASKED_SHARE = 0.6  # of the text, above which nothing is left to predict from
RATE_TOLERANCE = 0.25  # relative difference between a promised and a measured rate
MIN_COUNTED_LABELS = 200  # in a sample, before a rate is judged
EMPTY_ANSWERS_SHARE = 0.1  # of the dialogues without a label
FULL_ANSWERS_SHARE = 0.5  # of the dialogues whose tokens are all labels, but for the start and a role
MAX_UNLABELLED_TOKENS = 3  # of such a dialogue


@dataclass(frozen=True)
class BatchFacts:
    """Counts over the first rows of a run."""

    training: TrainingConfig
    num_tokens: int
    num_labels: int
    num_rows: int
    num_empty_rows: int  # rows without a label
    num_padding_labels: int  # labels at positions without a token
    masked_share: float | None = None  # of the text of masked rows that is hidden; None without masks
    expected_rate: float | None = None  # share of the text that is predicted, as the objective promises
    measured_rate: float | None = None
    logged_share: float | None = None  # labels per token of the steps in the log
    promised_rate: float | None = None  # mask rate at the last step, of an objective that changes it
    logged_rate: float | None = None
    dialogues: dict[str, int] = field(default_factory=dict)  # of a chat task: number, empty and full ones
    run: str = "run"

    @property
    def label_share(self) -> float:
        return self.num_labels / max(self.num_tokens, 1)

    def command(self, *options: str) -> str:
        return repeat_command(self.training, self.run, *options)


def count_labels(batch: Batch) -> dict[str, Any]:
    """Return tokens, labels, rows without labels, and labels at positions that hold padding."""
    labels = batch.labels if batch.labels is not None else batch.task_labels
    is_label = (labels != IGNORE_INDEX) & (labels == labels)  # NaN is not itself
    if batch.group_ids is not None and batch.group_ids.shape == is_label.shape:  # choices, rewards, pairs of texts
        is_label &= batch.group_ids >= 0
    flat = is_label.reshape(len(labels), -1)
    is_empty = ~flat.any(1)
    if batch.generator_labels is not None:  # rows whose every token is classified as original or replaced
        is_empty &= (batch.generator_labels == IGNORE_INDEX).all(1)
    return {
        "num_tokens": batch.num_tokens,
        "num_labels": int(is_label.sum()),
        "num_rows": len(flat),
        "num_empty_rows": int(is_empty.sum()),
        "num_padding_labels": count_padding_labels(batch, is_label),
    }


def count_padding_labels(batch: Batch, is_label: np.ndarray) -> int:
    """Return how many labels belong to positions of padding."""
    documents = batch.document_ids if batch.decoder_input_ids is None else batch.decoder_document_ids
    if documents is None:
        return 0
    if batch.target_positions is not None and batch.decoder_input_ids is None:
        if is_label.shape != batch.target_positions.shape:
            return 0
        documents = np.take_along_axis(documents, batch.target_positions, 1)
    if is_label.ndim == 3 and is_label.shape[-1] == documents.shape[-1]:  # two directions
        documents = np.repeat(documents[:, None], is_label.shape[1], 1)
    return int((is_label & (documents < 0)).sum()) if is_label.shape == documents.shape else 0


def check_few_labels(facts: BatchFacts) -> Evidence | None:
    empty = facts.num_empty_rows / max(facts.num_rows, 1)
    if facts.dialogues or (facts.label_share >= MIN_LABEL_SHARE and empty < UNLABELLED_SHARE):
        return None
    return Evidence(
        {"labels per token": facts.label_share, "rows without a label": empty, "rows": facts.num_rows},
        "A step learns from almost nothing.",
        facts.command(rate_option(facts.training, 0.15)),
    )


def check_all_labels(facts: BatchFacts) -> Evidence | None:
    if facts.masked_share is None or facts.masked_share < MAX_MASKED_SHARE:
        return None
    return Evidence(
        {"hidden tokens": facts.masked_share},
        "Almost all tokens are hidden, so there is no context to predict them from: the loss ends at word frequencies.",
        facts.command(rate_option(facts.training, 0.15)),
    )


def check_padding_labels(facts: BatchFacts) -> Evidence | None:
    if not facts.num_padding_labels:
        return None
    return Evidence(
        {"labels on padding": facts.num_padding_labels, "labels": facts.num_labels},
        "The loss counts positions that hold no text: it looks too low, and gradients point to padding.",
        repeat_command(facts.training, facts.run, command="show"),
    )


def check_mask_rate(facts: BatchFacts) -> Evidence | None:
    if facts.num_labels < MIN_COUNTED_LABELS:
        return None
    pairs = {
        "promised share of the text": (facts.expected_rate, facts.measured_rate),
        "labels per token of the first rows": (facts.label_share, facts.logged_share),
        "promised mask rate of the last step": (facts.promised_rate, facts.logged_rate),
    }
    for name, (expected, measured) in pairs.items():
        if expected and measured is not None and abs(measured / expected - 1) > RATE_TOLERANCE:
            return Evidence(
                {name: expected, "measured": measured},
                "The mask rate is not the promised one: rows too short for spans, words of many pieces, or a changed "
                "objective.",
                repeat_command(facts.training, facts.run, command="show"),
            )
    return None


def check_empty_answers(facts: BatchFacts) -> Evidence | None:
    dialogues = facts.dialogues
    if not dialogues or dialogues["empty"] < max(EMPTY_ANSWERS_SHARE * dialogues["count"], 1):
        return None
    return Evidence(
        {"dialogues without a label": dialogues["empty"], "dialogues": dialogues["count"]},
        "The assistant mask is empty: the template changes these answers, or a row has no room for them.",
        facts.command(f"--max-seq-length {2 * facts.training.max_seq_length}"),
    )


def check_full_answers(facts: BatchFacts) -> Evidence | None:
    dialogues = facts.dialogues
    if not dialogues or dialogues["full"] < FULL_ANSWERS_SHARE * dialogues["count"]:
        return None
    return Evidence(
        {"dialogues without a prompt": dialogues["full"], "dialogues": dialogues["count"]},
        "The assistant mask is full: prompts are learned too. The generation marks of the chat template enclose them.",
        facts.command("--task lm"),
    )


BATCH_RULES: tuple[Rule[BatchFacts], ...] = (
    Rule(
        "few-labels",
        "error",
        "there are almost no labels",
        f"fewer than {MIN_LABEL_SHARE:.0%} labels per token, or {UNLABELLED_SHARE:.0%} of the rows without one",
        check_few_labels,
    ),
    Rule(
        "all-labels",
        "error",
        "almost every token is hidden",
        f"{MAX_MASKED_SHARE:.0%} of the text are hidden in place",
        check_all_labels,
    ),
    Rule("padding-labels", "error", "labels are on padding", "a label belongs to padding", check_padding_labels),
    Rule(
        "mask-rate",
        "warning",
        "the mask rate is not as promised",
        f"the measured rate differs by {RATE_TOLERANCE:.0%} from the objective's, or from that of the log",
        check_mask_rate,
    ),
    Rule(
        "empty-assistant-mask",
        "error",
        "the assistant mask is empty",
        f"{EMPTY_ANSWERS_SHARE:.0%} of the dialogues have no label",
        check_empty_answers,
    ),
    Rule(
        "full-assistant-mask",
        "warning",
        "the assistant mask is full",
        f"in {FULL_ANSWERS_SHARE:.0%} of the dialogues all tokens are labels, but for the start and a role",
        check_full_answers,
    ),
)
