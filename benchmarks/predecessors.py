"""Compare the predecessors with BERT on real tasks: what did each model bring, and with how many labels?

    python benchmarks/predecessors.py --text en_wiki.train.txt.xz en_books.train.txt.xz --data DATA --output-dir WORK \\
        [--sizes tiny|small] [--minutes M] [--budget B] [--only SIDE,...] [--tasks NAME,...] [--json]

All sides read the same text. word2vec, ELMo and ULMFiT are pretrained for some minutes each. BERT gets as many steps as
have the FLOPs of ELMo's run, and in a second run those of ULMFiT's. Then each side is fine-tuned on each task with 100,
1,000 and all labels and several seeds, for the same number of steps and examples (ULMFiT is first pretrained on the
task's unlabelled texts). Each seed samples its own labels, the same for all sides. WORK/results.json keeps finished
cells, which are not computed again. Seeds are the outermost loop, so that a run that ends by `--budget` has one seed of
everything first. Vectors alone are scored on word senses (WiC, by a threshold chosen on the training file), by layer.

FLOPs are those of matmuls, forward and backward (three times forward), as computed: a sampled softmax counts its
samples, BERT's vocabulary projection the target positions, ELMo's character CNN each word of a batch once.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from parallel_runs import run_parallel

from firth import __version__, api
from firth.commands.arguments import resolve_model
from firth.commands.finetune import adapt_to_target_text
from firth.core.console import format_duration, say
from firth.core.errors import UserError
from firth.core.files import read_json, write_json
from firth.evaluate import evaluate
from firth.metrics import mean_and_std
from firth.models import ClassificationHead, LMHead, ModelConfig, flops_per_token, read_config
from firth.models.config import ELMoConfig
from firth.objectives import OBJECTIVES
from firth.recipes import finetuning_defaults
from firth.static.learners import CHUNKS_PER_STEP
from firth.static.vocabulary import WORD_CHUNK_TOKENS
from firth.tasks import FinetuneRecipe, finetune
from firth.text import Corpus, read_labelled
from firth.tokens import is_shards_folder, open_shards
from firth.train import choose_compute
from firth.train.recipe import read_yaml_mapping

RESULTS = "results.json"
ROW_TOKENS = 128  # tokens per row
# The biLSTM between a frozen model and its head: units per direction, and a learning rate for few steps (with the usual
# 1e-3 it predicts the most frequent class only).
BILSTM_HEAD = {"bilstm": 128, "learning_rate": 4e-3}
TAG_STEP_FACTOR = 2  # tagging runs this many times the steps of classification
EVAL_ROWS = 64  # rows of held-out text per evaluation
SLOWEST = "slowest"  # key of the slowest run of any kind
TRAINING_FLOPS_FACTOR = 3  # FLOPs of a training step, as a multiple of the forward pass


class Size(NamedTuple):
    """Amount of text, models and numbers of steps."""

    megabytes: float  # of text; 0: all
    vocabulary: dict[str, int]  # vocabulary size by kind of tokenizer
    models: dict[str, str]
    rows: dict[str, int]  # rows per pretraining step
    epochs: int  # of word2vec, at most
    bigrams: int  # hash buckets of fastText's bigrams
    steps: dict[str, int]  # fine-tuning steps by number of labels; "more": any other number
    target: float  # ULMFiT's minutes on the task's text, as a share of its pretraining
    batch: int = 32  # examples per fine-tuning step
    pretraining_steps: int = 0  # replaces --minutes if not 0


SIZES = {
    "tiny": Size(
        24,
        {"word": 8000, "elmo-characters": 20000, "wordpiece": 8192},
        {"elmo": "elmo-tiny", "ulmfit": "ulmfit-tiny", "bert": "bert-tiny"},
        {"elmo": 16, "ulmfit": 16, "bert": 16},
        epochs=5,
        bigrams=20_000,
        steps={"100": 100, "1000": 150, "more": 300},
        target=0.25,
    ),
    "small": Size(
        0,
        {"word": 30000, "elmo-characters": 30000, "wordpiece": 16384},
        {"elmo": "elmo-small", "ulmfit": "ulmfit-base", "bert": "bert-mini"},
        {"elmo": 128, "ulmfit": 128, "bert": 128},
        epochs=10,
        bigrams=100_000,
        steps={"100": 100, "1000": 200, "more": 400},
        target=0.3,
        batch=64,
    ),
}


class Side(NamedTuple):
    """The pretraining and the fine-tuning fields of a side; `tags` are further fields for tagging."""

    name: str
    pretraining: str  # one of words, bag, elmo, ulmfit, bert, bert-ulmfit
    fields: dict[str, Any]
    tags: dict[str, Any] | None = {}  # noqa: RUF012, never changed; None: no tagging


SCRATCH = {"from_scratch": True, "freeze": "none"}
SIDES = {
    "vectors": Side("word2vec, frozen, mean of the words", "words", {"freeze": "backbone", "learning_rate": 2e-2}),
    "bag": Side("bag of words and bigrams (fastText), from scratch", "bag", {**SCRATCH, "learning_rate": 5e-3}),
    "bilstm": Side("biLSTM, from scratch", "words", {**SCRATCH, **BILSTM_HEAD}, {"crf": True}),
    "vectors-bilstm": Side(
        "word2vec, frozen + biLSTM",
        "words",
        {"freeze": "backbone", **BILSTM_HEAD},
        {"crf": True},
    ),
    "elmo": Side("ELMo, frozen: mix + biLSTM", "elmo", BILSTM_HEAD, {"crf": True}),
    "lstm": Side(
        "AWD-LSTM, from scratch",
        "ulmfit",
        {**SCRATCH, "learning_rate": 1e-3, "lr_scheduler_type": "linear", "layer_decay": 1.0, "unfreeze_every": 0},
        None,
    ),
    "ulmfit": Side("ULMFiT", "ulmfit", {}, None),
    "bert": Side("BERT, FLOPs of ELMo", "bert", {}),
    "bert-ulmfit": Side("BERT, FLOPs of ULMFiT", "bert-ulmfit", {}),
}
SAME_FLOPS_AS = {"bert": "elmo", "bert-ulmfit": "ulmfit"}


class Task(NamedTuple):
    task: str
    name: str  # of its files in --data


TASKS = {
    "sst2": Task("classify", "classification/sst2"),
    "trec": Task("classify", "classification/trec"),
    "wnut17": Task("tag", "tagging/wnut17"),
    "wic": Task("word-in-context", "pairs/wic"),
}
WIC_FILES = "pairs/wic"  # word senses
NOT_PRETRAINED = ("bag",)  # needed for the architecture only; its weights are not used


class Budget:
    """The time that is left, and the duration of earlier runs."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes if minutes else math.inf
        self.seconds_by_kind: dict[str, float] = {}

    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def record(self, kind: str, seconds: float) -> None:
        """Record the duration of a run of this kind."""
        self.seconds_by_kind |= {kind: seconds, SLOWEST: max(seconds, self.seconds_by_kind.get(SLOWEST, 0.0))}

    def has_time_for(self, kind: str) -> bool:
        """Whether there is time for another run of this kind (as long as its last one, or the slowest of all)."""
        return self.seconds_left() > self.seconds_by_kind.get(kind, self.seconds_by_kind.get(SLOWEST, 0.0))


