"""Measure the table behind `firth plan`: small runs of several sizes, texts and passes, and the law that fits them.

    python benchmarks/scaling_sweep.py --text en_wiki.train.txt.xz en_books.train.txt.xz --output-dir WORK \\
        [--quick | --cpu] [--architectures encoder,decoder] [--shapes 3x128,8x512] [--tokens 700000,14000000] \\
        [--passes 1,4,16] [--max-tokens N] [--max-cost X] [--jobs J] [--json] \\
        [--write src/firth/lab/scaling_table.json]

A run is what `firth pretrain encoder-8x512 --num-train-epochs P` does, with the batch and the rate that it chooses. The
texts are every k-th document of the given ones; one tokenizer per architecture serves all of them, so that losses can
be compared. WORK keeps finished runs, which are not computed again: stop it at any time, add sizes later. `--jobs`
runs stand side by side, since one small model leaves most of a GPU idle; the longest ones start first.

For each architecture the runs are fitted by `firth.lab.scaling_law`, and `--write` saves the laws with their runs. An
architecture that this sweep does not have keeps its law. `--quick` takes about four minutes on an H200, with all three
architectures about ten.

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
from firth.lab.expected_loss import TABLE_FILE, read_loss_table
from firth.lab.scaling_law import ScalingFit, ScalingLaw, ScalingRun, fit_scaling_law
from firth.models import count_parameters, get_preset
from firth.models.presets import ARCHITECTURE_FAMILIES, shape_architecture
from firth.objectives.registry import describe_objective
from firth.recipes import SHAPE_RECIPES, pretraining_recipe, tokenizer_kind
from firth.text import Corpus
from firth.tokens import is_shards_folder, load_tokenizer, open_shards, prepare, train_tokenizer
from firth.train import ComputeConfig, Recipe, choose_compute, pretrain

TOKENIZER_DOCUMENTS_STEP = 4  # every fourth document trains the tokenizer
DEFAULT_VOCAB_SIZE = 8192
NEVER = 10**9  # steps: no checkpoint and no evaluation before the end
PAPER_LAW = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28, 15.4)  # Hoffmann et al. 2022, eq. 10; Muennighoff et al. 2023
PAPER_NOTE = "exponents, A / B and the worth of repeats are those of the papers: no sweep was run"
C_ENTRY = "encoder, mlm"  # whose runs tell C: they have 0.05 to 1.6 parameters per token
# Who takes C from there: span corruption, as it too has labels at 15% of the tokens. Causal rows have labels at all of
# them, and no such lack: after 93M tokens GPT-2 (98M parameters) had 3.89 (docs/history.md), where the law of the
# decoder expects 4.05 without C, and 4.8 with it. The runs of mlm-and-clm fit as well with C as without (1.1 and 1.2%).
TAKES_C = ("encoder-decoder",)
NUM_BOOTSTRAPS = 200
# Runs of docs/results.md and docs/history.md on en_wiki and en_books: model, vocabulary, tokens read, tokens of the
# text, held-out loss. The unigram entropies of such vocabularies are 7.02 to 7.18; those of 7.05 stand for all.
PUBLISHED_ENTROPY = 7.05
PUBLISHED_RUNS: dict[str, list[tuple[str, int, float, float, float]]] = {
    "encoder": [  # losses times 7.05 / entropy, as these differ more: 7.21, 7.21, 6.96 and 7.21
        ("encoder-6x384", 16384, 140e6, 14e6, 3.734),
        ("encoder-8x512", 16384, 140e6, 14e6, 3.727),
        ("encoder-12x768", 8192, 265.9e6, 15.73e6, 3.301),
        ("encoder-4x256", 16384, 168e6, 2.8e6, 4.40),
    ],
    "encoder, mlm": [
        ("encoder-8x512", 8192, 1500 * 32768, 14e6, 2.555),
        ("encoder-8x512", 16384, 7713 * 32768, 13.5e6, 2.23),
        ("encoder-8x512", 16384, 19763 * 32768, 13.5e6, 2.07),
        ("modernbert-base", 16384, 2431 * 32768, 13.5e6, 2.667),
        ("modernbert-base", 16384, 118e6, 13.5e6, 2.42),
        ("modernbert-tiny", 8192, 300 * 4096, 6.3e6, 5.03),
    ],
    "decoder": [("decoder-8x512", 16384, 8730 * 32768, 13.5e6, 3.88)],
    "encoder-decoder": [
        ("encoder-decoder-8x512", 8192, 1500 * 32768, 14e6, 4.302),
        ("encoder-decoder-8x512", 8192, 5831 * 32768, 14e6, 3.115),
    ],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {
        "architectures": "encoder,decoder,encoder-decoder",
        "shapes": "3x128,4x256,6x384,8x512,12x768",
        "tokens": "1400000,4200000,14000000",
        "passes": "1,3,10,30",
        "max_tokens": 450_000_000,
        "jobs": 4,
    },
    "quick": {
        "architectures": "encoder",
        "shapes": "3x128,4x256,8x512,12x768",
        "tokens": "700000,2800000,14000000",
        "passes": "1,4,16",
        "max_tokens": 60_000_000,
        "max_cost": 1.75e15,
        "jobs": 8,
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

    @property
    def cost(self) -> float:
        """Parameters times tokens: a sixth of the operations."""
        config = get_preset(f"{self.architecture}-{self.shape}")
        return count_parameters(replace(config, vocab_size=DEFAULT_VOCAB_SIZE)) * self.passes * self.text_tokens


def run_cell(cell: SweepRun) -> dict[str, Any]:
    """Train one model as the default recipe does, and return its size, tokens and held-out loss."""
    options = {"num_train_epochs": cell.passes, "save_steps": NEVER, "eval_steps": NEVER, "minutes": None}
    plan = plan_pretraining(
        f"{cell.architecture}-{cell.shape}",
        cell.shards,
        cell.folder,
        None,
        None,
        DataOptions(0, False, 0.05, {}),
        None,
        {"engine.compile_regions": True} if torch.cuda.is_available() else None,  # most of a short run would compile
        options,
    )
    with quiet():
        recipe = plan.resolve_recipe({"": cell.shards})
        return pretrain(recipe, overwrite=Path(cell.folder).exists())


# --- texts


def make_texts(architecture: str, args: argparse.Namespace, sizes: Sequence[int]) -> dict[int, Path]:
    """Return shards of about these numbers of tokens, made once."""
    recipe = shape_recipe(f"{architecture}-{args.shapes[0]}")
    kind = tokenizer_kind(recipe.model, recipe.objective)
    root = args.output_dir / f"{kind}-{args.vocab_size}"
    if not (root / "tokenizer").is_dir():
        say(f"training a {kind} tokenizer of {args.vocab_size:,} tokens")
        texts = (document.text for document in islice(Corpus(args.text), 0, None, TOKENIZER_DOCUMENTS_STEP))
        train_tokenizer(texts, kind, args.vocab_size).save(root / "tokenizer")
    tokenizer, found = load_tokenizer(root / "tokenizer"), {}
    corpus_bytes = Corpus(args.text).total_bytes
    for size in sizes:
        folder = root / f"shards-{size}"
        if not is_shards_folder(folder):
            every = max(1, round(args.text_tokens / size))
            say(f"tokenizing every {every}th document ({corpus_bytes:,} bytes)")
            prepare(islice(Corpus(args.text), 0, None, every), tokenizer, folder)
        found[size] = folder
    return found


def make_grid(args: argparse.Namespace) -> list[SweepRun]:
    """Return the cells of the grid, the largest first."""
    cells = []
    for architecture in args.architectures:
        texts = make_texts(architecture, args, args.tokens)
        for shape in args.shapes:
            for size, shards in texts.items():
                for passes in args.passes:
                    name = f"{architecture}-{shape}-{size}-{passes:g}"
                    cell = SweepRun(
                        architecture, shape, size, passes, str(shards), str(args.output_dir / "runs" / name)
                    )
                    if passes * size <= args.max_tokens and cell.cost <= (args.max_cost or math.inf):
                        cells.append(cell)
    return sorted(cells, key=lambda cell: -cell.cost)


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


def fit_architecture(
    architecture: str, found: dict[SweepRun, dict[str, Any]], args: argparse.Namespace, compute: ComputeConfig
) -> dict[str, Any]:
    """Return the entry of the table: the law, its intervals, its range, and the runs."""
    own = {cell: results for cell, results in found.items() if cell.architecture == architecture}
    measured = [scaling_run(cell, results) for cell, results in own.items()]
    first = max(own, key=lambda cell: cell.text_tokens)
    fit = fit_scaling_law(measured)
    shards = open_shards(Path(first.shards))
    recipe = shape_recipe(f"{architecture}-{first.shape}")
    return {
        "family": recipe.model.family,
        "objective": describe_objective(recipe.objective)["name"],
        "text": [Path(path).name for path in args.text],
        "vocab_size": shards.tokenizer.vocab.size,
        "unigram_entropy": shards.unigram_entropy,
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
    }


def shape_recipe(name: str) -> Recipe:
    """Return the default recipe of a model like encoder-8x512."""
    return pretraining_recipe(get_preset(name), **SHAPE_RECIPES.get(shape_architecture(name), {}))


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
    ranges = [
        (float(values.min()), float(values.max())) for values in (table[:, 0], table[:, 1], table[:, 1] / table[:, 2])
    ]
    return ScalingFit(law, intervals, *ranges, float(error))


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
    """Run the grid, and return the entries of its architectures."""
    args.architectures, args.shapes = args.architectures.split(","), args.shapes.split(",")
    args.tokens, args.passes = [int(n) for n in args.tokens.split(",")], [float(n) for n in args.passes.split(",")]
    args.command = (
        f"python benchmarks/scaling_sweep.py --text {' '.join(Path(path).name for path in args.text)} --output-dir WORK"
        f" --architectures {','.join(args.architectures)} --shapes {','.join(args.shapes)}"
        f" --tokens {','.join(map(str, args.tokens))} --passes {','.join(f'{p:g}' for p in args.passes)}"
        f" --max-tokens {args.max_tokens}{f' --max-cost {args.max_cost:g}' if args.max_cost else ''}"
        f" --vocab-size {args.vocab_size}"
    )
    args.output_dir.mkdir(parents=True, exist_ok=True)
    found = measure(make_grid(args), args)
    compute = choose_compute(pretraining_recipe(get_preset(f"{args.architectures[0]}-{args.shapes[0]}")))
    return {name: fit_architecture(name, found, args, compute) for name in args.architectures}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", help="files of text")
    parser.add_argument("--output-dir", type=Path, help="tokenizers, shards and runs")
    parser.add_argument("--quick", action="store_true", help="a small grid: four minutes on an H200")
    parser.add_argument("--cpu", action="store_true", help="a grid of tiny models, for two CPU cores")
    names = ", ".join(ARCHITECTURE_FAMILIES)
    parser.add_argument("--architectures", help=f"some of {names}, joined by commas")
    parser.add_argument("--shapes", help="layers x width, joined by commas")
    parser.add_argument("--tokens", help="sizes of the texts in tokens, joined by commas")
    parser.add_argument("--passes", help="passes over each text, joined by commas")
    parser.add_argument("--max-tokens", type=int, help="leave out runs that read more tokens")
    parser.add_argument("--max-cost", type=float, help="leave out runs with more parameters times tokens")
    parser.add_argument(
        "--text-tokens", type=int, default=14_000_000, help="tokens of the whole text, about (14000000)"
    )
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="of the tokenizers (8192)")
    parser.add_argument("--jobs", type=int, help="runs side by side")
    parser.add_argument("--published", action="store_true", help="take the runs of the docs instead of a sweep")
    parser.add_argument("--write", type=Path, help=f"write the laws to this file, as {TABLE_FILE.name} of the package")
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
    if args.write:
        write_json(args.write, (read_object(args.write) if args.write.is_file() else {}) | entries)
        say(f"{args.write} has the laws of {', '.join(read_object(args.write))}.")
    if args.json:
        print(json.dumps({"seconds": time.monotonic() - start, "torch": torch.__version__, "laws": entries}))


if __name__ == "__main__":
    main()
