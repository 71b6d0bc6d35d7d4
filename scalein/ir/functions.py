"""Every function and aggregate that expressions may call: whether it can fail, and where it runs.

One table each. A function *can fail* when a live row may have no value (overflow, zero divisor, impossible
cast); passes may drop such a call but never run it for more rows. A *host* function has no lowering: pyarrow
computes it as a step of its own, which `explain` names. How a call is typed stands in
`rules.py`, how it reads in `printer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scalein.dtypes import MAX_PRECISION, SIGNED, UNITS_PER_SECOND, DType, Kind
from scalein.ir.exprs import Call, Expr, Lit, type_of, walk
from scalein.ir.udf import PythonUdf

# Zones whose local time is UTC; every other one makes the calendar functions host functions.
UTC_ZONES = ("", "UTC", "Etc/UTC", "+00:00", "Z")


def _never(call: Call) -> bool:
    return False


def _always(call: Call) -> bool:
    return True


ANY = -1  # as many arguments as a udf has parameters


@dataclass(frozen=True, slots=True)
class Function:
    """A function by name and number of arguments.

    `fallible` and `is_host` look at a typed call alone, not at the calls among its arguments.
    """

    name: str
    arity: int
    fallible: Callable[[Call], bool] = _never
    is_host: Callable[[Call], bool] = _never


def fallible(call: Call) -> bool:
    """Whether this typed call itself can fail in a live row, given values for its arguments."""
    return FUNCTIONS[call.fn].fallible(call)


def can_fail(expr: Expr) -> bool:
    """Whether anything in a typed expression can fail in a live row; what is only tried gives null instead."""
    waiting: list[Expr] = [expr]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Call) or id(node) in seen:
            continue
        seen.add(id(node))
        if node.fn == "try" and isinstance(node.args[0], Call):
            waiting += node.args[0].args
        elif fallible(node):
            return True
        else:
            waiting += node.args
    return False


def is_host(call: Call) -> bool:
    """Whether pyarrow computes this typed call, and no kernel does."""
    return FUNCTIONS[call.fn].is_host(call)


def has_host(expr: Expr) -> bool:
    """Whether anything in a typed expression is computed by pyarrow."""
    return any(isinstance(node, Call) and is_host(node) for node in walk(expr))


def has_udf(expr: Expr) -> bool:
    """Whether a typed expression calls a compiled Python function, which may cost anything."""
    return any(isinstance(node, Call) and node.fn == "udf" for node in walk(expr))


def is_utc(dtype: DType) -> bool:
    """Whether local time of a timestamp is its UTC time, so that the calendar needs no zone rules."""
    return dtype.tz in UTC_ZONES


def _source(call: Call) -> DType:
    return type_of(call.args[0])


def _overflows(call: Call) -> bool:
    if type_of(call).is_decimal:  # only where the type was cut to the most digits there are
        if call.fn == "mul":
            return sum(type_of(arg).precision for arg in call.args) > MAX_PRECISION
        return type_of(call).precision == MAX_PRECISION
    return not type_of(call).is_float


def _rounds_up(call: Call) -> bool:
    """Of decimals 9.9 may become 10, which takes a digit more."""
    return type_of(call).is_decimal


def _divides_badly(call: Call) -> bool:
    """Integer division fails for a zero divisor, and `//` also for MIN // -1; a literal settles both."""
    if type_of(call).is_float:
        return False
    divisor = call.args[1]
    if isinstance(divisor, Lit) and isinstance(divisor.value, int):
        return divisor.value == 0 or (call.fn == "floordiv" and divisor.value == -1 and type_of(call).is_signed)
    return True


def _has_no_negative(call: Call) -> bool:
    """MIN has no positive counterpart in two's complement."""
    return type_of(call).kind in (*SIGNED, Kind.DUR)


def _to_finer(source: DType, unit: str) -> bool:
    return UNITS_PER_SECOND[unit] > UNITS_PER_SECOND[source.unit]


# Digits that integers have at most.
INT_DIGITS = {
    Kind.I8: 3, Kind.I16: 5, Kind.I32: 10, Kind.I64: 19, Kind.U8: 3, Kind.U16: 5, Kind.U32: 10, Kind.U64: 20,
}  # fmt: skip


def _decimal_cast_fails(source: DType, target: DType) -> bool:
    """Whether a value can be too large, where one type is a decimal and the other one, an integer or a float."""
    if target.is_float or source.is_float:
        return source.is_float
    if not target.is_decimal:  # towards zero
        most = 10 ** max(0, source.precision - source.scale) - 1
        low, high = target.int_range()
        return bool(-most < low or most > high)
    whole = source.precision - source.scale if source.is_decimal else INT_DIGITS[source.kind]
    carry = source.scale > target.scale  # 9.9 -> 10
    return whole + carry > target.precision - target.scale


