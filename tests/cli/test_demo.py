"""The demo: right counts, a table one can read, a rate."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import scalein as si
from scalein.cli.demo import count_views, make_campaigns, make_events, summarise
from scalein.cli.main import main


@pytest.mark.parametrize("engine", ["interp", "llvm"])
def test_counts_are_right(engine: str) -> None:
    events, campaigns = make_events(5_000), make_campaigns()
    campaign_of = dict(zip(campaigns["ad_id"].to_pylist(), campaigns["campaign_id"].to_pylist(), strict=True))
    want = Counter(
        (campaign_of[row["ad_id"]], int(row["event_time"].timestamp()) // 10 * 10)
        for row in events.to_pylist() if row["event_type"] == "view"
    )
    got = count_views(si.from_arrow(events), campaigns).collect(engine=engine)
    assert {(row["campaign_id"], int(row["window_start"].timestamp())): row["views"] for row in got.to_pylist()} == want


@pytest.mark.parametrize("engine", ["interp", "llvm"])
def test_summary_adds_up(engine: str) -> None:
    views = count_views(si.from_arrow(make_events(5_000)), make_campaigns()).collect(engine="interp")
    summary = summarise(views).collect(engine=engine).to_pylist()
    assert sum(row["views"] for row in summary) == sum(views["views"].to_pylist())
    for row in summary:
        of_window = [v for v in views.to_pylist() if v["window_start"] == row["window"]]
        assert row["most"] == max(v["views"] for v in of_window)
        assert (row["busiest"], row["most"]) in [(v["campaign_id"], v["views"]) for v in of_window]


def test_shows_a_table_and_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--rows", "20000", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("20,000 ad events over 100 s")
    table = [line for line in lines if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)]
    assert len(table) == 10
    assert len({len(line) for line in table}) == 1
    assert re.search(r"= [\d,.]+ million rows/s \([\d,.]+ GB/s\) with 1 worker$", lines[-1])
