"""The functions of text, times, lists and structs: what `col("x").str`, `.dt`, `.list` and `.struct` give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.api import hints
from scalein.api.hints import ForeignNames
from scalein.dtypes import UNITS_PER_SECOND
from scalein.durations import Duration, span
from scalein.errors import BadArgument, here
from scalein.ir import time_formats
from scalein.ir.literals import shortened

if TYPE_CHECKING:
    from scalein.api.column import Column

class StrMethods(ForeignNames):
    """Functions of text. Positions and lengths count code points."""

    __slots__ = ("_column",)
    _called, _elsewhere = ".str", hints.STR

    def __init__(self, column: Column) -> None:
        self._column = column

    def lower(self) -> Column:
        """The text in lower case.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["Straße", "ÉTÉ", None]}))
        >>> flow.select(y=col("x").str.lower()).collect()["y"].to_pylist()
        ['straße', 'été', None]
        """
        return self._column._call("lower")

    def upper(self) -> Column:
        """The text in upper case.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["straße", "été", None]}))
        >>> flow.select(y=col("x").str.upper()).collect()["y"].to_pylist()
        ['STRAẞE', 'ÉTÉ', None]
        """
        return self._column._call("upper")

    def len(self) -> Column:
        """The number of code points.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["été", "", None]}))
        >>> flow.select(y=col("x").str.len()).collect()["y"].to_pylist()
        [3, 0, None]
        """
        return self._column._call("str_len")

    def slice(self, offset: int, length: int | None = None) -> Column:
        """`length` code points from `offset` on, or all that follow; a negative offset counts from the end.

        >>> from scalein import col
        >>> col("code").str.slice(-3, 2)
        Column(code.str.slice(-3, 2))
        """
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise BadArgument("str.slice takes an integer offset", at=here(), found=repr(offset))
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
            raise BadArgument("str.slice takes a length of 0 or more, or None", at=here(), found=repr(length))
        return self._column._call("str_slice", params=(offset, length))

    def starts_with(self, prefix: str) -> Column:
        """True where the text begins with `prefix`.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["https://a", "http://b", None]}))
        >>> flow.select(y=col("x").str.starts_with("https")).collect()["y"].to_pylist()
        [True, False, None]
        """
        return self._column._call("starts_with", params=(_text(prefix, "starts_with"),))

    def ends_with(self, suffix: str) -> Column:
        """True where the text ends with `suffix`.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["a.csv", "b.json", None]}))
        >>> flow.select(y=col("x").str.ends_with(".csv")).collect()["y"].to_pylist()
        [True, False, None]
        """
        return self._column._call("ends_with", params=(_text(suffix, "ends_with"),))

    def contains(self, text: str) -> Column:
        """True where `text` occurs, as it is: this is no regular expression.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["a.b", "ab", None]}))
        >>> flow.select(y=col("x").str.contains(".")).collect()["y"].to_pylist()
        [True, False, None]
        """
        return self._column._call("contains", params=(_text(text, "contains"),))

    def matches(self, pattern: str) -> Column:
        """True where a regular expression (RE2's syntax) matches somewhere in the text.

        >>> from scalein import col
        >>> col("url").str.matches("^https?:")
        Column(url.str.matches('^https?:'))
        """
        return self._column._call("str_matches", params=(_regex(pattern, "matches"),))

    def extract(self, pattern: str, group: int = 1) -> Column:
        """What a group of the first match of a regular expression holds; null where nothing matches.

        Group 0 is the whole match. A group that takes no part in the match is empty.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"line": ["took 12 ms", "failed"]}))
        >>> flow.select(ms=col("line").str.extract(r"(\\d+) ms")).collect()["ms"].to_pylist()
        ['12', None]
        """
        pattern = _regex(pattern, "extract")
        if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group <= 8:
            raise BadArgument("str.extract takes the number of a group, 0 to 8", at=here(), found=repr(group))
        _try_regex(pattern, group, "extract")
        return self._column._call("str_extract", params=(pattern, group))

    def strptime(self, dtype: object, format: str) -> Column:
        """The time that a text says in a format: a timestamp, date or time of the day, as `dtype` is.

        Directives are Python's: `%Y %m %d %H %M %S %f`, `%y %j %I %p %b %B %a %A`, `%z` for an offset (which Z is too);
        everything else stands for itself. A year has four digits, other numbers may have fewer than two. What the
        format does not have is the first: of the month, of the day. A text that does not follow it is an error;
        `try_strptime` gives null there. ISO's own formats need none: `.cast(pa.timestamp("us"))`.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["1.5.2024 13:45", None]}))
        >>> flow.select(y=col("x").str.strptime(pa.timestamp("s"), "%d.%m.%Y %H:%M")).collect()["y"].to_pylist()
        [datetime.datetime(2024, 5, 1, 13, 45), None]
        """
        return self._column._call("str_strptime", params=(_format(format, "str.strptime"),), dtype=dtype)

    def try_strptime(self, dtype: object, format: str) -> Column:
        """As `strptime`, but null where the text does not follow the format.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["2024-05-01", "n/a"]}))
        >>> flow.select(y=col("x").str.try_strptime(pa.date32(), "%Y-%m-%d")).collect()["y"].to_pylist()
        [datetime.date(2024, 5, 1), None]
        """
        params = (_format(format, "str.strptime"),)
        return self._column._call("str_strptime", params=params, dtype=dtype, tried=True)

    def replace(self, old: str, new: str) -> Column:
        """The text with `new` wherever `old` stands; this is no regular expression.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["1,5", "2", None]}))
        >>> flow.select(y=col("x").str.replace(",", ".")).collect()["y"].to_pylist()
        ['1.5', '2', None]
        """
        if not _text(old, "replace"):
            raise BadArgument("str.replace needs a text to look for", at=here(), found=repr(old))
        return self._column._call("str_replace", params=(old, _text(new, "replace")))

    def split_part(self, by: str, number: int) -> Column:
        """Part `number` of the text split at `by`: 1 is the first, -1 the last; empty where there are fewer.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"path": ["a/b/c", "d"]}))
        >>> flow.select(second=col("path").str.split_part("/", 2)).collect()["second"].to_pylist()
        ['b', '']
        """
        if not _text(by, "split_part"):
            raise BadArgument("str.split_part needs a text to split at", at=here(), found=repr(by))
        if isinstance(number, bool) or not isinstance(number, int) or not number or abs(number) >= 1 << 31:
            raise BadArgument("str.split_part takes the number of a part: 1 is the first, -1 the last", at=here(),
                              found=repr(number))
        return self._column._call("str_split_part", params=(by, number))

    def strip(self, chars: str | None = None) -> Column:
        """The text without whitespace at its ends, or without any of the characters in `chars`.

        >>> from scalein import col
        >>> col("name").str.strip(), col("price").str.lstrip("$€")
        (Column(name.str.strip()), Column(price.str.lstrip('$€')))
        """
        return self._strip("strip", chars)

    def lstrip(self, chars: str | None = None) -> Column:
        """As `strip`, but only at the beginning.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["  a ", "b", None]}))
        >>> flow.select(y=col("x").str.lstrip()).collect()["y"].to_pylist()
        ['a ', 'b', None]
        """
        return self._strip("lstrip", chars)

    def rstrip(self, chars: str | None = None) -> Column:
        """As `strip`, but only at the end.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["  a ", "b", None]}))
        >>> flow.select(y=col("x").str.rstrip()).collect()["y"].to_pylist()
        ['  a', 'b', None]
        """
        return self._strip("rstrip", chars)

    def _strip(self, method: str, chars: str | None) -> Column:
        given = None if chars is None else _text(chars, method)
        return self._column._call(f"str_{method}", params=(given,))


def _regex(pattern: object, method: str) -> str:
    text = _text(pattern, method)
    _try_regex(text, 0, method)
    return text


def _try_regex(pattern: str, group: int, method: str) -> None:
    """Raise if RE2 refuses the pattern, or if it has no such group."""
    from scalein.arrow_functions import extract_group, matches_regex  # imports pyarrow.compute, which takes a while

    try:
        matches_regex(pa.array([""], pa.large_string()), pattern)  # alone first: `extract_group` puts more around it
        extract_group(pa.array([""], pa.large_string()), pattern, group)
    except pa.ArrowInvalid as error:
        why = str(error).splitlines()[0]
        if why.startswith("Invalid replacement"):
            raise BadArgument(f"the pattern of str.{method} has no group {group}", at=here(), found=repr(pattern),
                              hint="a group is what stands in parentheses; 0 is the whole match") from None
        raise BadArgument(f"str.{method} takes a valid regular expression", at=here(), found=repr(pattern),
                          why=why.removeprefix("Invalid regular expression: ").partition(": ")[0],
                          hint="the syntax is RE2's, without look-around and references") from None


def _text(value: object, method: str) -> str:
    if not isinstance(value, str):
        raise BadArgument(f"str.{method} takes a text", at=here(), found=repr(value))
    return value


def _format(pattern: object, method: str) -> str:
    """A format of times, spelled out, if it is one."""
    if not isinstance(pattern, str):
        hint = 'for example "%Y-%m-%d"' + (", after the type" if method == "str.strptime" else "")
        raise BadArgument(f"{method} takes a format", at=here(), found=repr(pattern), hint=hint)
    given, pattern = pattern, time_formats.spelled_out(pattern)
    try:
        time_formats.parts(pattern)
        if method == "str.strptime":
            time_formats.check_readable(pattern)
    except time_formats.BadFormat as error:
        raise BadArgument(f"{method} does not take this format", at=here(), found=shortened(given),
                          why=error) from None
    return pattern


class ListMethods(ForeignNames):
    """Functions of lists; `flow.explode(name)` makes rows of their elements."""

    __slots__ = ("_column",)
    _called, _elsewhere = ".list", hints.LIST

    def __init__(self, column: Column) -> None:
        self._column = column

    def len(self) -> Column:
        """The number of elements; null for a null list.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [["a", "b"], [], None]}))
        >>> flow.select(y=col("x").list.len()).collect()["y"].to_pylist()
        [2, 0, None]
        """
        return self._column._call("list_len")

    def get(self, number: int) -> Column:
        """Element `number`, counted from 0 or, if negative, from the end; null where there is none.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"tags": [["a", "b"], [], None]}))
        >>> flow.select(last=col("tags").list.get(-1), n=col("tags").list.len()).collect().to_pydict()
        {'last': ['b', None, None], 'n': [2, 0, None]}
        """
        if isinstance(number, bool) or not isinstance(number, int) or abs(number) >= 1 << 31:
            raise BadArgument("list.get takes the number of an element", at=here(), found=repr(number))
        return self._column._call("list_get", params=(number,))


class StructMethods(ForeignNames):
    """Functions of structs."""

    __slots__ = ("_column",)
    _called, _elsewhere = ".struct", hints.STRUCT

    def __init__(self, column: Column) -> None:
        self._column = column

    def field(self, name: str) -> Column:
        """A field of the struct; null where the struct is.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"at": [{"x": 1, "y": 2}, None]}))
        >>> flow.select(x=col("at").struct.field("x")).collect().to_pydict()
        {'x': [1, None]}
        """
        if not isinstance(name, str):
            raise BadArgument("struct.field takes the name of a field", at=here(), found=repr(name))
        return self._column._call("struct_field", params=(name,))


class DtMethods(ForeignNames):
    """Functions of timestamps; those down to `ordinal_day` take dates as well. A zone means its local time.

    `total_days` and its like are of durations: what `-` of two times or dates gives.
    """

    __slots__ = ("_column",)
    _called, _elsewhere = ".dt", hints.DT

    def __init__(self, column: Column) -> None:
        self._column = column

    def year(self) -> Column:
        """The year.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.year()).collect()["y"].to_pylist()
        [2024, None]
        """
        return self._column._call("dt_year")

    def quarter(self) -> Column:
        """The quarter of the year, from 1.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.quarter()).collect()["y"].to_pylist()
        [2, None]
        """
        return self._column._call("dt_quarter")

    def month(self) -> Column:
        """The month, from 1.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.month()).collect()["y"].to_pylist()
        [5, None]
        """
        return self._column._call("dt_month")

    def day(self) -> Column:
        """The day of the month, from 1.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.day()).collect()["y"].to_pylist()
        [1, None]
        """
        return self._column._call("dt_day")

    def weekday(self) -> Column:
        """The day of the week: Monday is 1, Sunday is 7.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.weekday()).collect()["y"].to_pylist()
        [3, None]
        """
        return self._column._call("dt_weekday")

    def ordinal_day(self) -> Column:
        """The day of the year, from 1.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.ordinal_day()).collect()["y"].to_pylist()
        [122, None]
        """
        return self._column._call("dt_ordinal_day")

    def hour(self) -> Column:
        """The hour, 0 to 23.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.hour()).collect()["y"].to_pylist()
        [13, None]
        """
        return self._column._call("dt_hour")

    def minute(self) -> Column:
        """The minute, 0 to 59.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.minute()).collect()["y"].to_pylist()
        [45, None]
        """
        return self._column._call("dt_minute")

    def second(self) -> Column:
        """The second, 0 to 59.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.second()).collect()["y"].to_pylist()
        [30, None]
        """
        return self._column._call("dt_second")

    def millisecond(self) -> Column:
        """The fraction of the second, in milliseconds.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.millisecond()).collect()["y"].to_pylist()
        [250, None]
        """
        return self._column._call("dt_millisecond")

    def microsecond(self) -> Column:
        """The fraction of the second, in microseconds.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.microsecond()).collect()["y"].to_pylist()
        [250000, None]
        """
        return self._column._call("dt_microsecond")

    def nanosecond(self) -> Column:
        """The fraction of the second, in nanoseconds.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.nanosecond()).collect()["y"].to_pylist()
        [250000000, None]
        """
        return self._column._call("dt_nanosecond")

    def truncate(self, every: Duration) -> Column:
        """The time rounded down to a multiple of `every` since the epoch.

        >>> from scalein import col
        >>> col("at").dt.truncate("15m")
        Column(at.dt.truncate('15m'))
        """
        return self._column._call("dt_truncate", params=(span(every, "length to truncate to", here()),))

    def epoch(self, unit: str = "us") -> Column:
        """The time since the epoch in whole units: "s", "ms", "us" or "ns".

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(1970, 1, 2), None]}))
        >>> flow.select(y=col("x").dt.epoch("s")).collect()["y"].to_pylist()
        [86400, None]
        """
        if unit not in UNITS_PER_SECOND:
            raise BadArgument("dt.epoch takes a unit", at=here(), found=repr(unit), has=", ".join(UNITS_PER_SECOND))
        return self._column._call("dt_epoch", params=(unit,))

    def strftime(self, format: str) -> Column:
        """The time or date as a text in a format, in the directives of Python's own `strftime`, and in English.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 1, 13, 45, 30, 250_000), None]}))
        >>> flow.select(y=col("x").dt.strftime("%d %b %Y, %H:%M")).collect()["y"].to_pylist()
        ['01 May 2024, 13:45', None]
        """
        return self._column._call("dt_strftime", params=(_format(format, "dt.strftime"),))

    def total_days(self) -> Column:
        """The whole days of a duration, without fractions.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 3, 12), None]}))
        >>> flow.select(y=(col("x") - datetime(2024, 5, 1)).dt.total_days()).collect()["y"].to_pylist()
        [2, None]
        """
        return self._column._call("dt_total_days")

    def total_hours(self) -> Column:
        """The whole hours of a duration, without fractions.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 3, 12), None]}))
        >>> flow.select(y=(col("x") - datetime(2024, 5, 1)).dt.total_hours()).collect()["y"].to_pylist()
        [60, None]
        """
        return self._column._call("dt_total_hours")

    def total_minutes(self) -> Column:
        """The whole minutes of a duration, without fractions.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 3, 12), None]}))
        >>> flow.select(y=(col("x") - datetime(2024, 5, 1)).dt.total_minutes()).collect()["y"].to_pylist()
        [3600, None]
        """
        return self._column._call("dt_total_minutes")

    def total_seconds(self) -> Column:
        """The whole seconds of a duration, without fractions.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 3, 12), None]}))
        >>> flow.select(y=(col("x") - datetime(2024, 5, 1)).dt.total_seconds()).collect()["y"].to_pylist()
        [216000, None]
        """
        return self._column._call("dt_total_seconds")

    def total_milliseconds(self) -> Column:
        """The whole milliseconds of a duration, without fractions.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 3, 12), None]}))
        >>> flow.select(y=(col("x") - datetime(2024, 5, 1)).dt.total_milliseconds()).collect()["y"].to_pylist()
        [216000000, None]
        """
        return self._column._call("dt_total_milliseconds")

    def total_microseconds(self) -> Column:
        """The whole microseconds of a duration, without fractions.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 3, 12), None]}))
        >>> flow.select(y=(col("x") - datetime(2024, 5, 1)).dt.total_microseconds()).collect()["y"].to_pylist()
        [216000000000, None]
        """
        return self._column._call("dt_total_microseconds")

    def total_nanoseconds(self) -> Column:
        """The whole nanoseconds of a duration, without fractions.

        >>> from datetime import datetime
        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [datetime(2024, 5, 3, 12), None]}))
        >>> flow.select(y=(col("x") - datetime(2024, 5, 1)).dt.total_nanoseconds()).collect()["y"].to_pylist()
        [216000000000000, None]
        """
        return self._column._call("dt_total_nanoseconds")


# Aggregates of a column, for `group_by(...).agg(...)`: `col("price").sum()`.

class Aggregates(ForeignNames):
    """The aggregate methods of a Column."""

    __slots__ = ()

    if TYPE_CHECKING:  # Column's own

        def _agg(self, fn: str, *others: object, params: tuple[object, ...] = ()) -> Column: ...
        def _filtered(self, conditions: tuple[object, ...]) -> Column: ...
        def _over(self, keys: tuple[object, ...], order_by: object, descending: object, rows: object,
                  within: object) -> Column: ...

    def count(self) -> Column:
        """The number of values that are not null.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, None, 3]}))
        >>> flow.group_by().agg(y=col("x").count()).collect()["y"].to_pylist()
        [2]
        """
        return self._agg("count_valid")

    def filter(self, *conditions: object) -> Column:
        """The aggregate over only the rows where every condition (a column, or the name of one) is true.

        Null is not true. A group without such rows has a null, or a count of 0.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, 2, 4], "ok": [True, None, True]}))
        >>> flow.group_by().agg(n=si.count().filter(col("x") > 1), s=col("x").sum().filter("ok")).collect().to_pydict()
        {'n': [2], 's': [5]}
        """
        return self._filtered(conditions)

    def sum(self) -> Column:
        """The sum of the values; integers come out in 64 bits, and overflow is an error. Of bools it counts the true.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, None, 3]}))
        >>> flow.group_by().agg(y=col("x").sum()).collect()["y"].to_pylist()
        [4]
        """
        return self._agg("sum")

    def mean(self) -> Column:
        """The mean of the values, as a float; of bools the share that is true.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, None, 3]}))
        >>> flow.group_by().agg(y=col("x").mean()).collect()["y"].to_pylist()
        [2.0]
        """
        return self._agg("mean")

    def min(self) -> Column:
        """The least value; NaN is the greatest float.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [4, None, 3]}))
        >>> flow.group_by().agg(y=col("x").min()).collect()["y"].to_pylist()
        [3]
        """
        return self._agg("min")

    def max(self) -> Column:
        """The greatest value; NaN is the greatest float.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [4, None, 3]}))
        >>> flow.group_by().agg(y=col("x").max()).collect()["y"].to_pylist()
        [4]
        """
        return self._agg("max")

    def var(self) -> Column:
        """The sample variance (ddof 1); null for fewer than two values.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1.0, 2.0, 6.0]}))
        >>> flow.group_by().agg(y=col("x").var()).collect()["y"].to_pylist()
        [7.0]
        """
        return self._agg("var")

    def std(self) -> Column:
        """The sample standard deviation (ddof 1); null for fewer than two values.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1.0, 2.0, 3.0]}))
        >>> flow.group_by().agg(y=col("x").std()).collect()["y"].to_pylist()
        [1.0]
        """
        return self._agg("std")

    def first(self) -> Column:
        """The value of the group's first row, null included.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["a", "b"]}))
        >>> flow.group_by().agg(y=col("x").first()).collect()["y"].to_pylist()
        ['a']
        """
        return self._agg("first")

    def last(self) -> Column:
        """The value of the group's last row, null included.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["a", None]}))
        >>> flow.group_by().agg(y=col("x").last()).collect()["y"].to_pylist()
        [None]
        """
        return self._agg("last")

    def arg_min(self, by: object) -> Column:
        """The value in the row where `by` (a name or column) is least; the first such row.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"user": ["ann", "bob"], "price": [5, 3]}))
        >>> flow.group_by().agg(y=col("user").arg_min("price")).collect()["y"].to_pylist()
        ['bob']
        """
        return self._agg("arg_min", by)

    def arg_max(self, by: object) -> Column:
        """The value in the row where `by` (a name or column) is greatest; the first such row.

        >>> from scalein import col
        >>> col("user").arg_max("price")
        Column(user.arg_max(price))
        """
        return self._agg("arg_max", by)

    def n_unique(self) -> Column:
        """The number of different values, without null.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["a", "b", "a", None]}))
        >>> flow.group_by().agg(y=col("x").n_unique()).collect()["y"].to_pylist()
        [2]
        """
        return self._agg("n_unique")

    def quantile(self, q: float) -> Column:
        """The value below which a share `q` of the values lies, interpolated linearly; 0.5 is the median.

        >>> from scalein import col
        >>> col("latency").quantile(0.99)
        Column(latency.quantile(0.99))
        """
        return self._agg("quantile", params=(_share(q, "quantile"),))

    def approx_n_unique(self) -> Column:
        """About how many different values there are (HyperLogLog), in 512 bytes a group.

        Usually within 5 %, rarely off by more than 15 %.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["a", "b", "a", None]}))
        >>> flow.group_by().agg(y=col("x").approx_n_unique()).collect()["y"].to_pylist()
        [2]
        """
        return self._agg("approx_n_unique")

    def approx_quantile(self, q: float) -> Column:
        """About the `quantile(q)`: of values rounded to 8 significant bits, of which a group keeps each once.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1.0, 2.0, 3.0]}))
        >>> flow.group_by().agg(y=col("x").approx_quantile(0.5)).collect()["y"].to_pylist()
        [2.0]
        """
        return self._agg("approx_quantile", params=(_share(q, "approx_quantile"),))

    def median(self) -> Column:
        """The value in the middle, or the mean of the two that are: `quantile(0.5)`.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, 2, 9, None]}))
        >>> flow.group_by().agg(y=col("x").median()).collect()["y"].to_pylist()
        [2.0]
        """
        return self._agg("quantile", params=(0.5,))

    def collect(self) -> Column:
        """The values as a list, in the source's order; nulls are left out.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": ["b", None, "a"]}))
        >>> flow.group_by().agg(y=col("x").collect()).collect()["y"].to_pylist()
        [['b', 'a']]
        """
        return self._agg("collect")

    def top_k(self, k: int, by: object) -> Column:
        """The values in the `k` rows where `by` is greatest, as a list: the greatest first, ties in the source's order.

        Rows without a value, or without `by`, do not count.

        >>> from scalein import col
        >>> col("user").top_k(3, by="price")
        Column(user.top_k(3, price))
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise BadArgument("top_k takes a whole number of rows, at least 1", at=here(), found=repr(k))
        return self._agg("top_k", by, params=(k,))

    # --- over other rows

    def lag(self, n: int = 1) -> Column:
        """The value `n` rows before, for `over`; null where there is no such row.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"k": ["a", "b", "a"], "x": [1, 2, 3]}))
        >>> flow.with_columns(before=col("x").lag().over("k")).collect()["before"].to_pylist()
        [None, None, 1]
        """
        return self._agg("lag", params=(_steps(n, "lag"),))

    def lead(self, n: int = 1) -> Column:
        """The value `n` rows later, for `over`; null where there is no such row.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"k": ["a", "b", "a"], "x": [1, 2, 3]}))
        >>> flow.with_columns(next=col("x").lead().over("k")).collect()["next"].to_pylist()
        [3, None, None]
        """
        return self._agg("lead", params=(_steps(n, "lead"),))

    def over(self, *keys: Column | str | Sequence[Column | str],
             order_by: Column | str | Sequence[Column | str] | None = None,
             descending: bool | Sequence[bool] = False, rows: int | None = None,
             within: Duration | None = None) -> Column:
        """For each row, an aggregate of the rows with the same keys, or a function such as `lag` and `si.row_number()`.

        Without `order_by`, an aggregate is of all rows with these keys. With it, of this row and those before it in the
        order: all of them, at most `rows` together, or those whose time is at most `within` earlier (and those of the
        same time). Rows of equal order are in the source's, and so are all rows of `rows=` and of functions without
        `order_by`; nulls come first. Without keys, all rows are one partition. With `order_by` the event time of
        `with_watermark`, rows without a time are dropped, and in a job a row comes when the watermark has passed it.

        It stands in `with_columns`, `select` and `filter`, also within other expressions. Float sums are summed anew
        for each frame, never by subtracting what leaves it. Aggregates that need all values of a frame (quantiles,
        lists, `n_unique`, classes of your own) take time for each row of each frame.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"k": ["a", "b", "a", "a"], "t": [1, 2, 3, 5], "x": [1, 2, 3, 4]}))
        >>> flow.select(s=col("x").sum().over("k", order_by="t", rows=2)).collect()["s"].to_pylist()
        [1, 2, 4, 7]
        >>> flow.select(s=col("x").sum().over("k", order_by="t", within=2)).collect()["s"].to_pylist()
        [1, 2, 4, 7]
        >>> flow.select(share=col("x") / col("x").sum().over("k")).collect()["share"].to_pylist()
        [0.125, 1.0, 0.375, 0.5]
        >>> flow.filter(si.row_number().over("k", order_by="x", descending=True) == 1).collect()["x"].to_pylist()
        [2, 4]
        """
        return self._over(keys, order_by, descending, rows, within)


def _share(q: float, fn: str) -> float:
    if isinstance(q, bool) or not isinstance(q, int | float) or not 0 <= q <= 1:
        raise BadArgument(f"{fn} takes a share between 0 and 1", at=here(), found=repr(q),
                          hint="write 0.95 for the 95th percentile")
    return float(q)


def _steps(n: object, name: str) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**62:
        raise BadArgument(f"{name} takes a number of rows, 0 or more", at=here(), found=repr(n),
                          hint="lead(n) is lag(-n)" if isinstance(n, int) and not isinstance(n, bool) else None)
    return n
