"""Compare fine-tuning with the Trainer of `transformers`: speed and score of BERT on SST-2 and SQuAD, in one process.

    python benchmarks/finetune_speed.py --checkpoint BERT --sst2 TRAIN DEV --squad TRAIN DEV [--no-compile] [KEY=VALUE]

Both sides start from the same checkpoint and read the same examples in the same precision, with the same optimizer,
learning rate, schedule and number of steps. The main figure is examples per second from the command to a scored and
saved model: reading, tokenizing, compiling, training, scoring, saving. One-time initialization of torch and CUDA is
done before either side starts. transformers pads each batch to its longest text and runs with and without
torch.compile; ratios are to the faster of the two. The steady speed is that of the training steps: for transformers
without the first tenth, for us including the final scoring.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer, Trainer

from firth import __version__
from firth.core.console import format_count, say, show_table
from firth.metrics import compute_metrics, mean_and_std
from firth.tasks import FinetuneRecipe, finetune
from firth.text import Example, read_labelled
from firth.train import apply_overrides, choose_compute, parse_overrides

OURS, THEIRS = "firth", "transformers"
STRIDE, N_BEST, MAX_ANSWER_TOKENS = 128, 20, 30  # SQuAD settings of both sides


@dataclass(frozen=True)
class BenchmarkTask:
    """One task for both sides, run with `seeds` seeds."""

    checkpoint: str
    task: str
    train: str
    dev: str
    length: int
    batch_size: int
    steps: int
    learning_rate: float
    seeds: int
    compile_ours: bool | None  # None: the default of a run
    compiled: bool
    bf16: bool
    overrides: dict[str, Any]  # fields of our recipe


@dataclass(frozen=True)
class SideResult:
    side: str
    task: str
    examples_per_second: float  # from the command to a scored and saved model
    steady_speed: float  # examples per second of the training steps
    metric: str
    mean: float
    std: float
    seconds: list[float]
    compiled: bool
    shapes: int | None = None  # number of different shapes of our training batches


# --- ours -----------------------------------------------------------------------------------------------------------


def run_ours(bench: BenchmarkTask) -> SideResult:
    """Run `firth finetune` once for all seeds; they share reading and tokenizing."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = FinetuneRecipe(
            checkpoint=bench.checkpoint,
            task=bench.task,
            train=bench.train,
            dev=bench.dev,
            output_dir=str(Path(folder) / "run"),
            seeds=bench.seeds,
            max_steps=bench.steps,
            warmup_steps=bench.steps // 10,
            max_seq_length=bench.length,
            per_device_train_batch_size=bench.batch_size,
            learning_rate=bench.learning_rate,
            compile=bench.compile_ours,
            save_steps=bench.steps,
            logging_steps=max(1, bench.steps // 10),
        )
        start_time = time.perf_counter()
        result = finetune(apply_overrides(recipe, bench.overrides))
        total_seconds = time.perf_counter() - start_time
        seed_results = [
            json.loads((Path(folder) / f"run/seed-{i}/results.json").read_text()) for i in range(bench.seeds)
        ]
    num_examples = bench.steps * bench.batch_size
    return SideResult(
        OURS,
        bench.task,
        bench.seeds * num_examples / total_seconds,
        num_examples / statistics.median(run["seconds"] for run in seed_results),
        result["metric"],
        result["mean"],
        result["std"],
        [run["seconds"] for run in seed_results],
        any(run["compiled"] for run in seed_results),
        max(run["shapes"]["train"] for run in seed_results),
    )


# --- theirs ---------------------------------------------------------------------------------------------------------


