"""Type conversion between flows and Spark.

Spark has fewer types than Arrow. A column that is sent to Spark is widened where it must be:

    uint8, uint16, uint32, uint64        short, int, long, decimal(20, 0)
    timestamp, of any unit               TIMESTAMP_NTZ; with a zone TIMESTAMP; in microseconds, and a time that would
                                         lose nanoseconds is an error
    date64, time, duration               date, time (Spark 4.1), day-time interval
    dictionary, large and view           string, binary
    decimal of a negative scale          decimal of the scale 0

A DataFrame's column is read by a flow if its type is the one that the flow's own column would be sent as. A TIMESTAMP
has the session's time zone (`zones.py`), and a TIMESTAMP_NTZ none. In UTC each may be read as the other; in another
zone that would shift the clock, and is refused. Collated text, which compares otherwise than by its bytes, is refused.
A column whose type is the same in memory is not copied.

Nothing here imports pyspark before one of its types is needed: Spark types are recognised by their class names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.dtypes import from_arrow_type_or_none
from scalein.errors import NOWHERE, BadData, ComputeError, SourceLoc, WrongType, guess, here
from scalein.spark.zones import SETTING, active_zone, arrow_zone

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

    from scalein.api.flow import Flow

MAX_BATCH_ROWS = 1 << 16  # of a batch for Spark, which holds it in memory as a whole


def schema(q: Flow) -> StructType:
    """The Spark schema of a flow's rows, for `df.mapInArrow(q.map_in_arrow, schema(q))`.

    >>> import pyarrow as pa, scalein as si, scalein.spark
    >>> scalein.spark.schema(si.flow({"user": str, "clicks": pa.uint32()})).simpleString()
    'struct<user:string,clicks:bigint>'
    """
    return spark_schema(q.schema, here())


def spark_schema(arrow: pa.Schema, at: SourceLoc) -> StructType:
    """The Spark schema of columns in the types of `spark_arrow_schema`."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, _spark_type(field.type), field.nullable)
                       for field in spark_arrow_schema(arrow, at)])


def spark_arrow_schema(arrow: pa.Schema, at: SourceLoc) -> pa.Schema:
    """The Arrow types in which Spark accepts columns of these types."""
    fields = []
    for field in arrow:
        wanted = spark_arrow_type(field.type)
        if wanted is None:
            raise WrongType(f"Spark has no type for column {field.name!r}", at=at, found=field.type,
                            hint="cast it, or leave it out with drop")
        fields.append(pa.field(field.name, wanted, field.nullable))
    return pa.schema(fields)


_WIDENED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20, 0),
            pa.float16(): pa.float32(), pa.date64(): pa.date32()}  # fmt: skip
_SAME = (pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.date32())
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_BINARIES = (pa.binary(), pa.large_binary(), pa.binary_view())
_MAX_DIGITS = 38


def spark_arrow_type(arrow: pa.DataType) -> pa.DataType | None:
    """The Arrow type in which Spark accepts values of a type; None if Spark has no such type."""
    is_ = pa.types
    if arrow in _SAME:
        return arrow
    if arrow in _WIDENED:
        return _WIDENED[arrow]
    if is_.is_dictionary(arrow) or is_.is_run_end_encoded(arrow):
        return spark_arrow_type(arrow.value_type)
    if arrow in _TEXTS:
        return pa.string()
    if arrow in _BINARIES or is_.is_fixed_size_binary(arrow):
        return pa.binary()
    if is_.is_timestamp(arrow):
        return pa.timestamp("us", None if arrow.tz is None else "UTC")
    if is_.is_duration(arrow):
        return pa.duration("us")
    if is_.is_time(arrow):
        return pa.time64("ns") if _has_time() else None
    if is_.is_decimal(arrow):
        digits = max(arrow.precision - min(arrow.scale, 0), arrow.scale)
        return pa.decimal128(digits, max(arrow.scale, 0)) if digits <= _MAX_DIGITS else None
    return _spark_arrow_nested(arrow)


