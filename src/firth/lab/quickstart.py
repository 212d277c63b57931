"""All stages on the built-in corpus: tokenizer, pretraining, fine-tuning against training from scratch, report.

The baselines from scratch are trained first. Their time predicts that of the pretrained models, and pretraining gets
the rest of the minutes.
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

from firth.core.console import format_duration, say, show_table
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, write_json
from firth.core.html import ClozeSample, HtmlPage, plot_loss_curve
from firth.core.serialization import to_dict
from firth.evaluate.report import loss_series
from firth.generate import fill, generate
from firth.lab.report import TransferPoint, transfer_plot
from firth.models import Model, ModelConfig, get_preset, load_model, make_model, with_vocabulary, write_model
from firth.objectives import MLM
from firth.recipes import DEFAULT_TOKENIZERS, finetuning_defaults, pretraining_recipe
from firth.tasks import FinetuneRecipe, finetune
from firth.text import HELD_OUT_FRACTION, Corpus, is_held_out, read_labelled
from firth.tokens import ShardSet, open_shards, prepare, train_tokenizer
from firth.train import Recipe, load_recipe, pretrain, read_log, run_folder, token_loss_name
from firth.train.clock import RunClock

QUICKSTART_VOCAB_SIZE = 8192
LABEL_COUNTS = (64, 256)
QUICKSTART_SEEDS = 3
FINETUNE_STEPS = 200  # per fine-tuning: with fewer, the baselines from scratch do not converge
QUICKSTART_LENGTH_TOKENS = 128
MIN_PRETRAIN_TIME_SHARE = 0.4  # minimum share of the minutes for pretraining, even if the run ends late
REPORT_SECONDS = 6.0  # reserved for samples and report


@dataclass(frozen=True)
class ArchitectureSetup:
    """One architecture of the comparison: its model on this machine, and its settings."""

    model: ModelConfig
    recipe_fields: dict[str, Any]
    finetune_fields: dict[str, Any]


def architecture_setups(include_all: bool) -> dict[str, ArchitectureSetup]:
    """Return the models by architecture: tiny ones on a CPU, small ones on a GPU.

    Experiments chose the settings (docs/results.md).
    """
    has_gpu = torch.cuda.is_available()
    size = "small" if has_gpu else "tiny"
    common = {
        "max_seq_length": QUICKSTART_LENGTH_TOKENS,
        "per_device_train_batch_size": 256 if has_gpu else 32,
        "warm_start": "ppmi",
        "save_steps": 500,
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
    minutes: float = 5.0,
    all: bool = False,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Run all stages on the documentation of the installed packages; `minutes` per architecture. Return the results."""
    if minutes <= 0:
        raise UserError(f"minutes is {minutes}, and must be more than 0.")
    folder = Path(output_dir) if output_dir else next_free_folder("quickstart")
    with run_folder(folder, resume, overwrite), RunClock(folder, resume) as clock:
        corpus = Corpus(["pydocs"])
        runs = {
            name: ArchitectureRun(folder / name, name, setup, seed, resume).run(corpus, minutes)
            for name, setup in architecture_setups(all).items()
        }
        rows = [row for run in runs.values() for row in run["table"]]
        columns = ["model", "labels", "from scratch", "pretrained", "gain"]
        show_table(
            f"Which package does a docstring come from? ({runs['encoder']['classes']} classes, accuracy in %, "
            f"{QUICKSTART_SEEDS} seeds)",
            columns,
            [format_result_row(row) for row in rows],
        )
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


