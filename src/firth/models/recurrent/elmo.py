"""ELMo: word vectors from a character CNN and a bidirectional language model (Peters et al. 2018).

1. Characters -> word: a CNN with filters of several widths, max over the characters, highway layers, a projection
   (Kim et al. 2016; Jozefowicz et al. 2016). No word is unknown.
2. Two stacks of LSTMs, one per direction, that never meet: the forward one predicts the next word, the backward one
   the previous. Cells and projections are clipped, and from the second layer on there is a residual connection.
3. A task mixes the states of all layers with trained weights (`ScalarMix`, section 3.2).

A large vocabulary makes the softmax expensive; training samples it (`LMHead.num_sampled`).

B rows, T positions, N documents, L positions of the longest document, W distinct words, C characters of a word,
P projected size, H LSTM units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.models.config import ELMoConfig, ModelConfig
from firth.models.kernels.dropout import Dropout
from firth.models.recurrent.clipped import clipped_lstm
from firth.models.recurrent.lstm import LSTMState, RecurrentStack, UnpackedDocuments, run_lstm
from firth.tokens.characters import NUM_CHAR_IDS
from firth.tokens.lexicon import WordCharTable

if TYPE_CHECKING:
    from firth.tokens import Tokenizer

HIGHWAY_GATE_BIAS = -2.0  # initial bias: a highway starts close to the identity


class Highway(nn.Module):
    """y = g * relu(W x) + (1 - g) * x with a gate g = sigmoid(V x) (Srivastava et al. 2015)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.new, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        nn.init.constant_(self.gate.bias, HIGHWAY_GATE_BIAS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(x).sigmoid() * (self.new(x).relu() - x)


class CharCNNEmbedding(nn.Module):
    """Character CNN: words -> vectors. `tokens` embeds characters; a word's id is only an index to its spelling."""

    offset = 0  # no position embeddings

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.recurrent
        assert isinstance(spec, ELMoConfig)
        self.tokens = nn.Embedding(NUM_CHAR_IDS, spec.char_dim)
        self.filters = nn.ModuleList(nn.Conv1d(spec.char_dim, num, width) for width, num in spec.filters)
        num_features = sum(num for _, num in spec.filters)
        self.highways = nn.Sequential(*(Highway(num_features) for _ in range(spec.num_highways)))
        self.project = nn.Linear(num_features, spec.proj_size)
        self.lexicon: WordCharTable | None = None

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Use the spellings of this tokenizer's words."""
        self.lexicon = WordCharTable(tokenizer)

    def widen(self, x: Tensor) -> Tensor:
        return x

    def embed_unprojected(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T, P); each distinct word runs through the CNN once."""
        if self.lexicon is None:
            raise UserError("ELMo needs a tokenizer for the spelling of words, and this checkpoint has none.")
        word_W, which_BT = input_ids.unique(return_inverse=True)
        return self.embed_characters(self.lexicon.lookup_chars(word_W))[which_BT]

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        return self.embed_unprojected(input_ids)

    def embed_characters(self, char_ids: Tensor) -> Tensor:
        """Return word vectors (..., P) from character ids (..., C)."""
        x_WEC = self.tokens(char_ids.flatten(0, -2)).transpose(1, 2)
        features = torch.cat([conv(x_WEC).amax(-1).relu() for conv in self.filters], -1)
        return self.project(self.highways(features)).unflatten(0, char_ids.shape[:-1])


class ELMoStack(RecurrentStack):
    """A forward and a backward stack of LSTMs. Their states are concatenated: (B, T, 2P)."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.recurrent
        assert isinstance(spec, ELMoConfig)
        super().__init__(config, [ELMoLayer(spec) for _ in range(config.num_layers)])
        self.drop = Dropout(config.dropout)

    def run_documents(self, x: Tensor, documents: UnpackedDocuments, all_hidden_states: list[Tensor]) -> Tensor:
        """Return the last states. The first of all states is the word vectors, concatenated with themselves.

        In a stream only the forward direction carries its state: the text after a row has not been read.
        """
        all_hidden_states.append(torch.cat([x, x], -1))
        fwd, bwd = documents.unpack(x), documents.reverse(documents.unpack(x))
        for i, pair in enumerate(cast(list[ELMoLayer], list(self.blocks))):
            if is_trainable(pair):
                fwd, bwd = self.drop(fwd), self.drop(bwd)
            begin = self.recurrent_state.layer_state(i, pair.forward_lstm.hidden_size)
            (y_fwd, y_bwd), end = pair(fwd, bwd, begin)
            self.recurrent_state.store_layer_state(i, end)
            fwd, bwd = (y_fwd, y_bwd) if i == 0 else (y_fwd + fwd, y_bwd + bwd)
            all_hidden_states.append(self.concat_directions(fwd, bwd, documents))
        return self.drop(all_hidden_states[-1]) if is_trainable(self) else all_hidden_states[-1]

    def concat_directions(self, forward_NLP: Tensor, backward_NLP: Tensor, documents: UnpackedDocuments) -> Tensor:
        return documents.repack(torch.cat([forward_NLP, documents.reverse(backward_NLP)], -1))

    def split_directions(self, x_BTD: Tensor) -> Tensor:
        """Return (B, 2, T, P): forward and backward."""
        return x_BTD.unflatten(-1, (2, -1)).transpose(1, 2)


def is_trainable(module: nn.Module) -> bool:
    """Whether any parameter is trained: a frozen part gives features and needs no dropout."""
    return any(p.requires_grad for p in module.parameters())


class ELMoLayer(nn.Module):
    """One layer: a forward and a backward LSTM with projected, clipped states."""

    def __init__(self, spec: ELMoConfig) -> None:
        super().__init__()
        self.clip = spec.clip
        self.forward_lstm, self.backward_lstm = (
            nn.LSTM(spec.proj_size, spec.hidden_size, proj_size=spec.proj_size, batch_first=True) for _ in range(2)
        )
        for lstm in (self.forward_lstm, self.backward_lstm):
            # forget gate bias: start by remembering
            nn.init.constant_(cast(Tensor, lstm.bias_ih_l0)[spec.hidden_size : 2 * spec.hidden_size], 1.0)

    def forward(
        self, forward_NLP: Tensor, backward_NLP: Tensor, initial_state: LSTMState | None
    ) -> tuple[tuple[Tensor, Tensor], LSTMState]:
        """Return the outputs of both directions, and the final state of the forward one."""
        if not self.clip:
            y_fwd, end = run_lstm(self.forward_lstm, forward_NLP, initial_state)
            return (y_fwd, run_lstm(self.backward_lstm, backward_NLP)[0]), end
        zeros = [
            forward_NLP.new_zeros(len(forward_NLP), n) for n in (forward_NLP.shape[-1], self.forward_lstm.hidden_size)
        ]
        h, c = (torch.stack(pair) for pair in zip(initial_state or zeros, zeros, strict=True))
        fwd, bwd = (cast(list[Tensor], lstm._flat_weights) for lstm in (self.forward_lstm, self.backward_lstm))
        weights = [torch.stack(pair) for pair in zip(fwd, bwd, strict=True)]
        y_2NLP, h, c = clipped_lstm(torch.stack([forward_NLP, backward_NLP]), h, c, weights, self.clip)
        return (y_2NLP[0], y_2NLP[1]), (h[0], c[0])
