"""Measure the table behind `firth plan`: small runs of several sizes, texts and passes, and the law that fits them.

    python benchmarks/scaling_sweep.py --text en_wiki.train.txt.xz en_books.train.txt.xz --output-dir WORK \\
        [--quick | --cpu] [--architectures encoder,decoder] [--objective mlm] [--shapes 3x128,8x512] \\
        [--tokens 700000,14000000] [--passes 1,4,16] [--batches 0.5,2] [--rates 0.5,2] [--decays 0.25,4] \\
        [--max-tokens N] [--max-cost X] [--jobs J] [--dry-run] [--json] [--write src/firth/lab/scaling_table.json]

A run is what `firth pretrain encoder-8x512 --num-train-epochs P` does, with the batch and the rate that it chooses. The
texts are every k-th document of the given ones; one tokenizer per architecture serves all of them, so that losses can
be compared. WORK keeps finished runs, which are not computed again: stop it at any time, add sizes later. `--jobs`
runs stand side by side, so that one computes while another starts; the longest ones start first.

`--batches`, `--rates` and `--decays` are multiples of the default global batch, learning rate and weight decay. Each is
varied alone, with the middle shape and the middle number of passes, on every text; the rate follows the batch as in any
run. The law is fitted to the runs with default settings; the others are stored beside it, as `settings`. The whole
table of one language, on one GPU, some hours (`--dry-run` says how many); the same with sw_news.train.txt.xz,
`--text-tokens 1300000 --tokens 130000,400000,1300000`, another WORK and another file for Swahili:

    python benchmarks/scaling_sweep.py --text en_wiki.train.txt.xz en_books.train.txt.xz --output-dir WORK \\
        --batches 0.25,0.5,2,4 --rates 0.25,0.5,2,4 --decays 0,0.25,4 --write src/firth/lab/scaling_table.json

For each architecture the runs are fitted by `firth.lab.scaling_law`, and `--write` saves the laws with their runs. An
architecture that this sweep does not have keeps its law. The laws of a CPU stand beside those of a GPU, as
"encoder (cpu)", and a law that was measured on another machine is not replaced without `--replace`. `--dry-run` prints
the runs, their tokens and the time that they take, and starts nothing. `--quick` takes about nine minutes on an H200.
More than three jobs gain nothing there: processes take turns on a GPU, so that only their start overlaps.

`--with-published` fits the law to the runs of the sweep and to those of the docs together: tiny models on a CPU
(`--cpu`) tell what tokens and passes of a small text are worth, and the larger models of a GPU where that leads to.
What the size is worth cannot be told from both, which differ in all else too: its exponent is that of the paper.

`--published` runs nothing: it writes laws from the few runs of docs/results.md and docs/history.md. These cannot tell
what size is worth, so exponents, the ratio of A to B and the worth of repeats are those of the papers. E and the level
of A and B are fitted, and C for masked LM. The entries say so under "assumed", and `firth plan` repeats it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from parallel_runs import run_parallel
from scipy.optimize import nnls

from firth import __version__
from firth.commands.data_source import DataOptions
from firth.commands.pretrain_plan import plan_pretraining
from firth.core.console import format_count, format_duration, quiet, say, show_table
from firth.core.files import read_object, write_json
from firth.lab.expected_loss import TABLE_FILE, entry_name, read_loss_table, vocabulary_effect
from firth.lab.planner import CPU_START_SECONDS, GPU_START_SECONDS
from firth.lab.scaling_law import FLOPS_PER_PARAMETER, ScalingFit, ScalingLaw, ScalingRun, fit_scaling_law
from firth.models import count_parameters, get_preset
from firth.models.presets import ARCHITECTURE_FAMILIES, shape_architecture
from firth.objectives import OBJECTIVES
from firth.objectives.registry import describe_objective
from firth.recipes import SHAPE_RECIPES, pretraining_recipe, tokenizer_kind
from firth.recipes.pretraining import GPU_BATCH_TOKENS, MIN_RUN_STEPS
from firth.text import Corpus
from firth.tokens import is_shards_folder, load_tokenizer, open_shards, prepare, train_tokenizer
from firth.train import ComputeConfig, Recipe, choose_compute, pretrain
from firth.train.resources import measure_flops

TOKENIZER_DOCUMENTS_STEP = 4  # every fourth document trains the tokenizer
DEFAULT_VOCAB_SIZE = 8192
SETTING_AXES = {"batch": "batches", "rate": "rates", "decay": "decays"}  # a setting and the option of its multiples
NEVER = 10**9  # steps: no checkpoint before the end
PAPER_LAW = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28, 15.4)  # Hoffmann et al. 2022, eq. 10; Muennighoff et al. 2023
PAPER_NOTE = "exponents, A / B and the worth of repeats are those of the papers: no sweep was run"
C_ENTRY = "encoder, mlm"  # whose runs tell C: they have 0.05 to 1.6 parameters per token
# Who takes C from there: span corruption, as it too has labels at 15% of the tokens. Causal rows have labels at all of
# them, and no such lack: after 93M tokens GPT-2 (98M parameters) had 3.89 (docs/history.md), where the law of the
# decoder expects 4.05 without C, and 4.8 with it. The runs of mlm-and-clm fit as well with C as without (1.1 and 1.2%).
TAKES_C = ("encoder-decoder",)
NUM_BOOTSTRAPS = 200
# Of a small step beside others: processes take turns on a GPU, and launching the kernels takes most of their time. On
# an H200 ten runs side by side took 12 ms of it for each step (docs/history.md).
MIN_GPU_STEP_SECONDS = 0.01
# Runs of docs/results.md and docs/history.md on en_wiki and en_books: model, vocabulary, tokens read, tokens of the
# text, held-out loss. The unigram entropies of such vocabularies are 7.02 to 7.18; those of 7.05 stand for all.
PUBLISHED_ENTROPY, PUBLISHED_VOCAB_SIZE = 7.05, 8192
MLM_VOCAB_SIZE = 16384  # of most runs of masked LM
PUBLISHED_RUNS: dict[str, list[tuple[str, int, float, float, float]]] = {
    "encoder": [  # losses times 7.05 / entropy; all by the random sample of held-out rows
        ("encoder-12x768", 8192, 3.07e6, 0.767e6, 5.018),
        ("encoder-8x512", 8192, 3.07e6, 0.767e6, 5.046),
        ("encoder-8x512", 8192, 12.22e6, 3.054e6, 4.253),
        ("encoder-8x512", 8192, 15.45e6, 15.45e6, 3.786),
        ("encoder-4x256", 8192, 61.81e6, 15.45e6, 3.691),
        ("encoder-8x512", 8192, 67.4e6, 15.72e6, 3.419),
        ("encoder-8x512", 8192, 212.5e6, 15.72e6, 3.357),  # with detection of replaced tokens beside it
        ("encoder-8x512", 8192, 266.75e6, 16.04e6, 3.278),
        ("encoder-8x512", 8192, 719.25e6, 16.03e6, 3.251),
    ],
    "encoder, mlm": [
        ("encoder-8x512", 8192, 1500 * 32768, 14e6, 2.555),
        ("encoder-8x512", 16384, 7713 * 32768, 13.5e6, 2.23),
        ("encoder-8x512", 16384, 19763 * 32768, 13.5e6, 2.07),
        ("modernbert-base", 16384, 2431 * 32768, 13.5e6, 2.667),
        ("modernbert-base", 16384, 118e6, 13.5e6, 2.42),
        ("modernbert-tiny", 8192, 300 * 4096, 6.3e6, 5.03),
    ],
    "decoder": [("decoder-8x512", 8192, 276.43e6, 15.09e6, 3.585)],  # as those of encoders
    "encoder-decoder": [
        ("firth-t5-small", 8192, 55.24e6, 15.14e6, 2.876),  # RoPE and small weights, as T5Gemma
    ],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {
        "architectures": "encoder,decoder,encoder-decoder",
        "shapes": "3x128,4x256,6x384,8x512,12x768",
        "tokens": "1400000,4200000,14000000",
        "passes": "1,3,10,30",
        "max_tokens": 450_000_000,
        "jobs": 3,
    },
    "quick": {
        "architectures": "encoder",
        "shapes": "3x128,4x256,8x512,12x768",
        "tokens": "700000,2800000,14000000",
        "passes": "1,4,16",
        "max_tokens": 60_000_000,
        "max_cost": 1.75e15,
        "jobs": 3,
    },
    "cpu": {
        "architectures": "encoder",
        "shapes": "2x64,3x128,4x256",
        "tokens": "120000,500000",
        "passes": "1,4,16",
        "max_tokens": 2_500_000,
        "jobs": 1,
    },
}


class SweepRun(NamedTuple):
    """One cell of the grid."""

    architecture: str
    shape: str
    text_tokens: int  # about; the shards have the number
    passes: float
    shards: str
    folder: str
    objective: str | None = None
    setting: str = ""  # of SETTING_AXES; "": all settings are the default ones
    factor: float = 1.0  # times the default

    @property
    def cost(self) -> float:
        """Parameters times tokens: a sixth of the operations."""
        config = get_preset(f"{self.architecture}-{self.shape}")
        return count_parameters(replace(config, vocab_size=DEFAULT_VOCAB_SIZE)) * self.passes * self.text_tokens


def run_cell(cell: SweepRun) -> dict[str, Any]:
    """Train one model as the default recipe does, with one setting multiplied, and return the results of the run."""
    with quiet():
        recipe = resolve_cell(cell)
        if cell.setting == "batch":
            tokens = round(cell.factor * recipe.global_batch_tokens / recipe.max_seq_length) * recipe.max_seq_length
            recipe = resolve_cell(cell, global_batch_tokens=max(tokens, recipe.max_seq_length))
        elif cell.setting:
            name = {"rate": "learning_rate", "decay": "weight_decay"}[cell.setting]
            recipe = replace(recipe, **{name: cell.factor * getattr(recipe, name)})
        return pretrain(recipe, overwrite=Path(cell.folder).exists())


def resolve_cell(cell: SweepRun, **fields: Any) -> Recipe:
    """Return the recipe of `firth pretrain encoder-8x512 --num-train-epochs P`, with these fields."""
    options = {"num_train_epochs": cell.passes, "save_steps": NEVER, "minutes": None}
    plan = plan_pretraining(
        f"{cell.architecture}-{cell.shape}",
        cell.shards,
        cell.folder,
        None,
        cell.objective,
        DataOptions(0, False, 0.05, {}),
        None,
        {"engine.compile_regions": True} if torch.cuda.is_available() else None,  # most of a short run would compile
        {**options, **fields},
    )
    return plan.resolve_recipe({"": cell.shards})


# --- texts


def texts_folder(architecture: str, args: argparse.Namespace) -> Path:
    recipe = shape_recipe(f"{architecture}-{args.shapes[0]}", args.objective)
    return args.output_dir / f"{tokenizer_kind(recipe.model, recipe.objective)}-{args.vocab_size}"


def make_texts(architecture: str, args: argparse.Namespace) -> None:
    """Make the tokenizer of an architecture, and shards of about the wanted numbers of tokens, once."""
    recipe = shape_recipe(f"{architecture}-{args.shapes[0]}", args.objective)
    kind, root = tokenizer_kind(recipe.model, recipe.objective), texts_folder(architecture, args)
    if not (root / "tokenizer").is_dir():
        say(f"training a {kind} tokenizer of {args.vocab_size:,} tokens")
        texts = (document.text for document in islice(Corpus(args.text), 0, None, TOKENIZER_DOCUMENTS_STEP))
        train_tokenizer(texts, kind, args.vocab_size).save(root / "tokenizer")
    tokenizer, corpus_bytes = load_tokenizer(root / "tokenizer"), Corpus(args.text).total_bytes
    for size in args.tokens:
        folder = root / f"shards-{size}"
        if not is_shards_folder(folder):
            every = max(1, round(args.text_tokens / size))
            say(f"tokenizing every {every}th document ({corpus_bytes:,} bytes)")
            prepare(islice(Corpus(args.text), 0, None, every), tokenizer, folder)


def make_grid(args: argparse.Namespace) -> list[SweepRun]:
    """Return the cells of the grid, and those of single settings, the largest first."""
    cells = []
    middle_shape, middle_passes = args.shapes[len(args.shapes) // 2], args.passes[len(args.passes) // 2]
    for architecture in args.architectures:
        for shape in args.shapes:
            for size in args.tokens:
                shards = texts_folder(architecture, args) / f"shards-{size}"
                for passes in args.passes:
                    name = f"{architecture}-{shape}-{size}-{passes:g}{f'-{args.objective}' if args.objective else ''}"
                    folder = str(args.output_dir / "runs" / name)
                    cell = SweepRun(architecture, shape, size, passes, str(shards), folder, args.objective)
                    cells.append(cell)
                    if (shape, passes) == (middle_shape, middle_passes):
                        cells += [
                            cell._replace(setting=axis, factor=factor, folder=f"{folder}-{axis}{factor:g}")
                            for axis, option in SETTING_AXES.items()
                            for factor in getattr(args, option)
                        ]
    most = args.max_cost or math.inf
    kept = (cell for cell in cells if cell.passes * cell.text_tokens <= args.max_tokens and cell.cost <= most)
    return sorted(kept, key=lambda cell: -cell.cost)


def describe_cost(cells: Sequence[SweepRun], args: argparse.Namespace) -> None:
    """Print the runs, their tokens and operations, and the time that those without results will take."""
    missing = [cell for cell in cells if not (Path(cell.folder) / "results.json").is_file()]
    rows = []
    for architecture in args.architectures:
        own = [cell for cell in cells if cell.architecture == architecture]
        varied = sum(cell.setting != "" for cell in own)
        tokens = sum(cell.passes * cell.text_tokens for cell in own)
        flops = sum(FLOPS_PER_PARAMETER * cell.cost for cell in own)
        left = sum(cell in missing for cell in own)
        rows.append((architecture, str(len(own)), str(varied), str(left), f"{tokens / 1e6:,.1f}M", f"{flops:.2g}"))
    show_table("The sweep", ["architecture", "runs", "of a setting", "left", "tokens", "FLOPs"], rows)
    device = sweep_compute(args).device
    busy = sum(FLOPS_PER_PARAMETER * cell.cost for cell in missing) / measure_flops(device)
    if device.type == "cuda":
        busy = max(busy, MIN_GPU_STEP_SECONDS * sum(count_steps(cell) for cell in missing))
    start = len(missing) / args.jobs * (GPU_START_SECONDS if device.type == "cuda" else CPU_START_SECONDS)
    # several small models share a GPU, and its speed; the cores of a CPU too
    say(f"about {format_duration(busy + start)} on {sweep_compute(args)}, {format_count(args.jobs, 'run')} at a time")


def count_steps(cell: SweepRun) -> float:
    """Return about how many steps a run has: 1,000 or more, as the batch shrinks for a short one."""
    tokens = cell.passes * cell.text_tokens
    return max(1.5 * MIN_RUN_STEPS, tokens / GPU_BATCH_TOKENS)


def sweep_compute(args: argparse.Namespace) -> ComputeConfig:
    with quiet():
        return choose_compute(shape_recipe(f"{args.architectures[0]}-{args.shapes[0]}"))


# --- results


def measure(cells: Sequence[SweepRun], args: argparse.Namespace) -> dict[SweepRun, dict[str, Any]]:
    """Return the results of all cells; those of finished runs are read."""
    found = {}
    for cell in cells:
        file = Path(cell.folder) / "results.json"
        if file.is_file():
            found[cell] = read_object(file)
    missing = [(cell, cell) for cell in cells if cell not in found]
    say(f"{len(found)} of {len(cells)} runs are done")
    log, start = args.output_dir / "log.txt", time.monotonic()
    for number, (cell, results) in enumerate(run_parallel(run_cell, iter(missing), args.jobs, log), 1):
        found[cell] = results
        left = f"{number}/{len(missing)}, {format_duration(time.monotonic() - start)}"
        say(f"{left}: {Path(cell.folder).name} {results['eval_loss']:.3f} after {results['steps']:,} steps")
    return found


def scaling_run(cell: SweepRun, results: dict[str, Any]) -> ScalingRun:
    tokens = results["passes"] * open_shards(Path(cell.shards)).num_tokens
    return ScalingRun(results["parameters"], tokens, tokens / results["passes"], results["eval_loss"])


def describe_settings(found: dict[SweepRun, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs whose batch, rate or decay was multiplied, each beside the run with the default."""
    rows = []
    for cell, results in found.items():
        default = cell._replace(
            setting="", factor=1.0, folder=cell.folder.removesuffix(f"-{cell.setting}{cell.factor:g}")
        )
        if cell.setting and default in found:
            loss, default_loss = results["eval_loss"], found[default]["eval_loss"]
            rows.append(
                {
                    "shape": cell.shape,
                    "text_tokens": cell.text_tokens,
                    "passes": cell.passes,
                    "setting": cell.setting,
                    "factor": cell.factor,
                    "loss": loss,
                    "default_loss": default_loss,
                }
            )
    return sorted(rows, key=lambda row: (row["setting"], row["text_tokens"], row["factor"]))


