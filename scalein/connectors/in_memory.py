"""Arrow data of this process: tables, data frames, readers, iterators. Nothing is copied except dictionaries of
non-text values, which are decoded, and decimals of 32 and 64 bits, which are widened. Dicts of lists and lists of dicts
become tables.

`Batches` checks each batch against the schema as it is read, so that kernels never see other types than they were
compiled for. Data that is entirely in memory is a `table` and can be read any number of times; a reader or generator
yields its batches once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from scalein.dtypes import Data, as_plain, plain_arrow
from scalein.errors import BadArgument, BadData, BadName, ScaleinError, SourceLoc

_NO_ARROW = ("give a pyarrow Table, RecordBatch or reader, anything with __arrow_c_stream__ (pandas, polars, DuckDB), "
             "a dict of lists, or a list of dicts")


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


def plain_schema(schema: pa.Schema, at: SourceLoc) -> pa.Schema:
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
    schema, table = plain_schema(table.schema, at), as_plain(table)
    _check_nulls(table, schema, "the input", at)
    return Batches(schema, at, table=pa.Table.from_arrays(table.columns, schema=schema))


def of_table_as_is(table: pa.Table, at: SourceLoc) -> Batches:
    """A table in memory whose schema is one that data is read in."""
    _check_nulls(table, table.schema, "the input", at)
    return Batches(table.schema, at, table=table)


def of_arrow(data: object, at: SourceLoc, schema: pa.Schema | None = None) -> Batches:
    """Any Arrow data, without a copy; Python's own values take the types of `schema`, where it has them."""
    if isinstance(data, Batches):
        return data
    if isinstance(data, pa.Table):
        return of_table(data, at)
    if isinstance(data, pa.RecordBatch):
        return of_table(pa.Table.from_batches([data]), at)
    if isinstance(data, pa.RecordBatchReader):
        return Batches(plain_schema(data.schema, at), at, open=lambda: data, once=True)
    package = type(data).__module__.split(".")[0]
    try:
        if package == "pandas" and hasattr(data, "columns"):
            return of_table(pa.Table.from_pandas(data, preserve_index=False), at)
        if package == "polars" and hasattr(data, "__arrow_c_stream__"):
            return of_table(pa.table(data), at)
        if type(data).__module__ == "pyarrow._dataset":
            schema = getattr(data, "projected_schema", None) or data.schema  # type: ignore[attr-defined]
            return Batches(plain_schema(schema, at), at, open=data.to_batches)  # type: ignore[attr-defined]
        if hasattr(data, "__arrow_c_stream__"):
            return _of_stream(data, at)
        if hasattr(data, "__arrow_c_array__"):
            return of_table(pa.Table.from_batches([pa.record_batch(data)]), at)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise BadData(f"this {type(data).__name__} cannot be read as an Arrow table", at=at, found=str(error),
                      hint=_NO_ARROW) from error
    if isinstance(data, Mapping):
        return of_table(_table_of_columns(data, schema, at), at)
    if isinstance(data, list | tuple) and data and isinstance(data[0], Mapping):
        return of_table(_table_of_columns(_columns_of_rows(data, at), schema, at), at)
    if isinstance(data, list | tuple) and data and all(isinstance(item, pa.RecordBatch) for item in data):
        return of_batches(data, None, at)
    raise BadData(f"this {type(data).__name__} is no Arrow data", at=at, hint=_hint_for(data))


def _hint_for(data: object) -> str:
    if isinstance(data, list | tuple) and not data:
        return "an empty list has no columns; from_batches([], schema) has some"
    if isinstance(data, list | tuple) and any(isinstance(item, Mapping) for item in data):
        return "each row is a dict of names and values, the first one as well"
    if isinstance(data, str):
        return "for a file, use read_parquet, read_csv, read_json or read_ipc"
    if isinstance(data, Iterator) or callable(data):
        return "from_batches(iterator, schema) takes an iterator of record batches"
    if type(data).__name__ == "LazyFrame":
        return "collect() the LazyFrame first"
    return _NO_ARROW


def _columns_of_rows(rows: Sequence[object], at: SourceLoc) -> dict[object, list[object]]:
    """A list of dicts, column by column; all have the names of the first."""
    first = rows[0]
    assert isinstance(first, Mapping)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadData(f"row {number} of the data is no dict, as the first one is", at=at, found=repr(row))
        if row.keys() != first.keys():
            lacks, more = [n for n in first if n not in row], [n for n in row if n not in first]
            found = [f"lacks {', '.join(map(repr, lacks))}"] * bool(lacks) + [
                f"has also {', '.join(map(repr, more))}"] * bool(more)
            raise BadData(f"row {number} of the data has other names than the first one", at=at,
                          found=" and ".join(found), hint="give every row the same names; None is null")
    return {name: [row[name] for row in rows if isinstance(row, Mapping)] for name in first}


def _table_of_columns(columns: Mapping[Any, object], schema: pa.Schema | None, at: SourceLoc) -> pa.Table:
    """A dict of columns, each a list, a numpy or Arrow array, or a series; all have one length."""
    arrays: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name, values in columns.items():
        if not isinstance(name, str):
            raise BadData("names of columns are text", at=at, found=repr(name))
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise BadData(f"column {name!r} of the data is no list of values", at=at, found=repr(values),
                          hint="a dict has a list of values for each column, a list of dicts a value for each row")
        wanted = schema.field(name).type if schema is not None and name in schema.names else None
        arrays[name] = _array(name, values, wanted, at)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise BadData("the columns of the data have different lengths", at=at,
                      found=", ".join(f"{name}: {length}" for name, length in lengths.items()))
    return pa.table(arrays)


def _array(name: str, values: Iterable[object], wanted: pa.DataType | None,
           at: SourceLoc) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if hasattr(values, "__arrow_c_stream__"):  # a series of polars or pandas
        return pa.chunked_array(values)
    plain = values if hasattr(values, "__array__") else list(values)
    try:
        return pa.array(plain, wanted)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        what = ("cannot be converted to one Arrow type" if wanted is None
                else f"are not all {wanted}, as the flow's schema says")
        raise BadData(f"the values of column {name!r} of the data {what}", at=at, found=str(error).strip()) from None


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
    return Batches(plain_schema(stream.first.schema, at), at, open=stream.open)


def of_batches(batches: object, schema: pa.Schema | None, at: SourceLoc) -> Batches:
    """A list of batches, an iterator (read once), or a function that gives a new iterator each time."""
    if isinstance(batches, list | tuple):
        if schema is None and not batches:
            raise BadArgument("an empty list of batches needs a schema", at=at, hint="from_batches([], schema)")
        first = batches[0].schema if schema is None and isinstance(batches[0], pa.RecordBatch) else schema
        schema = pa.schema([]) if first is None else plain_schema(first, at)
        items = [checked(item, schema, number, at) for number, item in enumerate(batches)]
        plain = [item if item.schema.equals(schema, check_metadata=True) else
                 pa.RecordBatch.from_arrays(item.columns, schema=schema) for item in items]
        return Batches(schema, at, table=pa.Table.from_batches(plain, schema))
    if schema is None:
        raise BadArgument("from_batches needs a schema for an iterator", at=at, hint="from_batches(iterator, schema)")
    if isinstance(batches, Iterator | pa.RecordBatchReader):
        return Batches(plain_schema(schema, at), at, open=lambda: batches, once=True)
    if isinstance(batches, Iterable):
        return Batches(plain_schema(schema, at), at, open=lambda: batches)
    if callable(batches):
        return Batches(plain_schema(schema, at), at, open=batches)
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
