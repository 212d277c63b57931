"""The held-out loss that a run is expected to reach: the scaling laws of `scaling_table.json`.

`benchmarks/scaling_sweep.py` measures the table: runs of several sizes, texts and passes for each architecture, all
with the default recipe, and the law that fits them (`scaling_law.py`). Each entry names the command that makes it.

Losses per token depend on text and vocabulary: more tokens of vocabulary make each one harder to predict. So a loss is
scaled by the ratio of the two unigram entropies, the loss of a model that knows token frequencies only. That is a rule
of thumb, and another text is named among the points where the plan extrapolates. The order of the sizes does not
depend on it.

An entry whose name ends in "(cpu)" was measured on a CPU, with models and texts that a CPU trains in minutes. A plan
for a CPU takes it where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firth.core.chart import format_tick
from firth.core.files import read_object
from firth.lab.scaling_law import ScalingFit, ScalingLaw

TABLE_FILE = Path(__file__).with_name("scaling_table.json")
ENTROPY_TOLERANCE = 0.05  # relative difference of unigram entropies from which the text counts as another one
RANGE_TOLERANCE = 1.05  # factor by which a run may leave the measured range: token counts of a plan are estimates


@dataclass(frozen=True)
class ExpectedLoss:
    """A measured law, and what it was measured on."""

    fit: ScalingFit
    family: str
    objective: str
    unigram_entropy: float
    command: str
    assumed: str = ""  # what was not measured

    def loss(self, parameters: float, tokens: float, text_tokens: float, unigram_entropy: float) -> float:
        """Return the expected held-out loss, in nats per token of the text's own tokenizer."""
        return self.fit.law.loss(parameters, tokens, text_tokens) * unigram_entropy / self.unigram_entropy

    def extrapolations(
        self, parameters: float, tokens: float, text_tokens: float, unigram_entropy: float
    ) -> dict[str, str]:
        """Return in which respects a run lies outside of the measured ones, each with the measured range."""
        fit, found = self.fit, dict[str, str]()
        for name, value, (low, high) in (
            ("parameters", parameters, fit.parameters_range),
            ("tokens", tokens, fit.tokens_range),
            ("passes", tokens / text_tokens, fit.passes_range),
        ):
            if not low / RANGE_TOLERANCE <= value <= high * RANGE_TOLERANCE:
                here, least, most = (format_tick(float(f"{x:.3g}")) for x in (value, low, high))
                found[name] = f"{here} where {least if least == most else f'{least} to {most}'} were measured"
        if abs(unigram_entropy / self.unigram_entropy - 1) > ENTROPY_TOLERANCE:
            found["text"] = (
                f"unigram entropy {unigram_entropy:.2f}, and {self.unigram_entropy:.2f} of the text that was measured"
            )
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


def read_loss_table(table: Mapping[str, Any] | None = None) -> dict[str, ExpectedLoss]:
    """Return the laws by architecture, and those of other objectives, from the table of the package."""
    return {name: parse_entry(entry) for name, entry in (table or read_object(TABLE_FILE)).items()}


def parse_entry(entry: Mapping[str, Any]) -> ExpectedLoss:
    ranges = {name: tuple(entry[name]) for name in ("parameters_range", "tokens_range", "passes_range")}
    intervals = {name: tuple(bounds) for name, bounds in entry["intervals"].items()}
    fit = ScalingFit(law=ScalingLaw(**entry["law"]), intervals=intervals, mean_error=entry["mean_error"], **ranges)
    facts = {name: entry[name] for name in ("family", "objective", "unigram_entropy", "command")}
    return ExpectedLoss(fit, **facts, assumed=entry.get("assumed", ""))
