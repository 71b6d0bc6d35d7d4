"""The oracle where no other engine can be asked: its independence, its interface, and meanings worth spelling out."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein import ComputeError, col, when
from scalein.api.column import Column
from scalein.dtypes import Schema
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Agg, Expr, NamedAgg
from scalein.ir.ops import Aggregate, Project, Source
from tests import oracle
from tests.examples import FUNCTIONS
from tests.oracle import aggregates, functions
from tests.oracle.functions import hash_value, xxh64

FOLDER = Path(oracle.__file__).parent
# What it shares with the engine: the plan, its types, and how data of all kinds is read.
SHARED = ("scalein.ir.", "scalein.dtypes", "scalein.errors", "scalein.from_arrow")
FOREIGN = ("numpy", "pyarrow.compute", "scalein.arrow_functions", "scalein.exec", "scalein.kernels",
           "scalein.llvm_backend")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_it_shares_nothing_with_the_engine_but_the_plan(path: Path) -> None:
    for name in imported(path):
        top = name.partition(".")[0]
        if top == "scalein":
            assert name.startswith(SHARED), f"{path.name} imports {name}"
        elif top == "tests":
            assert name.startswith("tests.oracle"), f"{path.name} imports {name}"
        else:
            assert name == "pyarrow" or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_nothing_foreign_is_loaded_by_it() -> None:
    """`pyarrow.lib` loads numpy for itself; so only what is new counts."""
    code = ("import sys, pyarrow, scalein.ir.ops, scalein.ir.printer; before = set(sys.modules); import tests.oracle;"
            f"print([name for name in set(sys.modules) - before if name.startswith({FOREIGN!r})])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=FOLDER.parent.parent)
    assert done.stdout.strip() == "[]"


def test_every_function_and_aggregate_has_a_meaning() -> None:
    assert set(functions.FUNCTIONS) | functions.LAZY == set(FUNCTIONS)
    assert not set(functions.FUNCTIONS) & functions.LAZY
    assert set(aggregates.AGGREGATES) == set(AGGREGATES)


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
    assert oracle.evaluate(typed(column), BATCH).equals(want)
    table = pa.Table.from_batches([BATCH.slice(0, 1), BATCH.slice(1)])
    assert oracle.evaluate(typed(column), table).equals(want)
    assert oracle.evaluate(typed(column), BATCH.slice(2)).equals(want.slice(2))
    assert oracle.evaluate(typed(column), BATCH.slice(0, 0)).type == want.type


def test_parsing_fails_only_in_the_branch_taken() -> None:
    number = col("s").cast(pa.int64())
    with pytest.raises(ComputeError, match="impossible cast in `s"):
        oracle.evaluate(typed(number), BATCH)
    safe = when(col("x") == 4).then(1).otherwise(number)
    with pytest.raises(ComputeError):
        oracle.evaluate(typed(safe), BATCH)
    never = when(col("x").is_null() | (col("x") > 0)).then(1).otherwise(number)
    assert oracle.evaluate(typed(never), BATCH).to_pylist() == [1, 1, 1, 1]


def test_all_that_fails_is_known() -> None:
    table = pa.table({"a": [1, 0, 2**63 - 1], "b": [0, 1, 1]})
    flow = si.from_arrow(table).select(x=col("a") // col("b"), y=col("a") + col("b"), z=1 // (col("a") - 1))
    _, failures = oracle.relations.attempt(flow.op)
    assert [error.what for error in failures.errors] == [
        "division by zero in `a // b`", "overflow in `a + b`", "division by zero in `1 // (a - 1)`"]


def test_a_source_without_columns_still_has_rows() -> None:
    source = si.from_arrow(pa.Table.from_batches([BATCH])).op
    assert isinstance(source, Source)
    pruned = Source(source.name, source.arrow, (), source.data)
    dtype = Schema.from_arrow(pa.schema([("n", pa.int64())])).fields[0].dtype
    op = Aggregate(pruned, (), None, (NamedAgg("n", Agg("count", (), dtype, False)),))
    assert oracle.run(op).to_pydict() == {"n": [4]}


def test_sums_of_floats_are_rounded_once() -> None:
    table = pa.table({"x": [1e16, 1.0, -1e16, 1.0], "y": [math.inf, 1.0, -math.inf, 2.0]})
    made = {"x": col("x").sum(), "y": col("y").sum(), "v": col("y").var()}
    got = oracle.collect(si.from_arrow(table).group_by().agg(**made)).to_pylist()[0]
    assert got["x"] == 2.0
    assert math.isnan(got["y"])
    assert math.isnan(got["v"])


def test_unbound_flows_ask_for_data() -> None:
    with pytest.raises(si.ScaleinError):
        oracle.run(si.flow(BATCH.schema).op)


def test_the_hash_is_that_of_its_authors_and_of_spark() -> None:
    assert xxh64(b"", 0) == 0xEF46DB3751D8E999
    assert xxh64(b"abc", 0) == 0x44BC2CF5AD770999
    assert xxh64(b"Nobody inspects the spammish repetition", 0) == 0xFBCEA83C8A378BF1
    assert hash_value("Spark", Schema.from_arrow(pa.schema([("s", pa.string())])).fields[0].dtype) == (
        -4294468057691064905)
