"""Which changes of the pretraining recipe learn more than chance explains: the table of ablations, with floors.

    python benchmarks/ablations.py --text en_wiki.train.txt.xz en_books.train.txt.xz --data DATA --output-dir WORK \\
        [--shape encoder-6x384] [--passes 10 | --minutes M] [--changes gates,ema] [--change NAME KEY=VALUE ...] \\
        [--seeds 3] [--change-seeds 1] [--jobs 3] [--tasks sst2,stsb,qnli,wnut17] [--method left-to-right] [--json]

The baseline is the default recipe of the shape, with three seeds. A change is the same with some fields set. Each run
is pretrained, scored on all minimal pairs under DATA/minimal_pairs (38 paradigms: the mean, and the mean of each
phenomenon), and fine-tuned on each task with the default settings and one seed.

The *floor* of a score is the standard deviation of the baseline's seeds. A change *helps* if it gains more than two
floors on the mean of the paradigms and loses more than two floors on no task. One seed of a change is a first look; a
change that helps is worth `--change-seeds 3`.

WORK keeps the text and finished steps of each run, which are not computed again: stop it at any time, add changes
later.
`--jobs` runs stand side by side, since a small model leaves most of a GPU idle.

On an H200 a run of 10 passes with 6 layers of 384 took 47 s, three at a time; a command of less than ten minutes covers
the baseline or four changes. The first one makes the text:

    A="python benchmarks/ablations.py --text en_wiki.train.txt.xz en_books.train.txt.xz --data DATA --output-dir WORK"
    $A --jobs 3 --changes ""
    $A --jobs 3 --changes gates,attention-gate,value-residual
    $A --jobs 3 --changes unet-skips,mask15,ema
    $A --jobs 3 --changes mlm,batch-half,batch-double
    $A --jobs 3 --changes decay-quarter,decay-4x,dropout

`--dry-run` lists the runs and what is left of each.
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
from firth.core.console import format_count, format_duration, quiet, say, show_table
from firth.core.files import read_object, write_json
from firth.evaluate import evaluate
from firth.models import get_preset, read_config
from firth.models.presets import shape_architecture
from firth.recipes import SHAPE_RECIPES, finetuning_defaults, pretraining_recipe, tokenizer_kind, with_rate_candidates
from firth.tasks import FinetuneRecipe, finetune
from firth.text import Corpus
from firth.tokens import is_shards_folder, load_tokenizer, prepare, train_tokenizer
from firth.train import choose_compute, parse_overrides

BASELINE = "baseline"
NUM_FLOORS = 2  # a gain counts from so many standard deviations of the baseline
NEVER = 10**9  # steps: no checkpoint before the end
CHANGES: dict[str, tuple[str, ...]] = {  # a name, and KEY=VALUE of the pretraining recipe; "objective" is its name
    "mlm": ("objective=mlm",),
    "masked-next-token": ("objective=masked-next-token",),
    "mask15": ("objective.mlm.rate=0.15",),
    "masked-quarter": ("objective.masked_share=0.25",),
    "masked-3-quarters": ("objective.masked_share=0.75",),
    "gates": ("model.attention_gate=true", "model.value_residual=true", "model.unet_skips=true"),
    "attention-gate": ("model.attention_gate=true",),
    "value-residual": ("model.value_residual=true",),
    "unet-skips": ("model.unet_skips=true",),
    "ema": ("ema_decay=0.999",),
    "wsd": ("lr_scheduler_type=wsd", "wsd_decay=0.3"),
    "cosine": ("lr_scheduler_type=cosine",),
    "batch-half": ("global_batch_tokens=16384",),
    "batch-double": ("global_batch_tokens=65536",),
    "decay-quarter": ("weight_decay=0.05",),
    "decay-4x": ("weight_decay=0.8",),
    "dropout": ("model.dropout=0.1", "model.attention_dropout=0.1"),
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
        return ["pretraining", "minimal pairs", *self.args.tasks]

    @property
    def scores(self) -> dict[str, Any]:
        """Scores of the finished steps."""
        file = self.folder / STEPS_FILE
        return read_object(file) if file.is_file() else {}

    @property
    def steps_left(self) -> list[str]:
        done = self.scores
        return [step for step in self.steps if step not in done]


def compute_run(run: Run) -> dict[str, Any]:
    """Compute the missing steps of a run, and return the scores of all."""
    scores = run.scores
    for step in run.steps_left:
        with quiet():
            if step == "pretraining":
                scores[step] = pretrain_run(run)
            elif step == "minimal pairs":
                scores[step] = score_minimal_pairs(run)
            else:
                scores[step] = finetune_run(run, step)
        write_json(run.folder / STEPS_FILE, scores)
    return scores


def pretrain_run(run: Run) -> dict[str, Any]:
    overrides, args = parse_overrides(list(run.fields)), run.args
    objective = overrides.pop("objective", None)
    length = {"minutes": args.minutes} if args.minutes else {"num_train_epochs": args.passes}
    results = pretrain(
        args.shape,
        args.shards,
        run.folder,
        objective=objective,
        overrides=overrides,
        overwrite=run.folder.exists(),
        seed=run.seed,
        save_steps=NEVER,
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


def make_shards(args: argparse.Namespace) -> Path:
    """Return shards of the text, made once; a single folder of shards is taken as it is."""
    if len(args.text) == 1 and is_shards_folder(args.text[0]):
        return Path(args.text[0])
    folder, tokenizer_folder = args.output_dir / "shards", args.output_dir / "tokenizer"
    if not is_shards_folder(folder):
        recipe = pretraining_recipe(get_preset(args.shape), **SHAPE_RECIPES.get(shape_architecture(args.shape), {}))
        kind = tokenizer_kind(recipe.model, recipe.objective)
        if not tokenizer_folder.is_dir():
            say(f"training a {kind} tokenizer of {args.vocab_size:,} tokens")
            texts = (document.text for document in Corpus(args.text))
            train_tokenizer(texts, kind, args.vocab_size).save(tokenizer_folder)
        prepare(Corpus(args.text), load_tokenizer(tokenizer_folder), folder)
    return folder


# --- the table


def summarize(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a run: held-out loss, the mean over paradigms, and each task."""
    pairs = scores["minimal pairs"].values()
    tasks = {name: value for name, value in scores.items() if name in TASKS}
    return {"loss": scores["pretraining"]["eval_loss"], "pairs": mean(pairs), **tasks}


