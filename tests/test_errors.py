"""Every error that a user can meet before anything runs, or because of the data: all in one golden file, to be read.

Each entry shows what the user wrote and what they get. `at` must be this file, whose lines are not worth keeping.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from scalein import col, lit, when
from tests.conftest import Golden

EVENTS = pa.table({
    "event_time": pa.array([datetime(2024, 5, 1)], pa.timestamp("ms")),
    "local_time": pa.array([datetime(2024, 5, 1)], pa.timestamp("ms", "Europe/Berlin")),
    "day": pa.array([date(2024, 5, 1)]),
    "took": pa.array([timedelta(seconds=1)], pa.duration("ms")),
    "ad_id": pa.array([1], pa.int32()),
    "hash": pa.array([1], pa.uint64()),
    "kind": ["view"],
    "price": [9.5],
    "ok": [True],
})  # fmt: skip
ADS = pa.table({"ad_id": pa.array([1], pa.int32()), "campaign": ["a"], "price": [1.0]})
BATCH = pa.record_batch({"x": [1, 2]})
flow = si.from_arrow(EVENTS)
ROWS = si.from_arrow(pa.table({"x": [1, 0, 2**62, 2**62, 2**62], "s": ["1", "one", None, "2", "3"]}))


def failing(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise ValueError("no such currency")


def listed(batch: pa.RecordBatch) -> object:
    return batch.to_pylist()


def unread(*batches: object, fail: bool = False) -> Iterator[object]:
    yield from batches
    if fail:
        raise OSError("disk on fire")


def collect(given: si.Flow, data: object = None) -> pa.Table:
    return given.collect(data, workers=1)


NESTED = si.from_arrow(pa.table({"x": [1], "tags": [["a"]], "at": [{"lat": 1.0, "lon": 2.0}], "nothing": pa.nulls(1)}))

# What the user wrote -> it raises. The text is the key because it heads the entry in the golden file.
CASES: dict[str, list[tuple[str, Callable[[], object]]]] = {
    "names": [
        ('flow.filter(col("pric") > 1)', lambda: flow.filter(col("pric") > 1)),
        ('flow.select("nothing_like_it")', lambda: flow.select("nothing_like_it")),
        ('flow.drop("prize")', lambda: flow.drop("prize")),
        ('flow.rename({"prize": "x"})', lambda: flow.rename({"prize": "x"})),
        ('flow.rename({"price": "kind"})', lambda: flow.rename({"price": "kind"})),
        ('flow.cast({"prize": "int32"})', lambda: flow.cast({"prize": "int32"})),
        ('flow.group_by("campaign")', lambda: flow.group_by("campaign")),
        ('flow.group_by("kind").agg(col("prize").sum())', lambda: flow.group_by("kind").agg(col("prize").sum())),
        ('flow.with_watermark("time", "1s")', lambda: flow.with_watermark("time", "1s")),
        ("flow.select()", lambda: flow.select()),
        ("flow.with_columns()", lambda: flow.with_columns()),
        ("flow.drop()", lambda: flow.drop()),
        ("flow.drop(*all of them)", lambda: flow.drop(*flow.columns)),
        ('flow.select("price", "price")', lambda: flow.select("price", "price")),
        ('flow.select("price", price=col("ad_id"))', lambda: flow.select("price", price=col("ad_id"))),
        ('flow.with_columns(col("price") + 1, col("price") * 2)',
         lambda: flow.with_columns(col("price") + 1, col("price") * 2)),
        ("flow.select(lit(1))", lambda: flow.select(lit(1))),
        ('flow.select(["price", "prize"])', lambda: flow.select(["price", "prize"])),
        ('flow.select(["price", "price"])', lambda: flow.select(["price", "price"])),
        ('flow.select({"price"})', lambda: flow.select({"price"})),  # type: ignore[arg-type]
        ("flow.select(5)", lambda: flow.select(5)),  # type: ignore[arg-type]
        ("col(5)", lambda: col(5)),  # type: ignore[arg-type]
        ('col("x").alias("")', lambda: col("x").alias("")),
        ("two columns x in a table", lambda: si.from_arrow(pa.table([[1], [2]], names=["x", "x"]))),
    ],
    "types": [
        ('flow.filter(col("price") + 1)', lambda: flow.filter(col("price") + 1)),
        ("flow.filter(lambda row: row.price > 1)", lambda: flow.filter(lambda row: row.price > 1)),  # type: ignore[arg-type, attr-defined]
        ("flow.filter(a pyarrow expression)", lambda: flow.filter(pc.field("price") > 1)),  # type: ignore[arg-type]
        ("flow.filter(5)", lambda: flow.filter(5)),  # type: ignore[arg-type]
        ('flow.filter("price > 1")', lambda: flow.filter("price > 1")),
        ('flow.filter("kind")', lambda: flow.filter("kind")),
        ('flow.with_columns(x=col("kind") * 2)', lambda: flow.with_columns(x=col("kind") * 2)),
        ('flow.select(x=col("ok") + 1)', lambda: flow.select(x=col("ok") + 1)),
        ('flow.filter(col("price") == "9.5")', lambda: flow.filter(col("price") == "9.5")),
        ('flow.filter(col("event_time") > "2024-05-01")', lambda: flow.filter(col("event_time") > "2024-05-01")),
        ('flow.filter(col("day") > "2024-05-01")', lambda: flow.filter(col("day") > "2024-05-01")),
        ('flow.filter(col("event_time") > 1714521600)', lambda: flow.filter(col("event_time") > 1714521600)),
        ('flow.filter(col("event_time") > datetime(2024, 5, 1, tzinfo=UTC))',
         lambda: flow.filter(col("event_time") > datetime(2024, 5, 1, tzinfo=UTC))),
        ('flow.filter(col("local_time") > datetime(2024, 5, 1))',
         lambda: flow.filter(col("local_time") > datetime(2024, 5, 1))),
        ('flow.filter(col("event_time") > col("local_time"))',
         lambda: flow.filter(col("event_time") > col("local_time"))),
        ('flow.filter(col("event_time") > col("day"))', lambda: flow.filter(col("event_time") > col("day"))),
        ('flow.select(x=col("hash") + col("ad_id"))', lambda: flow.select(x=col("hash") + col("ad_id"))),
        ('flow.filter(col("hash") > -1)', lambda: flow.filter(col("hash") > -1)),
        ('flow.select(x=-col("hash"))', lambda: flow.select(x=-col("hash"))),
        ('flow.select(x=-col("ok"))', lambda: flow.select(x=-col("ok"))),
        ('flow.select(x=col("event_time") + col("event_time"))',
         lambda: flow.select(x=col("event_time") + col("event_time"))),
        ('flow.select(x=col("event_time") + 5)', lambda: flow.select(x=col("event_time") + 5)),
        ('flow.select(x=col("day") + 1)', lambda: flow.select(x=col("day") + 1)),
        ('flow.select(x=col("event_time") - col("day"))', lambda: flow.select(x=col("event_time") - col("day"))),
        ('flow.select(x=col("kind") + col("ad_id"))', lambda: flow.select(x=col("kind") + col("ad_id"))),
        ('flow.select(x=si.max_horizontal("kind", "ad_id"))',
         lambda: flow.select(x=si.max_horizontal("kind", "ad_id"))),
        ('flow.select(x=col("kind").str.strptime(pa.timestamp("us"), "%H"))',
         lambda: flow.select(x=col("kind").str.strptime(pa.timestamp("us"), "%H"))),
        ('col("kind").str.strptime(pa.timestamp("us"), "%Q")',
         lambda: col("kind").str.strptime(pa.timestamp("us"), "%Q")),
        ('flow.select(x=col("ad_id").dt.total_days())', lambda: flow.select(x=col("ad_id").dt.total_days())),
        ('flow.select(x=col("took") / 2)', lambda: flow.select(x=col("took") / 2)),
        ('flow.filter(1 & col("ad_id") < 5)', lambda: flow.filter(1 & col("ad_id") < 5)),
        ('flow.filter(~col("price"))', lambda: flow.filter(~col("price"))),
        ('flow.select(x=col("kind").sqrt())', lambda: flow.select(x=col("kind").sqrt())),
        ('flow.select(x=abs(col("kind")))', lambda: flow.select(x=abs(col("kind")))),
        ('flow.select(x=col("ad_id").is_nan())', lambda: flow.select(x=col("ad_id").is_nan())),
        ('flow.select(x=col("price").fill_null("none"))', lambda: flow.select(x=col("price").fill_null("none"))),
        ('flow.filter(col("kind").is_in([1, 2]))', lambda: flow.filter(col("kind").is_in([1, 2]))),
        ('flow.filter(col("price").between("a", "b"))', lambda: flow.filter(col("price").between("a", "b"))),
        ('flow.select(x=when(col("price")).then(1))', lambda: flow.select(x=when(col("price")).then(1))),
        ('flow.select(x=when(col("ok")).then(1).otherwise(lit("none")))',
         lambda: flow.select(x=when(col("ok")).then(1).otherwise(lit("none")))),
        ('flow.select(x=when(col("ok")).then(None))', lambda: flow.select(x=when(col("ok")).then(None))),
        ("flow.select(x=None)", lambda: flow.select(x=None)),
        ('flow.select(x=col("ad_id").str.upper())', lambda: flow.select(x=col("ad_id").str.upper())),
        ('flow.select(x=col("kind").dt.year())', lambda: flow.select(x=col("kind").dt.year())),
        ('flow.select(x=col("day").dt.hour())', lambda: flow.select(x=col("day").dt.hour())),
        ('flow.select(x=col("price").dt.truncate("1h"))', lambda: flow.select(x=col("price").dt.truncate("1h"))),
        ('flow.cast({"price": "timestamp[ms]"})', lambda: flow.cast({"price": "timestamp[ms]"})),
        ('flow.cast({"took": "string"})', lambda: flow.cast({"took": "string"})),
        ('flow.cast({"took": "timestamp[ms]"})', lambda: flow.cast({"took": "timestamp[ms]"})),
        ('flow.cast({"event_time": "duration[ms]"})', lambda: flow.cast({"event_time": "duration[ms]"})),
        ('flow.cast({"local_time": "date32"})', lambda: flow.cast({"local_time": "date32"})),
        ('flow.cast({"day": pa.timestamp("ms", "Europe/Berlin")})',
         lambda: flow.cast({"day": pa.timestamp("ms", "Europe/Berlin")})),
        ('flow.cast({"price": "decimal"})', lambda: flow.cast({"price": "decimal"})),
        ('flow.cast({"price": pa.list_(pa.int8())})', lambda: flow.cast({"price": pa.list_(pa.int8())})),
        ('flow.filter(col("took") < timedelta.max)', lambda: flow.filter(col("took") < timedelta.max)),
        ("flow.select(x=-lit(2**64 - 1))", lambda: flow.select(x=-lit(2**64 - 1))),
        ("a datetime out of the range of nanoseconds",
         lambda: flow.select(x=col("event_time").cast("timestamp[ns]") < datetime(9999, 1, 1))),
    ],
    "values and operators": [
        ('if col("price") > 1: ...', lambda: bool(col("price") > 1)),
        ('1 < col("price") < 5', lambda: 1 < col("price") < 5),
        ('(col("price") > 1) and (col("ad_id") < 5)', lambda: (col("price") > 1) and (col("ad_id") < 5)),
        ('"view" in col("kind")', lambda: "view" in col("kind")),
        ('for x in col("price"): ...', lambda: list(col("price"))),
        ('col("price") == None', lambda: col("price") == None),  # noqa: E711
        ('col("kind") == ["view"]', lambda: col("kind") == ["view"]),
        ('col("price") + range(3)', lambda: col("price") + range(3)),
        ('col("ad_id") + 2**64', lambda: col("ad_id") + 2**64),
        ('col("kind") == "\\ud800"', lambda: col("kind") == "\ud800"),
        ('col("kind").is_in("view")', lambda: col("kind").is_in("view")),
        ('col("kind").is_in(5)', lambda: col("kind").is_in(5)),  # type: ignore[arg-type]
        ('col("price").round(1.5)', lambda: col("price").round(1.5)),  # type: ignore[arg-type]
        ('col("kind").str.slice(0, -1)', lambda: col("kind").str.slice(0, -1)),
        ('col("kind").str.slice("a")', lambda: col("kind").str.slice("a")),  # type: ignore[arg-type]
        ('col("kind").str.contains(col("x"))', lambda: col("kind").str.contains(col("x"))),  # type: ignore[arg-type]
        ('col("event_time").dt.epoch("h")', lambda: col("event_time").dt.epoch("h")),
        ('when(col("ok")).then("high")', lambda: when(col("ok")).then("high")),
        ("lit(300, pa.int8())", lambda: lit(300, pa.int8())),
        ("lit(1, int8) with a type that is none", lambda: lit(1, "int7")),
        ("flow.filter()", lambda: flow.filter()),
        ("flow.filter(True)", lambda: flow.filter(True)),  # type: ignore[arg-type]
        ("flow.limit(-1)", lambda: flow.limit(-1)),
        ("flow.limit(2.5)", lambda: flow.limit(2.5)),  # type: ignore[arg-type]
        ('flow.rename("price")', lambda: flow.rename("price")),  # type: ignore[arg-type]
        ('flow.cast("price")', lambda: flow.cast("price")),  # type: ignore[arg-type]
        ("flow.drop(5)", lambda: flow.drop(5)),  # type: ignore[arg-type]
        ('flow.map_batches("upper", schema)', lambda: flow.map_batches("upper", EVENTS.schema)),  # type: ignore[arg-type]
        ("flow.map_batches(f, 5)", lambda: flow.map_batches(lambda batch: batch, 5)),
    ],
    "aggregates and groups": [
        ('flow.filter(col("price").sum() > 1)', lambda: flow.filter(col("price").sum() > 1)),
        ('flow.select(col("price").sum())', lambda: flow.select(col("price").sum())),
        ('flow.group_by(col("price").max())', lambda: flow.group_by(col("price").max())),
        ('col("price").sum().mean()', lambda: col("price").sum().mean()),
        ("flow.group_by().agg()", lambda: flow.group_by().agg()),
        ('flow.group_by("kind").agg(col("price"))', lambda: flow.group_by("kind").agg(col("price"))),
        ('flow.group_by("kind").agg("price")', lambda: flow.group_by("kind").agg("price")),  # type: ignore[arg-type]
        ('flow.group_by("kind").agg(["price"])',
         lambda: flow.group_by("kind").agg(["price"])),  # type: ignore[list-item]
        ('flow.group_by("kind").agg({"price": "sum"})',
         lambda: flow.group_by("kind").agg({"price": "sum"})),  # type: ignore[arg-type]
        ('flow.group_by("kind").agg({"total": col("price").sum()})',
         lambda: flow.group_by("kind").agg({"total": col("price").sum()})),  # type: ignore[arg-type]
        ('flow.group_by("kind").agg(n=1)', lambda: flow.group_by("kind").agg(n=1)),  # type: ignore[arg-type]
        ('flow.group_by("kind").agg(col("price").min(), col("price").max())',
         lambda: flow.group_by("kind").agg(col("price").min(), col("price").max())),
        ('flow.group_by("price").agg(col("price").sum())',
         lambda: flow.group_by("price").agg(col("price").sum())),
        ("flow.group_by().agg(lit(1).sum())", lambda: flow.group_by().agg(lit(1).sum())),
        ('flow.group_by("kind", "kind")', lambda: flow.group_by("kind", "kind")),
        ('flow.group_by().agg(col("kind").sum())', lambda: flow.group_by().agg(col("kind").sum())),
        ('flow.group_by().agg(col("event_time").sum())', lambda: flow.group_by().agg(col("event_time").sum())),
        ('flow.group_by().agg(col("took").mean())', lambda: flow.group_by().agg(col("took").mean())),
        ('flow.group_by().agg(col("kind").quantile(0.5))', lambda: flow.group_by().agg(col("kind").quantile(0.5))),
        ('col("price").quantile(95)', lambda: col("price").quantile(95)),
        ('col("price").top_k(0, by="price")', lambda: col("price").top_k(0, by="price")),
        ('flow.group_by().agg(col("price").top_k(2, by="kind"))',
         lambda: flow.group_by().agg(col("price").top_k(2, by="kind"))),
        ('col("price").arg_max(5)', lambda: col("price").arg_max(5)),
    ],
    "windows and durations": [
        ('si.tumbling("event_time", "ten seconds")', lambda: si.tumbling("event_time", "ten seconds")),
        ('si.tumbling("event_time", "")', lambda: si.tumbling("event_time", "")),
        ('si.tumbling("event_time", "10")', lambda: si.tumbling("event_time", "10")),
        ('si.tumbling("event_time", "30m1h")', lambda: si.tumbling("event_time", "30m1h")),
        ('si.tumbling("event_time", "1 month")', lambda: si.tumbling("event_time", "1 month")),
        ('si.tumbling("event_time", "-5s")', lambda: si.tumbling("event_time", "-5s")),
        ('si.tumbling("event_time", timedelta(seconds=-5))',
         lambda: si.tumbling("event_time", timedelta(seconds=-5))),
        ('si.tumbling("event_time", "0s")', lambda: si.tumbling("event_time", "0s")),
        ('si.tumbling("event_time", 2.5)', lambda: si.tumbling("event_time", 2.5)),  # type: ignore[arg-type]
        ("si.tumbling(5, 10)", lambda: si.tumbling(5, 10)),  # type: ignore[arg-type]
        ('si.sliding("event_time", "10s", every="20s")', lambda: si.sliding("event_time", "10s", every="20s")),
        ('flow.group_by(si.tumbling("kind", "10s"))', lambda: flow.group_by(si.tumbling("kind", "10s"))),
        ('flow.group_by(si.tumbling("day", "1d"))', lambda: flow.group_by(si.tumbling("day", "1d"))),
        ('flow.group_by(si.tumbling("time", "10s"))', lambda: flow.group_by(si.tumbling("time", "10s"))),
        ('flow.group_by(si.tumbling("event_time", 10))', lambda: flow.group_by(si.tumbling("event_time", 10))),
        ('flow.group_by(si.tumbling("ad_id", "10s"))', lambda: flow.group_by(si.tumbling("ad_id", "10s"))),
        ('flow.group_by(si.tumbling("event_time", "10us"))',
         lambda: flow.group_by(si.tumbling("event_time", "10us"))),
        ('flow.group_by(si.tumbling("ad_id", 2**40))', lambda: flow.group_by(si.tumbling("ad_id", 2**40))),
        ('flow.group_by(si.sliding("hash", 10, every=5))',
         lambda: flow.group_by(si.sliding("hash", 10, every=5))),
        ('flow.group_by(si.tumbling(col("event_time").max(), "10s"))',
         lambda: flow.group_by(si.tumbling(col("event_time").max(), "10s"))),
        ('flow.group_by(si.tumbling("event_time", "10s"), si.tumbling("event_time", "1m"))',
         lambda: flow.group_by(si.tumbling("event_time", "10s"), si.tumbling("event_time", "1m"))),
        ('flow.group_by(w=si.tumbling("event_time", "10s"))',
         lambda: flow.group_by(w=si.tumbling("event_time", "10s"))),
        ('flow.group_by(si.tumbling("event_time", "10s"), window_end="kind")',
         lambda: flow.group_by(si.tumbling("event_time", "10s"), window_end="kind")),
        ('flow.with_watermark("kind", "2s")', lambda: flow.with_watermark("kind", "2s")),
        ('flow.with_watermark("event_time", "-2s")', lambda: flow.with_watermark("event_time", "-2s")),
        ('flow.select(x=col("event_time").dt.truncate("1us"))',
         lambda: flow.select(x=col("event_time").dt.truncate("1us"))),
    ],
    "joins and unions": [
        ("flow.join(ADS)", lambda: flow.join(ADS)),
        ('flow.join(ADS, on="ad_id", left_on="ad_id")', lambda: flow.join(ADS, on="ad_id", left_on="ad_id")),
        ("flow.join(ADS, on=[])", lambda: flow.join(ADS, on=[])),
        ('flow.join(ADS, left_on=["ad_id", "price"], right_on="ad_id")',
         lambda: flow.join(ADS, left_on=["ad_id", "price"], right_on="ad_id")),
        ('flow.join(ADS, on="campaign")', lambda: flow.join(ADS, on="campaign")),
        ('flow.join(ADS, on="kind")', lambda: flow.join(ADS, on="kind")),
        ('flow.join(ADS, on="ad_id", how="full")', lambda: flow.join(ADS, on="ad_id", how="full")),
        ('flow.join(ADS, on="ad_id", how="both")', lambda: flow.join(ADS, on="ad_id", how="both")),
        ('flow.join(ADS, on="ad_id", how="cross")', lambda: flow.join(ADS, on="ad_id", how="cross")),
        ('flow.join(ADS, left_on=col("ad_id") + 1, right_on="ad_id", how="right")',
         lambda: flow.join(ADS, left_on=col("ad_id") + 1, right_on="ad_id", how="right")),
        ('flow.join(ADS, left_on=["price", "price"], right_on=["price", "price"], how="outer")',
         lambda: flow.join(ADS, left_on=["price", "price"], right_on=["price", "price"], how="outer")),
        ('flow.join(ADS, left_on="ad_id", right_on="campaign")',
         lambda: flow.join(ADS, left_on="ad_id", right_on="campaign")),
        ('flow.join(ADS, left_on="hash", right_on="price")',
         lambda: flow.join(ADS, left_on="hash", right_on="price")),
        ('flow.rename({"ok": "price_right"}).join(ADS, on="ad_id")',
         lambda: flow.rename({"ok": "price_right"}).join(ADS, on="ad_id")),
        ('flow.join("ads.parquet", on="ad_id")', lambda: flow.join("ads.parquet", on="ad_id")),
        ("flow.union()", lambda: flow.union()),
        ("flow.union(ADS)", lambda: flow.union(ADS)),
        ('ads.union(ads.select("price", "campaign", "ad_id"))',
         lambda: si.from_arrow(ADS).union(si.from_arrow(ADS).select("price", "campaign", "ad_id"))),
        ('ads.union(ads.cast({"price": "float32"}))',
         lambda: si.from_arrow(ADS).union(si.from_arrow(ADS).cast({"price": "float32"}))),
    ],
    "data": [
        ("si.from_arrow(5)", lambda: si.from_arrow(5)),
        ('si.from_arrow({"x": [1, 2], "y": [1]})', lambda: si.from_arrow({"x": [1, 2], "y": [1]})),
        ('si.from_arrow({"x": 1})', lambda: si.from_arrow({"x": 1})),
        ('si.from_arrow({"x": "abc"})', lambda: si.from_arrow({"x": "abc"})),
        ('si.from_arrow({"x": [1, "a"]})', lambda: si.from_arrow({"x": [1, "a"]})),
        ('si.from_arrow({1: ["a"]})', lambda: si.from_arrow({1: ["a"]})),
        ("si.from_arrow({})", lambda: si.from_arrow({})),
        ('si.from_arrow([{"x": 1, "y": 2}, {"x": 3, "z": 4}])',
         lambda: si.from_arrow([{"x": 1, "y": 2}, {"x": 3, "z": 4}])),
        ('si.from_arrow([{"x": 1}, None])', lambda: si.from_arrow([{"x": 1}, None])),
        ('si.from_arrow([None, {"x": 1}])', lambda: si.from_arrow([None, {"x": 1}])),
        ('si.from_arrow([{"x": 1}, {"x": "a"}])', lambda: si.from_arrow([{"x": 1}, {"x": "a"}])),
        ("si.from_arrow([])", lambda: si.from_arrow([])),
        ('si.flow({"x": int}).collect({"x": ["a"]})', lambda: collect(si.flow({"x": int}), {"x": ["a"]})),
        ('si.flow({"x": int}).collect({"y": [1]})', lambda: collect(si.flow({"x": int}), {"y": [1]})),
        ("describe of a column called statistic", lambda: si.from_arrow({"statistic": [1]}).describe()),
        ("flow.write_parquet(5)", lambda: flow.write_parquet(5)),
        ('flow.write_csv("s3://bucket/x.csv")', lambda: flow.write_csv("s3://bucket/x.csv")),
        ('flow.head("kind")', lambda: flow.head("kind")),  # type: ignore[arg-type]
        ('si.from_arrow("file.parquet")', lambda: si.from_arrow("file.parquet")),
        ("si.from_arrow(a generator)", lambda: si.from_arrow(unread(BATCH))),
        ("si.from_arrow(flow)", lambda: si.from_arrow(flow)),
        ("si.from_arrow(an array)", lambda: si.from_arrow(pa.array([1, 2]))),
        ("si.from_arrow(no columns)", lambda: si.from_arrow(pa.table({}))),
        ("si.from_arrow(a column of half floats)",
         lambda: si.from_arrow(pa.table({"x": [1], "half": pa.array([None], pa.float16())}))),
        ("si.from_arrow(nulls that the schema rules out)",
         lambda: si.from_arrow(pa.table([[1, None]], schema=pa.schema([pa.field("x", pa.int64(), False)])))),
        ("si.from_batches([])", lambda: si.from_batches([])),
        ("si.from_batches(a generator)", lambda: si.from_batches(unread(BATCH))),
        ("si.from_batches(5, schema)", lambda: si.from_batches(5, BATCH.schema)),
        ("si.from_batches([a table])", lambda: si.from_batches([pa.table({"x": [1]})])),
        ("si.from_batches of two schemas",
         lambda: si.from_batches([BATCH, pa.record_batch({"x": ["a"]})])),
        ("a schema that changes at batch 1",
         lambda: collect(si.from_batches(unread(BATCH, pa.record_batch({"x": [1.5]})), BATCH.schema))),
        ("a column that is missing from batch 1",
         lambda: collect(si.from_batches(unread(BATCH, pa.record_batch({"y": [1]})), BATCH.schema))),
        ("a reader that raises midway",
         lambda: collect(si.from_batches(unread(BATCH, BATCH, fail=True), BATCH.schema))),
        ("a generator that gives something else", lambda: collect(si.from_batches(unread(BATCH, 5), BATCH.schema))),
        ("a generator read twice",
         lambda: [collect(once) for once in [si.from_batches(unread(BATCH), BATCH.schema)] * 2]),
        ("si.flow(5)", lambda: si.flow(5)),
        ("collect() of an unbound flow", lambda: collect(si.flow(BATCH.schema))),
        ("collect(data) of a bound flow", lambda: collect(si.from_arrow(BATCH), BATCH)),
        ("collect(data) of two unbound flows",
         lambda: collect(si.flow(BATCH.schema).join(si.flow(BATCH.schema), on="x"), BATCH)),
        ("collect(data) without the column", lambda: collect(si.flow({"y": int}), BATCH)),
        ("collect(data) with another type", lambda: collect(si.flow({"x": float}), BATCH)),
        ('flow.collect(memory="lots")', lambda: flow.collect(memory="lots")),
        ('flow.start(sink=..., every="soon")', lambda: flow.start(sink=si.to_memory(), every="soon")),
        ("flow.start(sink=..., every=5)", lambda: flow.start(sink=si.to_memory(), every=5)),
        ("flow.collect(workers=0)", lambda: flow.collect(workers=0)),
        ('flow.explain("wasm")', lambda: flow.explain("wasm")),
        ("si.flow(schema).explain(analyze=True)", lambda: si.flow(BATCH.schema).explain(analyze=True)),
    ],
    "rows, while a flow runs": [
        ('rows.select(y=col("x") * 4)', lambda: ROWS.select(y=col("x") * 4).collect()),
        ('rows.select(y=5 // col("x"))', lambda: ROWS.select(y=5 // col("x")).collect()),
        ('rows.select(y=-col("x") + (5 % col("x")))', lambda: ROWS.select(y=-col("x") + (5 % col("x"))).collect()),
        ('rows.cast({"x": "int8"})', lambda: ROWS.cast({"x": "int8"}).collect()),
        ('rows.cast({"s": "int64"})', lambda: ROWS.cast({"s": "int64"}).collect()),
        ('rows.group_by(k=col("x") + col("x"))',
         lambda: ROWS.group_by(k=col("x") + col("x")).agg(n=si.count()).collect()),
        ('rows.group_by().agg(total=col("x").sum())', lambda: ROWS.group_by().agg(total=col("x").sum()).collect()),
        ("map_batches of a function that raises", lambda: ROWS.map_batches(failing, ROWS.schema).collect()),
        ("map_batches of a function that gives a list", lambda: ROWS.map_batches(listed, ROWS.schema).collect()),
        ("map_batches that forgets a column",
         lambda: ROWS.map_batches(lambda batch: batch.select(["x"]), ROWS.schema).collect()),
        ('flow.collect(cpu="z80")', lambda: flow.select(x=col("ad_id") + 1).collect(cpu="z80")),
    ],
    "text, lists and structs": [
        ('col("kind").str.matches("a(")', lambda: col("kind").str.matches("a(")),
        ('col("kind").str.extract("[")', lambda: col("kind").str.extract("[")),
        ('col("kind").str.extract("(?<=a)b")', lambda: col("kind").str.extract("(?<=a)b")),
        ('col("kind").str.extract("a+")', lambda: col("kind").str.extract("a+")),
        ('col("kind").str.split_part("-", 0)', lambda: col("kind").str.split_part("-", 0)),
        ('col("kind").str.replace("", "a")', lambda: col("kind").str.replace("", "a")),
        ('flow.select(col("price").str.strip())', lambda: flow.select(col("price").str.strip())),
        ('nested.filter(col("tags") == "a")', lambda: NESTED.filter(col("tags") == "a")),
        ('nested.select(col("tags").str.len())', lambda: NESTED.select(col("tags").str.len())),
        ("nested.unnest()", lambda: NESTED.unnest()),
        ('nested.unnest("tags")', lambda: NESTED.unnest("tags")),
        ('nested.unnest("att")', lambda: NESTED.unnest("att")),
        ('nested.with_columns(lat="x").unnest("at")', lambda: NESTED.with_columns(lat="x").unnest("at")),
        ('flow.unnest("kind")', lambda: flow.unnest("kind")),
        ('nested.group_by("tags").agg(si.count())', lambda: NESTED.group_by("tags").agg(si.count())),
        ('nested.group_by("x").agg(col("tags").max())', lambda: NESTED.group_by("x").agg(col("tags").max())),
        ('nested.join(nested, on="at")', lambda: NESTED.join(NESTED, on="at")),
        ('nested.select(col("at").struct.field("lt"))', lambda: NESTED.select(col("at").struct.field("lt"))),
        ('nested.select(col("tags").struct.field("lat"))', lambda: NESTED.select(col("tags").struct.field("lat"))),
        ('nested.select(col("at").list.len())', lambda: NESTED.select(col("at").list.len())),
        ('nested.select(col("tags").list.get(1.5))', lambda: NESTED.select(col("tags").list.get(1.5))),  # type: ignore[arg-type]
        ('nested.select(col("nothing") + 1)', lambda: NESTED.select(col("nothing") + 1)),
        ('nested.explode("x")', lambda: NESTED.explode("x")),
        ('nested.explode("at")', lambda: NESTED.explode("at")),
        ('flow.explode("kind")', lambda: flow.explode("kind")),
        ('nested.explode("tag")', lambda: NESTED.explode("tag")),
        ('nested.select(col("at.lat"))', lambda: NESTED.select(col("at.lat"))),
        ('nested.select(x=when(col("x") > 1).then(col("tags")).otherwise(col("tags")))',
         lambda: NESTED.select(x=when(col("x") > 1).then(col("tags")).otherwise(col("tags")))),
        ('nested.sort("nothing")', lambda: NESTED.sort("nothing")),
        ('nested.sort("at")', lambda: NESTED.sort("at")),
        ('nested.group_by("x").agg(col("nothing").max())', lambda: NESTED.group_by("x").agg(col("nothing").max())),
        ('nested.group_by("x").agg(col("nothing").sum())', lambda: NESTED.group_by("x").agg(col("nothing").sum())),
        ('nested.distinct("nothing")', lambda: NESTED.distinct("nothing")),
        ('rows.select(col("s").cast(pa.timestamp("us")))',
         lambda: ROWS.select(t=col("s").cast(pa.timestamp("us"))).collect()),
        ('rows.select(col("s").str.strptime(pa.date32(), "%d.%m.%Y"))',
         lambda: ROWS.select(t=col("s").str.strptime(pa.date32(), "%d.%m.%Y")).collect()),
        ('col("local_time").dt.strftime("%Y" * 65)', lambda: col("local_time").dt.strftime("%Y" * 65)),
        ('flow.select(x=si.concat_str("kind", "-", "price"))',
         lambda: flow.select(x=si.concat_str("kind", "-", "price"))),
        ('col("local_time").dt.truncate("1mo")', lambda: col("local_time").dt.truncate("1mo")),
        ('rows.select(10 // (col("x") - col("x")))', lambda: ROWS.select(x=10 // (col("x") - col("x"))).collect()),
        ('flow.select(col("kind").try_mul(2))', lambda: flow.select(col("kind").try_mul(2))),
        ('rows.select((col("x") * (2**63 - 1)).try_add(1))',
         lambda: ROWS.select(x=(col("x") * (2**63 - 1)).try_add(1)).collect()),
    ],
}  # fmt: skip


def message(case: Callable[[], object]) -> str:
    with pytest.raises(si.ScaleinError) as caught:
        case()
    text = f"{type(caught.value).__name__}: {caught.value}"
    return re.sub(r"test_errors\.py:\d+", "test_errors.py:N", text)


def test_every_error(golden: Golden) -> None:
    entries = [f"## {topic}\n\n" + "\n\n".join(f"--- {wrote}\n{message(case)}" for wrote, case in cases)
               for topic, cases in CASES.items()]  # fmt: skip
    assert "\n\n\n".join(entries) == golden


def test_an_error_names_the_line_that_wrote_it() -> None:
    with pytest.raises(si.UnknownColumn) as caught:
        flow.filter(
            col("pric") > 1,
        )
    assert re.fullmatch(r"test_errors\.py:\d+", caught.value.facts["at"])


def test_an_error_of_a_reader_keeps_its_cause() -> None:
    with pytest.raises(si.BadData, match="batch 1") as caught:
        collect(si.from_batches(unread(BATCH, fail=True), BATCH.schema))
    assert isinstance(caught.value.__cause__, OSError)


def test_errors_can_be_pickled() -> None:
    with pytest.raises(si.ScaleinError) as caught:
        flow.filter(col("pric") > 1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.hint) == (si.UnknownColumn, str(caught.value), caught.value.hint)


def test_a_time_zone_is_no_type_error() -> None:
    aware = flow.filter(col("local_time") > datetime(2024, 5, 1, tzinfo=UTC))
    assert aware.columns == flow.columns
