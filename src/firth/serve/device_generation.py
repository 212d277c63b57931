"""Generate on a GPU for the clients of a server, by `generate/device_decode.py`.

Requests with the same settings share the slots of one decode: a CUDA graph replays steps of all slots, and the host
looks at the state every few steps. A request that arrives meanwhile takes a free slot, or the slot of a text that has
ended (continuous batching). Its text is that of a request alone: random numbers depend on its own seed.

A step of many slots takes longer than a step of one. So a batch begins with few slots (`count_slots`), and requests
that do not fit into it begin another one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from firth.generate.decode_state import check_can_generate
from firth.generate.device_decode import (
    MAX_KEPT_BYTES,
    STEPS_PER_CHECK,
    STREAM_STEPS_PER_CHECK,
    DecodeRequest,
    DeviceDecode,
    DeviceScheduler,
    DeviceSettings,
    make_device_decode,
    make_settings,
    num_slots_that_fit,
)
from firth.generate.length_budget import make_length_budget
from firth.generate.loop import GeneratedSequence, forced_tokens, to_generated_sequence
from firth.models import EncoderDecoder, Model
from firth.serve.batching import Job
from firth.serve.generation import RunningJob
from firth.tokens import TokenIds

SLOT_FACTOR = 4  # a batch has 1, 4, 16 ... slots: few sizes, since each needs a graph of its own
MAX_IDLE_DECODES = 4


def count_slots(num_rows: int, max_batch_size: int) -> int:
    """Return the slots of a batch that begins with so many texts.

    >>> [count_slots(n, 32) for n in (1, 2, 4, 5, 17)]
    [1, 4, 4, 16, 32]
    """
    slots = 1
    while slots < num_rows:
        slots *= SLOT_FACTOR
    return max(num_rows, min(slots, max_batch_size))


class DecodePool:
    """Slots that no batch uses at present, with their captured graphs."""

    def __init__(self) -> None:
        self.idle: list[DeviceDecode] = []

    def take(self, model: Model, settings: DeviceSettings, num_slots: int, *lengths: int) -> DeviceDecode:
        """Return idle slots that fit, or new ones. `lengths`: longest prompt, new tokens, longest source."""
        for decode in self.idle:
            if decode.fits(settings, num_slots, *lengths):
                self.idle.remove(decode)
                return decode
        return make_device_decode(model, settings, num_slots, *lengths)

    def put_back(self, decode: DeviceDecode) -> None:
        """Keep slots for a later batch; the oldest ones are freed where there are too many."""
        decode.done_B.fill_(True)
        self.idle.append(decode)
        while len(self.idle) > MAX_IDLE_DECODES or sum(2 * kept.fused.k.nbytes for kept in self.idle) > MAX_KEPT_BYTES:
            self.idle.pop(0)


class DeviceBatch:
    """The jobs of one scheduler: `admit` takes jobs in, `advance` decodes some steps and sends what is new."""

    def __init__(self, model: Model, scheduler: DeviceScheduler) -> None:
        self.model, self.scheduler = model, scheduler
        self.texts: dict[int, tuple[RunningJob, int]] = {}  # by the number of the sequence: its job, which choice
        self.sequences: dict[RunningJob, dict[int, GeneratedSequence]] = {}  # those that have ended, by choice
        self.steps = scheduler.run()

    def admit(self, job: Job) -> bool:
        """Let a job's texts wait for slots; return False if its prompts do not fit into them."""
        config = job.settings.config
        prompts = [prompt.input_ids for prompt in job.inputs.prompts]
        source_capacity = self.scheduler.decode.fused.source_capacity
        if isinstance(self.model, EncoderDecoder) and max(map(len, prompts)) > source_capacity:
            return False
        budget = make_length_budget(self.model, prompts, config.max_new_tokens)
        requests = [
            DecodeRequest(ids, num_tokens, seed, row, prompt.constraint)
            for prompt, ids, num_tokens, seed in zip(
                job.inputs.prompts, budget.prompts, budget.budgets, job.inputs.seeds, strict=True
            )
            for row in range(config.num_return_sequences)
        ]
        part = RunningJob(job)
        self.sequences[part] = {}
        self.texts |= {number: (part, choice) for choice, number in enumerate(self.scheduler.add(requests))}
        return True

    def has_stop_string(self, number: int, ids: TokenIds) -> bool:
        if number not in self.texts:  # cancelled
            return False
        part, choice = self.texts[number]
        return part.prompts[choice].has_stop_string(ids)

    def drop_cancelled(self) -> None:
        """Free the slots of clients that have gone."""
        for number in [number for number, (part, _) in self.texts.items() if not part.job.is_open]:
            self.scheduler.cancel(number)
            part, _ = self.texts.pop(number)
            self.sequences.pop(part, None)

    def advance(self) -> bool:
        """Decode until the next check; return whether anything was left to decode."""
        self.drop_cancelled()
        is_streamed = any(part.is_streamed for part, _ in self.texts.values())
        self.scheduler.steps_per_check = STREAM_STEPS_PER_CHECK if is_streamed else STEPS_PER_CHECK
        finished = next(self.steps, None)
        if finished is None:
            return False
        if is_streamed:
            for number, ids in self.scheduler.text_ids().items():
                if number in self.texts and self.texts[number][0].is_streamed:
                    part, choice = self.texts[number]
                    part.send_stable_text(choice, ids)
        for done in finished:
            if done.number not in self.texts:  # cancelled
                continue
            part, choice = self.texts.pop(done.number)
            ended = self.sequences[part]
            ended[choice] = to_generated_sequence(done, part.job.settings.logprobs)
            if len(ended) == len(part.prompts):
                part.send_result([ended[i] for i in range(len(ended))])
                del self.sequences[part]
        return True


@torch.no_grad()
def decode_in_slots(model: Model, pool: DecodePool, arriving: list[Job], num_slots: int) -> Iterator[None]:
    """Generate the texts of jobs, and of those that are appended to `arriving` until all have ended."""
    while arriving:
        config, logprobs = arriving[0].settings
        longest = max(len(prompt.input_ids) for job in arriving for prompt in job.inputs.prompts)
        limit, is_seq2seq = model.config.max_length, isinstance(model, EncoderDecoder)
        max_new_tokens = config.max_new_tokens if limit is None else min(config.max_new_tokens, limit)
        settings = make_settings(model, config, forced_tokens(model), check_can_generate(model), logprobs)
        lengths = (1, max_new_tokens, longest) if is_seq2seq else (longest, max_new_tokens, 0)
        fitting = min(num_slots, num_slots_that_fit(model, longest, max_new_tokens))
        scheduler = DeviceScheduler(pool.take(model, settings, fitting, *lengths))
        batch = DeviceBatch(model, scheduler)
        if config.stop:
            scheduler.stop_fn = batch.has_stop_string
        while True:
            while arriving and batch.admit(arriving[0]):  # a job that does not fit waits, and those behind it
                arriving.pop(0)
            if not batch.advance():
                break
            yield
        pool.put_back(scheduler.decode)
