"""Every function and aggregate that flows are made of: what it gives, what it takes, how it is written.

A new function is one more line in RULES, a new aggregate one in AGG_RULES. Lines of functions that the engine does not
have (yet) are left out; `test_campaign.py` fails for a function of the engine that has no line here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

from scalein.dtypes import BOOL, DATE, F64, I64, STR, TIMES, DType, Kind
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.functions.casts import is_utc
from scalein.ir.functions.dates import DT_DATE_PARTS, DT_PARTS, TOTALS_PER_DAY
from scalein.ir.functions.registry import REGISTRY
from tests.campaign.kinds import constant_text, dtype_of, python_value, type_text, value_of
from tests.campaign.takes import (
    Is,
    Take,
    a_clock,
    a_day,
    a_float,
    a_text,
    a_ts,
    an_int,
    any_column,
    castable,
    exactly,
    first,
    has_sign,
    is_any,
    is_bool,
    is_date,
    is_decimal,
    is_dur,
    is_f64,
    is_float,
    is_i32,
    is_i64,
    is_int,
    is_list,
    is_nested,
    is_number,
    is_text,
    is_ts,
    list_of,
    narrow,
    of,
    same,
    span_of,
    struct_with,
    time_of,
)
from tests.programs import PATTERNS

Write = Callable[[random.Random, DType, list[DType]], str]

# Functions, aggregates and steps to leave out, while somebody works on them: CAMPAIGN_WITHOUT=collect,top_k.
WITHOUT = set(os.environ.get("CAMPAIGN_WITHOUT", "").split(","))


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to write an expression of some types.

    `is_exact`: every right answer is the same to the last bit. `is_tame`: numbers of usual size stay so.
    """

    fn: str
    gives: Is
    takes: tuple[Take, ...]
    write: str | Write
    weight: int = 2
    is_exact: bool = True
    is_tame: bool = False


# --- texts with constants in them ---


def _among(rng: random.Random, result: DType, args: list[DType]) -> str:
    values = [python_value(value_of(rng, args[0]), args[0]) for _ in range(rng.choice([0, 1, 2, 3, 5, 5, 40]))]
    return f"{{0}}.is_in({(values + [None] * (rng.random() < 0.2))!r})"


def _pattern(name: str) -> Write:
    return lambda rng, result, args: f"{{0}}.str.{name}({rng.choice(PATTERNS)!r})"


