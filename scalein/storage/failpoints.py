"""Named moments in the life of a job, at which a test may hold it or let it die: see `scalein.testing`.

A death leaves everything as it lies: no sink is closed, no file removed.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = {
    "open": "it has its checkpoint, and opens its state and sinks",
    "batch": "it has run what was delivered, written the results, and stands before the next batches",
    "prepare": "an epoch begins: sinks are asked to prepare their output",
    "freeze": "output is prepared; the state is about to be frozen",
    "publish": "the state is on disk; the epoch's manifest is not",
    "commit": "the epoch is published; its output is not visible yet",
    "committed": "the output is visible",
}


class Crashed(BaseException):
    """A job died at a point, because a test wanted it so."""


watchers: list[Callable[[str], None]] = []


def reach(point: str) -> None:
    for watcher in watchers:
        watcher(point)
