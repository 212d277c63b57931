"""Blocks one after the other."""

from __future__ import annotations

from torch import Tensor, nn

from firth.models.attention import Sight, see
from firth.models.block import Block, make_norm
from firth.models.config import Buckets, ModelConfig
from firth.models.dropout import Dropout
from firth.models.position import BucketScore


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
