"""Which changes of the pretraining recipe learn more than chance explains: the table of ablations, with floors.

    python benchmarks/ablations.py --text en_wiki.train.txt.xz en_books.train.txt.xz --data DATA --output-dir WORK \\
        [--shape encoder-6x384] [--passes 10 | --minutes M] [--changes gates,ema] [--change NAME KEY=VALUE ...] \\
        [--seeds 3] [--change-seeds 1] [--jobs 3] [--tasks sst2,stsb,qnli,wnut17] [--method left-to-right] \\
        [--from-text] [--time-limit MINUTES] [--dry-run] [--json]

The baseline is the default recipe of the shape, with three seeds. A change is the same with some fields set. Each run
is pretrained, scored on all minimal pairs under DATA/minimal_pairs (38 paradigms: the mean, and the mean of each
phenomenon), and fine-tuned on each task with the default settings and one seed.

The *floor* of a score is the standard deviation of the baseline's seeds. A change *helps* if it gains more than two
floors on the mean of the paradigms and loses more than two floors on no task. One seed of a change is a first look; a
change that helps is worth `--change-seeds 3`.

WORK keeps the text and the finished steps of each run (a pretraining, the pairs, a task), which are not computed again:
stop it at any time, add changes later. `--time-limit` starts no step that would end after so many minutes, by the time
that such a step took before; the same command goes on. `--jobs` steps stand side by side: all pretrainings first, then
the steps of all runs. Processes take turns on a GPU, so that pretrainings gain by three jobs only that one computes
while another starts; fine-tunings gain by twelve. A run of `--minutes` must have the GPU for itself: `--jobs 1 --steps
pretraining`, then the other steps with more jobs.

On an H200 a run of 10 passes with 6 layers of 384 took a minute of the GPU. `--shots 4000` takes so many examples of
SST-2, which has 67,349 and would take most of the time. The first command makes the text; each of the others has the
floors of the first. All have the same `--shots`, as finished steps are kept:

    A="python benchmarks/ablations.py --text en_wiki.train.txt.xz en_books.train.txt.xz --data DATA --output-dir WORK \\
       --shots 4000"
    $A --jobs 3 --time-limit 9 --steps pretraining
    $A --jobs 12 --time-limit 9
    $A --jobs 6 --time-limit 9 --change-seeds 3 --changes packings,tail25,decay-to-zero,decay-constant,decay-cautious
    $A --jobs 6 --time-limit 9 --change-seeds 3 --changes gates,attention-gate,value-residual,unet-skips
    $A --jobs 6 --time-limit 9 --change-seeds 3 --changes mask15,mlm,batch-half,batch-double,ema,tail-constant
    $A --jobs 6 --time-limit 9 --change-seeds 3 --changes vocab4k,vocab8k,vocab32k
    $A --jobs 6 --time-limit 9 --changes 30-passes,30-passes-no-dropout,30-passes-dropout20

The regimes of the plain commands, `firth pretrain encoder --data TEXT --minutes 9` and `--num-train-epochs 10`, with
the batch, the vocabulary and the size that they choose; the same with decoder and encoder-decoder:

    P="python benchmarks/ablations.py --text en_wiki.train.txt.xz en_books.train.txt.xz --data DATA --from-text"
    $P --output-dir NINE --shape encoder --minutes 9 --steps pretraining --time-limit 10  # once for each of three seeds
    $P --output-dir NINE --shape encoder --minutes 9 --steps pairs,sst2,stsb,qnli,wnut17 --jobs 5 --time-limit 9
    $P --output-dir TEN --shape encoder --passes 10 --steps pretraining --time-limit 9    # 5 minutes for each seed
    $P --output-dir TEN --shape encoder --passes 10 --jobs 5 --time-limit 9

`--dry-run` lists the runs, what is left of each, and how long that takes where such steps have been timed, or have
their minutes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from parallel_runs import run_parallel

from firth import __version__
from firth.api import pretrain
from firth.commands.arguments import resolve_model
from firth.core.console import format_count, format_duration, quiet, say, show_table
from firth.core.files import read_object, write_json
from firth.evaluate import evaluate
from firth.models import read_config
from firth.models.presets import shape_architecture
from firth.recipes import SHAPE_RECIPES, finetuning_defaults, pretraining_recipe, tokenizer_kind, with_rate_candidates
from firth.tasks import FinetuneRecipe, finetune
from firth.text import Corpus
from firth.tokens import is_shards_folder, load_tokenizer, prepare, train_tokenizer
from firth.train import choose_compute, parse_overrides

BASELINE = "baseline"
NUM_FLOORS = 2  # a gain counts from so many standard deviations of the baseline
NEVER = 10**9  # steps: no checkpoint before the end
# A name, and KEY=VALUE of the pretraining recipe. "objective" is its name, "vocab_size" that of the tokenizer.
CHANGES: dict[str, tuple[str, ...]] = {
    "mlm": ("objective=mlm",),
    "mlm-and-clm": ("objective=mlm-and-clm",),
    "rtd": ("objective=rtd",),
    # These on a GPU, where encoders detect replaced tokens.
    "detected-half": ("objective.detected_share=0.5",),
    "detected-all": ("objective.detected_share=1.0",),
    "detection-1": ("model.extras=[{kind: DetectorConfig, weight: 1.0}]",),
    "detection-5": ("model.extras=[{kind: DetectorConfig, weight: 5.0}]",),
    "masked-next-token": ("objective=masked-next-token",),
    "mask15": ("objective.mlm.rate=0.15",),
    "masked-quarter": ("objective.masked_share=0.25",),
    "masked-3-quarters": ("objective.masked_share=0.75",),
    "gates": ("model.attention_gate=true", "model.value_residual=true", "model.unet_skips=true"),
    "attention-gate": ("model.attention_gate=true",),
    "value-residual": ("model.value_residual=true",),
    "unet-skips": ("model.unet_skips=true",),
    "ema": ("ema_decay=0.999",),
    "tail10": ("tail_average=0.1",),
    "tail25": ("tail_average=0.25",),
    "tail-constant": ("tail_average=0.25", "lr_scheduler_type=constant"),
    "wsd": ("lr_scheduler_type=wsd", "wsd_decay=0.3"),
    "cosine": ("lr_scheduler_type=cosine",),
    "batch-half": ("global_batch_tokens=16384",),
    "batch-double": ("global_batch_tokens=65536",),
    "decay-quarter": ("weight_decay=0.05",),
    "decay-4x": ("weight_decay=0.8",),
    "decay-constant": ("weight_decay_schedule=constant",),
    "decay-to-zero": ("weight_decay_schedule=to-zero",),
    "decay-cautious": ("cautious_weight_decay=true",),
    "packings": ("num_packings=10",),
    "vocab4k": ("vocab_size=4096",),
    "vocab8k": ("vocab_size=8192",),
    "vocab32k": ("vocab_size=32768",),
    "dropout": ("model.dropout=0.1", "model.attention_dropout=0.1"),
    "30-passes": ("num_train_epochs=30",),  # with the dropout that is chosen for so many
    "30-passes-no-dropout": ("num_train_epochs=30", "model.dropout=0.0", "model.attention_dropout=0.0"),
    "30-passes-dropout20": ("num_train_epochs=30", "model.dropout=0.2", "model.attention_dropout=0.2"),
    "length64": ("max_seq_length=64",),
    "length-ramp": ("length_ramp=0.3",),
}
TASKS = {
    "sst2": ("classify", "classification/sst2"),
    "stsb": ("regress", "pairs/stsb"),
    "qnli": ("pair", "pairs/qnli"),
    "wnut17": ("tag", "tagging/wnut17"),
}
MINIMAL_PAIRS = "minimal_pairs/*.jsonl.xz"
PRETRAINING, PAIRS = "pretraining", "minimal pairs"  # steps of a run; the others are its tasks
STEPS_FILE = "ablation.json"  # finished steps of a run and their scores


class Run(NamedTuple):
    """One pretraining with its evaluations."""

    change: str
    seed: int
    fields: tuple[str, ...]
    folder: Path
    args: argparse.Namespace

    @property
    def steps(self) -> list[str]:
        return [PRETRAINING, PAIRS, *self.args.tasks]

    @property
    def scores(self) -> dict[str, Any]:
        """Scores of the finished steps."""
        file = self.folder / STEPS_FILE
        return read_object(file) if file.is_file() else {}

    @property
    def steps_left(self) -> list[str]:
        done = self.scores
        return [step for step in self.steps if step not in done]

    @property
    def overrides(self) -> dict[str, Any]:
        return parse_overrides(list(self.fields))

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer; 0: chosen by the size of the text, as `firth pretrain` does with --from-text."""
        return int(self.overrides.get("vocab_size", 0 if self.args.from_text else self.args.vocab_size))


