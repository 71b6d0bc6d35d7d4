"""The hash that `Column.hash()` gives: fixed for ever.

It is the same as Spark's `xxhash64` where Spark has the type, except for decimals of more than 18 digits, of which
Spark hashes as many bytes as a value needs.

It is XXH64 with the seed 42, read as a signed integer, of these bytes, least byte first:

    bool, i8, i16, i32, u8, u16, u32, date, time[s|ms]     4 bytes: the value as an integer of 32 bits
    i64, u64, timestamp, duration, date64, time[us|ns]     8 bytes: the value, in the column's unit
    f32, f64                                               4 and 8 bytes: the bits, with one zero and one NaN
    decimal                                                8 bytes: the unscaled value; 16 for more than 18 digits
    text, binary                                           its bytes, however they are stored
    null                                                   none at all: its hash is the seed

Stored results and other systems depend on it, so none of this may change. The key hash of tables and joins is another
one (`llvm_backend/keys.py`), and free to.
"""

from __future__ import annotations

import math
import struct

from scalein.dtypes import I64, DType, Kind
from scalein.ir.exprs import Call, Expr, type_of
from scalein.ir.functions.registry import Args, Function, Nulls, declare, typed
from scalein.ir.unify import Refused, nested_hint, type_literal

SEED = 42
P1, P2, P3, P4, P5 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                      0x27D4EB2F165667C5)  # fmt: skip
LONG_DECIMAL = 18  # digits that 64 bits always hold

_MASK = (1 << 64) - 1


def hash_value(value: object, dtype: DType) -> int:
    """The hash of a physical value: a signed integer of 64 bits.

    >>> hash_value("Spark", DType(Kind.STR)), hash_value(None, DType(Kind.I64))
    (-4294468057691064905, 42)
    """
    return SEED if value is None else signed(xxh64(hashed_bytes(value, dtype)))


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def hashed_bytes(value: object, dtype: DType) -> bytes:
    """The bytes that stand for a value."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float):
        number = math.nan if math.isnan(value) else value + 0.0
        return struct.pack("<f" if dtype.kind is Kind.F32 else "<d", number)
    assert isinstance(value, int)
    width = hashed_bits(dtype) // 8
    return (int(value) & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def hashed_bits(dtype: DType) -> int:
    """The width in which an integer of this type is hashed."""
    if dtype.kind is Kind.DEC:
        return 128 if dtype.precision > LONG_DECIMAL else 64
    return max(32, dtype.bits)


def xxh64(data: bytes, seed: int = SEED) -> int:
    """XXH64, as its specification has it."""
    left = data
    if len(data) >= 32:
        lanes = [seed + P1 + P2, seed + P2, seed, seed - P1]
        while len(left) >= 32:
            lanes = [_round(lane, word) for lane, word in zip(lanes, struct.unpack("<4Q", left[:32]), strict=True)]
            left = left[32:]
        found = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            found = ((found ^ _round(0, lane)) * P1 + P4) & _MASK
    else:
        found = (seed + P5) & _MASK
    found = (found + len(data)) & _MASK
    while len(left) >= 8:
        found = (_rotated(found ^ _round(0, int.from_bytes(left[:8], "little")), 27) * P1 + P4) & _MASK
        left = left[8:]
    if len(left) >= 4:
        found = (_rotated(found ^ (int.from_bytes(left[:4], "little") * P1 & _MASK), 23) * P2 + P3) & _MASK
        left = left[4:]
    for byte in left:
        found = _rotated(found ^ (byte * P5 & _MASK), 11) * P1 & _MASK
    found = (found ^ found >> 33) * P2 & _MASK
    found = (found ^ found >> 29) * P3 & _MASK
    return found ^ found >> 32


def _round(lane: int, word: int) -> int:
    return _rotated((lane + word * P2) & _MASK, 31) * P1 & _MASK


def _rotated(number: int, by: int) -> int:
    number &= _MASK
    return (number << by | number >> 64 - by) & _MASK


def _hash(call: Call, args: Args) -> Expr:
    arg = type_literal(args[0])
    if type_of(arg).is_nested:
        raise Refused(f"hash does not take {type_of(arg)!r}", nested_hint(type_of(arg)))
    return typed(call, [arg], I64)


declare(Function("hash", _hash, nulls=Nulls.NEVER, canonical=True, show="{0}.hash()", sql=("XXHASH64",)))
