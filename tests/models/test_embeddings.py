"""Input embeddings, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import EncoderDecoder, make_model
from firth.models.config import LearnedPosition, SinusoidalPosition
from firth.models.embeddings import InputEmbedding, sinusoids
from firth.models.presets import bart, bert, xlm

V = 9
TOKENS = torch.tensor([[3, 4, 5]])


def plain(**changes: object) -> InputEmbedding:
    """Without norm and dropout, with random weights."""
    torch.manual_seed(0)
    fields = {"embed_norm": False, "num_segments": 0} | changes
    model = InputEmbedding(bert(1, 4, 2, V, **fields))
    assert isinstance(model, InputEmbedding)
    return model.eval()


def test_sinusoidal_positions() -> None:
    """Vaswani et al. 2017, section 3.5: pairs of sine and cosine of position / 10000^(2i / width)."""
    wanted = [[f(p / 10000 ** (i / 4)) for i in (0, 2) for f in (math.sin, math.cos)] for p in range(3)]
    assert_close(sinusoids(3, 4), torch.tensor(wanted))
    assert sinusoids(3, 5).shape == (3, 5)


def test_sinusoidal_positions_are_added_and_not_trained() -> None:
    model = plain(position=SinusoidalPosition(8))
    assert_close(model(TOKENS), model.tokens(TOKENS) + sinusoids(8, 4)[:3])
    assert_close(model(TOKENS, torch.tensor([[5, 0, 1]])), model.tokens(TOKENS) + sinusoids(8, 4)[[5, 0, 1]])
    assert [name for name, _ in model.named_parameters()] == ["tokens.weight"]


def test_learned_positions_start_at_the_offset() -> None:
    model = plain(position=LearnedPosition(6, offset=2))
    assert model.position_embeddings is not None
    assert_close(model(TOKENS), model.tokens(TOKENS) + model.position_embeddings.weight[2:5])
    assert_close(
        model(TOKENS, torch.tensor([[0, 0, 3]])), model.tokens(TOKENS) + model.position_embeddings.weight[[2, 2, 5]]
    )


def test_max_length_excludes_the_offset() -> None:
    model = make_model(bert(1, 4, 2, V, position=LearnedPosition(6, offset=2)))
    model(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(UserError, match="5 tokens is longer than the 4 positions"):
        model(torch.zeros(1, 5, dtype=torch.long))


def test_language_embeddings() -> None:
    model = plain(position=SinusoidalPosition(8), num_languages=3)
    assert model.languages is not None
    bare = model(TOKENS)
    assert_close(bare, model.tokens(TOKENS) + sinusoids(8, 4)[:3])
    assert_close(model(TOKENS, token_type_ids=torch.tensor([[2, 0, 2]])), bare + model.languages.weight[[2, 0, 2]])
    with pytest.raises(UserError, match="exclude each other"):
        make_model(xlm(1, 4, 2, V, num_languages=2, num_segments=2))


def test_scaled_token_embeddings() -> None:
    model = plain(position=SinusoidalPosition(8), scale_embedding=True)
    assert_close(model(TOKENS), 2 * model.tokens(TOKENS) + sinusoids(8, 4)[:3])


def test_decoder_shares_tokens_but_not_positions() -> None:
    model = make_model(bart(1, 4, 2, V)).eval()
    assert isinstance(model, EncoderDecoder)

    def gradient(names: tuple[str, ...]) -> list[Tensor | None]:
        return [dict(model.named_parameters())[name].grad for name in names]

    model.embed(TOKENS, position_embedding=model.decoder_embed).pow(2).sum().backward()
    mine, other, shared = gradient(
        ("decoder_embed.position_embeddings.weight", "embed.position_embeddings.weight", "embed.tokens.weight")
    )
    assert other is None
    assert mine is not None
    assert shared is not None
    assert mine.abs().sum(1).nonzero().flatten().tolist() == [2, 3, 4]
    assert shared.abs().sum(1).nonzero().flatten().tolist() == [3, 4, 5]
