"""The options of `--engine`, as fields that become options of commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TOPIC = "Cluster"  # in --help


@dataclass(kw_only=True)
class EngineOptions:
    """How `prepare` and `tokenizer` spread their work."""

    engine: Literal["local", "ray"] = field(
        default="local",
        metadata={
            "help": "Work on this machine, or by tasks on a Ray cluster (pip install 'firth[ray]').",
            "topic": TOPIC,
        },
    )
    address: str | None = field(
        default=None,
        metadata={
            "help": "Join the Ray cluster at this address, or 'auto'. Default: start one on this machine.",
            "metavar": "HOST:PORT",
            "topic": TOPIC,
        },
    )
    document_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Skip a document that takes this many seconds; 0: no limit. Default: 60.",
            "bounds": {"ge": 0},
            "common": False,
            "topic": TOPIC,
        },
    )
