"""Rows of windows that are sorted by their window first leave when their windows are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.exec import time_sort
from scalein.exec.fragments import cut, fragments
from scalein.exec.operator import Blocking
from scalein.testing import Stream, until
from tests.jobs.streams import rows_in
from tests.same import assert_same


def batch(*rows: tuple[int, str]) -> pa.RecordBatch:
    return pa.record_batch({"t": [t for t, _ in rows], "k": [k for _, k in rows]})


BATCHES = [batch((1, "a"), (3, "b"), (5, "b")), batch((12, "a"), (4, "c"), (14, "c")), batch((25, "b"), (13, "a")),
           batch((41, "a"), (35, "b"), (44, "b"))]  # fmt: skip


def counts(source: Flow) -> Flow:
    return source.with_watermark("t", 10).group_by("k", si.tumbling("t", 10)).agg(n=si.count())


def in_order(source: Flow) -> Flow:
    return counts(source).sort("window_start", col("n"), "k", descending=[False, True, False])


def test_windows_of_an_endless_flow_leave_in_order() -> None:
    stream, rows = Stream({"all": BATCHES}, ends=False), si.to_memory()
    job = in_order(si.from_source(stream)).start(sink=rows)
    until(lambda: rows.table().num_rows == 6, job)  # the watermark is 34
    want = in_order(si.from_arrow(pa.Table.from_batches(BATCHES))).collect()
    assert rows.table().to_pylist() == want.to_pylist()[:6]
    job.stop(drain=True)
    assert rows.table().equals(want)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_sort_goes_on_from_its_checkpoint(tmp_path: Path, stop: int) -> None:
    def first(source: Flow) -> Flow:
        return counts(source).bottom_k(6, by=["window_start", "k"])

    rows = si.to_memory()
    job = first(si.from_source(Stream({"all": BATCHES}, allowed={"all": stop}))).start(sink=rows, checkpoint=tmp_path)
    until(lambda: rows_in(job) == sum(each.num_rows for each in BATCHES[:stop]), job)
    job.stop()
    first(si.from_source(Stream({"all": BATCHES}))).start(sink=rows, checkpoint=tmp_path).wait()
    assert_same(rows.table(), first(si.from_arrow(pa.Table.from_batches(BATCHES))).collect(), ordered=True)


def test_a_checkpoint_of_a_sort_that_waited_for_the_end_is_gone_on_from(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = si.to_memory()
    with monkeypatch.context() as patch:
        patch.setattr(time_sort, "TimeSort", Blocking)
        job = in_order(si.from_source(Stream({"all": BATCHES}, allowed={"all": 3}))).start(
            sink=rows, checkpoint=tmp_path)
        until(lambda: rows_in(job) == 8, job)
        job.stop()
    assert rows.table().num_rows == 0
    in_order(si.from_source(Stream({"all": BATCHES}))).start(sink=rows, checkpoint=tmp_path).wait()
    assert_same(rows.table(), in_order(si.from_arrow(pa.Table.from_batches(BATCHES))).collect(), ordered=True)


def leads(flow: Flow) -> list[tuple[str, int] | None]:
    return [each.sorted_by for each in fragments(cut(flow.op)) if each.state is not None][1:]


def test_which_sorts_need_not_wait() -> None:
    source = si.flow({"t": pa.int64(), "k": pa.string()})
    windows, wide = counts(source), source.group_by("k", si.tumbling("t", 50)).agg(n=si.count())
    both = windows.union(wide)
    assert leads(windows.sort("window_start")) == [("window_start", 0)]
    assert leads(windows.filter(col("n") > 1).sort("window_end", "n")) == [("window_end", 10)]
    assert leads(both.sort("window_end"))[1:] == [("window_end", 10)]
    for waits in (windows.sort("n"), windows.sort("window_start", descending=True), windows.sort(-col("window_start")),
                  windows.with_columns(window_start=col("n")).sort("window_start"),
                  windows.sort("n").sort("window_start")):  # fmt: skip
        assert leads(waits)[-1] is None


@pytest.mark.parametrize("by", [{"descending": True}, {}])
def test_other_sorts_of_endless_flows_are_refused(by: dict[str, Any]) -> None:
    flow = counts(si.from_source(Stream({"all": BATCHES}, ends=False)))
    with pytest.raises(si.BadArgument, match="an endless flow cannot be sorted") as caught:
        flow.sort("window_start" if by else "n", **by).start(sink=si.to_memory())
    assert 'by "window_start" first' in str(caught.value.hint)
