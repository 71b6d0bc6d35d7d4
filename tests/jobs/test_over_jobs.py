"""Rows of groups in jobs: what a job gives is what `collect` gives, whatever batches, workers, kills and resumes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.exec import over_operator
from scalein.testing import Stream, until
from tests.engines import examples
from tests.same import assert_same

T = pa.timestamp("ms")
SCHEMA = pa.schema([("k", pa.string()), ("j", pa.int64()), ("t", T), ("x", pa.int64()), ("y", pa.float64()),
                    ("s", pa.string())])
Make = Callable[[si.Flow], si.Flow]


def table_of(rows: int, keys: int, seed: int, disorder: int = 200) -> pa.Table:
    """Rows out of order by less than a second, many at one time, some without a time."""
    made = random.Random(seed)
    times = [k * 40 // 9 * 9 + made.randrange(disorder) // 7 * 7 for k in range(rows)]
    return pa.table({
        "k": [made.choice(["a", None, "c"]) if keys < 4 else f"key {made.randrange(keys)}" for _ in times],
        "j": [made.randrange(2) for _ in times],
        "t": pa.array([None if made.random() < 0.03 else t for t in times], T),
        "x": pa.array([None if made.random() < 0.1 else made.randint(-50, 50) for _ in times], pa.int64()),
        "y": [made.choice([1.5, -2.0, float("nan"), None, float(made.randint(-9, 9))]) for _ in times],
        "s": [made.choice(["", "x", "a longer text", None]) for _ in times]}, schema=SCHEMA)


def over_rows(flow: si.Flow) -> si.Flow:
    return flow.with_columns(
        before=col("s").lag(2).over("k", order_by="t"), least=col("y").min().over("k", order_by="t", rows=4),
        total=col("y").sum().over("k", "j", order_by="t", rows=3), n=si.count().over("k", order_by="t", rows=5))


def over_time(flow: si.Flow) -> si.Flow:
    return flow.with_columns(
        n=si.count().over("k", order_by="t", within="1s"), top=col("x").max().over("k", order_by="t", within="300ms"),
        texts=col("s").n_unique().over(order_by="t", within="100ms"))


def running(flow: si.Flow) -> si.Flow:
    return flow.with_columns(
        n=si.row_number().over("k", order_by="t"), r=si.rank().over("k", order_by="t"),
        d=si.dense_rank().over("k", order_by="t"), total=col("x").sum().over("k", order_by="t"),
        known=col("x").count().over("k", order_by="t"), rows=si.count().over("k", order_by="t"),
        least=col("y").min().over("k", order_by="t"), most=col("y").max().over("k", order_by="t"),
        first=col("s").first().over("k", order_by="t"), before=col("x").lag().over("k", order_by="t"),
        all=col("x").sum().over(order_by="t"), when=col("t").min().over("j", order_by="t"),
        mean=col("x").mean().over("k", order_by="t"), mean_of_floats=col("y").mean().over("j", order_by="t"),
        last=col("s").last().over("k", order_by="t"))


def of_windows(flow: si.Flow) -> si.Flow:
    """Places among the windows' results, and the greatest of each time: SQL's ROW_NUMBER, and Nexmark's query 5."""
    sums = flow.group_by("k", "j", si.sliding("t", "1s", every="300ms")).agg(total=col("x").sum(), n=si.count())
    place = si.row_number().over("window_start", "window_end", order_by=["total", "k", "j"])
    greatest = sums.group_by("window_start", "window_end").agg(total=col("total").max())
    return sums.with_columns(place=place).join(
        greatest, on=["window_start", "window_end", "total"], keep="forever").filter(col("place") > 0)


def at_the_end(flow: si.Flow) -> si.Flow:
    return flow.with_columns(next=col("x").lead().over("k", order_by="t"), mean=col("x").mean().over("k"),
                             place=si.row_number().over("k", order_by=["x", "t"]))


SHAPES: dict[str, Make] = {
    "rows": over_rows, "time": over_time, "running": running, "end": at_the_end, "windows": of_windows,
    "top of sessions' results": lambda flow: flow.group_by("k", "j", si.session("t", gap="70ms")).agg(
        n=si.count()).group_by("window_end").top_k(1, by=["n", "j", "k"]),
    "distinct": lambda flow: flow.distinct("k", within="1s"),
    "distinct all": lambda flow: flow.distinct("j", "s", within="1s"),
    "top": lambda flow: flow.group_by("k", si.tumbling("t", "1s")).top_k(2, by=["x", "y"]),
    "sliding": lambda flow: flow.group_by("j", si.sliding("t", "1s", every="300ms")).bottom_k(3, by="y"),
    "no keys": lambda flow: flow.group_by(si.cumulate("t", "2s", step="1s")).top_k(1, by="x"),
    "groups": lambda flow: flow.group_by("k").top_k(2, by="x"),
    "count": lambda flow: flow.group_by("k", si.count_window(7, every=3)).agg(n=si.count(), s=col("x").sum()),
    "then a window": lambda flow: flow.with_columns(before=col("x").lag().over("k", order_by="t"))
    .group_by(si.tumbling("t", "1s")).agg(s=col("before").sum(), n=si.count()),
    "top then a window": lambda flow: flow.group_by("k", si.tumbling("t", "1s")).top_k(2, by="x")
    .group_by(si.tumbling("t", "2s")).agg(s=col("x").sum(), n=si.count()),
}  # fmt: skip


