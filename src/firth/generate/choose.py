"""Which token comes next: what is forbidden, what is made less likely, what is drawn.

Everything stays on the device of the logits, and works as in `transformers`, in the same order: the repetition penalty,
repeated n-grams, the end, what is forced, temperature, top_k, top_p, min_p.

B rows, V vocabulary, E end tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from firth.generate.decoding import Decoding
from firth.models import Forced
from firth.objectives import Draw

Ids = Sequence[int]
NEVER = float("-inf")


class Past:
    """What was read and written in each row, as far as the choice of the next token depends on it.

    Each of `ends` ends a text. `room` is how many tokens each row can have; where it is not given, all that the
    decoding allows.
    """

    def __init__(
        self,
        given: Sequence[Ids],
        decoding: Decoding,
        ends: Ids,
        vocab_size: int,
        device: torch.device,
        forced: Forced | None = None,
        room: Sequence[int] | None = None,
    ) -> None:
        self.decoding, self.ends, self.forced = decoding, ends, forced or Forced()
        self.end_E = torch.tensor([i for i in ends if i < vocab_size], dtype=torch.long, device=device)
        room = [decoding.max_new_tokens] * len(given) if room is None else room
        self.least, self.room_B = min(room), torch.tensor(room, device=device)
        self.ids = [list(ids) for ids in given] if decoding.no_repeat_ngram_size else None
        self.seen_BV = seen_tokens(given, vocab_size).to(device) if decoding.repetition_penalty != 1 else None

    def adjust(self, scores_BV: Tensor, place: int) -> Tensor:
        """Scores of the next token, the `place`-th that is written, after what has been before."""
        if self.seen_BV is not None:
            scores_BV = penalised(scores_BV, self.seen_BV, self.decoding.repetition_penalty)
        if self.ids is not None:
            scores_BV = without_repeats(scores_BV, self.ids, self.decoding.no_repeat_ngram_size)
        if place < self.decoding.min_new_tokens:
            scores_BV = scores_BV.index_fill(1, self.end_E, NEVER)
        if self.forced.bos is not None and place == 0:
            scores_BV = only(scores_BV, self.forced.bos)
        if self.forced.eos is not None and place + 1 >= self.least:
            last_B1 = (self.room_B == place + 1)[:, None]
            scores_BV = torch.where(last_B1, only(scores_BV, self.forced.eos), scores_BV)
        return scores_BV

    def ended(self, token: Tensor) -> Tensor:
        """Which of these tokens end their texts."""
        return (token[..., None] == self.end_E).any(-1)

    def add(self, token_B: Tensor) -> None:
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, token_B[:, None], True)
        if self.ids is not None:
            for ids, token in zip(self.ids, token_B.tolist(), strict=True):
                ids.append(token)

    def take(self, row_B: Tensor) -> None:
        """Go on with these rows."""
        self.room_B = self.room_B[row_B]
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[row_B]
        if self.ids is not None:
            self.ids = [list(self.ids[row]) for row in row_B.tolist()]


def seen_tokens(given: Sequence[Ids], vocab_size: int) -> Tensor:
    """(B, V): true for the tokens that a row has."""
    seen_BV = torch.zeros(len(given), vocab_size, dtype=torch.bool)
    for row, ids in enumerate(given):
        seen_BV[row, [i for i in ids if i < vocab_size]] = True
    return seen_BV


def only(scores_BV: Tensor, token: int) -> Tensor:
    """This token for sure; the scores as they are where there is no such token."""
    if token >= scores_BV.shape[1]:
        return scores_BV
    return torch.full_like(scores_BV, NEVER).index_fill(1, torch.tensor([token], device=scores_BV.device), 0.0)


def penalised(scores_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Less for tokens that were seen: above 0 divided by the penalty, below 0 multiplied (CTRL, section 4.1)."""
    lower_BV = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
    return torch.where(seen_BV, lower_BV, scores_BV)


def without_repeats(scores_BV: Tensor, rows: Sequence[Ids], n: int) -> Tensor:
    """Nothing for tokens that would write n tokens in a row that the row has already."""
    again = [(row, token) for row, ids in enumerate(rows) for token in followers(ids, n) if token < scores_BV.shape[1]]
    if not again:
        return scores_BV
    rows_N, tokens_N = torch.tensor(again, device=scores_BV.device).T
    return scores_BV.index_put((rows_N, tokens_N), scores_BV.new_tensor(NEVER))


def followers(ids: Ids, n: int) -> list[int]:
    """What came after the latest n - 1 tokens, wherever they stood before.

    >>> followers([1, 2, 3, 1, 2], 3)
    [3]
    """
    last = list(ids[len(ids) - n + 1 :])
    return [ids[i + n - 1] for i in range(len(ids) - n + 1) if list(ids[i : i + n - 1]) == last]


# --- drawing ------------------------------------------------------------------------------------------------------


def narrowed(scores_BV: Tensor, decoding: Decoding) -> Tensor:
    """Scores to draw from: divided by the temperature, -inf for what is left out."""
    scores_BV = scores_BV / decoding.temperature
    if decoding.top_k:
        kth_B1 = scores_BV.topk(min(decoding.top_k, scores_BV.shape[1])).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < kth_B1, NEVER)
    if decoding.top_p < 1:
        scores_BV = likeliest_share(scores_BV, decoding.top_p)
    if decoding.min_p:
        floor_B1 = scores_BV.amax(-1, keepdim=True) + math.log(decoding.min_p)
        scores_BV = scores_BV.masked_fill(scores_BV < floor_B1, NEVER)
    return scores_BV


def likeliest_share(scores_BV: Tensor, share: float) -> Tensor:
    """Only the likeliest tokens that together have this share of the probability, and the likeliest in any case."""
    sorted_BV, token_BV = scores_BV.sort(stable=True)
    out_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - share
    out_BV[:, -1] = False
    return scores_BV.masked_fill(out_BV.scatter(1, token_BV, out_BV), NEVER)


def drawn(scores_BV: Tensor, u_B1: Tensor) -> Tensor:
    """(B,): the token at which the probabilities, added up in the order of the vocabulary, pass `u` in [0, 1)."""
    share_BV = scores_BV.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(share_BV, u_B1.double() * share_BV[:, -1:], right=True)[:, 0]


class Chooser:
    """The next token of each row."""

    def __init__(self, past: Past, rows: Sequence[int]) -> None:
        self.past, self.decoding, self.rows = past, past.decoding, np.array(rows)

    def __call__(self, logits_BV: Tensor, place: int) -> Tensor:
        scores_BV = self.past.adjust(logits_BV, place)
        if self.decoding.temperature == 0:
            return scores_BV.argmax(-1)
        return drawn(narrowed(scores_BV, self.decoding), self.uniform(place).to(logits_BV.device))

    def uniform(self, place: int) -> Tensor:
        """(B, 1) numbers in [0, 1) that depend on the seed, the row and the place."""
        draw = Draw(self.decoding.seed, self.rows)
        return torch.from_numpy(draw.uniform(f"token {place}", 1))

    def take(self, row_B: Tensor) -> None:
        """Go on with these rows."""
        self.rows = self.rows[row_B.cpu().numpy()]
        self.past.take(row_B)
