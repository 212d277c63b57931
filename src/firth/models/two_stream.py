"""XLNet: the same blocks driven twice.

B rows, T places, K asked places, D model width, E width of the token vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from firth.models.attention import Sight, make_reach
from firth.models.config import ModelConfig
from firth.models.embed import Embedding
from firth.models.heads import pick
from firth.models.stack import Stack


class TwoStream(nn.Module):
    """Answers at places whose tokens are not seen (Yang et al. 2019, section 2.3).

    The content stream reads as always. The query stream begins with one learned vector and its place, for the asked
    places alone, and reads the content of those that come earlier in the order of prediction.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(1, 1, config.embed_width))

    def forward(self, embed: Embedding, stack: Stack, batch: Any) -> Tensor:
        """The query stream's last states (B, K, D)."""
        asked_BK = batch.asked
        rank_BT = asked_last(batch.tokens, asked_BK) if batch.rank is None else batch.rank
        position_BK = asked_BK if batch.position is None else pick(batch.position, asked_BK)
        segment_BK = None if batch.segment is None else pick(batch.segment, asked_BK)
        vector_BKE = self.vector.expand(*asked_BK.shape, -1)

        content = stack.enter(embed(batch.tokens, batch.position, batch.segment))
        upto, _ = stack.sights(content, batch.doc, rank_BT, segment=batch.segment)
        earlier = see_earlier(batch.doc, rank_BT, asked_BK)
        if upto.places is not None:
            earlier = earlier._replace(places=upto.places.at(asked_BK))
        memory = stack.memory
        if memory is not None:
            earlier = memory.widen(earlier, content.shape[1])
        query = stack.enter(embed.widen(embed.place(vector_BKE, position_BK, segment_BK)))
        for i, block in enumerate(stack.layers):
            keys = block.keys_of(content if memory is None else memory.prolong(i, content))
            query = block(query, earlier, content=keys)
            if i < stack.num_layers - 1:
                content = block(content, upto, content=keys)
        return stack.finish(query)


def asked_last(tokens_BT: Tensor, asked_BK: Tensor) -> Tensor:
    """The order where none is given: all that is asked comes after all that is not, so each is guessed by itself."""
    return torch.zeros_like(tokens_BT).scatter(1, asked_BK, 1)


def see_earlier(doc_BT: Tensor | None, rank_BT: Tensor, asked_BK: Tensor) -> Sight:
    """Who asks at some places sees those of its document with a lower rank, and so never its own token."""
    mask_BKT = rank_BT[:, None, :] < pick(rank_BT, asked_BK)[:, :, None]
    if doc_BT is not None:
        mask_BKT = mask_BKT & (doc_BT[:, None, :] == pick(doc_BT, asked_BK)[:, :, None])
    reach = make_reach(False, doc_BT, rank_BT, strict=True)
    return Sight(mask=mask_BKT[:, None], some_see_nobody=True, reach=None if reach is None else reach.at(asked_BK))
