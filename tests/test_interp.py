"""The interpreter where no other engine can be asked: its own interface, and meanings worth spelling out."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein import ComputeError, col, interp, when
from scalein.api.column import Column
from scalein.dtypes import Schema
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Agg, Expr, NamedAgg
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.ops import Aggregate, Project, Source

BATCH = pa.record_batch({
    "s": pa.array(["Straße", None, "ÀB", ""]).dictionary_encode(),
    "x": pa.array([1, 2, None, 4], pa.int32()),
    "t": pa.array([0, 10**6, None, -1], pa.int64()).cast(pa.timestamp("us", "Asia/Kolkata")),
})  # fmt: skip


def typed(column: Column) -> Expr:
    """The expression of a column, resolved against the batch."""
    op = si.from_arrow(BATCH).select(out=column).op
    assert isinstance(op, Project)
    return op.items[0].expr


@pytest.mark.parametrize(
    ("column", "want"),
    [
        (col("s"), pa.array(["Straße", None, "ÀB", ""])),
        (col("s").str.lower(), pa.array(["straße", None, "àb", ""])),
        (col("x") * 2, pa.array([2, 4, None, 8], pa.int32())),
        (col("x").cast(pa.string()), pa.array(["1", "2", None, "4"])),
        (col("t").dt.hour(), pa.array([5, 5, None, 5], pa.int32())),
        (col("t").dt.minute(), pa.array([30, 30, None, 29], pa.int32())),
        (si.lit("a"), pa.array(["a"] * 4)),
    ],
)
def test_evaluate_gives_an_array_of_the_expressions_type(column: Column, want: pa.Array) -> None:
    assert interp.evaluate(typed(column), BATCH).equals(want)
    table = pa.Table.from_batches([BATCH.slice(0, 1), BATCH.slice(1)])
    assert interp.evaluate(typed(column), table).equals(want)
    assert interp.evaluate(typed(column), BATCH.slice(2)).equals(want.slice(2))
    assert interp.evaluate(typed(column), BATCH.slice(0, 0)).type == want.type


def test_parsing_fails_only_in_the_branch_taken() -> None:
    number = col("s").cast(pa.int64())
    with pytest.raises(ComputeError, match="impossible cast in `s"):
        interp.evaluate(typed(number), BATCH)
    safe = when(col("x") == 4).then(1).otherwise(number)
    with pytest.raises(ComputeError):
        interp.evaluate(typed(safe), BATCH)
    never = when(col("x").is_null() | (col("x") > 0)).then(1).otherwise(number)
    assert interp.evaluate(typed(never), BATCH).to_pylist() == [1, 1, 1, 1]


def test_a_source_without_columns_still_has_rows() -> None:
    source = si.from_arrow(pa.Table.from_batches([BATCH])).op
    assert isinstance(source, Source)
    pruned = Source(source.name, source.arrow, (), source.data)
    dtype = Schema.from_arrow(pa.schema([("n", pa.int64())])).fields[0].dtype
    op = Aggregate(pruned, (), None, (NamedAgg("n", Agg("count", (), dtype, False)),))
    assert interp.run(op).to_pydict() == {"n": [4]}


def test_sums_of_floats_are_rounded_once() -> None:
    table = pa.table({"x": [1e16, 1.0, -1e16, 1.0], "y": [math.inf, 1.0, -math.inf, 2.0]})
    made = {"x": col("x").sum(), "y": col("y").sum(), "v": col("y").var()}
    got = si.from_arrow(table).group_by().agg(**made).collect(engine="interp").to_pylist()[0]
    assert got["x"] == 2.0
    assert math.isnan(got["y"])
    assert math.isnan(got["v"])


def test_unbound_flows_ask_for_data() -> None:
    with pytest.raises(si.ScaleinError):
        interp.run(si.flow(BATCH.schema).op)


def test_every_function_and_aggregate_has_a_meaning() -> None:
    """Names that appear nowhere in the interpreter's sources have none."""
    text = "".join(path.read_text(encoding="utf-8") for path in Path(interp.__file__).parent.glob("*.py"))
    known = {"between"}  # gone after resolve
    calendar = {name for name in REGISTRY if name.startswith("dt_")}
    missing = [name for name in (*REGISTRY, *AGGREGATES) if f'"{name}"' not in text and name not in known | calendar]
    missing += [name for name in calendar if f'"{name.removeprefix("dt_")}"' not in text and f'"{name}"' not in text]
    assert not missing
