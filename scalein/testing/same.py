"""The same rows: tables compared by scalein's meaning of same."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pyarrow as pa

Row = tuple[Any, ...]

# What rounding may cost: float32 columns are compared more loosely.
F64_TOLERANCE = 1e-12
F32_TOLERANCE = 1e-5


def assert_same(got: pa.Table, want: pa.Table, *, ordered: bool = False, tolerance: float = 0.0) -> None:
    """Names, types and rows agree, in any order unless `ordered`: NaN equals NaN, -0.0 equals 0.0.

    Floats agree up to rounding; `tolerance` widens that for floats that were summed, relative to values of size 1 and
    above.

    >>> from scalein.testing import table
    >>> assert_same(table("x \\n 1 \\n 2"), table("x \\n 2 \\n 1"))
    """
    assert got.schema.names == want.schema.names, f"names: {got.schema.names} != {want.schema.names}"
    assert got.schema.types == want.schema.types, f"types: {got.schema.types} != {want.schema.types}"
    assert got.num_rows == want.num_rows, f"rows: {got.num_rows} != {want.num_rows}\n{_show(got)}\n{_show(want)}"
    near = [_nearness(type_, tolerance) for type_ in want.schema.types]
    got_rows, want_rows = _rows(got), _rows(want)
    if ordered:
        for number, (mine, theirs) in enumerate(zip(got_rows, want_rows, strict=True)):
            assert _close(mine, theirs, near), f"row {number}: {mine} != {theirs} in {got.schema.names}"
    else:
        _assert_same_bag(got_rows, want_rows, near, got.schema.names)


def _rows(table: pa.Table) -> list[Row]:
    return list(zip(*([_frozen(value) for value in from_arrow(column)] for column in table.columns), strict=True))


def from_arrow(array: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values of an Arrow column: ints for times of every kind and for the digits of a decimal, which Python's own
    types would round or refuse; a dictionary gives what its codes stand for.
    """
    if isinstance(array, pa.ChunkedArray):
        return [value for chunk in array.chunks for value in from_arrow(chunk)]
    if pa.types.is_dictionary(array.type):
        words = from_arrow(array.dictionary)
        return [None if code is None else words[code] for code in array.indices.to_pylist()]
    if pa.types.is_temporal(array.type):
        return array.view(pa.int64() if array.type.bit_width == 64 else pa.int32()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_decimal(array.type):
        return _digits(array)
    if _has_plain_elements(array.type):
        offsets, inner = array.offsets.to_pylist(), from_arrow(array.values)
        return [inner[start:end] if is_valid else None for start, end, is_valid
                in zip(offsets[:-1], offsets[1:], array.is_valid().to_pylist(), strict=True)]
    return array.to_pylist()  # type: ignore[no-any-return]


def _has_plain_elements(arrow: pa.DataType) -> bool:
    """Whether lists of this type hold their elements as columns of that type do: Python has no time so extreme.

    Every other nested value is held as pyarrow gives it.
    """
    is_list = pa.types.is_list(arrow) or pa.types.is_large_list(arrow)
    return bool(is_list and (pa.types.is_temporal(arrow.value_type) or pa.types.is_decimal128(arrow.value_type)))


def _digits(array: pa.Array) -> list[Any]:
    """The digits of decimals, each as one integer. Python's Decimal would round them to its context's precision."""
    width = array.type.bit_width // 8
    data = memoryview(array.buffers()[1] or b"")
    places = range(array.offset * width, (array.offset + len(array)) * width, width)
    return [int.from_bytes(data[at : at + width], "little", signed=True) if is_valid else None
            for at, is_valid in zip(places, array.is_valid().to_pylist(), strict=True)]


def _frozen(value: Any) -> Any:
    """A value that can be hashed; nested ones are compared as a whole."""
    match value:
        case list() | tuple():
            return tuple(map(_frozen, value))
        case dict():
            return tuple((name, _frozen(inner)) for name, inner in value.items())
    return value


def _show(table: pa.Table) -> str:
    return str(table.slice(0, 20).to_pydict())


def _nearness(type_: pa.DataType, tolerance: float) -> tuple[float, float]:
    """Relative and absolute tolerance of a column."""
    if pa.types.is_float32(type_):
        return max(F32_TOLERANCE, tolerance), tolerance
    return max(F64_TOLERANCE, tolerance), tolerance


def _close(mine: Row, theirs: Row, near: list[tuple[float, float]]) -> bool:
    return all(map(_equal, mine, theirs, near))


def _equal(mine: Any, theirs: Any, near: tuple[float, float]) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        if math.isnan(mine) or math.isnan(theirs):
            return math.isnan(mine) and math.isnan(theirs)
        return math.isclose(mine, theirs, rel_tol=near[0], abs_tol=near[1])
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(_equal(a, b, near) for a, b in zip(mine, theirs, strict=True))
    return type(mine) is type(theirs) and bool(mine == theirs)


def _assert_same_bag(got: list[Row], want: list[Row], near: list[tuple[float, float]], names: list[str]) -> None:
    """The rows agree in some order: sorted within equal values of everything that is no float, then pair by pair."""
    mine, theirs = _buckets(got), _buckets(want)
    missing, extra = theirs.keys() - mine.keys(), mine.keys() - theirs.keys()
    assert not missing and not extra, f"{names}\nmissing {list(missing)[:5]}\nextra {list(extra)[:5]}"  # noqa: PT018
    for exact, rows in mine.items():
        others = theirs[exact]
        assert len(rows) == len(others), f"{names}: {len(rows)} rows instead of {len(others)} like {rows[0]}"
        rows.sort(key=_sort_key)
        others.sort(key=_sort_key)
        if not all(_close(a, b, near) for a, b in zip(rows, others, strict=True)):
            _assert_matching(rows, others, near, names)


def _assert_matching(got: list[Row], want: list[Row], near: list[tuple[float, float]], names: list[str]) -> None:
    """Slower: each wanted row takes the first free row close to it, since rounding may have changed the order."""
    free = list(got)
    for row in want:
        found = next((i for i, other in enumerate(free) if _close(other, row, near)), None)
        assert found is not None, f"no row like {row} in {names}; left are {free[:5]}"
        del free[found]


def _buckets(rows: list[Row]) -> dict[Row, list[Row]]:
    buckets: dict[Row, list[Row]] = defaultdict(list)
    for row in rows:
        buckets[tuple(map(_without_floats, row))].append(row)
    return buckets


def _without_floats(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_floats, value))
    return "float" if isinstance(value, float) else value


def _sort_key(row: Row) -> list[tuple[bool, float]]:
    return [(math.isnan(value), 0.0 if math.isnan(value) else value) for value in row if isinstance(value, float)]
