"""ELMo: words by their characters, and a language model each way (Peters et al. 2018).

B rows, T places, N texts, L places of the longest text, W words, C characters of a word, P numbers of a projection,
H units of an LSTM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from firth.errors import UserError
from firth.models.config import ELMo, ModelConfig
from firth.models.dropout import Dropout
from firth.models.recurrent.clipped import clipped_lstm
from firth.models.recurrent.lstm import Recurrence, State, Texts, read_on
from firth.tokens.characters import NUM_CHARACTERS
from firth.tokens.lexicon import Lexicon

if TYPE_CHECKING:
    from firth.tokens import Tokenizer

CARRY = -2.0  # a highway begins by letting most of a word pass as it is


class Highway(nn.Module):
    """Some numbers of a word are made new, the others pass (Srivastava et al. 2015)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.new, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        nn.init.constant_(self.gate.bias, CARRY)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(x).sigmoid() * (self.new(x).relu() - x)


class Spelling(nn.Module):
    """Words to vectors by their characters. Its tokens are characters; a word's id only says where its spelling is."""

    offset = 0  # places have no vectors

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.recurrent
        assert isinstance(spec, ELMo)
        self.tokens = nn.Embedding(NUM_CHARACTERS, spec.characters)
        self.filters = nn.ModuleList(nn.Conv1d(spec.characters, num, width) for width, num in spec.filters)
        found = sum(num for _, num in spec.filters)
        self.highways = nn.Sequential(*(Highway(found) for _ in range(spec.highways)))
        self.project = nn.Linear(found, spec.projection)
        self.lexicon: Lexicon | None = None

    def read_with(self, tokenizer: Tokenizer) -> None:
        """Take the words that this tokenizer has ids for."""
        self.lexicon = Lexicon(tokenizer)

    def widen(self, x: Tensor) -> Tensor:
        return x

    def vectors(self, tokens: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        """(B, T, P): each word that occurs is spelled once."""
        if self.lexicon is None:
            raise UserError("ELMo spells words, and has no tokenizer that knows them: its folder needs one.")
        word_W, which_BT = tokens.unique(return_inverse=True)
        return self.spelled(self.lexicon.spell(word_W))[which_BT]

    def forward(self, tokens: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        return self.vectors(tokens)

    def spelled(self, characters: Tensor) -> Tensor:
        """(..., P) from the characters of words (..., C)."""
        x_WEC = self.tokens(characters.flatten(0, -2)).transpose(1, 2)
        found = torch.cat([conv(x_WEC).amax(-1).relu() for conv in self.filters], -1)
        return self.project(self.highways(found)).unflatten(0, characters.shape[:-1])


class BothWays(Recurrence):
    """Two stacks of LSTMs, one each way, that never meet. Their states stand side by side: (B, T, 2P)."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.recurrent
        assert isinstance(spec, ELMo)
        super().__init__(config, [ProjectedPair(spec) for _ in range(config.num_layers)])
        self.drop = Dropout(config.dropout)

    def read_texts(self, x: Tensor, texts: Texts, found: list[Tensor]) -> Tensor:
        """The words themselves are the first of the states, twice side by side.

        Where rows go on from step to step only the way forward goes on: what comes after a row is not read yet.
        """
        found.append(torch.cat([x, x], -1))
        there, back = texts.apart(x), texts.flip(texts.apart(x))
        for i, pair in enumerate(cast(list[ProjectedPair], list(self.blocks))):
            if learns(pair):
                there, back = self.drop(there), self.drop(back)
            begin = self.carried.state(i, pair.there.hidden_size)
            (y_there, y_back), end = pair(there, back, begin)
            self.carried.leave(i, end)
            there, back = (y_there, y_back) if i == 0 else (y_there + there, y_back + back)
            found.append(self.side_by_side(there, back, texts))
        return self.drop(found[-1]) if learns(self) else found[-1]

    def side_by_side(self, there: Tensor, back: Tensor, texts: Texts) -> Tensor:
        return texts.together(torch.cat([there, texts.flip(back)], -1))

    def apart(self, x_BTD: Tensor) -> Tensor:
        """(B, 2, T, P): forward and backward."""
        return x_BTD.unflatten(-1, (2, -1)).transpose(1, 2)


def learns(part: nn.Module) -> bool:
    """Whether a part may change: one that may not, whose states are features, needs no dropout either."""
    return any(p.requires_grad for p in part.parameters())


class ProjectedPair(nn.Module):
    """One layer: two LSTMs whose states are projected, and stay within a bound."""

    def __init__(self, spec: ELMo) -> None:
        super().__init__()
        self.clip = spec.clip
        self.there, self.back = (
            nn.LSTM(spec.projection, spec.hidden, proj_size=spec.projection, batch_first=True) for _ in range(2)
        )
        for lstm in (self.there, self.back):
            nn.init.constant_(
                cast(Tensor, lstm.bias_ih_l0)[spec.hidden : 2 * spec.hidden], 1.0
            )  # it begins by forgetting little

    def forward(self, there_NLP: Tensor, back_NLP: Tensor, begin: State | None) -> tuple[tuple[Tensor, Tensor], State]:
        """Both ways, and the state in which the way forward ends."""
        if not self.clip:
            y_there, end = read_on(self.there, there_NLP, begin)
            return (y_there, read_on(self.back, back_NLP)[0]), end
        zeros = [there_NLP.new_zeros(len(there_NLP), n) for n in (there_NLP.shape[-1], self.there.hidden_size)]
        h, c = (torch.stack(pair) for pair in zip(begin or zeros, zeros, strict=True))
        there, back = (cast(list[Tensor], lstm._flat_weights) for lstm in (self.there, self.back))
        weights = [torch.stack(pair) for pair in zip(there, back, strict=True)]
        y_2NLP, h, c = clipped_lstm(torch.stack([there_NLP, back_NLP]), h, c, weights, self.clip)
        return (y_2NLP[0], y_2NLP[1]), (h[0], c[0])