class ArchitectureRun:
    """All stages of one architecture, each in its own folder."""

    def __init__(self, folder: Path, architecture: str, setup: ArchitectureSetup, seed: int, resume: bool) -> None:
        self.folder, self.architecture, self.setup, self.seed, self.resume = folder, architecture, setup, seed, resume
        folder.mkdir(exist_ok=True)

    def run(self, corpus: Corpus, minutes: float) -> dict[str, Any]:
        """Run all stages and return the inputs of the table and the report."""
        with RunClock(self.folder, self.resume) as clock:
            shards = self.prepare(corpus)
            clock.save()
            untrained = self.write_untrained(shards)
            say(f"{self.architecture}: fine-tuning from scratch")
            start = time.monotonic()
            scratch = {labels: self.finetune(untrained, labels, from_scratch=True) for labels in LABEL_COUNTS}
            # A resumed run only reads the results of fine-tunings that are complete: their own seconds count.
            finetune_seconds = max(time.monotonic() - start, sum(result["seconds"] for result in scratch.values()))
            clock.save()
            seconds = max(
                60 * minutes - clock.elapsed_seconds - 1.1 * finetune_seconds - REPORT_SECONDS,
                MIN_PRETRAIN_TIME_SHARE * 60 * minutes,
            )
            say(f"{self.architecture}: pretraining for {format_duration(seconds)}")
            trained = self.pretrain(shards, seconds)
        say(f"{self.architecture}: fine-tuning the pretrained model")
        final = self.folder / "pretraining" / "final"
        tuned = {labels: self.finetune(final, labels, from_scratch=False) for labels in LABEL_COUNTS}
        return {
            "architecture": self.architecture,
            "table": [self.result_row(labels, scratch[labels], tuned[labels]) for labels in LABEL_COUNTS],
            "classes": len({e.target for e in read_labelled("pydocs", "classify", split="dev")}),
            "pretraining": trained,
            "recipe": load_recipe(self.folder / "pretraining" / "recipe.yaml", Recipe),
            "log": read_log(self.folder / "pretraining" / "log.jsonl"),
            "samples": sample_predictions(load_model(final), shards),
        }

    def prepare(self, corpus: Corpus) -> ShardSet:
        """Train a tokenizer and write shards. Unigram trains slowly: it gets one document in 8."""
        data_folder = self.folder / "data"
        if find_corruption(data_folder) is not None:
            kind = DEFAULT_TOKENIZERS[self.setup.model.architecture]
            texts = (d.text for d in islice(corpus, 0, None, 8 if kind == "unigram" else 1))
            tokenizer = train_tokenizer(texts, kind, QUICKSTART_VOCAB_SIZE, lowercase=kind == "wordpiece")
            prepare(corpus, tokenizer, data_folder, total_bytes=corpus.total_bytes)
            say(corpus.describe())
        return open_shards(data_folder)

    def write_untrained(self, shards: ShardSet) -> Path:
        """Write a checkpoint of step 0 for the baselines."""
        checkpoint = self.folder / "untrained"
        if find_corruption(checkpoint) is not None:
            torch.manual_seed(self.seed)
            model = make_model(with_vocabulary(self.setup.model, shards.tokenizer.vocab))
            model.tokenizer = shards.tokenizer
            with atomic_folder(checkpoint) as temporary:
                write_model(model, temporary)
        return checkpoint

    def pretrain(self, shards: ShardSet, seconds: float) -> dict[str, Any]:
        folder = self.folder / "pretraining"
        if self.resume and (folder / "recipe.yaml").is_file():
            return pretrain(load_recipe(folder / "recipe.yaml", Recipe), resume=True)
        model = with_vocabulary(self.setup.model, shards.tokenizer.vocab)
        fields = {"data": str(shards.folder), "tokenizer": shards.tokenizer.fingerprint, "minutes": seconds / 60}
        recipe = pretraining_recipe(model, output_dir=str(folder), seed=self.seed, **fields, **self.setup.recipe_fields)
        return pretrain(recipe, resume=self.resume)

    def finetune(self, checkpoint: Path, num_labels: int, from_scratch: bool) -> dict[str, Any]:
        """Fine-tune on `num_labels` examples with several seeds."""
        fields = (
            finetuning_defaults(self.setup.model, "adamw")  # as in pretraining here
            | {"max_steps": FINETUNE_STEPS, "max_seq_length": QUICKSTART_LENGTH_TOKENS}
            | self.setup.finetune_fields
        )
        recipe = FinetuneRecipe(
            checkpoint=str(checkpoint),
            task="classify",
            train="pydocs",
            dev="pydocs",
            output_dir=str(self.folder / f"{'scratch' if from_scratch else 'pretrained'}-{num_labels}"),
            seed=self.seed,
            seeds=QUICKSTART_SEEDS,
            shots=num_labels,
            from_scratch=from_scratch,
            compile=False,
            **fields,
        )
        return finetune(recipe, resume=self.resume)

    def result_row(self, num_labels: int, scratch: dict[str, Any], tuned: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.architecture,
            "labels": num_labels,
            "scratch": {"mean": scratch["mean"], "std": scratch["std"]},
            "pretrained": {"mean": tuned["mean"], "std": tuned["std"]},
            "gain": tuned["mean"] - scratch["mean"],
        }


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
        percent(row["scratch"]),
        percent(row["pretrained"]),
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
    page.add_paragraph(
        "A language model was trained on the documentation of the Python packages on this machine, then fine-tuned "
        "to classify docstrings by their package. The baseline from scratch has the same architecture, labels, steps "
        "and learning rates, but starts from random weights. The docstrings of the score are held out from both. "
        "Pretraining started from embeddings of word co-occurrences in its text, which is part of the gain."
    )
    page.add_table(
        columns,
        [format_result_row(row) for row in rows],
        f"Accuracy in %, mean and standard deviation over {QUICKSTART_SEEDS} seeds.",
    )
    points = [
        TransferPoint(row["model"], kind == "pretrained", row["labels"], row[kind]["mean"], row[kind]["std"])
        for row in rows
        for kind in ("scratch", "pretrained")
    ]
    page.add_figure(transfer_plot(points), "Accuracy of pretrained models and from scratch, by the number of labels.")
    for name, run in runs.items():
        add_pretraining_section(page, name, run)
    page.save(path)


def add_pretraining_section(page: HtmlPage, architecture: str, run: dict[str, Any]) -> None:
    trained, recipe = run["pretraining"], run["recipe"]
    page.add_heading(f"Pretraining: {architecture}")
    page.add_paragraph(describe_final_loss(trained, architecture))
    train, held = loss_series(run["log"])
    entropy = trained["unigram_entropy"] if architecture != "encoder-decoder" else None
    page.add_figure(
        plot_loss_curve(train, held, entropy),
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
    if loss < entropy - 0.1:
        return f"The held-out loss is {loss:.2f}, below the unigram entropy of {entropy:.2f}: the model uses context."
    return (
        f"The held-out loss is {loss:.2f}, and the unigram entropy {entropy:.2f}: this model has learned little more "
        "than token frequencies. Raise --minutes."
    )
