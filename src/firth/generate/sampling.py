"""Choose the next token: logits processors, then greedy choice or sampling.

Logits pass through two stages, in the order of `transformers`. Processors (`LogitsProcessor`) apply always:
repetition penalty, banned n-grams, no EOS before `min_new_tokens`, the tokens that a grammar permits
(`constraint.py`), forced BOS and EOS. Warpers (`warp_logits`) apply
only to sampling. They cut the unreliable tail of the distribution, whose many tokens have small probabilities each but
a large one together (Holtzman et al. 2019, section 3):

- temperature divides the logits: below 1 sharpens the distribution, above 1 flattens it, and 0 means argmax (greedy),
  as does a temperature so small that one token is certain and the quotient may overflow;
- top-k keeps the k likeliest tokens (Fan et al. 2018): a fixed number, whether the model is certain or not. The steps
  after it, sorts and cumulative sums, need these candidates alone, not the whole vocabulary;
- top-p keeps the smallest set of likeliest tokens whose probability reaches p (nucleus sampling, Holtzman et al. 2019):
  few tokens where the model is certain, many where it is not;
- min-p keeps tokens with at least min_p times the probability of the likeliest one (Nguyen et al. 2024): the threshold
  follows the model's certainty, and stays useful at high temperatures.

The draw inverts the cumulative distribution at a uniform number that depends on the seed, the row and the step alone.
So a row's text does not depend on the batch around it. All tensors stay on the device of the logits, and no shape
depends on their values: a CUDA graph can hold the choice.

B rows, V vocabulary, K candidates, N blocks of W tokens, E EOS tokens. In `ban_repeated_ngrams`, N banned tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from firth.generate.config import GenerationConfig
from firth.generate.constraint import Constraint
from firth.models import ForcedTokens
from firth.objectives import CounterRNG
from firth.tokens import TokenIds

NEG_INF = float("-inf")
MIN_TIE_SLACK = 64  # least number of candidates beyond top-k, for ties with the k-th: logits in bfloat16 have many
CDF_BLOCK_TOKENS = 512  # about twice the square root of a vocabulary: both cumulative sums are short


class LogitsProcessor:
    """Constraints on the next token, with the history of each row that they need.

    Each of `eos_ids` ends a sequence. `budgets` limits the new tokens of each row (default: `max_new_tokens`).
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
        constraint: Constraint | None = None,
    ) -> None:
        self.generation_config, self.eos_ids, self.forced = generation_config, eos_ids, forced or ForcedTokens()
        self.eos_E = torch.tensor([i for i in eos_ids if i < vocab_size], dtype=torch.long, device=device)
        budgets = [generation_config.max_new_tokens] * len(prompts) if budgets is None else budgets
        self.min_budget, self.budget_B = min(budgets), torch.tensor(budgets, device=device)
        self.history = [list(ids) for ids in prompts] if generation_config.no_repeat_ngram_size else None
        self.seen_BV = (
            seen_tokens(prompts, vocab_size).to(device) if generation_config.repetition_penalty != 1 else None
        )
        self.constraint = None if constraint is None else constraint.start(len(prompts), vocab_size, device)

    def process(self, scores_BV: Tensor, step: int) -> Tensor:
        """Return the constrained scores (B, V) of the new token at index `step`."""
        original_BV = scores_BV
        if self.seen_BV is not None:
            scores_BV = apply_repetition_penalty(scores_BV, self.seen_BV, self.generation_config.repetition_penalty)
        if self.history is not None:
            scores_BV = ban_repeated_ngrams(scores_BV, self.history, self.generation_config.no_repeat_ngram_size)
        may_end = step >= self.generation_config.min_new_tokens
        if self.constraint is not None:
            scores_BV = forbid_tokens(scores_BV, original_BV, self.constraint.forbidden(may_end))
        elif not may_end:
            scores_BV = scores_BV.index_fill(1, self.eos_E, NEG_INF)
        if self.forced.bos is not None and step == 0:
            scores_BV = force_token(scores_BV, self.forced.bos)
        if self.forced.eos is not None and step + 1 >= self.min_budget:
            last_B1 = (self.budget_B == step + 1)[:, None]
            scores_BV = torch.where(last_B1, force_token(scores_BV, self.forced.eos), scores_BV)
        return scores_BV

    def is_eos(self, token: Tensor) -> Tensor:
        """Mark the EOS tokens; same shape as `token`."""
        return (token[..., None] == self.eos_E).any(-1)

    def append(self, token_B: Tensor) -> None:
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, token_B[:, None], True)
        if self.history is not None:
            for ids, token in zip(self.history, token_B.tolist(), strict=True):
                ids.append(token)
        if self.constraint is not None:
            self.constraint.accept(token_B.tolist())

    def select_rows(self, row_B: Tensor) -> None:
        """Keep these rows, in this order."""
        self.budget_B = self.budget_B[row_B]
        if self.constraint is not None:
            self.constraint.select_rows(row_B.tolist())
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[row_B]
        if self.history is not None:
            self.history = [list(self.history[row]) for row in row_B.tolist()]