def stream(table: pa.Table, size: int) -> si.Flow:
    flow = si.from_batches(lambda: iter(table.to_batches(max_chunksize=size)), table.schema)
    return flow.with_watermark("t", "300ms")


def wanted(make: Make, table: pa.Table) -> pa.Table:
    return make(si.from_arrow(table).with_watermark("t", "300ms")).collect()


@pytest.mark.parametrize("shape", SHAPES)
@examples(3)
@given(st.integers(0, 2**32), st.integers(1, 90), st.sampled_from([0, 1, 40, 400]), st.sampled_from([3, 60]))
def test_jobs_give_what_collect_gives(shape: str, seed: int, size: int, rows: int, keys: int) -> None:
    table, make = table_of(rows, keys, seed), SHAPES[shape]
    out = si.to_memory()
    job = make(stream(table, size)).start(sink=out, workers=1 + seed % 3)
    job.wait()
    assert not job.metrics()["late_rows"]
    assert_same(out.table(), wanted(make, table), tolerance=1e-9)


@pytest.mark.parametrize("size", [1, 13])
@pytest.mark.parametrize("memory", [None, "1MB"])
def test_frames_in_time_of_many_rows(memory: str | None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows wait until computing pays, and no row is late downstream; or they are computed by shares of the keys."""
    monkeypatch.setattr(over_operator, "MANY_ROWS", 0)
    monkeypatch.setattr(over_operator, "COMPUTE_SHARE", 1 << 30)
    monkeypatch.setattr(over_operator, "most_bytes", lambda memory: None if memory is None else 3000)
    table = table_of(400, 60, size)
    for make in (over_time, lambda flow: flow.with_columns(n=si.count().over("k", order_by="t", within="1s"))
                 .group_by("j", si.tumbling("t", "1s")).agg(n=col("n").sum()),
                 lambda flow: flow.with_columns(y=col("y").sum().over("j", "s", order_by="t", within="2s"),
                                                x=col("x").lag(2).over("j", "s", order_by="t"))):
        out = si.to_memory()
        job = make(stream(table, size)).start(sink=out, workers=2, memory=memory)
        job.wait()
        assert not job.metrics()["late_rows"]
        assert_same(out.table(), wanted(make, table), tolerance=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_columns_that_are_never_null(shape: str) -> None:
    """Rows that a key remembers are among others, for which columns are null that are not in the input."""
    table = table_of(200, 3, 8)
    full = {name: values.fill_null({"string": "", "int64": 7, "double": 1.5}.get(str(values.type), 0))
            for name, values in zip(table.column_names, table.columns, strict=True) if name != "t"}
    full["t"] = table["t"].cast(pa.int64()).fill_null(0).cast(T)
    schema = pa.schema([field.with_nullable(False) for field in SCHEMA])
    table = pa.table({name: full[name] for name in SCHEMA.names}, schema=schema)
    out = si.to_memory()
    flow = si.from_batches(lambda: iter(table.to_batches(max_chunksize=17)), schema).with_watermark("t", "10s")
    SHAPES[shape](flow).start(sink=out).wait()
    assert_same(out.table(), SHAPES[shape](si.from_arrow(table).with_watermark("t", "10s")).collect(), tolerance=1e-9)


@pytest.mark.parametrize("shape", ["rows", "time", "running", "distinct", "sliding", "count"])
def test_resumes_where_it_stopped(shape: str, tmp_path: Path) -> None:
    """Starts end in the middle of the source; results are those of one run."""
    table, make = table_of(600, 20, 5), SHAPES[shape]

    def slowly() -> Iterator[pa.RecordBatch]:
        for batch in table.to_batches(max_chunksize=37):
            time.sleep(0.02)
            yield batch

    for number in range(1, 4):
        flow = si.from_batches(slowly, table.schema).with_watermark("t", "300ms")
        job = make(flow).start(sink=si.to_parquet(tmp_path / "out"), checkpoint=tmp_path / "ckpt", every="10ms",
                               workers=number)
        if number == 3:
            job.wait()
        else:
            until = time.monotonic() + 60
            while job.metrics()["rows_in"] < 37 * 5 * number and time.monotonic() < until:
                time.sleep(0.005)
            job.stop()
    assert_same(pq.read_table(tmp_path / "out"), wanted(make, table), tolerance=1e-9)


def test_late_rows_are_counted() -> None:
    times = [0, 100, 5000, 4000, 6000, 300, 9000]
    table = pa.table({"k": [1] * 7, "t": pa.array(times, T), "x": [1, 2, 3, 4, 5, 6, 7]})
    flow = si.from_batches(table.to_batches(max_chunksize=1), table.schema).with_watermark("t", "1s")
    for make, late, rows in ((lambda f: f.with_columns(n=si.row_number().over("k", order_by="t")), 1, 6),
                             (lambda f: f.group_by("k", si.tumbling("t", "2s")).top_k(9, "x"), 1, 6),
                             (lambda f: f.group_by("k", si.sliding("t", "2s", every="1s")).top_k(9, "x"), 1, 12),
                             (lambda f: f.distinct("k", within="1s"), 1, 5)):  # fmt: skip
        out = si.to_memory()
        job = make(flow).start(sink=out)
        job.wait()
        assert job.metrics()["late_rows"] == late
        assert out.table().num_rows == rows


@pytest.mark.parametrize(("make", "why"), [
    (lambda f: f.with_columns(n=col("x").lead().over("k", order_by="t")), "all rows of a key"),
    (lambda f: f.with_columns(n=col("x").sum().over("k")), "no last row|no order"),
    (lambda f: f.group_by("k").top_k(2, "x"), "no last row"),
    (lambda f: f.with_columns(n=col("x").quantile(0.5).over("k", order_by="t")), "bound"),
])  # fmt: skip
def test_what_endless_sources_cannot_give(make: Make, why: str) -> None:
    def batch(start: int, count: int) -> pa.RecordBatch:
        numbers = pa.array(range(start, start + count))
        return pa.record_batch({"k": numbers, "t": numbers.cast(T), "x": numbers})

    endless = si.generate(batch, {"k": pa.int64(), "t": T, "x": pa.int64()}).with_watermark("t", "1s")
    with pytest.raises(si.BadArgument, match=why):
        make(endless).start(sink=si.to_memory())


def test_distinct_within_forgets_keys() -> None:
    """State is bounded by the watermark: a thousand keys that never come again."""
    table = pa.table({"k": range(4000), "t": pa.array([k * 100 for k in range(4000)], T)})
    from scalein.exec import over_operator

    sizes: list[int] = []
    forget = over_operator.SpacedOver._forget

    def watched(self: over_operator.SpacedOver, until: int) -> None:
        forget(self, until)
        sizes.append(sum(batch.num_rows for batch in self._records.scan()))

    over_operator.SpacedOver._forget = watched  # type: ignore[method-assign]
    try:
        out = si.to_memory()
        flow = si.from_batches(table.to_batches(max_chunksize=200), table.schema).with_watermark("t", "0s")
        flow.distinct("k", within="10s").start(sink=out).wait()
    finally:
        over_operator.SpacedOver._forget = forget  # type: ignore[method-assign]
    assert out.table().num_rows == 4000
    assert sizes[-1] <= 101


ENDLESS: dict[str, Make] = {
    "windows": of_windows,
    "then windows": lambda flow: flow.group_by("k", si.tumbling("t", "300ms")).agg(n=si.count()).group_by(
        "window_end").agg(most=col("n").max()).group_by(si.tumbling("window_end", "2s")).agg(s=col("most").sum()),
    "top": lambda flow: flow.group_by("k", si.cumulate("t", "900ms", step="300ms")).agg(n=si.count()).group_by(
        "window_start", "window_end").top_k(1, by=["n", "k"]),
    "running": lambda flow: flow.with_columns(mean=col("x").mean().over("k", order_by="t")),
}  # fmt: skip


@pytest.mark.parametrize("shape", ENDLESS)
def test_rows_come_before_the_end(shape: str) -> None:
    """Values over results of windows, and running means, as time passes."""
    table, make = table_of(300, 3, 4), ENDLESS[shape]
    source = Stream({"a": table.to_batches(max_chunksize=37)}, ends=False)
    out, rows = si.to_memory(), wanted(make, table)
    job = make(si.from_source(source).with_watermark("t", "300ms")).start(sink=out)
    until(lambda: out.table().num_rows > rows.num_rows // 3, job)
    source.end()
    job.wait()
    assert_same(out.table(), rows, tolerance=1e-9)
