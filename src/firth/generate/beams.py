"""Beam search: an approximate search for the likeliest sequences, with the scores of `transformers`.

Greedy decoding takes the best token at each step, and can miss a sequence that starts with a less likely one. Beam
search keeps the N best prefixes (beams) of each prompt. One step:

1. Expand: add the log-probabilities of all V next tokens to the score of each beam; take the K best of the N * V
   candidates. K is at least 2N (one EOS id), so that N of them continue even if the others end.
2. Continue: the N best candidates that have not ended are the new running beams. The KV cache rows are reordered to
   follow them.
3. Finish: ended candidates among the first N enter the finished list with score / length ** length_penalty, which
   offsets the preference for short sequences (Wu et al. 2016, section 7). The N best stay.
4. Stop when no running beam can beat the worst finished one. With `early_stopping`, stop at N finished ones.

A step costs N times a greedy one. All state stays on the device; the host checks for the end every few steps only,
because each check synchronizes with the GPU.

B prompts, N beams, K candidates, L positions, V vocabulary.
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

MASKED_BEAM_SCORE = -1e9  # score of empty slots and of candidates that must not be chosen
BEAM_CHECK_EVERY_STEPS = 8  # interval of the host's check for the end on a GPU

BeamResult = tuple[list[int], bool, list[float], float]  # tokens, finished, logprobs, score


class BeamState(NamedTuple):
    """Sequences of each prompt, the best first, padded to equal length."""

    score: Tensor  # (B, N)
    token: Tensor  # (B, N, L)
    logprob: Tensor  # (B, N, L) of the model, before logits processors
    length: Tensor  # (B, N)
    ended: Tensor  # (B, N) by an EOS token or a stop string, not by the length budget

    def gather(self, index_BK: Tensor) -> BeamState:
        row_B1 = torch.arange(len(index_BK), device=index_BK.device)[:, None]
        return BeamState(*(x[row_B1, index_BK] for x in self))

    def extend(self, num_positions: int) -> BeamState:
        """Append `num_positions` empty positions."""
        return self._replace(
            token=F.pad(self.token, (0, num_positions)), logprob=F.pad(self.logprob, (0, num_positions))
        )


class BeamStep(NamedTuple):
    """One step of the search, for those who watch it: the candidates, and what became of them."""

    candidates: BeamState  # (B, K)
    parent: Tensor  # (B, K) the beam that a candidate extends
    continued: Tensor  # (B, N) indices of the candidates that are the next beams
    ended: Tensor  # (B, K) whether it ended, the length budget included


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
    on_step: Callable[[BeamStep], None] | None = None,
) -> list[list[BeamResult]]:
    """Return the `num_return_sequences` best sequences of each prompt; `on_step` is shown each step."""
    config, device, (B, V) = logits_processor.generation_config, logits_BV.device, logits_BV.shape
    N, budget_B1, penalty = config.num_beams, logits_processor.budget_B[:, None], config.length_penalty
    max_steps, K = int(budget_B1.max()), min(max(2, 1 + len(logits_processor.eos_ids)) * N, V)
    L = min(max_steps, INITIAL_NEW_TOKENS)
    prompt_BN = torch.arange(B, device=device).repeat_interleave(N)
    decode_state.select_rows(prompt_BN)
    logits_processor.select_rows(prompt_BN)
    logits_BV = logits_BV[prompt_BN]
    running, finished = empty_beams(B, N, L, device), empty_beams(B, N, L, device)
    running.score[:, 0] = 0.0  # all beams start equal: expand one, or the N best would be N copies
    full_BN = torch.zeros(B, N, dtype=torch.bool, device=device)  # which slots of `finished` hold a sequence
    open_B1 = torch.ones(B, 1, dtype=torch.bool, device=device)  # prompts that can still improve
    for step in range(max_steps):
        if step == running.token.shape[2]:
            running, finished = running.extend(step), finished.extend(step)
        candidates, parent_BK = expand_beams(running, logits_BV, logits_processor, step, K)
        stopped_BK = match_stop_strings(candidates, stop_fn, device)
        ended_BK = candidates.ended | stopped_BK | (budget_B1 <= step + 1)
        candidates = candidates._replace(ended=candidates.ended | stopped_BK)

        # continue: the N best that have not ended
        running_score_BK = candidates.score + MASKED_BEAM_SCORE * ended_BK
        next_BN = running_score_BK.topk(N).indices
        running = candidates._replace(score=running_score_BK).gather(next_BN)
        if on_step is not None:
            on_step(BeamStep(candidates, parent_BK, next_BN, ended_BK))

        # finish: only the first N candidates may, the others exist to continue
        allowed_BK = ended_BK & open_B1 & (torch.arange(ended_BK.shape[1], device=device) < N)
        if config.early_stopping:
            allowed_BK &= ~full_BN.all(1, keepdim=True)
        done = candidates._replace(score=candidates.score / (step + 1) ** penalty + MASKED_BEAM_SCORE * ~allowed_BK)
        merged = BeamState(*(torch.cat(pair, 1) for pair in zip(finished, done, strict=True)))
        best_BN = merged.score.topk(N).indices
        full_BN = torch.cat([full_BN, allowed_BK], 1).gather(1, best_BN)
        finished = merged.gather(best_BN)

        # stop: compare the best running beam with the worst finished one
        worst_B1 = finished.score.amin(1, keepdim=True).where(full_BN.all(1, keepdim=True), MASKED_BEAM_SCORE)
        open_B1 = open_B1 & (running.score[:, :1] / (step + 1) ** penalty > worst_B1) & (budget_B1 > step + 1)
        if step + 1 == max_steps or (
            should_check_finished(step, device, stop_fn) and is_search_finished(open_B1, full_BN, config.early_stopping)
        ):
            break
        row_B = (parent_BK.gather(1, next_BN) + N * torch.arange(B, device=device)[:, None]).flatten()
        token_B = running.token[:, :, step].flatten()
        decode_state.select_rows(row_B, same_prompt=True)
        logits_processor.select_rows(row_B)
        logits_processor.append(token_B)
        logits_BV = decode_state.decode_step(token_B).float()
    return beams_to_lists(
        finished.gather(finished.score.topk(config.num_return_sequences).indices), logits_processor.eos_ids
    )


def expand_beams(
    running: BeamState, logits_BV: Tensor, logits_processor: LogitsProcessor, step: int, K: int
) -> tuple[BeamState, Tensor]:
    """Return the K best continuations of a prompt's beams, and the beam (B, K) that each extends."""
    B, N = running.score.shape
    logprob_BNV = logits_BV.log_softmax(-1)
    processed_BNV = logits_processor.process(logprob_BNV, step).unflatten(0, (B, N))
    score_BK, flat_BK = (processed_BNV + running.score[:, :, None]).flatten(1).topk(K)
    V = logits_BV.shape[1]
    parent_BK, token_BK = flat_BK // V, flat_BK % V
    beams = running.gather(parent_BK)
    beams.token[:, :, step] = token_BK
    beams.logprob[:, :, step] = logprob_BNV.view(B, -1).gather(1, flat_BK)
    return beams._replace(score=score_BK, length=beams.length + 1, ended=logits_processor.is_eos(token_BK)), parent_BK


def match_stop_strings(
    candidates: BeamState, stop_fn: Callable[[int, Sequence[int]], bool] | None, device: torch.device
) -> Tensor:
    """(B, K): which candidates contain a stop string."""
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
    """Return each sequence without its EOS token, whose log-probability stays."""
    return [
        [
            (ids[: length - (ids[length - 1] in eos_ids)], ended, logprobs[:length], score)
            for score, ids, logprobs, length, ended in zip(*sequences, strict=True)
        ]
        for sequences in zip(*(x.tolist() for x in beams), strict=True)
    ]
