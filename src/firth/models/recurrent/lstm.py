"""What all recurrent stacks share: the texts of packed rows one by one, LSTMs over them, and what is carried on.

B rows, T places, N texts, L places of the longest text, D width, H units of an LSTM, P numbers they are projected to.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from firth.models.config import BiLSTM, ModelConfig
from firth.models.dropout import Dropout, drop
from firth.models.memory import Memory
from firth.models.stack import Stack

State = tuple[Tensor, Tensor]  # h (N, P) and c (N, H)
# Weights with some of them dropped are new in every step, and lie where they lie; oneDNN has no projections.
for about in ("RNN module weights are not part of single contiguous chunk", "LSTM with projections is not supported"):
    warnings.filterwarnings("ignore", message=about)


class Texts(NamedTuple):
    """The texts of some rows, each from its own first place on: an LSTM knows no sight that could keep them apart."""

    size: Tensor  # (N,)
    real: Tensor  # (N, L) where there is text
    places: Tensor | None = None  # (N, L) those in the rows laid end to end; None where each row is one text
    back: Tensor | None = None  # (B, T) and the way back
    kept: Tensor | None = None  # (B, T) padding has no text

    def apart(self, x_BTD: Tensor) -> Tensor:
        """(N, L, D): text by text."""
        return x_BTD if self.places is None else x_BTD.flatten(0, 1)[self.places]

    def together(self, x_NLD: Tensor) -> Tensor:
        """(B, T, D): in rows again, zeros where there is no text."""
        if self.back is None or self.kept is None:
            return x_NLD
        return x_NLD.flatten(0, 1)[self.back] * self.kept[..., None]

    def flip(self, x_NLD: Tensor) -> Tensor:
        """Each text from its end to its begin; twice, and it is as it was."""
        if self.places is None:
            return x_NLD.flip(1)
        place_L = torch.arange(x_NLD.shape[1], device=x_NLD.device)
        from_NL = torch.where(self.real, self.size[:, None] - 1 - place_L, place_L)
        return x_NLD.gather(1, from_NL[..., None].expand_as(x_NLD))


def texts_of(x_BTD: Tensor, doc_BT: Tensor | None, whole: bool = False) -> Texts:
    """The texts of rows; `whole` says that each row is one, whatever `doc` says."""
    B, T, _ = x_BTD.shape
    if whole or doc_BT is None:
        real_BT = x_BTD.new_ones((B, T), dtype=torch.bool) if doc_BT is None else doc_BT >= 0
        return Texts(torch.full((B,), T, device=x_BTD.device), real_BT)
    new_BT = torch.ones_like(doc_BT, dtype=torch.bool)
    new_BT[:, 1:] = doc_BT[:, 1:] != doc_BT[:, :-1]
    first_R = new_BT.flatten().nonzero()[:, 0]
    size_R = torch.diff(first_R, append=first_R.new_tensor([B * T]))
    kept_R = doc_BT.flatten()[first_R] >= 0
    if not bool(kept_R.any()):
        kept_R[0] = True  # rows of nothing but padding: something must be read
    run_BT = new_BT.flatten().cumsum(0).view(B, T) - 1
    first_N, size_N = first_R[kept_R], size_R[kept_R]
    place_L = torch.arange(int(size_N.max()), device=x_BTD.device)
    place_BT = torch.arange(B * T, device=x_BTD.device).view(B, T) - first_R[run_BT]
    kept_BT = kept_R[run_BT]
    number_R = kept_R.long().cumsum(0) - 1
    return Texts(
        size_N,
        place_L < size_N[:, None],
        first_N[:, None] + torch.minimum(place_L, size_N[:, None] - 1),
        torch.where(kept_BT, number_R[run_BT] * len(place_L) + place_BT, 0),
        kept_BT,
    )


def locked(x_NLD: Tensor, rate: float) -> Tensor:
    """Dropout that takes the same numbers away at all places of a text (Gal & Ghahramani 2016)."""
    return x_NLD if rate == 0 else x_NLD * drop(x_NLD.new_ones((len(x_NLD), 1, x_NLD.shape[2])), rate)


def read_on(
    lstm: nn.LSTM, x_NLD: Tensor, state: State | None = None, weight_hh: Tensor | None = None, bptt: int = 0
) -> tuple[Tensor, State]:
    """Run one LSTM layer from a state, with another matrix from state to state where that is given.

    States of earlier than `bptt` places before count, and are not learned from; 0 learns from all.
    """
    if state is None:
        h, c = (x_NLD.new_zeros(len(x_NLD), n) for n in (lstm.proj_size or lstm.hidden_size, lstm.hidden_size))
    else:
        h, c = state
    own = cast(list[Tensor], lstm._flat_weights)
    weights = [w if w is not lstm.weight_hh_l0 or weight_hh is None else weight_hh for w in own]
    pieces: list[Tensor] = []
    for piece in x_NLD.split(bptt or x_NLD.shape[1], 1):
        if pieces:
            h, c = h.detach(), c.detach()
        y, h, c = torch.lstm(piece, (h[None], c[None]), weights, True, 1, 0.0, lstm.training, False, True)
        h, c = h[0], c[0]
        pieces.append(y)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1), (h, c)


class Carried(Memory):
    """The states in which a stack ends its rows: those of each layer, h and c side by side.

    They are kept only between `take_up` and `hand_on`, while rows go on from step to step; each row is one text then.
    """

    carrying = False

    def __init__(self) -> None:
        super().__init__(1)

    def take_up(self, states: dict[int, Tensor]) -> None:
        self.states, self.carrying = states, True

    def hand_on(self) -> dict[int, Tensor]:
        states, self.states, self.carrying = self.states, {}, False
        return states

    def state(self, layer: int, units: int) -> State | None:
        """In which a layer begins."""
        if layer not in self.states:
            return None
        both = self.states[layer]
        return both[:, :-units].contiguous(), both[:, -units:].contiguous()

    def leave(self, layer: int, state: State) -> None:
        if self.carrying:
            self.states[layer] = torch.cat(state, -1).detach()


class Recurrence(Stack):
    """A stack whose blocks are LSTMs. It knows the texts of a row, and no other sight."""

    def __init__(self, config: ModelConfig, blocks: Sequence[nn.Module]) -> None:
        nn.Module.__init__(self)
        self.config, self.num_layers = config, len(blocks)
        self.blocks = nn.ModuleList(blocks)
        self.carried = self.memory = Carried()

    def texts(self, x_BTD: Tensor, doc: Tensor | None) -> Texts:
        return texts_of(x_BTD, doc, whole=self.carried.carrying)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        doc: Tensor | None,
        rank: Tensor | None = None,
        states: list[Tensor] | None = None,
        **others: Tensor | None,
    ) -> Tensor:
        assert rank is None, "a recipe refuses what an LSTM cannot see"
        return self.read_texts(x, self.texts(x, doc), states if states is not None else [])

    def read_texts(self, x: Tensor, texts: Texts, found: list[Tensor]) -> Tensor:
        """The last states. What is read, and then the states of every layer, are added to `found`."""
        raise NotImplementedError


class TwoWays(Recurrence):
    """biLSTM layers: each reads its text both ways, and hands both on side by side."""

    def __init__(self, config: ModelConfig, num_layers: int, dim: int, hidden: int, dropout: float) -> None:
        widths = [dim] + [2 * hidden] * (num_layers - 1)
        super().__init__(config, [EachWay(width, hidden) for width in widths])
        self.drop = Dropout(dropout)

    def read_texts(self, x: Tensor, texts: Texts, found: list[Tensor]) -> Tensor:
        found.append(x)
        for block in self.blocks:
            x = texts.together(block(self.drop(texts.apart(x)), texts))
            found.append(x)
        return x


class EachWay(nn.Module):
    """One layer of two LSTMs."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.there, self.back = (nn.LSTM(dim, hidden, batch_first=True) for _ in range(2))

    def forward(self, x_NLD: Tensor, texts: Texts) -> Tensor:
        there_NLH, _ = read_on(self.there, x_NLD)
        back_NLH, _ = read_on(self.back, texts.flip(x_NLD))
        return torch.cat([there_NLH, texts.flip(back_NLH)], -1)


def bilstm(config: ModelConfig) -> TwoWays:
    """The body of a biLSTM."""
    assert isinstance(config.recurrent, BiLSTM)
    return TwoWays(config, config.num_layers, config.dim, config.recurrent.hidden, config.dropout)
