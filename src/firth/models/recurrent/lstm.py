"""The base of all recurrent stacks: unpack rows into documents, run LSTMs over them, carry their state.

A packed row holds several documents. Attention separates them by a mask; an LSTM cannot. So rows are unpacked into one
padded sequence per document, run, and repacked. In a stream (`order="stream"`) a row is one span of a long text, and
the final state of step s is the initial state of step s + 1 (`RecurrentState`).

B rows, T positions, N documents, L positions of the longest document, D width, H LSTM units, P projected size.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from firth.models.backbone import Stack
from firth.models.config import BiLSTMConfig, ModelConfig
from firth.models.kernels.dropout import Dropout, fast_dropout
from firth.models.position.xl_memory import XLMemory

LSTMState = tuple[Tensor, Tensor]  # h (N, P) and c (N, H)
# DropConnect makes a new weight tensor in every step, which is not in cuDNN's flat buffer; oneDNN has no projections.
for about in ("RNN module weights are not part of single contiguous chunk", "LSTM with projections is not supported"):
    warnings.filterwarnings("ignore", message=about)


class UnpackedDocuments(NamedTuple):
    """The documents of packed rows, one sequence each, and the indices there and back."""

    lengths: Tensor  # (N,)
    mask: Tensor  # (N, L) False at padding
    row_index: Tensor | None = None  # (N, L) index into the flattened rows; None: one document per row
    document_index: Tensor | None = None  # (B, T) index into the flattened documents
    row_mask: Tensor | None = None  # (B, T) False at padding

    def unpack(self, x_BTD: Tensor) -> Tensor:
        """Return (N, L, D): one sequence per document."""
        return x_BTD if self.row_index is None else x_BTD.flatten(0, 1)[self.row_index]

    def repack(self, x_NLD: Tensor) -> Tensor:
        """Return (B, T, D): packed rows again, zeros at padding."""
        if self.document_index is None or self.row_mask is None:
            return x_NLD
        return x_NLD.flatten(0, 1)[self.document_index] * self.row_mask[..., None]

    def reverse(self, x_NLD: Tensor) -> Tensor:
        """Return each document reversed, padding left where it is; its own inverse."""
        if self.row_index is None:
            return x_NLD.flip(1)
        position_L = torch.arange(x_NLD.shape[1], device=x_NLD.device)
        from_NL = torch.where(self.mask, self.lengths[:, None] - 1 - position_L, position_L)
        return x_NLD.gather(1, from_NL[..., None].expand_as(x_NLD))


def unpack_documents(x_BTD: Tensor, document_ids_BT: Tensor | None, one_per_row: bool = False) -> UnpackedDocuments:
    """Return the documents of packed rows; `one_per_row` takes each row as one, whatever its `document_ids`."""
    B, T, _ = x_BTD.shape
    if one_per_row or document_ids_BT is None:
        mask_BT = x_BTD.new_ones((B, T), dtype=torch.bool) if document_ids_BT is None else document_ids_BT >= 0
        return UnpackedDocuments(torch.full((B,), T, device=x_BTD.device), mask_BT)
    new_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    new_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    first_R = new_BT.flatten().nonzero()[:, 0]
    size_R = torch.diff(first_R, append=first_R.new_tensor([B * T]))
    kept_R = document_ids_BT.flatten()[first_R] >= 0
    if not bool(kept_R.any()):
        kept_R[0] = True  # rows of padding alone: an LSTM needs at least one sequence
    run_BT = new_BT.flatten().cumsum(0).view(B, T) - 1
    first_N, size_N = first_R[kept_R], size_R[kept_R]
    position_L = torch.arange(int(size_N.max()), device=x_BTD.device)
    position_BT = torch.arange(B * T, device=x_BTD.device).view(B, T) - first_R[run_BT]
    kept_BT = kept_R[run_BT]
    number_R = kept_R.long().cumsum(0) - 1
    return UnpackedDocuments(
        size_N,
        position_L < size_N[:, None],
        first_N[:, None] + torch.minimum(position_L, size_N[:, None] - 1),
        torch.where(kept_BT, number_R[run_BT] * len(position_L) + position_BT, 0),
        kept_BT,
    )


def locked_dropout(x_NLD: Tensor, rate: float) -> Tensor:
    """Dropout with one mask for all positions of a document (variational dropout, Gal & Ghahramani 2016)."""
    return x_NLD if rate == 0 else x_NLD * fast_dropout(x_NLD.new_ones((len(x_NLD), 1, x_NLD.shape[2])), rate)


def run_lstm(
    lstm: nn.LSTM, x_NLD: Tensor, state: LSTMState | None = None, weight_hh: Tensor | None = None, bptt: int = 0
) -> tuple[Tensor, LSTMState]:
    """Run one LSTM layer; return its outputs (N, L, P) and its final state.

    `weight_hh` replaces the weights from state to state (DropConnect). Gradients are truncated every `bptt` positions,
    while the state continues; 0 disables truncation.
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


