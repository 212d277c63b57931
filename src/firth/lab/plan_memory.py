"""The most memory that a run on a CPU holds at one time: the resident memory of its process, as `top` shows it.

A person wants to know whether the run fits into the machine. Python, torch and the other libraries stay from the start
to the end. Beside them a run does one thing after another, and returns freed memory in between (`core/memory.py`), so
that its peak is that of the largest part:

1. *Tokenizing*: a tokenizer is trained and the text is tokenized, where `--data` is not shards.
2. *Counting* which tokens occur together, for `--warm-start ppmi` (`models/ppmi.py`).
3. *Training*: weights, gradients, optimizer state, the copy of a checkpoint, and a step and an evaluation.
4. *Examining* the run at its end: the doctor counts n-grams, the report loads the model.

A step takes more than its tensors, by `allocated_bytes`. glibc's allocator cannot give a freed aligned block to a
request of the same size (its bug 14581), so blocks pile up until they are large enough to come from the system one by
one. The planner measures it in its own process, from large enough steps and an evaluation, and the libraries too.
"""

from __future__ import annotations

from typing import NamedTuple

from firth.models.parameters import FLOAT_BYTES
from firth.models.ppmi import MAX_COUNTED_TOKENS
from firth.tokens.train import SHORT_TEXT_CHARS, TRAIN_MEMORY_PER_TEXT_BYTE

# Measured (docs/results.md, plans beside their runs): steps of 16 and 64 rows with evaluations, texts of 4 to 30 MB,
# and of 0.36M and 1.5M tokens.
ALLOCATED_RATIO, ALLOCATED_BYTES = 1.45, 20e6  # of a process, over the tensors of a step
MAX_ALLOCATED_RATIO = 2.0
TOKENIZING_BYTES, MEASURED_TEXT_BYTES, WORDS_EXPONENT = 80e6, 4e6, 0.47  # new words get rarer in a longer text
UNIGRAM_FACTOR = TRAIN_MEMORY_PER_TEXT_BYTE["Unigram"] / TRAIN_MEMORY_PER_TEXT_BYTE["BPE"]
CHARACTERS_BYTES = 165e6  # of all characters of Unicode, for the WordPiece vocabulary of a text that is not short
COUNTING_BYTES, MEASURED_TOKENS, PAIRS_EXPONENT = 205e6, 1.5e6, 0.62  # new pairs get rarer too
EXAMINED_TOKENS, EXAMINING_BYTES = 2e6, 150  # at most, and bytes for each
KEPT_BYTES = 45e6  # that libraries keep once they have computed: code, buffers of kernels and threads
LATER_LIBRARY_BYTES = KEPT_BYTES + 83e6  # not there yet while a text is tokenized: torch's compiler, for optimizers


class ProcessMemory(NamedTuple):
    """Bytes of the libraries, and of each part of a run beside them."""

    libraries: float
    tokenizing: float
    counting: float
    training: float
    examining: float

    @property
    def run(self) -> float:
        """Return the bytes of the largest part."""
        return max(self[1:])

    @property
    def peak(self) -> float:
        return self.libraries + self.run


def allocated_bytes(tensor_bytes: float, ratio: float = ALLOCATED_RATIO) -> float:
    """Return what the process takes for the tensors of a step and of the evaluations between steps.

    >>> round(allocated_bytes(177e6) / 1e6)  # bert-tiny, 64 rows
    277
    """
    return ratio * tensor_bytes + ALLOCATED_BYTES


def allocated_ratio(measured_bytes: float, tensor_bytes: float) -> float:
    """Return the ratio for which `allocated_bytes` are those that were measured, within its limits.

    >>> allocated_ratio(320e6, 200e6), allocated_ratio(90e6, 200e6)
    (1.5, 1.0)
    """
    return min(max((measured_bytes - ALLOCATED_BYTES) / tensor_bytes, 1.0), MAX_ALLOCATED_RATIO)


def tokenizing_bytes(text_bytes: float, new_kind: str = "") -> float:
    """Return the bytes that tokenizing a text takes, or training a tokenizer of a new kind, if that is more.

    >>> round(tokenizing_bytes(4e6) / 1e6), round(tokenizing_bytes(12e6, "wordpiece") / 1e6)
    (80, 299)
    """
    words = TOKENIZING_BYTES * (text_bytes / MEASURED_TEXT_BYTES) ** WORDS_EXPONENT
    words *= UNIGRAM_FACTOR if new_kind == "unigram" else 1.0
    return words + CHARACTERS_BYTES * (new_kind == "wordpiece" and text_bytes > SHORT_TEXT_CHARS)


def counting_bytes(tokens: float) -> float:
    """Return the bytes that counting co-occurrences takes; of a longer text a sample is counted.

    >>> round(counting_bytes(1.5e6) / 1e6), round(counting_bytes(360_000) / 1e6)
    (205, 85)
    """
    return COUNTING_BYTES * (min(tokens, MAX_COUNTED_TOKENS) / MEASURED_TOKENS) ** PAIRS_EXPONENT


def examining_bytes(tokens: float, parameters: int) -> float:
    """Return the bytes of n-gram counts, and of the weights before and after training."""
    return EXAMINING_BYTES * min(tokens, EXAMINED_TOKENS) + 2 * FLOAT_BYTES * parameters
