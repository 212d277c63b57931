"""Speculative decoding: a small model drafts tokens, the large one checks them all at once (Leviathan et al. 2023).

A decode step of a large model takes about as long for five tokens as for one: reading the weights is what takes time.
So a draft model with the same tokenizer proposes K tokens, one after another, and the target model computes the
probabilities of all of them in one pass. With p of the target and q of the draft (section 2.3):

1. Draft token x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)).
2. The first rejected one is replaced by a sample of max(p_i - q_i, 0), normalized; those after it are dropped.
3. If all are accepted, one more token is sampled from p, which the pass has computed anyway.

Then every token has exactly the distribution of the target: an accepted x has probability min(p(x), q(x)), and the
replacement adds max(p(x) - q(x), 0), together p(x). At temperature 0, p and q are certain of one token: drafts are
accepted while they are the target's own choice, and the text is that of greedy decoding.

K grows by 2 when all drafts were accepted and shrinks by 1 otherwise. Random numbers are a function of seed, row and
position. A position uses each of its three numbers (draft, accept, token) at most once for a token that stays.

B rows, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from firth.core.errors import UserError
from firth.generate.config import GenerationConfig
from firth.generate.decode_state import CachedDecode, check_can_generate, eval_mode, get_mask_ids, require_tokenizer
from firth.generate.length_budget import drop_beginning, make_length_budget, prefix_ids
from firth.generate.loop import GeneratedSequence, StopFn, forced_tokens
from firth.generate.sampling import LogitsProcessor, sample_from_uniform, warp_logits
from firth.models import EncoderDecoder, Model
from firth.models.config import Shaw
from firth.models.kv_cache import can_cache
from firth.objectives import CounterRNG
from firth.tokens import TokenIds

INITIAL_DRAFT_TOKENS = 5
MAX_DRAFT_TOKENS = 20


def check_draft(model: Model, draft: Model, generation_config: GenerationConfig) -> None:
    """Raise a UserError if the draft cannot propose tokens for the model."""
    try:
        check_can_generate(draft)
    except UserError as e:
        raise UserError(f"The draft cannot propose tokens. {e}") from None
    if require_tokenizer(model).fingerprint != require_tokenizer(draft).fingerprint:
        raise UserError("The draft has another tokenizer than the model: train it with --tokenizer of the model.")
    if isinstance(model, EncoderDecoder) != isinstance(draft, EncoderDecoder):
        raise UserError("The draft of an encoder-decoder must be one too, and that of a decoder a decoder.")
    for side, name in ((model, "model"), (draft, "draft")):
        if not can_cache(side.config) or isinstance(side.config.position, Shaw) or get_mask_ids(side):
            raise UserError(f"Speculative decoding needs a KV cache, which the {name} does not support. Omit --draft.")
    config = generation_config
    has_history = config.repetition_penalty != 1 or config.no_repeat_ngram_size
    if config.num_beams > 1 or has_history or config.constraint is not None:
        raise UserError(
            "A draft cannot be combined with beam search, repetition_penalty, no_repeat_ngram_size or structured "
            "output: leave out these, or --draft."
        )


def count_accepted(p_BTV: Tensor, q_BKV: Tensor, draft_BK: Tensor, uniform_BK: Tensor) -> Tensor:
    """(B,): how many drafts are accepted. `p_BTV` are the target's probabilities at T = K + 1 positions."""
    p_BK, q_BK = (x[:, : draft_BK.shape[1]].gather(2, draft_BK[:, :, None])[:, :, 0] for x in (p_BTV, q_BKV))
    return (uniform_BK * q_BK < p_BK).long().cumprod(1).sum(1)


def sample_after_drafts(p_BTV: Tensor, q_BKV: Tensor, accepted_B: Tensor, uniform_B1: Tensor) -> Tensor:
    """(B,): the token after the accepted drafts, from max(p - q, 0), or from p after the last one."""
    row_B = torch.arange(len(p_BTV), device=p_BTV.device)
    q_BTV = torch.cat([q_BKV, torch.zeros_like(p_BTV[:, :1])], 1)
    return sample_from_uniform((p_BTV - q_BTV)[row_B, accepted_B].clamp(min=0).log(), uniform_B1)


