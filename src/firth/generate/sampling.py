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

from firth.generate.config import GenerationConfig
from firth.models import ForcedTokens
from firth.objectives import CounterRNG

TokenIds = Sequence[int]
NEG_INF = float("-inf")


class LogitsProcessor:
    """What was read and written in each row, as far as the choice of the next token depends on it.

    Each of `eos_ids` ends a text. `budgets` is how many tokens each row can have; where it is not given, all that the
    decoding allows.
    """

    def __init__(
        self,
        prompts: Sequence[TokenIds],
        generation_config: GenerationConfig,
        eos_ids: TokenIds,
        vocab_size: int,
        device: torch.device,
        forced: ForcedTokens | None = None,
        budgets: Sequence[int] | None = None,
    ) -> None:
        self.generation_config, self.eos_ids, self.forced = generation_config, eos_ids, forced or ForcedTokens()
        self.eos_E = torch.tensor([i for i in eos_ids if i < vocab_size], dtype=torch.long, device=device)
        budgets = [generation_config.max_new_tokens] * len(prompts) if budgets is None else budgets
        self.min_budget, self.budget_B = min(budgets), torch.tensor(budgets, device=device)
        self.history = [list(ids) for ids in prompts] if generation_config.no_repeat_ngram_size else None
        self.seen_BV = (
            seen_tokens(prompts, vocab_size).to(device) if generation_config.repetition_penalty != 1 else None
        )

    def process(self, scores_BV: Tensor, step: int) -> Tensor:
        """Scores of the next token, the `step`-th that is written, after what has been before."""
        if self.seen_BV is not None:
            scores_BV = apply_repetition_penalty(scores_BV, self.seen_BV, self.generation_config.repetition_penalty)
        if self.history is not None:
            scores_BV = ban_repeated_ngrams(scores_BV, self.history, self.generation_config.no_repeat_ngram_size)
        if step < self.generation_config.min_new_tokens:
            scores_BV = scores_BV.index_fill(1, self.eos_E, NEG_INF)
        if self.forced.bos is not None and step == 0:
            scores_BV = force_token(scores_BV, self.forced.bos)
        if self.forced.eos is not None and step + 1 >= self.min_budget:
            last_B1 = (self.budget_B == step + 1)[:, None]
            scores_BV = torch.where(last_B1, force_token(scores_BV, self.forced.eos), scores_BV)
        return scores_BV

    def is_eos(self, token: Tensor) -> Tensor:
        """Which of these tokens end their texts."""
        return (token[..., None] == self.eos_E).any(-1)

    def append(self, token_B: Tensor) -> None:
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, token_B[:, None], True)
        if self.history is not None:
            for ids, token in zip(self.history, token_B.tolist(), strict=True):
                ids.append(token)

    def select_rows(self, row_B: Tensor) -> None:
        """Go on with these rows."""
        self.budget_B = self.budget_B[row_B]
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[row_B]
        if self.history is not None:
            self.history = [list(self.history[row]) for row in row_B.tolist()]


def seen_tokens(sequences: Sequence[TokenIds], vocab_size: int) -> Tensor:
    """(B, V): true for the tokens that a row has."""
    seen_BV = torch.zeros(len(sequences), vocab_size, dtype=torch.bool)
    for row, ids in enumerate(sequences):
        seen_BV[row, [i for i in ids if i < vocab_size]] = True
    return seen_BV


def force_token(scores_BV: Tensor, token: int) -> Tensor:
    """This token for sure; the scores as they are where there is no such token."""
    if token >= scores_BV.shape[1]:
        return scores_BV
    return torch.full_like(scores_BV, NEG_INF).index_fill(1, torch.tensor([token], device=scores_BV.device), 0.0)


def apply_repetition_penalty(scores_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Less for tokens that were seen: above 0 divided by the penalty, below 0 multiplied (CTRL, section 4.1)."""
    lower_BV = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
    return torch.where(seen_BV, lower_BV, scores_BV)


def ban_repeated_ngrams(scores_BV: Tensor, rows: Sequence[TokenIds], n: int) -> Tensor:
    """Nothing for tokens that would write n tokens in a row that the row has already."""
    again = [
        (row, token)
        for row, ids in enumerate(rows)
        for token in ngram_continuations(ids, n)
        if token < scores_BV.shape[1]
    ]
    if not again:
        return scores_BV
    rows_N, tokens_N = torch.tensor(again, device=scores_BV.device).T
    return scores_BV.index_put((rows_N, tokens_N), scores_BV.new_tensor(NEG_INF))


def ngram_continuations(ids: TokenIds, n: int) -> list[int]:
    """What came after the latest n - 1 tokens, wherever they stood before.

    >>> ngram_continuations([1, 2, 3, 1, 2], 3)
    [3]
    """
    last = list(ids[len(ids) - n + 1 :])
    return [ids[i + n - 1] for i in range(len(ids) - n + 1) if list(ids[i : i + n - 1]) == last]


# --- drawing ------------------------------------------------------------------------------------------------------


def warp_logits(scores_BV: Tensor, generation_config: GenerationConfig) -> Tensor:
    """Scores to draw from: divided by the temperature, -inf for what is left out."""
    scores_BV = scores_BV / generation_config.temperature
    if generation_config.top_k:
        kth_B1 = scores_BV.topk(min(generation_config.top_k, scores_BV.shape[1])).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < kth_B1, NEG_INF)
    if generation_config.top_p < 1:
        scores_BV = keep_top_p(scores_BV, generation_config.top_p)
    if generation_config.min_p:
        floor_B1 = scores_BV.amax(-1, keepdim=True) + math.log(generation_config.min_p)
        scores_BV = scores_BV.masked_fill(scores_BV < floor_B1, NEG_INF)
    return scores_BV


def keep_top_p(scores_BV: Tensor, top_p: float) -> Tensor:
    """Only the likeliest tokens that together have this share of the probability, and the likeliest in any case."""
    sorted_BV, token_BV = scores_BV.sort(stable=True)
    out_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - top_p
    out_BV[:, -1] = False
    return scores_BV.masked_fill(out_BV.scatter(1, token_BV, out_BV), NEG_INF)


def sample_from_uniform(scores_BV: Tensor, u_B1: Tensor) -> Tensor:
    """(B,): the token at which the probabilities, added up in the order of the vocabulary, pass `u` in [0, 1)."""
    share_BV = scores_BV.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(share_BV, u_B1.double() * share_BV[:, -1:], right=True)[:, 0]


class TokenSampler:
    """The next token of each row."""

    def __init__(self, logits_processor: LogitsProcessor, rows: Sequence[int]) -> None:
        self.logits_processor, self.generation_config, self.rows = (
            logits_processor,
            logits_processor.generation_config,
            np.array(rows),
        )

    def __call__(self, logits_BV: Tensor, step: int) -> Tensor:
        scores_BV = self.logits_processor.process(logits_BV, step)
        if self.generation_config.temperature == 0:
            return scores_BV.argmax(-1)
        return sample_from_uniform(
            warp_logits(scores_BV, self.generation_config), self.uniform(step).to(logits_BV.device)
        )

    def uniform(self, step: int) -> Tensor:
        """(B, 1) numbers in [0, 1) that depend on the seed, the row and the place."""
        draw = CounterRNG(self.generation_config.seed, self.rows)
        return torch.from_numpy(draw.uniform(f"token {step}", 1))

    def select_rows(self, row_B: Tensor) -> None:
        """Go on with these rows."""
        self.rows = self.rows[row_B.cpu().numpy()]
        self.logits_processor.select_rows(row_B)
