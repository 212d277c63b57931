"""Findings: what the doctor says about a run, and the rules that say it.

A rule is an object with a name, a level and a check. The check reads facts of a run and returns the evidence, or None
where nothing is wrong. So a rule can be listed, documented and tested alone, and the same rule serves `firth doctor`,
the progress line of a run and its report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

from firth.core.html import format_cell

Level = Literal["info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("error", "warning", "info")  # the worst first
FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class Evidence:
    """The numbers that make a rule speak, the likely cause, and the command to try next."""

    numbers: Mapping[str, Any]
    cause: str
    command: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run."""

    rule: str
    level: Level
    title: str
    evidence: dict[str, Any]
    cause: str
    command: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def line(self) -> str:
        """The finding in one line, for the terminal of a running command."""
        return f"{self.title} ({self.numbers}). {self.cause}"

    @property
    def numbers(self) -> str:
        return ", ".join(f"{name} {format_cell(value)}" for name, value in self.evidence.items())


@dataclass(frozen=True)
class Rule(Generic[FactsT]):
    """A rule of the doctor: `check` returns the evidence where the facts show the illness, else None."""

    id: str
    level: Level
    title: str  # the finding in a few words
    criterion: str  # when the rule speaks, with its thresholds
    check: Callable[[FactsT], Evidence | None]

    def examine(self, facts: FactsT) -> Finding | None:
        evidence = self.check(facts)
        if evidence is None:
            return None
        return Finding(self.id, self.level, self.title, dict(evidence.numbers), evidence.cause, evidence.command)


def examine(rules: Iterable[Rule[FactsT]], facts: FactsT) -> list[Finding]:
    """Return the findings of all rules, in the order of the rules."""
    return [finding for rule in rules if (finding := rule.examine(facts)) is not None]


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with the worst first."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))
