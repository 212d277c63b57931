"""Grow the vocabulary of a trained model: new rows in the token embeddings and the LM head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.models.electra import ElectraGenerator
from firth.models.heads import LMHeadModule
from firth.models.model import Model
from firth.models.recurrent.elmo import CharCNNEmbedding
from firth.models.recurrent.features import FeatureEncoder
from firth.tokens.extend import old_piece_ids
from firth.tokens.tokenizer import Tokenizer

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
    for owner, name in list(vocabulary_parameters(model)):
        rows = getattr(owner, name)
        setattr(owner, name, nn.Parameter(append_mean_rows(rows, size, noise, noise_ratio)))
        if isinstance(owner, nn.Embedding):
            owner.num_embeddings = size
    model.config = replace(model.config, vocab_size=size)
    return model


@torch.no_grad()
def grow_embeddings(model: Model, old_tokenizer: Tokenizer, new_tokenizer: Tokenizer, seed: int = 0) -> Model:
    """Grow the vocabulary by the new tokens of an extended tokenizer, in place (`firth.tokens.extend`).

    The rows of a new token start at the mean of the rows of its old pieces: the model has read these pieces in its
    place so far, so their mean is near to what its layers expect there. This holds for the input embedding, the output
    embedding and the output bias. A token without old pieces, as an unknown character, starts at the mean of all
    rows. Old rows do not change.
    """
    num_old = old_tokenizer.vocab.size
    if num_old > model.config.vocab_size:
        raise UserError(
            f"The model has {model.config.vocab_size:,} tokens and the tokenizer {num_old:,}: it is not the model's."
        )
    grow_vocabulary(model, max(model.config.vocab_size, new_tokenizer.vocab.size), seed)
    pieces = old_piece_ids(old_tokenizer, new_tokenizer)
    for owner, name in vocabulary_parameters(model):
        rows = getattr(owner, name)
        old_rows = rows[:num_old].clone()
        for token, piece_ids in pieces.items():
            rows[token] = old_rows[list(piece_ids) or slice(None)].mean(0)
    return model


def vocabulary_parameters(model: Model) -> Iterator[tuple[nn.Module, str]]:
    """Yield every parameter with one row per token, as the module that holds it and its name."""
    for part in model.modules():
        if isinstance(part, CharCNNEmbedding):
            continue  # has no embedding per word
        if part is model.embed:
            yield model.embed.tokens, "weight"
        elif isinstance(part, LMHeadModule):
            yield from ((part, name) for name in ("weight", "extra_weight", "bias") if getattr(part, name) is not None)
        elif isinstance(part, FeatureEncoder) and part.words is not None:
            yield part.words, "weight"
        elif isinstance(part, ElectraGenerator) and part.delta is not None:
            yield part.delta, "weight"


def append_mean_rows(rows: Tensor, size: int, generator: torch.Generator, noise_ratio: float) -> Tensor:
    """Return `rows` with new ones appended up to `size`: their mean plus noise."""
    mean, spread = rows.mean(0), rows.std(0)
    drawn = torch.randn((size - len(rows), *rows.shape[1:]), generator=generator).to(rows)
    return torch.cat([rows, mean + noise_ratio * spread * drawn])
