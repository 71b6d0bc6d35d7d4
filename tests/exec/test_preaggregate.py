"""Pre-aggregation across batches: time bounds cover all rows, small batches are coalesced, programs are reusable."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.compiler import compile_flow
from scalein.exec.aggregate_operator import aggregate_node
from scalein.exec.bounded import PreAggregationProgram, Program
from scalein.exec.fragments import cut
from scalein.exec.morsels import COALESCED_ROWS, SMALL_ROWS, coalesce
from scalein.ir.partials import two_phase
from scalein.options import Options


def node_of(flow: Flow) -> object:
    return aggregate_node(compile_flow(cut(flow.op)[0].first.op))


def batches(n: int, size: int, kind: pa.DataType) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(n)
    table = pa.table({"t": pa.array(rng.integers(0, 5000, n), kind), "k": rng.integers(0, 9, n), "f": rng.random(n)})
    return list(table.to_batches(max_chunksize=size))


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.timestamp("ms")])
@pytest.mark.parametrize("share", [-1.0, 0.5, 0.999, 2.0])  # of the rows that a filter drops; -1: there is none
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("joins", [False, True])
def test_time_bounds_cover_all_rows(kind: pa.DataType, share: float, workers: int, joins: bool) -> None:
    given = batches(5000, 700, kind)
    flow = si.from_batches(given)
    flow = flow if share < 0 else flow.filter(col("f") > share)
    flow = flow.join(pa.table({"k": [3, 4], "name": ["x", "y"]}), on="k") if joins else flow
    size = "100ms" if pa.types.is_timestamp(kind) else 100
    flow = flow.group_by("k", si.tumbling("t", size)).agg(n=si.count())
    program = PreAggregationProgram(two_phase(node_of(flow)).partial, track_times=True)  # type: ignore[arg-type]
    for _ in range(2):
        rows = [batch.select(program.node.input.schema.names) for batch in given]
        program.add(rows, Options.make(workers=workers))
        want = [(min(times), max(times)) for times in (b.column("t").cast(pa.int64()).to_pylist() for b in given)]
        assert program.time_bounds(rows) == want
        list(program.drain())


def test_time_bounds_are_unknown_with_nulls() -> None:
    table = pa.table({"t": [1, None, 300], "k": [1, 1, 2]})
    flow = si.from_arrow(table).group_by("k", si.tumbling("t", 100)).agg(n=si.count())
    program = PreAggregationProgram(two_phase(node_of(flow)).partial, track_times=True)  # type: ignore[arg-type]
    program.add(table.to_batches(), Options.make(workers=1))
    assert program.time_bounds(table.to_batches()) is None


def test_small_batches_are_coalesced() -> None:
    rows = pa.table({"x": list(range(3 * COALESCED_ROWS))})
    given = [*rows.slice(0, COALESCED_ROWS).to_batches(max_chunksize=100),
             *rows.slice(COALESCED_ROWS).to_batches(SMALL_ROWS)]  # fmt: skip
    found = list(coalesce(given))
    assert len(found) < len(given) / 10
    assert pa.Table.from_batches(found).equals(rows)
    coded = pa.table({"s": pa.array(["a", "b"]).dictionary_encode()}).to_batches()
    assert list(coalesce(coded * 3)) == coded * 3


def test_a_program_is_reused_for_small_inputs() -> None:
    """The second run reuses the operators of the first; other nulls, or many rows, must not give a wrong result."""
    table = pa.table({"k": [1, 2, 1], "x": [1.5, 2.5, 3.5]})

    def grouped(given: pa.Table) -> Flow:
        return si.from_arrow(given).group_by("k").agg(s=col("x").sum(), n=col("x").count()).filter(col("n") > 0)

    flow = grouped(table)
    program = Program(compile_flow(cut(flow.op)[0].first.op))
    many = pa.table({"k": np.arange(100_000) % 7, "x": np.ones(100_000)})
    holes = pa.table({"k": [None, 2, None], "x": [1.0, None, 2.0]}, schema=table.schema)
    for given in (table, table, holes, table, many, holes, table.slice(0, 1)):
        got = pa.Table.from_batches(program.run(given.to_batches(), Options.make(workers=2)), flow.schema)
        assert got.sort_by("k").equals(grouped(given).collect().sort_by("k"))
