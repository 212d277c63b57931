"""How a model knows where a token stands.

Three doors. `embed` (a vector added to the embedding) is in `embed.py`. `turn` (queries and keys turned by their place)
and `score` (a number added to the scores of attention) are here; scores that depend on what is read are in
`relative.py`. Packed documents do not see each other, so where only distances matter, places in the row will do.

B rows, T places that ask, S places that are read, H heads, d numbers per head, R distances.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from firth.models.config import ALiBi, ModelConfig, RopeScaling, Rotary, T5Bias

# --- turn ---------------------------------------------------------------------------------------------------------


def rope_frequencies(base: float, head_size: int, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """How far each pair of numbers turns from one place to the next (Su et al. 2021, section 3.2.2)."""
    turns = base ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    if scaling is None:
        return turns
    places = 2 * math.pi / turns  # that one turn takes
    blend = (scaling.original_length / places - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0, 1)
    return (1 - blend) * turns / scaling.factor + blend * turns


class Rope:
    """Cosines and sines of places, which turn queries and keys: each number with the one half a head further."""

    def __init__(self, position_ids_BT: Tensor, frequencies: Tensor) -> None:
        angle = position_ids_BT[:, :, None, None, None].float() * frequencies
        as_table = torch.compiler.is_compiling()
        cos, sin = cos_and_sin(angle) if as_table else (angle.cos(), angle.sin())
        self.cos, self.sin = cos, torch.cat([-sin, sin], 3)  # (B or 1, T, 1, 1 or 2, d / 2)

    def __call__(self, x_BTI: Tensor, num_heads: int | None = None) -> Tensor:
        """Heads side by side, turned: all of them, or the first ones."""
        halves = x_BTI.unflatten(-1, (-1, 2, self.cos.shape[-1]))
        turned = halves * self.cos.to(x_BTI.dtype) + halves.flip(-2) * self.sin.to(x_BTI.dtype)
        if num_heads is not None:
            first = torch.arange(halves.shape[2], device=x_BTI.device) < num_heads
            turned = torch.where(first[:, None, None], turned, halves)
        return turned.flatten(2)


@torch.library.custom_op("firth::cos_and_sin", mutates_args=())
def cos_and_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """A table: a compiler that sees into this computes it anew for every number that is turned."""
    return angle.cos(), angle.sin()


@cos_and_sin.register_fake
def cos_and_sin_fake(angle: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angle), torch.empty_like(angle)


def make_rope(
    config: ModelConfig, position_ids: Tensor | None, hidden_states: Tensor, is_local: bool = False
) -> Rope | None:
    """The turn of a sequence of vectors (B, T, D), in a layer with a window or without."""
    if not isinstance(config.position, Rotary):
        return None
    spec = config.position
    base = spec.local_theta if is_local and spec.local_theta is not None else spec.theta
    if position_ids is None:
        position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
    return Rope(position_ids, rope_frequencies(base, config.head_size, spec.scaling, hidden_states.device))


# --- score, the same for every text -------------------------------------------------------------------------------


def distance_matrix(T: int, S: int, device: torch.device) -> Tensor:
    """(T, S): how far what is read stands after what asks."""
    return torch.arange(S, device=device)[None, :] - torch.arange(T, device=device)[:, None]


def t5_bucket(distance: Tensor, num_buckets: int, max_distance: int, is_bidirectional: bool) -> Tensor:
    """The bucket of a relative distance (place read minus place that asks).

    Near distances have a bucket each, further ones share logarithmically, all beyond `max_distance` share the last
    (Raffel et al. 2020, section 2.1). `is_bidirectional` gives half of the buckets to what comes after.
    """
    side = torch.zeros_like(distance)
    if is_bidirectional:
        num_buckets //= 2
        side = (distance > 0).long() * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    shared = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return side + torch.where(distance < exact, distance, (exact + shared.long()).clamp(max=num_buckets - 1))


class T5BiasTable(nn.Module):
    """One number per head and bucket, shared by all layers of a stack."""

    def __init__(self, spec: T5Bias, num_heads: int, is_bidirectional: bool) -> None:
        super().__init__()
        self.spec, self.is_bidirectional, self.max_distance = spec, is_bidirectional, spec.max_distance
        self.table = nn.Embedding(spec.num_buckets, num_heads)

    def forward(self, T: int, S: int) -> Tensor:
        """(1, H, T, S). Each distance is looked up once: its gradient is a sum along the places, made in order."""
        distance_R = torch.arange(1 - T, S, device=self.table.weight.device)
        score_RH = self.table(
            t5_bucket(distance_R, self.spec.num_buckets, self.spec.max_distance, self.is_bidirectional)
        )
        return rel_shift(score_RH.t()[None, :, None].expand(-1, -1, T, -1), S)


class AlibiBias(nn.Module):
    """Less for what is further away, with slopes that fall geometrically from head to head (ALiBi, section 3)."""

    slopes: Tensor
    max_distance = 0  # no two distances have the same

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.empty(num_heads), persistent=False)
        self.reset_slopes()

    def reset_slopes(self) -> None:
        """The slopes are not learned, and in no file."""
        self.slopes.copy_(torch.tensor(alibi_slopes(len(self.slopes))))

    def forward(self, T: int, S: int) -> Tensor:
        """(1, H, T, S)."""
        return (-distance_matrix(T, S, self.slopes.device).abs() * self.slopes[:, None, None])[None]


def alibi_slopes(num_heads: int) -> list[float]:
    """1/2, 1/4, ... for 8 heads; for a number that is no power of two, those of the next ones in between.

    >>> geometric(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** int(math.log2(num_heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return first + (alibi_slopes(2 * power)[0::2][: num_heads - power] if power < num_heads else [])


def make_position_bias(config: ModelConfig, is_causal: bool) -> T5BiasTable | AlibiBias | None:
    """What a stack adds to the scores of all its layers."""
    if isinstance(config.position, T5Bias):
        return T5BiasTable(config.position, config.num_heads, is_bidirectional=not is_causal)
    return AlibiBias(config.num_heads) if isinstance(config.position, ALiBi) else None


# --- score, by what asks and what is read -------------------------------------------------------------------------


def rel_shift(x_BHTR: Tensor, S: int) -> Tensor:
    """From one number per distance to one per place: [i, j] is the number of i for the distance j - i.

    The distances are -(T - 1), ..., S - 1, and there may be more of them. Rows of one number less shift each row by
    one: no gathering.
    """
    T, R = x_BHTR.shape[-2:]
    if T == 1:
        return x_BHTR[..., :S]
    flat = x_BHTR.flatten(-2)[..., T - 1 : T - 1 + T * (R - 1)]
    return flat.unflatten(-1, (T, R - 1))[..., :S]
