"""Whole inputs that the groups damage: texts, tables, shards, runs and fine-tuned checkpoints, all tiny."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import sys
from functools import cached_property
from pathlib import Path

from conftest import ANIMALS, document
from faults.fuzz.harness import fork, run_command, run_silently, wait

NUM_DOCUMENTS = 60
SIZES = ["model.num_layers=1", "model.dim=16", "model.mlp.dim=32", "--no-compile", "--no-bf16", "--max-seq-length=32"]
STEPS = ["--max-steps=4", "--save-steps=2", "--eval-steps=4", "--per-device-train-batch-size=2"]
TUNED = ["--seeds=1", "--max-steps=2", "--max-seq-length=32", "--save-steps=1", "--no-bf16"]
ROWS: dict[str, list[dict[str, object]]] = {
    "classify": [{"text": "the cat slept", "label": "cat"}, {"text": "a dog, at noon", "label": "dog"}],
    "pair": [{"text_a": "a cat", "text_b": "a dog", "label": "no"}, {"text_a": "ox", "text_b": "ox", "label": "yes"}],
    "regress": [{"text_a": "a cat", "text_b": "a dog", "label": 1.5}, {"text_a": "ox", "text_b": "ox", "label": 5}],
    "tag": [{"tokens": ["Anna", "saw", "it"], "tags": ["B-PER", "O", "O"]}, {"tokens": ["No"], "tags": ["O"]}],
    "choice": [{"context": "It rained.", "choices": ["We ran.", "It"], "gold": 0}] * 2,
    "span-qa": [{"question": "Who?", "context": "Anna saw it.", "answers": ["Anna"], "starts": [0]}] * 2,
    "text-to-text": [{"source": "a cat", "target": "ein Kater"}, {"source": "a dog", "target": "ein Hund"}],
    "word-in-context": [
        {"text_a": "a bat flew", "text_b": "a bat", "start1": 2, "end1": 5, "start2": 2, "end2": 5, "label": True}
    ]
    * 2,
    "lm": [
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Anna"}]},
        {"prompt": "Where?", "response": "At the river."},
    ],
}
ANSWER_ROWS: dict[str, list[dict[str, object]]] = {  # of preference tuning: pairs, and single answers
    "preference": [
        {"prompt": "Who?", "chosen": "Anna", "rejected": "It rained."},
        {"prompt": "Where?", "chosen": "At the river.", "rejected": "Anna saw it."},
    ],
    "kto": [
        {"prompt": "Who?", "completion": "Anna", "label": True},
        {"prompt": "Where?", "completion": "It rained.", "label": False},
    ],
}
CONLL = "-DOCSTART- -X- O O\n\nAnna NNP B-NP B-PER\nsaw VBD B-VP O\nit PRP B-NP O\n\nNobody NN B-NP O\nknew VBD O O\n"
CONTEXT = "Anna saw the cat near the river."
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Cats",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {"id": "1", "question": "Who saw it?", "answers": [{"text": "Anna", "answer_start": 0}]},
                        {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}


class Fixtures:
    """Folders and files, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, folder: Path, *arguments: object) -> Path:
        """Run a command that writes a folder, unless it is there."""
        if not folder.exists():
            code = run_command([str(a) for a in (*arguments, "--output-dir", folder)])
            assert code == 0, arguments
        return folder

    def write_documents(self, name: str, num_documents: int) -> Path:
        rng, path = random.Random(0), self.folder / name
        path.write_text("\n\n".join(document(rng) for _ in range(num_documents)) + "\n")
        return path

    @cached_property
    def text(self) -> Path:
        return self.write_documents("animals.txt", NUM_DOCUMENTS)

    @cached_property
    def long_text(self) -> Path:
        """A text that takes long enough to be killed while it is prepared."""
        return self.write_documents("long.txt", 2000)

    @cached_property
    def shards(self) -> Path:
        tokenizer = self.run(self.folder / "tokenizer", "tokenizer", self.text, "--vocab-size=200")
        return self.run(self.folder / "shards", "prepare", self.text, "--tokenizer", tokenizer, "--workers=1")

    def pretrained(self, model: str, *arguments: object) -> Path:
        """A run of four steps, with checkpoints after two and four."""
        return self.run(self.folder / model, "pretrain", model, *SIZES, *STEPS, *arguments)

    @cached_property
    def bert(self) -> Path:
        return self.pretrained("bert-tiny", "--data", self.shards)

    @cached_property
    def gpt2(self) -> Path:
        return self.pretrained("gpt2-tiny", "--data", self.text, "--vocab-size=300")

    def rows(self, task: str) -> Path:
        """A labelled .jsonl file."""
        path = self.folder / f"{task}.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps(row) + "\n" for row in (ROWS | ANSWER_ROWS)[task] * 2))
        return path

    @cached_property
    def many_rows(self) -> Path:
        """Labelled examples that are enough for a search."""
        rng, path = random.Random(0), self.folder / "many.jsonl"
        lines = [
            {"text": f"a {rng.choice(ANIMALS)} {i} slept", "label": rng.choice(["cat", "dog"])} for i in range(400)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def tuned(self, task: str, checkpoint: Path) -> Path:
        rows = self.rows(task)
        files = ["--task", task, "--train", rows, "--dev", rows]
        return self.run(self.folder / f"tuned-{task}", "finetune", checkpoint / "final", *files, *TUNED)

    @cached_property
    def classify(self) -> Path:
        return self.tuned("classify", self.bert)

    @cached_property
    def chat(self) -> Path:
        return self.tuned("lm", self.gpt2)

    def make_all(self) -> None:
        for name in ("text", "long_text", "many_rows", "shards", "bert", "gpt2", "classify", "chat"):
            getattr(self, name)
        for task in ROWS:
            self.rows(task)

    def build(self) -> None:
        """Make all in a forked process, then import the modules that it needed.

        Libraries start threads when they train and encode. A process that is forked later would wait for them forever.
        """
        names = self.folder / "modules.json"

        def make() -> None:
            self.make_all()
            names.write_text(json.dumps([*sys.modules, "pyarrow.parquet", "trafilatura", "pypdf"]))

        assert wait(fork(run_silently, make)) == 0
        for name in json.loads(names.read_text()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        self.make_all()


def table(rows: list[dict[str, object]], separator: str) -> str:
    """Rows as .csv or .tsv."""
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    quoted = [[f'"{cell}"' if separator in cell else cell for cell in line] for line in cells]
    return "\n".join(separator.join(line) for line in quoted) + "\n"


__all__ = ["ANIMALS", "CONLL", "ROWS", "SQUAD", "Fixtures", "table"]
