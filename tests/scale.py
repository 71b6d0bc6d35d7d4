"""Tests on many rows: DuckDB's answer to a query, sources of every kind, and a comparison that takes no time."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from scalein.api.flow import Flow

# Tables let the runtime look at everything first; readers give their batches once.
SOURCES = ["table", "reader"]
every_way = pytest.mark.parametrize(
    ("source", "workers"), [("table", 1), ("table", 2), ("reader", 1), ("reader", 4)], ids=lambda value: str(value)
)


def source_of(table: pa.Table, source: str, batch_rows: int | None = None) -> Flow:
    """The table as a flow: whole, or a reader of its batches with empty ones in between."""
    if source == "table":
        return si.from_arrow(table)
    return si.from_batches(with_empty_batches(table, batch_rows or max(1, table.num_rows // 7)), table.schema)


def with_empty_batches(table: pa.Table, batch_rows: int) -> Iterator[pa.RecordBatch]:
    for number, batch in enumerate(table.to_batches(max_chunksize=batch_rows)):
        if number % 2:
            yield batch.slice(0, 0)
        yield batch
    yield pa.RecordBatch.from_pylist([], table.schema)


def by_duckdb(query: str, **tables: pa.Table) -> pa.Table:
    """DuckDB's answer; dictionaries come out as strings."""
    connection = duckdb.connect()
    connection.execute("SET threads = 2")
    for name, table in tables.items():
        connection.register(name, _plain(table))
    return connection.sql(query).to_arrow_table()


def _plain(table: pa.Table) -> pa.Table:
    fields = [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in table.schema]
    return table.cast(pa.schema(fields))


def assert_same_rows(got: pa.Table, want: pa.Table, by: list[str] | None = None, tolerance: float = 1e-9) -> None:
    """Equal tables once both are sorted by the columns that make a row unique; None: order counts."""
    assert got.column_names == want.column_names
    assert got.num_rows == want.num_rows
    want = want.cast(got.schema)
    if by is not None:
        got, want = (t.sort_by([(name, "ascending") for name in by]) for t in (got, want))
    for name in got.column_names:
        mine, theirs = got[name].combine_chunks(), want[name].combine_chunks()
        if pa.types.is_floating(mine.type):
            _assert_close(name, mine, theirs, tolerance)
        elif not mine.equals(theirs):
            raise AssertionError(f"{name}: {_first_difference(mine, theirs, got, want)}")


def _assert_close(name: str, mine: pa.Array, theirs: pa.Array, tolerance: float) -> None:
    assert mine.is_null().equals(theirs.is_null()), name
    a, b = (np.asarray(x.fill_null(0.0), np.float64) for x in (mine, theirs))
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=name)


def _first_difference(mine: pa.Array, theirs: pa.Array, got: pa.Table, want: pa.Table) -> str:
    differs = pc.fill_null(pc.not_equal(mine, theirs), True)
    differs = pc.and_(differs, pc.invert(pc.and_(mine.is_null(), theirs.is_null())))
    place = pc.index(differs, True).as_py()
    return f"row {place}: {got.slice(place, 1).to_pylist()} is not {want.slice(place, 1).to_pylist()}"
