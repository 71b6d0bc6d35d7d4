"""The demo: right counts, a readable table, a rate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

import scalein as si
from scalein.cli.demo import (
    FILES,
    SCALED_PARTITIONS,
    count_views,
    make_campaigns,
    make_events,
    missing_for_spark,
    progress_lines,
    summarise,
)
from scalein.cli.main import main
from tests import oracle
from tests.engines import COLLECTS, Collect


@pytest.mark.parametrize("collect", COLLECTS)
def test_counts_are_right(collect: Collect) -> None:
    events, campaigns = make_events(5_000), make_campaigns()
    campaign_of = dict(zip(campaigns["ad_id"].to_pylist(), campaigns["campaign_id"].to_pylist(), strict=True))
    want = Counter(
        (campaign_of[row["ad_id"]], int(row["event_time"].timestamp()) // 10 * 10)
        for row in events.to_pylist() if row["event_type"] == "view"
    )
    got = collect(count_views(si.from_arrow(events), campaigns))
    assert {(row["campaign_id"], int(row["window_start"].timestamp())): row["views"] for row in got.to_pylist()} == want


@pytest.mark.parametrize("collect", COLLECTS)
def test_summary_adds_up(collect: Collect) -> None:
    views = oracle.collect(count_views(si.from_arrow(make_events(5_000)), make_campaigns()))
    summary = collect(summarise(views)).to_pylist()
    assert sum(row["views"] for row in summary) == sum(views["views"].to_pylist())
    for row in summary:
        of_window = [v for v in views.to_pylist() if v["window_start"] == row["window"]]
        assert row["most"] == max(v["views"] for v in of_window)
        assert (row["busiest"], row["most"]) in [(v["campaign_id"], v["views"]) for v in of_window]


def test_prints_a_table_and_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--rows", "20000", "--workers", "1", "--no-spark"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("20,000 ad events over 100 s")
    table = [line for line in lines if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)]
    assert len(table) == 10
    assert len({len(line) for line in table}) == 1
    assert re.search(r"= [\d,.]+ million rows/s \([\d,.]+ GB/s\) with 1 worker$", lines[-1])


def test_no_batch_is_missed_between_two_looks() -> None:
    """As on a busy machine, whose first look comes after the stream's end."""
    class Ended:
        scaled = 0
        recent_progress: ClassVar = [
            {"batch_id": number, "rows_in": 10, "rows_out": 1, "duration_s": 0.1, "partitions": 2, "state_bytes": 0}
            for number in range(FILES)]
        last_progress = recent_progress[-1]

        def await_termination(self, timeout: float) -> bool:
            return True

        def scale(self, partitions: int) -> None:
            self.scaled = partitions

    query = Ended()
    lines = list(progress_lines(query))
    assert [int(found[1]) for line in lines if (found := re.match(r"  batch +(\d+):", line))] == [*range(FILES)]
    assert query.scaled == SCALED_PARTITIONS


# Spark's daemon reports a Python worker whose JVM has ended while the worker waited for its next task.
ENDED_WORKER = re.compile(r"Traceback .*\n(?:  File .*/pyspark/daemon\.py.*\n)+BrokenPipeError.*\n")


def test_the_same_flow_inside_spark_gives_the_same_rows() -> None:
    """As a user runs it: no log line of Spark gets into the output."""
    if missing := missing_for_spark():
        pytest.skip(missing)
    done = subprocess.run([sys.executable, "-m", "scalein", "demo", "--rows", "40000"], capture_output=True, text=True,
                          timeout=300, env={**os.environ, "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"})
    assert (done.returncode, ENDED_WORKER.sub("", done.stderr)) == (0, "")
    here, inside = done.stdout.split("The same flow as a stream: ")
    batches = re.findall(r"^  batch +(\d+): +([\d,]+) events in [\d.]+ s, (\d+) partitions", inside, re.MULTILINE)
    assert [int(number) for number, _, _ in batches] == [*range(FILES)]
    assert [count for _, count, _ in batches] == ["4,000"] * FILES
    assert (batches[0][2], batches[-1][2]) == ("2", "4")
    of_window = re.compile(r"^\d{4}-\d\d-\d\d \d\d:.*$", re.MULTILINE)
    assert of_window.findall(inside) == of_window.findall(here) != []
    assert "\n900 counts of closed windows in files, 100 of open ones in the state: row for row the 1,000 of " in inside
    assert re.search(r"^scalein inside Spark: [\d.]+ s, .*; then [\d.]+ million rows/s$", inside, re.MULTILINE)
    assert re.search(r"^Spark's own streaming, with RocksDB: .* rows/s, [\d.]+ times as long$", inside, re.MULTILINE)


def test_without_java_the_first_half_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                          tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert main(["demo", "--rows", "20000"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("The second half runs the same flow as a stream inside Spark. "
                           "Spark needs Java 17 or newer, and there is none: install one (")


def test_without_pyspark_the_first_half_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['pyspark'] = None\n", encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "scalein", "demo", "--rows", "20000"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    assert done.stdout.splitlines()[-1].endswith('it needs pyspark and Java: pip install "scalein[spark]"')
