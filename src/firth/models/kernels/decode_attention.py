"""Attention of a decode step: one query per row, over the keys and values of its text so far.

One kernel rotates the new query and key (RoPE), stores the new key and value in the cache, and attends. It reads only
the keys that a row has: a masked kernel over the whole cache, as SDPA runs it, reads the empty part as well.

There is one program for each row and key head, too few to fill a GPU if the batch is small. So the keys are split into
P parts with a program each (split-KV, "Flash-Decoding", Dao et al. 2023). A part's softmax has its own maximum and its
own sum of exponentials. The log of the sum (`lse`) says how much weight the part has when the parts are combined, which
the output projection does while it loads them (`decode_linear.py`).

Grouped-query attention: the R query heads that share a key head are the rows of one matmul, padded to 16.

Shapes: B rows, H heads, G heads of keys and values, R = H / G, S positions of the cache, d head size, P parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firth.models.kernels.decode_linear import SplitHeads, pdl_options, uses_decode_kernels
from firth.models.kernels.launch import launch
from firth.models.kernels.tiling import num_multiprocessors, padded_head_size, triton

if triton is not None:
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

KEY_TILE = 64  # keys that a program loads at once
MAX_KEY_PARTS = 16


def num_key_parts(num_programs: int, capacity: int, device: torch.device) -> int:
    """Parts of the keys, a power of two: at most one program per multiprocessor, at least a tile of keys each."""
    parts = 1
    while 2 * parts * num_programs <= num_multiprocessors(device) and 2 * parts <= min(
        MAX_KEY_PARTS, capacity // KEY_TILE
    ):
        parts *= 2
    return parts


def decode_attention(
    qkv_BI: Tensor,
    k_BGSd: Tensor,
    v_BGSd: Tensor,
    position_B: Tensor,
    scale: float,
    rope_Sd: Tensor | None = None,
    bias_HS: Tensor | None = None,
    window: int | None = None,
    is_cross: bool = False,
) -> Tensor | SplitHeads:
    """Return attention's output (B, H x d) for one new token per row; its key and value enter the cache.

    `qkv_BI` holds queries, keys and values of the new token, at `position_B`. `rope_Sd` holds the d / 2 cosines, then
    the sines of each position (RoPE); `bias_HS` the position bias of keys 0, 1, ... positions back; `window` is the
    farthest distance that is visible.
    Cross-attention (`is_cross`) has queries only, and attends to the first `position_B` keys.
    """
    B, G, S, d = k_BGSd.shape
    H = (qkv_BI.shape[1] // d) - (0 if is_cross else 2 * G)
    if triton is None or not uses_decode_kernels(qkv_BI):
        return decode_attention_reference(qkv_BI, k_BGSd, v_BGSd, position_B, scale, rope_Sd, bias_HS, window, is_cross)
    parts = num_key_parts(B * G, S, qkv_BI.device)
    y = qkv_BI.new_empty(parts, B, H * d, dtype=torch.float32 if parts > 1 else qkv_BI.dtype)
    lse_PBH = qkv_BI.new_empty(parts, B, H, dtype=torch.float32)
    launch(
        decode_attention_kernel, (B * G, parts), qkv_BI, k_BGSd, v_BGSd, position_B,
        qkv_BI if rope_Sd is None else rope_Sd, qkv_BI if bias_HS is None else bias_HS, y, lse_PBH,
        scale, *k_BGSd.stride()[:3], *v_BGSd.stride()[:3], 0 if bias_HS is None else bias_HS.stride(0), B,
        H=H, G=G, D=d, BLOCK_D=padded_head_size(d), BLOCK_R=max(16, triton.next_power_of_2(H // G)), PARTS=parts,
        HAS_ROPE=rope_Sd is not None, HAS_BIAS=bias_HS is not None, WINDOW=-1 if window is None else window,
        IS_CROSS=is_cross, TILE=KEY_TILE, IS_FP32=qkv_BI.dtype == torch.float32, num_warps=4, num_stages=2,
        **pdl_options(B, qkv_BI.device),
    )  # fmt: skip
    return y[0] if parts == 1 else SplitHeads(y, lse_PBH)


def decode_attention_reference(
    qkv_BI: Tensor,
    k_BGSd: Tensor,
    v_BGSd: Tensor,
    position_B: Tensor,
    scale: float,
    rope_Sd: Tensor | None = None,
    bias_HS: Tensor | None = None,
    window: int | None = None,
    is_cross: bool = False,
) -> Tensor:
    """`decode_attention` by one operation after another."""
    B, G, S, d = k_BGSd.shape
    heads = qkv_BI.view(B, -1, d)
    H = heads.shape[1] - (0 if is_cross else 2 * G)
    q_BHd = heads[:, :H]
    if not is_cross:
        k_BGd, v_BGd = heads[:, H:].chunk(2, 1)
        if rope_Sd is not None:
            q_BHd, k_BGd = (rotate_heads(x, rope_Sd[position_B]) for x in (q_BHd, k_BGd))
        row_B = torch.arange(B, device=qkv_BI.device)
        k_BGSd[row_B, :, position_B] = k_BGd
        v_BGSd[row_B, :, position_B] = v_BGd
    distance_BS = position_B[:, None] - torch.arange(S, device=qkv_BI.device)
    visible_BS = distance_BS > 0 if is_cross else distance_BS >= 0
    if window is not None:
        visible_BS &= distance_BS <= window
    k_BHSd, v_BHSd = (x.repeat_interleave(H // G, 1) for x in (k_BGSd, v_BGSd))
    scores_BHS = torch.einsum("bhd,bhsd->bhs", q_BHd, k_BHSd).float() * scale
    if bias_HS is not None:
        scores_BHS = scores_BHS + bias_HS[:, distance_BS.clamp(min=0)].transpose(0, 1).float()
    weights_BHS = scores_BHS.masked_fill(~visible_BS[:, None], float("-inf")).softmax(-1).to(qkv_BI.dtype)
    return torch.einsum("bhs,bhsd->bhd", weights_BHS, v_BHSd).flatten(1)


def rotate_heads(x_BHd: Tensor, rope_Bd: Tensor) -> Tensor:
    """RoPE of one token per row."""
    cos, sin = rope_Bd[:, None].to(x_BHd.dtype).chunk(2, -1)
    first, second = x_BHd.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


if triton is not None:

    @triton.jit
    def rotate(x, partner, cos, sin):
        """RoPE: `partner` holds the other feature of each pair, `sin` is negative in the first half of a head."""
        return x.to(tl.float32) * cos + partner.to(tl.float32) * sin

    @triton.jit
    def decode_attention_kernel(
        qkv, keys, values, position, rope, bias, y, lse, scale,
        k_row, k_head, k_step, v_row, v_head, v_step, bias_head, B,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
        PARTS: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_BIAS: tl.constexpr, WINDOW: tl.constexpr,
        IS_CROSS: tl.constexpr, TILE: tl.constexpr, IS_FP32: tl.constexpr, USE_PDL: tl.constexpr,
    ):  # fmt: skip
        dtype: tl.constexpr = keys.dtype.element_ty
        precision: tl.constexpr = "ieee" if IS_FP32 else "tf32"
        R: tl.constexpr = H // G
        WIDTH: tl.constexpr = H * D if IS_CROSS else (H + 2 * G) * D
        if USE_PDL:
            if PARTS > 1:
                gdc_launch_dependents()
            gdc_wait()
        b, g, part = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
        at = tl.load(position + b)
        r, j = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
        inside_j, inside_rj = j < D, (r < R)[:, None] & (j < D)[None, :]
        token = qkv + b.to(tl.int64) * WIDTH
        q_at = token + (g * R + r)[:, None] * D
        q = tl.load(q_at + j[None, :], mask=inside_rj, other=0.0)
        if HAS_ROPE:
            half: tl.constexpr = D // 2
            other_j = tl.where(j < half, j + half, j - half)
            angle_at = rope + at * D + j % half
            cos = tl.load(angle_at, mask=inside_j, other=0.0).to(dtype).to(tl.float32)
            sin = tl.load(angle_at + half, mask=inside_j, other=0.0).to(dtype).to(tl.float32)
            sin = tl.where(j < half, -sin, sin)
            other_q = tl.load(q_at + other_j[None, :], mask=inside_rj, other=0.0)
            q = rotate(q, other_q, cos[None, :], sin[None, :]).to(dtype)
        keys += b.to(tl.int64) * k_row + g * k_head
        values += b.to(tl.int64) * v_row + g * v_head
        top = tl.full([BLOCK_R], -1e30, tl.float32)  # finite: the difference of two infinities is NaN
        total = tl.zeros([BLOCK_R], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        if not IS_CROSS:  # noqa: SIM102
            if part == 0:  # the new token itself
                k_at = token + (H + g) * D
                new_k = tl.load(k_at + j, mask=inside_j, other=0.0)
                if HAS_ROPE:
                    other_k = tl.load(k_at + other_j, mask=inside_j, other=0.0)
                    new_k = rotate(new_k, other_k, cos, sin).to(dtype)
                new_v = tl.load(token + (H + G + g) * D + j, mask=inside_j, other=0.0)
                tl.store(keys + at * k_step + j, new_k, mask=inside_j)
                tl.store(values + at * v_step + j, new_v, mask=inside_j)
                top = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
                if HAS_BIAS:
                    top += tl.load(bias + (g * R + r) * bias_head, mask=r < R, other=0.0).to(tl.float32)
                total += 1.0
                acc += new_v.to(tl.float32)[None, :]
        first = at * 0
        if WINDOW >= 0:
            first = tl.maximum(at - WINDOW, 0)
        size = tl.cdiv(tl.cdiv(at - first, PARTS), TILE) * TILE
        begin = first + part * size
        end = tl.minimum(begin + size, at)
        for start in range(begin, end, TILE):
            s = start + tl.arange(0, TILE)
            inside_sj = (s < end)[:, None] & inside_j[None, :]
            k = tl.load(keys + s[:, None] * k_step + j[None, :], mask=inside_sj, other=0.0)
            v = tl.load(values + s[:, None] * v_step + j[None, :], mask=inside_sj, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
            if HAS_BIAS:
                bias_at = bias + (g * R + r)[:, None] * bias_head + (at - s)[None, :]
                scores += tl.load(bias_at, mask=(r < R)[:, None] & (s < end)[None, :], other=0.0).to(tl.float32)
            scores = tl.where((s < end)[None, :], scores, -1e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp(scores - new_top[:, None])
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(dtype), v, input_precision=precision)
            top = new_top
        if USE_PDL and PARTS == 1:
            gdc_launch_dependents()
        out = acc / tl.maximum(total, 1e-30)[:, None]
        row = part * B + b
        y_at = y + row.to(tl.int64) * (H * D) + (g * R + r)[:, None] * D + j[None, :]
        tl.store(y_at, out.to(y.dtype.element_ty), mask=inside_rj)
        if PARTS > 1:
            # A part without keys has weight 0.
            log_sum = tl.where(total > 0, top + tl.log(tl.maximum(total, 1e-30)), -1e30)
            tl.store(lse + row.to(tl.int64) * H + g * R + r, log_sum, mask=r < R)
