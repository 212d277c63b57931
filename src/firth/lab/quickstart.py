"""All stages on the built-in corpus: tokenizer, pretraining, fine-tuning against two baselines, report.

Three arms are fine-tuned, with equal settings. They differ in their weights at the start:

1. "from scratch": random weights;
2. "counted embeddings": random weights, and PPMI embeddings of the corpus, which counting alone gives;
3. "pretrained": the second, after masked language modelling (or the objective of the architecture).

So the difference of 2 and 1 is the worth of counting, and that of 3 and 2 the worth of pretraining. The baselines are
trained first. Their time predicts that of the pretrained models, and pretraining gets the rest of the minutes. Some
timed steps decide the CPU threads and the length of all fine-tunings.

On a busy machine this rest is too short for `MIN_USEFUL_STEPS` of pretraining. Without minutes of the user the run then
takes up to `MAX_DEFAULT_MINUTES`. If that is not enough, the steps get fewer rows: in so short a run the number of
updates counts for more than the tokens that each of them reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml

from firth.core.chart import loss_chart
from firth.core.console import (
    extend_overall_progress,
    format_count,
    format_duration,
    overall_progress,
    quiet,
    say,
    show_table,
)
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, write_json
from firth.core.html import ClozeSample, HtmlPage
from firth.core.serialization import to_dict
from firth.evaluate.companions import COMPANIONS
from firth.evaluate.report import loss_series
from firth.generate import fill, generate
from firth.lab.report import ArmScore, arm_chart
from firth.models import (
    Model,
    ModelConfig,
    get_preset,
    load_model,
    make_model,
    warm_start_embeddings,
    with_vocabulary,
    write_model,
)
from firth.objectives import MLM
from firth.recipes import DEFAULT_TOKENIZERS, finetuning_defaults, pretraining_recipe
from firth.tasks import FinetuneRecipe, finetune, plan_finetuning
from firth.text import HELD_OUT_FRACTION, Corpus, is_held_out, read_labelled
from firth.text.python_docs import PYDOCS_TEST_NAME
from firth.tokens import ShardSet, open_shards, prepare, train_tokenizer
from firth.tokens.shards import find_shard_damage
from firth.train import Recipe, load_recipe, pretrain, read_log, run_folder, token_loss_name
from firth.train.clock import RunClock
from firth.train.compute import load_average
from firth.train.launch_env import require_single_process
from firth.train.pretrain import MIN_USEFUL_STEPS, time_pretraining
from firth.train.resume import read_intermediate, write_intermediate

DEFAULT_MINUTES, MAX_DEFAULT_MINUTES = 5.0, 6.5  # per architecture; the second on a busy machine
QUICKSTART_VOCAB_SIZE = 8192
LABEL_COUNTS: tuple[int, ...] = (64, 256)
QUICKSTART_SEEDS = 3
FINETUNE_STEPS = 200  # per fine-tuning, fewer on a slow machine
MIN_FINETUNE_STEPS = 60  # with fewer, no arm learns
FINETUNE_BATCH_SIZE, FINETUNE_LENGTH_TOKENS = 16, 64  # small: the arms leave the time to pretraining
QUICKSTART_LENGTH_TOKENS = 128
MIN_PRETRAIN_ROWS = 8  # per step; 32 where the time is long enough
# Shares of the minutes.
PREPARE_SHARE, ARM_SHARE, PRETRAIN_SHARE = 0.15, 0.12, 0.46
MIN_PRETRAIN_SHARE = 0.3  # even if the run ends late
WHOLE_CORPUS_MINUTES = 15.0  # on a CPU
REPORT_SECONDS = 6.0  # reserved for samples and report
PLAN = [
    ("train a tokenizer, and encode the documentation of the installed packages", PREPARE_SHARE),
    ("fine-tune two baselines, from random weights and from counted embeddings", 2 * ARM_SHARE),
    ("pretrain", PRETRAIN_SHARE),
    ("fine-tune the pretrained model, and write the report", 1 - PREPARE_SHARE - 2 * ARM_SHARE - PRETRAIN_SHARE),
]
ARMS = {"scratch": "from scratch", "counted": "counted embeddings", "pretrained": "pretrained"}


@dataclass(frozen=True)
class ArchitectureSetup:
    """One architecture of the comparison: its model on this machine, and its settings."""

    model: ModelConfig
    recipe_fields: dict[str, Any]
    finetune_fields: dict[str, Any]


@dataclass(frozen=True)
class TimeBudget:
    """Seconds for one architecture, and the most that it may take on a busy machine."""

    seconds: float
    max_seconds: float

    @property
    def can_grow(self) -> bool:
        return self.max_seconds > self.seconds


@dataclass(frozen=True)
class FinetunePlan:
    """Length of every fine-tuning, which is the same for all arms."""

    max_steps: int
    threads: int  # CPU threads; 0: as many as the process has
    label_counts: tuple[int, ...]

    def describe_runs(self, num_arms: int) -> str:
        return format_count(num_arms * len(self.label_counts) * QUICKSTART_SEEDS, "run")


def architecture_setups(include_all: bool) -> dict[str, ArchitectureSetup]:
    """Return the models by architecture: tiny ones on a CPU, small ones on a GPU.

    Experiments chose the settings (docs/history.md).
    """
    has_gpu = torch.cuda.is_available()
    size = "small" if has_gpu else "tiny"
    common = {
        "max_seq_length": QUICKSTART_LENGTH_TOKENS,
        "per_device_train_batch_size": 256 if has_gpu else 32,
        "save_steps": 500,
        **({} if has_gpu else {"eval_rows": 128}),
    }
    rate = 1e-3 if has_gpu else 2e-3
    adamw = {"optim": "adamw", "learning_rate": rate}
    setups = {
        "encoder": ArchitectureSetup(
            replace(get_preset(f"bert-{size}"), dropout=0.0, attention_dropout=0.0),
            {"objective": MLM(rate=0.4), "optim": "muon", "learning_rate": rate},
            {},
        ),
        "decoder": ArchitectureSetup(
            replace(get_preset(f"gpt2-{size}"), dropout=0.0, attention_dropout=0.0), adamw, {}
        ),
        "encoder-decoder": ArchitectureSetup(
            replace(get_preset(f"t5-{size}"), dropout=0.0, attention_dropout=0.0), adamw, {}
        ),
    }
    return {
        name: replace(setup, recipe_fields=common | setup.recipe_fields)
        for name, setup in setups.items()
        if include_all or name == "encoder"
    }


def quickstart(
    output_dir: str | Path | None = None,
    minutes: float | None = None,
    all: bool = False,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Run all stages on the documentation of the installed packages; return the results.

    `minutes` are spent on each architecture. None: 5, and up to 6.5 on a busy machine. `all` compares encoder, decoder
    and encoder-decoder. The run is written to `output_dir`, by default the next free quickstart-N: `resume` continues
    it, `overwrite` replaces it. `seed` seeds data order, weights and dropout.
    """
    if minutes is not None and minutes <= 0:
        raise UserError(f"minutes is {minutes}, and must be more than 0.")
    require_single_process("quickstart runs in one process: start it without torchrun.")
    budget = TimeBudget(60 * (minutes or DEFAULT_MINUTES), 60 * (minutes or MAX_DEFAULT_MINUTES))
    folder = Path(output_dir) if output_dir else next_free_folder("quickstart")
    setups = architecture_setups(all)
    with run_folder(folder, resume, overwrite), RunClock(folder, resume) as clock:
        print_plan(budget, list(setups))
        with overall_progress(lambda: clock.elapsed_seconds, budget.seconds * len(setups)):
            corpus = Corpus(["pydocs"])
            runs = {
                name: ArchitectureRun(folder / name, name, setup, seed, resume).run(corpus, budget)
                for name, setup in setups.items()
            }
        rows = [row for run in runs.values() for row in run["table"]]
        columns = ["model", "labels", *ARMS.values(), "gain"]
        show_table(
            f"Which package does a docstring come from? ({runs['encoder']['classes']} classes, accuracy in % on the "
            f"test part, {QUICKSTART_SEEDS} seeds)",
            columns,
            [format_result_row(row) for row in rows],
        )
        for row in rows:
            say(describe_gain(row))
        for run in runs.values():
            print_samples(run)
        write_quickstart_report(folder / "report.html", runs, columns)
        result: dict[str, Any] = {
            "output_dir": str(folder),
            "report": str(folder / "report.html"),
            "table": rows,
            "pretraining": {name: run["pretraining"] for name, run in runs.items()},
            "seconds": clock.elapsed_seconds,
        }
        write_json(folder / "results.json", result)
        say(f"done in {format_duration(result['seconds'])}: see {folder / 'report.html'}.")
        return result


