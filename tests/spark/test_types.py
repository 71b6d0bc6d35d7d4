"""Type conversion to and from Spark, without a session."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import types as t

import scalein as si
import scalein.spark as sis
from scalein.errors import NOWHERE, BadData, ComputeError, WrongType
from scalein.spark.types import (
    arrow_schema,
    check_batch_schema,
    check_clocks,
    check_input_schema,
    from_spark,
    spark_arrow_schema,
    spark_arrow_type,
    spark_schema,
    to_spark,
)

PAIRS = [
    (pa.bool_(), t.BooleanType(), [True, None]),
    (pa.int8(), t.ByteType(), [-1, None]),
    (pa.int64(), t.LongType(), [-(1 << 63), None]),
    (pa.uint8(), t.ShortType(), [255, None]),
    (pa.uint16(), t.IntegerType(), [65535, None]),
    (pa.uint32(), t.LongType(), [(1 << 32) - 1, None]),
    (pa.uint64(), t.DecimalType(20, 0), [(1 << 64) - 1, None]),
    (pa.float32(), t.FloatType(), [1.5, None]),
    (pa.float64(), t.DoubleType(), [1.5, None]),
    (pa.string(), t.StringType(), ["Zoë", "", None]),
    (pa.large_string(), t.StringType(), ["Zoë", "", None]),
    (pa.string_view(), t.StringType(), ["Zoë", "", None]),
    (pa.dictionary(pa.int32(), pa.string()), t.StringType(), ["Zoë", "", None]),
    (pa.binary(), t.BinaryType(), [b"\x00", None]),
    (pa.binary(2), t.BinaryType(), [b"\x00\xff", None]),
    (pa.date32(), t.DateType(), [date(2026, 11, 16), None]),
    (pa.date64(), t.DateType(), [date(2026, 11, 16), None]),
    (pa.timestamp("s"), t.TimestampNTZType(), [datetime(2026, 11, 16, 1), None]),
    (pa.timestamp("us"), t.TimestampNTZType(), [datetime(2026, 11, 16, 1), None]),
    (pa.timestamp("ns"), t.TimestampNTZType(), [datetime(2026, 11, 16, 1), None]),
    (pa.timestamp("ms", "Europe/Paris"), t.TimestampType(), [datetime(2026, 11, 16, 1, tzinfo=UTC), None]),
    (pa.duration("ms"), t.DayTimeIntervalType(), [timedelta(seconds=-3), None]),
    (pa.decimal128(10, 2), t.DecimalType(10, 2), [Decimal("-1.25"), None]),
    (pa.decimal128(5, -2), t.DecimalType(7, 0), [Decimal("1200"), None]),
    (pa.list_(pa.int64()), t.ArrayType(t.LongType()), [[1, None], [], None]),
    (pa.large_list(pa.uint8()), t.ArrayType(t.ShortType()), [[1, None], [], None]),
    (pa.struct([("a", pa.int64()), ("b", pa.large_string())]),
     t.StructType([t.StructField("a", t.LongType()), t.StructField("b", t.StringType())]), [{"a": 1, "b": None}, None]),
    (pa.map_(pa.string(), pa.int64()), t.MapType(t.StringType(), t.LongType()), [[("a", 1)], None]),
    (pa.null(), t.NullType(), [None]),
]  # fmt: skip


@pytest.mark.parametrize(("arrow", "spark", "values"), PAIRS, ids=[str(pair[0]) for pair in PAIRS])
def test_a_column_is_sent_and_read_back(arrow: pa.DataType, spark: t.DataType, values: list[object]) -> None:
    schema = pa.schema([pa.field("c", arrow)])
    struct = spark_schema(schema, NOWHERE)
    assert struct == t.StructType([t.StructField("c", spark)])
    batch = pa.record_batch([pa.array(values, arrow)], schema=schema)
    (sent,) = to_spark(batch, spark_arrow_schema(schema, NOWHERE))
    assert arrow_schema(struct, NOWHERE).types == sent.schema.types  # exactly the types that Spark would send
    back = from_spark(sent, check_input_schema(schema, struct, NOWHERE))
    assert back.column(0).cast(arrow).equals(batch.column(0))


def test_two_columns_of_one_name_are_refused() -> None:
    struct = t.StructType([t.StructField(name, t.LongType()) for name in ("x", "y", "x")])
    assert check_input_schema(pa.schema({"y": pa.int64()}), struct, NOWHERE).names == ["y"]
    with pytest.raises(BadData, match="2 columns 'x'"):
        check_input_schema(pa.schema({"x": pa.int64()}), struct, NOWHERE)


def test_nothing_is_copied_where_types_match() -> None:
    sent = pa.record_batch({"x": pa.array([1, 2]), "t": pa.array([1, 2], pa.timestamp("us", "America/St_Johns"))})
    got = from_spark(sent, pa.schema({"x": pa.int64(), "t": pa.timestamp("us")}))
    assert [c.buffers()[1].address for c in got.columns] == [c.buffers()[1].address for c in sent.columns]
    assert got.column("t").cast(pa.int64()).to_pylist() == [1, 2]


def test_nanoseconds_are_not_lost_silently() -> None:
    schema = pa.schema({"when": pa.timestamp("ns")})
    batch = pa.record_batch([pa.array([1], pa.timestamp("ns"))], schema=schema)
    with pytest.raises(ComputeError, match="column 'when' does not fit"):
        list(to_spark(batch, spark_arrow_schema(schema, NOWHERE)))


def test_a_value_that_does_not_fit_is_reported() -> None:
    with pytest.raises(BadData, match="column 'small' of the DataFrame does not fit"):
        from_spark(pa.record_batch({"small": pa.array([300], pa.int16())}), pa.schema({"small": pa.uint8()}))


def test_types_that_spark_does_not_have() -> None:
    assert spark_arrow_type(pa.decimal128(38, -3)) is None
    with pytest.raises(WrongType, match="Spark has no type for column 'd'"):
        sis.schema(si.flow({"d": pa.decimal128(38, -3)}))


def test_a_flow_takes_sparks_schema() -> None:
    struct = t.StructType([t.StructField("k", t.LongType(), False), t.StructField("t", t.TimestampType()),
                           t.StructField("n", t.TimestampNTZType()), t.StructField("d", t.DecimalType(12, 3))])
    assert si.flow(struct).schema == pa.schema([
        pa.field("k", pa.int64(), False), pa.field("t", pa.timestamp("us", "UTC")), pa.field("n", pa.timestamp("us")),
        pa.field("d", pa.decimal128(12, 3))])
    with pytest.raises(WrongType, match="column 'i' has a Spark type that"):
        si.flow(t.StructType([t.StructField("i", t.CalendarIntervalType())]))


def test_large_batches_are_sent_in_slices() -> None:
    batch = pa.record_batch({"x": list(range(200_000))})
    parts = list(to_spark(batch, batch.schema))
    assert [part.num_rows for part in parts] == [65536, 65536, 65536, 3392]


@pytest.mark.parametrize("spark", [
    t.StringType("UTF8_LCASE"), t.ArrayType(t.StringType("UNICODE")), t.MapType(t.StringType("de"), t.LongType()),
    t.StructType([t.StructField("inner", t.StringType("UTF8_LCASE"))]),
])
def test_collated_text_is_refused(spark: t.DataType) -> None:
    struct = t.StructType([t.StructField("plain", t.StringType()), t.StructField("name", spark)])
    wanted = pa.schema({"name": pa.string()})
    for read in (lambda: si.flow(struct), lambda: check_input_schema(wanted, struct, NOWHERE)):
        with pytest.raises(WrongType, match="column 'name' has the collation") as raised:
            read()
        assert "name collate UTF8_BINARY" in str(raised.value.hint)
    assert check_input_schema(pa.schema({"plain": pa.string()}), struct, NOWHERE).names == ["plain"]


def test_a_clock_of_another_zone_is_refused() -> None:
    """TIMESTAMP is read as a time without a zone, and TIMESTAMP_NTZ as one with, only if both clocks are the same."""
    struct = t.StructType([t.StructField("z", t.TimestampType()), t.StructField("n", t.TimestampNTZType())])

    def read(name: str, arrow: pa.DataType, zone: str) -> pa.Schema:
        check_clocks(pa.schema({name: arrow}), struct, zone, NOWHERE)
        return check_input_schema(pa.schema({name: arrow}), struct, NOWHERE)

    with pytest.raises(WrongType, match="'z' of the DataFrame is a time in the session's time zone Asia/Tok") as raised:
        read("z", pa.timestamp("us"), "Asia/Tokyo")
    assert "spark.sql.session.timeZone to UTC" in str(raised.value.hint)
    with pytest.raises(WrongType, match="'n' of the DataFrame is a time without a zone"):
        read("n", pa.timestamp("us", "Asia/Tokyo"), "UTC")
    for name, arrow, zone in (("z", pa.timestamp("us"), "UTC"), ("z", pa.timestamp("ms", "UTC"), "Asia/Tokyo"),
                              ("n", pa.timestamp("us"), "Asia/Tokyo"), ("n", pa.timestamp("us", "UTC"), "UTC")):
        assert read(name, arrow, zone).types == [arrow]
    with pytest.raises(WrongType, match="time zone Asia/Tokyo"):  # the same in a task
        check_batch_schema(pa.schema({"z": pa.timestamp("us")}), pa.schema({"z": pa.timestamp("us", "Asia/Tokyo")}))
