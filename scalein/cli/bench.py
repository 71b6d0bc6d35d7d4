"""scalein bench SUITE: measure this machine with the Nexmark benchmark, or the migration of state.

`bench_migration.py` has `migration`. In `nexmark` each query runs as `collect` over the events in memory, by default
on one worker: first in a state in which its code is not compiled, then three times more, of which the best counts.
`--jobs` runs it as a job too, from its first row to its last. With `--duckdb` the same query runs in DuckDB, on as many
threads, and the rows are compared before anything is timed. Figures are rows of the streams that a query reads, in
millions a second.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import scalein as si
from scalein.cli import bench_migration
from scalein.connectors.sinks.simple import format_table
from scalein.errors import BadArgument, InternalError, ScaleinError, guess
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.nexmark import Query, Tables

ROUNDS = 3
BATCH_ROWS = 1 << 16  # of a job's source


@dataclass(frozen=True)
class Timing:
    """What one query took, in seconds; None is what was not run."""

    query: str
    rows: int
    first_s: float
    best_s: float
    job_s: float | None = None
    duckdb_s: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    suites = parser.add_subparsers(dest="suite", metavar="SUITE", required=True, title="suites")
    for name, about, add in (
            ("nexmark", "the queries of the Nexmark benchmark, over generated events", _add_nexmark_arguments),
            ("migration", "a keyed counter that is rescaled under load", bench_migration.add_arguments)):
        add(suites.add_parser(name, help=about, description=about[0].upper() + about[1:]))


def _add_nexmark_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=1_000_000, help="events to generate (default: 1,000,000)")
    parser.add_argument("--workers", type=int, default=1, help="threads, of DuckDB too (default: 1)")
    parser.add_argument("--queries", metavar="NAMES", help="some of the queries, for example q0,q5 (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the generator (default: 1)")
    parser.add_argument("--sql", action="store_true", help="run the SQL of the queries instead of the flows")
    parser.add_argument("--jobs", action="store_true", help="run each query as a job too")
    parser.add_argument("--duckdb", action="store_true", help="compare with DuckDB: the rows, then the time")


def run(args: argparse.Namespace) -> int:
    return bench_migration.run(args) if args.suite == "migration" else _run_nexmark(args)


def _run_nexmark(args: argparse.Namespace) -> int:
    from scalein import nexmark

    options = Options.make(workers=args.workers)
    if args.events < 1:
        raise BadArgument("--events must be above 0", found=str(args.events))
    if args.duckdb and find_spec("duckdb") is None:
        raise BadArgument("--duckdb needs DuckDB, which is not installed", hint="pip install duckdb")
    queries = _chosen(args.queries, nexmark.QUERIES)
    start_s = time.perf_counter()
    data = nexmark.tables(events=args.events, seed=args.seed)
    made_s = time.perf_counter() - start_s
    size = sum(table.nbytes for table in data)
    print(f"{args.events:,} events ({size / 1e6:,.0f} MB of Arrow), made in {made_s:.1f} s; "
          f"{options.workers} worker{'s' * (options.workers > 1)}", file=sys.stderr)
    timings, failed = [], 0
    for query in queries:
        print(f"{query.name}: {query.asks}", file=sys.stderr, flush=True)
        try:
            timings.append(measure(query, data, options.workers, sql=args.sql, job=args.jobs, duckdb=args.duckdb))
        except ScaleinError as error:
            failed += 1
            print(f"{query.name} failed: {error}", file=sys.stderr)
    print(report(timings))
    return 1 if failed else 0


def measure(query: Query, data: Tables, workers: int, *, sql: bool = False, job: bool = False,
            duckdb: bool = False) -> Timing:
    """Run a query in the ways asked for; with DuckDB, its rows are compared first."""
    from scalein import nexmark

    flow = nexmark.flow_of_sql(query.name, data) if sql else nexmark.flow(query.name, data)
    rows = sum(getattr(data, name).num_rows for name in query.inputs)
    first_s, found = _timed(lambda: flow.collect(workers=workers))
    duckdb_s = None
    if duckdb:
        connection = connect(data, workers)

        def theirs() -> pa.Table:
            return connection.sql(query.duckdb).to_arrow_table()

        check_same(connection, query.name, found, theirs())
        duckdb_s = min(_timed(theirs)[0] for _ in range(ROUNDS))
    del found
    best_s = min(_timed(lambda: flow.collect(workers=workers))[0] for _ in range(ROUNDS))
    job_s = min(run_job(query, data, workers) for _ in range(2)) if job else None
    return Timing(query.name, rows, first_s, best_s, job_s, duckdb_s)


def run_job(query: Query, data: Tables, workers: int) -> float:
    """Seconds of a job over the events, in batches, whose rows go nowhere."""
    from scalein import nexmark

    streams = nexmark.Streams(*(si.from_batches(table.to_batches(BATCH_ROWS), table.schema).with_watermark(
        "dateTime", nexmark.DELAY) for table in data))
    flow = nexmark.flow(query.name, streams)
    return _timed(lambda: flow.start(sink=si.to_callback(_discard), workers=workers).wait())[0]


def connect(data: Tables, threads: int) -> Any:
    """DuckDB with the tables of the benchmark."""
    import duckdb

    from scalein import nexmark

    connection = duckdb.connect(config={"threads": threads})
    for name, table in zip(data._fields, data, strict=True):
        connection.register(name, table)
    connection.register("side_input", nexmark.side_input())
    return connection


def check_same(connection: Any, name: str, ours: pa.Table, theirs: pa.Table) -> None:
    """Raises unless two results have the same rows, in any order; sums of floats may differ by their rounding."""
    ours_is, theirs_is = (fingerprint(connection, table.select(ours.column_names)) for table in (ours, theirs))
    same = len(ours_is) == len(theirs_is) and all(
        math.isclose(mine, other, rel_tol=1e-11) if isinstance(mine, float) else mine == other
        for mine, other in zip(ours_is, theirs_is, strict=True))
    if not same:
        raise InternalError(f"{name} of Nexmark differs from DuckDB", ours=ours_is, duckdb=theirs_is)


def fingerprint(connection: Any, table: pa.Table) -> tuple[int | float, ...]:
    """The number of rows, a sum of hashes over the columns that are exact, and sums of the others: also one in which
    each row has a weight by its hash.
    """
    exact, floats = [], []
    for field in table.schema:
        column = f't."{field.name}"'
        if pa.types.is_floating(field.type):
            floats.append(column)
        elif pa.types.is_timestamp(field.type):
            exact.append(f"epoch_us({column}::TIMESTAMP)")
        elif pa.types.is_integer(field.type) or pa.types.is_decimal(field.type):
            exact.append(f"{column}::BIGINT")
        else:
            exact.append(column)
    row_hash = f"hash({', '.join(exact)})" if exact else "0"
    sums = [f"coalesce(kahan_sum({column}{weight}), 0)::DOUBLE" for column in floats
            for weight in ("", f" * ({row_hash} % 97)::DOUBLE")]
    connection.register("fingerprinted", table)
    wanted = ", ".join(["count(*)", f"coalesce(sum({row_hash}::HUGEINT), 0)", *sums])
    (row,) = connection.sql(f"SELECT {wanted} FROM fingerprinted AS t").fetchall()
    connection.unregister("fingerprinted")
    return tuple(value if isinstance(value, float) else int(value) for value in row)


def report(timings: Sequence[Timing]) -> str:
    """The timings as a table for the terminal, with the geometric mean of the ratios to DuckDB."""
    columns: dict[str, list[object]] = {
        "query": [timing.query for timing in timings],
        "first, ms": [round(timing.first_s * 1e3) for timing in timings],
        "best, ms": [round(timing.best_s * 1e3, 1) for timing in timings],
        "M rows/s": [round(timing.rows / timing.best_s / 1e6, 2) for timing in timings],
    }
    if any(timing.job_s is not None for timing in timings):
        columns["job, M rows/s"] = [timing.job_s and round(timing.rows / timing.job_s / 1e6, 2) for timing in timings]
    ratios = [timing.duckdb_s / timing.best_s for timing in timings if timing.duckdb_s is not None]
    if ratios:
        columns["DuckDB, ms"] = [timing.duckdb_s and round(timing.duckdb_s * 1e3, 1) for timing in timings]
        columns["times DuckDB"] = [round(ratio, 2) for ratio in ratios]
    text = format_table(pa.table(columns))
    return text + (f"\n\ngeometric mean: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} times DuckDB"
                   if ratios else "")


def _chosen(names: str | None, queries: dict[str, Query]) -> list[Query]:
    if names is None:
        return list(queries.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = next((name for name in chosen if name not in queries), None)
    if unknown is not None:
        raise BadArgument(f"Nexmark has no query {unknown!r}", has=", ".join(queries), hint=guess(unknown, queries))
    return [queries[name] for name in chosen]


def _discard(batch: pa.RecordBatch) -> None:
    """Where the rows of a timed job go."""


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.perf_counter()
    result = work()
    return time.perf_counter() - start_s, result