class RecurrentState(XLMemory):
    """The final state of each layer, h and c concatenated.

    It is kept only between `load_state` and `pop_state`, for streams that continue from step to step; then each row is
    one document.
    """

    is_carrying = False

    def __init__(self) -> None:
        super().__init__(1)

    def load_state(self, states: dict[int, Tensor]) -> None:
        self.states, self.is_carrying = states, True

    def pop_state(self) -> dict[int, Tensor]:
        states, self.states, self.is_carrying = self.states, {}, False
        return states

    def layer_state(self, layer: int, hidden_size: int) -> LSTMState | None:
        """Return the initial (h, c) of a layer; None for zeros."""
        if layer not in self.states:
            return None
        both = self.states[layer]
        return both[:, :-hidden_size].contiguous(), both[:, -hidden_size:].contiguous()

    def store_layer_state(self, layer: int, state: LSTMState) -> None:
        if self.is_carrying:
            self.states[layer] = torch.cat(state, -1).detach()


class RecurrentStack(Stack):
    """A stack whose blocks are LSTMs. It separates the documents of a row and supports no other attention mask."""

    def __init__(self, config: ModelConfig, blocks: Sequence[nn.Module]) -> None:
        nn.Module.__init__(self)
        self.config, self.num_layers = config, len(blocks)
        self.blocks = nn.ModuleList(blocks)
        self.recurrent_state = self.memory = RecurrentState()

    def can_compute_targets_only(self, target_positions: Tensor, T: int) -> bool:
        return False

    def unpack_documents(self, x_BTD: Tensor, document_ids: Tensor | None) -> UnpackedDocuments:
        return unpack_documents(x_BTD, document_ids, one_per_row=self.recurrent_state.is_carrying)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        document_ids: Tensor | None,
        attention_rank: Tensor | None = None,
        all_hidden_states: list[Tensor] | None = None,
        **others: Tensor | None,
    ) -> Tensor:
        assert attention_rank is None, "an LSTM has no attention mask: the recipe refuses such objectives"
        return self.run_documents(
            x, self.unpack_documents(x, document_ids), all_hidden_states if all_hidden_states is not None else []
        )

    def run_documents(self, x: Tensor, documents: UnpackedDocuments, all_hidden_states: list[Tensor]) -> Tensor:
        """Return the last hidden states; append the input and the states of every layer to `all_hidden_states`."""
        raise NotImplementedError


class BiLSTMStack(RecurrentStack):
    """biLSTM layers: each runs in both directions; their outputs are concatenated."""

    def __init__(self, config: ModelConfig, num_layers: int, dim: int, hidden_size: int, dropout: float) -> None:
        widths = [dim] + [2 * hidden_size] * (num_layers - 1)
        super().__init__(config, [BiLSTMLayer(width, hidden_size) for width in widths])
        self.drop = Dropout(dropout)

    def run_documents(self, x: Tensor, documents: UnpackedDocuments, all_hidden_states: list[Tensor]) -> Tensor:
        all_hidden_states.append(x)
        for block in self.blocks:
            x = documents.repack(block(self.drop(documents.unpack(x)), documents))
            all_hidden_states.append(x)
        return x


class BiLSTMLayer(nn.Module):
    """A forward and a backward LSTM."""

    def __init__(self, dim: int, hidden_size: int) -> None:
        super().__init__()
        self.forward_lstm, self.backward_lstm = (nn.LSTM(dim, hidden_size, batch_first=True) for _ in range(2))

    def forward(self, x_NLD: Tensor, documents: UnpackedDocuments) -> Tensor:
        forward_NLH, _ = run_lstm(self.forward_lstm, x_NLD)
        backward_NLH, _ = run_lstm(self.backward_lstm, documents.reverse(x_NLD))
        return torch.cat([forward_NLH, documents.reverse(backward_NLH)], -1)


def make_bilstm_stack(config: ModelConfig) -> BiLSTMStack:
    """Return the backbone of a biLSTM encoder."""
    assert isinstance(config.recurrent, BiLSTMConfig)
    return BiLSTMStack(config, config.num_layers, config.dim, config.recurrent.hidden_size, config.dropout)
