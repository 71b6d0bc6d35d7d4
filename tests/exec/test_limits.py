"""Where counts and times reach the limits of their types: right or an error, never wrapped, never endless."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from tests import oracle
from tests.same import assert_same

EXTREMES = [(pa.int8(), -128), (pa.int8(), 100), (pa.int8(), 127), (pa.int16(), 32760), (pa.int16(), -32768),
            (pa.int32(), 2**31 - 2), (pa.int32(), -(2**31)), (pa.int64(), 2**63 - 4), (pa.int64(), 2**63 - 1),
            (pa.int64(), -(2**63)), (pa.int64(), -(2**63) + 3), (pa.uint8(), 250), (pa.uint32(), 2**32 - 3),
            (pa.timestamp("us"), 2**63 - 1), (pa.timestamp("ns"), -(2**63))]


CASES = [(dtype, moment, window) for dtype, moment in EXTREMES for window in ((50, 50), (1, 1), (3, 2), (4, 1))
         if window[0] == window[1] or not pa.types.is_unsigned_integer(dtype)]  # else refused when written


@pytest.mark.parametrize(("dtype", "moment", "window"), CASES, ids=str)
@pytest.mark.parametrize("key", ["a key of many bytes", "k"])
def test_windows_at_the_limits_of_the_time(dtype: pa.DataType, moment: int, window: tuple[int, int], key: str) -> None:
    size, every = window
    times = pa.array([moment], pa.int64()).cast(dtype)
    spans = [f"{n}{dtype.unit}" for n in window] if pa.types.is_timestamp(dtype) else [size, every]
    spec = si.tumbling("t", spans[0]) if size == every else si.sliding("t", spans[0], every=spans[1])
    _check_limits(times, key, spec)
    if not pa.types.is_unsigned_integer(dtype):
        spans.append(f"{3 * every // 4}{dtype.unit}" if pa.types.is_timestamp(dtype) else 3 * every // 4)
        _check_limits(times, key, si.tumbling("t", spans[0], offset=spans[2]))
        step = f"{size // 2}{dtype.unit}" if pa.types.is_timestamp(dtype) else size // 2
        if size % 2 == 0:
            _check_limits(times, key, si.cumulate("t", spans[0], step=step, offset=spans[2]))


def _check_limits(times: pa.Array, key: str, spec: object) -> None:
    flow = si.from_arrow(pa.table({"k": [key], "t": times})).group_by("k", spec).agg(n=si.count())
    try:
        want = oracle.collect(flow)
    except si.ComputeError:
        with pytest.raises(si.ComputeError, match="overflow in the windows"):
            flow.collect(workers=1)
    else:
        assert_same(flow.collect(workers=1), want, ordered=False)


def test_unsigned_times_of_64_bits_are_refused() -> None:
    with pytest.raises(si.WrongType, match="signed 64 bits"):
        si.from_arrow(pa.table({"t": pa.array([2**63 + 1], pa.uint64())})).group_by(si.tumbling("t", 10))


def test_more_keys_than_null_bits_are_refused() -> None:
    names = [f"k{i}" for i in range(65)]
    flow = si.from_arrow(pa.table({name: [1] for name in names}))
    with pytest.raises(si.BadArgument, match="at most 64 keys"):
        flow.group_by(*names)


def test_wide_aggregates_over_many_groups_keep_their_nulls() -> None:
    rows = 300_000
    half = pa.array(np.ones(rows), mask=np.arange(rows) % 2 == 0)
    table = pa.table({"k": np.arange(rows), **{f"v{i}": half for i in range(70)}})
    aggs = {f"s{i}": col(f"v{i}").sum() for i in (0, 31, 62, 63, 64, 69)}
    rest = {f"m{i}": col(f"v{i}").max() for i in range(70)}
    got = si.from_arrow(table).group_by("k").agg(**aggs, **rest).collect(workers=1)
    assert {got[name].null_count for name in aggs} == {rows // 2}


def test_long_keys_side_by_side() -> None:
    """All strings of a row's key must fit the heap together."""
    table = pa.table({name: pa.array([name * 9_000_000], pa.large_string()) for name in "abc"})
    got = si.from_arrow(table).group_by("a", "b", "c").agg(n=si.count()).collect(workers=1)
    assert got.select(["a", "b", "c"]).equals(table)


@pytest.mark.parametrize("make", [lambda i: i * 7 - 300, lambda i: f"value {i}", lambda i: i / 3], ids=["i", "s", "f"])
def test_a_large_set_of_constants(make: object) -> None:
    """Searched, not compared one by one: compiling must not grow with the set."""
    values = [make(i) for i in range(2_000)]  # type: ignore[operator]
    column = pa.array([*values[::3], None, *values[:5], make(5_000)])  # type: ignore[operator]
    flow = si.from_arrow(pa.table({"x": column})).select(y=col("x").is_in(values[1_000:] + values[:2]))
    started = time.process_time()
    got = flow.collect(workers=1)
    assert time.process_time() - started < 5
    assert_same(got, oracle.collect(flow), ordered=True)


def test_an_error_past_the_sixty_fourth_expression_says_so() -> None:
    table = pa.table({"a": [1], "b": pa.array([2**63 - 1])})
    sums = {f"c{i}": col("a") + i for i in range(1, 80)}
    with pytest.raises(si.ComputeError, match="one of the"):
        si.from_arrow(table).select(**sums, z=col("b") + 1).collect(workers=1)


def test_one_more_row_does_not_cost_the_joined_table_again() -> None:
    rows = 500_000
    table = pa.table({"k": np.arange(rows), "b": pa.array(np.arange(rows) % 2 == 0, mask=np.arange(rows) % 3 == 0)})
    batch = pa.record_batch({"k": [7]})

    def seconds(count: int) -> float:
        flow = si.from_batches([batch] * count, batch.schema).join(table, on="k").select("b")
        started = time.process_time()
        assert sum(b.num_rows for b in flow.batches(workers=1)) == count
        return time.process_time() - started

    seconds(1)
    assert (min(seconds(401) for _ in range(3)) - seconds(1)) / 400 < 0.001
