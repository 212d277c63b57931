"""A linear-chain conditional random field over tags (Lafferty et al. 2001; for taggers Lample et al. 2016).

A softmax per word ignores that I-PER cannot follow B-LOC. A CRF scores a whole sequence of tags y:

    score(y) = start[y_1] + sum_k emission[k, y_k] + sum_k transition[y_k, y_k+1] + end[y_K]

and p(y) = exp(score(y)) / Z. Z sums over C^K sequences; the forward algorithm computes its log in K steps of (C, C)
because a score only couples neighbours. The loss is log Z - score(gold). Prediction replaces logsumexp by max
(Viterbi): forward and backward maxima give the best score through each tag, and its argmax is the best sequence.

A row holds several sentences, one after the other. B rows, K words, C tags.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMPOSSIBLE_SCORE = -1e4  # stands for minus infinity, without NaN in gradients


class CRF(nn.Module):
    """Transition scores, beside the emission scores that the head computes for each word.

    `link_BK`: whether a word follows the previous slot in its sentence. `mask_BK`: whether a slot has a word; unused
    slots come last.
    """

    def __init__(self, num_tags: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(num_tags, num_tags))  # from tag, to tag
        self.start_transitions = nn.Parameter(torch.zeros(num_tags))
        self.end_transitions = nn.Parameter(torch.zeros(num_tags))

    def loss(self, emissions_BKC: Tensor, tags_BK: Tensor, link_BK: Tensor, mask_BK: Tensor) -> Tensor:
        """Return the negative log-likelihood of the tags, summed; below 0 the tag is unknown: any is right."""
        tags = torch.arange(emissions_BKC.shape[-1], device=emissions_BKC.device)
        wrong_BKC = (tags_BK[..., None] >= 0) & (tags_BK[..., None] != tags)
        right_BKC = emissions_BKC.masked_fill(wrong_BKC, IMPOSSIBLE_SCORE)
        return self.log_partition(emissions_BKC, link_BK, mask_BK) - self.log_partition(right_BKC, link_BK, mask_BK)

    def log_partition(self, emissions_BKC: Tensor, link_BK: Tensor, mask_BK: Tensor) -> Tensor:
        """Return log Z, summed over sentences (the forward algorithm)."""
        upto_BKC = self.forward_scores(emissions_BKC, link_BK, torch.logsumexp)
        last_BK = mask_BK & ~F.pad(link_BK[:, 1:], (0, 1), value=False)
        return torch.where(last_BK, torch.logsumexp(upto_BKC + self.end_transitions, -1), 0.0).sum()

    def forward_scores(
        self, emissions_BKC: Tensor, link_BK: Tensor, reduce_fn: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """Return (B, K, C): the reduced scores of all prefixes that end in a tag, its emission included."""
        scores: list[Tensor] = []
        for k in range(emissions_BKC.shape[1]):
            before_BC = self.start_transitions.expand(len(emissions_BKC), -1)
            if scores:
                reached_BC = reduce_fn(scores[-1][:, :, None] + self.transitions, 1)
                before_BC = torch.where(link_BK[:, k, None], reached_BC, before_BC)
            scores.append(before_BC + emissions_BKC[:, k])
        return torch.stack(scores, 1)

    def backward_scores(
        self, emissions_BKC: Tensor, link_BK: Tensor, reduce_fn: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """Return (B, K, C): the reduced scores of all suffixes after a tag, without its own emission."""
        scores: list[Tensor] = []
        for k in reversed(range(emissions_BKC.shape[1])):
            after_BC = self.end_transitions.expand(len(emissions_BKC), -1)
            if scores:
                reached_BC = reduce_fn(self.transitions + (scores[-1] + emissions_BKC[:, k + 1])[:, None, :], 2)
                after_BC = torch.where(link_BK[:, k + 1, None], reached_BC, after_BC)
            scores.append(after_BC)
        return torch.stack(scores[::-1], 1)

    def max_marginals(self, emissions_BKC: Tensor, link_BK: Tensor) -> Tensor:
        """Return (B, K, C): the score of the best sequence through each tag; its argmax is Viterbi's sequence."""
        upto_BKC = self.forward_scores(emissions_BKC, link_BK, torch.amax)
        return upto_BKC + self.backward_scores(emissions_BKC, link_BK, torch.amax)


def tag_chain_masks(target_positions_BK: Tensor, document_ids_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `link_BK` and `mask_BK` (see `CRF`): positions increase over the used slots of a row."""
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
