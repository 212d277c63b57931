"""Batch: the interface between data and models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100


class Batch(NamedTuple):
    """Arrays or tensors; None where an objective has no such field. B rows, T positions, U of the decoder, K targets.

    Without `target_positions` every position is a target. Without `document_ids` a row is one document. Without
    `attention_rank` an encoder attends to all positions and a decoder causally. A bidirectional language model runs in
    two directions: its `attention_rank` and `labels` are (B, 2, T), forward and backward.
    """

    input_ids: Any  # (B, T)
    document_ids: Any = None  # (B, T) document of the row, -1 for padding
    position_ids: Any = None  # (B, T) position in the document
    attention_rank: Any = None  # (B, T) i attends to j where rank[j] <= rank[i]
    token_type_ids: Any = None  # (B, T) sentence A or B
    target_positions: Any = None  # (B, K) positions that are predicted
    labels: Any = None  # (B, K) the right tokens; -100 in unused slots
    decoder_input_ids: Any = None  # (B, U)
    decoder_document_ids: Any = None  # (B, U)
    decoder_position_ids: Any = None  # (B, U)
    encoder_target_positions: Any = None  # (B, K) positions of an encoder-decoder's encoder that it predicts itself
    encoder_labels: Any = None  # (B, K) the right tokens there; -100 in unused slots
    generator_positions: Any = None  # (B, K) masked positions that a generator fills, before the model reads the row
    generator_labels: Any = None  # (B, K) the right tokens there; -100 in unused slots and in rows of other kinds
    span_boundaries: Any = None  # (B, K, 3) of a target's span: position before, position after, offset in the span
    pair_labels: Any = None  # (B,) 0 where the second text follows the first, 1 where it does not
    task_labels: Any = None  # by task (see below)
    char_ids: Any = None  # (B, T, 50)
    reset_state: Any = None  # (B,) True where a row starts a new stream and recurrent state is reset
    # (B, K) question, pair or answer that a text or a target belongs to; -1 in unused slots. Chosen and rejected answer
    # of example i are 2 i and 2 i + 1.
    group_ids: Any = None
    reference_logps: Any = None  # (B, K) preference: log-likelihood of the target's answer under the reference
    soft_labels: Any = None  # distillation: the teacher's logits, in the shape of the student's; NaN in unused slots
    head: Any = None  # several tasks: the name (str) of the head that reads this batch

    # `task_labels` by task; a row holds several texts, and each text has a slot of `target_positions`:
    # classify, tag     (B, K) class; -100 in unused slots
    # regress           (B, K) score; NaN in unused slots
    # reward            (B, K) margin of the answer's pair
    # choice            (B, K) 1 for the right one of its group, 0 for the others
    # embed             (B, K) 0 for the first of its pair, 1 for the second; None: in the order of the rows
    # span-qa           (B, T, 2) 1 where the answer starts and where it ends, else 0; -1 where it cannot; no targets

    @property
    def num_targets(self) -> int:
        """Number of labels that the summed loss adds up."""
        if self.group_ids is not None:
            return _num_groups(self.group_ids)
        if self.task_labels is None:
            return _num_labels(self.labels) + (0 if self.encoder_labels is None else _num_labels(self.encoder_labels))
        if self.task_labels.ndim == 3:
            return int((self.task_labels[..., 0] == 1).sum())
        return _num_labels(self.task_labels)

    @property
    def loss_counts(self) -> dict[str, int]:
        """Denominators of a mean loss by name; each summed loss that a model returns names its own."""
        counts = {"targets": self.num_targets, "tokens": self.num_tokens}
        if self.task_labels is not None and self.labels is not None:  # a task's labels, and LM labels beside them
            counts["lm_targets"] = _num_labels(self.labels)
        if self.encoder_labels is not None:
            counts["encoder_targets"] = _num_labels(self.encoder_labels)
            counts["decoder_targets"] = _num_labels(self.labels)
        if self.generator_labels is not None:
            counts["generator_targets"] = _num_labels(self.generator_labels)
            counts["detected_tokens"] = int(self.is_detected.sum())
        if self.soft_labels is not None:
            counts["soft_targets"] = self.num_soft_targets
        if self.reference_logps is not None:
            counts |= _count_answers(self.group_ids)
        return counts if self.pair_labels is None else counts | {"pairs": len(self.pair_labels)}

    @property
    def is_detected(self) -> Any:
        """(B, T) True at the tokens that are classified as original or replaced: those of rows with a generator."""
        is_detected_B1 = (self.generator_labels != IGNORE_INDEX).any(1)[:, None]
        return is_detected_B1 & (True if self.document_ids is None else self.document_ids >= 0)

    @property
    def num_soft_targets(self) -> int:
        """Number of targets that a teacher has predicted: slots, questions of a choice, or texts with spans."""
        is_used = self.soft_labels == self.soft_labels  # NaN is not itself
        if self.group_ids is not None:
            return _num_groups(np.where(to_numpy(is_used), to_numpy(self.group_ids), -1))
        if self.target_positions is not None:
            return int((is_used[..., 0] if is_used.ndim == 3 else is_used).sum())
        documents = self.document_ids if self.decoder_document_ids is None else self.decoder_document_ids
        row_BT = np.arange(len(documents))[:, None] * (documents.shape[1] + 1)
        return _num_groups(np.where(to_numpy(is_used[..., 0]), row_BT + to_numpy(documents), -1))

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model reads, without padding."""
        num_input = _num_real_tokens(self.input_ids, self.document_ids)
        if self.decoder_input_ids is None:
            return num_input
        if self.task_labels is not None:
            return num_input + _num_real_tokens(self.decoder_input_ids, self.decoder_document_ids)
        return num_input + _num_labels(self.labels)  # a decoder reads one token for each label

    def map_arrays(self, fn: Callable[[Any], Any]) -> Batch:
        """Return the batch with `fn` applied to each of its arrays."""
        return Batch(*(a if a is None or isinstance(a, str) else fn(a) for a in self))

    def to(self, device: torch.device) -> Batch:
        """Return the batch as tensors on a device."""
        return self.map_arrays(lambda a: to_device_async(to_host_tensor(a), device))


def _num_real_tokens(input_ids: Any, document_ids: Any) -> int:
    return math.prod(input_ids.shape) if document_ids is None else int((document_ids >= 0).sum())


def _num_labels(labels: Any) -> int:
    """Number of slots whose label is neither -100 nor NaN."""
    return int(((labels != IGNORE_INDEX) & (labels == labels)).sum())  # NaN is not itself


def _num_groups(group_ids: Any) -> int:
    return int((np.unique(to_numpy(group_ids)) >= 0).sum())


def _count_answers(group_ids: Any) -> dict[str, int]:
    """Number of chosen (even) and rejected (odd) answers, and of pairs: 2 i and 2 i + 1."""
    groups = np.unique(to_numpy(group_ids))
    groups = groups[groups >= 0]
    chosen = groups[groups % 2 == 0]
    pairs = np.intersect1d(chosen + 1, groups)
    return {"chosen": len(chosen), "rejected": len(groups) - len(chosen), "answer_pairs": len(pairs)}


def to_numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def to_host_tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array of a batch as a tensor of the dtype that models read."""
    import torch

    t = torch.from_numpy(array)
    if t.dtype in (torch.int32, torch.uint16):
        return t.long()
    return t.float() if t.dtype == torch.float64 else t


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device; to a GPU from pinned memory, without waiting for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
