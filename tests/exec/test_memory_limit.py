"""`collect(memory=...)`: groups of more rows than memory holds; partitions go to disk and come back."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import ScaleinError, col
from scalein.exec import radix
from scalein.exec.spill_file import SpillFile
from tests.same import assert_same

ROWS = 200_000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few megabytes are more than memory holds."""
    monkeypatch.setattr(radix, "SAMPLE_ROWS", 1 << 12)
    monkeypatch.setattr(radix, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(radix, "SLAB_BYTES", radix.SLAB_CHUNKS << 10)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces that went to disk."""
    seen: list[int] = []
    write = SpillFile.write

    def counted(self: SpillFile, places: list[int], size: int) -> list[int]:
        seen.append(len(places))
        return write(self, places, size)

    append = SpillFile.append

    def appended(self: SpillFile, data: memoryview) -> int:
        seen.append(1)
        return append(self, data)

    monkeypatch.setattr(SpillFile, "write", counted)
    monkeypatch.setattr(SpillFile, "append", appended)
    return seen


def table(keys: int) -> pa.Table:
    rng = np.random.default_rng(7)
    number = rng.integers(0, keys, ROWS)
    value = pa.array(rng.random(ROWS), mask=rng.random(ROWS) < 0.1)
    text = pa.array([f"key number {n}" if n % 3 else str(n) for n in number.tolist()])
    return pa.table({"k": pa.array(number, mask=number == 5), "t": text, "v": value})


AGGREGATES = {"n": si.count(), "s": col("v").sum(), "lo": col("v").min(), "distinct": col("v").n_unique()}
SQL = "count(*) n, sum(v) s, min(v) lo, count(distinct v) as \"distinct\""


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("key", ["k", "t"])
@pytest.mark.parametrize("source", ["table", "batches"])
def test_groups_larger_than_memory(written: list[int], key: str, workers: int, source: str) -> None:
    given = table(120_000)
    flow = si.from_arrow(given if source == "table" else given.to_reader(max_chunksize=20_000))
    got = flow.group_by(key).agg(**AGGREGATES).collect(workers=workers, memory="1MB")
    want = duckdb.sql(f"select {key}, {SQL} from given group by {key}").to_arrow_table()
    assert sum(written) > 1_000
    assert_same(got, want.cast(got.schema), ordered=False)


def test_a_heavy_key_beside_many(written: list[int]) -> None:
    given = table(100_000)
    heavy = np.where(np.arange(ROWS) % 2 == 0, 17, np.asarray(given["k"].fill_null(0)))
    given = given.set_column(0, "k", pa.array(heavy))
    got = si.from_arrow(given).group_by("k").agg(n=si.count(), s=col("v").sum()).collect(workers=2, memory="1MB")
    want = duckdb.sql("select k, count(*) n, sum(v) s from given group by k").to_arrow_table()
    assert sum(written) > 500
    assert_same(got, want.cast(got.schema), ordered=False)


def test_batches_come_before_all_is_done() -> None:
    batches = si.from_arrow(table(120_000)).group_by("k").agg(n=si.count()).batches(workers=1, memory="1MB")
    assert isinstance(batches, Iterator)
    assert sum(batch.num_rows for batch in batches) > 80_000


def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(ScaleinError, match="No space left"):
        si.from_arrow(table(120_000)).group_by("k").agg(n=si.count()).collect(workers=1, memory="1MB")


def mixed(rows: int, keys: int, seed: int) -> pa.Table:
    """Rows with few or many equal keys, nulls, NaN and both zeros; `i` is the row's number."""
    rng = np.random.default_rng(seed)
    numbers, floats = rng.integers(0, keys, rows), rng.integers(0, keys, rows).astype(float)
    floats[rng.random(rows) < 0.1], floats[rng.random(rows) < 0.05] = np.nan, -0.0
    texts = [f"the same beginning {n}" for n in numbers.tolist()]
    return pa.table({
        "a": pa.array(rng.integers(0, keys, rows), mask=rng.random(rows) < 0.2),
        "f": pa.array(floats, mask=rng.random(rows) < 0.1),
        "s": pa.array(texts, pa.string(), mask=rng.random(rows) < 0.1),
        "i": np.arange(rows),
        "l": pa.array([[n] * (n % 3) for n in numbers.tolist()], pa.list_(pa.int64())),
    })


@pytest.mark.parametrize("memory", [1, 20_000, 300_000, "1GB"])
@pytest.mark.parametrize(("keys", "descending"), [(["a"], [False]), (["s", "f"], [True, False]),
                                                  (["f", "a"], [True, True]), (["i"], [False])])  # fmt: skip
@pytest.mark.parametrize("distinct", [1, 2000])
def test_a_sort_larger_than_memory(keys: list[str], descending: list[bool], memory: int | str, distinct: int) -> None:
    given = mixed(1500, distinct, len(keys))
    flow = si.from_arrow(given.to_reader(max_chunksize=97)).sort(*keys, descending=descending)
    got = flow.collect(memory=memory)
    want = si.from_arrow(given).sort(*keys, descending=descending).collect()
    assert_same(got, want, ordered=True)
    assert got["i"].to_pylist() == want["i"].to_pylist()  # equal rows in the order of the input


def test_a_sort_of_nothing_and_of_one_row() -> None:
    for rows in (0, 1):
        given = mixed(rows, 3, 1)
        assert_same(si.from_arrow(given).sort("s").collect(memory=1), given, ordered=True)


def test_a_sort_spills(written: list[int]) -> None:
    batches = si.from_arrow(mixed(5000, 10, 1).to_reader(max_chunksize=100)).sort("a").batches(memory=50_000)
    assert sum(batch.num_rows for batch in batches) == 5000
    assert len(written) > 10


@pytest.mark.parametrize("memory", ["", "lots", 0, -1, True, "0MB", 1.5])
def test_no_amount_of_memory(memory: object) -> None:
    with pytest.raises(ScaleinError, match="memory= takes an amount such as '500MB'"):
        si.from_arrow(table(10)).group_by("k").agg(n=si.count()).collect(memory=memory)  # type: ignore[arg-type]