def print_plan(budget: TimeBudget, architectures: list[str]) -> None:
    """Say what will happen, and about how long each step takes."""
    each = f" for each of {', '.join(architectures)}" if len(architectures) > 1 else ""
    longer = f" ({format_duration(budget.max_seconds)} on a busy machine)" if budget.can_grow else ""
    say(f"Plan: four steps in about {format_duration(budget.seconds)}{longer}{each}. Ctrl-C stops, --resume continues.")
    for number, (name, share) in enumerate(PLAN, 1):
        say(f"  {number}. {name}: about {format_duration(budget.seconds * share)}")


def document_stride(seconds: float) -> int:
    """Return n: every n-th document is read. A CPU reads no more of the corpus in a few minutes, and saves the rest."""
    return 1 if torch.cuda.is_available() or seconds >= 60 * WHOLE_CORPUS_MINUTES else 3


def plan_pretraining(step_seconds: float, rows: int, seconds: float, max_seconds: float) -> tuple[int, float]:
    """Return the rows per step and the seconds of pretraining.

    First the time grows until it holds `MIN_USEFUL_STEPS`, then the rows are halved.

    >>> plan_pretraining(0.4, 32, 100.0, 190.0), plan_pretraining(0.6, 32, 100.0, 190.0)
    ((32, 100.0), (32, 120.0))
    >>> plan_pretraining(1.2, 32, 100.0, 190.0), plan_pretraining(5.0, 32, 100.0, 190.0)
    ((16, 190.0), (8, 190.0))
    """
    seconds = max(seconds, min(MIN_USEFUL_STEPS * step_seconds, max_seconds))
    while seconds < MIN_USEFUL_STEPS * step_seconds and rows >= 2 * MIN_PRETRAIN_ROWS:
        rows, step_seconds = rows // 2, step_seconds / 2
    return rows, seconds


