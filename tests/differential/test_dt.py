"""Functions of times, before the epoch too; in a zone they mean its local time."""

from __future__ import annotations

import datetime
import zoneinfo

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from tests import oracle
from tests.engines import DUCKDB, Engine, check, each_engine, every_engine, examples
from tests.oracle.values import from_arrow
from tests.programs import exprs
from tests.strategies import NAIVE, UNITS, ZONED, of_types, tables

CALENDAR = ["year", "quarter", "month", "day", "weekday", "ordinal_day"]
CLOCK = ["hour", "minute", "second", "millisecond", "microsecond", "nanosecond"]
ZONES = ["Europe/Berlin", "Asia/Kolkata", "America/New_York", "+05:30"]


@every_engine
@examples(16)
@given(st.data())
def test_parts(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from([*NAIVE, *ZONED, pa.date32()]))
    table = data.draw(tables(of_types(type_)))
    parts = CALENDAR if pa.types.is_date(type_) else CALENDAR + CLOCK
    made = {part: getattr(col("a").dt, part)() for part in parts}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@examples(16)
@given(st.lists(st.integers(-(2**62), 2**62), max_size=20), st.sampled_from(UNITS[1:]))
def test_parts_are_those_of_polars(times: list[int], unit: str) -> None:
    limited = [time // (10**6 if unit == "ms" else 10**3 if unit == "us" else 1) for time in times]
    table = pa.table({"a": pa.array(limited, pa.int64()).cast(pa.timestamp(unit))})
    made = {part: getattr(col("a").dt, part)() for part in CALENDAR + CLOCK}
    got = oracle.collect(si.from_arrow(table).select(**made))
    series = pl.Series("a", limited, dtype=pl.Int64).cast(pl.Datetime(unit))
    for part in CALENDAR + CLOCK:
        assert got[part].to_pylist() == getattr(series.dt, part)().to_list(), part


@examples(16)
@given(st.datetimes(datetime.datetime(1850, 1, 1), datetime.datetime(2036, 1, 1)), st.sampled_from(ZONES))
def test_parts_in_a_zone_are_those_of_the_local_clock(instant: datetime.datetime, zone: str) -> None:
    utc = instant.replace(tzinfo=datetime.UTC)
    hours = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
    local = utc.astimezone(hours if zone == "+05:30" else zoneinfo.ZoneInfo(zone))
    table = pa.table({"a": pa.array([utc], pa.timestamp("us", zone))})
    a = col("a").dt
    made = {"y": a.year(), "mo": a.month(), "d": a.day(), "h": a.hour(), "mi": a.minute(), "s": a.second(),
            "us": a.microsecond(), "wd": a.weekday(), "od": a.ordinal_day()}  # fmt: skip
    got = oracle.collect(si.from_arrow(table).select(**made)).to_pylist()[0]
    assert got == {"y": local.year, "mo": local.month, "d": local.day, "h": local.hour, "mi": local.minute,
                   "s": local.second, "us": local.microsecond, "wd": local.isoweekday(),
                   "od": local.timetuple().tm_yday}  # fmt: skip


def test_the_second_of_a_local_mean_time_has_the_seconds_of_its_offset() -> None:
    """India was 5 h 21 min 10 s ahead in 1900."""
    table = pa.table({"a": pa.array([datetime.datetime(1900, 2, 28)], pa.timestamp("us", "Asia/Kolkata"))})
    made = {part: getattr(col("a").dt, part)() for part in ("hour", "minute", "second")}
    assert si.from_arrow(table).select(**made).collect().to_pylist() == [{"hour": 5, "minute": 21, "second": 10}]


@every_engine
@examples(16)
@given(st.data())
def test_truncate(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from([*NAIVE, *ZONED]))
    table = data.draw(tables(of_types(type_), extreme=type_.tz is None and data.draw(st.booleans())))
    every = data.draw(st.sampled_from(["1s", "7s", "1m30s", "1h", "1d", "10d"]))
    check(engine, table, lambda flow: flow.select(out=col("a").dt.truncate(every)), ordered=True)


@examples(8)
@given(st.datetimes(datetime.datetime(1850, 1, 1), datetime.datetime(2036, 1, 1)), st.sampled_from(ZONES))
def test_days_begin_at_local_midnight(instant: datetime.datetime, zone: str) -> None:
    table = pa.table({"a": pa.array([instant.replace(tzinfo=datetime.UTC)], pa.timestamp("us", zone))})
    truncated = col("a").dt.truncate("1d").dt
    got = si.from_arrow(table).select(h=truncated.hour(), same=truncated.day() == col("a").dt.day())
    assert oracle.collect(got).to_pylist() == [{"h": 0, "same": True}]


@every_engine
@examples(12)
@given(st.data())
def test_epoch(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from([*NAIVE, *ZONED]))), extreme=data.draw(st.booleans())))
    unit = data.draw(st.sampled_from(UNITS))
    check(engine, table, lambda flow: flow.select(out=col("a").dt.epoch(unit)), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_times_and_durations(engine: Engine, data: st.DataObject) -> None:
    unit, other = data.draw(st.sampled_from(UNITS)), data.draw(st.sampled_from(UNITS))
    schema = of_types(pa.timestamp(unit), pa.duration(unit), pa.timestamp(other), pa.duration(other))
    table = data.draw(tables(schema, extreme=data.draw(st.booleans())))
    nested = data.draw(exprs(schema, pa.timestamp(unit), 2))
    every = [col("a") + col("b"), col("a") - col("d"), col("a") - col("c"), col("b") + col("d"), col("b") * 3,
             col("a") < col("c"), nested]  # fmt: skip
    made = data.draw(st.sampled_from(every))
    check(engine, table, lambda flow: flow.select(out=made), ordered=True)


@each_engine
def test_python_times_are_constants(engine: Engine) -> None:
    start = datetime.datetime(2024, 5, 1, 12, 30, 15, 250_000)
    table = pa.table({"a": pa.array([start, None, datetime.datetime(1969, 12, 31)], pa.timestamp("ms"))})
    made = {"since": col("a") - start, "later": col("a") + datetime.timedelta(seconds=90), "is": col("a") == start}
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert from_arrow(found["later"])[0] == int(start.replace(tzinfo=datetime.UTC).timestamp() * 1000) + 90_000


@pytest.mark.parametrize("unit", UNITS)
def test_negative_times_floor(unit: str) -> None:
    table = pa.table({"a": pa.array([-1], pa.int64()).cast(pa.timestamp(unit))})
    a = col("a").dt
    build = lambda flow: flow.select(y=a.year(), s=a.second(), t=a.truncate("1m").dt.epoch("s"), e=a.epoch("s"))  # noqa: E731
    found = check(DUCKDB, table, build, ordered=True)
    assert found is not None
    assert found.to_pylist() == [{"y": 1969, "s": 59, "t": -60, "e": -1}]
