"""Times as text and text as times: strftime, strptime, and casts of ISO 8601."""

from __future__ import annotations

from datetime import UTC, date, datetime, time

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import BadArgument, ComputeError, WrongType, col
from scalein.ir import time_formats
from tests.engines import DUCKDB, Engine, check, each_compiler, each_engine, every_compiler, every_engine, examples
from tests.strategies import CLOCKS, NAIVE, STRINGS, ZONED, of_types, tables

DATES = [pa.date32(), pa.date64()]
OF_DATES = ["%Y-%m-%d", "%F", "%d.%m.%y", "%j of %Y", "%a %A, %b %B %d", "%D%%", "week day %u", "é%mé", "%w|%y%y"]
OF_CLOCKS = ["%H:%M:%S", "%T.%f", "%I:%M %p", "%R", "%S%S%f"]
READABLE = ["%Y-%m-%d %H:%M:%S", "%Y%m%dT%H%M%S.%f", "%d.%m.%Y", "%d %b %Y %I:%M %p", "%B %d, %Y", "%Y/%j", "%F %T",
            "%m/%d/%y %R"]  # fmt: skip


@every_engine
@examples(40)
@given(st.data())
def test_strftime(engine: Engine, data: st.DataObject) -> None:
    is_clock = engine is not DUCKDB and data.draw(st.booleans())
    types = [*CLOCKS] if is_clock else [*NAIVE, *DATES, pa.timestamp("us", "UTC")]
    pattern = data.draw(st.sampled_from(OF_CLOCKS if is_clock else [*OF_DATES, *OF_CLOCKS, "%Y %H %j"]))
    if engine is not DUCKDB and data.draw(st.integers(0, 9)) == 0:
        pattern = ""  # DuckDB's must have something in it
    table = data.draw(tables(of_types(data.draw(st.sampled_from(types))), most=64, extreme=engine is not DUCKDB))
    check(engine, table, lambda flow: flow.select(out=col("a").dt.strftime(pattern)), ordered=True)


@every_compiler
@examples(10)
@given(st.data())
def test_strftime_in_a_zone(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(ZONED))), most=64))
    check(engine, table, lambda flow: flow.select(out=col("a").dt.strftime("%Y-%m-%d %H:%M %a")), ordered=True)


@every_engine
@examples(30)
@given(st.data())
def test_strptime_of_what_strftime_wrote(engine: Engine, data: st.DataObject) -> None:
    pattern, target = data.draw(st.sampled_from(READABLE)), data.draw(st.sampled_from(NAIVE))
    table = data.draw(tables(of_types(pa.timestamp("us")), most=64))
    check(engine, table, lambda flow: flow.select(
        out=col("a").dt.strftime(pattern).str.strptime(target, pattern)), ordered=True)


_DIGITS = st.integers(0, 9).map(str)
_NUMBERS = st.integers(0, 70).map(str) | st.integers(0, 70).map("{:02}".format)


@st.composite
def nearly(draw: st.DrawFn, pattern: str) -> str:
    """A text that follows a format but for a few mistakes."""
    made = []
    for letter, text in time_formats.parts(time_formats.spelled_out(pattern)):
        if not letter:
            made.append(text)
        elif letter == "Y":
            made.append(draw(st.sampled_from(["2024", "1999", "0000", "9999", "1900", "24", "-024", "2023"])))
        elif letter == "y":
            made.append(draw(st.sampled_from(["24", "68", "69", "00", "99", "7"])))
        elif letter in "bB":
            made.append(draw(st.sampled_from(["Jan", "february", "MAY", "Juny", "sep", "Decembers", "\u017fep"])))
        elif letter in "aA":
            made.append(draw(st.sampled_from(["Mon", "sunday", "Thur", "x"])))
        elif letter == "p":
            made.append(draw(st.sampled_from(["AM", "pm", "Pm", "xm", "a"])))
        elif letter == "z":
            made.append(draw(st.sampled_from(["Z", "+02:00", "-0530", "+14", "+24:00", "-01:60", "z", "+1:00"])))
        elif letter in "jf":
            made.append(draw(st.sampled_from(["1", "060", "365", "366", "0", "000", "1234", "123456", "1234567"])))
        else:
            made.append(draw(_NUMBERS))
    found = "".join(made)
    if found and draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(0, len(found) - 1))
        found = found[:at] + draw(st.sampled_from(["", " ", "x", "é", ":", "1"])) + found[at + 1 :]
    return found


