"""Every fault a few times over, and what was left: a table. Run with `pytest -m slow -rP tests/faults/test_table.py`.

A run of 24 steps with a checkpoint every 4 is hit by a fault somewhere, and then goes on. Three things are counted:

- *nothing lost*: in the end the log has each step once, and the text of each step is what it would have been;
- *checkpoint intact*: after the fault the newest checkpoint from before it is there, and its checksums agree;
- *resume equal*: log, weights and optimizer are those of a run that no one disturbed, bit for bit. For what changes a
  run by itself (a step that is no number, smaller micro-batches), of a run with the same fault that was not stopped.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from firth.core import files
from firth.core.files import find_corruption
from firth.lab.prove_resume import compare_runs
from firth.models import Model, ModelConfig
from firth.models.presets import bert, gpt2, t5
from firth.recipes import DEFAULT_TOKENIZERS, pretraining_recipe
from firth.text import Corpus
from firth.tokens import prepare, train_tokenizer
from firth.train import Recipe, TrainingRun, pretrain, read_log, save_recipe
from firth.train.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow
runs = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
STEPS, SAVE = 24, 4
TIMES = 6  # of each fault, two for each family
FAMILIES = ("bert", "gpt2", "t5")
Fault = Callable[["Case"], None]


class Case(NamedTuple):
    """A run that a fault hits at a step, and one of the same recipe that it does not."""

    recipe: Recipe
    straight: Recipe
    step: int
    rng: random.Random
    patch: pytest.MonkeyPatch

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output_dir)

    def before(self) -> int:
        """The newest checkpoint that must be there when the fault comes; another may be under way beside the run."""
        return (self.step - 1) // SAVE * SAVE - (SAVE if self.recipe.async_save else 0)


class Stopped(Exception):  # noqa: N818, no error
    """As if the process ended here."""


def hook_at(case: Case, do: Callable[[], None], at: int) -> Callable[..., TrainingRun]:
    def make(*given: Any, **named: Any) -> TrainingRun:
        return TrainingRun(*given, **named, hooks=[(1, lambda step, model: do() if step == at else None)])

    return make


def go(case: Case, do: Callable[[], None] | None = None, at: int | None = None, resume: bool = False) -> None:
    """A run in this process, in which something happens after a step."""
    with case.patch.context() as patch:
        if do is not None:
            patch.setattr(runs, "TrainingRun", hook_at(case, do, at or case.step))
        pretrain(case.recipe, resume=resume)


def stop() -> None:
    raise Stopped


# --- the faults


# A run that waits after a step until someone has done something to it.
PROGRAM = """
import importlib, sys, time
from pathlib import Path
from firth.train import Recipe, TrainingRun, load_recipe
runs = importlib.import_module("firth.train.pretrain")
place, step = Path(sys.argv[1]), int(sys.argv[2])

def hold(now, model):
    if now == step:
        place.with_suffix(".reached").touch()
        while not place.with_suffix(".done").exists():
            time.sleep(0.001)

