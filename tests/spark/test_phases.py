"""Flows in two halves, without Spark: whatever the batches, the targets and their number, the rows of `collect`."""

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
from scalein.ir import ops
from scalein.ir.functions.hashing import hash_value
from scalein.jobs.fragments import cut, segments
from scalein.options import Options
from scalein.spark import phases, shuffle
from scalein.spark.batch.tasks import Received, Sent
from scalein.spark.phases import Phases
from scalein.spark.serialize import optimised, settled
from tests.same import assert_same
from tests.spark.flows import FLOWS, ORDERED, rows

OPTIONS = Options.make(workers=1)
TABLE = rows(700)
HALVED = ("filter", "join", "explode", "join_group", "all", "each", "keys", "float_key", "unique", "best", "spread",
          "picked", "unique_all", "distinct", "tumbling_zone", "sliding", "window_rows", "integers", "empty_all",
          "top_k", "sort_limit")  # fmt: skip


def halves(name: str) -> tuple[Phases, Any]:
    q = {**FLOWS, **ORDERED}[name](si.flow(TABLE.schema))
    (segment,) = segments(cut(settled(optimised(q.op), NOWHERE)))
    return pickle.loads(pickle.dumps(Phases(segment))), q


@settings(max_examples=3, deadline=None)
@given(batch_rows=st.integers(1, 800), tasks=st.integers(1, 4), targets=st.integers(1, 256), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", HALVED)
def test_halves_give_what_collect_gives(name: str, batch_rows: int, tasks: int, targets: int, seed: int) -> None:
    halved, q = halves(name)
    arrived: dict[int, list[pa.RecordBatch]] = {}
    whole = TABLE.take(np.random.default_rng(seed).permutation(TABLE.num_rows))
    size = -(-TABLE.num_rows // tasks)
    for first in range(0, TABLE.num_rows, size):
        given_rows = whole.slice(first, size).select(halved.reads).to_batches(batch_rows)
        for batch in halved.map(given_rows, OPTIONS):
            assert halved.kind == "rowwise" or batch.schema.equals(halved.crossing)
            for target, part in shuffle.routed([batch], halved.keys, targets, OPTIONS):
                arrived.setdefault(target, []).append(shuffle.decoded(shuffle.encoded(part), halved.crossing))
    if halved.kind == "rowwise":
        found = [batch for some in arrived.values() for batch in some]
    else:
        second = pickle.loads(pickle.dumps(halved.second))
        found = [batch for target in ({0} | arrived.keys() if not halved.keys else arrived)
                 for batch in second.final(halved.combine(arrived.get(target, []), OPTIONS), OPTIONS)]
    assert_same(pa.Table.from_batches(found, q.schema), q.collect(TABLE), tolerance=1e-9)


def test_static_tables_do_not_travel_behind_the_shuffle() -> None:
    names = pa.table({"k": [1], "name": ["a long name " * 10_000]})
    q = si.flow(TABLE.schema).join(names, on="k").group_by("name").agg(n=si.count())
    (segment,) = segments(cut(settled(optimised(q.op), NOWHERE)))
    first = Phases(segment)
    assert len(pickle.dumps(first)) > 100_000 > 10 * len(pickle.dumps(first.second))


def test_kinds() -> None:
    kinds = {name: halves(name)[0].kind for name in HALVED}
    assert kinds["filter"] == kinds["join"] == kinds["explode"] == "rowwise"
    assert kinds["each"] == kinds["sliding"] == kinds["all"] == kinds["distinct"] == "partials"
    assert kinds["spread"] == kinds["picked"] == "partials"
    assert kinds["unique"] == kinds["window_rows"] == kinds["best"] == "rows"
    assert kinds["top_k"] == kinds["sort_limit"] == "top"


def test_only_what_is_read_crosses() -> None:
    halved, _ = halves("unique")
    assert halved.crossing.names == ["k", "s", "i"]
    assert halved.reads == ["k", "s", "i"]
    assert halved.keys == ("k",)


def test_slices_of_sliding_windows_cross_once() -> None:
    halved, _ = halves("sliding")
    assert isinstance(halved.window, ops.Window)
    assert halved.slice_size == 15_000_000
    assert halved.crossing.names[:2] == ["s", "window_start"]


def test_groups_leave_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "MOST_GROUPS", 50)
    monkeypatch.setattr(phases, "ADDED_ROWS", 100)
    q = si.flow(TABLE.schema).group_by("n").agg(s=col("i").sum())
    (segment,) = segments(cut(q.op))
    halved = Phases(segment)
    found = list(halved.map(TABLE.to_batches(60), OPTIONS))
    assert len(found) > 5
    assert_same(pa.Table.from_batches(halved.final(found, OPTIONS)), q.collect(TABLE))


@pytest.mark.parametrize("name", ["each", "keys", "tumbling", "sliding", "join_group", "distinct", "having"])
def test_rows_may_cross_in_the_place_of_many_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "MOST_GROUPS", 3)
    monkeypatch.setattr(phases, "ADDED_ROWS", 100)
    monkeypatch.setattr(phases, "WORTH", 1e9)
    monkeypatch.setattr(phases, "KEPT_BYTES", 9000)
    halved, q = halves(name)
    assert halved.crossing_rows is not None
    task, places = Sent(halved, shuffle.placed(5)), shuffle.placed(5)
    cells = [cell for part in range(3) for cell in
             task.run(iter(TABLE.slice(250 * part, 250).select(halved.reads).to_batches(50)), OPTIONS)]
    assert {kind for cell in cells for kind in cell.column("kind").to_pylist()} == {0, 1}
    found = [batch for place in places for batch in
             Received(halved).run((c for c in cells if c.column("target")[0].as_py() == place), OPTIONS)]
    assert_same(pa.Table.from_batches(found, q.schema), q.collect(TABLE), tolerance=1e-9)


