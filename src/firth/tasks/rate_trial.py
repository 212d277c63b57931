"""Choose the learning rate of a fine-tuning by short trials that read train alone.

The best rate depends on the model, its pretraining and the examples, so no table of defaults has it. A trial trains
for a tenth of the steps, with a warm-up and a decay of its own, on one part of train, and measures the loss on the
rest. Dev is never read: a rate that dev has chosen would make the scores on dev too good.

A short run needs a higher rate than a long one: where steps must both reach a distant minimum and average out noise,
the best rate falls with the root of their number (Nemirovski et al. 2009, section 2.1). So each rate is tried
`sqrt(steps of the run / steps of the trial)` times as high, about 3.2. Without that, trials choose rates that are far
too high for the run (docs/results.md, "Rates and optimizers").

The loss decides, not the score: on a few hundred examples it varies far less, it needs no generated answers, and every
task has one. Losses vary too, so the default rate is kept unless another one is better by more than one standard
error of the paired difference (the one-standard-error rule of Breiman et al. 1984, section 3.4.3).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from firth.core.console import format_count
from firth.core.hashing import hash_uint64
from firth.core.serialization import to_dict
from firth.tasks.recipe import FinetuneRecipe
from firth.tokens.permutation import permute_indices
from firth.train.resume import COMPUTE_FIELDS, read_intermediate, write_intermediate

RATE_TRIAL_FILE = "learning_rate.json"
TRIAL_SHARE = 0.1  # of the steps of a seed, for each rate
MIN_TRIAL_STEPS = 20  # fewer say too little
HELD_OUT_SHARE = 0.2  # of the training examples
MIN_HELD_OUT_EXAMPLES, MAX_HELD_OUT_EXAMPLES = 64, 512
MIN_HELD_OUT_BATCHES = 8  # the standard error is that over batches
SPLIT_SEED = zlib.crc32(b"learning rate trial")
# Fields of a recipe that no trial depends on: files whose contents have checksums, what is done with seeds and dev, and
# where a step is computed and shown. Every other field does, so a new one is compared unless it is listed here.
FIELDS_OUTSIDE_TRIALS = (
    *COMPUTE_FIELDS,
    *("threads", "output_dir", "train", "dev", "unlabeled", "dev_checksum", "baseline", "seeds", "minutes", "skips"),
    *("eval_steps", "save_steps", "save_total_limit", "async_save", "logging_steps", "load_best", "early_stopping"),
)
MODEL_PATH_FIELDS = ("checkpoint", "teacher", "augment_model", "json_schema")  # may be written in several ways


@dataclass(frozen=True)
class RateTrial:
    """What was tried, as `learning_rate.json` holds it. A resumed run reads it and repeats no finished rate."""

    rates: tuple[float, ...]
    default: float
    recipe_checksum: str = ""  # of what a trial depends on beside its rate
    steps: int = 0  # of each rate
    factor: float = 1.0  # the trial of a rate has this times the rate, as it is shorter
    train_examples: int = 0
    held_out_examples: int = 0
    # By rate, in the order of `rates`: the loss of each held-out batch; empty where the loss diverged.
    batch_losses: tuple[tuple[float, ...], ...] = ()
    chosen: float | None = None
    reason: str = ""
    skipped: bool = False
    seconds: float = field(default=0.0, compare=False)

    @property
    def losses(self) -> list[float]:
        """Mean held-out loss of each rate; inf where it diverged."""
        return [fmean(batches) if batches else math.inf for batches in self.batch_losses]

    def save(self, file: Path) -> None:
        write_intermediate(file, asdict(self))

    def same_plan(self, other: RateTrial) -> bool:
        """Whether the trials of the other one are those of this one."""
        mine, theirs = ((t.rates, t.default, t.recipe_checksum) for t in (self, other))
        return mine == theirs

    def to_results(self) -> dict[str, Any]:
        """The entry `learning_rate_trial` of results.json."""
        facts = asdict(self)
        del facts["batch_losses"]
        return facts | {"losses": [loss if math.isfinite(loss) else None for loss in self.losses]}


def checksum_trial_recipe(recipe: FinetuneRecipe) -> str:
    """Return the CRC-32 of all that a trial depends on, as hex."""
    facts = {name: value for name, value in to_dict(recipe).items() if name not in FIELDS_OUTSIDE_TRIALS}
    facts |= {name: str(Path(facts[name]).resolve()) for name in MODEL_PATH_FIELDS if facts.get(name)}
    facts["tasks"] = {name: [data.task, data.prefix] for name, data in recipe.tasks.items()}
    return f"{zlib.crc32(json.dumps(facts, sort_keys=True, default=str).encode()):08x}"


def load_trial(file: Path) -> RateTrial | None:
    """Return the saved trials of learning rates; None without them, or where the file is damaged."""
    return read_intermediate(file, RateTrial)


def num_trial_steps(max_steps: int) -> int:
    """
    >>> num_trial_steps(600), num_trial_steps(1)
    (60, 0)
    """
    return int(TRIAL_SHARE * max_steps)


def trial_rate_factor(max_steps: int) -> float:
    """Return the factor from a rate of the run to that of its trial.

    >>> round(trial_rate_factor(600), 3)
    3.162
    """
    return math.sqrt(max_steps / num_trial_steps(max_steps))


def num_held_out(num_examples: int) -> int:
    """
    >>> num_held_out(400), num_held_out(67_000)
    (80, 512)
    """
    return min(int(HELD_OUT_SHARE * num_examples), MAX_HELD_OUT_EXAMPLES)


def find_split_obstacle(num_examples: int) -> str | None:
    """Return that train is too small to split; None where it is not."""
    if num_held_out(num_examples) >= MIN_HELD_OUT_EXAMPLES:
        return None
    least = math.ceil(MIN_HELD_OUT_EXAMPLES / HELD_OUT_SHARE)
    return f"train has {format_count(num_examples, 'example')}, and a trial needs {least}"


def find_trial_obstacle(recipe: FinetuneRecipe, num_examples: int, max_steps: int | None) -> str | None:
    """Return why no rate can be tried in this run; None where nothing does. The steps may not be known yet."""
    if recipe.task == "preference":
        return "the loss of preferences favours rates at which answers stop to be fluent"
    if recipe.unfreeze_every:
        return "layers are unfrozen one after the other, and a tenth of the steps would train the head alone"
    if obstacle := find_split_obstacle(num_examples):
        return obstacle
    if max_steps is not None and num_trial_steps(max_steps) < MIN_TRIAL_STEPS:
        least = math.ceil(MIN_TRIAL_STEPS / TRIAL_SHARE)
        return f"the run has {format_count(max_steps, 'step')}, and a trial needs {least}"
    return None


def split_for_trial(num_examples: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the examples to train on, and of those held out. The seed fixes the split."""
    order = permute_indices(np.arange(num_examples), num_examples, int(hash_uint64(seed, SPLIT_SEED))).tolist()
    held_out = num_held_out(num_examples)
    return sorted(order[held_out:]), sorted(order[:held_out])


