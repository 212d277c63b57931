"""word2vec on a GPU: many programs, each window after window of its own part of the text, as the CPU's workers do.

W words of a stretch of text, P parts of it, N words of the vocabulary, D numbers of a vector, A words around another,
K noise words, in a window with the right one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs none
    triton = None

MAX_PROGRAMS = 256  # programs at work at once
MAX_STALE_STEP = 1.6  # by how many times its gradient a vector may move before any program looks at it again
MIN_DOT_ROWS = 16  # rows that a product of matrices has


class WindowBatch(NamedTuple):
    """Text whose windows and noise are drawn already."""

    word_ids: Tensor  # (W,)
    document_ids: Tensor  # (W,) which document each is of
    window_sizes: Tensor  # (W,) how many words to each side belong to its window
    noise_ids: Tensor  # (W, K)


class WindowConfig(NamedTuple):
    """How it is learned from; no window is larger than `window`."""

    window: int
    skip_gram: bool
    learning_rate: float
    num_programs: int


def max_stable_programs(
    read_share_N: np.ndarray,
    noise_share_N: np.ndarray,
    window: int,
    skip_gram: bool,
    negative: int,
    learning_rate: float,
) -> int:
    """How many programs may be at work, whose windows do not know of each other's steps.

    Of the words that are read and of the noise, which are given by their shares, the commonest is in many of these
    windows: all its gradients are taken at the same place, and if they were too many, it would move far too far.
    """
    around = window + 1  # words in a window of the middle size
    as_input, as_output = (
        around * read_share_N.max(),
        (around if skip_gram else 1) * (read_share_N + negative * noise_share_N).max(),
    )
    return int(
        min(max(MAX_STALE_STEP / max(learning_rate * as_input, learning_rate * as_output, 1e-9), 1), MAX_PROGRAMS)
    )


def train_windows(
    batch: WindowBatch, inputs_ND: Tensor, outputs_ND: Tensor, config: WindowConfig
) -> tuple[Tensor, Tensor]:
    """Learn from a text; the sum of the losses, and how many guesses there are.

    Each window is one step for all words around it: skip-gram's guesses are made from the same vectors, and what they
    ask of them is added up. CBOW: their mean guesses, and each gets the whole of its gradient. A noise word that is the
    right one is left out.
    """
    learn = train_windows_torch if triton is None or not inputs_ND.is_cuda else train_windows_triton
    return learn(batch, inputs_ND, outputs_ND, config)


def train_windows_triton(
    batch: WindowBatch, inputs_ND: Tensor, outputs_ND: Tensor, config: WindowConfig
) -> tuple[Tensor, Tensor]:
    """Each part by a program of its own, which sees what the others have changed so far."""
    num, dim, negative = len(batch.word_ids), inputs_ND.shape[1], batch.noise_ids.shape[1]
    loss_P = torch.zeros(config.num_programs, device=inputs_ND.device)
    guesses_P = torch.zeros_like(loss_P, dtype=torch.int32)
    word2vec_kernel[(config.num_programs,)](
        *batch,
        *(inputs_ND, outputs_ND, loss_P, guesses_P),
        *(num, -(-num // config.num_programs), dim, negative, config.learning_rate),
        WINDOW=config.window,
        SKIP_GRAM=config.skip_gram,
        AROUND=max(MIN_DOT_ROWS, triton.next_power_of_2(2 * config.window)),
        CHOSEN=max(MIN_DOT_ROWS, triton.next_power_of_2(1 + negative)),
        WIDTH=max(MIN_DOT_ROWS, triton.next_power_of_2(dim)),
        num_warps=4,
        num_stages=1,
    )
    return loss_P.sum(), guesses_P.sum()


@torch.no_grad()
def train_windows_torch(
    batch: WindowBatch, inputs_ND: Tensor, outputs_ND: Tensor, config: WindowConfig
) -> tuple[Tensor, Tensor]:
    """The same in single operations: the first windows of all P parts, then the second ones, and so on."""
    words_W, doc_W, size_W, noise_WK = batch
    num, device = len(words_W), words_W.device
    part = -(-num // config.num_programs)
    away_A = torch.cat([torch.arange(-config.window, 0), torch.arange(1, config.window + 1)]).to(device)
    total, guesses = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
    for first in range(part):
        i_P = torch.arange(first, num, part, device=device)
        j_PA = i_P[:, None] + away_A
        there_PA = (away_A.abs() <= size_W[i_P, None]) & (j_PA >= 0) & (j_PA < num)
        j_PA = j_PA.clamp(0, num - 1)
        there_PA &= doc_W[j_PA] == doc_W[i_P, None]
        some_P1 = there_PA.any(1, keepdim=True)
        around_PA = words_W[j_PA].long()
        chosen_PK = torch.cat([words_W[i_P, None], noise_WK[i_P]], 1).long()
        right_K = torch.arange(chosen_PK.shape[1], device=device) == 0
        meant_PK = (right_K | (chosen_PK != chosen_PK[:, :1])) & some_P1
        x_PAD, y_PKD = inputs_ND[around_PA] * there_PA[..., None], outputs_ND[chosen_PK]
        guessing_PA = there_PA
        if not config.skip_gram:
            guessing_PA = some_P1
            x_PAD = x_PAD.sum(1, keepdim=True) / there_PA.sum(1).clamp(min=1)[:, None, None]
        asked_PAK = guessing_PA[..., None] & meant_PK[:, None]
        score_PAK = x_PAD @ y_PKD.mT
        total += F.softplus(torch.where(right_K, -score_PAK, score_PAK))[asked_PAK].sum()
        guesses += guessing_PA.sum()
        step_PAK = config.learning_rate * (right_K.float() - score_PAK.sigmoid()) * asked_PAK
        to_inputs = (step_PAK @ y_PKD) * there_PA[..., None]
        inputs_ND.index_put_((around_PA,), to_inputs, accumulate=True)
        outputs_ND.index_put_((chosen_PK,), step_PAK.mT @ x_PAD, accumulate=True)
    return total, guesses


if triton is not None:

    @triton.jit
    def word2vec_kernel(
        words,
        doc,
        size,
        noise,
        inputs,
        outputs,
        losses,
        guesses,
        num,
        part,
        dim,
        negative,
        rate,
        WINDOW: tl.constexpr,
        SKIP_GRAM: tl.constexpr,
        AROUND: tl.constexpr,
        CHOSEN: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        """One part of the text. Vectors are read past the nearest cache, which does not see what others change."""
        program = tl.program_id(0)
        a, k, d = tl.arange(0, AROUND), tl.arange(0, CHOSEN), tl.arange(0, WIDTH)
        away = tl.where(a < WINDOW, a - WINDOW, a - WINDOW + 1)  # -2 -1 1 2
        total = 0.0
        made = 0
        for i in range(program * part, tl.minimum((program + 1) * part, num)):
            word, reach = tl.load(words + i), tl.load(size + i)
            there = (a < 2 * WINDOW) & (tl.abs(away) <= reach) & (i + away >= 0) & (i + away < num)
            there &= tl.load(doc + i + away, mask=there, other=-1) == tl.load(doc + i)
            around = tl.load(words + i + away, mask=there, other=0).to(tl.int64)
            count = tl.sum(there.to(tl.int32), 0)
            noisy = (k > 0) & (k <= negative) & (count > 0)
            drawn = tl.load(noise + i * negative + k - 1, mask=noisy, other=0)
            chosen = tl.where(k == 0, word, drawn).to(tl.int64)
            meant = ((k == 0) & (count > 0)) | (noisy & (drawn != word))

            around_at, chosen_at = around[:, None] * dim + d[None, :], chosen[:, None] * dim + d[None, :]
            around_real = there[:, None] & (d < dim)[None, :]
            chosen_real = meant[:, None] & (d < dim)[None, :]
            x = tl.load(inputs + around_at, mask=around_real, other=0.0, cache_modifier=".cg")
            y = tl.load(outputs + chosen_at, mask=chosen_real, other=0.0, cache_modifier=".cg")
            guessing = there
            if not SKIP_GRAM:  # the mean guesses, as if it were the first
                guessing = (a == 0) & (count > 0)
                mean = tl.sum(x, 0) / tl.maximum(count, 1)
                x = tl.where(guessing[:, None], mean[None, :], 0.0)
            asked = guessing[:, None] & meant[None, :]

            score = tl.dot(x, tl.trans(y), input_precision="ieee")
            wrong = tl.where(k == 0, -1.0, 1.0)[None, :] * score  # below 0 where the guess is good
            small = tl.exp(-tl.abs(wrong))
            total += tl.sum(tl.where(asked, tl.maximum(wrong, 0.0) + tl.log(1.0 + small), 0.0))
            made += tl.sum(guessing.to(tl.int32), 0)
            chance = tl.where(score >= 0, 1.0, small) / (1.0 + small)
            step = tl.where(asked, rate * (tl.where(k == 0, 1.0, 0.0)[None, :] - chance), 0.0)
            to_inputs = tl.dot(step, y, input_precision="ieee")
            to_outputs = tl.dot(tl.trans(step), x, input_precision="ieee")
            if not SKIP_GRAM:  # each word of the mean gets the whole of its gradient
                to_inputs = tl.zeros_like(to_inputs) + tl.sum(to_inputs, 0)[None, :]
            tl.atomic_add(inputs + around_at, to_inputs, mask=around_real, sem="relaxed")
            tl.atomic_add(outputs + chosen_at, to_outputs, mask=chosen_real, sem="relaxed")
        tl.store(losses + program, total)
        tl.store(guesses + program, made)
