"""Compare how fast Firth and `transformers` lower the held-out loss: same text, tokenizer, machine and time limit.

    firth tokenizer TEXT... --kind wordpiece --vocab-size 16384 --lowercase --output-dir tok
    firth prepare TEXT... --tokenizer tok --output-dir shards
    python benchmarks/time_to_loss.py --shards shards --seconds 165 [--train SST-2/train.tsv --dev SST-2/dev.tsv]

Our side is the default recipe of an encoder; KEY=VALUE after the options changes it. The peer is the Trainer of
`transformers` with a BERT of the same tokenizer and its published settings: learning rate 1e-4, linear decay after 10%
warm-up, texts concatenated and cut into full rows, 15% masked. Both run as many steps as fit into the time: steps are
timed before, so that each schedule ends in time. Only training time counts, not compilation and evaluation.

Both are evaluated on the same masked held-out rows, one document per row. With --train and --dev both are fine-tuned
afterwards: ours by `firth finetune`, the peer by its Trainer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from firth import __version__
from firth.core.console import say, show_table
from firth.models import Model, get_preset, warm_start_embeddings
from firth.objectives import IGNORE_INDEX, MLM, Batch, CounterRNG
from firth.recipes import pretraining_recipe, update_recipe
from firth.tasks import FinetuneRecipe, finetune
from firth.text import read_labelled
from firth.tokens import PackedDataset, ShardSet, open_shards
from firth.train import ComputeConfig, Recipe, TrainingRun, choose_compute, fit, parse_overrides, read_log
from firth.train.dataloader import make_pretrain_batch_fn, make_ramp_datasets, make_row_dataset, single_stage_recipe
from firth.train.pretrain import build_pretrain_model, write_final_model
from firth.train.ramp import stage_shares
from firth.train.schedule import resolve_schedule, time_steps

OURS, THEIRS = "firth", "transformers"
NUM_EVALUATIONS = 20  # evaluations per run; five times as dense in the first tenth


@dataclass
class TrainingCurve:
    """Held-out losses of one side by seconds of training; and the accuracy after fine-tuning."""

    side: str
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracy: float | None = None

    def seconds_to_loss(self, loss: float) -> float | None:
        """Seconds until the held-out loss first was at most this, interpolated between two evaluations."""
        previous: tuple[float, float] | None = None
        for seconds, held_out in zip(self.seconds, self.losses, strict=True):
            if held_out <= loss:
                if previous is None:
                    return seconds
                share = (previous[1] - loss) / max(previous[1] - held_out, 1e-12)
                return previous[0] + share * (seconds - previous[0])
            previous = seconds, held_out
        return None


class TrainingClock:
    """Counts the seconds of training: starts after the first step, which compiles, and pauses during evaluation.

    `before` are seconds of training before the first step (embeddings from counts).
    """

    def __init__(self, curve: TrainingCurve, steps: int, evaluate: Callable[[], float], before: float = 0.0) -> None:
        self.curve, self.steps, self.evaluate, self.before = curve, steps, evaluate, before
        self.elapsed, self.resumed_at = 0.0, 0.0

    def evaluation_interval(self, done: int) -> int:
        points = 5 * NUM_EVALUATIONS if 10 * done <= self.steps else NUM_EVALUATIONS
        return max(1, self.steps // points)

    def step(self, done: int) -> None:
        """Call this after each step; evaluates now and then."""
        if done == 1:
            self.resume_clock()
        if done > 1 and (done % self.evaluation_interval(done) == 0 or done == self.steps):
            self.pause_clock()
            elapsed = self.elapsed * done / (done - 1)  # the first step is counted like the others
            self.curve.seconds.append(self.before + elapsed)
            self.curve.losses.append(self.evaluate())
            now = f"step {done:,}, {self.curve.seconds[-1]:.1f} s, held-out loss {self.curve.losses[-1]:.3f}"
            say(f"{self.curve.side}: {now}")
            self.resume_clock()
        self.curve.steps = done

    def resume_clock(self) -> None:
        synchronize()
        self.resumed_at = time.perf_counter()

    def pause_clock(self) -> None:
        synchronize()
        self.elapsed += time.perf_counter() - self.resumed_at


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Evaluation


def make_held_out_batches(shards: ShardSet, length: int, rows: int) -> list[Batch]:
    """Return masked held-out documents, one per row; always the same."""
    assert shards.held_out is not None, "these shards have no held-out documents: prepare them with --held-out"
    vocab, objective = shards.tokenizer.vocab, MLM()
    source = PackedDataset(
        shards.held_out,
        length,
        objective.build_template(vocab),
        vocab.pad,
        0,
        max_documents_per_row=1,
        shuffle=False,
        allow_short=True,
    )
    index = np.arange(min(rows, source.num_rows))
    return [
        objective(source.get_rows(some), CounterRNG(0, some), vocab)
        for some in np.array_split(index, -(-len(index) // 64))
    ]


def held_out_loss(
    logits_fn: Callable[[Batch], Tensor], held_out_batches: Sequence[Batch], compute: ComputeConfig
) -> float:
    """Return the mean loss over all targets; `logits_fn` returns the logits (B, K, V) of a batch."""
    total, count = 0.0, 0
    with torch.no_grad(), compute.autocast():
        for batch in held_out_batches:
            on_device = batch.to(compute.device)
            logits = logits_fn(on_device).float().flatten(0, 1)
            total += F.cross_entropy(
                logits, on_device.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
            count += batch.num_targets
    return total / count


def their_logits_fn(model: Any) -> Callable[[Batch], Tensor]:
    def logits_fn(batch: Batch) -> Tensor:
        states = model.bert(batch.input_ids, attention_mask=(batch.document_ids >= 0).long()).last_hidden_state
        row = torch.arange(len(batch.input_ids), device=states.device)[:, None]
        return model.cls(states[row, batch.target_positions])

    return logits_fn


# Our side


def train_ours(
    args: argparse.Namespace, shards: ShardSet, held_out_batches: Sequence[Batch], folder: Path
) -> TrainingCurve:
    """Train with the default recipe, planned to end after --seconds."""
    recipe = our_recipe(args, shards, folder)
    compute = choose_compute(recipe)
    rows, ramp_datasets = make_row_dataset(recipe, shards, held_out=False), make_ramp_datasets(recipe, shards)
    model, start_time = build_pretrain_model(recipe, shards.tokenizer), time.perf_counter()
    if recipe.warm_start == "ppmi":
        warm_start_embeddings(model, shards.train, recipe.seed)
    before = time.perf_counter() - start_time
    say(f"{OURS}: {before:.1f} s for initial embeddings")
    if not recipe.max_steps:

        def seconds_per_step(stage_recipe: Recipe) -> float:
            source, trial_model = (
                ramp_datasets.get(stage_recipe.max_seq_length, rows),
                build_pretrain_model(stage_recipe, shards.tokenizer),
            )
            batches = make_pretrain_batch_fn(stage_recipe, source, shards.tokenizer)
            return time_steps(stage_recipe, compute, trial_model, batches, None, seconds=args.trial_seconds)[0]

        seconds = sum(
            share * seconds_per_step(single_stage_recipe(recipe, stage)) for stage, share in stage_shares(recipe)
        )
        recipe = replace(recipe, max_steps=max(2, int((args.seconds - before) / seconds)))
    recipe = resolve_schedule(recipe, rows.num_rows, lambda: (0.0, 0.0), 0.0)
    curve = TrainingCurve(OURS)

    def evaluate() -> float:
        model.eval()
        loss = held_out_loss(model.logits, held_out_batches, compute)
        model.train()
        return loss

    clock = TrainingClock(curve, recipe.max_steps, evaluate, before)

    def hook(step: int, _: Model) -> None:
        clock.step(step)

    say(f"{OURS}: {recipe.optim}, learning rate {recipe.learning_rate:g}, weight decay {recipe.weight_decay:g}")
    say(f"{OURS}: {recipe.max_steps:,} steps on {compute}")
    folder.mkdir(parents=True)
    batches = make_pretrain_batch_fn(recipe, rows, shards.tokenizer, ramp_datasets)
    fit(TrainingRun(recipe, compute, model, batches, folder=folder, name=OURS, hooks=[(1, hook)]))
    if recipe.averages_weights:  # the final model has the averaged weights
        curve.losses[-1] = evaluate()
    write_final_model(model, folder)
    say(f"{OURS}: training loss {read_log(folder / 'log.jsonl')[-1]['loss']:.3f} at the end")
    return curve


def our_recipe(args: argparse.Namespace, shards: ShardSet, folder: Path) -> Recipe:
    config = replace(get_preset(args.model), vocab_size=shards.tokenizer.vocab.size)
    recipe = pretraining_recipe(
        config,
        output_dir=str(folder),
        data=str(shards.folder),
        tokenizer=shards.tokenizer.fingerprint,
        max_seq_length=args.length,
        per_device_train_batch_size=args.batch_size,
        save_steps=10**9,
        max_steps=args.steps,
    )
    recipe = update_recipe(recipe, parse_overrides(args.changes))
    recipe.check()
    return recipe


# The peer


class ConcatenatedBlocks(torch.utils.data.Dataset):
    """Texts with [CLS] and [SEP], concatenated and cut into full rows, as run_mlm.py of `transformers` does."""

    def __init__(self, shards: ShardSet, length: int) -> None:
        vocab, part = shards.tokenizer.vocab, shards.train
        tokens, offsets = np.asarray(part.tokens), np.asarray(part.offsets)
        size = np.diff(offsets) + 2
        end = np.cumsum(size)
        ids = np.full(int(end[-1]), vocab.cls, dtype=np.int64)
        ids[end - 1] = vocab.sep
        text = np.ones(len(ids), dtype=bool)
        text[end - size] = text[end - 1] = False
        ids[text] = tokens[offsets[0] : offsets[-1]]
        self.rows = ids[: len(ids) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.rows[i]}


class StepCallback(transformers.TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.on_step = on_step

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.on_step(state.global_step)


def train_theirs(
    args: argparse.Namespace, shards: ShardSet, held_out_batches: Sequence[Batch], folder: Path
) -> TrainingCurve:
    """Train with the Trainer of transformers and BERT's published settings."""
    compute, curve = choose_compute(our_recipe(args, shards, folder)), TrainingCurve(THEIRS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(shards.folder / "tokenizer")
    rows = ConcatenatedBlocks(shards, args.length)

    def run(steps: int, on_step: Callable[[int, Any], None]) -> Any:
        transformers.set_seed(0)
        model = transformers.BertForMaskedLM(their_config(args, shards))
        trainer = transformers.Trainer(
            model,
            their_arguments(args, compute, folder, steps),
            transformers.DataCollatorForLanguageModeling(tokenizer),
            train_dataset=rows,
            callbacks=[StepCallback(lambda step: on_step(step, model))],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return model

    steps = args.steps or max(2, int(args.seconds / their_step_seconds(run, args.trial_steps)))
    clocks: list[TrainingClock] = []

    def on_step(step: int, model: Any) -> None:
        if not clocks:
            clocks.append(TrainingClock(curve, steps, lambda: evaluate(model)))
        clocks[0].step(step)

    def evaluate(model: Any) -> float:
        model.eval()
        loss = held_out_loss(their_logits_fn(model), held_out_batches, compute)
        model.train()
        return loss

    say(f"{THEIRS}: AdamW, learning rate {args.peer_learning_rate:g}, weight decay 0.01, 10% warm-up, linear decay")
    say(f"{THEIRS}: {steps:,} steps on {compute}")
    model = run(steps, on_step)
    model.save_pretrained(folder / "final")
    tokenizer.save_pretrained(folder / "final")
    return curve


def their_config(args: argparse.Namespace, shards: ShardSet) -> Any:
    return transformers.BertConfig(
        vocab_size=shards.tokenizer.vocab.size,
        hidden_size=args.peer_dim,
        num_hidden_layers=args.peer_layers,
        num_attention_heads=args.peer_heads,
        intermediate_size=4 * args.peer_dim,
        pad_token_id=shards.tokenizer.vocab.pad,
    )


def their_arguments(args: argparse.Namespace, compute: ComputeConfig, folder: Path, steps: int) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.peer_learning_rate,
        warmup_steps=steps // 10,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        bf16=compute.bf16,
        torch_compile=compute.compile,
        use_cpu=compute.device.type == "cpu",
        dataloader_num_workers=4 if compute.device.type == "cuda" else 0,
        dataloader_drop_last=True,
        logging_steps=max(1, steps // 10),
        logging_nan_inf_filter=False,  # the filter would synchronize after every step
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def their_step_seconds(run: Callable[..., Any], steps: int) -> float:
    """Return the peer's seconds per step, without the first third; synchronizes only twice."""
    first, times = max(1, steps // 3), dict[int, float]()

    def on_step(step: int, model: Any) -> None:
        if step in (first, steps):
            synchronize()
            times[step] = time.perf_counter()

    run(steps, on_step)
    return (times[steps] - times[first]) / (steps - first)


# A task


def finetune_ours(args: argparse.Namespace, checkpoint: Path, folder: Path) -> float:
    recipe = FinetuneRecipe(
        checkpoint=str(checkpoint),
        train=args.train,
        dev=args.dev,
        output_dir=str(folder),
        seeds=1,
        num_train_epochs=args.epochs,
        learning_rate=args.task_learning_rate,
        per_device_train_batch_size=args.task_batch_size,
        max_seq_length=args.length,
    )
    return float(finetune(recipe)["accuracy"])


def finetune_theirs(args: argparse.Namespace, checkpoint: Path, folder: Path) -> float:
    train, dev = (read_labelled(path, "classify") for path in (args.train, args.dev))
    names = sorted({example.target for example in train})
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=len(names))

    def encode(examples: Sequence[Any]) -> list[dict[str, Any]]:
        ids = tokenizer([e.texts[0] for e in examples], truncation=True, max_length=args.length)["input_ids"]
        return [{"input_ids": x, "labels": names.index(e.target)} for x, e in zip(ids, examples, strict=True)]

    compute = choose_compute(FinetuneRecipe())
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.task_batch_size,
            per_device_eval_batch_size=64,
            learning_rate=args.task_learning_rate,
            warmup_steps=0.1,
            bf16=compute.bf16,
            use_cpu=compute.device.type == "cpu",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        transformers.DataCollatorWithPadding(tokenizer),
        train_dataset=encode(train),
    )
    trainer.train()
    predicted = trainer.predict(encode(dev)).predictions.argmax(-1)
    return float(np.mean([names[k] == e.target for k, e in zip(predicted.tolist(), dev, strict=True)]))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, help="folder that `firth prepare` wrote, with held-out documents")
    parser.add_argument("--seconds", type=float, default=165.0, help="seconds of training on each side (165)")
    parser.add_argument(
        "--steps", type=int, default=0, help="run N steps on both sides in place of --seconds (0: by time)"
    )
    parser.add_argument("--side", choices=(OURS, THEIRS), help="run one side only (both)")
    parser.add_argument("--model", default="bert-base", help="preset of our side (bert-base)")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="recipe fields of our side")
    parser.add_argument("--batch-size", type=int, default=256, help="rows per batch on both sides (256)")
    parser.add_argument("--length", type=int, default=128, help="tokens per row (128)")
    parser.add_argument("--peer-learning-rate", type=float, default=1e-4, help="of the peer (1e-4)")
    parser.add_argument("--peer-layers", type=int, default=12, help="layers of the peer (12)")
    parser.add_argument("--peer-dim", type=int, default=768, help="hidden size of the peer (768)")
    parser.add_argument("--peer-heads", type=int, default=12, help="attention heads of the peer (12)")
    parser.add_argument("--held-out-rows", type=int, default=1024, help="rows of the evaluation (1024)")
    parser.add_argument("--trial-seconds", type=float, default=4.0, help="time our steps for this long before (4)")
    parser.add_argument("--trial-steps", type=int, default=60, help="time this many steps of the peer before (60)")
    parser.add_argument("--loss", type=float, default=6.31, help="report the seconds to this held-out loss (6.31)")
    parser.add_argument(
        "--train", default="", help="fine-tune on this labelled file: text and label, or GLUE's TSV (none)"
    )
    parser.add_argument("--dev", default="", help="score on this labelled file (none)")
    parser.add_argument("--epochs", type=float, default=2.0, help="epochs of fine-tuning (2)")
    parser.add_argument("--task-learning-rate", type=float, default=5e-5, help="of fine-tuning (5e-5)")
    parser.add_argument("--task-batch-size", type=int, default=32, help="examples per fine-tuning step (32)")
    parser.add_argument("--output-dir", help="keep the models in this folder (a temporary one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    transformers.logging.set_verbosity_error()
    versions = f"firth {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    say(f"{versions}, Python {sys.version.split()[0]}")
    settings = {name: value for name, value in vars(args).items() if value not in ("", None, False, [])}
    say(", ".join(f"{name} {value}" for name, value in settings.items() if name != "shards"))
    for side in (OURS, THEIRS):
        if args.output_dir and (Path(args.output_dir) / side).exists():
            sys.exit(f"{Path(args.output_dir) / side} exists already: name another --output-dir")
    shards = open_shards(Path(args.shards))
    held_out_batches = make_held_out_batches(shards, args.length, args.held_out_rows)
    curves = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.output_dir or temporary)
        for side, train, finetune_fn in ((OURS, train_ours, finetune_ours), (THEIRS, train_theirs, finetune_theirs)):
            if args.side not in (None, side):
                continue
            curve = train(args, shards, held_out_batches, folder / side)
            if args.train and args.dev:
                curve.accuracy = finetune_fn(args, folder / side / "final", folder / f"{side}-task")
            curves.append(curve)

    show_table("Held-out loss", ("side", "seconds", "loss"), [line for curve in curves for line in points(curve)])
    show_table(
        "Final",
        ("side", "steps", "seconds", "held-out loss", f"seconds to {args.loss:g}", "accuracy"),
        [summary_row(curve, args.loss) for curve in curves],
    )
    if args.json:
        facts = {"versions": versions, "settings": settings, "seconds": args.seconds, "loss": args.loss}
        print(
            json.dumps(facts | {"curves": [asdict(c) | {"time_to_loss": c.seconds_to_loss(args.loss)} for c in curves]})
        )


def points(curve: TrainingCurve) -> list[tuple[str, str, str]]:
    return [(curve.side, f"{s:.1f}", f"{x:.3f}") for s, x in zip(curve.seconds, curve.losses, strict=True)]


def summary_row(curve: TrainingCurve, loss: float) -> tuple[str, ...]:
    seconds_needed = curve.seconds_to_loss(loss)
    return (
        curve.side,
        f"{curve.steps:,}",
        f"{curve.seconds[-1]:.1f}",
        f"{curve.losses[-1]:.3f}",
        "never" if seconds_needed is None else f"{seconds_needed:.1f}",
        "" if curve.accuracy is None else f"{100 * curve.accuracy:.1f}%",
    )


if __name__ == "__main__":
    main()
