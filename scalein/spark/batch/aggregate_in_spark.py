"""Aggregations that stay with Spark: rows that it groups itself need not leave the JVM.

To hand a row to Python costs more than to group it, so an aggregation over a DataFrame's rows is Spark's where it means
the same: counts, sums, means, minima, maxima and variances of columns and of calls (`calls.py`), by keys and tumbling
windows, after filters that Spark computes (`filters.py`) and joins with small tables. Ops downstream of it are
compiled, and get the groups.

    null        no value, a key like others, and it matches in no join
    floats      NaN is the greatest; + - * round alike. Not as keys: another one of equal values (0.0, -0.0) would come
                out. Quotients are not Spark's: it has an error or null for a division by zero
    integers    sums of 64 bits are made of two halves, which are exact; one that does not fit is an error
    decimals    sums of up to 28 digits; means are rounded otherwise
    variances   are of two values at least; both engines merge the moments of parts
    text        is compared by its bytes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from scalein.connectors.in_memory import Batches
from scalein.dtypes import I64, SIGNED, Kind, Schema
from scalein.errors import NOWHERE, SourceLoc
from scalein.exec.fragments import Fragment
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Call, Col, Expr, Lit, NamedAgg, type_of
from scalein.ir.physical import identity
from scalein.ir.rewrite import stream_path
from scalein.ir.tables import AccKind
from scalein.ir.windows import Window
from scalein.spark.batch.catalyst_calls import literal, spark_call, spark_type, unless
from scalein.spark.batch.filters import push_to_spark, quote_name
from scalein.spark.types import spark_arrow_schema, spark_schema, to_spark

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MAX_TABLE_BYTES = 8 << 20  # of a joined table, which every executor gets
MAX_SUM_DIGITS = 28  # of decimals: ten more digits hold the sum of 10^10 of them
MAX_SUM_ROWS = 1 << 31  # of a group: each adds less than 2^32 to half of a 64-bit sum
_JOINS = {"inner": "inner", "left": "left", "semi": "left_semi", "anti": "left_anti"}
_KEYS = (*SIGNED, Kind.BOOL, Kind.STR, Kind.DATE, Kind.TS, Kind.DEC)
_LEAST, _GREATEST, _HALF = -(1 << 63), (1 << 63) - 1, 1 << 32

Columns = dict[str, "Column"]
Found = TypeVar("Found")


def aggregate_in_spark(fragment: Fragment, df: DataFrame) -> DataFrame | None:
    """The groups of a fragment's aggregation, in Spark's types; None if Spark would give them another meaning."""
    fragment, condition = push_to_spark(fragment, df.schema)
    state = fragment.state
    if isinstance(state, ops.Distinct) and set(state.keys) == set(state.schema.names):
        state = ops.Aggregate(state.input, identity(state.schema), None, (), at=state.at)
    if not isinstance(state, ops.Aggregate) or df.isStreaming:
        return None
    rows = df if condition is None else df.filter(condition)
    columns = _input_columns(fragment.input.schema, df.schema)
    for op in stream_path(state.input, fragment.input):
        match op:
            case ops.Project():
                columns = {item.name: found for item in op.items if (found := _column(item.expr, columns)) is not None}
            case ops.Join() if (joined := _joined(op, rows, columns)) is not None:
                rows = joined
            case _:
                return None
    return _grouped(state, rows, columns)


def _input_columns(schema: Schema, struct: Any) -> Columns:
    """The columns that Spark has in the flow's own types."""
    from pyspark.sql import functions

    sent = {field.name: field for field in struct.fields}
    found: Columns = {}
    for field in schema:
        own = sent[field.name]
        is_same = spark_type(field.dtype) == own.dataType and (field.nullable or not own.nullable)
        if is_same and (field.dtype.kind in _KEYS or field.dtype.is_float) and field.dtype.unit in ("", "us"):
            found[field.name] = functions.col(quote_name(field.name))
    return found


def _column(expr: Expr, columns: Columns) -> Column | None:
    """A value as a Column of Spark, if it means the same."""
    match expr:
        case Col():
            return columns.get(expr.name)
        case Lit():
            return literal(expr)
        case Call():
            args = _all([_column(arg, columns) for arg in expr.args])
            return None if args is None else spark_call(expr, args)
    return None


