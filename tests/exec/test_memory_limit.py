"""`collect(memory=...)`: groups of more rows than memory holds; partitions go to disk and come back."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import ScaleinError, col
from scalein.arrow_rows import copied
from scalein.exec import partitioned_aggregate, radix, spill_partitions
from scalein.exec.spill_file import SpillFile
from scalein.ir.tables import AccKind
from tests.same import assert_same
from tests.scale import assert_same_rows

ROWS = 200_000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few megabytes are more than memory holds."""
    monkeypatch.setattr(radix, "SAMPLE_ROWS", 1 << 12)
    monkeypatch.setattr(radix, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(radix, "SLAB_BYTES", radix.SLAB_CHUNKS << 10)
    monkeypatch.setattr(spill_partitions, "MIN_DIVIDED_BYTES", 1 << 13)


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
    assert sum(written) > 30
    assert_same_rows(got, want, by=[key])


def test_a_heavy_key_beside_many(written: list[int]) -> None:
    given = table(100_000)
    heavy = np.where(np.arange(ROWS) % 2 == 0, 17, np.asarray(given["k"].fill_null(0)))
    given = given.set_column(0, "k", pa.array(heavy))
    got = si.from_arrow(given).group_by("k").agg(n=si.count(), s=col("v").sum()).collect(workers=2, memory="1MB")
    want = duckdb.sql("select k, count(*) n, sum(v) s from given group by k").to_arrow_table()
    assert sum(written) > 500
    assert_same_rows(got, want, by=["k"])


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


GROUPS = {
    "all values": lambda flow: flow.group_by("a").agg(q=col("f").quantile(0.3), x=col("i").collect(), n=si.count()),
    "text": lambda flow: flow.group_by("s", "f").agg(u=col("s").n_unique(), m=col("s").max(), first=col("s").first()),
    "distinct": lambda flow: flow.group_by("a").agg(u=col("i").n_unique(), last=col("s").last(), x=col("s").collect()),
    "windows": lambda flow: flow.group_by("a", si.sliding("i", 400, every=200)).agg(x=col("s").collect(), n=si.count()),
    "downstream": lambda flow: flow.filter(col("i") % 5 != 1).group_by("s").agg(q=col("f").quantile(0.5), n=si.count())
    .filter(col("n") > 1).select("s", y=col("q") * 2),
}


@pytest.mark.parametrize("distinct", [1, 2000])  # with one key, all its rows are more than memory holds
@pytest.mark.parametrize("flow", GROUPS)
def test_groups_of_any_kind_larger_than_memory(flow: str, distinct: int, written: list[int]) -> None:
    given = mixed(6000, distinct, 3)
    want = GROUPS[flow](si.from_arrow(given)).collect()
    for memory, workers in ((1, 1), (40_000, 2), ("1GB", 2)):
        got = GROUPS[flow](si.from_arrow(given.to_reader(max_chunksize=997))).collect(memory=memory, workers=workers)
        assert_same(got, want, ordered=False)
    assert written or distinct == 1  # few groups fit


def test_quantiles_of_a_group_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the quantiles of all rows, beside other aggregates of the same column; few of its values are held."""
    rng = np.random.default_rng(11)
    numbers = np.concatenate((rng.normal(0, 1e300, 3000), rng.integers(-3, 3, 3000), [np.inf, -np.inf, -0.0, 0.0]))
    rng.shuffle(numbers)
    given = pa.table({"x": pa.array(numbers, mask=rng.random(len(numbers)) < 0.1),
                      "k": pa.array(np.where(rng.random(len(numbers)) < 0.01, rng.integers(0, 99, len(numbers)), 7)),
                      "none": pa.nulls(len(numbers), pa.float64()), "i": np.arange(len(numbers))})
    x = col("x")
    aggregates = {f"q{n}": x.quantile(q) for n, q in enumerate((0, 0.123, 0.5, 0.9, 1))}
    aggregates |= {"a": x.approx_quantile(0.5), "i": col("i").quantile(0.3), "none": col("none").quantile(0.5),
                   "min": x.min(), "n": x.count(), "first": x.first(), "list": x.collect()}
    distinct: list[int] = []
    aggregate = partitioned_aggregate._aggregate

    def counted(run: Any, node: Any, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = list(batches)
        names = [acc.arg.name for acc in node.table.accs if acc.kind is AccKind.VALUES]
        if sum(batch.num_rows for batch in rows) > 1000:
            distinct.extend(len(pa.Table.from_batches(rows)[name].unique()) for name in names)
        return aggregate(run, node, iter(rows))

    monkeypatch.setattr(partitioned_aggregate, "_aggregate", counted)
    for keys in ([], ["k"]):
        want = si.from_arrow(given).group_by(*keys).agg(**aggregates).collect()
        for memory, workers in ((1, 1), (30_000, 2)):
            distinct.clear()
            flow = si.from_arrow(given.to_reader(max_chunksize=97)).group_by(*keys)
            assert_same(flow.agg(**aggregates).collect(memory=memory, workers=workers), want, ordered=False)
            assert distinct and max(distinct) <= 13  # the neighbours of 6 quantiles, and null  # noqa: PT018
    for flow in (si.from_arrow(given.slice(0, 0)), si.from_arrow(given).filter(col("i") < 0)):
        got = flow.group_by().agg(q=x.quantile(0.5), n=si.count()).collect(memory=1)
        assert got.to_pylist() == [{"q": None, "n": 0}]


def test_groups_of_nothing() -> None:
    for flow in GROUPS.values():
        given = mixed(0, 1, 3)
        assert_same(flow(si.from_arrow(given)).collect(memory=1), flow(si.from_arrow(given)).collect(), ordered=False)


DISTINCT = {
    "all columns": lambda flow: flow.select("a", "s").distinct(),
    "some columns": lambda flow: flow.distinct("a"),
    "text and floats": lambda flow: flow.distinct("s", "f"),
    "between steps": lambda flow: flow.filter(col("i") % 5 != 1).with_columns(b=col("a") % 300).distinct("b")
    .filter(col("i") % 3 != 1).select("s", "i", c=col("b") + 1),
    "before a join": lambda flow: flow.distinct("s")
    .join(si.from_arrow(mixed(900, 2000, 8).select(["a", "i"]).rename_columns(["a", "j"])), on="a", how="left"),
    "before groups": lambda flow: flow.distinct("a").group_by("f").agg(n=si.count()),
}  # fmt: skip


@pytest.mark.parametrize("distinct", [3, 2000])
@pytest.mark.parametrize("flow", DISTINCT)
def test_more_distinct_rows_than_memory_holds(flow: str, distinct: int, written: list[int]) -> None:
    given = mixed(1200, distinct, 9)
    ordered = flow != "before groups"
    want = DISTINCT[flow](si.from_arrow(given)).collect()
    for memory, workers in ((1, 1), (150_000, 2), ("1GB", 2)):
        got = DISTINCT[flow](si.from_arrow(given.to_reader(max_chunksize=97))).collect(memory=memory, workers=workers)
        assert_same(got, want, ordered=ordered)  # the first row of each key, in the order of the source
    assert written


def test_distinct_rows_are_emitted_as_they_come() -> None:
    """Also under a memory limit: the source may have no end."""
    def endless() -> Iterator[pa.RecordBatch]:
        for number in itertools.count():
            yield pa.record_batch({"k": np.arange(100 * number, 100 * number + 150)})

    flow = si.from_arrow(pa.RecordBatchReader.from_batches(pa.schema({"k": pa.int64()}), endless()))
    assert flow.distinct().limit(1000).collect(memory="100MB")["k"].to_pylist() == list(range(1000))


def test_keys_seen_are_in_memory_of_their_own() -> None:
    """A few rows of a batch do not hold the whole batch."""
    whole = pa.record_batch({"k": np.arange(100_000), "s": pa.array(["text"] * 100_000)})
    part = copied(whole.slice(10, 3))
    assert part.equals(whole.slice(10, 3))
    assert part.get_total_buffer_size() < 1000


JOINS = {
    "inner": lambda flow, table: flow.join(table, on="a"),
    "left, text": lambda flow, table: flow.join(table.drop("a"), on="s", how="left"),
    "two keys": lambda flow, table: flow.join(table, on=["a", "s"]).filter(col("i") + col("j") > 10),
    "semi": lambda flow, table: flow.join(table.select("a"), on="a", how="semi"),
    "anti": lambda flow, table: flow.join(table.select("s"), on="s", how="anti"),
    "right": lambda flow, table: flow.join(table, on="a", how="right"),
    "outer, text": lambda flow, table: flow.join(table.drop("a"), on="s", how="outer"),
    "right, one key of many": lambda flow, table: flow.join(table.with_columns(a=col("a") % 2), on="a", how="right"),
    "outer after a join": lambda flow, table: flow.join(table.select("a", v=col("g")), on="a").filter(col("i") % 7 > 1)
    .join(table.select("s", "j"), on="s", how="outer").filter(col("j") % 3 > 0),
    "joined after outer": lambda flow, table: flow.join(table.select("s", "j"), on="s", how="outer")
    .join(table.select(j=col("j"), v=col("g")), on="j", how="left"),
    "two tables": lambda flow, table: flow.join(table.select("a", "j"), on="a", how="left")
    .with_columns(b=col("j") % 100).join(table.select(b=col("a"), v=col("g")), on="b", how="left"),
    "aggregated": lambda flow, table: flow.join(table.select("a", "j"), on="a").group_by("a").agg(n=col("j").sum()),
}


@pytest.mark.parametrize("join", JOINS)
def test_a_join_with_a_table_larger_than_memory(join: str, written: list[int]) -> None:
    left, right = mixed(3000, 700, 5), mixed(1500, 700, 6).rename_columns(["a", "g", "s", "j", "m"])
    ordered = join != "aggregated"
    want = JOINS[join](si.from_arrow(left), si.from_arrow(right)).collect()
    for memory, workers in ((1, 1), (100_000, 2), ("1GB", 2)):
        flow = si.from_arrow(left.to_reader(max_chunksize=331))
        got = JOINS[join](flow, si.from_arrow(right)).collect(memory=memory, workers=workers)
        assert_same(got, want, ordered=ordered)
        assert not ordered or got["i"].to_pylist() == want["i"].to_pylist()
    assert written


@pytest.mark.parametrize(("left", "right"), [(0, 50), (50, 0), (200, 300)])
def test_a_join_of_few_rows_or_of_one_key(left: int, right: int) -> None:
    given, table = mixed(left, 1, 5), mixed(right, 1, 6).rename_columns(["a", "g", "s", "j", "m"])
    for how in ("inner", "left", "right", "outer"):
        flow = si.from_arrow(given).join(si.from_arrow(table.select(["a", "j"])), on="a", how=how)
        assert_same(flow.collect(memory=1), flow.collect(), ordered=True)


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
