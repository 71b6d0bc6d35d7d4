"""Decimals in 128 bits: arithmetic, rounding and casts, without a call into a run-time library.

A type of p digits holds less than 10^p, at most 10^38 < 2^127: twice a value, or a value and half a unit, still
differs from everything that is in range. Division is by powers of ten only: a product with the power's inverse,
from 64-bit halves, of which LLVM makes four multiplications; no CPU divides 128 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from scalein.dtypes import MAX_PRECISION, DType
from scalein.llvm_backend.fn import F32, F64, I1, I64, I128, Fn, const
from scalein.llvm_backend.values import register_type

Fail = Callable[[str, ir.Value], None]

OVERFLOW = "decimal overflow"
DIGITS_IN_64_BITS = 18  # whatever they are
_SHIFT = const(64, I128)


def add(f: Fn, args: Sequence[ir.Value], dtype: DType, fail: Fail) -> ir.Value:
    """The sum of two. Only a type that was cut to 38 digits can be too small for a result."""
    if is_small(dtype):
        return _widened(f, f.b.add(*_narrowed(f, args)))
    return _checked(f, f.b.add(*args), dtype, fail)


def sub(f: Fn, args: Sequence[ir.Value], dtype: DType, fail: Fail) -> ir.Value:
    if is_small(dtype):
        return _widened(f, f.b.sub(*_narrowed(f, args)))
    return _checked(f, f.b.sub(*args), dtype, fail)


def _checked(f: Fn, total: ir.Value, dtype: DType, fail: Fail) -> ir.Value:
    if dtype.precision == MAX_PRECISION:
        fail(OVERFLOW, outside(f, total, MAX_PRECISION))
    return total


def mul(f: Fn, args: Sequence[ir.Value], given: Sequence[DType], dtype: DType, fail: Fail) -> ir.Value:
    return _widened(f, f.b.mul(*_narrowed(f, args))) if is_small(dtype) else _multiply(f, args, given, fail)


def neg(f: Fn, data: ir.Value, dtype: DType) -> ir.Value:
    if is_small(dtype):
        return _widened(f, f.b.sub(const(0), narrowed(f, data)))
    return f.b.sub(const(0, I128), data)


def magnitude(f: Fn, data: ir.Value, dtype: DType) -> ir.Value:
    """The absolute value."""
    if is_small(dtype):
        return _widened(f, _magnitude(f, narrowed(f, data))[0])
    return _magnitude(f, data)[0]


def _narrowed(f: Fn, args: Sequence[ir.Value]) -> list[ir.Value]:
    """Few digits are computed in 64 bits, and in vector code."""
    return [narrowed(f, arg) for arg in args]


def _widened(f: Fn, data: ir.Value) -> ir.Value:
    return f.b.sext(data, I128)


def is_small(dtype: DType) -> bool:
    """Whether 64 bits hold every value of a decimal type."""
    return dtype.is_decimal and dtype.precision <= DIGITS_IN_64_BITS


def narrowed(f: Fn, data: ir.Value) -> ir.Value:
    """The low half, of a decimal of few digits all there is."""
    return f.b.trunc(data, I64)


def outside(f: Fn, data: ir.Value, precision: int) -> ir.Value:
    """Whether digits are more than `precision`."""
    return _beyond(f, data, 10**precision - 1)


def _beyond(f: Fn, data: ir.Value, most: int) -> ir.Value:
    return f.b.icmp_unsigned(">", f.b.add(data, const(most, data.type)), const(2 * most, data.type))


def _magnitude(f: Fn, data: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The absolute value, and whether the value is negative."""
    negative = f.b.icmp_signed("<", data, const(0, data.type))
    return f.b.select(negative, f.b.sub(const(0, data.type), data), data), negative


def _signed(f: Fn, size: ir.Value, negative: ir.Value) -> ir.Value:
    return f.b.select(negative, f.b.sub(const(0, size.type), size), size)


