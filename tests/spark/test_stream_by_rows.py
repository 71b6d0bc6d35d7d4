"""What an operator of jobs does in a Spark stream, over rows that cross the shuffle by key: sessions, values over other
rows, process; late rows, dead letters, drains, and what is refused. More shapes are in `tests/conformance`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
import scalein.spark as sis
from scalein import col
from scalein.api.flow import Flow
from scalein.errors import BadArgument, LateData
from scalein.exec import over_operator, session_windows
from scalein.spark.streaming.diagnose import why_no_output
from tests import oracle
from tests.engines import examples
from tests.jobs.streams import cut
from tests.oracle import streams
from tests.same import assert_same
from tests.spark.simulated import drain, fold_changes, rows_of, run, start_stream, tasks_over

SCHEMA = pa.schema({"k": pa.string(), "t": pa.int64(), "x": pa.int64()})


def ran(q: Flow, batches: list[pa.Table], folder: Path, seed: int, **how: Any) -> tuple[pa.Table, Any]:
    """The results of a stream over some batches, with restarts, repeated tasks and rescales, and a drain at the end."""
    random, found = Random(seed), list[pa.Table]()
    sink = si.to_memory()
    coordinator = start_stream(q, folder, sink, **how)
    for number, batch in enumerate(batches):
        if random.random() < 0.3:
            coordinator.close()
            found.append(sink.table())
            totals = coordinator.totals
            sink = si.to_memory()
            coordinator = start_stream(q, folder, sink, migration=random.choice(["lazy", "eager", "hybrid"]), **how)
            coordinator.totals = totals
        coordinator.partitions = random.choice([1, 2, 5])
        cuts = sorted(random.randint(0, batch.num_rows) for _ in range(random.randint(0, 2)))
        parts = [batch.slice(start, end - start) for start, end in zip([0, *cuts], [*cuts, batch.num_rows],
                                                                       strict=True)]
        coordinator.run_batch(number, "query", tasks_over(parts, random.choice([1, 2])), None)
    drain(coordinator)
    coordinator.close()
    return pa.concat_tables([*found, sink.table()]), coordinator


MADE: dict[str, dict[str, si.Column]] = {
    "small": {"n": si.count(), "s": col("v").sum(), "m": col("v").max(), "d": col("v").var()},
    "large": {"n": si.count(), "u": col("v").n_unique(), "word": col("w").min()}}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("kind", ["plain", "no keys", "computed"])
@examples(5)
@given(st.data())
def test_rows_of_sessions_that_are_behind(made: str, kind: str, data: st.DataObject) -> None:
    """A micro-batch is a source batch, whatever its partitions: late rows are those that the oracle says."""
    seed = data.draw(st.integers(0, 1 << 30))
    rng = np.random.default_rng(seed)
    count, far = data.draw(st.integers(0, 90)), data.draw(st.sampled_from([0, 5, 40]))
    delay, gap = data.draw(st.sampled_from([0, 3, 25])), data.draw(st.sampled_from([1, 4, 15]))
    times = pa.array(np.cumsum(rng.integers(0, 4, count)) + rng.integers(-far, far + 1, count), pa.int64(),
                     mask=rng.random(count) < 0.05)
    table = pa.table({"k": pa.array(rng.integers(0, 3, count), mask=rng.random(count) < 0.1), "t": times,
                      "v": rng.integers(0, 9, count), "w": pa.array(rng.integers(0, 99, count)).cast(pa.string())})
    source, time = si.flow(table.schema), "u" if kind == "computed" else "t"
    timed = (source.with_columns(u=col("t") + 1) if kind == "computed" else source).with_watermark(time, delay)
    q = timed.group_by(*([] if kind == "no keys" else ["k"]), si.session(time, gap=gap)).agg(**MADE[made])
    batches = cut(table, [data.draw(st.integers(1, 9)), data.draw(st.integers(1, 30))])
    trace = streams.run(q, [*map(streams.Batch, batches), streams.End()])
    with tempfile.TemporaryDirectory() as folder:
        got, coordinator = ran(q, [pa.Table.from_batches([each]) for each in batches], Path(folder) / "c", seed)
    assert_same(got, trace.table(), ordered=False, tolerance=1e-9)
    assert coordinator.totals.late_rows == len(trace.late)
    assert coordinator.totals.timeless_rows == table["t"].null_count


def test_late_rows_of_sessions(tmp_path: Path) -> None:
    """[0, 30) is final at 61, [61, 91) at 200. Late rows have all columns."""
    q = si.flow(SCHEMA).with_watermark("t", 0).select("t", "x", name=col("k").str.upper()).group_by(
        si.session("t", gap=30), key=col("name") + "!").agg(s=col("x").sum())
    batches = [batch_of(*rows) for rows in [[(0, 1)], [(30, 2)], [(61, 4)], [(10, 8)], [(200, 16)],
                                            [(62, 32), (45, 64), (201, 128)]]]
    sink, late = si.to_memory(), si.to_memory()
    coordinator = start_stream(q, tmp_path, sink, late=late)
    run(coordinator, [[batch] for batch in batches[:2]])
    assert "no session is final yet" in why_no_output(coordinator, coordinator._spec.plan)
    run(coordinator, [[batch] for batch in batches[2:]], first=2)
    coordinator.close()
    assert sorted(zip(*(sink.table()[name].to_pylist() for name in ("key", "window_start", "s")), strict=True)) == [
        ("K!", 0, 3), ("K!", 61, 4)]
    assert late.table().to_pylist() == [{"t": t, "x": x, "name": "K"} for t, x in [(10, 8), (62, 32), (45, 64)]]
    assert coordinator.totals.late_rows == 3
    with pytest.raises(BadArgument, match="not shown as a table"):
        sis.read_state(tmp_path)


def batch_of(*rows: tuple[int, int]) -> pa.Table:
    """Rows of a key with these times and values."""
    return pa.table([["k"] * len(rows), *map(list, zip(*rows, strict=True))], schema=SCHEMA)


LATE: dict[str, Callable[[Flow], Flow]] = {
    "over": lambda q: q.with_columns(n=si.count().over("k", order_by="t", within=5)),
    "distinct": lambda q: q.distinct("k", within=2),
    "process": lambda q: q.group_by("k").process(Total),
    "sessions": lambda q: q.group_by("k", si.session("t", gap=1)).agg(n=si.count()),
    "changes": lambda q: q.group_by("k", si.session("t", gap=1)).agg(n=si.count()),
    "windows": lambda q: q.group_by("k", si.tumbling("t", 5)).top_k(1, by="x"),
}  # fmt: skip


@si.process
class Total:
    total: int = 0

    def on_row(self, row: Any) -> Any:
        self.total += row.x
        yield {"total": self.total}


@pytest.mark.parametrize("shape", LATE)
def test_late_rows_have_a_sink_or_are_an_error(shape: str, tmp_path: Path) -> None:
    q, emit = LATE[shape](si.flow(SCHEMA).with_watermark("t", 1)), "changes" if shape == "changes" else "final"
    batches = [[batch_of((0, 1), (100, 2))], [batch_of((7, 3), (103, 4)), batch_of((98, 5), (99, 6))]]
    late = si.to_memory()
    with pytest.raises(LateData, match=r"rows came too late") as caught:
        rows_of(q, batches, tmp_path / "error", emit=emit, late="error")
    assert ("windows" in str(caught.value)) == (shape in ("sessions", "changes"))
    rows_of(q, batches, tmp_path / "sink", emit=emit, late=late)
    # 98 is in a window, or within a gap of a row, that is not closed at 99.
    assert sorted(late.table()["t"].to_pylist()) == {"windows": [7], "sessions": [7]}.get(shape, [7, 98])
    assert late.table().column_names[:3] == ["k", "t", "x"]


def test_rows_that_fail_are_dead_letters(tmp_path: Path) -> None:
    """Also in what is computed over other rows, and in the arguments of a process."""
    rows = [[batch_of((0, 1), (1, 0), (2, 2), (50, 1))]]
    shapes = {"over": lambda q: q.with_columns(s=(6 // col("x")).sum().over("k", order_by="t")).select("t", "s"),
              "key": lambda q: q.with_columns(s=si.count().over(6 // col("x"), order_by="t")).select("t", "s"),
              "session": lambda q: q.group_by(si.session("t", gap=9)).agg(s=(6 // col("x")).sum())}
    for name, build in shapes.items():
        failed = si.to_memory()
        got = rows_of(build(si.flow(SCHEMA).with_watermark("t", 0)), rows, tmp_path / name, on_error=failed)
        assert failed.table().select(["t", "x"]).to_pylist() == [{"t": 1, "x": 0}], name
        assert sorted(got["s"].to_pylist()) == {"over": [6, 9], "key": [1, 1], "session": [9]}[name]


OVER: dict[str, Callable[[Flow], Flow]] = {
    "lag": lambda q: q.with_columns(a=col("x").lag().over("k", order_by="t"), b=col("x").lag(3).over(
        "k", order_by="t"), n=si.row_number().over("k", order_by="t")),
    "frames": lambda q: q.with_columns(a=col("x").sum().over("k", order_by="t", rows=4), b=col("x").max().over(
        "k", order_by="t"), c=col("w").first().over("k", order_by="t")),
    "no keys": lambda q: q.with_columns(a=col("x").lag(2).over(order_by="t"), b=col("x").sum().over(order_by="t")),
    "floats": lambda q: q.with_columns(a=si.count().over("f", order_by="t"), b=col("x").lag().over("f", order_by="t")),
    "filter": lambda q: q.filter(col("x") > col("x").lag().over(col("k") + 1, order_by="t")).select("k", "t"),
    "distinct": lambda q: q.distinct("k", "w", within=9).select("k", "w", "t"),
    "distinct, ttl": lambda q: q.distinct("f", ttl=4).select("f", "t"),
    "first rows": lambda q: q.group_by("k", si.sliding("t", 12, every=4)).top_k(2, by=["x", "t"]),
    "ttl without keys": lambda q: q.group_by().agg(n=si.count(), since=col("t").min(), ttl=3),
}  # fmt: skip


@pytest.mark.parametrize("shape", OVER)
@examples(3)
@given(seed=st.integers(0, 1 << 32))
def test_values_over_other_rows(shape: str, seed: int) -> None:
    """No two rows have one time, since rows of equal times have no order on Spark."""
    rng = np.random.default_rng(seed)
    emit = str(rng.choice(["final", "changes"]))
    count = int(rng.integers(0, 70))
    latest = np.cumsum(rng.integers(1, 4, count)) * 8
    table = pa.table({"k": pa.array(rng.integers(0, 3, count), mask=rng.random(count) < 0.1),
                      "f": pa.array(rng.choice([0.0, -0.0, np.nan, 1.5], count), mask=rng.random(count) < 0.1),
                      "w": [["a", "", "a longer one than twelve bytes"][k] for k in rng.integers(0, 3, count)],
                      "t": latest - 8 * rng.integers(0, 5, count), "x": rng.integers(0, 9, count)})
    table = table.take(np.sort(np.unique(table["t"].to_numpy(), return_index=True)[1]))
    def flow(source: Flow) -> Flow:
        return OVER[shape](source.with_watermark("t", 40))

    batches = [pa.Table.from_batches([each]) for each in cut(table, [int(rng.integers(1, 30))])]
    with tempfile.TemporaryDirectory() as folder:
        got, coordinator = ran(flow(si.flow(table.schema)), batches, Path(folder) / "c", seed, emit=emit)
    want = oracle.collect(flow(si.from_arrow(table)))
    if emit == "changes":
        got = pa.Table.from_pylist(fold_changes(got, ["since"]), want.schema) if "ttl w" in shape else got.drop(["op"])
    assert_same(got, want)
    assert coordinator.totals.late_rows == 0


def test_a_task_puts_nothing_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs look less often at what is much; what is final at the end of a task must come out with it."""
    monkeypatch.setattr(over_operator, "MANY_ROWS", -1)
    monkeypatch.setattr(over_operator, "COMPUTE_SHARE", 1 << 60)
    monkeypatch.setattr(session_windows, "SMALL_ROWS", -1)
    monkeypatch.setattr(session_windows, "CLOSE_SHARE", 1 << 60)
    batches = [[batch_of((100 * k, 1), (100 * k + 1, 2))] for k in range(4)]
    for name, build, want in (
            ("over", lambda q: q.select(n=si.count().over("k", order_by="t", within=5)), [1, 1, 1, 1, 2, 2, 2]),
            ("sessions", lambda q: q.group_by("k", si.session("t", gap=5)).agg(n=si.count()).select("n"), [2, 2, 2])):
        got = rows_of(build(si.flow(SCHEMA).with_watermark("t", 0)), batches, tmp_path / name)
        assert sorted(got["n"].to_pylist()) == want, name


