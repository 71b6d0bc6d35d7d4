"""Arrow data of this process: tables, data frames, readers, iterators. Nothing is copied except dictionaries of
non-text values, which are decoded, and decimals of 32 and 64 bits, which are widened.

`Batches` checks each batch against the schema as it is read, so that kernels never see other types than they were
compiled for. Data that is entirely in memory is a `table` and can be read any number of times; a reader or generator
yields its batches once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from scalein.dtypes import Data, as_plain, plain_arrow
from scalein.errors import BadArgument, BadData, BadName, ScaleinError, SourceLoc

_NO_ARROW = "give a pyarrow Table, RecordBatch or reader, or anything with __arrow_c_stream__ (pandas, polars, DuckDB)"


class Batches:
    """Record batches of one schema. `table` holds them all if they are in memory, else it is None."""

    __slots__ = ("__weakref__", "_at", "_is_read", "_once", "_open", "schema", "table")

    def __init__(self, schema: pa.Schema, at: SourceLoc, *, table: pa.Table | None = None,
                 open: Callable[[], Iterable[object]] | None = None, once: bool = False) -> None:
        self._at = at
        self.schema = schema
        self.table = table
        self._open = open
        self._once = once
        self._is_read = False

    @property
    def replays(self) -> bool:
        """Whether it can be read again."""
        return not self._once

    def read(self) -> Iterator[pa.RecordBatch]:
        """The batches in order; raises `BadData`, naming the batch, where the input does not match its schema."""
        if self.table is not None:
            yield from self.table.to_batches()
            return
        assert self._open is not None
        if self._once and self._is_read:
            raise BadData("the input can be read only once, and it was", at=self._at,
                          hint="give a table, a list of batches, or a function that makes a new iterator")
        self._is_read = True
        for number, item in enumerate(_guarded(self._open, self._at)):
            yield checked(item, self.schema, number, self._at)


def _guarded(open_input: Callable[[], Iterable[object]], at: SourceLoc) -> Iterator[object]:
    """The items of the input; its exceptions are raised as `BadData`, which names the batch."""
    number = 0
    try:
        for item in open_input():
            yield item
            number += 1
    except ScaleinError as error:
        error.locate(at)
        raise
    except Exception as error:
        raise BadData(f"the input raised {type(error).__name__} while batch {number} was read", at=at,
                      found=error) from error


def checked(item: object, schema: pa.Schema, number: int, at: SourceLoc) -> pa.RecordBatch:
    """The item, if it is a batch of this schema; metadata and the nullable flag may differ, nulls may not."""
    if not isinstance(item, pa.RecordBatch):
        hint = "use .to_batches() of a table" if isinstance(item, pa.Table) else None
        raise BadData(f"batch {number} of the input is no pyarrow.RecordBatch", at=at, found=type(item).__name__,
                      hint=hint)
    is_alike = item.schema.equals(schema)
    batch: pa.RecordBatch = item if is_alike else as_plain(item)
    if not is_alike and (batch.schema.names != schema.names or batch.schema.types != schema.types):
        raise BadData(f"batch {number} of the input has another schema", at=at, found=_show(batch.schema),
                      wanted=_show(schema), hint="cast the batches to one schema before handing them over")
    _check_nulls(batch, schema, f"batch {number} of the input", at)
    return batch


def _check_nulls(data: pa.RecordBatch | pa.Table, schema: pa.Schema, what: str, at: SourceLoc) -> None:
    """Kernels have no null code for columns declared not nullable, so nulls in them must be refused here."""
    for position, field in enumerate(schema):
        if not field.nullable and data.column(position).null_count:
            raise BadData(f"{what} has nulls in {field.name!r}, which the schema declares not nullable", at=at,
                          hint="declare the field nullable")


def _show(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def bare(schema: pa.Schema, at: SourceLoc) -> pa.Schema:
    """The schema in the types that kernels read, without metadata; its names are checked."""
    names = schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadName(f"the input has more than one column {twice!r}", at=at, has=", ".join(names),
                      hint="rename them, so that a name means one column")
    if not names:
        raise BadData("the input has no columns", at=at)
    return pa.schema([pa.field(field.name, plain_arrow(field.type), field.nullable) for field in schema])


def of_table(table: pa.Table, at: SourceLoc) -> Batches:
    """A table in memory."""
    schema, table = bare(table.schema, at), as_plain(table)
    _check_nulls(table, schema, "the input", at)
    return Batches(schema, at, table=pa.Table.from_arrays(table.columns, schema=schema))


def of_table_as_is(table: pa.Table, at: SourceLoc) -> Batches:
    """A table in memory whose schema is one that data is read in."""
    _check_nulls(table, table.schema, "the input", at)
    return Batches(table.schema, at, table=table)


def of_arrow(data: object, at: SourceLoc) -> Batches:
    """Any Arrow data, without a copy."""
    if isinstance(data, Batches):
        return data
    if isinstance(data, pa.Table):
        return of_table(data, at)
    if isinstance(data, pa.RecordBatch):
        return of_table(pa.Table.from_batches([data]), at)
    if isinstance(data, pa.RecordBatchReader):
        return Batches(bare(data.schema, at), at, open=lambda: data, once=True)
    package = type(data).__module__.split(".")[0]
    try:
        if package == "pandas" and hasattr(data, "columns"):
            return of_table(pa.Table.from_pandas(data, preserve_index=False), at)
        if package == "polars" and hasattr(data, "__arrow_c_stream__"):
            return of_table(pa.table(data), at)
        if type(data).__module__ == "pyarrow._dataset":
            schema = getattr(data, "projected_schema", None) or data.schema  # type: ignore[attr-defined]
            return Batches(bare(schema, at), at, open=data.to_batches)  # type: ignore[attr-defined]
        if hasattr(data, "__arrow_c_stream__"):
            return _of_stream(data, at)
        if hasattr(data, "__arrow_c_array__"):
            return of_table(pa.Table.from_batches([pa.record_batch(data)]), at)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise BadData(f"this {type(data).__name__} cannot be read as an Arrow table", at=at, found=str(error),
                      hint=_NO_ARROW) from error
    if isinstance(data, list | tuple) and data and all(isinstance(item, pa.RecordBatch) for item in data):
        return of_batches(data, None, at)
    raise BadData(f"this {type(data).__name__} is no Arrow data", at=at, hint=_hint_for(data))


def _hint_for(data: object) -> str:
    if isinstance(data, dict):
        return "pa.table(...) makes a table of a dict of columns"
    if isinstance(data, list | tuple) and data and isinstance(data[0], dict):
        return "pa.Table.from_pylist(...) makes a table of a list of rows"
    if isinstance(data, str):
        return "for a file, use read_parquet, read_csv, read_json or read_ipc"
    if isinstance(data, Iterator) or callable(data):
        return "from_batches(iterator, schema) takes an iterator of record batches"
    if type(data).__name__ == "LazyFrame":
        return "collect() the LazyFrame first"
    return _NO_ARROW


@dataclass(slots=True)
class _Stream:
    """An object with `__arrow_c_stream__`. It is opened at once, for its schema, and anew for each further read."""

    data: object
    first: pa.RecordBatchReader | None

    def open(self) -> pa.RecordBatchReader:
        reader, self.first = self.first, None
        return reader if reader is not None else pa.RecordBatchReader.from_stream(self.data)


def _of_stream(data: object, at: SourceLoc) -> Batches:
    stream = _Stream(data, pa.RecordBatchReader.from_stream(data))
    assert stream.first is not None
    return Batches(bare(stream.first.schema, at), at, open=stream.open)


def of_batches(batches: object, schema: pa.Schema | None, at: SourceLoc) -> Batches:
    """A list of batches, an iterator (read once), or a function that gives a new iterator each time."""
    if isinstance(batches, list | tuple):
        if schema is None and not batches:
            raise BadArgument("an empty list of batches needs a schema", at=at, hint="from_batches([], schema)")
        first = batches[0].schema if schema is None and isinstance(batches[0], pa.RecordBatch) else schema
        schema = pa.schema([]) if first is None else bare(first, at)
        items = [checked(item, schema, number, at) for number, item in enumerate(batches)]
        plain = [item if item.schema.equals(schema, check_metadata=True) else
                 pa.RecordBatch.from_arrays(item.columns, schema=schema) for item in items]
        return Batches(schema, at, table=pa.Table.from_batches(plain, schema))
    if schema is None:
        raise BadArgument("from_batches needs a schema for an iterator", at=at, hint="from_batches(iterator, schema)")
    if isinstance(batches, Iterator | pa.RecordBatchReader):
        return Batches(bare(schema, at), at, open=lambda: batches, once=True)
    if isinstance(batches, Iterable):
        return Batches(bare(schema, at), at, open=lambda: batches)
    if callable(batches):
        return Batches(bare(schema, at), at, open=batches)
    raise BadArgument("from_batches takes an iterable of record batches, or a function that gives one", at=at,
                      found=repr(batches))


def conform(data: Batches, schema: pa.Schema, at: SourceLoc) -> Batches:
    """The data in the columns, order and types of `schema`; extra columns are left out.

    Text and binary may come in any Arrow form: dictionaries, large ones and views are converted to the form asked for.
    """
    for field in schema:
        position = data.schema.get_field_index(field.name)
        if position < 0:
            raise BadData(f"the data has no column {field.name!r}, which the flow's schema names", at=at,
                          has=_show(data.schema), wanted=_show(schema))
        found = data.schema.field(position).type
        if found != field.type and not (_is_text(found) and _is_text(field.type)) and not (
            found in _BINARIES and field.type in _BINARIES
        ):
            raise BadData(f"column {field.name!r} of the data is {found}, but the flow's schema says {field.type}",
                          at=at, hint="cast the column, or make the flow for the data's schema")
    if data.table is not None:
        return of_table(_reshaped(data.table, schema), at)
    return Batches(schema, at, open=lambda: (_reshaped(batch, schema) for batch in data.read()))


def _reshaped(data: Data, schema: pa.Schema) -> Data:
    columns = [data.column(field.name) for field in schema]
    shaped = [old if old.type == new.type else old.cast(new.type) for old, new in zip(columns, schema, strict=True)]
    return type(data).from_arrays(shaped, schema=schema)


_BINARIES = (pa.binary(), pa.large_binary(), pa.binary_view())


def _is_text(arrow: pa.DataType) -> bool:
    if pa.types.is_dictionary(arrow):
        return _is_text(arrow.value_type)
    return arrow in (pa.string(), pa.large_string(), pa.string_view())
