"""Stopping: a thread whose run has ended elsewhere (error, Ctrl-C, abandoned iterator) leaves at its next pause."""

from __future__ import annotations

import threading

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
