"""One Attention for all, and the one function that picks the kernel.

B rows, T places that ask, S places that are read, H heads, d numbers per head, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.config import FanIn, ModelConfig
from firth.models.dropout import drop


class Sight(NamedTuple):
    """Who may see whom: `causal` alone, or a `mask` (B, 1, T, S) that is true where seeing is allowed.

    `score` (1, H, T, S) is added to the scores where a position scheme says so.
    """

    causal: bool = False
    mask: Tensor | None = None
    score: Tensor | None = None


def see(
    causal: bool,
    doc: Tensor | None,
    rank: Tensor | None = None,
    read_doc: Tensor | None = None,
    score: Tensor | None = None,
) -> Sight:
    """Sight from the fields of a batch: the same document, and `rank[j] <= rank[i]`.

    Without `rank` a causal stack reads in order of place. `read_doc` are the documents of another sequence
    (cross-attention); without documents everything is one.
    """
    mask = None
    if doc is not None:
        mask = doc[:, :, None] == (doc if read_doc is None else read_doc)[:, None, :]
    if rank is not None:
        earlier = rank[:, None, :] <= rank[:, :, None]
        mask = earlier if mask is None else mask & earlier
    elif causal and (mask is not None or score is not None):
        like = mask if mask is not None else score
        assert like is not None
        lower = torch.ones(like.shape[-2:], dtype=torch.bool, device=like.device).tril()
        mask = lower[None] if mask is None else mask & lower
    if mask is not None:
        mask = mask[:, None]
        if score is not None:
            score = score.masked_fill(~mask, float("-inf"))
    return Sight(causal and rank is None and mask is None, mask, score)


def attend(q_BHTd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, sight: Sight, dropout: float, scale: float) -> Tensor:
    """Softmax attention by SDPA, which takes its fused kernels when there is no mask or a causal one.

    On a CPU it has none for dropout, and `plain` is faster.
    """
    if dropout and q_BHTd.device.type == "cpu" and not torch.compiler.is_compiling():
        return plain(q_BHTd, k_BHSd, v_BHSd, sight, dropout, scale)
    bias = sight.mask if sight.score is None else sight.score.to(q_BHTd.dtype)
    return F.scaled_dot_product_attention(
        q_BHTd, k_BHSd, v_BHSd, attn_mask=bias, dropout_p=dropout, is_causal=sight.causal, scale=scale
    )


def plain(q_BHTd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, sight: Sight, dropout: float, scale: float) -> Tensor:
    """The same in single operations; whoever sees nobody gets 0 here too."""
    scores = (q_BHTd * scale) @ k_BHSd.transpose(-1, -2)
    if sight.score is not None:
        scores += sight.score
    elif sight.causal or sight.mask is not None:
        # added, not filled in: so that nothing is done backward
        allowed = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril() if sight.mask is None else sight.mask
        scores += scores.new_zeros(allowed.shape).masked_fill_(~allowed, torch.finfo(scores.dtype).min)
    y_BHTd = drop(scores.softmax(-1), dropout) @ v_BHSd
    return y_BHTd if sight.mask is None else y_BHTd * sight.mask.any(-1, keepdim=True)


class Attention(nn.Module):
    """Multi-head attention; who asks (`x`) and what is read (`read`) may be two sequences."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.head_size = config.num_heads, config.head_size
        inner = self.num_heads * self.head_size
        self.qkv = nn.Linear(config.dim, 3 * inner, bias=config.bias)  # query, key, value in one product
        self.out = nn.Linear(inner, config.dim, bias=config.bias)
        self.dropout = config.attention_dropout
        self.scale = 1.0 if isinstance(config.init, FanIn) else self.head_size**-0.5

    def forward(self, x_BTD: Tensor, sight: Sight, read_BSD: Tensor | None = None) -> Tensor:
        if read_BSD is None:
            q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        else:
            inner = self.num_heads * self.head_size
            weight, bias = self.qkv.weight, self.qkv.bias
            q = F.linear(x_BTD, weight[:inner], None if bias is None else bias[:inner])
            k, v = F.linear(read_BSD, weight[inner:], None if bias is None else bias[inner:]).chunk(2, dim=-1)
        dropout = self.dropout if self.training else 0.0
        y = attend(self.split(q), self.split(k), self.split(v), sight, dropout, self.scale)
        return self.out(y.transpose(1, 2).flatten(2))

    def split(self, x_BTI: Tensor) -> Tensor:
        return x_BTI.unflatten(-1, (self.num_heads, self.head_size)).transpose(1, 2)
