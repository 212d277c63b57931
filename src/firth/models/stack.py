"""The embedding, and the blocks one after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firth.models.attention import Sight, see
from firth.models.block import Block, make_norm
from firth.models.config import Buckets, Learned, ModelConfig
from firth.models.dropout import Dropout
from firth.models.position import BucketScore


class Embedding(nn.Module):
    """Token, place and segment vectors, added."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.places = nn.Embedding(config.position.length, config.dim) if isinstance(config.position, Learned) else None
        self.segments = nn.Embedding(config.num_segments, config.dim) if config.num_segments else None
        self.norm = make_norm(config) if config.embed_norm else None
        self.drop = Dropout(config.dropout)

    def forward(self, tokens: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        if self.places is not None:
            if position is None:
                position = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.places(position)
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segment is None else self.segments(segment))
        if self.norm is not None:
            x = self.norm(x)
        return self.drop(x)


class Stack(nn.Module):
    """Blocks over one sequence, `causal` or not, that may read another one (`cross`)."""

    def __init__(self, config: ModelConfig, num_layers: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.blocks = nn.ModuleList(Block(config, cross) for _ in range(num_layers))
        self.final_norm = make_norm(config) if config.norm_first else None
        self.score = (
            BucketScore(config.position, config.num_heads, both_ways=not causal)
            if isinstance(config.position, Buckets)
            else None
        )
        self.drop = Dropout(config.dropout if isinstance(config.position, Buckets) else 0.0)  # T5's last dropout

    def forward(
        self,
        x: Tensor,
        doc: Tensor | None,
        rank: Tensor | None = None,
        read: Tensor | None = None,
        read_doc: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """The last states; those of every layer are added to `states` when it is given."""
        score = self.score(x.shape[1]) if self.score is not None else None
        sight = see(self.causal, doc, rank, score=score)
        read_sight = see(False, doc, read_doc=read_doc) if read_doc is not None else Sight()
        for block in self.blocks:
            if states is not None:
                states.append(x)
            x = block(x, sight, read, read_sight)
        if self.final_norm is not None:
            x = self.drop(self.final_norm(x))
        if states is not None:
            states.append(x)
        return x
