"""Common types, conversions and constants of typed parts. Python's numbers: bool < int < float."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scalein.dtypes import BOOL, F64, I64, STR, DType, Kind
from scalein.ir.exprs import Lit
from scalein.ir.udf import NOTHING, TEXTS, Apply, Choose, Item, Part, is_tuple, items_of, tuple_of

NUMBERS = (BOOL, I64, F64)  # each can represent those before it


class _Names(dict[DType | None, str]):
    """What users call a type; times have a unit, which is not shown, and tuples have items."""

    def __missing__(self, dtype: DType | None) -> str:
        assert dtype is not None
        if not is_tuple(dtype):
            return {Kind.TS: "si.Timestamp", Kind.DUR: "si.Duration"}.get(dtype.kind, repr(dtype))
        items = [f"{self[item]} | None" if nullable else self[item] for item, nullable in items_of(dtype)]
        return f"tuple[{', '.join(items)}]"


def is_settled(dtype: DType | None) -> bool:
    """Whether the types of all of a tuple's items are known."""
    if dtype is None or not is_tuple(dtype):
        return dtype != NOTHING
    return all(is_settled(item) for item, _ in items_of(dtype))


NAMES = _Names({NOTHING: "None", BOOL: "bool", I64: "int", F64: "float", STR: "str", TEXTS: "list[str]", None: "None"})
_INT_RANGE = I64.int_range()


def common(dtypes: Iterable[DType | None]) -> DType | None:
    """The type that can represent values of all these (None is the type of null); None if there is none.

    >>> common([I64, None, F64]), common([STR, I64])
    (f64, None)
    """
    found = {dtype for dtype in dtypes if dtype is not None}
    if len(found) == 1:
        return found.pop()
    if found and all(map(is_tuple, found)):
        return _common_tuple([items_of(dtype) for dtype in found])
    return max(found, key=NUMBERS.index) if found and found.issubset(NUMBERS) else None


def _common_tuple(tuples: list[list[Item]]) -> DType | None:
    if len({len(items) for items in tuples}) > 1:
        return None
    items: list[Item] = []
    for each in zip(*tuples, strict=True):
        found = [item for item, _ in each if item != NOTHING]
        dtype = common(found) if found else NOTHING
        if dtype is None:
            return None
        items.append((dtype, any(nullable for _, nullable in each)))
    return tuple_of(items)


def convert(part: Part, dtype: DType) -> Part:
    """The part as a wider number, or a null with a type; null stays null."""
    if part.dtype == dtype:
        return part
    if isinstance(part, Lit):
        return constant(part.value, dtype)
    if is_tuple(dtype):
        if isinstance(part, Apply) and part.fn == "tuple":
            items = [convert(item, typ) for item, (typ, _) in zip(part.args, items_of(dtype), strict=True)]
            return replace(part, args=tuple(items), dtype=dtype)
        if isinstance(part, Choose):
            return replace(part, then=convert(part.then, dtype), otherwise=convert(part.otherwise, dtype), dtype=dtype)
        return Apply("to_tuple", (part,), dtype, part.nullable)
    return Apply("to_float" if dtype == F64 else "to_int", (part,), dtype, part.nullable)


def constant(value: object, dtype: DType) -> Lit:
    """A constant of a type that can hold it."""
    if value is None or dtype not in (I64, F64):
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
    if part.dtype is not None and part.dtype.kind is Kind.TS:  # every time is true
        return Apply("not", (Apply("is_none", (part,), BOOL),), BOOL) if part.nullable else Lit(True, BOOL)
    return part if part.dtype == BOOL and not part.nullable else Apply("truth", (part,), BOOL)
