"""Decoding on a GPU without a host wait per token.

`loop.py` chooses each token from Python: some ten operations, each launched by the host, between two decode steps. On a
GPU that takes longer than the step itself. Here all state of the batch is on the device: logits, tokens so far,
lengths, random numbers, and which rows are done. One step, from logits over the choice of a token to the next logits,
is one CUDA graph, which the host replays many times in a row. It looks at the state only every few steps, and while the
next steps already run.

Rows of the batch are slots. When a sequence ends, the next prompt takes its slot (continuous batching, Yu et al. 2022,
"Orca", section 3.2): prompts of different lengths, and answers of different lengths, keep all slots busy.

The text of a sequence depends on the model, the prompt, the seed and the sequence's number, not on the slots around it:
its random numbers are those of `sampling.py`.

A grammar (`constraint.py`) is walked by the host: it must know a token before it can say which ones may follow. The
graph of such a step reads the mask from the host's memory, one bit for each token, chooses a token, writes it to the
host's memory, and computes the next logits. The host walks on meanwhile, and launches the next graph before this one
ends, since the logits take longer than the next mask.

A graph holds the addresses of its tensors, so that the state of the last call is kept with the model and used again by
a call that fits. The first call compiles and captures, the later ones start at once.

B slots, N sequences, L new tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from firth.generate.config import GenerationConfig
from firth.generate.constraint import Constraint, ConstraintRow, MaskRequest, TokenMasks, num_mask_words
from firth.generate.cuda_graph import capture_graph
from firth.generate.decode_state import CachedDecode, get_mask_ids, require_tokenizer
from firth.generate.length_budget import INITIAL_NEW_TOKENS, warn_context_length
from firth.generate.sampling import (
    NEG_INF,
    apply_repetition_penalty,
    force_token,
    sample_tokens,
    seen_tokens,
    token_uniforms,
)
from firth.models import Encoder, EncoderDecoder, ForcedTokens, Model, Stack
from firth.models.fused_decode import FusedDecode, can_fuse_decode, fused_logits
from firth.models.heads import LMHeadModule
from firth.models.kernels.decode_choice import RowState, argmax_parts, forbid_by_host_mask, record_tokens
from firth.tokens import TokenIds

STEPS_PER_CHECK = 16  # steps that are replayed before the host looks for ended sequences
STREAM_STEPS_PER_CHECK = 2  # the same where a reader waits for the text
MAX_SLOTS = 64  # sequences that are decoded at the same time
REFILL_SHARE = 8  # prompts wait until this fraction of the slots, one in 8, is free: each prefill interrupts decoding
CAPACITY_MULTIPLE_TOKENS = 64
MIN_GRAPH_STEPS = 16  # fewer steps do not repay the capture of a graph
MAX_KEPT_BYTES = 4 * 2**30  # bytes of a KV cache that is kept for the next call


class DecodeRequest(NamedTuple):
    """A sequence to decode, with at most `budget` new tokens. Its random numbers depend on `seed` and `row`."""

    prompt: TokenIds
    budget: int
    seed: int
    row: int
    constraint: Constraint | None = None


class DecodedSequence(NamedTuple):
    """The new tokens of a sequence, with EOS where it ended by it."""

    number: int
    tokens: list[int]
    logprobs: list[float]
    ended: bool  # by EOS
    stopped: bool  # by a stop string

    @property
    def text_ids(self) -> list[int]:
        """The tokens without EOS."""
        return self.tokens[: len(self.tokens) - self.ended]


def stack_of(model: Model) -> Stack:
    if isinstance(model, EncoderDecoder):
        return model.decoder
    assert isinstance(model, Encoder)
    return model.stack


def can_decode_on_device(model: Model, generation_config: GenerationConfig) -> bool:
    """Whether `DeviceDecode` supports the model and the settings; otherwise `loop.py` decodes token by token."""
    return (
        model.embed.tokens.weight.is_cuda
        and not torch.is_autocast_enabled("cuda")
        and generation_config.num_beams == 1
        and not generation_config.no_repeat_ngram_size
        and supports_device_decode(model)
    )


def supports_device_decode(model: Model) -> bool:
    if not isinstance(model, Encoder | EncoderDecoder) or model.config.recurrent is not None:
        return False
    return not get_mask_ids(model) and can_fuse_decode(stack_of(model))


class DeviceSettings(NamedTuple):
    """What a captured step depends on, besides the sizes of its tensors."""

    temperature: float  # 0: greedy
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    min_new_tokens: int
    forced: ForcedTokens
    eos_ids: tuple[int, ...]
    keeps_logprobs: bool
    is_constrained: bool
    weight_addresses: tuple[int, ...]


def make_settings(
    model: Model, config: GenerationConfig, forced: ForcedTokens, eos_ids: TokenIds, logprobs: bool
) -> DeviceSettings:
    return DeviceSettings(
        0.0 if config.is_greedy else config.temperature,
        config.top_k,
        config.top_p,
        config.min_p,
        config.repetition_penalty,
        config.min_new_tokens,
        forced,
        tuple(eos_ids),
        logprobs,
        config.constraint is not None,
        tuple(p.data_ptr() for p in model.parameters()),
    )


class DeviceDecode:
    """B slots with all their state on the device. `fill` puts prompts into slots, `run` decodes some steps."""

    def __init__(
        self,
        model: Model,
        settings: DeviceSettings,
        num_slots: int,
        capacity: int,
        max_new_tokens: int,
        source_capacity: int,
    ) -> None:
        self.model, self.settings, self.num_slots = model, settings, num_slots
        self.device, self.vocab_size = model.embed.tokens.weight.device, require_tokenizer(model).vocab.size
        self.fused = FusedDecode(stack_of(model), num_slots, capacity, source_capacity)
        self.max_new_tokens = max_new_tokens
        B, device = num_slots, self.device
        self.logits_BV = model.embed.tokens.weight.new_zeros(B, self.vocab_size)
        # + 1: a slot whose sequence is over still writes, behind its last token
        self.token_BL = torch.zeros(B, max_new_tokens + 1, dtype=torch.long, device=device)
        self.uniform_BL = torch.zeros(B, max_new_tokens + 1, device=device)
        self.logprob_BL = torch.zeros(B, max_new_tokens + 1, device=device)
        self.count_B = torch.zeros(B, dtype=torch.long, device=device)  # new tokens
        self.budget_B = torch.zeros_like(self.count_B)
        self.prompt_length_B = torch.ones_like(self.count_B)  # a slot that is never filled computes position 0
        self.done_B = torch.ones(B, dtype=torch.bool, device=device)
        self.ended_B = torch.zeros_like(self.done_B)
        self.seen_BV = (
            torch.zeros(B, self.vocab_size, dtype=torch.bool, device=device)
            if settings.repetition_penalty != 1
            else None
        )
        self.eos_E = torch.tensor([i for i in settings.eos_ids if i < self.vocab_size], dtype=torch.long, device=device)
        self.graph: Callable[[], None] | None = None
        self.host_chosen_B: Tensor | None = None
        if settings.is_constrained:
            width, is_pinned = num_mask_words(self.vocab_size), device.type == "cuda"
            self.host_permitted_BW = torch.full((B, width), -1, dtype=torch.int32, pin_memory=is_pinned)
            self.host_masks = TokenMasks(self.host_permitted_BW.numpy())
            self.host_chosen_B = torch.zeros(B, dtype=torch.long, pin_memory=is_pinned)

    def fits(self, settings: DeviceSettings, num_slots: int, longest: int, max_new: int, longest_source: int) -> bool:
        """Whether these slots can be used again, for these settings and lengths."""
        return (
            self.settings == settings
            and self.num_slots == num_slots
            and self.max_new_tokens >= max_new
            and self.fused.capacity >= initial_capacity(longest, max_new)
            and self.fused.source_capacity >= longest_source
        )

    def fill(self, slots: Sequence[int], prompts: Sequence[TokenIds], budgets: Sequence[int], uniform: Tensor) -> None:
        """Compute the prompts and put each into its slot. `uniform` (len(slots), L) are the sequences' random numbers.

        Slots in a row that have the same prompt share its computation.
        """
        unique, which = list[TokenIds](), list[int]()
        for prompt in prompts:
            if not unique or prompt is not unique[-1]:
                unique.append(prompt)
            which.append(len(unique) - 1)
        state = CachedDecode(self.model, unique, 0)
        logits_UV = state.prefill()
        slot_S, which_S = (torch.tensor(x, device=self.device) for x in (slots, which))
        lengths = list(map(len, state.decoder_prompts))
        self.fused.fill(slot_S, which_S, state.cache, lengths, list(map(len, unique)))
        self.prompt_length_B[slot_S] = torch.tensor(lengths, device=self.device)[which_S]
        self.logits_BV[slot_S] = logits_UV[which_S].to(self.logits_BV.dtype)
        self.count_B[slot_S], self.done_B[slot_S], self.ended_B[slot_S] = 0, False, False
        self.budget_B[slot_S] = torch.tensor(budgets, device=self.device)
        self.uniform_BL[slot_S, : uniform.shape[1]] = uniform.to(self.device)
        if self.seen_BV is not None:
            self.seen_BV[slot_S] = seen_tokens(state.decoder_prompts, self.vocab_size).to(self.device)[which_S]

    def run(self, num_steps: int, use_graph: bool) -> None:
        """Decode this many steps; wait for nothing."""
        step = self.step_fn(use_graph)
        for _ in range(num_steps):
            step()

    def run_constrained_step(self, use_graph: bool) -> list[int]:
        """Decode one step under the masks of `host_masks`; return the tokens while the logits are computed."""
        assert self.host_chosen_B is not None
        step, host_B = self.step_fn(use_graph), self.host_chosen_B.numpy()
        host_B.fill(-1)
        step()
        if self.device.type == "cuda":
            # The tokens arrive in the middle of a graph, where no event can be waited for. `query` raises GPU errors.
            stream = torch.cuda.current_stream(self.device)
            while host_B.min() < 0 and not stream.query():
                pass
        tokens: list[int] = host_B.tolist()
        return tokens  # so the mask has been read, too: the host may write the next one

    def step_fn(self, use_graph: bool) -> Callable[[], None]:
        if use_graph and self.graph is None:
            self.graph = capture_graph(self.step, self.mutable_state())
        return self.graph if use_graph and self.graph is not None else self.step

    def mutable_state(self) -> list[Tensor]:
        """The tensors that a step changes, apart from the cache beyond each row's length."""
        state = [self.logits_BV, self.token_BL, self.logprob_BL, self.count_B, self.done_B, self.ended_B]
        return [*state, self.fused.position_B, *([] if self.seen_BV is None else [self.seen_BV])]

    def step(self) -> None:
        """Choose a token from the logits of each slot, record it, and compute the logits after it."""
        self.forward(self.choose_token())

    def choose_token(self) -> Tensor:
        """Choose a token from the logits of each slot, (B,), and record it."""
        value_BC, token_BC = self.choose()
        at_B1 = self.count_B.clone()[:, None] if self.settings.keeps_logprobs else None
        token_B = record_tokens(value_BC, token_BC, self.row_state(), self.host_chosen_B)
        if at_B1 is not None:
            logprob_B1 = self.logits_BV.float().log_softmax(-1).gather(1, token_B[:, None])
            self.logprob_BL.scatter_(1, at_B1, logprob_B1)
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, token_B[:, None], True)
        return token_B

    def row_state(self) -> RowState:
        return RowState(
            self.token_BL,
            self.count_B,
            self.budget_B,
            self.done_B,
            self.ended_B,
            self.prompt_length_B,
            self.fused.position_B,
            self.eos_E,
        )

    def choose(self) -> tuple[Tensor, Tensor]:
        """Return candidates (B, C) and their values. The best is the likeliest token, or the only one is a sample."""
        settings = self.settings
        if settings.temperature == 0:
            return argmax_parts(self.process(self.logits_BV))
        config = GenerationConfig(
            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p
        )
        uniform_B1 = self.uniform_BL.gather(1, self.count_B[:, None])
        token_B1 = sample_tokens(self.process(self.logits_BV), config, uniform_B1)[:, None]
        return torch.zeros_like(token_B1, dtype=torch.float32), token_B1

    def process(self, scores_BV: Tensor) -> Tensor:
        """`LogitsProcessor.process`, with the number of new tokens of each slot on the device."""
        settings, count_B1 = self.settings, self.count_B[:, None]
        if self.seen_BV is not None:
            scores_BV = apply_repetition_penalty(scores_BV.float(), self.seen_BV, settings.repetition_penalty)
        if settings.is_constrained:
            scores_BV = forbid_by_host_mask(scores_BV, self.host_permitted_BW)  # it knows `min_new_tokens`
        elif settings.min_new_tokens:
            without_eos_BV = scores_BV.index_fill(1, self.eos_E, NEG_INF)
            scores_BV = torch.where(count_B1 < settings.min_new_tokens, without_eos_BV, scores_BV)
        if settings.forced.bos is not None:
            scores_BV = torch.where(count_B1 == 0, force_token(scores_BV, settings.forced.bos), scores_BV)
        if settings.forced.eos is not None:
            is_last_B1 = self.budget_B[:, None] == count_B1 + 1
            scores_BV = torch.where(is_last_B1, force_token(scores_BV, settings.forced.eos), scores_BV)
        return scores_BV

    def forward(self, token_B: Tensor) -> None:
        """Compute the logits after one more token in each slot."""
        position_B, max_length = self.fused.position_B, self.model.config.max_length
        if max_length is not None:
            position_B = position_B.clamp(max=max_length - 1)  # slots that are done may be beyond it
        position_embedding = self.model.decoder_embed if isinstance(self.model, EncoderDecoder) else None
        x_B1D = self.model.embed(token_B[:, None], position_B[:, None], position_embedding=position_embedding)
        x_BD, due = self.fused.decode_step(x_B1D[:, 0])
        assert isinstance(self.model.head, LMHeadModule)
        fused_logits(x_BD, due, self.model.head, self.model.embed.tokens.weight, self.logits_BV)

    def grow(self, capacity: int) -> None:
        """Give the KV cache this capacity. It gets new addresses, so that the graph must be captured again."""
        old = self.fused
        self.fused = FusedDecode(old.stack, self.num_slots, capacity, old.source_capacity)
        self.fused.k[:, :, :, : old.capacity], self.fused.v[:, :, :, : old.capacity] = old.k, old.v
        self.fused.source_k, self.fused.source_v = old.source_k, old.source_v
        self.fused.position_B, self.fused.source_length_B = old.position_B, old.source_length_B
        self.graph = None