class Job(NamedTuple):
    """A step of a run."""

    run: Run
    step: str
    expected_seconds: float = 0.0  # as such a step took before


def compute_step(job: Job) -> tuple[Any, float] | None:
    """Return the outcome of a step and its seconds; None if it would end after the time limit."""
    start = time.time()
    if start + job.expected_seconds > job.run.args.deadline:
        return None
    with quiet():
        if job.step == PRETRAINING:
            outcome: Any = pretrain_run(job.run)
        else:
            outcome = score_minimal_pairs(job.run) if job.step == PAIRS else finetune_run(job.run, job.step)
    return outcome, time.time() - start


def compute_steps(runs: Sequence[Run], steps: Sequence[str], args: argparse.Namespace) -> None:
    """Compute these steps of all runs where they are missing, and add the outcomes to the runs' files."""
    jobs = [Job(run, step) for step in steps for run in runs if step in run.steps_left]
    jobs = [job for job in jobs if job.step == PRETRAINING or PRETRAINING in job.run.scores]
    # drawn one by one, so that each knows how long the earlier ones took
    timed = ((job, job._replace(expected_seconds=expect_seconds(job, runs))) for job in jobs)
    log, start = args.output_dir / "log.txt", time.monotonic()
    for number, (job, found) in enumerate(run_parallel(compute_step, timed, args.jobs, log), 1):
        left = f"{number}/{len(jobs)}, {format_duration(time.monotonic() - start)}: {job.run.folder.name}, {job.step}"
        if found is None:
            say(f"{left} would end after the time limit")
            continue
        outcome, seconds = found
        scores = job.run.scores
        scores |= {job.step: outcome, "seconds": {**scores.get("seconds", {}), job.step: seconds}}
        write_json(job.run.folder / STEPS_FILE, scores)
        say(f"{left} took {format_duration(seconds)}")


