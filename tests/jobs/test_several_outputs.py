"""Several outputs of one job: each gives the rows that the oracle gives for its flow, whatever happens to the job."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.connectors.sinks.files import FileSink
from scalein.exec.fragments import cut_together, fragments
from scalein.jobs.job import Job
from scalein.testing import POINTS, Crashed, Stream, crash_at, until
from tests import oracle
from tests.engines import examples
from tests.jobs.streams import cut, rows_in
from tests.jobs.test_same_rows import FLOWS, NAMES, marked, tables
from tests.same import assert_same

Build = Callable[[Flow], Flow]

PAIRS: dict[str, Callable[[Flow], list[Flow]]] = {
    "one source": lambda s: [s.filter(col("x") > 0), s.group_by("k").agg(n=si.count()), s],
    "a shared prefix": lambda s: _both(s.filter(col("x").is_not_null()).with_columns(y=col("x") * 2)),
    "an output that feeds another": lambda s: _chained(s),
    "windows of one watermark": lambda s: _windows(s.with_watermark("t", "40ms")),
    "a fork that meets again": lambda s: _meets(s.with_watermark("t", "40ms").filter(col("g") > -2)),
    "state that is shared": lambda s: _shared_state(s),
    "two watermarks": lambda s: [s.with_watermark("t", delay).group_by(si.tumbling("t", "30ms")).agg(n=si.count())
                                 for delay in ("40ms", "90ms")],
    "the same flow twice": lambda s: [s.distinct("k"), s.distinct("k")],
    "sorted and limited": lambda s: [s.limit(5), s.sort("x", "t", "f", "k", "g"), s.join(NAMES, on="k", how="right")],
}  # fmt: skip


def _both(s: Flow) -> list[Flow]:
    return [s.group_by("k").agg(total=col("y").sum()), s.select("y").filter(col("y") > 3)]


def _chained(s: Flow) -> list[Flow]:
    per_key = s.with_watermark("t", "40ms").group_by("k", si.tumbling("t", "20ms")).agg(n=si.count())
    return [per_key, per_key.group_by(si.tumbling("window_start", "60ms")).agg(most=col("n").max()),
            per_key.filter(col("n") > 1).select("k", "n")]


def _windows(s: Flow) -> list[Flow]:
    return [s.group_by("g", si.sliding("t", "40ms", every="15ms")).agg(n=si.count()),
            s.group_by("k", si.tumbling("t", "30ms")).agg(u=col("x").n_unique(), f=col("x").first()),
            s.select("k", "x")]


def _meets(s: Flow) -> list[Flow]:
    both = s.filter(col("x") > 2).union(s.filter(col("x") <= 2))
    return [both.group_by(si.tumbling("t", "30ms")).agg(n=si.count()), s.select("t"), s.union(s).select("k")]


def _shared_state(s: Flow) -> list[Flow]:
    fresh = s.distinct("k", "g").select("k", "g")
    return [fresh, fresh.group_by("k").agg(n=si.count()), fresh.filter(col("g") > 0)]


def sinks(count: int) -> list[Any]:
    return [si.to_memory() for _ in range(count)]


def started(flows: Sequence[Flow], outs: Sequence[Any], **options: Any) -> Job:
    return si.start(*(flow.to(out) for flow, out in zip(flows, outs, strict=True)), **options)


@pytest.mark.parametrize("name", PAIRS)
@examples(2)
@given(table=tables(), sizes=st.lists(st.integers(1, 25), min_size=1, max_size=3), workers=st.integers(1, 3),
       stop=st.none() | st.integers(0, 6), is_limited=st.booleans())  # fmt: skip
def test_each_output_gives_the_rows_of_the_oracle(
        name: str, table: pa.Table, sizes: list[int], workers: int, stop: int | None, is_limited: bool) -> None:
    batches = cut(table, sizes)
    build = PAIRS[name]
    note(f"{sizes} {workers} {stop} {is_limited}")
    options: dict[str, Any] = {"workers": workers, "memory": "200MB" if is_limited else None}
    outs = sinks(len(build(si.from_arrow(table))))
    with tempfile.TemporaryDirectory() as folder:
        if stop is not None:
            options |= {"checkpoint": folder, "every": "1ms"}
            stop = min(stop, len(batches))
            job = started(build(si.from_source(Stream({"all": batches}, allowed={"all": stop}))), outs, **options)
            wanted = sum(batch.num_rows for batch in batches[:stop])
            until(lambda: rows_in(job) >= wanted or not job.is_active, job)
            job.stop()
        job = started(build(si.from_source(Stream({"all": batches}))), outs, **options)
        job.wait()
    for out, flow in zip(outs, build(si.from_arrow(table)), strict=True):
        assert_same(out.table(), oracle.collect(flow), tolerance=1e-9)
    assert job.metrics()["late_rows"] == 0


@pytest.mark.parametrize("name", ["running", "tumbling", "sliding", "distinct keys", "window over window"])
def test_pairs_of_flows_give_what_each_gives_alone(name: str) -> None:
    table = pa.table({"k": ["a", "b", None, "a"] * 9, "g": pa.array([0, 1, 2] * 12, pa.int16()),
                      "x": [*range(36)], "f": [1.5, -2.0, 0.0] * 12,
                      "t": pa.array([*range(0, 360, 10)], pa.timestamp("ms"))})  # fmt: skip
    source = si.from_batches(table.to_batches(max_chunksize=5))
    other = marked(lambda s: s.group_by(si.tumbling("t", "50ms")).agg(total=col("x").sum()))
    flows = [FLOWS[name][0](source), other(source)]
    outs = sinks(2)
    assert started(flows, outs).wait()
    for out, flow in zip(outs, flows, strict=True):
        assert_same(out.table(), flow.collect(), tolerance=1e-9)


# --- what is shared


class Counted:
    """A source that counts its readers and rows."""

    def __init__(self, table: pa.Table) -> None:
        self._table, self.schema, self.opened, self.rows = table, table.schema, 0, 0

    def partitions(self) -> list[str]:
        return ["all"]

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
        self.opened += 1
        for number, batch in enumerate(self._table.to_batches(max_chunksize=4)):
            if number >= (offset or 0):
                self.rows += batch.num_rows
                yield batch, number + 1


def test_a_source_is_read_once_and_a_common_step_runs_once() -> None:
    source = Counted(pa.table({"x": [*range(20)]}))
    seen: list[int] = []

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.num_rows)
        return batch

    rows = si.from_source(source)
    mapped = rows.map_batches(look, rows.schema)
    outs = sinks(3)
    started([mapped.filter(col("x") > 9), mapped.group_by().agg(n=si.count()), rows], outs).wait()
    assert (source.opened, source.rows, sum(seen)) == (1, 20, 20)
    assert [out.table().num_rows for out in outs] == [10, 1, 20]


def test_equal_steps_over_the_same_source_are_shared_however_they_were_written() -> None:
    source = si.from_arrow(pa.table({"k": [1, 2, 1], "x": [1, 2, 3]}))
    flows = [source.filter(col("x") > 0).distinct("k").select("k"), source.filter(col("x") > 0).distinct("k").limit(1)]
    edges = cut_together([flow.op for flow in flows], "final")
    states = [type(each.state).__name__ for each in fragments(edges) if each.state is not None]
    assert (len(edges), states) == (1, ["Distinct", "Limit"])


def test_sources_that_do_not_meet_have_their_own_watermarks() -> None:
    fast, slow = (Stream({"all": [pa.record_batch({"t": [1]})]}, ends=False) for _ in range(2))
    outs = sinks(2)
    flows = [si.from_source(stream).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
             for stream in (fast, slow)]
    job = started(flows, outs)
    fast.push("all", pa.record_batch({"t": [25]}))
    until(lambda: outs[0].table().num_rows == 1, job)
    assert outs[1].table().num_rows == 0
    assert job.metrics()["watermark"] == 1  # the least
    job.stop(drain=True)
    assert [out.table().num_rows for out in outs] == [2, 1]


@pytest.mark.parametrize("is_swapped", [False, True])
def test_each_input_resumes_at_its_own_time(is_swapped: bool, tmp_path: Path) -> None:
    """Both are from sources of one name: they are recognised by their watermarks."""

    def start(fast: list[int], slow: list[int], swap: bool, ends: bool) -> Job:
        outputs = []
        for name, times, delay in (("fast", fast, 0), ("slow", slow, 1)):
            stream = Stream({"all": [pa.record_batch({"t": [time]}) for time in times]}, ends=ends)
            windows = si.from_source(stream).with_watermark("t", delay).group_by(si.tumbling("t", 10))
            outputs.append(windows.agg(n=si.count()).to(si.to_ipc(tmp_path / name)))
        return si.start(*(reversed(outputs) if swap else outputs), checkpoint=tmp_path / "checkpoint", every="1h")

    job = start([1, 25], [1], swap=False, ends=False)
    until(lambda: rows_in(job) == 3 and job.metrics()["watermark"] == 0, job)
    job.stop()
    job = start([1, 25, 38], [1, 3, 12], swap=is_swapped, ends=True)
    job.wait()
    assert job.metrics()["late_rows"] == 0
    for name, counts in (("fast", {0: 1, 20: 1, 30: 1}), ("slow", {0: 2, 10: 1})):
        found = si.read_ipc(tmp_path / name).collect()
        assert dict(zip(found["window_start"].to_pylist(), found["n"].to_pylist(), strict=True)) == counts


def test_late_rows_and_dead_letters_are_those_of_all_outputs() -> None:
    table = pa.table({"t": [100, 200, 5, 201], "x": [1, 0, 2, 4]})
    rows = si.from_batches(table.to_batches(max_chunksize=1)).with_watermark("t", 0)
    windows = rows.group_by(si.tumbling("t", 10)).agg(n=si.count())
    outs, late, bad = sinks(2), si.to_memory(), si.to_memory()
    job = started([windows, rows.select(y=si.lit(60) // col("x"))], outs, late=late, on_error=bad)
    job.wait()
    assert late.table().to_pydict() == {"t": [5], "x": [2]}
    assert bad.table().select(["t", "x"]).to_pydict() == {"t": [200], "x": [0]}
    assert outs[1].table().to_pydict() == {"y": [60, 30, 15]}
    assert outs[0].table().num_rows == 2


def test_changes_of_all_outputs() -> None:
    rows = si.from_arrow(pa.table({"k": ["a", "b", "a"], "x": [1, 2, 3]}))
    groups = rows.group_by("k").agg(n=si.count())
    outs = sinks(3)
    started([groups, groups.filter(col("n") > 1), rows.select("x")], outs, emit="changes").wait()
    assert sorted(map(str, outs[0].table().to_pylist())) == [
        "{'k': 'a', 'n': 2, 'op': 'insert'}", "{'k': 'b', 'n': 1, 'op': 'insert'}"]
    assert outs[1].table().to_pylist() == [{"k": "a", "n": 2, "op": "insert"}]
    assert outs[2].table().column("op").to_pylist() == ["insert"] * 3


def test_each_output_has_its_own_figures(tmp_path: Path) -> None:
    rows = si.from_arrow(pa.table({"x": [1, 2, 3]}))
    job = si.start(rows.to(si.to_parquet(tmp_path / "all")), rows.filter(col("x") > 2).to(si.to_memory()))
    job.wait()
    assert job.metrics()["outputs"] == [{"sink": str(tmp_path / "all"), "run_rows_out": 3},
                                        {"sink": "MemorySink", "run_rows_out": 1}]
    assert job.metrics()["rows_out"] == 4


# --- exactly once over all sinks

BATCHES = [pa.record_batch({"t": pa.array([n, n + 1]), "k": pa.array([n % 3, n % 5])}) for n in range(0, 40, 2)]


def flows(stream: Stream) -> list[Flow]:
    rows = si.from_source(stream).with_watermark("t", 3)
    fresh = rows.distinct("k", "t")
    return [rows.filter(col("k") > 0), fresh.group_by("k", si.tumbling("t", 7)).agg(n=si.count()), fresh.select("k")]


def in_folders(folder: Path, order: Sequence[int] = (0, 1, 2), stream: Stream | None = None, **options: Any) -> Job:
    found = flows(Stream({"all": BATCHES}) if stream is None else stream)
    return started([found[k] for k in order], [si.to_ipc(folder / f"out-{k}") for k in order],
                   checkpoint=folder / "checkpoint", **{"every": "1ms", **options})


def read(folder: Path, number: int) -> pa.Table:
    parts = sorted((folder / f"out-{number}").glob("part-*"))
    return pa.concat_tables([pa.ipc.open_file(part).read_all() for part in parts])


def check(folder: Path, numbers: Sequence[int] = (0, 1, 2)) -> None:
    whole = flows(Stream({"all": BATCHES}))
    for number in numbers:
        assert_same(read(folder, number), whole[number].collect())
    assert sorted({path.name for path in folder.rglob("_*")}) == ["_owner"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("number", [1, 3])
def test_a_crash_loses_and_doubles_no_row_of_any_output(tmp_path: Path, point: str, number: int) -> None:
    with crash_at(point, number), suppress(Crashed):
        in_folders(tmp_path).wait()
    with crash_at(point, number + 1), suppress(Crashed):
        in_folders(tmp_path, order=(2, 0, 1)).wait()
    in_folders(tmp_path, order=(1, 0, 2)).wait()
    check(tmp_path)


def test_a_crash_between_the_commits_of_two_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first output is visible, the second is not: the next run makes it so."""
    commit, seen = FileSink.commit, list[str]()

    def dies(self: FileSink, prepared: Any) -> None:
        seen.append(str(self.path))
        if len(seen) == 5:
            raise Crashed("between two sinks")
        commit(self, prepared)

    monkeypatch.setattr(FileSink, "commit", dies)
    with suppress(Crashed):
        in_folders(tmp_path).wait()
    assert len(seen) >= 5
    monkeypatch.undo()
    in_folders(tmp_path).wait()
    check(tmp_path)


