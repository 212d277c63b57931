"""Measure what pretraining gains: pretrain for some minutes, then fine-tune beside the same model with random weights.

Run it once per architecture; with equal layers and width all three compute about as much per token (a gated MLP needs
two thirds of the width for that: model.mlp.dim=1344 instead of 2048). Every task is trained with several seeds from the
pretrained weights and from random weights, with the same steps. With several --rates each arm is reported at the rate
with its best mean. Minimal pairs: all paradigms of BLiMP under --data, and their mean.

    python benchmarks/transfer.py encoder --text en_wiki.train.txt.xz en_books.train.txt.xz --data DATA --minutes 4
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallel_runs import run_parallel

from firth import __version__
from firth.api import pretrain
from firth.core.console import say, show_table
from firth.evaluate import evaluate
from firth.models import flops_per_token, read_config
from firth.recipes import finetuning_defaults
from firth.tasks import FinetuneRecipe, finetune
from firth.tokens import is_shards_folder
from firth.train import apply_overrides, choose_compute, parse_overrides

PRESETS = {"encoder": "bert-tiny", "decoder": "gpt2-tiny", "encoder-decoder": "t5.1.1-small"}
ARMS = ("pretrained", "scratch")


class Task(NamedTuple):
    """Files under the data folder, and how long to train on them."""

    task: str
    file: str
    steps: int
    batch_size: int = 32
    max_length: int = 128
    columns: dict[str, str] = {}  # noqa: RUF012, never changed


TASKS = {
    "sst2": Task("classify", "classification/sst2", 600),
    "trec": Task("classify", "classification/trec", 400),
    "stsb": Task("regress", "pairs/stsb", 400),
    "qnli": Task("pair", "pairs/qnli", 400),
    "wnut17": Task("tag", "tagging/wnut17", 400),
    "squad": Task("span-qa", "qa_span/squad2", 500, max_length=384),
    "masakhanews": Task("classify", "classification/masakhanews_swa", 200, max_length=256),
    "masakhaner": Task("tag", "tagging/masakhaner_swa", 500),
    "afrisenti": Task("classify", "classification/afrisenti_swa", 250),
}
TEXT_LEVEL_TASKS = ("classify", "pair", "regress")
MINIMAL_PAIRS = "minimal_pairs/*.jsonl.xz"


def make_recipe(checkpoint: Path, name: str, arm: str, rate: float, options: argparse.Namespace) -> FinetuneRecipe:
    """Return the recipe of one task and arm, over all seeds; rate 0 is the model's default."""
    task = TASKS[name]
    defaults = finetuning_defaults(read_config(checkpoint)) | ({"learning_rate": rate} if rate else {})
    recipe = FinetuneRecipe(
        checkpoint=str(checkpoint),
        task=task.task,
        train=str(options.data / f"{task.file}.train.jsonl.xz"),
        dev=str(options.data / f"{task.file}.dev.jsonl.xz"),
        columns=task.columns,
        output_dir=str(checkpoint.parent / f"{name}-{arm}-{rate}"),
        seeds=options.seeds,
        shots=options.shots,
        max_steps=options.steps or task.steps,
        per_device_train_batch_size=task.batch_size,
        max_seq_length=min(task.max_length, options.max_length),
        from_scratch=arm == "scratch",
        answer="auto" if task.task == "tag" else options.answer,
        save_steps=10**6,
        **defaults,
    )
    pools = task.task in TEXT_LEVEL_TASKS and read_config(checkpoint).architecture == "encoder"
    return apply_overrides(recipe, {"pool": options.pool} if pools else {})


def format_score(score: Mapping[str, Any]) -> str:
    return f"{100 * score['mean']:.1f} ± {100 * score['std']:.1f}"


