"""Sums that overflow their columns: an error names the column, and the store is unchanged."""

from __future__ import annotations

from decimal import Context, Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from scalein.errors import ComputeError
from scalein.state import LogStore
from scalein.state.budget import Budget
from scalein.storage.local import LocalFileSystem

KEY = {"k": pa.int64()}
EXACT = Context(prec=80)
SMALL = Budget(300_000, 1 << 14, 1 << 12)
LIMITS = [
    (pa.int8(), 127), (pa.int16(), 32767), (pa.int32(), 2**31 - 1), (pa.int64(), 2**63 - 1), (pa.uint8(), 255),
    (pa.uint64(), 2**64 - 1), (pa.decimal128(5, 2), Decimal("999.99")), (pa.decimal128(38, 0), Decimal(10**38 - 1)),
    (pa.duration("us"), 2**63 - 1),
]  # fmt: skip


def opened(path: Path, kind: pa.DataType, budget: Budget = SMALL) -> LogStore:
    value = {"n": kind, "other": pa.int64()}
    return LogStore.open_on(LocalFileSystem(path), key=KEY, value=value, budget=budget)


def rows(keys: list[int], values: list[object], kind: pa.DataType) -> pa.Table:
    return pa.table({"k": keys, "n": pa.array(values, kind), "other": pa.array([1] * len(keys), pa.int64())})


def value_of(store: LogStore, key: int) -> object:
    column = store.get(pa.array([key]))["n"]
    return (column.cast(pa.int64()) if pa.types.is_duration(column.type) else column).to_pylist()[0]


def evict(store: LogStore) -> None:
    """Evict all records."""
    for shard in range(16):
        store._tiers._evict(shard, 0.0)


def refuses(store: LogStore, table: pa.Table) -> None:
    before = store.scan().read_all().sort_by("k")
    with pytest.raises(ComputeError, match="'n'") as caught:
        store.merge(table, n="sum", other="sum")
    assert "overflow" in str(caught.value)
    assert Path(__file__).name in str(caught.value)
    assert store.scan().read_all().sort_by("k").equals(before)


@pytest.mark.parametrize(("kind", "most"), LIMITS, ids=lambda part: str(part)[:12])
def test_a_sum_fits_exactly_or_is_refused(tmp_path: Path, kind: pa.DataType, most: object) -> None:
    one = Decimal(1).scaleb(-kind.scale) if pa.types.is_decimal(kind) else 1
    with opened(tmp_path, kind) as store:
        nearly = EXACT.subtract(most, one) if isinstance(most, Decimal) else most - one  # type: ignore[operator]
        store.merge(rows([1, 2], [nearly, one], kind), n="sum", other="sum")
        store.merge(rows([1], [one], kind), n="sum", other="sum")
        assert value_of(store, 1) == most
        refuses(store, rows([3, 1, 3], [one, one, one], kind))
        refuses(store, rows([7, 7], [most, one], kind))
        evict(store)
        refuses(store, rows([1], [one], kind))
        store.merge(rows([2, 9], [one, most], kind), n="sum", other="sum")
        assert value_of(store, 9) == most
    with LogStore.open(tmp_path) as again:
        refuses(again, rows([9], [one], kind))
        assert value_of(again, 1) == most
        again.merge(rows([2], [one], kind), n="sum", other="sum")


def test_partial_sums_do_not_overflow_if_the_full_sum_fits(tmp_path: Path) -> None:
    """-100 on disk and +100, +100 in memory are 100, though 200 would not fit."""
    with opened(tmp_path, pa.int8()) as store:
        store.merge(rows([1, 2], [-100, 5], pa.int8()), n="sum", other="sum")
        evict(store)
        for wanted in (0, 100):
            store.merge(rows([1], [100], pa.int8()), n="sum", other="sum")
            assert value_of(store, 1) == wanted
        refuses(store, rows([1], [100], pa.int8()))
        evict(store)
        store.merge(rows([1, 1, 1], [-100, -100, 27], pa.int8()), n="sum", other="sum")
        assert value_of(store, 1) == -73
        store.compact()
        assert value_of(store, 1) == -73
        assert len(store) == 2


