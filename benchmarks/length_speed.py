"""How speed and memory of training change with the length of a row, the tokens of a step staying the same.

    python benchmarks/length_speed.py [--model bert-base] [--lengths 128,512,...,8192] [--tokens 32768] [--plot FILE]
        [KEY=VALUE ...]

Each length is measured on rows that hold one document, and on packed ones that hold four which do not see each other.
Memory, on a GPU, is what a run has allocated at most beside its weights. A length that does not fit is said, and the
others are measured all the same. `--plot` draws both as a page. KEY=VALUE sets a field of the recipe: with
compile_parts=true it is over sooner, as each length is compiled for itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from train_speed import OURS, PACKED, Speed, Workload, changed, forget, measure

from firth import __version__
from firth.core.console import say, show_table
from firth.core.html import HtmlPage, add_plot_legend, make_axes
from firth.models import ModelConfig, get_preset
from firth.models.config import LearnedPosition, SinusoidalPosition
from firth.objectives import CLM, MLM
from firth.train import ComputeConfig, TrainingConfig, choose_compute

LENGTHS = "128,256,512,1024,2048,4096,8192"


def with_length(config: ModelConfig, length: int) -> ModelConfig:
    """The model with places for so many tokens, where it numbers them."""
    limit = config.max_length
    if limit is None or limit >= length:
        return config
    assert isinstance(config.position, LearnedPosition | SinusoidalPosition)
    return replace(config, position=replace(config.position, length=config.position.length + length - limit))


def workload_of(config: ModelConfig, length: int, tokens: int) -> Workload:
    objective = CLM() if config.architecture == "decoder" else MLM()
    return Workload(with_length(config, length), objective, max(tokens // length, 1), length)


def measured(
    name: str, workload: Workload, machine: ComputeConfig, steps: int, settings: TrainingConfig
) -> list[Speed]:
    """Both kinds of rows; nothing where memory is too small."""
    turn = max(steps // 2, 1)
    try:
        return measure(name, workload, machine, steps, turn, warmup=turn, settings=settings, alone=True)
    except torch.OutOfMemoryError:
        say(f"{name}: does not fit")
        return []
    finally:
        forget()


def draw(title: str, found: dict[int, list[Speed]], path: str) -> None:
    page, found = HtmlPage(title), dict(sorted(found.items()))
    memory = any(s.memory is not None for speeds in found.values() for s in speeds)
    for label, of in (("tokens/s", "tokens_per_second"), *([("GiB", "memory")] if memory else [])):
        figure, axes = make_axes("tokens in a row", label)
        for side in (OURS, PACKED):
            points = [(n, getattr(s, of)) for n, speeds in found.items() for s in speeds if s.side == side]
            axes.plot(*zip(*points, strict=True), marker="o", label=side)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(found), [str(length) for length in found])
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # room for all of the highest point
        axes.yaxis.set_major_formatter("{x:,.12g}")
        add_plot_legend(axes)
        page.add_figure(figure, f"{label} by the length of a row")
    page.save(path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="bert-base", help="a preset, encoder or decoder (bert-base)")
    parser.add_argument("--lengths", default=LENGTHS, help=f"tokens in a row ({LENGTHS})")
    parser.add_argument("--tokens", type=int, default=32768, help="of a step, at every length (32768)")
    parser.add_argument("--steps", type=int, default=20, help="timed, of each kind of rows (20)")
    parser.add_argument("--plot", help="write this page (.html)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="fields of the recipe: compile_parts=true")
    options = parser.parse_args(words)
    settings = changed([], options.changes)
    machine, config = choose_compute(settings), get_preset(options.model)
    versions = f"firth {__version__}, torch {torch.__version__}"
    say(f"{versions}; {machine}; {options.model}, {options.tokens:,} tokens a step {' '.join(options.changes)}")
    found: dict[int, list[Speed]] = {}
    for length in map(int, options.lengths.split(",")):
        workload = workload_of(config, length, options.tokens)
        name = f"{options.model} {workload.rows}x{length}"
        found[length] = measured(name, workload, machine, options.steps, settings)
        for s in found[length]:
            say(f"{name}: {s.side} {s.tokens_per_second:,.0f} tokens/s {gigabytes(s.memory)}")
        if options.plot and any(found.values()):  # each time, so that what is measured is not lost
            draw(f"{options.model} on {machine}", found, options.plot)
    rows = [
        (f"{max(options.tokens // length, 1)}x{length}", s.side, f"{s.tokens_per_second:,.0f}", gigabytes(s.memory))
        for length, speeds in found.items()
        for s in speeds
    ]
    show_table(f"{options.model} by length", ("rows", "side", "tokens/s", "memory"), rows)
    if options.json:
        speeds = [{"length": n, **asdict(s)} for n, some in found.items() for s in some]
        print(json.dumps({"versions": versions, "machine": str(machine), "speeds": speeds}))


def gigabytes(memory: float | None) -> str:
    return "" if memory is None else f"{memory:.1f} GiB"


if __name__ == "__main__":
    main()
