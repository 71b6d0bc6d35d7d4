"""One class an aggregate: how it is typed, which accumulators it is finished from, its names elsewhere.

`AGGREGATES` has them by name. What accumulators do with a row, and how an aggregate is finished from them, is machine
code: `llvm_backend/accumulators.py`. The precision of approximate ones: `SKETCH_BITS` and `COARSE_BITS` in `layout.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import pyarrow as pa

from scalein.dtypes import BOOL, F64, I64, MAX_PRECISION, U64, UNSIGNED, DType, Kind
from scalein.ir.accumulators import ExprAcc
from scalein.ir.exprs import Agg, Call, Expr, Lit, type_of
from scalein.ir.functions.registry import can_fail
from scalein.ir.functions.udf import udf_argument
from scalein.ir.tables import Acc, AccKind
from scalein.ir.unify import Refused, cast_to, nested_hint

if TYPE_CHECKING:
    from scalein.ir.udf import Variable

Args = tuple[Expr, ...]


class Typed(NamedTuple):
    """What a rule finds: the type, and the arguments with their casts spelled out."""

    dtype: DType
    args: Args


class Aggregate(ABC):
    """An aggregate of a group's rows. Where a group has no value, it is null, unless it is never null."""

    name: ClassVar[str]  # stable: checkpoints know it
    arity: ClassVar[int] = 1
    optional: ClassVar[int] = 0  # further arguments that a typed aggregate may have
    never_null: ClassVar[bool] = False
    always_nullable: ClassVar[bool] = False  # null in a group with too few values
    without_order: ClassVar[str] = ""  # it depends on the order of rows; this form does not
    method: ClassVar[str] = ""  # of a Column, where that has another name
    is_method: ClassVar[bool] = True  # col("x").sum(), and not si.corr("x", "y")
    sql: ClassVar[tuple[str, ...]] = ()
    duckdb: ClassVar[str] = ""  # SQL over {0}, {1}, {params[0]}, and {order}, by which the source sorts
    spark: ClassVar[str] = ""  # the function of pyspark that means the same; sums of integers are checked besides

    def rule(self, args: Args) -> Typed:
        """Types it over typed arguments; raises `Refused`."""
        return Typed(type_of(args[0]), args)

    def typed(self, agg: Agg, args: Args) -> Typed:
        """The same for one with parameters."""
        return self.rule(args)

    def shown(self, agg: Agg) -> str:
        """What users call it."""
        return self.method or self.name

    def filtered(self, agg: Agg, where: Expr) -> Agg:
        """The typed aggregate over the rows where a condition is true: its arguments are null in all others.

        So what can fail among them fails in these rows only. It is for aggregates that skip nulls.
        """
        return replace(agg, args=tuple(_only_where(where, arg) for arg in agg.args), nullable=not self.never_null)

    @abstractmethod
    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        """What a group remembers; the first gives the value, and the second, if any, counts the values.

        `grouped` says that there are keys or a window: a group that exists has a row, so an aggregate that cannot be
        null needs no count to tell "none".
        """


def typed(agg: Agg, args: Args, where: Expr | None, grouped: bool) -> Agg:
    """The aggregate over typed arguments, of the rows where a condition is true; raises `Refused`."""
    if agg.fn not in AGGREGATES:
        raise Refused(f"{agg.fn} is of rows in an order, and no aggregate",
                      'with_columns(x=....over("key", order_by="time")) gives it for each row')
    declared = AGGREGATES[agg.fn]
    nullable = not declared.never_null and (
        declared.always_nullable or not grouped or any(arg.nullable for arg in args))  # fmt: skip
    dtype, args = declared.typed(agg, args)
    nested = next((found for found in map(type_of, args) if found.is_nested), None)
    if nested is not None:
        what = "a column of type null" if nested.nested == pa.null() else f"a nested column: {nested!r}"
        raise Refused(f"{agg.fn} does not take {what}", nested_hint(nested))
    found = Agg(agg.fn, args, dtype, nullable, agg.params, agg.at)
    if where is None:
        return found
    if type_of(where).kind is not Kind.BOOL:
        raise Refused(f"filter takes a condition, which is true or false, not {type_of(where)!r}",
                      'compare it with something: .filter(col("x") > 0)')
    return declared.filtered(found, where)


