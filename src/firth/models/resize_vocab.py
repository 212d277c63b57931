"""More tokens for a model that is there already."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.models.electra import ElectraGenerator
from firth.models.heads import LMHeadModule
from firth.models.model import Model
from firth.models.recurrent import CharCNNEmbedding

NEW_VECTOR_NOISE_RATIO = 0.1  # the spread of new vectors, as a share of the spread of the old ones


@torch.no_grad()
def grow_vocabulary(model: Model, size: int, seed: int = 0) -> Model:
    """Give a model the tokens up to `size`, in place: each is the mean of the old ones, with a little noise.

    So a new token is as likely as the others, and no two are the same. The noise depends on the seed alone.
    """
    old = model.config.vocab_size
    if size < old:
        raise UserError(f"The model has {old:,} tokens: it can grow, and not shrink to {size:,}.")
    if size == old:
        return model
    noise = torch.Generator().manual_seed(seed)
    for part in model.modules():
        if isinstance(part, CharCNNEmbedding):
            continue  # which has no vector for each word
        if part is model.embed:
            _grow_embedding(model.embed.tokens, size, noise)
        elif isinstance(part, LMHeadModule):
            part.weight = None if part.weight is None else nn.Parameter(append_mean_rows(part.weight, size, noise))
            part.bias = None if part.bias is None else nn.Parameter(append_mean_rows(part.bias, size, noise))
        elif isinstance(part, ElectraGenerator) and part.delta is not None:
            _grow_embedding(part.delta, size, noise)
    model.config = replace(model.config, vocab_size=size)
    return model


def _grow_embedding(table: nn.Embedding, size: int, generator: torch.Generator) -> None:
    table.weight = nn.Parameter(append_mean_rows(table.weight, size, generator))
    table.num_embeddings = size


def append_mean_rows(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The rows, and new ones up to `size`."""
    mean, spread = rows.mean(0), rows.std(0)
    drawn = torch.randn((size - len(rows), *rows.shape[1:]), generator=generator).to(rows)
    return torch.cat([rows, mean + NEW_VECTOR_NOISE_RATIO * spread * drawn])
