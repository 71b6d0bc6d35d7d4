"""Sinks that deliver immediately: a function, memory, the terminal. After a crash rows may be repeated: at least once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import pyarrow as pa

from scalein.errors import BadArgument, ScaleinError, WriteFailed
from scalein.storage.checked_json import Json


class _ImmediateSink:
    """A sink that has nothing to commit."""

    takes_many_jobs = True

    def open(self, schema: pa.Schema, committed: Json, next: str) -> None:
        pass

    def prepare(self) -> Json:
        return None

    def commit(self, prepared: Json) -> None:
        pass

    def close(self) -> None:
        pass


class CallbackSink(_ImmediateSink):
    """Calls a function with each batch."""

    def __init__(self, fn: Callable[[pa.RecordBatch], object]) -> None:
        self._fn = fn

    def write(self, batch: pa.RecordBatch) -> None:
        try:
            self._fn(batch)
        except ScaleinError:
            raise
        except Exception as error:
            name = getattr(self._fn, "__name__", type(self._fn).__name__)
            raise WriteFailed(f"the function {name} that gets the rows raised {type(error).__name__}",
                              found=error) from error


class MemorySink(_ImmediateSink):
    """Keeps all batches; `table()` gives them at any time, also while the job runs."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._batches: list[pa.RecordBatch] = []

    def __repr__(self) -> str:
        return f"<to_memory(): {sum(batch.num_rows for batch in self._batches):,} rows>"

    def open(self, schema: pa.Schema, committed: Json, next: str) -> None:
        if self._schema is not None and self._schema != schema:
            raise BadArgument("this to_memory() holds rows of another flow", found=str(schema), has=str(self._schema),
                              hint="make a new one for each flow")
        self._schema = schema

    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)

    def table(self) -> pa.Table:
        """The rows written so far."""
        if self._schema is None:
            raise BadArgument("nothing was written to this to_memory() yet", hint="start a flow with sink=")
        return pa.Table.from_batches(list(self._batches), self._schema)


class ConsoleSink(_ImmediateSink):
    """Prints rows as text, at most `rows` of each batch."""

    def __init__(self, rows: int, show: Callable[[pa.Table], str]) -> None:
        self._rows, self._show = rows, show

    def __repr__(self) -> str:
        return f"to_console(rows={self._rows})"

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        more = batch.num_rows - self._rows
        text = self._show(pa.Table.from_batches([batch.slice(0, self._rows)]))
        rest = f"... {more:,} more row{'s' if more > 1 else ''}\n" if more > 0 else ""
        print(f"{text}\n{rest}", flush=True)



def format_table(table: pa.Table, group_digits: Collection[str] = ()) -> str:
    """Column names, a rule, and one line a row: numbers to the right, everything else to the left.

    Numbers of the columns in `group_digits` get thousands separators.

    >>> print(format_table(pa.table({"page": ["home", None], "views": [12000, 7]}), group_digits={"views"}))
    page   views
    ────  ──────
    home  12,000
    null       7
    """
    columns = []
    for field in table.schema:
        style = "," if field.name in group_digits else ""
        cells = ["null" if value is None else format(value, style) for value in table[field.name].to_pylist()]
        width = max(map(len, [field.name, *cells]))
        is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        align = f">{width}" if is_number else f"<{width}"
        columns.append([format(field.name, align), "─" * width, *(format(cell, align) for cell in cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
