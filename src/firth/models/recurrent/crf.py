"""A chain of tags: which may follow which, learned together with what the words say (Lafferty et al. 2001).

A row holds the chains of several sentences, one after the other. B rows, K words, C tags.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMPOSSIBLE_SCORE = -1e4  # the score of what cannot be


class CRF(nn.Module):
    """Scores of a tag after another, at the begin and at the end of a sentence, beside those of each word.

    `link` (B, K) says of each word whether it follows the one before it in its sentence, `used` (B, K) whether there is
    a word at all; unused slots come last.
    """

    def __init__(self, num_tags: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(num_tags, num_tags))  # from tag, to tag
        self.start_transitions = nn.Parameter(torch.zeros(num_tags))
        self.end_transitions = nn.Parameter(torch.zeros(num_tags))

    def loss(self, emissions_BKC: Tensor, tags_BK: Tensor, link_BK: Tensor, mask_BK: Tensor) -> Tensor:
        """How unlikely the right tags are among all chains, summed. Words of no known tag (below 0) may have any."""
        tags = torch.arange(emissions_BKC.shape[-1], device=emissions_BKC.device)
        wrong_BKC = (tags_BK[..., None] >= 0) & (tags_BK[..., None] != tags)
        right_BKC = emissions_BKC.masked_fill(wrong_BKC, IMPOSSIBLE_SCORE)
        return self.log_partition(emissions_BKC, link_BK, mask_BK) - self.log_partition(right_BKC, link_BK, mask_BK)

    def log_partition(self, emissions_BKC: Tensor, link_BK: Tensor, mask_BK: Tensor) -> Tensor:
        """The log of the summed exponentials of all chains, added up over sentences (the forward algorithm)."""
        upto_BKC = self.forward_scores(emissions_BKC, link_BK, torch.logsumexp)
        last_BK = mask_BK & ~F.pad(link_BK[:, 1:], (0, 1), value=False)
        return torch.where(last_BK, torch.logsumexp(upto_BKC + self.end_transitions, -1), 0.0).sum()

    def forward_scores(
        self, emissions_BKC: Tensor, link_BK: Tensor, reduce_fn: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """(B, K, C): of the chains that reach a tag, joined into one number, the word itself included."""
        found: list[Tensor] = []
        for k in range(emissions_BKC.shape[1]):
            before_BC = self.start_transitions.expand(len(emissions_BKC), -1)
            if found:
                reached_BC = reduce_fn(found[-1][:, :, None] + self.transitions, 1)
                before_BC = torch.where(link_BK[:, k, None], reached_BC, before_BC)
            found.append(before_BC + emissions_BKC[:, k])
        return torch.stack(found, 1)

    def backward_scores(
        self, emissions_BKC: Tensor, link_BK: Tensor, reduce_fn: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """(B, K, C): of the chains that go on from a tag, without the word itself."""
        found: list[Tensor] = []
        for k in reversed(range(emissions_BKC.shape[1])):
            after_BC = self.end_transitions.expand(len(emissions_BKC), -1)
            if found:
                reached_BC = reduce_fn(self.transitions + (found[-1] + emissions_BKC[:, k + 1])[:, None, :], 2)
                after_BC = torch.where(link_BK[:, k + 1, None], reached_BC, after_BC)
            found.append(after_BC)
        return torch.stack(found[::-1], 1)

    def max_marginals(self, emissions_BKC: Tensor, link_BK: Tensor) -> Tensor:
        """(B, K, C): the score of the best chain through each tag. The highest ones are Viterbi's chain."""
        upto_BKC = self.forward_scores(emissions_BKC, link_BK, torch.amax)
        return upto_BKC + self.backward_scores(emissions_BKC, link_BK, torch.amax)


def tag_chain_masks(target_positions_BK: Tensor, document_ids_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which slots follow the one before them in their sentence, and which are used: places rise in those."""
    used_BK = torch.ones_like(target_positions_BK, dtype=torch.bool)
    used_BK[:, 1:] = target_positions_BK[:, 1:] > target_positions_BK[:, :-1]
    used_BK = used_BK.long().cummin(1).values.bool()
    same_BK = used_BK.clone()
    same_BK[:, 0] = False
    if document_ids_BT is not None:
        doc_BK = document_ids_BT.gather(1, target_positions_BK)
        used_BK = used_BK & (doc_BK >= 0)
        same_BK[:, 1:] &= doc_BK[:, 1:] == doc_BK[:, :-1]
    return same_BK & used_BK, used_BK
