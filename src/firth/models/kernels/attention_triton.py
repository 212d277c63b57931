"""The fused attention kernels in Triton, after FlashAttention (Dao et al. 2022; Dao 2023).

The score of query t for key s is `(q[t] . k[s] + q_rel[t, s - t] + k_rel[s, t - s]) * scale + bias[t, s]`. The tables
`q_rel` and `k_rel` (DeBERTa, Transformer-XL) hold the products of queries and keys with one vector per distance.

Attention reads and writes little but computes T x S scores, and writing those to memory would take most of its time.
So the scores exist only as tiles of 64 x 64 in registers. The forward kernel holds one tile of queries and walks over
the keys. Softmax needs the maximum and the sum of a whole row, which are not known yet, so both are kept as running
values ("online softmax"), and when a larger maximum appears, everything summed so far is scaled down:

    m' = max(m, max(x))    l' = l * e^(m - m') + sum(e^(x - m'))    y' = y * e^(m - m') + e^(x - m') v

At the end y / l is the result, and m + log(l) (`lse`) is saved per row. The backward pass computes the tiles of
probabilities p = e^(x - lse) again, which is cheaper than loading them. With dp = dy v^T and delta = sum(y * dy) per
row, the gradient of the scores is dx = p * (dp - delta). One kernel holds a tile of queries and sums dq over the keys,
the other holds a tile of keys and sums dk and dv over the queries. Neither needs atomic additions; only the gradients
of a bias and of repeated target positions do.

Which tiles a program visits: those between its tile bounds (`kernels/attention.py`), or up to the diagonal of a causal
mask. They are visited in NUM_PARTS parts, each compiled without the work that it does not need: fully visible tiles
without comparisons; tiles below the diagonal without a causal mask; tiles far from the query with one number per head
for the bias. Exponentials are powers of 2, the GPU's instruction, with log2(e) in the scale. Dropout compares a product
of one random number per query and one per key with a threshold (`dropout.py`).

Shapes: B rows, H heads, T queries, S keys, d head size (D: padded to a power of two), BT and BS tile sizes, W distances
of a table's row.
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
BIAS_NUM_STAGES = tl.constexpr(2)  # tiles of a bias that are loaded ahead
MAX_REGISTERS_3_BLOCKS = 168  # registers per thread with which three blocks fit on an SM
MAX_REGISTERS_4_BLOCKS = 128  # registers per thread with which four blocks fit on an SM
HALF_TILE_TOKENS = TILE_TOKENS // 2  # tokens per step of backward kernels without tables and bias


@triton.jit
def score_tile(
    a, b, q_rel, k_rel, mask, bias, t, s, first_id, num_ids, key_id, in_bounds, inv_scale: tl.constexpr,
    HAS_Q_REL: tl.constexpr, HAS_K_REL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, KEY_RANGE_MODE: tl.constexpr, EVEN_TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of scores before scaling, and where queries see keys. `q_rel` to `bias` are the tile's pointers."""
    if HAS_BIAS:
        bias_tile = tl.load(bias) if EVEN_TILES else tl.load(bias, mask=in_bounds, other=0.0)
        x = tl.dot(a, tl.trans(b), acc=bias_tile.to(tl.float32) * inv_scale, input_precision=PRECISION)
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
        in_bounds = in_bounds & ((key_id - first_id).to(tl.uint32) < num_ids)  # ids below first_id wrap to large ones
    return x, in_bounds


@triton.constexpr_function
def crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, last_part):
    """Whether a part of the tiles may contain the diagonal of a causal mask."""
    return IS_CAUSAL and part == (1 if FAR_DISTANCE else last_part)


@triton.constexpr_function
def needs_masking(*conditions):
    """Whether some scores of a tile may be invisible."""
    return any(conditions)