def _slice(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.str.slice({rng.randrange(-6, 7)}, {rng.choice([None, 0, 1, 2, 3, 6])})"


def _cast(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.cast({type_text(result.arrow)})"


def _by_text(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.cast(pa.string()).cast({type_text(result.arrow)})"


def _round(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.round({rng.choice([0, 0, 1, 2, -1, 5])})"


def _divisible(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"({{0}} % {rng.choice([1, 2, 3, 7, 100])} == 0)"


def _truncate(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.dt.truncate({rng.choice(['1s', '1m30s', '1h', '1d', '7d'])!r})"


def _constant(rng: random.Random, dtype: DType) -> str:
    """A constant as users write it, which takes the column's type."""
    value = value_of(rng, dtype)
    found = python_value(value, dtype)
    return constant_text(value, dtype) if found is None else repr(found)


def _with_constant(sign: str) -> Write:
    """A plain constant on the right, now and then on the left."""

    def write(rng: random.Random, result: DType, args: list[DType]) -> str:
        if args[0].is_int and result == BOOL and rng.random() < 0.1:  # one that may not fit: both sides widen
            return f"({{0}} {sign} {rng.choice(['1000', '-5', '100_000', '1.5', '2**40'])})"
        text = _constant(rng, args[0]).replace("{", "{{").replace("}", "}}")
        return f"({{0}} {sign} {text})" if rng.random() < 0.8 else f"(lit({text}) {sign} {{0}})"

    return write


def _field(rng: random.Random, result: DType, args: list[DType]) -> str:
    names = [field.name for field in args[0].nested or () if dtype_of(field.type) == result]
    return f"{{0}}.struct.field({rng.choice(names)!r})"


def _strip(name: str) -> Write:
    return lambda rng, result, args: f"{{0}}.str.{name}({rng.choice([None, None, 'a', 'yek', 'é x'])!r})"


def _split_part(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.str.split_part({rng.choice(['e', ' ', 'ü', 'ab'])!r}, {rng.choice([1, 2, 3, -1, -2])})"


def _extract(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.str.extract({rng.choice(['([a-z]+)', '([0-9]+)', '(é+)', '^(.)(.)'])!r})"


def _replace(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.str.replace({rng.choice(['e', 'key', 'ab', 'é'])!r}, {rng.choice(['', 'E', '日', 'eee'])!r})"


def _in_decimals(sign: str) -> Write:
    """Digits of the result follow from both sides; a cast gives the type that was asked for."""
    return lambda rng, result, args: f"({{0}} {sign} {{1}}).cast({type_text(result.arrow)})"


def _try_cast(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.try_cast({type_text(result.arrow)})"


def _through_a_format(rng: random.Random, result: DType, args: list[DType]) -> str:
    pattern = rng.choice(["%Y-%m-%d %H:%M:%S", "%Y/%j", "%d %B %Y, %I:%M %p"])
    return f"{{0}}.dt.strftime({pattern!r}).str.try_strptime({type_text(result.arrow)}, {pattern!r})"


def _in_a_format(rng: random.Random, result: DType, args: list[DType]) -> str:
    return f"{{0}}.str.try_strptime({type_text(result.arrow)}, {rng.choice(['%Y', 'key%y', '%Y-%m-%d'])!r})"


def _has_one_zero(dtype: DType) -> bool:
    return is_any(dtype) and not dtype.is_float


def is_str(dtype: DType) -> bool:
    return dtype == STR


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

_ALL: list[Rule] = [
    # numbers
    Rule("add", is_number, (same, narrow), "({0} + {1})", 3),
    Rule("sub", is_number, (narrow, same), "({0} - {1})", 3),
    Rule("mul", is_number, (same, narrow), "({0} * {1})"),
    Rule("mul", is_number, (same,), _with_constant("*")),
    Rule("floordiv", is_number, (same, same), "({0} // {1})", 1),
    Rule("floordiv", is_number, (same,), _with_constant("//")),
    Rule("mod", is_number, (same, same), "({0} % {1})", 1),
    Rule("mod", is_number, (same,), _with_constant("%")),
    Rule("div", is_float, (same, narrow), "({0} / {1})"),
    Rule("div", is_f64, (an_int, first), "({0} / {1})"),
    Rule("neg", has_sign, (same,), "(-{0})", is_tame=True),
    Rule("abs", has_sign, (same,), "abs({0})", is_tame=True),
    *(Rule(fn, is_float, (same,), f"{{0}}.{fn}()", is_tame=True) for fn in ("floor", "ceil")),
    Rule("sqrt", is_float, (same,), "{0}.sqrt()"),
    Rule("round", is_float, (same,), _round, is_tame=True),
    Rule("exp", is_float, (same,), "{0}.exp()", is_exact=False),
    Rule("log", is_float, (same,), "{0}.log()", is_exact=False),
    Rule("pow", is_f64, (of(is_number, F64), first), "{0}.pow({1})", is_exact=False),
    # conditions
    *(Rule(fn, is_bool, (any_column, first), f"({{0}} {sign} {{1}})", 3) for fn, sign in _COMPARISONS.items()),
    *(Rule(fn, is_bool, (any_column,), _with_constant(sign), 3) for fn, sign in _COMPARISONS.items()),
    Rule("and", is_bool, (same, same), "({0} & {1})", 4),
    Rule("or", is_bool, (same, same), "({0} | {1})", 4),
    Rule("not", is_bool, (same,), "(~{0})"),
    Rule("is_null", is_bool, (any_column,), "{0}.is_null()"),
    Rule("is_not_null", is_bool, (any_column,), "{0}.is_not_null()"),
    Rule("is_nan", is_bool, (a_float,), "{0}.is_nan()"),
    Rule("is_in", is_bool, (any_column,), _among, 3),
    Rule("and", is_bool, (any_column, first, first), "{0}.between({1}, {2})"),
    Rule("divisible", is_bool, (an_int,), _divisible),
    *(Rule(fn, is_bool, (a_text,), _pattern(fn)) for fn in ("starts_with", "ends_with", "contains")),
    # any type
    Rule("fill_null", is_any, (same, same), "{0}.fill_null({1})", is_tame=True),
    Rule("if_else", is_any, (exactly(BOOL), same, same), "when({0}).then({1}).otherwise({2})", 3, is_tame=True),
    Rule("if_else", is_any, (exactly(BOOL), same, exactly(BOOL), same), "when({0}).then({1}).when({2}).then({3})", 1,
         is_tame=True),
    Rule("cast", is_any, (castable,), _cast, 3),
    Rule("cast", is_int, (same,), _by_text, 1),
    Rule("hash", is_i64, (any_column,), "{0}.hash()", 3),
    Rule("is_null", is_bool, (of(is_nested),), "{0}.is_null()", 1),
    # decimals
    *(Rule(fn, is_decimal, (same, same), _in_decimals(sign))
      for fn, sign in (("add", "+"), ("sub", "-"), ("mul", "*"))),
    Rule("div", is_f64, (of(is_decimal), first), "({0} / {1})", 1),
    Rule("round", is_decimal, (same,), _round),
    # null instead of an error
    *(Rule("try", is_number, (same, narrow), f"{{0}}.try_{fn}({{1}})", 1)
      for fn in ("add", "sub", "mul", "floordiv", "mod")),
    Rule("try", is_any, (castable,), _try_cast, 1),
    Rule("try", is_int, (a_text,), _try_cast, 1),
    Rule("try_divide", is_f64, (of(is_number, F64), first), "{0}.try_divide({1})"),
    # nested
    Rule("list_len", is_i64, (of(is_list),), "{0}.list.len()", 6),
    *(Rule("list_get", is_any, (list_of,), f"{{0}}.list.get({k})", 2) for k in (0, 1, -1)),
    Rule("struct_field", is_any, (struct_with,), _field, 9),
    Rule("make_struct", is_bool, (any_column,), "si.struct(a={0}, b=1).is_not_null()", 1),
    # text
    *(Rule(f"str_{name}", is_text, (same,), _strip(name), 1) for name in ("strip", "lstrip", "rstrip")),
    Rule("str_split_part", is_text, (same,), _split_part, 1),
    Rule("str_extract", is_text, (same,), _extract, 1),
    Rule("str_replace", is_text, (same,), _replace, 1),
    *(Rule("str_matches", is_bool, (a_text,), f"{{0}}.str.matches({p!r})", 1) for p in ("^[a-k]", "é|b$", "[0-9]+")),
    Rule("lower", is_text, (same,), "{0}.str.lower()"),
    Rule("upper", is_text, (same,), "{0}.str.upper()"),
    Rule("str_slice", is_text, (same,), _slice, 4),
    Rule("concat", is_text, (same, same), "({0} + {1})", 3),
    Rule("concat", is_text, (same,), "({0} + '-' + {0})", 1),
    Rule("str_len", is_i64, (a_text,), "{0}.str.len()", 3),
    # times
    Rule("add", is_ts, (same, span_of), "({0} + {1})", 3),
    Rule("sub", is_ts, (same, span_of), "({0} - {1})", 3),
    Rule("sub", is_dur, (time_of, first), "({0} - {1})", 3),
    Rule("add", is_dur, (same, same), "({0} + {1})"),
    Rule("mul", is_dur, (same, of(lambda t: t.is_int and t.kind is not Kind.U64, I64)), "({0} * {1})"),
    Rule("dt_truncate", is_ts, (same,), _truncate, 3),
    *(Rule("dt_epoch", is_i64, (a_ts,), f"{{0}}.dt.epoch({unit!r})", 1) for unit in ("s", "ms")),
    *(Rule(part, is_i32, (a_day if part in DT_DATE_PARTS else a_clock,), f"{{0}}.dt.{part[3:]}()", 2)
      for part in DT_PARTS),
    *(Rule(total, is_i64, (of(is_dur, DType(Kind.DUR, unit="ms")),), f"{{0}}.dt.{total[3:]}()", 1)
      for total in TOTALS_PER_DAY),
    Rule("dt_strftime", is_str, (a_day,), "{0}.dt.strftime('%m-%d (%j) %H:%M:%S.%f')", 2),
    Rule("dt_local", is_str, (of(lambda t: is_ts(t) and not is_utc(t), DType(Kind.TS, unit="s", tz="Europe/Berlin")),),
         "{0}.dt.strftime('%a %d %b, %I %p')", 1),
    Rule("str_strptime", lambda dtype: is_ts(dtype) and not dtype.tz, (same,), _through_a_format, 1),
    Rule("str_strptime", lambda dtype: is_ts(dtype) and not dtype.tz, (a_text,), _in_a_format, 1),
    Rule("sub", lambda dtype: is_dur(dtype) and dtype.unit == "s", (exactly(DATE), exactly(DATE)), "({0} - {1})", 2),
    Rule("add", is_date, (same, of(is_dur, DType(Kind.DUR, unit="s"))), "({0} + {1})", 2),
    # the least and greatest of a row, but of floats, of which zeros have signs
    Rule("row_max", _has_one_zero, (same, same, same), "si.max_horizontal({0}, {1}, {2})", 1),
    Rule("row_min", _has_one_zero, (same, same), "si.min_horizontal({0}, {1})", 1),
    Rule("clip", _has_one_zero, (same, same, same), "{0}.clip({1}, {2})", 1),
    # functions of the user's
    Rule("udf", is_i64, (exactly(I64), exactly(I64)), "udfs.steps_down({0}, {1})", 1),
    Rule("udf", is_f64, (exactly(F64), exactly(F64)), "udfs.share({0}, {1})", 1),
    Rule("udf", is_bool, (exactly(STR), exactly(STR)), "udfs.longer({0}, {1})", 1),
    Rule("udf", lambda dtype: dtype == STR, (exactly(I64), exactly(STR)), "udfs.word_of({0}, {1})", 1),
    Rule("udf", is_i64, (exactly(I64),), "udfs.digits({0})", 1),
]  # fmt: skip
RULES = [rule for rule in _ALL if rule.fn in REGISTRY and rule.fn not in WITHOUT]


@dataclass(frozen=True, slots=True)
class AggRule:
    """An aggregate: of what columns, and whether it follows the source's order or rounds.

    `wants_tame`: only numbers of usual size, since the order of a sum decides how others round.
    """

    fn: str
    of: tuple[Is, ...]
    write: str
    ordered: bool = False
    exact: Is = lambda dtype: True
    wants_tame: Is = lambda dtype: False
    weight: int = 2


def _not_float(dtype: DType) -> bool:
    return not dtype.is_float


_ALL_AGGS = [
    AggRule("count", (), "si.count()", weight=3),
    AggRule("count_valid", (is_any,), "{0}.count()"),
    AggRule("sum", (lambda t: is_number(t) or t.kind in (Kind.BOOL, Kind.DUR, Kind.DEC),), "{0}.sum()",
            exact=_not_float, wants_tame=is_float, weight=4),
    AggRule("mean", (lambda t: is_number(t) or is_decimal(t) or is_bool(t),), "{0}.mean()",
            exact=lambda dtype: False, wants_tame=is_float),
    AggRule("var", (is_number,), "{0}.var()", exact=lambda dtype: False, wants_tame=is_number),
    AggRule("std", (is_number,), "{0}.std()", exact=lambda dtype: False, wants_tame=is_number),
    AggRule("cov", (is_number, is_number), "si.cov({0}, {1})", exact=lambda dtype: False, wants_tame=is_number),
    # Floats that differ by rounding alone have a correlation of rounding alone.
    AggRule("corr", (is_int, is_int), "si.corr({0}, {1})", exact=lambda dtype: False, wants_tame=is_number),
    # Of 0.0 and -0.0 either is the least.
    AggRule("min", (is_any,), "{0}.min()", exact=_not_float, weight=3),
    AggRule("max", (is_any,), "{0}.max()", exact=_not_float, weight=3),
    AggRule("first", (is_any,), "{0}.first()", ordered=True),
    AggRule("last", (is_any,), "{0}.last()", ordered=True),
    AggRule("arg_min", (is_any, is_any), "{0}.arg_min({1})", ordered=True),
    AggRule("arg_max", (is_any, is_any), "{0}.arg_max({1})", ordered=True),
    AggRule("n_unique", (is_any,), "{0}.n_unique()", weight=4),
    AggRule("quantile", (is_number,), "{0}.quantile(0.3)", exact=lambda dtype: False, wants_tame=is_float, weight=4),
    AggRule("approx_n_unique", (is_any,), "{0}.approx_n_unique()"),
    AggRule("approx_quantile", (is_number,), "{0}.approx_quantile(0.7)", exact=lambda dtype: False,
            wants_tame=is_float),
    AggRule("udaf", (is_number, is_int), "udfs.Totals({0}, {1})", exact=lambda dtype: False, wants_tame=is_number),
    AggRule("collect", (is_any,), "{0}.collect()", ordered=True, weight=4),
    AggRule("top_k", (is_any, lambda t: is_number(t) or t.kind in TIMES), "{0}.top_k(3, {1})", ordered=True, weight=4),
]  # fmt: skip
AGG_RULES = [rule for rule in _ALL_AGGS if rule.fn in AGGREGATES and rule.fn not in WITHOUT]
