"""until="now": a job takes what is there, leaves its windows open, and the next start goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.jobs import supervisor
from scalein.testing import Stream, until


def write(folder: Path, number: int, times: list[int]) -> None:
    folder.mkdir(exist_ok=True)
    table = pa.table({"t": pa.array(times, pa.timestamp("s")), "v": np.arange(len(times))})
    pq.write_table(table, folder / f"{number:03}.parquet")


def windows(folder: Path, *, delay: str = "0s") -> Any:
    follow = si.read_parquet(folder, follow=True).with_watermark("t", delay)
    return follow.group_by(si.tumbling("t", "10s")).agg(n=si.count())


def counts(out: Any) -> dict[int, int]:
    return {row["window_start"].second: row["n"] for row in out.table().to_pylist()}


def test_windows_stay_open_for_the_next_run(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", si.to_memory()
    write(folder, 0, [1, 2, 11, 12])
    job = windows(folder).start(sink=out, checkpoint=tmp_path / "c", until="now")
    assert job.wait(60)
    assert job.status == "finished"
    assert counts(out) == {0: 2}
    write(folder, 1, [13, 25])
    windows(folder).start(sink=out, checkpoint=tmp_path / "c", until="now").wait(60)
    assert counts(out) == {0: 2, 10: 3}
    windows(folder).start(sink=out, checkpoint=tmp_path / "c", until="now").wait(60)
    assert counts(out) == {0: 2, 10: 3}, "nothing came"


def test_a_folder_that_is_done_first_holds_the_watermark_back(tmp_path: Path) -> None:
    """Its rows of the next run are as old as these; one that has ended for good would hold nothing back."""
    slow, fast, out = tmp_path / "slow", tmp_path / "fast", si.to_memory()
    write(slow, 0, [1])
    for number in range(20):
        write(fast, number, [10 * number])

    def start() -> None:
        both = si.read_parquet(slow, follow=True).union(si.read_parquet(fast, follow=True)).with_watermark("t", "0s")
        flow = both.group_by(si.tumbling("t", "10s")).agg(n=si.count())
        job = flow.start(sink=out, checkpoint=tmp_path / "c", until="now", max_rows_per_second=200)
        job.wait(60)
        assert job.metrics()["late_rows"] == 0

    start()
    write(slow, 1, [2])
    start()
    assert out.table().num_rows == 0


def test_a_source_that_ends_is_finished(tmp_path: Path) -> None:
    out = si.to_memory()
    table = pa.table({"t": pa.array([1, 2, 11], pa.timestamp("s"))})
    flow = si.from_arrow(table).with_watermark("t", "0s").group_by(si.tumbling("t", "10s")).agg(n=si.count())
    flow.start(sink=out, until="now").wait()
    assert counts(out) == {0: 2, 10: 1}


def test_a_source_that_does_not_know_now_is_refused() -> None:
    endless = si.from_source(Stream({"all": [pa.record_batch({"x": [1]})]}, ends=False))
    with pytest.raises(si.BadArgument, match=r"until_now\(\)"):
        endless.start(sink=si.to_memory(), until="now")
    with pytest.raises(si.BadArgument, match="'now'"):
        endless.start(sink=si.to_memory(), until="tomorrow")


# --- restarts


class Flaky:
    """A function that fails at some calls."""

    def __init__(self, *fails: int, error: Exception | None = None) -> None:
        self.calls, self.rows, self._fails = 0, list[int](), fails
        self._error = error or OSError("the network is down")

    def __call__(self, batch: pa.RecordBatch) -> None:
        self.calls += 1
        if self.calls in self._fails:
            raise self._error
        self.rows += batch.column(0).to_pylist()


def test_restarts_continue_from_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.001)
    sink = Flaky(3, 5, 6)
    batches = [pa.record_batch({"x": [k]}) for k in range(10)]
    job = si.from_source(Stream({"all": batches})).start(sink=si.to_callback(sink), checkpoint=tmp_path / "c",
                                                         every="1ms", restarts=5)
    assert job.wait(60)
    assert set(sink.rows) == set(range(10))
    assert job.metrics()["restarts"] == 3
    assert job.status == "finished"
    assert [record.name for record in caplog.records] == ["scalein.jobs.supervisor"] * 3
    assert "attempt 1 of 5" in caplog.text


def test_a_failure_before_a_restart_does_not_end_the_wait() -> None:
    job = si.from_arrow(pa.table({"x": [1]})).start(sink=si.to_callback(Flaky(1)), restarts=1)
    until(lambda: job.exception is not None or job.metrics()["restarts"] == 1)
    job.wait(0)  # it raises nothing
    assert job.wait(60)
    assert job.status == "finished"


def test_files_have_each_row_once_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.001)
    fails = iter([False] * 3 + [True] + [False] * 4 + [True] + [False] * 100)

    def generate(start: int, rows: int) -> pa.RecordBatch:
        if next(fails):
            raise TimeoutError("the disk is slow")
        return pa.record_batch({"x": np.arange(start, start + rows)})

    flow = si.generate(generate, {"x": pa.int64()}, rows=1000, batch_rows=100)
    flow.start(sink=si.to_parquet(tmp_path / "out"), checkpoint=tmp_path / "c", restarts=4).wait(60)
    assert sorted(pq.read_table(tmp_path / "out")["x"].to_pylist()) == list(range(1000))


def test_what_will_fail_again_is_not_repeated() -> None:
    table = pa.table({"x": [1, 0]})
    job = si.from_arrow(table).select(y=1 // col("x")).start(sink=si.to_memory(), restarts=3)
    with pytest.raises(si.ComputeError, match="zero"):
        job.wait(60)
    assert job.metrics()["restarts"] == 0


def test_attempts_are_limited_and_stop_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.001)
    table = pa.table({"x": [1]})
    sink = Flaky(*range(100))
    job = si.from_arrow(table).start(sink=si.to_callback(sink), restarts=2)
    with pytest.raises(si.WriteFailed, match="network is down"):
        job.wait(60)
    assert sink.calls == 3
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 30.0)  # a stop between two attempts raises the error of the last
    sink = Flaky(1)
    job = si.from_arrow(table).start(sink=si.to_callback(sink), restarts=1)
    until(lambda: sink.calls == 1)
    with pytest.raises(si.WriteFailed):
        job.stop()


@pytest.mark.parametrize("wrong", [-1, True, "3"])
def test_restarts_is_a_number(wrong: Any) -> None:
    with pytest.raises(si.BadArgument, match="restarts"):
        si.from_arrow(pa.table({"x": [1]})).start(sink=si.to_memory(), restarts=wrong)
