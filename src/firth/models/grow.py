"""More tokens for a model that is there already."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from firth.errors import UserError
from firth.models.heads import Vocabulary
from firth.models.model import Model
from firth.models.recurrent import Spelling
from firth.models.replaced import Replaced

NOISE = 0.1  # the spread of new vectors, as a share of the spread of the old ones


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
        if isinstance(part, Spelling):
            continue  # which has no vector for each word
        if part is model.embed:
            _grow_table(model.embed.tokens, size, noise)
        elif isinstance(part, Vocabulary):
            part.weight = None if part.weight is None else nn.Parameter(grown(part.weight, size, noise))
            part.bias = None if part.bias is None else nn.Parameter(grown(part.bias, size, noise))
        elif isinstance(part, Replaced) and part.delta is not None:
            _grow_table(part.delta, size, noise)
    model.config = replace(model.config, vocab_size=size)
    return model


def _grow_table(table: nn.Embedding, size: int, noise: torch.Generator) -> None:
    table.weight = nn.Parameter(grown(table.weight, size, noise))
    table.num_embeddings = size


def grown(rows: Tensor, size: int, noise: torch.Generator) -> Tensor:
    """The rows, and new ones up to `size`."""
    mean, spread = rows.mean(0), rows.std(0)
    drawn = torch.randn((size - len(rows), *rows.shape[1:]), generator=noise).to(rows)
    return torch.cat([rows, mean + NOISE * spread * drawn])