@triton.jit
def relative_score_ptrs(
    table, b, h, B, H, row_index, block_start, col_index, row_position, length, zero_index,
    WIDTH: tl.constexpr, HAS_Q_POS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return pointers to the scores of `row_index` for the distances to `col_index`.

    The table has a band per tile (`banded_matmul`), or with HAS_Q_POS a row per position, distance 0 at `zero_index`.
    """
    if HAS_Q_POS:
        return table + ((b * H + h) * length + row_index) * WIDTH + (col_index - row_position + zero_index)
    band = table + ((h * tl.cdiv(length, BLOCK) + block_start // BLOCK) * B + b) * BLOCK * WIDTH
    return band + (row_index - block_start) * (WIDTH - 1) + (col_index + BLOCK - 1)


@triton.jit
def load_head_rows(x, position, d, length, stride, D: tl.constexpr, FULL_HEAD_ROWS: tl.constexpr):
    """Load vectors of one head, 0 beyond the last position and feature."""
    at = tl.arange(0, D)
    of = x + position[:, None] * stride + at[None, :]
    if FULL_HEAD_ROWS:
        return tl.load(of)
    return tl.load(of, mask=(position[:, None] < length) & (at[None, :] < d), other=0.0)


@triton.jit
def load_values(x, position, length, EVEN_TILES: tl.constexpr):
    """Load one value per position, 0 beyond the last."""
    return tl.load(x + position) if EVEN_TILES else tl.load(x + position, mask=position < length, other=0)


@triton.jit
def store_head_rows(x, values, position, d, length, stride, D: tl.constexpr):
    at = tl.arange(0, D)
    inside = (position[:, None] < length) & (at[None, :] < d)
    tl.store(x + position[:, None] * stride + at[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_tile_bounds(
    bounds, b, B, block_start, length, begin, end,
    part: tl.constexpr, HAS_TILE_BOUNDS: tl.constexpr, SPLIT_FULL_TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the positions that the tile at `block_start` visits: `begin` to `end`, or less by its bounds.

    With SPLIT_FULL_TILES part 0 visits the fully visible tiles and part 1 the others, skipping `num_full` positions
    from `full_start` on. Both are returned too.
    """
    full_start, num_full = 0, 0
    if HAS_TILE_BOUNDS:
        tiles = tl.cdiv(length, BLOCK)
        at = bounds + b * tiles + block_start // BLOCK
        begin, end = tl.multiple_of(tl.load(at), BLOCK), tl.load(at + B * tiles)
        if SPLIT_FULL_TILES:
            full_start = tl.multiple_of(tl.load(at + 2 * B * tiles), BLOCK)
            num_full = tl.multiple_of(tl.load(at + 3 * B * tiles), BLOCK) - full_start
            begin, end = (full_start, full_start + num_full) if part == 0 else (begin, end - num_full)
    return begin, end, full_start, num_full


@triton.jit
def skip_full_tiles(position, full_start, num_full, part: tl.constexpr, SPLIT_FULL_TILES: tl.constexpr):
    """Return where a tile begins, after the fully visible ones that part 1 skips."""
    return position + tl.where(position >= full_start, num_full, 0) if SPLIT_FULL_TILES and part == 1 else position


@triton.constexpr_function
def key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES):
    """Return 0 for parts whose tiles are fully visible: no ids are compared."""
    return 0 if SPLIT_FULL_TILES and part == 0 else KEY_RANGE_MODE


@triton.constexpr_function
def is_near_part(part, FAR_DISTANCE):
    """Whether a part's tiles load the bias per score, and not one number for all."""
    return FAR_DISTANCE == 0 or part == 1


