"""Outlets: the sinks of a job, whose own errors come out as ours, saying what was asked of which sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa

from scalein.connectors.base import Json, Sink
from scalein.errors import ScaleinError, WriteFailed

Given = TypeVar("Given")


class Outlet:
    """A sink of the user's. `role` is out, late or failed."""

    def __init__(self, sink: Sink, role: str) -> None:
        self._sink, self._role = sink, role

    @property
    def kind(self) -> str:
        """What kind of a sink it is: what one has prepared, another cannot commit."""
        return type(self._sink).__name__

    def open(self, schema: pa.Schema, committed: Json, next: str) -> None:
        self._call("opened", lambda: self._sink.open(schema, committed, next))

    def write(self, batch: pa.RecordBatch) -> None:
        self._call("written to", lambda: self._sink.write(batch))

    def prepare(self) -> Json:
        return self._call("prepared", self._sink.prepare)

    def commit(self, prepared: Json) -> None:
        self._call("committed", lambda: self._sink.commit(prepared))

    def close(self) -> None:
        self._call("closed", self._sink.close)

    def _call(self, what: str, fn: Callable[[], Given]) -> Given:
        try:
            return fn()
        except ScaleinError:
            raise
        except Exception as error:
            raise WriteFailed(f"the sink {type(self._sink).__name__} raised {type(error).__name__} when it was {what}",
                              found=error, rows=self._role) from error