runs.TrainingRun = lambda *given, **named: TrainingRun(*given, **named, hooks=[(1, hold)])
runs.pretrain(load_recipe(place, Recipe), resume=True)
"""


def in_a_process(case: Case, number: signal.Signals) -> None:
    """Start the run in a process of its own, and send it a signal when it has come to the step."""
    place = Path(f"{case.folder}.yaml")
    save_recipe(case.recipe, place)
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-c", PROGRAM, str(place), str(case.step)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while not place.with_suffix(".reached").exists():
        assert process.poll() is None, "it ended before its time"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)
    process.send_signal(number)
    place.with_suffix(".done").touch()
    assert process.wait(300) != 0


def kill(case: Case) -> None:
    in_a_process(case, signal.SIGKILL)


def terminate(case: Case) -> None:
    in_a_process(case, signal.SIGTERM)


@contextmanager
def no_file_longer_than(size: int) -> Iterator[Callable[[], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disk_full(case: Case) -> None:
    """From a step on no file takes more than a few thousand bytes, until the run gives up at its end."""
    size = case.rng.choice([2500, 20_000])  # the log is refused too, or only weights and moments
    with no_file_longer_than(size) as fill, pytest.raises(OSError, match="File too large"):
        go(case, fill)


def read_only(case: Case) -> None:
    """From a step on nothing new can be made in the folder."""
    real = Path.mkdir

    def refused(self: Path, *given: Any, **named: Any) -> None:
        if self.parent == case.folder:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        real(self, *given, **named)

    with case.patch.context() as patch, pytest.raises(OSError, match="Read-only"):
        go(case, lambda: patch.setattr(files.Path, "mkdir", refused))


def harm(case: Case, change: Callable[[bytes], bytes]) -> None:
    """Stop after a step, and change a file of the newest checkpoint. The one before it is what must be intact."""
    with pytest.raises(Stopped):
        go(case, stop)
    newest = list_checkpoints(case.folder)[0]
    file = case.rng.choice(sorted(p for p in newest.rglob("*") if p.is_file()))
    file.write_bytes(change(file.read_bytes()))


def truncated(case: Case) -> None:
    harm(case, lambda data: data[: case.rng.randrange(len(data))])


def flipped(case: Case) -> None:
    def flip(data: bytes) -> bytes:
        place = case.rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << case.rng.randrange(8))]) + data[place + 1 :]

    harm(case, flip)


def with_losses(case: Case, change: Callable[[Model, int, Any], Any]) -> None:
    """Let the losses of both runs be changed in the same way: by the model, the step and the batch."""

    def make(*given: Any, hooks: Any = (), **named: Any) -> TrainingRun:
        run = TrainingRun(*given, **named, hooks=list(hooks))
        tokens = {run.batch_fn(step)[0].input_ids.tobytes(): step + 1 for step in range(STEPS)}
        now = [0]

        def losses(batch: Any) -> Any:
            now[0] = tokens.get(batch.input_ids.numpy().tobytes(), now[0])
            return change(run.model, now[0], batch)

        run.loss_fn = losses
        return run

    with case.patch.context() as patch:
        patch.setattr(runs, "TrainingRun", make)
        pretrain(case.straight)

        def stopping(*given: Any, **named: Any) -> TrainingRun:
            return make(*given, **named, hooks=[(1, lambda step, model: stop() if step == case.step else None)])

        patch.setattr(runs, "TrainingRun", stopping)
        with pytest.raises(Stopped):
            pretrain(case.recipe)
        patch.setattr(runs, "TrainingRun", make)
        pretrain(case.recipe, resume=True)


def out_of_memory(case: Case) -> None:
    """There is room for 2 of 4 rows, from the step before the fault on; a resumed run finds as little."""

    def change(model: Model, step: int, batch: Any) -> Any:
        if len(batch.input_ids) > 2 and step >= case.step - 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model.losses(batch)

    with_losses(case, change)


def no_number(case: Case) -> None:
    """The losses of the steps before and after the fault are NaN."""

    def change(model: Model, step: int, batch: Any) -> Any:
        factor = math.nan if step in (case.step - 1, case.step + 1) else 1.0
        return {name: factor * value for name, value in model.losses(batch).items()}

    with_losses(case, change)


FAULTS: dict[str, Fault] = {
    "kill -9": kill,
    "SIGTERM": terminate,
    "disk full": disk_full,
    "read-only folder": read_only,
    "truncated file": truncated,
    "flipped bit": flipped,
    "out of memory": out_of_memory,
    "loss is no number": no_number,
}
COMPARED_WITH_ITSELF = ("out of memory", "loss is no number")  # which change a run by themselves


# --- the table


def model_of(family: str, size: int) -> ModelConfig:
    return t5(1, 32, 2, 64, size) if family == "t5" else {"bert": bert, "gpt2": gpt2}[family](1, 32, 2, size)


@pytest.fixture(scope="module")
def recipes(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    """A recipe for each family, and an undisturbed run of it."""
    place, found = tmp_path_factory.mktemp("table"), dict[str, Recipe]()
    sizes: dict[str, Any] = dict(max_steps=STEPS, save_steps=SAVE, max_seq_length=32, per_device_train_batch_size=4)
    plain: dict[str, Any] = dict(compile=False, bf16=False, ema_decay=0.9, eval_steps=10, eval_rows=8)
    for family in FAMILIES:
        corpus = Corpus([corpus_file])
        tokenizer = train_tokenizer(
            (d.text for d in corpus), DEFAULT_TOKENIZERS[model_of(family, 400).architecture], 400
        )
        prepare(corpus, tokenizer, place / family)
        found[family] = pretraining_recipe(
            model_of(family, tokenizer.vocab.size),
            data=str(place / family),
            tokenizer=tokenizer.fingerprint,
            output_dir=str(place / f"{family}-straight"),
            **sizes,
            **plain,
        )
        pretrain(found[family])
    return found


def outcome(name: str, case: Case) -> Counter[str]:
    """Let a fault come, look at what is left, go on, and compare."""
    FAULTS[name](case)
    if name not in COMPARED_WITH_ITSELF:
        whole = [int(p.name.split("-")[1]) for p in list_checkpoints(case.folder) if find_corruption(p) is None]
        harmed = len(list_checkpoints(case.folder)) - len(whole)
        does_harm = name in ("truncated file", "flipped bit")
        expected = (case.step - 1) // SAVE * SAVE - SAVE if does_harm else case.before()
        intact = harmed <= does_harm and max(whole, default=0) >= max(expected, 0)
        go(case, resume=True)
    else:
        intact = all(find_corruption(p) is None for p in list_checkpoints(case.folder))
    lines = [line for line in read_log(case.folder / "log.jsonl") if "data" in line]
    same = compare_runs(case.folder, Path(case.straight.output_dir))
    once = [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return Counter({"lost": once and same["same_data"], "intact": intact, "equal": all(same.values())})


def test_the_table_of_faults(
    recipes: dict[str, Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {}
    for name in FAULTS:
        found: Counter[str] = Counter()
        for i in range(TIMES):
            straight, rng = recipes[FAMILIES[i % 3]], random.Random(f"{name} {i}")
            place = tmp_path / f"{name.replace(' ', '-')}-{i}"
            if name in COMPARED_WITH_ITSELF:
                straight = replace(straight, output_dir=f"{place}-straight", per_device_train_batch_size=4)
            first = SAVE * 2 + 2 if name in ("truncated file", "flipped bit") else SAVE + 2
            recipe = replace(straight, output_dir=str(place), async_save=i % 2 == 0)
            found += outcome(name, Case(recipe, straight, rng.randrange(first, STEPS - 2), rng, monkeypatch))
        rows[name] = [found[key] for key in ("lost", "intact", "equal")]
    capsys.readouterr()
    print("| fault | times | nothing lost | last whole checkpoint intact | resume equal |")
    print("| --- | --- | --- | --- | --- |")
    for name, counts in rows.items():
        print(f"| {name} | {TIMES} | " + " | ".join(f"{count} of {TIMES}" for count in counts) + " |")
    assert all(count == TIMES for counts in rows.values() for count in counts), rows
