"""Nothing is half there: every op, function and aggregate has an oracle, machine code and a differential test."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein import arrow_functions, col, when
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.compiler import compile_flow
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Call, Expr, walk
from scalein.ir.functions.registry import REGISTRY, Nulls, declare, is_host
from scalein.ir.passes.fold import fold
from scalein.ir.physical import WindowAggregate, walk_nodes
from scalein.ir.rewrite import walk_ops
from scalein.ir.tables import AccKind
from scalein.llvm_backend.functions.registry import LAZY, LOWERINGS, lowers
from tests.same import assert_same

FUNCTIONS = [name for name, function in REGISTRY.items() if not function.spelled_out]

TABLE = pa.table({
    "x": [5, -3, None, 8], "y": [2, 3, 4, 1], "f": [0.5, 4.0, None, 2.25], "s": ["abc", None, "Bé", "a longer text"],
    "b": [True, False, None, True], "t": pa.array([0, 10**15, None, -(10**14)], pa.timestamp("us")),
    "tags": [["a"], None, [], ["b", "c"]], "at": [{"u": 1}, None, {"u": None}, {"u": 4}],
    "z": pa.array([0, 10**12, None, 5], pa.timestamp("ms", "Europe/Berlin")),
})  # fmt: skip
FLOW = si.from_arrow(TABLE)
OTHER = pa.table({"y": [1, 2, 2], "w": ["one", "two", "zwei"]})

OPS: dict[type, Flow] = {
    ops.Source: FLOW,
    ops.Filter: FLOW.filter(col("x") > 0),
    ops.Project: FLOW.select("s", v=col("x") + 1),
    ops.Limit: FLOW.limit(2),
    ops.Explode: FLOW.explode("tags"),
    ops.Distinct: FLOW.union(FLOW).distinct("b", "x"),
    ops.Sort: FLOW.sort("f", col("x") % 3, descending=[True, False]),
    ops.Union: FLOW.union(FLOW),
    ops.MapBatches: FLOW.map_batches(lambda batch: batch.slice(1), TABLE.schema),
    ops.Join: FLOW.join(OTHER, on="y"),
    ops.Aggregate: FLOW.group_by("b").agg(n=si.count()),
    ops.Watermark: FLOW.with_watermark("t", "5s"),
}

x, y, f, s, b, t, tags, at = (col(name) for name in (*"xyfsbt", "tags", "at"))


@si.udf
def odd_or_more(x: int, y: int) -> float:
    while y > 3 and x % 2 == 0:
        y -= 1
    return x / y


EXAMPLES: dict[str, Column] = {
    "udf": odd_or_more(x, y),
    "add": x + y, "sub": x - y, "mul": x * y, "div": f / 3, "floordiv": x // y, "mod": x % y, "divisible": y % 2 == 0,
    "pow": f.pow(2.0), "neg": -x, "abs": abs(x), "floor": f.floor(), "ceil": f.ceil(), "round": f.round(1),
    "sqrt": f.sqrt(), "exp": f.exp(), "log": f.log(), "eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y,
    "gt": x > y, "ge": x >= y, "and": b & (x > 0), "or": b | (x > 0), "not": ~b, "is_null": x.is_null(),
    "is_not_null": x.is_not_null(), "is_nan": f.is_nan(), "fill_null": x.fill_null(y), "is_in": x.is_in([5, 7]),
    "hash": s.hash(), "try": x.try_mul(2**62), "try_divide": f.try_divide(x + 3),
    "if_else": when(b).then(x).otherwise(y), "cast": x.cast(pa.float64()), "str_len": s.str.len(),
    "str_slice": s.str.slice(1, 2), "starts_with": s.str.starts_with("a"), "ends_with": s.str.ends_with("c"),
    "contains": s.str.contains("b"), "lower": s.str.lower(), "upper": s.str.upper(),
    "str_strip": s.str.strip("a"), "str_lstrip": s.str.lstrip(), "str_rstrip": s.str.rstrip("t"),
    "str_split_part": s.str.split_part(" ", 2), "str_extract": s.str.extract("(.)e"),
    "str_matches": s.str.matches("b?c"), "str_replace": s.str.replace("a", "bb"),
    "list_len": tags.list.len(), "list_get": tags.list.get(-1), "struct_field": at.struct.field("u"),
    "dt_truncate": t.dt.truncate("1h"), "dt_epoch": t.dt.epoch("s"),
    **{f"dt_{part}": getattr(t.dt, part)() for part in (
        "year", "quarter", "month", "day", "weekday", "ordinal_day", "hour", "minute", "second", "millisecond",
        "microsecond", "nanosecond")},
}  # fmt: skip

AGGS: dict[str, Column] = {
    "count": si.count(), "count_valid": x.count(),
    **{fn: getattr(x, fn)() for fn in ("sum", "mean", "min", "max", "var", "std", "first", "last")},
    **{fn: getattr(x, fn)("f") for fn in ("arg_min", "arg_max")},
    "n_unique": s.n_unique(), "quantile": f.quantile(0.7), "collect": s.collect(), "top_k": s.top_k(2, by="x"),
    "approx_n_unique": s.approx_n_unique(), "approx_quantile": f.approx_quantile(0.7),
}  # fmt: skip


def _check(flow: Flow) -> None:
    assert_same(flow.collect(), flow.collect(engine="interp"), ordered=False, tolerance=1e-12)


def _calls(flow: Flow) -> Iterator[Call]:
    for op in walk_ops(fold(flow.op)):
        exprs: list[Expr] = [item.expr for item in op.items] if isinstance(op, ops.Project) else []
        yield from (node for expr in exprs for node in walk(expr) if isinstance(node, Call))


def test_each_table_above_is_complete() -> None:
    assert set(OPS) == set(typing.get_args(ops.Op))
    assert set(EXAMPLES) == set(FUNCTIONS)
    assert set(AGGS) == set(AGGREGATES)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_every_op_runs_compiled_and_interpreted(op: type) -> None:
    assert any(isinstance(each, op) for each in walk_ops(OPS[op].op))
    _check(OPS[op])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_runs_compiled_and_interpreted(name: str) -> None:
    flow = FLOW.select("y", out=EXAMPLES[name])
    found = [call for call in _calls(flow) if call.fn == name]
    assert found, f"the example for {name} does not call it"
    assert name in LOWERINGS or all(map(is_host, found)), f"{name} has no lowering"
    _check(flow)


def test_every_lowering_belongs_to_a_declaration() -> None:
    assert set(FUNCTIONS) >= set(LOWERINGS)


def test_every_function_has_machine_code_or_is_left_to_pyarrow() -> None:
    assert [name for name in FUNCTIONS if name not in LOWERINGS and not REGISTRY[name].arrow] == []
    arrow = {name: REGISTRY[name].arrow for name in FUNCTIONS if REGISTRY[name].arrow}
    assert [name for name, function in arrow.items() if not callable(getattr(arrow_functions, function, None))] == []


def test_a_name_is_declared_and_lowered_once() -> None:
    with pytest.raises(AssertionError, match="declared twice"):
        declare(REGISTRY["add"])
    with pytest.raises(AssertionError, match="lowered twice"):
        lowers("add")(LOWERINGS["sub"])


def test_lazy_lowerings_say_themselves_what_null_does() -> None:
    assert {name for name in LAZY if REGISTRY[name].nulls is Nulls.STRICT} == set()


def test_host_functions_run_between_kernels() -> None:
    _check(FLOW.select(h=col("z").dt.hour() + 1, n=col("x").cast(pa.string())).filter(col("n") != "5"))


@pytest.mark.parametrize("fn", AGGREGATES)
@pytest.mark.parametrize("keys", [(), ("b",)], ids=["all", "by key"])
def test_every_aggregate_is_placed(fn: str, keys: tuple[str, ...]) -> None:
    flow = FLOW.group_by(*keys).agg(out=AGGS[fn])
    table = next(node.table for node in walk_nodes(compile_flow(flow.op)) if isinstance(node, WindowAggregate))
    assert [output.fn for output in table.outputs] == [fn]
    assert table.accs[0].kind is AccKind.ROWS
    assert all(0 <= acc < len(table.accs) for acc in table.outputs[0].accs)
    _check(flow)


# How a test writes what has another name in the IR.
SPELLED = {"if_else": "when(", "try": "try_cast", "str_len": "str.len", "str_slice": "str.slice",
           "divisible": "% ", "neg": "-a", "count_valid": "count()",
           "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and": "&",
           "or": "|", "not": "~", "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//",
           "mod": "%"}  # fmt: skip


def test_everything_has_a_differential_test() -> None:
    folder = Path(__file__).parent
    files = [*(folder / "differential").glob("test_*.py"), folder / "programs.py"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = [SPELLED.get(name, re.sub("^(dt|str|list|struct)_", "", name)) for name in (*FUNCTIONS, *AGGREGATES)]
    names += [
        "filter(",
        "select(",
        "with_columns(",
        "limit(",
        "distinct(",
        "sort(",
        "top_k(",
        "bottom_k(",
        "union(",
        "map_batches(",
        "explode(",
        "join(",
        "group_by(",
        "tumbling",
        "sliding",
    ]
    assert [name for name in names if not re.search(re.escape(name), text)] == []
