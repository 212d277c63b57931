"""Choose several settings of a fine-tuning at once, by successive halving on a split of train.

`finetune --search N` draws N settings, trains all of them for a short time, keeps the best third, trains these three
times as long, and so on (Jamieson and Talwalkar 2016; a third at a time: Li et al. 2018, "Hyperband", section 3). Each
such round is a rung. Most of the time goes to settings that deserve it: twelve settings take the time of seven or eight
whole trainings, not of twelve. Three choices fit this to fine-tuning:

- A rung trains anew, with a warm-up and a decay of its own, at a rate that is higher as the run is shorter
  (`rate_trial.py` says why). So every trial is a function of the recipe alone: a stopped search repeats no finished
  trial, and makes the same choice.
- Settings compete with those of equal length. In a short rung more epochs always look better, even where the whole run
  would overfit. The last rung trains its finalists to the end, and there alone lengths are compared.
- The loss on the split decides all rungs but the last one: on a few hundred examples it varies far less than a score,
  and it needs no generated answers. In the last rung the task's score decides (`--metric`), as confident mistakes of a
  long training raise the loss where the score improves; the loss breaks ties.

The settings are a Latin hypercube (McKay et al. 1979): each setting has a value of its own out of m equal parts of
every range, so m settings try m learning rates, where a grid would try the cube root of m.

The score of the chosen setting on the split is the best of several, and so too good. Dev is never read by the search:
the scores of the final seeds on dev are the figures to report.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from firth.core.console import format_count
from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.recipes.finetuning import SEARCH_DIMENSIONS, search_rate_range
from firth.tasks.rate_trial import (
    MIN_TRIAL_STEPS,
    checksum_trial_recipe,
    find_split_obstacle,
    format_loss,
    num_held_out,
)
from firth.tasks.recipe import FinetuneRecipe
from firth.tokens.permutation import permute_indices
from firth.train.resume import write_intermediate

SEARCH_FILE = "search.json"
REDUCTION = 3  # of the settings from rung to rung, and of the steps the other way round
MAX_RUNGS = 4  # the first rung then has 1/27 of the steps
MIN_FINALISTS = 2  # settings in the last rung; one at least of each length
LENGTHS = (1.0, 2.0, 0.5)  # times the examples that the run would read; the first ones for few settings
MIN_SETTINGS_PER_LENGTH = 3
BATCH_FACTORS = (0.5, 1.0, 2.0)  # times the recipe's batch size
LAYER_DECAYS = (1.0, 0.95, 0.9, 0.8)  # ELECTRA and DeBERTa: 0.8 to 0.95
WARMUP_SHARES, DEFAULT_WARMUP_SHARE = (0.05, 0.1, 0.2), 0.1
MIN_BATCH_SIZES = {"embed": 2}  # by task: embed contrasts the texts of a batch
SEARCH_SEED = zlib.crc32(b"finetune search")
DIMENSION_WORDS = {
    "learning_rate": "learning rate",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch size",
    "layer_decay": "layer decay",
    "warmup_steps": "warm-up",
}


@dataclass(frozen=True)
class Setting:
    """One point of the search space. A dimension that is not searched has the recipe's value."""

    learning_rate: float
    length: float  # examples read, times those of the recipe: settings of equal length compete
    batch_size: int  # per_device_train_batch_size
    layer_decay: float
    warmup_share: float | None = None  # of the steps; None keeps the recipe's warmup_steps

    def num_steps(self, recipe: FinetuneRecipe) -> int:
        """Steps of a whole training with this setting: the examples of the recipe times `length`."""
        return max(1, round(self.length * recipe.max_steps * recipe.per_device_train_batch_size / self.batch_size))

    def apply(self, recipe: FinetuneRecipe, share: float = 1.0) -> FinetuneRecipe:
        """Return the recipe of a training with this setting, for a share of its steps and at a rate to match."""
        whole = self.num_steps(recipe)
        steps = max(1, round(share * whole))
        warmup = recipe.warmup_steps if share == 1 else min(steps // 10, recipe.warmup_steps)
        return replace(
            recipe,
            learning_rate=self.learning_rate * math.sqrt(whole / steps),
            per_device_train_batch_size=self.batch_size,
            layer_decay=self.layer_decay,
            max_steps=steps,
            warmup_steps=warmup if self.warmup_share is None else round(self.warmup_share * steps),
            ema_decay=recipe.ema_decay if share == 1 else 0.0,
            tail_average=recipe.tail_average if share == 1 else 0.0,
            search_fields=(),
        )


@dataclass(frozen=True)
class SearchTrial:
    """One setting in one rung."""

    rung: int
    setting: int
    steps: int
    examples: int  # read, with repetitions
    batch_losses: tuple[float, ...] = ()  # of the held-out batches; empty where the loss diverged
    score: float | None = None  # on the held-out examples, in the last rung
    score_error: float | None = None  # its standard error over these examples
    seconds: float = field(default=0.0, compare=False)

    @property
    def loss(self) -> float:
        """Mean held-out loss; inf where it diverged."""
        return fmean(self.batch_losses) if self.batch_losses else math.inf

    @property
    def loss_error(self) -> float | None:
        """Standard error of the loss over the held-out batches."""
        n = len(self.batch_losses)
        return stdev(self.batch_losses) / math.sqrt(n) if n > 1 else None

    def to_results(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["batch_losses"]
        return facts | {"loss": self.loss if math.isfinite(self.loss) else None, "loss_error": self.loss_error}


@dataclass(frozen=True)
class Search:
    """The plan of a search and what was tried so far, as `search.json` holds it."""

    settings: tuple[Setting, ...]  # the first one is the recipe's own
    shares: tuple[float, ...]  # by rung, of the steps of each setting
    fields: tuple[str, ...]  # searched; the others are held
    metric: str
    lower_is_better: bool
    epochs: float  # of a setting of length 1
    train_examples: int
    held_out_examples: int
    train_checksum: str
    recipe_checksum: str  # of what a trial depends on beside its setting
    trials: tuple[SearchTrial, ...] = ()
    chosen: int | None = None
    reason: str = ""

    def save(self, file: Path) -> None:
        write_intermediate(file, asdict(self))

    def same_plan(self, other: Search) -> bool:
        """Whether the trials of the other search are those of this one."""
        return replace(other, trials=(), chosen=None, reason="") == replace(self, trials=(), chosen=None, reason="")

    @property
    def num_rungs(self) -> int:
        return len(self.shares)

    def find_trial(self, rung: int, setting: int) -> SearchTrial | None:
        return next((t for t in self.trials if (t.rung, t.setting) == (rung, setting)), None)

    def group_by_length(self, settings: Sequence[int]) -> dict[float, list[int]]:
        groups: dict[float, list[int]] = defaultdict(list)
        for i in settings:
            groups[self.settings[i].length].append(i)
        return groups

    def rung_sizes(self) -> dict[float, list[int]]:
        """Return by length how many of its settings reach each rung."""
        groups = self.group_by_length(range(len(self.settings)))
        last = math.ceil(MIN_FINALISTS / len(groups))
        return {
            length: [
                *(max(min(last, len(group)), math.ceil(len(group) / REDUCTION**r)) for r in range(self.num_rungs - 1)),
                min(last, len(group)),
            ]
            for length, group in groups.items()
        }

    def entrants(self, rung: int) -> list[int]:
        """Return the settings that reach a rung; all trials before it are finished."""
        entrants, sizes = list(range(len(self.settings))), self.rung_sizes()
        for r in range(rung):
            groups = self.group_by_length(entrants)
            ranked = {length: sorted(group, key=partial(self.rank, r)) for length, group in groups.items()}
            entrants = sorted(i for length, group in ranked.items() for i in group[: sizes[length][r + 1]])
        return entrants

    def competitors(self, rung: int) -> list[int]:
        """Return the settings to train in a rung: where all settings of a length go on, nothing is to be decided."""
        sizes, groups = self.rung_sizes(), self.group_by_length(self.entrants(rung))
        return sorted(i for length, group in groups.items() if is_contested(sizes[length], rung) for i in group)

    def rank(self, rung: int, setting: int) -> tuple[float, float, int]:
        """Return a sort key, the best setting first: the loss, then the lower rate, then the order."""
        trial = self.find_trial(rung, setting)
        return (0.0 if trial is None else trial.loss), self.settings[setting].learning_rate, setting

    def planned_costs(self) -> list[list[float]]:
        """Return by rung the cost of each of its trials, in trainings of the recipe's own length."""
        costs: list[list[float]] = [[] for _ in self.shares]
        for length, sizes in self.rung_sizes().items():
            for rung, share in enumerate(self.shares):
                costs[rung] += [share * length] * sizes[rung] * is_contested(sizes, rung)
        return costs

    @property
    def cost(self) -> float:
        """Cost of the search in trainings of the recipe's own length."""
        return sum(map(sum, self.planned_costs()))

    def describe_setting(self, index: int) -> str:
        """Say the searched values of a setting: "learning rate 0.00073, 3 epochs, batch size 16"."""
        setting = self.settings[index]
        values = {
            "learning_rate": f"learning rate {setting.learning_rate:g}",
            "num_train_epochs": f"{setting.length * self.epochs:.3g} epochs",
            "per_device_train_batch_size": f"batch size {setting.batch_size}",
            "layer_decay": f"layer decay {setting.layer_decay:g}",
            "warmup_steps": f"warm-up {100 * (setting.warmup_share or 0):g}%",
        }
        return ", ".join(values[name] for name in self.fields)

    def describe_plan(self, recipe: FinetuneRecipe) -> list[str]:
        """Say what is searched, what is held, and what it costs."""
        times = self.cost / recipe.seeds
        seeds = "seed that follows" if recipe.seeds == 1 else f"{recipe.seeds} seeds that follow"
        plan = f"{len(self.settings)} settings in {self.num_rungs} rungs"
        split = f"{self.train_examples:,} examples of train and is measured on its other {self.held_out_examples:,}"
        lines = [
            f"search: {plan}, about {times:.1f} times the time of the {seeds}",
            f"varied: {list_dimensions(self.fields)}",
            f"each setting trains on {split}; dev is not read",
        ]
        if held := [name for name in SEARCH_DIMENSIONS if name not in self.fields]:
            few = "; other epochs need 6 settings" if "num_train_epochs" in {*held} & {*recipe.search_fields} else ""
            lines.append(f"held fixed: {list_dimensions(held)}{few}")
        if recipe.task == "preference":
            lines.append(
                "preference: no score here shows whether answers stay fluent. Read some before you use the model"
            )
        return lines

    def describe_rung(self, rung: int) -> str:
        """Say how many settings a rung trains, and for how long."""
        settings = format_count(len(self.competitors(rung)), "setting")
        share = f"1/{round(1 / self.shares[rung])} of their steps" if self.shares[rung] < 1 else "all of their steps"
        return f"rung {rung + 1} of {self.num_rungs}: {'the best ' if rung else ''}{settings}, {share}"

    def to_results(self) -> dict[str, Any]:
        """The entry `search` of results.json: every setting, every trial, the rungs and the choice."""
        costs = self.planned_costs()
        rungs = [
            {
                "share": share,
                "settings": len({t.setting for t in self.trials if t.rung == rung}),
                "examples": sum(t.examples for t in self.trials if t.rung == rung),
                "cost": sum(costs[rung]),
                "seconds": sum(t.seconds for t in self.trials if t.rung == rung),
            }
            for rung, share in enumerate(self.shares)
        ]
        settings = [{**asdict(s), "epochs": s.length * self.epochs} for s in self.settings]
        facts = asdict(self) | {"settings": settings, "trials": [t.to_results() for t in self.trials]}
        held = [name for name in SEARCH_DIMENSIONS if name not in self.fields]
        return facts | {"rungs": rungs, "cost": self.cost, "held": held}


def list_dimensions(names: Sequence[str]) -> str:
    """
    >>> list_dimensions(["learning_rate", "num_train_epochs"])
    'learning rate, epochs'
    """
    return ", ".join(DIMENSION_WORDS[name] for name in names)


# --- the plan -------------------------------------------------------------------------------------------------------


def find_search_obstacle(num_examples: int, max_steps: int | None) -> str | None:
    """Return why nothing can be searched in this run, and the remedy; None where nothing does."""
    if obstacle := find_split_obstacle(num_examples):
        return f"{obstacle}: add examples, or leave --search out"
    least = REDUCTION * MIN_TRIAL_STEPS
    if max_steps is not None and max_steps < least:
        steps = format_count(max_steps, "step")
        return f"the run has {steps}, and a search needs {least}: raise --num-train-epochs or --max-steps"
    return None


def plan_search(recipe: FinetuneRecipe, num_examples: int, metric: str = "", lower_is_better: bool = False) -> Search:
    """Return the settings and the rungs. The steps of the recipe are resolved, or 0 where nobody knows them yet."""
    lengths = choose_lengths(recipe)
    largest = math.ceil(recipe.search / len(lengths))
    num_rungs = count_rungs(largest, math.ceil(MIN_FINALISTS / len(lengths)), recipe.max_steps)
    held_out = num_held_out(num_examples)
    return Search(
        settings=draw_settings(recipe, lengths),
        shares=tuple(share_of(rung, num_rungs) for rung in range(num_rungs)),
        fields=tuple(name for name in recipe.search_fields if name != "num_train_epochs" or len(lengths) > 1),
        metric=metric,
        lower_is_better=lower_is_better,
        epochs=recipe.max_steps * recipe.global_batch_size / num_examples,
        train_examples=num_examples - held_out,
        held_out_examples=held_out,
        train_checksum=recipe.train_checksum,
        recipe_checksum=checksum_trial_recipe(recipe),
    )


def share_of(rung: int, num_rungs: int) -> float:
    """
    >>> [round(share_of(rung, 3), 3) for rung in range(3)]
    [0.111, 0.333, 1.0]
    """
    return float(REDUCTION ** (rung + 1 - num_rungs))


def is_contested(sizes: Sequence[int], rung: int) -> bool:
    """Whether a rung decides anything among settings of one length, given how many reach each rung.

    >>> [is_contested([4, 2, 2], rung) for rung in range(3)]
    [True, False, True]
    """
    return rung == len(sizes) - 1 or sizes[rung] > sizes[rung + 1]


def count_rungs(num_settings: int, num_finalists: int, max_steps: int) -> int:
    """Return the number of rungs: up to as few finalists, where the first rung has enough steps (0: not known).

    >>> count_rungs(12, 2, 3000), count_rungs(4, 1, 3000), count_rungs(100, 2, 3000), count_rungs(12, 2, 100)
    (3, 3, 4, 2)
    """
    rungs = 2
    while (
        math.ceil(num_settings / REDUCTION ** (rungs - 1)) > num_finalists
        and rungs < MAX_RUNGS
        and (not max_steps or max_steps * share_of(0, rungs + 1) >= MIN_TRIAL_STEPS)
    ):
        rungs += 1
    return rungs


def choose_lengths(recipe: FinetuneRecipe) -> tuple[float, ...]:
    """Return the lengths to try: each needs some settings of its own, which compete."""
    if "num_train_epochs" not in recipe.search_fields:
        return LENGTHS[:1]
    return LENGTHS[: max(1, recipe.search // MIN_SETTINGS_PER_LENGTH)]


def draw_settings(recipe: FinetuneRecipe, lengths: Sequence[float]) -> tuple[Setting, ...]:
    """Return the recipe's own setting, and a Latin hypercube for each length. The seed fixes the draw."""
    searched, batch = recipe.search_fields, recipe.per_device_train_batch_size
    own = Setting(
        recipe.learning_rate,
        lengths[0],
        batch,
        recipe.layer_decay,
        DEFAULT_WARMUP_SHARE if "warmup_steps" in searched else None,
    )
    settings = [own] * recipe.search
    low, high = (factor * recipe.learning_rate for factor in search_rate_range(recipe.task, bool(recipe.lora_rank)))
    batches = sorted({max(MIN_BATCH_SIZES.get(recipe.task, 1), round(factor * batch)) for factor in BATCH_FACTORS})
    for k, length in enumerate(lengths):
        members = list(range(k or len(lengths), recipe.search, len(lengths)))  # all of this length but `own`
        units = {name: draw_units(len(members), recipe.seed, k, d) for d, name in enumerate(SEARCH_DIMENSIONS)}
        for j, i in enumerate(members):
            values: dict[str, Any] = {"length": length}
            if "learning_rate" in searched:
                values["learning_rate"] = float(f"{low * (high / low) ** units['learning_rate'][j]:.1e}")
            if "per_device_train_batch_size" in searched:
                values["batch_size"] = pick(batches, units["per_device_train_batch_size"][j])
            if "layer_decay" in searched:
                values["layer_decay"] = pick(LAYER_DECAYS, units["layer_decay"][j])
            if "warmup_steps" in searched:
                values["warmup_share"] = pick(WARMUP_SHARES, units["warmup_steps"][j])
            settings[i] = replace(own, **values)
    return tuple(settings)


def draw_units(size: int, seed: int, group: int, dimension: int) -> list[float]:
    """Return one number in each of `size` equal parts of [0, 1), in a random order."""
    key = int(hash_uint64(seed, SEARCH_SEED, group, dimension))
    parts = permute_indices(np.arange(size), size, key) if size else np.arange(0)
    offsets = hash_uint64(key, np.arange(size)) / 2.0**64
    return ((parts + np.minimum(offsets, 0.999)) / max(size, 1)).tolist()


def pick(choices: Sequence[Any], unit: float) -> Any:
    return choices[int(unit * len(choices))]


# --- the halving ----------------------------------------------------------------------------------------------------


def run_halving(
    search: Search,
    try_setting: Callable[[Search, int, int], SearchTrial],
    save: Callable[[Search], None] = lambda search: None,
    begin_rung: Callable[[Search, int], None] = lambda search, rung: None,
) -> Search:
    """Run the trials that are not finished yet, rung by rung, and choose; `save` is called after each trial."""
    for rung in range(search.num_rungs):
        missing = [i for i in search.competitors(rung) if search.find_trial(rung, i) is None]
        if missing:
            begin_rung(search, rung)
        for i in sorted(missing, key=lambda i: search.settings[i].batch_size):  # one compiled step for each batch size
            search = replace(search, trials=(*search.trials, try_setting(search, rung, i)))
            save(search)
    return choose_setting(search)


def choose_setting(search: Search) -> Search:
    """Return the search with the finalist that has the best score, or the lowest loss where there is no score."""
    finals = [t for t in search.trials if t.rung == search.num_rungs - 1 and t.batch_losses]
    if not finals:
        rate = min(s.learning_rate for s in search.settings)
        raise UserError(
            f"The loss diverged with every setting of the last rung. Set a lower rate: --learning-rate {rate / 10:.1g}."
        )
    if all(t.score is not None for t in finals):
        sign = 1 if search.lower_is_better else -1
        best = min(finals, key=lambda t: (sign * (t.score or 0.0), t.loss, t.setting))
        reason = f"the best {search.metric} of {format_count(len(finals), 'finalist')} on the split"
    else:
        best = min(finals, key=lambda t: (t.loss, t.setting))
        reason = f"the lowest loss of {format_count(len(finals), 'finalist')} on the split, {format_loss(best.loss)}"
    return replace(search, chosen=best.setting, reason=reason)
