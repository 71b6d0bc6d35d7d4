"""The Yahoo streaming benchmark: filter, ad to campaign, 10 s windows, count. Integers, coded and plain strings."""

from __future__ import annotations

import ctypes

import pyarrow as pa
import pytest

import scalein as si
from bench import data, yardsticks
from bench.race import Race, assert_same, duck
from scalein import col
from scalein.api.flow import Flow


def views(events: pa.Table, campaigns: pa.Table, view: int | str) -> Flow:
    return (
        si.from_arrow(events)
        .filter(col("event_type") == view)
        .join(campaigns, on="ad_id")
        .group_by("campaign_id", si.tumbling("event_time", 10_000))
        .agg(n=si.count())
    )


def views_sql(view: str) -> str:
    return f"""select campaign_id, event_time // 10000 * 10000 as window_start, count(*) n
               from events join campaigns using (ad_id) where event_type = {view} group by all"""


@pytest.mark.parametrize("workers", [1, 2])
def bench_yahoo_integers(race: Race, c: ctypes.CDLL, rows: int, workers: int) -> None:
    """W1; bound: reading 13 bytes and one increment a row."""
    events, campaigns = data.ad_events(rows), data.campaigns()
    flow, by_hand = views(events, campaigns, 0), yardsticks.yahoo(c, events, campaigns, workers)
    in_duckdb = duck(views_sql("0"), workers, events=events, campaigns=campaigns)
    assert_same(flow.collect(workers=workers), by_hand()(), by=("campaign_id", "window_start"))
    race(lambda: flow.collect(workers=workers), c=by_hand, duckdb=in_duckdb,
         goals={"c": 0.8, "duckdb": 5} if workers == 1 else None,
         row_count=rows, size_bytes=13 * rows, bound="memory bandwidth, 13 bytes a row")


@pytest.mark.parametrize("form", ["dictionary", "plain"])
def bench_yahoo_strings(race: Race, rows: int, workers: int, form: str) -> None:
    """Event types and ids are strings; bound: comparing and hashing them, if they are not coded."""
    events, campaigns = (data.with_strings(table, as_dictionary=form == "dictionary")
                         for table in (data.ad_events(rows), data.campaigns()))
    events = events.select(["event_time", "ad_id", "event_type"])
    flow = views(events, campaigns, "view")
    in_duckdb = duck(views_sql("'view'"), workers, events=events, campaigns=campaigns)
    assert_same(flow.collect(workers=workers), in_duckdb(), by=("campaign_id", "window_start"))
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb, rounds=5, goals={"duckdb": 3},
         row_count=rows, size_bytes=events.nbytes, bound="hashing of strings")