def initial_capacity(longest: int, max_new_tokens: int) -> int:
    """Positions of the KV cache at first; it doubles when it is full."""
    size = longest + min(max_new_tokens, INITIAL_NEW_TOKENS)
    return -(-size // CAPACITY_MULTIPLE_TOKENS) * CAPACITY_MULTIPLE_TOKENS


def num_slots_that_fit(model: Model, longest: int, max_new_tokens: int) -> int:
    """Slots whose KV cache fits into half of the GPU's free memory."""
    weight, config = model.embed.tokens.weight, model.config
    if not weight.is_cuda:
        return MAX_SLOTS
    free = torch.cuda.mem_get_info(weight.device)[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    numbers = 2 * stack_of(model).num_layers * config.kv_heads * config.head_size
    slot_bytes = numbers * initial_capacity(longest, max_new_tokens) * weight.element_size()
    return max(1, min(MAX_SLOTS, free // (2 * slot_bytes)))


kept_decodes: WeakKeyDictionary[Model, DeviceDecode] = WeakKeyDictionary()


def take_device_decode(
    model: Model, settings: DeviceSettings, num_slots: int, longest: int, max_new_tokens: int, longest_source: int
) -> DeviceDecode:
    """Return slots for these lengths: those of the last call, if they fit."""
    kept = kept_decodes.pop(model, None)
    if kept is not None and kept.fits(settings, num_slots, longest, max_new_tokens, longest_source):
        return kept
    del kept  # frees its cache before the next one is allocated
    return make_device_decode(model, settings, num_slots, longest, max_new_tokens, longest_source)


def make_device_decode(
    model: Model, settings: DeviceSettings, num_slots: int, longest: int, max_new_tokens: int, longest_source: int
) -> DeviceDecode:
    """Return new slots for these lengths."""
    source_capacity = -(-longest_source // CAPACITY_MULTIPLE_TOKENS) * CAPACITY_MULTIPLE_TOKENS
    capacity = initial_capacity(longest, max_new_tokens)
    return DeviceDecode(model, settings, num_slots, capacity, max_new_tokens, source_capacity)


def keep_device_decode(decode: DeviceDecode) -> None:
    """Keep the slots for the next call of the same model, unless they are large."""
    decode.done_B.fill_(True)
    if 2 * decode.fused.k.nbytes <= MAX_KEPT_BYTES:
        kept_decodes[decode.model] = decode


def drop_device_decode(model: Model) -> None:
    """Free the slots that are kept for a model; they hold the model, too."""
    kept_decodes.pop(model, None)


@dataclass
class Slot:
    """A sequence that is being decoded."""

    index: int
    prompt_length: int
    budget: int
    constraint: ConstraintRow | None = None
    steps: int = 0  # that were launched for it
    checked: int = 0  # tokens in which stop strings were looked for
    stopped_at: int | None = None


@dataclass
class DeviceScheduler:
    """Decode sequences in B slots; a prompt that waits takes the slot of a sequence that has ended.

    `add` numbers the sequences from 0 on. More can be added while `run` yields.
    """

    decode: DeviceDecode
    stop_fn: Callable[[int, TokenIds], bool] | None = None  # number and new ids -> whether a stop string occurs
    steps_per_check: int = STEPS_PER_CHECK
    slots: list[Slot | None] = field(init=False)
    waiting: deque[int] = field(init=False, default_factory=deque)
    requests: dict[int, DecodeRequest] = field(init=False, default_factory=dict)  # by number; those that have not ended
    num_added: int = field(init=False, default=0)
    use_graph: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.slots = [None] * self.decode.num_slots

    def add(self, requests: Sequence[DecodeRequest]) -> list[int]:
        """Let sequences wait for a slot; return their numbers. Adjacent ones share a prompt that is one object."""
        numbers = list(range(self.num_added, self.num_added + len(requests)))
        self.num_added += len(requests)
        self.requests |= dict(zip(numbers, requests, strict=True))
        self.waiting += numbers
        is_long = any(request.budget >= MIN_GRAPH_STEPS for request in requests)
        self.use_graph = self.use_graph or (self.decode.device.type == "cuda" and is_long)
        return numbers

    def cancel(self, number: int) -> None:
        """Stop a sequence: its slot is free after the next check, where `run` yields it as stopped."""
        if number in self.waiting:
            self.waiting.remove(number)
            del self.requests[number]
        for slot in self.slots:
            if slot is not None and slot.index == number:
                slot.stopped_at = 0

    def run(self) -> Iterator[list[DecodedSequence]]:
        """Yield the sequences that have ended, after each check; an empty list if none has."""
        self.refill()
        pending: Callable[[], list[bool]] | None = None
        while any(self.slots):
            self.launch()
            done, pending = pending, self.read_done()
            if not self.has_steps_left():  # nothing more to launch: wait for the last steps
                done, pending = pending, None
            finished = [] if done is None else self.collect(done())
            yield finished
            if self.waiting and self.should_refill():
                if pending is not None:
                    finished = self.collect(pending())
                    yield finished
                pending = None
                self.refill()

    def launch(self) -> None:
        """Launch the next steps."""
        active = [slot for slot in self.slots if slot is not None]
        steps = min(self.steps_per_check, max(slot.budget - slot.steps for slot in active))
        if steps <= 0:
            return
        longest = max(slot.prompt_length + min(slot.steps + steps, slot.budget) for slot in active)
        warn_context_length(self.decode.model, longest)
        if longest > self.decode.fused.capacity:
            self.decode.grow(2 * self.decode.fused.capacity)
        if self.decode.settings.is_constrained:
            self.run_constrained(steps)
        else:
            self.decode.run(steps, self.use_graph)
        for slot in active:
            slot.steps += steps

    def run_constrained(self, num_steps: int) -> None:
        """Decode this many steps, and wait for each token, until all sequences have ended."""
        min_new_tokens = self.decode.settings.min_new_tokens
        for step in range(num_steps):
            requests = [
                MaskRequest(b, slot.constraint, slot.steps + step >= min_new_tokens)
                for b, slot in enumerate(self.slots)
                if slot and slot.constraint and not slot.constraint.ended and slot.steps + step < slot.budget
            ]
            if not requests:
                return
            self.decode.host_masks.write(requests)
            tokens = self.decode.run_constrained_step(self.use_graph)
            for b, row, _ in requests:
                row.accept(tokens[b])

    def has_steps_left(self) -> bool:
        return any(slot is not None and slot.steps < slot.budget for slot in self.slots)

    def read_done(self) -> Callable[[], list[bool]]:
        """Start to copy the state of the slots to the host; the returned function waits for it."""
        done_B, owners = self.decode.done_B, list(self.slots)
        if not done_B.is_cuda:
            copied = done_B.clone()
            return lambda: self.of_owners(copied, owners)
        host_B = torch.empty(len(done_B), dtype=torch.bool, pin_memory=True)
        host_B.copy_(done_B, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait() -> list[bool]:
            event.synchronize()
            return self.of_owners(host_B, owners)

        return wait

    def of_owners(self, done_B: Tensor, owners: Sequence[Slot | None]) -> list[bool]:
        """Which slots were done, and still hold the sequence that they held then."""
        states = zip(done_B.tolist(), owners, self.slots, strict=True)
        return [done and owner is not None and owner is slot for done, owner, slot in states]

    def collect(self, done: Sequence[bool]) -> list[DecodedSequence]:
        """Return the sequences that are done, and free their slots."""
        if self.stop_fn is not None:
            self.apply_stop_strings()
        ready = [
            b for b, slot in enumerate(self.slots) if slot is not None and (done[b] or slot.stopped_at is not None)
        ]
        if not ready:
            return []
        ready_R = torch.tensor(ready, device=self.decode.device)
        counts, ended = self.decode.count_B[ready_R].tolist(), self.decode.ended_B[ready_R].tolist()
        L = max(counts)
        tokens, logprobs = (x[ready_R, :L].tolist() for x in (self.decode.token_BL, self.decode.logprob_BL))
        sequences = []
        for b, count, is_ended, ids, values in zip(ready, counts, ended, tokens, logprobs, strict=True):
            slot = self.slots[b]
            assert slot is not None
            is_stopped = slot.stopped_at is not None
            size = slot.stopped_at if slot.stopped_at is not None else count
            sequences.append(
                DecodedSequence(slot.index, ids[:size], values[:size], is_ended and not is_stopped, is_stopped)
            )
            self.slots[b] = None
            del self.requests[slot.index]
        self.decode.done_B[ready_R] = True
        return sequences

    def text_ids(self) -> dict[int, list[int]]:
        """Return the new tokens of each decoded sequence so far, without EOS; waits for the launched steps."""
        counts = (self.decode.count_B - self.decode.ended_B.long()).tolist()
        tokens = self.decode.token_BL[:, : max(counts)].tolist()
        rows = zip(self.slots, tokens, counts, strict=True)
        return {slot.index: ids[:count] for slot, ids, count in rows if slot is not None}

    def apply_stop_strings(self) -> None:
        """Find the first new token of each slot that completes a stop string."""
        assert self.stop_fn is not None
        counts, ended = self.decode.count_B.tolist(), self.decode.ended_B.tolist()
        tokens = self.decode.token_BL[:, : max(counts)].tolist()
        for slot, ids, count, is_ended in zip(self.slots, tokens, counts, ended, strict=True):
            if slot is None or slot.stopped_at is not None:
                continue
            text = count - is_ended  # EOS is no text
            for size in range(slot.checked + 1, text + 1):
                if self.stop_fn(slot.index, ids[:size]):
                    slot.stopped_at = size
                    break
            slot.checked = text

    def should_refill(self) -> bool:
        free = self.slots.count(None)
        return free >= min(len(self.waiting), max(1, len(self.slots) // REFILL_SHARE))

    def refill(self) -> None:
        """Put waiting prompts into free slots."""
        free = [b for b, slot in enumerate(self.slots) if slot is None]
        taken = [(b, self.waiting.popleft()) for b in free[: len(self.waiting)]]
        if not taken:
            return
        requests = [self.requests[number] for _, number in taken]
        prompts, budgets = [request.prompt for request in requests], [request.budget for request in requests]
        is_seq2seq = isinstance(self.decode.model, EncoderDecoder)
        lengths = [1 if is_seq2seq else len(prompt) for prompt in prompts]
        while max(lengths) > self.decode.fused.capacity:
            self.decode.grow(2 * self.decode.fused.capacity)
        width = max(budgets) if self.decode.settings.temperature else 0
        seeds_S1 = np.array([[request.seed % 2**64] for request in requests], dtype=np.uint64)
        uniform = torch.from_numpy(token_uniforms(seeds_S1, [request.row for request in requests], width))
        self.decode.fill([b for b, _ in taken], prompts, budgets, uniform)
        for (b, number), length, request in zip(taken, lengths, requests, strict=True):
            constraint = request.constraint.start_row() if request.constraint is not None else None
            self.slots[b] = Slot(number, length, request.budget, constraint)