def score_minimal_pairs(checkpoint: Path, data: Path, output: Path) -> dict[str, float]:
    """Return the accuracy on each paradigm of all files of minimal pairs."""
    accuracies: dict[str, float] = {}
    for file in sorted(data.glob(MINIMAL_PAIRS)):
        accuracies |= evaluate(checkpoint, "minimal-pairs", file, output / file.name)["by_group"]
    return accuracies


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", choices=PRESETS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="fields of the pretraining recipe")
    parser.add_argument("--model", default="", help="a preset of this architecture instead of bert, gpt2 or t5.1.1")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with classification/, pairs/, tagging/, qa_span/"
    )
    parser.add_argument("--tasks", default="sst2,trec,stsb,wnut17")
    parser.add_argument("--minutes", type=float, default=4.0, help="of pretraining")
    parser.add_argument("--pretraining-steps", type=int, default=0, help="instead of minutes")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--mlp-dim", type=int, default=0, help="0: 4 x dim, 2.625 x dim for a gated MLP")
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shots", type=int, default=0, help="labels of a task; 0: all")
    parser.add_argument("--steps", type=int, default=0, help="of every task; 0: its own number")
    parser.add_argument("--rates", default="0", help="of fine-tuning, with commas; 0 is the model's default")
    parser.add_argument("--answer", default="auto", help="head, text or auto")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds; then no second rate is tried")
    parser.add_argument("--pool", default="auto", help="how an encoder's head pools a text: cls or mean")
    parser.add_argument("--processes", type=int, default=1, help="tasks that are trained in parallel")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--output", type=Path, help="write all scores as JSON")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    start = time.monotonic()
    say(f"firth {__version__}; {choose_compute(FinetuneRecipe())}")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        data_options = {} if is_shards_folder(options.text[0]) else {"vocab_size": options.vocab_size}
        data_options |= {"lowercase": True} if data_options and options.architecture == "encoder" else {}
        preset = options.model or PRESETS[options.architecture]
        gated = preset.startswith(("t5.1.1", "modernbert", "llama"))
        pretrained = pretrain(
            preset,
            options.text,
            run,
            **data_options,
            overrides={
                "model.num_layers": options.layers,
                "model.dim": options.dim,
                "model.num_heads": options.dim // 64,
                "model.mlp.dim": options.mlp_dim or int(options.dim * (2.625 if gated else 4)),
                **parse_overrides(options.overrides),
            },
            **({"max_steps": options.pretraining_steps} if options.pretraining_steps else {"minutes": options.minutes}),
            per_device_train_batch_size=options.batch,
            save_steps=10**6,
        )
        final = run / "final"
        config = read_config(final)
        names = [name for name in options.tasks.split(",") if name]
        rates = [float(rate) for rate in options.rates.split(",")]
        recipes = {
            (name, arm, rate): make_recipe(final, name, arm, rate, options)
            for rate in rates
            for name in names
            for arm in ARMS
        }
        rows, scores = [], defaultdict[str, dict[str, Any]](dict)
        loss = "none" if pretrained["eval_loss"] is None else f"{pretrained['eval_loss']:.3f}"
        say(f"pretrained after {time.monotonic() - start:.0f} s, held-out loss {loss}")
        if pairs := score_minimal_pairs(final, options.data, Path(folder) / "blimp"):
            scores["blimp"] = pairs
            rows.append(
                (f"BLiMP, {len(pairs)} paradigms", "accuracy", f"{100 * sum(pairs.values()) / len(pairs):.1f}", "", "")
            )
        trials: list[dict[str, Any]] = []
        in_time = (
            (key, recipe)
            for key, recipe in recipes.items()
            if key[2] == rates[0] or time.monotonic() - start < options.time_limit
        )
        for (name, arm, rate), result in run_parallel(finetune, in_time, options.processes, Path(folder) / "log.txt"):
            trials.append({"task": name, "arm": arm, "rate": rate, "mean": result["mean"], "std": result["std"]})
            best = scores[name].get(arm, {}).get("mean", math.nan)
            if math.isnan(best) or result["mean"] > best:
                scores[name][arm] = result | {"rate": rate}
            say(f"{name}, {arm}, {rate:g}: {format_score(result)}, after {time.monotonic() - start:.0f} s")
        for name in names:
            ours, scratch = scores[name]["pretrained"], scores[name]["scratch"]
            gain = f"{100 * (ours['mean'] - scratch['mean']):+.1f}"
            rows.append((name, ours["metric"], format_score(ours), format_score(scratch), gain))
    flops = flops_per_token(config, 128)
    title = (
        f"{options.architecture}, {pretrained['parameters']:,} parameters, {flops / 1e6:,.0f} MFLOPs per token, "
        f"held-out loss {loss} after {pretrained['tokens']:,} tokens"
    )
    show_table(title, ("task", "score", "pretrained", "from scratch", "gain"), rows)
    say(f"{time.monotonic() - start:.0f} s in all")
    if options.output:
        facts = {"architecture": options.architecture, "pretraining": pretrained, "scores": scores, "trials": trials}
        facts |= {"flops_per_token": flops}
        options.output.write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
