"""An encoder-decoder of LSTMs, with attention or without (Sutskever et al. 2014, Bahdanau et al. 2015).

B rows, T positions of the text, U of the answer, N texts, S positions of the longest text, L of the longest answer,
H units.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firth.models.config import ModelConfig, Seq2SeqConfig
from firth.models.kernels.dropout import Dropout
from firth.models.recurrent.lstm import BiLSTMStack, LSTMState, RecurrentStack, UnpackedDocuments, run_lstm


class Seq2SeqEncoder(BiLSTMStack):
    """Bidirectional LSTM encoder: (B, T, 2H)."""

    def __init__(self, config: ModelConfig) -> None:
        assert isinstance(config.recurrent, Seq2SeqConfig)
        super().__init__(config, config.num_layers, config.dim, config.recurrent.hidden_size, config.dropout)


class Seq2SeqDecoder(RecurrentStack):
    """LSTM decoder that starts with the encoder's final state and attends to all of its states."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.recurrent
        assert isinstance(spec, Seq2SeqConfig)
        super().__init__(
            config, [Seq2SeqDecoderLayer(config, spec, first=i == 0) for i in range(config.decoder_layers)]
        )
        self.drop = Dropout(config.dropout)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        document_ids: Tensor | None,
        attention_rank: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_document_ids: Tensor | None = None,
        all_hidden_states: list[Tensor] | None = None,
        cross_document_ids: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        assert encoder_hidden_states is not None
        assert cross_document_ids is None, "each text has one that reads it"
        hidden_states = all_hidden_states if all_hidden_states is not None else []
        hidden_states.append(x)
        texts = self.unpack_documents(x, document_ids)
        source = EncoderStates(encoder_hidden_states, encoder_document_ids, x, document_ids, texts)
        y = texts.unpack(x)
        for layer in self.blocks:
            y = layer(self.drop(y), source)
            hidden_states.append(texts.repack(y))
        return self.drop(hidden_states[-1])


class EncoderStates:
    """The encoder's states of the source document of each target document."""

    def __init__(
        self,
        encoder_hidden_BTR: Tensor,
        encoder_document_ids: Tensor | None,
        x_BUD: Tensor,
        document_ids: Tensor | None,
        decoder_documents: UnpackedDocuments,
    ) -> None:
        B, T, _ = encoder_hidden_BTR.shape
        encoder_document_ids = (
            encoder_hidden_BTR.new_zeros((B, T), dtype=torch.long)
            if encoder_document_ids is None
            else encoder_document_ids
        )
        document_ids = x_BUD.new_zeros(x_BUD.shape[:2], dtype=torch.long) if document_ids is None else document_ids
        row_N = torch.arange(B, device=encoder_hidden_BTR.device)
        doc_N = document_ids[:, 0]
        if decoder_documents.row_index is not None:
            row_N = decoder_documents.row_index[:, 0] // x_BUD.shape[1]
            doc_N = document_ids.flatten()[decoder_documents.row_index[:, 0]]
        self.states_NTR = encoder_hidden_BTR[row_N]
        self.mask_NT = (encoder_document_ids[row_N] == doc_N[:, None]) & (doc_N >= 0)[:, None]

    def final_states(self) -> Tensor:
        """Return (N, 2H): the final forward state, and the final backward state, which is at position 0."""
        place_T = torch.arange(self.mask_NT.shape[1], device=self.mask_NT.device)
        last_N = (self.mask_NT * place_T).argmax(1)
        first_N = self.mask_NT.long().argmax(1)
        row_N = torch.arange(len(last_N), device=last_N.device)
        there, back = self.states_NTR.chunk(2, -1)
        return torch.cat([there[row_N, last_N], back[row_N, first_N]], -1)


class Seq2SeqDecoderLayer(nn.Module):
    """One LSTM layer of the decoder. The first attends to the source at every step, with `attention`."""

    def __init__(self, config: ModelConfig, spec: Seq2SeqConfig, first: bool) -> None:
        super().__init__()
        looks = spec.attention and first
        self.start_h, self.start_c = (nn.Linear(2 * spec.hidden_size, config.dim) for _ in range(2))
        self.lstm = nn.LSTM(config.dim + (2 * spec.hidden_size if looks else 0), config.dim, batch_first=True)
        self.attention = BahdanauAttention(config.dim, 2 * spec.hidden_size) if looks else None

    def forward(self, x_NLD: Tensor, source: EncoderStates) -> Tensor:
        ends = source.final_states()
        state = self.start_h(ends).tanh(), self.start_c(ends).tanh()
        if self.attention is None:
            return run_lstm(self.lstm, x_NLD, state)[0]
        return self.run_with_attention(self.attention, x_NLD, state, source)

    def run_with_attention(
        self, attention: BahdanauAttention, x_NLD: Tensor, state: LSTMState, source: EncoderStates
    ) -> Tensor:
        """Run step by step: each reads a token and the context vector of the previous state."""
        keys_NTA, outputs = attention.keys(source.states_NTR), []
        for x_ND in x_NLD.unbind(1):
            context_NR = attention(state[0], keys_NTA, source)
            y_N1D, state = run_lstm(self.lstm, torch.cat([x_ND, context_NR], -1)[:, None], state)
            outputs.append(y_N1D)
        return torch.cat(outputs, 1)


class BahdanauAttention(nn.Module):
    """Additive attention: softmax over v . tanh(W state + U source) (Bahdanau et al. 2015)."""

    def __init__(self, query_dim: int, key_dim: int) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(query_dim, query_dim), nn.Linear(key_dim, query_dim, bias=False)
        self.score = nn.Linear(query_dim, 1, bias=False)

    def forward(self, state_ND: Tensor, keys_NTA: Tensor, source: EncoderStates) -> Tensor:
        """Return the context vectors (N, R)."""
        return (self.weights(state_ND, keys_NTA, source)[:, None] @ source.states_NTR)[:, 0]

    def weights(self, state_ND: Tensor, keys_NTA: Tensor, source: EncoderStates) -> Tensor:
        score_NT = self.score((self.query(state_ND)[:, None] + keys_NTA).tanh())[..., 0]
        return score_NT.float().masked_fill(~source.mask_NT, -1e9).softmax(-1).to(keys_NTA.dtype)
