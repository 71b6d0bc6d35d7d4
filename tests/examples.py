"""An example of every operator, function and aggregate, over one table: what is complete is derived from these."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa

import scalein as si
from scalein import col, when
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.ir import ops
from scalein.ir.exprs import Call, walk
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.passes.fold import fold
from scalein.ir.rewrite import walk_ops

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
    ops.OuterJoin: FLOW.join(OTHER, on="y", how="outer"),
    ops.StreamJoin: FLOW.join(FLOW.select("y", "t", v=col("x")), on="y", within=si.tumbling("t", "1h")),
    ops.Aggregate: FLOW.group_by("b").agg(n=si.count()),
    ops.Watermark: FLOW.with_watermark("t", "5s"),
}


@si.process
class Changes:
    """Rows whose value is not that of the key's row before, with how many there were so far."""

    before: int | None = None
    n: int = 0

    def on_row(self, row: Any) -> Any:
        if self.before is None or row.x is None or row.x != self.before:
            self.n += 1
            for i in range(2 if row.f is not None and row.f > 1 else 1):
                yield {"n": self.n, "i": i, "s": row.s, "before": self.before, "big": row.y > 2}
        self.before = row.x


OPS[ops.Over] = FLOW.with_columns(before=col("x").lag().over("b", order_by="t"),
                                  recent=col("f").sum().over("b", order_by="t", rows=3))
OPS[ops.AssignWindows] = FLOW.group_by("b", si.sliding("t", "10s", every="4s")).top_k(2, by=["x", "t"])
OPS[ops.Process] = FLOW.with_watermark("t", "5s").group_by("b").process(Changes)

x, y, f, s, b, t, tags, at = (col(name) for name in (*"xyfsbt", "tags", "at"))


@si.udf
def odd_or_more(x: int, y: int) -> float:
    while y > 3 and x % 2 == 0:
        y -= 1
    return x / y


@si.udaf
class Spread:
    """The greatest value minus the least one, and how often the second argument was missing."""

    least: int | None = None
    most: int = 0
    missing: int = 0

    def update(self, x: int, y: int | None) -> None:
        self.missing += y is None
        if self.least is None:
            self.least = self.most = x
            return
        self.least = min(self.least, x)
        self.most = max(self.most, x)

    def merge(self, other: Spread) -> None:
        self.missing += other.missing
        if other.least is None:
            return
        if self.least is None:
            self.least, self.most = other.least, other.most
            return
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    def finish(self) -> float | None:
        return None if self.least is None else self.most - self.least + self.missing / 2


EXAMPLES: dict[str, Column] = {
    "udf": odd_or_more(x, y), "concat": s + "-" + s, "clip": x.clip(0, y), "row_max": si.max_horizontal(x, y, 3),
    "row_min": si.min_horizontal("f", x), "make_struct": si.struct("x", v=s),
    "add": x + y, "sub": x - y, "mul": x * y, "div": f / 3, "floordiv": x // y, "mod": x % y, "divisible": y % 2 == 0,
    "pow": f.pow(2.0), "neg": -x, "abs": abs(x), "floor": f.floor(), "ceil": f.ceil(), "round": f.round(1),
    "sqrt": f.sqrt(), "exp": f.exp(), "log": f.log(), "eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y,
    "gt": x > y, "ge": x >= y, "and": b & (x > 0), "or": b | (x > 0), "not": ~b, "is_null": x.is_null(),
    "is_not_null": x.is_not_null(), "is_nan": f.is_nan(), "fill_null": x.fill_null(y), "is_in": x.is_in([5, 7]),
    "hash": s.hash(), "try": x.try_mul(2**62), "try_divide": f.try_divide(x + 3),
    "if_else": when(b).then(x).otherwise(y), "cast": x.cast(pa.float64()), "str_len": s.str.len(),
    "str_slice": s.str.slice(1, 2), "starts_with": s.str.starts_with("a"), "ends_with": s.str.ends_with("c"),
    "contains": s.str.contains("b"), "lower": s.str.lower(), "upper": s.str.upper(),
    "str_strip": s.str.strip("a"), "str_lstrip": s.str.lstrip("b"), "str_rstrip": s.str.rstrip("t"),
    "str_split_part": s.str.split_part(" ", 2), "str_extract": s.str.extract("(.)e"),
    "str_matches": s.str.matches("b?c"), "str_replace": s.str.replace("a", "bb"),
    "list_len": tags.list.len(), "list_get": tags.list.get(-1), "struct_field": at.struct.field("u"),
    "dt_strftime": t.dt.strftime("%Y-%m-%d %H:%M:%S.%f"), "dt_local": col("z").dt.strftime("%d.%m.%y %I%p"),
    "str_strptime": t.dt.strftime("%Y %j %H%M%S").str.strptime(pa.timestamp("us"), "%Y %j %H%M%S"),
    "dt_truncate": t.dt.truncate("1h"), "dt_epoch": t.dt.epoch("s"),
    **{f"dt_total_{unit}": getattr((t - datetime(1970, 1, 3)).dt, f"total_{unit}")() for unit in (
        "days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds")},
    **{f"dt_{part}": getattr(t.dt, part)() for part in (
        "year", "quarter", "month", "day", "weekday", "ordinal_day", "hour", "minute", "second", "millisecond",
        "microsecond", "nanosecond")},
}  # fmt: skip

AGGS: dict[str, Column] = {
    "count": si.count(), "count_valid": x.count(),
    **{fn: getattr(x, fn)() for fn in ("sum", "mean", "min", "max", "var", "std", "first", "last")},
    **{fn: getattr(x, fn)("f") for fn in ("arg_min", "arg_max")}, "cov": si.cov(x, "f"), "corr": si.corr(x, y),
    "n_unique": s.n_unique(), "quantile": f.quantile(0.7), "collect": s.collect(), "top_k": s.top_k(2, by="x"),
    "approx_n_unique": s.approx_n_unique(), "approx_quantile": f.approx_quantile(0.7),
    "udaf": Spread(y, x),
}  # fmt: skip


def calls(flow: Flow) -> Iterator[Call]:
    """The calls in the columns of a flow, as they are after folding."""
    for op in walk_ops(fold(flow.op)):
        for item in op.items if isinstance(op, ops.Project) else ():
            yield from (node for node in walk(item.expr) if isinstance(node, Call))