# --- another set of outputs


def stopped(folder: Path, batches: int = 9, order: Sequence[int] = (0, 1, 2)) -> None:
    job = in_folders(folder, order, Stream({"all": BATCHES}, allowed={"all": batches}))
    until(lambda: rows_in(job) == 2 * batches, job)
    job.stop()


def test_outputs_may_change_places(tmp_path: Path) -> None:
    stopped(tmp_path)
    stopped(tmp_path, 14, order=(2, 1, 0))
    in_folders(tmp_path, order=(1, 2, 0)).wait()
    check(tmp_path)


def test_an_output_may_be_left_out_and_its_state_goes(tmp_path: Path) -> None:
    stopped(tmp_path)
    with pytest.warns(RuntimeWarning, match="goes on without the output"):
        job = in_folders(tmp_path, order=(2,), stream=Stream({"all": BATCHES}, ends=False), every="1h")
    for _ in range(4):  # older epochs, which have the state, are forgotten
        job.snapshot()
    job.stop(drain=True)
    check(tmp_path, numbers=[2])
    assert [path.name for path in (tmp_path / "checkpoint").glob("state-*")] == ["state-0"]


def test_an_output_that_comes_back_is_refused_as_a_new_one_is(tmp_path: Path) -> None:
    stopped(tmp_path)
    with pytest.warns(RuntimeWarning, match="goes on without the output"):
        stopped(tmp_path, 12, order=(1, 2))
    with pytest.raises(si.BadArgument, match="not among those of the job") as caught:
        in_folders(tmp_path)
    assert caught.value.facts["found"] == str(tmp_path / "out-0")
    in_folders(tmp_path, order=(1, 2)).wait()
    check(tmp_path, numbers=[1, 2])


