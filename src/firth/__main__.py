"""The command `firth`, which is also `python -m firth`."""

from __future__ import annotations

import gc
import os
import signal

SIGINT_EXIT_CODE = 130  # the exit code after Ctrl-C


def main() -> None:
    """Run a verb. While the libraries load, which takes a second or two, Ctrl-C ends the process without a word."""
    usual = signal.signal(signal.SIGINT, lambda *_: os._exit(SIGINT_EXIT_CODE))
    gc.disable()  # libraries stay: nobody needs to look among them for what can go, now or later
    from firth.cli.main import main as run

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, usual)
    run()


if __name__ == "__main__":
    main()