class ListDataset(torch.utils.data.Dataset):
    """A list as a dataset of the Trainer."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]


class TrainingClock(transformers.TrainerCallback):
    """Records when a tenth of the steps is done, and the end of training."""

    def __init__(self) -> None:
        self.warm_time = self.end = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == max(1, state.max_steps // 10):
            self.warm_time = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.end = time.perf_counter()


def run_theirs(bench: BenchmarkTask) -> SideResult:
    """Run the Trainer once for each seed."""
    train, dev = (read_labelled(path, bench.task) for path in (bench.train, bench.dev))
    scores, seconds, steady_speeds = [], [], []
    for seed in range(bench.seeds):
        start_time = time.perf_counter()
        tokenizer = AutoTokenizer.from_pretrained(bench.checkpoint)
        model, rows, predict = PREPARE_FNS[bench.task](bench, tokenizer, train, dev)
        clock = TrainingClock()
        trainer = Trainer(
            model=model,
            args=training_arguments(bench, seed),
            train_dataset=ListDataset(rows),
            data_collator=transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
            callbacks=[clock],
        )
        trainer.train()
        scores.append(predict(trainer))
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_model(folder)
            seconds.append(time.perf_counter() - start_time)
        after = bench.steps - max(1, bench.steps // 10)
        steady_speeds.append(after * bench.batch_size / (clock.end - clock.warm_time))
    metric, num_examples = METRICS[bench.task], bench.steps * bench.batch_size
    mean, std = mean_and_std([v[metric] for v in scores])
    speed = bench.seeds * num_examples / sum(seconds)
    return SideResult(
        THEIRS, bench.task, speed, statistics.median(steady_speeds), metric, mean, std, seconds, bench.compiled
    )


def training_arguments(bench: BenchmarkTask, seed: int) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=bench.steps,
        per_device_train_batch_size=bench.batch_size,
        per_device_eval_batch_size=4 * bench.batch_size,
        learning_rate=bench.learning_rate,
        warmup_steps=bench.steps // 10,
        lr_scheduler_type="linear",
        weight_decay=0.01,
        bf16=bench.bf16,
        torch_compile=bench.compiled,
        optim="adamw_torch_fused",
        logging_steps=max(1, bench.steps // 10),
        save_strategy="no",
        report_to=[],
        seed=seed,
        disable_tqdm=True,
        dataloader_num_workers=2 if torch.cuda.is_available() else 0,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
    )


Predict = Callable[[Trainer], dict[str, float]]
PreparedTask = tuple[Any, list[dict[str, Any]], Predict]


def prepare_classification(
    bench: BenchmarkTask, tokenizer: Any, train: list[Example], dev: list[Example]
) -> PreparedTask:
    labels = sorted({e.target for e in train})
    label_ids = {label: i for i, label in enumerate(labels)}

    def encode(examples: list[Example]) -> list[dict[str, Any]]:
        encoding = tokenizer([e.texts[0] for e in examples], truncation=True, max_length=bench.length)
        return [
            {"input_ids": ids, "attention_mask": mask, "labels": label_ids[e.target]}
            for ids, mask, e in zip(encoding["input_ids"], encoding["attention_mask"], examples, strict=True)
        ]

    def predict(trainer: Trainer) -> dict[str, float]:
        logits = trainer.predict(ListDataset(encode(dev))).predictions
        return compute_metrics(bench.task, [labels[i] for i in logits.argmax(-1)], [e.target for e in dev])

    model = AutoModelForSequenceClassification.from_pretrained(bench.checkpoint, num_labels=len(labels))
    return model, encode(train), predict


def prepare_span_qa(bench: BenchmarkTask, tokenizer: Any, train: list[Example], dev: list[Example]) -> PreparedTask:
    """Prepare SQuAD as run_qa.py does: overlapping windows; labels are the answer's tokens, or [CLS] without answer."""

    def encode_windows(examples: list[Example]) -> Any:
        return tokenizer(
            [e.texts[0] for e in examples],
            [e.texts[1] for e in examples],
            truncation="only_second",
            max_length=bench.length,
            stride=min(STRIDE, bench.length // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )

    def encode(examples: list[Example]) -> list[dict[str, Any]]:
        encoding, rows = encode_windows(examples), []
        for i, example_index in enumerate(encoding["overflow_to_sample_mapping"]):
            start = end = 0
            e, sides, offsets = examples[example_index], encoding.sequence_ids(i), encoding["offset_mapping"][i]
            if e.target:
                a, b = e.target[0].start, e.target[0].start + len(e.target[0].text)
                context_tokens = [j for j, side in enumerate(sides) if side == 1]
                if offsets[context_tokens[0]][0] <= a and offsets[context_tokens[-1]][1] >= b:
                    start = max(j for j in context_tokens if offsets[j][0] <= a)
                    end = min(j for j in context_tokens if offsets[j][1] >= b)
            names = ("input_ids", "attention_mask", "token_type_ids")
            row = {name: encoding[name][i] for name in names if name in encoding}
            rows.append(row | {"start_positions": start, "end_positions": end})
        return rows

    def predict(trainer: Trainer) -> dict[str, float]:
        encoding = encode_windows(dev)
        start_NT, end_NT = trainer.predict(ListDataset(encode(dev))).predictions[:2]
        best: list[tuple[float, str]] = [(-np.inf, "") for _ in dev]
        no_answer_scores = [np.inf for _ in dev]
        for i, example_index in enumerate(encoding["overflow_to_sample_mapping"]):
            sides, offsets, context = (
                encoding.sequence_ids(i),
                encoding["offset_mapping"][i],
                dev[example_index].texts[1],
            )
            no_answer_scores[example_index] = min(no_answer_scores[example_index], float(start_NT[i, 0] + end_NT[i, 0]))
            for a in np.argsort(-start_NT[i])[:N_BEST]:
                for b in np.argsort(-end_NT[i])[:N_BEST]:
                    is_in_context = a < len(sides) and b < len(sides) and sides[a] == sides[b] == 1
                    if not is_in_context or not a <= b < a + MAX_ANSWER_TOKENS:
                        continue
                    value = float(start_NT[i, a] + end_NT[i, b])
                    if value > best[example_index][0]:
                        best[example_index] = value, context[offsets[a][0] : offsets[b][1]]
        answerable = all(e.target for e in dev)
        texts = [t if answerable or v > n else "" for (v, t), n in zip(best, no_answer_scores, strict=True)]
        return compute_metrics(bench.task, texts, [e.target for e in dev])

    return AutoModelForQuestionAnswering.from_pretrained(bench.checkpoint), encode(train), predict


PREPARE_FNS: dict[str, Callable[..., PreparedTask]] = {"classify": prepare_classification, "span-qa": prepare_span_qa}
METRICS = {"classify": "accuracy", "span-qa": "f1"}


# --- both -----------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="a BERT checkpoint that both sides start from")
    parser.add_argument("--sst2", nargs=2, metavar=("TRAIN", "DEV"), help="files of SST-2 (none: skip it)")
    parser.add_argument("--squad", nargs=2, metavar=("TRAIN", "DEV"), help="files of SQuAD (none: skip it)")
    parser.add_argument("--steps", type=int, default=500, help="training steps (500)")
    parser.add_argument("--batch-size", type=int, default=64, help="examples per step; SQuAD gets half (64)")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="peak learning rate (5e-5)")
    parser.add_argument("--seeds", type=int, default=3, help="runs with different seeds (3)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile on both sides or on none (GPU: transformers runs both ways, ours compiles long runs)",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe fields of our side")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_intermixed_args(argv)
    overrides = parse_overrides(args.overrides)
    compute = choose_compute(FinetuneRecipe())
    gpu = compute.device.type == "cuda"
    compile_modes = [args.compile] if args.compile is not None else [True, False] if gpu else [False]
    say(f"firth {__version__}, transformers {transformers.__version__}, torch {torch.__version__}; {compute}")
    warm_up(compute.device)
    sides: dict[str, list[SideResult]] = {}
    for task, files, length in (("classify", args.sst2, 128), ("span-qa", args.squad, 384)):
        if not files:
            continue
        batch_size = args.batch_size if task == "classify" else max(1, args.batch_size // 2)
        bench = BenchmarkTask(
            checkpoint=args.checkpoint,
            task=task,
            train=files[0],
            dev=files[1],
            length=length,
            batch_size=batch_size,
            steps=args.steps,
            learning_rate=args.learning_rate,
            seeds=args.seeds,
            compile_ours=args.compile,
            compiled=compile_modes[0],
            bf16=gpu,
            overrides=overrides,
        )
        sides[task] = []
        for run in (
            partial(run_ours, bench),
            *(partial(run_theirs, replace(bench, compiled=mode)) for mode in compile_modes),
        ):
            sides[task].append(run())
            say(f"{task}: " + ", ".join(describe(sides[task][-1])))
    rows = []
    for results in sides.values():
        best = max(side.examples_per_second for side in results if side.side == THEIRS)
        rows += [(side.task, *describe(side), f"{side.examples_per_second / best:.2f}") for side in results]
    title = f"Fine-tuning, {format_count(args.seeds, 'seed')} of {format_count(args.steps, 'step')}"
    show_table(title, ("task", "side", "examples/s", "steady", "score", "ratio"), rows)
    if args.json:
        facts = [asdict(side) for results in sides.values() for side in results]
        print(json.dumps({"sides": facts, "machine": str(compute)}))


def warm_up(device: torch.device) -> None:
    """Initialize CUDA and torch's lazy imports, which the first side would pay for otherwise."""
    layer = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    with torch.autocast(device.type, torch.bfloat16):
        out = layer(torch.ones(64, 64, device=device))
        torch.nn.functional.scaled_dot_product_attention(*[out.view(1, 1, 64, 64)] * 3).sum().backward()
    optimizer.step()


def describe(side: SideResult) -> tuple[str, ...]:
    """Return name, examples/s in total, examples/s of the steps, and the score."""
    return (
        f"{side.side}{', compiled' * side.compiled}",
        f"{side.examples_per_second:,.0f}",
        f"{side.steady_speed:,.0f}",
        f"{side.metric} {100 * side.mean:.1f} ± {100 * side.std:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
