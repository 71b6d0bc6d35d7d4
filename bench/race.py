"""Races: scalein and its rivals on the same data, in turns, so that a noisy neighbour meets all of them.

A ratio is the median over the rounds of (rival's time / our time in the same round): 1.0 is as fast, more is faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from bench.yardsticks import Columns


@dataclass(frozen=True)
class Race:
    """Times one query by pytest-benchmark and its rivals beside it; facts and ratios go to `extra_info`."""

    benchmark: Any  # pytest-benchmark's fixture has no types
    machine: Mapping[str, object]

    def __call__(self, ours: Callable[[], object], *, row_count: int, size_bytes: int, bound: str,
                 goals: Mapping[str, float] | None = None, rounds: int = 7,
                 before: Callable[[], object] | None = None, **rivals: Callable[[], object]) -> None:
        """Run the race. `bound` says what limits it; `goals` are the ratios we want, by rival; `before` opens a round,
        untimed."""
        rival_s: dict[str, list[float]] = {name: [] for name in rivals}

        def run_rivals() -> None:
            if before is not None:
                before()
            for name, rival in rivals.items():
                rival_s[name].append(time_s(rival))

        self.benchmark.pedantic(ours, setup=run_rivals, rounds=rounds)
        info = self.benchmark.extra_info
        info.update(self.machine, row_count=row_count, size_bytes=size_bytes, bound=bound)
        if self.benchmark.stats is None:  # --benchmark-disable
            return
        our_s = self.benchmark.stats.stats.data
        info.update(million_rows_per_s=round(row_count / min(our_s) / 1e6, 1),
                    gb_per_s=round(size_bytes / min(our_s) / 1e9, 2))
        for name, times_s in rival_s.items():
            ratio = statistics.median(theirs / own for theirs, own in zip(times_s, our_s, strict=True))
            info[f"ratio_to_{name}"] = round(ratio, 3)
            info[f"{name}_million_rows_per_s"] = round(row_count / min(times_s) / 1e6, 1)
            if goals and name in goals:
                info[f"goal_to_{name}"] = goals[name]


def time_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = work()
    taken = time.perf_counter() - start
    del result  # freeing it is not part of the time, for nobody
    return taken


def duck(query: str, threads: int, **tables: pa.Table) -> Callable[[], pa.Table]:
    """A DuckDB query over Arrow tables, ready to run."""
    connection = duckdb.connect(config={"threads": threads})
    for name, table in tables.items():
        connection.register(name, table)
    return lambda: connection.sql(query).to_arrow_table()


def assert_same(got: pa.Table, want: pa.Table | Columns, by: tuple[str, ...], atol: float = 0.0) -> None:
    """The columns of `want` are in `got`, row for row, once both are sorted by `by`; () takes them as they come.

    Floats may differ by the rounding of sums, and by `atol` where differences of large numbers are small ones.
    """
    want = want if isinstance(want, pa.Table) else pa.table(want)
    got = got.select(want.column_names)
    want = want.cast(got.schema)
    assert got.num_rows == want.num_rows, (got.num_rows, want.num_rows)
    if by:
        got, want = (table.sort_by([(name, "ascending") for name in by]) for table in (got, want))
    for field in got.schema:
        ours, theirs = got[field.name], want[field.name]
        if pa.types.is_floating(field.type):
            np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), rtol=1e-12, atol=atol,
                                       err_msg=field.name)
        else:
            assert ours.equals(theirs), f"{field.name} differs"
