"""Event time: which rows are late, which windows come out, and when; against the oracle, and in examples."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.exec import event_time
from scalein.exec.schedule import using
from scalein.ir.ops import Aggregate
from scalein.jobs import driver
from scalein.jobs.job import Job
from scalein.testing import Clock, Stream, until
from tests.engines import examples
from tests.jobs.streams import rows_in, until_quiet
from tests.oracle import streams
from tests.oracle.streams import Batch, End, Event
from tests.same import assert_same
from tests.schedules import RandomSchedule

pytestmark = pytest.mark.filterwarnings("ignore:.* rows (came too late|of a batch are outliers):RuntimeWarning")

SCHEMA = pa.schema({"t": pa.int64(), "v": pa.int64()})


def batch(*rows: tuple[int | None, int]) -> pa.RecordBatch:
    return pa.record_batch([[t for t, _ in rows], [v for _, v in rows]], schema=SCHEMA)


def window(size: int, every: int) -> si.Window:
    return si.tumbling("t", size) if size == every else si.sliding("t", size, every=every)


def pushed(job: Job, stream: Stream, partition: str, rows: list[tuple[int | None, int]]) -> None:
    """One batch, run before the next comes."""
    want = rows_in(job) + len(rows)
    stream.push(partition, batch(*rows))
    until(lambda: rows_in(job) >= want, job)
    job.scale(2)  # answered at a border: what came before is through


edges = st.integers(-1, 6).map(lambda number: 5 * number)  # of windows
times = st.one_of(edges, st.integers(-20, 150), edges, st.none())
deliveries = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.tuples(times, st.integers(1, 9)), min_size=1,
                                                                max_size=4)), max_size=10)  # fmt: skip


Build = Callable[[Flow, Any, int], Flow]
BUILDS: dict[str, Build] = {
    "sum": lambda s, each, delay: s.with_watermark("t", delay).group_by(each).agg(s=col("v").sum(), n=si.count()),
    "list": lambda s, each, delay: s.with_watermark("t", delay).group_by(each).agg(top=col("v").top_k(99, by="v")),
    "keys": lambda s, each, delay: s.with_watermark("t", delay).group_by(each, k=col("v") % 3).agg(
        u=col("v").n_unique()),
    "filtered": lambda s, each, delay: s.filter(col("v") > 2).with_columns(t=col("t") * 2).with_watermark(
        "t", delay).group_by(each).agg(hi=col("v").max()),
}  # fmt: skip


@pytest.mark.parametrize("kind", BUILDS)
@examples(12)
@given(size=st.sampled_from([(10, 10), (10, 5), (12, 5)]), delay=st.sampled_from([0, 7]), given=deliveries,
       partitions=st.sampled_from(["a", "ab"]), workers=st.integers(1, 3), seed=st.integers(0, 1 << 32))  # fmt: skip
def test_late_rows_watermarks_and_windows_are_those_of_the_oracle(
        kind: str, size: tuple[int, int], delay: int, partitions: str, workers: int, seed: int,
        given: list[tuple[str, list[tuple[int | None, int]]]]) -> None:  # fmt: skip
    """Step by step, however rounds and morsels are cut."""
    stream = Stream({name: [batch()] for name in partitions}, ends=False)
    events: list[Event] = [Batch(batch(), name) for name in partitions]
    events += [Batch(batch(*rows), name if name in partitions else "a") for name, rows in given]
    plan = BUILDS[kind](si.flow(SCHEMA), window(*size), delay).op
    trace = streams.run(plan, [*events, *map(End, partitions)])
    out, late = si.to_memory(), si.to_memory()
    with using(RandomSchedule(seed)), Clock():  # no partition is idle, however slow the machine is
        flow = BUILDS[kind](si.from_source(stream), window(*size), delay)
        job = flow.start(sink=out, late=late, workers=workers)
        try:
            for step, (name, rows) in enumerate(given, len(partitions)):
                pushed(job, stream, name if name in partitions else "a", rows)
                assert_same(out.table(), trace.table(step + 1))
                assert job.metrics()["watermark"] == trace.watermarks[step]
        finally:
            job.stop(drain=True)
    assert_same(out.table(), trace.table())
    assert isinstance(plan, Aggregate)
    assert_same(late.table(), trace.late_table(plan.input))
    assert job.metrics()["late_rows"] == len(trace.late)
    assert job.metrics()["timeless_rows"] == trace.timeless


def ran(flow: Flow, **options: Any) -> tuple[dict[str, list[Any]], Job]:
    out = si.to_memory()
    job = flow.start(sink=out, **options)
    job.wait()
    return out.table().to_pydict(), job


def stream_of(*batches: pa.RecordBatch) -> Flow:
    return si.from_batches(list(batches), batches[0].schema)


def test_late_rows_can_be_refused() -> None:
    flow = stream_of(batch((0, 1)), batch((50, 1)), batch((3, 7))).with_watermark("t", 0)
    with pytest.raises(si.ScaleinError, match="too late") as found:
        ran(flow.group_by(si.tumbling("t", 10)).agg(n=si.count()), late="error")
    assert "'v': 7" in str(found.value) or "'t': 3" in str(found.value)


def test_late_rows_warn_once_and_have_all_their_columns() -> None:
    schema = pa.schema({"t": pa.int64(), "unused": pa.string()})
    rows = [pa.record_batch([[t], [str(t)]], schema=schema) for t in (0, 50, 1, 60, 2)]
    flow = stream_of(*rows).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, job = ran(flow)
    assert sum("too late" in str(each.message) for each in caught) == 1
    assert job.metrics()["late_rows"] == 2
    late = si.to_memory()
    ran(flow, late=late)
    assert late.table().to_pydict() == {"t": [1, 2], "unused": ["1", "2"]}


def test_late_rows_of_two_kinds_do_not_fit_into_one_sink() -> None:
    flow = si.from_batches([batch((50, 1)), batch((1, 2))], SCHEMA).with_watermark("t", 0)
    first = flow.group_by(si.tumbling("t", 10)).agg(n=si.count())
    second = flow.select("t", w=col("v") * 2).group_by(si.tumbling("t", 10)).agg(n=col("w").count())
    with pytest.raises(si.BadArgument, match=r"(?s)different columns.*found .*v: i64.*; .*w: i64"):
        first.union(second).start(sink=si.to_memory(), late=si.to_memory())
    late = si.to_memory()
    ran(first.union(first), late=late)
    assert late.table().to_pydict() == {"t": [1, 1], "v": [2, 2]}
    again = first.with_watermark("window_start", 0).group_by(si.tumbling("window_start", 20)).agg(n=col("n").sum())
    ran(again, late=si.to_memory())  # of windows over windows, only the first have late rows


def test_rows_that_a_filter_drops_are_not_late() -> None:
    flow = stream_of(batch((0, 1)), batch((50, 1)), batch((3, -7), (None, -1), (4, 5))).with_watermark("t", 0)
    found, job = ran(flow.filter(col("v") > 0).group_by(si.tumbling("t", 10)).agg(n=si.count()))
    assert (job.metrics()["late_rows"], job.metrics()["timeless_rows"]) == (1, 0)
    assert sorted(found["window_start"]) == [0, 50]


def test_a_watermark_may_be_computed_and_the_rows_it_filtered_move_nothing() -> None:
    flow = stream_of(batch((0, 1)), batch((500, -1)), batch((3, 1)), batch((60, 1)), batch((4, 1)))
    flow = flow.filter(col("v") > 0).with_columns(u=col("t") * 2).with_watermark("u", 0)
    found, job = ran(flow.group_by(si.tumbling("u", 10)).agg(n=si.count()))
    assert job.metrics()["late_rows"] == 1  # u = 8, after 120
    assert dict(zip(found["window_start"], found["n"], strict=True)) == {0: 2, 120: 1}


def seconds(*values: int | None) -> pa.RecordBatch:
    return pa.record_batch({"t": pa.array(values, pa.timestamp("s"))})


@pytest.mark.parametrize("rest", [[20, 30, 40], [20, 30, 40, None, 50]])
def test_times_far_ahead_do_not_close_windows(rest: list[int | None]) -> None:
    year = 365 * 86_400
    flow = stream_of(seconds(0, 5, 10), seconds(year, *rest), seconds(25), seconds(60))
    found, job = ran(flow.with_watermark("t", "30s").group_by(si.tumbling("t", "10s")).agg(n=si.count()))
    assert (job.metrics()["late_rows"], job.metrics()["outlier_rows"]) == (0, 1)
    assert sum(found["n"]) == 6 + len([t for t in rest if t is not None])


def test_time_may_jump_when_all_rows_do() -> None:
    year = 365 * 86_400
    flow = stream_of(seconds(0, 5), seconds(year, year + 1, year + 2), seconds(year + 3), seconds(year + 4), seconds(7))
    _, job = ran(flow.with_watermark("t", "30s").group_by(si.tumbling("t", "10s")).agg(n=si.count()))
    assert job.metrics()["late_rows"] == 1


DAY = 86_400
hours = st.one_of(st.integers(0, 30).map(lambda n: 12 * n), st.integers(0, 200), st.sampled_from([24, 25, 49, 10**6]))


def read(job: Job, rows: int) -> None:
    """Wait until so many rows have passed the job."""
    until(lambda: rows_in(job) >= rows, job)
    job.scale(2)  # answered at a border: what came before is through


@examples(25)
@given(given=st.lists(st.tuples(st.sampled_from("ab"), st.lists(hours, min_size=1, max_size=6)), max_size=10),
       delay=st.sampled_from([0, 7]), workers=st.integers(1, 2), seed=st.integers(0, 1 << 32))  # fmt: skip
def test_gaps_and_outliers_are_those_of_the_oracle(given: list[tuple[str, list[int]]], delay: int, workers: int,
                                                   seed: int) -> None:
    def build(flow: Flow) -> Flow:
        return flow.with_watermark("t", f"{delay}h").group_by(si.tumbling("t", "6h")).agg(n=si.count())

    events: list[Event] = [Batch(seconds(), name) for name in "ab"]
    events += [Batch(seconds(*(3600 * hour for hour in some)), name) for name, some in given]
    trace = streams.run(build(si.flow(seconds().schema)), [*events, End("a"), End("b")])
    stream, out = Stream({name: [seconds()] for name in "ab"}, ends=False), si.to_memory()
    with Clock(), using(RandomSchedule(seed)):  # no partition becomes idle
        job = build(si.from_source(stream)).start(sink=out, workers=workers)
        try:
            for step, event in enumerate(events[2:], 2):
                assert isinstance(event, Batch)
                want = rows_in(job) + event.rows.num_rows
                stream.push(event.partition, event.rows)
                read(job, want)
                assert job.metrics()["watermark"] == trace.watermarks[step]
                assert_same(out.table(), trace.table(step + 1))
        finally:
            job.stop(drain=True)
    assert_same(out.table(), trace.table())
    assert job.metrics()["late_rows"] == len(trace.late)


def months(folder: Path, *names: str) -> pa.Table:
    """A file of hourly rows for each month."""
    folder.mkdir(exist_ok=True)
    for name in names:
        first = np.datetime64(name, "M")
        times = np.arange(first.astype("M8[us]"), (first + 1).astype("M8[us]"), np.timedelta64(1, "h"))
        pq.write_table(pa.table({"t": times, "v": np.arange(len(times))}), folder / f"{name}.parquet")
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.iterdir())])


def test_a_file_of_a_month_closes_its_windows(tmp_path: Path) -> None:
    """All but the last two hours, before the end of the input: the watermark reaches the end of each file."""
    everything = months(tmp_path / "in", "2024-01", "2024-02", "2024-03")
    flow = si.read_parquet(tmp_path / "in", follow=True).with_watermark("t", "1h")
    flow = flow.group_by(si.tumbling("t", "1h")).agg(n=si.count(), s=col("v").sum())
    out = si.to_memory()
    job = flow.start(sink=out)
    until(lambda: out.table().num_rows == everything.num_rows - 2, job)
    found = job.metrics()
    assert (found["watermark_time"], found["outlier_rows"], found["late_rows"]) == ("2024-03-31 22:00:00", 0, 0)
    job.stop(drain=True)
    assert_same(out.table(), si.from_arrow(everything).group_by(
        si.tumbling("t", "1h")).agg(n=si.count(), s=col("v").sum()).collect())


def test_many_outliers_warn_once_and_say_why_windows_stay_open() -> None:
    stream, out = Stream({"all": [seconds(*range(0, 100, 10))]}, ends=False), si.to_memory()
    flow = si.from_source(stream).with_watermark("t", "0s").group_by(si.tumbling("t", "1h")).agg(n=si.count())
    batches = [seconds(*range(200, 230), 4_000_000_000), seconds(240, 4 * DAY), seconds(250, 9 * DAY)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = flow.start(sink=out)
        for batch, rows in zip(batches, (41, 43, 45), strict=True):
            stream.push("all", batch)
            read(job, rows)
    found = [str(each.message) for each in caught if "outliers" in str(each.message)]
    assert [text[:36] for text in found] == ["1 of 2 rows of a batch are outliers:"]
    assert "filter these rows out before with_watermark" in found[0]
    assert job.metrics()["outlier_rows"] == 3
    assert job.why_no_output() == (
        "The first open window ends at 1970-01-01 01:00:00 and the watermark is at 1970-01-01 00:04:10: it closes when "
        "a row arrives that is 3350 s later than the latest so far. 3 rows are outliers, more than a day after all "
        "others, and do not advance it unless most rows of 3 batches in a row are.")
    job.stop()


def test_a_partition_that_holds_the_watermark_back_is_named() -> None:
    stream = Stream({"a": [seconds(0, 9000)], "b": [seconds()]}, ends=False)
    flow = si.from_source(stream).with_watermark("t", "0s").group_by(si.tumbling("t", "1h")).agg(n=si.count())
    with Clock():  # no partition becomes idle
        job = flow.start(sink=si.to_memory())
        read(job, 2)
        assert job.why_no_output() == "There is no watermark yet: no row with a time has come from partition b."
        stream.push("b", seconds(10))
        read(job, 3)
        assert job.why_no_output().endswith("Partition b holds it back, as its times are the earliest.")
        job.stop()


def test_a_batch_that_is_half_read_resumes(tmp_path: Path) -> None:
    """Its gaps are those of all its rows: the second half bridges one of the first."""
    days = [0, 0.5, 3, 3.5, 4, 40, *(1 + n / 20 for n in range(30))]
    stream = Stream({"all": [seconds(*(round(DAY * day) for day in days))]}, ends=False)
    flow = si.from_source(stream).with_watermark("t", "0s").group_by(si.tumbling("t", "1h")).agg(n=si.count())
    with Clock():
        job = flow.start(sink=si.to_memory(), checkpoint=tmp_path, max_rows_per_second=10)
        read(job, 1)
        job.stop()
    assert (rows_in(job) < len(days), job.metrics()["watermark"]) == (True, None)
    job = flow.start(sink=si.to_memory(), checkpoint=tmp_path)
    read(job, len(days))
    assert (job.metrics()["watermark"], job.metrics()["outlier_rows"]) == (4 * DAY, 1)
    job.stop()


def test_an_idle_partition_goes_on_from_the_watermark() -> None:
    stream = Stream({"a": [seconds(0)], "b": [seconds(0)]}, ends=False)
    flow = si.from_source(stream).with_watermark("t", "0s").group_by(si.tumbling("t", "1h")).agg(n=si.count())
    with Clock() as clock:
        job = flow.start(sink=si.to_memory())
        until(lambda: rows_in(job) == 2, job)
        stream.push("a", seconds(*range(0, 20 * DAY, DAY)))
        until(lambda: clock.advance("6s") or job.metrics()["watermark"] == 19 * DAY, job)  # type: ignore[func-returns-value]
        stream.push("b", seconds(20 * DAY))
        stream.push("a", seconds(20 * DAY))
        until(lambda: job.metrics()["watermark"] == 20 * DAY, job)
        assert job.metrics()["outlier_rows"] == 0
        job.stop()


def test_an_idle_partition_does_not_hold_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "IDLE_S", 0.2)
    assert event_time.IDLE_S == 5.0
    stream = Stream({"a": [batch()], "b": [batch()]}, ends=False)
    out = si.to_memory()
    flow = si.from_source(stream).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
    job = flow.start(sink=out, workers=1)
    pushed(job, stream, "b", [(0, 1)])
    pushed(job, stream, "a", [(1, 1)])
    pushed(job, stream, "a", [(35, 1)])
    until(lambda: out.table().num_rows == 1, job)  # b is idle by now
    pushed(job, stream, "b", [(2, 1), (40, 1)])
    assert job.metrics()["late_rows"] == 1
    job.stop(drain=True)
    assert sorted(out.table().column("window_start").to_pylist()) == [0, 30, 40]


def test_a_partition_at_its_end_does_not_hold_back() -> None:
    stream = Stream({"a": [batch((0, 1))], "b": [batch((t, 1)) for t in range(0, 100, 10)]})
    flow = si.from_source(stream).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
    found, job = ran(flow)
    assert (job.metrics()["late_rows"], len(found["n"])) == (0, 10)


def test_stop_keeps_open_windows_and_drain_gives_them(tmp_path: Any) -> None:
    def started(out: Any, stream: Stream) -> Job:
        flow = si.from_source(stream).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(s=col("v").sum())
        return flow.start(sink=out, checkpoint=tmp_path, workers=1)

    out = si.to_memory()
    stream = Stream({"a": [batch((1, 1), (12, 2))]}, ends=False)
    job = started(out, stream)
    until(lambda: rows_in(job) == 2, job)
    job.stop()
    assert out.table().to_pydict()["s"] == [1]
    job = started(out, stream)
    pushed(job, stream, "a", [(13, 5)])
    job.stop(drain=True)
    assert out.table().to_pydict()["s"] == [1, 7]
    assert job.status == "finished"
    assert rows_in(job) == 3


def test_drain_runs_all_rows_that_were_read(tmp_path: Any) -> None:
    rows = [batch((n, 1)) for n in range(200)]
    out = si.to_memory()
    flow = si.from_batches(rows, SCHEMA).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
    job = flow.start(sink=out, checkpoint=tmp_path, max_rows_per_second=100)
    until(lambda: job._driver.readers.readers[0].is_ended, job)
    job.stop(drain=True)
    assert (job.status, rows_in(job)) == ("finished", 200)
    assert out.table().column("n").to_pylist() == [10] * 20


@pytest.mark.parametrize("is_drained", [True, False])
def test_a_finished_job_warns_of_rows_that_it_does_not_read(is_drained: bool, tmp_path: Any,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MORE_S", 60.0)  # a busy machine may read late

    def started(count: int, ends: bool = True) -> Job:
        flow = si.from_source(Stream({"a": [batch((n, 1)) for n in range(count)]}, ends=ends))
        return flow.limit(5).start(sink=si.to_memory(), checkpoint=tmp_path)

    job = started(3, not is_drained)
    until(lambda: rows_in(job) == 3, job)
    job.stop(drain=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        started(3).wait()
    with pytest.warns(RuntimeWarning, match="has finished, and rows that came later are not read"):
        started(4).wait()


def test_a_slow_job_makes_no_row_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions whose rows wait for the job are not idle."""
    monkeypatch.setattr(driver, "IDLE_S", 0.05)
    monkeypatch.setattr(driver, "MAX_ROUND_ROWS", 1)
    stream = Stream({"a": [batch((t, 1)) for t in (100, 200, 300)], "b": [batch((t, 1)) for t in (0, 1, 2)]})
    flow = si.from_source(stream).map_batches(slowly, SCHEMA).with_watermark("t", 0)
    found, job = ran(flow.group_by(si.tumbling("t", 10)).agg(n=si.count()), workers=1)
    assert job.metrics()["late_rows"] == 0
    assert sorted(found["n"]) == [1, 1, 1, 3]


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_source_that_says_that_it_has_nothing_is_idle(is_slow: bool) -> None:
    """Also one that ends some day; but not one that says nothing, since it is at work."""
    class Silent(Stream):
        def read(self, partition: str, offset: Any) -> Any:
            for found in super().read(partition, offset):
                if found[0].num_rows or partition == "a" or not is_slow:
                    yield found

    rows = {"a": [batch((t, 1)) for t in (5, 100, 101, 102)], "b": [batch((1, 1)), batch((2, 1))]}
    stream = Silent(rows, allowed={"a": 2, "b": 1})
    out = si.to_memory()
    with Clock() as clock:
        flow = si.from_source(stream).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
        job = flow.start(sink=out)
        until(lambda: rows_in(job) == 3, job)
        if not is_slow:
            until_quiet(job, "b")
        clock.advance("6s")
        stream.allow("a", 3)
        until(lambda: rows_in(job) == 4, job)
        if not is_slow:
            until(lambda: out.table().num_rows == 1, job)
        job.wait(0.1)
        assert out.table().num_rows == (not is_slow)
        stream.end()
        job.wait()
    assert job.metrics()["late_rows"] == (not is_slow)