def _spark_arrow_nested(arrow: pa.DataType) -> pa.DataType | None:
    is_ = pa.types
    if is_.is_map(arrow):
        key, value = spark_arrow_type(arrow.key_type), spark_arrow_type(arrow.item_type)
        return None if key is None or value is None else pa.map_(key, arrow.item_field.with_type(value))
    if is_.is_struct(arrow):
        fields = [(field, spark_arrow_type(field.type)) for field in arrow]
        if not fields or any(wanted is None for _, wanted in fields):
            return None
        return pa.struct([pa.field(field.name, wanted, field.nullable) for field, wanted in fields])
    if any(is_list(arrow) for is_list in (is_.is_list, is_.is_large_list, is_.is_fixed_size_list, is_.is_list_view,
                                          is_.is_large_list_view)):
        element = spark_arrow_type(arrow.value_type)
        return None if element is None else pa.list_(pa.field("element", element, arrow.value_field.nullable))
    return None


def _has_time() -> bool:
    try:
        from pyspark.sql.types import TimeType  # noqa: F401
    except ImportError:
        return False
    return True


def _spark_type(arrow: pa.DataType) -> DataType:
    """The Spark type of a type that `spark_arrow_type` gave."""
    from pyspark.sql import types as t

    if pa.types.is_decimal(arrow):
        return t.DecimalType(arrow.precision, arrow.scale)
    if pa.types.is_timestamp(arrow):
        return t.TimestampNTZType() if arrow.tz is None else t.TimestampType()
    if pa.types.is_map(arrow):
        return t.MapType(_spark_type(arrow.key_type), _spark_type(arrow.item_type), arrow.item_field.nullable)
    if pa.types.is_list(arrow):
        return t.ArrayType(_spark_type(arrow.value_type), arrow.value_field.nullable)
    if pa.types.is_struct(arrow):
        return t.StructType([t.StructField(f.name, _spark_type(f.type), f.nullable) for f in arrow])
    if pa.types.is_time(arrow):
        return t.TimeType(6)
    name = next(name for name, known in _ARROW_TYPES.items() if known == arrow)
    found: DataType = getattr(t, name)()
    return found


# --- from Spark

_BYTES = "UTF8_BINARY"  # Spark's collation that compares bytes
_ARROW_TYPES = {"BooleanType": pa.bool_(), "ByteType": pa.int8(), "ShortType": pa.int16(), "IntegerType": pa.int32(),
                "LongType": pa.int64(), "FloatType": pa.float32(), "DoubleType": pa.float64(),
                "StringType": pa.string(),
                "BinaryType": pa.binary(), "DateType": pa.date32(), "TimestampNTZType": pa.timestamp("us"),
                "DayTimeIntervalType": pa.duration("us"), "NullType": pa.null(),
                "VarcharType": pa.string(), "CharType": pa.string(), "TimeType": pa.time64("ns")}  # fmt: skip


def flow_schema(struct: Any, at: SourceLoc) -> pa.Schema:
    """The schema of a flow over a DataFrame of this StructType; TIMESTAMP has the zone of the active session."""
    return arrow_schema(struct, at, zone=active_zone() if "timestamp" in struct.simpleString() else "UTC")


def arrow_schema(struct: Any, at: SourceLoc, names: Sequence[str] | None = None, zone: str = "UTC") -> pa.Schema:
    """The Arrow types in which Spark sends columns of a StructType, all or those of `names`, in a session's zone."""
    fields = []
    for field in struct.fields if names is None else [struct[name] for name in names]:
        _refuse_collation(field, at)
        found = _arrow_type(field.dataType, zone)
        if found is None:
            raise WrongType(f"column {field.name!r} has a Spark type that scalein does not read", at=at,
                            found=field.dataType.simpleString(), hint="leave it out with select, or cast it")
        fields.append(pa.field(field.name, found, field.nullable))
    return pa.schema(fields)


