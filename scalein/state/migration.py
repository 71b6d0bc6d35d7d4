"""Migration: the state of an earlier flow, rewritten with the columns of the present one.

The old state is read a part at a time, and stays as it is: a checkpoint that names it can be resumed until the first
one of the new state is published, and a migration that was interrupted is begun anew in another folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from scalein.errors import Damaged
from scalein.state.row_buffer import RowBuffer
from scalein.state.store import LogStore
from scalein.storage.checked_json import Json

BUFFERED_BYTES = 64 << 20  # of migrated rows, before they are written


@dataclass(frozen=True)
class Migration:
    """From where, and how a column of the new state comes about: columns that are not mentioned keep their names."""

    folder: Path  # of the old state
    sources: Mapping[str, str]  # column -> the one that it was
    empty: Mapping[str, pa.Scalar]  # column that begins now -> its value for what is there already

    def migrated(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Rows of the old state as rows of the new one."""
        columns = [pa.repeat(self.empty[field.name], batch.num_rows) if field.name in self.empty
                   else batch.column(self.sources.get(field.name, field.name)) for field in schema]
        if any(column.type != field.type or (column.null_count and not field.nullable)
               for column, field in zip(columns, schema, strict=True)):  # fmt: skip
            raise Damaged("the state of an earlier flow is not what its checkpoint says", file=self.folder)
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def fill_store(self, store: LogStore, schema: pa.Schema, snapshot: int, memory: int | None) -> None:
        """The records of a snapshot of the old store, in a new one."""
        with LogStore.open(self.folder, snapshot=snapshot, readonly=True, memory=memory) as old:
            for batch in old.scan():
                store.upsert(self.migrated(batch, schema))

    def fill_rows(self, rows: RowBuffer, state: Json) -> None:
        """The segments that a checkpoint names, in a new buffer."""
        old = RowBuffer(self.folder, rows.schema, None)
        old.restore(state)
        if old.segments:
            old.schema = old.stored_schema(old.segments[0])
        memory, rows.memory = rows.memory, min(rows.memory or BUFFERED_BYTES, BUFFERED_BYTES)
        for segment in old.segments:
            rows.add(self.migrated(old.batch(segment), rows.schema), segment.first, segment.last)
        rows.memory = memory
