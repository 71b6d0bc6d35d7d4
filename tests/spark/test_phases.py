"""Map and reduce fragments, without Spark: the rows of `collect`, whatever the batches, tasks and targets."""

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
from scalein.hashing import hash_value
from scalein.ir import ops
from scalein.jobs.segments import cut, segments
from scalein.options import Options
from scalein.spark import phases, shuffle
from scalein.spark.batch.tasks import ReduceBlocks, ShuffleWrite
from scalein.spark.phases import Fragments
from scalein.spark.serialize import optimise, read_static_tables
from tests.same import assert_same
from tests.spark.flows import FLOWS, ORDERED, rows

OPTIONS = Options.make(workers=1)
TABLE = rows(700)
SEGMENT_FLOWS = ("filter", "join", "explode", "join_group", "all", "each", "keys", "float_key", "unique", "best",
                 "spread", "picked", "unique_all", "distinct", "tumbling_zone", "sliding", "window_rows", "integers",
                 "empty_all", "top_k", "sort_limit")  # fmt: skip


def fragments_of(name: str) -> tuple[Fragments, Any]:
    q = {**FLOWS, **ORDERED}[name](si.flow(TABLE.schema))
    (segment,) = segments(cut(read_static_tables(optimise(q.op), NOWHERE)))
    return pickle.loads(pickle.dumps(Fragments(segment))), q


@settings(max_examples=3, deadline=None)
@given(batch_rows=st.integers(1, 800), tasks=st.integers(1, 4), targets=st.integers(1, 256), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", SEGMENT_FLOWS)
def test_fragments_give_the_rows_of_collect(name: str, batch_rows: int, tasks: int, targets: int, seed: int) -> None:
    fragments, q = fragments_of(name)
    shuffled: dict[int, list[pa.RecordBatch]] = {}
    whole = TABLE.acquire(np.random.default_rng(seed).permutation(TABLE.num_rows))
    size = -(-TABLE.num_rows // tasks)
    for first in range(0, TABLE.num_rows, size):
        given_rows = whole.slice(first, size).select(fragments.reads).to_batches(batch_rows)
        for batch in fragments.map(given_rows, OPTIONS):
            assert fragments.kind == "rowwise" or batch.schema.equals(fragments.shuffle_schema)
            for target, part in shuffle.route([batch], fragments.keys, targets, OPTIONS):
                block = shuffle.encode_block(part)
                shuffled.setdefault(target, []).append(shuffle.decode_block(block, fragments.shuffle_schema))
    if fragments.kind == "rowwise":
        found = [batch for some in shuffled.values() for batch in some]
    else:
        reduce_only = pickle.loads(pickle.dumps(fragments.reduce_only))
        found = [batch for target in ({0} | shuffled.keys() if not fragments.keys else shuffled)
                 for batch in reduce_only.final(fragments.combine(shuffled.get(target, []), OPTIONS), OPTIONS)]
    assert_same(pa.Table.from_batches(found, q.schema), q.collect(TABLE), tolerance=1e-9)


def test_reduce_tasks_do_not_get_static_tables() -> None:
    names = pa.table({"k": [1], "name": ["a long name " * 10_000]})
    q = si.flow(TABLE.schema).join(names, on="k").group_by("name").agg(n=si.count())
    (segment,) = segments(cut(read_static_tables(optimise(q.op), NOWHERE)))
    first = Fragments(segment)
    assert len(pickle.dumps(first)) > 100_000 > 10 * len(pickle.dumps(first.reduce_only))


def test_kinds() -> None:
    kinds = {name: fragments_of(name)[0].kind for name in SEGMENT_FLOWS}
    assert kinds["filter"] == kinds["join"] == kinds["explode"] == "rowwise"
    assert kinds["each"] == kinds["sliding"] == kinds["all"] == kinds["distinct"] == "partials"
    assert kinds["spread"] == kinds["picked"] == "partials"
    assert kinds["unique"] == kinds["window_rows"] == kinds["best"] == "rows"
    assert kinds["top_k"] == kinds["sort_limit"] == "top"


def test_only_columns_that_are_read_are_shuffled() -> None:
    fragments, _ = fragments_of("unique")
    assert fragments.shuffle_schema.names == ["k", "s", "i"]
    assert fragments.reads == ["k", "s", "i"]
    assert fragments.keys == ("k",)


def test_slices_of_sliding_windows_are_shuffled_once() -> None:
    fragments, _ = fragments_of("sliding")
    assert isinstance(fragments.window, ops.Window)
    assert fragments.slice_size == 15_000_000
    assert fragments.shuffle_schema.names[:2] == ["s", "window_start"]


def test_groups_are_sent_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "MAX_GROUPS", 50)
    monkeypatch.setattr(phases, "CHECK_ROWS", 100)
    q = si.flow(TABLE.schema).group_by("n").agg(s=col("i").sum())
    (segment,) = segments(cut(q.op))
    fragments = Fragments(segment)
    found = list(fragments.map(TABLE.to_batches(60), OPTIONS))
    assert len(found) > 5
    assert_same(pa.Table.from_batches(fragments.final(found, OPTIONS)), q.collect(TABLE))


@pytest.mark.parametrize("name", ["each", "keys", "tumbling", "sliding", "join_group", "distinct", "having"])
def test_rows_may_be_shuffled_instead_of_many_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "MAX_GROUPS", 3)
    monkeypatch.setattr(phases, "CHECK_ROWS", 100)
    monkeypatch.setattr(phases, "MIN_ROWS_PER_GROUP", 1e9)
    monkeypatch.setattr(phases, "BUFFERED_BYTES", 9000)
    fragments, q = fragments_of(name)
    assert fragments.row_shuffle_schema is not None
    task, ids = ShuffleWrite(fragments, shuffle.target_ids(5)), shuffle.target_ids(5)
    blocks = [block for part in range(3) for block in
              task.run(iter(TABLE.slice(250 * part, 250).select(fragments.reads).to_batches(50)), OPTIONS)]
    assert {kind for block in blocks for kind in block.column("kind").to_pylist()} == {0, 1}
    found = [batch for id_ in ids for batch in
             ReduceBlocks(fragments).run((c for c in blocks if c.column("target")[0].as_py() == id_), OPTIONS)]
    assert_same(pa.Table.from_batches(found, q.schema), q.collect(TABLE), tolerance=1e-9)


