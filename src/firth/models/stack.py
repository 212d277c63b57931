"""Blocks one after the other."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from firth.models.attention import Near, Sight, see
from firth.models.block import Block, make_norm
from firth.models.config import Buckets, ModelConfig, TransformerXL
from firth.models.convolution import Neighbours
from firth.models.dropout import Dropout
from firth.models.eight import Linear8, more_places
from firth.models.heads import pick
from firth.models.memory import Memory
from firth.models.position import make_stack_score, make_turn
from firth.models.programs import part
from firth.models.relative import make_shared


class Stack(nn.Module):
    """Blocks over one sequence, `causal` or not, that may read another one (`cross`)."""

    memory: Memory | None = None  # of the text before, where there is one
    checkpointing = False  # compute the blocks again in the backward pass, and keep nothing of them until then
    narrows = False  # whether the last layer may compute what is asked alone
    residual = torch.float32  # what goes from block to block, where autocast computes in that

    def __init__(self, config: ModelConfig, num_layers: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.num_layers, self.num_shared = num_layers, config.num_shared
        blocks = -(-num_layers // self.num_shared)
        self.blocks = nn.ModuleList(Block(config, cross, first=i == 0) for i in range(blocks))
        self.final_norm = make_norm(config) if config.norm_first else None
        self.score = make_stack_score(config, causal)
        self.shared = make_shared(config)
        self.convolution = Neighbours(config, config.convolution) if config.convolution is not None else None
        last = isinstance(config.position, Buckets | TransformerXL)  # T5 and XLNet have a last dropout
        self.drop = Dropout(config.dropout if last else 0.0)

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
        segment: Tensor | None = None,
        upto: int | None = None,
        seen_across: list[Tensor] | None = None,
        asking: Tensor | None = None,
        asked: Tensor | None = None,
    ) -> Tensor:
        """The last states. Those of every layer are added to `states`, where that is given.

        The weights of attention are added to `seen`, those of attention to the other sequence to `seen_across`.
        `upto` leaves out the layers from there on, and what comes after them. `asking` are the documents of the other
        sequence that each place reads, where they are not those of the same numbers. The last states of `asked` places
        (B, K) alone are computed where these are given, which `can_narrow` allows.
        """
        x = self.enter(x)
        wide, narrow = self.sights(x, doc, rank, position, seen, segment)
        asking = doc if asking is None else asking
        read_sight = see(False, asking, read_doc=read_doc) if read_doc is not None else Sight()
        read_sight = read_sight._replace(seen=seen_across)
        embedded = before = x
        layers = self.layers[:upto]
        for i, block in enumerate(layers):
            if states is not None:
                states.append(x)
            content = self.memory.prolong(i, x) if self.memory is not None else None
            sight = narrow if self.is_narrow(i) else wide
            if asked is not None and i == self.num_layers - 1:
                at = self.asking_places(block, asked)
                place = at if position is None else position.expand_as(x[..., 0]).gather(1, at)
                turn = make_turn(self.config, place, x, local=self.is_narrow(i))
                x, sight, content = pick(before, at), sight.at(at, turn), x
                before = x
            times = 2 if i + 1 < len(layers) and states is None and self.in_pairs(block, x) else 1
            found = self.run(block, x, sight, read, read_sight, content, None if before is x else before, times)
            x, before = found if times == 2 else (found, found)
            if i == 0 and self.convolution is not None:
                x = before = self.convolution(embedded, x, doc)
        x = x if asked is None else x[:, : asked.shape[1]]
        x = x if upto is not None else self.finish(x)
        if states is not None:
            states.append(x)
        return x

    def can_narrow(self, asked: Tensor, T: int) -> bool:
        """Whether the last layer can be computed for these places alone, and may be: they still read all T.

        Not where its scores depend on who stands where in a row; and for most of them it would not pay.
        """
        if not (self.narrows and self.num_layers and 0 < 2 * asked.shape[1] <= T):
            return False
        scores = self.score is not None or self.shared is not None or self.layers[-1].attention.score is not None
        other = self.memory is not None or self.convolution is not None or self.config.layer_drop > 0
        return not (self.causal or scores or other)

    def asking_places(self, block: Block, asked_BK: Tensor) -> Tensor:
        """Those that are asked, and the first one again as often as products in 8 bits need it."""
        asked_BK = asked_BK.long()
        if not isinstance(block.mlp.down, Linear8):
            return asked_BK
        return F.pad(asked_BK, (0, more_places(*asked_BK.shape)))

    def enter(self, x: Tensor) -> Tensor:
        """What the first block takes: under autocast float32, or what its products are in where `residual` says so."""
        kind = x.device.type
        exact = self.num_layers and self.layers[0].mlp.down.weight.dtype == torch.float32
        if not exact or kind == "meta" or not torch.is_autocast_enabled(kind):
            return x
        return x.to(self.residual if torch.get_autocast_dtype(kind) == self.residual else torch.float32)

    def sights(
        self,
        x: Tensor,
        doc: Tensor | None,
        rank: Tensor | None,
        position: Tensor | None = None,
        seen: list[Tensor] | None = None,
        segment: Tensor | None = None,
    ) -> tuple[Sight, Sight]:
        """Who sees whom: in most layers, and in those with a window."""
        T, window = x.shape[1], self.config.window
        score, far = (None, 0) if self.score is None else (self.score(T, T), self.score.far)
        remembered = self.memory.size if self.memory is not None else 0
        places = self.shared(x, T + remembered, segment) if self.shared is not None else None
        wide = see(self.causal, doc, rank, score=score, far=far)._replace(seen=seen, places=places)
        if self.memory is not None:
            assert places is not None, "only a stack that counts distances can tell how far back its memory is"
            wide = self.memory.widen(wide, T)
        wide = wide._replace(turn=make_turn(self.config, position, x))
        if window is None:
            return wide, wide
        assert self.memory is None, "a window does not know how far back its memory is"
        wide = wide if wide.reach is None else wide._replace(reach=wide.reach.as_interval())
        near = Near(torch.arange(T, device=x.device), window.size // 2)
        narrow = see(self.causal, doc, rank, score=score, near=near, far=far)
        return wide, narrow._replace(turn=make_turn(self.config, position, x, local=True), seen=seen, places=places)

    def is_narrow(self, layer: int) -> bool:
        return self.config.window is not None and layer % self.config.window.every != 0

    def run(
        self,
        block: Block,
        x: Tensor,
        sight: Sight,
        read: Tensor | None,
        read_sight: Sight,
        content: Tensor | None = None,
        before: Tensor | None = None,
        times: int = 1,
    ) -> Any:
        """One block; in training it may be left out at random, or computed again later."""
        if self.checkpointing and self.training:
            y = checkpoint(block, x, sight, read, read_sight, content, before, times, use_reentrant=False)
        else:
            y = block(x, sight, read, read_sight, content, before, times)
        if not (self.training and self.config.layer_drop):
            return y
        return torch.where(torch.rand((), device=x.device) < self.config.layer_drop, x, y)

    def in_pairs(self, block: Block, x: Tensor) -> bool:
        """Whether a block gives its states twice; not where anybody but the next block reads them."""
        alone = self.memory is None and self.convolution is None and not self.config.layer_drop
        return alone and torch.compiler.is_compiling() and block.in_pairs(x)

    @property
    def layers(self) -> list[Block]:
        """The blocks in the order in which they run; layers that share one run it again."""
        return [cast(Block, self.blocks[i // self.num_shared]) for i in range(self.num_layers)]

    @part
    def finish(self, x: Tensor) -> Tensor:
        return self.drop(x if self.final_norm is None else self.final_norm(x))
