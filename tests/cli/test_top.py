"""`scalein top`: a job's log as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein.cli.main import main
from scalein.testing import until


def test_shows_the_log_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "job.jsonl"
    table = pa.table({"k": [1, 2, 1], "t": [1, 2, 30]})
    flow = si.from_arrow(table).with_watermark("t", 0).group_by("k", si.tumbling("t", 10)).agg(n=si.count())
    job = flow.start(sink=si.to_memory())
    job.log_metrics(log)
    job.wait()
    until(lambda: log.read_text().endswith("\n") and '"finished"' in log.read_text())  # written after the end
    assert main(["top", str(log)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "finished"
    assert shown[1].split()[:3] == ["rows", "in", "3"]
    assert shown[2].split() == ["rows", "out", "3"]


def test_shows_stages_and_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"time": time, "status": "running", "rows_per_s": 1000, "rows_in": 1000 * time, "busy_s": 0.6 * time,
              "workers": 2, "state_bytes": 2_000_000, "watermark_time": "12:00", "lag": "3.0 s", "late_rows": 7,
              "latency_s": {"p50": 0.001, "p99": 0.004},
              "stages": [{"stage": "aggregate", "rows_in": 900 * time, "busy_s": 0.5 * time}]} for time in (1, 2)]
    decision = {"before": 1, "workers": 2, "rate": 1500.0, "reason": "the load may reach 1,500 rows/s",
                "predicted": {"utilization": 0.5}, "realized": {"rate": 1000.0, "utilization": 0.6}}
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"status": "ru')
    (tmp_path / "decisions").write_text(json.dumps(decision) + "\n")
    assert main(["top", str(tmp_path / "log"), "--decisions", str(tmp_path / "decisions")]) == 0
    assert capsys.readouterr().out == """running
  rows in         2,000  1,000/s ██
  rows out        0
  busy            60% of the last 1.0 s
  latency         p50 1.0 ms, p99 4.0 ms
  watermark       12:00, 3.0 s behind the clock
  workers         2
  state           2.0 MB
  late rows       7

  aggregate             900 rows/s   50% busy

  scaling: predicted -> realized
  1 -> 2 workers  1,000 rows/s of 1,500, 50% -> 60% busy: the load may reach 1,500 rows/s
"""


def test_shows_what_was_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a job, and of a stream on Spark, whose log has batches."""
    prediction = {"max_rate": 4000.0, "intervals": {"max_rate": [3000.0, 5000.0]}, "rate": 1500.0, "p99_s": 0.003,
                  "state_bytes": 3_000_000, "on_disk_bytes": 1_000_000, "batch_s": 0.8}
    of_job = {"latency_s": {"p50": 0.001, "p99": 0.004}, "state_bytes": 2_500_000}
    for about, wanted in ((of_job, ["p99   3.0 ms at 1,500 rows/s -> 4.0 ms", "state 2.0 MB -> 2.5 MB"]),
                          ({"batches": 7, "batch_s": 0.9, "state_bytes": 3_500_000},
                           ["batches         7, the last in 900.0 ms", "batch 800.0 ms at 1,500 rows/s -> 900.0 ms",
                            "state 3.0 MB -> 3.5 MB"])):
        lines = [{"time": time, "status": "running", "rows_per_s": 1000, "busy_s": 0.3 * time, **about}
                 for time in (1, 2)]
        (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for found in (prediction, {"feasible": True, "prediction": prediction}):
            (tmp_path / "prediction").write_text(json.dumps(found))
            assert main(["top", str(tmp_path / "log"), "--prediction", str(tmp_path / "prediction")]) == 0
            shown = capsys.readouterr().out
            for text in ("of at most 4,000 rows/s (3,000 to 5,000)", "busy  25% -> 30%", *wanted):
                assert text in shown
    for content in ("x", "[]", "{}"):
        (tmp_path / "prediction").write_text(content)
        assert main(["top", str(tmp_path / "log"), "--prediction", str(tmp_path / "prediction")]) == 1
        assert "prediction" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "text"), [(None, "cannot read"), ("[1]\n", "a JSON object in each line"),
                                               ("x\n", "a JSON object in each line")])  # fmt: skip
def test_what_is_no_log(content: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "log").write_text(content)
    assert main(["top", str(tmp_path / "log")]) == 1
    assert text in capsys.readouterr().err
