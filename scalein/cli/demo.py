"""scalein demo: count ad views per campaign and 10 s window over generated events, here and inside Spark.

The query is that of the Yahoo streaming benchmark: keep the views, look up each ad's campaign, count per campaign and
window. First it runs on this machine, over all events at once. Then the same flow runs over the same events as a stream
inside Spark (`demo_spark.py`), and must give the same rows. A second, small flow over its result gives the table that
is printed: one line a window.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pyarrow as pa

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.cli import demo_spark
from scalein.connectors.sinks.text import format_table
from scalein.errors import BadArgument
from scalein.options import Options

ADS, CAMPAIGNS, SPAN_S, SEED = 1_000, 100, 100, 7
START_MS = 1_700_000_000_000
MOST_ROWS = 1_000_000_000

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=20_000_000, help="events to generate (default: 20,000,000)")
    parser.add_argument("--workers", type=int, default=None, help="threads (default: the cores this process may use)")
    parser.add_argument("--engine", choices=("llvm", "interp"), default="llvm",
                        help="interp: the slow reference interpreter, for few rows")
    parser.add_argument("--no-spark", action="store_true", help="leave out the second half, a stream inside Spark")


def run(args: argparse.Namespace) -> int:
    options = Options.make(workers=args.workers, engine=args.engine)
    if not 1 <= args.rows <= MOST_ROWS:
        raise BadArgument(f"--rows must be from 1 to {MOST_ROWS:,}", found=f"{args.rows:,}")
    events, made_s = _timed(lambda: make_events(args.rows))
    print(f"{args.rows:,} ad events over {SPAN_S} s, {events.nbytes / 1e6:,.0f} MB of Arrow, made in {made_s:.1f} s\n")

    campaigns = make_campaigns()
    flow = count_views(si.from_arrow(events), campaigns)
    views, first_s = _timed(lambda: flow.collect(workers=options.workers, engine=options.engine))
    runs_s = [_timed(lambda: flow.collect(workers=options.workers, engine=options.engine))[1] for _ in range(3)]
    print(as_text(views, options.engine))

    best_s, how = min(runs_s), "with compiling" if options.engine == "llvm" else "interpreted"
    workers = f"{options.workers} worker" + "s" * (options.workers > 1)
    print(f"\n{views.num_rows:,} counts of campaigns and windows. First run, {how}: {first_s * 1e3:,.0f} ms")
    print(f"Best of {len(runs_s)} more: {best_s * 1e3:,.1f} ms = {args.rows / best_s / 1e6:,.1f} million rows/s "
          f"({events.nbytes / best_s / 1e9:,.1f} GB/s) with {workers}", flush=True)
    if args.no_spark or options.engine == "interp":
        return 0
    missing = demo_spark.what_it_needs()
    if missing is not None:
        print(f"\n{missing}")
    else:
        rows, words = demo_spark.stream(events, lambda arriving: count_views(arriving, campaigns), views)
        print(f"\n{as_text(rows, options.engine)}\n\n{words}")
    return 0


def count_views(events: Flow, campaigns: pa.Table) -> Flow:
    """Views per campaign and window of 10 s."""
    return (
        events.with_watermark("event_time", "2s")  # a stream's windows close when time has passed them by this much
        .filter(col("event_type") == "view")
        .join(campaigns, on="ad_id")
        .group_by("campaign_id", si.tumbling("event_time", "10s"))
        .agg(views=si.count())
    )


def summarise(views: pa.Table) -> Flow:
    """One row a window: all views, the busiest campaign, and its views."""
    return (
        si.from_arrow(views)
        .group_by(window="window_start")
        .agg(views=col("views").sum(), busiest=col("campaign_id").arg_max("views"), most=col("views").max())
    )


def as_text(views: pa.Table, engine: str) -> str:
    """The summary as a table for the terminal, in order of time."""
    answer = summarise(views).collect(engine=engine).sort_by("window")
    answer = answer.rename_columns(["window", "views", "busiest campaign", "its views"])
    return format_table(answer, group_digits={"views", "its views"})


def make_events(rows: int) -> pa.Table:
    """Events in order of time but for some 50 ms of jitter; every 10 s another ad is shown more than the rest."""
    rng = np.random.default_rng(SEED)
    passed_ms = np.arange(rows, dtype=np.int64) * (SPAN_S * 1000 - 50) // rows
    ads = rng.integers(0, ADS, rows, dtype=np.int32)
    promoted = (passed_ms // 10_000 * 37 % ADS).astype(np.int32)
    ads = np.where(rng.random(rows, dtype=np.float32) < 0.05, promoted, ads)
    times = START_MS + passed_ms + rng.integers(0, 50, rows, dtype=np.int16)
    kinds = pa.DictionaryArray.from_arrays(rng.integers(0, 3, rows, dtype=np.int8), ["view", "click", "purchase"])
    return pa.table({"event_time": pa.array(times).cast(pa.timestamp("ms")), "ad_id": ads, "event_type": kinds})


def make_campaigns() -> pa.Table:
    """Which campaign each ad belongs to: ten ads each, shuffled."""
    campaign = np.random.default_rng(SEED).permutation(ADS).astype(np.int32) // (ADS // CAMPAIGNS)
    return pa.table({"ad_id": np.arange(ADS, dtype=np.int32), "campaign_id": campaign})


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start
