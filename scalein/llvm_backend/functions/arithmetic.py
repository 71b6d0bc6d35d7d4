"""Arithmetic with overflow found in vector code.

Addition and subtraction compare signs. Narrow products are formed in twice the width. The product
of two 64-bit integers is checked without a wide multiplication, which no vector unit has: the
wrapped product differs from the true one by a multiple of 2^64, so comparing it, as a float, with
the product of the floats tells the two cases apart: below 2^63 apart there was no overflow, else
at least 2^64 minus rounding (below 2^12 where it matters). Exact, three conversions a row, and no
min/max pass or second loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from scalein.dtypes import DType
from scalein.llvm_backend.fn import F64, Fn, const
from scalein.llvm_backend.functions import decimals

Fail = decimals.Fail


def lower(f: Fn, fn: str, args: Sequence[ir.Value], given: Sequence[DType], dtype: DType, fail: Fail) -> ir.Value:
    if dtype.is_float:
        return lower_float(f, fn, args)
    if dtype.is_decimal:
        return decimals.lower(f, fn, args, given, dtype, fail)
    match fn:
        case "add":
            return _add(f, args[0], args[1], dtype, fail)
        case "sub":
            return _sub(f, args[0], args[1], dtype, fail)
        case "mul":
            return _mul(f, args[0], args[1], dtype, fail)
        case "neg":
            return _sub(f, const(0, args[0].type), args[0], dtype, fail)
        case "abs":
            if not dtype.is_signed:
                return args[0]
            negated = _sub(f, const(0, args[0].type), args[0], dtype, fail)
            return f.b.select(f.b.icmp_signed("<", args[0], const(0, args[0].type)), negated, args[0])
        case _:
            return _divide(f, fn, args[0], args[1], dtype, fail)


def _add(f: Fn, a: ir.Value, b: ir.Value, dtype: DType, fail: Fail) -> ir.Value:
    total = f.b.add(a, b)
    if dtype.is_signed:  # overflow: both operands have the sign that the sum lacks
        wrong = f.b.and_(f.b.xor(a, total), f.b.xor(b, total))
        fail("integer overflow", f.b.icmp_signed("<", wrong, const(0, a.type)))
    else:
        fail("integer overflow", f.b.icmp_unsigned("<", total, a))
    return total


def _sub(f: Fn, a: ir.Value, b: ir.Value, dtype: DType, fail: Fail) -> ir.Value:
    rest = f.b.sub(a, b)
    if dtype.is_signed:
        wrong = f.b.and_(f.b.xor(a, b), f.b.xor(a, rest))
        fail("integer overflow", f.b.icmp_signed("<", wrong, const(0, a.type)))
    else:
        fail("integer overflow", f.b.icmp_unsigned("<", a, b))
    return rest


def _mul(f: Fn, a: ir.Value, b: ir.Value, dtype: DType, fail: Fail) -> ir.Value:
    width = a.type.width
    if width == 64:
        product = f.b.mul(a, b)
        to_float = f.b.sitofp if dtype.is_signed else f.b.uitofp
        true = f.b.fmul(to_float(a, F64), to_float(b, F64))
        off = f.b.fsub(to_float(product, F64), true)
        off = f.call("llvm.fabs.f64", F64, [off])
        fail("integer overflow", f.b.fcmp_ordered(">", off, const(2.0**63, F64)))
        return product
    wide = ir.IntType(2 * width)
    extend = f.b.sext if dtype.is_signed else f.b.zext
    product = f.b.mul(extend(a, wide), extend(b, wide))
    narrow = f.b.trunc(product, a.type)
    fail("integer overflow", f.b.icmp_unsigned("!=", extend(narrow, wide), product))
    return narrow


def _divide(f: Fn, fn: str, a: ir.Value, b: ir.Value, dtype: DType, fail: Fail) -> ir.Value:
    """Floor division and its remainder; a guarded divisor keeps dead rows from trapping."""
    zero, one = const(0, a.type), const(1, a.type)
    by_zero = f.b.icmp_unsigned("==", b, zero)
    if not (isinstance(b, ir.Constant) and b.constant != 0):
        fail("division by zero", by_zero)
        b = f.b.select(by_zero, one, b)
    if not dtype.is_signed:
        return f.b.udiv(a, b) if fn == "floordiv" else f.b.urem(a, b)
    least = const(dtype.int_range()[0], a.type)
    minus = f.b.icmp_unsigned("==", b, const(-1, a.type))
    edge = f.b.and_(f.b.icmp_unsigned("==", a, least), minus)
    if fn == "floordiv":
        fail("integer overflow", edge)
    safe = f.b.select(edge, one, b)
    remainder = f.b.srem(a, safe)
    # The remainder must have the divisor's sign, as in Python.
    off = f.b.and_(f.b.icmp_unsigned("!=", remainder, zero),
                   f.b.icmp_signed("<", f.b.xor(remainder, safe), zero))
    if fn == "mod":
        return f.b.select(off, f.b.add(remainder, safe), remainder)
    return f.b.select(off, f.b.sub(f.b.sdiv(a, safe), one), f.b.sdiv(a, safe))


def floor_divide(f: Fn, a: ir.Value, by: int) -> ir.Value:
    """a // by for a positive constant: multiplication by a magic number, no trap."""
    if by == 1:
        return a
    divisor = const(by, a.type)
    quotient, remainder = f.b.sdiv(a, divisor), f.b.srem(a, divisor)
    below = f.b.icmp_signed("<", remainder, const(0, a.type))
    return f.b.select(below, f.b.sub(quotient, const(1, a.type)), quotient)


