"""Malformed records of a source. They arrive among the rows, so that offsets count them, and leave here for the sink of
failed rows, in the epoch that contains them.

Rows that fail in an expression are found by `FragmentRunner` (`operators.py`); both reach the sink by `Driver._failed`.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from scalein.connectors.formats.lenient import MALFORMED, with_malformed
from scalein.errors import BadData, ScaleinError
from scalein.exec.operator import filtered
from scalein.jobs.source_readers import Reader


def without_malformed(reader: Reader, batch: pa.RecordBatch,
                      failed: Callable[[pa.RecordBatch, ScaleinError], None] | None) -> pa.RecordBatch:
    """The rows of a batch that were decoded; the others go to `failed`, without values."""
    if not reader.malformed_columns:
        return batch
    rows, text = batch.select(reader.columns), batch.column(MALFORMED.names[-1])
    if text.null_count == len(text):
        return rows
    assert failed is not None
    is_bad = text.is_valid()
    bad = filtered(batch.select(reader.malformed_columns), is_bad)
    nothing = [pa.nulls(bad.num_rows, column.type) for column in rows.columns]
    file, line, shown = (column[0].as_py() for column in bad.columns)
    failed(pa.RecordBatch.from_arrays([*nothing, *bad.columns], names=[*rows.schema.names, *bad.schema.names]),
           BadData(f"line {line} of {file} cannot be read, and on_error= takes rows of another source", text=shown))
    return filtered(rows, pc.invert(is_bad))


def failed_schema(source: pa.Schema, reader: Reader) -> pa.Schema:
    """The columns of rows that fail: those that are read, and, where lines may, what these are."""
    found = [source.field(name) for name in reader.columns]
    if not reader.malformed_columns:
        return pa.schema(found)
    return pa.schema([*(field.with_nullable(True) for field in found), *MALFORMED])


def in_columns(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch | None:
    """Rows that failed in the columns of their sink; None if they are no rows of its source."""
    if rows.schema.names == schema.names:
        return rows
    return with_malformed(rows) if [*rows.schema.names, *MALFORMED.names] == schema.names else None
