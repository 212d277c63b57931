"""Transformer-XL's segment-level recurrence (Dai et al. 2019, section 3.2).

A long text is processed segment by segment. Each layer keeps its input states of the last `length` positions, and the
next segment's queries attend to them as well, without gradient. Each layer thus sees one segment further back than
the layer below it.

Shapes: B rows, T positions, M cached positions, D model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.models.attention import AttentionSpec


class XLMemory:
    """The last `length` input states of each layer; of a row, those of its first `reused_length` positions (None: all).

    XLNet's rows end with a pair of segments that the next row does not continue. `stack.memory = XLMemory(512)`
    switches it on; a new object begins a new text. All positions of a row attend to all cached positions of that row.
    """

    def __init__(self, length: int, reused_length: int | None = None) -> None:
        assert length > 0
        self.length, self.reused_length = length, reused_length
        self.states: dict[int, Tensor] = {}  # layer -> (B, M, D)

    def load_state(self, states: dict[int, Tensor]) -> None:
        """Continue from these states."""
        self.states = states

    def pop_state(self) -> dict[int, Tensor]:
        """Return the cached states, and forget them."""
        states, self.states = self.states, {}
        return states

    @property
    def num_cached(self) -> int:
        """Number of cached positions, M."""
        return self.states[0].shape[1] if self.states else 0

    def extend_states(self, layer: int, x_BTD: Tensor) -> Tensor:
        """Return the cached states and `x`, (B, M + T, D), and cache the last `length` of those that are reused."""
        extended = torch.cat([self.states[layer], x_BTD], 1) if layer in self.states else x_BTD
        num_lost = 0 if self.reused_length is None else max(0, x_BTD.shape[1] - self.reused_length)
        self.states[layer] = extended[:, : extended.shape[1] - num_lost][:, -self.length :].detach()
        return extended

    def extend_spec(self, spec: AttentionSpec, T: int) -> AttentionSpec:
        """Return the spec for T queries that also see all cached positions."""
        if not self.num_cached:
            return spec
        if spec.is_causal:
            lower = torch.ones(T, T, dtype=torch.bool, device=self.states[0].device).tril()
            spec = spec._replace(is_causal=False, mask=lower[None, None])
        if spec.mask is None:
            return spec
        return spec._replace(mask=F.pad(spec.mask, (self.num_cached, 0), value=True), key_range=None)
