"""Entry point of the command `firth` and of `python -m firth`."""

from __future__ import annotations

import gc
import os
import signal

SIGINT_EXIT_CODE = 130  # after Ctrl-C


def main() -> None:
    """Run a command. While libraries load, for a second or two, Ctrl-C ends the process silently."""
    handler = signal.signal(signal.SIGINT, lambda *_: os._exit(SIGINT_EXIT_CODE))
    gc.disable()  # objects of libraries live forever: collecting them costs time at start and later
    from firth.cli.main import main as run

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
