"""The held-out loss that a run is expected to reach: the scaling laws of `scaling_table.json`.

`benchmarks/scaling_sweep.py` measures the table: runs of several sizes, texts and passes for each architecture, all
with the default recipe, and the law that fits them (`scaling_law.py`). Each entry names the command that makes it.

Losses per token depend on vocabulary and text. A larger vocabulary has longer tokens, and a loss per byte hardly
depends on it: loss and tokens are converted by the bytes per token that our tokenizers have on the text that was
measured (`BYTES_PER_TOKEN`). Another text of as large a vocabulary is scaled by the ratio of the unigram entropies, the
loss of a model that knows token frequencies only. That is a rule of thumb, and another text is named among the points
where the plan extrapolates. The order of the sizes does not depend on it.

An entry whose name ends in "(cpu)" was measured on a CPU, with models and texts that a CPU trains in minutes. A plan
for a CPU takes it where there is one, and so do the doctor and the page of live runs for a run on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.chart import format_tick
from firth.core.files import read_object
from firth.lab.scaling_law import ScalingFit, ScalingLaw
from firth.models import count_parameters
from firth.objectives.registry import describe_objective, held_out_objective
from firth.train.recipe import Recipe

TABLE_FILE = Path(__file__).with_name("scaling_table.json")
ENTROPY_TOLERANCE = 0.05  # relative difference of unigram entropies from which the text counts as another one
RANGE_TOLERANCE = 1.05  # factor by which a run may leave the measured range: token counts of a plan are estimates

# Of en_wiki and en_books, by kind and size of the vocabulary (docs/history.md, the law of the loss).
VOCABULARY_SIZES = (4096, 8192, 16384, 32768)
BYTES_PER_TOKEN = {"wordpiece": (3.228, 3.751, 4.169, 4.486), "byte-bpe": (3.348, 3.763, 4.129, 4.433)}
UNIGRAM_ENTROPY = {"wordpiece": (6.694, 7.025, 7.185, 7.220), "byte-bpe": (6.894, 7.162, 7.328, 7.385)}


class RunSize(NamedTuple):
    """What the expected loss of a run depends on."""

    parameters: float
    tokens: float  # that are read
    text_tokens: float
    unigram_entropy: float
    vocab_size: int


class VocabularyEffect(NamedTuple):
    """Bytes per token and unigram entropy of a vocabulary, over those of another one, on the same text."""

    length: float
    entropy: float


def vocabulary_effect(kind: str, size: int, other_size: int) -> VocabularyEffect:
    """Return what another size of the vocabulary changes, between and up to the sizes that were measured.

    >>> effect = vocabulary_effect("wordpiece", 16384, 8192)
    >>> round(effect.length, 2), round(effect.entropy, 2)
    (1.11, 1.02)
    """
    at, kind = np.log([size, other_size]), kind if kind in BYTES_PER_TOKEN else "wordpiece"
    pairs = [np.interp(at, np.log(VOCABULARY_SIZES), curve[kind]) for curve in (BYTES_PER_TOKEN, UNIGRAM_ENTROPY)]
    return VocabularyEffect(*(float(own / other) for own, other in pairs))


@dataclass(frozen=True)
class ExpectedLoss:
    """A measured law, and what it was measured on."""

    fit: ScalingFit
    family: str
    objective: str
    unigram_entropy: float
    vocab_size: int
    tokenizer_kind: str
    command: str
    assumed: str = ""  # what was not measured

    def loss(self, run: RunSize) -> float:
        """Return the expected held-out loss, in nats per token of the text's own tokenizer."""
        length, entropy = vocabulary_effect(self.tokenizer_kind, run.vocab_size, self.vocab_size)
        loss = self.fit.law.loss(run.parameters, run.tokens * length, run.text_tokens * length)
        return loss * length * run.unigram_entropy / (self.unigram_entropy * entropy)

    def extrapolations(self, run: RunSize) -> dict[str, str]:
        """Return in which respects a run lies outside of the measured ones, each with the measured range."""
        fit, found = self.fit, dict[str, str]()
        effect = vocabulary_effect(self.tokenizer_kind, run.vocab_size, self.vocab_size)
        for name, value, (low, high) in (
            ("parameters", run.parameters, fit.parameters_range),
            ("tokens", run.tokens * effect.length, fit.tokens_range),
            ("passes", run.tokens / run.text_tokens, fit.passes_range),
        ):
            if not low / RANGE_TOLERANCE <= value <= high * RANGE_TOLERANCE:
                here, least, most = (format_tick(float(f"{x:.3g}")) for x in (value, low, high))
                found[name] = f"{here} where {least if least == most else f'{least} to {most}'} were measured"
        usual = self.unigram_entropy * effect.entropy
        if abs(run.unigram_entropy / usual - 1) > ENTROPY_TOLERANCE:
            found["text"] = f"unigram entropy {run.unigram_entropy:.2f}, and {usual:.2f} of the text that was measured"
        if self.assumed:
            found["law"] = self.assumed
        return found


def find_law(
    table: Mapping[str, ExpectedLoss], architecture: str, objective: str | None, device_type: str = ""
) -> ExpectedLoss:
    """Return the law of an objective, "encoder, mlm", or else that of the architecture's default objective.

    Of each the one that was measured on this type of device is preferred: "encoder, mlm (cpu)".
    """
    for name in (f"{architecture}, {objective}", architecture):
        for key in (entry_name(name, device_type), name):
            if key in table:
                return table[key]
    raise KeyError(architecture)


def entry_name(name: str, device_type: str) -> str:
    """Return the name of an entry of the table that was measured on this type of device.

    >>> entry_name("encoder", "cuda"), entry_name("encoder, mlm", "cpu")
    ('encoder', 'encoder, mlm (cpu)')
    """
    return f"{name} (cpu)" if device_type == "cpu" else name


def expect_run_loss(
    recipe: Recipe, tokens: float, text_tokens: int, unigram_entropy: float, device_type: str
) -> float | None:
    """Return the expected loss of a run on this type of device that has read `tokens`; None outside of measured runs.

    Another text than the measured one is no reason for None: the loss is scaled by its unigram entropy.
    """
    if recipe.checkpoint or recipe.teacher or not tokens:
        return None
    objective = describe_objective(held_out_objective(recipe.objective))["name"]
    law = find_law(read_loss_table(), recipe.model.architecture, objective, device_type)
    if objective != law.objective or recipe.model.family != law.family:
        return None
    size = RunSize(count_parameters(recipe.model), tokens, text_tokens, unigram_entropy, recipe.model.vocab_size)
    return None if law.extrapolations(size).keys() - {"text"} else law.loss(size)


def read_loss_table(table: Mapping[str, Any] | None = None) -> dict[str, ExpectedLoss]:
    """Return the laws by architecture, and those of other objectives, from the table of the package."""
    return {name: parse_entry(entry) for name, entry in (table or read_object(TABLE_FILE)).items()}


def parse_entry(entry: Mapping[str, Any]) -> ExpectedLoss:
    ranges = {name: tuple(entry[name]) for name in ("parameters_range", "tokens_range", "passes_range")}
    intervals = {name: tuple(bounds) for name, bounds in entry["intervals"].items()}
    fit = ScalingFit(law=ScalingLaw(**entry["law"]), intervals=intervals, mean_error=entry["mean_error"], **ranges)
    names = ("family", "objective", "unigram_entropy", "vocab_size", "tokenizer_kind", "command")
    facts = {name: entry[name] for name in names}
    return ExpectedLoss(fit, **facts, assumed=entry.get("assumed", ""))
