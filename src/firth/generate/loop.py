"""The decoding loop: prefill the prompts, then choose a token and run a decode step until all sequences end.

    logits = state.prefill()
    for step in range(max_new_tokens):
        token = sampler(logits, step)
        logits = state.decode_step(token)

Everything else in this file is bookkeeping. Sequences of a batch end at different steps; an ended row gets EOS tokens.
On a CPU, ended rows are dropped once half of the batch has ended, because work is proportional to rows. On a GPU the
batch keeps its shape for the CUDA graph, and the host checks for the end only every few steps: each check waits for
the GPU.

N sequences, B of them still computed, L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.core.errors import UserError
from firth.generate.beams import beam_search
from firth.generate.config import GenerationConfig
from firth.generate.constraint import Constraint, make_constraint
from firth.generate.decode_state import check_can_generate, eval_mode, make_decode_state, require_tokenizer
from firth.generate.device_decode import (
    STREAM_STEPS_PER_CHECK,
    DecodedSequence,
    DecodeRequest,
    DeviceScheduler,
    can_decode_on_device,
    keep_device_decode,
    make_settings,
    num_slots_that_fit,
    take_device_decode,
)
from firth.generate.grammar import read_grammar
from firth.generate.length_budget import INITIAL_NEW_TOKENS, LengthBudget, make_length_budget
from firth.generate.sampling import LogitsProcessor, TokenSampler
from firth.models import EncoderDecoder, ForcedTokens, Model, get_forced_tokens, make_sequence_template
from firth.tokens import TokenIds

NOT_STOPPED = 2**62  # stop position of a sequence without a stop string, beyond any length
DECODE_CHECK_EVERY_STEPS = 16  # interval of the host's check for the end on a GPU
StopFn = Callable[[int, TokenIds], bool]  # prompt index and new ids -> whether a stop string occurs


@dataclass(frozen=True)
class GeneratedSequence:
    """New tokens of a prompt, without EOS; `finished` if EOS or a stop string ended them.

    `logprobs` holds the model's log-probability of each token (and of EOS), before processors and warpers. `score` is
    their sum, or the beam score. Beam search always computes both, sampling and greedy decoding only with `logprobs`.
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
    """Return the new ids of each prompt, without EOS. The prompts already contain their special tokens.

    Sequences of one prompt (`num_return_sequences`) are adjacent. Stop strings apply only to `generate`. With
    `use_cache=False` every token recomputes the whole sequence.
    """
    generation_config = generation_config or GenerationConfig()
    if max_new_tokens is not None:
        generation_config = replace(generation_config, max_new_tokens=max_new_tokens)
    sequences = generate_sequences(model, prompts, generation_config, use_cache, logprobs=False)
    return [sequence.tokens for sequence in sequences]


@torch.no_grad()
def generate_sequences(
    model: Model,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    use_cache: bool = True,
    stop_fn: StopFn | None = None,
    logprobs: bool = True,
    first_row: int = 0,
    on_finished: Callable[[int], None] | None = None,
) -> list[GeneratedSequence]:
    """Return `num_return_sequences` sequences for each prompt, in order.

    Samples depend on the seed and on the number of the sequence; that of the first is `first_row`, where these prompts
    are a part of more. `on_finished` is called with the number of sequences that have ended since.
    """
    eos_ids = check_can_generate(model)
    if not prompts:
        return []
    if use_cache and can_decode_on_device(model, generation_config):
        return generate_on_device(model, prompts, generation_config, stop_fn, logprobs, first_row, on_finished)
    if generation_config.num_beams == 1:
        steps = iterate_decode_steps(
            model, prompts, generation_config, use_cache, stop_fn, logprobs, first_row=first_row
        )
        *_, decoded = steps
        if on_finished is not None:
            on_finished(len(decoded.done_N))
        return decoded.to_sequences()
    with eval_mode(model):
        budget = make_length_budget(model, prompts, generation_config.max_new_tokens)
        state = make_decode_state(model, budget.prompts, budget.max_new_tokens, use_cache)
        logits_BV = state.prefill()
        if generation_config.num_beams > logits_BV.shape[1]:
            raise UserError(
                f"num_beams is {generation_config.num_beams:,}; it must be at most the vocabulary size, "
                f"{logits_BV.shape[1]:,}."
            )
        processor = make_logits_processor(model, budget, generation_config, eos_ids, logits_BV)
        beams = beam_search(state, logits_BV.float(), processor, stop_fn)
    if on_finished is not None:
        on_finished(sum(map(len, beams)))
    return [GeneratedSequence(*result) for results in beams for result in results]