def _key(expr: Expr, columns: Columns) -> Column | None:
    return _column(expr, columns) if type_of(expr).kind in _KEYS else None


def _all(found: list[Found | None]) -> list[Found] | None:
    """What was found, if all was."""
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else None


# --- joins


def _joined(join: ops.Join, rows: DataFrame, columns: Columns) -> DataFrame | None:
    """The rows after a join with a small table, whose columns are added to `columns`."""
    from pyspark.sql import functions

    data = join.right.data if isinstance(join.right, ops.Source) else None
    left = _all([_key(key, columns) for key in join.left_keys])
    right = [key.name for key in join.right_keys if isinstance(key, Col)]
    names = list(dict.fromkeys([*right, *(column for _, column in join.keep)]))
    if join.how not in _JOINS or not isinstance(data, Batches) or left is None or len(right) < len(left):
        return None
    table = pa.Table.from_batches(list(data.read()), data.schema).select(names)
    if table.nbytes > MAX_TABLE_BYTES or any(pa.types.is_nested(field.type) for field in table.schema):
        return None
    prefix = f"__scalein{len(columns)}_"  # unlike any other column's
    sent_types = spark_arrow_schema(table.schema, NOWHERE)
    parts = [part for batch in table.to_batches() for part in to_spark(batch, sent_types)]
    renamed = pa.schema([field.with_name(f"{prefix}{k}") for k, field in enumerate(sent_types)])
    sent = pa.Table.from_batches(parts, sent_types).rename_columns(renamed.names)
    static = functions.broadcast(rows.sparkSession.createDataFrame(sent, schema=spark_schema(renamed, NOWHERE)))
    column_of = {name: functions.col(new) for name, new in zip(names, renamed.names, strict=True)}
    equal = [key == column_of[name] for key, name in zip(left, right, strict=True)]
    columns.update({name: column_of[column] for name, column in join.keep})
    return rows.join(static, equal, _JOINS[join.how])


# --- groups


def _grouped(state: ops.Aggregate, rows: DataFrame, columns: Columns) -> DataFrame | None:
    """The groups of rows, in the columns of the aggregation and in Spark's types for them."""
    from pyspark.sql import functions

    start = [] if state.window is None else [_window_start(state.window, columns, state.at)]
    by = _all([*(_key(key.expr, columns) for key in state.keys), *start])
    # Otherwise a sum that does not fit is a wrong one.
    is_checked = rows.sparkSession.conf.get("spark.sql.ansi.enabled") == "true"
    plans = _all([_plan(named, f"a{k}_", is_checked, state.at) for k, named in enumerate(state.aggs)])
    values = _all([_column(arg, columns) for named in state.aggs for arg in named.agg.args])
    if by is None or plans is None or values is None:
        return None
    if state.window is not None and (time := _column(state.window.time, columns)) is not None:
        rows = rows.filter(time.isNotNull())  # a row without a time is in no window
    keys = [f"k{k}" for k in range(len(by))]
    names = [f"a{k}_" for k, named in enumerate(state.aggs) for _ in named.agg.args]
    rows = rows.select(*(column.alias(name) for column, name in zip([*by, *values], [*keys, *names], strict=True)))
    partial = {f"{plan.name}{k}": each for plan in plans for k, each in enumerate(plan.partial)}
    groups = (rows.groupBy(*keys).agg(*(each.alias(name) for name, each in partial.items())) if partial
              else rows.distinct())
    found = [functions.col(name) for name in keys]
    if state.window is not None:
        found.append(_window_end(state.window, found[-1], state.at))
    found += [plan.final(*(functions.col(f"{plan.name}{k}") for k in range(len(plan.partial)))) for plan in plans]
    types = spark_schema(state.schema.arrow, state.at).fields
    return groups.select(*(column.cast(field.dataType).alias(field.name)
                           for column, field in zip(found, types, strict=True)))