def test_an_overflow_in_one_slice_refuses_all_rows_of_a_call(tmp_path: Path) -> None:
    """The row that overflows is in the last slice of the call."""
    with opened(tmp_path, pa.int32()) as store:
        keys = list(range(600))
        store.merge(rows(keys, [2**31 - 10] * 600, pa.int32()), n="sum", other="sum")
        refuses(store, rows([*keys, 599], [5] * 601, pa.int32()))
        assert store._budget.batch_rows(store._kernels.record_bytes) < 600
        store.merge(rows(keys, [9] * 600, pa.int32()), n="sum", other="sum")
        assert value_of(store, 599) == 2**31 - 1


def test_an_overflow_is_reported_although_the_kernel_returns_for_memory(tmp_path: Path) -> None:
    with opened(tmp_path, pa.int8(), Budget(None)) as store:
        refuses(store, rows([1, 1, *range(2, 500)], [100, 100, *[1] * 498], pa.int8()))
        refuses(store, rows([*range(2, 500), 1, 1], [*[1] * 498, 100, 100], pa.int8()))


def test_a_count_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with LogStore.open(tmp_path, key=KEY, value={"n": pa.int8()}) as store:
        store.merge(pa.table({"k": [1] * 127}), n="count")
        with pytest.raises(ComputeError, match="'n'"):
            store.merge(pa.table({"k": [1]}), n="count")
        assert value_of(store, 1) == 127


def test_decimal_bounds_are_exact(tmp_path: Path) -> None:
    """Python's decimals round to 28 digits unless told otherwise."""
    with opened(tmp_path, pa.decimal128(38, 0)) as store:
        third = Decimal(33333333333333333333333333334999999999)
        store.merge(rows([1, 1], [third, third], pa.decimal128(38, 0)), n="sum", other="sum")
        refuses(store, rows([1], [third], pa.decimal128(38, 0)))


@pytest.mark.parametrize(("count", "evictions"), [(1000, 0), (200, 5)], ids=["memory", "disk"])
def test_bounds_are_measured_again(count: int, evictions: int, tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small values are merged without a test: the sums are far from the limit, though what was merged is not."""
    tests: list[int] = []
    real = LogStore._test_merge

    def counted(self: LogStore, batches: list[pa.RecordBatch], functions: tuple[str, ...]) -> None:
        tests.append(1)
        real(self, batches, functions)

    monkeypatch.setattr(LogStore, "_test_merge", counted)
    every = count // evictions if evictions else count
    keys = list(range(3000))
    table = rows(keys, [(key % 7 - 3) * 10_000 for key in keys], pa.int32())
    assert count * 3000 * 30_000 > 2 * (2**31 - 1)  # the bounds would have reached the limit
    with opened(tmp_path, pa.int32(), Budget(None)) as store:
        for number in range(1, count + 1):
            store.merge(table, n="sum", other="sum")
            if evictions and not number % every:
                store._tiers.collect_garbage()
                evict(store)
            if number == count // 2:
                store.compact()
        assert [value_of(store, key) for key in (0, 6, 2999)] == [-30_000 * count, 30_000 * count, 0]
        assert tests == []
        bound = store._sums._bounds[0]
        assert 30_000 * count <= bound < 2**31
    with opened(tmp_path, pa.int32(), Budget(None)) as store:
        assert store._sums._bounds[0] == bound
        refuses(store, rows([0, 6], [0, 2**31 - 30_000 * count], pa.int32()))
        store.merge(rows([6], [2**31 - 1 - 30_000 * count], pa.int32()), n="sum", other="sum")
        assert value_of(store, 6) == 2**31 - 1
        refuses(store, rows([6], [1], pa.int32()))


def test_what_is_measured_covers_partial_sums(tmp_path: Path) -> None:
    """The full value is small, but what is in memory of it is not: it must not overflow before they are merged."""
    with opened(tmp_path, pa.int8()) as store:
        for sign in (1, -1, 1, -1):
            store.merge(rows([1], [sign * 60], pa.int8()), n="sum", other="sum")
            evict(store)
        for number in range(30):
            for value in (60, 60, -60, -100, 40) if number % 2 else (-60, -60, 60, 100, -40):
                store.merge(rows([1], [value], pa.int8()), n="sum", other="sum")
            evict(store)
            assert value_of(store, 1) == 0
        refuses(store, rows([1, 1], [100, 100], pa.int8()))