class SpeculativeSide:
    """One of the two models with its cache, over one text that grows, and shrinks by rejected drafts.

    Logits get `vocab_size` entries: models with one tokenizer may pad their vocabularies to different sizes.
    """

    def __init__(
        self, model: Model, prompt: TokenIds, budget: int, config: GenerationConfig, vocab_size: int | None = None
    ) -> None:
        self.state, self.config = CachedDecode(model, [prompt], budget + MAX_DRAFT_TOKENS + 1), config
        self.state.cache.is_static = False  # several tokens at once
        self.eos_ids = check_can_generate(model)
        logits_1V = self.state.prefill()
        self.vocab_size = vocab_size or logits_1V.shape[1]
        self.last_1V = self.fit_vocabulary(logits_1V)  # logits after all tokens in the cache
        self.prompt_length = self.state.cache.max_row_length
        self.processor = LogitsProcessor(
            [prompt], config, self.eos_ids, self.last_1V.shape[1], self.last_1V.device, forced_tokens(model), [budget]
        )

    @property
    def num_new(self) -> int:
        """New tokens in the cache."""
        return self.state.cache.max_row_length - self.prompt_length

    def append(self, ids: Sequence[int]) -> Tensor:
        """Append tokens; return the logits (T + 1, V) before and after each."""
        before_1V = self.last_1V
        if not ids:
            return before_1V
        state, cache = self.state, self.state.cache
        while cache.max_row_length + len(ids) > cache.size:
            cache.grow(min(state.max_capacity, 2 * cache.size))
        token_1T = torch.tensor([list(ids)], device=state.device).clamp(max=state.model.config.vocab_size - 1)
        position_1T = cache.max_row_length + torch.arange(len(ids), device=state.device)[None]
        if state.max_length is not None:
            position_1T = position_1T.clamp(max=state.max_length - 1)
        logits_TV = self.fit_vocabulary(state.compute_logits(cache.decode_step(state.embed(token_1T, position_1T))[0]))
        cache.advance(len(ids))
        self.last_1V = logits_TV[-1:]
        return torch.cat([before_1V, logits_TV])

    def fit_vocabulary(self, logits_TV: Tensor) -> Tensor:
        """Drop or forbid tokens that only one of the models has."""
        return torch.nn.functional.pad(logits_TV, (0, self.vocab_size - logits_TV.shape[1]), value=float("-inf"))

    def truncate(self, num_new: int, last_1V: Tensor) -> None:
        """Keep the first `num_new` new tokens, after which the logits are `last_1V`."""
        self.state.cache.advance(num_new - self.num_new)
        self.last_1V = last_1V

    def probabilities(self, logits_TV: Tensor, step: int) -> Tensor:
        """Return the distributions (T, V) of the new tokens at `step`, `step` + 1, ..., after all warpers."""
        scores = [self.processor.process(row_1V.float(), step + t) for t, row_1V in enumerate(logits_TV.split(1))]
        scores_TV = torch.cat(scores)
        if self.config.is_greedy:
            return torch.nn.functional.one_hot(scores_TV.argmax(-1), scores_TV.shape[1]).double()
        return warp_logits(scores_TV, self.config).double().softmax(-1)


@torch.no_grad()
def generate_speculative(
    model: Model,
    draft: Model,
    prompts: Sequence[TokenIds],
    config: GenerationConfig,
    stop_fn: StopFn | None = None,
    first_row: int = 0,
    on_finished: Callable[[int], None] | None = None,
    logprobs: bool = True,
) -> tuple[list[GeneratedSequence], float]:
    """Return `num_return_sequences` sequences per prompt, one after another, and the mean number of tokens per pass."""
    check_draft(model, draft, config)
    budget, passes = make_length_budget(model, prompts, config.max_new_tokens), 0
    sequences: list[GeneratedSequence] = []
    with eval_mode(model), eval_mode(draft):
        for number, (prompt, limit) in enumerate(zip(budget.prompts, budget.budgets, strict=True)):
            for i in range(config.num_return_sequences):
                row = first_row + number * config.num_return_sequences + i
                stop = None if stop_fn is None else partial(stop_fn, number)
                sequence, num_passes = decode_row(model, draft, prompt, limit, config, row, stop, logprobs)
                sequences.append(sequence)
                passes += num_passes
                if on_finished is not None:
                    on_finished(1)
    return sequences, sum(len(s.tokens) for s in sequences) / max(1, passes)


