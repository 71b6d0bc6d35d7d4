"""The arguments of a store: schemas and tables, checked against the store's columns and cast to their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from scalein.dtypes import DType, Kind, as_plain, from_arrow_type
from scalein.errors import BadArgument, BadData, BadName, UnknownColumn, WrongType, guess, here
from scalein.layout import FUNCTIONS, MAX_KEYS, MAX_VALUES, UNCHANGED

if TYPE_CHECKING:
    from scalein.kernels.store import Functions

RowsLike: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader
SchemaLike: TypeAlias = pa.Schema | Mapping[str, pa.DataType]


def _parse_schema(given: SchemaLike, what: str, most: int) -> pa.Schema:
    """The columns of a store as users declare them."""
    try:
        schema = given if isinstance(given, pa.Schema) else pa.schema(list(given.items()))
    except (TypeError, AttributeError, ValueError) as error:
        raise BadArgument(f"the {what} columns of a store are not a schema", at=here(), found=repr(given),
                          hint='write {"user": pa.string(), "day": pa.date32()}') from error
    if not len(schema) and what == "key":
        raise BadArgument("a store needs at least one key column", at=here())
    if len(schema) > most:
        raise BadArgument(f"a store has too many {what} columns", at=here(), found=len(schema),
                          wanted=f"at most {most}")
    for field in schema:
        dtype = from_arrow_type(field.type, field.name)
        if dtype.is_nested or pa.types.is_dictionary(field.type):
            raise WrongType(f"{what} column {field.name!r} of a store has a type that cannot be stored", at=here(),
                            found=field.type, hint="numbers, times, decimals, text and binary can")
    return pa.schema([pa.field(f.name, from_arrow_type(f.type, f.name).arrow, f.nullable) for f in schema])


def check_names(key: pa.Schema, value: pa.Schema) -> None:
    names = [*key.names, *value.names]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise BadName(f"two columns of the store have the name {duplicate!r}", at=here())


def check_same_columns(given: tuple[pa.Schema, pa.Schema] | None, columns: tuple[pa.Schema, pa.Schema]) -> None:
    """Raise unless the columns that a store is opened with are those that it has."""
    for what, wanted, found in zip(("key", "value"), given or columns, columns, strict=True):
        if not wanted.equals(found):
            raise BadArgument(f"the store has other {what} columns than it was opened with", at=here(),
                              found=format_schema(wanted), has=format_schema(found))


def format_schema(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def key_schema(given: SchemaLike) -> pa.Schema:
    return _parse_schema(given, "key", MAX_KEYS)


def value_schema(given: SchemaLike) -> pa.Schema:
    return _parse_schema(given, "value", MAX_VALUES)


def to_batches(given: RowsLike, key: pa.Schema, value: Iterable[pa.Field], what: str) -> list[pa.RecordBatch]:
    """The rows as batches of the store's key columns and these value columns, in the store's types."""
    if isinstance(given, pa.RecordBatchReader):
        given = given.read_all()
    if not isinstance(given, pa.Table | pa.RecordBatch):
        raise BadData(f"{what} takes a pyarrow table, record batch or reader", at=here(), found=type(given).__name__)
    fields = [*key, *value]
    if isinstance(given, pa.RecordBatch) and _has_columns(given, fields):
        return [given] if given.num_rows else []
    for field in fields:
        if field.name not in given.schema.names:
            raise UnknownColumn(f"no column {field.name!r} in the rows given to {what}", at=here(),
                                has=", ".join(given.schema.names), hint=guess(field.name, given.schema.names))
        if given.schema.names.count(field.name) > 1:
            raise BadName(f"two columns {field.name!r} in the rows given to {what}", at=here())
    given = as_plain(given.select([field.name for field in fields]))
    columns = [_cast(given.column(k), field, what) for k, field in enumerate(fields)]
    schema = pa.schema(fields)
    if isinstance(given, pa.RecordBatch):
        return [pa.RecordBatch.from_arrays(columns, schema=schema)] if given.num_rows else []
    return [batch for batch in pa.Table.from_arrays(columns, schema=schema).to_batches() if batch.num_rows]


def _has_columns(batch: pa.RecordBatch, fields: list[pa.Field]) -> bool:
    """Whether a batch has just these columns; for a small one, selecting and casting takes longer than merging."""
    return batch.num_columns == len(fields) and all(
        found.name == wanted.name and found.type == wanted.type and (wanted.nullable or not column.null_count)
        for found, wanted, column in zip(batch.schema, fields, batch.columns, strict=True))


def _cast(column: pa.Array | pa.ChunkedArray, field: pa.Field, what: str) -> pa.Array | pa.ChunkedArray:
    if column.type != field.type:
        if not pa.types.is_null(column.type) and _kind(column.type) != _kind(field.type):
            raise WrongType(f"column {field.name!r} of the rows given to {what} does not fit the store", at=here(),
                            found=column.type, wanted=field.type,
                            hint=f"text and bools are not cast implicitly: cast the column to {field.type} before")
        try:
            column = column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise WrongType(f"column {field.name!r} of the rows given to {what} does not fit the store", at=here(),
                            found=f"{column.type}: {error}", wanted=field.type) from error
    if not field.nullable and column.null_count:
        raise BadData(f"column {field.name!r} of the rows given to {what} has nulls", at=here(),
                      found=f"{column.null_count} of {len(column)}", wanted="none: it was declared not nullable")
    return column


def _kind(arrow: pa.DataType) -> str:
    """Classes of types that Arrow would cast into one another and a store does not: text, bool, numbers."""
    found = from_arrow_type(arrow)
    return "text" if found.is_bytes else "bool" if found.kind is Kind.BOOL else "number"


def check_text_sizes(batches: list[pa.RecordBatch], most: int) -> None:
    """Raise if the texts of a row do not fit into a chunk, before any row is stored."""
    for batch in batches:
        if batch.nbytes <= most:
            continue
        longest, total = 0, pa.scalar(0, pa.int64())
        for column in batch.columns:
            if from_arrow_type(column.type).is_bytes:
                total = pc.add(total, pc.coalesce(pc.binary_length(column.cast(pa.large_binary())), 0))
                longest = pc.max(total).as_py()
        if longest > most:
            raise BadData("the texts of a row are longer than the store can hold", at=here(), found=f"{longest} bytes",
                          wanted=f"at most {most} with this memory= budget")


def key_batches(given: RowsLike | pa.Array | pa.ChunkedArray, key: pa.Schema, what: str) -> list[pa.RecordBatch]:
    """Keys as batches; an array is enough for a single key column."""
    if isinstance(given, pa.Array | pa.ChunkedArray):
        if len(key) != 1:
            raise BadData(f"{what} takes a table with the key columns", at=here(), found="one array",
                          wanted=", ".join(key.names))
        given = pa.table({key.names[0]: given})
    elif not isinstance(given, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        raise BadData(f"{what} takes an Arrow array of keys, or a table, record batch or reader with the key columns",
                      at=here(), found=type(given).__name__, wanted=", ".join(key.names),
                      hint="write pa.array([...])" if len(key) == 1 else "write pa.table({...})")
    return to_batches(given, key, (), what)


def merge_functions(value: pa.Schema, given: Mapping[str, str], columns: Iterable[str], key: pa.Schema) -> Functions:
    """The merge function of each value column, in order; raises for those that a type does not have."""
    for name, function in given.items():
        if name not in value.names:
            raise UnknownColumn(f"merge names {name!r}, which is not a value column of the store", at=here(),
                                has=", ".join(value.names), hint=guess(name, value.names))
        if function not in FUNCTIONS:
            raise BadArgument(f"no merge function {function!r} for column {name!r}", at=here(),
                              has=", ".join(FUNCTIONS), hint=guess(str(function), FUNCTIONS))
        _check_function(name, function, from_arrow_type(value.field(name).type, name))
    if not given:
        raise BadArgument("merge needs a function for at least one value column", at=here(),
                          hint=f'write merge(table, {value.names[0] if len(value) else "n"}="sum")')
    for name in columns:
        if name in value.names and name not in given:
            raise BadArgument(f"merge does not say what to do with column {name!r}", at=here(),
                              hint=f'write {name}="sum", "max", "replace", ..., or leave the column out')
        if name not in value.names and name not in key.names:
            raise UnknownColumn(f"the rows given to merge have a column {name!r} that the store does not have",
                                at=here(), has=", ".join([*key.names, *value.names]),
                                hint=guess(name, value.names))
    return tuple(given.get(name, UNCHANGED) for name in value.names)


def check_stored_functions(given: object, value: pa.Schema) -> Functions:
    """Merge functions from a file; `ValueError` unless they fit the columns."""
    if not isinstance(given, list) or len(given) != len(value):
        raise ValueError(f"merge functions: {given!r}")
    for function, field in zip(given, value, strict=True):
        if function not in (*FUNCTIONS, UNCHANGED):
            raise ValueError(f"merge function {function!r}")
        try:
            _check_function(field.name, function, from_arrow_type(field.type, field.name))
        except WrongType as error:
            raise ValueError(error.what) from error
    return tuple(given)


def _check_function(name: str, function: str, dtype: DType) -> None:
    fits = {
        "sum": dtype.is_number or dtype.is_decimal or dtype.kind.value == "duration",
        "count": dtype.is_int,
    }.get(function, True)
    if not fits:
        raise WrongType(f"merge cannot {function} column {name!r}", at=here(), found=dtype,
                        wanted="an integer column" if function == "count" else "a number, decimal or duration")


