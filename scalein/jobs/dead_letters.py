"""Dead letters of a job: rows, records and files that failed, as `exec/dead_letters.py` says.

A record or file that could not be decoded arrives among the rows, so that offsets count it, marked by the columns
`MALFORMED`. Rows that fail in an expression are found by `FragmentRunner` (`exec/operator.py`).

The dead letters of all sources have one schema: the columns of the first source, then those that only others have. A
column that another source has with another type has a `_` after its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import filtered
from scalein.connectors.base import BoundSource
from scalein.connectors.formats.lenient import ERROR, MALFORMED
from scalein.errors import ScaleinError
from scalein.exec.dead_letters import dead_letter, dead_letter_schema
from scalein.jobs.source_readers import Reader, SourceBatch


class DeadLetters:
    """Writes what failed; `write` takes rows of `schema`."""

    def __init__(self, write: Callable[[pa.RecordBatch], None]) -> None:
        self._write = write
        self.schema = pa.schema([])
        self._sources: dict[pa.Schema, dict[str, str]] = {}  # by columns of a source, these with their names here
        self._origins: dict[int, tuple[pa.RecordBatch, SourceBatch]] = {}  # of the current round, by batch identity

    def open(self, readers: Iterable[Reader]) -> None:
        """Take the rows of sources, given by a reader of each."""
        types: dict[str, pa.DataType] = {}
        for columns in dict.fromkeys(map(_columns, readers)):
            own: dict[str, str] = {}
            for field in columns:
                name = field.name
                while name in own.values() or types.setdefault(name, field.type) != field.type:
                    name += "_"
                own[field.name] = name
            self._sources[columns] = own
        self.schema = dead_letter_schema(pa.schema(types))

    def begin_round(self) -> None:
        self._origins.clear()

    def decoded(self, delivery: SourceBatch) -> pa.RecordBatch:
        """The rows of a source batch that were decoded; the others are dead letters."""
        reader, batch = delivery.reader, delivery.batch
        rows = batch
        if reader.malformed_columns:
            rows, error = batch.select(reader.columns), batch.column(ERROR)
            if error.null_count < len(error):
                is_bad = error.is_valid()
                self._malformed(filtered(batch, is_bad))
                rows = filtered(rows, pc.invert(is_bad))
        self._origins[id(rows)] = rows, delivery
        return rows

    def failed(self, batch: pa.RecordBatch, number: int, error: ScaleinError) -> None:
        """A row of a batch failed; an error without a row of the source ends the job."""
        row = batch.slice(number, 1)
        given = set(zip(row.schema.names, row.schema.types, strict=True))
        own = self._origins.get(id(batch))
        sources = self._sources if own is None else [_columns(own[1].reader)]
        source = next((each for each in sources if given <= set(zip(each.names, each.types, strict=True))), None)
        if source is None:
            raise error  # it failed after an aggregation or a projection: there is no source row to report
        named = {self._sources[source][name]: row.column(name) for name in row.schema.names}
        columns = [named[f.name] if f.name in named else pa.nulls(1, f.type) for f in self._fields]
        self._write(dead_letter(columns, self.schema, error, *self._place(batch, number)))

    def _place(self, batch: pa.RecordBatch, number: int) -> tuple[str | None, int | None]:
        """The file or source of a row, and its number there, from 1."""
        if id(batch) not in self._origins:
            return None, None  # a row after a union or a distinct
        rows, delivery = self._origins[id(batch)]
        source, before = _origin(delivery)
        is_whole = rows.num_rows == delivery.batch.num_rows
        return source, before + number + 1 if before is not None and is_whole else None

    @property
    def _fields(self) -> list[pa.Field]:
        return list(self.schema)[: len(self.schema) - len(MALFORMED)]

    def _malformed(self, bad: pa.RecordBatch) -> None:
        nothing = [pa.nulls(bad.num_rows, field.type) for field in self._fields]
        marks = bad.select(MALFORMED.names).columns
        self._write(pa.RecordBatch.from_arrays([*nothing, *marks], schema=self.schema))


def _columns(reader: Reader) -> pa.Schema:
    """The columns that are read of a source."""
    return pa.schema([pa.field(name, reader.data.schema.field(name).type) for name in reader.columns])


def _origin(delivery: SourceBatch) -> tuple[str, int | None]:
    """The file, or the source and its partition, of a source batch, and the number of rows before it, if known."""
    offset, data = delivery.after.offset, delivery.reader.data
    is_piece = delivery.after.rows > 0  # then the offset is that before the batch, which may be in another file
    if not isinstance(data, BoundSource):
        return "table", None if is_piece or not isinstance(offset, int) else offset - delivery.batch.num_rows
    origin = getattr(data.source, "origin", None)
    if is_piece or origin is None:
        return f"{data.name} {delivery.reader.name}", None
    file, rows = origin(offset)
    return file, None if rows is None else rows - delivery.batch.num_rows
