"""An encoder-decoder of LSTMs, with attention or without (Sutskever et al. 2014, Bahdanau et al. 2015).

B rows, T places of the text, U of the answer, N texts, S places of the longest text, L of the longest answer, H units.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firth.models.config import ModelConfig, Seq2Seq
from firth.models.dropout import Dropout
from firth.models.recurrent.lstm import Recurrence, State, Texts, TwoWays, read_on


class Reader(TwoWays):
    """Reads the text both ways: (B, T, 2H)."""

    def __init__(self, config: ModelConfig) -> None:
        assert isinstance(config.recurrent, Seq2Seq)
        super().__init__(config, config.num_layers, config.dim, config.recurrent.hidden, config.dropout)


class Writer(Recurrence):
    """Writes the answer of each text, from what its reader has ended with, and with a look at all of it."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.recurrent
        assert isinstance(spec, Seq2Seq)
        super().__init__(config, [Layer(config, spec, first=i == 0) for i in range(config.decoder_layers)])
        self.drop = Dropout(config.dropout)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        doc: Tensor | None,
        rank: Tensor | None = None,
        read: Tensor | None = None,
        read_doc: Tensor | None = None,
        states: list[Tensor] | None = None,
        asking: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        assert read is not None
        assert asking is None, "each text has one that reads it"
        found = states if states is not None else []
        found.append(x)
        texts = self.texts(x, doc)
        source = Source(read, read_doc, x, doc, texts)
        y = texts.apart(x)
        for layer in self.blocks:
            y = layer(self.drop(y), source)
            found.append(texts.together(y))
        return self.drop(found[-1])


class Source:
    """What the reader has made of the text of each answer."""

    def __init__(
        self, read_BTR: Tensor, read_doc: Tensor | None, x_BUD: Tensor, doc: Tensor | None, answers: Texts
    ) -> None:
        B, T, _ = read_BTR.shape
        read_doc = read_BTR.new_zeros((B, T), dtype=torch.long) if read_doc is None else read_doc
        doc = x_BUD.new_zeros(x_BUD.shape[:2], dtype=torch.long) if doc is None else doc
        row_N = torch.arange(B, device=read_BTR.device)
        doc_N = doc[:, 0]
        if answers.places is not None:
            row_N, doc_N = answers.places[:, 0] // x_BUD.shape[1], doc.flatten()[answers.places[:, 0]]
        self.states_NTR = read_BTR[row_N]
        self.seen_NT = (read_doc[row_N] == doc_N[:, None]) & (doc_N >= 0)[:, None]

    def ends(self) -> Tensor:
        """(N, 2H): the last state of the way forward, and that of the way back, which stands at the first place."""
        place_T = torch.arange(self.seen_NT.shape[1], device=self.seen_NT.device)
        last_N = (self.seen_NT * place_T).argmax(1)
        first_N = self.seen_NT.long().argmax(1)
        row_N = torch.arange(len(last_N), device=last_N.device)
        there, back = self.states_NTR.chunk(2, -1)
        return torch.cat([there[row_N, last_N], back[row_N, first_N]], -1)


class Layer(nn.Module):
    """One LSTM of the writer. The first looks at the text at every step, where there is attention."""

    def __init__(self, config: ModelConfig, spec: Seq2Seq, first: bool) -> None:
        super().__init__()
        looks = spec.attention and first
        self.start_h, self.start_c = (nn.Linear(2 * spec.hidden, config.dim) for _ in range(2))
        self.lstm = nn.LSTM(config.dim + (2 * spec.hidden if looks else 0), config.dim, batch_first=True)
        self.look = Look(config.dim, 2 * spec.hidden) if looks else None

    def forward(self, x_NLD: Tensor, source: Source) -> Tensor:
        ends = source.ends()
        state = self.start_h(ends).tanh(), self.start_c(ends).tanh()
        if self.look is None:
            return read_on(self.lstm, x_NLD, state)[0]
        return self.step_by_step(self.look, x_NLD, state, source)

    def step_by_step(self, look: Look, x_NLD: Tensor, state: State, source: Source) -> Tensor:
        """Each step reads one token and what the state before it looks at."""
        keys_NTA, found = look.keys(source.states_NTR), []
        for x_ND in x_NLD.unbind(1):
            read_NR = look(state[0], keys_NTA, source)
            y_N1D, state = read_on(self.lstm, torch.cat([x_ND, read_NR], -1)[:, None], state)
            found.append(y_N1D)
        return torch.cat(found, 1)


class Look(nn.Module):
    """Attention by a small network: v . tanh(W state + U read), a softmax over the text."""

    def __init__(self, state: int, read: int) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(state, state), nn.Linear(read, state, bias=False)
        self.score = nn.Linear(state, 1, bias=False)

    def forward(self, state_ND: Tensor, keys_NTA: Tensor, source: Source) -> Tensor:
        """(N, R): the mean of what is looked at."""
        return (self.weights(state_ND, keys_NTA, source)[:, None] @ source.states_NTR)[:, 0]

    def weights(self, state_ND: Tensor, keys_NTA: Tensor, source: Source) -> Tensor:
        score_NT = self.score((self.query(state_ND)[:, None] + keys_NTA).tanh())[..., 0]
        return score_NT.float().masked_fill(~source.seen_NT, -1e9).softmax(-1).to(keys_NTA.dtype)
