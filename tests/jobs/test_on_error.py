"""Poison rows: null where an expression fails, or to a sink of their own, wherever in the flow they fail."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col, when
from scalein.api.flow import Flow
from scalein.ir.passes.null_on_error import null_on_error
from scalein.testing import stream
from tests import oracle
from tests.engines import examples
from tests.jobs.streams import Course, ran
from tests.same import assert_same

MOST = 2**63 - 1
TABLE = pa.table({"k": [1, 2] * 4, "x": [0, 1, 2, 3, 4, 0, 6, None], "s": ["1", "x", "3", None, "5", "6", "7", "oops"],
                  "t": [0, 5, 12, 18, 25, 27, 33, 60]})  # fmt: skip


def run(flow: Flow, **options: Any) -> pa.Table:
    out = si.to_memory()
    flow.start(sink=out, **options).wait()
    return out.table()


def test_what_fails_is_null_in_that_row() -> None:
    flow = si.from_arrow(TABLE).select("k", y=60 // col("x"), n=col("s").cast(pa.int64()), big=col("x") + (MOST - 2),
                                       filled=(60 // col("x")).fill_null(-1), both=col("s").cast(pa.int64()) * MOST)
    rows = run(flow, on_error="null").to_pydict()
    assert rows["y"] == [None, 60, 30, 20, 15, None, 10, None]
    assert rows["n"] == [1, None, 3, None, 5, 6, 7, None]
    assert rows["big"] == [MOST - 2, MOST - 1, MOST, None, None, MOST - 2, None, None]
    assert rows["filled"] == [-1, 60, 30, 20, 15, -1, 10, -1]
    assert rows["both"] == [MOST, None, None, None, None, None, None, None]
    with pytest.raises(si.ScaleinError, match=r"division by zero|impossible cast"):
        run(flow)


def test_null_means_there_what_it_always_means() -> None:
    """A filter drops it, a branch that is not taken is not tried, a null key is a group, aggregates skip it."""
    y = 60 // col("x")
    assert run(si.from_arrow(TABLE).filter(y > 15).select("x"), on_error="null").to_pydict() == {"x": [1, 2, 3]}
    chosen = when(col("x") == 0).then(0).otherwise(y)
    assert run(si.from_arrow(TABLE).select(c=chosen), on_error="null").to_pydict()["c"] == [0, 60, 30, 20, 15, 0, 10,
                                                                                            None]  # fmt: skip
    grouped = si.from_arrow(TABLE).group_by(small=y < 25).agg(n=si.count(), known=y.count(), top=y.max())
    found = {row["small"]: row for row in run(grouped, on_error="null").to_pylist()}
    assert found[None] == {"small": None, "n": 3, "known": 0, "top": None}
    assert found[True]["n"] == 3


def test_a_table_that_may_not_be_null_may_be_so_then() -> None:
    schema = pa.schema([pa.field("x", pa.int64(), False)])
    flow = si.from_arrow(pa.table({"x": [0, 2]}, schema)).with_columns(y=4 // col("x")).with_columns(
        z=col("y") + 1, has=col("y").is_null())
    never = flow.select(f=col("y").fill_null(0), w=when(col("y") > 1).then(1).otherwise(2))
    assert not any(field.nullable for field in run(never, on_error="null").schema)
    rows = run(flow, on_error="null")
    assert rows.to_pylist() == [{"x": 0, "y": None, "z": None, "has": True}, {"x": 2, "y": 2, "z": 3, "has": False}]
    assert [field.nullable for field in rows.schema] == [False, True, True, False]
    for group in (flow.group_by("y"), flow.group_by()):
        total = group.agg(s=col("z").sum(), m=col("y").mean())
        assert_same(run(total, on_error="null"), oracle.run(null_on_error(total.op)))


FLOWS: dict[str, Callable[[Flow], Flow]] = {
    "rows": lambda s: s.select(a=col("x") // col("y"), b=(col("x") * MOST).abs(),
                               c=col("w").cast(pa.int8()) % col("y")),
    "guards": lambda s: s.filter((col("y") != 0) & (col("x") // col("y") > 1) | (col("w").cast(pa.int64()) > 0)),
    "groups": lambda s: s.group_by(k=col("x") % col("y")).agg(
        n=si.count(), s=(col("x") // col("y")).max(), w=col("w").cast(pa.int64()).max(), d=(-col("x")).n_unique()),
    "join": lambda s: s.with_columns(k=col("w").cast(pa.int64())).join(
        si.from_arrow(pa.table({"k": [0, 1, 2], "v": [0, 1, 2]})).with_columns(q=2 // col("v")), on="k"),
    "distinct": lambda s: s.select(k=col("x") // col("y")).distinct(),
    "windows": lambda s: s.with_columns(t=col("w").cast(pa.int64())).group_by(si.tumbling("t", 3)).agg(
        n=si.count(), s=(col("x") // col("y")).min()),
}  # fmt: skip
numbers = st.one_of(st.none(), st.integers(-3, 3), st.sampled_from([MOST, -MOST - 1]))
words = st.one_of(st.none(), st.sampled_from(["0", "1", "2", "5", "200", "x", ""]))


@pytest.mark.parametrize("name", FLOWS)
@examples(3)
@given(rows=st.lists(st.tuples(numbers, numbers, words), max_size=8), size=st.integers(1, 4), checkpoint=st.booleans())
def test_null_is_what_the_oracle_gives_for_a_plan_that_tries(
        name: str, rows: list[tuple[Any, ...]], size: int, checkpoint: bool,
        tmp_path_factory: pytest.TempPathFactory) -> None:  # fmt: skip
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    types = [("x", pa.int64()), ("y", pa.int64()), ("w", pa.string())]
    table = pa.table([pa.array(list(c), t) for c, (_, t) in zip(columns, types, strict=True)], [n for n, _ in types])
    course = Course([size], checkpoint=checkpoint, options={"on_error": "null"})
    got, _ = ran(FLOWS[name], table, course, tmp_path_factory.mktemp("job"))
    assert_same(got, oracle.run(null_on_error(FLOWS[name](si.from_arrow(table)).op)))


def test_a_job_that_a_row_has_ended_goes_on_with_null(tmp_path: Path) -> None:
    table = pa.table({"k": [1, 2] * 20, "x": [2] * 30 + [0] + [3] * 9})
    for key, window in ((col("k"), False), (col("k"), True)):
        folder = tmp_path / str(window)

        def flow(key: Any = key, window: bool = window) -> Flow:
            rows = si.from_arrow(pa.Table.from_batches(table.to_batches(max_chunksize=4)))
            by = [si.tumbling("x", 100)] if window else []
            return rows.group_by(*by, k=key).agg(s=(60 // col("x")).sum(), n=si.count())

        with pytest.raises(si.ScaleinError, match="division by zero"):
            run(flow(), checkpoint=folder, every="1ms", max_rows_per_second=100_000)
        got = run(flow(), checkpoint=folder, on_error="null")
        assert_same(got, oracle.run(null_on_error(flow().op)))


@si.udf
def looping(x: int) -> int:
    total = 0
    for k in range(10):
        total += 60 // (x - k)
    return total


@si.udf
def or_none(x: int | None, y: int) -> int | None:
    if x is None:
        return -1
    if y > 3:
        return None
    return x // y


@si.udf(compile=False)
def plain(word: str | None, x: int) -> int | None:
    return None if word is None else int(word) // x


def test_a_function_that_fails_is_null_in_that_row() -> None:
    x, y, words = [0, 20, None, 4, 7, 12], [1, 0, 0, None, 5, 2], ["1", "x", None, "2", "60", "7"]
    table = pa.table({"x": x, "y": y, "w": words})
    flow = si.from_arrow(table).select(
        a=looping(col("x")), b=or_none(col("x"), col("y")), c=plain(col("w"), col("y")),
        d=looping(col("x")).fill_null(0), e=when(col("x") > 5).then(plain(col("w"), col("y"))).otherwise(-3))
    got = run(flow, on_error="null").to_pydict()
    sums = [None, sum(60 // (20 - k) for k in range(10)), None, None, None, sum(60 // (12 - k) for k in range(10))]
    assert got["a"] == sums
    assert got["b"] == [0, None, -1, None, None, 6]
    assert got["c"] == [1, None, None, None, 12, 3]
    assert got["d"] == [0 if value is None else value for value in sums]
    assert got["e"] == [-3, None, -3, -3, 12, 3]
    assert oracle.run(null_on_error(flow.op)).to_pydict() == got
    total = si.from_arrow(table).group_by(k=or_none(col("x"), col("y"))).agg(m=looping(col("x")).max(), n=si.count())
    assert_same(run(total, on_error="null"), oracle.run(null_on_error(total.op)))
    with pytest.raises(si.ScaleinError, match=r"looping\(x\)|or_none|plain"):
        run(flow)


def test_what_is_no_rows_fault_is_an_error_as_ever() -> None:
    def broken(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise RuntimeError("my own mistake")

    with pytest.raises(si.ScaleinError, match="my own mistake"):
        run(si.from_arrow(TABLE).map_batches(broken, TABLE.schema), on_error="null")
    with pytest.raises(si.ScaleinError, match="the sum `s`"):
        run(si.from_arrow(pa.table({"x": [MOST, MOST]})).group_by().agg(s=col("x").sum()), on_error="null")
    with pytest.raises(si.ScaleinError, match=r"does not know this word(.|\n)*'raise', 'null', or a sink"):
        run(si.from_arrow(TABLE), on_error="ignore")


TIMED = "s k\n 1 a\n 12 a\n---\n 25 b\n---\n oops c\n 3 late\n 27 d\n---\n 55 a"
WINDOWS = {"window_start": [0, 10, 20, 50], "window_end": [10, 20, 30, 60], "n": [1, 1, 2, 1]}


def timed() -> Flow:
    rows = si.from_source(stream(TIMED)).with_columns(t=col("s").cast(pa.int64())).with_watermark("t", 2)
    return rows.group_by(si.tumbling("t", 10)).agg(n=si.count())


def test_a_time_that_cannot_be_computed_goes_the_way_of_other_failures() -> None:
    with pytest.raises(si.ScaleinError, match=r"impossible cast in `s.cast(.|\n)*test_on_error"):
        run(timed())
    bad, late = si.to_memory(), si.to_memory()
    assert run(timed(), on_error=bad, late=late).to_pydict() == WINDOWS
    assert bad.table().select(["s", "k"]).to_pydict() == {"s": ["oops"], "k": ["c"]}
    assert "impossible cast" in bad.table()["error"][0].as_py()
    assert late.table().column("k").to_pylist() == ["late"]
    out = si.to_memory()
    job = timed().start(sink=out, on_error="null", late=si.to_memory())
    job.wait()
    assert (out.table().to_pydict(), job.metrics()["timeless_rows"]) == (WINDOWS, 1)


@pytest.mark.parametrize("agg", [(60 // col("x")).sum(), (60 // col("x")).collect()])
def test_poison_among_late_rows_does_not_end_the_job(agg: Any) -> None:
    """Late rows are sorted out before the group computes anything: what fails must be found before."""
    text = "t x\n 1 1\n---\n 30 2\n---\n 2 5\n 31 0\n 32 3\n---\n 70 1"
    bad, late = si.to_memory(), si.to_memory()
    flow = si.from_source(stream(text)).with_watermark("t", 2).group_by(si.tumbling("t", 10)).agg(s=agg)
    got = run(flow, on_error=bad, late=late)
    assert got.column("window_start").to_pylist() == [0, 30, 70]
    assert bad.table().select(["t", "x"]).to_pylist() == [{"t": 31, "x": 0}]
    assert late.table().to_pylist() == [{"t": 2, "x": 5}]


def test_a_row_whose_lists_differ_in_length_is_set_aside() -> None:
    rows = [{"id": 1, "a": [1, 2], "b": ["x", "y"]}, {"id": 2, "a": [1], "b": []}, {"id": 3, "a": None, "b": []},
            {"id": 4, "a": [7], "b": ["z"]}]  # fmt: skip
    good, bad = si.to_memory(), si.to_memory()
    si.from_arrow(rows).explode("a", "b").start(sink=good, on_error=bad).wait()
    assert good.table().to_pydict() == {"id": [1, 1, 4], "a": [1, 2, 7], "b": ["x", "y", "z"]}
    assert bad.table().select(["id", "a", "b"]).to_pylist() == [rows[1]]
    assert bad.table()["bad_line"].to_pylist() == [2]


@pytest.mark.parametrize("window", [
    si.tumbling("t", "10s"), si.sliding("t", "10s", every="3s"), si.tumbling(col("t") + datetime.timedelta(0), "10s"),
], ids=["own", "sliding", "computed"])  # fmt: skip
@pytest.mark.parametrize("agg", [col("v").sum(), col("v").collect().list.len()], ids=["partial", "buffered"])
def test_a_time_whose_window_does_not_fit_is_set_aside(window: Any, agg: Any) -> None:
    """Rows of the same batch, and those that only just fit, are counted as in `collect`."""
    limit = 2**63 - 1
    last = (limit - 10 * 10**9) // (10 * 10**9) * 10 * 10**9 - 10**9  # its window fits
    times = [0, 10**9, limit, -limit, last, 10**9]
    table = pa.table({"t": pa.array(times, pa.timestamp("ns")), "v": [1, 2, 4, 8, 16, 32]})
    flow = si.from_arrow(table).with_watermark("t", "1s").group_by(window).agg(s=agg)
    bad = si.to_memory()
    got = run(flow, on_error=bad)
    assert sorted(bad.table()["v"].to_pylist()) == [4, 8]
    assert all("windows of" in error for error in bad.table()["error"].to_pylist())
    rest = si.from_arrow(table.filter(pa.compute.is_in(table["v"], pa.array([1, 2, 16, 32]))))
    want = rest.group_by(window).agg(s=agg).collect()
    assert sorted(got.column("window_start").cast(pa.int64()).to_pylist()) == sorted(
        want["window_start"].cast(pa.int64()).to_pylist())
    assert sum(got.column("s").to_pylist()) == sum(want["s"].to_pylist())


def test_distinct_rows_stay_distinct_around_a_row_that_fails() -> None:
    rows = pa.table({"k": [1, 2, 1], "x": [1, 0, 5]})
    flow = si.from_arrow(rows).with_columns(y=10 // col("x")).distinct("k")
    failed = si.to_memory()
    assert run(flow, on_error=failed).to_pydict() == {"k": [1], "x": [1], "y": [10]}
    assert failed.table()["k"].to_pylist() == [2]
