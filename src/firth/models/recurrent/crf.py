"""A chain of tags: which may follow which, learned together with what the words say (Lafferty et al. 2001).

A row holds the chains of several sentences, one after the other. B rows, K words, C tags.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEVER = -1e4  # the score of what cannot be


class CRF(nn.Module):
    """Scores of a tag after another, at the begin and at the end of a sentence, beside those of each word.

    `link` (B, K) says of each word whether it follows the one before it in its sentence, `used` (B, K) whether there is
    a word at all; unused slots come last.
    """

    def __init__(self, num_tags: int) -> None:
        super().__init__()
        self.follow = nn.Parameter(torch.zeros(num_tags, num_tags))  # from tag, to tag
        self.begin = nn.Parameter(torch.zeros(num_tags))
        self.end = nn.Parameter(torch.zeros(num_tags))

    def loss(self, score_BKC: Tensor, target_BK: Tensor, link_BK: Tensor, used_BK: Tensor) -> Tensor:
        """How unlikely the right tags are among all chains, summed. Words of no known tag (below 0) may have any."""
        tags = torch.arange(score_BKC.shape[-1], device=score_BKC.device)
        wrong_BKC = (target_BK[..., None] >= 0) & (target_BK[..., None] != tags)
        right_BKC = score_BKC.masked_fill(wrong_BKC, NEVER)
        return self.total(score_BKC, link_BK, used_BK) - self.total(right_BKC, link_BK, used_BK)

    def total(self, score_BKC: Tensor, link_BK: Tensor, used_BK: Tensor) -> Tensor:
        """The log of the summed exponentials of all chains, added up over sentences (the forward algorithm)."""
        upto_BKC = self.forward_scores(score_BKC, link_BK, torch.logsumexp)
        last_BK = used_BK & ~F.pad(link_BK[:, 1:], (0, 1), value=False)
        return torch.where(last_BK, torch.logsumexp(upto_BKC + self.end, -1), 0.0).sum()

    def forward_scores(self, score_BKC: Tensor, link_BK: Tensor, join: Callable[[Tensor, int], Tensor]) -> Tensor:
        """(B, K, C): of the chains that reach a tag, joined into one number, the word itself included."""
        found: list[Tensor] = []
        for k in range(score_BKC.shape[1]):
            before_BC = self.begin.expand(len(score_BKC), -1)
            if found:
                reached_BC = join(found[-1][:, :, None] + self.follow, 1)
                before_BC = torch.where(link_BK[:, k, None], reached_BC, before_BC)
            found.append(before_BC + score_BKC[:, k])
        return torch.stack(found, 1)

    def backward_scores(self, score_BKC: Tensor, link_BK: Tensor, join: Callable[[Tensor, int], Tensor]) -> Tensor:
        """(B, K, C): of the chains that go on from a tag, without the word itself."""
        found: list[Tensor] = []
        for k in reversed(range(score_BKC.shape[1])):
            after_BC = self.end.expand(len(score_BKC), -1)
            if found:
                reached_BC = join(self.follow + (found[-1] + score_BKC[:, k + 1])[:, None, :], 2)
                after_BC = torch.where(link_BK[:, k + 1, None], reached_BC, after_BC)
            found.append(after_BC)
        return torch.stack(found[::-1], 1)

    def best(self, score_BKC: Tensor, link_BK: Tensor) -> Tensor:
        """(B, K, C): the score of the best chain through each tag. The highest ones are Viterbi's chain."""
        upto_BKC = self.forward_scores(score_BKC, link_BK, torch.amax)
        return upto_BKC + self.backward_scores(score_BKC, link_BK, torch.amax)


def links(asked_BK: Tensor, doc_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which slots follow the one before them in their sentence, and which are used: places rise in those."""
    used_BK = torch.ones_like(asked_BK, dtype=torch.bool)
    used_BK[:, 1:] = asked_BK[:, 1:] > asked_BK[:, :-1]
    used_BK = used_BK.long().cummin(1).values.bool()
    same_BK = used_BK.clone()
    same_BK[:, 0] = False
    if doc_BT is not None:
        doc_BK = doc_BT.gather(1, asked_BK)
        used_BK = used_BK & (doc_BK >= 0)
        same_BK[:, 1:] &= doc_BK[:, 1:] == doc_BK[:, :-1]
    return same_BK & used_BK, used_BK
