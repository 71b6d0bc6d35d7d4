"""is_in: membership in a set of constants.

A few constants are compared one by one, without a branch. More are sorted and searched by bisection: numbers by
the bits of their canonical form, strings by their bytes.
"""

from __future__ import annotations

import struct
from itertools import accumulate

from llvmlite import ir

from scalein.dtypes import DType
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I8, I64, I128, const
from scalein.llvm_backend.functions.compare import compare
from scalein.llvm_backend.functions.registry import CallSite, lowers
from scalein.llvm_backend.functions.strings import as_bytes, equals, order
from scalein.llvm_backend.values import Str, Value, canonical, register_type

MAX_COMPARED = 16


@lowers("is_in")
def _is_in(c: CallSite) -> Value:
    """Whether the value is among the constants, and whether that is known (SQL: a miss beside a null is null)."""
    (value,), (dtype,), (values, has_null) = c.values, c.types, c.params
    assert isinstance(values, tuple)
    if len(values) > MAX_COMPARED:
        data = _searched(c.code, value, dtype, values)
    else:
        data = c.f.any_of(*(_same(c.code, value, dtype, item) for item in values)) or const(0, I1)
    return Value(data, data if has_null else None)


def _same(code: Code, value: Value, dtype: DType, item: object) -> ir.Value:
    if isinstance(value.data, Str):
        return equals(code, value.data, as_bytes(item))
    literal = const(item, register_type(dtype))  # type: ignore[arg-type]
    return compare(code, "eq", value.data, literal, dtype, [None, item])


def _searched(code: Code, value: Value, dtype: DType, values: tuple[object, ...]) -> ir.Value:
    """Binary search for the last constant that is not greater; then one test for equality."""
    f, b = code.f, code.f.b
    if dtype.is_bytes:
        table = _Texts(code, sorted({as_bytes(v) for v in values}))
        count = table.count
    else:
        words = sorted({_word(v, dtype) for v in values})
        count = len(words)
        name = f"members{len(f.module.globals)}"
        word = I128 if dtype.is_decimal else I64
        numbers = f.constant_array(name, ir.ArrayType(word, count), [const(w, word) for w in words])
        plain = canonical(f, Value(value.data), dtype).number
        wanted = plain if plain.type == word else b.zext(plain, word)
    low, size = f.var(I64, const(0)), f.var(I64, const(count))
    with f.forever() as search:
        search.stop_if(b.icmp_signed("<=", size.get(), const(1)))
        half = b.lshr(size.get(), const(1))
        middle = b.add(low.get(), half)
        if dtype.is_bytes:
            not_greater = b.icmp_signed(">=", order(code, value.string, table.at(middle)), const(0))
        else:
            not_greater = b.icmp_unsigned(">=", wanted, f.load(numbers, middle, word))
        low.set(b.select(not_greater, middle, low.get()))
        size.set(b.sub(size.get(), half))
    if dtype.is_bytes:
        return b.icmp_signed("==", order(code, value.string, table.at(low.get())), const(0))
    return b.icmp_unsigned("==", wanted, f.load(numbers, low.get(), word))


def _word(value: object, dtype: DType) -> int:
    """The canonical bits of a constant, as `keys.canonical` makes them of a value."""
    if dtype.is_float:
        number = float(value)  # type: ignore[arg-type]
        number = float("nan") if number != number else number + 0.0
        return int.from_bytes(struct.pack("<f" if dtype.bits == 32 else "<d", number), "little")
    return int(value) & ((1 << max(8, dtype.bits)) - 1)  # type: ignore[call-overload, no-any-return]


class _Texts:
    """Constant strings in order: their bytes consecutively, and where each begins."""

    def __init__(self, code: Code, texts: list[bytes]) -> None:
        self._code, self.count = code, len(texts)
        starts = [0, *accumulate(map(len, texts))]
        name = f"starts{len(code.f.module.globals)}"
        self._starts = code.f.constant_array(name, ir.ArrayType(I64, len(starts)), [const(s) for s in starts])
        self._bytes = code.text(b"".join(texts))

    def at(self, number: ir.Value) -> Str:
        f = self._code.f
        start = f.load(self._starts, number, I64)
        end = f.load(self._starts, f.b.add(number, const(1)), I64)
        return Str(f.at(self._bytes, start, I8), f.b.sub(end, start))