def test_partial_groups_are_made_while_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "MAX_GROUPS", 3)
    monkeypatch.setattr(phases, "CHECK_ROWS", 100)
    fragments, _ = fragments_of("having")
    found = list(fragments.map(TABLE.select(fragments.reads).to_batches(50), OPTIONS, may_send_rows=True))
    assert all(batch.schema.names == fragments.shuffle_schema.names for batch in found)
    fragments, _ = fragments_of("each")  # and always without may_send_rows
    found = list(fragments.map(TABLE.select(fragments.reads).to_batches(50), OPTIONS))
    assert all(batch.schema.names == fragments.shuffle_schema.names for batch in found)


def test_an_abandoned_task_leaves_no_groups() -> None:
    q = si.flow(TABLE.schema).group_by("k").agg(n=si.count())
    (segment,) = segments(cut(q.op))
    fragments = Fragments(segment)

    def broken() -> Any:
        yield TABLE.to_batches()[0]
        raise OSError("the connection is gone")

    with pytest.raises(OSError, match="gone"):
        list(fragments.map(broken(), OPTIONS))
    for _ in range(2):  # the second reuses the tables of the first
        found = list(fragments.map(TABLE.to_batches(), OPTIONS))
        assert_same(pa.Table.from_batches(fragments.final(found, OPTIONS)), q.collect(TABLE))


def test_limit_is_refused() -> None:
    (segment,) = segments(cut(si.flow(TABLE.schema).limit(3).op))
    with pytest.raises(BadArgument, match="limit depends on the order"):
        Fragments(segment)


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
    (first, *_) = segments(cut(flow.op))
    fragments = Fragments(first)
    shuffled = [part for _, part in shuffle.route(fragments.map([batch], OPTIONS), fragments.keys, 4, OPTIONS)]
    assert_same(pa.Table.from_batches(fragments.final(shuffled, OPTIONS)), flow.collect(pa.Table.from_batches([batch])))


def test_hashes_of_several_keys_are_uniform() -> None:
    batch = pa.record_batch({"a": np.arange(100_000) % 300, "b": np.arange(100_000) // 300})
    counts = np.bincount(shuffle.key_groups(shuffle.key_hashes(batch, ["a", "b"], OPTIONS)), minlength=256)
    assert counts.min() > 250
    assert counts.max() < 550


def test_targets_are_ranges_of_key_groups() -> None:
    for targets in (1, 2, 3, 7, 200, 256):
        target_of = shuffle.target_of_key_groups(targets)
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