def _arrow_type(spark: Any, zone: str) -> pa.DataType | None:
    match type(spark).__name__:
        case "TimestampType":
            return pa.timestamp("us", zone)
        case "DecimalType":
            return pa.decimal128(spark.precision, spark.scale)
        case "ArrayType":
            element = _arrow_type(spark.elementType, zone)
            return None if element is None else pa.list_(pa.field("element", element, spark.containsNull))
        case "MapType":
            key, value = _arrow_type(spark.keyType, zone), _arrow_type(spark.valueType, zone)
            if key is None or value is None:
                return None
            return pa.map_(key, pa.field("value", value, spark.valueContainsNull))
        case "StructType":
            inner_types = [_arrow_type(field.dataType, zone) for field in spark.fields]
            if any(each is None for each in inner_types):
                return None
            return pa.struct([pa.field(field.name, each, field.nullable)
                              for field, each in zip(spark.fields, inner_types, strict=True)])
        case name:
            return _ARROW_TYPES.get(name)


def _refuse_collation(field: Any, at: SourceLoc) -> None:
    """Refuse text that is not compared by its bytes, as flows do, also inside of lists, maps and structs."""
    collation = _collation(field.dataType)
    if collation is not None:
        raise WrongType(f"column {field.name!r} has the collation {collation}, and flows compare text by its bytes",
                        at=at, found=field.dataType.simpleString(),
                        hint=f"cast it to STRING, or read `{field.name} collate UTF8_BINARY`; "
                             "lower(...) before that ignores case")


def _collation(spark: Any) -> str | None:
    """The collation of a type, if it has one other than that of bytes."""
    match type(spark).__name__:
        case "ArrayType":
            return _collation(spark.elementType)
        case "MapType":
            return _collation(spark.keyType) or _collation(spark.valueType)
        case "StructType":
            return next((found for field in spark.fields if (found := _collation(field.dataType)) is not None), None)
        case _:
            found = getattr(spark, "collation", _BYTES)
            return None if found == _BYTES else str(found)


def check_input_schema(wanted: pa.Schema, struct: Any, at: SourceLoc) -> pa.Schema:
    """The Arrow types in which a flow reads a DataFrame's columns; columns that it cannot read are refused.

    They are the flow's own types, except that text and binary keep the layout in which Spark sends them.
    """
    for field in struct.fields:
        if field.name in wanted.names:
            _refuse_collation(field, at)
    found = {field.name: (_arrow_type(field.dataType, "UTC"), field.dataType.simpleString()) for field in struct.fields}
    names = [field.name for field in struct.fields]
    for name in wanted.names:
        if names.count(name) > 1:
            raise BadData(f"the DataFrame has {names.count(name)} columns {name!r}", at=at, has=", ".join(names),
                          hint="rename or drop all but one")
    return _check_columns(wanted, found, at)


def check_batch_schema(wanted: pa.Schema, sent: pa.Schema) -> pa.Schema:
    """The same as `check_input_schema` and `check_clocks`, for the schema of a batch that Spark has sent."""
    found = _check_columns(wanted, {field.name: (field.type, str(field.type)) for field in sent}, NOWHERE)
    for field in wanted:
        _check_clock(field, sent.field(field.name).type, NOWHERE)
    return found


def _check_columns(wanted: pa.Schema, found: dict[str, tuple[pa.DataType | None, str]], at: SourceLoc) -> pa.Schema:
    fields = []
    for field in wanted:
        if field.name not in found:
            raise BadData(f"the DataFrame has no column {field.name!r}, which the flow's schema names", at=at,
                          has=", ".join(f"{name}: {shown}" for name, (_, shown) in found.items()),
                          hint=guess(field.name, found))
        sent, shown = found[field.name]
        if sent is None or not _is_convertible(sent, field.type):
            raise WrongType(f"column {field.name!r} of the DataFrame is {shown}, but the flow's schema says "
                            f"{field.type}", at=at, hint="cast the column, or make the flow with si.flow(df.schema)")
        is_same = from_arrow_type_or_none(sent) == from_arrow_type_or_none(field.type)
        fields.append(pa.field(field.name, sent if is_same else field.type, field.nullable))
    return pa.schema(fields)


def check_clocks(wanted: Iterable[pa.Field], struct: Any, zone: str, at: SourceLoc) -> None:
    """Refuse columns, of those that a flow needs, whose clock would be another one; `zone` is that of the session."""
    for field in wanted:
        if pa.types.is_timestamp(field.type):
            _check_clock(field, _arrow_type(struct[field.name].dataType, zone), at)