def _window_start(window: Window, columns: Columns, at: SourceLoc) -> Column | None:
    """The start of a row's window, by a column; None if windows overlap."""
    from pyspark.sql import functions

    time, dtype = _key(window.time, columns), type_of(window.time)
    if time is None or not window.is_tumbling or window.is_session or window.offset:
        return None
    if dtype.kind is Kind.TS:
        return functions.window(time, f"{window.size} microseconds")["start"]
    if dtype != I64:
        return None
    start = time - functions.pmod(time, functions.lit(window.size))
    return unless(time < _LEAST + window.size, start, "a window begins before the least time", at)


def _window_end(window: Window, start: Column, at: SourceLoc) -> Column:
    from pyspark.sql import functions

    dtype = type_of(window.time)
    if dtype.kind is Kind.TS and not dtype.tz:
        return start + functions.expr(f"interval {window.size} microseconds")
    if dtype.kind is Kind.TS:  # a day of an interval may have 23 hours in the session's time zone
        return functions.timestamp_micros(functions.unix_micros(start) + window.size)
    return unless(start > _GREATEST - window.size, start + window.size, "a window ends after the greatest time", at)


@dataclass(frozen=True)
class _Plan:
    """An aggregate of Spark's: `final` of the aggregates `partial` of a column `name`."""

    name: str
    partial: tuple[Column, ...]
    final: Callable[..., Column]


def _plan(named: NamedAgg, name: str, is_checked: bool, at: SourceLoc) -> _Plan | None:
    """The plan of an aggregate over a column `name`, if it means the same in Spark."""
    from pyspark.sql import functions

    agg, declared = named.agg, AGGREGATES[named.agg.fn]
    if not declared.spark or len(agg.args) > 1:
        return None
    if declared.accumulators(agg, grouped=True)[0].kind is AccKind.ISUM:
        return _exact_sum(named, name, is_checked, at)
    value = functions.col(name) if agg.args else functions.lit(1)
    if declared.always_nullable:  # of fewer than two values: with a setting, Spark gives NaN
        partial = (getattr(functions, declared.spark)(value), functions.count(value))
        return _Plan(name, partial, lambda found, count: functions.when(count > 1, found))
    return _Plan(name, (getattr(functions, declared.spark)(value),), lambda found: found)


def _exact_sum(named: NamedAgg, name: str, is_checked: bool, at: SourceLoc) -> _Plan | None:
    """The sum, or the mean, of integers, bools or decimals."""
    from pyspark.sql import functions

    value, own, is_mean = functions.col(name), type_of(named.agg.args[0]), type_of(named.agg).is_float
    if own.kind is Kind.DEC and own.precision <= MAX_SUM_DIGITS and not is_mean:
        return _Plan(name, (functions.sum(value),), lambda total: total)
    if own.kind in (Kind.BOOL, Kind.I8, Kind.I16, Kind.I32):
        partial = (functions.sum(value.cast("long")), functions.count(value))
        return _Plan(name, partial, _quotient) if is_mean else _Plan(name, partial[:1], lambda total: total)
    if own != I64:
        return None
    halves = (functions.sum(functions.shiftright(value, 32)), functions.sum(value.bitwiseAND(functions.lit(_HALF - 1))))

    def total(high: Column, low: Column, count: Column | None = None) -> Column:
        high, low = high + functions.shiftright(low, 32), low.bitwiseAND(functions.lit(_HALF - 1))
        is_wide = (high < -_HALF // 2) | (high >= _HALF // 2)
        found = functions.shiftleft(high, 32).bitwiseOR(low)
        if is_mean:
            wide = (high.cast("decimal(20, 0)") * _HALF + low).cast("double")
            found = functions.when(is_wide, wide).otherwise(found.cast("double"))
        else:
            found = unless(is_wide, found, f"integer overflow in the sum `{named.name}`", at)
        if count is not None and not is_checked:
            found = unless(count >= MAX_SUM_ROWS, found, f"too many rows in the sum `{named.name}`", at)
        return _quotient(found, count) if is_mean and count is not None else found

    return _Plan(name, halves if is_checked and not is_mean else (*halves, functions.count(value)), total)


def _quotient(total: Column, count: Column) -> Column:
    from pyspark.sql import functions

    return functions.when(count > 0, total.cast("double") / count)
