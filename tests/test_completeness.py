"""Nothing is half there: every op, function and aggregate has a meaning, machine code and a differential test."""

from __future__ import annotations

import inspect

import pyarrow as pa
import pytest

from scalein import arrow_functions, col
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.api.methods import DtMethods, ListMethods, StrMethods, StructMethods
from scalein.compiler import compile_flow
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.functions.registry import REGISTRY, Nulls, declare, is_host
from scalein.ir.physical import WindowAggregate, walk_nodes
from scalein.ir.rewrite import walk_ops
from scalein.ir.tables import AccKind
from scalein.llvm_backend.functions.registry import LAZY, LOWERINGS, lowers
from tests.duck import UNTRANSLATED
from tests.engines import by_engine, by_oracle, compare, compare_with_duckdb
from tests.examples import AGGS, EXAMPLES, FLOW, FUNCTIONS, OPS, calls

IN_JOBS = {ops.BufferedJoin, ops.JoinSides}  # forms of others, which plans of bounded runs do not have
IN_SQL = {ops.Reordered}  # it gives its input's rows: tests/sql/test_join_order.py


def _check(flow: Flow, *, translated: bool = True) -> None:
    """Engine = oracle, and oracle = DuckDB where the plan can be translated."""
    want = by_oracle(flow.op)
    compare(by_engine(flow), want, tolerance=1e-12)
    assert compare_with_duckdb(want, flow, ordered=False, tolerance=1e-12) == translated, "DuckDB could be asked"


def test_there_is_an_example_of_everything() -> None:
    assert set(OPS) == {vars(ops)[name] for name in ops.__all__} - {
        ops.Op, ops.By, ops.LAST_WINDOW, *IN_JOBS, *IN_SQL}
    assert set(EXAMPLES) == set(FUNCTIONS)
    assert set(AGGS) == set(AGGREGATES)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_every_op_gives_what_it_means(op: type) -> None:
    assert any(isinstance(each, op) for each in walk_ops(OPS[op].op))
    _check(OPS[op], translated=op not in (ops.MapBatches, ops.Process))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_gives_what_it_means(name: str) -> None:
    flow = FLOW.select("y", out=EXAMPLES[name])
    found = [call for call in calls(flow) if call.fn == name]
    assert found, f"the example for {name} does not call it"
    assert name in LOWERINGS | LAZY or all(map(is_host, found)), f"{name} has no lowering"
    _check(flow, translated=name not in UNTRANSLATED)


def test_every_lowering_belongs_to_a_declaration() -> None:
    assert set(FUNCTIONS) >= set(LOWERINGS) | set(LAZY)


def test_every_function_has_machine_code_or_is_left_to_pyarrow() -> None:
    assert [name for name in FUNCTIONS if name not in LOWERINGS | LAZY and not REGISTRY[name].arrow] == []
    arrow = {name: REGISTRY[name].arrow for name in FUNCTIONS if REGISTRY[name].arrow}
    assert [name for name, function in arrow.items() if not callable(getattr(arrow_functions, function, None))] == []


def test_a_name_is_declared_and_lowered_once() -> None:
    with pytest.raises(AssertionError, match="declared twice"):
        declare(REGISTRY["add"])
    with pytest.raises(AssertionError, match="lowered twice"):
        lowers("add")(LOWERINGS["sub"])


def test_lazy_lowerings_say_themselves_what_null_does() -> None:
    assert {name for name in LAZY if REGISTRY[name].nulls is Nulls.STRICT} == set()


def test_every_method_has_a_line_of_documentation_and_a_runnable_example() -> None:
    found = [
        (f"{cls.__name__}.{name}", inspect.getdoc(method) or "")
        for cls in (Column, StrMethods, DtMethods, ListMethods, StructMethods)
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert [name for name, text in found if ">>> " not in text or not text.splitlines()[0].strip()] == []


def test_host_functions_run_between_kernels() -> None:
    flow = FLOW.select(h=col("z").dt.hour() + 1, n=col("x").cast(pa.string())).filter(col("n") != "5")
    _check(flow, translated=False)  # the clock of a zone


@pytest.mark.parametrize("fn", AGGREGATES)
@pytest.mark.parametrize("keys", [(), ("b",)], ids=["all", "by key"])
def test_every_aggregate_is_placed(fn: str, keys: tuple[str, ...]) -> None:
    flow = FLOW.group_by(*keys).agg(out=AGGS[fn])
    table = next(node.table for node in walk_nodes(compile_flow(flow.op)) if isinstance(node, WindowAggregate))
    assert [output.fn for output in table.outputs] == [fn]
    assert table.accs[0].kind is AccKind.ROWS
    assert all(0 <= acc < len(table.accs) for acc in table.outputs[0].accs)
    _check(flow, translated=fn not in UNTRANSLATED)
