"""Arithmetic with overflow found in vector code.

Addition and subtraction compare signs. Narrow products are formed in twice the width. The product
of two 64-bit integers is checked without a wide multiplication, which no vector unit has: the
wrapped product differs from the true one by a multiple of 2^64, so comparing it, as a float, with
the product of the floats distinguishes the two cases: below 2^63 apart there was no overflow, else
at least 2^64 minus rounding (below 2^12 where it matters). Exact, three conversions a row, and no
min/max pass or second loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from scalein.dtypes import DType
from scalein.llvm_backend.fn import F64, Fn, const
from scalein.llvm_backend.functions import decimals
from scalein.llvm_backend.functions.registry import CallSite, lowers
from scalein.llvm_backend.values import Value

Fail = decimals.Fail


@lowers("add", plain=True)
def _add(c: CallSite) -> ir.Value:
    return add(c.f, c.args, c.dtype, c.fail)


def add(f: Fn, args: Sequence[ir.Value], dtype: DType, fail: Fail) -> ir.Value:
    """The sum of two values of one type."""
    if dtype.is_float:
        return f.b.fadd(*args)
    if dtype.is_decimal:
        return decimals.add(f, args, dtype, fail)
    a, b = args
    total = f.b.add(a, b)
    if dtype.is_signed:  # overflow: both operands have the sign that the sum lacks
        wrong = f.b.and_(f.b.xor(a, total), f.b.xor(b, total))
        fail("integer overflow", f.b.icmp_signed("<", wrong, const(0, a.type)))
    else:
        fail("integer overflow", f.b.icmp_unsigned("<", total, a))
    return total


@lowers("sub", plain=True)
def _sub(c: CallSite) -> ir.Value:
    if c.dtype.is_float:
        return c.f.b.fsub(*c.args)
    if c.dtype.is_decimal:
        return decimals.sub(c.f, c.args, c.dtype, c.fail)
    return _difference(c.f, c.args[0], c.args[1], c.dtype, c.fail)


def _difference(f: Fn, a: ir.Value, b: ir.Value, dtype: DType, fail: Fail) -> ir.Value:
    rest = f.b.sub(a, b)
    if dtype.is_signed:
        wrong = f.b.and_(f.b.xor(a, b), f.b.xor(a, rest))
        fail("integer overflow", f.b.icmp_signed("<", wrong, const(0, a.type)))
    else:
        fail("integer overflow", f.b.icmp_unsigned("<", a, b))
    return rest


@lowers("mul", plain=True)
def _mul(c: CallSite) -> ir.Value:
    if c.dtype.is_float:
        return c.f.b.fmul(*c.args)
    if c.dtype.is_decimal:
        return decimals.mul(c.f, c.args, c.types, c.dtype, c.fail)
    return _product(c.f, c.args[0], c.args[1], c.dtype, c.fail)


def _product(f: Fn, a: ir.Value, b: ir.Value, dtype: DType, fail: Fail) -> ir.Value:
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


@lowers("neg", plain=True)
def _neg(c: CallSite) -> ir.Value:
    (value,) = c.args
    if c.dtype.is_float:
        return c.f.b.fneg(value)
    if c.dtype.is_decimal:
        return decimals.neg(c.f, value, c.dtype)
    return _difference(c.f, const(0, value.type), value, c.dtype, c.fail)


@lowers("abs")
def _abs(c: CallSite) -> ir.Value:
    f, (value,) = c.f, c.args
    if c.dtype.is_float:
        return _intrinsic(f, "fabs", c.args)
    if c.dtype.is_decimal:
        return decimals.magnitude(f, value, c.dtype)
    if not c.dtype.is_signed:
        return value
    negated = _difference(f, const(0, value.type), value, c.dtype, c.fail)
    return f.b.select(f.b.icmp_signed("<", value, const(0, value.type)), negated, value)


@lowers("div", plain=True)
def _div(c: CallSite) -> ir.Value:
    """IEEE division, total: x/0 is inf or nan."""
    return c.f.b.fdiv(*c.args)


@lowers("try_divide")
def _try_divide(c: CallSite) -> Value:
    data = c.f.b.fdiv(*c.args)
    return Value(data, c.f.b.fcmp_unordered("!=", c.args[1], const(0.0, c.args[1].type)))


@lowers("floordiv")
def _floordiv(c: CallSite) -> ir.Value:
    if c.dtype.is_float:
        return _intrinsic(c.f, "floor", [c.f.b.fdiv(*c.args)])
    return floor_division(c.f, c.args[0], c.args[1], c.dtype, c.fail)


@lowers("mod")
def _mod(c: CallSite) -> ir.Value:
    f, (a, b) = c.f, c.args
    if c.dtype.is_float:
        whole = _intrinsic(f, "floor", [f.b.fdiv(a, b)])
        return f.b.fsub(a, f.b.fmul(whole, b))
    return modulo(f, a, b, c.dtype, c.fail)


def floor_division(f: Fn, a: ir.Value, b: ir.Value, dtype: DType, fail: Fail) -> ir.Value:
    """a // b of integers."""
    safe, edge = _guarded(f, a, b, dtype, fail)
    if edge is None:
        return f.b.udiv(a, safe)
    fail("integer overflow", edge)
    safe = f.b.select(edge, const(1, a.type), safe)
    _, off = _remainder(f, a, safe)
    return f.b.select(off, f.b.sub(f.b.sdiv(a, safe), const(1, a.type)), f.b.sdiv(a, safe))


