"""Does pretraining pay? Pretrain for some minutes, then fine-tune on tasks beside the twin that was not pretrained.

Run it once for each shape; with the same layers and width all three compute about as much for a token (a gated MLP,
as modernbert's, is to be two thirds as wide for that: model.mlp.dim=1344 in place of 2048). Every task is
learned by several seeds from the pretrained model and from random weights, with the same steps. With several --rates
each side is told by the one at which its mean is best.

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

from at_once import at_once

from firth import __version__
from firth.api import pretrain
from firth.core.console import say, show_table
from firth.evaluate import evaluate
from firth.models import flops_per_token, read_config
from firth.recipes import finetuning_defaults
from firth.tasks import FinetuneRecipe, finetune
from firth.tokens import is_shards_folder
from firth.train import apply_overrides, choose_compute, parse_overrides

MODELS = {"encoder": "bert-tiny", "decoder": "gpt2-tiny", "encoder-decoder": "t5-tiny"}


class Task(NamedTuple):
    """Files under the folder of the data, and how long to learn from them."""

    task: str
    name: str
    steps: int
    batch: int = 32
    length: int = 128
    columns: dict[str, str] = {}  # noqa: RUF012, never changed


TASKS = {
    "sst2": Task("classify", "classification/sst2", 600),
    "trec": Task("classify", "classification/trec", 400),
    "stsb": Task("regress", "pairs/stsb", 400),
    "wnut17": Task("tag", "tagging/wnut17", 400),
    "squad": Task("span-qa", "qa_span/squad2", 500, length=384),
    "masakhanews": Task("classify", "classification/masakhanews_swa", 200, length=256),
    "masakhaner": Task("tag", "tagging/masakhaner_swa", 500),
    "afrisenti": Task("classify", "classification/afrisenti_swa", 250),
}
WHOLE = ("classify", "regress")  # tasks with an answer about a whole text
BLIMP = "minimal_pairs/blimp_sample.dev.jsonl.xz"


def recipe_of(checkpoint: Path, name: str, way: str, rate: float, options: argparse.Namespace) -> FinetuneRecipe:
    """How a task is learned, over the seeds; rate 0 is the default of the model."""
    task = TASKS[name]
    usual = finetuning_defaults(read_config(checkpoint)) | ({"learning_rate": rate} if rate else {})
    recipe = FinetuneRecipe(
        checkpoint=str(checkpoint),
        task=task.task,
        train=str(options.data / f"{task.name}.train.jsonl.xz"),
        dev=str(options.data / f"{task.name}.dev.jsonl.xz"),
        columns=task.columns,
        output_dir=str(checkpoint.parent / f"{name}-{way}-{rate}"),
        seeds=options.seeds,
        shots=options.shots,
        max_steps=options.steps or task.steps,
        per_device_train_batch_size=task.batch,
        max_seq_length=min(task.length, options.longest),
        from_scratch=way == "scratch",
        save_steps=10**6,
        **usual,
    )
    whole = task.task in WHOLE and read_config(checkpoint).architecture == "encoder"
    return apply_overrides(recipe, {"pool": options.pool} if whole else {})


def written(found: Mapping[str, Any]) -> str:
    return f"{100 * found['mean']:.1f} ± {100 * found['std']:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=MODELS)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="fields of the recipe of pretraining")
    parser.add_argument("--model", default="", help="a preset of this shape, in place of bert, gpt2 and t5")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with classification/, pairs/, tagging/, qa_span/"
    )
    parser.add_argument("--tasks", default="sst2,trec,stsb,wnut17")
    parser.add_argument("--minutes", type=float, default=4.0, help="of pretraining")
    parser.add_argument("--pretraining-steps", type=int, default=0, help="in place of minutes")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shots", type=int, default=0, help="labels of a task; 0 takes all")
    parser.add_argument("--steps", type=int, default=0, help="of every task; 0: its own number")
    parser.add_argument("--rates", default="0", help="of fine-tuning, by commas; 0 is the default of the model")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds; no second rate is tried after them")
    parser.add_argument("--pool", default="auto", help="an encoder's answer about a text: from cls or mean")
    parser.add_argument("--jobs", type=int, default=1, help="tasks that are learned at once")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--output", type=Path, help="all scores as JSON")
    options = parser.parse_intermixed_args(words)
    began = time.monotonic()
    say(f"firth {__version__}; {choose_compute(FinetuneRecipe())}")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        made = {} if is_shards_folder(options.text[0]) else {"vocab_size": options.vocab_size}
        made |= {"lowercase": True} if made and options.shape == "encoder" else {}
        pretrained = pretrain(
            options.model or MODELS[options.shape],
            options.text,
            run,
            **made,
            overrides={
                "model.num_layers": options.layers,
                "model.dim": options.dim,
                "model.num_heads": options.dim // 64,
                "model.mlp.dim": 4 * options.dim,
                **parse_overrides(options.changes),
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
            (name, way, rate): recipe_of(final, name, way, rate, options)
            for rate in rates
            for name in names
            for way in ("pretrained", "scratch")
        }
        rows, scores = [], defaultdict[str, dict[str, Any]](dict)
        say(f"pretrained after {time.monotonic() - began:.0f} s, held-out loss {pretrained['eval_loss']:.3f}")
        if (options.data / BLIMP).is_file():
            pairs = evaluate(final, "minimal-pairs", options.data / BLIMP, Path(folder) / "blimp")
            scores["blimp"] = pairs
            rows.append(("blimp sample", "accuracy", f"{100 * pairs['metrics']['accuracy']:.1f}", "", ""))
        tried: list[dict[str, Any]] = []
        in_time = (
            (key, recipe)
            for key, recipe in recipes.items()
            if key[2] == rates[0] or time.monotonic() - began < options.within
        )
        for (name, way, rate), found in at_once(finetune, in_time, options.jobs, Path(folder) / "log.txt"):
            tried.append({"task": name, "way": way, "rate": rate, "mean": found["mean"], "std": found["std"]})
            best = scores[name].get(way, {}).get("mean", math.nan)
            if math.isnan(best) or found["mean"] > best:
                scores[name][way] = found | {"rate": rate}
            say(f"{name}, {way}, {rate:g}: {written(found)}, after {time.monotonic() - began:.0f} s")
        for name in names:
            ours, twin = scores[name]["pretrained"], scores[name]["scratch"]
            gain = f"{100 * (ours['mean'] - twin['mean']):+.1f}"
            rows.append((name, ours["metric"], written(ours), written(twin), gain))
    flops = flops_per_token(config, 128)
    title = (
        f"{options.shape}, {pretrained['parameters']:,} parameters, {flops / 1e6:,.0f} MFLOPs a token, held-out loss "
    )
    title += f"{pretrained['eval_loss']:.3f} after {pretrained['tokens']:,} tokens"
    show_table(title, ("task", "score", "pretrained", "from scratch", "gain"), rows)
    say(f"{time.monotonic() - began:.0f} s in all")
    if options.output:
        facts = {"shape": options.shape, "pretraining": pretrained, "scores": scores, "tried": tried}
        facts |= {"flops_per_token": flops}
        options.output.write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
