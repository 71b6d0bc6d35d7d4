"""Combining and finishing partial groups side by side gives the same as grouping them by key in a table."""

from __future__ import annotations

from dataclasses import replace
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
from scalein.errors import ComputeError, InternalError
from scalein.exec.aggregate_operator import aggregate_node
from scalein.exec.bounded import Program
from scalein.exec.combine import Combiner
from scalein.ir.partials import TwoPhase, fits, two_phase
from scalein.ir.tables import AccKind
from scalein.options import Options
from tests.examples import AGGS, FLOW
from tests.same import assert_same

OPTIONS = Options.make(workers=1)
NAN = float("nan")
SCHEMA = pa.schema([("k", pa.int64()), ("i", pa.int64()), ("small", pa.int8()), ("u", pa.uint64()), ("f", pa.float64()),
                    ("g", pa.float32()), ("t", pa.timestamp("us")), ("s", pa.string()), ("d", pa.decimal128(12, 2)),
                    ("wide", pa.decimal128(38, 2)), ("b", pa.bool_()), ("short", pa.int16())])  # fmt: skip
FLOWS: dict[str, Flow] = {
    "numbers": si.flow(SCHEMA).group_by("k").agg(
        n=si.count(), i=col("i").sum(), m=col("i").mean(), u=col("u").sum(), f=col("f").sum(), fm=col("f").mean(),
        least=col("f").min(), most=col("f").max(), g=col("g").min(), small=col("small").max(), c=col("i").count()),
    "times": si.flow(SCHEMA).group_by("k", si.tumbling("t", "10s")).agg(first=col("t").min(), last=col("t").max()),
    "numbers of time": si.flow(SCHEMA).group_by("k", si.tumbling("short", 4)).agg(first=col("short").min()),
    "text": si.flow(SCHEMA).group_by("k").agg(least=col("s").min(), most=col("s").max(), n=si.count()),
    "others": si.flow(SCHEMA).group_by("k").agg(d=col("d").sum(), m=col("d").mean(), least=col("d").min(),
                                                b=col("b").max(), w=col("wide").sum()),
    "spread": si.flow(SCHEMA).group_by("k").agg(v=col("i").var(), d=col("f").std(), s=col("g").std()),
    "pairs": si.flow(SCHEMA).group_by("k").agg(v=si.cov("i", "g"), c=si.corr("small", "i")),
    "rows": si.flow(SCHEMA).group_by("k").agg(first=col("i").first(), last=col("d").last(), b=col("b").arg_max("f"),
                                              t=col("t").arg_min("small")),
    "rows of text": si.flow(SCHEMA).group_by("k").agg(first=col("s").first(), a=col("i").arg_min("s")),
}  # fmt: skip


def rows(random: Random, count: int) -> pa.Table:
    big = 1 << 40
    return pa.Table.from_pylist([{
        "k": random.choice([None, 1, 2, 3, 4]), "i": random.choice([None, -1, random.randint(-big, big)]),
        "small": random.choice([None, -5, 7]), "u": random.choice([None, random.randint(0, 1 << 50)]),
        "f": random.choice([None, 0.5, -2.0, NAN, float("inf")]), "g": random.choice([None, 1.5, -3.0, NAN]),
        "t": datetime(2026, 1, 1) + timedelta(seconds=random.randint(0, 30)),
        "s": random.choice([None, "", "a", "bc", "longer than twelve bytes"]),
        "d": random.choice([None, Decimal("12.34"), Decimal("-0.01")]),
        "wide": random.choice([None, Decimal(random.randint(-10**33, 10**33)).scaleb(-2)]),
        "b": random.choice([None, True, False]), "short": random.randint(-9, 9),
    } for _ in range(count)], SCHEMA)  # fmt: skip


def phases(flow: Flow) -> TwoPhase:
    return two_phase(aggregate_node(compile_flow(flow.op)))


def partials(flow: Flow, random: Random, count: int) -> tuple[TwoPhase, pa.RecordBatch]:
    """So many partial groups, each of one row of the input."""
    two, table = phases(flow), rows(random, count)
    program, names = Program(two.partial), [*two.keys.names, *two.values.names]
    found = []
    for number in range(count):
        for batch in program.run(table.slice(number, 1).to_batches(), OPTIONS):
            columns = {name: batch.column(name) for name in names}
            for name in names:
                if name.endswith("_row"):  # the number of the row in the whole input
                    has_row = (pa.compute.greater_equal(columns[name], 0), pa.compute.less(columns[name], 1 << 62))
                    columns[name] = pa.compute.if_else(pa.compute.and_(*has_row), pa.array([number]), columns[name])
            found.append(pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(
                [batch.schema.field(name) for name in names])))
    return two, pa.concat_batches(found)


