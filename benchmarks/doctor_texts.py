"""The doctor on texts that nobody prepared for it: short healthy runs, and runs made sick in other ways than its own.

    python benchmarks/doctor_texts.py --data DATA --checkpoint run/final           # all: two hours on busy cores
    python benchmarks/doctor_texts.py --data DATA --checkpoint run/final lr-x100   # some of them

DATA has text/, classification/ and seq2seq/ as named below; the checkpoint is an encoder, for the fine-tunings. Other
texts are documentation of this machine: Vim's help, Perl's, and the source of Python's standard library.

A healthy run must have no warning. A sick one names the rules of which one must speak; what else may, as a consequence,
are `allowed`. No rule and no threshold was made for these runs before they were first run.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import firth
from firth.core.console import quiet
from firth.core.files import write_text
from firth.lab.doctor import diagnose_run
from firth.text import is_held_out

CHARACTERS = 600_000  # of each text
RUN: dict[str, Any] = {"max_seq_length": 64, "per_device_train_batch_size": 8, "max_steps": 200, "vocab_size": 1500}
RUN |= {"eval_steps": 50, "compile": False}
TUNING: dict[str, Any] = {"seeds": 1, "max_steps": 150, "max_seq_length": 64, "learning_rate": 5e-4}
STUCK = ("plateau", "above-unigrams")
VIM, PERL = Path("/usr/share/vim/vim90/doc"), Path("/usr/share/perl/5.36.0/pod/perldiag.pod")


@dataclass
class Texts:
    """Texts and labelled rows of the folder DATA and of this machine, written to `home` when they are asked for."""

    data: Path
    home: Path

    def read(self, name: str, characters: int = CHARACTERS) -> str:
        with lzma.open(self.data / f"{name}.xz", "rt", encoding="utf-8") as file:
            return file.read(characters)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read(f"{name}.jsonl", -1).split("\n") if line]

    def column(self, name: str, column: str, count: int, separator: str = "\n\n") -> str:
        return separator.join(row[column].strip() for row in self.rows(name)[:count])

    def text(self, name: str) -> str:
        if name == "vim":
            files = ("options", "eval", "change", "editing", "motion", "windows")
            return "\n\n".join((VIM / f"{file}.txt").read_text("latin-1")[:150_000] for file in files)
        if name == "perl":
            return PERL.read_text("utf-8", errors="replace")
        if name == "source":
            files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
            return "\n\n".join(file.read_text("utf-8", errors="replace") for file in files)[:700_000]
        if name == "constant":
            return "\n\n".join(" ".join(["The cat sat on the mat."] * (5 + i % 40)) for i in range(400))
        if name == "hexadecimal":
            rng = random.Random(3)
            return "\n\n".join(" ".join(f"{rng.getrandbits(32):08x}" for _ in range(30)) for _ in range(900))
        if name == "html":
            rng, form = (
                random.Random(3),
                '<div class="item"><b class="title">{}</b><a href="?id={}">more</a><i>{}.{}</i></div>',
            )
            lines = [line[:30] for line in self.text("wiki").split("\n") if len(line) > 60][:2500]
            return "\n\n".join(
                form.format(line, rng.randrange(10**6), rng.randrange(1, 29), rng.randrange(1, 13)) for line in lines
            )
        if " with dev of " in name:  # documents that `prepare` holds out come from another text
            parts = [self.text(part).split("\n\n") for part in name.split(" with dev of ")]
            chosen = [d for i, part in enumerate(parts) for d in part if is_held_out(d, 0.05) == bool(i)]
            return "\n\n".join(chosen)
        makers: dict[str, Callable[[], str]] = {
            "wiki": lambda: self.read("text/en_wiki.train.txt"),
            "books": lambda: self.read("text/en_books.train.txt"),
            "swahili": lambda: self.read("text/sw_news.train.txt"),
            "shakespeare": lambda: self.read("text/tinyshakespeare.train.txt"),
            "page": lambda: self.read("text/en_books.train.txt", 30_000).replace("\n", "\n\n"),
            "tweets": lambda: self.column("classification/afrisenti_yor.train", "text", 9000, "\n"),
            "captions": lambda: self.column("seq2seq/multi30k_en_de.train", "target", 9000, "\n"),
            "mails": lambda: self.column("seq2seq/aeslc_email_subject.train", "source", 1200),
            "reviews": lambda: self.column("classification/imdb.train", "text", 450),
            "dialogues": lambda: self.column("seq2seq/dialogsum.train", "source", 500),
        }
        return makers[name]()

    def file(self, name: str) -> str:
        path = self.home / f"{name.replace(' ', '-')}.txt"
        if not path.is_file():
            write_text(path, self.text(name))
        return str(path)

    def labelled(self, name: str) -> str:
        rows: list[dict[str, Any]] = []
        if name.startswith("trec"):
            part = name.split()[0].removeprefix("trec.")
            rows = [{"text": row["text"], "label": row["label"]} for row in self.rows(f"classification/trec.{part}")]
            labels = [row["label"] for row in rows]
            if "shuffled" in name:
                random.Random(0).shuffle(labels)
            if "swahili" in name:
                texts = self.rows("classification/afrisenti_swa.dev")
                rows = [{"text": row["text"]} for row in texts]
            rows = [row | {"label": labels[i % len(labels)]} for i, row in enumerate(rows)]
        else:
            found = self.rows(f"classification/masakhanews_swa.{name.removeprefix('topics.')}")
            rows = [{"text": f"{row['headline']} {row['text'][:150]}", "label": row["label"]} for row in found]
        path = self.home / f"{name.replace(' ', '-')}.jsonl"
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        return str(path)


@dataclass(frozen=True)
class Run:
    """A pretraining of `model` on `text`, or a fine-tuning on `text` and `dev`; `any_of` is empty for a healthy one."""

    model: str
    text: str
    any_of: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    dev: str = ""
    tokenizer: str = ""  # of the English encyclopedia, of this kind
    options: dict[str, Any] = field(default_factory=dict)


ADAMW: dict[str, Any] = {"optim": "adamw"}
RUNS: dict[str, Run] = {
    "constant": Run("gpt2-tiny", "constant", ("duplicated-lines",), ("repeated-data", "overfitting")),
    "hexadecimal": Run("gpt2-tiny", "hexadecimal", (*STUCK, "short-pieces"), options={"max_steps": 400}),
    "html": Run("bert-tiny", "html", ("templated-lines",), STUCK, options={"max_steps": 100}),
    "lr-x100": Run("encoder-2x64", "wiki", ("rate-too-high",), STUCK, options=ADAMW | {"learning_rate": 0.1}),
    "decoder-lr-x100": Run("decoder-2x64", "books", ("rate-too-high",), STUCK, options=ADAMW | {"learning_rate": 0.1}),
    "t5-lr-x100": Run("t5-tiny", "captions", ("rate-too-high",), STUCK, options=ADAMW | {"learning_rate": 0.3}),
    "no-warmup": Run(
        "gpt2-tiny",
        "books",
        ("warmup-too-short", "rate-too-high"),
        (*STUCK, "loss-spikes"),
        options=ADAMW | {"learning_rate": 1e-2, "warmup_steps": 0},
    ),
    "lr-low": Run("bert-tiny", "swahili", ("rate-too-low",), STUCK, options=ADAMW | {"learning_rate": 1e-6}),
    "dev-of-another-language": Run(
        "bert-tiny", "wiki with dev of swahili", ("domain-shift",), (*STUCK, "overfitting"), options={"held_out": 0.05}
    ),
    "dev-of-another-century": Run(
        "bert-tiny", "wiki with dev of shakespeare", ("domain-shift",), STUCK, options={"held_out": 0.05}
    ),
    "english-bytes": Run(
        "gpt2-tiny",
        "swahili",
        ("short-pieces",),
        ("untrained-embeddings",),
        tokenizer="byte-bpe",
        options={"max_steps": 100},
    ),
    "unknown-words": Run(
        "bert-tiny",
        "captions",
        ("unknown-tokens",),
        (*STUCK, "untrained-embeddings"),
        tokenizer="word",
        options={"max_steps": 100},
    ),
    "mask-1": Run(
        "bert-tiny", "wiki", ("few-labels",), STUCK, options={"overrides": {"objective.rate": 0.01}, "max_steps": 100}
    ),
    "mask-95": Run(
        "bert-tiny", "wiki", ("all-labels",), STUCK, options={"overrides": {"objective.rate": 0.95}, "max_steps": 100}
    ),
    "memorized": Run(
        "gpt2-tiny", "page", ("overfitting", "repeated-data"), options={"max_steps": 600, "vocab_size": 500}
    ),
    "shuffled-labels": Run("classify", "trec.train shuffled", ("failed-seeds",), dev="trec.dev"),
    "swahili-dev": Run("classify", "trec.train", ("domain-shift",), ("failed-seeds",), dev="trec.dev swahili"),
    "swahili-topics": Run("classify", "topics.train", ("short-pieces",), dev="topics.dev"),  # an English tokenizer
    "tuning-lr-x100": Run(
        "classify", "trec.train", ("rate-too-high", "failed-seeds"), dev="trec.dev", options={"learning_rate": 0.1}
    ),
    # healthy
    "tiny-batch": Run(
        "gpt2-tiny", "books", options={"per_device_train_batch_size": 1, "max_seq_length": 16, "max_steps": 600}
    ),
    "vim": Run("encoder-2x64", "vim"),
    "source": Run("decoder-2x64", "source"),
    "perl": Run("gpt2-tiny", "perl"),
    "tweets": Run("bert-tiny", "tweets"),
    "captions": Run("t5-tiny", "captions"),
    "mails": Run("electra-tiny", "mails"),
    "reviews": Run("llama-tiny", "reviews"),
    "dialogues": Run("bart-tiny", "dialogues"),
    "shakespeare": Run("gpt2-tiny", "shakespeare"),
    "swahili": Run("modernbert-tiny", "swahili"),
    "questions": Run("classify", "trec.train", dev="trec.dev"),
}


def make_run(run: Run, texts: Texts, checkpoint: str, folder: Path) -> None:
    if run.dev:
        files = {part: texts.labelled(name) for part, name in (("train", run.text), ("dev", run.dev))}
        firth.finetune(checkpoint, run.model, **files, output_dir=folder, **TUNING | run.options)
        return
    options = RUN | run.options
    if run.tokenizer:
        home = texts.home / f"{run.tokenizer}-tokenizer"
        if not home.is_dir():
            firth.tokenizer(texts.file("wiki"), kind=run.tokenizer, vocab_size=RUN["vocab_size"], output_dir=home)
        options |= {"tokenizer": home, "vocab_size": 0}
    if "overrides" in options:
        options |= {"objective": "mlm"}
    firth.pretrain(run.model, data=texts.file(run.text), output_dir=folder, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="default: all")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoint", required=True)
    options = parser.parse_args()
    counts = {"sick": 0, "found": 0, "healthy": 0, "findings": 0, "wrong": 0}
    with tempfile.TemporaryDirectory() as temporary:
        texts = Texts(options.data, Path(temporary))
        for name in options.runs or RUNS:
            run, folder, start = RUNS[name], texts.home / name, time.monotonic()
            with quiet():
                make_run(run, texts, options.checkpoint, folder)
            findings = [finding for finding in diagnose_run(folder).findings if finding.level != "info"]
            rules = {finding.rule for finding in findings}
            wrong = rules - {*run.any_of, *run.allowed}
            is_found = bool(rules & {*run.any_of})
            counts["sick"] += bool(run.any_of)
            counts["healthy"] += not run.any_of
            counts["found"] += is_found
            counts["findings"] += len(rules)
            counts["wrong"] += len(wrong)
            verdict = "  MISSING" * (bool(run.any_of) and not is_found) + f"  WRONG {sorted(wrong)}" * bool(wrong)
            print(f"{name} {time.monotonic() - start:.0f}s{verdict}", flush=True)
            for finding in findings:
                print(f"    {finding.rule} ({finding.numbers})", flush=True)
            shutil.rmtree(folder)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
