"""ServeConfig: where a server listens, who may ask, how much it accepts. Its fields are options of `firth serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Kinds of fine-tuning tasks by the route that asks them.
TASK_KINDS = {
    "/classify": ("classify", "pair", "relation", "word-in-context", "choice", "regress"),
    "/tag": ("tag",),
    "/answer": ("span-qa",),
}
LIMITS, BATCHES, ACCESS, PAGE = "Limits", "Batches", "Access", "Page"


def setting(default: Any, help: str, topic: str, metavar: str = "", **bounds: float) -> Any:
    """A field with the text, the topic and the bounds of its option."""
    return field(default=default, metadata={"help": help, "topic": topic, "metavar": metavar, "bounds": bounds})


@dataclass(frozen=True)
class ServeConfig:
    """The settings of a server.

    A request is refused as soon as it exceeds a limit: its body by 413, its tokens by 400, a full queue by 429, and its
    time by 504. So a server's memory and the time that a request waits are bounded.
    """

    host: str = setting("127.0.0.1", "Listen on this address; 0.0.0.0 is every one of this machine.", ACCESS, "ADDRESS")
    port: int = setting(8000, "Listen on this port; 0 takes a free one.", ACCESS, ge=0, le=65_535)
    api_key_file: str = setting(
        "",
        "Answer only requests with a key of this file, one on each line: `Authorization: Bearer KEY`.",
        ACCESS,
        "FILE",
    )
    runs: str = setting("", "Show the training runs in this folder on the page, while they run.", PAGE, "DIR")
    access_log: bool = setting(False, "Print a line for each request.", ACCESS)
    max_batch_size: int = setting(32, "Compute at most this many texts together.", BATCHES, ge=1)
    batch_wait_ms: float = setting(
        3.0, "Wait this long for requests that can be computed with the first one.", BATCHES, ge=0, le=1000
    )
    bf16: bool = setting(False, "Compute in bfloat16: faster on a GPU, with rounded weights.", BATCHES)
    max_queue: int = setting(128, "Let at most this many requests wait for a model.", LIMITS, ge=1)
    max_body_bytes: int = setting(1_000_000, "Accept requests of at most this many bytes.", LIMITS, ge=1)
    max_input_tokens: int = setting(8192, "Accept at most this many tokens in a request.", LIMITS, ge=1)
    max_output_tokens: int = setting(2048, "Generate at most this many tokens for a request.", LIMITS, ge=1)
    timeout_s: float = setting(60.0, "Answer within this many seconds.", LIMITS, gt=0)
