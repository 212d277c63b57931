"""Batch: the one thing that passes from data to models."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

IGNORED = -100


class Batch(NamedTuple):
    """Arrays (or tensors), None where an objective has no such thing. B rows, T places, U of the decoder, K asked.

    Without `asked` every place is asked. Without `doc` a row is one document; without `rank` an encoder sees all
    and a decoder what came before. A bidirectional language model reads each row twice: its `rank` and `labels` are
    (B, 2, T), forward and backward.
    """

    tokens: Any  # (B, T) what is read
    doc: Any = None  # (B, T) which document of the row, -1 for padding
    position: Any = None  # (B, T) place in the document
    rank: Any = None  # (B, T) i sees j when rank[j] <= rank[i]
    segment: Any = None  # (B, T) sentence A or B
    asked: Any = None  # (B, K) places that are asked
    labels: Any = None  # (B, K) the answers; -100 in unused slots
    decoder_tokens: Any = None  # (B, U)
    decoder_doc: Any = None  # (B, U)
    decoder_position: Any = None  # (B, U)
    boundary: Any = None  # (B, K, 3) around the span of an asked place: the place before, the place after, which of it
    pair: Any = None  # (B,) 0 where the second text follows the first, 1 where it does not
    target: Any = None  # by task (see below)
    characters: Any = None  # (B, T, 50)
    fresh: Any = None  # (B,) where rows go on from step to step, those that begin anew
    group: Any = None  # (B, K) which question or pair of this batch an asked text belongs to; -1 in unused slots

    # The target of a task, where each row holds several texts and each text has a slot of `asked`:
    # classes, tags     (B, K) which one; -100 in unused slots
    # scores            (B, K) the number; NaN in unused slots
    # choices           (B, K) 1 for the right one of its group, 0 for the others
    # vectors           (B, K) 0 for the first of its pair, 1 for the second; None: as they come in the rows
    # spans             (B, T, 2) 1 where the answer starts, where it ends, else 0; -1 where it may not. No `asked`.

    @property
    def num_answers(self) -> int:
        """How many answers the summed loss adds up."""
        if self.group is not None:
            return _num_groups(self.group)
        if self.target is None:
            return _num_used(self.labels)
        if self.target.ndim == 3:
            return int((self.target[..., 0] == 1).sum())
        return _num_used(self.target)

    @property
    def counts(self) -> dict[str, int]:
        """What a loss can be a mean over. Each sum that a model returns names the count that divides it."""
        counts = {"answers": self.num_answers, "tokens": self.num_tokens}
        if self.target is not None and self.labels is not None:  # a task's answers, and the words beside them
            counts["words"] = _num_used(self.labels)
        return counts if self.pair is None else counts | {"pairs": len(self.pair)}

    @property
    def num_tokens(self) -> int:
        """How many tokens are read, padding left out."""
        read = _num_read(self.tokens, self.doc)
        if self.decoder_tokens is None:
            return read
        if self.target is not None:
            return read + _num_read(self.decoder_tokens, self.decoder_doc)
        return read + self.num_answers  # a decoder reads one for each answer

    def to(self, device: torch.device) -> Batch:
        """The same batch as tensors on a device."""
        return Batch(*(None if a is None else _tensor(a, device) for a in self))


def _num_read(tokens: Any, doc: Any) -> int:
    return math.prod(tokens.shape) if doc is None else int((doc >= 0).sum())


def _num_used(answers: Any) -> int:
    """Slots with an answer: a whole number that is not -100, or any number that is not NaN."""
    return int(((answers != IGNORED) & (answers == answers)).sum())  # NaN is not itself


def _num_groups(group: Any) -> int:
    found = np.unique(group if isinstance(group, np.ndarray) else group.cpu().numpy())
    return int((found >= 0).sum())


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    t = torch.from_numpy(array)
    if t.dtype in (torch.int32, torch.uint16):
        t = t.long()
    elif t.dtype == torch.float64:
        t = t.float()
    return sent(t, device)


def sent(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on a device, without waiting until it is there."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t
