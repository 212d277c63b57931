"""Attention in one kernel on a GPU: forward, and backward for those who ask and for what is read.

The score of `t` for `s` is `q[t] . k[s] + ask[t, s - t] + read[s, t - s]`, scaled, plus `bias[t, s]`. The tables `q_rel`
and `k_rel` (DeBERTa, Transformer-XL) are products of queries and keys with one vector per distance; each tile of scores
takes its numbers from them, and none of the scores is ever written. The sum of exponentials of each row is kept, so
that the backward pass can compute its tiles again.

B rows, H heads, T places that ask, S places that are read, d numbers per head, W distances in a table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from firth.models.kernels.launch import kernel_op, launch
from firth.models.kernels.tiling import TILE_TOKENS, padded_head_size

LOG2_E = tl.constexpr(1.4426950408889634)
BIAS_NUM_STAGES = tl.constexpr(2)  # tiles of a bias that are on their way at once
MAX_REGISTERS_3_BLOCKS = (
    168  # of a thread that asks with a bias and nothing else, or reads documents: three blocks have room
)
MAX_REGISTERS_4_BLOCKS = (
    128  # of one that goes forward with dropout or a bias, or asks of documents: four blocks have room
)
HALF_TILE_TOKENS = (
    TILE_TOKENS // 2
)  # places of a tile that backward kernels go through, where neither tables nor a bias are in the way


@triton.jit
def score_tile(
    a, b, q_rel, k_rel, mask, bias, t, s, first_id, num_ids, key_id, in_bounds, inv_scale: tl.constexpr,
    HAS_Q_REL: tl.constexpr, HAS_K_REL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    KEY_RANGE_MODE: tl.constexpr, EVEN_TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of scores that are yet to be scaled, and where something is seen.

    `q_rel` to `bias` point at what belongs to it.
    """
    if HAS_BIAS:
        more = tl.load(bias) if EVEN_TILES else tl.load(bias, mask=in_bounds, other=0.0)
        x = tl.dot(a, tl.trans(b), acc=more.to(tl.float32) * inv_scale, input_precision=PRECISION)
    else:
        x = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if HAS_Q_REL:
        x += tl.load(q_rel) if EVEN_TILES else tl.load(q_rel, mask=in_bounds, other=0.0)
    if HAS_K_REL:
        x += tl.load(k_rel) if EVEN_TILES else tl.load(k_rel, mask=in_bounds, other=0.0)
    if HAS_MASK:
        in_bounds = in_bounds & (tl.load(mask, mask=in_bounds, other=0) != 0)
    if IS_CAUSAL:
        in_bounds = in_bounds & (s <= t)
    if KEY_RANGE_MODE == 1:
        in_bounds = in_bounds & (key_id == first_id)
    if KEY_RANGE_MODE == 2:
        in_bounds = in_bounds & (
            (key_id - first_id).to(tl.uint32) < num_ids
        )  # without a sign: less than low is very much
    return x, in_bounds


@triton.constexpr_function
def crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, last_part):
    """Whether a part of the tiles may hold the diagonal: the near ones, or else this one."""
    return IS_CAUSAL and part == (1 if FAR_DISTANCE else last_part)


@triton.constexpr_function
def needs_masking(*conditions):
    """Whether some places of a tile may not be seen."""
    return any(conditions)


@triton.jit
def relative_score_ptrs(
    table, b, h, B, H, row_index, block_start, col_index, row_position, length, zero_index, WIDTH: tl.constexpr, HAS_Q_POS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the numbers of a tile stand that its places `row_index` have for the distances to `col_index`.

    In bands, where `row_index` are a block that begins at `block_start`; or in rows, with distance 0 from `place` at `zero_index`.
    """
    if HAS_Q_POS:
        return table + ((b * H + h) * length + row_index) * WIDTH + (col_index - row_position + zero_index)
    band = table + ((h * tl.cdiv(length, BLOCK) + block_start // BLOCK) * B + b) * BLOCK * WIDTH
    return band + (row_index - block_start) * (WIDTH - 1) + (col_index + BLOCK - 1)


@triton.jit
def load_head_rows(x, position, d, length, stride, D: tl.constexpr, FULL_HEAD_ROWS: tl.constexpr):
    """Some vectors of one head, 0 beyond the last place and the last number."""
    at = tl.arange(0, D)
    of = x + position[:, None] * stride + at[None, :]
    if FULL_HEAD_ROWS:
        return tl.load(of)
    return tl.load(of, mask=(position[:, None] < length) & (at[None, :] < d), other=0.0)


@triton.jit
def load_values(x, position, length, EVEN_TILES: tl.constexpr):
    """A number of each of some places, 0 beyond the last."""
    return tl.load(x + position) if EVEN_TILES else tl.load(x + position, mask=position < length, other=0)


@triton.jit
def store_head_rows(x, values, position, d, length, stride, D: tl.constexpr):
    at = tl.arange(0, D)
    inside = (position[:, None] < length) & (at[None, :] < d)
    tl.store(x + position[:, None] * stride + at[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_tile_bounds(
    bounds, b, B, block_start, length, begin, end, part: tl.constexpr, HAS_TILE_BOUNDS: tl.constexpr, SPLIT_FULL_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Which places the tile that begins at `block_start` has to go through: `begin` to `end`, or less where spans say so.

    With WHOLE, the first part has the tiles of which all is seen, and the second the others: from some place on, so
    many are left out. Both are given too.
    """
    jump, leap = 0, 0
    if HAS_TILE_BOUNDS:
        tiles = tl.cdiv(length, BLOCK)
        at = bounds + b * tiles + block_start // BLOCK
        begin, end = tl.multiple_of(tl.load(at), BLOCK), tl.load(at + B * tiles)
        if SPLIT_FULL_TILES:
            jump = tl.multiple_of(tl.load(at + 2 * B * tiles), BLOCK)
            leap = tl.multiple_of(tl.load(at + 3 * B * tiles), BLOCK) - jump
            begin, end = (jump, jump + leap) if part == 0 else (begin, end - leap)
    return begin, end, jump, leap


@triton.jit
def skip_full_tiles(position, full_start, num_full, part: tl.constexpr, SPLIT_FULL_TILES: tl.constexpr):
    """Where a tile begins, if some are left out."""
    return position + tl.where(position >= full_start, num_full, 0) if SPLIT_FULL_TILES and part == 1 else position


@triton.constexpr_function
def key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES):
    """What a reach has to say of a part of the tiles: nothing where all is seen."""
    return 0 if SPLIT_FULL_TILES and part == 0 else KEY_RANGE_MODE


