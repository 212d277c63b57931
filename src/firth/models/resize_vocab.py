"""Grow the vocabulary of a trained model: new rows in the token embeddings and the LM head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.models.electra import ElectraGenerator
from firth.models.heads import LMHeadModule
from firth.models.model import Model
from firth.models.recurrent.elmo import CharCNNEmbedding
from firth.models.recurrent.features import FeatureEncoder

NEW_VECTOR_NOISE_RATIO = 0.1  # std of new rows, relative to the std of the old ones


@torch.no_grad()
def grow_vocabulary(model: Model, size: int, seed: int = 0, noise_ratio: float = NEW_VECTOR_NOISE_RATIO) -> Model:
    """Grow the vocabulary to `size` in place; each new row is the mean of the old ones plus noise.

    So a new token starts about as likely as an average one, and no two rows are equal. The noise depends on the seed
    alone; without noise (`noise_ratio` 0) all new rows start at the mean, as in ULMFiT.
    """
    old = model.config.vocab_size
    if size < old:
        raise UserError(f"The model has {old:,} tokens: it can grow, and not shrink to {size:,}.")
    if size == old:
        return model
    noise = torch.Generator().manual_seed(seed)
    for part in model.modules():
        if isinstance(part, CharCNNEmbedding):
            continue  # has no embedding per word
        if part is model.embed:
            _grow_embedding(model.embed.tokens, size, noise, noise_ratio)
        elif isinstance(part, LMHeadModule):
            for name in ("weight", "extra_weight", "bias"):
                if (rows := getattr(part, name)) is not None:
                    setattr(part, name, nn.Parameter(append_mean_rows(rows, size, noise, noise_ratio)))
        elif isinstance(part, FeatureEncoder) and part.words is not None:
            _grow_embedding(part.words, size, noise, noise_ratio)
        elif isinstance(part, ElectraGenerator) and part.delta is not None:
            _grow_embedding(part.delta, size, noise, noise_ratio)
    model.config = replace(model.config, vocab_size=size)
    return model


def _grow_embedding(table: nn.Embedding, size: int, generator: torch.Generator, noise_ratio: float) -> None:
    table.weight = nn.Parameter(append_mean_rows(table.weight, size, generator, noise_ratio))
    table.num_embeddings = size


def append_mean_rows(rows: Tensor, size: int, generator: torch.Generator, noise_ratio: float) -> Tensor:
    """Return `rows` with new ones appended up to `size`: their mean plus noise."""
    mean, spread = rows.mean(0), rows.std(0)
    drawn = torch.randn((size - len(rows), *rows.shape[1:]), generator=generator).to(rows)
    return torch.cat([rows, mean + noise_ratio * spread * drawn])
