"""How soon Firth and `transformers` learn: the same text, tokenizer, machine and seconds, in the same run.

    firth tokenizer TEXT... --kind wordpiece --vocab-size 16384 --lowercase --output-dir tok
    firth prepare TEXT... --tokenizer tok --output-dir shards
    python benchmarks/time_to_loss.py --shards shards --seconds 165 [--train SST-2/train.tsv --dev SST-2/dev.tsv]

Our side is the default recipe of an encoder; KEY=VALUE after the options changes it. The peer is `transformers`' own
Trainer with a BERT of the same tokenizer and its published settings: rate 1e-4, linear with a warm-up of a tenth, texts
joined and cut into full rows, 15% masks. Both get as many steps as fit into the seconds: some are timed before, so that
each schedule ends in time. Seconds are those of training alone: neither compiling nor the held-out losses count.

Both are asked the same held-out questions, one document in a row. Then, where labelled files are given, both are
fine-tuned: ours by `firth finetune`, the peer by its Trainer.
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
from firth.train.pretrain import build_pretrain_model, resolve_schedule, time_steps, write_final_model
from firth.train.ramp import stage_shares

OURS, THEIRS = "firth", "transformers"
POINTS = 20  # held-out losses on the way; five times as close in its first tenth


@dataclass
class Course:
    """How one side went: seconds of training and the held-out loss then; at last the accuracy of a task."""

    side: str
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracy: float | None = None

    def time_to(self, loss: float) -> float | None:
        """Seconds until the held-out loss was first as low as this, in a line between two points."""
        before: tuple[float, float] | None = None
        for at, found in zip(self.seconds, self.losses, strict=True):
            if found <= loss:
                if before is None:
                    return at
                share = (before[1] - loss) / max(before[1] - found, 1e-12)
                return before[0] + share * (at - before[0])
            before = at, found
        return None


class Clock:
    """Seconds of training alone: it begins after the first step, which compiles, and stands still meanwhile.

    Those that were spent on learning `before` the first step are counted too.
    """

    def __init__(self, course: Course, steps: int, evaluate: Callable[[], float], before: float = 0.0) -> None:
        self.course, self.steps, self.evaluate, self.before = course, steps, evaluate, before
        self.spent, self.since = 0.0, 0.0

    def every(self, done: int) -> int:
        points = 5 * POINTS if 10 * done <= self.steps else POINTS
        return max(1, self.steps // points)

    def step(self, done: int) -> None:
        """After each step; now and then the held-out loss is taken."""
        if done == 1:
            self.go_on()
        if done > 1 and (done % self.every(done) == 0 or done == self.steps):
            self.stand_still()
            spent = self.spent * done / (done - 1)  # with the first step, as long as the others
            self.course.seconds.append(self.before + spent)
            self.course.losses.append(self.evaluate())
            now = f"step {done:,}, {self.course.seconds[-1]:.1f} s, held-out loss {self.course.losses[-1]:.3f}"
            say(f"{self.course.side}: {now}")
            self.go_on()
        self.course.steps = done

    def go_on(self) -> None:
        wait()
        self.since = time.perf_counter()

    def stand_still(self) -> None:
        wait()
        self.spent += time.perf_counter() - self.since


def wait() -> None:
    """Until the device has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# The questions for both


def questions(shards: ShardSet, length: int, rows: int) -> list[Batch]:
    """Masked held-out documents, one in a row, always the same."""
    assert shards.held_out is not None, "prepare the text with some of it held out"
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