def fit_architecture(
    architecture: str, found: dict[SweepRun, dict[str, Any]], args: argparse.Namespace, compute: ComputeConfig
) -> dict[str, Any]:
    """Return the entry of the table: the law, its intervals, its range, and the runs."""
    own = {cell: results for cell, results in found.items() if cell.architecture == architecture}
    default = {cell: results for cell, results in own.items() if not cell.setting}
    measured = [scaling_run(cell, results) for cell, results in default.items()]
    first = max(default, key=lambda cell: cell.text_tokens)
    shards = open_shards(Path(first.shards))
    kind, vocab_size, entropy, alpha = shards.tokenizer.kind, shards.tokenizer.vocab.size, shards.unigram_entropy, None
    entry = f"{architecture}, {args.objective}" if args.objective else architecture
    if args.with_published and entry in PUBLISHED_RUNS:
        length = vocabulary_effect(kind, PUBLISHED_VOCAB_SIZE, vocab_size).length
        measured = [
            run._replace(tokens=run.tokens / length, unique_tokens=run.unique_tokens / length, loss=run.loss * length)
            for run in measured
        ]
        measured += published_runs(entry)
        vocab_size, entropy, alpha = PUBLISHED_VOCAB_SIZE, PUBLISHED_ENTROPY, PAPER_LAW.alpha
    fit = fit_scaling_law(measured, alpha=alpha)
    recipe = shape_recipe(f"{architecture}-{first.shape}", args.objective)
    return {
        "family": recipe.model.family,
        "objective": describe_objective(recipe.objective)["name"],
        "text": [Path(path).name for path in args.text],
        "vocab_size": vocab_size,
        "tokenizer_kind": kind,
        "unigram_entropy": entropy,
        "machine": str(compute),
        "firth": __version__,
        "command": args.command,
        "law": vars(fit.law),
        "intervals": fit.intervals,
        "parameters_range": fit.parameters_range,
        "tokens_range": fit.tokens_range,
        "passes_range": fit.passes_range,
        "mean_error": fit.mean_error,
        "runs": [list(run) for run in measured],
        "settings": describe_settings(own),
    }