def _check_clock(field: pa.Field, sent: pa.DataType, at: SourceLoc) -> None:
    """Refuse to read a time with a zone as one without, or the other way round, where both clocks differ."""
    if not pa.types.is_timestamp(field.type) or (sent.tz is None) == (field.type.tz is None):
        return
    if arrow_zone(sent.tz or field.type.tz) == "UTC":
        return
    if field.type.tz is None:
        raise WrongType(f"column {field.name!r} of the DataFrame is a time in the session's time zone {sent.tz}, but "
                        f"the flow's schema says {field.type}, a time without a zone", at=at,
                        hint=f"make the flow with si.flow(df.schema), which has the zone; or set {SETTING} to UTC, or "
                             "cast the column to TIMESTAMP_NTZ")
    raise WrongType(f"column {field.name!r} of the DataFrame is a time without a zone, but the flow's schema says "
                    f"{field.type}", at=at,
                    hint="make the flow with si.flow(df.schema), or cast the column to TIMESTAMP")


def _is_convertible(sent: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_timestamp(wanted):
        return bool(pa.types.is_timestamp(sent))
    wanted_as, sent_as = spark_arrow_type(wanted), spark_arrow_type(sent)  # large_string of Spark is string
    return wanted_as is not None and sent_as is not None and _all_nullable(wanted_as) == _all_nullable(sent_as)


def _all_nullable(arrow: pa.DataType) -> pa.DataType:
    """The type with nullable elements: nullability does not make another type."""
    if pa.types.is_map(arrow):
        return pa.map_(_all_nullable(arrow.key_type), pa.field("value", _all_nullable(arrow.item_type)))
    if pa.types.is_list(arrow):
        return pa.list_(pa.field("element", _all_nullable(arrow.value_type)))
    if pa.types.is_struct(arrow):
        return pa.struct([pa.field(field.name, _all_nullable(field.type)) for field in arrow])
    return arrow


# --- batches


def from_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch of Spark's, with columns in the order of `schema`, in the types of `schema`."""
    columns = [_column_from_spark(column, field) for column, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column_from_spark(column: pa.Array, field: pa.Field) -> pa.Array:
    if not field.nullable and column.null_count:
        raise BadData(f"column {field.name!r} of the DataFrame has nulls, but the flow's schema says that it has none",
                      hint="make the flow with si.flow(df.schema), or fill the nulls")
    if column.type == field.type:
        return column
    if pa.types.is_timestamp(field.type) and column.type.unit == field.type.unit:
        return column.view(field.type)  # the same instant with another zone name
    try:
        if pa.types.is_timestamp(field.type):
            column = column.view(pa.timestamp(column.type.unit, field.type.tz))
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        raise BadData(f"column {field.name!r} of the DataFrame does not fit the flow's type {field.type}",
                      found=error) from None


def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A flow's batch in the types of `spark_arrow_schema`, in slices of at most `MAX_BATCH_ROWS`."""
    if batch.schema.types != schema.types:
        columns = [column if column.type == field.type else _column_to_spark(column, field)
                   for column, field in zip(batch.columns, schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    for start in range(0, batch.num_rows, MAX_BATCH_ROWS):
        yield batch.slice(start, MAX_BATCH_ROWS) if batch.num_rows > MAX_BATCH_ROWS else batch


def _column_to_spark(column: pa.Array, field: pa.Field) -> pa.Array:
    if pa.types.is_timestamp(field.type) and column.type.unit == field.type.unit:
        return column.view(field.type)
    try:
        if pa.types.is_timestamp(field.type):
            column = column.view(pa.timestamp(column.type.unit, field.type.tz))
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        hint = 'Spark has microseconds: .dt.truncate("1us"), or cast it' if pa.types.is_timestamp(field.type) else None
        raise ComputeError(f"a value of column {field.name!r} does not fit Spark's type for it",
                           found=error, type=str(field.type), hint=hint) from None
