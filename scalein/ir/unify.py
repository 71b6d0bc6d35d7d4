"""The types in which arguments meet: common types, constants that take another's type, explicit casts.

A constant that the user wrote plainly is a `Lit` without a type until it is here, so that it can take the other
side's. What cannot be typed is `Refused`, with a hint; `resolve.py` adds where that happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scalein.dtypes import F32, F64, SIGNED, TIMES, UNITS_PER_SECOND, DType, Kind
from scalein.errors import NOWHERE
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.literals import fit, own_type

NOT_A_NUMBER = "a bool is not a number here; .cast(pa.int64()) makes it 0 or 1"
_LONELY_NULL = ("null alone has no type", "write lit(None, pa.int64()), with the type that you need")


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
    return None


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
    target: DType | None = None
    for arg in sorted(args, key=_is_plain):  # stable: typed arguments first
        own = own_type_of(arg)
        if own is None or (isinstance(arg, Lit) and arg.dtype is None and target and fit(arg.value, target)):
            continue
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
    if Kind.STR in kinds and kinds & {Kind.TS, Kind.DATE, Kind.DUR}:
        python = {Kind.TS: "datetime(2024, 5, 1)", Kind.DATE: "date(2024, 5, 1)", Kind.DUR: "timedelta(seconds=1)"}
        other = next(iter(kinds - {Kind.STR}))
        return f"text is not time: pass a {python[other]}, or cast the text"
    if Kind.STR in kinds:
        return "cast one side, for example .cast(pa.float64()) or .cast(pa.string())"
    if Kind.BOOL in kinds:
        return NOT_A_NUMBER
    if kinds == {Kind.TS}:
        return 'one side has a time zone; cast the other, for example .cast(pa.timestamp("us", "UTC"))'
    if kinds == {Kind.TS, Kind.DATE}:
        return 'cast the date, for example .cast(pa.timestamp("us"))'
    if Kind.U64 in kinds and a.is_int and b.is_int:
        return "no integer type holds both; cast one side to the other's type"
    if kinds & set(TIMES):
        return "times and numbers do not mix; .cast(pa.int64()) gives the number behind a time"
    return None


def settle(arg: Expr) -> Expr:
    """The argument with a type: a plain constant gets its own."""
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
        arg = settle(arg)
    own = type_of(arg)
    if own == target or (own.is_string and target.is_string):
        return arg
    if isinstance(arg, Lit) and own.is_number and (widened := fit(arg.value, target)) is not None:
        return widened
    at = arg.at if isinstance(arg, Call) else NOWHERE
    return Call("cast", (arg,), dtype=target, nullable=arg.nullable, at=at)


def typed(call: Call, args: Sequence[Expr], dtype: DType, nullable: bool | None = None) -> Call:
    """The call with its type; it may be null where an argument may, unless said otherwise."""
    if nullable is None:
        nullable = any(arg.nullable for arg in args)
    return replace(call, args=tuple(args), dtype=dtype, nullable=nullable)
