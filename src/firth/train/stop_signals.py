"""Stop a run by a signal: after the current step, or within seconds where a step takes longer."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from firth.core.console import say, warn
from firth.core.errors import Interrupted

STOP_GRACE_SECONDS = 3.0  # from a signal to the end of the process, where a step takes longer
PEER_GRACE_SECONDS = 1.0  # more for ranks other than 0, whose end would disturb rank 0


class StopRequest(threading.Event):
    """Set when a signal requests a stop; `signal_number` is that signal, or 0.

    Python runs a signal handler between two bytecodes of the main thread. The backward pass of a large model is one
    call, of a minute or more, so a flag that is read after the step comes too late. A thread therefore waits for the
    signal (`signal.set_wakeup_fd`). After `grace_seconds` it ends the process itself, but only while the loop
    computes gradients or evaluates: then weights and optimizer are those of the last whole step. `state_lock` says so:
    the loop holds it at all other times.
    """

    signal_number = 0

    def __init__(self) -> None:
        super().__init__()
        self.state_lock, self.left, self.is_evaluating = threading.Lock(), threading.Event(), False

    @contextmanager
    def computing(self, is_evaluating: bool = False) -> Iterator[None]:
        """Mark a part of the loop that changes neither weights nor optimizer: the process may end in it."""
        self.is_evaluating = is_evaluating
        self.state_lock.release()
        try:
            yield
        finally:
            self.state_lock.acquire()

    def watch(self, fd: int, save_before_exit: Callable[[bool], bool], grace_seconds: float) -> None:
        """Wait for a signal; end the process if the loop has not ended soon after it."""
        with open(fd, "rb", buffering=0) as pipe:
            numbers = iter(lambda: pipe.read(1), b"")  # until it is closed, when the loop has ended
            number = next((n[0] for n in numbers if n[0] in (signal.SIGINT, signal.SIGTERM)), 0)
        if not number or self.left.wait(grace_seconds):
            return
        with self.state_lock:
            if self.left.is_set():
                return
            exits = True
            try:
                exits = save_before_exit(self.is_evaluating)
            except Exception as e:
                warn(f"no checkpoint could be written ({e}).")
            finally:
                if exits:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(128 + number)


@contextmanager
def handle_stop_signals(
    announce: bool = True,
    save_before_exit: Callable[[bool], bool] | None = None,
    grace_seconds: float = STOP_GRACE_SECONDS,
) -> Iterator[StopRequest]:
    """Let Ctrl-C or SIGTERM request a stop after the current step; a second Ctrl-C stops at once.

    An `Interrupted` raised inside gets the signal's exit code, 128 + signal number. `save_before_exit` is called,
    in another thread, for a step that takes longer than `grace_seconds`.
    """
    stop = StopRequest()

    def request_stop(number: int, frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.is_set():
            stop.signal_number = number
            hint = " (Ctrl-C again stops at once, without saving)" if number == signal.SIGINT else ""
            if announce:
                say(f"stopping after this step{hint}")
            stop.set()

    with stop.state_lock:
        if threading.current_thread() is not threading.main_thread():
            yield stop
            return
        previous_handlers = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        if save_before_exit is not None:
            threading.Thread(target=stop.watch, args=(read_fd, save_before_exit, grace_seconds), daemon=True).start()
        try:
            yield stop
        except Interrupted as e:
            e.code = 128 + (stop.signal_number or signal.SIGINT)
            raise
        finally:
            stop.left.set()
            signal.set_wakeup_fd(previous_fd)
            os.close(write_fd)  # ends the thread, which closes the other end
            if save_before_exit is None:
                os.close(read_fd)
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
