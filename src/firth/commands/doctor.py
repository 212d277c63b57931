"""The command `doctor`."""

from __future__ import annotations

from pathlib import Path

from firth.commands.results import DoctorResult


def doctor(run: str | Path) -> DoctorResult:
    """Examine the folder `run` of a pretraining or a fine-tuning, and return the findings and what the loss should be.

    Each finding has a rule, a level (error, warning or info), its evidence in numbers, the likely cause and a command
    to try next. Nothing is trained and nothing is written.
    """
    from firth.lab.doctor import diagnose_run

    return DoctorResult(diagnose_run(run).to_dict())
