"""Fine-tuning speed and score beside the Trainer of transformers: BERT on SST-2 and on SQuAD, same weights, one run.

Both sides begin with the same checkpoint, read the same examples in the same precision, with the same optimizer, rate,
schedule and number of steps. The rate that counts is from the command to a model that is scored and saved: reading,
tokenising, compiling, training, scoring, saving. What torch and the GPU's libraries do once in a process is done before
either side begins. transformers pads each batch to its longest text, and runs compiled
and not; ratios are to the faster of the two. The steady rate is that of the steps, without the first tenth of them on
its side, with the scoring at the end on ours.

    python benchmarks/finetune_speed.py --checkpoint BERT --sst2 TRAIN DEV --squad TRAIN DEV [--no-compile] [KEY=VALUE]
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
STRIDE, N_BEST, LONGEST_ANSWER = 128, 20, 30  # of SQuAD, on both sides


@dataclass(frozen=True)
class Work:
    """What both sides do, `seeds` times."""

    checkpoint: str
    task: str
    train: str
    dev: str
    length: int
    batch: int
    steps: int
    rate: float
    seeds: int
    ours_compiled: bool | None  # None: as a run decides by itself
    compiled: bool
    bf16: bool
    overrides: dict[str, Any]  # of our recipe


@dataclass(frozen=True)
class Side:
    side: str
    task: str
    examples_per_second: float  # from the command to a model that is scored and saved
    steady: float  # of the steps
    metric: str
    mean: float
    std: float
    seconds: list[float]
    compiled: bool
    shapes: int | None = None  # that our batches had in training


# --- ours -----------------------------------------------------------------------------------------------------------


def ours(work: Work) -> Side:
    """The recipe, once for all seeds; what is shared by them is paid for once."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = FinetuneRecipe(
            checkpoint=work.checkpoint,
            task=work.task,
            train=work.train,
            dev=work.dev,
            output_dir=str(Path(folder) / "run"),
            seeds=work.seeds,
            max_steps=work.steps,
            warmup_steps=work.steps // 10,
            max_seq_length=work.length,
            per_device_train_batch_size=work.batch,
            learning_rate=work.rate,
            compile=work.ours_compiled,
            save_steps=work.steps,
            logging_steps=max(1, work.steps // 10),
        )
        began = time.perf_counter()
        found = finetune(apply_overrides(recipe, work.overrides))
        whole = time.perf_counter() - began
        runs = [json.loads((Path(folder) / f"run/seed-{i}/results.json").read_text()) for i in range(work.seeds)]
    trained = work.steps * work.batch
    return Side(
        OURS,
        work.task,
        work.seeds * trained / whole,
        trained / statistics.median(run["seconds"] for run in runs),
        found["metric"],
        found["mean"],
        found["std"],
        [run["seconds"] for run in runs],
        any(run["compiled"] for run in runs),
        max(run["shapes"]["train"] for run in runs),
    )


# --- theirs ---------------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    """What the Trainer reads."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]


