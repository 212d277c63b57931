"""The choice of a token in two kernels: the likeliest token of each row, then the state of the row.

Written with torch, the bookkeeping of a decode step is twenty operations on a few numbers, each a kernel of its own. At
batch 1 these are a fifth of the step. `argmax_parts` finds the maximum of each part of the vocabulary. `record_tokens`
reduces the parts, stores the token, counts it, looks for EOS, and computes the position of the token.

Shapes: B rows, V vocabulary, C parts of the vocabulary, L new tokens, E EOS tokens.
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


COPY_BLOCK_BYTES = 4096


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


def record_tokens(value_BC: Tensor, token_BC: Tensor, state: RowState) -> Tensor:
    """Store the token of the highest value of each row in the state; return it, (B,)."""
    if triton is None or not uses_decode_kernels(value_BC):
        token_B = token_BC.gather(1, value_BC.argmax(-1, keepdim=True))[:, 0]
        record_reference(token_B, state)
        return token_B
    token_B = torch.empty_like(token_BC[:, 0])
    launch(
        record_kernel, (len(token_B),), value_BC, token_BC, token_B, *state,
        state.tokens.shape[1], PARTS=token_BC.shape[1], NUM_EOS=len(state.eos),
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


def copy_from_host(on_device: Tensor, pinned: Tensor) -> None:
    """Copy pinned memory of the host, as it is when the GPU comes to this copy, to a tensor of the same shape.

    In a CUDA graph a copy node costs 10 us, and on a stream of its own as much to wait for; a kernel costs 3.
    """
    copy_pinned(on_device, pinned, to_host=False)


def copy_to_host(on_device: Tensor, pinned: Tensor) -> None:
    """Copy a tensor to pinned memory of the host, which sees it while the next kernels run."""
    copy_pinned(on_device, pinned, to_host=True)


def copy_pinned(on_device: Tensor, pinned: Tensor, to_host: bool) -> None:
    assert on_device.shape == pinned.shape
    assert on_device.is_contiguous()
    if triton is None or not uses_decode_kernels(on_device):
        source, target = (on_device, pinned) if to_host else (pinned, on_device)
        target.copy_(source)
        return
    on_device, pinned = on_device.view(torch.uint8).view(-1), pinned.view(torch.uint8).view(-1)
    n = len(on_device)
    launch(
        copy_kernel, (triton.cdiv(n, COPY_BLOCK_BYTES),), on_device, pinned, n,
        TO_HOST=to_host, BLOCK=min(COPY_BLOCK_BYTES, triton.next_power_of_2(n)),
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def copy_kernel(on_device, pinned, size, TO_HOST: tl.constexpr, BLOCK: tl.constexpr):
        n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        if TO_HOST:
            tl.store(pinned + n, tl.load(on_device + n, mask=n < size), mask=n < size, cache_modifier=".wt")
        else:  # `.cv`: not what an earlier copy left in a cache
            tl.store(on_device + n, tl.load(pinned + n, mask=n < size, cache_modifier=".cv"), mask=n < size)

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
        value, token, chosen, tokens, count, budget, done, ended, prompt_length, position, eos, width,
        PARTS: tl.constexpr, NUM_EOS: tl.constexpr,
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
        tl.store(tokens + b.to(tl.int64) * width + old_count, new)
        tl.store(count + b, new_count)
        tl.store(ended + b, was_ended | (is_eos & (was_done == 0)))
        tl.store(done + b, is_done)
        tl.store(position + b, tl.load(prompt_length + b) + new_count - 1)
