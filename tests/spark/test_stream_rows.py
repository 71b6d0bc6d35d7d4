"""Results of streams, without Spark: those of `collect` for groups and of a job for windows, for any batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import Column, col
from scalein.api.flow import Flow
from scalein.errors import BadArgument, ComputeError, LateData, ScaleinError
from scalein.spark.row_groups import ScannedFile
from scalein.spark.streaming import reduce_side
from scalein.spark.streaming.coordinator import Coordinator
from scalein.spark.streaming.diagnose import why_no_output
from scalein.spark.streaming.event_time import Clock
from scalein.spark.streaming.inputs import StreamInput, row_groups_of
from scalein.spark.streaming.manifest import Manifests
from scalein.spark.streaming.read_state import read_state
from scalein.state import hash_runs, merge_runs
from scalein.state.hash_runs import MIGRATIONS
from scalein.testing import Stream, until
from tests.engines import EXAMPLES
from tests.oracle import streams
from tests.same import assert_same
from tests.spark.simulated import drain, fold_changes, rows_of, run, start_stream, tasks_over
from tests.spark.test_stream_faults import Crash, crash, crash_at_call

SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("f", pa.float64()), ("x", pa.int64()), ("y", pa.float64())])
NAN = float("nan")

seeds = pytest.mark.parametrize("seed", range(max(1, round(EXAMPLES))))  # more of them by SCALEIN_EXAMPLES


def tables(random: Random, row: Callable[[Random], dict[str, Any]], schema: pa.Schema) -> list[list[pa.Table]]:
    """A few batches in a few partitions; some are empty."""
    return [[pa.Table.from_pylist([row(random) for _ in range(random.choice([0, 3, 20]))], schema)
             for _ in range(random.randint(1, 3))] for _ in range(random.randint(3, 6))]


def a_row(random: Random) -> dict[str, Any]:
    return {"k": random.choice([None, 0, 1, 2, 3]), "s": random.choice([None, "", "a", "longer than twelve bytes"]),
            "f": random.choice([None, 0.0, -0.0, 1.5, NAN]), "x": random.choice([None, *range(-5, 6)]),
            "y": random.choice([None, 0.25, -3.0, NAN, float("inf")])}  # fmt: skip


def all_rows(batches: list[list[pa.Table]]) -> pa.Table:
    return pa.concat_tables([part for parts in batches for part in parts])


@contextmanager
def small_limits(has_small_limits: bool) -> Iterator[None]:
    """Limits so small that few rows meet what millions do: many runs, short blocks, colliding hashes."""
    with pytest.MonkeyPatch.context() as patch:
        if has_small_limits:
            patch.setattr(merge_runs, "BLOCK_ROWS", 3)
            patch.setattr(hash_runs, "MERGE_RATIO", 1)
            key_hashes = reduce_side.key_hashes
            patch.setattr(reduce_side, "key_hashes", lambda *args: key_hashes(*args) & np.uint64(0xFF << 56))
        yield


GROUPS: dict[str, tuple[list[str], Callable[[Flow], Flow]]] = {
    "one key": (["k"], lambda q: q.group_by("k").agg(
        n=si.count(), s=col("x").sum(), m=col("y").mean(), least=col("y").min(), most=col("y").max())),
    "text": (["s"], lambda q: q.group_by("s").agg(first=col("s").min(), most=col("s").max(), v=col("x").count())),
    "floats": (["f"], lambda q: q.group_by("f").agg(n=si.count(), most=col("x").max())),
    "composite": (["k", "s", "f"], lambda q: q.group_by("k", "s", "f").agg(n=si.count(), t=col("x").sum())),
    "computed": (["g"], lambda q: q.filter(col("x").is_not_null()).group_by((col("x") % 3).alias("g")).agg(
        n=si.count(), t=col("y").max())),
    "no key": ([], lambda q: q.group_by().agg(n=si.count(), t=col("x").sum(), m=col("y").min())),
    "projected": (["k"], lambda q: q.group_by("k").agg(n=si.count(), t=col("x").sum()).select(
        "k", twice=col("n") * 2)),
    "having": (["k"], lambda q: q.group_by("k").agg(n=si.count(), t=col("x").sum()).filter(col("t") > 0)),
    "columns together": (["k"], lambda q: q.group_by("k").agg(
        v=col("x").var(), d=col("y").std(), a=(col("x") * 2).arg_max("x"), b=col("s").arg_min("s"), n=si.count())),
    "pairs": (["k"], lambda q: q.group_by("k").agg(v=si.cov("x", "y"), c=si.corr("x", "y"))),
    "together, without text": (["s"], lambda q: q.group_by("s").agg(
        v=col("x").var(), d=col("y").std(), a=(col("x") * 2).arg_max("x"), b=(col("k") > 1).arg_min("k"))),
    "expressions": (["k"], lambda q: q.group_by("k").agg(
        mean=col("x").sum() / si.count(), span=col("x").max() - col("x").min(), c=si.corr("x", "y") * 2,
        few=si.count().filter(col("x") > 1), share=(col("x") > 1).mean(), most=col("y").max().filter(col("x") > 1))),
    "expressions of rows": (["s"], lambda q: q.group_by("s").agg(u=col("x").n_unique().filter(col("y") > 0) / 2)),
    "together, having": ([], lambda q: q.group_by().agg(v=col("x").var()).filter(col("v") > 9)),
    "buffered rows": (["k"], lambda q: q.group_by("k").agg(
        u=col("x").n_unique(), q=col("x").quantile(0.5), d=col("y").std())),
    "rows, having": (["s"], lambda q: q.group_by("s").agg(u=col("x").n_unique()).filter(col("u") > 1)),
    "rows, no key": ([], lambda q: q.group_by().agg(u=col("s").n_unique())),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
@seeds
def test_changes_of_groups_add_up_to_the_result_of_collect(name: str, seed: int, tmp_path: Path) -> None:
    random, (keys, build) = Random(f"{name} {seed}"), GROUPS[name]
    given, flow, restart = tables(random, a_row, SCHEMA), build(si.flow(SCHEMA)), random.random() < 0.5
    changes: list[pa.Table] = []
    sink = si.to_memory()
    coordinator = start_stream(flow, tmp_path, sink, emit="changes", migration=random.choice(MIGRATIONS))
    try:
        for number, parts in enumerate(given):
            if restart:
                coordinator.close()
                changes.append(sink.table())
                sink = si.to_memory()
                coordinator = start_stream(flow, tmp_path, sink, emit="changes", migration=random.choice(MIGRATIONS))
            coordinator.partitions = random.choice([1, 2, 3, 7])
            with small_limits(seed % 2 == 0):
                run_tasks = tasks_over(parts, folder=random.choice([None, tmp_path / "in"]))
                coordinator.run_batch(number, "query", run_tasks, None)
            assert coordinator.progress is not None
            assert coordinator.progress["rows_in"] == sum(part.num_rows for part in parts)
    finally:
        coordinator.close()
    changes.append(sink.table())
    changes_out = pa.concat_tables(changes)
    want = flow.collect(all_rows(given))
    if not keys and not all_rows(given).num_rows:
        want = want.slice(0, 0)  # a stream has no result before the first row
    assert_same(pa.Table.from_pylist(fold_changes(changes_out, keys), want.schema), want, tolerance=1e-9)
    if name in ("one key", "text", "composite", "no key", "columns together", "buffered rows",
                "rows, no key"):
        assert_same(read_state(tmp_path), want, tolerance=1e-9)


@pytest.mark.parametrize(("name", "what"), [("k", col("x").sum() / si.count()),
                                            ("k", si.count() + col("x").n_unique())], ids=["partials", "rows"])
def test_state_shows_the_aggregates_of_an_expression_by_their_texts(name: str, what: Column, tmp_path: Path) -> None:
    given = pa.table({"k": [1, 1, 2], "x": [5, 5, 7]}).cast(pa.schema([SCHEMA.field("k"), SCHEMA.field("x")]))
    coordinator = start_stream(si.flow(given.schema).group_by(name).agg(r=what), tmp_path, si.to_memory(),
                               emit="changes")
    run(coordinator, [[given]])
    coordinator.close()
    state = read_state(tmp_path).sort_by("k")
    assert set(state.column_names) <= {"k", "x.sum()", "count()", "x.n_unique()"}
    assert state["count()"].to_pylist() == [2, 1]


@pytest.mark.parametrize("migration", MIGRATIONS)
def test_state_migrates(migration: str, tmp_path: Path) -> None:
    """Results do not depend on it; files shared with other tasks are rewritten at once, in steps, or by merges. What
    moves is all of the state, or what a batch touches of it.
    """
    few = pa.table({"k": [1, 2, 3], "x": [1] * 3}).cast(pa.schema([SCHEMA.field("k"), SCHEMA.field("x")]))
    many = pa.table({"k": range(3000), "x": [2] * 3000}).cast(few.schema)
    flow = si.flow(few.schema).group_by("k").agg(n=si.count(), t=col("x").sum())
    coordinator = start_stream(flow, tmp_path, si.to_memory(), emit="changes", partitions=1, migration=migration)
    run(coordinator, [[many]])
    coordinator.partitions = 4
    (file,) = coordinator._runs
    left, moved = list[int](), list[int]()  # after each batch, the key groups for which tasks read the shared file
    for number in range(1, 12):
        run(coordinator, [[few]], first=number)
        left.append(sum(part.last - part.first for part in coordinator._runs if part.rows == 3000))
        assert coordinator.progress is not None
        moved.append(int(str(coordinator.progress["state_bytes_moved"])))
        assert moved[-1] <= int(str(coordinator.progress["state_bytes_read"]))
        assert int(str(coordinator.progress["state_bytes_written"])) > 0
        assert int(str(coordinator.progress["state_bytes_verified"])) > 0  # of the new files at least
    coordinator.close()
    given = pa.concat_tables([many, *[few] * 11])
    assert_same(read_state(tmp_path), flow.collect(given))
    match migration:
        case "lazy":
            assert left[-1] > 200  # small merges did not rewrite it
            assert 0 < moved[0] <= file.size_bytes * 3 // 3000  # the rows of three keys
        case "eager":
            assert left == [0] * 11
            assert file.size_bytes - 4 <= moved[0] <= file.size_bytes
            assert not any(moved[1:])
        case "hybrid":
            assert left[0] == 256 - 4 * 8
            assert sorted(left, reverse=True) == left
            assert left[7] == 0
            assert max(moved) < file.size_bytes // 4
            assert file.size_bytes * 0.99 < sum(moved) < file.size_bytes * 1.01
            assert not any(moved[8:])


def test_merges_do_not_take_the_parts_of_a_run_that_migrates_in_steps(tmp_path: Path) -> None:
    """Each part is small enough to be merged with the batch; the run is not."""
    some = pa.table({"k": range(120), "x": [1] * 120}).cast(pa.schema([SCHEMA.field("k"), SCHEMA.field("x")]))
    many = pa.table({"k": range(3000), "x": [2] * 3000}).cast(some.schema)
    flow = si.flow(some.schema).group_by("k").agg(n=si.count())
    coordinator = start_stream(flow, tmp_path, si.to_memory(), emit="changes", partitions=1, migration="hybrid")
    run(coordinator, [[many]])
    coordinator.partitions = 4
    run(coordinator, [[some]], first=1)
    left = sum(part.last - part.first for part in coordinator._runs if part.rows == 3000)
    coordinator.close()
    assert left == 256 - 4 * 8
    assert_same(read_state(tmp_path), flow.collect(pa.concat_tables([many, some])))


@pytest.mark.parametrize("emit", ["final", "changes"])
@seeds
def test_distinct_gives_each_row_once(emit: str, seed: int, tmp_path: Path) -> None:
    flow = si.flow(SCHEMA).select("s", "f").distinct().with_columns(n=col("s").str.len())
    given = tables(Random(seed), a_row, SCHEMA)
    with small_limits(seed % 2 == 0):
        got = rows_of(flow, given, tmp_path, emit=emit)
    if emit == "changes":
        assert set(got.column("op").to_pylist()) <= {"insert"}
        got = got.drop_columns("op")
    assert_same(got, flow.collect(all_rows(given)))
    assert_same(read_state(tmp_path), flow.drop("n").collect(all_rows(given)))


@pytest.mark.parametrize("emit", ["final", "changes"])
def test_flows_without_state(emit: str, tmp_path: Path) -> None:
    names = pa.table({"k": [1, 2], "name": ["one", "two"]})
    flow = si.flow(SCHEMA).filter(col("x") > 0).join(names, on="k", how="left").select("name", z=col("x") + 1)
    given = tables(Random(5), a_row, SCHEMA)
    got = rows_of(flow, given, tmp_path, emit=emit)
    assert_same(got.drop_columns("op") if emit == "changes" else got, flow.collect(all_rows(given)))
    with pytest.raises(BadArgument, match="has no state"):
        read_state(tmp_path)


def test_an_empty_state_has_its_columns(tmp_path: Path) -> None:
    flow = si.flow(SCHEMA).group_by("k").agg(n=si.count(), u=col("y").sum())
    assert rows_of(flow, [[SCHEMA.empty_table()], []], tmp_path, emit="changes").num_rows == 0
    assert read_state(tmp_path).schema.names == ["k", "n", "u"]


# --- windows, against jobs

EVENTS = pa.schema([("t", pa.timestamp("us")), ("k", pa.string()), ("x", pa.int64())])
START = datetime(2026, 1, 1)


def an_event(random: Random) -> dict[str, Any]:
    second = random.randint(0, 60)
    return {"t": None if random.random() < 0.1 else START + timedelta(seconds=second),
            "k": random.choice(["a", "b", None]), "x": random.randint(-3, 3)}  # fmt: skip


WINDOWS: dict[str, Callable[[Flow], Flow]] = {
    "tumbling": lambda q: q.group_by("k", si.tumbling("t", "10s")).agg(n=si.count(), t=col("x").sum()),
    "sliding": lambda q: q.group_by("k", si.sliding("t", "10s", every="4s")).agg(n=si.count(), most=col("x").max()),
    "downstream ops": lambda q: q.group_by(si.tumbling("t", "7s")).agg(n=si.count()).filter(col("n") > 1).select(
        "window_start", twice=col("n") * 2),
    "together": lambda q: q.group_by("k", si.tumbling("t", "10s")).agg(v=col("x").var(), m=(-col("x")).arg_max("x")),
    "sliding together": lambda q: q.group_by("k", si.sliding("t", "10s", every="4s")).agg(
        v=col("x").std(), m=col("x").arg_min("x")),
    "buffered rows": lambda q: q.group_by("k", si.sliding("t", "10s", every="5s")).agg(u=col("x").n_unique()),
    "computed": lambda q: q.with_columns(u=col("t") + timedelta(seconds=1)).group_by(
        "k", si.tumbling("u", "10s")).agg(n=si.count()),
}  # fmt: skip


NO_CHANGES = ("buffered rows",)


def as_a_job(flow: Flow, batches: list[list[pa.Table]], drain: bool, **how: Any) -> tuple[pa.Table, pa.Table]:
    """The results and the late rows of a job over the same batches. It is stopped: open windows stay open, unless it is
    drained.
    """
    whole = [pa.concat_tables(parts).combine_chunks().to_batches() for parts in batches]
    given = [some[0] for some in whole if some and some[0].num_rows]
    out, late = si.to_memory(), si.to_memory()
    job = flow_over(flow, Stream({"all": given}, ends=False)).start(sink=out, late=late, workers=1, **how)
    rows = sum(batch.num_rows for batch in given)
    until(lambda: int(str(job.metrics()["rows_in"])) >= rows, job)
    job.stop(drain=drain)
    return out.table(), late.table()


def flow_over(flow: Flow, stream: Stream) -> Flow:
    """The flow bound to a source."""
    from scalein.ir.ops import Source
    from scalein.ir.rewrite import rewrite

    bound = si.from_source(stream).op
    return Flow(rewrite(flow.op, lambda op: bound if isinstance(op, Source) and op.data is None else None))


@pytest.mark.parametrize(("name", "emit"), [
    (name, emit) for name in WINDOWS for emit in ("final", "changes") if emit == "final" or name not in NO_CHANGES])
@seeds
def test_windows_are_those_of_a_job(name: str, emit: str, seed: int, tmp_path: Path) -> None:
    random = Random(f"{name} {seed}")
    given = tables(random, an_event, EVENTS)
    flow = WINDOWS[name](si.flow(EVENTS).with_watermark("t", "3s"))
    out, late = si.to_memory(), si.to_memory()
    coordinator = start_stream(flow, tmp_path, out, emit=emit, late=late, migration=random.choice(MIGRATIONS))
    drains = random.random() < 0.5
    try:
        for number, parts in enumerate(given):
            coordinator.partitions = random.choice([1, 2, 5])
            with small_limits(seed % 2 == 0):
                run_tasks = tasks_over(parts, folder=random.choice([None, tmp_path / "in"]))
                coordinator.run_batch(number, "query", run_tasks, None)
        if drains:
            coordinator.partitions = random.choice([1, 2, 5])
            drain(coordinator)
    finally:
        coordinator.close()
    want, want_late = as_a_job(flow, given, drains, emit=emit)
    if emit == "final":
        assert_same(out.table(), want)
    else:  # a job may have several changes of a key in one batch
        keys = [key for key in ("k", "window_start") if key in out.table().column_names]
        got, expected = (pa.Table.from_pylist(fold_changes(some, keys), flow.schema) for some in (out.table(), want))
        assert_same(got, expected)
    assert_same(late.table(), want_late.select(late.table().column_names))


def events(*seconds: float | None, k: str = "a") -> pa.Table:
    return pa.table({"t": [None if s is None else START + timedelta(seconds=s) for s in seconds],
                     "k": [k] * len(seconds), "x": list(range(len(seconds)))}, EVENTS)  # fmt: skip


def test_late_rows_are_counted_dropped_or_refused(tmp_path: Path) -> None:
    flow = WINDOWS["tumbling"](si.flow(EVENTS).with_watermark("t", "0s"))
    sink = si.to_memory()
    coordinator = start_stream(flow, tmp_path / "drop", sink)
    with pytest.warns(RuntimeWarning, match="2 rows came too late"):
        run(coordinator, [[events(1, 25)], [events(2, None, 26), events(3)]])
    assert coordinator.progress is not None
    assert {name: coordinator.progress[name] for name in ("late_rows", "timeless_rows", "rows_in")} == {
        "late_rows": 2, "timeless_rows": 1, "rows_in": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        run(coordinator, [[events(2)]], first=2)
    coordinator.close()
    coordinator = start_stream(flow, tmp_path / "error", sink, late="error")
    with pytest.raises(LateData, match="1 rows came too late"):
        run(coordinator, [[events(1, 25)], [events(2)]])
    coordinator.close()


FALLIBLE: dict[str, tuple[str, Callable[[Flow], Flow]]] = {
    "rowwise": ("final", lambda q: q.select("k", y=60 // col("x"))),
    "groups": ("changes", lambda q: q.group_by("k").agg(n=si.count(), s=(60 // col("x")).sum())),
    "rows": ("changes", lambda q: q.group_by("k").agg(n=(60 // col("x")).n_unique())),
    "distinct": ("final", lambda q: q.select(y=60 // col("x")).distinct()),
    "windows": ("final", lambda q: q.with_watermark("t", "0s").with_columns(y=60 // col("x"))
                .group_by("k", si.tumbling("t", "10s")).agg(n=si.count(), s=col("y").sum())),
}  # fmt: skip


@pytest.mark.parametrize("is_in_files", [False, True])
@pytest.mark.parametrize("name", FALLIBLE)
def test_rows_that_fail_end_the_stream_are_null_or_go_to_a_sink(name: str, is_in_files: bool, tmp_path: Path) -> None:
    emit, build = FALLIBLE[name]
    flow = build(si.flow(EVENTS))
    batches = [[events(1, 2, 3), events(4, 5, k="b")], [events(6, 25), events(30, k="b")]]  # x begins with 0
    good = [[part.filter(pc.field("x") != 0) for part in parts] for parts in batches]
    nulls = [[part.set_column(2, "x", pa.array([x or None for x in part["x"].to_pylist()], pa.int64()))
              for part in parts] for parts in batches]  # fmt: skip
    with pytest.raises(ComputeError, match="division by zero"):
        rows_of(flow, batches, tmp_path / "raise", emit=emit)
    # A stream that a row has ended can resume with another on_error.
    assert_same(rows_of(flow, batches, tmp_path / "raise", emit=emit, on_error="null"),
                rows_of(flow, nulls, tmp_path / "nulls", emit=emit))
    failed = si.to_memory()
    sink = si.to_memory()
    coordinator = start_stream(flow, tmp_path / "sink", sink, emit=emit, on_error=failed)
    run(coordinator, batches, attempts=2, folder=tmp_path / "in" if is_in_files else None)
    coordinator.close()
    assert coordinator.progress is not None
    assert (coordinator.progress["rows_in"], coordinator.progress["failed_rows"]) == (3, 2)
    assert_same(sink.table(), rows_of(flow, good, tmp_path / "good", emit=emit))
    letters = failed.table()
    assert letters.column_names == [*EVENTS.names, "error", "bad_file", "bad_line", "bad_text"]
    bad_rows = pa.concat_tables([part.filter(pc.field("x") == 0) for parts in batches for part in parts])
    assert_same(letters.select(EVENTS.names), bad_rows)  # with all columns
    assert all("division by zero" in error for error in letters["error"].to_pylist())
    origins = ([str(tmp_path / "in" / f"{part}.parquet") for part in (0, 1)] * 2 if is_in_files
               else [f"batch {number} of the stream" for number in (0, 0, 1, 1)])  # fmt: skip
    assert sorted(letters["bad_file"].to_pylist()) == sorted(origins)


def test_state_of_closed_windows_is_removed(tmp_path: Path) -> None:
    flow = WINDOWS["tumbling"](si.flow(EVENTS).with_watermark("t", "0s"))
    for emit in ("final", "changes"):
        coordinator = start_stream(flow, tmp_path / emit, si.to_memory(), emit=emit, partitions=1)
        for number in range(40):
            coordinator.run_batch(number, "query", tasks_over([events(*range(number * 10, number * 10 + 10))]), None)
            assert coordinator.progress is not None
            assert coordinator.progress["state_files"] <= 3
        coordinator.close()
        assert read_state(tmp_path / emit).num_rows <= 2
        assert len(list((tmp_path / emit / "state").iterdir())) <= 6  # of the last two manifests


def test_the_state_has_no_part_of_a_closed_window(tmp_path: Path) -> None:
    flow = WINDOWS["sliding"](si.flow(EVENTS).with_watermark("t", "0s"))  # 10 s, every 4 s
    coordinator = start_stream(flow, tmp_path, si.to_memory())
    run(coordinator, [[events(1, 6, 13)]])
    coordinator.close()
    found = read_state(tmp_path).column("window_end").to_pylist()
    assert sorted((end - START).total_seconds() for end in found) == [14, 18, 22]


def test_the_state_of_windows_with_buffered_rows(tmp_path: Path) -> None:
    flow = (si.flow(EVENTS).with_watermark("t", "0s").group_by("k", si.sliding("t", "10s", every="4s"))
            .agg(u=col("x").n_unique(), best=col("x").top_k(2, by=-col("x")), last=col("x").arg_max("t")))  # fmt: skip
    coordinator = start_stream(flow, tmp_path, si.to_memory())
    run(coordinator, [[events(1, 6, 13)], [events(13, k="b")]])
    coordinator.close()
    given = pa.concat_tables([events(1, 6, 13), events(13, k="b")])
    want = flow.collect(given)
    assert_same(read_state(tmp_path), want.filter(pc.field("window_end") > START + timedelta(seconds=13)))


@pytest.mark.parametrize(("before", "after", "want"), [("10s", "0s", [10, 20]), ("0s", "10s", [10])])
def test_another_delay_closes_each_window_once(before: str, after: str, want: list[int],
                                               tmp_path: Path) -> None:
    """Windows before the stored watermark stay closed, whatever the delay is now."""
    for delay, first, batches in ((before, 0, [[events(1, 12, 25 if before > after else 12)]]),
                                  (after, 1, [[events(5, 26)], [events(100)]])):  # fmt: skip
        sink, late = si.to_memory(), si.to_memory()
        flow = WINDOWS["tumbling"](si.flow(EVENTS).with_watermark("t", delay))
        coordinator = start_stream(flow, tmp_path, sink, late=late)
        run(coordinator, batches, first=first)
        coordinator.close()
        starts = [(start - START).total_seconds() for start in sink.table().column("window_start").to_pylist()]
        if first == 0:
            assert starts == [0]
    assert sorted(starts) == sorted({*want, 20})
    assert late.table().num_rows == 1


@pytest.mark.filterwarnings("ignore:.* rows of a batch are outliers:RuntimeWarning")
def test_outlier_timestamps_close_nothing(tmp_path: Path) -> None:
    flow = WINDOWS["tumbling"](si.flow(EVENTS).with_watermark("t", "0s"))
    sink = si.to_memory()
    coordinator = start_stream(flow, tmp_path, sink)
    run(coordinator, [[events(1, 2, 3)], [events(4, 5, 400_000.0)], [events(6)]])
    assert coordinator.progress is not None
    assert (coordinator.progress["outlier_rows"], coordinator.progress["late_rows"], sink.table().num_rows) == (1, 0, 0)
    # Three batches of mostly such times are a jump of time.
    run(coordinator, [[events(500_000.0 + k, 500_001.0 + k)] for k in range(4)], first=3)
    assert sorted(sink.table().column("n").to_pylist())[-1] == 6
    coordinator.close()


@pytest.mark.parametrize("seed", range(max(4, round(4 * EXAMPLES))))
@pytest.mark.filterwarnings("ignore:.* rows (of a batch are outliers|came too late):RuntimeWarning")
def test_gaps_and_outliers_are_those_of_the_oracle(seed: int, tmp_path: Path) -> None:
    """However a batch is divided among tasks, and also after restarts; a row of 2099 is among some."""
    random = Random(f"gaps {seed}")
    flow = WINDOWS["tumbling"](si.flow(EVENTS).with_watermark("t", random.choice(["0s", "7h"])))
    given, day = [], 0.0
    for _ in range(8):
        day += random.choice([0, 0.5, 1, 3])
        days = [day + random.random() * random.choice([0.2, 4, 12]) for _ in range(random.choice([1, 2, 9, 40]))]
        days += [27_000] * (random.random() < 0.3)
        parts = [[each for each in days if random.random() < 0.9] for _ in range(random.randint(1, 3))]
        given.append([events(*(86_400 * each for each in some)) for some in parts])
    batches = [pa.RecordBatch.from_pylist(pa.concat_tables(parts).to_pylist(), EVENTS) for parts in given]
    trace = streams.run(flow, [*map(streams.Batch, batches)])
    tables_out = []
    for number, parts in enumerate(given):
        sink = si.to_memory()
        coordinator = start_stream(flow, tmp_path / "checkpoint", sink, partitions=random.choice([1, 2, 5]))
        run(coordinator, [parts], first=number, folder=random.choice([None, tmp_path / "in"]))
        coordinator.close()
        assert coordinator.progress is not None
        assert coordinator.progress["watermark"] == trace.watermarks[number]
        tables_out.append(sink.table())
        assert_same(pa.concat_tables(tables_out), trace.table(number + 1))


FILTERED: dict[str, tuple[str, Callable[[Flow], Flow]]] = {
    "windows": ("final", lambda q: q.filter(col("x") >= 3).group_by("k", si.tumbling("t", "2h")).agg(n=si.count())),
    "groups": ("changes", lambda q: q.filter(col("x") >= 3, col("k") != "b").group_by("k").agg(last=col("t").max())),
    "rows": ("final", lambda q: q.filter(col("x").is_in([3, 5])).select("t", "x")),
}  # fmt: skip


@pytest.mark.parametrize("name", FILTERED)
@pytest.mark.parametrize("seed", range(max(2, round(2 * EXAMPLES))))
@pytest.mark.filterwarnings("ignore:.* rows (of a batch are outliers|came too late):RuntimeWarning")
def test_skipped_row_groups_advance_the_watermark(name: str, seed: int, tmp_path: Path) -> None:
    """What comes out, and the watermark after each batch, is the same as if all rows are read."""
    random = Random(f"skipped {name} {seed}")

    def part(day: float) -> pa.Table:
        """Row groups of seven rows: of one x or several, of times that are close or far from each other."""
        found: list[dict[str, Any]] = []
        for _ in range(random.randint(1, 4)):
            x, width, first = random.choice([None, 0, 2, 3, 5]), random.choice([0.01, 0.5, 3]), random.random()
            times = [None if random.random() < 0.05 else START + timedelta(days=day + first + random.random() * width)
                     for _ in range(7)]
            found += [{"t": time, "k": random.choice(["a", "b"]), "x": 4 if random.random() < 0.02 else x}
                      for time in times]
        return pa.Table.from_pylist(found, EVENTS)

    # At first a row group that is surely skipped.
    given = [[events(10, 20, 30, 40, 50, 60, 70).set_column(2, "x", pa.array([1] * 7))], *(
        [part(day + random.choice([0, 0, 0, 4])) for _ in range(random.randint(1, 3))] for day in range(6))]
    emit, make = FILTERED[name]
    flow = make(si.flow(EVENTS).with_watermark("t", random.choice(["0s", "5h"])))
    sinks = [si.to_memory(), si.to_memory()]
    streams_of = [start_stream(flow, tmp_path / f"checkpoint{k}", sink, emit=emit) for k, sink in enumerate(sinks)]
    read, skipping = streams_of
    skipped = 0
    for number, parts in enumerate(given):
        run(read, [parts], first=number)
        run(skipping, [parts], first=number, folder=tmp_path / "in")
        assert skipping.clock == read.clock
        assert read.progress is not None
        assert skipping.progress is not None
        skipped += int(str(skipping.progress["row_groups_skipped"]))
        assert skipped > 0
        assert read.progress["row_groups_skipped"] == 0
        for metric in ("rows_in", "rows_out", "late_rows", "timeless_rows", "outlier_rows"):
            assert skipping.progress[metric] == read.progress[metric]
    for stream in streams_of:
        stream.close()
    assert_same(sinks[1].table(), sinks[0].table())


def test_row_groups_whose_times_are_not_known_are_read(tmp_path: Path) -> None:
    """Without statistics, with a gap of more than a day, and where rows that fail go to a sink."""
    day = 86_400
    close, far = events(1, 2, 3), events(1, 2, 3 * day)
    ahead = events(1, 2, day + 3)  # after the first batch there is no gap of more than a day
    flow = si.flow(EVENTS).with_watermark("t", "0s").filter(col("x") > 10).group_by(si.tumbling("t", "1h")).agg(
        n=si.count())
    skipped = []
    for number, (table, statistics) in enumerate([(close, True), (close, ["x"]), (far, True), (ahead, True)]):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(table, path, write_statistics=statistics)
        plan = start_stream(flow, tmp_path / str(number), si.to_memory())._spec.plan
        input = StreamInput(EVENTS, EVENTS, plan.scan_conditions, plan.skipped_time, True)
        for known in (None, 1_767_225_600_000_000 + 10_000_000):  # START and ten seconds
            found = row_groups_of([ScannedFile(str(path), {})], input, Clock(known))
            assert found is not None
            skipped.append(found.skipped.row_groups)
    assert skipped == [1, 1, 0, 0, 0, 0, 0, 1]
    checked = start_stream(flow, tmp_path / "checked", si.to_memory(), on_error=si.to_memory())._spec.plan
    assert checked.scan_conditions == ()
    before = start_stream(si.flow(EVENTS).filter(col("x") > 10).with_watermark("t", "0s"), tmp_path / "before",
                          si.to_memory())._spec.plan  # the watermark is about rows that pass the filter
    assert len(before.scan_conditions) == 1
    assert before.skipped_time is None


@pytest.mark.parametrize("crashes", ["no", "before", "after"])
def test_a_drained_stream_may_resume(crashes: str, tmp_path: Path) -> None:
    """Its windows stay closed, later ones open; a driver that crashes meanwhile has drained it, or not yet."""
    flow = si.flow(EVENTS).with_watermark("t", "5s").group_by("k", si.tumbling("t", "10s")).agg(n=si.count())

    def begin() -> Coordinator:
        return start_stream(flow, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"))

    coordinator = begin()
    run(coordinator, [[events(1, 25)], [events(26, 27, k="b")]])
    with crash_at_call(Manifests, "revise", 1, crashes == "before") if crashes != "no" else nullcontext():
        try:
            drain(coordinator)
        except Crash:
            crash(coordinator)
            coordinator = begin()
            drain(coordinator)
    assert coordinator.progress is not None
    assert (coordinator.progress["batch_id"], coordinator.progress["watermark_time"]) == (1, "2026-01-01 00:00:30")
    drain(coordinator)  # nothing is left
    coordinator.close()
    coordinator = begin()
    assert coordinator.next_end is None
    with pytest.warns(RuntimeWarning, match="1 rows came too late"):
        run(coordinator, [[events(28, 31)], [events(60)]], first=2)
    coordinator.close()
    found = ds.dataset(tmp_path / "out").to_table().to_pylist()
    assert sorted((row["window_start"].second, row["k"], row["n"]) for row in found) == [
        (0, "a", 1), (20, "a", 1), (20, "b", 2), (30, "a", 1)]


def test_files_of_a_month_close_their_windows_and_outliers_are_reported(tmp_path: Path) -> None:
    month = [[events(*range(31 * 86_400 * number, 31 * 86_400 * (number + 1), 3600))] for number in range(3)]
    flow = si.flow(EVENTS).with_watermark("t", "1h").group_by(si.tumbling("t", "1h")).agg(n=si.count())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows_of(flow, month, tmp_path / "months").num_rows == 3 * 31 * 24 - 2
    sink = si.to_memory()
    coordinator = start_stream(flow, tmp_path / "outliers", sink)
    assert why_no_output(coordinator, coordinator._spec.plan).startswith("No batch has ended yet")
    run(coordinator, [[events()]])
    assert why_no_output(coordinator, coordinator._spec.plan).startswith("No row has arrived yet: the 1 batches")
    assert coordinator.progress is not None
    assert [coordinator.progress[name] for name in ("watermark_time", "why_no_watermark", "state_rows")] == [
        None, "no row with a time has arrived yet", 0]
    with pytest.warns(RuntimeWarning, match="2 of 5 rows of a batch are outliers: .* before with_watermark") as caught:
        run(coordinator, [[events(10, 20)], [events(30, 40, None), events(1e9, 2e9)], [events(50, 1e9)]], first=1)
    assert sum("outliers" in str(each.message) for each in caught) == 1
    assert why_no_output(coordinator, coordinator._spec.plan) == (
        "The first open window ends at 2026-01-01 01:00:00 and the watermark is at 2025-12-31 23:00:50: it closes when "
        "a row arrives that is 7150 s later than the latest so far. 3 rows are outliers, more than a day after all "
        "others, and do not advance it unless most rows of 3 batches in a row are. A stream has no end that closes "
        "its last windows; stop(drain=True) does.")
    assert "stream is stopped: started again" in why_no_output(coordinator, coordinator._spec.plan, "stopped")
    run(coordinator, [[events(60 * 60 * 3)]], first=4)
    assert why_no_output(coordinator, coordinator._spec.plan) == "There is output: 1 rows since the start."
    assert [coordinator.progress[name] for name in ("watermark_time", "why_no_watermark", "state_rows")] == [
        "2026-01-01 02:00:00", None, 3]  # and windows of the outliers
    coordinator.close()
    resumed = start_stream(flow, tmp_path / "outliers", sink)
    assert resumed.progress == {**coordinator.progress, "duration_s": None, "phases_s": {}}
    assert why_no_output(resumed, resumed._spec.plan) == (
        "No batch has ended yet: Spark has found no new rows in its source, or the first batch is running. It resumes "
        "after batch 4, with the watermark at 2026-01-01 02:00:00: rows of that batch and of earlier ones do not come "
        "again.")
    assert why_no_output(resumed, resumed._spec.plan, "stopped").startswith("The stream was stopped before its first")
    resumed.close()
    filtered = start_stream(si.flow(EVENTS).filter(col("x") > 9), tmp_path / "filtered", si.to_memory())
    run(filtered, [[events(1, 2)]])
    assert why_no_output(filtered, filtered._spec.plan) == (
        "2 rows have arrived: all of them are dropped by the flow's filters or joins.")
    assert filtered.progress is not None
    assert filtered.progress["why_no_watermark"] == "the flow has no with_watermark"
    filtered.close()


@pytest.mark.parametrize(("build", "emit", "message"), [
    (lambda q: q.group_by("k").agg(n=si.count()), "final", "no final result"),
    (lambda q: q.group_by("k", si.tumbling("t", "1s")).agg(n=si.count()), "final", "never close without a watermark"),
    (lambda q: q.group_by("k").agg(n=si.count()).group_by("n").agg(m=si.count()), "changes", "has several"),
    (lambda q: q.limit(3), "final", "limit depends on the order"),
    (lambda q: q.sort("x"), "final", "cannot be sorted"),
    (lambda q: q.join({"k": ["a"]}, on="k", how="outer"), "final", "how='outer' needs a flow that ends"),
    (lambda q: q.union(si.flow(pa.schema(list(EVENTS)[::-1])).select("t", "k", "x")), "final", "different columns"),
    (lambda q: q.union(q.with_watermark("t", "1s")), "final", "different watermarks"),
    (lambda q: q.group_by("k").agg(n=si.count()).sort("n"), "changes", "no order among them"),
    (lambda q: q.group_by("k").agg(f=col("x").first()), "changes", "first depends on the order"),
])  # fmt: skip
def test_flows_that_no_stream_can_run_are_refused(build: Callable[[Flow], Flow], emit: str, message: str,
                                                  tmp_path: Path) -> None:
    with pytest.raises(ScaleinError, match=message):
        start_stream(build(si.flow(EVENTS)), tmp_path, si.to_memory(), emit=emit)
