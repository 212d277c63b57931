"""AWD-LSTM: a language model of regularised LSTMs (Merity et al. 2018), the body of ULMFiT.

B rows, T places, N texts, L places of the longest text, D width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from firth.models.config import AWDLSTM, ModelConfig
from firth.models.dropout import drop
from firth.models.recurrent.lstm import Recurrence, Texts, locked, read_on


class AWDStack(Recurrence):
    """LSTM layers, the last as wide as the token vectors. In training all kinds of dropout, and what states cost."""

    cost: Tensor | None = None  # of the states of the last call in training: a sum over tokens

    def __init__(self, config: ModelConfig) -> None:
        spec = config.recurrent
        assert isinstance(spec, AWDLSTM)
        widths = [config.dim, *[spec.hidden] * (config.num_layers - 1), config.dim]
        super().__init__(config, [nn.LSTM(a, b, batch_first=True) for a, b in pairwise(widths)])
        self.spec = spec

    def read_texts(self, x: Tensor, texts: Texts, found: list[Tensor]) -> Tensor:
        spec, last = self.spec, self.num_layers - 1
        found.append(x)
        y = self.locked(texts.apart(x), spec.input_drop)
        for i, lstm in enumerate(cast(list[nn.LSTM], list(self.blocks))):
            weight = drop(cast(Tensor, lstm.weight_hh_l0), spec.weight_drop) if self.training else None
            begin = self.carried.state(i, lstm.hidden_size)
            read, end = read_on(lstm, y, begin, weight, spec.bptt if self.training else 0)
            self.carried.leave(i, end)
            y = self.locked(read, spec.output_drop if i == last else spec.hidden_drop)
            found.append(texts.together(y if i == last else read))
        self.cost = self.cost_of(read, y, texts) if self.training else None
        return found[-1]

    def locked(self, x_NLD: Tensor, rate: float) -> Tensor:
        return locked(x_NLD, rate) if self.training else x_NLD

    def cost_of(self, read_NLD: Tensor, dropped_NLD: Tensor, texts: Texts) -> Tensor | None:
        """What large states, after dropout, and large steps from place to place, before it, cost: mean over D, sum."""
        if not self.spec.activity and not self.spec.slowness:
            return None
        large = (dropped_NLD.float().square().mean(-1) * texts.real).sum()
        step_NLD = (read_NLD[:, 1:] - read_NLD[:, :-1]).float()
        steep = (step_NLD.square().mean(-1) * texts.real[:, 1:]).sum()
        return self.spec.activity * large + self.spec.slowness * steep

    def with_cost(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parts of a loss with what the states cost, which is a mean over tokens."""
        if self.cost is None:
            return parts
        cost, self.cost = self.cost, None
        return {**parts, "tokens": parts["tokens"] + cost if "tokens" in parts else cost}
