"""Beam search: the likeliest whole texts, several candidates at a time, with the scores of `transformers`.

B prompts, N beams, K candidates, L places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.generate.choose import Past
from firth.generate.reading import Reading
from firth.generate.room import FIRST_ROOM

FAR = -1e9  # the score of what is not there, or must not be taken
LOOK_EVERY = 8  # places: how often a GPU is asked whether the search is over

Found = tuple[list[int], bool, list[float], float]  # tokens, finished, logprobs, score


class Beams(NamedTuple):
    """Texts of each prompt, the best first. The numbers of a text stand in rows of equal length."""

    score: Tensor  # (B, N)
    token: Tensor  # (B, N, L)
    logprob: Tensor  # (B, N, L) by the model alone
    length: Tensor  # (B, N)
    ended: Tensor  # (B, N) by an end token or a stop string, not for want of places

    def pick(self, which_BK: Tensor) -> Beams:
        row_B1 = torch.arange(len(which_BK), device=which_BK.device)[:, None]
        return Beams(*(x[row_B1, which_BK] for x in self))

    def best(self, num: int, score_BK: Tensor | None = None) -> Beams:
        """So many of the best, by another score if that is given."""
        return self.pick((self.score if score_BK is None else score_BK).topk(num).indices)

    def longer(self, more: int) -> Beams:
        """With so many places more."""
        return self._replace(token=F.pad(self.token, (0, more)), logprob=F.pad(self.logprob, (0, more)))


def nothing(B: int, N: int, L: int, device: torch.device) -> Beams:
    return Beams(
        torch.full((B, N), FAR, device=device),
        torch.zeros(B, N, L, dtype=torch.long, device=device),
        torch.zeros(B, N, L, device=device),
        torch.zeros(B, N, dtype=torch.long, device=device),
        torch.zeros(B, N, dtype=torch.bool, device=device),
    )


def search(
    reading: Reading, logits_BV: Tensor, past: Past, stops: Callable[[int, Sequence[int]], bool] | None
) -> list[list[Found]]:
    """The best texts of each prompt. The candidates of a step leave enough to go on with, however many of them end."""
    decoding, device, (B, V) = past.decoding, logits_BV.device, logits_BV.shape
    N, room_B1, penalty = decoding.num_beams, past.room_B[:, None], decoding.length_penalty
    most, K = int(room_B1.max()), min(max(2, 1 + len(past.ends)) * N, V)
    L = min(most, FIRST_ROOM)
    first_BN = torch.arange(B, device=device).repeat_interleave(N)
    reading.take(first_BN)
    past.take(first_BN)
    logits_BV = logits_BV[first_BN]
    running, finished = nothing(B, N, L, device), nothing(B, N, L, device)
    running.score[:, 0] = 0.0  # all beams begin alike: only one of them may be continued
    full_BN = torch.zeros(B, N, dtype=torch.bool, device=device)  # which places of `finished` are taken
    open_B1 = torch.ones(B, 1, dtype=torch.bool, device=device)  # where something better may still come
    for place in range(most):
        if place == running.token.shape[2]:
            running, finished = running.longer(place), finished.longer(place)
        candidates, from_BK = continued(running, logits_BV, past, place, K)
        stopped_BK = find_stops(candidates, stops, device)
        ended_BK = candidates.ended | stopped_BK | (room_B1 <= place + 1)
        candidates = candidates._replace(ended=candidates.ended | stopped_BK)

        # those that go on
        on_BN = (candidates.score + FAR * ended_BK).topk(N).indices
        running = candidates._replace(score=candidates.score + FAR * ended_BK).pick(on_BN)

        # those that are finished: only the first N may be, the others are there to go on
        allowed_BK = ended_BK & open_B1 & (torch.arange(ended_BK.shape[1], device=device) < N)
        if decoding.early_stopping:
            allowed_BK &= ~full_BN.all(1, keepdim=True)
        done = candidates._replace(score=candidates.score / (place + 1) ** penalty + FAR * ~allowed_BK)
        merged = Beams(*(torch.cat(pair, 1) for pair in zip(finished, done, strict=True)))
        best_BN = merged.score.topk(N).indices
        full_BN = torch.cat([full_BN, allowed_BK], 1).gather(1, best_BN)
        finished = merged.pick(best_BN)

        # what may still come
        worst_B1 = finished.score.amin(1, keepdim=True).where(full_BN.all(1, keepdim=True), FAR)
        open_B1 = open_B1 & (running.score[:, :1] / (place + 1) ** penalty > worst_B1) & (room_B1 > place + 1)
        if place + 1 == most or (is_time(place, device, stops) and over(open_B1, full_BN, decoding.early_stopping)):
            break
        row_B = (from_BK.gather(1, on_BN) + N * torch.arange(B, device=device)[:, None]).flatten()
        token_B = running.token[:, :, place].flatten()
        reading.take(row_B, same_source=True)
        past.take(row_B)
        past.add(token_B)
        logits_BV = reading.next(token_B).float()
    return as_lists(finished.best(decoding.num_return_sequences), past.ends)


def continued(running: Beams, logits_BV: Tensor, past: Past, place: int, K: int) -> tuple[Beams, Tensor]:
    """The best continuations of all beams of a prompt, and which beam each continues."""
    B, N = running.score.shape
    plain_BNV = logits_BV.log_softmax(-1)
    adjusted_BNV = past.adjust(plain_BNV, place).unflatten(0, (B, N))
    score_BK, which_BK = (adjusted_BNV + running.score[:, :, None]).flatten(1).topk(K)
    V = logits_BV.shape[1]
    from_BK, token_BK = which_BK // V, which_BK % V
    found = running.pick(from_BK)
    found.token[:, :, place] = token_BK
    found.logprob[:, :, place] = plain_BNV.view(B, -1).gather(1, which_BK)
    return found._replace(score=score_BK, length=found.length + 1, ended=past.ended(token_BK)), from_BK


def find_stops(candidates: Beams, stops: Callable[[int, Sequence[int]], bool] | None, device: torch.device) -> Tensor:
    """(B, K): which candidates end with a string to stop at."""
    if stops is None:
        return torch.zeros_like(candidates.ended)
    length = int(candidates.length[0, 0])
    rows = candidates.token[:, :, :length].tolist()
    return torch.tensor([[stops(b, ids) for ids in texts] for b, texts in enumerate(rows)], device=device)


def is_time(place: int, device: torch.device, stops: object) -> bool:
    return device.type == "cpu" or stops is not None or place % LOOK_EVERY == LOOK_EVERY - 1


def over(open_B1: Tensor, full_BN: Tensor, early: bool) -> bool:
    return not bool(open_B1.any()) or (early and bool(full_BN.all()))


def as_lists(beams: Beams, ends: Sequence[int]) -> list[list[Found]]:
    """Each text without its end token, whose log-probability stays."""
    found = []
    for texts in zip(*(x.tolist() for x in beams), strict=True):
        found.append(
            [
                (ids[: length - (ids[length - 1] in ends)], ended, logprobs[:length], score)
                for score, ids, logprobs, length, ended in zip(*texts, strict=True)
            ]
        )
    return found