def test_state_is_forgotten(tmp_path: Path) -> None:
    """What no row to come can change leaves the state, wherever it is by then."""
    shapes = {"final": lambda q: q.group_by("k", si.session("t", gap=2)).agg(n=si.count()),
              "changes": lambda q: q.group_by("k", si.session("t", gap=2)).agg(n=si.count()),
              "frames": lambda q: q.with_columns(n=si.count().over("k", order_by="t", within=3)),
              "spaced": lambda q: q.distinct("k", within=3)}
    for name, build in shapes.items():
        coordinator = start_stream(build(si.flow(SCHEMA).with_watermark("t", 0)), tmp_path / name, si.to_memory(),
                                   emit="changes" if name == "changes" else "final")
        for number in range(12):
            coordinator.partitions = 1 + number % 3
            rows = [(100 * number + each, 1) for each in range(50)]
            coordinator.run_batch(number, "query", tasks_over([batch_of(*rows)]), None)
        assert coordinator.progress is not None
        assert coordinator.progress["state_rows"] < 120, name
        coordinator.close()


@pytest.mark.parametrize(("make", "emit", "words"), [
    (lambda q: q.group_by("k", si.count_window(3)).agg(n=si.count()), "final", "the number of a row, also in a count"),
    (lambda q: q.with_watermark("t", 1).with_columns(n=col("x").lead().over("k", order_by="t")), "final",
     "needs all rows of a key"),
    (lambda q: q.with_columns(n=col("x").sum().over("k")), "final", "no last row"),
    (lambda q: q.group_by("k", si.session("t", gap=3)).agg(n=si.count()), "final", "never close without a watermark"),
    (lambda q: q.with_watermark("t", 1).group_by(si.session("t", gap=3)).agg(n=col("k").max()), "changes",
     "cannot follow max of text"),
    (lambda q: q.with_watermark("t", 1).group_by("k").agg(n=col("x").first(), ttl=5), "final", "depends on the order"),
    (lambda q: q.with_watermark("t", 1).distinct("k", within=3).group_by("k", si.tumbling("t", 9)).agg(n=si.count()),
     "final", "at most one operator with state"),
])
def test_what_is_refused(make: Any, emit: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=words):
        start_stream(make(si.flow(SCHEMA)), tmp_path, si.to_memory(), emit=emit)
