"""A loaded checkpoint, and what a server can ask of it: each method turns one request into a `Job`.

Making a job reads the request: prompts are encoded, lengths and limits are checked. This runs in a few helper threads,
so that a mistake costs the computing thread nothing. The operations at the end of the file compute batches of jobs.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firth.core.console import format_count
from firth.core.errors import UserError, did_you_mean, quote
from firth.evaluate.attention import AttentionWeights, Range, can_permute, compute_attention
from firth.evaluate.embed import embed_texts
from firth.evaluate.likelihood import resolve_max_length
from firth.evaluate.predict import Predictor
from firth.evaluate.predict_input import PredictInput, TaskInput
from firth.generate import Blank, GenerationConfig, fill_texts, generate_sequences
from firth.generate.decode_state import check_can_generate
from firth.generate.device_decode import can_decode_on_device
from firth.generate.fill import can_fill
from firth.generate.text import make_prompt_texts
from firth.models import EncoderDecoder, Model, load_model, make_sequence_template
from firth.models.config import EmbeddingHead
from firth.serve.batching import BatchWorker, Job, Operation, compute_together
from firth.serve.config import ServeConfig
from firth.serve.device_generation import DecodePool, count_slots, decode_in_slots
from firth.serve.errors import ApiError
from firth.serve.generation import Choice, Generation, GenerationSettings, decode_token_by_token
from firth.static.ngram import is_ngram
from firth.tasks.chat import CHAT_TEMPLATE_KEY
from firth.tasks.prompts import encode_messages, encode_task_prompts, finetuned_generation_settings
from firth.tasks.recipe import read_task_file
from firth.train import TrainingConfig, choose_compute

RUN_FOLDERS = re.compile(r"final|checkpoint-\d+|seed-\d+")  # say nothing about a model: its run's folder does
MAX_SEED = 2**31
GPU_LOCK = threading.Lock()  # while one model captures a CUDA graph, no other may launch a kernel


class ServedModel:
    """A checkpoint under a name, with its queue."""

    def __init__(self, name: str, checkpoint: str | Path, config: ServeConfig) -> None:
        if is_ngram(checkpoint):
            raise UserError(f"{checkpoint} is an n-gram model. `firth serve` serves neural models.")
        if not Path(checkpoint).is_dir():
            raise UserError(f"{checkpoint} is not a checkpoint folder: there is no such folder.")
        model = load_model(checkpoint)
        if model.tokenizer is None:
            raise UserError(f"{checkpoint} has no tokenizer: copy the model's tokenizer.json and its config into it.")
        self.name, self.config, self.created = name, config, int(time.time())
        device, dtype = choose_compute(TrainingConfig(compile=False)).device, torch.bfloat16 if config.bf16 else None
        self.model: Model = model.to(device, dtype).requires_grad_(False)
        self.tokenizer = model.tokenizer
        self.metadata = read_task_file(Path(checkpoint))
        self.predictors, self.decode_pool = self.make_predictors(), DecodePool()
        self.worker = BatchWorker(
            *(name, config.max_batch_size, config.batch_wait_ms / 1000, config.max_queue),
            lock=GPU_LOCK if device.type == "cuda" else None,
        )
        self.operations = {
            operation.name: operation
            for operation in (
                Operation("generate", lambda jobs: decode_token_by_token(self.model, jobs), has_steps=True),
                Operation("generate in slots", self.decode_in_slots, has_steps=True, capacity=self.count_slots),
                Operation("search", lambda jobs: compute_together(jobs, self.search_beams)),
                Operation("embed", lambda jobs: compute_together(jobs, self.embed_batch)),
                Operation("fill", lambda jobs: compute_together(jobs, self.fill_batch)),
                Operation("predict", lambda jobs: compute_together(jobs, self.predict_batch)),
                Operation("attention", lambda jobs: compute_together(jobs, self.attend_batch)),
                Operation("inspect", lambda jobs: compute_together(jobs, lambda jobs: [job.inputs() for job in jobs])),
            )
        }

    def make_predictors(self) -> dict[str, Predictor]:
        """Return a predictor for each task of the checkpoint, none if it has no task."""
        names = list(self.metadata.get("tasks", {})) or [""]
        try:
            found = [Predictor(self.model, name, self.config.max_batch_size, self.metadata or None) for name in names]
        except UserError:
            if self.metadata:
                raise
            return {}  # a pretrained model
        return {name or predictor.task.name: predictor for name, predictor in zip(names, found, strict=True)}

    @property
    def tasks(self) -> dict[str, str]:
        """The kind of each task by its name."""
        return {name: str(predictor.facts["task"]) for name, predictor in self.predictors.items()}

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.config.get(CHAT_TEMPLATE_KEY))

    @property
    def can_generate(self) -> bool:
        try:
            check_can_generate(self.model)
        except UserError:
            return False
        return True

    @property
    def can_fill(self) -> bool:
        return can_fill(self.model)

    @property
    def has_attention(self) -> bool:
        return self.model.config.recurrent is None and self.model.config.num_layers > 0

    def describe(self) -> dict[str, Any]:
        """What `/v1/models` tells."""
        abilities = {
            "generate": self.can_generate,
            "fill": self.can_fill,
            "attention": self.has_attention,
            "permutation": can_permute(self.model),
        }
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "firth",
            "architecture": self.model.config.architecture,
            "family": self.model.config.family,
            "max_length": self.model.config.max_length,
            "tasks": self.tasks,
            "has_chat_template": self.has_chat_template,
            "abilities": [name for name, is_able in abilities.items() if is_able],
            "labels": {name: list(predictor.task.labels) for name, predictor in self.predictors.items()},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "num_layers": self.model.config.num_layers,
            "tokenizer": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab.size,
            "unknown_id": self.tokenizer.vocab.unk,
        }

    # --- requests

    def chat_prompt(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        return encode_messages(self.model, messages)

    def task_prompts(self, texts: Sequence[str], chat: bool | None) -> list[str | list[int]]:
        """Return prompts in the format of the checkpoint's fine-tuning."""
        return encode_task_prompts(self.model, self.metadata, texts, chat)

    def generation_defaults(self) -> dict[str, Any]:
        return finetuned_generation_settings(self.model, self.metadata)

    def make_generation_job(
        self,
        prompts: Sequence[str | list[int]],
        settings: Mapping[str, Any],
        default_new_tokens: int = 50,
        is_streamed: bool = False,
        seed: int | None = None,
        logprobs: bool = False,
    ) -> Job:
        """`settings` are fields of `GenerationConfig`; without max_new_tokens, the default that still fits."""
        check_can_generate(self.model)
        for ids in prompts:
            if not isinstance(ids, str):
                self.check_token_ids(ids, "prompt")
                if not ids:
                    raise ApiError(400, "A prompt has no token.", "invalid_value", "prompt")
        config = GenerationConfig(**{"max_new_tokens": default_new_tokens, **settings, "seed": 0})
        texts = make_prompt_texts(self.model, prompts, config)
        longest = max(len(text.input_ids) for text in texts)
        positions_left = self.max_new_tokens_after(longest)
        if "max_new_tokens" not in settings:
            fits = min(
                config.max_new_tokens,
                self.config.max_output_tokens,
                *([] if positions_left is None else [max(positions_left, 1)]),
            )
            config = replace(config, max_new_tokens=fits, min_new_tokens=min(config.min_new_tokens, fits))
        new_tokens, each = config.max_new_tokens, config.num_return_sequences
        if positions_left is not None and new_tokens > positions_left:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.model.config.max_length} tokens. The prompt has "
                f"{longest}, and {format_count(new_tokens, 'new token')} were asked for.",
                "context_length_exceeded",
                "prompt",
            )
        rows = len(texts) * max(each, config.num_beams)
        if rows > self.config.max_batch_size:
            raise ApiError(
                400, f"{rows} texts in one request, and at most {self.config.max_batch_size} are computed together."
            )
        self.check_output_tokens(rows * new_tokens)
        self.check_input_tokens(sum(len(text.input_ids) for text in texts))
        seed = secrets.randbelow(MAX_SEED) if seed is None else seed
        generation = Generation(texts, [seed + i for i in range(len(texts))], is_streamed)
        if config.num_beams > 1 and is_streamed:
            raise UserError("Streaming supports one text: set num_beams=1.")
        on_device = can_decode_on_device(self.model, config)
        name = "search" if config.num_beams > 1 else "generate in slots" if on_device else "generate"
        return Job(self.operations[name], GenerationSettings(config, logprobs), generation, rows)

    def max_new_tokens_after(self, prompt_tokens: int) -> int | None:
        """Return how many tokens fit behind a prompt; None: any number."""
        limit = self.model.config.max_length
        if limit is None:
            return None
        if isinstance(self.model, EncoderDecoder):
            return limit if prompt_tokens <= limit else 0
        return limit - prompt_tokens + (not self.model.config.predicts_at_mask)  # the last new token needs no position

    def make_embedding_job(self, texts: Sequence[str]) -> Job:
        counts = [len(ids) for ids in self.tokenizer.encode_batch(list(texts))]
        self.check_input_tokens(sum(counts))
        template = make_sequence_template(self.model.config, self.tokenizer.vocab)
        head = self.model.config.head
        limit = resolve_max_length(self.model, head.max_length if isinstance(head, EmbeddingHead) else 0)
        longest = max(counts) + template.num_special_tokens()
        if longest > limit:
            message = f"This model's maximum context length is {limit} tokens, and a text has {longest}."
            raise ApiError(400, message, "context_length_exceeded", "input")
        return Job(self.operations["embed"], None, (list(texts), sum(counts)), len(texts))

    def make_fill_job(self, texts: Sequence[str], top: int, compare: bool = False) -> Job:
        self.check_input_tokens(sum(len(ids) for ids in self.tokenizer.encode_batch(list(texts))))
        return Job(self.operations["fill"], (top, compare), list(texts), len(texts))

    def make_prediction_job(self, inputs: Sequence[PredictInput], task: str) -> Job:
        """`task` is the name of one of the checkpoint's tasks."""
        task_inputs = [self.predictors[task].reader.read(value, i) for i, value in enumerate(inputs, 1)]
        texts = [text for task_input in task_inputs for text in task_input.example.texts]
        self.check_input_tokens(sum(len(ids) for ids in self.tokenizer.encode_batch(texts)))
        return Job(self.operations["predict"], task, task_inputs, len(task_inputs))

    def find_task(self, kinds: Sequence[str], task: str | None) -> str:
        """Return the name of the checkpoint's task that has one of these kinds."""
        suitable = [name for name, kind in self.tasks.items() if kind in kinds]
        if task is not None and task not in suitable:
            message = f"The model {self.name} has no such task: {quote(task)}. {did_you_mean(task, suitable)}"
            raise ApiError(400, message.strip(), "invalid_value", "task")
        if task is None and len(suitable) != 1:
            known = ", ".join(f"{name} ({kind})" if name != kind else name for name, kind in self.tasks.items())
            problem = "name one of its tasks" if suitable else f"a task of the kind {' or '.join(kinds)} is needed"
            raise ApiError(
                400, f"The model {self.name} knows {known or 'no task'}: {problem}.", "invalid_value", "task"
            )
        return task or suitable[0]

    def make_attention_job(
        self,
        text: str | Sequence[int],
        target: str | Sequence[int],
        layers: Sequence[int] | None,
        heads: Sequence[int] | None,
        queries: Range | None = None,
        keys: Range | None = None,
        permutation: int | None = None,
    ) -> Job:
        parts = [self.tokenizer.encode(part) if isinstance(part, str) else part for part in (text, target)]
        self.check_input_tokens(sum(map(len, parts)))
        return Job(self.operations["attention"], None, (text, target, layers, heads, queries, keys, permutation))

    def make_inspection_job(self, compute: Callable[[], Any]) -> Job:
        """`compute` runs in the computing thread, one job at a time."""
        return Job(self.operations["inspect"], None, compute)

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        vocab_size = self.tokenizer.vocab.size
        if not all(0 <= i < vocab_size for i in ids):
            raise ApiError(400, f"Token ids must be from 0 to {vocab_size - 1}.", "invalid_value", param)

    def check_input_tokens(self, count: int) -> None:
        if count > self.config.max_input_tokens:
            message = (
                f"The request has {count:,} tokens, and this server reads at most {self.config.max_input_tokens:,}."
            )
            raise ApiError(400, message, "too_many_tokens")

    def check_output_tokens(self, count: int) -> None:
        if count > self.config.max_output_tokens:
            limit = self.config.max_output_tokens
            message = f"The request asks for {count:,} tokens, and this server generates at most {limit:,}."
            raise ApiError(400, message, "too_many_tokens", "max_tokens")

    # --- operations: batches of jobs

    def count_slots(self, num_rows: int) -> int:
        return count_slots(num_rows, self.config.max_batch_size)

    def decode_in_slots(self, jobs: list[Job]) -> Iterator[None]:
        num_rows = sum(job.num_rows for job in jobs)
        return decode_in_slots(self.model, self.decode_pool, jobs, self.count_slots(num_rows))

    def search_beams(self, jobs: Sequence[Job]) -> list[list[Choice]]:
        config: GenerationConfig = jobs[0].settings.config
        prompts = [prompt for job in jobs for prompt in job.inputs.prompts]
        stop_fn = (lambda i, ids: prompts[i].has_stop_string(ids)) if config.stop else None
        sequences = generate_sequences(self.model, [prompt.input_ids for prompt in prompts], config, stop_fn=stop_fn)
        each = config.num_return_sequences
        choices = iter([Choice(prompts[i // each], sequence) for i, sequence in enumerate(sequences)])
        return [[next(choices) for _ in range(len(job.inputs.prompts) * each)] for job in jobs]

    def embed_batch(self, jobs: Sequence[Job]) -> list[tuple[np.ndarray, int]]:
        vectors = embed_texts(self.model, [text for job in jobs for text in job.inputs[0]])
        ends = np.cumsum([len(job.inputs[0]) for job in jobs])
        return [(part, job.inputs[1]) for part, job in zip(np.split(vectors, ends[:-1]), jobs, strict=True)]

    def fill_batch(self, jobs: Sequence[Job]) -> list[list[list[Blank]]]:
        top, compare = jobs[0].settings
        if compare:  # with the texts of the same request alone
            return [fill_texts(self.model, job.inputs, top, compare) for job in jobs]
        found = iter(fill_texts(self.model, [text for job in jobs for text in job.inputs], top))
        return [[next(found) for _ in job.inputs] for job in jobs]

    def predict_batch(self, jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
        predictor = self.predictors[str(jobs[0].settings)]
        inputs: list[TaskInput] = [task_input for job in jobs for task_input in job.inputs]
        records = (record for _, record in predictor.predict_inputs(inputs))
        return [[next(records) for _ in job.inputs] for job in jobs]

    def attend_batch(self, jobs: Sequence[Job]) -> list[AttentionWeights]:
        """Compute one text at a time: the weights of a batch with padding would not be smaller."""
        return [compute_attention(self.model, *job.inputs) for job in jobs]


def name_checkpoints(checkpoints: Sequence[str]) -> dict[str, str]:
    """Return the folder of each model by its name: NAME=FOLDER, or else the name of the run's folder.

    >>> name_checkpoints(["topics/final", "fr=runs/french/checkpoint-500", "gpt2"])
    {'topics': 'topics/final', 'fr': 'runs/french/checkpoint-500', 'gpt2': 'gpt2'}
    """
    named: dict[str, str] = {}
    for given in checkpoints:
        name, equals, folder = given.partition("=")
        if not equals or not re.fullmatch(r"[\w.-]+", name) or Path(given).exists():
            folder = given
            parts = [part for part in Path(folder).resolve().parts if not RUN_FOLDERS.fullmatch(part)]
            name = parts[-1] if len(parts) > 1 else "model"
        if name in named:
            raise UserError(f"Two models have the name {name}: name one of them, as NAME={folder}.")
        named[name] = folder
    return named
