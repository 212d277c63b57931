"""GPU word2vec against the formula, and its kernel against eager operations.

The kernel's tests run with `pytest -m gpu`; without a GPU, where triton is installed, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from firth.static.word2vec_triton import (
    WindowBatch,
    WindowConfig,
    max_stable_programs,
    train_windows,
    train_windows_torch,
    train_windows_triton,
    triton,
)

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
RATE = 0.1


def given(words: int, known: int, dim: int, window: int, noise: int, device: str = "cpu") -> list[Tensor]:
    """A text of three documents with windows and noise words, and vectors for it."""
    torch.manual_seed(0)
    text = [
        torch.randint(known, (words,)),
        torch.arange(words) * 3 // words,
        torch.randint(1, window + 1, (words,)),
        torch.randint(known, (words, noise)),
    ]
    return [*(x.int().to(device) for x in text), *(torch.randn(known, dim, device=device) / 2 for _ in range(2))]


def window_by_window(text: list[Tensor], skip_gram: bool) -> tuple[float, int, Tensor, Tensor]:
    """The loss, the number of predictions and the updated vectors, by the gradient of each window."""
    words, doc, size, noise = (x.tolist() for x in text[:4])
    inputs, outputs = (x.clone().requires_grad_() for x in text[4:])
    total, guesses = 0.0, 0
    for i, word in enumerate(words):
        near = range(max(0, i - size[i]), min(len(words), i + size[i] + 1))
        around = [words[j] for j in near if j != i and doc[j] == doc[i]]
        if not around:
            continue
        x = inputs[around] if skip_gram else inputs[around].mean(0, keepdim=True)
        loss = F.softplus(-(x @ outputs[word])).sum()
        if others := [k for k in noise[i] if k != word]:
            loss = loss + F.softplus(x @ outputs[others].T).sum()
        of_inputs, of_outputs = torch.autograd.grad(loss, [inputs, outputs])
        with torch.no_grad():
            inputs -= RATE * of_inputs * (1 if skip_gram else len(around))  # each word has the whole of the mean's
            outputs -= RATE * of_outputs
        total, guesses = total + loss.item(), guesses + len(x)
    return total, guesses, inputs.detach(), outputs.detach()


def check(learn: Callable[..., tuple[Tensor, Tensor]], text: list[Tensor], window: int, skip_gram: bool) -> None:
    total, guesses, inputs, outputs = window_by_window([x.cpu() for x in text], skip_gram)
    found = learn(WindowBatch(*text[:4]), *text[4:], WindowConfig(window, skip_gram, RATE, 1))
    assert_close(found[0].item(), total, rtol=1e-5, atol=1e-5)
    assert int(found[1]) == guesses
    assert_close(text[4].cpu(), inputs, rtol=1e-5, atol=1e-5)
    assert_close(text[5].cpu(), outputs, rtol=1e-5, atol=1e-5)


SHAPES = {
    "usual": (40, 12, 20, 5, 5),
    "little": (30, 9, 16, 2, 1),
    "wide, much noise": (25, 9, 100, 9, 17),
}


@pytest.mark.parametrize("skip_gram", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_program_follows_the_gradients_of_its_windows(shape: str, skip_gram: bool) -> None:
    check(train_windows_torch, given(*SHAPES[shape]), SHAPES[shape][3], skip_gram)


def test_documents_of_one_word_change_nothing() -> None:
    text = given(3, 5, 8, 2, 2)
    before = [x.clone() for x in text]
    total, guesses = train_windows(WindowBatch(*text[:4]), *text[4:], WindowConfig(2, True, RATE, 2))
    assert (float(total), int(guesses)) == (0.0, 0)
    for x, y in zip(text, before, strict=True):
        assert_close(x, y)


def test_programs_read_the_vectors_before_the_step() -> None:
    """Two programs of one window each: both use the initial vectors."""
    words = torch.tensor([0, 1, 2, 3]).int()
    text = [words, torch.tensor([0, 0, 1, 1]).int(), torch.ones(4).int(), torch.full((4, 1), 4).int()]
    vectors = [torch.randn(5, 6) for _ in range(2)]
    together = [x.clone() for x in vectors]
    train_windows_torch(WindowBatch(*text), *together, WindowConfig(1, True, RATE, 4))
    expected = [x.clone() for x in vectors]
    for i in range(4):
        alone = [x.clone() for x in vectors]
        train_windows_torch(
            WindowBatch(*text[:2], torch.eye(4)[i].int(), text[3]), *alone, WindowConfig(1, True, RATE, 1)
        )
        for x, y, first in zip(expected, alone, vectors, strict=True):
            x += y - first
    for x, y in zip(together, expected, strict=True):
        assert_close(x, y)


def test_max_stable_programs() -> None:
    """A word with a tenth of the text: 6 predictions from it, 6 * (0.1 + 5 * 0.2) against it; 1.6 / 0.025 in all."""
    read, noise = np.array([0.1, 0.05]), np.array([0.2, 0.1])
    assert max_stable_programs(read, noise, 5, True, 5, 0.025) == int(1.6 / 0.025 / 6.6)
    assert max_stable_programs(read, noise, 5, False, 5, 0.025) == int(1.6 / 0.025 / 1.1)
    assert max_stable_programs(read, noise, 5, False, 0, 0.025) == int(1.6 / 0.025 / 0.6)
    assert max_stable_programs(read, noise, 5, True, 5, 100.0) == 1
    assert max_stable_programs(read, noise, 5, True, 5, 1e-6) == 256


@pytest.mark.gpu
@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="there is no CUDA device")
@pytest.mark.parametrize("skip_gram", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_eager_operations(shape: str, skip_gram: bool) -> None:
    check(train_windows_triton, given(*SHAPES[shape], device=DEVICE), SHAPES[shape][3], skip_gram)


@pytest.mark.gpu
@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="there is no CUDA device")
def test_programs_lose_no_update() -> None:
    """At a learning rate near 0 the order does not matter: all updates add up to those of one program."""
    text = given(40, 12, 20, 5, 5, DEVICE)
    found = []
    for programs in (1, 7, 64):
        vectors = [x.clone() for x in text[4:]]
        total, guesses = train_windows_triton(WindowBatch(*text[:4]), *vectors, WindowConfig(5, True, 1e-4, programs))
        found.append([total, guesses, *((x - y) * 1e4 for x, y in zip(vectors, text[4:], strict=True))])
    for others in found[1:]:
        assert int(others[1]) == int(found[0][1])
        for x, y in zip(others, found[0], strict=True):
            assert_close(x, y, rtol=0.05, atol=0.05)
