"""A real cluster that loses workers, drivers and tasks: no row is lost or counted twice.

SCALEIN_CLUSTER_KILLS=20 kills that many workers and drivers more, at random moments of a stream.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scalein.spark.errors import SparkFailed
from scalein.spark.session import java_version
from scalein.spark.standalone import PATIENCE_S, Cluster, kill, until
from tests.spark.cluster_driver import write_events
from tests.spark.pythons import python_without_this_tree

KILLS = int(os.environ.get("SCALEIN_CLUSTER_KILLS", "0"))
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module", autouse=True)
def java() -> None:
    try:
        java_version()
    except SparkFailed as error:
        pytest.skip(error.what)


def with_events(folder: Path) -> Path:
    (folder / "marks").mkdir(parents=True)
    write_events(folder / "in")
    return folder


def driver(mode: str, url: str, folder: Path, python: str = sys.executable) -> subprocess.Popen[bytes]:
    with open(folder / "driver.log", "ab") as log:
        return subprocess.Popen([sys.executable, "-m", "tests.spark.cluster_driver", mode, url, str(folder)], cwd=ROOT,
                                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                env={**os.environ, "PYSPARK_PYTHON": python})


def driver_log(folder: Path) -> str:
    return (folder / "driver.log").read_text()


def test_workers_drivers_and_tasks_die(tmp_path: Path) -> None:
    """A task fails, one is speculated, a worker dies in a batch and one in a stream, the driver dies and is restarted,
    with executors to which it sends scalein."""
    folder = with_events(tmp_path)

    def count_marks(pattern: str) -> int:
        assert first.poll() is None, driver_log(folder)
        return len(list((folder / "marks").glob(pattern)))

    with Cluster(folder) as cluster:
        for _ in range(2):
            cluster.add_worker()
        first = driver("batch", cluster.url, folder)
        try:
            until("a slow task of run", lambda: count_marks("run-at-work-*"))
            cluster.kill_worker()
            cluster.add_worker()
            until("a batch of the stream", lambda: count_marks("stream-at-work-*") > 3)
            cluster.kill_worker()
            cluster.add_worker()
            before = count_marks("stream-at-work-*")
            until("another batch", lambda: count_marks("stream-at-work-*") > before + 1)
        finally:
            kill(first)
        assert "apply is right" in driver_log(folder)
        assert "run is right" in driver_log(folder)
        assert "start is right" not in driver_log(folder)
        (folder / "hiding").mkdir()
        second = driver("shipped", cluster.url, folder, python_without_this_tree(folder / "hiding"))
        try:
            assert second.wait(timeout=PATIENCE_S) == 0, driver_log(folder)
        finally:
            kill(second)
    assert "start is right" in driver_log(folder)
    assert {f"{name}-{what}" for name in ("apply", "shipped") for what in ("failed", "slow", "doubled")} <= {
        path.name for path in (folder / "marks").iterdir()}


@pytest.mark.skipif(KILLS == 0, reason="SCALEIN_CLUSTER_KILLS says how many")
def test_many_deaths(tmp_path: Path) -> None:
    chosen = random.Random(KILLS)
    kills = rounds = 0
    with Cluster(tmp_path) as cluster:
        for _ in range(2):
            cluster.add_worker()
        while kills < KILLS:
            rounds += 1
            folder = with_events(tmp_path / str(rounds))
            while True:  # the same stream, until a driver finishes
                running = driver("stream", cluster.url, folder)
                try:
                    while running.poll() is None:
                        time.sleep(chosen.uniform(5, 25))
                        if kills >= KILLS or running.poll() is not None:
                            continue
                        kills += 1
                        if chosen.random() < 0.5:
                            break
                        cluster.kill_worker()
                        cluster.add_worker()
                    else:
                        assert running.returncode == 0, driver_log(folder)
                        break
                finally:
                    kill(running)
            assert "start is right" in driver_log(folder)
