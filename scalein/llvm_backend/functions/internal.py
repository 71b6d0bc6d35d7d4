"""Functions that only passes make."""

from __future__ import annotations

from llvmlite import ir

from scalein.dtypes import DType
from scalein.llvm_backend.fn import Fn, const
from scalein.llvm_backend.functions.registry import CallSite, lowers


@lowers("divisible")
def _divisible(c: CallSite) -> ir.Value:
    return divisible(c.f, c.args[0], c.types[0], int(str(c.params[0])))


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