FORMATS = [*READABLE, "%Y-%m-%dT%H:%M:%S%z", "%y%j", "%A %d %B %Y", "%I%p %Y", "%Y-%m-%d %H:%M:%S.%f%z", "%Y"]


@every_compiler
@pytest.mark.parametrize("pattern", FORMATS)
@examples(8)
@given(st.data())
def test_strptime_of_any_text(engine: Engine, pattern: str, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.none() | nearly(pattern), max_size=12))
    type_ = data.draw(st.sampled_from(STRINGS))
    table = pa.table({"a": pa.array(words, pa.string()).cast(type_)})
    unit = data.draw(st.sampled_from(["s", "ms", "us", "ns"]))
    target = pa.timestamp(unit, "UTC" if "%z" in pattern else data.draw(st.sampled_from([None, "UTC"])))
    check(engine, table, lambda flow: flow.select(a=col("a").str.try_strptime(target, pattern)), ordered=True)
    check(engine, table.slice(0, 1), lambda flow: flow.select(a=col("a").str.strptime(target, pattern)), ordered=True)


@every_compiler
@examples(8)
@given(st.data())
def test_strptime_of_dates_and_clocks(engine: Engine, data: st.DataObject) -> None:
    days = data.draw(st.lists(nearly("%Y-%m-%d"), max_size=12))
    clocks = data.draw(st.lists(nearly("%H:%M:%S.%f"), min_size=len(days), max_size=len(days)))
    day, clock = data.draw(st.sampled_from(DATES)), data.draw(st.sampled_from(CLOCKS))
    check(engine, pa.table({"a": pa.array(days, pa.string()), "b": pa.array(clocks, pa.string())}), lambda flow: (
        flow.select(d=col("a").str.try_strptime(day, "%Y-%m-%d"), c=col("b").str.try_strptime(clock, "%H:%M:%S.%f"))),
        ordered=True)


@st.composite
def iso(draw: st.DrawFn) -> str:
    """ISO 8601 from a date alone to fractions and an offset, and some mistakes."""
    text = draw(st.sampled_from(["2024-02-29", "2023-02-29", "1970-01-01", "0001-01-01", "9999-12-31", "2262-04-11",
                                 "1677-09-21", "2024-13-01", "2024-1-01", "0000-03-01"]))  # fmt: skip
    if draw(st.integers(0, 4)):
        text += draw(st.sampled_from(["T", " ", "T", " ", "t", "  "]))
        text += draw(st.sampled_from(["23", "00:12", "12:00:00", "23:47:16", "00:12:43", "24:00:00", "12:60", "1:00"]))
        if draw(st.booleans()):
            text += "." + "".join(draw(st.lists(_DIGITS, max_size=10)))
        text += draw(st.sampled_from(["", "", "Z", "+02:00", "-0530", "+01", "z", "+25:00", "Z ", " Z", "+2"]))
    return text


@every_compiler
@examples(60)
@given(st.data())
def test_casts_of_iso_texts(engine: Engine, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.none() | iso(), max_size=20))
    table = pa.table({"a": pa.array(words, pa.string()).cast(data.draw(st.sampled_from(STRINGS)))})
    target = data.draw(st.sampled_from([*NAIVE, *ZONED, *DATES, pa.timestamp("ns", "+02:00")]))
    check(engine, table, lambda flow: flow.select(a=col("a").try_cast(target)), ordered=True)
    check(engine, table.slice(0, 1), lambda flow: flow.select(a=col("a").cast(target)), ordered=True)


@each_compiler
def test_iso_in_examples(engine: Engine) -> None:
    words = ["2013-10-07T12:00:00Z", "2013-10-07 12:00:00", "2013-10-07T14:00:00+02:00", "2013-10-07 12", "2013-10-07"]
    for type_ in (pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("s")):
        made = col("s").cast(type_)
        found = check(engine, pa.table({"s": words}), lambda flow, made=made: flow.select(t=made), ordered=True)
        assert found is not None
        noon = datetime(2013, 10, 7, 12, tzinfo=UTC if type_.tz else None)
        assert found["t"].to_pylist() == [noon] * 4 + [noon.replace(hour=0)]
    found = check(engine, pa.table({"s": words[::2]}), lambda flow: flow.select(
        t=col("s").try_cast(pa.timestamp("s", "Europe/Berlin"))), ordered=True)
    assert found is not None
    assert found["t"].cast(pa.int64()).to_pylist() == [1381147200, 1381147200, None]


