"""Comparison of every type: NaN equals NaN and is the greatest, -0.0 equals 0.0, strings by bytes."""

from __future__ import annotations

import math

from llvmlite import ir

from scalein.dtypes import DType
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import Fn
from scalein.llvm_backend.functions import strings
from scalein.llvm_backend.functions.decimals import is_small, narrowed
from scalein.llvm_backend.functions.logic import choose
from scalein.llvm_backend.functions.registry import CallSite, lowers
from scalein.llvm_backend.values import Str, Value

_SIGN = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@lowers("eq", "ne", "lt", "le", "gt", "ge", plain=True)
def _compare(c: CallSite) -> ir.Value:
    return compare(c.code, c.call.fn, c.args[0], c.args[1], c.types[0], c.literals)


@lowers("is_nan")
def _is_nan(c: CallSite) -> ir.Value:
    return c.f.b.fcmp_unordered("uno", c.args[0], c.args[0])


@lowers("row_max", "row_min")
def _horizontal(c: CallSite) -> Value:
    """Of equal ones the first."""
    f, fn = c.f, "gt" if c.call.fn == "row_max" else "lt"
    best = c.values[0]
    for each in c.values[1:]:
        is_better = compare(c.code, fn, each.data, best.data, c.dtype, [None, None])
        if best.valid is not None:
            is_better = f.b.or_(is_better, f.b.not_(best.valid))
        taken = f.all_of(is_better, each.valid)
        is_known = None if best.valid is None or each.valid is None else f.b.or_(best.valid, each.valid)
        best = Value(choose(c.code, taken, Value(each.data), Value(best.data)).data, is_known)
    return best


@lowers("clip")
def _clip(c: CallSite) -> Value:
    value, *bounds = c.values
    found = value.data
    for fn, bound, literal in zip(("lt", "gt"), bounds, c.literals[1:], strict=True):
        is_beyond = compare(c.code, fn, found, bound.data, c.dtype, [None, literal])
        taken = c.f.all_of(is_beyond, bound.valid)
        found = choose(c.code, taken, Value(bound.data), Value(found)).data
    return Value(found, value.valid)


def compare(code: Code, fn: str, a: ir.Value | Str, b: ir.Value | Str, dtype: DType,
            literals: list[object]) -> ir.Value:
    if isinstance(a, Str) and isinstance(b, Str):
        return strings.compare(code, fn, a, b, literals)
    if is_small(dtype):
        a, b = narrowed(code.f, a), narrowed(code.f, b)
    if dtype.is_float:
        return compare_floats(code.f, fn, a, b, *(_not_nan(x) for x in literals))
    if dtype.is_signed:
        return code.f.b.icmp_signed(_SIGN[fn], a, b)
    return code.f.b.icmp_unsigned(_SIGN[fn], a, b)


def _not_nan(literal: object) -> bool:
    return isinstance(literal, (int, float)) and not math.isnan(literal)


def compare_floats(f: Fn, fn: str, a: ir.Value, b: ir.Value, a_known: bool = False, b_known: bool = False) -> ir.Value:
    """`a_known`: a is known not to be NaN, which saves the tests for it."""
    if fn in ("ne", "ge", "le"):
        inverse = {"ne": "eq", "ge": "lt", "le": "gt"}[fn]
        return f.b.not_(compare_floats(f, inverse, a, b, a_known, b_known))
    if fn == "gt":
        return compare_floats(f, "lt", b, a, b_known, a_known)
    if fn == "eq":
        same = f.b.fcmp_ordered("==", a, b)
        if a_known or b_known:
            return same
        return f.b.or_(same, f.b.and_(f.b.fcmp_unordered("uno", a, a), f.b.fcmp_unordered("uno", b, b)))
    if b_known:  # a < b, b a number: false for a = NaN
        return f.b.fcmp_ordered("<", a, b)
    if a_known:  # a < b, a a number: true for b = NaN
        return f.b.fcmp_unordered("<", a, b)
    return f.b.and_(f.b.fcmp_unordered("<", a, b), f.b.fcmp_ordered("ord", a, a))
