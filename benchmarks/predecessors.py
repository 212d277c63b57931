"""The predecessors beside BERT on real tasks: what did each step of the history bring, and with how many labels?

    python benchmarks/predecessors.py --text en_wiki.train.txt.xz en_books.train.txt.xz --data DATA --output-dir WORK \\
        [--sizes tiny|small] [--minutes M] [--budget B] [--only SIDE,...] [--tasks NAME,...] [--json]

Every side reads the same text. word2vec, ELMo and ULMFiT are pretrained for some minutes each; BERT gets the steps
whose operations add up to ELMo's, and once more those of ULMFiT's. Then each side learns each task from 100, 1,000 and
all labels, with several seeds, all in the same number of steps of as many examples (ULMFiT reads the task's own texts
first, without labels). Each seed draws its own labels, the same for all sides. A cell that is done is kept in
WORK/results.json and never computed again; seeds come last, so that a run whose `--budget` of minutes is used up has
something of everything. What vectors alone know of senses (WiC, by a threshold from the training file) is measured
beside it, layer by layer.

Operations are those of matrix products, forward and backward (three times forward), of what is computed: a sampled
softmax counts its samples, BERT's vocabulary the places that are asked, ELMo's spelling each word of a batch once.
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

RESULTS = "results.json"
LENGTH = 128  # of rows
# The LSTM each way between a body and its head: its units, and a rate for as few steps as there are here (at the usual
# 1e-3 it stays at the commonest answer).
ON_TOP = {"bilstm": 128, "learning_rate": 4e-3}
TAG_STEPS = 2  # tags take so many times the steps of labels
EVAL_ROWS = 64  # of held-out text
LONGEST = "longest"
BACKWARD = 3  # a training step computes so many times what reading does


class Size(NamedTuple):
    """How much text and which models."""

    megabytes: float  # of text; 0: all
    vocabulary: dict[str, int]  # by the kind of tokenizer
    models: dict[str, str]
    rows: dict[str, int]  # of a pretraining step
    epochs: int  # of word2vec at most
    bigrams: int  # fastText's hashed pairs of words
    steps: dict[str, int]  # of fine-tuning, by labels; "more" for all numbers that are not named
    target: float  # ULMFiT's minutes on a task's own text, as a share of those before
    batch: int = 32  # examples of a fine-tuning step
    pretraining_steps: int = 0  # in place of minutes


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
    """What is pretrained for a side, and how it learns a task; `tags` are fields more for the task tag."""

    name: str
    body: str  # which pretraining: words, bag, elmo, ulmfit, bert, bert-ulmfit
    fields: dict[str, Any]
    tags: dict[str, Any] | None = {}  # noqa: RUF012, never changed; None: this side labels no words


SCRATCH = {"from_scratch": True, "freeze": "none"}
SIDES = {
    "vectors": Side("word2vec, frozen, mean of the words", "words", {"freeze": "backbone", "learning_rate": 2e-2}),
    "bag": Side("bag of words and pairs (fastText), from scratch", "bag", {**SCRATCH, "learning_rate": 5e-3}),
    "bilstm": Side("biLSTM, from scratch", "words", {**SCRATCH, **ON_TOP}, {"crf": True}),
    "vectors-bilstm": Side(
        "word2vec, frozen + biLSTM",
        "words",
        {"freeze": "backbone", **ON_TOP},
        {"crf": True},
    ),
    "elmo": Side("ELMo, frozen: mix + biLSTM", "elmo", ON_TOP, {"crf": True}),
    "lstm": Side(
        "AWD-LSTM, from scratch",
        "ulmfit",
        {**SCRATCH, "learning_rate": 1e-3, "lr_scheduler_type": "linear", "layer_decay": 1.0, "unfreeze_every": 0},
        None,
    ),
    "ulmfit": Side("ULMFiT", "ulmfit", {}, None),
    "bert": Side("BERT, as many operations as ELMo", "bert", {}),
    "bert-ulmfit": Side("BERT, as many operations as ULMFiT", "bert-ulmfit", {}),
}
AS_MANY_AS = {"bert": "elmo", "bert-ulmfit": "ulmfit"}  # operations


class Task(NamedTuple):
    task: str
    name: str  # of its files under the folder of the data


TASKS = {
    "sst2": Task("classify", "classification/sst2"),
    "trec": Task("classify", "classification/trec"),
    "wnut17": Task("tag", "tagging/wnut17"),
    "wic": Task("word-in-context", "pairs/wic"),
}
SENSES = "pairs/wic"  # by a threshold, of bodies that are pretrained
UNTRAINED = ("bag",)  # bodies that are there for their twins alone


class Budget:
    """Minutes that are left, and what things took so far."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes if minutes else math.inf
        self.took: dict[str, float] = {}

    def left(self) -> float:
        return self.end - time.monotonic()

    def note(self, kind: str, seconds: float) -> None:
        """Remember what one of a kind took, and the longest of all."""
        self.took |= {kind: seconds, LONGEST: max(seconds, self.took.get(LONGEST, 0.0))}

    def enough(self, kind: str) -> bool:
        """Whether there is time for one more of a kind: as long as the last one took, or else the longest of all."""
        return self.left() > self.took.get(kind, self.took.get(LONGEST, 0.0))