def test_a_job_of_one_output_gets_no_second(tmp_path: Path) -> None:
    stopped(tmp_path, order=(1,))
    with pytest.raises(si.BadArgument, match="not among those of the job"):
        in_folders(tmp_path, order=(1, 2))
    in_folders(tmp_path, order=(1,)).wait()
    check(tmp_path, numbers=[1])


def test_an_output_whose_rows_are_not_visible_may_not_be_left_out(tmp_path: Path) -> None:
    with crash_at("commit"), suppress(Crashed):
        in_folders(tmp_path, every="1h").wait()
    with pytest.raises(si.BadArgument, match="not all visible"):
        in_folders(tmp_path, order=(1, 2))
    in_folders(tmp_path).wait()
    check(tmp_path)


def test_a_changed_state_of_one_output_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path)
    rows, _, keys = flows(Stream({"all": BATCHES}))
    other = si.from_source(Stream({"all": BATCHES})).with_watermark("t", 3).group_by(si.tumbling("t", 8)).agg(
        n=si.count())
    with pytest.raises(si.BadArgument, match="keeps other state"):
        started([rows, other, keys], [si.to_ipc(tmp_path / f"out-{k}") for k in range(3)],
                checkpoint=tmp_path / "checkpoint")


def test_flows_in_memory_are_recognised_by_what_they_are(tmp_path: Path) -> None:
    outs = sinks(2)

    def build(stream: Stream) -> list[Flow]:
        rows = si.from_source(stream)
        return [rows.distinct("k"), rows.group_by("k").agg(n=si.count())]

    job = started(build(Stream({"all": BATCHES}, allowed={"all": 5})), outs, checkpoint=tmp_path)
    until(lambda: rows_in(job) == 10, job)
    job.stop()
    started(build(Stream({"all": BATCHES}))[::-1], outs[::-1], checkpoint=tmp_path).wait()
    for out, flow in zip(outs, build(Stream({"all": BATCHES})), strict=True):
        assert_same(out.table(), flow.collect())


