"""A standalone Spark cluster on the loopback, started from pyspark's own files: a master, and workers of one core each.

A worker is a process group with its executor: killed with -9 they end together, as a machine does. Each has an
address of its own, 127.0.0.2 and so on: Spark starts a second attempt of a task on another host only.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from scalein.spark.errors import SparkFailed

PATIENCE_S = 240.0  # a machine may be busy
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # a JVM that compiles less starts sooner
ANYWHERE = ("--port", "0", "--webui-port", "0")


def until(what: str, happened: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait for a condition; the error of a timeout names it."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise SparkFailed(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


class Cluster:
    """A context manager; `url` is the master's, `workers` are the running processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.workers: list[subprocess.Popen[bytes]] = []
        self._master = self._start("master", "127.0.0.1", "org.apache.spark.deploy.master.Master", *ANYWHERE)
        self.url = ""

    def __enter__(self) -> Self:
        def is_up() -> bool:
            found = re.search(r"Starting Spark master at (spark://\S+)", (self._folder / "master.log").read_text())
            self.url = found[1] if found else ""
            return bool(found)

        until("the master", is_up)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for process in (*self.workers, self._master):
            kill(process)

    def add_worker(self) -> None:
        self._count += 1
        name = f"worker-{self._count}"
        self.workers.append(self._start(name, f"127.0.0.{self._count + 1}", "org.apache.spark.deploy.worker.Worker",
                                        *ANYWHERE, "--cores", "1", "--memory", "1g", "--work-dir",
                                        str(self._folder / name), self.url))

    def kill_worker(self) -> None:
        """Kill the oldest one, with its executor and the executor's Pythons."""
        kill(self.workers.pop(0))

    def _start(self, name: str, host: str, *command: str) -> subprocess.Popen[bytes]:
        import pyspark

        home = os.path.dirname(pyspark.__file__)
        with open(self._folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [os.path.join(home, "bin", "spark-class"), command[0], "--host", host, *command[1:]], stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "SPARK_HOME": home, "SPARK_LOCAL_IP": host, "SPARK_DAEMON_MEMORY": "256m",
                     "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED,
                     "PYSPARK_PYTHON": sys.executable, "SPARK_NO_DAEMONIZE": "1"})


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
