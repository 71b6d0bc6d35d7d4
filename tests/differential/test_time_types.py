"""Dates of 64 bits, times of the day, and dictionaries of anything but text."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import ScaleinError, col
from scalein.api.column import Column
from tests.engines import COLLECTS, Engine, check, each_compiler, each_engine, every_engine, examples, or_refused
from tests.programs import COMPARISONS
from tests.strategies import CLOCKS, DURATIONS, ENCODED, INTS, NAIVE, ZONED, of_types, tables

DAYS = [pa.date32(), pa.date64()]
CLOCK_PARTS = ["hour", "minute", "second", "millisecond", "microsecond", "nanosecond"]
DAY_PARTS = ["year", "quarter", "month", "day", "weekday", "ordinal_day"]


@every_engine
@examples(16)
@given(st.data())
def test_comparisons_of_two_types(engine: Engine, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([CLOCKS, DAYS, [pa.date64(), *NAIVE]]))
    types = data.draw(st.sampled_from(family)), data.draw(st.sampled_from(family))
    table = data.draw(tables(of_types(*types)))
    made = {f"out{i}": compare(col("a"), col("b")) for i, compare in enumerate(COMPARISONS)}
    check(engine, table, or_refused(lambda flow: flow.select(**made)), ordered=True)


@every_engine
@examples(24)
@given(st.data())
def test_casts(engine: Engine, data: st.DataObject) -> None:
    ours = st.sampled_from([*CLOCKS, *DAYS])
    types = [data.draw(ours), data.draw(ours | st.sampled_from([*NAIVE, *ZONED, *INTS]))]
    source, target = types if data.draw(st.booleans()) else types[::-1]
    table = data.draw(tables(of_types(source), most=64, extreme=data.draw(st.booleans())))
    check(engine, table, or_refused(lambda flow: flow.select(out=col("a").cast(target))), ordered=True)


@every_engine
@examples(10)
@given(st.data())
def test_parts(engine: Engine, data: st.DataObject) -> None:
    clock, day = data.draw(st.sampled_from(CLOCKS)), pa.date64()
    table = data.draw(tables(of_types(clock, day)))
    made = {part: getattr(col("a").dt, part)() for part in CLOCK_PARTS}
    made |= {part: getattr(col("b").dt, part)() for part in DAY_PARTS}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(10)
@given(st.data())
def test_groups(engine: Engine, data: st.DataObject) -> None:
    types = st.sampled_from([*CLOCKS, pa.date64(), *ENCODED])
    table = data.draw(tables(of_types(data.draw(types), data.draw(types), pa.int32())))
    b = col("b")
    made = {"n": si.count(), "lo": b.min(), "hi": b.max(), "f": b.first(), "l": b.last(), "at": b.arg_max("a"),
            "u": b.n_unique()}  # fmt: skip
    keys = data.draw(st.sampled_from([[], ["a"], ["a", "c"]]))
    check(engine, table, lambda flow: flow.group_by(*keys).agg(**made), ordered=False)


@every_engine
@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
@examples(4)
@given(st.data())
def test_joins(engine: Engine, how: str, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([CLOCKS, DAYS, [ENCODED[0], pa.int64()], [ENCODED[1], pa.timestamp("us")]]))
    left = data.draw(tables(of_types(data.draw(st.sampled_from(family)), pa.int8())))
    schema = of_types(data.draw(st.sampled_from(family)), data.draw(st.sampled_from(ENCODED)))
    right = data.draw(tables(schema, most=64))
    other = si.from_arrow(right)
    check(engine, left, lambda flow: flow.join(other, on="a", how=how), ordered=False)


@each_engine
def test_constants(engine: Engine) -> None:
    table = pa.table({
        "t": pa.array([time(1, 2, 3), None, time(23, 59, 59)], pa.time32("s")),
        "u": pa.array([time(1, 2, 3, 4), None, time(0)], pa.time64("ns")),
        "d": pa.array([date(2024, 2, 29), None, date(1969, 12, 31)], pa.date64()),
    })  # fmt: skip
    made = {"eq": col("t") == time(1, 2, 3), "finer": col("t") < time(1, 2, 3, 1),
            "in": col("u").is_in([time(0), time(9)]), "day": col("d") >= date(2024, 2, 29),
            "days": col("d").is_in([date(1969, 12, 31)]),
            "moment": col("d") < datetime(2024, 2, 29, 12), "both": col("t") == col("u"),
            "fill": col("u").fill_null(time(12))}  # fmt: skip
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert found.to_pydict() == {
        "eq": [True, None, False], "finer": [True, None, False], "in": [False, None, True], "day": [True, None, False],
        "days": [False, None, True], "moment": [True, None, True], "both": [False, None, False],
        "fill": [time(1, 2, 3, 4), time(12), time(0)],
    }  # fmt: skip


@each_compiler
def test_casts_in_examples(engine: Engine) -> None:
    table = pa.table({
        "ts": pa.array([-1, 86_399_999_999, None], pa.timestamp("us")),
        "t": pa.array([time(1, 2, 3, 456_789), time(0), None], pa.time64("us")),
        "d": pa.array([date(2024, 2, 29), date(1969, 12, 31), None], pa.date64()),
    })  # fmt: skip
    made = {"clock": col("ts").cast(pa.time32("s")), "fine": col("ts").cast(pa.time64("ns")),
            "day": col("ts").cast(pa.date64()), "coarse": col("t").cast(pa.time32("ms")),
            "number": col("t").cast(pa.int64()), "text": col("t").cast(pa.string()),
            "short": col("d").cast(pa.date32()), "midnight": col("d").cast(pa.timestamp("s")),
            "words": col("d").cast(pa.string())}  # fmt: skip
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert found.to_pydict() == {
        "clock": [time(23, 59, 59), time(23, 59, 59), None],
        "fine": [time(23, 59, 59, 999_999), time(23, 59, 59, 999_999), None],
        "day": [date(1969, 12, 31), date(1970, 1, 1), None],
        "coarse": [time(1, 2, 3, 456_000), time(0), None],
        "number": [3_723_456_789, 0, None],
        "text": ["01:02:03.456789", "00:00:00.000000", None],
        "short": [date(2024, 2, 29), date(1969, 12, 31), None],
        "midnight": [datetime(2024, 2, 29), datetime(1969, 12, 31), None],
        "words": ["2024-02-29", "1969-12-31", None],
    }


@each_compiler
def test_the_clock_of_a_zone(engine: Engine) -> None:
    table = pa.table({"t": pa.array([0, None, 1_720_000_000], pa.timestamp("s", "Europe/Berlin"))})
    found = check(engine, table, lambda flow: flow.select(x=col("t").cast(pa.time32("s"))), ordered=True)
    assert found is not None
    assert found["x"].to_pylist() == [time(1), None, time(11, 46, 40)]


@each_compiler
@pytest.mark.parametrize(("array", "target"), [
    (pa.array([-1], pa.int32()), pa.time32("s")),
    (pa.array([86_400], pa.int64()), pa.time32("s")),
    (pa.array([2**63], pa.uint64()), pa.time64("us")),
    (pa.array([2**31 * 86_400_000], pa.int64()).view(pa.date64()), pa.date32()),
    (pa.array([2**60], pa.int64()).view(pa.timestamp("s")), pa.date64()),
    (pa.array(["25:00"]), pa.time32("s")),
    (pa.array(["noon"]), pa.time64("us")),
    (pa.array(["12:00+05:00"]), pa.time64("us")),
])  # fmt: skip
def test_impossible_casts(engine: Engine, array: pa.Array, target: pa.DataType) -> None:
    table = pa.table({"a": array})
    assert check(engine, table, lambda flow: flow.select(x=col("a").cast(target)), ordered=True) is None


def test_text_to_times() -> None:
    table = pa.table({"s": ["12:30", "00:00:01.5", None]})
    for collect in COLLECTS:
        found = collect(si.from_arrow(table).select(x=col("s").cast(pa.time64("us"))))
        assert found["x"].to_pylist() == [time(12, 30), time(0, 0, 1, 500_000), None]


@every_engine
@examples(12)
@given(st.data())
def test_dictionaries_of_any_value(engine: Engine, data: st.DataObject) -> None:
    values = [pa.int8(), pa.float64(), pa.bool_(), pa.date32(), pa.time32("ms"), pa.timestamp("ns", "UTC"),
              pa.decimal128(38, 10), pa.duration("s"), pa.binary(3), pa.large_binary(), pa.uint64()]  # fmt: skip
    codes = st.sampled_from([pa.int8(), pa.uint8(), pa.int32(), pa.int64()])
    types = [pa.dictionary(data.draw(codes), data.draw(st.sampled_from(values))) for _ in range(2)]
    table = data.draw(tables(of_types(*types)))
    made = {"eq": col("a") == col("a"), "n": col("b").is_null()}
    check(engine, table, lambda flow: flow.select("b", "a", **made), ordered=True)
    check(engine, table, lambda flow: flow.group_by("a").agg(f=col("b").first(), n=si.count()), ordered=False)


def test_dictionaries_wherever_they_come_from() -> None:
    """A null among the values, chunks with dictionaries of their own, readers, flows without data, map_batches."""
    parts = [pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), pa.array(values, pa.decimal128(4, 1)))
             for values in ([Decimal(5), None], [Decimal("2.5"), Decimal(5)])]  # fmt: skip
    table = pa.table({"a": pa.chunked_array(parts)})
    want = [Decimal("5.0"), None, None, Decimal("2.5"), Decimal("5.0"), None]
    assert si.from_arrow(table).collect()["a"].to_pylist() == want
    assert si.from_batches(iter(table.to_batches()), table.schema).collect()["a"].to_pylist() == want
    assert si.flow(table.schema).filter(col("a") > 3).collect(table)["a"].to_pylist() == [Decimal(5), Decimal(5)]
    mapped = si.from_arrow(pa.table({"x": [1]})).map_batches(lambda batch: table.to_batches()[0], table.schema)
    for collect in COLLECTS:
        assert collect(mapped.filter(col("a") > 3))["a"].to_pylist() == [Decimal(5)]


@pytest.mark.parametrize(("made", "says"), [
    (lambda: col("t") + col("t"), "+ does not take time[s] and time[s]"),
    (lambda: col("d") + 1, "+ does not take date64 and i64"),
    (lambda: col("t") == col("d"), "cannot compare time[s] and date64"),
    (lambda: col("t") == "12:00", "cannot compare time[s] and str"),
    (lambda: col("t").dt.year(), "dt.year takes a timestamp, not time[s]"),
    (lambda: col("t").dt.truncate("1h"), "dt.truncate takes a timestamp, not time[s]"),
    (lambda: col("d").dt.hour(), "dt.hour takes a timestamp, not date64"),
    (lambda: col("t").cast(pa.timestamp("s")), "cannot cast time[s] to timestamp[s]"),
    (lambda: col("d").cast(pa.time32("s")), "cannot cast date64 to time[s]"),
    (lambda: col("t").cast(pa.float64()), "cannot cast time[s] to f64"),
    (lambda: col("t") == time(1, tzinfo=UTC), "has no zone"),
    (lambda: col("d") == datetime(2024, 1, 1, tzinfo=UTC), "cannot compare date64 and timestamp[us, UTC]"),
])  # fmt: skip
def test_what_is_refused(made: Callable[[], Column], says: str) -> None:
    table = pa.table({"t": pa.array([0], pa.time32("s")), "d": pa.array([0], pa.date64())})
    with pytest.raises(ScaleinError) as caught:
        si.from_arrow(table).select(x=made())
    assert says in str(caught.value)
    assert "test_time_types.py" in str(caught.value)


def test_windows_want_moments() -> None:
    flow = si.from_arrow(pa.table({"d": pa.array([0], pa.date64())}))
    with pytest.raises(ScaleinError, match="cast it to a timestamp"):
        flow.group_by(si.tumbling("d", "1d")).agg(n=si.count())


@every_engine
@examples(16)
@given(st.data())
def test_dates_and_durations(engine: Engine, data: st.DataObject) -> None:
    day, other, unit = (data.draw(st.sampled_from(each)) for each in (DAYS, DAYS, DURATIONS))
    table = data.draw(tables(of_types(day, other, unit), most=64))
    a, b, d = col("a"), col("b"), col("c")
    check(engine, table, lambda flow: flow.select(
        between=a - b, days=(a - b).dt.total_days(), later=a + d, sooner=a - d, also=d + b,
        week=a + timedelta(days=7), before=a - timedelta(hours=36), part=a + timedelta(microseconds=-1)), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_totals(engine: Engine, data: st.DataObject) -> None:
    type_, extreme = data.draw(st.sampled_from(DURATIONS)), data.draw(st.booleans())
    table = data.draw(tables(of_types(type_), most=64, extreme=extreme))
    for unit in ("days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds"):
        check(engine, table, lambda flow, unit=unit: flow.select(  # type: ignore[misc]
            out=getattr(col("a").dt, f"total_{unit}")()), ordered=True)


@each_engine
def test_days_in_examples(engine: Engine) -> None:
    table = pa.table({"d": [date(2024, 3, 1), date(2024, 2, 28), None],
                      "e": [date(2024, 2, 29), date(2025, 1, 1), None]})
    d, e = col("d"), col("e")
    found = check(engine, table, lambda flow: flow.select(
        gap=d - e, days=(d - e).dt.total_days(), hours=(d - date(2024, 3, 2)).dt.total_hours(),
        next=d + timedelta(days=1), late=e + timedelta(hours=36), early=e - timedelta(hours=1)), ordered=True)
    assert found is not None
    assert found.to_pydict() == {
        "gap": [timedelta(days=1), timedelta(days=-308), None], "days": [1, -308, None], "hours": [-24, -72, None],
        "next": [date(2024, 3, 2), date(2024, 2, 29), None], "late": [date(2024, 3, 1), date(2025, 1, 2), None],
        "early": [date(2024, 2, 28), date(2024, 12, 31), None],
    }  # fmt: skip
    assert found.schema.field("gap").type == pa.duration("s")


def test_days_are_no_numbers() -> None:
    flow = si.from_arrow(pa.table({"d": [date(2024, 3, 1)], "t": [datetime(2024, 3, 1)]}))
    with pytest.raises(ScaleinError, match=r"timedelta\(days=1\)"):
        flow.select(y=col("d") + 1)
    with pytest.raises(ScaleinError, match="cast the date to a timestamp"):
        flow.select(y=col("t") - col("d"))
