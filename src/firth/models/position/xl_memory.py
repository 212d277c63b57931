"""What a stack remembers of the text before (Transformer-XL, section 3.2).

B rows, T places, M remembered places, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.models.attention import AttentionSpec


class XLMemory:
    """The states that each layer has read last, `length` of them: read again with the next text, and not learned from.

    Give a stack one (`stack.memory = Memory(512)`) to read a long text piece by piece, row by row; a new one begins a
    new text. All of a row see all that is remembered of it.
    """

    def __init__(self, length: int) -> None:
        assert length > 0
        self.length = length
        self.states: dict[int, Tensor] = {}  # of a layer: (B, M, D)

    def load_state(self, states: dict[int, Tensor]) -> None:
        """Begin with these."""
        self.states = states

    def pop_state(self) -> dict[int, Tensor]:
        """Give what is remembered away."""
        states, self.states = self.states, {}
        return states

    @property
    def num_cached(self) -> int:
        """How many places are remembered."""
        return self.states[0].shape[1] if self.states else 0

    def extend_states(self, layer: int, x_BTD: Tensor) -> Tensor:
        """(B, M + T, D): what a layer reads now; the last of it is what it remembers then."""
        whole = torch.cat([self.states[layer], x_BTD], 1) if layer in self.states else x_BTD
        self.states[layer] = whole[:, -self.length :].detach()
        return whole

    def extend_spec(self, spec: AttentionSpec, T: int) -> AttentionSpec:
        """A sight of T places that sees what is remembered too."""
        if not self.num_cached:
            return spec
        if spec.is_causal:
            lower = torch.ones(T, T, dtype=torch.bool, device=self.states[0].device).tril()
            spec = spec._replace(is_causal=False, mask=lower[None, None])
        if spec.mask is None:
            return spec
        return spec._replace(mask=F.pad(spec.mask, (self.num_cached, 0), value=True), key_range=None)
