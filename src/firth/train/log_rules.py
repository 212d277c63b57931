"""The doctor's rules on the log of a run: learning rate, loss against what it should be, heads, weights, speed.

What should the loss of a language model be? Five references, in nats per token, from the worst model to the best:

    ln V               all tokens equally likely: the loss before the first step
    unigram entropy    token frequencies alone, no context. Every run first falls to it, within some hundred steps
    bigram, trigram    Kneser-Ney models of the same shards (`static/ngram.py`): counted in seconds
    forecast           the scaling law of the planner for this size and this text (`lab/expected_loss.py`)

A rule compares smoothed losses: a step of few labels is noisy. Live, the same rules run on the log so far.

A mask rate that falls, phases and ramps change what a training loss means: a lower one may be no progress. Held-out
rows are made as at the end of the run, always. So their losses can be compared at any time, and with the training loss
once the mask rate is about the last one (`comparable_from`). Runs with phases are judged by their held-out loss.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from firth.core.console import format_count
from firth.models.config import AWDLSTMConfig
from firth.models.presets import PRESETS
from firth.objectives import MLM, MaskedNextToken, held_out_objective
from firth.train.findings import Evidence, Rule
from firth.train.log import token_loss_name
from firth.train.recipe import Recipe, TrainingConfig

SAME_NATS = 0.05  # smaller differences of a loss are not called better or worse
PLATEAU_NATS = 0.25  # distance from the unigram entropy within which a flat loss is a plateau
MIN_JUDGED_STEPS = 100  # steps below which a loss says little about its rate
MIN_LIVE_SHARE = 0.5  # of the run, before a running one is compared with the unigram entropy
RISE_NATS, RISE_SHARE = 0.3, 0.06  # a training loss that rises by more, and by this share, has lost what it learned
RATE_FACTOR = 4.0  # times the recommended learning rate, up or down, from which the rate is suspicious
SHORT_WARMUP_SHARE = 0.02  # of the run, below which a warm-up is short
SLOW_FALL_SHARE = 0.1  # of the distance to a bigram model: a loss that falls less in the last third is stuck
EARLY_SHARE = 0.2  # of the run, in which a warm-up matters
WARMUP_BUMP_NATS = 0.5  # by which an early loss rises again where the warm-up was too short
NOISE_FACTOR = 5.0  # standard deviations of a loss that its noise explains
SPIKE_WINDOW = 32  # lines before a spike that it is compared with
SPIKE_DEVIATIONS = 8.0  # robust standard deviations above their median
SPIKE_NATS = 0.5  # at least, of a spike
MISJUDGED_NATS = 30.0  # of a few labels: three that the model is sure of and gets wrong, 10 nats each, are no spike
FEW_LABELS_SHARE = 0.5  # of the median, below which a step has few labels: where all rows are masked by chance, say
SPIKE_RETURN_LINES = 8  # lines in which the loss returns; a jump that stays is another objective or another text
OVERFIT_NATS = 0.1  # rise of the held-out loss above its minimum
COMPARABLE_RATE = 1.25  # ratio of two mask rates, up to which their losses are compared
REPEATED_PASSES = 4.0  # passes from which repeated text is worth less (Muennighoff et al. 2023)
MEMORIZED_NATS = 0.5  # gap between held-out and training loss that repeated text leaves
MIN_PAIRS = 30_000  # pairs that a pair head must have seen to be called dead
DEAD_ACCURACY = 0.03  # above chance, below which a pair head is dead
MIN_DETECTED_TOKENS = 100_000  # tokens that a discriminator must have seen to be called dead
DEAD_DETECTION_SHARE = 0.99  # of the entropy of 'replaced or not', above which the detection loss is that of a constant
STRONG_GENERATOR_SHARE = 0.4  # of the masked tokens, below which a generator replaces too few
GROWN_WEIGHT_RMS, WEIGHT_GROWTH = 0.2, 5.0  # of the blocks' matrices: their size, and its factor since the first steps
MIN_DECAY = 1.0  # weight decay times the sum of the rates, below which decay has not yet bounded the weights
INPUT_BOUND_SHARE = 0.25  # of the time of a step that is spent waiting for data
INPUT_BOUND_SECONDS = 5.0  # in all: shorter waits are not worth a word
SMALL_BATCH_TOKENS = 8192  # tokens per micro-batch from which a GPU is not starved by the batch
SMALL_BATCH_USE, SMALL_BATCH_MEMORY = 0.2, 0.3  # of a GPU's operations and memory


class Series(NamedTuple):
    """Values of the log by step."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def smooth(self) -> Series:
        """Return running means over a twentieth of the points, at least five."""
        size = self.window
        if len(self.values) < 2 * size:
            return Series(self.steps[-1:], np.array([self.values.mean()]) if len(self.values) else self.values)
        sums = np.cumsum(np.concatenate([[0.0], self.values]))
        return Series(self.steps[size - 1 :], (sums[size:] - sums[:-size]) / size)

    @property
    def noise(self) -> float:
        """Standard deviation of a value around its neighbours, from the median difference of two that follow."""
        return float(np.median(np.abs(np.diff(self.values)))) / 0.954 if len(self.values) > 1 else 0.0

    @property
    def window(self) -> int:
        """Number of points of a running mean."""
        return max(len(self.values) // 20, 5)

    def tail(self, share: float) -> np.ndarray:
        """Return the values of the last `share` of the points."""
        return self.values[-max(math.ceil(len(self.values) * share), 1) :]


@dataclass(frozen=True)
class References:
    """What the loss should be, in nats per token; None where it is not known or cannot be compared."""

    ln_vocab: float | None = None
    unigram: float | None = None
    bigram: float | None = None
    trigram: float | None = None
    forecast: float | None = None

    def to_dict(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class LogFacts:
    """A log with what the rules compare it with."""

    training: TrainingConfig
    lines: Sequence[Mapping[str, Any]]
    references: References = field(default_factory=References)
    is_finished: bool = True
    recommended_rate: float | None = None  # for this model and optimizer
    timings: Mapping[str, Any] = field(default_factory=dict)  # sums over the steps (`timings.sum_timings`)
    flops_per_token: float = 0.0  # of a training step
    run: str = "run"  # folder, for the commands

    def series(self, name: str) -> Series:
        """Return the values of a field of the log, without lines that lack it and without skipped steps."""
        found = [(x["step"], x[name]) for x in self.lines if x.get(name) is not None and "skipped" not in x]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return Series(np.array(steps, float), np.array(values, float))

    @cached_property
    def names(self) -> set[str]:
        return {name for line in self.lines for name in line}

    @cached_property
    def train_loss(self) -> Series:
        return self.series(token_loss_name(self.names, ""))

    @cached_property
    def smoothed(self) -> Series:
        return self.train_loss.smooth()

    @cached_property
    def held_out_loss(self) -> Series:
        return self.series(token_loss_name(self.names))

    @cached_property
    def held_out_of_last_phase(self) -> Series:
        """Held-out losses since the last phase began: before, steps learn another task."""
        steps, values = self.held_out_loss
        is_late = steps > last_phase_from(self.training) * self.training.max_steps
        return Series(steps[is_late], values[is_late])

    @cached_property
    def comparable_loss(self) -> Series:
        """The smoothed training loss from where it means what the held-out loss means; often empty, at first."""
        share, (steps, values) = comparable_from(self.training), self.train_loss
        is_late = steps > (math.inf if share is None else share * self.training.max_steps)
        late = Series(steps[is_late], values[is_late])
        return late.smooth() if len(late) >= 5 else Series(steps[:0], values[:0])

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)

    @property
    def progress(self) -> float:
        return min(self.last_step / max(self.training.max_steps, 1), 1.0)

    @property
    def last_loss(self) -> float | None:
        """The held-out loss of the last evaluation, else the smoothed training loss."""
        series = self.held_out_loss if len(self.held_out_loss) else self.smoothed
        return float(series.values[-1]) if len(series) else None

    @property
    def kept_loss(self) -> float | None:
        """The held-out loss of the weights that the run keeps: the lowest one, where it goes back to those."""
        passes, held_out = self.series("passes"), self.held_out_loss
        if not (getattr(self.training, "keeps_best", False) and len(held_out) and len(passes)):
            return self.last_loss
        counts = np.interp(held_out.steps, passes.steps, passes.values) >= 1  # in the first pass nothing is saved
        return float(np.fmin.reduce([*held_out.values[counts], held_out.values[-1]]))

    @property
    def is_judged(self) -> bool:
        """Whether the run is long enough to be compared with the unigram entropy, or its detection with a constant."""
        return self.is_finished or (self.progress >= MIN_LIVE_SHARE and self.last_step >= MIN_JUDGED_STEPS)

    @property
    def is_above_unigrams(self) -> bool:
        entropy, loss = self.references.unigram, self.kept_loss
        return entropy is not None and loss is not None and loss > entropy - SAME_NATS

    @property
    def rate_ratio(self) -> float | None:
        """The learning rate over the recommended one."""
        return self.training.learning_rate / self.recommended_rate if self.recommended_rate else None

    def command(self, *options: str) -> str:
        """Return the command that repeats the run with other options, in a new folder."""
        return repeat_command(self.training, self.run, *options)


def rate_option(training: TrainingConfig, rate: float) -> str:
    """Return the option that sets the mask rate of the objective, which may be that of an MLM inside of it."""
    has_mlm = isinstance(training, Recipe) and hasattr(training.objective, "mlm")
    return f"objective{'.mlm' if has_mlm else ''}.rate={rate:g}"


def repeat_command(training: TrainingConfig, run: str, *options: str, command: str = "") -> str:
    """Return the command that repeats a run from its recipe, with some options changed, or another one on its data."""
    run = run.rstrip("/")
    new = ["--config", shlex.quote(f"{run}/recipe.yaml"), "--output-dir", shlex.quote(f"{run}-2")]
    if isinstance(training, Recipe):
        data = [f"--data {shlex.quote(source)}" for source in (training.sources.values() or [training.data])]
        return " ".join([f"firth {command or 'pretrain'}", model_name(training), *data, *new, *options])
    checkpoint = shlex.quote(str(getattr(training, "checkpoint", "") or "CHECKPOINT"))
    return " ".join([f"firth {command or 'finetune'}", checkpoint, *new, *options])


def model_name(recipe: Recipe) -> str:
    """Return the model argument of a command: a checkpoint, or a preset of the family that the recipe resizes."""
    if recipe.checkpoint:
        return shlex.quote(recipe.checkpoint)
    same = (name for name, preset in PRESETS.items() if preset.family == recipe.model.family)
    return next(same, recipe.model.architecture)


def format_rate(rate: float) -> str:
    return f"--learning-rate {rate:.1g}"


# --- the loss against word frequencies ------------------------------------------------------------------------------


def is_flat_at_unigrams(facts: LogFacts) -> bool:
    entropy, smoothed = facts.references.unigram, facts.smoothed
    if entropy is None or len(smoothed) < 3 or len(facts.train_loss) < 30:
        return False
    tail = smoothed.tail(1 / 3)
    third = max(len(tail) // 3, 1)
    is_near = abs(tail - entropy).max() < PLATEAU_NATS
    return bool(is_near and tail[:third].mean() - tail[-third:].mean() < SAME_NATS)


def check_plateau(facts: LogFacts) -> Evidence | None:
    if not (facts.is_judged and facts.is_above_unigrams and is_flat_at_unigrams(facts)):
        return None
    tail = facts.smoothed.tail(1 / 3)
    numbers = {
        "loss": facts.kept_loss,
        "unigram entropy": facts.references.unigram,
        "fall over the last third": float(tail[0] - tail[-1]),
        "steps": facts.last_step,
    }
    return Evidence(numbers, *explain_no_context(facts))


def check_above_unigrams(facts: LogFacts) -> Evidence | None:
    if not (facts.is_finished and facts.is_above_unigrams) or check_plateau(facts):
        return None
    if check_overfitting(facts):  # it knows too much context: that of the training text
        return None
    entropy = facts.references.unigram
    numbers = {"loss": facts.kept_loss, "unigram entropy": entropy, "steps": facts.last_step}
    train = float(facts.smoothed.values[-1]) if len(facts.smoothed) else math.inf
    if entropy is not None and train < entropy - SAME_NATS and isinstance(facts.training, Recipe):
        cause = "The training loss is below word frequencies: held-out text differs from the text of the training."
        sources = [*facts.training.sources.values()] or [facts.training.data]
        check = f"firth check {' '.join(map(shlex.quote, sources))} --kinds none"
        return Evidence(numbers | {"training loss": train}, cause, check)
    return Evidence(numbers, *explain_no_context(facts))


def explain_no_context(facts: LogFacts) -> tuple[str, str]:
    """Return why a model has learned token frequencies at most, and the command to try."""
    ratio, rate = facts.rate_ratio, facts.training.learning_rate
    learned = "The model knows how frequent tokens are at most, and uses no context."
    if ratio is not None and (ratio > RATE_FACTOR or ratio < 1 / RATE_FACTOR):
        assert facts.recommended_rate is not None
        cause = f"{learned} The learning rate of {rate:g} is {'above' if ratio > 1 else 'below'} the recommended one."
        return cause, facts.command(format_rate(facts.recommended_rate))
    if facts.last_step < 1000:
        steps = format_count(facts.last_step, "step is", "steps are")
        cause = f"{learned} {steps} few: most models leave this level later."
        return cause, facts.command(f"--max-steps {max(4 * facts.last_step, 1000)}")
    return f"{learned} The learning rate may not suit, or labels do not follow from the text.", facts.command(
        format_rate(rate / 4)
    )


# --- learning rate --------------------------------------------------------------------------------------------------


def check_rate_high(facts: LogFacts) -> Evidence | None:
    smoothed, rate = facts.smoothed, facts.training.learning_rate
    if len(smoothed) < 10 or facts.last_step < MIN_JUDGED_STEPS / 2:
        return None
    phased = has_phases(facts.training)
    judged, name = (facts.held_out_of_last_phase, "held-out ") if phased else (smoothed, "")
    if not len(judged):
        judged, name = smoothed, ""
    lowest_at = int(judged.values.argmin())
    lowest, last = float(judged.values[lowest_at]), float(judged.values[-1])
    noise = NOISE_FACTOR * facts.train_loss.noise * math.sqrt(2 / facts.train_loss.window)
    rose = last - lowest > max(RISE_NATS, RISE_SHARE * lowest, noise)
    if rose and phased:  # a training loss that falls meanwhile is learned by heart
        at_lowest = smoothed.values[max(int(np.searchsorted(smoothed.steps, judged.steps[lowest_at])) - 1, 0)]
        rose = bool(name and comparable_from(facts.training) is not None and smoothed.values[-1] > at_lowest)
    has_no_context = facts.is_above_unigrams or is_flat_at_unigrams(facts) or is_far_from_bigrams(facts)
    stuck = facts.is_judged and has_no_context and (facts.rate_ratio or 0.0) > RATE_FACTOR
    if not (rose or stuck):
        return None
    numbers = {f"lowest {name}loss": lowest, "at step": int(judged.steps[lowest_at])}
    numbers |= {f"last {name}loss": last, "rate": rate}
    if facts.recommended_rate:
        numbers["recommended rate"] = facts.recommended_rate
    better = facts.recommended_rate if stuck and facts.recommended_rate else rate / 4
    return Evidence(
        numbers,
        f"The {name or 'training '}loss rose again: updates are too large."
        if rose
        else "Updates are too large to learn context.",
        facts.command(format_rate(better)),
    )


def is_far_from_bigrams(facts: LogFacts) -> bool:
    """Whether a loss that hardly falls has less than half of what one word of context tells.

    A loss that jumped in the first steps is left to the rule on the warm-up.
    """
    unigram, bigram, loss = facts.references.unigram, facts.references.bigram, facts.kept_loss
    if (
        unigram is None
        or bigram is None
        or loss is None
        or facts.last_step < MIN_JUDGED_STEPS
        or find_early_rise(facts)
    ):
        return False
    tail = facts.smoothed.tail(1 / 3)
    return bool(loss > (unigram + bigram) / 2 and tail[0] - tail[-1] < SLOW_FALL_SHARE * (loss - bigram))


def has_phases(training: TrainingConfig) -> bool:
    """Whether the loss of a run changes its meaning on the way: mask rates, phases, ramps, stages of distillation."""
    if not isinstance(training, Recipe):
        return False
    ramps = training.batch_ramp or training.length_ramp or training.teacher
    return bool(training.objective.follows_progress or ramps or masks_other_share(training))


def masks_other_share(training: Recipe) -> bool:
    """Whether a training of masked and causal rows masks more or fewer of them than an evaluation, which masks half."""
    objective = training.objective
    if not isinstance(objective, MaskedNextToken) or not objective.has_both_kinds:
        return False
    return not is_about(objective.masked_share, 0.5)


def last_phase_from(training: TrainingConfig) -> float:
    """Return the share of the run at which the last phase of its objective begins; 0 for one phase."""
    return 1.0 - training.objective.phases[-1][0] if isinstance(training, Recipe) else 0.0


def comparable_from(training: TrainingConfig) -> float | None:
    """Return the share of the run from which its training loss can be compared with the held-out loss; None: never."""
    if not isinstance(training, Recipe):
        return 0.0
    has_more_parts = held_out_objective(training.objective) != training.objective
    if training.teacher or masks_other_share(training) or has_more_parts:
        return None
    start, rate_at = (
        max(last_phase_from(training), training.batch_ramp, training.length_ramp),
        training.objective.mask_rate_at,
    )
    last = rate_at(1.0)
    if last:
        far = [p for p in np.linspace(0, 1, 101).tolist() if not is_about(rate_at(p), last)]
        start = max([start, *far])
    return start


def is_about(rate: float | None, other: float) -> bool:
    """Whether two mask rates are so close that their losses can be compared."""
    return rate is not None and 1 / COMPARABLE_RATE <= rate / other <= COMPARABLE_RATE


def check_rate_low(facts: LogFacts) -> Evidence | None:
    smoothed, entropy, rate = facts.smoothed, facts.references.unigram, facts.training.learning_rate
    ratio = facts.rate_ratio
    if entropy is None or len(smoothed) < 10 or not facts.is_judged or (ratio is not None and ratio > 1 / RATE_FACTOR):
        return None
    last, middle = float(smoothed.values[-1]), float(smoothed.values[len(smoothed) // 2])
    total = float(smoothed.values[0]) - last
    late = middle - last
    far = SAME_NATS if ratio is not None else 2 * PLATEAU_NATS  # stricter where no recommended rate is known
    is_slow = last > entropy + far and late > max(SAME_NATS, 0.15 * total)
    if not (is_slow or (ratio is not None and ratio < 1 / RATE_FACTOR**2 and facts.is_above_unigrams)):
        return None
    numbers = {"loss": last, "unigram entropy": entropy, "fall in the second half": late, "rate": rate}
    if facts.recommended_rate:
        numbers["recommended rate"] = facts.recommended_rate
    better = facts.recommended_rate or 4 * rate
    return Evidence(
        numbers,
        "The loss falls steadily and has not yet reached token frequencies: updates are too small.",
        facts.command(format_rate(better)),
    )


def find_early_rise(facts: LogFacts) -> tuple[float, float, int] | None:
    """Return an early loss, the higher one after it and its step, where the warm-up is short and the loss jumped."""
    loss, steps = facts.train_loss, facts.training.max_steps
    if len(loss) < 10 or facts.training.warmup_steps >= max(SHORT_WARMUP_SHARE * steps, 10):
        return None
    early = loss.values[loss.steps <= max(EARLY_SHARE * steps, 20)]
    if not len(early):  # all early steps were skipped
        return None
    rises = early - np.minimum.accumulate(early)
    top = int(rises.argmax())
    if rises[top] < max(WARMUP_BUMP_NATS, NOISE_FACTOR * loss.noise):
        return None
    return float(early[: top + 1].min()), float(early[top]), int(loss.steps[top])


def check_warmup(facts: LogFacts) -> Evidence | None:
    """Examine the first steps. A loss that recovers and then ends high has two causes: this one, and the rate."""
    rise = find_early_rise(facts)
    if rise is None:
        return None
    before, highest, step = rise
    after = facts.smoothed.values[facts.smoothed.steps > step]
    if not len(after) or after.min() > before:  # it has not recovered: the rate alone is to blame
        return None
    return Evidence(
        {"loss before": before, "highest loss": highest, "at step": step}
        | {"warm-up steps": facts.training.warmup_steps},
        "The loss rose in the first steps, then recovered: the full rate came too early.",
        facts.command(f"--warmup-steps {max(facts.training.max_steps // 10, 10)}"),
    )


# --- divergence and spikes ------------------------------------------------------------------------------------------


def skipped_lines(facts: LogFacts) -> list[Mapping[str, Any]]:
    """Return the lines of steps that were skipped for NaN or Inf; fp16's search for its loss scale is none."""
    lines = [line for line in facts.lines if "skipped" in line and "spike" not in str(line["skipped"])]
    return [x for x in lines if not (facts.training.fp16 and "gradient" in str(x["skipped"]))]


def check_divergence(facts: LogFacts) -> Evidence | None:
    lines = skipped_lines(facts)
    if not lines:
        return None
    numbers = {"skipped steps": len(lines), "first at step": lines[0]["step"], "reason": str(lines[0]["skipped"])}
    resume = facts.command("--rewind 0").replace(shlex.quote(f"{facts.run.rstrip('/')}-2"), shlex.quote(facts.run))
    return Evidence(
        numbers,
        "The loss or the gradient was NaN or infinite: a rate that is too high, or a broken row.",
        resume,
    )


def find_spikes(facts: LogFacts) -> list[tuple[int, float, float]]:
    """Return (step, loss, median before) of the losses that jump up and return."""
    loss, found = facts.train_loss, list[tuple[int, float, float]]()
    values, targets = loss.values, facts.series("targets")
    few = FEW_LABELS_SHARE * np.median(targets.values) if len(targets) else 0.0
    noisy_steps = {*targets.steps[targets.values < few].tolist()}
    least = max(SPIKE_NATS, MISJUDGED_NATS / np.median(targets.values)) if len(targets) else SPIKE_NATS
    if len(values) > SPIKE_WINDOW:
        windows = np.lib.stride_tricks.sliding_window_view(values, SPIKE_WINDOW)[:-1]
        medians = np.median(windows, axis=1)
        # Of some hundred windows one is quiet by chance: no deviation is smaller than the noise of the whole log.
        deviations = np.maximum(1.4826 * np.median(np.abs(windows - medians[:, None]), axis=1), loss.noise)
        jumps = values[SPIKE_WINDOW:] - medians
        for i in np.flatnonzero(jumps > np.maximum(SPIKE_DEVIATIONS * deviations, least)).tolist():
            after = values[SPIKE_WINDOW + i + 1 : SPIKE_WINDOW + i + 1 + SPIKE_RETURN_LINES]
            returns = len(after) and after.min() < medians[i] + 0.5 * jumps[i]
            if returns and loss.steps[SPIKE_WINDOW + i] not in noisy_steps:
                found.append((int(loss.steps[SPIKE_WINDOW + i]), float(values[SPIKE_WINDOW + i]), float(medians[i])))
    guarded = [x for x in facts.lines if "spike" in str(x.get("skipped", "")) and x.get("loss") is not None]
    return found + [(x["step"], x["loss"], float(np.median(values)) if len(values) else math.nan) for x in guarded]


def check_spikes(facts: LogFacts) -> Evidence | None:
    spikes = find_spikes(facts)
    # AWD-LSTM's embedding dropout hides a word for a whole step: without a frequent one the loss jumps.
    hides_words = isinstance(facts.training, Recipe) and isinstance(facts.training.model.recurrent, AWDLSTMConfig)
    if not spikes or hides_words:
        return None
    step, loss, median = max(spikes, key=lambda spike: spike[1] - spike[2])
    option = "--spike-factor 2" if not facts.training.spike_factor else format_rate(facts.training.learning_rate / 2)
    return Evidence(
        {"spikes": len(spikes), "highest at step": step, "loss": loss, "median before": median},
        "A step's text differs from the rest, or the rate is close to too high.",
        facts.command(option),
    )


# --- memorization ---------------------------------------------------------------------------------------------------


def check_overfitting(facts: LogFacts) -> Evidence | None:
    phased = has_phases(facts.training)
    held_out, train = facts.held_out_of_last_phase, facts.comparable_loss if phased else facts.smoothed
    if len(held_out) < 3 or len(train) < (1 if phased else 5):
        return None
    best_at = int(held_out.values.argmin())
    best, last = float(held_out.values[best_at]), float(held_out.values[-1])
    at_best = train.values[max(int(np.searchsorted(train.steps, held_out.steps[best_at])) - 1, 0)]
    # With phases the training loss at the best step may have another meaning: it must be below the held-out loss.
    falls = train.values[-1] < best if phased else train.values[-1] <= at_best + SAME_NATS
    if last < best + OVERFIT_NATS or not falls:
        return None
    best_step = int(held_out.steps[best_at])
    return Evidence(
        {"lowest held-out loss": best, "at step": best_step, "last held-out loss": last},
        "The held-out loss rises while the training loss falls: the model learns the training text by heart."
        + " The run ends with the weights of its lowest held-out loss." * getattr(facts.training, "keeps_best", False),
        facts.command(f"--max-steps {best_step}"),
    )


def check_repeated_data(facts: LogFacts) -> Evidence | None:
    passes, held_out = facts.series("passes"), facts.held_out_of_last_phase
    train = facts.comparable_loss if has_phases(facts.training) else facts.smoothed
    if not len(passes) or not len(held_out) or not len(train):
        return None
    gap = float(held_out.values[-1] - train.values[-1])
    if passes.values[-1] < REPEATED_PASSES or gap < max(MEMORIZED_NATS, 0.1 * float(train.values[-1])):
        return None
    reached = int(np.argmax(held_out.values <= held_out.values.min() + SAME_NATS))
    if held_out.steps[reached] > held_out.steps[-1] / 2:  # fewer passes would be worse
        return None
    if check_overfitting(facts) is not None:  # says the same, and more
        return None
    enough = float(np.interp(held_out.steps[reached], passes.steps, passes.values))
    return Evidence(
        {
            "passes": float(passes.values[-1]),
            "held-out loss no lower since pass": enough,
            "training loss": float(train.values[-1]),
            "held-out loss": facts.last_loss,
        },
        "The text was read so often that the training loss measures memory: take more text, or a smaller model.",
        facts.command(f"--num-train-epochs {math.ceil(enough)}"),
    )


# --- heads ----------------------------------------------------------------------------------------------------------


def check_pair_head(facts: LogFacts) -> Evidence | None:
    name = next((name for name in ("nsp", "sop") if f"{name}_accuracy" in facts.names), None)
    if name is None:
        return None
    accuracy, pairs = facts.series(f"{name}_accuracy"), facts.last_step * facts.training.global_batch_size
    tail = accuracy.tail(1 / 3)
    noise = 3 * math.sqrt(0.25 / max(len(tail) * facts.training.global_batch_size, 1))
    if pairs < MIN_PAIRS or not len(tail) or tail.mean() > 0.5 + max(DEAD_ACCURACY, noise):
        return None
    return Evidence(
        {"accuracy": float(tail.mean()), "chance": 0.5, "pairs": pairs},
        f"The {name.upper()} head guesses: sentences of a document do not belong together, or documents are too short.",
        facts.command("--objective mlm"),
    )


def check_dead_detection(facts: LogFacts) -> Evidence | None:
    loss, replaced, tokens = facts.series("rtd_loss"), facts.series("rtd_replaced"), facts.series("tokens")
    if not len(loss) or not len(tokens) or tokens.values[-1] < MIN_DETECTED_TOKENS or not facts.is_judged:
        return None
    share, last = float(replaced.tail(1 / 4).mean()), float(loss.tail(1 / 4).mean())
    if not 0 < share < 1:
        return None
    constant = -share * math.log(share) - (1 - share) * math.log(1 - share)
    if last < DEAD_DETECTION_SHARE * constant:
        return None
    return Evidence(
        {"detection loss": last, "loss of a constant": constant, "replaced tokens": share},
        "The discriminator gives every token the same probability: it detects nothing.",
        facts.command(format_rate(facts.training.learning_rate / 2)),
    )


def check_strong_generator(facts: LogFacts) -> Evidence | None:
    replaced, objective = facts.series("rtd_replaced"), getattr(facts.training, "objective", None)
    mlm = getattr(objective, "mlm", objective)
    if not len(replaced) or not isinstance(mlm, MLM) or facts.last_step < MIN_JUDGED_STEPS:
        return None
    share, rate = float(replaced.tail(1 / 4).mean()), mlm.mask_rate_at(7 / 8) or mlm.rate
    if share > STRONG_GENERATOR_SHARE * rate:
        return None
    return Evidence(
        {"replaced tokens": share, "masked tokens": rate, "right guesses of the generator": 1 - share / rate},
        "The generator restores most masked tokens, so few are left to detect. A quarter to a half of the "
        "discriminator's width is best (Clark et al. 2020, figure 3).",
        facts.command(rate_option(facts.training, 0.25)),
    )


# --- weights and speed ----------------------------------------------------------------------------------------------


def check_growing_weights(facts: LogFacts) -> Evidence | None:
    rms, rates = facts.series("weight_rms"), facts.series("learning_rate")
    if len(rms) < 6 or not len(rates):
        return None
    first, last = float(rms.values[0]), float(rms.values[-1])
    decay = facts.training.weight_decay * facts.last_step * mean_decay_rate(rates, facts.training)
    if last < GROWN_WEIGHT_RMS or last < WEIGHT_GROWTH * first or decay > MIN_DECAY:
        return None
    return Evidence(
        {"RMS of the blocks' matrices": last, "at first": first, "weight decay": facts.training.weight_decay}
        | {"decay times the sum of the rates": decay},
        "Muon's updates have a fixed norm, so weights grow until weight decay balances them, and then hardly change.",
        facts.command("--weight-decay 0.2"),
    )


def mean_decay_rate(rates: Series, training: TrainingConfig) -> float:
    """Return the mean, over the logged steps, of the rate that weight decay is multiplied by."""
    from firth.train.weight_decay import weight_decay_factor_at  # imported here: torch takes seconds to load

    steps, values = rates.steps.tolist(), rates.values.tolist()
    return mean(x * weight_decay_factor_at(step - 1, training, x) for step, x in zip(steps, values, strict=True))


def check_input_bound(facts: LogFacts) -> Evidence | None:
    seconds, wait = facts.timings.get("seconds", 0.0), facts.timings.get("data_wait", 0.0)
    if wait < INPUT_BOUND_SECONDS or wait < INPUT_BOUND_SHARE * seconds:
        return None
    return Evidence(
        {"share of the time": wait / seconds, "seconds": wait, "steps": facts.timings.get("steps", 0)},
        "Steps wait for batches: slow storage, or too few CPU cores for the dataloader.",
        facts.command("--threads 0"),
    )


def check_small_batch(facts: LogFacts) -> Evidence | None:
    timings, training = facts.timings, facts.training
    tokens = training.per_device_train_batch_size * training.max_seq_length
    flops = timings.get("device_flops", 0.0)
    if timings.get("device") != "cuda" or not flops or tokens >= SMALL_BATCH_TOKENS or check_input_bound(facts):
        return None
    use = facts.flops_per_token * timings["tokens"] / max(timings["seconds"], 1e-9) / flops
    memory = timings.get("memory_share", 1.0)
    if use > SMALL_BATCH_USE or memory > SMALL_BATCH_MEMORY:
        return None
    return Evidence(
        {"tokens of a micro-batch": tokens, "use of the device": use, "memory in use": memory},
        "The micro-batch is too small to keep the GPU busy.",
        facts.command("--per-device-train-batch-size auto"),
    )


LOG_RULES: tuple[Rule[LogFacts], ...] = (
    Rule(
        "plateau",
        "error",
        "the loss is stuck at word frequencies",
        f"over the last third of the steps the loss is within {PLATEAU_NATS} nats of the unigram entropy and flat",
        check_plateau,
    ),
    Rule(
        "above-unigrams",
        "error",
        "the run ended no better than word frequencies",
        f"the last loss of a finished run is not {SAME_NATS} nats below the unigram entropy",
        check_above_unigrams,
    ),
    Rule(
        "rate-too-high",
        "error",
        "the learning rate is too high",
        f"the smoothed training loss rose by {RISE_NATS} nats and {RISE_SHARE:.0%} above its minimum; or, with more "
        f"than {RATE_FACTOR:g} times the recommended rate, it stays at the unigram entropy, or hardly falls before "
        "half of the way to a bigram model",
        check_rate_high,
    ),
    Rule(
        "rate-too-low",
        "warning",
        "the learning rate is too low",
        "the loss is above the unigram entropy and still falls steadily, with less than a quarter of the recommended "
        "rate",
        check_rate_low,
    ),
    Rule(
        "warmup-too-short",
        "warning",
        "the warm-up is too short",
        f"an early loss rises by {WARMUP_BUMP_NATS} nats and {NOISE_FACTOR:g} standard deviations and recovers, and "
        f"the warm-up is less than {SHORT_WARMUP_SHARE:.0%} of the run",
        check_warmup,
    ),
    Rule("divergence", "error", "the run diverged", "a step was skipped for NaN or Inf", check_divergence),
    Rule(
        "loss-spikes",
        "warning",
        "the loss has spikes",
        f"a loss exceeds the median of the {SPIKE_WINDOW} lines before it by {SPIKE_DEVIATIONS:g} robust standard "
        f"deviations (of these lines and of the whole log), {SPIKE_NATS} nats and what three wrong labels can add, and "
        "returns; steps with less than half of the usual labels do not count",
        check_spikes,
    ),
    Rule(
        "overfitting",
        "warning",
        "the model overfits",
        f"the held-out loss is {OVERFIT_NATS} nats above its minimum while the training loss falls",
        check_overfitting,
    ),
    Rule(
        "repeated-data",
        "warning",
        "the text is learned by heart",
        f"after {REPEATED_PASSES:g} passes or more the held-out loss is {MEMORIZED_NATS} nats and 10% above the "
        f"training loss, and was within {SAME_NATS} nats of its minimum before half of the steps",
        check_repeated_data,
    ),
    Rule(
        "dead-pair-head",
        "warning",
        "the sentence pair head is dead",
        f"the accuracy of NSP or SOP is at chance after {MIN_PAIRS:,} pairs",
        check_pair_head,
    ),
    Rule(
        "dead-detection-head",
        "warning",
        "the replaced token detection is dead",
        f"its loss is that of a constant after {MIN_DETECTED_TOKENS:,} tokens",
        check_dead_detection,
    ),
    Rule(
        "strong-generator",
        "warning",
        "the generator is too strong",
        f"fewer than {STRONG_GENERATOR_SHARE:.0%} of the masked tokens are replaced",
        check_strong_generator,
    ),
    Rule(
        "growing-weights",
        "warning",
        "the weights grow under Muon",
        f"the RMS of the blocks' matrices is above {GROWN_WEIGHT_RMS} and {WEIGHT_GROWTH:g} times that of the first "
        f"steps, and weight decay times the sum of the rates is below {MIN_DECAY:g}",
        check_growing_weights,
    ),
    Rule(
        "input-bound",
        "warning",
        "steps wait for data",
        f"{INPUT_BOUND_SHARE:.0%} of the time, and {INPUT_BOUND_SECONDS:g} seconds in all, are spent waiting",
        check_input_bound,
    ),
    Rule(
        "small-batch",
        "info",
        "the batch is too small for the device",
        f"a micro-batch has fewer than {SMALL_BATCH_TOKENS:,} tokens on a GPU that is used to {SMALL_BATCH_USE:.0%} at "
        f"most, with {SMALL_BATCH_MEMORY:.0%} of its memory at most",
        check_small_batch,
    ),
)
# Rules on the log of a fine-tuning's seed: its loss has no unigram entropy to be compared with.
FINETUNING_RULES = tuple(rule for rule in LOG_RULES if rule.id in ("divergence", "loss-spikes", "rate-too-high"))
