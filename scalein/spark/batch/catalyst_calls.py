"""Calls of flows as Columns of Spark, where these mean the same: functions declare their form in Spark (`spark`).

    comparisons    NaN is the greatest number and equals itself, 0.0 equals -0.0, and text is compared by its bytes
    is_in          not of floats: of more than ten constants Spark makes a hash set, which distinguishes the two zeros;
                   nor with a null among them
    if_else        only the branch that is chosen can fail
    and, or        not of operands that can fail: Spark does not compute the second if the first decides
    integers       sums, differences and products: Spark's own overflow depends on a setting, so it computes those that
                   are null on overflow (`spark_checked`), which is reported as compiled code does
    casts          to wider integers and to f64, which both round alike
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.dtypes import SIGNED, DType, Kind
from scalein.errors import NOWHERE, ComputeError, SourceLoc
from scalein.ir.exprs import Call, Lit, type_of
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.printer import show_brief
from scalein.spark.types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import Column

_KINDS = (*SIGNED, Kind.F64, Kind.BOOL, Kind.STR)  # a constant of 32-bit floats would be rounded


def spark_call(call: Call, args: Sequence[Column]) -> Column | None:
    """A typed call over Columns; None if it has another meaning in Spark, or none."""
    from pyspark.sql import Column, functions

    function = REGISTRY[call.fn]
    constants = _constants(call)
    if not function.spark or not function.spark_if(call) or constants is None:
        return None
    if function.spark_checked and type_of(call).is_int:
        return _checked(call, functions.call_function(function.spark_checked, *args), args)
    if not hasattr(Column, function.spark):
        return functions.call_function(function.spark, *args, *constants)
    found: Column = getattr(args[0], function.spark)(*args[1:], *constants)
    return found


def _constants(call: Call) -> list[Any] | None:
    """The constants of a call as Spark takes them, after its arguments; None if it has none for one of them."""
    if call.fn == "cast":
        return [spark_type(type_of(call))]
    if not call.params:
        return []
    if not isinstance(call.params[0], tuple):
        return list(call.params)
    own = type_of(call.args[0])
    listed = [literal(Lit(value, own)) for value in call.params[0]]
    return None if any(each is None for each in listed) else listed


def _checked(call: Call, found: Column, args: Sequence[Column]) -> Column:
    """A value that is null where an integer overflows: that is an error, unless an argument is null."""
    overflows = found.isNull()
    for arg, column in zip(call.args, args, strict=True):
        if arg.nullable:
            overflows = overflows & column.isNotNull()
    return unless(overflows, found, f"integer overflow in `{show_brief(call)}`", call.at)


def unless(fails: Column, value: Column, what: str, at: SourceLoc) -> Column:
    """A value; where it fails, a ComputeError whose text `explain_error` finds in Spark's."""
    from pyspark.sql import functions

    text = f"\n{ComputeError.__module__}.{ComputeError.__qualname__}: {ComputeError(what, at=at)}\n\n"
    return functions.when(fails, functions.raise_error(functions.lit(text))).otherwise(value)


def literal(value: Lit) -> Column | None:
    """A constant in Spark's type for it; None for decimals, and for types that Spark does not have."""
    from pyspark.sql import functions

    dtype = type_of(value)
    if isinstance(value.value, int) and (time := time_literal(value.value, dtype)) is not None:
        return time
    has_type = dtype.kind in _KINDS or (value.value is None and time_type(dtype) is not None)
    return functions.lit(value.value).cast(spark_type(dtype)) if has_type else None


def spark_type(dtype: DType) -> Any:
    """Spark's type of a flow's values."""
    return spark_schema(pa.schema([pa.field("x", dtype.arrow)]), NOWHERE).fields[0].dataType


def time_type(dtype: DType) -> str | None:
    """Spark's name of a type of times that it has in the same unit."""
    if dtype.kind is Kind.TS and dtype.unit == "us":
        return "timestamp" if dtype.tz else "timestamp_ntz"
    return "date" if dtype.kind is Kind.DATE else None


def time_literal(value: int, dtype: DType) -> Column | None:
    """A constant time; None for other types."""
    from pyspark.sql import functions

    match time_type(dtype):
        case "date":
            return functions.date_from_unix_date(functions.lit(value))
        case "timestamp":
            return functions.timestamp_micros(functions.lit(value))
        case "timestamp_ntz":
            return functions.expr(f"timestamp_ntz'1970-01-01' + interval '{value}' microseconds")
    return None
