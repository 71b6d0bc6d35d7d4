"""Python constants as typed literals: which type one has by itself (`own_type`), and whether it fits another (`fit`).
Which of the two it takes beside a column is decided in `unify.py`.

Physical values are what `Lit` holds once it is typed: an int for times (units since the epoch or midnight) and for
decimals (all their digits, without the point), a float that the float type holds exactly, None for null.
"""

from __future__ import annotations

import math
import struct
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import NoneType

import pyarrow as pa

from scalein.dtypes import (
    BOOL,
    DATE,
    F64,
    I64,
    MAX_PRECISION,
    STR,
    TIMES,
    U64,
    UNITS_PER_SECOND,
    DType,
    Kind,
    from_arrow_type_or_none,
    plain_arrow,
)
from scalein.errors import BadArgument, SourceLoc, type_name
from scalein.ir.exprs import Lit

_EPOCH = datetime(1970, 1, 1)
_EPOCH_DAY = date(1970, 1, 1).toordinal()
PLAIN = (NoneType, bool, int, float, str, bytes, Decimal, datetime, date, time, timedelta)
BINARY = DType(Kind.BIN)
_OBJECTS = {
    "scalein.When": "use when(condition).then(value).otherwise(other)",
    "scalein.Flow": 'a flow is not a column: col("x") is, and flow.join(other, on=...) brings two flows together',
    **dict.fromkeys(("polars.Expr", "pyspark.Column", "duckdb.Expression"),
                    "write it with scalein's col: expressions of other libraries do not mix with it"),
    "method": "call the method, with parentheses: col(...).sum()",
    **dict.fromkeys(("pandas.Series", "polars.Series"), "put it into the table that the flow begins with"),
}  # fmt: skip


def literal(value: object, at: SourceLoc) -> Lit:
    """A constant that takes its type from where it is used; numpy and Arrow scalars count as what they hold.

    Times that Python's own types cannot hold, such as numpy's nanoseconds, keep the type they came with.
    """
    if isinstance(value, pa.Scalar):
        return _from_arrow_scalar(value, at)
    if type(value) not in PLAIN and type(value).__module__ == "numpy":
        return _from_numpy(value, at)
    if isinstance(value, datetime) and type(value) is not datetime:  # pandas' timestamps
        if getattr(value, "nanosecond", 0):
            return _from_arrow_scalar(pa.scalar(value, pa.timestamp("ns", value.tzinfo and "UTC")), at)
        value = datetime.combine(value.date(), value.timetz())
    if not isinstance(value, PLAIN):
        raise not_a_value(value, at)
    return _checked(value, at)


def _from_numpy(value: object, at: SourceLoc) -> Lit:
    if type(value).__name__ in ("datetime64", "timedelta64"):
        try:
            return _from_arrow_scalar(pa.scalar(value), at)
        except pa.ArrowException:
            raise not_a_value(value, at) from None
    unboxed = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if type(unboxed) not in PLAIN:
        raise not_a_value(value, at)
    return _checked(unboxed, at)


def not_a_value(value: object, at: SourceLoc) -> BadArgument:
    """The error for something that is neither a column nor a constant."""
    hint = "a constant is a bool, int, float, Decimal, str, bytes, datetime, date, time, timedelta or None"
    if isinstance(value, list | tuple | set | frozenset | dict):
        hint = "to look for a value among several, write col(...).is_in([...])"
    return BadArgument(f"this {type_name(value)} cannot be used as a value", at=at, found=shortened(value),
                       hint=hint_for_object(value) or hint)


def hint_for_object(value: object) -> str | None:
    """A hint for an object that is often given where a column or a constant is wanted."""
    return _OBJECTS.get(type_name(value))


