"""Blocks one after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from firth.models.attention import Sight, see
from firth.models.block import Block, make_norm
from firth.models.config import Buckets, ModelConfig
from firth.models.dropout import Dropout
from firth.models.position import make_stack_score, make_turn


class Stack(nn.Module):
    """Blocks over one sequence, `causal` or not, that may read another one (`cross`)."""

    checkpointing = False  # compute the blocks again in the backward pass, and keep nothing of them until then

    def __init__(self, config: ModelConfig, num_layers: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.num_layers, self.num_shared = num_layers, config.num_shared
        blocks = -(-num_layers // self.num_shared)
        self.blocks = nn.ModuleList(Block(config, cross, first=i == 0) for i in range(blocks))
        self.final_norm = make_norm(config) if config.norm_first else None
        self.score = make_stack_score(config, causal)
        self.drop = Dropout(config.dropout if isinstance(config.position, Buckets) else 0.0)  # T5's last dropout

    def forward(
        self,
        x: Tensor,
        doc: Tensor | None,
        rank: Tensor | None = None,
        read: Tensor | None = None,
        read_doc: Tensor | None = None,
        states: list[Tensor] | None = None,
        position: Tensor | None = None,
        seen: list[Tensor] | None = None,
    ) -> Tensor:
        """The last states. Those of every layer are added to `states`, the weights of attention to `seen`, if given."""
        wide, narrow = self.sights(x, doc, rank, position, seen)
        read_sight = see(False, doc, read_doc=read_doc) if read_doc is not None else Sight()
        for i, block in enumerate(self.layers):
            if states is not None:
                states.append(x)
            x = self.run(block, x, narrow if self.is_narrow(i) else wide, read, read_sight)
        x = self.finish(x)
        if states is not None:
            states.append(x)
        return x

    def sights(
        self, x: Tensor, doc: Tensor | None, rank: Tensor | None, position: Tensor | None, seen: list[Tensor] | None
    ) -> tuple[Sight, Sight]:
        """Who sees whom: in most layers, and in those with a window."""
        T, window = x.shape[1], self.config.window
        score = self.score(T, T) if self.score is not None else None
        wide = see(self.causal, doc, rank, score=score)._replace(turn=make_turn(self.config, position, x), seen=seen)
        if window is None:
            return wide, wide
        place = torch.arange(T, device=x.device)
        near = ((place[:, None] - place[None, :]).abs() <= window.size // 2)[None]
        narrow = see(self.causal, doc, rank, score=score, near=near)
        return wide, narrow._replace(turn=make_turn(self.config, position, x, local=True), seen=seen)

    def is_narrow(self, layer: int) -> bool:
        return self.config.window is not None and layer % self.config.window.every != 0

    def run(self, block: nn.Module, x: Tensor, sight: Sight, read: Tensor | None, read_sight: Sight) -> Tensor:
        """One block; in training it may be left out at random, or computed again later."""
        if self.checkpointing and self.training:
            y = checkpoint(block, x, sight, read, read_sight, use_reentrant=False)
        else:
            y = block(x, sight, read, read_sight)
        if not (self.training and self.config.layer_drop):
            return y
        return torch.where(torch.rand((), device=x.device) < self.config.layer_drop, x, y)

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks in the order in which they run; layers that share one run it again."""
        return [self.blocks[i // self.num_shared] for i in range(self.num_layers)]

    def finish(self, x: Tensor) -> Tensor:
        return x if self.final_norm is None else self.drop(self.final_norm(x))
