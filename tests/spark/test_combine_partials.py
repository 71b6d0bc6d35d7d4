"""Combining and finishing of partial groups by numpy gives the same as compiled code."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from random import Random

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.compiler import compile_flow
from scalein.errors import ComputeError
from scalein.exec.aggregate_operator import aggregate_node
from scalein.exec.bounded import CombineByNumber, Program
from scalein.ir.partials import TwoPhase, two_phase
from scalein.options import Options
from scalein.spark.streaming.combine_partials import Combiner
from tests.same import assert_same

OPTIONS = Options.make(workers=1)
NAN = float("nan")
SCHEMA = pa.schema([("k", pa.int64()), ("i", pa.int64()), ("small", pa.int8()), ("u", pa.uint64()), ("f", pa.float64()),
                    ("g", pa.float32()), ("t", pa.timestamp("us")), ("s", pa.string()), ("d", pa.decimal128(12, 2)),
                    ("b", pa.bool_())])  # fmt: skip
FLOWS: dict[str, Flow] = {
    "numbers": si.flow(SCHEMA).group_by("k").agg(
        n=si.count(), i=col("i").sum(), m=col("i").mean(), u=col("u").sum(), f=col("f").sum(), fm=col("f").mean(),
        least=col("f").min(), most=col("f").max(), g=col("g").min(), small=col("small").max(), c=col("i").count()),
    "times": si.flow(SCHEMA).group_by("k", si.tumbling("t", "10s")).agg(first=col("t").min(), last=col("t").max()),
    "text": si.flow(SCHEMA).group_by("k").agg(least=col("s").min(), most=col("s").max(), n=si.count()),
    "others": si.flow(SCHEMA).group_by("k").agg(d=col("d").sum(), least=col("d").min(), b=col("b").max()),
}  # fmt: skip


def rows(random: Random, count: int) -> pa.Table:
    big = 1 << 40
    return pa.Table.from_pylist([{
        "k": random.choice([None, 1, 2, 3, 4]), "i": random.choice([None, -1, random.randint(-big, big)]),
        "small": random.choice([None, -5, 7]), "u": random.choice([None, random.randint(0, 1 << 50)]),
        "f": random.choice([None, 0.5, -2.0, NAN, float("inf")]), "g": random.choice([None, 1.5, NAN]),
        "t": datetime(2026, 1, 1) + timedelta(seconds=random.randint(0, 30)), "s": random.choice([None, "", "a", "bc"]),
        "d": random.choice([None, Decimal("12.34"), Decimal("-0.01")]), "b": random.choice([None, True, False]),
    } for _ in range(count)], SCHEMA)  # fmt: skip


def partials(flow: Flow, random: Random, count: int) -> tuple[TwoPhase, pa.RecordBatch]:
    """So many partial groups, each of one row."""
    two = two_phase(aggregate_node(compile_flow(flow.op)))
    names = [*two.keys.names, *two.values.names]
    return two, pa.concat_batches(one_group_per_row(two, names, rows(random, count)))


def one_group_per_row(two: TwoPhase, names: list[str], table: pa.Table) -> list[pa.RecordBatch]:
    program = Program(two.partial)
    return [batch.select(names) for row in range(table.num_rows)
            for batch in program.run(table.slice(row, 1).to_batches(), OPTIONS)]


@pytest.mark.parametrize("name", FLOWS)
def test_numpy_and_compiled_code_combine_alike(name: str) -> None:
    random = Random(name)
    two, given = partials(FLOWS[name], random, 60)
    combiner = Combiner(two, OPTIONS)
    numbers = np.array([*range(7), *(random.randrange(7) for _ in range(53))])
    got, want = combiner.combine_numbered(given, numbers), CombineByNumber(two).combine(given, numbers, OPTIONS)
    assert_same(pa.Table.from_batches([got]), pa.Table.from_batches([want]).cast(got.schema), ordered=True)
    pairs = combiner.combine_pairs(given.slice(0, 30), given.slice(30))
    want = CombineByNumber(two).combine(given, np.tile(np.arange(30), 2), OPTIONS)
    got = pa.RecordBatch.from_arrays(pairs, names=combiner.names)
    assert_same(pa.Table.from_batches([got]), pa.Table.from_batches([want]).cast(got.schema), ordered=True)


@pytest.mark.parametrize("name", ["numbers", "times"])
def test_numpy_and_compiled_code_finish_alike(name: str) -> None:
    two, given = partials(FLOWS[name], Random(name), 80)
    combined = Program(two.combine).run([given], OPTIONS)
    whole = pa.concat_batches([batch.select(given.schema.names) for batch in combined])
    got = Combiner(two, OPTIONS).finish(whole)
    assert got is not None
    want = pa.Table.from_batches(list(Program(two.final).run([given], OPTIONS)))
    assert_same(pa.Table.from_batches([got]), want, tolerance=1e-12)


def test_other_types_are_left_to_compiled_code() -> None:
    two, given = partials(FLOWS["others"], Random(1), 10)
    assert Combiner(two, OPTIONS).finish(given) is None


def test_an_overflowing_sum_is_left_to_compiled_code() -> None:
    flow = si.flow(SCHEMA).group_by("k").agg(i=col("i").sum())
    two = two_phase(aggregate_node(compile_flow(flow.op)))
    table = pa.table({"k": [1, 1, 2], "i": [(1 << 63) - 1, 1, -(1 << 63)]})
    given = pa.concat_batches(one_group_per_row(two, [*two.keys.names, *two.values.names], table))
    combiner = Combiner(two, OPTIONS)
    assert combiner.finish(given) is not None
    summed = combiner.combine_numbered(given, np.array([0, 0, 1]))
    whole = pa.RecordBatch.from_arrays([pa.array([1, 2]), *summed.columns], schema=given.schema)
    assert combiner.finish(whole) is None
    with pytest.raises(ComputeError):
        list(Program(two.final).run([whole], OPTIONS))
