"""The golden fixture (text compared with a file that `pytest --update-golden` writes), the seed of examples, which may
take any time, syncs that do not wait, and the Spark session that all tests of a process share.
"""

from __future__ import annotations

import difflib
import gc
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, core, settings

from tests.comparisons import COMPARISONS

_GOLDEN = Path(__file__).parent / "golden"

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")  # how long an example takes fails no test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what tests give into tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    """Random examples differ from run to run; all of a run's come from one seed, which its header shows."""
    if config.getoption("--hypothesis-seed") is None:
        seed = getattr(config, "workerinput", {}).get("examples_seed") or random.randrange(1 << 32)
        core.global_force_seed = config.option.hypothesis_seed = seed


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The workers of xdist have the seed of the run."""
    node.workerinput["examples_seed"] = node.config.option.hypothesis_seed


def pytest_collection_finish() -> None:
    """Modules and tests live until the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else DuckDB reports at exit that its own objects are left


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["comparisons"] = dict(COMPARISONS.count)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What the workers of xdist compared."""
    COMPARISONS.count.update(getattr(node, "workeroutput", {}).get("comparisons", {}))


def pytest_report_header(config: pytest.Config) -> str:
    return f"random examples: repeat them with --hypothesis-seed={config.getoption('--hypothesis-seed')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What differential tests really compared."""
    count = COMPARISONS.count
    if COMPARISONS.total:
        terminalreporter.write_line(f"compared: engine = oracle {count['oracle']:,} times, oracle = DuckDB "
                                    f"{count['duckdb']:,} times; not translated for DuckDB: {count['untranslated']:,}")


class Golden:
    """The expected text of a test: `assert dump(op) == golden`. One comparison a test."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, path: Path, update: bool) -> None:
        self.path = path
        self._update = update

    @property
    def text(self) -> str | None:
        """What the file holds, without the newline at its end; None if there is no file yet."""
        return self.path.read_text(encoding="utf-8").removesuffix("\n") if self.path.exists() else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return NotImplemented
        if self._update and other != self.text:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(other + "\n", encoding="utf-8")
        return other == self.text

    def __repr__(self) -> str:
        return f"<golden {self.path.parent.name}/{self.path.name}>"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """The text in tests/golden/<test file>/<test name>.txt."""
    name = re.sub(r"[^\w.=-]+", "_", request.node.name).strip("_")
    update = bool(request.config.getoption("--update-golden"))
    return Golden(_GOLDEN / Path(request.node.path).stem / f"{name}.txt", update)


@pytest.fixture(scope="session", autouse=True)
def real_syncs() -> Iterator[dict[str, Callable[[int], None]]]:
    """The functions that wait for the disk; tests do not wait. The kernel holds what was written, and no test cuts its
    power: those of power cuts have disks of their own. `fstat` refuses the handles that a sync would refuse.
    """
    with pytest.MonkeyPatch.context() as patch:
        real = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
        for name in real:
            patch.setattr(os, name, os.fstat)
        yield real


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """local[2], four shuffle partitions, times in UTC. One for each test process: it takes some seconds to start."""
    from scalein.spark.errors import SparkFailed
    from scalein.spark.session import java_version, session
    from scalein.spark.standalone import SHORT_LIVED

    try:
        java_version()
    except SparkFailed as error:
        pytest.skip(error.what)
    started = session(cores=2, config={"spark.sql.shuffle.partitions": 4, "spark.driver.extraJavaOptions": SHORT_LIVED})
    yield started
    started.stop()


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """A line by line difference, golden text first, where text is compared with a golden file."""
    golden, text = (left, right) if isinstance(left, Golden) else (right, left)
    if op != "==" or not isinstance(golden, Golden) or not isinstance(text, str):
        return None
    if golden.text is None:
        return [f"{golden} does not exist: run pytest with --update-golden and read what it writes", *text.splitlines()]
    lines = difflib.unified_diff(golden.text.splitlines(), text.splitlines(), "golden", "now", lineterm="", n=100)
    return [f"text differs from {golden}; --update-golden accepts it", *lines]