@torch.no_grad()
def iterate_decode_steps(
    model: Model,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    use_cache: bool = True,
    stop_fn: StopFn | None = None,
    logprobs: bool = False,
    seeds: Sequence[int] | None = None,
    first_row: int = 0,
) -> Generator[DecodedBatch, None, None]:
    """Yield the growing batch after each step; it is one object, updated in place.

    `seeds` gives each prompt its own seed. Its samples then do not depend on the batch around it.
    """
    eos_ids, each = check_can_generate(model), generation_config.num_return_sequences
    with eval_mode(model):
        budget = make_length_budget(model, prompts, generation_config.max_new_tokens)
        state = make_decode_state(model, budget.prompts, budget.max_new_tokens, use_cache)
        logits_BV = state.prefill()
        processor = make_logits_processor(model, budget, generation_config, eos_ids, logits_BV)
        device, rows = logits_BV.device, range(first_row, first_row + len(prompts) * each)
        sampler = (
            TokenSampler(processor, rows)
            if seeds is None
            else TokenSampler(processor, [row % each for row in rows], [seed for seed in seeds for _ in range(each)])
        )
        decoded = DecodedBatch([n for n in budget.budgets for _ in range(each)], processor, device)
        row_B = torch.arange(len(prompts), device=device).repeat_interleave(each)
        if each > 1:
            state.select_rows(row_B)
            processor.select_rows(row_B)
            logits_BV = logits_BV[row_B]
        live_B = torch.arange(len(row_B), device=device)
        for step in range(budget.max_new_tokens):
            token_B = sampler(logits_BV.float(), step)
            decoded.append(live_B, token_B, logits_BV if logprobs else None)
            if stop_fn is not None:
                decoded.apply_stop_fn(stop_fn, each)
            yield decoded
            if step + 1 == budget.max_new_tokens:
                break
            if (
                device.type == "cpu"
                or stop_fn is not None
                or step % DECODE_CHECK_EVERY_STEPS == DECODE_CHECK_EVERY_STEPS - 1
            ):
                open_B = ~decoded.done_N[live_B]
                num_open = int(open_B.sum())
                if not num_open:
                    break
                if device.type == "cpu" and num_open <= len(live_B) // 2:  # dropping rows copies the cache
                    keep_B = open_B.nonzero()[:, 0]
                    state.select_rows(keep_B)
                    sampler.select_rows(keep_B)
                    live_B, token_B = live_B[keep_B], token_B[keep_B]
            processor.append(token_B)
            logits_BV = state.decode_step(token_B)


@torch.no_grad()
def generate_on_device(
    model: Model,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    stop_fn: StopFn | None = None,
    logprobs: bool = False,
    first_row: int = 0,
    on_finished: Callable[[int], None] | None = None,
) -> list[GeneratedSequence]:
    """`generate_sequences` on a GPU, by `device_decode.py`."""
    with eval_mode(model):
        scheduler = make_scheduler(model, prompts, generation_config, stop_fn, logprobs, first_row)
        sequences: dict[int, GeneratedSequence] = {}
        for finished in scheduler.run():
            sequences |= {done.number: to_generated_sequence(done, logprobs) for done in finished}
            if on_finished is not None:
                on_finished(len(finished))
        keep_device_decode(scheduler.decode)
    return [sequences[number] for number in range(len(sequences))]