def modulo(f: Fn, a: ir.Value, b: ir.Value, dtype: DType, fail: Fail) -> ir.Value:
    """a % b of integers: with the divisor's sign, as in Python."""
    safe, edge = _guarded(f, a, b, dtype, fail)
    if edge is None:
        return f.b.urem(a, safe)
    safe = f.b.select(edge, const(1, a.type), safe)
    remainder, off = _remainder(f, a, safe)
    return f.b.select(off, f.b.add(remainder, safe), remainder)


def _guarded(f: Fn, a: ir.Value, b: ir.Value, dtype: DType, fail: Fail) -> tuple[ir.Value, ir.Value | None]:
    """A divisor that is not zero, so that dead rows do not trap; of signed integers also where MIN is divided by -1."""
    by_zero = f.b.icmp_unsigned("==", b, const(0, a.type))
    if not (isinstance(b, ir.Constant) and b.constant != 0):
        fail("division by zero", by_zero)
        b = f.b.select(by_zero, const(1, a.type), b)
    if not dtype.is_signed:
        return b, None
    least = const(dtype.int_range()[0], a.type)
    minus = f.b.icmp_unsigned("==", b, const(-1, a.type))
    return b, f.b.and_(f.b.icmp_unsigned("==", a, least), minus)


def _remainder(f: Fn, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The machine's remainder, and where it lacks the divisor's sign."""
    zero = const(0, a.type)
    remainder = f.b.srem(a, b)
    off = f.b.and_(f.b.icmp_unsigned("!=", remainder, zero), f.b.icmp_signed("<", f.b.xor(remainder, b), zero))
    return remainder, off


def floor_divide(f: Fn, a: ir.Value, by: int) -> ir.Value:
    """a // by for a positive constant: multiplication by a magic number, no trap."""
    if by == 1:
        return a
    divisor = const(by, a.type)
    quotient, remainder = f.b.sdiv(a, divisor), f.b.srem(a, divisor)
    below = f.b.icmp_signed("<", remainder, const(0, a.type))
    return f.b.select(below, f.b.sub(quotient, const(1, a.type)), quotient)


def _suffix(value: ir.Value) -> str:
    return "f64" if value.type == F64 else "f32"


def _intrinsic(f: Fn, name: str, args: Sequence[ir.Value]) -> ir.Value:
    return f.call(f"llvm.{name}.{_suffix(args[0])}", args[0].type, args)


@lowers("floor", "ceil", "sqrt", "exp", "log", "pow")
def _math(c: CallSite) -> ir.Value:
    return _intrinsic(c.f, c.call.fn, c.args)


@lowers("round")
def _round(c: CallSite) -> ir.Value:
    digits = int(str(c.params[0]))
    if c.dtype.is_decimal:
        return decimals.round_(c.f, c.args[0], c.dtype, digits, c.fail)
    return _rounded(c.f, c.args[0], digits) if c.dtype.is_float else c.args[0]


def _rounded(f: Fn, value: ir.Value, digits: int) -> ir.Value:
    """Half away from zero; what overflows when it is scaled has no such digits and stays as it is."""
    suffix, scale = _suffix(value), const(10.0 ** abs(digits), value.type)
    scaled = f.b.fmul(value, scale) if digits >= 0 else f.b.fdiv(value, scale)
    whole = f.call(f"llvm.round.{suffix}", value.type, [scaled])
    result = f.b.fdiv(whole, scale) if digits >= 0 else f.b.fmul(whole, scale)
    size = f.call(f"llvm.fabs.{suffix}", value.type, [scaled])
    return f.b.select(f.b.fcmp_unordered("==", size, const(float("inf"), value.type)), value, result)
