"""scalein demo: count ad views per campaign and 10 s window over generated events, and show the rate.

The query is that of the Yahoo streaming benchmark: keep the views, look up each ad's campaign, count per campaign and
window. A second, small flow over its result gives the table that is printed: one line a window.
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
from scalein.connectors.text import format_table
from scalein.errors import BadArgument
from scalein.flow import Flow
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


def run(args: argparse.Namespace) -> int:
    options = Options.make(workers=args.workers, engine=args.engine)
    if not 1 <= args.rows <= MOST_ROWS:
        raise BadArgument(f"--rows must be from 1 to {MOST_ROWS:,}", found=f"{args.rows:,}")
    events, made_s = _timed(lambda: make_events(args.rows))
    print(f"{args.rows:,} ad events over {SPAN_S} s, {events.nbytes / 1e6:,.0f} MB of Arrow, made in {made_s:.1f} s\n")

    flow = count_views(si.from_arrow(events), make_campaigns())
    views, first_s = _timed(lambda: flow.collect(workers=options.workers, engine=options.engine))
    runs_s = [_timed(lambda: flow.collect(workers=options.workers, engine=options.engine))[1] for _ in range(3)]
    answer = summarise(views).collect(engine=options.engine).sort_by("window")
    answer = answer.rename_columns(["window", "views", "busiest campaign", "its views"])
    print(format_table(answer, group_digits={"views", "its views"}))

    best_s, how = min(runs_s), "with compiling" if options.engine == "llvm" else "interpreted"
    workers = f"{options.workers} worker" + "s" * (options.workers > 1)
    print(f"\n{views.num_rows:,} counts of campaigns and windows. First run, {how}: {first_s * 1e3:,.0f} ms")
    print(f"Best of {len(runs_s)} more: {best_s * 1e3:,.1f} ms = {args.rows / best_s / 1e6:,.1f} million rows/s "
          f"({events.nbytes / best_s / 1e9:,.1f} GB/s) with {workers}")
    return 0


def count_views(events: Flow, campaigns: pa.Table) -> Flow:
    """Views per campaign and window of 10 s."""
    return (
        events.filter(col("event_type") == "view")
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
