"""map_in_arrow and map_partitions: a flow on the rows of each partition."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
import scalein.spark as sis
from scalein import col
from scalein.errors import BadArgument, BadData, WrongType
from scalein.spark.batch import tasks
from tests.same import assert_same
from tests.spark.flows import ADS, rows

TABLE = rows(1200)
Q = si.flow(TABLE.schema).filter(col("x") > 1).join(ADS, on="k", how="left").select("n", "name", y=col("x") * 2, s="s")


def test_a_dataframe(spark: Any) -> None:
    df = spark.createDataFrame(TABLE).repartition(3)
    assert_same(df.mapInArrow(Q.map_in_arrow, sis.schema(Q)).toArrow(), Q.collect(TABLE))


def test_an_rdd(spark: Any) -> None:
    df = spark.createDataFrame(TABLE).repartition(3)
    got = df.rdd.mapPartitions(Q.map_partitions).collect()
    assert list(got[0].__fields__) == ["n", "name", "y", "s"]
    assert_same(pa.Table.from_pylist([row.asDict() for row in got], Q.schema), Q.collect(TABLE))


def test_an_aggregate_is_per_partition(spark: Any) -> None:
    q = si.flow({"n": pa.int64()}).group_by().agg(c=si.count(), s=col("n").sum())
    df = spark.createDataFrame(TABLE.select(["n"])).repartition(3)
    got = df.mapInArrow(q.map_in_arrow, sis.schema(q)).toArrow()
    assert got.num_rows == 3
    assert sum(got["c"].to_pylist()) == 1200


def test_small_batches_are_coalesced(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.num_rows)
        return batch

    q = si.flow({"n": pa.int64()}).map_batches(counted, {"n": pa.int64()})
    monkeypatch.setattr(tasks, "COALESCED_ROWS", 500)
    got = pa.Table.from_batches(q.map_in_arrow(TABLE.select(["n"]).to_batches(100)))
    assert seen == [500, 500, 200]
    assert got.equals(TABLE.select(["n"]))


def test_other_batches_of_the_same_flow() -> None:
    """One process reads partitions of several DataFrames: other column order, nulls, another text layout."""
    q = si.flow({"a": pa.int64(), "s": pa.dictionary(pa.int32(), pa.string())}).select(b=col("a") + 1, s="s")
    for batch in (pa.record_batch({"s": ["x", None], "a": [1, 2], "more": [0, 0]}),
                  pa.record_batch({"a": [None, 2], "s": pa.array(["x", "y"], pa.large_string())})):
        got = pa.Table.from_batches(q.map_in_arrow([batch]))
        assert got["s"].to_pylist() == batch.column("s").to_pylist()
        assert got["b"].to_pylist() == [None if a is None else a + 1 for a in batch.column("a").to_pylist()]
    assert list(q.map_in_arrow([])) == []


def test_rows_of_any_kind() -> None:
    q = si.flow({"a": pa.int64(), "t": pa.timestamp("us", "UTC")}).filter(col("a") > 1)
    at = datetime(2026, 11, 16, tzinfo=UTC)
    for given in ([{"a": 2, "t": at}], [(2, at)], [(2, at.astimezone().replace(tzinfo=None))]):
        assert [tuple(row) for row in q.map_partitions(given)] == [(2, at)]


def test_wrong_batches_are_refused() -> None:
    q = si.flow({"a": pa.int64(), "s": str})
    with pytest.raises(BadData, match="no column 's'"):
        list(q.map_in_arrow([pa.record_batch({"a": [1]})]))
    with pytest.raises(WrongType, match="'a' of the DataFrame is double"):
        list(q.map_in_arrow([pa.record_batch({"a": [1.0], "s": ["x"]})]))
    with pytest.raises(BadData, match="values of 'a' are not of the flow's type int64"):
        list(q.map_partitions([("x", "y")]))
    with pytest.raises(BadData, match="the rows have no column 's'"):
        list(q.map_partitions([{"a": 1}]))
    with pytest.raises(BadArgument, match=r"begins with si.flow\(schema\)"):
        list(si.from_arrow(TABLE).map_in_arrow([]))


def test_a_process_compiles_a_flow_once() -> None:
    """All tasks of a process share a flow's compiled program."""
    import pickle

    data = pickle.dumps(Q.map_in_arrow)
    first = pickle.loads(data)
    list(first(iter(TABLE.to_batches())))
    mapping = tasks._mapping_for(first.flow.op)
    again = pickle.loads(data)
    assert tasks._mapping_for(again.flow.op) is mapping