@each_engine
def test_formats_in_examples(engine: Engine) -> None:
    table = pa.table({"t": [datetime(2024, 5, 1, 13, 5, 9, 250_000), datetime(987, 12, 31, 0, 0, 0), None]})
    found = check(engine, table, lambda flow: flow.select(
        iso=col("t").dt.strftime("%F %T"), text=col("t").dt.strftime("%a %d %b %y, %I.%M %p")), ordered=True)
    assert found is not None
    assert found.to_pydict() == {"iso": ["2024-05-01 13:05:09", "0987-12-31 00:00:00", None],
                                 "text": ["Wed 01 May 24, 01.05 PM", "Mon 31 Dec 87, 12.00 AM", None]}


def test_reading_in_examples() -> None:
    flow = si.from_arrow(pa.table({"s": ["7 Oct 2013 1:30 PM +0200", None]}))
    made = col("s").str.strptime(pa.timestamp("ms", "UTC"), "%d %b %Y %I:%M %p %z")
    assert flow.select(t=made).collect()["t"].to_pylist() == [datetime(2013, 10, 7, 11, 30, tzinfo=UTC), None]
    flow = si.from_arrow(pa.table({"d": ["24 060", "99 365"], "c": ["1:5", "23:59"]}))
    found = flow.select(d=col("d").str.strptime(pa.date32(), "%y %j"), c=col("c").str.strptime(pa.time32("s"), "%H:%M"))
    assert found.collect().to_pydict() == {
        "d": [date(2024, 2, 29), date(1999, 12, 31)], "c": [time(1, 5), time(23, 59)]}  # fmt: skip


def test_errors_name_the_text() -> None:
    table = pa.table({"s": ["2024-05-01", "2024-13-01 and more", "x" * 500], "n": [1, 2, 3]})
    flow = si.from_arrow(table).filter(col("n") == 2)
    with pytest.raises(ComputeError, match=r"(?s)impossible cast in `s\.cast\(timestamp\[us\]\)`.*"
                       r"found  '2024-13-01 and more'.*try_cast gives null"):
        flow.select(t=col("s").cast(pa.timestamp("us"))).collect()
    with pytest.raises(ComputeError, match=r"(?s)text that is no such time in `s\.str\.strptime\(timestamp\[us\], "
                       r"'%Y'\)`.*at     test_time_text.*found  '2024-13-01 and more'.*try_strptime gives null"):
        flow.select(t=col("s").str.strptime(pa.timestamp("us"), "%Y")).collect()
    with pytest.raises(ComputeError, match=r"found  'x{80}' \.\.\."):
        si.from_arrow(table.slice(2)).group_by(d=col("s").cast(pa.date32())).agg(n=si.count()).collect()


@pytest.mark.parametrize(("pattern", "why"), [
    ("%Q", "%Q is not among"), ("100%", "single %"), ("%Y %Y", "twice"), ("%m %b %Y", "say the same"),
    ("%I %Y", "belong together"), ("%Z %Y", "not read"), (7, "takes a format"),
])  # fmt: skip
def test_formats_that_are_none(pattern: str, why: str) -> None:
    with pytest.raises(BadArgument, match=why):
        col("s").str.strptime(pa.timestamp("us"), pattern)


def test_refused() -> None:
    flow = si.from_arrow(pa.table({"s": ["a"], "x": [1], "d": pa.array([1], pa.duration("s")),
                                   "z": pa.array([1], pa.timestamp("s", "Europe/Berlin")),
                                   "c": pa.array([1], pa.time32("s"))}))
    s, ts = col("s").str, pa.timestamp("us")
    for make, what in (
        (lambda: col("x").dt.strftime("%Y"), "takes a time or date, not i64"),
        (lambda: col("d").dt.strftime("%Y"), "total_seconds"), (lambda: col("z").dt.strftime("%z"), "UTC first"),
        (lambda: col("c").dt.strftime("%Y"), "has no date"), (lambda: col("x").str.strptime(ts, "%Y"), "takes text"),
        (lambda: s.strptime(pa.int64(), "%Y"), "times and dates, not i64"), (lambda: s.strptime(ts, "%H"), "no year"),
        (lambda: s.strptime(pa.date32(), "%Y %H"), "more than a date"), (lambda: s.strptime(ts, "%Y%z"), "no zone"),
        (lambda: s.strptime(pa.timestamp("us", "Europe/Berlin"), "%Y"), "is not known"),
        (lambda: s.strptime(pa.time32("s"), "%Y"), "no time of the day"),
        (lambda: col("x").dt.total_days(), "takes a duration, not i64"),
        (lambda: col("z").dt.total_days(), "subtract another time"),
    ):  # fmt: skip
        with pytest.raises(WrongType, match=what):
            flow.select(y=make())