def expect_seconds(job: Job, runs: Sequence[Run]) -> float:
    """Return how long a step will take: as long as the longest such step so far, and no less than its minutes."""
    minutes = job.run.args.minutes or 0.0
    return max(step_seconds(runs).get(job.step, 0.0), 60 * minutes if job.step == PRETRAINING else 0.0)


def step_seconds(runs: Sequence[Run]) -> dict[str, float]:
    """Return the longest time that each step has taken so far."""
    longest = defaultdict[str, float](float)
    for run in runs:
        for step, seconds in run.scores.get("seconds", {}).items():
            longest[step] = max(longest[step], seconds)
    return dict(longest)


def pretrain_run(run: Run) -> dict[str, Any]:
    overrides, args = run.overrides, run.args
    objective, _ = overrides.pop("objective", None), overrides.pop("vocab_size", None)
    length = {"minutes": args.minutes} if args.minutes else {"num_train_epochs": args.passes}
    # the plain command tokenizes the text itself, and saves checkpoints
    source = {"vocab_size": run.vocab_size} if args.from_text else {"save_steps": NEVER}
    results = pretrain(
        args.shape,
        args.text if args.from_text else args.shards[run.vocab_size],
        run.folder,
        objective=objective,
        overrides=overrides,
        overwrite=run.folder.exists(),
        seed=run.seed,
        **source,
        **length,
    )
    return {name: results[name] for name in ("eval_loss", "passes", "steps", "parameters")}


def score_minimal_pairs(run: Run) -> dict[str, float]:
    """Return the accuracy on each paradigm of all files of minimal pairs."""
    accuracies: dict[str, float] = {}
    settings = {"method": run.args.method} if run.args.method else {}
    for file in pair_files(run.args.data):
        output = run.folder / f"pairs-{file.name.partition('.')[0]}"
        accuracies |= evaluate(run.folder / "final", "minimal-pairs", file, output, overwrite=True, **settings)[
            "by_group"
        ]
    return accuracies