class Workspace:
    """The output folder and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.size, self.folder = args, SIZES[args.sizes], Path(args.output_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = {"cells": {}, "pretraining": {}, "senses": {}, "sizes": args.sizes}
        if (self.folder / RESULTS).is_file():
            self.results = read_json(self.folder / RESULTS)
            if self.results["sizes"] != args.sizes:
                raise UserError(
                    f"{self.folder} was started with --sizes {self.results['sizes']}: name another --output-dir."
                )
        self.budget, self.complete = Budget(args.budget), True

    def save(self) -> None:
        write_json(self.folder / RESULTS, self.results)

    # --- the text

    def text(self) -> list[str]:
        """Return the text, or the first part of each file up to the size's megabytes."""
        if not self.size.megabytes:
            return list(self.args.text)
        part = self.folder / "text.jsonl"
        if not part.is_file():
            share = self.size.megabytes * 1e6 / len(self.args.text)
            lines = []
            for source in self.args.text:
                num_left = share
                for document in Corpus([source]):
                    lines.append(json.dumps({"text": document.text}) + "\n")
                    num_left -= len(document.text)
                    if num_left < 0:
                        break
            temporary = part.with_suffix(".tmp")
            temporary.write_text("".join(lines), encoding="utf-8")
            temporary.rename(part)
        return [str(part)]

    def shards(self, kind: str) -> Path:
        """Return the shards for a kind of tokenizer, made once."""
        path = self.folder / f"shards-{kind}"
        if not is_shards_folder(path):
            tokenizer = self.folder / f"tokenizer-{kind}"
            if not tokenizer.is_dir():
                api.tokenizer(self.text(), tokenizer, kind, self.size.vocabulary[kind])
            api.prepare(self.text(), tokenizer, path, resume=True, workers=self.args.workers)
        return path

    # --- pretraining

    def duration_fields(self, share: float = 1.0) -> dict[str, Any]:
        """Return the recipe fields that set the length of a run."""
        if self.size.pretraining_steps:
            return {"max_steps": self.size.pretraining_steps}
        return {"minutes": share * self.args.minutes}

    def pretraining(self, name: str) -> Path | None:
        """Return a pretrained checkpoint, made now if missing; None if there is no time left."""
        final = self.folder / name / "final"
        if final.is_dir() and name in self.results["pretraining"]:
            return final
        reference = SAME_FLOPS_AS.get(name)  # its FLOPs must be known first
        unknown = reference is not None and reference not in self.results["pretraining"]
        if (unknown and self.pretraining(reference) is None) or self.budget.seconds_left() < 60 * self.args.minutes:
            return None
        say(f"--- pretraining {name}")
        start_time = time.monotonic()
        others = {"words": self.word2vec, "bag": self.bag, "elmo": self.elmo, "ulmfit": self.ulmfit}
        result = self.bert(name, reference) if reference else others[name]()
        before = self.results["pretraining"].get(name, {}).get("times", 0)
        result |= {"seconds": time.monotonic() - start_time, "times": before + 1}
        self.results["pretraining"][name] = result
        self.save()
        return final

    def word2vec(self) -> dict[str, Any]:
        shards = self.shards("word")
        num_chunks = -(-open_shards(shards).train.num_tokens // WORD_CHUNK_TOKENS) * self.size.epochs
        duration = {"max_steps": -(-num_chunks // CHUNKS_PER_STEP), **self.duration_fields()}
        workers = {"workers": self.args.workers}
        facts = api.pretrain("word2vec", shards, self.folder / "words", overwrite=True, overrides=workers, **duration)
        recipe = read_yaml_mapping(self.folder / "words" / "recipe.yaml")
        # Each word is predicted by about window + 1 others (window sizes are random), with the negative samples.
        flops = 2 * recipe["vector_size"] * (recipe["negative"] + 1) * (recipe["window"] + 1)
        return summarize(facts, "word2vec", flops * TRAINING_FLOPS_FACTOR * facts["tokens"])

    def bag(self) -> dict[str, Any]:
        """Make a bag of words and bigrams of which only the architecture is used."""
        more = {"workers": 1, "max_steps": 1, "bigrams": self.size.bigrams}
        facts = api.pretrain("word2vec", self.shards("word"), self.folder / "bag", overwrite=True, overrides=more)
        return summarize(facts, "word2vec", 0.0)

    def elmo(self) -> dict[str, Any]:
        overrides = {"model.recurrent.clip": 0}  # clipping steps through the positions one by one, which is slower
        facts, config = self.run_pretraining(
            "elmo", "elmo-characters", {"overrides": overrides, **self.duration_fields()}
        )
        return facts | self.total_flops(config, facts, unique_word_share(config, self.shards("elmo-characters"), facts))

    def ulmfit(self) -> dict[str, Any]:
        facts, config = self.run_pretraining("ulmfit", "word", self.duration_fields())
        return facts | self.total_flops(config, facts, 1.0)

    def bert(self, side: str, reference: str) -> dict[str, Any]:
        """Train for as many steps as have the FLOPs of another pretraining."""
        target_flops = self.results["pretraining"][reference]["flops"]
        shards, model = self.shards("wordpiece"), self.size.models["bert"]
        config, _ = resolve_model(model)
        config = replace(config, vocab_size=open_shards(shards).tokenizer.vocab.size)
        flops_per_step = TRAINING_FLOPS_FACTOR * forward_flops(config, 1.0) * self.size.rows["bert"] * ROW_TOKENS
        steps = max(1, round(target_flops / flops_per_step))
        say(f"{reference}'s {target_flops:.3g} FLOPs are {steps:,} steps of {model} with {flops_per_step:.3g} each")
        facts, config = self.run_pretraining(side, "wordpiece", {"max_steps": steps}, "bert")
        return facts | {
            "flops_per_token": TRAINING_FLOPS_FACTOR * forward_flops(config, 1.0),
            "flops": steps * flops_per_step,
        }

    def run_pretraining(
        self, side: str, kind: str, fields: dict[str, Any], model: str = ""
    ) -> tuple[dict[str, Any], ModelConfig]:
        model = model or side
        facts = api.pretrain(
            self.size.models[model],
            self.shards(kind),
            self.folder / side,
            overwrite=True,
            per_device_train_batch_size=self.size.rows[model],
            save_steps=10**6,
            eval_rows=EVAL_ROWS,
            **fields,
        )
        return summarize(facts, self.size.models[model], 0.0), read_config(self.folder / side / "final")

    def total_flops(self, config: ModelConfig, facts: Mapping[str, Any], unique_share: float) -> dict[str, float]:
        flops = TRAINING_FLOPS_FACTOR * forward_flops(config, unique_share)
        return {"flops_per_token": flops, "flops": flops * facts["tokens"]}

    # --- tasks

    def task_files(self, task: str) -> tuple[Path, Path]:
        train, dev = (self.args.data / f"{TASKS[task].name}.{part}.jsonl.xz" for part in ("train", "dev"))
        return train, dev

    def checkpoint(self, side: str, task: str) -> Path | None:
        """Return the checkpoint that a side starts a task from; ULMFiT's is pretrained on the task's texts too."""
        final = self.pretraining(SIDES[side].pretraining)
        if side != "ulmfit" or final is None:
            return final
        path = self.folder / f"ulmfit-{task}"
        target = self.folder / f"ulmfit-{task}-target" / "final"
        if target.is_dir():
            return target
        if self.budget.seconds_left() < 60 * self.args.minutes * self.size.target:
            return None
        say(f"--- pretraining ULMFiT on the texts of {task}")
        text = self.folder / f"{task}.jsonl"
        examples = read_labelled(self.task_files(task)[0], TASKS[task].task, None, "train")
        text.write_text("".join(json.dumps({"text": " ".join(e.texts)}) + "\n" for e in examples), encoding="utf-8")
        rows = {"per_device_train_batch_size": self.size.rows["ulmfit"], "save_steps": 10**6, "eval_rows": EVAL_ROWS}
        return adapt_to_target_text(
            final, [text], path, overwrite=True, **self.duration_fields(self.size.target), **rows
        )

    def cell(self, side: str, task: str, labels: str, seed: int) -> FinetuneRecipe | None:
        """Return the recipe of one seed; None if there is no time left."""
        checkpoint = self.checkpoint(side, task)
        if checkpoint is None or not self.budget.has_time_for(f"{side}/{task}/{labels}"):
            return None
        steps = self.size.steps.get(labels, self.size.steps["more"]) * (
            TAG_STEP_FACTOR if TASKS[task].task == "tag" else 1
        )
        train, dev = self.task_files(task)
        fields = finetuning_defaults(read_config(checkpoint))
        if side == "ulmfit":  # all layers are unfrozen by the middle of the run
            fields |= {"unfreeze_every": max(1, steps // 10), "num_train_epochs": 0.0}
        fields |= SIDES[side].fields | ((SIDES[side].tags or {}) if TASKS[task].task == "tag" else {})
        path = self.folder / f"cell-{side}-{task}-{labels}-{seed}"
        shutil.rmtree(path, ignore_errors=True)
        fields |= {"seeds": 1, "seed": seed, "shots": 0 if labels == "all" else int(labels)}
        fields |= {"max_steps": steps, "per_device_train_batch_size": self.size.batch, "max_seq_length": ROW_TOKENS}
        paths = {"checkpoint": str(checkpoint), "train": str(train), "dev": str(dev), "output_dir": str(path)}
        return FinetuneRecipe(**fields | paths, task=TASKS[task].task, save_steps=10**6)

    def cells(self) -> Iterator[tuple[str, FinetuneRecipe]]:
        """Yield the cells that are not done, as long as there is time."""
        o = self.args
        for seed in range(o.seeds):
            for labels in o.labels:
                for task in o.tasks:
                    for side in o.only:
                        key = f"{side}/{task}/{labels}/{seed}"
                        if key in self.results["cells"] or not is_supported(side, task):
                            continue
                        if recipe := self.cell(side, task, labels, seed):
                            yield key, recipe
                        else:
                            self.complete = False

    def evaluate_senses(self, pretraining: str) -> bool:
        """Score each layer on word-in-context; return False if there was no time."""
        train, dev = (self.args.data / f"{WIC_FILES}.{part}.jsonl.xz" for part in ("train", "dev"))
        if pretraining in self.results["senses"] or pretraining in NOT_PRETRAINED or not train.is_file():
            return True
        final = self.pretraining(pretraining)
        if final is None or not self.budget.has_time_for("senses"):
            return False
        start_time = time.monotonic()
        layers = range(read_config(final).num_layers + 1)
        accuracy_by_layer = {}
        for layer in layers:
            path = self.folder / "senses"
            result = evaluate(final, "word-in-context", dev, path, train=str(train), layer=layer, overwrite=True)
            accuracy_by_layer[str(layer)] = result["metrics"]["accuracy"]
        self.results["senses"][pretraining] = accuracy_by_layer
        self.budget.record("senses", time.monotonic() - start_time)
        self.save()
        return True

    def run(self) -> bool:
        """Run everything that is not done and fits into the budget; return whether all is done."""
        pretrainings = dict.fromkeys(SIDES[side].pretraining for side in self.args.only)
        done = [self.pretraining(name) is not None and self.evaluate_senses(name) for name in pretrainings]
        self.complete = all(done)
        for key, result in run_parallel(score, self.cells(), self.args.jobs, self.folder / "log.txt"):
            self.results["cells"][key] = result
            self.budget.record(key.rpartition("/")[0], result["seconds"])
            self.save()
            say(f"{key}: {100 * result['score']:.1f} in {result['seconds']:.1f}s, {self.time_left()}")
        return self.complete

    def time_left(self) -> str:
        return f"{format_duration(max(self.budget.seconds_left(), 0))} left" if self.args.budget else "no time limit"


def score(recipe: FinetuneRecipe) -> dict[str, Any]:
    """Fine-tune one seed and return its score; the folder is removed."""
    start_time = time.monotonic()
    result = finetune(recipe)
    shutil.rmtree(recipe.output_dir, ignore_errors=True)
    seconds = time.monotonic() - start_time
    return {
        "score": result["mean"],
        "metric": result["metric"],
        "failed": bool(result.get("failed")),
        "seconds": seconds,
    }


def is_supported(side: str, task: str) -> bool:
    """Whether a side can do a task: left-to-right LSTMs cannot tag, as their states have not seen the right context."""
    return SIDES[side].tags is not None or TASKS[task].task != "tag"


def summarize(facts: Mapping[str, Any], model: str, flops: float) -> dict[str, Any]:
    names = ("parameters", "tokens", "steps", "eval_loss", "tokens_per_second")
    return {"model": model, **{name: facts[name] for name in names}, "flops": flops}


# --- FLOPs -----------------------------------------------------------------------------------------------------


def forward_flops(config: ModelConfig, unique_share: float) -> float:
    """Return the forward FLOPs per token of pretraining; `unique_share` scales ELMo's character CNN."""
    backbone = flops_per_token(replace(config, head=ClassificationHead(())), ROW_TOKENS)
    head = config.head
    assert isinstance(head, LMHead)
    if isinstance(config.recurrent, ELMoConfig):
        characters = flops_per_token(replace(config, head=ClassificationHead(()), num_layers=0), ROW_TOKENS)
        num_directions, sampled = 2, min(head.num_sampled or config.vocab_size, config.vocab_size)
        softmax = num_directions * 2 * config.recurrent.proj_size * sampled
        return backbone - characters + unique_share * characters + softmax
    vocabulary = flops_per_token(config, ROW_TOKENS) - backbone
    target_rate = OBJECTIVES["mlm"].expected_rates()["targets"] if config.architecture == "encoder" else 1.0
    return backbone + target_rate * vocabulary


def unique_word_share(config: ModelConfig, shards: Path, facts: Mapping[str, Any]) -> float:
    """Return the share of unique words in a batch: ELMo runs its character CNN once for each."""
    text = open_shards(shards).train.tokens
    rows = max(1, round(facts["tokens"] / facts["steps"] / ROW_TOKENS))
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(20):
        first = rng.integers(0, max(len(text) - ROW_TOKENS, 1), rows)
        batch = np.concatenate([text[i : i + ROW_TOKENS] for i in first])
        shares.append(len(np.unique(batch)) / len(batch))
    return float(np.mean(shares))


# --- tables ---------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """Mean and standard deviation over the seeds of a cell."""

    mean: float
    std: float
    seeds: int
    failed: int


def aggregate_cells(results: Mapping[str, Any]) -> dict[tuple[str, str, str], Cell]:
    """Return cells by side, task and labels. The mean includes failed runs (no better than the majority class)."""
    cells = defaultdict(list)
    for key, cell in results["cells"].items():
        side, task, labels, _ = key.split("/")
        cells[side, task, labels].append(cell)
    return {
        key: Cell(
            *mean_and_std([100 * c["score"] for c in seed_results]),
            len(seed_results),
            sum(c["failed"] for c in seed_results),
        )
        for key, seed_results in cells.items()
    }


def markdown(results: Mapping[str, Any], args: argparse.Namespace) -> str:
    """Return the tables in Markdown."""
    parts = ["\n".join(pretraining_lines(results)), "\n".join(score_lines(aggregate_cells(results), args))]
    if results["senses"]:
        parts.append("\n".join(sense_lines(results["senses"])))
    return "\n\n".join(parts)


def pretraining_lines(results: Mapping[str, Any]) -> list[str]:
    lines = [
        "| pretraining | model | parameters | tokens | FLOPs per token | FLOPs | held-out loss | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, facts in results["pretraining"].items():
        if name not in NOT_PRETRAINED:
            loss = f"{facts['eval_loss']:.3f}" if facts["eval_loss"] is not None else ""
            flops_per_token = facts["flops"] / max(facts["tokens"], 1)
            lines.append(
                f"| {name} | {facts['model']} | {facts['parameters']:,} | {facts['tokens']:,} | "
                f"{flops_per_token:.3g} | {facts['flops']:.3g} | {loss} | {facts['seconds']:.0f} |"
            )
    return lines


def score_lines(cells: Mapping[tuple[str, str, str], Cell], args: argparse.Namespace) -> list[str]:
    columns = [(task, labels) for task in args.tasks for labels in args.labels]
    lines = [
        "| side | " + " | ".join(f"{task}, {labels}" for task, labels in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for side in args.only:
        texts = [format_cell(cells.get((side, *column))) for column in columns]
        lines.append(f"| {SIDES[side].name} | " + " | ".join(texts) + " |")
    return lines


def format_cell(cell: Cell | None) -> str:
    """
    >>> format_cell(Cell(81.25, 1.5, 3, 1))
    '81.2 ± 1.5 (1 failed)'
    """
    if cell is None:
        return ""
    notes = [f"{cell.seeds} seed{'s' * (cell.seeds > 1)}"] * (cell.seeds < 3) + [f"{cell.failed} failed"] * (
        cell.failed > 0
    )
    deviation = f" ± {cell.std:.1f}" if cell.seeds > 1 else ""
    return f"{cell.mean:.1f}{deviation}" + (f" ({', '.join(notes)})" if notes else "")


def sense_lines(accuracy_by_pretraining: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = ["| same sense (WiC), cosine threshold | accuracy of layer 0, 1, ... |", "| --- | --- |"]
    for pretraining, accuracies in accuracy_by_pretraining.items():
        lines.append(f"| {pretraining} | " + ", ".join(f"{100 * x:.1f}" for x in accuracies.values()) + " |")
    return lines


def labels_needed(cells: Mapping[tuple[str, str, str], Cell], task: str, side: str, sizes: Mapping[str, int]) -> Any:
    """Return how many labels a side needs to match ULMFiT with 100, interpolated between the log counts.

    None if something is not measured; infinity if all labels are not enough.
    """
    reference_cell = cells.get(("ulmfit", task, "100"))
    points = sorted((n, cells[side, task, labels].mean) for labels, n in sizes.items() if (side, task, labels) in cells)
    if reference_cell is None or len(points) < 2:
        return None
    if points[0][1] >= reference_cell.mean:
        return points[0][0]
    for (n, low), (m, high) in pairwise(points):
        if high >= reference_cell.mean:
            share = (reference_cell.mean - low) / (high - low)
            return math.exp(math.log(n) + share * (math.log(m) - math.log(n)))
    return math.inf


def compare_label_counts(results: Mapping[str, Any], workspace: Workspace) -> dict[str, Any]:
    """Print how many labels training from scratch needs to match ULMFiT with 100 (Howard & Ruder 2018: 100 times)."""
    cells, labels_needed_by_side = aggregate_cells(results), dict[str, Any]()
    for task in workspace.args.tasks:
        if TASKS[task].task != "classify" or ("ulmfit", task, "100") not in cells:
            continue
        whole = len(read_labelled(workspace.task_files(task)[0], "classify", None, "train"))
        sizes = {labels: whole if labels == "all" else int(labels) for labels in workspace.args.labels}
        for side in ("lstm", "bilstm", "bag"):
            num_labels = labels_needed(cells, task, side, sizes)
            if num_labels is None:
                continue
            labels_needed_by_side[f"{task}/{side}"] = None if math.isinf(num_labels) else num_labels
            if math.isinf(num_labels):
                count = f"more than all {whole:,} (over {whole / 100:,.0f}x)"
            elif num_labels <= min(sizes.values()):
                count = f"{num_labels:,} or fewer: no gain"
            else:
                count = f"about {num_labels:,.0f} ({num_labels / 100:,.1f}x)"
            print(f"{task}: ULMFiT with 100 labels = {SIDES[side].name} with {count}")
    return labels_needed_by_side


def parse_names(text: str, known: Sequence[str] | None, option: str) -> list[str]:
    """Split a comma-separated list; an unknown name is an error."""
    names = [name for name in text.split(",") if name]
    if known is not None and (unknown := [name for name in names if name not in known]):
        raise UserError(f"{option}: unknown name {unknown[0]!r}. Choose from {', '.join(known)}.")
    return names


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, help="text files to pretrain on")
    parser.add_argument("--data", type=Path, required=True, help="folder with classification/, tagging/, pairs/")
    parser.add_argument("--output-dir", required=True, help="models and results.json; the same folder resumes")
    parser.add_argument("--sizes", choices=SIZES, default="tiny", help="models and amount of text (tiny)")
    parser.add_argument("--minutes", type=float, default=2.0, help="minutes of each pretraining but BERT's (2)")
    parser.add_argument(
        "--budget", type=float, default=0.0, help="end after this many minutes and keep the results (0: no limit)"
    )
    parser.add_argument("--only", default=",".join(SIDES), help="sides to compare, as elmo,bert (all)")
    parser.add_argument("--tasks", default="sst2,trec,wnut17", help=f"some of {','.join(TASKS)} (sst2,trec,wnut17)")
    parser.add_argument("--labels", default="100,1000,all", help="numbers of labels (100,1000,all)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each cell (3)")
    parser.add_argument("--jobs", type=int, default=1, help="cells that run in parallel (1)")
    parser.add_argument(
        "--workers", type=int, default=0, help="threads of word2vec, processes of prepare; 0: one per core (0)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args(argv)
    args.only = parse_names(args.only, list(SIDES), "--only")
    args.tasks = parse_names(args.tasks, list(TASKS), "--tasks")
    args.labels = parse_names(args.labels, None, "--labels")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    start_time, compute = time.monotonic(), choose_compute(FinetuneRecipe())
    say(f"firth {__version__}; {compute}")
    workspace = Workspace(args)
    complete = workspace.run()
    print(markdown(workspace.results, args) + "\n")
    labels_needed_by_side = compare_label_counts(workspace.results, workspace)
    for name, reference in SAME_FLOPS_AS.items():
        if name in (results := workspace.results["pretraining"]) and reference in results:
            print(f"FLOPs: {reference} {results[reference]['flops']:.4g}, {name} {results[name]['flops']:.4g}")
    repeated = [name for name, facts in workspace.results["pretraining"].items() if facts["times"] > 1]
    if repeated:
        print(f"pretrained more than once, because the folder was deleted: {', '.join(repeated)}. Cells may mix them.")
    state = "complete" if complete else "incomplete: the budget is used up; the same command resumes"
    say(f"{state}; {format_duration(time.monotonic() - start_time)}")
    if args.json:
        facts = {
            **workspace.results,
            "complete": complete,
            "labels_needed": labels_needed_by_side,
            "machine": str(compute),
        }
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
