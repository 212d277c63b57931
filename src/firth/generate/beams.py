"""Beam search: the likeliest whole texts, several candidates at a time, with the scores of `transformers`.

B prompts, N beams, K candidates, L places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.generate.decode_state import DecodeState
from firth.generate.length_budget import INITIAL_NEW_TOKENS
from firth.generate.sampling import LogitsProcessor

MASKED_BEAM_SCORE = -1e9  # the score of what is not there, or must not be taken
BEAM_CHECK_EVERY_STEPS = 8  # places: how often a GPU is asked whether the search is over

BeamResult = tuple[list[int], bool, list[float], float]  # tokens, finished, logprobs, score


class BeamState(NamedTuple):
    """Texts of each prompt, the best first. The numbers of a text stand in rows of equal length."""

    score: Tensor  # (B, N)
    token: Tensor  # (B, N, L)
    logprob: Tensor  # (B, N, L) by the model alone
    length: Tensor  # (B, N)
    ended: Tensor  # (B, N) by an end token or a stop string, not for want of places

    def gather(self, index_BK: Tensor) -> BeamState:
        row_B1 = torch.arange(len(index_BK), device=index_BK.device)[:, None]
        return BeamState(*(x[row_B1, index_BK] for x in self))

    def top_beams(self, num_beams: int, score_BK: Tensor | None = None) -> BeamState:
        """So many of the best, by another score if that is given."""
        return self.gather((self.score if score_BK is None else score_BK).topk(num_beams).indices)

    def extend(self, num_positions: int) -> BeamState:
        """With so many places more."""
        return self._replace(
            token=F.pad(self.token, (0, num_positions)), logprob=F.pad(self.logprob, (0, num_positions))
        )


def empty_beams(B: int, N: int, L: int, device: torch.device) -> BeamState:
    return BeamState(
        torch.full((B, N), MASKED_BEAM_SCORE, device=device),
        torch.zeros(B, N, L, dtype=torch.long, device=device),
        torch.zeros(B, N, L, device=device),
        torch.zeros(B, N, dtype=torch.long, device=device),
        torch.zeros(B, N, dtype=torch.bool, device=device),
    )


def beam_search(
    decode_state: DecodeState,
    logits_BV: Tensor,
    logits_processor: LogitsProcessor,
    stop_fn: Callable[[int, Sequence[int]], bool] | None,
) -> list[list[BeamResult]]:
    """The best texts of each prompt. The candidates of a step leave enough to go on with, however many of them end."""
    decoding, device, (B, V) = logits_processor.generation_config, logits_BV.device, logits_BV.shape
    N, room_B1, penalty = decoding.num_beams, logits_processor.budget_B[:, None], decoding.length_penalty
    most, K = int(room_B1.max()), min(max(2, 1 + len(logits_processor.eos_ids)) * N, V)
    L = min(most, INITIAL_NEW_TOKENS)
    first_BN = torch.arange(B, device=device).repeat_interleave(N)
    decode_state.select_rows(first_BN)
    logits_processor.select_rows(first_BN)
    logits_BV = logits_BV[first_BN]
    running, finished = empty_beams(B, N, L, device), empty_beams(B, N, L, device)
    running.score[:, 0] = 0.0  # all beams begin alike: only one of them may be continued
    full_BN = torch.zeros(B, N, dtype=torch.bool, device=device)  # which places of `finished` are taken
    open_B1 = torch.ones(B, 1, dtype=torch.bool, device=device)  # where something better may still come
    for place in range(most):
        if place == running.token.shape[2]:
            running, finished = running.extend(place), finished.extend(place)
        candidates, from_BK = expand_beams(running, logits_BV, logits_processor, place, K)
        stopped_BK = match_stop_strings(candidates, stop_fn, device)
        ended_BK = candidates.ended | stopped_BK | (room_B1 <= place + 1)
        candidates = candidates._replace(ended=candidates.ended | stopped_BK)

        # those that go on
        on_BN = (candidates.score + MASKED_BEAM_SCORE * ended_BK).topk(N).indices
        running = candidates._replace(score=candidates.score + MASKED_BEAM_SCORE * ended_BK).gather(on_BN)

        # those that are finished: only the first N may be, the others are there to go on
        allowed_BK = ended_BK & open_B1 & (torch.arange(ended_BK.shape[1], device=device) < N)
        if decoding.early_stopping:
            allowed_BK &= ~full_BN.all(1, keepdim=True)
        done = candidates._replace(score=candidates.score / (place + 1) ** penalty + MASKED_BEAM_SCORE * ~allowed_BK)
        merged = BeamState(*(torch.cat(pair, 1) for pair in zip(finished, done, strict=True)))
        best_BN = merged.score.topk(N).indices
        full_BN = torch.cat([full_BN, allowed_BK], 1).gather(1, best_BN)
        finished = merged.gather(best_BN)

        # what may still come
        worst_B1 = finished.score.amin(1, keepdim=True).where(full_BN.all(1, keepdim=True), MASKED_BEAM_SCORE)
        open_B1 = open_B1 & (running.score[:, :1] / (place + 1) ** penalty > worst_B1) & (room_B1 > place + 1)
        if place + 1 == most or (
            should_check_finished(place, device, stop_fn)
            and is_search_finished(open_B1, full_BN, decoding.early_stopping)
        ):
            break
        row_B = (from_BK.gather(1, on_BN) + N * torch.arange(B, device=device)[:, None]).flatten()
        token_B = running.token[:, :, place].flatten()
        decode_state.select_rows(row_B, same_prompt=True)
        logits_processor.select_rows(row_B)
        logits_processor.append(token_B)
        logits_BV = decode_state.decode_step(token_B).float()
    return beams_to_lists(finished.top_beams(decoding.num_return_sequences), logits_processor.eos_ids)


def expand_beams(
    running: BeamState, logits_BV: Tensor, logits_processor: LogitsProcessor, step: int, K: int
) -> tuple[BeamState, Tensor]:
    """The best continuations of all beams of a prompt, and which beam each continues."""
    B, N = running.score.shape
    plain_BNV = logits_BV.log_softmax(-1)
    adjusted_BNV = logits_processor.process(plain_BNV, step).unflatten(0, (B, N))
    score_BK, which_BK = (adjusted_BNV + running.score[:, :, None]).flatten(1).topk(K)
    V = logits_BV.shape[1]
    from_BK, token_BK = which_BK // V, which_BK % V
    found = running.gather(from_BK)
    found.token[:, :, step] = token_BK
    found.logprob[:, :, step] = plain_BNV.view(B, -1).gather(1, which_BK)
    return found._replace(score=score_BK, length=found.length + 1, ended=logits_processor.is_eos(token_BK)), from_BK


def match_stop_strings(
    candidates: BeamState, stop_fn: Callable[[int, Sequence[int]], bool] | None, device: torch.device
) -> Tensor:
    """(B, K): which candidates end with a string to stop at."""
    if stop_fn is None:
        return torch.zeros_like(candidates.ended)
    length = int(candidates.length[0, 0])
    rows = candidates.token[:, :, :length].tolist()
    return torch.tensor([[stop_fn(b, ids) for ids in texts] for b, texts in enumerate(rows)], device=device)


def should_check_finished(step: int, device: torch.device, stop_fn: object) -> bool:
    return device.type == "cpu" or stop_fn is not None or step % BEAM_CHECK_EVERY_STEPS == BEAM_CHECK_EVERY_STEPS - 1


def is_search_finished(open_B1: Tensor, full_BN: Tensor, early_stopping: bool) -> bool:
    return not bool(open_B1.any()) or (early_stopping and bool(full_BN.all()))


def beams_to_lists(beams: BeamState, eos_ids: Sequence[int]) -> list[list[BeamResult]]:
    """Each text without its end token, whose log-probability stays."""
    found = []
    for texts in zip(*(x.tolist() for x in beams), strict=True):
        found.append(
            [
                (ids[: length - (ids[length - 1] in eos_ids)], ended, logprobs[:length], score)
                for score, ids, logprobs, length, ended in zip(*texts, strict=True)
            ]
        )
    return found