class Work:
    """A folder with everything that is made, and the cells that are done."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.size, self.folder = options, SIZES[options.sizes], Path(options.output_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = {"cells": {}, "pretraining": {}, "senses": {}, "sizes": options.sizes}
        if (self.folder / RESULTS).is_file():
            self.results = read_json(self.folder / RESULTS)
            if self.results["sizes"] != options.sizes:
                raise UserError(f"{self.folder} was begun with --sizes {self.results['sizes']}: name another folder.")
        self.budget, self.complete = Budget(options.budget), True

    def save(self) -> None:
        write_json(self.folder / RESULTS, self.results)

    # --- the text

    def text(self) -> list[str]:
        """The text, or as much of each of its files as the size wants."""
        if not self.size.megabytes:
            return list(self.options.text)
        part = self.folder / "text.jsonl"
        if not part.is_file():
            share = self.size.megabytes * 1e6 / len(self.options.text)
            lines = []
            for source in self.options.text:
                room = share
                for document in Corpus([source]):
                    lines.append(json.dumps({"text": document.text}) + "\n")
                    room -= len(document.text)
                    if room < 0:
                        break
            temporary = part.with_suffix(".tmp")
            temporary.write_text("".join(lines), encoding="utf-8")
            temporary.rename(part)
        return [str(part)]

    def shards(self, kind: str) -> Path:
        """The text in tokens of a kind, made once."""
        place = self.folder / f"shards-{kind}"
        if not is_shards_folder(place):
            tokenizer = self.folder / f"tokenizer-{kind}"
            if not tokenizer.is_dir():
                api.tokenizer(self.text(), tokenizer, kind, self.size.vocabulary[kind])
            api.prepare(self.text(), tokenizer, place, resume=True, workers=self.options.workers)
        return place

    # --- pretraining

    def how_long(self, share: float = 1.0) -> dict[str, Any]:
        """The fields of a recipe that say when to end."""
        if self.size.pretraining_steps:
            return {"max_steps": self.size.pretraining_steps}
        return {"minutes": share * self.options.minutes}

    def body(self, name: str) -> Path | None:
        """A pretrained checkpoint, made now where it is not there; None where no time is left for that."""
        final = self.folder / name / "final"
        if final.is_dir() and name in self.results["pretraining"]:
            return final
        like = AS_MANY_AS.get(name)  # whose operations must be known first
        unknown = like is not None and like not in self.results["pretraining"]
        if (unknown and self.body(like) is None) or self.budget.left() < 60 * self.options.minutes:
            return None
        say(f"--- pretraining {name}")
        began = time.monotonic()
        others = {"words": self.words, "bag": self.bag, "elmo": self.elmo, "ulmfit": self.ulmfit}
        found = self.bert(name, like) if like else others[name]()
        before = self.results["pretraining"].get(name, {}).get("times", 0)
        found |= {"seconds": time.monotonic() - began, "times": before + 1}
        self.results["pretraining"][name] = found
        self.save()
        return final

    def words(self) -> dict[str, Any]:
        shards = self.shards("word")
        turns = -(-open_shards(shards).train.num_tokens // WORD_CHUNK_TOKENS) * self.size.epochs
        how_long = {"max_steps": -(-turns // CHUNKS_PER_STEP), **self.how_long()}
        workers = {"workers": self.options.workers}
        facts = api.pretrain("word2vec", shards, self.folder / "words", overwrite=True, overrides=workers, **how_long)
        recipe = api.read_yaml_mapping(self.folder / "words" / "recipe.yaml")
        # Each word is guessed by about window + 1 others (a window's size is drawn), against the noise words.
        each = 2 * recipe["vector_size"] * (recipe["negative"] + 1) * (recipe["window"] + 1)
        return summary(facts, "word2vec", each * BACKWARD * facts["tokens"])

    def bag(self) -> dict[str, Any]:
        """A model of words and pairs of words, for the sake of its twin: nothing of its vectors is used."""
        more = {"workers": 1, "max_steps": 1, "bigrams": self.size.bigrams}
        facts = api.pretrain("word2vec", self.shards("word"), self.folder / "bag", overwrite=True, overrides=more)
        return summary(facts, "word2vec", 0.0)

    def elmo(self) -> dict[str, Any]:
        overrides = {"model.recurrent.clip": 0}  # bounds are computed place by place, which is slower
        facts, config = self.pretrained("elmo", "elmo-characters", {"overrides": overrides, **self.how_long()})
        return facts | self.operations(config, facts, words_spelled(config, self.shards("elmo-characters"), facts))

    def ulmfit(self) -> dict[str, Any]:
        facts, config = self.pretrained("ulmfit", "word", self.how_long())
        return facts | self.operations(config, facts, 1.0)

    def bert(self, side: str, like: str) -> dict[str, Any]:
        """As many steps as another body has operations for."""
        wanted = self.results["pretraining"][like]["flops"]
        shards, model = self.shards("wordpiece"), self.size.models["bert"]
        config, _ = api.resolve_model(model)
        config = replace(config, vocab_size=open_shards(shards).tokenizer.vocab.size)
        a_step = BACKWARD * flops_of(config, 1.0) * self.size.rows["bert"] * LENGTH
        steps = max(1, round(wanted / a_step))
        say(f"{like}'s {wanted:.3g} operations are {steps:,} steps of {model}, {a_step:.3g} each: {steps * a_step:.3g}")
        facts, config = self.pretrained(side, "wordpiece", {"max_steps": steps}, "bert")
        return facts | {"flops_per_token": BACKWARD * flops_of(config, 1.0), "flops": steps * a_step}

    def pretrained(
        self, side: str, kind: str, options: dict[str, Any], model: str = ""
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
            **options,
        )
        return summary(facts, self.size.models[model], 0.0), read_config(self.folder / side / "final")

    def operations(self, config: ModelConfig, facts: Mapping[str, Any], spelled: float) -> dict[str, float]:
        each = BACKWARD * flops_of(config, spelled)
        return {"flops_per_token": each, "flops": each * facts["tokens"]}

    # --- tasks

    def files(self, task: str) -> tuple[Path, Path]:
        train, dev = (self.options.data / f"{TASKS[task].name}.{part}.jsonl.xz" for part in ("train", "dev"))
        return train, dev

    def checkpoint(self, side: str, task: str) -> Path | None:
        """What a side begins a task with: its body, for ULMFiT after the task's own texts."""
        final = self.body(SIDES[side].body)
        if side != "ulmfit" or final is None:
            return final
        place = self.folder / f"ulmfit-{task}"
        target = self.folder / f"ulmfit-{task}-target" / "final"
        if target.is_dir():
            return target
        if self.budget.left() < 60 * self.options.minutes * self.size.target:
            return None
        say(f"--- ULMFiT reads the texts of {task}")
        text = self.folder / f"{task}.jsonl"
        examples = read_labelled(self.files(task)[0], TASKS[task].task, None, "train")
        text.write_text("".join(json.dumps({"text": " ".join(e.texts)}) + "\n" for e in examples), encoding="utf-8")
        rows = {"per_device_train_batch_size": self.size.rows["ulmfit"], "save_steps": 10**6, "eval_rows": EVAL_ROWS}
        return api.adapt_to_target_text(final, [text], place, overwrite=True, **self.how_long(self.size.target), **rows)

    def cell(self, side: str, task: str, labels: str, seed: int) -> FinetuneRecipe | None:
        """How one seed learns; None where no time is left."""
        checkpoint = self.checkpoint(side, task)
        if checkpoint is None or not self.budget.enough(f"{side}/{task}/{labels}"):
            return None
        steps = self.size.steps.get(labels, self.size.steps["more"]) * (TAG_STEPS if TASKS[task].task == "tag" else 1)
        train, dev = self.files(task)
        fields = finetuning_defaults(read_config(checkpoint))
        if side == "ulmfit":  # all layers learn from the middle of the run on
            fields |= {"unfreeze_every": max(1, steps // 10), "num_train_epochs": 0.0}
        fields |= SIDES[side].fields | ((SIDES[side].tags or {}) if TASKS[task].task == "tag" else {})
        place = self.folder / f"cell-{side}-{task}-{labels}-{seed}"
        shutil.rmtree(place, ignore_errors=True)
        fields |= {"seeds": 1, "seed": seed, "shots": 0 if labels == "all" else int(labels)}
        fields |= {"max_steps": steps, "per_device_train_batch_size": self.size.batch, "max_seq_length": LENGTH}
        files = {"checkpoint": str(checkpoint), "train": str(train), "dev": str(dev), "output_dir": str(place)}
        return FinetuneRecipe(**fields | files, task=TASKS[task].task, save_steps=10**6)

    def cells(self) -> Iterator[tuple[str, FinetuneRecipe]]:
        """The cells that are not done yet and that there is time for; each is asked for when its turn has come."""
        o = self.options
        for seed in range(o.seeds):
            for labels in o.labels:
                for task in o.tasks:
                    for side in o.only:
                        key = f"{side}/{task}/{labels}/{seed}"
                        if key in self.results["cells"] or not possible(side, task):
                            continue
                        if recipe := self.cell(side, task, labels, seed):
                            yield key, recipe
                        else:
                            self.complete = False

    def senses(self, body: str) -> bool:
        """Accuracy on word-in-context by a threshold; whether there was time for it."""
        train, dev = (self.options.data / f"{SENSES}.{part}.jsonl.xz" for part in ("train", "dev"))
        if body in self.results["senses"] or body in UNTRAINED or not train.is_file():
            return True
        final = self.body(body)
        if final is None or not self.budget.enough("senses"):
            return False
        began = time.monotonic()
        layers = range(read_config(final).num_layers + 1)
        found = {}
        for layer in layers:
            place = self.folder / "senses"
            result = evaluate(final, "word-in-context", dev, place, train=str(train), layer=layer, overwrite=True)
            found[str(layer)] = result["metrics"]["accuracy"]
        self.results["senses"][body] = found
        self.budget.note("senses", time.monotonic() - began)
        self.save()
        return True

    def run(self) -> bool:
        """Everything that is not done yet and that there is time for; whether all is done."""
        bodies = dict.fromkeys(SIDES[side].body for side in self.options.only)
        asked = [self.body(body) is not None and self.senses(body) for body in bodies]
        self.complete = all(asked)
        for key, found in run_parallel(score, self.cells(), self.options.jobs, self.folder / "log.txt"):
            self.results["cells"][key] = found
            self.budget.note(key.rpartition("/")[0], found["seconds"])
            self.save()
            say(f"{key}: {100 * found['score']:.1f} in {found['seconds']:.1f}s, {self.time_left()}")
        return self.complete

    def time_left(self) -> str:
        return f"{format_duration(max(self.budget.left(), 0))} left" if self.options.budget else "no end set"


def score(recipe: FinetuneRecipe) -> dict[str, Any]:
    """What one seed comes to; its folder is removed."""
    began = time.monotonic()
    found = finetune(recipe)
    shutil.rmtree(recipe.output_dir, ignore_errors=True)
    seconds = time.monotonic() - began
    return {"score": found["mean"], "metric": found["metric"], "failed": bool(found.get("failed")), "seconds": seconds}


def possible(side: str, task: str) -> bool:
    """ULMFiT and its twin label no words: they have no states that have read what comes after one."""
    return SIDES[side].tags is not None or TASKS[task].task != "tag"


def summary(facts: Mapping[str, Any], model: str, flops: float) -> dict[str, Any]:
    names = ("parameters", "tokens", "steps", "eval_loss", "tokens_per_second")
    return {"model": model, **{name: facts[name] for name in names}, "flops": flops}


# --- operations -----------------------------------------------------------------------------------------------------


def flops_of(config: ModelConfig, spelled: float) -> float:
    """Operations to read one token in pretraining, as they are computed; `spelled` is the share of words spelled."""
    body = flops_per_token(replace(config, head=ClassificationHead(())), LENGTH)
    head = config.head
    assert isinstance(head, LMHead)
    if isinstance(config.recurrent, ELMoConfig):
        words = flops_per_token(replace(config, head=ClassificationHead(()), num_layers=0), LENGTH)
        ways, sampled = 2, min(head.num_sampled or config.vocab_size, config.vocab_size)
        return body - words + spelled * words + ways * 2 * config.recurrent.proj_size * sampled
    vocabulary = flops_per_token(config, LENGTH) - body
    asked = OBJECTIVES["mlm"].expected_rates()["targets"] if config.architecture == "encoder" else 1.0
    return body + asked * vocabulary


def words_spelled(config: ModelConfig, shards: Path, facts: Mapping[str, Any]) -> float:
    """How many different words a batch has for each of its places: ELMo spells each of them once."""
    text = open_shards(shards).train.tokens
    rows = max(1, round(facts["tokens"] / facts["steps"] / LENGTH))
    draw = np.random.default_rng(0)
    shares = []
    for _ in range(20):
        first = draw.integers(0, max(len(text) - LENGTH, 1), rows)
        batch = np.concatenate([text[i : i + LENGTH] for i in first])
        shares.append(len(np.unique(batch)) / len(batch))
    return float(np.mean(shares))


# --- tables ---------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """What the seeds of a cell come to."""

    mean: float
    std: float
    seeds: int
    failed: int


def cells_of(results: Mapping[str, Any]) -> dict[tuple[str, str, str], Cell]:
    """By side, task and labels. Failed runs, no better than the commonest answer, count in the mean."""
    found = defaultdict(list)
    for key, cell in results["cells"].items():
        side, task, labels, _ = key.split("/")
        found[side, task, labels].append(cell)
    return {
        key: Cell(*mean_and_std([100 * c["score"] for c in some]), len(some), sum(c["failed"] for c in some))
        for key, some in found.items()
    }


def markdown(results: Mapping[str, Any], options: argparse.Namespace) -> str:
    """The tables, ready to be pasted."""
    parts = ["\n".join(pretraining_lines(results)), "\n".join(score_lines(cells_of(results), options))]
    if results["senses"]:
        parts.append("\n".join(sense_lines(results["senses"])))
    return "\n\n".join(parts)


def pretraining_lines(results: Mapping[str, Any]) -> list[str]:
    lines = [
        "| pretraining | model | parameters | tokens | operations a token | operations | held-out loss | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, facts in results["pretraining"].items():
        if name not in UNTRAINED:
            loss = f"{facts['eval_loss']:.3f}" if facts["eval_loss"] is not None else ""
            each = facts["flops"] / max(facts["tokens"], 1)
            lines.append(
                f"| {name} | {facts['model']} | {facts['parameters']:,} | {facts['tokens']:,} | {each:.3g} | "
                f"{facts['flops']:.3g} | {loss} | {facts['seconds']:.0f} |"
            )
    return lines


def score_lines(cells: Mapping[tuple[str, str, str], Cell], options: argparse.Namespace) -> list[str]:
    columns = [(task, labels) for task in options.tasks for labels in options.labels]
    lines = [
        "| side | " + " | ".join(f"{task}, {labels}" for task, labels in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for side in options.only:
        texts = [written(cells.get((side, *column))) for column in columns]
        lines.append(f"| {SIDES[side].name} | " + " | ".join(texts) + " |")
    return lines


def written(cell: Cell | None) -> str:
    """
    >>> written(Cell(81.25, 1.5, 3, 1))
    '81.2 ± 1.5 (1 failed)'
    """
    if cell is None:
        return ""
    notes = [f"{cell.seeds} seed{'s' * (cell.seeds > 1)}"] * (cell.seeds < 3) + [f"{cell.failed} failed"] * (
        cell.failed > 0
    )
    deviation = f" ± {cell.std:.1f}" if cell.seeds > 1 else ""
    return f"{cell.mean:.1f}{deviation}" + (f" ({', '.join(notes)})" if notes else "")


def sense_lines(senses: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = ["| same sense (WiC), by a threshold | accuracy of layer 0, 1, ... |", "| --- | --- |"]
    for body, found in senses.items():
        lines.append(f"| {body} | " + ", ".join(f"{100 * x:.1f}" for x in found.values()) + " |")
    return lines


def labels_needed(cells: Mapping[tuple[str, str, str], Cell], task: str, side: str, sizes: Mapping[str, int]) -> Any:
    """How many labels a side from scratch needs to be as good as ULMFiT with 100, by a line between log counts.

    None where something is not measured; infinity where all labels are not enough.
    """
    goal = cells.get(("ulmfit", task, "100"))
    points = sorted((n, cells[side, task, labels].mean) for labels, n in sizes.items() if (side, task, labels) in cells)
    if goal is None or len(points) < 2:
        return None
    if points[0][1] >= goal.mean:
        return points[0][0]
    for (n, low), (m, high) in pairwise(points):
        if high >= goal.mean:
            share = (goal.mean - low) / (high - low)
            return math.exp(math.log(n) + share * (math.log(m) - math.log(n)))
    return math.inf


def hundredfold(results: Mapping[str, Any], work: Work) -> dict[str, Any]:
    """Does ULMFiT with 100 labels equal training from scratch with 100 times as many? Says so for each task."""
    cells, answers = cells_of(results), dict[str, Any]()
    for task in work.options.tasks:
        if TASKS[task].task != "classify" or ("ulmfit", task, "100") not in cells:
            continue
        whole = len(read_labelled(work.files(task)[0], "classify", None, "train"))
        sizes = {labels: whole if labels == "all" else int(labels) for labels in work.options.labels}
        for side in ("lstm", "bilstm", "bag"):
            needed = labels_needed(cells, task, side, sizes)
            if needed is None:
                continue
            answers[f"{task}/{side}"] = None if math.isinf(needed) else needed
            if math.isinf(needed):
                count = f"more than all {whole:,} (over {whole / 100:,.0f}x)"
            elif needed <= min(sizes.values()):
                count = f"{needed:,} or fewer: nothing was gained"
            else:
                count = f"about {needed:,.0f} ({needed / 100:,.1f}x)"
            print(f"{task}: ULMFiT with 100 labels = {SIDES[side].name} with {count}")
    return answers


def listed(text: str, known: Sequence[str] | None, option: str) -> list[str]:
    """Names with commas between; those that are not known are refused."""
    names = [name for name in text.split(",") if name]
    if known is not None and (wrong := [name for name in names if name not in known]):
        raise UserError(f"{option}: there is no {wrong[0]!r}. There are: {', '.join(known)}.")
    return names


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with classification/, tagging/, pairs/")
    parser.add_argument("--output-dir", required=True, help="what is made, and results.json: the same one goes on")
    parser.add_argument("--sizes", choices=SIZES, default="tiny")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each pretraining but BERT's")
    parser.add_argument("--budget", type=float, default=0.0, help="end after so many minutes, and keep what is done")
    parser.add_argument("--only", default=",".join(SIDES), help="sides, as elmo,bert")
    parser.add_argument("--tasks", default="sst2,trec,wnut17", help=f"of {','.join(TASKS)}")
    parser.add_argument("--labels", default="100,1000,all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="cells that are computed at once")
    parser.add_argument("--workers", type=int, default=0, help="of word2vec and of prepare; 0: one for each core")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object on the last line")
    options = parser.parse_args(words)
    options.only = listed(options.only, list(SIDES), "--only")
    options.tasks = listed(options.tasks, list(TASKS), "--tasks")
    options.labels = listed(options.labels, None, "--labels")
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    began, machine = time.monotonic(), choose_compute(FinetuneRecipe())
    say(f"firth {__version__}; {machine}")
    work = Work(options)
    complete = work.run()
    print(markdown(work.results, options) + "\n")
    answers = hundredfold(work.results, work)
    for name, like in AS_MANY_AS.items():
        if name in (made := work.results["pretraining"]) and like in made:
            print(f"operations: {like} {made[like]['flops']:.4g}, {name} {made[name]['flops']:.4g}")
    again = [name for name, facts in work.results["pretraining"].items() if facts["times"] > 1]
    if again:
        print(f"pretrained more than once, as the folder was gone: {', '.join(again)}; cells are of any of these.")
    state = "complete" if complete else "not complete: the budget is used up; the same command goes on"
    say(f"{state}; {format_duration(time.monotonic() - began)}")
    if options.json:
        facts = {**work.results, "complete": complete, "labels_needed": answers, "machine": str(machine)}
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
