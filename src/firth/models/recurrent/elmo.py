"""ELMo: words by their characters, and a language model each way (Peters et al. 2018).

B rows, T places, N texts, L places of the longest text, W words, C characters of a word, P numbers of a projection,
H units of an LSTM.
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

HIGHWAY_GATE_BIAS = -2.0  # a highway begins by letting most of a word pass as it is


class Highway(nn.Module):
    """Some numbers of a word are made new, the others pass (Srivastava et al. 2015)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.new, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        nn.init.constant_(self.gate.bias, HIGHWAY_GATE_BIAS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(x).sigmoid() * (self.new(x).relu() - x)


class CharCNNEmbedding(nn.Module):
    """Words to vectors by their characters. Its tokens are characters; a word's id only says where its spelling is."""

    offset = 0  # places have no vectors

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.recurrent
        assert isinstance(spec, ELMoConfig)
        self.tokens = nn.Embedding(NUM_CHAR_IDS, spec.char_dim)
        self.filters = nn.ModuleList(nn.Conv1d(spec.char_dim, num, width) for width, num in spec.filters)
        found = sum(num for _, num in spec.filters)
        self.highways = nn.Sequential(*(Highway(found) for _ in range(spec.num_highways)))
        self.project = nn.Linear(found, spec.proj_size)
        self.lexicon: WordCharTable | None = None

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Take the words that this tokenizer has ids for."""
        self.lexicon = WordCharTable(tokenizer)

    def widen(self, x: Tensor) -> Tensor:
        return x

    def embed_unprojected(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """(B, T, P): each word that occurs is spelled once."""
        if self.lexicon is None:
            raise UserError("ELMo spells words, and has no tokenizer that knows them: its folder needs one.")
        word_W, which_BT = input_ids.unique(return_inverse=True)
        return self.embed_characters(self.lexicon.lookup_chars(word_W))[which_BT]

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        return self.embed_unprojected(input_ids)

    def embed_characters(self, char_ids: Tensor) -> Tensor:
        """(..., P) from the characters of words (..., C)."""
        x_WEC = self.tokens(char_ids.flatten(0, -2)).transpose(1, 2)
        found = torch.cat([conv(x_WEC).amax(-1).relu() for conv in self.filters], -1)
        return self.project(self.highways(found)).unflatten(0, char_ids.shape[:-1])


class ELMoStack(RecurrentStack):
    """Two stacks of LSTMs, one each way, that never meet. Their states stand side by side: (B, T, 2P)."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.recurrent
        assert isinstance(spec, ELMoConfig)
        super().__init__(config, [ELMoLayer(spec) for _ in range(config.num_layers)])
        self.drop = Dropout(config.dropout)

    def run_documents(self, x: Tensor, documents: UnpackedDocuments, all_hidden_states: list[Tensor]) -> Tensor:
        """The words themselves are the first of the states, twice side by side.

        Where rows go on from step to step only the way forward goes on: what comes after a row is not read yet.
        """
        all_hidden_states.append(torch.cat([x, x], -1))
        there, back = documents.unpack(x), documents.reverse(documents.unpack(x))
        for i, pair in enumerate(cast(list[ELMoLayer], list(self.blocks))):
            if is_trainable(pair):
                there, back = self.drop(there), self.drop(back)
            begin = self.recurrent_state.layer_state(i, pair.forward_lstm.hidden_size)
            (y_there, y_back), end = pair(there, back, begin)
            self.recurrent_state.store_layer_state(i, end)
            there, back = (y_there, y_back) if i == 0 else (y_there + there, y_back + back)
            all_hidden_states.append(self.concat_directions(there, back, documents))
        return self.drop(all_hidden_states[-1]) if is_trainable(self) else all_hidden_states[-1]

    def concat_directions(self, forward_NLP: Tensor, backward_NLP: Tensor, documents: UnpackedDocuments) -> Tensor:
        return documents.repack(torch.cat([forward_NLP, documents.reverse(backward_NLP)], -1))

    def split_directions(self, x_BTD: Tensor) -> Tensor:
        """(B, 2, T, P): forward and backward."""
        return x_BTD.unflatten(-1, (2, -1)).transpose(1, 2)


def is_trainable(module: nn.Module) -> bool:
    """Whether a part may change: one that may not, whose states are features, needs no dropout either."""
    return any(p.requires_grad for p in module.parameters())


class ELMoLayer(nn.Module):
    """One layer: two LSTMs whose states are projected, and stay within a bound."""

    def __init__(self, spec: ELMoConfig) -> None:
        super().__init__()
        self.clip = spec.clip
        self.forward_lstm, self.backward_lstm = (
            nn.LSTM(spec.proj_size, spec.hidden_size, proj_size=spec.proj_size, batch_first=True) for _ in range(2)
        )
        for lstm in (self.forward_lstm, self.backward_lstm):
            nn.init.constant_(
                cast(Tensor, lstm.bias_ih_l0)[spec.hidden_size : 2 * spec.hidden_size], 1.0
            )  # it begins by forgetting little

    def forward(
        self, forward_NLP: Tensor, backward_NLP: Tensor, initial_state: LSTMState | None
    ) -> tuple[tuple[Tensor, Tensor], LSTMState]:
        """Both ways, and the state in which the way forward ends."""
        if not self.clip:
            y_there, end = run_lstm(self.forward_lstm, forward_NLP, initial_state)
            return (y_there, run_lstm(self.backward_lstm, backward_NLP)[0]), end
        zeros = [
            forward_NLP.new_zeros(len(forward_NLP), n) for n in (forward_NLP.shape[-1], self.forward_lstm.hidden_size)
        ]
        h, c = (torch.stack(pair) for pair in zip(initial_state or zeros, zeros, strict=True))
        there, back = (cast(list[Tensor], lstm._flat_weights) for lstm in (self.forward_lstm, self.backward_lstm))
        weights = [torch.stack(pair) for pair in zip(there, back, strict=True)]
        y_2NLP, h, c = clipped_lstm(torch.stack([forward_NLP, backward_NLP]), h, c, weights, self.clip)
        return (y_2NLP[0], y_2NLP[1]), (h[0], c[0])
