"""The functions of text and of times: what `col("x").str` and `col("x").dt` give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalein.dtypes import UNITS_PER_SECOND
from scalein.durations import Duration, span
from scalein.errors import BadArgument, here

if TYPE_CHECKING:
    from scalein.column import Column


class StrMethods:
    """Functions of text. Positions and lengths count code points."""

    __slots__ = ("_column",)

    def __init__(self, column: Column) -> None:
        self._column = column

    def lower(self) -> Column:
        """The text in lower case."""
        return self._column._call("lower")

    def upper(self) -> Column:
        """The text in upper case."""
        return self._column._call("upper")

    def len(self) -> Column:
        """The number of code points."""
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
        """True where the text begins with `prefix`."""
        return self._column._call("starts_with", params=(_text(prefix, "starts_with"),))

    def ends_with(self, suffix: str) -> Column:
        """True where the text ends with `suffix`."""
        return self._column._call("ends_with", params=(_text(suffix, "ends_with"),))

    def contains(self, text: str) -> Column:
        """True where `text` occurs, as it is: this is no regular expression."""
        return self._column._call("contains", params=(_text(text, "contains"),))


def _text(value: object, method: str) -> str:
    if not isinstance(value, str):
        raise BadArgument(f"str.{method} takes a text", at=here(), found=repr(value))
    return value


class DtMethods:
    """Functions of timestamps; those down to `ordinal_day` take dates as well. A zone means its local time."""

    __slots__ = ("_column",)

    def __init__(self, column: Column) -> None:
        self._column = column

    def year(self) -> Column:
        """The year."""
        return self._column._call("dt_year")

    def quarter(self) -> Column:
        """The quarter of the year, from 1."""
        return self._column._call("dt_quarter")

    def month(self) -> Column:
        """The month, from 1."""
        return self._column._call("dt_month")

    def day(self) -> Column:
        """The day of the month, from 1."""
        return self._column._call("dt_day")

    def weekday(self) -> Column:
        """The day of the week: Monday is 1, Sunday is 7."""
        return self._column._call("dt_weekday")

    def ordinal_day(self) -> Column:
        """The day of the year, from 1."""
        return self._column._call("dt_ordinal_day")

    def hour(self) -> Column:
        """The hour, 0 to 23."""
        return self._column._call("dt_hour")

    def minute(self) -> Column:
        """The minute, 0 to 59."""
        return self._column._call("dt_minute")

    def second(self) -> Column:
        """The second, 0 to 59."""
        return self._column._call("dt_second")

    def millisecond(self) -> Column:
        """The fraction of the second, in milliseconds."""
        return self._column._call("dt_millisecond")

    def microsecond(self) -> Column:
        """The fraction of the second, in microseconds."""
        return self._column._call("dt_microsecond")

    def nanosecond(self) -> Column:
        """The fraction of the second, in nanoseconds."""
        return self._column._call("dt_nanosecond")

    def truncate(self, every: Duration) -> Column:
        """The time rounded down to a multiple of `every` since the epoch.

        >>> from scalein import col
        >>> col("at").dt.truncate("15m")
        Column(at.dt.truncate('15m'))
        """
        return self._column._call("dt_truncate", params=(span(every, "length to truncate to", here()),))

    def epoch(self, unit: str = "us") -> Column:
        """The time since the epoch in whole units: "s", "ms", "us" or "ns"."""
        if unit not in UNITS_PER_SECOND:
            raise BadArgument("dt.epoch takes a unit", at=here(), found=repr(unit), has=", ".join(UNITS_PER_SECOND))
        return self._column._call("dt_epoch", params=(unit,))
