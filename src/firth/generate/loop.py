"""Write on, token by token: what a decoder continues, what an encoder-decoder answers.

N rows that are written, B of them not finished, L places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.core.errors import UserError
from firth.generate.beams import beam_search
from firth.generate.config import GenerationConfig
from firth.generate.decode_state import TokenIds, check_can_generate, eval_mode, make_decode_state, require_tokenizer
from firth.generate.length_budget import INITIAL_NEW_TOKENS, LengthBudget, make_length_budget
from firth.generate.sampling import LogitsProcessor, TokenSampler
from firth.models import EncoderDecoder, ForcedTokens, Model, get_forced_tokens, make_sequence_template

NOT_STOPPED = 2**62  # tokens: no text has as many
DECODE_CHECK_EVERY_STEPS = 16  # places: how often a GPU is asked whether all rows have ended
StopFn = Callable[[int, TokenIds], bool]  # a prompt, and what was written after it: does this end it?


@dataclass(frozen=True)
class GeneratedSequence:
    """What follows a prompt, without its end token; `finished` where that or a stop string came.

    `logprobs` are of each token (and of the end), by the model alone, whatever narrowed the choice; `score` is their
    sum, in a beam search what it was chosen by.
    """

    tokens: list[int]
    finished: bool
    logprobs: list[float]
    score: float


def generate_ids(
    model: Model,
    prompts: Sequence[TokenIds],
    max_new_tokens: int | None = None,
    generation_config: GenerationConfig | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """What follows each prompt, up to the first end token, which is left out. The prompts have their frame already.

    With `num_return_sequences` those of a prompt follow each other. Strings to stop at are looked for only where texts
    are written (`generate`). Without `use_cache` everything is read again for each token.
    """
    generation_config = generation_config or GenerationConfig()
    if max_new_tokens is not None:
        generation_config = replace(generation_config, max_new_tokens=max_new_tokens)
    return [
        written.tokens for written in generate_sequences(model, prompts, generation_config, use_cache, logprobs=False)
    ]


@torch.no_grad()
def generate_sequences(
    model: Model,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    use_cache: bool = True,
    stop_fn: StopFn | None = None,
    logprobs: bool = True,
) -> list[GeneratedSequence]:
    """What follows each prompt, `num_return_sequences` for each, in order."""
    ends = check_can_generate(model)
    if not prompts:
        return []
    if generation_config.num_beams == 1:
        *_, draft = iterate_decode_steps(
            model, prompts, generation_config, use_cache, stop_fn, logprobs
        )  # always the same one
        return draft.to_sequences()
    with eval_mode(model):
        room = make_length_budget(model, prompts, generation_config.max_new_tokens)
        reading = make_decode_state(model, room.prompts, room.max_new_tokens, use_cache)
        logits_BV = reading.prefill()
        if generation_config.num_beams > logits_BV.shape[1]:
            raise UserError(
                f"num_beams is {generation_config.num_beams:,}, and there are {logits_BV.shape[1]:,} tokens."
            )
        past = make_logits_processor(model, room, generation_config, ends, logits_BV)
        found = beam_search(reading, logits_BV.float(), past, stop_fn)
    return [GeneratedSequence(*text) for texts in found for text in texts]


@torch.no_grad()
def iterate_decode_steps(
    model: Model,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    use_cache: bool = True,
    stop_fn: StopFn | None = None,
    logprobs: bool = False,
) -> Iterator[DecodedBatch]:
    """The texts as they grow: the same draft after each place."""
    ends, each = check_can_generate(model), generation_config.num_return_sequences
    with eval_mode(model):
        room = make_length_budget(model, prompts, generation_config.max_new_tokens)
        reading = make_decode_state(model, room.prompts, room.max_new_tokens, use_cache)
        logits_BV = reading.prefill()
        past, device = make_logits_processor(model, room, generation_config, ends, logits_BV), logits_BV.device
        choose = TokenSampler(past, range(len(prompts) * each))
        draft = DecodedBatch([n for n in room.budgets for _ in range(each)], past, device)
        row_B = torch.arange(len(prompts), device=device).repeat_interleave(each)
        if each > 1:
            reading.select_rows(row_B)
            past.select_rows(row_B)
            logits_BV = logits_BV[row_B]
        live_B = torch.arange(len(row_B), device=device)
        for place in range(room.max_new_tokens):
            token_B = choose(logits_BV.float(), place)
            draft.append(live_B, token_B, logits_BV if logprobs else None)
            if stop_fn is not None:
                draft.apply_stop_fn(stop_fn, each)
            yield draft
            if place + 1 == room.max_new_tokens:
                break
            if (
                device.type == "cpu"
                or stop_fn is not None
                or place % DECODE_CHECK_EVERY_STEPS == DECODE_CHECK_EVERY_STEPS - 1
            ):
                open_B = ~draft.done_N[live_B]
                left = int(open_B.sum())
                if not left:
                    break
                if device.type == "cpu" and left <= len(live_B) // 2:  # fewer rows are less work, but cost a copy
                    keep_B = open_B.nonzero()[:, 0]
                    reading.select_rows(keep_B)
                    choose.select_rows(keep_B)
                    live_B, token_B = live_B[keep_B], token_B[keep_B]
            past.append(token_B)
            logits_BV = reading.decode_step(token_B)


class DecodedBatch:
    """What is written so far, on the device: a row that is done gets only end tokens.

    A row is done when it has ended, when it has stopped, or when there is room for no more.
    """

    def __init__(self, budgets: Sequence[int], logits_processor: LogitsProcessor, device: torch.device) -> None:
        N, L = len(budgets), min(max(budgets), INITIAL_NEW_TOKENS)
        self.logits_processor, self.eos_id = logits_processor, logits_processor.eos_ids[0]
        self.step, self.budget_N = 0, torch.tensor(budgets, device=device)
        self.token_NL = torch.full((N, L), self.eos_id, device=device)
        self.logprob_NL = torch.zeros(N, L, device=device)
        self.done_N = torch.zeros(N, dtype=torch.bool, device=device)
        self.ended_N = torch.zeros_like(self.done_N)
        self.stopped_N = torch.full((N,), NOT_STOPPED, device=device)  # so many tokens were written before a stop

    def append(self, live_B: Tensor, token_B: Tensor, logits_BV: Tensor | None) -> None:
        """The next token of the rows that are read on."""
        if self.step == self.token_NL.shape[1]:
            self.token_NL = F.pad(self.token_NL, (0, self.step), value=self.eos_id)
            self.logprob_NL = F.pad(self.logprob_NL, (0, self.step))
        done_B, ended_B = self.done_N[live_B], self.logits_processor.is_eos(token_B)
        self.token_NL[live_B, self.step] = token_B.masked_fill(done_B, self.eos_id)
        if logits_BV is not None:
            found_B = logits_BV.float().log_softmax(-1).gather(1, token_B[:, None])[:, 0]
            self.logprob_NL[live_B, self.step] = found_B.masked_fill(done_B, 0.0)
        self.ended_N[live_B] |= ~done_B & ended_B
        self.step += 1
        self.done_N[live_B] = done_B | ended_B | (self.budget_N[live_B] <= self.step)

    def apply_stop_fn(self, stop_fn: StopFn, num_return_sequences: int) -> None:
        """Rows that end with what they have now."""
        written_N = ~self.ended_N & (self.budget_N >= self.step) & (self.stopped_N == NOT_STOPPED)
        for row in written_N.nonzero()[:, 0].tolist():
            if stop_fn(row // num_return_sequences, self.token_NL[row, : self.step].tolist()):
                self.done_N[row], self.stopped_N[row] = True, self.step

    def token_ids(self, row: int) -> list[int]:
        """The tokens of a row, up to the end."""
        ids = self.token_NL[row, : min(self.step, int(self.budget_N[row]), int(self.stopped_N[row]))].tolist()
        return list(takewhile(lambda token: token not in self.logits_processor.eos_ids, ids))

    def to_sequences(self) -> list[GeneratedSequence]:
        found = []
        stopped_N = (self.stopped_N < NOT_STOPPED).tolist()
        for row, (ended, stopped) in enumerate(zip(self.ended_N.tolist(), stopped_N, strict=True)):
            ids = self.token_ids(row)
            logprobs = self.logprob_NL[row, : len(ids) + (ended and not stopped)].tolist()
            found.append(GeneratedSequence(ids, ended or stopped, logprobs, sum(logprobs)))
        return found


def make_logits_processor(
    model: Model, budget: LengthBudget, generation_config: GenerationConfig, eos_ids: TokenIds, logits_BV: Tensor
) -> LogitsProcessor:
    """What counts as read: the prompt, or what the decoder of an encoder-decoder starts with."""
    vocab, prompts = require_tokenizer(model).vocab, budget.prompts
    forced = get_forced_tokens(model, vocab)
    if isinstance(model, EncoderDecoder):
        prompts = [[make_sequence_template(model.config, vocab).decoder_start_id]] * len(prompts)
    else:
        forced = ForcedTokens(eos=forced.eos)  # a text begins with its prompt
    return LogitsProcessor(
        prompts, generation_config, eos_ids, logits_BV.shape[1], logits_BV.device, forced, budget.budgets
    )
