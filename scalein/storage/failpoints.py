"""Failpoints: named places in the life of a job at which a test can pause or crash it (see `scalein.testing`).

A crash cleans nothing up: no sink is closed and no file is removed.

Threads: a handler runs on the thread that reaches its failpoint.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = {
    "open": "the checkpoint is read; state and sinks are about to be opened",
    "batch": "the delivered batches are processed and their results written; the next batches are not read yet",
    "prepare": "an epoch begins: sinks are asked to prepare their output",
    "freeze": "the output is prepared; the snapshot of the state is about to be taken",
    "publish": "the state is on disk; the manifest of the epoch is not",
    "commit": "the epoch is published; its output is not visible yet",
    "committed": "the output is visible",
}


class Crashed(BaseException):
    """A job died at a failpoint, because a test asked for it."""


handlers: list[Callable[[str], None]] = []


def failpoint(point: str) -> None:
    """Call the handlers of tests; in production there are none."""
    for handler in handlers:
        handler(point)