@triton.constexpr_function
def is_near_part(part, FAR_DISTANCE):
    """Whether a part of the tiles has numbers of its own for each distance, or all have the same."""
    return FAR_DISTANCE == 0 or part == 1


@triton.jit
def load_far_bias(bias, is_nonempty):
    """What all scores of some tiles get, times log2(e); in 32 bits, or the factor would be rounded to 16."""
    return tl.load(bias, mask=is_nonempty, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def clip_to_part(begin, end, block_start, part: tl.constexpr, FAR_DISTANCE: tl.constexpr, BLOCK: tl.constexpr):
    """Of the places from `begin` to `end`: those so far before the tile that begins at `block_start`, those near it, or those
    so far after it, in whole tiles."""
    if FAR_DISTANCE:
        before, after = (
            (block_start - FAR_DISTANCE + 1) // BLOCK * BLOCK,
            (block_start + FAR_DISTANCE + 2 * BLOCK - 2) // BLOCK * BLOCK,
        )
        begin = begin if part == 0 else tl.maximum(begin, before if part == 1 else after)
        end = end if part == 2 else tl.minimum(end, after if part == 1 else before)
    return begin, end


@triton.jit
def fwd_kernel(
    q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds, y, lse, B, H, T, S, d, zero_index,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t, mask_b, mask_t,
    inv_scale: tl.constexpr, log2_scale: tl.constexpr, dropout_p: tl.constexpr, DROP_THRESHOLD: tl.constexpr,
    Q_REL_WIDTH: tl.constexpr, K_REL_WIDTH: tl.constexpr, HAS_Q_REL: tl.constexpr, HAS_K_REL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_Q_POS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAUSAL: tl.constexpr, NUM_PARTS: tl.constexpr, KEY_RANGE_MODE: tl.constexpr,
    HAS_TILE_BOUNDS: tl.constexpr, FAR_DISTANCE: tl.constexpr, EVEN_TILES: tl.constexpr, FULL_HEAD_ROWS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr, K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SPLIT_FULL_TILES: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) // tl.cdiv(T, BT)).to(tl.int64)
    b, h = head // H, head % H
    g = h // GROUP_SIZE
    q, k, v = q + b * q_b + h * q_h, k + K_OFFSET + b * k_b + g * k_h, v + V_OFFSET + b * v_b + g * v_h
    y = y + b * y_b + h * y_h
    mask = mask + b * mask_b
    t0 = tl.program_id(0) % tl.cdiv(T, BT) * BT
    t = t0 + tl.arange(0, BT)
    at = load_values(q_pos + b * T, t, T, EVEN_TILES).to(tl.int32) if HAS_Q_POS else t
    q_Td = load_head_rows(q, t, d, T, q_t, D, FULL_HEAD_ROWS)
    highest = tl.full([BT], float("-inf"), tl.float32)
    total = tl.zeros([BT], tl.float32)
    found = tl.zeros([BT, D], tl.float32)
    t2, at2 = t[:, None], at[:, None]
    row = load_values(drop_t + head * T, t, T, EVEN_TILES).to(tl.uint32)[:, None] if DROP_THRESHOLD else 0
    low = load_values(key_ranges + b * T, t, T, EVEN_TILES)[:, None] if KEY_RANGE_MODE else 0
    size = load_values(key_ranges + (B + b) * T, t, T, EVEN_TILES).to(tl.uint32)[:, None] if KEY_RANGE_MODE == 2 else 0
    for part in tl.static_range(NUM_PARTS):
        end = (t0 if not FAR_DISTANCE and part + 1 < NUM_PARTS else tl.minimum(t0 + BT, S)) if IS_CAUSAL else S
        begin, end, jump, leap = load_tile_bounds(
            key_bounds, b, B, t0, T, 0 if FAR_DISTANCE else part * t0, end, part, HAS_TILE_BOUNDS, SPLIT_FULL_TILES, BT
        )
        begin, end = clip_to_part(begin, end, t0, part, FAR_DISTANCE, BT)
        shift = 0.0 if is_near_part(part, FAR_DISTANCE) else load_far_bias(bias + (h * T + t0) * S + begin, begin < end)
        for place_s in tl.range(
            begin, end, BS, num_stages=BIAS_NUM_STAGES if HAS_BIAS and is_near_part(part, FAR_DISTANCE) else None
        ):
            s0 = skip_full_tiles(place_s, jump, leap, part, SPLIT_FULL_TILES)
            s = s0 + tl.arange(0, BS)
            s2 = s[None, :]
            inside = tl.full([BT, BS], True, tl.int1) if EVEN_TILES else (t2 < T) & (s2 < S)
            key_of_s = (
                load_values(key_ids + b * S, s, S, EVEN_TILES)[None, :]
                if key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES)
                else 0
            )
            column = load_values(drop_s, s, S, EVEN_TILES).to(tl.uint32)[None, :] if DROP_THRESHOLD else 0
            x, sees = score_tile(
                q_Td, load_head_rows(k, s, d, S, k_t, D, FULL_HEAD_ROWS),
                relative_score_ptrs(q_rel, b, h, B, H, t2, t0, s2, at2, T, zero_index, Q_REL_WIDTH, HAS_Q_POS, BT),
                relative_score_ptrs(k_rel, b, h, B, H, s2, s0, at2, s2, S, S - 1, K_REL_WIDTH, HAS_Q_POS, BS),
                mask + t2 * mask_t + s2, bias + (h * T + t2) * S + s2, t2, s2, low, size, key_of_s, inside, inv_scale,
                HAS_Q_REL, HAS_K_REL, HAS_MASK, HAS_BIAS and is_near_part(part, FAR_DISTANCE), crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, NUM_PARTS - 1),
                key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES), EVEN_TILES, PRECISION,
            )  # fmt: skip
            if needs_masking(
                not EVEN_TILES,
                HAS_MASK,
                crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, NUM_PARTS - 1),
                key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES),
            ):
                x = tl.where(sees, x, float("-inf"))
            most = tl.max(x, 1) * log2_scale
            higher = tl.maximum(highest, most if is_near_part(part, FAR_DISTANCE) else most + shift)
            top = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(x * log2_scale - (top if is_near_part(part, FAR_DISTANCE) else top - shift)[:, None])
            shrink = tl.exp2(highest - top)
            total = total * shrink + tl.sum(p, 1)
            if DROP_THRESHOLD:
                p = p * tl.where(row * column >= DROP_THRESHOLD, 1.0, 0.0)
            v_Sd = load_head_rows(v, s, d, S, v_t, D, FULL_HEAD_ROWS)
            found = found * shrink[:, None] + tl.dot(p.to(v_Sd.dtype), v_Sd, input_precision=PRECISION)
            highest = higher
    some = total > 0
    found = found / (tl.where(some, total, 1.0) * (1.0 - dropout_p))[:, None]
    store_head_rows(y, found, t, d, T, y_t, D)
    tl.store(lse + head * T + t, tl.where(some, highest + tl.log2(total), 0.0), mask=t < T)


