"""What a job tells of itself: figures of its stages, for Prometheus, and in a bar."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.exec import pipeline
from scalein.exec.metrics_log import log_lines
from scalein.exec.ring_preaggregate import RingPreAggregation
from scalein.exec.window_aggregate import SlidingAggregate
from scalein.jobs.monitor import show_bar
from scalein.testing import Stream, assert_same, until
from tests.jobs.streams import rows_in

BATCHES = [pa.record_batch({"t": pa.array([n, n + 1], pa.timestamp("s")), "k": [n % 3, 1]}) for n in range(0, 40, 2)]


def stages(job: Any) -> list[tuple[object, ...]]:
    found = job.metrics()["stages"]
    assert all(stage["busy_s"] >= 0 for stage in found)
    return [(stage["stage"], stage["rows_in"], stage["rows_out"]) for stage in found]


def test_each_stage_counts_its_rows() -> None:
    flow = si.from_source(Stream({"all": BATCHES})).with_watermark("t", "1s").filter(col("k") == 1)
    flow = flow.group_by(si.tumbling("t", "10s")).agg(n=si.count()).sort("n").limit(3)
    job = flow.start(sink=si.to_memory())
    job.wait()
    assert stages(job) == [("aggregate", 40, 4), ("sort", 4, 4), ("limit", 4, 3)]


@pytest.mark.parametrize("is_grouped", [True, False])
def test_each_worker_of_a_stage_counts(monkeypatch: pytest.MonkeyPatch, is_grouped: bool) -> None:
    monkeypatch.setattr(pipeline, "PIPELINE_MORSEL_ROWS", 1 << 14)
    flow = si.from_arrow(pa.table({"k": list(range(1 << 17))})).filter(col("k") * 3 % 7 != 1)
    flow = flow.group_by(col("k") % 5).agg(n=si.count()) if is_grouped else flow.select("k", j=col("k") + 1)
    job = flow.start(sink=si.to_memory(), workers=2)
    job.wait()
    stage, *_ = job.metrics()["stages"]  # type: ignore[misc]
    found = stage["workers"]
    assert len(found) <= 2
    assert sum(work["rows"] for work in found) == 1 << 17
    assert sum(work["bytes"] for work in found) == 8 << 17
    assert all(0 <= work[name] <= stage["busy_s"] + 0.002 for work in found for name in ("useful_s", "wait_s"))


def test_figures_for_prometheus() -> None:
    pytest.importorskip("prometheus_client")
    job = si.from_source(Stream({"all": BATCHES}, ends=False)).group_by("k").agg(n=si.count()).start(
        sink=si.to_memory(), emit="changes")  # fmt: skip
    until(lambda: job.latency_buckets()[0][-1][1] == 40, job)  # the last figure that a round leaves
    text = urllib.request.urlopen(f"http://localhost:{job.serve_metrics()}/metrics").read().decode()
    job.stop()
    assert 'scalein_stage_rows_in_total{job="job",stage="0 aggregate"} 40.0' in text
    assert 'scalein_worker_rows_total{job="job",stage="0 aggregate",worker="0"}' in text
    assert 'scalein_busy_seconds_total{job="job"}' in text
    counts = [float(line.rpartition(" ")[2]) for line in text.splitlines()
              if line.startswith("scalein_latency_seconds_bucket{")]
    assert len(counts) > 10
    assert counts == sorted(counts)
    assert counts[-1] == 40.0
    assert 'le="+Inf"' in text
    assert 'scalein_latency_seconds_sum{job="job"}' in text
    assert not re.search(r"^scalein_\w+_s(_total)?{", text, re.MULTILINE)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tqdm.auto", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)
    job = si.from_source(Stream({"all": BATCHES})).start(sink=si.to_memory())
    job.wait()
    for call in (job.serve_metrics, lambda: job.wait(progress=True)):
        with pytest.raises(si.ScaleinError, match=r"pip install 'scalein\[jobs\]'"):
            call()


def test_the_bar_says_how_far_time_is_and_how_large_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm_auto = pytest.importorskip("tqdm.auto")
    monkeypatch.setattr(tqdm_auto.tqdm, "monitor_interval", 0)
    told: dict[str, Any] = {}
    monkeypatch.setattr(tqdm_auto.tqdm, "set_postfix", lambda self, **given: told.update(given))
    flow = si.from_source(Stream({"all": BATCHES}, ends=False)).with_watermark("t", "1s")
    job = flow.group_by(si.tumbling("t", "10s")).agg(n=si.count()).start(sink=si.to_memory())
    until(lambda: rows_in(job) == 40, job)
    until(lambda: job.metrics()["watermark"] == 38, job)
    show_bar(job, 0.05)
    job.stop()
    assert (told["watermark"], told["state"]) == ("1970-01-01 00:00:38", "0.0 MB")


@pytest.mark.parametrize("slides", [False, True])
def test_a_change_of_workers_moves_no_state(monkeypatch: pytest.MonkeyPatch, slides: bool) -> None:
    """Tables of a ring stay as they are, also when others take the rows: all that leaves them is windows."""
    divided: list[bool] = []
    finished = SlidingAggregate._finished

    def looked_at(self: SlidingAggregate, after: int, end: int) -> list[pa.RecordBatch]:
        divided.append(self._ring is not None and self._ring.ring.has_split_keys)
        return finished(self, after, end)

    monkeypatch.setattr(RingPreAggregation, "drain_partials", None)
    monkeypatch.setattr(SlidingAggregate, "_finished", looked_at)
    stream = Stream({"all": BATCHES}, allowed={"all": 10}, ends=False)
    window = si.sliding("t", "4s", every="2s") if slides else si.tumbling("t", "4s")
    aggs = {"n": si.count(), "last": col("t").max()}
    flow = si.from_source(stream).with_watermark("t", "1s").group_by("k", window).agg(**aggs)
    out = si.to_memory()
    job = flow.start(sink=out, workers=1)
    for number, workers in enumerate((2, 3, 1)):
        until(lambda number=number: rows_in(job) == 20 + 6 * number, job)
        job.scale(workers)
        stream.allow("all", 13 + 3 * number)
    until(lambda: rows_in(job) == 38, job)
    stream.allow("all", 20)
    until(lambda: rows_in(job) == 40, job)
    job.stop(drain=True)
    rescales: list[dict[str, float]] = job.metrics()["rescales"]  # type: ignore[assignment]
    assert [each["state_bytes_moved"] for each in rescales] == [0, 0, 0]
    assert any(divided) == slides
    want = si.from_batches(BATCHES).with_watermark("t", "1s").group_by("k", window).agg(**aggs).collect()
    assert_same(out.table(), want)


def test_a_resumed_job_counts_the_rows_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters go on over all runs; progress, rates and diagnoses are those of this one."""
    source = Stream({"all": BATCHES}, ends=False)
    flow = si.from_source(source).select("k")
    first = flow.start(sink=si.to_memory(), checkpoint=tmp_path / "c")
    until(lambda: rows_in(first) == 40, first)
    first.stop()
    job = flow.start(sink=si.to_memory(), checkpoint=tmp_path / "c")
    found = job.metrics()
    assert (found["rows_in"], found["rows_out"], found["run_rows_in"], found["run_rows_out"]) == (40, 40, 0, 0)
    assert job.why_no_output() == "No row has arrived yet from Stream."
    std = pytest.importorskip("tqdm.std")
    monkeypatch.setattr(std.tqdm, "monitor_interval", 0)
    shown: list[int] = []
    update = std.tqdm.update
    monkeypatch.setattr(std.tqdm, "update", lambda bar, n=1: (shown.append(n), update(bar, n))[1])
    job.log_metrics(tmp_path / "log")
    assert job.wait(0.3, progress=True) is False
    assert sum(shown) == 0
    source.push("all", BATCHES[0])
    until(lambda: rows_in(job) == 42, job)
    assert job.wait(0.3, progress=True) is False
    assert sum(shown) == 2
    assert job.why_no_output() == "There is output: 2 rows so far."
    job.stop()
    until(lambda: (tmp_path / "log").read_text().endswith("\n"))  # the last line is that of the end
    rates = [json.loads(line)["rows_per_s"] for line in (tmp_path / "log").read_text().splitlines()]
    assert max(rates) < 40


