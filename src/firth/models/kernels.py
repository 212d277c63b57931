"""Attention in one kernel on a GPU: forward, and backward for those who ask and for what is read.

The score of `t` for `s` is `q[t] . k[s] + ask[t, s - t] + read[s, t - s]`, scaled, plus `bias[t, s]`. The tables `ask`
and `read` (DeBERTa, Transformer-XL) are products of queries and keys with one vector per distance; each tile of scores
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

from firth.models.launch import launch, operation
from firth.models.tiles import BLOCK, padded

LOG2_E = tl.constexpr(1.4426950408889634)
STAGES = tl.constexpr(2)  # tiles of a bias that are on their way at once
REGISTERS = 168  # of a thread that asks with a bias and nothing else, or reads documents: three blocks have room
FEWER = 128  # of one that goes forward with dropout or a bias, or asks of documents: four blocks have room
HALF = BLOCK // 2  # places of a tile that backward kernels go through, where neither tables nor a bias are in the way


@triton.jit
def scores(
    a, b, ask, read, mask, bias, t, s, low, size, key, inside, unscale: tl.constexpr,
    ASK: tl.constexpr, READ: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    REACH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of scores that are yet to be scaled, and where something is seen.

    `ask` to `bias` point at what belongs to it.
    """
    if BIAS:
        more = tl.load(bias) if EVEN else tl.load(bias, mask=inside, other=0.0)
        x = tl.dot(a, tl.trans(b), acc=more.to(tl.float32) * unscale, input_precision=PRECISION)
    else:
        x = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if ASK:
        x += tl.load(ask) if EVEN else tl.load(ask, mask=inside, other=0.0)
    if READ:
        x += tl.load(read) if EVEN else tl.load(read, mask=inside, other=0.0)
    if MASK:
        inside = inside & (tl.load(mask, mask=inside, other=0) != 0)
    if CAUSAL:
        inside = inside & (s <= t)
    if REACH == 1:
        inside = inside & (key == low)
    if REACH == 2:
        inside = inside & ((key - low).to(tl.uint32) < size)  # without a sign: less than low is very much
    return x, inside


@triton.constexpr_function
def on_edge(CAUSAL, part, FAR, last):
    """Whether a part of the tiles may hold the diagonal: the near ones, or else this one."""
    return CAUSAL and part == (1 if FAR else last)


@triton.constexpr_function
def holes(*narrow):
    """Whether some places of a tile may not be seen."""
    return any(narrow)