def test_groups_are_made_as_long_as_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "MOST_GROUPS", 3)
    monkeypatch.setattr(phases, "ADDED_ROWS", 100)
    halved, _ = halves("having")
    found = list(halved.map(TABLE.select(halved.reads).to_batches(50), OPTIONS, rows_too=True))
    assert all(batch.schema.names == halved.crossing.names for batch in found)
    halved, _ = halves("each")  # and always where nobody has asked for rows
    found = list(halved.map(TABLE.select(halved.reads).to_batches(50), OPTIONS))
    assert all(batch.schema.names == halved.crossing.names for batch in found)


def test_a_task_that_was_given_up_leaves_nothing_behind() -> None:
    q = si.flow(TABLE.schema).group_by("k").agg(n=si.count())
    (segment,) = segments(cut(q.op))
    halved = Phases(segment)

    def broken() -> Any:
        yield TABLE.to_batches()[0]
        raise OSError("the connection is gone")

    with pytest.raises(OSError, match="gone"):
        list(halved.map(broken(), OPTIONS))
    for _ in range(2):  # the second with the tables of the first
        found = list(halved.map(TABLE.to_batches(), OPTIONS))
        assert_same(pa.Table.from_batches(halved.final(found, OPTIONS)), q.collect(TABLE))


def test_limit_is_refused() -> None:
    (segment,) = segments(cut(si.flow(TABLE.schema).limit(3).op))
    with pytest.raises(BadArgument, match="limit depends on the order"):
        Phases(segment)


# --- blobs


@pytest.mark.parametrize("name", ["k", "s", "x", "i", "d", "t", "z", "b", "day"])
def test_the_hash_of_one_key_is_that_of_its_value(name: str) -> None:
    batch = TABLE.select([name]).combine_chunks().to_batches()[0].slice(0, 100)
    dtype = from_arrow_type(batch.schema.types[0])
    found = shuffle.hashes(batch, [name], OPTIONS).view(np.int64).tolist()
    q = si.from_arrow(pa.Table.from_batches([batch])).select(h=col(name).hash())
    assert found == q.collect()["h"].to_pylist()
    if pa.types.is_integer(batch.schema.types[0]):
        assert found == [hash_value(value, dtype) for value in batch.column(0).to_pylist()]


def test_equal_keys_have_equal_hashes() -> None:
    batch = pa.record_batch({"x": [0.0, -0.0, float("nan"), -float("nan"), None, None], "y": [1, 1, 2, 2, 3, 3]})
    found = shuffle.hashes(batch, ["x", "y"], OPTIONS)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[4] == found[5]
    assert len(set(found.tolist())) == 3
    assert shuffle.hashes(batch, ["y", "x"], OPTIONS)[0] != found[0]


def test_two_keys_may_be_one_column() -> None:
    batch = pa.record_batch({"x": [1.0, -0.0, None], "y": [1, 2, 2]})
    twice = pa.record_batch({"a": batch.column("x"), "b": batch.column("x")})
    assert shuffle.hashes(batch, ["x", "x"], OPTIONS).tolist() == shuffle.hashes(twice, ["a", "b"], OPTIONS).tolist()
    flow = si.flow(batch.schema).group_by(a=col("x"), b=col("x")).agg(n=col("y").n_unique())
    (first, *_) = segments(cut(flow.op))
    halves = Phases(first)
    crossing = [part for _, part in shuffle.routed(halves.map([batch], OPTIONS), halves.keys, 4, OPTIONS)]
    assert_same(pa.Table.from_batches(halves.final(crossing, OPTIONS)), flow.collect(pa.Table.from_batches([batch])))


def test_several_keys_are_spread() -> None:
    batch = pa.record_batch({"a": np.arange(100_000) % 300, "b": np.arange(100_000) // 300})
    counts = np.bincount(shuffle.key_groups(shuffle.hashes(batch, ["a", "b"], OPTIONS)), minlength=256)
    assert counts.min() > 250
    assert counts.max() < 550


def test_targets_are_ranges_of_key_groups() -> None:
    for targets in (1, 2, 3, 7, 200, 256):
        of = shuffle.target_of_groups(targets)
        assert (np.diff(of.astype(int)) >= 0).all()
        assert set(of.tolist()) == set(range(targets))
        sizes = np.bincount(of)
        assert sizes.max() - sizes.min() <= 1


def test_blobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "BLOB_BYTES", 4000)
    batch = pa.record_batch({"k": np.arange(10_000), "s": ["x" * 50] * 10_000})
    parts = list(shuffle.routed([batch], ["k"], 3, OPTIONS))
    assert max(shuffle.encoded(part).size for _, part in parts) < 8000
    assert sum(part.num_rows for _, part in parts) == 10_000
    cells = list(shuffle.cells(iter(parts), shuffle.placed(3)))
    assert pa.Table.from_batches(shuffle.opened(cells, [batch.schema])).num_rows == 10_000


def test_spark_puts_a_target_into_its_partition(spark: Any) -> None:
    from pyspark.sql import functions

    for count in (1, 3, 200):
        df = spark.createDataFrame([(number,) for number in shuffle.placed(count)], "target int")
        found = df.repartition(count, "target").select("target", functions.spark_partition_id().alias("at")).collect()
        assert {row.target: row.at for row in found} == {number: k for k, number in enumerate(shuffle.placed(count))}
