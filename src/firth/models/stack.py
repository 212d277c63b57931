"""The embedding, and the blocks one after the other.

B rows, T places, E width of the token vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firth.models.attention import Sight, see
from firth.models.block import Block, make_norm
from firth.models.config import Buckets, Learned, ModelConfig
from firth.models.dropout import Dropout
from firth.models.position import BucketScore


class Embedding(nn.Module):
    """Token, place and segment vectors, added; where they are narrower than the model, then widened."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.embed_width
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.places = nn.Embedding(config.position.length, width) if isinstance(config.position, Learned) else None
        self.segments = nn.Embedding(config.num_segments, width) if config.num_segments else None
        self.norm = make_norm(config, width) if config.embed_norm else None
        self.drop = Dropout(config.dropout)
        self.widen = nn.Linear(width, config.dim) if config.embed_dim is not None else nn.Identity()

    def forward(self, tokens: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        return self.widen(self.vectors(tokens, position, segment))

    def vectors(self, tokens: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        """(B, T, E): before they are widened."""
        return self.place(self.tokens(tokens), position, segment)

    def place(self, x_BTE: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        """Tell vectors where they stand."""
        if self.places is not None:
            if position is None:
                position = torch.arange(x_BTE.shape[1], device=x_BTE.device)
            x_BTE = x_BTE + self.places(position)
        if self.segments is not None:
            one = segment is None or self.segments.num_embeddings == 1  # RoBERTa has one for all
            x_BTE = x_BTE + (self.segments.weight[0] if one else self.segments(segment))
        if self.norm is not None:
            x_BTE = self.norm(x_BTE)
        return self.drop(x_BTE)


class Stack(nn.Module):
    """Blocks over one sequence, `causal` or not, that may read another one (`cross`)."""

    def __init__(self, config: ModelConfig, num_layers: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.num_layers, self.num_shared = num_layers, config.num_shared
        self.blocks = nn.ModuleList(Block(config, cross) for _ in range(-(-num_layers // self.num_shared)))
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
        for block in self.layers:
            if states is not None:
                states.append(x)
            x = block(x, sight, read, read_sight)
        x = self.finish(x)
        if states is not None:
            states.append(x)
        return x

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks in the order in which they run; layers that share one run it again."""
        return [self.blocks[i // self.num_shared] for i in range(self.num_layers)]

    def finish(self, x: Tensor) -> Tensor:
        return x if self.final_norm is None else self.drop(self.final_norm(x))
