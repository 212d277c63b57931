"""Batch: the one thing that passes from data to models."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

IGNORE_INDEX = -100


class Batch(NamedTuple):
    """Arrays (or tensors), None where an objective has no such thing. B rows, T places, U of the decoder, K asked.

    Without `target_positions` every place is asked. Without `document_ids` a row is one document; without `attention_rank` an encoder sees all
    and a decoder what came before. A bidirectional language model reads each row twice: its `attention_rank` and `labels` are
    (B, 2, T), forward and backward.
    """

    input_ids: Any  # (B, T) what is read
    document_ids: Any = None  # (B, T) which document of the row, -1 for padding
    position_ids: Any = None  # (B, T) place in the document
    attention_rank: Any = None  # (B, T) i sees j when rank[j] <= rank[i]
    token_type_ids: Any = None  # (B, T) sentence A or B
    target_positions: Any = None  # (B, K) places that are asked
    labels: Any = None  # (B, K) the answers; -100 in unused slots
    decoder_input_ids: Any = None  # (B, U)
    decoder_document_ids: Any = None  # (B, U)
    decoder_position_ids: Any = None  # (B, U)
    span_boundaries: Any = (
        None  # (B, K, 3) around the span of an asked place: the place before, the place after, which of it
    )
    pair_labels: Any = None  # (B,) 0 where the second text follows the first, 1 where it does not
    task_labels: Any = None  # by task (see below)
    char_ids: Any = None  # (B, T, 50)
    reset_state: Any = None  # (B,) where rows go on from step to step, those that begin anew
    group_ids: Any = None  # (B, K) which question or pair of this batch an asked text belongs to; -1 in unused slots

    # The target of a task, where each row holds several texts and each text has a slot of `target_positions`:
    # classes, tags     (B, K) which one; -100 in unused slots
    # scores            (B, K) the number; NaN in unused slots
    # choices           (B, K) 1 for the right one of its group, 0 for the others
    # vectors           (B, K) 0 for the first of its pair, 1 for the second; None: as they come in the rows
    # spans             (B, T, 2) 1 where the answer starts, where it ends, else 0; -1 where it may not. No `target_positions`.

    @property
    def num_targets(self) -> int:
        """How many answers the summed loss adds up."""
        if self.group_ids is not None:
            return _num_groups(self.group_ids)
        if self.task_labels is None:
            return _num_labels(self.labels)
        if self.task_labels.ndim == 3:
            return int((self.task_labels[..., 0] == 1).sum())
        return _num_labels(self.task_labels)

    @property
    def loss_counts(self) -> dict[str, int]:
        """What a loss can be a mean over. Each sum that a model returns names the count that divides it."""
        counts = {"answers": self.num_targets, "tokens": self.num_tokens}
        if self.task_labels is not None and self.labels is not None:  # a task's answers, and the words beside them
            counts["words"] = _num_labels(self.labels)
        return counts if self.pair_labels is None else counts | {"pairs": len(self.pair_labels)}

    @property
    def num_tokens(self) -> int:
        """How many tokens are read, padding left out."""
        read = _num_real_tokens(self.input_ids, self.document_ids)
        if self.decoder_input_ids is None:
            return read
        if self.task_labels is not None:
            return read + _num_real_tokens(self.decoder_input_ids, self.decoder_document_ids)
        return read + self.num_targets  # a decoder reads one for each answer

    def to(self, device: torch.device) -> Batch:
        """The same batch as tensors on a device."""
        return Batch(*(None if a is None else _to_tensor(a, device) for a in self))


def _num_real_tokens(input_ids: Any, document_ids: Any) -> int:
    return math.prod(input_ids.shape) if document_ids is None else int((document_ids >= 0).sum())


def _num_labels(labels: Any) -> int:
    """Slots with an answer: a whole number that is not -100, or any number that is not NaN."""
    return int(((labels != IGNORE_INDEX) & (labels == labels)).sum())  # NaN is not itself


def _num_groups(group_ids: Any) -> int:
    found = np.unique(group_ids if isinstance(group_ids, np.ndarray) else group_ids.cpu().numpy())
    return int((found >= 0).sum())


def _to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    t = torch.from_numpy(array)
    if t.dtype in (torch.int32, torch.uint16):
        t = t.long()
    elif t.dtype == torch.float64:
        t = t.float()
    return to_device_async(t, device)


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on a device, without waiting until it is there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
