"""Replaced-token detection: a small generator beside the model (Clark et al. 2020).

B rows, T places, K asked places, D model width, E width of the token vectors, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.config import Generator, ModelConfig
from firth.models.heads import IGNORED, Verdicts
from firth.models.stack import Stack


def generator_config(config: ModelConfig) -> ModelConfig:
    """The generator: as deep as the body, narrower, over token vectors of the same width."""
    spec = config.extra("generator")
    assert isinstance(spec, Generator)
    num_heads = max(1, int(config.num_heads * spec.size))
    return replace(
        config,
        dim=num_heads * max(1, round(config.dim * spec.size / num_heads)),
        num_heads=num_heads,
        head_dim=None,
        mlp=replace(config.mlp, dim=max(1, round(config.mlp.dim * spec.size))),
        embed_dim=config.embed_width,
        extras=(),
    )


class Replaced(nn.Module):
    """The generator's stack over the model's own token vectors, and the body's verdict on every token.

    The generator answers in words through the model's head, which is made for its width: the body has no words.
    `delta` is by how much the body's token vectors differ from the generator's, where they may.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec, small = config.extra("generator"), generator_config(config)
        assert isinstance(spec, Generator)
        self.weight = spec.weight
        self.delta = nn.Embedding(config.vocab_size, config.embed_width) if spec.disentangled else None
        self.narrow = nn.Linear(config.embed_width, small.dim)
        self.stack = Stack(small, small.num_layers, causal=False)
        self.verdict = Verdicts(config)

    def forward(
        self, vectors_BTE: Tensor, doc: Tensor | None, rank: Tensor | None = None, segment: Tensor | None = None
    ) -> Tensor:
        """The generator's last states."""
        return self.stack(self.narrow(vectors_BTE), doc, rank, segment=segment)


def filled(logits_BKV: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The text with the generator's tokens at the asked places, and where these are not the true ones (B, T)."""
    truth_BT = put(batch.tokens, batch.asked, batch.labels, batch.labels != IGNORED)
    read_BT = put(batch.tokens, batch.asked, sample(logits_BKV), batch.labels != IGNORED)
    return read_BT, read_BT != truth_BT


@torch.no_grad()
def sample(logits_BKV: Tensor) -> Tensor:
    """A token for each place, drawn from the softmax by Gumbel's trick; nothing is learned through it."""
    noise = torch.empty_like(logits_BKV).exponential_()
    return (logits_BKV.softmax(-1) / noise).argmax(-1)


def put(tokens_BT: Tensor, place_BK: Tensor, value_BK: Tensor, used_BK: Tensor) -> Tensor:
    """The tokens with other values at the places of the used slots."""
    T = tokens_BT.shape[1]
    spare = F.pad(tokens_BT, (0, 1))  # one more column, for what the unused slots say
    return spare.scatter(1, place_BK.masked_fill(~used_BK, T), value_BK)[:, :T]


def verdict_loss(score_BT: Tensor, replaced_BT: Tensor, doc_BT: Tensor | None) -> Tensor:
    """The summed binary cross-entropy over all tokens, padding left out."""
    loss_BT = F.binary_cross_entropy_with_logits(score_BT.float(), replaced_BT.float(), reduction="none")
    return (loss_BT if doc_BT is None else loss_BT * (doc_BT >= 0)).sum()
