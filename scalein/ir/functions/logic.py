"""Kleene's logic, null tests, and choices: functions that decide which of their arguments count."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from scalein.dtypes import BOOL, Kind
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.functions.registry import (
    ANY,
    REGISTRY,
    Args,
    Function,
    Nulls,
    can_fail,
    declare,
    fallible,
    is_host,
    typed,
)
from scalein.ir.unify import Refused, nested_hint, own_type_of, type_literal, unify


def _condition(arg: Expr, what: str) -> Expr:
    """The argument as a bool."""
    if isinstance(arg, Lit) and arg.value is None:
        return Lit(None, BOOL)
    arg = type_literal(arg)
    if type_of(arg).kind is not Kind.BOOL:
        hint = "comparisons need parentheses beside & and |: (a > 1) & (b < 2)" if what in "&|~" else None
        raise Refused(f"{what} takes conditions, not {type_of(arg)!r}", hint)
    return arg


def _logic(call: Call, args: Args) -> Expr:
    return typed(call, [_condition(arg, REGISTRY[call.fn].sign) for arg in args], BOOL)


def _null_test(call: Call, args: Args) -> Expr:
    return typed(call, [type_literal(args[0])], BOOL)


def _fill_null(call: Call, args: Args) -> Expr:
    value, default = unify(args, "fill_null does not take")
    return typed(call, [value, default], type_of(value))


def _coalesce(call: Call, args: Args) -> Expr:
    """`a.fill_null(b.fill_null(c))`, all in one type."""
    *values, last = unify(args, "coalesce does not take")
    for value in reversed(values):
        last = typed(replace(call, fn="fill_null"), [value, last], type_of(value))
    return last


def _choose(call: Call, args: Args) -> Expr:
    """`when(c0).then(v0).when(c1).then(v1).otherwise(v2)` of c0, v0, c1, v1, v2: all values in one type, so that every
    value meets every other; nested from the last.
    """
    conditions, values = args[:-1:2], (*args[1::2], args[-1])
    nested = next((own for own in map(own_type_of, values) if own is not None and own.is_nested), None)
    if nested is not None:
        raise Refused(f"a choice cannot give values of type {nested!r}", nested_hint(nested))
    *taken, last = unify(values, "a choice cannot give both")
    for condition, value in zip(reversed(conditions), reversed(taken), strict=True):
        last = typed(call, [_condition(condition, "when"), value, last], type_of(value))
    return last


def _try(call: Call, given: Args) -> Expr:
    """The call that is tried over its `given` arguments, with null where it would fail.

    Casts to bring its arguments together belong to it; the arguments do not.
    """
    (tried,) = call.args
    assert isinstance(tried, Call)
    found = REGISTRY[tried.fn].rule(tried, given)
    if not isinstance(found, Call) or any(found is arg for arg in given):
        return found
    met = [_tried(call, arg) if not any(arg is own for own in given) else arg for arg in found.args]
    return _tried(call, typed(found, met, type_of(found)))


def _tried(call: Call, found: Expr) -> Expr:
    return typed(call, [found], type_of(found)) if isinstance(found, Call) and fallible(found) else found


def _any(call: Call, args: Sequence[Expr]) -> bool:
    return any(arg.nullable for arg in args)


def _every(call: Call, args: Sequence[Expr]) -> bool:
    return all(arg.nullable for arg in args)


def _in_a_branch(call: Call, args: Sequence[Expr]) -> bool:
    return any(arg.nullable for arg in args[1:])  # a condition that is null is one that does not hold


def _cannot_fail(call: Call) -> bool:
    return not any(map(can_fail, call.args))


def _of_nested(call: Call) -> bool:
    return type_of(call.args[0]).is_nested


def _tries_host(call: Call) -> bool:
    return isinstance(call.args[0], Call) and is_host(call.args[0])


declare(
    Function("and", _logic, 2, Nulls.OWN, nullable=_any, fold=lambda call: operator.and_,
             show="{0} & {1}", duckdb="({0} AND {1})", spark="__and__", spark_if=_cannot_fail,
             numpy=("logical_and", "bitwise_and")),
    Function("or", _logic, 2, Nulls.OWN, nullable=_any, fold=lambda call: operator.or_,
             show="{0} | {1}", duckdb="({0} OR {1})", spark="__or__", spark_if=_cannot_fail,
             numpy=("logical_or", "bitwise_or")),
    Function("not", _logic, fold=lambda call: operator.not_, show="~{0}", duckdb="(NOT {0})", spark="__invert__",
             numpy=("logical_not", "invert")),
    Function("is_null", _null_test, nulls=Nulls.NEVER, host=_of_nested, arrow="is_null", canonical=True,
             show="{0}.is_null()", duckdb="({0} IS NULL)", spark="isNull"),
    Function("is_not_null", _null_test, nulls=Nulls.NEVER, host=_of_nested, arrow="is_not_null", canonical=True,
             show="{0}.is_not_null()", duckdb="({0} IS NOT NULL)", spark="isNotNull"),
    Function("fill_null", _fill_null, 2, Nulls.OWN, nullable=_every, show="{0}.fill_null({1})",
             sql=("IFNULL", "NVL"), duckdb="coalesce({0}, {1})"),
    Function("coalesce", _coalesce, ANY, Nulls.OWN, nullable=_every, spelled_out=True, show="coalesce({args})",
             sql=("COALESCE",)),
    Function("if_else", _choose, 3, Nulls.OWN, nullable=_in_a_branch, sql=("IF",),
             duckdb="CASE WHEN {0} THEN {1} ELSE {2} END", spark="if"),
    # null where its argument, a call, fails itself
    Function("try", _try, nulls=Nulls.OWN, nullable=lambda call, args: True, host=_tries_host),
)