def by_key(two: TwoPhase, given: pa.RecordBatch, numbers: np.ndarray) -> pa.Table:
    """The same groups by the engine's own tables, under the number as their only key; in the order of the numbers."""
    columns = dict(zip(given.schema.names, given.columns, strict=True)) | {"k": pa.array(numbers)}
    if "window_start" in columns:
        columns["window_start"] = pa.array(np.zeros(len(numbers), int)).cast(given.schema.field("window_start").type)
    rows = pa.RecordBatch.from_arrays(list(columns.values()), schema=given.schema)
    found = pa.Table.from_batches([batch.select(given.schema.names)
                                   for batch in Program(two.combine).run([rows], OPTIONS)])
    return found.sort_by("k").select(two.values.names)


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("seed", range(3))
def test_side_by_side_is_as_by_key(name: str, seed: int) -> None:
    random = Random(f"{name} {seed}")
    two, given = partials(FLOWS[name], random, 60)
    combiner = Combiner(two, OPTIONS)
    numbers = np.array([*range(7), *(random.randrange(7) for _ in range(53))])
    if seed == 2:
        numbers.sort()
    got = pa.Table.from_batches([combiner.combine_numbered(given, numbers)])
    assert_same(got, by_key(two, given, numbers).cast(got.schema), ordered=True, tolerance=1e-9)
    pairs = combiner.combine_pairs(given.slice(0, 30), given.slice(30))
    got = pa.table(pairs, names=combiner.names)
    want = by_key(two, given, np.tile(np.arange(30), 2))
    assert_same(got, want.cast(got.schema), ordered=True, tolerance=1e-9)


@pytest.mark.parametrize("name", [name for name in FLOWS if "text" not in name])
def test_groups_are_finished_in_their_order(name: str) -> None:
    two, given = partials(FLOWS[name], Random(name), 80)
    combined = Program(two.combine).run([given], OPTIONS)
    whole = pa.concat_batches([batch.select(given.schema.names) for batch in combined])
    got = Combiner(two, OPTIONS).finish(whole)
    assert got is not None
    assert [got.column(key.name).to_pylist() for key in two.final.table.keys] == [
        whole.column(key.name).to_pylist() for key in two.final.table.keys]
    want = pa.Table.from_batches(list(Program(two.final).run([given], OPTIONS)))
    assert_same(pa.Table.from_batches([got]), want, tolerance=1e-9)


@pytest.mark.parametrize("safe", [False, True])
def test_many_columns(safe: bool) -> None:
    """Kernels of many columns are compiled in parts; safe ones check every access."""
    aggs = {f"{fn} of {name} {k}": getattr(col(name) + k, fn)()
            for k in range(5) for name in ("i", "g") for fn in ("sum", "mean", "min", "max", "var")}
    two, given = partials(si.flow(SCHEMA).group_by("k").agg(**aggs), Random(7), 20)
    assert len(two.values.names) > 48
    combiner = Combiner(two, replace(OPTIONS, safe=safe))
    got = pa.table(combiner.combine_pairs(given.slice(0, 10), given.slice(10)), names=combiner.names)
    assert_same(got, by_key(two, given, np.tile(np.arange(10), 2)).cast(got.schema), ordered=True, tolerance=1e-9)


def test_text_is_finished_by_a_table() -> None:
    two, given = partials(FLOWS["text"], Random(1), 10)
    assert Combiner(two, OPTIONS).finish(given) is None


def test_a_sum_that_overflows_is_an_error() -> None:
    two = phases(si.flow(SCHEMA).group_by("k").agg(i=col("i").sum()))
    table = pa.table({"k": [1, 1, 2], "i": [(1 << 63) - 1, 1, -(1 << 63)]})
    program, names = Program(two.partial), [*two.keys.names, *two.values.names]
    given = pa.concat_batches([batch.select(names) for row in range(3)
                               for batch in program.run(table.slice(row, 1).to_batches(), OPTIONS)])
    combiner = Combiner(two, OPTIONS)
    assert combiner.finish(given) is not None
    summed = combiner.combine_numbered(given, np.array([0, 0, 1]))
    whole = pa.RecordBatch.from_arrays([pa.array([1, 2]), *summed.columns], schema=given.schema)
    with pytest.raises(ComputeError, match="integer overflow in the sum `i`"):
        combiner.finish(whole)


def test_a_decimal_sum_that_overflows_is_an_error() -> None:
    two = phases(si.flow(SCHEMA).group_by("k").agg(w=col("wide").sum()))
    table = pa.table({"k": [1], "wide": pa.array([Decimal(9 * 10**35)], SCHEMA.field("wide").type)})
    (given,) = (batch.select([*two.keys.names, *two.values.names])
                for batch in Program(two.partial).run(table.to_batches(), OPTIONS))
    with pytest.raises(ComputeError, match="decimal overflow"):
        Combiner(two, OPTIONS).combine_pairs(given, given)


@pytest.mark.parametrize("name", AGGS)
def test_an_accumulator_without_a_merge_is_refused_by_name(name: str) -> None:
    node = aggregate_node(compile_flow(FLOW.group_by("y").agg(out=AGGS[name]).op))
    if fits(node.table):
        assert two_phase(node).combine.table.accs
        return
    kinds = {acc.kind for acc in node.table.accs} - {AccKind.ROWS, AccKind.VALID}
    with pytest.raises(InternalError, match="partial groups of the accumulator '({})' cannot be merged".format(
            "|".join(kind.value for kind in kinds))):
        two_phase(node)
