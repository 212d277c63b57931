"""AWD-LSTM: an LSTM language model with five kinds of dropout (Merity et al. 2018), the backbone of ULMFiT.

LSTMs overfit small corpora, and ordinary dropout on the recurrent state destroys their memory. AWD-LSTM regularises:

- the weights from state to state, by one mask per pass (DropConnect, section 2): `weight_drop`;
- whole words, at all positions of a text (section 4.3): `word_drop`;
- input, hidden and output states, by one mask for all positions of a text (section 4.2): `locked_dropout`;
- large states (AR) and large changes between positions (TAR) by an L2 penalty (section 4.6).

Gradients are truncated after `bptt` positions; the state itself is carried on.

B rows, T positions, N documents, L positions of the longest document, D width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from firth.models.config import AWDLSTMConfig, ModelConfig
from firth.models.kernels.dropout import fast_dropout
from firth.models.recurrent.lstm import RecurrentStack, UnpackedDocuments, locked_dropout, run_lstm


class AWDLSTMStack(RecurrentStack):
    """LSTM layers, the last as wide as the token embeddings, with all kinds of dropout and the AR and TAR penalties."""

    regularization: Tensor | None = None  # AR and TAR of the last training call, summed over tokens

    def __init__(self, config: ModelConfig) -> None:
        spec = config.recurrent
        assert isinstance(spec, AWDLSTMConfig)
        widths = [config.dim, *[spec.hidden_size] * (config.num_layers - 1), config.dim]
        super().__init__(config, [nn.LSTM(a, b, batch_first=True) for a, b in pairwise(widths)])
        self.spec = spec

    def run_documents(self, x: Tensor, documents: UnpackedDocuments, all_hidden_states: list[Tensor]) -> Tensor:
        spec, last = self.spec, self.num_layers - 1
        all_hidden_states.append(x)
        y = self.apply_locked_dropout(documents.unpack(x), spec.input_drop)
        for i, lstm in enumerate(cast(list[nn.LSTM], list(self.blocks))):
            weight = fast_dropout(cast(Tensor, lstm.weight_hh_l0), spec.weight_drop) if self.training else None
            begin = self.recurrent_state.layer_state(i, lstm.hidden_size)
            read, end = run_lstm(lstm, y, begin, weight, spec.bptt if self.training else 0)
            self.recurrent_state.store_layer_state(i, end)
            y = self.apply_locked_dropout(read, spec.output_drop if i == last else spec.hidden_drop)
            all_hidden_states.append(documents.repack(y if i == last else read))
        self.regularization = self.regularization_loss(read, y, documents) if self.training else None
        return all_hidden_states[-1]

    def apply_locked_dropout(self, x_NLD: Tensor, rate: float) -> Tensor:
        return locked_dropout(x_NLD, rate) if self.training else x_NLD

    def regularization_loss(
        self, hidden_NLD: Tensor, dropped_NLD: Tensor, documents: UnpackedDocuments
    ) -> Tensor | None:
        """Return weighted AR (states after dropout) + TAR (their changes, before dropout), summed over tokens."""
        if not self.spec.activation_reg and not self.spec.temporal_activation_reg:
            return None
        ar = (dropped_NLD.float().square().mean(-1) * documents.mask).sum()
        step_NLD = (hidden_NLD[:, 1:] - hidden_NLD[:, :-1]).float()
        tar = (step_NLD.square().mean(-1) * documents.mask[:, 1:]).sum()
        return self.spec.activation_reg * ar + self.spec.temporal_activation_reg * tar

    def add_regularization(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of the loss with the penalty added to `tokens`, whose count divides it."""
        if self.regularization is None:
            return losses
        cost, self.regularization = self.regularization, None
        return {**losses, "tokens": losses["tokens"] + cost if "tokens" in losses else cost}
