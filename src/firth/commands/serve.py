"""The command `serve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def serve(checkpoints: str | Path | Sequence[str | Path] = (), **settings: Any) -> None:
    """Serve the playground and requests over HTTP until Ctrl-C.

    `settings` are fields of `firth.serve.config.ServeConfig`: port=8080. `runs` is a folder of training runs to watch.
    """
    from firth.serve.config import ServeConfig
    from firth.serve.server import serve as serve_checkpoints

    given = [checkpoints] if isinstance(checkpoints, str | Path) else checkpoints
    serve_checkpoints([str(checkpoint) for checkpoint in given], ServeConfig(**settings))