def to_generated_sequence(done: DecodedSequence, logprobs: bool) -> GeneratedSequence:
    return GeneratedSequence(
        done.text_ids, done.ended or done.stopped, done.logprobs if logprobs else [], sum(done.logprobs)
    )


def make_scheduler(
    model: Model,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    stop_fn: StopFn | None,
    logprobs: bool,
    first_row: int = 0,
) -> DeviceScheduler:
    """Return the scheduler of all sequences of these prompts."""
    eos_ids, each = check_can_generate(model), generation_config.num_return_sequences
    budget = make_length_budget(model, prompts, generation_config.max_new_tokens)
    repeated = [ids for ids in budget.prompts for _ in range(each)]
    budgets = [n for n in budget.budgets for _ in range(each)]
    settings = make_settings(model, generation_config, forced_tokens(model), eos_ids, logprobs)
    longest, is_seq2seq = max(map(len, budget.prompts)), isinstance(model, EncoderDecoder)
    decode = take_device_decode(
        model,
        settings,
        min(len(repeated), num_slots_that_fit(model, longest, max(budgets))),
        1 if is_seq2seq else longest,
        max(budgets),
        longest if is_seq2seq else 0,
    )
    scheduler = DeviceScheduler(decode)
    seed, constraint = generation_config.seed, model_constraint(model, generation_config)
    scheduler.add(
        [
            DecodeRequest(ids, num_tokens, seed, row, constraint)
            for row, (ids, num_tokens) in enumerate(zip(repeated, budgets, strict=True), first_row)
        ]
    )
    if stop_fn is not None:
        scheduler.stop_fn = lambda number, ids: stop_fn(number // each, ids)
    return scheduler


@torch.no_grad()
def iterate_new_ids(
    model: Model,
    prompt: TokenIds,
    generation_config: GenerationConfig,
    use_cache: bool = True,
    stop_fn: StopFn | None = None,
) -> Iterator[list[int]]:
    """Yield the new ids of one prompt so far, as they come: one more each time, or a few more on a GPU."""
    if not (use_cache and can_decode_on_device(model, generation_config)):
        for decoded in iterate_decode_steps(model, [prompt], generation_config, use_cache, stop_fn):
            yield decoded.token_ids(0)
        return
    with eval_mode(model):
        scheduler = make_scheduler(model, [prompt], generation_config, stop_fn, logprobs=False)
        scheduler.steps_per_check = STREAM_STEPS_PER_CHECK
        for finished in scheduler.run():
            yield finished[0].text_ids if finished else scheduler.text_ids()[0]
        keep_device_decode(scheduler.decode)


class DecodedBatch:
    """New tokens so far, on the device. A row is done at EOS, at a stop string or at its length budget.

    A row that is done is filled with EOS.
    """

    def __init__(self, budgets: Sequence[int], logits_processor: LogitsProcessor, device: torch.device) -> None:
        N, L = len(budgets), min(max(budgets), INITIAL_NEW_TOKENS)
        self.logits_processor, self.eos_id = logits_processor, logits_processor.eos_ids[0]
        self.step, self.budget_N = 0, torch.tensor(budgets, device=device)
        self.token_NL = torch.full((N, L), self.eos_id, device=device)
        self.logprob_NL = torch.zeros(N, L, device=device)
        self.done_N = torch.zeros(N, dtype=torch.bool, device=device)
        self.ended_N = torch.zeros_like(self.done_N)
        self.stopped_N = torch.full((N,), NOT_STOPPED, device=device)  # tokens up to the stop string

    def append(self, live_B: Tensor, token_B: Tensor, logits_BV: Tensor | None) -> None:
        """Store the next token of the live rows, and its log-probability if logits are given."""
        if self.step == self.token_NL.shape[1]:
            self.token_NL = F.pad(self.token_NL, (0, self.step), value=self.eos_id)
            self.logprob_NL = F.pad(self.logprob_NL, (0, self.step))
        done_B, ended_B = self.done_N[live_B], self.logits_processor.is_eos(token_B)
        self.token_NL[live_B, self.step] = token_B.masked_fill(done_B, self.eos_id)
        if logits_BV is not None:
            logprob_B = logits_BV.float().log_softmax(-1).gather(1, token_B[:, None])[:, 0]
            self.logprob_NL[live_B, self.step] = logprob_B.masked_fill(done_B, 0.0)
        self.ended_N[live_B] |= ~done_B & ended_B
        self.step += 1
        self.done_N[live_B] = done_B | ended_B | (self.budget_N[live_B] <= self.step)

    def apply_stop_fn(self, stop_fn: StopFn, num_return_sequences: int) -> None:
        """Stop the rows whose text now contains a stop string."""
        open_N = ~self.ended_N & (self.budget_N >= self.step) & (self.stopped_N == NOT_STOPPED)
        for row in open_N.nonzero()[:, 0].tolist():
            if stop_fn(row // num_return_sequences, self.token_NL[row, : self.step].tolist()):
                self.done_N[row], self.stopped_N[row] = True, self.step

    def token_ids(self, row: int) -> list[int]:
        """Return the ids of a row before EOS, stop string or budget."""
        ids = self.token_NL[row, : min(self.step, int(self.budget_N[row]), int(self.stopped_N[row]))].tolist()
        return list(takewhile(lambda token: token not in self.logits_processor.eos_ids, ids))

    def to_sequence(self, row: int) -> GeneratedSequence:
        ids, ended, stopped = self.token_ids(row), bool(self.ended_N[row]), bool(self.stopped_N[row] < NOT_STOPPED)
        logprobs = self.logprob_NL[row, : len(ids) + (ended and not stopped)].tolist()
        return GeneratedSequence(ids, ended or stopped, logprobs, sum(logprobs))

    def to_sequences(self) -> list[GeneratedSequence]:
        return [self.to_sequence(row) for row in range(len(self.done_N))]


def make_logits_processor(
    model: Model, budget: LengthBudget, generation_config: GenerationConfig, eos_ids: TokenIds, logits_BV: Tensor
) -> LogitsProcessor:
    """Return the processor. Its history is the prompt, or the start token of an encoder-decoder."""
    vocab, prompts = require_tokenizer(model).vocab, budget.prompts
    if isinstance(model, EncoderDecoder):
        prompts = [[make_sequence_template(model.config, vocab).decoder_start_id]] * len(prompts)
    return LogitsProcessor(
        prompts,
        generation_config,
        eos_ids,
        logits_BV.shape[1],
        logits_BV.device,
        forced_tokens(model),
        budget.budgets,
        model_constraint(model, generation_config),
    )


def ended_by_choice(model: Model, sequence: GeneratedSequence, max_new_tokens: int) -> bool:
    """Whether the model ended a text itself. BART's forced EOS at the last position is a cut, too."""
    is_forced = forced_tokens(model).eos is not None and len(sequence.tokens) + 1 >= max_new_tokens
    return sequence.finished and not is_forced


def forced_tokens(model: Model) -> ForcedTokens:
    """Return the tokens that begin and end every text. A decoder's prompt has begun it already."""
    forced = get_forced_tokens(model, require_tokenizer(model).vocab)
    return forced if isinstance(model, EncoderDecoder) else ForcedTokens(eos=forced.eos)


def model_constraint(model: Model, generation_config: GenerationConfig) -> Constraint | None:
    """Return the constraint of structured output; None for free text."""
    grammar = read_grammar(generation_config)
    if grammar is None:
        return None
    is_continuation = not isinstance(model, EncoderDecoder)
    return make_constraint(grammar, require_tokenizer(model), check_can_generate(model), is_continuation)