def shape_recipe(name: str, objective: str | None = None) -> Recipe:
    """Return the default recipe of a model like encoder-8x512, or that with another objective."""
    fields = SHAPE_RECIPES.get(shape_architecture(name), {})
    return pretraining_recipe(get_preset(name), **fields | ({"objective": OBJECTIVES[objective]} if objective else {}))


def check_replaced(table: dict[str, Any], names: Sequence[str], machine: str) -> None:
    """Refuse to replace a law that another machine has measured."""
    for name in names:
        old = table.get(name, {})
        if "machine" in old and not old.get("assumed") and old["machine"] != machine:
            raise SystemExit(
                f"{name!r} was measured on {old['machine']}, and this is {machine}: --write another file, or --replace."
            )


def scale_paper_law(runs: Sequence[ScalingRun], c_share: float | None = None) -> ScalingFit:
    """Return the law of the papers with E, the level of A and B, and C fitted by relative errors.

    `c_share` is C over that level, where the runs are too few to tell it. With one run all terms are scaled.
    """
    paper, table = PAPER_LAW, np.array(runs)
    reducible = np.array([paper.loss(*run[:3]) - paper.e for run in runs])
    lacking = table[:, 0] / table[:, 1]
    columns = [np.ones(len(runs)), reducible, lacking] if c_share is None else [np.ones(len(runs)), reducible]
    if c_share is not None:
        columns[1] = reducible + c_share * lacking
    terms = np.stack(columns, 1)

    def fit(chosen: np.ndarray) -> ScalingLaw:
        rows, losses = terms[chosen], table[chosen, 3]
        if len(runs) < 2:
            level = float(losses[0] / (paper.e + rows[0, 1]))
            e = level * paper.e
        else:
            e, level, *_ = solution = nnls(rows / losses[:, None], np.ones(len(chosen)))[0].tolist()
        c = solution[2] if c_share is None else c_share * level
        return replace(paper, e=e, a=level * paper.a, b=level * paper.b, c=c)

    law, rng = fit(np.arange(len(runs))), np.random.default_rng(0)
    samples = [rng.integers(0, len(runs), len(runs)) for _ in range(NUM_BOOTSTRAPS)]
    laws = [fit(sample) for sample in samples if len(set(sample.tolist())) > len(columns)]
    fitted = ("e", "a", "b", "c") if c_share is None else ("e", "a", "b")
    intervals = {
        name: tuple(np.percentile([getattr(found, name) for found in laws], [2.5, 97.5]).tolist())
        for name in fitted
        if laws
    }
    error = np.abs(np.log([law.loss(*run[:3]) / run.loss for run in runs])).mean()
    parameters, tokens, passes = (
        (float(values.min()), float(values.max())) for values in (table[:, 0], table[:, 1], table[:, 1] / table[:, 2])
    )
    return ScalingFit(law, intervals, parameters, tokens, passes, float(error))


