"""Map and reduce sides of fragments, without Spark: the rows of `collect`, whatever the batches, tasks and targets."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.dtypes import from_arrow_type
from scalein.errors import NOWHERE, BadArgument
from scalein.exec.fragments import cut, fragments
from scalein.ir.functions.hashing import hash_value
from scalein.ir.windows import Window
from scalein.options import Options
from scalein.spark import map_reduce as sides
from scalein.spark import shuffle
from scalein.spark.batch.tasks import ReduceBlocks, ShuffleWrite
from scalein.spark.map_reduce import MapReduce
from scalein.spark.serialize import optimise, read_static_tables
from scalein.state.key_groups import partition_of_key_groups
from tests.same import assert_same
from tests.spark.flows import FLOWS, ORDERED, rows

OPTIONS = Options.make(workers=1)
TABLE = rows(700)
FRAGMENT_FLOWS = ("filter", "rowwise", "text_key", "join", "explode",
                  "join_group", "all", "each", "keys", "float_key", "unique", "best",
                  "spread", "picked", "unique_all", "distinct", "tumbling_zone", "sliding", "window_rows", "integers",
                  "session", "session_rows", "over", "top_of_groups", "distinct_within",
                  "empty_all", "top_k", "sort_limit", "pairs", "expressions", "expressions_all", "expressions_unique",
                  "tumbling_expressions")  # fmt: skip


def map_reduce_of(name: str) -> tuple[MapReduce, Any]:
    q = {**FLOWS, **ORDERED}[name](si.flow(TABLE.schema))
    (fragment,) = fragments(cut(read_static_tables(optimise(q.op), NOWHERE)))
    return pickle.loads(pickle.dumps(MapReduce(fragment))), q


@settings(max_examples=3, deadline=None)
@given(batch_rows=st.integers(1, 800), tasks=st.integers(1, 4), targets=st.integers(1, 256), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", FRAGMENT_FLOWS)
def test_both_sides_give_the_rows_of_collect(name: str, batch_rows: int, tasks: int, targets: int, seed: int) -> None:
    map_reduce, q = map_reduce_of(name)
    shuffled: dict[int, list[pa.RecordBatch]] = {}
    whole = TABLE.take(np.random.default_rng(seed).permutation(TABLE.num_rows))
    size = -(-TABLE.num_rows // tasks)
    for first in range(0, TABLE.num_rows, size):
        given_rows = whole.slice(first, size).select(map_reduce.reads).to_batches(batch_rows)
        for batch in map_reduce.map(given_rows, OPTIONS):
            assert map_reduce.kind == "rowwise" or batch.schema.equals(map_reduce.shuffle_schema)
            for target, part in shuffle.route([batch], map_reduce.keys, targets, OPTIONS):
                block = shuffle.encode_block(part)
                shuffled.setdefault(target, []).append(shuffle.decode_block(block, map_reduce.shuffle_schema))
    if map_reduce.kind == "rowwise":
        found = [batch for some in shuffled.values() for batch in some]
    else:
        reduce_only = pickle.loads(pickle.dumps(map_reduce.reduce_only))
        found = [batch for target in ({0} | shuffled.keys() if not map_reduce.keys else shuffled)
                 for batch in reduce_only.final(map_reduce.combine(shuffled.get(target, []), OPTIONS), OPTIONS)]
    assert_same(pa.Table.from_batches(found, q.schema), q.collect(TABLE), tolerance=1e-9)


def test_reduce_tasks_do_not_get_static_tables() -> None:
    names = pa.table({"k": [1], "name": ["a long name " * 10_000]})
    q = si.flow(TABLE.schema).join(names, on="k").group_by("name").agg(n=si.count())
    (fragment,) = fragments(cut(read_static_tables(optimise(q.op), NOWHERE)))
    first = MapReduce(fragment)
    assert len(pickle.dumps(first)) > 100_000 > 10 * len(pickle.dumps(first.reduce_only))


def test_kinds() -> None:
    kinds = {name: map_reduce_of(name)[0].kind for name in FRAGMENT_FLOWS}
    assert kinds["filter"] == kinds["join"] == kinds["explode"] == "rowwise"
    assert kinds["each"] == kinds["sliding"] == kinds["all"] == kinds["distinct"] == "partials"
    assert kinds["spread"] == kinds["picked"] == kinds["pairs"] == kinds["expressions"] == "partials"
    assert kinds["unique"] == kinds["window_rows"] == kinds["best"] == "rows"
    assert kinds["top_k"] == kinds["sort_limit"] == "top"


def test_only_columns_that_are_read_are_shuffled() -> None:
    map_reduce, _ = map_reduce_of("unique")
    assert map_reduce.shuffle_schema.names == ["k", "s", "i"]
    assert map_reduce.reads == ["k", "s", "i"]
    assert map_reduce.keys == ("k",)


def test_slices_of_sliding_windows_are_shuffled_once() -> None:
    map_reduce, _ = map_reduce_of("sliding")
    assert isinstance(map_reduce.window, Window)
    assert map_reduce.slice_size == 15_000_000
    assert map_reduce.shuffle_schema.names[:2] == ["s", "window_start"]


def test_groups_are_sent_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "MAX_GROUPS", 50)
    monkeypatch.setattr(sides, "CHECK_ROWS", 100)
    q = si.flow(TABLE.schema).group_by("n").agg(s=col("i").sum())
    (fragment,) = fragments(cut(q.op))
    map_reduce = MapReduce(fragment)
    found = list(map_reduce.map(TABLE.to_batches(60), OPTIONS))
    assert len(found) > 5
    assert_same(pa.Table.from_batches(map_reduce.final(found, OPTIONS)), q.collect(TABLE))


@pytest.mark.parametrize("name", ["each", "keys", "tumbling", "sliding", "join_group", "distinct", "having"])
def test_rows_may_be_shuffled_instead_of_many_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "MAX_GROUPS", 3)
    monkeypatch.setattr(sides, "CHECK_ROWS", 100)
    monkeypatch.setattr(sides, "MIN_ROWS_PER_GROUP", 1e9)
    monkeypatch.setattr(sides, "BUFFERED_BYTES", 9000)
    map_reduce, q = map_reduce_of(name)
    assert map_reduce.row_shuffle_schema is not None
    task, ids = ShuffleWrite(map_reduce, shuffle.target_ids(5)), shuffle.target_ids(5)
    blocks = [block for part in range(3) for block in
              task.run(iter(TABLE.slice(250 * part, 250).select(map_reduce.reads).to_batches(50)), OPTIONS)]
    assert {kind for block in blocks for kind in block.column("kind").to_pylist()} == {0, 1}
    found = [batch for id_ in ids for batch in
             ReduceBlocks(map_reduce).run((c for c in blocks if c.column("target")[0].as_py() == id_), OPTIONS)]
    assert_same(pa.Table.from_batches(found, q.schema), q.collect(TABLE), tolerance=1e-9)


def test_partial_groups_are_made_while_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "MAX_GROUPS", 3)
    monkeypatch.setattr(sides, "CHECK_ROWS", 100)
    map_reduce, _ = map_reduce_of("having")
    found = list(map_reduce.map(TABLE.select(map_reduce.reads).to_batches(50), OPTIONS, may_send_rows=True))
    assert all(batch.schema.names == map_reduce.shuffle_schema.names for batch in found)
    map_reduce, _ = map_reduce_of("each")  # and always without may_send_rows
    found = list(map_reduce.map(TABLE.select(map_reduce.reads).to_batches(50), OPTIONS))
    assert all(batch.schema.names == map_reduce.shuffle_schema.names for batch in found)


def test_an_abandoned_task_leaves_no_groups() -> None:
    q = si.flow(TABLE.schema).group_by("k").agg(n=si.count())
    (fragment,) = fragments(cut(q.op))
    map_reduce = MapReduce(fragment)

    def broken() -> Any:
        yield TABLE.to_batches()[0]
        raise OSError("the connection is gone")

    with pytest.raises(OSError, match="gone"):
        list(map_reduce.map(broken(), OPTIONS))
    for _ in range(2):  # the second reuses the tables of the first
        found = list(map_reduce.map(TABLE.to_batches(), OPTIONS))
        assert_same(pa.Table.from_batches(map_reduce.final(found, OPTIONS)), q.collect(TABLE))


def test_limit_is_refused() -> None:
    (fragment,) = fragments(cut(si.flow(TABLE.schema).limit(3).op))
    with pytest.raises(BadArgument, match="limit depends on the order"):
        MapReduce(fragment)


def test_other_rows_without_an_order_are_refused() -> None:
    flow = si.flow(TABLE.schema)
    for q, why in ((flow.select(r=si.row_number().over("k")), "the number of a row.* depends on the order"),
                   (flow.select(r=col("s").first().over("k")), "first over other rows depends on the order"),
                   (flow.group_by("k", si.count_window(2)).agg(si.count()), "in a count window, depends on the order")):
        with pytest.raises(BadArgument, match=why):
            MapReduce(fragments(cut(q.op))[0])


# --- shuffle blocks


@pytest.mark.parametrize("name", ["k", "s", "x", "i", "d", "t", "z", "b", "day"])
def test_the_hash_of_one_key_is_that_of_its_value(name: str) -> None:
    batch = TABLE.select([name]).combine_chunks().to_batches()[0].slice(0, 100)
    dtype = from_arrow_type(batch.schema.types[0])
    found = shuffle.key_hashes(batch, [name], OPTIONS).view(np.int64).tolist()
    q = si.from_arrow(pa.Table.from_batches([batch])).select(h=col(name).hash())
    assert found == q.collect()["h"].to_pylist()
    if pa.types.is_integer(batch.schema.types[0]):
        assert found == [hash_value(value, dtype) for value in batch.column(0).to_pylist()]


def test_equal_keys_have_equal_hashes() -> None:
    batch = pa.record_batch({"x": [0.0, -0.0, float("nan"), -float("nan"), None, None], "y": [1, 1, 2, 2, 3, 3]})
    found = shuffle.key_hashes(batch, ["x", "y"], OPTIONS)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[4] == found[5]
    assert len(set(found.tolist())) == 3
    assert shuffle.key_hashes(batch, ["y", "x"], OPTIONS)[0] != found[0]


def test_two_keys_may_be_one_column() -> None:
    batch = pa.record_batch({"x": [1.0, -0.0, None], "y": [1, 2, 2]})
    twice = pa.record_batch({"a": batch.column("x"), "b": batch.column("x")})
    want = shuffle.key_hashes(twice, ["a", "b"], OPTIONS).tolist()
    assert shuffle.key_hashes(batch, ["x", "x"], OPTIONS).tolist() == want
    flow = si.flow(batch.schema).group_by(a=col("x"), b=col("x")).agg(n=col("y").n_unique())
    (first, *_) = fragments(cut(flow.op))
    map_reduce = MapReduce(first)
    shuffled = [part for _, part in shuffle.route(map_reduce.map([batch], OPTIONS), map_reduce.keys, 4, OPTIONS)]
    found = pa.Table.from_batches(map_reduce.final(shuffled, OPTIONS))
    assert_same(found, flow.collect(pa.Table.from_batches([batch])))


def test_hashes_of_several_keys_are_uniform() -> None:
    batch = pa.record_batch({"a": np.arange(100_000) % 300, "b": np.arange(100_000) // 300})
    counts = np.bincount(shuffle.key_groups(shuffle.key_hashes(batch, ["a", "b"], OPTIONS)), minlength=256)
    assert counts.min() > 250
    assert counts.max() < 550


def test_targets_are_ranges_of_key_groups() -> None:
    for targets in (1, 2, 3, 7, 200, 256):
        target_of = partition_of_key_groups(targets)
        assert (np.diff(target_of.astype(int)) >= 0).all()
        assert set(target_of.tolist()) == set(range(targets))
        sizes = np.bincount(target_of)
        assert sizes.max() - sizes.min() <= 1


def test_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "BLOCK_BYTES", 4000)
    batch = pa.record_batch({"k": np.arange(10_000), "s": ["x" * 50] * 10_000})
    parts = list(shuffle.route([batch], ["k"], 3, OPTIONS))
    assert max(shuffle.encode_block(part).size for _, part in parts) < 8000
    assert sum(part.num_rows for _, part in parts) == 10_000
    blocks = list(shuffle.shuffle_blocks(iter(parts), shuffle.target_ids(3)))
    assert pa.Table.from_batches(shuffle.decode_blocks(blocks, [batch.schema])).num_rows == 10_000


def test_spark_puts_a_target_into_its_partition(spark: Any) -> None:
    from pyspark.sql import functions

    for count in (1, 3, 200):
        ids = shuffle.target_ids(count)
        df = spark.createDataFrame([(number,) for number in ids], "target int")
        found = df.repartition(count, "target").select("target", functions.spark_partition_id().alias("at")).collect()
        assert {row.target: row.at for row in found} == {number: k for k, number in enumerate(ids)}