def decode_row(
    model: Model,
    draft: Model,
    prompt: TokenIds,
    limit: int,
    config: GenerationConfig,
    row: int,
    stop_fn: Callable[[TokenIds], bool] | None,
    keeps_logprobs: bool,
) -> tuple[GeneratedSequence, int]:
    """Return one sequence, and the number of passes of the target."""
    target = SpeculativeSide(model, prompt, limit, config)
    proposer = SpeculativeSide(draft, fit_prompt(draft, prompt, limit), limit, config, target.vocab_size)
    rng, ids, logprobs = CounterRNG(config.seed, np.array([row])), list[int](), list[float]()
    num_drafts, passes, is_ended, is_stopped = INITIAL_DRAFT_TOKENS, 0, False, False

    def uniform(purpose: str, position: int) -> Tensor:
        return torch.from_numpy(rng.uniform(f"{purpose} {position}", 1)).to(target.state.device)

    while len(ids) < limit and not is_ended and not is_stopped:
        count = min(num_drafts, limit - len(ids) - 1)
        drafts, q_1KV = propose(proposer, ids, count, uniform)
        logits_TV = target.append([*ids[target.num_new :], *drafts])[-count - 1 :]
        p_1TV = target.probabilities(logits_TV, len(ids))[None]
        draft_1K = torch.tensor([drafts], dtype=torch.long, device=target.state.device)
        accept_1K = torch.cat([q_1KV.new_empty(1, 0), *(uniform("accept", len(ids) + i) for i in range(count))], 1)
        accepted_1 = count_accepted(p_1TV, q_1KV, draft_1K, accept_1K)
        accepted = int(accepted_1)
        token = int(sample_after_drafts(p_1TV, q_1KV, accepted_1, uniform("token", len(ids) + accepted)))
        target.truncate(len(ids) + accepted, logits_TV[accepted : accepted + 1])
        if proposer.num_new > len(ids) + accepted:
            proposer.truncate(len(ids) + accepted, proposer.last_1V)  # it gets the next token before it is used
        passes += 1
        num_drafts = min(MAX_DRAFT_TOKENS, num_drafts + 2) if accepted == count else max(1, num_drafts - 1)
        logprob_TV = logits_TV.float().log_softmax(-1) if keeps_logprobs else None
        for i, new in enumerate([*drafts[:accepted], token]):
            ids.append(new)
            if logprob_TV is not None:
                logprobs.append(float(logprob_TV[i, new]))
            is_ended = new in target.eos_ids
            is_stopped = not is_ended and stop_fn is not None and stop_fn(ids)
            if is_ended or is_stopped:
                break
    return GeneratedSequence(ids[: len(ids) - is_ended], is_ended or is_stopped, logprobs, sum(logprobs)), passes


def fit_prompt(draft: Model, prompt: TokenIds, limit: int) -> TokenIds:
    """Return the end of a prompt, for a draft with fewer positions than the model: the model checks what it says."""
    length = draft.config.max_length
    if length is None:
        return prompt
    kept = length if isinstance(draft, EncoderDecoder) else max(length - limit, length // 2)
    return drop_beginning(prompt, kept, prefix_ids(draft))


def propose(
    proposer: SpeculativeSide, ids: Sequence[int], count: int, uniform: Callable[[str, int], Tensor]
) -> tuple[list[int], Tensor]:
    """Return `count` drafts after `ids`, and the distributions (1, K, V) that they were sampled from."""
    proposer.append(ids[proposer.num_new :])
    drafts, distributions = list[int](), [proposer.last_1V.new_empty(1, 0, proposer.last_1V.shape[1]).double()]
    for position in range(len(ids), len(ids) + count):
        if drafts:
            proposer.append(drafts[-1:])
        q_1V = proposer.probabilities(proposer.last_1V, position)
        drafts.append(int(sample_from_uniform(q_1V.log(), uniform("draft", position))))
        distributions.append(q_1V[None])
    return drafts, torch.cat(distributions, 1)