def _only_where(condition: Expr, value: Expr) -> Expr:
    """The value, and null where the condition is not true."""
    return Call("if_else", (condition, value, Lit(None, type_of(value))), dtype=type_of(value))


def _values(arg: Expr) -> Acc:
    """Counts values. What can fail is computed even where it cannot be null: whether it fails must not depend on how
    the data comes.
    """
    return Acc(AccKind.VALID, arg) if arg.nullable or can_fail(arg) else Acc(AccKind.ROWS)


def _sum(arg: Expr) -> Acc:
    return Acc(AccKind.FSUM if type_of(arg).is_float else AccKind.ISUM, arg)


def _or_none(main: Acc, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
    return (main,) if grouped and not agg.nullable else (main, _values(agg.args[0]))


def _number(name: str, arg: Expr) -> DType:
    own = type_of(arg)
    if not own.is_number and not own.is_decimal:
        raise Refused(f"{name} takes a number, not {own!r}", _number_hint(own))
    return own


def _number_hint(own: DType) -> str | None:
    if own.is_nested:
        return nested_hint(own)
    return "cast it to a number: .cast(pa.float64())" if own.is_string else None


class Count(Aggregate):
    name, arity, never_null, is_method, sql, duckdb = "count", 0, True, False, ("COUNT",), "count(*)"
    spark = "count"

    def rule(self, args: Args) -> Typed:
        return Typed(I64, args)

    def filtered(self, agg: Agg, where: Expr) -> Agg:
        return replace(agg, fn=CountValid.name, args=(_only_where(where, Lit(True, BOOL)),))

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return (Acc(AccKind.ROWS),)


class CountValid(Aggregate):
    name, never_null, method, sql, duckdb = "count_valid", True, "count", ("COUNT",), "count({0})"
    spark = "count"

    def rule(self, args: Args) -> Typed:
        if type_of(args[0]).is_nested:  # no kernel reads the column, but one can count a bool that is null where it is
            there = Call("is_not_null", args, dtype=BOOL, nullable=False)
            args = (Call("if_else", (there, Lit(True, BOOL), Lit(None, BOOL)), dtype=BOOL),)
        return Typed(I64, args)

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return (_values(agg.args[0]),)


class Sum(Aggregate):
    name, sql, duckdb, spark = "sum", ("SUM",), "sum({0})", "sum"

    def rule(self, args: Args) -> Typed:
        """Sums of integers come out in 64 bits, of floats as f64."""
        return Typed(self._type(type_of(args[0])), args)

    def _type(self, own: DType) -> DType:
        if own.kind in UNSIGNED:
            return U64
        if own.is_int or own.kind is Kind.BOOL:
            return I64
        if own.is_float:
            return F64
        if own.kind is Kind.DUR:
            return own
        if own.is_decimal:
            return replace(own, precision=MAX_PRECISION)
        raise Refused(f"sum takes numbers, bools or durations, not {own!r}", _number_hint(own))

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return _or_none(_sum(agg.args[0]), agg, grouped)


class Mean(Aggregate):
    name, sql, duckdb, spark = "mean", ("AVG",), "avg({0})", "avg"

    def rule(self, args: Args) -> Typed:
        """The mean of bools is the share that is true."""
        if type_of(args[0]).kind is not Kind.BOOL:
            _number(self.name, args[0])
        return Typed(F64, args)

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return (_sum(agg.args[0]), _values(agg.args[0]))


class _Extreme(Aggregate):
    kind: ClassVar[AccKind]

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return _or_none(Acc(self.kind, agg.args[0]), agg, grouped)


class Min(_Extreme):
    name, kind, sql, duckdb, spark = "min", AccKind.MIN, ("MIN",), "min({0})", "min"


class Max(_Extreme):
    name, kind, sql, duckdb, spark = "max", AccKind.MAX, ("MAX",), "max({0})", "max"


class _Moments(Aggregate):
    always_nullable = True

    def rule(self, args: Args) -> Typed:
        _number(self.name, args[0])
        return Typed(F64, (cast_to(args[0], F64),))

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return (Acc(AccKind.MOMENTS, agg.args[0]),)


class Var(_Moments):
    name, sql, duckdb = "var", ("VAR_SAMP", "VARIANCE"), "var_samp({0})"
    spark = "var_samp"


class Std(_Moments):
    name, sql, duckdb = "std", ("STDDEV_SAMP", "STDDEV"), "stddev_samp({0})"
    spark = "stddev_samp"


class _Pair(Aggregate):
    """Of two numbers a row; rows in which either is null do not count."""

    arity, always_nullable, is_method = 2, True, False

    def rule(self, args: Args) -> Typed:
        for arg in args:
            _number(self.name, arg)
        return Typed(F64, tuple(cast_to(arg, F64) for arg in args))

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        x, y = agg.args
        return (Acc(AccKind.COMOMENTS, x, y),)


class Cov(_Pair):
    name, sql = "cov", ("COVAR_SAMP",)
    duckdb = "covar_samp({0}, {1}) + sum(({0} - {0}) + ({1} - {1}))"  # NaN of infinite values, as inf - inf is


class Corr(_Pair):
    name, sql, duckdb = "corr", ("CORR",), "CASE WHEN regr_count({0}, {1}) > 1 THEN corr({0}, {1}) END"


class _Row(Aggregate):
    """The value of one row, null included."""

    kind: ClassVar[AccKind]

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return (Acc(self.kind, agg.args[0], agg.args[1] if len(agg.args) > 1 else None),)


class _AtEnd(_Row):
    """The value of the first or last row, or of the first or last one in which the second argument is true."""

    optional = 1

    def filtered(self, agg: Agg, where: Expr) -> Agg:
        return replace(agg, args=(_only_where(where, agg.args[0]), where), nullable=True)


class First(_AtEnd):
    name, kind, without_order, sql = "first", AccKind.FIRST, "arg_min(by)", ("FIRST_VALUE", "FIRST")
    duckdb = "first({0} ORDER BY {order})"


class Last(_AtEnd):
    name, kind, without_order, sql = "last", AccKind.LAST, "arg_max(by)", ("LAST_VALUE", "LAST")
    duckdb = "last({0} ORDER BY {order})"


class ArgMin(_Row):
    name, arity, kind, sql = "arg_min", 2, AccKind.ARG_MIN, ("MIN_BY", "ARG_MIN")
    duckdb = "first({0} ORDER BY {1}, {order}) FILTER (WHERE {1} IS NOT NULL)"


class ArgMax(_Row):
    name, arity, kind, sql = "arg_max", 2, AccKind.ARG_MAX, ("MAX_BY", "ARG_MAX")
    duckdb = "first({0} ORDER BY {1} DESC, {order}) FILTER (WHERE {1} IS NOT NULL)"


class NUnique(Aggregate):
    name, never_null, duckdb = "n_unique", True, "count(DISTINCT {0})"

    def rule(self, args: Args) -> Typed:
        return Typed(I64, args)

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return (Acc(AccKind.DISTINCT, agg.args[0]),)


class ApproxNUnique(NUnique):
    name, sql, duckdb = "approx_n_unique", ("APPROX_COUNT_DISTINCT",), ""

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return (Acc(AccKind.SKETCH, _hashed(agg.args[0])),)


def _hashed(arg: Expr) -> Expr:
    """The stable hash of a value; null stays null, so that it is not counted."""
    hashed = Call("hash", (arg,), (), I64, False)
    if not arg.nullable:
        return hashed
    return Call("if_else", (Call("is_not_null", (arg,), (), BOOL, False), hashed, Lit(None, I64)), (), I64)


class Quantile(Aggregate):
    name, duckdb = "quantile", "quantile_cont({0}, {params[0]})"
    sql: ClassVar[tuple[str, ...]] = ("PERCENTILE_CONT", "QUANTILE_CONT", "MEDIAN")
    precision: ClassVar[tuple[str, ...]] = ()  # how values are rounded before they are held

    def rule(self, args: Args) -> Typed:
        _number(self.name, args[0])
        return Typed(F64, (cast_to(args[0], F64),))

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        arg = agg.args[0]
        return (Acc(AccKind.QUANTILE, arg, params=(*agg.params, *self.precision)),
                Acc(AccKind.VALUES, arg, params=self.precision))


class ApproxQuantile(Quantile):
    name, precision, duckdb = "approx_quantile", ("coarse",), ""
    sql = ("APPROX_PERCENTILE", "APPROX_QUANTILE")


class _Values(Aggregate):
    """A list of values; nulls are left out, and no value makes an empty list."""

    never_null = True

    def rule(self, args: Args) -> Typed:
        return Typed(DType(Kind.NESTED, nested=pa.list_(type_of(args[0]).arrow)), args)


class Collect(_Values):
    name, without_order, sql = "collect", "top_k(k, by)", ("ARRAY_AGG", "LIST")
    duckdb = "coalesce(list({0} ORDER BY {order}) FILTER (WHERE {0} IS NOT NULL), [])"

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        return (Acc(AccKind.LIST, agg.args[0]),)


class TopK(_Values):
    name, arity = "top_k", 2
    duckdb = ("coalesce(list({0} ORDER BY {1} DESC, {order}) FILTER (WHERE {0} IS NOT NULL AND {1} IS NOT NULL), [])"
              "[:{params[0]}]")

    def rule(self, args: Args) -> Typed:
        by = type_of(args[1])
        if by.is_bytes or by.is_decimal:
            raise Refused(f"top_k takes an integer, float, bool or time to order by, not {by!r}",
                          "cast it, or use arg_max for a single value")
        return super().rule(args)

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        arg, by = agg.args
        return (Acc(AccKind.TOP, arg, by, agg.params),)


@dataclass(frozen=True, slots=True)
class UserAggregate:
    """A compiled class of `@si.udaf`."""

    params: tuple[Variable, ...]  # of its update
    dtype: DType
    acc: ExprAcc


class Udaf(Aggregate):
    """An aggregate of the user's own: null where no row was counted, and where its `finish` gives None."""

    name, arity, optional, always_nullable, is_method = "udaf", 0, 64, True, False

    def typed(self, agg: Agg, args: Args) -> Typed:
        user = self._user(agg)
        given = tuple(udf_argument(user.acc.name, param, arg) for param, arg in zip(user.params, args, strict=True))
        return Typed(user.dtype, given)

    def shown(self, agg: Agg) -> str:
        return self._user(agg).acc.name

    def filtered(self, agg: Agg, where: Expr) -> Agg:
        """A row in which a strict argument is null does not count; without such, one more argument says which do."""
        found = super().filtered(agg, where)
        return found if any(self._user(agg).acc.strict) else replace(found, args=(*found.args, where))

    def accumulators(self, agg: Agg, grouped: bool) -> tuple[Acc, ...]:
        user = self._user(agg)
        args, where = agg.args[: len(user.params)], agg.args[len(user.params) :]
        main = Acc(AccKind.EXPR, by=where[0] if where else None, params=(user.acc,), parts=args)
        strict = [arg for arg, is_strict in zip(args, user.acc.strict, strict=True) if is_strict and arg.nullable]
        if len(strict) == 1 and not where:
            return main, Acc(AccKind.VALID, strict[0])
        counted = [*where, *(Call("is_not_null", (arg,), dtype=BOOL, nullable=False) for arg in strict)]
        if not counted:
            return main, Acc(AccKind.ROWS)
        condition, *others = counted
        for other in others:
            condition = Call("and", (condition, other), dtype=BOOL, nullable=condition.nullable or other.nullable)
        return main, Acc(AccKind.VALID, _only_where(condition, Lit(True, BOOL)))

    def _user(self, agg: Agg) -> UserAggregate:
        (user,) = agg.params
        assert isinstance(user, UserAggregate)
        return user


AGGREGATES: dict[str, Aggregate] = {
    aggregate.name: aggregate
    for aggregate in (
        Count(), CountValid(), Sum(), Mean(), Min(), Max(), Var(), Std(), Cov(), Corr(), First(), Last(),
        ArgMin(), ArgMax(),
        NUnique(), Quantile(), Collect(), TopK(), ApproxNUnique(), ApproxQuantile(), Udaf(),
    )
}  # fmt: skip
