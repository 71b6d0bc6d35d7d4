"""The shapes of flows, and random rows that keep the promise of their watermark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import scalein as si
from scalein import col
from scalein.api.flow import Flow

DELAY_MS = 40
SCHEMA = pa.schema({"k": pa.string(), "g": pa.int16(), "x": pa.int64(), "f": pa.float64(), "t": pa.timestamp("us"),
                    "tags": pa.list_(pa.string())})  # fmt: skip
NAMES = pa.table({"k": ["a", "b", "c", "c"], "name": ["Anna", "Bert", "Cleo", "Clio"], "weight": [1, 2, 3, 4]})
AGGS = {"n": si.count(), "total": col("x").sum(), "m": col("f").mean(), "lo": col("x").min(), "word": col("k").max()}
NUMBERS = {name: agg for name, agg in AGGS.items() if name != "word"}
LARGE = {"u": col("x").n_unique(), "q": col("x").quantile(0.5), "v": col("x").var()}


@dataclass(frozen=True)
class Shape:
    """A flow, by what its users call it. `keys` tell the rows of its changes apart; None if it emits each row once."""

    name: str
    build: Callable[[Flow], Flow]
    keys: tuple[str, ...] | None = None
    limit: int | None = None  # so many rows, no matter which

    def flow(self, source: Flow) -> Flow:
        return self.build(source.with_watermark("t", f"{DELAY_MS}ms"))


@si.udf
def twice(x: int) -> int:
    return x + x


def _add_one(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"k": batch.column("k"), "y": pc.add(batch.column("x"), 1)})


@si.udaf
class Mean:
    total: float = 0.0
    n: int = 0

    def update(self, x: float) -> None:
        self.total += x
        self.n += 1

    def merge(self, other: Mean) -> None:
        self.total += other.total
        self.n += other.n

    def finish(self) -> float:
        return self.total / self.n


@si.process
class Later:
    """Yields the first row of each time, with the rows before: rows of one time have no order on Spark."""

    last: si.Timestamp | None = None
    n: int = 0

    def on_row(self, row: Any) -> Any:
        if self.last is None or row.t > self.last:
            yield {"t": row.t, "before": self.n}
        self.last = row.t
        self.n += 1


@si.process
class Batched:
    """Yields the rows of 20 ms since the first one, when a timer says so; counts those since it was forgotten."""

    n: int = 0
    total: int = 0

    def on_row(self, row: Any) -> Any:
        if self.n == 0:
            self.set_timer(row.t + si.duration("20ms"))
        self.n += 1
        self.total += 1

    def on_timer(self, at: Any) -> Any:
        yield {"at": at, "n": self.n, "total": self.total}
        self.n = 0


TUMBLING, SLIDING = si.tumbling("t", "30ms", offset="10ms"), si.sliding("t", "40ms", every="15ms")
CUMULATING = si.cumulate("t", "60ms", step="15ms", offset="20ms")
WINDOW = ("window_start", "window_end")

SHAPES = [
    Shape("`filter`, `select`, `with_columns`", lambda s: s.filter(col("x") > 0).with_columns(y=col("x") * 2).drop(
        "f")),
    Shape("typed functions (`@si.udf`)", lambda s: s.filter(col("x").is_not_null()).select("k", y=twice(col("x")))),
    Shape("`map_batches`", lambda s: s.map_batches(_add_one, {"k": pa.string(), "y": pa.int64()}).filter(col("y") > 1)),
    Shape("`explode`", lambda s: s.explode("tags").select("k", "tags")),
    Shape("`join` with a table: inner, left", lambda s: s.join(NAMES, on="k", how="left").join(NAMES, on="k").select(
        "k", "x", "name", "name_right")),
    Shape("`join` with a table: semi, anti, cross", lambda s: s.join(NAMES, on="k", how="semi").join(
        NAMES.slice(2), on="k", how="anti").join(NAMES, how="cross").select("k", "x", "name")),
    Shape("`join` with a table: right, outer", lambda s: s.join(NAMES, on="k", how="outer").select("k", "x", "name")),
    Shape("`union` of flows", lambda s: s.select("k", "x").union(s.filter(col("x") > 1).select("k", x=-col("x")))),
    Shape("`distinct` rows", lambda s: s.select("k", "g").distinct()),
    Shape("`distinct` of some columns", lambda s: s.distinct("k", "g").select("k", "g")),
    Shape("`limit`", lambda s: s.select("k", "x").limit(7), limit=7),
    Shape("`sort`", lambda s: s.select("x", "k", "g").sort("x", "k", "g")),
    Shape("`top_k`", lambda s: s.select("x", "k").distinct().top_k(5, ["x", "k"])),
    Shape("`group_by`", lambda s: s.group_by("k", "g").agg(**AGGS), ("k", "g")),
    Shape("`group_by` without keys", lambda s: s.group_by().agg(**AGGS), ()),
    Shape("`group_by`: `n_unique`, `quantile`, `var`", lambda s: s.group_by("g").agg(**LARGE), ("g",)),
    Shape("aggregates of the user's (`@si.udaf`)", lambda s: s.group_by("g").agg(m=Mean(col("f")), n=Mean(col("x"))),
          ("g",)),
    Shape("`process` of a class", lambda s: s.filter(col("x").is_not_null()).group_by("k", g=col("g") % 2).process(
        Later)),
    Shape("`process` with timers and `ttl=`", lambda s: s.group_by("k").process(Batched, ttl="40ms")),
    Shape("`process` after a join with a table", lambda s: s.filter(col("x").is_not_null()).join(
        NAMES, on="k", how="semi").group_by("k").process(Later)),
    Shape("`group_by` after a join", lambda s: s.join(NAMES, on="k").group_by("name").agg(w=col("weight").sum()),
          ("name",)),
    Shape("`filter` of groups", lambda s: s.group_by("k").agg(n=si.count()).filter(col("n") > 2), ("k",)),
    Shape("`sort`, `limit` of groups", lambda s: s.group_by("k").agg(n=si.count()).sort("n", "k").limit(2)),
    Shape("`group_by` of groups", lambda s: s.group_by("k", "g").agg(n=si.count()).group_by("g").agg(
        most=col("n").max(), groups=si.count()), ("g",)),
    Shape("`group_by` of a union", lambda s: s.select("k", "x").union(s.select("k", x=-col("x"))).group_by("k").agg(
        n=si.count(), s=col("x").sum()), ("k",)),
    Shape("tumbling windows", lambda s: s.group_by("k", TUMBLING).agg(**AGGS), ("k", *WINDOW)),
    Shape("tumbling windows: `n_unique`, `quantile`, `var`", lambda s: s.group_by("g", TUMBLING).agg(**LARGE),
          ("g", *WINDOW)),
    Shape("sliding windows: `@si.udaf`", lambda s: s.group_by("g", SLIDING).agg(m=Mean(col("f")), n=si.count()),
          ("g", *WINDOW)),
    Shape("sliding windows", lambda s: s.group_by("g", SLIDING).agg(**AGGS), ("g", *WINDOW)),
    Shape("sliding windows: `n_unique`, `quantile`, `var`", lambda s: s.group_by("g", SLIDING).agg(**LARGE),
          ("g", *WINDOW)),
    Shape("cumulating windows", lambda s: s.group_by("g", CUMULATING).agg(**AGGS), ("g", *WINDOW)),
    Shape("cumulating windows: `n_unique`, `quantile`, `var`", lambda s: s.group_by("g", CUMULATING).agg(**LARGE),
          ("g", *WINDOW)),
    Shape("sessions", lambda s: s.group_by("g", si.session("t", gap="25ms")).agg(**NUMBERS), ("g", "window_start")),
    Shape("sessions: text", lambda s: s.group_by("g", si.session("t", gap="25ms")).agg(**AGGS), ("g", *WINDOW)),
    Shape("sessions: `@si.udaf`", lambda s: s.filter(col("x") > 0).group_by(si.session("t", gap="9ms")).agg(
        m=Mean(col("f")), n=si.count()), WINDOW[:1]),
    Shape("sessions: `n_unique`, `quantile`, `var`", lambda s: s.group_by("k", si.session("t", gap="60ms")).agg(
        **LARGE), ("k", *WINDOW)),
    Shape("`group_by`, forgotten with `ttl=`", lambda s: s.group_by("k").agg(
        since=col("t").min(), **NUMBERS, ttl="25ms"), ("k", "since")),
    Shape("windows of sessions", lambda s: s.group_by("k", si.session("t", gap="15ms")).agg(n=si.count()).group_by(
        si.tumbling("window_start", "60ms")).agg(most=col("n").max(), groups=si.count()), WINDOW),
    Shape("`over`: frames of a time", lambda s: s.select("k", "x", "t", near=si.count().over(
        "k", order_by="t", within="30ms"), most=col("x").max().over("k", order_by="t", within="30ms"))),
    Shape("`over`: `lag`, numbers of rows, running values", lambda s: s.select("k", "t").with_columns(
        before=col("t").lag().over("k", order_by="t"), n=si.row_number().over("k", order_by="t"),
        first=col("t").min().over("k", order_by="t"))),
    Shape("`over`: `lead`", lambda s: s.select("k", "t").with_columns(after=col("t").lead().over("k", order_by="t"))),
    Shape("`over`: all rows with a key", lambda s: s.select("g", "x", total=col("x").sum().over("g"))),
    Shape("`top_k` of groups in windows", lambda s: s.select("g", "x", "t").group_by("g", TUMBLING).top_k(
        2, by=["x", "t"])),
    Shape("`top_k` of groups", lambda s: s.select("g", "x", "t").group_by("g").top_k(2, by=["x", "t"])),
    Shape("count windows", lambda s: s.group_by("k", si.count_window(3)).agg(n=si.count()), ("k", "window_start")),
    Shape("`distinct` within a time", lambda s: s.select("k", "t").distinct("k", within="50ms")),
    Shape("`distinct`, forgotten with `ttl=`", lambda s: s.select("k", "t").distinct("k", ttl="12ms")),
    Shape("`filter` of windows", lambda s: s.filter(col("x") > 0).group_by("k", TUMBLING).agg(n=si.count()).filter(
        col("n") > 1), ("k", *WINDOW)),
    Shape("windows of a union", lambda s: s.select("k", "t").union(s.select("k", t=col("t"))).group_by(
        "k", TUMBLING).agg(n=si.count()), ("k", *WINDOW)),
    Shape("windows of windows", lambda s: s.group_by("k", si.tumbling("t", "20ms")).agg(n=si.count()).group_by(
        si.tumbling("window_start", "60ms")).agg(most=col("n").max(), groups=si.count()), WINDOW),
    Shape("`group_by` of windows", lambda s: s.group_by("k", TUMBLING).agg(n=si.count()).group_by("k").agg(
        most=col("n").max()), ("k",)),
    Shape("windows of times moved by a constant", lambda s: s.with_columns(u=col("t") - si.duration("25ms")).group_by(
        "k", si.tumbling("u", "30ms")).agg(n=si.count()), ("k", *WINDOW)),
    Shape("ranks among windows", lambda s: s.group_by("k", TUMBLING).agg(n=si.count()).filter(
        si.row_number().over("window_start", "window_end", order_by=["n", "k"]) <= 2)),
    Shape("`group_by` of windows' limits", lambda s: s.group_by("k", SLIDING).agg(n=si.count()).group_by(
        "window_start", "window_end").agg(most=col("n").max()), WINDOW),
    Shape("`join` of streams in windows", lambda s: s.select("k", "t", "x").join(
        s.select("k", "t", y=col("x")), on="k", within=si.tumbling("t", "30ms", offset="10ms"), how="outer")),
    Shape("`join` of streams by interval", lambda s: s.select("k", "t", "x").filter(col("x") > 0).join(
        s.select("k", "t", "g"), on="k", between=("-20ms", "35ms"), how="left")),
    Shape("`join` of streams: all rows", lambda s: s.select("k", "x").join(s.select("k", "g"), on="k", keep="forever",
                                                                           how="right")),
    Shape("`join` of streams: all rows that match", lambda s: s.select("k", "x").join(s.select("k", "g"), on="k",
                                                                                      keep="forever")),
    Shape("`join_asof`", lambda s: s.select("k", "t", "x").join_asof(
        s.select("k", "t", at=col("t")), on="t", by="k", tolerance="15ms", strategy="nearest")),
    Shape("joins of joins of streams", lambda s: s.select("k", "t", "x").join(
        s.select("k", "t", "g"), on="k", between=("-20ms", "35ms")).join(
        s.select("g", "t", "f"), on="g", keep="10ms", how="anti")),
    Shape("`sort`, `top_k` of windows", lambda s: s.group_by("k", TUMBLING).agg(n=si.count()).select(
        "n", "k", "window_start").top_k(3, ["n", "window_start", "k"])),
]  # fmt: skip


def rows(seed: int, count: int) -> pa.Table:
    """Rows whose times are at most DELAY_MS before the greatest of the rows before them."""
    rng = np.random.default_rng(seed)

    def holes(values: object, type_: pa.DataType, share: float = 0.2) -> pa.Array:
        return pa.array(values, type_, mask=rng.random(count) < share)

    latest = np.cumsum(rng.integers(0, int(rng.choice([1, 12, 80])), count)) + int(rng.choice([0, -500, 10**12]))
    times = (latest - rng.integers(0, DELAY_MS + 1, count)) * 1_000
    words = np.array(["a", "b", "c", "", "a longer key than twelve bytes"])
    tags = np.array([["p"], ["p", "q"], [], None], object)
    return pa.table([holes(words[rng.integers(0, 5, count)].tolist(), pa.string()),
                     holes(rng.integers(-2, 3, count), pa.int16()), holes(rng.integers(-3, 10, count), pa.int64()),
                     holes(rng.choice([0.0, -0.0, 1.5, -2.25, np.nan, 4.0], count), pa.float64()),
                     holes(times, pa.timestamp("us"), float(rng.choice([0.0, 0.1]))),
                     pa.array(tags[rng.integers(0, 4, count)].tolist(), SCHEMA.field("tags").type)], schema=SCHEMA)