def find_floors(baseline: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the standard deviation of each figure over the baseline's seeds; NaN for one seed.

    >>> find_floors([{"pairs": 0.70}, {"pairs": 0.71}, {"pairs": 0.72}])
    {'pairs': 0.01}
    """
    if len(baseline) < 2:
        return dict.fromkeys(baseline[0], math.nan)
    return {name: round(stdev(run[name] for run in baseline), 9) for name in baseline[0]}


def judge(gains: Mapping[str, float], floors: Mapping[str, float]) -> str:
    """Return whether a change helps by the rule of two floors.

    >>> floors = {"loss": 0.01, "pairs": 0.004, "sst2": 0.005}
    >>> judge({"loss": -0.1, "pairs": 0.009, "sst2": -0.009}, floors), judge({"pairs": 0.007, "sst2": 0.02}, floors)
    ('helps', 'within chance')
    >>> judge({"pairs": 0.05, "sst2": -0.011}, floors), judge({"pairs": -0.01, "sst2": 0.0}, floors)
    ('loses on sst2', 'loses on pairs')
    """
    if any(math.isnan(floor) for floor in floors.values()):
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
        values = [
            mean(scores["minimal pairs"][paradigm] for scores in runs for paradigm in paradigms)
            for runs in found.values()
        ]
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
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (1)")
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
    for name, *fields in args.change:
        if not fields or name in (BASELINE, *args.changes):
            parser.error(f"--change {name} needs a new name and at least one KEY=VALUE")
    if not pair_files(args.data):
        parser.error(f"--data {args.data} has no {MINIMAL_PAIRS}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, start = parse_args(argv), time.monotonic()
    runs = plan_runs(args)
    if args.dry_run:
        rows = [(run.folder.name, " ".join(run.fields), ", ".join(run.steps_left) or "done") for run in runs]
        show_table("Runs", ["run", "fields", "left"], rows)
        return
    args.output_dir.mkdir(parents=True, exist_ok=True)
    args.shards = str(make_shards(args))
    say(f"firth {__version__}; {choose_compute(FinetuneRecipe())}; {format_count(len(runs), 'run')}")
    finished = {index: run.scores for index, run in enumerate(runs) if not run.steps_left}
    missing = [(index, run) for index, run in enumerate(runs) if run.steps_left]
    found: dict[str, list[dict[str, Any]]] = {run.change: [] for run in runs}
    computed = {}
    for number, (index, result) in enumerate(
        run_parallel(compute_run, missing, args.jobs, args.output_dir / "log.txt"), 1
    ):
        computed[index] = result
        say(f"{number}/{len(missing)}, {format_duration(time.monotonic() - start)}: {runs[index].folder.name}")
    for index, run in enumerate(runs):
        found[run.change].append(computed[index] if index in computed else finished[index])
    result = compare(found)
    print_tables(result, found, read_phenomena(args.data))
    write_json(args.output_dir / "ablations.json", result)
    if args.json:
        print(json.dumps({"seconds": time.monotonic() - start, **result}))


if __name__ == "__main__":
    main()