def test_the_last_line_of_a_log_has_the_last_figures(tmp_path: Path) -> None:
    class Ending:
        """A job that ends while its figures are read for a line."""

        status, reads = "running", 0

        def await_end(self, timeout: float) -> bool:
            return self.status != "running"

        def metrics(self) -> dict[str, object]:
            rows = 3 if self.status == "finished" else 0
            self.reads += 1
            self.status = "finished" if self.reads > 1 else "running"
            return {"rows_in": rows}

    log_lines(Ending(), tmp_path / "log").join(30)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["status"], line["rows_in"]) for line in lines] == [("running", 0), ("finished", 3)]


def test_lag_can_be_read() -> None:
    batch = pa.record_batch({"t": pa.array([0], pa.timestamp("s"))})
    flow = si.from_source(Stream({"all": [batch]}, ends=False)).with_watermark("t", "1s").group_by(
        si.tumbling("t", "10s")).agg(n=si.count())  # fmt: skip
    job = flow.start(sink=si.to_memory())
    until(lambda: job.metrics()["watermark"] is not None, job)
    found = job.metrics()
    job.stop()
    assert re.fullmatch(r"\d\d\.\d years", str(found["lag"]))  # since 1970
    assert isinstance(found["lag_s"], float)


def test_wait_says_whether_the_job_has_ended() -> None:
    source = Stream({"all": BATCHES}, ends=False)
    job = si.from_source(source).start(sink=si.to_memory())
    assert job.wait(timeout=0.01) is False
    assert job.await_termination(0.01) is False
    source.end()
    assert job.wait(timeout=30) is True
    assert job.wait() is True
    assert job.await_termination() is True