@triton.jit
def bwd_dq_kernel(
    q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds, y, lse, dy, delta, dq, dq_rel,
    dbias, B, H, T, S, d, zero_index,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t, mask_b, mask_t, dy_b, dy_h, dy_t, dq_b, dq_h, dq_t,
    inv_scale: tl.constexpr, log2_scale: tl.constexpr, dropout_p: tl.constexpr, DROP_THRESHOLD: tl.constexpr, grad_scale: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
    Q_REL_WIDTH: tl.constexpr, K_REL_WIDTH: tl.constexpr, HAS_Q_REL: tl.constexpr, HAS_K_REL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_Q_POS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAUSAL: tl.constexpr, NUM_PARTS: tl.constexpr, KEY_RANGE_MODE: tl.constexpr,
    HAS_TILE_BOUNDS: tl.constexpr, FAR_DISTANCE: tl.constexpr, EVEN_TILES: tl.constexpr, FULL_HEAD_ROWS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr, K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SPLIT_FULL_TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, of what they have for each distance, and of the bias.

    `delta`, and what is added up, lack the factor 1 / (1 - rate) until the end.
    """
    head = (tl.program_id(0) // tl.cdiv(T, BT)).to(tl.int64)
    b, h = head // H, head % H
    g = h // GROUP_SIZE
    q, k, v = q + b * q_b + h * q_h, k + K_OFFSET + b * k_b + g * k_h, v + V_OFFSET + b * v_b + g * v_h
    y = y + b * y_b + h * y_h
    dy, dq, mask = dy + b * dy_b + h * dy_h, dq + b * dq_b + h * dq_h, mask + b * mask_b
    t0 = tl.program_id(0) % tl.cdiv(T, BT) * BT
    t = t0 + tl.arange(0, BT)
    at = load_values(q_pos + b * T, t, T, EVEN_TILES).to(tl.int32) if HAS_Q_POS else t
    q_Td, dy_Td = (
        load_head_rows(q, t, d, T, q_t, D, FULL_HEAD_ROWS),
        load_head_rows(dy, t, d, T, dy_t, D, FULL_HEAD_ROWS),
    )
    delta_T = tl.sum(load_head_rows(y, t, d, T, y_t, D, FULL_HEAD_ROWS).to(tl.float32) * dy_Td.to(tl.float32), 1) * (
        1.0 - dropout_p
    )
    tl.store(delta + head * T + t, delta_T, mask=t < T)
    lse_T = load_values(lse + head * T, t, T, EVEN_TILES)
    dq_Td = tl.zeros([BT, D], tl.float32)
    t2, at2 = t[:, None], at[:, None]
    row = load_values(drop_t + head * T, t, T, EVEN_TILES).to(tl.uint32)[:, None] if DROP_THRESHOLD else 0
    low = load_values(key_ranges + b * T, t, T, EVEN_TILES)[:, None] if KEY_RANGE_MODE else 0
    size = load_values(key_ranges + (B + b) * T, t, T, EVEN_TILES).to(tl.uint32)[:, None] if KEY_RANGE_MODE == 2 else 0
    for part in tl.static_range(NUM_PARTS):
        end = (t0 if not FAR_DISTANCE and part + 1 < NUM_PARTS else tl.minimum(t0 + BT, S)) if IS_CAUSAL else S
        begin, end, jump, leap = load_tile_bounds(
            key_bounds, b, B, t0, T, 0 if FAR_DISTANCE else part * t0, end, part, HAS_TILE_BOUNDS, SPLIT_FULL_TILES, BT
        )
        begin, end = clip_to_part(begin, end, t0, part, FAR_DISTANCE, BT)
        shift = 0.0 if is_near_part(part, FAR_DISTANCE) else load_far_bias(bias + (h * T + t0) * S + begin, begin < end)
        less_T = lse_T if is_near_part(part, FAR_DISTANCE) else lse_T - shift
        far_T = tl.zeros([BT], tl.float32)
        for place_s in tl.range(
            begin, end, BS, num_stages=BIAS_NUM_STAGES if HAS_BIAS and is_near_part(part, FAR_DISTANCE) else None
        ):
            s0 = skip_full_tiles(place_s, jump, leap, part, SPLIT_FULL_TILES)
            s = s0 + tl.arange(0, BS)
            s2 = s[None, :]
            inside = tl.full([BT, BS], True, tl.int1) if EVEN_TILES else (t2 < T) & (s2 < S)
            key_of_s = (
                load_values(key_ids + b * S, s, S, EVEN_TILES)[None, :]
                if key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES)
                else 0
            )
            column = load_values(drop_s, s, S, EVEN_TILES).to(tl.uint32)[None, :] if DROP_THRESHOLD else 0
            k_Sd = load_head_rows(k, s, d, S, k_t, D, FULL_HEAD_ROWS)
            x, sees = score_tile(
                q_Td, k_Sd,
                relative_score_ptrs(q_rel, b, h, B, H, t2, t0, s2, at2, T, zero_index, Q_REL_WIDTH, HAS_Q_POS, BT),
                relative_score_ptrs(k_rel, b, h, B, H, s2, s0, at2, s2, S, S - 1, K_REL_WIDTH, HAS_Q_POS, BS),
                mask + t2 * mask_t + s2, bias + (h * T + t2) * S + s2, t2, s2, low, size, key_of_s, inside, inv_scale,
                HAS_Q_REL, HAS_K_REL, HAS_MASK, HAS_BIAS and is_near_part(part, FAR_DISTANCE), crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, NUM_PARTS - 1),
                key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES), EVEN_TILES, PRECISION,
            )  # fmt: skip
            x = x * log2_scale - less_T[:, None]
            if needs_masking(
                not EVEN_TILES,
                HAS_MASK,
                crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, NUM_PARTS - 1),
                key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES),
            ):
                x = tl.where(sees, x, float("-inf"))
            p = tl.exp2(x)
            dp = tl.dot(dy_Td, tl.trans(load_head_rows(v, s, d, S, v_t, D, FULL_HEAD_ROWS)), input_precision=PRECISION)
            if DROP_THRESHOLD:
                dp = tl.where(row * column >= DROP_THRESHOLD, dp, 0.0)
            dx = p * (dp - delta_T[:, None])
            if HAS_DBIAS and is_near_part(part, FAR_DISTANCE):
                tl.atomic_add(dbias + (h * T + t2) * S + s2, dx, mask=inside, sem="relaxed")
            if HAS_DBIAS and not is_near_part(part, FAR_DISTANCE):
                far_T += tl.sum(dx, 1)
            dq_Td += tl.dot(dx.to(k_Sd.dtype), k_Sd, input_precision=PRECISION)
            if HAS_Q_REL:
                to = relative_score_ptrs(dq_rel, b, h, B, H, t2, t0, s2, at2, T, zero_index, Q_REL_WIDTH, HAS_Q_POS, BT)
                tl.store(to, (dx * grad_scale).to(dq_rel.dtype.element_ty), mask=inside)
        if HAS_DBIAS and not is_near_part(
            part, FAR_DISTANCE
        ):  # all that have the same number learn together, at one of their places
            tl.atomic_add(dbias + (h * T + t0) * S + begin, tl.sum(far_T, 0), mask=begin < end, sem="relaxed")
    store_head_rows(dq, dq_Td * grad_scale, t, d, T, dq_t, D)
    if HAS_Q_REL and EVEN_TILES and not HAS_Q_POS:
        band = dq_rel + ((h * tl.cdiv(T, BT) + t0 // BT) * B + b) * BT * Q_REL_WIDTH
        zero_band_edges(band, S, Q_REL_WIDTH, BT)


@triton.jit
def zero_band_edges(band, S, W, BLOCK: tl.constexpr):
    """0 for the distances of a band that lead from one of its places to none of the S."""
    i, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    nothing = tl.zeros([BLOCK, BLOCK], band.dtype.element_ty)
    tl.store(band + i * W + c, nothing, mask=c < BLOCK - 1 - i)
    tl.store(band + i * W + S + c, nothing, mask=c >= BLOCK - 1 - i)


@triton.jit
def bwd_dkv_kernel(
    q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds, lse, dy, delta, dk, dv, dk_rel,
    B, H, T, S, d, zero_index,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_t, dy_b, dy_h, dy_t, dk_b, dk_h, dk_t,
    dv_b, dv_h, dv_t,
    inv_scale: tl.constexpr, log2_scale: tl.constexpr, dropout_p: tl.constexpr, DROP_THRESHOLD: tl.constexpr, grad_scale: tl.constexpr,
    Q_REL_WIDTH: tl.constexpr, K_REL_WIDTH: tl.constexpr, HAS_Q_REL: tl.constexpr, HAS_K_REL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_Q_POS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAUSAL: tl.constexpr, NUM_PARTS: tl.constexpr, KEY_RANGE_MODE: tl.constexpr,
    HAS_TILE_BOUNDS: tl.constexpr, FAR_DISTANCE: tl.constexpr, EVEN_TILES: tl.constexpr, FULL_HEAD_ROWS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr, K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SPLIT_FULL_TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys, the values, and what the keys have for each distance; of one head of keys.

    `bias` is turned: (H, S, T).
    """
    pair = (tl.program_id(0) // tl.cdiv(S, BS)).to(tl.int64)
    b, g = pair // (H // GROUP_SIZE), pair % (H // GROUP_SIZE)
    k, v, mask = k + K_OFFSET + b * k_b + g * k_h, v + V_OFFSET + b * v_b + g * v_h, mask + b * mask_b
    dv = (dk if V_OFFSET else dv) + V_OFFSET + b * dv_b + g * dv_h
    dk = dk + K_OFFSET + b * dk_b + g * dk_h
    s0 = tl.program_id(0) % tl.cdiv(S, BS) * BS
    s = s0 + tl.arange(0, BS)
    s2 = s[:, None]
    key_of_s = load_values(key_ids + b * S, s, S, EVEN_TILES)[:, None] if KEY_RANGE_MODE else 0
    column = load_values(drop_s, s, S, EVEN_TILES).to(tl.uint32)[:, None] if DROP_THRESHOLD else 0
    k_Sd, v_Sd = load_head_rows(k, s, d, S, k_t, D, FULL_HEAD_ROWS), load_head_rows(v, s, d, S, v_t, D, FULL_HEAD_ROWS)
    dk_Sd, dv_Sd = tl.zeros([BS, D], tl.float32), tl.zeros([BS, D], tl.float32)
    for i in range(GROUP_SIZE):  # of the queries' heads that share these keys
        h = g * GROUP_SIZE + i
        head, q_at, dy_at = b * H + h, b * q_b + h * q_h, b * dy_b + h * dy_h
        for part in tl.static_range(NUM_PARTS):
            begin = (s0 if FAR_DISTANCE else s0 + part * BS) if IS_CAUSAL else 0
            end = tl.minimum(s0 + BS, T) if not FAR_DISTANCE and part + 1 < NUM_PARTS else T
            begin, end, jump, leap = load_tile_bounds(
                query_bounds, b, B, s0, S, begin, end, part, HAS_TILE_BOUNDS, SPLIT_FULL_TILES, BS
            )
            begin, end = clip_to_part(begin, end, s0, part, FAR_DISTANCE, BS)
            shift = (
                0.0 if is_near_part(part, FAR_DISTANCE) else load_far_bias(bias + (h * S + s0) * T + begin, begin < end)
            )
            for place_t in tl.range(
                begin, end, BT, num_stages=BIAS_NUM_STAGES if HAS_BIAS and is_near_part(part, FAR_DISTANCE) else None
            ):
                t0 = skip_full_tiles(place_t, jump, leap, part, SPLIT_FULL_TILES)
                t = t0 + tl.arange(0, BT)
                at = load_values(q_pos + b * T, t, T, EVEN_TILES).to(tl.int32) if HAS_Q_POS else t
                t2, at2 = t[None, :], at[None, :]
                inside = tl.full([BS, BT], True, tl.int1) if EVEN_TILES else (s2 < S) & (t2 < T)
                low = (
                    load_values(key_ranges + b * T, t, T, EVEN_TILES)[None, :]
                    if key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES)
                    else 0
                )
                size = (
                    load_values(key_ranges + (B + b) * T, t, T, EVEN_TILES).to(tl.uint32)[None, :]
                    if KEY_RANGE_MODE == 2
                    else 0
                )
                row = load_values(drop_t + head * T, t, T, EVEN_TILES).to(tl.uint32)[None, :] if DROP_THRESHOLD else 0
                q_Td, dy_Td = (
                    load_head_rows(q + q_at, t, d, T, q_t, D, FULL_HEAD_ROWS),
                    load_head_rows(dy + dy_at, t, d, T, dy_t, D, FULL_HEAD_ROWS),
                )
                x, sees = score_tile(
                    k_Sd, q_Td,
                    relative_score_ptrs(q_rel, b, h, B, H, t2, t0, s2, at2, T, zero_index, Q_REL_WIDTH, HAS_Q_POS, BT),
                    relative_score_ptrs(k_rel, b, h, B, H, s2, s0, at2, s2, S, S - 1, K_REL_WIDTH, HAS_Q_POS, BS),
                    mask + t2 * mask_t + s2, bias + (h * S + s2) * T + t2, t2, s2, low, size, key_of_s, inside, inv_scale,
                    HAS_Q_REL, HAS_K_REL, HAS_MASK, HAS_BIAS and is_near_part(part, FAR_DISTANCE), crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, 0),
                    key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES), EVEN_TILES, PRECISION,
                )  # fmt: skip
                lse_T = load_values(lse + head * T, t, T, EVEN_TILES)
                x = x * log2_scale - (lse_T if is_near_part(part, FAR_DISTANCE) else lse_T - shift)[None, :]
                if needs_masking(
                    not EVEN_TILES,
                    HAS_MASK,
                    crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, 0),
                    key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES),
                ):
                    x = tl.where(sees, x, float("-inf"))
                p = tl.exp2(x)
                dp = tl.dot(v_Sd, tl.trans(dy_Td), input_precision=PRECISION)
                dropped = p
                if DROP_THRESHOLD:
                    stays = tl.where(row * column >= DROP_THRESHOLD, 1.0, 0.0)
                    dropped = p * stays
                    dp = dp * stays
                dv_Sd += tl.dot(dropped.to(dy_Td.dtype), dy_Td, input_precision=PRECISION)
                dx = p * (dp - load_values(delta + head * T, t, T, EVEN_TILES)[None, :])
                dk_Sd += tl.dot(dx.to(q_Td.dtype), q_Td, input_precision=PRECISION)
                if HAS_K_REL:
                    to = relative_score_ptrs(dk_rel, b, h, B, H, s2, s0, at2, s2, S, S - 1, K_REL_WIDTH, HAS_Q_POS, BS)
                    if HAS_Q_POS:  # unused slots may all stand at one place
                        tl.atomic_add(to, dx * grad_scale, mask=inside)
                    else:
                        tl.store(to, (dx * grad_scale).to(dk_rel.dtype.element_ty), mask=inside)
    store_head_rows(dk, dk_Sd * grad_scale, s, d, S, dk_t, D)
    store_head_rows(dv, dv_Sd / (1.0 - dropout_p), s, d, S, dv_t, D)
    if HAS_K_REL and EVEN_TILES and not HAS_Q_POS:
        band = dk_rel + ((g * tl.cdiv(S, BS) + s0 // BS) * B + b) * BS * K_REL_WIDTH
        zero_band_edges(band, T, K_REL_WIDTH, BS)


class KernelArgs(NamedTuple):
    """What the three kernels are called with, beside what each computes."""

    tensors: tuple[Tensor, ...]  # any tensor for what there is not
    sizes: tuple[int, ...]  # B, H, T, S, d, zero
    strides: tuple[int, ...]  # of queries, keys and values, each from row to row, head to head, place to place
    mask_strides: tuple[int, int]
    constexprs: dict[str, Any]


def make_kernel_args(
    q: Tensor, k: Tensor, v: Tensor, q_rel: Tensor | None, k_rel: Tensor | None, mask: Tensor | None,
    q_pos: Tensor | None, drop_t: Tensor | None, drop_s: Tensor | None, bias: Tensor | None, key_ids: Tensor | None,
    key_ranges: Tensor | None, key_bounds: Tensor | None, query_bounds: Tensor | None, num_packed_heads: int, zero_index: int, far_distance: int, is_causal: bool,
    dropout: float, scale: float,
) -> KernelArgs:  # fmt: skip
    if num_packed_heads:  # side by side
        (B, T, _), S, H, d = q.shape, k.shape[1], num_packed_heads, packed_inner_size(q, k) // num_packed_heads
        layout = tuple(step for x in (q, k, v) for step in (x.stride(0), d, x.stride(1)))
    else:
        (B, H, T, d), S = q.shape, k.shape[2]
        layout = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    if key_ids is not None and key_ranges is not None:
        assert not is_causal, "a reach says what order there is"
        assert (key_ids.shape, key_ranges.shape[1:]) == ((B, S), (B, T)), "who sees whom is said of another sequence"
    bits, strides = q, (0, 0)
    if mask is not None:
        bits = mask.to(torch.uint8, memory_format=torch.contiguous_format).expand(B, 1, T, S)
        strides = (bits.stride(0), bits.stride(2))
    D, even = padded_head_size(d), tiles_are_full(T, S)
    whole = (
        even and key_ranges is not None and len(key_ranges) == 1 and key_bounds is not None
    )  # documents, which fill many rows alone
    far_distance = (
        far_distance if bias is not None and max(T, S) > far_distance + TILE_TOKENS else 0
    )  # or no tile is far from another
    made_for = {
        "inv_scale": 1 / scale,
        "log2_scale": scale * LOG2_E.value,
        "dropout_p": dropout,
        "DROP_THRESHOLD": round(dropout * 2**32),
        "Q_REL_WIDTH": 1 if q_rel is None else q_rel.shape[-1],
        "K_REL_WIDTH": 1 if k_rel is None else k_rel.shape[-1],
        "HAS_Q_REL": q_rel is not None,
        "HAS_K_REL": k_rel is not None,
        "HAS_MASK": mask is not None,
        "HAS_Q_POS": q_pos is not None,
        "HAS_BIAS": bias is not None,
        "IS_CAUSAL": is_causal,
        # far before, near and far after; or tiles that are seen whole and those on the edge; or all in one
        "NUM_PARTS": 3 if far_distance else 2 if whole or (is_causal and key_bounds is None and T > 2 * TILE_TOKENS) else 1,
        "SPLIT_FULL_TILES": whole and not far_distance,
        "KEY_RANGE_MODE": 0 if key_ranges is None else len(key_ranges),
        "HAS_TILE_BOUNDS": key_bounds is not None,
        "FAR_DISTANCE": far_distance,
        "EVEN_TILES": even,
        "FULL_HEAD_ROWS": even and d == D,
        "D": D,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "K_OFFSET": H * d if num_packed_heads and is_packed_qkv(q, k) else 0,
        "V_OFFSET": k.shape[2] - H * d if num_packed_heads else 0,
        "GROUP_SIZE": 1 if num_packed_heads else H // k.shape[1],  # heads that read the same keys
        "num_warps": 4,
    }
    tables = tuple(
        q if x is None else x
        for x in (q_rel, k_rel, bits, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds)
    )
    return KernelArgs(tables, (B, H, T, S, d, zero_index), layout, strides, made_for)


def tiles_are_full(T: int, S: int) -> bool:
    """Whether all tiles are full."""
    return T % TILE_TOKENS == 0 and S % TILE_TOKENS == 0


def packed_inner_size(q: Tensor, k: Tensor) -> int:
    """Numbers of all heads: a third of what stands side by side in one tensor, or half of keys and values."""
    return k.shape[2] // (3 if is_packed_qkv(q, k) else 2)


def is_packed_qkv(q: Tensor, k: Tensor) -> bool:
    """Whether queries stand in one tensor with keys and values; otherwise they are half as wide."""
    return q.shape[2] == k.shape[2]


def empty_like_heads(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Room for as many numbers, heads of a place side by side; and its strides."""
    B, H, T, d = x.shape
    room = x.new_empty(B, T, H, d).transpose(1, 2)
    return room, room.stride()[:3]


def empty_packed_heads(x: Tensor, width: int, d: int) -> tuple[Tensor, tuple[int, ...]]:
    """The same for heads of d numbers, of which a place has so many in total."""
    B, T, _ = x.shape
    return x.new_empty(B, T, width), (T * width, d, width)


@kernel_op("firth::attention_forward")
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, q_rel: Tensor | None, k_rel: Tensor | None, mask: Tensor | None,
    q_pos: Tensor | None, drop_t: Tensor | None, drop_s: Tensor | None, bias: Tensor | None, key_ids: Tensor | None,
    key_ranges: Tensor | None, key_bounds: Tensor | None, query_bounds: Tensor | None, num_packed_heads: int, zero_index: int, far_distance: int, is_causal: bool,
    dropout: float, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What attention finds, and the logarithms of the sums of exponentials (base 2).

    With `num_packed_heads`, queries, keys and values are one tensor (B, T, 3 x H x d), given three times; or queries are
    (B, T, H x d), and keys and values one tensor (B, S, 2 x H x d), given twice. What is found is then (B, T, H x d).
    """
    call = make_kernel_args(
        q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds, num_packed_heads, zero_index,
        far_distance, is_causal, dropout, scale,
    )  # fmt: skip
    B, H, T, _, d, _ = call.sizes
    y, lse, strides = allocate_attention_outputs(q, k, num_packed_heads)
    tight = (
        {"maxnreg": MAX_REGISTERS_4_BLOCKS}
        if (dropout or bias is not None) and call.constexprs["FULL_HEAD_ROWS"] and d <= 64
        else {}
    )
    if tight and dropout:
        tight["num_stages"] = 2
    launch(
        fwd_kernel, (triton.cdiv(T, TILE_TOKENS) * B * H,), q, k, v, *call.tensors, y, lse, *call.sizes, *call.strides,
        *strides, *call.mask_strides, BT=TILE_TOKENS, BS=TILE_TOKENS, **call.constexprs, **tight,
    )  # fmt: skip
    return y, lse


def allocate_attention_outputs(q: Tensor, k: Tensor, num_packed_heads: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    inner = packed_inner_size(q, k) if num_packed_heads else 0
    y, strides = empty_packed_heads(q, inner, inner // num_packed_heads) if num_packed_heads else empty_like_heads(q)
    H, T = (num_packed_heads, q.shape[1]) if num_packed_heads else q.shape[1:3]
    return y, q.new_empty(len(q), H, T, dtype=torch.float32), strides


@kernel_op("firth::attention_backward")
def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, q_rel: Tensor | None, k_rel: Tensor | None, mask: Tensor | None,
    q_pos: Tensor | None, drop_t: Tensor | None, drop_s: Tensor | None, bias: Tensor | None, key_ids: Tensor | None,
    key_ranges: Tensor | None, key_bounds: Tensor | None, query_bounds: Tensor | None, y: Tensor, lse: Tensor, bias_t: Tensor | None,
    num_packed_heads: int, zero_index: int, far_distance: int, is_causal: bool, dropout: float, scale: float, bias_requires_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys, values, both tables, and the bias where that `bias_requires_grad`.

    Those of what is not there are empty; what is given in one tensor has one gradient, the first of them. That of the
    bias lacks the factor 1 / (1 - dropout). `bias_t` is the bias with keys first.
    """
    call = make_kernel_args(
        q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds, num_packed_heads, zero_index,
        far_distance, is_causal, dropout, scale,
    )  # fmt: skip
    B, H, T, S, d, _ = call.sizes
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    y_strides, dy_strides = ((x.stride(0), d, x.stride(1)) if num_packed_heads else x.stride()[:3] for x in (y, dy))
    room = allocate_attention_grads(q, k, v, q_rel, k_rel, q_pos, bias, num_packed_heads, bias_requires_grad)
    dq, dk, dv, dask, dread, dbias = room.tensors
    delta, tables = torch.empty_like(lse), call.tensors
    bare = bias is not None and mask is None and key_ranges is None and not dropout and call.constexprs["FULL_HEAD_ROWS"]
    fewer = {"maxnreg": MAX_REGISTERS_3_BLOCKS} if bare and d <= 64 else {}
    reads = {}
    if call.constexprs["SPLIT_FULL_TILES"] and call.constexprs["FULL_HEAD_ROWS"] and d <= 64:
        fewer, reads = {"maxnreg": MAX_REGISTERS_4_BLOCKS}, {"maxnreg": MAX_REGISTERS_3_BLOCKS}
    if bias_t is not None:
        tables = (*tables[:6], bias_t, *tables[7:])
    by_distance, one = q_rel is not None or k_rel is not None, bool(num_packed_heads) and is_packed_qkv(q, k)
    launch(
        bwd_dq_kernel, (triton.cdiv(T, TILE_TOKENS) * B * H,), q, k, v, *call.tensors, y, lse, dy, delta, dq, dask, dbias,
        *call.sizes, *call.strides, *y_strides, *call.mask_strides, *dy_strides, *room.strides[0],
        grad_scale=scale / (1 - dropout), HAS_DBIAS=dbias.numel() > 0, BT=TILE_TOKENS,
        BS=TILE_TOKENS if by_distance or bias is not None else HALF_TILE_TOKENS, **call.constexprs, **fewer,
    )  # fmt: skip
    launch(
        bwd_dkv_kernel, (triton.cdiv(S, TILE_TOKENS) * B * (H // call.constexprs["GROUP_SIZE"]),), q, k, v, *tables, lse, dy, delta,
        dq if one else dk, dv, dread, *call.sizes, *call.strides, *call.mask_strides, *dy_strides, *room.strides[1],
        *room.strides[2], grad_scale=scale / (1 - dropout), BT=TILE_TOKENS if by_distance else HALF_TILE_TOKENS, BS=TILE_TOKENS, **call.constexprs,
        **reads,
    )  # fmt: skip
    return dq, dk, dv, dask, dread.to(q.dtype), dbias


class AttentionGradBuffers(NamedTuple):
    """For the gradients of queries, keys, values, both tables and the bias; with the strides of the first three."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    strides: tuple[tuple[int, ...], ...]


def allocate_attention_grads(
    q: Tensor, k: Tensor, v: Tensor, q_rel: Tensor | None, k_rel: Tensor | None, q_pos: Tensor | None,
    bias: Tensor | None, num_packed_heads: int, bias_requires_grad: bool,
) -> AttentionGradBuffers:  # fmt: skip
    if num_packed_heads:
        d = packed_inner_size(q, k) // num_packed_heads
        dq, dq_strides = empty_packed_heads(q, q.shape[2], d)
        dk, dk_strides = (q.new_empty(0), dq_strides) if is_packed_qkv(q, k) else empty_packed_heads(k, k.shape[2], d)
        dv, dv_strides = q.new_empty(0), dk_strides
    else:
        (dq, dq_strides), (dk, dk_strides), (dv, dv_strides) = (
            empty_like_heads(q),
            empty_like_heads(k),
            empty_like_heads(v),
        )
    T, S = (q.shape[1], k.shape[1]) if num_packed_heads else (q.shape[2], k.shape[2])
    room = torch.empty_like if q_pos is None and tiles_are_full(T, S) else torch.zeros_like  # all written, or not
    exact = torch.float32 if q_pos is not None else q.dtype  # of what is added up in place
    dask = q.new_empty(0) if q_rel is None else room(q_rel)
    dread = q.new_empty(0) if k_rel is None else room(k_rel, dtype=exact)
    dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and bias_requires_grad else q.new_empty(0)
    return AttentionGradBuffers((dq, dk, dv, dask, dread, dbias), (dq_strides, dk_strides, dv_strides))


def setup_attention_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, heads, zero, far, causal, dropout, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = heads, zero, far, causal, dropout, scale


def differentiate_attention(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, y, lse = ctx.saved_tensors
    ask, read, bias = tensors[3], tensors[4], tensors[9]
    learns = bias is not None and ctx.needs_input_grad[9]
    turned = None if bias is None else bias.mT.contiguous()
    dq, dk, dv, dask, dread, dbias = attention_backward(dy, *tensors, y, lse, turned, *ctx.numbers, learns)
    found = [dq, *(x if x.numel() else None for x in (dk, dv)), *[None] * 17]
    found[3], found[4] = None if ask is None else dask, None if read is None else dread
    if bias is not None and learns:
        found[9] = (dbias / (1 - ctx.numbers[4])).to(bias.dtype)
    return tuple(found)


attention_forward.register_autograd(differentiate_attention, setup_context=setup_attention_context)
