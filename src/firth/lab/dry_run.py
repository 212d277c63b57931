"""--dry-run: what a command would read, compute and write, without writing anything.

Shards and labelled examples are counted; the tokens of a text that is not tokenized yet are estimated from its size.
Steps, memory and disk follow from the recipe (`train/resources.py`), the time from a matrix product on this machine.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from firth.lab.plan_text import count_rows, measure_text
from firth.models import read_config
from firth.static.recipe import NgramRecipe, StaticRecipe, WordVectorRecipe, default_epochs
from firth.tasks import FinetuneRecipe
from firth.tasks.finetune import check_task, estimate_finetuning, make_run_task
from firth.tasks.finetune_data import FinetuneData, read_finetune_data
from firth.tasks.finetune_job import DEFAULT_FINETUNE_EPOCHS
from firth.tasks.finetune_schedule import MIN_DEFAULT_STEPS, count_trials
from firth.tasks.search import plan_search
from firth.tasks.try_settings import check_search
from firth.text import Corpus
from firth.tokens import load_tokenizer
from firth.train import Recipe
from firth.train.batch_size import whole_batch_recipe
from firth.train.dataloader import open_recipe_shards
from firth.train.distributed import SINGLE_PROCESS, select_device
from firth.train.recipe import TrainingConfig
from firth.train.resources import (
    ResourceEstimate,
    available_memory,
    check_resources,
    estimate_resources,
    measure_flops,
)

BYTES_PER_TOKEN = 4  # of UTF-8 text with a subword tokenizer, about
BYTES_PER_VECTOR_NUMBER = 8  # float32, of a word and of its context
BYTES_PER_SHARD_TOKEN = 2.25  # uint16, and two bits: starts a word, ends a sentence


def describe_text(corpus: Corpus) -> dict[str, Any]:
    """Return the files and the size of a text, and its number of tokens, estimated; or the least that both are.

    The size of a dataset may be unknown: not published, and too large to count.
    """
    facts = {"reads": list(map(str, corpus.paths)), "files": len(corpus.files)}
    if corpus.is_size_known or corpus.counted.is_all:
        text_bytes = measure_text(corpus)
        return {**facts, "text_bytes": text_bytes, "estimated_tokens": text_bytes // BYTES_PER_TOKEN}
    text_bytes = corpus.counted.text_bytes
    return {**facts, "text_at_least_bytes": text_bytes, "tokens_at_least": text_bytes // BYTES_PER_TOKEN}


def free_disk_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free


def describe_shards(corpus: Corpus, output_dir: Path) -> dict[str, Any]:
    """Return what `prepare` would read and write."""
    text = describe_text(corpus)
    is_known = "estimated_tokens" in text
    disk = round(BYTES_PER_SHARD_TOKEN * text["estimated_tokens" if is_known else "tokens_at_least"])
    writes = {"writes": str(output_dir), "disk_bytes" if is_known else "disk_at_least_bytes": disk}
    return {**text, **writes, "free_disk_bytes": free_disk_bytes(output_dir)}


def describe_pretraining(recipe: Recipe, data: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return what a pretraining would read, compute and write; refuse what cannot fit.

    The rows of shards are counted; a text that is not tokenized yet has about as many as its tokens fill.
    """
    rows = math.ceil(num_tokens / recipe.max_seq_length)
    if recipe.data or recipe.sources:
        rows = count_rows(recipe, open_recipe_shards(recipe))
    recipe = whole_batch_recipe(recipe)
    estimate = estimate_resources(recipe.model, recipe)
    steps = recipe.max_steps or math.ceil(recipe.num_train_epochs * rows / recipe.global_batch_size)
    plan = describe_training(recipe, estimate, steps, None if recipe.checkpoint else num_tokens)
    step_tokens = recipe.global_batch_size * recipe.max_seq_length
    read = plan["steps"] * step_tokens
    passes = plan["steps"] * recipe.global_batch_size / max(rows, 1)
    totals = {"tokens_per_step": step_tokens, "tokens_read": read, "passes": passes}
    return {**data, "vocab_size": recipe.model.vocab_size, **plan, **totals, "learning_rate": recipe.learning_rate}


