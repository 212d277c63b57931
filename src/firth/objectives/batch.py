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
    target: Any = None  # by task: class, score, tags, span
    characters: Any = None  # (B, T, 50)

    @property
    def num_answers(self) -> int:
        """How many answers the summed loss adds up."""
        return len(self.target) if self.labels is None else int((self.labels != IGNORED).sum())

    @property
    def counts(self) -> dict[str, int]:
        """What a loss can be a mean over. Each sum that a model returns names the count that divides it."""
        counts = {"answers": self.num_answers, "tokens": self.num_tokens}
        return counts if self.pair is None else counts | {"pairs": len(self.pair)}

    @property
    def num_tokens(self) -> int:
        """How many tokens are read, padding left out."""
        read = math.prod(self.tokens.shape) if self.doc is None else int((self.doc >= 0).sum())
        return read if self.decoder_tokens is None else read + self.num_answers  # a decoder reads one for each answer

    def to(self, device: torch.device) -> Batch:
        """The same batch as tensors on a device."""
        return Batch(*(None if a is None else _tensor(a, device) for a in self))


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    t = torch.from_numpy(array)
    if t.dtype in (torch.int32, torch.uint16):
        t = t.long()
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t