def seen_tokens(sequences: Sequence[TokenIds], vocab_size: int) -> Tensor:
    """(B, V): true for the tokens that occur in the row."""
    seen_BV = torch.zeros(len(sequences), vocab_size, dtype=torch.bool)
    for row, ids in enumerate(sequences):
        seen_BV[row, [i for i in ids if i < vocab_size]] = True
    return seen_BV


def force_token(scores_BV: Tensor, token: int) -> Tensor:
    """Give `token` probability 1; return the scores unchanged if it is outside the vocabulary."""
    if token >= scores_BV.shape[1]:
        return scores_BV
    forced_BV = torch.full_like(scores_BV, NEG_INF)
    forced_BV[:, token] = 0.0
    return forced_BV


def forbid_tokens(scores_BV: Tensor, original_BV: Tensor, forbidden_BV: Tensor) -> Tensor:
    """Set the scores of forbidden tokens to -inf; where other rules forbid all others, the original scores hold."""
    masked_BV = scores_BV.masked_fill(forbidden_BV, NEG_INF)
    if scores_BV is original_BV:  # there are no other rules
        return masked_BV
    is_dead_B1 = masked_BV.amax(-1, keepdim=True) == NEG_INF
    if masked_BV.device.type == "cpu" and not is_dead_B1.any():  # on a GPU the question would wait for it
        return masked_BV
    return torch.where(is_dead_B1, original_BV.masked_fill(forbidden_BV, NEG_INF), masked_BV)