def shortened(value: object) -> str:
    """The text of a value, for errors, on one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _checked(value: object, at: SourceLoc) -> Lit:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadArgument("the text has characters that UTF-8 cannot hold", at=at, found=ascii(value)) from None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise BadArgument("the integer has more than 64 bits", at=at, found=shortened(value),
                          hint="write it as a Decimal, or as a float if an approximation will do")
    if isinstance(value, Decimal) and (not value.is_finite() or decimal_type(value) is None):
        raise BadArgument(f"no decimal of {MAX_PRECISION} digits holds this number", at=at, found=shortened(value),
                          hint="write it as a float if an approximation will do")
    if isinstance(value, time) and value.tzinfo is not None:
        raise BadArgument("a time of the day has no zone here", at=at, found=shortened(value),
                          hint="take it off: value.replace(tzinfo=None)")
    return Lit(value)


def _from_arrow_scalar(scalar: pa.Scalar, at: SourceLoc) -> Lit:
    dtype = from_arrow_type_or_none(scalar.type)
    if dtype is not None and dtype.kind in TIMES and dtype.kind is not Kind.DATE:
        return Lit(scalar.cast(pa.int64() if dtype.bits == 64 else pa.int32()).as_py(), dtype)
    if dtype is not None and dtype.is_decimal and scalar.is_valid:
        return Lit(digits_of(scalar.as_py(), dtype.scale), dtype)
    value = scalar.as_py()
    if type(value) not in PLAIN:
        raise not_a_value(scalar, at)
    return _checked(value, at)


def own_type(value: object) -> DType | None:
    """The type that a constant has by itself; None for null, which has none."""
    match value:
        case None:
            return None
        case bool():
            return BOOL
        case int():
            return I64 if value < 2**63 else U64
        case float():
            return F64
        case Decimal():
            return decimal_type(value)
        case str():
            return STR
        case bytes():
            return BINARY
        case time():
            return DType(Kind.TIME, unit="us")
        case datetime():
            return DType(Kind.TS, unit="us", tz="UTC" if value.tzinfo else "")
        case date():
            return DATE
        case timedelta():
            return DType(Kind.DUR, unit="us")
    raise AssertionError(f"no constant: {value!r}")


def decimal_type(value: int | Decimal) -> DType | None:
    """The narrowest decimal type that holds a number exactly; None if there is none.

    >>> decimal_type(Decimal("-12.50")), decimal_type(1_000)
    (decimal[4, 2], decimal[4, 0])
    """
    _, digits, exponent = Decimal(value).as_tuple()
    assert isinstance(exponent, int)
    scale = max(0, -exponent)
    precision = max(1, scale, len(digits) + max(0, exponent))
    return DType(Kind.DEC, precision=precision, scale=scale) if precision <= MAX_PRECISION else None


def digits_of(value: int | Decimal, scale: int) -> int | None:
    """All digits of a number at a scale, as one integer; None if it has more decimals."""
    sign, digits, exponent = Decimal(value).as_tuple()
    assert isinstance(exponent, int)
    whole = int("".join(map(str, digits)))
    shift = exponent + scale
    if shift < 0 and whole % 10**-shift:
        return None
    whole = int(whole * 10**shift if shift >= 0 else whole // 10**-shift)
    return -whole if sign else whole


def fit(value: object, dtype: DType) -> Lit | None:
    """The constant as a literal of `dtype`, or None if that type cannot hold it without changing its meaning.

    Floats are rounded to the float type they meet, as Python rounds what you type; everything else is exact.
    """
    if value is None:
        return None if dtype.is_nested else Lit(None, dtype)
    found: object
    match value, dtype.kind:
        case (bool(), Kind.BOOL) | (str(), Kind.STR):
            found = value
        case bytes(), Kind.BIN:
            found = value if dtype.form != "fixed" or len(value) == dtype.width else None
        case bool(), _:
            found = None
        case int(), _ if dtype.is_int:
            found = value if dtype.int_range()[0] <= value <= dtype.int_range()[1] else None
        case (int() | Decimal()), Kind.DEC:
            found = digits_of(value, dtype.scale)
            found = found if found is not None and abs(found) < 10**dtype.precision else None
        case (int() | float()), (Kind.F32 | Kind.F64):
            found = _rounded(float(value), dtype.kind)
        case Decimal(), Kind.F64:
            found = float(value)
        case datetime(), Kind.TS if (value.tzinfo is None) == (dtype.tz == ""):
            found = _units(_since_epoch(value), dtype)
        case datetime(), _:
            found = None
        case date(), Kind.TS if not dtype.tz:
            found = _units(datetime(value.year, value.month, value.day) - _EPOCH, dtype)
        case date(), Kind.DATE:
            found = value.toordinal() - _EPOCH_DAY
        case date(), Kind.DATE64:
            found = (value.toordinal() - _EPOCH_DAY) * 86_400_000
        case time(), Kind.TIME:
            found = _units(datetime.combine(_EPOCH, value) - _EPOCH, dtype)
        case timedelta(), Kind.DUR:
            found = _units(value, dtype)
        case _:
            found = None
    return None if found is None else Lit(found, dtype)


def _since_epoch(value: datetime) -> timedelta:
    offset = value.utcoffset()
    return value.replace(tzinfo=None) - _EPOCH - (offset if offset is not None else timedelta())


def _units(value: timedelta, dtype: DType) -> int | None:
    microseconds = (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    units, rest = divmod(microseconds * UNITS_PER_SECOND[dtype.unit], 1_000_000)
    low, high = dtype.int_range()
    return units if not rest and low <= units <= high else None


def _rounded(value: float, kind: Kind) -> float | None:
    if kind is Kind.F64 or not math.isfinite(value):
        return value
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:  # too great for 32 bits, so it needs 64
        return None


_PYTHON_TYPES: dict[object, DType] = {
    bool: BOOL, int: I64, float: F64, str: STR, date: DATE,
    datetime: DType(Kind.TS, unit="us"), timedelta: DType(Kind.DUR, unit="us"), bytes: BINARY,
    time: DType(Kind.TIME, unit="us"),
}  # fmt: skip


def as_dtype(given: object, at: SourceLoc) -> DType:
    """The type meant by an Arrow type, its name ("int32", "timestamp[ms]"), or a Python type (int, float, ...)."""
    if isinstance(given, DType):
        return given
    found: DType | None = None
    if isinstance(given, type) and given in _PYTHON_TYPES:
        found = _PYTHON_TYPES[given]
    elif isinstance(given, pa.DataType):
        arrow = plain_arrow(given)
        found = from_arrow_type_or_none(arrow.value_type if pa.types.is_dictionary(arrow) else arrow)
    elif isinstance(given, str):
        try:
            found = from_arrow_type_or_none(pa.type_for_alias(given))
        except ValueError:
            found = next((DType(kind) for kind in Kind if kind.value == given and not _needs_unit(kind)), None)
    if found is None:
        raise BadArgument("no type that scalein computes with", at=at, found=shortened(given),
                          hint='for example pa.int64(), "int64", "timestamp[ms]", or Python\'s float')
    return found


def _needs_unit(kind: Kind) -> bool:
    return kind in (Kind.TS, Kind.DUR, Kind.TIME, Kind.DEC, Kind.NESTED)