def held_out_batch_size(num_examples: int, batch_size: int) -> int:
    """Return the batch size of the run, or a smaller one that makes enough batches for a standard error.

    >>> held_out_batch_size(512, 16), held_out_batch_size(64, 32)
    (16, 8)
    """
    return min(batch_size, num_examples // MIN_HELD_OUT_BATCHES)


def choose_rate(trial: RateTrial) -> tuple[float, str]:
    """Return the rate with the lowest held-out loss, or the default where that is as good within one standard error."""
    losses, default = trial.losses, trial.rates.index(trial.default)
    if not any(map(math.isfinite, losses)):
        return min(trial.rates), "the loss diverged at every rate, so it is the lowest"
    best = losses.index(min(losses))
    table = ", ".join(f"{rate:g}: {format_loss(loss)}" for rate, loss in zip(trial.rates, losses, strict=True))
    measured = f"held-out loss by rate {table}"
    if best == default:
        return trial.default, f"the lowest {measured}"
    if math.isfinite(losses[default]):
        error = standard_error(trial.batch_losses[default], trial.batch_losses[best])
        if losses[default] - losses[best] <= error:
            return trial.default, f"the default, as {trial.rates[best]:g} is better by chance at most; {measured}"
    return trial.rates[best], f"the lowest {measured}"


def standard_error(a: Sequence[float], b: Sequence[float]) -> float:
    """Standard error of the mean of the paired differences.

    >>> round(standard_error([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 3.0, 3.0]), 3)
    0.289
    """
    return stdev(x - y for x, y in zip(a, b, strict=True)) / math.sqrt(len(a))


def format_loss(loss: float | None) -> str:
    """
    >>> format_loss(0.51249), format_loss(None)
    ('0.512', 'diverged')
    """
    return f"{loss:.3f}" if loss is not None and math.isfinite(loss) else "diverged"
