"""What a decoder remembers of the text so far, so that a new token costs one place and not the whole row.

Keys and values stand in tensors that have room, each at the place of its token, and are written place by place. Rows
of different length are padded on the right: what is written on replaces the padding, which nothing has seen.

B rows, T places of the prompts, S places in all, H heads, G heads of keys and values, d numbers per head, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.attention import Keep, Keys, Sight, see
from firth.models.block import Block
from firth.models.config import Disentangled, ModelConfig, Shaw, TransformerXL
from firth.models.position import make_turn
from firth.models.stack import Stack


def can_cache(config: ModelConfig) -> bool:
    """Whether a new place leaves the keys, values and scores of those before as they are, place by place."""
    return config.recurrent is None and not isinstance(config.position, TransformerXL | Disentangled)


class Kept:
    """The keys and values of one layer, (B, G, S, d)."""

    k: Tensor
    v: Tensor

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def begin(self, k_BGTd: Tensor, v_BGTd: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the prompts, which read each other as ever."""
        B, G, T, d = k_BGTd.shape
        self.k, self.v = k_BGTd.new_zeros(B, G, self.cache.size, d), v_BGTd.new_zeros(B, G, self.cache.size, d)
        self.k[:, :, :T], self.v[:, :, :T] = k_BGTd, v_BGTd
        return k_BGTd, v_BGTd

    def add(self, k_BG1d: Tensor, v_BG1d: Tensor) -> tuple[Tensor, Tensor]:
        """Write one more place of each row, and read all of them."""
        width, place_B = self.cache.width, self.cache.place_B
        if self.cache.even:
            self.k[:, :, width : width + 1], self.v[:, :, width : width + 1] = k_BG1d, v_BG1d
        else:
            row_B = torch.arange(len(place_B), device=place_B.device)
            self.k[row_B, :, place_B], self.v[row_B, :, place_B] = k_BG1d[:, :, 0], v_BG1d[:, :, 0]
        S = self.cache.num_read
        return self.k[:, :, :S], self.v[:, :, :S]

    def grow(self, size: int) -> None:
        self.k, self.v = (F.pad(x, (0, 0, 0, size - x.shape[2])) for x in (self.k, self.v))


class Cache:
    """The memory of one stack for rows that are read on, one token at a time.

    `size` is the number of places there is room for, until they `grow`. With `fixed` all of them are read at every
    step, those not written yet unseen, so that no shape changes and a GPU can replay the step (CUDA graphs); else only
    those that some row has reached.
    """

    def __init__(self, stack: Stack, size: int, fixed: bool = False) -> None:
        assert can_cache(stack.config), "the caller asks that first"
        assert stack.memory is None, "a stack has one memory or the other"
        self.stack, self.size, self.fixed = stack, size, fixed
        self.layers = [Kept(self) for _ in stack.layers]
        self.across: list[Keys | None] = [None for _ in stack.layers]
        self.across_sight = Sight()

    @property
    def num_read(self) -> int:
        return self.size if self.fixed else self.width + 1

    def begin(
        self, x_BTD: Tensor, lengths: Sequence[int], read: Tensor | None = None, read_doc: Tensor | None = None
    ) -> Tensor:
        """The states (B, T, D) of prompts of these lengths. `read` is the sequence that the stack reads too."""
        B, self.width = x_BTD.shape[:2]  # of the longest row
        self.even = len(set(lengths)) == 1 and not self.fixed
        self.place_B = torch.tensor(lengths, device=x_BTD.device)  # where the next token stands
        self.falls = self.scores_by_distance()
        if read is not None:
            self.across = [keys_across(block, read) for block in self.stack.layers]
        if read_doc is not None:
            self.across_sight = see(False, read_doc.new_zeros(B, 1), read_doc=read_doc)._replace(reach=None)
        sights = self.stack.sights(x_BTD, None, None)
        return self.run(x_BTD, sights, [layer.begin for layer in self.layers])

    def add(self, x_B1D: Tensor) -> Tensor:
        """The states (B, 1, D) of the next token of each row; `advance` follows."""
        return self.run(x_B1D, self.sights(x_B1D), [layer.add for layer in self.layers])

    def advance(self) -> None:
        """Go to the next place."""
        self.place_B += 1
        self.width += 1

    def grow(self, size: int) -> None:
        """Make room for more places. All tensors are others then."""
        self.size = size
        self.falls = self.scores_by_distance()
        for layer in self.layers:
            layer.grow(size)

    def take(self, row_B: Tensor, same_source: bool = False) -> None:
        """Go on with these rows; with `same_source` they only change with others that read the same."""
        for layer in self.layers:
            layer.k, layer.v = (taken(x, row_B, self.width) for x in (layer.k, layer.v))
        self.place_B = taken(self.place_B, row_B)
        if same_source:
            return
        self.across = [None if keys is None else Keys(*(taken(x, row_B) for x in keys)) for keys in self.across]
        if self.across_sight.mask is not None:
            self.across_sight = self.across_sight._replace(mask=taken(self.across_sight.mask, row_B))

    def run(self, x: Tensor, sights: tuple[Sight, Sight], keeps: Sequence[Keep]) -> Tensor:
        x = self.stack.enter(x)
        for i, (block, keep) in enumerate(zip(self.stack.layers, keeps, strict=True)):
            sight = sights[self.stack.is_narrow(i)]
            x = block(x, sight._replace(keep=keep), self.across[i], self.across_sight)
        return self.stack.finish(x)

    def sights(self, x_B1D: Tensor) -> tuple[Sight, Sight]:
        """What the new place of each row sees: in most layers, and in those with a window."""
        config, place_B = self.stack.config, self.place_B[:1] if self.even else self.place_B
        back_BS = place_B[:, None] - torch.arange(self.num_read, device=x_B1D.device)
        written_BS = None if self.even else back_BS >= 0
        score = None if self.falls is None else self.falls[:, back_BS.clamp(min=0)].transpose(0, 1)[:, :, None]
        places = back_BS if isinstance(config.position, Shaw) else None

        def sight(seen_BS: Tensor | None, local: bool) -> Sight:
            mask = None if seen_BS is None else seen_BS[:, None, None]
            masked = score if mask is None or score is None else score.masked_fill(~mask, float("-inf"))
            return Sight(mask=mask, score=masked, places=places, turn=make_turn(config, place_B[:, None], x_B1D, local))

        wide = sight(written_BS, local=False)
        if config.window is None:
            return wide, wide
        near_BS = back_BS <= config.window.size // 2
        return wide, sight(near_BS if written_BS is None else near_BS & written_BS, local=True)

    def scores_by_distance(self) -> Tensor | None:
        """(H, S): what the stack adds to the scores of what is so many places back."""
        return None if self.stack.score is None else self.stack.score(self.size, 1)[0, :, :, 0]


def keys_across(block: nn.Module, read_BSD: Tensor) -> Keys:
    assert isinstance(block, Block)
    return block.cross.keys_of(read_BSD)


def taken(x: Tensor, row_B: Tensor, width: int | None = None) -> Tensor:
    """Rows of a tensor: in place where there are as many as before. Nothing stands past `width` places."""
    if len(row_B) != len(x):
        return x[row_B]
    some = x if width is None else x[:, :, :width]
    some.copy_(some[row_B])
    return x
