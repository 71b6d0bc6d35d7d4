"""Aggregation in two phases, and by a table that stays: the same groups as in one."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.compiler import compile_flow
from scalein.exec.bounded import PreAggregationProgram, Program
from scalein.ir.partials import TwoPhase, finished_rows, fits, two_phase
from scalein.ir.physical import Node, Pipeline, WindowAggregate
from scalein.options import Options
from tests.same import assert_same

SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("t", pa.timestamp("ms")), ("x", pa.int64()),
                    ("u", pa.uint64()), ("f", pa.float64()), ("d", pa.decimal128(38, 2)), ("b", pa.bool_())])
WINDOWS = {"none": None, "tumbling": si.tumbling("t", "10s"), "sliding": si.sliding("t", "10s", every="4s")}
KEYS = {"none": [], "number": ["k"], "text": ["s"], "both": ["s", "k"]}


def rows(random: Random, count: int) -> pa.Table:
    def column(make: object, nulls: float = 0.15) -> list[object]:
        return [None if random.random() < nulls else make() for _ in range(count)]  # type: ignore[operator]

    big = [0, 1, -1, 2**63 - 1, -(2**63)]
    return pa.table({
        "k": column(lambda: random.choice([-1, 0, 7, 2**40])),
        "s": column(lambda: random.choice(["", "a", "a text that is longer than its cell", "é"])),
        "t": column(lambda: random.randrange(-30_000, 30_000), 0.05),
        "x": column(lambda: random.choice([*big, random.randrange(1000)])),
        "u": column(lambda: random.choice([0, 2**64 - 1, random.randrange(1000)])),
        "f": column(lambda: random.choice([0.0, -0.0, float("nan"), float("inf"), random.random()])),
        "d": column(lambda: random.randrange(-(10**9), 10**9)),
        "b": column(lambda: random.random() < 0.5),
    }, schema=SCHEMA)  # fmt: skip


def flow(keys: str, window: str) -> Flow:
    spec = WINDOWS[window]
    groups = si.flow(SCHEMA).filter(col("f").is_null() | ~(col("f") == 0.5)).group_by(
        *KEYS[keys], *([] if spec is None else [spec]))
    return groups.agg(n=si.count(), c=col("x").count(), sx=(col("x") % 1000).sum(), mx=col("x").max(),
                      mn=col("x").min(), m=(col("x") % 1000).mean(), su=(col("u") % 10).sum(), uu=col("u").max(),
                      f=(col("k") / 4.0).sum(), fm=col("f").max(), fn=col("f").min(), d=col("d").sum(),
                      dm=col("d").mean(), smin=col("s").min(), smax=col("s").max(), b=col("b").max())  # fmt: skip


def phases(asked: Flow) -> TwoPhase:
    node: Node = compile_flow(asked.op)
    while not isinstance(node, WindowAggregate):
        node = node.input  # type: ignore[union-attr]
    assert fits(node.table)
    return two_phase(node)


def pieces(table: pa.Table, random: Random) -> Iterator[list[pa.RecordBatch]]:
    start = 0
    while start < len(table):
        size = random.choice([1, 3, 50])
        yield table.slice(start, size).to_batches(max_chunksize=random.choice([1, 7, 100]))
        start += size


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32), keys=st.sampled_from(sorted(KEYS)), window=st.sampled_from(sorted(WINDOWS)),
       workers=st.integers(1, 3))
def test_partial_groups_finish_as_whole_ones(seed: int, keys: str, window: str, workers: int) -> None:
    random = Random(seed)
    table, asked = rows(random, random.choice([0, 1, 20, 200])), flow(keys, window)
    options = Options.make(workers=workers)
    two = phases(asked)
    partial, combine, final = Program(two.partial), Program(two.combine), Program(two.final)
    standing = PreAggregationProgram(two.partial)
    names = [field.name for field in two.final.input.schema]
    partials: list[pa.RecordBatch] = []
    stood: list[pa.RecordBatch] = []
    for piece in pieces(table, random):
        partials += [batch.select(names) for batch in partial.run(piece, options)]
        if random.random() < 0.3:
            partials = [batch.select(names) for batch in combine.run(partials, options)]
        standing.add(iter(piece), Options.make(workers=random.randint(1, 3)))
        if random.random() < 0.3:
            stood += [batch.select(names) for batch in standing.drain()]
    stood += [batch.select(names) for batch in standing.drain()]
    want = asked.collect(table)
    for given_ in (partials, stood):
        got = pa.Table.from_batches(list(final.run(given_, options)), want.schema)
        assert_same(got, want, ordered=False)


@pytest.mark.parametrize("seed", range(4))
def test_whole_groups_are_finished_row_by_row(seed: int) -> None:
    random, options = Random(seed), Options.make(workers=2)
    table = rows(random, 200)
    asked = si.flow(SCHEMA).group_by("s", "k").agg(
        n=si.count(), c=col("x").count(), mx=col("x").max(), mn=col("u").min(), f=(col("k") / 4.0).sum(),
        m=(col("k") / 4.0).mean(), fm=col("f").max(), smin=col("s").min(), b=col("b").max())
    two = phases(asked)
    items = finished_rows(two)
    assert items is not None
    names = [field.name for field in two.final.input.schema]
    whole = [batch.select(names) for batch in Program(two.partial).run(table.to_batches(), options)]
    got = Program(Pipeline(two.final.input, (), items)).run(whole, options)
    want = asked.collect(table)
    assert_same(pa.Table.from_batches(list(got)).cast(want.schema), want, ordered=False)
    assert finished_rows(phases(flow("text", "none"))) is None  # sums of integers are checked by the second phase


def test_sums_of_integers_overflow_only_as_a_whole() -> None:
    asked = si.flow({"x": pa.int64()}).group_by().agg(s=col("x").sum())
    two, options = phases(asked), Options.make(workers=1)
    parts = [batch.select(["#acc0", "#acc1", "#acc2"]) for value in (2**63 - 1, 2**63 - 1, -(2**63))
             for batch in Program(two.partial).run([pa.record_batch({"x": [value]})], options)]  # fmt: skip
    final = Program(two.final)
    assert next(final.run(parts, options)).to_pylist() == [{"s": 2**63 - 2}]
    with pytest.raises(si.ScaleinError, match="integer overflow in the sum `s`"):
        list(final.run(parts[:2], options))


@pytest.mark.parametrize("name", ["n_unique", "collect"])
def test_aggregates_without_columns_do_not_fit(name: str) -> None:
    node = compile_flow(si.flow({"x": pa.int64()}).group_by().agg(a=getattr(col("x"), name)()).op)
    assert isinstance(node, WindowAggregate)
    assert not fits(node.table)