def apply_repetition_penalty(scores_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Lower the scores of seen tokens: divide positive ones, multiply negative ones (CTRL, section 4.1)."""
    penalized_BV = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
    return torch.where(seen_BV, penalized_BV, scores_BV)


def ban_repeated_ngrams(scores_BV: Tensor, rows: Sequence[TokenIds], n: int) -> Tensor:
    """Set the scores of tokens that would repeat an n-gram of their row to -inf."""
    banned = [
        (row, token)
        for row, ids in enumerate(rows)
        for token in ngram_continuations(ids, n)
        if token < scores_BV.shape[1]
    ]
    if not banned:
        return scores_BV
    rows_N, tokens_N = torch.tensor(banned, device=scores_BV.device).T
    return scores_BV.index_put((rows_N, tokens_N), scores_BV.new_tensor(NEG_INF))


def ngram_continuations(ids: TokenIds, n: int) -> list[int]:
    """Tokens that followed earlier occurrences of the last n - 1 tokens.

    >>> ngram_continuations([1, 2, 3, 1, 2], 3)
    [3]
    """
    last = list(ids[len(ids) - n + 1 :])
    return [ids[i + n - 1] for i in range(len(ids) - n + 1) if list(ids[i : i + n - 1]) == last]


# --- sampling -----------------------------------------------------------------------------------------------------


def sample_tokens(scores_BV: Tensor, generation_config: GenerationConfig, u_B1: Tensor) -> Tensor:
    """(B,): sample a token of each row, at uniform numbers `u` in [0, 1), after temperature, top-k, top-p and min-p."""
    scores_BK, token_BK = warp_candidates(scores_BV, generation_config)
    index_B = sample_from_uniform(scores_BK, u_B1)
    return index_B if token_BK is None else token_BK.gather(1, index_B[:, None])[:, 0]


def warp_logits(scores_BV: Tensor, generation_config: GenerationConfig) -> Tensor:
    """Apply temperature, top-k, top-p and min-p; removed tokens get -inf."""
    scores_BK, token_BK = warp_candidates(scores_BV, generation_config)
    if token_BK is None:
        return scores_BK
    return scores_BK.new_full(scores_BV.shape, NEG_INF).scatter_(1, token_BK, scores_BK)


def warp_candidates(scores_BV: Tensor, generation_config: GenerationConfig) -> tuple[Tensor, Tensor | None]:
    """Return the warped scores (B, K) of the candidates and their tokens (B, K), in the order of the vocabulary.

    Without top-k the candidates are the whole vocabulary, and the tokens are None.
    """
    temperature, top_k, top_p = generation_config.temperature, generation_config.top_k, generation_config.top_p
    token_BK = None
    if top_k:
        scores_BK, token_BK = top_k_candidates(scores_BV, top_k, temperature)
    else:
        scores_BK = apply_temperature(scores_BV, temperature)
    if top_p < 1:
        scores_BK = scores_BK.masked_fill_(removed_by_top_p(scores_BK, top_p), NEG_INF)
    if generation_config.min_p:
        # p >= min_p * max(p) in log space: the softmax denominators cancel.
        floor_B1 = scores_BK.amax(-1, keepdim=True) + math.log(generation_config.min_p)
        scores_BK = scores_BK.masked_fill_(scores_BK < floor_B1, NEG_INF)
    return scores_BK, token_BK


def apply_temperature(scores_BV: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature, at least in float32."""
    return scores_BV.to(torch.promote_types(scores_BV.dtype, torch.float32)) / temperature


def top_k_candidates(scores_BV: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return scores / temperature and tokens (B, K), in the order of the vocabulary; those below the k-th get -inf.

    Tokens with the same score as the k-th are kept beside it, as in `transformers`. But K is fixed: at most the larger
    of `top_k` and `MIN_TIE_SLACK` are kept beyond the k-th, and `topk` decides which.
    """
    num_candidates = min(top_k + max(top_k, MIN_TIE_SLACK), scores_BV.shape[1])
    scores_BK, token_BK = scores_BV.topk(num_candidates)  # in descending order
    scores_BK = apply_temperature(scores_BK, temperature)  # may make scores equal, so it precedes the comparison
    kth_B1 = scores_BK[:, :top_k][:, -1:]
    scores_BK = scores_BK.masked_fill_(scores_BK < kth_B1, NEG_INF)
    token_BK, order_BK = token_BK.sort()
    return scores_BK.gather(1, order_BK), token_BK


def removed_by_top_p(scores_BK: Tensor, top_p: float) -> Tensor:
    """(B, K): true outside the smallest set of likeliest tokens whose probability reaches `top_p`.

    The likeliest token is always in the set. Of equally likely ones, the last comes first.
    """
    sorted_BK, order_BK = scores_BK.sort(stable=True)
    removed_BK = sorted_BK.softmax(-1).cumsum(-1) <= 1 - top_p  # ascending order: the tail comes first
    removed_BK[:, -1] = False
    return torch.empty_like(removed_BK).scatter_(1, order_BK, removed_BK)


def sample_from_uniform(scores_BV: Tensor, u_B1: Tensor) -> Tensor:
    """(B,): inverse-CDF sampling, the first token whose cumulative probability exceeds `u` in [0, 1).

    A cumulative sum over a long row is slow on a GPU. So a vocabulary is summed in blocks: the cumulative sum of the
    blocks finds one block, and the cumulative sum inside it the token.
    """
    V, W = scores_BV.shape[1], CDF_BLOCK_TOKENS
    if V <= W:
        cdf_BV = scores_BV.double().softmax(-1).cumsum(-1)  # float64: float32 sums lose small probabilities
        return first_above(cdf_BV, u_B1 * cdf_BV[:, -1:])[:, 0]
    padded_BV = F.pad(scores_BV, (0, -V % W), value=NEG_INF)
    p_BNW = padded_BV.double().softmax(-1).unflatten(1, (-1, W))
    cdf_BN = p_BNW.sum(-1).cumsum(-1)
    threshold_B1 = u_B1 * cdf_BN[:, -1:]
    block_B1 = first_above(cdf_BN, threshold_B1)
    before_B1 = F.pad(cdf_BN, (1, 0)).gather(1, block_B1)
    cdf_BW = p_BNW.take_along_dim(block_B1[:, :, None], 1)[:, 0].cumsum(-1)
    return (block_B1 * W + first_above(cdf_BW, threshold_B1 - before_B1))[:, 0]


def first_above(cdf_BN: Tensor, threshold_B1: Tensor) -> Tensor:
    """(B, 1): index of the first cumulative sum above the threshold.

    Where rounding puts the threshold above all of them, the last that adds something.
    """
    return ((cdf_BN <= threshold_B1) & (cdf_BN < cdf_BN[:, -1:])).sum(-1, keepdim=True)


def token_uniforms(
    seed: int | np.ndarray, rows: Sequence[int] | np.ndarray, num_steps: int, first_step: int = 0
) -> np.ndarray:
    """(B, steps) numbers in [0, 1) for the choice of each token: a function of seed, row and step.

    `seed` may differ by row, (B, 1).
    """
    rng = CounterRNG(seed, np.asarray(rows))
    columns = [rng.uniform(f"token {step}", 1) for step in range(first_step, first_step + num_steps)]
    return np.concatenate(columns, 1) if columns else np.zeros((len(rows), 0), np.float32)


class TokenSampler:
    """Choose the next token (B,) of each row: argmax if the config is greedy, otherwise a sample.

    `seeds` (B,) replaces the seed of the generation config by one for each row.
    """

    def __init__(
        self, logits_processor: LogitsProcessor, rows: Sequence[int], seeds: Sequence[int] | None = None
    ) -> None:
        self.logits_processor, self.rows = logits_processor, np.array(rows)
        self.generation_config = logits_processor.generation_config
        seeds = [self.generation_config.seed] * len(rows) if seeds is None else seeds
        self.seed_B = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)

    def __call__(self, logits_BV: Tensor, step: int) -> Tensor:
        scores_BV = self.logits_processor.process(logits_BV, step)
        if self.generation_config.is_greedy:
            return scores_BV.argmax(-1)
        return sample_tokens(scores_BV, self.generation_config, self.uniform(step).to(logits_BV.device))

    def uniform(self, step: int) -> Tensor:
        """(B, 1) numbers in [0, 1): a function of seed, row and step."""
        return torch.from_numpy(token_uniforms(self.seed_B[:, None], self.rows, 1, step))

    def select_rows(self, row_B: Tensor) -> None:
        """Keep these rows, in this order."""
        kept = row_B.cpu().numpy()
        self.rows, self.seed_B = self.rows[kept], self.seed_B[kept]
        self.logits_processor.select_rows(row_B)
