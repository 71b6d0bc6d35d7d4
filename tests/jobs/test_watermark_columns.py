"""Which columns a watermark is about: event time through joins, unions and new names, and what jobs refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests.same import assert_same

NAMES = pa.table({"k": [0, 1, 2], "name": ["a", "b", "c"]})
Make = Callable[[Flow, Flow], Flow]


@si.process
class Order:
    """The time of each row, with the number of rows of its key before."""

    n: int = 0

    def on_row(self, row: Any) -> Any:
        yield {"t": row.t, "n": self.n}
        self.n += 1


@si.process
class Quiet:
    """A row for each time that a key was quiet for ten."""

    n: int = 0

    def on_row(self, row: Any) -> Any:
        self.n += 1
        self.set_timer(row.t + 10)

    def on_timer(self, at: int) -> Any:
        yield {"at": at, "n": self.n}


def rows_of(seed: int, count: int = 120) -> pa.Table:
    """Rows that are at most 15 behind."""
    made = random.Random(seed)
    times = [3 * k - made.randrange(16) for k in range(count)]
    return pa.table({"k": [made.randrange(3) for _ in times], "t": times, "x": list(range(count))})


def streamed(table: pa.Table, size: int) -> Flow:
    return si.from_batches(table.to_batches(max_chunksize=size), table.schema).with_watermark("t", 15)


def job_of(flow: Flow, **options: Any) -> tuple[pa.Table, int]:
    out = si.to_memory()
    job = flow.start(sink=out, **options)
    job.wait()
    return out.table(), job.metrics()["late_rows"]


KEPT: dict[str, Make] = {
    "join": lambda a, b: a.join(NAMES, on="k"),
    "semi": lambda a, b: a.join(NAMES, on="k", how="semi"),
    "union": lambda a, b: a.union(a.limit(0)),
    "renamed": lambda a, b: a.rename({"t": "tt"}).with_columns(t="tt").drop("tt"),
    "alias": lambda a, b: a.select("k", "x", t=col("t")),
    "stream join": lambda a, b: a.join(b.select("k", "t", y="x"), on="k", between=(0, 0)),
    "moved": lambda a, b: a.with_columns(t=col("t") - 50),
    "distinct": lambda a, b: a.distinct("x"),
}  # fmt: skip


@pytest.mark.parametrize("way", KEPT)
def test_event_time_orders_rows_after(way: str) -> None:
    """Rows come to a class in the order of time, sorted here by hand."""
    table = rows_of(3)
    make = KEPT[way]
    given = make(si.from_arrow(table).with_watermark("t", 15), si.from_arrow(table).with_watermark("t", 15))
    wanted: list[tuple[int, int, int]] = []
    seen: dict[int, int] = {}
    plain = given.select("k", "t").collect().to_pydict()
    for time, key in sorted(zip(plain["t"], plain["k"], strict=True)):
        wanted.append((key, time, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    found = given.group_by("k").process(Order).collect()
    assert sorted(zip(*found.to_pydict().values(), strict=True)) == sorted(wanted)
    rows, late = job_of(make(streamed(table, 30), streamed(table, 30)).group_by("k").process(Order))
    assert not late
    assert sorted(zip(*rows.to_pydict().values(), strict=True)) == sorted(wanted)


TIMED: dict[str, Make] = {
    "timers": lambda a, b: a.join(NAMES, on="k").group_by("name").process(Quiet),
    "process ttl": lambda a, b: a.union(b).group_by("k").process(Order, ttl=9),
    "ttl": lambda a, b: a.rename({"t": "u"}).group_by("k").agg(n=si.count(), since=col("u").min(), ttl=6),
    "distinct within": lambda a, b: a.join(NAMES, on="k", how="left").select("k", "t").distinct("k", within=9),
    "over": lambda a, b: a.union(b).select("k", "t").with_columns(n=si.count().over("k", order_by="t", within=5)),
    "top of a union": lambda a, b: a.union(b).group_by("k", si.tumbling("t", 9)).agg(m=col("x").max()),
    "windows of moved times": lambda a, b: a.with_columns(t=col("t") - 50).group_by("k", si.tumbling("t", 5)).agg(
        n=si.count()),
    "windows of later times": lambda a, b: a.with_columns(u=col("t") + 50).group_by(si.sliding("u", 9, every=4)).agg(
        n=si.count()),
    "top of moved times": lambda a, b: a.with_columns(u=col("t") - 7).group_by("k", si.tumbling("u", 9)).top_k(1, "x"),
    "sessions of moved times": lambda a, b: a.with_columns(u=col("t") - 30).group_by("k", si.session("u", gap=4)).agg(
        n=si.count()),
    "join of moved times": lambda a, b: a.with_columns(t=col("t") - 50).join(
        b.with_columns(t=col("t") - 50), on="k", between=(0, 1)),
    "left join, one moved": lambda a, b: a.with_columns(t=col("t") + 50).join(
        b, on="k", between=(-60, -45), how="left"),
    "windows of joined times": lambda a, b: a.join(b, on="k", between=(-4, 3)).group_by(
        si.tumbling("t_right", 6)).agg(n=si.count()),
    "over, then windows": lambda a, b: a.with_columns(n=si.row_number().over("k", order_by="t")).group_by(
        si.tumbling("t", 9)).agg(n=col("n").max()),
    "windows of windows' ends": lambda a, b: a.group_by("k", si.tumbling("t", 4)).agg(n=si.count()).group_by(
        si.tumbling("window_end", 12)).agg(n=col("n").sum()),
    "windows of a class's times": lambda a, b: a.group_by("k").process(Quiet).group_by(si.tumbling("at", 8)).agg(
        n=si.count()),
    "a forked stream": lambda a, b: a.join(a.with_columns(t=col("t") - 20), on="k", within=si.tumbling("t", 5)),
}  # fmt: skip


@pytest.mark.parametrize("way", TIMED)
def test_jobs_give_the_rows_of_collect(way: str) -> None:
    table, make = rows_of(8), TIMED[way]
    wanted = make(si.from_arrow(table).with_watermark("t", 15), si.from_arrow(table).with_watermark("t", 15)).collect()
    assert wanted.num_rows
    rows, late = job_of(make(streamed(table, 7), streamed(table, 7)), workers=2)
    assert not late
    assert_same(rows, wanted)


REFUSED: dict[str, tuple[Make, str]] = {
    "windows": (lambda a, b: a.group_by("k", si.tumbling("z", 5)).agg(n=si.count()), "z"),
    "sessions": (lambda a, b: a.group_by("k", si.session("z", gap=5)).agg(n=si.count()), "z"),
    "expression": (lambda a, b: a.group_by(si.tumbling(100 - col("t"), 5)).agg(n=si.count()), "100 - t"),
    "top_k": (lambda a, b: a.group_by("k", si.tumbling("z", 5)).top_k(1, by="x"), "z"),
    "join": (lambda a, b: a.join(b, on="k", within=si.tumbling("z", 5)), "z"),
    "asof": (lambda a, b: a.join_asof(b.select("k", "z", q="x"), on="z", by="k"), "z"),
    "second window": (lambda a, b: a.group_by("k", si.tumbling("t", 5)).agg(z=col("z").min()).group_by(
        si.tumbling("z", 5)).agg(n=si.count()), "z"),
    "another's time": (lambda a, b: a.join_asof(b.select("k", "t", u="t"), on="t", by="k").group_by(
        si.tumbling("u", 5)).agg(n=si.count()), "u"),
}  # fmt: skip


@pytest.mark.parametrize("way", REFUSED)
def test_refuses_times_that_no_watermark_is_about(way: str) -> None:
    make, name = REFUSED[way]
    table = rows_of(1)
    flows = [streamed(table, 9).with_columns(z=100 - col("t")) for _ in range(2)]
    with pytest.raises(si.BadArgument, match="the watermark says nothing of") as error:
        make(flows[0], flows[1]).start(sink=si.to_memory())
    assert f"says nothing of {name}" in str(error.value)
    bounded = [si.from_arrow(table).with_columns(z=100 - col("t")) for _ in range(2)]
    make(bounded[0], bounded[1]).collect()


def test_without_a_watermark_any_time_will_do() -> None:
    table = rows_of(2)
    flow = si.from_batches(table.to_batches(max_chunksize=9), table.schema).with_columns(z=100 - col("t"))
    windows = flow.group_by("k", si.tumbling("z", 5)).agg(n=si.count())
    rows, late = job_of(windows)
    assert not late
    assert_same(rows, windows.collect())


def test_the_last_watermark_counts() -> None:
    table = pa.table({"t": [1, 2, 3, 4], "u": [10, 40, 20, 60]})
    flow = si.from_batches(table.to_batches(max_chunksize=1), table.schema).with_watermark("t", 0)
    rows, late = job_of(flow.with_watermark("u", 0).group_by(si.tumbling("u", 10)).agg(n=si.count()))
    assert late == 1
    assert sorted(rows["window_start"].to_pylist()) == [10, 40, 60]


def test_late_rows_of_top_k_have_the_columns_of_its_input() -> None:
    table = pa.table({"k": [1, 1, 1], "t": [1, 99, 2], "x": [1, 2, 3]})
    flow = si.from_batches(table.to_batches(max_chunksize=1), table.schema).with_watermark("t", 0)
    late = si.to_memory()
    job_of(flow.group_by("k", si.sliding("t", 10, every=5)).top_k(1, by="x"), late=late)
    assert late.table().to_pydict() == {"k": [1], "t": [2], "x": [3]}


def test_top_k_refuses_sessions() -> None:
    """A session is where rows are close together, not where the epoch's multiples of the gap are."""
    flow = si.from_arrow({"k": [1, 1], "t": [1, 12], "a": [1, 2]})
    with pytest.raises(si.BadArgument, match="which session a row is in, later rows decide"):
        flow.group_by("k", si.session("t", gap=20)).top_k(1, by="a")


def test_late_rows_of_a_join_have_the_columns_of_both_sides() -> None:
    left = pa.table({"k": [1, 1, 1], "t": [1, 99, 2], "x": [1, 2, 3]})
    right = pa.table({"k": [1, 1, 1], "t": [1, 99, 3], "y": ["a", "b", "c"]})
    flows = [si.from_batches(each.to_batches(max_chunksize=1), each.schema).with_watermark("t", 0)
             for each in (left, right)]
    for bound in ({"between": (0, 1)}, {"within": si.tumbling("t", 5)}):
        joined = flows[0].join(flows[1], on="k", **bound)  # type: ignore[arg-type]
        late = si.to_memory()
        _, count = job_of(joined, late=late)
        assert count == 2
        assert sorted(zip(*late.table().to_pydict().values(), strict=True)) == [(1, 2, 3, None), (1, 3, None, "c")]
    other = flows[1].with_columns(x="y")
    with pytest.raises(si.WrongType, match="'x' is i64 on the left"):
        flows[0].join(other, on="k", between=(0, 1)).start(sink=si.to_memory(), late=si.to_memory())
