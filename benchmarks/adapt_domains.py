"""Adapt an English model to Swahili news, e-mails and dialogues: bits per byte and a task, with and without new words.

An encoder and a decoder are pretrained on English. Each is adapted to each domain twice, with its own tokenizer and
with new words of the domain. Bits per byte are those of held-out text before and after; forgetting is the rise on
English. Then every model is fine-tuned on one task of the domain, the English one as well: Swahili news topics, and
whether a subject line belongs to an e-mail, or a summary to a dialogue (half of the pairs are of different rows; chance
is 50%).

    python benchmarks/adapt_domains.py --data DATA --quick

DATA has text/en_wiki.train.txt.xz, text/sw_news.train.txt.xz, classification/masakhanews_swa.{train,dev}.jsonl.xz,
seq2seq/aeslc_email_subject.{train,dev}.jsonl.xz and seq2seq/dialogsum.{train,dev}.jsonl.xz.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallel_runs import run_parallel

from firth import __version__
from firth.api import adapt, pretrain
from firth.core.console import say, show_table
from firth.models import read_config
from firth.recipes import finetuning_defaults
from firth.tasks import FinetuneRecipe, finetune
from firth.train import choose_compute

PRESETS = {"encoder": "bert-tiny", "decoder": "llama-tiny"}
ARMS = {"english": None, "old words": "0", "new words": "auto"}  # the value of --new-tokens
GENERAL = "text/en_wiki.train.txt.xz"


class Domain(NamedTuple):
    """Text of a domain and a task of it, under the data folder."""

    text: str
    columns: dict[str, str]
    task: str  # "classify", or "pair" for the rows of a text-to-text file
    file: str
    steps: int
    max_length: int


DOMAINS = {
    "swahili": Domain("text/sw_news.train.txt.xz", {}, "classify", "classification/masakhanews_swa", 200, 256),
    "e-mails": Domain(
        "seq2seq/aeslc_email_subject.train.jsonl.xz",
        {"text": "source"},
        "pair",
        "seq2seq/aeslc_email_subject",
        400,
        256,
    ),
    "dialogues": Domain("seq2seq/dialogsum.train.jsonl.xz", {"text": "source"}, "pair", "seq2seq/dialogsum", 200, 256),
}


class Job(NamedTuple):
    """One arm: adapt the English model of an architecture to a domain, then fine-tune it."""

    architecture: str
    domain: str
    arm: str
    folder: str  # of all runs
    options: argparse.Namespace


def write_general_text(source: Path, target: Path, megabytes: float) -> None:
    """Write the first megabytes of an English text, up to the end of a document."""
    with lzma.open(source, "rt", encoding="utf-8") as file:
        text = file.read(round(megabytes * 1e6))
    target.write_text(text[: text.rindex("\n\n")] + "\n", encoding="utf-8")


def write_pairs(source: Path, target: Path, seed: int = 0) -> None:
    """Write rows of (text_a, text_b, label): half of the sources with their own target, half with another one's."""
    with lzma.open(source, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rng, lines = random.Random(seed), []
    for number, row in enumerate(rows):
        own = rng.random() < 0.5
        other = rows[(number + rng.randrange(1, len(rows))) % len(rows)]
        answer = row["target"] if own else other["target"]
        lines.append(json.dumps({"text_a": answer, "text_b": row["source"], "label": "own" if own else "other"}))
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pretrain_english(job: Job) -> dict[str, Any]:
    """Pretrain the English model of an architecture."""
    options, folder = job.options, Path(job.folder)
    mlp = 4 * options.dim if job.architecture == "encoder" else 8 * options.dim // 3 // 8 * 8
    overrides = {
        "model.num_layers": options.layers,
        "model.dim": options.dim,
        "model.num_heads": max(1, options.dim // 64),
        "model.mlp.dim": mlp,
        "model.position.length": 512,
    }
    if job.architecture == "decoder":
        del overrides["model.position.length"]
    length = {"max_steps": options.pretraining_steps} if options.pretraining_steps else {"minutes": options.minutes}
    return pretrain(
        PRESETS[job.architecture],
        folder / "english.txt",
        folder / job.architecture,
        vocab_size=options.vocab_size,
        lowercase=job.architecture == "encoder",
        overrides=overrides,
        max_seq_length=options.max_length,
        save_steps=10**6,
        seed=options.seed,
        **length,
    )


def run_arm(job: Job) -> dict[str, Any]:
    """Adapt and fine-tune one arm; return its measurements and its score."""
    options, folder, domain = job.options, Path(job.folder), DOMAINS[job.domain]
    checkpoint, name = (
        folder / job.architecture / "final",
        f"{job.architecture}-{job.domain}-{job.arm}".replace(" ", "-"),
    )
    found: dict[str, Any] = {}
    if (new_tokens := ARMS[job.arm]) is not None:
        length = {"max_steps": options.steps} if options.steps else {"num_train_epochs": options.epochs}
        result = adapt(
            checkpoint,
            options.data / domain.text,
            folder / name,
            new_tokens=new_tokens,
            columns=domain.columns,
            compile=False,
            save_steps=10**6,
            **length,
        )
        found = {key: result[key] for key in ("domain", "general", "forgetting", "steps", "seconds")}
        found["new_tokens"] = result["new_tokens"]["added"]
        checkpoint = folder / name / "final"
    score = finetune(make_task_recipe(checkpoint, folder, job, f"{name}-task"))
    return {**found, "score": {key: score[key] for key in ("metric", "mean", "std", "seeds")}}


def make_task_recipe(checkpoint: Path, folder: Path, job: Job, name: str) -> FinetuneRecipe:
    """Return the recipe of the domain's task, the same for every arm."""
    options, domain = job.options, DOMAINS[job.domain]
    if domain.task == "pair":
        train, dev = (folder / f"{job.domain}.{part}.jsonl" for part in ("train", "dev"))
    else:
        train, dev = (options.data / f"{domain.file}.{part}.jsonl.xz" for part in ("train", "dev"))
    return FinetuneRecipe(
        checkpoint=str(checkpoint),
        task=domain.task,
        train=str(train),
        dev=str(dev),
        output_dir=str(folder / name),
        seeds=options.seeds,
        max_steps=options.task_steps or domain.steps,
        per_device_train_batch_size=32,
        max_seq_length=min(domain.max_length, options.max_length),
        save_steps=10**6,
        compile=False,
        **finetuning_defaults(read_config(checkpoint)),
    )


def result_row(job: Job, found: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table."""
    score = found["score"]
    task = f"{100 * score['mean']:.1f} ± {100 * score['std']:.1f}"
    if "domain" not in found:
        return (job.architecture, job.domain, job.arm, "", "", "", "", "", task)
    before, after = found["domain"]["before"], found["domain"]["after"]
    return (
        *(job.architecture, job.domain, job.arm, f"{found['new_tokens']:,}"),
        f"{before['bits_per_byte']:.3f}",
        f"{after['bits_per_byte']:.3f} ± {found['domain']['interval'] or 0:.3f}",
        f"{before['tokens_per_word']:.2f} / {after['tokens_per_word']:.2f}",
        f"{found['forgetting']:+.3f}",
        task,
    )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with text/, classification/ and seq2seq/")
    parser.add_argument("--quick", action="store_true", help="one minute of pretraining, 10 MB of English, one seed")
    parser.add_argument("--architectures", default="encoder,decoder")
    parser.add_argument("--domains", default="swahili,e-mails,dialogues")
    parser.add_argument("--minutes", type=float, default=5.0, help="of pretraining")
    parser.add_argument("--pretraining-steps", type=int, default=0, help="instead of minutes")
    parser.add_argument("--general-megabytes", type=float, default=30.0)
    parser.add_argument("--epochs", type=float, default=3.0, help="passes over a domain")
    parser.add_argument("--steps", type=int, default=0, help="of an adaptation, instead of epochs")
    parser.add_argument("--task-steps", type=int, default=0, help="of a fine-tuning; 0: the task's own number")
    parser.add_argument("--seeds", type=int, default=3, help="of a fine-tuning")
    parser.add_argument("--seed", type=int, default=0, help="of pretraining")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--processes", type=int, default=1, help="arms that run in parallel")
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    options = parser.parse_args(arguments)
    if options.quick:
        options.minutes, options.general_megabytes, options.seeds = min(options.minutes, 1.0), 10.0, 1
        options.processes = max(options.processes, 6)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    start = time.monotonic()
    say(f"firth {__version__}; {choose_compute(FinetuneRecipe())}")
    architectures, domains = options.architectures.split(","), options.domains.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "log.txt"
        write_general_text(options.data / GENERAL, folder / "english.txt", options.general_megabytes)
        for domain in domains:
            for part in ("train", "dev") if DOMAINS[domain].task == "pair" else ():
                source = options.data / f"{DOMAINS[domain].file}.{part}.jsonl.xz"
                write_pairs(source, folder / f"{domain}.{part}.jsonl")
        pretraining = [(a, Job(a, "", "", name, options)) for a in architectures]
        for architecture, trained in run_parallel(pretrain_english, pretraining, min(2, options.processes), log):
            say(f"{architecture}: {trained['steps']:,} steps, held-out loss {trained['eval_loss']:.3f}")
        jobs = [Job(a, d, arm, name, options) for a in architectures for d in domains for arm in ARMS]
        found = dict(run_parallel(run_arm, enumerate(jobs), options.processes, log))
    columns = ["model", "domain", "arm", "new tokens", "bits per byte before", "after", "tokens per word", "forgetting"]
    rows = [result_row(job, found[i]) for i, job in enumerate(jobs)]
    show_table("Adapting to domains: bits per byte of held-out text, and a task", [*columns, "task"], rows)
    say(f"{time.monotonic() - start:.0f} seconds")
    if options.output:
        names = [{"model": job.architecture, "domain": job.domain, "arm": job.arm} for job in jobs]
        figures = [{**name, **found[i]} for i, name in enumerate(names)]
        options.output.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
