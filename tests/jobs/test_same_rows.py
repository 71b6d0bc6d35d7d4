"""A job gives the rows that the oracle gives, however its input is cut, stopped, scaled and spilled."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.testing import Stream, until
from tests import oracle
from tests.engines import examples
from tests.jobs.streams import Course, cut, ran, rows_in
from tests.oracle import streams
from tests.oracle.streams import Batch, End
from tests.same import assert_same

Build = Callable[[Flow], Flow]

DELAY_MS = 40
NAMES = pa.table({"k": ["a", "b", "c", "c"], "name": ["Anna", "Bert", "Cleo", "Clio"], "weight": [1, 2, 3, 4]})


@si.udf
def twice(x: int) -> int:
    return x + x


def marked(build: Build) -> Build:
    return lambda flow: build(flow.with_watermark("t", f"{DELAY_MS}ms"))


def add_one(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"k": batch.column("k"), "y": pc.add(batch.column("x"), 1)})


def tripled(batch: pa.RecordBatch) -> pa.RecordBatch:
    """More rows than came, so that rows of the group's input have numbers of their own."""
    y = [None if each is None else each + step for each in batch.column("y").to_pylist() for step in (0, 10, 20)]
    return pa.record_batch({"k": [each for each in batch.column("k").to_pylist() for _ in range(3)], "y": y}, TRIPLED)


TRIPLED = pa.schema({"k": pa.string(), "y": pa.int64()})
MAPPED = pa.schema({"k": pa.string(), "y": pa.int64()})
KEYS = ["k", "g"]
SIMPLE = {"n": si.count(), "total": col("x").sum(), "m": col("f").mean(), "lo": col("x").min(), "hi": col("f").max(),
          "word": col("k").max(), "first_word": col("k").min(), "known": col("x").count(),
          "share": (col("x") > 1).mean(), "few": si.count().filter(col("x") > 2),
          "some": col("x").sum().filter(col("f") > 0)}  # fmt: skip
TOGETHER = {"v": col("x").var(), "s": col("f").std(), "af": col("k").arg_min(col("f")), "ak": col("f").arg_max("k"),
            "ff": col("k").first(), "lf": col("f").last(), "lb": (col("x") > 1).last(), "lt": col("t").last(),
            "co": si.cov("x", "g"), "cr": si.corr("x", "g"), "fx": col("k").first().filter(col("x") > 1)}
EXPRESSIONS = {"mean": col("x").sum() / si.count(), "span": col("x").max() - col("x").min(),
               "share": (si.count().filter(col("x") > 1) / si.count()).round(2), "n": si.count()}
ORDERED = {"f": col("x").first(), "l": col("x").last(), "c": col("x").collect(), "a": col("k").arg_max(col("x"))}
LARGE = {"u": col("x").n_unique(), "q": col("f").quantile(0.5), "v": col("x").var(), "s": col("f").std(),
         "top": col("x").top_k(2, by=col("f"))}  # fmt: skip

