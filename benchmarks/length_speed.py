"""Measure training speed and memory by row length, with a constant number of tokens per step.

    python benchmarks/length_speed.py [--model bert-base] [--lengths 128,512,...,8192] [--tokens 32768] [--plot FILE]
        [KEY=VALUE ...]

Each length is measured with one document per row, and with rows packed from four documents that do not attend to each
other. Memory (on a GPU) is the peak allocation beside the weights. A length that is out of memory is reported and
skipped. `--plot` writes both curves as an HTML page. KEY=VALUE sets a field of the recipe; engine.compile_regions=true
saves compile time, as each length compiles anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from train_speed import OURS, PACKED, Speed, Workload, free_memory, make_settings, measure

from firth import __version__
from firth.core.chart import Axis, Series, line_chart
from firth.core.console import say, show_table
from firth.core.html import HtmlPage
from firth.models import ModelConfig, get_preset
from firth.models.config import LearnedPosition, SinusoidalPosition
from firth.objectives import CLM, MLM
from firth.train import ComputeConfig, TrainingConfig, choose_compute

LENGTHS = "128,256,512,1024,2048,4096,8192"


def with_max_length(config: ModelConfig, length: int) -> ModelConfig:
    """Return the model with at least `length` position embeddings, if it has any."""
    limit = config.max_length
    if limit is None or limit >= length:
        return config
    assert isinstance(config.position, LearnedPosition | SinusoidalPosition)
    return replace(config, position=replace(config.position, length=config.position.length + length - limit))


def make_workload(config: ModelConfig, length: int, tokens: int) -> Workload:
    objective = CLM() if config.architecture == "decoder" else MLM()
    return Workload(with_max_length(config, length), objective, max(tokens // length, 1), length)


def measure_length(
    name: str, workload: Workload, compute: ComputeConfig, steps: int, settings: TrainingConfig
) -> list[Speed]:
    """Measure both kinds of rows; return nothing if out of memory."""
    steps_per_turn = max(steps // 2, 1)
    try:
        return measure(
            name, workload, compute, steps, steps_per_turn, warmup=steps_per_turn, settings=settings, alone=True
        )
    except torch.OutOfMemoryError:
        say(f"{name}: out of memory")
        return []
    finally:
        free_memory()


def write_page(title: str, speeds_by_length: dict[int, list[Speed]], path: str) -> None:
    page, speeds_by_length = HtmlPage(title), dict(sorted(speeds_by_length.items()))
    memory = any(s.memory is not None for speeds in speeds_by_length.values() for s in speeds)
    for label, attribute in (("tokens/s", "tokens_per_second"), *([("GiB", "memory")] if memory else [])):
        series = []
        for side in (OURS, PACKED):
            points = [
                (n, getattr(s, attribute)) for n, speeds in speeds_by_length.items() for s in speeds if s.side == side
            ]
            series.append(Series(side, points, dot="circle"))
        chart = line_chart(series, Axis("tokens per row", 2), Axis(label, low=0.0))
        page.add_chart(chart, f"{label} by row length")
    page.save(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base", help="preset of an encoder or a decoder (bert-base)")
    parser.add_argument("--lengths", default=LENGTHS, help=f"row lengths in tokens ({LENGTHS})")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per step, at every length (32768)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps for each kind of rows (20)")
    parser.add_argument("--plot", help="write both curves to this HTML page (none)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="recipe fields, as engine.compile_regions=true")
    args = parser.parse_args(argv)
    settings = make_settings([], args.changes)
    compute, config = choose_compute(settings), get_preset(args.model)
    versions = f"firth {__version__}, torch {torch.__version__}"
    say(f"{versions}; {compute}; {args.model}, {args.tokens:,} tokens per step {' '.join(args.changes)}")
    speeds_by_length: dict[int, list[Speed]] = {}
    for length in map(int, args.lengths.split(",")):
        workload = make_workload(config, length, args.tokens)
        name = f"{args.model} {workload.rows}x{length}"
        speeds_by_length[length] = measure_length(name, workload, compute, args.steps, settings)
        for s in speeds_by_length[length]:
            say(f"{name}: {s.side} {s.tokens_per_second:,.0f} tokens/s {gigabytes(s.memory)}")
        # After each length, so that an interrupted run keeps its results.
        if args.plot and any(speeds_by_length.values()):
            write_page(f"{args.model} on {compute}", speeds_by_length, args.plot)
    rows = [
        (f"{max(args.tokens // length, 1)}x{length}", s.side, f"{s.tokens_per_second:,.0f}", gigabytes(s.memory))
        for length, speeds in speeds_by_length.items()
        for s in speeds
    ]
    show_table(f"{args.model} by row length", ("rows", "side", "tokens/s", "memory"), rows)
    if args.json:
        speeds = [{"length": n, **asdict(s)} for n, some in speeds_by_length.items() for s in some]
        print(json.dumps({"versions": versions, "machine": str(compute), "speeds": speeds}))


def gigabytes(memory: float | None) -> str:
    return "" if memory is None else f"{memory:.1f} GiB"


if __name__ == "__main__":
    main()