class Clock(transformers.TrainerCallback):
    """When training was a tenth done, and when it ended."""

    def __init__(self) -> None:
        self.tenth = self.end = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == max(1, state.max_steps // 10):
            self.tenth = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.end = time.perf_counter()


def theirs(work: Work) -> Side:
    """The Trainer, for each seed anew."""
    train, dev = (read_labelled(path, work.task) for path in (work.train, work.dev))
    values, seconds, steady = [], [], []
    for seed in range(work.seeds):
        began = time.perf_counter()
        tokenizer = AutoTokenizer.from_pretrained(work.checkpoint)
        model, rows, predict = THEIR_TASKS[work.task](work, tokenizer, train, dev)
        clock = Clock()
        trainer = Trainer(
            model=model,
            args=arguments(work, seed),
            train_dataset=Rows(rows),
            data_collator=transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
            callbacks=[clock],
        )
        trainer.train()
        values.append(predict(trainer))
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_model(folder)
            seconds.append(time.perf_counter() - began)
        after = work.steps - max(1, work.steps // 10)
        steady.append(after * work.batch / (clock.end - clock.tenth))
    metric, trained = METRICS[work.task], work.steps * work.batch
    mean, std = mean_and_std([v[metric] for v in values])
    speed = work.seeds * trained / sum(seconds)
    return Side(THEIRS, work.task, speed, statistics.median(steady), metric, mean, std, seconds, work.compiled)


def arguments(work: Work, seed: int) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=work.steps,
        per_device_train_batch_size=work.batch,
        per_device_eval_batch_size=4 * work.batch,
        learning_rate=work.rate,
        warmup_steps=work.steps // 10,
        lr_scheduler_type="linear",
        weight_decay=0.01,
        bf16=work.bf16,
        torch_compile=work.compiled,
        optim="adamw_torch_fused",
        logging_steps=max(1, work.steps // 10),
        save_strategy="no",
        report_to=[],
        seed=seed,
        disable_tqdm=True,
        dataloader_num_workers=2 if torch.cuda.is_available() else 0,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
    )


Predict = Callable[[Trainer], dict[str, float]]
Prepared = tuple[Any, list[dict[str, Any]], Predict]


def their_classes(work: Work, tokenizer: Any, train: list[Example], dev: list[Example]) -> Prepared:
    labels = sorted({e.target for e in train})
    number = {label: i for i, label in enumerate(labels)}

    def encode(examples: list[Example]) -> list[dict[str, Any]]:
        found = tokenizer([e.texts[0] for e in examples], truncation=True, max_length=work.length)
        return [
            {"input_ids": ids, "attention_mask": mask, "labels": number[e.target]}
            for ids, mask, e in zip(found["input_ids"], found["attention_mask"], examples, strict=True)
        ]

    def predict(trainer: Trainer) -> dict[str, float]:
        logits = trainer.predict(Rows(encode(dev))).predictions
        return compute_metrics(work.task, [labels[i] for i in logits.argmax(-1)], [e.target for e in dev])

    model = AutoModelForSequenceClassification.from_pretrained(work.checkpoint, num_labels=len(labels))
    return model, encode(train), predict


def their_spans(work: Work, tokenizer: Any, train: list[Example], dev: list[Example]) -> Prepared:
    """As its example script does it: windows over the context, the answer's tokens or [CLS]."""

    def windows(examples: list[Example]) -> Any:
        return tokenizer(
            [e.texts[0] for e in examples],
            [e.texts[1] for e in examples],
            truncation="only_second",
            max_length=work.length,
            stride=min(STRIDE, work.length // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )

    def encode(examples: list[Example]) -> list[dict[str, Any]]:
        found, rows = windows(examples), []
        for i, which in enumerate(found["overflow_to_sample_mapping"]):
            start = end = 0
            e, sides, offsets = examples[which], found.sequence_ids(i), found["offset_mapping"][i]
            if e.target:
                a, b = e.target[0].start, e.target[0].start + len(e.target[0].text)
                inside = [j for j, side in enumerate(sides) if side == 1]
                if offsets[inside[0]][0] <= a and offsets[inside[-1]][1] >= b:
                    start = max(j for j in inside if offsets[j][0] <= a)
                    end = min(j for j in inside if offsets[j][1] >= b)
            names = ("input_ids", "attention_mask", "token_type_ids")
            row = {name: found[name][i] for name in names if name in found}
            rows.append(row | {"start_positions": start, "end_positions": end})
        return rows

    def predict(trainer: Trainer) -> dict[str, float]:
        found = windows(dev)
        start_NT, end_NT = trainer.predict(Rows(encode(dev))).predictions[:2]
        best: list[tuple[float, str]] = [(-np.inf, "") for _ in dev]
        nothing = [np.inf for _ in dev]
        for i, which in enumerate(found["overflow_to_sample_mapping"]):
            sides, offsets, context = found.sequence_ids(i), found["offset_mapping"][i], dev[which].texts[1]
            nothing[which] = min(nothing[which], float(start_NT[i, 0] + end_NT[i, 0]))
            for a in np.argsort(-start_NT[i])[:N_BEST]:
                for b in np.argsort(-end_NT[i])[:N_BEST]:
                    fits = a < len(sides) and b < len(sides) and sides[a] == sides[b] == 1
                    if not fits or not a <= b < a + LONGEST_ANSWER:
                        continue
                    value = float(start_NT[i, a] + end_NT[i, b])
                    if value > best[which][0]:
                        best[which] = value, context[offsets[a][0] : offsets[b][1]]
        answerable = all(e.target for e in dev)
        texts = [t if answerable or v > n else "" for (v, t), n in zip(best, nothing, strict=True)]
        return compute_metrics(work.task, texts, [e.target for e in dev])

    return AutoModelForQuestionAnswering.from_pretrained(work.checkpoint), encode(train), predict


THEIR_TASKS: dict[str, Callable[..., Prepared]] = {"classify": their_classes, "span-qa": their_spans}
METRICS = {"classify": "accuracy", "span-qa": "f1"}


# --- both -----------------------------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", required=True, help="a BERT that both sides start from")
    parser.add_argument("--sst2", nargs=2, metavar=("TRAIN", "DEV"))
    parser.add_argument("--squad", nargs=2, metavar=("TRAIN", "DEV"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile on both sides, or on none; unless said transformers runs both ways on a GPU, and ours "
        "compiles where the steps pay for it",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="fields of our recipe")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_intermixed_args(words)
    overrides = parse_overrides(options.overrides)
    machine = choose_compute(FinetuneRecipe())
    gpu = machine.device.type == "cuda"
    ways = [options.compile] if options.compile is not None else [True, False] if gpu else [False]
    say(f"firth {__version__}, transformers {transformers.__version__}, torch {torch.__version__}; {machine}")
    warm_up(machine.device)
    sides: dict[str, list[Side]] = {}
    for task, files, length in (("classify", options.sst2, 128), ("span-qa", options.squad, 384)):
        if not files:
            continue
        batch = options.batch if task == "classify" else max(1, options.batch // 2)
        settings = (length, batch, options.steps, options.rate, options.seeds, options.compile, ways[0], gpu, overrides)
        work = Work(options.checkpoint, task, *files, *settings)
        sides[task] = []
        for run in (partial(ours, work), *(partial(theirs, replace(work, compiled=way)) for way in ways)):
            sides[task].append(run())
            say(f"{task}: " + ", ".join(told(sides[task][-1])))
    rows = []
    for found in sides.values():
        best = max(side.examples_per_second for side in found if side.side == THEIRS)
        rows += [(side.task, *told(side), f"{side.examples_per_second / best:.2f}") for side in found]
    title = f"Fine-tuning, {format_count(options.seeds, 'seed')} of {format_count(options.steps, 'step')}"
    show_table(title, ("task", "side", "examples/s", "steady", "score", "ratio"), rows)
    if options.json:
        facts = [asdict(side) for found in sides.values() for side in found]
        print(json.dumps({"sides": facts, "machine": str(machine)}))


def warm_up(device: torch.device) -> None:
    """What the first side would pay for both: CUDA's context and libraries, and what torch imports late."""
    layer = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    with torch.autocast(device.type, torch.bfloat16):
        out = layer(torch.ones(64, 64, device=device))
        torch.nn.functional.scaled_dot_product_attention(*[out.view(1, 1, 64, 64)] * 3).sum().backward()
    optimizer.step()


def told(side: Side) -> tuple[str, ...]:
    """A side in words: who, examples/s in all and of the steps, and the score."""
    return (
        f"{side.side}{', compiled' * side.compiled}",
        f"{side.examples_per_second:,.0f}",
        f"{side.steady:,.0f}",
        f"{side.metric} {100 * side.mean:.1f} ± {100 * side.std:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