class ArchitectureRun:
    """All stages of one architecture, each in its own folder."""

    def __init__(self, folder: Path, architecture: str, setup: ArchitectureSetup, seed: int, resume: bool) -> None:
        self.folder, self.architecture, self.setup, self.seed, self.resume = folder, architecture, setup, seed, resume
        folder.mkdir(exist_ok=True)

    def run(self, corpus: Corpus, budget: TimeBudget) -> dict[str, Any]:
        """Run all stages and return the inputs of the table and the report."""
        total_seconds = budget.seconds
        with RunClock(self.folder, self.resume) as clock:
            self.announce(1, "training a tokenizer, and encoding the text", PREPARE_SHARE * total_seconds)
            shards = self.prepare(corpus, document_stride(total_seconds))
            clock.save()
            arm_seconds = max(total_seconds - clock.elapsed_seconds, 0) * ARM_SHARE / (1 - PREPARE_SHARE)
            starts = self.write_baselines(shards)
            plan = self.plan_arms(starts["scratch"], arm_seconds)
            message = "fine-tuning the same model from random weights and from counted embeddings, for comparison"
            self.announce(2, f"{message} ({plan.describe_runs(2)})", 2 * arm_seconds)
            start = time.monotonic()
            scores = {arm: self.finetune_arm(arm, starts[arm], plan) for arm in starts}
            # A resumed run only reads the results of fine-tunings that are complete: their own seconds count.
            spent = sum(result["seconds"] for results in scores.values() for result in results.values())
            finetune_seconds = max(time.monotonic() - start, spent) / len(starts)
            clock.save()
            start = time.monotonic()
            spent = clock.elapsed_seconds + 1.1 * finetune_seconds + REPORT_SECONDS
            least = MIN_PRETRAIN_SHARE * total_seconds
            planned, step_seconds = self.plan_pretraining(
                shards, starts["counted"], *(max(s - spent, least) for s in (total_seconds, budget.max_seconds))
            )
            self.announce(3, "pretraining from the counted embeddings", 60 * planned.minutes)
            trained = self.pretrain(planned, start, step_seconds)
            message = f"fine-tuning the pretrained model ({plan.describe_runs(1)})"
            self.announce(4, message, finetune_seconds)
            final = self.folder / "pretraining" / "final"
            scores["pretrained"] = self.finetune_arm("pretrained", final, plan)
        recipe = load_recipe(self.folder / "pretraining" / "recipe.yaml", Recipe)
        return {
            "architecture": self.architecture,
            "table": [
                self.result_row(labels, {a: s[labels] for a, s in scores.items()}) for labels in plan.label_counts
            ],
            "classes": len({e.target for e in read_labelled(PYDOCS_TEST_NAME, "classify")}),
            "pretraining": trained,
            "epochs": trained["steps"] * recipe.global_batch_size * recipe.max_seq_length / shards.num_tokens,
            "finetune_steps": plan.max_steps,
            "recipe": recipe,
            "log": read_log(self.folder / "pretraining" / "log.jsonl"),
            "samples": sample_predictions(load_model(final), shards),
        }

    def announce(self, step: int, message: str, seconds: float) -> None:
        say(f"Step {step} of {len(PLAN)}: {message}, {self.architecture}, about {format_duration(seconds)}")

    def prepare(self, corpus: Corpus, stride: int) -> ShardSet:
        """Train a tokenizer and write shards of every `stride`-th document. Unigram trains slowly: it gets fewer."""
        data_folder = self.folder / "data"
        if find_shard_damage(data_folder) is not None:
            kind = DEFAULT_TOKENIZERS[self.setup.model.architecture]
            texts = (d.text for d in islice(corpus, 0, None, 8 if kind == "unigram" else stride))
            tokenizer = train_tokenizer(texts, kind, QUICKSTART_VOCAB_SIZE, lowercase=kind == "wordpiece")
            prepare(islice(corpus, 0, None, stride), tokenizer, data_folder)
            say(corpus.describe() + (f"; one in {stride} is read in so few minutes" if stride > 1 else ""))
        return open_shards(data_folder)

    def write_baselines(self, shards: ShardSet) -> dict[str, Path]:
        """Write the checkpoints of step 0: random weights, and the same with counted embeddings."""
        checkpoints = {arm: self.folder / f"start-{arm}" for arm in ("scratch", "counted")}
        for arm, checkpoint in checkpoints.items():
            if find_corruption(checkpoint) is None:
                continue
            torch.manual_seed(self.seed)
            model = make_model(with_vocabulary(self.setup.model, shards.tokenizer.vocab))
            model.tokenizer = shards.tokenizer
            if arm == "counted":
                say("counting which tokens occur together, to initialize the embeddings (PPMI)")
                warm_start_embeddings(model, shards.train, self.seed)
            with atomic_folder(checkpoint) as temporary:
                write_model(model, temporary)
        return checkpoints

    def plan_pretraining(
        self, shards: ShardSet, checkpoint: Path, seconds: float, max_seconds: float
    ) -> tuple[Recipe, float]:
        """Return the recipe of pretraining, with the minutes, rows and CPU threads that suit this machine.

        Also returns the seconds of a step, 0 where none was timed.
        """
        folder = self.folder / "pretraining"
        if self.resume and (folder / "recipe.yaml").is_file():
            return load_recipe(folder / "recipe.yaml", Recipe), 0.0
        model = with_vocabulary(self.setup.model, shards.tokenizer.vocab)
        fields = {"data": str(shards.folder), "tokenizer": shards.tokenizer.fingerprint, "minutes": seconds / 60}
        recipe = pretraining_recipe(model, output_dir=str(folder), seed=self.seed, **fields, **self.setup.recipe_fields)
        recipe = replace(recipe, checkpoint=str(checkpoint), warm_start="none")
        if torch.cuda.is_available():
            return recipe, 0.0
        with quiet():
            step_seconds, threads = time_pretraining(recipe)
        rows, longer = plan_pretraining(step_seconds, recipe.per_device_train_batch_size, seconds, max_seconds)
        extend_overall_progress(longer - seconds)
        if (rows, longer) != (recipe.per_device_train_batch_size, seconds):
            more = f"takes {format_duration(longer - seconds)} more, and " if longer > seconds else ""
            steps = longer / step_seconds * recipe.per_device_train_batch_size / rows
            say(
                f"a step of {recipe.per_device_train_batch_size} rows takes {step_seconds:.1f}s here (load "
                f"{load_average():.1f}): pretraining {more}makes about {steps:.0f} steps of {rows} rows"
            )
        planned = replace(recipe, minutes=longer / 60, per_device_train_batch_size=rows, threads=threads)
        return planned, step_seconds * rows / recipe.per_device_train_batch_size

    def pretrain(self, recipe: Recipe, start_time: float, step_seconds: float) -> dict[str, Any]:
        """Pretrain; `minutes` start at `start_time`. A timed step need not be timed again."""
        resumes = self.resume and (Path(recipe.output_dir) / "recipe.yaml").is_file()
        began = None if resumes else start_time
        return pretrain(
            recipe,
            resume=self.resume,
            start_time=began,
            step_seconds=step_seconds,
            companions=COMPANIONS,
        )

    def finetune_recipe(self, arm: str, checkpoint: Path, num_labels: int, **fields: Any) -> FinetuneRecipe:
        """Return the recipe of one arm. Its scores choose nothing: no early stopping, no best step."""
        settings = {
            "per_device_train_batch_size": FINETUNE_BATCH_SIZE,
            "max_seq_length": FINETUNE_LENGTH_TOKENS,
            "checkpoint": str(checkpoint),
            "task": "classify",
            "train": "pydocs",
            "dev": PYDOCS_TEST_NAME,
            "output_dir": str(self.folder / f"{arm}-{num_labels}"),
            "seed": self.seed,
            "seeds": QUICKSTART_SEEDS,
            "shots": num_labels,
            "from_scratch": arm == "scratch",
            "compile": False,
        }
        optimizer = finetuning_defaults(self.setup.model, "adamw")  # as in pretraining here
        return FinetuneRecipe(**optimizer | settings | self.setup.finetune_fields | fields)

    def plan_arms(self, checkpoint: Path, arm_seconds: float) -> FinetunePlan:
        """Plan every fine-tuning from the speed of this machine; a resume keeps the plan.

        Where the time is too short for all numbers of labels, the smallest alone gets it.
        """
        file = self.folder / "finetuning.json"
        plan = read_intermediate(file, FinetunePlan)
        if plan is None:
            minutes = max(arm_seconds / len(LABEL_COUNTS) / 60, 1e-3)
            recipe = self.finetune_recipe("scratch", checkpoint, LABEL_COUNTS[0], minutes=minutes)
            with quiet():
                planned = plan_finetuning(replace(recipe, max_steps=FINETUNE_STEPS))
            steps, labels = planned.max_steps, LABEL_COUNTS
            if steps < FINETUNE_STEPS // 2:
                steps, labels = steps * len(LABEL_COUNTS), LABEL_COUNTS[:1]
            steps = min(max(steps, MIN_FINETUNE_STEPS), FINETUNE_STEPS)
            plan = FinetunePlan(steps, planned.threads, labels)
            write_intermediate(file, to_dict(plan))
        threads = f" on {format_count(plan.threads, 'CPU thread')}" if plan.threads else ""
        numbers = " and ".join(map(str, plan.label_counts))
        say(f"each fine-tuning takes {format_count(plan.max_steps, 'step')}{threads}, with {numbers} labels")
        return plan

    def finetune_arm(self, arm: str, checkpoint: Path, plan: FinetunePlan) -> dict[int, dict[str, Any]]:
        """Fine-tune one arm on each number of labels, with several seeds; return the results by the number."""
        fields = {"max_steps": plan.max_steps, "threads": plan.threads}
        return {
            labels: finetune(self.finetune_recipe(arm, checkpoint, labels, **fields), resume=self.resume)
            for labels in plan.label_counts
        }

    def result_row(self, num_labels: int, scores: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the scores of the arms, and what counting and pretraining add."""
        means = {arm: score["mean"] for arm, score in scores.items()}
        return {
            "model": self.architecture,
            "labels": num_labels,
            **{arm: {name: score[name] for name in ("mean", "std", "seeds")} for arm, score in scores.items()},
            "chance": scores["scratch"]["chance"],
            "gain": means["pretrained"] - means["scratch"],
            "gain_from_counting": means["counted"] - means["scratch"],
            "gain_from_pretraining": means["pretrained"] - means["counted"],
        }


def describe_gain(row: dict[str, Any]) -> str:
    """Say what counting and pretraining add to random weights, in percentage points."""
    counting, pretraining = 100 * row["gain_from_counting"], 100 * row["gain_from_pretraining"]
    return (
        f"{row['model']}, {row['labels']} labels: counted embeddings add {counting:+.1f} percentage points to random "
        f"weights, and pretraining adds {pretraining:+.1f} to them."
    )


def next_free_folder(name: str) -> Path:
    """Return `quickstart`, or the first free one of `quickstart-2`, `quickstart-3` ..."""
    names = [name, *(f"{name}-{i}" for i in range(2, 1000))]
    return next(Path(n) for n in names if not Path(n).exists())


def format_result_row(row: dict[str, Any]) -> list[str]:
    def percent(score: dict[str, float]) -> str:
        return f"{100 * score['mean']:.1f} ± {100 * score['std']:.1f}"

    return [
        row["model"],
        str(row["labels"]),
        *(percent(row[arm]) for arm in ARMS),
        f"{100 * row['gain']:+.1f}",
    ]


def held_out_sentences() -> Iterator[str]:
    """Yield short first sentences of held-out documents."""
    for document in Corpus(["pydocs"]):
        sentence = " ".join(document.text.partition("\n\n")[0].split())
        if (
            is_held_out(document.text, HELD_OUT_FRACTION)
            and 9 <= len(sentence.split()) <= 16
            and sentence.endswith(".")
        ):
            yield sentence


def sample_predictions(model: Model, shards: ShardSet, num_samples: int = 6) -> list[ClozeSample]:
    """Return held-out sentences with a blank that the model fills; a decoder continues them instead."""
    tokenizer, samples = shards.tokenizer, []
    for index, sentence in enumerate(islice(held_out_sentences(), 0, 40 * num_samples, 40)):
        words = sentence.split()
        if model.config.architecture == "decoder":
            start = " ".join(words[:5])
            text = generate(model, [start], max_new_tokens=24, temperature=0.8, top_p=0.9, seed=index)[0]
            samples.append(ClozeSample(f"{start} ", "", collapse_whitespace(text.removeprefix(start)), []))
            continue
        single = [i for i in range(2, len(words) - 1) if words[i].isalpha() and len(tokenizer.encode(words[i])) == 1]
        if not single:
            continue
        blank = single[index % len(single)]
        before, after = " ".join(words[:blank]) + " ", " " + " ".join(words[blank + 1 :])
        guesses = [
            (collapse_whitespace(g.text), g.probability)
            for g in fill(model, f"{before}[MASK]{after}", top=4)[0].guesses
        ]
        answer = words[blank].lower() if shards.manifest["tokenizer_kind"] == "wordpiece" else words[blank]
        samples.append(ClozeSample(before, after, answer, guesses))
    return samples


def collapse_whitespace(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"


def print_samples(run: dict[str, Any]) -> None:
    """Print the samples as a table."""
    if run["architecture"] == "decoder":
        continuations = [(s.before, s.answer) for s in run["samples"]]
        show_table("Continuations of held-out sentences by the decoder", ["prompt", "continuation"], continuations)
        return
    rows = [
        (f"{s.before}____{s.after}", s.answer, ", ".join(f"{word} {100 * p:.0f}%" for word, p in s.guesses))
        for s in run["samples"]
    ]
    title = f"Blanks in held-out sentences, filled by the {run['architecture']}"
    show_table(title, ["sentence", "original", "predictions"], rows)


def write_quickstart_report(path: Path, runs: dict[str, dict[str, Any]], columns: list[str]) -> None:
    """Write a page with all results; every number comes from this run."""
    page = HtmlPage("Pretrain once, fine-tune many times")
    rows = [row for run in runs.values() for row in run["table"]]
    steps = ", ".join(sorted({str(run["finetune_steps"]) for run in runs.values()}))
    page.add_paragraph(
        "A language model was trained on the documentation of the Python packages on this machine, then fine-tuned "
        f"to classify docstrings by their package, for {steps} steps. Three models with the same architecture, labels, "
        "steps and learning rates differ in their weights at the start. From scratch: random weights. Counted "
        "embeddings: the embeddings come from counts of which tokens occur together (PPMI), without any training. "
        "Pretrained: the second model, after pretraining. The docstrings of the score are a test part: no model has "
        "read them, and no setting was chosen by them."
    )
    page.add_table(
        columns,
        [format_result_row(row) for row in rows],
        f"Accuracy in %, mean and standard deviation over {QUICKSTART_SEEDS} seeds.",
    )
    for row in rows:
        page.add_paragraph(describe_gain(row))
    bars = [
        ArmScore(row["model"], name, row["labels"], [100 * score for score in row[arm]["seeds"]])
        for row in rows
        for arm, name in ARMS.items()
    ]
    page.add_chart(
        arm_chart(bars, 100 * rows[0]["chance"]),
        f"Bars: mean accuracy in %, by the weights at the start. Dots: the {QUICKSTART_SEEDS} seeds; each draws other "
        "labels. Where the dots of two bars mix, their difference may be chance. The dashed line always guesses the "
        "most frequent package.",
    )
    for name, run in runs.items():
        add_pretraining_section(page, name, run)
    page.save(path)


def add_pretraining_section(page: HtmlPage, architecture: str, run: dict[str, Any]) -> None:
    trained, recipe = run["pretraining"], run["recipe"]
    page.add_heading(f"Pretraining: {architecture}")
    page.add_paragraph(describe_final_loss(trained, architecture))
    if trained["steps"] < MIN_USEFUL_STEPS:
        read = format_count(trained["steps"], "step reads", "steps read")
        page.add_paragraph(f"{read} {100 * run['epochs']:.0f}% of the text: expect little. Raise --minutes.")
    train, held = loss_series(run["log"])
    entropy = trained["unigram_entropy"] if architecture != "encoder-decoder" else None
    page.add_chart(
        loss_chart(train, held, entropy),
        f"{trained['parameters']:,} parameters, {trained['tokens']:,} tokens at {trained['tokens_per_second']:,.0f} "
        "per second." + (" The line is the unigram entropy: a model of token frequencies alone." if entropy else ""),
    )
    caption = (
        "Continuations of the first words." if architecture == "decoder" else "Blanks and the predictions for them."
    )
    page.add_cloze_samples(run["samples"], caption + " The sentences were held out.")
    page.add_code(yaml.safe_dump(to_dict(recipe), sort_keys=False), "The recipe of this run, fully resolved.")


def describe_final_loss(results: dict[str, Any], architecture: str) -> str:
    """Compare the final loss with the unigram entropy, in a sentence."""
    loss, entropy = results[token_loss_name(results)], results["unigram_entropy"]
    if loss is None:
        return "No document was held out, so there is no held-out loss."
    if architecture == "encoder-decoder":
        return (
            f"The held-out loss is {loss:.2f}. It includes sentinels, which are easy: unigram entropy is no baseline."
        )
    difference = f"The held-out loss is {loss:.2f} nats per token, and that of word frequencies alone {entropy:.2f}"
    if loss < entropy - 0.1:
        return f"{difference}: the model is {entropy - loss:.2f} better, so it uses context."
    if loss <= entropy:
        return f"{difference}: the model has learnt little more than word frequencies. Raise --minutes."
    return f"{difference}: the model is {loss - entropy:.2f} worse than word frequencies. Raise --minutes."