@pytest.mark.parametrize(("then", "checkpoint", "says"), [
    ("", "", "what it had not written is lost"), ("", ", checkpoint='c'", "it continues from its last checkpoint"),
    ("job.stop()", "", ""), ("job.wait(30)", ", max_rows_per_second=None", ""),
])  # fmt: skip
def test_a_program_that_ends_before_its_job_is_warned(then: str, checkpoint: str, says: str, tmp_path: Path) -> None:
    endless = "rows=10_000" if "wait" in then else ""
    (tmp_path / "report.py").write_text(f"""
import numpy as np, pyarrow as pa, scalein as si
make = lambda start, count: pa.record_batch({{"x": np.arange(start, start + count)}})
numbers = si.generate(make, {{"x": int}}, {endless})
job = numbers.start(sink=si.to_callback(lambda batch: None){checkpoint})
{then}
""")
    ended = subprocess.run([sys.executable, "report.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    if says:
        assert "report.py:5: RuntimeWarning: the program ends, but the job" in ended.stderr
        assert says in ended.stderr
        assert "job.wait()" in ended.stderr
    else:
        assert ended.stderr == ""


def test_the_advice_on_sorting_an_endless_flow_works() -> None:
    source = si.from_source(Stream({"all": BATCHES})).with_watermark("t", "1s")
    endless = si.from_source(Stream({"all": BATCHES}, ends=False)).with_watermark("t", "1s")
    for flow in (endless.sort("k"), endless.group_by(si.tumbling("t", "10s")).agg(n=si.count()).sort("n")):
        with pytest.raises(si.BadArgument, match="an endless flow cannot be sorted") as caught:
            flow.start(sink=si.to_memory())
        advice = re.search(r"group_by\(.*\)\)", str(caught.value.hint))
        assert advice is not None
    seen = si.to_memory()
    eval(f"renamed.{advice[0]}", {"renamed": source.rename({"k": "x"}), "si": si, "col": col}).start(sink=seen).wait()
    assert seen.table().num_rows == 1
