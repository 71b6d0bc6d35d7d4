"""Benchmarks run alone on their cores, know their machine, and print their ratios at the end.

`pytest bench` runs all; `--bench-rows` makes them smaller. pytest-benchmark keeps everything with --benchmark-json.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.race import Race
from bench.yardsticks import compile_yardsticks
from scalein.kernels.machine import copy_bandwidth, describe_cpu

CORES = sorted(os.sched_getaffinity(0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bench-rows", type=int, default=20_000_000, help="rows of the large inputs")
    parser.addoption("--bench-seconds", type=float, default=30.0, help="how long state under snapshots or spill is run")
    parser.addoption("--bench-scale", type=float, default=1.0, help="scale factor of TPC-H")
    parser.addoption("--bench-folder", help="where generated files are kept for the next run")
    parser.addoption("--bench-cgroup", type=Path, help="a memory cgroup (v1 or v2) that may get children: state stores "
                     "with a memory limit run in one each, and are measured by it")


@pytest.fixture(scope="session")
def rows(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--bench-rows"))


@pytest.fixture(scope="session")
def seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--bench-seconds"))


@pytest.fixture
def workers() -> int:
    """Threads of the benchmark; benchmarks that scale parametrize this name."""
    return 1


@pytest.fixture(autouse=True)
def own_cores(workers: int) -> Iterator[None]:
    """As many cores as workers for every thread of this process: one worker cannot borrow a second core."""
    if workers > len(CORES):
        pytest.skip(f"needs {workers} cores")
    _pin(set(CORES[:workers]))
    yield
    _pin(set(CORES))


def _pin(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):  # affinity belongs to a thread; pools of earlier runs have theirs
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it ended in between


@pytest.fixture(scope="session")
def machine() -> dict[str, object]:
    """Facts without which a figure means nothing."""
    return {
        "cpu": describe_cpu(),
        "cores": len(CORES),
        "python": platform.python_version(),
        "copy_gb_per_s": round(copy_bandwidth() / 1e9, 1),
    }


@pytest.fixture
def race(benchmark: Any, machine: dict[str, object]) -> Race:
    return Race(benchmark, machine)


@pytest.fixture(scope="session")
def c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The C yardsticks, compiled for this machine."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the C yardsticks need a C compiler")
    return compile_yardsticks(Path(tmp_path_factory.mktemp("yardsticks")), compiler)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Rates and ratios, a line each: pytest-benchmark's own table has times only."""
    session = getattr(config, "_benchmarksession", None)
    measured = [bench for bench in getattr(session, "benchmarks", []) if bench.extra_info]
    if not measured:
        return
    terminalreporter.section("rates and ratios (rival's time / ours)")
    for bench in measured:
        info = bench.extra_info
        facts = [f"{key.replace('_', ' ')} {info[key]}" for key in info if key.endswith(("_per_s", "_ms", "_us", "_mb"))
                 and not key.startswith("copy_")]
        for key in [key for key in info if key.startswith("ratio_to_")]:
            goal = info.get(key.replace("ratio_to_", "goal_to_"))
            note = "" if goal is None else f" (goal {goal}{'' if info[key] >= goal else ', MISSED'})"
            facts.append(f"{key.replace('_', ' ')} {info[key]}{note}")
        terminalreporter.write_line(f"{bench.name:<48} {'; '.join(facts)}")
    for name, ratios in _of_queries(measured).items():
        terminalreporter.write_line(f"{name:<48} geometric mean of {len(ratios)} ratios to the fastest rival "
                                    f"{statistics.geometric_mean(ratios):.3f}")


def _of_queries(measured: list[Any]) -> dict[str, list[float]]:
    """The ratios to the fastest rival of benchmarks that are run for several queries, by benchmark."""
    found: dict[str, list[float]] = {}
    for bench in measured:
        ratios = [value for key, value in bench.extra_info.items() if key.startswith("ratio_to_")]
        if bench.param is not None and ratios:
            found.setdefault(bench.name.partition("[")[0], []).append(min(ratios))
    return {name: ratios for name, ratios in found.items() if len(ratios) > 1}
