"""Sessions in jobs: rows that are behind connect open sessions, and are late in final ones, whatever the schedule."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.exec import session_table
from tests.engines import examples
from tests.jobs.streams import Course, cut, ran
from tests.oracle import streams
from tests.oracle.streams import Batch, End
from tests.same import assert_same

GAPS = [1, 4, 15]
MADE: dict[str, Any] = {"small": {"n": si.count(), "s": col("v").sum(), "m": col("v").max(), "d": col("v").var(),
                                  "f": (col("v") / 2).mean(), "c": si.corr(col("v"), col("t")), "e": col("v").first(),
                                  "a": col("v").arg_max(col("t")), "x": col("o").sum(), "y": col("o").count()},
                        "large": {"n": si.count(), "all": col("v").collect(), "u": col("v").n_unique(),
                                  "word": col("w").min()}}  # fmt: skip


def build(flow: Flow, delay: int, gap: int, made: str, kind: str) -> Flow:
    """`computed`: the time is known only after the flow's ops."""
    if kind == "computed":
        flow = flow.with_columns(u=col("t") + 1).with_watermark("u", delay)
    else:
        flow = flow.with_watermark("t", delay)
    keys = [] if kind == "no keys" else ["k"]
    return flow.group_by(*keys, si.session("u" if kind == "computed" else "t", gap=gap)).agg(**MADE[made])


@pytest.mark.parametrize("made", MADE)
@examples(25)
@given(st.data())
def test_rows_that_are_behind(made: str, data: st.DataObject) -> None:
    """Times jump back and forth by more than the delay, so that rows bridge, extend and miss sessions."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    count, far = data.draw(st.integers(0, 120)), data.draw(st.sampled_from([0, 5, 40]))
    delay, gap = data.draw(st.sampled_from([0, 3, 25])), data.draw(st.sampled_from(GAPS))
    latest = np.cumsum(rng.integers(0, 4, count))
    times = pa.array(latest + rng.integers(-far, far + 1, count), pa.int64(), mask=rng.random(count) < 0.05)
    keys, some = (pa.array(rng.integers(0, high, count), mask=rng.random(count) < 0.1) for high in (3, 9))
    of_text = data.draw(st.sampled_from([None, None, pa.string(), pa.dictionary(pa.int32(), pa.string())]))
    keys = keys if of_text is None else keys.cast(pa.string()).cast(of_text)
    table = pa.table({"k": keys, "t": times, "v": rng.integers(0, 9, count), "o": some,
                      "w": pa.array(rng.integers(0, 99, count)).cast(pa.string())})
    course = Course([data.draw(st.integers(1, 9)), data.draw(st.integers(1, 30))], workers=data.draw(st.integers(1, 3)),
                    checkpoint=data.draw(st.booleans()), memory=data.draw(st.sampled_from([None, None, "1MB"])),
                    stops=data.draw(st.lists(st.integers(0, 8), max_size=2)))
    kind = data.draw(st.sampled_from(["plain", "plain", "no keys", "computed"]))
    many = data.draw(st.sampled_from([(1 << 17, 1 << 14), (2, 0), (4, 2)]))
    idle = data.draw(st.sampled_from([0, 1 << 16]))
    note(f"{course} {delay} {gap} {kind} {many} {idle}")
    late = si.to_memory()
    course.options["late"] = late
    flow = build(si.flow(table.schema), delay, gap, made, kind)
    trace = streams.run(flow, [*map(Batch, cut(table, course.sizes)), End()])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(session_table, "MANY_RECORDS", many[0])  # rows are partitioned by key group, and not any more
        patched.setattr(session_table, "FEW_RECORDS", many[1])
        patched.setattr(session_table, "MIN_RECORDS", idle)
        got, job = ran(lambda source: build(source, delay, gap, made, kind), table, course, Path(folder))
    assert_same(got, trace.table(), ordered=False, tolerance=1e-9)
    if not course.checkpoint:  # a sink in memory has what came since the last start
        assert job.metrics()["late_rows"] == len(trace.late)
        assert sorted(late.table()["v"].to_pylist()) == sorted(row["v"] for row in trace.late)


def test_a_row_exactly_a_gap_later_joins_and_final_is_final() -> None:
    rows = [[(0, 1)], [(30, 2)], [(61, 4)], [(10, 8)], [(200, 16)], [(62, 32), (45, 64)]]
    table = pa.table({"t": [t for batch in rows for t, _ in batch], "v": [v for batch in rows for _, v in batch]})
    batches = [pa.record_batch({"t": [t for t, _ in batch], "v": [v for _, v in batch]}) for batch in rows]
    flow = si.flow(table.schema).with_watermark("t", 0).group_by(si.session("t", gap=30)).agg(s=col("v").sum())
    trace = streams.run(flow, [*map(Batch, batches), End()])
    # 61 makes [0, 60) final: 10 is late. 200 makes [61, 91) final: 62 and 45 are late together.
    assert [(row["window_start"], row["s"]) for step in trace.outputs for row in step] == [(0, 3), (61, 4), (200, 16)]
    assert [row["v"] for row in trace.late] == [8, 32, 64]
    got, job = ran(lambda source: source.with_watermark("t", 0).group_by(si.session("t", gap=30)).agg(
        s=col("v").sum()), table.slice(0, 5), Course([1]), Path())
    assert sorted(got["s"].to_pylist()) == [3, 4, 16]
    assert job.metrics()["late_rows"] == 1


@pytest.mark.parametrize(("agg", "why"), [(col("w").first(), "first depends on the order of the source"),
                                          (col("w").min(), "min of text"), (col("w").n_unique(), "needs all rows")])
def test_changes_of_some_aggregates_are_refused(agg: si.Column, why: str) -> None:
    flow = si.from_arrow({"t": [1], "w": ["a"]}).with_watermark("t", 0).group_by(si.session("t", gap=3)).agg(n=agg)
    with pytest.raises(si.BadArgument, match=why):
        flow.start(sink=si.to_memory(), emit="changes")
