"""What each checkpoint of a run makes of a text: the words for its blanks, or its continuation.

A checkpoint is loaded when somebody asks, on the CPU, and forgotten afterwards: a run that is watched keeps its memory,
and its GPU. One sample is computed at a time. Its text is kept: the same question is not computed again, and what a
checkpoint made of a text is still told when the run has removed the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.generate import GenerationConfig, fill, generate_results
from firth.generate.fill import can_fill
from firth.models import load_model
from firth.serve.runs import WatchedRun
from firth.train.checkpoint import list_checkpoints

MAX_CHECKPOINTS = 6  # the last ones
MAX_PARAMETERS = 300_000_000
NUM_GUESSES, NUM_NEW_TOKENS = 5, 24
SAMPLING = GenerationConfig(max_new_tokens=NUM_NEW_TOKENS, temperature=0.8, top_p=0.9)
BLANK_PATTERN = re.compile(r"\[MASK\]|<mask>|___")

DEFAULT_SENTENCE, DEFAULT_PROMPT = "The ___ is in the city.", "The"

MAX_KEPT = 64  # pairs of a run and a text

Sample = dict[str, Any]


def list_sampled_checkpoints(folder: Path) -> list[tuple[str, int | None]]:
    """Return name and step of the checkpoints of a run, in order; `final` is the last one, without a step."""
    numbered = [path for path in reversed(list_checkpoints(folder)) if (path / "config.json").is_file()]
    found: list[tuple[str, int | None]] = [(path.name, int(path.name.removeprefix("checkpoint-"))) for path in numbered]
    if (folder / "final" / "config.json").is_file():
        found.append(("final", None))
    return found[-MAX_CHECKPOINTS:]


class SampleStore:
    """Samples by run and text, and by checkpoint. `sample` runs in `worker` alone, one call at a time."""

    def __init__(self) -> None:
        self.worker = ThreadPoolExecutor(1, "firth-sample")
        self.kept: OrderedDict[tuple[Path, int, str], dict[str, tuple[int, Sample]]] = OrderedDict()

    def sample(self, run: WatchedRun, text: str) -> list[Sample]:
        """Return what each checkpoint writes or fills in, by step; the seed is the same for all.

        Without a text, a model that fills blanks gets a sentence with one, and any other model a prompt.
        """
        key = (run.folder, run.version, text)  # a log that begins anew is another run
        known = self.kept.setdefault(key, {})
        self.kept.move_to_end(key)
        for name, step in list_sampled_checkpoints(run.folder):
            folder = run.folder / name
            stamp = (folder / "config.json").stat().st_mtime_ns
            if name not in known or known[name][0] != stamp:
                known[name] = (stamp, sample_checkpoint(folder, name, step, text))
        while len(self.kept) > MAX_KEPT:
            self.kept.popitem(last=False)
        found = [sample for _, sample in known.values()]
        return sorted(found, key=lambda sample: math.inf if sample["step"] is None else sample["step"])


def sample_checkpoint(folder: Path, name: str, step: int | None, text: str) -> dict[str, Any]:
    model = load_model(folder)
    if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        raise UserError(f"{name} has more than {MAX_PARAMETERS:,} parameters: serve it as a model.")
    text = text or (DEFAULT_SENTENCE if can_fill(model) else DEFAULT_PROMPT)
    if BLANK_PATTERN.search(text):
        guesses = [
            {"guesses": [{"text": guess.text, "probability": guess.probability} for guess in blank.guesses]}
            for blank in fill(model, text, NUM_GUESSES)
        ]
        return {"checkpoint": name, "step": step, "text": "", "blanks": guesses}
    (result,) = generate_results(model, [text], SAMPLING)
    return {"checkpoint": name, "step": step, "text": result["text"], "blanks": []}
