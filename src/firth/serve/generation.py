"""Jobs that generate text: what a request asks for, its running texts, and their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from firth.generate import GenerationConfig
from firth.generate.loop import GeneratedSequence, iterate_decode_steps
from firth.generate.text import PromptText
from firth.models import Model
from firth.serve.batching import Job, Piece, Result


class Choice:
    """One generated text of a request."""

    def __init__(self, prompt: PromptText, sequence: GeneratedSequence) -> None:
        self.new, self.full = prompt.new_text(sequence.tokens), prompt.full_text(sequence.tokens)
        self.sequence, self.facts = sequence, prompt.constraint_facts(sequence.tokens)  # `complete` and `value`
        is_whole = sequence.finished and self.facts.get("complete", True)
        self.finish_reason = "stop" if is_whole else "length"


@dataclass(frozen=True)
class Generation:
    """The inputs of a job that generates: its prompts, the seed of each, and whether its text is streamed."""

    prompts: list[PromptText]
    seeds: list[int]
    is_streamed: bool

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.input_ids) for prompt in self.prompts)


class GenerationSettings(NamedTuple):
    """What requests must share to be decoded together. The seed of the config is not used: each request has its own."""

    config: GenerationConfig
    logprobs: bool


class RunningJob:
    """A job that is decoded: the prompt of each of its texts, and the text that its client has of each."""

    def __init__(self, job: Job) -> None:
        self.job = job
        each = job.settings.config.num_return_sequences
        self.prompts: list[PromptText] = [prompt for prompt in job.inputs.prompts for _ in range(each)]
        self.sent = [""] * len(self.prompts)

    @property
    def is_streamed(self) -> bool:
        return bool(self.job.inputs.is_streamed)

    def send_stable_text(self, choice: int, ids: list[int]) -> None:
        """Send the text of new ids that later ones cannot change, as far as the client does not have it."""
        text = self.prompts[choice].stable_text(ids)
        if text.startswith(self.sent[choice]):
            self.send_text(choice, text)

    def send_result(self, sequences: Sequence[GeneratedSequence]) -> None:
        """Send the end of each streamed text, and the result."""
        choices = [Choice(prompt, sequence) for prompt, sequence in zip(self.prompts, sequences, strict=True)]
        if self.is_streamed:
            for i, made in enumerate(choices):
                self.send_text(i, made.new)
        self.job.send(Result(choices))

    def send_text(self, choice: int, text: str) -> None:
        """Send the part of a text that its client does not have."""
        if new := text[len(self.sent[choice]) :]:
            self.job.send(Piece(choice, new))
            self.sent[choice] = text


def decode_token_by_token(model: Model, jobs: Sequence[Job]) -> Iterator[None]:
    """Generate one token of each text in every step."""
    config, logprobs = jobs[0].settings
    prompts = [(job, prompt) for job in jobs for prompt in job.inputs.prompts]
    running, num_rows = list[tuple[RunningJob, range]](), 0
    for job in jobs:
        part = RunningJob(job)
        running.append((part, range(num_rows, num_rows + len(part.prompts))))
        num_rows += len(part.prompts)

    def should_stop(index: int, ids: Sequence[int]) -> bool:
        job, prompt = prompts[index]
        return not job.is_open or bool(config.stop and prompt.has_stop_string(ids))

    for decoded in iterate_decode_steps(
        model,
        [prompt.input_ids for _, prompt in prompts],
        config,
        stop_fn=should_stop,
        logprobs=logprobs,
        seeds=[seed for job in jobs for seed in job.inputs.seeds],
    ):
        is_done = decoded.done_N.tolist()
        running = [(part, rows) for part, rows in running if part.job.is_open]
        for part, rows in running:
            if part.is_streamed:
                for choice, row in enumerate(rows):
                    part.send_stable_text(choice, decoded.token_ids(row))
            if all(is_done[row] for row in rows):
                part.send_result([decoded.to_sequence(row) for row in rows])
        if not any(part.job.is_open for part, _ in running):
            return
        yield
