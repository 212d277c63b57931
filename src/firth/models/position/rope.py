"""Rotary position embedding (RoPE, Su et al. 2021).

RoPE rotates queries and keys by angles proportional to their positions. The features of a head form pairs, and pair i
of the token at position m turns by the angle `m * theta_i` with `theta_i = base^(-2i/d)` (section 3.2.2). A rotation
by m followed by the inverse rotation by n is a rotation by m - n, so the score `q_m . k_n` depends on the contents and
on the distance m - n alone. Nothing is added to the embeddings, nothing is learned, and values are not rotated.

A pair is feature i and feature i + d/2, as in `transformers` (the paper pairs neighbours; that is a permutation of the
weights). So the rotation is `x * cos + flip(x) * (-sin, sin)` on the two halves of a head.

Low frequencies turn so slowly that a longer context shows angles that training never did. `RopeScaling` (Llama 3)
divides the low frequencies by `factor`, keeps the high ones, and blends in between.

Packed documents do not attend to each other and only distances count, so positions in the row do as well as positions
in the document.

Shapes: B rows, T positions, H heads, d head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firth.models.config import ModelConfig, RopeScaling, Rotary
from firth.models.exporting import is_exporting


def rope_frequencies(base: float, head_size: int, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Return theta_i (d / 2,), in radians per position, high frequencies first."""
    theta = base ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    if scaling is None:
        return theta
    wavelength = 2 * math.pi / theta  # positions per full turn
    blend = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0, 1)  # 1: keep, 0: divide by the factor
    return (1 - blend) * theta / scaling.factor + blend * theta


class Rope:
    """Cosines and sines of a batch's positions, computed once and applied in every layer: `rope(q)`, `rope(k)`."""

    def __init__(self, position_ids_BT: Tensor, frequencies: Tensor) -> None:
        angle = position_ids_BT[:, :, None, None, None].float() * frequencies
        as_table = torch.compiler.is_compiling() and not is_exporting()  # ONNX has cos and sin
        cos, sin = cos_and_sin(angle) if as_table else (angle.cos(), angle.sin())
        self.cos, self.sin = cos, torch.cat([-sin, sin], 3)  # (B or 1, T, 1, 1 or 2, d / 2)

    def __call__(self, x_BTI: Tensor, num_heads: int | None = None) -> Tensor:
        """Rotate the heads of (B, T, H x d): all of them (default), or the first `num_heads`."""
        halves = x_BTI.unflatten(-1, (-1, 2, self.cos.shape[-1]))
        rotated = halves * self.cos.to(x_BTI.dtype) + halves.flip(-2) * self.sin.to(x_BTI.dtype)
        if num_heads is not None:
            is_rotated = torch.arange(halves.shape[2], device=x_BTI.device) < num_heads
            rotated = torch.where(is_rotated[:, None, None], rotated, halves)
        return rotated.flatten(2)


@torch.library.custom_op("firth::cos_and_sin", mutates_args=())
def cos_and_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Opaque to the compiler, which would otherwise recompute sines for every element that is rotated."""
    return angle.cos(), angle.sin()


@cos_and_sin.register_fake
def cos_and_sin_fake(angle: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angle), torch.empty_like(angle)


def make_rope(
    config: ModelConfig, position_ids: Tensor | None, hidden_states: Tensor, is_local: bool = False
) -> Rope | None:
    """Return the rotation for these positions (default: 0 to T - 1), or None if the model has no RoPE.

    `is_local` selects the base of sliding-window layers (ModernBERT has another for them).
    """
    if not isinstance(config.position, Rotary):
        return None
    spec = config.position
    base = spec.local_theta if is_local and spec.local_theta is not None else spec.theta
    if position_ids is None:
        position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
    return Rope(position_ids, rope_frequencies(base, config.head_size, spec.scaling, hidden_states.device))