def describe_static_training(
    recipe: StaticRecipe, data: dict[str, Any], num_tokens: int, vocab_size: int
) -> dict[str, Any]:
    """Return what a run of word2vec, GloVe or n-grams would read, compute and write. Its speed is not estimated."""
    folder = Path(recipe.output_dir)
    plan: dict[str, Any] = {"free_disk_bytes": free_disk_bytes(folder), "writes": recipe.output_dir}
    if isinstance(recipe, NgramRecipe):
        counts = {"ngrams_at_most": recipe.order * num_tokens, "tokens_read": num_tokens}
        return {**data, "order": recipe.order, **counts, **plan}
    assert isinstance(recipe, WordVectorRecipe)
    num_words = min(vocab_size, num_tokens // max(recipe.min_count, 1))
    epochs = recipe.epochs or default_epochs(num_tokens)
    length: dict[str, Any] = {"epochs": epochs, "tokens_read": epochs * num_tokens}
    if recipe.max_steps:
        length = {"steps": recipe.max_steps}
    if recipe.minutes:
        length["seconds"] = 60 * recipe.minutes
    return {
        **data,
        "words_at_most": num_words,
        "numbers_per_word": recipe.vector_size,
        "memory_at_most_bytes": BYTES_PER_VECTOR_NUMBER * num_words * recipe.vector_size,
        "free_memory_bytes": available_memory(torch.device("cpu")),
        "threads": recipe.workers or os.cpu_count() or 1,
        **length,
        **plan,
    }


def describe_finetuning(recipe: FinetuneRecipe, num_arms: int = 1) -> dict[str, Any]:
    """Return what a fine-tuning would read, compute and write; refuse what cannot fit."""
    check_task(recipe)
    data, config = read_finetune_data(recipe), read_config(recipe.checkpoint)
    task = make_run_task(recipe, data.train, load_tokenizer(recipe.checkpoint), config)
    estimate = estimate_finetuning(recipe, task, config)
    runs, steps = recipe.seeds * num_arms, count_finetune_steps(recipe, data)
    plan = describe_training(recipe, estimate, steps, None, runs)
    examples = min(recipe.shots or len(data.train), len(data.train))
    if recipe.search_fields:
        check_search(recipe, len(data.train))
        search = plan_search(replace(recipe, max_steps=plan["steps"]), examples)
        plan["search"] = {"settings": len(search.settings), "varied": list(search.fields), "cost_in_seeds": search.cost}
    _, cost = count_trials(replace(recipe, max_steps=plan["steps"]), examples)
    if not recipe.minutes:
        plan["seconds"] *= 1 + cost / recipe.seeds
    plan["learning_rates"] = list(recipe.rate_candidates) if cost and recipe.rate_candidates else [recipe.learning_rate]
    counts = {"train_examples": len(data.train), "dev_examples": len(data.dev)}
    return {"reads": [recipe.checkpoint, *recipe.label_files], **counts, "seeds": recipe.seeds, "runs": runs, **plan}


def count_finetune_steps(recipe: FinetuneRecipe, data: FinetuneData) -> int:
    labelled = min(recipe.shots or len(data.train), len(data.train))
    examples = labelled * (1 + recipe.augment) + len(data.unlabeled)
    epochs = recipe.num_train_epochs or DEFAULT_FINETUNE_EPOCHS
    planned = math.ceil(epochs * examples / recipe.global_batch_size)
    return recipe.max_steps or (planned if recipe.num_train_epochs else max(planned, MIN_DEFAULT_STEPS))


def describe_training(
    training: TrainingConfig, estimate: ResourceEstimate, steps: int, num_tokens: int | None, num_runs: int = 1
) -> dict[str, Any]:
    """Return steps, memory, disk and time of `num_runs` equal runs. `minutes` set the steps, at the estimated speed."""
    folder, device = Path(training.output_dir), select_device(SINGLE_PROCESS, training)
    check_resources(estimate, folder, device, num_tokens=num_tokens)
    step_seconds = estimate.step_seconds(measure_flops(device))
    if training.minutes:
        fitting = max(1, int(60 * training.minutes / num_runs / step_seconds))
        steps = min(fitting, training.max_steps or fitting)
    return {
        "parameters": estimate.parameters,
        "steps": steps,
        "rows_per_step": training.global_batch_size,
        "row_length": training.max_seq_length,
        "memory_bytes": estimate.needed_memory(device),
        "free_memory_bytes": available_memory(device),
        "checkpoint_bytes": estimate.checkpoint_bytes,
        "free_disk_bytes": free_disk_bytes(folder),
        "seconds": num_runs * steps * step_seconds,
        "writes": training.output_dir,
    }
