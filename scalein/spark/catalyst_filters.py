"""Conditions of Spark's plans as conditions of a flow: the opposite direction of `batch/filters.py`.

Translated is what means the same in both: comparisons of a column with a constant of its type, `in`, null tests, and
their combinations by `and`, `or` and `not`. In both engines NaN is the greatest number and equals itself, text is
compared by its bytes, null is neither true nor false, and a filter drops rows for which its condition is not true.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.errors import NOWHERE
from scalein.spark.types import arrow_schema

if TYPE_CHECKING:
    from scalein.api.column import Column

_COMPARISONS = {"EqualTo": "__eq__", "LessThan": "__lt__", "LessThanOrEqual": "__le__", "GreaterThan": "__gt__",
                "GreaterThanOrEqual": "__ge__"}
_MIRRORED = {"__eq__": "__eq__", "__lt__": "__gt__", "__le__": "__ge__", "__gt__": "__lt__", "__ge__": "__le__"}


def column_of(expression: Any) -> Column | None:
    """A Catalyst expression, an object of the JVM, as a condition; None if there is none of the same meaning."""
    from scalein.api.column import col

    kind = expression.getClass().getSimpleName()
    if kind in ("And", "Or"):
        left, right = column_of(expression.left()), column_of(expression.right())
        if left is None or right is None:
            return None
        return left & right if kind == "And" else left | right
    if kind == "Not":
        inner = column_of(expression.child())
        return None if inner is None else ~inner
    if _is_attribute(expression):
        return col(expression.name()) if expression.dataType().typeName() == "boolean" else None
    if kind in ("IsNull", "IsNotNull") and _is_attribute(expression.child()):
        column = col(expression.child().name())
        return column.is_null() if kind == "IsNull" else column.is_not_null()
    if kind in _COMPARISONS:
        return _comparison(_COMPARISONS[kind], expression.left(), expression.right())
    if kind == "In" and _is_attribute(expression.value()):
        items = expression.list()
        literals = [_literal(items.apply(k)) for k in range(items.size())]
        if any(literal is None for literal in literals):
            return None
        return col(expression.value().name()).is_in([literal.as_py() for literal in literals if literal is not None])
    return None


def _comparison(method: str, left: Any, right: Any) -> Column | None:
    from scalein.api.column import col

    if _is_attribute(right):
        method, left, right = _MIRRORED[method], right, left
    literal = _literal(right) if _is_attribute(left) else None
    if literal is None:
        return None
    found: Column = getattr(col(left.name()), method)(literal)
    return found


def _is_attribute(expression: Any) -> bool:
    return bool(expression.getClass().getSimpleName() == "AttributeReference")


def _literal(expression: Any) -> pa.Scalar | None:
    """A constant that is not null; None for other expressions, and for types that a flow does not compare so."""
    from pyspark.sql.types import StructType

    if expression.getClass().getSimpleName() != "Literal" or expression.value() is None:
        return None
    if " collate " in expression.dataType().simpleString():
        return None
    try:
        struct = StructType.fromJson({"type": "struct", "fields": [
            {"name": "x", "type": json.loads(expression.dataType().json()), "nullable": True, "metadata": {}}]})
        return value_of(expression.value(), arrow_schema(struct, NOWHERE).field(0).type)
    except ValueError:
        return None


def value_of(value: Any, arrow: pa.DataType) -> pa.Scalar:
    """A value as Spark holds it: dates are days, times microseconds, text and decimals objects of the JVM."""
    if value is None:
        return pa.scalar(None, arrow)
    if pa.types.is_date32(arrow):
        return pa.scalar(value, pa.int32()).cast(arrow)
    if pa.types.is_timestamp(arrow):
        return pa.scalar(value, pa.int64()).cast(arrow)
    if pa.types.is_decimal(arrow):
        return pa.scalar(Decimal(value.toString()), arrow)
    if pa.types.is_string(arrow):
        return pa.scalar(value.toString(), arrow)
    if pa.types.is_primitive(arrow):
        return pa.scalar(value, arrow)
    raise ValueError(f"a constant of type {arrow}")