FLOWS: dict[str, tuple[Build, bool]] = {
    "rows": (lambda s: s.filter(col("x") > 0).with_columns(y=col("x") * 2).drop("f"), True),
    "udf": (lambda s: s.filter(col("x").is_not_null()).select("k", y=twice(col("x"))), True),
    "map": (lambda s: s.map_batches(add_one, MAPPED).filter(col("y") > 1), True),
    "join": (lambda s: s.join(NAMES, on="k", how="left").select("k", "x", "name"), False),
    "cross join": (lambda s: s.join(NAMES, how="cross").filter(col("x") > col("weight")), False),
    "right join": (lambda s: s.filter(col("x") > 0).join(NAMES, on="k", how="right").select("k", "x", "name"), False),
    "outer join": (lambda s: s.distinct("k").join(NAMES, on="k", how="outer").group_by(b=col("x") > 1).agg(
        n=si.count(), w=col("weight").sum()), False),
    "running": (lambda s: s.group_by(*KEYS).agg(**SIMPLE), False),
    "running joined": (lambda s: s.join(NAMES, on="k").group_by("name").agg(w=col("weight").sum()), False),
    "float keys": (lambda s: s.group_by("f").agg(n=si.count()), False),
    "bool and time keys": (lambda s: s.group_by("t", b=col("x") > 1).agg(n=si.count()), False),
    "no keys": (lambda s: s.group_by().agg(**SIMPLE), False),
    "together": (lambda s: s.group_by("k").agg(**TOGETHER, **SIMPLE), False),
    "together, no keys": (lambda s: s.group_by().agg(**TOGETHER), False),
    "together exploded": (lambda s: s.with_columns(y=col("x") + 1).map_batches(tripled, TRIPLED).group_by("k").agg(
        f=col("y").first(), l=col("y").last(), a=col("y").arg_max("k")), False),
    "tumbling together": (marked(lambda s: s.group_by("g", si.tumbling("t", "50ms")).agg(**TOGETHER)), False),
    "tumbling together late mark": (lambda s: s.with_columns(u=col("t")).with_watermark("u", f"{DELAY_MS}ms").group_by(
        si.tumbling("u", "30ms")).agg(**TOGETHER), False),
    "sliding together": (marked(lambda s: s.group_by("g", si.sliding("t", "40ms", every="15ms")).agg(
        **TOGETHER)), False),
    "sliding spread": (marked(lambda s: s.group_by("g", si.sliding("t", "40ms", every="15ms")).agg(
        v=col("x").var(), s=col("f").std())), False),
    "expressions": (lambda s: s.group_by("k").agg(**EXPRESSIONS), False),
    "expressions, no keys": (lambda s: s.group_by().agg(**EXPRESSIONS, r=si.corr("x", "g") * 2), False),
    "tumbling expressions": (marked(lambda s: s.group_by("g", si.tumbling("t", "50ms")).agg(**EXPRESSIONS)), False),
    "sliding expressions": (marked(lambda s: s.group_by(si.sliding("t", "40ms", every="15ms")).agg(
        **EXPRESSIONS, r=si.cov("x", "g") + 1, u=col("x").n_unique() / si.count())), False),
    "no keys, large": (lambda s: s.group_by().agg(**ORDERED, **LARGE), False),
    "ordered": (lambda s: s.group_by("k").agg(**ORDERED), False),
    "large": (lambda s: s.group_by("g").agg(**LARGE), False),
    "having": (lambda s: s.group_by("k").agg(n=si.count()).filter(col("n") > 2).select(m=col("n") + 1), False),
    "tumbling": (marked(lambda s: s.group_by("k", si.tumbling("t", "30ms")).agg(**SIMPLE)), False),
    "tumbling filtered": (marked(lambda s: s.filter(col("x") > 0).group_by(si.tumbling("t", "50ms")).agg(
        n=si.count(), m=col("f").mean())), False),
    "tumbling late mark": (lambda s: s.with_columns(u=col("t")).with_watermark("u", f"{DELAY_MS}ms").group_by(
        "g", si.tumbling("u", "30ms")).agg(n=si.count()), False),
    "tumbling large": (marked(lambda s: s.group_by("k", si.tumbling("t", "50ms")).agg(**ORDERED, **LARGE)), False),
    "sliding": (marked(lambda s: s.group_by("g", si.sliding("t", "40ms", every="15ms")).agg(**SIMPLE)), False),
    "sliding by an offset": (marked(lambda s: s.group_by("g", si.sliding("t", "40ms", every="20ms", offset="-7ms")).agg(
        **SIMPLE)), False),
    "tumbling by an offset": (marked(lambda s: s.group_by("k", si.tumbling("t", "50ms", offset="13ms")).agg(
        **SIMPLE, **LARGE)), False),
    "cumulating": (marked(lambda s: s.group_by("g", si.cumulate("t", "60ms", step="15ms", offset="20ms")).agg(
        **SIMPLE)), False),
    "cumulating large": (marked(lambda s: s.group_by(si.cumulate("t", "60ms", step="30ms")).agg(**ORDERED)), False),
    "window over cumulating": (marked(lambda s: s.group_by("g", si.cumulate("t", "60ms", step="20ms")).agg(
        n=si.count()).group_by(si.tumbling("window_end", "20ms")).agg(s=col("n").sum())), False),
    "sliding large": (marked(lambda s: s.group_by(si.sliding("t", "40ms", every="20ms")).agg(**ORDERED)), False),
    "window over window": (marked(lambda s: s.group_by("k", si.tumbling("t", "20ms")).agg(n=si.count()).group_by(
        si.tumbling("window_start", "60ms")).agg(most=col("n").max(), groups=si.count())), False),
    "window over sliding": (marked(lambda s: s.group_by(si.sliding("t", "20ms", every="10ms")).agg(
        n=si.count()).group_by(w=col("window_end"), b=col("n") > 1).agg(s=col("n").sum())), False),
    "window over running": (marked(lambda s: s.group_by("k").agg(t=col("t").max()).group_by(
        si.tumbling("t", "30ms")).agg(n=si.count())), False),
    "integer time": (lambda s: s.with_columns(i=col("t").dt.epoch("ms")).with_watermark("i", DELAY_MS).group_by(
        "k", si.tumbling("i", 25)).agg(n=si.count()), False),
    "distinct": (lambda s: s.distinct(), True),
    "distinct keys": (lambda s: s.distinct("k", "g").select("k", "g", "x"), True),
    "limit": (lambda s: s.filter(col("x") > 0).limit(7).with_columns(y=col("x") + 1), True),
    "limit and group": (lambda s: s.limit(20).group_by("k").agg(n=si.count()), False),
    "group and limit": (lambda s: s.group_by("k").agg(n=si.count()).distinct("n").group_by().agg(
        c=si.count()), False),
    "sort": (lambda s: s.sort("x", "t", "f", "k", "g"), True),
    "sorted windows": (marked(lambda s: s.group_by("k", si.tumbling("t", "30ms")).agg(n=si.count()).sort(
        "window_start", -col("n"), "k")), True),
    "limit of sorted windows": (marked(lambda s: s.group_by("g", si.sliding("t", "40ms", every="15ms")).agg(
        n=si.count(), x=col("x").sum()).filter(col("n") > 1).sort("window_end", "g").select("g", "n").limit(9)), True),
    "limit that a sort has": (marked(lambda s: s.group_by("k", si.tumbling("t", "20ms")).agg(n=si.count()).bottom_k(
        5, by=["window_start", "n", "k"])), True),
    "sorted groups": (lambda s: s.group_by("k").agg(n=si.count()).sort("n", "k").limit(2), True),
}  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Rows whose times are at most DELAY_MS behind the greatest before them."""
    count = draw(st.integers(0, 60))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def holes(values: Any, share: float, type_: pa.DataType) -> pa.Array:
        return pa.array(values, type_, mask=rng.random(count) < share)

    base = np.cumsum(rng.integers(0, draw(st.sampled_from([1, 12, 80])), count))
    base += draw(st.sampled_from([0, -500, 10**12]))
    times = base - rng.integers(0, DELAY_MS + 1, count)
    words = ["a", "b", "c", "", "a longer key than twelve bytes"]
    return pa.table({
        "k": holes([words[i] for i in rng.integers(0, len(words), count)], 0.2, pa.string()),
        "g": holes(rng.integers(-2, 3, count), 0.2, pa.int16()),
        "x": holes(rng.integers(-3, 10, count), 0.2, pa.int64()),
        "f": holes(rng.choice([0.0, -0.0, 1.5, -2.25, float("nan"), 4.0], count), 0.2, pa.float64()),
        "t": holes(times, draw(st.sampled_from([0.0, 0.1])), pa.timestamp("ms")),
    })  # fmt: skip


@st.composite
def courses(draw: st.DrawFn) -> Course:
    return Course(
        sizes=draw(st.lists(st.integers(1, 25), min_size=1, max_size=3)),
        workers=draw(st.integers(1, 4)),
        checkpoint=draw(st.booleans()),
        memory=draw(st.sampled_from([None, None, "1B", "200MB"])),
        stops=draw(st.lists(st.integers(0, 8), max_size=2)),
        scales=draw(st.lists(st.integers(1, 4), max_size=2)),
        is_tight=draw(st.booleans()),
        seed=draw(st.none() | st.integers(0, 1 << 32)),
    )


@pytest.mark.parametrize("name", FLOWS)
@examples(2)
@given(table=tables(), course=courses())
def test_a_job_gives_the_rows_of_the_oracle(name: str, table: pa.Table, course: Course) -> None:
    build, ordered = FLOWS[name]
    trace = streams.run(build(si.flow(table.schema)), [*map(Batch, cut(table, course.sizes)), End()])
    note(str(course))
    with tempfile.TemporaryDirectory() as folder:
        got, job = ran(build, table, course, Path(folder))
    assert_same(got, trace.table(), ordered=ordered, tolerance=1e-9)
    assert_same(trace.table(), oracle.collect(build(si.from_arrow(table))), ordered=ordered, tolerance=1e-9)
    assert trace.late == []
    assert job.metrics()["rows_in"] == table.num_rows or "limit" in name  # which may end it before
    assert job.metrics()["late_rows"] == 0


def pieces(table: pa.Table, rows: int = 2) -> Flow:
    return si.from_arrow(pa.Table.from_batches(table.to_batches(max_chunksize=rows)))


def check(flow: Flow, *, ordered: bool = False, **options: Any) -> None:
    out = si.to_memory()
    job = flow.start(sink=out, workers=2, **options)
    job.wait()
    assert_same(out.table(), oracle.collect(flow), ordered=ordered, tolerance=1e-9)
    assert job.metrics()["late_rows"] == 0


COLUMNS: dict[str, pa.Array] = {
    "decimal": pa.array([Decimal("1.5"), Decimal("-2.25"), None, Decimal("1.5")], pa.decimal128(10, 2)),
    "uint64": pa.array([2**63 + 1, 0, None, 2**63 + 1], pa.uint64()),
    "dictionary": pa.array(["a", "b", None, "a"]).dictionary_encode(),
    "binary": pa.array([b"\0", b"", None, b"\0"]),
    "fixed": pa.array([b"abc", b"abd", None, b"abc"], pa.binary(3)),
    "bool": pa.array([True, False, None, True]),
    "zoned": pa.array([1, 2, None, 1], pa.timestamp("us", "Europe/Berlin")),
    "float32": pa.array([0.0, -0.0, float("nan"), None], pa.float32()),
    "view": pa.array(["x" * 50, "y", None, "x" * 50], pa.string_view()),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_types(name: str) -> None:
    table = pa.table({"k": COLUMNS[name], "x": [1, 2, 3, 4], "t": pa.array([1, None, 30, 4], pa.int64())})
    flow = pieces(table, 1)
    check(flow.group_by("k").agg(n=si.count(), x=col("x").sum()))
    check(flow.distinct("k"), ordered=True)
    check(flow.with_watermark("t", 50).group_by(b=col("x") > 2).agg(lo=col("k").min(), hi=col("k").max(),
                                                                    n=col("k").count()), emit="final")
    check(flow.with_watermark("t", 50).group_by("k", si.tumbling("t", 10)).agg(lo=col("k").min(), f=col("k").first()))
    picked = {"f": col("k").first(), "l": col("k").last(), "a": col("k").arg_max("x"), "c": col("x").arg_min("k")}
    check(flow.group_by(b=col("x") > 2).agg(**picked))
    check(flow.with_watermark("t", 50).group_by(si.tumbling("t", 10)).agg(**picked))
    check(flow.sort("x"), ordered=True)


@pytest.mark.parametrize("count", [15, 16, 17, 20])
def test_many_keys(count: int) -> None:
    table = pa.table({f"c{k}": pa.array([1, 2, 1, None], pa.int64()) for k in range(count)} | {"t": [1, 2, 3, 4]})
    keys = table.column_names[:-1]
    check(pieces(table).group_by(*keys).agg(n=si.count()))
    check(pieces(table).with_watermark("t", 0).group_by(*keys, si.tumbling("t", 2)).agg(n=si.count()))
    many = {f"{fn}{k}": getattr(col(k), fn)() for k in keys for fn in ("sum", "max")}
    check(pieces(table).group_by("c0").agg(**many))


TIMED = pa.table({"k": [1, 1, 2] * 5, "t": range(0, 150, 10), "x": [1, 20, 3] * 5})
UNIONS: dict[str, Build] = {
    "rows": lambda s: s.union(s.with_columns(x=col("x") + 1)),
    "running": lambda s: s.union(s.filter(col("x") > 1)).group_by("k").agg(n=si.count(), s=col("x").sum()),
    "marked before": lambda s: s.with_watermark("t", 200).union(s.with_watermark("t", 200)).group_by(
        si.tumbling("t", 20)).agg(n=si.count()),
    "marked behind": lambda s: s.union(s.with_columns(t=col("t") + 5)).with_watermark("t", 200).group_by(
        "k", si.tumbling("t", 20)).agg(n=si.count()),
    "of groups": lambda s: s.group_by("k").agg(n=si.count()).union(s.group_by(k=col("x")).agg(
        n=si.count())).group_by("k").agg(m=col("n").max()),
    "joined with itself": lambda s: s.join(s.group_by("k").agg(m=si.count()), on="k").select("k", "x", "m"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNIONS)
def test_several_sources(name: str, tmp_path: Path) -> None:
    check(UNIONS[name](pieces(TIMED)), checkpoint=tmp_path, every="1ms", max_rows_per_second=300)


@pytest.mark.parametrize("build", [
    lambda s: s.with_watermark("t", 0).distinct("k", "t"),
    lambda s: s.distinct("k", "t").with_watermark("t", 0),
    lambda s: s.union(s).with_watermark("t", 0),
    lambda s: s.limit(100).with_columns(t=col("t") + 1).with_watermark("t", 0),
])
def test_windows_close_wherever_the_watermark_is(build: Build) -> None:
    stream = Stream({"all": TIMED.to_batches(max_chunksize=2)}, ends=False)
    out = si.to_memory()
    job = build(si.from_source(stream)).group_by(si.tumbling("t", 20)).agg(n=si.count()).start(sink=out)
    until(lambda: out.table().num_rows == 7, job)
    job.stop()


def test_windows_that_would_never_close_are_refused() -> None:
    flow = si.from_source(Stream({"all": TIMED.to_batches()}, ends=False))
    with pytest.raises(si.ScaleinError, match="never close without a watermark"):
        flow.group_by(si.tumbling("t", 20)).agg(n=si.count()).start(sink=si.to_memory())


@pytest.mark.parametrize("build", [
    lambda s: s.group_by("k").agg(n=si.count(), total=col("x").sum(), last=col("word").max()),
    lambda s: s.distinct("word").select("k", "word"),
    lambda s: s.with_watermark("t", "10ms").group_by("k", si.tumbling("t", "5s")).agg(n=col("word").n_unique()),
], ids=["groups", "keys", "rows"])  # fmt: skip
def test_state_may_be_larger_than_memory(build: Build, tmp_path: Path) -> None:
    rng, count = np.random.default_rng(1), 16_000
    table = pa.table({"k": rng.integers(0, 8_000, count), "x": rng.integers(0, 9, count),
                      "word": [f"a word of some length {k}" for k in rng.integers(0, 8_000, count)],
                      "t": pa.array(np.arange(count) // 4, pa.timestamp("ms"))})  # fmt: skip
    course = Course([4_000], workers=2, checkpoint=True, memory="1MB", stops=[2], scales=[3, 1])
    got, _ = ran(build, table, course, tmp_path)
    want = build(si.from_arrow(table)).collect()
    by = [(name, "ascending") for name in want.column_names]
    assert got.sort_by(by).equals(want.sort_by(by))


BUFFERED: dict[str, Build] = {
    "sort": lambda s: s.sort("x").select("x"),
    "right join": lambda s: s.join(pa.table({"k": [1, 9], "w": ["a", "b"]}), on="k", how="right").select("k", "w"),
}


@pytest.mark.parametrize("name", BUFFERED)
@pytest.mark.parametrize("course", [Course([2], memory="1B"), Course([2], checkpoint=True, stops=[1, 4])],
                         ids=["memory", "checkpoint"])  # fmt: skip
def test_rows_that_are_buffered_may_have_columns_that_are_not_read(name: str, course: Course, tmp_path: Path) -> None:
    got, _ = ran(BUFFERED[name], TIMED, course, tmp_path)
    assert_same(got, oracle.collect(BUFFERED[name](si.from_arrow(TIMED))), ordered=name == "sort")


def test_rows_that_were_buffered_have_the_columns_of_a_changed_flow(tmp_path: Path) -> None:
    stream = Stream({"all": TIMED.to_batches(max_chunksize=2)}, allowed={"all": 3})
    job = si.from_source(stream).sort("t").select("k").start(sink=si.to_memory(), checkpoint=tmp_path)
    until(lambda: rows_in(job) == 6, job)
    job.stop()
    stream.end()
    out = si.to_memory()
    si.from_source(stream).sort("t").select("x").start(sink=out, checkpoint=tmp_path).wait()
    assert out.table().to_pydict() == {"x": TIMED.column("x").to_pylist()}
