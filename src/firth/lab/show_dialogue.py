"""The labels of labelled dialogues, before any training: `firth show CHECKPOINT --task lm --data chats.jsonl`.

Each example is rendered and encoded by the task of fine-tuning itself. The tokens that carry a label are marked: the
answers and their ends (lm), the last answer of each side (preference), the token where the reward is read (reward).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import format_count
from firth.core.errors import UserError, quote
from firth.lab.show_row import (
    RowView,
    TokenFormatter,
    TokenMark,
    build_sequence,
    default_marks,
    make_token_formatter,
)
from firth.models import read_config
from firth.tasks import FinetuneRecipe, make_task
from firth.tasks.chat import CHAT_TEMPLATE_KEY
from firth.tasks.finetune_job import encode_file
from firth.tasks.lm import DialogueTurn, EncodedDialogue
from firth.tasks.preference import EncodedPreference
from firth.tasks.seq2seq_batch import DecoderExample
from firth.text import Example, read_labelled
from firth.tokens import Tokenizer, load_tokenizer

SHOWN_TASKS = ("lm", "preference", "reward")
SIDES = ("chosen", "rejected")
ENCODER_INPUT = "encoder input"  # of an encoder-decoder, whose labels are the decoder's


class LabelledSequence(NamedTuple):
    """Token ids, and the positions of those that carry a label."""

    name: str
    ids: Sequence[int]
    labelled: Sequence[int]
    kind: str = "label"  # one of TOKEN_KINDS

    def to_dict(self) -> dict[str, Any]:
        known = set(self.labelled)
        labels = [token if i in known else None for i, token in enumerate(self.ids)]
        return {"name": self.name, "ids": list(self.ids), self.kind + "s": labels}


@dataclass(frozen=True)
class DialoguePreview:
    """The result of `firth show --task`, for the terminal, the page and JSON."""

    header: dict[str, str]
    views: list[RowView]
    rows: list[dict[str, Any]]
    counts: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "counts": self.counts}


def build_dialogue_preview(
    checkpoint: str | Path,
    task_name: str,
    data: str | Path,
    num_rows: int,
    columns: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
    **fields: Any,
) -> DialoguePreview:
    """Return a preview of the first examples of a file; `fields` are those of a FinetuneRecipe, as max_seq_length."""
    if task_name not in SHOWN_TASKS:
        raise UserError(f"--task {quote(task_name)}: `firth show` shows the tasks {', '.join(SHOWN_TASKS)}.")
    examples = read_labelled(data, task_name, columns, "train", encoding)
    recipe = FinetuneRecipe(checkpoint=str(checkpoint), task=task_name, train=str(data), dev=str(data), **fields)
    config, tokenizer = read_config(checkpoint), load_tokenizer(checkpoint)
    task = make_task(task_name, examples, tokenizer, config, recipe)
    items = list(encode_file(task, examples, str(data)))
    sequences = [labelled_sequences(item) for item in items]
    num_tokens = sum(len(s.ids) for own in sequences for s in own)
    num_labels = sum(len(s.labelled) for own in sequences for s in own)
    source = "the checkpoint's own" if tokenizer.config.get(CHAT_TEMPLATE_KEY) else "Firth's: the checkpoint has none"
    header = {
        "model": f"{checkpoint}: {config.family}, {config.architecture}",
        "task": task_name,
        "chat template": source,
        "data": f"{data}: {format_count(len(examples), 'example')}, {num_tokens:,} tokens, {num_labels:,} with a label",
        **{f"note {i}": notice for i, notice in enumerate(task.notices, 1)},
    }
    shown = list(zip(examples, sequences, strict=True))[:num_rows]
    return DialoguePreview(
        header,
        [view_example(e, own, task.tokenizer) for e, own in shown],
        [{"id": e.id, "sequences": [s.to_dict() for s in own]} for e, own in shown],
        {"examples": len(examples), "tokens": num_tokens, "labels": num_labels},
    )


def labelled_sequences(item: Any) -> list[LabelledSequence]:
    """Return the sequences of an encoded example, with their labels."""
    if isinstance(item, EncodedDialogue):
        return [sequence for part in item.parts for sequence in part_sequences(part)]
    if isinstance(item, EncodedPreference):
        return [next_token_labels(SIDES[answer.side], answer.sequence) for answer in item.answers]
    return [
        LabelledSequence(name, s.ids, s.target_positions, "reward")
        for name, s in zip(SIDES, item.sequences, strict=True)
    ]


def part_sequences(part: DecoderExample | DialogueTurn) -> list[LabelledSequence]:
    """Return a decoder's sequence, or the encoder's input and the decoder's labels of a turn."""
    if isinstance(part, DecoderExample):
        return [next_token_labels("dialogue", part)]
    return [
        LabelledSequence(ENCODER_INPUT, part.ids, ()),
        LabelledSequence("decoder labels", part.answer_ids, range(len(part.answer_ids))),
    ]


def next_token_labels(name: str, sequence: DecoderExample) -> LabelledSequence:
    """Return a decoder's sequence: the label of position t is token t + 1."""
    return LabelledSequence(name, sequence.ids, [t + 1 for t in sequence.target_positions])


def view_example(example: Example, sequences: Sequence[LabelledSequence], tokenizer: Tokenizer) -> RowView:
    format_tokens = make_token_formatter(tokenizer)
    views, notes = [], []
    for sequence in sequences:
        ids = np.array(sequence.ids)
        marks = default_marks(ids, tokenizer.vocab)
        is_next = sequence.kind == "label" and len(sequence.labelled) < len(ids)
        marks |= {i: TokenMark(sequence.kind, is_target=is_next) for i in sequence.labelled}
        views.append(build_sequence(sequence.name, ids, np.zeros_like(ids), marks, format_tokens))
        if is_next and sequence.name != ENCODER_INPUT:
            notes.append(describe_labels(sequence, format_tokens))
    return RowView(example.id, notes, views, [])


def describe_labels(sequence: LabelledSequence, format_tokens: TokenFormatter) -> str:
    """Return the spans of labels as text, for a terminal without colours."""
    position = np.asarray(sequence.labelled)
    spans = np.split(position, np.flatnonzero(np.diff(position) > 1) + 1)
    texts = ("".join(format_tokens(int(sequence.ids[i])) for i in span).strip() for span in spans)
    count = format_count(len(position), "label")
    return f"{sequence.name}: {count} of {len(sequence.ids):,} tokens: " + " | ".join(texts)