def finetune_run(run: Run, name: str) -> float:
    """Fine-tune on a task with the default settings, and return its score on dev."""
    args, (task, file) = run.args, TASKS[name]
    checkpoint = run.folder / "final"
    fields, _ = with_rate_candidates(finetuning_defaults(read_config(checkpoint)), {})
    recipe = FinetuneRecipe(
        checkpoint=str(checkpoint),
        task=task,
        train=str(args.data / f"{file}.train.jsonl.xz"),
        dev=str(args.data / f"{file}.dev.jsonl.xz"),
        output_dir=str(run.folder / name),
        seeds=1,
        shots=args.shots,
        max_steps=args.task_steps,
        max_seq_length=128,
        save_steps=NEVER,
        **fields,
    )
    return float(finetune(recipe, overwrite=(run.folder / name).exists())["mean"])


def pair_files(data: Path) -> list[Path]:
    return sorted(data.glob(MINIMAL_PAIRS))


def read_phenomena(data: Path) -> dict[str, str]:
    """Return the phenomenon of each paradigm."""
    found = {}
    for file in pair_files(data):
        with lzma.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                found[row["uid"]] = row.get("term", row["uid"])
    return found


def make_shards(args: argparse.Namespace, vocab_size: int) -> str:
    """Return shards of the text with a vocabulary of this size, made once; a folder of shards is taken as it is."""
    if len(args.text) == 1 and is_shards_folder(args.text[0]):
        if vocab_size != args.vocab_size:
            raise SystemExit(f"{args.text[0]} has its tokenizer: a change of vocab_size needs the text itself.")
        return str(args.text[0])
    folder, tokenizer_folder = (args.output_dir / f"{name}-{vocab_size}" for name in ("shards", "tokenizer"))
    if not is_shards_folder(folder):
        config, _ = resolve_model(args.shape)
        recipe = pretraining_recipe(config, **SHAPE_RECIPES.get(shape_architecture(args.shape), {}))
        kind = tokenizer_kind(recipe.model, recipe.objective)
        if not tokenizer_folder.is_dir():
            say(f"training a {kind} tokenizer of {vocab_size:,} tokens")
            texts = (document.text for document in Corpus(args.text))
            train_tokenizer(texts, kind, vocab_size).save(tokenizer_folder)
        prepare(Corpus(args.text), load_tokenizer(tokenizer_folder), folder)
    return str(folder)


# --- the table