def _cast_fails(call: Call) -> bool:
    source, target = _source(call), type_of(call)
    if target.kind is Kind.BIN:
        return target.form == "fixed"
    if source.kind is Kind.BIN:
        return True
    if source.is_decimal or (target.is_decimal and not source.is_string):
        return not target.is_string and _decimal_cast_fails(source, target)
    if target.is_string or Kind.BOOL in (source.kind, target.kind):
        return source.is_string and not target.is_string
    if source.is_string:
        return True
    if target.is_float:
        return False
    if source.is_float:
        return True
    match source.kind, target.kind:
        case (Kind.TS, Kind.TS) | (Kind.DUR, Kind.DUR):
            return _to_finer(source, target.unit)
        case Kind.TS, Kind.DATE:
            return source.unit in ("s", "ms")  # finer units have fewer days than 32 bits hold
        case Kind.TS, Kind.DATE64:
            return source.unit == "s"
        case (Kind.DATE | Kind.DATE64), Kind.TS:
            return target.unit in ("us", "ns")
        case Kind.DATE, Kind.DATE64:
            return False
        case (Kind.TIME | Kind.TS), Kind.TIME:
            return False  # a day has few enough units
        case Kind.DATE64, Kind.DATE64:
            return False
        case _, (Kind.TIME | Kind.DATE64):
            return True
    (least, greatest), (low, high) = source.int_range(), target.int_range()
    return least < low or greatest > high


def _reads_or_writes_text(call: Call) -> bool:
    """Text from and to other types but its own bytes, and the clock of a zone."""
    source, target = _source(call), type_of(call)
    if source.is_string and target.kind is Kind.BIN:
        return False
    return source.is_string != target.is_string or (target.kind is Kind.TIME and not is_utc(source))


def _in_a_zone(call: Call) -> bool:
    return not is_utc(_source(call))


def _epoch_fails(call: Call) -> bool:
    return _to_finer(_source(call), str(call.params[0]))


def _stays_python(call: Call) -> bool:
    return isinstance(call.params[0], PythonUdf)


def _of_nested(call: Call) -> bool:
    return _source(call).is_nested


def _tries_host(call: Call) -> bool:
    return isinstance(call.args[0], Call) and is_host(call.args[0])


_CALENDAR = ("year", "quarter", "month", "day", "weekday", "ordinal_day")
_CLOCK = ("hour", "minute", "second", "millisecond", "microsecond", "nanosecond")
DT_PARTS = tuple(f"dt_{part}" for part in _CALENDAR + _CLOCK)
DT_DATE_PARTS = tuple(f"dt_{part}" for part in _CALENDAR)  # those that a date has as well

HOST_TEXT = ("str_strip", "str_lstrip", "str_rstrip", "str_split_part", "str_extract", "str_matches", "str_replace")

FUNCTIONS: dict[str, Function] = {
    function.name: function
    for function in (
        Function("udf", ANY, fallible=_always, is_host=_stays_python),
        Function("add", 2, fallible=_overflows),
        Function("sub", 2, fallible=_overflows),
        Function("mul", 2, fallible=_overflows),
        Function("div", 2),
        Function("floordiv", 2, fallible=_divides_badly),
        Function("mod", 2, fallible=_divides_badly),
        Function("divisible", 1),  # made by `fold` only
        Function("pow", 2),
        Function("neg", 1, fallible=_has_no_negative),
        Function("abs", 1, fallible=_has_no_negative),
        Function("floor", 1),
        Function("ceil", 1),
        Function("round", 1, fallible=_rounds_up),
        Function("sqrt", 1),
        Function("exp", 1),
        Function("log", 1),
        Function("eq", 2),
        Function("ne", 2),
        Function("lt", 2),
        Function("le", 2),
        Function("gt", 2),
        Function("ge", 2),
        Function("and", 2),
        Function("or", 2),
        Function("not", 1),
        Function("is_null", 1, is_host=_of_nested),
        Function("is_not_null", 1, is_host=_of_nested),
        Function("is_nan", 1),
        Function("hash", 1),
        Function("fill_null", 2),
        Function("is_in", 1),
        Function("if_else", 3),
        Function("try", 1, is_host=_tries_host),  # null where its argument, a call, fails itself
        Function("try_divide", 2),
        Function("cast", 1, fallible=_cast_fails, is_host=_reads_or_writes_text),
        Function("str_len", 1),
        Function("str_slice", 1),
        Function("starts_with", 1),
        Function("ends_with", 1),
        Function("contains", 1),
        Function("lower", 1, is_host=_always),
        Function("upper", 1, is_host=_always),
        *(Function(name, 1, is_host=_always) for name in HOST_TEXT),
        *(Function(part, 1, is_host=_in_a_zone) for part in DT_PARTS),
        Function("dt_truncate", 1, fallible=_always, is_host=_in_a_zone),
        *(Function(name, 1, is_host=_always) for name in ("list_len", "list_get", "struct_field")),
        Function("dt_epoch", 1, fallible=_epoch_fails),
    )
}

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


# Aggregates and the number of their arguments.
AGGREGATES: dict[str, int] = {
    "count": 0, "count_valid": 1, "sum": 1, "mean": 1, "min": 1, "max": 1, "var": 1, "std": 1,
    "first": 1, "last": 1, "arg_min": 2, "arg_max": 2, "n_unique": 1, "quantile": 1, "collect": 1, "top_k": 2,
    "approx_n_unique": 1, "approx_quantile": 1,
}  # fmt: skip