def slowly(rows: pa.RecordBatch) -> pa.RecordBatch:
    time.sleep(0.1)
    return rows


def test_a_broken_clock_in_a_batch_of_its_own_moves_nothing() -> None:
    """But time may make a jump: when some batches agree, they are believed."""
    day = 86_400
    clock = event_time.PartitionClock(delay=0, max_gap=day)

    def see(*times: int) -> int | None:
        clock.observe(pa.array(times, pa.int64()), (min(times), max(times)), None)
        clock.end_batch()
        return clock.watermark

    assert [see(0, 5), see(365 * day), see(7), see(400 * day, 401 * day), see(9)] == [5, 5, 7, 7, 9]
    assert clock.outlier_rows == 3
    assert [see(500 * day), see(500 * day + 1), see(500 * day + 2), see(500 * day + 3)] == [
        9, 9, 500 * day + 2, 500 * day + 3]  # fmt: skip
    again = event_time.PartitionClock(delay=0, max_gap=day)
    again.restore(clock.to_json())
    assert again == clock


@pytest.mark.parametrize(("greatest", "after"), [(None, 7), (5, 8)])
def test_clocks_of_older_checkpoints_go_on(greatest: int | None, after: int) -> None:
    """They have no counts of a batch that is half read."""
    clock = event_time.PartitionClock(delay=0, max_gap=DAY)
    clock.restore({"greatest": greatest, "coming": 7, "far_rows": 2, "far_batches": 0})
    times = [8] if greatest is not None else [3 * DAY, 6]
    clock.observe(pa.array(times, pa.int64()), (min(times), max(times)), None)
    clock.end_batch()
    assert (clock.watermark, clock.outlier_rows) == (after, 2 if greatest is not None else 3)