def published_runs(architecture: str) -> list[ScalingRun]:
    return [
        ScalingRun(count_parameters(replace(get_preset(name), vocab_size=vocab)), tokens, unique, loss)
        for name, vocab, tokens, unique, loss in PUBLISHED_RUNS[architecture]
    ]


def published_entry(architecture: str) -> dict[str, Any]:
    """Return the entry of an architecture from its published runs."""
    runs, best_known = published_runs(architecture), scale_paper_law(published_runs(C_ENTRY))
    recipe = shape_recipe(PUBLISHED_RUNS[architecture][0][0])
    _, _, objective = architecture.partition(", ")
    if architecture == C_ENTRY:
        fit, fitted = best_known, "E, the level of A and B, and C were"
    elif architecture in TAKES_C:
        fit = scale_paper_law(runs, best_known.law.c / (best_known.law.a / PAPER_LAW.a))
        fitted = f"C is that of {C_ENTRY!r}; E and the level of A and B were"
    else:
        fit, fitted = scale_paper_law(runs, 0.0), "C is 0; E and the level of A and B were"
    largest = max(abs(fit.law.loss(*run[:3]) / run.loss - 1) for run in runs)
    runs_missed = f"{fitted} fitted to {format_count(len(runs), 'run')}"
    if len(runs) > 1:
        runs_missed += f", which the law misses by up to {largest:.1%}"
    return {
        "family": recipe.model.family,
        "objective": objective or describe_objective(recipe.objective)["name"],
        "vocab_size": MLM_VOCAB_SIZE if architecture == C_ENTRY else PUBLISHED_VOCAB_SIZE,
        "tokenizer_kind": tokenizer_kind(recipe.model, recipe.objective),
        "unigram_entropy": PUBLISHED_ENTROPY,
        "firth": __version__,
        "command": "python benchmarks/scaling_sweep.py --published",
        "assumed": f"{PAPER_NOTE}; {runs_missed}",
        "law": vars(fit.law),
        "intervals": fit.intervals,
        "parameters_range": fit.parameters_range,
        "tokens_range": fit.tokens_range,
        "passes_range": fit.passes_range,
        "mean_error": fit.mean_error,
        "runs": [list(run) for run in runs],
    }


