"""The doctor beside a running training: the rules of `log_rules.py` on the log so far, one line per finding, once.

What is found is also written to `findings.json` in the run folder: the tab Runs shows it until `firth doctor`, which
computes when nothing else does, has examined the run.

The seeds of a fine-tuning are judged one after the other, by the rules that hold without a unigram entropy
(`FINETUNING_RULES`). They share what was reported: five seeds with one illness say so once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from firth.core.console import warn
from firth.core.files import replace_nonfinite, write_json
from firth.train.findings import Finding, Rule, examine, sort_findings
from firth.train.log_rules import LOG_RULES, LogFacts, References
from firth.train.recipe import TrainingConfig

FINDINGS_FILE = "findings.json"
CHECKS_PER_RUN = 20  # times that a running log is judged
MIN_LINES = 40  # lines between two judgements, at least
MAX_LINES = 20_000  # lines in memory; of more, every second one of a step is kept


class LiveDoctor:
    """Collects the lines of the log and says what is wrong, each finding once."""

    def __init__(
        self,
        training: TrainingConfig,
        references: References,
        run: str,
        rules: Sequence[Rule[LogFacts]] = LOG_RULES,
        reported: dict[str, Finding] | None = None,
        recommended_rate: float | None = None,
        file: Path | None = None,
    ) -> None:
        self.training, self.references, self.run, self.rules = training, references, run, rules
        self.lines: list[Mapping[str, Any]] = []
        self.timings: Mapping[str, Any] = {}  # the loop's own, which grow
        self.reads_timings = any(rule.id == "input-bound" for rule in rules)
        self.num_unjudged = 0
        self.reported = {} if reported is None else reported  # by rule
        self.recommended_rate, self.file = recommended_rate, file

    def observe(self, line: Mapping[str, Any]) -> None:
        """Take a line of the log; now and then, judge all of them."""
        self.lines.append(line)
        self.num_unjudged += 1
        if len(self.lines) > MAX_LINES:
            self.lines = [x for i, x in enumerate(self.lines) if i % 2 == 0 or "loss" not in x or "skipped" in x]
        interval = max(self.training.max_steps // self.training.logging_steps // CHECKS_PER_RUN, MIN_LINES)
        if self.num_unjudged >= interval or ("skipped" in line and "divergence" not in self.reported):
            self.judge(is_finished=False)

    def judge(self, is_finished: bool) -> None:
        """Report findings that have not been reported yet."""
        self.num_unjudged = 0
        facts = LogFacts(
            self.training,
            self.lines,
            self.references,
            is_finished,
            self.recommended_rate,
            timings=self.timings,
            run=self.run,
        )
        try:
            findings = examine(self.rules, facts)
        except Exception as e:  # a wrong rule must not end a training
            warn(f"the doctor could not judge the log so far ({type(e).__name__}: {e}). Training continues.")
            return
        new = [finding for finding in findings if finding.rule not in self.reported]
        for finding in new:
            self.reported[finding.rule] = finding
            warn(f"{finding.line} See `firth doctor {self.run}`.")
        if new:
            self.write(facts.last_step)

    def write(self, step: int) -> None:
        """Write what was found so far; a disk that is full costs the file alone."""
        if self.file is None:
            return
        with suppress(OSError):
            findings = [finding.to_dict() for finding in sort_findings(self.reported.values())]
            write_json(self.file, replace_nonfinite({"step": step, "findings": findings}))

    @property
    def last_title(self) -> str:
        """The last finding in a few words; empty where nothing is wrong."""
        return next(reversed(self.reported.values())).title if self.reported else ""