def divisible(f: Fn, a: ir.Value, dtype: DType, by: int) -> ir.Value:
    """a % by == 0 by one multiplication: a multiple of an odd number, times its inverse modulo 2^n, is small.

    LLVM knows the trick, but its vectorizer takes the remainder for expensive before it applies it.
    """
    width, by = a.type.width, abs(by)
    twos = (by & -by).bit_length() - 1
    odd = by >> twos
    whole = const(1, ir.IntType(1))
    if twos:
        whole = f.b.icmp_unsigned("==", f.b.and_(a, const((1 << twos) - 1, a.type)), const(0, a.type))
    if odd == 1:
        return whole
    product = f.b.mul(a, const(pow(odd, -1, 1 << width), a.type))
    if dtype.is_signed:  # quotients run from -reach to reach
        reach = ((1 << (width - 1)) - 1) // odd
        small = f.b.icmp_unsigned("<=", f.b.add(product, const(reach, a.type)), const(2 * reach, a.type))
    else:
        small = f.b.icmp_unsigned("<=", product, const(((1 << width) - 1) // odd, a.type))
    return f.b.and_(whole, small) if twos else small


def _suffix(value: ir.Value) -> str:
    return "f64" if value.type == F64 else "f32"


def lower_float(f: Fn, fn: str, args: Sequence[ir.Value]) -> ir.Value:
    """IEEE arithmetic, total: x/0 is inf or nan."""
    b = f.b
    match fn:
        case "add":
            return b.fadd(*args)
        case "sub":
            return b.fsub(*args)
        case "mul":
            return b.fmul(*args)
        case "div":
            return b.fdiv(*args)
        case "neg":
            return b.fneg(args[0])
        case "abs":
            return f.call(f"llvm.fabs.{_suffix(args[0])}", args[0].type, args)
        case "floordiv":
            return f.call(f"llvm.floor.{_suffix(args[0])}", args[0].type, [b.fdiv(*args)])
        case _:
            whole = f.call(f"llvm.floor.{_suffix(args[0])}", args[0].type, [b.fdiv(*args)])
            return b.fsub(args[0], b.fmul(whole, args[1]))


def lower_math(f: Fn, fn: str, args: Sequence[ir.Value], dtype: DType, params: tuple[object, ...],
               fail: Fail) -> ir.Value:
    if fn == "round":
        if dtype.is_decimal:
            return decimals.round_(f, args[0], dtype, int(str(params[0])), fail)
        if not dtype.is_float:
            return args[0]
        return _round(f, args[0], int(str(params[0])))
    return f.call(f"llvm.{fn}.{_suffix(args[0])}", args[0].type, args)


def _round(f: Fn, value: ir.Value, digits: int) -> ir.Value:
    """Half away from zero; what overflows when it is scaled has no such digits and stays as it is."""
    suffix, scale = _suffix(value), const(10.0 ** abs(digits), value.type)
    scaled = f.b.fmul(value, scale) if digits >= 0 else f.b.fdiv(value, scale)
    whole = f.call(f"llvm.round.{suffix}", value.type, [scaled])
    result = f.b.fdiv(whole, scale) if digits >= 0 else f.b.fmul(whole, scale)
    size = f.call(f"llvm.fabs.{suffix}", value.type, [scaled])
    return f.b.select(f.b.fcmp_unordered("==", size, const(float("inf"), value.type)), value, result)
