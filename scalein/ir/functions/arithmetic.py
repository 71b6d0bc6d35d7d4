"""How calls are typed: one rule a function, from arguments to a typed call with its implicit casts spelled out.

A rule gets a call whose arguments are typed, except for constants the user wrote plainly (see `unify.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa

from scalein.dtypes import BOOL, F64, I32, I64, SIGNED, TIMES, UNSIGNED, DType, Kind
from scalein.durations import Span, in_units
from scalein.ir import decimals
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.functions.nested import NESTED_RULES
from scalein.ir.functions.registry import COMPARISONS, DT_DATE_PARTS, DT_PARTS, HOST_TEXT, fallible, is_utc
from scalein.ir.literals import fit
from scalein.ir.udf import AnyUdf, Variable, can_be_null
from scalein.ir.unify import NOT_A_NUMBER, Refused, cast_to, finer, nested_hint, own_type_of, settle, typed, unify

Args = tuple[Expr, ...]
Rule = Callable[[Call, Args], Expr]

# --- arithmetic --------------------------------------------------------------------------------------------------

_TEXT = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**",
         "try_divide": "try_divide", "and": "&", "or": "|", "not": "~"}  # fmt: skip


def _refusal(fn: str) -> str:
    return f"{_TEXT.get(fn, fn)} does not take"


def _numbers(call: Call, args: Args) -> list[Expr]:
    """Both sides in one number type; where a decimal is no decimal any more, a float."""
    known = [own for own in map(own_type_of, args) if own is not None]
    if any(own.is_decimal for own in known) and all(own.is_decimal or own.is_number for own in known):
        return [cast_to(arg, F64) for arg in args]
    left, right = unify(args, _refusal(call.fn))
    dtype = type_of(left)
    if not dtype.is_number:
        hint = NOT_A_NUMBER if dtype.kind is Kind.BOOL else None
        if dtype.is_string and call.fn == "add":
            hint = "text cannot be concatenated yet, neither by + nor by a function; map_batches with pyarrow can"
        raise Refused(f"{_refusal(call.fn)} {dtype!r} and {type_of(right)!r}", hint)
    return [left, right]


def _arithmetic(call: Call, args: Args) -> Expr:
    if any(own is not None and own.kind in TIMES for own in map(own_type_of, args)):
        return _time_arithmetic(call, args)
    if decimals.is_decimal_arithmetic(args):
        return decimals.arithmetic(call, args)
    both = _numbers(call, args)
    return typed(call, both, type_of(both[0]))


def _time_arithmetic(call: Call, args: Args) -> Expr:
    """`ts + dur`, `ts - dur`, `ts - ts`, `dur + dur`, `dur - dur`, `dur * int`; the time goes first."""
    left, right = args
    match call.fn, *(own and own.kind for own in map(own_type_of, args)):
        case ("add" | "sub"), Kind.TS, Kind.DUR:
            return _shift(call, left, right)
        case "add", Kind.DUR, Kind.TS:
            return _shift(call, right, left)
        case "sub", Kind.TS, Kind.TS:
            both = unify(args, _refusal(call.fn))
            return typed(call, both, DType(Kind.DUR, unit=type_of(both[0]).unit))
        case ("add" | "sub"), Kind.DUR, Kind.DUR:
            both = unify(args, _refusal(call.fn))
            return typed(call, both, type_of(both[0]))
        case "mul", Kind.DUR, kind if kind in (*SIGNED, *UNSIGNED) and kind is not Kind.U64:
            return _scale(call, left, right)
        case "mul", kind, Kind.DUR if kind in (*SIGNED, *UNSIGNED) and kind is not Kind.U64:
            return _scale(call, right, left)
    shown = " and ".join("null" if own is None else repr(own) for own in map(own_type_of, args))
    hint = "with times one can write ts + dur, ts - dur, ts - ts, dur + dur, dur - dur and dur * int"
    if any(own is not None and own.kind in (Kind.DATE, Kind.DATE64) for own in map(own_type_of, args)):
        hint = 'cast the date to a timestamp first: .cast(pa.timestamp("us"))'
    raise Refused(f"{_refusal(call.fn)} {shown}", hint)


def _shift(call: Call, instant: Expr, by: Expr) -> Expr:
    """A timestamp moved by a duration, both in the finer unit; a constant takes the other's unit if it can."""
    if isinstance(by, Lit) and by.dtype is None:
        own = own_type_of(instant)
        assert own is not None
        by = fit(by.value, DType(Kind.DUR, unit=own.unit)) or settle(by)
    if isinstance(instant, Lit) and instant.dtype is None:
        own = own_type_of(instant)
        assert own is not None
        instant = fit(instant.value, replace(own, unit=type_of(by).unit)) or settle(instant)
    unit = finer(type_of(instant).unit, type_of(by).unit)
    dtype = replace(type_of(instant), unit=unit)
    return typed(call, [cast_to(instant, dtype), cast_to(by, DType(Kind.DUR, unit=unit))], dtype)