@triton.jit
def load_far_bias(bias, is_nonempty):
    """Return the bias of all scores of far tiles, times log2(e); in float32, so that the factor is not rounded."""
    return tl.load(bias, mask=is_nonempty, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def clip_to_part(begin, end, block_start, part: tl.constexpr, FAR_DISTANCE: tl.constexpr, BLOCK: tl.constexpr):
    """Clip `begin` to `end` to whole tiles far before (part 0), near (1) or far after (2) the tile at `block_start`."""
    if FAR_DISTANCE:
        before = (block_start - FAR_DISTANCE + 1) // BLOCK * BLOCK
        after = (block_start + FAR_DISTANCE + 2 * BLOCK - 2) // BLOCK * BLOCK
        begin = begin if part == 0 else tl.maximum(begin, before if part == 1 else after)
        end = end if part == 2 else tl.minimum(end, after if part == 1 else before)
    return begin, end


@triton.jit
def fwd_kernel(
    q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds,
    y, lse, B, H, T, S, d, zero_index,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t, mask_b, mask_t,
    inv_scale: tl.constexpr, log2_scale: tl.constexpr, dropout_p: tl.constexpr, DROP_THRESHOLD: tl.constexpr,
    Q_REL_WIDTH: tl.constexpr, K_REL_WIDTH: tl.constexpr, HAS_Q_REL: tl.constexpr, HAS_K_REL: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_Q_POS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    NUM_PARTS: tl.constexpr, KEY_RANGE_MODE: tl.constexpr, HAS_TILE_BOUNDS: tl.constexpr, FAR_DISTANCE: tl.constexpr,
    EVEN_TILES: tl.constexpr, FULL_HEAD_ROWS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr, K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SPLIT_FULL_TILES: tl.constexpr,
):  # fmt: skip
    """One tile of queries: their outputs y, and the log2 of their sums of exponentials."""
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
    row_max = tl.full([BT], float("-inf"), tl.float32)
    total = tl.zeros([BT], tl.float32)
    acc = tl.zeros([BT, D], tl.float32)
    t2, at2 = t[:, None], at[:, None]
    row = load_values(drop_t + head * T, t, T, EVEN_TILES).to(tl.uint32)[:, None] if DROP_THRESHOLD else 0
    low = load_values(key_ranges + b * T, t, T, EVEN_TILES)[:, None] if KEY_RANGE_MODE else 0
    size = load_values(key_ranges + (B + b) * T, t, T, EVEN_TILES).to(tl.uint32)[:, None] if KEY_RANGE_MODE == 2 else 0
    for part in tl.static_range(NUM_PARTS):
        end = (t0 if not FAR_DISTANCE and part + 1 < NUM_PARTS else tl.minimum(t0 + BT, S)) if IS_CAUSAL else S
        begin, end, full_start, num_full = load_tile_bounds(
            key_bounds, b, B, t0, T, 0 if FAR_DISTANCE else part * t0, end, part, HAS_TILE_BOUNDS, SPLIT_FULL_TILES, BT
        )
        begin, end = clip_to_part(begin, end, t0, part, FAR_DISTANCE, BT)
        shift = 0.0 if is_near_part(part, FAR_DISTANCE) else load_far_bias(bias + (h * T + t0) * S + begin, begin < end)
        for s_offset in tl.range(
            begin, end, BS, num_stages=BIAS_NUM_STAGES if HAS_BIAS and is_near_part(part, FAR_DISTANCE) else None
        ):
            s0 = skip_full_tiles(s_offset, full_start, num_full, part, SPLIT_FULL_TILES)
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
                HAS_Q_REL, HAS_K_REL, HAS_MASK, HAS_BIAS and is_near_part(part, FAR_DISTANCE),
                crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, NUM_PARTS - 1),
                key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES), EVEN_TILES, PRECISION,
            )  # fmt: skip
            if needs_masking(
                not EVEN_TILES,
                HAS_MASK,
                crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, NUM_PARTS - 1),
                key_range_mode(KEY_RANGE_MODE, part, SPLIT_FULL_TILES),
            ):
                x = tl.where(sees, x, float("-inf"))
            tile_max = tl.max(x, 1) * log2_scale
            new_max = tl.maximum(row_max, tile_max if is_near_part(part, FAR_DISTANCE) else tile_max + shift)
            top = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(x * log2_scale - (top if is_near_part(part, FAR_DISTANCE) else top - shift)[:, None])
            shrink = tl.exp2(row_max - top)
            total = total * shrink + tl.sum(p, 1)
            if DROP_THRESHOLD:
                p = p * tl.where(row * column >= DROP_THRESHOLD, 1.0, 0.0)
            v_Sd = load_head_rows(v, s, d, S, v_t, D, FULL_HEAD_ROWS)
            acc = acc * shrink[:, None] + tl.dot(p.to(v_Sd.dtype), v_Sd, input_precision=PRECISION)
            row_max = new_max
    has_keys = total > 0
    acc = acc / (tl.where(has_keys, total, 1.0) * (1.0 - dropout_p))[:, None]
    store_head_rows(y, acc, t, d, T, y_t, D)
    tl.store(lse + head * T + t, tl.where(has_keys, row_max + tl.log2(total), 0.0), mask=t < T)


