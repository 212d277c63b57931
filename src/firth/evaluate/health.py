"""The section *Health* of a report: what the doctor found in the run."""

from __future__ import annotations

from collections.abc import Sequence

from firth.core.html import HtmlPage
from firth.train.findings import Finding


def add_doctor_section(page: HtmlPage, findings: Sequence[Finding]) -> None:
    """Add what the doctor found, the worst first."""
    page.add_heading("Health")
    if findings:
        page.add_fragment("doctor.html.j2", "findings", findings)
    else:
        page.add_paragraph("The doctor found nothing wrong with this run.")