def _scale(call: Call, length: Expr, by: Expr) -> Expr:
    length = settle(length)
    return typed(call, [length, cast_to(by, I64)], type_of(length))


def _as_float(arg: Expr, what: str) -> Expr:
    """A float as it is, an integer or decimal as f64."""
    arg = settle(arg)
    if not type_of(arg).is_number and not type_of(arg).is_decimal:
        raise Refused(f"{what} takes a number, not {type_of(arg)!r}")
    return arg if type_of(arg).is_float else cast_to(arg, F64)


def _divide(call: Call, args: Args) -> Expr:
    if any(own is not None and own.kind in TIMES for own in map(own_type_of, args)):
        return _time_arithmetic(call, args)
    both = [_as_float(arg, "/") for arg in _numbers(call, args)]
    return typed(call, both, type_of(both[0]))


def _try_divide(call: Call, args: Args) -> Expr:
    divided = _divide(call, args)
    assert isinstance(divided, Call)
    return replace(divided, nullable=True)


def _power(call: Call, args: Args) -> Expr:
    return typed(call, [cast_to(arg, F64) for arg in _numbers(call, args)], F64)


def _negate(call: Call, args: Args) -> Expr:
    (arg,) = args
    if isinstance(arg, Lit) and arg.dtype is None and type(arg.value) in (int, float, Decimal):
        return Lit(-arg.value)  # type: ignore[operator]  # `settle` refuses what has no 64 bits any more
    arg = settle(arg)
    dtype = type_of(arg)
    if not (dtype.is_number or dtype.is_decimal or dtype.kind is Kind.DUR):
        hint = "~ negates a condition" if dtype.kind is Kind.BOOL else None
        raise Refused(f"- takes a number or a duration, not {dtype!r}", hint)
    if dtype.kind in UNSIGNED:
        raise Refused(f"- takes no unsigned number: {dtype!r} has no negative values", "cast it to a signed integer")
    return typed(call, [arg], dtype)


def _absolute(call: Call, args: Args) -> Expr:
    arg = settle(args[0])
    if not (type_of(arg).is_number or type_of(arg).is_decimal or type_of(arg).kind is Kind.DUR):
        raise Refused(f"abs takes a number or a duration, not {type_of(arg)!r}")
    return typed(call, [arg], type_of(arg))


def _float_function(call: Call, args: Args) -> Expr:
    arg = _as_float(args[0], call.fn)
    return typed(call, [arg], type_of(arg))


def _round(call: Call, args: Args) -> Expr:
    arg = settle(args[0])
    if type_of(arg).is_decimal:
        return arg if int(str(call.params[0])) >= type_of(arg).scale else typed(call, [arg], type_of(arg))
    return arg if type_of(arg).is_int else _float_function(call, (arg,))


# --- conditions --------------------------------------------------------------------------------------------------


def _compare(call: Call, args: Args) -> Expr:
    return typed(call, unify(args, "cannot compare"), BOOL)


def _condition(arg: Expr, what: str) -> Expr:
    """The argument as a bool."""
    if isinstance(arg, Lit) and arg.value is None:
        return Lit(None, BOOL)
    arg = settle(arg)
    if type_of(arg).kind is not Kind.BOOL:
        hint = "comparisons need parentheses beside & and |: (a > 1) & (b < 2)" if what in "&|~" else None
        raise Refused(f"{what} takes conditions, not {type_of(arg)!r}", hint)
    return arg


def _logic(call: Call, args: Args) -> Expr:
    return typed(call, [_condition(arg, _TEXT[call.fn]) for arg in args], BOOL)


def _null_test(call: Call, args: Args) -> Expr:
    return typed(call, [settle(args[0])], BOOL, nullable=False)


def _hash(call: Call, args: Args) -> Expr:
    arg = settle(args[0])
    if type_of(arg).is_nested:
        raise Refused(f"hash does not take {type_of(arg)!r}", nested_hint(type_of(arg)))
    return typed(call, [arg], I64, nullable=False)


def _is_nan(call: Call, args: Args) -> Expr:
    arg = settle(args[0])
    if not type_of(arg).is_float:
        raise Refused(f"is_nan takes a float, not {type_of(arg)!r}", "is_null tests for missing values")
    return typed(call, [arg], BOOL)


