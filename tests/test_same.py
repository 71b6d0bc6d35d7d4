"""assert_same itself: what it takes as equal, and what not."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from tests.same import assert_same

SAME = [
    ([1.0, math.nan], [1.0, math.nan], True),
    ([0.0], [-0.0], True),
    ([0.1 + 0.2], [0.3], True),
    ([1, 2, None], [None, 2, 1], False),
    ([math.nan, 1.0], [1.0, math.nan], False),
]
DIFFERENT = [
    ([1, 2], [2, 1], True),
    ([1, 1, 2], [1, 2, 2], False),
    ([1.0], [1.001], False),
    ([None], [1], True),
    ([math.nan], [1.0], True),
    ([math.nan], [None], True),
    ([1], [1, 1], True),
    ([1], [1.0], True),
    ([True], [1], True),
]


@pytest.mark.parametrize(("got", "want", "ordered"), SAME)
def test_same(got: list[object], want: list[object], ordered: bool) -> None:
    assert_same(pa.table({"a": got}), pa.table({"a": want}), ordered=ordered)


@pytest.mark.parametrize(("got", "want", "ordered"), DIFFERENT)
def test_different(got: list[object], want: list[object], ordered: bool) -> None:
    with pytest.raises(AssertionError):
        assert_same(pa.table({"a": got}), pa.table({"a": want}), ordered=ordered)


def test_names_and_types_are_exact() -> None:
    with pytest.raises(AssertionError):
        assert_same(pa.table({"a": [1]}), pa.table({"b": [1]}), ordered=True)
    with pytest.raises(AssertionError):
        assert_same(pa.table({"a": pa.array([1], pa.int32())}), pa.table({"a": [1]}), ordered=True)
