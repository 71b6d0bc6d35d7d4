"""The first minute: a new process, an import, and the answer of a small query; DuckDB and Polars beside it.

Each round starts a process for each tool, one after the other, and times it from outside: Python's own start, imports,
planning, compiling and running. The goals are 0.5 s with an empty cache of kernels and 0.35 s with a full one. Bytecode
is cached, as it is after `pip install`; the rows are in a file, because pyarrow imports pandas, where it is installed,
to make a table of Python's lists.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bench.race import time_s

ROOT = Path(__file__).parent.parent
ROUNDS = 9
ROWS = {"user": ["ann", "bob", "cat", "ann"] * 250, "price": [1.5, 2.5, 3.5, 4.5] * 250}
ANSWER = [["ann", 250, 1125.0], ["bob", 250, 625.0], ["cat", 250, 875.0]]  # of prices above 2

_TABLE = "import json, sys, pyarrow as pa\nevents = pa.ipc.open_file(sys.argv[1]).read_all()\n"
PROGRAMS = {
    "python": f"import json\nprint(json.dumps({ANSWER}))",
    "pyarrow": f"{_TABLE}print(json.dumps({ANSWER}))",
    "scalein": _TABLE + """
import scalein as si
from scalein import col
flow = si.from_arrow(events).filter(col("price") > 2).group_by("user").agg(n=si.count(), spent=col("price").sum())
print(json.dumps(sorted(list(row.values()) for row in flow.collect().to_pylist())))
""",
    "duckdb": _TABLE + """
import duckdb
found = duckdb.sql("select user, count(*), sum(price) from events where price > 2 group by user")
print(json.dumps(sorted(found.fetchall())))
""",
    "polars": """
import json, sys, polars as pl
from polars import col
events = pl.read_ipc(sys.argv[1])
frame = events.lazy().filter(col("price") > 2).group_by("user").agg(n=pl.len(), spent=col("price").sum())
print(json.dumps(sorted(frame.collect().rows())))
""",
}


@pytest.fixture
def workers() -> int:
    """All cores: a tool may start and load with as many threads as it likes."""
    return len(os.sched_getaffinity(0))


@pytest.fixture
def events(tmp_path: Path) -> Path:
    table, path = pa.table(ROWS), tmp_path / "events.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def first_answer(tool: str, events: Path) -> None:
    kernels, bytecode = events.parent / "kernels", events.parent / "bytecode"
    environment = {**os.environ, "SCALEIN_CACHE_DIR": str(kernels), "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-c", PROGRAMS[tool], str(events)], cwd=ROOT, check=True,
                          capture_output=True, text=True, env=environment)
    assert json.loads(done.stdout) == ANSWER


def race(benchmark: Any, machine: Mapping[str, object], events: Path, goal_ms: int, is_cold: bool) -> None:
    rival_s: dict[str, list[float]] = {tool: [] for tool in PROGRAMS if tool != "scalein"}

    def others() -> None:
        for tool, times in rival_s.items():
            times.append(time_s(lambda tool=tool: first_answer(tool, events)))  # type: ignore[misc]
        if is_cold:
            shutil.rmtree(events.parent / "kernels")

    for tool in PROGRAMS:
        first_answer(tool, events)
    benchmark.pedantic(lambda: first_answer("scalein", events), setup=others, rounds=ROUNDS)
    benchmark.extra_info.update(machine, goal_below_ms=goal_ms)
    if benchmark.stats is not None:
        benchmark.extra_info["median_ms"] = round(benchmark.stats.stats.median * 1e3)
    for tool, times in rival_s.items():
        benchmark.extra_info[f"{tool}_ms"] = round(statistics.median(times) * 1e3)


def bench_first_answer_cold(benchmark: Any, machine: Mapping[str, object], events: Path) -> None:
    """With an empty cache of kernels; goal: below 500 ms."""
    race(benchmark, machine, events, 500, is_cold=True)


def bench_first_answer_warm(benchmark: Any, machine: Mapping[str, object], events: Path) -> None:
    """With the cache of an earlier process; goal: below 350 ms."""
    race(benchmark, machine, events, 350, is_cold=False)
