"""What a change costs: the modules that must be touched for one more function, aggregate, window or operator.

A module counts if it mentions the thing: a string literal that is its name, or a use of its class. The counts are those
of ARCHITECTURE, section 6: 3 modules for a function (declaration, lowering, method). Where more is needed the reason is
listed here, and the list only shrinks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pyarrow as pa
import pytest
from llvmlite import ir

import scalein as si
from scalein import col
from scalein.api.column import Column
from scalein.dtypes import F64
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Call, Expr
from scalein.ir.functions.registry import REGISTRY, Args, Function, declare, typed
from scalein.ir.unify import cast_to
from scalein.llvm_backend.functions.registry import LOWERINGS, CallSite, lowers

ROOT = Path(__file__).parent.parent / "scalein"

# Modules that use the same words for something else.
OTHER_WORDS = {
    "udf/": "Python's operators and builtins in the body of a udf",
    "llvm_backend/functions/udf.py": "the same, lowered",
    "llvm_backend/functions/udf_apply.py": "the same, lowered",
    "llvm_backend/functions/udf_text.py": "the same, lowered",
    "ir/udf.py": "the same, of which some build text",
    "sql/": "SQL's own operators, and its calls that are made of several functions",
    "api/hints.py": "names of other libraries",
}

_LOGIC = "the optimizer's own language: predicates are split, joined and guarded by it"
_COMPARED = "scans, files' statistics and keys are compared by it"
_FINISHED = "results of partial groups are expressions; until aggregates finish themselves (3.2)"
MORE_THAN_THREE = {
    "and": _LOGIC, "or": _LOGIC, "not": _LOGIC, "is_null": _LOGIC, "is_not_null": _LOGIC, "fill_null": _LOGIC,
    "if_else": _LOGIC,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "is_in"), _COMPARED),
    "cast": "implicit casts are made where types meet",
    "try": "a form of other calls, which passes and kernels must keep together",
    "udf": "holds the user's code: what it costs, and where it runs, concerns passes",
    "hash": "also a slot and a way of grouping; key groups are made of it",
    "mod": "`fold` turns x % c == 0 into `divisible`",
    "sub": _FINISHED, "div": _FINISHED, "sqrt": _FINISHED,
    "floor": "also an intrinsic that quantiles round by", "ceil": "also an intrinsic that quantiles round by",
    "log": "also the name of a side state",
}  # fmt: skip


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package by its path below it."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(ROOT.rglob("*.py"))}


@cache
def texts() -> dict[str, set[str]]:
    """The string literals of every module, but for those with words of their own."""
    return {name: {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}
            for name, tree in trees().items() if not name.startswith(tuple(OTHER_WORDS))}


def mentioned_in(word: str) -> list[str]:
    return [name for name, found in texts().items() if word in found]


def using(*classes: str) -> list[str]:
    """The modules that use one of these classes."""

    def names(tree: ast.Module) -> set[str]:
        found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return found | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    return [name for name, tree in trees().items() if names(tree) & set(classes)]


@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in MORE_THAN_THREE])
def test_a_function_is_in_three_modules(name: str) -> None:
    assert len(mentioned_in(name)) <= 3, mentioned_in(name)


def test_every_exception_is_needed() -> None:
    assert set(MORE_THAN_THREE) <= set(REGISTRY)
    assert [name for name in MORE_THAN_THREE if len(mentioned_in(name)) <= 3] == []


@pytest.mark.xfail(strict=True, reason="accumulators and finish are chosen by name in machine code until 3.2")
def test_an_aggregate_is_in_two_modules() -> None:
    assert {name: found for name in AGGREGATES if len(found := mentioned_in(name)) > 2} == {}


def test_a_window_is_in_two_modules() -> None:
    """Its class, and its constructor: nothing else reads how long windows are, or how far apart."""

    def reads_of(tree: ast.Module) -> set[str]:
        """What is read of windows."""
        return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                and ast.unparse(node.value).rpartition(".")[2] in ("window", "_window")}

    assert [name for name, tree in trees().items() if {"size", "every"} & reads_of(tree)] == [
        "spark/batch/aggregate_in_spark.py",  # Spark's own tumbling windows
    ]


@pytest.mark.xfail(strict=True, reason="Spark shuffles ops by their class")
def test_an_op_is_in_three_modules() -> None:
    assert {op.__name__: found for op in (ops.Watermark, ops.Distinct) if len(found := using(op.__name__)) > 3} == {}


# --- one more, and it runs


def _cube_rule(call: Call, args: Args) -> Expr:
    return typed(call, [cast_to(args[0], F64)], F64)


@pytest.fixture
def cube() -> Iterator[None]:
    """A function declared and lowered here, as a newcomer would do it."""
    declare(Function("cube", _cube_rule, fold=lambda call: lambda value: value * value * value, show="{0}.cube()"))

    @lowers("cube")
    def _cube(c: CallSite) -> ir.Value:
        return c.f.b.fmul(c.f.b.fmul(c.args[0], c.args[0]), c.args[0])

    yield
    del REGISTRY["cube"], LOWERINGS["cube"]


def cubed(column: Column) -> Column:
    return column._call("cube")


@pytest.mark.usefixtures("cube")
def test_a_new_function_runs_everywhere() -> None:
    table = pa.table({"x": [1.0, None, -3.0], "k": ["a", "b", "a"], "n": [2, 3, 4]})
    flow = si.from_arrow(table)
    assert flow.select(y=cubed(col("x")), z=cubed(col("n"))).collect().to_pydict() == {
        "y": [1.0, None, -27.0], "z": [8.0, 27.0, 64.0]}  # fmt: skip
    assert flow.filter(cubed(col("x")) < 0).select("k").collect().to_pydict() == {"k": ["a"]}
    total = flow.group_by("k").agg(s=cubed(col("n")).sum()).collect().sort_by("k")
    assert total.to_pydict() == {"k": ["a", "b"], "s": [72.0, 27.0]}


@pytest.mark.usefixtures("cube")
def test_a_new_function_is_shown_and_folded() -> None:
    flow = si.from_arrow(pa.table({"x": [1.0, 9.0]})).filter(cubed(col("x")) > cubed(si.lit(2.0)))
    assert "x.cube() > lit(2.0).cube()" in flow.explain(verbose=True)
    assert "x.cube() > 8.0" in flow.explain()
    assert flow.collect()["x"].to_pylist() == [9.0]


@pytest.mark.usefixtures("cube")
def test_a_new_function_runs_in_a_job() -> None:
    found: list[dict[str, object]] = []
    flow = si.from_arrow(pa.table({"x": [1.0, 2.0, None]})).select(y=cubed(col("x")))
    flow.start(sink=si.to_callback(lambda batch: found.extend(batch.to_pylist()))).wait()
    assert found == [{"y": 1.0}, {"y": 8.0}, {"y": None}]
