"""Aggregation by key: few keys, many keys, strings."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from bench import data, yardsticks
from bench.race import Race, assert_same, duck
from scalein import col
from scalein.api.flow import Flow


def four_aggregates(table: pa.Table) -> Flow:
    """W3's query."""
    value = col("value")
    return si.from_arrow(table).group_by("key").agg(s=value.sum(), n=si.count(), lo=value.min(), hi=value.max())


FOUR_AGGREGATES_SQL = "select key, sum(value) s, count(*) n, min(value) lo, max(value) hi from d group by key"


@pytest.mark.parametrize("workers", [1, 2])
def bench_many_keys(race: Race, c: ctypes.CDLL, rows: int, workers: int) -> None:
    """W3: sum, count, min and max over 10 M keys; bound: cache misses, or the bandwidth of partitioning."""
    table = data.keyed_values(rows)
    flow, by_hand = four_aggregates(table), yardsticks.group_many(c, table, workers)
    in_duckdb = duck(FOUR_AGGREGATES_SQL, workers, d=table)
    assert_same(flow.collect(workers=workers), by_hand()(), by=("key",))
    race(lambda: flow.collect(workers=workers), c=by_hand, duckdb=in_duckdb, rounds=5,
         goals={"c": 0.75, "duckdb": 2.5} if workers == 1 else {"c": 0.7},
         row_count=rows, size_bytes=16 * rows, bound="cache misses")


def bench_few_keys(race: Race, c: ctypes.CDLL, rows: int, workers: int) -> None:
    """Count and sum over 1,000 keys; bound: one update a row in L1."""
    keys = 1_000
    table = data.keyed_values(rows, keys=keys)
    table = table.set_column(0, "key", table["key"].cast(pa.int32()))
    flow = si.from_arrow(table).group_by("key").agg(n=si.count(), s=col("value").sum())
    by_hand = yardsticks.group_few(c, table, keys)
    in_duckdb = duck("select key, count(*) n, sum(value) s from d group by key", workers, d=table)
    assert_same(flow.collect(workers=workers), by_hand()(), by=("key",))
    race(lambda: flow.collect(workers=workers), c=by_hand, duckdb=in_duckdb,
         row_count=rows, size_bytes=12 * rows, bound="updates in L1")


@pytest.mark.parametrize("form", ["dictionary", "plain"])
def bench_string_keys(race: Race, rows: int, workers: int, form: str) -> None:
    """Count per ad, its id a string of 36 letters; bound: hashing and comparing strings, none of it for codes."""
    events = data.with_strings(data.ad_events(rows), as_dictionary=form == "dictionary").select(["ad_id"])
    flow = si.from_arrow(events).group_by("ad_id").agg(n=si.count())
    in_duckdb = duck("select ad_id, count(*) n from d group by ad_id", workers, d=events)
    assert_same(flow.collect(workers=workers), in_duckdb(), by=("ad_id",))
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb, rounds=5,
         row_count=rows, size_bytes=events.nbytes, bound="hashing of strings")


def total(batches: Iterable[pa.RecordBatch]) -> tuple[int, float]:
    """Groups, and the sum of their sums: what comes batch by batch is looked at and dropped."""
    found = [(batch.num_rows, pc.sum(batch.column("s")).as_py()) for batch in batches if batch.num_rows]
    return sum(rows for rows, _ in found), sum(s for _, s in found)


@pytest.mark.parametrize("workers", [1, 2])
def bench_more_groups_than_memory(race: Race, rows: int, workers: int, tmp_path: Path) -> None:
    """W3's query over 50 M rows of as many keys in 500 MB; bound: partitions to disk and back."""
    rows = rows * 5 // 2
    limit = 500_000_000 * rows // 50_000_000
    keys = np.random.default_rng(data.SEED).permutation(rows)
    table = pa.table({"key": keys, "value": (keys & 0xFFFFF) / 64.0})
    flow = four_aggregates(table)
    rival = duckdb.connect(config={"threads": workers, "memory_limit": f"{limit}B", "temp_directory": str(tmp_path)})
    rival.register("d", table)

    def ours() -> tuple[int, float]:
        return total(flow.batches(memory=limit, workers=workers))

    def in_duckdb() -> tuple[int, float]:
        return total(rival.sql(FOUR_AGGREGATES_SQL).to_arrow_reader(1 << 16))

    assert ours() == in_duckdb()
    race(ours, duckdb=in_duckdb, goals={"duckdb": 3}, rounds=3, row_count=rows, size_bytes=16 * rows,
         bound="partitions to disk and back")
