"""SinkWriter: a sink in use by a job; its exceptions are raised as `WriteFailed`, with the sink and the operation.

A sink belongs to the job that opened it, and only that job closes it: until then it owns what it has staged.
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

_claimed: dict[int, Sink] = {}  # sinks that jobs have open, by identity: a sink need not be hashable
_lock = threading.Lock()


class SinkWriter:
    """A user's sink. `role` is out, late or failed."""

    def __init__(self, sink: Sink, role: str, at: SourceLoc = NOWHERE) -> None:
        self._sink, self._role, self._at = sink, role, at
        self._is_ours = False

    @property
    def kind(self) -> str:
        """The class of the sink: only the same class can commit what one has prepared."""
        return type(self._sink).__name__

    @property
    def place(self) -> str:
        """Where the sink writes to: its `path`, if it has one, else its class."""
        path = getattr(self._sink, "path", None)
        return path if isinstance(path, str) else self.kind

    @property
    def can_take_over(self) -> bool:
        """Whether the sink can go on where that of another job has ended."""
        return callable(getattr(self._sink, "take_over", None))

    def take_over(self, job: str, name: str) -> None:
        """Before `claim`: what the sink writes to is that of another job, from whose savepoint this one begins."""
        self._call("acquired", lambda: self._sink.take_over(job, name))  # type: ignore[attr-defined]

    def claim(self, run: str, checkpoint: str | None) -> None:
        """Reserve the sink for this run of a job, and what it writes to, until `close` or `release`."""
        with _lock:
            if not self._is_ours and id(self._sink) in _claimed:
                raise BadArgument("this sink is another job's, which is still running", at=self._at,
                                  found=repr(self._sink), hint="stop that job first, or make a new sink for this one")
            if not getattr(self._sink, "takes_many_jobs", False):
                _claimed[id(self._sink)] = self._sink
            self._is_ours = True
        if (acquire := getattr(self._sink, "acquire", None)) is not None:
            try:
                self._call("acquired", lambda: acquire(run, checkpoint))
            except BaseException:
                self.release()
                raise

    def check_no_output(self, job: str) -> None:
        """Raise if there is output of a job without an epoch: its epochs were removed, and all would come again."""
        if (check := getattr(self._sink, "check_no_output", None)) is not None:
            self._call("opened", lambda: check(job))

    def open(self, schema: pa.Schema, committed: Json, next: str) -> None:
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
                self.release()

    def release(self) -> None:
        """Make the sink available to other jobs, without closing it."""
        with _lock:
            if self._is_ours:
                _claimed.pop(id(self._sink), None)
            self._is_ours = False

    def _call(self, what: str, fn: Callable[[], Given]) -> Given:
        try:
            return fn()
        except ScaleinError as error:
            error.locate(self._at)
            raise
        except Exception as error:
            raise WriteFailed(f"the sink {type(self._sink).__name__} raised {type(error).__name__} when it was {what}",
                              at=self._at, found=error, rows=self._role) from error