def print_fit(architecture: str, entry: dict[str, Any]) -> None:
    fit = read_loss_table({architecture: entry})[architecture].fit
    for row in entry.get("settings", ()):
        say(
            f"{row['setting']} x {row['factor']:g}, {row['shape']}, {row['passes']:g} passes over "
            f"{row['text_tokens']:,} tokens: {row['loss']:.3f} ({row['loss'] - row['default_loss']:+.3f})"
        )
    rows = [
        (f"{n / 1e6:.2f}M", f"{d / 1e6:.2f}M", f"{d / u:.1f}", f"{loss:.3f}", f"{fit.law.loss(n, d, u):.3f}")
        for n, d, u, loss in entry["runs"]
    ]
    title = f"{architecture}, {entry['objective']}: the law misses by {100 * fit.mean_error:.1f}%"
    show_table(title, ["parameters", "tokens", "passes", "loss", "law"], rows)
    for name, value in vars(fit.law).items():
        interval = " ({:.3g} to {:.3g})".format(*fit.intervals[name]) if name in fit.intervals else ""
        say(f"{name} {value:.3g}{interval}")


def sweep(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run the grid, and return the entries of its architectures; none with --dry-run."""
    args.architectures, args.shapes = args.architectures.split(","), args.shapes.split(",")
    args.tokens = [int(n) for n in args.tokens.split(",")]
    for name in ("passes", *SETTING_AXES.values()):
        setattr(args, name, [float(n) for n in getattr(args, name).split(",") if n])
    args.command = (
        f"python benchmarks/scaling_sweep.py --text {' '.join(Path(path).name for path in args.text)} --output-dir WORK"
        f" --architectures {','.join(args.architectures)} --shapes {','.join(args.shapes)}"
        f" --tokens {','.join(map(str, args.tokens))} --passes {','.join(f'{p:g}' for p in args.passes)}"
        f" --max-tokens {args.max_tokens}{f' --max-cost {args.max_cost:g}' if args.max_cost else ''}"
        f" --vocab-size {args.vocab_size}{f' --objective {args.objective}' if args.objective else ''}"
        f"{' --with-published' if args.with_published else ''}"
    )
    compute, cells = sweep_compute(args), make_grid(args)
    suffix = f", {args.objective}" if args.objective else ""
    names = {name: entry_name(f"{name}{suffix}", compute.device.type) for name in args.architectures}
    if args.write and args.write.is_file() and not args.replace:
        check_replaced(read_object(args.write), list(names.values()), str(compute))
    describe_cost(cells, args)
    if args.dry_run:
        return {}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for architecture in args.architectures:
        make_texts(architecture, args)
    found = measure(cells, args)
    return {entry: fit_architecture(name, found, args, compute) for name, entry in names.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", help="files of text")
    parser.add_argument("--output-dir", type=Path, help="tokenizers, shards and runs")
    parser.add_argument("--quick", action="store_true", help="a small grid: nine minutes on an H200")
    parser.add_argument("--cpu", action="store_true", help="a grid of tiny models, for two CPU cores")
    names = ", ".join(ARCHITECTURE_FAMILIES)
    parser.add_argument("--architectures", help=f"some of {names}, joined by commas")
    parser.add_argument("--shapes", help="layers x width, joined by commas")
    parser.add_argument("--tokens", help="sizes of the texts in tokens, joined by commas")
    parser.add_argument("--passes", help="passes over each text, joined by commas")
    parser.add_argument("--objective", help="instead of the default one; makes the entry 'encoder, OBJECTIVE'")
    for option in SETTING_AXES.values():
        parser.add_argument(f"--{option}", default="", help=f"also run these multiples of the default of {option}")
    parser.add_argument("--max-tokens", type=int, help="leave out runs that read more tokens")
    parser.add_argument("--max-cost", type=float, help="leave out runs with more parameters times tokens")
    parser.add_argument(
        "--text-tokens", type=int, default=14_000_000, help="tokens of the whole text, about (14000000)"
    )
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="of the tokenizers (8192)")
    parser.add_argument("--jobs", type=int, help="runs side by side")
    parser.add_argument("--with-published", action="store_true", help="fit these runs and those of the docs together")
    parser.add_argument("--published", action="store_true", help="take the runs of the docs instead of a sweep")
    parser.add_argument("--write", type=Path, help=f"write the laws to this file, as {TABLE_FILE.name} of the package")
    parser.add_argument("--replace", action="store_true", help="replace laws that another machine has measured")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and how long, and stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args(argv)
    defaults = SETTINGS["quick" if args.quick else "cpu" if args.cpu else "full"]
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not args.published and not (args.text and args.output_dir):
        parser.error("a sweep needs --text and --output-dir")
    start = time.monotonic()
    entries = {name: published_entry(name) for name in PUBLISHED_RUNS} if args.published else sweep(args)
    for name, entry in entries.items():
        print_fit(name, entry)
    if args.write and entries:
        write_json(args.write, (read_object(args.write) if args.write.is_file() else {}) | entries)
        say(f"{args.write} has the laws of {', '.join(read_object(args.write))}.")
    if args.json:
        print(json.dumps({"seconds": time.monotonic() - start, "torch": torch.__version__, "laws": entries}))


if __name__ == "__main__":
    main()
