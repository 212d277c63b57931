"""The choice of a token in two kernels: the likeliest token of each row, then the state of the row.

Written with torch, the bookkeeping of a decode step is twenty operations on a few numbers, each a kernel of its own. At
batch 1 these are a fifth of the step. `argmax_parts` finds the maximum of each part of the vocabulary. `record_tokens`
reduces the parts, stores the token, counts it, looks for EOS, and computes the position of the token. With a grammar,
`forbid_by_host_mask` comes first, and `record_tokens` tells the host the tokens.

Shapes: B rows, V vocabulary, C parts of the vocabulary, L new tokens, E EOS tokens, W words of a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from firth.models.kernels.decode_linear import uses_decode_kernels
from firth.models.kernels.launch import launch
from firth.models.kernels.tiling import triton

if triton is not None:
    import triton.language as tl

ARGMAX_BLOCK_TOKENS = 1024  # tokens that a program compares at once
MAX_ARGMAX_PARTS = 64
ARGMAX_TARGET_PROGRAMS = 1024  # eight for each multiprocessor of an H100: a program waits for memory most of the time
MASK_BITS = 32  # of a word
MASK_BLOCK_WORDS = 32  # words of a mask that a program reads


class RowState(NamedTuple):
    """The state of B sequences. `record_tokens` changes all but `budget`, `prompt_length` and `eos`."""

    tokens: Tensor  # (B, L + 1) new tokens; rows that are done write behind their last token
    num_new: Tensor  # (B,) new tokens so far
    budget: Tensor  # (B,) new tokens at most
    done: Tensor  # (B,) at EOS or at the budget
    ended: Tensor  # (B,) at EOS
    prompt_length: Tensor  # (B,)
    position: Tensor  # (B,) of the last token
    eos: Tensor  # (E,)


def argmax_parts(scores_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each part of the vocabulary, and its token, both (B, C); of equal ones the first."""
    if triton is None or not uses_decode_kernels(scores_BV):
        value_B, token_B = scores_BV.max(-1)
        return value_B[:, None].float(), token_B[:, None]
    (B, V), parts = scores_BV.shape, 1
    while parts < MAX_ARGMAX_PARTS and parts * B < ARGMAX_TARGET_PROGRAMS and parts * ARGMAX_BLOCK_TOKENS < V:
        parts *= 2
    value_BC = scores_BV.new_empty(B, parts, dtype=torch.float32)
    token_BC = scores_BV.new_empty(B, parts, dtype=torch.long)
    launch(
        argmax_kernel, (B, parts), scores_BV, value_BC, token_BC, V, triton.cdiv(V, parts),
        BLOCK=ARGMAX_BLOCK_TOKENS,
    )  # fmt: skip
    return value_BC, token_BC


def record_tokens(value_BC: Tensor, token_BC: Tensor, state: RowState, told_B: Tensor | None = None) -> Tensor:
    """Store the token of the highest value of each row in the state; return it, (B,).

    `told_B` is pinned memory of the host, which sees the tokens there while the next kernels run.
    """
    if triton is None or not uses_decode_kernels(value_BC):
        token_B = token_BC.gather(1, value_BC.argmax(-1, keepdim=True))[:, 0]
        record_reference(token_B, state)
        if told_B is not None:
            told_B.copy_(token_B)
        return token_B
    token_B = torch.empty_like(token_BC[:, 0])
    launch(
        record_kernel, (len(token_B),), value_BC, token_BC, token_B, token_B if told_B is None else told_B, *state,
        state.tokens.shape[1], PARTS=token_BC.shape[1], NUM_EOS=len(state.eos), TELLS=told_B is not None,
    )  # fmt: skip
    return token_B


def record_reference(token_B: Tensor, state: RowState) -> None:
    """`record_tokens` by one operation after another."""
    state.tokens.scatter_(1, state.num_new[:, None], token_B[:, None])
    is_eos_B = (token_B[:, None] == state.eos).any(-1)
    state.ended.logical_or_(is_eos_B & ~state.done)
    state.num_new.add_(~state.done)
    state.done.logical_or_(is_eos_B | (state.num_new >= state.budget))
    torch.sub(state.prompt_length + state.num_new, 1, out=state.position)