def _fill_null(call: Call, args: Args) -> Expr:
    value, default = unify(args, _refusal(call.fn))
    return typed(call, [value, default], type_of(value), nullable=value.nullable and default.nullable)


def _is_in(call: Call, args: Args) -> Expr:
    values, has_null = call.params
    assert isinstance(values, tuple)
    listed = [value if isinstance(value, Lit) else Lit(value) for value in values]
    arg, *found = unify([settle(args[0]), *listed], _refusal(call.fn))
    # A cast among them is a typed constant in a coarser unit than the column's.
    exact = [item for item in found if isinstance(item, Lit)]
    if len(exact) < len(found):
        raise Refused("is_in takes plain constants in the column's own unit", "pass datetime or timedelta values")
    physical = tuple({item: item.value for item in exact}.values())
    return replace(typed(call, [arg], BOOL, nullable=arg.nullable or bool(has_null)), params=(physical, has_null))


def choose(call: Call, conditions: Sequence[Expr], values: Sequence[Expr]) -> Expr:
    """`when(c0).then(v0).when(c1).then(v1).otherwise(v2)`: all values in one type, nested from the last."""
    nested = next((own for own in map(own_type_of, values) if own is not None and own.is_nested), None)
    if nested is not None:
        raise Refused(f"a choice cannot give values of type {nested!r}", nested_hint(nested))
    *taken, last = unify(values, "a choice cannot give both")
    for condition, value in zip(reversed(conditions), reversed(taken), strict=True):
        both = value.nullable or last.nullable
        last = typed(call, [_condition(condition, "when"), value, last], type_of(value), nullable=both)
    return last


def attempt(call: Call, given: Args, found: Expr) -> Expr:
    """`found` with null where it would fail; casts to bring its arguments together belong to it, they do not."""
    if not isinstance(found, Call) or any(found is arg for arg in given):
        return found
    met = [_tried(call, arg) if not any(arg is own for own in given) else arg for arg in found.args]
    return _tried(call, typed(found, met, type_of(found), nullable=found.nullable or any(a.nullable for a in met)))


def _tried(call: Call, found: Expr) -> Expr:
    return typed(call, [found], type_of(found), nullable=True) if isinstance(found, Call) and fallible(found) else found


# --- casts -------------------------------------------------------------------------------------------------------


def _cast(call: Call, args: Args) -> Expr:
    target, arg = type_of(call), args[0]
    fitted = fit(arg.value, target) if isinstance(arg, Lit) and arg.dtype is None else None
    if fitted is not None:
        return fitted
    arg = settle(arg)
    if type_of(arg) == target:
        return arg
    if type_of(arg).nested == pa.null() and not target.is_nested:
        return Lit(None, target)
    hint = _cannot_cast(type_of(arg), target)
    if hint is not None:
        raise Refused(f"cannot cast {type_of(arg)!r} to {target!r}", hint)
    return typed(call, [arg], target)


def _cannot_cast(source: DType, target: DType) -> str | None:
    """Why a cast is refused, as a hint; None if it is allowed."""
    plain = (Kind.BOOL, Kind.F32, Kind.F64, Kind.DEC)
    kinds = {source.kind, target.kind}
    if source.is_nested:
        return nested_hint(source)
    if target.is_nested:
        return "no cast makes a nested value; group_by(...).agg(...) with .collect() makes lists"
    if Kind.BIN in kinds and kinds - {Kind.BIN, Kind.STR}:
        return "binary casts from and to text only, which is its bytes"
    if kinds == {Kind.DEC, Kind.BOOL}:
        return "compare it with 0, or go through an integer: .cast(pa.int64())"
    for time, other in ((source, target), (target, source)):
        if time.kind in TIMES and other.kind in plain:
            return "go through its integer: .cast(pa.int64())"
        if time.kind is Kind.DUR and other.is_string:
            return "go through its integer: .cast(pa.int64())"
    match source.kind, target.kind:
        case Kind.TS, (Kind.DATE | Kind.DATE64) if not is_utc(source):
            return "for the day in UTC, cast to a timestamp without zone first; .dt.day() gives the local one"
        case (Kind.DATE | Kind.DATE64), Kind.TS if not is_utc(target):
            return "midnight depends on the zone; cast to a timestamp without zone first"
        case (Kind.TS | Kind.DATE | Kind.DATE64), Kind.DUR:
            return "subtract another time to get a duration"
        case Kind.DUR, (Kind.TS | Kind.DATE | Kind.DATE64):
            return "add it to a time"
        case (Kind.DATE | Kind.DATE64 | Kind.DUR), Kind.TIME:
            return "a timestamp has a time of the day: cast to pa.timestamp(...) first"
        case Kind.TIME, (Kind.TS | Kind.DATE | Kind.DATE64 | Kind.DUR):
            return "a time of the day belongs to no date; go through its integer: .cast(pa.int64())"
    return None