moments = st.one_of(st.integers(-9, 60).map(lambda n: n * DAY // 2), st.integers(-3 * DAY, 30 * DAY),
                    st.sampled_from([-(1 << 63), -(1 << 62), 1 << 62, (1 << 63) - 1]))  # fmt: skip


@examples(300)
@given(parts=st.lists(st.lists(moments, min_size=1, max_size=8), min_size=1, max_size=5),
       known=st.none() | st.integers(-2, 20).map(lambda n: n * DAY // 2), data=st.data())  # fmt: skip
def test_summaries_of_parts_merge_to_that_of_all(parts: list[list[int]], known: int | None,
                                                 data: st.DataObject) -> None:
    """In any order, whole or with a checkpoint in between: time advances as by all rows one after the other."""
    before = 0 if known is None else data.draw(st.integers(0, 2))
    partition = streams._Partition(0, DAY, known, far_batches=before)
    partition.deliver([time for part in parts for time in part], None)
    want = partition.greatest, partition.far_batches
    summaries = [event_time.summarize(pa.array([*part, None], pa.int64()), (min(part), max(part)), known, DAY)
                 for part in parts]
    sent = [event_time.TimeSummary.from_json(each.to_json()) for each in summaries]
    whole = event_time.merge_summaries(data.draw(st.permutations(sent)), DAY)
    found = event_time.advance(known, before, whole, DAY)
    assert (found.greatest, found.outlier_batches) == want
    assert found.outliers == sum(time > found.greatest for part in parts for time in part)
    clock = event_time.PartitionClock(0, DAY, known, outlier_batches=before)
    for part in parts:
        clock.observe(pa.array(part, pa.int64()), (min(part), max(part)), None)
        again = event_time.PartitionClock(0, DAY)
        again.restore(clock.to_json())
        assert again == clock
    clock.end_batch()
    assert (clock.greatest, clock.outlier_batches, clock.outlier_rows) == (*want, found.outliers)


def test_a_summary_has_the_earliest_ranges_only() -> None:
    days = 2 * DAY * np.arange(3 * event_time.MAX_RANGES)
    summary = event_time.summarize(pa.array(days), (0, int(days[-1])), 0, DAY)
    assert (len(summary.ranges), summary.rows) == (event_time.MAX_RANGES, len(days))
    later = event_time.TimeSummary((event_time.TimeRange(-9, -5, 2), event_time.TimeRange(1, 2, 2)))
    merged = event_time.merge_summaries([later, summary], DAY).bounded()
    assert merged.rows == len(days) + 4
    assert merged.ranges[0] == (-9, 2, 5)
    assert event_time.advance(0, 2, merged, DAY) == (2 * DAY * (event_time.MAX_RANGES - 1), len(days) - (
        event_time.MAX_RANGES), 0)  # the last range that is known, as the median is beyond it