def forbid_by_host_mask(scores_BV: Tensor, permitted_BW: Tensor) -> Tensor:
    """Return the scores, -inf where the bit of a token is 0.

    The mask is pinned memory of the host, int32, as it is when the GPU comes to this kernel. To copy it first would
    cost a second kernel, 3 us in a CUDA graph, and a copy node 10.
    """
    assert scores_BV.is_contiguous()
    assert permitted_BW.is_contiguous()
    B, V = scores_BV.shape
    W = permitted_BW.shape[1]
    assert permitted_BW.shape == (B, -(-V // MASK_BITS))
    if triton is None or not uses_decode_kernels(scores_BV):
        bits_BW32 = permitted_BW.to(scores_BV.device)[:, :, None] >> torch.arange(MASK_BITS, device=scores_BV.device)
        return scores_BV.masked_fill((bits_BW32 & 1).view(B, -1)[:, :V] == 0, float("-inf"))
    masked_BV = torch.empty_like(scores_BV)
    launch(
        forbid_kernel, (B, triton.cdiv(W, MASK_BLOCK_WORDS)), scores_BV, permitted_BW, masked_BV, V, W,
        WORDS=MASK_BLOCK_WORDS, BITS=MASK_BITS, num_warps=1,  # one warp: it reads its words in one transfer
    )  # fmt: skip
    return masked_BV


if triton is not None:

    @triton.jit
    def forbid_kernel(scores, permitted, masked, V, W, WORDS: tl.constexpr, BITS: tl.constexpr):
        b, part = tl.program_id(0), tl.program_id(1)
        w = part * WORDS + tl.arange(0, WORDS)
        # `.cv`: not what an earlier step left in a cache
        word = tl.load(permitted + b * W + w, mask=w < W, other=0, cache_modifier=".cv")
        bit = tl.arange(0, BITS)
        is_permitted = ((word[:, None] >> bit[None, :]) & 1) != 0
        n = w[:, None] * BITS + bit[None, :]
        at = b.to(tl.int64) * V + n
        x = tl.load(scores + at, mask=n < V, other=0.0)
        tl.store(masked + at, tl.where(is_permitted, x, float("-inf")), mask=n < V)

    @triton.jit
    def argmax_kernel(scores, value, token, V, part_size, BLOCK: tl.constexpr):
        b, part = tl.program_id(0), tl.program_id(1)
        scores += b.to(tl.int64) * V
        begin = part * part_size
        end = tl.minimum(begin + part_size, V)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_token = tl.full([BLOCK], 2147483647, tl.int32)
        for start in range(begin, end, BLOCK):
            n = start + tl.arange(0, BLOCK)
            x = tl.load(scores + n, mask=n < end, other=float("-inf")).to(tl.float32)
            is_better = (x > best) & (n < end)
            best = tl.where(is_better, x, best)
            best_token = tl.where(is_better, n, best_token)
        top = tl.max(best, 0)
        first = tl.min(tl.where(best == top, best_token, 2147483647), 0)
        at = b * tl.num_programs(1) + part
        tl.store(value + at, top)
        tl.store(token + at, first.to(tl.int64))

    @triton.jit
    def record_kernel(
        value, token, chosen, told, tokens, count, budget, done, ended, prompt_length, position, eos, width,
        PARTS: tl.constexpr, NUM_EOS: tl.constexpr, TELLS: tl.constexpr,
    ):  # fmt: skip
        b = tl.program_id(0)
        part = b * PARTS + tl.arange(0, PARTS)
        values, candidates = tl.load(value + part), tl.load(token + part)
        new = tl.min(tl.where(values == tl.max(values, 0), candidates, 2147483647), 0)
        new = tl.where(new == 2147483647, 0, new)  # no score is a number
        old_count = tl.load(count + b)
        was_done = tl.load(done + b) != 0
        is_eos = new < 0
        for i in tl.static_range(NUM_EOS):
            is_eos = is_eos | (new == tl.load(eos + i))
        was_ended = tl.load(ended + b) != 0
        new_count = old_count + tl.where(was_done, 0, 1)
        is_done = was_done | is_eos | (new_count >= tl.load(budget + b))
        tl.store(chosen + b, new)
        if TELLS:
            tl.store(told + b, new, cache_modifier=".wt")
        tl.store(tokens + b.to(tl.int64) * width + old_count, new)
        tl.store(count + b, new_count)
        tl.store(ended + b, was_ended | (is_eos & (was_done == 0)))
        tl.store(done + b, is_done)
        tl.store(position + b, tl.load(prompt_length + b) + new_count - 1)