def held_out_loss(ask: Callable[[Batch], Tensor], asked: Sequence[Batch], machine: ComputeConfig) -> float:
    """The mean loss over all answers, from a function that gives the logits (B, K, V) of a batch."""
    total, count = 0.0, 0
    with torch.no_grad(), machine.autocast():
        for batch in asked:
            on_device = batch.to(machine.device)
            logits = ask(on_device).float().flatten(0, 1)
            total += F.cross_entropy(
                logits, on_device.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
            count += batch.num_targets
    return total / count


def their_answers(model: Any) -> Callable[[Batch], Tensor]:
    def ask(batch: Batch) -> Tensor:
        states = model.bert(batch.input_ids, attention_mask=(batch.document_ids >= 0).long()).last_hidden_state
        row = torch.arange(len(batch.input_ids), device=states.device)[:, None]
        return model.cls(states[row, batch.target_positions])

    return ask


# Our side


def train_ours(options: argparse.Namespace, shards: ShardSet, asked: Sequence[Batch], folder: Path) -> Course:
    """The default recipe, planned to last so many seconds."""
    recipe = our_recipe(options, shards, folder)
    machine = choose_compute(recipe)
    rows, shorter = make_row_dataset(recipe, shards, held_out=False), make_ramp_datasets(recipe, shards)
    model, began = build_pretrain_model(recipe, shards.tokenizer), time.perf_counter()
    if recipe.warm_start == "ppmi":
        warm_start_embeddings(model, shards.train, recipe.seed)
    before = time.perf_counter() - began
    say(f"{OURS}: {before:.1f} s for the first embeddings")
    if not recipe.max_steps:

        def seconds_of(plain: Recipe) -> float:
            source, twin = shorter.get(plain.max_seq_length, rows), build_pretrain_model(plain, shards.tokenizer)
            batches = make_pretrain_batch_fn(plain, source, shards.tokenizer)
            return time_steps(plain, machine, twin, batches, None, seconds=options.trial)[0]

        seconds = sum(share * seconds_of(single_stage_recipe(recipe, stage)) for stage, share in stage_shares(recipe))
        recipe = replace(recipe, max_steps=max(2, int((options.seconds - before) / seconds)))
    recipe = resolve_schedule(recipe, rows.num_rows, lambda: (0.0, 0.0), 0.0)
    course = Course(OURS)

    def evaluate() -> float:
        model.eval()
        found = held_out_loss(model.logits, asked, machine)
        model.train()
        return found

    clock = Clock(course, recipe.max_steps, evaluate, before)

    def hook(step: int, _: Model) -> None:
        clock.step(step)

    say(f"{OURS}: {recipe.optim}, rate {recipe.learning_rate:g}, decay {recipe.weight_decay:g}")
    say(f"{OURS}: {recipe.max_steps:,} steps on {machine}")
    folder.mkdir(parents=True)
    batches = make_pretrain_batch_fn(recipe, rows, shards.tokenizer, shorter)
    fit(TrainingRun(recipe, machine, model, batches, folder=folder, name=OURS, hooks=[(1, hook)]))
    if recipe.ema_decay:  # the mean of the weights is what is kept
        course.losses[-1] = evaluate()
    write_final_model(model, folder)
    say(f"{OURS}: training loss {read_log(folder / 'log.jsonl')[-1]['loss']:.3f} at the end")
    return course


def our_recipe(options: argparse.Namespace, shards: ShardSet, folder: Path) -> Recipe:
    config = replace(get_preset(options.model), vocab_size=shards.tokenizer.vocab.size)
    recipe = pretraining_recipe(
        config,
        output_dir=str(folder),
        data=str(shards.folder),
        tokenizer=shards.tokenizer.fingerprint,
        max_seq_length=options.length,
        per_device_train_batch_size=options.rows,
        save_steps=10**9,
        max_steps=options.steps,
    )
    recipe = update_recipe(recipe, parse_overrides(options.changes))
    recipe.check()
    return recipe


# The peer


class Blocks(torch.utils.data.Dataset):
    """Texts in their frames, joined and cut into full rows, as `transformers`' own example does."""

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


class Watch(transformers.TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self.told = told

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.told(state.global_step)


def train_theirs(options: argparse.Namespace, shards: ShardSet, asked: Sequence[Batch], folder: Path) -> Course:
    """Trainer as it is, with BERT's published settings."""
    machine, course = choose_compute(our_recipe(options, shards, folder)), Course(THEIRS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(shards.folder / "tokenizer")
    rows = Blocks(shards, options.length)

    def run(steps: int, told: Callable[[int, Any], None]) -> Any:
        transformers.set_seed(0)
        model = transformers.BertForMaskedLM(their_config(options, shards))
        trainer = transformers.Trainer(
            model,
            their_arguments(options, machine, folder, steps),
            transformers.DataCollatorForLanguageModeling(tokenizer),
            train_dataset=rows,
            callbacks=[Watch(lambda step: told(step, model))],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return model

    steps = options.steps or max(2, int(options.seconds / their_step_seconds(run, options.trial_steps)))
    clocks: list[Clock] = []

    def told(step: int, model: Any) -> None:
        if not clocks:
            clocks.append(Clock(course, steps, lambda: evaluate(model)))
        clocks[0].step(step)

    def evaluate(model: Any) -> float:
        model.eval()
        found = held_out_loss(their_answers(model), asked, machine)
        model.train()
        return found

    say(f"{THEIRS}: AdamW, rate {options.peer_rate:g}, decay 0.01, a tenth of warm-up, then falling in a line")
    say(f"{THEIRS}: {steps:,} steps on {machine}")
    model = run(steps, told)
    model.save_pretrained(folder / "final")
    tokenizer.save_pretrained(folder / "final")
    return course


def their_config(options: argparse.Namespace, shards: ShardSet) -> Any:
    return transformers.BertConfig(
        vocab_size=shards.tokenizer.vocab.size,
        hidden_size=options.peer_dim,
        num_hidden_layers=options.peer_layers,
        num_attention_heads=options.peer_heads,
        intermediate_size=4 * options.peer_dim,
        pad_token_id=shards.tokenizer.vocab.pad,
    )


def their_arguments(options: argparse.Namespace, machine: ComputeConfig, folder: Path, steps: int) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=options.rows,
        learning_rate=options.peer_rate,
        warmup_steps=steps // 10,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        bf16=machine.bf16,
        torch_compile=machine.compile,
        use_cpu=machine.device.type == "cpu",
        dataloader_num_workers=4 if machine.device.type == "cuda" else 0,
        dataloader_drop_last=True,
        logging_steps=max(1, steps // 10),
        logging_nan_inf_filter=False,  # which would read every loss at once
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def their_step_seconds(run: Callable[..., Any], steps: int) -> float:
    """Seconds of a step of theirs, the first third left out; the device is waited for twice only."""
    first, times = max(1, steps // 3), dict[int, float]()

    def told(step: int, model: Any) -> None:
        if step in (first, steps):
            wait()
            times[step] = time.perf_counter()

    run(steps, told)
    return (times[steps] - times[first]) / (steps - first)


# A task


def finetune_ours(options: argparse.Namespace, checkpoint: Path, folder: Path) -> float:
    recipe = FinetuneRecipe(
        checkpoint=str(checkpoint),
        train=options.train,
        dev=options.dev,
        output_dir=str(folder),
        seeds=1,
        num_train_epochs=options.epochs,
        learning_rate=options.task_rate,
        per_device_train_batch_size=options.task_rows,
        max_seq_length=options.length,
    )
    return float(finetune(recipe)["accuracy"])


def finetune_theirs(options: argparse.Namespace, checkpoint: Path, folder: Path) -> float:
    train, dev = (read_labelled(path, "classify") for path in (options.train, options.dev))
    names = sorted({example.target for example in train})
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=len(names))

    def encoded(examples: Sequence[Any]) -> list[dict[str, Any]]:
        ids = tokenizer([e.texts[0] for e in examples], truncation=True, max_length=options.length)["input_ids"]
        return [{"input_ids": x, "labels": names.index(e.target)} for x, e in zip(ids, examples, strict=True)]

    machine = choose_compute(FinetuneRecipe())
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.task_rows,
            per_device_eval_batch_size=64,
            learning_rate=options.task_rate,
            warmup_steps=0.1,
            bf16=machine.bf16,
            use_cpu=machine.device.type == "cpu",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        transformers.DataCollatorWithPadding(tokenizer),
        train_dataset=encoded(train),
    )
    trainer.train()
    found = trainer.predict(encoded(dev)).predictions.argmax(-1)
    return float(np.mean([names[k] == e.target for k, e in zip(found.tolist(), dev, strict=True)]))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", required=True, help="folder of prepared text, some of it held out")
    parser.add_argument("--seconds", type=float, default=165.0, help="of training, on each side")
    parser.add_argument("--steps", type=int, default=0, help="so many on both sides, whatever they take")
    parser.add_argument("--side", choices=(OURS, THEIRS), help="only one of them")
    parser.add_argument("--model", default="bert-base", help="preset of our side")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="fields of our recipe")
    parser.add_argument("--rows", type=int, default=256, help="of a batch, on both sides")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--peer-rate", type=float, default=1e-4)
    parser.add_argument("--peer-layers", type=int, default=12)
    parser.add_argument("--peer-dim", type=int, default=768)
    parser.add_argument("--peer-heads", type=int, default=12)
    parser.add_argument("--held-out-rows", type=int, default=1024)
    parser.add_argument("--trial", type=float, default=4.0, help="seconds in which our steps are timed before")
    parser.add_argument("--trial-steps", type=int, default=60, help="steps of the peer that are timed before")
    parser.add_argument("--loss", type=float, default=6.31, help="how soon is the held-out loss as low as this?")
    parser.add_argument("--train", default="", help="labelled file to fine-tune on (text and label, or GLUE's TSV)")
    parser.add_argument("--dev", default="", help="labelled file to score on")
    parser.add_argument("--epochs", type=float, default=2.0, help="of fine-tuning")
    parser.add_argument("--task-rate", type=float, default=5e-5)
    parser.add_argument("--task-rows", type=int, default=32)
    parser.add_argument("--output-dir", help="keep the models here")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return parser.parse_intermixed_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    transformers.logging.set_verbosity_error()
    versions = f"firth {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    say(f"{versions}, Python {sys.version.split()[0]}")
    settings = {name: value for name, value in vars(options).items() if value not in ("", None, False, [])}
    say(", ".join(f"{name} {value}" for name, value in settings.items() if name != "shards"))
    for side in (OURS, THEIRS):
        if options.output_dir and (Path(options.output_dir) / side).exists():
            sys.exit(f"{Path(options.output_dir) / side} is there already: name another --output-dir")
    shards = open_shards(Path(options.shards))
    asked = questions(shards, options.length, options.held_out_rows)
    courses = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.output_dir or temporary)
        for side, train, tune in ((OURS, train_ours, finetune_ours), (THEIRS, train_theirs, finetune_theirs)):
            if options.side not in (None, side):
                continue
            course = train(options, shards, asked, folder / side)
            if options.train and options.dev:
                course.accuracy = tune(options, folder / side / "final", folder / f"{side}-task")
            courses.append(course)

    show_table("Held-out loss", ("side", "seconds", "loss"), [line for course in courses for line in points(course)])
    show_table(
        "At the end",
        ("side", "steps", "seconds", "held-out loss", f"seconds to {options.loss:g}", "accuracy"),
        [summary(course, options.loss) for course in courses],
    )
    if options.json:
        facts = {"versions": versions, "settings": settings, "seconds": options.seconds, "loss": options.loss}
        print(json.dumps(facts | {"courses": [asdict(c) | {"time_to_loss": c.time_to(options.loss)} for c in courses]}))


def points(course: Course) -> list[tuple[str, str, str]]:
    return [(course.side, f"{s:.1f}", f"{x:.3f}") for s, x in zip(course.seconds, course.losses, strict=True)]


def summary(course: Course, loss: float) -> tuple[str, ...]:
    needed = course.time_to(loss)
    return (
        course.side,
        f"{course.steps:,}",
        f"{course.seconds[-1]:.1f}",
        f"{course.losses[-1]:.3f}",
        "never" if needed is None else f"{needed:.1f}",
        "" if course.accuracy is None else f"{100 * course.accuracy:.1f}%",
    )


if __name__ == "__main__":
    main()
