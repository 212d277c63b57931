"""Several real processes, launched with the environment variables of torchrun: their jobs and their output."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 300  # seconds in which all must have ended
SLOW_PATIENCE = 1800  # seconds, for many jobs in more processes than a machine has cores


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(size: int, *words: object, **more: str) -> list[subprocess.Popen[str]]:
    """Start `python WORDS` once per rank, with the rank in the environment."""
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **more}
    shared |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}  # whatever the machine's name leads to
    return [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def ended(processes: Sequence[subprocess.Popen[str]], patience: float = PATIENCE) -> list[tuple[int, str, str]]:
    """The exit code, stdout and stderr of each process."""
    try:
        found = [p.communicate(timeout=patience) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, found, strict=True)]


def run(
    size: int,
    jobs: Sequence[Mapping[str, Any]],
    folder: Path,
    codes: Sequence[int] = (),
    patience: float = PATIENCE,
    **more: str,
) -> list[str]:
    """Let N processes run recipes one after the other and return their output; `codes` are the expected exit codes.

    A job is {"recipe": its file, and arguments of `pretrain`}, {"finetune": its file, and arguments of `finetune`} or
    {"words": a command line}; `harm` is a fault to inject.
    """
    plan = folder / f"plan-{size}-{free_port()}.json"
    plan.write_text(json.dumps(list(jobs)))
    found = ended(start(size, __file__, plan, **more), patience)
    assert [code for code, _, _ in found] == list(codes or [0] * size), "\n".join(err for _, _, err in found)
    return [err for _, _, err in found]


def work(jobs: Sequence[dict[str, Any]]) -> None:
    """The main function of one process."""
    import warnings

    from firth.core.errors import UserError
    from firth.tasks import FinetuneRecipe, finetune
    from firth.train import Interrupted, Recipe, load_recipe, pretrain

    warnings.simplefilter("ignore")
    for job in jobs:
        with harmed(**job.pop("harm", {"kind": ""})):
            if "words" in job:
                from firth.cli.main import main

                sys.argv = ["firth", *job["words"]]
                main()
            else:
                train, kind = (finetune, FinetuneRecipe) if "finetune" in job else (pretrain, Recipe)
                recipe: Any = load_recipe(Path(job.pop("finetune" if kind is FinetuneRecipe else "recipe")), kind)
                try:
                    train(recipe, **job)
                except (Interrupted, UserError) as e:
                    Path(f"{recipe.output_dir}-{os.environ['RANK']}.txt").write_text(f"{getattr(e, 'code', 2)}: {e}")


class Stopped(Exception):  # noqa: N818
    """Raised to interrupt a run at a given step."""


@contextlib.contextmanager
def harmed(kind: str, rank: int | None = None, step: int = -1, rows: int = 0) -> Iterator[None]:
    """Inject a fault into one rank, or into all.

    `memory`: out of memory above this many rows; `nan`: NaN losses from this step on; `stop`: killed after this step;
    `signal`: SIGTERM during this step; `fail`: this step raises an error.
    """
    import torch

    from firth.core.errors import UserError
    from firth.train import TrainingRun

    steps, runs = importlib.import_module("firth.train.step"), importlib.import_module("firth.train.pretrain")
    backward, here = steps.run_micro_batches, rank is None or rank == int(os.environ["RANK"])

    def broken(run: Any, losses_of: Any, micro: Any, counts: Any, now: int, *rest: Any) -> Any:
        if here and kind == "memory" and len(micro[0].input_ids) > rows:
            raise torch.OutOfMemoryError("none left")
        total, left = backward(run, losses_of, micro, counts, now, *rest)
        if here and now == step:
            if kind == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            if kind == "fail":
                raise UserError(f"step {step} went wrong in process {rank}.")
        return (total * torch.nan if here and kind == "nan" and now >= step else total), left

    def hook(now: int, model: Any) -> None:
        if kind == "stop" and now == step:
            raise Stopped

    steps.run_micro_batches = broken
    runs.TrainingRun = lambda *a, **k: TrainingRun(*a, **k, hooks=[(1, hook)])
    try:
        with contextlib.suppress(Stopped):
            yield
    finally:
        steps.run_micro_batches, runs.TrainingRun = backward, TrainingRun


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text()))
