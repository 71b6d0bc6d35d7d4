"""The ways in which a shape runs, each at random: batches, workers, rounds, partitions, crashes, rescales.

A way gives its rows, which must be those of `collect`, or the reason for which it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from math import inf
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.compute as pc

import scalein as si
from scalein.connectors.sinks.simple import MemorySink
from scalein.errors import BadArgument, ScaleinError
from scalein.exec.schedule import Schedule, using
from scalein.ir import ops
from scalein.ir.rewrite import walk_ops
from scalein.ir.windows import Session
from scalein.jobs.job import Job
from scalein.spark.streaming.coordinator import Coordinator
from scalein.state.hash_runs import MIGRATIONS
from scalein.testing import POINTS, Clock, Crashed, Stream, crash_at
from tests import oracle
from tests.conformance.shapes import DELAY_MS, SCHEMA, Shape
from tests.jobs.streams import Ledger, cut, rows_in
from tests.same import assert_same
from tests.schedules import RandomSchedule
from tests.spark.simulated import drain, fold_changes, start_stream, tasks_over


class Refused(Exception):
    """The shape cannot run this way; the error that says so."""

    def __init__(self, error: ScaleinError) -> None:
        super().__init__(error.what)
        self.reason = error.what


def check(shape: Shape, got: pa.Table, want: pa.Table) -> None:
    if shape.limit is None:
        assert_same(got, want, tolerance=1e-9)
    else:
        assert got.num_rows == want.num_rows


def by_collect(shape: Shape, table: pa.Table, random: Random, folder: Path) -> None:
    with using(RandomSchedule(random.randrange(1 << 30)) if random.random() < 0.5 else Schedule()):
        got = shape.flow(si.from_arrow(table)).collect(workers=random.randint(1, 3))
    check(shape, got, oracle.collect(shape.flow(si.from_arrow(table))))


def by_job(shape: Shape, table: pa.Table, random: Random, folder: Path, emit: str = "final") -> None:
    """A job of some lives, over a source of some partitions; all but the last life end with a stop or a crash."""
    parts = deal(table, random.randint(1, 2), random)
    batches = {f"p{k}": cut(part, [random.randint(1, 12), random.randint(1, 12)]) for k, part in enumerate(parts)}
    out = Ledger()

    def start(share: float) -> tuple[Job, int]:
        allowed = {name: round(share * len(some)) for name, some in batches.items()}
        flow = shape.flow(si.from_source(Stream(batches, allowed=allowed)))
        try:
            job = flow.start(sink=out, checkpoint=folder / "c", every="1ms", workers=random.randint(1, 3), emit=emit,
                             memory=random.choice([None, None, "1B"]))
        except BadArgument as error:
            raise Refused(error) from error
        return job, sum(batch.num_rows for name, count in allowed.items() for batch in batches[name][:count])

    shares = sorted(random.random() for _ in range(random.randint(0, 2)))
    with Clock() as clock, using(RandomSchedule(random.randrange(1 << 30))):
        for share in shares:
            crash = crash_at(random.choice(list(POINTS)), random.randint(1, 4))
            with suppress(Crashed), crash if random.random() < 0.5 else nullcontext():
                job, count = start(share)
                await_rows(job, count, clock)
                if random.random() < 0.5:
                    with suppress(BadArgument):  # it may have crashed meanwhile
                        job.scale(random.randint(1, 3))
                job.stop()
        job, _ = start(1.0)
        await_rows(job, inf, clock)
    want = shape.flow(si.from_arrow(table)).collect()
    check(shape, folded(out.table(), shape, want.schema), want)
    assert job.metrics()["late_rows"] == 0


def by_stream(shape: Shape, table: pa.Table, random: Random, folder: Path, emit: str = "final") -> None:
    """Micro-batches in some partitions, with repeated tasks, restarts of the driver, rescales and migrations."""
    batches = [deal(pa.Table.from_batches([batch]), random.randint(1, 3), random)
               for batch in cut(table, [random.randint(1, 25), random.randint(1, 25)])] + [[closing_row(table)]]
    found: list[pa.Table] = []

    def start() -> tuple[Coordinator, MemorySink]:
        sink = si.to_memory()
        try:
            return start_stream(shape.flow(si.flow(SCHEMA)), folder / "c", sink, emit=emit,
                                migration=random.choice(MIGRATIONS)), sink
        except BadArgument as error:
            raise Refused(error) from error

    coordinator, sink = start()
    for number, parts in enumerate(batches):
        if random.random() < 0.3:
            coordinator.close()
            found.append(sink.table())
            coordinator, sink = start()
        coordinator.partitions = random.choice([1, 2, 3, 7])
        how = tasks_over(parts, attempts=random.choice([1, 1, 2]), folder=random.choice([None, folder / "in"]))
        for _ in range(random.choice([1, 1, 2])):  # Spark may ask for a batch again
            coordinator.run_batch(number, "query", how, None)
    assert coordinator.totals.late_rows == 0
    if is_drained := random.random() < 0.5:
        drain(coordinator)
    coordinator.close()
    check_stream(shape, pa.concat_tables([*found, sink.table()]), table, is_drained)


def check_stream(shape: Shape, got: pa.Table, table: pa.Table, is_drained: bool = False) -> None:
    """A stream over a table and its closing row gave the rows of `collect`; where it was not drained, but for windows
    that are open.
    """
    last = closing_row(table)
    flow = shape.flow(si.from_arrow(pa.concat_tables([table, last])))
    want = flow.collect()
    got = folded(got, shape, want.schema)
    if is_drained and not any(map(_has_timers, walk_ops(flow.op))):
        check(shape, got, want)
        return
    if any(map(_waits, walk_ops(flow.op))) and "k" in want.column_names:
        got, want = (each.filter(pc.fill_null(pc.not_equal(each["k"], "z"), True)) for each in (got, want))  # it waits
    if "window_end" in want.column_names:  # the windows of the last row are open: some emit changes, others wait
        watermark = last["t"].cast(pa.int64())[0].as_py() - DELAY_MS * 1_000
        got, want = (each.filter(pc.less_equal(each["window_end"].cast(pa.int64()), watermark)) for each in (got, want))
    check(shape, got, want)


def _waits(op: ops.Op) -> bool:
    """Whether rows, or groups without a window, wait for the watermark."""
    is_ttl = isinstance(op, ops.Aggregate) and isinstance(op.window, Session) and op.window.is_ttl
    return is_ttl or isinstance(op, ops.StreamJoin | ops.Process | ops.Over)


def _has_timers(op: ops.Op) -> bool:
    """Whether a timer may be set for a time after the last row: it fires at the end of bounded input."""
    return isinstance(op, ops.Process) and op.body.has_timer


WAYS: dict[str, Callable[[Shape, pa.Table, Random, Path], None]] = {
    "`collect`": by_collect,
    "job": by_job,
    'job, `emit="changes"`': lambda *given: by_job(*given, emit="changes"),
    "Spark stream": by_stream,
    'Spark stream, `emit="changes"`': lambda *given: by_stream(*given, emit="changes"),
}


def await_rows(job: Job, count: float, clock: Clock) -> None:
    """Until a job has read so many rows, or has ended. A checkpoint is due at each step, and no partition gets idle."""
    while rows_in(job) < count and not job.wait(0.001):
        if clock.now() < 1:
            clock.advance("1ms")


def deal(table: pa.Table, count: int, random: Random) -> list[pa.Table]:
    """The rows in some parts, each in order; what keeps the watermark's promise does so in each part."""
    numbers = [random.randrange(count) for _ in range(table.num_rows)]
    return [table.filter(pa.array([number == k for number in numbers], pa.bool_())) for k in range(count)]


def closing_row(table: pa.Table) -> pa.Table:
    """A row so late that it closes the windows of all others."""
    latest = pc.max(table["t"].cast(pa.int64())).as_py() or 0
    return pa.table([["z"], [0], [0], [0.0], [latest + 1_000_000], [[]]], schema=SCHEMA)


def folded(rows: pa.Table, shape: Shape, schema: pa.Schema) -> pa.Table:
    """What all changes add up to; rows that are no changes as they are."""
    if "op" not in rows.column_names:
        return rows
    if shape.keys is not None:
        return pa.Table.from_pylist(fold_changes(rows, shape.keys), schema)
    assert set(rows["op"].to_pylist()) <= {"insert"}
    return rows.drop_columns("op")
