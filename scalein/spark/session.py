"""A Spark session for people without one: this machine, this interpreter, quiet.

Spark's workers run `python3` of the PATH unless they are told otherwise, which is rarely the one with the packages;
the JVM greets with half a screen of warnings, keeps two hundred shuffle partitions for two cores, and a missing Java is
told as "gateway process exited". Here: PYSPARK_PYTHON is this interpreter, Java is looked at before it is started, what
the JVM writes while it starts is kept back and shown only if it fails, and a failing task is told once, by the error
that Python gets, and not by the log as well (`spark.sparkContext.setLogLevel("WARN")` brings the log back).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scalein.options import granted_cores
from scalein.spark.errors import SparkFailed, in_our_words

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

LEAST_JAVA = 17  # of Spark 4
MOST_MEMORY_MB, LEAST_MEMORY_MB = 4096, 1024
_GET_JAVA = ("install one (Debian, Ubuntu: apt install openjdk-17-jre-headless; conda: conda install openjdk=17), or "
             "set JAVA_HOME")


def session(cores: int | None = None, config: Mapping[str, object] | None = None) -> SparkSession:
    """The Spark session that is active, or a new one on this machine, on `cores` cores (default: all that we may use).

    `config` adds Spark settings, or replaces ours. Of a session that is there already only SQL settings can change.
    """
    settings = {key: _text(value) for key, value in (config or {}).items()}
    quieten_pandas()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    is_elsewhere = "SPARK_REMOTE" in os.environ or "spark.remote" in settings
    if not is_elsewhere and SparkContext._active_spark_context is None:
        java_version()
        conf = SparkConf(loadDefaults=False)
        conf.setAll([*{**_defaults(cores or granted_cores(), settings.get("spark.master")), **settings}.items()])
        _start(conf)
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    with in_our_words():
        return builder.getOrCreate()


def java_version() -> int:
    """Java's version, of the one that Spark would start; an error that says what to do if Spark cannot use it."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which(os.path.join(home, "bin", "java")) if home else shutil.which("java")
    if path is None:
        looked = f"JAVA_HOME is {home}, and has no bin/java" if home else "no java on the PATH, JAVA_HOME is not set"
        raise SparkFailed(f"Spark needs Java {LEAST_JAVA} or newer, and there is none", found=looked, hint=_GET_JAVA)
    try:
        said = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60).stderr
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    number = re.search(r'version "(?:1\.)?(\d+)', said)
    if number is None or int(number[1]) < LEAST_JAVA:
        raise SparkFailed(f"Spark needs Java {LEAST_JAVA} or newer", found=f"{path}: {said.strip().splitlines()[:1]}",
                          hint=_GET_JAVA)
    return int(number[1])


def quieten_pandas() -> None:
    """Every mapInArrow warns that pandas 3 is new to Spark; neither mapInArrow nor we give it any pandas."""
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)


def _defaults(cores: int, master: str | None) -> dict[str, str]:
    """Settings of a local session; of another master only what is true anywhere."""
    common = {
        "spark.app.name": "scalein",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "FATAL",
        "spark.sql.session.timeZone": "UTC",  # as everywhere in scalein
        "spark.sql.execution.arrow.pyspark.enabled": "true",  # toPandas and createDataFrame
    }
    if master is not None and not master.startswith("local"):
        return common
    return {
        **common,
        "spark.master": f"local[{cores}]",
        "spark.driver.host": "127.0.0.1",  # a machine's own name need not resolve
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": f"{_driver_memory_mb()}m",  # executors of a local session live in the driver
        "spark.ui.enabled": "false",
        # TCP keeps small messages back for 40 ms and more (delayed acknowledgements), some in every task of Python's.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.shuffle.partitions": str(2 * cores),
    }


def _text(setting: object) -> str:
    return str(setting).lower() if isinstance(setting, bool) else str(setting)


def _driver_memory_mb() -> int:
    """A quarter of the machine's memory, within limits: the kernels' is Python's, not the JVM's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return min(MOST_MEMORY_MB, max(LEAST_MEMORY_MB, total // 4))


def _start(conf: SparkConf) -> None:
    """A SparkContext, with a JVM if there is none yet."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    said = _Said()
    try:
        with in_our_words():
            gateway = SparkContext._gateway
            if gateway is None:
                gateway = launch_gateway(conf, {"stderr": said.write_to})  # type: ignore[no-untyped-call]
            said.close_ours()
            SparkContext(conf=conf, gateway=gateway)
    except SparkFailed:
        raise
    except Exception as error:
        raise SparkFailed("Spark did not start", found=said.reason() or str(error).splitlines()[0],
                          hint=_START_HINTS.get(said.hint())) from error
    finally:
        said.close_ours()
        said.pass_on()


_START_HINTS = {
    "jdk.incubator.vector": "this Java lacks a module that Spark 4 wants; " + _GET_JAVA,
    "UnsupportedClassVersionError": "this Java is too old; " + _GET_JAVA,
    "": None,
}


class _Said:
    """What the JVM writes to stderr: kept while it starts, passed on afterwards."""

    def __init__(self) -> None:
        read_from, self.write_to = os.pipe()
        self._lines: deque[str] = deque(maxlen=200)
        self._is_passing = False
        self._is_ours = True
        self._thread = threading.Thread(target=self._read, args=(read_from,), name="scalein-spark-stderr", daemon=True)
        self._thread.start()

    def close_ours(self) -> None:
        """Close our end for writing: the JVM has its own by now."""
        if self._is_ours:
            self._is_ours = False
            os.close(self.write_to)

    def pass_on(self) -> None:
        self._is_passing = True

    def reason(self) -> str:
        """The line that tells most of why there is no JVM: the first that speaks of an error."""
        self._thread.join(timeout=1)  # it ends when the JVM has
        lines = [line.strip() for line in self._lines if line.strip()]
        return next((line for line in lines if re.search(r"error|exception|not set|cannot|could not", line, re.I)),
                    lines[-1] if lines else "")

    def hint(self) -> str:
        text = "".join(self._lines)
        return next(sign for sign in _START_HINTS if sign in text)

    def _read(self, read_from: int) -> None:
        with open(read_from, encoding="utf-8", errors="replace") as file:
            for line in file:
                if self._is_passing:
                    print(line, end="", file=sys.stderr, flush=True)
                else:
                    self._lines.append(line)
