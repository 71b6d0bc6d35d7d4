"""The types in which arguments meet: common types, constants that take another's type, explicit casts.

A constant that the user wrote plainly is a `Lit` without a type until it is here, so that it can take the other
side's. What cannot be typed is `Refused`, with a hint; `resolve.py` adds where that happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa

from scalein.dtypes import F32, F64, MAX_PRECISION, SIGNED, TIMES, UNITS_PER_SECOND, DType, Kind, alike, element_of
from scalein.errors import NOWHERE
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.literals import decimal_type, fit, own_type

NOT_A_NUMBER = "a bool is not a number here; .cast(pa.int64()) makes it 0 or 1"
_LONELY_NULL = ("null alone has no type", "write lit(None, pa.int64()), with the type that you need")

# Digits that integers have at most.
INT_DIGITS = {
    Kind.I8: 3, Kind.I16: 5, Kind.I32: 10, Kind.I64: 19, Kind.U8: 3, Kind.U16: 5, Kind.U32: 10, Kind.U64: 20,
}  # fmt: skip


class Refused(Exception):
    """What a rule cannot type, in one sentence, and a hint."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


def common_type(a: DType, b: DType) -> DType | None:
    """The type in which values of both can meet, or None. The Arrow form of strings does not matter.

    >>> common_type(DType(Kind.U32), DType(Kind.I32)), common_type(DType(Kind.I64), DType(Kind.F32))
    (i64, f64)
    """
    if a.is_decimal or b.is_decimal:
        return _common_decimal(a, b)
    if a.kind is Kind.BIN and b.kind is Kind.BIN:
        return a if (a.form == "fixed") == (b.form == "fixed") and a.width == b.width else DType(Kind.BIN)
    if a.kind is b.kind and a.kind not in TIMES:
        return a
    if a.is_int and b.is_int:
        return _common_int(a, b)
    if a.is_number and b.is_number:
        integer = a if a.is_int else b if b.is_int else None
        has_double = Kind.F64 in (a.kind, b.kind)
        return F64 if has_double or (integer is not None and integer.bits > 16) else F32
    if a.kind is b.kind and (a.tz == "") == (b.tz == ""):
        return replace(a, unit=finer(a.unit, b.unit)) if a.unit else a
    match a, b:
        case (DType(Kind.DATE), DType(Kind.DATE64) as other) | (DType(Kind.DATE64) as other, DType(Kind.DATE)):
            return other
        case (DType(Kind.TS) as other, DType(Kind.DATE64)) | (DType(Kind.DATE64), DType(Kind.TS) as other):
            return other if not other.tz else None
    return None


def as_decimal(dtype: DType) -> DType | None:
    """The decimal type that holds every value of a decimal or integer type; None for other types."""
    if dtype.is_decimal:
        return dtype
    return DType(Kind.DEC, precision=INT_DIGITS[dtype.kind]) if dtype.is_int else None


def _common_decimal(a: DType, b: DType) -> DType | None:
    """The greater scale, and room for the whole part of either; a float makes both floats."""
    if a.is_float or b.is_float:
        return F64
    one, other = as_decimal(a), as_decimal(b)
    if one is None or other is None:
        return None
    scale = max(one.scale, other.scale)
    whole = max(one.precision - one.scale, other.precision - other.scale)
    return DType(Kind.DEC, precision=min(MAX_PRECISION, whole + scale), scale=scale)


def _common_int(a: DType, b: DType) -> DType | None:
    if a.is_signed == b.is_signed:
        return a if a.bits >= b.bits else b
    signed, unsigned = (a, b) if a.is_signed else (b, a)
    bits = max(signed.bits, 2 * unsigned.bits)
    return next((DType(kind) for kind in SIGNED if DType(kind).bits == bits), None)


def finer(a: str, b: str) -> str:
    """The unit of the two that counts smaller steps."""
    return max(a, b, key=UNITS_PER_SECOND.__getitem__)


def own_type_of(arg: Expr) -> DType | None:
    """The type of an argument; a plain constant has its own, null has none."""
    return arg.dtype or own_type(arg.value) if isinstance(arg, Lit) else type_of(arg)


