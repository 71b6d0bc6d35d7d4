"""Outlets: the sinks of a job, whose own errors come out as ours, saying what was asked of which sink.

A sink belongs to the job that opened it, and only that job closes it: what it has staged is in its hands until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa

from scalein.connectors.base import Sink
from scalein.errors import NOWHERE, BadArgument, ScaleinError, SourceLoc, WriteFailed
from scalein.storage.checked_json import Json

Given = TypeVar("Given")

_taken: dict[int, Sink] = {}  # that jobs have open, by identity: a sink need not be hashable
_lock = threading.Lock()


class Outlet:
    """A sink of the user's. `role` is out, late or failed."""

    def __init__(self, sink: Sink, role: str, at: SourceLoc = NOWHERE) -> None:
        self._sink, self._role, self._at = sink, role, at
        self._is_ours = False

    @property
    def kind(self) -> str:
        """What kind of a sink it is: what one has prepared, another cannot commit."""
        return type(self._sink).__name__

    def take(self) -> None:
        """Have the sink for this job alone, until `close` or `leave`."""
        with _lock:
            if not self._is_ours and id(self._sink) in _taken:
                raise BadArgument("this sink is another job's, which is still running", at=self._at,
                                  found=repr(self._sink), hint="stop that job first, or make a new sink for this one")
            if not getattr(self._sink, "takes_many_jobs", False):
                _taken[id(self._sink)] = self._sink
            self._is_ours = True

    def open(self, schema: pa.Schema, committed: Json, next: str) -> None:
        self.take()
        self._call("opened", lambda: self._sink.open(schema, committed, next))

    def write(self, batch: pa.RecordBatch) -> None:
        self._call("written to", lambda: self._sink.write(batch))

    def prepare(self) -> Json:
        return self._call("prepared", self._sink.prepare)

    def commit(self, prepared: Json) -> None:
        self._call("committed", lambda: self._sink.commit(prepared))

    def close(self) -> None:
        """Close the sink, if it is this job's."""
        if self._is_ours:
            try:
                self._call("closed", self._sink.close)
            finally:
                self.leave()

    def leave(self) -> None:
        """Let others have the sink, as it is."""
        with _lock:
            if self._is_ours:
                _taken.pop(id(self._sink), None)
            self._is_ours = False

    def _call(self, what: str, fn: Callable[[], Given]) -> Given:
        try:
            return fn()
        except ScaleinError:
            raise
        except Exception as error:
            raise WriteFailed(f"the sink {type(self._sink).__name__} raised {type(error).__name__} when it was {what}",
                              found=error, rows=self._role) from error
