"""The doctor beside a running training: the rules of `log_rules.py` on the log so far, one line per finding, once.

The seeds of a fine-tuning are judged one after the other, by the rules that hold without a unigram entropy
(`FINETUNING_RULES`). They share what was reported: five seeds with one illness say so once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firth.core.console import warn
from firth.train.findings import Finding, Rule, examine
from firth.train.log_rules import LOG_RULES, LogFacts, References
from firth.train.recipe import TrainingConfig

CHECKS_PER_RUN = 20  # times that a running log is judged
MIN_LINES = 40  # lines between two judgements, at least
MAX_LINES = 20_000  # lines in memory; of more, every second one is kept


class LiveDoctor:
    """Collects the lines of the log and says what is wrong, each finding once."""

    def __init__(
        self,
        training: TrainingConfig,
        references: References,
        run: str,
        rules: Sequence[Rule[LogFacts]] = LOG_RULES,
        reported: dict[str, Finding] | None = None,
    ) -> None:
        self.training, self.references, self.run, self.rules = training, references, run, rules
        self.lines: list[Mapping[str, Any]] = []
        self.timings: Mapping[str, Any] = {}  # the loop's own, which grow
        self.reads_timings = any(rule.id == "input-bound" for rule in rules)
        self.num_unjudged = 0
        self.reported = {} if reported is None else reported  # by rule

    def observe(self, line: Mapping[str, Any]) -> None:
        """Take a line of the log; now and then, judge all of them."""
        self.lines.append(line)
        self.num_unjudged += 1
        if len(self.lines) > MAX_LINES:
            self.lines = self.lines[::2]
        interval = max(self.training.max_steps // self.training.logging_steps // CHECKS_PER_RUN, MIN_LINES)
        if self.num_unjudged >= interval or ("skipped" in line and "divergence" not in self.reported):
            self.judge(is_finished=False)

    def judge(self, is_finished: bool) -> None:
        """Report findings that have not been reported yet."""
        self.num_unjudged = 0
        facts = LogFacts(self.training, self.lines, self.references, is_finished, timings=self.timings, run=self.run)
        try:
            findings = examine(self.rules, facts)
        except Exception as e:  # a wrong rule must not end a training
            warn(f"the doctor could not judge the log so far ({type(e).__name__}: {e}). Training continues.")
            return
        for finding in findings:
            if finding.rule not in self.reported:
                self.reported[finding.rule] = finding
                warn(f"{finding.line} See `firth doctor {self.run}`.")
