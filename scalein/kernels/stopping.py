"""Stopping: a thread whose run has ended elsewhere (error, Ctrl-C, abandoned iterator) leaves at its next pause."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


class Stopped(BaseException):
    """Ends a thread's work; nobody sees it, since the run has an error of its own or no reader any more."""


def heed(stop: threading.Event) -> None:
    """From now on this thread ends when `stop` is set."""
    _thread.stop = stop


def leave_if_stopped() -> None:
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():
        raise Stopped


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as `sys.exit` would, so that what waits can clean up; only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
