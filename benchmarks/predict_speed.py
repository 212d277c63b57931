"""Measure `firth.Predictor` beside the pipelines of transformers: examples per second, same weights, texts and machine.

A BERT with a random head classifies sentences and tags words. The pipeline runs at each batch size of --batch-sizes, on
a GPU also in bfloat16, which is what Firth computes in there; ratios are to its fastest setting. Loading is not timed,
nor are the first runs, in which Firth captures its CUDA graphs. The sides alternate, and the ratio is the median over
the repeats. The share of equal answers is reported. On a GPU, Firth also runs without CUDA graphs, and one batch at a
time (`eager`), which shows what each part is worth.

    python benchmarks/predict_speed.py [--classify SST2] [--tag CONLL] [--model bert-base] [--limit 1000]

Without files it takes sentences of the documentation of the Python packages on this machine, with labels by their
length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import pipeline

from firth import Predictor, __version__
from firth.core.console import say, show_table
from firth.models import get_preset, make_model
from firth.tasks import make_task
from firth.tasks.head_task import HeadTask
from firth.tasks.logits_runner import AheadRunner, LogitsRunner
from firth.text import Corpus, Example, read_labelled
from firth.tokens import train_tokenizer

WARM_UP_RUNS = 2  # the second batch of a shape is captured as a CUDA graph
MAX_SENTENCE_CHARS = 400
LENGTH_CLASSES = ("short", "medium", "long")
PIPELINES = {"classify": "text-classification", "tag": "token-classification"}


class Result(NamedTuple):
    task: str
    side: str
    examples_per_second: float
    ratio: float  # Firth's speed relative to this side


def make_checkpoint(task: str, texts: Sequence[str], labels: Sequence[str], model_name: str, folder: Path) -> Path:
    """Save a model with random weights and a head for these labels, as fine-tuning would."""
    tokenizer = train_tokenizer(texts, "wordpiece", 8192)
    config = replace(get_preset(model_name), vocab_size=tokenizer.vocab.size)
    made = make_task(task, {"labels": list(labels)}, tokenizer, config)
    torch.manual_seed(0)
    model = make_model(made.configure_model(config))
    with torch.no_grad():  # a random head is almost undecided: widen its choices
        for p in model.head.parameters():
            p.mul_(20)
    model.tokenizer = made.tokenizer
    model.save(folder)
    return folder


def read_sentences(task: str, limit: int) -> list[Example]:
    """Return sentences of the built-in corpus as examples; their classes and tags depend on their length."""
    parts = (" ".join(part.split()) for text in Corpus(["pydocs"]).texts() for part in text.split(". "))
    sentences = (part for part in parts if part[:1].isalpha() and len(part) < MAX_SENTENCE_CHARS)
    examples = []
    for i, sentence in enumerate(islice(sentences, limit)):
        kind, words = LENGTH_CLASSES[min(2, len(sentence) // 80)], tuple(sentence.split())
        tags = tuple("B-X" if word[0].isupper() else "O" for word in words)
        examples.append(Example(i, words, tags) if task == "tag" else Example(i, (sentence,), kind))
    return examples


def seconds(function: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def make_pipeline(task: str, folder: Path, device: str, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {"top_k": None} if task == "classify" else {"aggregation_strategy": "first"}
    return pipeline(PIPELINES[task], model=str(folder), device=device, dtype=dtype, **options)


def agreement(task: str, ours: Sequence[Any], others: Sequence[Any]) -> float:
    """Return the share of texts with the same label or the same spans."""
    if task == "classify":
        same = [r["label"] == max(s, key=lambda x: x["score"])["label"] for r, s in zip(ours, others, strict=True)]
    else:
        same = [
            [(s["type"], s["start"], s["end"]) for s in r["spans"]]
            == [(g["entity_group"], g["start"], g["end"]) for g in groups if g["entity_group"] != "O"]
            for r, groups in zip(ours, others, strict=True)
        ]
    return sum(same) / len(same)


def measure(task: str, texts: Sequence[str], folder: Path, batch_sizes: Sequence[int], repeats: int) -> list[Result]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    predictor = Predictor(folder)
    dtypes = [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]
    sides: dict[str, Callable[[], Any]] = {"firth": lambda: predictor.predict(texts)}
    if device == "cuda":
        without_graphs, eager = Predictor(folder), Predictor(folder)
        for own, runner in (
            (without_graphs, AheadRunner(without_graphs.model, without_graphs.compute, use_graphs=False)),
            (eager, LogitsRunner(eager.model, eager.compute)),
        ):
            assert isinstance(own.task, HeadTask)
            own.task.logits_runner = runner
        sides["firth, no graphs"] = lambda: without_graphs.predict(texts)
        sides["firth, eager"] = lambda: eager.predict(texts)
    for dtype in dtypes:
        other = make_pipeline(task, folder, device, dtype)
        for size in batch_sizes:
            name = f"transformers, batch {size}{', bf16' if dtype == torch.bfloat16 else ''}"
            sides[name] = lambda other=other, size=size: other(list(texts), batch_size=size)  # type: ignore[misc]
    reference = next(name for name in sides if not name.startswith("firth"))
    share = agreement(task, sides["firth"](), sides[reference]())
    say(f"{task}: {100 * share:.1f}% of the {len(texts)} answers are equal to those of {reference}")
    for _ in range(WARM_UP_RUNS if device == "cuda" else 0):
        for run in sides.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            times[name].append(seconds(run, device))
    return [
        Result(
            task,
            name,
            len(texts) / statistics.median(own),
            statistics.median(t / ours for t, ours in zip(own, times["firth"], strict=True)),
        )
        for name, own in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classify", help="labelled file for classify: text, label (documentation of packages)")
    parser.add_argument("--tag", help="labelled file for tag: tokens, tags (documentation of packages)")
    parser.add_argument("--model", default="bert-base", help="preset of the model (bert-base)")
    parser.add_argument("--limit", type=int, default=1000, help="read at most N texts of each task (1000)")
    parser.add_argument("--batch-sizes", default="1,8,32,128", help="batch sizes of the pipeline (1,8,32,128)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    say(f"firth {__version__}, transformers {transformers.__version__}, torch {torch.__version__}, {machine}")
    results: list[Result] = []
    for task, file in (("classify", options.classify), ("tag", options.tag)):
        examples = (read_labelled(file, task) if file else read_sentences(task, options.limit))[: options.limit]
        texts = [" ".join(example.texts) for example in examples]
        # words of letters only: both sides split such texts alike
        texts = [" ".join(word for word in text.split() if word.isalpha()) or "empty" for text in texts]
        labels = sorted({tag for e in examples for tag in (e.target if task == "tag" else [e.target])})
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = make_checkpoint(task, texts, labels, options.model, Path(folder) / "final")
            results += measure(task, texts, checkpoint, sizes, options.repeats)
    if options.json:
        print(json.dumps([result._asdict() for result in results]))
        return
    rows = [(r.task, r.side, f"{r.examples_per_second:,.0f}", f"{r.ratio:.2f}") for r in results]
    show_table(f"{options.model}, {options.limit} texts", ("task", "side", "examples/s", "firth's ratio to it"), rows)


if __name__ == "__main__":
    sys.exit(main())