def unify(args: Sequence[Expr], what: str) -> list[Expr]:
    """The arguments, cast to the type they share; a plain constant takes the others' type if it fits.

    `what` begins the error: "+ does not take" goes on with the types.
    """
    known = [own for own in map(own_type_of, args) if own is not None]
    if any(own.is_nested for own in known):
        found = next(own for own in known if own.is_nested)
        raise Refused(f"{what} {' and '.join(map(repr, known[:2]))}", nested_hint(found))
    target: DType | None = None
    for arg in sorted(args, key=_is_plain):  # stable: typed arguments first
        own = own_type_of(arg)
        if own is None or (isinstance(arg, Lit) and arg.dtype is None and target and fit(arg.value, target)):
            continue
        if target is not None and target.is_decimal and isinstance(arg, Lit) and type(arg.value) is int:
            own = decimal_type(arg.value) or own
        shared = own if target is None else common_type(target, own)
        if shared is None:
            assert target is not None
            pair = [own_type_of(arg) for arg in args] if len(args) == 2 else [target, own]
            raise Refused(f"{what} {pair[0]!r} and {pair[1]!r}", hint_for_pair(target, own))
        target = shared
    if target is None:
        raise Refused(*_LONELY_NULL)
    return [cast_to(arg, target) for arg in args]


def _is_plain(arg: Expr) -> bool:
    return arg.dtype is None


def hint_for_pair(a: DType, b: DType) -> str | None:
    """What to do about two types that share none."""
    kinds = {a.kind, b.kind}
    if kinds == {Kind.STR, Kind.BIN}:
        return "text and binary do not mix; .cast(pa.binary()) gives the bytes of a text"
    if Kind.STR in kinds and kinds & set(TIMES):
        python = {Kind.TS: "datetime(2024, 5, 1)", Kind.DATE: "date(2024, 5, 1)", Kind.DUR: "timedelta(seconds=1)",
                  Kind.DATE64: "date(2024, 5, 1)", Kind.TIME: "time(12, 30)"}
        other = next(iter(kinds - {Kind.STR}))
        return f"text is not time: pass a {python[other]}, or cast the text"
    if Kind.STR in kinds:
        return "cast one side, for example .cast(pa.float64()) or .cast(pa.string())"
    if Kind.BOOL in kinds:
        return NOT_A_NUMBER
    if kinds == {Kind.TS}:
        return 'one side has a time zone; cast the other, for example .cast(pa.timestamp("us", "UTC"))'
    if kinds in ({Kind.TS, Kind.DATE}, {Kind.TS, Kind.DATE64}):
        return 'cast the date, for example .cast(pa.timestamp("us"))'
    if Kind.U64 in kinds and a.is_int and b.is_int:
        return "no integer type holds both; cast one side to the other's type"
    if Kind.BIN in kinds:
        return "binary compares with binary only"
    if kinds & set(TIMES) and (a.is_number or b.is_number or a.is_decimal or b.is_decimal):
        return "times and numbers do not mix; .cast(pa.int64()) gives the number that represents a time"
    return None


def nested_hint(dtype: DType) -> str:
    """What to do with a nested type where none is taken."""
    if dtype.nested == pa.null():
        return "a column of type null has nulls only; .cast(pa.int64()) gives it a type"
    if element_of(dtype) is not None:
        return "a list can be passed through, or unpacked: .list.get(i), .list.len(), flow.explode(name)"
    if pa.types.is_struct(dtype.nested):
        return "a struct can be passed through, or unpacked: .struct.field(name)"
    return "a column of this type can only be passed through"


def type_literal(arg: Expr) -> Expr:
    """The argument with a type: a constant without one gets its own."""
    if not isinstance(arg, Lit) or arg.dtype is not None:
        return arg
    own = own_type(arg.value)
    if own is None:
        raise Refused(*_LONELY_NULL)
    found = fit(arg.value, own)
    if found is None:  # a timedelta or a negated integer of more than 64 bits
        raise Refused(f"{arg.value} is outside of what {own!r} can hold")
    return found


def cast_to(arg: Expr, target: DType) -> Expr:
    """The argument as `target`: itself, a literal of that type, or an explicit cast."""
    if isinstance(arg, Lit) and (arg.dtype is None or arg.value is None):
        fitted = fit(arg.value, target)
        if fitted is not None:
            return fitted
        if target.kind in (Kind.TS, Kind.DUR):  # only a time out of range gets here
            raise Refused(f"{arg.value} is outside of what {target!r} can hold", "cast the column to a coarser unit")
        arg = type_literal(arg)
    own = type_of(arg)
    if alike(own, target):
        return arg
    if isinstance(arg, Lit) and own.is_number and (widened := fit(arg.value, target)) is not None:
        return widened
    if isinstance(arg, Lit) and own.is_decimal and target.is_decimal and isinstance(arg.value, int):
        sign, digits = int(arg.value < 0), tuple(map(int, str(abs(arg.value))))
        if (widened := fit(Decimal((sign, digits, -own.scale)), target)) is not None:
            return widened
    at = arg.at if isinstance(arg, Call) else NOWHERE
    return Call("cast", (arg,), dtype=target, nullable=arg.nullable, at=at)
