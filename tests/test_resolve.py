"""How expressions are typed: the table of operators, literals and casts, and which calls can fail."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import Column, col, lit, when
from scalein.dtypes import DType, Kind, Schema
from scalein.errors import NOWHERE
from scalein.ir.exprs import Agg, Call, Expr, Lit, type_of
from scalein.ir.functions.registry import can_fail, has_host
from scalein.ir.printer import show_expr
from scalein.ir.resolve import Scope, resolve, resolve_agg
from tests.conftest import Golden

NUMBERS = {"i8": pa.int8(), "i16": pa.int16(), "i32": pa.int32(), "i64": pa.int64(), "u8": pa.uint8(),
           "u16": pa.uint16(), "u32": pa.uint32(), "u64": pa.uint64(), "f32": pa.float32(),
           "f64": pa.float64()}  # fmt: skip
OTHERS = {"ok": pa.bool_(), "text": pa.string(), "wide": pa.large_string(), "day": pa.date32(),
          "s": pa.timestamp("s"), "ms": pa.timestamp("ms"), "us": pa.timestamp("us"), "ns": pa.timestamp("ns"),
          "utc": pa.timestamp("ms", "UTC"), "berlin": pa.timestamp("us", "Europe/Berlin"),
          "dur_s": pa.duration("s"), "dur_ms": pa.duration("ms")}  # fmt: skip
TYPES = {**NUMBERS, **OTHERS}
SCHEMA = Schema.from_arrow(pa.schema([*TYPES.items(), pa.field("sure", pa.int64(), nullable=False),
                                      pa.field("sure_ok", pa.bool_(), nullable=False)]))
SCOPE = Scope(SCHEMA, "test", NOWHERE)


def typed(column: Column) -> Expr:
    assert not isinstance(column.node, Agg)
    return resolve(column.node, SCOPE)


def text(column: Column) -> str:
    """`expression -> type`, with ? where it may be null."""
    expr = typed(column)
    return f"{show_expr(expr)} -> {type_of(expr)!r}{'?' if expr.nullable else ''}"


def result(column: Column) -> str:
    try:
        return repr(type_of(typed(column)))
    except si.WrongType:
        return "-"


def table(corner: str, rows: dict[str, list[str]], head: list[str]) -> str:
    lines = [[corner, *head], *([name, *cells] for name, cells in rows.items())]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                     for line in lines)  # fmt: skip


@pytest.mark.parametrize("sign", ["+", "/", "//"], ids=["add", "div", "floordiv"])
def test_arithmetic_of_numbers(golden: Golden, sign: str) -> None:
    def apply(a: str, b: str) -> Column:
        return {"+": col(a) + col(b), "/": col(a) / col(b), "//": col(a) // col(b)}[sign]

    assert table(sign, {a: [result(apply(a, b)) for b in NUMBERS] for a in NUMBERS}, list(NUMBERS)) == golden


def test_arithmetic_of_times(golden: Golden) -> None:
    times = [name for name in OTHERS if name not in ("text", "wide", "ok")] + ["i32", "f64"]
    parts = [table(sign, {a: [result(fn(col(a), col(b))) for b in times] for a in times}, times)
             for sign, fn in (("+", Column.__add__), ("-", Column.__sub__), ("*", Column.__mul__))]  # fmt: skip
    assert "\n\n".join(parts) == golden


def test_what_compares_with_what(golden: Golden) -> None:
    def meets(a: str, b: str) -> str:
        try:
            call = typed(col(a) == col(b))
        except si.WrongType:
            return "-"
        assert isinstance(call, Call)
        return repr(type_of(call.args[0]))

    assert table("==", {a: [meets(a, b) for b in TYPES] for a in TYPES}, list(TYPES)) == golden


def test_casts(golden: Golden) -> None:
    def cast(a: str, b: str) -> str:
        """yes, `fails` if a live row may have no value, `host` if pyarrow does it."""
        try:
            expr = typed(col(a).cast(TYPES[b]))
        except si.WrongType:
            return "-"
        return ("fails" if can_fail(expr) else "yes") + (" host" if has_host(expr) else "")

    assert table("to", {a: [cast(a, b) for b in TYPES] for a in TYPES}, list(TYPES)) == golden


LITERALS = [
    (col("i8") + 100, "i8 + 100 -> i8?"),
    (col("i8") + 1000, "i8.cast(i64) + 1000 -> i64?"),
    (col("u8") - 1, "u8 - 1 -> u8?"),
    (col("u8") > -1, "u8.cast(i64) > -1 -> bool?"),
    (col("u32") + 2**40, "u32.cast(i64) + 1099511627776 -> i64?"),
    (col("u64") + 1, "u64 + 1 -> u64?"),
    (col("u64") == 2**64 - 1, "u64 == 18446744073709551615 -> bool?"),
    (col("f32") * 2, "f32 * 2.0 -> f32?"),
    (col("f32") * 0.5, "f32 * 0.5 -> f32?"),
    (col("f32") < 1e300, "f32.cast(f64) < 1e+300 -> bool?"),
    (col("i32") * 0.5, "i32.cast(f64) * 0.5 -> f64?"),
    (2 - col("i16"), "2 - i16 -> i16?"),
    (2 ** col("i16"), "2.0 ** i16.cast(f64) -> f64?"),
    (col("i32") / 2, "i32.cast(f64) / 2.0 -> f64?"),
    (lit(1) + lit(2), "1 + 2 -> i64"),
    (lit(1) + lit(2.5), "1.0 + 2.5 -> f64"),
    (-lit(1) + col("i8"), "-1 + i8 -> i8?"),
    (lit(2**63), "9223372036854775808 -> u64"),
    (lit(5, pa.int8()) + col("i8"), "5 + i8 -> i8?"),
    (lit(5, pa.int32()) + col("i8"), "5 + i8.cast(i32) -> i32?"),
    (col("i8") + np.int64(1), "i8 + 1 -> i8?"),
    (np.float64(1.5) * col("f32"), "1.5 * f32 -> f32?"),
    (col("i8") + None, "i8 + None -> i8?"),
    (col("ms") > datetime(2024, 5, 1), "ms > datetime('2024-05-01 00:00:00') -> bool?"),
    (col("ms") > datetime(2024, 5, 1, microsecond=1),
     "ms.cast(timestamp[us]) > datetime('2024-05-01 00:00:00.000001') -> bool?"),
    (col("ms") > date(2024, 5, 1), "ms > datetime('2024-05-01 00:00:00') -> bool?"),
    (col("day") > date(2024, 5, 1), "day > date('2024-05-01') -> bool?"),
    (col("berlin") > datetime(2024, 5, 1, tzinfo=UTC), "berlin > datetime('2024-05-01 00:00:00Z') -> bool?"),
    (col("s") + timedelta(seconds=1), "s + duration('1s') -> timestamp[s]?"),
    (col("s") + timedelta(milliseconds=1), "s.cast(timestamp[us]) + duration('1ms') -> timestamp[us]?"),
    (timedelta(seconds=1) + col("s"), "s + duration('1s') -> timestamp[s]?"),
    (datetime(2024, 5, 1) - col("s"), "datetime('2024-05-01 00:00:00') - s -> duration[s]?"),
    (2 * col("dur_ms"), "dur_ms * 2 -> duration[ms]?"),
    (col("dur_ms") > timedelta(seconds=1), "dur_ms > duration('1s') -> bool?"),
    (col("text") == "a", "text == 'a' -> bool?"),
    (col("wide") == col("text"), "wide == text -> bool?"),
    (col("ok") & True, "ok & True -> bool?"),
]


@pytest.mark.parametrize(("column", "expected"), LITERALS, ids=[expected for _, expected in LITERALS])
def test_a_constant_takes_the_type_it_meets_if_it_fits(column: Column, expected: str) -> None:
    assert text(column) == expected


FUNCTION_TYPES = [
    (col("i32").round(2), "i32 -> i32?"),
    (col("f32").round(2), "f32.round(2) -> f32?"),
    (col("i32").sqrt(), "i32.cast(f64).sqrt() -> f64?"),
    (col("f32").floor(), "f32.floor() -> f32?"),
    (col("i16") ** 2, "i16.cast(f64) ** 2.0 -> f64?"),
    (-col("dur_s"), "-dur_s -> duration[s]?"),
    (col("sure") + 1, "sure + 1 -> i64"),
    (col("i8").is_null(), "i8.is_null() -> bool"),
    (col("f32").is_nan(), "f32.is_nan() -> bool?"),
    (col("i8").fill_null(0), "i8.fill_null(0) -> i8"),
    (col("i8").fill_null(col("i16")), "i8.cast(i16).fill_null(i16) -> i16?"),
    (col("i8").fill_null(0.5), "i8.cast(f64).fill_null(0.5) -> f64"),
    (col("i8").is_in([1, 2, 2, None]), "i8.is_in([1, 2, None]) -> bool?"),
    (col("sure").is_in([1]), "sure.is_in([1]) -> bool"),
    (col("sure").is_in([1, None]), "sure.is_in([1, None]) -> bool?"),
    (col("i8").is_in([]), "i8.is_in([]) -> bool?"),
    (col("i8").is_in([300]), "i8.cast(i64).is_in([300]) -> bool?"),
    (col("i32").between(1, 9), "(i32 >= 1) & (i32 <= 9) -> bool?"),
    (col("text").str.len(), "text.str.len() -> i64?"),
    (col("wide").str.upper(), "wide.str.upper() -> str?"),
    (col("text").str.starts_with("a"), "text.str.starts_with('a') -> bool?"),
    (col("ms").dt.year(), "ms.dt.year() -> i32?"),
    (col("day").dt.weekday(), "day.dt.weekday() -> i32?"),
    (col("ms").dt.truncate("90s"), "ms.dt.truncate('1m30s') -> timestamp[ms]?"),
    (col("ms").dt.epoch("s"), "ms.dt.epoch('s') -> i64?"),
    (when(col("ok")).then(1), "when(ok).then(1) -> i64?"),
    (when(col("ok")).then(1).otherwise(0), "when(ok).then(1).otherwise(0) -> i64"),
    (when(col("ok")).then(1).when(col("ok")).then(0.5).otherwise(col("f32")),
     "when(ok).then(1.0).when(ok).then(0.5).otherwise(f32) -> f32?"),
    (when(col("ok")).then(1).otherwise(when(col("ok")).then(col("i8")).otherwise(0)),
     "when(ok).then(1).when(ok).then(i8).otherwise(0) -> i8?"),
    (col("i64").cast(pa.int64()), "i64 -> i64?"),
    (lit(None, pa.int8()), "None -> i8?"),
    (lit(1).cast("float32"), "1.0 -> f32"),
]


@pytest.mark.parametrize(("column", "expected"), FUNCTION_TYPES, ids=[expected for _, expected in FUNCTION_TYPES])
def test_functions(column: Column, expected: str) -> None:
    # How a truncation or a constant reads is the printer's business; its types and casts are ours.
    assert text(column).replace("'1m30s'", "1m30s") == expected.replace("'1m30s'", "1m30s")


AGGREGATE_TYPES = [
    (si.count(), "i64"),
    (col("text").count(), "i64"),
    (col("i8").sum(), "i64?"),
    (col("u8").sum(), "u64?"),
    (col("f32").sum(), "f64?"),
    (col("ok").sum(), "i64?"),
    (col("dur_s").sum(), "duration[s]?"),
    (col("i8").mean(), "f64?"),
    (col("sure").mean(), "f64"),
    (col("sure").var(), "f64?"),
    (col("sure").min(), "i64"),
    (col("ok").max(), "bool?"),
    (col("ms").last(), "timestamp[ms]?"),
    (col("sure").arg_max("i8"), "i64?"),
    (col("sure").arg_max("sure"), "i64"),
]


@pytest.mark.parametrize(("column", "expected"), AGGREGATE_TYPES, ids=[repr(column) for column, _ in AGGREGATE_TYPES])
def test_aggregates(column: Column, expected: str) -> None:
    assert isinstance(column.node, Agg)
    agg = resolve_agg(column.node, SCOPE, grouped=True)
    assert repr(agg.dtype) + "?" * agg.nullable == expected
    alone = resolve_agg(column.node, SCOPE, grouped=False)
    assert alone.nullable == (not agg.fn.startswith("count"))


FALLIBLE = [
    (col("i8") + 1, True), (col("f64") + 1, False), (col("i8") / 0, False), (col("i8") // 2, False),
    (col("i8") // -1, True), (col("i8") % -1, False), (col("i8") // col("i8"), True), (col("u8") // 0, True),
    (col("f64") // 0.0, False), (-col("i8"), True), (abs(col("u8")), False), (col("i8") + 1.5, False),
    (col("ms") - col("us"), True), (col("ms").dt.epoch("s"), False), (col("ms").dt.epoch("ns"), True),
    ((col("i8") + 1).is_null(), True), (col("i8").cast(int) > 5, False),
]  # fmt: skip


@pytest.mark.parametrize(("column", "expected"), FALLIBLE, ids=[repr(column) for column, _ in FALLIBLE])
def test_what_can_fail(column: Column, expected: bool) -> None:
    assert can_fail(typed(column)) is expected


def test_calendars_of_zones_are_left_to_the_host() -> None:
    assert not has_host(typed(col("utc").dt.hour()))
    assert has_host(typed(col("berlin").dt.hour()))
    assert not has_host(typed(col("berlin").dt.epoch("us")))


def test_constants_keep_their_nanoseconds() -> None:
    assert typed(lit(np.datetime64("2024-05-01T00:00:00.000000001", "ns"))) == Lit(
        1714521600000000001, DType(Kind.TS, unit="ns"))


def test_a_float_literal_is_rounded_to_the_column() -> None:
    call = typed(col("f32") == 0.1)
    assert isinstance(call, Call)
    assert call.args[1] == Lit(float(np.float32(0.1)), DType(Kind.F32))