@triton.jit
def numbers_at(
    table, b, h, B, H, mine, first, other, place, length, zero, W: tl.constexpr, PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the numbers of a tile stand that its places `mine` have for the distances to `other`.

    In bands, where `mine` are a block that begins at `first`; or in rows, with distance 0 from `place` at `zero`.
    """
    if PLACE:
        return table + ((b * H + h) * length + mine) * W + (other - place + zero)
    band = table + ((h * tl.cdiv(length, BLOCK) + first // BLOCK) * B + b) * BLOCK * W
    return band + (mine - first) * (W - 1) + (other + BLOCK - 1)


@triton.jit
def rows(x, place, d, length, stride, D: tl.constexpr, FULL: tl.constexpr):
    """Some vectors of one head, 0 beyond the last place and the last number."""
    at = tl.arange(0, D)
    of = x + place[:, None] * stride + at[None, :]
    if FULL:
        return tl.load(of)
    return tl.load(of, mask=(place[:, None] < length) & (at[None, :] < d), other=0.0)


@triton.jit
def numbers(x, place, length, EVEN: tl.constexpr):
    """A number of each of some places, 0 beyond the last."""
    return tl.load(x + place) if EVEN else tl.load(x + place, mask=place < length, other=0)


@triton.jit
def put_rows(x, values, place, d, length, stride, D: tl.constexpr):
    at = tl.arange(0, D)
    inside = (place[:, None] < length) & (at[None, :] < d)
    tl.store(x + place[:, None] * stride + at[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def between(
    spans, b, B, first, length, begin, end, part: tl.constexpr, SPANS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Which places the tile that begins at `first` has to go through: `begin` to `end`, or less where spans say so.

    With WHOLE, the first part has the tiles of which all is seen, and the second the others: from some place on, so
    many are left out. Both are given too.
    """
    jump, leap = 0, 0
    if SPANS:
        tiles = tl.cdiv(length, BLOCK)
        at = spans + b * tiles + first // BLOCK
        begin, end = tl.multiple_of(tl.load(at), BLOCK), tl.load(at + B * tiles)
        if WHOLE:
            jump = tl.multiple_of(tl.load(at + 2 * B * tiles), BLOCK)
            leap = tl.multiple_of(tl.load(at + 3 * B * tiles), BLOCK) - jump
            begin, end = (jump, jump + leap) if part == 0 else (begin, end - leap)
    return begin, end, jump, leap


@triton.jit
def leapt(place, jump, leap, part: tl.constexpr, WHOLE: tl.constexpr):
    """Where a tile begins, if some are left out."""
    return place + tl.where(place >= jump, leap, 0) if WHOLE and part == 1 else place


@triton.constexpr_function
def said(REACH, part, WHOLE):
    """What a reach has to say of a part of the tiles: nothing where all is seen."""
    return 0 if WHOLE and part == 0 else REACH


@triton.constexpr_function
def near(part, FAR):
    """Whether a part of the tiles has numbers of its own for each distance, or all have the same."""
    return FAR == 0 or part == 1


@triton.jit
def one_number(bias, there):
    """What all scores of some tiles get, times log2(e); in 32 bits, or the factor would be rounded to 16."""
    return tl.load(bias, mask=there, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def part_of(begin, end, first, part: tl.constexpr, FAR: tl.constexpr, BLOCK: tl.constexpr):
    """Of the places from `begin` to `end`: those so far before the tile that begins at `first`, those near it, or those
    so far after it, in whole tiles."""
    if FAR:
        before, after = (first - FAR + 1) // BLOCK * BLOCK, (first + FAR + 2 * BLOCK - 2) // BLOCK * BLOCK
        begin = begin if part == 0 else tl.maximum(begin, before if part == 1 else after)
        end = end if part == 2 else tl.minimum(end, after if part == 1 else before)
    return begin, end


@triton.jit
def forward_kernel(
    q, k, v, ask, read, mask, place, drop_t, drop_s, bias, keys, reach, seen, seeing, y, lse, B, H, T, S, d, zero,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t, mask_b, mask_t,
    unscale: tl.constexpr, post: tl.constexpr, rate: tl.constexpr, LIMIT: tl.constexpr,
    W_ASK: tl.constexpr, W_READ: tl.constexpr, ASK: tl.constexpr, READ: tl.constexpr, MASK: tl.constexpr,
    PLACE: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, PARTS: tl.constexpr, REACH: tl.constexpr,
    SPANS: tl.constexpr, FAR: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, SHARE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) // tl.cdiv(T, BT)).to(tl.int64)
    b, h = head // H, head % H
    g = h // SHARE
    q, k, v = q + b * q_b + h * q_h, k + K_AT + b * k_b + g * k_h, v + V_AT + b * v_b + g * v_h
    y = y + b * y_b + h * y_h
    mask = mask + b * mask_b
    t0 = tl.program_id(0) % tl.cdiv(T, BT) * BT
    t = t0 + tl.arange(0, BT)
    at = numbers(place + b * T, t, T, EVEN).to(tl.int32) if PLACE else t
    q_Td = rows(q, t, d, T, q_t, D, FULL)
    highest = tl.full([BT], float("-inf"), tl.float32)
    total = tl.zeros([BT], tl.float32)
    found = tl.zeros([BT, D], tl.float32)
    t2, at2 = t[:, None], at[:, None]
    row = numbers(drop_t + head * T, t, T, EVEN).to(tl.uint32)[:, None] if LIMIT else 0
    low = numbers(reach + b * T, t, T, EVEN)[:, None] if REACH else 0
    size = numbers(reach + (B + b) * T, t, T, EVEN).to(tl.uint32)[:, None] if REACH == 2 else 0
    for part in tl.static_range(PARTS):
        end = (t0 if not FAR and part + 1 < PARTS else tl.minimum(t0 + BT, S)) if CAUSAL else S
        begin, end, jump, leap = between(seen, b, B, t0, T, 0 if FAR else part * t0, end, part, SPANS, WHOLE, BT)
        begin, end = part_of(begin, end, t0, part, FAR, BT)
        shift = 0.0 if near(part, FAR) else one_number(bias + (h * T + t0) * S + begin, begin < end)
        for place_s in tl.range(begin, end, BS, num_stages=STAGES if BIAS and near(part, FAR) else None):
            s0 = leapt(place_s, jump, leap, part, WHOLE)
            s = s0 + tl.arange(0, BS)
            s2 = s[None, :]
            inside = tl.full([BT, BS], True, tl.int1) if EVEN else (t2 < T) & (s2 < S)
            key_of_s = numbers(keys + b * S, s, S, EVEN)[None, :] if said(REACH, part, WHOLE) else 0
            column = numbers(drop_s, s, S, EVEN).to(tl.uint32)[None, :] if LIMIT else 0
            x, sees = scores(
                q_Td, rows(k, s, d, S, k_t, D, FULL),
                numbers_at(ask, b, h, B, H, t2, t0, s2, at2, T, zero, W_ASK, PLACE, BT),
                numbers_at(read, b, h, B, H, s2, s0, at2, s2, S, S - 1, W_READ, PLACE, BS),
                mask + t2 * mask_t + s2, bias + (h * T + t2) * S + s2, t2, s2, low, size, key_of_s, inside, unscale,
                ASK, READ, MASK, BIAS and near(part, FAR), on_edge(CAUSAL, part, FAR, PARTS - 1),
                said(REACH, part, WHOLE), EVEN, PRECISION,
            )  # fmt: skip
            if holes(not EVEN, MASK, on_edge(CAUSAL, part, FAR, PARTS - 1), said(REACH, part, WHOLE)):
                x = tl.where(sees, x, float("-inf"))
            most = tl.max(x, 1) * post
            higher = tl.maximum(highest, most if near(part, FAR) else most + shift)
            top = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(x * post - (top if near(part, FAR) else top - shift)[:, None])
            shrink = tl.exp2(highest - top)
            total = total * shrink + tl.sum(p, 1)
            if LIMIT:
                p = p * tl.where(row * column >= LIMIT, 1.0, 0.0)
            v_Sd = rows(v, s, d, S, v_t, D, FULL)
            found = found * shrink[:, None] + tl.dot(p.to(v_Sd.dtype), v_Sd, input_precision=PRECISION)
            highest = higher
    some = total > 0
    found = found / (tl.where(some, total, 1.0) * (1.0 - rate))[:, None]
    put_rows(y, found, t, d, T, y_t, D)
    tl.store(lse + head * T + t, tl.where(some, highest + tl.log2(total), 0.0), mask=t < T)


@triton.jit
def asking_kernel(
    q, k, v, ask, read, mask, place, drop_t, drop_s, bias, keys, reach, seen, seeing, y, lse, dy, delta, dq, dask,
    dbias, B, H, T, S, d, zero,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t, mask_b, mask_t, dy_b, dy_h, dy_t, dq_b, dq_h, dq_t,
    unscale: tl.constexpr, post: tl.constexpr, rate: tl.constexpr, LIMIT: tl.constexpr, factor: tl.constexpr,
    DBIAS: tl.constexpr,
    W_ASK: tl.constexpr, W_READ: tl.constexpr, ASK: tl.constexpr, READ: tl.constexpr, MASK: tl.constexpr,
    PLACE: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, PARTS: tl.constexpr, REACH: tl.constexpr,
    SPANS: tl.constexpr, FAR: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, SHARE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, of what they have for each distance, and of the bias.

    `delta`, and what is added up, lack the factor 1 / (1 - rate) until the end.
    """
    head = (tl.program_id(0) // tl.cdiv(T, BT)).to(tl.int64)
    b, h = head // H, head % H
    g = h // SHARE
    q, k, v = q + b * q_b + h * q_h, k + K_AT + b * k_b + g * k_h, v + V_AT + b * v_b + g * v_h
    y = y + b * y_b + h * y_h
    dy, dq, mask = dy + b * dy_b + h * dy_h, dq + b * dq_b + h * dq_h, mask + b * mask_b
    t0 = tl.program_id(0) % tl.cdiv(T, BT) * BT
    t = t0 + tl.arange(0, BT)
    at = numbers(place + b * T, t, T, EVEN).to(tl.int32) if PLACE else t
    q_Td, dy_Td = rows(q, t, d, T, q_t, D, FULL), rows(dy, t, d, T, dy_t, D, FULL)
    delta_T = tl.sum(rows(y, t, d, T, y_t, D, FULL).to(tl.float32) * dy_Td.to(tl.float32), 1) * (1.0 - rate)
    tl.store(delta + head * T + t, delta_T, mask=t < T)
    lse_T = numbers(lse + head * T, t, T, EVEN)
    dq_Td = tl.zeros([BT, D], tl.float32)
    t2, at2 = t[:, None], at[:, None]
    row = numbers(drop_t + head * T, t, T, EVEN).to(tl.uint32)[:, None] if LIMIT else 0
    low = numbers(reach + b * T, t, T, EVEN)[:, None] if REACH else 0
    size = numbers(reach + (B + b) * T, t, T, EVEN).to(tl.uint32)[:, None] if REACH == 2 else 0
    for part in tl.static_range(PARTS):
        end = (t0 if not FAR and part + 1 < PARTS else tl.minimum(t0 + BT, S)) if CAUSAL else S
        begin, end, jump, leap = between(seen, b, B, t0, T, 0 if FAR else part * t0, end, part, SPANS, WHOLE, BT)
        begin, end = part_of(begin, end, t0, part, FAR, BT)
        shift = 0.0 if near(part, FAR) else one_number(bias + (h * T + t0) * S + begin, begin < end)
        less_T = lse_T if near(part, FAR) else lse_T - shift
        far_T = tl.zeros([BT], tl.float32)
        for place_s in tl.range(begin, end, BS, num_stages=STAGES if BIAS and near(part, FAR) else None):
            s0 = leapt(place_s, jump, leap, part, WHOLE)
            s = s0 + tl.arange(0, BS)
            s2 = s[None, :]
            inside = tl.full([BT, BS], True, tl.int1) if EVEN else (t2 < T) & (s2 < S)
            key_of_s = numbers(keys + b * S, s, S, EVEN)[None, :] if said(REACH, part, WHOLE) else 0
            column = numbers(drop_s, s, S, EVEN).to(tl.uint32)[None, :] if LIMIT else 0
            k_Sd = rows(k, s, d, S, k_t, D, FULL)
            x, sees = scores(
                q_Td, k_Sd,
                numbers_at(ask, b, h, B, H, t2, t0, s2, at2, T, zero, W_ASK, PLACE, BT),
                numbers_at(read, b, h, B, H, s2, s0, at2, s2, S, S - 1, W_READ, PLACE, BS),
                mask + t2 * mask_t + s2, bias + (h * T + t2) * S + s2, t2, s2, low, size, key_of_s, inside, unscale,
                ASK, READ, MASK, BIAS and near(part, FAR), on_edge(CAUSAL, part, FAR, PARTS - 1),
                said(REACH, part, WHOLE), EVEN, PRECISION,
            )  # fmt: skip
            x = x * post - less_T[:, None]
            if holes(not EVEN, MASK, on_edge(CAUSAL, part, FAR, PARTS - 1), said(REACH, part, WHOLE)):
                x = tl.where(sees, x, float("-inf"))
            p = tl.exp2(x)
            dp = tl.dot(dy_Td, tl.trans(rows(v, s, d, S, v_t, D, FULL)), input_precision=PRECISION)
            if LIMIT:
                dp = tl.where(row * column >= LIMIT, dp, 0.0)
            dx = p * (dp - delta_T[:, None])
            if DBIAS and near(part, FAR):
                tl.atomic_add(dbias + (h * T + t2) * S + s2, dx, mask=inside, sem="relaxed")
            if DBIAS and not near(part, FAR):
                far_T += tl.sum(dx, 1)
            dq_Td += tl.dot(dx.to(k_Sd.dtype), k_Sd, input_precision=PRECISION)
            if ASK:
                to = numbers_at(dask, b, h, B, H, t2, t0, s2, at2, T, zero, W_ASK, PLACE, BT)
                tl.store(to, (dx * factor).to(dask.dtype.element_ty), mask=inside)
        if DBIAS and not near(part, FAR):  # all that have the same number learn together, at one of their places
            tl.atomic_add(dbias + (h * T + t0) * S + begin, tl.sum(far_T, 0), mask=begin < end, sem="relaxed")
    put_rows(dq, dq_Td * factor, t, d, T, dq_t, D)
    if ASK and EVEN and not PLACE:
        band = dask + ((h * tl.cdiv(T, BT) + t0 // BT) * B + b) * BT * W_ASK
        put_edges(band, S, W_ASK, BT)


@triton.jit
def put_edges(band, S, W, BLOCK: tl.constexpr):
    """0 for the distances of a band that lead from one of its places to none of the S."""
    i, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    nothing = tl.zeros([BLOCK, BLOCK], band.dtype.element_ty)
    tl.store(band + i * W + c, nothing, mask=c < BLOCK - 1 - i)
    tl.store(band + i * W + S + c, nothing, mask=c >= BLOCK - 1 - i)


@triton.jit
def reading_kernel(
    q, k, v, ask, read, mask, place, drop_t, drop_s, bias, keys, reach, seen, seeing, lse, dy, delta, dk, dv, dread,
    B, H, T, S, d, zero,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_t, dy_b, dy_h, dy_t, dk_b, dk_h, dk_t,
    dv_b, dv_h, dv_t,
    unscale: tl.constexpr, post: tl.constexpr, rate: tl.constexpr, LIMIT: tl.constexpr, factor: tl.constexpr,
    W_ASK: tl.constexpr, W_READ: tl.constexpr, ASK: tl.constexpr, READ: tl.constexpr, MASK: tl.constexpr,
    PLACE: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, PARTS: tl.constexpr, REACH: tl.constexpr,
    SPANS: tl.constexpr, FAR: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, SHARE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys, the values, and what the keys have for each distance; of one head of keys.

    `bias` is turned: (H, S, T).
    """
    pair = (tl.program_id(0) // tl.cdiv(S, BS)).to(tl.int64)
    b, g = pair // (H // SHARE), pair % (H // SHARE)
    k, v, mask = k + K_AT + b * k_b + g * k_h, v + V_AT + b * v_b + g * v_h, mask + b * mask_b
    dv = (dk if V_AT else dv) + V_AT + b * dv_b + g * dv_h
    dk = dk + K_AT + b * dk_b + g * dk_h
    s0 = tl.program_id(0) % tl.cdiv(S, BS) * BS
    s = s0 + tl.arange(0, BS)
    s2 = s[:, None]
    key_of_s = numbers(keys + b * S, s, S, EVEN)[:, None] if REACH else 0
    column = numbers(drop_s, s, S, EVEN).to(tl.uint32)[:, None] if LIMIT else 0
    k_Sd, v_Sd = rows(k, s, d, S, k_t, D, FULL), rows(v, s, d, S, v_t, D, FULL)
    dk_Sd, dv_Sd = tl.zeros([BS, D], tl.float32), tl.zeros([BS, D], tl.float32)
    for i in range(SHARE):  # of the queries' heads that share these keys
        h = g * SHARE + i
        head, q_at, dy_at = b * H + h, b * q_b + h * q_h, b * dy_b + h * dy_h
        for part in tl.static_range(PARTS):
            begin = (s0 if FAR else s0 + part * BS) if CAUSAL else 0
            end = tl.minimum(s0 + BS, T) if not FAR and part + 1 < PARTS else T
            begin, end, jump, leap = between(seeing, b, B, s0, S, begin, end, part, SPANS, WHOLE, BS)
            begin, end = part_of(begin, end, s0, part, FAR, BS)
            shift = 0.0 if near(part, FAR) else one_number(bias + (h * S + s0) * T + begin, begin < end)
            for place_t in tl.range(begin, end, BT, num_stages=STAGES if BIAS and near(part, FAR) else None):
                t0 = leapt(place_t, jump, leap, part, WHOLE)
                t = t0 + tl.arange(0, BT)
                at = numbers(place + b * T, t, T, EVEN).to(tl.int32) if PLACE else t
                t2, at2 = t[None, :], at[None, :]
                inside = tl.full([BS, BT], True, tl.int1) if EVEN else (s2 < S) & (t2 < T)
                low = numbers(reach + b * T, t, T, EVEN)[None, :] if said(REACH, part, WHOLE) else 0
                size = numbers(reach + (B + b) * T, t, T, EVEN).to(tl.uint32)[None, :] if REACH == 2 else 0
                row = numbers(drop_t + head * T, t, T, EVEN).to(tl.uint32)[None, :] if LIMIT else 0
                q_Td, dy_Td = rows(q + q_at, t, d, T, q_t, D, FULL), rows(dy + dy_at, t, d, T, dy_t, D, FULL)
                x, sees = scores(
                    k_Sd, q_Td,
                    numbers_at(ask, b, h, B, H, t2, t0, s2, at2, T, zero, W_ASK, PLACE, BT),
                    numbers_at(read, b, h, B, H, s2, s0, at2, s2, S, S - 1, W_READ, PLACE, BS),
                    mask + t2 * mask_t + s2, bias + (h * S + s2) * T + t2, t2, s2, low, size, key_of_s, inside, unscale,
                    ASK, READ, MASK, BIAS and near(part, FAR), on_edge(CAUSAL, part, FAR, 0),
                    said(REACH, part, WHOLE), EVEN, PRECISION,
                )  # fmt: skip
                lse_T = numbers(lse + head * T, t, T, EVEN)
                x = x * post - (lse_T if near(part, FAR) else lse_T - shift)[None, :]
                if holes(not EVEN, MASK, on_edge(CAUSAL, part, FAR, 0), said(REACH, part, WHOLE)):
                    x = tl.where(sees, x, float("-inf"))
                p = tl.exp2(x)
                dp = tl.dot(v_Sd, tl.trans(dy_Td), input_precision=PRECISION)
                dropped = p
                if LIMIT:
                    stays = tl.where(row * column >= LIMIT, 1.0, 0.0)
                    dropped = p * stays
                    dp = dp * stays
                dv_Sd += tl.dot(dropped.to(dy_Td.dtype), dy_Td, input_precision=PRECISION)
                dx = p * (dp - numbers(delta + head * T, t, T, EVEN)[None, :])
                dk_Sd += tl.dot(dx.to(q_Td.dtype), q_Td, input_precision=PRECISION)
                if READ:
                    to = numbers_at(dread, b, h, B, H, s2, s0, at2, s2, S, S - 1, W_READ, PLACE, BS)
                    if PLACE:  # unused slots may all stand at one place
                        tl.atomic_add(to, dx * factor, mask=inside)
                    else:
                        tl.store(to, (dx * factor).to(dread.dtype.element_ty), mask=inside)
    put_rows(dk, dk_Sd * factor, s, d, S, dk_t, D)
    put_rows(dv, dv_Sd / (1.0 - rate), s, d, S, dv_t, D)
    if READ and EVEN and not PLACE:
        band = dread + ((g * tl.cdiv(S, BS) + s0 // BS) * B + b) * BS * W_READ
        put_edges(band, T, W_READ, BS)


class Call(NamedTuple):
    """What the three kernels are called with, beside what each computes."""

    tables: tuple[Tensor, ...]  # any tensor for what there is not
    sizes: tuple[int, ...]  # B, H, T, S, d, zero
    strides: tuple[int, ...]  # of queries, keys and values, each from row to row, head to head, place to place
    mask_strides: tuple[int, int]
    made_for: dict[str, Any]


def make_call(
    q: Tensor, k: Tensor, v: Tensor, ask: Tensor | None, read: Tensor | None, mask: Tensor | None,
    place: Tensor | None, drop_t: Tensor | None, drop_s: Tensor | None, bias: Tensor | None, keys: Tensor | None,
    reach: Tensor | None, seen: Tensor | None, seeing: Tensor | None, heads: int, zero: int, far: int, causal: bool,
    dropout: float, scale: float,
) -> Call:  # fmt: skip
    if heads:  # side by side
        (B, T, _), S, H, d = q.shape, k.shape[1], heads, width(q, k) // heads
        layout = tuple(step for x in (q, k, v) for step in (x.stride(0), d, x.stride(1)))
    else:
        (B, H, T, d), S = q.shape, k.shape[2]
        layout = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    if keys is not None and reach is not None:
        assert not causal, "a reach says what order there is"
        assert (keys.shape, reach.shape[1:]) == ((B, S), (B, T)), "who sees whom is said of another sequence"
    bits, strides = q, (0, 0)
    if mask is not None:
        bits = mask.to(torch.uint8, memory_format=torch.contiguous_format).expand(B, 1, T, S)
        strides = (bits.stride(0), bits.stride(2))
    D, even = padded(d), is_even(T, S)
    whole = even and reach is not None and len(reach) == 1 and seen is not None  # documents, which fill many rows alone
    far = far if bias is not None and max(T, S) > far + BLOCK else 0  # or no tile is far from another
    made_for = {
        "unscale": 1 / scale,
        "post": scale * LOG2_E.value,
        "rate": dropout,
        "LIMIT": round(dropout * 2**32),
        "W_ASK": 1 if ask is None else ask.shape[-1],
        "W_READ": 1 if read is None else read.shape[-1],
        "ASK": ask is not None,
        "READ": read is not None,
        "MASK": mask is not None,
        "PLACE": place is not None,
        "BIAS": bias is not None,
        "CAUSAL": causal,
        # far before, near and far after; or tiles that are seen whole and those on the edge; or all in one
        "PARTS": 3 if far else 2 if whole or (causal and seen is None and T > 2 * BLOCK) else 1,
        "WHOLE": whole and not far,
        "REACH": 0 if reach is None else len(reach),
        "SPANS": seen is not None,
        "FAR": far,
        "EVEN": even,
        "FULL": even and d == D,
        "D": D,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "K_AT": H * d if heads and in_one(q, k) else 0,
        "V_AT": k.shape[2] - H * d if heads else 0,
        "SHARE": 1 if heads else H // k.shape[1],  # heads that read the same keys
        "num_warps": 4,
    }
    tables = tuple(
        q if x is None else x for x in (ask, read, bits, place, drop_t, drop_s, bias, keys, reach, seen, seeing)
    )
    return Call(tables, (B, H, T, S, d, zero), layout, strides, made_for)


def is_even(T: int, S: int) -> bool:
    """Whether all tiles are full."""
    return T % BLOCK == 0 and S % BLOCK == 0


def width(q: Tensor, k: Tensor) -> int:
    """Numbers of all heads: a third of what stands side by side in one tensor, or half of keys and values."""
    return k.shape[2] // (3 if in_one(q, k) else 2)


def in_one(q: Tensor, k: Tensor) -> bool:
    """Whether queries stand in one tensor with keys and values; otherwise they are half as wide."""
    return q.shape[2] == k.shape[2]


def like_rows(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Room for as many numbers, heads of a place side by side; and its strides."""
    B, H, T, d = x.shape
    room = x.new_empty(B, T, H, d).transpose(1, 2)
    return room, room.stride()[:3]


def side_by_side(x: Tensor, total: int, d: int) -> tuple[Tensor, tuple[int, ...]]:
    """The same for heads of d numbers, of which a place has so many in total."""
    B, T, _ = x.shape
    return x.new_empty(B, T, total), (T * total, d, total)


@operation("firth::attend")
def forward(
    q: Tensor, k: Tensor, v: Tensor, ask: Tensor | None, read: Tensor | None, mask: Tensor | None,
    place: Tensor | None, drop_t: Tensor | None, drop_s: Tensor | None, bias: Tensor | None, keys: Tensor | None,
    reach: Tensor | None, seen: Tensor | None, seeing: Tensor | None, heads: int, zero: int, far: int, causal: bool,
    dropout: float, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What attention finds, and the logarithms of the sums of exponentials (base 2).

    With `heads`, queries, keys and values are one tensor (B, T, 3 x H x d), given three times; or queries are
    (B, T, H x d), and keys and values one tensor (B, S, 2 x H x d), given twice. What is found is then (B, T, H x d).
    """
    call = make_call(
        q, k, v, ask, read, mask, place, drop_t, drop_s, bias, keys, reach, seen, seeing, heads, zero,
        far, causal, dropout, scale,
    )  # fmt: skip
    B, H, T, _, d, _ = call.sizes
    y, lse, strides = room_to_find(q, k, heads)
    tight = {"maxnreg": FEWER} if (dropout or bias is not None) and call.made_for["FULL"] and d <= 64 else {}
    if tight and dropout:
        tight["num_stages"] = 2
    launch(
        forward_kernel, (triton.cdiv(T, BLOCK) * B * H,), q, k, v, *call.tables, y, lse, *call.sizes, *call.strides,
        *strides, *call.mask_strides, BT=BLOCK, BS=BLOCK, **call.made_for, **tight,
    )  # fmt: skip
    return y, lse


def room_to_find(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    inner = width(q, k) if heads else 0
    y, strides = side_by_side(q, inner, inner // heads) if heads else like_rows(q)
    H, T = (heads, q.shape[1]) if heads else q.shape[1:3]
    return y, q.new_empty(len(q), H, T, dtype=torch.float32), strides


@operation("firth::attend_backward")
def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, ask: Tensor | None, read: Tensor | None, mask: Tensor | None,
    place: Tensor | None, drop_t: Tensor | None, drop_s: Tensor | None, bias: Tensor | None, keys: Tensor | None,
    reach: Tensor | None, seen: Tensor | None, seeing: Tensor | None, y: Tensor, lse: Tensor, turned: Tensor | None,
    heads: int, zero: int, far: int, causal: bool, dropout: float, scale: float, learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys, values, both tables, and the bias where that `learns`.

    Those of what is not there are empty; what is given in one tensor has one gradient, the first of them. That of the
    bias lacks the factor 1 / (1 - dropout). `turned` is the bias with keys first.
    """
    call = make_call(
        q, k, v, ask, read, mask, place, drop_t, drop_s, bias, keys, reach, seen, seeing, heads, zero,
        far, causal, dropout, scale,
    )  # fmt: skip
    B, H, T, S, d, _ = call.sizes
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    y_strides, dy_strides = ((x.stride(0), d, x.stride(1)) if heads else x.stride()[:3] for x in (y, dy))
    room = room_to_learn(q, k, v, ask, read, place, bias, heads, learns)
    dq, dk, dv, dask, dread, dbias = room.tensors
    delta, tables = torch.empty_like(lse), call.tables
    bare = bias is not None and mask is None and reach is None and not dropout and call.made_for["FULL"]
    fewer = {"maxnreg": REGISTERS} if bare and d <= 64 else {}
    reads = {}
    if call.made_for["WHOLE"] and call.made_for["FULL"] and d <= 64:
        fewer, reads = {"maxnreg": FEWER}, {"maxnreg": REGISTERS}
    if turned is not None:
        tables = (*tables[:6], turned, *tables[7:])
    by_distance, one = ask is not None or read is not None, bool(heads) and in_one(q, k)
    launch(
        asking_kernel, (triton.cdiv(T, BLOCK) * B * H,), q, k, v, *call.tables, y, lse, dy, delta, dq, dask, dbias,
        *call.sizes, *call.strides, *y_strides, *call.mask_strides, *dy_strides, *room.strides[0],
        factor=scale / (1 - dropout), DBIAS=dbias.numel() > 0, BT=BLOCK,
        BS=BLOCK if by_distance or bias is not None else HALF, **call.made_for, **fewer,
    )  # fmt: skip
    launch(
        reading_kernel, (triton.cdiv(S, BLOCK) * B * (H // call.made_for["SHARE"]),), q, k, v, *tables, lse, dy, delta,
        dq if one else dk, dv, dread, *call.sizes, *call.strides, *call.mask_strides, *dy_strides, *room.strides[1],
        *room.strides[2], factor=scale / (1 - dropout), BT=BLOCK if by_distance else HALF, BS=BLOCK, **call.made_for,
        **reads,
    )  # fmt: skip
    return dq, dk, dv, dask, dread.to(q.dtype), dbias


class Room(NamedTuple):
    """For the gradients of queries, keys, values, both tables and the bias; with the strides of the first three."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    strides: tuple[tuple[int, ...], ...]


def room_to_learn(
    q: Tensor, k: Tensor, v: Tensor, ask: Tensor | None, read: Tensor | None, place: Tensor | None,
    bias: Tensor | None, heads: int, learns: bool,
) -> Room:  # fmt: skip
    if heads:
        d = width(q, k) // heads
        dq, dq_strides = side_by_side(q, q.shape[2], d)
        dk, dk_strides = (q.new_empty(0), dq_strides) if in_one(q, k) else side_by_side(k, k.shape[2], d)
        dv, dv_strides = q.new_empty(0), dk_strides
    else:
        (dq, dq_strides), (dk, dk_strides), (dv, dv_strides) = like_rows(q), like_rows(k), like_rows(v)
    T, S = (q.shape[1], k.shape[1]) if heads else (q.shape[2], k.shape[2])
    room = torch.empty_like if place is None and is_even(T, S) else torch.zeros_like  # all written, or not
    exact = torch.float32 if place is not None else q.dtype  # of what is added up in place
    dask = q.new_empty(0) if ask is None else room(ask)
    dread = q.new_empty(0) if read is None else room(read, dtype=exact)
    dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and learns else q.new_empty(0)
    return Room((dq, dk, dv, dask, dread, dbias), (dq_strides, dk_strides, dv_strides))


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, heads, zero, far, causal, dropout, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = heads, zero, far, causal, dropout, scale


def differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, y, lse = ctx.saved_tensors
    ask, read, bias = tensors[3], tensors[4], tensors[9]
    learns = bias is not None and ctx.needs_input_grad[9]
    turned = None if bias is None else bias.mT.contiguous()
    dq, dk, dv, dask, dread, dbias = backward(dy, *tensors, y, lse, turned, *ctx.numbers, learns)
    found = [dq, *(x if x.numel() else None for x in (dk, dv)), *[None] * 17]
    found[3], found[4] = None if ask is None else dask, None if read is None else dread
    if bias is not None and learns:
        found[9] = (dbias / (1 - ctx.numbers[4])).to(bias.dtype)
    return tuple(found)


forward.register_autograd(differentiate, setup_context=keep)
