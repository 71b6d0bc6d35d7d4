"""argsort: a stable order of rows by any columns, against Python's own sort."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from scalein.exec.sort import argsort
from tests.oracle.values import from_arrow, order_key

RNG = np.random.default_rng(5)
COUNT = 4000
FEW = RNG.integers(-3, 3, COUNT)
WIDE = RNG.integers(-(2**63), 2**63 - 1, COUNT)
TIED = np.where(RNG.random(COUNT) < 0.5, WIDE >> 20 << 20, (WIDE >> 20 << 20) + RNG.integers(0, 4, COUNT))
WORDS = ["", "a", "a\0", "a\0\0", "ab", "abcdefg", "abcdefgh", "abcdefgh\0", "abcdefghi", "abcdefghij", "Ünï", "日本語",
         "\x7f", "x" * 40, "x" * 39 + "y"]  # fmt: skip
TEXT = [WORDS[k] for k in RNG.integers(0, len(WORDS), COUNT)]
COLUMNS = {
    "few": pa.array(FEW),
    "wide": pa.array(WIDE),
    "pairs in their low bits": pa.array(np.repeat(TIED[: COUNT // 2], 2) ^ RNG.integers(0, 2, COUNT)),
    "unsigned": pa.array(WIDE.view(np.uint64)),
    "ends": pa.array([[2**63 - 1, -(2**63), 0][k % 3] for k in range(COUNT)]),
    "constant": pa.array([7] * COUNT, pa.int8()),
    "floats": pa.array(np.where(FEW == 0, np.nan, RNG.normal(size=COUNT))),
    "float32": pa.array(RNG.choice(np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.5], np.float32), COUNT)),
    "bools": pa.array(FEW > 0),
    "times": pa.array(WIDE, pa.timestamp("us")),
    "days": pa.array(FEW.astype(np.int32), pa.date32()),
    "text": pa.array(TEXT),
    "large text": pa.array(TEXT, pa.large_string()),
    "numbers as text": pa.array([str(k) for k in RNG.integers(0, 10**12, COUNT)]),
    "bytes": pa.array([bytes(RNG.integers(0, 3, k % 12, np.uint8)) for k in range(COUNT)], pa.binary()),
    "decimals": pa.array(FEW).cast(pa.decimal128(30, 3)),
}


def _key(value: object) -> object:
    return value if isinstance(value, bytes) else order_key(value)


def _expected(keys: list[tuple[pa.Array, bool]], nulls_last: bool) -> list[int]:
    rows = list(range(len(keys[0][0])))
    for column, descending in reversed(keys):
        values = from_arrow(column)
        known = sorted((i for i in rows if values[i] is not None), key=lambda i: _key(values[i]), reverse=descending)
        nulls = [i for i in rows if values[i] is None]
        rows = known + nulls if nulls_last else nulls + known
    return rows


def _with_nulls(column: pa.Array, share: float) -> pa.Array:
    return pc.if_else(pa.array(RNG.random(len(column)) < share), pa.scalar(None, column.type), column)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("descending", [False, True])
def test_one_column(name: str, descending: bool) -> None:
    for column in (COLUMNS[name], COLUMNS[name].slice(3, 1000), COLUMNS[name].slice(0, 1), COLUMNS[name].slice(0, 0),
                   _with_nulls(COLUMNS[name], 0.3).slice(5), _with_nulls(COLUMNS[name], 1.0)):  # fmt: skip
        for nulls_last in (False, True):
            keys = [(column, descending)]
            assert argsort(keys, nulls_last).tolist() == _expected(keys, nulls_last)


@pytest.mark.parametrize("second", COLUMNS)
@pytest.mark.parametrize("first", ["few", "text", "float32", "decimals"])
def test_two_columns(first: str, second: str) -> None:
    keys = [(_with_nulls(COLUMNS[first], 0.1), True), (COLUMNS[second], False)]
    assert argsort(keys, False).tolist() == _expected(keys, False)
