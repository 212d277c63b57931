"""word2vec on a GPU: lock-free SGD with many Triton programs, each on its own part of the text.

A program reads one window after the other, as a CPU worker does: gather the context words' input vectors and the output
vectors of the target and its noise words, one small matmul for all scores, two for the gradients, then atomic adds.
Programs see each other's updates late. The most frequent word is in many windows at once, and its stale gradients add
up; `max_stable_programs` therefore limits the number of programs. `word2vec.py` explains the method.

W words of a chunk of text, P programs, N words of the vocabulary, D dimensions of a vector, A context words, K target
and noise words of a window.
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
except ImportError:  # optional: needed on a GPU only
    triton = None

MAX_PROGRAMS = 256  # programs per launch at most
MAX_STALE_STEP = 1.6  # largest sum of learning rates that one vector may receive from stale gradients
MIN_DOT_ROWS = 16  # smallest side of tl.dot


class WindowBatch(NamedTuple):
    """Text with its sampled window sizes and noise words."""

    word_ids: Tensor  # (W,)
    document_ids: Tensor  # (W,)
    window_sizes: Tensor  # (W,) words to each side
    noise_ids: Tensor  # (W, K)


class WindowConfig(NamedTuple):
    """Settings of a launch; no window size exceeds `window`."""

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
    """Return the number of programs that can run in parallel without divergence.

    `read_share_N` and `noise_share_N` are the words' shares of the text and of the noise. All parallel windows compute
    the gradients of the most frequent word at the same stale vector, so their sum must stay bounded.
    """
    around = window + 1  # context words of a window of mean size
    as_input = around * read_share_N.max()
    as_output = (around if skip_gram else 1) * (read_share_N + negative * noise_share_N).max()
    return int(
        min(max(MAX_STALE_STEP / max(learning_rate * as_input, learning_rate * as_output, 1e-9), 1), MAX_PROGRAMS)
    )


def train_windows(
    batch: WindowBatch, inputs_ND: Tensor, outputs_ND: Tensor, config: WindowConfig
) -> tuple[Tensor, Tensor]:
    """Train on a text in place; return the sum of the losses and the number of predictions.

    A window is one update: skip-gram's predictions all read the same vectors, and their gradients are summed. In CBOW
    each context word gets the whole gradient of the mean. A noise word that equals the target is ignored.
    """
    learn = train_windows_torch if triton is None or not inputs_ND.is_cuda else train_windows_triton
    return learn(batch, inputs_ND, outputs_ND, config)


def train_windows_triton(
    batch: WindowBatch, inputs_ND: Tensor, outputs_ND: Tensor, config: WindowConfig
) -> tuple[Tensor, Tensor]:
    """Launch one program per part of the text; programs see each other's updates as they arrive."""
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
    """Reference in torch: the first windows of all P parts at once, then the second ones, and so on."""
    words_W, doc_W, size_W, noise_WK = batch
    num, device = len(words_W), words_W.device
    part = -(-num // config.num_programs)
    away_A = torch.cat([torch.arange(-config.window, 0), torch.arange(1, config.window + 1)]).to(device)
    total, guesses = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
    for first in range(part):
        i_P = torch.arange(first, num, part, device=device)
        j_PA = i_P[:, None] + away_A
        in_window_PA = (away_A.abs() <= size_W[i_P, None]) & (j_PA >= 0) & (j_PA < num)
        j_PA = j_PA.clamp(0, num - 1)
        in_window_PA &= doc_W[j_PA] == doc_W[i_P, None]
        nonempty_P1 = in_window_PA.any(1, keepdim=True)
        around_PA = words_W[j_PA].long()
        chosen_PK = torch.cat([words_W[i_P, None], noise_WK[i_P]], 1).long()
        right_K = torch.arange(chosen_PK.shape[1], device=device) == 0
        valid_PK = (right_K | (chosen_PK != chosen_PK[:, :1])) & nonempty_P1
        x_PAD, y_PKD = inputs_ND[around_PA] * in_window_PA[..., None], outputs_ND[chosen_PK]
        predicting_PA = in_window_PA
        if not config.skip_gram:
            predicting_PA = nonempty_P1
            x_PAD = x_PAD.sum(1, keepdim=True) / in_window_PA.sum(1).clamp(min=1)[:, None, None]
        active_PAK = predicting_PA[..., None] & valid_PK[:, None]
        score_PAK = x_PAD @ y_PKD.mT
        total += F.softplus(torch.where(right_K, -score_PAK, score_PAK))[active_PAK].sum()
        guesses += predicting_PA.sum()
        step_PAK = config.learning_rate * (right_K.float() - score_PAK.sigmoid()) * active_PAK
        to_inputs = (step_PAK @ y_PKD) * in_window_PA[..., None]
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
        """Train on one part of the text. `.cg` bypasses the L1 cache, which does not see other programs' updates."""
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
            valid = ((k == 0) & (count > 0)) | (noisy & (drawn != word))

            around_at, chosen_at = around[:, None] * dim + d[None, :], chosen[:, None] * dim + d[None, :]
            around_real = there[:, None] & (d < dim)[None, :]
            chosen_real = valid[:, None] & (d < dim)[None, :]
            x = tl.load(inputs + around_at, mask=around_real, other=0.0, cache_modifier=".cg")
            y = tl.load(outputs + chosen_at, mask=chosen_real, other=0.0, cache_modifier=".cg")
            predicting = there
            if not SKIP_GRAM:  # the mean predicts, in the first context slot
                predicting = (a == 0) & (count > 0)
                mean = tl.sum(x, 0) / tl.maximum(count, 1)
                x = tl.where(predicting[:, None], mean[None, :], 0.0)
            active = predicting[:, None] & valid[None, :]

            score = tl.dot(x, tl.trans(y), input_precision="ieee")
            wrong = tl.where(k == 0, -1.0, 1.0)[None, :] * score  # negative where the prediction is right
            small = tl.exp(-tl.abs(wrong))
            total += tl.sum(tl.where(active, tl.maximum(wrong, 0.0) + tl.log(1.0 + small), 0.0))
            made += tl.sum(predicting.to(tl.int32), 0)
            chance = tl.where(score >= 0, 1.0, small) / (1.0 + small)
            step = tl.where(active, rate * (tl.where(k == 0, 1.0, 0.0)[None, :] - chance), 0.0)
            to_inputs = tl.dot(step, y, input_precision="ieee")
            to_outputs = tl.dot(tl.trans(step), x, input_precision="ieee")
            if not SKIP_GRAM:  # each context word gets the whole gradient of the mean
                to_inputs = tl.zeros_like(to_inputs) + tl.sum(to_inputs, 0)[None, :]
            tl.atomic_add(inputs + around_at, to_inputs, mask=around_real, sem="relaxed")
            tl.atomic_add(outputs + chosen_at, to_outputs, mask=chosen_real, sem="relaxed")
        tl.store(losses + program, total)
        tl.store(guesses + program, made)