def test_a_checkpoint_names_outputs_and_their_states(tmp_path: Path) -> None:
    stopped(tmp_path)
    newest = max((tmp_path / "checkpoint").glob("epoch-*.json"))
    known = json.loads(newest.read_bytes().partition(b"\n")[0])
    assert [about["states"] for _, about in sorted(known["outputs"].items(), key=lambda each: known["places"][each[0]])
            ] == [[], [0, 1], [0]]
    assert known["folders"] == [0, 1]


# --- what is refused


def test_mistakes_are_explained(tmp_path: Path) -> None:
    flow = si.from_arrow(pa.table({"x": [1]}))
    sink = si.to_memory()
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: si.start(), "takes flows, each with its sink"),
        (lambda: si.start(flow), "takes flows, each with its sink"),  # type: ignore[arg-type]
        (lambda: flow.to("out/"), "to takes a sink"),
        (lambda: flow.to(sink).collect(), "collect is a method of the flow"),
        (lambda: si.start(flow.to(sink), flow.to(sink)), "one sink cannot take two kinds of rows"),
        (lambda: si.start(flow.to(sink), late=sink), "one sink cannot take two kinds of rows"),
        (lambda: si.start(flow.to(si.to_csv(tmp_path)), flow.to(si.to_ipc(f"{tmp_path}/"))), "the same path"),
        (lambda: si.start(si.flow({"x": pa.int64()}).to(sink)), "has no data yet"),
    ]
    for run, message in wrong:
        with pytest.raises(si.BadArgument, match=message):
            run()


def test_until_now_ends_a_shared_source_once(tmp_path: Path) -> None:
    si.from_arrow(pa.table({"x": [0, 1]})).write_ipc(tmp_path / "in.arrow")
    rows = si.read_ipc(tmp_path / "*.arrow", follow=True)
    outs = sinks(2)
    started([rows, rows.filter(col("x") > 0)], outs, until="now", checkpoint=tmp_path / "checkpoint").wait()
    assert [out.table().column("x").to_pylist() for out in outs] == [[0, 1], [1]]
