"""Text of times and times of text: `strftime`, `strptime`, and casts of ISO 8601 to timestamps and dates.

A format is known when a kernel is made, so that nothing is interpreted in a row. A reader goes through the bytes of a
text once, from left to right; beyond its end it reads zeros, which are neither digits nor signs. What a writer may
write at most is known, so that it takes so many bytes and uses those that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llvmlite import ir

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind, ticks_per_day
from scalein.ir.functions.casts import is_utc
from scalein.ir.time_formats import MONTHS, WEEKDAYS, Part, parts
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I8, I32, I64, I128, Fn, Var, const
from scalein.llvm_backend.functions.arithmetic import floor_divide
from scalein.llvm_backend.functions.dates import civil, days_before, modulo
from scalein.llvm_backend.functions.registry import CallSite
from scalein.llvm_backend.keys import byte_mask, first_bytes
from scalein.llvm_backend.text_arena import new_text
from scalein.llvm_backend.values import Str

DAY_S = 86_400
_NAME_BYTES = 16  # of a name in its table, and of what is copied
_LOW_BITS = 0x7F7F7F7F7F7F7F7F
_YEAR_BYTES = 20  # of any year in 64 bits, with its sign


# --- reading -----------------------------------------------------------------------------------------------------


class _Reader:
    """A place in a text, and whether everything before it was as it must be."""

    def __init__(self, code: Code, text: Str) -> None:
        self.code, self.f, self.text = code, code.f, text
        self.at: Var = self.f.var(I64, const(0))
        self.good: Var = self.f.var(I1, const(1, I1))

    def byte(self, ahead: int = 0) -> ir.Value:
        """The next byte, zero at the end."""
        f, b = self.f, self.f.b
        place = b.add(self.at.get(), const(ahead))
        is_inside = b.icmp_signed("<", place, self.text.size)
        return f.load_input(b.select(is_inside, f.byte_at(self.text.ptr, place), self.code.text(b"")), I8)

    def demand(self, condition: ir.Value) -> None:
        self.good.set(self.f.b.and_(self.good.get(), condition))

    def skip(self, count: ir.Value) -> None:
        self.at.set(self.f.b.add(self.at.get(), count))

    def is_next(self, *characters: str) -> ir.Value:
        byte = self.byte()
        found = self.f.any_of(*(self.f.b.icmp_unsigned("==", byte, const(ord(each), I8)) for each in characters))
        assert found is not None
        return found

    def expect(self, content: bytes) -> None:
        """Text that stands for itself."""
        for each in content:
            self.demand(self.f.b.icmp_unsigned("==", self.byte(), const(each, I8)))
            self.skip(const(1))

    def number(self, least: int, most: int) -> ir.Value:
        """A number of so many digits, at most eight: as many as there are."""
        b = self.f.b
        if least == most:
            return self._digits(most)
        found, count = self._next_digits(most)
        self.demand(b.icmp_unsigned(">=", count, const(least)))
        self.skip(count)
        unused = b.shl(b.sub(const(8), count), const(3))
        aligned = b.shl(found, b.and_(unused, const(63)))  # its last digit in the last byte
        return b.select(b.icmp_unsigned("==", count, const(0)), const(0), self._eight_digits(aligned))

    def _digits(self, count: int) -> ir.Value:
        """A number of just so many digits, by one load."""
        f, b = self.f, self.f.b
        is_inside = b.icmp_signed("<=", b.add(self.at.get(), const(count)), self.text.size)
        place = b.select(is_inside, f.byte_at(self.text.ptr, self.at.get()), self.code.text(b""))
        word = f.load_input(place, ir.IntType(8 * count), align=1)
        value: ir.Value = const(0)
        for k in range(count):
            digit = b.sub(b.trunc(b.lshr(word, const(8 * k, word.type)), I8), const(ord("0"), I8))
            self.demand(b.icmp_unsigned("<", digit, const(10, I8)))
            value = b.add(b.mul(value, const(10)), b.zext(digit, I64))
        self.skip(const(count))
        return value

    def _next_digits(self, most: int) -> tuple[ir.Value, ir.Value]:
        """The next digits as bytes 0 to 9, zeros after them, and how many they are."""
        f, b = self.f, self.f.b
        left = b.sub(self.text.size, self.at.get())
        word, _ = first_bytes(self.code, Str(f.byte_at(self.text.ptr, self.at.get()), f.max(left, const(0))))
        plain = b.xor(word, const(0x3030303030303030))
        # The highest bit of a byte that is no digit: either it was set before, or 118 makes 10 and more carry into it.
        others = b.and_(b.or_(b.add(b.and_(plain, const(_LOW_BITS)), const(0x7676767676767676)), plain),
                        const(~_LOW_BITS))
        zeros = f.call("llvm.cttz.i64", I64, [others, const(0, I1)])
        count = f.min(b.lshr(zeros, const(3)), const(most))
        return b.and_(plain, byte_mask(f, count)), count

    def _eight_digits(self, digits: ir.Value) -> ir.Value:
        """The number of eight digits, one in each byte: first pairs of them, then fours."""
        b = self.f.b
        pairs = b.lshr(b.mul(digits, const(10 * 256 + 1)), const(8))
        fours = b.lshr(b.mul(b.and_(pairs, const(0x00FF00FF00FF00FF)), const(100 * 65536 + 1)), const(16))
        return b.lshr(b.mul(b.and_(fours, const(0x0000FFFF0000FFFF)), const((10_000 << 32) + 1)), const(32))

    def fraction(self, digits: int) -> ir.Value:
        """One digit or more after a point, in units of 10^-digits; at most so many."""
        b = self.f.b
        found, count = self._next_digits(min(digits, 8))
        self.demand(b.icmp_unsigned(">=", count, const(1)))
        self.skip(count)
        value = self._eight_digits(found)
        if digits <= 8:
            return b.udiv(value, const(10 ** (8 - digits)))
        ninth = b.sub(self.byte(), const(ord("0"), I8))
        is_there = b.and_(b.icmp_unsigned("==", count, const(8)), b.icmp_unsigned("<", ninth, const(10, I8)))
        self.skip(b.zext(is_there, I64))
        return b.add(b.mul(value, const(10)), b.select(is_there, b.zext(ninth, I64), const(0)))

    def name(self, names: Sequence[str]) -> ir.Value:
        """The number of a name, from 0, in any case of its letters: its first three, and the rest if it is there."""
        f, b = self.f, self.f.b
        found = f.var(I64, const(-1))
        letters = [b.or_(self.byte(ahead), const(0x20, I8)) for ahead in range(max(map(len, names)))]

        def same(name: str, start: int) -> ir.Value:
            tests = (b.icmp_unsigned("==", letters[k], const(ord(name[k].lower()), I8))
                     for k in range(start, len(name)))
            return f.all_of(*tests) or const(1, I1)

        length = f.var(I64, const(0))
        for number, name in enumerate(names):
            short = same(name[:3], 0)
            size = b.select(same(name, 3), const(len(name)), const(3))
            found.set(b.select(short, const(number), found.get()))
            length.set(b.select(short, size, length.get()))
        self.demand(b.icmp_signed(">=", found.get(), const(0)))
        self.skip(length.get())
        return found.get()

    def offset(self) -> ir.Value:
        """Seconds of an offset from UTC: Z, +02:00, +0200 or +02."""
        f, b = self.f, self.f.b
        seconds = f.var(I64, const(0))
        is_utc_here, is_negative = self.is_next("Z"), self.is_next("-")
        self.demand(self.is_next("Z", "+", "-"))
        self.skip(const(1))
        with f.when(b.not_(is_utc_here)):
            hours = self.number(2, 2)
            minutes = f.var(I64, const(0))
            has_colon = self.is_next(":")
            self.skip(b.zext(has_colon, I64))
            is_digit = b.icmp_unsigned("<", b.sub(self.byte(), const(ord("0"), I8)), const(10, I8))
            with f.when(b.or_(has_colon, is_digit)):
                minutes.set(self.number(2, 2))
            self.demand(b.icmp_unsigned("<", hours, const(24)))
            self.demand(b.icmp_unsigned("<", minutes.get(), const(60)))
            ahead = b.add(b.mul(hours, const(3600)), b.mul(minutes.get(), const(60)))
            seconds.set(b.select(is_negative, b.sub(const(0), ahead), ahead))
        return seconds.get()

    def days(self, year: ir.Value, month: ir.Value, day: ir.Value) -> ir.Value:
        """The number of a day, which must be one of the calendar."""
        b = self.f.b
        self.demand(b.icmp_unsigned("<", b.sub(month, const(1)), const(12)))
        is_long = b.and_(b.add(month, b.lshr(month, const(3))), const(1))
        is_february = b.icmp_unsigned("==", month, const(2))
        leap = b.zext(_is_leap(self.f, year), I64)
        last = b.select(is_february, b.add(const(28), leap), b.add(const(30), is_long))
        self.demand(b.and_(b.icmp_signed(">=", day, const(1)), b.icmp_signed("<=", day, last)))
        return _day_number(self.f, year, month, day)

    def clock(self, hour: ir.Value, minute: ir.Value, second: ir.Value) -> ir.Value:
        """Seconds since midnight."""
        b = self.f.b
        for value, count in ((hour, 24), (minute, 60), (second, 60)):
            self.demand(b.icmp_unsigned("<", value, const(count)))
        return b.add(b.add(b.mul(hour, const(3600)), b.mul(minute, const(60))), second)

    def instant(self, seconds: ir.Value, fraction: ir.Value, dtype: DType) -> ir.Value:
        """Seconds and a fraction in units of a type, which must hold them: years to 9999 fit but for nanoseconds."""
        b, per_second = self.f.b, UNITS_PER_SECOND[dtype.unit]
        if dtype.unit != "ns":
            return b.add(b.mul(seconds, const(per_second)), fraction)
        wide = b.mul(b.sext(seconds, I128), const(per_second, I128))
        wide = b.add(wide, b.sext(fraction, I128))
        found = b.trunc(wide, I64)
        self.demand(b.icmp_signed("==", b.sext(found, I128), wide))
        return found

    def ended(self) -> ir.Value:
        """Whether all was good, and nothing is left."""
        self.demand(self.f.b.icmp_unsigned("==", self.at.get(), self.text.size))
        return self.good.get()


def _is_leap(f: Fn, year: ir.Value) -> ir.Value:
    b = f.b

    def divides(by: int) -> ir.Value:
        return b.icmp_unsigned("==", b.urem(year, const(by)), const(0))

    return b.and_(divides(4), b.or_(b.not_(divides(100)), divides(400)))


def _day_number(f: Fn, year: ir.Value, month: ir.Value, day: ir.Value) -> ir.Value:
    """Days since 1970-01-01 of a date in a year from 0 to 9999."""
    b = f.b
    is_early = b.icmp_signed("<=", month, const(2))
    year = b.add(year, b.select(is_early, const(399), const(400)))  # from March on, and 400 years later: not negative
    of_march = b.select(is_early, b.add(month, const(9)), b.sub(month, const(3)))
    of_year = b.add(b.udiv(b.add(b.mul(of_march, const(153)), const(2)), const(5)), b.sub(day, const(1)))
    leaps = b.add(b.sub(b.udiv(year, const(4)), b.udiv(year, const(100))), b.udiv(year, const(400)))
    return b.sub(b.add(b.add(b.mul(year, const(365)), leaps), of_year), const(719_468 + 146_097))


def read_iso(c: CallSite) -> ir.Value:
    """A cast of `2024-05-01`, and for timestamps `2024-05-01T13:45:30.25+02:00` with any part from the hour on missing.

    A T or a space stands before the hour. An offset is applied, so that without a zone the time is UTC's. A text
    without one is UTC in a type of UTC; what it is in another zone is not known, so that is impossible.
    """
    f, b, dtype = c.f, c.f.b, c.dtype
    read = _Reader(c.code, c.string)
    year = read.number(4, 4)
    read.expect(b"-")
    month = read.number(2, 2)
    read.expect(b"-")
    day = read.number(2, 2)
    days = read.days(year, month, day)
    if dtype.kind is not Kind.TS:
        c.fail_with("impossible cast", b.not_(read.ended()), c.string)
        return b.trunc(days, I32) if dtype.kind is Kind.DATE else b.mul(days, const(ticks_per_day(dtype)))
    seconds, fraction, has_zone = f.var(I64, const(0)), f.var(I64, const(0)), f.var(I1, const(0, I1))
    with f.when(b.icmp_signed("<", read.at.get(), c.string.size)):
        read.demand(read.is_next("T", " "))
        read.skip(const(1))
        seconds.set(_iso_clock(read, fraction, dtype))
        with f.when(b.icmp_signed("<", read.at.get(), c.string.size)):
            has_zone.set(const(1, I1))
            seconds.set(b.sub(seconds.get(), read.offset()))
    if not is_utc(dtype):
        read.demand(has_zone.get())
    found = read.instant(b.add(b.mul(days, const(DAY_S)), seconds.get()), fraction.get(), dtype)
    c.fail_with("impossible cast", b.not_(read.ended()), c.string)
    return found


def _iso_clock(read: _Reader, fraction: Var, dtype: DType) -> ir.Value:
    """Seconds of `13`, `13:45`, `13:45:30` and `13:45:30.25`; the fraction goes where it is wanted."""
    f = read.f
    minute, second = f.var(I64, const(0)), f.var(I64, const(0))
    hour = read.number(2, 2)
    with f.when(read.is_next(":")):
        read.skip(const(1))
        minute.set(read.number(2, 2))
        with f.when(read.is_next(":")):
            read.skip(const(1))
            second.set(read.number(2, 2))
            digits = len(str(UNITS_PER_SECOND[dtype.unit])) - 1
            if digits:
                with f.when(read.is_next(".")):
                    read.skip(const(1))
                    fraction.set(read.fraction(digits))
    return read.clock(hour, minute.get(), second.get())


def lower_strptime(c: CallSite) -> ir.Value:
    """A time of a text in a format."""
    b, dtype = c.f.b, c.dtype
    read = _Reader(c.code, c.string)
    found: dict[str, ir.Value] = {}
    for letter, text in parts(str(c.params[0])):
        match letter:
            case "":
                read.expect(text.encode())
            case "Y":
                found[letter] = read.number(4, 4)
            case "y":
                year = read.number(2, 2)
                found["Y"] = b.add(year, b.select(b.icmp_unsigned("<", year, const(69)), const(2000), const(1900)))
            case "j":
                found[letter] = read.number(1, 3)
            case "b" | "B":
                found["m"] = b.add(read.name(MONTHS), const(1))
            case "a" | "A":
                read.name(WEEKDAYS)
            case "p":
                is_after = read.is_next("P", "p")
                read.demand(read.is_next("A", "a", "P", "p"))
                read.skip(const(1))
                read.demand(read.is_next("M", "m"))
                read.skip(const(1))
                found[letter] = b.select(is_after, const(12), const(0))
            case "f":
                found[letter] = read.fraction(6)
            case "z":
                found[letter] = read.offset()
            case _:
                found[letter] = read.number(1, 2)
    seconds = _read_clock(read, found)
    fraction: ir.Value = const(0)
    if "f" in found and dtype.unit:
        per_second = UNITS_PER_SECOND[dtype.unit]
        fraction = found["f"] if per_second >= 10**6 else b.udiv(found["f"], const(10**6 // per_second))
        fraction = b.mul(fraction, const(per_second // 10**6)) if per_second > 10**6 else fraction
    if dtype.kind is not Kind.TIME:
        days = _read_date(read, found)
        seconds = b.add(b.mul(days, const(DAY_S)), b.sub(seconds, found.get("z", const(0))))
    if dtype.kind in (Kind.DATE, Kind.DATE64):
        value = b.trunc(days, I32) if dtype.kind is Kind.DATE else b.mul(days, const(ticks_per_day(dtype)))
    else:
        value = read.instant(seconds, fraction, dtype)
        value = b.trunc(value, I32) if dtype.bits == 32 else value
    c.fail_with("text that is no such time", b.not_(read.ended()), c.string)
    return value


def _read_clock(read: _Reader, found: dict[str, ir.Value]) -> ir.Value:
    b = read.f.b
    hour = found.get("H", const(0))
    if "I" in found:
        read.demand(b.icmp_unsigned("<", b.sub(found["I"], const(1)), const(12)))
        hour = b.add(b.urem(found["I"], const(12)), found["p"])
    return read.clock(hour, found.get("M", const(0)), found.get("S", const(0)))


def _read_date(read: _Reader, found: dict[str, ir.Value]) -> ir.Value:
    f, b = read.f, read.f.b
    if "j" not in found:
        return read.days(found["Y"], found.get("m", const(1)), found.get("d", const(1)))
    last = b.add(const(365), b.zext(_is_leap(f, found["Y"]), I64))
    read.demand(b.and_(b.icmp_signed(">=", found["j"], const(1)), b.icmp_signed("<=", found["j"], last)))
    return b.add(days_before(f, found["Y"]), b.sub(found["j"], const(1)))


# --- writing -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Time:
    """The parts of a time that a format asks for, each computed once."""

    f: Fn
    ticks: ir.Value  # in 64 bits
    dtype: DType
    known: dict[str, ir.Value] = field(default_factory=dict)

    def part(self, name: str) -> ir.Value:
        if name not in self.known:
            self.known[name] = self._computed(name)
        return self.known[name]

    def _computed(self, name: str) -> ir.Value:
        f, b = self.f, self.f.b
        match name:
            case "days":
                return floor_divide(f, self.ticks, ticks_per_day(self.dtype))
            case "of_day":
                day = ticks_per_day(self.dtype)
                return b.sub(self.ticks, b.mul(self.part("days"), const(day)))
            case "second_of_day":
                return b.sdiv(self.part("of_day"), const(max(1, ticks_per_day(self.dtype) // DAY_S)))
            case "hour":
                return b.sdiv(self.part("second_of_day"), const(3600))
            case "minute":
                return b.srem(b.sdiv(self.part("second_of_day"), const(60)), const(60))
            case "second":
                return b.srem(self.part("second_of_day"), const(60))
            case "microsecond":
                per_second = max(1, ticks_per_day(self.dtype) // DAY_S)
                rest = b.srem(self.part("of_day"), const(per_second))
                scaled = b.mul(rest, const(max(1, 10**6 // per_second)))
                return b.sdiv(scaled, const(max(1, per_second // 10**6)))
            case "weekday":  # Monday is 0
                return modulo(f, b.add(self.part("days"), const(3)), 7)
            case "ordinal":
                return b.add(b.sub(self.part("days"), days_before(f, self.part("year"))), const(1))
            case _:
                self.known.update(zip(("year", "month", "day"), civil(f, self.part("days")), strict=True))
                return self.known[name]


class _Writer:
    """A place in a new text."""

    def __init__(self, code: Code, most: int) -> None:
        self.code, self.f = code, code.f
        self.start = new_text(code, const(most))
        self.size: ir.Value = const(0)

    def byte(self, value: ir.Value) -> None:
        self.f.b.store(value, self.f.byte_at(self.start, self.size))
        self.size = self.f.b.add(self.size, const(1))

    def text(self, content: bytes) -> None:
        for each in content:
            self.byte(const(each, I8))

    def digits(self, value: ir.Value, count: int) -> None:
        """So many digits of a number that has no more."""
        b = self.f.b
        for power in range(count - 1, -1, -1):
            digit = b.urem(b.udiv(value, const(10**power)), const(10))
            self.byte(b.add(b.trunc(digit, I8), const(ord("0"), I8)))

    def year(self, value: ir.Value) -> None:
        """Four digits, or more with a sign where a year needs them."""
        f, b = self.f, self.f.b
        size = f.var(I64, self.size)
        before = self.size
        with f.when_else(b.icmp_unsigned("<", value, const(10_000)), likely=True) as (usual, other):
            with usual:
                self.digits(value, 4)
                size.set(self.size)
            with other:
                self.size = before
                is_negative = b.icmp_signed("<", value, const(0))
                b.store(const(ord("-"), I8), f.byte_at(self.start, self.size))
                start = b.add(before, b.zext(is_negative, I64))
                left = f.var(I64, b.select(is_negative, b.sub(const(0), value), value))
                count = f.var(I64, const(4))
                rest = f.var(I64, b.udiv(left.get(), const(10_000)))
                with f.forever() as counting:
                    counting.stop_if(b.icmp_unsigned("==", rest.get(), const(0)))
                    rest.set(b.udiv(rest.get(), const(10)))
                    count.set(b.add(count.get(), const(1)))
                end = b.add(start, count.get())
                with f.loop(count.get()) as k:
                    digit = b.add(b.trunc(b.urem(left.get(), const(10)), I8), const(ord("0"), I8))
                    b.store(digit, f.byte_at(self.start, b.sub(b.sub(end, k), const(1))))
                    left.set(b.udiv(left.get(), const(10)))
                size.set(end)
        self.size = size.get()

    def name(self, names: Sequence[str], number: ir.Value) -> None:
        """A name by its number."""
        f, b = self.f, self.f.b
        content = b"".join(name.encode().ljust(_NAME_BYTES - 1, b"\0") + bytes([len(name)]) for name in names)
        entry = f.byte_at(self.code.text(content), b.mul(number, const(_NAME_BYTES)))
        target = f.byte_at(self.start, self.size)
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, entry, const(_NAME_BYTES), const(0, I1)])
        self.size = b.add(self.size, b.zext(f.b.load(f.byte_at(entry, _NAME_BYTES - 1), typ=I8), I64))


_DIGITS = {"m": 2, "d": 2, "H": 2, "I": 2, "M": 2, "S": 2, "y": 2, "j": 3, "f": 6, "u": 1, "w": 1}


def _most_bytes(pattern: tuple[Part, ...]) -> int:
    """Bytes that a time takes in a format, at most."""
    return _NAME_BYTES + sum(
        len(text.encode()) if not letter else _YEAR_BYTES if letter == "Y"
        else _DIGITS.get(letter, _NAME_BYTES) for letter, text in pattern)  # fmt: skip


def lower_strftime(c: CallSite) -> Str:
    """A time as a text in a format."""
    f, b, (data,), (dtype,) = c.f, c.f.b, c.args, c.types
    pattern = parts(str(c.params[0]))
    time = _Time(f, b.sext(data, I64) if data.type == I32 else data, dtype)
    write = _Writer(c.code, _most_bytes(pattern))
    for letter, text in pattern:
        match letter:
            case "":
                write.text(text.encode())
            case "Y":
                write.year(time.part("year"))
            case "b":
                write.name([name[:3] for name in MONTHS], b.sub(time.part("month"), const(1)))
            case "B":
                write.name(MONTHS, b.sub(time.part("month"), const(1)))
            case "a":
                write.name([name[:3] for name in WEEKDAYS], time.part("weekday"))
            case "A":
                write.name(WEEKDAYS, time.part("weekday"))
            case "p":
                write.name(("AM", "PM"), b.zext(b.icmp_signed(">=", time.part("hour"), const(12)), I64))
            case "z":
                write.text(b"+0000" if dtype.tz else b"")
            case "Z":
                write.text(b"UTC" if dtype.tz else b"")
            case _:
                write.digits(_number(time, letter), _DIGITS[letter])
    f.set_slot("text.at", f.byte_at(write.start, write.size))  # the rest is free again
    return Str(write.start, write.size)


def _number(time: _Time, letter: str) -> ir.Value:
    f, b = time.f, time.f.b
    match letter:
        case "I":
            hour = b.srem(time.part("hour"), const(12))
            return b.select(b.icmp_signed("==", hour, const(0)), const(12), hour)
        case "y":
            return modulo(f, time.part("year"), 100)
        case "u":
            return b.add(time.part("weekday"), const(1))
        case "w":
            return b.srem(b.add(time.part("weekday"), const(1)), const(7))
    return time.part({"m": "month", "d": "day", "H": "hour", "M": "minute", "S": "second", "j": "ordinal",
                      "f": "microsecond"}[letter])  # fmt: skip
