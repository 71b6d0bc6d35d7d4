"""Cancellation: a thread whose run has ended elsewhere (error, Ctrl-C, abandoned iterator) ends at its next check.

Checks are made before every call of a kernel and between the chunks of longer steps. What consists of long calls of
numpy or pyarrow runs in a thread of its own (`run_detached`), for which the caller does not have to wait.

Python raises KeyboardInterrupt in the main thread only. Runs in other threads are registered here, and end with it too:
the first flow that is made in the main thread puts a handler of SIGINT before Python's own, unless the program has
another one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")

POLL_S = 0.05
DETACHED_ROWS = 1 << 19  # from which a step over all rows takes so long that Ctrl-C must not wait for it
_local = threading.local()
_running: dict[int, int] = {}  # by thread: the runs it is in; without the main thread
_interrupted: set[int] = set()  # the threads among them that have yet to raise KeyboardInterrupt


class Cancelled(BaseException):
    """Unwinds the thread of a cancelled run. Never reported: the run has failed already, or is not read any more."""


def cancel_on(stop: threading.Event) -> None:
    """Cancel this thread's work when `stop` is set."""
    _local.stop = stop


@contextmanager
def cancelled_by(stop: threading.Event) -> Iterator[None]:
    """Within, this thread's work is cancelled when `stop` is set."""
    before: threading.Event | None = getattr(_local, "stop", None)
    _local.stop = stop
    try:
        yield
    finally:
        _local.stop = before


def raise_if_cancelled() -> None:
    stop: threading.Event | None = getattr(_local, "stop", None)
    if stop is not None and stop.is_set():
        raise Cancelled
    if _interrupted and threading.get_ident() in _interrupted:
        _interrupted.discard(threading.get_ident())
        raise KeyboardInterrupt


def interruptible() -> AbstractContextManager[None]:
    """A run in this thread: Ctrl-C ends it, whichever thread this is."""
    return _NOTHING if threading.get_ident() == threading.main_thread().ident else _registered()


_NOTHING = nullcontext()


@contextmanager
def _registered() -> Iterator[None]:
    thread = threading.get_ident()  # of the run: an abandoned iterator may be closed by another
    _running[thread] = _running.get(thread, 0) + 1
    try:
        yield
    finally:
        _running[thread] -= 1
        if not _running[thread]:
            del _running[thread]
            _interrupted.discard(thread)


def handle_interrupts() -> None:
    """Let Ctrl-C reach the runs of all threads; only in the main thread, and if nothing else handles it."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    _interrupted.update(_running)
    signal.default_int_handler(number, frame)


def run_detached(function: Callable[[], Result]) -> Result:
    """The result of a function with long calls, in a thread of its own; this one remains open to Ctrl-C.

    When this thread is interrupted or cancelled, the function goes on to its next check, and its result is dropped. So
    it may change only what nothing else uses.
    """
    stop, done, results, errors = threading.Event(), threading.Event(), list[Result](), list[BaseException]()

    def run() -> None:
        cancel_on(stop)
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)
        done.set()

    # Not a daemon: at its exit, the process waits for a call that is under way, and does not unload pyarrow below it.
    threading.Thread(target=run, name="scalein-detached").start()
    try:
        while not done.wait(POLL_S):
            raise_if_cancelled()
    except BaseException:
        stop.set()
        raise
    if errors:
        raise errors[0]
    return results[0]