def summarize(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a run: held-out loss, the mean over paradigms, and each task."""
    pairs = scores[PAIRS].values()
    tasks = {name: value for name, value in scores.items() if name in TASKS}
    loss = scores[PRETRAINING]["eval_loss"]  # None where the text is too small to hold some out
    return {"loss": math.nan if loss is None else loss, "pairs": mean(pairs), **tasks}


def find_floors(baseline: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the standard deviation of each figure over the baseline's seeds; NaN for one seed.

    >>> find_floors([{"pairs": 0.70}, {"pairs": 0.71}, {"pairs": 0.72}])
    {'pairs': 0.01}
    """
    if len(baseline) < 2:
        return dict.fromkeys(baseline[0], math.nan)
    columns = {name: [run[name] for run in baseline] for name in baseline[0]}
    return {
        name: math.nan if any(map(math.isnan, values)) else round(stdev(values), 9) for name, values in columns.items()
    }


def judge(gains: Mapping[str, float], floors: Mapping[str, float]) -> str:
    """Return whether a change helps by the rule of two floors.

    >>> floors = {"loss": 0.01, "pairs": 0.004, "sst2": 0.005}
    >>> judge({"loss": -0.1, "pairs": 0.009, "sst2": -0.009}, floors), judge({"pairs": 0.007, "sst2": 0.02}, floors)
    ('helps', 'within chance')
    >>> judge({"pairs": 0.05, "sst2": -0.011}, floors), judge({"pairs": -0.01, "sst2": 0.0}, floors)
    ('loses on sst2', 'loses on pairs')
    """
    if any(math.isnan(floor) for name, floor in floors.items() if name != "loss"):
        return "no floor: give the baseline more seeds"
    lost = [name for name, gain in gains.items() if name != "loss" and gain < -NUM_FLOORS * floors[name]]
    if lost:
        return f"loses on {', '.join(lost)}"
    return "helps" if gains["pairs"] > NUM_FLOORS * floors["pairs"] else "within chance"


def compare(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the mean of each change, its gain over the baseline, the floors, and the verdict."""
    baseline = [summarize(scores) for scores in found[BASELINE]]
    floors, table = find_floors(baseline), {}
    base = {name: mean(run[name] for run in baseline) for name in baseline[0]}
    for change, runs in found.items():
        own = [summarize(scores) for scores in runs]
        means = {name: mean(run[name] for run in own) for name in base}
        gains = {name: means[name] - base[name] for name in base}
        verdict = "" if change == BASELINE else judge(gains, floors)
        table[change] = {"seeds": len(own), "means": means, "gains": gains, "verdict": verdict}
    return {"floors": floors, "changes": table}


def without_nan(value: Any) -> Any:
    """Return nested dictionaries with None in place of NaN, which JSON has not.

    >>> without_nan({"floors": {"loss": math.nan, "pairs": 0.5}, "verdict": "helps"})
    {'floors': {'loss': None, 'pairs': 0.5}, 'verdict': 'helps'}
    """
    if isinstance(value, dict):
        return {name: without_nan(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def print_tables(
    result: Mapping[str, Any], found: Mapping[str, Sequence[Mapping[str, Any]]], phenomena: Mapping[str, str]
) -> None:
    floors, changes = result["floors"], result["changes"]

    def cell(name: str, row: Mapping[str, Any], is_baseline: bool) -> str:
        value, gain = row["means"][name], row["gains"][name]
        if name == "loss":
            return f"{value:.3f}" if is_baseline else f"{value:.3f} ({gain:+.3f})"
        return f"{100 * value:.1f}" if is_baseline else f"{100 * value:.1f} ({100 * gain:+.1f})"

    rows = [
        (change, str(row["seeds"]), *(cell(name, row, change == BASELINE) for name in floors), row["verdict"])
        for change, row in changes.items()
    ]
    shown = [f"{floor:.3f}" if name == "loss" else f"{100 * floor:.1f}" for name, floor in floors.items()]
    rows.append(("floor", "", *shown, f"{NUM_FLOORS} floors count"))
    show_table("Ablations, in points", ["change", "seeds", *floors, "verdict"], rows)
    groups = defaultdict[str, list[str]](list)
    for paradigm, phenomenon in sorted(phenomena.items()):
        groups[phenomenon].append(paradigm)
    rows = []
    for phenomenon, paradigms in groups.items():
        values = [mean(scores[PAIRS][paradigm] for scores in runs for paradigm in paradigms) for runs in found.values()]
        rows.append((phenomenon, str(len(paradigms)), *(f"{100 * value:.1f}" for value in values)))
    show_table("Minimal pairs by phenomenon", ["phenomenon", "paradigms", *found], rows)


def plan_runs(args: argparse.Namespace) -> list[Run]:
    """Return the runs of the baseline and of the changes, the baseline first."""
    chosen = {name: CHANGES[name] for name in args.changes} | {name: tuple(rest) for name, *rest in args.change}
    seeds = {BASELINE: args.seeds} | dict.fromkeys(chosen, args.change_seeds)
    return [
        Run(name, seed, chosen.get(name, ()), args.output_dir / "runs" / f"{name}-{seed}", args)
        for name, count in seeds.items()
        for seed in range(count)
    ]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, help="files of text, or one folder of shards")
    parser.add_argument("--data", type=Path, required=True, help="folder with minimal_pairs/ and the tasks")
    parser.add_argument("--output-dir", type=Path, required=True, help="the text, runs and scores")
    parser.add_argument("--shape", default="encoder-6x384", help="architecture and size (encoder-6x384)")
    parser.add_argument("--passes", type=float, default=10.0, help="over the text (10)")
    parser.add_argument("--minutes", type=float, help="of each pretraining, instead of passes")
    parser.add_argument("--vocab-size", type=int, default=16384, help="of the tokenizer (16384)")
    parser.add_argument("--changes", default="", help=f"some of {', '.join(CHANGES)}, joined by commas")
    parser.add_argument("--change", nargs="+", action="append", default=[], metavar="NAME KEY=VALUE", help="one more")
    parser.add_argument("--seeds", type=int, default=3, help="of the baseline (3)")
    parser.add_argument("--change-seeds", type=int, default=1, help="of each change (1)")
    parser.add_argument("--jobs", type=int, default=1, help="steps side by side (1)")
    parser.add_argument("--from-text", action="store_true", help="each run tokenizes the text, as firth pretrain does")
    parser.add_argument("--steps", default="", help=f"compute only these: {PRETRAINING}, pairs, or tasks; with commas")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="start nothing that ends after M minutes")
    parser.add_argument("--tasks", default=",".join(TASKS), help="for fine-tuning, joined by commas")
    parser.add_argument("--task-steps", type=int, default=0, help="of each fine-tuning; 0: the default")
    parser.add_argument("--shots", type=int, default=0, help="training examples of each task; 0: all")
    parser.add_argument("--method", default="", help="how pairs are scored, as of firth evaluate (the model's default)")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and what is left of each, and stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args(argv)
    args.changes = [name for name in args.changes.split(",") if name]
    args.tasks = [name for name in args.tasks.split(",") if name]
    for name, known in ((name, CHANGES) for name in args.changes):
        if name not in known:
            parser.error(f"--changes {name} is none of {', '.join(known)}; --change {name} KEY=VALUE makes one")
    for name in args.tasks:
        if name not in TASKS:
            parser.error(f"--tasks {name} is none of {', '.join(TASKS)}")
    chosen, known = [name for name in args.steps.split(",") if name], [PRETRAINING, "pairs", *args.tasks]
    for name in chosen:
        if name not in known:
            parser.error(f"--steps {name} is none of {', '.join(known)}")
    args.steps = [PAIRS if name == "pairs" else name for name in chosen or known]
    for name, *fields in args.change:
        if not fields or name in (BASELINE, *args.changes):
            parser.error(f"--change {name} needs a new name and at least one KEY=VALUE")
    if not pair_files(args.data):
        parser.error(f"--data {args.data} has no {MINIMAL_PAIRS}")
    return args


def describe_runs(runs: Sequence[Run], jobs: int) -> None:
    """Print the runs, what is left of each, and how long that takes as far as such steps have been timed."""
    rows = [(run.folder.name, " ".join(run.fields), ", ".join(run.steps_left) or "done") for run in runs]
    show_table("Runs", ["run", "fields", "left"], rows)
    left = [expect_seconds(Job(run, step), runs) for run in runs for step in run.steps_left]
    known = [seconds for seconds in left if seconds]
    steps = format_count(len(known), "step")
    say(f"{steps} of the {len(left)} that are left: about {format_duration(sum(known) / jobs)}, {jobs} at a time")


def main(argv: Sequence[str] | None = None) -> None:
    args, start = parse_args(argv), time.monotonic()
    args.deadline = time.time() + 60 * args.time_limit
    runs = plan_runs(args)
    if args.dry_run:
        describe_runs(runs, args.jobs)
        return
    args.output_dir.mkdir(parents=True, exist_ok=True)
    say(f"firth {__version__}; {choose_compute(FinetuneRecipe())}; {format_count(len(runs), 'run')}")
    args.shards = {}
    if not args.from_text:
        args.shards = {size: make_shards(args, size) for size in dict.fromkeys(run.vocab_size for run in runs)}
    compute_steps(runs, [step for step in args.steps if step == PRETRAINING], args)
    compute_steps(runs, [step for step in args.steps if step != PRETRAINING], args)
    found = defaultdict[str, list[dict[str, Any]]](list)
    for run in runs:
        if run.steps_left:
            say(f"{run.folder.name}: {', '.join(run.steps_left)} left; the same command goes on")
        else:
            found[run.change].append(run.scores)
    if BASELINE not in found:
        return
    result = compare(found)
    print_tables(result, found, read_phenomena(args.data))
    result = without_nan(result)
    write_json(args.output_dir / "ablations.json", {**result, "runs": found})
    if args.json:
        print(json.dumps({"seconds": time.monotonic() - start, **result}))


if __name__ == "__main__":
    main()