# --- text and calendar -------------------------------------------------------------------------------------------


def _text(call: Call, args: Args) -> Expr:
    arg = settle(args[0])
    if not type_of(arg).is_string:
        raise Refused(f"str.{call.fn.removeprefix('str_')} takes text, not {type_of(arg)!r}",
                      nested_hint(type_of(arg)) if type_of(arg).is_nested else "cast it first: .cast(pa.string())")
    if call.fn in ("str_matches", "starts_with", "ends_with", "contains"):
        return typed(call, [arg], BOOL)
    nullable = True if call.fn == "str_extract" else None  # where nothing matches
    return typed(call, [arg], I64 if call.fn == "str_len" else type_of(arg), nullable)


def _instant(call: Call, args: Args) -> Expr:
    arg = settle(args[0])
    kind, is_date_part = type_of(arg).kind, call.fn in DT_DATE_PARTS
    if kind is Kind.TS or (kind in (Kind.DATE, Kind.DATE64) and is_date_part):
        return arg
    if kind is Kind.TIME and call.fn in DT_PARTS and not is_date_part:
        return arg
    has_days = kind in (Kind.DATE, Kind.DATE64) or type_of(arg).is_string
    hint = 'cast it first: .cast(pa.timestamp("us"))' if has_days else None
    raise Refused(f"dt.{call.fn.removeprefix('dt_')} takes a timestamp, not {type_of(arg)!r}", hint)


def _part(call: Call, args: Args) -> Expr:
    return typed(call, [_instant(call, args)], I32)


def _truncate(call: Call, args: Args) -> Expr:
    arg, every = _instant(call, args), call.params[0]
    assert isinstance(every, Span)
    units = in_units(every, type_of(arg), "length to truncate to", "the column", call.at)
    return replace(typed(call, [arg], type_of(arg)), params=(units,))


def _epoch(call: Call, args: Args) -> Expr:
    return typed(call, [_instant(call, args)], I64)


# --- functions of the user's -------------------------------------------------------------------------------------

_PYTHON_NAMES = {Kind.F64: "float", Kind.I64: "int", Kind.BOOL: "bool", Kind.STR: "str"}


def _udf(call: Call, args: Args) -> Expr:
    (udf,) = call.params
    assert isinstance(udf, AnyUdf)
    given = [_udf_argument(udf, param, arg) for param, arg in zip(udf.params, args, strict=True)]
    return typed(call, given, udf.dtype, nullable=can_be_null(udf, given))


def _udf_argument(udf: AnyUdf, param: Variable, arg: Expr) -> Expr:
    """The argument in the parameter's type: any number as a float, any integer that 64 bits hold as an int."""
    own = own_type_of(arg)
    fits = own is None or own.kind is param.dtype.kind or (
        own.is_number or own.is_decimal if param.dtype == F64
        else param.dtype == I64 and own.is_int and own.kind is not Kind.U64
    )  # fmt: skip
    if not fits:
        wanted = _PYTHON_NAMES[param.dtype.kind]
        hint = f"cast it: .cast({wanted})" if own is not None and (own.is_number or own.kind in TIMES) else None
        raise Refused(f"{udf.name} takes {wanted} as {param.name!r}, not {own!r}", hint)
    return cast_to(arg, param.dtype)


RULES: dict[str, Rule] = {
    "add": _arithmetic, "sub": _arithmetic, "mul": _arithmetic, "floordiv": _arithmetic, "mod": _arithmetic,
    "div": _divide, "try_divide": _try_divide, "pow": _power, "neg": _negate, "abs": _absolute, "round": _round,
    **dict.fromkeys(("floor", "ceil", "sqrt", "exp", "log"), _float_function),
    **dict.fromkeys(COMPARISONS, _compare),
    "and": _logic, "or": _logic, "not": _logic,
    "is_null": _null_test, "is_not_null": _null_test, "is_nan": _is_nan, "fill_null": _fill_null, "is_in": _is_in,
    "cast": _cast, "hash": _hash,
    **dict.fromkeys(("str_len", "str_slice", "starts_with", "ends_with", "contains", "lower", "upper",
                     *HOST_TEXT), _text),
    **dict.fromkeys(DT_PARTS, _part),
    "dt_truncate": _truncate, "dt_epoch": _epoch,
    "udf": _udf,
    **NESTED_RULES,
}  # fmt: skip