def _multiply(f: Fn, args: Sequence[ir.Value], given: Sequence[DType], fail: Fail) -> ir.Value:
    if all(dtype.precision <= DIGITS_IN_64_BITS for dtype in given):
        # One multiplication, once LLVM knows that halves are enough.
        return f.b.mul(*(f.b.sext(narrowed(f, arg), I128) for arg in args))
    if sum(dtype.precision for dtype in given) <= MAX_PRECISION:
        return f.b.mul(*args)
    (a, negative), (b, other) = (_magnitude(f, arg) for arg in args)
    high, low = _product(f, a, b)
    too_large = f.b.icmp_unsigned(">=", low, const(10**MAX_PRECISION, I128))
    fail(OVERFLOW, f.b.or_(f.b.icmp_unsigned("!=", high, const(0, I128)), too_large))
    return _signed(f, low, f.b.xor(negative, other))


def _product(f: Fn, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The high and low 128 bits of an unsigned product, from 64-bit halves."""
    build = f.b
    low_mask = const((1 << 64) - 1, I128)

    def halves(x: ir.Value) -> tuple[ir.Value, ir.Value]:
        return build.and_(x, low_mask), build.lshr(x, _SHIFT)

    (a0, a1), (b0, b1) = halves(a), halves(b)
    least, left, right, most = build.mul(a0, b0), build.mul(a0, b1), build.mul(a1, b0), build.mul(a1, b1)
    middle = build.add(build.lshr(least, _SHIFT), build.add(build.and_(left, low_mask), build.and_(right, low_mask)))
    high = build.add(build.add(most, build.lshr(middle, _SHIFT)),
                     build.add(build.lshr(left, _SHIFT), build.lshr(right, _SHIFT)))
    return high, build.or_(build.shl(middle, _SHIFT), build.and_(least, low_mask))


def _over_ten(f: Fn, size: ir.Value, power: int, digits: int) -> ir.Value:
    """size // 10^power of an unsigned number below 2^127; `digits` is how many it may have, with what was added."""
    by = 10**power
    if power == 0:
        return size
    if digits <= DIGITS_IN_64_BITS:
        return f.b.zext(f.b.udiv(f.b.trunc(size, I64), const(by)), I128)
    # n // d = n * ceil(2^(127 + s) / d) >> (127 + s) for n < 2^127, where 2^s >= d (Granlund and Montgomery).
    bits = (by - 1).bit_length()
    inverse = -(-(1 << (127 + bits)) // by)
    assert inverse < 1 << 128
    high, _ = _product(f, size, const(inverse, I128))
    return f.b.lshr(high, const(bits - 1, I128))


def _rounded_off(f: Fn, size: ir.Value, power: int, digits: int) -> ir.Value:
    """size / 10^power, halves up: of absolute values half away from zero."""
    if power > min(digits, MAX_PRECISION):
        return const(0, I128)
    return _over_ten(f, f.b.add(size, const(10**power // 2, I128)), power, digits + 1)


def round_(f: Fn, data: ir.Value, dtype: DType, digits: int, fail: Fail) -> ir.Value:
    """Half away from zero at `digits` decimals; a carry may add a digit."""
    power = dtype.scale - digits
    size, negative = _magnitude(f, data)
    whole = _rounded_off(f, size, power, dtype.precision)
    found = _signed(f, f.b.mul(whole, const(10 ** min(power, MAX_PRECISION), I128)), negative)
    fail(OVERFLOW, outside(f, found, dtype.precision))
    return found


# --- casts


def cast(f: Fn, data: ir.Value, have: DType, want: DType, fail: Fail) -> ir.Value:
    """From and to a decimal: integers, floats and other decimals."""
    if want.is_float:
        real = over_power(f, to_float(f, data), have.scale)
        return real if want.bits == 64 else f.b.fptrunc(real, F32)
    if have.is_float:
        return _from_float(f, data, want, fail)
    if want.is_decimal:
        wide = data if have.is_decimal else (f.b.sext if have.is_signed else f.b.zext)(data, I128)
        digits = have.precision if have.is_decimal else len(str(have.int_range()[1]))
        return _rescale(f, wide, have.scale, digits, want, fail)
    return _to_int(f, data, have, want, fail)


def _rescale(f: Fn, data: ir.Value, scale: int, digits: int, want: DType, fail: Fail) -> ir.Value:
    power = want.scale - scale
    if power < 0:
        size, negative = _magnitude(f, data)
        found = _signed(f, _rounded_off(f, size, -power, digits), negative)
        if digits + power + 1 > want.precision:
            fail(OVERFLOW, outside(f, found, want.precision))
        return found
    if is_small(want) and digits + power <= want.precision:
        return f.b.sext(f.b.mul(narrowed(f, data), const(10**power)), I128)
    if digits + power > want.precision:
        fail(OVERFLOW, _beyond(f, data, (10**want.precision - 1) // 10**power))
    return f.b.mul(data, const(10**power, I128)) if power <= MAX_PRECISION else const(0, I128)


def _to_int(f: Fn, data: ir.Value, have: DType, want: DType, fail: Fail) -> ir.Value:
    """Towards zero."""
    low, high = want.int_range()
    if have.scale >= 0:
        size, negative = _magnitude(f, data)
        whole = _signed(f, _over_ten(f, size, min(have.scale, MAX_PRECISION), have.precision), negative)
    else:
        by = 10**-have.scale
        low, high = -(-low // by), high // by
        whole = data
    fail("impossible cast", f.b.or_(f.b.icmp_signed("<", whole, const(low, I128)),
                                    f.b.icmp_signed(">", whole, const(high, I128))))
    found = f.b.trunc(whole, register_type(want))
    return found if have.scale >= 0 else f.b.mul(found, const(10**-have.scale, found.type))


def to_float(f: Fn, data: ir.Value) -> ir.Value:
    """The nearest float of an integer of 128 or 192 bits.

    The highest 64 bits, with a bit for whatever is below them, round as the whole would.
    """
    b, typ = f.b, data.type
    size, negative = _magnitude(f, data)
    real_scale: ir.Value = const(1.0, F64)
    if typ.width > 128:
        large = b.icmp_unsigned("!=", b.lshr(size, const(127, typ)), const(0, typ))
        lost = b.icmp_unsigned("!=", b.and_(size, const((1 << 64) - 1, typ)), const(0, typ))
        upper = b.or_(b.trunc(b.lshr(size, const(64, typ)), I128), b.zext(lost, I128))
        size = b.select(large, upper, b.trunc(size, I128))
        real_scale = b.select(large, const(2.0**64, F64), real_scale)
    zeros = f.call("llvm.ctlz.i128", I128, [size, const(0, I1)])
    few = b.icmp_unsigned(">=", zeros, _SHIFT)
    shift = b.select(few, const(0, I128), b.sub(_SHIFT, zeros))
    top = b.trunc(b.lshr(size, shift), I64)
    below = b.and_(size, b.sub(b.shl(const(1, I128), shift), const(1, I128)))
    top = b.or_(top, b.zext(b.icmp_unsigned("!=", below, const(0, I128)), I64))
    power = b.bitcast(b.shl(b.add(b.trunc(shift, I64), const(1023)), const(52)), F64)
    real = b.fmul(b.fmul(b.uitofp(top, F64), power), real_scale)
    return b.select(negative, b.fneg(real), real)


def over_power(f: Fn, real: ir.Value, scale: int) -> ir.Value:
    """real / 10^scale."""
    if scale == 0:
        return real
    return f.b.fdiv(real, const(10.0**scale, F64)) if scale > 0 else f.b.fmul(real, const(10.0**-scale, F64))


def _from_float(f: Fn, data: ir.Value, want: DType, fail: Fail) -> ir.Value:
    b = f.b
    real = b.fpext(data, F64) if data.type == F32 else data
    scale = const(10.0 ** abs(want.scale), F64)
    scaled = b.fmul(real, scale) if want.scale >= 0 else b.fdiv(real, scale)
    whole = f.call("llvm.round.f64", F64, [scaled])
    inside = b.fcmp_ordered("<", f.call("llvm.fabs.f64", F64, [whole]), const(2.0**127, F64))
    bits = b.bitcast(b.select(inside, whole, const(0.0, F64)), I64)
    exponent = b.sub(b.and_(b.lshr(bits, const(52)), const(0x7FF)), const(1075))
    mantissa = b.zext(b.or_(b.and_(bits, const((1 << 52) - 1)), const(1 << 52)), I128)
    up = b.zext(f.max(exponent, const(0)), I128)
    down = b.zext(f.min(f.max(b.sub(const(0), exponent), const(0)), const(63)), I128)
    found = _signed(f, b.lshr(b.shl(mantissa, up), down), b.icmp_signed("<", bits, const(0)))
    fail("impossible cast", b.or_(b.not_(inside), outside(f, found, want.precision)))
    return found