@triton.jit
def bwd_dq_kernel(
    q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds,
    y, lse, dy, delta, dq, dq_rel, dbias, B, H, T, S, d, zero_index,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t, mask_b, mask_t, dy_b, dy_h, dy_t, dq_b, dq_h, dq_t,
    inv_scale: tl.constexpr, log2_scale: tl.constexpr, dropout_p: tl.constexpr, DROP_THRESHOLD: tl.constexpr,
    grad_scale: tl.constexpr, HAS_DBIAS: tl.constexpr,
    Q_REL_WIDTH: tl.constexpr, K_REL_WIDTH: tl.constexpr, HAS_Q_REL: tl.constexpr, HAS_K_REL: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_Q_POS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    NUM_PARTS: tl.constexpr, KEY_RANGE_MODE: tl.constexpr, HAS_TILE_BOUNDS: tl.constexpr, FAR_DISTANCE: tl.constexpr,
    EVEN_TILES: tl.constexpr, FULL_HEAD_ROWS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr, K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SPLIT_FULL_TILES: tl.constexpr,
):  # fmt: skip
    """One tile of queries: the gradients of the queries, of their relative scores, and of the bias.

    `delta` and the sums lack the factor 1 / (1 - dropout_p) until the end.
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
    q_Td = load_head_rows(q, t, d, T, q_t, D, FULL_HEAD_ROWS)
    dy_Td = load_head_rows(dy, t, d, T, dy_t, D, FULL_HEAD_ROWS)
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
        begin, end, full_start, num_full = load_tile_bounds(
            key_bounds, b, B, t0, T, 0 if FAR_DISTANCE else part * t0, end, part, HAS_TILE_BOUNDS, SPLIT_FULL_TILES, BT
        )
        begin, end = clip_to_part(begin, end, t0, part, FAR_DISTANCE, BT)
        shift = 0.0 if is_near_part(part, FAR_DISTANCE) else load_far_bias(bias + (h * T + t0) * S + begin, begin < end)
        less_T = lse_T if is_near_part(part, FAR_DISTANCE) else lse_T - shift
        far_T = tl.zeros([BT], tl.float32)
        for s_offset in tl.range(
            begin, end, BS, num_stages=BIAS_NUM_STAGES if HAS_BIAS and is_near_part(part, FAR_DISTANCE) else None
        ):
            s0 = skip_full_tiles(s_offset, full_start, num_full, part, SPLIT_FULL_TILES)
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
                HAS_Q_REL, HAS_K_REL, HAS_MASK, HAS_BIAS and is_near_part(part, FAR_DISTANCE),
                crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, NUM_PARTS - 1),
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
        if HAS_DBIAS and not is_near_part(part, FAR_DISTANCE):  # scores with one bias share one element's gradient
            tl.atomic_add(dbias + (h * T + t0) * S + begin, tl.sum(far_T, 0), mask=begin < end, sem="relaxed")
    store_head_rows(dq, dq_Td * grad_scale, t, d, T, dq_t, D)
    if HAS_Q_REL and EVEN_TILES and not HAS_Q_POS:
        band = dq_rel + ((h * tl.cdiv(T, BT) + t0 // BT) * B + b) * BT * Q_REL_WIDTH
        zero_band_edges(band, S, Q_REL_WIDTH, BT)


@triton.jit
def zero_band_edges(band, S, W, BLOCK: tl.constexpr):
    """Store 0 for the distances of a band that lead from its positions to none of the S."""
    i, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    zeros = tl.zeros([BLOCK, BLOCK], band.dtype.element_ty)
    tl.store(band + i * W + c, zeros, mask=c < BLOCK - 1 - i)
    tl.store(band + i * W + S + c, zeros, mask=c >= BLOCK - 1 - i)


@triton.jit
def bwd_dkv_kernel(
    q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds,
    lse, dy, delta, dk, dv, dk_rel, B, H, T, S, d, zero_index,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_t, dy_b, dy_h, dy_t, dk_b, dk_h, dk_t,
    dv_b, dv_h, dv_t,
    inv_scale: tl.constexpr, log2_scale: tl.constexpr, dropout_p: tl.constexpr, DROP_THRESHOLD: tl.constexpr,
    grad_scale: tl.constexpr,
    Q_REL_WIDTH: tl.constexpr, K_REL_WIDTH: tl.constexpr, HAS_Q_REL: tl.constexpr, HAS_K_REL: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_Q_POS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    NUM_PARTS: tl.constexpr, KEY_RANGE_MODE: tl.constexpr, HAS_TILE_BOUNDS: tl.constexpr, FAR_DISTANCE: tl.constexpr,
    EVEN_TILES: tl.constexpr, FULL_HEAD_ROWS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr, K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SPLIT_FULL_TILES: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the gradients of keys, values and the keys' relative scores. `bias` is (H, S, T)."""
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
    for i in range(GROUP_SIZE):  # query heads that share these keys
        h = g * GROUP_SIZE + i
        head, q_at, dy_at = b * H + h, b * q_b + h * q_h, b * dy_b + h * dy_h
        for part in tl.static_range(NUM_PARTS):
            begin = (s0 if FAR_DISTANCE else s0 + part * BS) if IS_CAUSAL else 0
            end = tl.minimum(s0 + BS, T) if not FAR_DISTANCE and part + 1 < NUM_PARTS else T
            begin, end, full_start, num_full = load_tile_bounds(
                query_bounds, b, B, s0, S, begin, end, part, HAS_TILE_BOUNDS, SPLIT_FULL_TILES, BS
            )
            begin, end = clip_to_part(begin, end, s0, part, FAR_DISTANCE, BS)
            shift = (
                0.0 if is_near_part(part, FAR_DISTANCE) else load_far_bias(bias + (h * S + s0) * T + begin, begin < end)
            )
            for t_offset in tl.range(
                begin, end, BT, num_stages=BIAS_NUM_STAGES if HAS_BIAS and is_near_part(part, FAR_DISTANCE) else None
            ):
                t0 = skip_full_tiles(t_offset, full_start, num_full, part, SPLIT_FULL_TILES)
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
                q_Td = load_head_rows(q + q_at, t, d, T, q_t, D, FULL_HEAD_ROWS)
                dy_Td = load_head_rows(dy + dy_at, t, d, T, dy_t, D, FULL_HEAD_ROWS)
                x, sees = score_tile(
                    k_Sd, q_Td,
                    relative_score_ptrs(q_rel, b, h, B, H, t2, t0, s2, at2, T, zero_index, Q_REL_WIDTH, HAS_Q_POS, BT),
                    relative_score_ptrs(k_rel, b, h, B, H, s2, s0, at2, s2, S, S - 1, K_REL_WIDTH, HAS_Q_POS, BS),
                    mask + t2 * mask_t + s2, bias + (h * S + s2) * T + t2,
                    t2, s2, low, size, key_of_s, inside, inv_scale,
                    HAS_Q_REL, HAS_K_REL, HAS_MASK, HAS_BIAS and is_near_part(part, FAR_DISTANCE),
                    crosses_diagonal(IS_CAUSAL, part, FAR_DISTANCE, 0),
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
                    if HAS_Q_POS:  # target positions may repeat: unused slots are all 0
                        tl.atomic_add(to, dx * grad_scale, mask=inside)
                    else:
                        tl.store(to, (dx * grad_scale).to(dk_rel.dtype.element_ty), mask=inside)
    store_head_rows(dk, dk_Sd * grad_scale, s, d, S, dk_t, D)
    store_head_rows(dv, dv_Sd / (1.0 - dropout_p), s, d, S, dv_t, D)
    if HAS_K_REL and EVEN_TILES and not HAS_Q_POS:
        band = dk_rel + ((g * tl.cdiv(S, BS) + s0 // BS) * B + b) * BS * K_REL_WIDTH
        zero_band_edges(band, T, K_REL_WIDTH, BS)


class KernelArgs(NamedTuple):
    """Arguments that all three kernels take."""

    tensors: tuple[Tensor, ...]  # absent ones are replaced by any tensor
    sizes: tuple[int, ...]  # B, H, T, S, d, zero_index
    strides: tuple[int, ...]  # of q, k and v: per row, head and position
    mask_strides: tuple[int, int]
    constexprs: dict[str, Any]


def make_kernel_args(
    q: Tensor, k: Tensor, v: Tensor, q_rel: Tensor | None, k_rel: Tensor | None, mask: Tensor | None,
    q_pos: Tensor | None, drop_t: Tensor | None, drop_s: Tensor | None, bias: Tensor | None, key_ids: Tensor | None,
    key_ranges: Tensor | None, key_bounds: Tensor | None, query_bounds: Tensor | None, num_packed_heads: int,
    zero_index: int, far_distance: int, is_causal: bool, dropout: float, scale: float,
) -> KernelArgs:  # fmt: skip
    if num_packed_heads:
        (B, T, _), S, H, d = q.shape, k.shape[1], num_packed_heads, packed_inner_size(q, k) // num_packed_heads
        layout = tuple(stride for x in (q, k, v) for stride in (x.stride(0), d, x.stride(1)))
    else:
        (B, H, T, d), S = q.shape, k.shape[2]
        layout = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    if key_ids is not None and key_ranges is not None:
        assert not is_causal, "key ranges include the causal order"
        assert (key_ids.shape, key_ranges.shape[1:]) == ((B, S), (B, T)), "key ranges do not fit queries and keys"
    bits, strides = q, (0, 0)
    if mask is not None:
        bits = mask.to(torch.uint8, memory_format=torch.contiguous_format).expand(B, 1, T, S)
        strides = (bits.stride(0), bits.stride(2))
    D, even = padded_head_size(d), tiles_are_full(T, S)
    # with document ids alone, most tiles are fully visible
    has_full_tiles = even and key_ranges is not None and len(key_ranges) == 1 and key_bounds is not None
    if bias is None or max(T, S) <= far_distance + TILE_TOKENS:
        far_distance = 0  # no two tiles are far from each other
    has_two_parts = has_full_tiles or (is_causal and key_bounds is None and T > 2 * TILE_TOKENS)
    constexprs = {
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
        # far before, near and far after; or fully visible tiles and the others; or all in one
        "NUM_PARTS": 3 if far_distance else 2 if has_two_parts else 1,
        "SPLIT_FULL_TILES": has_full_tiles and not far_distance,
        "KEY_RANGE_MODE": 0 if key_ranges is None else len(key_ranges),
        "HAS_TILE_BOUNDS": key_bounds is not None,
        "FAR_DISTANCE": far_distance,
        "EVEN_TILES": even,
        "FULL_HEAD_ROWS": even and d == D,
        "D": D,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "K_OFFSET": H * d if num_packed_heads and is_packed_qkv(q, k) else 0,
        "V_OFFSET": k.shape[2] - H * d if num_packed_heads else 0,
        "GROUP_SIZE": 1 if num_packed_heads else H // k.shape[1],  # query heads per head of keys
        "num_warps": 4,
    }
    tensors = tuple(
        q if x is None else x
        for x in (q_rel, k_rel, bits, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds)
    )
    return KernelArgs(tensors, (B, H, T, S, d, zero_index), layout, strides, constexprs)


def tiles_are_full(T: int, S: int) -> bool:
    """Whether no tile is partly beyond the last position."""
    return T % TILE_TOKENS == 0 and S % TILE_TOKENS == 0


def packed_inner_size(q: Tensor, k: Tensor) -> int:
    """Return H x d: a third of a packed qkv, or half of packed keys and values."""
    return k.shape[2] // (3 if is_packed_qkv(q, k) else 2)


def is_packed_qkv(q: Tensor, k: Tensor) -> bool:
    """Whether queries are packed with keys and values; otherwise they are half as wide."""
    return q.shape[2] == k.shape[2]


def empty_like_heads(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return an empty (B, H, T, d) whose memory is (B, T, H, d), and its strides."""
    B, H, T, d = x.shape
    buffer = x.new_empty(B, T, H, d).transpose(1, 2)
    return buffer, buffer.stride()[:3]


def empty_packed_heads(x: Tensor, width: int, d: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return an empty (B, T, `width`), and its strides per row, head and position."""
    B, T, _ = x.shape
    return x.new_empty(B, T, width), (T * width, d, width)


@kernel_op("firth::attention_forward")
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, q_rel: Tensor | None, k_rel: Tensor | None, mask: Tensor | None,
    q_pos: Tensor | None, drop_t: Tensor | None, drop_s: Tensor | None, bias: Tensor | None, key_ids: Tensor | None,
    key_ranges: Tensor | None, key_bounds: Tensor | None, query_bounds: Tensor | None, num_packed_heads: int,
    zero_index: int, far_distance: int, is_causal: bool, dropout: float, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y (B, H, T, d) and lse (B, H, T), the log2 of the sums of exponentials.

    With `num_packed_heads`, q, k and v are one tensor (B, T, 3 x H x d), given three times; or q is (B, T, H x d) and
    k and v are one tensor (B, S, 2 x H x d), given twice. Then y is (B, T, H x d).
    """
    call = make_kernel_args(
        q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds,
        num_packed_heads, zero_index, far_distance, is_causal, dropout, scale,
    )  # fmt: skip
    B, H, T, _, d, _ = call.sizes
    y, lse, strides = allocate_attention_outputs(q, k, num_packed_heads)
    launch_options = (
        {"maxnreg": MAX_REGISTERS_4_BLOCKS}
        if (dropout or bias is not None) and call.constexprs["FULL_HEAD_ROWS"] and d <= 64
        else {}
    )
    if launch_options and dropout:
        launch_options["num_stages"] = 2
    launch(
        fwd_kernel, (triton.cdiv(T, TILE_TOKENS) * B * H,), q, k, v, *call.tensors, y, lse, *call.sizes, *call.strides,
        *strides, *call.mask_strides, BT=TILE_TOKENS, BS=TILE_TOKENS, **call.constexprs, **launch_options,
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
    key_ranges: Tensor | None, key_bounds: Tensor | None, query_bounds: Tensor | None, y: Tensor, lse: Tensor,
    bias_t: Tensor | None, num_packed_heads: int, zero_index: int, far_distance: int, is_causal: bool, dropout: float,
    scale: float, bias_requires_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv, dq_rel, dk_rel and, with `bias_requires_grad`, dbias without the factor 1 / (1 - dropout).

    Gradients of absent inputs are empty. A packed tensor has one gradient, the first of its parts. `bias_t` is the
    transposed bias (H, S, T).
    """
    call = make_kernel_args(
        q, k, v, q_rel, k_rel, mask, q_pos, drop_t, drop_s, bias, key_ids, key_ranges, key_bounds, query_bounds,
        num_packed_heads, zero_index, far_distance, is_causal, dropout, scale,
    )  # fmt: skip
    B, H, T, S, d, _ = call.sizes
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    y_strides, dy_strides = ((x.stride(0), d, x.stride(1)) if num_packed_heads else x.stride()[:3] for x in (y, dy))
    grads = allocate_attention_grads(q, k, v, q_rel, k_rel, q_pos, bias, num_packed_heads, bias_requires_grad)
    dq, dk, dv, dq_rel, dk_rel, dbias = grads.tensors
    delta, dkv_tensors = torch.empty_like(lse), call.tensors
    is_small, dq_options, dkv_options = call.constexprs["FULL_HEAD_ROWS"] and d <= 64, {}, {}
    if is_small and bias is not None and mask is None and key_ranges is None and not dropout:
        dq_options = {"maxnreg": MAX_REGISTERS_3_BLOCKS}
    if is_small and call.constexprs["SPLIT_FULL_TILES"]:
        dq_options, dkv_options = {"maxnreg": MAX_REGISTERS_4_BLOCKS}, {"maxnreg": MAX_REGISTERS_3_BLOCKS}
    if bias_t is not None:
        dkv_tensors = (*call.tensors[:6], bias_t, *call.tensors[7:])
    is_relative = q_rel is not None or k_rel is not None
    one_grad = bool(num_packed_heads) and is_packed_qkv(q, k)
    launch(
        bwd_dq_kernel, (triton.cdiv(T, TILE_TOKENS) * B * H,), q, k, v, *call.tensors,
        y, lse, dy, delta, dq, dq_rel, dbias,
        *call.sizes, *call.strides, *y_strides, *call.mask_strides, *dy_strides, *grads.strides[0],
        grad_scale=scale / (1 - dropout), HAS_DBIAS=dbias.numel() > 0, BT=TILE_TOKENS,
        BS=TILE_TOKENS if is_relative or bias is not None else HALF_TILE_TOKENS, **call.constexprs, **dq_options,
    )  # fmt: skip
    launch(
        bwd_dkv_kernel, (triton.cdiv(S, TILE_TOKENS) * B * (H // call.constexprs["GROUP_SIZE"]),),
        q, k, v, *dkv_tensors, lse, dy, delta, dq if one_grad else dk, dv, dk_rel,
        *call.sizes, *call.strides, *call.mask_strides, *dy_strides, *grads.strides[1], *grads.strides[2],
        grad_scale=scale / (1 - dropout), BT=TILE_TOKENS if is_relative else HALF_TILE_TOKENS, BS=TILE_TOKENS,
        **call.constexprs, **dkv_options,
    )  # fmt: skip
    return dq, dk, dv, dq_rel, dk_rel.to(q.dtype), dbias


class AttentionGradBuffers(NamedTuple):
    """Empty dq, dk, dv, dq_rel, dk_rel and dbias, and the strides of the first three."""

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
    allocate = torch.empty_like if q_pos is None and tiles_are_full(T, S) else torch.zeros_like  # some stay unwritten
    dk_rel_dtype = torch.float32 if q_pos is not None else q.dtype  # float32 where it is accumulated
    dq_rel = q.new_empty(0) if q_rel is None else allocate(q_rel)
    dk_rel = q.new_empty(0) if k_rel is None else allocate(k_rel, dtype=dk_rel_dtype)
    dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and bias_requires_grad else q.new_empty(0)
    return AttentionGradBuffers((dq, dk, dv, dq_rel, dk_rel, dbias), (dq_strides, dk_strides, dv_strides))


def setup_attention_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, num_packed_heads, zero_index, far_distance, is_causal, dropout, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = num_packed_heads, zero_index, far_distance, is_causal, dropout, scale


def differentiate_attention(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, y, lse = ctx.saved_tensors
    q_rel, k_rel, bias = tensors[3], tensors[4], tensors[9]
    bias_requires_grad = bias is not None and ctx.needs_input_grad[9]
    bias_t = None if bias is None else bias.mT.contiguous()
    dq, dk, dv, dq_rel, dk_rel, dbias = attention_backward(
        dy, *tensors, y, lse, bias_t, *ctx.options, bias_requires_grad
    )
    grads = [dq, *(x if x.numel() else None for x in (dk, dv)), *[None] * 17]
    grads[3], grads[4] = None if q_rel is None else dq_rel, None if k_rel is None else dk_rel
    if bias is not None and bias_requires_grad:
        grads[9] = (dbias / (1 - ctx.options[4])).to(bias.dtype)
    return tuple(grads)


attention_forward.register_autograd(differentiate_attention, setup_context=setup_attention_context)
