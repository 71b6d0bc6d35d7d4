"""Common types, conversions and constants of typed parts. Python's numbers: bool < int < float."""

from __future__ import annotations

from collections.abc import Iterable

from scalein.dtypes import BOOL, F64, I64, STR, DType
from scalein.ir.exprs import Lit
from scalein.ir.udf import Apply, Part

NUMBERS = (BOOL, I64, F64)  # each can represent those before it
NAMES = {BOOL: "bool", I64: "int", F64: "float", STR: "str", None: "None"}
_INT_RANGE = I64.int_range()


def common(dtypes: Iterable[DType | None]) -> DType | None:
    """The type that can represent values of all these (None is the type of null); None if there is none.

    >>> common([I64, None, F64]), common([STR, I64])
    (f64, None)
    """
    found = {dtype for dtype in dtypes if dtype is not None}
    if len(found) == 1:
        return found.pop()
    return max(found, key=NUMBERS.index) if found and STR not in found else None


def convert(part: Part, dtype: DType) -> Part:
    """The part as a wider number, or a null with a type; null stays null."""
    if part.dtype == dtype:
        return part
    if isinstance(part, Lit):
        return constant(part.value, dtype)
    return Apply("to_float" if dtype == F64 else "to_int", (part,), dtype, part.nullable)


def constant(value: object, dtype: DType) -> Lit:
    """A constant of a type that can hold it."""
    if value is None or dtype in (STR, BOOL):
        return Lit(value, dtype)
    assert isinstance(value, int | float)
    return Lit(float(value) if dtype == F64 else int(value), dtype)


def plain_constant(value: object) -> Lit | None:
    """A Python constant in its own type; None for values that a udf cannot have."""
    if value is None:
        return Lit(None)
    if type(value) is int and not _INT_RANGE[0] <= value <= _INT_RANGE[1]:
        return None
    if isinstance(value, str) and not _is_utf8(value):
        return None
    dtype = {bool: BOOL, int: I64, float: F64, str: STR}.get(type(value))
    return None if dtype is None else Lit(value, dtype)


def _is_utf8(text: str) -> bool:
    """Whether Arrow can represent the text: not with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def truth(part: Part) -> Part:
    """Whether the part is true in Python."""
    if isinstance(part, Lit):
        return Lit(bool(part.value), BOOL)
    return part if part.dtype == BOOL and not part.nullable else Apply("truth", (part,), BOOL)
